// fp16: IEEE's half precision (5 exponent and 10 mantissa bits), 2 bytes. It has three bits more than bf16 and a far
// smaller range: steps of 2^-24 below 2^-14, and nothing above 65504. A finite value never becomes infinite: it
// saturates.
// Rounding to nearest: |x| = mantissa * 2^(exponent - 23) is counted in steps of its binade, and below 2^-14 in steps
// of 2^-24: the mantissa is shifted right by 13 bits or more, ties to even. Stochastic: x times 2^-112 has fp16's
// exponents, with fp32's subnormals in place of fp16's, and 13 random bits are added to the 13 bits that are cut off. A
// carry into the exponent gives the right number in both.
#pragma once
#include "elementwise.cuh"

EMBED_SOURCE

struct Fp16 : ElementFormat<Fp16> {
    typedef uint16_t Code;
    static constexpr const char* DTYPE = "F16";
    static constexpr float SMALLEST = 5.9604645e-8f;  // 2^-24

    // The bits of the magnitude, moved to their place in an fp32, make a float 2^112 times too small, subnormals
    // included.
    static OPTIM_INLINE float decode(uint16_t code) {
#ifdef __CUDA_ARCH__
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(code));
        return value;
#else
        uint32_t sign = (uint32_t)(code & 0x8000u) << 16, magnitude = code & 0x7fffu;
        float x = exact_mul(bits_float(magnitude << 13), bits_float(239u << 23));
        uint32_t bits = magnitude < 0x7c00u ? float_bits(x) : 0x7f800000u | (magnitude & 0x3ffu) << 13;
        return bits_float(bits | sign);
#endif
    }

    // Returns the mantissa of x with its leading 1, and in *shift the number of bits to cut, at most 31, which is more
    // than the mantissa has.
    static OPTIM_INLINE uint32_t mantissa(float x, int* shift) {
        uint32_t bits = float_bits(x) & 0x7fffffffu;
        int exponent = (int)(bits >> 23);
        uint32_t m = exponent > 0 ? (bits & 0x7fffffu) | 0x800000u : 0u;  // fp32's subnormals count as 0
        int cut = exponent < 113 ? 126 - exponent : 13, over = cut > 31 ? cut - 31 : 0;
        *shift = cut - over;
        return m >> (over > 31 ? 31 : over);
    }

    // Returns the code of a magnitude of `steps` steps of x's binade, with x's sign.
    static OPTIM_INLINE uint16_t finish(float x, uint32_t steps) {
        uint32_t bits = float_bits(x) & 0x7fffffffu, exponent = bits >> 23;
        uint32_t code = steps + (exponent < 113u ? 0u : exponent - 113u) * 1024u;
        code = code > 0x7bffu ? 0x7bffu : code;
        code = bits == 0x7f800000u ? 0x7c00u : code;
        return (uint16_t)(is_nan(x) ? 0x7e00u : code | (float_bits(x) >> 16 & 0x8000u));
    }

    static OPTIM_INLINE uint16_t encode(float x) {
        int shift;
        uint32_t m = mantissa(x, &shift);
        return finish(x, (m + (1u << (shift - 1)) - 1u + (m >> shift & 1u)) >> shift);
    }

    // Infinity and NaN saturate.
    static OPTIM_INLINE uint16_t encode(float x, uint32_t noise) {
        const float lower = 1.0f / (float)(1ull << 56) / (float)(1ull << 56), max = 65504.0f * lower;
        float a = exact_min(exact_abs(exact_mul(x, lower)), max);
        return (uint16_t)((float_bits(a) + (noise >> 3)) >> 13 | (sign_bits(x) >> 16));
    }
};
