// Data parallel training: the sum of all ranks' gradients, and which rank keeps which part of gradients, states and
// weights.
//
//     none     every rank keeps everything and computes the whole update
//     states   rank r keeps the states and master weights of its slices, and updates them  (ZeRO-1)
//     grads    it also keeps the gradients of its slices alone, besides one or two layers in flight  (ZeRO-2)
//     weights  and the weights of its slices alone, besides two layers in use                        (ZeRO-3)
//
// Every layer, and what lies outside of the layers, is cut into a slice for each rank (slices.cuh). The embeddings and
// the last layernorm that the matmuls read are whole on every rank.
//
// If steps are taken inside the backward pass (optim/model), gradients are packed in every mode and two layers take
// turns. Their sums overwrite them, and a layer is updated when its memory is needed again.
//
// The gradients of a layer are reduced while the backward pass computes the layer before, within each node and then
// between the K nodes of R ranks (comm.cuh):
//
//     s_k = the sum of node k's gradients in the order of its ranks, in fp32, rounded to the gradients' type
//     sum = s_0 + ... + s_(K-1) in fp32, rounded; on one node it is s_0
//
// Each rank sends every other of its node the slices of all ranks with the other's local number (n (R-1)/R elements
// out, and in), adds up what it gets, in place, and sends every rank with its own local number the slice of these that
// the other owns (n (K-1)/W; a node sends n (K-1)/K). The sum stays with its owner; with `none` it goes to all on the
// way back, as updated weights do in the other modes. The order is defined here, so the CPU and the GPU get the same
// bits from equal gradients, and all modes if a step has one micro-batch per rank; of several, `none` and `states` sum
// over the micro-batches first, `grads` and `weights` over the ranks. A sum of k micro-batches on each of W ranks
// differs from one of k W on one rank by at most (k W - 1) 2^-23 of the sum of the magnitudes; with bf16 gradients,
// several nodes add 2^-8 of the sum of all |s_k|.
//
// The exchanges cost 1 to 4 % of a step on four H200s with DMA copy engines (peer.cuh). NCCL's kernels also take
// multiprocessors. Attention draws its work piece by piece and loses no more than their share, but a matrix product
// with a block for every multiprocessor takes up to twice its time. So fast exchanges over NCCL wait: the reduction of
// a layer begins at the attention's backward pass of the next layer down (dev/LOG.md has the figures).
#pragma once
#include <assert.h>

#include "../each.cuh"
#include "../layer_ring.cuh"
#include "../norm.cuh"
#include "../tile.h"
#include "comm.cuh"
#include "slices.cuh"

constexpr double SHARD_WAIT_RATE = 100e9;  // bytes a second; slower exchanges need all of the layer's time

enum ShardMode { SHARD_NONE, SHARD_STATES, SHARD_GRADS, SHARD_WEIGHTS };

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

struct Shard {
    Comm comm;
    ShardMode mode;
    Slices slices;  // the last bucket holds what belongs to no layer
    SliceRun* own;  // (own_runs) this rank's slices in the arena
    int own_runs;
    int64_t own_tiles;
    int layers;
    int64_t* packed_tile;  // (layers + 1) where buckets begin in packed memory: two layers in turn, then the rest
    int64_t packed;        // elements of packed memory
    int64_t piece;         // tiles that a rank sends another at a time; DMA: at most PEER_PART bytes
    int gradient_bytes, weight_bytes;  // of an element
    char* incoming;                    // room for pieces of all ranks
    void* grads;                       // the trainer's: arena, or packed
    void* sums;                        // of this rank's slices if gradients are split, in the order of `own`
    double* squares;                   // of the sums, for each tile of the arena
    void* weights;                     // in the matmuls' type: arena, packed, or the optimizer's
    const void* kept_weights;          // of this rank's slices, in the order of `own`
    CommPiece *sends, *receives;       // (world) of the exchange that is being made
    float flags[3];                    // this rank's SCALAR_STOP, _SAVE and _BAD, in host memory
    bool waits;                        // exchanges begin with attention
    int waiting;                       // bucket whose reduction shard_reduce_waiting begins; -1: none
    bool releases;                     // gradients are packed in every mode, and their sums overwrite them
    bool first, last;                  // micro-batch of the step
    double micro_batch_seconds;        // in the last step; 0: unknown
    int stop;                          // the signal at which all ranks have agreed to end, or 0
    LayerRing held;                    // layers whose weights are in packed memory
    cudaEvent_t *ready, *summed;       // (layers + 1) weights are gathered; gradients are summed
};

// Connects the ranks. `shard` is the value of --shard. NULL: there is one rank.
inline Shard* shard_connect(Shard* s, const Launch* launch, const Device* dev, const char* shard) {
    const char* const modes[] = {"none", "states", "grads", "weights"};  // as ShardMode numbers them
    if (launch->world == 1) return nullptr;
    comm_open(&s->comm, launch, dev);
    for (int i = 0; i < 4; i++) {
        if (strcmp(shard, modes[i]) == 0) s->mode = (ShardMode)i;
    }
    s->waits = s->comm.communicator && s->comm.rate > SHARD_WAIT_RATE;
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

// Writes the sums of a slice, a vector at a time, to out (tiles), which may be where this rank's contribution lies;
// `add`: adds the rounded sums to it.
template <typename G>
struct ShardSum {
    G* out;
    Contributions c;
    bool add;
    static constexpr int size = Vec<G>::size, vecs = TILE_ELEMENTS / size;  // of a tile

    __host__ __device__ void at(int64_t i) const {
        float sum[size] = {};
        for (int r = 0; r < c.world; r++) {
            const Vec<G> part = ((const Vec<G>*)contribution(c, r, i / vecs))[i % vecs];
            for (int j = 0; j < size; j++) sum[j] += to_float(part.lane[j]);
        }
        Vec<G>* to = (Vec<G>*)out + i;
        Vec<G> result = {};
        if (add) result = *to;
        for (int j = 0; j < size; j++) {
            result.lane[j] = from_float<G>(add ? to_float(result.lane[j]) + to_float(from_float<G>(sum[j])) : sum[j]);
        }
        *to = result;
    }
};

// Reduces value i of all ranks' values, all (world, n), in the order of the ranks: the maximum or the sum of integers,
// or the sum of floats. Floats that are not negative have the order of their bits.
enum ShardReduction { SHARD_MAX, SHARD_SUM, SHARD_SUM_FLOATS };

struct ShardReduce {
    uint32_t* values;
    const uint32_t* all;
    int world, n;
    ShardReduction how;

    __host__ __device__ void at(int64_t i) const {
        uint32_t total = all[i];
        for (int r = 1; r < world; r++) {
            const uint32_t other = all[(int64_t)r * n + i];
            float sum, term;
            memcpy(&sum, &total, sizeof(sum)), memcpy(&term, &other, sizeof(term));
            sum += term;
            if (how == SHARD_MAX) total = other > total ? other : total;
            if (how == SHARD_SUM) total += other;
            if (how == SHARD_SUM_FLOATS) memcpy(&total, &sum, sizeof(sum));
        }
        values[i] = total;
    }
};

// Writes this rank's flags.
struct ShardFlags {
    float *scalars, stop, save, bad;

    __host__ __device__ void at(int64_t) const {
        scalars[SCALAR_STOP] = stop, scalars[SCALAR_SAVE] = save, scalars[SCALAR_BAD] = bad;
    }
};

// Slices and memory.

// Device memory that shard_open takes for pieces of all ranks.
inline int64_t shard_staging_bytes(const Shard* s) {
    const int64_t largest = TILE_ELEMENTS * (int64_t)(s->gradient_bytes > 2 ? s->gradient_bytes : 2);
    return s->comm.members * s->piece * largest;
}

// Plans the slices of tensors in the order of their buckets, which are the layers and the rest. In packed memory,
// tensors lie in this order, and layers two apart in one place.
inline void shard_plan(Shard* s, const SliceTensor* tensors, int count) {
    const size_t world = (size_t)s->comm.world;
    s->sends = (CommPiece*)memory_zero(2 * world, sizeof(CommPiece)), s->receives = s->sends + world;
    slices_plan(&s->slices, tensors, count, s->comm.world);
    s->layers = s->slices.buckets - 1;
    s->packed_tile = (int64_t*)memory_zero((size_t)s->layers + 1, sizeof(int64_t));
    const int64_t layer = s->layers > 0 ? *slices_cut(&s->slices, 0, s->comm.world) : 0;
    for (int b = 0; b < s->layers; b++) s->packed_tile[b] = b % 2 * layer;
    s->packed_tile[s->layers] = (s->layers > 1 ? 2 : s->layers) * layer;
    s->packed = (s->packed_tile[s->layers] + *slices_cut(&s->slices, s->layers, s->comm.world)) * TILE_ELEMENTS;
    s->own = (SliceRun*)memory_zero((size_t)s->slices.first_run[s->slices.buckets], sizeof(SliceRun));
    s->own_runs = slices_own(&s->slices, s->comm.position, s->own);
    s->own_tiles = s->own_runs ? s->own[s->own_runs - 1].at + s->own[s->own_runs - 1].tiles : 0;
}

// grads: the trainer's arena of `elements`, or packed ones and behind them the sums; weights: those of this rank's
// slices; squares: a double for each tile of the arena. Returns the weights that the matmuls read, which are gathered
// unless they are the optimizer's own. Adds to *memory what it allocates.
inline void* shard_open(Shard* s, const Device* dev, void* grads, void* weights, double* squares, int64_t elements,
                        MemoryPlan* memory) {
    const int64_t read = s->mode >= SHARD_WEIGHTS ? s->packed : elements,
                  gathered = shard_splits(s, SHARD_STATES) ? read * s->weight_bytes : 0;
    s->grads = grads, s->sums = (char*)grads + s->packed * s->gradient_bytes, s->squares = squares;
    s->kept_weights = weights;
    s->weights = gathered > 0 ? device_alloc(dev, gathered, &memory->weights) : weights;
    if (gathered > 0) device_zero(dev, s->weights, gathered);
    s->incoming = (char*)device_alloc(dev, shard_staging_bytes(s), &memory->other);
    ring_open(&s->held, dev, 2, false);
    s->waiting = -1;
    if (!dev->gpu || dev->imagined) return s->weights;
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
    for (int i = 0; i < 2 * (s->layers + 1) && dev->gpu; i++) check(cudaEventDestroy(s->ready[i]));
    slices_free(&s->slices);
    free(s->ready), free(s->own), free(s->packed_tile), free(s->sends);
}

// Returns the address of a piece of a bucket in an arena, or packed memory, whose tiles have `bytes` bytes.
inline char* shard_at(const Shard* s, void* memory, int bucket, const SliceRun& piece, int64_t bytes) {
    const bool packed = shard_is_packed(s, memory);
    return (char*)memory + (packed ? s->packed_tile[bucket] + piece.at : piece.tile) * bytes;
}

// Returns the same in memory that holds this rank's slices alone.
inline char* shard_own_at(const Shard* s, const void* memory, const SliceRun& piece, int64_t bytes) {
    return (char*)memory + slices_place(s->own, s->own_runs, piece.tile) * bytes;
}

// Returns piece `number` of the slices that a member of a link has in a bucket.
inline SliceRun shard_piece(const Shard* s, const Link* link, int bucket, int member, int64_t number, int64_t most) {
    return slices_piece(&s->slices, bucket, link->at + member * link->span, number, most, link->span);
}

// Returns how many pieces the slices of a bucket have at most on this and all like links, which exchange as often.
inline int64_t shard_pieces(const Shard* s, const Link* link, int bucket, int64_t most) {
    int64_t pieces = 0;
    for (int p = 0; p < s->comm.world; p += link->span) {
        while (slices_piece(&s->slices, bucket, p, pieces, most, link->span).tiles > 0) pieces++;
    }
    return pieces;
}

// Sends this rank's slice of a bucket to all, on the comm's stream: between nodes, and then with the slices from there
// within the node. A tile has `bytes` bytes in `memory`. The slice lies there or, unless it is null, in `kept`, from
// where it is copied.
inline void shard_all_gather(Shard* s, int bucket, void* memory, int64_t bytes, const void* kept = nullptr) {
    Comm* c = &s->comm;
    for (int64_t i = 0; kept; i++) {
        const SliceRun own = slices_piece(&s->slices, bucket, c->position, i, INT64_MAX);
        if (own.tiles == 0) break;
        comm_copy(c, shard_at(s, memory, bucket, own, bytes), shard_own_at(s, kept, own, bytes), own.tiles * bytes);
    }
    for (Link* link : {&c->net, &c->node}) {
        const int64_t pieces = shard_pieces(s, link, bucket, INT64_MAX);
        comm_group(c, link, true);
        for (int64_t i = 0; i < pieces; i++) {
            for (int r = 0; r < link->world; r++) {
                const SliceRun piece = shard_piece(s, link, bucket, r, i, INT64_MAX);
                s->receives[r] = {shard_at(s, memory, bucket, piece, bytes), piece.tiles * bytes};
            }
            for (int r = 0; r < link->world; r++) s->sends[r] = s->receives[link->rank];
            comm_exchange(c, link, s->sends, s->receives);
        }
        comm_group(c, link, false);
    }
}

// Gradients.

// Sums piece number `i` of what each member of a link has of a bucket over the members, and writes the sum to its place
// or, on the last link, to what its owner keeps.
template <typename G>
void shard_sum_pieces(Shard* s, Link* link, int bucket, int64_t i) {
    const int world = link->world, me = link->rank;
    const int64_t bytes = TILE_ELEMENTS * (int64_t)sizeof(G), stride = s->piece * bytes;
    const SliceRun own = shard_piece(s, link, bucket, me, i, s->piece);
    CommPiece *sends = s->sends, *receives = s->receives;
    for (int r = 0; r < world; r++) {
        const SliceRun run = shard_piece(s, link, bucket, r, i, s->piece);
        sends[r] = {shard_at(s, s->grads, bucket, run, bytes), run.tiles * bytes};
        receives[r] = {s->incoming + r * stride, own.tiles * bytes};
    }
    comm_exchange(&s->comm, link, sends, receives, true);
    const bool many = world > PEER_MAX, ends = link->span == 1;
    const bool splits = ends && s->mode >= SHARD_GRADS && !s->releases;
    char* mine = shard_at(s, s->grads, bucket, own, bytes);
    Contributions c = {mine, many ? s->incoming : nullptr, stride, bytes, me, world};
    for (int r = 0; r < world && !many; r++) c.from[r] = (const char*)receives[r].data;
    G* to = (G*)(splits && own.tiles > 0 ? shard_own_at(s, s->sums, own, bytes) : mine);
    for_each(s->comm.dev, s->comm.stream, ShardSum<G>{to, c, splits && !s->first}, own.tiles * ShardSum<G>::vecs);
    if (ends && s->last) tile_squares<G>(s->comm.dev, s->comm.stream, s->squares + own.tile, to, own.tiles);
    comm_release(&s->comm, link, receives);
}

// Begins a micro-batch of a step. Until shard_agreed ends the step, a rank that hangs ends all ranks (watchdog_arm).
// The host is at most three micro-batches ahead of the device, so it returns here within the time of six; the first
// step, in which kernels are loaded or compiled, gets ten minutes.
inline void shard_micro_batch(Shard* s, bool first, bool last) {
    if (!s) return;
    s->first = first, s->last = last;
    const double patience = s->micro_batch_seconds > 0 ? 6 * s->micro_batch_seconds : 600;
    if (!s->comm.dev->warms_up) watchdog_arm(s->comm.launch, "training", patience);
}

// Begins to reduce a bucket whose gradients are complete on the device's stream, on the comm's stream: after the last
// micro-batch or, if no rank keeps all gradients, after each one. After the last one, the squares of the sums go to
// all.
template <typename G>
void shard_reduce_now(Shard* s, int bucket) {
    if (!s->last && s->mode < SHARD_GRADS) return;
    comm_after_device(&s->comm);
    for (Link* link : {&s->comm.node, &s->comm.net}) {
        const int64_t pieces = link->world > 1 ? shard_pieces(s, link, bucket, s->piece) : 0;
        for (int64_t i = 0; i < pieces; i++) shard_sum_pieces<G>(s, link, bucket, i);
    }
    if (s->mode == SHARD_NONE) shard_all_gather(s, bucket, s->grads, TILE_ELEMENTS * (int64_t)sizeof(G));
    if (s->last) shard_all_gather(s, bucket, s->squares, sizeof(double));
    if (s->comm.dev->gpu) check(cudaEventRecord(s->summed[bucket], s->comm.stream));
}

// Does the same, but if exchanges wait, layers other than 0 are left to shard_reduce_waiting.
template <typename G>
void shard_reduce(Shard* s, int bucket) {
    if (!s) return;
    if (!s->waits || bucket == 0 || bucket == s->layers) return shard_reduce_now<G>(s, bucket);
    assert(s->waiting < 0);
    s->waiting = bucket;
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
    if (s->comm.dev->gpu) check(cudaStreamWaitEvent(s->comm.dev->stream, s->summed[bucket], 0));
}

// Makes the device's stream wait until the gradients that a bucket's will overwrite have been reduced.
inline void shard_grads_free(const Shard* s, int bucket) {
    if (!shard_splits(s, SHARD_GRADS) || !s->comm.dev->gpu) return;
    int before = bucket == s->layers ? bucket : bucket + 2 < s->layers ? bucket + 2 : bucket % 2;
    check(cudaStreamWaitEvent(s->comm.dev->stream, s->summed[before], 0));
}

// All-reduces values (n) on the device, within the node and then between nodes. All ranks call it.
inline void shard_all_reduce(Shard* s, uint32_t* values, int n, ShardReduction how) {
    if (!s) return;
    Comm* c = &s->comm;
    const int64_t bytes = n * (int64_t)sizeof(uint32_t);
    const uint32_t* all = (const uint32_t*)s->incoming;
    for (Link* link : {&c->node, &c->net}) {
        const int world = link->world;
        if (world == 1) continue;
        assert(world * bytes <= shard_staging_bytes(s));
        for (int r = 0; r < world; r++)
            s->sends[r] = {values, bytes}, s->receives[r] = {s->incoming + r * bytes, bytes};
        comm_after_device(c);
        comm_copy(c, s->incoming + link->rank * bytes, values, bytes);
        comm_exchange(c, link, s->sends, s->receives);
        device_after_comm(c);
        for_each(c->dev, ShardReduce{values, all, world, n, how}, n);
    }
}

// Makes all ranks agree on the step's loss, the sum of their shares, and on the flags.
inline void shard_agree(Shard* s, float* scalars) {
    if (!s) return;
    for_each(s->comm.dev, ShardFlags{scalars, s->flags[0], s->flags[1], s->flags[2]}, 1);
    shard_all_reduce(s, (uint32_t*)scalars + SCALAR_LOSS, 1, SHARD_SUM_FLOATS);
    shard_all_reduce(s, (uint32_t*)scalars + SCALAR_STOP, 3, SHARD_MAX);
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

// Weights.

// Gathers a bucket's weights on all ranks, on the comm's stream.
inline void shard_gather(Shard* s, int bucket) {
    shard_all_gather(s, bucket, s->weights, TILE_ELEMENTS * (int64_t)s->weight_bytes, s->kept_weights);
    if (s->comm.dev->gpu) check(cudaEventRecord(s->ready[bucket], s->comm.stream));
}

// Begins to gather the weights that the optimizer has updated, in the order in which the forward pass needs them.
inline void shard_publish(Shard* s) {
    if (!shard_splits(s, SHARD_STATES)) return;
    comm_after_device(&s->comm);
    ring_forget(&s->held);
    shard_gather(s, s->layers);
    for (int l = 0; l < s->layers && s->mode < SHARD_WEIGHTS; l++) shard_gather(s, l);
}

// Begins to gather the weights of a layer ahead of their use. They evict the layer two away.
inline void shard_prefetch(Shard* s, int layer) {
    if (!shard_splits(s, SHARD_WEIGHTS) || layer < 0 || layer >= s->layers || !ring_fetch(&s->held, layer)) return;
    comm_after_device(&s->comm);
    shard_gather(s, layer);
}

// Makes the device's stream wait for the weights of this bucket, and begins to gather those of layer `next`.
inline void shard_need(Shard* s, int bucket, int next = -1) {
    if (!shard_splits(s, SHARD_STATES)) return;
    if (bucket < s->layers) shard_prefetch(s, bucket);
    if (s->comm.dev->gpu) check(cudaStreamWaitEvent(s->comm.dev->stream, s->ready[bucket], 0));
    shard_prefetch(s, next);
}
