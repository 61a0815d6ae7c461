// Noise for stochastic rounding: random bits that are a function of (seed, step, stream, element) and of nothing else,
// so that the CPU, any number of GPUs, any launch shape and a resumed run draw the same ones.
// The generator is Philox4x32-10, the toolkit's stateless call. One call gives 128 bits, 16 for each of 8 consecutive
// elements; `element` is the index in the arena, counted over the whole model.
//     key = (seed low, seed high), counter = (element / 8 low, element / 8 high, stream, step)
#pragma once
#include "float.cuh"

#define QUALIFIERS static __host__ __device__ __forceinline__
#include <curand_philox4x32_x.h>
#undef QUALIFIERS

EMBED_SOURCE

constexpr int NOISE_ELEMENTS = 8;  // served by one call

enum NoiseStream { NOISE_WEIGHTS, NOISE_M, NOISE_V, NOISE_SLOW };

struct NoiseKey {
    uint64_t seed;
    uint32_t step;
    uint32_t stream;
    int64_t element = 0;           // index in the arena of what the storage's functions call element 0
    const float* roots = nullptr;  // on a GPU: the roots of the values to store, where the update has taken them
};

struct Noise {
    uint32_t word[4];
};

// The noise of elements first .. first + 7 after key.element; both are multiples of 8.
OPTIM_INLINE Noise noise_draw(const NoiseKey& key, int first) {
    uint64_t call = ((uint64_t)key.element + (uint64_t)first) / NOISE_ELEMENTS;
    uint4 counter = {(uint32_t)call, (uint32_t)(call >> 32), key.stream, key.step};
    uint2 seed = {(uint32_t)key.seed, (uint32_t)(key.seed >> 32)};
    uint4 bits = curand_Philox4x32_10(counter, seed);
    return {{bits.x, bits.y, bits.z, bits.w}};
}

// 16 random bits for lane 0 .. 7.
OPTIM_INLINE uint32_t noise_lane(const Noise& noise, int lane) {
    return lane % 2 ? noise.word[lane / 2] >> 16 : noise.word[lane / 2] & 0xffffu;
}
