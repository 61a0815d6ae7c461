// A rule of one's own, to copy and change: AdamW with Nesterov's momentum (Dozat 2016, NAdam, with a constant beta1).
// The weight moves by where m will be if the gradient stays as it is:
//     m = m + (1 - beta1) * (g - m)
//     v = v + (1 - beta2) * (g * g - v)
//     ahead = m + (1 - beta1) * (g - m)
//     p = p * (1 - lr * wd) - lr / (1 - beta1^step) * ahead / (sqrt(v) / sqrt(1 - beta2^step) + eps)
// The comment in optim/rules/hyper.cuh says what each member is. Sums of products only by exact_fma, average and
// average_square, so that the bits are the same everywhere.
#pragma once
#include "../../optim/rules/hyper.cuh"

EMBED_SOURCE

struct MyRule : RuleDefaults {
    static constexpr bool KEEPS_V = true, KEEPS_SLOW = false, DIVIDES_BY_ROOT_V = true, DECOUPLED = true;

    // The averages; returns what is divided by the root of v.
    static OPTIM_INLINE float moments(const Hyper& hyper, float g, float*, float* m, float* v, float*) {
        *m = average(*m, g, hyper.one_minus_beta1);
        *v = average_square(*v, g, hyper.one_minus_beta2);
        return average(*m, g, hyper.one_minus_beta1);
    }

    static OPTIM_INLINE void weight(const Hyper& hyper, float* p, float quotient) {
        *p = exact_fma(-hyper.step_size, quotient, exact_mul(hyper.keep, *p));
    }
};
