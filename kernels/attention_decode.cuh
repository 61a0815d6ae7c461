// Causal attention of single queries over cached keys and values, as sampling needs it. Row r is the token at place
// position[r] of sequence[r]; it sees the keys 0 .. position[r] of that sequence:
//     s[j] = q . k[j] / sqrt(HS),  p = softmax(s),  out = sum over j of p[j] v[j].
//
// The cache of a layer holds keys (S, NH, T, HS), then values (S, NH, T, HS), so that a head's keys lie side by side.
// attention_append puts the rows' own keys and values there first; several rows may belong to one sequence. Cost: the
// keys and values that a row sees are read once, 4 C position bytes in bf16.
//
// GPU: a block for each head and row. A group of threads that together hold a key (HS / 8 of them in bf16, 16 bytes
// each) walks over every 64th key with its own running maximum, sum and output, and the block merges these at the end,
// in order. So a row's bits depend on its keys alone.
#pragma once
#include "attention.cuh"

struct AttentionCache {
    int S, T;             // sequences, and tokens that each has room for
    const int* sequence;  // (R), device
    const int* position;  // (R), device
};

inline int64_t attention_cache_elements(int S, int T, int C) {
    return 2 * (int64_t)S * T * C;
}

// cache: (2, S, NH, T, HS); qkv: (R, 3, NH, HS)
inline void attention_append_cpu(float* cache, const float* qkv, const AttentionCache* at, int R, int C, int NH) {
    const int HS = C / NH;
    for (int r = 0; r < R; r++) {
        for (int part = 0; part < 2; part++) {
            for (int head = 0; head < NH; head++) {
                const int64_t row = (((int64_t)part * at->S + at->sequence[r]) * NH + head) * at->T + at->position[r];
                memcpy(cache + row * HS, qkv + ((int64_t)r * 3 + 1 + part) * C + head * HS, HS * sizeof(float));
            }
        }
    }
}

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
constexpr int ATTENTION_DECODE_THREADS = 512;
constexpr int ATTENTION_DECODE_AHEAD = 4;  // keys of a group of threads whose loads are in flight

// Grid R, block any; HS a multiple of 8.
template <typename X>
__global__ void attention_append_kernel(X* cache, const X* qkv, AttentionCache at, int C, int NH) {
    early_begin();
    early_wait();
    const int HS = C / NH, sequence = at.sequence[blockIdx.x], position = at.position[blockIdx.x];
    for (int i = threadIdx.x * Vec<X>::size; i < 2 * C; i += blockDim.x * Vec<X>::size) {
        const int part = i / C, head = i % C / HS, d = i % HS;
        const int64_t row = (((int64_t)part * at.S + sequence) * NH + head) * at.T + position;
        store_vec(cache + row * HS + d, load_vec(qkv + (int64_t)blockIdx.x * 3 * C + C + i));
    }
}

// Grid (NH, R), block ATTENTION_DECODE_THREADS. Deterministic.
template <typename X, int HS>
__global__ void __launch_bounds__(ATTENTION_DECODE_THREADS)
    attention_decode_kernel(X* out, const X* qkv, const X* cache, AttentionCache at, int C, int NH) {
    constexpr int size = Vec<X>::size, LANES = HS / size, GROUPS = ATTENTION_DECODE_THREADS / LANES;
    __shared__ float outputs[GROUPS][HS], maxima[GROUPS], sums[GROUPS];
    const int head = blockIdx.x, row = blockIdx.y, group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    early_begin();
    early_wait();
    const int keys = at.position[row] + 1;
    const X* k = cache + ((int64_t)at.sequence[row] * NH + head) * at.T * HS + lane * size;
    const X* v = k + (int64_t)at.S * at.T * C;
    const float scale = 1.0f / sqrtf((float)HS);
    float q[size], largest = -INFINITY, sum = 0.0f, output[size] = {};
    vec_floats(q, load_vec(qkv + (int64_t)row * 3 * C + head * HS + lane * size));
    for (int begin = 0; begin < keys; begin += ATTENTION_DECODE_AHEAD * GROUPS) {
        Vec<X> key[ATTENTION_DECODE_AHEAD], value[ATTENTION_DECODE_AHEAD];
#pragma unroll
        for (int i = 0; i < ATTENTION_DECODE_AHEAD; i++) {
            const int j = begin + i * GROUPS + group, read = j < keys ? j : keys - 1;
            key[i] = load_vec(k + (int64_t)read * HS), value[i] = load_vec(v + (int64_t)read * HS);
        }
#pragma unroll
        for (int i = 0; i < ATTENTION_DECODE_AHEAD; i++) {
            float x[size], y[size], score = 0.0f;
            vec_floats(x, key[i]), vec_floats(y, value[i]);
            for (int d = 0; d < size; d++) score = fmaf(q[d], x[d], score);
#pragma unroll
            for (int offset = LANES / 2; offset > 0; offset /= 2) score += __shfl_xor_sync(0xffffffffu, score, offset);
            if (begin + i * GROUPS + group < keys) {
                score *= scale;
                const float before = largest;
                largest = fmaxf(largest, score);
                const float fade = expf(before - largest), p = expf(score - largest);
                sum = fmaf(sum, fade, p);
                for (int d = 0; d < size; d++) output[d] = fmaf(p, y[d], output[d] * fade);
            }
        }
    }
    for (int d = 0; d < size; d++) outputs[group][lane * size + d] = output[d];
    if (lane == 0) maxima[group] = largest, sums[group] = sum;
    __syncthreads();
    if (threadIdx.x >= HS) return;
    float top = -INFINITY, total = 0.0f, result = 0.0f;
    for (int i = 0; i < GROUPS; i++) top = fmaxf(top, maxima[i]);
    for (int i = 0; i < GROUPS; i++) {
        const float share = expf(maxima[i] - top);  // 0 for a group without keys
        total = fmaf(sums[i], share, total);
        result = fmaf(outputs[i][threadIdx.x], share, result);
    }
    out[(int64_t)row * C + head * HS + threadIdx.x] = from_float<X>(result / total);
}
#endif

// Puts the keys and values of qkv: (R, 3, NH, HS) into cache: (2, S, NH, T, HS).
template <typename X>
void attention_append(const Device* dev, X* cache, const X* qkv, const AttentionCache* at, int R, int C, int NH) {
    if (!dev->gpu) {
        attention_append_cpu((float*)cache, (const float*)qkv, at, R, C, NH);
        return;
    }
#ifdef __CUDACC__
    launch_early(dev, attention_append_kernel<X>, R, 256, cache, qkv, *at, C, NH);
#endif
}

// out: (R, C). The rows' own keys and values are in the cache.
template <typename X>
void attention_decode(const Device* dev, X* out, const X* qkv, const X* cache, const AttentionCache* at, int R, int C,
                      int NH) {
    if (!dev->gpu) {
        attention_decode_cpu((float*)out, (const float*)qkv, (const float*)cache, at, R, C, NH);
        return;
    }
#ifdef __CUDACC__
    const dim3 grid(NH, R);
    const auto kernel = C / NH == 64 ? attention_decode_kernel<X, 64> : attention_decode_kernel<X, 128>;
    launch_early(dev, kernel, grid, ATTENTION_DECODE_THREADS, out, qkv, cache, *at, C, NH);
#endif
}
