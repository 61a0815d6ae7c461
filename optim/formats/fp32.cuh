// fp32: the value itself, 4 bytes. Nothing is rounded; a NaN is stored with one bit pattern.
#pragma once
#include "storage.cuh"

EMBED_SOURCE

struct Fp32 : FormatDefaults {
    typedef float Code;
    static constexpr const char* DTYPE = "F32";

    static OPTIM_INLINE float decode(float code) { return code; }

    static OPTIM_INLINE float encode(float x) { return canonical(x); }
};
