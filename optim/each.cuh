// Loops whose iterations are independent, on the device's stream or on the CPU's cores. A loop is a struct with a
// function at(index), for which a GPU runs one thread, or with lane(index, lane) and end(index, sum), for which it runs
// LANES threads.
#pragma once
#include "../kernels/common.cuh"
#include "float.cuh"

#ifdef __CUDACC__
// grid: any, block: 256.
template <class Each>
__global__ void __launch_bounds__(256) each_kernel(Each each, int64_t count) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += 256ll * gridDim.x) each.at(i);
}

// grid: any, block: 256, of which LANES take an index; or block: LANES.
template <int LANES, class Each>
__global__ void __launch_bounds__(LANES > 256 ? LANES : 256) lanes_kernel(Each each, int64_t count) {
    static_assert(LANES == 32 || LANES >= 256, "an index has a warp or the whole block");
    __shared__ float part[LANES];
    const int lane = threadIdx.x % LANES, held = blockDim.x / LANES;
    for (int64_t i = blockIdx.x * (int64_t)held + threadIdx.x / LANES; i < count; i += (int64_t)held * gridDim.x) {
        float sum = each.lane(i, lane);
        if constexpr (LANES > 32) {
            part[lane] = sum;
            for (int half = LANES / 2; half > 16; half /= 2) {
                __syncthreads();
                if (lane < half) part[lane] = sum = exact_add(sum, part[lane + half]);
            }
            __syncthreads();
        }
        for (int half = 16; half > 0; half /= 2) sum = exact_add(sum, __shfl_down_sync(0xffffffffu, sum, half));
        if (lane == 0) each.end(i, sum);
    }
}

// Launches a loop's kernel. `lanes`: threads that take an index.
template <class Each>
void each_launch(const Device* dev, void (*kernel)(Each, int64_t), const Each& each, int64_t count, int lanes) {
    const int threads = lanes > 256 ? lanes : 256;
    const int64_t blocks = ceil_div(count, threads / lanes);
    kernel<<<(unsigned)(blocks < 8192 ? blocks : 8192), threads, 0, dev->stream>>>(each, count);
    check_launch();
}
#endif

// Returns the sum of N numbers, added by halves as a warp or a thread block of a GPU adds them; `sum` is overwritten.
template <int N>
OPTIM_INLINE float sum_by_halves(float (&sum)[N]) {
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
    if (dev->gpu) return each_launch(dev, each_kernel<Each>, each, count, 1);
#endif
#pragma omp parallel for schedule(static) if (count > 1)
    for (int64_t i = 0; i < count; i++) each.at(i);
}

// For i from 0 to count - 1, adds the partial sums each.lane(i, 0 .. LANES - 1) by halves, and calls each.end(i, sum).
template <int LANES = 32, class Each>
void for_lanes(const Device* dev, const Each& each, int64_t count) {
    if (count == 0) return;
#ifdef __CUDACC__
    if (dev->gpu) return each_launch(dev, lanes_kernel<LANES, Each>, each, count, LANES);
#endif
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i++) {
        float sum[LANES];
        for (int l = 0; l < LANES; l++) sum[l] = each.lane(i, l);
        each.end(i, sum_by_halves(sum));
    }
}
