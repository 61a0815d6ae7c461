// Rules, and the constants that they receive besides the element.
//
// A rule is a struct that derives from RuleDefaults, with one or two functions of one element and, where they differ
// from the defaults, constants:
//     KEEPS_V, KEEPS_SLOW    what it stores beside m (the slow average has m's format); other states cost no memory
//     DECOUPLED              it decays by `keep`; otherwise through the gradient, by `decay`
//     ADAPTIVE               it divides by the root of v, and has the two functions that EachElement names; otherwise
//         update(hyper, g, &p, &m, &v, &slow)      sets new values in place; states that are not kept are 0
//     BY_ROWS                true: v is a number of the element's row or row and column, which is made before the step;
//                            then KEEPS_V is false. ROWS says how rows.cuh makes it
// average(a, x, rest) moves an average towards x by `rest` = 1 - beta, as PyTorch's lerp does.
// A gradient of 0 on an element that is 0, with states 0, must leave all of them 0: padding is updated like the rest.
//
// Hyper: constants of this step, the same for all elements of a group (tensors with the same decay and learning-rate
// scale). The host computes them in double and rounds once (constants.h); a rule uses the ones it needs.
#pragma once
#include "../float.cuh"

EMBED_SOURCE

struct Hyper {
    float lr;            // the step's learning rate
    float keep;          // 1 - lr * weight decay, or 1 - weight decay * lr / largest lr; 1 without decay
    float decay;         // weight decay, for rules that add it to the gradient; 0 without
    float step_size;     // lr / (1 - beta1^step)
    float beta1, rest1;  // rest = 1 - beta
    float beta2, rest2;
    float root2;  // 1 / sqrt(1 - beta2^step)
    float eps;
    float beta3, rest3;  // for the slow average at this step
    float alpha;         // its weight at this step, times 1 - beta1^step
    float look;          // of the direction: beta1, or 1 with --nesterov off
    float feedback;      // factor of the weights' rounding error on its way into m (formats/feedback.cuh)
};

// A rule may do this with whole matrices (matrix/matrix.h); MATRIX_NONE: nothing.
enum MatrixRule {
    MATRIX_NONE,
    MATRIX_MUON,
    MATRIX_NORMUON,
    MATRIX_GALORE,  // this and those that follow keep moments of a projected gradient (matrix/low_rank.h)
    MATRIX_FIRA,
    MATRIX_APOLLO,
    MATRIX_APOLLO_MINI
};

// A rule may sum over rows and columns as one of these (rows.cuh) needs it; ROWS_NONE: no sums.
enum RowRule { ROWS_NONE, ROWS_ADAM_MINI, ROWS_RMNP, ROWS_NORMUON_LITE, ROWS_ADAFACTOR, ROWS_CAME };

// The optional members of a rule.
struct RuleDefaults {
    static constexpr bool KEEPS_V = false, KEEPS_SLOW = false, ADAPTIVE = false, DECOUPLED = true, BY_ROWS = false;
    static constexpr RowRule ROWS = ROWS_NONE;
    static constexpr bool PAIRS = false;         // v has a second number, which `update` finds in `slow`
    static constexpr bool SCALED = false;        // each tensor's update has a factor
    static constexpr bool HAS_MOMENTUM = false;  // m decays by --momentum; vectors and embeddings then have adamw
    static constexpr MatrixRule MATRIX = MATRIX_NONE;
    // The factor with which m may take gradients before the step (fold.cuh); 0: the step needs more of them than m has.
    static OPTIM_INLINE float fold(const Hyper&) { return 0.0f; }
};

// The factor of a step that makes beta m + rest g of m.
OPTIM_INLINE float fold_factor(float rest, float beta) {
    return beta > 0.0f ? rest / beta : 0.0f;
}

// a + rest (x - a), and a + rest (x^2 - a).
OPTIM_INLINE float average(float a, float x, float rest) {
    return exact_fma(rest, exact_add(x, -a), a);
}

OPTIM_INLINE float average_square(float a, float x, float rest) {
    return exact_fma(rest, exact_fma(x, x, -a), a);
}

// The direction of Nesterov's momentum, g + look (m - g), m the new average. With look 1 it is m, but for a rounding to
// 2^-24 of the larger of m and g.
OPTIM_INLINE float nesterov(const Hyper& hyper, float g, float m) {
    return average(g, m, hyper.look);
}

// The factor with which m takes gradients before such a step.
OPTIM_INLINE float nesterov_fold(const Hyper& hyper) {
    return hyper.look == 1.0f ? fold_factor(hyper.rest1, hyper.beta1) : 0.0f;
}

// A rule whose update has a factor for each tensor, and its constants.
template <class Rule>
struct Scaled : Rule {
    static constexpr bool SCALED = true;
};

OPTIM_INLINE Hyper hyper_scaled(Hyper hyper, float factor) {
    hyper.lr = exact_mul(hyper.lr, factor);
    hyper.step_size = exact_mul(hyper.step_size, factor);
    return hyper;
}

// Applies a rule's functions to n elements. A rule is one function, update, or, when it divides by the root of v,
//     moments(hyper, g, &p, &m, &v, &slow)   the averages; returns the numerator
//     weight(hyper, &p, quotient)            quotient = numerator * (1 / (sqrt(v) * root2 + eps))
// The reciprocal is rounded by itself, which costs half of a division and changes a weight by less than its last bit.
// eps at most 1 and roots from 2^-50 to 2^64 keep the denominator where exact_reciprocal wants it. `root` receives the
// roots of v.
template <class Rule>
struct EachElement {
    static constexpr bool keeps_slow = Rule::KEEPS_SLOW, adaptive = Rule::ADAPTIVE, pairs = Rule::PAIRS;

    static OPTIM_INLINE void update(const Hyper& hyper, float* p, const float* g, float* m, float* v, float* slow,
                                    float* root, int n) {
        OPTIM_UNROLL
        for (int i = 0; i < n; i++) {
            if constexpr (Rule::ADAPTIVE) {
                float numerator = Rule::moments(hyper, g[i], &p[i], &m[i], &v[i], &slow[i]);
                root[i] = moment_root(v[i]);
                float reciprocal = exact_reciprocal(exact_fma(root[i], hyper.root2, hyper.eps));
                Rule::weight(hyper, &p[i], exact_mul(numerator, reciprocal));
            } else {
                Rule::update(hyper, g[i], &p[i], &m[i], &v[i], &slow[i]);
            }
        }
    }
};
