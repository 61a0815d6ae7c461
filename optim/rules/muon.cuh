// The parts of Muon (Jordan et al. 2024) and NorMuon (Li et al., arXiv 2510.05491) that read single elements;
// matrix/matrix.h has the rest. The step before the products updates the momentum and writes its Nesterov direction u
// in place of the weight:
//     m = m + (1 - momentum) * (g - m)
//     u = g + momentum * (m - g)                           --nesterov off: u = m
// beta1 and one_minus_beta1 of these rules come from --momentum. The step after the products applies an update U, which
// it reads as an fp32 gradient:
//     p = p * (1 - lr * wd) - lr * U                       --decay-mode cautious: without decay where U p < 0
#pragma once
#include "hyper.cuh"

EMBED_SOURCE

struct Muon : RuleDefaults {
    static constexpr MatrixRule MATRIX = MATRIX_MUON;
    static constexpr bool HAS_MOMENTUM = true;

    static OPTIM_INLINE void update(const Hyper& hyper, float g, float* p, float* m, float*, float*) {
        *m = average(*m, g, hyper.one_minus_beta1);
        *p = nesterov(hyper, g, *m);
    }
};

// NorMuon keeps a v of one number for each row of the orthogonal factor; matrix/ computes it.
struct NorMuon : Muon {
    static constexpr bool BY_ROWS = true;
    static constexpr MatrixRule MATRIX = MATRIX_NORMUON;
};

// The second step of every rule that reads matrices. It is not in the table of rules.
struct MatrixApply : RuleDefaults {
    static OPTIM_INLINE void update(const Hyper& hyper, float g, float* p, float*, float*, float*) {
        const float keep = exact_mul(g, *p) < 0.0f ? hyper.keep_away : hyper.keep;
        *p = exact_fma(-hyper.lr, g, exact_mul(keep, *p));
    }
};
