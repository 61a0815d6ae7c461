// Tests of optim_fold_tensors: m takes the gradients of a step's first micro-batches by its formula, to the bit, and
// the last one's step is then every step. With m + rest / beta g for each of the first ones, beta m + rest g of the
// last is beta times the old m + rest times the sum of all. Shards have the same bits, each micro-batch rounds with
// noise of its own, and a factor that is not finite leaves m alone.
#include "steps.h"

constexpr int COUNT = 4, STEPS = 3, MICRO = 3;
static const OptimTensor model[COUNT] = {{"wte.weight", 129, 40, true, 0},
                                         {"h.0.ln_1.weight", 1, 300, false, 0},
                                         {"h.0.mlp.c_fc.weight", 81, 137, true, 0},
                                         {"h.1.mlp.c_fc.weight", 137, 81, true, 0}};

struct Case {
    const char *rule, *weights, *m, *grads;
    float growth = 0.0f;
};
static const Case cases[] = {{"sgd", "fp32", "fp32", "fp32"},
                             {"sgd", "bf16:sr", "bf16:sr", "bf16"},
                             {"lion", "lin8:sr", "fp32", "fp32"},
                             {"lion", "bf16:sr", "fp16:sr", "fp32"},
                             {"rmnp", "bf16:sr", "bf16:sr", "bf16", 1.05f},
                             {"rmnp", "bf16+fp32", "fp32", "bf16"},
                             {"normuon-lite", "lin8:sr", "bf16:sr", "fp32"}};

static OptimConfig folds_config(const Case* c) {
    OptimConfig config = make_config(c->rule, c->weights, "fp32");
    config.m = c->m, config.grads = c->grads, config.overrides = "none";
    config.beta1 = config.beta2 = 0.95f, config.nesterov = false, config.limit_growth = c->growth;
    config.folds = true;
    return resolved(config);
}

// Returns the gradients of all tensors in micro-batch `micro` of a step, in the arena's layout and in its type.
static void* micro_gradients(const Run* run, int step, int micro) {
    const bool narrow = is(run->config.grads, "bf16");
    const int64_t begin = run->config.begin, end = run->config.end ? run->config.end : run->elements;
    float* values = run->room.zeros<float>(run->elements);
    uint16_t* codes = run->room.zeros<uint16_t>(run->elements);
    for (int t = 0; t < COUNT; t++) {
        for (int64_t i = 0; i < model[t].rows * model[t].cols; i++) {
            const float g = gradient(10 * step + micro, t * 1000000 + i);
            values[run->tensor[t].offset + i] = g, codes[run->tensor[t].offset + i] = Bf16::encode(g);
        }
    }
    if (narrow) return run->room.to_device(codes + begin, end - begin);
    return run->room.to_device(values + begin, end - begin);
}

// Folds a micro-batch's gradients, of all tensors or from tensor `first` on.
static void fold(Run* run, int step, int micro, float factor = 0.5f, int first = 0) {
    const int64_t element = is(run->config.grads, "bf16") ? 2 : 4;
    int tensor[COUNT];
    const void* at[COUNT];
    const void* grads = micro_gradients(run, step, micro);
    for (int t = first; t < COUNT; t++) {
        tensor[t] = t;
        at[t] = (const char*)grads + (run->tensor[t].offset - run->config.begin) * element;
    }
    optim_fold_tensors(run->optim, tensor + first, at + first, COUNT - first, run->room.to_device(&factor, 1), step,
                       micro);
    device_sync(&run->dev);
}

// Takes the step of the last micro-batch.
static void finish(Run* run, int step) {
    const float factor = 0.5f;
    optim_step(run->optim, micro_gradients(run, step, MICRO), run->room.to_device(&factor, 1), 1e-2f, step);
    device_sync(&run->dev);
}

// Adds c g to the first `elements` of m as optim_fold_tensors should, and stores the sum as the format stores it.
static void fold_by_hand(const Run* run, void* m, int64_t elements, int step, int micro, int number) {
    const FormatRow *format = find_row(state_table(), run->config.m),
                    *from = find_row(grads_table(), run->config.grads);
    const float beta = 0.95f, rest = (float)(1.0 - (double)beta),
                c = (is(run->config.rule, "sgd") ? 1.0f : rest) / beta;
    void* grads = to_host(run, micro_gradients(run, step, micro), run->elements * from->stream[0].bits / 8);
    for (int64_t at = 0; at < elements; at += TILE_ELEMENTS) {
        float g[TILE_ELEMENTS], x[TILE_ELEMENTS];
        const Streams state = {(char*)m + at * format->stream[0].bits / 8, nullptr},
                      its = {(char*)grads + at * from->stream[0].bits / 8, nullptr};
        const NoiseKey key = {run->config.seed + ((uint64_t)number << 53), (uint32_t)step, NOISE_M, at};
        from->load(its, 0, g, TILE_ELEMENTS, NoiseKey{});
        format->load(state, 0, x, TILE_ELEMENTS, NoiseKey{});
        for (int i = 0; i < TILE_ELEMENTS; i++) x[i] = fmaf(c, g[i] * 0.5f, x[i]);
        format->store(state, 0, x, TILE_ELEMENTS, key);
    }
}

static void check_formula(Test* test, const Case* c, bool gpu) {
    OptimConfig config = folds_config(c);
    Run folded, plain;
    run_open(&folded, &config, model, OPTIM_BF16, gpu);
    config.folds = false;
    run_open(&plain, &config, model, OPTIM_BF16, gpu);
    expect_planned(test, &folded, c->rule);
    const OptimStream m = optim_stream_named(folded.optim, "m");
    expect(m.data, "%s keeps no m", c->rule);
    for (int step = 1; step <= STEPS; step++) {
        void* want = run_array(&folded, "m");
        for (int micro = 1; micro < MICRO; micro++) {
            fold(&folded, step, micro);
            fold_by_hand(&folded, want, m.elements, step, micro, micro);
        }
        void* got = run_array(&folded, "m");
        expect(memcmp(want, got, (size_t)(m.elements * m.element_bytes)) == 0, "%s, m %s: m of step %d", c->rule, c->m,
               step);
        run_copy(&folded, &plain);
        finish(&folded, step), finish(&plain, step);
        expect_same(test, &folded, &plain, formatted("%s, m %s, the step of step %d", c->rule, c->m, step));
    }
}

JIT_BOTH(folds_by_their_formula) {
    for (const Case& c : cases) check_formula(test, &c, gpu);
}

// Rules that read matrices take all gradients into m, and step after them as if they were given a gradient of 0.
static void check_matrices(Test* test, const char* rule, const char* state, bool gpu) {
    OptimConfig config = make_config(rule, "bf16:sr", "fp32");
    config.m = state, config.nesterov = false, config.momentum = 0.95f, config.folds = true;
    config = resolved(config);
    Run folded, plain;
    run_open(&folded, &config, model, OPTIM_BF16, gpu);
    config.folds = false;
    run_open(&plain, &config, model, OPTIM_BF16, gpu);
    expect_planned(test, &folded, rule);
    const OptimStream m = optim_stream_named(folded.optim, "m"), its = optim_stream_named(plain.optim, "m");
    expect(m.data && folded.tensor[2].offset == 0, "%s: matrices come first", rule);
    const float factors[] = {0.5f, 1.0f};
    const float* scale = folded.room.to_device(factors, 2);
    float* zeros = folded.room.device<float>(folded.elements);
    device_zero(&folded.dev, zeros, folded.elements * 4);
    for (int step = 1; step <= STEPS; step++) {
        run_copy(&folded, &plain);
        void *want = run_array(&folded, "m"), *grads = micro_gradients(&folded, step, MICRO);
        for (int micro = 1; micro < MICRO; micro++) {
            fold(&folded, step, micro, 0.5f, 2);
            fold_by_hand(&folded, want, m.elements, step, micro, micro);
        }
        fold_by_hand(&folded, want, m.elements, step, MICRO, 2047);
        copy_to_device(&plain.dev, its.data, want, m.elements * m.element_bytes);
        for (int t = 0; t < COUNT; t++) {
            const void *at = (const float*)grads + folded.tensor[t].offset, *none = zeros;
            optim_step_tensors(folded.optim, &t, t < 2 ? &none : &at, 1, scale, 1e-2f, step);
        }
        optim_step_matrices(folded.optim, scale + 1, 1e-2f, step);
        optim_step(plain.optim, zeros, scale + 1, 1e-2f, step);
        expect_same(test, &folded, &plain, formatted("%s, m %s, step %d", rule, state, step));
        device_sync(&folded.dev);
    }
}

JIT_BOTH(folds_of_matrices) {
    for (const char* rule : {"muon", "normuon"}) {
        for (const char* m : {"fp32", "bf16:sr"}) check_matrices(test, rule, m, gpu);
    }
}

// A shard that begins and ends within tensors takes into m what the whole has there.
JIT_BOTH(folds_of_shards) {
    const Case c = {"sgd", "bf16:sr", "bf16:sr", "fp32"};
    Run whole, shard;
    OptimConfig config = folds_config(&c);
    run_open(&whole, &config, model, OPTIM_BF16, gpu);
    config.begin = TILE_ELEMENTS, config.end = 7 * TILE_ELEMENTS;
    run_open(&shard, &config, model, OPTIM_BF16, gpu);
    for (Run* run : {&whole, &shard}) {
        for (int micro = 1; micro < MICRO; micro++) fold(run, 1, micro);
    }
    const OptimStream all = optim_stream_named(whole.optim, "m"), part = optim_stream_named(shard.optim, "m");
    expect(all.data && part.data, "no m");
    expect(part.elements == 6 * TILE_ELEMENTS, "%lld elements", (long long)part.elements);
    expect(same_bytes(&whole, (char*)all.data + TILE_ELEMENTS * 2, &shard, part.data, part.elements * 2), "m differs");
}

// Noise differs between micro-batches, only the tensors that are named change, and a factor that is not finite changes
// nothing.
JIT_BOTH(folds_round_apart_and_may_be_left_out) {
    const Case c = {"sgd", "bf16:sr", "bf16:sr", "fp32"};
    const OptimConfig config = folds_config(&c);
    Run run[2];
    for (Run& each : run) run_open(&each, &config, model, OPTIM_BF16, gpu), fold(&each, 1, 1);
    expect(!difference(&run[0], &run[1]), "the same call differs");
    for (float factor : {NAN, INFINITY}) fold(&run[1], 1, 2, factor);
    expect(!difference(&run[0], &run[1]), "a factor that is not finite is taken");
    uint16_t *first = (uint16_t*)run_array(&run[0], "m"), *second;
    fold(&run[1], 1, 2, 0.5f, 2);
    second = (uint16_t*)run_array(&run[1], "m");
    const int64_t named = run[0].tensor[2].offset;
    expect(memcmp(first, second, (size_t)named * 2) == 0, "tensors that were not named change");
    expect(memcmp(first + named, second + named, 4096) != 0, "a tensor that was named does not change");
    // If m begins at 0, only the noise of two micro-batches can make a difference.
    Run again;
    int64_t apart = 0;
    run_open(&again, &config, model, OPTIM_BF16, gpu);
    const float one = 0.7f, *scale = again.room.to_device(&one, 1);
    const void* grads = micro_gradients(&run[0], 1, 1);
    uint16_t* m[2];
    for (int number = 1; number <= 2; number++) {
        const int tensor = 3;
        const void* at = (const float*)grads + again.tensor[3].offset;
        const OptimStream stream = optim_stream_named(again.optim, "m");
        device_zero(&again.dev, stream.data, stream.elements * 2);
        optim_fold_tensors(again.optim, &tensor, &at, 1, scale, 1, number);
        m[number - 1] = (uint16_t*)run_array(&again, "m");
    }
    const int64_t n = model[3].rows * model[3].cols, begin = again.tensor[3].offset;
    for (int64_t i = begin; i < begin + n; i++) apart += m[0][i] != m[1][i];
    expect(apart > n / 4 && apart < 3 * n / 4, "%lld of %lld are rounded otherwise", (long long)apart, (long long)n);
}

TEST(folds_only_where_m_says_all) {
    const struct {
        const char *rule, *m, *overrides;
        float beta1, momentum;
        bool nesterov;
        const char* says;  // or null: it may
    } rows[] = {
        {"sgd", "fp32", "", 0.9f, 0.95f, true, nullptr},
        {"sgd", "bf16", "", 0.9f, 0.95f, true, "bf16 would lose"},
        {"sgd", "dyn8:sr", "", 0.9f, 0.95f, true, "dyn8/256:sr would lose"},
        {"sgd", "fp32", "", 0.0f, 0.95f, true, "sgd's m forgets all"},
        {"sgd", "dyn8", "", 0.9f, 0.95f, true, "type --m bf16:sr"},
        {"sgd", "fp16:sr", "wte|ln*: rule=adamw v=fp32", 0.9f, 0.95f, true, nullptr},
        {"lion", "fp32", "", 0.95f, 0.95f, true, nullptr},
        {"lion", "fp32", "", 0.9f, 0.95f, true, "lion needs more"},
        {"rmnp", "bf16:sr", "", 0.9f, 0.95f, false, nullptr},
        {"rmnp", "bf16:sr", "", 0.9f, 0.0f, false, "rmnp's m forgets all"},
        {"rmnp", "bf16:sr", "", 0.9f, 0.95f, true, "type --nesterov off"},
        {"rmnp", "fp32", "wte: rule=sgd", 0.9f, 0.95f, false, nullptr},  // sgd needs no v=, and rmnp's rest has one
        {"normuon-lite", "fp32", "", 0.9f, 0.95f, false, nullptr},
        {"muon", "bf16:sr", "", 0.9f, 0.95f, false, nullptr},
        {"normuon", "fp32", "", 0.9f, 0.95f, true, "normuon with --nesterov on needs more"},
        {"galore", "fp32", "", 0.9f, 0.95f, false, "galore needs more"},
        {"adamw", "fp32", "", 0.9f, 0.95f, false, "adamw needs more"},
        {"nadamw", "fp32", "", 0.9f, 0.95f, false, "nadamw needs more"},
        {"rmnp", "fp32", "h.1: rule=adamw v=fp32", 0.9f, 0.95f, false, "adamw needs more"},
        {"rmnp", "fp32", "wte: rule=galore v=fp32", 0.9f, 0.95f, false, "galore needs more"},
        {"sgd", "fp32", "wte: rule=muon m=bf16", 0.9f, 0.95f, false, "bf16 would lose small ones; type m=bf16:sr"}};
    const bool folds[COUNT] = {false, false, true, true};
    for (const auto& row : rows) {
        OptimConfig config = make_config(row.rule, "fp32", "fp32");
        config.m = row.m, config.overrides = row.overrides, config.beta1 = row.beta1;
        config.momentum = row.momentum, config.nesterov = row.nesterov;
        config = resolved(config);
        OptimTensor tensors[COUNT];
        memcpy(tensors, model, sizeof(model));
        optim_layout(tensors, COUNT, &config);
        error[0] = 0;
        const bool may = optim_folds(&config, tensors, COUNT, folds, error);
        expect(may == !row.says && (may || strstr(error, row.says)), "%s, m %s: \"%s\"", row.rule, row.m, error);
    }
}

JIT_TEST(folds_compile_at_run_time) {
    for (const Case& c : cases) {
        const char *m = find_row(state_table(), c.m)->type, *grads = find_row(grads_table(), c.grads)->type;
        expect_compiles(test, formatted("optim_step_kernel<Fold, None, %s, None, None, %s>", m, grads));
        const char* matrices = "optim_step_kernel<Muon, Elementwise<Fp32, NEAREST>, TYPE, None, None, None>";
        expect_compiles(test, replaced(matrices, "TYPE", m));
    }
}
