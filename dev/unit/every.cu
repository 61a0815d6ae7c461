// Properties of every combination of rule, weights, gradients, states and overrides: it allocates what it plans; a step
// whose factor is not finite changes nothing; padding keeps the code of zero; threads, shards and a resume do not
// change a bit; a GPU has the CPU's bits, whatever the gradients. A new format, rule or preset is tested here by its
// row in optim/table.cuh alone.
#include <time.h>

#include <algorithm>

#include "steps.h"

// Shapes with rows and columns that no thread's elements divide, one row, one column, whole tiles and single elements.
static const OptimTensor model[] = {
    {"wpe.weight", 3, 1001, true, 0},      {"ln_f.weight", 1, 300, false, 0},    {"h.0.one.weight", 70, 1, true, 0},
    {"h.0.mlp.weight", 21, 257, true, 0},  {"h.0.mlp.bias", 1, 4097, false, 0},  {"h.0.wide.weight", 2, 4099, true, 0},
    {"h.1.little.weight", 2, 2, true, 0},  {"h.1.tile.bias", 1, 2048, false, 0}, {"h.1.ln_1.weight", 1, 1, false, 0},
    {"h.1.ln_2.weight", 1, 255, false, 0}, {"h.1.attn.weight", 33, 31, true, 0}};
constexpr int COUNT = sizeof(model) / sizeof(model[0]);

// Combinations that the loops below do not make: scales of tensors, rows and columns; overrides of all kinds.
static const char* const mixed[][5] = {
    {"adamw", "bf16:sr", "e4m3/tensor", "e5m2/tensor:sr", ""},
    {"adamw", "bf16:sr", "de4/rank1:sr", "lin4/rank1", ""},
    {"adamw", "e4m3/tensor+fp32", "dyn8", "udyn8", ""},
    {"adamw", "e5m2/tensor+fp32", "dyn8/rank1", "sqrt4/rank1:sr", ""},
    {"adamw", "e4m3:sr", "fp32", "udyn8/rank1:sr", ""},
    {"ademamix", "e4m3/tensor+fp32", "e5m2/tensor:sr", "udyn8/rank1", ""},
    {"lion", "bf16+8", "de4/rank1", "", ""},
    {"adamw", "e4m3/tensor+fp32", "de4", "lin4/rank1",
     "ln*|wpe: m=dyn8/rank1 v=fp32; *.mlp: m=e4m3/tensor; h.1: lr=0.5"},
    {"ademamix", "bf16:sr", "bf16:sr", "bf16:sr", "wpe|ln*: m=fp32 v=fp32 lr=0.5; ln_f: lr=0.5; *.bias: wd=0.3"},
    {"ademamix", "e4m3:sr", "bf16:sr", "bf16:sr",
     "ln*: weights=bf16:sr; wpe: weights=fp32 m=bf16:sr; *.bias: weights=bf16+8 wd=0.1"},
    {"adamw", "e4m3:sr", "bf16:sr", "bf16:sr", "*: weights=bf16+8"},
    {"adamw", "bf16+8:sr", "bf16:sr", "bf16:sr", "wpe: m=bf16; ln_f: v=bf16; *.bias: m=fp32 v=fp32"},
    {"adamw", "bf16+8:sr", "bf16:sr", "bf16:sr", "*: m=bf16 v=bf16 lr=3"},
    {"adamw", "bf16:sr", "bf16:sr", "bf16:sr", "wpe: weights=lin8:sr; ln*: weights=fp32"},
    {"adamw", "fp32", "bf16:sr", "bf16:sr",  // numbers of one array of spans are those of two launches
     "wpe: weights=e4m3/tensor+fp32 m=fp32; ln*: weights=e4m3/tensor+fp32 m=e4m3/tensor; *.bias: v=e4m3/tensor"},
    {"adamw", "lin8:ef", "dyn8:sr", "udyn8", "ln*|*.bias: weights=bf16:sr"},
    {"adamw", "bf16:sr", "dyn8", "udyn8", "ln*: weights=e4m3:sr; *.bias: weights=bf16+fp32 m=fp32"},
    {"adam-mini", "bf16:sr", "fp32", "", ""},
    {"adam-mini", "bf16:sr", "dyn8/256", "", ""},
    {"adam-mini", "bf16:sr", "de4/32@dq8", "", "h.0: rule=adamw v=udyn8; ln*: m=fp32"},
    {"adam-mini", "bf16:sr", "e4m3/tensor", "", "h.0: rule=adamw v=udyn8; ln*: m=fp32"}};

constexpr int MAX_CONFIGS = 512;
struct Configs {
    OptimConfig config[MAX_CONFIGS];
    int count;
};

static void add(Configs* all, const OptimConfig& config) {
    if (all->count < MAX_CONFIGS) all->config[all->count++] = config;
}

// Presets with both kinds of gradients and with other formats for some tensors, rows of `mixed`, and every rule with
// every storage of the weights.
static Configs* every_config() {
    static Configs all;
    const char* const states[] = {"fp32", "bf16:sr", "e4m3/256"};
    for (const char* preset : element_presets()) {
        for (const char* grads : GRADS_NAMES) add(&all, preset_config(preset, grads));
        add(&all, preset_config(preset, "fp32", "ln*: m=fp32 lr=0.5; *.bias: wd=0.3"));
    }
    for (const auto& row : mixed) {
        OptimConfig config = states_config(row[0], row[1], "fp32", row[2], row[3]);
        config.overrides = row[4];
        add(&all, resolved(config));
    }
    for (const char* rule : SIMPLE_RULES) {
        for (const char* weights : WEIGHTS_NAMES) {
            const char* state = states[all.count % 3];
            if (goes_with(rule, weights, state)) add(&all, states_config(rule, weights, "fp32", state, state));
        }
    }
    return &all;
}

// Returns the type that the matmuls read beside configuration k.
static OptimType compute_of(int k) {
    return k % 2 ? OPTIM_FP32 : OPTIM_BF16;
}

// The configurations of a case: all, or every third from `third` on. On a GPU all would take one process minutes.
struct Part {
    int third;  // -1: all

    bool has(int k) const { return third < 0 || k % 3 == third; }
};
constexpr Part ALL = {-1};

// Three cases on a GPU, NAME_1_gpu to NAME_3_gpu; the body has `part`.
#define THIRDS_TEST(NAME)                             \
    static void thirds_##NAME(Test* test, Part part); \
    JIT_TEST(NAME##_1_gpu) {                          \
        thirds_##NAME(test, {0});                     \
    }                                                 \
    JIT_TEST(NAME##_2_gpu) {                          \
        thirds_##NAME(test, {1});                     \
    }                                                 \
    JIT_TEST(NAME##_3_gpu) {                          \
        thirds_##NAME(test, {2});                     \
    }                                                 \
    static void thirds_##NAME(Test* test, Part part)

// Compiles the kernels of a part of the first `count` configurations into the cache, on all cores; with bf16_too also
// those that compute_of leaves out.
static void compile_all(Test* test, const Configs* all, int count, Part part, bool bf16_too) {
    const Device gpu = test_device(true);
    int bad = in_processes(test, (bf16_too ? 2 : 1) * count, [&](int i) {
        char architecture[32];
        JitImage image = {};
        const int k = i % count;
        if (!part.has(k) || (i >= count && compute_of(k) == OPTIM_BF16)) return;
        const char* expression = kernel_of(all->config[k], nullptr, i < count ? compute_of(k) : OPTIM_BF16);
        // An error here comes again, and is reported, when the optimizer is created.
        if (jit_architecture(gpu.compute, architecture, sizeof(architecture), error) &&
            jit_get(expression, architecture, &image, error)) {
            jit_free(&image);
        }
    });
    expect(bad == 0, "%d processes did not end well", bad);
}

// How many configurations are those of presets and rows of `mixed`, which come first.
static const int LISTED = 3 * (int)element_presets().size() + (int)(sizeof(mixed) / sizeof(mixed[0]));

// Calls body(config, k) for each configuration of a part that can run, with a cache of kernels of its own; only_listed:
// for the first LISTED alone.
template <class Body>
static void for_every(Test* test, bool gpu, bool only_listed, Part part, Body body) {
    CacheFolder folder;
    Configs* all = every_config();
    const int count = only_listed ? LISTED : all->count;
    int ran = 0;
    if (gpu) compile_all(test, all, count, part, false);
    for (int k = 0; k < count && test->failures < 20; k++) {
        if (part.has(k)) body(&all->config[k], k), ran++;
    }
    const int least = only_listed ? LISTED - 1 : 150;
    expect(ran > (part.third < 0 ? least : least / 4), "%d configurations", ran);
    note(test, "%d configurations", ran);
}

// A step whose factor is NaN or infinite, then a resume from the streams. The steps after it are those of a run that
// was not interrupted. Another seed changes what rounds stochastically, and that alone.
static void skip_and_resume(Test* test, bool gpu, Part part) {
    for_every(test, gpu, false, part, [&](const OptimConfig* config, int k) {
        const OptimType compute = compute_of(k);
        OptimConfig reseeded = *config;
        OptimRun whole, first, second, other;
        reseeded.seed++;
        for (OptimRun* run : {&whole, &first}) run_open(run, config, model, compute);
        run_open(&second, config, model, compute, gpu);
        run_open(&other, &reseeded, model, compute);
        expect_planned(test, &whole, describe(config));
        run_steps(&whole, 1, 5), run_steps(&first, 1, 3), run_steps(&other, 1, 5);
        expect_load(test, &second, &first);
        expect_same(test, &first, &second, formatted("%s, loaded", describe(config)));
        for (float factor : {NAN, INFINITY, -INFINITY}) {
            Steps how;
            how.factor = factor;
            run_steps(&second, 4, 4, how);
            expect_same(test, &first, &second, formatted("%s, a factor of %g", describe(config), (double)factor));
        }
        run_steps(&second, 4, 5);
        expect_same(test, &whole, &second, formatted("%s, resumed", describe(config)));
        expect(difference(&whole, &first), "%s: nothing moves", describe(config));
        const char* names = formatted("%s %s %s %s", config->weights, config->m, config->v, config->overrides);
        expect((difference(&whole, &other) != nullptr) == (strstr(names, ":sr") || strstr(names, ":ef")),
               "%s: another seed", describe(config));
    });
}

TEST(every_skip_and_resume) {
    skip_and_resume(test, false, ALL);
}

THIRDS_TEST(every_skip_and_resume) {
    skip_and_resume(test, true, part);
}

// Padding of the weights, and of moments in fp32 and bf16, keeps the bytes that it began with; the copy has zeros
// there. Everything else moves. One thread and five compute the same.
TEST(every_padding_and_threads) {
    const int threads = omp_get_max_threads();
    for_every(test, false, false, ALL, [&](const OptimConfig* config, int) {
        OptimRun fresh, run;
        run_open(&run, config, model, OPTIM_FP32), run_open(&fresh, config, model, OPTIM_FP32);
        omp_set_num_threads(1), run_steps(&run, 1, 3);
        for (int s = 0; s < optim_stream_count(run.optim); s++) {
            OptimStream stream = optim_stream(run.optim, s), begin = optim_stream(fresh.optim, s);
            const int64_t bytes = stream.elements * stream.element_bytes, bits = 8 * bytes / run.elements;
            const bool wide = is(stream.dtype, "F32") || is(stream.dtype, "BF16") || is(stream.dtype, "F16");
            const bool whole = !*config->overrides || is(config->overrides, "none");  // the arena's layout
            if ((!stream.is_weights && !wide) || !whole || bits < 4 || bits * run.elements != 8 * bytes) continue;
            const char *now = (const char*)stream.data, *before = (const char*)begin.data;
            int64_t wrong = 0;
            for (int t = 0; t < COUNT; t++) {
                const int64_t used = run.tensor[t].offset + model[t].rows * model[t].cols;
                const int64_t end = run.tensor[t].offset + tensor_padded(&run.tensor[t]);
                for (int64_t b = ceil_div(used * bits, 8); b < end * bits / 8; b++) wrong += now[b] != before[b];
            }
            expect(wrong == 0, "%s: %lld bytes of %s's padding", describe(config), (long long)wrong, stream.name);
            expect(memcmp(now, before, (size_t)bytes) != 0, "%s: %s stands still", describe(config), stream.name);
        }
        const float* seen = (const float*)optim_weights(run.optim);
        for (int t = 0; t < COUNT; t++) {
            int64_t i = run.tensor[t].offset + model[t].rows * model[t].cols, wrong = 0;
            for (; i < run.tensor[t].offset + tensor_padded(&run.tensor[t]); i++) wrong += seen[i] != 0.0f;
            expect(wrong == 0, "%s: padding of %s is read", describe(config), model[t].name);
        }
        omp_set_num_threads(5), run_steps(&fresh, 1, 3), omp_set_num_threads(threads);
        expect_same(test, &run, &fresh, formatted("%s, other threads", describe(config)));
    });
}

// Shards are the whole's parts, for cuts between tensors, and within them where the formats allow it; the last cut
// leaves a shard without elements. On a GPU, presets and `mixed` alone.
TEST_BOTH(every_shard) {
    const int tiles[][4] = {{1, 7, 12, 16}, {2, 3, 4, 9}, {5, 6, 10, 18}};
    for_every(test, gpu, gpu, ALL, [&](const OptimConfig* config, int k) {
        const OptimType compute = compute_of(k);
        OptimRun whole, shard[6];
        run_open(&whole, config, model, compute);
        run_steps(&whole, 1, 3);
        const char* names = formatted("%s %s %s %s", config->weights, config->m, config->v, config->overrides);
        const bool whole_tensors = in_spans(names);
        for (int c = 0; c < 3; c++) {
            int64_t cut[6] = {0};
            for (int i = 0; i < 4; i++)
                cut[i + 1] = whole_tensors ? whole.tensor[tiles[c][i] % COUNT].offset : tiles[c][i] * TILE_ELEMENTS;
            cut[5] = whole.elements;
            std::sort(cut + 1, cut + 5);
            cuts_allow(config, whole.tensor, COUNT, cut, 6);
            int count = 0;
            for (int i = 0; i < 5; i++) {
                if (cut[i] == cut[i + 1] && i < 4) continue;
                const OptimConfig part = shard_config(*config, cut[i], cut[i + 1]);
                run_open(&shard[count], &part, model, compute, gpu);
                run_steps(&shard[count++], 1, 3);
            }
            expect_joined(test, &whole, shard, count, describe(config));
            if (k >= LISTED) break;
        }
    });
}

static void compare_all(Test* test, const Configs* all, Part part, bool wild) {
    Steps wildly;
    wildly.wild = true;
    compile_all(test, all, all->count, part, wild);
    for (int k = 0; k < all->count && test->failures < 20; k++) {
        const OptimConfig* config = &all->config[k];
        if (!part.has(k)) continue;
        expect_equal_cpu_gpu(test, config, model, COUNT, compute_of(k), 20);
        if (wild) expect_equal_cpu_gpu(test, config, model, COUNT, OPTIM_BF16, 4, wildly);
    }
    note(test, "%s%d configurations", part.third < 0 ? "" : "a third of ", all->count);
}

THIRDS_TEST(every_equal_cpu) {
    CacheFolder cache;
    compare_all(test, every_config(), part, true);
}

// Is a row of the table a format to nearest at its default block, or that with another scale? Other blocks are drawn in
// every_random.
static bool is_format(const char* name, const char* when) {
    bool at_default = when[0] || strchr(name, '@');
    return at_default && !strchr(name, ':');
}

CACHE_TEST(JIT_TEST, every_state_equals_cpu_gpu) {
    static Configs all;
    for (int i = 0; i < state_table().count; i++) {
        const char* name = state_table().row[i].name;
        if (!is_format(name, state_table().row[i].note)) continue;
        const bool m = serves_m(name);
        const char* noisy = is(name, "fp32") ? name : strdup(formatted("%s:sr", name));
        add(&all, states_config("adamw", "bf16:sr", "bf16", m ? name : "bf16", noisy));
        add(&all, states_config("adamw", "bf16:sr", "fp32", m ? noisy : "de4", name));
    }
    // Weights that are looked up: ordinary and rare values have stores of their own.
    for (const char* weights : WEIGHTS_NAMES) {
        if (strchr("el", *weights)) add(&all, states_config("adamw", weights, "bf16", "soft8", "sqrt8"));
        if (strchr("el", *weights) && goes_with("adamw", weights, "de4"))
            add(&all, states_config("adamw", weights, "bf16", "de4", "sqrt4"));
    }
    expect(all.count > 100, "%d configurations", all.count);
    compare_all(test, &all, ALL, true);
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

CACHE_TEST(JIT_TEST, every_random_equals_cpu_gpu) {
    static Configs all;
    const uint64_t seed = sample_seed(test);
    for (int k = 0; k < 200; k++) add(&all, draw_config(seed, k));
    compare_all(test, &all, ALL, false);
}

// Every preset, on a GPU that is said to have seven multiprocessors: of the last length, which no tile, block or group
// of threads divides, all of them draw tiles in turn and their stages go round.
JIT_TEST(every_length_equals_cpu_gpu) {
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

// For `make sanitize`, whose race checker is slow: one thread block, which uses all of its stages several times. Blocks
// of a whole tile are reduced through shared memory, and their scales are what the producer warps copy themselves; so
// are the largest of a tile with @dq8, here with 16 and 8 elements a thread and with a third state.
CACHE_TEST(JIT_TEST, every_race_gpu) {
    const OptimTensor tensor = {"tensor", 1, 60 * TILE_ELEMENTS + 1, true, 0};
    static Configs all;
    for (const char* preset : element_presets()) add(&all, preset_config(preset, "bf16", "none"));
    add(&all, states_config("adamw", "bf16:sr", "bf16", "dyn8/2048", "udyn8/2048"));
    add(&all, states_config("adamw", "bf16:sr", "bf16", "de4/32@dq8", "fp32"));
    add(&all, states_config("ademamix", "bf16:sr", "bf16", "soft8/32@dq8", "sqrt8/32@dq8"));
    for (int k = 0; k < all.count; k++)
        expect_equal_cpu_gpu(test, &all.config[k], &tensor, 1, OPTIM_BF16, 2, Steps(), 1);
}

// Every rule, every storage of the weights, each format of states with noise and in the longest blocks, and a sample of
// all combinations, through NVRTC; rules and formats with a pass before the step, that pass too.
static void compiles(Test* test, const OptimConfig* config, const char* architecture) {
    const char* all = formatted("%s %s %s", config->weights, config->m, config->v);
    expect(is(kernel_of(*config), kernel_of(*config, "optim_step_kernel")), "%s", kernel_of(*config));
    expect_compiles(test, kernel_of(*config), architecture);
    if (in_spans(all)) expect_compiles(test, kernel_of(*config, "optim_measure_kernel"), architecture);
    if (find_row(rule_table(), config->rule)->by_rows || config->limit_growth > 0.0f)
        expect_compiles(test, kernel_of(*config, "optim_sums_kernel"), architecture);
}

JIT_TEST(every_row_compiles) {
    static Configs all;
    const uint64_t seed = sample_seed(test);
    const int rules = name_count(SIMPLE_RULES), weights = name_count(WEIGHTS_NAMES);
    for (int i = 0; i < rules || i < weights; i++) {
        const char *rule = SIMPLE_RULES[i % rules], *stored = WEIGHTS_NAMES[i % weights];
        const char* m = i % 2 ? "fp32" : "bf16:sr";
        add(&all, states_config(goes_with(rule, stored, m) ? rule : "adamw", stored, "fp32", m, m));
    }
    for (const char* name : STATE_NAMES) {
        if (in_spans(name)) add(&all, states_config("adamw", "bf16:sr", "fp32", serves_m(name) ? name : "fp32", name));
    }
    for (const char* m : {"dyn8/2048:sr", "soft8/64:sr", "e5m2/128:sr", "de4/32:sr", "nf4", "e2m1:sr", "de4/64@dq8"})
        add(&all, states_config("adamw", "bf16:sr", "bf16", m, serves_m(m) ? "lin4/2048:sr" : m));
    for (const char* v : {"udyn8/32:sr", "sqrt8/512:sr", "sqrt4:sr", "ulin8", "adalog8", "adalog8:sr"})
        add(&all, states_config("adamw", "bf16:sr", "bf16", "soft8@dq8:sr", v));
    for (const char* preset : element_presets())
        add(&all, preset_config(preset, GRADS_NAMES[all.count % name_count(GRADS_NAMES)], "none"));
    OptimConfig limited = states_config("adamw", "bf16:sr", "bf16", "dyn8", "udyn8");
    limited.limit_growth = 1.01f;
    add(&all, limited);
    for (int k = 0; k < 40; k++) add(&all, draw_config(seed, k));
    int bad = in_processes(test, all.count, [&](int k) { compiles(test, &all.config[k], k % 3 ? "sm_90" : "sm_80"); });
    expect(bad == 0, "in %d processes a combination does not compile", bad);
}
