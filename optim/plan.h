// The plan of an optimizer: which tensors share an array of weights, a launch and a group of constants. --override
// gives tensors other rules, formats, learning rates and decays. Tensors whose weights have the same format share an
// array of weights. Those that also have the same rule and the same formats of moments share a launch of the step, and
// its arrays. Those with the same learning rate and decay share a group of constants. The arena is laid out so that the
// tensors of a launch, and of an array of weights, lie one after another. Each combination of rule, weights, m and v
// costs a launch, some microseconds; there are at most LAUNCHES.
#pragma once
#include "constants.h"
#include "kernel.cuh"
#include "override.h"
#include "storage.h"

constexpr int LAUNCHES = 6;  // at most

// An optimizer keeps these arrays for its tensors. The basis has the directions onto which a rule projects gradients,
// and the norm that it limits. The norms are those of each tensor's last update, which --limit-growth keeps.
enum Slot { SLOT_WEIGHTS, SLOT_M, SLOT_V, SLOT_SLOW, SLOT_BASIS, SLOT_NORMS, SLOTS };

// A run of what is kept here: elements `begin` to `end` - 1, counted without what other ranks keep. Of its tensors'
// numbers of spans, it says how many there are and where they begin among those of all tensors.
struct ArenaRun {
    int64_t begin, end;
    int64_t at[SPANS], numbers[SPANS];
    int64_t ready;  // how many numbers of rows and columns the step reads
};

// The part of a tensor that is kept here: its elements `begin` to `end` - 1, with padding.
struct KeptPart {
    int64_t begin, end;
};

struct WeightsPlan {
    const FormatRow* format;
    const char* pattern;  // of the override that asked for it, or ""
    ArenaRun run;
};

struct LaunchPlan {
    OptimConfig config;  // with the launch's rule, weights, m and v
    Rows rows;           // the rows that it names, looked up once
    const char* pattern;
    int weights;  // index of its WeightsPlan
    ArenaRun run;
    int64_t tiles;
    ArenaRun kept[SLOTS];  // what each slot keeps: the run, or other runs if the moments have other shapes
};

// A tensor's part of the plan.
struct TensorPlan {
    int launch, group;
    KeptPart here;
    int64_t at[SPANS];  // where its numbers begin among those of all tensors
    int64_t ready;      // where its numbers begin in the launch's array that the step reads
    // The shape in which a slot keeps it, and its offset among the elements that are kept here. If its first elements
    // are not kept here, the offset is that much lower.
    OptimTensor kept[SLOTS];
    // The element of the whole arena whose noise its first element has. Moments of projected gradients have the noise
    // of their launch's first elements, in the order of the tensors.
    int64_t noise;
};

// Number 0 of weights and launches is the configuration without overrides.
struct Plan {
    Override overrides[OVERRIDES];
    int override_count;
    WeightsPlan weights[LAUNCHES];
    int weights_count;
    LaunchPlan launch[LAUNCHES];
    int launches;
    Settings group[STEP_GROUPS];  // groups 0 and 1 have no override: tensors without and with decay
    int groups;
    int64_t elements;    // of all tensors that are kept here
    TensorPlan* tensor;  // (tensors)
};

// Makes the plan of a resolved configuration, for the configuration's part of the arena. optim_layout must have placed
// the tensors with the same configuration. plan_free frees the plan. Exits with a sentence if overrides do not fit.
Plan* plan_ranges(const OptimConfig* config, const OptimTensor* tensors, int count);
void plan_free(Plan* plan);

// Returns the number of elements of a tensor and its padding: a multiple of TILE_ELEMENTS.
int64_t tensor_padded(const OptimTensor* tensor);

// Returns true if nothing of a tensor is kept here.
inline bool is_elsewhere(const Plan* plan, int tensor) {
    return plan->tensor[tensor].here.begin == plan->tensor[tensor].here.end;
}

inline const LaunchPlan* launch_of(const Plan* plan, int tensor) {
    return &plan->launch[plan->tensor[tensor].launch];
}

// Returns the number, among the elements that are kept here, of a tensor's first one.
inline int64_t first_here(const Plan* plan, int tensor) {
    return plan->tensor[tensor].kept[SLOT_WEIGHTS].offset + plan->tensor[tensor].here.begin;
}

// Returns true if a run has what is kept here of a tensor, or some of it.
inline bool is_in_run(const Plan* plan, int tensor, const ArenaRun* run) {
    const int64_t at = first_here(plan, tensor);
    return !is_elsewhere(plan, tensor) && at >= run->begin && at < run->end;
}

// Returns the part of a tensor that a slot keeps here, in the slot's shape.
KeptPart kept_part(const Plan* plan, int tensor, Slot slot);

// Returns "weights", "m", "v", "slow", "basis" or "norms".
const char* slot_name(Slot slot);

// Returns the format of a launch's slot; none_row() if nothing is kept there.
const FormatRow* slot_format(const LaunchPlan* launch, Slot slot);

constexpr int ARRAY_NAME_BYTES = 160;

// Writes the name of a stream of weights or launch `index`: that of its slot, as in "m", or "m.1[wpe|ln*]" if an
// override asked for it. A stream's name with a leading dot is appended to it. A name without a dot replaces it, or is
// appended to it if an override asked for the array.
void stream_name(const Plan* plan, int index, Slot slot, const StreamInfo& stream, char* name, size_t bytes);

// Returns the arrays of tile number `index`, given arrays that begin at the arena's first element.
inline Streams row_tile(const FormatRow* format, const Streams& streams, int64_t index) {
    return tile_at(format->stream[0], format->stream[1], format->stream[2], streams, index);
}

// Returns the bytes of one of the arrays of a run.
int64_t run_bytes(const ArenaRun* run, const StreamInfo& stream);

// Returns the bytes of Streams::new_scales for a run: the new numbers that replace the old ones, or the numbers that
// the step reads (rows.cuh).
int64_t next_bytes(const ArenaRun* run, Span span);

// Returns the bytes of one stream for a number of elements; 0 for numbers of spans, whose count depends on the tensors.
int64_t stream_bytes(const StreamInfo& stream, int64_t elements);
