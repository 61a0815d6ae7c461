// Plans of memory: how large a micro-batch fits, and what to type where a plan does not fit. The plan itself is the
// caller's, who knows the model.
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "linkage.h"
C_LINKAGE_BEGIN

// Bytes of device memory; on the CPU of this machine's.
typedef struct {
    int64_t weights, states, grads, activations, other;
    int64_t taken;        // beside these: the driver's context, NCCL, and kernels that are loaded; 0 on a CPU
    int64_t total, host;  // host: of this machine's memory, part of the total only on a CPU
} MemoryPlan;

// Plans a model for micro-batches of `batch` sequences (0: as it is); with `block`, as --recompute block alone.
typedef struct Planner {
    MemoryPlan (*plan)(const struct Planner* planner, int64_t batch, bool block);
    const void *model, *config, *options;  // the caller's
} Planner;

// Returns the largest batch up to `max` whose plan fits into `available` bytes beside what is taken; 0: none.
int64_t plan_largest_batch(const Planner* planner, int64_t max, bool block, int64_t available);
// Returns NULL if the plan of a model with this batch, of `sequences` a step, fits into `available` bytes of `device`;
// otherwise what is missing and what to type, a text that lives as long as the program. `block`: the model recomputes
// blocks already, except those of --kept-blocks.
const char* plan_lacks(const Planner* planner, int64_t batch, int64_t sequences, bool block, int64_t available,
                       const char* device);
// The same for this machine's memory, of which --offload needs `need` bytes and `available` are free.
const char* plan_host_lacks(int64_t need, int64_t available, const char* offload);

C_LINKAGE_END
