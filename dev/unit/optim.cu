// Tests of the optimizer's interface and noise: published vectors, independence of the noise, bf16 against exhaustive
// tables, weights in and out, names, and the launches of a step. What holds of every combination is in
// laws*.cu, the formats' levels in formats.cu.
#include "../../optim/kernel.cuh"
#include "../../optim/optim.h"
#include "../../optim/override.h"
#include "steps.h"

TEST(optim_philox_published_vectors) {
    // Random123's known answers for philox4x32 of 7 and of 10 rounds.
    const struct {
        Noise counter;
        uint32_t key[2];
        Noise want[2];
    } known[] = {
        {{{0, 0, 0, 0}},
         {0, 0},
         {{{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}}},
        {{{~0u, ~0u, ~0u, ~0u}},
         {~0u, ~0u},
         {{{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}}, {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}}},
        {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
         {0xa4093822, 0x299f31d0},
         {{{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}}, {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}}}};
    for (const auto& row : known) {
        for (int k = 0; k < 2; k++) {
            Noise got = philox4x32(row.counter, row.key[0], row.key[1], k ? 10 : 7);
            expect(memcmp(got.word, row.want[k].word, sizeof(got.word)) == 0, "%08x %08x %08x %08x", got.word[0],
                   got.word[1], got.word[2], got.word[3]);
        }
    }
    // The layout of key and counter is part of the format of a checkpoint: a resumed run must draw the same bits.
    Noise noise = noise_draw({0x299f31d0a4093822ull, 0x03707344, 0x13198a2e, (int64_t)0x05a308d3243f6a88 * 16}, 0);
    Noise want = philox4x32({{0x243f6a88, 0x05a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0, 7);
    expect(memcmp(noise.word, want.word, sizeof(noise.word)) == 0, "%08x %08x", noise.word[0], noise.word[3]);
}

TEST(optim_noise_of_an_element) {
    // A byte of its own above the one that 16 share; the same from half of them.
    Noise lanes = {{0x03020100, 0x07060504, 0x0b0a0908, 0x0f0e0d0c}, NOISE_FLOAT << 24 | 0xab80u};
    for (int lane = 0; lane < NOISE_ELEMENTS; lane++) {
        uint32_t want = (uint32_t)lane << 8 | 0xab;
        expect(noise_lane(lanes, lane) == want, "lane %d", lane);
        expect(noise_middle(lanes, lane) == (want << 8 | 0x80), "lane %d", lane);
        expect(bits_float(noise_float(lanes, lane)) == 128.0f + (float)want / 65536.0f, "lane %d", lane);
    }
    NoiseKey key = {1, 2, NOISE_M};
    Noise whole = noise_draw(key, 48), upper = noise_draw(key, 56);
    for (int i = 0; i < 8; i++) expect(noise_lane(whole, 8 + i) == noise_lane(upper, i), "lane %d", i);
    // Uniform, and uncorrelated between any two of the 16: within 4.5 standard errors, 5 for the 120 pairs.
    constexpr int DRAWS = 65536;
    double mean[NOISE_ELEMENTS] = {}, product[NOISE_ELEMENTS][NOISE_ELEMENTS] = {};
    for (int draw = 0; draw < DRAWS; draw++) {
        Noise noise = noise_draw(key, draw * NOISE_ELEMENTS);
        double x[NOISE_ELEMENTS];
        for (int i = 0; i < NOISE_ELEMENTS; i++) {
            x[i] = ((noise_lane(noise, i) + 0.5) / 65536.0 - 0.5) * sqrt(12.0);
            mean[i] += x[i] / sqrt(DRAWS);
            for (int k = 0; k < i; k++) product[i][k] += x[i] * x[k] / sqrt(DRAWS);
        }
    }
    for (int i = 0; i < NOISE_ELEMENTS; i++) {
        expect(fabs(mean[i]) < 4.5, "lane %d is off by %.2f standard errors", i, mean[i]);
        for (int k = 0; k < i; k++)
            expect(fabs(product[i][k]) < 5.0, "lanes %d and %d are correlated by %.2f", i, k, product[i][k]);
    }
}

// Each number of a format of `mantissa` bits, the places between it and the next where rounding turns, and over all
// noise how often those between go up, away from zero; of either sign. The number after the largest is `infinity`, or
// never reached where the format saturates.
template <class Format>
static void check_16_bits(Test* test, int mantissa, int least, uint32_t infinity, bool saturates) {
    for (uint32_t code = 0; code < infinity; code++) {
        const int fraction = (int)code & ((1 << mantissa) - 1), exponent = (int)code >> mantissa;
        const double step = ldexp(1.0, least + (exponent ? exponent - 1 : 0));
        const double below = (fraction + (exponent ? 1 << mantissa : 0)) * step, above = below + step;
        const float here = (float)below, middle = (float)(below + step / 2), last = nextafterf((float)above, 0.0f);
        expect(Format::decode((uint16_t)code) == here && Format::decode((uint16_t)(code | 0x8000)) == -here,
               "%04x is %a", code, Format::decode((uint16_t)code));
        for (float x : {here, nextafterf(here, INFINITY), (float)(below + step / 4), nextafterf(middle, 0.0f), middle,
                        nextafterf(middle, INFINITY), (float)(below + step * 3 / 4), last}) {
            const double down = (double)x - below, up = above - (double)x;
            uint32_t want = down < up ? code : up < down ? code + 1 : code + code % 2;
            if (saturates && want == infinity) want--;
            expect(Format::encode(x) == want && Format::encode(-x) == (want | 0x8000), "%a becomes %04x, not %04x", x,
                   Format::encode(x), want);
        }
        // A value of the format has nothing cut off, so no noise moves it.
        for (uint32_t noise : {0u, 0xffffu}) {
            expect(Format::encode(here, noise) == code && Format::encode(-here, noise) == (code | 0x8000),
                   "noise moves %04x", code);
        }
        if (code % 997 && code != infinity - 1 - saturates) continue;
        const int cut = 23 - mantissa;  // bits that are cut off of a normal number; where there are more the rest is 0
        for (int share : {1, 0x12345 & ((1 << cut) - 1), (1 << cut) - 1}) {
            const float x = (float)(below + step * share / (1 << cut));
            int up[2] = {};
            for (uint32_t noise = 0; noise < 65536; noise++) {
                const uint32_t got[2] = {Format::encode(x, noise), Format::encode(-x, noise) ^ 0x8000u};
                for (int k = 0; k < 2; k++) {
                    up[k] += got[k] == code + 1;
                    if (got[k] != code && got[k] != code + 1) expect(false, "%a becomes %04x", x, got[k]);
                }
            }
            expect(up[0] == share << (16 - cut) && up[1] == up[0], "%a went up %d and %d times", x, up[0], up[1]);
        }
    }
}

TEST(optim_bf16_and_fp16) {
    check_16_bits<Bf16>(test, 7, -133, 0x7f80, false);
    check_16_bits<Fp16>(test, 10, -24, 0x7c00, true);
    for (uint32_t code = 0x7f80; code < 0x8000; code++) {
        const float x = Bf16::decode((uint16_t)code), y = Bf16::decode((uint16_t)(code | 0x8000));
        const uint32_t want = code == 0x7f80 ? code : 0x7fff, less = code == 0x7f80 ? 0xff80 : 0x7fff;
        expect(isnan(x) == (code > 0x7f80) && isinf(x) == (code == 0x7f80), "code %04x", code);
        expect(Bf16::encode(x) == want && Bf16::encode(x, 0xffff) == want && Bf16::encode(x, 0) == want &&
                   Bf16::encode(y) == less && Bf16::encode(y, 0xffff) == less,
               "code %04x becomes %04x", code, Bf16::encode(x));
    }
    expect(Bf16::encode(bits_float(0x7f800001), 0xffff) == 0x7fff, "NaN");
    expect(Fp16::encode(INFINITY) == 0x7c00 && Fp16::encode(-INFINITY) == 0xfc00, "infinity");
    expect(Fp16::encode(-INFINITY, 0xffff) == 0xfbff && Fp16::encode(NAN, 0) == 0x7bff, "with noise they saturate");
    expect(isinf(Fp16::decode(0x7c00)) && isnan(Fp16::decode(0x7e00)) && Fp16::encode(NAN) == 0x7e00, "NaN");
    expect(Fp16::encode(1e6f) == 0x7bff && Fp16::encode(0x1p-120f) == 0 && Fp16::encode(0x1p-120f, 0xffff) == 0,
           "ends");
    expect(Fp16::encode(0x1p-37f, 0xfff8) == 1 && Fp16::encode(0x1p-37f, 0xfff7) == 0, "a 2^-13th of a step");
}

// The correlation of two streams' roundings over n elements: near 0 when independent, near 1 when the noise is shared.
static double correlation(const uint16_t* a, const uint16_t* b, int n) {
    double mean_a = 0.0, mean_b = 0.0, ab = 0.0, aa = 0.0, bb = 0.0;
    for (int i = 0; i < n; i++) mean_a += (double)a[i] / n, mean_b += (double)b[i] / n;
    for (int i = 0; i < n; i++) {
        ab += (a[i] - mean_a) * (b[i] - mean_b);
        aa += (a[i] - mean_a) * (a[i] - mean_a);
        bb += (b[i] - mean_b) * (b[i] - mean_b);
    }
    return ab / sqrt(aa * bb);
}

TEST(optim_noise_of_a_step_is_independent) {
    // With both betas 0, m = g and v = g^2 are stored anew in each step, the same values for all elements: what differs
    // is the noise alone. Standard error of a correlation of independent samples: 1 / sqrt(n).
    constexpr int n = 65536;
    const OptimTensor model[] = {{"a", 1, n, true, 0}, {"b", 1, n, false, 0}};
    OptimConfig config = states_config("adamw", "bf16:sr", "fp32", "bf16:sr", "bf16:sr");
    config.beta1 = config.beta2 = config.weight_decay = 0.0f;
    OptimRun run;
    run_open(&run, &config, model, 2, OPTIM_BF16);
    static float grads[2 * n], same[n];
    static uint16_t kept[2][3][2 * n];  // after each of two steps: weights, m, v, a tensor behind the other
    const float one = 1.0f;
    for (float& g : grads) g = 1.0033f;
    memset(same, 0, sizeof(same));
    for (int t = 0; t < 2; t++) optim_set_weights(run.optim, t, same);
    for (int step = 1; step <= 2; step++) {
        optim_step(run.optim, grads, &one, 1.0033f, step);
        for (int s = 0; s < 3; s++) memcpy(kept[step - 1][s], run.optim->stream[s].data, sizeof(kept[0][s]));
    }
    const uint16_t *p = kept[0][0], *m = kept[0][1], *v = kept[0][2];
    const uint16_t* const pairs[][2] = {{p, m},          {p, v},     {m, v},     {m, kept[1][1]},
                                        {v, kept[1][2]}, {p, p + 1}, {m, m + 8}, {v, v + 1},
                                        {p, p + n},      {m, m + n}, {v, v + n}};
    double worst = 0.0;
    for (const auto& pair : pairs) {
        double errors = fabs(correlation(pair[0], pair[1], n - 8)) * sqrt(n);
        if (!(errors <= worst)) worst = errors;
    }
    note(test, "%.1f standard errors of 4", worst);
    expect(worst < 4.0, "%.1f standard errors", worst);
}

// Over several pieces of a transfer (2^19 elements) and a tail: weights come back as the format has them, and the
// neighbours keep theirs (laws.cu has the copies, and the weights after steps).
TEST(optim_weights_in_and_out) {
    const OptimTensor model[] = {{"a", 1, 5, true, 0}, {"b", 1, 600001, false, 0}, {"c", 1, 7, true, 0}};
    static float got[600001];
    for (const char* weights : {"fp32", "bf16:sr", "bf16+fp32"}) {
        const OptimConfig config = make_config("adamw", weights, "fp32");
        OptimRun run;
        run_open(&run, &config, model, 3, OPTIM_BF16);
        for (int t = 0; t < 3; t++) {
            int64_t wrong = 0;
            optim_get_weights(run.optim, t, got);
            for (int64_t i = 0; i < model[t].cols; i++) {
                const float first = run_start(t, i);
                wrong += got[i] != (is(weights, "fp32") ? first : Bf16::decode(Bf16::encode(first)));
            }
            expect(wrong == 0, "%s, tensor %d: %lld are wrong", weights, t, (long long)wrong);
        }
    }
}

TEST(optim_names) {
    const OptimConfig good = {{}, "adamw32", "", "", "bf16", nullptr, nullptr, 1};
    OptimConfig config = resolved(good);
    expect(is(config.weights, "bf16+fp32") && is(config.m, "fp32"), "%s %s", config.weights, config.m);
    const std::tuple<OptimConfig, const char*> lines[] = {
        {config, "adamw  weights bf16+fp32  grads bf16  m fp32  v fp32  14 B/param"},
        {make_config("sgd", "bf16", "bf16:sr"), "sgd  weights bf16  grads fp32  m bf16:sr  4 B/param"},
        {make_config("ademamix", "bf16", "fp32"),
         "ademamix  weights bf16  grads fp32  m fp32  slow fp32  v fp32  14 B/param"}};
    for (const auto& [its, line] : lines) expect(is(described(its), line), "%s", described(its));
    config = good, config.preset = "adamw16", config.v = "fp32";
    config = resolved(config);
    expect(is(config.weights, "bf16:sr") && is(config.v, "fp32"), "%s", config.v);
    expect(strstr(described(config), " 8 B/param"), "%s", described(config));
}

TEST(optim_overrides_of_presets) {
    const char* const its = "ln*|*.bias|wpe: weights=bf16:ef";
    const char* const rows[][7] = {
        {"", "muon", "", "", "", "", "wte|wpe|ln*|*.bias: rule=adamw m=fp32 v=fp32"},
        {"adamw8", "muon", "", "", "", "", "wte|wpe|ln*|*.bias: rule=adamw m=dyn8/256 v=udyn8/256"},
        {"muon4", "", "", "", "", "", "wte|wpe|ln*|*.bias: rule=adamw m=de4/32@dq8 v=lin4/64"},
        {"muon4", "", "", "soft8", "", "", "wte|wpe|ln*|*.bias: rule=adamw m=fp32 v=fp32"},
        {"muon", "", "", "", "", "wpe: lr=0.5", "wte|wpe|ln*|*.bias: rule=adamw m=fp32 v=fp32; wpe: lr=0.5"},
        {"int8w4", "muon", "", "", "", "",
         "wte|wpe|ln*|*.bias: rule=adamw m=de4/32@dq8 v=sqrt4/32@dq8; ln*|*.bias: weights=bf16:sr"},
        {"muon", "", "", "", "", "none", "none"},
        {"fp8w8e", "", "", "", "", "", its},
        {"fp8w8e", "", "e4m3:ef", "e4m3:sr", "sqrt8", "", its},
        {"fp8w8e", "", "", "dyn8:sr", "", "", "none"},
        {"fp8w8e", "", "", "", "udyn8", "", "none"},
        {"fp8w8e", "", "lin8:ef", "", "", "", "none"},
        {"fp8w8e", "", "", "", "", "none;", "none"},
        {"fp8w8e", "", "", "", "", "wpe:lr=2", "wpe:lr=2"},
    };
    for (const auto& [preset, rule, weights, m, v, overrides, want] : rows) {
        OptimConfig config = {{}, preset, rule, weights, "fp32", m, v, 7};
        config.overrides = overrides;
        expect(optim_resolve(&config, error), "%s", error);
        expect(is(config.overrides, want), "%s: %s", preset, config.overrides);
        expect(optim_resolve(&config, error) && is(config.overrides, want), "again: %s", error);
    }
}

// A number above the range of an option of rules, NaN and an unknown choice are refused.
TEST(optim_options_have_ranges) {
    for (const Option& each : RULE_OPTION) {
        const Option* option = &each;
        expect(is(each.needs, "") || strchr(each.needs, '='), "%s needs %s", each.name, each.needs);
        for (double number : {2 * option->high + 1, option->low - 2, (double)NAN}) {
            OptimConfig config = {};
            void* field = (char*)static_cast<RuleOptions*>(&config) + option->offset;
            if (option->type == OPTION_SWITCH || (option->type != OPTION_REAL && number != number)) continue;
            if (option->type == OPTION_INT) *(long long*)field = (long long)number;
            if (option->type == OPTION_REAL) *(double*)field = number;
            if (option->type == OPTION_CHOICE) *(const char**)field = "o";
            expect_refused(optim_resolve(&config, error), error,
                           option->type == OPTION_CHOICE ? "type one of" : "range");
            expect(strncmp(error + 2, option->name, strlen(option->name)) == 0, "%s", error);
        }
    }
}

// A configuration of this rule, formats of fp32 and a change is refused with a sentence that begins with the option and
// what was found, and says what to type.
// cli_bad_formats of commands.txt has what else is refused.
TEST(optim_stored_and_resolved_again) {
    OptimConfig config = make_config("adamw", "fp32", "fp32");
    config.grads = nullptr;
    expect_refused(optim_resolve(&config, error), error, "--grads: \"\"");
    // A checkpoint may hold what no run begins with, and a configuration may be resolved again.
    OptimConfig stored = make_config("adamw", "lin8:ef", "dyn8:sr");
    stored.m = "de4", stored.stored = true;
    stored = resolved(stored);
    stored.beta1 = 0.0f;
    resolved(resolved(stored));
}

#ifdef __CUDACC__
// Nodes of the graph that a step is when it is captured. The step before it has written the addresses of gradients.
static int launches_of_step(const OptimConfig* config) {
    const OptimTensor model[] = {{"tensor", 1, 4097, true, 0}, {"other", 3, 33, false, 0}, {"tensor", 7, 255, true, 0}};
    OptimRun run;
    run_open(&run, config, model, 3, OPTIM_BF16, true);
    const Device* gpu = &run.dev;
    float *grads = run.room.device<float>(run.elements), *scale = run.room.device<float>(1);
    optim_step(run.optim, grads, scale, 1e-2f, 1);
    device_sync(gpu);
    cudaGraph_t graph;
    size_t nodes = 0;
    check(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeThreadLocal));
    optim_step(run.optim, grads, scale, 1e-2f, 2);
    check(cudaStreamEndCapture(gpu->stream, &graph));
    check(cudaGraphGetNodes(graph, nullptr, &nodes));
    check(cudaGraphDestroy(graph));
    return (int)nodes;
}

// A step of all tensors is one launch, and nothing else that the device does, but for scales of whole tensors, which
// one before it measures and one after it settles; with other formats for some tensors it is two.
TEST(optim_step_is_one_launch_gpu) {
    for (const char* preset : element_presets()) {
        OptimConfig config = preset_config(preset, "bf16", "none");
        expect(launches_of_step(&config) == (strstr(config.weights, "/tensor") ? 3 : 1), "%s: %d", preset,
               launches_of_step(&config));
    }
    OptimConfig config = preset_config("adamw32", "bf16", "tensor: wd=0.3; other: lr=0.5");
    expect(launches_of_step(&config) == 1, "with other settings");
    config.overrides = "other: m=bf16:sr v=bf16:sr", config.weights = "bf16:sr";
    expect(!jit_available() || launches_of_step(&config) == 2, "with other formats");
}
#endif
