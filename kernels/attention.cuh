// Causal multi-head attention. For each batch and head, with q, k, v of shape (T, HS), scale = 1/sqrt(HS) and j <= i:
//   s[i][j] = scale * q[i].k[j],  lse[i] = log(sum_j exp(s[i][j])),  p = exp(s - lse),  out[i] = sum_j p[i][j] v[j]
// and backward, with D[i] = dout[i].out[i]:
//   dp[i][j] = dout[i].v[j],  ds = p * (dp - D),  dq = scale * ds k,  dk = scale * ds^T q,  dv = p^T dout.
// qkv and dqkv are (B,T,3,NH,HS), out and dout (B,T,NH,HS), lse (B,NH,T). The T x T matrix is never in memory.
// In bf16 the forward pass must move 8 B T C bytes, backward 18 B T C (4 of them for D); well below T = 1024 the tensor
// cores already are the limit for both.
// bf16: mma.sync in attention_mma.cuh (sm_80 on), and on Hopper wgmma in attention_hopper_forward.cuh and
// attention_hopper_backward.cuh.
// fp32: plainly, a warp for each query (forward, dq) or key (dk, dv), without tiles.
#pragma once

#include <math.h>

#include "common.cuh"
#include "fp8_codes.cuh"
#include "matmul.cuh"

// Sum of a[i] * b[i] in 16 interleaved partial sums (one vector register's worth), added pairwise: a fixed order.
inline float attention_dot_cpu(const float* a /*(n)*/, const float* b /*(n)*/, int n) {
    float lane[16] = {0.0f};
    int i = 0;
    for (; i + 16 <= n; i += 16)
        for (int l = 0; l < 16; l++) lane[l] = fmaf(a[i + l], b[i + l], lane[l]);
    for (int l = 0; i + l < n; l++) lane[l] = fmaf(a[i + l], b[i + l], lane[l]);
    for (int half = 8; half > 0; half /= 2)
        for (int l = 0; l < half; l++) lane[l] += lane[l + half];
    return lane[0];
}

// y += a * x
inline void attention_axpy_cpu(float* __restrict__ y /*(n)*/, float a, const float* __restrict__ x /*(n)*/, int n) {
    for (int i = 0; i < n; i++) y[i] = fmaf(a, x[i], y[i]);
}

// One query of a head over `keys` keys: out (HS) and lse. `p` has room for a row of scores.
inline void attention_query_cpu(float* out /*(HS)*/, float* lse, float* p /*(keys)*/, const float* q /*(HS)*/,
                                const float* k /*(keys,HS), rows `stride` apart, as those of v*/, const float* v,
                                int64_t stride, int keys, int HS) {
    const float scale = 1.0f / sqrtf((float)HS);
    float largest = -INFINITY, sum = 0.0f;
    for (int j = 0; j < keys; j++) {
        p[j] = scale * attention_dot_cpu(q, k + j * stride, HS);
        largest = p[j] > largest ? p[j] : largest;
    }
    for (int j = 0; j < keys; j++) sum += p[j] = expf(p[j] - largest);
    for (int d = 0; d < HS; d++) out[d] = 0.0f;
    for (int j = 0; j < keys; j++) attention_axpy_cpu(out, p[j], v + j * stride, HS);
    for (int d = 0; d < HS; d++) out[d] /= sum;
    *lse = largest + logf(sum);
}

inline void attention_forward_cpu(float* out /*(B,T,C)*/, float* lse /*(B,NH,T)*/, const float* qkv /*(B,T,3,NH,HS)*/,
                                  int B, int T, int C, int NH) {
    const int HS = C / NH;
    const int64_t stride = 3 * (int64_t)C;
#pragma omp parallel for schedule(static)
    for (int bh = 0; bh < B * NH; bh++) {
        const int64_t first = (int64_t)(bh / NH) * T;  // row of token 0 of this sequence
        const int64_t column = (int64_t)(bh % NH) * HS;
        float* p = (float*)memory_take((size_t)T * sizeof(float));
        for (int i = 0; i < T; i++) {
            const float* q = qkv + first * stride + column;  // k and v lie C and 2C behind
            attention_query_cpu(out + (first + i) * C + column, lse + (int64_t)bh * T + i, p, q + i * stride, q + C,
                                q + 2 * (int64_t)C, stride, i + 1, HS);
        }
        free(p);
    }
}

// One head of one sequence, query by query: each adds its share to dk and dv of the keys that it attends to.
inline void attention_backward_head_cpu(float* dq /*(T,HS), rows 3C apart; dk and dv lie C and 2C behind*/,
                                        const float* dout /*(T,HS), rows C apart*/, const float* q /*as dq*/,
                                        const float* out /*as dout*/, const float* lse /*(T)*/, int T, int C, int HS) {
    const float *k = q + C, *v = q + 2 * (int64_t)C;
    float *dk = dq + C, *dv = dq + 2 * (int64_t)C;
    const int64_t stride = 3 * (int64_t)C;
    const float scale = 1.0f / sqrtf((float)HS);
    for (int i = 0; i < T; i++)
        for (int d = 0; d < HS; d++) dq[i * stride + d] = dk[i * stride + d] = dv[i * stride + d] = 0.0f;
    for (int i = 0; i < T; i++) {
        const float *query = q + i * stride, *dout_row = dout + i * (int64_t)C;
        const float D = attention_dot_cpu(dout_row, out + i * (int64_t)C, HS);
        for (int j = 0; j <= i; j++) {
            float p = expf(scale * attention_dot_cpu(query, k + j * stride, HS) - lse[i]);
            float ds = scale * p * (attention_dot_cpu(dout_row, v + j * stride, HS) - D);
            attention_axpy_cpu(dq + i * stride, ds, k + j * stride, HS);
            attention_axpy_cpu(dk + j * stride, ds, query, HS);
            attention_axpy_cpu(dv + j * stride, p, dout_row, HS);
        }
    }
}

inline void attention_backward_cpu(float* dqkv /*(B,T,3,NH,HS)*/, const float* dout /*(B,T,C)*/,
                                   const float* qkv /*(B,T,3,NH,HS)*/, const float* out /*(B,T,C)*/,
                                   const float* lse /*(B,NH,T)*/, int B, int T, int C, int NH) {
    const int HS = C / NH;
#pragma omp parallel for schedule(static)
    for (int bh = 0; bh < B * NH; bh++) {
        int64_t first = (int64_t)(bh / NH) * T;
        int64_t column = (int64_t)(bh % NH) * HS;
        int64_t wide = first * 3 * C + column, narrow = first * C + column;
        attention_backward_head_cpu(dqkv + wide, dout + narrow, qkv + wide, out + narrow, lse + (int64_t)bh * T, T, C,
                                    HS);
    }
}

// Scratch memory of the backward pass. Its size is known without a GPU, for plans.

// Bytes of a block's shared memory that the backward pass by mma.sync needs at least for heads of 128.
constexpr int ATTENTION_WIDE_BYTES = 131840;

// Its parts: {ticket, flags}; rows: lse and D, or D alone; dq_sum; column sums. mma.sync's kernels have tiles of half
// the queries, and no column sums.
struct AttentionScratch {
    int64_t flags, rows, dq_sum, bytes;  // bytes: of all
};

// The number of rows of column sums, one for every 16 tokens.
inline int64_t hopper_backward_strips(int B, int T) {
    return B * ceil_div(T, 16);
}

inline AttentionScratch attention_scratch(int B, int T, int NH, int HS) {
    const int64_t heads = (int64_t)B * NH, padded = ceil_div(T, 128) * 128;
    AttentionScratch scratch;
    scratch.flags = 256 + ceil_div(heads * (padded / 64) * 2 * 4, 256) * 256;
    scratch.rows = heads * padded * 2 * 4;
    scratch.dq_sum = heads * padded * HS * 4;
    scratch.bytes = scratch.flags + scratch.rows + scratch.dq_sum + hopper_backward_strips(B, T) * 3 * NH * HS * 4;
    return scratch;
}

#ifdef __CUDACC__
#include "attention_hopper_backward.cuh"
#include "attention_hopper_forward.cuh"
#include "attention_mma.cuh"

// fp32. A warp has a query or a key; a lane has every 32nd of its HS columns. A block of 256 threads has 8 of B * NH *
// T rows, so the grid is ceil(B * NH * T / 8). HS 64 or 128, any T; deterministic.

template <int HS>
struct Fp32Row {
    float x[HS / 32];

    __device__ void load(const float* row) {
        for (int i = 0; i < HS / 32; i++) x[i] = row[i * 32 + threadIdx.x % 32];
    }
    __device__ void store(float* row, float factor) const {
        for (int i = 0; i < HS / 32; i++) row[i * 32 + threadIdx.x % 32] = x[i] * factor;
    }
    __device__ void add(float factor, const Fp32Row& other) {
        for (int i = 0; i < HS / 32; i++) x[i] = fmaf(factor, other.x[i], x[i]);
    }
    __device__ float dot(const Fp32Row& other) const {
        float sum = 0.0f;
        for (int i = 0; i < HS / 32; i++) sum = fmaf(x[i], other.x[i], sum);
        return warp_sum(sum);
    }
};

template <int HS>
__global__ void __launch_bounds__(256)
    attention_forward_fp32_kernel(float* out /*(B,T,C)*/, float* lse /*(B,NH,T)*/, const float* qkv /*(B,T,3C)*/, int B,
                                  int T, int NH, float scale) {
    const int64_t row = blockIdx.x * 8ll + threadIdx.x / 32, C = (int64_t)NH * HS;
    if (row >= (int64_t)B * NH * T) return;
    const int64_t bh = row / T, query = row % T, first = bh / NH * T, column = bh % NH * HS;
    const float* qkv_head = qkv + first * 3 * C + column;
    Fp32Row<HS> q, k, v, o = {};
    float largest = -INFINITY, sum = 0.0f;
    q.load(qkv_head + query * 3 * C);
    for (int64_t key = 0; key <= query; key++) {
        k.load(qkv_head + key * 3 * C + C), v.load(qkv_head + key * 3 * C + 2 * C);
        const float s = q.dot(k) * scale, top = fmaxf(largest, s), factor = expf(largest - top), p = expf(s - top);
        for (float& x : o.x) x *= factor;
        o.add(p, v);
        sum = sum * factor + p, largest = top;
    }
    o.store(out + (first + query) * C + column, 1.0f / sum);
    if (threadIdx.x % 32 == 0) lse[row] = largest + logf(sum);
}

// FOR_KEYS: the row is a key and gets dk and dv; otherwise it is a query and gets dq.
template <int HS, bool FOR_KEYS>
__global__ void __launch_bounds__(256)
    attention_backward_fp32_kernel(float* dqkv /*(B,T,3C)*/, const float* dout /*(B,T,C)*/,
                                   const float* qkv /*(B,T,3C)*/, const float* lse /*(B,NH,T)*/,
                                   const float* D /*(B,NH,T)*/, int B, int T, int NH, float scale) {
    const int64_t row = blockIdx.x * 8ll + threadIdx.x / 32, C = (int64_t)NH * HS;
    if (row >= (int64_t)B * NH * T) return;
    const int64_t bh = row / T, own = row % T, first = bh / NH * T, column = bh % NH * HS;
    const float *qkv_head = qkv + first * 3 * C + column, *dout_head = dout + first * C + column;
    float* to = dqkv + (first + own) * 3 * C + column;
    Fp32Row<HS> q, k, v, d, sum1 = {}, sum2 = {};  // dk and dv, or dq alone
    for (int64_t other = FOR_KEYS ? own : 0; other < (FOR_KEYS ? T : own + 1); other++) {
        const int64_t query = FOR_KEYS ? other : own, key = FOR_KEYS ? own : other;
        q.load(qkv_head + query * 3 * C), d.load(dout_head + query * C);
        k.load(qkv_head + key * 3 * C + C), v.load(qkv_head + key * 3 * C + 2 * C);
        const float p = expf(q.dot(k) * scale - lse[bh * T + query]), ds = p * (d.dot(v) - D[bh * T + query]);
        sum1.add(ds, FOR_KEYS ? q : k);
        if (FOR_KEYS) sum2.add(p, d);
    }
    sum1.store(FOR_KEYS ? to + C : to, scale);
    if (FOR_KEYS) sum2.store(to + 2 * C, 1.0f);
}

template <typename X, int HS>
void attention_forward_gpu(const Device* dev, X* out, float* lse, const X* qkv, int B, int T, int NH) {
    if constexpr (std::is_same_v<X, float>) {
        launch_kernel(dev, attention_forward_fp32_kernel<HS>, (unsigned)ceil_div((int64_t)B * NH * T, 8), 256, 0, out,
                      lse, qkv, B, T, NH, 1.0f / sqrtf((float)HS));
    } else {
        if (!hopper_runs(dev, attention_hopper_forward_kernel<HopperForward<HS>>))
            return attention_forward_mma<HS>(dev, out, lse, qkv, B, T, NH);
        attention_hopper_forward<HopperForward<HS>>(dev, out, lse, qkv, B, T, NH);
    }
}
#endif

// X float or bf16 (on the CPU float alone). On the GPU C / NH must be 64 or 128.
template <typename X>
void attention_forward(const Device* dev, X* out /*(B,T,C)*/, float* lse /*(B,NH,T)*/, const X* qkv /*(B,T,3,NH,HS)*/,
                       int B, int T, int C, int NH) {
    if (B == 0 || T == 0) return;
    if (!dev->gpu) {
        if constexpr (std::is_same_v<X, float>) return attention_forward_cpu(out, lse, qkv, B, T, C, NH);
        user_error("attention on the CPU computes in fp32; type --matmul fp32");
    }
#ifdef __CUDACC__
    if (C == NH * 64) return attention_forward_gpu<X, 64>(dev, out, lse, qkv, B, T, NH);
    if (C == NH * 128) return attention_forward_gpu<X, 128>(dev, out, lse, qkv, B, T, NH);
#endif
    user_error("attention on the GPU has heads of 64 or 128 channels, found %d / %d", C, NH);
}

// Enough for any X; fp32 needs less, the CPU none. Also refuses sizes that backward cannot launch, before anything is
// allocated.
inline int64_t attention_backward_scratch_bytes(const Device* dev, int B, int T, int C, int NH) {
    if (!dev->gpu) return 0;
    if (C == NH * 128 && dev->shared_memory < ATTENTION_WIDE_BYTES) {
        user_error(
            "attention with heads of 128 channels needs %d bytes of shared memory, this GPU has %d for a block; type "
            "--heads %d",
            ATTENTION_WIDE_BYTES, dev->shared_memory, 2 * NH);
    }
    return attention_scratch(B, T, NH, C / NH).bytes;
}

#ifdef __CUDACC__
// Returns the column sums of dqkv, (hopper_backward_strips, 3C), in scratch, from Hopper's kernel; otherwise NULL.
template <typename X, int HS>
float* attention_backward_gpu(const Device* dev, X* dqkv, char* scratch, const X* dout, const X* qkv, const X* out,
                              const float* lse, int B, int T, int NH, const Fp8Codes& codes) {
    if constexpr (std::is_same_v<X, bf16>) {
        if (codes.rows)
            return attention_hopper_backward<HopperBackward<HS, false, true>>(dev, dqkv, scratch, dout, qkv, out, lse,
                                                                              B, T, NH, codes);
        if (hopper_runs(dev, attention_hopper_backward_kernel<HopperBackward<HS>>))
            return attention_hopper_backward<HopperBackward<HS>>(dev, dqkv, scratch, dout, qkv, out, lse, B, T, NH);
    }
    const AttentionScratch sizes = attention_scratch(B, T, NH, HS);
    float* D = (float*)(scratch + sizes.flags);
    attention_rows<X, HS, 0>(dev, D, nullptr, 0, dout, out, lse, B, T, NH);
    if constexpr (std::is_same_v<X, float>) {
        const float scale = 1.0f / sqrtf((float)HS);
        const unsigned grid = (unsigned)ceil_div((int64_t)B * T * NH, 8);
        launch_kernel(dev, attention_backward_fp32_kernel<HS, true>, grid, 256, 0, dqkv, dout, qkv, lse, D, B, T, NH,
                      scale);
        launch_kernel(dev, attention_backward_fp32_kernel<HS, false>, grid, 256, 0, dqkv, dout, qkv, lse, D, B, T, NH,
                      scale);
    } else if constexpr (HS == 64) {
        attention_backward_mma<BackwardShape<64, 64>>(dev, dqkv, scratch, sizes, dout, qkv, lse, B, T, NH);
    } else if (dev->compute >= 90 && dev->compute < 120) {  // 227 KiB of shared memory
        attention_backward_mma<BackwardShape<128, 64>>(dev, dqkv, scratch, sizes, dout, qkv, lse, B, T, NH);
    } else {
        attention_backward_mma<BackwardShape<128, 32>>(dev, dqkv, scratch, sizes, dout, qkv, lse, B, T, NH);
    }
    return nullptr;
}
#endif

// True if attention_backward can write codes here.
inline bool attention_backward_codes([[maybe_unused]] const Device* dev) {
#ifdef __CUDACC__
    return hopper_runs(dev, attention_hopper_backward_kernel<HopperBackward<64, false, true>>);
#else
    return false;
#endif
}

// Writes every element of dqkv; dbias (3C) (+)= its column sums, which the Hopper kernel takes from its registers.
// `scratch` has attention_backward_scratch_bytes and room for matmul_backward_bias, 256-byte aligned, contents
// irrelevant. B and T at least 1. codes: dqkv is written there instead, if attention_backward_codes; with rows NULL: no
// codes.
template <typename X, typename G>
void attention_backward(const Device* dev, X* dqkv /*(B,T,3,NH,HS)*/, G* dbias, void* scratch,
                        const X* dout /*(B,T,C)*/, const X* qkv /*(B,T,3,NH,HS)*/, const X* out /*(B,T,C)*/,
                        const float* lse /*(B,NH,T)*/, int B, int T, int C, int NH, bool accumulate,
                        [[maybe_unused]] const Fp8Codes& codes = {}) {
    [[maybe_unused]] float* sums = nullptr;
    if (!dev->gpu) {
        if constexpr (std::is_same_v<X, float>) {
            attention_backward_cpu(dqkv, dout, qkv, out, lse, B, T, C, NH);
        } else {
            user_error("attention on the CPU computes in fp32; type --matmul fp32");
        }
    }
#ifdef __CUDACC__
    const bool narrow = C == NH * 64, wide = C == NH * 128;
    char* memory = (char*)scratch;
    if (dev->gpu && narrow)
        sums = attention_backward_gpu<X, 64>(dev, dqkv, memory, dout, qkv, out, lse, B, T, NH, codes);
    if (dev->gpu && wide)
        sums = attention_backward_gpu<X, 128>(dev, dqkv, memory, dout, qkv, out, lse, B, T, NH, codes);
    if (sums) return column_sum(dev, &dbias, 1, sums, (int)hopper_backward_strips(B, T), 3 * C, accumulate);
#endif
    matmul_backward_bias(dev, dbias, (float*)scratch, dqkv, (int64_t)B * T, 3 * C, accumulate);
}
