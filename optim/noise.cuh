// Noise for stochastic rounding: random bits that are a function of (seed, step, stream, element) and of nothing else,
// so that the CPU, any number of GPUs, any launch shape and a resumed run draw the same ones.
// The generator is Philox4x32-7 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011;
// with 7 rounds it passes all of BigCrush; the customary 10 take 12 instructions more). One call gives 128 bits,
// 16 for each of 8 consecutive elements; `element` is the index in the arena, counted over the whole model.
//     key = (seed low, seed high), counter = (element / 8 low, element / 8 high, stream, step)
#pragma once
#include "float.cuh"

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

// On a GPU one instruction; to C's product of widened numbers the compiler adds that of their upper halves, zero.
OPTIM_INLINE uint64_t wide_product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    uint64_t product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
#else
    return (uint64_t)a * b;
#endif
}

// A round: each half of the counter is multiplied, and the products' upper halves are mixed with the other's rest and
// the key, which itself steps by constants.
OPTIM_INLINE Noise philox4x32(Noise counter, uint32_t key0, uint32_t key1, int rounds) {
    uint32_t* c = counter.word;
    OPTIM_UNROLL
    for (int i = 0; i < rounds; i++) {
        uint64_t product0 = wide_product(0xD2511F53u, c[0]), product1 = wide_product(0xCD9E8D57u, c[2]);
        c[0] = (uint32_t)(product1 >> 32) ^ c[1] ^ key0;
        c[1] = (uint32_t)product1;
        c[2] = (uint32_t)(product0 >> 32) ^ c[3] ^ key1;
        c[3] = (uint32_t)product0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

// The noise of elements first .. first + 7 after key.element; both are multiples of 8.
OPTIM_INLINE Noise noise_draw(const NoiseKey& key, int first) {
    uint64_t call = ((uint64_t)key.element + (uint64_t)first) / NOISE_ELEMENTS;
    Noise counter = {{(uint32_t)call, (uint32_t)(call >> 32), key.stream, key.step}};
    return philox4x32(counter, (uint32_t)key.seed, (uint32_t)(key.seed >> 32), 7);
}

// 16 random bits for lane 0 .. 7.
OPTIM_INLINE uint32_t noise_lane(const Noise& noise, int lane) {
    return lane % 2 ? noise.word[lane / 2] >> 16 : noise.word[lane / 2] & 0xffffu;
}
