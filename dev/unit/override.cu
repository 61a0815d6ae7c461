// Tests of --override: what matches, what is refused, and that a run with other settings for some tensors gives each
// tensor the bits that a run with these settings for all would.
#include "../../optim/jit.h"
#include "../../optim/override.h"
#include "rules.h"

TEST(override_patterns) {
    const struct {
        const char *patterns, *name;
        bool matches;
    } rows[] = {{"wpe", "wpe.weight", true},
                {"wpe", "xwpe.weight", false},
                {"wpe", "wpex.weight", false},
                {"wpe|ln*", "h.3.ln_1.weight", true},
                {"wpe|ln*", "ln_f.bias", true},
                {"wpe|ln*", "h.3.mlp.c_fc.weight", false},
                {"*.bias", "h.3.mlp.c_fc.bias", true},
                {"*.bias", "h.3.mlp.c_fc.weight", false},
                {"h.3", "h.3.ln_1.weight", true},
                {"h.3", "h.31.ln_1.weight", false},
                {"h.?.attn", "h.3.attn.c_attn.weight", true},
                {"h.?.attn", "h.31.attn.c_attn.weight", false},
                {"c_attn.weight", "h.3.attn.c_attn.weight", true},
                {"*", "wte.weight", true},
                {"wte.weight", "wte.weight", true},
                {"wte.weight.more", "wte.weight", false},
                {"h.*.c_attn.weight", "h.3.attn.c_attn.weight", true},
                {"h.*.c_attn", "h.3.attn.c_attn.weight", true},
                {"*t*n*.bias", "h.3.attn.c_attn.bias", true},
                {"*t*n*.bias", "h.3.attn.c_attn.weight", false},
                {"l*_?", "h.3.ln_1.weight", true},
                {"l*_?", "h.3.ln_12.weight", false},
                {"***", "wte.weight", true},
                {"****************************************z", "h.3.mlp.c_fc.weight", false}};
    for (const auto& row : rows) {
        char text[128], error[512] = "";
        Override parsed[OVERRIDES];
        int count;
        snprintf(text, sizeof(text), " %s : lr=2 ;", row.patterns);
        expect(overrides_parse(text, parsed, &count, error, sizeof(error)) && count == 1, "%s", error);
        expect(override_matches(&parsed[0], row.name) == row.matches, "%s and %s", row.patterns, row.name);
    }
    const char* const bad[][2] = {{"wpe", "no patterns"},
                                  {": m=fp32", "no patterns"},
                                  {"wpe:", "nothing follows"},
                                  {"wpe: x=1", "not known"},
                                  {"wpe: m=", "no format"},
                                  {"wpe: lr=-1", "from 0"},
                                  {"wpe: lr=fast", "from 0"},
                                  {"w e!: lr=1", "no pattern"},
                                  {"wpe: m=fp23", "\"fp23\" is not"},
                                  {"wpe: weights=", "no format"},
                                  {"wpe: weights=fp23", "--override weights: \"fp23\" is not"},
                                  {"wpe: weight=fp32", "type weights="},
                                  {"wpe: lr=1; wte lr=2", "no patterns"}};
    for (const auto& row : bad) {
        OptimConfig config = make_config("adamw", "bf16", "fp32");
        config.overrides = row[0];
        expect_refusal(test, config, "--override", row[1]);
    }
    char longest[200] = "w";
    for (int i = 0; i < 11; i++) strcat(longest, "|h.3.attn.c_");
    Override parsed[OVERRIDES];
    int count;
    char error[512] = "";
    strcat(longest, ":m=fp32");
    expect(!overrides_parse(longest, parsed, &count, error, sizeof(error)) && strstr(error, "more than 127"), "%s",
           error);
    expect(overrides_parse(longest + 10, parsed, &count, error, sizeof(error)), "%s", error);
    OptimConfig config = make_config("lion", "bf16", "fp32");
    config.overrides = "wpe: v=fp32";
    expect_refusal(test, config, "--override", "keeps no second moment");
}

// A small model under a configuration: 5 steps, then the weights of its tensors.
constexpr int NAMED = 5;
static const char* const named[NAMED] = {"wpe.weight", "h.0.ln_1.weight", "h.0.attn.c_attn.weight",
                                         "h.0.attn.c_attn.bias", "ln_f.weight"};
constexpr int NAMED_LENGTH = 2500;

struct NamedRun {
    Device dev;
    OptimTensor tensor[NAMED];
    int64_t elements;
    Optim* optim;
};

static void named_open(NamedRun* run, const OptimConfig* config, bool gpu, OptimType compute = OPTIM_FP32) {
    static float values[NAMED_LENGTH];
    device_open(&run->dev, gpu, 0);
    for (int t = 0; t < NAMED; t++) run->tensor[t] = {named[t], 1, NAMED_LENGTH, t % 2 == 0, 0};
    run->elements = optim_layout(run->tensor, NAMED, config);
    run->optim = optim_create(&run->dev, config, run->tensor, NAMED, compute);
    for (int t = 0; t < NAMED; t++) {
        for (int i = 0; i < NAMED_LENGTH; i++) values[i] = start(t * 10000 + i);
        optim_set_weights(run->optim, t, values);
    }
    optim_decode(run->optim);
}

static void named_steps(NamedRun* run, float lr, int first, int last) {
    float *values = (float*)malloc((size_t)run->elements * sizeof(float)), one = 1.0f;
    float *grads = (float*)device_alloc(&run->dev, run->elements * 4), *scale = (float*)device_alloc(&run->dev, 4);
    copy_to_device(&run->dev, scale, &one, 4);
    for (int step = first; step <= last; step++) {
        memset(values, 0, (size_t)run->elements * sizeof(float));
        for (int t = 0; t < NAMED; t++) {
            for (int i = 0; i < NAMED_LENGTH; i++) values[run->tensor[t].offset + i] = gradient(step, t * 10000 + i);
        }
        copy_to_device(&run->dev, grads, values, run->elements * 4);
        optim_step(run->optim, grads, scale, lr, step);
    }
    device_sync(&run->dev);
    device_free(&run->dev, grads);
    device_free(&run->dev, scale);
    free(values);
}

static void named_close(NamedRun* run) {
    optim_free(run->optim);
    device_close(&run->dev);
}

static bool same_tensor(NamedRun* a, NamedRun* b, int t) {
    static float x[NAMED_LENGTH], y[NAMED_LENGTH];
    optim_get_weights(a->optim, t, x);
    optim_get_weights(b->optim, t, y);
    return memcmp(x, y, sizeof(x)) == 0;
}

static const char* const OVERRIDDEN = "wpe|ln*: m=fp32 v=fp32 lr=0.5; ln_f: lr=0.5; *.bias: wd=0.3";

TEST(override_do_what_whole_runs_do) {
    // Formats that round to nearest: an element's result does not depend on where in the arena it lies.
    OptimConfig mixed = make_config("adamw", "fp32", "bf16"), wide = make_config("adamw", "fp32", "fp32");
    OptimConfig decayed = make_config("adamw", "fp32", "bf16"), plain = decayed;
    mixed.overrides = OVERRIDDEN;
    decayed.overrides = "*: wd=0.3";
    NamedRun run[5];
    const OptimConfig* const configs[5] = {&mixed, &wide, &wide, &plain, &decayed};
    const float rates[5] = {0.01f, 0.005f, 0.0025f, 0.01f, 0.01f};
    const int same[NAMED] = {1, 1, 3, 4, 2};  // which run a tensor of the mixed one equals
    for (int r = 0; r < 5; r++) {
        named_open(&run[r], configs[r], false);
        named_steps(&run[r], rates[r], 1, 5);
    }
    for (int t = 0; t < NAMED; t++) {
        for (int r = 1; r < 5; r++) {
            // Without decay in both, tensors of equal settings agree with one more run.
            bool may = r == same[t];
            expect(same_tensor(&run[0], &run[r], t) == may, "%s and run %d", named[t], r);
        }
    }
    // Memory: moments of three tensors are fp32, of two bf16; the arena is no larger.
    OptimBytes plan = optim_bytes(&mixed, run[0].tensor, NAMED, OPTIM_FP32), real = optim_allocated(run[0].optim);
    int64_t padded = run[0].elements / NAMED;
    expect(memcmp(&plan, &real, sizeof(plan)) == 0, "planned and allocated");
    expect(plan.states == 2 * (3 * 4 + 2 * 2) * padded, "%lld", (long long)plan.states);
    const char* const names[] = {"weights", "m", "v", "m.1[wpe|ln*]", "v.1[wpe|ln*]"};
    expect(optim_stream_count(run[0].optim) == 5, "%d streams", optim_stream_count(run[0].optim));
    for (int s = 0; s < 5; s++) expect(is(optim_stream(run[0].optim, s).name, names[s]), "%s", names[s]);
    expect(optim_stream(run[0].optim, 3).elements == 3 * padded, "the wide moments");
    for (NamedRun& each : run) named_close(&each);
}

// What the matmuls see of a tensor is what is stored of it, rounded to their type.
static void expect_seen(Test* test, const NamedRun* run, OptimType compute) {
    static float want[NAMED_LENGTH];
    for (int t = 0; t < NAMED; t++) {
        optim_get_weights(run->optim, t, want);
        for (int i = 0; i < NAMED_LENGTH; i++) {
            int64_t at = run->tensor[t].offset + i;
            float seen = compute == OPTIM_FP32 ? ((const float*)optim_weights(run->optim))[at]
                                               : to_float(((const bf16*)optim_weights(run->optim))[at]);
            float rounded = compute == OPTIM_FP32 ? want[i] : to_float(from_float<bf16>(want[i]));
            if (seen == rounded) continue;
            expect(false, "%s, element %d: %g is seen of %g", named[t], i, (double)seen, (double)want[i]);
            break;
        }
    }
}

// Weights of two more formats, one of them with a master. Formats that round to nearest, as above.
TEST(override_weights_do_what_whole_runs_do) {
    for (OptimType compute : {OPTIM_FP32, OPTIM_BF16}) {
        for (const char* base : {"fp32", "bf16", "e4m3"}) {
            OptimConfig config[4];
            for (OptimConfig& each : config) each = make_config("adamw", base, "fp32");
            config[0].overrides = "ln*: weights=bf16+fp32; wpe: weights=bf16+8 m=bf16; *.bias: m=bf16";
            config[1].weights = "bf16+fp32";
            config[2].weights = "bf16+8", config[2].m = "bf16";
            NamedRun run[4];
            for (int r = 0; r < 4; r++) {
                named_open(&run[r], &config[r], false, compute);
                named_steps(&run[r], 0.01f, 1, 5);
                expect_seen(test, &run[r], compute);
            }
            for (int t = 0; t < 3; t++) {
                const int same[] = {2, 1, 3};  // which run a tensor of the mixed one equals
                for (int r = 1; r < 4; r++) {
                    expect(same_tensor(&run[0], &run[r], t) == (r == same[t]), "%s: %s and run %d", base, named[t], r);
                }
            }
            OptimBytes plan = optim_bytes(&config[0], run[0].tensor, NAMED, compute);
            OptimBytes real = optim_allocated(run[0].optim);
            expect(memcmp(&plan, &real, sizeof(plan)) == 0, "%s: planned and allocated", base);
            int weights = 0, masters = 0;
            for (int s = 0; s < optim_stream_count(run[0].optim); s++) {
                OptimStream stream = optim_stream(run[0].optim, s);
                weights += stream.is_weights;
                masters += is(stream.name, "weights.2[ln*].master");
            }
            expect(weights == 3 && masters == 1, "%s: %d formats of weights, %d masters", base, weights, masters);
            for (NamedRun& each : run) named_close(&each);
        }
    }
}

static const char* const STORED_APART =
    "ln*: weights=bf16:sr; wpe: weights=fp32 m=bf16:sr; *.bias: weights=bf16+8 wd=0.1";

static void resume_to_the_bit(Test* test, const char* weights, const char* overrides) {
    OptimConfig config = make_config("ademamix", weights, "bf16:sr");
    config.overrides = overrides;
    NamedRun whole, first, second;
    for (NamedRun* run : {&whole, &first, &second}) named_open(run, &config, false);
    named_steps(&whole, 0.01f, 1, 8);
    named_steps(&first, 0.01f, 1, 3);
    for (int s = 0; s < optim_stream_count(first.optim); s++) {
        OptimStream from = optim_stream(first.optim, s), to = optim_stream(second.optim, s);
        memcpy(to.data, from.data, (size_t)(from.elements * from.element_bytes));
    }
    named_steps(&second, 0.01f, 4, 8);
    for (int t = 0; t < NAMED; t++) expect(same_tensor(&whole, &second, t), "%s", named[t]);
    for (int s = 0; s < optim_stream_count(whole.optim); s++) {
        OptimStream a = optim_stream(whole.optim, s), b = optim_stream(second.optim, s);
        expect(memcmp(a.data, b.data, (size_t)(a.elements * a.element_bytes)) == 0, "%s", a.name);
    }
    for (NamedRun* run : {&whole, &first, &second}) named_close(run);
}

TEST(override_resume_to_the_bit) {
    resume_to_the_bit(test, "bf16:sr", OVERRIDDEN);
    resume_to_the_bit(test, "e4m3:sr", STORED_APART);
    resume_to_the_bit(test, "e4m3:sr", "*: weights=bf16+8");  // none is left in the configuration's own
}

// Arrays are named by the override that asked for them.
TEST(override_names) {
    OptimConfig config = make_config("adamw", "bf16:sr", "fp32");
    config.overrides = "ln*: weights=lin8:sr; ln_1: m=bf16";
    NamedRun run;
    named_open(&run, &config, false);
    const char* const names[] = {"weights",   "m",         "v",        "weights.1[ln*]", "weights.1[ln*].scales",
                                 "m.1[ln_1]", "v.1[ln_1]", "m.2[ln*]", "v.2[ln*]"};
    expect(optim_stream_count(run.optim) == 9, "%d streams", optim_stream_count(run.optim));
    for (int s = 0; s < 9; s++)
        expect(is(optim_stream(run.optim, s).name, names[s]), "%s", optim_stream(run.optim, s).name);
    named_close(&run);
}

static void overrides_on_gpu(Test* test) {
    const struct {
        const char *weights, *overrides;
        OptimType compute;
    } rows[] = {{"bf16+8:sr", OVERRIDDEN, OPTIM_FP32},
                {"bf16+8:sr", "wpe: m=bf16; ln_f: v=bf16; *.bias: m=fp32 v=fp32", OPTIM_FP32},
                {"bf16+8:sr", "*: m=bf16 v=bf16 lr=3", OPTIM_FP32},
                {"e4m3:sr", STORED_APART, OPTIM_FP32},
                {"e4m3:sr", STORED_APART, OPTIM_BF16},
                {"bf16:sr", "wpe: weights=lin8:sr; ln*: weights=fp32", OPTIM_BF16},
                // The numbers of one array of spans are those of two launches.
                {"fp32",
                 "wpe: weights=e4m3/tensor+fp32 m=fp32; ln*: weights=e4m3/tensor+fp32 m=e4m3/tensor; *.bias: "
                 "v=e4m3/tensor",
                 OPTIM_BF16}};
    for (const auto& row : rows) {
        const char* text = row.overrides;
        OptimConfig config = make_config("adamw", row.weights, "bf16:sr");
        config.overrides = text;
        NamedRun run[2];
        for (int r = 0; r < 2; r++) {
            named_open(&run[r], &config, r == 1, row.compute);
            named_steps(&run[r], 0.01f, 1, 20);
        }
        int64_t seen = run[0].elements * (row.compute == OPTIM_FP32 ? 4 : 2);
        char* host = (char*)malloc((size_t)seen);
        copy_to_host(&run[1].dev, host, optim_weights(run[1].optim), seen);
        expect(memcmp(optim_weights(run[0].optim), host, (size_t)seen) == 0, "%s: what is seen", text);
        free(host);
        for (int s = 0; s < optim_stream_count(run[0].optim); s++) {
            OptimStream a = optim_stream(run[0].optim, s), b = optim_stream(run[1].optim, s);
            int64_t bytes = a.elements * a.element_bytes;
            char* copy = (char*)malloc((size_t)bytes);
            copy_to_host(&run[1].dev, copy, b.data, bytes);
            expect(memcmp(a.data, copy, (size_t)bytes) == 0, "%s: %s", text, a.name);
            free(copy);
        }
        for (NamedRun& each : run) named_close(&each);
    }
}

TEST(override_equal_cpu_gpu) {
    if (!jit_available()) skip("libnvrtc was not found");
    with_empty_cache(test, overrides_on_gpu);
}
