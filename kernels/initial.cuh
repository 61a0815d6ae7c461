// Initial weights: to[i] = deviation * z(seed, tensor, first + i), where z is normally distributed and a function of
// these three numbers, so that weights are the same however many devices or ranks draw them.
//
// Box-Muller in fp64, rounded to fp32: with u and a in (0, 1) and [0, 1) out of 64 random bits,
//     z(2k) = sqrt(-2 log u) cos(2 pi a)      z(2k + 1) = sqrt(-2 log u) sin(2 pi a)
// IEEE 754 does not define log, sin and cos to the bit, so a GPU's results and those of the host's library may differ
// by a few units in the last place of fp64. Rounded to fp32 they are equal unless a boundary between two fp32 numbers
// lies between them. Such elements, one in 4 million, are doubtful: the host computes them, and all bits are the
// host's.
//
// Cost: two numbers of some 150 fp64 operations for 8 bytes: 30 billion weights take less than a second on an H100.
#pragma once
#include <math.h>

#include "common.cuh"
#include "random.h"

__host__ __device__ inline double normal_double(uint64_t seed, uint64_t tensor, uint64_t element) {
    const uint64_t bits = random_bits(seed, tensor, element / 2);
    const double u = ((double)(bits >> 32) + 0.5) / 4294967296.0;
    const double angle = 2.0 * 3.14159265358979323846 * ((double)(bits & 0xffffffffu) / 4294967296.0);
    return sqrt(-2.0 * log(u)) * (element % 2 ? sin(angle) : cos(angle));
}

inline float random_normal(uint64_t seed, uint64_t tensor, uint64_t element) {
    return (float)normal_double(seed, tensor, element);
}

// True if a number within this many units in the last place of x may round to another fp32 number than x. The
// libraries' errors amount to 10 units at most: 2 of sin or cos, 1 of log, and the roundings of the root and the
// products.
constexpr int64_t NORMAL_UNITS = 64;
__host__ __device__ inline bool normal_is_doubtful(double x) {
    int64_t bits;
    memcpy(&bits, &x, sizeof(bits));
    const int64_t from_middle = (bits & 0x1fffffff) - 0x10000000;  // of the 29 bits that fp32 does not have
    return from_middle >= -NORMAL_UNITS && from_middle <= NORMAL_UNITS;
}

// The list of doubtful elements in device memory: their number, then as many of them as there is room for.
constexpr int64_t NORMAL_DOUBTS = 1023;
constexpr int64_t NORMAL_LIST_BYTES = (1 + NORMAL_DOUBTS) * (int64_t)sizeof(uint32_t);

inline void initial_normals_cpu(float* to, int64_t n, uint64_t seed, uint64_t tensor, int64_t first, float deviation) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) to[i] = deviation * random_normal(seed, tensor, (uint64_t)(first + i));
}

#ifdef __CUDACC__
// grid: ceil(n / 256), block: 256. The order of the list is left to chance; each element of it is corrected alone.
__global__ static void initial_normals_kernel(float* to, int64_t n, uint64_t seed, uint64_t tensor, int64_t first,
                                              float deviation, uint32_t* list) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const double x = normal_double(seed, tensor, (uint64_t)(first + i));
    to[i] = deviation * (float)x;
    if (!normal_is_doubtful(x)) return;
    const uint32_t place = atomicAdd(list, 1u);
    if (place < NORMAL_DOUBTS) list[1 + place] = (uint32_t)i;
}
#endif

// Writes elements `first` to first + n of a tensor to `to`, in device memory; n is below 2^32. `list`: device memory of
// NORMAL_LIST_BYTES. Complete on return.
inline void initial_normals(const Device* dev, float* to, int64_t n, uint64_t seed, uint64_t tensor, int64_t first,
                            float deviation, uint32_t* list) {
    if (n <= 0) return;
    require(n < 1ll << 32 && first + n <= RANDOM_ELEMENTS && tensor < (uint64_t)RANDOM_TENSORS,
            "a tensor is too large for its random numbers; type a smaller model");
#ifdef __CUDACC__
    if (dev->gpu) {
        uint32_t found[1 + NORMAL_DOUBTS];
        device_zero(dev, list, NORMAL_LIST_BYTES);
        initial_normals_kernel<<<(unsigned)ceil_div(n, 256), 256, 0, dev->stream>>>(to, n, seed, tensor, first,
                                                                                    deviation, list);
        check_launch();
        copy_to_host(dev, found, list, NORMAL_LIST_BYTES);
        if (found[0] > NORMAL_DOUBTS)
            check_failed("nibble", "initial_normals", "too many doubts", "n", __FILE__, __LINE__);
        for (uint32_t i = 0; i < found[0]; i++) {
            const uint32_t at = found[1 + i];
            const float value = deviation * random_normal(seed, tensor, (uint64_t)first + at);
            copy_to_device(dev, to + at, &value, sizeof(value));
        }
        return;
    }
#endif
    (void)dev, (void)list;
    initial_normals_cpu(to, n, seed, tensor, first, deviation);
}
