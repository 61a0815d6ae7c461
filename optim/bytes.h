// Sizes of an optimizer's arrays and tables. Its creation allocates by them, and optim_bytes plans by them.
#pragma once
#include "plan.h"
#include "rows.h"

// With `offload` the arrays of codes, scales and the like are in host memory, where tiles of them are streamed from;
// the numbers of whole tensors are not.
inline bool on_host(bool offload, const StreamInfo& stream) {
    return offload && stream.span == SPAN_RUN;
}

// True if the matmuls read the codes as they are.
inline bool serves_directly(const FormatRow* weights, OptimType compute) {
    return strcmp(weights->stream[0].dtype, compute_row(compute)->stream[0].dtype) == 0;
}

// Bytes of the tile table and of each launch's counter of tiles.
inline int64_t tiles_bytes(int64_t tiles) {
    return tiles * (int64_t)sizeof(Tile) + LAUNCHES * (int64_t)sizeof(uint32_t);
}

// Bytes of the factors of the tiles, if a launch has some.
inline int64_t factors_bytes(const Plan* plan) {
    bool any = false;
    for (int i = 0; i < plan->launches; i++) any = any || config_scaled(&plan->launch[i].config);
    return any ? (plan->end - plan->begin) / TILE_ELEMENTS * (int64_t)sizeof(float) : 0;
}
