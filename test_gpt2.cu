// The tests: `make test`. This file holds the whole-model tests; dev/unit/ holds the runner and the tests of the
// operators, the optimizer, the data files and the command line.
//
// Gradients are compared tensor by tensor: the norm of the difference over the norm of the tensor, as a multiple of
// gradient_bound(). The exact values come from PyTorch (dev/reference/golden.safetensors); at other shapes the fp32 CPU
// path, which that file vouches for, is the reference.
#define TESTING
#include "train_gpt2.cu"
#include "dev/unit/files.h"
#include "dev/unit/tensors.h"
#include "optim/made.h"
#include "optim/model/model.h"

#include <malloc.h>
#include <vector>

typedef std::vector<float> Floats;
typedef std::vector<char> Bytes;

enum Recompute { RECOMPUTE_NONE, RECOMPUTE_GELU, RECOMPUTE_BLOCK };

// The choices that make a test's model.
struct Setup {
    Gpt2Shape shape;
    int B, T;
    OptimType type;
    bool grads_bf16;
    Recompute recompute;
    int64_t logit_rows;  // 0: all
    const char *weights, *m, *v;
    bool keeps_copy = false;  // of the weights in the compute type, instead of decoding them a part at a time
    bool spills = false;      // the residual stream is in host memory
    bool fp8 = false;
    int kept_blocks = 1;  // with RECOMPUTE_BLOCK
    const char *preset = "adamw32", *rule = "adamw";
};

static OptimConfig setup_optim(const Setup* s) {
    OptimConfig config = {{}, s->preset, s->rule, s->weights, s->grads_bf16 ? "bf16" : "fp32", s->m, s->v, 7};
    if (!optim_resolve(&config, error)) user_error("%s", error);
    config.keeps_copy = s->keeps_copy;
    return config;
}

static void model_shape(Model* m, const Device* dev, const Setup* s) {
    *m = {};
    m->dev = dev;
    m->shape = s->shape;
    m->B = s->B, m->T = s->T;
    m->arena.type = s->type, m->arena.grads_bf16 = s->grads_bf16;
    m->recomputes_gelu = s->recompute == RECOMPUTE_GELU;
    m->recomputed = s->recompute == RECOMPUTE_BLOCK ? (int)s->shape.L - s->kept_blocks : 0;
    m->spills = s->spills;
    m->uses_fp8 = m->head_fp8 = s->fp8;
    m->logit_rows = s->logit_rows ? s->logit_rows : (int64_t)s->B * s->T;
    shape_tensors(m);
}

static void model_open(Model* m, const Device* dev, const Setup* s) {
    OptimConfig config = setup_optim(s);
    model_shape(m, dev, s);
    arena_spread(&m->arena, &config);
    config.keeps_copy = s->keeps_copy;
    model_allocate(m, &config);
}

// A model that goes with its scope.
struct TestModel : Model {
    TestModel() : Model() {}
    TestModel(const Device* on, const Setup* s) : Model() { model_open(this, on, s); }
    TestModel(const TestModel&) = delete;
    ~TestModel() {
        if (dev) model_free(this);
    }
};

// A run of the model in `folder`, whose checkpoints it writes. There is one at a time.
static Run* run_of(Model* m, const Setup* setup, const char* folder) {
    static Options options;
    static Run run;
    options_defaults(&options);
    options.rule = "adamw", options.weights = setup->weights, options.m = setup->m, options.v = setup->v;
    run = {};
    run.options = &options, run.asked = options, run.config = setup_optim(setup), run.model = m;
    run.folder.quiet = true, run.folder.options = &options, run.folder.state.best_val = INFINITY;
    snprintf(run.folder.path, sizeof(run.folder.path), "%s", folder);
    return &run;
}

// Feeds one micro-batch from host memory, (B, T) each, with order and buckets as data/loader.h describes them.
static void feed(Model* m, const int* tokens, const int* targets, bool first, float share) {
    const int n = m->B * m->T;
    std::vector<int> order(n), bucket(2 * (n + 1));
    m->input.buckets = list_by_token(tokens, n, m->shape.V, order.data(), bucket.data());
    copy_to_device(m->dev, m->input.tokens, tokens, n * sizeof(int));
    copy_to_device(m->dev, m->input.targets, targets, n * sizeof(int));
    copy_to_device(m->dev, m->input.order, order.data(), n * sizeof(int));
    copy_to_device(m->dev, m->input.bucket, bucket.data(), 2 * (m->input.buckets + 1) * sizeof(int));
    micro_batch(m, m->B, true, first, share);
    device_sync(m->dev);
}

static float scalar(const Model* m, int i) {
    float value;
    copy_to_host(m->dev, &value, m->scalars + i, sizeof(value));
    return value;
}

// A step with the gradients that are there.
static void update(Model* m, float lr, float clip, int64_t step) {
    arena_begin(&m->arena, m->scalars, clip, lr, step);
    arena_step(&m->arena);
}

// Returns the arena of gradients as fp32 in host memory.
static Floats gradients(const Model* m) {
    Floats values(m->arena.elements);
    if (!m->arena.grads_bf16) {
        copy_to_host(m->dev, values.data(), m->arena.grads, m->arena.elements * 4);
        return values;
    }
    std::vector<bf16> rounded(m->arena.elements);
    copy_to_host(m->dev, rounded.data(), m->arena.grads, m->arena.elements * 2);
    for (int64_t i = 0; i < m->arena.elements; i++) values[i] = to_float(rounded[i]);
    return values;
}

// Error of a gradient relative to its tensor's norm. fp32: a sum of n terms is off by about sqrt(n) roundings of 2^-24;
// n adds up along the longest path, in each block forward and backward the two layernorms and four matrices (9C) and
// attention (HS + T), then the head and the rows of a weight's gradient. bf16: every activation and its gradient is
// rounded (2^-9) when it is stored, ten each way in a block and six outside. The roundings do not correlate, hence the
// root. The factors are for what subtractions (layernorm, softmax minus target) lose.
static double gradient_bound(const Gpt2Shape* c, int rows, int T, OptimType type) {
    double sums = 2.0 * c->L * (9.0 * c->C + c->C / c->NH + T) + 2.0 * c->C + c->V + rows;
    double roundings = 20.0 * c->L + 6.0;
    return type == OPTIM_FP32 ? 2.0 * ldexp(sqrt(sums), -24) : 4.0 * ldexp(sqrt(roundings), -9);
}

// Errors of logits of order 1, independent from row to row, in a mean over the rows; then 2^-22 of the sum itself.
static double loss_bound(double gradient_bound, int rows, double loss) {
    return gradient_bound / sqrt((double)rows) + ldexp(loss, -22);
}

static void note_multiple(Test* test, const char* what, double multiple) {
    note(test, "%s%s %.2f", test->note[0] ? "" : "of bound: ", what, multiple);
}

static double expect_loss(Test* test, const char* what, double got, double want, double bound) {
    double multiple = fabs(got - want) / bound;
    expect(multiple <= 1.0, "%s: loss %.9g, want %.9g: %.2f times the bound", what, got, want, multiple);
    return multiple;
}

// Norm of the difference over norm of `want`, as a multiple of the bound.
static double expect_norm(Test* test, const char* what, const char* name, const float* got, const float* want,
                          int64_t n, double bound) {
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        difference += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        norm += (double)want[i] * want[i];
    }
    double multiple = sqrt(difference) / (bound * sqrt(norm));
    expect(norm > 0, "%s: %s is all zeros: nothing is compared", what, name);
    expect(multiple <= 1.0, "%s: %s differs by %.3g of its norm: %.2f times the bound", what, name,
           sqrt(difference / norm), multiple);
    return isnan(multiple) ? INFINITY : multiple;
}

// Both arenas in fp32; returns and notes the worst tensor's multiple of the bound.
static void expect_gradients(Test* test, const char* what, const Model* m, const Floats& got, const Floats& want,
                             double bound) {
    double worst = 0;
    for (int t = 0; t < m->arena.count; t++) {
        const OptimTensor* tensor = &m->arena.tensors[t];
        double multiple = expect_norm(test, what, tensor->name, &got[tensor->offset], &want[tensor->offset],
                                      tensor->rows * tensor->cols, bound);
        if (multiple > worst) worst = multiple;
    }
    note_multiple(test, what, worst);
    const OptimTensor* wte = &m->arena.tensors[WTE];
    double padding = 0;
    for (int64_t i = (int64_t)m->shape.V * wte->cols; i < wte->rows * wte->cols; i++) {
        padding += fabs(got[wte->offset + i]);
    }
    expect(padding == 0, "%s: the padding of the vocabulary has a gradient", what);
}

// The golden file: a small GPT-2 with loss, gradients and five AdamW steps as PyTorch computes them in float64.

static const char GOLDEN[] = "dev/reference/golden.safetensors";
static const Gpt2Shape GOLDEN_SHAPE = {2, 128, 2, 32, 250, 256};
constexpr int GOLDEN_B = 2, GOLDEN_T = 24;

static double golden_double(const Safetensors* file, const char* name, int i) {
    double value;
    const void* data = tensor_data(file, safetensors_find(file, name));
    memcpy(&value, (const char*)data + i * sizeof(double), sizeof(double));
    return value;
}

// A folder whose model.safetensors is a link to the golden file. That holds the weights among the rest, so model_init,
// which refuses a rest, is gone round.
static void golden_weights(Model* m) {
    Safetensors files;
    if (!safetensors_open(&files, GOLDEN, error)) user_error("%s", error);
    for (int t = 0; t < m->arena.count; t++) {
        Floats values(m->arena.tensors[t].rows * m->arena.tensors[t].cols);
        require(model_folder_read(&files, &m->stored[t], values.data(), error), error);
        arena_set(&m->arena, t, values.data());
    }
    if (m->arena.optim) optim_decode(m->arena.optim);
    safetensors_close(&files);
}

// The gradient of a tensor as stored in the file, transposed to the arena's (out, in). False when the file leaves it
// out.
static bool golden_gradient(const Safetensors* file, const Model* m, int t, float* values) {
    const OptimTensor* tensor = &m->arena.tensors[t];
    const char* name = formatted("grad.transformer.%s", tensor->name);
    const SafetensorsTensor* found = safetensors_find(file, name);
    if (!found) return false;
    int64_t rows = t == WTE ? m->shape.V : tensor->rows, cols = tensor->cols;
    bool transposed = tensor->rows > 1 && strstr(tensor->name, ".c_");
    const float* data = (const float*)tensor_data(file, found);
    for (int64_t i = 0; i < rows * cols; i++) {
        int64_t at = transposed ? i % cols * rows + i / cols : i;
        memcpy(values + i, data + at, sizeof(float));
    }
    return true;
}

static void check_golden(Test* test, const Device* dev, OptimType type, bool grads_bf16) {
    Safetensors file;
    expect(safetensors_open(&file, GOLDEN, error), "%s", error);
    Setup setup = {GOLDEN_SHAPE, GOLDEN_B, GOLDEN_T, type, grads_bf16, RECOMPUTE_NONE, 0, "fp32", "fp32", "fp32"};
    constexpr int N = GOLDEN_B * GOLDEN_T;
    int tokens[N], targets[N];
    memcpy(tokens, tensor_data(&file, safetensors_find(&file, "golden.tokens")), sizeof(tokens));
    memcpy(targets, tensor_data(&file, safetensors_find(&file, "golden.targets")), sizeof(targets));
    TestModel m(dev, &setup);
    golden_weights(&m);
    const char* what = type == OPTIM_FP32 ? "fp32" : grads_bf16 ? "bf16" : "bf16 with fp32 gradients";
    double bound = gradient_bound(&m.shape, N, GOLDEN_T, type), want = golden_double(&file, "golden.loss", 0),
           worst = 0;
    double losses = loss_bound(bound, N, want);
    feed(&m, tokens, targets, true, 1.0f);
    note_multiple(test, "loss", expect_loss(test, what, scalar(&m, 0), want, losses));
    Floats got = gradients(&m), stored(m.arena.elements);
    int compared = 0;
    for (int t = 0; t < m.arena.count; t++) {
        if (!golden_gradient(&file, &m, t, stored.data())) continue;
        int64_t n = (t == WTE ? m.shape.V : m.arena.tensors[t].rows) * m.arena.tensors[t].cols;
        double multiple =
            expect_norm(test, what, m.arena.tensors[t].name, &got[m.arena.tensors[t].offset], stored.data(), n, bound);
        if (multiple > worst) worst = multiple;
        compared++;
    }
    note_multiple(test, what, worst);
    expect(compared == 23, "%d gradients in %s, want 23", compared, GOLDEN);
    // AdamW's first steps have the size of lr whatever the gradient's, so an error of the gradient turns a step's
    // direction. The errors of the parameters do not correlate and change the loss less than those of the logits do:
    // each step adds at most as much as the first loss may be off by.
    double first = golden_double(&file, "golden.losses", 0), fall = first - golden_double(&file, "golden.losses", 4);
    for (int step = 1; step <= 5 && type == OPTIM_FP32; step++) {
        if (step > 1) feed(&m, tokens, targets, true, 1.0f);
        double after = golden_double(&file, "golden.losses", step - 1);
        double multiple = expect_loss(test, "AdamW", scalar(&m, 0), after, step * losses);
        if (step == 5) note_multiple(test, "AdamW", multiple);
        update(&m, 1e-3f, 1.0f, step);
        double norm = golden_double(&file, "golden.grad_norm", 0);
        expect(step > 1 || fabs(scalar(&m, 1) - norm) <= bound * norm, "norm %.9g, want %.9g", scalar(&m, 1), norm);
    }
    expect(fall > 0.1, "the golden losses fall by %g", fall);
}

TEST_BOTH(model_golden) {
    Device dev = test_device(gpu);
    check_golden(test, &dev, OPTIM_FP32, false);
    for (bool grads_bf16 : {false, true}) {
        if (gpu) check_golden(test, &dev, OPTIM_BF16, grads_bf16);
    }
}

// A small model at the usual initial weights, four sequences of random tokens.

constexpr int SMALL_B = 4;
struct Small {
    Gpt2Shape shape;
    int T;
};
static const Small SMALL[] = {
    {{2, 128, 2, 48, 300, 384}, 33}, {{2, 256, 2, 80, 200, 256}, 64}, {{1, 192, 3, 140, 257, 384}, 139}};

// Returns the gradient and, in *loss, the mean loss of SMALL_B sequences in micro-batches of s->B.
static Floats small_gradients(const Device* dev, const Setup* s, double* loss) {
    int n = SMALL_B * s->T;
    std::vector<int> tokens(n), targets(n);
    for (int i = 0; i < n; i++) {
        // Small tokens often, as in text: some buckets are long, most are empty.
        float a = test_uniform(3, i), b = test_uniform(4, i);
        tokens[i] = (int)(fabsf(a * a * a) * (float)s->shape.V);
        targets[i] = (int)((b * 0.5f + 0.5f) * (float)s->shape.V);
    }
    TestModel m(dev, s);
    model_init(&m, 11);
    for (int b = 0; b < SMALL_B; b += s->B) {
        feed(&m, &tokens[b * s->T], &targets[b * s->T], b == 0, (float)s->B / SMALL_B);
    }
    *loss = scalar(&m, 0);
    return gradients(&m);
}

static Setup small_setup(const Small* small, OptimType type, bool grads_bf16) {
    return {small->shape, SMALL_B, small->T, type, grads_bf16, RECOMPUTE_NONE, 0, "fp32", "fp32", "fp32"};
}

// Loss and gradients of one way to compute against another's.
static void check_against(Test* test, const char* what, const Device* dev, const Setup* s, const Floats& want,
                          double want_loss, double bound) {
    double loss;
    TestModel shape;
    Floats got = small_gradients(dev, s, &loss);
    model_shape(&shape, dev, s);
    expect_loss(test, what, loss, want_loss, loss_bound(bound, SMALL_B * s->T, want_loss));
    expect_gradients(test, what, &shape, got, want, bound);
}

// Micro-batches, recomputation and rows of logits at a time change the memory and not the result.
static void check_same_result(Test* test, const Device* dev, OptimType type) {
    for (const Small& small : SMALL) {
        Setup setup = small_setup(&small, type, false);
        double loss, other_loss, bound = gradient_bound(&small.shape, SMALL_B * small.T, small.T, type);
        Floats want = small_gradients(dev, &setup, &loss);
        for (Recompute recompute : {RECOMPUTE_GELU, RECOMPUTE_BLOCK}) {
            Setup other = setup;
            other.recompute = recompute;
            // In bf16 the forward pass takes GELU from cuBLASLt's epilogue and recomputation from gelu.cuh.
            if (dev->gpu && type == OPTIM_BF16 && recompute == RECOMPUTE_GELU) {
                check_against(test, "gelu again", dev, &other, want, loss, bound);
                continue;
            }
            expect(small_gradients(dev, &other, &other_loss) == want && loss == other_loss,
                   "recompute %d changes bits at T %d", recompute, small.T);
        }
        for (int B = 2; B >= 1; B--) {
            Setup other = setup;
            other.B = B;
            check_against(test, B == 2 ? "2 micro-batches" : "4", dev, &other, want, loss, bound);
        }
        Setup rows = setup;
        rows.logit_rows = 7;
        check_against(test, "7 rows", dev, &rows, want, loss, bound);
        for (int B = SMALL_B; B >= 1 && type == OPTIM_BF16; B /= 2) {
            Setup rounded = setup;
            rounded.B = B, rounded.grads_bf16 = true;
            check_against(test, "bf16 gradients", dev, &rounded, want, loss, bound);
        }
    }
}

TEST_BOTH(model_same_result) {
    Device dev = test_device(gpu);
    check_same_result(test, &dev, OPTIM_FP32);
    if (gpu) check_same_result(test, &dev, OPTIM_BF16);
}

TEST(model_cpu_gpu) {
    Device cpu = test_device(false), gpu = test_device(true);
    for (const Small& small : SMALL) {
        double loss;
        Setup setup = small_setup(&small, OPTIM_FP32, false);
        Floats want = small_gradients(&cpu, &setup, &loss);
        int rows = SMALL_B * small.T;
        check_against(test, "fp32", &gpu, &setup, want, loss, gradient_bound(&small.shape, rows, small.T, OPTIM_FP32));
        for (bool grads_bf16 : {false, true}) {
            setup = small_setup(&small, OPTIM_BF16, grads_bf16);
            check_against(test, grads_bf16 ? "bf16" : "bf16 with fp32 gradients", &gpu, &setup, want, loss,
                          gradient_bound(&small.shape, rows, small.T, OPTIM_BF16));
        }
    }
}

// Returns every stored stream of the optimizer, one after another, in host memory.
static Bytes streams(const Model* m) {
    Bytes all;
    for (int i = 0; i < m->arena.optim->stream_count; i++) {
        OptimStream stream = m->arena.optim->stream[i];
        const int64_t at = (int64_t)all.size(), size = stream.elements * stream.element_bytes;
        all.resize(at + size);
        copy_to_host(m->dev, all.data() + at, stream.data, size);
    }
    return all;
}

static const Setup TRAINED = {
    {2, 128, 2, 32, 256, 256}, 4, 31, OPTIM_FP32, false, RECOMPUTE_NONE, 50, "bf16:sr", "bf16:sr", "bf16:sr"};

// Opens a text of random words.
static void open_words(Dataset* data, int T) {
    constexpr int BYTES = 6000;
    static char text[BYTES];
    for (int i = 0; i < BYTES; i++) text[i] = i % 5 == 4 ? ' ' : (char)('a' + (int)(13 * (1 + test_uniform(9, i / 5))));
    if (!dataset_open_memory(data, text, BYTES, DATASET_TRAIN, 0.1, T, error)) user_error("%s", error);
}

// Takes steps on this text from initial weights, through the loader, and writes their losses.
static void train_words(Model* m, int steps, int micro_batches, float lr, float clip, float* losses) {
    Dataset data;
    Feeder feeder;
    model_init(m, 5);
    open_words(&data, m->T);
    feeder_open(&feeder, m->dev, &data, m->B, m->T, 3, true, 0);
    for (int step = 0; step < steps; step++) {
        train_step(m, &feeder, micro_batches, lr, clip, step + 1);
        losses[step] = scalar(m, 0);
    }
    feeder_close(&feeder);
    dataset_close(&data);
}

struct Trained {
    Floats losses;
    Bytes state;
};

// Does the same with a model that it opens; two micro-batches a step, or one where gradients are bf16.
static Trained train_small(Model* m, const Device* dev, const Setup* setup, int steps) {
    Floats losses(steps);
    model_open(m, dev, setup);
    train_words(m, steps, setup->grads_bf16 ? 1 : 2, 1e-3f, 1.0f, losses.data());
    return {losses, streams(m)};
}

static void expect_same_training(Test* test, const char* what, const Trained& a, const Trained& b) {
    expect(a.losses == b.losses, "%s: losses differ", what);
    expect(a.state == b.state, "%s: weights or states differ", what);
}

#include "dev/unit/skips.h"

// Initial weights.

static Floats weights_of(const Model* m) {
    Floats values(m->arena.elements);
    for (int t = 0; t < m->arena.count; t++) optim_get_weights(m->arena.optim, t, &values[m->arena.tensors[t].offset]);
    return values;
}

static Floats initial_weights(Model* m, const Device* dev, const Setup* setup, uint64_t seed) {
    model_open(m, dev, setup);
    model_init(m, seed);
    return weights_of(m);
}

static const Setup INITIAL = {
    {2, 128, 2, 64, 300, 384}, 2, 16, OPTIM_FP32, false, RECOMPUTE_NONE, 0, "fp32", "fp32", "fp32"};

// Mean 0 and deviation `sigma`, each within 5 deviations of its estimate; no value beyond 6 sigma.
static void expect_normal(Test* test, const char* name, const float* values, int64_t n, double sigma) {
    double sum = 0, squares = 0, largest = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += values[i], squares += (double)values[i] * values[i];
        if (fabs(values[i]) > largest) largest = fabs(values[i]);
    }
    double deviation = sqrt(squares / n);
    expect(fabs(sum / n) < 5 * sigma / sqrt((double)n), "%s: mean %g", name, sum / n);
    expect(fabs(deviation / sigma - 1) < 5 / sqrt(2.0 * n), "%s: deviation %g, want %g", name, deviation, sigma);
    expect(largest > 3 * sigma && largest < 6 * sigma, "%s: largest value %g", name, largest);
}

TEST(model_init) {
    Device dev = test_device(false);
    TestModel first, second, other;
    Floats values = initial_weights(&first, &dev, &INITIAL, 1), seeded = initial_weights(&other, &dev, &INITIAL, 2);
    expect(values == initial_weights(&second, &dev, &INITIAL, 1), "the same seed gives other bits");
    for (int t = 0; t < first.arena.count; t++) {
        const OptimTensor* tensor = &first.arena.tensors[t];
        const float *w = &values[tensor->offset], *o = &seeded[tensor->offset];
        int64_t n = (t == WTE ? first.shape.V : tensor->rows) * tensor->cols;
        for (int64_t i = n; i < tensor->rows * tensor->cols; i++) expect(w[i] == 0, "padding of wte is %g", w[i]);
        if (tensor->rows > 1) {
            bool residual = strstr(tensor->name, "c_proj") != nullptr;
            expect_normal(test, tensor->name, w, n, residual ? 0.02 / sqrt(2.0 * first.shape.L) : 0.02);
            int64_t same = 0;
            for (int64_t i = 0; i < n; i++) same += w[i] == o[i];
            expect(same < n / 1000, "%s: %lld of %lld values do not depend on the seed", tensor->name, (long long)same,
                   (long long)n);
            continue;
        }
        float want = strstr(tensor->name, "ln_") && strstr(tensor->name, "weight") ? 1.0f : 0.0f;
        for (int64_t i = 0; i < n; i++) expect(w[i] == want, "%s is %g, want %g", tensor->name, w[i], want);
    }
    // Two matrices of one shape have nothing in common.
    const float* a = &values[first.arena.tensors[FIRST_BLOCK + 4].offset];
    const float* b = &values[first.arena.tensors[FIRST_BLOCK + BLOCK_TENSORS + 4].offset];
    double product = 0, n = 128.0 * 128.0;
    for (int i = 0; i < 128 * 128; i++) product += (double)a[i] * b[i];
    expect(fabs(product) < 5 * 0.01 * 0.01 * sqrt(n), "c_proj of two blocks correlate: %g", product);
}

TEST(model_init_gpu) {
    Device cpu = test_device(false), gpu = test_device(true);
    for (const char* weights : {"fp32", "lin8:sr", "bf16+16", "e4m3/tensor+fp32"}) {
        Setup setup = INITIAL;
        setup.weights = weights;
        TestModel on_cpu, on_gpu;
        expect(initial_weights(&on_cpu, &cpu, &setup, 1) == initial_weights(&on_gpu, &gpu, &setup, 1),
               "%s: CPU and GPU begin with other bits", weights);
    }
}

// Steps with weights that are decoded a part at a time have the bits of those with a decoded copy of the whole model.
TEST_BOTH(model_decoded_parts) {
    const Device device = test_device(gpu), *dev = &device;
    const OptimType type = gpu ? OPTIM_BF16 : OPTIM_FP32;
    for (const char* weights : {"bf16:sr", "lin8:sr", "e4m3:sr", "fp32"}) {
        for (int way = 0; way < 4; way++) {
            const int layers = way < 2 ? 3 : 1;
            const Recompute recompute = way % 2 ? RECOMPUTE_BLOCK : RECOMPUTE_NONE;
            Setup setup = {{layers, 128, 2, 64, 128, 128}, 2, 64, type, false, recompute, 48, weights, "fp32", "fp32"};
            Trained got[2];
            for (int k = 0; k < 2; k++) {
                TestModel m;
                setup.keeps_copy = k == 0;
                got[k] = train_small(&m, dev, &setup, 4);
                expect((m.arena.decoded == nullptr) == (k == 0), "%s: %s", weights,
                       m.arena.decoded ? "decoded" : "a copy");
            }
            expect_same_training(test, weights, got[0], got[1]);
        }
    }
}

// With fp8, recomputed activations have the bits of kept ones. Two ways are tried: cuBLASLt's products, and our own
// next to GELU, which a GPU with one multiprocessor takes at this size. Their losses differ by less than a fifth of
// what these steps gain.
TEST_BOTH(model_fp8_recompute) {
    constexpr int STEPS = 6;
    Device dev = test_device(gpu);
    Floats first, losses;
    for (int way = 0; way < (gpu ? 2 : 1); way++) {
        if (way == 1) dev.sm_count = 1;
        for (Recompute recompute : {RECOMPUTE_NONE, RECOMPUTE_GELU, RECOMPUTE_BLOCK}) {
            Setup setup = {
                {2, 128, 2, 64, 128, 128}, 2, 64, OPTIM_FP32, false, recompute, 48, "bf16:sr", "fp32", "fp32"};
            setup.type = gpu ? OPTIM_BF16 : OPTIM_FP32;
            setup.fp8 = true, setup.spills = recompute == RECOMPUTE_BLOCK;
            TestModel m;
            const Floats own = train_small(&m, &dev, &setup, STEPS).losses;
            if (recompute == RECOMPUTE_NONE) losses = own;
            if (first.empty()) first = own;
            expect(own == losses, "way %d, recompute %d: other losses", way, recompute);
            for (int i = 0; i < STEPS; i++) {
                expect(fabsf(own[i] - first[i]) < 0.02f, "way %d, step %d: a loss of %g, not %g", way, i, own[i],
                       first[i]);
            }
        }
    }
    expect(first[STEPS - 1] < first[0] - 0.1f, "the loss goes from %g to %g", first[0], first[STEPS - 1]);
}

#include "dev/unit/plans.h"
#include "dev/unit/checkpoints.h"
