// Scores of given tokens, from the logits (Vp, of which V count) at each of R places and the token that follows:
//     losses[r] = log(sum over v < V of e^(logits[r][v] - m)) - (logits[r][target] - m),   m = the row's maximum,
//     likeliest[r] = 1 where logits[r][target] == m and no token before it has that logit, else 0.
// Logits are computed only for the places that an evaluation needs: GatherRows first copies their rows together.
// Logits are always fp32, since answers are compared by small differences.
#pragma once
#include "classifier.cuh"
#include "common.cuh"
#include "each.cuh"
#include "matmul.cuh"

inline void score_cpu(float* losses, int* likeliest, const float* logits, const int* targets, int64_t R, int V,
                      int Vp) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < R; r++) {
        const float* row = logits + r * Vp;
        int best = 0;
        for (int v = 1; v < V; v++)
            if (row[v] > row[best]) best = v;
        likeliest[r] = best == targets[r];
    }
    classifier_cpu(losses, (float*)logits, targets, 0, false, R, V, Vp);
}

#ifdef __CUDACC__
// Grid R, block CLASSIFIER_THREADS. Counts the tokens that beat the target: larger, or equal and before it.
__global__ static void __launch_bounds__(CLASSIFIER_THREADS)
    likeliest_kernel(int* likeliest, const float* logits, const int* targets, int V, int Vp) {
    const float* row = logits + (int64_t)blockIdx.x * Vp;
    const int target = targets[blockIdx.x];
    const float own = row[target];
    bool beaten = false;
    for (int v = threadIdx.x; v < V; v += blockDim.x) beaten = beaten || row[v] > own || (row[v] == own && v < target);
    beaten = __syncthreads_or(beaten);
    if (threadIdx.x == 0) likeliest[blockIdx.x] = !beaten;
}
#endif

// out: (R, C) = the rows inp[places[r]] of inp: (N, C)
template <typename X>
struct GatherRows {
    X* out;
    const X* inp;
    const int* places;
    int C;

    __host__ __device__ void at(int64_t i) const { out[i] = inp[(int64_t)places[i / C] * C + i % C]; }
};

// losses, likeliest, targets: (R); logits: (R, Vp)
inline void score(const Device* dev, float* losses, int* likeliest, float* logits, const int* targets, int64_t R, int V,
                  int Vp) {
    if (!dev->gpu) return score_cpu(losses, likeliest, logits, targets, R, V, Vp);
#ifdef __CUDACC__
    launch_kernel(dev, likeliest_kernel, (unsigned)R, CLASSIFIER_THREADS, 0, likeliest, logits, targets, V, Vp);
    classifier<float>(dev, losses, logits, targets, 0, false, R, V, Vp);
#endif
}

// Device memory in which score_places works, `rows` places at a time.
template <typename X>
struct ScoreRoom {
    int64_t rows;
    X* gathered;                        // (rows, C)
    float* logits;                      // (rows, Vp)
    int *places, *targets, *likeliest;  // (rows)
    float* losses;                      // (rows)
};

// losses, likeliest, places, targets: (count), all in host memory; inp: (N, C), the output of the last layernorm; wte:
// (Vp, C). Each matrix product has room->rows rows, whatever the count, so that a score does not depend on it.
template <typename X>
void score_places(const Device* dev, float* losses, int* likeliest, const X* inp, const X* wte, const int* places,
                  const int* targets, int count, const ScoreRoom<X>* room, int C, int V, int Vp) {
    const int64_t rows = room->rows;
    for (int64_t i = 0; i < count; i += rows) {
        const int64_t bytes = (count - i < rows ? count - i : rows) * (int64_t)sizeof(int);
        device_zero(dev, room->places, rows * (int64_t)sizeof(int));  // rows without a place take the first one
        device_zero(dev, room->targets, rows * (int64_t)sizeof(int));
        copy_to_device(dev, room->places, places + i, bytes);
        copy_to_device(dev, room->targets, targets + i, bytes);
        for_each(dev, GatherRows<X>{room->gathered, inp, room->places, C}, rows * C);
        matmul_forward<X>(dev, room->logits, nullptr, room->gathered, wte, nullptr, rows, C, Vp);
        score(dev, room->losses, room->likeliest, room->logits, room->targets, rows, V, Vp);
        copy_to_host(dev, losses + i, room->losses, bytes);
        copy_to_host(dev, likeliest + i, room->likeliest, bytes);
    }
}
