// Weights as fp8 with a scale for each block, and the next 8 bits of the value beside them. With y = x / scale:
//     wide = round(y) to the float with 8 more bits of mantissa (e4m3: e4m11)
//     high = (wide + 128) >> 8           fp8, what the model sees; a carry runs into the exponent as it should
//     low  = wide - (high << 8)          in [-128, 127]
// So the update sees 12 significant bits of an e4m3 weight, and `high` is `wide` rounded to nearest, ties away from
// zero. The error is at most 2^-12 |x| while |y| >= 2^-6, and below that half of 2^-17 of the scale. Rounding is to
// nearest or stochastic.
// The scale is a power of two (e8m0), the smallest whose largest level holds the block's largest weight. So weights
// that did not change keep their codes, which a scale that follows the largest weight would not allow.
// Bytes an element: 2 and 1 / BLOCK.
#pragma once
#include "minifloat.cuh"
#include "split.cuh"

EMBED_SOURCE

// Format is a Minifloat with these MANTISSA bits and MIN exponent.
template <class Format, int MANTISSA, int MIN, int BLOCK, Rounding ROUNDING>
struct BlockSplit : StorageFunctions<BlockSplit<Format, MANTISSA, MIN, BLOCK, ROUNDING>> {
    typedef BlockSplit<Format, MANTISSA, MIN, BLOCK, NEAREST> Nearest;
    static constexpr StreamInfo STREAM[3] = {
        {"", Format::DTYPE, 8, 1}, {".scales", "F8_E8M0", 8, BLOCK}, {".low", "I8", 8, 1}};
    static constexpr int SHIFT = 16 - (23 - (MANTISSA + 8));  // of a normal number's bits; then 16 bits are cut off

    // True if store() fills key.seen on this GPU.
    static constexpr bool GIVES_SEEN = ON_HOPPER;

    // Returns a word whose upper half is the magnitude of the wide float, from the bits of Minifloat's lowered().
    // `noise`: 16 random bits, which rounding to nearest ignores. In subnormals, lowered() has rounded y to 2^-12 of a
    // step.
    static OPTIM_INLINE uint32_t wide_upper(uint32_t bits, uint32_t noise) {
        return (bits << SHIFT) + (ROUNDING == NEAREST ? 0x7fffu + (bits >> (16 - SHIFT) & 1u) : noise);
    }

    // Returns sign and magnitude of y in the wide float.
    static OPTIM_INLINE uint32_t wide(float y, uint32_t noise) {
        uint32_t bits = Format::lowered(y, Format::folded(1.0f), 0);
        return (wide_upper(bits, noise) >> 16 & 0x7fffu) | (bits >> 16 & 0x8000u);
    }

    // Stores elements whose scale is known, two at a time in halves of words. A magnitude is at most that of LARGEST,
    // so no sum leaves its half.
    template <int COUNT>
    static OPTIM_INLINE void put_scaled(const Streams& streams, int first, const float* x, float inverse,
                                        const NoiseKey& key) {
        const float fold = Format::folded(inverse);
        Noise noise = {};
        if (ROUNDING == STOCHASTIC) noise = noise_draw(key, first);
        Packed<8, COUNT> high, low;
        uint32_t wide[COUNT / 2], up[COUNT / 2];
        OPTIM_UNROLL
        for (int i = 0; i < COUNT / 2; i++) {
            uint32_t a = Format::lowered(x[2 * i], fold, 0), b = Format::lowered(x[2 * i + 1], fold, 0);
            uint32_t magnitudes =
                upper_halves(wide_upper(a, noise_lane(noise, 2 * i)), wide_upper(b, noise_lane(noise, 2 * i + 1)));
            wide[i] = bits_chosen(0x80008000u, upper_halves(a, b), magnitudes);
            up[i] = wide[i] + 0x00800080u;
            if (key.seen) key.seen[i] = (up[i] >> Format::SHIFT & SEEN_MASK) | (up[i] & 0x80008000u);
        }
        OPTIM_UNROLL
        for (int w = 0; w < COUNT / 4; w++) {
            high.word[w] = upper_bytes(up[2 * w], up[2 * w + 1]);
            low.word[w] = upper_bytes(wide[2 * w] << 8, wide[2 * w + 1] << 8);
        }
        store_value(streams.codes, first, high);
        store_value(streams.more, first, low);
    }

    // The bits of a bf16 that hold the magnitude of `high`, which is LOWER times the value.
    static constexpr uint32_t SEEN_MASK = 0x7f007f00u >> Format::SHIFT & 0x7fff7fffu;

    template <int COUNT>
    static OPTIM_INLINE void get(const Streams& streams, int first, float* x, const NoiseKey&) {
        const uint32_t scale = ((const uint8_t*)streams.extra)[first / BLOCK];
        auto high = load_value<Packed<8, COUNT>>(streams.codes, first);
        auto low = load_value<Packed<8, COUNT>>(streams.more, first);
        // The magnitude's bits in an fp32 make LOWER times the value, as in Minifloat, so up to two factors give the
        // value.
        const uint32_t exponent = scale + (uint32_t)(126 + MIN), max = exponent < 254 ? exponent : 254;
        const float factor = bits_float(scale > 0 ? max << 23 : 0u);
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) {
            uint32_t code = ((high.get(i) << 8 | low.get(i)) ^ 0x80u) - 0x80u;
            int bits = (int)(code << 16) >> SHIFT;  // the sign fills the bits above the exponent
            x[i] = exact_mul(bits_float((uint32_t)bits & KEPT), factor);
        }
        if (exponent > 254) {  // no weights are so large
            OPTIM_UNROLL
            for (int i = 0; i < COUNT; i++) x[i] = exact_mul(x[i], bits_float((exponent - 254 + 127) << 23));
        }
    }

    static constexpr uint32_t KEPT = 0x80000000u | 0x7fff0000u >> SHIFT;

#ifdef __CUDACC__
    template <int COUNT>
    static __device__ __forceinline__ void put(const Streams& streams, int first, const float* x, const NoiseKey& key) {
        float top = 0.0f;
#pragma unroll
        for (int i = 0; i < COUNT; i++) top = fmaxf(fabsf(x[i]), top);
        uint8_t code;
        top = neighbours_max<BLOCK / COUNT, TILE_ELEMENTS / COUNT>(top, key);
        BlockScale s = block_scale<Format, ScaleE8m0>(top, &code);
        if (first % BLOCK == 0) ((uint8_t*)streams.extra)[first / BLOCK] = code;
        float value[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) value[i] = x[i];
        s.inverse = block_limit<Format, ScaleE8m0, STOCHASTIC>(top, s.inverse, value, COUNT);
        put_scaled<COUNT>(streams, first, value, s.inverse, key);
#ifdef __CUDA_ARCH__
        if constexpr (GIVES_SEEN) {
            if (key.seen) Format::template seen_scaled<COUNT>(code, true, key.seen);
        }
#endif
    }
#endif

    static OPTIM_INLINE void store(const Streams& streams, int first, const float* x, int n, const NoiseKey& key) {
#ifdef __CUDA_ARCH__
        StorageFunctions<BlockSplit>::store(streams, first, x, n, key);
#else
        blocks_store<Format, ScaleE8m0, STOCHASTIC, BlockSplit>(BLOCK, streams, first, x, n, key);
#endif
    }

    static OPTIM_INLINE void view(const Streams& streams, int first, float* x, int n) {
        Blocks<Format, BLOCK, ScaleE8m0, NEAREST>::load(streams, first, x, n, NoiseKey{});
    }
};
