// Exchange between ranks of one machine by the GPUs' DMA copy engines. They cost matrix products some memory bandwidth,
// but no multiprocessors, which kernels that wait for another GPU, as NCCL's do, would take from them.
//
// Each rank has a mailbox that all can write (CUDA IPC): two slots for every other rank, and counters. A sender copies
// a part into its slot at the receiver and increments the receiver's `arrived`; the receiver reads it there, or copies
// it to its destination, and increments the sender's `taken`. Streams wait for these counters, the host does not.
// Memory: 2 * PEER_PART for every other rank.
#pragma once
#include "../common.cuh"
#include "launch.h"

constexpr int64_t PEER_PART = 16 << 20;  // bytes that are sent at a time
constexpr int PEER_SLOTS = 2;
constexpr int PEER_MAX = 64;  // ranks of a machine

struct PeerCounts {
    uint32_t arrived[PEER_MAX], taken[PEER_MAX];  // parts, by the other rank
};

struct Peers {
    int rank, world;
    char* mailbox[PEER_MAX];  // as this rank sees them: counts, then slots (world - 1, PEER_SLOTS, PEER_PART)
    uint32_t sent[PEER_MAX], received[PEER_MAX];  // parts that this rank has queued
    cudaStream_t out;                             // what is sent; what is received is on the caller's stream
    cudaEvent_t event;
    unsigned wait_flags;  // of wait_value
    CUresult (*wait_value)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    CUresult (*write_value)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
};

// A rank sends this card to the others of its node, so that they can open its mailbox.
struct PeerCard {
    cudaIpcMemHandle_t handle;
    int good;
};

inline int64_t peer_bytes(int world) {
    return (int64_t)sizeof(PeerCounts) + (world - 1) * PEER_SLOTS * PEER_PART;
}

inline PeerCounts* peer_counts(const Peers* peers, int rank) {
    return (PeerCounts*)peers->mailbox[rank];
}

// Returns the slot for part number `count` from rank `from` in the mailbox of another rank `at`.
inline char* peer_slot(const Peers* peers, int at, int from, uint32_t count) {
    int other = (from - at + peers->world) % peers->world - 1;
    return peers->mailbox[at] + sizeof(PeerCounts) + (other * PEER_SLOTS + count % PEER_SLOTS) * PEER_PART;
}

// Makes the stream wait until *count is at least `min`, in cyclic order: counts start anew after 2^32 parts. Work that
// is queued later reads what the sender wrote before it raised the counter: the wait flushes if the GPU can; otherwise
// the fence in the sender's write_value orders the writes.
inline void peer_wait(const Peers* peers, cudaStream_t stream, const uint32_t* count, uint32_t min) {
    check(peers->wait_value(stream, (CUdeviceptr)count, min, peers->wait_flags));
}

inline void peer_raise(const Peers* peers, cudaStream_t stream, const uint32_t* count, uint32_t value) {
    check(peers->write_value(stream, (CUdeviceptr)count, value, 0));
}

// Sends the part of `data` that begins at byte `at` to rank `to`; beyond the end it does nothing.
inline void peer_send(Peers* peers, const void* data, int64_t bytes, int64_t at, int to) {
    int64_t part = bytes - at < PEER_PART ? bytes - at : PEER_PART;
    if (part <= 0) return;
    uint32_t count = peers->sent[to]++;
    peer_wait(peers, peers->out, &peer_counts(peers, peers->rank)->taken[to], count + 1 - PEER_SLOTS);
    check(cudaMemcpyAsync(peer_slot(peers, to, peers->rank, count), (const char*)data + at, (size_t)part,
                          cudaMemcpyDeviceToDevice, peers->out));
    peer_raise(peers, peers->out, &peer_counts(peers, to)->arrived[peers->rank], count + 1);
}

// Returns the slot with the next part from a rank. Work that is queued on the stream before peer_release may read it.
inline char* peer_await(Peers* peers, cudaStream_t stream, int from) {
    const uint32_t count = peers->received[from]++;
    peer_wait(peers, stream, &peer_counts(peers, peers->rank)->arrived[from], count + 1);
    return peer_slot(peers, peers->rank, from, count);
}

inline void peer_release(const Peers* peers, cudaStream_t stream, int from) {
    peer_raise(peers, stream, &peer_counts(peers, from)->taken[peers->rank], peers->received[from]);
}

inline void peer_receive(Peers* peers, cudaStream_t stream, void* data, int64_t bytes, int64_t at, int from) {
    int64_t part = bytes - at < PEER_PART ? bytes - at : PEER_PART;
    if (part <= 0) return;
    const char* slot = peer_await(peers, stream, from);
    check(cudaMemcpyAsync((char*)data + at, slot, (size_t)part, cudaMemcpyDeviceToDevice, stream));
    peer_release(peers, stream, from);
}

inline bool peers_bind(Peers* peers) {
    return driver_bind("cuStreamWaitValue32", &peers->wait_value) &&
           driver_bind("cuStreamWriteValue32", &peers->write_value);
}

// True if a stream can write and wait for counters, which older drivers and some virtual GPUs refuse. `count` stays 0.
inline bool peers_probe(const Peers* peers, cudaStream_t stream, const uint32_t* count) {
    return peers->write_value(stream, (CUdeviceptr)count, 0, 0) == CUDA_SUCCESS &&
           peers->wait_value(stream, (CUdeviceptr)count, 0, peers->wait_flags) == CUDA_SUCCESS;
}

inline unsigned peers_wait_flags(int can_flush) {
    return CU_STREAM_WAIT_VALUE_GEQ | (can_flush ? (unsigned)CU_STREAM_WAIT_VALUE_FLUSH : 0u);
}

// Makes this rank's mailbox, and returns what the others need to write to it.
inline PeerCard peers_begin(Peers* peers, cudaStream_t stream, int rank, int world) {
    PeerCard card = {};
    int device, can_flush;
    check(cudaGetDevice(&device));
    check(cudaDeviceGetAttribute(&can_flush, cudaDevAttrCanFlushRemoteWrites, device));
    *peers = {};
    peers->wait_flags = peers_wait_flags(can_flush);
    peers->rank = rank, peers->world = world <= PEER_MAX ? world : 0;
    card.good = peers->world > 0 && peers_bind(peers) &&
                cudaMalloc((void**)&peers->mailbox[rank], (size_t)peer_bytes(world)) == cudaSuccess &&
                cudaIpcGetMemHandle(&card.handle, peers->mailbox[rank]) == cudaSuccess;
    if (card.good) check(cudaMemsetAsync(peers->mailbox[rank], 0, sizeof(PeerCounts), stream));
    card.good = card.good && peers_probe(peers, stream, peer_counts(peers, rank)->arrived);
    if (card.good) check(cudaStreamSynchronize(stream));
    cudaGetLastError();  // clears the error of a refused call
    return card;
}

// Opens the mailbox of another rank of this machine; false where the GPUs cannot reach each other.
inline bool peers_connect(Peers* peers, const PeerCard* other, int rank) {
    bool opened = cudaIpcOpenMemHandle((void**)&peers->mailbox[rank], other->handle, cudaIpcMemLazyEnablePeerAccess) ==
                  cudaSuccess;
    if (!opened) peers->mailbox[rank] = nullptr, cudaGetLastError();
    return opened;
}

// Makes a stream of a higher priority than that of the products: exchanges are needed soon and take few
// multiprocessors. `event` orders it.
inline void exchange_stream(cudaStream_t* stream, cudaEvent_t* event) {
    int low, high;
    check(cudaDeviceGetStreamPriorityRange(&low, &high));
    check(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, high));
    check(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
}

// Closes the mailboxes of the others and, when all ranks have done that, frees the own one.
inline void peers_close(Peers* peers, const Launch* launch) {
    for (int r = 0; r < peers->world; r++) {
        if (r != peers->rank && peers->mailbox[r]) check(cudaIpcCloseMemHandle(peers->mailbox[r]));
    }
    launch_any(launch, false);
    if (peers->world > 0 && peers->mailbox[peers->rank]) check(cudaFree(peers->mailbox[peers->rank]));
    if (peers->out) check(cudaStreamDestroy(peers->out));
    if (peers->event) check(cudaEventDestroy(peers->event));
    free(peers);
}
