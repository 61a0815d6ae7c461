// Adam-mini (Zhang et al., arXiv 2406.16793): AdamW with one v for each block of a tensor, the mean of the squares:
//     m = m + (1 - beta1) * (g - m)
//     v = v + (1 - beta2) * (mean of g * g over the block - v)
//     p = p * (1 - lr * wd) - lr / bias1 * m / (sqrt(v) / sqrt(bias2) + eps),   bias = 1 - beta^step
// A block is a row of a matrix: all weights of one output of a linear layer, and one token or position of an embedding.
// A vector (a bias, or the weights of a layer norm) is one block. In the paper all rows of a head of Q and K are one
// block; here each of these rows has its own v, which is finer. v is always fp32: 4 bytes a row. rows.cuh computes it
// before the step, so `moments` gets the new v.
#pragma once
#include "adamw.cuh"

EMBED_SOURCE

struct AdamMini : AdamW {
    static constexpr bool KEEPS_V = false, BY_ROWS = true;
    static constexpr RowRule ROWS = ROWS_ADAM_MINI;

    static OPTIM_INLINE float moments(const Hyper& hyper, float g, float*, float* m, float*, float*) {
        *m = average(*m, g, hyper.one_minus_beta1);
        return *m;
    }
};
