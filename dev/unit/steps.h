// A model under one configuration, stepped on the CPU or on a GPU: what the tests of optim/ share. Start weights and
// gradients depend on the tensor and on the element in it, not on where the layout puts the tensor, so that runs with
// other layouts, shards and devices can be compared to the bit.
#pragma once
#include <vector>

#include "../../kernels/ranks/slices.cuh"
#include "../../optim/table.cuh"
#include "../../optim/made.h"
#include "../../optim/checkpoint/checkpoint.h"
#include "../room.h"
#include "rules.h"

// These rules read elements or rows; those that read matrices are tested in laws.cu alone.
constexpr const char* SIMPLE_RULES[] = {OPTIM_RULES(OPTIM_NAME)};
constexpr const char* GRADS_NAMES[] = {OPTIM_GRADS(OPTIM_NAME)};

inline std::vector<const char*> state_names() {
    std::vector<const char*> names;
    for (int i = 0; i < state_table().count; i++) names.push_back(state_table().row[i].name);
    return names;
}
static const std::vector<const char*> STATE_NAMES = state_names();

inline int name_count(const std::vector<const char*>& names) {
    return (int)names.size();
}

// Returns the presets whose rule reads single elements.
inline std::vector<const char*> element_presets() {
    std::vector<const char*> names;
    for (const PresetRow& row : PRESETS) {
        const RuleRow* rule = find_row(rule_table(), row.rule);
        if (!rule->by_rows && !rule->matrix) names.push_back(row.name);
    }
    return names;
}

constexpr int MAX_TENSORS = 70;

// Returns the configuration of a shard that keeps elements `begin` to `end` - 1 of the arena. Its run is never freed.
inline OptimConfig shard_config(OptimConfig config, int64_t begin, int64_t end) {
    SliceRun* run = (SliceRun*)memory_zero(1, sizeof(SliceRun));
    *run = {begin / TILE_ELEMENTS, 0, (end - begin) / TILE_ELEMENTS};
    config.runs = run, config.run_count = end > begin ? 1 : 0;
    return config;
}

inline int64_t shard_begin(const OptimConfig* config) {
    return config->runs ? config->runs->tile * TILE_ELEMENTS : 0;
}

inline int64_t shard_end(const OptimConfig* config, int64_t elements) {
    return config->runs ? (config->runs->tile + config->runs->tiles) * TILE_ELEMENTS : elements;
}

// Moves cuts of the arena out of tensors that are read whole, to the nearer end.
inline void cuts_allow(const OptimConfig* config, const OptimTensor* tensors, int count, int64_t* cut, int cuts) {
    int64_t grain[MAX_TENSORS], cost[MAX_TENSORS];
    optim_slice(config, tensors, count, grain, cost);
    for (int t = 0; t < count; t++) {
        const int64_t begin = tensors[t].offset, end = begin + tensor_padded(&tensors[t]);
        for (int i = 0; i < cuts; i++) {
            if (grain[t] == 1 || cut[i] <= begin || cut[i] >= end) continue;
            cut[i] = cut[i] - begin < end - cut[i] ? begin : end;
        }
    }
}

// Open from run_open() on, until it is opened again or its scope ends.
struct OptimRun {
    Device dev;
    OptimConfig config;
    OptimTensor tensor[MAX_TENSORS];
    int count;
    int64_t elements;  // of the whole arena
    Optim* optim = nullptr;
    OptimType compute;
    mutable Room room{&dev};  // for copies that go with the run

    OptimRun() = default;
    OptimRun(const OptimRun&) = delete;
    ~OptimRun() { close(); }

    void close() {
        room.clear();
        if (optim) optim_free(optim), device_close(&dev);
        optim = nullptr;
    }
};

struct Steps {
    float lr = 1e-2f, factor = 0.5f;  // factor: what every gradient is multiplied by
    bool wild = false;                // the gradients of step 2 hold NaN, infinities and the ends of fp32
    bool spread = true;               // magnitudes differ by tensor, row and column; false: gradient() alone
    int bad = 0;                      // the step whose factor is NaN
    float (*given)(int64_t step, int t, int64_t i) = nullptr;  // gradients instead of all this
    // Takes a step in optim_step's place.
    void (*take)(void* context, OptimRun* run, const void* grads, const float* scale, float lr, int step) = nullptr;
    void* context = nullptr;
};

inline float run_start(int t, int64_t i) {
    return start(t * 1000000 + i);
}

inline float run_gradient(const OptimTensor* tensor, int64_t step, int t, int64_t i, const Steps& how) {
    const float strange[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 1e-40f, -0.0f};
    if (how.given) return how.given(step, t, i);
    if (how.wild && step == 2 && i % 97 == 5) return strange[i / 97 % 7];
    float g = gradient(step, t * 1000000 + i);
    if (!how.spread) return g;
    int exponent = (int)(i / tensor->cols % 5) - (int)(i % tensor->cols % 11);
    return ldexpf(g, exponent + (t % 3 == 2 ? (int)(30.0f * test_uniform(2001, i)) : 0));
}

inline OptimConfig preset_config(const char* preset, const char* grads, const char* overrides = "") {
    OptimConfig config = {{}, preset, "", "", grads, "", "", 42};
    config.beta3 = 0.999f, config.alpha = 2.0f, config.ramp = 9, config.overrides = overrides;
    return resolved(config);
}

// Does what make_config() does, with a format for each moment.
inline OptimConfig states_config(const char* rule, const char* weights, const char* grads, const char* m,
                                 const char* v) {
    OptimConfig config = make_config(rule, weights, "fp32");
    config.grads = grads, config.m = m, config.lr_max = 1e-2f;
    if (keeps_v(rule)) config.v = v;
    return resolved(config);
}

inline void run_open(OptimRun* run, const OptimConfig* config, const OptimTensor* tensors, int count, OptimType compute,
                     bool gpu = false) {
    run->close();
    run->dev = test_device(gpu);
    run->config = *config, run->count = count, run->compute = compute;
    memcpy(run->tensor, tensors, (size_t)count * sizeof(*tensors));
    run->elements = optim_layout(run->tensor, count, config);
    run->optim = optim_create(&run->dev, &run->config, run->tensor, count, compute);
    float* values = run->room.host<float>(run->elements);
    for (int t = 0; t < count; t++) {
        for (int64_t i = 0; i < tensors[t].rows * tensors[t].cols; i++) values[i] = run_start(t, i);
        optim_set_weights(run->optim, t, values);
    }
    optim_decode(run->optim);
}

template <int COUNT>
void run_open(OptimRun* run, const OptimConfig* config, const OptimTensor (&tensors)[COUNT], OptimType compute,
              bool gpu = false) {
    run_open(run, config, tensors, COUNT, compute, gpu);
}

// Takes the steps `first` to `last`. Padding has gradients of zero, as the trainer leaves it.
inline void run_steps(OptimRun* run, int first, int last, const Steps& how = Steps()) {
    const Device* dev = &run->dev;
    const bool narrow = is(run->config.grads, "bf16");
    const int64_t begin = shard_begin(&run->config), end = shard_end(&run->config, run->elements);
    Room room(dev);
    float *values = room.zeros<float>(run->elements), *scale = room.device<float>(1);
    uint16_t* rounded = room.zeros<uint16_t>(run->elements);
    void* grads = room.device<float>(end - begin);
    for (int step = first; step <= last; step++) {
        const float factor = step == how.bad ? NAN : how.factor;
        copy_to_device(dev, scale, &factor, 4);
        for (int t = 0; t < run->count; t++) {
            const OptimTensor* tensor = &run->tensor[t];
            for (int64_t i = 0; i < tensor->rows * tensor->cols; i++) {
                const float g = run_gradient(tensor, step, t, i, how);
                values[tensor->offset + i] = g, rounded[tensor->offset + i] = Bf16::encode(g);
            }
        }
        const void* from = narrow ? (const void*)(rounded + begin) : (const void*)(values + begin);
        copy_to_device(dev, grads, from, (end - begin) * (narrow ? 2 : 4));
        if (how.take) how.take(how.context, run, grads, scale, how.lr, step);
        if (!how.take) optim_step(run->optim, grads, scale, how.lr, step);
    }
    device_sync(dev);
}

// Copies bytes of device memory to host memory, which goes with the run.
inline void* to_host(const OptimRun* run, const void* data, int64_t bytes) {
    return run->room.to_host((const char*)data, bytes);
}

// Returns the stream of this name; its data and name are NULL if there is none.
inline OptimStream optim_stream_named(const Optim* optim, const char* name) {
    for (int i = 0; i < optim->stream_count; i++) {
        if (is(optim->stream[i].name, name)) return optim->stream[i];
    }
    return {};
}

// Copies a stored array to such memory; NULL if there is none.
inline void* run_array(const OptimRun* run, const char* name) {
    const OptimStream stream = optim_stream_named(run->optim, name);
    return stream.data ? to_host(run, stream.data, stream.elements * stream.element_bytes) : nullptr;
}

inline bool same_bytes(const OptimRun* a, const void* x, const OptimRun* b, const void* y, int64_t bytes) {
    Room of_a(&a->dev), of_b(&b->dev);
    return memcmp(of_a.to_host((const char*)x, bytes), of_b.to_host((const char*)y, bytes), (size_t)bytes) == 0;
}

// Finds where two runs of one layout differ: the name of an array, or NULL if all stored bytes and the copy that the
// matmuls read are the same.
inline const char* difference(const OptimRun* a, const OptimRun* b) {
    if (a->optim->stream_count != b->optim->stream_count) return "the number of arrays";
    for (int s = 0; s < a->optim->stream_count; s++) {
        OptimStream x = a->optim->stream[s], y = b->optim->stream[s];
        const int64_t bytes = x.elements * x.element_bytes;
        if (!is(x.name, y.name) || bytes != y.elements * y.element_bytes) return x.name;
        if (!same_bytes(a, x.data, b, y.data, bytes)) return x.name;
    }
    const int64_t held = shard_end(&a->config, a->elements) - shard_begin(&a->config),
                  size = a->compute == OPTIM_BF16 ? 2 : 4;
    const void *x = a->optim->seen, *y = b->optim->seen;
    return x && y && !same_bytes(a, x, b, y, held * size) ? "what the matmuls read" : nullptr;
}

inline void expect_same(Test* test, const OptimRun* a, const OptimRun* b, const char* what) {
    const char* where = difference(a, b);
    expect(!where, "%s: %s", what, where);
}

inline bool same_tensor(const OptimRun* a, const OptimRun* b, int tensor) {
    const int64_t n = a->tensor[tensor].rows * a->tensor[tensor].cols;
    Room room(nullptr);
    float *x = room.host<float>(n), *y = room.host<float>(n);
    optim_get_weights(a->optim, tensor, x), optim_get_weights(b->optim, tensor, y);
    return memcmp(x, y, (size_t)n * 4) == 0;
}

// A run stands for a checkpoint, from which another is loaded.
struct Stored {
    const OptimRun* from;
    char notices[8][256];
    int notice_count;
};

inline const void* stored_array(void* context, const char* name, const char* dtype, int64_t bytes) {
    const OptimRun* from = ((Stored*)context)->from;
    const OptimStream stream = optim_stream_named(from->optim, name);
    const bool found = stream.data && is(stream.dtype, dtype);
    return found && stream.elements * stream.element_bytes == bytes ? to_host(from, stream.data, bytes) : nullptr;
}

inline void stored_read(void*, const void* array, int64_t at, int64_t bytes, void* to) {
    memcpy(to, (const char*)array + at, (size_t)bytes);
}

inline void stored_weights(void* context, int tensor, float* values) {
    optim_get_weights(((Stored*)context)->from->optim, tensor, values);
}

// Loads `to` from `from`, whose file holds `more` arrays besides. Returns false and a sentence if it cannot.
inline bool run_load(OptimRun* to, const OptimRun* from, Stored* context, int more, char* error) {
    *context = {from, {}, 0};
    OptimStored stored = {from->config, more, stored_array, stored_read, stored_weights, context};
    for (int s = 0; s < from->optim->stream_count; s++) {
        stored.arrays += !from->optim->stream[s].is_weights || !optim_model_dtype(from->optim->stream[s].dtype);
    }
    const bool loaded = optim_load(to->optim, &stored, error);
    if (loaded) optim_decode(to->optim);
    for (const char* at = stored.notices; at && *at && context->notice_count < 8; at = strchr(at, '\n') + 1) {
        sscanf(at, " notice %255[^\n]", context->notices[context->notice_count++]);
    }
    return loaded;
}

inline Stored expect_load(Test* test, OptimRun* to, const OptimRun* from) {
    Stored context;
    expect(run_load(to, from, &context, 0, error), "%s", error);
    return context;
}

// optim_bytes counts by the walk that optim_create takes. So this finds what one of them leaves out alone; matrix_room,
// override.cu's figures and the tests of memory in use look at the sizes themselves.
inline void expect_planned(Test* test, const OptimRun* run, const char* what) {
    OptimBytes plan = optim_bytes(&run->dev, &run->config, run->tensor, run->count, run->compute);
    OptimBytes real = run->optim->allocated;
    expect(memcmp(&plan, &real, sizeof(plan)) == 0, "%s: planned and allocated differ", what);
}

// Takes steps with gradients over 20 powers of two; in step `bad` the factor is NaN.
inline Steps plain_steps(int bad = 0) {
    Steps how;
    how.spread = false, how.bad = bad;
    return how;
}

inline const char* describe(const OptimConfig* config) {
    return formatted("%s, grads %s%s%s%s", described(*config), config->grads, *config->overrides ? ", " : "",
                     config->overrides, config->runs ? ", a shard" : "");
}

// Takes so many steps on the CPU and on a GPU, which is said to have `multiprocessors` of them (0: all); the bits are
// the same.
inline void expect_equal_cpu_gpu(Test* test, const OptimConfig* config, const OptimTensor* tensors, int count,
                                 OptimType compute, int steps, const Steps& how = Steps(), int multiprocessors = 0) {
    OptimRun run[2];
    for (int gpu = 0; gpu < 2; gpu++) {
        run_open(&run[gpu], config, tensors, count, compute, gpu == 1);
        if (gpu && multiprocessors) run[gpu].dev.sm_count = multiprocessors;
        run_steps(&run[gpu], 1, steps, how);
    }
    expect_same(test, &run[0], &run[1],
                formatted("%s, %d columns%s", describe(config), (int)tensors[0].cols, how.wild ? ", wild" : ""));
}

// Compiles into the cache, on all cores, the kernels of those configurations that has(k) picks.
template <class Has>
void compile_all(Test* test, const std::vector<OptimConfig>& all, Has has, OptimType (*compute_of)(int k)) {
    const Device gpu = test_device(true);
    int bad = in_processes(test, 2 * (int)all.size(), [&](int i) {
        char architecture[32];
        JitImage image = {};
        const int k = i / 2;
        if (!has(k) || (i % 2 && compute_of(k) == OPTIM_BF16)) return;
        const char* expression = kernel_of(all[k], nullptr, i % 2 ? OPTIM_BF16 : compute_of(k));
        // An error here comes again, and is reported, when the optimizer is created.
        if (jit_architecture(gpu.compute, architecture, sizeof(architecture), error) &&
            jit_get(expression, architecture, true, &image, error)) {
            jit_free(&image);
        }
    });
    expect(bad == 0, "%d processes did not end well", bad);
}

// The arrays of shards, one after another, are those of the whole, and so are the copies that the matmuls read.
inline void expect_joined(Test* test, const OptimRun* whole, const OptimRun* shards, int count, const char* what) {
    for (int s = 0; s < whole->optim->stream_count; s++) {
        const OptimStream want = whole->optim->stream[s];
        int64_t used = 0, bytes = want.elements * want.element_bytes;
        bool same = true;
        for (int k = 0; k < count; k++) {
            const OptimStream got = optim_stream_named(shards[k].optim, want.name);
            if (!got.data) continue;
            const int64_t part = got.elements * got.element_bytes;
            same = same && used + part <= bytes;
            if (same) same = same_bytes(&shards[k], got.data, whole, (const char*)want.data + used, part);
            used += part;
        }
        expect(same && used == bytes, "%s: %s, %lld of %lld bytes", what, want.name, (long long)used, (long long)bytes);
    }
    const int64_t size = whole->compute == OPTIM_BF16 ? 2 : 4;
    for (int k = 0; k < count; k++) {
        const int64_t begin = shard_begin(&shards[k].config), end = shard_end(&shards[k].config, whole->elements);
        const char* copy = (const char*)whole->optim->seen + begin * size;
        expect(same_bytes(&shards[k], shards[k].optim->seen, whole, copy, (end - begin) * size),
               "%s: what the matmuls read of shard %d", what, k);
        expect_planned(test, &shards[k], what);
    }
}
