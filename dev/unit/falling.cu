// Test of how v falls in its formats: it rises at once with a large gradient, and falls by 1 - beta2 of itself a step,
// which to nearest may be lost each time. optim/README.md has the table; the loss of a training run, dev/compare.
#include <omp.h>

#include "rules.h"

constexpr int ROWS = 8, COLUMNS = 512, STEPS = 2000;
constexpr int64_t ELEMENTS = ROWS * COLUMNS;
static_assert(ELEMENTS % OPTIM_ALIGN == 0, "no padding");

static const char* const names[] = {
    "fp32",  "bf16",       "bf16:sr",      "udyn8", "udyn8:sr", "e4m3",         "e4m3:sr",         "e5m2",
    "sqrt8", "sqrt8@bf16", "sqrt8/32@dq8", "ulin8", "log8",     "log8:sr",      "log16",           "adalog8",
    "lin4",  "lin4/64",    "lin4/64@dq8",  "sqrt4", "sqrt4/64", "sqrt4/32@dq8", "sqrt4/32@dq8:sr", "sqrt4@bf16",
    "e2m1",  "e4m3/tensor"};
constexpr int NAMES = sizeof(names) / sizeof(names[0]);
static const float betas[] = {0.95f, 0.99f, 0.999f};

// As rows of embeddings have them: in a step of full size, a column's 1/4 to 4, with a probability of 1 to 1/1024 by
// row, else a hundredth of that.
static float sparse_gradient(int64_t step, int64_t i) {
    int64_t row = i / COLUMNS, column = i % COLUMNS;
    double often = ldexp(1.0, -(int)(row * 5 % ROWS * 3 / 2));
    bool full = fabs((double)test_uniform(31, step * ROWS + row)) < often;
    float size = ldexpf(full ? 1.0f : 0.01f, (int)(3.0f * test_uniform(32, column)));
    return size * test_uniform(33, step * ELEMENTS + i);
}

struct Fall {
    double mean, scatter;  // of the step over that of an fp32 v: geometric mean, standard deviation of the logarithm
};

static Fall fall_of(const Optim* optim, const Optim* reference) {
    float step[ELEMENTS], want[ELEMENTS];
    optim_get_weights(optim, 0, step);
    optim_get_weights(reference, 0, want);
    double sum = 0.0, squares = 0.0;
    for (int i = 0; i < ELEMENTS; i++) {
        double ratio = log((double)step[i] / (double)want[i]);
        sum += ratio, squares += ratio * ratio;
    }
    double mean = sum / ELEMENTS;
    return {exp(mean), sqrt(fmax(squares / ELEMENTS - mean * mean, 0.0))};
}

// Weights of zero and a learning rate of zero until the last step, of 1: what they are then is that step.
static void fall(const Device* dev, float beta2, Fall* falls) {
    Optim* optim[NAMES];
    OptimTensor tensor = {"wte.weight", ROWS, COLUMNS, false, 0};
    for (int k = 0; k < NAMES; k++) {
        OptimConfig config = {"fp32", "", "", "fp32", "", names[k], 0.9f, beta2, 1e-8f, 0.0f, 77};
        char error[4096];
        if (!optim_resolve(&config, error, sizeof(error))) printf("    %s\n", error), exit(1);
        optim_layout(&tensor, 1);
        optim[k] = optim_create(dev, &config, &tensor, 1, OPTIM_FP32);
    }
    float grads[ELEMENTS], one = 1.0f;
    for (int64_t step = 1; step <= STEPS; step++) {
        for (int64_t i = 0; i < ELEMENTS; i++) grads[i] = sparse_gradient(step, i);
        for (Optim* each : optim) optim_step(each, grads, &one, step < STEPS ? 0.0f : 1.0f, step);
    }
    for (int k = 0; k < NAMES; k++) falls[k] = fall_of(optim[k], optim[0]);
    for (Optim* each : optim) optim_free(each);
}

TEST(falling_is_as_readme_says) {
    Device dev;
    int threads = omp_get_max_threads();
    omp_set_num_threads(1);  // a step of two tiles is too short for more
    device_open(&dev, false, 0);
    Fall falls[3][NAMES];
    for (int b = 0; b < 3; b++) fall(&dev, betas[b], falls[b]);
    device_close(&dev);
    omp_set_num_threads(threads);

    char *text = read_text(test, "optim/README.md"), *table = nullptr;
    size_t bytes;
    FILE* to = open_memstream(&table, &bytes);
    fprintf(to, "\n\n| `--v` | beta2 %g | %g | %g |\n|---|---|---|---|\n", (double)betas[0], (double)betas[1],
            (double)betas[2]);
    for (int k = 1; k < NAMES; k++) {
        fprintf(to, "| `%s` |", names[k]);
        for (const Fall* of : {falls[0], falls[1], falls[2]}) fprintf(to, " %.2f (%.2f) |", of[k].mean, of[k].scatter);
        fprintf(to, "\n");
    }
    fprintf(to, "\n");
    fclose(to);
    expect(strstr(text, table), "optim/README.md does not say:\n%s", table);
    free(text), free(table);
}
