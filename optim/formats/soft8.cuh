// FlashOptim's companding for m (arXiv 2602.23349): 8 bits, block 32, scale absmax,
//     z = 2 y / (1 + |y|),  code = floor(127 z + 1/2) as int8,  y = z / (2 - |z|)
// with steps of 0.004 at 0 and of 0.016 at 1. Here tables hold the levels and their bounds, (k - 1/2) / 127 in z, so
// that neither encoding nor decoding divides. FlashOptim stores scales as fp16, which loses m below 6e-5; here the
// default is fp32, and bf16 has the size of fp16 without this loss.
#pragma once
#include "levels.cuh"

EMBED_SOURCE

struct Softsign8 : MapDefaults<Softsign8> {
    static constexpr int BITS = 8, ZERO = 127, CELL_BITS = 8, BINADE_BITS = 0;
    static constexpr bool SIGNED = true, EVEN = true, MIRRORED = true, MINUS_ONE = true;
    typedef EvenCells<240> Cells;
    static constexpr float MIN = 1.0f / 253.0f;  // the level ZERO + 1

    static OPTIM_HOST double expand(double z) { return z / (2.0 - fabs(z)); }
    // The level of code 127 + k. Code 255 is never written and decodes to 1.
    static OPTIM_HOST double level(int code) { return (double)(float)expand(code > 254 ? 1.0 : (code - 127) / 127.0); }
    static OPTIM_HOST double bound(int code) { return code > 253 ? 2.0 : expand((code - 126.5) / 127.0); }
};

typedef Levels<Softsign8> Soft8;
