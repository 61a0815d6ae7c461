// fp32: the value itself, 4 bytes. Nothing is rounded; a NaN is stored with one bit pattern.
#pragma once
#include "elementwise.cuh"

EMBED_SOURCE

struct Fp32 : ElementFormat<Fp32> {
    typedef uint32_t Code;
    static constexpr const char* DTYPE = "F32";

    static OPTIM_INLINE float decode(uint32_t code) { return bits_float(code); }

    static OPTIM_INLINE uint32_t encode(float x) { return float_bits(canonical(x)); }
};
