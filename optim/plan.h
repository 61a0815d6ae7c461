// Which tensors share what. --override gives tensors formats, learning rates and decays of their own: tensors whose
// weights are stored alike share an array of weights, those whose moments are too share a launch of the step and its
// arrays, those of the same rate and decay a group of constants. The arena is laid out so that each share is one run.
// Cost: a launch, some microseconds, a combination of weights, m and v, of which there are 6 at most.
#pragma once
#include "constants.h"
#include "kernel.cuh"
#include "override.h"
#include "storage.h"

constexpr int LAUNCHES = 6;  // at most

// A run of the arena, and its tensors' numbers of spans among those of all.
struct ArenaRun {
    int64_t begin, end;
    int64_t at[SPANS], numbers[SPANS];
};

struct WeightsPlan {
    const char* format;
    const char* pattern;  // of the override that asked for it
    ArenaRun run;
};

struct LaunchPlan {
    OptimConfig config;  // with the launch's weights, m and v
    const char* pattern;
    int weights;  // which WeightsPlan
    ArenaRun run;
    int64_t tiles;
};

// The first of each is the configuration's own.
struct Plan {
    Override overrides[OVERRIDES];
    int override_count;
    WeightsPlan weights[LAUNCHES];
    int weights_count;
    LaunchPlan launch[LAUNCHES];
    int launches;
    Settings group[STEP_GROUPS];  // the first two without and with decay
    int groups;
    int *launch_of, *group_of;  // (tensors)
    int64_t begin, end;         // the part of the arena that is kept here
    int64_t (*at)[SPANS];       // (tensors): the first of a tensor's numbers, in the order of the arena
};

// Tensors by launches, from a resolved configuration and tensors that optim_layout placed with it; only what lies in
// the configuration's part of the arena.
Plan* plan_ranges(const OptimConfig* config, const OptimTensor* tensors, int count);
void plan_free(Plan* plan);

// Elements of a tensor with its padding.
int64_t tensor_padded(const OptimTensor* tensor);

// An element of the arena, or the nearest bound of the plan's part of it.
int64_t plan_clamp(const Plan* plan, int64_t element);

enum Slot { SLOT_WEIGHTS, SLOT_M, SLOT_V, SLOT_SLOW, SLOTS };
const char* slot_name(Slot slot);

constexpr int ARRAY_NAME_BYTES = 160;

// Where a configuration keeps the weights or a moment of a tensor.
struct Place {
    const FormatRow* format;       // null: the rule keeps no such moment
    const FormatRow* nearest;      // of the same arrays, rounding to nearest; itself where it is dithered
    char array[ARRAY_NAME_BYTES];  // as stream_name wants it
    int64_t begin, elements;       // of the arena: what its arrays hold
    int64_t numbers, at;           // of spans: in its array, and where the tensor's begin
};
Place plan_place(const Plan* plan, int tensor, Slot slot);

// The name of a slot's arrays, "m", or of one that an override asked for, "m.1[wpe|ln*]": `index` counts those of
// weights, or the launches.
void plan_array(const Plan* plan, int index, Slot slot, char array[ARRAY_NAME_BYTES]);

// A stream's name among all of an optimizer: a name with a leading dot follows that of its array, one without stands
// for it, and follows where an override asked for the array.
void stream_name(const char* array, const StreamInfo& stream, char* name, size_t bytes);

// Bytes of one of the arrays of a place, or of a run of the arena.
int64_t place_bytes(const Place* place, const StreamInfo& stream);
int64_t run_bytes(const ArenaRun* run, const StreamInfo& stream);

// Of one stream for a number of elements; none of the numbers of spans, which are of tensors.
int64_t stream_bytes(const StreamInfo& stream, int64_t elements);
