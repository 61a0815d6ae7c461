// Test of how v falls in its formats: it rises at once with a large gradient, and falls by 1 - beta2 of itself a step,
// which to nearest may be lost each time. The table is that of optim/README.md; dev/compare has the loss of training
// runs.
#include <omp.h>

#include "rules.h"

constexpr int ROWS = 8, COLUMNS = 512, STEPS = 2000, MOST = 26;  // MOST: rows of the table, and one
constexpr int64_t ELEMENTS = ROWS * COLUMNS;
static_assert(ELEMENTS % TILE_ELEMENTS == 0, "no padding");

// A row of the table: the size of a step, over that of an fp32 v, by beta2.
struct Row {
    char name[32];
    double fall[3][2];  // the geometric mean, and the standard deviation of the logarithm
};

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

// Weights of zero and a learning rate of zero until the last step, of 1: what they are then is that step. The first
// optimizer has a v of fp32.
static void fall(const Device* dev, float beta2, const Row* rows, int count, Fall* falls) {
    Optim* optim[MOST];
    OptimTensor tensor = {"wte.weight", ROWS, COLUMNS, false, 0};
    for (int k = 0; k <= count; k++) {
        const char* v = k ? rows[k - 1].name : "fp32";
        const OptimConfig config = resolved({"", "", "fp32", "fp32", "fp32", v, 0.9f, beta2, 1e-8f, 0.0f, 77});
        optim_layout(&tensor, 1);
        optim[k] = optim_create(dev, &config, &tensor, 1, OPTIM_FP32);
    }
    float grads[ELEMENTS], one = 1.0f;
    for (int64_t step = 1; step <= STEPS; step++) {
        for (int64_t i = 0; i < ELEMENTS; i++) grads[i] = sparse_gradient(step, i);
        for (int k = 0; k <= count; k++) optim_step(optim[k], grads, &one, step < STEPS ? 0.0f : 1.0f, step);
    }
    for (int k = 0; k < count; k++) falls[k] = fall_of(optim[k + 1], optim[0]);
    for (int k = 0; k <= count; k++) optim_free(optim[k]);
}

TEST(falling_is_as_recorded) {
    Row rows[MOST];
    int count = 0;
    const char* line = strstr(contents(test_folder(), "optim/README.md"), "**How v falls.**");
    for (; line && count < MOST; line = strchr(line + 1, '\n')) {
        Row* row = &rows[count];
        double(*f)[2] = row->fall;
        count += sscanf(line, "\n| `%31[^`]` | %lf (%lf) | %lf (%lf) | %lf (%lf)", row->name, f[0], f[0] + 1, f[1],
                        f[1] + 1, f[2], f[2] + 1) == 7;
    }
    expect(count == MOST - 1, "%d rows in optim/README.md", count);

    Device dev;
    int threads = omp_get_max_threads();
    omp_set_num_threads(1);  // a step of two tiles is too short for more
    device_open(&dev, false, 0);
    for (int b = 0; b < 3; b++) {
        Fall falls[MOST];
        fall(&dev, betas[b], rows, count, falls);
        for (int k = 0; k < count; k++) {
            const double *want = rows[k].fall[b], got[2] = {falls[k].mean, falls[k].scatter};
            expect(fabs(got[0] - want[0]) <= 0.005 + 1e-9 && fabs(got[1] - want[1]) <= 0.005 + 1e-9,
                   "%s, beta2 %g: %.3f (%.3f), and %.2f (%.2f) is recorded", rows[k].name, (double)betas[b], got[0],
                   got[1], want[0], want[1]);
        }
    }
    omp_set_num_threads(threads);
}
