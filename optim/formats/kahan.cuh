// Weights in bf16, with their rounding error kept beside them in bf16 (Kahan's compensated sum; Zamirai et
// al., arXiv 2010.06192). Updates smaller than a step of the weights add up in the compensation until they make one
// step.
//     x = w + k                                    the value that the update reads and changes
//     w = nearest(x), k = bf16(x - w)              x - w is exact
// k is at most half a step of w and has 8 significant bits: |w + k - x| <= 2^-8 |x - w|, which is at most 2^-17 |x|
// (2^-134 if k is subnormal), and far less if x is near w. An infinite w has k = 0. The model sees w.
// Bytes an element: 4.
#pragma once
#include "elementwise.cuh"
#include "bf16.cuh"

EMBED_SOURCE

struct Kahan : StorageFunctions<Kahan> {
    typedef Elementwise<Bf16, NEAREST> Weight;
    typedef Kahan Nearest;
    static constexpr StreamInfo STREAM[3] = {Weight::STREAM[0], {"compensation", "BF16", 16, 1}};

    static OPTIM_INLINE Streams compensation(const Streams& streams) { return {streams.scales, nullptr}; }

    template <int N>
    static OPTIM_INLINE void get(const Streams& streams, int first, float* x, const NoiseKey& key) {
        float k[N];
        Weight::get<N>(streams, first, x, key);
        Weight::get<N>(compensation(streams), first, k, key);
        OPTIM_UNROLL
        for (int i = 0; i < N; i++) x[i] = exact_add(x[i], k[i]);
    }

    template <int N>
    static OPTIM_INLINE void put(const Streams& streams, int first, const float* x, const NoiseKey& key) {
        float k[N];
        OPTIM_UNROLL
        for (int i = 0; i < N; i++) {
            float w = Bf16::decode(Bf16::encode(x[i]));
            k[i] = is_finite(w) ? exact_add(x[i], -w) : 0.0f;
        }
        Weight::put<N>(streams, first, x, key);
        Weight::put<N>(compensation(streams), first, k, key);
    }

    static OPTIM_INLINE void view(const Streams& streams, int first, float* x, int n) {
        Weight::load(streams, first, x, n, NoiseKey{});
    }
};
