// Test of how v falls in its formats: it rises at once with a large gradient, and falls by 1 - beta2 of itself a step,
// which to nearest may be lost each time. dev/results/falling.md has the table; dev/compare has losses of training.
#include <omp.h>

#include "rules.h"

constexpr int ROWS = 8, COLUMNS = 512, STEPS = 2000;
constexpr int64_t ELEMENTS = ROWS * COLUMNS;
static_assert(ELEMENTS % TILE_ELEMENTS == 0, "no padding");

// The size of a step, over that of an fp32 v, by beta2: the geometric mean, and the standard deviation of the
// logarithm.
static const struct {
    const char* name;
    double fall[3][2];
} rows[] = {
    {"fp32", {{1, 0}, {1, 0}, {1, 0}}},
    {"bf16", {{1.00, 0.00}, {0.98, 0.03}, {0.71, 0.22}}},
    {"bf16:sr", {{1.00, 0.01}, {1.00, 0.01}, {1.00, 0.02}}},
    {"udyn8", {{1.01, 0.05}, {1.03, 0.11}, {1.06, 0.22}}},
    {"udyn8:sr", {{1.00, 0.04}, {1.00, 0.05}, {1.00, 0.06}}},
    {"e4m3", {{1.01, 0.04}, {1.01, 0.15}, {1.05, 0.22}}},
    {"e4m3:sr", {{1.00, 0.05}, {1.01, 0.07}, {1.01, 0.08}}},
    {"e5m2", {{0.93, 0.16}, {1.07, 0.22}, {1.05, 0.24}}},
    {"sqrt8", {{1.01, 0.06}, {1.03, 0.12}, {1.05, 0.22}}},
    {"sqrt8/32@dq8", {{1.00, 0.08}, {0.86, 0.30}, {0.57, 0.51}}},
    {"ulin8", {{0.95, 0.28}, {1.01, 0.27}, {1.03, 0.21}}},
    {"adalog8", {{0.18, 1.11}, {0.33, 1.02}, {0.61, 0.63}}},
    {"lin4", {{0.58, 0.70}, {0.61, 0.66}, {0.64, 0.59}}},
    {"lin4/64", {{0.59, 0.68}, {0.62, 0.64}, {0.66, 0.58}}},
    {"lin4/64@dq8", {{0.56, 0.70}, {0.24, 1.05}, {0.33, 0.92}}},
    {"sqrt4", {{0.97, 0.33}, {1.03, 0.35}, {1.02, 0.28}}},
    {"sqrt4/64", {{0.97, 0.32}, {1.02, 0.34}, {1.01, 0.28}}},
    {"sqrt4/32@dq8", {{0.89, 0.34}, {0.28, 1.01}, {0.51, 0.70}}},
    {"sqrt4/32@dq8:sr", {{0.91, 0.50}, {0.88, 0.56}, {0.83, 0.60}}},
    {"e2m1", {{0.53, 0.71}, {0.57, 0.67}, {0.59, 0.62}}},
    {"e4m3/tensor", {{0.76, 0.51}, {0.27, 0.92}, {0.50, 0.61}}},
    {"e4m3/tensor:sr", {{0.91, 0.32}, {0.96, 0.27}, {0.99, 0.21}}},
    {"udyn8/rank1:sr", {{1.00, 0.04}, {1.00, 0.06}, {1.00, 0.06}}},
    {"lin4/rank1:sr", {{0.69, 0.57}, {0.74, 0.51}, {0.77, 0.47}}},
};
constexpr int NAMES = sizeof(rows) / sizeof(rows[0]);
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
        const OptimConfig config =
            resolved({"", "", "fp32", "fp32", "fp32", rows[k].name, 0.9f, beta2, 1e-8f, 0.0f, 77});
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

TEST(falling_is_as_recorded) {
    Device dev;
    int threads = omp_get_max_threads();
    omp_set_num_threads(1);  // a step of two tiles is too short for more
    device_open(&dev, false, 0);
    Fall falls[3][NAMES];
    for (int b = 0; b < 3; b++) fall(&dev, betas[b], falls[b]);
    omp_set_num_threads(threads);

    for (int k = 0; k < NAMES; k++) {
        for (int b = 0; b < 3; b++) {
            const double *want = rows[k].fall[b], got[2] = {falls[b][k].mean, falls[b][k].scatter};
            expect(fabs(got[0] - want[0]) <= 0.005 + 1e-9 && fabs(got[1] - want[1]) <= 0.005 + 1e-9,
                   "%s, beta2 %g: %.3f (%.3f), and %.2f (%.2f) was recorded", rows[k].name, (double)betas[b], got[0],
                   got[1], want[0], want[1]);
        }
    }
}
