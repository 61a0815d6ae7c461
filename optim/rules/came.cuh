// CAME (Luo et al., ACL 2023, arXiv 2307.02047): Adafactor with beta2 and a confidence in the update, factored too:
//     U as in adafactor.cuh, with 1 - beta2 in the place of t^-0.8
//     m = m + (1 - beta1) * (U - m)
//     R_i = R_i + (1 - beta3) * (mean of (U - m)^2 + 1e-16 over row i - R_i),   C_j likewise
//     S_ij = R_i * C_j / mean R
//     p = p * (1 - lr * wd) - lr * m / sqrt(S)
// V and S start at 0, so both are divided by 1 - beta^t, as Adam's v is; the paper leaves that out, and its first steps
// are up to 11 times as large. A vector has no confidence, as in the paper's code: p = p * (1 - lr * wd) - lr * m.
// A lasting direction makes S small and the step large, so the learning rate needs a warm-up. `v` is the factor with U
// = v g, and `second` is 1 / sqrt(S).
#pragma once
#include "hyper.cuh"

EMBED_SOURCE

struct Came : RuleDefaults {
    static constexpr RowRule ROWS = ROWS_CAME;
    static constexpr bool BY_ROWS = true, PAIRS = true, GROWS = true;

    static OPTIM_INLINE void update(const Hyper& hyper, float g, float* p, float* m, float* v, float* second) {
        *m = average(*m, exact_mul(g, *v), hyper.one_minus_beta1);
        *p = exact_fma(-hyper.lr, exact_mul(*m, *second), exact_mul(hyper.keep, *p));
    }
};
