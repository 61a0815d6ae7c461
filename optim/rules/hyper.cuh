// Rules, and the constants that they get besides the element.
//
// A rule is a struct that derives from RuleDefaults, with one or two functions of one element and, where they differ
// from the defaults, constants:
//     KEEPS_V, KEEPS_SLOW    the states that it keeps besides m (the slow average has m's format)
//     DECOUPLED              it decays by `keep`; otherwise through the gradient, by `decay`
//     DIVIDES_BY_ROOT_V      it divides by the root of v, and has the two functions that EachElement names; otherwise
//         update(hyper, g, &p, &m, &v, &slow)      sets new values in place; states that are not kept are 0
//     BY_ROWS                v is a number of the element's row, or of its row and column, computed before the step;
//                            KEEPS_V is then false. ROWS says how rows.cuh computes it
// average(a, x, weight) moves an average towards x by `weight` = 1 - beta, as PyTorch's lerp does.
// If an element, its states and its gradient are 0, a step must leave them 0, since padding is updated like the rest.
//
// Hyper holds the constants of a step, which are the same for all elements of a group (tensors with the same decay and
// learning-rate scale). The host computes them in double and rounds once (constants.h); a rule uses those that it
// needs.
#pragma once
#include "../../data/rule_options.h"  // of which NVRTC gets the fields in HYPER_OPTIONS (jit.cu)
#include "../float.cuh"

EMBED_SOURCE

#define HYPER_FIELD(KIND, FIELD, ...) float FIELD;

struct Hyper {
    float lr;         // the step's learning rate
    float keep;       // 1 - lr * weight decay, say, by the decay mode; 1 without decay
    float keep_away;  // that of weights that an update moves away from 0: 1 if the decay is cautious
    float decay;      // weight decay, for rules that add it to the gradient; 0 without
    float step_size;  // lr / (1 - beta1^step)
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float root2;                   // 1 / sqrt(1 - beta2^step)
    HYPER_OPTIONS(HYPER_FIELD)     // eps, and what other options a rule reads as they are
    float beta3, one_minus_beta3;  // for the slow average at this step
    float alpha;                   // its weight at this step, times 1 - beta1^step
    float nesterov_beta;           // of nesterov(): beta1, or 1 with --nesterov off
    float feedback;                // factor of the weights' rounding error in m (formats/feedback.cuh)
};

// The product that a rule takes of whole matrices (matrix/matrix.h). A rule with MATRIX_NONE reads none.
enum MatrixRule {
    MATRIX_NONE,
    MATRIX_MUON,
    MATRIX_NORMUON,
    MATRIX_GALORE,  // this and the following ones keep moments of a projected gradient (matrix/low_rank.h)
    MATRIX_FIRA,
    MATRIX_APOLLO,
    MATRIX_APOLLO_MINI,
    MATRIX_APOLLO_FACTORED
};

// The sums over rows and columns that a rule needs (rows.cuh); ROWS_NONE: none.
enum RowRule {
    ROWS_NONE,
    ROWS_ADAM_MINI,
    ROWS_RMNP,
    ROWS_NORMUON_LITE,
    ROWS_ADAFACTOR,
    ROWS_CAME,
    ROWS_ADAFACTOR8,  // this and the next one are the package adafactor8bit's (adafactor8bit.cuh)
    ROWS_CAME8
};

OPTIM_INLINE constexpr bool is_package(RowRule rule) {
    return rule >= ROWS_ADAFACTOR8;
}

// The optional members of a rule.
struct RuleDefaults {
    static constexpr bool KEEPS_V = false, KEEPS_SLOW = false, DIVIDES_BY_ROOT_V = false, DECOUPLED = true,
                          BY_ROWS = false;
    static constexpr RowRule ROWS = ROWS_NONE;
    static constexpr bool PAIRS = false;         // v has a second number, which `update` gets as `slow`
    static constexpr bool SCALED = false;        // each tensor's update has a factor
    static constexpr bool HAS_MOMENTUM = false;  // m decays by --momentum; vectors and embeddings then get adamw
    static constexpr bool GROWS = false;  // m starts at 0, and the update with it, since nothing corrects its bias
    static constexpr MatrixRule MATRIX = MATRIX_NONE;
};

// Return a + weight (x - a), and a + weight (x^2 - a).
OPTIM_INLINE float average(float a, float x, float weight) {
    return exact_fma(weight, exact_add(x, -a), a);
}

OPTIM_INLINE float average_square(float a, float x, float weight) {
    return exact_fma(weight, exact_fma(x, x, -a), a);
}

// Returns the direction of Nesterov's momentum, g + nesterov_beta (m - g), for the new average m. With nesterov_beta 1
// it is m, except for a rounding to 2^-24 of the larger of m and g.
OPTIM_INLINE float nesterov(const Hyper& hyper, float g, float m) {
    return average(g, m, hyper.nesterov_beta);
}

// A rule whose update has a factor for each tensor. hyper_scaled returns its constants.
template <class Rule>
struct Scaled : Rule {
    static constexpr bool SCALED = true;
};

OPTIM_INLINE Hyper hyper_scaled(Hyper hyper, float factor) {
    hyper.lr = exact_mul(hyper.lr, factor);
    hyper.step_size = exact_mul(hyper.step_size, factor);
    return hyper;
}

// Applies a rule's functions to n elements. A rule has one function, update, or, if it divides by the root of v,
//     moments(hyper, g, &p, &m, &v, &slow)   the averages; returns the numerator
//     weight(hyper, &p, quotient)            quotient = numerator * (1 / (sqrt(v) * root2 + eps))
// The reciprocal is rounded by itself, which costs half of a division and changes a weight by less than its last bit.
// Since eps is at most 1 and roots lie between 2^-50 and 2^64, the denominator is in the range of exact_reciprocal.
// `root` receives the roots of v.
template <class Rule>
struct EachElement {
    static constexpr bool keeps_slow = Rule::KEEPS_SLOW, keeps_roots = Rule::DIVIDES_BY_ROOT_V, pairs = Rule::PAIRS,
                          decoupled = Rule::DECOUPLED;
    static constexpr RowRule rows = Rule::ROWS;

    static OPTIM_INLINE void update(const Hyper& hyper, float* p, const float* g, float* m, float* v, float* slow,
                                    float* root, int n) {
        OPTIM_VECTORS
        for (int i = 0; i < n; i++) {
            if constexpr (Rule::DIVIDES_BY_ROOT_V) {
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
