// The parts of GaLore, Fira and APOLLO that read single elements; matrix/low_rank.h has the rest. The step before the
// products is Adam's on a projected gradient g. It writes Adam's direction N, without a learning rate, in place of the
// weight:
//     m = m + (1 - beta1) * (g - m);   v = v + (1 - beta2) * (g * g - v)
//     N = m / bias1 / (sqrt(v) / sqrt(bias2) + eps),   bias = 1 - beta^step
// The step after the products is MatrixApply (muon.cuh).
#pragma once
#include "adamw.cuh"

EMBED_SOURCE

template <MatrixRule RULE>
struct LowRank : AdamW {
    static constexpr MatrixRule MATRIX = RULE;

    // step_size is for a learning rate of 1.
    static OPTIM_INLINE void weight(const Hyper& hyper, float* p, float quotient) {
        *p = exact_mul(hyper.step_size, quotient);
    }
};

// matrix/low_rank.cu keeps v as numbers of rows and columns, and the rule divides by their root.
struct ApolloFactored : RuleDefaults {
    static constexpr MatrixRule MATRIX = MATRIX_APOLLO_FACTORED;

    static OPTIM_INLINE void update(const Hyper& hyper, float g, float* p, float* m, float*, float*) {
        *p = *m = average(*m, g, hyper.one_minus_beta1);
    }
};
