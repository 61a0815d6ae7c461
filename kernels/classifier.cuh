// Softmax and cross-entropy in one pass over the logits, and their gradient in place:
//     losses[i] = log(sum over v < V of e^(logits[i][v] - m)) - (logits[i][target] - m),   m = the row's maximum,
//     dlogits[i][v] = (softmax(logits[i])[v] - [v == target]) * dloss for v < V, and 0 in the padding V <= v < Vp.
//
// logits: (N, Vp), Vp a multiple of 8 so that rows are 16-byte aligned; V is any number <= Vp. What the padding holds
// is never used. Bytes: each logit is read once and written once. fp32 logits are never stored: the chunk of rows that
// the head's matmul wrote is turned into gradients where it lies.
//
// A row takes a block, which reads it a second time, from the L2 cache. Long bf16 rows on Hopper stay in shared memory
// (classifier_hopper.cuh).
//
// With the head in fp8 the kernel writes the gradient as e5m2 codes (fp8_codes.cuh) instead of in place in bf16. They
// are rounded at random. The noise of a row depends on its logits alone, so equal logits give equal codes, whatever the
// step, the rank or the rows beside it.
#pragma once
#include <assert.h>

#include "common.cuh"
#include "cpu_math.h"
#include "fp8_codes.cuh"
#ifdef __CUDACC__
#include "classifier_hopper.cuh"
#endif

constexpr int CLASSIFIER_THREADS = 1024;  // 2 blocks a multiprocessor: their rows stay in L2 between the two reads

// losses: (N); logits: (N, Vp); targets: (N)
inline void classifier_cpu(float* losses, float* logits, const int* targets, float dloss, bool backward, int64_t N,
                           int V, int Vp) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < N; i++) {
        float* row = logits + i * Vp;
        float maximum = row[0];
#pragma omp simd reduction(max : maximum)
        for (int v = 0; v < V; v++) maximum = row[v] > maximum ? row[v] : maximum;
        float chain[CPU_CHAINS] = {};
        int whole = V / CPU_CHAINS * CPU_CHAINS;
        for (int v = 0; v < whole; v += CPU_CHAINS) {
#pragma omp simd
            for (int j = 0; j < CPU_CHAINS; j++) chain[j] += cpu_exp(row[v + j] - maximum);
        }
        for (int v = whole; v < V; v++) chain[v - whole] += cpu_exp(row[v] - maximum);
        float sum = cpu_chains_sum(chain);
        losses[i] = logf(sum) - (row[targets[i]] - maximum);
        if (!backward) continue;
        float scale = dloss / sum;
#pragma omp simd
        for (int v = 0; v < V; v++) row[v] = cpu_exp(row[v] - maximum) * scale;
        row[targets[i]] -= dloss;
        for (int v = V; v < Vp; v++) row[v] = 0.0f;
    }
}

inline void loss_mean_cpu(float* mean, const float* losses, int64_t N, bool accumulate, float scale) {
    double sum = 0.0;
    for (int64_t i = 0; i < N; i++) sum += losses[i];
    *mean = (float)((accumulate ? *mean : 0.0) + scale * sum);
}

#ifdef __CUDACC__
__device__ inline float classifier_exp(float x) {
    return exp2f(x * LOG2_OF_E);
}

// The row's maximum and sum of e^(x - maximum) over v < V, the same in every thread.
template <typename X>
__device__ inline void classifier_row(float* maximum, float* sum, const X* row, int V) {
    constexpr int size = Vec<X>::size;
    float own_maximum = -INFINITY, own_sum = 0.0f;
    for (int v = threadIdx.x * size; v < V; v += CLASSIFIER_THREADS * size) {
        Vec<X> vec = load_vec(row + v);
        float x[size], top = own_maximum;
        for (int j = 0; j < size; j++) x[j] = v + j < V ? to_float(vec.lane[j]) : -INFINITY;
        for (int j = 0; j < size; j++) top = fmaxf(top, x[j]);
        if (top > own_maximum) {
            own_sum *= classifier_exp(own_maximum - top);
            own_maximum = top;
        }
        for (int j = 0; j < size; j++) own_sum += classifier_exp(x[j] - own_maximum);
    }
    *maximum = block_max(own_maximum);
    // A thread that saw no element, or none above -inf, adds nothing; a NaN stays one.
    *sum = block_sum(own_sum == 0.0f ? 0.0f : own_sum * classifier_exp(own_maximum - *maximum));
}

// Grid N (a block per row), block CLASSIFIER_THREADS; when backward, logits in place or to codes. Deterministic.
template <typename X>
__global__ void __launch_bounds__(CLASSIFIER_THREADS)
    classifier_kernel(float* losses, X* logits, const int* targets, float dloss, bool backward, int V, int Vp,
                      Fp8Codes codes) {
    constexpr int size = Vec<X>::size;
    X* row = logits + (int64_t)blockIdx.x * Vp;
    int target = targets[blockIdx.x];
    float target_logit = to_float(row[target]);  // before the barriers of the reductions: it is overwritten below
    float maximum, sum;
    classifier_row(&maximum, &sum, row, V);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) - (target_logit - maximum);
    if (!backward) return;
    float scale = dloss / sum, unit = codes.rows ? *codes.scale : 1.0f;
    const uint32_t noise = classifier_noise(maximum, sum);
    for (int v = threadIdx.x * size; v < Vp; v += CLASSIFIER_THREADS * size) {
        Vec<X> vec = load_vec(row + v);
        float d[size];
        for (int j = 0; j < size; j++) {
            d[j] = classifier_exp(to_float(vec.lane[j]) - maximum) * scale;
            if (v + j == target) d[j] -= dloss;
            if (v + j >= V) d[j] = 0.0f;
        }
        classifier_put(row + v, codes, (int64_t)blockIdx.x * Vp, v, d, unit, noise);
    }
}

// Grid 1, block 1024, any N. Deterministic.
__global__ static void __launch_bounds__(1024)
    loss_mean_kernel(float* mean, const float* losses, int64_t N, bool accumulate, float scale) {
    float sum = 0.0f;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < N; i += 1024) sum += losses[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *mean = (accumulate ? *mean : 0.0f) + scale * sum;
}
#endif

// losses: (N); logits: (N, Vp), dlogits on return when backward; targets: (N), each in [0, V). codes: dlogits are
// written there instead, on a GPU in bf16, by a scale under which nothing saturates; with rows NULL: no codes.
template <typename X>
void classifier(const Device* dev, float* losses, X* logits, const int* targets, float dloss, bool backward, int64_t N,
                int V, int Vp, [[maybe_unused]] const Fp8Codes& codes = {}) {
    if (N == 0) return;
    assert(Vp % 8 == 0 && V <= Vp);
    if (!dev->gpu) {
        assert(sizeof(X) == sizeof(float));
        classifier_cpu(losses, (float*)logits, targets, dloss, backward, N, V, Vp);
        return;
    }
#ifdef __CUDACC__
    if constexpr (std::is_same_v<X, bf16>) {
        if (classifier_resident_fits(dev, Vp)) {
            int64_t blocks = N < 2 * dev->sm_count ? N : 2 * dev->sm_count;
            return launch_kernel(dev, classifier_resident_kernel, (unsigned)blocks, CLASSIFIER_RESIDENT_THREADS + 32,
                                 classifier_resident_bytes(Vp), losses, logits, targets, dloss, backward, N, V, Vp,
                                 codes);
        }
    }
    launch_kernel(dev, classifier_kernel<X>, N, CLASSIFIER_THREADS, 0, losses, logits, targets, dloss, backward, V, Vp,
                  codes);
#endif
}

// mean: a device scalar, (+)= scale * sum of losses: (N)
inline void loss_mean(const Device* dev, float* mean, const float* losses, int64_t N, bool accumulate, float scale) {
    if (!dev->gpu) {
        loss_mean_cpu(mean, losses, N, accumulate, scale);
        return;
    }
#ifdef __CUDACC__
    launch_kernel(dev, loss_mean_kernel, 1, 1024, 0, mean, losses, N, accumulate, scale);
#endif
}
