// Weights as bf16, which the matmuls read, and the next 16 or 8 bits of the fp32 value beside them. With the bits of a
// float as an integer:
//     high = (bits + half a step of bf16) >> 16     bf16, rounded to nearest, ties away from zero
//     low  = bits - (high << 16)                    in [-half, half): a signed integer of 16 bits, or of the upper 8
//     bits = (high << 16) + low
// A carry from the mantissa into the exponent gives the right number, so no case is special. With 16 bits every value
// is restored exactly, also values that bf16 rounds to infinity: this is fp32 with the matmul's copy inside it, and has
// the bits of apex's and TransformerEngine's remainders. NaN is stored with one pattern. With 8 bits the value is first
// rounded to 16 significant bits: to nearest (|error| <= 2^-17 of the next power of two above |x|, which is 1/512 of a
// step of bf16), or stochastically, which never stalls. FlashOptim's 24-bit weights scale the remainder by 127 instead,
// for an error of 1/508 of a step. The model sees the bf16. Bytes an element: 4 or 3.
#pragma once
#include "bf16.cuh"

EMBED_SOURCE

// Low is int16_t or int8_t.
template <class Low, Rounding ROUNDING>
struct Split : StorageFunctions<Split<Low, ROUNDING>> {
    typedef Split<Low, NEAREST> Nearest;
    static constexpr int LOW_BITS = 8 * sizeof(Low), CUT_BITS = 16 - LOW_BITS;
    static constexpr StreamInfo STREAM[3] = {{"", "BF16", 16, 1}, {".low", LOW_BITS == 16 ? "I16" : "I8", LOW_BITS, 1}};

    // Returns the kept bits of x after adding `noise`: CUT_BITS random bits, or half a step. If there are no bits to
    // cut, noise is ignored.
    static OPTIM_INLINE uint32_t cut(float x, uint32_t noise) {
        uint32_t bits = float_bits(x);
        if (CUT_BITS == 0) return float_bits(canonical(x));
        if (!is_finite(x)) return (is_nan(x) ? 0x7fc00000u : bits) >> CUT_BITS;
        return (bits + noise) >> CUT_BITS;
    }

    // Rounds to nearest, ties to even.
    static OPTIM_INLINE uint32_t nearest(float x) {
        return cut(x, ((1u << CUT_BITS) - 1) / 2 + (float_bits(x) >> CUT_BITS & 1u));
    }

    // These load and store COUNT elements of one thread: 16, so that the narrow half has 16 bytes, or 8 if a thread has
    // no more.
    template <int COUNT>
    static OPTIM_INLINE void get(const Streams& streams, int first, float* x, const NoiseKey&) {
        auto high = load_value<Packed<16, COUNT>>(streams.codes, 2 * first);
        auto low = load_value<Packed<LOW_BITS, COUNT>>(streams.scales, (int)sizeof(Low) * first);
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) {
            uint32_t bits = (high.get(i) << LOW_BITS) + (uint32_t)(int)(Low)low.get(i);
            x[i] = bits_float(bits << CUT_BITS);
        }
    }

    template <int COUNT>
    static OPTIM_INLINE void put(const Streams& streams, int first, const float* x, const NoiseKey& key) {
        static_assert(COUNT <= NOISE_ELEMENTS, "one call serves them");
        Noise noise = {};
        if (ROUNDING == STOCHASTIC) noise = noise_draw(key, first);
        uint32_t bits[COUNT];
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) {
            bits[i] = ROUNDING == NEAREST ? nearest(x[i]) : cut(x[i], noise_lane(noise, i) >> (16 - CUT_BITS));
        }
        Packed<16, COUNT> high = {};
        Packed<LOW_BITS, COUNT> low = {};
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) {
            high.add(i, (bits[i] + (1u << (LOW_BITS - 1))) >> LOW_BITS & 0xffffu);
            low.add(i, bits[i] & ((1u << LOW_BITS) - 1u));
        }
        store_value(streams.codes, 2 * first, high);
        store_value(streams.scales, (int)sizeof(Low) * first, low);
    }

    static OPTIM_INLINE void view(const Streams& streams, int first, float* x, int n) {
        Elementwise<Bf16, NEAREST>::load(streams, first, x, n, NoiseKey{});
    }
};
