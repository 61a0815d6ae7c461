// The insides of an optimizer: optim.cu makes them and step.cu takes steps with them; rows/ and matrix/ do both for the
// rules that need more, and the other files read them.
#pragma once
#include "jit.h"
#include "matrix/matrix.h"
#include "plan.h"
#include "rows/rows.h"

// The weights of all tensors that are stored in one format.
struct StoredWeights {
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

// The states that a step reads and writes: m, v, and the slow average of rules that keep one.
constexpr int OPTIM_KEPT = 3;

// The tensors that have the same rule and formats. Their step is one kernel launch or, with a rule that reads matrices,
// two for each chunk of matrices.
struct StepLaunch {
    const LaunchPlan* plan;
    Rows rows;
    const StoredWeights* weights;
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

// The numbers of spans that a step reads, and those that it makes, which replace them at its end.
struct Settle {
    float *now, *next;  // (count), device memory
    int64_t count;
    const ArenaRun* run;  // whose tensors they belong to
    Span span;
};

// Memory that the optimizer frees at its end.
struct OwnMemory {
    void* at;
    bool on_host;
};

struct Optim {
    const Device* dev;
    OptimConfig config;
    OptimType compute;
    OptimTensor* tensors;  // (count), with names of their own
    int count;
    Plan* plan;
    void* seen;  // all weights in the compute type, stored or copied, in the arena's layout; NULL: no copy is kept
    StoredWeights weights[LAUNCHES];    // as many as the plan has
    StepLaunch launch[LAUNCHES];        // as many as the plan has
    float* factors;                     // device memory: factor of the update in each tile, or null
    Tile* tiles;                        // device memory: the tiles of the launches, then a counter for each launch
    const void** grads;                 // (count) where each tensor's gradients begin here, as the tiles have it
    OptimBytes allocated;               // on an imagined device only counted, and no kernel is compiled
    OptimStream stream[OPTIM_STREAMS];  // the arrays of the weights and of each launch's states, in a fixed order
    char stream_name[OPTIM_STREAMS][ARRAY_NAME_BYTES];
    int stream_count;
    Settle settle[4 * LAUNCHES];
    int settles;
    OwnMemory memory[64 * LAUNCHES];
    int memories;
    JitRequest request[8 * LAUNCHES];  // the kernels that optim_make compiles
    int requests;
};

// Makes the table and the next numbers of a format in spans, for a run of the arena (spans.cu).
void spans_create(Optim* optim, const ArenaRun* run, const FormatRow* format, Streams* streams);
// Make what the passes before the step of a launch need (rows.cu), and a rule that reads matrices (matrix.cu).
void rows_create(Optim* optim, int launch);
void matrix_create(Optim* optim, int launch);

// Allocates device memory for a table: zeros, or a copy of host memory.
void* optim_table(Optim* optim, int64_t bytes, const void* from);
template <class T>
T* table_memory(Optim* optim, int64_t bytes, const T* from = nullptr) {
    return (T*)optim_table(optim, bytes, from);
}
// Asks for a kernel, which optim_make has compiled with all others at its end.
void kernel_make(Optim* optim, const OptimConfig* config, const Rows* rows, const char* name, int threads,
                 int shared_bytes, Kernel* kernel);
// Makes a kernel of a launch's step: at most one thread block for each multiprocessor, with the threads and shared
// memory of step_shape.
void kernel_create(Optim* optim, const LaunchPlan* plan, StepKernel* kernel, const Rows* rows);

// The numbers from which the constants of a step (constants.h) are computed, for each group.
struct StepConstants {
    HyperSource source[STEP_GROUPS];
    double rate[STEP_GROUPS];
    const float* rate_at[STEP_GROUPS];  // on the device: a replay reads the rate here; null: it is `rate`
    int64_t lag[STEP_GROUPS];           // how many steps fewer the group's tensors have taken
    int groups;
};

// The arguments of kernels that were captured in a CUDA graph, in device memory. Kernels of one stream use them one
// after another.
struct Replayed {
    StepArguments step;
    float changing[3];  // the first group's one_minus_beta2 and root2, and root3 (SettleArguments)
};

// A step of some tiles of a launch. With a rule that reads rows or matrices these are whole tensors in the arena's
// order.
struct LaunchStep {
    const OptimConfig* config;  // the launch's, with the betas of this step
    const float* grad_scale;
    int64_t number;                // of the step, from 1
    const Tile* tiles;             // (count)
    const Tile* applied;           // (count) with a rule that reads matrices, the tiles of the second kernel
    int64_t first = 0, count = 0;  // the number of the first tile in the launch's list; how many they are
    StepConstants constants = {};
    const int64_t* clock = nullptr;  // of a step that a CUDA graph captures: number of the step, on the device
    Replayed* replayed = nullptr;    // of such a step: where its kernels read their arguments; else null
};

// Returns the number of the step for the tensors of the first group.
inline int64_t own_number(const LaunchStep* step) {
    return step->number - step->constants.lag[0];
}

// optim_passes runs the passes before a step of a rule that reads rows and of --limit-growth, if there are any; the
// groups of its constants are those of the plan. Then optim_launch updates the tiles.
void optim_passes(const Optim* optim, int launch, const LaunchStep* step);
void optim_launch(const Optim* optim, int launch, const LaunchStep* step);

// Returns the arguments of a launch's step: its arrays and constants.
StepArguments launch_arguments(const Optim* optim, const StepLaunch* launch, const LaunchStep* step);
// Runs a kernel of the step, or its CPU version, on the tiles of the arguments.
void kernel_run(const Optim* optim, const StepKernel* kernel, const LaunchStep* step, StepArguments* arguments);
// Takes the step of a rule that reads matrices (matrix.cu). If the rule projects gradients, the step takes all tiles of
// the launch.
void launch_matrices(const Optim* optim, const StepLaunch* launch, const LaunchStep* step,
                     const StepArguments* arguments);

// Ends a step, after all launches: of a tensor, or of all if that is -1.
void optim_commit_scales(const Optim* optim, int tensor, const float* grad_scale);

// Makes tile `i` of a tensor, which is number `number` of its launch's list, without its gradients, and *applied with a
// rule that reads matrices.
Tile optim_tile(const Optim* optim, int tensor, int64_t i, int64_t number, Tile* applied);

// Returns array i of the slot in which a tensor lies; null if there is none.
void* optim_array(const Optim* optim, int tensor, Slot slot, int i);

// Call this when others have written the states of an optimizer that took steps.
void optim_loaded(Optim* optim);

// Captures a kernel that writes the arguments to step->replayed in each replay (placed.cu), with the constants of the
// clock's step. Returns the address from which the next kernel reads them.
const StepArguments* placed_replay(const Device* dev, const LaunchStep* step, const StepArguments* arguments);
