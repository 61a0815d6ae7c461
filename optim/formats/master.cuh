// Weights that are kept twice: a copy in a narrow storage, which the matmuls read, and an fp32 master, which the update
// reads and writes. The same pass writes the copy, the master rounded to nearest, so no update is ever lost. The scales
// of an fp8 copy are those of the new master.
// Bytes an element: those of the narrow storage, and 4.
#pragma once
#include "elementwise.cuh"
#include "fp32.cuh"

EMBED_SOURCE

template <class Copy>
struct WithMaster : StorageFunctions<WithMaster<Copy>> {
    typedef Elementwise<Fp32, NEAREST> Master;
    static constexpr bool SCALED = Copy::STREAM[1].bits > 0;  // the copy needs `scales`
    static constexpr StreamInfo MASTER = {"master", "F32", 32, 1}, NOTHING = {};
    static constexpr StreamInfo STREAM[3] = {
        only_written(Copy::STREAM[0]), SCALED ? only_written(Copy::STREAM[1]) : MASTER, SCALED ? MASTER : NOTHING};

    static constexpr bool HAS_SPANS = Copy::HAS_SPANS;

    static OPTIM_INLINE Streams master(const Streams& streams) {
        return {SCALED ? streams.third : streams.scales, nullptr};
    }

    template <int N>
    static OPTIM_INLINE void get(const Streams& streams, int first, float* x, const NoiseKey& key) {
        Master::get<N>(master(streams), first, x, key);
    }

    static OPTIM_INLINE void set(const Streams& streams, int first, const float* x, int n) {
        Master::set(master(streams), first, x, n);
        Copy::set(streams, first, x, n);
    }

    static OPTIM_INLINE void store(const Streams& streams, int first, const float* x, int n, const NoiseKey&) {
        set(streams, first, x, n);
    }

    static OPTIM_INLINE void view(const Streams& streams, int first, float* x, int n) {
        Copy::view(streams, first, x, n);
    }

    static OPTIM_INLINE void measure(const Streams& streams, int first, const float* x, int n) {
        Copy::measure(streams, first, x, n);
    }
};
