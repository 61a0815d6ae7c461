// Tests of optim/model/offload.cu: steps whose states come from host memory a part at a time have the bits of steps
// with all states on the device, for every order of the parts and for shards; and the planned memory is what is
// allocated.
#include "layers.h"

constexpr int STEPS = 4;

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
    OptimRun run[2];
    Arena arena;
};

static void pair_open(Pair* pair, const Case* c, bool backward, bool gpu) {
    for (int k = 0; k < 2; k++) {
        OptimConfig config = make_config(c->rule, c->weights, c->state);
        config.overrides = c->overrides, config.offload = k == 1, config.limit_growth = c->limit_growth;
        if (c->end > 0) config = shard_config(config, c->begin * TILE_ELEMENTS, c->end * TILE_ELEMENTS);
        run_open(&pair->run[k], &config, model, OPTIM_BF16, gpu);
    }
    OptimRun* run = &pair->run[1];
    pair->arena = arena_of(run);
    pair->arena.releases = backward;
    pair->arena.offload = offload_open(&pair->arena);
}

// Steps of both; the factor of one is NaN, which changes nothing.
static void pair_steps(Pair* pair) {
    Steps how = plain_steps(2);
    run_steps(&pair->run[0], 1, STEPS, how);
    how.context = &pair->arena;
    how.take = [](void* arena, OptimRun* run, const void* grads, const float* scale, float lr, int step) {
        ((Arena*)arena)->step = {0.0f, lr, step};
        const Plan* plan = run->optim->plan;
        const int64_t bytes = is(run->config.grads, "bf16") ? 2 : 4;
        for (int t = 0; t < COUNT; t++) {
            optim_tensor_grads(run->optim, t, (const char*)grads + first_here(plan, t) * bytes);
        }
        offload_step((Arena*)arena, scale);
        device_sync(&run->dev);
    };
    run_steps(&pair->run[1], 1, STEPS, how);
    arena_settle(&pair->arena);
}

static void check_bytes(Test* test, const Pair* pair, const char* what) {
    OptimBytes bytes[2];
    for (int k = 0; k < 2; k++) {
        const OptimRun* run = &pair->run[k];
        bytes[k] = optim_bytes(&run->dev, &run->config, run->tensor, COUNT, OPTIM_BF16);
        expect_planned(test, run, what);
    }
    // Numbers of whole tensors stay on the device.
    expect(bytes[0].host == 0 && bytes[1].states + bytes[1].host == bytes[0].states && bytes[1].host > 0,
           "%s: %lld bytes of states, %lld on the host", what, (long long)bytes[0].states, (long long)bytes[1].host);
    expect(bytes[1].states < 65536, "%s: %lld bytes on the device", what, (long long)bytes[1].states);
    const int64_t slots = offload_bytes(&pair->arena, &pair->run[1].config);
    expect(slots > 0 && slots <= 2 * bytes[1].host, "%s: slots of %lld bytes", what, (long long)slots);
}

static void check_case(Test* test, const Case* c, bool backward, bool gpu) {
    const char* what = formatted("%s, %s, %s, \"%s\", tiles %lld to %lld", c->rule, c->weights, c->state, c->overrides,
                                 (long long)c->begin, (long long)c->end);
    Pair pair;
    pair_open(&pair, c, backward, gpu);
    check_bytes(test, &pair, what);
    pair_steps(&pair);
    expect_same(test, &pair.run[0], &pair.run[1], what);
    expect(optim_stream_count(pair.run[0].optim) > 1, "%s: one array", what);
    offload_close(pair.arena.offload);
}

TEST_BOTH(offload_states) {
    CacheFolder folder;
    for (const Case& c : cases) {
        for (const bool backward : {false, true}) check_case(test, &c, backward, gpu);
    }
}
