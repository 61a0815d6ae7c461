// The tests that take a model a part at a time share this one: three layers, then the embeddings and the last norm.
#pragma once
#include "../../optim/model/model.h"
#include "steps.h"

constexpr int LAYERS = 3, COUNT = 2 + 2 * LAYERS + 1;
static const OptimTensor model[COUNT] = {
    {"wte.weight", 129, 40, true, 0},      {"wpe.weight", 70, 40, true, 0},
    {"h.0.ln_1.weight", 1, 300, false, 0}, {"h.0.mlp.c_fc.weight", 81, 137, true, 0},
    {"h.1.ln_1.weight", 1, 300, false, 0}, {"h.1.mlp.c_fc.weight", 81, 137, true, 0},
    {"h.2.ln_1.weight", 1, 300, false, 0}, {"h.2.mlp.c_fc.weight", 81, 137, true, 0},
    {"ln_f.weight", 1, 2500, false, 0}};
static int part[COUNT] = {3, 3, 0, 0, 1, 1, 2, 2, 4};

// Returns a model of one rank whose optimizer is that of a run.
static Arena arena_of(OptimRun* run) {
    Arena a = {};
    a.dev = &run->dev, a.tensors = run->tensor, a.part = part, a.count = COUNT, a.layers = LAYERS;
    a.type = run->compute, a.elements = run->elements, a.optim = run->optim;
    return a;
}
