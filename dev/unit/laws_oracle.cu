// Law: a step does what the papers say. Every rule with its options, on the CPU, against the oracle in double; the
// bound is four times what the oracle in fp32 is off by. Where a GPU computes otherwise, in products of whole matrices,
// it is held to what its own roundings make of the oracle (every other bit of it is the CPU's: laws.cu).
#include "../../optim/override.h"
#include "laws.h"
#include "oracle.h"

struct Case {
    const char *rule, *overrides = "";
    void (*change)(OptimConfig* config) = [](OptimConfig*) {};
    float lr = 1e-2f, size = 1.0f;  // size: a factor of the weights at the start
    bool steady = false;            // all gradients of a tensor are of one size, and the same in each step
};

#define WITH(...) [](OptimConfig* c) { __VA_ARGS__; }
// Besides a case for each rule of the table.
static const Case with_options[] = {
    {"sgdw", "", WITH(c->decay_mode = "independent", c->lr_max = 0.25f)},
    {"sgdw-nesterov", "", WITH(c->limit_growth = 1.05f)},
    {"adafactor8bit", "", WITH(c->m = "none", c->limit_growth = 1.02f, c->clip_update = 0.3f)},
    {"adafactor8bit", "", WITH(c->limit_growth = 1.02f, c->adafactor_lr = "scaled")},
    {"came8bit", "", WITH(c->limit_growth = 1.01f, c->eps = 1e-3f)},
    {"came8bit", "", WITH(c->clip_update = 0.0f, c->adafactor_lr = "relative")},
    {"apollo", "", WITH(c->rank = 8, c->rank_gap = 2, c->rank_reset = true, c->limit_growth = 1.1f)},
    {"apollo-factored", "", WITH(c->rank = 8, c->rank_gap = 3, c->rank_reset = true)},
    {"adamw", "", WITH(c->decay_mode = "independent", c->lr_max = 0.25f)},
    {"lion", "", WITH(c->decay_mode = "independent", c->lr_max = 0.25f)},
    {"adamw", "ln*: lr=0.5; *.bias: wd=0.3; h.0: rule=lion; h.1: rule=sgd; wpe: lr=0.5"},
    {"adamw", "", WITH(c->limit_growth = 1.01f)},
    {"sgd", "", WITH(c->limit_growth = 1.05f)},
    {"rmnp", "none", WITH(c->limit_growth = 1.05f, c->nesterov = false)},
    {"normuon-lite", "none", WITH(c->nesterov = false)},
    {"adafactor", "", WITH(c->m = "none", c->clip_update = 0.3f)},
    {"adafactor", "", WITH(c->m = "none", c->clip_update = 0.0f, c->adafactor_lr = "paper")},
    {"adafactor", "", WITH(c->limit_growth = 1.02f, c->adafactor_lr = "scaled")},
    {"adafactor", "", WITH(c->adafactor_lr = "scaled"), 1.0f, 1e-5f},  // weights near zero
    {"adafactor", "", WITH(c->adafactor_lr = "scaled", c->eps1 = 0.3, c->eps2 = 0.3, c->beta2_decay = -0.5f)},
    {"came", "", WITH(c->limit_growth = 1.01f)},
    {"came", "", WITH(c->beta1 = 0.0f), 1e-10f, 1.0f, true},  // no residual
    {"muon", "", WITH(c->ns_coefficients = "polar-express", c->ns_steps = 8)},
    {"normuon", "", WITH(c->nesterov = false)},
    {"muon", "", WITH(c->momentum_warmup = 4, c->decay_mode = "cautious", c->lr_max = 2e-2f, c->weight_decay = 1.0f)},
    {"rmnp", "", WITH(c->momentum_warmup = 4, c->decay_mode = "falling", c->lr_max = 2e-2f, c->weight_decay = 1.0f)},
    {"galore", "", WITH(c->rank = 4, c->rank_gap = 100)},
    {"apollo", "", WITH(c->rank = 8)},
    {"galore", "h.1|h.2: rule=adamw", WITH(c->rank = 8)},  // all sides and ranks are multiples of 8
};
#undef WITH

static std::vector<Case> every_case() {
    std::vector<Case> all;
    for (const char* rule : RULE_NAMES) all.push_back({rule});
    all.insert(all.end(), std::begin(with_options), std::end(with_options));
    return all;
}
static const std::vector<Case> cases = every_case();

constexpr int STEPS = 6;
static bool steady;

// A tensor's gradients are of one size but for its rows' and columns'. Some matrix has none in the first step.
static float case_gradient(int64_t step, int t, int64_t i) {
    const float size = ldexpf(1.0f, (int)(i / model[t].cols % 3) - (int)(i % 3));
    if (steady) return test_uniform(3, t * 1000000 + i) > 0.0f ? 1.0f : -1.0f;
    return is(model[t].name, "h.1.mlp.c_proj.weight") && step == 1
               ? 0.0f
               : size * test_uniform(100 + (uint64_t)step, t * 1000000 + i);
}

// Returns what overrides say of a tensor: the factor of its learning rate, and its decay.
static Settings settings_of(const OptimRun* run, const OptimTensor& tensor, const RuleRow* rule) {
    Override changes[OVERRIDES];
    Settings its = {1.0, tensor.decay ? (double)run->config.weight_decay : 0.0};
    int count;
    if (!overrides_parse(run->config.overrides, changes, &count, error)) user_error("%s", error);
    if (is_low_rank(rule) && !is(run->config.decay_mode, "independent")) its.decay *= rule->slower;
    for (const Override* change = changes; change < changes + count; change++) {
        if (!patterns_match(change->patterns, tensor.name)) continue;
        its.lr *= change->lr;
        if (change->decay >= 0.0) its.decay = change->decay;
    }
    return its;
}

// Takes the steps for a part of a tensor.
template <class R>
static Whole<R> oracle_of(const Case& c, const OptimRun* run, int t, int part, bool rounds) {
    const OptimTensor& tensor = run->tensor[t];
    const Plan* plan = run->optim->plan;
    Whole<R> w;
    w.config = &launch_of(plan, t)->config;
    w.settings = settings_of(run, tensor, find_row(rule_table(), w.config->rule));
    w.rows = tensor.rows / tensor.parts, w.cols = tensor.cols;
    if (!w.config || !find_row(rule_table(), w.config->rule)->matrix) w.rows = tensor.rows;
    w.element = tensor.offset + part * w.size(), w.rounds = rounds;
    w.begin();
    for (int64_t i = 0; i < w.size(); i++) w.p[i] = (R)(c.size * run_start(t, part * w.size() + i));
    for (int step = 1; step <= STEPS; step++) {
        std::vector<R> g((size_t)w.size());
        for (int64_t i = 0; i < w.size(); i++) g[i] = R(0.5) * (R)case_gradient(step, t, part * w.size() + i);
        oracle_step(&w, g, (double)c.lr, step);
    }
    return w;
}

// How far numbers are off, in roundings of a weight and of what it moved by; of a matrix, of what its elements moved by
// in the mean.
template <class X>
static double roundings_off(const Whole<double>& want, const X* got) {
    const bool whole = find_row(rule_table(), want.config->rule)->matrix;
    const double mean = norm_of(want.moved) / sqrt((double)want.size());
    double worst = 0.0;
    for (int64_t i = 0; i < want.size(); i++) {
        const double moved = whole ? mean : want.moved[i] + mean * 0x1p-8;
        const double off = fabs((double)got[i] - want.p[i]) / (0x1p-24 * (fabs(want.p[i]) + moved) + 1e-300);
        if (!want.lost[i] && !(off <= worst)) worst = off;
    }
    return worst;
}

// Returns the error over its bound on a GPU. A polar factor's error is at most four times that of its roundings to
// fp16; a product of fp32 in parts of TF32, or the sums of one of bf16, cost 2^-10 of what the weights move by.
static double share_on_gpu(const Case& c, const OptimRun* run, const Whole<double>& want, int t, int part,
                           const float* got) {
    if (!is_low_rank(find_row(rule_table(), want.config->rule))) {
        const Whole<double> rounded = oracle_of<double>(c, run, t, part, true);
        return distance(want.p, got) / (4.0 * distance(rounded.p, want.p.data()));
    }
    return distance(want.p, got) / (norm_of(want.moved) / 1024.0);
}

// Returns the largest error over its bound.
static double check_case(Test* test, const Case& c, const char* grads, bool gpu) {
    OptimConfig config = make_config(c.rule, "fp32", "fp32");
    config.grads = grads, config.overrides = c.overrides, config.rank_gap = 2;
    c.change(&config);
    if (gpu) config.eps = 1e-2f;  // signs of numbers near zero are not decided by a product's last bits
    config = resolved(config);
    const int count = model_count(config);
    Steps how;
    OptimRun run;
    double worst = 0.0, most = 0.0;
    how.lr = c.lr, how.given = case_gradient, steady = c.steady;
    run_open(&run, &config, model, count, OPTIM_FP32, gpu);
    float* got = run.room.host<float>(run.elements);
    for (int t = 0; t < count && c.size != 1.0f; t++) {
        for (int64_t i = 0; i < model[t].rows * model[t].cols; i++) got[i] = c.size * run_start(t, i);
        optim_set_weights(run.optim, t, got);
    }
    run_steps(&run, 1, STEPS, how);
    for (int t = 0; t < count; t++) {
        const Plan* plan = run.optim->plan;
        const RuleRow* rule = launch_of(plan, t)->rows.rule;
        const int64_t rows = model[t].rows / model[t].parts, side = rows < model[t].cols ? rows : model[t].cols;
        if (gpu && (!rule->matrix || side < 16)) continue;  // of few numbers, roundings say too little about others
        optim_get_weights(run.optim, t, got);
        for (int part = 0; part < (rule->matrix ? model[t].parts : 1); part++) {
            const Whole<double> want = oracle_of<double>(c, &run, t, part, gpu && is(grads, "bf16"));
            const float* its = got + part * want.size();
            double off = gpu ? share_on_gpu(c, &run, want, t, part, its) : 0.0;
            if (!gpu) {
                const double usual = 4.0 * roundings_off(want, oracle_of<float>(c, &run, t, part, false).p.data());
                off = roundings_off(want, its) / fmax(usual, 4.0), most = fmax(most, usual);
            }
            expect(off <= 1.0, "%s, case %d: %s is off by %g of its bound from the formula in oracle.h",
                   described(config), (int)(&c - cases.data()), model[t].name, off);
            expect(norm_of(want.moved) > 0.0, "%s: %s does not move", c.rule, model[t].name);
            worst = fmax(worst, off);
        }
    }
    expect(most < 0x1p14 && worst > (gpu ? 1e-5 : 1e-3), "%s: the bound tells nothing: %g, of 2^-24 %g", c.rule, worst,
           most);
    note(test, "%s %.2g", c.rule, worst);
    return worst;
}

TEST(laws_oracle) {
    for (const Case& c : cases) check_case(test, c, "fp32", false);
}

JIT_TEST(laws_oracle_gpu) {
    CacheFolder folder;
    for (const Case& c : cases) {
        if (find_row(rule_table(), c.rule)->matrix) check_case(test, c, "fp32", true);
    }
    check_case(test, cases.back(), "bf16", true);  // whose products are of bf16
}
