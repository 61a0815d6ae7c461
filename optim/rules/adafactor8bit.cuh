// adafactor8bit 0.2.4 (PyPI) on the CPU, with its own formulas in place of the papers':
//     r, c as in adafactor.cuh, or with 1 - beta2 in the place of t^-0.8 (came8bit); e = --eps (the package: 1.19e-7)
//     V_ij = max(r_i, e^2) * max(c_j, e^2) / max(mean r, e);   of a vector, V_j = max(c_j, e^2)
//     m = m + (1 - beta1) * (g - m)                        of gradients, not of updates; with --m none: m = g
//     U = m / sqrt(V);   U = U / max(1, RMS(U) / d)        d: --clip-update
//     p = p * (1 - lr * wd) - lr * s * U                   s = sqrt(1 - beta2^t) / (1 - beta1^t), where adafactor8bit's
//                                                          beta2 is 0 here; 1 without m or with --adafactor-lr relative
// came8bit divides by the residual, too, of which m has a share: R_i and C_j start at 1 and average, with 1 - beta3,
// the means of (g - m)^2 / V over row i and column j. Then r_i R_i and c_j C_j take the places of r_i and c_j in V of
// U. Between steps r, c, R and C have the values of the 8-bit codes of adalog8, by 2048 rows or columns, in tensors of
// 4096 elements and more (min_8bit_size). They lie there as fp32, since codes would save 1/300 byte a parameter.
// --limit-growth limits the norm of m / sqrt(V), as the package does: not that of a corrected m.
#pragma once
#include "hyper.cuh"

EMBED_SOURCE

struct Adafactor8bit : RuleDefaults {
    static constexpr bool BY_ROWS = true;
    static constexpr RowRule ROWS = ROWS_ADAFACTOR8;

    static OPTIM_INLINE void update(const Hyper& hyper, float g, float* p, float* m, float* v, float*) {
        *m = average(*m, g, hyper.one_minus_beta1);
        *p = exact_fma(-hyper.step_size, exact_mul(*m, *v), exact_mul(hyper.keep, *p));
    }
};

struct Came8bit : Adafactor8bit {
    static constexpr RowRule ROWS = ROWS_CAME8;
};
