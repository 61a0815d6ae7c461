// adalog8: moments v as codes of their logarithm, as adafactor8bit 0.2.4 defines it. The levels are equally far apart
// in log2, so that every v has the same relative error, however small it is:
//     2^(k scale / 255 - 126), k = 0 .. 255, scale = 126 + log2 of the largest of 2048 elements
// The range always begins at 2^-126, and steps are about 0.4 binades. Code 0 is 2^-126, not zero, also in a block of
// zeros (and in a state that was never written). Rounding to nearest is nearest in log2; a middle goes up. Stochastic
// rounding is linear in value:
//     x = level 2^(u step), 0 <= u < 1, goes up with probability (2^(u step) - 1) / (2^step - 1),
// a polynomial of u whose coefficients are the block's, within 1e-5 for a step of 1 and 2e-8 for 0.1. log2 and 2^x are
// polynomials in fused operations, which have the same bits everywhere: log2 is exact within 2.3e-6 binades and 2^-24
// of the range, 2^x within 2^-20 of its value. A code differs from the exact one only if x is that near to a bound.
// Limits: v is raised to 2^-126 and cut at 2^127; NaN and negative values count as zero. Storing decoded values again
// changes no code, but may change the scale in its last bit. Bytes an element: 1, and 4 over 2048.
#pragma once
#include "blocks.cuh"

EMBED_SOURCE

// Returns the value of a polynomial; coefficients begin with the constant one.
template <int COUNT>
OPTIM_INLINE float polynomial(const float (&c)[COUNT], float x) {
    float sum = c[COUNT - 1];
    OPTIM_UNROLL
    for (int i = COUNT - 2; i >= 0; i--) sum = exact_fma(sum, x, c[i]);
    return sum;
}

// Returns 2^23 + the exponent bits of x > 0, in one instruction on a GPU.
OPTIM_INLINE float exponent_number(float x) {
    return OPTIM_EITHER(__uint_as_float(__funnelshift_r(__float_as_uint(x), 0x4b000000u >> 9, 23)),
                        bits_float(0x4b000000u | float_bits(x) >> 23));
}

// Returns the mantissa of x, in [1, 2). The stochastic version takes one instruction; to nearest, one was not faster
// than the compiler's two.
template <Rounding ROUNDING>
OPTIM_INLINE float mantissa_number(float x) {
    if constexpr (ROUNDING == STOCHASTIC) return bits_float(bits_chosen(0x7fffffu, float_bits(x), 0x3f800000u));
    return bits_float((float_bits(x) & 0x7fffffu) | 0x3f800000u);
}

constexpr float EXPONENT_NUMBER = 8388608.0f + 127.0f;  // of 1

// Returns log2(1 + f) / f for 0 <= f < 1. It is exact at both ends, so that powers of two have exact logarithms.
OPTIM_INLINE float log2_factor(float f) {
    const float c[] = {1.44254494f, -0.718145251f, 0.457549185f, -0.277905345f, 0.121797912f, -0.0258414503f};
    return polynomial(c, f);
}

// Returns log2(x) + EXPONENT_NUMBER - zero for a normal x > 0; EXPONENT_NUMBER - zero is a small integer.
template <Rounding ROUNDING = NEAREST>
OPTIM_INLINE float log2_from(float x, float zero) {
    float f = exact_add(mantissa_number<ROUNDING>(x), -1.0f);
    return exact_fma(f, log2_factor(f), exact_add(exponent_number(x), -zero));
}

// Returns log2(x), exact within 2e-7 and its rounding, for the range that a block keeps.
OPTIM_INLINE float log2_precise(float x) {
    const float c[] = {1.4426949f,    -0.721337795f, 0.480722755f,   -0.359082758f, 0.280075788f,
                       -0.211591721f, 0.139265344f,  -0.0699670613f, 0.022664668f,  -0.00344407232f};
    float f = exact_add(mantissa_number<NEAREST>(x), -1.0f);
    return exact_fma(f, polynomial(c, f), exact_add(exponent_number(x), -EXPONENT_NUMBER));
}

// Returns 2^(t + k) for |t| < 2^21, given `magic` = 3 * 2^22 + k. The result must be a normal number.
OPTIM_INLINE float exp2_scaled(float t, float magic) {
    const float c[] = {1.0f, 0.693142831f, 0.240223512f, 0.0555740036f, 0.00966628175f, 0.00111255073f};
    float whole = exact_add(t, magic), rest = exact_add(t, -exact_add(whole, -magic));
    return bits_float(float_bits(polynomial(c, rest)) + (float_bits(whole) << 23));
}

constexpr float EXP2_MAGIC = 12582912.0f;
constexpr float LOG_MIN = 1.17549435e-38f, LOG_MAX = 1.70141183e38f;  // 2^-126, 2^127
constexpr float LOG_STEPS = 255.0f;                                   // from the first level to the last

// Returns adafactor8bit's scale of a block, given its largest element.
OPTIM_INLINE float log_scale(float absmax) {
    return exact_add(log2_precise(exact_min(exact_max(absmax, LOG_MIN), LOG_MAX)), 126.0f);
}

// A block of zeros has the shortest range, as in adafactor8bit.
OPTIM_INLINE float log_span(float scale) {
    return exact_max(scale, 1e-12f);
}

// Returns the distance between two levels in log2.
OPTIM_INLINE float log_step(float scale) {
    return exact_mul(log_span(scale), 1.0f / LOG_STEPS);
}

// The numbers of a block from which codes are computed: place = (log2 + 126) * inverse + offset.
struct LogEncoding {
    float inverse, offset;
    float rise[4];  // with noise: coefficients of u, u^2, .. in the probability of the upper level
};

// Computes the coefficients of (2^(u step) - 1) / (2^step - 1) for 0 <= u <= 1, 0 < step <= 1: the polynomial with the
// same values at u = 0, 1/4, .. 1. These are sums of a geometric series with the ratio 1 + d = 2^(step / 4), so by
// differences:
//     (t + d t (t - 1) / 2 + d^2 t (t - 1) (t - 2) / 6 + d^3 t (t - 1) (t - 2) (t - 3) / 24) / (4 + 6 d + 4 d^2 + d^3)
// with t = 4 u.
OPTIM_INLINE void log_rise(float step, float* rise) {
    const float two[] = {0.173286795f, 0.0150141575f, 0.000867248792f, 3.75702577e-05f};
    const float sum[] = {4.0f, 6.0f, 4.0f, 1.0f}, first[] = {4.0f, -2.0f, 4.0f / 3, -1.0f};
    const float second[] = {8.0f, -8.0f, 22.0f / 3};
    float d = exact_mul(polynomial(two, step), step), of_sum = exact_reciprocal(polynomial(sum, d));
    float scaled = exact_mul(d, of_sum), square = exact_mul(d, scaled);
    rise[0] = exact_mul(polynomial(first, d), of_sum);
    rise[1] = exact_mul(polynomial(second, d), scaled);
    rise[2] = exact_mul(exact_fma(d, -16.0f, 32.0f / 3), square);
    rise[3] = exact_mul(exact_mul(d, 32.0f / 3), square);
}

// Returns the numbers for encoding. Rounding to nearest counts places in units of 256 steps. Rounding with noise counts
// them from the first level to the last, in units of all steps.
template <Rounding ROUNDING>
OPTIM_INLINE LogEncoding log_encoding(float scale) {
    LogEncoding s = {exact_reciprocal(log_span(scale)), 0.0f, {}};
    if constexpr (ROUNDING == NEAREST) {
        s.inverse = exact_mul(exact_mul(s.inverse, LOG_STEPS), 1.0f / 256);
        s.offset = 0.5f / 256;
    } else {
        log_rise(log_step(scale), s.rise);
    }
    return s;
}

// Returns 2^23 + floor(a * b) for 0 <= a <= 1 and a whole number 0 < b < 65536.
OPTIM_INLINE float floor_product(float a, float b) {
    return OPTIM_EITHER(__fmaf_rd(a, b, 8388608.0f), bits_float(0x4b000000u + (uint32_t)((double)a * (double)b)));
}

// log_word returns a word with the code of a value. To nearest, the value may also be zero or negative, and the lower
// bits are the code plus LOG_BIAS. With 16 random bits of noise, the upper 16 bits are the code plus the upper bits of
// LOG_BIAS, above the sum of noise and probability; values below the first level become that level.
template <Rounding ROUNDING>
constexpr uint32_t LOG_BIAS = ROUNDING == STOCHASTIC ? 0x43000000u : floor_part_bias<8>();

template <Rounding ROUNDING>
OPTIM_INLINE uint32_t log_word(float value, const LogEncoding& s, uint32_t noise) {
    float place = exact_saturated(log2_from<ROUNDING>(value, EXPONENT_NUMBER - 126.0f), s.inverse, s.offset);
    if constexpr (ROUNDING == NEAREST) return floor_part_bits<8>(place);
    float whole = floor_product(place, LOG_STEPS);
    float u = exact_fma(place, LOG_STEPS, -exact_add(whole, -8388608.0f));
    float rise = exact_fma(exact_fma(exact_fma(s.rise[3], u, s.rise[2]), u, s.rise[1]), u, s.rise[0]);
    // The probability, in 65536ths, is added to 128. That of the last level is 0, so that nothing carries out of it.
    rise = exact_fma(rise, u, 128.0f);
    return (float_bits(whole) << 16) + (float_bits(rise) + noise);
}

// Returns the level of a code, given 2^23 + code.
OPTIM_INLINE float log_level(float number, float step) {
    return exp2_scaled(exact_mul(exact_add(number, -8388608.0f), step), EXP2_MAGIC - 126.0f);
}

// A block has 8 times as many elements as there are levels. So its threads compute one or two levels each, and look
// levels up, for a third of the instructions. There is room for this many groups of threads of a thread block.
constexpr int LOG_GROUPS = 8;

template <Rounding ROUNDING>
struct AdaLog8 : BlockFunctions<AdaLog8<ROUNDING>> {
    static constexpr int BLOCK = TILE_ELEMENTS;
    static constexpr StreamInfo STREAM[3] = {{"", "U8", 8, 1}, {".scales", "F32", 32, BLOCK}};
    static constexpr bool SIGNED = false, STORES_APART = true;
    static constexpr float NO_CLAMP_ABSMAX = LOG_MAX;
    static constexpr int TABLE_BYTES = LOG_GROUPS * 4 * 256;

    // There are no constants; the kernel itself writes the TABLE_BYTES.
    static OPTIM_HOST void fill(void* table) {
        for (int i = 0; i < TABLE_BYTES / 4; i++) ((float*)table)[i] = 0.0f;
    }

    static OPTIM_INLINE float step_of(const Streams& streams, int first) {
        return log_step(((const float*)streams.scales)[first / BLOCK]);
    }

    // Threads of a GPU load together, where all of them do (below).
    template <int N>
    static OPTIM_INLINE void get(const Streams& streams, int first, float* x, const NoiseKey&, int = BLOCK) {
        const float step = step_of(streams, first);
        auto packed = load_value<Packed<8, N>>(streams.codes, first);
        OPTIM_UNROLL
        for (int i = 0; i < N; i++) x[i] = log_level(packed.number(i), step);
    }

#ifdef __CUDA_ARCH__
    static __device__ __forceinline__ void prepare(const Streams&, void*) {}

    static __device__ __forceinline__ void load(const Streams& streams, int first, float* x, int n, const NoiseKey&) {
        if (n == 16) {
            get_together<16>(streams, first, x);
        } else {
            get_together<8>(streams, first, x);
        }
    }

    template <int N>
    static __device__ __forceinline__ void get_together(const Streams& streams, int first, float* x) {
        constexpr int THREADS = TILE_ELEMENTS / N;
        float* level = (float*)streams.table + threadIdx.x / THREADS * 256;
        const float step = step_of(streams, first);
        // No thread reads the previous levels any more: their tile has been stored, and its largest exchanged.
#pragma unroll
        for (int code = 0; code < 256; code += THREADS) {
            int mine = code + first / N;
            level[mine] = log_level(bits_float(0x4b000000u + (uint32_t)mine), step);
        }
        group_sync<THREADS>();
        auto packed = load_value<Packed<8, N>>(streams.codes, first);
        const uint32_t levels = table_address(level);
#pragma unroll
        for (int i = 0; i < N; i++) {
            uint32_t at = table_at_byte<4>(levels, packed.word[i / 4], i % 4);
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x[i]) : "r"(at) : "memory");  // not before the barrier
        }
    }
#endif

    // Floats from zero on are ordered as their bits are; negative values and NaN have larger bits, and become zero.
    template <int N>
    static OPTIM_INLINE float absmax(float* value, const NoiseKey&) {
        uint32_t max = bits_max<N>(value);
        if (max > 0x7f800000u) {
            OPTIM_UNROLL
            for (int i = 0; i < N; i++) value[i] = value[i] > 0.0f ? value[i] : 0.0f;
            max = bits_max<N>(value);
        }
        return bits_float(max);
    }

    template <int N>
    static OPTIM_INLINE void clamp(float* value, float) {
        OPTIM_UNROLL
        for (int i = 0; i < N; i++) value[i] = exact_min(value[i], LOG_MAX);
    }

    static OPTIM_INLINE LogEncoding put_scale(const Streams& streams, int first, float absmax, float, bool,
                                              int = BLOCK) {
        const float scale = log_scale(absmax);
        const LogEncoding s = log_encoding<ROUNDING>(scale);
        if (first % BLOCK == 0) ((float*)streams.scales)[first / BLOCK] = scale;
        return s;
    }

    template <int N>
    static OPTIM_INLINE void put_codes(const Streams& streams, int first, const float* value, const LogEncoding& s,
                                       const NoiseKey& key) {
        Packed<8, N> packed = {};
        if constexpr (ROUNDING == NEAREST) {
            OPTIM_UNROLL
            for (int i = 0; i < N; i++) packed.add(i, log_word<NEAREST>(value[i], s, 0));
            packed.subtract(LOG_BIAS<NEAREST>);
        } else {
            const Noise noise = noise_draw(key, first);
            uint32_t word[N];
            OPTIM_UNROLL
            for (int i = 0; i < N; i++) word[i] = log_word<ROUNDING>(value[i], s, noise_lane(noise, i));
            packed.template gather_bytes<2>(word);
        }
        store_value(streams.codes, first, packed);
    }
};
