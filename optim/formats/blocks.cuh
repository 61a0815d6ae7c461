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
// A format derives from BlockFormat and has
//     BITS, DTYPE, ZERO, LARGEST   bits of a code; safetensors' name; the code of zero, or -1; scale = absmax / LARGEST
//     decode(table, code, scale), nearest(table, x, inverse, lowest), stochastic(table, x, inverse, bits, lowest)
// where y = x * inverse, `bits` are 16 random bits, and codes for x >= 0 must not be below `lowest`. |y| exceeds UNITS
// * LARGEST by rounding errors at most. A format may also have
//     SIGNED, ROOT           false without negative levels; true if the root of x is stored
//     UNITS                  y is counted in 1 / UNITS of the scale
//     Table, fill(table)     constants that it looks up, in shared memory on a GPU
//     Stochastic             the format that stores with noise: the same codes, another table
//     MAX, OF_POWERS         the limit of block_max; true if scales must be powers of two
//     FOLD_MAX               a larger absmax would lose bits of the inverse
// and, to be faster on a GPU,
//     get<N>, put<ROUNDING, N>    in place of those of BlockFormat, which call the functions above
//     WRITES_BF16                 put() and bf16_scaled() fill key.bf16_out; BF16_IS_STORED: with what load() returns
//     CROWDS_BANKS                look-ups keep shared memory busy (StorageDefaults)
#pragma once
#include "scales.cuh"

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

struct NoTable {};

template <class Format>
constexpr bool HAS_TABLE = !SAME_TYPE<typename Format::Table, NoTable>;

// Returns the format's table; on a GPU, the thread block's copy.
template <class Format>
OPTIM_INLINE const typename Format::Table* format_table(const Streams& streams) {
    return HAS_TABLE<Format> ? (const typename Format::Table*)streams.table : nullptr;
}

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

// The format that stores with this rounding: the format itself, or its Stochastic, which has the same codes.
template <class Format, Rounding ROUNDING>
struct Rounded {
    typedef typename Format::Stochastic Noisy;
    typedef typename Either<ROUNDING == STOCHASTIC && !SAME_TYPE<Noisy, void>, Noisy, Format>::Type Type;
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
    // The numbers from 0 on are ordered as their bits are, those below 0 are negative, and NaN is the largest.
    int bits = (int)float_bits(exact_fma(a, b, c));
    bits = bits <= 0x7f800000 ? bits : 0;
    bits = bits > 0 ? bits : 0;
    return bits_float((uint32_t)(bits < 0x3f800000 ? bits : 0x3f800000));
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
#endif

// Returns the largest bits of N values; those of a negative value or NaN are above those of infinity.
template <int N>
OPTIM_INLINE uint32_t bits_max(const float* value) {
    uint32_t max = 0;
    OPTIM_UNROLL
    for (int i = 0; i < N; i++) max = float_bits(value[i]) > max ? float_bits(value[i]) : max;
    return max;
}

// Returns the largest magnitude of N values except NaN, with short chains of maxima. On a GPU v and its roots, which
// have no sign, are compared by their bits, two values an instruction; on the CPU all are, in vectors.
template <int N>
OPTIM_INLINE float values_max(const float* value, bool has_sign) {
    if constexpr (!ON_GPU) {
        int max = 0;
        for (int i = 0; i < N; i++) {
            const int bits = (int)(float_bits(value[i]) & 0x7fffffffu), number = bits <= 0x7f800000 ? bits : 0;
            max = number > max ? number : max;
        }
        return bits_float((uint32_t)max);
    }
    if (ON_GPU && !has_sign) {
        const uint32_t max = bits_max<N>(value);
        if (max <= 0x7f800000u) return bits_float(max);
    }
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    OPTIM_UNROLL
    for (int i = 0; i < N; i++) part[i % 4] = exact_max(exact_abs(value[i]), i < 4 && i > 0 ? 0.0f : part[i % 4]);
    return exact_max(exact_max(part[0], part[1]), exact_max(part[2], part[3]));
}

// These load and store whole blocks on the CPU, with the functions that a GPU's threads call too. They are not inlined,
// so that a table row compiles to little code.
template <class Storage>
OPTIM_HOST void load_blocks(int block, const Streams& streams, int first, float* x, int n, const NoiseKey& key) {
    constexpr int PART = Storage::STREAM[0].bits == 8 ? 16 : 8;  // compilers make vectors of 16 bytes, or of one word
    int i = 0;
    for (; i + PART <= n; i += PART) Storage::template get<PART>(streams, first + i, x + i, key, block);
    if (i < n) Storage::template get<8>(streams, first + i, x + i, key, block);
}

template <class Storage>
OPTIM_HOST void store_blocks(int block, const Streams& streams, int first, const float* x, int n, const NoiseKey& key) {
    for (int t = 0; t < n; t += TILE_ELEMENTS) {
        const int held = n - t < TILE_ELEMENTS ? n - t : TILE_ELEMENTS;
        float value[TILE_ELEMENTS], absmax[TILE_ELEMENTS / 32] = {}, max = 0.0f;
        OPTIM_VECTORS
        for (int i = 0; i < held; i++) value[i] = Storage::OF_ROOTS ? moment_root(x[t + i]) : x[t + i];
        for (int b = 0; b * block < held; b++) {
            for (int i = b * block; i < (b + 1) * block; i += 32) {
                absmax[b] = exact_max(Storage::template absmax<32>(value + i, key), absmax[b]);
            }
            max = exact_max(absmax[b], max);
        }
        for (int b = 0; b * block < held; b++) {
            const bool clamps = !(absmax[b] <= Storage::NO_CLAMP_ABSMAX);
            const auto scale = Storage::put_scale(streams, first + t + b * block, absmax[b], max, clamps, block);
            for (int i = b * block; i < (b + 1) * block; i += 16) {
                if (clamps) Storage::template clamp<16>(value + i, absmax[b]);
                Storage::template put_codes<16>(streams, first + t + i, value + i, scale, key);
            }
        }
    }
}

// The functions of a storage in blocks. put_scaled() is put_scale(), which stores a block's scale and returns what the
// encoder needs of it, and put_codes().
template <class Storage>
struct BlockFunctions : StorageFunctions<Storage> {
    template <int N>
    static OPTIM_INLINE void put_scaled(const Streams& streams, int first, const float* value, float absmax,
                                        float tile_max, bool clamped, const NoiseKey& key) {
        const auto scale = Storage::put_scale(streams, first, absmax, tile_max, clamped);
        Storage::template put_codes<N>(streams, first, value, scale, key);
    }

#ifdef __CUDA_ARCH__
    // Takes all parts of a store, for weights.
    template <int N>
    static __device__ __forceinline__ void put(const Streams& streams, int first, const float* x, const NoiseKey& key) {
        float value[N];
#pragma unroll
        for (int i = 0; i < N; i++) value[i] = x[i];
        float absmax = Storage::template absmax<N>(value, key);
        absmax = neighbours_max<Storage::BLOCK / N, TILE_ELEMENTS / N>(absmax, key);
        Storage::template clamp<N>(value, absmax);
        Storage::template put_scaled<N>(streams, first, value, absmax, 0.0f, true, key);
    }
#else
    static OPTIM_HOST void load(const Streams& streams, int first, float* x, int n, const NoiseKey& key) {
        load_blocks<Storage>(Storage::BLOCK, streams, first, x, n, key);
    }

    static OPTIM_HOST void store(const Streams& streams, int first, const float* x, int n, const NoiseKey& key) {
        store_blocks<Storage>(Storage::BLOCK, streams, first, x, n, key);
    }
#endif
};

// A format's vector functions, and the defaults of its optional members (above).
template <class Format>
struct BlockFormat {
    typedef NoTable Table;
    typedef void Stochastic;
    static constexpr bool SIGNED = true, ROOT = false, OF_POWERS = false;
    static constexpr float UNITS = 1.0f, FOLD_MAX = 3.4e38f;
    static constexpr double MAX = 4.25e37;
    static constexpr bool WRITES_BF16 = false, BF16_IS_STORED = false, CROWDS_BANKS = false;

    template <int N, class Table, class Codes>
    static OPTIM_INLINE void get(const Table* table, const Codes& codes, float scale, float* x) {
        OPTIM_UNROLL
        for (int i = 0; i < N; i++) x[i] = Format::decode(table, codes.get(i), scale);
    }

    template <Rounding ROUNDING, int N, class Table, class Codes>
    static OPTIM_INLINE void put(const Table* table, const float* x, float inverse, const Noise& noise, int lowest,
                                 Codes* codes, uint32_t*) {
        uint32_t word[N];
        for (int i = 0; i < N; i++) {
            if constexpr (ROUNDING == STOCHASTIC) {
                word[i] = Format::stochastic(table, x[i], inverse, noise_lane(noise, i), lowest);
            } else {
                word[i] = Format::nearest(table, x[i], inverse, lowest);
            }
            word[i] <<= 32 - Format::BITS;
        }
        codes->gather(word);
    }
};

// Loads N elements of one block.
template <class Format, int N>
OPTIM_INLINE void block_get(const Streams& streams, int first, float scale, float* x, const NoiseKey& key) {
    auto codes = load_ordered<N, Packed<Format::BITS, N>>(streams.codes, first, key);
    Format::template get<N>(format_table<Format>(streams), codes, scale, x);
}

// Stores the codes of N elements of one block; N is 8 or 16, and `first` a multiple of it.
template <class Format, Rounding ROUNDING, int N>
OPTIM_INLINE void block_put(const Streams& streams, int first, const float* x, float inverse, const NoiseKey& key) {
    Packed<Format::BITS, N> codes = {};
    Noise noise = {};
    if (ROUNDING == STOCHASTIC) noise = noise_draw(key, first);
    Format::template put<ROUNDING, N>(format_table<Format>(streams), x, inverse, noise,
                                      key.stream == NOISE_V ? Format::ZERO + 1 : 0, &codes, key.bf16_out);
    store_ordered<N>(streams.codes, first, codes, key);
}

template <class Format_, int BLOCK_, class Scale, Rounding ROUNDING>
struct Blocks : TableStorage<BlockFunctions<Blocks<Format_, BLOCK_, Scale, ROUNDING>>,
                             typename Rounded<Format_, ROUNDING>::Type> {
    typedef typename Rounded<Format_, ROUNDING>::Type Format;
    typedef Blocks<Format, BLOCK_, Scale, NEAREST> Nearest;
    typedef typename Scale::Code ScaleCode;
    static constexpr int BLOCK = BLOCK_;
    static constexpr bool WANTS_TILE_MAX = SAME_TYPE<Scale, ScaleDq8>;
    static constexpr StreamInfo SECOND = {".scales2", "F32", 32, TILE_ELEMENTS}, NOTHING = {};
    static constexpr StreamInfo STREAM[3] = {{"", Format::DTYPE, Format::BITS, 1},
                                             {".scales", Scale::DTYPE, 8 * sizeof(ScaleCode), BLOCK},
                                             WANTS_TILE_MAX ? SECOND : NOTHING};
    static constexpr bool TAKES_ORDER = true, CROWDS_BANKS = Format::CROWDS_BANKS, OF_ROOTS = Format::ROOT;
    static constexpr bool STORES_APART = HAS_TABLE<Format> && ROUNDING == NEAREST;
    static constexpr bool WRITES_BF16 = ROUNDING == STOCHASTIC && SAME_TYPE<Scale, ScaleE8m0> && Format::WRITES_BF16;
    static constexpr bool BF16_IS_STORED = WRITES_BF16 && Format::BF16_IS_STORED;
    static constexpr float NO_CLAMP_ABSMAX = block_no_clamp<Format, ROUNDING>();
    static_assert(!Format::OF_POWERS || SAME_TYPE<Scale, ScaleE8m0>, "its arithmetic is exact for powers of two");
    static_assert(!WANTS_TILE_MAX || BLOCK <= 256, "a block's exchange would overwrite what the group is told");

    // `block` is BLOCK, except on the CPU, where the rows of a format share their code.
    template <int N>
    static OPTIM_INLINE void get(const Streams& streams, int first, float* x, const NoiseKey& key, int block = BLOCK) {
        const ScaleCode code = ((const ScaleCode*)streams.scales)[first / block];
        float scale;
        if constexpr (WANTS_TILE_MAX) {
            scale = double_decode<Format>(code, ((const float*)streams.third)[first / TILE_ELEMENTS]);
        } else {
            scale = Scale::decode(code);
        }
        block_get<Format, N>(streams, first, scale, x, key);
    }

    template <int N>
    static OPTIM_INLINE float absmax(float* value, const NoiseKey& key) {
        return values_max<N>(value, !Format::ROOT && key.stream != NOISE_V);
    }

    template <int N>
    static OPTIM_INLINE void clamp(float* value, float absmax) {
        block_clamp<Format, ROUNDING>(absmax, value, N);
    }

    struct Stored {
        float inverse;
        ScaleCode code;
        bool clamped;
    };

    static OPTIM_INLINE Stored put_scale(const Streams& streams, int first, float absmax, float tile_max, bool clamped,
                                         int block = BLOCK) {
        ScaleCode code;
        BlockScale s;
        if constexpr (WANTS_TILE_MAX) {
            float second;
            block_scale<Format, ScaleFp32>(tile_max, &second);
            s = double_scale<Format>(absmax, second, double_inverse(second), &code);
            if (first % TILE_ELEMENTS == 0) ((float*)streams.third)[first / TILE_ELEMENTS] = second;
        } else {
            s = block_scale<Format, Scale>(absmax, &code);
        }
        if (clamped) s.inverse = block_inverse<Format, ROUNDING>(absmax, s.inverse);
        // All threads of a block have the same scale; on a GPU with stages it leaves with the tile's codes.
        if (first % block == 0) ((ScaleCode*)streams.scales)[first / block] = code;
        return {s.inverse, code, clamped};
    }

    template <int N>
    static OPTIM_INLINE void put_codes(const Streams& streams, int first, const float* value, const Stored& scale,
                                       const NoiseKey& key) {
        block_put<Format, ROUNDING, N>(streams, first, value, scale.inverse, key);
        if constexpr (WRITES_BF16) {
            if (key.bf16_out) Format::template bf16_scaled<N>(scale.code, scale.clamped, key.bf16_out);
        }
    }
};
