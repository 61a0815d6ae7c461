// Adam (Kingma and Ba) with the decay as an L2 penalty, as torch.optim.Adam places it:
//     g = g + wd * p                               tensors with decay
//     m = m + (1 - beta1) * (g - m)
//     v = v + (1 - beta2) * (g * g - v)
//     p = p - lr / bias1 * m / (sqrt(v) / sqrt(bias2) + eps),   bias = 1 - beta^step
// The penalty passes through m and v, so weights with large gradients decay less; AdamW avoids this.
#pragma once
#include "hyper.cuh"

EMBED_SOURCE

struct Adam : RuleDefaults {
    static constexpr bool KEEPS_V = true, DIVIDES_BY_ROOT_V = true, DECOUPLED = false;

    static OPTIM_INLINE float moments(const Hyper& hyper, float g, float* p, float* m, float* v, float*) {
        g = exact_fma(hyper.decay, *p, g);
        *m = average(*m, g, hyper.one_minus_beta1);
        *v = average_square(*v, g, hyper.one_minus_beta2);
        return *m;
    }

    static OPTIM_INLINE void weight(const Hyper& hyper, float* p, float quotient) {
        *p = exact_fma(-hyper.step_size, quotient, *p);
    }
};
