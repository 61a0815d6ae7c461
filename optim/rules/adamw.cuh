// AdamW (Loshchilov and Hutter), with PyTorch's placement of eps and of the decay:
//     p = p * (1 - lr * wd)                        tensors with decay
//     m = m + (1 - beta1) * (g - m)
//     v = v + (1 - beta2) * (g * g - v)
//     p = p - lr / bias1 * m / (sqrt(v) / sqrt(bias2) + eps),   bias = 1 - beta^step
// The bias corrections are folded into step_size and root2, which leaves one division and one square root an element.
// Each product that is added to something is one fused operation.
#pragma once
#include "hyper.cuh"

EMBED_SOURCE

struct AdamW : RuleDefaults {
    static constexpr bool KEEPS_V = true, DIVIDES_BY_ROOT_V = true;

    static OPTIM_INLINE float moments(const Hyper& hyper, float g, float*, float* m, float* v, float*) {
        *m = average(*m, g, hyper.one_minus_beta1);
        *v = average_square(*v, g, hyper.one_minus_beta2);
        return *m;
    }

    static OPTIM_INLINE void weight(const Hyper& hyper, float* p, float quotient) {
        *p = exact_fma(-hyper.step_size, quotient, exact_mul(hyper.keep, *p));
    }
};
