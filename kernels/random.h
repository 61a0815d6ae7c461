// Random bits, each a function of where it is used: initial weights and the draws of samples. (The noise of stochastic
// rounding is the optimizer's own.)
#pragma once
#include <math.h>
#include <stdint.h>

// Tensors and elements below these have bits of their own; the callers check what they pass.
constexpr int64_t RANDOM_TENSORS = 1ll << 24, RANDOM_ELEMENTS = 1ll << 40;

// 64 random bits of (seed, tensor, element): two rounds of splitmix64's mixer. constexpr lets kernels call it.
constexpr uint64_t random_bits(uint64_t seed, uint64_t tensor, uint64_t element) {
    uint64_t z = seed * 0x9E3779B97F4A7C15ull ^ (tensor << 40) ^ element;
    for (int round = 0; round < 2; round++) {
        z += 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        z ^= z >> 31;
    }
    return z;
}

// Two normally distributed numbers of (seed, tensor, pair), for the elements 2 pair and 2 pair + 1 of initial weights:
// Box-Muller in fp64, rounded to fp32. With u and a in (0, 1) and [0, 1) out of 64 random bits,
//     two[0] = sqrt(-2 log u) cos(2 pi a)      two[1] = sqrt(-2 log u) sin(2 pi a)
inline void random_normals(float two[2], uint64_t seed, uint64_t tensor, uint64_t pair) {
    const uint64_t bits = random_bits(seed, tensor, pair);
    const double u = ((double)(bits >> 32) + 0.5) / 4294967296.0, length = sqrt(-2.0 * log(u));
    const double angle = 2.0 * 3.14159265358979323846 * ((double)(bits & 0xffffffffu) / 4294967296.0);
    two[0] = (float)(length * cos(angle)), two[1] = (float)(length * sin(angle));
}
