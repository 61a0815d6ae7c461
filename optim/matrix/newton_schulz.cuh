// The Newton-Schulz iteration for matrices of one shape. It turns X, of norm 1, into nearly its orthogonal factor: each
// step maps the singular values s of X to a s + b s^3 + c s^5, with coefficients by name. X has m rows and n columns,
// and m <= n: the caller transposes a tall matrix.
//
// The plain form, the definition, in any type:
//     A = X X^T;  B = b A + c A^2;  X = a X + B X                                  4 m^2 n + 2 m^3 flop a step
// The symmetric form takes several steps on the small matrix R (the Gram form of Dao-AILab's gram-newton-schulz, 2026):
//     R = X X^T;  Q = I;  each step:  Z = a I + b R + c R^2;  Q = Q Z;  R = Z R Z;   then X = Q X
// All these are polynomials of one symmetric matrix, so they are symmetric, their products commute, and the halves
// below the diagonal are enough (kernels/matmul_symmetric.cuh). In low precision R drifts away from X X^T, so R is
// recomputed from X after the first two steps and after every three from there on. It is recomputed in each step for
// square matrices, where that costs no more, and where the library makes the products, whose results are not symmetric
// to the bit. The cost of 5 steps in flop, without the halves above diagonals:
//     m = n: 20 m^3 of the plain form's 30       n = 4 m: 38 m^3 of 90
//
// Types: float on the CPU; on a GPU fp16, which has three more bits than bf16, with fp32 sums. In fp16, X is stored 16
// times as large and R 256 times, since elements of X X^T beside its diagonal, about m^-1 n^-0.5, would otherwise be
// subnormal from 1600 x 1600 on. The stored X stays below 16 x 1.3 and R below 440.
#pragma once
#include "../../kernels/matmul_symmetric.cuh"
#include "matrix.h"

constexpr float POLAR_SCALE = 16.0f;  // of X in fp16
constexpr int POLAR_FIRST = 2, POLAR_NEXT = 3;

// Runs the plain form on `count` matrices of m x n, one after another, in x. y has room for as many, and `a` and `b`
// each for `count` squares of side m. Returns where the result is: x or y.
template <class T>
T* newton_schulz_plain(const Device* dev, const OptimConfig* config, T* x, T* y, T* a, T* b, int64_t m, int64_t n,
                       int64_t count) {
    for (int step = 0; step < config->ns_steps; step++) {
        NewtonSchulz c;
        newton_schulz_coefficients(config->ns_coefficients, step, &c);
        const MatmulProduct gram = {m, m, n, false, true, 1.0f, 0.0f, count};
        matmul_product<T, T>(dev, &gram, a, x, x, nullptr);
        const MatmulProduct square_of = {m, m, m, false, false, c.c, c.b, count};
        matmul_product<T, T>(dev, &square_of, b, a, a, a);
        const MatmulProduct next = {m, n, m, false, false, 1.0f, c.a, count};
        matmul_product<T, T>(dev, &next, y, b, x, x);
        T* other = x;
        x = y, y = other;
    }
    return x;
}

// Returns how many squares of side m the symmetric form needs for each matrix. R of a square matrix lies in the memory
// of the next X, since nothing needs R by then.
inline int64_t polar_squares(int64_t m, int64_t n) {
    return m == n ? 1 : 4;
}

// Runs the symmetric form. `squares` has room for polar_squares(m, n) count squares; x holds X times `scale`.
// `gram_form`: R serves several steps; false for square matrices. product(MatmulProduct, d, a, b, c) makes a
// product.
template <class T, class Product>
T* newton_schulz_symmetric(const OptimConfig* config, Product product, T* x, T* y, T* squares, int64_t m, int64_t n,
                           int64_t count, float scale, bool gram_form) {
    const int64_t steps = config->ns_steps;
    const float scale2 = scale * scale;
    const MatmulProduct gram = {m, m, n, false, true, 1.0f, 0.0f, count, 0.0f, true};
    const MatmulProduct multiply = {m, m, m, false, true, 1.0f, 0.0f, count, 0.0f, true};
    const MatmulProduct apply = {m, n, m, false, false, 1.0f, 0.0f, count};
    const int64_t square = m * m * count;
    for (int64_t step = 0, until = 0; step < steps;) {
        until += !gram_form ? 1 : step == 0 ? POLAR_FIRST : POLAR_NEXT;
        until = until < steps ? until : steps;
        T *r = m == n ? y : squares, *z = m == n ? squares : r + square;
        T *t = z + square, *q = t + square;  // used by the Gram form only
        product(&gram, r, x, x, nullptr);
        for (bool first = true; step < until; step++, first = false) {
            NewtonSchulz c;
            newton_schulz_coefficients(config->ns_coefficients, (int)step, &c);
            MatmulProduct polynomial = multiply;
            polynomial.alpha = c.c / (scale2 * scale2), polynomial.beta = c.b / scale2, polynomial.gamma = c.a;
            product(&polynomial, z, r, r, r);
            if (step + 1 < until) {
                product(&multiply, t, r, z, nullptr);
                product(&multiply, r, t, z, nullptr);
            }
            if (!first) product(&multiply, t, q, z, nullptr);
            T* old = q;
            q = first ? z : t;
            (first ? z : t) = old;
        }
        product(&apply, y, q, x, nullptr);
        T* other = x;
        x = y, y = other;
    }
    return x;
}

#ifdef __CUDACC__
// `count` matrices of m x n, with the buffers of newton_schulz_symmetric.
struct PolarBatch {
    __half *x, *y, *squares;
    int64_t m, n, count;
};

// Runs the symmetric form on a GPU in fp16. Returns where the result is: x or y. The shape alone decides how the
// products are made.
inline __half* newton_schulz_gpu(const Device* dev, const OptimConfig* config, const PolarBatch* of) {
    const MatmulProduct multiply = {of->m, of->m, of->m, false, true, 1.0f, 0.0f, of->count, 0.0f, true};
    const bool gram_form = of->m != of->n && symmetric_product_fits(dev, &multiply);
    const auto product = [&](const MatmulProduct* p, __half* d, const __half* a, const __half* b, const __half* c) {
        symmetric_product(dev, p, d, a, b, c);
    };
    return newton_schulz_symmetric<__half>(config, product, of->x, of->y, of->squares, of->m, of->n, of->count,
                                           POLAR_SCALE, gram_form);
}
#endif
