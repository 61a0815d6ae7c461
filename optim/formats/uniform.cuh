// Formats whose levels are equally far apart: x = (code + FIRST) * scale, or the square of that where the root of x is
// what is stored. Pure arithmetic: to nearest, floor(y + 1/2), a y in the middle going up; stochastic, floor(y + r)
// with r uniform in (0, 1).
//     lin8    m, -127 .. 127 times absmax / 127       steps of 1/127 of the block's largest: small elements become 0
//     ulin8   v, 0 .. 255 times absmax / 255          for comparison: its floor inflates small v (0 is never used)
//     lin4    v, 1 .. 16 times absmax / 16            lpmm's and torchao's map for v: linear without zero, block 128
//     sqrt8   v, squares of 0 .. 255 times max sqrt(v) / 255       FlashOptim's, block 32
//     sqrt4   v, squares of 1 .. 16 times max sqrt(v) / 16         a floor of 1/256 of the largest, where lin4 has 1/16
// Stored beside the codes of lin4 and sqrt4 is the block's largest itself, as torchao does; 1/16 of it is exact.
#pragma once
#include "blocks.cuh"

EMBED_SOURCE

template <int BITS_, int FIRST, int LAST, bool ROOT_>
struct Uniform {
    typedef NoTable Table;
    static constexpr int BITS = BITS_, ZERO = -FIRST;  // -1 when there is no zero
    static constexpr const char* DTYPE = "U8";
    static constexpr bool SIXTEENTHS = LAST == 16, SIGNED = FIRST < 0, ROOT = ROOT_, HARDWARE = false,
                          IN_UPPER_BITS = false, PAIRS = false;
    static constexpr uint32_t BIAS = 0x4b000000u;  // floor_bits'
    static constexpr float LARGEST = SIXTEENTHS ? 1.0f : (float)LAST, UNITS = SIXTEENTHS ? 16.0f : 1.0f;

    static OPTIM_INLINE float decode(const Table*, uint32_t code, float scale) {
        // The code as a float: 2^23 + code, less what is too much.
        float number = bits_float(0x4b000000u | code), unit = exact_mul(scale, 1.0f / UNITS), x;
        if (ROOT && FIRST == 0) {
            // The same product in one operation: 2^23 * unit is exact, and the scale of a root leaves room for it.
            x = exact_fma(number, unit, exact_mul(unit, -8388608.0f));
        } else {
            x = exact_mul(exact_add(number, (float)FIRST - 8388608.0f), unit);
        }
        return ROOT ? exact_mul(x, x) : x;
    }

    static OPTIM_INLINE uint32_t nearest(const Table*, float x, float inverse, int lowest) {
        return floor_bits(exact_max(exact_fma(x, inverse, 0.5f - (float)FIRST), (float)lowest));
    }

    static OPTIM_INLINE uint32_t stochastic(const Table*, float x, float inverse, uint32_t noise, int lowest) {
        float t = exact_fma(x, inverse, exact_add(noise_above_one(noise), (float)-FIRST - 1.0f));
        return floor_bits(exact_min(exact_max(t, (float)lowest), (float)(LAST - FIRST) + 0.5f));
    }

    // What is zero in a format with two signs has the code after the last level's.
    static OPTIM_INLINE uint32_t dither(float x, float inverse, float u, int lowest, bool zero) {
        float t = exact_max(exact_fma(x, inverse, exact_add(u, 0.5f - (float)FIRST)), (float)lowest);
        return floor_bits(SIGNED && zero && x == 0.0f ? (float)(LAST - FIRST + 1) : t);
    }

    // The root comes back with an error of variance unit^2 / 12, and so much larger would its square be on average.
    static OPTIM_INLINE float undither(uint32_t code, float scale, float u) {
        static_assert(!SIGNED || LAST - FIRST + 1 < 1 << BITS, "a code is left for zero");
        float number = bits_float(0x4b000000u | code), unit = exact_mul(scale, 1.0f / UNITS);
        float x = exact_fma(exact_add(number, -8388608.0f), unit, exact_mul(exact_add((float)FIRST, -u), unit));
        if (SIGNED) return code == LAST - FIRST + 1 ? 0.0f : x;
        return ROOT ? exact_fma(x, x, exact_mul(exact_mul(unit, unit), -1.0f / 12.0f)) : x;
    }
};

typedef Uniform<8, -127, 127, false> Lin8;
typedef Uniform<8, 0, 255, false> Ulin8;
typedef Uniform<4, 1, 16, false> Lin4;
typedef Uniform<8, 0, 255, true> Sqrt8;
typedef Uniform<4, 1, 16, true> Sqrt4;
