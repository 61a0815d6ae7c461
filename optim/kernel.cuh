// The step: one template for every combination of rule and storages. This file begins with the life of one element,
//     load -> dequantise -> update in fp32 -> quantise -> store
// and continues with how the threads of a group store together, how a thread block is laid out, how tiles travel
// through shared memory, and the kernels.
//
// Arenas hold all tensors of the model one after another. A table cuts them into tiles of 2048 elements, each with its
// tensor's group of constants (learning rate and decay). No tile spans two tensors, since zeros pad each tensor to
// whole tiles. One launch covers the table. Each byte of weights, gradients and states is read once, and each byte of
// weights and states is written once. With bf16 throughout these are 14 bytes a parameter, and a step should take no
// longer than copying them does. If the matmuls read another type than the weights are stored in, the step writes a
// copy of that type in the same pass.
//
// The template takes its storages as objects. On the GPU they are empty structs of static functions and cost nothing.
// The CPU may pass table rows of function pointers instead, so that any combination runs without being instantiated.
#pragma once
#include "../kernels/ptx.cuh"
#include "formats/bf16.cuh"
#include "formats/feedback.cuh"
#include "formats/none.cuh"
#include "formats/spans.cuh"
#include "rows.cuh"
#include "rules/hyper.cuh"

EMBED_SOURCE

constexpr int STEP_GROUPS = 8;  // at most: tensors without and with weight decay, and those of overrides

// One tile of the table. It says where the tile lies, whoever owns the memory: an arena, a part of the model that has
// room for a while, tensors of the caller's own (placed.h), or the buffers of a rule that reads matrices.
struct alignas(16) Tile {
    void* seen;  // the copy of the weights if the step writes one, otherwise their codes
    const void* grads;
    uint32_t kept;     // number of the tile in the weights' other arrays
    uint32_t states;   // number of the tile in m, v and slow, counted from StepArguments.states
    uint32_t element;  // its first element is number element * TILE_ELEMENTS of the model, for its noise
    uint32_t group;
};

struct StepArguments {
    Streams weights, m, v;
    Streams slow;             // the third state of a rule that keeps one, in m's format
    const float* grad_scale;  // device scalar
    const float* factor;      // (tiles of the weights' arrays) of the update for Scaled rules; null for others
    const Tile* tiles;        // (tile_count)
    int64_t tile_count;       // below 2^31
    uint32_t* next_tile;      // device scalar, 0 before a launch and after
    uint32_t states;          // Tile.states of the tile with which m, v and slow begin
    uint32_t step;
    NoiseSeed seed;
    Hyper group[STEP_GROUPS];
};

// The arrays of one tile.
struct TileStreams {
    Streams weights, grads, m, v, slow, copy;
};

// A STORE pass stores the new values. If a scale reaches further than a tile, a MEASURE pass comes before it; it only
// raises the maxima from which the scales are computed (formats/spans.cuh).
enum Pass { STORE, MEASURE };

// The noise of the weights, m, v and the slow average.
struct StepKeys {
    NoiseKey of[4];
};
template <bool ORDERED>
OPTIM_INLINE StepKeys step_keys(const StepArguments& step, int64_t element, int first, int turn, uint32_t* bf16_out) {
    const uint64_t seed = step.seed.seed;
    const uint32_t* round = ON_GPU ? step.seed.round : nullptr;
    const int order = ORDERED ? element_order(first) : 0;
    return {{{seed, step.step, NOISE_WEIGHTS, element, turn, bf16_out, round, ORDERED, order},
             {seed, step.step, NOISE_M, element, turn, nullptr, round, ORDERED, order},
             {seed, step.step, NOISE_V, element, turn, nullptr, round, ORDERED, order},
             {seed, step.step, NOISE_SLOW, element, turn, nullptr, round, ORDERED, order}}};
}

// Returns true if threads with COUNT elements may take the second half of them first (element_order in
// elementwise.cuh).
template <int COUNT, class Weights, class Grads, class M, class V>
OPTIM_INLINE constexpr bool step_ordered() {
    constexpr bool able = Weights::TAKES_ORDER && Grads::TAKES_ORDER && M::TAKES_ORDER && V::TAKES_ORDER;
    return ON_GPU && COUNT == 16 && able && (M::CROWDS_BANKS || V::CROWDS_BANKS);
}

template <int MAX, class Rule, class Weights, class M, class V>
OPTIM_INLINE void store_elements(const Rule& rule, const Weights& weights, const M& state_m, const V& state_v,
                                 const TileStreams& tile, const Hyper& hyper, int first, int n, float* p, float* m,
                                 float* v, float* slow, float* root, const NoiseKey* key);

// Takes one step for n elements (n <= MAX) from element `first` on of a tile that begins at `element` of the arena.
// `turn` alternates between 0 and 1 from tile to tile of a thread. If `bf16_out` is not null, the store also writes the
// new weights there, rounded to bf16, in pairs.
template <int MAX, Pass PASS = STORE, class Rule, class Weights, class Grads, class M, class V>
OPTIM_INLINE void update_elements(const Rule& rule, const Weights& weights, const Grads& grads, const M& state_m,
                                  const V& state_v, const StepArguments& step, const TileStreams& tile,
                                  const Hyper& hyper, float grad_scale, int64_t element, int first, int n, int turn = 0,
                                  uint32_t* bf16_out = nullptr) {
    float p[MAX], g[MAX], m[MAX], v[MAX], slow[MAX], root[MAX];
    const StepKeys key = step_keys<step_ordered<MAX, Weights, Grads, M, V>()>(step, element, first, turn, bf16_out);
    // Load and dequantise.
    float row = 1.0f, second = 1.0f;
    if constexpr (V::COMES_LATE) {
        row = state_v.start(tile.v, first, v, n, false);
        if (rule.pairs) second = state_v.start(tile.v, first, slow, n, true);
    }
    weights.load(tile.weights, first, p, n, key.of[0]);
    grads.load(tile.grads, first, g, n, key.of[0]);
    state_m.load(tile.m, first, m, n, key.of[1]);
    if constexpr (!V::COMES_LATE) state_v.load(tile.v, first, v, n, key.of[2]);
    if (rule.keeps_slow) state_m.load(tile.slow, first, slow, n, key.of[3]);
    if constexpr (V::COMES_LATE) {
        state_v.finish(row, v, n);
        if (rule.pairs) state_v.finish(second, slow, n);
    } else if (rule.pairs) {
        RowPairs::numbers(tile.v, first, slow, n, true);
    }
    // Update in fp32.
    OPTIM_UNROLL
    for (int i = 0; i < n; i++) g[i] = exact_mul(g[i], grad_scale);
    rule.update(hyper, p, g, m, v, slow, root, n);
    // Quantise and store.
    if constexpr (PASS == STORE) {
        store_elements<MAX>(rule, weights, state_m, state_v, tile, hyper, first, n, p, m, v, slow, root, key.of);
    } else {
        weights.measure(tile.weights, first, p, n);
        state_m.measure(tile.m, first, m, n);
        state_v.measure(tile.v, first, v, n);
        if (rule.keeps_slow) state_m.measure(tile.slow, first, slow, n);
    }
}

// Storing. A thread stores its arrays together, in parts: find the largest magnitude of each block (absmax), clamp
// values that are too large, then write the codes (formats/storage.cuh).

#ifdef __CUDACC__
template <int COUNT, class Storage>
__device__ __forceinline__ float block_absmax(float* x, const NoiseKey& key) {
    const float mine = Storage::template absmax<COUNT>(x, key);
    if constexpr (Storage::BLOCK == 1) return mine;
    return neighbours_max<Storage::BLOCK / COUNT, TILE_ELEMENTS / COUNT>(mine, key);
}

template <class Storage>
__device__ __forceinline__ bool needs_clamp(float absmax) {
    return Storage::NO_CLAMP_ABSMAX > 0.0f && !(absmax <= Storage::NO_CLAMP_ABSMAX);
}

// Finds the maximum of `absmax` over all threads of a group, that is over a tile, for each array that is `wanted`. It
// takes one barrier.
template <int COUNT>
__device__ __forceinline__ void tile_max(const bool (&wanted)[4], const float* absmax, const NoiseKey* key,
                                         float* max) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (wanted[i]) tile_max_put(absmax[i], key[i]);
    }
    group_sync<TILE_ELEMENTS / COUNT>();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (wanted[i]) max[i] = tile_max_get<TILE_ELEMENTS / COUNT>(key[i]);
    }
}

template <int COUNT, class Weights, class M, class V>
__device__ __forceinline__ void store_all(const TileStreams& tile, int first, float* const* x, const float* absmax,
                                          const float* max, bool clamped, const NoiseKey* key) {
    Weights::template put_scaled<COUNT>(tile.weights, first, x[0], absmax[0], max[0], clamped, key[0]);
    M::template put_scaled<COUNT>(tile.m, first, x[1], absmax[1], max[1], clamped, key[1]);
    V::template put_scaled<COUNT>(tile.v, first, x[2], absmax[2], max[2], clamped, key[2]);
    if (x[3]) M::template put_scaled<COUNT>(tile.slow, first, x[3], absmax[3], max[3], clamped, key[3]);
}

// Stores a thread's values. All exchanges between threads come first, so that their waits overlap. Then one test
// decides for all arrays and a whole warp if any value is rare. x and key belong to the weights, m, v and, unless x[3]
// is null, the slow average; x[2] has the roots of v if V::OF_ROOTS.
// APART compiles one path for common values and another for rare ones. This saves a jump and some moves at run time,
// and takes a fifth to two fifths more compile time. STORES_APART of m or v says where it pays (dev/LOG.md). It does
// not pay when errors are fed back, and with a third state compiling would take half as long again.
template <int COUNT, bool APART, class Weights, class M, class V>
__device__ __forceinline__ void store_thread(const TileStreams& tile, int first, float* const* x, const NoiseKey* key) {
    const float absmax[4] = {block_absmax<COUNT, Weights>(x[0], key[0]), block_absmax<COUNT, M>(x[1], key[1]),
                             block_absmax<COUNT, V>(x[2], key[2]), x[3] ? block_absmax<COUNT, M>(x[3], key[3]) : 0.0f};
    const bool wanted[4] = {Weights::WANTS_TILE_MAX, M::WANTS_TILE_MAX, V::WANTS_TILE_MAX, M::WANTS_TILE_MAX && x[3]};
    float max[4] = {};
    if constexpr (Weights::WANTS_TILE_MAX || M::WANTS_TILE_MAX || V::WANTS_TILE_MAX) {
        tile_max<COUNT>(wanted, absmax, key, max);
    }
    const bool mine = needs_clamp<Weights>(absmax[0]) || needs_clamp<M>(absmax[1]) || needs_clamp<V>(absmax[2]) ||
                      needs_clamp<M>(absmax[3]);
    constexpr bool clamps = Weights::NO_CLAMP_ABSMAX > 0.0f || M::NO_CLAMP_ABSMAX > 0.0f || V::NO_CLAMP_ABSMAX > 0.0f;
    const bool clamped = clamps && __any_sync(0xffffffffu, mine);
    if (clamped) {
        Weights::template clamp<COUNT>(x[0], absmax[0]);
        M::template clamp<COUNT>(x[1], absmax[1]);
        V::template clamp<COUNT>(x[2], absmax[2]);
        if (x[3]) M::template clamp<COUNT>(x[3], absmax[3]);
    }
    if (APART && !clamped) {
        store_all<COUNT, Weights, M, V>(tile, first, x, absmax, max, false, key);
    } else {
        store_all<COUNT, Weights, M, V>(tile, first, x, absmax, max, clamped, key);
    }
}
#endif

// Stores new weights p, and adds their rounding errors to m (formats/feedback.cuh). Where the encoder can, it leaves
// the stored values in registers; otherwise they are loaded again.
template <int MAX, class Weights>
OPTIM_INLINE void feed_back(const Weights& weights, const Streams& streams, const Hyper& hyper, int first,
                            const float* p, const float* root, float* m, int n, const NoiseKey& key) {
    float stored[MAX];
    if constexpr (ON_GPU && Weights::BF16_IS_STORED) {
        uint32_t buffer[MAX / 2], *bf16_out = key.bf16_out ? key.bf16_out : buffer;
        NoiseKey writing = key;
        writing.bf16_out = bf16_out;
        weights.store(streams, first, p, n, writing);
        OPTIM_UNROLL
        for (int i = 0; i < n; i++)
            stored[i] = bits_float(i % 2 ? bf16_out[i / 2] & 0xffff0000u : bf16_out[i / 2] << 16);
    } else {
        weights.store(streams, first, p, n, key);
#ifdef __CUDA_ARCH__
        __syncwarp();  // a neighbour has written the scale
#endif
        Streams now = streams;
        if (Weights::HAS_SPANS && now.next) now.extra = now.next;  // the scales with which they were stored
        weights.load(now, first, stored, n, key);
    }
    OPTIM_UNROLL
    for (int i = 0; i < n; i++) {
        float unit = exact_mul(hyper.feedback, exact_fma(root[i], hyper.root2, hyper.eps));
        m[i] = exact_fma(unit, exact_add(stored[i], -p[i]), m[i]);
    }
}

// Stores the new values of n elements; `root` has the roots of v if the rule divides by them. On the CPU the storages
// may be table rows, whose member feeds_back says if errors are fed back.
template <int MAX, class Rule, class Weights, class M, class V>
OPTIM_INLINE void store_elements(const Rule& rule, const Weights& weights, const M& state_m, const V& state_v,
                                 const TileStreams& tile, const Hyper& hyper, int first, int n, float* p, float* m,
                                 float* v, float* slow, float* root, const NoiseKey* key) {
#ifdef __CUDA_ARCH__
    if constexpr (V::OF_ROOTS) {
        OPTIM_UNROLL
        for (int i = 0; i < (rule.keeps_roots ? 0 : n); i++) root[i] = moment_root(v[i]);
    }
    float* x[4] = {p, m, V::OF_ROOTS ? root : v, rule.keeps_slow ? slow : nullptr};
    if constexpr (Weights::FEEDS_BACK) {
        feed_back<MAX>(weights, tile.weights, hyper, first, p, root, m, n, key[0]);
        store_thread<MAX, false, None, M, V>(tile, first, x, key);
    } else {
        constexpr bool apart = (M::STORES_APART || V::STORES_APART) && !Rule::keeps_slow;
        store_thread<MAX, apart, Weights, M, V>(tile, first, x, key);
    }
#else
    if (Weights::FEEDS_BACK && weights.feeds_back) {
        feed_back<MAX>(weights, tile.weights, hyper, first, p, root, m, n, key[0]);
    } else {
        weights.store(tile.weights, first, p, n, key[0]);
    }
    state_m.store(tile.m, first, m, n, key[1]);
    state_v.store(tile.v, first, v, n, key[2]);
    if (rule.keeps_slow) state_m.store(tile.slow, first, slow, n, key[3]);
#endif
}

// The layout of a step's kernel. The host computes the same layout from the rows of its tables.
//
// A group of threads updates a tile on a GPU; each thread takes 16 consecutive elements (8 if a moment has more than 8
// bits). From Hopper on, tiles travel through shared memory. The copy engine (TMA) loads all arrays of a tile into one
// of the group's 2 to 4 stages while the group computes on another one, the update writes in place, and the copy engine
// stores the stage. Each group has a producer warp, which issues the TMA copies, so the group's threads do not wait for
// memory, spend no registers on loads in flight and compute no addresses. The next tile of the table goes to the first
// group that has a free stage, since multiprocessors differ in speed: with fixed shares, the tiles in flight would
// drift apart in memory. Older GPUs run the same code on memory directly; a CPU core takes a whole tile.
//
// A block that shares a scale is a run of at most 2048 elements, counted from the tensor's first one, so it lies in one
// tile, and its threads, which always run together, can reduce over it.

// The arrays of a step, in the order in which a stage holds them: three of the weights, the gradients, three each of m,
// v and slow, and the copy.
constexpr int STEP_ARRAYS = 14, GRADS_ARRAY = 3, COPY_ARRAY = 13;

struct StepArrays {
    StreamInfo array[STEP_ARRAYS];
};

struct StepShape {
    int elements;             // of a thread
    int threads;              // of a group
    int groups;               // of a thread block; a multiprocessor runs one thread block
    int couriers;             // warps: one for each group, rounded up to a multiple of 4
    int block_threads;        // groups and couriers together
    int stages;               // of a group
    int bytes[STEP_ARRAYS];   // of a tile; 0 if the array does not exist
    int offset[STEP_ARRAYS];  // in a stage
    int stage_bytes;
    int load_bytes;           // of a tile that the copy engine loads
    int table_bytes;          // of both moments' tables, which lie before the stages
    unsigned loaded, stored;  // bit a: array a is loaded into a stage, and stored from it
    unsigned small;           // bit a: array a is too small for the copy engine; couriers copy it
};

// Returns true for multiprocessors with a copy engine and 227 KB of shared memory: Hopper's and the large ones of
// Blackwell, of compute capability 9.0 to 11.x.
OPTIM_INLINE constexpr bool has_stages(int compute) {
    return compute >= 90 && compute < 120;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
#define OPTIM_STAGES
#endif

constexpr int STAGE_LINE = 128;         // of shared memory, for the copy engine
constexpr int SHARED_MAX = 224 * 1024;  // of a thread block on Hopper, without room for barriers and exchanges

// Places the arrays in a stage. Arrays of whole lines come first, so that each begins at a line, as every stage does;
// the copy engine is slower if lines of memory and of a stage do not match.
OPTIM_INLINE constexpr void stage_layout(StepShape* shape) {
    for (int part = 0; part < 2; part++) {
        for (int a = 0; a < STEP_ARRAYS; a++) {
            if ((shape->bytes[a] % STAGE_LINE != 0) != (part == 1)) continue;
            shape->offset[a] = shape->stage_bytes;
            shape->stage_bytes += (shape->bytes[a] + 15) / 16 * 16;
        }
    }
    shape->stage_bytes = (shape->stage_bytes + STAGE_LINE - 1) / STAGE_LINE * STAGE_LINE;
}

OPTIM_INLINE constexpr StepShape step_shape(const StepArrays& arrays, int table_bytes) {
    StepShape shape = {};
    bool rank1 = false, waits = false;  // waits: threads wait for other warps of their group
    shape.table_bytes = (table_bytes + STAGE_LINE - 1) / STAGE_LINE * STAGE_LINE;
    shape.elements = arrays.array[4].bits <= 8 && arrays.array[7].bits <= 8 ? 16 : 8;
    shape.threads = TILE_ELEMENTS / shape.elements;
    for (int a = 0; a < STEP_ARRAYS; a++) {
        const StreamInfo& info = arrays.array[a];
        rank1 = rank1 || info.span == SPAN_RANK1;
        waits = waits || (info.bits > 0 && info.run > 32 * shape.elements);
        shape.bytes[a] = tile_bytes(info);
        if (shape.bytes[a] == 0) continue;
        const bool small = shape.bytes[a] % 16 != 0;
        if (small) shape.small |= 1u << a;
        if (a != GRADS_ARRAY) shape.stored |= 1u << a;
        if (a == COPY_ARRAY || info.written_only) continue;
        shape.loaded |= 1u << a;
        if (!small) shape.load_bytes += shape.bytes[a];
    }
    stage_layout(&shape);
    // Fewer threads would hide less of the arithmetic's latency, and more would leave less room for stages and
    // registers. On an H200, three stages for each group were faster than a third or fourth group, and a fifth group
    // helped where a group waits for its own threads.
    shape.groups = (shape.elements == 8 ? 768 : waits ? 640 : 512) / shape.threads;
    if (rank1) shape.groups = 256 / shape.threads;  // rank-1 scales take more registers
    int max = SHARED_MAX - shape.table_bytes;
    while (shape.groups > 2 && max / (shape.groups * shape.stage_bytes) < 3) shape.groups--;
    while (shape.groups > 1 && max / (shape.groups * shape.stage_bytes) < 2) shape.groups--;
    int stages = max / (shape.groups * shape.stage_bytes);
    // A fourth stage would leave the L1 cache too small for the numbers of columns.
    const int most = is_by_columns(arrays.array[8].span) ? 3 : 4;
    shape.stages = stages > most ? most : stages;
    shape.couriers = (shape.groups + 3) / 4 * 4;
    shape.block_threads = shape.groups * shape.threads + 32 * shape.couriers;
    return shape;
}

// Returns the bytes of dynamic shared memory: the moments' tables and, if there is a copy engine, the stages.
OPTIM_INLINE constexpr int step_shared_bytes(const StepShape& shape, int compute) {
    return shape.table_bytes + (has_stages(compute) ? shape.groups * shape.stages * shape.stage_bytes : 0);
}

// Returns the address of tile number `index` of an array; null if there is no array.
OPTIM_INLINE void* array_at(const StreamInfo& info, void* array, int64_t index) {
    return array ? (char*)array + index * tile_bytes(info) : nullptr;
}

// Returns the arrays of tile number `index` of a storage.
OPTIM_INLINE Streams tile_at(const StreamInfo& codes, const StreamInfo& extra, const StreamInfo& more,
                             const Streams& whole, int64_t index) {
    return {array_at(codes, whole.codes, index),
            array_at(extra, whole.extra, index),
            whole.table,
            array_at(more, whole.more, index),
            whole.next,
            whole.span ? whole.span + index : nullptr};
}

// Returns the arrays of a tile of the table.
OPTIM_INLINE TileStreams tile_streams(const StepArrays& arrays, const StepArguments& step, const Tile& tile) {
    const StreamInfo* info = arrays.array;
    const uint32_t states = tile.states - step.states;
    TileStreams its = {
        tile_at(info[0], info[1], info[2], step.weights, tile.kept), {(void*)tile.grads, nullptr},
        tile_at(info[4], info[5], info[6], step.m, states),          tile_at(info[7], info[8], info[9], step.v, states),
        tile_at(info[10], info[11], info[12], step.slow, states),    {}};
    (info[COPY_ARRAY].bits > 0 ? its.copy : its.weights).codes = tile.seen;
    return its;
}

constexpr int DECODE_ELEMENTS = 8;  // of a thread of optim_decode_kernel

#ifdef __CUDACC__
#ifdef OPTIM_STAGES
constexpr bool HAS_STAGES = true;
#else
constexpr bool HAS_STAGES = false;
#endif

template <class Rule, class Weights, class M, class V, class Copy, class Grads>
struct StepLayout {
    static constexpr StreamInfo NOTHING = {};
    static constexpr bool SLOW = Rule::KEEPS_SLOW;
    static constexpr StepArrays ARRAYS = {{Weights::STREAM[0], Weights::STREAM[1], Weights::STREAM[2], Grads::STREAM[0],
                                           M::STREAM[0], M::STREAM[1], M::STREAM[2], V::STREAM[0], V::STREAM[1],
                                           V::STREAM[2], SLOW ? M::STREAM[0] : NOTHING, SLOW ? M::STREAM[1] : NOTHING,
                                           SLOW ? M::STREAM[2] : NOTHING, Copy::STREAM[0]}};
    static constexpr StepShape SHAPE = step_shape(ARRAYS, M::TABLE_BYTES + V::TABLE_BYTES);
    // The array at Tile.seen.
    static constexpr int SEEN_ARRAY = Copy::STREAM[0].bits > 0 ? COPY_ARRAY : 0;

    // Returns the address of array `a` of a tile in memory.
    static __device__ __forceinline__ void* in_memory(const StepArguments& step, int a, void* array, int bytes,
                                                      const Tile& tile) {
        if (a == SEEN_ARRAY) return tile.seen;
        if (a == GRADS_ARRAY) return (void*)tile.grads;
        return (char*)array + (int64_t)(a < GRADS_ARRAY ? tile.kept : tile.states - step.states) * bytes;
    }

    // Replaces the address of array A of a tile by its address in the stage.
    template <int A>
    static __device__ __forceinline__ void to_stage(void** array, unsigned char* stage) {
        constexpr int bytes = SHAPE.bytes[A], offset = SHAPE.offset[A];
        if constexpr (bytes > 0) *array = stage + offset;
    }

    template <int A>
    static __device__ __forceinline__ void to_stage(Streams* streams, unsigned char* stage) {
        to_stage<A>(&streams->codes, stage), to_stage<A + 1>(&streams->extra, stage);
        to_stage<A + 2>(&streams->more, stage);
    }

    // Returns the arrays of a tile: in the stage, or in memory if there are no stages.
    static __device__ __forceinline__ TileStreams tile_arrays(const StepArguments& step, const Tile& tile,
                                                              unsigned char* stage) {
        constexpr StepArrays arrays = ARRAYS;
        TileStreams its = tile_streams(arrays, step, tile);
        if constexpr (HAS_STAGES) {
            to_stage<0>(&its.weights, stage), to_stage<GRADS_ARRAY>(&its.grads.codes, stage);
            to_stage<4>(&its.m, stage), to_stage<7>(&its.v, stage), to_stage<10>(&its.slow, stage);
            to_stage<COPY_ARRAY>(&its.copy.codes, stage);
        }
        return its;
    }

    // Calls transfer(address in memory, address in the stage, bytes, index) for each array of a tile whose bit is in
    // `set`.
    template <class Transfer>
    static __device__ __forceinline__ void each(const StepArguments& step, const Tile& tile, unsigned char* stage,
                                                unsigned set, Transfer transfer) {
        constexpr StepShape shape = SHAPE;
        void* array[STEP_ARRAYS] = {
            step.weights.codes, step.weights.extra, step.weights.more, nullptr,      step.m.codes,
            step.m.extra,       step.m.more,        step.v.codes,      step.v.extra, step.v.more,
            step.slow.codes,    step.slow.extra,    step.slow.more,    nullptr};
#pragma unroll
        for (int a = 0; a < STEP_ARRAYS; a++) {
            if ((set >> a & 1u) == 0) continue;
            transfer(in_memory(step, a, array[a], shape.bytes[a], tile), stage + shape.offset[a], shape.bytes[a], a);
        }
    }
};

// Read and write 1, 2, 4 or 8 bytes.
__device__ __forceinline__ uint64_t read_small(const void* from, int bytes) {
    if (bytes == 1) return *(const uint8_t*)from;
    if (bytes == 2) return *(const uint16_t*)from;
    return bytes == 4 ? *(const uint32_t*)from : *(const uint64_t*)from;
}

__device__ __forceinline__ void write_small(void* to, int bytes, uint64_t value) {
    if (bytes == 1) *(uint8_t*)to = (uint8_t)value;
    if (bytes == 2) *(uint16_t*)to = (uint16_t)value;
    if (bytes == 4) *(uint32_t*)to = (uint32_t)value;
    if (bytes == 8) *(uint64_t*)to = value;
}

__device__ __forceinline__ void* shared_pointer(uint32_t address) {
    return __cvta_shared_to_generic(address);
}

// Returns x, and makes the compiler keep it in a register; it would otherwise recompute x wherever it is used.
__device__ __forceinline__ uint32_t register_kept(uint32_t x) {
    asm("" : "+r"(x));
    return x;
}

// Copies the moments' tables into shared memory. All threads of the thread block call it and synchronise afterwards.
template <class M, class V>
__device__ __forceinline__ void tables_prepare(const StepArguments& step, unsigned char* memory) {
    if constexpr (M::TABLE_BYTES != 0) M::prepare(step.m, memory);
    if constexpr (V::TABLE_BYTES != 0) V::prepare(step.v, memory + M::TABLE_BYTES);
}

template <class M>
__device__ __forceinline__ void tables_set(TileStreams* streams, const unsigned char* memory) {
    streams->m.table = streams->slow.table = memory;
    streams->v.table = memory + M::TABLE_BYTES;
}

// Updates a thread's elements of a tile. `span`, unless null, is the stage's copy of the tile's place among the numbers
// of rows.
template <class Rule, class Weights, class M, class V, class Copy, class Grads>
__device__ __forceinline__ void update_tile(const StepArguments& step, const Tile& tile, const SpanTile* span,
                                            const unsigned char* tables, unsigned char* stage, float grad_scale,
                                            int thread, int turn) {
    typedef StepLayout<Rule, Weights, M, V, Copy, Grads> Layout;
    constexpr int COUNT = Layout::SHAPE.elements;
    TileStreams streams = Layout::tile_arrays(step, tile, stage);
    tables_set<M>(&streams, tables);
    if (span) streams.v.span = span;
    int64_t element = (int64_t)tile.element * TILE_ELEMENTS;
    int first = thread * COUNT;
    constexpr bool COPIES = Copy::STREAM[0].bits > 0;
    constexpr bool BF16_OUT = COPIES && Weights::WRITES_BF16 && SAME_TYPE<Copy, Elementwise<Bf16, NEAREST>>;
    Packed<16, COUNT> codes;
    if constexpr (Rule::SCALED) {
        const Hyper hyper = hyper_scaled(step.group[tile.group], step.factor[tile.kept]);
        update_elements<COUNT>(EachElement<Rule>(), Weights(), Grads(), M(), V(), step, streams, hyper, grad_scale,
                               element, first, COUNT, turn, BF16_OUT ? codes.word : nullptr);
    } else {
        update_elements<COUNT>(EachElement<Rule>(), Weights(), Grads(), M(), V(), step, streams, step.group[tile.group],
                               grad_scale, element, first, COUNT, turn, BF16_OUT ? codes.word : nullptr);
    }
    if constexpr (BF16_OUT) {
        NoiseKey key = {};
        key.ordered = step_ordered<COUNT, Weights, Grads, M, V>();
        key.order = element_order(first);
        store_ordered<COUNT>(streams.copy.codes, first, codes, key);
    } else if constexpr (COPIES) {
        // Wait for the scales that other threads write.
        if constexpr (Layout::ARRAYS.array[1].run > 32 * COUNT) group_sync<TILE_ELEMENTS / COUNT>();
        if constexpr (Layout::ARRAYS.array[1].run > COUNT) __syncwarp();
        float read[COUNT];
        if constexpr (Weights::HAS_SPANS) streams.weights.extra = streams.weights.next;
        Weights::view(streams.weights, first, read, COUNT);
        Copy::set(streams.copy, first, read, COUNT);
    }
}

#ifdef OPTIM_STAGES
// The couriers and the groups share this memory beside the stages.
constexpr uint32_t NO_TILE = 0xffffffffu;  // the `element` that follows a group's last tile

struct CourierStage {
    uint64_t full;  // a tile has arrived
    uint64_t done;  // all threads of the group have computed it
    Tile tile;
};

// The place of each stage's tile among a rule's numbers by rows; empty unless THERE. A group that loaded it itself
// would wait for memory twice.
template <bool THERE, int GROUPS, int STAGES>
struct StagedSpans {
    static constexpr int BYTES = sizeof(SpanTile);  // of a stage
    SpanTile value[GROUPS][STAGES];
    __device__ __forceinline__ SpanTile* at(int group, int s) { return &value[group][s]; }
};

template <int GROUPS, int STAGES>
struct StagedSpans<false, GROUPS, STAGES> {
    static constexpr int BYTES = 0;
    __device__ __forceinline__ SpanTile* at(int, int) { return nullptr; }
};

// The producer warp of a group issues its TMA copies.
template <class Layout, class SpansOf>
struct ProducerWarp {
    static constexpr StepShape SHAPE = Layout::SHAPE;
    static constexpr unsigned ENGINE = ~SHAPE.small, SMALL = SHAPE.small;
    const StepArguments& step;
    CourierStage* shared;  // (stages) of the group
    SpansOf* spans;
    unsigned char* stages;
    int group;
    uint64_t small[STEP_ARRAYS];  // the small arrays of the next tile

    // Returns the number of the next tile that no group has, or a number beyond the last. The first tiles of each group
    // are fixed. Each group calls this until there are no more tiles, so the number of calls is known, and the last
    // call sets the counter back to 0.
    __device__ __forceinline__ uint32_t next_tile() const {
        const uint32_t count = (uint32_t)step.tile_count, groups = gridDim.x * SHAPE.groups;
        const uint32_t given = SHAPE.stages * groups, left = count > given ? count - given : 0;
        return given + atomicInc(step.next_tile, left + groups - 1);
    }

    __device__ __forceinline__ void read(const Tile& tile) {
        Layout::each(step, tile, nullptr, SHAPE.loaded & SMALL,
                     [&](const void* from, void*, int bytes, int a) { small[a] = read_small(from, bytes); });
    }

    __device__ __forceinline__ void fill(const Tile& tile, int s) {
        const uint32_t full = shared_offset(&shared[s].full);
        unsigned char* stage = stages + s * SHAPE.stage_bytes;
        shared[s].tile = tile;
        Layout::each(step, tile, stage, SHAPE.loaded & SMALL,
                     [&](const void*, void* to, int bytes, int a) { write_small(to, bytes, small[a]); });
        barrier_expect(full, SHAPE.load_bytes + SpansOf::BYTES);
        if constexpr (SpansOf::BYTES > 0) {
            const SpanTile* span = step.v.span + (tile.states - step.states);
            bulk_load(shared_offset(spans->at(group, s)), span, SpansOf::BYTES, full);
        }
        Layout::each(step, tile, stage, SHAPE.loaded & ENGINE, [&](const void* from, void* to, int bytes, int) {
            bulk_load(shared_offset(to), from, bytes, full);
        });
    }

    __device__ __forceinline__ void end(int s) {
        shared[s].tile.element = NO_TILE;
        barrier_arrive(shared_offset(&shared[s].full));
    }

    // Stores a stage to memory once the group has computed it.
    __device__ __forceinline__ void take_back(int s, uint32_t parity) {
        while (!barrier_passed(shared_offset(&shared[s].done), parity))
            __nanosleep(100);  // polling takes issue slots from other warps
        const Tile tile = shared[s].tile;
        unsigned char* stage = stages + s * SHAPE.stage_bytes;
        Layout::each(step, tile, stage, SHAPE.stored & SMALL, [&](void* to, const void* from, int bytes, int) {
            write_small(to, bytes, read_small(from, bytes));
        });
        Layout::each(step, tile, stage, SHAPE.stored & ENGINE,
                     [&](void* to, const void* from, int bytes, int) { bulk_store(to, shared_offset(from), bytes); });
        store_commit();
    }
};

// Runs a producer warp, in one thread. It fills its group's stages. Then, as the group computes one stage after
// another, it begins to store the stage, and fills the one before it, whose store began a turn earlier, with the next
// tile.
template <class Layout, class SpansOf>
__device__ __forceinline__ void courier_run(const StepArguments& step, CourierStage* shared, SpansOf* spans,
                                            unsigned char* memory, int group) {
    constexpr StepShape SHAPE = Layout::SHAPE;
    constexpr int STAGES = SHAPE.stages;
    ProducerWarp<Layout, SpansOf> producer = {step,  shared, spans, memory + group * (STAGES * SHAPE.stage_bytes),
                                              group, {}};
    const uint32_t count = (uint32_t)step.tile_count;
    uint32_t next = producer.next_tile(), first = group * gridDim.x + blockIdx.x;
    int filled = 0;
    for (; filled < STAGES && first < count; filled++, first += gridDim.x * SHAPE.groups) {
        producer.read(step.tiles[first]);
        producer.fill(step.tiles[first], filled);
    }
    bool more = filled == STAGES;
    if (!more) producer.end(filled);
    int before = -1, s = 0;
    uint32_t parity = 0;
    for (; filled > 0; filled--) {
        const bool comes = before >= 0 && next < count;
        const Tile coming = comes ? step.tiles[next] : Tile{};  // the load is in flight during the wait
        if (comes) next = producer.next_tile();
        if (comes) producer.read(coming);
        producer.take_back(s, parity);
        store_wait_read<1>();
        if (comes) producer.fill(coming, before), filled++;
        if (!comes && more && before >= 0) producer.end(before), more = false;
        before = s;
        if (++s == STAGES) s = 0, parity ^= 1;
    }
    store_wait_read<0>();
}

// A thread block has 64k registers, which threads get in multiples of eight. All threads start with the same number.
// Then the couriers release registers that they do not need and the groups take them, which avoids spills.
constexpr int COURIER_REGISTERS = 32;

OPTIM_INLINE constexpr int registers_at_start(const StepShape& shape) {
    return 65536 / shape.block_threads / 8 * 8;
}

OPTIM_INLINE constexpr int registers_of_groups(const StepShape& shape) {
    int max = 32 * shape.couriers * COURIER_REGISTERS;
    max = (registers_at_start(shape) * shape.block_threads - max) / (shape.groups * shape.threads) / 8 * 8;
    return max > 128 ? 0 : max;  // 0: the groups have enough registers from the start
}

template <int REGISTERS, bool MORE>
__device__ __forceinline__ void registers_set() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (MORE) {
        registers_grow<REGISTERS>();
    } else {
        registers_shrink<REGISTERS>();
    }
#endif
}
#endif

// The kernels of the step.
template <class Rule, class Weights, class M, class V, class Copy, class Grads>
__device__ __forceinline__ void step_run(const StepArguments& step) {
    typedef StepLayout<Rule, Weights, M, V, Copy, Grads> Layout;
    constexpr StepShape SHAPE = Layout::SHAPE;
    const int group = threadIdx.x / SHAPE.threads, thread = threadIdx.x % SHAPE.threads;
    const float grad_scale = *step.grad_scale;
    if (!is_finite(grad_scale)) return;  // the step changes nothing
    extern __shared__ __align__(128) unsigned char step_memory[];
    tables_prepare<M, V>(step, step_memory);
#ifdef OPTIM_STAGES
    __shared__ CourierStage shared[SHAPE.groups][SHAPE.stages];
    __shared__ StagedSpans<Rule::BY_ROWS, SHAPE.groups, SHAPE.stages> spans;
    if (threadIdx.x < SHAPE.groups * SHAPE.stages) {
        barrier_init(shared_offset(&(&shared[0][0] + threadIdx.x)->full), 1);
        barrier_init(shared_offset(&(&shared[0][0] + threadIdx.x)->done), SHAPE.threads);
        fence_async();
    }
    __syncthreads();
    constexpr int registers = registers_of_groups(SHAPE);
    constexpr bool exchanges = registers > registers_at_start(SHAPE);
    if (group >= SHAPE.groups) {
        if constexpr (exchanges) registers_set<COURIER_REGISTERS, false>();
        const int warp = (threadIdx.x - SHAPE.groups * SHAPE.threads) / 32;
        if (warp < SHAPE.groups && is_elected()) {
            courier_run<Layout>(step, shared[warp], &spans, step_memory + SHAPE.table_bytes, warp);
        }
        return;
    }
    if constexpr (exchanges) registers_set<registers, true>();
    const uint32_t thread_kept = register_kept(thread), tables = register_kept(shared_offset(step_memory));
    const uint32_t memory = tables + SHAPE.table_bytes + group * (SHAPE.stages * SHAPE.stage_bytes);
    uint32_t parity = 0, stage = memory, barrier = shared_offset(&shared[group][0]);
    int s = 0, turn = 0;
    for (;;) {
        CourierStage* its = (CourierStage*)shared_pointer(register_kept(barrier));
        while (!barrier_passed(shared_offset(&its->full), parity)) {
        }
        if (its->tile.element == NO_TILE) break;
        update_tile<Rule, Weights, M, V, Copy, Grads>(
            step, its->tile, spans.at(group, s), (unsigned char*)shared_pointer(tables),
            (unsigned char*)shared_pointer(register_kept(stage)), grad_scale, (int)thread_kept, turn);
        turn ^= 1;
        fence_async();
        barrier_arrive(shared_offset(&its->done));
        stage += SHAPE.stage_bytes, barrier += sizeof(CourierStage);
        if (++s == SHAPE.stages) {
            stage -= SHAPE.stages * SHAPE.stage_bytes, barrier -= SHAPE.stages * sizeof(CourierStage);
            s = 0, parity ^= 1;
        }
    }
#else
    __syncthreads();
    if (group >= SHAPE.groups) return;
    const int64_t stride = (int64_t)gridDim.x * SHAPE.groups;
    int turn = 0;
    for (int64_t t = group * (int64_t)gridDim.x + blockIdx.x; t < step.tile_count; t += stride, turn ^= 1) {
        update_tile<Rule, Weights, M, V, Copy, Grads>(step, step.tiles[t], nullptr, step_memory, nullptr, grad_scale,
                                                      thread, turn);
    }
#endif
}

// grid: at most a thread block for each multiprocessor; block: SHAPE.block_threads; shared memory: step_shared_bytes;
// deterministic.
template <class Rule, class Weights, class M, class V, class Copy, class Grads>
__global__ void __launch_bounds__((StepLayout<Rule, Weights, M, V, Copy, Grads>::SHAPE.block_threads), 1)
    optim_step_kernel(const __grid_constant__ StepArguments step) {
    step_run<Rule, Weights, M, V, Copy, Grads>(step);
}

// Does the same with arguments in device memory, which a CUDA graph changes from replay to replay (placed.h).
template <class Rule, class Weights, class M, class V, class Copy, class Grads>
__global__ void __launch_bounds__((StepLayout<Rule, Weights, M, V, Copy, Grads>::SHAPE.block_threads), 1)
    optim_replayed_kernel(const StepArguments* step) {
    step_run<Rule, Weights, M, V, Copy, Grads>(*step);
}

// Decodes the weights as the model sees them, rounded to nearest to the type that the matmuls read.
// grid: a thread block a tile, block: TILE_ELEMENTS / DECODE_ELEMENTS; deterministic.
template <class Weights, class Copy>
__global__ void __launch_bounds__(TILE_ELEMENTS / DECODE_ELEMENTS) optim_decode_kernel(Streams weights, Streams copy) {
    static_assert(Weights::TABLE_BYTES == 0, "tables are for moments");
    constexpr StreamInfo codes = Weights::STREAM[0], extra = Weights::STREAM[1], more = Weights::STREAM[2],
                         to = Copy::STREAM[0];
    float x[DECODE_ELEMENTS];
    int first = threadIdx.x * DECODE_ELEMENTS;
    Weights::view(tile_at(codes, extra, more, weights, blockIdx.x), first, x, DECODE_ELEMENTS);
    Copy::set({(char*)copy.codes + (int64_t)blockIdx.x * tile_bytes(to), nullptr}, first, x, DECODE_ELEMENTS);
}

// Sets weights, rounded to nearest, from `count` values; the weights behind these become zero.
// grid: a thread block a tile, block: TILE_ELEMENTS / DECODE_ELEMENTS; deterministic.
template <class Weights>
__global__ void __launch_bounds__(TILE_ELEMENTS / DECODE_ELEMENTS)
    optim_set_kernel(Streams weights, const float* values, int64_t count) {
    constexpr StreamInfo codes = Weights::STREAM[0], extra = Weights::STREAM[1], more = Weights::STREAM[2];
    float x[DECODE_ELEMENTS];
    const int first = threadIdx.x * DECODE_ELEMENTS;
    const int64_t from = (int64_t)blockIdx.x * TILE_ELEMENTS + first;
    for (int i = 0; i < DECODE_ELEMENTS; i++) x[i] = from + i < count ? values[from + i] : 0.0f;
    Weights::set(tile_at(codes, extra, more, weights, blockIdx.x), first, x, DECODE_ELEMENTS);
}
#endif
