// Takes the gradient of a micro-batch that is not the last of its step into m, so that no memory has to hold the sum of
// the gradients. It is no row of the table of rules:
//     m = m + c * g
// A rule whose step is m = beta * m + rest * g, and which reads g nowhere else, needs c = rest / beta: the step of the
// last micro-batch multiplies m by beta, so that each gradient counts as if the step had been given their sum. m is
// rounded once for each micro-batch. Rules that read matrices step after the backward pass, without a gradient, so
// theirs go into m from the last micro-batch, too. Bytes: g is read, m is read and written.
#pragma once
#include "hyper.cuh"

EMBED_SOURCE

struct Fold : RuleDefaults {
    // c arrives as the learning rate.
    static OPTIM_INLINE void update(const Hyper& hyper, float g, float*, float* m, float*, float*) {
        *m = exact_fma(hyper.lr, g, *m);
    }
};
