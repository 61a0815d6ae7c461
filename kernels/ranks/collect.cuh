// Rank 0 gathers what each rank of a sharded run keeps (shard.cuh), for a checkpoint, which does not depend on the
// number of ranks. All ranks call each of these functions; those other than 0 only send their parts. Each byte goes to
// rank 0 once and then to the host, through a staging buffer.
#pragma once
#include "../../data/files.h"
#include "shard.cuh"

// Copies at most shard_staging_bytes of rank `from`, from the device's memory or the host's, to rank 0's host memory.
inline void shard_to_first(Shard* s, void* host, const void* data, int64_t bytes, int from, bool on_host) {
    const Device* dev = s->comm.dev;
    bool own = from == 0 && s->comm.rank == 0;
    if (own && on_host && host != data) memcpy(host, data, (size_t)bytes);
    if (own && !on_host) copy_to_host(dev, host, data, bytes);
    if (from == 0 || bytes == 0) return;
    bool first = s->comm.rank == 0, sender = s->comm.rank == from;
    CommPiece *sends = s->sends, *receives = s->receives;
    memset(sends, 0, (size_t)s->comm.world * sizeof(CommPiece));
    memset(receives, 0, (size_t)s->comm.world * sizeof(CommPiece));
    // States may be in pinned memory of the host (optim/model/offload.cu), so all passes through device memory.
    if (dev->gpu && sender) copy_to_device(dev, s->incoming, data, bytes), data = s->incoming;
    void* into = dev->gpu ? s->incoming : (char*)host;
    if (first) receives[from] = {into, bytes};
    if (sender) sends[0] = {(void*)data, bytes};
    comm_after_device(&s->comm);
    comm_exchange(&s->comm, sends, receives);
    device_after_comm(&s->comm);
    if (first && dev->gpu) copy_to_host(dev, host, into, bytes);
    if (sender) device_sync(dev);
}

// True if this device memory has the same bytes on all ranks. Bytes: all of it to the host, once.
inline bool shard_equal(Shard* s, const void* data, int64_t bytes) {
    constexpr int64_t PIECE = 16 << 20;
    char* host = (char*)memory_take(PIECE);
    uint32_t crc = 0;
    device_after_comm(&s->comm);
    for (int64_t at = 0; at < bytes; at += PIECE) {
        int64_t part = bytes - at < PIECE ? bytes - at : PIECE;
        copy_to_host(s->comm.dev, host, (const char*)data + at, part);
        crc = crc32c(crc, host, part);
    }
    free(host);
    double limits[2] = {(double)crc, -(double)crc};
    launch_all_reduce(s->comm.launch, limits, 2, LAUNCH_MAX);
    return limits[0] == -limits[1];
}

// Copies elements begin to begin + n of the arena to `values` on rank 0, part by part from the ranks that keep them.
// `kept`: this rank's part, elements of `size` bytes in device memory; NULL: its part is in its own `values` already.
inline void shard_collect(Shard* s, void* values, int64_t begin, int64_t n, int size, const void* kept) {
    int64_t max = shard_staging_bytes(s) / size, own = s->cut[s->comm.rank];
    for (int r = 0; r < s->comm.world; r++) {
        Overlap part = shard_overlap(begin, begin + n, s->cut[r], s->cut[r + 1]);
        for (int64_t at = part.begin; at < part.end; at += max) {
            int64_t count = part.end - at < max ? part.end - at : max;
            char* host = (char*)values + (at - begin) * size;
            shard_to_first(s, host, kept ? (const char*)kept + (at - own) * size : host, count * size, r, !kept);
        }
    }
}

// A checkpoint is unsharded: its arrays are the ranks' one after another.
struct ShardArray {
    char name[160], dtype[8];
    int64_t elements;
    int32_t element_bytes;
    const void* data;  // the rank's own
};

constexpr int SHARD_ARRAYS = 112;  // at most

struct ShardArrays {
    ShardArray* whole;  // (count) as an unsharded optimizer has them
    int count, ranks;
    int64_t* bytes;    // (count, ranks)
    const void** own;  // (count) this rank's data
};

// Lists the arrays of all ranks; `own` are this rank's, which are all if nothing is sharded. Launches are in the
// arena's order, so an array that an earlier rank lacks comes after those that it has.
inline ShardArrays shard_arrays(Shard* s, const ShardArray* own, int count) {
    assert(count <= SHARD_ARRAYS);
    ShardArray mine[SHARD_ARRAYS] = {};
    double most = count;  // arrays of a rank
    bool split = shard_splits(s, SHARD_STATES);
    ShardArrays all = {(ShardArray*)memory_zero(SHARD_ARRAYS, sizeof(ShardArray)), 0, split ? s->comm.world : 1,
                       nullptr, nullptr};
    all.bytes = (int64_t*)memory_zero((size_t)SHARD_ARRAYS * all.ranks, sizeof(int64_t));
    all.own = (const void**)memory_zero(SHARD_ARRAYS, sizeof(void*));
    memcpy(mine, own, (size_t)count * sizeof(ShardArray));
    if (split) launch_all_reduce(s->comm.launch, &most, 1, LAUNCH_MAX);
    const int64_t rows = (int64_t)most;
    ShardArray* tables = (ShardArray*)memory_zero((size_t)(all.ranks * rows), sizeof(ShardArray));
    if (split) launch_gather(s->comm.launch, mine, rows * (int64_t)sizeof(ShardArray), tables);
    if (!split) memcpy(tables, mine, (size_t)rows * sizeof(ShardArray));
    for (int r = 0; r < all.ranks; r++) {
        const ShardArray* table = &tables[r * rows];
        for (int i = 0; i < rows && table[i].name[0]; i++) {
            int at = 0;
            while (at < all.count && strcmp(all.whole[at].name, table[i].name) != 0) at++;
            assert(at < SHARD_ARRAYS);
            if (at == all.count) all.whole[all.count++] = table[i], all.whole[at].elements = 0;
            all.whole[at].elements += table[i].elements;
            all.bytes[at * all.ranks + r] = table[i].elements * table[i].element_bytes;
            if (!split || r == s->comm.rank) all.own[at] = table[i].data;
        }
    }
    free(tables);
    return all;
}

// Copies bytes `at` to at + bytes of array i to `host` on rank 0, part by part from the ranks that keep them.
inline void shard_arrays_read(Shard* s, const ShardArrays* all, int i, int64_t at, int64_t bytes, void* host) {
    const int64_t piece = shard_staging_bytes(s);
    int64_t begin = 0;
    for (int r = 0; r < all->ranks; r++) {
        const int64_t end = begin + all->bytes[i * all->ranks + r];
        const Overlap part = shard_overlap(at, at + bytes, begin, end);
        for (int64_t from = part.begin; from < part.end; from += piece) {
            const int64_t count = part.end - from < piece ? part.end - from : piece;
            shard_to_first(s, (char*)host + (from - at), (const char*)all->own[i] + (from - begin), count, r, false);
        }
        begin = end;
    }
}

inline void shard_arrays_free(ShardArrays* all) {
    free(all->whole), free(all->bytes), free(all->own);
}
