// RMNP (arXiv 2603.20527): momentum whose rows are scaled to the same length. A row has all weights of one output:
//     m = m + (1 - momentum) * (g - m)
//     u = g + momentum * (m - g)                           --nesterov off: u = m
//     p = p * (1 - lr * wd) - lr * sqrt(max(1, R / C)) * u_i / |u_i|
// The paper's momentum is a sum instead of an average; the scaling makes them equal. normuon-lite is NorMuon (arXiv
// 2510.05491) without the orthogonal factor: a row is divided by the root of an average over time, and the matrix has
// rmnp's length:
//     v_i = v_i + (1 - beta2) * (mean of u^2 over row i - v_i);   o_i = u_i / sqrt(v_i)
//     p = p * (1 - lr * wd) - lr * sqrt(max(1, R / C)) * sqrt(R) * o / |o|
// so that a row whose gradient is larger than usual moves further than others. The scaling also cancels v's bias.
// rows.cuh computes the factor of u, which the step gets as `v`. A row of zeros does not move.
#pragma once
#include "hyper.cuh"

EMBED_SOURCE

struct Rmnp : RuleDefaults {
    static constexpr RowRule ROWS = ROWS_RMNP;
    static constexpr bool BY_ROWS = true, HAS_MOMENTUM = true;

    static OPTIM_INLINE void update(const Hyper& hyper, float g, float* p, float* m, float* v, float*) {
        *m = average(*m, g, hyper.one_minus_beta1);
        *p = exact_fma(-hyper.lr, exact_mul(nesterov(hyper, g, *m), *v), exact_mul(hyper.keep, *p));
    }
};

struct NorMuonLite : Rmnp {
    static constexpr RowRule ROWS = ROWS_NORMUON_LITE;
};
