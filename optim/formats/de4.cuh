// 4 bits with a dynamic exponent and a sign, block 128, scale absmax: lpmm's and torchao's map for m (arXiv
// 2309.01507). The dynamic format of dyn8.cuh with three decades:
//     0, +-0.0055, +-0.0325, +-0.0775, +-0.2125, +-0.4375, +-0.6625, +-0.8875 and 1; no -1
// Two codes a byte, the first in the upper half, as torchao packs them (lpmm: the lower).
#pragma once
#include "dyn8.cuh"

EMBED_SOURCE

struct DynamicSigned4 {
    static constexpr int BITS = 4, ZERO = 7, CELL_BITS = 8, BINADE_BITS = 0;
    static constexpr bool SIGNED = true, EVEN = true, MIRRORED = false;
    typedef EvenCells<65> Cells;           // an odd number: one begins at zero
    static constexpr float MIN = 0.0055f;  // the level ZERO + 1
    static constexpr const char* DTYPE = "U8";

    static OPTIM_HOST double level(int code) {
        int k = code - ZERO;
        double magnitude = k == 0 ? 0.0 : dynamic_level(k < 0 ? -k : k, 1, 3);
        return (double)(float)(k < 0 ? -magnitude : magnitude);
    }

    static OPTIM_HOST double bound(int code) { return 0.5 * (level(code) + level(code + 1)); }
};

typedef Levels<DynamicSigned4> De4;
