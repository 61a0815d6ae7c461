// Weights as fp8 with a scale a block, and the next 8 bits of the value beside it: of y = x / scale
//     wide = round(y) to the float with 8 more bits of mantissa (e4m3: e4m11)
//     high = (wide + 128) >> 8           fp8, what the model sees; a carry runs into the exponent as it should
//     low  = wide - (high << 8)          in [-128, 127]
// so the update sees 12 significant bits of an e4m3 weight, and high is wide rounded to nearest, ties away from zero.
// |error| <= 2^-12 |x| while |y| >= 2^-6, and half of 2^-17 of the scale below. To nearest, or stochastically.
// The scale is a power of two (e8m0, the smallest whose largest level holds the block's largest weight): weights that
// did not change are stored again as they were, which a scale that follows the largest weight would not allow.
// Bytes an element: 2 and 1 / BLOCK.
#pragma once
#include "minifloat.cuh"
#include "split.cuh"

EMBED_SOURCE

// Format with its MANTISSA bits and LEAST exponent.
template <class Format, int MANTISSA, int LEAST, int BLOCK, Rounding ROUNDING>
struct BlockSplit {
    static constexpr StreamInfo STREAM[3] = {
        {"", Format::DTYPE, 8, 1}, {".scales", "F8_E8M0", 8, BLOCK}, {".low", "I8", 8, 1}};
    static constexpr int CUT = 23 - (MANTISSA + 8);  // of the bits of a normal number

    // Sign and magnitude of y in the wide float. `noise`: 16 random bits, unless to nearest.
    static OPTIM_INLINE uint32_t wide(float y, uint32_t noise) {
        float a = exact_min(exact_abs(y), Format::LARGEST);
        uint32_t bits = float_bits(a), m = (bits & 0x7fffffu) | 0x800000u;
        int exponent = (int)(bits >> 23) - (LEAST + 127), below = exponent < 0 ? -exponent : 0;
        int shift = CUT + below, over = shift > 31 ? shift - 31 : 0;
        m >>= over > 31 ? 31 : over;
        shift -= over;
        uint32_t half = (1u << (shift - 1)) - 1u + (m >> shift & 1u);
        uint32_t random = shift < 16 ? noise >> (16 - shift) : noise << (shift - 16);
        m = (m + (ROUNDING == NEAREST ? half : random)) >> shift;
        return m + ((uint32_t)(exponent < 0 ? 0 : exponent) << (MANTISSA + 8)) + (float_bits(y) >> 16 & 0x8000u);
    }

    template <int COUNT>
    static OPTIM_INLINE void put(const Streams& streams, int first, const float* x, float inverse,
                                 const NoiseKey& key) {
        Lanes<uint8_t, COUNT> high;
        Lanes<int8_t, COUNT> low;
        Noise noise = {};
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) {
            if (ROUNDING == STOCHASTIC && i % NOISE_ELEMENTS == 0) noise = noise_draw(key, first + i);
            uint32_t code = wide(exact_mul(x[i], inverse), noise_lane(noise, i % NOISE_ELEMENTS));
            high.lane[i] = (uint8_t)((code + 128u) >> 8);
            low.lane[i] = (int8_t)code;
        }
        store_value(streams.codes, first, high);
        store_value(streams.more, first, low);
    }

    template <int COUNT>
    static OPTIM_INLINE void get(const Streams& streams, int first, float* x) {
        float scale = ScaleE8m0::decode(((const uint8_t*)streams.extra)[first / BLOCK]);
        auto high = load_value<Lanes<uint8_t, COUNT>>(streams.codes, first);
        auto low = load_value<Lanes<int8_t, COUNT>>(streams.more, first);
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) {
            uint32_t code = ((uint32_t)high.lane[i] << 8) + (uint32_t)(int)low.lane[i];
            // As Minifloat's: the magnitude in fp32's place is 2^(LEAST + 126) times too small.
            float tiny = bits_float((code & 0x8000u) << 16 | (code & 0x7fffu) << CUT);
            x[i] = exact_mul(exact_mul(tiny, bits_float((uint32_t)(LEAST + 253) << 23)), scale);
        }
    }

    static OPTIM_INLINE void load(const Streams& streams, int first, float* x, int n, const NoiseKey&) {
        int c = 0;
        OPTIM_UNROLL
        for (; c + 16 <= n; c += 16) get<16>(streams, first + c, x + c);
        if (c < n) get<8>(streams, first + c, x + c);
    }

#ifdef __CUDACC__
    template <int COUNT>
    static __device__ __forceinline__ void thread_put(const Streams& streams, int first, const float* x,
                                                      const NoiseKey& key) {
        float top = 0.0f;
#pragma unroll
        for (int i = 0; i < COUNT; i++) top = fmaxf(fabsf(x[i]), top);
        uint8_t code;
        BlockScale s = block_scale<Format, ScaleE8m0>(neighbours_max<BLOCK / COUNT, TILE_ELEMENTS / COUNT>(top), &code);
        if (first % BLOCK == 0) ((uint8_t*)streams.extra)[first / BLOCK] = code;
        put<COUNT>(streams, first, x, s.inverse, key);
    }
#endif

#ifndef __CUDACC_RTC__
    static void blocks_put(const Streams& streams, int first, const float* x, int n, const NoiseKey& key) {
        for (int b = 0; b < n; b += BLOCK) {
            float top = 0.0f;
            for (int i = 0; i < BLOCK; i++) top = exact_max(exact_abs(x[b + i]), top);
            BlockScale s = block_scale<Format, ScaleE8m0>(top, (uint8_t*)streams.extra + (first + b) / BLOCK);
            for (int c = 0; c < BLOCK; c += 8) put<8>(streams, first + b + c, x + b + c, s.inverse, key);
        }
    }
#endif

    static OPTIM_INLINE void store(const Streams& streams, int first, const float* x, int n, const NoiseKey& key) {
#ifdef __CUDA_ARCH__
        if (n == 16) {
            thread_put<16>(streams, first, x, key);
        } else {
            thread_put<8>(streams, first, x, key);
        }
#else
        blocks_put(streams, first, x, n, key);
#endif
    }

    static OPTIM_INLINE void set(const Streams& streams, int first, const float* x, int n) {
        BlockSplit<Format, MANTISSA, LEAST, BLOCK, NEAREST>::store(streams, first, x, n, NoiseKey{});
    }

    static OPTIM_INLINE void view(const Streams& streams, int first, float* x, int n) {
        Blocks<Format, BLOCK, ScaleE8m0, NEAREST>::load(streams, first, x, n, NoiseKey{});
    }
};
