// The dynamic exponent format of bitsandbytes and torchao (Dettmers, arXiv 1511.04561), 8 bits with a sign (dyn8) or
// without (udyn8), block 256, scale absmax. Below 1 there are 7 decades. The levels of a decade are the middles of a
// uniform partition of it, and each decade has twice as many levels as the one below:
//     level = 10^(i - 6) * (0.1 + 0.9 (j + 1/2) / n),   n = 2^i (signed) or 2^(i + 1), i = 0 .. 6, j = 0 .. n - 1
// Further levels are 0 and 1. The signed format also has the negative levels, but no -1: a block's largest magnitude,
// if negative, loses 0.7 %. Codes are those of these libraries for the same y. They divide by the scale and this
// multiplies by its reciprocal, so y may differ in its last bit, and its code if y is within 2^-23 of a bound. There
// are two intended differences: the code of v is never 0, theirs is for v < 1.6e-7 absmax and v = 0; and bitsandbytes
// keeps the sign of an m that rounds to 0.
#pragma once
#include "levels.cuh"

EMBED_SOURCE

// Returns the k-th positive level, from 1 on, of a map whose lowest decade has `first` levels.
OPTIM_HOST inline double dynamic_level(int k, int first, int decades) {
    double power = 1.0;
    for (int i = 1; i < decades; i++) power /= 10.0;
    int n = first;
    for (k--; k >= n && decades > 1; decades--) k -= n, n *= 2, power *= 10.0;
    return k >= n ? 1.0 : power * (0.1 + 0.9 * (k + 0.5) / n);
}

// Returns the k-th level above zero, or for k < 0 below zero, of a map with a sign.
OPTIM_HOST inline double dynamic_signed(int k, int decades) {
    double magnitude = k == 0 ? 0.0 : dynamic_level(k < 0 ? -k : k, 1, decades);
    return (double)(float)(k < 0 ? -magnitude : magnitude);
}

struct DynamicSigned8 : MapDefaults<DynamicSigned8> {
    static constexpr int BITS = 8, ZERO = 127, CELL_BITS = 6, BINADE_BITS = 5;
    static constexpr bool SIGNED = true, EVEN = false, MIRRORED = true;
    typedef FloatCells<90, 2, 105, 5, 22> Cells;
    static constexpr float MIN = 5.5e-7f;  // the level ZERO + 1

    static OPTIM_HOST double level(int code) { return dynamic_signed(code - ZERO, 7); }
};

struct DynamicUnsigned8 : MapDefaults<DynamicUnsigned8> {
    static constexpr int BITS = 8, ZERO = 0, CELL_BITS = 7, BINADE_BITS = 5;
    static constexpr bool SIGNED = false, EVEN = false;
    typedef FloatCells<171, 3, 106, 5, 21> Cells;
    static constexpr float MIN = 3.25e-7f;  // the level ZERO + 1

    static OPTIM_HOST double level(int code) { return code == 0 ? 0.0 : (double)(float)dynamic_level(code, 2, 7); }
};

typedef Levels<DynamicSigned8> Dyn8;
typedef Levels<DynamicUnsigned8> Udyn8;
