// The options of update rules. A row is all that an option needs beside the code that reads its field: from it follow
// --name with its range, refusals and line of --help, config.json and resumes (options.h), the field of OptimConfig
// (optim/optim.h), the setting of the C library (optim/nibble_optim.h), the argument of the Python package, and tests.
#pragma once
#include "option.h"
C_LINKAGE_BEGIN

#define OF_MOMENTUM "rule=muon|normuon|rmnp|normuon-lite"
#define OF_LOW_RANK "rule=galore|fira|apollo|apollo-mini|apollo-factored"

// ROW(KIND, field, default, name, typed default, low, high, values, needs, help)
//     KIND           REAL, INT, CHOICE or SWITCH (option.h)
//     default        of OptimConfig, and so of the library
//     name           of the trainer's option: the field's, with '-' for '_'
//     typed default  the trainer's; "auto": data/schedule.h chooses it
//     low, high      range of a number
//     needs          "rule=" and the rules that read the option, which is refused beside others; "": any may
// HYPER_OPTIONS are numbers that the kernels of rules read, each as a float hyper.FIELD (optim/rules/hyper.cuh).
#define HYPER_OPTIONS(ROW) ROW(REAL, eps, 1e-8, "eps", "1e-8", 0, 1, "F", "", "added to the root of v")
#define RULE_OPTIONS(ROW)                                                                                              \
    ROW(REAL, beta1, 0.9, "beta1", "0.9", 0, 0.99999995, "F", "", "decay of m")                                        \
    ROW(REAL, beta2, 0.95, "beta2", "auto", 0, 0.99999995, "F", "",                                                    \
        "decay of v; auto: it halves in 10M tokens or a twentieth of the run, at least 0.95; 0.95 if v is not "        \
        "adamw's or has @dq8")                                                                                         \
    HYPER_OPTIONS(ROW)                                                                                                 \
    ROW(REAL, weight_decay, 0.1, "weight-decay", "auto", 0, 1e38, "F", "",                                             \
        "of matrices and embeddings; auto: 0.1; muon, normuon: 4 / (steps x lr), from 0.05 to 0.4")                    \
    ROW(CHOICE, decay_mode, "coupled", "decay-mode", "coupled", 0, 0, "coupled|independent|falling|cautious", "",      \
        "coupled: lr x F; independent: F x lr / --lr; falling: lr x F x lr / --lr; cautious: that, but not where "     \
        "an update moves a matrix's weight away from 0")                                                               \
    ROW(REAL, beta3, 0.9999, "beta3", "auto", 0, 0.99999995, "F", "rule=ademamix|came|came8bit",                       \
        "decay of ademamix's slow average; auto: it remembers a third of the run, at most 10000 steps; of came's "     \
        "confidence; auto: 1 - (1 - beta2) / 10")                                                                      \
    ROW(REAL, alpha, 5, "alpha", "2", 0, 1e38, "F", "rule=ademamix", "weight of the slow average")                     \
    ROW(INT, ramp, 0, "ramp", "auto", 0, 1e12, "N", "rule=ademamix",                                                   \
        "steps until beta3 and alpha are reached; auto: all")                                                          \
    ROW(REAL, momentum, 0.95, "momentum", "0.95", 0, 0.99999995, "F", OF_MOMENTUM, "decay of m")                       \
    ROW(INT, momentum_warmup, 0, "momentum-warmup", "auto", 0, 1e9, "N", OF_MOMENTUM,                                  \
        "steps in which the momentum rises from 0.85; auto: muon, normuon with 32k tokens a step or more: a quarter "  \
        "of the run, at most 300; else 0")                                                                             \
    ROW(SWITCH, nesterov, true, "nesterov", "on", 0, 0, "on|off", OF_MOMENTUM, "step by m and gradient; off: m alone") \
    ROW(INT, ns_steps, 5, "ns-steps", "5", 1, 100, "N", "rule=muon|normuon", "steps of Newton-Schulz")                 \
    ROW(CHOICE, ns_coefficients, "jordan", "ns-coefficients", "jordan", 0, 0, "jordan|polar-express",                  \
        "rule=muon|normuon", "coefficients of Newton-Schulz")                                                          \
    ROW(INT, rank, 0, "rank", "0", 0, 65536, "N", "rule=galore|fira|apollo|apollo-factored",                           \
        "rank of the moments; 0: shorter side / 4")                                                                    \
    ROW(INT, rank_gap, 0, "rank-gap", "0", 0, 1e9, "N", OF_LOW_RANK,                                                   \
        "steps until the directions change; 0: 200, apollos 10")                                                       \
    ROW(REAL, rank_scale, 0, "rank-scale", "0", 0, 1e38, "F", OF_LOW_RANK, "factor of the update; 0: the rule's")      \
    ROW(SWITCH, rank_reset, false, "rank-reset", "off", 0, 0, "on|off", OF_LOW_RANK,                                   \
        "moments begin anew with new directions")                                                                      \
    ROW(CHOICE, adafactor_lr, "plain", "adafactor-lr", "plain", 0, 0, "plain|relative|scaled|paper",                   \
        "rule=adafactor|adafactor8bit|came8bit",                                                                       \
        "relative: at most 1/sqrt(step); scaled: times the weights' RMS; paper: both, so take --lr 0.01")              \
    ROW(REAL, eps1, 0, "eps1", "0", 0, 1, "F", "rule=adafactor",                                                       \
        "least mean of v over rows; its square is the least v of a row and of a column")                               \
    ROW(REAL, eps2, 1e-3, "eps2", "0.001", 0, 1e38, "F", "rule=adafactor|adafactor8bit|came8bit",                      \
        "least RMS of the weights in --adafactor-lr scaled or paper")                                                  \
    ROW(REAL, beta2_decay, -0.8, "beta2-decay", "-0.8", -100, 0, "F", "rule=adafactor|adafactor8bit",                  \
        "1 - beta2 is step^F; F has up to six decimals")                                                               \
    ROW(REAL, clip_update, 1, "clip-update", "1.0", 0, 1e38, "F", "rule=adafactor|came|adafactor8bit|came8bit",        \
        "largest RMS of an update; 0: any")                                                                            \
    ROW(REAL, limit_growth, 0, "limit-growth", "0", 0, 1e38, "F", "", "growth of updates; 0: none (fira, apollos 1.01)")

#define RULE_OPTION_REAL double
#define RULE_OPTION_INT long long
#define RULE_OPTION_CHOICE const char*
#define RULE_OPTION_SWITCH bool
#ifdef __cplusplus
#define RULE_OPTION_FIELD(KIND, FIELD, DEFAULT, ...) RULE_OPTION_##KIND FIELD = DEFAULT;
#else
#define RULE_OPTION_FIELD(KIND, FIELD, ...) RULE_OPTION_##KIND FIELD;
#endif
// The values. In C++ they begin as OptimConfig's defaults.
typedef struct RuleOptions {
    RULE_OPTIONS(RULE_OPTION_FIELD)
} RuleOptions;

#define RULE_OPTION_ONE(...) +1
enum { RULE_OPTION_COUNT = RULE_OPTIONS(RULE_OPTION_ONE) };
extern const Option RULE_OPTION[RULE_OPTION_COUNT];  // offsets are those in RuleOptions

// Returns the row of an option, whose name may have '_' for '-'; NULL: there is none.
const Option* rule_option_find(const char* name);

C_LINKAGE_END
