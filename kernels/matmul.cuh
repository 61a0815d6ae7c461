// Linear layers, row-major: out = inp W^T + bias with inp (N, C), weight (OC, C), out (N, OC); N is B * T. Plainly:
//     for n, o:  out[n][o] = bias[o];  for k = 0 .. C - 1:  out[n][o] += inp[n][k] * weight[o][k]
// dinp = dout W and dweight (+)= dout^T inp are the other two products, dbias (+)= the column sums of dout.
//
// On the GPU the products are cuBLASLt's, always with fp32 accumulation, and fp32 inputs are multiplied as fp32 (never
// TF32). The two next to GELU, which write the input of GELU beside its output, or multiply the gradient by gelu'
// before it is stored, are ours on Hopper (matmul_gelu.cuh), and elsewhere and at small shapes cuBLASLt's with GELU in
// the epilogue. cuBLASLt thinks in columns: a row-major (R, K) matrix is its (K, R) matrix, so that out^T = op(W) inp^T
// and so on.
//
// Where an epilogue has no algorithm, the product runs without it and gelu.cuh's kernel follows; so it does in fp32,
// where the epilogue's tanh is not promised to be good to fp32.
#pragma once
#include <assert.h>

#include "column_sum.cuh"
#include "common.cuh"
#include "cpu_gemm.h"
#include "gelu.cuh"
#include "matmul_product.cuh"
#ifdef __CUDACC__
#include "matmul_gelu.cuh"
#endif

// out: (N, OC); pre_gelu: (N, OC) or NULL; inp: (N, C); weight: (OC, C); bias: (OC) or NULL
inline void matmul_forward_cpu(float* out, float* pre_gelu, const float* inp, const float* weight, const float* bias,
                               int64_t N, int C, int OC) {
    float* product = pre_gelu ? pre_gelu : out;
    if (bias) {
#pragma omp parallel for schedule(static)
        for (int64_t n = 0; n < N; n++) memcpy(product + n * OC, bias, OC * sizeof(float));
    }
    CpuGemm gemm = {N, OC, C, inp, C, 1, weight, 1, C, product, bias != nullptr};
    cpu_gemm(&gemm);
    if (pre_gelu) gelu_forward_cpu(out, pre_gelu, N * OC);
}

// dinp, pre_gelu: (N, C); dbias: (C); dout: (N, OC); weight: (OC, C)
inline void matmul_backward_gelu_cpu(float* dinp, float* dbias, const float* dout, const float* weight,
                                     const float* pre_gelu, int64_t N, int C, int OC, bool accumulate) {
    CpuGemm gemm = {N, C, OC, dout, OC, 1, weight, C, 1, dinp, false};
    cpu_gemm(&gemm);
    gelu_backward_inplace_cpu(dinp, pre_gelu, N * C);
    column_sum_cpu(dbias, dinp, N, C, accumulate);
}

// For matmul_backward_bias_kernel: the columns of dout per block, the blocks that fit on a multiprocessor, and the rows
// of partial sums. All blocks fit on the GPU at once, since one more would run alone.
template <typename X>
constexpr int matmul_bias_columns = 32 * Vec<X>::size;

constexpr int MATMUL_BIAS_BLOCKS = 6;

template <typename X>
int matmul_bias_slices(const Device* dev, int OC) {
    int slices = MATMUL_BIAS_BLOCKS * dev->sm_count / (int)ceil_div(OC, matmul_bias_columns<X>);
    return slices < 1 ? 1 : slices;
}

// The scratch of matmul_gelu.cuh's backward product.
inline int64_t matmul_gelu_scratch_bytes(int64_t N, int C) {
    return ceil_div(N, 64) * C * (int64_t)sizeof(float);
}

#ifdef __CUDACC__
// Grid (ceil(OC / (32 vectors)), slices), block (32, 8), OC a multiple of 8, any N: a lane sums one vector of columns
// over every 8 * slices-th row; row `slice` of partial: (slices, OC) gets the block's sum. Deterministic.
template <typename X>
__global__ void __launch_bounds__(256, MATMUL_BIAS_BLOCKS)
    matmul_backward_bias_kernel(float* partial, const X* dout, int64_t N, int OC) {
    constexpr int size = Vec<X>::size;
    __shared__ float sums[8][size][32];
    int column = (blockIdx.x * 32 + threadIdx.x) * size;
    float sum[size] = {};
    if (column < OC) {
        int64_t step = 8 * (int64_t)gridDim.y;
        int64_t n = blockIdx.y * 8 + threadIdx.y;
        auto add = [&](Vec<X> d) {
            float x[size];
            vec_floats(x, d);
            for (int j = 0; j < size; j++) sum[j] += x[j];
        };
        for (; n + 3 * step < N; n += 4 * step) {  // four loads are in flight; in a plain loop it would be one
            Vec<X> d[4];
#pragma unroll
            for (int i = 0; i < 4; i++) d[i] = load_vec(dout + (n + i * step) * OC + column);
#pragma unroll
            for (int i = 0; i < 4; i++) add(d[i]);
        }
        for (; n < N; n += step) add(load_vec(dout + n * OC + column));
    }
    for (int j = 0; j < size; j++) sums[threadIdx.y][j][threadIdx.x] = sum[j];
    __syncthreads();
    if (threadIdx.y >= size || column >= OC) return;
    float total = 0.0f;  // warp j finishes lane j of every vector; size is at most the 8 warps
    for (int warp = 0; warp < 8; warp++) total += sums[warp][threadIdx.y][threadIdx.x];
    partial[(int64_t)blockIdx.y * OC + column + threadIdx.y] = total;
}
#endif

// out: (N, OC) = inp W^T + bias; with pre_gelu: (N, OC) that goes there and out = gelu(pre_gelu).
// inp: (N, C); weight: (OC, C); bias: (OC) or NULL. D is X, or float for logits.
template <typename X, typename D>
void matmul_forward(const Device* dev, D* out, X* pre_gelu, const X* inp, const X* weight, const X* bias, int64_t N,
                    int C, int OC) {
    if constexpr (std::is_same_v<X, float>) {
        if (!dev->gpu) return matmul_forward_cpu(out, pre_gelu, inp, weight, bias, N, C, OC);
    }
#ifdef __CUDACC__
    cublasLtEpilogue_t plain = bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    if constexpr (std::is_same_v<X, bf16> && std::is_same_v<D, bf16>) {
        if (pre_gelu && bias && matmul_gelu_fits(dev, N, OC, C))
            return matmul_gelu_forward(dev, out, pre_gelu, inp, weight, bias, N, C, OC);
        cublasLtEpilogue_t gelu = bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
        MatmulPointers fused = {weight, inp, out, bias, pre_gelu};
        if (pre_gelu && matmul_launch<X, X>(dev, &fused, CUBLAS_OP_T, CUBLAS_OP_N, OC, N, C, gelu, false)) return;
    }
    MatmulPointers pointers = {weight, inp, pre_gelu ? (void*)pre_gelu : out, bias, nullptr};
    if (!matmul_launch<X, D>(dev, &pointers, CUBLAS_OP_T, CUBLAS_OP_N, OC, N, C, plain, false))
        matmul_unsupported(N, OC, C);
    if (pre_gelu) gelu_forward(dev, (X*)out, pre_gelu, N * OC);
#endif
}

// dinp: (N, C) = dout W. dout: (N, OC); weight: (OC, C)
template <typename X>
void matmul_backward_input(const Device* dev, X* dinp, const X* dout, const X* weight, int64_t N, int C, int OC) {
    const MatmulProduct p = product_of(N, C, OC, false, false);
    matmul_product<X, X>(dev, &p, dinp, dout, weight, nullptr);
}

// dweight: (OC, C) (+)= dout^T inp. dout: (N, OC); inp: (N, C). Adding to float loses one fp32 rounding; adding to bf16
// rounds the sum, and with some of cuBLASLt's algorithms the product before it.
template <typename X, typename G>
void matmul_backward_weight(const Device* dev, G* dweight, const X* dout, const X* inp, int64_t N, int C, int OC,
                            bool accumulate) {
    MatmulProduct p = product_of(OC, C, N, true, false);
    p.beta = accumulate ? 1.0f : 0.0f;
    matmul_product<X, G>(dev, &p, dweight, dout, inp, dweight);
}

inline int64_t matmul_backward_bias_scratch_bytes(const Device* dev, int OC) {
    if (!dev->gpu) return 0;
    int a = matmul_bias_slices<float>(dev, OC), b = matmul_bias_slices<bf16>(dev, OC);
    return (int64_t)(a > b ? a : b) * OC * sizeof(float);
}

// dbias: (OC) (+)= the column sums of dout: (N, OC); scratch: matmul_backward_bias_scratch_bytes
template <typename X, typename G>
void matmul_backward_bias(const Device* dev, G* dbias, float* scratch, const X* dout, int64_t N, int OC,
                          bool accumulate) {
    assert(OC % 8 == 0);
    if constexpr (std::is_same_v<X, float>) {
        if (!dev->gpu) return column_sum_cpu(dbias, dout, N, OC, accumulate);
    }
#ifdef __CUDACC__
    int slices = matmul_bias_slices<X>(dev, OC);
    dim3 grid(ceil_div(OC, matmul_bias_columns<X>), slices), block(32, 8);
    launch_kernel(dev, matmul_backward_bias_kernel<X>, grid, block, 0, scratch, dout, N, OC);
    column_sum<G>(dev, &dbias, 1, scratch, slices, OC, accumulate);
#endif
}

inline int64_t matmul_backward_gelu_scratch_bytes(const Device* dev, int64_t N, int C) {
    if (!dev->gpu) return 0;
    int64_t ours = matmul_gelu_scratch_bytes(N, C), bias = matmul_backward_bias_scratch_bytes(dev, C);
    return ours > bias ? ours : bias;
}

// Back through a linear layer to the GELU before it and the bias before that: dinp: (N, C) = (dout W) *
// gelu'(pre_gelu), dbias: (C) (+)= its column sums. dout: (N, OC); weight: (OC, C); pre_gelu: (N, C); scratch:
// matmul_backward_gelu_scratch_bytes
template <typename X, typename G>
void matmul_backward_gelu(const Device* dev, X* dinp, G* dbias, float* scratch, const X* dout, const X* weight,
                          const X* pre_gelu, int64_t N, int C, int OC, bool accumulate) {
    if constexpr (std::is_same_v<X, float>) {
        if (!dev->gpu) return matmul_backward_gelu_cpu(dinp, dbias, dout, weight, pre_gelu, N, C, OC, accumulate);
    }
#ifdef __CUDACC__
    bool fused = false;
    if constexpr (std::is_same_v<X, bf16>) {
        if (matmul_gelu_fits(dev, N, C, OC))
            return matmul_gelu_backward(dev, dinp, dbias, scratch, dout, weight, pre_gelu, N, C, OC, accumulate);
        MatmulPointers pointers = {weight, dout, dinp, nullptr, pre_gelu};
        fused = matmul_launch<X, X>(dev, &pointers, CUBLAS_OP_N, CUBLAS_OP_N, C, N, OC, CUBLASLT_EPILOGUE_DGELU, false);
    }
    if (!fused) {
        matmul_backward_input(dev, dinp, dout, weight, N, C, OC);
        gelu_backward_inplace(dev, dinp, pre_gelu, N * C);
    }
    matmul_backward_bias(dev, dbias, scratch, dinp, N, C, accumulate);
#endif
}
