// Tests of optim/model/decode.cu and of optim_step_tensors: weights decoded a part at a time have the bits of a copy of
// the whole model, whatever the order in which parts are asked for, and the planned room is what is allocated; a step
// that is taken part by part, from gradients that lie elsewhere, has the bits of one over the whole arena. Matrices
// whose codes are operands are decoded only into the dequant_buffer.
#include "../../kernels/fp8.cuh"
#include "layers.h"

constexpr int STEPS = 2;

// A step of the run without a copy, a part at a time from the last to the first. The gradients of every other part lie
// in memory of their own, as those of a layer that is released do.
static void step_by_parts(void*, OptimRun* run, const void* given, const float* scale, float lr, int step) {
    const float* grads = (const float*)given;
    for (int number = LAYERS + 1; number >= 0; number--) {
        int tensor[COUNT], count = 0;
        Room room(&run->dev);
        float* own = room.device<float>(run->elements);
        for (int t = 0; t < COUNT; t++) {
            const int64_t padded = tensor_padded(&run->tensor[t]);
            const float* from = grads + run->tensor[t].offset;
            if (part[t] != number) continue;
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
    for (int t = 0; t < COUNT; t++) {
        const char* want = (const char*)optim_weights(copy->optim) + run->tensor[t].offset * size;
        expect(part[t] != number ||
                   same_bytes(copy, want, run, arena_at(arena, nullptr, t, 1), model[t].rows * model[t].cols * size),
               "%s: %s", run->config.weights, model[t].name);
    }
}

// Opens a run with a copy of the whole model and one without, whose configuration it returns.
static OptimConfig open_both(OptimRun* copy, OptimRun* run, const char* weights, const char* overrides,
                             OptimType compute, bool gpu) {
    OptimConfig config = make_config("adamw", weights, "fp32");
    config.overrides = overrides;
    run_open(copy, &config, model, compute, gpu);
    config.keeps_copy = false;
    run_open(run, &config, model, compute, gpu);
    return config;
}

static void check_decoded(Test* test, const char* weights, const char* overrides, OptimType compute, bool gpu) {
    OptimRun copy, run;
    const OptimConfig config = open_both(&copy, &run, weights, overrides, compute, gpu);
    Arena arena = arena_of(&run);
    arena.decoded = decoded_open(&arena);
    Steps how = plain_steps(), by_parts = how;
    if (optim_releases(&config, run.tensor, COUNT, error)) by_parts.take = step_by_parts;
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
    const OptimBytes plan = optim_bytes(&run.dev, &run.config, run.tensor, COUNT, compute);
    const OptimBytes whole = optim_bytes(&copy.dev, &copy.config, run.tensor, COUNT, compute);
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
    int slot[COUNT];
    for (int t = 0; t < COUNT; t++) slot[t] = strstr(model[t].name, "c_fc") != nullptr;
    Arena arena = arena_of(&run);
    const DecodedBytes all = decoded_bytes(&arena, &run.config);
    arena.slot = slot;
    const DecodedBytes bytes = decoded_bytes(&arena, &run.config);
    const int64_t matrix = tensor_padded(&model[3]) * (compute == OPTIM_FP32 ? 4 : 2);
    // Embeddings take as much as layers without these matrices, and more than layers without vectors, too.
    const bool smaller = bytes.room < all.room || (bytes.room == all.room && strstr(overrides, "ln*"));
    expect(bytes.dequant_buffer == 2 * matrix && all.dequant_buffer == 0 && smaller,
           "%s, %s: room %lld and %lld, without %lld", weights, overrides, (long long)bytes.room,
           (long long)bytes.dequant_buffer, (long long)all.room);
    Room room(&run.dev);
    char* buffer = room.device<char>(bytes.dequant_buffer);
    arena.decoded = decoded_open(&arena);
    for (int step = 1; step <= STEPS; step++) {
        for (int number : {3, 0, 1, 2, 4, 3, 2, 1, 0}) {
            arena_need(&arena, number);
            if (number < LAYERS) expect_codes(test, &copy, &run, &arena, 3 + 2 * number, weights);
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
        for (const char* overrides : {"", "ln*: weights=bf16:sr", "wte|wpe: weights=bf16:sr"})
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
