// Tests of --override: what matches, what is refused, and that a run with other settings for some tensors gives each
// tensor the bits that a run with these settings for all would.
#include "../../optim/override.h"
#include "steps.h"

TEST(override_patterns) {
    const std::tuple<const char*, const char*, bool> rows[] = {
        {"wpe", "wpe.weight", true},
        {"wpe", "xwpe.weight", false},
        {"wpe", "wpex.weight", false},
        {"wpe|ln*", "h.3.ln_1.weight", true},
        {"wpe|ln*", "ln_f.bias", true},
        {"wpe|ln*", "h.3.mlp.c_fc.weight", false},
        {"*.bias", "h.3.mlp.c_fc.bias", true},
        {"*.bias", "h.3.mlp.c_fc.weight", false},
        {"h.3", "h.3.ln_1.weight", true},
        {"h.3", "h.31.ln_1.weight", false},
        {"h.?.attn", "h.3.attn.c_attn.weight", true},
        {"h.?.attn", "h.31.attn.c_attn.weight", false},
        {"c_attn.weight", "h.3.attn.c_attn.weight", true},
        {"*", "wte.weight", true},
        {"wte.weight", "wte.weight", true},
        {"wte.weight.more", "wte.weight", false},
        {"h.*.c_attn.weight", "h.3.attn.c_attn.weight", true},
        {"h.*.c_attn", "h.3.attn.c_attn.weight", true},
        {"*t*n*.bias", "h.3.attn.c_attn.bias", true},
        {"*t*n*.bias", "h.3.attn.c_attn.weight", false},
        {"l*_?", "h.3.ln_1.weight", true},
        {"l*_?", "h.3.ln_12.weight", false},
        {"***", "wte.weight", true},
        {"****************************************z", "h.3.mlp.c_fc.weight", false}};
    for (const auto& [patterns, name, matches] : rows) {
        char text[128];
        Override parsed[OVERRIDES];
        int count;
        snprintf(text, sizeof(text), " %s : lr=2 ;", patterns);
        expect(overrides_parse(text, parsed, &count, error) && count == 1, "%s", error);
        expect(override_matches(&parsed[0], name) == matches, "%s and %s", patterns, name);
    }
    char longest[200] = "w";
    for (int i = 0; i < 11; i++) strcat(longest, "|h.3.attn.c_");
    Override parsed[OVERRIDES];
    int count;
    strcat(longest, ":m=fp32");
    expect_refused(overrides_parse(longest, parsed, &count, error), error, "more than 127");
    expect(overrides_parse(longest + 10, parsed, &count, error), "%s", error);
}

constexpr int NAMED = 5, LENGTH = 2500;
static const OptimTensor model[NAMED] = {{"wpe.weight", 1, LENGTH, true, 0},
                                         {"h.0.ln_1.weight", 1, LENGTH, false, 0},
                                         {"h.0.attn.c_attn.weight", 1, LENGTH, true, 0},
                                         {"h.0.attn.c_attn.bias", 1, LENGTH, false, 0},
                                         {"ln_f.weight", 1, LENGTH, true, 0}};

static void named_run(OptimRun* run, const OptimConfig* config, float rate, OptimType compute) {
    const Steps how = {rate, 1.0f, false, false};
    run_open(run, config, model, NAMED, compute);
    run_steps(run, 1, 5, how);
}

static const char* const OVERRIDDEN = "wpe|ln*: m=fp32 v=fp32 lr=0.5; ln_f: lr=0.5; *.bias: wd=0.3";

TEST(override_do_what_whole_runs_do) {
    // Formats that round to nearest: an element's result does not depend on where in the arena it lies.
    OptimConfig mixed = make_config("adamw", "fp32", "bf16"), wide = make_config("adamw", "fp32", "fp32");
    OptimConfig decayed = make_config("adamw", "fp32", "bf16"), plain = decayed;
    mixed.overrides = OVERRIDDEN;
    decayed.overrides = "*: wd=0.3";
    OptimRun run[5];
    const OptimConfig* const configs[5] = {&mixed, &wide, &wide, &plain, &decayed};
    const float rates[5] = {0.01f, 0.005f, 0.0025f, 0.01f, 0.01f};
    const int same[NAMED] = {1, 1, 3, 4, 2};  // which run a tensor of the mixed one equals
    for (int r = 0; r < 5; r++) named_run(&run[r], configs[r], rates[r], OPTIM_FP32);
    for (int t = 0; t < NAMED; t++) {
        for (int r = 1; r < 5; r++) {
            // Without decay in both, tensors of equal settings agree with one more run.
            bool may = r == same[t];
            expect(same_tensor(&run[0], &run[r], t) == may, "%s and run %d", model[t].name, r);
        }
    }
    // Memory: moments of three tensors are fp32, of two bf16; the arena is no larger.
    OptimBytes plan = optim_bytes(&run[0].dev, &mixed, run[0].tensor, NAMED, OPTIM_FP32);
    int64_t padded = run[0].elements / NAMED;
    expect_planned(test, &run[0], "mixed");
    expect(plan.states == 2 * (3 * 4 + 2 * 2) * padded, "%lld", (long long)plan.states);
    expect(optim_stream_count(run[0].optim) == 5, "%d streams", optim_stream_count(run[0].optim));
    expect(optim_stream_named(run[0].optim, "m.1[wpe|ln*]").elements == 3 * padded, "the wide moments");
}

// Weights of two more formats, one of them with a master. Formats that round to nearest, as above.
TEST(override_weights_do_what_whole_runs_do) {
    for (OptimType compute : {OPTIM_FP32, OPTIM_BF16}) {
        for (const char* base : {"fp32", "bf16", "e4m3"}) {
            OptimConfig config[4];
            for (OptimConfig& each : config) each = make_config("adamw", base, "fp32");
            config[0].overrides = "ln*: weights=bf16+fp32; wpe: weights=bf16+8 m=bf16; *.bias: m=bf16";
            config[1].weights = "bf16+fp32";
            config[2].weights = "bf16+8", config[2].m = "bf16";
            OptimRun run[4];
            for (int r = 0; r < 4; r++) named_run(&run[r], &config[r], 0.01f, compute);
            for (int t = 0; t < 3; t++) {
                const int same[] = {2, 1, 3};  // which run a tensor of the mixed one equals
                for (int r = 1; r < 4; r++) {
                    expect(same_tensor(&run[0], &run[r], t) == (r == same[t]), "%s: %s and run %d", base, model[t].name,
                           r);
                }
            }
            expect_planned(test, &run[0], base);
            int weights = 0, masters = 0;
            for (int s = 0; s < optim_stream_count(run[0].optim); s++) {
                OptimStream stream = optim_stream(run[0].optim, s);
                weights += stream.is_weights;
                masters += is(stream.name, "weights.2[ln*].master");
            }
            expect(weights == 3 && masters == 1, "%s: %d formats of weights, %d masters", base, weights, masters);
        }
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
