// Drawing the next token from logits (R, Vp), of which V count, a row for each sample.
//
// A token of the k likeliest has the probability softmax(logit / temperature). It is drawn by Gumbel's trick: the token
// with the largest logit / temperature + g is taken, where g = -log(-log(u)) and u is uniform, a function of the seed,
// the sample, the place in its text and the token. So nothing has to be summed or sorted, a row is drawn in two passes
// over it whatever computes them, and equal logits and numbers give the same token. Of equal scores the first wins.
// Temperature 0 takes the likeliest token. A row with a value that is not finite gives DRAW_NOT_FINITE.
//
// The k likeliest are those not below the k-th largest logit, which a search by the bits of the logits finds: of the
// numbers that order as the logits do, four rounds each fix the next 8 bits by counting. All tokens that equal the k-th
// take part.
//
// Bytes on the GPU: a row of logits is read six times, five of them from the L2 cache.
#pragma once
#include <float.h>
#include <limits.h>

#include "common.cuh"
#include "random.h"

constexpr int DRAW_NOT_FINITE = -2;
constexpr int DRAW_THREADS = 1024;

struct DrawOptions {
    double temperature;
    int64_t top_k;  // 0: all
    uint64_t seed;
};

// Orders unsigned as the floats order.
__host__ __device__ inline uint32_t draw_key(float logit) {
    uint32_t bits;
    memcpy(&bits, &logit, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__host__ __device__ inline double draw_score(float logit, double temperature, uint64_t seed, int sample, int place,
                                             int token) {
    if (temperature == 0) return logit;
    const uint64_t bits =
        random_bits(seed, ((uint64_t)1 << 20) + (uint64_t)sample, (uint64_t)place << 20 | (uint64_t)token);
    const double u = ((double)(bits >> 11) + 0.5) / 9007199254740992.0;
    return (double)logit / temperature - log(-log(u));
}

// The key of the k-th largest of V logits; 0 where all take part.
inline uint32_t draw_threshold_cpu(const float* logits /*(V)*/, int V, int64_t k) {
    if (k <= 0 || k >= V) return 0;
    uint32_t prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t count[256] = {};
        for (int v = 0; v < V; v++) {
            const uint32_t key = draw_key(logits[v]);
            if (shift == 24 || key >> (shift + 8) == prefix) count[key >> shift & 255]++;
        }
        int digit = 255;
        while (count[digit] < k) k -= count[digit--];
        prefix = prefix << 8 | (uint32_t)digit;
    }
    return prefix;
}

inline int draw_row_cpu(const float* logits /*(V)*/, int V, const DrawOptions* o, int sample, int place) {
    for (int v = 0; v < V; v++)
        if (!(fabsf(logits[v]) <= FLT_MAX)) return DRAW_NOT_FINITE;
    const double temperature = o->top_k == 1 ? 0 : o->temperature;
    const uint32_t threshold = temperature == 0 ? 0 : draw_threshold_cpu(logits, V, o->top_k);
    double best = -INFINITY;
    int token = 0;
    for (int v = 0; v < V; v++) {
        if (draw_key(logits[v]) < threshold) continue;
        const double score = draw_score(logits[v], temperature, o->seed, sample, place, v);
        if (score > best) best = score, token = v;
    }
    return token;
}

inline void draw_cpu(int* tokens, const float* logits, const int* samples, const int* places, const DrawOptions* o,
                     int R, int V, int Vp) {
#pragma omp parallel for schedule(static)
    for (int r = 0; r < R; r++) tokens[r] = draw_row_cpu(logits + (int64_t)r * Vp, V, o, samples[r], places[r]);
}

#ifdef __CUDACC__
// draw_threshold_cpu by a block.
__device__ inline uint32_t draw_threshold(const float* logits, int V, int64_t k) {
    __shared__ int count[256];
    __shared__ uint32_t found;
    __shared__ int64_t left;
    if (k <= 0 || k >= V) return 0;
    uint32_t prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        if (threadIdx.x < 256) count[threadIdx.x] = 0;
        __syncthreads();
        for (int begin = 0; begin < V; begin += blockDim.x) {
            const int v = begin + threadIdx.x;
            const uint32_t key = v < V ? draw_key(logits[v]) : 0;
            const bool counts = v < V && (shift == 24 || key >> (shift + 8) == prefix);
            // Most logits share a few digits: the threads of a warp that have the same one add up first.
            const int digit = counts ? (int)(key >> shift & 255) : -1;
            const unsigned same = __match_any_sync(0xffffffffu, digit);
            if (counts && __ffs(same) - 1 == (int)(threadIdx.x % 32)) atomicAdd(&count[digit], __popc(same));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int digit = 255;
            int64_t rest = k;
            while (count[digit] < rest) rest -= count[digit--];
            found = prefix << 8 | (uint32_t)digit, left = rest;
        }
        __syncthreads();
        prefix = found, k = left;
    }
    return prefix;
}

// Grid R, block DRAW_THREADS; any V. Counts are integers, so their order does not matter. Deterministic.
__global__ static void __launch_bounds__(DRAW_THREADS)
    draw_kernel(int* tokens, const float* logits, const int* samples, const int* places, DrawOptions o, int V, int Vp) {
    __shared__ double scores[DRAW_THREADS];
    __shared__ int winners[DRAW_THREADS];
    const float* row = logits + (int64_t)blockIdx.x * Vp;
    bool bad = false;
    for (int v = threadIdx.x; v < V; v += blockDim.x) bad = bad || !(fabsf(row[v]) <= FLT_MAX);
    bad = __syncthreads_or(bad);
    const double temperature = o.top_k == 1 ? 0 : o.temperature;
    const uint32_t threshold = temperature == 0 || bad ? 0 : draw_threshold(row, V, o.top_k);
    double best = -INFINITY;
    int token = INT_MAX;
    for (int v = threadIdx.x; v < V && !bad; v += blockDim.x) {
        if (draw_key(row[v]) < threshold) continue;
        const double score = draw_score(row[v], temperature, o.seed, samples[blockIdx.x], places[blockIdx.x], v);
        if (score > best) best = score, token = v;
    }
    scores[threadIdx.x] = best, winners[threadIdx.x] = token;
    __syncthreads();
    for (int half = DRAW_THREADS / 2; half > 0; half /= 2) {
        const int other = threadIdx.x + half;
        if ((int)threadIdx.x < half && (scores[other] > scores[threadIdx.x] || (scores[other] == scores[threadIdx.x] &&
                                                                                winners[other] < winners[threadIdx.x])))
            scores[threadIdx.x] = scores[other], winners[threadIdx.x] = winners[other];
        __syncthreads();
    }
    if (threadIdx.x == 0) tokens[blockIdx.x] = bad ? DRAW_NOT_FINITE : winners[0];
}
#endif

// tokens: (R) drawn from logits: (R, Vp). samples: (R) which sample each row belongs to; places: (R) of the token in
// its text, below 2^20. All on the device.
inline void draw(const Device* dev, int* tokens, const float* logits, const int* samples, const int* places,
                 const DrawOptions* o, int R, int V, int Vp) {
    if (!dev->gpu) {
        draw_cpu(tokens, logits, samples, places, o, R, V, Vp);
        return;
    }
#ifdef __CUDACC__
    draw_kernel<<<R, DRAW_THREADS, 0, dev->stream>>>(tokens, logits, samples, places, *o, V, Vp);
    check_launch();
#endif
}
