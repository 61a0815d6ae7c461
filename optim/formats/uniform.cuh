// Formats whose levels are equally far apart: x = (code + FIRST) * scale, or the square of that if the root of x is
// stored (with 4 bits, the product of the squares). Encoding is arithmetic: to nearest floor(y + 1/2), so that a middle
// goes up; stochastic floor(y + r) with r uniform in [0, 1).
//     lin8    m, -127 .. 127 times absmax / 127       steps of 1/127 of the block's largest: small elements become 0;
//             and weights, block 32, scales of e8m0   whose noise is a third of e4m3's; none above 2e33
//     ulin8   v, 0 .. 255 times absmax / 255          for comparison: its floor inflates small v (0 is never written)
//     lin4    v, 1 .. 16 times absmax / 16            lpmm's and torchao's map for v: linear without zero, block 128
//     sqrt8   v, squares of 0 .. 255 times max sqrt(v) / 255       FlashOptim's, block 32
//     sqrt4   v, squares of 1 .. 16 times max sqrt(v) / 16         a floor of 1/256 of the largest, where lin4 has 1/16
// The scale of lin4 and sqrt4 is the block's largest value itself, as in torchao; 1/16 of it is exact.
#pragma once
#include "blocks.cuh"

EMBED_SOURCE

// POWERS: scales are powers of two (ScaleE8m0), so that products with them are exact.
template <int BITS_, int FIRST, int LAST, bool ROOT_, bool POWERS = false>
struct Uniform : BlockFormat<Uniform<BITS_, FIRST, LAST, ROOT_, POWERS>> {
    typedef typename Either<BITS_ == 4, PairTable, NoTable>::Type Table;
    static constexpr int BITS = BITS_, ZERO = -FIRST;  // -1 if there is no zero
    static constexpr const char* DTYPE = "U8";
    static constexpr bool SIXTEENTHS = LAST == 16, SIGNED = FIRST < 0, ROOT = ROOT_;
    static constexpr uint32_t BIAS = floor_part_bias<BITS>();
    static constexpr double MAX = POWERS ? 2e33 : 4.25e37;  // so that 2^23 * scale is finite
    static constexpr bool OF_POWERS = POWERS;
    static constexpr float LARGEST = SIXTEENTHS ? 1.0f : (float)LAST, UNITS = SIXTEENTHS ? 16.0f : 1.0f;

    static OPTIM_HOST void fill(Table* table) {
        if constexpr (BITS == 4) {
            for (int byte = 0; byte < 256; byte++) {
                float first = (float)((byte >> 4) + FIRST), second = (float)((byte & 15) + FIRST);
                table->set(byte, ROOT ? first * first : first, ROOT ? second * second : second);
            }
        }
    }

    // Returns the factor of a level of 4 bits. The scale of roots is at least 2^-50, so that its square is not zero.
    static OPTIM_INLINE float unit_of(float scale) {
        float unit = exact_mul(scale, 1.0f / UNITS);
        return ROOT ? exact_mul(unit, unit) : unit;
    }

    static OPTIM_INLINE float decode(const Table*, uint32_t code, float scale) {
        return decode_number(bits_float(0x4b000000u | code), scale);
    }

    // Decodes the float 2^23 + code, and subtracts the excess of 2^23.
    static OPTIM_INLINE float decode_number(float number, float scale) {
        if (POWERS) return exact_fma(number, scale, exact_mul(scale, (float)FIRST - 8388608.0f));
        float level = exact_add(number, (float)FIRST - 8388608.0f);
        if (BITS == 4) return exact_mul(ROOT ? exact_mul(level, level) : level, unit_of(scale));
        if (!ROOT) return exact_mul(level, scale);
        // This is the same product in one operation: 2^23 * scale is exact, and the scale of a root leaves room for it.
        float x = exact_fma(number, scale, exact_mul(scale, -8388608.0f));
        return exact_mul(x, x);
    }

    // Returns floor(y + 1/2) as the last bits of a sum, and above these BIAS. y is counted in sixteenths, or 256ths, so
    // that the hardware cuts it to [0, 1] (NaN to 0) at no cost.
    static OPTIM_INLINE uint32_t nearest_biased(float x, float inverse, int lowest) {
        constexpr float part = 1.0f / (float)(1 << BITS);
        float t = exact_saturated(x, exact_mul(inverse, part), part * (0.5f - (float)FIRST - (float)lowest));
        return floor_part_bits<BITS>(t) + (uint32_t)lowest;
    }

    static OPTIM_INLINE uint32_t nearest(const Table*, float x, float inverse, int lowest) {
        return nearest_biased(x, inverse, lowest) - BIAS;
    }

    // Returns y + 128 + n / 65536, with n the noise; its whole part, from 128 + FIRST on, is exact. With 4 bits, a y
    // above LAST by rounding errors does not reach 129 + LAST, and the whole part is byte 2 of the sum's bits. With
    // POWERS, no y is above LAST.
    static OPTIM_INLINE float stochastic_sum(float x, float inverse, uint32_t noise_float, int lowest) {
        constexpr float first = 128.0f + (float)FIRST, end = 128.0f + (float)LAST + 0.5f;
        float t = exact_max(exact_fma(x, inverse, bits_float(noise_float)), first + (float)lowest);
        return BITS == 4 || POWERS ? t : exact_min(t, end);
    }

    // A level times a power of two, at least 2^-126, is a bf16 number: the model sees exactly the stored value.
    static constexpr bool WRITES_BF16 = POWERS && ON_HOPPER, BF16_IS_STORED = WRITES_BF16;
    static constexpr uint32_t STOCHASTIC_BIAS = 0x4b000000u + 128u + (uint32_t)FIRST;

    static OPTIM_INLINE uint32_t stochastic(const Table*, float x, float inverse, uint32_t noise, int lowest) {
        return floor_bits(stochastic_sum(x, inverse, NOISE_FLOAT << 24 | noise, lowest)) - STOCHASTIC_BIAS;
    }

#ifdef __CUDA_ARCH__
    template <int N>
    static __device__ __forceinline__ void get(const Table* table, const Packed<BITS, N>& codes, float scale,
                                               float* x) {
        if constexpr (BITS == 4) {
            table->template decode<N>(codes.word, unit_of(scale), x);
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) x[i] = decode_number(codes.number(i), scale);
        }
    }

    // Does the same as nearest or stochastic for N elements and their noise. `levels`, unless null, receives the levels
    // of 8 bits in pairs of bf16.
    template <Rounding ROUNDING, int N>
    static __device__ __forceinline__ void put(const Table*, const float* x, float inverse, const Noise& noise,
                                               int lowest, Packed<BITS, N>* codes, uint32_t* levels) {
        uint32_t word[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (ROUNDING == NEAREST) {
                codes->add(i, nearest_biased(x[i], inverse, lowest));
                continue;
            }
            word[i] = float_bits(stochastic_sum(x[i], inverse, noise_float(noise, i), lowest));
            if (BITS == 4) continue;
            // 2^23 + the code
            word[i] = float_bits(__fadd_rd(bits_float(word[i]), 8388608.0f - 128.0f - (float)FIRST));
        }
#pragma unroll
        for (int i = 0; ROUNDING == STOCHASTIC && levels && i < N; i += 2) {
            float a = exact_add(bits_float(word[i]), -8388608.0f + (float)FIRST);
            float b = exact_add(bits_float(word[i + 1]), -8388608.0f + (float)FIRST);
            levels[i / 2] = upper_halves(float_bits(a), float_bits(b));
        }
        if constexpr (ROUNDING == NEAREST) {
            codes->subtract(BIAS);
        } else if constexpr (BITS == 4) {
            codes->template gather_bytes<2, FIRST>(word);
        } else {
            codes->template gather_bytes<0>(word);
        }
    }

    // Multiplies put's levels by a scale, given by its exponent, as decode_number does. There is no
    // negative zero in a block of scale 0, where only NaN has a level.
    template <int COUNT>
    static __device__ __forceinline__ void bf16_scaled(uint32_t exponent, bool, uint32_t* bf16_out) {
        const uint32_t factor = exponent << 7 | exponent << 23;
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) {
            asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(bf16_out[i]) : "r"(bf16_out[i]), "r"(factor), "r"(0));
        }
    }
#endif
};

typedef Uniform<8, -127, 127, false> Lin8;
typedef Uniform<8, -127, 127, false, true> Lin8OfPowers;
typedef Uniform<8, 0, 255, false> Ulin8;
typedef Uniform<4, 1, 16, false> Lin4;
typedef Uniform<8, 0, 255, true> Sqrt8;
typedef Uniform<4, 1, 16, true> Sqrt4;
