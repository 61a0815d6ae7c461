// Tests of beta3 and of the ways to keep weights: splits, compensation, feedback and given scales against what
// they promise. laws*.cu have what holds of all of them.
#include "../../optim/kernel.cuh"
#include "../../data/schedule.h"
#include "../../optim/formats/minifloat.cuh"
#include "steps.h"

// An average that remembers a third of the run, 10000 steps at most; came's confidence is ten times as slow as v.
TEST(rules_usual_beta3) {
    const std::tuple<const char*, double, long long, double> rows[] = {{"ademamix", 0.95, 30, 0.9},
                                                                       {"ademamix", 0.95, 300, 0.99},
                                                                       {"ademamix", 0.95, 1000000, 0.9999},
                                                                       {"came", 0.95, 300, 0.995},
                                                                       {"came", 0.999, 10, 0.9999}};
    for (const auto& [rule, beta2, steps, want] : rows) {
        Options o;
        options_defaults(&o);
        o.rule = rule, o.steps = steps, o.tokens_per_step = 1, o.of_rule.beta2 = beta2;
        defaults_choose(&o, 1, false, true, 0, error);
        expect(fabs(o.of_rule.beta3 - want) < 1e-12, "%s, %lld steps: %g", rule, o.steps, o.of_rule.beta3);
    }
    // ademamix's rises to it from any beta1.
    OptimConfig config = make_config("ademamix", "fp32", "fp32");
    const Settings settings = {1.0, 0.0};
    for (float beta1 : {1e-30f, 1e-3f, 0.5f, 0.9f}) {
        config.beta1 = beta1;
        const double start = log((double)beta1), end = log((double)config.beta3),
                     want = exp(12 * start * end / (9 * end + 3 * start));
        expect(fabs(hyper_create(hyper_source(&config, &settings), 1.0, 3).beta3 / want - 1.0) < 1e-7, "beta1 %g",
               (double)beta1);
    }
}

// Bit patterns of floats: an even sweep, and the neighbourhood of every place where rounding turns.
constexpr int64_t PATTERNS = 1 << 20;

static float pattern(int64_t i) {
    if (i % 2) return bits_float((uint32_t)(i * 4097));
    const uint32_t low[] = {0,      1,      0x7f,   0x80,   0x81,   0xff,   0x100,  0x180,
                            0x7f7f, 0x7f80, 0x7fff, 0x8000, 0x8001, 0xff80, 0xfffe, 0xffff};
    return bits_float((uint32_t)(i / 32) * 4 << 16 | (uint32_t)(i / 32 >> 14) << 16 | low[i / 2 % 16]);
}

// Sets each pattern as a weight of a storage and loads it again. Calls body(i, x, back) with its place in the streams.
template <class Storage, class Body>
static void for_patterns(const Streams& streams, Body body) {
    float x[8], back[8];
    for (int64_t at = 0; at < PATTERNS; at += 8) {
        for (int i = 0; i < 8; i++) x[i] = pattern(at + i);
        Storage::set(streams, 0, x, 8);
        Storage::load(streams, 0, back, 8, NoiseKey{});
        for (int i = 0; i < 8; i++) body(i, x[i], back[i]);
    }
}

TEST(rules_split_16_loses_nothing) {
    float seen[8];
    alignas(16) uint16_t high[8];
    alignas(16) int16_t low[8];
    const Streams streams = {high, low};
    for_patterns<Split<int16_t, NEAREST>>(streams, [&](int i, float x, float back) {
        if (i == 0) Split<int16_t, NEAREST>::view(streams, 0, seen, 8);
        uint32_t bits = float_bits(x), want = isnan(x) ? 0x7fc00000u : bits;
        expect(float_bits(back) == want, "%08x comes back as %08x", bits, float_bits(back));
        // The copy is the nearest bf16: Bf16's own rounding, but for ties, which go away from zero.
        uint32_t nearest = isnan(x) ? 0x7fc0 : Bf16::encode(x);
        if (!isnan(x) && (bits & 0xffff) == 0x8000) nearest = (bits >> 16) + 1;
        expect(high[i] == nearest && float_bits(seen[i]) == nearest << 16, "%08x is seen as %04x", bits, high[i]);
    });
}

// |x| = f * 2^e with f in [1, 2); of subnormals the exponent of the smallest normal number.
static int exponent_of(float x) {
    int exponent;
    frexp((double)x, &exponent);
    return x == 0.0f || exponent - 1 < -126 ? -126 : exponent - 1;
}

TEST(rules_split_8_is_within_its_bound) {
    alignas(16) uint16_t high[8];
    alignas(8) int8_t low[8];
    const Streams streams = {high, low};
    double worst = 0.0;
    for_patterns<Split<int8_t, NEAREST>>(streams, [&](int i, float x, float back) {
        if (!isfinite(x) || !isfinite(back)) {
            bool overflow = isfinite(x) && fabsf(x) >= 0x1.ffffp127f && isinf(back);
            expect(isnan(x) ? isnan(back) : x == back || overflow, "%a becomes %a", x, back);
            return;
        }
        double bound = ldexp(1.0, exponent_of(x) - 16), error = fabs((double)back - (double)x);
        if (!(error / bound <= worst)) worst = error / bound;
        // It is the nearest of its neighbours, the even one of two equally near.
        for (int side = -256; side <= 256; side += 512) {
            double other = fabs((double)bits_float(float_bits(back) + (uint32_t)side) - (double)x);
            if (!isfinite(other)) continue;
            expect(error < other || (error == other && !(float_bits(back) & 256)), "%a becomes %a", x, back);
        }
        expect(high[i] == (uint16_t)((float_bits(back) + 0x8000) >> 16), "%a: bf16 %04x", x, high[i]);
    });
    note(test, "%.3f of 1/512 of a step of bf16", worst);
    expect(worst == 1.0, "ties are at the bound: %g", worst);
}

TEST(rules_split_8_stochastic_counts) {
    // Over all 256 noise values x goes up, away from zero, exactly as often as the fraction cut off says.
    typedef Split<int8_t, STOCHASTIC> Storage;
    for (uint32_t bits : {0x3f800001u, 0x3f8000ffu, 0x3f808080u, 0xbf812345u, 0x00000001u, 0x7f7fff80u}) {
        uint32_t up = 0;
        for (uint32_t noise = 0; noise < 256; noise++) {
            uint32_t got = Storage::cut(bits_float(bits), noise);
            expect(got == bits >> 8 || got == (bits >> 8) + 1, "%08x becomes %06x", bits, got);
            up += got != bits >> 8;
        }
        expect(up == (bits & 0xff), "%08x went up %u times", bits, up);
    }
    expect(Storage::cut(INFINITY, 255) == 0x7f8000 && Storage::cut(-INFINITY, 255) == 0xff8000, "infinity");
    expect(Storage::cut(bits_float(0x7f800001), 255) == 0x7fc000, "NaN");
}

TEST(rules_kahan_is_within_its_bound) {
    alignas(16) uint16_t weight[8], compensation[8];
    const Streams streams = {weight, compensation};
    double worst = 0.0;
    for_patterns<Kahan>(streams, [&](int i, float x, float back) {
        expect(weight[i] == Bf16::encode(x), "%a: %04x", x, weight[i]);
        double w = Bf16::decode(weight[i]), k = Bf16::decode(compensation[i]);
        if (!isfinite(w)) {
            expect(k == 0.0 && (isnan(x) ? isnan(back) : (double)back == w), "%a becomes %a", x, back);
            return;
        }
        // Half a step of k, whose own subnormals begin at 2^-126; then load rounds to fp32.
        double rest = fabs((double)x - w), bound = ldexp(1.0, exponent_of((float)rest) - 8);
        double error = fabs(w + k - (double)x);
        if (!(error / bound <= worst)) worst = error / bound;
        // The error is at most 2^-17 of x; of the smallest, where k is subnormal, half of 2^-133.
        double of_x = fmax(ldexp(1.0, exponent_of(x) - 17), ldexp(1.0, -134));
        expect(error <= of_x, "%a: error %a", x, error);
        expect(back == (float)(w + k), "%a comes back as %a", x, back);
    });
    note(test, "%.3f of half a step of the compensation", worst);
    expect(worst <= 1.0 && worst > 0.99, "%g", worst);
}

static void tile_open(OptimRun* run, const OptimConfig& config, OptimType compute, const float* values) {
    const OptimTensor tensor = {"tensor", 1, TILE_ELEMENTS, true, 0};
    run_open(run, &config, &tensor, 1, compute);
    optim_set_weights(run->optim, 0, values);
}

// One step: m is what it is without feedback and, in units of an update of the steps to come, what the weight was
// rounded by. The learning rate, 110 times at step 1, counts as no less than a hundredth of the largest: at 2e-7.
static void check_feedback(Test* test, const char* name, float rate) {
    constexpr int N = TILE_ELEMENTS;
    const float lr_max = 0.01f;
    static float first[N], weights[3][N], m[3][N], v[N];
    char names[3][16] = {"fp32"};
    snprintf(names[1], sizeof(names[1]), "%s:sr", name);
    snprintf(names[2], sizeof(names[2]), "%s:ef", name);
    for (int i = 0; i < N; i++) {
        first[i] = i % 32 == 0 ? 127.0f / 128 : roundf(126 * start(i)) / 128;  // lin8 and bf16 hold it
    }
    for (int r = 0; r < 3; r++) {
        OptimConfig config = make_config("adamw", names[r], "fp32");
        config.lr_max = lr_max;
        OptimRun run;
        tile_open(&run, config, OPTIM_FP32, first);
        run_steps(&run, 1, 1, {rate, 1.0f, false, false});
        optim_get_weights(run.optim, 0, weights[r]);
        memcpy(m[r], optim_stream_named(run.optim, "m").data, sizeof(m[r]));
        memcpy(v, optim_stream_named(run.optim, "v").data, sizeof(v));
    }
    // The update of step 1 is m / (1 - beta1) over the root of v / (1 - beta2).
    const double beta1 = (double)0.9f, one_minus_beta1 = 1.0 - beta1, one_minus_beta2 = 1.0 - (double)0.95f,
                 least = 0.01 * (double)lr_max;
    double counted = fmax(rate / one_minus_beta1 * (1.0 + 1.0 / one_minus_beta1), least), worst = 0.0;
    int fed = 0;
    for (int i = 0; i < N; i++) {
        expect(weights[1][i] == weights[2][i], "%s: weight %d differs from :sr's in the first step", name, i);
        double lost = (double)weights[2][i] - (double)weights[0][i], unit = sqrt((double)v[i] / one_minus_beta2) + 1e-8;
        double want = one_minus_beta1 / beta1 / counted * unit * lost, got = (double)m[2][i] - (double)m[1][i];
        double size = fabs(want) + fabs((double)m[1][i]) + 1e-12;
        worst = fmax(worst, fabs(got - want) / size);
        fed += fabs(want) > 1e-3 * size;
    }
    expect(fed > N / 4, "%s: %d of %d elements were rounded", name, fed, N);
    expect((rate < 1e-6f) == (counted == least), "%s, rate %g: what counts is %g", name, (double)rate, counted);
    // Roundings of the root, the unit, the product, the sum, and of what comes before them.
    const double bound = 8 * ldexp(1.0, -24);
    expect(worst <= bound, "%s, rate %g: m is off by %.1e of itself", name, (double)rate, worst);
    note(test, "%.2f of bound", worst / bound);
}

TEST(rules_feedback_by_its_formula) {
    for (const char* name : {"lin8", "bf16"}) {
        for (float rate : {0.01f, 1e-4f, 2e-7f}) check_feedback(test, name, rate);
    }
}

// A step keeps the scale that is given, stores the master times it, rounded to nearest and cut to the format's largest,
// and finds the exact absmax. The master is the one beside a scale that is measured first.
template <class Format>
static void check_given(Test* test, const char* name, bool gpu) {
    const OptimTensor tensors[] = {{"matrix", 5, 1001, true, 0}, {"vector", 1, 70, false, 0}};
    const OptimConfig own = states_config("adamw", formatted("%s/tensor@given+fp32", name), "bf16", "fp32", "fp32"),
                      measured = states_config("adamw", formatted("%s/tensor+fp32", name), "bf16", "fp32", "fp32");
    OptimRun given, other;
    run_open(&given, &own, tensors, OPTIM_BF16, gpu), run_open(&other, &measured, tensors, OPTIM_BF16, gpu);
    float* numbers = (float*)optim_stream_named(given.optim, "weights.scales").data;
    for (int step = 1; step <= 3; step++) {
        for (int t = 0; t < 2; t++) {
            const float scale = (t ? 0.7f : 1.3f) * (step == 1 ? 3.0f : step == 2 ? 1000.0f : 1e7f);  // which saturates
            copy_to_device(&given.dev, numbers + TENSOR_NUMBERS * t + 2, &scale, sizeof(scale));
        }
        const float* before = (float*)run_array(&given, "weights.scales");
        run_steps(&given, step, step), run_steps(&other, step, step);
        const float *master = (float*)run_array(&given, "master"), *now = (float*)run_array(&given, "weights.scales"),
                    *want = (float*)run_array(&other, "weights.scales");
        const uint8_t* codes = (uint8_t*)run_array(&given, "weights");
        expect(memcmp(master, run_array(&other, "master"), given.elements * sizeof(float)) == 0, "%s: masters", name);
        for (int t = 0; t < 2; t++, before += TENSOR_NUMBERS, now += TENSOR_NUMBERS, want += TENSOR_NUMBERS) {
            expect(now[0] == want[0] && now[1] == 1.0f / before[2] && now[2] == before[2], "%s, step %d: %g, %g, %g",
                   name, step, (double)now[0], (double)now[1], (double)now[2]);
            int other_codes = 0;
            for (int64_t i = 0; i < tensors[t].rows * tensors[t].cols; i++) {
                const int64_t at = given.tensor[t].offset + i;
                other_codes += codes[at] != Format::nearest(nullptr, master[at], now[2], 0);
            }
            expect(other_codes == 0, "%s, step %d: %d codes of %s", name, step, other_codes, tensors[t].name);
        }
    }
}

TEST_BOTH(rules_given_scale) {
    check_given<E4m3>(test, "e4m3", gpu);
    check_given<E5m2>(test, "e5m2", gpu);
}
