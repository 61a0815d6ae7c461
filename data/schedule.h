// The sizes and the learning rate of a run. A function that returns false has written a sentence into `error`.
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "linkage.h"
C_LINKAGE_BEGIN

// Four numbers must agree: batch x seq x ranks x micro-batches = tokens-per-step.
typedef struct {
    int64_t batch, tokens_per_step;  // -1: left to the program
    int64_t seq, ranks;
    int64_t unit;  // the rows of a micro-batch, batch x seq, must be a multiple of it, as --matmul fp8 wants
} BatchSizes;
// Gives the ones that are left a value: the batch is a power of two, at most `fits`; a step has about `usual` tokens,
// or, where that is 0, one micro-batch.
bool batch_choose(BatchSizes* sizes, int64_t fits, int64_t usual, char* error);

typedef struct {
    const char* kind;       // cosine, linear, constant or wsd
    double lr, final_lr;    // the largest rate; the last one as a share of it
    double decay_fraction;  // wsd: share of the steps in which the rate falls
    int64_t steps, warmup;  // of the run; of linear warm-up, -1: left to the program
} Schedule;
// Gives the warm-up a value. One that was typed must end before the run, or before wsd's decay.
bool schedule_choose(Schedule* schedule, bool warmup_typed, char* error);
// The learning rate of step 0, 1, ... steps-1.
double learning_rate(const Schedule* schedule, int64_t step);

C_LINKAGE_END
