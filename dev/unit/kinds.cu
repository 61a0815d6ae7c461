// Tests of rules by tensor name: rule= of --override, and rules that read whole rows.
#include "../../optim/jit.h"
#include "../../optim/table.cuh"
#include "rules.h"

constexpr int TENSORS = 4, ROWS = 37, COLS = 129;
static const OptimTensor model[TENSORS] = {{"wte.weight", ROWS, COLS, true, 0},
                                           {"h.0.ln_1.weight", 1, 300, false, 0},
                                           {"h.0.mlp.c_fc.weight", COLS, ROWS, true, 0},
                                           {"ln_f.weight", 1, 2500, false, 0}};

struct Kind {
    Device dev;
    OptimTensor tensor[TENSORS];
    Optim* optim;
};

// Runs steps `first` to `last` on tensors from the same start, whatever the layout. In step `bad` the factor is NaN.
static void kind_steps(Kind* run, int first, int last, int bad = 0, int64_t begin = 0) {
    int64_t elements = 0;
    for (const OptimTensor& t : run->tensor) {
        int64_t end = t.offset + ceil_div(t.rows * t.cols, TILE_ELEMENTS) * TILE_ELEMENTS;
        elements = end > elements ? end : elements;
    }
    float *host = (float*)calloc((size_t)elements, sizeof(float)), *scale = (float*)device_alloc(&run->dev, 4);
    float* grads = (float*)device_alloc(&run->dev, elements * 4);
    for (int step = first; step <= last; step++) {
        const float factor = step == bad ? NAN : 0.5f;
        for (int t = 0; t < TENSORS; t++) {
            const int64_t n = run->tensor[t].rows * run->tensor[t].cols;
            for (int64_t i = 0; i < n; i++) host[run->tensor[t].offset + i] = gradient(step, t * 10000 + i);
        }
        copy_to_device(&run->dev, grads, host, elements * 4);
        copy_to_device(&run->dev, scale, &factor, 4);
        optim_step(run->optim, grads + begin, scale, 1e-2f, step);
    }
    device_sync(&run->dev);
    device_free(&run->dev, grads);
    device_free(&run->dev, scale);
    free(host);
}

static void kind_open(Kind* run, const OptimConfig* config, bool gpu) {
    static float values[ROWS * COLS];
    device_open(&run->dev, gpu, 0);
    memcpy(run->tensor, model, sizeof(model));
    optim_layout(run->tensor, TENSORS, config);
    run->optim = optim_create(&run->dev, config, run->tensor, TENSORS, OPTIM_FP32);
    for (int t = 0; t < TENSORS; t++) {
        for (int64_t i = 0; i < model[t].rows * model[t].cols; i++) values[i] = start(t * 10000 + i);
        optim_set_weights(run->optim, t, values);
    }
    optim_decode(run->optim);
}

static void kind_close(Kind* run) {
    optim_free(run->optim);
    device_close(&run->dev);
}

static bool kind_same(const Kind* a, const Kind* b, int tensor) {
    static float x[2][ROWS * COLS];
    optim_get_weights(a->optim, tensor, x[0]);
    optim_get_weights(b->optim, tensor, x[1]);
    return memcmp(x[0], x[1], (size_t)(model[tensor].rows * model[tensor].cols) * sizeof(float)) == 0;
}

// A tensor's weights are those of a run whose every tensor has the tensor's rule.
static void check_rules_mixed(Test* test, const char* overrides, const char* other, bool gpu) {
    OptimConfig plain = make_config("adamw", "fp32", "fp32"), mixed = plain, alone = make_config(other, "fp32", "fp32");
    mixed.overrides = overrides;
    Kind run[3];
    kind_open(&run[0], &plain, gpu);
    kind_open(&run[1], &alone, gpu);
    kind_open(&run[2], &mixed, gpu);
    for (Kind& each : run) kind_steps(&each, 1, 5);
    for (int t = 0; t < TENSORS; t++) {
        const bool its = strncmp(model[t].name, "h.0", 3) == 0;
        expect(kind_same(&run[2], &run[its], t), "%s: %s", overrides, model[t].name);
        expect(!model[t].decay || !kind_same(&run[2], &run[!its], t), "%s: %s has the other rule", overrides,
               model[t].name);
    }
    OptimBytes plan = optim_bytes(&mixed, run[2].tensor, TENSORS, OPTIM_FP32), real = optim_allocated(run[2].optim);
    expect(memcmp(&plan, &real, sizeof(plan)) == 0, "%s: planned and allocated", overrides);
    for (Kind& each : run) kind_close(&each);
}

TEST(override_rule) {
    for (const char* rule : RULE_NAMES) {
        char overrides[64];
        snprintf(overrides, sizeof(overrides), "h.0: rule=%s", rule);
        if (find_row(rule_table(), rule)->matrix) continue;  // matrix.cu
        if (!is(rule, "adamw")) check_rules_mixed(test, overrides, rule, false);
    }
}

TEST(override_rule_refusals) {
    OptimConfig config = make_config("adamw", "fp32", "fp32");
    config.overrides = "wte: rule=lyon";
    expect_refusal(test, config, "--override rule: \"lyon\" is not known", "did you mean lion?");
    config.overrides = "wte: rule=";
    expect_refusal(test, config, "--override: \"rule=\" names no rule", "--list-formats");
    const struct {
        const char *rule, *v, *mode, *says;
    } rows[] = {{"lion", "none", "coupled", "add v=fp32"},
                {"adamw", "fp32", "coupled", "lion keeps no second moment"},
                {"lion", "none", "independent", "--decay-mode coupled"}};
    for (const auto& row : rows) {
        OptimConfig run = make_config(row.rule, "fp32", "fp32"), launch = run;
        char error[512] = "";
        run.decay_mode = row.mode;
        launch.rule = is(row.mode, "independent") ? "sgd" : is(row.rule, "lion") ? "adamw" : "lion";
        launch.v = row.v;
        expect(!optim_rule_fits(&launch, &run, error, sizeof(error)) && strstr(error, row.says), "%s", error);
    }
}

// Streams of `a` and `b`, which lie on any device, have the same bytes.
static bool kind_equal(const Kind* a, const Kind* b) {
    bool same = optim_stream_count(a->optim) == optim_stream_count(b->optim);
    for (int s = 0; s < optim_stream_count(a->optim) && same; s++) {
        OptimStream x = optim_stream(a->optim, s), y = optim_stream(b->optim, s);
        const int64_t bytes = x.elements * x.element_bytes;
        char *of_a = (char*)malloc((size_t)bytes + 1), *of_b = (char*)malloc((size_t)bytes + 1);
        copy_to_host(&a->dev, of_a, x.data, bytes);
        copy_to_host(&b->dev, of_b, y.data, bytes);
        same = is(x.name, y.name) && x.elements == y.elements && memcmp(of_a, of_b, (size_t)bytes) == 0;
        free(of_a);
        free(of_b);
    }
    return same;
}

// Every v and m, and the weights, against the paper's formulas in double, one operation at a time. The sums of squares
// have no cancellation: 100 roundings bound them, and the steps stay within 2^-16 of the learning rate.
TEST(rows_against_double) {
    OptimConfig config = make_config("adam-mini", "fp32", "fp32");
    Kind run;
    kind_open(&run, &config, false);
    constexpr int STEPS = 6;
    kind_steps(&run, 1, STEPS);
    OptimStream v = optim_stream(run.optim, 2);
    expect(is(v.name, "v") && v.elements == ROWS + 1 + COLS + 1, "%s: %lld", v.name, (long long)v.elements);
    int64_t at = 0;
    double worst = 0.0, worst_v = 0.0;
    for (int t = 0; t < TENSORS; t++) {
        static float got[ROWS * COLS];
        const int64_t cols = model[t].cols;
        optim_get_weights(run.optim, t, got);
        for (int64_t r = 0; r < model[t].rows; r++, at++) {
            double mean[STEPS + 1] = {}, moment[STEPS + 1] = {};
            for (int step = 1; step <= STEPS; step++) {
                for (int64_t i = r * cols; i < (r + 1) * cols; i++) {
                    const double g = 0.5 * (double)gradient(step, t * 10000 + i);
                    mean[step] += g * g / (double)cols;
                }
                moment[step] = moment[step - 1] + (1.0 - (double)0.95f) * (mean[step] - moment[step - 1]);
            }
            worst_v = fmax(worst_v, fabs(((const float*)v.data)[at] / moment[STEPS] - 1.0));
            for (int64_t i = r * cols; i < (r + 1) * cols; i++) {
                double p = start(t * 10000 + i), m = 0.0;
                for (int step = 1; step <= STEPS; step++) {
                    m += (1.0 - (double)0.9f) * (0.5 * (double)gradient(step, t * 10000 + i) - m);
                    const double bias1 = 1.0 - pow((double)0.9f, step), bias2 = 1.0 - pow((double)0.95f, step);
                    const double lr = (double)1e-2f;
                    p *= 1.0 - (model[t].decay ? lr * (double)0.1f : 0.0);
                    p -= lr / bias1 * m / (sqrt(moment[step] / bias2) + 1e-8);
                }
                worst = fmax(worst, fabs((double)got[i] - p));
            }
        }
    }
    expect(worst_v <= 100 * ldexp(1.0, -24), "v is off by %.1e of itself", worst_v);
    expect(worst <= STEPS * 1e-2 * ldexp(1.0, -16) && worst > 0.0, "a weight is off by %.1e", worst);
    kind_close(&run);
}

// A step that changes nothing, a resume from the streams, and shards, with formats of m of every kind.
TEST(rows_resume_skip_and_shard) {
    const char* const formats[] = {"fp32", "bf16:sr", "dyn8/256", "de4/32@dq8", "e4m3/tensor"};
    for (const char* m : formats) {
        OptimConfig config = make_config("adam-mini", "bf16:sr", m);
        Kind whole, first, second;
        for (Kind* run : {&whole, &first, &second}) kind_open(run, &config, false);
        kind_steps(&whole, 1, 6);
        kind_steps(&first, 1, 3);
        kind_steps(&first, 4, 4, 4);
        for (int s = 0; s < optim_stream_count(first.optim); s++) {
            OptimStream from = optim_stream(first.optim, s), to = optim_stream(second.optim, s);
            memcpy(to.data, from.data, (size_t)(from.elements * from.element_bytes));
        }
        expect(!kind_equal(&whole, &second), "m %s: nothing moves", m);
        kind_steps(&second, 4, 6);
        expect(kind_equal(&whole, &second), "m %s: resumed", m);
        int64_t cut[] = {0, TILE_ELEMENTS, whole.tensor[2].offset + TILE_ELEMENTS, 0};
        cut[3] = whole.tensor[3].offset + 2 * TILE_ELEMENTS;
        optim_cuts(&config, whole.tensor, TENSORS, cut, 4);
        expect(cut[1] == 0 && cut[3] == whole.tensor[3].offset + 2 * TILE_ELEMENTS, "%lld", (long long)cut[1]);
        for (int k = 0; k < 3; k++) {
            OptimConfig part = config;
            part.begin = cut[k], part.end = cut[k + 1];
            if (part.begin == part.end) continue;
            Kind shard;
            kind_open(&shard, &part, false);
            kind_steps(&shard, 1, 6, 0, part.begin);
            for (int t = 0; t < TENSORS; t++) {
                bool held = shard.tensor[t].offset >= part.begin && shard.tensor[t].offset < part.end;
                expect(!held || kind_same(&whole, &shard, t), "m %s: shard %d, %s", m, k, model[t].name);
            }
            kind_close(&shard);
        }
        for (Kind* run : {&whole, &first, &second}) kind_close(run);
    }
    OptimConfig config = make_config("adamw", "fp32", "fp32");
    int64_t cut[] = {0, TILE_ELEMENTS, 3 * TILE_ELEMENTS};
    OptimTensor tensors[TENSORS];
    memcpy(tensors, model, sizeof(model));
    optim_layout(tensors, TENSORS, &config);
    optim_cuts(&config, tensors, TENSORS, cut, 3);
    expect(cut[1] == TILE_ELEMENTS, "cuts of element rules stay");
}

static void rows_on_gpu(Test* test) {
    for (const char* m : {"fp32", "bf16:sr", "dyn8/256", "de4/32@dq8", "e4m3/tensor"}) {
        for (const char* overrides : {"", "h.0: rule=adamw v=udyn8; ln*: m=fp32"}) {
            OptimConfig config = make_config("adam-mini", "bf16:sr", m);
            config.overrides = overrides;
            Kind run[2];
            for (int gpu = 0; gpu < 2; gpu++) {
                kind_open(&run[gpu], &config, gpu == 1);
                kind_steps(&run[gpu], 1, 8, 5);
            }
            expect(kind_equal(&run[0], &run[1]), "m %s, \"%s\"", m, overrides);
            for (Kind& each : run) kind_close(&each);
        }
    }
}

TEST(rows_equal_cpu_gpu) {
    if (!jit_available()) skip("libnvrtc was not found");
    with_empty_cache(test, rows_on_gpu);
}

TEST(rows_compile_at_run_time) {
    if (!jit_available()) skip("libnvrtc was not found");
    static char error[JIT_ERROR_BYTES];
    OptimConfig config = make_config("adam-mini", "bf16:sr", "dyn8/256");
    char expression[1024];
    JitImage image;
    optim_expression(&config, OPTIM_BF16, expression, sizeof(expression));
    bool good = jit_compile(expression, "sm_90", &image, error);
    expect(good, "%s: %s", expression, error);
    if (good) jit_free(&image);
}
