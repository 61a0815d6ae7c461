// The law that a GPU has the CPU's bits, tried where laws.cu does not: every format of states, a random sample of all
// combinations, lengths and numbers of tensors at the edges, what `make sanitize` looks at, and elements beyond 2^31.
// And, with or without a GPU, that NVRTC compiles the kernels.
#include <time.h>

#include "laws.h"

typedef std::vector<OptimConfig> Configs;

static void compare_all(Test* test, const Configs& all, bool wild) {
    Steps wildly;
    wildly.wild = true;
    compile_all(
        test, all, [](int) { return true; }, compute_of);
    for (int k = 0; k < (int)all.size() && test->failures < 20; k++) {
        const OptimConfig* config = &all[k];
        expect_equal_cpu_gpu(test, config, model, model_count(*config), compute_of(k), 20);
        if (wild) expect_equal_cpu_gpu(test, config, model, model_count(*config), OPTIM_BF16, 4, wildly);
    }
    note(test, "%zu configurations", all.size());
}

// Is a row of the table a format to nearest at its default block, or that with another scale? Other blocks are drawn in
// laws_random.
static bool is_format(const char* name, const char* when) {
    bool at_default = when[0] || strchr(name, '@');
    return at_default && !strchr(name, ':');
}

CACHE_TEST(JIT_TEST, laws_states_gpu) {
    Configs all;
    for (int i = 0; i < state_table().count; i++) {
        const char* name = state_table().row[i].name;
        if (!is_format(name, state_table().row[i].note)) continue;
        const bool m = serves_m(name);
        const char* noisy = is(name, "fp32") ? name : strdup(formatted("%s:sr", name));
        all.push_back(states_config("adamw", "bf16:sr", "bf16", m ? name : "bf16", noisy));
        all.push_back(states_config("adamw", "bf16:sr", "fp32", m ? noisy : "de4", name));
    }
    // Weights that are looked up: ordinary and rare values have stores of their own.
    for (const char* weights : WEIGHTS_NAMES) {
        if (strchr("el", *weights)) all.push_back(states_config("adamw", weights, "bf16", "soft8", "sqrt8"));
        if (strchr("el", *weights) && goes_with("adamw", weights, "de4"))
            all.push_back(states_config("adamw", weights, "bf16", "de4", "sqrt4"));
    }
    expect(all.size() > 100, "%zu configurations", all.size());
    compare_all(test, all, true);
}

// One of all combinations of the tables, each as likely as another but for m, which needs negative levels.
static OptimConfig draw_config(uint64_t seed, int64_t index) {
    int draw[5];
    for (int j = 0; j < 5; j++) draw[j] = (int)(fabsf(test_uniform(seed, index * 5 + j)) * 1e6f);
    while (!serves_m(STATE_NAMES[draw[3] % name_count(STATE_NAMES)])) draw[3]++;
    const char* rule = SIMPLE_RULES[draw[0] % name_count(SIMPLE_RULES)];
    const char* m = STATE_NAMES[draw[3] % name_count(STATE_NAMES)];
    while (!goes_with(rule, WEIGHTS_NAMES[draw[1] % name_count(WEIGHTS_NAMES)], m)) draw[1]++;
    return states_config(rule, WEIGHTS_NAMES[draw[1] % name_count(WEIGHTS_NAMES)],
                         GRADS_NAMES[draw[2] % name_count(GRADS_NAMES)], m,
                         STATE_NAMES[draw[4] % name_count(STATE_NAMES)]);
}

// NIBBLE_TEST_SEED draws a failed sample again.
static uint64_t sample_seed(Test* test) {
    const char* given = getenv("NIBBLE_TEST_SEED");
    const uint64_t seed = given ? strtoull(given, nullptr, 10) : (uint64_t)time(nullptr);
    note(test, "NIBBLE_TEST_SEED=%llu", (unsigned long long)seed);
    return seed;
}

CACHE_TEST(JIT_TEST, laws_random_gpu) {
    Configs all;
    const uint64_t seed = sample_seed(test);
    for (int k = 0; k < 200; k++) all.push_back(draw_config(seed, k));
    compare_all(test, all, false);
}

// Presets, on a GPU that is said to have seven multiprocessors: of the last length, which no tile, block or group of
// threads divides, all of them draw tiles in turn and their stages go round.
JIT_TEST(laws_lengths_gpu) {
    const std::vector<const char*> presets = element_presets();
    for (int64_t length : {1, 31, 33, 255, 257, 4095, 4097, 1000003}) {
        const OptimTensor tensor = {"tensor", 1, length, true, 0};
        const bool large = length > 5000;
        for (int preset = 0; preset < (int)presets.size(); preset++) {
            for (int compute = 0; compute < 2; compute++) {
                if (large && compute != preset % 2) continue;
                OptimConfig config =
                    preset_config(presets[preset], (length + preset) % 4 == 1 ? "bf16" : "fp32", "none");
                expect_equal_cpu_gpu(test, &config, &tensor, 1, (OptimType)compute, large ? 3 : 20, Steps(), 7);
            }
        }
    }
}

// More tensors than a warp of sums.cuh looks through at a time. Columns are multiples of 8, so passes load rows ahead;
// tensor 40 has broken slabs, panels and runs of columns.
CACHE_TEST(JIT_TEST, laws_many_tensors_gpu) {
    static OptimTensor many[MAX_TENSORS];
    for (int t = 0; t < MAX_TENSORS; t++) {
        const int64_t rows = t == 40 ? 130 : 7 + t, cols = t == 40 ? 1104 : 8 * (t % 5) + t % 2 * 24 + 8;
        many[t] = {formatted("h.%d.weight", t), t % 3 == 0 ? 1 : rows, cols, t % 3 != 0, 0};
    }
    for (const char* rule : {"adam-mini", "rmnp", "normuon-lite", "adafactor", "came", "adafactor8bit", "came8bit"}) {
        for (const char* m : {"bf16:sr", "soft8/32"}) {
            OptimConfig config = make_config(rule, "bf16:sr", "fp32");
            config.m = m, config.overrides = "none", config.grads = "bf16";
            config = resolved(config);
            expect_equal_cpu_gpu(test, &config, many, MAX_TENSORS, OPTIM_FP32, 3, plain_steps(2));
        }
    }
}

// For `make sanitize`, whose race checker is slow: one thread block, which uses all of its stages several times. Blocks
// of a whole tile are reduced through shared memory, and their scales are what the producer warps copy themselves; so
// are the largest of a tile with @dq8, here with 16 and 8 elements a thread and with a third state.
CACHE_TEST(JIT_TEST, laws_race_gpu) {
    const OptimTensor tensor = {"tensor", 1, 60 * TILE_ELEMENTS + 1, true, 0};
    Configs all;
    for (const char* preset : element_presets()) all.push_back(preset_config(preset, "bf16", "none"));
    all.push_back(states_config("adamw", "bf16:sr", "bf16", "dyn8/2048", "udyn8/2048"));
    all.push_back(states_config("adamw", "bf16:sr", "bf16", "de4/32@dq8", "fp32"));
    all.push_back(states_config("ademamix", "bf16:sr", "bf16", "soft8/32@dq8", "sqrt8/32@dq8"));
    for (const OptimConfig& config : all) expect_equal_cpu_gpu(test, &config, &tensor, 1, OPTIM_BF16, 2, Steps(), 1);
}

// Matrices whose products our own kernel makes (kernels/matmul_symmetric.cuh): tall, wide and square, in batches, with
// tiles that are not whole. The direction's moments, and what adamw has, are the CPU's to the bit. Rounding to fp16
// costs an eighth of an update at most; no bit depends on the batch.
CACHE_TEST(JIT_TEST, laws_large_matrices_gpu) {
    const OptimTensor large[] = {{"h.0.attn.c_attn.weight", 3 * 456, 520, true, 0, 3},
                                 {"h.0.mlp.c_fc.weight", 600, 456, true, 0},
                                 {"h.0.mlp.c_proj.weight", 464, 464, true, 0},
                                 {"h.1.mlp.c_fc.weight", 600, 456, true, 0},
                                 {"wpe.weight", 3, 1001, true, 0}};
    for (const char* rule : {"muon", "normuon"}) {
        OptimConfig config = states_config(rule, "fp32", "fp32", is(rule, "muon") ? "de4/32@dq8" : "fp32", "");
        OptimRun run[3];  // on the CPU, on the GPU, and there each tensor by itself
        Steps how;
        how.given = [](int64_t step, int t, int64_t i) { return test_uniform(100 + (uint64_t)step, t * 1000000 + i); };
        for (int k = 0; k < 3; k++) {
            if (k == 2) config.matrix_chunk = TILE_ELEMENTS;
            run_open(&run[k], &config, large, OPTIM_FP32, k > 0);
            run_steps(&run[k], 1, 2, how);
        }
        expect(!difference(&run[1], &run[2]), "%s: the batch matters", rule);
        expect(same_tensor(&run[0], &run[1], 4), "%s: adamw's weights differ", rule);
        const OptimStream m = optim_stream_named(run[0].optim, "m"), theirs = optim_stream_named(run[1].optim, "m");
        expect(same_bytes(&run[0], m.data, &run[1], theirs.data, m.elements * m.element_bytes), "%s: m", rule);
        for (int t = 0; t < 4; t++) {
            const int64_t n = large[t].rows * large[t].cols;
            float *want = run[0].room.host<float>(n), *got = run[0].room.host<float>(n);
            double off = 0.0, moved = 0.0;
            optim_get_weights(run[0].optim, t, want), optim_get_weights(run[1].optim, t, got);
            for (int64_t i = 0; i < n; i++) {
                off += pow((double)got[i] - (double)want[i], 2);
                moved += pow((double)want[i] - (double)run_start(t, i), 2);
            }
            expect(off > 0.0 && off < moved / 64.0, "%s: %s is %g of the steps off", rule, large[t].name,
                   sqrt(off / moved));
        }
    }
}

// A ninth of what the laws try, chosen by the seed, and some of all combinations, through NVRTC; rules and formats with
// a pass before the step, that pass too; both kernels of rules that read matrices.
static void compiles(Test* test, const OptimConfig* config, const char* architecture) {
    const char* all = formatted("%s %s %s", config->weights, config->m, config->v);
    const RuleRow* rule = find_row(rule_table(), config->rule);
    expect(is(kernel_of(*config), kernel_of(*config, "optim_step_kernel")), "%s", kernel_of(*config));
    expect_compiles(test, kernel_of(*config), architecture);
    if (in_spans(all) && !rule->matrix) expect_compiles(test, kernel_of(*config, "optim_measure_kernel"), architecture);
    if ((rule->by_rows && !rule->matrix) || config->limit_growth > 0.0f)
        expect_compiles(test, kernel_of(*config, "optim_sums_kernel"), architecture);
    const char* apply = "optim_step_kernel<MatrixApply, TYPE, None, None, None, Elementwise<Fp32, NEAREST>>";
    if (rule->matrix)
        expect_compiles(test, replaced(apply, "TYPE", find_row(weights_table(), config->weights)->type), architecture);
}

JIT_TEST(laws_rows_compile) {
    Configs all;
    const uint64_t seed = sample_seed(test);
    for (size_t k = seed % 9; k < every_config().size(); k += 9) all.push_back(every_config()[k]);
    for (int k = 0; k < 12; k++) all.push_back(draw_config(seed, k));
    int bad = in_processes(test, (int)all.size(), [&](int k) { compiles(test, &all[k], k % 3 ? "sm_90" : "sm_80"); });
    expect(bad == 0, "in %d processes a combination does not compile", bad);
}

#ifdef __CUDACC__
// A shard's elements keep their numbers beyond 2^31: the noise and the result are the whole's. One tensor of more than
// 2^31 elements on a GPU, of which the CPU computes the parts at its begin and beyond 2^31.
constexpr int64_t MANY = ((int64_t)1 << 31) + 5000;

// bf16 of any sign, from 3e-5 to 0.03.
static __host__ __device__ uint16_t many_gradient(int64_t element, int step) {
    uint64_t z = ((uint64_t)element + 1) * 0x9E3779B97F4A7C15ull + (uint64_t)step * 0xD1B54A32D192ED03ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    return (uint16_t)((z >> 48 & 0x8000u) | (0x3800u + (z >> 33 & 0x4ffu)));
}

// grid: ceil(elements / 256), block: 256.
__global__ void many_gradients_kernel(uint16_t* grads, int64_t elements, int step) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < elements) grads[i] = i < MANY ? many_gradient(i, step) : 0;
}

static void many_steps(Optim* optim, const Device* dev, int64_t begin, int64_t elements) {
    Room room(dev);
    uint16_t* grads = room.device<uint16_t>(elements);
    const float one = 1.0f, *scale = room.to_device(&one, 1);
    for (int step = 1; step <= 2; step++) {
        if (dev->gpu) {
            many_gradients_kernel<<<(unsigned)ceil_div(elements, 256), 256, 0, dev->stream>>>(grads, elements, step);
            check_launch();
        } else {
            for (int64_t i = 0; i < elements; i++) grads[i] = begin + i < MANY ? many_gradient(begin + i, step) : 0;
        }
        optim_step(optim, grads, scale, 1e-2f, step);
    }
    device_sync(dev);
}

TEST(laws_beyond_2_31_elements_gpu) {
    const Device gpu = test_device(true), cpu = test_device(false);
    for (const char* preset : {"adamw8", "adamw4"}) {
        const OptimConfig config = preset_config(preset, "bf16");
        OptimTensor tensor = {"tensor", 1, MANY, true, 0};
        int64_t elements = optim_layout(&tensor, 1, &config);
        Optim* whole = optim_create(&gpu, &config, &tensor, 1, OPTIM_BF16);
        many_steps(whole, &gpu, 0, elements);
        for (int64_t begin : {(int64_t)0, ((int64_t)1 << 31) - 2 * TILE_ELEMENTS}) {
            const int64_t end = begin ? elements : 3 * TILE_ELEMENTS;
            const OptimConfig part = shard_config(config, begin, end);
            Optim* shard = optim_create(&cpu, &part, &tensor, 1, OPTIM_BF16);
            many_steps(shard, &cpu, begin, end - begin);
            for (int s = 0; s < shard->stream_count; s++) {
                OptimStream want = shard->stream[s], got = whole->stream[s];
                int64_t bytes = want.elements * want.element_bytes, before = begin / (elements / got.elements);
                Room room(&gpu);
                const char* copy = room.to_host((const char*)got.data + before * got.element_bytes, bytes);
                expect(memcmp(copy, want.data, (size_t)bytes) == 0, "%s: %s from element %lld on", preset, want.name,
                       (long long)begin);
            }
        }
    }
}
#endif
