// Whole-model tests of --release on with several micro-batches: a part of test_gpt2.cu, which includes it after
// skips.h, where its helpers are known. The reference is sgd in plain C, to the bit.
#pragma once
#include "../../optim/jit.h"

constexpr int FOLDED = 3;  // micro-batches of a step
constexpr float FOLDED_LR = 0.05f, FOLDED_BETA = 0.9f, FOLDED_DECAY = 0.1f;

static OptimConfig folded_optim(bool grads_bf16, bool offload) {
    OptimConfig config = {
        "adamw32", "sgd",        "fp32", grads_bf16 ? "bf16" : "fp32", "fp32", "none", FOLDED_BETA, 0.95f,
        1e-8f,     FOLDED_DECAY, 7};
    if (!optim_resolve(&config, error)) user_error("%s", error);
    config.keeps_copy = false, config.offload = offload;
    return config;
}

// Does forward and backward for micro-batch `micro` of a step.
static void feed_folded(const Model* m, int step, int micro, bool first, float share = 1.0f / FOLDED) {
    feed_random(m, 360 + FOLDED * step + micro, first, share);
}

static bool takes_turns(const Arena* a, int t) {
    return a->part[t] < a->layers && a->tensors[t].rows > 1;
}

// The reference takes a step, or with `micro` only the first micro-batches' part of it. The model gives gradients, all
// of each micro-batch, and the sums of those that take no turns. `p` and `m` are weights and momentum. Returns the
// loss.
static float reference_step(Model* model, int step, float* p, float* m, int micro = FOLDED) {
    Arena* a = &model->arena;
    for (int i = 0; i < FOLDED; i++) feed_folded(model, step, i, i == 0);
    Floats sum = gradients(model);
    const float loss = scalar(model, SCALAR_LOSS);
    for (int i = 0; i < micro; i++) {
        feed_folded(model, step, i, true);
        const Floats g = gradients(model);
        for (int t = 0; t < a->count; t++) {
            const int64_t begin = a->tensors[t].offset, end = begin + a->tensors[t].rows * a->tensors[t].cols;
            for (int64_t e = begin; takes_turns(a, t) && e < end; e++) {
                if (i < FOLDED - 1) m[e] = fmaf(1.0f / FOLDED_BETA, g[e], m[e]);
                sum[e] = g[e];
            }
        }
    }
    for (int t = 0; t < a->count && micro == FOLDED; t++) {
        const int64_t begin = a->tensors[t].offset, end = begin + a->tensors[t].rows * a->tensors[t].cols;
        for (int64_t e = begin; e < end; e++) {
            m[e] = fmaf(FOLDED_BETA, m[e], fmaf(a->tensors[t].decay ? FOLDED_DECAY : 0.0f, p[e], sum[e]));
            p[e] = fmaf(-FOLDED_LR, m[e], p[e]);
        }
        arena_set(a, t, p + begin);
    }
    optim_decode(a->optim);
    return loss;
}

// The released model takes a step, of which micro-batch `bad` is not finite.
static void folded_step(Model* model, int step, int number, int bad = -1) {
    arena_begin(&model->arena, model->scalars, 0, FOLDED_LR, number);
    for (int i = 0; i < FOLDED; i++) {
        arena_micro_batch(&model->arena, i, FOLDED);
        feed_folded(model, step, i, i == 0, i == bad ? NAN : 1.0f / FOLDED);
    }
    arena_step(&model->arena, model->scalars, model->activations);
    arena_settle(&model->arena);
    device_sync(model->dev);
}

static void expect_folded(Test* test, const Model* model, const float* p, const float* m, const char* when) {
    const Arena* a = &model->arena;
    Floats weights = weights_of(model), momentum(a->elements);
    copy_to_host(model->dev, momentum.data(), optim_stream_named(a->optim, "m").data, a->elements * 4);
    for (int t = 0; t < a->count; t++) {
        const int64_t at = a->tensors[t].offset, bytes = a->tensors[t].rows * a->tensors[t].cols * 4;
        expect(memcmp(&weights[at], p + at, bytes) == 0, "%s: weights of %s", when, a->tensors[t].name);
        expect(memcmp(&momentum[at], m + at, bytes) == 0, "%s: m of %s", when, a->tensors[t].name);
    }
}

static void check_folded(Test* test, const Device* dev, const Setup* setup, bool offload) {
    TestModel reference, released;
    for (TestModel* each : {&reference, &released}) {
        OptimConfig config = folded_optim(setup->grads_bf16, offload && each == &released);
        model_shape(each, dev, setup);
        each->arena.elements = optim_layout(each->arena.tensors, each->arena.count, &config);
        if (each == &released) arena_release(&each->arena, &config, true);
        model_allocate(each, &config);
        model_init(each, 5);
    }
    const int64_t kept = arena_grads_bytes(&released.arena), all = arena_grads_bytes(&reference.arena);
    expect(kept < all || setup->config.L == 1, "released gradients take %lld of %lld bytes", (long long)kept,
           (long long)all);
    Floats weights = weights_of(&reference), momentum(reference.arena.elements);
    float *p = weights.data(), *m = momentum.data();
    for (int step = 1; step <= 2; step++) {
        const float loss = reference_step(&reference, step, p, m);
        folded_step(&released, step, step);
        expect(scalar(&released, SCALAR_LEFT) == 0 && scalar(&released, SCALAR_FACTOR) == 1, "parts were left alone");
        expect(scalar(&released, SCALAR_LOSS) == loss, "loss %.9g, want %.9g", scalar(&released, SCALAR_LOSS), loss);
        expect_folded(test, &released, p, m, "a step");
    }
    // m keeps what came before a micro-batch that is not finite; all else is as it was.
    reference_step(&reference, 3, p, m, 1);
    folded_step(&released, 3, 3, 1);
    expect(isnan(scalar(&released, SCALAR_FACTOR)), "a step was taken");
    expect_folded(test, &released, p, m, "a micro-batch that is not finite");
    reference_step(&reference, 4, p, m);
    folded_step(&released, 4, 3);
    expect_folded(test, &released, p, m, "the step after it");
}

JIT_BOTH(model_folds) {
    const Device device = test_device(gpu), *dev = &device;
    const OptimType type = gpu ? OPTIM_BF16 : OPTIM_FP32;
    for (bool grads_bf16 : {false, true}) {
        if (grads_bf16 && !gpu) continue;
        for (int layers : {1, 4}) {
            const Setup setup = {
                {layers, 128, 2, 64, 128, 128}, 2, 64, type, grads_bf16, RECOMPUTE_NONE, 48, "fp32", "fp32", "none"};
            for (bool offload : {false, true}) check_folded(test, dev, &setup, offload);
        }
    }
}
