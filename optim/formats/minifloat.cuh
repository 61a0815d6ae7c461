// Small floats with a scale a block: OCP's e4m3 (largest 448) and e5m2 (57344) with 8 bits, e2m1 (6) with 4. No code
// for infinity is written; NaN becomes NaN to nearest where there is a code (0x7f), else zero or the largest. scale =
// absmax / largest, as torchao has it.
// The code is the upper bits of |y| as a float with the format's exponents, after what rounds them was added below:
// half a step for nearest (ties to the even code, as hardware does) or noise, and a carry runs into the exponent as it
// should. Both roundings are linear in value, at binades' borders and in subnormals too.
#pragma once
#include "blocks.cuh"

EMBED_SOURCE

template <int BITS_, int MANTISSA, int LEAST, int LARGEST_>
struct Minifloat {
    // Of a byte's two codes of 4 bits: their values, so that one look-up decodes both.
    struct Pairs {
        FloatPair pair[256];
    };
    typedef typename Either<BITS_ == 4, Pairs, NoTable>::Type Table;
    static constexpr int BITS = BITS_, ZERO = 0;
    static constexpr const char* DTYPE = BITS == 4 ? "U8" : MANTISSA == 3 ? "F8_E4M3" : "F8_E5M2";
    static constexpr float LARGEST = (float)LARGEST_, UNITS = 1.0f;
    static constexpr bool SIGNED = true, ROOT = false, IN_UPPER_BITS = ON_GPU, PAIRS = ON_GPU && BITS == 4;
    static constexpr int UPPER = 32 - BITS, SHIFT = UPPER - (23 - MANTISSA);  // of the code in a word; of a float
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

    static OPTIM_HOST void fill(Table* table) {
        if constexpr (BITS == 4) {
            for (uint32_t byte = 0; byte < 256; byte++) {
                table->pair[byte] = {decode(nullptr, byte >> 4, 1.0f), decode(nullptr, byte & 15u, 1.0f)};
            }
        }
    }

    static OPTIM_INLINE void decode_pair(const Table* table, uint32_t byte, float scale, float* x) {
        FloatPair pair = table->pair[byte];
        x[0] = exact_mul(pair.first, scale);
        x[1] = exact_mul(pair.second, scale);
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

    // y's place among fp32's smallest numbers: multiplied by this, 2^LEAST becomes the least exponent of fp32, whose
    // own subnormals then are the format's, with 20 bits more.
    static constexpr float LOWER = 1.0f / (float)(1ull << 63) / (float)(1ull << (63 + LEAST));

    static OPTIM_INLINE uint32_t signed_word(uint32_t bits, uint32_t word) {
        return (word & 0x7fffffffu) | (bits & 0x80000000u);
    }

    // Half a step less one is added, one more where the code is odd. Below the least exponent y is first rounded to
    // 2^-22 of a step, so this serves 4 bits, where no hardware has to agree.
    static OPTIM_INLINE uint32_t nearest_word(const Table*, float x, float inverse, int lowest) {
        if constexpr (BITS == 8) return nearest_exact(x, inverse, lowest);
        float y = bounded(exact_mul(x, inverse), lowest);
        uint32_t bits = float_bits(one_nan(exact_mul(y, LOWER))), word = bits << SHIFT;
        return signed_word(bits, word + ((1u << (UPPER - 1)) - 1u) + (word >> UPPER & 1u));
    }

    // The noise lies right below the code.
    static OPTIM_INLINE uint32_t stochastic_word(const Table*, float x, float inverse, uint32_t noise, int lowest) {
        uint32_t bits = float_bits(one_nan(exact_mul(bounded(exact_mul(x, inverse), lowest), LOWER)));
        return signed_word(bits, (bits << SHIFT) + ((noise << (UPPER - 16)) + (1u << (UPPER - 17))));
    }

    // As the conversion instructions do it, exactly, for 8 bits: below the least exponent the sum with a float whose
    // last place is a step is rounded as it should.
    static OPTIM_INLINE uint32_t nearest_exact(float x, float inverse, int lowest) {
        const uint32_t border = (uint32_t)(127 + LEAST) << 23;  // the bits of 2^LEAST
        const float one_step = bits_float((uint32_t)(127 + 23 + LEAST - MANTISSA) << 23);
        float y = bounded(exact_mul(x, inverse), lowest), a = exact_min(exact_abs(y), LARGEST);
        if (is_nan(y)) return (SIGN - 1u) << UPPER;  // whose sign differs between machines
        uint32_t word = (float_bits(a) - border + (1u << 23)) << SHIFT;
        word += (1u << (UPPER - 1)) - 1u + (word >> UPPER & 1u);
        if (a < bits_float(border)) word = float_bits(exact_add(a, one_step)) << UPPER;
        return signed_word(float_bits(y), word);
    }

    static OPTIM_INLINE uint32_t nearest(const Table* table, float x, float inverse, int lowest) {
        return nearest_word(table, x, inverse, lowest) >> UPPER;
    }

    static OPTIM_INLINE uint32_t stochastic(const Table* table, float x, float inverse, uint32_t noise, int lowest) {
        return stochastic_word(table, x, inverse, noise, lowest) >> UPPER;
    }
};

typedef Minifloat<8, 3, -6, 448> E4m3;
typedef Minifloat<8, 2, -14, 57344> E5m2;
typedef Minifloat<4, 1, 0, 6> E2m1;
