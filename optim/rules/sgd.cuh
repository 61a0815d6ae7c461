// Gradient descent with momentum, as torch.optim.SGD does it without dampening; beta1 is the momentum:
//     g = g + wd * p                               sgd, sgd-nesterov; tensors with decay
//     p = p * (1 - lr * wd)                        sgdw, sgdw-nesterov
//     m = beta1 * m + g                            a sum, not an average
//     p = p - lr * m                               with Nesterov's momentum lr * (beta1 * m + g)
// The size of a step follows that of the gradients, so lr is unrelated to AdamW's. Dampening d is a rate of (1 - d) lr.
#pragma once
#include "hyper.cuh"

EMBED_SOURCE

template <bool COUPLED, bool NESTEROV>
struct SgdOf : RuleDefaults {
    static constexpr bool DECOUPLED = !COUPLED, GROWS = true;

    static OPTIM_INLINE void update(const Hyper& hyper, float g, float* p, float* m, float*, float*) {
        if (COUPLED) g = exact_fma(hyper.decay, *p, g);
        *m = exact_fma(hyper.beta1, *m, g);
        const float direction = NESTEROV ? exact_fma(hyper.beta1, *m, g) : *m;
        *p = exact_fma(-hyper.lr, direction, COUPLED ? *p : exact_mul(hyper.keep, *p));
    }
};
typedef SgdOf<true, false> Sgd;
typedef SgdOf<true, true> SgdNesterov;
typedef SgdOf<false, false> SgdW;
typedef SgdOf<false, true> SgdWNesterov;
