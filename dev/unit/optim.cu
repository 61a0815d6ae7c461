// Tests of the optimizer: formats and noise against exhaustive tables and published vectors, AdamW against double
// precision within a bound that is derived beside it, every combination on the CPU and, where there is a GPU, equal
// bits for every combination. The run-time compiler's are in jit.cu.
#include <omp.h>
#include <stdarg.h>

#include "../../optim/jit.h"
#include "../../optim/kernel.cuh"
#include "../../optim/optim.h"
#include "../../optim/override.h"
#include "cache.h"
#include "presets.h"
#include "test.h"

static const char* const weights_names[] = {"fp32", "bf16:sr", "bf16+fp32"};
static const char* const grads_names[] = {"fp32", "bf16"};
static const char* const state_names[] = {"fp32", "bf16", "bf16:sr"};
static constexpr auto& preset_names = all_presets.name;
constexpr int COMBINATIONS = 3 * 2 * 3 * 3;

static OptimConfig make_config(const char* weights, const char* grads, const char* m, const char* v) {
    OptimConfig config = {"", "adamw", weights, grads, m, v, 0.9f, 0.95f, 1e-8f, 0.1f, 1234567890123ull};
    char error[512];
    if (!optim_resolve(&config, error, sizeof(error))) printf("    %s\n", error), exit(1);
    return config;
}

static OptimConfig combination(int index) {
    return make_config(weights_names[index % 3], grads_names[index / 3 % 2], state_names[index / 6 % 3],
                       state_names[index / 18]);
}

static OptimConfig preset_config(const char* preset, const char* grads) {
    OptimConfig config = {preset, "", "", grads, "", "", 0.9f, 0.95f, 1e-8f, 0.1f, 42};
    config.beta3 = 0.999f, config.alpha = 2.0f, config.ramp = 9;
    char error[512];
    if (!optim_resolve(&config, error, sizeof(error))) printf("    %s\n", error), exit(1);
    return config;
}

// A model of tensors of the given lengths, every second one with decay.
struct Model {
    OptimTensor tensor[16];
    int count;
    int64_t elements;
};

static Model make_model(const int64_t* lengths, int count) {
    Model model = {{}, count, 0};
    for (int i = 0; i < count; i++) model.tensor[i] = {"tensor", 1, lengths[i], i % 2 == 0, 0};
    model.elements = optim_layout(model.tensor, count);
    return model;
}

// Gradients and a scale on a device. `wide` spreads the magnitudes over 80 powers of two and puts zeros in between.
struct Gradients {
    void* arena;
    float* scale;
};

static float gradient(int64_t step, int64_t i, bool wide) {
    float x = test_uniform(1000 + (uint64_t)step, i);
    if (!wide) return x;
    int exponent = (int)(40.0f * test_uniform(2000 + (uint64_t)step, i));
    return i % 17 == 3 ? 0.0f : ldexpf(x, exponent);
}

static Gradients gradients_create(const Device* dev, const Model* model) {
    Gradients grads = {device_alloc(dev, model->elements * 4), (float*)device_alloc(dev, 4)};
    return grads;
}

static void gradients_free(const Device* dev, Gradients* grads) {
    device_free(dev, grads->arena);
    device_free(dev, grads->scale);
}

// Writes the gradients of a step; padding is zero, as the trainer leaves it.
static void gradients_set(const Device* dev, Gradients* grads, const OptimConfig* config, const Model* model,
                          int64_t step, bool wide, float scale) {
    float* values = (float*)calloc((size_t)model->elements, sizeof(float));
    uint16_t* narrow = (uint16_t*)calloc((size_t)model->elements, sizeof(uint16_t));
    for (int t = 0; t < model->count; t++) {
        for (int64_t i = 0; i < model->tensor[t].cols; i++) {
            int64_t element = model->tensor[t].offset + i;
            values[element] = gradient(step, element, wide);
            narrow[element] = Bf16::encode(values[element]);
        }
    }
    bool bf16 = strcmp(config->grads, "bf16") == 0;
    copy_to_device(dev, grads->arena, bf16 ? (void*)narrow : (void*)values, model->elements * (bf16 ? 2 : 4));
    copy_to_device(dev, grads->scale, &scale, 4);
    free(values);
    free(narrow);
}

static Optim* make_optim(const Device* dev, const OptimConfig* config, const Model* model, OptimType compute) {
    Optim* optim = optim_create(dev, config, model->tensor, model->count, compute);
    for (int t = 0; t < model->count; t++) {
        int64_t n = model->tensor[t].cols;
        float* values = (float*)malloc((size_t)n * sizeof(float));
        for (int64_t i = 0; i < n; i++) values[i] = test_uniform(7 + (uint64_t)t, i);
        optim_set_weights(optim, t, values);
        free(values);
    }
    optim_decode(optim);
    return optim;
}

static void run_steps(const Device* dev, Optim* optim, const OptimConfig* config, const Model* model, int64_t first,
                      int64_t last, bool wide) {
    Gradients grads = gradients_create(dev, model);
    for (int64_t step = first; step <= last; step++) {
        gradients_set(dev, &grads, config, model, step, wide, 0.7f);
        optim_step(optim, grads.arena, grads.scale, 1e-2f, step);
    }
    device_sync(dev);
    gradients_free(dev, &grads);
}

// All that a run leaves: the streams one after another, and the weights in the compute type.
struct Snapshot {
    char* bytes;
    int64_t count;
};

static Snapshot snapshot(const Device* dev, const Optim* optim, int64_t elements, OptimType compute) {
    int64_t count = elements * (compute == OPTIM_BF16 ? 2 : 4), used = 0;
    for (int s = 0; s < optim_stream_count(optim); s++) {
        count += optim_stream(optim, s).elements * optim_stream(optim, s).element_bytes;
    }
    Snapshot all = {(char*)malloc((size_t)count), count};
    for (int s = 0; s < optim_stream_count(optim); s++) {
        OptimStream stream = optim_stream(optim, s);
        copy_to_host(dev, all.bytes + used, stream.data, stream.elements * stream.element_bytes);
        used += stream.elements * stream.element_bytes;
    }
    copy_to_host(dev, all.bytes + used, optim_weights(optim), count - used);
    return all;
}

static bool same(const Snapshot* a, const Snapshot* b) {
    return a->count == b->count && memcmp(a->bytes, b->bytes, (size_t)a->count) == 0;
}

static Snapshot run_to_snapshot(const Device* dev, const OptimConfig* config, const Model* model, OptimType compute,
                                int64_t steps, bool wide) {
    Optim* optim = make_optim(dev, config, model, compute);
    run_steps(dev, optim, config, model, 1, steps, wide);
    Snapshot all = snapshot(dev, optim, model->elements, compute);
    optim_free(optim);
    return all;
}

static Device cpu_device() {
    Device dev;
    device_open(&dev, false, 0);
    return dev;
}

static const int64_t mixed_lengths[] = {1, 4097, 31, 33, 2048, 255, 257, 4095, 128, 127};
static const int MIXED = 10;

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

static int compare_u64(const void* a, const void* b) {
    uint64_t x = *(const uint64_t*)a, y = *(const uint64_t*)b;
    return (x > y) - (x < y);
}

TEST(optim_noise_differs_by_seed_step_stream_and_element) {
    // 2 seeds x 4 steps x 3 streams x 256 calls x 2 halves of 64 bits: two equal ones by chance happen once in 1e12.
    static uint64_t drawn[2 * 4 * 3 * 256 * 2];
    int count = 0;
    for (int i = 0; i < 2 * 4 * 3 * 256; i++) {
        NoiseKey key = {(uint64_t)(i % 2), (uint32_t)(i / 2 % 4), (uint32_t)(i / 8 % 3)};
        Noise noise = noise_draw(key, i / 24 * NOISE_ELEMENTS);
        Noise again = noise_draw(key, i / 24 * NOISE_ELEMENTS);
        expect(memcmp(&noise, &again, sizeof(noise)) == 0, "call %d", i);
        for (int half = 0; half < 2; half++) {
            drawn[count++] = (uint64_t)noise.word[2 * half] << 32 | noise.word[2 * half + 1];
        }
    }
    qsort(drawn, (size_t)count, sizeof(drawn[0]), compare_u64);
    for (int i = 1; i < count; i++) expect(drawn[i] != drawn[i - 1], "%016llx", (unsigned long long)drawn[i]);
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
        for (int k = 0; k < i; k++) {
            expect(fabs(product[i][k]) < 5.0, "lanes %d and %d are correlated by %.2f", i, k, product[i][k]);
        }
    }
}

TEST(optim_bf16_codes_survive) {
    for (uint32_t code = 0; code < 65536; code++) {
        float x = Bf16::decode((uint16_t)code);
        bool nan = (code & 0x7f80) == 0x7f80 && (code & 0x7f) != 0;
        uint32_t want = nan ? 0x7fff : code;
        expect(isnan(x) == nan, "code %04x", code);
        expect(Bf16::encode(x) == want, "code %04x becomes %04x", code, Bf16::encode(x));
        // A value of the format has nothing cut off, so no noise moves it.
        expect(Bf16::encode(x, 0xffff) == want && Bf16::encode(x, 0) == want, "code %04x with noise", code);
    }
}

TEST(optim_bf16_nearest_against_table) {
    // Between each two neighbours of the table of values, the first as far as infinity (taken as 2^128).
    const uint32_t low[] = {0, 1, 0x4000, 0x7fff, 0x8000, 0x8001, 0xc000, 0xffff};
    for (uint32_t code = 0; code < 0x7f80; code++) {
        double below = Bf16::decode((uint16_t)code);
        double above = code == 0x7f7f ? ldexp(1.0, 128) : (double)Bf16::decode((uint16_t)(code + 1));
        for (uint32_t bits : low) {
            float x = bits_float(code << 16 | bits);
            double down = (double)x - below, up = above - (double)x;
            uint32_t want = down < up ? code : up < down ? code + 1 : code + code % 2;
            expect(Bf16::encode(x) == want, "%a becomes %04x, not %04x", x, Bf16::encode(x), want);
            expect(Bf16::encode(-x) == (want | 0x8000), "%a becomes %04x", -x, Bf16::encode(-x));
        }
    }
}

TEST(optim_bf16_stochastic_counts) {
    // Over all 65536 noise values x goes up exactly as often as the fraction cut off says, away from zero.
    const uint32_t patterns[] = {0x3f800001, 0x3f808000, 0x3f80ffff, 0xbf812345, 0x00000001, 0x80004321, 0x7f7f8000};
    for (uint32_t pattern : patterns) {
        uint32_t up = 0, code = pattern >> 16;
        for (uint32_t noise = 0; noise < 65536; noise++) {
            uint16_t got = Bf16::encode(bits_float(pattern), noise);
            expect(got == code || got == code + 1, "%08x becomes %04x", pattern, got);
            up += got == code + 1;
        }
        expect(up == (pattern & 0xffff), "%08x went up %u times", pattern, up);
    }
    expect(Bf16::encode(INFINITY, 0xffff) == 0x7f80 && Bf16::encode(-INFINITY, 0xffff) == 0xff80, "infinity");
    expect(Bf16::encode(bits_float(0x7f800001), 0xffff) == 0x7fff, "NaN");
    expect(Bf16::encode(0.0f, 0xffff) == 0 && Bf16::encode(-0.0f, 0xffff) == 0x8000, "zero");
}

TEST(optim_stochastic_rounding_is_unbiased) {
    // 65536 elements stored with drawn noise: the mean's standard error is step * sqrt(f (1 - f) / n).
    const int n = 65536;
    static float x[n], back[n];
    static uint16_t codes[n];
    Streams streams = {codes, nullptr};
    double worst = 0.0;
    for (int trial = 0; trial < 24; trial++) {
        float value = 1.0f + (float)(trial % 8 + 1) / 9.0f / 128.0f;
        for (float& element : x) element = value;
        NoiseKey key = {99, (uint32_t)(trial / 3), (uint32_t)(trial % 3)};
        Elementwise<Bf16, STOCHASTIC>::store(streams, 0, x, n, key);
        Elementwise<Bf16, STOCHASTIC>::load(streams, 0, back, n, NoiseKey{});
        double sum = 0.0, fraction = (value - 1.0) * 128.0;
        for (float element : back) sum += (double)element;
        double error = fabs(sum / n - (double)value), standard = sqrt(fraction * (1.0 - fraction) / n) / 128.0;
        if (error / standard > worst) worst = error / standard;
    }
    snprintf(test->note, sizeof(test->note), "%.1f standard errors of 4", worst);
    expect(worst < 4.0, "%.2f standard errors", worst);
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
    Device dev = cpu_device();
    const int n = 65536;
    const int64_t lengths[] = {n, n};
    Model model = make_model(lengths, 2);
    OptimConfig config = make_config("bf16:sr", "fp32", "bf16:sr", "bf16:sr");
    config.beta1 = config.beta2 = 0.0f;
    Optim* optim = optim_create(&dev, &config, model.tensor, 2, OPTIM_BF16);
    Gradients grads = gradients_create(&dev, &model);
    for (int i = 0; i < 2 * n; i++) ((float*)grads.arena)[i] = 1.0033f;
    *grads.scale = 1.0f;
    static uint16_t kept[2][3][2 * n];  // after each of two steps: weights, m, v, a tensor behind the other
    for (int step = 1; step <= 2; step++) {
        optim_step(optim, grads.arena, grads.scale, 1.0033f, step);
        for (int s = 0; s < 3; s++) memcpy(kept[step - 1][s], optim_stream(optim, s).data, sizeof(kept[0][s]));
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
    snprintf(test->note, sizeof(test->note), "%.1f standard errors of 4", worst);
    expect(worst < 4.0, "%.1f standard errors", worst);
    gradients_free(&dev, &grads);
    optim_free(optim);
}

// One element in double beside a bound on the fp32 error, to first order, u = 2^-24 for each rounding: constants are
// rounded once, and each operation's own rounding is added to what it inherits.
struct Reference {
    double p, m, v, error_p, error_m, error_v;
};

static void reference_step(Reference* r, const OptimConfig* config, double g, double lr, bool decay, int64_t step) {
    const double u = ldexp(1.0, -24);
    double beta1 = config->beta1, beta2 = config->beta2, rest1 = 1.0 - beta1, rest2 = 1.0 - beta2;
    double keep = decay ? 1.0 - lr * (double)config->weight_decay : 1.0;
    double size = lr / (1.0 - pow(beta1, (double)step)), root2 = 1.0 / sqrt(1.0 - pow(beta2, (double)step));
    r->m = beta1 * r->m + rest1 * g;
    r->v = beta2 * r->v + rest2 * g * g;
    r->error_m = beta1 * r->error_m + 3 * u * fabs(rest1 * g) + u * fabs(r->m);
    r->error_v = beta2 * r->error_v + 5 * u * rest2 * g * g + u * r->v;
    double root = sqrt(r->v), denominator = root * root2 + (double)config->eps;
    double error_root = r->v > 0.0 ? r->error_v / (2.0 * root) + u * root : 0.0;
    double error_denominator = root2 * (error_root + u * root) + u * denominator;
    double quotient = r->m / denominator;
    double error_quotient = (r->error_m + fabs(quotient) * error_denominator) / denominator + u * fabs(quotient);
    double kept = keep * r->p;
    r->p = kept - size * quotient;
    r->error_p = keep * r->error_p + 2 * u * fabs(kept) + size * (error_quotient + u * fabs(quotient)) + u * fabs(r->p);
}

TEST(optim_adamw_against_double) {
    Device dev = cpu_device();
    const int64_t lengths[] = {3001, 2500};
    Model model = make_model(lengths, 2);
    OptimConfig config = make_config("fp32", "fp32", "fp32", "fp32");
    Optim* optim = make_optim(&dev, &config, &model, OPTIM_FP32);
    const int64_t steps = 60;
    run_steps(&dev, optim, &config, &model, 1, steps, false);
    const float* got[3] = {nullptr, nullptr, nullptr};
    for (int s = 0; s < 3; s++) got[s] = (const float*)optim_stream(optim, s).data;
    double worst[3] = {0.0, 0.0, 0.0};
    for (int t = 0; t < 2; t++) {
        for (int64_t i = 0; i < lengths[t]; i++) {
            int64_t element = model.tensor[t].offset + i;
            Reference r = {test_uniform(7 + (uint64_t)t, i), 0, 0, 0, 0, 0};
            for (int64_t step = 1; step <= steps; step++) {
                double g = (double)gradient(step, element, false) * (double)0.7f;
                reference_step(&r, &config, g, (double)1e-2f, t == 0, step);
            }
            const double want[3] = {r.p, r.m, r.v}, bound[3] = {r.error_p, r.error_m, r.error_v};
            for (int s = 0; s < 3; s++) {
                double multiple = fabs((double)got[s][element] - want[s]) / bound[s];
                if (!(multiple <= worst[s])) worst[s] = multiple;
            }
        }
    }
    snprintf(test->note, sizeof(test->note), "p %.2f, m %.2f, v %.2f of bound", worst[0], worst[1], worst[2]);
    expect(worst[0] <= 1.0 && worst[1] <= 1.0 && worst[2] <= 1.0, "of bound: %g %g %g", worst[0], worst[1], worst[2]);
    optim_free(optim);
}

TEST(optim_decay_is_of_matrices_only) {
    Device dev = cpu_device();
    const int64_t lengths[] = {300, 300};
    Model model = make_model(lengths, 2);
    OptimConfig config = make_config("fp32", "fp32", "fp32", "fp32");
    Optim* optim = make_optim(&dev, &config, &model, OPTIM_FP32);
    Gradients grads = gradients_create(&dev, &model);
    device_zero(&dev, grads.arena, model.elements * 4);
    *grads.scale = 1.0f;
    optim_step(optim, grads.arena, grads.scale, 0.5f, 1);
    const float* p = (const float*)optim_weights(optim);
    const float keep = (float)(1.0 - 0.5 * (double)0.1f);
    for (int64_t i = 0; i < 300; i++) {
        float a = test_uniform(7, i), b = test_uniform(8, i);
        expect(p[i] == a * keep, "decayed element %lld is %g", (long long)i, (double)p[i]);
        expect(p[model.tensor[1].offset + i] == b, "element %lld is %g", (long long)i, (double)p[i]);
    }
    gradients_free(&dev, &grads);
    optim_free(optim);
}

TEST(optim_stochastic_weights_follow_fp32) {
    // lr is so small that each update is a hundredth of a bf16 step: rounded to nearest the weights would never move.
    // After 200 steps, the mean of 4096 weights is where fp32 weights go, within 4 standard errors. An element goes a
    // whole step down with probability 1/100 each time: its variance is 200 * 0.01 * 0.99 steps squared. The noise of m
    // and v, which changes an update by 2^-8 of itself, is lost in that.
    Device dev = cpu_device();
    const int64_t lengths[] = {1, 4096};
    Model model = make_model(lengths, 2);
    OptimConfig config = make_config("bf16:sr", "fp32", "bf16:sr", "bf16:sr");
    Optim* optim = make_optim(&dev, &config, &model, OPTIM_BF16);
    static float ones[4096], got[4096];
    Gradients grads = gradients_create(&dev, &model);
    for (float& one : ones) one = 1.5f;
    optim_set_weights(optim, 1, ones);
    for (int64_t i = 0; i < model.elements; i++) ((float*)grads.arena)[i] = i >= TILE_ELEMENTS ? 1.0f : 0.0f;
    *grads.scale = 1.0f;
    const int steps = 200;
    const double lr = 1.0 / 128.0 / 100.0;
    for (int step = 1; step <= steps; step++) optim_step(optim, grads.arena, grads.scale, (float)lr, step);
    optim_get_weights(optim, 1, got);
    double mean = 0.0, want = 1.5 - steps * lr, standard = sqrt(steps * 0.01 * 0.99 / 4096.0) / 128.0;
    for (float value : got) mean += (double)value / 4096.0;
    snprintf(test->note, sizeof(test->note), "%.2f standard errors of 4", fabs(mean - want) / standard);
    expect(fabs(mean - want) < 4.0 * standard, "mean %g, fp32 gives %g", mean, want);
    expect(1.5 - mean > 0.5 * steps * lr, "the weights stand still at %g", mean);
    gradients_free(&dev, &grads);
    optim_free(optim);
}

TEST(optim_master_and_copy) {
    Device dev = cpu_device();
    Model model = make_model(mixed_lengths, MIXED);
    OptimConfig config = make_config("bf16+fp32", "bf16", "fp32", "bf16:sr");
    Optim* optim = make_optim(&dev, &config, &model, OPTIM_BF16);
    const uint16_t* copy = (const uint16_t*)optim_stream(optim, 0).data;
    const float* master = (const float*)optim_stream(optim, 1).data;
    expect(strcmp(optim_stream(optim, 1).name, "master") == 0, "%s", optim_stream(optim, 1).name);
    expect(optim_weights(optim) == (void*)copy, "the bf16 stream serves the matmul as it is");
    for (int64_t i = 0; i < 4097; i++) {
        expect(master[model.tensor[1].offset + i] == test_uniform(8, i), "the master is not the value that was set");
    }
    run_steps(&dev, optim, &config, &model, 1, 5, true);
    for (int64_t i = 0; i < model.elements; i++) {
        expect(copy[i] == Bf16::encode(master[i]), "element %lld: %04x of %a", (long long)i, copy[i], master[i]);
    }
    expect(master[model.tensor[1].offset] != test_uniform(8, 0), "the step did not move the weights");
    optim_free(optim);
}

TEST(optim_compute_copy) {
    Device dev = cpu_device();
    Model model = make_model(mixed_lengths, MIXED);
    for (const char* weights : weights_names) {
        for (int compute = 0; compute < 2; compute++) {
            OptimConfig config = make_config(weights, "fp32", "fp32", "fp32");
            Optim* optim = make_optim(&dev, &config, &model, (OptimType)compute);
            void* before = optim_weights(optim);
            run_steps(&dev, optim, &config, &model, 1, 3, false);
            expect(optim_weights(optim) == before, "the pointer moved");
            for (int t = 0; t < model.count; t++) {
                int64_t n = model.tensor[t].cols, offset = model.tensor[t].offset;
                float* values = (float*)malloc((size_t)n * sizeof(float));
                optim_get_weights(optim, t, values);
                for (int64_t i = 0; i < n; i++) {
                    bool good = compute == OPTIM_BF16 ? ((uint16_t*)before)[offset + i] == Bf16::encode(values[i])
                                                      : ((float*)before)[offset + i] == values[i];
                    expect(good, "weights %s compute %d tensor %d element %lld", weights, compute, t, (long long)i);
                }
                free(values);
            }
            optim_free(optim);
        }
    }
}

TEST(optim_set_and_get_weights) {
    // More than one piece of the transfer (2^19 elements), and a tail; the neighbours keep their values.
    Device dev = cpu_device();
    const int64_t lengths[] = {5, 600001, 7};
    Model model = make_model(lengths, 3);
    float* values = (float*)malloc(600001 * sizeof(float));
    float* got = (float*)malloc(600001 * sizeof(float));
    for (int64_t i = 0; i < 600001; i++) values[i] = test_uniform(3, i);
    for (const char* weights : weights_names) {
        OptimConfig config = make_config(weights, "fp32", "fp32", "fp32");
        Optim* optim = make_optim(&dev, &config, &model, OPTIM_BF16);
        optim_set_weights(optim, 1, values);
        optim_get_weights(optim, 1, got);
        bool exact = strcmp(weights, "fp32") == 0;
        for (int64_t i = 0; i < 600001; i++) {
            float want = exact ? values[i] : Bf16::decode(Bf16::encode(values[i]));
            expect(got[i] == want, "%s element %lld is %g, want %g", weights, (long long)i, got[i], want);
        }
        optim_get_weights(optim, 2, got);
        float want = exact ? test_uniform(9, 6) : Bf16::decode(Bf16::encode(test_uniform(9, 6)));
        expect(got[6] == want, "%s: the tensor after it changed", weights);
        optim_free(optim);
    }
    free(values);
    free(got);
}

static void check_nonfinite(Test* test, const Device* dev) {
    const float scales[] = {NAN, INFINITY, -INFINITY};
    Model model = make_model(mixed_lengths, MIXED);
    for (const char* preset : preset_names) {
        OptimConfig config = preset_config(preset, "bf16");
        Optim* optim = make_optim(dev, &config, &model, OPTIM_FP32);
        Gradients grads = gradients_create(dev, &model);
        run_steps(dev, optim, &config, &model, 1, 2, false);
        Snapshot before = snapshot(dev, optim, model.elements, OPTIM_FP32);
        for (int k = 0; k <= 3; k++) {
            gradients_set(dev, &grads, &config, &model, 3, false, k < 3 ? scales[k] : 1.0f);
            optim_step(optim, grads.arena, grads.scale, 1e-2f, 3);
            Snapshot after = snapshot(dev, optim, model.elements, OPTIM_FP32);
            expect(same(&before, &after) == (k < 3), "%s with grad_scale %g", preset, k < 3 ? (double)scales[k] : 1.0);
            free(after.bytes);
        }
        free(before.bytes);
        gradients_free(dev, &grads);
        optim_free(optim);
    }
}

TEST(optim_nonfinite_scale_changes_nothing) {
    Device dev = cpu_device();
    check_nonfinite(test, &dev);
}

TEST(optim_padding_stays_zero) {
    Device dev = cpu_device();
    Model model = make_model(mixed_lengths, MIXED);
    for (int index = 0; index < COMBINATIONS; index++) {
        OptimConfig config = combination(index);
        Optim* optim = make_optim(&dev, &config, &model, OPTIM_FP32);
        run_steps(&dev, optim, &config, &model, 1, 4, true);
        for (int s = 0; s < optim_stream_count(optim); s++) {
            OptimStream stream = optim_stream(optim, s);
            int64_t used = 0;
            for (int64_t i = 0; i < model.elements; i++) {
                const char* bytes = (const char*)stream.data + i * stream.element_bytes;
                bool zero = true, padding = true;
                for (int b = 0; b < stream.element_bytes; b++) zero = zero && bytes[b] == 0;
                for (int t = 0; t < model.count; t++) {
                    padding = padding && (i < model.tensor[t].offset || i >= model.tensor[t].offset + mixed_lengths[t]);
                }
                expect(!padding || zero, "combination %d stream %s element %lld", index, stream.name, (long long)i);
                used += !zero;
            }
            expect(used > 9000, "combination %d stream %s: only %lld elements are not zero", index, stream.name,
                   (long long)used);
        }
        optim_free(optim);
    }
}

TEST(optim_threads_do_not_matter) {
    Device dev = cpu_device();
    Model model = make_model(mixed_lengths, MIXED);
    int threads = omp_get_max_threads();
    for (const char* preset : preset_names) {
        OptimConfig config = preset_config(preset, "fp32");
        omp_set_num_threads(1);
        Snapshot one = run_to_snapshot(&dev, &config, &model, OPTIM_BF16, 3, true);
        omp_set_num_threads(5);
        Snapshot five = run_to_snapshot(&dev, &config, &model, OPTIM_BF16, 3, true);
        expect(same(&one, &five), "%s", preset);
        free(one.bytes);
        free(five.bytes);
    }
    omp_set_num_threads(threads);
}

TEST(optim_resume_and_seed) {
    Device dev = cpu_device();
    Model model = make_model(mixed_lengths, MIXED);
    for (const char* preset : preset_names) {
        OptimConfig config = preset_config(preset, "bf16");
        Snapshot whole = run_to_snapshot(&dev, &config, &model, OPTIM_FP32, 8, true);
        Optim* first = make_optim(&dev, &config, &model, OPTIM_FP32);
        run_steps(&dev, first, &config, &model, 1, 5, true);
        Optim* second = optim_create(&dev, &config, model.tensor, model.count, OPTIM_FP32);
        for (int s = 0; s < optim_stream_count(first); s++) {
            OptimStream from = optim_stream(first, s), to = optim_stream(second, s);
            memcpy(to.data, from.data, (size_t)(from.elements * from.element_bytes));
        }
        optim_decode(second);
        run_steps(&dev, second, &config, &model, 6, 8, true);
        Snapshot resumed = snapshot(&dev, second, model.elements, OPTIM_FP32);
        expect(same(&whole, &resumed), "%s: resumed differs from uninterrupted", preset);
        config.seed++;
        Snapshot other = run_to_snapshot(&dev, &config, &model, OPTIM_FP32, 8, true);
        bool noisy = strstr(config.weights, ":sr") || strstr(config.m, ":sr") || strstr(config.v, ":sr");
        expect(same(&whole, &other) != noisy, "%s: another seed", preset);
        optim_free(first);
        optim_free(second);
        free(whole.bytes);
        free(resumed.bytes);
        free(other.bytes);
    }
}

static bool resolve_says(const OptimConfig* config, const char* option, const char* found, const char* suggested) {
    OptimConfig copy = *config;
    char error[1024] = "";
    bool resolved = optim_resolve(&copy, error, sizeof(error));
    bool good = !resolved && strncmp(error, option, strlen(option)) == 0 && error[strlen(option)] == ':' &&
                strstr(error, found) && strstr(error, suggested) && !strchr(error, '\n');
    if (!good) printf("    %d %s\n", resolved, error);
    return good;
}

TEST(optim_names_and_errors) {
    const OptimConfig good = {"adamw32", "", "", "bf16", nullptr, nullptr, 0.9f, 0.95f, 1e-8f, 0.1f, 1};
    OptimConfig config = good;
    char error[1024], line[256];
    expect(optim_resolve(&config, error, sizeof(error)), "%s", error);
    expect(strcmp(config.weights, "bf16+fp32") == 0 && strcmp(config.m, "fp32") == 0, "%s %s", config.weights,
           config.m);
    optim_describe(&config, line, sizeof(line));
    expect(strcmp(line, "adamw  weights bf16+fp32  grads bf16  m fp32  v fp32  14 B/param") == 0, "%s", line);
    config = good, config.preset = "adamw16", config.v = "fp32";
    expect(optim_resolve(&config, error, sizeof(error)), "%s", error);
    expect(strcmp(config.weights, "bf16:sr") == 0 && strcmp(config.v, "fp32") == 0, "%s", config.v);
    optim_describe(&config, line, sizeof(line));
    expect(strstr(line, " 8 B/param"), "%s", line);

    config = good, config.preset = "adam16";
    expect(resolve_says(&config, "--preset", "\"adam16\"", "mean adamw16?"), "preset");
    config = good, config.rule = "adamv";
    expect(resolve_says(&config, "--rule", "\"adamv\"", "mean adamw?"), "rule");
    config = good, config.weights = "bf16:rs";
    expect(resolve_says(&config, "--weights", "\"bf16:rs\"", "mean bf16:sr?"), "weights");
    config = good, config.grads = "bf61";
    expect(resolve_says(&config, "--grads", "\"bf61\"", "mean bf16?"), "grads");
    config = good, config.grads = nullptr;
    expect(resolve_says(&config, "--grads", "\"\"", "fp32, bf16"), "no grads");
    config = good, config.m = "fp23";
    expect(resolve_says(&config, "--m", "\"fp23\"", "mean fp32?"), "m");
    config = good, config.v = "bf16-sr";
    expect(resolve_says(&config, "--v", "\"bf16-sr\"", "mean bf16:sr?"), "v");
    config = good, config.beta1 = 1.0f;
    expect(resolve_says(&config, "--beta1", "1", "below 1"), "beta1");
    config = good, config.beta2 = NAN;
    expect(resolve_says(&config, "--beta2", "nan", "below 1"), "beta2");
    config = good, config.eps = 0.0f;
    expect(resolve_says(&config, "--eps", "0", "above 0"), "eps");
    config = good, config.weight_decay = -0.1f;
    expect(resolve_says(&config, "--weight-decay", "-0.1", "from 0"), "weight decay");
}

TEST(optim_lists) {
    char* text = nullptr;
    size_t bytes = 0;
    FILE* file = open_memstream(&text, &bytes);
    optim_list_formats(file);
    optim_list_presets(file);
    fclose(file);
    const char* const wanted[] = {"--weights", "--grads",   "--m, --v", "--rule",
                                  "bf16:sr",   "bf16+fp32", "adamw32",  "adamw16"};
    for (const char* name : wanted) expect(strstr(text, name), "%s is not in the lists", name);
    for (const char* line = strtok(text, "\n"); line; line = strtok(nullptr, "\n")) {
        expect(strlen(line) <= 120, "%zu characters: %s", strlen(line), line);
    }
    free(text);
}

TEST(optim_bytes_and_streams) {
    Device dev = cpu_device();
    Model model = make_model(mixed_lengths, MIXED);
    int64_t want_elements = 0;
    for (int64_t length : mixed_lengths) want_elements += (length + 2047) / 2048 * 2048;
    expect(model.elements == want_elements, "%lld", (long long)model.elements);
    for (int index = 0; index < COMBINATIONS; index++) {
        OptimConfig config = combination(index);
        for (int compute = 0; compute < 2; compute++) {
            OptimBytes plan = optim_bytes(&config, model.tensor, model.count, (OptimType)compute);
            Optim* optim = optim_create(&dev, &config, model.tensor, model.count, (OptimType)compute);
            OptimBytes allocated = optim_allocated(optim);
            expect(memcmp(&plan, &allocated, sizeof(plan)) == 0, "combination %d", index);
            int64_t stored = 0;
            int primary = 0;
            for (int s = 0; s < optim_stream_count(optim); s++) {
                OptimStream stream = optim_stream(optim, s);
                stored += stream.elements * stream.element_bytes;
                primary += stream.is_weights;
                expect(stream.elements == model.elements, "stream %s", stream.name);
                expect(strcmp(stream.dtype, stream.element_bytes == 4 ? "F32" : "BF16") == 0, "%s", stream.dtype);
            }
            expect(stored == plan.weights + plan.states, "combination %d: the streams hold %lld", index,
                   (long long)stored);
            expect(primary == 1 && optim_stream(optim, 0).is_weights, "combination %d", index);
            bool direct = compute == OPTIM_FP32 ? !strcmp(config.weights, "fp32") : strcmp(config.weights, "fp32") != 0;
            expect((plan.compute == 0) == direct, "combination %d compute %d", index, compute);
            expect((optim_weights(optim) == optim_stream(optim, 0).data) == direct, "combination %d", index);
            optim_free(optim);
        }
    }
    OptimConfig config = preset_config("adamw32", "bf16");
    OptimBytes plan = optim_bytes(&config, model.tensor, model.count, OPTIM_BF16);
    expect(plan.weights == 6 * model.elements && plan.states == 8 * model.elements, "%lld", (long long)plan.weights);
}

TEST(optim_presets_are_built_in) {
    for (const char* preset : preset_names) {
        for (const char* grads : grads_names) {
            OptimConfig config = preset_config(preset, grads);
            expect(optim_built_in(&config, OPTIM_BF16), "%s with %s gradients", preset, grads);
            Override overrides[OVERRIDES];
            char error[512] = "";
            int count;
            expect(overrides_parse(config.overrides, overrides, &count, error, sizeof(error)), "%s", error);
            for (int i = 0; i < count; i++) {
                OptimConfig other = config;
                if (*overrides[i].weights) other.weights = overrides[i].weights;
                if (*overrides[i].m) other.m = overrides[i].m;
                if (*overrides[i].v) other.v = overrides[i].v;
                expect(optim_resolve(&other, error, sizeof(error)), "%s", error);
                expect(optim_built_in(&other, OPTIM_BF16), "%s with %s gradients: %s", preset, grads, config.overrides);
            }
        }
    }
    OptimConfig config = make_config("fp32", "fp32", "bf16", "fp32");
    expect(!optim_built_in(&config, OPTIM_BF16), "an odd one is not");
}

static void compare_with_cpu(Test* test, const Device* gpu, const OptimConfig* config, const Model* model,
                             OptimType compute, int64_t steps, const char* what) {
    Device cpu = cpu_device();
    Snapshot want = run_to_snapshot(&cpu, config, model, compute, steps, true);
    Snapshot got = run_to_snapshot(gpu, config, model, compute, steps, true);
    int64_t differ = 0;
    for (int64_t i = 0; i < want.count && i < got.count; i++) differ += want.bytes[i] != got.bytes[i];
    char line[256];
    optim_describe(config, line, sizeof(line));
    expect(same(&want, &got), "%s, %s: %lld of %lld bytes differ", what, line, (long long)differ,
           (long long)want.count);
    free(want.bytes);
    free(got.bytes);
}

TEST(optim_every_combination_equals_cpu_gpu) {
    Device gpu;
    device_open(&gpu, true, 0);
    CacheFolder folder = cache_enter();
    Model model = make_model(mixed_lengths, MIXED);
    for (int index = 0; index < COMBINATIONS; index++) {
        OptimConfig config = combination(index);
        if (!optim_built_in(&config, OPTIM_BF16) && !jit_available()) continue;
        compare_with_cpu(test, &gpu, &config, &model, index % 2 ? OPTIM_BF16 : OPTIM_FP32, 20, "mixed lengths");
    }
    snprintf(test->note, sizeof(test->note), "%s", jit_available() ? "54 combinations x 20 steps" : "built-in only");
    cache_leave(&folder);
    device_close(&gpu);
}

// For `make sanitize`, whose race checker is slow: one thread block, which uses all of its stages several times. Blocks
// of a whole tile are reduced through shared memory, and their scales are what the couriers carry themselves; so are
// the largest of a tile with @dq8, here with 16 and 8 elements a thread and with a third state.
TEST(optim_race_gpu) {
    Device gpu;
    device_open(&gpu, true, 0);
    gpu.sm_count = 1;
    CacheFolder folder = cache_enter();
    const int64_t length = 60 * 2048 + 1;
    Model model = make_model(&length, 1);
    OptimConfig slow = preset_config("adamw16", "bf16");
    slow.rule = "ademamix";
    slow.m = "soft8/32@dq8", slow.v = "sqrt8/32@dq8";
    const OptimConfig configs[] = {preset_config("adamw32", "bf16"),
                                   preset_config("adamw8", "bf16"),
                                   preset_config("adamw4", "bf16"),
                                   preset_config("adamw4d", "bf16"),
                                   preset_config("int8w4", "bf16"),
                                   make_config("bf16:sr", "bf16", "dyn8/2048", "udyn8/2048"),
                                   make_config("bf16:sr", "bf16", "de4/32@dq8", "fp32"),
                                   slow};
    for (const OptimConfig& config : configs) {
        if (!optim_built_in(&config, OPTIM_BF16) && !jit_available()) continue;
        compare_with_cpu(test, &gpu, &config, &model, OPTIM_BF16, 2, "one block");
    }
    cache_leave(&folder);
    device_close(&gpu);
}

// Every preset, on a GPU that is said to have seven multiprocessors: of the last length, which no tile, block or group
// of threads divides, all of them draw tiles in turn and their stages go round.
TEST(optim_every_length_equals_cpu_gpu) {
    Device gpu;
    device_open(&gpu, true, 0);
    gpu.sm_count = 7;
    const int64_t lengths[] = {1, 31, 33, 255, 257, 4095, 4097, 1000003};
    for (int64_t length : lengths) {
        Model model = make_model(&length, 1);
        bool large = length > 5000;
        for (int preset = 0; preset < ELEMENT_PRESETS; preset++) {
            for (int compute = 0; compute < 2; compute++) {
                if (large && compute != preset % 2) continue;
                OptimConfig config = preset_config(preset_names[preset], (length + preset) % 4 == 1 ? "bf16" : "fp32");
                char what[64];
                snprintf(what, sizeof(what), "length %lld compute %d", (long long)length, compute);
                compare_with_cpu(test, &gpu, &config, &model, (OptimType)compute, large ? 3 : 20, what);
            }
        }
    }
    snprintf(test->note, sizeof(test->note), "%d presets", ELEMENT_PRESETS);
    device_close(&gpu);
}

// Every preset over tensors of all these lengths, as one launch.
TEST(optim_every_preset_equals_cpu_gpu) {
    Device gpu;
    device_open(&gpu, true, 0);
    Model model = make_model(mixed_lengths, MIXED);
    for (const char* preset : preset_names) {
        for (const char* grads : grads_names) {
            OptimConfig config = preset_config(preset, grads);
            compare_with_cpu(test, &gpu, &config, &model, OPTIM_BF16, 20, "mixed lengths");
        }
    }
    snprintf(test->note, sizeof(test->note), "%d presets x 2 kinds of gradients x 20 steps", ELEMENT_PRESETS);
    device_close(&gpu);
}

#ifdef __CUDACC__
// Nodes of the graph that a step is when it is captured.
static int launches_of_step(const Device* gpu, const OptimConfig* config, Model model) {
    optim_layout(model.tensor, model.count, config);
    Optim* optim = make_optim(gpu, config, &model, OPTIM_BF16);
    Gradients grads = gradients_create(gpu, &model);
    device_sync(gpu);
    cudaGraph_t graph;
    size_t nodes = 0;
    check(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeThreadLocal));
    optim_step(optim, grads.arena, grads.scale, 1e-2f, 1);
    check(cudaStreamEndCapture(gpu->stream, &graph));
    check(cudaGraphGetNodes(graph, nullptr, &nodes));
    check(cudaGraphDestroy(graph));
    gradients_free(gpu, &grads);
    optim_free(optim);
    return (int)nodes;
}

// A step of all tensors is one launch, and nothing else that the device does; with other formats for some tensors two.
TEST(optim_step_is_one_launch_gpu) {
    Device gpu;
    device_open(&gpu, true, 0);
    Model model = make_model(mixed_lengths, MIXED);
    model.tensor[3].name = "other";
    for (const char* preset : preset_names) {
        OptimConfig config = preset_config(preset, "bf16");
        int launches = launches_of_step(&gpu, &config, model);
        expect(launches == 1, "%s: %d", preset, launches);
    }
    OptimConfig config = preset_config("adamw32", "bf16");
    config.overrides = "tensor: wd=0.3; other: lr=0.5";
    int launches = launches_of_step(&gpu, &config, model);
    expect(launches == 1, "with other settings %d", launches);
    config.overrides = "other: m=bf16:sr v=bf16:sr";
    config.weights = "bf16:sr";
    if (jit_available()) launches = launches_of_step(&gpu, &config, model);
    expect(!jit_available() || launches == 2, "with other formats %d", launches);
    device_close(&gpu);
}
#endif

TEST(optim_built_in_equals_jit_gpu) {
    if (!jit_available()) skip("libnvrtc was not found");
    Device gpu;
    device_open(&gpu, true, 0);
    CacheFolder folder = cache_enter();
    Model model = make_model(mixed_lengths, MIXED);
    for (const char* preset : preset_names) {
        for (const char* grads : grads_names) {
            OptimConfig config = preset_config(preset, grads);
            Snapshot built_in = run_to_snapshot(&gpu, &config, &model, OPTIM_BF16, 20, true);
            int before = folder_files(folder.path, false);
            setenv("NIBBLE_JIT", "1", 1);
            Snapshot jit = run_to_snapshot(&gpu, &config, &model, OPTIM_BF16, 20, true);
            unsetenv("NIBBLE_JIT");
            expect(folder_files(folder.path, false) == before + 1, "%s was not compiled by NVRTC", preset);
            expect(same(&built_in, &jit), "%s with %s gradients", preset, grads);
            free(built_in.bytes);
            free(jit.bytes);
        }
    }
    cache_leave(&folder);
    device_close(&gpu);
}

TEST(optim_nan_gradients_equal_cpu_gpu) {
    // NaN and infinite gradients under a finite scale reach the weights: with the same bits on both.
    Device devices[2] = {cpu_device(), cpu_device()};
    device_open(&devices[1], true, 0);
    Model model = make_model(mixed_lengths, MIXED);
    for (const char* preset : preset_names) {
        OptimConfig config = preset_config(preset, "fp32");
        Snapshot all[2];
        for (int d = 0; d < 2; d++) {
            const Device* dev = &devices[d];
            Optim* optim = make_optim(dev, &config, &model, OPTIM_BF16);
            Gradients grads = gradients_create(dev, &model);
            const uint32_t patterns[] = {0x7fc00000, 0x7f800000, 0xff800000, 0xffc12345, 0x7f7fffff};
            gradients_set(dev, &grads, &config, &model, 1, true, 1.0f);
            copy_to_device(dev, (float*)grads.arena + model.tensor[1].offset + 9, patterns, sizeof(patterns));
            for (int step = 1; step <= 3; step++) optim_step(optim, grads.arena, grads.scale, 1e-2f, step);
            all[d] = snapshot(dev, optim, model.elements, OPTIM_BF16);
            gradients_free(dev, &grads);
            optim_free(optim);
        }
        expect(same(&all[0], &all[1]), "%s", preset);
        free(all[0].bytes);
        free(all[1].bytes);
    }
    device_close(&devices[1]);
}

TEST(optim_nonfinite_scale_changes_nothing_gpu) {
    Device gpu;
    device_open(&gpu, true, 0);
    check_nonfinite(test, &gpu);
    device_close(&gpu);
}
