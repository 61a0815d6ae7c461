// The constants of a step (rules/hyper.cuh): bias corrections, schedulers, decay. The host computes them in double with
// operations that IEEE 754 defines and rounds once, so that every machine finds the same.
#pragma once
#include "optim.h"
#include "rules/hyper.cuh"
#include "storage.h"

struct Settings {
    double lr, decay;  // factor on the step's learning rate; weight decay
};

// base^exponent by squaring: products alone, so the same bits on every machine, which a library's pow does not promise.
inline double power(double base, int64_t exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent /= 2, base *= base) {
        if (exponent % 2) result *= base;
    }
    return result;
}

// ln(x) for x > 0, and exp(y), by their series, for the same reason.
inline double logarithm(double x) {
    double z = (x - 1.0) / (x + 1.0), term = z, sum = z;
    for (int k = 3; fabs(term) > 1e-17 * fabs(sum); k += 2) {
        term *= z * z;
        sum += term / k;
    }
    return 2.0 * sum;
}

inline double exponential(double y) {
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

// AdEMAMix's schedulers: alpha rises linearly, beta3 from beta1 so that 1 / ln(beta3) does, which is its half-life.
inline void ramp_create(const OptimConfig* config, int64_t step, double* beta3, double* alpha) {
    *beta3 = config->beta3, *alpha = config->alpha;
    if (step >= config->ramp) return;
    double done = (double)step / (double)config->ramp;
    *alpha *= done;
    if (config->beta3 <= config->beta1 || config->beta3 <= 0.0f) return;
    double start = config->beta1 > 0.0f ? 1.0 / logarithm(config->beta1) : 0.0;
    *beta3 = exponential(1.0 / ((1.0 - done) * start + done / logarithm(config->beta3)));
}

// 1 / sqrt(1 - beta^step), by which the root of an average that began at 0 is multiplied.
inline double bias_root(double beta, int64_t step) {
    return 1.0 / sqrt(1.0 - power(beta, step));
}

// Adafactor's 1 - beta2: step^-0.8. The logarithm's series wants an argument near 1.
inline double adafactor_rest(int64_t step) {
    int halvings = 0;
    double x = 1.0 / (double)step;
    for (; x < 0.75; x *= 2.0) halvings++;
    return step > 1 ? exponential(0.8 * (logarithm(x) + halvings * logarithm(0.5))) : 1.0;
}

inline Hyper hyper_create(const OptimConfig* config, const Settings* settings, double rate, int64_t step) {
    double beta1 = config->beta1, beta2 = config->beta2, beta3, alpha;
    bool independent = strcmp(config->decay_mode, "independent") == 0;
    double bias1 = 1.0 - power(beta1, step), lr = rate * settings->lr;
    double decay_rate = independent ? rate / (double)config->lr_max : lr;
    ramp_create(config, step, &beta3, &alpha);
    Hyper hyper;
    hyper.lr = (float)lr;
    hyper.keep = (float)(1.0 - decay_rate * settings->decay);
    hyper.decay = (float)settings->decay;
    hyper.step_size = (float)(lr / bias1);
    hyper.beta1 = config->beta1;
    hyper.rest1 = (float)(1.0 - beta1);
    hyper.beta2 = config->beta2;
    hyper.rest2 = (float)(1.0 - beta2);
    hyper.root2 = (float)bias_root(beta2, step);
    hyper.eps = config->eps;
    hyper.beta3 = (float)beta3;
    hyper.rest3 = (float)(1.0 - beta3);
    hyper.alpha = (float)(alpha * bias1);
    // lr / bias1 of the next steps together, if the learning rate rises from 0 in proportion. Less than all of the
    // error of the first tens of steps comes back, since their bias1 is smaller than that of later steps. The lower
    // limit is for rates that end near 0: without it m would hold errors that no later step can pay back.
    double ahead = lr / bias1 * (1.0 + 1.0 / ((1.0 - beta1) * (double)step)),
           min = 0.01 * config->lr_max * settings->lr;
    ahead = ahead > min ? ahead : min;
    hyper.feedback = lr > 0.0 && beta1 > 0.0 ? (float)((1.0 - beta1) / beta1 / ahead) : 0.0f;
    const RuleRow* rule = find_row(rule_table(), config->rule);
    if (rule && rule->rows == ROWS_ADAFACTOR) {
        hyper.rest2 = (float)adafactor_rest(step);
        hyper.root2 = 1.0f;
        if (strcmp(config->m, none_row()->name) == 0) hyper.rest1 = 1.0f;
    }
    return hyper;
}
