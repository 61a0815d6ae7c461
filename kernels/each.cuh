// Loops whose iterations are independent, on the device's stream or on the CPU's cores. A loop is a struct with a
// function at(index), for which a GPU runs one thread: one text is the kernel and the plain C version.
#pragma once
#include "common.cuh"

#ifdef __CUDACC__
// grid: any, block: 256.
template <class Each>
__global__ void __launch_bounds__(256) each_kernel(Each each, int64_t count) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += 256ll * gridDim.x) each.at(i);
}

// Launches a loop's kernel. `lanes`: threads that take an index.
template <class Each>
void each_launch(cudaStream_t stream, void (*kernel)(Each, int64_t), const Each& each, int64_t count, int lanes) {
    const int threads = lanes > 256 ? lanes : 256;
    const int64_t blocks = ceil_div(count, threads / lanes);
    kernel<<<(unsigned)(blocks < 8192 ? blocks : 8192), threads, 0, stream>>>(each, count);
    check_launch();
}
#endif

// Calls each.at(i) for i from 0 to count - 1, in any order, on a stream of the device.
template <class Each>
void for_each(const Device* dev, cudaStream_t stream, const Each& each, int64_t count) {
    if (count == 0) return;
#ifdef __CUDACC__
    if (dev->gpu) return each_launch(stream, each_kernel<Each>, each, count, 1);
#endif
#pragma omp parallel for schedule(static) if (count > 1)
    for (int64_t i = 0; i < count; i++) each.at(i);
}

template <class Each>
void for_each(const Device* dev, const Each& each, int64_t count) {
    for_each(dev, dev->stream, each, count);
}
