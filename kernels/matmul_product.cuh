// Products of matrices without anything else: those of the optimizer, and of the backward pass. They are apart from
// matmul.cuh, so that files which multiply nothing else do not compile its kernels.
#pragma once
#include <assert.h>

#include "common.cuh"
#include "cpu_gemm.h"
#ifdef __CUDACC__
#include "matmul_plan.cuh"
#endif

// d = alpha op(a) op(b) + beta c, for each of `batch` matrices, all row-major and one after another without gaps. op(a)
// is (rows, depth), op(b) (depth, cols), c and d (rows, cols). d is neither a nor b; c may be d. An operand that is
// transposed lies in memory as (depth, rows) or (cols, depth). A matrix's bits do not depend on the others in its
// batch.
struct MatmulProduct {
    int64_t rows, cols, depth;
    bool transpose_a, transpose_b;
    float alpha, beta;
    int64_t batch;
    float gamma = 0.0f;      // symmetric_product (matmul_symmetric.cuh) also adds gamma I; 0 for matmul_product
    bool symmetric = false;  // d is symmetric; matmul_product computes all of it nevertheless
    bool alone = false;      // one matrix, never more: thread blocks may share its depth
    float* parts = nullptr;  // of fp32 on a GPU: device memory for a and b, for the products described below
};

// Returns a product of one matrix, neither scaled nor added to anything.
inline MatmulProduct product_of(int64_t rows, int64_t cols, int64_t depth, bool transpose_a, bool transpose_b) {
    MatmulProduct p = {rows, cols, depth, transpose_a, transpose_b, 1.0f, 0.0f, 1};
    p.alone = true;
    return p;
}

// Plainly, and fp32: each element is one chain of fmaf over k, and then alpha sum + beta c, where an alpha of 1 begins
// the chain at beta c instead.
inline void matmul_product_cpu(const MatmulProduct* p, float* d, const float* a, const float* b, const float* c) {
    const int64_t n = p->rows * p->cols;
    const bool begins = p->beta != 0.0f && p->alpha == 1.0f;
    for (int64_t i = 0; i < p->batch; i++, d += n, a += p->rows * p->depth, b += p->depth * p->cols) {
        for (int64_t j = 0; begins && (c != d || p->beta != 1.0f) && j < n; j++) d[j] = p->beta * c[j];
        CpuGemm gemm = {p->rows,
                        p->cols,
                        p->depth,
                        a,
                        p->transpose_a ? 1 : p->depth,
                        p->transpose_a ? p->rows : 1,
                        b,
                        p->transpose_b ? 1 : p->cols,
                        p->transpose_b ? p->depth : 1,
                        d,
                        begins};
        cpu_gemm(&gemm);
        for (int64_t j = 0; p->alpha != 1.0f && j < n; j++) {
            d[j] = p->beta != 0.0f ? fmaf(p->alpha, d[j], p->beta * c[j]) : p->alpha * d[j];
        }
        if (p->beta != 0.0f) c += n;
    }
}

#ifdef __CUDACC__
// One launch of cuBLASLt. With `tf32` it may round operands of fp32 to the 11 bits of TF32.
template <typename X, typename D>
void matmul_product_gpu(const Device* dev, const MatmulProduct* p, D* d, const X* a, const X* b, const D* c,
                        bool tf32) {
    // cuBLASLt reads all of them transposed: d^T = op(b)^T op(a)^T.
    MatmulShape shape;
    matmul_shape(&shape, matmul_type<X>(), matmul_type<D>(), p->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                 p->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, p->cols, p->rows, p->depth);
    shape.batched = !p->alone, shape.tf32 = tf32;
    if (!p->alone) {
        shape.stride_a = p->depth * p->cols, shape.stride_b = p->rows * p->depth, shape.stride_d = p->rows * p->cols;
    }
    MatmulPointers pointers = {b, a, d, nullptr, nullptr};
    pointers.c = p->beta != 0.0f ? c : nullptr, pointers.alpha = p->alpha, pointers.batch = (int32_t)p->batch;
    if (!matmul_launch_shape(dev, &shape, &pointers, p->beta)) matmul_unsupported(p->rows, p->cols, p->depth);
}

// to = x rounded to TF32 or, with `rest`, what that leaves of x, rounded to TF32. Grid any, block 256.
static __global__ void matmul_part_kernel(float* to, const float* x, int64_t n, bool rest) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += 256ll * gridDim.x) {
        uint32_t part;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(part) : "f"(x[i]));
        if (rest) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(part) : "f"(x[i] - __uint_as_float(part)));
        to[i] = __uint_as_float(part);
    }
}

inline void matmul_part(const Device* dev, float* to, const float* x, int64_t n, bool rest) {
    const int64_t blocks = ceil_div(n, 1024);
    launch_kernel(dev, matmul_part_kernel, (unsigned)(blocks < 8192 ? blocks : 8192), 256, 0, to, x, n, rest);
}

// One product of fp32 as three of TF32. Each operand is the sum of two parts of 11 bits and a rest of at most 2^-22 of
// it: a = a1 + a2. The sum a2 b1 + a1 b2 + a1 b1 leaves out a2 b2 and the rests, at most 3 2^-22 of |a| |b|.
inline void matmul_product_parts(const Device* dev, const MatmulProduct* p, float* d, const float* a, const float* b,
                                 const float* c) {
    const int64_t of_a = p->rows * p->depth, of_b = p->depth * p->cols;
    float *part_a = p->parts, *part_b = part_a + of_a;
    MatmulProduct sum = *p;
    for (int i = 0; i < 3; i++) {
        if (i < 2) matmul_part(dev, part_a, a, of_a, i == 0);
        matmul_part(dev, part_b, b, of_b, i == 1);
        matmul_product_gpu<float, float>(dev, &sum, d, part_a, part_b, i == 0 ? c : d, true);
        sum.beta = 1.0f;
    }
}
#endif

// Sums are fp32; X is bf16 or fp16 or, on the CPU always, float. Dimensions of 16 bits are multiples of 8.
template <typename X, typename D>
void matmul_product(const Device* dev, const MatmulProduct* p, D* d, const X* a, const X* b, const D* c) {
    assert(p->gamma == 0.0f);
    if (p->batch == 0) return;
    if constexpr (std::is_same_v<X, float> && std::is_same_v<D, float>) {
        if (!dev->gpu) return matmul_product_cpu(p, d, a, b, c);
#ifdef __CUDACC__
        if (p->parts) return matmul_product_parts(dev, p, d, a, b, c);
#endif
    }
#ifdef __CUDACC__
    matmul_product_gpu<X, D>(dev, p, d, a, b, c, false);
#endif
}
