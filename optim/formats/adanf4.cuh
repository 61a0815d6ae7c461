// The 4-bit table of adafactor8bit 0.2.4, to read what it has stored and for nothing else: moments in it are decoded,
// and converted on load into a format that the user names; --m does not take it.
//     -1 and +-{0.6961928, 0.52507306, 0.3895074, 0.27408478, 0.17286907, 0.07958022}, 0, 0.8641379, 1
// absmax scale a block (128 elements there, by default), two codes a byte with the first in the upper half, as here.
// What is wrong with it: it is called NF4, and 10 of its 16 levels are none of QLoRA's (nf4.cuh); of the positive ones,
// which are to be eight quantiles of their own, 0.0796 and 1 are, and the rest mirrors the negative half. The level
// 0.8641379 has no negative fellow, but its CUDA kernel uses the bounds of the positive side for both: y in (-0.8481,
// -0.7802) is stored as -1 where -0.696 is nearer, so that codes differ from those of its own PyTorch path, large
// negative m grow by up to 28 %, and the mean of what is stored is below that of what was to be.
#pragma once
#include "levels.cuh"

EMBED_SOURCE

struct AdaNormal4 {
    static constexpr int BITS = 4, ZERO = 7, CELL_BITS = 4, BINADE_BITS = 4;
    static constexpr bool SIGNED = true, EVEN = false;
    static constexpr const char* DTYPE = "U8";

    static OPTIM_HOST double level(int code) {
        const double magnitudes[9] = {0.0,        0.07958022, 0.17286907, 0.27408478, 0.3895074,
                                      0.52507306, 0.6961928,  0.8641379,  1.0};
        int k = code - ZERO;
        return (double)(float)(k == -7 ? -1.0 : k < 0 ? -magnitudes[-k] : magnitudes[k]);
    }

    static OPTIM_HOST double bound(int code) { return 0.5 * (level(code) + level(code + 1)); }
};

typedef Levels<AdaNormal4> AdaNf4;
