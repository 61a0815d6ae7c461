// The step: one template for every combination of rule and storages. This file begins with the life of one element,
//     load -> dequantise -> update in fp32 -> quantise -> store
// and continues with how a GPU's threads store together and how a thread block is laid out. How tiles travel through
// shared memory stands in persistent.cuh, with the kernels of the step.
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
#include "rows/rows.cuh"
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
    RowInput rows;            // of rules that read rows; rows.tile has the places of all tiles
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
    RowInput rows;
};

// A STORE pass stores the new values. If a scale reaches further than a tile and the caller does not give it, a MEASURE
// pass comes before it; that only raises the maxima from which the scales are computed (formats/spans.cuh).
enum Pass { STORE, MEASURE };

// The noise of the weights, m, v and the slow average.
struct StepKeys {
    NoiseKey of[4];
};

OPTIM_INLINE StepKeys step_keys(const StepArguments& step, int64_t element, int first, int turn, uint32_t* bf16_out,
                                bool ordered) {
    const uint64_t seed = step.seed.seed;
    const uint32_t* round = ON_GPU ? step.seed.round : nullptr;
    const int order = ordered ? element_order(first) : 0;
    return {{{seed, step.step, NOISE_WEIGHTS, element, turn, bf16_out, round, ordered, order},
             {seed, step.step, NOISE_M, element, turn, nullptr, round, ordered, order},
             {seed, step.step, NOISE_V, element, turn, nullptr, round, ordered, order},
             {seed, step.step, NOISE_SLOW, element, turn, nullptr, round, ordered, order}}};
}

// Returns true if threads with COUNT elements may take the second half of them first (element_order in
// elementwise.cuh).
template <int COUNT, class Weights, class Grads, class M, class V>
OPTIM_INLINE constexpr bool step_ordered() {
    constexpr bool able = Weights::TAKES_ORDER && Grads::TAKES_ORDER && M::TAKES_ORDER && V::TAKES_ORDER;
    return ON_GPU && COUNT == 16 && able && (M::CROWDS_BANKS || V::CROWDS_BANKS);
}

// The values of a thread's elements, or of a tile on the CPU: weight, gradient, states and the root of v.
template <int MAX>
struct Values {
    float p[MAX], g[MAX], m[MAX], v[MAX], slow[MAX], root[MAX];
};

// Takes one step for n elements (n <= MAX) from element `first` on of a tile that begins at `element` of the arena.
// `turn` alternates between 0 and 1 from tile to tile of a thread. If `bf16_out` is not null, the store also writes the
// new weights there, rounded to bf16, in pairs.
template <int MAX, Pass PASS = STORE, class Rule, class Weights, class Grads, class M, class V>
OPTIM_INLINE void update_elements(const Rule& rule, const Weights& weights, const Grads& grads, const M& state_m,
                                  const V& state_v, const StepArguments& step, const TileStreams& tile,
                                  const Hyper& hyper, float grad_scale, int64_t element, int first, int n, int turn = 0,
                                  uint32_t* bf16_out = nullptr) {
    Values<MAX> x;
    const bool by_rows = rule.rows != ROWS_NONE;  // whose numbers come in the order of the elements
    const bool ordered = step_ordered<MAX, Weights, Grads, M, V>() && !by_rows;
    const StepKeys key = step_keys(step, element, first, turn, bf16_out, ordered);
    // Load and dequantise. The numbers of rows arrive late, so their loads begin first.
    const Span span = numbers_span(rule.rows);
    float row = 1.0f, second = 1.0f;
    if (by_rows) row = numbers_start(span, tile.rows, first, x.v, n, false);
    if (rule.pairs) second = numbers_start(span, tile.rows, first, x.slow, n, true);
    weights.load(tile.weights, first, x.p, n, key.of[0]);
    grads.load(tile.grads, first, x.g, n, key.of[0]);
    state_m.load(tile.m, first, x.m, n, key.of[1]);
    if (!by_rows) state_v.load(tile.v, first, x.v, n, key.of[2]);
    if (rule.keeps_slow) state_m.load(tile.slow, first, x.slow, n, key.of[3]);
    if (by_rows) numbers_finish(row, x.v, n);
    if (rule.pairs) numbers_finish(second, x.slow, n);
    // Update in fp32.
    OPTIM_UNROLL
    for (int i = 0; i < n; i++) x.g[i] = exact_mul(x.g[i], grad_scale);
    rule.update(hyper, x.p, x.g, x.m, x.v, x.slow, x.root, n);
    // Quantise and store.
    if constexpr (PASS == STORE) {
        store_elements(rule, weights, state_m, state_v, tile, hyper, first, n, x, key.of);
    } else {
        weights.measure(tile.weights, first, x.p, n);
        state_m.measure(tile.m, first, x.m, n);
        state_v.measure(tile.v, first, x.v, n);
        if (rule.keeps_slow) state_m.measure(tile.slow, first, x.slow, n);
    }
}

// Stores the new values of n elements. The roots of v are there if the rule divides by them. On the CPU the storages
// may be table rows, whose member feeds_back says if errors are fed back.
template <int MAX, class Rule, class Weights, class M, class V>
OPTIM_INLINE void store_elements(const Rule& rule, const Weights& weights, const M& state_m, const V& state_v,
                                 const TileStreams& tile, const Hyper& hyper, int first, int n, Values<MAX>& x,
                                 const NoiseKey* key) {
#ifdef __CUDA_ARCH__
    if constexpr (V::OF_ROOTS) {
        OPTIM_UNROLL
        for (int i = 0; i < (rule.keeps_roots ? 0 : n); i++) x.root[i] = moment_root(x.v[i]);
    }
    float(*values[4])[MAX] = {&x.p, &x.m, V::OF_ROOTS ? &x.root : &x.v, rule.keeps_slow ? &x.slow : nullptr};
    if constexpr (Weights::FEEDS_BACK) {
        feed_back(weights, tile.weights, hyper, first, x, n, key[0]);
        store_thread(None(), state_m, state_v, false, tile, first, values, key);
    } else {
        constexpr bool apart = (M::STORES_APART || V::STORES_APART) && !Rule::keeps_slow;
        store_thread(weights, state_m, state_v, apart, tile, first, values, key);
    }
#else
    if (Weights::FEEDS_BACK && weights.feeds_back) {
        feed_back(weights, tile.weights, hyper, first, x, n, key[0]);
    } else {
        weights.store(tile.weights, first, x.p, n, key[0]);
    }
    state_m.store(tile.m, first, x.m, n, key[1]);
    state_v.store(tile.v, first, x.v, n, key[2]);
    if (rule.keeps_slow) state_m.store(tile.slow, first, x.slow, n, key[3]);
#endif
}

// Stores new weights, and adds their rounding errors to m (formats/feedback.cuh). Where the encoder can, it leaves
// the stored values in registers; otherwise they are loaded again.
template <int MAX, class Weights>
OPTIM_INLINE void feed_back(const Weights& weights, const Streams& streams, const Hyper& hyper, int first,
                            Values<MAX>& x, int n, const NoiseKey& key) {
    float stored[MAX];
    if constexpr (ON_GPU && Weights::BF16_IS_STORED) {
        uint32_t buffer[MAX / 2], *bf16_out = key.bf16_out ? key.bf16_out : buffer;
        NoiseKey writing = key;
        writing.bf16_out = bf16_out;
        weights.store(streams, first, x.p, n, writing);
        OPTIM_UNROLL
        for (int i = 0; i < n; i++)
            stored[i] = bits_float(i % 2 ? bf16_out[i / 2] & 0xffff0000u : bf16_out[i / 2] << 16);
    } else {
        weights.store(streams, first, x.p, n, key);
#ifdef __CUDA_ARCH__
        __syncwarp();  // a neighbour has written the scale
#endif
        Streams now = streams;
        if (Weights::HAS_SPANS && now.new_scales) now.scales = now.new_scales;  // they were stored with these
        weights.load(now, first, stored, n, key);
    }
    OPTIM_UNROLL
    for (int i = 0; i < n; i++) {
        float unit = exact_mul(hyper.feedback, exact_fma(x.root[i], hyper.root2, hyper.eps));
        x.m[i] = exact_fma(unit, exact_add(stored[i], -x.p[i]), x.m[i]);
    }
}

// Storing on a GPU. A thread stores its arrays together, in parts: find the largest magnitude of each block (absmax),
// clamp values that are too large, then write the codes (formats/storage.cuh). All exchanges between threads come
// first, so that their waits overlap. Then one test decides for all arrays and a whole warp if any value is rare. x and
// key belong to the weights, m, v and, unless x[3] is null, the slow average. APART compiles one path for common values
// and another for rare ones. This saves a jump and some moves at run time, and takes a fifth to two fifths more compile
// time. STORES_APART of m or v says where it pays (dev/LOG.md, "Stores compiled twice"). It does not pay when errors
// are fed back, and with a third state compiling would take half as long again.
#ifdef __CUDACC__
template <int COUNT, class Weights, class M, class V>
__device__ __forceinline__ void store_thread(const Weights& weights, const M& state_m, const V& state_v, bool apart,
                                             const TileStreams& tile, int first, float (*const (&x)[4])[COUNT],
                                             const NoiseKey* key) {
    const float absmax[4] = {block_absmax(weights, *x[0], key[0]), block_absmax(state_m, *x[1], key[1]),
                             block_absmax(state_v, *x[2], key[2]), x[3] ? block_absmax(state_m, *x[3], key[3]) : 0.0f};
    float max[4] = {};
    if constexpr (Weights::WANTS_TILE_MAX || M::WANTS_TILE_MAX || V::WANTS_TILE_MAX) {
        const bool wanted[4] = {Weights::WANTS_TILE_MAX, M::WANTS_TILE_MAX, V::WANTS_TILE_MAX,
                                M::WANTS_TILE_MAX && x[3]};
        tile_max(*x[0], wanted, absmax, key, max);
    }
    const bool mine = needs_clamp(weights, absmax[0]) || needs_clamp(state_m, absmax[1]) ||
                      needs_clamp(state_v, absmax[2]) || needs_clamp(state_m, absmax[3]);
    constexpr bool clamps = Weights::NO_CLAMP_ABSMAX > 0.0f || M::NO_CLAMP_ABSMAX > 0.0f || V::NO_CLAMP_ABSMAX > 0.0f;
    const bool clamped = clamps && __any_sync(0xffffffffu, mine);
    if (clamped) {
        Weights::template clamp<COUNT>(*x[0], absmax[0]);
        M::template clamp<COUNT>(*x[1], absmax[1]);
        V::template clamp<COUNT>(*x[2], absmax[2]);
        if (x[3]) M::template clamp<COUNT>(*x[3], absmax[3]);
    }
    if (apart && !clamped) {
        store_all(weights, state_m, state_v, tile, first, x, absmax, max, false, key);
    } else {
        store_all(weights, state_m, state_v, tile, first, x, absmax, max, clamped, key);
    }
}

template <int COUNT, class Weights, class M, class V>
__device__ __forceinline__ void store_all(const Weights&, const M&, const V&, const TileStreams& tile, int first,
                                          float (*const (&x)[4])[COUNT], const float* absmax, const float* max,
                                          bool clamped, const NoiseKey* key) {
    Weights::template put_scaled<COUNT>(tile.weights, first, *x[0], absmax[0], max[0], clamped, key[0]);
    M::template put_scaled<COUNT>(tile.m, first, *x[1], absmax[1], max[1], clamped, key[1]);
    V::template put_scaled<COUNT>(tile.v, first, *x[2], absmax[2], max[2], clamped, key[2]);
    if (x[3]) M::template put_scaled<COUNT>(tile.slow, first, *x[3], absmax[3], max[3], clamped, key[3]);
}

template <int COUNT, class Storage>
__device__ __forceinline__ float block_absmax(const Storage&, float (&x)[COUNT], const NoiseKey& key) {
    const float mine = Storage::template absmax<COUNT>(x, key);
    if constexpr (Storage::BLOCK == 1) return mine;
    return neighbours_max<Storage::BLOCK / COUNT, TILE_ELEMENTS / COUNT>(mine, key);
}

template <class Storage>
__device__ __forceinline__ bool needs_clamp(const Storage&, float absmax) {
    return Storage::NO_CLAMP_ABSMAX > 0.0f && !(absmax <= Storage::NO_CLAMP_ABSMAX);
}

// Finds the maximum of `absmax` over all threads of a group, that is over a tile, for each array that is `wanted`. It
// takes one barrier.
template <int COUNT>
__device__ __forceinline__ void tile_max(const float (&)[COUNT], const bool (&wanted)[4], const float* absmax,
                                         const NoiseKey* key, float* max) {
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
#endif

// The layout of a step's kernel. The host computes the same layout from the rows of its tables.
//
// A group of threads updates a tile on a GPU; each thread takes 16 consecutive elements (8 if a moment has more than 8
// bits). From Hopper on, tiles travel through shared memory. TMA loads all arrays of a tile into one
// of the group's 2 to 4 stages while the group computes on another one, the update writes in place, and TMA stores
// the stage. Each group has a producer warp, which issues the TMA copies, so the group's threads do not wait for
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
    int producer_warps;       // one for each group, rounded up to a multiple of 4
    int block_threads;        // groups and producer warps together
    int stages;               // of a group
    int bytes[STEP_ARRAYS];   // of a tile; 0 if the array does not exist
    int offset[STEP_ARRAYS];  // in a stage
    int stage_bytes;
    int load_bytes;           // of a tile that TMA loads
    int table_bytes;          // of both moments' tables, which lie before the stages
    unsigned loaded, stored;  // bit a: array a is loaded into a stage, and stored from it
    unsigned small;           // bit a: array a is too small for TMA; a producer warp copies it
};

// Returns true for multiprocessors with TMA and 227 KB of shared memory: Hopper's and the large ones of
// Blackwell, of compute capability 9.0 to 11.x.
OPTIM_INLINE constexpr bool has_stages(int compute) {
    return compute >= 90 && compute < 120;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
#define OPTIM_STAGES
#endif

constexpr int STAGE_LINE = 128;         // of shared memory, for TMA
constexpr int SHARED_MAX = 224 * 1024;  // of a thread block on Hopper, without room for barriers and exchanges

// Places the arrays in a stage. Arrays of whole lines come first, so that each begins at a line, as every stage does;
// TMA is slower if lines of memory and of a stage do not match.
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

OPTIM_INLINE constexpr StepShape step_shape(const StepArrays& arrays, int table_bytes, RowRule rows) {
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
    const int most = rows != ROWS_NONE && is_by_columns(numbers_span(rows)) ? 3 : 4;
    shape.stages = stages > most ? most : stages;
    shape.producer_warps = (shape.groups + 3) / 4 * 4;
    shape.block_threads = shape.groups * shape.threads + 32 * shape.producer_warps;
    return shape;
}

// Returns the bytes of dynamic shared memory: the moments' tables and, if there is TMA, the stages.
OPTIM_INLINE constexpr int step_shared_bytes(const StepShape& shape, int compute) {
    return shape.table_bytes + (has_stages(compute) ? shape.groups * shape.stages * shape.stage_bytes : 0);
}

// Returns the address of tile number `index` of an array; null if there is no array.
OPTIM_INLINE void* array_at(const StreamInfo& info, void* array, int64_t index) {
    return array ? (char*)array + index * tile_bytes(info) : nullptr;
}

// Returns the arrays of tile number `index` of a storage.
OPTIM_INLINE Streams tile_at(const StreamInfo& codes, const StreamInfo& scales, const StreamInfo& third,
                             const Streams& whole, int64_t index) {
    return {array_at(codes, whole.codes, index),
            array_at(scales, whole.scales, index),
            whole.table,
            array_at(third, whole.third, index),
            whole.new_scales,
            whole.span ? whole.span + index : nullptr};
}

// Returns the arrays of a tile of the table.
OPTIM_INLINE TileStreams tile_streams(const StepArrays& arrays, const StepArguments& step, const Tile& tile) {
    const StreamInfo* info = arrays.array;
    const uint32_t states = tile.states - step.states;
    TileStreams streams = {tile_at(info[0], info[1], info[2], step.weights, tile.kept),
                           {(void*)tile.grads, nullptr},
                           tile_at(info[4], info[5], info[6], step.m, states),
                           tile_at(info[7], info[8], info[9], step.v, states),
                           tile_at(info[10], info[11], info[12], step.slow, states),
                           {},
                           {step.rows.numbers, step.rows.tile ? step.rows.tile + states : nullptr}};
    (info[COPY_ARRAY].bits > 0 ? streams.copy : streams.weights).codes = tile.seen;
    return streams;
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
    static constexpr bool SLOW = Rule::KEEPS_SLOW, READS_ROWS = Rule::ROWS != ROWS_NONE;
    static constexpr StepArrays ARRAYS = {{Weights::STREAM[0], Weights::STREAM[1], Weights::STREAM[2], Grads::STREAM[0],
                                           M::STREAM[0], M::STREAM[1], M::STREAM[2], V::STREAM[0], V::STREAM[1],
                                           V::STREAM[2], SLOW ? M::STREAM[0] : NOTHING, SLOW ? M::STREAM[1] : NOTHING,
                                           SLOW ? M::STREAM[2] : NOTHING, Copy::STREAM[0]}};
    static constexpr StepShape SHAPE = step_shape(ARRAYS, M::TABLE_BYTES + V::TABLE_BYTES, Rule::ROWS);
    // The array at Tile.seen.
    static constexpr int SEEN_ARRAY = Copy::STREAM[0].bits > 0 ? COPY_ARRAY : 0;

    // Returns the address of array `a` of a tile in memory.
    static __device__ __forceinline__ void* in_memory(const StepArguments& step, int a, void* array, int bytes,
                                                      const Tile& tile) {
        if (a == SEEN_ARRAY) return tile.seen;
        if (a == GRADS_ARRAY) return (void*)tile.grads;
        return (char*)array + (int64_t)(a < GRADS_ARRAY ? tile.kept : tile.states - step.states) * bytes;
    }

    // Returns the arrays of a tile: in the stage, or in memory if there are no stages.
    static __device__ __forceinline__ TileStreams tile_arrays(const StepArguments& step, const Tile& tile,
                                                              unsigned char* stage) {
        constexpr StepArrays arrays = ARRAYS;
        constexpr StepShape shape = SHAPE;
        TileStreams streams = tile_streams(arrays, step, tile);
        const auto move = [&](int a, void** array) {
            if (HAS_STAGES && shape.bytes[a] > 0) *array = stage + shape.offset[a];
        };
        const auto move_all = [&](int a, Streams* of) {
            move(a, &of->codes), move(a + 1, &of->scales), move(a + 2, &of->third);
        };
        move_all(0, &streams.weights), move(GRADS_ARRAY, &streams.grads.codes);
        move_all(4, &streams.m), move_all(7, &streams.v), move_all(10, &streams.slow);
        move(COPY_ARRAY, &streams.copy.codes);
        return streams;
    }

    // Calls transfer(address in memory, address in the stage, bytes, index) for each array of a tile whose bit is in
    // `set`.
    template <class Transfer>
    static __device__ __forceinline__ void each(const StepArguments& step, const Tile& tile, unsigned char* stage,
                                                unsigned set, Transfer transfer) {
        constexpr StepShape shape = SHAPE;
        void* array[STEP_ARRAYS] = {
            step.weights.codes, step.weights.scales, step.weights.third, nullptr,       step.m.codes,
            step.m.scales,      step.m.third,        step.v.codes,       step.v.scales, step.v.third,
            step.slow.codes,    step.slow.scales,    step.slow.third,    nullptr};
#pragma unroll
        for (int a = 0; a < STEP_ARRAYS; a++) {
            if ((set >> a & 1u) == 0) continue;
            transfer(in_memory(step, a, array[a], shape.bytes[a], tile), stage + shape.offset[a], shape.bytes[a], a);
        }
    }
};

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
    if (span) streams.rows.tile = span;
    int64_t element = (int64_t)tile.element * TILE_ELEMENTS;
    int first = thread * COUNT;
    constexpr bool COPIES = Copy::STREAM[0].bits > 0;
    constexpr bool BF16_OUT = COPIES && Weights::WRITES_BF16 && SAME_TYPE<Copy, Elementwise<Bf16, NEAREST>>;
    Packed<16, COUNT> codes;
    Hyper scaled;
    if constexpr (Rule::SCALED) scaled = hyper_scaled(step.group[tile.group], step.factor[tile.kept]);
    const Hyper& hyper = Rule::SCALED ? scaled : step.group[tile.group];
    update_elements<COUNT>(EachElement<Rule>(), Weights(), Grads(), M(), V(), step, streams, hyper, grad_scale, element,
                           first, COUNT, turn, BF16_OUT ? codes.word : nullptr);
    if constexpr (BF16_OUT) {
        NoiseKey key = {};
        key.ordered = step_ordered<COUNT, Weights, Grads, M, V>() && EachElement<Rule>().rows == ROWS_NONE;
        key.order = element_order(first);
        store_ordered<COUNT>(streams.copy.codes, first, codes, key);
    } else if constexpr (COPIES) {
        // Wait for the scales that other threads write.
        if constexpr (Layout::ARRAYS.array[1].run > 32 * COUNT) group_sync<TILE_ELEMENTS / COUNT>();
        if constexpr (Layout::ARRAYS.array[1].run > COUNT) __syncwarp();
        float read[COUNT];
        if constexpr (Weights::HAS_SPANS) streams.weights.scales = streams.weights.new_scales;
        Weights::view(streams.weights, first, read, COUNT);
        Copy::set(streams.copy, first, read, COUNT);
    }
}

// Decodes the weights as the model sees them, rounded to nearest to the type that the matmuls read.
// grid: a thread block a tile, block: TILE_ELEMENTS / DECODE_ELEMENTS; deterministic.
template <class Weights, class Copy>
__global__ void __launch_bounds__(TILE_ELEMENTS / DECODE_ELEMENTS) optim_decode_kernel(Streams weights, Streams copy) {
    static_assert(Weights::TABLE_BYTES == 0, "tables are for moments");
    constexpr StreamInfo codes = Weights::STREAM[0], scales = Weights::STREAM[1], third = Weights::STREAM[2],
                         to = Copy::STREAM[0];
    float x[DECODE_ELEMENTS];
    int first = threadIdx.x * DECODE_ELEMENTS;
    Weights::view(tile_at(codes, scales, third, weights, blockIdx.x), first, x, DECODE_ELEMENTS);
    Copy::set({(char*)copy.codes + (int64_t)blockIdx.x * tile_bytes(to), nullptr}, first, x, DECODE_ELEMENTS);
}
#endif
