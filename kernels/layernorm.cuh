// Layer normalisation over the last axis, alone or fused with the residual addition before it. For each row of C:
//     x = inp1 + inp2 (stored as `residual`), mean = sum(x) / C, rstd = 1 / sqrt(sum((x - mean)^2) / C + 1e-5),
//     out = (x - mean) * rstd * weight + bias.
// The statistics are centred (two passes over values that are at hand), since E[x^2] - E[x]^2 cancels. In bf16 they are
// those of the rounded x, so that backward, which reads the stored x, sees what forward used.
//
// Backward, with norm = (x - mean) * rstd and d = dout * weight:
//     dinp += rstd * (d - sum(d) / C - norm * sum(d * norm) / C)     (the residual branch's gradient is already there)
//     dweight (+)= sum over rows of dout * norm,   dbias (+)= sum over rows of dout.
//
// All of it is memory-bound. Bytes per element of (N, C): forward 2 accesses, residual + forward 4, backward 4 (dout,
// inp, dinp twice). Forward: a warp holds a row in registers up to 8 vectors a lane; longer rows take a block, which
// reads them again from the cache. Backward: a block walks over rows; a thread owns the same vectors of channels in all
// of them, so dweight and dbias stay in its registers. cp.async brings rows into shared memory, each thread its own
// vectors, so that no barrier guards them: while one turn of one or two rows is worked on, the next is under way,
// except of the longest rows, which have room for one turn only (layernorm_rows, layernorm_stages). Each block leaves
// its partial sums in scratch memory, and column_sum.cuh adds these up.
//
// The gradient that backward leaves in dinp is the output's gradient of the linear layer below, whose bias wants its
// column sums: `dcolumns` gets them, of the values as stored, while they are in registers.
#pragma once
#include <assert.h>

#include "column_sum.cuh"
#include "common.cuh"
#include "cpu_math.h"

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

// out, inp1, inp2: (n)
inline void residual_forward_cpu(float* out, const float* inp1, const float* inp2, int64_t n) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) out[i] = inp1[i] + inp2[i];
}

inline void residual_layernorm_forward_cpu(float* residual, float* out, float* mean, float* rstd, const float* inp1,
                                           const float* inp2, const float* weight, const float* bias, int64_t N,
                                           int C) {
    residual_forward_cpu(residual, inp1, inp2, N * C);
    layernorm_forward_cpu(out, mean, rstd, residual, weight, bias, N, C);
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

// Grid ceil(N / 8), block 256 (a warp per row), C a multiple of 8 and at most 32 * VECS vectors; inp2 may be NULL, and
// residual is written only when it is not; residual may be inp1. Deterministic.
template <typename X, int VECS>
__global__ void __launch_bounds__(256, VECS <= 4   ? 5
                                       : VECS <= 5 ? 4
                                                   : 3)
    layernorm_forward_kernel(X* residual, X* out, float* mean, float* rstd, const X* inp1, const X* inp2,
                             const X* weight, const X* bias, int64_t N, int C) {
    constexpr int size = Vec<X>::size;
    int64_t row = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= N) return;
    int lane = threadIdx.x % 32, vecs = C / size;
    int64_t base = row * C;
    Vec<X> x[VECS];
#pragma unroll
    for (int v = 0; v < VECS; v++)
        if (lane + 32 * v < vecs) x[v] = load_vec(inp1 + base + (lane + 32 * v) * size);
    if (inp2) {
        Vec<X> y[VECS];
#pragma unroll
        for (int v = 0; v < VECS; v++)
            if (lane + 32 * v < vecs) y[v] = load_vec(inp2 + base + (lane + 32 * v) * size);
#pragma unroll
        for (int v = 0; v < VECS; v++) {
            if (lane + 32 * v >= vecs) continue;
            x[v] = layernorm_add(x[v], y[v]);
            store_vec(residual + base + (lane + 32 * v) * size, x[v]);
        }
    }
    float sum = 0.0f, square = 0.0f;
#pragma unroll
    for (int v = 0; v < VECS; v++)
        if (lane + 32 * v < vecs) sum += layernorm_vec_sum(x[v]);
    float m = warp_sum(sum) / C;
#pragma unroll
    for (int v = 0; v < VECS; v++)
        if (lane + 32 * v < vecs) square += layernorm_vec_square(x[v], m);
    float r = 1.0f / sqrtf(warp_sum(square) / C + LAYERNORM_EPS);
#pragma unroll
    for (int v = 0; v < VECS; v++) {
        int c = (lane + 32 * v) * size;
        if (c < C) store_vec(out + base + c, layernorm_vec_out(x[v], m, r, load_vec(weight + c), load_vec(bias + c)));
    }
    if (lane == 0) mean[row] = m, rstd[row] = r;
}

// Grid N (a block per row), block a multiple of 32 up to 1024, any C that is a multiple of 8; inp2 may be NULL, and
// residual is written only when it is not; residual may be inp1. A thread rereads only what it wrote. Deterministic.
template <typename X>
__global__ void layernorm_forward_long_kernel(X* residual, X* out, float* mean, float* rstd, const X* inp1,
                                              const X* inp2, const X* weight, const X* bias, int C) {
    constexpr int size = Vec<X>::size;
    int64_t row = blockIdx.x, base = row * C;
    int begin = threadIdx.x * size, step = blockDim.x * size;
    float sum = 0.0f, square = 0.0f;
    for (int c = begin; c < C; c += step) {
        Vec<X> x = load_vec(inp1 + base + c);
        if (inp2) {
            x = layernorm_add(x, load_vec(inp2 + base + c));
            store_vec(residual + base + c, x);
        }
        sum += layernorm_vec_sum(x);
    }
    float m = block_sum(sum) / C;
    const X* source = inp2 ? residual : inp1;
    for (int c = begin; c < C; c += step) square += layernorm_vec_square(load_vec(source + base + c), m);
    float r = 1.0f / sqrtf(block_sum(square) / C + LAYERNORM_EPS);
    for (int c = begin; c < C; c += step) {
        Vec<X> x = load_vec(source + base + c);
        store_vec(out + base + c, layernorm_vec_out(x, m, r, load_vec(weight + c), load_vec(bias + c)));
    }
    if (threadIdx.x == 0) mean[row] = m, rstd[row] = r;
}

// Rows that a block works on at a time, so that one barrier serves them all, and how many times as many are under way:
// 768 threads a multiprocessor with 3 vectors of 16 bytes for 4 rows are 144 KB.
constexpr int layernorm_rows(int vecs) {
    return vecs == 1 ? 2 : 1;
}
constexpr int layernorm_stages(int vecs) {
    return vecs <= 2 ? 2 : 1;
}

// dout, inp, dinp of a row, then mean and rstd, of which each thread has a copy of its own.
constexpr int layernorm_row_bytes(int vecs, int threads) {
    return (3 * vecs * 16 + 2 * (int)sizeof(float)) * threads;
}

// Asks for the thread's vectors of a row (dout, inp, dinp) into its places of `slot`, which has room for 3 * VECS
// vectors of every thread, and then for the row's mean and rstd.
template <typename X, int VECS>
__device__ inline void layernorm_fetch(Vec<X>* slot, const X* dout, const X* inp, const X* dinp, const float* mean,
                                       const float* rstd, int64_t row, int C) {
    float* statistics = (float*)(slot + 3 * VECS * blockDim.x) + threadIdx.x;
    copy_async_float(statistics, mean + row);
    copy_async_float(statistics + blockDim.x, rstd + row);
#pragma unroll
    for (int v = 0; v < VECS; v++) {
        int c = (threadIdx.x + v * blockDim.x) * Vec<X>::size;
        Vec<X>* own = slot + v * 3 * blockDim.x + threadIdx.x;
        if (c >= C) continue;
        copy_async(own, dout + row * C + c);
        copy_async(own + blockDim.x, inp + row * C + c);
        copy_async(own + 2 * blockDim.x, dinp + row * C + c);
    }
}

// Sums K values (a power of two up to 32) over the warp: lane l returns the sum of value l / (32 / K). At each exchange
// a lane hands over the half of its values that the other lane keeps, so it takes about K + 4 shuffles, not 5 K.
template <int K>
__device__ inline float layernorm_warp_sums(float (&value)[K]) {
    int lane = threadIdx.x % 32, offset = 16;
#pragma unroll
    for (int n = K / 2; n > 0; n /= 2, offset /= 2) {
#pragma unroll
        for (int i = 0; i < n; i++) {
            float keep = lane & offset ? value[i + n] : value[i], send = lane & offset ? value[i] : value[i + n];
            value[i] = keep + __shfl_xor_sync(0xffffffffu, send, offset);
        }
    }
    for (; offset > 0; offset /= 2) value[0] += __shfl_xor_sync(0xffffffffu, value[0], offset);
    return value[0];
}

// Sums K values over the block, in place, the same in every thread. `partial` must not be the one of the call just
// before, as a slow thread may still be reading that: two used in turn need one barrier a call.
template <int K>
__device__ inline void layernorm_block_sums(float (&value)[K], float (*partial)[K]) {
    float own = layernorm_warp_sums(value);
    if (threadIdx.x % (32 / K) == 0) partial[threadIdx.x / 32][threadIdx.x % 32 / (32 / K)] = own;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < K; i++) value[i] = 0.0f;
    for (int warp = 0; warp < blockDim.x / 32; warp++) {
#pragma unroll
        for (int i = 0; i < K; i++) value[i] += partial[warp][i];
    }
}

// The sums over rows that a thread of the backward kernel carries for its channels.
template <int size>
struct LayernormSums {
    float dweight[size], dbias[size], dcolumn[size];
};

// One row of a thread: its part of sum(d) and sum(d * norm), and of dweight and dbias.
template <typename X, int VECS>
__device__ inline float2 layernorm_backward_sums(LayernormSums<VECS * Vec<X>::size>* total, const Vec<X>* slot,
                                                 const Vec<X> w[VECS], int C) {
    constexpr int size = Vec<X>::size;
    const float* statistics = (const float*)(slot + 3 * VECS * blockDim.x) + threadIdx.x;
    float mean = statistics[0], rstd = statistics[blockDim.x];
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int v = 0; v < VECS; v++) {
        const Vec<X>* own = slot + v * 3 * blockDim.x + threadIdx.x;
        if ((threadIdx.x + v * blockDim.x) * size >= C) continue;
        Vec<X> dout = own[0], inp = own[blockDim.x];
#pragma unroll
        for (int j = 0; j < size; j++) {
            float d = to_float(dout.lane[j]), norm = (to_float(inp.lane[j]) - mean) * rstd;
            total->dbias[v * size + j] += d;
            total->dweight[v * size + j] = fmaf(d, norm, total->dweight[v * size + j]);
            d *= to_float(w[v].lane[j]);
            sum.x += d;
            sum.y = fmaf(d, norm, sum.y);
        }
    }
    return sum;
}

// One row of a thread: dinp, from sum(d) / C and sum(d * norm) / C.
template <typename X, int VECS>
__device__ inline void layernorm_backward_write(LayernormSums<VECS * Vec<X>::size>* total, X* dinp, const Vec<X>* slot,
                                                const Vec<X> w[VECS], float average, float average_norm, int C) {
    constexpr int size = Vec<X>::size;
    const float* statistics = (const float*)(slot + 3 * VECS * blockDim.x) + threadIdx.x;
    float mean = statistics[0], rstd = statistics[blockDim.x];
#pragma unroll
    for (int v = 0; v < VECS; v++) {
        int c = (threadIdx.x + v * blockDim.x) * size;
        const Vec<X>* own = slot + v * 3 * blockDim.x + threadIdx.x;
        if (c >= C) continue;
        Vec<X> dout = own[0], inp = own[blockDim.x], result = own[2 * blockDim.x];
        float value[size];
#pragma unroll
        for (int j = 0; j < size; j++) {
            float d = to_float(dout.lane[j]) * to_float(w[v].lane[j]), norm = (to_float(inp.lane[j]) - mean) * rstd;
            value[j] = to_float(result.lane[j]) + rstd * (d - average - norm * average_norm);
        }
        result = round_vec<X>(value);
#pragma unroll
        for (int j = 0; j < size; j++) total->dcolumn[v * size + j] += to_float(result.lane[j]);
        store_vec(dinp + c, result);
    }
}

// Grid any up to N, block a multiple of 32 up to 384 with VECS vectors a thread covering C (a multiple of 8), shared
// memory layernorm_rows(VECS) * layernorm_stages(VECS) rows. Row blockIdx.x of partial: (grid, 3, C) gets the block's
// dweight, dbias and dcolumns. Deterministic for a given grid.
template <typename X, int VECS>
__global__ void __launch_bounds__(384, VECS == 1 ? 2 : 1)
    layernorm_backward_kernel(X* dinp, float* partial, const X* dout, const X* inp, const X* weight, const float* mean,
                              const float* rstd, int64_t N, int C) {
    constexpr int size = Vec<X>::size, ROWS = layernorm_rows(VECS), STAGES = layernorm_stages(VECS);
    extern __shared__ __align__(16) unsigned char layernorm_shared[];
    __shared__ __align__(16) float sums[2][12][2 * ROWS];
    Vec<X>*slots = (Vec<X>*)layernorm_shared, w[VECS] = {};
    int slot_vecs = layernorm_row_bytes(VECS, blockDim.x) / 16;
    LayernormSums<VECS* size> total = {};
#pragma unroll
    for (int v = 0; v < VECS; v++) {
        int c = (threadIdx.x + v * blockDim.x) * size;
        if (c < C) w[v] = load_vec(weight + c);
    }
    auto fetch = [&](int stage, int64_t first) {
        for (int r = 0; r < ROWS && first + r < N; r++)
            layernorm_fetch<X, VECS>(slots + (stage * ROWS + r) * slot_vecs, dout, inp, dinp, mean, rstd, first + r, C);
        copy_async_commit();
    };
    int64_t step = (int64_t)gridDim.x * ROWS;
    float inverse = 1.0f / C;
    for (int ahead = 0; ahead < STAGES; ahead++) fetch(ahead, (int64_t)blockIdx.x * ROWS + ahead * step);
    int stage = 0, turn = 0;
    for (int64_t first = (int64_t)blockIdx.x * ROWS; first < N; first += step) {
        copy_async_wait<STAGES - 1>();
        const Vec<X>* slot = slots + stage * ROWS * slot_vecs;
        float sum[2 * ROWS] = {};
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (first + r >= N) continue;
            float2 own = layernorm_backward_sums<X, VECS>(&total, slot + r * slot_vecs, w, C);
            sum[2 * r] = own.x, sum[2 * r + 1] = own.y;
        }
        layernorm_block_sums(sum, sums[turn]);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (first + r >= N) continue;
            layernorm_backward_write<X, VECS>(&total, dinp + (first + r) * C, slot + r * slot_vecs, w,
                                              sum[2 * r] * inverse, sum[2 * r + 1] * inverse, C);
        }
        fetch(stage, first + STAGES * step);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        turn ^= 1;
    }
    float* own = partial + (int64_t)blockIdx.x * 3 * C;
#pragma unroll
    for (int v = 0; v < VECS; v++) {
        int c = (threadIdx.x + v * blockDim.x) * size;
        if (c >= C) continue;
        for (int j = 0; j < size; j++) {
            own[c + j] = total.dweight[v * size + j];
            own[C + c + j] = total.dbias[v * size + j];
            own[2 * C + c + j] = total.dcolumn[v * size + j];
        }
    }
}

// Vectors a thread, threads, and blocks of the backward kernel: up to 768 threads a multiprocessor are there at once.
struct LayernormShape {
    int vecs, threads, blocks;
};

template <typename X>
LayernormShape layernorm_backward_shape(const Device* dev, int C) {
    LayernormShape shape;
    int vecs = C / Vec<X>::size;
    shape.vecs = 1;
    while (vecs > 384 * shape.vecs) shape.vecs *= 2;
    shape.threads = ceil_div(ceil_div(vecs, shape.vecs), 32) * 32;
    int blocks = 768 / shape.threads;
    shape.blocks = dev->sm_count * (blocks < 1 ? 1 : blocks > 8 ? 8 : blocks);
    return shape;
}

// out, inp: (N, C); mean, rstd: (N); weight, bias: (C). With inp2: residual: (N, C) = inp1 + inp2 is what is
// normalised.
template <typename X>
void layernorm_forward_launch(const Device* dev, X* residual, X* out, float* mean, float* rstd, const X* inp1,
                              const X* inp2, const X* weight, const X* bias, int64_t N, int C) {
    assert(C % 8 == 0);
    int vecs = C / Vec<X>::size;
    if (N == 0) return;
    if (vecs <= 32 * 8) {
        // By the vectors of a lane: registers that a shorter row does not need would keep other warps out.
        int lane_vecs = (int)ceil_div(vecs, 32);
        auto kernel = lane_vecs <= 3   ? layernorm_forward_kernel<X, 3>
                      : lane_vecs == 4 ? layernorm_forward_kernel<X, 4>
                      : lane_vecs == 5 ? layernorm_forward_kernel<X, 5>
                      : lane_vecs <= 7 ? layernorm_forward_kernel<X, 7>
                                       : layernorm_forward_kernel<X, 8>;
        kernel<<<(unsigned)ceil_div(N, 8), 256, 0, dev->stream>>>(residual, out, mean, rstd, inp1, inp2, weight, bias,
                                                                  N, C);
    } else {
        layernorm_forward_long_kernel<<<N, 512, 0, dev->stream>>>(residual, out, mean, rstd, inp1, inp2, weight, bias,
                                                                  C);
    }
    check_launch();
}

// out, inp: (N, C); mean, rstd: (N); weight, bias: (C)
template <typename X>
void layernorm_forward(const Device* dev, X* out, float* mean, float* rstd, const X* inp, const X* weight,
                       const X* bias, int64_t N, int C) {
    if (!dev->gpu) {
        assert(sizeof(X) == sizeof(float));
        layernorm_forward_cpu((float*)out, mean, rstd, (const float*)inp, (const float*)weight, (const float*)bias, N,
                              C);
        return;
    }
    layernorm_forward_launch<X>(dev, nullptr, out, mean, rstd, inp, nullptr, weight, bias, N, C);
}

// residual: (N, C) = inp1 + inp2, may be inp1; out: (N, C) = layernorm(residual); mean, rstd: (N); weight, bias: (C)
template <typename X>
void residual_layernorm_forward(const Device* dev, X* residual, X* out, float* mean, float* rstd, const X* inp1,
                                const X* inp2, const X* weight, const X* bias, int64_t N, int C) {
    if (!dev->gpu) {
        assert(sizeof(X) == sizeof(float));
        residual_layernorm_forward_cpu((float*)residual, (float*)out, mean, rstd, (const float*)inp1,
                                       (const float*)inp2, (const float*)weight, (const float*)bias, N, C);
        return;
    }
    layernorm_forward_launch(dev, residual, out, mean, rstd, inp1, inp2, weight, bias, N, C);
}

inline int64_t layernorm_backward_scratch_bytes(const Device* dev, int C) {
    if (!dev->gpu) return 0;
    int a = layernorm_backward_shape<float>(dev, C).blocks, b = layernorm_backward_shape<bf16>(dev, C).blocks;
    return (int64_t)(a > b ? a : b) * 3 * C * sizeof(float);
}

template <typename X, int VECS>
void layernorm_backward_launch(const Device* dev, LayernormShape shape, int blocks, X* dinp, float* partial,
                               const X* dout, const X* inp, const X* weight, const float* mean, const float* rstd,
                               int64_t N, int C) {
    auto kernel = layernorm_backward_kernel<X, VECS>;
    int bytes = layernorm_rows(VECS) * layernorm_stages(VECS) * layernorm_row_bytes(VECS, shape.threads);
    if (bytes + 1024 > dev->shared_memory) {  // 1024: more than the static sums
        user_error(
            "layer norm of %d channels in fp32 needs %d bytes of shared memory, this GPU has %d for a block; type "
            "fewer --channels or --matmul bf16",
            C, bytes, dev->shared_memory);
    }
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<blocks, shape.threads, bytes, dev->stream>>>(dinp, partial, dout, inp, weight, mean, rstd, N, C);
    check_launch();
}

// dinp: (N, C), added to; dweight, dbias: (C); dcolumns: (C) (+)= column sums of dinp on return, or NULL; scratch:
// layernorm_backward_scratch_bytes; dout, inp: (N, C); weight: (C); mean, rstd: (N). C at most 12288.
template <typename X, typename G>
void layernorm_backward(const Device* dev, X* dinp, G* dweight, G* dbias, G* dcolumns, float* scratch, const X* dout,
                        const X* inp, const X* weight, const float* mean, const float* rstd, int64_t N, int C,
                        bool accumulate) {
    assert(C % 8 == 0 && C <= 12288 && N > 0);
    if (!dev->gpu) {
        assert(sizeof(X) == sizeof(float) && sizeof(G) == sizeof(float));
        layernorm_backward_cpu((float*)dinp, (float*)dweight, (float*)dbias, (float*)dcolumns, (const float*)dout,
                               (const float*)inp, (const float*)weight, mean, rstd, N, C, accumulate);
        return;
    }
    LayernormShape shape = layernorm_backward_shape<X>(dev, C);
    int blocks = N < shape.blocks ? (int)N : shape.blocks;
    auto launch = shape.vecs == 1   ? layernorm_backward_launch<X, 1>
                  : shape.vecs == 2 ? layernorm_backward_launch<X, 2>
                                    : layernorm_backward_launch<X, 4>;
    if constexpr (std::is_same_v<X, float>)
        if (shape.vecs == 8) launch = layernorm_backward_launch<X, 8>;
    launch(dev, shape, blocks, dinp, scratch, dout, inp, weight, mean, rstd, N, C);
    G* totals[3] = {dweight, dbias, dcolumns};
    column_sum(dev, totals, 3, scratch, blocks, C, accumulate);
}
