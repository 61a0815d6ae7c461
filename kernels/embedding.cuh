// Token and position embedding: out[b][t][c] = wte[tokens[b][t]][c] + wpe[t][c]. Rows of a sampling step name their
// positions themselves.
//
// Backward: dwpe[t] (+)= sum over b of dout[b][t], and dwte_sum[v] += sum of dout over the positions that hold token v.
// The table is tied to the head, whose gradient is already in dwte_sum, the fp32 sum over the micro-batches so far.
// When G is float, dwte is dwte_sum itself; when G is bf16, each call rounds all of dwte_sum to dwte, so the call of
// the last micro-batch leaves the result.
//
// The scatter is done as a gather, so that it needs no atomics and is deterministic: the loader sorts the positions by
// token (`order`), and `bucket` says where each token's run of positions begins. These are summed in a fixed order.
// Text is Zipf-distributed: most buckets have a handful of positions and a few have thousands, so a warp takes a small
// bucket alone and a whole block takes a large one. A block works on 128 bytes of channels; neighbouring tokens, which
// often both have large buckets, go to different blocks. Bytes: dout is read twice, once for each table.
#pragma once
#include <assert.h>

#include "common.cuh"

constexpr int EMBEDDING_LANES = 8;   // lanes side by side on channels: 128 bytes, a cache line
constexpr int EMBEDDING_SMALL = 64;  // positions in a bucket that one warp takes alone
constexpr int EMBEDDING_WARPS = 8;

// out: (B, T, C); tokens: (B, T); wte: (Vp, C); wpe: (maxT, C); positions: (B, T), or NULL: t
inline void embedding_forward_cpu(float* out, const int* tokens, const float* wte, const float* wpe, int B, int T,
                                  int C, const int* positions = nullptr) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < (int64_t)B * T; i++) {
        const float* token = wte + (int64_t)tokens[i] * C;
        const float* position = wpe + (positions ? positions[i] : i % T) * C;
        for (int c = 0; c < C; c++) out[i * C + c] = token[c] + position[c];
    }
}

// dwte: (Vp, C); dwpe: (T, C); dout: (B, T, C); order: (B * T); bucket: (buckets + 1, 2)
inline void embedding_backward_cpu(float* dwte, float* dwpe, const float* dout, const int* order, const int* bucket,
                                   int buckets, int B, int T, int C, bool accumulate) {
#pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < buckets; i++) {
        float* row = dwte + (int64_t)bucket[2 * i] * C;
        for (int p = bucket[2 * i + 1]; p < bucket[2 * i + 3]; p++)
            for (int c = 0; c < C; c++) row[c] += dout[(int64_t)order[p] * C + c];
    }
#pragma omp parallel for schedule(static)
    for (int t = 0; t < T; t++) {
        float* row = dwpe + (int64_t)t * C;
        if (!accumulate) memset(row, 0, C * sizeof(float));
        for (int b = 0; b < B; b++)
            for (int c = 0; c < C; c++) row[c] += dout[((int64_t)b * T + t) * C + c];
    }
}

#ifdef __CUDACC__
// Grid B * T (a block per position), block any, C a multiple of 8. Deterministic. Launched without launch_early, so it
// need not wait; early_begin lets the next kernel load its weights.
template <typename X>
__global__ void embedding_forward_kernel(X* out, const int* tokens, const X* wte, const X* wpe, int T, int C,
                                         const int* positions) {
    early_begin();
    int64_t position = blockIdx.x;
    const X* token_row = wte + (int64_t)tokens[position] * C;
    const X* position_row = wpe + (positions ? positions[position] : position % T) * C;
    for (int c = threadIdx.x * Vec<X>::size; c < C; c += blockDim.x * Vec<X>::size) {
        Vec<X> a = load_vec(token_row + c), b = load_vec(position_row + c);
        for (int j = 0; j < Vec<X>::size; j++) a.lane[j] = from_float<X>(to_float(a.lane[j]) + to_float(b.lane[j]));
        store_vec(out + position * C + c, a);
    }
}

// `size` consecutive elements of T, moved in pieces of up to 16 bytes.
template <typename T, int size>
struct alignas(sizeof(T) * size < 16 ? sizeof(T) * size : 16) EmbeddingPack {
    T lane[size];
};

// Grid ceil(T * C / (256 vectors)), block 256, C a multiple of 8. Deterministic.
template <typename X, typename G>
__global__ void embedding_backward_position_kernel(G* dwpe, const X* dout, int B, int64_t elements, bool accumulate) {
    constexpr int size = Vec<X>::size;
    typedef EmbeddingPack<G, size> Pack;
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * size;
    if (i >= elements) return;
    float sum[size] = {};
#pragma unroll 8
    for (int b = 0; b < B; b++) {
        Vec<X> d = load_vec(dout + b * elements + i);
        for (int j = 0; j < size; j++) sum[j] += to_float(d.lane[j]);
    }
    Pack pack = {};
    if (accumulate) pack = *(const Pack*)(dwpe + i);
    for (int j = 0; j < size; j++) pack.lane[j] = from_float<G>(to_float(pack.lane[j]) + sum[j]);
    *(Pack*)(dwpe + i) = pack;
}

// Sums dout over the positions first, first + step, ... < last, then over the warp's groups: complete in lanes 0..7.
template <typename X>
__device__ inline void embedding_sum(float sum[Vec<X>::size], const X* dout, const int* order, int first, int last,
                                     int step, int channel, int C) {
    for (int j = 0; j < Vec<X>::size; j++) sum[j] = 0.0f;
    if (channel < C) {
#pragma unroll 4
        for (int p = first; p < last; p += step) {
            Vec<X> d = load_vec(dout + (int64_t)order[p] * C + channel);
            for (int j = 0; j < Vec<X>::size; j++) sum[j] += to_float(d.lane[j]);
        }
    }
    for (int offset = EMBEDDING_LANES; offset < 32; offset *= 2)
        for (int j = 0; j < Vec<X>::size; j++) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], offset);
}

template <int size>
__device__ inline void embedding_add(float* row, const float sum[size]) {
    typedef EmbeddingPack<float, size> Pack;
    Pack pack = *(const Pack*)row;
    for (int j = 0; j < size; j++) pack.lane[j] += sum[j];
    *(Pack*)row = pack;
}

// Grid (ceil(buckets / 8), ceil(C / (8 vectors))), block 256, C a multiple of 8. Warp w of block x takes the bucket
// x + w * gridDim.x if it is small; then the block takes its large ones in turn. Deterministic.
template <typename X>
__global__ void __launch_bounds__(32 * EMBEDDING_WARPS)
    embedding_backward_token_kernel(float* dwte_sum, const X* dout, const int* order, const int* bucket, int buckets,
                                    int C) {
    constexpr int size = Vec<X>::size, groups = 32 / EMBEDDING_LANES;
    __shared__ float partial[EMBEDDING_WARPS][EMBEDDING_LANES][size];
    int warp = threadIdx.x / 32, lane = threadIdx.x % EMBEDDING_LANES, group = threadIdx.x % 32 / EMBEDDING_LANES;
    int channel = (blockIdx.y * EMBEDDING_LANES + lane) * size;
    bool writer = group == 0 && channel < C;
    float sum[size];
    int i = blockIdx.x + warp * gridDim.x;
    if (i < buckets && bucket[2 * i + 3] - bucket[2 * i + 1] <= EMBEDDING_SMALL) {
        embedding_sum(sum, dout, order, bucket[2 * i + 1] + group, bucket[2 * i + 3], groups, channel, C);
        if (writer) embedding_add<size>(dwte_sum + (int64_t)bucket[2 * i] * C + channel, sum);
    }
    for (i = blockIdx.x; i < buckets; i += gridDim.x) {
        int first = bucket[2 * i + 1], last = bucket[2 * i + 3];
        if (last - first <= EMBEDDING_SMALL) continue;
        embedding_sum(sum, dout, order, first + warp * groups + group, last, EMBEDDING_WARPS * groups, channel, C);
        __syncthreads();  // the last bucket's partial sums were read
        if (group == 0)
            for (int j = 0; j < size; j++) partial[warp][lane][j] = sum[j];
        __syncthreads();
        if (warp != 0 || !writer) continue;
        for (int w = 1; w < EMBEDDING_WARPS; w++)
            for (int j = 0; j < size; j++) sum[j] += partial[w][lane][j];
        embedding_add<size>(dwte_sum + (int64_t)bucket[2 * i] * C + channel, sum);
    }
}

// Grid ceil(n / 2048), block 256, n a multiple of 8. Deterministic.
__global__ static void embedding_round_kernel(bf16* dwte, const float* dwte_sum, int64_t n) {
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (i >= n) return;
    EmbeddingPack<float, 8> sum = *(const EmbeddingPack<float, 8>*)(dwte_sum + i);
    store_vec(dwte + i, round_vec<bf16>(sum.lane));
}
#endif

// out: (B, T, C); tokens: (B, T); wte: (Vp, C); wpe: (maxT, C); positions: (B, T), or NULL: t
template <typename X>
void embedding_forward(const Device* dev, X* out, const int* tokens, const X* wte, const X* wpe, int B, int T, int C,
                       const int* positions = nullptr) {
    assert(C % 8 == 0);
    if constexpr (std::is_same_v<X, float>) {
        if (!dev->gpu) return embedding_forward_cpu(out, tokens, wte, wpe, B, T, C, positions);
    }
#ifdef __CUDACC__
    int threads = ceil_div(C / Vec<X>::size, 32) * 32;
    threads = threads < 256 ? threads : 256;
    launch_kernel(dev, embedding_forward_kernel<X>, (int64_t)B * T, threads, 0, out, tokens, wte, wpe, T, C, positions);
#endif
}

// dwte: (Vp, C); dwpe: (T, C); dwte_sum: (Vp, C); dout: (B, T, C); order: (B * T) positions sorted by token;
// bucket: (buckets + 1, 2) [token, first index into order], the last row [-1, B * T]. `accumulate` is about dwpe.
template <typename X, typename G>
void embedding_backward(const Device* dev, G* dwte, G* dwpe, float* dwte_sum, const X* dout, const int* order,
                        const int* bucket, int buckets, int B, int T, int C, int Vp, bool accumulate) {
    assert(C % 8 == 0);
    assert(sizeof(G) == sizeof(bf16) || (const void*)dwte == (const void*)dwte_sum);
    if constexpr (std::is_same_v<X, float>) {
        if (!dev->gpu) return embedding_backward_cpu(dwte, dwpe, dout, order, bucket, buckets, B, T, C, accumulate);
    }
#ifdef __CUDACC__
    int64_t positions = (int64_t)T * C;
    launch_kernel(dev, embedding_backward_position_kernel<X, G>, ceil_div(positions, 256 * Vec<X>::size), 256, 0, dwpe,
                  dout, B, positions, accumulate);
    dim3 grid(ceil_div(buckets, EMBEDDING_WARPS), ceil_div(C, EMBEDDING_LANES * Vec<X>::size));
    launch_kernel(dev, embedding_backward_token_kernel<X>, grid, 32 * EMBEDDING_WARPS, 0, dwte_sum, dout, order, bucket,
                  buckets, C);
    if constexpr (std::is_same_v<G, bf16>) {
        int64_t n = (int64_t)Vp * C;
        launch_kernel(dev, embedding_round_kernel, ceil_div(n, 256 * 8), 256, 0, dwte, dwte_sum, n);
    }
#endif
}
