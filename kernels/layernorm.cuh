// Layer normalisation over the last axis, alone or fused with the residual addition before it. For each row of C:
//     x = inp1 + inp2 (stored as `residual`), mean = sum(x) / C, rstd = 1 / sqrt(sum((x - mean)^2) / C + 1e-5),
//     out = (x - mean) * rstd * weight + bias.
// The variance takes a second pass over values in registers or cache, since E[x^2] - E[x]^2 cancels. In bf16 the
// statistics are those of the rounded x, which backward reads.
//
// Backward, with norm = (x - mean) * rstd and d = dout * weight:
//     dinp += rstd * (d - sum(d) / C - norm * sum(d * norm) / C)     (the residual branch's gradient is already there)
//     dweight (+)= sum over rows of dout * norm,   dbias (+)= sum over rows of dout.
//
// All of it is memory-bound. Accesses per element of (N, C): forward 2, residual + forward 4, backward 4 (dout, inp,
// dinp twice).
//
// Forward: a warp holds a row in registers, up to 8 vectors per lane; a longer row takes a block of 16 warps.
//
// Backward: a block walks over rows. A thread has the same channels of every row, so its parts of dweight, dbias and
// dcolumns stay in registers. Rows come through a ring in shared memory: while one is computed, the next is loaded, on
// sm_90 by one thread as three bulk copies, before sm_90 by each thread for its own vectors. A row is written after its
// two sums are complete, which takes one barrier; until then norm and dinp + rstd * d stay in registers, so that
// nothing is read or converted twice: 11 arithmetic instructions and 4.5 conversions per element, 29 with those for
// each row. At 72 registers per thread, of at most 80, a multiprocessor runs 24 warps; small blocks keep them from
// waiting at the same time. Each block leaves partial sums in scratch memory, which column_sum.cuh adds up.
//
// The dinp that backward leaves is also the output gradient of the linear layer below. `dcolumns`, the column sums of
// the stored values, is that layer's bias gradient.
//
// With --matmul fp8 a linear layer reads forward's `out` and backward's dinp as codes of 8 bits. Forward then writes
// codes instead of `out`, and backward writes both (fp8_codes.cuh), so that no separate pass rounds them.
#pragma once
#include <assert.h>

#include "column_sum.cuh"
#include "common.cuh"
#include "cpu_math.h"
#include "fp8_codes.cuh"

constexpr float LAYERNORM_EPS = 1e-5f;

// inp, out: (N, C); weight, bias: (C); mean, rstd: (N); C a multiple of CPU_CHAINS
inline void layernorm_forward_cpu(float* out, float* mean, float* rstd, const float* inp, const float* weight,
                                  const float* bias, int64_t N, int C) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < N; i++) {
        const float* x = inp + i * C;
        float chain[CPU_CHAINS] = {}, square[CPU_CHAINS] = {};
        for (int c = 0; c < C; c += CPU_CHAINS)
            for (int j = 0; j < CPU_CHAINS; j++) chain[j] += x[c + j];
        float m = cpu_chains_sum(chain) / C;
        for (int c = 0; c < C; c += CPU_CHAINS)
            for (int j = 0; j < CPU_CHAINS; j++) square[j] += (x[c + j] - m) * (x[c + j] - m);
        float r = 1.0f / sqrtf(cpu_chains_sum(square) / C + LAYERNORM_EPS);
        for (int c = 0; c < C; c++) out[i * C + c] = (x[c] - m) * r * weight[c] + bias[c];
        mean[i] = m;
        rstd[i] = r;
    }
}

inline void residual_layernorm_forward_cpu(float* residual, float* out, float* mean, float* rstd, const float* inp1,
                                           const float* inp2, const float* weight, const float* bias, int64_t N,
                                           int C) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < (inp2 ? N * C : 0); i++) residual[i] = inp1[i] + inp2[i];
    layernorm_forward_cpu(out, mean, rstd, inp2 ? residual : inp1, weight, bias, N, C);
}

// dinp of one row; dinp, dout, x, weight: (C)
inline void layernorm_backward_row_cpu(float* dinp, const float* dout, const float* x, const float* weight, float mean,
                                       float rstd, int C) {
    float chain[CPU_CHAINS] = {}, chain_norm[CPU_CHAINS] = {};
    for (int c = 0; c < C; c += CPU_CHAINS) {
        for (int j = 0; j < CPU_CHAINS; j++) {
            float d = dout[c + j] * weight[c + j];
            chain[j] += d;
            chain_norm[j] += d * ((x[c + j] - mean) * rstd);
        }
    }
    float sum = cpu_chains_sum(chain) / C, sum_norm = cpu_chains_sum(chain_norm) / C;
    for (int c = 0; c < C; c++) dinp[c] += rstd * (dout[c] * weight[c] - sum - (x[c] - mean) * rstd * sum_norm);
}

// dinp, dout, inp: (N, C); dweight, dbias, weight: (C); dcolumns: (C) or NULL; mean, rstd: (N)
inline void layernorm_backward_cpu(float* dinp, float* dweight, float* dbias, float* dcolumns, const float* dout,
                                   const float* inp, const float* weight, const float* mean, const float* rstd,
                                   int64_t N, int C, bool accumulate) {
    // A pass of its own, over columns: the sums run over the rows in order whatever the number of threads.
#pragma omp parallel for schedule(static)
    for (int c = 0; c < C; c += CPU_CHAINS) {
        float sum[CPU_CHAINS] = {}, sum_norm[CPU_CHAINS] = {};
        for (int64_t i = 0; i < N; i++) {
            for (int j = 0; j < CPU_CHAINS; j++) {
                sum[j] += dout[i * C + c + j];
                sum_norm[j] += dout[i * C + c + j] * ((inp[i * C + c + j] - mean[i]) * rstd[i]);
            }
        }
        for (int j = 0; j < CPU_CHAINS; j++) {
            dweight[c + j] = (accumulate ? dweight[c + j] : 0.0f) + sum_norm[j];
            dbias[c + j] = (accumulate ? dbias[c + j] : 0.0f) + sum[j];
        }
    }
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < N; i++)
        layernorm_backward_row_cpu(dinp + i * C, dout + i * C, inp + i * C, weight, mean[i], rstd[i], C);
    if (dcolumns) column_sum_cpu(dcolumns, dinp, N, C, accumulate);
}

#ifdef __CUDACC__
#include "hopper.cuh"

template <typename X>
__device__ inline Vec<X> layernorm_add(Vec<X> a, Vec<X> b) {
    float x[Vec<X>::size], y[Vec<X>::size];
    vec_floats(x, a), vec_floats(y, b);
    for (int j = 0; j < Vec<X>::size; j++) x[j] += y[j];
    return round_vec<X>(x);
}

template <typename X>
__device__ inline float layernorm_vec_sum(Vec<X> vec) {
    float x[Vec<X>::size], sum = 0.0f;
    vec_floats(x, vec);
    for (int j = 0; j < Vec<X>::size; j++) sum += x[j];
    return sum;
}

template <typename X>
__device__ inline float layernorm_vec_square(Vec<X> vec, float mean) {
    float x[Vec<X>::size], sum = 0.0f;
    vec_floats(x, vec);
    for (int j = 0; j < Vec<X>::size; j++) sum = fmaf(x[j] - mean, x[j] - mean, sum);
    return sum;
}

template <typename X>
__device__ inline Vec<X> layernorm_vec_out(Vec<X> vec, float mean, float rstd, Vec<X> weight, Vec<X> bias) {
    float x[Vec<X>::size], w[Vec<X>::size], b[Vec<X>::size];
    vec_floats(x, vec), vec_floats(w, weight), vec_floats(b, bias);
    for (int j = 0; j < Vec<X>::size; j++) x[j] = fmaf((x[j] - mean) * rstd, w[j], b[j]);
    return round_vec<X>(x);
}

// Sums over the WARPS warps that hold a row: 1, or the block's.
template <int WARPS>
__device__ inline float layernorm_sum(float value) {
    if constexpr (WARPS > 1) return block_sum(value);
    return warp_sum(value);
}

// Reads a row of C elements, which WARPS warps share: x = inp1 + inp2, a thread's vectors of it, and the row's mean and
// rstd. inp2 may be NULL, and so may `residual`, to which x is written where there is an inp2.
template <typename X, int VECS, int WARPS = 1>
__device__ inline void layernorm_row(Vec<X> (&x)[VECS], float* mean, float* rstd, X* residual, const X* inp1,
                                     const X* inp2, int C) {
    constexpr int size = Vec<X>::size, step = 32 * WARPS;
    int lane = threadIdx.x % step, vecs = C / size;
#pragma unroll
    for (int v = 0; v < VECS; v++)
        if (lane + step * v < vecs) x[v] = load_vec(inp1 + (lane + step * v) * size);
    if (inp2) {
        Vec<X> y[VECS];
#pragma unroll
        for (int v = 0; v < VECS; v++)
            if (lane + step * v < vecs) y[v] = load_vec(inp2 + (lane + step * v) * size);
#pragma unroll
        for (int v = 0; v < VECS; v++) {
            if (lane + step * v >= vecs) continue;
            x[v] = layernorm_add(x[v], y[v]);
            if (residual) store_vec(residual + (lane + step * v) * size, x[v]);
        }
    }
    float sum = 0.0f, square = 0.0f;
#pragma unroll
    for (int v = 0; v < VECS; v++)
        if (lane + step * v < vecs) sum += layernorm_vec_sum(x[v]);
    *mean = layernorm_sum<WARPS>(sum) / C;
#pragma unroll
    for (int v = 0; v < VECS; v++)
        if (lane + step * v < vecs) square += layernorm_vec_square(x[v], *mean);
    *rstd = 1.0f / sqrtf(layernorm_sum<WARPS>(square) / C + LAYERNORM_EPS);
}

// A vector of the result: as X to out, or with CODES as codes, of the same rounded values.
template <typename X, bool CODES>
__device__ inline void layernorm_put(X* out, const Fp8Codes& codes, int64_t at, Vec<X> vec, float scale,
                                     Fp8Stats* stats) {
    if constexpr (CODES) {
        float value[8];
        vec_floats(value, vec);
        *(uint2*)(codes.rows + at) = fp8_codes(value, scale, stats);
    } else {
        store_vec(out + at, vec);
    }
}

// WARPS 1: grid ceil(N / 8), block 256 (a warp per row). WARPS 16: grid N, block 512. C a multiple of 8 and at most
// 32 * WARPS * VECS vectors; inp2 may be NULL, and residual is written only when it is not; residual may be inp1. With
// CODES, N is a multiple of 8. Deterministic.
template <typename X, int VECS, bool CODES, int WARPS = 1>
__global__ void __launch_bounds__(WARPS > 1 ? 512 : 256, WARPS > 1   ? 1
                                                         : VECS <= 4 ? 5
                                                         : VECS <= 5 ? 4
                                                                     : 3)
    layernorm_forward_kernel(X* residual, X* out, float* mean, float* rstd, const X* inp1, const X* inp2,
                             const X* weight, const X* bias, int64_t N, int C, Fp8Codes codes) {
    constexpr int size = Vec<X>::size, step = 32 * WARPS;
    int64_t row = WARPS > 1 ? blockIdx.x : (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    early_begin();
    early_wait();
    if (!CODES && row >= N) return;
    const float scale = CODES ? *codes.scale : 1.0f;
    Fp8Stats stats = {};
    const int lane = threadIdx.x % step;
    const int64_t base = row * C;
    Vec<X> x[VECS];
    float m, r;
    layernorm_row<X, VECS, WARPS>(x, &m, &r, residual + base, inp1 + base, inp2 ? inp2 + base : nullptr, C);
#pragma unroll
    for (int v = 0; v < VECS; v++) {
        int c = (lane + step * v) * size;
        if (c >= C) continue;
        const Vec<X> result = layernorm_vec_out(x[v], m, r, load_vec(weight + c), load_vec(bias + c));
        layernorm_put<X, CODES>(out, codes, base + c, result, scale, &stats);
    }
    if (lane == 0) mean[row] = m, rstd[row] = r;
    if (CODES) publish_block_amax(codes.amax, codes.overflow_count, stats);
}

// Returns the first column of vector v of a thread of the backward kernel. Its vectors are a block's width apart.
template <typename X>
__device__ inline int layernorm_column(int v) {
    return (threadIdx.x + v * blockDim.x) * Vec<X>::size;
}

// Starts to copy a row of dout, inp and dinp to `slot`, in this order. On sm_90 one thread starts TMA copies, which
// arrives at `barrier`; before sm_90 each thread copies its own vectors. All threads must have read the slot's last
// row.
template <typename X, int VECS>
__device__ inline void layernorm_ask(X* slot, uint64_t* barrier, const X* dout, const X* inp, const X* dinp, int C,
                                     bool wanted) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x != 0 || !wanted) return;
    int bytes = C * (int)sizeof(X);
    uint32_t to = shared_offset(slot), arrival = shared_offset(barrier);
    barrier_expect(arrival, 3 * bytes);
    bulk_load(to, dout, bytes, arrival);
    bulk_load(to + bytes, inp, bytes, arrival);
    bulk_load(to + 2 * bytes, dinp, bytes, arrival);
#else
    (void)barrier;
#pragma unroll
    for (int v = 0; v < VECS; v++) {
        int c = layernorm_column<X>(v);
        if (c >= C || !wanted) continue;
        copy_async(slot + c, dout + c);
        copy_async(slot + C + c, inp + c);
        copy_async(slot + 2 * C + c, dinp + c);
    }
    copy_async_commit();
#endif
}

// Waits until the oldest of the ring's `stages` copies has arrived.
__device__ inline void layernorm_wait(uint64_t* barrier, uint32_t parity, int stages) {
#if __CUDA_ARCH__ >= 900
    (void)stages;
    barrier_wait(shared_offset(barrier), parity);
#else
    (void)barrier, (void)parity;
    if (stages == 1)
        copy_async_wait<0>();
    else
        copy_async_wait<1>();
#endif
}

// Returns the sums of x and of y over the block, in every thread. `partial` has two places for each of 16 warps, zero
// for warps that the block lacks; successive calls take turns at two arrays, since slow threads may still read the last
// one. Half a warp adds x, half y; then every warp adds up all warps' sums, one per lane.
__device__ inline float2 layernorm_block_sums(float2 value, float* partial) {
    bool upper = threadIdx.x & 16;
    float own = upper ? value.y : value.x;
    own += __shfl_xor_sync(0xffffffffu, upper ? value.x : value.y, 16);
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) own += __shfl_xor_sync(0xffffffffu, own, offset);
    if (threadIdx.x % 16 == 0) partial[threadIdx.x / 16] = own;
    __syncthreads();
    own = partial[threadIdx.x % 32];
#pragma unroll
    for (int offset = 16; offset > 1; offset /= 2) own += __shfl_xor_sync(0xffffffffu, own, offset);
    float other = __shfl_xor_sync(0xffffffffu, own, 1);
    return threadIdx.x % 2 ? make_float2(other, own) : make_float2(own, other);
}

// A thread's sums over rows, for each of its channels.
template <int COLUMNS>
struct alignas(16) LayernormSums {
    float dweight[COLUMNS], dbias[COLUMNS], dcolumns[COLUMNS];
};

// Returns the thread's part of sum(d) and sum(d * norm) of a row. What the second pass needs stays in registers: norm,
// and value = dinp + rstd * d. dinp is read here, since its slot is filled again after the barrier.
template <typename X, int COLUMNS>
__device__ inline float2 layernorm_backward_sums(LayernormSums<COLUMNS>* total, float (&norm)[COLUMNS],
                                                 float (&value)[COLUMNS], const X* slot, const float (&w)[COLUMNS],
                                                 float mean, float rstd, int C) {
    constexpr int size = Vec<X>::size;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int v = 0; v < COLUMNS / size; v++) {
        int c = layernorm_column<X>(v);
        if (c >= C) continue;
        float d[size];
        vec_floats(d, load_vec(slot + c));
        vec_floats(norm + v * size, load_vec(slot + C + c));
        vec_floats(value + v * size, load_vec(slot + 2 * C + c));
#pragma unroll
        for (int j = 0; j < size; j++) {
            int k = v * size + j;
            norm[k] = (norm[k] - mean) * rstd;
            total->dbias[k] += d[j];
            total->dweight[k] = fmaf(d[j], norm[k], total->dweight[k]);
            d[j] *= w[k];
            sum.x += d[j];
            sum.y = fmaf(d[j], norm[k], sum.y);
            value[k] = fmaf(rstd, d[j], value[k]);
        }
    }
    return sum;
}

// Writes a row of dinp from the two averages times rstd, and adds it to the column sums; with CODES it writes codes
// too.
template <typename X, int COLUMNS, bool CODES>
__device__ inline void layernorm_backward_write(LayernormSums<COLUMNS>* total, X* dinp, const float (&norm)[COLUMNS],
                                                float (&value)[COLUMNS], float average, float average_norm, int C,
                                                const Fp8Codes& codes, int64_t at, float scale, Fp8Stats* stats) {
    constexpr int size = Vec<X>::size;
#pragma unroll
    for (int v = 0; v < COLUMNS / size; v++) {
        int c = layernorm_column<X>(v);
        if (c >= C) continue;
        float result[size];
#pragma unroll
        for (int j = 0; j < size; j++) {
            int k = v * size + j;
            result[j] = fmaf(-average_norm, norm[k], value[k] - average);
        }
        Vec<X> rounded = round_vec<X>(result);
        store_vec(dinp + c, rounded);
        if constexpr (CODES) layernorm_put<X, true>(nullptr, codes, at + c, rounded, scale, stats);
        vec_floats(result, rounded);
#pragma unroll
        for (int j = 0; j < size; j++) total->dcolumns[v * size + j] += result[j];
    }
}

// Grid any up to N, block a multiple of 32 up to 384 that with COLUMNS channels a thread covers C, shared memory
// (stages, 3, C) of X, stages 1 or 2; C a multiple of 8. Row blockIdx.x of partial: (grid, 3, C) gets the block's
// dweight, dbias and dcolumns. Deterministic for a given grid.
template <typename X, int COLUMNS, bool CODES>
__global__ void __launch_bounds__(384, COLUMNS == 8 ? 2 : 1)
    layernorm_backward_kernel(X* dinp, float* partial, const X* dout, const X* inp, const X* weight, const float* mean,
                              const float* rstd, int64_t N, int C, int stages, Fp8Codes codes) {
    constexpr int size = Vec<X>::size, VECS = COLUMNS / size;
    extern __shared__ __align__(128) unsigned char layernorm_shared[];
    __shared__ float sums[2][32];
    __shared__ uint64_t barrier[2];
    X* ring = (X*)layernorm_shared;
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < 2; stage++) barrier_init(shared_offset(barrier + stage), 1);
        barrier_init_done();
    }
#endif
    if (threadIdx.x < 32) sums[0][threadIdx.x] = sums[1][threadIdx.x] = 0.0f;
    __syncthreads();
    float w[COLUMNS], inverse = 1.0f / C;
#pragma unroll
    for (int v = 0; v < VECS; v++) {
        int c = layernorm_column<X>(v);
        vec_floats(w + v * size, c < C ? load_vec(weight + c) : Vec<X>{});
    }
    int64_t at = (int64_t)blockIdx.x * C, stride = (int64_t)gridDim.x * C;
    int rows = (int)((N - blockIdx.x + gridDim.x - 1) / gridDim.x), stage = 0;
    auto ask = [&](int stage, int64_t at, bool wanted) {
        layernorm_ask<X, VECS>(ring + stage * 3 * C, barrier + stage, dout + at, inp + at, dinp + at, C, wanted);
    };
#pragma unroll 1
    for (int ahead = 0; ahead < stages; ahead++) ask(ahead, at + ahead * stride, ahead < rows);
    mean += blockIdx.x, rstd += blockIdx.x;
    float next_mean = *mean, next_rstd = *rstd;
    LayernormSums<COLUMNS> total = {};
    const float scale = CODES ? *codes.scale : 1.0f;
    Fp8Stats stats = {};
    uint32_t parity = 0;
    for (int row = 0; row < rows; row++) {
        float m = next_mean, r = next_rstd, norm[COLUMNS], value[COLUMNS];
        mean += gridDim.x, rstd += gridDim.x;
        if (row + 1 < rows) next_mean = *mean, next_rstd = *rstd;
        layernorm_wait(barrier + stage, parity, stages);
        float2 sum = layernorm_backward_sums<X>(&total, norm, value, ring + stage * 3 * C, w, m, r, C);
#if __CUDA_ARCH__ >= 900
        fence_async();  // orders this thread's reads of the stage before TMA's next writes to it
#endif
        sum = layernorm_block_sums(sum, sums[row % 2]);
        ask(stage, at + stages * stride, row + stages < rows);
        layernorm_backward_write<X, COLUMNS, CODES>(&total, dinp + at, norm, value, sum.x * inverse * r,
                                                    sum.y * inverse * r, C, codes, at, scale, &stats);
        at += stride;
        if (++stage == stages) stage = 0, parity ^= 1;
    }
    float* own = partial + (int64_t)blockIdx.x * 3 * C;
#pragma unroll
    for (int k = 0; k < COLUMNS; k += 4) {
        int c = layernorm_column<X>(k / size) + k % size;
        if (c >= C) continue;
        *(float4*)(own + c) = *(const float4*)(total.dweight + k);
        *(float4*)(own + C + c) = *(const float4*)(total.dbias + k);
        *(float4*)(own + 2 * C + c) = *(const float4*)(total.dcolumns + k);
    }
    if (CODES) publish_block_amax(codes.amax, codes.overflow_count, stats);
}
#endif

// The backward kernel's launch: channels per thread, threads per block, blocks, stages of a block's ring, its bytes of
// shared memory. With 8 channels per thread, there are as many blocks as fit on the GPU at once.
struct LayernormShape {
    int columns, threads, blocks, stages, bytes;
};

template <typename X>
LayernormShape layernorm_backward_shape(const Device* dev, int C) {
    LayernormShape shape;
    shape.columns = 8;
    while (C > 384 * shape.columns) shape.columns *= 2;
    shape.threads = (int)ceil_div(C, 32 * shape.columns) * 32;
    int blocks = (shape.columns == 8 ? 768 : 384) / shape.threads;
    shape.blocks = dev->sm_count * (blocks > 12 ? 12 : blocks);
    int stage = 3 * C * (int)sizeof(X), most = dev->shared_memory - 1024;  // 1024: more than the sums
    shape.stages = 2 * stage <= most ? 2 : 1;
    shape.bytes = shape.stages * stage;
    if (shape.bytes > most) {
        bool wide = sizeof(X) == sizeof(float);
        user_error(
            "layer norm of %d channels in %s needs %d bytes of shared memory, this GPU has %d for a block; type "
            "fewer --channels%s",
            C, wide ? "fp32" : "bf16", shape.bytes, most, wide ? " or --matmul bf16" : "");
    }
    return shape;
}

#ifdef __CUDACC__
template <typename X, bool CODES>
void layernorm_forward_with(const Device* dev, X* residual, X* out, float* mean, float* rstd, const X* inp1,
                            const X* inp2, const X* weight, const X* bias, int64_t N, int C, const Fp8Codes& codes) {
    const int lane_vecs = (int)ceil_div(C, 32 * Vec<X>::size);
    const bool wide = lane_vecs > 8;
    assert(C % 8 == 0 && (!CODES || N % 8 == 0) && lane_vecs <= 8 * 16);
    if (N == 0) return;
    // Each number of vectors per lane has its own kernel, since unused registers would keep other warps out.
    auto kernel = lane_vecs <= 3        ? layernorm_forward_kernel<X, 3, CODES>
                  : lane_vecs == 4      ? layernorm_forward_kernel<X, 4, CODES>
                  : lane_vecs == 5      ? layernorm_forward_kernel<X, 5, CODES>
                  : lane_vecs <= 7      ? layernorm_forward_kernel<X, 7, CODES>
                  : !wide               ? layernorm_forward_kernel<X, 8, CODES>
                  : lane_vecs <= 16 * 3 ? layernorm_forward_kernel<X, 3, CODES, 16>
                                        : layernorm_forward_kernel<X, 8, CODES, 16>;
    launch_early(dev, kernel, (unsigned)(wide ? N : ceil_div(N, 8)), wide ? 512 : 256, 1, 0, residual, out, mean, rstd,
                 inp1, inp2, weight, bias, N, C, codes);
}

#endif

// residual: (N, C) = inp1 + inp2, may be inp1; out: (N, C) = layernorm(residual); mean, rstd: (N); weight, bias: (C).
// With inp2 NULL, what is normalised is inp1. codes: the result is written there as codes instead of to out, on a GPU
// in bf16; with rows NULL: no codes.
template <typename X>
void residual_layernorm_forward(const Device* dev, X* residual, X* out, float* mean, float* rstd, const X* inp1,
                                const X* inp2, const X* weight, const X* bias, int64_t N, int C,
                                [[maybe_unused]] const Fp8Codes& codes = {}) {
    if constexpr (std::is_same_v<X, float>) {
        if (!dev->gpu) return residual_layernorm_forward_cpu(residual, out, mean, rstd, inp1, inp2, weight, bias, N, C);
    }
#ifdef __CUDACC__
    if constexpr (std::is_same_v<X, bf16>) {
        if (codes.rows)
            return layernorm_forward_with<X, true>(dev, residual, out, mean, rstd, inp1, inp2, weight, bias, N, C,
                                                   codes);
    }
    layernorm_forward_with<X, false>(dev, residual, out, mean, rstd, inp1, inp2, weight, bias, N, C, Fp8Codes{});
#endif
}

template <typename X>
void layernorm_forward(const Device* dev, X* out, float* mean, float* rstd, const X* inp, const X* weight,
                       const X* bias, int64_t N, int C, const Fp8Codes& codes = {}) {
    residual_layernorm_forward(dev, (X*)nullptr, out, mean, rstd, inp, (const X*)nullptr, weight, bias, N, C, codes);
}

// Also refuses a C that is too large for backward, before anything is allocated.
template <typename X>
int64_t layernorm_backward_scratch_bytes(const Device* dev, int C) {
    return dev->gpu ? (int64_t)layernorm_backward_shape<X>(dev, C).blocks * 3 * C * sizeof(float) : 0;
}

#ifdef __CUDACC__
// Returns the rows that partial got. Its arguments are the kernel's.
template <typename X, bool CODES>
int layernorm_backward_with(const Device* dev, X* dinp, float* partial, const X* dout, const X* inp, const X* weight,
                            const float* mean, const float* rstd, int64_t N, int C, const Fp8Codes& codes) {
    LayernormShape shape = layernorm_backward_shape<X>(dev, C);
    auto kernel = shape.columns == 8    ? layernorm_backward_kernel<X, 8, CODES>
                  : shape.columns == 16 ? layernorm_backward_kernel<X, 16, CODES>
                                        : layernorm_backward_kernel<X, 32, CODES>;
    int blocks = N < shape.blocks ? (int)N : shape.blocks;
    launch_kernel(dev, kernel, blocks, shape.threads, shape.bytes, dinp, partial, dout, inp, weight, mean, rstd, N, C,
                  shape.stages, codes);
    return blocks;
}
#endif

// dinp: (N, C), added to; dweight, dbias: (C); dcolumns: (C) (+)= column sums of dinp on return, or NULL; scratch:
// layernorm_backward_scratch_bytes; dout, inp: (N, C); weight: (C); mean, rstd: (N). C at most 12288. codes: dinp is
// written there as codes as well, on a GPU in bf16; with rows NULL: no codes.
template <typename X, typename G>
void layernorm_backward(const Device* dev, X* dinp, G* dweight, G* dbias, G* dcolumns, float* scratch, const X* dout,
                        const X* inp, const X* weight, const float* mean, const float* rstd, int64_t N, int C,
                        bool accumulate, [[maybe_unused]] const Fp8Codes& codes = {}) {
    assert(C % 8 == 0 && C <= 12288 && N > 0);
    if constexpr (std::is_same_v<X, float>) {
        if (!dev->gpu)
            return layernorm_backward_cpu(dinp, dweight, dbias, dcolumns, dout, inp, weight, mean, rstd, N, C,
                                          accumulate);
    }
#ifdef __CUDACC__
    int blocks = 0;
    if constexpr (std::is_same_v<X, bf16>) {
        if (codes.rows)
            blocks = layernorm_backward_with<X, true>(dev, dinp, scratch, dout, inp, weight, mean, rstd, N, C, codes);
    }
    if (!codes.rows)
        blocks = layernorm_backward_with<X, false>(dev, dinp, scratch, dout, inp, weight, mean, rstd, N, C, Fp8Codes{});
    G* totals[3] = {dweight, dbias, dcolumns};
    column_sum(dev, totals, 3, scratch, blocks, C, accumulate);
#endif
}
