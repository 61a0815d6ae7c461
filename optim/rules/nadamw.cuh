// NAdamW: AdamW with Nesterov's momentum (Dozat, ICLR workshop 2016), as AlgoPerf's baseline (arXiv 2306.07179) has it:
//     p = p * (1 - lr * wd)                        tensors with decay
//     m = m + (1 - beta1) * (g - m)
//     v = v + (1 - beta2) * (g * g - v)
//     p = p - lr / bias1 * (beta1 * m + (1 - beta1) * g) / (sqrt(v) / sqrt(bias2) + eps),   bias = 1 - beta^step
// The gradient counts twice, so a step follows a change of direction at once. torch.optim.NAdam corrects the two terms
// separately and lets beta1 grow, so it is another rule in the first hundreds of steps.
#pragma once
#include "adamw.cuh"

EMBED_SOURCE

struct NAdamW : AdamW {
    static OPTIM_INLINE float moments(const Hyper& hyper, float g, float* p, float* m, float* v, float* slow) {
        return nesterov(hyper, g, AdamW::moments(hyper, g, p, m, v, slow));
    }
};
