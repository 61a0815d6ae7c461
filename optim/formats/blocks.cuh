// Storage in blocks that share a scale, which all narrow formats use.
//     absmax = max |x| over the block             (of sqrt(x) where the format keeps roots)
//     scale = absmax / LARGEST                    at least 2^-126; 0 when the block is all zero; as stored, rounded up
//     code = encode(x * (1 / scale))           one division a block, then a product: this is the definition
//     x = decode(code, scale)
// A block is a run of BLOCK elements, counted from a tensor's first one; BLOCK is a power of 2 from 32 to 2048. The
// padding's zeros fill a shorter tail. Maxima do not round, so any order of reduction gives the same bits. On a GPU a
// block is BLOCK / n neighbouring threads with n elements each, which reduce by shuffles, and through shared memory if
// they are more than a warp. Bytes an element: BITS / 8, and the scale's bytes over BLOCK.
//
// An extreme value does not spoil its block: NaN does not count for the scale, and infinity and values above block_max
// count as block_max. In v (key.stream is NOISE_V) no code that decodes to zero is ever written, since dividing an m
// other than zero by the root of zero would give an update of m / eps.
//
// A format derives from FormatDefaults (storage.cuh) and has
//     BITS, DTYPE, ZERO, LARGEST   bits of a code; safetensors' name; the code of zero, or -1; scale = absmax / LARGEST
//     decode(table, code, scale), nearest(table, x, inverse, lowest), stochastic(table, x, inverse, bits, lowest)
// where y = x * inverse, `bits` are 16 random bits, and codes for x >= 0 must not be below `lowest`. |y| exceeds UNITS
// * LARGEST by rounding errors at most. A format may also have
//     SIGNED, ROOT           false without negative levels; true if the root of x is stored
//     UNITS                  y is counted in 1 / UNITS of the scale
//     Table, fill(table)     constants that it looks up, in shared memory on a GPU
//     Stochastic             the format that stores with noise: the same codes, another table
//     BIAS                   a number that nearest and stochastic add to a code, above the code's bits
//     MAX, OF_POWERS         the limit of block_max; true if scales must be powers of two
// and, to be faster on a GPU,
//     IN_UPPER_BITS          nearest_word and stochastic_word, which leave codes in the upper bits of words
//     HARDWARE               decode2 and nearest2
//     PAIRS                  a PairTable and unit_of
//     ALL                    get_all and, with noise, put_all
//     PACKS_NOISE            stochastic_pack
//     WRITES_BF16             stochastic_pack and bf16_scaled fill key.bf16_out; BF16_IS_STORED: with what load()
//     returns Decoder                the format itself if it has decode_number, which decodes the float 2^23 + code
#pragma once
#include "elementwise.cuh"

EMBED_SOURCE

#ifdef __CUDACC__
// Returns the address of a thread's copy of a table in shared memory, and makes the compiler keep it in one register;
// it would otherwise recompute the address for every look-up. table_load reads constants, so its loads may be
// reordered.
__device__ __forceinline__ uint32_t table_address(const void* pointer, uint32_t before = 0) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(pointer) - before;
    asm("" : "+r"(address));
    return address;
}

// Returns address + index * BYTES, in one instruction even if `index` is the result of a shift.
template <int BYTES>
__device__ __forceinline__ uint32_t table_at(uint32_t address, uint32_t index) {
    uint32_t at;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(at) : "r"(index), "n"(BYTES), "r"(address));
    return at;
}

// Returns address + BYTES times byte i of a word, in one instruction; BYTES is at most 128.
template <int BYTES>
__device__ __forceinline__ uint32_t table_at_byte(uint32_t address, uint32_t word, int i) {
    uint32_t at;
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(at) : "r"(word), "r"((uint32_t)BYTES << i * 8), "r"(address));
    return at;
}

// Returns address + (offset >> SHIFT), in one instruction.
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

// A table in which one look-up gives the numbers of a byte's two codes of 4 bits. On a GPU it lies in shared memory in
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
    // Decodes COUNT codes, two in a byte, and multiplies them by `unit`.
    template <int COUNT>
    __device__ __forceinline__ void decode(const uint32_t* word, float unit, float* x) const {
        const uint32_t copy = table_address(pair + threadIdx.x % COPIES);
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) {
            FloatPair levels;
            asm("ld.shared.v2.f32 {%0, %1}, [%2];"
                : "=f"(levels.first), "=f"(levels.second)
                : "r"(table_at_byte<8 * COPIES>(copy, word[i / 4], i % 4)));
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

// Returns the format's table; on a GPU, the thread block's copy.
template <class Format>
OPTIM_INLINE const typename Format::Table* format_table(const Streams& streams) {
    return HAS_TABLE<Format> ? (const typename Format::Table*)streams.table : nullptr;
}

// The functions of a storage in blocks. A thread of a GPU has 8 or 16 elements. On the CPU, load_run and store_run take
// whole blocks; they are not inlined, so that a table row compiles to little code.
template <class Storage>
struct BlockFunctions : StorageFunctions<Storage> {
    static OPTIM_INLINE void load(const Streams& streams, int first, float* x, int n, const NoiseKey& key) {
#ifdef __CUDA_ARCH__
        if (n == 16) {
            Storage::template get<16>(streams, first, x, key);
        } else {
            Storage::template get<8>(streams, first, x, key);
        }
#else
        Storage::load_run(streams, first, x, n, key);
#endif
    }

    static OPTIM_INLINE void store(const Streams& streams, int first, const float* x, int n, const NoiseKey& key) {
        OPTIM_EITHER(StorageFunctions<Storage>::store, Storage::store_run)(streams, first, x, n, key);
    }
};

// Adds the constants of its format to a storage.
template <class Functions, class Format>
struct TableStorage : Functions {
    static constexpr bool SIGNED = Format::SIGNED;
    static constexpr int TABLE_BYTES = HAS_TABLE<Format> ? (int)sizeof(typename Format::Table) : 0;

    // Computes the constants on the host.
    static OPTIM_HOST void fill(void* table) {
        if constexpr (HAS_TABLE<Format>) Format::fill((typename Format::Table*)table);
    }

#ifdef __CUDACC__
    // Copies the constants into shared memory. All threads of the thread block call it and synchronise afterwards.
    static __device__ __forceinline__ void prepare(const Streams& streams, void* shared) {
        static_assert(TABLE_BYTES % 16 == 0, "copied 16 bytes at a time");
        for (int i = threadIdx.x; i < TABLE_BYTES / 16; i += blockDim.x) {
            ((uint4*)shared)[i] = ((const uint4*)streams.table)[i];
        }
    }
#endif
};

// True if the format itself has decode_number. A format that derives from one with decode_number may decode
// differently.
template <class Format>
constexpr bool DECODES_NUMBERS = SAME_TYPE<Format, typename Format::Decoder>;

// The format that stores with this rounding: the format itself, or its Stochastic, which has the same codes.
template <class Format, Rounding ROUNDING>
struct Rounded {
    typedef typename Format::Stochastic Noisy;
    typedef typename Either<ROUNDING == STOCHASTIC && !SAME_TYPE<Noisy, void>, Noisy, Format>::Type Type;
};

constexpr double SCALE_MAX = 4.25e37;  // below 2^125, so that the reciprocal is not subnormal

// The types of stored scales. ScaleE8m0 rounds up, so that no element of a block exceeds LARGEST.
struct ScaleFp32 {
    typedef float Code;
    static constexpr const char* DTYPE = "F32";
    static OPTIM_INLINE float encode(float scale) { return scale; }
    static OPTIM_INLINE float decode(float code) { return code; }
};

// A power of two, stored as fp32's exponent. Code 0 is zero, since no scale is below 2^-126.
struct ScaleE8m0 {
    typedef uint8_t Code;
    static constexpr const char* DTYPE = "F8_E8M0";
    static OPTIM_INLINE uint8_t encode(float scale) {
        uint32_t bits = float_bits(scale);
        return (uint8_t)((bits > 0x7f000000u ? 0x7f000000u : bits + 0x7fffffu) >> 23);
    }
    static OPTIM_INLINE float decode(uint8_t code) { return bits_float((uint32_t)code << 23); }
};

// Returns the bits of 2^23 + floor(x) for 0 <= x < 2^22; their lower bits are the integer.
OPTIM_INLINE uint32_t floor_bits(float x) {
    return OPTIM_EITHER(__float_as_uint(__fadd_rd(x, 8388608.0f)), 0x4b000000u + (uint32_t)x);
}

// Returns a * b + c, rounded once and then cut to [0, 1]; NaN becomes 0.
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

// floor_part_bits returns floor(x * 2^BITS) + floor_part_bias for 0 <= x <= 1.
template <int BITS>
OPTIM_INLINE constexpr uint32_t floor_part_bias() {
    return 0x4b000000u - ((uint32_t)BITS << 23);
}

template <int BITS>
OPTIM_INLINE uint32_t floor_part_bits(float x) {
    return OPTIM_EITHER(__float_as_uint(__fadd_rd(x, (float)(8388608 >> BITS))),
                        floor_part_bias<BITS>() + (uint32_t)(x * (float)(1 << BITS)));
}

// Returns the limit to which a block's values are cut: the smallest of the format's MAX, 1.84e19 if roots are stored,
// and LARGEST times the largest scale.
template <class Format>
OPTIM_INLINE constexpr float block_max() {
    double limit = Format::ROOT && Format::MAX > 1.84e19 ? 1.84e19 : Format::MAX,
           max = SCALE_MAX * (double)Format::LARGEST;
    return (float)(limit < max ? limit : max);
}

// Returns absmax / LARGEST, correctly rounded (the tests try all mantissas) unless it is subnormal.
template <class Format>
OPTIM_INLINE float over_largest(float absmax) {
    if constexpr (Format::LARGEST == 1.0f) return absmax;
    constexpr float inverse = 1.0f / Format::LARGEST;
    float quotient = exact_mul(absmax, inverse);
    return exact_fma(exact_fma(-Format::LARGEST, quotient, absmax), inverse, quotient);
}

// The numbers that the elements of one block share while it is stored.
struct BlockScale {
    float scale, inverse;
};

template <class Format>
OPTIM_INLINE float scale_inverse(float scale) {
    float inverse = exact_reciprocal(scale);
    return Format::UNITS == 1.0f ? inverse : exact_mul(inverse, Format::UNITS);
}

// Returns the scale of a block, as stored, and its inverse; writes the stored scale to *code.
template <class Format, class Scale>
OPTIM_INLINE BlockScale block_scale(float absmax, typename Scale::Code* code) {
    absmax = exact_min(absmax, block_max<Format>());
    bool some = absmax > (Format::ROOT ? MIN_ROOT : 0.0f);
    *code = Scale::encode(some ? exact_max(over_largest<Format>(absmax), Format::UNITS * 1.17549435e-38f) : 0.0f);
    float scale = Scale::decode(*code);
    return {scale, some ? scale_inverse<Format>(scale) : 0.0f};
}

// Stores the codes of COUNT elements of one block; COUNT is 8 or 16, and `first` a multiple of it.
template <class Format, Rounding ROUNDING, int COUNT>
OPTIM_INLINE void block_put(const Streams& streams, int first, const float* x, float inverse, const NoiseKey& key) {
    const auto* table = format_table<Format>(streams);
    int lowest = key.stream == NOISE_V ? Format::ZERO + 1 : 0;
    Packed<Format::BITS, COUNT> packed = {};
    if constexpr (ROUNDING == STOCHASTIC && ON_GPU && Format::PACKS_NOISE) {
        Format::stochastic_pack(x, inverse, noise_draw(key, first), lowest, &packed, key.bf16_out);
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

// Loads COUNT elements of one block.
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

// Returns the value that is stored for x: x or its root. Once the block's largest is known, block_clamp clamps it.
template <class Format>
OPTIM_INLINE float block_value(float x) {
    return Format::ROOT ? moment_root(x) : x;
}

// Returns the largest absmax whose values need no clamp. Formats that fold a power of two into the inverse
// (minifloat.cuh) would lose bits of the inverse with a larger one. No usual state or weight has a larger one; for it,
// block_clamp and block_inverse move a power of two from the values to the inverse.
template <class Format, Rounding ROUNDING>
OPTIM_INLINE constexpr float block_no_clamp() {
    constexpr bool folds = ROUNDING == STOCHASTIC || Format::BITS == 4;
    constexpr float max = block_max<Format>(), fold = folds ? Format::FOLD_MAX : max;
    return fold < max ? fold : max;
}

// block_clamp clamps the values of a block if its absmax needs it; block_inverse returns the inverse for storing them.
template <class Format, Rounding ROUNDING>
OPTIM_INLINE void block_clamp(float absmax, float* value, int n) {
    constexpr float max = block_max<Format>(), fold = block_no_clamp<Format, ROUNDING>();
    constexpr float down = fold < max ? 1.17549435e-38f : 1.0f;  // 2^-126
    if (!(absmax > fold)) return;
    OPTIM_UNROLL
    for (int i = 0; i < n; i++) {
        float cut = exact_max(exact_min(value[i], max), -max);  // a number even for NaN
        value[i] = exact_mul(is_nan(value[i]) ? value[i] : cut, down);
    }
}

template <class Format, Rounding ROUNDING>
OPTIM_INLINE float block_inverse(float absmax, float inverse) {
    constexpr float max = block_max<Format>(), fold = block_no_clamp<Format, ROUNDING>();
    return fold < max && absmax > fold ? exact_mul(inverse, 8.507059173e37f) : inverse;  // 2^126
}

template <class Format, Rounding ROUNDING>
OPTIM_INLINE float block_limit(float absmax, float inverse, float* value, int n) {
    block_clamp<Format, ROUNDING>(absmax, value, n);
    return block_inverse<Format, ROUNDING>(absmax, inverse);
}

// These load and store runs of whole blocks on the CPU. `powers`: scales are ScaleE8m0, otherwise ScaleFp32.
template <class Format>
OPTIM_HOST void blocks_load(int block, bool powers, const Streams& streams, int first, float* x, int n,
                            const NoiseKey& key) {
    for (int i = 0; i < n; i += 8) {
        const int index = (first + i) / block;
        float scale = powers ? ScaleE8m0::decode(((const uint8_t*)streams.extra)[index])
                             : ScaleFp32::decode(((const float*)streams.extra)[index]);
        block_get<Format, 8>(streams, first + i, scale, x + i, key);
    }
}

template <class Format, Rounding ROUNDING>
OPTIM_HOST void blocks_store(int block, bool powers, const Streams& streams, int first, const float* x, int n,
                             const NoiseKey& key) {
    for (int b = 0; b < n; b += block) {
        const int index = (first + b) / block;
        float absmax = 0.0f, value[8];
        for (int i = 0; i < block; i++) absmax = exact_max(exact_abs(block_value<Format>(x[b + i])), absmax);
        BlockScale s = powers ? block_scale<Format, ScaleE8m0>(absmax, (uint8_t*)streams.extra + index)
                              : block_scale<Format, ScaleFp32>(absmax, (float*)streams.extra + index);
        for (int c = 0; c < block; c += 8) {
            for (int i = 0; i < 8; i++) value[i] = block_value<Format>(x[b + c + i]);
            float inverse = block_limit<Format, ROUNDING>(absmax, s.inverse, value, 8);
            block_put<Format, ROUNDING, 8>(streams, first + b + c, value, inverse, key);
        }
    }
}

#ifdef __CUDACC__
// A barrier of the THREADS threads of a group, which share a tile; a thread block has several groups. Barrier 0 belongs
// to __syncthreads.
template <int THREADS>
__device__ __forceinline__ void group_sync() {
    asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.x / THREADS + 1), "n"(THREADS) : "memory");
}

// Returns shared memory for the numbers that the warps of a group exchange for one array, of which four are read at
// once. There are two such places, which alternate from tile to tile, so that no warp has to wait before it writes: all
// warps have passed the barrier of the tile between. Each array has one exchange in a tile.
__device__ __forceinline__ uint32_t* warps_parts(const NoiseKey& key) {
    __shared__ alignas(16) uint32_t part[2][4][32];
    return part[key.turn][key.stream];
}

// Returns the largest `absmax`, at least 0, among the COUNT neighbouring threads of a block, in each of them. All
// THREADS of a group call it together. It also orders memory: earlier reads, such as of the block's old scale, complete
// before a thread writes the new scale afterwards. Shuffles and reductions alone do not guarantee that.
template <int COUNT, int THREADS>
__device__ __forceinline__ float neighbours_max(float absmax, const NoiseKey& key) {
    if constexpr (COUNT < 32) {
#pragma unroll
        for (int lane = 1; lane < COUNT; lane *= 2) absmax = fmaxf(absmax, __shfl_xor_sync(0xffffffffu, absmax, lane));
        if constexpr (COUNT > 1) __syncwarp();
        return absmax;
    } else {
        uint32_t max = __reduce_max_sync(0xffffffffu, __float_as_uint(absmax));
        if constexpr (COUNT == 32) __syncwarp();
        if constexpr (COUNT > 32) {
            uint32_t* part = warps_parts(key);
            int warp = threadIdx.x / 32, begin = warp / (COUNT / 32) * (COUNT / 32);
            if (threadIdx.x % 32 == 0) part[warp] = max;
            group_sync<THREADS>();
#pragma unroll
            for (int i = 0; i < COUNT / 32; i++) max = part[begin + i] > max ? part[begin + i] : max;
        }
        return __uint_as_float(max);
    }
}

// These find the largest `absmax` of all THREADS of a group: each warp calls tile_max_put for one or more arrays, then
// all threads call group_sync once, then tile_max_get returns the maximum of an array.
__device__ __forceinline__ void tile_max_put(float absmax, const NoiseKey& key) {
    const uint32_t max = __reduce_max_sync(0xffffffffu, __float_as_uint(absmax));
    if (threadIdx.x % 32 == 0) warps_parts(key)[threadIdx.x / 32] = max;
}

template <int THREADS>
__device__ __forceinline__ float tile_max_get(const NoiseKey& key) {
    constexpr int WARPS = THREADS / 32;
    static_assert(WARPS % 4 == 0, "read four at a time");
    const uint4* part = (const uint4*)(warps_parts(key) + threadIdx.x / THREADS * WARPS);
    uint32_t max = 0;
#pragma unroll
    for (int i = 0; i < WARPS / 4; i++) {
        const uint4 four = part[i];
        const uint32_t a = four.x > four.y ? four.x : four.y, b = four.z > four.w ? four.z : four.w;
        max = a > max ? a : max;
        max = b > max ? b : max;
    }
    return __uint_as_float(max);
}

// Returns the largest magnitude of a thread's values except NaN, with short chains of maxima. v and its roots have no
// sign, so their bits are compared, two values an instruction; a negative value or NaN would have the largest bits and
// is handled by the general way.
template <int COUNT>
__device__ __forceinline__ float thread_max(const float* value, bool has_sign) {
    if (!has_sign) {
        uint32_t max = 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++) max = __float_as_uint(value[i]) > max ? __float_as_uint(value[i]) : max;
        if (max <= 0x7f800000u) return __uint_as_float(max);
    }
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < COUNT; i++) part[i % 4] = fmaxf(fabsf(value[i]), i < 4 && i > 0 ? 0.0f : part[i % 4]);
    return fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
}

#endif

template <class Format_, int BLOCK, class Scale, Rounding ROUNDING>
struct Blocks
    : TableStorage<BlockFunctions<Blocks<Format_, BLOCK, Scale, ROUNDING>>, typename Rounded<Format_, ROUNDING>::Type> {
    typedef typename Rounded<Format_, ROUNDING>::Type Format;
    static constexpr StreamInfo STREAM[3] = {{"", Format::DTYPE, Format::BITS, 1},
                                             {".scales", Scale::DTYPE, 8 * sizeof(typename Scale::Code), BLOCK}};
    static constexpr bool TAKES_ORDER = true, CROWDS_BANKS = Format::CROWDS_BANKS;
    static constexpr bool STORES_APART = HAS_TABLE<Format> && ROUNDING == NEAREST;
    // True if store() fills key.bf16_out on this GPU.
    static constexpr bool WRITES_BF16 = ROUNDING == STOCHASTIC && SAME_TYPE<Scale, ScaleE8m0> && Format::WRITES_BF16;
    static constexpr bool BF16_IS_STORED = WRITES_BF16 && Format::BF16_IS_STORED;
    static_assert(!Format::OF_POWERS || SAME_TYPE<Scale, ScaleE8m0>, "its arithmetic is exact for powers of two");

    typedef Blocks<Format, BLOCK, Scale, NEAREST> Nearest;

#ifdef __CUDACC__
    // A thread's store has parts: find the absmax of its block, clamp the values if it is above block_no_clamp, and
    // store. So the waits for the exchanges of several arrays overlap, and one test and one branch serve all arrays.
    // `value` is x or its roots, whichever is stored.
    static constexpr bool HAS_ABSMAX = true, OF_ROOTS = Format::ROOT;
    static constexpr float NO_CLAMP_ABSMAX = block_no_clamp<Format, ROUNDING>();

    template <int COUNT>
    static __device__ __forceinline__ float absmax(const float* value, const NoiseKey& key) {
        return neighbours_max<BLOCK / COUNT, TILE_ELEMENTS / COUNT>(
            thread_max<COUNT>(value, !Format::ROOT && key.stream != NOISE_V), key);
    }

    template <int COUNT>
    static __device__ __forceinline__ void clamp(float* value, float absmax) {
        block_clamp<Format, ROUNDING>(absmax, value, COUNT);
    }

    template <int COUNT>
    static __device__ __forceinline__ void store_absmax(const Streams& streams, int first, const float* value,
                                                        float absmax, bool clamped, const NoiseKey& key) {
        typename Scale::Code code;
        BlockScale s = block_scale<Format, Scale>(absmax, &code);
        if (clamped) s.inverse = block_inverse<Format, ROUNDING>(absmax, s.inverse);
        if (first % BLOCK == 0) ((typename Scale::Code*)streams.extra)[first / BLOCK] = code;
        block_put<Format, ROUNDING, COUNT>(streams, first, value, s.inverse, key);
        if constexpr (WRITES_BF16) {
            if (key.bf16_out) Format::template bf16_scaled<COUNT>(code, clamped, key.bf16_out);
        }
    }

    // Runs all parts.
    template <int COUNT>
    static __device__ __forceinline__ void put(const Streams& streams, int first, const float* x, const NoiseKey& key) {
        float value[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) value[i] = !Format::ROOT ? x[i] : key.roots ? key.roots[i] : moment_root(x[i]);
        const float largest = absmax<COUNT>(value, key);
        clamp<COUNT>(value, largest);
        store_absmax<COUNT>(streams, first, value, largest, true, key);
    }
#endif

    template <int COUNT>
    static OPTIM_INLINE void get(const Streams& streams, int first, float* x, const NoiseKey& key) {
        const float scale = Scale::decode(((const typename Scale::Code*)streams.extra)[first / BLOCK]);
        block_get<Format, COUNT>(streams, first, scale, x, key);
    }

    static OPTIM_HOST void load_run(const Streams& streams, int first, float* x, int n, const NoiseKey& key) {
        blocks_load<Format>(BLOCK, SAME_TYPE<Scale, ScaleE8m0>, streams, first, x, n, key);
    }

    static OPTIM_HOST void store_run(const Streams& streams, int first, const float* x, int n, const NoiseKey& key) {
        blocks_store<Format, ROUNDING>(BLOCK, SAME_TYPE<Scale, ScaleE8m0>, streams, first, x, n, key);
    }
};
