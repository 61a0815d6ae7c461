// Adds the gradient of a micro-batch to m before the step, so that no memory has to hold the sum of the gradients. It
// is not in the table of rules:
//     m = m + c * g
// A rule whose step sets m = beta * m + rest * g, and which reads g nowhere else, needs c = rest / beta. The step of
// the last micro-batch multiplies m by beta, so each gradient counts as if the step had got the sum of all. m is
// rounded once for each micro-batch. Rules that read matrices step after the backward pass, without a gradient, so the
// gradient of their last micro-batch is added to m, too. Bytes: g is read, m is read and written.
#pragma once
#include "hyper.cuh"

EMBED_SOURCE

struct Fold : RuleDefaults {
    // hyper.lr holds c.
    static OPTIM_INLINE void update(const Hyper& hyper, float g, float*, float* m, float*, float*) {
        *m = exact_fma(hyper.lr, g, *m);
    }
};
