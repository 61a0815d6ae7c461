// The host's side of the passes before the step of rules that read rows, columns or tensors (rows.cuh): it plans the
// passes of a launch and runs their CPU version and their ends. optim.cu owns the memory and launches the kernel of
// sums.cuh, which depends on the formats.
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

// A run of a launch's tensors and its thread blocks. row_range returns those between tiles `begin` and `end` of its
// list.
struct RowRange {
    int64_t first, tensors, first_block, blocks, settles;
};
RowRange row_range(const RowPlan* plan, int64_t begin, int64_t end);

// Returns true if a launch's update is multiplied by a factor for each tensor.
bool config_scaled(const OptimConfig* config);

// A launch's plan, buffers and kernels for its passes.
struct RowWork {
    RowPlan plan;
    SumTensor* tensor;        // (plan.tensors) device memory
    float* parts;             // (plan.parts) device memory
    Kernel kernel, replayed;  // replayed: of steps that may be captured in a CUDA graph
};

// Makes the partial sums of one pass on the CPU, as optim_sums_kernel does on a GPU.
void rows_sum_cpu(const Rows* rows, const StepArrays* arrays, const StepArguments* step, const SumArguments* sums);

// Ends a pass: turns the sums into the numbers that the step reads.
void rows_settle(const Device* dev, const SettleArguments* settle);

// Rounds kept numbers as adafactor8bit's 8-bit codes do, once all passes have read them. `pairs`: there are two numbers
// of each row and column.
void rows_round(const Device* dev, const SumTensor* tensor, int64_t tensors, const float* grad_scale, float* kept,
                bool pairs);
