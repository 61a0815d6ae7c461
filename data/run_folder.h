// RunFolder holds what a run reads and writes: options, data, tokenizer and prompts, and the folder with its lock,
// log.txt (all that is printed), log.jsonl and config.json. Ranks other than 0 have `quiet` set, and print and write
// nothing. A function that returns false has written a sentence into `error`.
#pragma once
#include "checkpoint.h"
#include "loader.h"
#include "tokenizer.h"
C_LINKAGE_BEGIN

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
    Options* options;
    char checkpoint[RUN_PATH_BYTES];  // from which the run goes on; "": it is new
    Json* resumed;                    // its state.json; NULL: there is none
    const char* changed;  // by the resume, for the banner: " --lr 0.1 (was 0.2); the data: ..."; NULL: nothing
    const char* weights;  // the folder from which the first weights are read, a checkpoint or a model; "": none
    Dataset train_data, val_data;
    int ranks;
    int64_t parameters;  // of the model
    RunState state;
    Tokenizer* tokenizer;  // NULL where there is none
    Json* config;          // config.json of the model or checkpoint that the run began with, or NULL
    bool samples;          // the tokenizer fits the model
    Prompts prompts;
    uint32_t tasks;                // checksum of the files of --eval, or 0
    char error[DATA_ERROR_BYTES];  // the sentence about what has failed
} RunFolder;

// Locks `folder` against other processes of this machine, if the file system has locks; false if one holds it already.
bool run_folder_hold(RunFolder* run, const char* folder, char* error);
// Refuses a folder that holds a run, unless it may continue there (`again`), or a model, whose config.json a run would
// overwrite.
bool run_folder_free(const char* folder, bool again, char* error);
// Opens the tokenizer and the prompts before there is a folder. Checks the tasks of --eval, that data and weights have
// the same tokenizer and, if this process writes, that the disk has room for --keep checkpoints of `size` bytes (0:
// none is written) and one more. If the tokenizer does not fit `vocabulary`, a line says so and --sample-every becomes
// 0.
bool run_folder_open(RunFolder* run, int vocabulary, int64_t size);
// Makes the folder that --run names, or runs/DATE_TIME_MODEL (_2, _3, ... if that exists) and sets --run to it, with
// config.json, log.txt, log.jsonl and copies of the tokenizer's files. The first line of log.jsonl has the program;
// where, when and how it was started; all options; sizes of the model and tokens.
bool run_folder_make(RunFolder* run, const char* device);
void run_folder_close(RunFolder* run);  // and its data

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
// Begins a line of this type, to which the caller adds members, ", NAME: VALUE", and then calls run_log_end. NULL on
// ranks that write nothing, and where there is no run.
FILE* run_log_begin(RunFolder* run, const char* type);
bool run_log_end(RunFolder* run);

C_LINKAGE_END
