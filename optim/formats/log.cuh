// Moments v as codes of their logarithm. The levels are equally far apart in log2, so that every v has the same
// relative error, however small it is.
//     adalog8   2^(k scale / 255 - 126), k = 0 .. 255, scale = 126 + log2 of the block's largest; block 2048. As
//               adafactor8bit 0.2.4 defines it: the range always begins at 2^-126, steps are about 0.4 binades. Code
//               0 is 2^-126, not zero, also in a block of zeros (and in a state that was never written).
//     log8      0, and 2^(low + (k - 1) step), k = 1 .. 255, step = (high - low) / 254: low and high are log2 of the
//               block's own least, other than zero, and largest. Code 0 is zero, exactly and only where v is zero.
//     log16     the same with 16 bits, k = 1 .. 65535
// low and high lie on a grid of a quarter of the least step (2^-8 binades with 8 bits, 2^-12 with 16), so that storing
// decoded values again does not change them (adalog8's scale may change in its last bit). If the block's range is too
// short for the least step, high is raised. Rounding to nearest is nearest in log2; a middle goes up. Stochastic
// rounding is linear in value:
//     x = level 2^(u step), 0 <= u < 1, goes up with probability (2^(u step) - 1) / (2^step - 1),
// a polynomial of u whose coefficients are the block's, within 1e-5 for a step of 1 and 2e-8 for 0.1. log2 and 2^x are
// polynomials in fused operations, which have the same bits everywhere: log2 is exact within 2.3e-6 binades and 2^-24
// of the range, 2^x within 2^-20 of its value. A code differs from the exact one only if x is that near to a bound.
// Limits: v is raised to 2^-126 (adalog8) or 2^-125 and cut at 2^127; NaN and negative values count as zero. No other v
// becomes zero. There is no signed format for m, since the element of a block that is nearest to zero would decide how
// far apart all levels are. Bytes an element: BITS / 8, and 4 (adalog8) or 8 bytes over BLOCK.
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
// Limits of a block's smallest value, which leave room for a level below it and for the shortest range above.
constexpr float LOG_LOW_MIN = 2.3509887e-38f, LOG_LOW_MAX = 2.5961484e33f;  // 2^-125, 2^111

// The codes of a format. OWN: codes span the block's own range, and a code below them is zero.
template <int BITS_, bool OWN_>
struct LogCodes {
    static constexpr int BITS = BITS_, FIRST = OWN_ ? 1 : 0, LAST = (1 << BITS_) - 1;
    static constexpr bool OWN = OWN_;
    static constexpr const char* DTYPE = BITS == 8 ? "U8" : "U16";
    static constexpr float STEPS = (float)(LAST - FIRST);
    static constexpr float MIN_STEP = BITS == 8 ? 1.0f / 256 : 1.0f / 4096, GRID = MIN_STEP / 4;
};

// The range that a block keeps: log2 of the levels FIRST and LAST.
struct LogRange {
    float low, high;
};

// Return the nearest multiple of `grid` below, and above, x. |x| < 2^21 grid.
OPTIM_INLINE float grid_below(float x, float grid) {
    float count = exact_mul(x, 1.0f / grid), whole = (float)(int)count;
    return exact_mul(whole > count ? exact_add(whole, -1.0f) : whole, grid);
}

OPTIM_INLINE float grid_above(float x, float grid) {
    return -grid_below(-x, grid);
}

// The least element of a block above zero and the largest, cut to the limits; 1 and 0 if all are zero.
struct LogEnds {
    float min, top;
    bool cut;  // true if an element lies outside of the limits
};

// Returns the range of a block. A logarithm that misses a point of the grid by no more than its error counts as on the
// grid.
template <class Codes>
OPTIM_INLINE LogRange log_range(LogEnds ends) {
    if constexpr (!Codes::OWN) {
        float log = log2_precise(exact_max(ends.top, LOG_MIN));
        return {-126.0f, exact_add(log, 126.0f)};  // adafactor8bit's scale
    } else {
        if (ends.top == 0.0f) return {0.0f, 0.0f};
        constexpr float near = 1.0f / 65536;
        float high = grid_above(exact_add(log2_precise(ends.top), -near), Codes::GRID);
        float low = grid_below(exact_add(log2_precise(ends.min), near), Codes::GRID);
        return {low, exact_max(high, exact_add(low, Codes::STEPS * Codes::MIN_STEP))};
    }
}

// The numbers from which codes and levels of a block are computed; range.low = whole + part.
struct LogScale {
    float step, part, magic;      // for decoding
    float inverse, zero, offset;  // for encoding: place = (log2 - zero) * inverse + offset
    float rise[4];                // with noise: coefficients of u, u^2, .. in the probability of the upper level
};

// Returns the distance from the first level to the last in log2. A block of zeros has the shortest one, as in
// adafactor8bit.
template <class Codes>
OPTIM_INLINE float log_span(LogRange range) {
    if constexpr (!Codes::OWN) return exact_max(range.high, 1e-12f);
    return exact_max(exact_add(range.high, -range.low), Codes::STEPS * Codes::MIN_STEP);
}

template <class Codes>
OPTIM_INLINE LogScale log_scale(LogRange range) {
    LogScale s = {};
    s.step = exact_mul(log_span<Codes>(range), 1.0f / Codes::STEPS);
    float whole = grid_below(range.low, 1.0f);
    s.part = exact_add(range.low, -whole);
    s.magic = exact_add(EXP2_MAGIC, whole);
    s.zero = exact_add(EXPONENT_NUMBER, whole);
    return s;
}

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

// Returns the numbers for encoding. Rounding to nearest counts places in units of 2^BITS steps, and maps zeros and
// places below the first level to code 0. Rounding with noise counts places from the first level to the last, in units
// of all steps.
template <class Codes, Rounding ROUNDING>
OPTIM_INLINE LogScale log_encoding(LogRange range) {
    LogScale s = log_scale<Codes>(range);
    s.inverse = exact_reciprocal(log_span<Codes>(range));
    if constexpr (ROUNDING == NEAREST) {
        s.inverse = exact_mul(s.inverse, Codes::STEPS);
        s.offset = exact_fma(-s.part, s.inverse, (float)Codes::FIRST + 0.5f);
        s.inverse = exact_mul(s.inverse, 1.0f / (float)(Codes::LAST + 1));
        s.offset = exact_mul(s.offset, 1.0f / (float)(Codes::LAST + 1));
    } else {
        s.offset = exact_mul(-s.part, s.inverse);
        log_rise(s.step, s.rise);
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
template <class Codes, Rounding ROUNDING>
constexpr uint32_t LOG_BIAS = ROUNDING == STOCHASTIC ? 0x43000000u : floor_part_bias<Codes::BITS>();

template <class Codes, Rounding ROUNDING>
OPTIM_INLINE uint32_t log_word(float value, const LogScale& s, uint32_t noise) {
    float place = exact_saturated(log2_from<ROUNDING>(value, s.zero), s.inverse, s.offset);
    if constexpr (ROUNDING == NEAREST) return floor_part_bits<Codes::BITS>(place);
    float whole = floor_product(place, Codes::STEPS);
    float u = exact_fma(place, Codes::STEPS, -exact_add(whole, -8388608.0f));
    float rise = exact_fma(exact_fma(exact_fma(s.rise[3], u, s.rise[2]), u, s.rise[1]), u, s.rise[0]);
    // The probability, in 65536ths, is added to 128. That of the last level is 0, so that nothing carries out of it.
    rise = exact_fma(rise, u, 128.0f + (float)Codes::FIRST);
    return (float_bits(whole) << 16) + (float_bits(rise) + noise);
}

// Stores the codes of COUNT elements, none of them negative or NaN, of a block with these ends. `zeros`: some may be
// zero.
template <class Codes, Rounding ROUNDING, int COUNT>
OPTIM_INLINE void log_put(const Streams& streams, int first, const float* x, LogEnds ends, bool zeros,
                          const LogScale& s, const NoiseKey& key) {
    Packed<Codes::BITS, COUNT> packed = {};
    float value[COUNT];
    Noise noise = {};
    if (ROUNDING == STOCHASTIC) noise = noise_draw(key, first);
    OPTIM_UNROLL
    for (int i = 0; i < COUNT; i++) value[i] = x[i];
    if (ends.cut) {
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) value[i] = exact_min(x[i] > 0.0f ? exact_max(x[i], ends.min) : x[i], LOG_MAX);
    }
    if constexpr (ROUNDING == NEAREST) {
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) packed.add(i, log_word<Codes, NEAREST>(value[i], s, 0));
        packed.subtract(LOG_BIAS<Codes, NEAREST>);
    } else {
        uint32_t word[COUNT];
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) {
            word[i] = log_word<Codes, ROUNDING>(value[i], s, noise_lane(noise, i));
            if (Codes::BITS == 16) word[i] -= LOG_BIAS<Codes, ROUNDING>;  // it overlaps the code's 16 bits
        }
#ifdef __CUDA_ARCH__
        packed.template gather_bytes<2>(word);
#else
        for (int i = 0; i < COUNT; i++) packed.add(i, word[i] >> 16 & (uint32_t)Codes::LAST);
#endif
    }
    if (Codes::OWN && ROUNDING == STOCHASTIC && zeros) {
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) packed.clear(i, !(value[i] > 0.0f));
    }
    store_value(streams.codes, first * Codes::BITS / 8, packed);
}

// Returns the level of a code, given 2^23 + code.
template <class Codes>
OPTIM_INLINE float log_level(float number, const LogScale& s) {
    float steps = exact_add(number, -8388608.0f - (float)Codes::FIRST);
    float level = exp2_scaled(exact_fma(steps, s.step, s.part), s.magic);
    return Codes::OWN && steps < 0.0f ? 0.0f : level;
}

template <class Codes, int COUNT>
OPTIM_INLINE void log_get(const Streams& streams, int first, const LogScale& s, float* x) {
    auto packed = load_value<Packed<Codes::BITS, COUNT>>(streams.codes, first * Codes::BITS / 8);
    OPTIM_UNROLL
    for (int i = 0; i < COUNT; i++) x[i] = log_level<Codes>(packed.number(i), s);
}

// Load and store the range that a block keeps.
template <class Codes>
OPTIM_INLINE LogRange log_load(const Streams& streams, int block) {
    if constexpr (!Codes::OWN) return {-126.0f, ((const float*)streams.extra)[block]};
    return {((const float*)streams.extra)[block], Codes::OWN ? ((const float*)streams.more)[block] : 0.0f};
}

template <class Codes>
OPTIM_INLINE void log_keep(const Streams& streams, int block, LogRange range) {
    ((float*)streams.extra)[block] = Codes::OWN ? range.low : range.high;
    if constexpr (Codes::OWN) ((float*)streams.more)[block] = range.high;
}

// log_reversed reverses the order of x > 0, so that a maximum finds the smallest. It returns 0 if x is not above zero.
constexpr uint32_t LOG_REVERSED = 0x7f7fffffu;

OPTIM_INLINE float log_reversed(uint32_t bits_less_one) {
    return bits_less_one < LOG_REVERSED ? bits_float(LOG_REVERSED - bits_less_one) : 0.0f;
}

// Returns the ends of a block, from the largest log_reversed and the largest value.
template <class Codes>
OPTIM_INLINE LogEnds log_ends(float reversed, float top) {
    constexpr float bottom = Codes::OWN ? LOG_LOW_MIN : LOG_MIN;
    if (!(top > 0.0f)) return {1.0f, 0.0f, false};
    float min = Codes::OWN ? bits_float(LOG_REVERSED + 1u - float_bits(reversed)) : bottom;
    bool cut = top > LOG_MAX || (Codes::OWN && min < bottom);
    return {exact_min(exact_max(min, bottom), LOG_LOW_MAX), exact_min(exact_max(top, bottom), LOG_MAX), cut};
}

// Returns x, or zero for negative numbers and NaN.
OPTIM_INLINE float log_value(float x) {
    return x > 0.0f ? x : 0.0f;
}

// These load and store runs of whole blocks on the CPU.
template <class Codes>
OPTIM_HOST void log_blocks_load(int block, const Streams& streams, int first, float* x, int n) {
    for (int i = 0; i < n; i += 8) {
        log_get<Codes, 8>(streams, first + i, log_scale<Codes>(log_load<Codes>(streams, (first + i) / block)), x + i);
    }
}

template <class Codes, Rounding ROUNDING>
OPTIM_HOST void log_blocks_store(int block, const Streams& streams, int first, const float* x, int n,
                                 const NoiseKey& key) {
    for (int b = 0; b < n; b += block) {
        float top = 0.0f, reversed = 0.0f;
        for (int i = 0; i < block; i++) {
            top = exact_max(x[b + i], top);
            reversed = exact_max(log_reversed(float_bits(x[b + i]) - 1u), reversed);
        }
        LogEnds ends = log_ends<Codes>(reversed, top);
        LogRange range = log_range<Codes>(ends);
        log_keep<Codes>(streams, (first + b) / block, range);
        LogScale s = log_encoding<Codes, ROUNDING>(range);
        for (int c = b; c < b + block; c += 8) {
            float value[8];
            for (int i = 0; i < 8; i++) value[i] = log_value(x[c + i]);
            log_put<Codes, ROUNDING, 8>(streams, first + c, value, ends, true, s, key);
        }
    }
}

// A tile of one block has 8 times as many elements as levels. So its threads compute one or two levels each, and look
// levels up, for a third of the instructions. There is room for this many groups of threads of a thread block.
constexpr int LOG_GROUPS = 8;

#ifdef __CUDACC__
// Does the same as log_range for neighbouring threads of a block: of two threads, one computes the lower end and one
// the upper, with the same operations and another sign.
template <class Codes>
__device__ __forceinline__ LogRange log_thread_range(LogEnds ends) {
    if constexpr (!Codes::OWN) return log_range<Codes>(ends);
    const bool lower = threadIdx.x % 2 != 0;
    float log = log2_precise(lower || ends.top == 0.0f ? ends.min : ends.top);
    float end = grid_below(exact_add(lower ? log : -log, 1.0f / 65536), Codes::GRID);
    float other = __shfl_xor_sync(0xffffffffu, end, 1), low = lower ? end : other, high = lower ? -other : -end;
    if (ends.top == 0.0f) return {0.0f, 0.0f};
    return {low, exact_max(high, exact_add(low, Codes::STEPS * Codes::MIN_STEP))};
}

template <class Codes, int BLOCK, Rounding ROUNDING, int COUNT>
__device__ __forceinline__ void log_thread_store(const Streams& streams, int first, const float* x,
                                                 const NoiseKey& key) {
    // Floats from zero on are ordered as their bits are; negative values and NaN have larger bits.
    float value[COUNT];
    uint32_t max = 0, min = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        value[i] = x[i];
        uint32_t bits = __float_as_uint(x[i]);
        max = bits > max ? bits : max;
        min = bits < min ? bits : min;
    }
    const bool zeros = min == 0 || max > 0x7f800000u;
    min -= 1u;  // so that 0 does not count as the least
    if (zeros) {
        max = 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            value[i] = log_value(x[i]);
            uint32_t bits = __float_as_uint(value[i]);
            max = bits > max ? bits : max;
            min = bits - 1u < min ? bits - 1u : min;
        }
    }
    uint2 both = neighbours_both<BLOCK / COUNT, TILE_ELEMENTS / COUNT>(max, Codes::OWN ? min : 0u, key);
    LogEnds ends = log_ends<Codes>(log_reversed(both.y), __uint_as_float(both.x));
    LogRange range = log_thread_range<Codes>(ends);
    if (first % BLOCK == 0) log_keep<Codes>(streams, first / BLOCK, range);
    LogScale s = log_encoding<Codes, ROUNDING>(range);
    log_put<Codes, ROUNDING, COUNT>(streams, first, value, ends, zeros, s, key);
}

template <class Codes, Rounding ROUNDING, int COUNT>
__device__ __forceinline__ void log_thread_load(const Streams& streams, int first, const LogScale& s, float* x) {
    constexpr int THREADS = TILE_ELEMENTS / COUNT;
    float* level = (float*)streams.table + threadIdx.x / THREADS * (Codes::LAST + 1);
    // No thread reads the previous levels any more: their tile has been stored, and its ends exchanged.
#pragma unroll
    for (int code = 0; code <= Codes::LAST; code += THREADS) {
        int mine = code + first / COUNT;
        level[mine] = log_level<Codes>(bits_float(0x4b000000u + (uint32_t)mine), s);
    }
    group_sync<THREADS>();
    auto packed = load_value<Packed<Codes::BITS, COUNT>>(streams.codes, first * Codes::BITS / 8);
    if constexpr (ROUNDING == NEAREST) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) x[i] = level[packed.get(i)];
    } else {
        // This takes 3 instructions fewer for each element; it is faster only with noise.
        const uint32_t levels = table_address(level);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            uint32_t at = table_at_byte<4>(levels, packed.word[i / 4], i % 4);
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x[i]) : "r"(at) : "memory");  // not before the barrier
        }
    }
}
#endif

template <class Codes>
OPTIM_INLINE constexpr StreamInfo log_stream(int index, int block) {
    if (index == 0) return {"", Codes::DTYPE, Codes::BITS, 1};
    if (!Codes::OWN) return index == 1 ? StreamInfo{".scales", "F32", 32, block} : StreamInfo{};
    return {index == 1 ? ".low" : ".high", "F32", 32, block};
}

template <class Codes, int BLOCK, Rounding ROUNDING>
struct LogBlocks : BlockFunctions<LogBlocks<Codes, BLOCK, ROUNDING>> {
    typedef LogBlocks<Codes, BLOCK, NEAREST> Nearest;
    static constexpr StreamInfo STREAM[3] = {log_stream<Codes>(0, BLOCK), log_stream<Codes>(1, BLOCK),
                                             log_stream<Codes>(2, BLOCK)};
    static constexpr bool SIGNED = false, STORES_APART = true;
    static constexpr bool SHARES = Codes::BITS == 8 && BLOCK == TILE_ELEMENTS;  // uses log_thread_load
    static constexpr bool LOADS_TOGETHER = SHARES;
    static constexpr int TABLE_BYTES = SHARES ? LOG_GROUPS * 4 * (Codes::LAST + 1) : 0;

    // There are no constants; the kernel itself writes the TABLE_BYTES.
    static OPTIM_HOST void fill(void* table) {
        for (int i = 0; i < TABLE_BYTES / 4; i++) ((float*)table)[i] = 0.0f;
    }

#ifdef __CUDACC__
    static __device__ __forceinline__ void prepare(const Streams&, void*) {}

    // Loads 8 elements.
    static __device__ __forceinline__ void load_alone(const Streams& streams, int first, float* x) {
        log_get<Codes, 8>(streams, first, log_scale<Codes>(log_load<Codes>(streams, first / BLOCK)), x);
    }

    template <int COUNT>
    static __device__ __forceinline__ void get(const Streams& streams, int first, float* x, const NoiseKey&) {
        LogScale s = log_scale<Codes>(log_load<Codes>(streams, first / BLOCK));
        if constexpr (SHARES) log_thread_load<Codes, ROUNDING, COUNT>(streams, first, s, x);
        if constexpr (!SHARES) log_get<Codes, COUNT>(streams, first, s, x);
    }

    template <int COUNT>
    static __device__ __forceinline__ void put(const Streams& streams, int first, const float* x, const NoiseKey& key) {
        log_thread_store<Codes, BLOCK, ROUNDING, COUNT>(streams, first, x, key);
    }
#endif

    static OPTIM_HOST void load_run(const Streams& streams, int first, float* x, int n, const NoiseKey&) {
        log_blocks_load<Codes>(BLOCK, streams, first, x, n);
    }

    static OPTIM_HOST void store_run(const Streams& streams, int first, const float* x, int n, const NoiseKey& key) {
        log_blocks_store<Codes, ROUNDING>(BLOCK, streams, first, x, n, key);
    }
};

typedef LogCodes<8, false> AdaLog8;
typedef LogCodes<8, true> Log8;
typedef LogCodes<16, true> Log16;
