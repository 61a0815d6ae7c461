// This file says what `auto` means, and has the batch and the learning rate of a run. A function that returns false has
// written a sentence into `error`.
#pragma once
#include "options.h"
C_LINKAGE_BEGIN

// Four numbers must agree: batch x seq x ranks x micro-batches = tokens-per-step. Chooses the batch and tokens-per-step
// that were left to the program: a batch that is a power of two up to `fits`, a step of about `usual` tokens (0: of one
// micro-batch per rank). The rows of a micro-batch must be a multiple of `unit`, as --matmul fp8 wants.
bool batch_choose(Options* options, int64_t ranks, int64_t unit, int64_t fits, int64_t usual, char* error);

typedef struct {
    const char* kind;       // cosine, linear, constant or wsd
    double lr, final_lr;    // the largest rate; the last one as a share of it
    double decay_fraction;  // wsd: share of the steps in which the rate falls
    int64_t steps, warmup;  // of the run; of linear warm-up
    int64_t rise_step;      // where the run was resumed with a larger rate, to which it rises from rise_lr over as many
    double rise_lr;         // steps as a warm-up has, or half of those that are left; 0: there was no such resume
} Schedule;
// Ends the warm-up where the run ends, and before wsd's decay; refuses a typed one that is longer, and a rate of 0.
bool schedule_choose(Schedule* schedule, bool warmup_typed, char* error);
// Returns the learning rate of step 0, 1, ... steps-1.
double learning_rate(const Schedule* schedule, int64_t step);

// These choose what options that are `auto` become; data/README.md has the formulas, and dev/compare/README.md the
// evidence. A run of the batch B* = 65536 sqrt(D / 180M), for D tokens of training, has the same rate at any length.
// Rules other than adamw, muon and normuon have the rate of their row in optim/table.cuh, and weights that --model DIR
// has trained a thirtieth.

// Returns the tokens of a step for a run of --steps, or of one epoch of so many tokens.
long long default_tokens_per_step(const Options* options, int64_t epoch);
// Replaces every other `auto`. rate: the rule's learning rate over adamw's; trained: the weights come from
// --model DIR; windows: sequences in the data.
void defaults_choose(Options* options, double rate, bool trained, bool gpu, int64_t windows);
#define DEFAULT_DECAY "; wte|wpe: wd=0.05"
// Returns --override, with the decay of embeddings beside muon if --weight-decay is auto and none is named.
const char* default_overrides(const Options* options);
// Returns whether v falls as beta2 says, which the 8-bit scales of @dq8 do not (optim/README.md, "How v falls").
bool default_v_falls(const Options* options);

C_LINKAGE_END
