// Adam (Kingma and Ba) with the decay as an L2 penalty, as torch.optim.Adam places it:
//     g = g + wd * p                               tensors with decay
//     m = beta1 * m + (1 - beta1) * g
//     v = beta2 * v + (1 - beta2) * g * g
//     p = p - lr / bias1 * m / (sqrt(v) / sqrt(bias2) + eps),   bias = 1 - beta^step
// The penalty passes through m and v, so weights with large gradients decay less; AdamW exists to undo that.
#pragma once
#include "hyper.cuh"

EMBED_SOURCE

struct Adam {
    static constexpr bool KEEPS_V = true, KEEPS_SLOW = false, ADAPTIVE = true, DECOUPLED = false;

    static OPTIM_INLINE float moments(const Hyper& hyper, float g, float* p, float* m, float* v, float*) {
        g = exact_fma(hyper.decay, *p, g);
        *m = exact_fma(hyper.beta1, *m, exact_mul(hyper.rest1, g));
        *v = exact_fma(hyper.beta2, *v, exact_mul(exact_mul(hyper.rest2, g), g));
        return *m;
    }

    static OPTIM_INLINE void weight(const Hyper& hyper, float* p, float quotient) {
        *p = exact_fma(-hyper.step_size, quotient, *p);
    }
};
