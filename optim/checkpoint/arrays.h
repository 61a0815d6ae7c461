// This header says where the arrays of a tensor lie. Checkpoints need it, and the library, which shows them to callers.
#pragma once
#include "../plan.h"

// The array of a tensor that a slot keeps.
struct ArrayRef {
    const char* rule;          // the tensor's
    const FormatRow* format;   // null: the rule keeps no such moment
    const FormatRow* nearest;  // the format with the same arrays that rounds to nearest
    const OptimTensor* kept;   // the shape in which the slot keeps the tensor
    const ArenaRun* run;       // of its arrays
    int64_t at;                // where the tensor's numbers of spans begin in their array
    int index;                 // of the plan's weights for SLOT_WEIGHTS, otherwise of the launch
};
ArrayRef plan_array_ref(const Plan* plan, int tensor, Slot slot);

// Returns which bytes of array i are the tensor's. `begin` is below 0 if the tensor's first elements are not kept here.
struct ArrayBytes {
    int64_t begin, bytes;
};
ArrayBytes array_bytes(const ArrayRef* place, int i);
