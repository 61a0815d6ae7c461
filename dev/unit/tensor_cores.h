// A sum of products as tensor cores compute it, of bf16 factors into fp32: what it is without any rounding, and how far
// from that tensor cores may be.
//
// A tensor core takes `products` products at a time. It aligns them and the sum so far at the largest exponent among
// them, drops of each what lies more than `bits` places below it, adds what is left exactly, and drops of the total
// what fp32 does not hold: never to nearest, always towards zero. 16 and 25 on Hopper and Blackwell, 8 and 24 on Ampere
// and Ada. NVIDIA does not say so; measured by Fasi et al., PeerJ Computer Science 7:e330 (2021), up to Ampere, and, as
// models that have every bit of the instructions, by Khattak and Mikaitis, arXiv:2512.07004, and Xie et al.,
// arXiv:2511.10909 (2025), up to Blackwell. What cuBLASLt makes of up to 3000 rows on an H200 has these bits
// (dev/LOG.md). matmul_backward_gpu shows that the bound refuses a product that is left out.
#pragma once
#include "../../kernels/cpu_gemm.h"
#include "kernels.h"

struct TensorCore {
    int products, bits;
};

inline TensorCore tensor_core(int compute) {
    return compute >= 90 ? TensorCore{16, 25} : TensorCore{8, 24};
}

// Bounds how far a tensor core's sum of K products, of a uniform and another of the given scale, lies from the exact
// one, in whatever order it is taken. No partial sum is larger than all products together, scale * K, nor, as they have
// random signs, than six standard deviations, 6 * scale / 3 * sqrt(K): call that S. In each of the G = K / products
// steps
//   - less than epsilon * S of the total is dropped. Towards zero: half of it on average, so that it grows with G; what
//     a step drops more or less than that is random, with epsilon * S / sqrt(12) as its standard deviation at most;
//   - less than 2^-bits * S of each product is dropped, and its sign is the product's, so that this does not add up: a
//     standard deviation of 2^-bits * S * sqrt(products / 3).
// The random errors amount to sqrt(G) times their root mean square; six times that is allowed. (Without the random
// signs, in the worst of cases, it would be 5 * epsilon * G times the sum of all magnitudes, 24 times as much at K =
// 3000.)
inline double tensor_core_bound(TensorCore core, int64_t K, double scale) {
    double S = fmin(scale * K, 2.0 * scale * sqrt(K)), G = ceil((double)K / core.products);
    double align = ldexp(1.0, 23 - core.bits) * sqrt(core.products / 3.0);
    return EPS32 * S * (G / 2.0 + 6.0 * sqrt((1.0 / 12.0 + align * align) * G));
}

// The products of cpu_gemm, with b read along its rows (b_col 1), each sum in double: of products of bf16 exact but for
// the last bits of double, and rounded to fp32 once.
inline void exact_gemm(const CpuGemm* gemm) {
    const int64_t ROWS = 8, N = gemm->cols;  // rows of c that share what is read of b
#pragma omp parallel
    {
        double* sums = (double*)malloc(ROWS * N * sizeof(double));
#pragma omp for schedule(dynamic)
        for (int64_t m0 = 0; m0 < gemm->rows; m0 += ROWS) {
            int64_t rows = cpu_gemm_min(ROWS, gemm->rows - m0);
            float* c = gemm->c + m0 * N;
            for (int64_t i = 0; i < rows * N; i++) sums[i] = gemm->accumulate ? c[i] : 0.0;
            for (int64_t k = 0; k < gemm->depth; k++) {
                const float* b = gemm->b + k * gemm->b_depth;
                for (int64_t r = 0; r < rows; r++) {
                    double a = gemm->a[(m0 + r) * gemm->a_row + k * gemm->a_depth], *sum = sums + r * N;
#pragma omp simd
                    for (int64_t n = 0; n < N; n++) sum[n] += a * b[n];
                }
            }
            for (int64_t i = 0; i < rows * N; i++) c[i] = (float)sums[i];
        }
        free(sums);
    }
}
