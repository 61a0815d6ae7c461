// The linear layer of matmul.cuh for the few rows of a sampling step: out = inp W^T + bias, inp (N, C), weight (OC, C),
// N from 1 to some dozens. Its cost is reading the weights once, 2 OC C bytes in bf16, so it is bound by memory up to
// about a hundred rows on a GPU.
//
// Every element of out is one sum whose order depends on C alone. So a row has the same bits whichever rows are
// computed with it, and a token gives the same text alone, in a batch of samples and as a part of a prompt.
//
// CPU: the chains of cpu_gemm.h (fmaf over k = 0 .. C - 1 from the bias on), therefore the same bits as
// matmul_forward_cpu. That function first copies W into panels, which costs more than some rows' products.
//
// GPU, bf16: mma.sync with a band of 16 outputs' weights as the 16-row operand and a tile of up to 8 rows of inp as the
// 8 columns of the other, both from global memory straight into registers. The sum over k may take its terms in any
// order if both operands take the same: thread t of four holds k = 8t .. 8t + 7 of each 32, one load of 16 bytes, which
// feeds two instructions. The eight warps of a block share the k of its outputs, and their sums are added in the order
// of the warps. fp32: a warp computes one element.
//
// With few rows, normalising them again in every block takes less time than starting one more kernel. So where inp is a
// layernorm's output, each block computes it for itself, as layernorm_forward_kernel does, and all that does not depend
// on other kernels' work is loaded before the wait for them.
#pragma once
#include <assert.h>

#include "common.cuh"
#include "gelu.cuh"
#include "layernorm.cuh"
#include "matmul.cuh"
#ifdef __CUDACC__
#include "mma.cuh"
#endif

// A layernorm before the linear layer: what is multiplied is layernorm(inp + branch). All NULL: there is none. It has a
// kernel of its own in fp32, with more than 8 rows, where C is above 2048, and where OC is above 64 times the
// multiprocessors, since many blocks on each would normalise one after another.
template <typename X>
struct RowsNorm {
    const X* branch;         // (N, C), or NULL: nothing is added
    const X *weight, *bias;  // (C)
    // (N, C): `sum` gets inp + branch where there is a branch; it is not inp, which other blocks still read. `normed`,
    // and mean and rstd, (N), are used only if a kernel of its own normalises.
    X *sum, *normed;
    float *mean, *rstd;
};

constexpr int MATMUL_ROWS_CHAINS = 8;  // outputs at a time: the chains hide each other's latency
constexpr int MATMUL_ROWS_FEW = 4;     // with more rows matmul_forward_cpu is faster

// matmul_forward_cpu for few rows; out: (N, OC); inp: (N, C); weight: (OC, C); bias: (OC) or NULL
inline void matmul_rows_cpu(float* out, const float* inp, const float* weight, const float* bias, int64_t N, int64_t C,
                            int64_t OC) {
#pragma omp parallel for schedule(static)
    for (int64_t o = 0; o < OC; o += MATMUL_ROWS_CHAINS) {
        for (int64_t n = 0; n < N; n++) {
            float sum[MATMUL_ROWS_CHAINS];
            for (int j = 0; j < MATMUL_ROWS_CHAINS; j++) sum[j] = bias ? bias[o + j] : 0.0f;
            for (int64_t k = 0; k < C; k++)
                for (int j = 0; j < MATMUL_ROWS_CHAINS; j++)
                    sum[j] = fmaf(inp[n * C + k], weight[(o + j) * C + k], sum[j]);
            memcpy(out + n * OC + o, sum, sizeof(sum));
        }
    }
}

#ifdef __CUDACC__
constexpr int MATMUL_ROWS_WARPS = 8;
constexpr int MATMUL_ROWS_DEPTH = 32;  // k of a warp's load

// Normalises N rows of inp, a warp each, to `memory`, behind the layernorm's weight and bias, which have been copied
// there asynchronously. The first block writes the sums. The bits are those of layernorm_forward_kernel.
template <int VECS>
__device__ inline void matmul_rows_normalise(bf16* memory, const bf16* inp, const RowsNorm<bf16>& norm, int N, int C) {
    const int64_t row = threadIdx.x / 32, base = row * C;
    Vec<bf16> x[VECS];
    float mean, rstd;
    copy_async_wait<0>();
    __syncthreads();
    early_wait();
    if (row < N) {
        layernorm_row<bf16, VECS>(x, &mean, &rstd, blockIdx.x == 0 ? norm.sum + base : nullptr, inp + base,
                                  norm.branch ? norm.branch + base : nullptr, C);
#pragma unroll
        for (int v = 0; v < VECS; v++) {
            const int c = (threadIdx.x % 32 + 32 * v) * 8;
            if (c >= C) break;
            const Vec<bf16> weight = load_vec(memory + c), bias = load_vec(memory + C + c);
            store_vec(memory + 2 * C + base + c, layernorm_vec_out(x[v], mean, rstd, weight, bias));
        }
    }
    __syncthreads();
}

// Grid (OC / (16 BANDS), ceil(N / (8 TILES))), block 256, C a multiple of 32, OC of 16 BANDS; N any. AHEAD: loads of
// each operand under way. VECS: if not 0, the rows are normalised, TILES is 1, N at most MATMUL_ROWS_WARPS, C at most
// 256 VECS, dynamic shared memory (2 + N) C elements. Deterministic; the order of a sum depends on C alone. D: float or
// bf16.
template <typename D, int TILES, int BANDS, int AHEAD, int VECS>
__global__ void __launch_bounds__(32 * MATMUL_ROWS_WARPS, AHEAD < 8 && VECS < 8 ? 2 : 1)
    matmul_rows_kernel(D* out, const bf16* inp, const bf16* weight, const bf16* bias, bool gelu, int N, int C, int OC,
                       RowsNorm<bf16> norm) {
    extern __shared__ __align__(16) bf16 matmul_rows_shared[];
    __shared__ float partial[MATMUL_ROWS_WARPS][TILES][4][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = blockIdx.y * 8 * TILES;  // row of inp
    const bf16* outputs = weight + ((int64_t)blockIdx.x * 16 * BANDS + g) * C + 8 * t;
    const bf16* rows = (VECS ? matmul_rows_shared + 2 * C : inp + (int64_t)first * C) + g * C + 8 * t;
    constexpr int step = MATMUL_ROWS_WARPS * MATMUL_ROWS_DEPTH;
    const auto load = [&](const bf16* from, int row, int k, bool there) {
        return there ? *reinterpret_cast<const uint4*>(from + (int64_t)row * C + k) : make_uint4(0, 0, 0, 0);
    };
    float sum[BANDS][TILES][4] = {};
    bf16 added[BANDS] = {};
    early_begin();
    for (int b = 0; b < BANDS && bias; b++) added[b] = bias[(blockIdx.x * BANDS + b) * 16 + threadIdx.x % 16];
    if constexpr (VECS > 0) {
        for (int c = 8 * threadIdx.x; c < C; c += 8 * blockDim.x)
            copy_async(matmul_rows_shared + c, norm.weight + c), copy_async(matmul_rows_shared + C + c, norm.bias + c);
        copy_async_commit();
    }
    int begin = warp * MATMUL_ROWS_DEPTH;
    for (int k = begin + AHEAD * step; k < C && BANDS == 1; k += step)
        prefetch_l2(outputs + k), prefetch_l2(outputs + (int64_t)8 * C + k);
    do {
        uint4 w[AHEAD][BANDS][2], x[AHEAD][TILES];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int k = begin + i * step;
#pragma unroll
            for (int b = 0; b < 2 * BANDS; b++) w[i][b / 2][b % 2] = load(outputs, 8 * b, k, k < C);
        }
        if constexpr (VECS > 0)
            if (begin < step) matmul_rows_normalise<VECS>(matmul_rows_shared, inp, norm, N, C);
        early_wait();  // the weights need not wait for the kernel that makes inp
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int k = begin + i * step;
#pragma unroll
            for (int n = 0; n < TILES; n++) x[i][n] = load(rows, 8 * n, k, k < C && first + 8 * n + g < N);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (begin + i * step >= C) break;
#pragma unroll
            for (int b = 0; b < BANDS; b++) {
                const uint4 upper = w[i][b][0], lower = w[i][b][1];
                const uint32_t low[4] = {upper.x, lower.x, upper.y, lower.y},
                               high[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    mma(sum[b][n], low, x[i][n].x, x[i][n].y);
                    mma(sum[b][n], high, x[i][n].z, x[i][n].w);
                }
            }
        }
        begin += AHEAD * step;
    } while (begin < C);
#pragma unroll
    for (int b = 0; b < BANDS; b++) {
        if (b > 0) __syncthreads();  // the sums of the band before have been read
#pragma unroll
        for (int n = 0; n < TILES; n++)
            for (int i = 0; i < 4; i++) partial[warp][n][i][lane] = sum[b][n][i];
        __syncthreads();
        for (int e = threadIdx.x; e < 128 * TILES; e += blockDim.x) {
            const int row = e / 16, o = e % 16;  // see mma for where an element lies
            const int i = (o >= 8 ? 2 : 0) + (row & 1), from = 4 * (o % 8) + (row % 8) / 2;
            float total = 0.0f;
            for (int part = 0; part < MATMUL_ROWS_WARPS; part++) total += partial[part][row / 8][i][from];
            const int column = (blockIdx.x * BANDS + b) * 16 + o;
            if (bias) total += to_float(added[b]);
            if (gelu) total = gelu_value<bf16>(total);
            if (first + row < N) out[(int64_t)(first + row) * OC + column] = from_float<D>(total);
        }
    }
}

// Return the kernel for up to 8 rows, and for more. The speed of one row depends on the loads in flight, most of all on
// those before the wait.
template <typename D>
auto matmul_rows_few(bool normalises, int C) {
    if (normalises) return C > 1024 ? matmul_rows_kernel<D, 1, 1, 4, 8> : matmul_rows_kernel<D, 1, 1, 4, 4>;
    return C > 1024 ? matmul_rows_kernel<D, 1, 1, 8, 0> : matmul_rows_kernel<D, 1, 1, 4, 0>;
}
template <typename D>
auto matmul_rows_many(bool wide) {
    return wide ? matmul_rows_kernel<D, 8, 2, 1, 0> : matmul_rows_kernel<D, 2, 1, 4, 0>;
}

// Grid (OC / 8, N), block 256: a warp computes one element. C a multiple of 4, OC of 8. Deterministic.
__global__ static void __launch_bounds__(256) matmul_rows_fp32_kernel(float* out, const float* inp, const float* weight,
                                                                      const float* bias, bool gelu, int C, int OC) {
    const int lane = threadIdx.x % 32, column = blockIdx.x * 8 + threadIdx.x / 32;
    const float *w = weight + (int64_t)column * C, *x = inp + (int64_t)blockIdx.y * C;
    float sum = 0.0f;
    for (int k = 4 * lane; k < C; k += 128) {
        Vec<float> a = load_vec(w + k), b = load_vec(x + k);
        for (int j = 0; j < 4; j++) sum = fmaf(a.lane[j], b.lane[j], sum);
    }
    sum = warp_sum(sum);
    if (lane != 0) return;
    if (bias) sum += bias[column];
    if (gelu) sum = gelu_value<float>(sum);
    out[(int64_t)blockIdx.y * OC + column] = sum;
}
#endif

// out: (N, OC) = inp W^T + bias, or gelu of it. inp: (N, C), after `norm`; weight: (OC, C); bias: (OC) or NULL. D is X,
// or float for logits. C and OC are multiples of 64.
template <typename X, typename D>
void matmul_rows(const Device* dev, D* out, const X* inp, const X* weight, const X* bias, bool gelu, int N, int C,
                 int OC, RowsNorm<X> norm = {}) {
    assert(C % 64 == 0 && OC % 64 == 0);
    const bool apart = std::is_same_v<X, float> || N > 8 || C > 2048 || OC > 64 * dev->sm_count;  // see RowsNorm
    if (norm.weight && apart) {
        residual_layernorm_forward(dev, norm.sum, norm.normed, norm.mean, norm.rstd, inp, norm.branch, norm.weight,
                                   norm.bias, N, C);
        inp = norm.normed, norm = {};
    }
    if constexpr (std::is_same_v<X, float>) {
        const bool few = N <= MATMUL_ROWS_FEW;
        if (!dev->gpu && few) matmul_rows_cpu(out, inp, weight, bias, N, C, OC);
        if (!dev->gpu && !few) matmul_forward_cpu(out, nullptr, inp, weight, bias, N, C, OC);
        if (!dev->gpu && gelu) gelu_forward_cpu(out, out, (int64_t)N * OC);
    }
    if (!dev->gpu) return;
#ifdef __CUDACC__
    if constexpr (std::is_same_v<X, float>) {
        dim3 grid(OC / 8, N);
        launch_kernel(dev, matmul_rows_fp32_kernel, grid, 256, 0, (float*)out, inp, weight, bias, gelu, C, OC);
    } else {
        // Up to 64 rows are read, through the L2 cache, by every block that computes outputs of them: few rows per
        // block keep all multiprocessors busy; if there are enough outputs for that (the head), many rows and outputs
        // per block read least.
        const bool few = N <= 8, wide = !few && ceil_div(N, 64) * (OC / 32) >= 2 * dev->sm_count;
        const int rows = few ? 8 : wide ? 64 : 16, shared = norm.weight ? (2 + N) * C * (int)sizeof(X) : 0;
        const auto kernel = few ? matmul_rows_few<D>(norm.weight, C) : matmul_rows_many<D>(wide);
        const dim3 grid(OC / (wide ? 32 : 16), (unsigned)ceil_div(N, rows));
        launch_early(dev, kernel, grid, 32 * MATMUL_ROWS_WARPS, 1, shared, out, inp, weight, bias, gelu, N, C, OC,
                     norm);
    }
#endif
}
