// Gradient descent with momentum, as torch.optim.SGD does it without dampening; beta1 is the momentum:
//     g = g + wd * p                               tensors with decay
//     m = beta1 * m + g                            a sum, not an average
//     p = p - lr * m
// The size of a step follows that of the gradients, so lr is unrelated to AdamW's.
#pragma once
#include "hyper.cuh"

EMBED_SOURCE

struct Sgd : RuleDefaults {
    static constexpr bool DECOUPLED = false, GROWS = true;

    static OPTIM_INLINE void update(const Hyper& hyper, float g, float* p, float* m, float*, float*) {
        g = exact_fma(hyper.decay, *p, g);
        *m = exact_fma(hyper.beta1, *m, g);
        *p = exact_fma(-hyper.lr, *m, *p);
    }
};
