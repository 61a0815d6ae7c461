// bf16: the upper 16 bits of an fp32 (sign, 8 exponent and 7 mantissa bits), 2 bytes. Integer arithmetic makes it the
// same on CPU, GPU and NVRTC and keeps subnormals.
// Rounding to nearest, ties to even: add just under half a step, one more if the kept part is odd, and truncate.
// Stochastic: add 16 random bits and truncate. This rounds the magnitude up with a probability equal to the fraction
// that is cut off, to 1 in 2^16, so that the mean is x. Infinities are kept, and NaN becomes 0x7fff, as in a GPU's own
// conversion to nearest.
#pragma once
#include "elementwise.cuh"

EMBED_SOURCE

struct Bf16 : ElementFormat<Bf16> {
    typedef uint16_t Code;
    static constexpr const char* DTYPE = "BF16";

    static OPTIM_INLINE float decode(uint16_t code) { return bits_float((uint32_t)code << 16); }

    static OPTIM_INLINE uint16_t encode(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        uint16_t code;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(code) : "f"(x));
        return code;
#else
        uint32_t bits = float_bits(x);
        uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
        return (uint16_t)(is_nan(x) ? 0x7fffu : rounded);
#endif
    }

    // Returns x, or for NaN a pattern to which noise may be added: the lower bits of infinity and of this pattern are
    // zero, so noise carries nothing out of them.
    static OPTIM_INLINE float storable(float x) {
        return one_nan(x, 0x7fff0000u);
    }

    static OPTIM_INLINE uint16_t encode(float x, uint32_t noise) {
        return (uint16_t)((float_bits(storable(x)) + noise) >> 16);
    }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    static constexpr bool CLAMPS = true;

    // Encodes two elements at a time. Infinities are right without MAY_BE_NAN too.
    template <Rounding ROUNDING, bool MAY_BE_NAN, class Codes>
    static __device__ __forceinline__ void encode_all(const float* x, const Noise& noise, int lane, Codes* codes) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            if constexpr (ROUNDING == NEAREST) {
                asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(codes->word[i / 2]) : "f"(x[i + 1]), "f"(x[i]));
            } else {
                const float first = MAY_BE_NAN ? storable(x[i]) : x[i],
                            second = MAY_BE_NAN ? storable(x[i + 1]) : x[i + 1];
                codes->word[i / 2] = upper_halves(float_bits(first) + noise_lane(noise, lane + i),
                                                  float_bits(second) + noise_lane(noise, lane + i + 1));
            }
        }
    }
#endif
};
