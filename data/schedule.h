// This file says what `auto` means, and has the batch and the learning rate of a run. A function that returns false has
// written a sentence into `error`.
#pragma once
#include "options.h"
C_LINKAGE_BEGIN

// Chooses --matmul for a GPU of this name (NULL: the CPU) and compute capability, times 10. Refuses products that the
// device cannot do.
bool products_choose(Options* options, const char* gpu, int compute, char* error);
// Returns --logit-rows for a micro-batch of so many rows: on a GPU enough to keep the head's matrix products at full
// rate, on the CPU a piece that fits into the cache.
long long default_logit_rows(const Options* options, int64_t rows, bool gpu);
// Four numbers must agree: batch x seq x ranks x micro-batches = tokens-per-step. Chooses the batch and tokens-per-step
// that were left to the program: a batch that is a power of two up to `fits`, a step of about `usual` tokens (0: of one
// micro-batch per rank). It also chooses --logit-rows, and --grads: bf16 where a step has one micro-batch of bf16,
// which rounds each gradient once, else fp32. It refuses rows that are no multiples of 16 with --matmul fp8, and logit
// rows with --head fp8, and --grads bf16 without products in bf16.
bool batch_choose(Options* options, int64_t ranks, int64_t fits, int64_t usual, bool gpu, char* error);

// A run was resumed at `step` with a larger rate, to which it rises from `lr` over as many steps as a warm-up has, or
// half of those that are left. 0: there was no such resume.
typedef struct {
    int64_t step;
    double lr;
} RateRise;
// Returns the learning rate of step 0, 1, ... --steps - 1.
double learning_rate(const Options* options, const RateRise* rise, int64_t step);

// These choose what options that are `auto` become; data/README.md has the formulas, and dev/compare/README.md the
// evidence. A run of the batch B* = 65536 sqrt(D / 180M), for D tokens of training, has the same rate at any length.
// Rules other than adamw, muon and normuon have the rate of their row in optim/table.cuh, and weights that --model DIR
// has trained a thirtieth.

// Returns the tokens of a step for a run of --steps, or of one epoch of so many tokens.
long long default_tokens_per_step(const Options* options, int64_t epoch);
// Replaces every other `auto`. rate: the rule's learning rate over adamw's; trained: the weights come from
// --model DIR; windows: sequences in the data. Refuses a rate of 0, and a --warmup longer than what is left for it.
bool defaults_choose(Options* options, double rate, bool trained, bool gpu, int64_t windows, char* error);
// Returns --preset: if it is auto or "", muon, which reaches the lowest loss; adamw32 if a rule or format is set, and
// for a trained model, which muon suits only if muon has trained it.
const char* default_preset(const Options* options);
#define DEFAULT_DECAY "; wte|wpe: wd=0.05"
// Returns --override, with the decay of embeddings beside muon if --weight-decay is auto and none is named.
const char* default_overrides(const Options* options);
// Returns whether v falls as beta2 says, which the 8-bit scales of @dq8 do not (optim/README.md, "How v falls").
bool default_v_falls(const Options* options);

C_LINKAGE_END
