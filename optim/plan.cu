// See plan.h.
#include "plan.h"

#include <assert.h>

#include "../kernels/ranks/slices.cuh"
#include "matrix/low_rank.h"
#include "storage.h"

int64_t tensor_padded(const OptimTensor* tensor) {
    return ceil_div(tensor->rows * tensor->cols, TILE_ELEMENTS) * TILE_ELEMENTS;
}

// Finds or adds a format of weights, and returns its number.
static int plan_weights(Plan* plan, const FormatRow* format, const char* pattern) {
    for (int i = 0; i < plan->weights_count; i++) {
        if (plan->weights[i].format == format) return i;
    }
    plan->weights[plan->weights_count] = {format, pattern, {}};
    return plan->weights_count++;
}

// Finds or adds a launch, and returns its number. LAUNCHES bounds launches and so formats of weights, too. `pattern`
// has the patterns of the override that asked for the weights, and of the one that asked for the rule or moments, or
// else for the weights.
static int plan_launch(Plan* plan, const RuleRow* rule, const FormatRow* weights, const FormatRow* m,
                       const FormatRow* v, const char* const (&pattern)[2]) {
    const OptimConfig* config = &plan->launch[0].config;
    for (int i = 0; i < plan->launches; i++) {
        const LaunchPlan* known = &plan->launch[i];
        const bool same = known->rows.rule == rule && known->rows.weights == weights && known->rows.m == m;
        if (same && strcmp(known->config.v, v->name) == 0) return i;
    }
    if (plan->launches == LAUNCHES) {
        user_error(
            "--override: \"%s\" asks for one more combination of rule, weights, m and v than the %d that fit; take "
            "fewer",
            pattern[1], LAUNCHES);
    }
    LaunchPlan* launch = &plan->launch[plan->launches];
    *launch = {*config, {}, pattern[1], plan_weights(plan, weights, pattern[0]), {}, 0, {}};
    launch->config.rule = rule->name;
    launch->config.weights = weights->name;
    launch->config.m = m->name;
    launch->config.v = v->name;
    launch->rows = config_rows(&launch->config);
    char error[DATA_ERROR_BYTES];
    require(optim_rule_fits(&launch->config, config, error) && optim_feedback_fits(&launch->config, true, error),
            error);
    return plan->launches++;
}

// Finds or adds a group of constants, and returns its number.
static int plan_group(Plan* plan, double lr, double decay) {
    for (int i = 0; i < plan->groups; i++) {
        if (plan->group[i].lr == lr && plan->group[i].decay == decay) return i;
    }
    if (plan->groups == STEP_GROUPS) {
        user_error("--override asks for lr %g and wd %g beside the %d pairs that fit; take fewer", lr, decay,
                   STEP_GROUPS);
    }
    plan->group[plan->groups] = {lr, decay};
    return plan->groups++;
}

// Applies the overrides to one tensor.
static void plan_tensor(Plan* plan, const OptimTensor* tensor, int index) {
    const OptimConfig* config = &plan->launch[0].config;
    const char *rule = config->rule, *weights = config->weights, *m = config->m, *v = nullptr, *pattern[2] = {"", ""};
    bool of_rest = false;  // v comes from the override NON_MATRIX_TENSORS
    bool typed = false;    // the decay comes from an override
    double lr = 1.0, decay = tensor->decay ? (double)config->weight_decay : 0.0;
    for (int i = 0; i < plan->override_count; i++) {
        const Override* change = &plan->overrides[i];
        if (!patterns_match(change->patterns, tensor->name)) continue;
        if (*change->rule) rule = change->rule, pattern[1] = change->patterns;
        if (*change->weights) weights = change->weights, pattern[0] = change->patterns;
        if (*change->m) m = change->m, pattern[1] = change->patterns;
        if (*change->v) v = change->v, pattern[1] = change->patterns;
        if (*change->v) of_rest = strcmp(change->patterns, NON_MATRIX_TENSORS) == 0;
        if (change->decay >= 0.0) decay = change->decay, typed = true;
        lr *= change->lr;
    }
    if (!*pattern[1]) pattern[1] = pattern[0];
    const RuleRow* row = find_row(rule_table(), rule);
    const bool independent = strcmp(config->decay_mode, "independent") == 0;
    if (is_low_rank(row) && !independent && !typed) decay *= row->slower;
    const bool vector = tensor->rows == 1 && tensor->cols > 0;  // without elements here, other processes have them
    if (row->matrix && vector) {
        const char* advice = config->placed
                                 ? "give vectors and embeddings a group with an adamw preset, or type overrides="
                                 : "type --override ";
        user_error("%s updates matrices, and %s is a vector; %s\"%s: rule=adamw v=fp32\", say", row->name, tensor->name,
                   advice, config->placed ? tensor->name : NON_MATRIX_TENSORS);
    }
    if (!v || (of_rest && !row->keeps_v)) v = row->keeps_v ? config->v : none_row()->name;
    TensorPlan* own = &plan->tensor[index];
    own->launch = plan_launch(plan, row, find_row(weights_table(), weights), find_state(m), find_state(v), pattern);
    own->group = lr == 1.0 && decay == plan->group[1].decay && tensor->decay ? 1 : plan_group(plan, lr, decay);
    plan->launch[own->launch].tiles += tensor_padded(tensor) / TILE_ELEMENTS;
}

// Refuses a pattern that matches no tensor; patterns between | are checked one by one. A preset's patterns need not
// match.
static void plan_patterns(const Plan* plan, const OptimTensor* tensors, int count) {
    const OptimConfig* config = &plan->launch[0].config;
    if (config->part || strcmp(config->overrides, optim_preset_overrides(config->preset)) == 0) return;
    for (int i = 0; i < plan->override_count; i++) {
        if (strcmp(plan->overrides[i].patterns, NON_MATRIX_TENSORS) == 0) continue;
        for (const char *list = plan->overrides[i].patterns, *one; list && *list;) {
            one = text_word(&list, '|');
            int t = 0;
            while (t < count && !patterns_match(one, tensors[t].name)) t++;
            if (t < count) continue;
            user_error(
                "--override: \"%s\" matches no tensor; names are such as wte, wpe, ln*, c_attn.weight, *.bias or h.0",
                one);
        }
    }
}

// Makes a plan without runs of the arena (plan_ranges adds them). The tensors need no offsets yet.
static Plan* plan_create(const OptimConfig* config, const OptimTensor* tensors, int count) {
    Plan* plan = (Plan*)memory_zero(1, sizeof(Plan));
    char error[DATA_ERROR_BYTES];
    require(overrides_parse(config->overrides, plan->overrides, &plan->override_count, error), error);
    for (int i = 0; i < plan->override_count && config->of_fp16; i++)
        plan->overrides[i].weights = weights_of_fp16(plan->overrides[i].weights, true);
    plan->launch[0] = {*config, config_rows(config), "", 0, {}, 0, {}};
    plan->weights[0] = {plan->launch[0].rows.weights, "", {}};
    plan->weights_count = 1;
    plan->launches = 1;
    plan->group[0] = {1.0, 0.0};
    plan->group[1] = {1.0, (double)config->weight_decay};
    plan->groups = 2;
    plan->tensor = (TensorPlan*)memory_zero((size_t)count + 1, sizeof(TensorPlan));
    for (int t = 0; t < count; t++) plan_tensor(plan, &tensors[t], t);
    plan_patterns(plan, tensors, count);
    for (int i = 0; i < plan->launches; i++) {
        OptimConfig* own_config = &plan->launch[i].config;
        const bool own = plan->launch[i].rows.rule->has_momentum;
        if (own) own_config->beta1 = config->momentum;
        if (!own) own_config->momentum_warmup = 0;
        own_config->nesterov = config->nesterov || !own;
        if (!low_rank_limits(own_config)) continue;
        if (config->limit_growth > 0.0) own_config->rank_growth = (float)config->limit_growth;
        own_config->limit_growth = 0.0f;
    }
    return plan;
}

void plan_free(Plan* plan) {
    free(plan->tensor), free(plan);
}

int64_t optim_layout(OptimTensor* tensors, int count, const OptimConfig* config) {
    Plan* plan = config ? plan_create(config, tensors, count) : nullptr;
    int64_t offset = 0;
    for (int weights = 0; weights < (plan ? plan->weights_count : 1); weights++) {
        for (int launch = 0; launch < (plan ? plan->launches : 1); launch++) {
            if (plan && plan->launch[launch].weights != weights) continue;
            for (int i = 0; i < count; i++) {
                if (plan && plan->tensor[i].launch != launch) continue;
                tensors[i].offset = offset;
                offset += tensor_padded(&tensors[i]);
            }
        }
    }
    if (plan) plan_free(plan);
    return offset;
}

// Sets the part of a tensor that is kept here.
static void plan_here(Plan* plan, int t, const OptimTensor* tensor) {
    const OptimConfig* config = &plan->launch[0].config;
    const int64_t begin = tensor->offset, end = begin + tensor_padded(tensor);
    KeptPart* here = &plan->tensor[t].here;
    *here = {0, config->runs ? 0 : end - begin};
    for (int i = 0; i < config->run_count && config->runs; i++) {
        const SliceRun* run = &config->runs[i];
        const int64_t low = run->tile * TILE_ELEMENTS, high = low + run->tiles * TILE_ELEMENTS;
        if (low >= end || high <= begin) continue;
        assert(here->begin == here->end);
        *here = {low > begin ? low - begin : 0, (high < end ? high : end) - begin};
    }
    const bool whole = here->end - here->begin == end - begin || is_elsewhere(plan, t);
    assert(whole || !config_reads_whole(&launch_of(plan, t)->config));
    (void)whole;
}

KeptPart kept_part(const Plan* plan, int t, Slot slot) {
    // Moments of projected gradients are smaller, and whole.
    const int64_t padded = tensor_padded(&plan->tensor[t].kept[slot]);
    KeptPart part = plan->tensor[t].here;
    if (part.end > padded) part.end = padded;
    return part;
}

void optim_slice(const OptimConfig* config, const OptimTensor* tensors, int count, int64_t* grain, int64_t* cost) {
    Plan* plan = plan_create(config, tensors, count);
    for (int t = 0; t < count; t++) {
        const LaunchPlan* launch = launch_of(plan, t);
        double bytes = 0.0;
        for (int slot = SLOT_WEIGHTS; slot <= SLOT_SLOW; slot++) {
            bytes += format_bytes_each(slot_format(launch, (Slot)slot));
        }
        grain[t] = config_reads_whole(&launch->config) ? tensor_padded(&tensors[t]) / TILE_ELEMENTS : 1;
        cost[t] = 1 + (int64_t)(bytes * TILE_ELEMENTS);
    }
    plan_free(plan);
}

// Places a launch's tensors behind those of earlier launches, and their numbers of spans behind the `numbers` that
// these have.
static void plan_place(Plan* plan, int index, const OptimTensor* tensors, int count, int64_t (&numbers)[SPANS]) {
    LaunchPlan* launch = &plan->launch[index];
    ArenaRun* run = &launch->run;
    const Span ready = format_span(launch->rows.v);
    run->begin = plan->elements;
    memcpy(run->at, numbers, sizeof(numbers));
    for (int t = 0; t < count; t++) {
        TensorPlan* own = &plan->tensor[t];
        if (own->launch != index) continue;
        for (OptimTensor& kept : own->kept) kept = tensors[t], kept.offset = plan->elements - own->here.begin;
        own->noise = tensors[t].offset;
        plan->elements += own->here.end - own->here.begin;
        for (int span = 0; span < SPANS && !is_elsewhere(plan, t); span++) {
            const int64_t more = span_numbers((Span)span, &tensors[t]);
            own->at[span] = numbers[span];
            numbers[span] += more, run->numbers[span] += more;
        }
        own->ready = run->ready;
        if (!is_elsewhere(plan, t)) run->ready += ready_numbers(ready, &tensors[t]);
    }
    run->end = plan->elements;
    launch->tiles = (run->end - run->begin) / TILE_ELEMENTS;
}

// Since optim_layout was called with this configuration, the tensors of a launch follow each other in the arena.
Plan* plan_ranges(const OptimConfig* config, const OptimTensor* tensors, int count) {
    Plan* plan = plan_create(config, tensors, count);
    int64_t numbers[SPANS] = {};
    for (int t = 0; t < count; t++) plan_here(plan, t, &tensors[t]);
    for (int w = 0; w < plan->weights_count; w++) {
        ArenaRun* run = &plan->weights[w].run;
        run->begin = plan->elements;
        memcpy(run->at, numbers, sizeof(numbers));
        for (int l = 0; l < plan->launches; l++) {
            if (plan->launch[l].weights == w) plan_place(plan, l, tensors, count, numbers);
        }
        run->end = plan->elements;
        for (int span = 0; span < SPANS; span++) run->numbers[span] = numbers[span] - run->at[span];
    }
    for (int i = 0; i < plan->launches; i++) {
        LaunchPlan* launch = &plan->launch[i];
        int t = 0;
        for (int slot = 0; slot < SLOTS; slot++) launch->kept[slot] = launch->run;
        while (t < count && plan->tensor[t].launch != i) t++;
        if (is_low_rank(launch->rows.rule) && t < count) plan_low(plan, i, tensors[t].offset, tensors, count);
    }
    return plan;
}

bool optim_releases(const OptimConfig* config, const OptimTensor* tensors, int count, char* error) {
    Plan* plan = plan_ranges(config, tensors, count);
    bool ok = true;
    for (int i = 0; i < plan->launches && ok; i++) {
        const RuleRow* rule = plan->launch[i].rows.rule;
        ok = !rule->matrix || (!is_low_rank(rule) && !config->placed);
        if (!ok) data_error(error, "the rule %s takes all matrices of a shape together", rule->name);
    }
    plan_free(plan);
    return ok;
}

const FormatRow* slot_format(const LaunchPlan* launch, Slot slot) {
    const Rows rows = launch->rows;
    if (slot == SLOT_WEIGHTS) return rows.weights;
    if (slot == SLOT_M) return rows.m;
    if (slot == SLOT_V) return rows.v;
    if (slot == SLOT_SLOW && rows.rule->keeps_slow) return rows.m;
    if (slot == SLOT_BASIS && is_low_rank(rows.rule)) return find_row(state_table(), "fp32");
    return slot == SLOT_NORMS && launch->config.limit_growth > 0.0f ? norms_row() : none_row();
}

const char* slot_name(Slot slot) {
    static const char* const names[SLOTS] = {"weights", "m", "v", "slow", "basis", "norms"};
    return names[slot];
}

void stream_name(const Plan* plan, int index, Slot slot, const StreamInfo& stream, char* name, size_t bytes) {
    static_assert(OVERRIDE_PATTERNS + sizeof("weights.16[].scales") < ARRAY_NAME_BYTES, "names are whole");
    const char* pattern = slot == SLOT_WEIGHTS ? plan->weights[index].pattern : plan->launch[index].pattern;
    const bool own_name = stream.name[0] && stream.name[0] != '.';
    char array[ARRAY_NAME_BYTES];
    snprintf(array, sizeof(array), index ? "%s.%d[%s]" : "%s", slot_name(slot), index, pattern);
    snprintf(name, bytes, "%s%s%s", own_name && !index ? "" : array, own_name && index ? "." : "", stream.name);
}

int64_t stream_bytes(const StreamInfo& stream, int64_t elements) {
    return stream.span != SPAN_RUN ? 0 : ceil_div(ceil_div(elements, stream.run) * stream.bits, 8);
}

int64_t next_bytes(const ArenaRun* run, Span span) {
    return (is_by_rows(span) ? run->ready : run->numbers[span]) * (int64_t)sizeof(float);
}

int64_t run_bytes(const ArenaRun* run, const StreamInfo& stream) {
    if (stream.span != SPAN_RUN) return stream.bits ? run->numbers[stream.span] * (int64_t)sizeof(float) : 0;
    return stream_bytes(stream, run->end - run->begin);
}
