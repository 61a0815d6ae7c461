// The options of a run: their values, and one table that drives parsing, --help and JSON. The error message for a
// mistake names the option, what was found and what to type.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include "rule_options.h"
C_LINKAGE_BEGIN

extern const char NIBBLE_VERSION[];  // "0.1.0"; version.c has it
extern const char NIBBLE_COMMIT[];   // "73330cd1a2", with "-dirty" where files were changed; "unknown" outside of git
extern const char NIBBLE_BUILD[];    // "CUDA 12.8 for sm_90a", "CPU alone"

enum { OPTION_COUNT = 69 + RULE_OPTION_COUNT };

// The values, by type. The rows of OPTIONS say what each means.
typedef struct {
    const char *data, *data_format, *val, *model, *size, *preset, *rule, *weights, *grads, *m, *v, *overrides, *clip_by,
        *on_nonfinite, *schedule, *matmul, *head, *recompute, *release, *offload, *shard, *prompt, *prompt_file, *stop,
        *eval, *eval_out, *run, *resume, *device, *save, *config, *sample;
    long long layers, channels, heads, seq, batch, tokens_per_step, steps, warmup, kept_blocks, logit_rows, gpus,
        join_timeout, val_every, val_tokens, sample_every, sample_tokens, samples, top_k, eval_every, print_every,
        save_every, keep, seed, memory, fit;
    double val_fraction, lr, clip, final_lr, decay_fraction, temperature;
    RuleOptions of_rule;
    bool profile, dry_run, list_formats, list_presets, version, help;
    bool given[OPTION_COUNT];  // which of them were typed
    const char* command;       // the command line, as a shell reads it
} Options;

extern const Option OPTIONS[OPTION_COUNT];

const Option* option_find(const char* name);  // NULL when absent
void options_defaults(Options* options);
// --name value, --name=value or a bare --flag; -h is --help. --config FILE gives what is not typed.
bool options_parse(Options* options, int argc, char** argv, char* error);
bool option_given(const Options* options, const char* name);  // was it typed?
// Refuses two options that exclude each other if both were typed.
bool options_apart(const Options* options, char* error);
// Refuses an option that was typed, with another value than its default, if it has no effect: the other option has no
// value that it needs, and --override does not name that one.
bool options_needed(const Options* options, char* error);
// Returns whether files keep the option: flags and the options of "instead of training" are of one start alone.
bool option_is_saved(const Option* option);
// Writes {"name": value, ...} of the options that files keep. Values are strings; with `typed`, numbers are JSON
// numbers. An option that a run derives from others is written as it was asked for in `asked`.
void options_json(const Options* options, const Options* asked, bool typed, FILE* file);
// Prints what --help and --version ask for; true if one of them was typed.
bool options_print(const Options* options, FILE* file);

// Returns the text as one word of a shell's command: itself, or in quotes. It lives as long as the program.
const char* shell_word(const char* text);

C_LINKAGE_END
