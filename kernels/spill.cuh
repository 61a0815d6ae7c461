// The residual stream between the layers in host memory, from the forward pass to the backward pass (--offload
// residuals). With --recompute block it is all that a layer keeps.
//
// Three places of device memory take turns: r(l), the stream into layer l, has place l % 3. When r(l) is complete, it
// is copied to the host while layer l computes, and its place is written again three layers later. The last three stay.
// In the backward pass, as soon as layer l is done, r(l - 3) comes back into its place, while layers l - 1 and l - 2
// compute. Each direction has its own stream, and events order the streams: the host never waits. On the CPU both
// memories are the machine's, and copies are memcpy's, in the same order. The bits are the same as without spilling.
//
//     host memory    (L - 2) B T C numbers of the activations' type, pinned, instead of as much device memory
//     cost           B T C numbers a layer each way, hidden behind the layer at 12 B T C^2 multiplications and more
#pragma once
#include "common.cuh"

constexpr int SPILL_PLACES = 3;

struct Spill {
    const Device* dev;
    int layers;
    int64_t bytes;  // of one r(l)
    char* host;     // (layers + 1 - SPILL_PLACES, bytes)
    // A GPU has streams for the copies, an event for the device's stream, and one for each place's last copy.
    cudaStream_t in, out;
    cudaEvent_t ready, left[SPILL_PLACES], back[SPILL_PLACES];
};

inline int64_t spill_bytes(int layers, int64_t bytes) {
    return layers < SPILL_PLACES ? 0 : (layers + 1 - SPILL_PLACES) * bytes;
}

// Returns how many places device memory has for the streams into all layers and out of the last one.
inline int spill_places(int layers) {
    return layers + 1 < SPILL_PLACES ? layers + 1 : SPILL_PLACES;
}

inline void spill_open(Spill* s, const Device* dev, int layers, int64_t bytes) {
    *s = {};
    s->dev = dev, s->layers = layers, s->bytes = bytes;
    s->host = (char*)host_alloc(dev, spill_bytes(layers, bytes), "the residual stream");
    if (!dev->gpu) return;
    check(cudaStreamCreateWithFlags(&s->in, cudaStreamNonBlocking));
    check(cudaStreamCreateWithFlags(&s->out, cudaStreamNonBlocking));
    check(cudaEventCreateWithFlags(&s->ready, cudaEventDisableTiming));
    for (int i = 0; i < SPILL_PLACES; i++) {
        check(cudaEventCreateWithFlags(&s->left[i], cudaEventDisableTiming));
        check(cudaEventCreateWithFlags(&s->back[i], cudaEventDisableTiming));
    }
}

inline void spill_close(Spill* s) {
    if (!s->dev) return;
    if (s->dev->gpu) {
        for (cudaStream_t stream : {s->in, s->out}) {
            check(cudaStreamSynchronize(stream));
            check(cudaStreamDestroy(stream));
        }
        check(cudaEventDestroy(s->ready));
        for (int i = 0; i < SPILL_PLACES; i++) {
            check(cudaEventDestroy(s->left[i]));
            check(cudaEventDestroy(s->back[i]));
        }
    }
    host_free(s->dev, s->host);
}

// True if r(l) leaves the device.
inline bool spill_leaves(const Spill* s, int l) {
    return l + SPILL_PLACES <= s->layers;
}

// Copies on `stream`, after the work that is queued on the device's stream so far.
inline void spill_copy(const Spill* s, cudaStream_t stream, cudaEvent_t over, void* to, const void* from) {
    if (!s->dev->gpu) {
        memcpy(to, from, (size_t)s->bytes);
        return;
    }
    check(cudaEventRecord(s->ready, s->dev->stream));
    check(cudaStreamWaitEvent(stream, s->ready, 0));
    check(cudaMemcpyAsync(to, from, (size_t)s->bytes, cudaMemcpyDefault, stream));
    check(cudaEventRecord(over, stream));
}

// The four calls around the use of r(l), which is at `at`; with NULL they do nothing. This one before r(l) is written.
inline void spill_room(const Spill* s, int l) {
    if (!s || l < SPILL_PLACES || !s->dev->gpu) return;
    check(cudaStreamWaitEvent(s->dev->stream, s->left[l % SPILL_PLACES], 0));
}

// r(l) is complete, and will not be written again.
inline void spill_written(const Spill* s, int l, const void* at) {
    if (!s || !spill_leaves(s, l)) return;
    spill_copy(s, s->out, s->left[l % SPILL_PLACES], s->host + l * s->bytes, at);
}

// Before r(l) is read in the backward pass, which takes the layers in falling order.
inline void spill_need(const Spill* s, int l) {
    if (!s || !spill_leaves(s, l) || !s->dev->gpu) return;
    check(cudaStreamWaitEvent(s->dev->stream, s->back[l % SPILL_PLACES], 0));
}

// r(l) has been read for the last time.
inline void spill_done(const Spill* s, int l, void* at) {
    if (!s || l < SPILL_PLACES) return;
    spill_copy(s, s->in, s->back[l % SPILL_PLACES], at, s->host + (l - SPILL_PLACES) * s->bytes);
}
