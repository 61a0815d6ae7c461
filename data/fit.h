// --fit: how models would train on a card that need not be here.
#pragma once
#include "options.h"
#include "schedule.h"
C_LINKAGE_BEGIN

// A way to train a model. The options are set before it is planned, and resolved by the plan.
typedef struct {
    Options o;
    int64_t parameters, batch;  // batch: the largest micro-batch that fits; 0: not even one sequence does
    MemoryPlan plan;            // of this micro-batch, or of one sequence
    int way, order;             // way: what it gives up for memory; the best has the least order
} FitRow;

typedef struct {
    const Options* asked;
    const char* model;   // --model, or the folder that it names
    const char* preset;  // the only one, of which all ways are shown; NULL: the best way of each
    const char* (*presets)(int index);
    // Plans a way; false, with a sentence, if the options or the rule exclude it.
    bool (*plan)(void* context, FitRow* row, char* error);
    void* context;
} Fit;
// Prints the two best choices and a row of figures for each preset or way; without --model, --size, --layers and
// --preset, the largest of our models for each of four presets. False, with the first refusal, if there is nothing.
bool fit_print(const Fit* fit, char* error);

C_LINKAGE_END
