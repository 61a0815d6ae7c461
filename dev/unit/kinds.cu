// Tests of rules by tensor name: rule= of --override, and rules that read whole rows.
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
static void kind_steps(Kind* run, int first, int last, int bad = 0) {
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
        optim_step(run->optim, grads, scale, 1e-2f, step);
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
