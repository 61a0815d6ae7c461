// Softmax and cross-entropy in one pass over the logits, and their gradient in place:
//     losses[i] = log(sum over v < V of e^(logits[i][v] - m)) - (logits[i][target] - m),   m = the row's maximum,
//     dlogits[i][v] = (softmax(logits[i])[v] - [v == target]) * dloss for v < V, and 0 in the padding V <= v < Vp.
//
// logits: (N, Vp), Vp a multiple of 8 so that rows are 16-byte aligned; V is any number <= Vp. What the padding holds
// is never used. Bytes: the row is read once from memory (maximum and sum together, rescaling the sum when the maximum
// grows), read again from the L2 cache, written once. fp32 logits are never stored: the chunk of rows that the head's
// matmul wrote is turned into gradients where it lies.
#pragma once
#include <assert.h>

#include "common.cuh"
#include "cpu_math.h"

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

__device__ inline float classifier_exp(float x) {
    return exp2f(x * 1.44269504088896341f);
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

// Grid N (a block per row), block CLASSIFIER_THREADS, logits in place when backward. Deterministic.
template <typename X>
__global__ void __launch_bounds__(CLASSIFIER_THREADS)
    classifier_kernel(float* losses, X* logits, const int* targets, float dloss, bool backward, int V, int Vp) {
    constexpr int size = Vec<X>::size;
    X* row = logits + (int64_t)blockIdx.x * Vp;
    int target = targets[blockIdx.x];
    float target_logit = to_float(row[target]);  // before the barriers of the reductions: it is overwritten below
    float maximum, sum;
    classifier_row(&maximum, &sum, row, V);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) - (target_logit - maximum);
    if (!backward) return;
    float scale = dloss / sum;
    for (int v = threadIdx.x * size; v < Vp; v += CLASSIFIER_THREADS * size) {
        Vec<X> vec = load_vec(row + v);
        for (int j = 0; j < size; j++) {
            float d = classifier_exp(to_float(vec.lane[j]) - maximum) * scale;
            if (v + j == target) d -= dloss;
            vec.lane[j] = from_float<X>(v + j < V ? d : 0.0f);
        }
        store_vec(row + v, vec);
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

// losses: (N); logits: (N, Vp), dlogits on return when backward; targets: (N), each in [0, V)
template <typename X>
void classifier(const Device* dev, float* losses, X* logits, const int* targets, float dloss, bool backward, int64_t N,
                int V, int Vp) {
    if (N == 0) return;
    assert(Vp % 8 == 0 && V <= Vp);
    if (!dev->gpu) {
        assert(sizeof(X) == sizeof(float));
        classifier_cpu(losses, (float*)logits, targets, dloss, backward, N, V, Vp);
        return;
    }
    classifier_kernel<<<N, CLASSIFIER_THREADS, 0, dev->stream>>>(losses, logits, targets, dloss, backward, V, Vp);
    check_launch();
}

// mean: a device scalar, (+)= scale * sum of losses: (N)
inline void loss_mean(const Device* dev, float* mean, const float* losses, int64_t N, bool accumulate, float scale) {
    if (!dev->gpu) {
        loss_mean_cpu(mean, losses, N, accumulate, scale);
        return;
    }
    loss_mean_kernel<<<1, 1024, 0, dev->stream>>>(mean, losses, N, accumulate, scale);
    check_launch();
}
