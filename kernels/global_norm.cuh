// The norm of all gradients, and the factor that clips it: norm = sqrt(sum of g^2), factor = clip / norm where clipping
// is on (clip > 0) and norm > clip, otherwise 1; NaN when the norm or the loss is not finite, which makes the
// optimizer's step change nothing. Both stay on the device: the step reads the factor there, and nobody waits for it.
//
// g: (n) float or bf16, 16-byte aligned. Bytes: reads n once, at the speed of a copy. Every thread sums squares in fp32
// over a few thousand elements; threads and blocks are combined in double, in a fixed order.
#pragma once
#include <assert.h>

#include "common.cuh"

constexpr int GLOBAL_NORM_CPU_PARTS = 1024;  // fixed, so that the result does not depend on the number of threads
constexpr int GLOBAL_NORM_THREADS = 512;

// norm: (2): the norm and the factor; loss: a scalar, or null
__host__ __device__ inline void global_norm_result(float* norm, double sum, float clip, const float* loss) {
    double length = sqrt(sum);
    float value = (float)length;
    bool finite = isfinite(value) && (!loss || isfinite(*loss));
    norm[0] = value;
    norm[1] = !finite ? NAN : clip > 0.0f && value > clip ? (float)(clip / length) : 1.0f;
}

// The sum of the squares of grads (n); parts: (GLOBAL_NORM_CPU_PARTS).
inline double squares_cpu(double* parts, const float* grads, int64_t n) {
    int64_t length = ceil_div(ceil_div(n, GLOBAL_NORM_CPU_PARTS), 8) * 8;
#pragma omp parallel for schedule(static)
    for (int part = 0; part < GLOBAL_NORM_CPU_PARTS; part++) {
        double chain[8] = {};
        int64_t end = (part + 1) * length < n ? (part + 1) * length : n;
        for (int64_t i = part * length; i < end; i++) chain[i % 8] += (double)grads[i] * grads[i];
        parts[part] = 0.0;
        for (int j = 0; j < 8; j++) parts[part] += chain[j];
    }
    double sum = 0.0;
    for (int part = 0; part < GLOBAL_NORM_CPU_PARTS; part++) sum += parts[part];
    return sum;
}

// norm: (2); parts: (GLOBAL_NORM_CPU_PARTS); grads: (n); loss: a scalar, or null
inline void global_norm_cpu(float* norm, double* parts, const float* grads, int64_t n, float clip, const float* loss) {
    global_norm_result(norm, squares_cpu(parts, grads, n), clip, loss);
}

#ifdef __CUDACC__
// Sum over the block in double, valid in thread 0. Block GLOBAL_NORM_THREADS.
__device__ inline double global_norm_block_sum(double value) {
    __shared__ double partial[GLOBAL_NORM_THREADS / 32];
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0.0;
    if (threadIdx.x == 0)
        for (int warp = 0; warp < GLOBAL_NORM_THREADS / 32; warp++) value += partial[warp];
    return value;
}

// The sum of the squares that this block of row blockIdx.y of the grid takes of grads (n), valid in thread 0.
template <typename G>
__device__ inline double squares_of_block(const G* grads, int64_t n) {
    constexpr int size = Vec<G>::size;
    int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, threads = (int64_t)gridDim.x * blockDim.x;
    float sum[2] = {0.0f, 0.0f};  // two chains a thread: the additions wait for each other half as long
#pragma unroll 4
    for (int64_t i = thread; i < n / size; i += threads) {
        Vec<G> g = load_vec(grads + i * size);
        for (int j = 0; j < size; j++) {
            float value = to_float(g.lane[j]);
            sum[j % 2] = fmaf(value, value, sum[j % 2]);
        }
    }
    int64_t tail = n / size * size + thread;
    if (tail < n) sum[0] = fmaf(to_float(grads[tail]), to_float(grads[tail]), sum[0]);
    return global_norm_block_sum((double)sum[0] + (double)sum[1]);
}

// Grid any (one part each), block GLOBAL_NORM_THREADS, any n. Deterministic for a given grid.
template <typename G>
__global__ void __launch_bounds__(GLOBAL_NORM_THREADS) global_norm_kernel(double* parts, const G* grads, int64_t n) {
    const double total = squares_of_block(grads, n);
    if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

// Grid 1, block GLOBAL_NORM_THREADS. Deterministic.
__global__ static void __launch_bounds__(GLOBAL_NORM_THREADS)
    global_norm_finish_kernel(float* norm, const double* parts, int count, float clip, const float* loss) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += GLOBAL_NORM_THREADS) sum += parts[i];
    sum = global_norm_block_sum(sum);
    if (threadIdx.x == 0) global_norm_result(norm, sum, clip, loss);
}
#endif

inline int global_norm_blocks(const Device* dev) {
    return dev->sm_count * (2048 / GLOBAL_NORM_THREADS);
}

inline int64_t global_norm_scratch_bytes(const Device* dev) {
    return (dev->gpu ? global_norm_blocks(dev) : GLOBAL_NORM_CPU_PARTS) * (int64_t)sizeof(double);
}

// norm: (2) in device memory: the norm and the factor; scratch: global_norm_scratch_bytes, 8-byte aligned; grads: (n);
// loss: a device scalar that must be finite too, or null
template <typename G>
void global_norm(const Device* dev, float* norm, float* scratch, const G* grads, int64_t n, float clip,
                 const float* loss = nullptr) {
    double* parts = (double*)scratch;
    if (!dev->gpu) {
        assert(sizeof(G) == sizeof(float));
        global_norm_cpu(norm, parts, (const float*)grads, n, clip, loss);
        return;
    }
#ifdef __CUDACC__
    int blocks = global_norm_blocks(dev);
    global_norm_kernel<<<blocks, GLOBAL_NORM_THREADS, 0, dev->stream>>>(parts, grads, n);
    check_launch();
    global_norm_finish_kernel<<<1, GLOBAL_NORM_THREADS, 0, dev->stream>>>(norm, parts, blocks, clip, loss);
    check_launch();
#endif
}
