// Tests of optim/decoded.h and of optim_step_tensors: weights decoded a part at a time have the bits of a copy of the
// whole model, whatever the order in which parts are asked for, and the planned room is what is allocated; a step that
// is taken part by part, from gradients that lie elsewhere, has the bits of one over the whole arena.
#include "../../optim/decoded.h"
#include "rules.h"

constexpr int LAYERS = 3, COUNT = 2 + 2 * LAYERS + 1, STEPS = 2;
static const OptimTensor model[COUNT] = {
    {"wte.weight", 129, 40, true, 0},      {"wpe.weight", 70, 40, true, 0},
    {"h.0.ln_1.weight", 1, 300, false, 0}, {"h.0.mlp.c_fc.weight", 81, 37, true, 0},
    {"h.1.ln_1.weight", 1, 300, false, 0}, {"h.1.mlp.c_fc.weight", 81, 37, true, 0},
    {"h.2.ln_1.weight", 1, 300, false, 0}, {"h.2.mlp.c_fc.weight", 81, 37, true, 0},
    {"ln_f.weight", 1, 2500, false, 0}};
static const int part[COUNT] = {3, 3, 0, 0, 1, 1, 2, 2, 4};

struct Pair {
    Device dev;
    OptimConfig config[2];  // the second keeps no copy
    OptimTensor tensor[COUNT];
    int64_t elements;
    Optim* optim[2];
    OptimType compute;
};

// Both optimizers from the same start.
static void pair_open(Pair* pair, const OptimConfig* config, OptimType compute, bool gpu) {
    static float values[129 * 40];
    device_open(&pair->dev, gpu, 0);
    pair->compute = compute;
    memcpy(pair->tensor, model, sizeof(model));
    pair->elements = optim_layout(pair->tensor, COUNT, config);
    for (int k = 0; k < 2; k++) {
        pair->config[k] = *config;
        pair->config[k].keeps_copy = k == 0;
        pair->optim[k] = optim_create(&pair->dev, &pair->config[k], pair->tensor, COUNT, compute);
        for (int t = 0; t < COUNT; t++) {
            for (int64_t i = 0; i < model[t].rows * model[t].cols; i++) values[i] = start(t * 10000 + i);
            optim_set_weights(pair->optim[k], t, values);
        }
        optim_decode(pair->optim[k]);
    }
}

// The second optimizer's step, a part at a time from the last to the first. The gradients of every other part lie in
// memory of their own, in the arena's order, as those of a layer that is released do.
static void step_by_parts(Pair* pair, const float* grads, const float* scale, int step) {
    for (int number = LAYERS + 1; number >= 0; number--) {
        int tensor[COUNT], count = 0;
        const void* at[COUNT];
        for (int t = 0; t < COUNT; t++) {
            int i = count;
            if (part[t] != number) continue;
            for (; i > 0 && pair->tensor[tensor[i - 1]].offset > pair->tensor[t].offset; i--) tensor[i] = tensor[i - 1];
            tensor[i] = t;
            count++;
        }
        float* own = (float*)device_alloc(&pair->dev, pair->elements * 4);
        int64_t used = 0;
        for (int i = 0; i < count; i++) {
            const OptimTensor* t = &pair->tensor[tensor[i]];
            const int64_t padded = ceil_div(t->rows * t->cols, TILE_ELEMENTS) * TILE_ELEMENTS;
            at[i] = number % 2 ? own + used : grads + t->offset;
            float* host = (float*)malloc((size_t)padded * 4);
            copy_to_host(&pair->dev, host, grads + t->offset, padded * 4);
            copy_to_device(&pair->dev, own + used, host, padded * 4);
            free(host);
            used += padded;
        }
        optim_step_tensors(pair->optim[1], tensor, at, count, scale, 1e-2f, step);
        device_sync(&pair->dev);
        device_free(&pair->dev, own);
    }
}

static void pair_step(Pair* pair, int step) {
    const float one = 1.0f;
    float *host = (float*)calloc((size_t)pair->elements, sizeof(float)), *scale = (float*)device_alloc(&pair->dev, 4);
    float* grads = (float*)device_alloc(&pair->dev, pair->elements * 4);
    for (int t = 0; t < COUNT; t++) {
        for (int64_t i = 0; i < model[t].rows * model[t].cols; i++) {
            host[pair->tensor[t].offset + i] = gradient(step, t * 10000 + i);
        }
    }
    copy_to_device(&pair->dev, grads, host, pair->elements * 4);
    copy_to_device(&pair->dev, scale, &one, 4);
    optim_step(pair->optim[0], grads, scale, 1e-2f, step);
    char error[512];
    if (optim_releases(&pair->config[1], pair->tensor, COUNT, error, sizeof(error))) {
        step_by_parts(pair, grads, scale, step);
    } else {
        optim_step(pair->optim[1], grads, scale, 1e-2f, step);
    }
    device_sync(&pair->dev);
    device_free(&pair->dev, grads);
    device_free(&pair->dev, scale);
    free(host);
}

// Does a part, as it is now, have the copy's bits?
static void expect_part(Test* test, const Pair* pair, const Decoded* decoded, int number, const char* what) {
    const int64_t size = pair->compute == OPTIM_FP32 ? 4 : 2;
    for (int t = 0; t < COUNT; t++) {
        if (part[t] != number) continue;
        const int64_t bytes = model[t].rows * model[t].cols * size;
        char *want = (char*)malloc((size_t)bytes), *got = (char*)malloc((size_t)bytes);
        copy_to_host(&pair->dev, want, (char*)optim_weights(pair->optim[0]) + pair->tensor[t].offset * size, bytes);
        copy_to_host(&pair->dev, got, decoded_at(decoded, t), bytes);
        expect(memcmp(want, got, (size_t)bytes) == 0, "%s: %s", what, model[t].name);
        free(want), free(got);
    }
}

static void check_decoded(Test* test, const char* weights, const char* overrides, OptimType compute, bool gpu) {
    OptimConfig config = make_config("adamw", weights, "fp32");
    config.overrides = overrides;
    Pair pair;
    pair_open(&pair, &config, compute, gpu);
    Decoded* decoded =
        decoded_open(&pair.dev, pair.optim[1], &pair.config[1], pair.tensor, part, COUNT, LAYERS, compute);
    for (int step = 1; step <= STEPS; step++) {
        // A forward and a backward pass; neighbours are there at the same time, and so are the last layer and ln_f.
        const int order[] = {3, 0, 1, 2, 4, 3, 2, 1, 0};
        int before = -1;
        for (int number : order) {
            decoded_need(decoded, number);
            expect_part(test, &pair, decoded, number, weights);
            if (before < LAYERS && number < LAYERS && before >= 0) expect_part(test, &pair, decoded, before, weights);
            if (number == 4) expect_part(test, &pair, decoded, 2, weights);
            before = number;
        }
        pair_step(&pair, step);
        decoded_forget(decoded);
    }
    OptimBytes plan = optim_bytes(&pair.config[1], pair.tensor, COUNT, compute), real = optim_allocated(pair.optim[1]);
    expect(memcmp(&plan, &real, sizeof(plan)) == 0 && plan.compute == 0, "%s: planned and allocated", weights);
    OptimBytes whole = optim_bytes(&pair.config[0], pair.tensor, COUNT, compute);
    expect(whole.weights == plan.weights && whole.states == plan.states, "%s: only the copy is gone", weights);
    const int64_t room = decoded_bytes(&pair.config[1], pair.tensor, part, COUNT, LAYERS, compute);
    expect((room == 0) == (whole.compute == 0) && room <= whole.compute, "%s: room %lld of %lld", weights,
           (long long)room, (long long)whole.compute);
    for (int i = 0; i < optim_stream_count(pair.optim[0]); i++) {
        const OptimStream a = optim_stream(pair.optim[0], i), b = optim_stream(pair.optim[1], i);
        const int64_t bytes = a.elements * a.element_bytes;
        char *want = (char*)malloc((size_t)bytes + 1), *got = (char*)malloc((size_t)bytes + 1);
        copy_to_host(&pair.dev, want, a.data, bytes);
        copy_to_host(&pair.dev, got, b.data, bytes);
        expect(memcmp(want, got, (size_t)bytes) == 0, "%s: %s after steps by parts", weights, a.name);
        free(want), free(got);
    }
    decoded_close(decoded);
    for (Optim* optim : pair.optim) optim_free(optim);
    device_close(&pair.dev);
}

static void check_formats(Test* test, OptimType compute, bool gpu) {
    const Table<FormatRow>& table = weights_table();
    for (int i = 0; i < table.count; i++) {
        if (!table.row[i].feeds_back) check_decoded(test, table.row[i].name, "", compute, gpu);
    }
    check_decoded(test, "lin8:sr", "ln*|wpe: weights=bf16:sr; h.1: weights=fp32", compute, gpu);
}

TEST(decoded_parts) {
    check_formats(test, OPTIM_FP32, false);
    check_formats(test, OPTIM_BF16, false);
}

CACHE_TEST(TEST, decoded_parts_gpu) {
    check_formats(test, OPTIM_BF16, true);
    check_decoded(test, "lin8:sr", "", OPTIM_FP32, true);
}
