// The passes before the step of a rule that reads rows, columns or tensors (rows.cuh): which there are, what they need,
// and how one is run. optim.cu owns the memory and launches the kernel of sums.cuh, which depends on the formats.
#pragma once
#include "jit.h"
#include "plan.h"
#include "rows.cuh"

constexpr int PASSES = 5;  // at most

// The passes of a launch, and the tensors that they take.
struct RowPlan {
    Sum pass[PASSES];
    int passes;
    bool scaled;                              // the step's update has a factor for each tensor
    SumTensor* tensor;                        // (tensors), those of the launch that are kept here, and one that begins
                                              // where they end; host memory
    int64_t tensors, blocks, settles, parts;  // settles: blocks that end a pass; parts: fp32 numbers
};

// `index` is the launch's. Freed by row_plan_free.
RowPlan row_plan(const Plan* plan, int index, const OptimTensor* tensors, int count);
void row_plan_free(RowPlan* plan);

// The tensors of a launch that lie in elements `begin` to `end` of the arena, and their blocks.
struct RowRange {
    int64_t first, tensors, first_block, blocks, settles;
};
RowRange row_range(const RowPlan* plan, int64_t begin, int64_t end);

// True if a launch's update has a factor for each tensor.
bool config_scaled(const OptimConfig* config);

// A launch's buffers, in device memory, and its kernel.
struct RowWork {
    RowPlan plan;
    SumTensor* tensor;  // plan.tensor
    float* parts;
    Kernel kernel, replayed;  // replayed: of steps that may be captured
};

// One pass on the CPU: the parts of its sums, as optim_sums_kernel makes them.
void rows_sum_cpu(const Rows* rows, const StepArguments* step, const SumArguments* sums);

// The end of a pass: sums become numbers.
void rows_settle(const Device* dev, const SettleArguments* settle);
