// The tests of rules by tensor and of rules that read rows share this: a small model, and runs of it.
#pragma once
#include "steps.h"

// Rows that begin anywhere in a run of 8 elements, more than one slab and panel of rows.cuh, and vectors.
constexpr int TENSORS = 5, MODEL_MAX = 140 * 520;
inline const OptimTensor model[TENSORS] = {{"wte.weight", 37, 129, true, 0},
                                           {"h.0.ln_1.weight", 1, 300, false, 0},
                                           {"h.0.mlp.c_fc.weight", 129, 37, true, 0},
                                           {"h.0.mlp.c_proj.weight", 140, 520, true, 0},
                                           {"ln_f.weight", 1, 2500, false, 0}};
