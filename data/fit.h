// --fit: how models would train on a card that need not be here.
#pragma once
#include "memory.h"
#include "options.h"
C_LINKAGE_BEGIN

// A way to train a model: the options, which the plan resolves, and what the plan finds.
typedef struct {
    Options o;
    bool planned;               // false: the options or the rule exclude it
    int64_t parameters, batch;  // batch: the largest micro-batch that fits; 0: not even one sequence does
    MemoryPlan plan;            // of this micro-batch, or of one sequence
    int way, order;             // way: what it gives up for memory; the best has the least order
} FitRow;

enum { FIT_PRESETS = 80 };
typedef struct {
    // fit_open sets what comes before `presets`, which the caller sets.
    const Options* asked;
    const char* model;                 // --model, or the folder that it names
    const char* folder;                // where config.json lies; "" for a shape of nibble's
    int vocabulary;                    // of --data or of the folder, else GPT-2's
    bool bytes;                        // --data is read as bytes
    const char* preset;                // the only one, of which all ways are shown; NULL: the best way of each
    const char* presets[FIT_PRESETS];  // names of all, then NULL
    FitRow row;                        // the way to plan, which fit_next sets
    // fit_next's own.
    FitRow best, rows[FIT_PRESETS];  // of the pair of model and preset whose ways are planned; what is printed
    int count, at_preset, at_model, way;
} Fit;
// Takes the options that were asked for into a zeroed Fit; false with a sentence if they name no model or no data.
bool fit_open(Fit* fit, const Options* asked, char* error);
// Sets `row` to the next way, whose other members the caller then plans; false: there is no more.
bool fit_next(Fit* fit);
// Prints the two best choices and a row of figures for each preset or way; without --model, --size, --layers and
// --preset, the largest of our models for each of four presets. False if there is nothing.
bool fit_print(const Fit* fit);

C_LINKAGE_END
