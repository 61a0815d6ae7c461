// Tests of optim/offload.h: steps whose states come from host memory a part at a time have the bits of steps with all
// states on the device, for every order of the parts and for shards; and the planned memory is what is allocated.
#include "../../optim/offload.h"
#include "rules.h"

constexpr int LAYERS = 3, COUNT = 2 + 2 * LAYERS + 1, STEPS = 4;
static const OptimTensor model[COUNT] = {
    {"wte.weight", 129, 40, true, 0},      {"wpe.weight", 70, 40, true, 0},
    {"h.0.ln_1.weight", 1, 300, false, 0}, {"h.0.mlp.c_fc.weight", 81, 137, true, 0},
    {"h.1.ln_1.weight", 1, 300, false, 0}, {"h.1.mlp.c_fc.weight", 81, 137, true, 0},
    {"h.2.ln_1.weight", 1, 300, false, 0}, {"h.2.mlp.c_fc.weight", 81, 137, true, 0},
    {"ln_f.weight", 1, 2500, false, 0}};
static const int part[COUNT] = {3, 3, 0, 0, 1, 1, 2, 2, 4};
static const int orders[][LAYERS + 2] = {{0, 1, 2, 3, 4}, {4, 2, 1, 0, 3}};

struct Case {
    const char *rule, *weights, *state, *overrides;
    int64_t begin, end;  // of the shard, in tiles; end 0: all
    float limit_growth = 0.0f;
};
static const Case cases[] = {
    {"adamw", "bf16:sr", "dyn8/256", "", 0, 0},
    {"adamw", "lin8:sr", "de4/32@dq8", "", 0, 0},
    {"adamw", "bf16+fp32", "fp16:sr", "", 0, 0},
    {"ademamix", "fp32", "fp32", "", 0, 0},
    {"lion", "lin8:sr", "de4/128:sr", "", 0, 0},
    {"adamw", "bf16:sr", "dyn8/256", "ln*|wpe: weights=fp32 m=fp32; h.1: m=bf16:sr rule=lion", 0, 0},
    {"adamw", "bf16:sr", "lin8/128:sr", "ln*: m=fp32", 2, 9},  // cuts two tensors
    {"adamw", "bf16:sr", "lin8/128:sr", "", 0, 1},             // a single part
    {"adamw", "bf16:sr", "lin8/128:sr", "", 4, 7},             // two
    // Rules and formats that reach over a tensor.
    {"adam-mini", "bf16:sr", "dyn8/256", "", 0, 0},
    {"adafactor", "lin8:sr", "bf16:sr", "ln*: rule=adamw v=fp32", 0, 0},
    {"came", "bf16:sr", "fp32", "", 0, 0},
    {"rmnp", "bf16:sr", "de4/128", "ln*|w*: rule=adamw v=bf16:sr", 0, 0},
    {"adamw", "e4m3/tensor+fp32", "dyn8/rank1", "ln*: weights=bf16+fp32 m=e4m3/tensor", 0, 0},
    {"adamw", "bf16:sr", "dyn8/256", "h.1: m=fp32 v=fp32", 0, 0, 1.01f},
};

// One optimizer with its states on the device and one whose states are in host memory.
struct Pair {
    Device dev;
    OptimConfig config[2];
    OptimTensor tensor[COUNT];
    int64_t elements;
    Optim* optim[2];
    Offload* offload;
};

static void pair_open(Pair* pair, const Case* c, const int* order, bool gpu) {
    static float values[129 * 137];
    device_open(&pair->dev, gpu, 0);
    memcpy(pair->tensor, model, sizeof(model));
    for (int k = 0; k < 2; k++) {
        pair->config[k] = make_config(c->rule, c->weights, c->state);
        pair->config[k].overrides = c->overrides, pair->config[k].offload = k == 1;
        pair->config[k].limit_growth = c->limit_growth;
        pair->elements = optim_layout(pair->tensor, COUNT, &pair->config[k]);
        pair->config[k].begin = c->begin * TILE_ELEMENTS, pair->config[k].end = c->end * TILE_ELEMENTS;
        pair->optim[k] = optim_create(&pair->dev, &pair->config[k], pair->tensor, COUNT, OPTIM_BF16);
        for (int t = 0; t < COUNT; t++) {
            for (int64_t i = 0; i < model[t].rows * model[t].cols; i++) values[i] = start(t * 100000 + i);
            optim_set_weights(pair->optim[k], t, values);
        }
        optim_decode(pair->optim[k]);
    }
    pair->offload = offload_open(&pair->dev, pair->optim[1], pair->tensor, part, COUNT, LAYERS, order);
}

// Steps of both; the factor of one is NaN, which changes nothing.
static void pair_steps(Pair* pair) {
    const int64_t bytes = pair->elements * (int64_t)sizeof(float);
    float *host = (float*)calloc((size_t)pair->elements, sizeof(float)), *scale = (float*)device_alloc(&pair->dev, 4);
    float* grads = (float*)device_alloc(&pair->dev, bytes);
    for (int step = 1; step <= STEPS; step++) {
        const float factor = step == 2 ? NAN : 0.5f;
        for (int t = 0; t < COUNT; t++) {
            for (int64_t i = 0; i < model[t].rows * model[t].cols; i++) {
                host[pair->tensor[t].offset + i] = gradient(step, t * 100000 + i);
            }
        }
        copy_to_device(&pair->dev, grads, host, bytes);
        copy_to_device(&pair->dev, scale, &factor, 4);
        optim_step(pair->optim[0], grads + pair->config[0].begin, scale, 1e-2f, step);
        offload_step(pair->offload, grads + pair->config[1].begin, scale, 1e-2f, step);
        device_sync(&pair->dev);
    }
    offload_settle(pair->offload);
    device_free(&pair->dev, grads);
    device_free(&pair->dev, scale);
    free(host);
}

static void check_bytes(Test* test, const Pair* pair, const char* what) {
    OptimBytes bytes[2];
    for (int k = 0; k < 2; k++) {
        const OptimBytes real = optim_allocated(pair->optim[k]);
        bytes[k] = optim_bytes(&pair->config[k], pair->tensor, COUNT, OPTIM_BF16);
        expect(memcmp(&bytes[k], &real, sizeof(real)) == 0, "%s: planned and allocated differ", what);
    }
    // Numbers of whole tensors stay on the device.
    expect(bytes[0].host == 0 && bytes[1].states + bytes[1].host == bytes[0].states && bytes[1].host > 0,
           "%s: %lld bytes of states, %lld on the host", what, (long long)bytes[0].states, (long long)bytes[1].host);
    expect(bytes[1].states < 65536, "%s: %lld bytes on the device", what, (long long)bytes[1].states);
    const int64_t slots = offload_bytes(&pair->config[1], pair->tensor, part, COUNT, LAYERS);
    expect(slots > 0 && slots <= 2 * bytes[1].host, "%s: slots of %lld bytes", what, (long long)slots);
}

static void check_case(Test* test, const Case* c, const int* order, bool gpu) {
    char what[200];
    snprintf(what, sizeof(what), "%s, %s, %s, \"%s\", tiles %lld to %lld", c->rule, c->weights, c->state, c->overrides,
             (long long)c->begin, (long long)c->end);
    Pair pair;
    pair_open(&pair, c, order, gpu);
    check_bytes(test, &pair, what);
    pair_steps(&pair);
    const int count = optim_stream_count(pair.optim[0]);
    expect(count == optim_stream_count(pair.optim[1]) && count > 1, "%s: %d streams", what, count);
    for (int i = 0; i < count; i++) {
        const OptimStream a = optim_stream(pair.optim[0], i), b = optim_stream(pair.optim[1], i);
        const int64_t bytes = a.elements * a.element_bytes;
        char *want = (char*)malloc((size_t)bytes + 1), *got = (char*)malloc((size_t)bytes + 1);
        copy_to_host(&pair.dev, want, a.data, bytes);
        copy_to_host(&pair.dev, got, b.data, bytes);
        expect(memcmp(want, got, (size_t)bytes) == 0, "%s: %s", what, a.name);
        free(want), free(got);
    }
    const int64_t seen = (pair.config[0].end ? pair.config[0].end - pair.config[0].begin : pair.elements) * 2;
    char *want = (char*)malloc((size_t)seen), *got = (char*)malloc((size_t)seen);
    copy_to_host(&pair.dev, want, optim_weights(pair.optim[0]), seen);
    copy_to_host(&pair.dev, got, optim_weights(pair.optim[1]), seen);
    expect(memcmp(want, got, (size_t)seen) == 0, "%s: what the matmuls read", what);
    free(want), free(got);
    offload_close(pair.offload);
    for (Optim* optim : pair.optim) optim_free(optim);
    device_close(&pair.dev);
}

TEST_BOTH(offload_states) {
    CacheFolder folder = cache_enter();
    for (const Case& c : cases) {
        for (const int* order : orders) check_case(test, &c, order, gpu);
    }
    cache_leave(&folder);
}
