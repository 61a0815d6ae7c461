// The run folder: who may train in it, its name, what is printed (and kept in log.txt), log.jsonl, config.json, and the
// tokenizer's files in it. On ranks other than 0 `quiet` is true and nothing is printed or written. A function that
// returns false has written a sentence into `error`.
#pragma once
#include "json.h"
#include "options.h"
#include "sampling.h"
C_LINKAGE_BEGIN

enum { RUN_PATH_BYTES = 4096 };

// The state from which a run goes on, beside weights and optimizer states.
typedef struct {
    int64_t step, sequences;        // optimizer steps done; sequences consumed, which is the data position
    int64_t data_tokens;            // of the training data: their number decides the order
    int64_t data_crc, val_crc;      // checksums of training and validation data
    int64_t skipped, skipped_last;  // steps that changed nothing, see --on-nonfinite; the last ones among them in a row
    double best_val;                // infinite before the first validation
    double last_norm;               // of the last step's gradients, for --clip-by last; 0: there was none
    int64_t tokens;                 // of those sequences; not stored
    int64_t parts_left;             // layers that kept their weights in a step because their gradients were not finite
    int64_t saturated;              // elements that were too large for their fp8 codes
} RunState;

typedef struct {
    char path[RUN_PATH_BYTES];  // "" until run_folder_make
    bool quiet;
    bool held;       // from other processes, by run_folder_hold
    double started;  // seconds_now() when the run began, for time_s
    FILE* text;      // log.txt: what the terminal shows; in memory until the folder exists
    char* banner;    // that memory
    size_t banner_bytes;
    FILE* log;                             // log.jsonl
    char last_checkpoint[RUN_PATH_BYTES];  // "" while there is none
    const OptionTable* table;              // the options of the run, which are read by name, and their values
    void* fields;
    const char* sources[3];  // folders that may have a tokenizer: the checkpoint's, the model's, the data's, or ""
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
int64_t run_whole(const RunFolder* run, const char* option);
double run_real(const RunFolder* run, const char* option);
bool run_saves_states(const RunFolder* run);  // --save

// Keeps other processes of this machine from training in `folder` (on a file system with locks); false where one does.
bool run_folder_hold(RunFolder* run, const char* folder, char* error);
// Returns, before a checkpoint is chosen, whether the folder `run` ("": none is named) is free for what --resume says.
// If the run goes on in it, or in the folder that `resume` names, this process holds that folder.
bool run_folder_begin(RunFolder* folder, const char* run, const char* resume, bool dry_run, char* error);
// Returns, before run_folder_make, whether the data's tokens are those that the weights of `sources` have learned, and
// whether the tasks of --eval and the prompts of --prompt-file can be opened.
bool run_folder_possible(RunFolder* run, bool bytes);
// Makes the folder that --run names, or, where that is "", runs/DATE_TIME_MODEL (_2, _3, ... where that is taken), with
// config.json, log.txt, log.jsonl and copies of the tokenizer's files; --run becomes its path. Opens the tokenizer, the
// prompts and the tasks of --eval. `checkpoint` is the state.json that the run goes on from, or NULL. Where the
// tokenizer does not fit a model of `vocabulary` tokens, or bytes, a line says so and --sample-every becomes 0.
bool run_folder_make(RunFolder* run, const Json* checkpoint, bool bytes, int vocabulary);
void run_folder_close(RunFolder* run);

// Prints on the terminal and into log.txt.
__attribute__((format(printf, 2, 3))) void run_say(RunFolder* run, const char* format, ...);
// Prints text of a model, of which each piece may be a part of a character.
void run_say_text(RunFolder* run, const char* text, size_t bytes);
// Prints the commands to type after a run: resume, or sample, and the plot where it can be drawn.
void run_say_next(RunFolder* run, bool stopped);

// The word that is typed after --resume to go on from the last checkpoint.
const char* run_resume_words(const RunFolder* run);
// Returns whether a signal asks for a checkpoint, or a file called save in the run folder, which is removed.
bool run_folder_asks_save(RunFolder* run);

// A line of log.jsonl: {"type": ..., "step": ..., "tokens": ..., "time_s": ..., NAME: value, ...}. Values that are not
// finite are null, and "nonfinite" is then true. False where it cannot be written.
bool run_log(RunFolder* run, const char* type, int count, const char* const* names, const double* values);
// The first line: the program, where, when and how it was started, all options, the sizes of the model and its tokens.
void run_log_config(RunFolder* run, const char* device, int ranks, int64_t parameters, double bytes_per_token);
// A line of this type whose other members are `members`, as JSON.
bool run_log_members(RunFolder* run, const char* type, const char* members);

C_LINKAGE_END
