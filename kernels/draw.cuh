// Drawing the next token from logits (R, Vp), of which V count, a row for each sample.
//
// A token of the k likeliest has the probability softmax(logit / temperature). It is drawn by Gumbel's trick: the token
// with the largest logit / temperature + g is taken, where g = -log(-log(u)) and u is uniform, a function of the seed,
// the sample, the place in its text and the token. So nothing is summed or sorted, a row is drawn in two passes over
// it, and equal logits and numbers give the same token on any device. The first of equal scores wins. Temperature 0, or
// one below DRAW_COLD, takes the likeliest token. A row with a value that is not finite gives DRAW_NOT_FINITE.
//
// The k likeliest are those not below the k-th largest logit; all tokens that equal it take part. The search for that
// logit uses integers that have the order of the logits, and finds a bit per round by counting.
//
// GPU: a block for each row reads it twice, some vectors a thread at a time. First each thread finds the largest of its
// logits. The k-th largest of these is not above the k-th largest of all, since k different logits reach it; so only
// the logits that reach it, not many more than k, are kept, one for a thread, and searched. With k above DRAW_SHORT or
// very many equal logits, each of 32 rounds reads the row.
#pragma once
#include <float.h>
#include <limits.h>

#include "common.cuh"
#include "random.h"

constexpr int DRAW_NOT_FINITE = -2;
constexpr int64_t DRAW_TENSORS = 1 << 20;  // random numbers of lower ones are the initial weights'
constexpr int64_t DRAW_SAMPLES = RANDOM_TENSORS - DRAW_TENSORS, DRAW_PLACES = 1 << 20, DRAW_TOKENS = 1 << 20;
static_assert(DRAW_PLACES * DRAW_TOKENS == RANDOM_ELEMENTS, "a place and a token are an element");
constexpr int DRAW_THREADS = 1024;
constexpr int DRAW_SHORT = 512;  // up to this k, the tokens that may be among the k likeliest usually fit the threads
constexpr double DRAW_COLD = 1e-200;  // below it g is lost beside logit / temperature, which might overflow

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
    if (temperature < DRAW_COLD) return logit;
    const uint64_t bits =
        random_bits(seed, DRAW_TENSORS + (uint64_t)sample, (uint64_t)place * DRAW_TOKENS + (uint64_t)token);
    const double u = ((double)(bits >> 11) + 0.5) / 9007199254740992.0;
    return (double)logit / temperature - log(-log(u));
}

// The largest number that at least k keys reach, where count(t) is the number of keys >= t. On a GPU a block calls it
// with all its threads. constexpr lets kernels call it.
template <typename Count>
constexpr uint32_t draw_search(const Count& count, int64_t k) {
    uint32_t found = 0;
    for (int bit = 31; bit >= 0; bit--) {
        const uint32_t next = found | 1u << bit;
        if (count(next) >= k) found = next;
    }
    return found;
}

// The key of the k-th largest of V logits; 0 where all take part.
inline uint32_t draw_threshold_cpu(const float* logits /*(V)*/, int V, int64_t k) {
    const auto reach = [&](uint32_t t) {
        int64_t count = 0;
        for (int v = 0; v < V; v++) count += draw_key(logits[v]) >= t;
        return count;
    };
    return k <= 0 || k >= V ? 0 : draw_search(reach, k);
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
// Calls visit(logit, token) for each of this thread's share of a row, in order of the tokens.
template <typename Visit>
__device__ inline void draw_walk(const float* row, int V, const Visit& visit) {
    constexpr int size = Vec<float>::size, step = size * DRAW_THREADS, AHEAD = 4;  // vectors in flight
    for (int begin = size * threadIdx.x; begin < V; begin += AHEAD * step) {
        Vec<float> x[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) x[i] = load_vec(row + (begin + i * step < V ? begin + i * step : begin));
#pragma unroll
        for (int i = 0; i < AHEAD * size; i++) {
            const int v = begin + i / size * step + i % size;
            if (v < V) visit(x[i / size].lane[i % size], v);
        }
    }
}

// The token of this thread among those that may be one of the k likeliest, or -1 if they are fewer than the threads.
// False if they are more. `largest` is the key of the largest of the thread's logits.
__device__ inline bool draw_short_list(const float* row, int V, int64_t k, uint32_t largest, int* token) {
    __shared__ int list[DRAW_THREADS], length;
    const uint32_t bound = draw_search([&](uint32_t t) { return __syncthreads_count(largest >= t); }, k);
    if (threadIdx.x == 0) length = 0;
    __syncthreads();
    // Most threads have nothing to add, and the order of the list does not matter.
    draw_walk(row, largest >= bound ? V : 0, [&](float logit, int v) {
        if (draw_key(logit) < bound) return;
        const int at = atomicAdd(&length, 1);
        if (at < DRAW_THREADS) list[at] = v;
    });
    __syncthreads();
    *token = (int)threadIdx.x < length ? list[threadIdx.x] : -1;
    return length <= DRAW_THREADS;
}

// A thread keeps its best token so far here.
struct DrawBest {
    double score;
    int token;
};

// Returns the best of a thread's tokens whose keys reach `bound`.
template <typename Score>
__device__ inline DrawBest draw_best(const float* row, int V, uint32_t bound, const Score& score) {
    DrawBest best = {-INFINITY, INT_MAX};
    for (int v = threadIdx.x; v < V; v += DRAW_THREADS) {  // not draw_walk: scores take longer than loads
        const double own = draw_key(row[v]) >= bound ? score(row[v], v) : -INFINITY;
        if (own > best.score) best = {own, v};
    }
    return best;
}

// The best of a thread's tokens among the k likeliest of a row. k > 0, temperature > 0.
template <typename Score>
__device__ inline DrawBest draw_likeliest(const float* row, int V, int64_t k, uint32_t largest, const Score& score) {
    int own = -1;
    if (k <= DRAW_SHORT && draw_short_list(row, V, k, largest, &own)) {
        const uint32_t key = own >= 0 ? draw_key(row[own]) : 0;
        const uint32_t kth = draw_search([&](uint32_t t) { return __syncthreads_count(key >= t); }, k);
        if (key < kth) return {-INFINITY, INT_MAX};
        return {score(row[own], own), own};
    }
    const auto in_row = [&](uint32_t t) {
        int own = 0;
        draw_walk(row, V, [&](float logit, int) { own += draw_key(logit) >= t; });
        return block_sum((float)own);  // exact: V is below 2^24
    };
    return draw_best(row, V, draw_search(in_row, k), score);
}

// Grid R, block DRAW_THREADS; any V, Vp a multiple of 4. Deterministic.
__global__ static void __launch_bounds__(DRAW_THREADS)
    draw_kernel(int* tokens, const float* logits, const int* samples, const int* places, DrawOptions o, int V, int Vp) {
    __shared__ DrawBest all[DRAW_THREADS];
    const float* row = logits + (int64_t)blockIdx.x * Vp;
    const double temperature = o.top_k == 1 ? 0 : o.temperature;
    early_begin();
    const int sample = __ldcg(samples + blockIdx.x), place = __ldcg(places + blockIdx.x);
    early_wait();
    const auto score = [&](float logit, int v) { return draw_score(logit, temperature, o.seed, sample, place, v); };
    bool bad = false;
    uint32_t largest = 0;
    draw_walk(row, V, [&](float logit, int) {
        bad = bad || !(fabsf(logit) <= FLT_MAX);
        largest = max(largest, draw_key(logit));
    });
    bad = __syncthreads_or(bad);
    DrawBest best = {-INFINITY, INT_MAX};
    if (!bad && temperature != 0 && o.top_k > 0 && o.top_k < V) {
        best = draw_likeliest(row, V, o.top_k, largest, score);
    } else if (!bad) {
        best = draw_best(row, V, 0, score);
    }
    all[threadIdx.x] = best;
    for (int half = DRAW_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x >= half) continue;
        const DrawBest other = all[threadIdx.x + half];
        const bool earlier = other.score == best.score && other.token < best.token;
        if (other.score > best.score || earlier) all[threadIdx.x] = best = other;
    }
    if (threadIdx.x == 0) tokens[blockIdx.x] = bad ? DRAW_NOT_FINITE : best.token;
}
#endif

// tokens: (R) drawn from logits: (R, Vp). samples: (R) which sample each row belongs to; places: (R) of the token in
// its text. All on the device; decode_run checks that they are below DRAW_SAMPLES and DRAW_PLACES, and V.
inline void draw(const Device* dev, int* tokens, const float* logits, const int* samples, const int* places,
                 const DrawOptions* o, int R, int V, int Vp) {
    if (!dev->gpu) return draw_cpu(tokens, logits, samples, places, o, R, V, Vp);
#ifdef __CUDACC__
    launch_early(dev, draw_kernel, R, DRAW_THREADS, 1, 0, tokens, logits, samples, places, *o, V, Vp);
#endif
}
