// The residual stream between the layers in host memory, from the forward pass to the backward pass (--offload
// residuals). With --recompute block it is all that a layer keeps.
//
// Three places of device memory take turns: r(l), the stream into layer l, has place l % 3. When r(l) is complete, it
// is copied to the host while layer l computes, and its place is written again three layers later. The last three stay.
// In the backward pass, as soon as layer l is done, r(l - 3) comes back into its place, while layers l - 1 and l - 2
// compute. The places are a ring (layer_ring.cuh). The bits are the same as without spilling.
//
//     host memory    (L - 2) B T C numbers of the activations' type, pinned, instead of as much device memory
//     cost           B T C numbers a layer each way, hidden behind the layer at 12 B T C^2 multiplications and more
#pragma once
#include "layer_ring.cuh"

constexpr int SPILL_PLACES = 3;

struct Spill {
    LayerRing ring;  // item l is r(l)
    int layers;
    int64_t bytes;  // of one r(l)
    char* host;     // (layers + 1 - SPILL_PLACES, bytes)
};

inline int64_t spill_bytes(int layers, int64_t bytes) {
    return layers < SPILL_PLACES ? 0 : (layers + 1 - SPILL_PLACES) * bytes;
}

// Adds the bytes of host memory to *counted.
inline void spill_open(Spill* s, const Device* dev, int layers, int64_t bytes, int64_t* counted) {
    ring_open(&s->ring, dev, SPILL_PLACES, true);
    s->layers = layers, s->bytes = bytes;
    s->host = (char*)host_alloc(dev, spill_bytes(layers, bytes), "the residual stream", counted);
}

inline void spill_close(Spill* s) {
    if (!s->ring.dev) return;
    ring_close(&s->ring);
    host_free(s->ring.dev, s->host);
}

inline bool spill_leaves(const Spill* s, int l) {
    return l + SPILL_PLACES <= s->layers;
}

// The three calls around the use of r(l), which is at `at`; with NULL they do nothing. The forward pass makes this one
// before it writes r(l): the copy of what had its place is awaited.
inline void spill_room(const Spill* s, int l) {
    if (s && l >= SPILL_PLACES) ring_write(&s->ring, l);
}

// The forward pass makes this one when r(l) is complete: r(l) leaves the device, unless it is one of the last.
inline void spill_out(const Spill* s, int l, const void* at) {
    if (s && spill_leaves(s, l)) {
        ring_after_stream(&s->ring, s->ring.out);
        ring_copy(&s->ring, RING_OUT, s->host + l * s->bytes, at, s->bytes);
        ring_drained(&s->ring, l);
    }
}

// The backward pass makes this one when it has read r(l) for the last time: r(l - SPILL_PLACES), whose copy to the host
// the writer of r(l) waited for, comes back, and r(l - 1) may be read.
inline void spill_in(const Spill* s, int l, void* at) {
    if (s && l >= SPILL_PLACES) {
        ring_after_stream(&s->ring, s->ring.in);
        ring_copy(&s->ring, RING_IN, at, s->host + (l - SPILL_PLACES) * s->bytes, s->bytes);
        ring_filled(&s->ring, l - SPILL_PLACES);
    }
    if (s && l > 0 && spill_leaves(s, l - 1)) ring_read(&s->ring, l - 1);
}
