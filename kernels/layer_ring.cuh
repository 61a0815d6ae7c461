// Slots of device memory that the layers of a model take in turn: item i has slot i % slots. The owner of the memory
// fills a slot before an item is read, and drains it after the item was written, in streams of the ring's own, so that
// copies in either direction run while the device's stream computes. Events order the streams, and the host never
// waits. On the CPU all work is done in the order of the calls.
//
//     ring_fetch(item)       true if the item is not there: queue its copies with ring_copy(RING_IN), then ring_filled
//     ring_read(item)        before the device's stream reads it
//     ring_write(item)       before the device's stream writes into its slot, where another item may still be draining
//     ring_after_stream(out) after it was written: queue its copies with ring_copy(RING_OUT), then ring_drained(item)
//
// Users: decoded weights (optim/model/decode.cu), made on the device's stream, and gathered ones (ranks/shard.cuh),
// which arrive on the exchanges' stream and are ordered by events of their own, need only ring_fetch and ring_forget;
// states in host memory (optim/model/offload.cu) and the residual stream (spill.cuh) are filled and drained.
#pragma once
#include "common.cuh"

// Returns pinned host memory of --offload for `what` (for the error message), 256-byte aligned, not initialised; NULL
// for 0 bytes. The caller frees it with host_free. Its bytes are added to *counted.
inline void* host_alloc(const Device* dev, int64_t bytes, const char* what, int64_t* counted) {
    void* pointer = nullptr;
    bytes = aligned_bytes(bytes);
    *counted += bytes;
    if (bytes == 0) return nullptr;
    if (dev->imagined) return IMAGINED_MEMORY;
    if (!dev->gpu) return memory_aligned(256, (size_t)bytes);
    if (cudaMallocHost(&pointer, (size_t)bytes) == cudaSuccess) return pointer;
    user_error(
        "--offload: the system does not pin %.2f GiB of memory for %s; free memory, raise ulimit -l, or leave "
        "--offload out",
        (double)bytes / (1 << 30), what);
}

inline void host_free(const Device* dev, void* pointer) {
    if (dev->imagined) return;
    if (dev->gpu && pointer) {
        check(cudaFreeHost(pointer));
    } else {
        free(pointer);
    }
}

constexpr int RING_SLOTS = 3;  // at most
constexpr int64_t RING_NONE = -1;

struct LayerRing {
    const Device* dev;
    int slots;
    int64_t item[RING_SLOTS];  // that a slot has, or is about to get; RING_NONE: none
    bool streams;              // the streams and events exist
    cudaStream_t in, out;
    // `ready`: what is queued on the device's stream so far; the others belong to the last copies of a slot.
    cudaEvent_t ready, filled[RING_SLOTS], drained[RING_SLOTS];
};

// Nothing is there: what the items were made of has changed.
inline void ring_forget(LayerRing* r) {
    for (int64_t& item : r->item) item = RING_NONE;
}

// `copies`: the ring gets streams for them.
inline void ring_open(LayerRing* r, const Device* dev, int slots, bool copies) {
    *r = {};
    r->dev = dev, r->slots = slots, r->streams = copies && dev->gpu && !dev->imagined;
    ring_forget(r);
    if (!r->streams) return;
    for (cudaStream_t* stream : {&r->in, &r->out}) check(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
    check(cudaEventCreateWithFlags(&r->ready, cudaEventDisableTiming));
    for (int s = 0; s < slots; s++) {
        for (cudaEvent_t* event : {&r->filled[s], &r->drained[s]}) {
            check(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
        }
    }
}

// Waits for the copies.
inline void ring_close(LayerRing* r) {
    if (!r->streams) return;
    for (cudaStream_t stream : {r->in, r->out}) {
        check(cudaStreamSynchronize(stream));
        check(cudaStreamDestroy(stream));
    }
    check(cudaEventDestroy(r->ready));
    for (int s = 0; s < r->slots; s++) {
        for (cudaEvent_t event : {r->filled[s], r->drained[s]}) check(cudaEventDestroy(event));
    }
}

inline int ring_slot(const LayerRing* r, int64_t item) {
    return (int)(item % r->slots);
}

// Makes copies of a ring wait for what is queued on the device's stream so far.
inline void ring_after_stream(const LayerRing* r, cudaStream_t copies) {
    if (r->streams) stream_after(copies, r->dev->stream, r->ready);
}

// Gives the item its slot or, if it is `wide`, all slots. Returns true unless it is there already: the caller then
// fills it. The slot's last item has been read by what is queued so far, and drained.
inline bool ring_fetch(LayerRing* r, int64_t item, bool wide = false) {
    const int first = wide ? 0 : ring_slot(r, item);
    if (r->item[first] == item) return false;
    const int64_t had = r->item[first];
    for (int s = 0; s < r->slots; s++) {
        if (r->item[s] == had) r->item[s] = RING_NONE;  // a wide item leaves all slots
        if (wide || s == first) r->item[s] = item;
    }
    ring_after_stream(r, r->in);
    if (r->streams) check(cudaStreamWaitEvent(r->in, r->drained[first], 0));
    return true;
}

enum RingWay { RING_IN, RING_OUT };

inline void ring_copy(const LayerRing* r, RingWay way, void* to, const void* from, int64_t bytes) {
    copy_on(r->dev, way == RING_IN ? r->in : r->out, to, from, bytes);
}

inline void ring_filled(const LayerRing* r, int64_t item) {
    if (r->streams) check(cudaEventRecord(r->filled[ring_slot(r, item)], r->in));
}

inline void ring_read(const LayerRing* r, int64_t item) {
    if (r->streams) check(cudaStreamWaitEvent(r->dev->stream, r->filled[ring_slot(r, item)], 0));
}

inline void ring_write(const LayerRing* r, int64_t item) {
    if (r->streams) check(cudaStreamWaitEvent(r->dev->stream, r->drained[ring_slot(r, item)], 0));
}

inline void ring_drained(const LayerRing* r, int64_t item) {
    if (r->streams) check(cudaEventRecord(r->drained[ring_slot(r, item)], r->out));
}

// Makes the device's stream wait for all copies that drain slots.
inline void ring_settle(const LayerRing* r) {
    for (int s = 0; r->streams && s < r->slots; s++) check(cudaStreamWaitEvent(r->dev->stream, r->drained[s], 0));
}
