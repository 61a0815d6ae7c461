// Tests of rules by tensor name: rule= of --override.
#include "kinds.h"

// A tensor's weights are those of a run whose every tensor has the tensor's rule.
static void check_rules_mixed(Test* test, const char* overrides, const char* other, bool gpu) {
    OptimConfig plain = make_config("adamw", "fp32", "fp32"), mixed = plain, alone = make_config(other, "fp32", "fp32");
    mixed.overrides = overrides;
    alone.overrides = "none";  // even if the rule leaves some tensors to adamw
    OptimRun run[3];
    run_open(&run[0], &plain, model, OPTIM_FP32, gpu);
    run_open(&run[1], &alone, model, OPTIM_FP32, gpu);
    run_open(&run[2], &mixed, model, OPTIM_FP32, gpu);
    for (OptimRun& each : run) run_steps(&each, 1, 5, plain_steps());
    for (int t = 0; t < TENSORS; t++) {
        const bool its = strncmp(model[t].name, "h.0", 3) == 0;
        expect(same_tensor(&run[2], &run[its], t), "%s: %s", overrides, model[t].name);
        expect(!model[t].decay || !same_tensor(&run[2], &run[!its], t), "%s: %s has the other rule", overrides,
               model[t].name);
    }
    expect_planned(test, &run[2], overrides);
}

TEST(override_rule) {
    for (const char* rule : RULE_NAMES) {
        const char* overrides = formatted("h.0: rule=%s", rule);
        if (find_row(rule_table(), rule)->matrix) continue;  // matrix.cu
        if (!is(rule, "adamw")) check_rules_mixed(test, overrides, rule, false);
    }
}

TEST(override_rule_refusals) {
    const char* const rows[][4] = {{"lion", "none", "coupled", "add v=fp32"},
                                   {"adamw", "fp32", "coupled", "lion keeps no second moment"},
                                   {"lion", "none", "independent", "--decay-mode coupled"}};
    for (const auto& [rule, v, mode, says] : rows) {
        OptimConfig run = make_config(rule, "fp32", "fp32"), launch = run;
        run.decay_mode = mode;
        launch.rule = is(mode, "independent") ? "sgd" : is(rule, "lion") ? "adamw" : "lion";
        launch.v = v;
        expect_refused(optim_rule_fits(&launch, &run, error), error, says);
    }
}
