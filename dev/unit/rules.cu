// Tests of the rules and of the ways to keep weights: every rule against double precision within a bound that is
// derived beside it, splits and compensation against what they promise, bytes, streams and resumes of every pair, all
// of them through NVRTC, and, where there is a GPU, equal bits.
#include "../../optim/jit.h"
#include "../../optim/kernel.cuh"
#include "presets.h"
#include "rules.h"

#define ROW_NAME(NAME, ...) NAME,
static const char* const rule_names[] = {OPTIM_RULES(ROW_NAME)};
static const char* const weights_names[] = {OPTIM_WEIGHTS(ROW_NAME)};
static constexpr auto& preset_names = all_presets.name;
#undef ROW_NAME

// Two tensors, the first with decay; lengths that leave padding.
constexpr int64_t LENGTH[2] = {2321, 300};

struct Run {
    Device dev;
    OptimTensor tensor[2];
    int64_t elements;
    Optim* optim;
    float *grads, *scale;  // on the device
};

static void run_open(Run* run, const OptimConfig* config, bool gpu, OptimType compute) {
    device_open(&run->dev, gpu, 0);
    for (int t = 0; t < 2; t++) run->tensor[t] = {"tensor", 1, LENGTH[t], t == 0, 0};
    run->elements = optim_layout(run->tensor, 2);
    run->optim = optim_create(&run->dev, config, run->tensor, 2, compute);
    run->grads = (float*)device_alloc(&run->dev, run->elements * 4);
    run->scale = (float*)device_alloc(&run->dev, 4);
    float values[LENGTH[0]], half = 0.5f;
    for (int t = 0; t < 2; t++) {
        for (int64_t i = 0; i < LENGTH[t]; i++) values[i] = start(run->tensor[t].offset + i);
        optim_set_weights(run->optim, t, values);
    }
    optim_decode(run->optim);
    copy_to_device(&run->dev, run->scale, &half, 4);
}

static bool is_padding(const Run* run, int64_t element) {
    int64_t second = run->tensor[1].offset;
    return element < second ? element >= LENGTH[0] : element - second >= LENGTH[1];
}

static void run_steps(Run* run, float lr, int64_t first, int64_t last) {
    float* values = (float*)malloc((size_t)run->elements * sizeof(float));
    for (int64_t step = first; step <= last; step++) {
        for (int64_t i = 0; i < run->elements; i++) values[i] = is_padding(run, i) ? 0.0f : gradient(step, i);
        copy_to_device(&run->dev, run->grads, values, run->elements * 4);
        optim_step(run->optim, run->grads, run->scale, lr, step);
    }
    device_sync(&run->dev);
    free(values);
}

static void run_close(Run* run) {
    optim_free(run->optim);
    device_free(&run->dev, run->grads);
    device_free(&run->dev, run->scale);
    device_close(&run->dev);
}

static OptimStream stream_named(Test* test, const Run* run, const char* name) {
    for (int s = 0; s < optim_stream_count(run->optim); s++) {
        OptimStream stream = optim_stream(run->optim, s);
        if (is(stream.name, name)) return stream;
    }
    expect(false, "there is no stream %s", name);
    return optim_stream(run->optim, 0);
}

// A number and a bound on the error of the fp32 arithmetic that computes it: each operation adds its own rounding, u of
// its result, to what it inherits. Where the program fuses two operations the bound is the larger for it.
struct Bounded {
    double value, error;
};

static const double u = 1.0 / (1 << 24);

static Bounded constant(double value) {
    return {value, u * fabs(value)};
}

static Bounded operator*(Bounded a, Bounded b) {
    double value = a.value * b.value;
    return {value, fabs(a.value) * b.error + fabs(b.value) * a.error + a.error * b.error + u * fabs(value)};
}

static Bounded operator+(Bounded a, Bounded b) {
    return {a.value + b.value, a.error + b.error + u * fabs(a.value + b.value)};
}

static Bounded operator/(Bounded a, Bounded b) {
    double value = a.value / b.value;
    return {value, (a.error + fabs(value) * b.error) / (fabs(b.value) - b.error) + u * fabs(value)};
}

static Bounded root(Bounded a) {
    double value = sqrt(a.value);
    return {value, a.value > 0.0 ? a.error / value + u * value : sqrt(a.error)};
}

struct Element {
    Bounded p, m, v, slow;
    bool lost;  // lion: a sign was too close to call
};

// What a reference formula receives in a step: g is scaled already.
struct Given {
    Bounded g;
    double lr, wd, beta1, beta2, bias1, root2, eps, keep, beta3, alpha;
};

// The rules' formulas, from the papers and from PyTorch, one operation at a time.

static void reference_sgd(Element* e, const Given* c) {
    e->m = constant(c->beta1) * e->m + (c->g + constant(c->wd) * e->p);
    e->p = e->p + constant(-c->lr) * e->m;
}

static void reference_lion(Element* e, const Given* c) {
    Bounded sum = constant(c->beta1) * e->m + constant(1.0 - c->beta1) * c->g;
    e->lost = e->lost || (sum.error > 0.0 && fabs(sum.value) <= sum.error);
    e->p = constant(c->keep) * e->p + constant(-c->lr * (sum.value > 0.0 ? 1.0 : sum.value < 0.0 ? -1.0 : 0.0));
    e->m = constant(c->beta2) * e->m + constant(1.0 - c->beta2) * c->g;
}

// Adam's averages of `g` and its update of the kept weight, with `slow` times alpha added to the numerator.
static void reference_adams(Element* e, const Given* c, Bounded g, Bounded kept, bool slow) {
    e->m = constant(c->beta1) * e->m + constant(1.0 - c->beta1) * g;
    e->v = constant(c->beta2) * e->v + constant(1.0 - c->beta2) * g * g;
    Bounded numerator = e->m;
    if (slow) {
        e->slow = constant(c->beta3) * e->slow + constant(1.0 - c->beta3) * g;
        numerator = e->m + constant(c->alpha * c->bias1) * e->slow;
    }
    Bounded denominator = root(e->v) * constant(c->root2) + constant(c->eps);
    e->p = kept + constant(-c->lr / c->bias1) * (numerator / denominator);
}

static void reference_adamw(Element* e, const Given* c) {
    reference_adams(e, c, c->g, constant(c->keep) * e->p, false);
}

static void reference_adam(Element* e, const Given* c) {
    reference_adams(e, c, c->g + constant(c->wd) * e->p, e->p, false);
}

static void reference_ademamix(Element* e, const Given* c) {
    reference_adams(e, c, c->g, constant(c->keep) * e->p, true);
}

static const struct {
    const char* rule;
    void (*step)(Element* e, const Given* c);
} reference_rules[] = {
    {"adamw", reference_adamw},       {"adam", reference_adam}, {"lion", reference_lion}, {"sgd", reference_sgd},
    {"ademamix", reference_ademamix}, {"adam-mini", nullptr},  // rows.cu, since these read more
    {"adafactor", nullptr},           {"came", nullptr},        {"rmnp", nullptr},        {"normuon-lite", nullptr}};
static_assert(sizeof(reference_rules) / sizeof(reference_rules[0]) == sizeof(rule_names) / sizeof(rule_names[0]),
              "a rule needs its formula here");

static void reference_step(Element* e, const OptimConfig* config, double gradient, double lr, bool decay, double step) {
    double wd = decay ? (double)config->weight_decay : 0.0, beta1 = config->beta1;
    bool independent = is(config->decay_mode, "independent");
    double done = step / (double)config->ramp, start = log(beta1), end = log((double)config->beta3);
    double beta3 = exp(start * end / ((1.0 - done) * end + done * start)), alpha = (double)config->alpha * done;
    if (done >= 1.0) beta3 = config->beta3, alpha = config->alpha;
    const Given given = {.g = {gradient, 0.0},
                         .lr = lr,
                         .wd = wd,
                         .beta1 = beta1,
                         .beta2 = config->beta2,
                         .bias1 = 1.0 - pow(beta1, step),
                         .root2 = 1.0 / sqrt(1.0 - pow((double)config->beta2, step)),
                         .eps = config->eps,
                         .keep = 1.0 - wd * (independent ? lr / (double)config->lr_max : lr),
                         .beta3 = beta3,
                         .alpha = alpha};
    for (const auto& rule : reference_rules) {
        if (is(rule.rule, config->rule)) return rule.step(e, &given);
    }
    printf("    %s has no formula in reference_rules\n", config->rule), exit(1);
}

static void check_rule(Test* test, const char* rule, const char* decay_mode) {
    if (find_row(rule_table(), rule)->by_rows) return;
    OptimConfig config = make_config(rule, "fp32", "fp32");
    config.decay_mode = decay_mode;
    config.lr_max = 0.25f;
    Run run;
    run_open(&run, &config, false, OPTIM_FP32);
    const float lr = 0.01f;
    run_steps(&run, lr, 1, 20);
    bool slow = find_row(rule_table(), rule)->keeps_slow;
    const float* p = (const float*)stream_named(test, &run, "weights").data;
    const float* m = (const float*)stream_named(test, &run, "m").data;
    const float* v = keeps_v(rule) ? (const float*)stream_named(test, &run, "v").data : nullptr;
    const float* s = slow ? (const float*)stream_named(test, &run, "slow").data : nullptr;
    double worst = 0.0;
    int lost = 0;
    for (int64_t i = 0; i < run.elements; i++) {
        if (is_padding(&run, i)) continue;
        Element e = {{(double)start(i), 0.0}, {0, 0}, {0, 0}, {0, 0}, false};
        for (int step = 1; step <= 20; step++) {
            reference_step(&e, &config, 0.5 * (double)gradient(step, i), (double)lr, i < LENGTH[0], step);
        }
        lost += e.lost;
        if (e.lost) continue;
        const double got[] = {p[i], m[i], v ? v[i] : 0.0, s ? s[i] : 0.0};
        const Bounded want[] = {e.p, e.m, e.v, e.slow};
        for (int k = 0; k < 4; k++) {
            double error = fabs(got[k] - want[k].value), multiple = error == 0.0 ? 0.0 : error / want[k].error;
            if (!(multiple <= worst)) worst = multiple;
        }
    }
    expect(worst <= 1.0, "%s, decay %s: %g of the bound", rule, decay_mode, worst);
    expect(worst > 0.01, "%s: the bound is too loose to tell anything, %g", rule, worst);
    expect(lost < 20, "%s: %d signs could not be called", rule, lost);
    size_t used = strlen(test->note);
    snprintf(test->note + used, sizeof(test->note) - used, "%s%s %.2f", used ? ", " : "of bound: ", rule, worst);
    run_close(&run);
}

TEST(rules_against_double) {
    for (const char* rule : rule_names) check_rule(test, rule, "coupled");
}

TEST(rules_with_independent_decay_against_double) {
    for (const char* rule : rule_names) {
        if (find_row(rule_table(), rule)->decoupled) check_rule(test, rule, "independent");
    }
}

TEST(rules_allocate_what_they_keep) {
    for (const char* rule : rule_names) {
        const RuleRow* row = find_row(rule_table(), rule);
        if (row->by_rows) continue;
        const int states = 1 + row->keeps_v + row->keeps_slow;
        OptimConfig config = make_config(rule, "bf16", "bf16:sr");
        char line[256], want[256];
        snprintf(want, sizeof(want), "%s  weights bf16  grads fp32  m bf16:sr%s%s  %d B/param", rule,
                 row->keeps_slow ? "  slow bf16:sr" : "", row->keeps_v ? "  v bf16:sr" : "", 2 + 2 * states);
        optim_describe(&config, line, sizeof(line));
        expect(is(line, want), "%s", line);
        Run run;
        run_open(&run, &config, false, OPTIM_BF16);
        OptimBytes plan = optim_bytes(&config, run.tensor, 2, OPTIM_BF16), allocated = optim_allocated(run.optim);
        expect(memcmp(&plan, &allocated, sizeof(plan)) == 0, "%s", rule);
        expect(plan.states == states * 2 * run.elements, "%s: %lld", rule, (long long)plan.states);
        expect(optim_stream_count(run.optim) == 1 + states, "%s", rule);
        run_close(&run);
    }
}

TEST(rules_usual_learning_rates) {
    for (int64_t channels : {64, 256, 257, 768, 1600}) {
        double adamw = optim_usual_lr("adamw", channels);
        expect(adamw == optim_usual_lr("", channels) && adamw == optim_usual_lr("ademamix", channels), "%g", adamw);
        expect(optim_usual_lr("lion", channels) == adamw / 5, "%g", optim_usual_lr("lion", channels));
    }
    expect(optim_usual_lr("adamw", 768) == 6e-4 && optim_usual_lr("adamw", 256) == 3e-3, "not as README says");
}

TEST(rules_refuse_what_does_not_fit) {
    OptimConfig good = make_config("adamw", "bf16", "fp32"), config = good;
    config = good, config.rule = "lion";
    expect_refusal(test, config, "--v: \"fp32\"", "lion keeps no second moment");
    config.v = "none";
    char error[1024];
    expect(optim_resolve(&config, error, sizeof(error)), "%s", error);
    expect(optim_resolve(&config, error, sizeof(error)), "a second time: %s", error);
    config = good, config.v = "none";
    expect_refusal(test, config, "--v: \"none\"", "adamw keeps a second moment");
    config = good, config.decay_mode = "both";
    expect_refusal(test, config, "--decay-mode: \"both\"", "coupled or independent");
    config = good, config.rule = "adam", config.decay_mode = "independent";
    expect_refusal(test, config, "--decay-mode: \"independent\"", "adam adds");
    config = good, config.beta3 = 1.0f;
    expect_refusal(test, config, "--beta3: 1", "below 1");
    config = good, config.alpha = -1.0f;
    expect_refusal(test, config, "--alpha: -1", "from 0");
    good = make_config("adamw", "lin8:ef", "dyn8:sr");
    config = good, config.rule = "lion", config.v = "none";
    expect_refusal(test, config, "--weights: weights \"lin8:ef\"", "type --rule adamw, or --weights lin8:sr");
    config = good, config.beta1 = 0.0f;
    expect_refusal(test, config, "--weights: weights \"lin8:ef\"", "type --beta1 0.9, or --weights lin8:sr");
    for (const char* m : {"dyn8/rank1", "e4m3/tensor"}) {
        config = good, config.m = m;
        expect_refusal(test, config, "--weights: weights \"lin8:ef\"", "of more than a block; type --m e4m3:sr, or");
    }
    for (const char* m : {"de4", "nf4:sr", "de4/32@dq8"}) {
        config = good, config.m = m;
        expect_refusal(test, config, "--weights: weights \"lin8:ef\"", "type --m e4m3:sr, or --weights lin8:sr");
    }
    // A checkpoint may hold what no run begins with.
    config = good, config.m = "de4", config.stored = true;
    expect(optim_resolve(&config, error, sizeof(error)), "%s", error);
    config.beta1 = 0.0f;
    expect(optim_resolve(&config, error, sizeof(error)), "%s", error);
}

// Bit patterns of floats: an even sweep, and the neighbourhood of every place where rounding turns.
constexpr int64_t PATTERNS = 1 << 20;

static float pattern(int64_t i) {
    if (i % 2) return bits_float((uint32_t)(i * 4097));
    const uint32_t low[] = {0,      1,      0x7f,   0x80,   0x81,   0xff,   0x100,  0x180,
                            0x7f7f, 0x7f80, 0x7fff, 0x8000, 0x8001, 0xff80, 0xfffe, 0xffff};
    return bits_float((uint32_t)(i / 32) * 4 << 16 | (uint32_t)(i / 32 >> 14) << 16 | low[i / 2 % 16]);
}

TEST(rules_split_16_loses_nothing) {
    float x[8], back[8], seen[8];
    alignas(16) uint16_t high[8];
    alignas(16) int16_t low[8];
    Streams streams = {high, low};
    for (int64_t at = 0; at < PATTERNS; at += 8) {
        for (int i = 0; i < 8; i++) x[i] = pattern(at + i);
        Split<int16_t, NEAREST>::set(streams, 0, x, 8);
        Split<int16_t, NEAREST>::load(streams, 0, back, 8, NoiseKey{});
        Split<int16_t, NEAREST>::view(streams, 0, seen, 8);
        for (int i = 0; i < 8; i++) {
            uint32_t bits = float_bits(x[i]), want = isnan(x[i]) ? 0x7fc00000u : bits;
            expect(float_bits(back[i]) == want, "%08x comes back as %08x", bits, float_bits(back[i]));
            // The copy is the nearest bf16: Bf16's own rounding, but for ties, which go away from zero.
            uint32_t nearest = isnan(x[i]) ? 0x7fc0 : Bf16::encode(x[i]);
            if (!isnan(x[i]) && (bits & 0xffff) == 0x8000) nearest = (bits >> 16) + 1;
            expect(high[i] == nearest && float_bits(seen[i]) == nearest << 16, "%08x is seen as %04x", bits, high[i]);
        }
    }
}

// |x| = f * 2^e with f in [1, 2); of subnormals the exponent of the smallest normal number.
static int exponent_of(float x) {
    int exponent;
    frexp((double)x, &exponent);
    return x == 0.0f || exponent - 1 < -126 ? -126 : exponent - 1;
}

TEST(rules_split_8_is_within_its_bound) {
    float x[8], back[8];
    alignas(16) uint16_t high[8];
    alignas(8) int8_t low[8];
    Streams streams = {high, low};
    double worst = 0.0;
    for (int64_t at = 0; at < PATTERNS; at += 8) {
        for (int i = 0; i < 8; i++) x[i] = pattern(at + i);
        Split<int8_t, NEAREST>::set(streams, 0, x, 8);
        Split<int8_t, NEAREST>::load(streams, 0, back, 8, NoiseKey{});
        for (int i = 0; i < 8; i++) {
            if (!isfinite(x[i]) || !isfinite(back[i])) {
                bool overflow = isfinite(x[i]) && fabsf(x[i]) >= 0x1.ffffp127f && isinf(back[i]);
                expect(isnan(x[i]) ? isnan(back[i]) : x[i] == back[i] || overflow, "%a becomes %a", x[i], back[i]);
                continue;
            }
            double bound = ldexp(1.0, exponent_of(x[i]) - 16), error = fabs((double)back[i] - (double)x[i]);
            if (!(error / bound <= worst)) worst = error / bound;
            // It is the nearest of its neighbours, the even one of two equally near.
            for (int side = -256; side <= 256; side += 512) {
                double other = fabs((double)bits_float(float_bits(back[i]) + (uint32_t)side) - (double)x[i]);
                if (!isfinite(other)) continue;
                expect(error < other || (error == other && !(float_bits(back[i]) & 256)), "%a becomes %a", x[i],
                       back[i]);
            }
            expect(high[i] == (uint16_t)((float_bits(back[i]) + 0x8000) >> 16), "%a: bf16 %04x", x[i], high[i]);
        }
    }
    snprintf(test->note, sizeof(test->note), "%.3f of 1/512 of a step of bf16", worst);
    expect(worst == 1.0, "ties are at the bound: %g", worst);
}

TEST(rules_split_8_stochastic_counts) {
    // Over all 256 noise values x goes up, away from zero, exactly as often as the fraction cut off says.
    typedef Split<int8_t, STOCHASTIC> Storage;
    const uint32_t patterns[] = {0x3f800001, 0x3f8000ff, 0x3f808080, 0xbf812345, 0x00000001, 0x7f7fff80};
    for (uint32_t bits : patterns) {
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
    float x[8], back[8];
    alignas(16) uint16_t weight[8], compensation[8];
    Streams streams = {weight, compensation};
    double worst = 0.0;
    for (int64_t at = 0; at < PATTERNS; at += 8) {
        for (int i = 0; i < 8; i++) x[i] = pattern(at + i);
        Kahan<Bf16>::set(streams, 0, x, 8);
        Kahan<Bf16>::load(streams, 0, back, 8, NoiseKey{});
        for (int i = 0; i < 8; i++) {
            expect(weight[i] == Bf16::encode(x[i]), "%a: %04x", x[i], weight[i]);
            double w = Bf16::decode(weight[i]), k = Bf16::decode(compensation[i]);
            if (!isfinite(w)) {
                expect(k == 0.0 && (isnan(x[i]) ? isnan(back[i]) : (double)back[i] == w), "%a becomes %a", x[i],
                       back[i]);
                continue;
            }
            // Half a step of k, whose own subnormals begin at 2^-126; then load rounds to fp32.
            double rest = fabs((double)x[i] - w), bound = ldexp(1.0, exponent_of((float)rest) - 8);
            double error = fabs(w + k - (double)x[i]);
            if (!(error / bound <= worst)) worst = error / bound;
            // Of x a 2^-17th, but for the smallest, where k is subnormal: half of 2^-133.
            double of_x = fmax(ldexp(1.0, exponent_of(x[i]) - 17), ldexp(1.0, -134));
            expect(error <= of_x, "%a: error %a", x[i], error);
            expect(back[i] == (float)(w + k), "%a comes back as %a", x[i], back[i]);
        }
    }
    snprintf(test->note, sizeof(test->note), "%.3f of half a step of the compensation", worst);
    expect(worst <= 1.0 && worst > 0.99, "%g", worst);
}

TEST(rules_fp16_codes_survive_and_nearest_is_the_nearest) {
    // Each value of the format, and the places between it and the next where rounding turns.
    for (uint32_t code = 0; code < 0x7c00; code++) {
        float here = Fp16::decode((uint16_t)code),
              next = code == 0x7bff ? 65536.0f : Fp16::decode((uint16_t)(code + 1));
        int exponent = code < 1024 ? -24 : (int)(code >> 10) - 25, mantissa = code < 1024 ? 0 : 1024;
        expect(here == ldexpf((float)(mantissa + (int)(code & 1023)), exponent), "%04x is %a", code, here);
        const float share[] = {0.0f, 0.25f, 0.4999f, 0.5f, 0.5001f, 0.75f};
        for (float at : share) {
            float x = here + at * (next - here), step = next - here;
            uint32_t want = x - here < step / 2 ? code : x - here > step / 2 ? code + 1 : code + code % 2;
            if (want > 0x7bff) want = 0x7bff;
            expect(Fp16::encode(x) == want && Fp16::encode(-x) == (want | 0x8000), "%a becomes %04x, not %04x", x,
                   Fp16::encode(x), want);
        }
        expect(Fp16::encode(here, 0) == code && Fp16::encode(here, 0xffff) == code, "noise moves %04x", code);
        // Over all noise x goes up as often as the fraction cut off says: of 13 bits, where no more are.
        if (code % 97) continue;
        float x = here + 0.375f * (next - here);
        uint32_t up = 0;
        for (uint32_t noise = 0; noise < 65536; noise++) up += Fp16::encode(x, noise) != code;
        expect(code == 0x7bff || up == 65536 * 3 / 8, "%a went up %u times", x, up);
    }
    expect(Fp16::encode(INFINITY) == 0x7c00 && Fp16::encode(-INFINITY) == 0xfc00, "infinity");
    expect(Fp16::encode(-INFINITY, 0xffff) == 0xfbff && Fp16::encode(NAN, 0) == 0x7bff, "with noise they saturate");
    expect(isinf(Fp16::decode(0x7c00)) && isnan(Fp16::decode(0x7e00)) && Fp16::encode(NAN) == 0x7e00, "NaN");
    expect(Fp16::encode(1e6f) == 0x7bff && Fp16::encode(0x1p-120f) == 0 && Fp16::encode(0x1p-120f, 0xffff) == 0,
           "ends");
    expect(Fp16::encode(0x1p-37f, 0xfff8) == 1 && Fp16::encode(0x1p-37f, 0xfff7) == 0, "a 2^-13th of a step");
}

// Blocks of weights over 30 powers of two, some of them zero; every block has another size.
constexpr int BLOCK_TEST = 16 * 128;

static void block_values(float* x) {
    for (int i = 0; i < BLOCK_TEST; i++) {
        float size = ldexpf(1.0f, 2 * (i / 128) - 20);
        x[i] = i % 7 == 5 ? 0.0f : size * ldexpf(test_uniform(3, i), (int)(9 * test_uniform(4, i)) - 9);
    }
    memset(x + 128, 0, 128 * sizeof(float));
}

// What was stored is stored again as it was, noise or not, since scales are powers of two.
template <class Storage>
static void check_rest(Test* test, const char* name) {
    static float x[BLOCK_TEST], once[BLOCK_TEST], twice[BLOCK_TEST];
    static uint8_t codes[BLOCK_TEST], scales[BLOCK_TEST / 32];
    static int8_t low[BLOCK_TEST];
    Streams streams = {codes, scales, nullptr, low};
    block_values(x);
    Storage::store(streams, 0, x, BLOCK_TEST, NoiseKey{1, 1, NOISE_WEIGHTS});
    Storage::load(streams, 0, once, BLOCK_TEST, NoiseKey{});
    Storage::store(streams, 0, once, BLOCK_TEST, NoiseKey{1, 2, NOISE_WEIGHTS});
    Storage::load(streams, 0, twice, BLOCK_TEST, NoiseKey{});
    expect(memcmp(once, twice, sizeof(once)) == 0, "%s changes", name);
    expect(memcmp(once, x, sizeof(once)) != 0, "%s rounds nothing", name);
}

TEST(rules_8_bit_weights_that_rest_do_not_change) {
    check_rest<Blocks<E4m3, 128, ScaleE8m0, STOCHASTIC>>(test, "e4m3:sr");
    check_rest<Blocks<Lin8OfPowers, 32, ScaleE8m0, STOCHASTIC>>(test, "lin8:sr");
    check_rest<BlockSplit<E4m3, 3, -6, 128, STOCHASTIC>>(test, "e4m3+8:sr");
}

template <class Format, int MANTISSA, int LEAST>
static void check_block_split(Test* test, double largest) {
    static float x[BLOCK_TEST], back[BLOCK_TEST], seen[BLOCK_TEST];
    static uint8_t codes[BLOCK_TEST], scales[16];
    static int8_t low[BLOCK_TEST];
    typedef BlockSplit<Format, MANTISSA, LEAST, 128, NEAREST> Storage;
    Streams streams = {codes, scales, nullptr, low};
    double worst = 0.0;
    block_values(x);
    Storage::set(streams, 0, x, BLOCK_TEST);
    Storage::load(streams, 0, back, BLOCK_TEST, NoiseKey{});
    Storage::view(streams, 0, seen, BLOCK_TEST);
    for (int i = 0; i < BLOCK_TEST; i++) {
        double top = 0.0, scale = ScaleE8m0::decode(scales[i / 128]);
        for (int k = 0; k < 128; k++) top = fmax(top, fabs((double)x[i / 128 * 128 + k]));
        expect(top == 0.0 ? scale == 0.0 : top <= largest * scale && top > largest / 2 * scale, "block %d: scale %g",
               i / 128, scale);
        if (top == 0.0) {
            expect(back[i] == 0.0f && seen[i] == 0.0f, "a block of zeros has %g", back[i]);
            continue;
        }
        // Half a step of the mantissa with 8 bits more, and of the format's own for what the model sees.
        int exponent = exponent_of((float)(x[i] / scale)) < LEAST ? LEAST : exponent_of((float)(x[i] / scale));
        double error = fabs((double)back[i] - (double)x[i]) / (scale * ldexp(1.0, exponent - MANTISSA - 9));
        double error_seen = fabs((double)seen[i] - (double)back[i]) / (scale * ldexp(1.0, exponent - MANTISSA - 1));
        expect(error_seen <= 1.0, "%a is seen as %a", back[i], seen[i]);
        if (!(error <= worst)) worst = error;
    }
    size_t used = strlen(test->note);
    snprintf(test->note + used, sizeof(test->note) - used, "%s%.3f of half a step", used ? ", " : "", worst);
    expect(worst <= 1.0 && worst > 0.9, "%g", worst);
}

TEST(rules_fp8_split_is_within_its_bound) {
    check_block_split<E4m3, 3, -6>(test, 448.0);
    check_block_split<E5m2, 2, -14>(test, 57344.0);
}

TEST(rules_fp8_split_stochastic_counts) {
    // Over all noise y goes up exactly as often as the fraction cut off says: 12 bits of a normal number, more below.
    typedef BlockSplit<E4m3, 3, -6, 128, STOCHASTIC> Storage;
    const float values[] = {1.0f, 1.7003f, 447.9f, 0x1p-6f, 0x1.2345p-9f, 0x1p-18f, 0x1.8p-20f};
    for (float y : values) {
        int exponent = exponent_of(y) < -6 ? -6 : exponent_of(y);
        double steps = (double)y * ldexp(1.0, 11 - exponent), fraction = steps - floor(steps);
        uint32_t least = Storage::wide(y, 0), up = 0;
        for (uint32_t noise = 0; noise < 65536; noise++) up += Storage::wide(y, noise) != least;
        expect(fabs(up - 65536 * fraction) < 1.0, "%a went up %u times, not %g", y, up, 65536 * fraction);
    }
}

// An optimizer of one tensor of `n` elements on the CPU, with these weights.
static Optim* optim_of_one(Device* dev, const OptimConfig* config, OptimType compute, int n, const float* values) {
    OptimTensor tensor = {"tensor", 1, n, true, 0};
    device_open(dev, false, 0);
    optim_layout(&tensor, 1);
    Optim* optim = optim_create(dev, config, &tensor, 1, compute);
    optim_set_weights(optim, 0, values);
    return optim;
}

// Weights from 0.6 to 0.99 under an update of `lr` down for 200 steps: how far each mean and the worst element is from
// where fp32 goes, in what is stored beside the weights too.
struct Drift {
    double moved, mean, worst;
};

static Drift drift(const char* weights, float lr, void (*load)(const Streams&, int, float*, int, const NoiseKey&)) {
    constexpr int N = 2048, STEPS = 200;
    OptimConfig config = make_config("sgd", weights, "fp32");
    config.beta1 = config.weight_decay = 0.0f;
    static float first[N], grads[N], last[N];
    for (int i = 0; i < N; i++) {
        float value = 0.8f + 0.18f * start(i);  // on the format's grid, so that to set it rounds nothing
        first[i] = *weights == 'e'   ? roundf(value * 16) / 16
                   : *weights == 'l' ? roundf(value * 0.9f * 128) / 128  // far from 127 steps of 1/128
                                     : Bf16::decode(Bf16::encode(value));
        grads[i] = 1.0f;
    }
    float one = 1.0f;
    Device dev;
    Optim* optim = optim_of_one(&dev, &config, OPTIM_BF16, N, first);
    for (int step = 1; step <= STEPS; step++) optim_step(optim, grads, &one, lr, step);
    bool second = optim_stream_count(optim) == 3;
    load({optim_stream(optim, 0).data, second ? optim_stream(optim, 1).data : nullptr}, 0, last, N, NoiseKey{});
    Drift result = {0.0, 0.0, 0.0};
    for (int i = 0; i < N; i++) {
        double error = (double)last[i] - ((double)first[i] - STEPS * (double)lr);
        result.moved += ((double)first[i] - (double)last[i]) / N;
        result.mean += error / N;
        if (!(fabs(error) <= result.worst)) result.worst = fabs(error);
    }
    optim_free(optim);
    device_close(&dev);
    return result;
}

TEST(rules_small_updates_survive) {
    // In [0.5, 1) half a step is 2^-9 of bf16, 2^-17 of the split and at most 2^-18 of the compensated sum. Each of 200
    // steps rounds by at most that, and the update itself by 2^-24.
    const float lr = 1e-4f;
    const double fp32 = 200 * ldexp(1.0, -24), moved = 200 * (double)lr;
    Drift nearest = drift("bf16", lr, Elementwise<Bf16, NEAREST>::load);
    Drift kahan = drift("bf16:kahan", lr, Kahan<Bf16>::load);
    Drift split8 = drift("bf16+8", lr, Split<int8_t, NEAREST>::load);
    Drift split16 = drift("bf16+16", lr, Split<int16_t, NEAREST>::load);
    Drift master = drift("bf16+fp32", lr, WithMaster<Elementwise<Bf16, NEAREST>>::load);
    expect(nearest.moved == 0.0, "bf16 to nearest moved by %g", nearest.moved);
    expect(kahan.worst <= 200 * ldexp(1.0, -18) + fp32, "kahan is off by %g", kahan.worst);
    expect(split8.worst <= 200 * ldexp(1.0, -17) + fp32, "bf16+8 is off by %g", split8.worst);
    expect(split16.worst <= fp32 && master.worst <= fp32, "%g %g", split16.worst, master.worst);
    expect(split16.worst == master.worst && split16.mean == master.mean, "bf16+16 is not the master");
    for (double way : {kahan.moved, split8.moved, split16.moved}) {
        expect(way > 0.9 * moved && way < 1.1 * moved, "moved by %g of %g", way, moved);
    }
    // 1e-6 is below half a step of the split too: nearest stands still, noise keeps the mean. The variance of a step is
    // f (1 - f) steps squared, f = 1e-6 / 2^-16.
    const float small = 1e-6f;
    double step = ldexp(1.0, -16), f = (double)small / step, standard = step * sqrt(200 * f * (1.0 - f) / 2048);
    expect(drift("bf16+8", small, Split<int8_t, NEAREST>::load).moved == 0.0, "bf16+8 moved");
    Drift noisy = drift("bf16+8:sr", small, Split<int8_t, STOCHASTIC>::load);
    // In place in fp8: a step is a power of two from 2^-4 down, and the update a small share of it.
    Drift fp8 = drift("e4m3:sr", lr, Blocks<E4m3, 128, ScaleE8m0, STOCHASTIC>::load);
    expect(drift("e4m3", lr, Blocks<E4m3, 128, ScaleE8m0, NEAREST>::load).moved == 0.0, "e4m3 moved");
    double largest = ldexp(1.0, -4), share = (double)lr / largest;
    double error8 = largest * sqrt(200 * share * (1.0 - share) / 2048);
    expect(fabs(fp8.mean) <= 4.0 * error8, "e4m3:sr is off by %g, %g standard errors", fp8.mean,
           fabs(fp8.mean) / error8);
    expect(fp8.moved > 0.5 * moved, "e4m3:sr stands still: %g", fp8.moved);
    Drift linear = drift("lin8:sr", lr, Blocks<Lin8OfPowers, 32, ScaleE8m0, STOCHASTIC>::load);
    double step_linear = ldexp(1.0, -7), share_linear = (double)lr / step_linear;
    double error_linear = step_linear * sqrt(200 * share_linear * (1.0 - share_linear) / 2048);
    expect(fabs(linear.mean) <= 4.0 * error_linear, "lin8:sr is off by %g, %g standard errors", linear.mean,
           fabs(linear.mean) / error_linear);
    expect(linear.moved > 0.5 * moved, "lin8:sr stands still: %g", linear.moved);
    snprintf(test->note, sizeof(test->note), "kahan %.1e, bf16+8 %.1e of %.1e; bf16+8:sr %.1f of 4 standard errors",
             kahan.worst, split8.worst, moved, fabs(noisy.mean) / standard);
    expect(fabs(noisy.mean) <= 4.0 * standard + fp32, "bf16+8:sr is off by %g", noisy.mean);
    expect(noisy.moved > 100 * (double)small, "bf16+8:sr stands still: %g", noisy.moved);
}

// The root mean square of how far weights are from those of an fp32 run after `steps` steps of AdamW whose gradient is
// each element's own, always the same, and in *mean the mean.
static double distance(const char* weights, const char* m, int steps, double* mean) {
    constexpr int N = 2048;
    static float value[2][N], grads[N];
    for (int i = 0; i < N; i++) grads[i] = start(7 * i + 1), value[0][i] = value[1][i] = start(i);
    for (int r = 0; r < 2; r++) {
        OptimConfig config = make_config("adamw", r ? weights : "fp32", "fp32");
        config.m = r ? m : "fp32";
        config.weight_decay = 0.0f;
        float one = 1.0f;
        Device dev;
        Optim* optim = optim_of_one(&dev, &config, OPTIM_FP32, N, value[r]);
        // A warm-up, then constant.
        for (int step = 1; step <= steps; step++) {
            optim_step(optim, grads, &one, 1e-4f * (float)(step < 50 ? step : 50) / 50.0f, step);
        }
        memcpy(value[r], optim_weights(optim), sizeof(value[r]));
        optim_free(optim);
        device_close(&dev);
    }
    double square = 0.0, sum = 0.0;
    for (int i = 0; i < N; i++) {
        double error = (double)value[1][i] - (double)value[0][i];
        square += error * error / N, sum += error / N;
    }
    *mean = sum;
    return sqrt(square);
}

// One step: m is what it is without feedback and, in units of an update of the steps to come, what the weight was
// rounded by. The learning rate, 110 times at step 1, counts as no less than a hundredth of the largest: at 2e-7.
static void check_feedback(Test* test, const char* name, float rate) {
    constexpr int N = 2048;
    const float lr_max = 0.01f;
    static float first[N], grads[N], weights[3][N], m[3][N], v[N];
    char names[3][16] = {"fp32"};
    snprintf(names[1], sizeof(names[1]), "%s:sr", name);
    snprintf(names[2], sizeof(names[2]), "%s:ef", name);
    for (int i = 0; i < N; i++) {
        grads[i] = gradient(1, i);
        first[i] = i % 32 == 0 ? 127.0f / 128 : roundf(126 * start(i)) / 128;  // lin8 and bf16 hold it
    }
    for (int r = 0; r < 3; r++) {
        OptimConfig config = make_config("adamw", names[r], "fp32");
        config.lr_max = lr_max;
        float one = 1.0f;
        Device dev;
        Optim* optim = optim_of_one(&dev, &config, OPTIM_FP32, N, first);
        optim_step(optim, grads, &one, rate, 1);
        optim_get_weights(optim, 0, weights[r]);
        for (int s = 0; s < optim_stream_count(optim); s++) {
            OptimStream stream = optim_stream(optim, s);
            if (is(stream.name, "m")) memcpy(m[r], stream.data, sizeof(m[r]));
            if (is(stream.name, "v")) memcpy(v, stream.data, sizeof(v));
        }
        optim_free(optim);
        device_close(&dev);
    }
    // The update of step 1 is m / (1 - beta1) over the root of v / (1 - beta2).
    const double beta1 = (double)0.9f, rest1 = 1.0 - beta1, rest2 = 1.0 - (double)0.95f, least = 0.01 * (double)lr_max;
    double counted = fmax(rate / rest1 * (1.0 + 1.0 / rest1), least), worst = 0.0;
    int fed = 0;
    for (int i = 0; i < N; i++) {
        expect(weights[1][i] == weights[2][i], "%s: weight %d differs from :sr's in the first step", name, i);
        double lost = (double)weights[2][i] - (double)weights[0][i], unit = sqrt((double)v[i] / rest2) + 1e-8;
        double want = rest1 / beta1 / counted * unit * lost, got = (double)m[2][i] - (double)m[1][i];
        double size = fabs(want) + fabs((double)m[1][i]) + 1e-12;
        worst = fmax(worst, fabs(got - want) / size);
        fed += fabs(want) > 1e-3 * size;
    }
    expect(fed > N / 4, "%s: %d of %d elements were rounded", name, fed, N);
    expect((rate < 1e-6f) == (counted == least), "%s, rate %g: what counts is %g", name, (double)rate, counted);
    // Roundings of the root, the unit, the product, the sum, and of what comes before them.
    const double bound = 8 * ldexp(1.0, -24);
    expect(worst <= bound, "%s, rate %g: m is off by %.1e of itself", name, (double)rate, worst);
    size_t used = strlen(test->note);
    snprintf(test->note + used, sizeof(test->note) - used, "%s%.2f", used ? ", " : "of bound: ", worst / bound);
}

TEST(rules_feedback_by_its_formula) {
    for (const char* name : {"lin8", "bf16"}) {
        for (float rate : {0.01f, 1e-4f, 2e-7f}) check_feedback(test, name, rate);
    }
}

// Without feedback errors add up as a random walk's; with it they stay as large as those of the steps that m still
// owes, sqrt(1 / (1 - beta1^2)) = 2.3 of them, and of m's start. Without feedback a share is 1. Measured were
// (dev/LOG.md) 0.41 and 0.17 of lin8, 0.28 and 0.10 of bf16, 0.87 and 0.38 of e4m3, whose steps are so large that 200
// tell little.
TEST(rules_feedback_makes_errors_good) {
    const struct {
        const char *stochastic, *feedback, *m;
        double shares[2];  // at most so much of the stochastic error, after 200 and after 1600 steps
    } rows[] = {{"lin8:sr", "lin8:ef", "fp32", {0.5, 0.25}},
                {"lin8:sr", "lin8:ef", "e4m3/256:sr", {0.5, 0.3}},
                {"bf16:sr", "bf16:ef", "bf16:sr", {0.5, 0.25}},
                {"e4m3:sr", "e4m3:ef", "dyn8/256:sr", {1.0, 0.5}}};
    for (const auto& row : rows) {
        double error[2], mean;
        for (int i = 0; i < 2; i++) {
            int steps = i ? 1600 : 200;
            double stochastic = distance(row.stochastic, row.m, steps, &mean);
            error[i] = distance(row.feedback, row.m, steps, &mean);
            expect(error[i] <= row.shares[i] * stochastic, "%s, m %s, %d steps: off by %.2e, %s %.2e", row.feedback,
                   row.m, steps, error[i], row.stochastic, stochastic);
            expect(fabs(mean) <= 4.0 * error[i] / sqrt(2048.0), "%s, m %s: the mean is off by %.2e", row.feedback,
                   row.m, mean);
        }
        size_t used = strlen(test->note);
        snprintf(test->note + used, sizeof(test->note) - used, "%s%s %.1e, %.1e", used ? "; " : "", row.feedback,
                 error[0], error[1]);
    }
}

TEST(rules_split_16_is_an_fp32_run) {
    for (const char* rule : rule_names) {
        Run run[2];
        const char* const weights[2] = {"fp32", "bf16+16"};
        for (int r = 0; r < 2; r++) {
            OptimConfig config = make_config(rule, weights[r], "bf16:sr");
            run_open(&run[r], &config, false, OPTIM_BF16);
            run_steps(&run[r], 0.01f, 1, 20);
        }
        int64_t n = run[0].elements;
        float* joined = (float*)malloc((size_t)n * sizeof(float));
        Streams streams = {stream_named(test, &run[1], "weights").data,
                           stream_named(test, &run[1], "weights.low").data};
        Split<int16_t, NEAREST>::load(streams, 0, joined, (int)n, NoiseKey{});
        expect(memcmp(joined, stream_named(test, &run[0], "weights").data, (size_t)n * 4) == 0, "%s: weights", rule);
        for (int s = 1; s < optim_stream_count(run[0].optim); s++) {
            OptimStream a = optim_stream(run[0].optim, s), b = optim_stream(run[1].optim, s + 1);
            expect(is(a.name, b.name) && memcmp(a.data, b.data, (size_t)(a.elements * a.element_bytes)) == 0, "%s: %s",
                   rule, a.name);
        }
        free(joined);
        for (Run& each : run) run_close(&each);
    }
}

TEST(rules_weights_cost_what_they_say) {
    const struct {
        const char* name;
        double bytes;
    } wanted[] = {{"fp32", 4},
                  {"bf16", 2},
                  {"bf16:sr", 2},
                  {"bf16:kahan", 4},
                  {"bf16+8", 3},
                  {"bf16+8:sr", 3},
                  {"bf16+16", 4},
                  {"bf16+fp32", 6},
                  {"fp16", 2},
                  {"fp16:sr", 2},
                  {"fp16:kahan", 4},
                  {"fp16+fp32", 6},
                  {"e4m3", 1 + 1 / 128.0},
                  {"e4m3:sr", 1 + 1 / 128.0},
                  {"e4m3+8", 2 + 1 / 128.0},
                  {"e4m3+8:sr", 2 + 1 / 128.0},
                  {"e4m3+fp32", 5 + 1 / 128.0},
                  {"e5m2", 1 + 1 / 128.0},
                  {"e5m2:sr", 1 + 1 / 128.0},
                  {"e5m2+fp32", 5 + 1 / 128.0},
                  {"lin8:sr", 1 + 1 / 32.0},
                  {"bf16:ef", 2},
                  {"e4m3:ef", 1 + 1 / 128.0},
                  {"lin8:ef", 1 + 1 / 32.0},
                  {"e4m3/tensor+fp32", 5},
                  {"e5m2/tensor+fp32", 5}};
    for (const auto& row : wanted) {
        OptimConfig config = make_config("adamw", row.name, "fp32");
        Run run;
        run_open(&run, &config, false, OPTIM_BF16);
        OptimBytes plan = optim_bytes(&config, run.tensor, 2, OPTIM_BF16), allocated = optim_allocated(run.optim);
        expect(memcmp(&plan, &allocated, sizeof(plan)) == 0, "%s", row.name);
        // Each array is rounded up to 256 bytes.
        double bytes = row.bytes * (double)run.elements;
        expect((double)plan.weights >= bytes && (double)plan.weights < bytes + 768, "%s: %lld", row.name,
               (long long)plan.weights);
        expect((plan.compute == 0) == (strncmp(row.name, "bf16", 4) == 0), "%s: a bf16 stream serves as it is",
               row.name);
        run_close(&run);
    }
}

// All that a run leaves: the streams one after another, and the weights in the compute type.
static char* snapshot(const Run* run, OptimType compute, int64_t* count) {
    int64_t copy = run->elements * (compute == OPTIM_BF16 ? 2 : 4);
    *count = copy;
    for (int s = 0; s < optim_stream_count(run->optim); s++) {
        *count += optim_stream(run->optim, s).elements * optim_stream(run->optim, s).element_bytes;
    }
    char *all = (char*)malloc((size_t)*count), *at = all;
    for (int s = 0; s < optim_stream_count(run->optim); s++) {
        OptimStream stream = optim_stream(run->optim, s);
        copy_to_host(&run->dev, at, stream.data, stream.elements * stream.element_bytes);
        at += stream.elements * stream.element_bytes;
    }
    copy_to_host(&run->dev, at, optim_weights(run->optim), copy);
    return all;
}

static bool same_result(const Run* a, const Run* b, OptimType compute) {
    int64_t count[2];
    char* all[2] = {snapshot(a, compute, &count[0]), snapshot(b, compute, &count[1])};
    bool same = count[0] == count[1] && memcmp(all[0], all[1], (size_t)count[0]) == 0;
    free(all[0]);
    free(all[1]);
    return same;
}

TEST(rules_every_pair_resumes_to_the_bit) {
    for (const char* rule : rule_names) {
        for (const char* weights : weights_names) {
            if (!goes_with(rule, weights, "bf16:sr")) continue;
            OptimConfig config = make_config(rule, weights, "bf16:sr");
            Run whole, first, second;
            for (Run* run : {&whole, &first, &second}) run_open(run, &config, false, OPTIM_FP32);
            run_steps(&whole, 0.01f, 1, 9);
            run_steps(&first, 0.01f, 1, 4);
            for (int s = 0; s < optim_stream_count(first.optim); s++) {
                OptimStream from = optim_stream(first.optim, s), to = optim_stream(second.optim, s);
                memcpy(to.data, from.data, (size_t)(from.elements * from.element_bytes));
            }
            optim_decode(second.optim);
            run_steps(&second, 0.01f, 5, 9);
            expect(same_result(&whole, &second, OPTIM_FP32), "%s with weights %s", rule, weights);
            expect(!same_result(&whole, &first, OPTIM_FP32), "%s with weights %s: nothing moves", rule, weights);
            for (Run* run : {&whole, &first, &second}) run_close(run);
        }
    }
}

TEST(rules_every_pair_leaves_padding_zero) {
    for (const char* rule : rule_names) {
        for (const char* weights : weights_names) {
            if (!goes_with(rule, weights, "bf16")) continue;
            OptimConfig config = make_config(rule, weights, "bf16");
            Run run;
            run_open(&run, &config, false, OPTIM_FP32);
            run_steps(&run, 0.01f, 1, 3);
            for (int s = 0; s < optim_stream_count(run.optim); s++) {
                OptimStream stream = optim_stream(run.optim, s);
                if (stream.elements != run.elements) continue;  // scales of blocks
                // The code of zero, which is not 0 with linear levels.
                int zero = strncmp(weights, "lin8", 4) == 0 && is(stream.name, "weights") ? Lin8::ZERO : 0;
                for (int64_t i = 0; i < run.elements; i++) {
                    if (!is_padding(&run, i)) continue;
                    const char* bytes = (const char*)stream.data + i * stream.element_bytes;
                    for (int b = 0; b < stream.element_bytes; b++) {
                        expect(bytes[b] == zero, "%s, %s: stream %s element %lld", rule, weights, stream.name,
                               (long long)i);
                    }
                }
            }
            const float* seen = (const float*)optim_weights(run.optim);
            for (int64_t i = 0; i < run.elements; i++) expect(!is_padding(&run, i) || seen[i] == 0.0f, "%s", weights);
            run_close(&run);
        }
    }
}

TEST(rules_and_weights_compile_at_run_time) {
    if (!jit_available()) skip("libnvrtc was not found");
    static char error[JIT_ERROR_BYTES];
    constexpr int RULES = sizeof(rule_names) / sizeof(rule_names[0]);
    constexpr int WEIGHTS = sizeof(weights_names) / sizeof(weights_names[0]);
    // Each rule and each kind of weights at least once.
    for (int i = 0; i < RULES || i < WEIGHTS; i++) {
        const char *weights = weights_names[i % WEIGHTS], *rule = rule_names[i % RULES];
        OptimConfig config =
            make_config(goes_with(rule, weights, "fp32") ? rule : "adam", weights, i % 2 ? "fp32" : "bf16:sr");
        char expression[1024];
        JitImage image;
        optim_expression(&config, OPTIM_BF16, expression, sizeof(expression));
        bool good = jit_compile(expression, i % 2 ? "sm_80" : "sm_90", &image, error);
        expect(good, "%s: %s", expression, error);
        if (good) jit_free(&image);
    }
}

TEST(rules_presets_run) {
    for (const char* preset : preset_names) {
        OptimConfig config = {preset, "", "", "fp32", "", "", 0.9f, 0.95f, 1e-8f, 0.1f, 77};
        char error[512];
        bool good = optim_resolve(&config, error, sizeof(error));
        expect(good, "%s: %s", preset, error);
        if (!good) continue;
        expect(optim_built_in(&config, OPTIM_BF16), "%s needs NVRTC", preset);
        Run run, other;
        run_open(&run, &config, false, OPTIM_FP32);
        run_open(&other, &config, false, OPTIM_FP32);
        run_steps(&run, 0.01f, 1, 2);
        expect(!same_result(&run, &other, OPTIM_FP32), "%s: nothing moves", preset);
        run_close(&run);
        run_close(&other);
    }
}

static void every_pair_on_gpu(Test* test) {
    const char* const states[3] = {"fp32", "bf16:sr", "e4m3/256"};  // the last has 16 elements a thread
    int pairs = 0;
    for (const char* rule : rule_names) {
        for (const char* weights : weights_names) {
            if (!goes_with(rule, weights, states[pairs % 3])) continue;
            OptimConfig config = make_config(rule, weights, states[pairs % 3]);
            OptimType compute = pairs % 2 ? OPTIM_BF16 : OPTIM_FP32;
            if (!optim_built_in(&config, OPTIM_BF16) && !jit_available()) continue;
            Run run[2];
            for (int r = 0; r < 2; r++) {
                run_open(&run[r], &config, r == 1, compute);
                run_steps(&run[r], 0.01f, 1, 20);
            }
            expect(same_result(&run[0], &run[1], compute), "%s with weights %s", rule, weights);
            for (Run& each : run) run_close(&each);
            pairs++;
        }
    }
    snprintf(test->note, sizeof(test->note), "%d pairs x 20 steps", pairs);
}

TEST(rules_every_pair_equals_cpu_gpu) {
    with_empty_cache(test, every_pair_on_gpu);
}
