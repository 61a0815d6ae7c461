// Computes the constants of a step (rules/hyper.cuh): bias corrections, schedulers, decay. The host computes them in
// double with operations that IEEE 754 defines, and rounds once, so that every machine gets the same bits. For a step
// in a CUDA graph, the device runs the same functions (placed.cu). Cost: some hundred operations for each group.
#pragma once
#include "optim.h"
#include "rules/hyper.cuh"
#include "storage.h"

struct Settings {
    double lr, decay;  // a factor on the step's learning rate; the weight decay
};

// Returns base^exponent by squaring. It uses products only, so every machine gets the same bits, which pow of a library
// does not promise.
OPTIM_INLINE double power(double base, int64_t exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent /= 2, base *= base) {
        if (exponent % 2) result *= base;
    }
    return result;
}

// Return ln(x) for 0 < x < 1, and exp(y), by their series, for the same reason. The series of the logarithm needs an
// argument near 1.
OPTIM_INLINE double logarithm(double x) {
    int halvings = 0;
    for (; x < 0.75; x *= 2.0) halvings++;
    double z = (x - 1.0) / (x + 1.0), term = z, sum = z;
    for (int k = 3; fabs(term) > 1e-17 * fabs(sum); k += 2) {
        term *= z * z;
        sum += term / k;
    }
    return 2.0 * sum - halvings * 0.6931471805599453;
}

OPTIM_INLINE double exponential(double y) {
    int halvings = 0;
    for (; fabs(y) > 0.25; y *= 0.5) halvings++;
    double term = y, sum = y;  // exp(y) - 1; doubling y makes it sum * (sum + 2)
    for (int k = 2; fabs(term) > 1e-18; k++) {
        term *= y / k;
        sum += term;
    }
    for (; halvings > 0; halvings--) sum *= sum + 2.0;
    return 1.0 + sum;
}

// The numbers from which the constants of any step are computed. The options have been rounded to fp32
// (optim_set_options). A device cannot read those that are texts.
struct HyperSource : RuleOptions {
    float lr_max;
    Settings settings;
    RowRule rows;
    bool independent, falls, cautious;  // --decay-mode
    bool keeps_m;                       // false: adafactor without m
    bool relative;                      // the learning rate is at most 1 / sqrt(step)
    bool grows;                         // RuleDefaults::GROWS
    bool of_norm;                       // of the update whose norm --limit-growth limits: the learning rate is 1
};

inline HyperSource hyper_source(const OptimConfig* config, const Settings* settings) {
    const RuleRow* rule = rule_of(config);
    HyperSource from = {};
    (RuleOptions&)from = *config;
    from.beta2_decay = round(1e6 * config->beta2_decay) / 1e6;  // fp32 made -0.8 into -0.800000012; round it back
    from.lr_max = config->lr_max, from.settings = *settings, from.rows = rule->rows, from.grows = rule->grows;
    const auto decays = [=](const char* mode) { return strcmp(config->decay_mode, mode) == 0; };
    from.independent = decays("independent"), from.cautious = decays("cautious");
    from.falls = from.cautious || decays("falling");
    from.keeps_m = strcmp(config->m, none_row()->name) != 0;
    from.relative = has_adafactor_lr(config, "relative");
    return from;
}

// Returns beta1 of a step. In a warm-up it rises linearly from 0.85.
OPTIM_INLINE double beta1_at(const HyperSource& from, int64_t step) {
    const double end = from.beta1, begin = end < 0.85 ? end : 0.85;
    return step < from.momentum_warmup ? begin + (end - begin) * ((double)step / (double)from.momentum_warmup) : end;
}

// Applies AdEMAMix's schedulers up to step `ramp`: alpha rises linearly from 0, and beta3 rises from beta1 so that 1 /
// ln(beta3), which is proportional to its half-life, is linear.
OPTIM_INLINE void ramp_create(const HyperSource& from, int64_t step, double* beta3, double* alpha) {
    *beta3 = from.beta3, *alpha = from.alpha;
    if (step >= from.ramp) return;
    double done = (double)step / (double)from.ramp;
    *alpha *= done;
    if (from.beta3 <= from.beta1 || from.beta3 <= 0.0) return;
    double start = from.beta1 > 0.0 ? 1.0 / logarithm(from.beta1) : 0.0;
    *beta3 = exponential(1.0 / ((1.0 - done) * start + done / logarithm(from.beta3)));
}

// Returns 1 - beta of an average of squares that began at 0. From the second step on it stays below 1: a + 1 * (x^2 -
// a) is 0, not x^2, if x^2 is far below a.
OPTIM_INLINE float one_minus_beta2_at(double beta, int64_t step) {
    const double rest = 1.0 - beta, max = step > 1 ? 1.0 - 0x1p-24 : 1.0;
    return (float)(rest < max ? rest : max);
}

// Returns 1 / sqrt(1 - beta^step), the bias correction for the root of an average that began at 0.
OPTIM_INLINE double bias_root(double beta, int64_t step) {
    return 1.0 / sqrt(1.0 - power(beta, step));
}

// Returns Adafactor's 1 - beta2, which is step^decay; decay is -0.8, say.
OPTIM_INLINE double adafactor_one_minus_beta2(double decay, int64_t step) {
    return step > 1 ? exponential(-decay * logarithm(1.0 / (double)step)) : 1.0;
}

// Sets what the formulas of adafactor and of the package adafactor8bit have of their own.
OPTIM_INLINE void factored_create(const HyperSource& from, int64_t step, double bias1, Hyper* hyper) {
    const bool fixed = from.rows == ROWS_CAME8;
    if (!from.keeps_m) hyper->one_minus_beta1 = 1.0f;
    if (is_package(from.rows)) {
        const double root = fixed ? sqrt(1.0 - power(from.beta2, step)) : 1.0;
        const bool corrects = from.keeps_m && !from.relative && !from.of_norm;
        hyper->step_size = corrects ? (float)((double)hyper->lr * root / bias1) : hyper->lr;
    }
    if (!fixed) hyper->one_minus_beta2 = (float)adafactor_one_minus_beta2(from.beta2_decay, step);
    hyper->root2 = 1.0f;
}

#define HYPER_SET(KIND, FIELD, ...) hyper.FIELD = (float)from.FIELD;

// Returns the constants of step number `step` (from 1) for the learning rate `rate`.
OPTIM_INLINE Hyper hyper_create(const HyperSource& from, double rate, int64_t step) {
    double beta1 = beta1_at(from, step), beta2 = from.beta2, beta3, alpha;
    if (from.relative && rate > 1.0 / sqrt((double)step)) rate = 1.0 / sqrt((double)step);
    double bias1 = 1.0 - power(beta1, step), lr = rate * from.settings.lr;
    // The norm is that of an update with a corrected m; otherwise the limit would hold m back when it starts.
    if (from.of_norm) lr = from.grows && from.keeps_m ? 1.0 / bias1 : 1.0;
    double decay_rate = from.independent ? rate / (double)from.lr_max
                        : from.falls     ? lr * (rate / (double)from.lr_max)
                                         : lr;
    ramp_create(from, step, &beta3, &alpha);
    Hyper hyper;
    hyper.lr = (float)lr;
    hyper.keep = (float)(1.0 - decay_rate * from.settings.decay);
    hyper.keep_away = from.cautious ? 1.0f : hyper.keep;
    hyper.decay = (float)from.settings.decay;
    hyper.step_size = (float)(lr / bias1);
    hyper.beta1 = (float)beta1;
    hyper.one_minus_beta1 = (float)(1.0 - beta1);
    hyper.nesterov_beta = from.nesterov ? hyper.beta1 : 1.0f;
    hyper.beta2 = (float)from.beta2;
    hyper.one_minus_beta2 = one_minus_beta2_at(beta2, step);
    hyper.root2 = (float)bias_root(beta2, step);
    HYPER_OPTIONS(HYPER_SET)
    hyper.beta3 = (float)beta3;
    hyper.one_minus_beta3 = (float)(1.0 - beta3);
    hyper.alpha = (float)(alpha * bias1);
    // `ahead` estimates the size of the steps that give the error back: lr / bias1, enlarged as if the learning rate
    // still rose from 0 in proportion to the step. This matters in a warm-up and fades after it. The first tens of
    // steps get back less than all of their error, since their bias1 is smaller than that of later steps. The lower
    // limit is for rates that end near 0; without it, m would hold errors that no later step can give back.
    double ahead = lr / bias1 * (1.0 + 1.0 / ((1.0 - beta1) * (double)step)),
           min = 0.01 * from.lr_max * from.settings.lr;
    ahead = ahead > min ? ahead : min;
    hyper.feedback = lr > 0.0 && beta1 > 0.0 ? (float)((1.0 - beta1) / beta1 / ahead) : 0.0f;
    if (from.rows == ROWS_ADAFACTOR || is_package(from.rows)) factored_create(from, step, bias1, &hyper);
    return hyper;
}
