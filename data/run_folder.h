// The run folder: its name, its lock, log.txt (all that is printed), log.jsonl, config.json and the tokenizer's files.
// Ranks other than 0 have `quiet` set, and print and write nothing. A function that returns false has written a
// sentence into `error`.
#pragma once
#include "json.h"
#include "options.h"
#include "sampling.h"
C_LINKAGE_BEGIN

enum { RUN_PATH_BYTES = 4096 };

// The state of a run that a checkpoint keeps beside weights and optimizer states.
typedef struct {
    int64_t step, sequences;        // optimizer steps done; sequences consumed, which is the data position
    int64_t data_tokens;            // of the training data: their number decides the order
    int64_t data_crc, val_crc;      // checksums of training and validation data
    int64_t skipped, skipped_last;  // steps that changed nothing (--on-nonfinite): all, and the latest ones in a row
    double best_val;                // infinite before the first validation
    double last_norm;               // of the last step's gradients, for --clip-by last; 0: there was none
    int64_t tokens;                 // of those sequences; not stored
    int64_t rise_step;              // of Schedule
    double rise_lr;
    int64_t parts_left;  // layers that kept their weights in a step because their gradients were not finite
    int64_t saturated;   // elements that were too large for their fp8 codes
} RunState;

typedef struct {
    char path[RUN_PATH_BYTES];  // "" until run_folder_make
    bool quiet;
    bool held;       // locked against other processes, by run_folder_hold
    double started;  // seconds_now() when the run began, for time_s
    FILE* text;      // log.txt: what the terminal shows; in memory until the folder exists
    char* banner;    // that memory
    size_t banner_bytes;
    FILE* log;                             // log.jsonl
    char last_checkpoint[RUN_PATH_BYTES];  // "" while there is none
    const OptionTable* table;              // the run's options, which are read by name
    void* fields;                          // their values
    const char* sources[3];  // folders that may have a tokenizer: the checkpoint's, the model's, the data's, or ""
    const char* taken;       // paths that a resumed checkpoint names and that were not typed; NULL: none
    RunState state;
    Tokenizer* tokenizer;  // NULL where there is none
    SpecialTokens special;
    Json* config;  // config.json of the model or checkpoint that the run began with, or NULL
    bool samples;  // the tokenizer fits the model
    Prompts prompts;
    char error[DATA_ERROR_BYTES];  // the sentence about what has failed
} RunFolder;

// Options by name.
const char* run_text(const RunFolder* run, const char* option);
long long run_int(const RunFolder* run, const char* option);
double run_real(const RunFolder* run, const char* option);
bool run_saves_states(const RunFolder* run);  // --save

// Locks `folder` against other processes of this machine, if the file system has locks; false if one holds it already.
bool run_folder_hold(RunFolder* run, const char* folder, char* error);
// Checks, before a checkpoint is chosen, that the folder `run` ("": none is named) is free for what --resume says. If
// the run continues in it, or in the folder that `resume` names, this process holds that folder.
bool run_folder_begin(RunFolder* folder, const char* run, const char* resume, bool dry_run, char* error);
// Checks, before run_folder_make, that data and weights have the same tokenizer, and that the tasks of --eval and the
// prompts of --prompt-file can be opened.
bool run_folder_possible(RunFolder* run, bool bytes);
// Makes the folder that --run names, or runs/DATE_TIME_MODEL (_2, _3, ... if that exists) and sets --run to it, with
// config.json, log.txt, log.jsonl and copies of the tokenizer's files. Opens the tokenizer and the prompts, and checks
// the tasks of --eval. `checkpoint` is the state.json to continue from, or NULL. If the tokenizer does not fit a model
// of `vocabulary` tokens, or bytes, a line says so and --sample-every becomes 0.
bool run_folder_make(RunFolder* run, const Json* checkpoint, bool bytes, int vocabulary);
void run_folder_close(RunFolder* run);

// Prints on the terminal and into log.txt, with text_disarm.
__attribute__((format(printf, 2, 3))) void run_say(RunFolder* run, const char* format, ...);
// Prints the commands to type after a run: resume or sample, and plot if the plot can be drawn.
void run_say_next(RunFolder* run, bool stopped);

// Returns the path of the last checkpoint, or "none".
const char* run_last_checkpoint(const RunFolder* run);
// Returns what to type after --resume to continue from the last checkpoint.
const char* run_resume_words(const RunFolder* run);
// Returns whether a signal, or a file called `save` in the run folder, asks for a checkpoint. Removes that file.
bool run_folder_asks_save(RunFolder* run);

// Writes a line of log.jsonl: {"type": ..., "step": ..., "tokens": ..., "time_s": ..., NAME: value, ...}. Values that
// are not finite are null, and "nonfinite" is then true. False if it cannot be written.
bool run_log(RunFolder* run, const char* type, int count, const char* const* names, const double* values);
// Writes the first line: the program; where, when and how it was started; all options; sizes of the model and tokens.
void run_log_config(RunFolder* run, const char* device, int ranks, int64_t parameters, double bytes_per_token);
// Writes a line of this type with other members, which are given as JSON.
bool run_log_members(RunFolder* run, const char* type, const char* members);

C_LINKAGE_END
