// The tile: what the optimizer's step, the layout of its arena and the shards of several GPUs count in.
#pragma once

// See optim/float.cuh.
#ifndef EMBED_SOURCE
#define EMBED_SOURCE
#endif
EMBED_SOURCE

constexpr int TILE_ELEMENTS = 2048;  // tensors start at multiples of this, and no block of a format is longer
