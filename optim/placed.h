// Steps over tensors of the caller's own, as PyTorch has them. Weights and gradients lie where the caller says at each
// step; only the states lie in arenas of the optimizer, whose config is `placed`.
//
// A table gives each tile of 2048 elements its place (TilePlace, kernel.cuh). So the step is still one launch for each
// combination of formats, and it reads gradients and writes weights in place. Some data passes through a small arena
// beside the tensors, because the copy engine or the passes cannot read it in place:
//     tiles that are not whole, at the end of a tensor or at a cut          4 to 8 KB a tensor
//     tensors that do not begin at a multiple of 16 bytes                   the whole tensor
//     gradients of a rule that reads rows or matrices, or of --limit-growth the whole tensor
//
// A step costs three short kernels besides optim_step's work, and an upload of 16 bytes a tensor if an address has
// changed. If other tensors have gradients than in the last step, or other groups, 48 bytes a tile are uploaded.
//
// A step may be captured in a CUDA graph if the configuration says `replays`, after a step with the same tensors. What
// changes from step to step then comes from device memory: before each kernel another one computes the constants
// (constants.h) for the step that a clock there counts, and leaves the arguments where the kernel reads them. Steps
// that project gradients cannot be captured, since the host decides when they do so anew, nor those with scales of
// whole tensors.
#pragma once
#include "matrix/low_rank.h"
#include "nibble_optim.h"
#include "plan.h"

// The facts about a tensor that no step changes. A tensor is cut if other processes hold parts of it: then `count` of
// its elements lie here, and `head` elements of their first tile come before them.
struct PlacedTensor {
    int64_t count;
    int64_t head;     // below TILE_ELEMENTS; rows x cols of its OptimTensor are head + count
    int64_t element;  // the first one of the first tile, counted over the whole model: a multiple of TILE_ELEMENTS
};

typedef struct PlacedTables PlacedTables;

// `tensors` has an entry for each of the optimizer's. The tables must not outlive the optimizer.
PlacedTables* placed_create(Optim* optim, OptimType compute, const PlacedTensor* tensors);
void placed_free(PlacedTables* tables);

// Takes one step, on the stream of the optimizer's device: it does not read the stream of `step`, whose other members
// nibble_optim.h describes. Reports through user_error, before anything
// changes, if some tensors of a rule that reads rows or matrices, or of formats whose scales are of whole tensors, have
// a gradient and others none, or if tensors of such a rule have different betas or have taken different numbers of
// steps.
void placed_step(PlacedTables* tables, const NibbleStep* step);

// True while the device's stream is captured in a CUDA graph.
bool is_capturing(const Device* dev);
// The number of the last step, which replays of a graph raise; waits for the stream. 0 before the first.
int64_t placed_clock(const PlacedTables* tables);

// placed_step takes its steps by these parts of optim_step.

// The arguments that all launches of a step have in common.
StepArguments step_begin(const Optim* optim, const float* grad_scale, int64_t step);

// A step of a launch whose constants and number come from the caller.
struct LaunchStep {
    const OptimConfig* config;  // the launch's, with the betas of this step
    int64_t step;               // counts the tensors' own steps
    const LowPlace* places;     // as low_rank_apply takes them
};

// optim_passes and optim_launch set the arrays that `arguments` needs besides tiles and places; `grads` is an arena, or
// null if the places have the gradients. optim_passes runs the passes of a rule that reads rows and of --limit-growth,
// which read the constants in the order of the plan's groups. A launch without passes does not need the call.
void optim_passes(const Optim* optim, int launch, const void* grads, StepArguments* arguments, const LaunchStep* its);
// Updates the tiles that `arguments` names; a launch's passes come before its first tiles. If the rule reads matrices,
// these are all tiles of the launch in the arena's order, and the gradients of their places lie in the scratch.
void optim_launch(const Optim* optim, int launch, const void* grads, StepArguments* arguments, const LaunchStep* its);
const MatrixWork* optim_matrix_work(const Optim* optim, int launch);
// True if a launch can be captured in a CUDA graph.
bool optim_replays(const Optim* optim, int launch);

// A captured kernel reads this in device memory.
struct Replayed {
    StepArguments step;
    float changing[3];  // of the first group: rest2, root2, and root2 of beta3 (SettleArguments)
};

// Each replay of a captured step computes its constants from this.
struct Replay {
    HyperSource source[STEP_GROUPS];
    double rate[STEP_GROUPS];
    const float* rate_at[STEP_GROUPS];  // on the device, or null
    int64_t lag[STEP_GROUPS];           // how many steps fewer the group's tensors have taken
    int groups;
    const int64_t* clock;  // on the device: the number of the last step
    Replayed* to;          // device memory, which kernels of one stream use one after another
};

// While this is not null, the optimizer's kernels are captured: they read their arguments from replay->to, and before
// each of them placed_replay captures a kernel that writes there.
void optim_replay(Optim* optim, const Replay* replay);
void placed_replay(const Device* dev, const Replay* replay, const StepArguments* arguments);
// Ends a step, after all launches.
void optim_settle(const Optim* optim, const float* grad_scale);
