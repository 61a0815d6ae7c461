// Small floats with a scale a block: OCP's e4m3 (largest 448) and e5m2 (57344) with 8 bits, e2m1 (6) with 4; NaN
// stays NaN where there is a code (0x7f), no other code for infinity or NaN is written. scale = absmax / largest, as
// torchao has it. y in [2^e, 2^(e + 1)) is counted in steps of 2^(e - MANTISSA), and below the least exponent in that
// one's steps:
//     q = |y| * 2^(MANTISSA - e),  code = round(q) + 2^MANTISSA * (e - least)
// where a q that is rounded up to the next power of 2 carries into the exponent by itself. To nearest: ties to the even
// code, as hardware does; stochastic: floor(q + r). Both are linear in value, at binades' borders and in subnormals
// too.
#pragma once
#include "blocks.cuh"

EMBED_SOURCE

template <int BITS_, int MANTISSA, int LEAST, int MAX_CODE, int LARGEST_>
struct Minifloat {
    typedef NoTable Table;
    static constexpr int BITS = BITS_, ZERO = 0;
    static constexpr const char* DTYPE = BITS == 4 ? "U8" : MANTISSA == 3 ? "F8_E4M3" : "F8_E5M2";
    static constexpr float LARGEST = (float)LARGEST_, UNITS = 1.0f;
    static constexpr bool SIGNED = true, ROOT = false, IN_UPPER_BITS = false, PAIRS = false;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    static constexpr bool HARDWARE = BITS == 8;
#else
    static constexpr bool HARDWARE = false;
#endif
    static constexpr uint32_t BIAS = 0;
    static constexpr uint32_t SIGN = 1u << (BITS - 1);

    // The magnitude's bits moved to fp32's place make a float 2^(LEAST + 126) times too small (subnormals included).
    static OPTIM_INLINE float decode(const Table*, uint32_t code, float scale) {
        float tiny = bits_float((code & SIGN) << (32 - BITS) | (code & (SIGN - 1u)) << (23 - MANTISSA));
        if (BITS == 8 && (code & (SIGN - 1u)) == SIGN - 1u) return bits_float(0x7fc00000u);
        return exact_mul(exact_mul(tiny, bits_float((uint32_t)(LEAST + 253) << 23)), scale);
    }

#ifdef __CUDA_ARCH__
    // Two at a time by the conversions that sm_89 and later have.
    static __device__ __forceinline__ void decode2(uint32_t codes, float scale, float* x) {
        uint32_t halves;
        uint16_t low, high;
        if constexpr (MANTISSA == 3) {
            asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)codes));
        } else {
            asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)codes));
        }
        asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(halves));
        asm("cvt.f32.f16 %0, %1;" : "=f"(x[0]) : "h"(low));
        asm("cvt.f32.f16 %0, %1;" : "=f"(x[1]) : "h"(high));
        x[0] = exact_mul(x[0], scale);
        x[1] = exact_mul(x[1], scale);
    }

    static __device__ __forceinline__ uint32_t nearest2(const float* x, float inverse, int lowest) {
        float a = bounded(exact_mul(x[0], inverse), lowest), b = bounded(exact_mul(x[1], inverse), lowest);
        uint16_t codes;
        if constexpr (MANTISSA == 3) {
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(b), "f"(a));
        } else {
            asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(b), "f"(a));
        }
        return codes;
    }
#endif

    // v's zero is the smallest subnormal.
    static OPTIM_INLINE float bounded(float y, int lowest) {
        return lowest > 0 ? exact_max(y, bits_float((uint32_t)(127 + LEAST - MANTISSA) << 23)) : y;
    }

    // |y| in steps of its binade, and the code of the binade's start less that of its steps.
    static OPTIM_INLINE float steps(float y, int* base) {
        float a = exact_min(exact_abs(y), LARGEST);
        int exponent = (int)(float_bits(a) >> 23);
        exponent = exponent < LEAST + 127 ? LEAST + 127 : exponent;
        *base = (exponent - (LEAST + 127)) << MANTISSA;
        return exact_mul(a, bits_float((uint32_t)(MANTISSA + 254 - exponent) << 23));
    }

    static OPTIM_INLINE uint32_t finish(float y, int code) {
        code = code > MAX_CODE ? MAX_CODE : code;
        if (is_nan(y)) return SIGN - 1u;  // whose sign differs between machines
        return (uint32_t)code | (float_bits(y) >> (32 - BITS) & SIGN);
    }

    static OPTIM_INLINE uint32_t nearest(const Table*, float x, float inverse, int lowest) {
        int base;
        float y = bounded(exact_mul(x, inverse), lowest), q = exact_add(steps(y, &base), 8388608.0f);
        return finish(y, (int)(float_bits(q) & 0x3fu) + base);
    }

    static OPTIM_INLINE uint32_t stochastic(const Table*, float x, float inverse, uint32_t noise, int lowest) {
        int base;
        float y = bounded(exact_mul(x, inverse), lowest), q = exact_add(steps(y, &base), noise_uniform(noise));
        return finish(y, (int)(floor_bits(q) & 0x3fu) + base);
    }
};

typedef Minifloat<8, 3, -6, 0x7e, 448> E4m3;
typedef Minifloat<8, 2, -14, 0x7b, 57344> E5m2;
typedef Minifloat<4, 1, 0, 7, 6> E2m1;
