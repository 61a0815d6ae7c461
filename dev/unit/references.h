// The rules' formulas in double, each with a bound on the error of fp32 arithmetic: rules.cu compares the optimizer
// with them, and peers.cu its steps with those of other optimizers.
#pragma once
#include "steps.h"

// A number and a bound on the error of the fp32 arithmetic that computes it: each operation adds its own rounding, u of
// its result, to what it inherits. Where the program fuses two operations the bound is the larger for it.
struct Bounded {
    double value, error;
};

static const double u = 1.0 / (1 << 24);

static Bounded constant(double value) {
    return {value, u * fabs(value)};
}

static Bounded operator*(Bounded a, Bounded b) {
    double value = a.value * b.value;
    return {value, fabs(a.value) * b.error + fabs(b.value) * a.error + a.error * b.error + u * fabs(value)};
}

static Bounded operator+(Bounded a, Bounded b) {
    return {a.value + b.value, a.error + b.error + u * fabs(a.value + b.value)};
}

static Bounded operator/(Bounded a, Bounded b) {
    double value = a.value / b.value;
    return {value, (a.error + fabs(value) * b.error) / (fabs(b.value) - b.error) + u * fabs(value)};
}

static Bounded root(Bounded a) {
    double value = sqrt(a.value);
    return {value, a.value > 0.0 ? a.error / value + u * value : sqrt(a.error)};
}

struct Element {
    Bounded p, m, v, slow;
    bool lost;  // lion: a sign was too close to call
};

// The arguments of a reference formula in a step: g is scaled already.
struct Given {
    Bounded g;
    double lr, wd, beta1, beta2, bias1, root2, eps, keep, beta3, alpha;
};

// The rules' formulas, from the papers and from PyTorch, one operation at a time.

static void reference_sgd(Element* e, const Given* c) {
    e->m = constant(c->beta1) * e->m + (c->g + constant(c->wd) * e->p);
    e->p = e->p + constant(-c->lr) * e->m;
}

static void reference_lion(Element* e, const Given* c) {
    Bounded sum = constant(c->beta1) * e->m + constant(1.0 - c->beta1) * c->g;
    e->lost = e->lost || (sum.error > 0.0 && fabs(sum.value) <= sum.error);
    e->p = constant(c->keep) * e->p + constant(-c->lr * (sum.value > 0.0 ? 1.0 : sum.value < 0.0 ? -1.0 : 0.0));
    e->m = constant(c->beta2) * e->m + constant(1.0 - c->beta2) * c->g;
}

// Adam's averages of `g` and its update of the kept weight, with `slow` times alpha added to the numerator.
static void reference_adams(Element* e, const Given* c, Bounded g, Bounded kept, bool slow) {
    e->m = constant(c->beta1) * e->m + constant(1.0 - c->beta1) * g;
    e->v = constant(c->beta2) * e->v + constant(1.0 - c->beta2) * g * g;
    Bounded numerator = e->m;
    if (slow) {
        e->slow = constant(c->beta3) * e->slow + constant(1.0 - c->beta3) * g;
        numerator = e->m + constant(c->alpha * c->bias1) * e->slow;
    }
    Bounded denominator = root(e->v) * constant(c->root2) + constant(c->eps);
    e->p = kept + constant(-c->lr / c->bias1) * (numerator / denominator);
}

static void reference_adamw(Element* e, const Given* c) {
    reference_adams(e, c, c->g, constant(c->keep) * e->p, false);
}

static void reference_adam(Element* e, const Given* c) {
    reference_adams(e, c, c->g + constant(c->wd) * e->p, e->p, false);
}

static void reference_nadamw(Element* e, const Given* c) {
    const Bounded before = e->p;
    reference_adamw(e, c);
    Bounded numerator = constant(c->beta1) * e->m + constant(1.0 - c->beta1) * c->g;
    Bounded denominator = root(e->v) * constant(c->root2) + constant(c->eps);
    e->p = constant(c->keep) * before + constant(-c->lr / c->bias1) * (numerator / denominator);
}

static void reference_ademamix(Element* e, const Given* c) {
    reference_adams(e, c, c->g, constant(c->keep) * e->p, true);
}

static const std::tuple<const char*, void (*)(Element* e, const Given* c)> reference_rules[] = {
    {"adamw", reference_adamw}, {"adam", reference_adam}, {"nadamw", reference_nadamw},
    {"lion", reference_lion},   {"sgd", reference_sgd},   {"ademamix", reference_ademamix},
    {"adam-mini", nullptr},  // rows.cu, since these read more
    {"adafactor", nullptr},     {"came", nullptr},        {"rmnp", nullptr},
    {"normuon-lite", nullptr}};
static_assert(sizeof(reference_rules) / sizeof(reference_rules[0]) == (size_t)name_count(SIMPLE_RULES),
              "a rule needs its formula here");

static void reference_step(Element* e, const OptimConfig* config, double gradient, double lr, bool decay, double step) {
    double wd = decay ? (double)config->weight_decay : 0.0, beta1 = config->beta1;
    bool independent = is(config->decay_mode, "independent");
    double done = step / (double)config->ramp, start = log(beta1), end = log((double)config->beta3);
    double beta3 = exp(start * end / ((1.0 - done) * end + done * start)), alpha = (double)config->alpha * done;
    if (done >= 1.0) beta3 = config->beta3, alpha = config->alpha;
    const Given given = {.g = {gradient, 0.0},
                         .lr = lr,
                         .wd = wd,
                         .beta1 = beta1,
                         .beta2 = config->beta2,
                         .bias1 = 1.0 - pow(beta1, step),
                         .root2 = 1.0 / sqrt(1.0 - pow((double)config->beta2, step)),
                         .eps = config->eps,
                         .keep = 1.0 - wd * (independent ? lr / (double)config->lr_max : lr),
                         .beta3 = beta3,
                         .alpha = alpha};
    for (const auto& [rule, step_of] : reference_rules)
        if (is(rule, config->rule)) return step_of(e, &given);
    printf("    %s has no formula in reference_rules\n", config->rule), exit(1);
}
