// AdEMAMix (Pagliardini, Ablin and Grangier, arXiv 2409.03137): AdamW with a second, slow average of the gradient,
// which remembers tens of thousands of steps and gets no bias correction:
//     p = p * (1 - lr * wd)                        tensors with decay
//     m = m + (1 - beta1) * (g - m)
//     slow = slow + (1 - beta3) * (g - slow)
//     v = v + (1 - beta2) * (g * g - v)
//     p = p - lr * (m / bias1 + alpha * slow) / (sqrt(v) / sqrt(bias2) + eps),   bias = 1 - beta^step
// alpha rises from 0 and beta3 from beta1 to their values over the first --ramp steps (the paper's schedulers, in
// constants.h: alpha linearly, the half-life of beta3 about linearly); without them training diverges early.
// hyper.alpha includes the factor bias1, so that step_size = lr / bias1 multiplies the whole sum. The slow average is
// stored in m's format. It changes by 1e-4 of its difference to the gradient a step, which a format needs :sr or fp32
// to keep.
#pragma once
#include "adamw.cuh"

EMBED_SOURCE

struct AdEMAMix : AdamW {
    static constexpr bool KEEPS_SLOW = true;

    static OPTIM_INLINE float moments(const Hyper& hyper, float g, float*, float* m, float* v, float* slow) {
        *m = average(*m, g, hyper.one_minus_beta1);
        *slow = average(*slow, g, hyper.one_minus_beta3);
        *v = average_square(*v, g, hyper.one_minus_beta2);
        return exact_fma(hyper.alpha, *slow, *m);
    }
};
