// Blocks (blocks.cuh) whose scales are themselves quantised: 8 bits a block, and an fp32 scale every 2048 elements.
//     second = the largest of the 2048 elements' scales
//     code = the ratio scale / second, rounded up to 3 bits of mantissa and 5 of exponent: 2^-32 (1 + 1/4) .. 1
//     scale = level(code) * second             0 for code 0, which only a block of zeros has
// The ratio is rounded up, so that no element exceeds the largest level; a scale is up to an eighth larger than it
// would be in fp32. The exponent has five bits, since v in the rows of rare tokens is easily below 2^-16 of their
// neighbours'. A block below 2^-32 of its tile's largest is stored with that scale, as if it were part of a longer
// block. This is for short blocks: fp32 scales would cost 1 bit an element for 32 elements and half a bit for 64; here
// they cost 0.27 and 0.14 bits. Bytes an element: BITS / 8, 1 / BLOCK and 4 / 2048.
#pragma once
#include "blocks.cuh"

EMBED_SOURCE

constexpr uint32_t DOUBLE_BASE = 0x3f800000u / (1u << 20) - 255u;  // code 255 is a ratio of 1

// Returns 1 / second, or 0 if second is 0.
OPTIM_INLINE float double_inverse(float second) {
    return second > 0.0f ? exact_reciprocal(second) : 0.0f;
}

// Returns the code of scale / second, rounded up, except that an excess which three roundings can cause does not count.
// The code is 0 for scale 0, otherwise 1 to 255.
OPTIM_INLINE uint32_t double_encode(float scale, float inverse) {
    uint32_t bits = float_bits(exact_min(exact_mul(scale, inverse), 1.0f));
    uint32_t code = (bits + 0xfffffu - 3u) >> 20;
    code = code > DOUBLE_BASE + 1u ? code - DOUBLE_BASE : 1u;
    return scale > 0.0f ? code : 0u;
}

template <class Format>
OPTIM_INLINE float double_decode(uint32_t code, float second) {
    float scale = exact_mul(bits_float((code + DOUBLE_BASE) << 20), second);
    return code > 0 ? exact_max(scale, Format::UNITS * 1.17549435e-38f) : 0.0f;
}

// Returns the scale of a block with largest value `absmax`, its inverse and its code. `second` is the tile's, and
// `inverse` double_inverse of it.
template <class Format>
OPTIM_INLINE BlockScale double_scale(float absmax, float second, float inverse, uint32_t* code) {
    float wanted;
    block_scale<Format, ScaleFp32>(absmax, &wanted);
    *code = double_encode(wanted, inverse);
    float scale = double_decode<Format>(*code, second);
    return {scale, *code > 0 ? scale_inverse<Format>(scale) : 0.0f};
}

// double_load and double_store take whole tiles on the CPU. They are not inlined, so that a table row compiles to
// little code.
template <class Format>
OPTIM_HOST void double_load(int block, const Streams& streams, int first, float* x, int n, const NoiseKey& key) {
    for (int i = 0; i < n; i += 8) {
        float second = ((const float*)streams.more)[(first + i) / TILE_ELEMENTS];
        float scale = double_decode<Format>(((const uint8_t*)streams.extra)[(first + i) / block], second);
        block_get<Format, 8>(streams, first + i, scale, x + i, key);
    }
}

template <class Format, Rounding ROUNDING>
OPTIM_HOST void double_store_tile(int block, const Streams& streams, int first, const float* x, const NoiseKey& key) {
    float absmax[TILE_ELEMENTS / 32], max = 0.0f, value[8];
    for (int b = 0; b < TILE_ELEMENTS / block; b++) {
        absmax[b] = 0.0f;
        for (int i = b * block; i < (b + 1) * block; i++) {
            absmax[b] = exact_max(exact_abs(block_value<Format>(x[i])), absmax[b]);
        }
        max = exact_max(absmax[b], max);
    }
    float* second = (float*)streams.more + first / TILE_ELEMENTS;
    block_scale<Format, ScaleFp32>(max, second);
    float inverse = double_inverse(*second);
    for (int b = 0; b < TILE_ELEMENTS / block; b++) {
        uint32_t code;
        BlockScale s = double_scale<Format>(absmax[b], *second, inverse, &code);
        ((uint8_t*)streams.extra)[first / block + b] = (uint8_t)code;
        for (int c = b * block; c < (b + 1) * block; c += 8) {
            for (int i = 0; i < 8; i++) value[i] = block_value<Format>(x[c + i]);
            float scaled = block_limit<Format, ROUNDING>(absmax[b], s.inverse, value, 8);
            block_put<Format, ROUNDING, 8>(streams, first + c, value, scaled, key);
        }
    }
}

template <class Format, Rounding ROUNDING>
OPTIM_HOST void double_store(int block, const Streams& streams, int first, const float* x, int n, const NoiseKey& key) {
    for (int t = 0; t < n; t += TILE_ELEMENTS) {
        double_store_tile<Format, ROUNDING>(block, streams, first + t, x + t, key);
    }
}

template <class Format_, int BLOCK, Rounding ROUNDING>
struct DoubleBlocks : Blocks<Format_, BLOCK, ScaleFp32, ROUNDING> {
    static_assert(BLOCK <= 256, "a block's exchange would overwrite what the group is told");
    typedef Blocks<Format_, BLOCK, ScaleFp32, ROUNDING> Plain;
    typedef typename Plain::Format Format;
    static constexpr StreamInfo STREAM[3] = {
        Plain::STREAM[0], {".scales", "U8", 8, BLOCK}, {".scales2", "F32", 32, TILE_ELEMENTS}};

#ifdef __CUDACC__
    // A store has the parts of Blocks, with store_in_tile in place of store_absmax; `max` is the largest value of the
    // tile.
    static constexpr bool WANTS_TILE_MAX = true;

    template <int COUNT>
    static __device__ __forceinline__ void store_in_tile(const Streams& streams, int first, const float* value,
                                                         float absmax, float max, bool clamped, const NoiseKey& key) {
        float second;
        block_scale<Format, ScaleFp32>(max, &second);
        uint32_t code;
        BlockScale s = double_scale<Format>(absmax, second, double_inverse(second), &code);
        if (clamped) s.inverse = block_inverse<Format, ROUNDING>(absmax, s.inverse);
        if (first % BLOCK == 0) ((uint8_t*)streams.extra)[first / BLOCK] = (uint8_t)code;
        if (first % TILE_ELEMENTS == 0) ((float*)streams.more)[first / TILE_ELEMENTS] = second;
        block_put<Format, ROUNDING, COUNT>(streams, first, value, s.inverse, key);
    }
#endif

    static OPTIM_INLINE void load(const Streams& streams, int first, float* x, int n, const NoiseKey& key) {
#ifdef __CUDA_ARCH__
        float scale = double_decode<Format>(((const uint8_t*)streams.extra)[first / BLOCK],
                                            ((const float*)streams.more)[first / TILE_ELEMENTS]);
        if (n == 16) {
            block_get<Format, 16>(streams, first, scale, x, key);
        } else {
            block_get<Format, 8>(streams, first, scale, x, key);
        }
#else
        double_load<Format>(BLOCK, streams, first, x, n, key);
#endif
    }

#ifndef __CUDACC_RTC__
    // A GPU calls the parts instead.
    static OPTIM_HOST void store(const Streams& streams, int first, const float* x, int n, const NoiseKey& key) {
        double_store<Format, ROUNDING>(BLOCK, streams, first, x, n, key);
    }

    static OPTIM_HOST void set(const Streams& streams, int first, const float* x, int n) {
        DoubleBlocks<Format, BLOCK, NEAREST>::store(streams, first, x, n, NoiseKey{});
    }
#endif

    static OPTIM_INLINE void view(const Streams& streams, int first, float* x, int n) {
        load(streams, first, x, n, NoiseKey{});
    }
};
