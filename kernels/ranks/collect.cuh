// Rank 0 gathers what each rank of a sharded run keeps (shard.cuh), for a checkpoint, which does not depend on the
// number of ranks. All ranks call each of these functions; those other than 0 only send their parts. Each byte goes to
// rank 0 once and then to the host, through a staging buffer.
#pragma once
#include "../../data/files.h"
#include "shard.cuh"

// Copies bytes of rank `from`, from the device's memory or the host's, to rank 0's host memory: between nodes to the
// first node, and there to rank 0. Ranks other than `from` need no `data`, and ranks other than 0 no `host`.
inline void shard_to_first(Shard* s, char* host, const char* data, int64_t bytes, int from, bool on_host) {
    Comm* c = &s->comm;
    const Device* dev = c->dev;
    const bool first = c->rank == 0, sender = c->rank == from;
    const int64_t most = shard_staging_bytes(s);
    if (from == 0 && first && on_host && host != data) memcpy(host, data, (size_t)bytes);
    if (from == 0 && first && !on_host) copy_to_host(dev, host, data, bytes);
    for (int64_t at = 0; at < bytes && from > 0; at += most) {
        const int64_t part = bytes - at < most ? bytes - at : most;
        // States may be in pinned memory of the host (optim/model/offload.cu), so all passes through device memory.
        if (sender) copy_to_device(dev, s->incoming, data + at, part);
        for (Link* link : {&c->net, &c->node}) {
            const bool between = link == &c->net;
            const int source = between ? from / c->node.world : from % c->node.world;
            const bool takes_part = source > 0 && (between ? c->node.rank == from % c->node.world : c->net.rank == 0);
            memset(s->sends, 0, 2 * (size_t)c->world * sizeof(CommPiece));
            if (takes_part && link->rank == source) s->sends[0] = {s->incoming, part};
            if (takes_part && link->rank == 0) s->receives[source] = {s->incoming, part};
            comm_after_device(c);
            comm_exchange(c, link, s->sends, s->receives);
            device_after_comm(c);
        }
        if (first) copy_to_host(dev, host + at, s->incoming, part);
        if (sender) device_sync(dev);
    }
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

// Copies bytes begin to end - 1 of a tensor, whose tiles from tile `first` of the arena on have `tile_bytes` bytes, to
// rank 0's host memory from the ranks that own them. `whole`: the owner of the first tile has all of them. `data` is
// where byte 0 lies, or would lie, on this rank; it is NULL if the rank's bytes are in its own `host` memory.
inline void shard_collect(Shard* s, char* host, const char* data, int64_t first, int64_t tile_bytes, bool whole,
                          int64_t begin, int64_t end) {
    for (int64_t at = begin, next; at < end; at = next) {
        int64_t tiles;
        const int position = slices_owner(&s->slices, first + (whole ? 0 : at / tile_bytes), &tiles);
        const int nodes = s->comm.net.world, owner = position % nodes * s->comm.node.world + position / nodes;
        next = whole ? end : (at / tile_bytes + tiles) * tile_bytes;
        if (next > end) next = end;
        shard_to_first(s, host + (at - begin), data ? data + at : host + (at - begin), next - at, owner, !data);
    }
}
