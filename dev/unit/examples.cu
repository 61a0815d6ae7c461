// Tests of dev/examples: the format, the rule and the preset work in the ways that optim/README.md says. Format and
// rule are ordinary files of optim/formats and optim/rules, so this unit includes them where table.cuh would and makes
// the rows that one adds there.
#include "../../optim/constants.h"
#include "../../optim/jit.h"
#include "../../optim/table.cuh"
#include "../../optim/kernel.cuh"
#include "steps.h"

// A name of its own, so that a copy among the rules of table.cuh is another.
namespace example {
#include "../examples/format.cuh"
#include "../examples/rule.cuh"
}  // namespace example

static const PresetRow presets[] = {
#include "../examples/preset.cuh"
};

// The rows that one adds to table.cuh.
#define RULE_LINE ROW("my-rule", "adamw with Nesterov's momentum", 1, MyRule)

namespace example {
#define ROW(NAME, NOTE, SLOWER, TYPE) TYPE::KEEPS_V&& TYPE::DECOUPLED
static_assert(RULE_LINE, "the rule's row");
#undef ROW
}  // namespace example

// The example's storages, and the names of lin8's that they equal.
struct BlocksRow {
    const char* name;
    void (*store)(const Streams& streams, int first, const float* x, int n, const NoiseKey& key);
    void (*load)(const Streams& streams, int first, float* x, int n, const NoiseKey& key);
};

#define MINE(NAME, BLOCK, SCALE)                                                                                   \
    {NAME, Blocks<example::My8, BLOCK, SCALE, NEAREST>::store, Blocks<example::My8, BLOCK, SCALE, NEAREST>::load}, \
        {NAME ":sr", Blocks<example::My8, BLOCK, SCALE, STOCHASTIC>::store,                                        \
         Blocks<example::My8, BLOCK, SCALE, STOCHASTIC>::load},
static const BlocksRow mine_rows[] = {
    MINE("lin8/32", 32, ScaleFp32) MINE("lin8/64", 64, ScaleFp32) MINE("lin8/128", 128, ScaleFp32)
        MINE("lin8/256", 256, ScaleFp32) MINE("lin8/512", 512, ScaleFp32) MINE("lin8/1024", 1024, ScaleFp32)
            MINE("lin8/2048", 2048, ScaleFp32) MINE("lin8/256@e8m0", 256, ScaleE8m0)};

// Stores a tile in a row's arrays and reads it from them again, as m and as v.
template <class Row>
static void store_row(const Row* row, uint32_t slot, unsigned char* codes, unsigned char* scales, float* back) {
    static float x[TILE_ELEMENTS];
    for (int i = 0; i < TILE_ELEMENTS; i++) {
        float value = ldexpf(test_uniform(6, i), i / 64 % 9 - i % 7);
        x[i] = i / 64 == 3 ? 0.0f : slot == NOISE_V ? fabsf(value) : value;
    }
    memset(codes, 0, TILE_ELEMENTS), memset(scales, 0, TILE_ELEMENTS);
    row->store({codes, scales}, 0, x, TILE_ELEMENTS, NoiseKey{3, 4, slot});
    row->load({codes, scales}, 0, back, TILE_ELEMENTS, NoiseKey{3, 5, slot});
}

// In every block and with every scale, to nearest and with noise: the bits of lin8, as it says.
TEST(examples_format) {
    static unsigned char codes[2][TILE_ELEMENTS], scales[2][TILE_ELEMENTS];
    static float back[2][TILE_ELEMENTS];
    for (const BlocksRow& mine : mine_rows) {
        const FormatRow* same = find_row(state_table(), mine.name);
        expect(is(same->name, mine.name), "%s", mine.name);
        for (uint32_t slot : {NOISE_M, NOISE_V}) {
            store_row(&mine, slot, codes[0], scales[0], back[0]);
            store_row(same, slot, codes[1], scales[1], back[1]);
            int moved = 0;
            for (float x : back[0]) moved += x != 0.0f;
            expect(memcmp(codes[0], codes[1], sizeof(codes[0])) == 0 &&
                       memcmp(scales[0], scales[1], sizeof(scales[0])) == 0 &&
                       memcmp(back[0], back[1], sizeof(back[0])) == 0,
                   "the example is not %s", mine.name);
            expect(moved > TILE_ELEMENTS / 4, "%s: %d elements are not zero", mine.name, moved);
        }
    }
}

// The formulas at the head of the file, in double.
TEST(examples_rule_is_its_formula) {
    constexpr int ELEMENTS = 5 * TILE_ELEMENTS, USED = ELEMENTS - 900, STEPS = 20;
    static float got[ELEMENTS], want[ELEMENTS];
    const OptimConfig c = make_config("adamw", "fp32", "fp32");
    const Settings settings = {1.0, (double)c.weight_decay};
    const double beta1 = (double)c.beta1, beta2 = (double)c.beta2, lr = 1e-2;
    for (int i = 0; i < ELEMENTS; i++) {
        float state[3] = {i < USED ? start(i) : 0.0f}, slow, root;  // p, m, v
        double p = (double)state[0], m = 0.0, v = 0.0;
        for (int step = 1; step <= STEPS; step++) {
            const Hyper hyper = hyper_create(&c, &settings, lr, step);
            const float g = i < USED ? gradient(step, i) : 0.0f;
            EachElement<example::MyRule>::update(hyper, state, &g, state + 1, state + 2, &slow, &root, 1);
            m += (1.0 - beta1) * ((double)g - m);
            v += (1.0 - beta2) * ((double)g * (double)g - v);
            double ahead = m + (1.0 - beta1) * ((double)g - m), square = sqrt(v) / sqrt(1.0 - pow(beta2, step));
            p *= 1.0 - lr * (double)c.weight_decay;
            p -= lr / (1.0 - pow(beta1, step)) * ahead / (square + (double)c.eps);
        }
        got[i] = state[0], want[i] = (float)p;
        expect(i < USED || memcmp(state, &want[i], 4) == 0, "padding is %g", (double)state[0]);
    }
    // Each step rounds a weight a few times, and the quotient, which is a few at most, some ten times.
    const double u = ldexp(1.0, -24);
    expect_close(test, "weights", got, want, ELEMENTS, STEPS * lr * 20.0 * u, STEPS * 3.0 * u);
}

// It names a rule and formats, of which laws.cu tests all combinations.
TEST(examples_preset) {
    for (const PresetRow& row : presets) {
        OptimConfig config = make_config("adamw", "fp32", "fp32");
        config.rule = row.rule, config.weights = row.weights, config.m = row.m, config.v = row.v, config.grads = "fp32";
        expect(optim_resolve(&config, error), "%s", error);
        // A preset gives names in full.
        expect(is(config.rule, row.rule) && is(config.weights, row.weights), "%s %s", config.rule, config.weights);
        expect(is(config.m, row.m) && is(config.v, row.v), "%s %s", config.m, config.v);
        double bytes = 0.0, told = atof(row.note);
        const char* said = strstr(described(config), row.v);
        expect(said && sscanf(said + strlen(row.v), "%lf", &bytes) == 1 && fabs(bytes - told) < 0.1,
               "\"%s\" and it is %g bytes", row.note, bytes);
        if (jit_available()) expect_compiles(test, kernel_of(config));
    }
}
