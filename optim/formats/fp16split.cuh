// Weights as fp16 and 8 bits more beside it: fp16's range with 19 significant bits in 3 bytes, as bf16+8 (split.cuh)
// has bf16's with 16. The magnitude is counted in 1/256 of fp16's steps, as an integer of 23 bits, exponent above
// mantissa:
//     m = |x| with fp16's exponents and 18 bits of mantissa, to nearest with ties to even, or stochastic
//     high = (m + 128) >> 8       the magnitude of an fp16, to nearest, ties away from zero
//     low = m - (high << 8)       in [-128, 128): a signed byte
//     |x| = (high << 8) + low
// A carry runs from the mantissa into the exponent as it should. Below 2^-14 the steps of m are 2^-32, of which x is
// first rounded to a 32nd. Above 65504 and half a step x saturates; infinity and NaN are kept.
// The model sees the fp16. Bytes an element: 3.
#pragma once
#include "fp16.cuh"
#include "split.cuh"

EMBED_SOURCE

template <Rounding ROUNDING>
struct Fp16Split {
    static constexpr StreamInfo STREAM[2] = {{"", "F16", 16, 1}, {".low", "I8", 8, 1}};
    static constexpr int CUT_BITS = 5;  // of fp32's mantissa
    static constexpr uint32_t MOST = 0x7bff7fu, INFINITE = 0x7c0000u;

    // The magnitude times 2^-112: its bits are fp16's with 13 more.
    static OPTIM_INLINE uint32_t lowered(float x) { return float_bits(exact_abs(exact_mul(x, bits_float(15u << 23)))); }

    // The sign above m.
    static OPTIM_INLINE uint32_t finish(float x, uint32_t m) {
        m = m > MOST ? MOST : m;
        return is_finite(x) ? m | (sign_bits(x) >> 8) : (uint32_t)Fp16::encode(x) << 8;
    }

    static OPTIM_INLINE uint32_t nearest(float x) {
        uint32_t bits = lowered(x);
        return finish(x, (bits + 15u + (bits >> CUT_BITS & 1u)) >> CUT_BITS);
    }

    // noise: CUT_BITS random bits.
    static OPTIM_INLINE uint32_t stochastic(float x, uint32_t noise) {
        return finish(x, (lowered(x) + noise) >> CUT_BITS);
    }

    static OPTIM_INLINE float decode(uint32_t bits) {
        uint32_t m = bits & 0x7fffffu;
        uint32_t raised = float_bits(exact_mul(bits_float(m << CUT_BITS), bits_float(239u << 23)));
        raised = m < INFINITE ? raised : 0x7f800000u | (m << CUT_BITS & 0x7fffffu);
        return bits_float(raised | (bits << 8 & 0x80000000u));
    }

    template <int COUNT>
    static OPTIM_INLINE void get(const Streams& streams, int first, float* x) {
        auto high = load_value<Lanes<uint16_t, COUNT>>(streams.codes, 2 * first);
        auto low = load_value<Lanes<int8_t, COUNT>>(streams.extra, first);
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) x[i] = decode(((uint32_t)high.lane[i] << 8) + (uint32_t)(int)low.lane[i]);
    }

    template <int COUNT>
    static OPTIM_INLINE void put(const Streams& streams, int first, const uint32_t* bits) {
        Lanes<uint16_t, COUNT> high;
        Lanes<int8_t, COUNT> low;
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) {
            high.lane[i] = (uint16_t)((bits[i] + 128u) >> 8);
            low.lane[i] = (int8_t)bits[i];
        }
        store_value(streams.codes, 2 * first, high);
        store_value(streams.extra, first, low);
    }

    template <int COUNT>
    static OPTIM_INLINE void put_nearest(const Streams& streams, int first, const float* x) {
        uint32_t bits[COUNT];
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) bits[i] = nearest(x[i]);
        put<COUNT>(streams, first, bits);
    }

    template <int COUNT>
    static OPTIM_INLINE void put_noisy(const Streams& streams, int first, const float* x, const NoiseKey& key) {
        static_assert(COUNT <= NOISE_ELEMENTS, "one call serves them");
        Noise noise = noise_draw(key, first);
        uint32_t bits[COUNT];
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) bits[i] = stochastic(x[i], noise_lane(noise, i) >> (16 - CUT_BITS));
        put<COUNT>(streams, first, bits);
    }

    // 16 elements at a time, and 8 where a thread has no more.
    static OPTIM_INLINE void load(const Streams& streams, int first, float* x, int n, const NoiseKey&) {
        int c = 0;
        OPTIM_UNROLL
        for (; c + 16 <= n; c += 16) get<16>(streams, first + c, x + c);
        if (c < n) get<8>(streams, first + c, x + c);
    }

    static OPTIM_INLINE void set(const Streams& streams, int first, const float* x, int n) {
        int c = 0;
        OPTIM_UNROLL
        for (; c + 16 <= n; c += 16) put_nearest<16>(streams, first + c, x + c);
        if (c < n) put_nearest<8>(streams, first + c, x + c);
    }

    static OPTIM_INLINE void store(const Streams& streams, int first, const float* x, int n, const NoiseKey& key) {
        if constexpr (ROUNDING == NEAREST) {
            set(streams, first, x, n);
        } else {
            int c = 0;
            OPTIM_UNROLL
            for (; c + 16 <= n; c += 16) put_noisy<16>(streams, first + c, x + c, key);
            if (c < n) put_noisy<8>(streams, first + c, x + c, key);
        }
    }

    static OPTIM_INLINE void view(const Streams& streams, int first, float* x, int n) {
        Elementwise<Fp16, NEAREST>::load({streams.codes, nullptr}, first, x, n, NoiseKey{});
    }
};
