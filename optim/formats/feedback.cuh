// Weights that are updated in place and whose rounding error is fed back into m, as ECO does (arXiv 2601.22101). This
// takes no memory:
//     w = store(x), by stochastic rounding
//     m = m + feedback (w - x) (sqrt(v) root2 + eps),   feedback = (1 - beta1) / (beta1 step_size)
// The error that m holds comes back over the next steps, times step_size / (sqrt(v) root2 + eps) and beta1, beta1^2, ..
// whose sum is beta1 / (1 - beta1): exactly what was rounded off, were learning rate and v constant. So errors do not
// add up like a random walk, as those of stochastic rounding alone do; within 1 / (1 - beta1) steps each is made good.
// In a warm-up from 0, where later steps are larger, step_size counts (1 + 1 / (1 - beta1) / step) times, and it counts
// as no less than a hundredth of the largest learning rate. For rules whose update is m over the root of v. kernel.cuh
// does it, once the weights are stored.
#pragma once
#include "storage.cuh"

EMBED_SOURCE

template <class Storage>
struct Feedback : Storage {
    static constexpr bool FEEDS_BACK = true, feeds_back = true;
};
