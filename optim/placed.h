// Steps over tensors of the caller's own, such as PyTorch's. Weights and gradients lie at addresses that the caller
// gives at each step; only the states lie in arenas of the optimizer, whose config has `placed`.
//
// A table says where each tile of 2048 elements lies (Tile, kernel.cuh). So a step is still one launch for each
// combination of formats, and it reads gradients and writes weights in place. Some tiles pass through a small arena
// beside the tensors, because TMA or the passes cannot read them in place:
//     tiles that are not whole, at the end of a tensor or at a cut          4 to 8 KB a tensor
//     tensors that do not begin at a multiple of 16 bytes                   the whole tensor
//     gradients of a rule that reads rows or matrices, or of --limit-growth the whole tensor
//
// A step costs three short kernels besides optim_step's work, and an upload of 16 bytes a tensor if an address has
// changed. If other tensors have gradients than in the last step, or tensors changed their groups, 100 bytes a tile are
// uploaded.
//
// A step may be captured in a CUDA graph if the configuration has `replays` and a step with the same tensors was taken
// before. The values that change from step to step then come from device memory: before each kernel of the step,
// another kernel computes the constants (constants.h) for the step that a clock on the device counts, and writes the
// arguments to where the step's kernel reads them. Steps that project gradients cannot be captured, since the host
// decides when they take new directions; nor can steps that measure scales of whole tensors.
#pragma once
#include "made.h"
#include "nibble_optim.h"

// The facts about a tensor that no step changes. A tensor is cut if other processes hold parts of it. Then `count` of
// its elements lie here, and `head` elements of their first tile lie before them, elsewhere.
struct PlacedTensor {
    int64_t count;
    int64_t head;     // below TILE_ELEMENTS; rows x cols of its OptimTensor are head + count
    int64_t element;  // first element of the first tile, counted over the whole model: a multiple of TILE_ELEMENTS
};

typedef struct PlacedTables PlacedTables;

// Sets *tables, at once, to tables for steps; `tensors` has an entry for each of the optimizer's tensors. placed_free
// frees the tables, which must not outlive the optimizer.
void placed_create(PlacedTables** tables, Optim* optim, OptimType compute, const PlacedTensor* tensors);
void placed_free(PlacedTables* tables);

// Takes one step on the stream of the optimizer's device; nibble_optim.h describes `step`, whose member `stream` is
// ignored here. Reports through user_error, before anything changes, if some tensors of a rule that reads rows or
// matrices, or of formats with scales of whole tensors, have gradients and others have none, or if tensors of such a
// rule have different betas or numbers of steps.
void placed_step(PlacedTables* tables, const NibbleStep* step);

// Returns true while the device's stream is being captured into a CUDA graph.
bool is_capturing(const Device* dev);
// Returns the number of the last step, replays of a graph included; 0 before the first. It waits for the stream.
int64_t placed_clock(const PlacedTables* tables);

// Reads a moment of a tensor as fp32 values, or writes it, rounded to nearest. A v of rows and columns is read as their
// product and gets the means of what is written. Returns false if the optimizer does not keep it in the tensor's shape.
bool optim_moment(Optim* optim, int tensor, Slot slot, float* values, bool writes);
