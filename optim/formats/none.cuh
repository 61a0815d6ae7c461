// The storage of a state that a rule does not keep, such as Lion's second moment. It reads as 0, ignores stores and
// takes no bytes.
#pragma once
#include "elementwise.cuh"

EMBED_SOURCE

struct None : StorageFunctions<None> {
    static constexpr StreamInfo STREAM[3] = {};
    static constexpr bool TAKES_ORDER = true;

    template <int N>
    static OPTIM_INLINE void get(const Streams&, int, float* x, const NoiseKey&) {
        OPTIM_UNROLL
        for (int i = 0; i < N; i++) x[i] = 0.0f;
    }

    template <int N>
    static OPTIM_INLINE void put(const Streams&, int, const float*, const NoiseKey&) {}
};
