// Tests of Newton-Schulz's symmetric form against the plain one, and of the products it is made of.
#include "newton_schulz.h"
#include "kernels.h"
#include "tensor_cores.h"

constexpr int FORMS = 6;
static const int form_rows[FORMS] = {32, 17, 96, 24, 40, 12}, form_cols[FORMS] = {32, 75, 40, 96, 40, 13};

// Noise; of shape 4 on a strong direction, so that small singular values grow most.
static void form_fill(Dense* x, int shape) {
    x->rows = form_rows[shape], x->cols = form_cols[shape];
    for (int i = 0; i < x->rows * x->cols; i++) {
        const double noise = test_uniform(9, shape * 10000 + i);
        x->x[i] = shape == 4 ? 1.0 + 0.01 * noise : noise;
    }
}

static OptimConfig form_config(const char* coefficients, int64_t steps) {
    OptimConfig config = {};
    config.ns_coefficients = coefficients, config.ns_steps = steps;
    return config;
}

// Makes x, divided by its norm, orthogonal in fp32, by the plain form or else by the symmetric one.
static void form_fp32(const OptimConfig* config, const Dense* given, bool plain, Dense* result) {
    static float x[MOST], y[MOST], squares[4 * 96 * 96];  // the symmetric form has polar_squares of these
    const Device dev = {};
    *result = *given;
    normalise(result);
    const int n = given->rows * given->cols, side = given->rows < given->cols ? given->rows : given->cols;
    for (int i = 0; i < n; i++) x[i] = (float)result->x[i];
    const float* got = plain ? newton_schulz_plain<float>(&dev, config, x, y, squares, squares + side * side,
                                                          given->rows, given->cols, 1)
                             : newton_schulz_symmetric<float>(config, symmetric_product_cpu, x, y, squares, given->rows,
                                                              given->cols, 1, 1.0f, given->rows != given->cols);
    for (int i = 0; i < n; i++) result->x[i] = (double)got[i];
}

static double distance(const Dense* a, const Dense* b) {
    double sum = 0.0;
    for (int i = 0; i < a->rows * a->cols; i++) sum += pow(a->x[i] - b->x[i], 2);
    return sqrt(sum);
}

// In fp32 both forms are as near to each other as the plain one's bound is wide; eight steps have three stretches.
TEST(newton_schulz_forms_agree) {
    static Dense given, plain, symmetric, exact;
    double worst = 0.0, share = 0.0;
    for (const char* coefficients : {"jordan", "polar-express"}) {
        for (int64_t steps : {1, 2, 3, 5, 8}) {
            const OptimConfig config = form_config(coefficients, steps);
            for (int shape = 0; shape < FORMS; shape++) {
                form_fill(&given, shape);
                form_fp32(&config, &given, true, &plain);
                form_fp32(&config, &given, false, &symmetric);
                exact = given;
                const double bound = reference_polar(&config, &exact, ldexp(1.0, -24));
                const double off = distance(&plain, &symmetric) / bound;
                expect(off <= 1.0 && off > 0.0, "%s, %d steps, %d x %d: %g of the bound", coefficients, (int)steps,
                       given.rows, given.cols, off);
                worst = fmax(worst, off), share = fmax(share, steps <= 5 ? bound / frobenius(&exact) : 0.0);
            }
        }
    }
    expect(share < 0.5, "the bound tells nothing: %g of the result", share);
    note(test, "%.2g of the bound, which is at most %.2g of the result", worst, share);
}

// Rounding to fp16 where a GPU rounds: in the root of the mean square, closer to the exact result than an eighth of it.
TEST(newton_schulz_in_fp16) {
    static Dense exact, rounded;
    double off = 0.0;
    for (const char* coefficients : {"jordan", "polar-express"}) {
        const OptimConfig config = form_config(coefficients, 5);
        for (int shape = 0; shape < FORMS; shape++) {
            form_fill(&exact, shape);
            rounded = exact;
            reference_symmetric(&config, &exact, false);
            reference_symmetric(&config, &rounded, true);
            off = fmax(off, distance(&exact, &rounded) / frobenius(&exact));
        }
    }
    expect(off <= 0.125 && off > 1e-4, "%g of the result", off);
    note(test, "%.2g of the result", off);
}

// A launch's tiles are each square of 128 that it must compute, once, and no other.
TEST(symmetric_tiles_are_each_square_once) {
    static int seen[2][40][80];
    const int64_t sizes[][3] = {{768, 768, 1},  {1600, 1600, 1}, {128, 128, 1},  {136, 136, 1}, {520, 520, 1},
                                {768, 3072, 0}, {1600, 1600, 0}, {3072, 768, 0}, {8, 8, 0},     {648, 392, 0}};
    for (const auto& size : sizes) {
        const SymmetricProduct p = {size[0], size[1], 512, false, true, 1.0f, 0.0f, 0.0f, size[2] != 0, 2};
        const SymmetricShape s = symmetric_shape(&p);
        const int tiles = (s.whole + s.half) * 2, down = (s.rows + 127) / 128, across = (s.columns + 127) / 128;
        memset(seen, 0, sizeof(seen));
        for (int k = 0; k < tiles; k++) {
            const SymmetricTile t = symmetric_tile(k, s);
            for (int i = 0; i < (t.half ? 1 : 2); i++) seen[t.matrix][t.row / 128][t.column / 128 + i]++;
        }
        for (int i = 0; i < 2 * down * across; i++) {
            const int row = i / across % down, column = i % across;
            const int times = seen[i / (down * across)][row][column];
            expect(times == (!p.symmetric || column <= row), "%lld x %lld: square %d, %d is there %d times",
                   (long long)size[0], (long long)size[1], row, column, times);
        }
    }
}

// Plain C: what is above the diagonal mirrors what is below, and gamma is on the diagonal.
TEST(symmetric_product_mirrors) {
    const float a[] = {1, 2, 3, 4}, b[] = {5, 6, 7, 8}, c[] = {1, 1, 1, 1};
    float d[4];
    const SymmetricProduct p = {2, 2, 2, false, true, 2.0f, 3.0f, 10.0f, true, 1};
    symmetric_product_cpu(&p, d, a, b, c);  // a b^T = 17 23; 39 53
    const float want[] = {47, 81, 81, 119};
    expect(memcmp(d, want, sizeof(d)) == 0, "%g %g %g %g", (double)d[0], (double)d[1], (double)d[2], (double)d[3]);
}

#ifdef __CUDACC__
constexpr int64_t BATCH = 3;

// Rounds `host` to half precision, and returns a copy of it on the device.
static __half* halves_on(Room* room, float* host, int64_t n) {
    __half* bits = room->host<__half>(n);
    for (int64_t i = 0; i < n; i++) bits[i] = __float2half_rn(host[i]), host[i] = __half2float(bits[i]);
    return room->to_device(bits, n);
}

// The library's way rounds diagonals to fp16 before gamma is added and once more after: by 2^-11 of the largest without
// gamma, which may be far larger than what is left. What was checked becomes what is wanted.
static void check_diagonal(Test* test, double* worst, const SymmetricProduct* p, const char* what, float* got,
                           const float* want, double sums) {
    const int64_t side = p->rows < p->cols ? p->rows : p->cols, n = side * BATCH;
    Room room(nullptr);
    float *its = room.host<float>(n), *wanted = room.host<float>(n);
    double most = 0.0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = i / side * p->rows * p->cols + i % side * (p->cols + 1);
        its[i] = got[at], wanted[i] = want[at];
        got[at] = want[at];
        most = fmax(most, fabs((double)want[at] - (double)p->gamma));
    }
    close_to(test, worst, what, its, wanted, n, sums + most / 2048.0, 1.0 / 2048 + 4.0 * EPS32);
}

// One product of random operands; those of a symmetric result are one matrix and itself, or two symmetric ones.
static void check_symmetric_product(Test* test, const Device* dev, const SymmetricProduct* p, double* worst) {
    const int64_t n = p->rows * p->cols * BATCH, na = p->rows * p->depth * BATCH, nb = p->depth * p->cols * BATCH;
    Room room(dev);
    float *a = room.host<float>(na), *b = room.host<float>(nb), *c = room.host<float>(n);
    float *want = room.host<float>(n), *got = room.host<float>(n), *one = room.host<float>(n);
    for (int64_t i = 0; i < na; i++) a[i] = test_uniform(1, i);
    for (int64_t i = 0; i < nb; i++) b[i] = test_uniform(2, i);
    for (int64_t i = 0; i < n; i++) c[i] = test_uniform(3, i);
    for (int64_t i = 0; i < n && p->symmetric; i++) {
        const int64_t row = i / p->cols % p->rows, col = i % p->cols;
        if (col > row) c[i] = c[i + (col - row) * (p->cols - 1)];
    }
    __half *x = halves_on(&room, a, na), *y = p->symmetric ? x : halves_on(&room, b, nb), *z = halves_on(&room, c, n);
    __half* d = room.device<__half>(n);
    symmetric_product_cpu(p, want, a, p->symmetric ? a : b, c);
    SymmetricProduct alone = *p;
    alone.batch = 1;
    for (int run = 0; run < 2; run++) {
        check(cudaMemset(d, 0xff, (size_t)n * 2));
        symmetric_product(dev, run ? &alone : p, d, x, y, p->beta != 0.0f ? z : nullptr);
        device_sync(dev);
        const __half* bits = room.to_host(d, n);
        for (int64_t i = 0; i < n; i++) (run ? one : got)[i] = __half2float(bits[i]);
    }
    const char* what = formatted("%lld x %lld x %lld", (long long)p->rows, (long long)p->cols, (long long)p->depth);
    // Sums of products, the rounding of what is stored (2^-11 of it), and fp32's of the factors.
    const double sums = fabs((double)p->alpha) * (product_bound(p->depth, 1.0) +
                                                  tensor_core_bound(tensor_core(dev->compute), p->depth, 1.0)) +
                        4.0 * EPS32;
    expect(memcmp(got, one, (size_t)(n / BATCH) * sizeof(float)) == 0, "%s: alone it has other bits", what);
    if (!symmetric_product_fits(dev, p)) check_diagonal(test, worst, p, what, got, want, sums);
    close_to(test, worst, what, got, want, n, sums, 1.0 / 2048 + 4.0 * EPS32);
}

OPERATOR_TEST(symmetric_product_gpu) {
    const int64_t sizes[][2] = {{768, 768}, {520, 1288}, {1288, 520}, {456, 456}, {64, 512}, {776, 1024}};
    for (const auto& size : sizes) {
        const bool tall = size[0] > size[1];
        const int64_t side = tall ? size[1] : size[0], depth = tall ? size[0] : size[1];
        const SymmetricProduct products[] = {
            {side, side, depth, tall, !tall, 1.0f, 0.0f, 0.0f, true, BATCH},
            {side, side, depth, false, true, 0.3f, -0.7f, 1.5f, true, BATCH},
            {side, depth, side, false, false, 1.0f, 0.0f, 0.0f, false, BATCH},
            {depth, side, side, false, true, 1.0f, 0.0f, 0.0f, false, BATCH},
            {side, depth, side, false, false, 0.5f, 2.0f, 0.25f, false, BATCH},
        };
        // With few multiprocessors a block has several tiles, and sends one out while it multiplies the next.
        Device small = dev;
        small.sm_count = 5;
        for (const Device* on : {(const Device*)&dev, (const Device*)&small})
            for (const SymmetricProduct& p : products) check_symmetric_product(test, on, &p, &worst);
    }
}

#endif
