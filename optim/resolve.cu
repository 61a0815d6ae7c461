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

// Does the same for m, and refuses a format without negative numbers.
static bool resolve_m(const char* option, const char** name, char* error) {
    return resolve_state(option, name, error) &&
           (find_state(*name)->has_sign ||
            data_error(error, "%s: \"%s\" was found, which holds no negative numbers; it is for --v, take dyn8, say",
                       option, *name));
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

// Refuses a moment that the rule does not keep, and "none" for one that it does. `overridden`: an override gives a
// launch its rule or moments.
static bool moments_fit(const OptimConfig* config, bool overridden, char* error) {
    const RuleRow* rule = rule_of(config);
    const bool has_m = strcmp(config->m, NONE) != 0, has_v = strcmp(config->v, NONE) != 0;
    const bool needs_m = rule->rows != ROWS_ADAFACTOR && rule->rows != ROWS_ADAFACTOR8;
    if (!has_m && needs_m) {
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

bool optim_rule_fits(const OptimConfig* launch, const OptimConfig* run, char* error) {
    const RuleRow* rule = rule_of(launch);
    if (!moments_fit(launch, true, error)) return false;
    if ((float)launch->eps == 0.0f && divides_by_eps(rule)) {
        return data_error(error, "--eps: %g was found, %sand %s divides by it where v is 0; type --eps 1e-8",
                          launch->eps, launch->eps == 0.0 ? "" : "which is 0 in fp32, ", rule->name);
    }
    if (launch->limit_growth > 0.0f && rule->matrix && !low_rank_limits(launch)) {
        return data_error(
            error,
            "--limit-growth: %s sets the norm of its updates itself; type --limit-growth 0, or take --rule adamw",
            rule->name);
    }
    if (!rule->decoupled && strcmp(run->decay_mode, "coupled") != 0) {
        return data_error(
            error, "--decay-mode: \"%s\" was found, but %s adds the decay to the gradient; type --decay-mode coupled",
            run->decay_mode, rule->name);
    }
    return launch != run || rule->matrix || strcmp(run->decay_mode, "cautious") != 0 ||
           data_error(
               error,
               "--decay-mode: \"cautious\" is for rules that read matrices, and %s is none; type --decay-mode falling",
               rule->name);
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
    bool rules = false;  // an override names a rule; then, and in a part, plan_launch checks v where a tensor has it
    if (count == 0) config->overrides = "none";  // so that resolving again does not take the preset's
    for (int i = 0; i < count; i++) {
        const char *rule = overrides[i].rule, *weights = overrides[i].weights, *m = overrides[i].m, *v = overrides[i].v;
        if (*rule && !resolve_name(rule_table(), "--override rule", &rule, error)) return false;
        rules = rules || *rule;
        if (*weights && !resolve_name(weights_table(), "--override weights", &weights, error)) return false;
        if (*m && !resolve_m("--override m", &m, error)) return false;
        if (*v && !resolve_name(state_table(), "--override v", &v, error)) return false;
        if (*v && !rules && !config->part && !rule_of(config)->keeps_v) {
            return data_error(error, "--override: \"v=%s\" was found, but %s keeps no second moment", v, config->rule);
        }
    }
    return true;
}

bool optim_options_fit(const OptimConfig* config, char* error) {
    const RuleOptions* options = config;
    for (const Option& option : RULE_OPTION) {
        if (!config->placed && option_is_auto(&option, options)) continue;  // the trainer chooses it later
        if (!option_fits(&option, options, error)) return false;
    }
    return config->limit_growth == 0.0 || config->limit_growth >= 1.0 ||
           data_error(error, "--limit-growth %g was found and 0 or a number from 1 on is needed", config->limit_growth);
}

void optim_set_options(OptimConfig* config, const RuleOptions* options) {
    RuleOptions* to = config;
    *to = *options;
    for (const Option& option : RULE_OPTION) {
        double* number = (double*)((char*)to + option.offset);
        // A number that fp32 rounds to 0 stays, so that its refusal can name it.
        if (option.type == OPTION_REAL && (float)*number != 0.0f) *number = (float)*number;
    }
}

const char* weights_of_fp16(const char* name, bool typed) {
    if (typed && !text_among(name, "bf16|bf16:sr|bf16:ef|bf16+fp32|bf16+8|bf16+16", '|')) return name;
    return strchr(name, '+') ? "fp16+fp32" : strcmp(name, "bf16") == 0 ? "fp16" : "fp16:sr";
}

double optim_usual_rate(const char* rule) {
    const RuleRow* row = find_row(rule_table(), rule);
    return row ? 1.0 / row->slower : 1.0;
}

bool optim_resolve(OptimConfig* config, char* error) {
    if (!optim_options_fit(config, error)) return false;
    optim_set_options(config, config);
    take_default(&config->preset, PRESETS[0].name);
    if (!resolve_name(preset_table(), "--preset", &config->preset, error)) return false;
    const PresetRow* preset = find_row(preset_table(), config->preset);
    take_default(&config->rule, preset->rule);
    take_default(&config->weights, preset->weights);
    take_default(&config->grads, "");
    take_default(&config->m, preset->m);
    if (!resolve_name(rule_table(), "--rule", &config->rule, error)) return false;
    take_default(&config->v, rule_of(config)->keeps_v ? preset->v : NONE);
    return resolve_name(weights_table(), "--weights", &config->weights, error) &&
           resolve_name(grads_table(), "--grads", &config->grads, error) && moments_fit(config, false, error) &&
           resolve_m("--m", &config->m, error) && resolve_state("--v", &config->v, error) &&
           optim_feedback_fits(config, false, error) && resolve_overrides(config, error) &&
           optim_rule_fits(config, config, error);
}
