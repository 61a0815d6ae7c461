// Tests of steps over tensors of the caller's own (optim/placed.h): the same bits as the arenas that ./train steps.
#include "../../optim/placed.h"
#include "../../optim/jit.h"
#include "laws.h"

namespace {

constexpr int STEPS = 3;
// Returns the model with matrices that are large enough for our own products (kernels/matmul_symmetric.cuh).
static const OptimTensor* larger() {
    static OptimTensor large[MODEL_COUNT];
    memcpy(large, model, sizeof(model));
    large[2].rows = 1368, large[2].cols = 520, large[3].rows = 600, large[3].cols = 456;
    return large;
}

static const OptimTensor* shapes = model;
static int multiprocessors;  // that a GPU is said to have; 0: those that it has
static_assert(MODEL_COUNT > STEP_GROUPS, "more constants than a launch has room for");

static OptimConfig case_config(const Combination* its, OptimType compute, const char* grads) {
    Combination c = *its;
    if (compute == OPTIM_FP32) c.weights = "fp32";
    return c.config(grads);
}

// A run whose weights and gradients are arenas, or tensors that begin `shift` elements behind a multiple of 16 bytes.
struct Placed : OptimRun {
    int bytes[2];  // of a weight and of a gradient
    PlacedTables* tables = nullptr;
    char *weights[MODEL_COUNT] = {}, *grads[MODEL_COUNT] = {};
    char* arena;
    float* scalars;      // 0.5, NaN, 0, 1
    bool rates = false;  // three learning rates, by turns; otherwise one
    bool each = false;   // a group for each tensor; otherwise for each learning rate and decay

    ~Placed() { placed_free(tables); }
};

static int64_t length(int t) {
    return shapes[t].rows * shapes[t].cols;
}

static void put(const Placed* run, void* to, int bytes, int64_t n, float (*value)(int64_t, int64_t), int64_t seed,
                int t) {
    Room room(&run->dev);
    float* wide = room.host<float>(n);
    uint16_t* narrow = room.host<uint16_t>(n);
    for (int64_t i = 0; i < n; i++) wide[i] = value(seed, t * 10000 + i), narrow[i] = Bf16::encode(wide[i]);
    copy_to_device(&run->dev, to, bytes == 4 ? (void*)wide : narrow, n * bytes);
}

static float initial(int64_t, int64_t i) {
    return Bf16::decode(Bf16::encode(start(i)));
}

static float slope(int64_t step, int64_t i) {
    return gradient(step, i);
}

static void placed_open(Placed* run, const OptimConfig* config, OptimType compute, bool gpu, bool placed, int shift) {
    static const float scalars[4] = {0.5f, NAN, 0.0f, 1.0f};
    OptimConfig its = *config;
    OptimTensor tensors[MODEL_COUNT];
    PlacedTensor places[MODEL_COUNT];
    const int count = model_count(*config);
    memcpy(tensors, shapes, (size_t)count * sizeof(*shapes));
    its.placed = placed;
    if (placed) its.weight_decay = -1.0f;
    for (int t = 0; t < count; t++) tensors[t].decay = tensors[t].decay || placed;
    run_open(run, &its, tensors, count, compute, gpu);
    if (gpu && multiprocessors > 0) run->dev.sm_count = multiprocessors;
    run->bytes[0] = compute == OPTIM_FP32 ? 4 : 2;
    run->bytes[1] = is(config->grads, "fp32") ? 4 : 2;
    run->arena = run->room.device<char>(run->elements * 4);
    device_zero(&run->dev, run->arena, run->elements * 4);
    run->scalars = run->room.to_device(scalars, 4);
    for (int t = 0; t < count; t++) {
        float* values = run->room.host<float>(length(t));
        for (int64_t i = 0; i < length(t); i++) values[i] = initial(0, t * 10000 + i);
        optim_set_weights(run->optim, t, values);
        places[t] = {length(t), 0, run->tensor[t].offset};
        if (!placed) continue;
        run->weights[t] = run->room.device<char>(length(t) * 4 + 64) + shift * run->bytes[0];
        run->grads[t] = run->room.device<char>(length(t) * 4 + 64) + (shift > 0 && t % 2 ? run->bytes[1] : 0);
        put(run, run->weights[t], run->bytes[0], length(t), initial, 0, t);
    }
    optim_decode(run->optim);
    if (placed) placed_create(&run->tables, run->optim, compute, places);
}

static void put_grads(Placed* run, int step) {
    for (int t = 0; t < run->count; t++) {
        char* to = run->tables ? run->grads[t] : run->arena + run->tensor[t].offset * run->bytes[1];
        put(run, to, run->bytes[1], length(t), slope, step, t);
    }
}

static void run_placed(Placed* run, int step, unsigned missing, bool found_inf, const float* scale,
                       const float* lr_at = nullptr) {
    const void* grads[MODEL_COUNT];
    int group_of[MODEL_COUNT];
    NibbleGroup group[MODEL_COUNT] = {};
    for (int t = 0; t < run->count; t++) {
        const int rate = run->rates ? t % 3 : 0, decay = shapes[t].decay ? 1 : 0;
        grads[t] = missing >> t & 1u ? nullptr : run->grads[t];
        group_of[t] = run->each ? t : 2 * rate + decay;
        group[group_of[t]] = {(double)1e-2f * (1 + rate), decay ? (double)0.1f : 0.0, 0.9f, 0.95f, 1e-8f, step, lr_at};
    }
    const NibbleStep placed = {
        (void**)run->weights, grads, group_of, group, scale, run->scalars + (found_inf ? 3 : 2), step, nullptr};
    placed_step(run->tables, &placed);
}

// One step; of a placed run without the tensors of `missing`, a bit each.
static void run_step(Placed* run, int step, unsigned missing = 0, bool found_inf = false, bool bad_scale = false) {
    const float* scale = run->scalars + (bad_scale ? 1 : 0);
    put_grads(run, step);
    if (run->tables) {
        run_placed(run, step, missing, found_inf, scale);
    } else {
        optim_step(run->optim, run->arena, scale, 1e-2f, step);
    }
    device_sync(&run->dev);
}

// The weights of tensor `t` are those of a placed run.
static bool weights_same(const Placed* a, const Placed* placed, int t) {
    const void* seen = a->tables ? a->weights[t] : (char*)a->optim->seen + a->tensor[t].offset * a->bytes[0];
    return same_bytes(a, seen, placed, placed->weights[t], length(t) * a->bytes[0]);
}

// Every weight and every array of the placed run is that of the other, which has the primary weights besides.
static void expect_placed_same(Test* test, const Placed* other, const Placed* placed, const char* what) {
    for (int t = 0; t < placed->count; t++)
        expect(weights_same(other, placed, t), "%s: %s differs", what, shapes[t].name);
    for (int s = 0; s < placed->optim->stream_count; s++) {
        const OptimStream b = placed->optim->stream[s], a = optim_stream_named(other->optim, b.name);
        const int64_t bytes = b.elements * b.element_bytes;
        expect(a.data && a.elements == b.elements && same_bytes(other, a.data, placed, b.data, bytes), "%s: %s differs",
               what, b.name);
    }
}

static void compare_case(Test* test, const Combination* its, OptimType compute, const char* grads, int shift,
                         bool gpu) {
    const OptimConfig config = case_config(its, compute, grads);
    OptimConfig chunks = config;
    Placed arena, placed;
    placed_open(&arena, &config, compute, gpu, false, 0);
    if (shift > 0 && strcmp(grads, "fp32") == 0) chunks.matrix_chunk = TILE_ELEMENTS;  // each tensor alone
    placed_open(&placed, &chunks, compute, gpu, true, shift);
    for (int step = 1; step <= STEPS; step++) {
        run_step(&arena, step);
        run_step(&placed, step);
        if (step == 2) run_step(&placed, step + 1, 0, true), run_step(&placed, step + 1, 0, false, true);
    }
    expect_placed_same(test, &arena, &placed, formatted("%s%s, shift %d", its->preset, describe(&config), shift));
}

// All combinations and presets, with gradients and weights of either type. Weights of fp32 are those that no override
// and no rule says otherwise of.
TEST_BOTH(placed_same_as_arenas) {
    for (int i = 0; i < PRESET_COUNT + COMBINATIONS; i++) {
        const Combination preset = {PRESETS[i < PRESET_COUNT ? i : 0].name, "", "", "", ""};
        const Combination* its = i < PRESET_COUNT ? &preset : &combinations[i - PRESET_COUNT];
        // The library has no by_rms, and refuses the limiter for rules that add the decay to the gradient.
        if (its->by_rms || (its->growth > 0.0f && (is(its->rule, "sgd") || is(its->rule, "adam")))) continue;
        const bool fp32 = i % 3 == 2 && !strstr(its->overrides, "weights=");
        compare_case(test, its, fp32 ? OPTIM_FP32 : OPTIM_BF16, i % 2 ? "fp32" : "bf16", i % 4 == 3 ? 1 : 0, gpu);
    }
}

// If all sides and ranks are multiples of 8, galore's products are in bf16 where the gradients are.
TEST_BOTH(placed_galore) {
    constexpr const char* REST = "h.0.mlp|h.1|h.2: rule=adamw";
    const std::tuple<Combination, OptimType, const char*, int> rows[] = {
        {{"", "galore", "bf16:sr", "dyn8", "udyn8", REST}, OPTIM_BF16, "bf16", 0},
        {{"", "galore", "fp32", "bf16:sr", "fp32", REST}, OPTIM_BF16, "bf16", 1},
        {{"", "galore", "fp32", "bf16:sr", "fp32", REST}, OPTIM_FP32, "bf16", 0},
        {{"", "galore", "bf16", "fp32", "fp32", REST}, OPTIM_BF16, "bf16", 1}};
    for (const auto& [its, compute, grads, shift] : rows) compare_case(test, &its, compute, grads, shift, gpu);
}

// Many tiles for few thread blocks: the stages of each go round, and so do the places that they keep.
TEST(placed_many_tiles_gpu) {
    static const Combination cases[] = {{"adamw8", "", "", "", ""},
                                        {"int8w4", "", "", "", ""},
                                        {"came8", "", "", "", ""},
                                        {"", "adamw", "bf16+16", "bf16:sr", "fp32"},
                                        {"", "muon", "bf16:sr", "dyn8", ""}};
    shapes = larger(), multiprocessors = 7;
    for (const Combination& its : cases) {
        for (int shift = 0; shift < 2; shift++) compare_case(test, &its, OPTIM_BF16, "bf16", shift, true);
    }
    shapes = model, multiprocessors = 0;
}

// A tensor without a gradient keeps its bits, and the others do not notice. Where all tensors of some formats have
// none, what they keep beside their elements stays too: numbers of rows, and scales of tensors, which share an array
// with those of others if these are weights.
TEST_BOTH(placed_missing_gradients) {
    static const Combination alone[] = {
        {"adamw8", "", "", "", "", "ln*|*.bias: m=fp32"},
        {"", "adam-mini", "bf16:sr", "bf16:sr", "", "ln*|*.bias: rule=adamw v=fp32"},
        {"", "adamw", "bf16:sr", "dyn8/rank1", "lin4/rank1", "ln*|*.bias: m=fp32 v=fp32"},
        {"", "adamw", "e4m3/tensor", "dyn8", "fp32", "ln*|*.bias: m=fp32"}};
    unsigned matrices = 0;
    for (int t = 0; t < MODEL_COUNT; t++) matrices |= model[t].rows > 1 ? 1u << t : 0u;
    for (const Combination& its : alone) {
        const OptimConfig config = case_config(&its, OPTIM_BF16, "bf16");
        for (const unsigned missing : {1u << 2, matrices}) {
            if (missing != matrices && !*its.preset) continue;  // some of these take all tensors or none
            Placed one, all, some;                              // of one step, of two, and of two that lack these
            for (Placed* run : {&one, &all, &some})
                placed_open(run, &config, OPTIM_BF16, gpu, true, 0), run_step(run, 1);
            run_step(&all, 2), run_step(&some, 2, missing);
            for (int t = 0; t < all.count; t++) {
                const bool moves = !(missing >> t & 1u);
                expect(weights_same(moves ? &all : &one, &some, t) && (moves || !weights_same(&all, &some, t)),
                       "%s: %s", describe(&config), shapes[t].name);
            }
            for (int s = 0; s < some.optim->stream_count && missing == matrices; s++) {
                const OptimStream now = some.optim->stream[s];
                const Placed* want = strchr(now.name, '[') ? &all : &one;
                const void* wanted = optim_stream_named(want->optim, now.name).data;
                expect(strncmp(now.name, "weights", 7) == 0 ||
                           same_bytes(want, wanted, &some, now.data, now.elements * now.element_bytes),
                       "%s: %s", describe(&config), now.name);
            }
            const float *scale = optim_codes(some.optim, 2).numbers, *before = optim_codes(one.optim, 2).numbers;
            expect(!scale == !strstr(its.weights, "/tensor") && (!scale || same_bytes(&one, before, &some, scale, 12)),
                   "%s: the scale of a tensor without a gradient", describe(&config));
        }
    }
}

// Tensors with more constants than one launch takes are stepped by several, after the passes over all of them.
TEST_BOTH(placed_many_groups) {
    static const Combination many[] = {{"adamw8", "", "", "", "", ""},
                                       {"", "adam-mini", "bf16:sr", "bf16:sr", "", ""},
                                       {"came8", "", "", "", "", ""},
                                       {"adamw8", "", "", "", "", "", 1.01f},
                                       {"", "adamw", "e4m3/tensor", "dyn8/rank1", "fp32", "wpe: rule=sgd"}};
    for (const Combination& its : many) {
        const OptimConfig config = case_config(&its, OPTIM_BF16, "bf16");
        Placed one, several;
        for (Placed* run : {&one, &several}) placed_open(run, &config, OPTIM_BF16, gpu, true, 0), run->rates = true;
        several.each = true;
        for (int step = 1; step <= STEPS; step++) run_step(&one, step), run_step(&several, step);
        expect_placed_same(test, &one, &several, describe(&config));
    }
}

// A tensor in two parts, cut at a multiple of the blocks but not of a tile, steps as the whole one does.
static void check_cut(Test* test, const Combination* its, bool gpu) {
    constexpr int64_t CUT = 768, N = 3 * 1001;
    OptimConfig config = case_config(its, OPTIM_BF16, "bf16");
    config.placed = true;
    Placed whole;
    placed_open(&whole, &config, OPTIM_BF16, gpu, true, 0);
    char *weights[2], *grads[2];
    Optim* part[2];
    PlacedTables* tables[2];
    for (int p = 0; p < 2; p++) {
        const int64_t first = p * CUT, count = p ? N - CUT : CUT, head = first % TILE_ELEMENTS;
        OptimTensor tensor = {"wte.weight", 1, head + count, true, 0};
        const PlacedTensor placed = {count, head, first - head};
        optim_layout(&tensor, 1, &config);
        part[p] = optim_create(&whole.dev, &config, &tensor, 1, OPTIM_BF16);
        placed_create(&tables[p], part[p], OPTIM_BF16, &placed);
        float* values = (float*)calloc((size_t)(head + count), sizeof(float));
        for (int64_t i = 0; i < count; i++) values[head + i] = initial(0, first + i);
        optim_set_weights(part[p], 0, values);
        free(values);
        weights[p] = (char*)device_alloc(&whole.dev, N * 2);
        grads[p] = (char*)device_alloc(&whole.dev, N * 2);
        put(&whole, weights[p], 2, N, initial, 0, 0);
        weights[p] += first * 2;
    }
    for (int step = 1; step <= STEPS; step++) {
        const NibbleGroup group = {(double)1e-2f, (double)0.1f, 0.9f, 0.95f, 1e-8f, step, nullptr};
        run_step(&whole, step);
        for (int p = 0; p < 2; p++) {
            put(&whole, grads[p], 2, N, slope, step, 0);
            void* own[] = {weights[p]};
            const void* its_grads[] = {grads[p] + p * CUT * 2};
            const NibbleStep placed = {own, its_grads, nullptr, &group, whole.scalars, nullptr, step, nullptr};
            placed_step(tables[p], &placed);
        }
    }
    char a[N * 2], b[N * 2];
    copy_to_host(&whole.dev, a, whole.weights[0], N * 2);
    copy_to_host(&whole.dev, b, weights[0], CUT * 2);
    copy_to_host(&whole.dev, b + CUT * 2, weights[1], (N - CUT) * 2);
    expect(memcmp(a, b, sizeof(a)) == 0, "%s%s, weights %s: the parts differ from the whole", its->preset, its->rule,
           config.weights);
    for (int p = 0; p < 2; p++) placed_free(tables[p]), optim_free(part[p]);
}

TEST_BOTH(placed_cut_tensor) {
    static const Combination cut[] = {{"adamw8", "", "", "", "", ""},
                                      {"flash24", "", "", "", "", ""},
                                      {"", "adamw", "lin8:sr", "dyn8/64:sr", "udyn8", ""},
                                      {"", "ademamix", "bf16+16", "bf16:sr", "fp32", ""}};
    for (const Combination& its : cut) check_cut(test, &its, gpu);
}

// Replays of a captured step are the steps that follow, with a learning rate from device memory, and so is a step after
// them, also one without the tensors of `missing`, which has other tables.
#ifdef __CUDACC__
static void graph_case(Test* test, const Combination* its, bool each, unsigned missing = 0) {
    OptimConfig config = case_config(its, OPTIM_BF16, "bf16");
    Placed plain, run;
    placed_open(&plain, &config, OPTIM_BF16, true, true, 1);
    config.replays = true;
    placed_open(&run, &config, OPTIM_BF16, true, true, 1);
    run.each = each;
    const float rate = 1e-2f;
    float* lr = (float*)device_alloc(&run.dev, sizeof(rate));
    copy_to_device(&run.dev, lr, &rate, sizeof(rate));
    for (int step = 1; step <= 2; step++) run_step(&plain, step), run_step(&run, step);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check(cudaStreamBeginCapture(run.dev.stream, cudaStreamCaptureModeThreadLocal));
    run_placed(&run, 3, 0, false, run.scalars, lr);
    check(cudaStreamEndCapture(run.dev.stream, &graph));
    check(cudaGraphInstantiate(&exec, graph, 0));
    for (int step = 3; step <= 7; step++) {
        run_step(&plain, step, step == 5 ? missing : 0);
        if (step == 5 || step == 7) {
            run_step(&run, step, step == 5 ? missing : 0);
            continue;
        }
        put_grads(&run, step);
        check(cudaGraphLaunch(exec, run.dev.stream));
    }
    expect(placed_clock(run.tables) == 7, "%s: the clock is at %lld", config.rule, (long long)placed_clock(run.tables));
    expect_placed_same(test, &plain, &run, describe(&config));
    check(cudaGraphExecDestroy(exec));
    check(cudaGraphDestroy(graph));
}
#endif

TEST(placed_graph_gpu) {
#ifdef __CUDACC__
    static const Combination graphs[] = {{"adamw8", "", "", "", "", ""},
                                         {"adamw8e", "", "", "", "", ""},
                                         {"", "adamw", "bf16+16", "bf16:sr", "fp32", "*.bias|ln*: lr=0.5; wpe: wd=0.3"},
                                         {"", "ademamix", "bf16+8:sr", "soft8", "sqrt8", ""},
                                         {"", "adam-mini", "bf16:sr", "bf16:sr", "", ""},
                                         {"adafactor8", "", "", "", "", "ln*: rule=lion m=fp32 lr=0.5"},
                                         {"", "adafactor", "bf16:sr", "none", "", ""},
                                         {"came8", "", "", "", "", "wpe: wd=0.3"},
                                         {"rmnp4", "", "", "", "", ""},
                                         {"", "normuon-lite", "bf16:sr", "dyn8", "", "*.bias: lr=2"},
                                         {"", "muon", "bf16+16", "de4/32@dq8", "", "wpe: wd=0.3"},
                                         {"", "normuon", "bf16:sr", "bf16:sr", "", "c_proj.weight: lr=0.5 wd=0.3"},
                                         {"adamw4l", "", "", "", "", "ln*: m=fp32 lr=0.5", 1.2f},
                                         {"", "adamw", "e4m3/tensor@given+fp32", "fp32", "fp32", ""},
                                         {"came8", "", "", "", "", "", 1.01f}};
    for (const Combination& its : graphs) graph_case(test, &its, false);
    for (const int i : {0, 7, 12}) graph_case(test, &graphs[i], true);
    for (const int i : {0, 2}) graph_case(test, &graphs[i], false, 1u << 2 | 1u << 4);
    shapes = larger(), multiprocessors = 7;
    for (const int i : {0, 10, 11}) graph_case(test, &graphs[i], false);
    shapes = model, multiprocessors = 0;
#else
    (void)test;
#endif
}

// NVRTC compiles these kernels of captured steps, on old and new architectures.
TEST(placed_kernels_compile) {
    if (!jit_available()) skip("no libnvrtc");
    const std::tuple<const char*, const char*, Combination> kernels[] = {
        {"optim_step_kernel", "sm_80", {"", "adamw", "lin8:sr", "de4/32@dq8", "sqrt4/32@dq8", ""}},
        {"optim_replayed_kernel", "sm_80", {"adamw8", "", "", "", "", ""}},
        {"optim_replayed_kernel", "sm_90", {"adamw4l", "", "", "", "", ""}},
        {"optim_replayed_kernel", "sm_90", {"muon8", "", "", "", "", ""}},
        {"optim_replayed_kernel", "sm_90", {"", "adamw", "e5m2/tensor@given+fp32", "fp32", "fp32", ""}},
        {"optim_sums_replayed_kernel", "sm_80", {"adamw8", "", "", "", "", "", 1.01f}},
        {"optim_sums_replayed_kernel", "sm_90", {"came8", "", "", "", "", ""}},
        {"optim_replayed_kernel", "sm_90", {"came8", "", "", "", "", "", 1.01f}},
    };
    for (const auto& [name, architecture, its] : kernels) {
        OptimConfig config = case_config(&its, OPTIM_BF16, "bf16");
        config.placed = true;
        expect_compiles(test, kernel_of(config, name), architecture);
    }
}

}  // namespace
