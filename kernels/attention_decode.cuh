// Causal attention of single queries over cached keys and values, as sampling needs it. Row r is the token at place
// position[r] of sequence[r]; it sees the keys 0 .. position[r] of that sequence:
//     s[j] = q . k[j] / sqrt(HS),  p = softmax(s),  out = sum over j of p[j] v[j].
//
// The cache of a layer holds keys (S, NH, T, HS), then values (S, NH, T, HS), so that a head's keys lie side by side.
// attention_append puts the rows' own keys and values there first; several rows may belong to one sequence. Cost: the
// keys and values that a row sees are read once, 4 C position bytes in bf16.
//
// GPU: a row's keys are dealt to four parts of 256 threads. A group of threads that together hold a key (HS / 8 of them
// in bf16, 16 bytes each) walks over every 128th key with its own running maximum, sum and output. At the end each part
// merges its groups, and the first one merges the parts, in order. So a row's bits depend on its keys alone. If rows
// and heads are fewer than Hopper's multiprocessors, each part is a block of its own, so that the 12 heads of a GPT-2
// keep 48 of them busy; the four blocks are a cluster and read each other's shared memory. Otherwise one block has all.
#pragma once
#include "attention.cuh"
#include "each.cuh"
#ifdef __CUDACC__
#include <cooperative_groups.h>
#include "mma.cuh"
#endif

struct AttentionCache {
    int S, T;             // sequences, and tokens that each has room for
    const int* sequence;  // (R), device
    const int* position;  // (R), device
};

inline int64_t attention_cache_elements(int S, int T, int C) {
    return 2 * (int64_t)S * T * C;
}

// Puts the keys and values of qkv: (R, 3, NH, HS) into cache: (2, S, NH, T, HS), element by element.
template <typename X>
struct AttentionAppend {
    X* cache;
    const X* qkv;
    AttentionCache to;
    int C, NH;

    __host__ __device__ void at(int64_t i) const {
        const int HS = C / NH, r = (int)(i / (2 * C)), part = (int)(i / C % 2), head = (int)(i % C) / HS;
        const int64_t row = (((int64_t)part * to.S + to.sequence[r]) * NH + head) * to.T + to.position[r];
        cache[row * HS + i % HS] = qkv[r * 3 * (int64_t)C + C + i % (2 * C)];
    }
};

// out: (R, C)
inline void attention_decode_cpu(float* out, const float* qkv, const float* cache, const AttentionCache* at, int R,
                                 int C, int NH) {
    const int HS = C / NH;
#pragma omp parallel
    {
        float lse, *p = (float*)memory_take((size_t)at->T * sizeof(float));
#pragma omp for schedule(static)
        for (int i = 0; i < R * NH; i++) {
            const int r = i / NH, head = i % NH;
            const float* keys = cache + ((int64_t)at->sequence[r] * NH + head) * at->T * HS;
            attention_query_cpu(out + (int64_t)r * C + head * HS, &lse, p, qkv + (int64_t)r * 3 * C + head * HS, keys,
                                keys + (int64_t)at->S * at->T * C, HS, at->position[r] + 1, HS);
        }
        free(p);
    }
}

#ifdef __CUDACC__
constexpr int ATTENTION_DECODE_THREADS = 256;  // of a part
constexpr int ATTENTION_DECODE_PARTS = 4;      // of a head and row

// The largest of the scores that some threads have computed, and the sum of e^(score - largest).
struct AttentionSeen {
    float largest, sum;
};

// Returns an element of the output of `count` parties, in order: seen(i), and the element output(i) of each, which is
// in units of e^largest. `all`: what they have seen together. Parties without a key add nothing.
template <typename Seen, typename Output>
__device__ inline float attention_merge(AttentionSeen* all, int count, const Seen& seen, const Output& output) {
    float largest = -INFINITY, sum = 0.0f, result = 0.0f;
    for (int i = 0; i < count; i++) largest = fmaxf(largest, seen(i).largest);
    for (int i = 0; i < count; i++) {
        const float share = largest > -INFINITY ? expf(seen(i).largest - largest) : 0.0f;
        sum = fmaf(seen(i).sum, share, sum);
        result = fmaf(output(i), share, result);
    }
    *all = {largest, sum};
    return result;
}

// BLOCKS: 4, a block a part, or 1. Grid (NH BLOCKS, R) in clusters of BLOCKS, block ATTENTION_DECODE_THREADS PARTS /
// BLOCKS. append: a row's own key and value are not in the cache yet; they are taken from qkv and put there.
// Deterministic; equal bits for any BLOCKS.
template <typename X, int HS, int BLOCKS>
__global__ void __launch_bounds__(ATTENTION_DECODE_THREADS* ATTENTION_DECODE_PARTS / BLOCKS)
    attention_decode_kernel(X* out, const X* qkv, X* cache, AttentionCache at, int C, int NH, bool append) {
    constexpr int THREADS = ATTENTION_DECODE_THREADS, PARTS = ATTENTION_DECODE_PARTS, OWN = PARTS / BLOCKS;
    constexpr int size = Vec<X>::size, LANES = HS / size, GROUPS = THREADS / LANES;
    constexpr int AHEAD = BLOCKS > 1 ? 4 : 2;  // keys of a group whose loads are in flight; 1,024 threads spill with 4
    __shared__ float outputs[OWN][GROUPS][HS], merged[OWN][HS];
    __shared__ AttentionSeen seen[OWN][GROUPS], part_seen[OWN];
    const int head = blockIdx.x / BLOCKS, row = blockIdx.y, own_part = threadIdx.x / THREADS;
    const int part = BLOCKS > 1 ? blockIdx.x % BLOCKS : own_part;
    const int d = threadIdx.x % THREADS, group = d / LANES, lane = d % LANES;
    early_begin();
    const int keys = __ldcg(at.position + row) + 1;  // not from an L1 cache, which may be older before the wait
    const X* own = qkv + (int64_t)row * 3 * C + head * HS + lane * size;
    X* k = cache + ((int64_t)__ldcg(at.sequence + row) * NH + head) * at.T * HS + lane * size;
    X* v = k + (int64_t)at.S * at.T * C;
    const float scale = 1.0f / sqrtf((float)HS);
    // The cache of earlier steps comes to the L2 cache while the kernels before run.
    for (int j = part * GROUPS + group; j < keys; j += PARTS * GROUPS)
        prefetch_l2(k + (int64_t)j * HS), prefetch_l2(v + (int64_t)j * HS);
    early_wait();
    float q[size], largest = -INFINITY, sum = 0.0f, output[size] = {};
    vec_floats(q, load_vec(own));
    for (int begin = 0; begin < keys; begin += AHEAD * PARTS * GROUPS) {
        Vec<X> key[AHEAD], value[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int j = begin + (i * PARTS + part) * GROUPS + group;
            const bool last = j >= keys - 1;
            const int64_t read = (int64_t)(last ? keys - 1 : j) * HS;
            key[i] = load_vec(append && last ? own + C : k + read);
            value[i] = load_vec(append && last ? own + 2 * C : v + read);
            if (append && j == keys - 1) store_vec(k + read, key[i]), store_vec(v + read, value[i]);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            float x[size], y[size], score = 0.0f;
            vec_floats(x, key[i]), vec_floats(y, value[i]);
            for (int c = 0; c < size; c++) score = fmaf(q[c], x[c], score);
#pragma unroll
            for (int offset = LANES / 2; offset > 0; offset /= 2) score += __shfl_xor_sync(0xffffffffu, score, offset);
            if (begin + (i * PARTS + part) * GROUPS + group < keys) {
                score *= scale;
                const float before = largest;
                largest = fmaxf(largest, score);
                const float fade = expf(before - largest), p = expf(score - largest);
                sum = fmaf(sum, fade, p);
                for (int c = 0; c < size; c++) output[c] = fmaf(p, y[c], output[c] * fade);
            }
        }
    }
    for (int i = 0; i < size; i++) outputs[own_part][group][lane * size + i] = output[i];
    if (lane == 0) seen[own_part][group] = {largest, sum};
    __syncthreads();
    AttentionSeen all;
    if (d < HS) {
        merged[own_part][d] = attention_merge(
            &all, GROUPS, [&](int i) { return seen[own_part][i]; }, [&](int i) { return outputs[own_part][i][d]; });
    }
    if (d == 0) part_seen[own_part] = all;
    const auto write = [&](const auto& seen_by, const auto& output_of) {
        if (part > 0 || d >= HS) return;
        const float result = attention_merge(&all, PARTS, seen_by, output_of);
        out[(int64_t)row * C + head * HS + d] = from_float<X>(result / all.sum);
    };
    if constexpr (BLOCKS == 1) {
        __syncthreads();
        write([&](int i) { return part_seen[i]; }, [&](int i) { return merged[i][d]; });
    } else {
#if __CUDA_ARCH__ >= 900
        const auto cluster = cooperative_groups::this_cluster();
        cluster.sync();
        write([&](int i) { return *cluster.map_shared_rank(part_seen, i); },
              [&](int i) { return *cluster.map_shared_rank(&merged[0][d], i); });
        cluster.sync();  // the first block has read the others' shared memory
#endif
    }
}

template <typename X, int HS>
void attention_decode_launch(const Device* dev, X* out, const X* qkv, X* cache, const AttentionCache* at, int R, int C,
                             int NH, bool append) {
    constexpr int PARTS = ATTENTION_DECODE_PARTS;
    const int blocks = dev->compute >= 90 && R * NH < dev->sm_count ? PARTS : 1;
    launch_early(dev, blocks > 1 ? attention_decode_kernel<X, HS, PARTS> : attention_decode_kernel<X, HS, 1>,
                 dim3(NH * blocks, R), ATTENTION_DECODE_THREADS * PARTS / blocks, blocks, 0, out, qkv, cache, *at, C,
                 NH, append);
}
#endif

template <typename X>
void attention_append(const Device* dev, X* cache, const X* qkv, const AttentionCache* at, int R, int C, int NH) {
    for_each(dev, AttentionAppend<X>{cache, qkv, *at, C, NH}, (int64_t)R * 2 * C);
}

// out: (R, C). append: each row is of another sequence, and its own key and value are put into the cache; otherwise
// they are there.
template <typename X>
void attention_decode(const Device* dev, X* out, const X* qkv, X* cache, const AttentionCache* at, int R, int C, int NH,
                      bool append) {
    if (!dev->gpu) {
        if (append) attention_append(dev, cache, qkv, at, R, C, NH);
        attention_decode_cpu((float*)out, (const float*)qkv, (const float*)cache, at, R, C, NH);
        return;
    }
#ifdef __CUDACC__
    const auto launch = C / NH == 64 ? attention_decode_launch<X, 64> : attention_decode_launch<X, 128>;
    launch(dev, out, qkv, cache, at, R, C, NH, append);
#endif
}
