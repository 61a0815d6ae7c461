// Loops whose turns do not depend on each other. A loop is a struct with a function of one index, `at`. A GPU runs one
// thread for each index, on the device's stream; the CPU spreads the indices over its cores.
#pragma once
#include "../kernels/common.cuh"
#include "float.cuh"

#ifdef __CUDACC__
// grid: any, block: 256.
template <class Each>
__global__ void __launch_bounds__(256) each_kernel(Each each, int64_t count) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += 256ll * gridDim.x) each.at(i);
}

inline unsigned blocks_for(int64_t count, int each) {
    const int64_t blocks = ceil_div(count, each);
    return (unsigned)(blocks < 8192 ? blocks : 8192);
}
#endif

// Calls each.at(i) for i from 0 to count - 1, in any order.
template <class Each>
void for_each(const Device* dev, const Each& each, int64_t count) {
    if (count == 0) return;
#ifdef __CUDACC__
    if (dev->gpu) {
        each_kernel<<<blocks_for(count, 256), 256, 0, dev->stream>>>(each, count);
        check_launch();
        return;
    }
#endif
#pragma omp parallel for schedule(static) if (count > 1)
    for (int64_t i = 0; i < count; i++) each.at(i);
}
