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

// m with the sign above it.
struct Fp16Number {
    typedef int8_t Low;
    static constexpr const char* DTYPE = "F16";
    static constexpr int CUT_BITS = 5;  // of fp32's mantissa
    static constexpr uint32_t MOST = 0x7bff7fu, INFINITE = 0x7c0000u;

    // The magnitude times 2^-112: its bits are fp16's with 13 more.
    static OPTIM_INLINE uint32_t whole(float x) { return float_bits(exact_abs(exact_mul(x, bits_float(15u << 23)))); }

    static OPTIM_INLINE uint32_t cut(float x, uint32_t noise) {
        uint32_t m = (whole(x) + noise) >> CUT_BITS;
        m = m > MOST ? MOST : m;
        return is_finite(x) ? m | (sign_bits(x) >> 8) : (uint32_t)Fp16::encode(x) << 8;
    }

    static OPTIM_INLINE float decode(uint32_t bits) {
        uint32_t m = bits & 0x7fffffu;
        uint32_t raised = float_bits(exact_mul(bits_float(m << CUT_BITS), bits_float(239u << 23)));
        raised = m < INFINITE ? raised : 0x7f800000u | (m << CUT_BITS & 0x7fffffu);
        return bits_float(raised | (bits << 8 & 0x80000000u));
    }
};

template <Rounding ROUNDING>
struct Fp16Split : SplitOf<Fp16Number, ROUNDING> {
    static OPTIM_INLINE void view(const Streams& streams, int first, float* x, int n) {
        Elementwise<Fp16, NEAREST>::load({streams.codes, nullptr}, first, x, n, NoiseKey{});
    }
};
