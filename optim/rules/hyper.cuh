// What a rule is and what it is given besides the element.
//
// A rule is a struct with KEEPS_V and KEEPS_SLOW, which say what it stores beside m (what it does not keep costs no
// memory; the slow average is stored in m's format), DECOUPLED, which says whether it decays by `keep` (else through
// the gradient, by `decay`), ADAPTIVE, which says whether it divides by the root of v (it then has the two functions
// that EachElement names), and else one function of one element:
//     update(hyper, g, &p, &m, &v, &slow)      new values in place; states that are not kept are 0 and may be written
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
    float beta3, rest3;  // of the slow average at this step
    float alpha;         // its weight at this step, times 1 - beta1^step
};

// Applies a rule's functions to n elements. A rule is one function, update, or, when it divides by the root of v,
//     moments(hyper, g, &p, &m, &v, &slow)   the averages; returns the numerator
//     weight(hyper, &p, quotient)            quotient = numerator / (sqrt(v) * root2 + eps)
// between which all elements' roots and quotients are taken together, so that a GPU tests only once whether any of them
// is outside of the window in which no branches are needed; the results are the same. `root` receives the roots of v.
template <class Rule>
struct EachElement {
    static constexpr bool keeps_slow = Rule::KEEPS_SLOW, adaptive = Rule::ADAPTIVE;

    static OPTIM_INLINE void update(const Hyper& hyper, float* p, const float* g, float* m, float* v, float* slow,
                                    float* root, int n) {
        if constexpr (!Rule::ADAPTIVE) {
            OPTIM_UNROLL
            for (int i = 0; i < n; i++) Rule::update(hyper, g[i], &p[i], &m[i], &v[i], &slow[i]);
        } else {
#ifdef __CUDA_ARCH__
            float quotient[16];
            uint32_t far_root = 0, far_numerator = 0;
#pragma unroll
            for (int i = 0; i < n; i++) {
                quotient[i] = Rule::moments(hyper, g[i], &p[i], &m[i], &v[i], &slow[i]);
                far_sqrt(&far_root, v[i]);
                far_div(&far_numerator, quotient[i]);
                root[i] = fast_sqrt(v[i]);
            }
            // With v from 2^-101 to 2^40 this keeps the denominator from 2^-51 to 2^31.
            bool near = hyper.eps <= 1.0f && hyper.root2 <= 2000.0f;
            if (far_root <= FAR_SQRT && far_numerator <= FAR_DIV && near) {
#pragma unroll
                for (int i = 0; i < n; i++) {
                    quotient[i] = fast_div(quotient[i], exact_fma(root[i], hyper.root2, hyper.eps));
                }
            } else {
#pragma unroll
                for (int i = 0; i < n; i++) {
                    root[i] = exact_sqrt(v[i]);
                    quotient[i] = exact_div(quotient[i], exact_fma(root[i], hyper.root2, hyper.eps));
                }
            }
#pragma unroll
            for (int i = 0; i < n; i++) Rule::weight(hyper, &p[i], quotient[i]);
#else
            for (int i = 0; i < n; i++) {
                float numerator = Rule::moments(hyper, g[i], &p[i], &m[i], &v[i], &slow[i]);
                root[i] = exact_sqrt(v[i]);
                Rule::weight(hyper, &p[i], exact_div(numerator, exact_fma(root[i], hyper.root2, hyper.eps)));
            }
#endif
        }
    }
};
