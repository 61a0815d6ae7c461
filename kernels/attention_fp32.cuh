// Causal attention (kernels/attention.cuh says what it computes) in fp32 on the GPU, with FFMA; dq has a kernel of its
// own.
//
// 16 x 16 threads own a 64 x 64 tile: thread (x, y) has the rows y + 16 i; of scores it has the columns x + 16 j, of
// results (HS columns) 4 (x + 16 j) to + 3. Tiles in shared memory have rows of HS + 4 floats, which keeps 16-byte
// reads down a column free of bank conflicts.
#pragma once

#include <math.h>

#include "attention_parts.cuh"
#include "common.cuh"

constexpr int FP32_TILE = 64, FP32_P_STRIDE = 65;

constexpr int fp32_shared_bytes(int HS, int tiles) {
    return (tiles * FP32_TILE * (HS + 4) + FP32_TILE * FP32_P_STRIDE) * (int)sizeof(float);
}

// Copies rows first_row .. first_row + 63, zeros from row `rows` on.
template <int HS>
__device__ inline void fp32_load(float* tile /*(64,HS+4)*/, const float* source /*(rows,HS)*/, int64_t stride,
                                 int first_row, int rows) {
    for (int i = threadIdx.x; i < FP32_TILE * HS / 4; i += 256) {
        int row = i / (HS / 4), column = i % (HS / 4) * 4;
        Vec<float> value = {};
        if (first_row + row < rows) value = load_vec(source + (first_row + row) * stride + column);
        store_vec(tile + row * (HS + 4) + column, value);
    }
}

// s[i][j] = a[row i] . b[row j]
template <int HS>
__device__ inline void fp32_multiply_rows(float (&s)[4][4], const float* a /*(64,HS+4)*/,
                                          const float* b /*(64,HS+4)*/) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    for (int i = 0; i < 16; i++) s[i / 4][i % 4] = 0.0f;
#pragma unroll 4
    for (int k = 0; k < HS; k += 4) {
        Vec<float> right[4];
#pragma unroll
        for (int j = 0; j < 4; j++) right[j] = load_vec(b + (x + 16 * j) * (HS + 4) + k);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            Vec<float> left = load_vec(a + (y + 16 * i) * (HS + 4) + k);
#pragma unroll
            for (int j = 0; j < 16; j++) s[i][j / 4] = fmaf(left.lane[j % 4], right[j / 4].lane[j % 4], s[i][j / 4]);
        }
    }
}

// Shares the block's 64 x 64 values through p, then o[row i] += sum over j of p[i][j] * b[row j]. Ends with a
// barrier, so p and b may be overwritten after it.
template <int HS>
__device__ inline void fp32_multiply_columns(float (&o)[4][HS / 16], const float (&s)[4][4], float* p /*(64,65)*/,
                                             const float* b /*(64,HS+4)*/) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
#pragma unroll
    for (int i = 0; i < 16; i++) p[(y + i / 4 * 16) * FP32_P_STRIDE + x + i % 4 * 16] = s[i / 4][i % 4];
    __syncthreads();
#pragma unroll 4
    for (int k = 0; k < FP32_TILE; k++)
#pragma unroll
        for (int n = 0; n < HS / 64; n++) {
            Vec<float> right = load_vec(b + k * (HS + 4) + (x + 16 * n) * 4);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                float& sum = o[i / 4][n * 4 + i % 4];
                sum = fmaf(p[(y + i / 4 * 16) * FP32_P_STRIDE + k], right.lane[i % 4], sum);
            }
        }
    __syncthreads();
}

template <int HS>
__device__ inline void fp32_store(float* to /*(rows,HS)*/, int64_t stride, int first_row, int rows,
                                  const float (&o)[4][HS / 16], float factor) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = first_row + y + 16 * i;
        if (row >= rows) continue;
#pragma unroll
        for (int n = 0; n < HS / 64; n++)
            *reinterpret_cast<float4*>(to + row * stride + (x + 16 * n) * 4) = make_float4(
                o[i][n * 4] * factor, o[i][n * 4 + 1] * factor, o[i][n * 4 + 2] * factor, o[i][n * 4 + 3] * factor);
    }
}

// grid B * NH * ceil(T / 64), block 256, shared fp32_shared_bytes(HS, 3); HS 64 or 128, any T; deterministic.
template <int HS>
__global__ void __launch_bounds__(256)
    attention_forward_fp32_kernel(float* out /*(B,T,C)*/, float* lse /*(B,NH,T)*/, const float* qkv /*(B,T,3C)*/, int B,
                                  int T, int NH, int group, float scale) {
    extern __shared__ __align__(128) char shared[];
    constexpr int TILE = FP32_TILE * (HS + 4);
    float *q_tile = reinterpret_cast<float*>(shared), *k_tile = q_tile + TILE, *v_tile = k_tile + TILE;
    float* p_tile = v_tile + TILE;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    int bh, tile;
    forward_work(bh, tile, blockIdx.x, (T + FP32_TILE - 1) / FP32_TILE, B * NH, group);
    const int64_t C = (int64_t)NH * HS, first = (int64_t)(bh / NH) * T, column = bh % NH * HS;
    const float* q = qkv + first * 3 * C + column;
    float o[4][HS / 16] = {}, largest[4], sum[4] = {};
    for (int i = 0; i < 4; i++) largest[i] = -INFINITY;
    fp32_load<HS>(q_tile, q, 3 * C, tile * FP32_TILE, T);
    for (int j = 0; j <= tile; j++) {
        fp32_load<HS>(k_tile, q + C, 3 * C, j * FP32_TILE, T);
        fp32_load<HS>(v_tile, q + 2 * C, 3 * C, j * FP32_TILE, T);
        __syncthreads();
        float s[4][4];
        fp32_multiply_rows<HS>(s, q_tile, k_tile);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float top = -INFINITY, partial = 0.0f;
            for (int e = 0; e < 4; e++) {
                s[i][e] = j == tile && x + 16 * e > y + 16 * i ? -INFINITY : s[i][e] * scale;
                top = fmaxf(top, s[i][e]);
            }
            for (int lanes = 8; lanes > 0; lanes /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lanes));
            top = fmaxf(largest[i], top);
            for (int e = 0; e < 4; e++) partial += s[i][e] = expf(s[i][e] - top);
            for (int lanes = 8; lanes > 0; lanes /= 2) partial += __shfl_xor_sync(0xffffffffu, partial, lanes);
            float factor = expf(largest[i] - top);
            sum[i] = sum[i] * factor + partial;
            largest[i] = top;
            for (int n = 0; n < HS / 16; n++) o[i][n] *= factor;
        }
        fp32_multiply_columns<HS>(o, s, p_tile, v_tile);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = tile * FP32_TILE + y + 16 * i;
        for (int n = 0; n < HS / 16; n++) o[i][n] /= sum[i];
        if (x == 0 && row < T) lse[(int64_t)bh * T + row] = largest[i] + logf(sum[i]);
    }
    fp32_store<HS>(out + first * C + column, C, tile * FP32_TILE, T, o, 1.0f);
}

// FOR_KEYS: a block owns 64 keys, walks the queries from the diagonal on and gives dk and dv, its tiles of scores are
// keys x queries. Otherwise it owns 64 queries, walks the keys up to the diagonal and gives dq; scores queries x keys.
// grid B * NH * ceil(T / 64), block 256, shared fp32_shared_bytes(HS, 4); HS 64 or 128, any T; deterministic.
template <int HS, bool FOR_KEYS>
__global__ void __launch_bounds__(256)
    attention_backward_fp32_kernel(float* dqkv /*(B,T,3C)*/, const float* dout /*(B,T,C)*/,
                                   const float* qkv /*(B,T,3C)*/, const float* lse /*(B,NH,T)*/,
                                   const float* D /*(B,NH,T)*/, int T, int NH, float scale) {
    extern __shared__ __align__(128) char shared[];
    constexpr int TILE = FP32_TILE * (HS + 4);
    float *own1 = reinterpret_cast<float*>(shared), *own2 = own1 + TILE, *other1 = own2 + TILE, *other2 = other1 + TILE;
    float* p_tile = other2 + TILE;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16, tiles = (T + FP32_TILE - 1) / FP32_TILE;
    const int bh = blockIdx.x / tiles, tile = FOR_KEYS ? blockIdx.x % tiles : tiles - 1 - blockIdx.x % tiles;
    const int64_t C = (int64_t)NH * HS, first = (int64_t)(bh / NH) * T, column = bh % NH * HS;
    const float *q = qkv + first * 3 * C + column, *k = q + C, *v = k + C, *d = dout + first * C + column;
    fp32_load<HS>(own1, FOR_KEYS ? k : q, 3 * C, tile * FP32_TILE, T);
    fp32_load<HS>(own2, FOR_KEYS ? v : d, FOR_KEYS ? 3 * C : C, tile * FP32_TILE, T);
    float sum1[4][HS / 16] = {}, sum2[4][HS / 16] = {};  // dk and dv, or dq alone
    for (int other = FOR_KEYS ? tile : 0; other < (FOR_KEYS ? tiles : tile + 1); other++) {
        fp32_load<HS>(other1, FOR_KEYS ? q : k, 3 * C, other * FP32_TILE, T);
        fp32_load<HS>(other2, FOR_KEYS ? d : v, FOR_KEYS ? C : 3 * C, other * FP32_TILE, T);
        __syncthreads();
        float s[4][4], dp[4][4];
        fp32_multiply_rows<HS>(s, own1, other1);
        fp32_multiply_rows<HS>(dp, own2, other2);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int own_row = tile * FP32_TILE + y + i / 4 * 16, other_row = other * FP32_TILE + x + i % 4 * 16;
            const int query = FOR_KEYS ? other_row : own_row, key = FOR_KEYS ? own_row : other_row;
            float& p = s[i / 4][i % 4];
            p = query < T && key <= query ? expf(p * scale - lse[(int64_t)bh * T + query]) : 0.0f;
            dp[i / 4][i % 4] = query < T ? p * (dp[i / 4][i % 4] - D[(int64_t)bh * T + query]) : 0.0f;
        }
        if (FOR_KEYS) fp32_multiply_columns<HS>(sum2, s, p_tile, other2);
        fp32_multiply_columns<HS>(sum1, dp, p_tile, other1);
    }
    float* to = dqkv + first * 3 * C + column;
    fp32_store<HS>(FOR_KEYS ? to + C : to, 3 * C, tile * FP32_TILE, T, sum1, scale);
    if (FOR_KEYS) fp32_store<HS>(to + 2 * C, 3 * C, tile * FP32_TILE, T, sum2, 1.0f);
}

template <int HS>
inline void attention_forward_fp32(const Device* dev, float* out /*(B,T,C)*/, float* lse /*(B,NH,T)*/,
                                   const float* qkv /*(B,T,3C)*/, int B, int T, int NH) {
    const int bytes = fp32_shared_bytes(HS, 3);
    attention_set_shared(attention_forward_fp32_kernel<HS>, bytes);
    attention_forward_fp32_kernel<HS><<<(unsigned)(B * NH * ceil_div(T, FP32_TILE)), 256, bytes, dev->stream>>>(
        out, lse, qkv, B, T, NH, attention_group(T, HS, sizeof(float)), 1.0f / sqrtf((float)HS));
    check_launch();
}

template <int HS>
inline void attention_backward_fp32(const Device* dev, float* dqkv, const float* D, const float* dout, const float* qkv,
                                    const float* lse, int B, int T, int NH) {
    const int bytes = fp32_shared_bytes(HS, 4);
    const unsigned grid = (unsigned)(B * NH * ceil_div(T, FP32_TILE));
    const float scale = 1.0f / sqrtf((float)HS);
    attention_set_shared(attention_backward_fp32_kernel<HS, true>, bytes);
    attention_set_shared(attention_backward_fp32_kernel<HS, false>, bytes);
    attention_backward_fp32_kernel<HS, true><<<grid, 256, bytes, dev->stream>>>(dqkv, dout, qkv, lse, D, T, NH, scale);
    check_launch();
    attention_backward_fp32_kernel<HS, false><<<grid, 256, bytes, dev->stream>>>(dqkv, dout, qkv, lse, D, T, NH, scale);
    check_launch();
}
