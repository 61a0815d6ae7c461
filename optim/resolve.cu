// Implements optim_resolve: checks the names and values of a configuration and fills in defaults. A mistake is reported
// by one sentence that names the option, what was found and what to type.
#include "matrix/low_rank.h"
#include "storage.h"
#include "optim.h"
#include "override.h"
#include "table.cuh"

static const char NONE[] = "none";  // the format of a state that a rule does not keep

const char* optim_preset(int i) {
    return i < preset_table().count ? preset_table().row[i].name : nullptr;
}

const char* optim_preset_overrides(const char* preset) {
    const PresetRow* row = find_row(preset_table(), preset);
    return row ? row->overrides : "";
}

// Looks a name up and completes it. If it is unknown, the sentence lists the known names and suggests the nearest.
template <class Row>
static bool resolve_name(const Table<Row>& table, const char* option, const char** name, char* error) {
    const Row* row = find_row(table, *name);
    if (row) *name = row->name;
    return row || name_unknown(table, option, *name, error);
}

// Does the same for a moment, which may be "none".
static bool resolve_state(const char* option, const char** name, char* error) {
    return strcmp(*name, NONE) == 0 || resolve_name(state_table(), option, name, error);
}

static void take_default(const char** name, const char* preset) {
    if (!*name || !**name) *name = preset;
}

// Returns the part of a sentence that says what a rule keeps in place of v.
static const char* kept_by_rows(const RuleRow* rule) {
    const Span span = rule->by_rows ? format_span(numbers_row(rule)) : SPAN_RUN;
    if (span == SPAN_FACTORS || span == SPAN_PAIRS) return " but fp32 numbers by row and column";
    return rule->by_rows && rule->rows != ROWS_RMNP ? " but one fp32 number a row" : "";
}

// Returns true if a rule can do without m.
static bool can_drop_m(const RuleRow* rule) {
    return rule->rows == ROWS_ADAFACTOR || rule->rows == ROWS_ADAFACTOR8;
}

// Refuses a moment that the rule does not keep, and "none" for one that it does. `overridden`: an override gives a
// launch its rule or moments.
static bool moments_fit(const OptimConfig* config, bool overridden, char* error) {
    const RuleRow* rule = rule_of(config);
    const bool has_m = strcmp(config->m, NONE) != 0, has_v = strcmp(config->v, NONE) != 0;
    if (!has_m && !can_drop_m(rule)) {
        return data_error(error, "%s \"none\" was found, but %s keeps a first moment; type %s, say, or take adafactor",
                          overridden ? "--override: m" : "--m:", rule->name, overridden ? "m=fp32" : "--m fp32");
    }
    if (has_v && !rule->keeps_v) {
        return data_error(error, "%s \"%s\" was found, but %s keeps no second moment%s; leave %s out",
                          overridden ? "--override: v" : "--v:", config->v, rule->name, kept_by_rows(rule),
                          overridden ? "it" : "--v");
    }
    if (has_v || !rule->keeps_v) return true;
    return data_error(error, "%s \"none\" was found, but %s keeps a second moment; type %s, say",
                      overridden ? "--override: v" : "--v:", rule->name, overridden ? "v=fp32" : "--v fp32");
}

// Refuses a format without negative numbers for m.
static bool resolve_sign(const char* option, const char* m, char* error) {
    if (find_state(m)->has_sign) return true;
    return data_error(error, "%s: \"%s\" was found, which holds no negative numbers; it is for --v, take dyn8, say",
                      option, m);
}

// m can take the weights' rounding error if the update divides m by the root of v, if m is stored in one pass, and if
// it can hold the error, which 4 bits cannot (optim/README.md has figures).
bool optim_feedback_fits(const OptimConfig* config, bool overridden, char* error) {
    const Rows rows = config_rows(config);
    if (config->stored || !rows.weights->feeds_back) return true;
    const char* type = overridden ? "m=e4m3:sr" : "--m e4m3:sr";
    char why[256];
    if (config->limit_growth > 0.0f) {
        type = "--limit-growth 0";
        snprintf(why, sizeof(why), "--limit-growth cuts the updates that give the errors back");
    } else if (rows.rule->matrix) {
        type = overridden ? "rule=adamw" : "--rule adamw";
        snprintf(why, sizeof(why), "%s's m passes through products of whole matrices", config->rule);
    } else if (!rows.rule->divides_by_root_v) {
        type = overridden ? "rule=adamw" : "--rule adamw";
        snprintf(why, sizeof(why), "%s does not divide by a root of v", config->rule);
    } else if (config->beta1 == 0.0f) {
        type = "--beta1 0.9";
        snprintf(why, sizeof(why), "with --beta1 0 m keeps nothing");
    } else if (format_span(rows.m) != SPAN_RUN) {
        snprintf(why, sizeof(why), "m \"%s\" has scales of more than a block", config->m);
    } else if (rows.m->stream[0].bits <= 4) {
        snprintf(why, sizeof(why), "m \"%s\" has 4 bits, too few for the errors", config->m);
    } else {
        return true;
    }
    int base = (int)strcspn(config->weights, ":");
    return data_error(error,
                      "%s: weights \"%s\" were found, whose rounding errors go into m, but %s; type %s, or %s%.*s:sr",
                      overridden ? "--override" : "--weights", config->weights, why, type,
                      overridden ? "weights=" : "--weights ", base, config->weights);
}

static bool resolve_decay_mode(const OptimConfig* config, char* error) {
    const RuleRow* rule = rule_of(config);
    const char* mode = config->decay_mode;
    if (!text_among(mode, "coupled|independent|falling|cautious", '|')) {
        return data_error(error, "--decay-mode: \"%s\" is not known; type coupled, independent, falling or cautious",
                          mode);
    }
    if (strcmp(mode, "coupled") != 0 && !rule->decoupled) {
        return data_error(error, "--decay-mode: \"%s\" was found, but %s adds the decay to the gradient; type coupled",
                          mode, config->rule);
    }
    return strcmp(mode, "cautious") != 0 || rule->matrix ||
           data_error(error, "--decay-mode: \"cautious\" is for rules that read matrices, and %s is none; type falling",
                      config->rule);
}

bool optim_rule_fits(const OptimConfig* launch, const OptimConfig* run, char* error) {
    const RuleRow* rule = rule_of(launch);
    if (!moments_fit(launch, true, error)) return false;
    if (launch->limit_growth > 0.0f && rule->matrix && !low_rank_limits(launch)) {
        return data_error(
            error,
            "--limit-growth: %s sets the norm of its updates itself; type --limit-growth 0, or take --rule adamw",
            rule->name);
    }
    if (!rule->decoupled && strcmp(run->decay_mode, "coupled") != 0) {
        return data_error(error,
                          "--override: \"rule=%s\" was found, but it adds the decay to the gradient, which excludes "
                          "--decay-mode %s; type --decay-mode coupled",
                          rule->name, run->decay_mode);
    }
    return true;
}

// Puts the override NON_MATRIX_TENSORS first, since rules of matrices, rmnp and normuon-lite leave some tensors to
// adamw. The preset's override is taken if the preset has such a rule and its formats are used (`its`); otherwise adamw
// gets the preset's moments, or fp32 if the preset keeps no v. The typed overrides follow, or else the preset's.
// Nothing is added if these begin with NON_MATRIX_TENSORS already or are "none".
static void rest_overrides(OptimConfig* config, const PresetRow* preset, bool its) {
    const bool has_v = strcmp(preset->v, NONE) != 0,
               own = find_row(rule_table(), preset->rule)->leaves_vectors_to_adamw;
    const char* more = config->overrides && *config->overrides ? config->overrides
                       : its && !own                           ? preset->overrides
                                                               : "";
    char rest[256];
    if (strcmp(more, NONE) == 0 || strncmp(more, NON_MATRIX_TENSORS, strlen(NON_MATRIX_TENSORS)) == 0) return;
    const double slower = rule_of(config)->slower;
    const int used = snprintf(rest, sizeof(rest), "%s: rule=adamw m=%s v=%s", NON_MATRIX_TENSORS,
                              has_v ? preset->m : "fp32", has_v ? preset->v : "fp32");
    // Muon's rate suits its embeddings too; others give adamw its usual rate.
    const bool own_rate = slower != 1.0 && !rule_of(config)->has_momentum;
    if (own_rate) snprintf(rest + used, sizeof(rest) - used, " lr=%g", slower);
    if (its && own) snprintf(rest, sizeof(rest), "%s", preset->overrides);
    config->overrides = text_format("%s%s%s", rest, *more ? "; " : "", more);
}

// Takes the preset's overrides if its formats are used, and checks the overrides. A checkpoint has only overrides that
// it names.
static bool resolve_overrides(OptimConfig* config, char* error) {
    const PresetRow* preset = find_row(preset_table(), config->preset);
    const bool own = strcmp(config->weights, preset->weights) == 0 && strcmp(config->m, preset->m) == 0 &&
                     (strcmp(config->v, preset->v) == 0 || !rule_of(config)->keeps_v);
    const bool rest = rule_of(config)->leaves_vectors_to_adamw;
    if (rest && !config->stored) rest_overrides(config, preset, own);
    if (own && !rest && !config->stored) take_default(&config->overrides, preset->overrides);
    Override overrides[OVERRIDES];
    int count;
    if (!overrides_parse(config->overrides, overrides, &count, error)) return false;
    bool rules = false;  // an override names a rule; then optim_rule_fits checks v for each combination
    if (count == 0) config->overrides = "none";  // so that resolving again does not take the preset's
    for (int i = 0; i < count; i++) {
        const char *rule = overrides[i].rule, *weights = overrides[i].weights, *m = overrides[i].m, *v = overrides[i].v;
        if (*rule && !resolve_name(rule_table(), "--override rule", &rule, error)) return false;
        rules = rules || *rule;
        if (*weights && !resolve_name(weights_table(), "--override weights", &weights, error)) return false;
        if (*m && !resolve_state("--override m", &m, error)) return false;
        if (*m && !resolve_sign("--override m", m, error)) return false;
        if (*v && !resolve_name(state_table(), "--override v", &v, error)) return false;
        if (*v && !rules && !rule_of(config)->keeps_v) {
            return data_error(error, "--override: \"v=%s\" was found, but %s keeps no second moment", v, config->rule);
        }
    }
    return true;
}

bool optim_numbers_fit(const OptimConfig* c, char* error) {
    const char *part = "a number from 0 to below 1", *any = "a number from 0 on";
    const auto below_1 = [](float x) { return x >= 0.0f && x < 1.0f; };
    const auto finite = [](float x) { return x >= 0.0f && x < INFINITY; };
    const float growth = c->limit_growth;
    const struct {
        const char* option;
        double value;
        bool fits;
        const char* range;
    } numbers[] = {
        {"--rank", (double)c->rank, c->rank >= 0 && c->rank <= 65536, "a number from 0 to 65536"},
        {"--rank-gap", (double)c->rank_gap, c->rank_gap >= 0, any},
        {"--rank-scale", c->rank_scale, finite(c->rank_scale), any},
        {"--momentum", c->momentum, below_1(c->momentum), part},
        {"--ns-steps", (double)c->ns_steps, c->ns_steps >= 1 && c->ns_steps <= 100, "a number from 1 to 100"},
        {"--limit-growth", growth, growth == 0.0f || (growth >= 1.0f && finite(growth)), "0 or a number from 1 on"},
        {"--clip-update", c->clip_update, finite(c->clip_update), any},
        {"--beta1", c->beta1, below_1(c->beta1), part},
        {"--beta2", c->beta2, below_1(c->beta2), part},
        {"--eps", c->eps, c->eps > 0.0f && c->eps <= 1.0f, "a number above 0, at most 1"},
        {"--beta3", c->beta3, below_1(c->beta3), part},
        {"--alpha", c->alpha, finite(c->alpha), any},
        {"--weight-decay", c->weight_decay, finite(c->weight_decay), any},
    };
    for (const auto& each : numbers) {
        if (each.fits) continue;
        return data_error(error, "%s: %g was found and %s is needed", each.option, each.value, each.range);
    }
    return true;
}

static bool resolve_matrix(const OptimConfig* config, char* error) {
    NewtonSchulz coefficients;
    return newton_schulz_coefficients(config->ns_coefficients, 0, &coefficients) ||
           data_error(error, "--ns-coefficients: \"%s\" is not known; type %s", config->ns_coefficients,
                      NEWTON_SCHULZ_NAMES);
}

double optim_usual_rate(const char* rule) {
    const RuleRow* row = find_row(rule_table(), rule);
    return row ? 1.0 / row->slower : 1.0;
}

double optim_usual_beta3(const char* rule, double beta2, int64_t steps) {
    if (strncmp(rule, "came", 4) == 0) return 1.0 - 0.1 * (1.0 - beta2);
    return steps > 30 ? fmin(0.9999, 1.0 - 3.0 / (double)steps) : 0.9;
}

bool optim_resolve(OptimConfig* config, char* error) {
    take_default(&config->preset, PRESETS[0].name);
    if (!resolve_name(preset_table(), "--preset", &config->preset, error)) return false;
    const PresetRow* preset = find_row(preset_table(), config->preset);
    take_default(&config->rule, preset->rule);
    take_default(&config->weights, preset->weights);
    take_default(&config->grads, "");
    take_default(&config->m, preset->m);
    take_default(&config->decay_mode, "coupled");
    if (!resolve_name(rule_table(), "--rule", &config->rule, error)) return false;
    take_default(&config->v, rule_of(config)->keeps_v ? preset->v : NONE);
    return resolve_name(weights_table(), "--weights", &config->weights, error) &&
           resolve_name(grads_table(), "--grads", &config->grads, error) && moments_fit(config, false, error) &&
           resolve_state("--m", &config->m, error) && resolve_sign("--m", config->m, error) &&
           resolve_state("--v", &config->v, error) && optim_feedback_fits(config, false, error) &&
           resolve_decay_mode(config, error) && resolve_overrides(config, error) && resolve_matrix(config, error) &&
           optim_rule_fits(config, config, error) && optim_numbers_fit(config, error);
}
