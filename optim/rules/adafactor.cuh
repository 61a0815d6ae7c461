// Adafactor (Shazeer and Stern, arXiv 1804.04235). Its v is the product of one number for each row and one for each
// column:
//     r_i = r_i + t^-0.8 * (mean of g^2 over row i - r_i),   c_j likewise over column j;   V_ij = r_i * c_j / mean r
//                                                          -0.8: --beta2-decay; mean r is at least --eps1
//     U = g / sqrt(V);   U = U / max(1, RMS(U) / d)        d: --clip-update, 1
//     m = m + (1 - beta1) * (U - m)                        with --m none: m = U
//     p = p * (1 - lr * wd) - lr * m                       with --adafactor-lr scaled, the lr of m is lr *
//                                                          max(--eps2, RMS(p))
// A vector is not factored: V_j = c_j. The paper adds 1e-30 to g^2; here roots are taken of at least 2^-100 = 8e-31,
// which has the same effect for rows of zeros. With --adafactor-lr relative the learning rate is at most
// 1 / sqrt(t); the paper's is paper, with --lr 0.01 and --schedule constant. t^-0.8 is 1 in the first step, so v needs
// no bias correction; m has none. rows.cuh computes r, c and RMS(U) before the step; `v` is the factor with U = v g.
#pragma once
#include "hyper.cuh"

EMBED_SOURCE

struct Adafactor : RuleDefaults {
    static constexpr bool BY_ROWS = true, GROWS = true;
    static constexpr RowRule ROWS = ROWS_ADAFACTOR;

    static OPTIM_INLINE void update(const Hyper& hyper, float g, float* p, float* m, float* v, float*) {
        *m = average(*m, exact_mul(g, *v), hyper.one_minus_beta1);
        *p = exact_fma(-hyper.lr, *m, exact_mul(hyper.keep, *p));
    }
};
