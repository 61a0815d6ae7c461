// Implements nibble_optim.h: it reads settings, reports errors as text, and runs an optimizer of optim.h over the
// caller's weights and gradients (placed.h).
//
// The optimizer reports mistakes through user_error and failures through check, which end ./train. In the library both
// call launch_failed below, which returns to the library's function by longjmp with the sentence. What a function takes
// from memory.h is in the optimizer's list until it is freed, so that nibble_optim_free frees it too if nobody knows it
// any more.
#include "nibble_optim.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stddef.h>

#include "../kernels/count_gpus.cuh"
#include "../kernels/ranks/slices.cuh"
#include "loaded_cublaslt.h"
#include "placed.h"

#define NIBBLE_API extern "C" __attribute__((visibility("default")))

// Errors.

struct Taken {
    void** block;
    int64_t count, room;
};

struct Failure {
    jmp_buf jump;
    NibbleStatus status;
    Taken* blocks;
    char text[NIBBLE_ERROR_BYTES];
};

static thread_local Failure* failure;  // of the call that this thread is in

[[noreturn]] static void fail(NibbleStatus status, const char* text) {
    static const char prefix[] = "train: error: ";
    const size_t skip = strncmp(text, prefix, strlen(prefix)) == 0 ? strlen(prefix) : 0;
    snprintf(failure->text, sizeof(failure->text), "%s", text + skip);
    for (size_t end = strlen(failure->text); end > 0 && failure->text[end - 1] == '\n'; end--)
        failure->text[end - 1] = 0;
    failure->status = status;
    longjmp(failure->jump, 1);
}

// These replace the weak functions of data/errors.c. They can return only from the thread that called the library,
// which is enough, since no parallel region here reports mistakes.
void launch_failed(int code, const char* text) {
    if (!failure) return;
    const bool memory = strstr(text, "cudaErrorMemoryAllocation") != nullptr;
    fail(code == 2 ? NIBBLE_MISTAKE : memory ? NIBBLE_MEMORY : NIBBLE_SYSTEM, text);
}

void memory_failed(const char* text) {
    if (!failure) return;
    char first[256];
    snprintf(first, sizeof(first), "%.*s", (int)strcspn(text, ";"), text);
    fail(NIBBLE_MEMORY, first);
}

extern "C" void __real_free(void* block);

static bool blocks_add(Taken* blocks, void* block) {
    if (blocks->count == blocks->room) {
        void** grown = (void**)realloc(blocks->block, (size_t)(blocks->room * 2 + 64) * sizeof(void*));
        if (!grown) return false;
        blocks->block = grown, blocks->room = blocks->room * 2 + 64;
    }
    blocks->block[blocks->count++] = block;
    return true;
}

void block_taken(void* block) {
    if (!failure || blocks_add(failure->blocks, block)) return;
    __real_free(block);
    fail(NIBBLE_MEMORY, "this process gets no more memory");
}

void block_left(void* block) {
    if (!failure || !block) return;
    Taken* blocks = failure->blocks;
    int64_t i = blocks->count - 1;
    while (i >= 0 && blocks->block[i] != block) i--;
    if (i >= 0) blocks->block[i] = blocks->block[--blocks->count];
}

// The linker puts it in the place of free in the library's own objects (--wrap).
extern "C" void __wrap_free(void* block) {
    block_left(block);
    __real_free(block);
}

static void blocks_free(Taken* blocks) {
    for (int64_t i = 0; i < blocks->count; i++) __real_free(blocks->block[i]);
    __real_free(blocks->block);
    *blocks = {};
}

void notice(const char*) {}

// Clears CUDA's error, which the check of the next launch would otherwise report.
static void error_forget() {
#ifdef __CUDACC__
    cudaGetLastError();
#endif
}

// Calls the function and turns an error in it into a status and a sentence. `blocks` lists what it takes.
template <class Function>
static NibbleStatus guarded(char* error, Taken* blocks, Function function) {
    Failure own;
    Failure* const before = failure;
    own.status = NIBBLE_OK;
    own.blocks = blocks;
    failure = &own;
    if (setjmp(own.jump) == 0) function();
    failure = before;
    if (own.status != NIBBLE_OK) error_forget();
    if (error) snprintf(error, NIBBLE_ERROR_BYTES, "%s", own.status == NIBBLE_OK ? "" : own.text);
    return own.status;
}

// The optimizer.

struct NibbleOptim {
    Device dev;
    int gpu;  // its index; -1: the CPU
    Optim* optim;
    PlacedTables* tables;
    OptimConfig config;
    OptimType compute;
    NibbleTensor* tensor;  // (count), with names of their own
    OptimTensor* local;    // (count) what lies here, as the optimizer knows it
    OptimTensor* whole;    // (count) all tensors with their places in the model
    PlacedTensor* placed;  // (count)
    bool* stale;           // (count) the weights kept beside a parameter must be made from it again
    int count;
    int share, shares;    // the share that is kept here, -1: tensors without owners; 0 shares: all tensors
    int* owner;           // (count) the share that has a tensor, or -1
    bool releases;        // each tensor has its own optimizer and is stepped in the backward pass
    const char* stacked;  // of the settings, or null
    int64_t element, end;
    SliceRun run;                                     // of a share with owners: its tensors
    void* (*allocate)(void* context, int64_t bytes);  // the caller's, or null
    void* context;
    char describe[256];
    Taken blocks;  // all host memory of the optimizer
};

// Makes the optimizer's device the current one, and sets its stream to the caller's. Returns the device to restore, or
// -1.
static int device_enter(const NibbleOptim* optim, void* stream) {
    int before = -1;
    ((NibbleOptim*)optim)->dev.stream = (cudaStream_t)stream;
    if (!optim->dev.gpu) return before;
    check(cudaGetDevice(&before));
    if (before != optim->gpu) check(cudaSetDevice(optim->gpu));
    return before;
}

static void device_leave(const NibbleOptim* optim, int before) {
    if (optim->dev.gpu && before >= 0 && before != optim->gpu && cudaSetDevice(before) != cudaSuccess) return;
}

// Calls the function with the optimizer's device and the caller's stream, as guarded() does.
template <class Function>
static NibbleStatus on_device(const NibbleOptim* optim, void* stream, char* error, Function function) {
    int before = -1;
    const NibbleStatus status = guarded(error, (Taken*)&optim->blocks, [&] {
        before = device_enter(optim, stream);
        function();
    });
    device_leave(optim, before);
    return status;
}

static void gpu_open(NibbleOptim* optim) {
    int gpus = 0;
    const cudaError_t status = count_gpus(&gpus);
#ifndef __CUDACC__
    user_error("device=cuda was asked for and this libnibble_optim was built without CUDA; take device=cpu");
#endif
    if (gpus == 0) {
        user_error("device=cuda:%d was asked for and no GPU answers (%s); take device=cpu", optim->gpu,
                   no_gpu_reason(status, driver_version()));
    }
    if (optim->gpu >= gpus) {
        user_error("device=cuda:%d was asked for and %d GPUs were found; take device=cpu or a lower number", optim->gpu,
                   gpus);
    }
#ifdef __CUDACC__
    int major = 0, minor = 0;
    optim->dev.gpu = true;
    check(cudaDeviceGetAttribute(&optim->dev.sm_count, cudaDevAttrMultiProcessorCount, optim->gpu));
    check(cudaDeviceGetAttribute(&optim->dev.shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, optim->gpu));
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, optim->gpu));
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, optim->gpu));
    optim->dev.compute = 10 * major + minor;
#endif
}

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

// Sets share and shares from I/N or rest/N.
static void setting_share(NibbleOptim* optim, const char* value) {
    const char* slash = strchr(value, '/');
    const bool rest = strncmp(value, "rest/", 5) == 0;
    char *end = nullptr, *last = nullptr;
    const long share = rest ? -1 : strtol(value, &end, 10), shares = slash ? strtol(slash + 1, &last, 10) : 0;
    const bool numbers = slash && slash != value && (rest || end == slash) && *last == 0;
    if (!numbers || share >= shares || shares < 1 || shares > 1 << 20 || *value == '-') {
        user_error("share: \"%s\" was found; type I/N, with I from 0 to N - 1, or rest/N", value);
    }
    optim->share = (int)share, optim->shares = (int)shares;
}

// How the value of a setting is read. SWITCH is a number, true above 0; ON_OFF is a word.
enum SettingKind { TEXT, NUMBER, COUNT, SEED, SWITCH, DEVICE, PARAMETERS, ON_OFF, SHARE };

struct Setting {
    const char* key;
    SettingKind kind;
    size_t at;  // of its value in NibbleOptim
};

#define IN_CONFIG(MEMBER) (offsetof(NibbleOptim, config) + offsetof(OptimConfig, MEMBER))
static const Setting setting_table[] = {{"device", DEVICE, 0},
                                        {"parameters", PARAMETERS, 0},
                                        {"preset", TEXT, IN_CONFIG(preset)},
                                        {"rule", TEXT, IN_CONFIG(rule)},
                                        {"weights", TEXT, IN_CONFIG(weights)},
                                        {"grads", TEXT, IN_CONFIG(grads)},
                                        {"m", TEXT, IN_CONFIG(m)},
                                        {"v", TEXT, IN_CONFIG(v)},
                                        {"overrides", TEXT, IN_CONFIG(overrides)},
                                        {"stacked", TEXT, offsetof(NibbleOptim, stacked)},
                                        {"capturable", SWITCH, IN_CONFIG(replays)},
                                        {"share", SHARE, 0},
                                        {"releases", SWITCH, offsetof(NibbleOptim, releases)},
                                        {"seed", SEED, IN_CONFIG(seed)},
                                        {"decay_mode", TEXT, IN_CONFIG(decay_mode)},
                                        {"lr_max", NUMBER, IN_CONFIG(lr_max)},
                                        {"beta3", NUMBER, IN_CONFIG(beta3)},
                                        {"alpha", NUMBER, IN_CONFIG(alpha)},
                                        {"ramp", COUNT, IN_CONFIG(ramp)},
                                        {"momentum", NUMBER, IN_CONFIG(momentum)},
                                        {"nesterov", ON_OFF, IN_CONFIG(nesterov)},
                                        {"clip_update", NUMBER, IN_CONFIG(clip_update)},
                                        {"limit_growth", NUMBER, IN_CONFIG(limit_growth)},
                                        {"ns_steps", COUNT, IN_CONFIG(ns_steps)},
                                        {"ns_coefficients", TEXT, IN_CONFIG(ns_coefficients)},
                                        {"rank", COUNT, IN_CONFIG(rank)},
                                        {"rank_gap", COUNT, IN_CONFIG(rank_gap)},
                                        {"rank_scale", NUMBER, IN_CONFIG(rank_scale)},
                                        {"element", COUNT, offsetof(NibbleOptim, element)}};

static const Setting* setting_find(const char* key) {
    for (const Setting& setting : setting_table) {
        if (strcmp(key, setting.key) == 0) return &setting;
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

// Returns true if the value is the first of two words, false if it is the second. Other values are refused.
static bool setting_word(const char* key, const char* value, const char* first, const char* second) {
    const bool is_first = strcmp(value, first) == 0;
    if (!is_first && strcmp(value, second) != 0) {
        user_error("%s: \"%s\" was found; type %s or %s", key, value, first, second);
    }
    return is_first;
}

static void setting_set(NibbleOptim* optim, const char* key, const char* value) {
    const Setting* setting = setting_find(key);
    if (!setting) {
        char known[512] = "";
        for (const Setting& each : setting_table) {
            snprintf(known + strlen(known), sizeof(known) - strlen(known), "%s%s", *known ? ", " : "", each.key);
        }
        user_error("\"%s\" is no setting; known are %s", key, known);
    }
    void* at = (char*)optim + setting->at;
    if (setting->kind == TEXT) *(const char**)at = value;
    if (setting->kind == NUMBER) *(float*)at = (float)setting_number(key, value);
    if (setting->kind == COUNT) *(int64_t*)at = (int64_t)setting_count(key, value, INT64_MAX);
    if (setting->kind == SEED) *(uint64_t*)at = setting_count(key, value, UINT64_MAX);
    if (setting->kind == SWITCH) *(bool*)at = setting_count(key, value, INT64_MAX) > 0;
    if (setting->kind == ON_OFF) *(bool*)at = setting_word(key, value, "on", "off");
    if (setting->kind == PARAMETERS)
        optim->compute = setting_word(key, value, "fp32", "bf16") ? OPTIM_FP32 : OPTIM_BF16;
    if (setting->kind == DEVICE) setting_device(optim, value);
    if (setting->kind == SHARE) setting_share(optim, value);
}

static void settings_read(NibbleOptim* optim, const char* const* settings) {
    OptimConfig* config = &optim->config;
    config->beta1 = 0.9f, config->beta2 = 0.95f, config->eps = 1e-8f;  // each step brings its own
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
    const bool fp32 = optim->compute == OPTIM_FP32;
    if (fp32 && (!config->weights || !*config->weights)) config->weights = "fp32";
    if (!config->grads || !*config->grads) config->grads = fp32 ? "fp32" : "bf16";
    if (optim->element % TILE_ELEMENTS != 0)
        user_error("element: %lld is no multiple of 2048", (long long)optim->element);
    require(optim_resolve(config, error), error);
}

// Refuses weights that parameters of this type cannot hold: a parameter of fp32 holds fp32 alone.
static void require_weights(const NibbleOptim* optim, const Plan* plan) {
    for (int i = 0; i < plan->weights_count; i++) {
        const char* name = plan->weights[i].format->name;
        if (optim->compute == OPTIM_BF16 || strcmp(name, "fp32") == 0) continue;
        user_error(
            "weights: \"%s\" was found for parameters of fp32, which are stored as they are; give weights=fp32, or "
            "make the parameters bf16",
            name);
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

// Returns true if another optimizer has the tensor (the setting `share`).
static bool is_elsewhere(const NibbleOptim* optim, int tensor) {
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
// about equal size. A share is a run of the arena, since a plan keeps one run; a tensor belongs to the share that
// contains its middle.
static void owners_find(NibbleOptim* optim, const Plan* plan) {
    const OptimTensor* whole = optim->whole;
    int64_t all = 0;
    for (int t = 0; t < optim->count; t++) {
        const OptimConfig* config = &plan->launch[plan->launch_of[t]].config;
        const bool owned = config_reads_whole(config) || cuts_split(config, &optim->tensor[t]);
        optim->owner[t] = owned && optim->shares > 0 ? 0 : -1;
        if (optim->owner[t] >= 0) all += tensor_padded(&whole[t]);
    }
    for (int t = 0; t < optim->count; t++) {
        double middle = 0.5 * (double)tensor_padded(&whole[t]);
        for (int u = 0; u < optim->count && optim->owner[t] >= 0; u++) {
            const bool before = optim->owner[u] >= 0 && whole[u].offset < whole[t].offset;
            middle += before ? (double)tensor_padded(&whole[u]) : 0.0;
        }
        if (optim->owner[t] >= 0) optim->owner[t] = (int)(middle / (double)(all > 0 ? all : 1) * optim->shares);
    }
}

// Returns the number of matrices that a tensor is stacked from, by the setting `stacked`: "c_attn.weight:3; kv*:2".
static int stacked_parts(const char* stacked, const NibbleTensor* tensor) {
    int parts = 1;
    for (const char *at = stacked ? stacked : "", *end; *at; at = *end ? end + 1 : end) {
        end = at + strcspn(at, ";");
        while (*at == ' ') at++;
        const char* colon = at + strcspn(at, ":;");
        char* rest = nullptr;
        const long number = *colon == ':' ? strtol(colon + 1, &rest, 10) : 0;
        if (number < 1 || number > 1024 || rest + strspn(rest, " ") != end) {
            user_error("stacked: \"%.*s\" was found; type a pattern of names and a number, say c_attn.weight:3",
                       (int)(end - at), at);
        }
        for (const char *p = at, *stop; p < colon && tensor->rows > 1; p = stop + 1) {
            stop = p + strcspn(p, "|:");
            if (pattern_matches(p, stop, tensor->name)) parts = (int)number;
        }
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
// of tensors with owners is a run of the model's arena.
static void arena_place(NibbleOptim* optim) {
    OptimConfig* config = &optim->config;
    const OptimTensor* whole = optim->whole;
    if (optim->shares == 0 || optim->share < 0) {
        optim_layout(optim->local, optim->count, config);
    } else {
        int64_t first = optim->end, last = first;
        memcpy(optim->local, whole, (size_t)optim->count * sizeof(OptimTensor));
        for (int t = 0; t < optim->count; t++) {
            const int64_t begin = optim->element + whole[t].offset, end = begin + tensor_padded(&whole[t]);
            if (is_elsewhere(optim, t)) continue;
            if (first == optim->end || end > last) last = end;
            if (begin < first) first = begin;
        }
        optim->run = {first / TILE_ELEMENTS, 0, (last - first) / TILE_ELEMENTS};
        config->runs = &optim->run, config->run_count = last > first ? 1 : 0;
    }
    for (int t = 0; t < optim->count; t++) optim->local[t].offset += optim->element;
}

// Refuses cuts through tensors that a rule or a format reads whole. An empty part of a tensor is not read, so it is no
// such cut.
static void require_whole_tensors(const NibbleOptim* optim, const Plan* plan) {
    for (int t = 0; t < optim->count; t++) {
        const NibbleTensor* tensor = &optim->tensor[t];
        const Rows rows = plan->launch[plan->launch_of[t]].rows;
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

// Copies and checks the caller's tensors, and lays out the arena.
static void tensors_take(NibbleOptim* optim, const NibbleTensor* tensors) {
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

// Refuses limit_growth for rules that add the decay to the gradient, since each step's groups bring the decay.
static void require_decoupled(const NibbleOptim* optim, const Plan* plan) {
    for (int i = 0; i < plan->launches && optim->config.limit_growth > 0.0f; i++) {
        const RuleRow* rule = plan->launch[i].rows.rule;
        if (rule->decoupled || plan->launch[i].tiles == 0) continue;
        user_error("limit_growth: %s adds the decay to the gradient, which the limit does not see; take adamw, say",
                   rule->name);
    }
}

// Asks the caller for memory.
static void* states_allocate(void* context, int64_t bytes) {
    const NibbleOptim* optim = (const NibbleOptim*)context;
    void* memory = optim->allocate(optim->context, bytes);
    char text[128];
    snprintf(text, sizeof(text), "allocate gave no memory for %lld bytes of states", (long long)bytes);
    if (!memory) fail(NIBBLE_MEMORY, text);
    return memory;
}

// Makes the optimizer. `before` receives the device to restore, also if it fails.
static void optim_make(NibbleOptim* optim, const char* const* settings, const NibbleTensor* tensors,
                       void* (*allocate)(void* context, int64_t bytes), void* context, void* stream, int* before) {
    if (optim->count < 0) user_error("%d tensors were named", optim->count);
    settings_read(optim, settings);
    if (optim->gpu >= 0) gpu_open(optim);
    tensors_take(optim, tensors);
    OptimConfig* config = &optim->config;
    char why[DATA_ERROR_BYTES];
    if (optim->releases && !optim_releases(config, optim->local, optim->count, why)) {
        user_error("%s; step after the backward pass", why);
    }
    config->weight_decay = -1.0f;  // each step's groups bring it
    config->allocate = allocate ? states_allocate : nullptr;
    config->allocator = optim;
    optim->allocate = allocate;
    optim->context = context;
    *before = device_enter(optim, stream);
    optim->optim = optim_create(&optim->dev, config, optim->local, optim->count, optim->compute);
    const Plan* plan = optim->optim->plan;
    for (int i = 0; i < plan->launches; i++) {
        const RuleRow* rule = plan->launch[i].rows.rule;
        if (rule->matrix && plan->launch[i].tiles > 0) products_open(&optim->dev, rule->name);
    }
    require_weights(optim, plan);
    require_decoupled(optim, plan);
    placed_create(&optim->tables, optim->optim, optim->compute, optim->placed);
    optim_describe(config, optim->describe, sizeof(optim->describe));
}

NIBBLE_API void nibble_optim_free(NibbleOptim* optim) {
    if (!optim) return;
    on_device(optim, optim->dev.stream, nullptr, [&] {
        placed_free(optim->tables);
        optim_free(optim->optim);
        products_close(&optim->dev);
    });
    blocks_free(&optim->blocks);
    free(optim);
}

NIBBLE_API NibbleStatus nibble_optim_create(NibbleOptim** result, const char* const* settings,
                                            const NibbleTensor* tensors, int count,
                                            void* (*allocate)(void* context, int64_t bytes), void* context,
                                            void* stream, char* error) {
    NibbleOptim* optim = nullptr;
    int before = -1;
    Taken blocks = {};
    const NibbleStatus status = guarded(error, &blocks, [&] {
        optim = (NibbleOptim*)memory_zero(1, sizeof(NibbleOptim));
        block_left(optim);  // from here on nibble_optim_free frees it
        optim->config = OptimConfig(), optim->gpu = -1, optim->count = count;
        optim_make(optim, settings, tensors, allocate, context, stream, &before);
    });
    *result = status == NIBBLE_OK ? optim : nullptr;
    if (!optim) return status;
    device_leave(optim, before);
    optim->blocks = blocks;
    if (status != NIBBLE_OK) nibble_optim_free(optim);
    return status;
}

// Weights that are kept beside parameters.

// Returns true if the optimizer keeps codes or a master of a parameter.
static bool keeps_weights(const NibbleOptim* optim, int tensor) {
    const FormatRow* row = plan_array_ref(optim->optim->plan, tensor, SLOT_WEIGHTS).format;
    return strcmp(row->stream[0].dtype, optim->compute == OPTIM_FP32 ? "F32" : "BF16") != 0 ||
           row->stream[1].bits > 0 || row->stream[2].bits > 0;
}

// Makes the weights that are kept beside a parameter from its value.
static void weights_take(NibbleOptim* optim, int tensor, const void* weights) {
    const PlacedTensor* placed = &optim->placed[tensor];
    const int bytes = optim->compute == OPTIM_FP32 ? 4 : 2;
    float* values = (float*)memory_zero((size_t)(placed->head + placed->count), sizeof(float));
    char* codes = (char*)memory_take((size_t)(placed->count * bytes));
    copy_to_host(&optim->dev, codes, weights, placed->count * bytes);
    for (int64_t i = 0; i < placed->count; i++) {
        values[placed->head + i] = bytes == 4 ? ((const float*)codes)[i] : to_float(((const bf16*)codes)[i]);
    }
    optim_set_weights(optim->optim, tensor, values);
    free(values), free(codes);
}

NIBBLE_API void nibble_optim_weights_changed(NibbleOptim* optim, int tensor) {
    if (tensor >= 0 && tensor < optim->count) optim->stale[tensor] = true;
}

NIBBLE_API void nibble_optim_loaded(NibbleOptim* optim) {
    optim_loaded(optim->optim);
    for (int t = 0; t < optim->count; t++) optim->stale[t] = false;
}

// Refuses constants that ./train would refuse, and a parameter without an address.
static void step_check(const NibbleOptim* optim, const NibbleStep* step) {
    if (step->step < 1) user_error("step: %lld was found; steps count from 1", (long long)step->step);
    for (int t = 0; t < optim->count; t++) {
        if (!step->grads[t]) continue;
        const NibbleGroup* group = &step->group[step->group_of ? step->group_of[t] : 0];
        const char* name = optim->tensor[t].name;
        if (!step->weights[t] && optim->placed[t].count > 0) user_error("%s has a gradient and no address", name);
        if (!isfinite(group->lr) || !isfinite(group->weight_decay)) {
            user_error("%s: lr %g and weight_decay %g were found; give numbers", name, group->lr, group->weight_decay);
        }
        if (!(group->beta1 >= 0.0f && group->beta1 < 1.0f && group->beta2 >= 0.0f && group->beta2 < 1.0f)) {
            user_error("%s: betas (%g, %g) were found; give numbers from 0 to below 1", name, (double)group->beta1,
                       (double)group->beta2);
        }
        if (!(group->eps > 0.0f && group->eps <= 1.0f)) {
            user_error("%s: eps %g was found; give a number above 0, at most 1", name, (double)group->eps);
        }
    }
}

// Refuses to read a parameter's value during a capture, since each replay would read it again.
static void require_no_capture(const NibbleOptim* optim, int tensor) {
    if (!is_capturing(&optim->dev)) return;
    user_error("%s is new to the optimizer or was written by others; take a step before the capture",
               optim->tensor[tensor].name);
}

NIBBLE_API NibbleStatus nibble_optim_clock(const NibbleOptim* optim, int64_t* step, void* stream, char* error) {
    return on_device(optim, stream, error, [&] { *step = placed_clock(optim->tables); });
}

NIBBLE_API NibbleStatus nibble_optim_step(NibbleOptim* optim, const NibbleStep* step, char* error) {
    return on_device(optim, step->stream, error, [&] {
        step_check(optim, step);
        for (int t = 0; t < optim->count; t++) {
            if (!optim->stale[t] || !step->grads[t]) continue;
            require_no_capture(optim, t);
            if (keeps_weights(optim, t) && optim->placed[t].count > 0) weights_take(optim, t, step->weights[t]);
        }
        placed_step(optim->tables, step);
        for (int t = 0; t < optim->count; t++) optim->stale[t] = optim->stale[t] && !step->grads[t];
    });
}

// States.

NIBBLE_API int nibble_optim_state(const NibbleOptim* optim, int tensor, int index, NibbleState* state) {
    if (tensor == -1 && index >= 0 && index < optim_stream_count(optim->optim)) {
        const OptimStream stream = optim_stream(optim->optim, index);
        *state = {"", stream.dtype, stream.data, stream.elements * stream.element_bytes, 0, 0};
        snprintf(state->name, sizeof(state->name), "%s", stream.name);
        return 1;
    }
    if (tensor < 0 || tensor >= optim->count || is_elsewhere(optim, tensor)) return 0;
    const OptimTensor* local = &optim->local[tensor];
    const Plan* plan = optim->optim->plan;
    for (int slot = 0; slot < SLOTS; slot++) {
        const ArrayRef place = plan_array_ref(plan, tensor, (Slot)slot);
        for (int i = 0; place.format && i < 3; i++) {
            const StreamInfo& info = place.format->stream[i];
            const OptimTensor* kept = place.kept;  // has another shape with projected gradients
            char* array = (char*)optim_array(optim->optim, tensor, (Slot)slot, i);
            if (!array || index-- != 0) continue;
            const bool run = info.span == SPAN_RUN, same = kept->rows == local->rows && kept->cols == local->cols;
            const ArrayBytes own = array_bytes(&place, i);
            *state = {"", info.dtype, array + own.begin, own.bytes, run && same ? info.run : 0, info.bits};
            stream_name(plan, 0, (Slot)slot, info, state->name, sizeof(state->name));
            return 1;
        }
    }
    return 0;
}

// nibble_optim_save writes this before the arrays.
struct StatesHeader {
    char magic[16];
    char text[1000];   // the settings on which the meaning of the arrays depends
    uint64_t tensors;  // a checksum of names and shapes
    int64_t bytes;     // of all arrays and of NibbleOptim::stale, which follow the header
};

// Calls function(array, its bytes) for each array of the states.
template <class Function>
static void each_array(const NibbleOptim* optim, Function function) {
    for (int s = 0; s < optim_stream_count(optim->optim); s++) {
        const OptimStream stream = optim_stream(optim->optim, s);
        function(stream.data, stream.elements * stream.element_bytes);
    }
}

static StatesHeader states_header(const NibbleOptim* optim) {
    StatesHeader header = {"nibble states 1", "", text_hash("", 0), optim->count};
    const OptimConfig* config = &optim->config;
    const char* stacked = optim->stacked ? optim->stacked : "";
    snprintf(header.text, sizeof(header.text), "rule %s, weights %s, m %s, v %s, overrides %.600s%s%.200s",
             config->rule, config->weights, config->m, config->v, config->overrides, *stacked ? ", stacked " : "",
             stacked);
    for (int t = 0; t < optim->count; t++) {
        const NibbleTensor* tensor = &optim->tensor[t];
        const int64_t shape[] = {tensor->rows, tensor->cols, tensor->first, tensor->count, (int64_t)header.tensors};
        header.tensors =
            text_hash((const char*)shape, sizeof(shape)) ^ text_hash(tensor->name, (int64_t)strlen(tensor->name));
    }
    each_array(optim, [&](void*, int64_t bytes) { header.bytes += bytes; });
    return header;
}

NIBBLE_API int64_t nibble_optim_bytes(const NibbleOptim* optim) {
    return (int64_t)sizeof(StatesHeader) + states_header(optim).bytes;
}

NIBBLE_API NibbleStatus nibble_optim_save(const NibbleOptim* optim, void* to, void* stream, char* error) {
    return on_device(optim, stream, error, [&] {
        const StatesHeader header = states_header(optim);
        memcpy(to, &header, sizeof(header));
        char* at = (char*)to + sizeof(header);
        each_array(optim, [&](void* array, int64_t bytes) {
            copy_to_host(&optim->dev, at, array, bytes);
            at += bytes;
        });
        for (int t = 0; t < optim->count; t++) at[t] = optim->stale[t];
    });
}

NIBBLE_API NibbleStatus nibble_optim_load(NibbleOptim* optim, const void* from, int64_t bytes, void* stream,
                                          char* error) {
    return on_device(optim, stream, error, [&] {
        const StatesHeader here = states_header(optim);
        StatesHeader header;
        if (bytes < (int64_t)sizeof(header)) user_error("%lld bytes are no states", (long long)bytes);
        memcpy(&header, from, sizeof(header));
        if (memcmp(header.magic, here.magic, sizeof(here.magic)) != 0) {
            user_error("these bytes are no states that nibble_optim_save wrote");
        }
        header.text[sizeof(header.text) - 1] = 0;
        if (strcmp(header.text, here.text) != 0) {
            user_error("the states are of %s, and the optimizer has %s", header.text, here.text);
        }
        if (header.tensors != here.tensors || header.bytes != here.bytes ||
            bytes != (int64_t)sizeof(header) + here.bytes) {
            user_error("the states are of other tensors: another number, order, name or shape");
        }
        const char* at = (const char*)from + sizeof(header);
        each_array(optim, [&](void* array, int64_t length) {
            copy_to_device(&optim->dev, array, at, length);
            at += length;
        });
        optim_loaded(optim->optim);
        for (int t = 0; t < optim->count; t++) optim->stale[t] = at[t];
    });
}

// Questions about an optimizer: its tensors and its description.

NIBBLE_API NibblePlace nibble_optim_place(const NibbleOptim* optim, int tensor) {
    if (tensor < 0 || tensor >= optim->count) return {optim->end, -1, -1};
    const NibbleTensor* given = &optim->tensor[tensor];
    const int64_t first = given->count < 0 ? 0 : given->first - given->first % TILE_ELEMENTS;
    const Plan* plan = optim->optim->plan;
    const int launch = plan->launch_of[tensor];
    const bool whole = config_reads_whole(&plan->launch[launch].config);
    return {optim->placed[tensor].element - first, optim->owner[tensor], whole ? launch : -1};
}

NIBBLE_API const char* nibble_optim_describe(const NibbleOptim* optim) {
    return optim->describe;
}

NIBBLE_API const char* nibble_optim_setting(const NibbleOptim* optim, const char* key) {
    const Setting* setting = setting_find(key);
    return setting && setting->kind == TEXT ? *(const char* const*)((const char*)optim + setting->at) : nullptr;
}

NIBBLE_API int nibble_optim_gpus(void) {
    int gpus = 0;
    count_gpus(&gpus);
    return gpus;
}

NIBBLE_API int nibble_optim_version(void) {
    return NIBBLE_OPTIM_VERSION;
}
