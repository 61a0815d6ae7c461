// Random bits, each a function of where it is used: initial weights (initial.cuh) and the draws of samples. (The noise
// of stochastic rounding is the optimizer's own.)
#pragma once
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
