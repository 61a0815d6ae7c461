// The parts that both classifier kernels share.
#pragma once
#include "common.cuh"
#include "fp8_codes.cuh"

// The noise of a row, from the maximum and the sum of its exponentials.
__device__ inline uint32_t classifier_noise(float maximum, float sum) {
    return fp8_noise(__float_as_uint(sum) ^ fp8_noise(__float_as_uint(maximum)));
}

// The gradients d of the logits from v on of a row that begins at `at`: to their codes, or as X to `place`.
template <typename X, int size>
__device__ inline void classifier_put(X* place, const Fp8Codes& codes, int64_t at, int v, const float (&d)[size],
                                      float unit, uint32_t noise) {
    if constexpr (std::is_same_v<X, bf16>) {
        if (codes.rows) {
            *(uint2*)(codes.rows + at + v) = fp8_codes_random(d, unit, noise + v);
            return;
        }
    }
    store_vec(place, round_vec<X>(d));
}
