// Lion (Chen et al., arXiv 2302.06675): the sign of an average, so every weight moves by lr, and no second moment.
//     c = beta1 * m + (1 - beta1) * g
//     p = p * (1 - lr * wd) - lr * sign(c)         sign(0) = 0, and of NaN 0
//     m = beta2 * m + (1 - beta2) * g
// beta1 weighs the average in this step, beta2 in the new m (the paper: 0.9 and 0.99, for language models 0.95 and
// 0.98). lr should be 3 to 10 times below AdamW's, and the weight decay as many times above.
#pragma once
#include "hyper.cuh"

EMBED_SOURCE

struct Lion : RuleDefaults {
    // With equal betas, sign(c) is the sign of the new m.

    static OPTIM_INLINE void update(const Hyper& hyper, float g, float* p, float* m, float*, float*) {
        float c = average(*m, g, hyper.one_minus_beta1);
        float sign = c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : 0.0f;
        *p = exact_fma(-hyper.lr, sign, exact_mul(hyper.keep, *p));
        *m = average(*m, g, hyper.one_minus_beta2);
    }
};
