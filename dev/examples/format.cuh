// A format of one's own, to copy to optim/formats and change (optim/README.md, How to add).
// It has 8 bits, levels equally far apart on both sides of zero, x = (code - 127) * scale with scale = absmax / 127 in
// a block. The comment in optim/formats/blocks.cuh says what each member is; these bits are those of --m lin8.
#pragma once
#include "../../optim/formats/blocks.cuh"

EMBED_SOURCE  // puts this file into the program, where NVRTC reads it

    struct My8 : BlockFormat<My8> {
    static constexpr int BITS = 8, ZERO = 127;
    static constexpr const char* DTYPE = "U8";
    static constexpr float LARGEST = 127.0f;

    static OPTIM_INLINE float decode(const Table*, uint32_t code, float scale) {
        return exact_mul((float)((int)code - ZERO), scale);
    }

    // The nearest level of y = x * inverse; a y in the middle goes up.
    static OPTIM_INLINE uint32_t nearest(const Table*, float x, float inverse, int lowest) {
        return (uint32_t)exact_max(exact_fma(x, inverse, 127.5f), (float)lowest);
    }

    // floor(y + r) with r uniform in [0, 1): one of the two neighbours, right on average. 128 more makes it positive.
    static OPTIM_INLINE uint32_t stochastic(const Table*, float x, float inverse, uint32_t noise, int lowest) {
        float r = exact_mul((float)noise, 1.0f / 65536.0f), t = exact_fma(x, inverse, exact_add(r, 128.0f));
        return (uint32_t)exact_min(exact_max(t, (float)lowest + 1.0f), 255.5f) - 1u;
    }
};
