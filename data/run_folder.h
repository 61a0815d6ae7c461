// The run folder: who may train in it, its name, what is printed (and kept in log.txt), log.jsonl, config.json, and the
// files of a tokenizer that lie in it. Only rank 0 of a run has one; on the others `quiet` is true and nothing is
// printed or written. A function that returns false has written a sentence into `error`.
#pragma once
#include "json.h"
#include "options.h"
#include "tokenizer.h"
#ifdef __cplusplus
extern "C" {
#endif

enum { RUN_PATH_BYTES = 4096 };

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
} RunFolder;

// May a run begin in this folder (`again`: or go on there)? Not beside a model's config.json, which it would overwrite.
bool run_folder_free(const char* folder, bool again, char* error);
// Keeps other processes of this machine from training in `folder` as long as this one lives; false where one does.
// Where the file system knows no locks there are none.
bool run_folder_hold(RunFolder* run, const char* folder, char* error);
// Before a checkpoint is chosen: is the folder `run` ("": none is named) free for what --resume says, and held where
// the run goes on in it, or in the folder that `resume` names?
bool run_folder_begin(RunFolder* folder, const char* run, const char* resume, bool dry_run, char* error);
// Makes the folder `asked`, or, where that is "", runs/DATE_TIME_MODEL (_2, _3, ... where that is taken), with
// config.json out of `fields`, log.txt and log.jsonl. `*name`, one of these fields, becomes its path.
bool run_folder_make(RunFolder* run, const char** name, const char* model, bool again, const OptionTable* table,
                     const void* fields, char* error);
void run_folder_close(RunFolder* run);

// Prints on the terminal and into log.txt.
__attribute__((format(printf, 2, 3))) void run_say(RunFolder* run, const char* format, ...);
// Prints text of a model, of which each piece may be a part of a character.
void run_say_text(RunFolder* run, const char* text, size_t bytes);
// Prints the commands that go on after a run, as a shell takes them: resume, or sample, and the plot where it can be
// drawn.
void run_say_next(RunFolder* run, bool stopped, bool samples);

// What is typed after --resume to go on from the last checkpoint.
const char* run_resume_words(const RunFolder* run);
// Is a checkpoint asked for, by a signal or by a file called save in the run folder, which is removed?
bool run_folder_asks_save(RunFolder* run);

// A line of log.jsonl: {"type": ..., "step": ..., "tokens": ..., "time_s": ..., NAME: value, ...}. Values that are not
// finite are null, and "nonfinite" is then true. False when the disk is full.
bool run_log(RunFolder* run, const char* type, int64_t step, int64_t tokens, int count, const char* const* names,
             const double* values, char* error);
// The first line: which program this is, where, when and how it was started, all options, and the size of the model
// and of its tokens. `device` is the name of one of `ranks`.
void run_log_config(RunFolder* run, const OptionTable* table, const void* fields, const char* device, int ranks,
                    int64_t parameters, double bytes_per_token);
// A line of this type whose other members are `members`, as JSON.
bool run_log_members(RunFolder* run, const char* type, int64_t step, int64_t tokens, const char* members, char* error);
// A sample, the `index`th of its step: what follows the prompt.
bool run_log_sample(RunFolder* run, int64_t step, int64_t tokens, int index, const char* prompt, const char* text,
                    char* error);

// What a run has of a tokenizer, and of the model that it began with. `tokenizer` is NULL where there is none.
typedef struct {
    Tokenizer* tokenizer;
    SpecialTokens special;
    Json* config;  // config.json of the model or checkpoint that the run began with, or NULL
} RunTokenizer;
// Keeps in the run folder what comes with the tokenizer and the model, whatever becomes of where they came from, and
// opens the tokenizer. `folders` may have it, the first one before the others: the checkpoint's, the model's and the
// data's, or "". `state` is the checkpoint's, or NULL. True: a model of `vocabulary` tokens, or bytes, has samples;
// false: the tokenizer does not fit, and a line says so, or there is a sentence in `error`, which is "" otherwise.
bool run_tokenizer_open(RunFolder* run, const char* const folders[3], const Json* state, bool bytes, int vocabulary,
                        RunTokenizer* tokenizer, char* error);
void run_tokenizer_close(RunTokenizer* tokenizer);

#ifdef __cplusplus
}
#endif
