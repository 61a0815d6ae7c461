// Weights that are updated in place and whose rounding error is fed back into m, as ECO does (arXiv 2601.22101). This
// takes no memory:
//     w = store(x), by stochastic rounding
//     m = m + feedback (w - x) (sqrt(v) root2 + eps),   feedback = (1 - beta1) / (beta1 step_size)
// m gives the error back over the next steps, times step_size / (sqrt(v) root2 + eps) and beta1, beta1^2, .., whose sum
// is beta1 / (1 - beta1). If learning rate and v were constant, this would give back exactly the error. So errors do
// not add up like a random walk, as with stochastic rounding alone; most of each is given back within 1 / (1 - beta1)
// steps. step_size counts (1 + 1 / (1 - beta1) / step) times, because later steps of a warm-up from 0 are larger, and
// as at least a hundredth of the largest learning rate. This is for rules whose update is m over the root of v.
// kernel.cuh computes it once the weights are stored.
#pragma once
#include "storage.cuh"

EMBED_SOURCE

template <class Storage>
struct Feedback : Storage {
    static constexpr bool FEEDS_BACK = true, feeds_back = true;
};
