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

// A format's storage in one tile.
template <class Storage>
static void store_tile(uint32_t slot, unsigned char* codes, unsigned char* scales, float* back) {
    static float x[TILE_ELEMENTS];
    for (int i = 0; i < TILE_ELEMENTS; i++) {
        float value = ldexpf(test_uniform(6, i), i / 64 % 9 - i % 7);
        x[i] = i / 64 == 3 ? 0.0f : slot == NOISE_V ? fabsf(value) : value;
    }
    Storage::store({codes, scales}, 0, x, TILE_ELEMENTS, NoiseKey{3, 4, slot});
    Storage::load({codes, scales}, 0, back, TILE_ELEMENTS, NoiseKey{3, 5, slot});
}

// The example format has the bits of lin8, to nearest and with noise, as m and as v.
template <int BLOCK, class Scale, Rounding ROUNDING>
static void check_format(Test* test) {
    static unsigned char codes[2][TILE_ELEMENTS], scales[2][TILE_ELEMENTS];
    static float back[2][TILE_ELEMENTS];
    for (uint32_t slot : {NOISE_M, NOISE_V}) {
        store_tile<Blocks<example::My8, BLOCK, Scale, ROUNDING>>(slot, codes[0], scales[0], back[0]);
        store_tile<Blocks<Lin8, BLOCK, Scale, ROUNDING>>(slot, codes[1], scales[1], back[1]);
        int moved = 0;
        for (float x : back[0]) moved += x != 0.0f;
        expect(memcmp(codes[0], codes[1], sizeof(codes[0])) == 0 &&
                   memcmp(scales[0], scales[1], sizeof(scales[0])) == 0 &&
                   memcmp(back[0], back[1], sizeof(back[0])) == 0,
               "the example is not lin8/%d", BLOCK);
        expect(moved > TILE_ELEMENTS / 4, "lin8/%d: %d elements are not zero", BLOCK, moved);
    }
}

TEST(examples_format) {
    check_format<32, ScaleFp32, NEAREST>(test), check_format<256, ScaleFp32, STOCHASTIC>(test);
    check_format<2048, ScaleFp32, NEAREST>(test), check_format<256, ScaleE8m0, STOCHASTIC>(test);
}

// It is nadamw, whose formula laws_oracle checks, with other roundings.
TEST(examples_rule_is_its_formula) {
    constexpr int ELEMENTS = 5 * TILE_ELEMENTS, STEPS = 20;
    static float got[ELEMENTS], want[ELEMENTS];
    const OptimConfig c = make_config("nadamw", "fp32", "fp32");
    const Settings settings = {1.0, (double)c.weight_decay};
    const double lr = 1e-2, u = ldexp(1.0, -24);
    for (int i = 0; i < ELEMENTS; i++) {
        float mine[3] = {start(i)}, its[3] = {start(i)}, slow, root;  // p, m, v
        for (int step = 1; step <= STEPS; step++) {
            const Hyper hyper = hyper_create(hyper_source(&c, &settings), lr, step);
            const float g = gradient(step, i);
            EachElement<example::MyRule>::update(hyper, mine, &g, mine + 1, mine + 2, &slow, &root, 1);
            EachElement<NAdamW>::update(hyper, its, &g, its + 1, its + 2, &slow, &root, 1);
        }
        got[i] = mine[0], want[i] = its[0];
    }
    // Each step rounds a weight a few times, and the quotient, which is a few at most, some ten times, on both sides.
    expect_close(test, "weights", got, want, ELEMENTS, 2 * STEPS * lr * 20.0 * u, 2 * STEPS * 3.0 * u);
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
