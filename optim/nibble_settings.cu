// See nibble_settings.h.
#include "nibble_settings.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stddef.h>

// Settings.

static double setting_number(const char* key, const char* value) {
    char* end = nullptr;
    const double number = strtod(value, &end);
    if (!*value || *end || !isfinite((float)number)) user_error("%s: \"%s\" was found; give a number", key, value);
    return number;
}

static uint64_t setting_count(const char* key, const char* value, uint64_t most) {
    char* end = nullptr;
    errno = 0;
    const unsigned long long number = strtoull(value, &end, 10);
    if (!isdigit((unsigned char)*value) || *end || errno || number > most) {
        user_error("%s: \"%s\" was found; give a whole number from 0 to %llu", key, value, (unsigned long long)most);
    }
    return number;
}

const char** setting_text(NibbleOptim* optim, const char* key) {
    OptimConfig* config = &optim->config;
    const struct {
        const char *key, **text;
    } texts[] = {{"preset", &config->preset},       {"rule", &config->rule},     {"weights", &config->weights},
                 {"grads", &config->grads},         {"m", &config->m},           {"v", &config->v},
                 {"overrides", &config->overrides}, {"stacked", &optim->stacked}};
    for (const auto& each : texts) {
        if (strcmp(key, each.key) == 0) return each.text;
    }
    return nullptr;
}

static void setting_device(NibbleOptim* optim, const char* value) {
    if (strcmp(value, "cpu") == 0) return;
    const bool numbered = strncmp(value, "cuda:", 5) == 0;
    if (!numbered && strcmp(value, "cuda") != 0) {
        user_error("device: \"%s\" is not known; type cpu, cuda or cuda:N", value);
    }
    optim->gpu = numbered ? (int)setting_count("device", value + 5, INT32_MAX) : 0;
}

static void setting_parameters(NibbleOptim* optim, const char* value) {
    const char* const names[] = {"fp32", "bf16", "fp16"};  // in OptimType's order
    for (int i = 0; i < 3; i++) {
        if (strcmp(value, names[i]) == 0) return (void)(optim->compute = (OptimType)i);
    }
    user_error("parameters: \"%s\" was found; type one of fp32|bf16|fp16", value);
}

static void setting_of_rule(OptimConfig* config, const Option* option, const char* value) {
    char error[DATA_ERROR_BYTES];
    require(option_set(option, (RuleOptions*)config, value, error), error);
    if (!option_is_auto(option, (RuleOptions*)config)) return;
    user_error("%s: only ./train chooses a value for auto; give one", option->name);
}

static void setting_set(NibbleOptim* optim, const char* key, const char* value) {
    OptimConfig* config = &optim->config;
    const char** text = setting_text(optim, key);
    const Option* of_rule = rule_option_find(key);
    const auto is = [&](const char* name) { return strcmp(key, name) == 0; };
    if (text) {
        *text = value;
    } else if (of_rule) {
        setting_of_rule(config, of_rule, value);
    } else if (is("device")) {
        setting_device(optim, value);
    } else if (is("parameters")) {
        setting_parameters(optim, value);
    } else if (is("capturable")) {
        config->replays = setting_count(key, value, INT64_MAX) > 0;
    } else if (is("releases")) {
        optim->releases = setting_count(key, value, INT64_MAX) > 0;
    } else if (is("part")) {
        config->part = setting_count(key, value, INT64_MAX) > 0;
    } else if (is("share")) {
        optim->share = (int64_t)setting_count(key, value, INT64_MAX);
    } else if (is("shares")) {
        optim->shares = (int64_t)setting_count(key, value, INT64_MAX);
    } else if (is("seed")) {
        config->seed = setting_count(key, value, UINT64_MAX);
    } else if (is("lr_max")) {
        config->lr_max = (float)setting_number(key, value);
    } else if (is("element")) {
        optim->element = (int64_t)setting_count(key, value, INT64_MAX);
    } else {
        user_error("\"%s\" is no setting; optim/nibble_optim.h lists them", key);
    }
}

void settings_read(NibbleOptim* optim, const char* const* settings) {
    OptimConfig* config = &optim->config;
    config->placed = true;
    config->made = &optim->optim;
    optim->compute = OPTIM_BF16;
    for (int i = 0; settings && settings[i]; i++) {
        if (!strchr(settings[i], '=')) {
            user_error("\"%s\" was found among the settings; each is key=value", settings[i]);
        }
        char* key = text_copy(settings[i]);  // the configuration points to its value
        char* equals = strchr(key, '=');
        *equals = 0;
        setting_set(optim, key, equals + 1);
    }
    char error[DATA_ERROR_BYTES];
    const bool typed = config->weights && *config->weights;
    if (optim->compute == OPTIM_FP32 && !typed) config->weights = "fp32";
    if (!config->grads || !*config->grads) config->grads = optim->compute == OPTIM_BF16 ? "bf16" : "fp32";
    if (optim->share >= optim->shares || optim->shares > 1 << 20) {
        user_error("share: %lld of %lld was found; give a share below the number of shares, which is at most 2^20",
                   (long long)optim->share, (long long)optim->shares);
    }
    if (optim->element % TILE_ELEMENTS != 0)
        user_error("element: %lld is no multiple of 2048", (long long)optim->element);
    require(optim_resolve(config, error), error);
    config->of_fp16 = optim->compute == OPTIM_FP16;
    if (config->of_fp16) config->weights = weights_of_fp16(config->weights, typed);
}

void require_weights(const NibbleOptim* optim, const Plan* plan) {
    for (int i = 0; i < plan->weights_count; i++) {
        const FormatRow* format = plan->weights[i].format;
        const bool fp32 = optim->compute == OPTIM_FP32;
        if (optim->compute == OPTIM_BF16 ||
            (fp32 ? strcmp(format->name, "fp32") == 0 : serves_directly(format, optim->compute)))
            continue;
        user_error(fp32 ? "weights: \"%s\" was found for parameters of fp32, which are stored as they are; give "
                          "weights=fp32, or make the parameters bf16"
                        : "weights: \"%s\" was found for parameters of fp16; give fp16, fp16:sr or fp16+fp32",
                   format->name);
    }
}

// Tensors.

// Returns the tensor, or its part that lies here, as the optimizer sees it.
static OptimTensor tensor_local(const NibbleTensor* tensor) {
    const int64_t elements = tensor->rows * tensor->cols, head = tensor->first % TILE_ELEMENTS;
    OptimTensor local = {tensor->name, tensor->rows, tensor->cols, true, 0};
    if (tensor->count < 0) return local;
    if (tensor->first < 0 || tensor->first > elements || tensor->count > elements - tensor->first) {
        user_error("%s: %lld elements from %lld on were named and it has %lld", tensor->name, (long long)tensor->count,
                   (long long)tensor->first, (long long)elements);
    }
    const bool rows =
        tensor->count > 0 && head == 0 && tensor->first % tensor->cols == 0 && tensor->count % tensor->cols == 0;
    local.rows = rows ? tensor->count / tensor->cols : 1;
    local.cols = rows ? tensor->cols : tensor->count == 0 ? 0 : head + tensor->count;
    return local;
}

static bool is_cut(const NibbleTensor* tensor) {
    return tensor->count >= 0 && tensor->count < tensor->rows * tensor->cols;
}

bool is_elsewhere(const NibbleOptim* optim, int tensor) {
    return optim->shares > 0 && optim->owner[tensor] != optim->share;
}

// Returns true if a cut tensor's rows do not hold whole blocks and bytes of states. The position of the cuts does not
// matter, so that the states are the same for any number of processes. A vector's rows are its elements.
static bool cuts_split(const OptimConfig* config, const NibbleTensor* tensor) {
    const Rows rows = config_rows(config);
    const int64_t row = tensor->rows == 1 ? 1 : tensor->cols;
    bool split = false;
    for (const FormatRow* format : {rows.weights, rows.m, rows.v}) {
        for (const StreamInfo& info : format->stream) {
            const bool blocks = info.bits > 0 && info.span == SPAN_RUN;
            split = split || (blocks && (row % info.run != 0 || row / info.run * info.bits % 8 != 0));
        }
    }
    return split && tensor->count >= 0;
}

// Finds the tensors that need owners, because they are read whole or cuts split blocks, and divides them into shares of
// about equal size, in their order. A tensor belongs to the share that contains its middle.
static void owners_find(NibbleOptim* optim, const Plan* plan) {
    double all = 0.0, before = 0.0;
    for (int t = 0; t < optim->count; t++) {
        const OptimConfig* config = &launch_of(plan, t)->config;
        const bool owned = config_reads_whole(config) || cuts_split(config, &optim->tensor[t]);
        optim->owner[t] = owned && optim->shares > 0 ? 0 : -1;
        if (optim->owner[t] >= 0) all += (double)tensor_padded(&optim->whole[t]);
    }
    for (int t = 0; t < optim->count; t++) {
        if (optim->owner[t] < 0) continue;
        const double padded = (double)tensor_padded(&optim->whole[t]);
        optim->owner[t] = (int)((before + 0.5 * padded) / (all > 0.0 ? all : 1.0) * (double)optim->shares);
        before += padded;
    }
}

// Returns the number of matrices that a tensor is stacked from, by the setting `stacked`: "c_attn.weight:3; kv*:2".
static int stacked_parts(const char* stacked, const NibbleTensor* tensor) {
    int parts = 1;
    for (const char* list = stacked; list && *list;) {
        const char *word = text_word(&list, ';'), *number_at = word + strspn(word, " ");
        const char* patterns = text_word(&number_at, ':');
        char* rest = nullptr;
        const long number = number_at ? strtol(number_at, &rest, 10) : 0;
        if (number < 1 || number > 1024 || rest[strspn(rest, " ")]) {
            user_error("stacked: \"%s\" was found; type a pattern of names and a number, say c_attn.weight:3", word);
        }
        if (tensor->rows > 1 && patterns_match(patterns, tensor->name)) parts = (int)number;
    }
    if (tensor->rows % parts == 0) return parts;
    user_error("stacked: %s has %lld rows, which are no %d equal matrices", tensor->name, (long long)tensor->rows,
               parts);
}

// Sets the part of each tensor that lies here.
static void tensors_place(NibbleOptim* optim) {
    for (int t = 0; t < optim->count; t++) {
        NibbleTensor* tensor = &optim->tensor[t];
        if (is_elsewhere(optim, t)) {
            tensor->first = tensor->count = 0;
        } else if (optim->shares > 0 && optim->share >= 0) {
            tensor->first = 0, tensor->count = -1;
        }
        const bool all = tensor->count < 0;
        const int64_t head = all ? 0 : tensor->first % TILE_ELEMENTS;
        optim->local[t] = tensor_local(tensor);
        optim->local[t].parts = is_cut(tensor) ? 1 : optim->whole[t].parts;
        optim->placed[t] = {all ? tensor->rows * tensor->cols : tensor->count, head,
                            optim->element + optim->whole[t].offset + (all ? 0 : tensor->first - head)};
        optim->stale[t] = true;
    }
}

// Lays out the arena. It begins where its tensors do in the model, so that no two tensors have the same noise. A share
// keeps its own tensors of the model's arena.
static void arena_place(NibbleOptim* optim) {
    OptimConfig* config = &optim->config;
    const bool shared = optim->shares > 0 && optim->share >= 0;
    if (shared) memcpy(optim->local, optim->whole, (size_t)optim->count * sizeof(OptimTensor));
    if (!shared) optim_layout(optim->local, optim->count, config);
    SliceRun* run = (SliceRun*)memory_zero((size_t)optim->count, sizeof(SliceRun));
    for (int t = 0; t < optim->count; t++) {
        OptimTensor* local = &optim->local[t];
        local->offset += optim->element;
        if (shared && !is_elsewhere(optim, t))
            run[config->run_count++] = {local->offset / TILE_ELEMENTS, 0, tensor_padded(local) / TILE_ELEMENTS};
    }
    config->runs = shared ? run : nullptr;
}

// Refuses cuts through tensors that a rule or a format reads whole. An empty part of a tensor is not read, so it is no
// such cut.
static void require_whole_tensors(const NibbleOptim* optim, const Plan* plan) {
    for (int t = 0; t < optim->count; t++) {
        const NibbleTensor* tensor = &optim->tensor[t];
        const Rows rows = launch_of(plan, t)->rows;
        if (!is_cut(tensor) || tensor->count == 0) continue;
        const bool on_rows =
            optim->placed[t].head == 0 && tensor->first % tensor->cols == 0 && tensor->count % tensor->cols == 0;
        const char *reads = nullptr, *what = "tensors", *advice = "keep it whole, or override its rule";
        if (rows.rule->matrix) {
            reads = rows.rule->name, what = "matrices";
        } else if (optim->config.limit_growth > 0.0f) {
            reads = "limit_growth", advice = "keep it whole, or leave limit_growth out";
        } else if (rows.rule->by_rows && rows.rule->rows != ROWS_ADAM_MINI) {
            reads = rows.rule->name;
        } else if (rows.rule->by_rows && !on_rows) {
            reads = rows.rule->name, what = "rows";
            advice = "cut it at rows that begin at multiples of 2048 elements, or override its rule";
        }
        for (const FormatRow* format : {rows.weights, rows.m, rows.v}) {
            const Span span = format_span(format);
            if (reads || span == SPAN_RUN || span == SPAN_ROWS) continue;
            reads = format->name, advice = "keep it whole, or take a format in blocks";
        }
        if (!reads) continue;
        user_error("%s reads whole %s, and %s is cut at element %lld; %s", reads, what, tensor->name,
                   (long long)tensor->first, advice);
    }
}

constexpr double MAX_ELEMENTS = (double)((int64_t)1 << 42);  // a tile's number has 32 bits; padding needs some

void tensors_take(NibbleOptim* optim, const NibbleTensor* tensors) {
    const size_t count = (size_t)optim->count;
    optim->tensor = (NibbleTensor*)memory_zero(count, sizeof(NibbleTensor));
    optim->local = (OptimTensor*)memory_zero(count, sizeof(OptimTensor));
    optim->placed = (PlacedTensor*)memory_zero(count, sizeof(PlacedTensor));
    optim->stale = (bool*)memory_zero(count, sizeof(bool));
    optim->owner = (int*)memory_zero(count, sizeof(int));
    OptimTensor* whole = optim->whole = (OptimTensor*)memory_zero(count, sizeof(OptimTensor));
    double elements = (double)optim->element;
    for (size_t t = 0; t < count; t++) {
        NibbleTensor* tensor = &optim->tensor[t];
        const char* name = text_copy(tensors[t].name ? tensors[t].name : "");
        *tensor = tensors[t];
        tensor->name = name;
        if (tensor->rows < 1 || tensor->cols < 0) user_error("%s: a tensor has 1 row or more", tensor->name);
        elements += (double)tensor->rows * (double)tensor->cols;
        if (elements > MAX_ELEMENTS) user_error("%s: with it the model has more than 2^42 elements", tensor->name);
        whole[t] = {tensor->name, tensor->rows, tensor->cols, true, 0, stacked_parts(optim->stacked, tensor)};
    }
    optim->end = optim->element + optim_layout(whole, optim->count, &optim->config);
    Plan* plan = plan_ranges(&optim->config, whole, optim->count);
    owners_find(optim, plan);
    tensors_place(optim);
    require_whole_tensors(optim, plan);
    plan_free(plan);
    arena_place(optim);
}
