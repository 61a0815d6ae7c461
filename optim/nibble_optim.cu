// Implements nibble_optim.h: it reads settings, reports errors as text, and runs an optimizer of optim.h over the
// caller's weights and gradients (placed.h).
//
// The optimizer reports mistakes through user_error and failures through check, which end ./train. In the library both
// call launch_failed below, which returns to the library's function by longjmp with the sentence. What a function takes
// from memory.h is in the optimizer's list until it is freed, so that nibble_optim_free frees it too if nobody knows it
// any more.
#include "checkpoint/arrays.h"
#include "nibble_optim.h"

#include <math.h>
#include <setjmp.h>

#include "../kernels/gpus.cuh"
#include "loaded_cublaslt.h"
#include "nibble_settings.h"

#define NIBBLE_API extern "C" __attribute__((visibility("default")))

// Errors.

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
    snprintf(optim->describe, sizeof(optim->describe), "%s", optim_describe(config));
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
        optim->config = OptimConfig(), optim->gpu = -1, optim->share = -1, optim->count = count;
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
    return !serves_directly(row, optim->compute) || row->stream[1].bits > 0 || row->stream[2].bits > 0;
}

// Makes the weights that are kept beside a parameter from its value.
static void weights_take(NibbleOptim* optim, int tensor, const void* weights) {
    const PlacedTensor* placed = &optim->placed[tensor];
    const FormatRow* row = compute_row(optim->compute);
    const int64_t bytes = row->stream[0].bits / 8;
    const int64_t room = ceil_div(placed->count, TILE_ELEMENTS) * TILE_ELEMENTS;  // view() takes a tile at a time
    float* values = (float*)memory_zero((size_t)(placed->head + room), sizeof(float));
    char* codes = (char*)memory_zero((size_t)room, (size_t)bytes);
    copy_to_host(&optim->dev, codes, weights, placed->count * bytes);
    for (int64_t i = 0; i < room; i += TILE_ELEMENTS) {
        row->view({codes + i * bytes, nullptr}, 0, values + placed->head + i, TILE_ELEMENTS);
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
    const NibbleGroup* checked = nullptr;  // the last tensor's
    RuleOptions own = {};
    char error[DATA_ERROR_BYTES];
    if (step->step < 1) user_error("step: %lld was found; steps count from 1", (long long)step->step);
    for (int t = 0; t < optim->count; t++) {
        if (!step->grads[t]) continue;
        const NibbleGroup* group = &step->group[step->group_of ? step->group_of[t] : 0];
        const char* name = optim->tensor[t].name;
        if (!step->weights[t] && optim->placed[t].count > 0) user_error("%s has a gradient and no address", name);
        const RuleRow* rule = launch_of(optim->optim->plan, t)->rows.rule;
        if (group->eps == 0.0f && divides_by_eps(rule)) user_error("%s: eps 0 was found; give a number above 0", name);
        if (group == checked) continue;
        if (!isfinite(group->lr)) user_error("%s: lr %g was found; give a number", name, group->lr);
        own.beta1 = group->beta1, own.beta2 = group->beta2, own.eps = group->eps;
        own.weight_decay = group->weight_decay;
        for (const char* option : GROUP_OPTIONS) {
            if (!option_fits(rule_option_find(option), &own, error)) user_error("%s: %s", name, error);
        }
        checked = group;
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
    if (tensor == -1 && index >= 0 && index < optim->optim->stream_count) {
        const OptimStream stream = optim->optim->stream[index];
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

NIBBLE_API NibbleStatus nibble_optim_moment(NibbleOptim* optim, int tensor, const char* name, float* values, int writes,
                                            void* stream, char* error) {
    return on_device(optim, stream, error, [&] {
        const PlacedTensor* placed = &optim->placed[tensor];
        const size_t count = (size_t)(placed->head + placed->count);
        float* all = (float*)memory_zero(count, sizeof(float));
        int slot = SLOT_M;
        while (slot < SLOTS && strcmp(name, slot_name((Slot)slot)) != 0) slot++;
        if (writes) memcpy(all + placed->head, values, (size_t)placed->count * sizeof(float));
        if (slot > SLOT_SLOW || is_elsewhere(optim, tensor) ||
            !optim_moment(optim->optim, tensor, (Slot)slot, all, writes))
            user_error("%s of %s is not kept here in the parameter's shape", name, optim->tensor[tensor].name);
        if (writes) optim_loaded(optim->optim);
        if (!writes) memcpy(values, all + placed->head, (size_t)placed->count * sizeof(float));
        free(all);
    });
}

// nibble_optim_save writes this before the arrays.
struct StatesHeader {
    char magic[16];
    char text[1000];   // the settings on which the meaning of the arrays depends
    uint64_t tensors;  // a checksum of names and shapes
    int64_t bytes;     // of all arrays and of NibbleOptim::stale, which follow the header
};

// Copies all arrays of the states, then which weights are stale, to host memory or, if `writes`, from there.
static void states_copy(NibbleOptim* optim, char* at, bool writes) {
    for (int s = 0; s < optim->optim->stream_count; s++) {
        const OptimStream stream = optim->optim->stream[s];
        const int64_t bytes = stream.elements * stream.element_bytes;
        if (writes) copy_to_device(&optim->dev, stream.data, at, bytes);
        if (!writes) copy_to_host(&optim->dev, at, stream.data, bytes);
        at += bytes;
    }
    for (int t = 0; t < optim->count; t++) {
        if (writes) optim->stale[t] = at[t];
        if (!writes) at[t] = optim->stale[t];
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
    for (int s = 0; s < optim->optim->stream_count; s++) {
        header.bytes += optim->optim->stream[s].elements * optim->optim->stream[s].element_bytes;
    }
    return header;
}

NIBBLE_API int64_t nibble_optim_bytes(const NibbleOptim* optim) {
    return (int64_t)sizeof(StatesHeader) + states_header(optim).bytes;
}

NIBBLE_API NibbleStatus nibble_optim_save(const NibbleOptim* optim, void* to, void* stream, char* error) {
    return on_device(optim, stream, error, [&] {
        const StatesHeader header = states_header(optim);
        memcpy(to, &header, sizeof(header));
        states_copy((NibbleOptim*)optim, (char*)to + sizeof(header), false);
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
        states_copy(optim, (char*)from + sizeof(header), true);
        optim_loaded(optim->optim);
    });
}

// Questions about an optimizer: its tensors and its description.

NIBBLE_API NibblePlace nibble_optim_place(const NibbleOptim* optim, int tensor) {
    if (tensor < 0 || tensor >= optim->count) return {optim->end, -1, -1};
    const NibbleTensor* given = &optim->tensor[tensor];
    const int64_t first = given->count < 0 ? 0 : given->first - given->first % TILE_ELEMENTS;
    const Plan* plan = optim->optim->plan;
    const int launch = plan->tensor[tensor].launch;
    const bool whole = config_reads_whole(&plan->launch[launch].config);
    return {optim->placed[tensor].element - first, optim->owner[tensor], whole ? launch : -1};
}

NIBBLE_API const char* nibble_optim_describe(const NibbleOptim* optim) {
    return optim->describe;
}

NIBBLE_API const char* nibble_optim_setting(const NibbleOptim* optim, const char* key) {
    const char** text = setting_text((NibbleOptim*)optim, key);
    return text ? *text : nullptr;
}

static void list_options(FILE* file) {
    const RuleOptions standard = {};
    for (const Option& option : RULE_OPTION) {
        bool of_group = false;
        for (const char* name : GROUP_OPTIONS) of_group = of_group || rule_option_find(name) == &option;
        if (of_group) continue;
        fprintf(file, "%s\t%s", option.name, option.values);
        if (option.high > option.low) fprintf(file, " from %.12g to %.12g", option.low, option.high);
        fprintf(file, "\t%s\t%s\t%s\n", option_text(&option, &standard), option.needs, option.help);
    }
}

NIBBLE_API const char* nibble_optim_list(const char* what) {
    static char* text;
    static size_t bytes;
    free(text), text = nullptr;
    FILE* file = text_stream(&text, &bytes);
    if (strcmp(what, "presets") == 0) optim_list_presets(file);
    if (strcmp(what, "formats") == 0) optim_list_formats(file);
    if (strcmp(what, "options") == 0) list_options(file);
    fclose(file);
    return text;
}

NIBBLE_API int nibble_optim_matches(const char* patterns, const char* name) {
    return patterns_match(patterns, name);
}

NIBBLE_API int nibble_optim_gpus(void) {
    int gpus = 0;
    count_gpus(&gpus);
    return gpus;
}

NIBBLE_API int nibble_optim_version(void) {
    return NIBBLE_OPTIM_VERSION;
}
