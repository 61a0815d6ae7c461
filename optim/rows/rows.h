// The host's side of the passes before the step of rules that read rows, columns or tensors (rows.cuh): rows.cu plans
// the passes of a launch, makes their tables and the kernel of sums.cuh, which depends on the formats, and runs them on
// either device.
#pragma once
#include "../jit.h"
#include "../plan.h"
#include "rows.cuh"

constexpr int PASSES = 5;  // at most

// The passes of a launch, and the tensors that they read.
struct RowPlan {
    Sum pass[PASSES];
    int passes;
    SumTensor* tensor;  // (tensors + 1) host memory: the launch's tensors that are kept here, and where they end
    int64_t tensors, blocks;
    int64_t settles;  // rows and columns
    int64_t parts;    // partial sums, fp32
};

// Plans the passes of launch `index`. row_plan_free frees the plan.
RowPlan row_plan(const Plan* plan, int index, const OptimTensor* tensors, int count);
void row_plan_free(RowPlan* plan);

// Returns true if a launch's update is multiplied by a factor for each tensor.
bool config_scaled(const OptimConfig* config);

// A launch's plan, buffers and kernels for its passes.
struct RowWork {
    RowPlan plan;
    SumTensor* tensor;        // (plan.tensors) device memory
    float* parts;             // (plan.parts) device memory
    Kernel kernel, replayed;  // replayed: of steps that may be captured in a CUDA graph
};
