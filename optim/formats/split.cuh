// Weights as bf16, which the matmuls read, and the next 16 or 8 bits of the fp32 value beside it. With the bits of a
// float taken as an integer:
//     high = (bits + half a step of bf16) >> 16     bf16, rounded to nearest, ties away from zero
//     low  = bits - (high << 16)                    in [-half, half): a signed integer of 16 bits, or of the upper 8
//     bits = (high << 16) + low
// A carry runs from the mantissa into the exponent as it should, so no case is special, and with 16 bits every value
// comes back as it was: this is fp32 with the matmul's copy inside it (apex's and TransformerEngine's remainders, whose
// bits these are). NaN is stored with one pattern. Values that bf16 rounds to infinity come back too.
// With 8 bits the value is first rounded to 16 significant bits: to nearest (|error| <= 2^-17 of the next power of two
// above |x|, which is 1/512 of a step of bf16), or stochastically, which never stalls. FlashOptim's 24-bit weights
// scale the remainder by 127 instead, for an error of 1/508 of a step.
// The model sees the bf16. Bytes an element: 4 or 3.
#pragma once
#include "blocks.cuh"

EMBED_SOURCE

// What a thread moves at a time of one stream: 8 or 16 bytes an access.
template <class Code, int COUNT>
struct alignas(sizeof(Code) * COUNT >= 16 ? 16 : 8) Lanes {
    Code lane[COUNT];
};

// What such storages share, bf16's here and fp16's in fp16split.cuh: all but view(). Number says how a value becomes an
// integer and back:
//     DTYPE           of the upper 16 bits, which the model sees
//     Low             int16_t or int8_t: of the bits below them
//     CUT_BITS        how many bits of fp32's mantissa are cut off
//     whole(x)        of a finite x, the integer and below it the bits that are cut off
//     cut(x, noise)   the integer, `noise` having been added to whole(x): CUT_BITS random bits, or half a step;
//                     without bits to cut there is nothing to round, and noise is not looked at
//     decode(bits)    its value
template <class Number, Rounding ROUNDING>
struct SplitOf : Number, StorageDefaults {
    typedef typename Number::Low Low;
    static constexpr int LOW_BITS = 8 * sizeof(Low), CUT_BITS = Number::CUT_BITS;
    static constexpr StreamInfo STREAM[3] = {{"", Number::DTYPE, 16, 1},
                                             {".low", LOW_BITS == 16 ? "I16" : "I8", LOW_BITS, 1}};

    // Ties to even.
    static OPTIM_INLINE uint32_t nearest(float x) {
        return Number::cut(x, ((1u << CUT_BITS) - 1) / 2 + (Number::whole(x) >> CUT_BITS & 1u));
    }

    // COUNT elements of one thread, 8 or 16; `bits` as cut() gives them.
    template <int COUNT>
    static OPTIM_INLINE void get(const Streams& streams, int first, float* x) {
        auto high = load_value<Lanes<uint16_t, COUNT>>(streams.codes, 2 * first);
        auto low = load_value<Lanes<Low, COUNT>>(streams.extra, (int)sizeof(Low) * first);
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) {
            x[i] = Number::decode(((uint32_t)high.lane[i] << LOW_BITS) + (uint32_t)(int)low.lane[i]);
        }
    }

    template <int COUNT>
    static OPTIM_INLINE void put(const Streams& streams, int first, const uint32_t* bits) {
        Lanes<uint16_t, COUNT> high;
        Lanes<Low, COUNT> low;
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) {
            high.lane[i] = (uint16_t)((bits[i] + (1u << (LOW_BITS - 1))) >> LOW_BITS);
            low.lane[i] = (Low)bits[i];
        }
        store_value(streams.codes, 2 * first, high);
        store_value(streams.extra, (int)sizeof(Low) * first, low);
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
        for (int i = 0; i < COUNT; i++) bits[i] = Number::cut(x[i], noise_lane(noise, i) >> (16 - CUT_BITS));
        put<COUNT>(streams, first, bits);
    }

    // 16 elements at a time, which makes 16 bytes of the narrow half, and 8 where a thread has no more.
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
};

// The upper bits of an fp32; its lowest are cut off.
template <class LowBits>
struct Bf16Number {
    typedef LowBits Low;
    static constexpr const char* DTYPE = "BF16";
    static constexpr int CUT_BITS = 16 - 8 * (int)sizeof(Low);

    static OPTIM_INLINE uint32_t whole(float x) { return float_bits(x); }

    static OPTIM_INLINE uint32_t cut(float x, uint32_t noise) {
        uint32_t bits = float_bits(x);
        if (CUT_BITS == 0) return float_bits(canonical(x));
        if (!is_finite(x)) return (is_nan(x) ? 0x7fc00000u : bits) >> CUT_BITS;
        return (bits + noise) >> CUT_BITS;
    }

    static OPTIM_INLINE float decode(uint32_t bits) { return bits_float(bits << CUT_BITS); }
};

// Low: int16_t or int8_t.
template <class Low, Rounding ROUNDING>
struct Split : SplitOf<Bf16Number<Low>, ROUNDING> {
    static OPTIM_INLINE void view(const Streams& streams, int first, float* x, int n) {
        OPTIM_UNROLL
        for (int c = 0; c < n; c += 8) {
            auto high = load_value<Lanes<uint16_t, 8>>(streams.codes, 2 * (first + c));
            OPTIM_UNROLL
            for (int i = 0; i < 8; i++) x[c + i] = bits_float((uint32_t)high.lane[i] << 16);
        }
    }
};
