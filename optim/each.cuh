// Loops whose iterations are independent, on the device's stream or on the CPU's cores. A loop is a struct with a
// function at(index), for which a GPU runs one thread, or with lane(index, lane) and end(index, sum), for which it runs
// a warp.
#pragma once
#include "../kernels/common.cuh"
#include "float.cuh"

#ifdef __CUDACC__
// grid: any, block: 256.
template <class Each>
__global__ void __launch_bounds__(256) each_kernel(Each each, int64_t count) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += 256ll * gridDim.x) each.at(i);
}

// grid: any, block: 256; a warp takes an index.
template <class Each>
__global__ void __launch_bounds__(256) lanes_kernel(Each each, int64_t count) {
    for (int64_t i = blockIdx.x * 8ll + threadIdx.x / 32; i < count; i += 8ll * gridDim.x) {
        float sum = each.lane(i, threadIdx.x % 32);
        for (int half = 16; half > 0; half /= 2) sum = exact_add(sum, __shfl_down_sync(0xffffffffu, sum, half));
        if (threadIdx.x % 32 == 0) each.end(i, sum);
    }
}

// Launches a loop's kernel. `per_block`: indices that a thread block takes at a time.
template <class Each>
void each_launch(const Device* dev, void (*kernel)(Each, int64_t), const Each& each, int64_t count, int per_block) {
    const int64_t blocks = ceil_div(count, per_block);
    kernel<<<(unsigned)(blocks < 8192 ? blocks : 8192), 256, 0, dev->stream>>>(each, count);
    check_launch();
}
#endif

// Returns the sum of N numbers, added by halves as a warp or a thread block of a GPU adds them; `sum` is overwritten.
template <int N>
float sum_by_halves(float (&sum)[N]) {
    for (int half = N / 2; half > 0; half /= 2) {
        for (int l = 0; l < half; l++) sum[l] = exact_add(sum[l], sum[l + half]);
    }
    return sum[0];
}

// Calls each.at(i) for i from 0 to count - 1, in any order.
template <class Each>
void for_each(const Device* dev, const Each& each, int64_t count) {
    if (count == 0) return;
#ifdef __CUDACC__
    if (dev->gpu) return each_launch(dev, each_kernel<Each>, each, count, 256);
#endif
#pragma omp parallel for schedule(static) if (count > 1)
    for (int64_t i = 0; i < count; i++) each.at(i);
}

// For i from 0 to count - 1, adds the partial sums each.lane(i, 0 .. 31) by halves, and calls each.end(i, sum).
template <class Each>
void for_lanes(const Device* dev, const Each& each, int64_t count) {
    if (count == 0) return;
#ifdef __CUDACC__
    if (dev->gpu) return each_launch(dev, lanes_kernel<Each>, each, count, 8);
#endif
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i++) {
        float sum[32];
        for (int l = 0; l < 32; l++) sum[l] = each.lane(i, l);
        each.end(i, sum_by_halves(sum));
    }
}
