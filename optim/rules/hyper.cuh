// What a rule is given besides the element: constants of this step, the same for all elements of a group (tensors with
// the same weight decay). The host computes them in double and rounds once; a rule uses the ones it needs.
#pragma once
#include "../float.cuh"

EMBED_SOURCE

struct Hyper {
    float keep;          // 1 - lr * weight decay, or 1
    float step_size;     // lr / (1 - beta1^step)
    float beta1, rest1;  // rest = 1 - beta
    float beta2, rest2;
    float root2;  // 1 / sqrt(1 - beta2^step)
    float eps;
};

// Applies a rule's one-element function to n elements.
template <class Rule>
struct EachElement {
    static OPTIM_INLINE void update(const Hyper& hyper, float* p, const float* g, float* m, float* v, int n) {
        OPTIM_UNROLL
        for (int i = 0; i < n; i++) Rule::update(hyper, g[i], &p[i], &m[i], &v[i]);
    }
};
