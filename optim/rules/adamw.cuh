// AdamW (Loshchilov and Hutter), with PyTorch's placement of eps and of the decay:
//     p = p * (1 - lr * wd)                        tensors with decay
//     m = beta1 * m + (1 - beta1) * g
//     v = beta2 * v + (1 - beta2) * g * g
//     p = p - lr / bias1 * m / (sqrt(v) / sqrt(bias2) + eps),   bias = 1 - beta^step
// The bias corrections are folded into step_size and root2, which leaves one division and one square root an element;
// every sum of a product is one fused operation.
#pragma once
#include "hyper.cuh"

EMBED_SOURCE

struct AdamW {
    static OPTIM_INLINE void update(const Hyper& hyper, float g, float* p, float* m, float* v) {
        *m = exact_fma(hyper.beta1, *m, exact_mul(hyper.rest1, g));
        *v = exact_fma(hyper.beta2, *v, exact_mul(exact_mul(hyper.rest2, g), g));
        float denominator = exact_fma(exact_sqrt(*v), hyper.root2, hyper.eps);
        *p = exact_fma(-hyper.step_size, exact_div(*m, denominator), exact_mul(hyper.keep, *p));
    }
};
