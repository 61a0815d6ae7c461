// The tests of rules, weights and overrides share this: a configuration, test data, the cache of compiled kernels.
#pragma once
#include "../../optim/storage.h"
#include "cache.h"

inline bool is(const char* a, const char* b) {
    return strcmp(a, b) == 0;
}

template <int COUNT>
constexpr int name_count(const char* const (&)[COUNT]) {
    return COUNT;
}

// Formats whose scales reach further than a tile.
inline bool in_spans(const char* name) {
    return strstr(name, "/tensor") || strstr(name, "/rank1");
}

inline bool keeps_v(const char* rule) {
    return find_row(rule_table(), rule)->keeps_v;
}

// A configuration whose names are filled in; ends the test if it is refused.
inline OptimConfig resolved(OptimConfig config) {
    if (!optim_resolve(&config, error)) printf("    %s\n", error), exit(1);
    return config;
}

inline const char* described(const OptimConfig& config) {
    return optim_describe(&config);
}

// Returns the expression of a step's kernel, or of the kernel `name` for the same types.
inline const char* kernel_of(const OptimConfig& config, const char* name = nullptr, OptimType compute = OPTIM_BF16) {
    char step[4096];
    optim_expression(&config, compute, step, sizeof(step));
    return name ? formatted("%s%s", name, strchr(step, '<')) : strdup(step);
}

inline OptimConfig make_config(const char* rule, const char* weights, const char* state) {
    const char* v = keeps_v(rule) ? state : "";
    OptimConfig config = {{}, "", rule, weights, "fp32", state, v, 77};
    config.beta3 = 0.999f;
    config.alpha = 4.0f;
    config.ramp = 12;
    return resolved(config);
}

inline float start(int64_t i) {
    return test_uniform(5, i);
}

// Gradients of a step, over 20 powers of two.
inline float gradient(int64_t step, int64_t i) {
    int exponent = (int)(10.0f * test_uniform(2000, i));
    return i % 17 == 3 ? 0.0f : ldexpf(test_uniform(1000 + (uint64_t)step, i), exponent);
}
