// The plan: which tensors share an array, a launch and constants. --override gives tensors other formats, learning
// rates and decays, or another rule. Tensors whose weights have the same format share an array of weights; those that
// also share the rule and the formats of the moments share a launch of the step and its arrays; those with the same
// rate and decay share a group of constants. The arena is laid out so that each share is one run. Each combination of
// rule, weights, m and v costs a launch, some microseconds; there are at most 6.
#pragma once
#include "constants.h"
#include "kernel.cuh"
#include "override.h"
#include "storage.h"

constexpr int LAUNCHES = 6;  // at most

// The basis is what a rule projects gradients with, and the norm that it limits. The norms are the last ones of each
// tensor's update, which --limit-growth keeps.
enum Slot { SLOT_WEIGHTS, SLOT_M, SLOT_V, SLOT_SLOW, SLOT_BASIS, SLOT_NORMS, SLOTS };

// A run of the arena, and where the numbers of spans of its tensors lie among those of all.
struct ArenaRun {
    int64_t begin, end;
    int64_t at[SPANS], numbers[SPANS];
    int64_t ready;  // numbers of rows and columns that the step reads
};

struct WeightsPlan {
    const char* format;
    const char* pattern;  // the override that asked for it
    ArenaRun run;
};

struct LaunchPlan {
    OptimConfig config;  // with the launch's rule, weights, m and v
    const char* pattern;
    int weights;  // index of its WeightsPlan
    ArenaRun run;
    int64_t tiles;
    ArenaRun kept[SLOTS];  // of each slot; the run, but for rules whose moments have shapes of their own
};

// The first of the weights, launches and groups is the configuration itself, without overrides.
struct Plan {
    Override overrides[OVERRIDES];
    int override_count;
    WeightsPlan weights[LAUNCHES];
    int weights_count;
    LaunchPlan launch[LAUNCHES];
    int launches;
    Settings group[STEP_GROUPS];  // the first two: without and with decay
    int groups;
    int *launch_of, *group_of;  // (tensors)
    int64_t begin, end;         // the part of the arena that is kept here
    int64_t (*at)[SPANS];       // (tensors): the first of a tensor's numbers, in the order of the arena
    int64_t* ready;             // (tensors): where a tensor's numbers begin in the launch's array that the step reads
    // (tensors): the shape in which a slot keeps a tensor, and where. Moments of projected gradients, and their bases,
    // lie one after another from the begin of the whole launch's run on, so that their noise is that of no other.
    OptimTensor (*kept)[SLOTS];
};

// Makes the plan of a resolved configuration for tensors that optim_layout placed with it, as far as they lie in the
// configuration's part of the arena.
Plan* plan_ranges(const OptimConfig* config, const OptimTensor* tensors, int count);
void plan_free(Plan* plan);

// Returns the elements of a tensor with its padding.
int64_t tensor_padded(const OptimTensor* tensor);

// Clamps an element of the arena to the plan's part of it.
int64_t plan_clamp(const Plan* plan, int64_t element);

const char* slot_name(Slot slot);

// The storage of the weights, a moment, the basis or the norms of a launch; none_row() if nothing is kept there.
const FormatRow* slot_format(const OptimConfig* config, Slot slot);

constexpr int ARRAY_NAME_BYTES = 160;

// The place where a plan keeps the weights or a moment of a tensor.
struct Place {
    const char* rule;              // of the tensor
    const FormatRow* format;       // null: the rule keeps no such moment
    const FormatRow* nearest;      // the same arrays, rounded to nearest
    char array[ARRAY_NAME_BYTES];  // as stream_name wants it
    const ArenaRun* run;           // what its arrays hold
    int64_t at;                    // where the tensor's numbers of spans begin in its array
};
Place plan_place(const Plan* plan, int tensor, Slot slot);

// Writes the name of a slot's arrays: "m", or "m.1[wpe|ln*]" if an override asked for them. `index` is that of the
// weights or of the launch.
void plan_array(const Plan* plan, int index, Slot slot, char array[ARRAY_NAME_BYTES]);

// Writes the full name of a stream. A name with a leading dot is appended to that of its array. One without replaces
// it, or is appended to it if an override asked for the array.
void stream_name(const char* array, const StreamInfo& stream, char* name, size_t bytes);

// The optimizer's array for a stream of a place; its data is null if there is none.
OptimStream place_stream(const Optim* optim, const Place* place, const StreamInfo& info);

// The arrays of a tile, among arrays that begin at the arena's first element.
inline Streams row_tile(const FormatRow* format, const Streams& streams, int64_t index) {
    return tile_at(format->stream[0], format->stream[1], format->stream[2], streams, index);
}

// Returns the bytes of one of the arrays of a run.
int64_t run_bytes(const ArenaRun* run, const StreamInfo& stream);

// Returns the bytes of the numbers of a run's tensors.
int64_t span_bytes(const ArenaRun* run, Span span);
// Returns the bytes of Streams::next for a run: new numbers that replace the old, or what the step reads (rows.cuh).
int64_t next_bytes(const ArenaRun* run, Span span);

// Returns the bytes of one stream for a number of elements; 0 for numbers of spans, which belong to tensors.
int64_t stream_bytes(const StreamInfo& stream, int64_t elements);
