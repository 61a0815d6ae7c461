// Data parallel training: the sum of all ranks' gradients, and which rank keeps which part of gradients, states and
// weights.
//
//     none     every rank keeps everything and computes the whole update
//     states   rank r keeps the states and master weights of its part of the arena, and updates it  (ZeRO-1)
//     grads    it also keeps the gradients of that part alone, besides one or two layers in flight  (ZeRO-2)
//     weights  and the weights of that part alone, besides two layers in use                        (ZeRO-3)
//
// Parts are equal ranges of the arena in whole tiles (TILE_ELEMENTS elements), which no block of a format crosses. The
// embeddings and the last layernorm that the matmuls read are whole on every rank.
//
// If steps are taken inside the backward pass (optim/model), gradients are packed in every mode and two layers take
// turns. Their sums overwrite them, and a layer is updated when its memory is needed again.
//
// A bucket, the gradients of a layer, is reduced while the backward pass computes the layer before: in chunks of at
// most `chunk` tiles, of which every rank sums a slice. Each rank sends every other its slice (reduce-scatter: n
// (W-1)/W elements out, and in), adds up the W contributions in the order of the ranks, in fp32, rounds once to the
// gradients' type, and sends the sum to the ranks that keep it: all (none), or the owners of the part (n (W-1)/W
// again). So the order of the sum is defined here, by rank, and the CPU and the GPU get the same bits from equal
// gradients. All modes get the same bits if a step has one micro-batch per rank; of several, `none` and `states` sum
// over the micro-batches first, `grads` and `weights` over the ranks. A sum of k micro-batches on each of W ranks
// differs from one of k W on one rank by at most (k W - 1) 2^-23 of the sum of the magnitudes.
//
// When the sums are sent on, the owner of a layer receives, adds and stores W times as much as each rank did before,
// and all wait for it. So over NCCL, `grads` and `weights` defer that if a step has several micro-batches: each rank
// adds up its slices, and after the last micro-batch the ranks deliver them to the owners of all layers at once, into
// memory that activations no longer need.
//
// The exchanges cost 1 to 4 % of a step on four H200s with DMA copy engines (peer.cuh). NCCL's kernels also take
// multiprocessors. Attention draws its work piece by piece and loses no more than their share, but a matrix product
// with a block for every multiprocessor takes up to twice its time. So fast exchanges over NCCL wait: the reduction of
// a layer begins at the attention's backward pass of the next layer down (dev/LOG.md has the figures).
#pragma once
#include <assert.h>

#include "../norm.cuh"
#include "../tile.h"
#include "comm.cuh"

constexpr double SHARD_WAIT_RATE = 100e9;  // bytes a second; slower exchanges need all of the layer's time

enum ShardMode { SHARD_NONE, SHARD_STATES, SHARD_GRADS, SHARD_WEIGHTS };

// A range of the arena, in elements; offset: where it begins in packed memory.
struct ShardRange {
    int64_t begin, end, offset;
};

struct ShardBucket {
    ShardRange* range;
    int ranges;
};

// A chunk is a part of a range that is exchanged at a time; `sums` is where this rank's slice of it lies among its
// deferred sums.
struct ShardChunk {
    int64_t begin, end, sums;
};

// The device scalars of a step. All ranks get the same values.
enum {
    SCALAR_LOSS,
    SCALAR_NORM,
    SCALAR_FACTOR,
    SCALAR_STOP,
    SCALAR_SAVE,
    SCALAR_BAD,
    SCALAR_LEFT,
    SCALAR_SATURATED,
    SCALARS
};

struct Overlap {
    int64_t begin, end;
};

inline Overlap shard_overlap(int64_t begin, int64_t end, int64_t low, int64_t high) {
    Overlap o = {begin > low ? begin : low, end < high ? end : high};
    if (o.end < o.begin) o.end = o.begin;
    return o;
}

struct Shard {
    Comm comm;
    ShardMode mode;
    int64_t* cut;         // (world + 1): rank r keeps elements cut[r] to cut[r+1] of the arena
    ShardBucket* bucket;  // (layers + 1): the last holds what belongs to no layer
    int layers;
    int64_t* packed_offset;  // (tensors): first element in packed memory, which holds two layers in turn, then the rest
    int64_t packed;          // its elements
    int64_t chunk;           // tiles of a bucket that are exchanged at a time; DMA: slices of at most PEER_PART bytes
    ShardChunk* chunks;      // (chunk_count) in the order of the arena
    int chunk_count;
    int64_t sliced;                    // elements of this rank's slices of all chunks
    int gradient_bytes, weight_bytes;  // of an element
    char* incoming;                    // room for the slices of `chunk` tiles that arrive
    void* grads;                       // the trainer's: arena, or packed
    void* sums;                        // of the part, from cut[rank] on; if deferred, of this rank's slices
    void* kept_grads;                  // sums of the part, once they are complete
    void* weights;                     // in the matmuls' type: arena, packed, or the optimizer's
    const void* kept_weights;
    CommPiece *sends, *receives;  // (world) of the exchange that is being made
    Overlap* into;                // (world)
    int64_t* tile_cut;            // (world + 1) of the norm that is being computed
    float* gathered;              // (world, SCALARS)
    float flags[3];               // this rank's SCALAR_STOP, _SAVE and _BAD, in host memory
    bool waits;                   // exchanges begin with attention
    int waiting;                  // bucket whose reduction shard_reduce_waiting begins; -1: none
    bool releases;                // gradients are packed in every mode, and their sums overwrite them
    bool first, last;             // micro-batch of the step
    bool may_defer, defers;       // sums stay in slices until the step's last micro-batch is done
    double micro_batch_seconds;   // in the last step; 0: unknown
    int stop;                     // the signal at which all ranks have agreed to end, or 0
    int held[2];                  // layers whose weights are in packed memory; -1: none
    cudaEvent_t *ready, *summed;  // (layers + 1) weights are gathered; gradients are summed
};

// Connects the ranks. `shard` is the value of --shard. NULL: there is one rank.
inline Shard* shard_connect(Shard* s, const Launch* launch, const Device* dev, const char* shard) {
    const char* const modes[] = {"none", "states", "grads", "weights"};  // as ShardMode numbers them
    if (launch->world == 1) return nullptr;
    if (dev->gpu) comm_require_own_gpu(launch);
    comm_open(&s->comm, launch, dev);
    for (int i = 0; i < 4; i++) {
        if (strcmp(shard, modes[i]) == 0) s->mode = (ShardMode)i;
    }
    s->waits = !s->comm.peers && s->comm.rate > SHARD_WAIT_RATE;
    return s;
}

inline bool shard_splits(const Shard* s, ShardMode mode) {
    return s && s->mode >= mode;
}

// True if `memory`, of gradients or weights, is packed.
inline bool shard_is_packed(const Shard* s, const void* memory) {
    return s && memory &&
           ((memory == s->grads && (s->mode >= SHARD_GRADS || s->releases)) ||
            (memory == s->weights && s->mode >= SHARD_WEIGHTS));
}

// Tile t of `tiles` belongs to the slice of rank r from here to slice_begin(r + 1).
inline int64_t slice_begin(int64_t tiles, int r, int world) {
    return tiles * r / world;
}

// Slice r of elements `begin` to `end` of the arena.
inline Overlap shard_slice(const Shard* s, int64_t begin, int64_t end, int r) {
    const int64_t tiles = (end - begin) / TILE_ELEMENTS;
    return {begin + slice_begin(tiles, r, s->comm.world) * TILE_ELEMENTS,
            begin + slice_begin(tiles, r + 1, s->comm.world) * TILE_ELEMENTS};
}

// The exchange of gradients in plain C: the sum in the order of the ranks. G is the gradients' type.

// The ranks' contributions to a slice: `mine` is this rank's, and that of rank r lies at from[r], or at others +
// r * stride where others is not NULL.
struct Contributions {
    const char *mine, *others;
    int64_t stride, tile_bytes;
    int rank, world;
    const char* from[PEER_MAX] = {};
};

__host__ __device__ inline const char* contribution(const Contributions& c, int r, int64_t tile) {
    return (r == c.rank ? c.mine : c.others ? c.others + r * c.stride : c.from[r]) + tile * c.tile_bytes;
}

// Writes the sums of a slice to out (tiles); `add`: adds the rounded sums to it.
template <typename G>
void shard_sum_cpu(G* out, const Contributions& c, int64_t tiles, bool add) {
#pragma omp parallel for schedule(static)
    for (int64_t tile = 0; tile < tiles; tile++) {
        for (int i = 0; i < TILE_ELEMENTS; i++) {
            float sum = 0.0f;
            for (int r = 0; r < c.world; r++) sum += to_float(((const G*)contribution(c, r, tile))[i]);
            G* to = &out[tile * TILE_ELEMENTS + i];
            *to = from_float<G>(add ? to_float(*to) + to_float(from_float<G>(sum)) : sum);
        }
    }
}

template <typename G>
void shard_keep_cpu(G* kept, const G* sum, int64_t n, bool add) {
    for (int64_t i = 0; i < n; i++) kept[i] = add ? from_float<G>(to_float(kept[i]) + to_float(sum[i])) : sum[i];
}

// Sums the loss and combines the flags of all ranks, from the row that each has sent.
__host__ __device__ inline void shard_agree(float* scalars, const float* gathered, int world) {
    float loss = 0.0f, flag[SCALARS] = {};
    for (int r = 0; r < world; r++) {
        loss += gathered[r * SCALARS + SCALAR_LOSS];
        for (int i = SCALAR_STOP; i <= SCALAR_BAD; i++) flag[i] = fmaxf(flag[i], gathered[r * SCALARS + i]);
    }
    for (int i = SCALAR_STOP; i <= SCALAR_BAD; i++) scalars[i] = flag[i];
    scalars[SCALAR_LOSS] = flag[SCALAR_BAD] > 0.0f ? NAN : loss;  // then the step changes nothing
}

// Reduces value i over the ranks: all (world, n) has the others' values, `own` is this rank's. Sum or maximum.
__host__ __device__ inline uint32_t shard_reduced(uint32_t own, const uint32_t* all, int world, int rank, int n, int i,
                                                  bool sum) {
    for (int r = 0; r < world; r++) {
        if (r == rank) continue;
        const uint32_t other = all[(int64_t)r * n + i];
        own = sum ? own + other : other > own ? other : own;
    }
    return own;
}

#ifdef __CUDACC__
// The same on the device. A block of TILE_ELEMENTS / 8 threads takes a tile, 8 elements per thread. All kernels run
// near the speed of a copy and are deterministic.

constexpr int SHARD_THREADS = TILE_ELEMENTS / 8;

// The 8 elements of a thread.
template <typename G>
__device__ inline void shard_load_eight(const G* tile, float x[8]) {
    constexpr int size = Vec<G>::size;
    for (int v = 0; v < 8 / size; v++) {
        const Vec<G> part = load_vec(tile + threadIdx.x * 8 + v * size);
        for (int j = 0; j < size; j++) x[v * size + j] = to_float(part.lane[j]);
    }
}

template <typename G>
__device__ inline void shard_store_eight(G* tile, const float x[8]) {
    constexpr int size = Vec<G>::size;
    for (int v = 0; v < 8 / size; v++) {
        Vec<G> part;
        for (int j = 0; j < size; j++) part.lane[j] = from_float<G>(x[v * size + j]);
        store_vec(tile + threadIdx.x * 8 + v * size, part);
    }
}

// Grid: tiles of the slice; block SHARD_THREADS. `out` may be where this rank's contribution lies.
template <typename G>
__global__ void __launch_bounds__(SHARD_THREADS) shard_sum_kernel(G* out, Contributions c, bool add) {
    float sum[8] = {}, x[8];
    out += (int64_t)blockIdx.x * TILE_ELEMENTS;
#pragma unroll 4
    for (int r = 0; r < c.world; r++) {
        shard_load_eight((const G*)contribution(c, r, blockIdx.x), x);
        for (int j = 0; j < 8; j++) sum[j] += x[j];
    }
    if (add) shard_load_eight(out, x);
    for (int j = 0; j < 8 && add; j++) sum[j] = x[j] + to_float(from_float<G>(sum[j]));
    shard_store_eight(out, sum);
}

// Grid: tiles; block SHARD_THREADS.
template <typename G>
__global__ void __launch_bounds__(SHARD_THREADS) shard_keep_kernel(G* kept, const G* sum, bool add) {
    int64_t first = (int64_t)blockIdx.x * TILE_ELEMENTS;
    float x[8], before[8] = {};
    shard_load_eight(sum + first, x);
    if (add) shard_load_eight(kept + first, before);
    for (int j = 0; j < 8 && add; j++) x[j] += before[j];
    shard_store_eight(kept + first, x);
}

// Grid 1, block 1.
__global__ static void shard_flags_kernel(float* scalars, float stop, float save, float bad) {
    scalars[SCALAR_STOP] = stop, scalars[SCALAR_SAVE] = save, scalars[SCALAR_BAD] = bad;
}

// Grid 1, block 1.
__global__ static void shard_agree_kernel(float* scalars, const float* gathered, int world) {
    shard_agree(scalars, gathered, world);
}

// all: (world, maxima + sums), of which this rank's row is `own`. Grid ceil((maxima + sums) / 256), block 256.
__global__ static void shard_all_reduce_kernel(uint32_t* own, const uint32_t* all, int world, int rank, int maxima,
                                               int sums) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, n = maxima + sums;
    if (i < n) own[i] = shard_reduced(own[i], all, world, rank, n, i, i >= maxima);
}
#endif

template <typename G>
void shard_sum(const Device* dev, cudaStream_t stream, G* out, const Contributions& c, int64_t tiles, bool add) {
    if (tiles == 0) return;
#ifdef __CUDACC__
    if (dev->gpu) {
        shard_sum_kernel<G><<<(unsigned)tiles, SHARD_THREADS, 0, stream>>>(out, c, add);
        check_launch();
        return;
    }
#endif
    shard_sum_cpu<G>(out, c, tiles, add);
}

template <typename G>
void shard_keep(const Device* dev, cudaStream_t stream, G* kept, const G* sum, int64_t n, bool add) {
    if (n == 0) return;
#ifdef __CUDACC__
    if (dev->gpu) {
        shard_keep_kernel<G><<<(unsigned)(n / TILE_ELEMENTS), SHARD_THREADS, 0, stream>>>(kept, sum, add);
        check_launch();
        return;
    }
#endif
    shard_keep_cpu<G>(kept, sum, n, add);
}

// Cuts, buckets and memory.

inline int64_t shard_staging_bytes(const Shard* s) {
    int64_t largest = TILE_ELEMENTS * (int64_t)(s->gradient_bytes > 2 ? s->gradient_bytes : 2);
    return (s->chunk + s->comm.world) * largest;
}

// Device memory that shard_open takes.
inline int64_t shard_bytes(const Shard* s) {
    return shard_staging_bytes(s) + s->comm.world * SCALARS * (int64_t)sizeof(float);
}

struct ShardTensor {
    int64_t offset, elements;  // where it begins in the arena; tensors begin at tiles
    int layer;                 // that it belongs to; `layers` for the rest
};

// Lists the chunks of all ranges.
inline void shard_list_chunks(Shard* s) {
    int64_t count = 0;
    assert(s->chunk > 0);
    for (int b = 0; b <= s->layers; b++) {
        const ShardBucket* bucket = &s->bucket[b];
        for (int i = 0; i < bucket->ranges; i++) {
            const ShardRange* range = &bucket->range[i];
            for (int64_t at = range->begin; at < range->end; at += s->chunk * TILE_ELEMENTS) {
                const int64_t max = at + s->chunk * TILE_ELEMENTS;
                s->chunks = (ShardChunk*)memory_grow(s->chunks, ((size_t)count + 1) * sizeof(ShardChunk));
                s->chunks[count++] = {at, max < range->end ? max : range->end, 0};
            }
        }
    }
    s->chunk_count = (int)count, s->sliced = 0;
    qsort(s->chunks, (size_t)count, sizeof(ShardChunk), [](const void* a, const void* b) {
        const int64_t first = ((const ShardChunk*)a)->begin, second = ((const ShardChunk*)b)->begin;
        return (first > second) - (first < second);
    });
    for (ShardChunk* c = s->chunks; c < s->chunks + count; c++) {
        const Overlap own = shard_slice(s, c->begin, c->end, s->comm.rank);
        c->sums = s->sliced, s->sliced += own.end - own.begin;
    }
}

// Sets the tensors' places in packed memory. Tensors of a layer that shares its place are in the order of the list, not
// of the arena, and equal for every layer.
inline void shard_places(Shard* s, const ShardTensor* tensors, int count, int layers) {
    int64_t of_layer = 0;
    for (int b = 0; s->bucket && b <= layers; b++) free(s->bucket[b].range);
    free(s->packed_offset), free(s->bucket);
    s->layers = layers;
    s->packed_offset = (int64_t*)memory_zero((size_t)count, sizeof(int64_t));
    s->bucket = (ShardBucket*)memory_zero((size_t)layers + 1, sizeof(ShardBucket));
    for (int t = 0; t < count; t++) {
        const int64_t length = ceil_div(tensors[t].elements, TILE_ELEMENTS) * TILE_ELEMENTS;
        if (tensors[t].layer == 0) of_layer += length;
    }
    for (int b = 0; b <= layers; b++) {
        ShardBucket* bucket = &s->bucket[b];
        int64_t at = b < layers ? b % 2 * of_layer : 2 * of_layer;
        bucket->range = (ShardRange*)memory_zero((size_t)count, sizeof(ShardRange));
        for (int t = 0; t < count; t++) {
            if (tensors[t].layer != b) continue;
            int64_t begin = tensors[t].offset, length = ceil_div(tensors[t].elements, TILE_ELEMENTS) * TILE_ELEMENTS;
            ShardRange* last = bucket->ranges ? &bucket->range[bucket->ranges - 1] : nullptr;
            const bool follows = last && last->end == begin && last->offset + last->end - last->begin == at;
            if (follows) last->end += length;
            if (!follows) bucket->range[bucket->ranges++] = {begin, begin + length, at};
            s->packed_offset[t] = at;
            at += length;
        }
        s->packed = at;
        bucket->range = (ShardRange*)memory_grow(bucket->range, ((size_t)bucket->ranges + 1) * sizeof(ShardRange));
    }
    shard_list_chunks(s);
}

inline void shard_plan(Shard* s, const ShardTensor* tensors, int count, int layers, int64_t elements) {
    const size_t world = (size_t)s->comm.world;
    s->sends = (CommPiece*)memory_zero(2 * world, sizeof(CommPiece)), s->receives = s->sends + world;
    s->into = (Overlap*)memory_zero(world, sizeof(Overlap));
    s->cut = (int64_t*)memory_zero(2 * (world + 1), sizeof(int64_t)), s->tile_cut = s->cut + world + 1;
    for (int r = 0; r <= s->comm.world; r++) {
        s->cut[r] = slice_begin(elements / TILE_ELEMENTS, r, s->comm.world) * TILE_ELEMENTS;
    }
    shard_places(s, tensors, count, layers);
}

// Elements of the arena that this rank keeps.
inline int64_t shard_kept(const Shard* s) {
    return s->cut[s->comm.rank + 1] - s->cut[s->comm.rank];
}

// Returns the elements of the memory for sums.
inline int64_t shard_sums(const Shard* s) {
    return s->sliced > shard_kept(s) ? s->sliced : shard_kept(s);
}

// Returns the bytes of the squares of all tiles in shard_norm's scratch. Deferred sums are delivered behind them.
inline int64_t shard_squares_bytes(const Shard* s) {
    return ceil_div(s->cut[s->comm.world] / TILE_ELEMENTS * (int64_t)sizeof(double), 256) * 256;
}

// Returns true if sums may be deferred and `bytes` of scratch suffice to deliver this rank's.
inline bool shard_may_defer(const Shard* s, int64_t bytes) {
    if (!shard_splits(s, SHARD_GRADS) || s->comm.peers) return false;
    return shard_squares_bytes(s) + shard_kept(s) * s->gradient_bytes <= bytes;
}

// Bytes of the weights that the matmuls read, if they are not the optimizer's own.
inline int64_t shard_gathered_bytes(const Shard* s) {
    if (!shard_splits(s, SHARD_STATES)) return 0;
    return (s->mode >= SHARD_WEIGHTS ? s->packed : s->cut[s->comm.world]) * s->weight_bytes;
}

// grads: the trainer's arena, or packed ones and behind them the sums (shard_sums); weights: those that are kept.
// Returns the weights that the matmuls read.
inline void* shard_open(Shard* s, void* grads, void* weights) {
    const Device* dev = s->comm.dev;
    bool gathers = shard_splits(s, SHARD_STATES);
    int64_t before = shard_splits(s, SHARD_GRADS) ? s->packed : s->cut[s->comm.rank];
    s->grads = grads, s->sums = s->kept_grads = (char*)grads + before * s->gradient_bytes;
    s->kept_weights = weights;
    s->weights = gathers ? device_alloc(dev, shard_gathered_bytes(s)) : weights;
    if (gathers) device_zero(dev, s->weights, shard_gathered_bytes(s));
    s->incoming = (char*)device_alloc(dev, shard_staging_bytes(s));
    s->gathered = (float*)device_alloc(dev, s->comm.world * SCALARS * (int64_t)sizeof(float));
    s->held[0] = s->held[1] = s->waiting = -1;
    if (!dev->gpu) return s->weights;
    const int events = s->layers + 1;
    s->ready = (cudaEvent_t*)memory_zero(2 * (size_t)events, sizeof(cudaEvent_t)), s->summed = s->ready + events;
    for (int i = 0; i < 2 * events; i++) check(cudaEventCreateWithFlags(&s->ready[i], cudaEventDisableTiming));
    return s->weights;
}

inline void shard_close(Shard* s) {
    const Device* dev = s->comm.dev;
    device_sync(dev);
    comm_close(&s->comm);
    device_free(dev, s->incoming);
    device_free(dev, s->gathered);
    for (int i = 0; i <= s->layers; i++) free(s->bucket[i].range);
    for (int i = 0; i < 2 * (s->layers + 1) && dev->gpu; i++) check(cudaEventDestroy(s->ready[i]));
    free(s->ready), free(s->bucket), free(s->chunks), free(s->packed_offset), free(s->cut), free(s->sends),
        free(s->into);
}

// Gradients.

// Sums a chunk of gradients over the ranks: each sums a slice, in place or, if sums are deferred, to its deferred sums.
// Element x of this rank's gradients is local[x].
template <typename G>
void shard_sum_chunk(Shard* s, G* local, const ShardChunk* chunk) {
    const Device* dev = s->comm.dev;
    const int64_t begin = chunk->begin, end = chunk->end;
    int world = s->comm.world, me = s->comm.rank;
    int64_t tiles = (end - begin) / TILE_ELEMENTS, tile_bytes = TILE_ELEMENTS * (int64_t)sizeof(G);
    int64_t mine = slice_begin(tiles, me, world), mine_tiles = slice_begin(tiles, me + 1, world) - mine;
    int64_t stride = (ceil_div(tiles, world)) * tile_bytes;
    CommPiece *sends = s->sends, *receives = s->receives;
    char* own = (char*)(local + begin);
    for (int r = 0; r < world; r++) {
        int64_t first = slice_begin(tiles, r, world);
        sends[r] = {own + first * tile_bytes, (slice_begin(tiles, r + 1, world) - first) * tile_bytes};
        receives[r] = {s->incoming + r * stride, mine_tiles * tile_bytes};
    }
    comm_exchange_zero_copy(&s->comm, sends, receives);
    const bool many = world > PEER_MAX;
    Contributions c = {own + mine * tile_bytes, many ? s->incoming : nullptr, stride, tile_bytes, me, world};
    for (int r = 0; r < world && !many; r++) c.from[r] = (const char*)receives[r].data;
    G* sums = s->defers ? (G*)s->sums + chunk->sums : local + begin + mine * TILE_ELEMENTS;
    shard_sum<G>(dev, s->comm.stream, sums, c, mine_tiles, s->defers && !s->first);
    comm_release(&s->comm, receives);
}

// Sends the sums of the slices to all ranks.
template <typename G>
void shard_all_gather_chunk(Shard* s, G* local, const ShardChunk* chunk) {
    const auto piece = [&](int r) {
        const Overlap slice = shard_slice(s, chunk->begin, chunk->end, r);
        return CommPiece{local + slice.begin, (slice.end - slice.begin) * (int64_t)sizeof(G)};
    };
    for (int r = 0; r < s->comm.world; r++) s->sends[r] = piece(s->comm.rank), s->receives[r] = piece(r);
    comm_exchange(&s->comm, s->sends, s->receives);
}

// Sends the sums of the slices to the owners, which write them into what they keep (with release, the gradients' own
// places), or add them to it.
template <typename G>
void shard_keep_chunk(Shard* s, G* local, const ShardChunk* chunk, bool add) {
    int world = s->comm.world, me = s->comm.rank;
    int64_t used = 0;
    CommPiece *sends = s->sends, *receives = s->receives;
    Overlap* into = s->into;
    const Overlap own = shard_slice(s, chunk->begin, chunk->end, me);
    for (int r = 0; r < world; r++) {
        const Overlap slice = shard_slice(s, chunk->begin, chunk->end, r);
        const Overlap out = shard_overlap(own.begin, own.end, s->cut[r], s->cut[r + 1]);
        sends[r] = {local + out.begin, (out.end - out.begin) * (int64_t)sizeof(G)};
        into[r] = shard_overlap(slice.begin, slice.end, s->cut[me], s->cut[me + 1]);
        receives[r] = {s->incoming + used, (into[r].end - into[r].begin) * (int64_t)sizeof(G)};
        used += receives[r].bytes;
    }
    comm_exchange_zero_copy(&s->comm, sends, receives);
    for (int r = 0; r < world; r++) {
        G* kept = s->releases ? local + into[r].begin : (G*)s->sums + into[r].begin - s->cut[me];
        const G* sum = r == me ? local + into[r].begin : (const G*)receives[r].data;
        if (kept == sum) continue;
        shard_keep<G>(s->comm.dev, s->comm.stream, kept, sum, into[r].end - into[r].begin, add);
    }
    comm_release(&s->comm, receives);
}

// Sends the deferred sums to the ranks that keep them: this rank's part of the arena to `kept`. In each round every
// rank receives another chunk of its part, so that all receive at the same time.
template <typename G>
void shard_deliver(Shard* s, G* kept) {
    const int world = s->comm.world, me = s->comm.rank;
    const ShardChunk* end = s->chunks + s->chunk_count;
    const ShardChunk** chunk = (const ShardChunk**)memory_zero((size_t)world, sizeof(*chunk));  // of each rank
    for (int r = 0; r < world; r++) {
        for (chunk[r] = s->chunks; chunk[r] < end && chunk[r]->end <= s->cut[r];) chunk[r]++;
    }
    for (bool more = true; more;) {
        more = false;
        for (int r = 0; r < world; r++) {
            s->sends[r] = s->receives[r] = {nullptr, 0};
            if (chunk[r] == end || chunk[r]->begin >= s->cut[r + 1]) continue;
            more = true;
            const Overlap mine = shard_slice(s, chunk[r]->begin, chunk[r]->end, me);
            const Overlap out = shard_overlap(mine.begin, mine.end, s->cut[r], s->cut[r + 1]);
            G* sums = (G*)s->sums + chunk[r]->sums + (out.begin - mine.begin);
            s->sends[r] = {sums, (out.end - out.begin) * (int64_t)sizeof(G)};
        }
        const bool receives = s->sends[me].data != nullptr;  // this rank's part has a chunk left
        for (int r = 0; r < world && receives; r++) {
            const Overlap its = shard_slice(s, chunk[me]->begin, chunk[me]->end, r);
            const Overlap in = shard_overlap(its.begin, its.end, s->cut[me], s->cut[me + 1]);
            s->receives[r] = {kept + (in.begin - s->cut[me]), (in.end - in.begin) * (int64_t)sizeof(G)};
        }
        comm_copy(&s->comm, s->receives[me].data, s->sends[me].data, s->sends[me].bytes);
        if (more) comm_exchange(&s->comm, s->sends, s->receives);
        for (int r = 0; r < world; r++) chunk[r] += chunk[r] < end;
    }
    free(chunk);
}

template <typename G>
void shard_reduce_chunk(Shard* s, G* local, const ShardChunk* chunk) {
    shard_sum_chunk<G>(s, local, chunk);
    if (s->defers) return;
    if (s->mode == SHARD_NONE) {
        shard_all_gather_chunk<G>(s, local, chunk);
    } else {
        shard_keep_chunk<G>(s, local, chunk, s->mode >= SHARD_GRADS && !s->first);
    }
}

// Begins a micro-batch of a step. Until shard_agreed ends the step, a rank that hangs ends all ranks (watchdog_arm).
// The host is at most three micro-batches ahead of the device, so it returns here within the time of six; the first
// step, in which kernels are loaded or compiled, gets ten minutes.
inline void shard_micro_batch(Shard* s, bool first, bool last) {
    if (!s) return;
    s->first = first, s->last = last;
    s->defers = s->may_defer && !(first && last);
    const double patience = s->micro_batch_seconds > 0 ? 6 * s->micro_batch_seconds : 600;
    if (!s->comm.dev->warms_up) watchdog_arm(s->comm.launch, "training", patience);
}

// Reduces a range of gradients, whose element x is local[x], in chunks.
template <typename G>
void shard_reduce_range(Shard* s, G* local, const ShardRange* range) {
    for (int i = 0; i < s->chunk_count; i++) {
        const ShardChunk* chunk = &s->chunks[i];
        if (chunk->begin >= range->begin && chunk->begin < range->end) shard_reduce_chunk<G>(s, local, chunk);
    }
}

// Begins to reduce a bucket whose gradients are complete on the device's stream, on the comm's stream: after the last
// micro-batch or, if no rank keeps all gradients, after each one.
template <typename G>
void shard_reduce_now(Shard* s, int bucket) {
    if (!s->last && s->mode < SHARD_GRADS) return;
    const ShardBucket* b = &s->bucket[bucket];
    const bool packed = shard_is_packed(s, s->grads);
    comm_after_device(&s->comm);
    for (int i = 0; i < b->ranges; i++) {
        const ShardRange* range = &b->range[i];
        shard_reduce_range(s, (G*)s->grads + (packed ? range->offset - range->begin : 0), range);
    }
    if (!s->comm.stand_in) check(cudaEventRecord(s->summed[bucket], s->comm.stream));
}

// Does the same, but if exchanges wait, layers other than 0 are left to shard_reduce_waiting.
template <typename G>
void shard_reduce(Shard* s, int bucket) {
    if (!s) return;
    if (s->waits && bucket > 0 && bucket < s->layers) {
        assert(s->waiting < 0);
        s->waiting = bucket;
    } else {
        shard_reduce_now<G>(s, bucket);
    }
}

// Begins to reduce the layer that waits, if one does. Call it in each layer before the attention's backward pass.
template <typename G>
void shard_reduce_waiting(Shard* s) {
    if (!s || s->waiting < 0) return;
    shard_reduce_now<G>(s, s->waiting);
    s->waiting = -1;
}

// Makes the device's stream wait for the sums of a bucket.
inline void shard_summed(const Shard* s, int bucket) {
    if (!s->comm.stand_in) check(cudaStreamWaitEvent(s->comm.dev->stream, s->summed[bucket], 0));
}

// Makes the device's stream wait until the gradients that a bucket's will overwrite have been reduced.
inline void shard_grads_free(const Shard* s, int bucket) {
    if (!shard_splits(s, SHARD_GRADS) || s->comm.stand_in) return;
    int before = bucket == s->layers ? bucket : bucket + 2 < s->layers ? bucket + 2 : bucket % 2;
    check(cudaStreamWaitEvent(s->comm.dev->stream, s->summed[before], 0));
}

// Writes loss and flags of this rank into its row of `gathered`, and sends that row to all on the comm's stream.
inline void shard_send_scalars(Shard* s, float* scalars) {
    const Device* dev = s->comm.dev;
    float* own = s->gathered + s->comm.rank * SCALARS;
    if (!dev->gpu) {
        memcpy(scalars + SCALAR_STOP, s->flags, sizeof(s->flags));
        memcpy(own, scalars, SCALARS * sizeof(float));
    }
#ifdef __CUDACC__
    if (dev->gpu) {
        shard_flags_kernel<<<1, 1, 0, dev->stream>>>(scalars, s->flags[0], s->flags[1], s->flags[2]);
        check(cudaMemcpyAsync(own, scalars, SCALARS * sizeof(float), cudaMemcpyDeviceToDevice, dev->stream));
        check_launch();
    }
#endif
    for (int r = 0; r < s->comm.world; r++) {
        s->sends[r] = {own, SCALARS * (int64_t)sizeof(float)};
        s->receives[r] = {s->gathered + r * SCALARS, SCALARS * (int64_t)sizeof(float)};
    }
    comm_after_device(&s->comm);
    comm_exchange(&s->comm, s->sends, s->receives);
}

// Computes the step's loss, NaN if a rank has bad data, and flags from the rows that all ranks have sent.
inline void shard_join_scalars(Shard* s, float* scalars) {
    device_after_comm(&s->comm);
#ifdef __CUDACC__
    if (s->comm.dev->gpu) {
        shard_agree_kernel<<<1, 1, 0, s->comm.dev->stream>>>(scalars, s->gathered, s->comm.world);
        check_launch();
        return;
    }
#endif
    shard_agree(scalars, s->gathered, s->comm.world);
}

// All-gathers the squares of tiles: rank r has parts[cut[r]] to parts[cut[r + 1]]. cut: (world + 1)
inline void shard_send_squares(Shard* s, double* parts, const int64_t* cut) {
    const int me = s->comm.rank;
    for (int r = 0; r < s->comm.world; r++) {
        s->sends[r] = {parts + cut[me], (cut[me + 1] - cut[me]) * (int64_t)sizeof(double)};
        s->receives[r] = {parts + cut[r], (cut[r + 1] - cut[r]) * (int64_t)sizeof(double)};
    }
    comm_after_device(&s->comm);
    comm_exchange(&s->comm, s->sends, s->receives);
}

// Sets `scalars` to the loss and flags of all ranks, the norm of all gradients and the clip factor. parts: one per
// tile, and the room of shard_may_defer if it returned true. Deferred sums are delivered first, and become kept_grads.
template <typename G>
void shard_norm(Shard* s, float* scalars, double* parts, float clip) {
    const int world = s->comm.world, me = s->comm.rank;
    int64_t* cut = s->tile_cut;
    s->kept_grads = s->sums;
    if (s->defers) {
        s->kept_grads = (char*)parts + shard_squares_bytes(s);
        comm_after_device(&s->comm);
        shard_deliver<G>(s, (G*)s->kept_grads);
    }
    for (int r = 0; r <= world; r++) cut[r] = s->cut[r] / TILE_ELEMENTS;
    const G* kept = s->mode == SHARD_NONE ? (const G*)s->grads + s->cut[me] : (const G*)s->kept_grads;
    device_after_comm(&s->comm);
    tile_squares<G>(s->comm.dev, parts + cut[me], kept, cut[me + 1] - cut[me]);
    comm_group(&s->comm, true);
    shard_send_squares(s, parts, cut);
    shard_send_scalars(s, scalars);
    comm_group(&s->comm, false);
    shard_join_scalars(s, scalars);
    norm_of_tiles(s->comm.dev, scalars + SCALAR_NORM, parts, cut[world], clip, scalars);
}

// Returns what this rank steps of elements `begin` to `end` - 1 of the arena.
inline Overlap shard_own(const Shard* s, int64_t begin, int64_t end) {
    if (!shard_splits(s, SHARD_STATES)) return {begin, end};
    return shard_overlap(begin, end, s->cut[s->comm.rank], s->cut[s->comm.rank + 1]);
}

// All-gathers the squares of a part's tiles, of which this rank has those of shard_own. Tensor i is element offset[i]
// of the arena, in rising order. The device's stream waits for the other ranks.
inline void shard_part_squares(Shard* s, double* square, const PartTiles& tiles, const int64_t* offset) {
    if (!shard_splits(s, SHARD_STATES)) return;
    int64_t* cut = s->tile_cut;
    for (int r = 0; r <= s->comm.world; r++) {
        cut[r] = 0;
        for (int t = 0; t < tiles.count; t++) {
            const int64_t end = offset[t] + (tiles.first[t + 1] - tiles.first[t]) * TILE_ELEMENTS;
            const Overlap before = shard_overlap(offset[t], end, 0, s->cut[r]);
            cut[r] += (before.end - before.begin) / TILE_ELEMENTS;
        }
    }
    shard_send_squares(s, square, cut);
    device_after_comm(&s->comm);
}

// All-reduces values (maxima + sums) on the device: the first by maximum, the others by sum. All ranks call it.
inline void shard_all_reduce(Shard* s, uint32_t* values, int maxima, int sums) {
    if (!s) return;
    const Comm* c = &s->comm;
    const int n = maxima + sums;
    const int64_t bytes = n * (int64_t)sizeof(uint32_t);
    assert(c->world * bytes <= shard_staging_bytes(s));
    for (int r = 0; r < c->world; r++)
        s->sends[r] = {(char*)values, bytes}, s->receives[r] = {s->incoming + r * bytes, bytes};
    comm_after_device(c);
    comm_exchange(c, s->sends, s->receives);
    device_after_comm(c);
#ifdef __CUDACC__
    if (c->dev->gpu) {
        shard_all_reduce_kernel<<<(unsigned)ceil_div(n, 256), 256, 0, c->dev->stream>>>(
            values, (const uint32_t*)s->incoming, c->world, c->rank, maxima, sums);
        check_launch();
        return;
    }
#endif
    for (int i = 0; i < n; i++) {
        values[i] = shard_reduced(values[i], (const uint32_t*)s->incoming, c->world, c->rank, n, i, i >= maxima);
    }
}

// Ends a step whose scalars the host has read.
inline void shard_agreed(Shard* s, const float* scalars, double micro_batch_seconds) {
    if (!s) return;
    watchdog_disarm(s->comm.launch);
    s->micro_batch_seconds = micro_batch_seconds;
    if (!s->stop) s->stop = (int)scalars[SCALAR_STOP];
}

// Returns the minimum over all ranks.
inline int64_t shard_min(const Shard* s, int64_t count) {
    double max = -(double)count;
    if (s) launch_all_reduce(s->comm.launch, &max, 1, LAUNCH_MAX);
    return (int64_t)-max;
}

// Sends rank 0's bytes to all.
inline void shard_broadcast(const Shard* s, void* bytes, int64_t count) {
    if (s) launch_broadcast(s->comm.launch, 0, bytes, count);
}

// Sums the ranks' shares of a validation's mean loss, each in scalars[SCALAR_LOSS].
inline void shard_loss(Shard* s, float* scalars) {
    const Device* dev = s->comm.dev;
    float value;
    copy_to_host(dev, &value, scalars, sizeof(value));
    double loss = value;
    launch_all_reduce(s->comm.launch, &loss, 1, LAUNCH_SUM);
    value = (float)loss;
    copy_to_device(dev, scalars, &value, sizeof(value));
}

// Weights.

// The weights of a range of the arena, element x to weights[x + shift], go from the ranks that keep them to all ranks
// in two exchanges: the owners scatter the range, slice r to rank r, and then each rank sends its slice to those that
// do not own it. No rank sends more than 2 n (W-1)/W elements; with one exchange, the owner of a whole layer would send
// (W-1) n.
inline void shard_scatter_range(Shard* s, int64_t begin, int64_t end, int64_t shift) {
    const int64_t size = s->weight_bytes, me = s->comm.rank;
    const char* kept = (const char*)s->kept_weights - s->cut[me] * size;
    char* weights = (char*)s->weights + shift * size;
    const Overlap mine = shard_overlap(begin, end, s->cut[me], s->cut[me + 1]);
    const Overlap own = shard_slice(s, begin, end, s->comm.rank);
    for (int r = 0; r < s->comm.world; r++) {
        const Overlap slice = shard_slice(s, begin, end, r);
        const Overlap out = shard_overlap(slice.begin, slice.end, mine.begin, mine.end);
        const Overlap in = shard_overlap(own.begin, own.end, s->cut[r], s->cut[r + 1]);
        s->sends[r] = {(void*)(kept + out.begin * size), (out.end - out.begin) * size};
        s->receives[r] = {weights + in.begin * size, (in.end - in.begin) * size};
    }
    comm_copy(&s->comm, weights + mine.begin * size, kept + mine.begin * size, (mine.end - mine.begin) * size);
    comm_exchange(&s->comm, s->sends, s->receives);
}

inline void shard_all_gather_range(Shard* s, int64_t begin, int64_t end, int64_t shift) {
    const int64_t size = s->weight_bytes;
    char* weights = (char*)s->weights + shift * size;
    const auto piece = [&](int of, int to) {
        const Overlap slice = shard_slice(s, begin, end, of);
        const bool owns = s->cut[to] <= slice.begin && slice.end <= s->cut[to + 1];
        return CommPiece{weights + slice.begin * size, owns ? 0 : (slice.end - slice.begin) * size};
    };
    const int me = s->comm.rank;
    for (int r = 0; r < s->comm.world; r++) s->sends[r] = piece(me, r), s->receives[r] = piece(r, me);
    comm_exchange(&s->comm, s->sends, s->receives);
}

// Gathers a bucket's weights on all ranks, on the comm's stream.
inline void shard_gather(Shard* s, int bucket) {
    const ShardBucket* b = &s->bucket[bucket];
    for (const auto gather : {shard_scatter_range, shard_all_gather_range}) {
        comm_group(&s->comm, true);
        for (int i = 0; i < b->ranges; i++) {
            const ShardRange* range = &b->range[i];
            gather(s, range->begin, range->end, s->mode >= SHARD_WEIGHTS ? range->offset - range->begin : 0);
        }
        comm_group(&s->comm, false);
    }
    if (!s->comm.stand_in) check(cudaEventRecord(s->ready[bucket], s->comm.stream));
}

// Begins to gather the weights that the optimizer has updated, in the order in which the forward pass needs them.
inline void shard_publish(Shard* s) {
    if (!shard_splits(s, SHARD_STATES)) return;
    comm_after_device(&s->comm);
    s->held[0] = s->held[1] = -1;
    shard_gather(s, s->layers);
    for (int l = 0; l < s->layers && s->mode < SHARD_WEIGHTS; l++) shard_gather(s, l);
}

// Begins to gather the weights of a layer ahead of their use. They evict the layer two away.
inline void shard_prefetch(Shard* s, int layer) {
    if (!shard_splits(s, SHARD_WEIGHTS) || layer < 0 || layer >= s->layers || s->held[layer % 2] == layer) return;
    comm_after_device(&s->comm);
    shard_gather(s, layer);
    s->held[layer % 2] = layer;
}

// Makes the device's stream wait for the weights of this bucket, and begins to gather those of layer `next`.
inline void shard_need(Shard* s, int bucket, int next = -1) {
    if (!shard_splits(s, SHARD_STATES)) return;
    if (bucket < s->layers) shard_prefetch(s, bucket);
    if (!s->comm.stand_in) check(cudaStreamWaitEvent(s->comm.dev->stream, s->ready[bucket], 0));
    shard_prefetch(s, next);
}
