// Tests of rules by tensor name: rule= of --override, and rules that read whole rows.
#include "steps.h"

constexpr int TENSORS = 4, ROWS = 37, COLS = 129;
static const OptimTensor model[TENSORS] = {{"wte.weight", ROWS, COLS, true, 0},
                                           {"h.0.ln_1.weight", 1, 300, false, 0},
                                           {"h.0.mlp.c_fc.weight", COLS, ROWS, true, 0},
                                           {"ln_f.weight", 1, 2500, false, 0}};

// A tensor's weights are those of a run whose every tensor has the tensor's rule.
static void check_rules_mixed(Test* test, const char* overrides, const char* other) {
    OptimConfig plain = make_config("adamw", "fp32", "fp32"), mixed = plain, alone = make_config(other, "fp32", "fp32");
    mixed.overrides = overrides;
    Run run[3];
    run_open(&run[0], &plain, model, TENSORS, OPTIM_FP32);
    run_open(&run[1], &alone, model, TENSORS, OPTIM_FP32);
    run_open(&run[2], &mixed, model, TENSORS, OPTIM_FP32);
    for (Run& each : run) run_steps(&each, 1, 5);
    for (int t = 0; t < TENSORS; t++) {
        const bool its = strncmp(model[t].name, "h.0", 3) == 0;
        expect(same_tensor(&run[2], &run[its], t), "%s: %s", overrides, model[t].name);
        expect(!model[t].decay || !same_tensor(&run[2], &run[!its], t), "%s: %s has the other rule", overrides,
               model[t].name);
    }
    expect_planned(test, &run[2], overrides);
    for (Run& each : run) run_close(&each);
}

TEST(override_rule) {
    for (const char* rule : RULE_NAMES) {
        char overrides[64];
        snprintf(overrides, sizeof(overrides), "h.0: rule=%s", rule);
        if (find_row(rule_table(), rule)->matrix) continue;  // matrix.cu
        if (!is(rule, "adamw")) check_rules_mixed(test, overrides, rule);
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

// Every v and m, and the weights, against the paper's formulas in double, one operation at a time. The sums of squares
// have no cancellation: 100 roundings bound them, and the steps stay within 2^-16 of the learning rate.
TEST(rows_against_double) {
    OptimConfig config = make_config("adam-mini", "fp32", "fp32");
    const Steps how = {1e-2f, 0.5f, false, false};
    Run run;
    run_open(&run, &config, model, TENSORS, OPTIM_FP32);
    constexpr int STEPS = 6;
    run_steps(&run, 1, STEPS, how);
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
                    const double g = 0.5 * (double)run_gradient(&model[t], step, t, i, how);
                    mean[step] += g * g / (double)cols;
                }
                moment[step] = moment[step - 1] + (1.0 - (double)0.95f) * (mean[step] - moment[step - 1]);
            }
            worst_v = fmax(worst_v, fabs(((const float*)v.data)[at] / moment[STEPS] - 1.0));
            for (int64_t i = r * cols; i < (r + 1) * cols; i++) {
                double p = run_start(t, i), m = 0.0;
                for (int step = 1; step <= STEPS; step++) {
                    m += (1.0 - (double)0.9f) * (0.5 * (double)run_gradient(&model[t], step, t, i, how) - m);
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
    run_close(&run);
}

// Cuts between shards move out of tensors whose rule reads rows; those of element rules stay.
TEST(rows_cuts) {
    for (const char* rule : {"adam-mini", "adamw"}) {
        OptimConfig config = make_config(rule, "fp32", "fp32");
        OptimTensor tensors[TENSORS];
        memcpy(tensors, model, sizeof(model));
        optim_layout(tensors, TENSORS, &config);
        const int64_t end = tensors[3].offset + 2 * TILE_ELEMENTS, rows = is(rule, "adam-mini");
        int64_t cut[] = {0, TILE_ELEMENTS, tensors[2].offset + TILE_ELEMENTS, end};
        optim_cuts(&config, tensors, TENSORS, cut, 4);
        expect(cut[1] == (rows ? 0 : TILE_ELEMENTS) && cut[3] == end, "%s: %lld", rule, (long long)cut[1]);
    }
}
