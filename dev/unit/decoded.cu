// Tests of optim/decoded.h and of optim_step_tensors: weights decoded a part at a time have the bits of a copy of the
// whole model, whatever the order in which parts are asked for, and the planned room is what is allocated; a step that
// is taken part by part, from gradients that lie elsewhere, has the bits of one over the whole arena.
#include "../../optim/decoded.h"
#include "steps.h"

constexpr int LAYERS = 3, COUNT = 2 + 2 * LAYERS + 1, STEPS = 2;
static const OptimTensor model[COUNT] = {
    {"wte.weight", 129, 40, true, 0},      {"wpe.weight", 70, 40, true, 0},
    {"h.0.ln_1.weight", 1, 300, false, 0}, {"h.0.mlp.c_fc.weight", 81, 37, true, 0},
    {"h.1.ln_1.weight", 1, 300, false, 0}, {"h.1.mlp.c_fc.weight", 81, 37, true, 0},
    {"h.2.ln_1.weight", 1, 300, false, 0}, {"h.2.mlp.c_fc.weight", 81, 37, true, 0},
    {"ln_f.weight", 1, 2500, false, 0}};
static const int part[COUNT] = {3, 3, 0, 0, 1, 1, 2, 2, 4};

// A step of the run without a copy, a part at a time from the last to the first. The gradients of every other part lie
// in memory of their own, in the arena's order, as those of a layer that is released do.
static void step_by_parts(void*, Run* run, const void* given, const float* scale, float lr, int step) {
    const float* grads = (const float*)given;
    for (int number = LAYERS + 1; number >= 0; number--) {
        int tensor[COUNT], count = 0;
        const void* at[COUNT];
        for (int t = 0; t < COUNT; t++) {
            int i = count;
            if (part[t] != number) continue;
            for (; i > 0 && run->tensor[tensor[i - 1]].offset > run->tensor[t].offset; i--) tensor[i] = tensor[i - 1];
            tensor[i] = t;
            count++;
        }
        float* own = (float*)device_alloc(&run->dev, run->elements * 4);
        int64_t used = 0;
        for (int i = 0; i < count; i++) {
            const OptimTensor* t = &run->tensor[tensor[i]];
            const int64_t padded = ceil_div(t->rows * t->cols, TILE_ELEMENTS) * TILE_ELEMENTS;
            at[i] = number % 2 ? own + used : grads + t->offset;
            float* host = (float*)malloc((size_t)padded * 4);
            copy_to_host(&run->dev, host, grads + t->offset, padded * 4);
            copy_to_device(&run->dev, own + used, host, padded * 4);
            free(host);
            used += padded;
        }
        optim_step_tensors(run->optim, tensor, at, count, scale, lr, step);
        device_sync(&run->dev);
        device_free(&run->dev, own);
    }
}

// Does a part, as it is now, have the copy's bits?
static void expect_part(Test* test, const Run* copy, const Run* run, const Decoded* decoded, int number) {
    const int64_t size = run->compute == OPTIM_FP32 ? 4 : 2;
    for (int t = 0; t < COUNT; t++) {
        const char* want = (const char*)optim_weights(copy->optim) + run->tensor[t].offset * size;
        expect(part[t] != number ||
                   same_bytes(copy, want, run, decoded_at(decoded, t), model[t].rows * model[t].cols * size),
               "%s: %s", run->config.weights, model[t].name);
    }
}

static void check_decoded(Test* test, const char* weights, const char* overrides, OptimType compute, bool gpu) {
    OptimConfig config = make_config("adamw", weights, "fp32");
    config.overrides = overrides;
    Run copy, run;
    run_open(&copy, &config, model, COUNT, compute, gpu);
    config.keeps_copy = false;
    run_open(&run, &config, model, COUNT, compute, gpu);
    Decoded* decoded = decoded_open(&run.dev, run.optim, &run.config, run.tensor, part, COUNT, LAYERS, compute);
    Steps how = plain_steps(), by_parts = how;
    char error[512];
    if (optim_releases(&config, run.tensor, COUNT, error, sizeof(error))) by_parts.take = step_by_parts;
    for (int step = 1; step <= STEPS; step++) {
        // A forward and a backward pass; neighbours are there at the same time, and so are the last layer and ln_f.
        const int order[] = {3, 0, 1, 2, 4, 3, 2, 1, 0};
        int before = -1;
        for (int number : order) {
            decoded_need(decoded, number);
            expect_part(test, &copy, &run, decoded, number);
            if (before < LAYERS && number < LAYERS && before >= 0) expect_part(test, &copy, &run, decoded, before);
            if (number == 4) expect_part(test, &copy, &run, decoded, 2);
            before = number;
        }
        run_steps(&copy, step, step, how);
        run_steps(&run, step, step, by_parts);
        decoded_forget(decoded);
    }
    expect_planned(test, &run, weights);
    const OptimBytes plan = optim_bytes(&run.config, run.tensor, COUNT, compute);
    const OptimBytes whole = optim_bytes(&copy.config, run.tensor, COUNT, compute);
    expect(whole.weights == plan.weights && whole.states == plan.states && plan.compute == 0,
           "%s: only the copy is gone", weights);
    const int64_t room = decoded_bytes(&run.config, run.tensor, part, COUNT, LAYERS, compute);
    expect((room == 0) == (whole.compute == 0) && room <= whole.compute, "%s: room %lld of %lld", weights,
           (long long)room, (long long)whole.compute);
    const char* where = difference(&copy, &run);
    expect(!where, "%s: %s after steps by parts", weights, where);
    decoded_close(decoded);
    run_close(&copy), run_close(&run);
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
