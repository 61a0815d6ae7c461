// The model on which the laws are tried (laws*.cu, placed.cu), and the configurations.
#pragma once
#include "steps.h"

// Shapes with rows and columns that no thread's elements divide, one row, one column, whole tiles and single elements;
// stacked, tall, wide and square matrices. The last tensor has more than one slab and panel of rows.cuh.
static const OptimTensor model[] = {
    {"wpe.weight", 3, 1001, true, 0},
    {"h.0.ln_1.weight", 1, 300, false, 0},
    {"h.0.attn.c_attn.weight", 96, 32, true, 0, 3},
    {"h.0.mlp.c_fc.weight", 96, 40, true, 0},
    {"h.0.mlp.c_fc.bias", 1, 4097, false, 0},
    {"h.1.ln_1.weight", 1, 255, false, 0},
    {"h.1.mlp.c_fc.weight", 17, 259, true, 0},
    {"h.1.mlp.c_proj.weight", 33, 31, true, 0},
    {"h.2.ln_1.weight", 1, 1, false, 0},
    {"h.2.mlp.c_fc.weight", 2, 4099, true, 0},
    {"h.2.mlp.c_proj.weight", 70, 1, true, 0},
    {"h.2.attn.c_proj.weight", 2, 2, true, 0},
    {"ln_f.weight", 1, 2048, false, 0},
    {"wte.weight", 130, 264, true, 0},
};
constexpr int MODEL_COUNT = sizeof(model) / sizeof(model[0]);

inline bool reads_matrices(const OptimConfig& config) {
    return find_row(rule_table(), config.rule)->matrix != MATRIX_NONE;
}

// Rules that read single elements leave out the last tensor, which has no shape that is new to them.
inline int model_count(const OptimConfig& config) {
    return find_row(rule_table(), config.rule)->by_rows && !reads_matrices(config) ? MODEL_COUNT : MODEL_COUNT - 1;
}

struct Combination {
    const char *preset, *rule, *weights, *m, *v, *overrides = "";
    float growth = 0.0f;
    bool by_rms = false;

    OptimConfig config(const char* grads) const {
        OptimConfig c = {{}, preset, rule, weights, grads, m, v, 77};
        c.beta3 = 0.999f, c.alpha = 2.0f, c.ramp = 9, c.lr_max = 1e-2f, c.rank_gap = 2;
        c.overrides = overrides, c.limit_growth = growth, c.adafactor_lr = by_rms ? "paper" : "plain";
        return resolved(c);
    }
};

// Each preset is tried too, and each rule with each storage of the weights. These are the rest: scales of tensors, rows
// and columns; overrides of all kinds; rows, matrices and the limiter with each kind of format.
static const Combination combinations[] = {
    {"", "adamw", "bf16:sr", "e4m3/tensor", "e5m2/tensor:sr"},
    {"", "adamw", "bf16:sr", "de4/rank1:sr", "lin4/rank1"},
    {"", "adamw", "e4m3/tensor+fp32", "dyn8", "udyn8"},
    {"", "adamw", "e4m3/tensor+fp32", "e4m3/tensor", "fp32"},
    {"", "adamw", "e5m2/tensor+fp32", "dyn8/rank1", "sqrt4/rank1:sr"},
    {"", "adamw", "e4m3:sr", "fp32", "udyn8/rank1:sr"},
    {"", "ademamix", "e4m3/tensor+fp32", "e5m2/tensor:sr", "udyn8/rank1"},
    {"", "lion", "bf16+8", "de4/rank1", ""},
    {"", "lion", "bf16:kahan", "dyn8/64:sr", ""},
    {"", "adamw", "e4m3/tensor+fp32", "de4", "lin4/rank1",
     "ln*|wpe: m=dyn8/rank1 v=fp32; *.mlp: m=e4m3/tensor; h.1: lr=0.5"},
    {"", "ademamix", "bf16:sr", "bf16:sr", "bf16:sr", "wpe|ln*: m=fp32 v=fp32 lr=0.5; ln_f: lr=0.5; *.bias: wd=0.3"},
    {"", "ademamix", "e4m3:sr", "bf16:sr", "bf16:sr",
     "ln*: weights=bf16:sr; wpe: weights=fp32 m=bf16:sr; *.bias: weights=bf16+8 wd=0.1"},
    {"", "adamw", "e4m3:sr", "bf16:sr", "bf16:sr", "*: weights=bf16+8"},
    {"", "adamw", "bf16+8:sr", "bf16:sr", "bf16:sr", "wpe: m=bf16; ln_f: v=bf16; *.bias: m=fp32 v=fp32"},
    {"", "adamw", "bf16+8:sr", "bf16:sr", "bf16:sr", "*: m=bf16 v=bf16 lr=3"},
    {"", "adamw", "bf16:sr", "bf16:sr", "bf16:sr", "wpe: weights=lin8:sr; ln*: weights=fp32"},
    {"", "adamw", "fp32", "bf16:sr", "bf16:sr",  // numbers of one array of spans are those of two launches
     "wpe: weights=e4m3/tensor+fp32 m=fp32; ln*: weights=e4m3/tensor+fp32 m=e4m3/tensor; *.bias: v=e4m3/tensor"},
    {"", "adamw", "lin8:ef", "dyn8:sr", "udyn8", "ln*|*.bias: weights=bf16:sr"},
    {"", "adamw", "bf16:sr", "dyn8", "udyn8", "ln*: weights=e4m3:sr; *.bias: weights=bf16+fp32 m=fp32"},
    {"", "adamw", "bf16:ef", "e4m3:sr", "adalog8", "ln*: m=fp32 v=fp32"},
    {"", "adamw", "fp32", "dyn8", "udyn8", "h.1: rule=sgd; wpe: wd=0.3"},
    {"", "adam-mini", "bf16:sr", "fp32", ""},
    {"", "adam-mini", "bf16:sr", "dyn8/256", ""},
    {"", "adam-mini", "bf16:sr", "de4/32@dq8", "", "h.0: rule=adamw v=udyn8; ln*: m=fp32"},
    {"", "adam-mini", "bf16:sr", "e4m3/tensor", "", "h.0: rule=adamw v=udyn8; ln*: m=fp32"},
    {"", "rmnp", "bf16:sr", "bf16:sr", "", "none"},
    {"", "rmnp", "fp32", "dyn8/256", "", "none", 1.05f},
    {"", "rmnp", "bf16:sr", "e4m3/tensor", ""},
    {"", "normuon-lite", "bf16:sr", "de4/32@dq8", "", "none"},
    {"", "normuon-lite", "bf16:sr", "dyn8", "", "*.bias: lr=2"},
    {"", "adafactor", "bf16:sr", "none", ""},
    {"", "adafactor", "bf16:sr", "none", "", "", 0.0f, true},
    {"", "adafactor", "lin8:sr", "bf16:sr", "", "ln*: rule=adamw v=fp32"},
    {"", "adafactor", "bf16:sr", "e4m3/tensor", "", "", 1.02f, true},
    {"adafactor8", "", "", "", "", "ln*: rule=lion m=fp32 lr=0.5"},
    {"", "came", "bf16:sr", "fp32", ""},
    {"", "came", "fp32", "de4/32@dq8", "", "", 1.01f},
    {"came8", "", "", "", "", "wte: wd=0.3", 1.01f},
    {"", "adafactor8bit", "fp32", "dyn8", "", "", 1.02f, true},
    {"", "came8bit", "bf16:sr", "adanf4/128", "", "h.0: rule=came8bit m=fp32", 1.01f},
    {"", "sgd", "bf16:sr", "bf16:sr", "", "", 1.05f},
    {"", "adam", "bf16+16", "soft8/32", "adalog8:sr", "", 1.01f},
    {"", "ademamix", "e4m3:sr", "soft8/32", "adalog8", "", 1.01f},
    {"", "adam", "bf16:kahan", "soft8/32", "ulin8/256", "", 1.01f},
    {"", "ademamix", "bf16+16", "soft8/32", "sqrt4/32@dq8", "", 1.1f},
    {"", "adamw", "bf16", "dyn8/rank1", "lin4/rank1", "", 1.01f},
    {"", "adamw", "bf16:sr", "dyn8/256", "udyn8/rank1", "h.1: m=fp32 v=fp32", 1.01f},
    {"adamw4l", "", "", "", "", "ln*: m=fp32 lr=0.5", 1.2f},
    {"", "muon", "fp32", "fp32", ""},
    {"", "muon", "lin8:sr", "nf4/64:sr", ""},
    {"", "muon", "bf16+16", "de4/32@dq8", "", "wpe: wd=0.3"},
    {"", "muon", "e4m3:sr", "dyn8/rank1", "", "wpe|ln*|*.bias: rule=adamw m=dyn8 v=fp32"},
    {"", "muon", "bf16", "e4m3/tensor", ""},
    {"", "normuon", "bf16+fp32", "bf16:sr", "", "c_proj.weight: lr=0.5 wd=0.3"},
    {"", "normuon", "bf16+8:sr", "soft8/32", ""},
    {"", "galore", "bf16:sr", "dyn8", "udyn8"},
    {"", "galore", "fp32", "fp32", "fp32", "wpe|ln*|c_proj.weight: rule=adamw"},
    {"", "galore", "fp32", "bf16:sr", "fp32", "wpe: wd=0.3"},
    {"", "galore", "bf16+fp32", "de4/32@dq8", "fp32", "*.c_proj.weight: rule=adamw; *.c_fc.weight: lr=0.5"},
    {"", "fira", "bf16:sr", "soft8/32", "fp32"},
    {"", "fira", "lin8:sr", "nf4/64:sr", "fp32"},
    {"", "apollo", "bf16:kahan", "dyn8:sr", "sqrt8"},
    {"", "apollo-mini", "bf16+8:sr", "fp32", "fp32"},
    {"", "apollo-factored", "bf16:sr", "adanf4/128", "", "", 1.05f},
};
constexpr int COMBINATIONS = sizeof(combinations) / sizeof(combinations[0]);

// Presets with both kinds of gradients and with other formats for some tensors, the combinations, and every rule with
// every storage of the weights.
inline const std::vector<OptimConfig>& every_config() {
    static std::vector<OptimConfig> all;
    const char* const states[] = {"fp32", "bf16:sr", "e4m3/256"};
    if (!all.empty()) return all;
    for (const PresetRow& preset : PRESETS) {
        const bool few = find_row(rule_table(), preset.rule)->leaves_vectors_to_adamw;
        for (const char* grads : GRADS_NAMES) all.push_back(preset_config(preset.name, grads));
        if (!few) all.push_back(preset_config(preset.name, "fp32", "ln*: m=fp32 lr=0.5; *.bias: wd=0.3"));
    }
    for (const Combination& each : combinations) all.push_back(each.config("fp32"));
    for (const char* rule : SIMPLE_RULES) {
        for (const char* weights : WEIGHTS_NAMES) {
            const char* state = states[all.size() % 3];
            if (goes_with(rule, weights, state)) all.push_back(states_config(rule, weights, "fp32", state, state));
        }
    }
    return all;
}

// Returns the type that the matmuls read beside configuration k.
inline OptimType compute_of(int k) {
    return k % 2 ? OPTIM_FP32 : OPTIM_BF16;
}

inline void open(OptimRun* run, const OptimConfig& config, OptimType compute, bool gpu = false) {
    run_open(run, &config, model, model_count(config), compute, gpu);
}

// How many of these are not the last loop's.
inline int listed() {
    int count = COMBINATIONS;
    for (const PresetRow& row : PRESETS) count += find_row(rule_table(), row.rule)->leaves_vectors_to_adamw ? 2 : 3;
    return count;
}
