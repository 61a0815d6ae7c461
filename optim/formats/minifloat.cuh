// Small floats with a scale for each block: OCP's e4m3 (largest 448) and e5m2 (57344) with 8 bits, e2m1 (6) with 4. The
// code of infinity is never written. To nearest with 8 bits, NaN has a code (0x7f); otherwise it becomes zero. scale =
// absmax / largest, as in torchao.
// The code is the upper bits of |y| as a float with the format's exponents, after adding half a step or noise below
// them. To nearest, ties go to the even code with 8 bits, as in hardware, and away from zero with 4. A carry into the
// exponent gives the right code. Both roundings are linear in value, also at the borders of binades and in subnormals.
// With noise on a GPU, signed codes of 8 bits take 5 instructions an element, and the bf16 that the model sees takes 1
// more.
#pragma once
#include "blocks.cuh"

EMBED_SOURCE

template <int BITS_, int MANTISSA, int MIN, int LARGEST_>
struct Minifloat : BlockFormat<Minifloat<BITS_, MANTISSA, MIN, LARGEST_>> {
    typedef BlockFormat<Minifloat> Scalar;
    typedef typename Either<BITS_ == 4, PairTable, NoTable>::Type Table;
    static constexpr int BITS = BITS_, ZERO = 0;
    static constexpr const char* DTYPE = BITS == 4 ? "U8" : MANTISSA == 3 ? "F8_E4M3" : "F8_E5M2";
    static constexpr float LARGEST = (float)LARGEST_;
    // A code's position in a word, and the shift from a float's bits to it.
    static constexpr int UPPER = 32 - BITS, SHIFT = UPPER - (23 - MANTISSA);
    static constexpr bool WRITES_BF16 = BITS == 8 && ON_HOPPER;
    static constexpr uint32_t SIGN = 1u << (BITS - 1);

    // The bits of the magnitude, moved to their place in an fp32, make a float 2^(MIN + 126) times too small,
    // subnormals included.
    static OPTIM_INLINE float decode(const Table*, uint32_t code, float scale) {
        float tiny = bits_float((code & SIGN) << (32 - BITS) | (code & (SIGN - 1u)) << (23 - MANTISSA));
        if (BITS == 8 && (code & (SIGN - 1u)) == SIGN - 1u) return bits_float(0x7fc00000u);
        return exact_mul(exact_mul(tiny, bits_float((uint32_t)(MIN + 253) << 23)), scale);
    }

    static OPTIM_HOST void fill(Table* table) {
        if constexpr (BITS == 4) {
            for (uint32_t byte = 0; byte < 256; byte++) {
                table->set((int)byte, decode(nullptr, byte >> 4, 1.0f), decode(nullptr, byte & 15u, 1.0f));
            }
        }
    }

    // Raises y to the smallest subnormal if codes of zero are not allowed, as in v.
    static OPTIM_INLINE float bounded(float y, int lowest) {
        return lowest > 0 ? exact_max(y, bits_float((uint32_t)(127 + MIN - MANTISSA) << 23)) : y;
    }

    // The factor LOWER moves y to fp32's smallest numbers: 2^MIN becomes the least exponent of fp32, fp32's subnormals
    // become the format's with 20 bits more, and the bits above CUT are the code's magnitude. The product with the
    // block's inverse is a normal number while the block's largest is below FOLD_MAX.
    static constexpr float LOWER = 1.0f / (float)(1ull << 63) / (float)(1ull << (63 + MIN));
    static constexpr float FOLD_MAX = LARGEST * LOWER * (float)(1ull << 63) * (float)(1ull << 62);
    static constexpr int CUT = 23 - MANTISSA;

    static OPTIM_INLINE float folded(float inverse) { return exact_mul(inverse, LOWER); }

    // Returns the bits of y * LOWER, at least those of the smallest subnormal if `lowest` > 0.
    static OPTIM_INLINE uint32_t lowered(float x, float fold, int lowest) {
        float y = exact_mul(x, fold);
        return float_bits(one_nan(lowest > 0 ? exact_max(y, bits_float(1u << CUT)) : y));
    }

    // Returns a word whose upper bits are sign and magnitude: the magnitude of `word` and the sign of the float's
    // `bits`. v has no sign.
    static OPTIM_INLINE uint32_t signed_word(uint32_t bits, uint32_t word, int lowest) {
        return lowest > 0 ? word : (word & 0x7fffffffu) | (bits & 0x80000000u);
    }

    // Rounds to nearest. With 4 bits no hardware has to agree: half a step is added, so ties go away from zero. Below
    // the least exponent y is first rounded to 2^-22 of a step.
    static OPTIM_INLINE uint32_t nearest_word(const Table*, float x, float inverse, int lowest) {
        if constexpr (BITS == 8) return nearest_exact(x, inverse, lowest);
        uint32_t bits = lowered(x, folded(inverse), lowest);
        return signed_word(bits, (bits << SHIFT) + (1u << (UPPER - 1)), lowest);
    }

    // Returns the sum of the bits of lowered() and the noise (noise_middle), which lies right below the code. The bits
    // above CUT are the magnitude; NaN carries over to zero.
    static OPTIM_INLINE uint32_t stochastic_bits(uint32_t bits, uint32_t middle) {
        return bits + (CUT >= 24 ? middle << (CUT - 24) : middle >> (24 - CUT));
    }

    static OPTIM_INLINE uint32_t stochastic_word(const Table*, float x, float inverse, uint32_t noise, int lowest) {
        uint32_t sum = stochastic_bits(lowered(x, folded(inverse), lowest), noise << 8 | 0x80u);
        return signed_word(sum, sum << SHIFT, lowest);
    }

    // Rounds to 8 bits exactly as the conversion instructions do. Below the least exponent, adding a float whose last
    // place is one step rounds correctly.
    static OPTIM_INLINE uint32_t nearest_exact(float x, float inverse, int lowest) {
        const uint32_t border = (uint32_t)(127 + MIN) << 23;  // the bits of 2^MIN
        const float one_step = bits_float((uint32_t)(127 + 23 + MIN - MANTISSA) << 23);
        float y = bounded(exact_mul(x, inverse), lowest), a = exact_min(exact_abs(y), LARGEST);
        if (is_nan(y)) return (SIGN - 1u) << UPPER;  // without a sign, which differs between machines
        uint32_t word = (float_bits(a) - border + (1u << 23)) << SHIFT;
        word += (1u << (UPPER - 1)) - 1u + (word >> UPPER & 1u);
        if (a < bits_float(border)) word = float_bits(exact_add(a, one_step)) << UPPER;
        return signed_word(float_bits(y), word, 0);
    }

    static OPTIM_INLINE uint32_t nearest(const Table* table, float x, float inverse, int lowest) {
        return nearest_word(table, x, inverse, lowest) >> UPPER;
    }

    static OPTIM_INLINE uint32_t stochastic(const Table* table, float x, float inverse, uint32_t noise, int lowest) {
        return stochastic_word(table, x, inverse, noise, lowest) >> UPPER;
    }

#ifdef __CUDA_ARCH__
    static constexpr bool HARDWARE = BITS == 8 && __CUDA_ARCH__ >= 890;

    // These convert two codes at a time with the instructions of sm_89 and later.
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
    template <int N>
    static __device__ __forceinline__ void get(const Table* table, const Packed<BITS, N>& codes, float scale,
                                               float* x) {
        if constexpr (BITS == 4) {
            table->template decode<N>(codes.word, scale, x);
        } else if constexpr (HARDWARE) {
#pragma unroll
            for (int i = 0; i < N; i += 2) decode2(codes.word[i / 4] >> i % 4 * 8, scale, x + i);
        } else {
            Scalar::template get<N>(table, codes, scale, x);
        }
    }

    // Does the same as nearest or stochastic for N elements and their noise. `tiny`, unless null, receives the values
    // of the codes times LOWER, as pairs of bf16.
    template <Rounding ROUNDING, int N>
    static __device__ __forceinline__ void put(const Table* table, const float* x, float inverse, const Noise& noise,
                                               int lowest, Packed<BITS, N>* codes, uint32_t* tiny) {
        const float fold = folded(inverse);
        if constexpr (ROUNDING == STOCHASTIC && BITS == 8) {
            if (lowest == 0) return signed_pack<N>(x, fold, noise, codes, tiny);
        }
        if constexpr (ROUNDING == NEAREST && HARDWARE) {
#pragma unroll
            for (int i = 0; i < N; i += 2) codes->word[i / 4] |= nearest2(x + i, inverse, lowest) << i % 4 * 8;
        } else {
            uint32_t word[N];
#pragma unroll
            for (int i = 0; i < N; i++) {
                if constexpr (ROUNDING == NEAREST) {
                    word[i] = nearest_word(table, x[i], inverse, lowest);
                } else {
                    uint32_t bits = lowered(x[i], fold, lowest), middle = noise_middle(noise, i);
                    uint32_t sum = stochastic_bits(bits, middle);
                    word[i] = BITS == 8 ? (bits << SHIFT) + middle : signed_word(sum, sum << SHIFT, lowest);
                }
            }
            codes->gather(word);
        }
    }

    // Packs codes of 8 bits with a sign: joins the upper halves of two sums, and shifts their magnitudes next to the
    // signs.
    template <int COUNT>
    static __device__ __forceinline__ void signed_pack(const float* x, float fold, const Noise& noise,
                                                       Packed<BITS, COUNT>* packed, uint32_t* tiny) {
        uint32_t word[COUNT / 2];
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            uint32_t a = stochastic_bits(lowered(x[i], fold, 0), noise_middle(noise, i));
            uint32_t b = stochastic_bits(lowered(x[i + 1], fold, 0), noise_middle(noise, i + 1));
            uint32_t pair = upper_halves(a, b);
            if (tiny) tiny[i / 2] = pair & 0x10001u * (0x10000u - (1u << (CUT - 16)));
            word[i / 2] = bits_chosen(0x80008000u, pair, pair << SHIFT);
        }
#pragma unroll
        for (int w = 0; w < COUNT / 4; w++) packed->word[w] = upper_bytes(word[2 * w], word[2 * w + 1]);
    }

    static __device__ __forceinline__ uint32_t bf16_times(uint32_t pair, uint32_t exponent) {
        uint32_t factor = exponent << 7 | exponent << 23, product;
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factor));
        return product;
    }

    // Multiplies stochastic_pack's tiny numbers by scale / LOWER, a power of two. bf16 holds the products as fp32
    // would, rounded if they are subnormal. `scale` is the scale's exponent, which is small enough for one factor
    // unless the block is `clamped`.
    template <int COUNT>
    static __device__ __forceinline__ void bf16_scaled(uint32_t scale, bool clamped, uint32_t* bf16_out) {
        const uint32_t exponent = scale + (uint32_t)(126 + MIN), max = 254;
        if (clamped && exponent > max) {  // no weights are so large
#pragma unroll
            for (int i = 0; i < COUNT / 2; i++) bf16_out[i] = bf16_times(bf16_out[i], exponent - max + 127);
        }
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) bf16_out[i] = bf16_times(bf16_out[i], exponent < max ? exponent : max);
    }
#endif
};

typedef Minifloat<8, 3, -6, 448> E4m3;
typedef Minifloat<8, 2, -14, 57344> E5m2;
typedef Minifloat<4, 1, 0, 6> E2m1;
