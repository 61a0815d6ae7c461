// Tests of dev/examples: the format, the rule and the preset work in the ways that optim/README.md says (--format is
// tested in user.cu). Format and rule are ordinary files of optim/formats and optim/rules, so this unit includes them
// where table.cuh would and makes the rows that one adds there; NVRTC gets the rule's text after the optimizer's own.
#include "../../optim/constants.h"
#include "../../optim/jit.h"
#include "../../optim/table.cuh"
#include "../../optim/kernel.cuh"
#include "../../optim/user.cuh"
#include "rules.h"

// A name of its own, so that a copy among the rules of table.cuh is another.
namespace example {
#include "../examples/format.cuh"
#include "../examples/rule.cuh"
typedef My8 Mine8;
}  // namespace example

static const PresetRow presets[] = {
#include "../examples/preset.cuh"
};

// The rows that one adds to table.cuh.
#define FORMAT_LINE OPTIM_BLOCKS(ROW, "mine8", "for m: when to use it", Mine8, 64)
#define RULE_LINE ROW("my-rule", "adamw with Nesterov's momentum", 1, MyRule)

struct BlocksRow {
    const char* name;
    void (*store)(const Streams& streams, int first, const float* x, int n, const NoiseKey& key);
    void (*load)(const Streams& streams, int first, float* x, int n, const NoiseKey& key);
};

struct ExampleRule {
    const char *name, *note;
    int slower;
    bool keeps_v, decoupled;
};

namespace example {
#define ROW(NAME, NOTE, ...) {NAME, __VA_ARGS__::store, __VA_ARGS__::load},
static const BlocksRow format_rows[] = {FORMAT_LINE};
static const BlocksRow same_rows[] = {OPTIM_BLOCKS(ROW, "lin8", "", Lin8, 64)};
#undef ROW
#define ROW(NAME, NOTE, SLOWER, TYPE) {NAME, NOTE, SLOWER, TYPE::KEEPS_V, TYPE::DECOUPLED},
static const ExampleRule rule_rows[] = {RULE_LINE};
#undef ROW
}  // namespace example

TEST(examples_rule_row) {
    const ExampleRule* row = example::rule_rows;
    expect(is(row->name, "my-rule") && row->slower == 1 && row->keeps_v && row->decoupled, "%s", row->name);
}

// Stores a tile in a row's arrays and reads it from them again, as m and as v.
static void store_row(const BlocksRow* row, uint32_t slot, unsigned char* codes, unsigned char* scales, float* back) {
    static float x[TILE_ELEMENTS];
    for (int i = 0; i < TILE_ELEMENTS; i++) {
        float value = ldexpf(test_uniform(6, i), i / 64 % 9 - i % 7);
        x[i] = i / 64 == 3 ? 0.0f : slot == NOISE_V ? fabsf(value) : value;
    }
    memset(codes, 0, TILE_ELEMENTS), memset(scales, 0, TILE_ELEMENTS);
    row->store({codes, scales}, 0, x, TILE_ELEMENTS, NoiseKey{3, 4, slot});
    row->load({codes, scales}, 0, back, TILE_ELEMENTS, NoiseKey{3, 5, slot});
}

// In every block and with every scale that the line makes, to nearest and with noise: the bits of lin8, as it says.
TEST(examples_format_built_in) {
    constexpr int ROWS = sizeof(example::format_rows) / sizeof(BlocksRow);
    static unsigned char codes[2][TILE_ELEMENTS], scales[2][TILE_ELEMENTS];
    static float back[2][TILE_ELEMENTS];
    for (int i = 0; i < ROWS; i++) {
        const BlocksRow *mine = &example::format_rows[i], *same = &example::same_rows[i];
        expect(is(strchr(mine->name, '/'), strchr(same->name, '/')), "%s and %s", mine->name, same->name);
        for (uint32_t slot : {NOISE_M, NOISE_V}) {
            store_row(mine, slot, codes[0], scales[0], back[0]);
            store_row(same, slot, codes[1], scales[1], back[1]);
            int moved = 0;
            for (float x : back[0]) moved += x != 0.0f;
            expect(memcmp(codes[0], codes[1], sizeof(codes[0])) == 0 &&
                       memcmp(scales[0], scales[1], sizeof(scales[0])) == 0 &&
                       memcmp(back[0], back[1], sizeof(back[0])) == 0,
                   "%s is not %s", mine->name, same->name);
            expect(moved > TILE_ELEMENTS / 4, "%s: %d elements are not zero", mine->name, moved);
        }
    }
    note(test, "%d rows", ROWS);
}

// The arrays of a step in host memory, over tiles of one tensor with decay.
constexpr int TILES = 5, ELEMENTS = TILES * TILE_ELEMENTS, USED = ELEMENTS - 900, STEPS = 20;

struct Arrays {
    char weights[4 * ELEMENTS], grads[4 * ELEMENTS], m[4 * ELEMENTS], m_scales[ELEMENTS], v[4 * ELEMENTS],
        v_scales[ELEMENTS];
    Tile tiles[TILES];
    uint32_t next_tile;
    float grad_scale;
};

static Arrays on_host;

static OptimConfig rule_config() {
    OptimConfig config = {};
    config.beta1 = 0.9f, config.beta2 = 0.95f, config.eps = 1e-8f, config.weight_decay = 0.1f, config.seed = 77;
    config.decay_mode = "coupled";
    return config;
}

static StepArguments step_arguments(Arrays* a, int step) {
    const OptimConfig config = rule_config();
    const Settings settings = {1.0, (double)config.weight_decay};
    StepArguments arguments = {};
    arguments.weights = {a->weights, nullptr}, arguments.grads = {a->grads, nullptr};
    arguments.m = {a->m, a->m_scales}, arguments.v = {a->v, a->v_scales};
    arguments.grad_scale = &a->grad_scale;
    arguments.tiles = a->tiles, arguments.tile_count = TILES, arguments.next_tile = &a->next_tile;
    arguments.seed = config.seed, arguments.step = (uint32_t)step;
    arguments.group[0] = hyper_create(&config, &settings, 1e-2, step);
    return arguments;
}

// A step's kernel with the rule, and the same on the CPU.
template <class Weights, class M, class V, class Grads>
struct Combination {
#ifdef __CUDACC__
    typedef StepLayout<example::MyRule, Weights, M, V, None, Grads> Layout;
#endif

    static void start(Arrays* a) {
        static float values[ELEMENTS];
        memset((void*)a, 0, sizeof(*a));
        a->grad_scale = 1.0f;
        for (uint32_t t = 0; t < TILES; t++) a->tiles[t] = {t, 0};
        for (int i = 0; i < USED; i++) values[i] = ::start(i);
        Weights::set({a->weights, nullptr}, 0, values, ELEMENTS);
    }

    static void set_grads(Arrays* a, int step) {
        static float values[ELEMENTS];
        for (int i = 0; i < USED; i++) values[i] = gradient(step, i);
        Grads::set({a->grads, nullptr}, 0, values, ELEMENTS);
    }

    static void step_cpu(Arrays* a, int step) {
        StepArguments arguments = step_arguments(a, step);
        const StreamInfo nothing = {};
        for (int t = 0; t < TILES; t++) {
            TileStreams tile = {tile_at(Weights::STREAM[0], nothing, nothing, arguments.weights, t),
                                tile_at(Grads::STREAM[0], nothing, nothing, arguments.grads, t),
                                tile_at(M::STREAM[0], M::STREAM[1], nothing, arguments.m, t),
                                tile_at(V::STREAM[0], V::STREAM[1], nothing, arguments.v, t),
                                {},
                                {}};
            update_elements<TILE_ELEMENTS>(EachElement<example::MyRule>(), Weights(), Grads(), M(), V(), arguments,
                                           tile, arguments.group[0], a->grad_scale, t * TILE_ELEMENTS, 0,
                                           TILE_ELEMENTS);
        }
    }

    static void run_cpu(Arrays* a) {
        start(a);
        for (int step = 1; step <= STEPS; step++) set_grads(a, step), step_cpu(a, step);
    }

    // The table that a format looks up, in the GPU's memory; null if it has none.
    template <class Storage>
    static void* table_create(const Device* gpu) {
        void* table = nullptr;
        if constexpr (Storage::TABLE_BYTES != 0) {
            static char host[Storage::TABLE_BYTES];
            Storage::fill(host);
            table = device_alloc(gpu, sizeof(host));
            copy_to_device(gpu, table, host, sizeof(host));
        }
        return table;
    }

#ifdef __CUDACC__
    static void run_gpu(Arrays* a, const Device* gpu, const JitKernel* kernel) {
        void *m_table = table_create<M>(gpu), *v_table = table_create<V>(gpu);
        Arrays* there = (Arrays*)device_alloc(gpu, sizeof(Arrays));
        int shared_bytes = step_shared_bytes(Layout::SHAPE, gpu->compute);
        int64_t grid = (TILES + Layout::SHAPE.groups - 1) / Layout::SHAPE.groups;
        jit_shared_bytes(kernel, shared_bytes);
        start(a);
        copy_to_device(gpu, there, a, sizeof(Arrays));
        for (int step = 1; step <= STEPS; step++) {
            set_grads(a, step);
            copy_to_device(gpu, there->grads, a->grads, sizeof(a->grads));
            StepArguments arguments = step_arguments(there, step);
            arguments.m.table = m_table, arguments.v.table = v_table;
            void* pointers[] = {&arguments};
            jit_launch(kernel, grid, Layout::SHAPE.block_threads, shared_bytes, pointers, gpu->stream);
        }
        copy_to_host(gpu, a, there, sizeof(Arrays));
    }
#endif
};

typedef Elementwise<Fp32, NEAREST> Wide;
typedef Combination<Wide, Wide, Wide, Wide> Exact;
typedef Combination<Elementwise<Bf16, STOCHASTIC>, Blocks<Lin8, 256, ScaleFp32, NEAREST>,
                    Blocks<Sqrt4, 128, ScaleFp32, NEAREST>, Elementwise<Bf16, NEAREST>>
    Narrow;
static const char* const exact_types =
    "Elementwise<Fp32, NEAREST>, Elementwise<Fp32, NEAREST>, Elementwise<Fp32, NEAREST>, None, "
    "Elementwise<Fp32, NEAREST>";
static const char* const narrow_types =
    "Elementwise<Bf16, STOCHASTIC>, Blocks<Lin8, 256, ScaleFp32, NEAREST>, Blocks<Sqrt4, 128, ScaleFp32, NEAREST>, "
    "None, Elementwise<Bf16, NEAREST>";

// The formulas at the head of the file, in double.
TEST(examples_rule_is_its_formula) {
    static float want[ELEMENTS];
    const OptimConfig c = rule_config();
    const double beta1 = (double)c.beta1, beta2 = (double)c.beta2, lr = 1e-2;
    Exact::run_cpu(&on_host);
    for (int i = 0; i < USED; i++) {
        double p = (double)start(i), m = 0.0, v = 0.0;
        for (int step = 1; step <= STEPS; step++) {
            double g = (double)gradient(step, i);
            m += (1.0 - beta1) * (g - m);
            v += (1.0 - beta2) * (g * g - v);
            double ahead = m + (1.0 - beta1) * (g - m), root = sqrt(v) / sqrt(1.0 - pow(beta2, step));
            p *= 1.0 - lr * (double)c.weight_decay;
            p -= lr / (1.0 - pow(beta1, step)) * ahead / (root + (double)c.eps);
        }
        want[i] = (float)p;
    }
    // Each step rounds a weight a few times, and the quotient, which is a few at most, some ten times.
    const double u = ldexp(1.0, -24);
    expect_close(test, "weights", (const float*)on_host.weights, want, ELEMENTS, STEPS * lr * 20.0 * u,
                 STEPS * 3.0 * u);
}

TEST(examples_rule_leaves_padding_zero) {
    Narrow::run_cpu(&on_host);
    const uint16_t* weights = (const uint16_t*)on_host.weights;
    int moved = 0;
    for (int i = 0; i < ELEMENTS; i++) {
        float x = Bf16::decode(weights[i]);
        expect(isfinite(x) && (i < USED || weights[i] == 0), "element %d is %g", i, (double)x);
        moved += i < USED && x != start(i);
    }
    expect(moved > USED / 2, "%d of %d elements moved", moved, USED);
}

// The rule's kernel as NVRTC compiles it.
static bool rule_kernel(Test* test, const char* types, const char* architecture, JitImage* image) {
    const char* expression = formatted("optim_step_kernel<example::MyRule, %s>", types);
    const char* source = formatted("\nnamespace example {\n%s}\n", contents(test_folder(), "dev/examples/rule.cuh"));
    bool good = jit_compile(expression, architecture, image, error, source);
    expect(good, "%s", error);
    return good;
}

JIT_TEST(examples_rule_compiles) {
    for (const char* types : {exact_types, narrow_types}) {
        JitImage image;
        if (!rule_kernel(test, types, "sm_90", &image)) continue;
        expect(strstr(image.symbol, "MyRule"), "%s", image.symbol);
        jit_free(&image);
    }
}

#ifdef __CUDACC__
template <class Combination>
static void compare_rule(Test* test, const Device* gpu, const char* types) {
    static Arrays got;
    char architecture[32];
    JitImage image;
    JitKernel kernel;
    expect(jit_architecture(gpu->compute, architecture, sizeof(architecture), error), "%s", error);
    if (!rule_kernel(test, types, architecture, &image)) return;
    expect(jit_load(&image, &kernel, error), "%s", error);
    Combination::run_cpu(&on_host);
    Combination::run_gpu(&got, gpu, &kernel);
    int differ = 0;
    const char *a = (const char*)&got, *b = (const char*)&on_host;
    for (size_t i = 0; i < sizeof(got); i++) differ += a[i] != b[i];
    expect(differ == 0, "%s: %d bytes differ", types, differ);
    jit_free(&image);
}

JIT_TEST(examples_rule_equal_cpu_gpu) {
    Device gpu = test_device(true);
    compare_rule<Exact>(test, &gpu, exact_types);
    compare_rule<Narrow>(test, &gpu, narrow_types);
}
#endif

static OptimConfig preset_config(Test* test, const PresetRow* row) {
    OptimConfig config = rule_config();
    config.rule = row->rule, config.weights = row->weights, config.m = row->m, config.v = row->v, config.grads = "fp32";
    expect(optim_resolve(&config, error), "%s", error);
    // A preset gives names in full.
    expect(is(config.rule, row->rule) && is(config.weights, row->weights), "%s %s", config.rule, config.weights);
    expect(is(config.m, row->m) && is(config.v, row->v), "%s %s", config.m, config.v);
    return config;
}

// It names a rule and formats, of which every.cu tests all combinations.
TEST(examples_preset) {
    for (const PresetRow& row : presets) {
        OptimConfig config = preset_config(test, &row);
        double bytes = 0.0, told = atof(row.note);
        const char* said = strstr(described(config), row.v);
        expect(said && sscanf(said + strlen(row.v), "%lf", &bytes) == 1 && fabs(bytes - told) < 0.1,
               "\"%s\" and it is %g bytes", row.note, bytes);
        if (jit_available()) expect_compiles(test, kernel_of(config));
    }
}
