// Laws of a model that is taken a part at a time (optim/model): weights decoded a part at a time have the bits of a
// copy of the whole model, whatever the order in which parts are asked for; a step that is taken part by part, from
// gradients that lie elsewhere or with states that come from host memory, has the bits of one over the whole arena; the
// planned memory is what is allocated. Matrices whose codes are operands are decoded only into the dequant_buffer.
#include <algorithm>

#include "../../kernels/fp8.cuh"
#include "../../optim/model/model.h"
#include "laws.h"

constexpr int STEPS = 3, LAYERS = 3;

// A tensor's part: its layer, the embeddings or the last layernorm, with wte, since a part has a run of the arena.
static int part_of(int t) {
    return model[t].name[0] == 'h'                 ? model[t].name[2] - '0'
           : strncmp(model[t].name, "wpe", 3) == 0 ? LAYERS
                                                   : LAYERS + 1;
}

// Returns a model of one rank whose optimizer is that of a run.
static Arena arena_of(OptimRun* run) {
    static int part[MODEL_COUNT];
    for (int t = 0; t < MODEL_COUNT; t++) part[t] = part_of(t);
    Arena a = {};
    a.dev = &run->dev, a.tensors = run->tensor, a.part = part, a.count = run->count, a.layers = LAYERS;
    a.type = run->compute, a.elements = run->elements, a.optim = run->optim;
    return a;
}

// A step of the run without a copy, a part at a time from the last to the first. The gradients of every other part lie
// in memory of their own, as those of a layer that is released do.
static void step_by_parts(void*, OptimRun* run, const void* given, const float* scale, float lr, int step) {
    const float* grads = (const float*)given;
    for (int number = LAYERS + 1; number >= 0; number--) {
        int tensor[MODEL_COUNT], count = 0;
        Room room(&run->dev);
        float* own = room.device<float>(run->elements);
        for (int t = 0; t < run->count; t++) {
            const int64_t padded = tensor_padded(&run->tensor[t]);
            const float* from = grads + run->tensor[t].offset;
            if (part_of(t) != number) continue;
            optim_tensor_grads(run->optim, t, number % 2 ? own : from);
            tensor[count++] = t;
            copy_to_device(&run->dev, own, room.to_host(from, padded), padded * 4);
            own += padded;
        }
        optim_step_tensors(run->optim, tensor, count, scale, lr, step);
        device_sync(&run->dev);
    }
}

static void expect_part(Test* test, const OptimRun* copy, const OptimRun* run, const Arena* arena, int number) {
    const int64_t size = run->compute == OPTIM_FP32 ? 4 : 2;
    for (int t = 0; t < run->count; t++) {
        const char* want = (const char*)copy->optim->seen + run->tensor[t].offset * size;
        expect(part_of(t) != number ||
                   same_bytes(copy, want, run, arena_at(arena, nullptr, t, 1), model[t].rows * model[t].cols * size),
               "%s: %s", run->config.weights, model[t].name);
    }
}

// Opens a run with a copy of the whole model and one without, whose configuration it returns.
static OptimConfig open_both(OptimRun* copy, OptimRun* run, const char* weights, const char* overrides,
                             OptimType compute, bool gpu) {
    OptimConfig config = make_config("adamw", weights, "fp32");
    config.overrides = overrides;
    open(copy, config, compute, gpu);
    config.keeps_copy = false;
    open(run, config, compute, gpu);
    return config;
}

static void check_decoded(Test* test, const char* weights, const char* overrides, OptimType compute, bool gpu) {
    OptimRun copy, run;
    const OptimConfig config = open_both(&copy, &run, weights, overrides, compute, gpu);
    Arena arena = arena_of(&run);
    arena.decoded = decoded_open(&arena);
    Steps how = plain_steps(), by_parts = how;
    if (optim_releases(&config, run.tensor, run.count, error)) by_parts.take = step_by_parts;
    for (int step = 1; step <= STEPS; step++) {
        // A forward and a backward pass; neighbours are there at the same time, and so are the last layer and ln_f.
        const int order[] = {3, 0, 1, 2, 4, 3, 2, 1, 0};
        int before = -1;
        for (int number : order) {
            arena_need(&arena, number);
            expect_part(test, &copy, &run, &arena, number);
            if (before < LAYERS && number < LAYERS && before >= 0) expect_part(test, &copy, &run, &arena, before);
            if (number == 4) expect_part(test, &copy, &run, &arena, 2);
            before = number;
        }
        run_steps(&copy, step, step, how);
        run_steps(&run, step, step, by_parts);
        arena_changed(&arena);
    }
    expect_planned(test, &run, weights);
    const OptimBytes plan = optim_bytes(&run.dev, &run.config, run.tensor, run.count, compute);
    const OptimBytes whole = optim_bytes(&copy.dev, &copy.config, run.tensor, run.count, compute);
    expect(whole.weights == plan.weights && whole.states == plan.states && plan.compute == 0,
           "%s: only the copy is gone", weights);
    const int64_t room = decoded_bytes(&arena, &run.config).room;
    expect((room == 0) == (whole.compute == 0) && room <= whole.compute, "%s: room %lld of %lld", weights,
           (long long)room, (long long)whole.compute);
    expect_same(test, &copy, &run, formatted("%s, after steps by parts", weights));
}

// The codes of a matrix and the numbers of their scale are its weights, to the bit.
static void expect_codes(Test* test, const OptimRun* copy, const OptimRun* run, const Arena* arena, int t,
                         const char* what) {
    const int64_t n = model[t].rows * model[t].cols;
    const OptimCodes stored = optim_codes(run->optim, t);
    const uint8_t* at = arena_codes(arena, t);
    expect(at && at == stored.codes && (uintptr_t)at % 16 == 0 && !arena_at(arena, nullptr, t, 1), "%s: no operand",
           what);
    Room room(&run->dev);
    float* want = room.host<float>(n);
    optim_get_weights(copy->optim, t, want);
    const uint8_t* codes = room.to_host(at, n);
    const float* numbers = room.to_host((const float*)stored.numbers, 3);
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++) wrong += fp8_decode(codes[i], FP8_E4M3) * numbers[1] != want[i];
    expect(wrong == 0 && numbers[2] == 1.0f / numbers[1], "%s: %lld of %s are not code times scale", what,
           (long long)wrong, model[t].name);
}

static void check_operands(Test* test, const char* weights, const char* overrides, OptimType compute, bool gpu) {
    OptimRun copy, run;
    open_both(&copy, &run, weights, overrides, compute, gpu);
    int slot[MODEL_COUNT], of_layer[LAYERS] = {};
    int64_t matrix = 0;
    for (int t = 0; t < MODEL_COUNT; t++) {
        slot[t] = strstr(model[t].name, "c_fc.weight") != nullptr;
        if (slot[t]) of_layer[part_of(t)] = t, matrix = std::max(matrix, tensor_padded(&model[t]));
    }
    matrix *= compute == OPTIM_FP32 ? 4 : 2;
    Arena arena = arena_of(&run);
    const DecodedBytes all = decoded_bytes(&arena, &run.config);
    arena.slot = slot;
    const DecodedBytes bytes = decoded_bytes(&arena, &run.config);
    expect(bytes.dequant_buffer == 2 * matrix && all.dequant_buffer == 0 && bytes.room < all.room,
           "%s, %s: room %lld and %lld, without %lld", weights, overrides, (long long)bytes.room,
           (long long)bytes.dequant_buffer, (long long)all.room);
    Room room(&run.dev);
    char* buffer = room.device<char>(bytes.dequant_buffer);
    arena.decoded = decoded_open(&arena);
    for (int step = 1; step <= STEPS; step++) {
        for (int number : {3, 0, 1, 2, 4, 3, 2, 1, 0}) {
            arena_need(&arena, number);
            if (number < LAYERS) expect_codes(test, &copy, &run, &arena, of_layer[number], weights);
            if (number >= LAYERS) expect_part(test, &copy, &run, &arena, number);
        }
        arena_dequant_buffer(&arena, buffer);
        for (int number : {3, 0, 1, 2, 4, 0, 1}) {
            arena_need(&arena, number);
            expect_part(test, &copy, &run, &arena, number);
            if (number == 1 || number == 2) expect_part(test, &copy, &run, &arena, number - 1);
        }
        arena_dequant_buffer(&arena, nullptr);
        for (OptimRun* each : {&copy, &run}) run_steps(each, step, step, plain_steps());
        arena_changed(&arena);
    }
}

static void check_all_operands(Test* test, OptimType compute, bool gpu) {
    for (const char* weights : {"e4m3/tensor", "e4m3/tensor:sr"}) {
        for (const char* overrides : {"", "ln*: weights=bf16:sr", "wpe: weights=bf16:sr"})
            check_operands(test, weights, overrides, compute, gpu);
    }
}

TEST_BOTH(decoded_operands) {
    CacheFolder folder;
    if (!gpu) check_all_operands(test, OPTIM_FP32, false);
    check_all_operands(test, OPTIM_BF16, gpu);
}

static void check_formats(Test* test, OptimType compute, bool gpu) {
    const Table<FormatRow>& table = weights_table();
    for (int i = 0; i < table.count; i++) {
        if (!table.row[i].feeds_back) check_decoded(test, table.row[i].name, "", compute, gpu);
    }
    check_decoded(test, "lin8:sr", "ln*|wpe: weights=bf16:sr; h.1: weights=fp32", compute, gpu);
}

TEST_BOTH(decoded_parts) {
    CacheFolder folder;
    if (!gpu) check_formats(test, OPTIM_FP32, false);
    check_formats(test, OPTIM_BF16, gpu);
    if (gpu) check_decoded(test, "lin8:sr", "", OPTIM_FP32, true);
}

// One optimizer with its states on the device and one whose states are in host memory.
struct Pair {
    OptimRun run[2];
    Arena arena;
};

static void pair_open(Pair* pair, OptimConfig config, bool backward, bool gpu) {
    for (int k = 0; k < 2; k++) {
        config.offload = k == 1;
        open(&pair->run[k], config, OPTIM_BF16, gpu);
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
        ((Arena*)arena)->lr = lr, ((Arena*)arena)->step = step;
        const Plan* plan = run->optim->plan;
        const int64_t bytes = is(run->config.grads, "bf16") ? 2 : 4;
        for (int t = 0; t < run->count; t++) {
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
        bytes[k] = optim_bytes(&run->dev, &run->config, run->tensor, run->count, OPTIM_BF16);
        expect_planned(test, run, what);
    }
    // Numbers of whole tensors stay on the device.
    expect(bytes[0].host == 0 && bytes[1].states + bytes[1].host == bytes[0].states && bytes[1].host > 0,
           "%s: %lld bytes of states, %lld on the host", what, (long long)bytes[0].states, (long long)bytes[1].host);
    expect(bytes[1].states < 131072, "%s: %lld bytes on the device", what, (long long)bytes[1].states);
    const int64_t slots = pair->arena.memory.states;
    expect(slots > 0 && slots <= 2 * bytes[1].host, "%s: slots of %lld bytes", what, (long long)slots);
}

// Parts in the order of the backward pass and in the arena's, in turn.
static void check_offload(Test* test, const OptimConfig& config, bool backward, bool gpu) {
    Pair pair;
    const char* what = describe(&config);
    pair_open(&pair, config, backward, gpu);
    check_bytes(test, &pair, what);
    pair_steps(&pair);
    expect_same(test, &pair.run[0], &pair.run[1], what);
    expect(pair.run[0].optim->stream_count > 1, "%s: one array", what);
    offload_close(pair.arena.offload);
}

TEST_BOTH(offload_states) {
    CacheFolder folder;
    int tried = 0;
    for (const Combination& each : combinations) {
        const OptimConfig config = each.config("fp32");
        OptimTensor tensors[MODEL_COUNT];
        memcpy(tensors, model, sizeof(model));
        if (is(config.m, "none") || (gpu && (&each - combinations) % 2)) continue;
        if (optim_releases(&config, tensors, model_count(config), error)) check_offload(test, config, tried++ % 2, gpu);
    }
    expect(tried > 20, "%d combinations", tried);
    // Shards that cut two tensors, with a single part, and with two.
    const OptimConfig config = make_config("adamw", "bf16:sr", "lin8/128:sr");
    for (const auto& [begin, end] : {std::pair{2, 9}, {0, 1}, {4, 9}}) {
        for (bool backward : {false, true})
            check_offload(test, shard_config(config, begin * TILE_ELEMENTS, end * TILE_ELEMENTS), backward, gpu);
    }
}
