// The insides of an optimizer, which optim.cu makes and step.cu uses.
#pragma once
#include "jit.h"
#include "matrix/matrix.h"
#include "placed.h"
#include "plan.h"
#include "rows.h"

// The weights of all tensors that are stored in one format.
struct Weights {
    const FormatRow* row;
    const ArenaRun* run;  // of these arrays
    Streams streams;
    const FormatRow* copy;  // the copy that a step writes beside them; none_row(): it writes none
    bool are_seen;          // the matmuls read the codes as stored; the codes then lie in Optim.seen if there is one
};

// A kernel of the step for these rows, and its measuring pass.
struct StepKernel {
    Rows rows;
    StepArrays arrays;
    int64_t grid;
    Kernel step;
    Kernel replayed;  // the same with arguments in device memory, for steps that may be captured in a CUDA graph
    bool measures;    // the measuring pass comes first, for formats in spans
    Kernel measure;
};

// The tensors that have the same rule and formats. Their step is one kernel launch or, with a rule that reads matrices,
// two for each chunk of matrices.
struct StepLaunch {
    const LaunchPlan* plan;
    Rows rows;
    const Weights* weights;
    Streams kept[SLOTS];     // the states; kept[SLOT_WEIGHTS] is empty
    Streams at[OPTIM_KEPT];  // where steps find m, v and slow, from tile `states` of the launch on
    uint32_t states;
    Tile* tiles;    // (plan->tiles) device memory
    Tile* applied;  // with a rule that reads matrices, the tiles of the second kernel; those of the first one differ in
                    // the weights, whose place the directions take
    uint32_t* next_tile;
    StepKernel kernel;  // with a rule that reads matrices: from gradients to directions
    StepKernel apply;   // with such a rule: from updates to weights
    MatrixWork matrix;
    RowWork passes;  // before the step, of a rule that reads rows and of --limit-growth
};

struct Optim {
    const Device* dev;
    OptimConfig config;
    OptimType compute;
    OptimTensor* tensors;  // (count), with names of their own
    int count;
    Plan* plan;
    void* seen;                   // all weights in the compute type, stored or copied; NULL: no copy is kept
    Weights weights[LAUNCHES];    // as many as the plan has
    StepLaunch launch[LAUNCHES];  // as many as the plan has
    float* factors;               // device memory: factor of the update in each tile, or null
    Tile* tiles;                  // device memory: the tiles of the launches, then a counter for each launch
    const void** grads;           // (count) where each tensor's gradients begin here, as the tiles have it
    OptimBytes allocated;
    bool counts;  // true in optim_bytes: nothing is allocated and no kernel is made; only `allocated` is summed up
    OptimStream stream[OPTIM_STREAMS];  // the arrays of the weights and of each launch's states
    char stream_name[OPTIM_STREAMS][ARRAY_NAME_BYTES];
    int stream_count;
    Settle settle[4 * LAUNCHES];
    int settles;
    JitRequest request[8 * LAUNCHES];  // the kernels that optim_make compiles
    int requests;
};
