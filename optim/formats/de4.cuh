// 4 bits with a dynamic exponent and a sign, block 128, scale absmax: lpmm's and torchao's map for m (arXiv
// 2309.01507). The dynamic format of dyn8.cuh with three decades:
//     0, +-0.0055, +-0.0325, +-0.0775, +-0.2125, +-0.4375, +-0.6625, +-0.8875 and 1; no -1
// A byte holds two codes, the first in the upper half, as torchao packs them (lpmm: in the lower half).
#pragma once
#include "dyn8.cuh"

EMBED_SOURCE

struct DynamicSigned4 : MapDefaults<DynamicSigned4> {
    static constexpr int BITS = 4, ZERO = 7, CELL_BITS = 8, BINADE_BITS = 0;
    static constexpr bool SIGNED = true, EVEN = true;
    typedef EvenCells<65> Cells;           // an odd number, so that one begins at zero
    static constexpr float MIN = 0.0055f;  // the level ZERO + 1

    static OPTIM_HOST double level(int code) { return dynamic_signed(code - ZERO, 3); }
};

typedef Levels<DynamicSigned4> De4;
