// Storage in blocks that share a scale: the machinery that all the narrow formats use.
//     top = max |x| over the block             (of sqrt(x) where the format keeps roots)
//     scale = top / LARGEST                    at least 2^-126; 0 when the block is all zero; as stored, rounded up
//     code = encode(x * (1 / scale))           one division a block, then a product: this is the definition
//     x = decode(code, scale)
// A block is BLOCK elements from a tensor's first one on, 32 to 2048, a power of 2; a shorter tail is filled by the
// padding's zeros. Maxima do not round, so any order of reduction gives the same bits. On a GPU a block is BLOCK / n
// neighbouring threads with n elements each: they reduce by shuffles, and through shared memory when they are more than
// a warp. Bytes an element: BITS / 8 and the scale's over BLOCK.
//
// What a scale cannot be computed from does not spoil a block: NaN does not count, infinity and what is above
// block_most counts as that. In v (key.stream is NOISE_V) no code that decodes to zero is ever written: a root of zero
// under a moment that is not would make an update of m / eps.
//
// A format is a struct of
//     BITS, DTYPE, ZERO      bits of a code; safetensors' name; the code of zero, or -1
//     SIGNED                 whether there are negative levels
//     LARGEST, UNITS, ROOT   the scale is top / LARGEST, y in 1/UNITS of it; whether the root of x is what is stored
//     Table, fill(table)     what it looks up, in shared memory on a GPU; NoTable when it is pure arithmetic
//     Stochastic             optional, the format that stores with noise: the same codes, another table
//     IN_UPPER_BITS, HARDWARE, PAIRS   faster ways on a GPU: nearest_word, stochastic_word (codes in words' upper
//                            bits), decode2 and nearest2, a PairTable and unit_of; ALL (optional): get_all and, with
//                            noise, put_all; stochastic_pack, where there is one
//     BIAS                   what nearest and stochastic add to a code, above its bits: pure arithmetic leaves it there
//     MOST, OF_POWERS        optional: block_most; whether it goes with scales of powers of two alone
//     Decoder, decode_number optional: itself, and decode of 2^23 + code as a float
//     SEEN_IS_STORED         optional: that GIVES_SEEN's numbers are what load() would give
//     decode(table, code, scale), nearest(table, x, inverse, lowest), stochastic(table, x, inverse, bits, lowest)
// where y = x * inverse, `bits` are 16 random ones, and no code below `lowest` may be returned for x >= 0. |y| exceeds
// UNITS * LARGEST by rounding errors at most. Those for DITHER have two functions more: dither.cuh.
#pragma once
#include "dither.cuh"
#include "elementwise.cuh"
#include "fp16.cuh"

EMBED_SOURCE

#ifdef __CUDACC__
// Where a thread's copy of a table begins in shared memory; kept in one register, which the compiler, left to itself,
// takes apart and adds up again for every look-up. And what is there: of constants, so no order need be kept.
__device__ __forceinline__ uint32_t table_address(const void* pointer, uint32_t before = 0) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(pointer) - before;
    asm("" : "+r"(address));
    return address;
}

// `address` and `index` entries of `bytes` more, in one instruction: a shift before it stays apart from the product.
template <int BYTES>
__device__ __forceinline__ uint32_t table_at(uint32_t address, uint32_t index) {
    uint32_t at;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(at) : "r"(index), "n"(BYTES), "r"(address));
    return at;
}

// Likewise by the byte `i` of a word, which the product of bytes takes out at no cost; BYTES is at most 128.
template <int BYTES>
__device__ __forceinline__ uint32_t table_at_byte(uint32_t address, uint32_t word, int i) {
    uint32_t at;
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(at) : "r"(word), "r"((uint32_t)BYTES << i * 8), "r"(address));
    return at;
}

// `address` and `offset` >> SHIFT more, in one instruction.
template <int SHIFT>
__device__ __forceinline__ uint32_t table_at_shifted(uint32_t address, uint32_t offset) {
    uint32_t at;
    asm("{.reg .u32 shifted; shr.u32 shifted, %1, %2; add.u32 %0, shifted, %3;}"
        : "=r"(at)
        : "r"(offset), "n"(SHIFT), "r"(address));
    return at;
}

__device__ __forceinline__ float table_load(uint32_t address) {
    float x;
    asm("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
    return x;
}
#endif

// Two numbers that one look-up gives: those of a byte's two codes of 4 bits. On a GPU they lie in shared memory in
// COPIES copies side by side, one for each of the 16 lanes that are served at a time.
struct alignas(8) FloatPair {
    float first, second;
};

struct PairTable {
    static constexpr int COPIES = 16;
    FloatPair pair[256 * COPIES];

    OPTIM_HOST void set(int byte, float first, float second) {
        for (int i = 0; i < COPIES; i++) pair[byte * COPIES + i] = {first, second};
    }

#ifdef __CUDACC__
    // Of COUNT codes, two a byte, the pairs times `unit`.
    template <int COUNT>
    __device__ __forceinline__ void decode(const uint32_t* word, float unit, float* x) const {
        const uint32_t own = table_address(pair + threadIdx.x % COPIES);
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) {
            FloatPair levels;
            asm("ld.shared.v2.f32 {%0, %1}, [%2];"
                : "=f"(levels.first), "=f"(levels.second)
                : "r"(table_at_byte<8 * COPIES>(own, word[i / 4], i % 4)));
            x[2 * i] = exact_mul(levels.first, unit);
            x[2 * i + 1] = exact_mul(levels.second, unit);
        }
    }
#endif
};

template <class A, class B>
constexpr bool SAME_TYPE = false;
template <class A>
constexpr bool SAME_TYPE<A, A> = true;

template <bool FIRST, class A, class B>
struct Either {
    typedef A Type;
};
template <class A, class B>
struct Either<false, A, B> {
    typedef B Type;
};

template <class Format>
constexpr bool HAS_TABLE = !SAME_TYPE<typename Format::Table, NoTable>;

// The format's table: the thread block's copy on a GPU.
template <class Format>
OPTIM_INLINE const typename Format::Table* format_table(const Streams& streams) {
    return HAS_TABLE<Format> ? (const typename Format::Table*)streams.table : nullptr;
}

// Whether it decodes 2^23 + code as well: only the Decoder itself, since what is derived from it may decode otherwise.
template <class Format>
constexpr bool DECODES_NUMBERS = SAME_TYPE<Format, typename Format::Decoder>;

// What stores stochastically: the format, or another of the same codes that it names as Stochastic, whose table is
// made for that.
template <class Format, Rounding ROUNDING>
struct Rounded {
    typedef typename Format::Stochastic Noisy;
    typedef typename Either<ROUNDING == STOCHASTIC && !SAME_TYPE<Noisy, void>, Noisy, Format>::Type Type;
};

// The scales as they are stored. Narrow ones are rounded up, so that no element of a block exceeds LARGEST by it.
struct ScaleFp32 {
    typedef float Code;
    static constexpr const char* DTYPE = "F32";
    static constexpr double MOST = 4.25e37;  // under 2^125, so that the reciprocal is no subnormal
    static OPTIM_INLINE float encode(float scale) { return scale; }
    static OPTIM_INLINE float decode(float code) { return code; }
};

struct ScaleBf16 {
    typedef uint16_t Code;
    static constexpr const char* DTYPE = "BF16";
    static constexpr double MOST = 4.21e37;
    static OPTIM_INLINE uint16_t encode(float scale) {
        uint32_t bits = float_bits(scale);
        return (uint16_t)((bits > 0x7f7f0000u ? 0x7f7f0000u : bits + 0xffffu) >> 16);
    }
    static OPTIM_INLINE float decode(uint16_t code) { return bits_float((uint32_t)code << 16); }
};

// A power of two; its exponent of fp32. 0 is zero here, since no scale is below 2^-126.
struct ScaleE8m0 {
    typedef uint8_t Code;
    static constexpr const char* DTYPE = "F8_E8M0";
    static constexpr double MOST = 4.25e37;
    static OPTIM_INLINE uint8_t encode(float scale) {
        uint32_t bits = float_bits(scale);
        return (uint8_t)((bits > 0x7f000000u ? 0x7f000000u : bits + 0x7fffffu) >> 23);
    }
    static OPTIM_INLINE float decode(uint8_t code) { return bits_float((uint32_t)code << 23); }
};

// fp16 as FlashOptim keeps scales, here rounded up: no scale below 2^-24, none above 65504 (larger elements saturate).
struct ScaleFp16 {
    typedef uint16_t Code;
    static constexpr const char* DTYPE = "F16";
    static constexpr double MOST = 65504.0;
    static OPTIM_INLINE uint16_t encode(float scale) {
        uint16_t code = Fp16::encode(scale);
        bool up = Fp16::decode(code) < scale && code < 0x7bff;
        return (uint16_t)(code + (up ? 1 : 0));
    }
    static OPTIM_INLINE float decode(uint16_t code) { return Fp16::decode(code); }
};

// 2^23 + floor(x) for 0 <= x < 2^22, whose lower bits are the integer.
OPTIM_INLINE uint32_t floor_bits(float x) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(__fadd_rd(x, 8388608.0f));
#else
    return 0x4b000000u + (uint32_t)x;
#endif
}

// a * b + c, rounded once, then cut to [0, 1]; of NaN 0.
OPTIM_INLINE float exact_saturated(float a, float b, float c) {
#ifdef __CUDA_ARCH__
    float x;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(x) : "f"(a), "f"(b), "f"(c));
    return x;
#else
    float x = exact_fma(a, b, c);
    return exact_min(exact_max(x, 0.0f), 1.0f);
#endif
}

// floor_bits(x * 2^BITS) for 0 <= x <= 1, and what it exceeds the integer by.
template <int BITS>
OPTIM_INLINE constexpr uint32_t floor_part_bias() {
    return 0x4b000000u - ((uint32_t)BITS << 23);
}

template <int BITS>
OPTIM_INLINE uint32_t floor_part_bits(float x) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(__fadd_rd(x, (float)(8388608 >> BITS)));
#else
    return floor_part_bias<BITS>() + (uint32_t)(x * (float)(1 << BITS));
#endif
}

// What a block's largest is cut to: an eighth of the largest float, or the root of that one, or the format's own MOST,
// or the most that a narrow scale holds; the least of these.
template <class Format, class Scale>
OPTIM_INLINE constexpr float block_most() {
    double top = Format::ROOT && Format::MOST > 1.84e19 ? 1.84e19 : Format::MOST,
           most = Scale::MOST * (double)Format::LARGEST;
    return (float)(top < most ? top : most);
}

// top / LARGEST, correctly rounded (the tests try all mantissas) unless it is subnormal.
template <class Format>
OPTIM_INLINE float over_largest(float top) {
    if constexpr (Format::LARGEST == 1.0f) return top;
    constexpr float inverse = 1.0f / Format::LARGEST;
    float quotient = exact_mul(top, inverse);
    return exact_fma(exact_fma(-Format::LARGEST, quotient, top), inverse, quotient);
}

// What the elements of one block share while it is stored.
struct BlockScale {
    float scale, inverse;
};

template <class Format>
OPTIM_INLINE float scale_inverse(float scale) {
    float inverse = exact_reciprocal(scale);
    return Format::UNITS == 1.0f ? inverse : exact_mul(inverse, Format::UNITS);
}

template <class Format, class Scale>
OPTIM_INLINE BlockScale block_scale(float top, typename Scale::Code* code) {
    top = exact_min(top, block_most<Format, Scale>());
    bool some = top > (Format::ROOT ? LEAST_ROOT : 0.0f);
    *code = Scale::encode(some ? exact_max(over_largest<Format>(top), Format::UNITS * 1.17549435e-38f) : 0.0f);
    float scale = Scale::decode(*code);
    return {scale, some ? scale_inverse<Format>(scale) : 0.0f};
}

// Codes of COUNT elements of one block; COUNT is 8 or 16, and `first` a multiple of it.
template <class Format, Rounding ROUNDING, int COUNT>
OPTIM_INLINE void block_put(const Streams& streams, int first, const float* x, float inverse, const NoiseKey& key) {
    const auto* table = format_table<Format>(streams);
    int lowest = key.stream == NOISE_V ? Format::ZERO + 1 : 0;
    Packed<Format::BITS, COUNT> packed = {};
    if constexpr (ROUNDING == STOCHASTIC && ON_GPU && Format::PACKS_NOISE) {
        Format::stochastic_pack(x, inverse, noise_draw(key, first), lowest, &packed, key.seen);
    } else if constexpr (ROUNDING == STOCHASTIC && Format::ALL) {
        const Noise noise = noise_draw(key, first);
        uint32_t bits[COUNT];
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) bits[i] = noise_lane(noise, i);
        Format::put_all(table, x, inverse, bits, lowest, &packed);
    } else if constexpr (ROUNDING == STOCHASTIC) {
        const Noise noise = noise_draw(key, first);
        uint32_t word[COUNT];
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) {
            uint32_t bits = noise_lane(noise, i);
            if constexpr (Format::IN_UPPER_BITS) {
                word[i] = Format::stochastic_word(table, x[i], inverse, bits, lowest);
            } else {
                packed.add(i, Format::stochastic(table, x[i], inverse, bits, lowest));
            }
        }
        if constexpr (Format::IN_UPPER_BITS) packed.gather(word);
        if constexpr (Format::BIAS != 0) packed.subtract(Format::BIAS);
    } else if constexpr (Format::HARDWARE) {
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i += 2) packed.word[i / 4] |= Format::nearest2(x + i, inverse, lowest) << i % 4 * 8;
    } else if constexpr (Format::IN_UPPER_BITS) {
        uint32_t word[COUNT];
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) word[i] = Format::nearest_word(table, x[i], inverse, lowest);
        packed.gather(word);
    } else {
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) {
            packed.add(i, Format::nearest(table, x[i], inverse, lowest));
        }
        if constexpr (Format::BIAS != 0) packed.subtract(Format::BIAS);
    }
    store_ordered<COUNT>(streams.codes, first, packed, key);
}

template <class Format, int COUNT>
OPTIM_INLINE void block_get(const Streams& streams, int first, float scale, float* x, const NoiseKey& key) {
    const auto* table = format_table<Format>(streams);
    auto packed = load_ordered<COUNT, Packed<Format::BITS, COUNT>>(streams.codes, first, key);
    if constexpr (Format::ALL) {
        Format::get_all(table, packed, scale, x);
    } else if constexpr (Format::HARDWARE) {
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i += 2) Format::decode2(packed.word[i / 4] >> i % 4 * 8, scale, x + i);
    } else if constexpr (Format::PAIRS) {
#ifdef __CUDA_ARCH__
        table->template decode<COUNT>(packed.word, Format::unit_of(scale), x);
#endif
    } else if constexpr (ON_GPU && Format::BITS == 8 && DECODES_NUMBERS<Format>) {
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) x[i] = Format::decode_number(packed.number(i), scale);
    } else {
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) x[i] = Format::decode(table, packed.get(i), scale);
    }
}

// What is stored of x: x or its root, cut to the most once the block's largest is known.
template <class Format>
OPTIM_INLINE float block_value(float x) {
    return Format::ROOT ? moment_root(x) : x;
}

// The largest top that takes the usual way. Formats that fold a power of two into the inverse (minifloat.cuh) would
// lose its last bits in a block with a larger one: there, where no state and no weight is, values and inverse exchange
// one.
template <class Format, class Scale, Rounding ROUNDING>
OPTIM_INLINE constexpr float block_usual() {
    constexpr bool folds = ROUNDING == STOCHASTIC || Format::BITS == 4;
    constexpr float most = block_most<Format, Scale>(), fold = folds ? Format::FOLD_MOST : most;
    return fold < most ? fold : most;
}

// The values, cut, and the inverse to store them with.
template <class Format, class Scale, Rounding ROUNDING>
OPTIM_INLINE void block_cut(float top, float* value, int n) {
    constexpr float most = block_most<Format, Scale>(), fold = block_usual<Format, Scale, ROUNDING>();
    constexpr float down = fold < most ? 1.17549435e-38f : 1.0f;  // 2^-126
    if (!(top > fold)) return;
    OPTIM_UNROLL
    for (int i = 0; i < n; i++) {
        float cut = exact_max(exact_min(value[i], most), -most);  // which makes NaN a number, beyond the scale
        value[i] = exact_mul(is_nan(value[i]) ? value[i] : cut, down);
    }
}

template <class Format, class Scale, Rounding ROUNDING>
OPTIM_INLINE float block_inverse(float top, float inverse) {
    constexpr float most = block_most<Format, Scale>(), fold = block_usual<Format, Scale, ROUNDING>();
    return fold < most && top > fold ? exact_mul(inverse, 8.507059173e37f) : inverse;  // 2^126
}

template <class Format, class Scale, Rounding ROUNDING>
OPTIM_INLINE float block_limit(float top, float inverse, float* value, int n) {
    block_cut<Format, Scale, ROUNDING>(top, value, n);
    return block_inverse<Format, Scale, ROUNDING>(top, inverse);
}

// Codes of COUNT elements of a block of BLOCK whose scale is known, both ways.
template <class Format, Rounding ROUNDING, int COUNT>
OPTIM_INLINE void part_put(int block, const Streams& streams, int first, const float* x, const BlockScale& s,
                           const NoiseKey& key) {
    if constexpr (ROUNDING == DITHER) {
        dither_put<Format, COUNT>(streams, first, x, s.inverse, dither_draw(key, first & -block, s.scale), key);
    } else {
        block_put<Format, ROUNDING, COUNT>(streams, first, x, s.inverse, key);
    }
}

template <class Format, Rounding ROUNDING, int COUNT>
OPTIM_INLINE void part_get(int block, const Streams& streams, int first, float scale, float* x, const NoiseKey& key) {
    if constexpr (ROUNDING == DITHER) {
        dither_get<Format, COUNT>(streams, first, scale, dither_draw(key, first & -block, scale), x);
    } else {
        block_get<Format, COUNT>(streams, first, scale, x, key);
    }
}

// The same on the CPU for a run of whole blocks: not inlined, so that a row of the tables is cheap.
template <class Format, class Scale, Rounding ROUNDING>
OPTIM_HOST void blocks_load(int block, const Streams& streams, int first, float* x, int n, const NoiseKey& key) {
    for (int i = 0; i < n; i += 8) {
        float scale = Scale::decode(((const typename Scale::Code*)streams.extra)[(first + i) / block]);
        part_get<Format, ROUNDING, 8>(block, streams, first + i, scale, x + i, key);
    }
}

template <class Format, class Scale, Rounding ROUNDING>
OPTIM_HOST void blocks_store(int block, const Streams& streams, int first, const float* x, int n, const NoiseKey& key) {
    for (int b = 0; b < n; b += block) {
        float top = 0.0f, value[8];
        for (int i = 0; i < block; i++) top = exact_max(exact_abs(block_value<Format>(x[b + i])), top);
        BlockScale s = block_scale<Format, Scale>(top, (typename Scale::Code*)streams.extra + (first + b) / block);
        for (int c = 0; c < block; c += 8) {
            for (int i = 0; i < 8; i++) value[i] = block_value<Format>(x[b + c + i]);
            float inverse = block_limit<Format, Scale, ROUNDING>(top, s.inverse, value, 8);
            part_put<Format, ROUNDING, 8>(block, streams, first + b + c, value, {s.scale, inverse}, key);
        }
    }
}

#ifdef __CUDACC__
// Barrier of the THREADS threads that have a tile, of several such groups in a thread block; number 0 is
// __syncthreads'.
template <int THREADS>
__device__ __forceinline__ void group_sync() {
    asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.x / THREADS + 1), "n"(THREADS) : "memory");
}

// What the warps of a group tell each other, of one array: two numbers each in neighbours_both, one in group_tell, of
// which four are read at once. Twice, by turns from tile to tile, so that nobody has to wait before writing: all have
// passed the barrier of the tile between. One exchange an array and tile.
__device__ __forceinline__ uint2* warps_parts(const NoiseKey& key) {
    __shared__ alignas(16) uint2 part[2][4][32];
    return part[key.turn][key.stream];
}

// The largest of a and the least of b over the COUNT neighbouring threads of a block, the same in each; all THREADS of
// a group call it together. What they read before, as the block's old scale, comes before what one of them writes
// after, as the new one; shuffles and reductions alone do not order memory.
template <int COUNT, int THREADS>
__device__ __forceinline__ uint2 neighbours_both(uint32_t a, uint32_t b, const NoiseKey& key) {
    if constexpr (COUNT < 32) {
#pragma unroll
        for (int lane = 1; lane < COUNT; lane *= 2) {
            uint32_t other_a = __shfl_xor_sync(0xffffffffu, a, lane), other_b = __shfl_xor_sync(0xffffffffu, b, lane);
            a = other_a > a ? other_a : a;
            b = other_b < b ? other_b : b;
        }
    } else {
        a = __reduce_max_sync(0xffffffffu, a);
        b = __reduce_min_sync(0xffffffffu, b);
    }
    if constexpr (COUNT > 1 && COUNT <= 32) __syncwarp();
    if constexpr (COUNT > 32) {
        uint2* part = warps_parts(key);
        int warp = threadIdx.x / 32, begin = warp / (COUNT / 32) * (COUNT / 32);
        if (threadIdx.x % 32 == 0) part[warp] = make_uint2(a, b);
        group_sync<THREADS>();
#pragma unroll
        for (int i = 0; i < COUNT / 32; i++) {
            uint2 other = part[begin + i];
            a = other.x > a ? other.x : a;
            b = other.y < b ? other.y : b;
        }
    }
    return make_uint2(a, b);
}

// Likewise the largest of `top`, which is no less than 0.
template <int COUNT, int THREADS>
__device__ __forceinline__ float neighbours_max(float top, const NoiseKey& key) {
    if constexpr (COUNT < 32) {
#pragma unroll
        for (int lane = 1; lane < COUNT; lane *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lane));
        if constexpr (COUNT > 1) __syncwarp();
        return top;
    } else {
        return __uint_as_float(neighbours_both<COUNT, THREADS>(__float_as_uint(top), 0u, key).x);
    }
}

// The largest of `top` over all THREADS of a group: each warp tells the others, then a group_sync, of which one serves
// for several arrays, then all are told.
__device__ __forceinline__ void group_tell(float top, const NoiseKey& key) {
    const uint32_t most = __reduce_max_sync(0xffffffffu, __float_as_uint(top));
    if (threadIdx.x % 32 == 0) ((uint32_t*)warps_parts(key))[threadIdx.x / 32] = most;
}

template <int THREADS>
__device__ __forceinline__ float group_told(const NoiseKey& key) {
    constexpr int WARPS = THREADS / 32;
    static_assert(WARPS % 4 == 0, "read four at a time");
    const uint4* part = (const uint4*)((const uint32_t*)warps_parts(key) + threadIdx.x / THREADS * WARPS);
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < WARPS / 4; i++) {
        const uint4 four = part[i];
        const uint32_t a = four.x > four.y ? four.x : four.y, b = four.z > four.w ? four.z : four.w;
        most = a > most ? a : most;
        most = b > most ? b : most;
    }
    return __uint_as_float(most);
}

// The largest magnitude of a thread's values, NaN aside, with short chains of maxima. Of v and its roots, which have no
// sign, bits are compared, two values an instruction, where what is negative or NaN would be the largest.
template <int COUNT>
__device__ __forceinline__ float thread_max(const float* value, bool has_sign) {
    if (!has_sign) {
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++) most = __float_as_uint(value[i]) > most ? __float_as_uint(value[i]) : most;
        if (most <= 0x7f800000u) return __uint_as_float(most);
    }
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < COUNT; i++) part[i % 4] = fmaxf(fabsf(value[i]), i < 4 && i > 0 ? 0.0f : part[i % 4]);
    return fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
}

template <class Format, int BLOCK, class Scale, Rounding ROUNDING>
struct Blocks;

// A thread's store in parts: the largest of its block; where that is above block_usual, the cut; all the rest. So the
// exchanges of several arrays wait at the same time, and one test and one branch serve for all. `value` is what is
// stored: x or its roots.
template <class Format, int BLOCK, int COUNT>
__device__ __forceinline__ float thread_top(const float* value, const NoiseKey& key) {
    return neighbours_max<BLOCK / COUNT, TILE_ELEMENTS / COUNT>(
        thread_max<COUNT>(value, !Format::ROOT && key.stream != NOISE_V), key);
}

template <class Format, int BLOCK, class Scale, Rounding ROUNDING, int COUNT>
__device__ __forceinline__ void thread_store(const Streams& streams, int first, const float* value, float top,
                                             bool rare, const NoiseKey& key) {
    typename Scale::Code code;
    BlockScale s = block_scale<Format, Scale>(top, &code);
    if (rare) s.inverse = block_inverse<Format, Scale, ROUNDING>(top, s.inverse);
    if (first % BLOCK == 0) ((typename Scale::Code*)streams.extra)[first / BLOCK] = code;
    part_put<Format, ROUNDING, COUNT>(BLOCK, streams, first, value, s, key);
    if constexpr (Blocks<Format, BLOCK, Scale, ROUNDING>::GIVES_SEEN) {
        if (key.seen) Format::template seen_scaled<COUNT>(code, rare, key.seen);
    }
}

template <class Format, int BLOCK, class Scale, Rounding ROUNDING, int COUNT>
__device__ __forceinline__ void thread_store_all(const Streams& streams, int first, const float* x,
                                                 const NoiseKey& key) {
    float value[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) value[i] = !Format::ROOT ? x[i] : key.roots ? key.roots[i] : moment_root(x[i]);
    const float top = thread_top<Format, BLOCK, COUNT>(value, key);
    block_cut<Format, Scale, ROUNDING>(top, value, COUNT);
    thread_store<Format, BLOCK, Scale, ROUNDING, COUNT>(streams, first, value, top, true, key);
}
#endif

template <class Format_, int BLOCK, class Scale, Rounding ROUNDING>
struct Blocks : StorageDefaults {
    typedef typename Rounded<Format_, ROUNDING>::Type Format;
    static constexpr StreamInfo STREAM[3] = {{"", Format::DTYPE, Format::BITS, 1},
                                             {".scales", Scale::DTYPE, 8 * sizeof(typename Scale::Code), BLOCK}};
    static constexpr bool SIGNED = Format::SIGNED, DITHERED = ROUNDING == DITHER;
    static constexpr bool TAKES_ORDER = !DITHERED, CROWDS_BANKS = Format::CROWDS_BANKS;
    static constexpr bool STORES_APART = HAS_TABLE<Format> && ROUNDING == NEAREST;
    // Whether store() fills key.seen on this GPU.
    static constexpr bool GIVES_SEEN = ROUNDING == STOCHASTIC && SAME_TYPE<Scale, ScaleE8m0> && Format::GIVES_SEEN;
    static constexpr bool SEEN_IS_STORED = GIVES_SEEN && Format::SEEN_IS_STORED;
    static_assert(!Format::OF_POWERS || SAME_TYPE<Scale, ScaleE8m0>, "its arithmetic is exact for powers of two");
    static_assert(!DITHERED || SAME_TYPE<Scale, ScaleFp32>, "the dither is drawn by the scale's bits");
    static constexpr int TABLE_BYTES = HAS_TABLE<Format> ? (int)sizeof(typename Format::Table) : 0;

    // Host: makes the constants of TABLE_BYTES.
    static OPTIM_HOST void fill(void* table) {
        if constexpr (HAS_TABLE<Format>) Format::fill((typename Format::Table*)table);
    }

#ifdef __CUDACC__
    // Copies them into shared memory; all threads of the thread block call it, and synchronise after it.
    static __device__ __forceinline__ void prepare(const Streams& streams, void* shared) {
        static_assert(TABLE_BYTES % 16 == 0, "copied 16 bytes at a time");
        for (int i = threadIdx.x; i < TABLE_BYTES / 16; i += blockDim.x) {
            ((uint4*)shared)[i] = ((const uint4*)streams.table)[i];
        }
    }

    static constexpr bool HAS_TOP = true;
    static constexpr float USUAL_TOP = block_usual<Format, Scale, ROUNDING>();

    static constexpr bool OF_ROOTS = Format::ROOT;

    template <int COUNT>
    static __device__ __forceinline__ float top(const float* value, const NoiseKey& key) {
        return thread_top<Format, BLOCK, COUNT>(value, key);
    }

    template <int COUNT>
    static __device__ __forceinline__ void cut(float* value, float top) {
        block_cut<Format, Scale, ROUNDING>(top, value, COUNT);
    }

    template <int COUNT>
    static __device__ __forceinline__ void store_top(const Streams& streams, int first, const float* value, float top,
                                                     bool rare, const NoiseKey& key) {
        thread_store<Format, BLOCK, Scale, ROUNDING, COUNT>(streams, first, value, top, rare, key);
    }
#endif

    static OPTIM_INLINE void load(const Streams& streams, int first, float* x, int n, const NoiseKey& key) {
#ifdef __CUDA_ARCH__
        float scale = Scale::decode(((const typename Scale::Code*)streams.extra)[first / BLOCK]);
        if (n == 16) {
            part_get<Format, ROUNDING, 16>(BLOCK, streams, first, scale, x, key);
        } else {
            part_get<Format, ROUNDING, 8>(BLOCK, streams, first, scale, x, key);
        }
#else
        blocks_load<Format, Scale, ROUNDING>(BLOCK, streams, first, x, n, key);
#endif
    }

    static OPTIM_INLINE void store(const Streams& streams, int first, const float* x, int n, const NoiseKey& key) {
#ifdef __CUDA_ARCH__
        if (n == 16) {
            thread_store_all<Format, BLOCK, Scale, ROUNDING, 16>(streams, first, x, key);
        } else {
            thread_store_all<Format, BLOCK, Scale, ROUNDING, 8>(streams, first, x, key);
        }
#else
        blocks_store<Format, Scale, ROUNDING>(BLOCK, streams, first, x, n, key);
#endif
    }

    static OPTIM_INLINE void set(const Streams& streams, int first, const float* x, int n) {
        Blocks<Format, BLOCK, Scale, NEAREST>::store(streams, first, x, n, NoiseKey{0, 0, NOISE_WEIGHTS});
    }

    static OPTIM_INLINE void view(const Streams& streams, int first, float* x, int n) {
        load(streams, first, x, n, NoiseKey{});
    }
};
