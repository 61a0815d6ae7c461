// Weights kept twice: a copy in a narrow format that the matmuls read, and an fp32 master that the update reads and
// writes. The copy is the master rounded to nearest, written in the same pass, so no update is ever lost.
// Bytes an element: the narrow format's and 4.
#pragma once
#include "elementwise.cuh"
#include "fp32.cuh"

EMBED_SOURCE

template <class Format>
struct WithMaster {
    typedef Elementwise<Format, NEAREST> Copy;
    typedef Elementwise<Fp32, NEAREST> Master;
    static constexpr StreamInfo STREAM[2] = {Copy::STREAM[0], {"master", "F32", 32, 1}};

    static OPTIM_INLINE void load(const Streams& streams, int64_t first, float* x, int n) {
        Master::load({streams.extra, nullptr}, first, x, n);
    }

    static OPTIM_INLINE void set(const Streams& streams, int64_t first, const float* x, int n) {
        Master::set({streams.extra, nullptr}, first, x, n);
        Copy::set(streams, first, x, n);
    }

    static OPTIM_INLINE void store(const Streams& streams, int64_t first, const float* x, int n, const NoiseKey&) {
        set(streams, first, x, n);
    }

    static OPTIM_INLINE void view(const Streams& streams, int64_t first, float* x, int n) {
        Copy::load(streams, first, x, n);
    }
};
