// Tests of Newton-Schulz's symmetric form against the plain one, of the products it is made of, and of the plans of
// rules that read matrices.
#include "../../kernels/matmul_product.cuh"
#include "../../optim/placed.h"
#include "kernels.h"
#include "oracle.h"
#include "tensor_cores.h"

constexpr int FORMS = 6;
static const int form_rows[FORMS] = {32, 17, 96, 24, 40, 12}, form_cols[FORMS] = {32, 75, 40, 96, 40, 13};

// Noise; of shape 4 on a strong direction, so that small singular values grow most.
template <class R>
static Dense<R> form_of(int shape) {
    Dense<R> x(form_rows[shape], form_cols[shape]);
    for (int64_t i = 0; i < x.rows * x.cols; i++) {
        const double noise = test_uniform(9, shape * 10000 + i);
        x.x[i] = (R)(shape == 4 ? 1.0 + 0.01 * noise : noise);
    }
    return x;
}

static OptimConfig form_config(const char* coefficients, int64_t steps) {
    OptimConfig config = {};
    config.ns_coefficients = coefficients, config.ns_steps = steps;
    return config;
}

// Makes a shape's matrix, divided by its norm, orthogonal in fp32, by the plain form or else by the symmetric one.
static std::vector<float> form_fp32(const OptimConfig* config, int shape, bool plain) {
    const Device dev = {};
    Dense<float> given = form_of<float>(shape);
    const bool tall = given.rows > given.cols;
    if (tall) given = transposed(given);
    scale_by(&given.x, (float)(1.0 / norm_of(form_of<double>(shape).x)));
    const int64_t m = given.rows, n = given.cols;
    std::vector<float> y(m * n), squares(4 * m * m);  // the symmetric form has polar_squares of these
    float* x = given.x.data();
    const float* got =
        plain ? newton_schulz_plain<float>(&dev, config, x, y.data(), squares.data(), squares.data() + m * m, m, n, 1)
              : newton_schulz_symmetric<float>(config, symmetric_product_cpu, x, y.data(), squares.data(), m, n, 1,
                                               1.0f, m != n);
    given.x = std::vector<float>(got, got + m * n);
    return tall ? transposed(given).x : given.x;
}

// In fp32 both forms are off by at most four times what the oracle in fp32 is; eight steps have three stretches.
TEST(newton_schulz_forms_agree) {
    double worst = 0.0;
    for (const char* coefficients : {"jordan", "polar-express"}) {
        for (int64_t steps : {1, 2, 3, 5, 8}) {
            const OptimConfig config = form_config(coefficients, steps);
            for (int shape = 0; shape < FORMS; shape++) {
                Dense<double> exact = form_of<double>(shape);
                Dense<float> usual = form_of<float>(shape);
                polar_plain(&config, &exact), polar_plain(&config, &usual);
                const double bound = 4.0 * distance(exact.x, usual.x.data());
                for (bool plain : {true, false}) {
                    const double off = distance(exact.x, form_fp32(&config, shape, plain).data()) / bound;
                    expect(off <= 1.0 && off > 0.0, "%s, %d steps, %d x %d, plain %d: %g of the bound", coefficients,
                           (int)steps, (int)exact.rows, (int)exact.cols, plain, off);
                    worst = fmax(worst, off);
                }
            }
        }
    }
    note(test, "%.2g of the bound", worst);
}

// Jordan's polynomial leaves singular values in 0.68 to 1.14; Polar Express with the margins of its coefficients for
// rounding, whose product is about 0.9, below 1.
TEST(matrix_orthogonalises) {
    for (const char* coefficients : {"jordan", "polar-express"}) {
        OptimConfig config = make_config("muon", "fp32", "fp32");
        config.ns_coefficients = coefficients;
        Dense<double> x(24, 96), v(24, 1);
        for (int64_t i = 0; i < 24 * 96; i++) x.x[i] = test_uniform(3, i);
        polar_plain(&config, &x);
        Dense<double> gram = x * transposed(x);
        for (int64_t i = 0; i < 24; i++) gram.row(i)[i] -= 1.0, v.x[i] = 1.0 + 0.01 * (double)i;
        for (int k = 0; k < 60; k++) v = gram * v, scale_by(&v.x, 1.0 / norm_of(v.x));
        const double off = norm_of((gram * v).x);
        expect(off <= (is(coefficients, "jordan") ? 0.55 : 0.3), "%s: X X^T is %g off", coefficients, off);
    }
    NewtonSchulz jordan;
    expect(newton_schulz_coefficients("jordan", 3, &jordan) && jordan.a == 3.4445f && jordan.b == -4.7750f &&
               jordan.c == 2.0315f,
           "%g %g %g", (double)jordan.a, (double)jordan.b, (double)jordan.c);
}

// A batch has no more matrices than a grid has rows.
TEST(matrix_many_matrices) {
    constexpr int COUNT = 70, PARTS = 1024;
    OptimTensor tensors[COUNT];
    for (OptimTensor& tensor : tensors) tensor = {"h.0.w", 2 * PARTS, 1, true, 0, PARTS};
    const OptimConfig config = make_config("muon", "fp32", "fp32");
    optim_layout(tensors, COUNT, &config);
    Plan* plan = plan_ranges(&config, tensors, COUNT);
    const Device cpu = {};
    MatrixPlan its = matrix_plan(&cpu, plan, 0, tensors, COUNT);
    expect(its.chunks == 2 && its.batches == 2 && its.batch[0].count == 63 * PARTS && its.batch[1].count == 7 * PARTS,
           "%d chunks of %d, %d matrices", its.chunks, its.batch[0].count, its.batch[1].count);
    matrix_plan_free(&its);
}

// The CPU has room for the products of the largest matrix alone, and a GPU for those of a whole chunk.
TEST(matrix_room) {
    OptimTensor tensors[] = {{"h.0.w", 96, 64, true, 0, 3}, {"h.0.v", 64, 256, true, 0}, {"h.1.v", 64, 256, true, 0}};
    const OptimConfig config = make_config("muon", "fp32", "fp32");
    optim_layout(tensors, 3, &config);
    Plan* plan = plan_ranges(&config, tensors, 3);
    for (const bool gpu : {false, true}) {
        Device dev = {};
        dev.gpu = gpu;
        MatrixPlan its = matrix_plan(&dev, plan, 0, tensors, 3);
        const int64_t alone = 2 * 4 * (64 * 256 + 64 * 64), all = 2 * 2 * (3 * 32 * 64 + 2 * 64 * 256);
        expect(gpu ? its.work > all && its.sums > 0 : its.work == alone && its.sums == 0, "%s: %lld bytes and %lld",
               gpu ? "a GPU" : "the CPU", (long long)its.work, (long long)its.sums);
        expect(its.scratch == 4 * (96 * 64 + 2 * 64 * 256), "%lld bytes of directions", (long long)its.scratch);
        matrix_plan_free(&its);
    }
    plan_free(plan);
}

// A launch's tiles are each square of 128 that it must compute, once, and no other; half tiles come last.
TEST(symmetric_tiles_are_each_square_once) {
    static int seen[2][40][80];
    const int64_t sizes[][3] = {{768, 768, 1},  {1600, 1600, 1}, {128, 128, 1},  {136, 136, 1}, {520, 520, 1},
                                {768, 3072, 0}, {1600, 1600, 0}, {3072, 768, 0}, {8, 8, 0},     {648, 392, 0}};
    for (const auto& size : sizes) {
        const MatmulProduct p = {size[0], size[1], 512, false, true, 1.0f, 0.0f, 2, 0.0f, size[2] != 0};
        const SymmetricShape s = symmetric_shape(&p);
        const int tiles = (s.whole + s.half) * 2, down = (s.rows + 127) / 128, across = (s.columns + 127) / 128;
        memset(seen, 0, sizeof(seen));
        for (int k = 0; k < tiles; k++) {
            const SymmetricTile t = gemm_tile(k, s);
            expect((t.half != 0) == (k >= 2 * s.whole), "tile %d of %d, %d of them whole", k, tiles, 2 * s.whole);
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

#ifdef __CUDACC__
// Products of fp32 in parts of TF32, of uniform numbers: at most 3 2^-22 of each term is left out, and six standard
// deviations of these; a few thread blocks may share a sum. The norm of the error is within 2^-19 of the operands'.
OPERATOR_TEST(matmul_product_in_tf32_gpu) {
    const struct {
        int64_t rows, cols, depth;
        bool transpose_a;
        float alpha, beta;
    } rows[] = {{32, 8, 32, false, 1.0f, 0.0f},
                {45, 7, 83, true, 1.0f, 0.0f},
                {136, 40, 1040, false, 0.25f, 0.0f},
                {1032, 136, 72, true, 1.0f, 1.0f},
                {128, 1024, 4096, false, 1.0f, 0.0f}};
    for (const auto& row : rows) {
        const int64_t M = row.rows, N = row.cols, K = row.depth;
        const Array<float> a(&dev, M * K, 1, 1.0f), b(&dev, K * N, 2, 1.0f), parts(&dev, M * K + K * N);
        Array<float> d(&dev, M * N, 3, 1.0f);
        float *want = floats(M * N), *before = floats(M * N);
        const CpuGemm gemm = {M, N, K,    a.host, row.transpose_a ? 1 : K, row.transpose_a ? M : 1, b.host,
                              N, 1, want, false};
        exact_gemm(&gemm);
        double norm = 0.0, error = 0.0;
        for (int64_t i = 0; i < M * N; i++) {
            before[i] = d.host[i];
            want[i] = row.alpha * want[i] + row.beta * before[i];
        }
        const MatmulProduct p = {M,        N, K,    row.transpose_a, false, row.alpha,
                                 row.beta, 1, 0.0f, false,           true,  parts.device};
        TensorCore core = tensor_core(dev.compute);
        core.products /= 2;
        const double bound = tensor_core_bound(core, 3 * K, 1.0) + EPS32 * 8.0 * sqrt((double)K) +
                             6.0 * ldexp(1.0, -22) * sqrt((double)K);
        check_output(test, &worst, formatted("%d x %d x %d", (int)M, (int)N, (int)K), &d, before, want, bound,
                     [&] { matmul_product<float, float>(&dev, &p, d.device, a.device, b.device, d.device); });
        Room host(&dev);  // frees what it hands out
        const float* got = host.to_host(d.device, M * N);
        for (int64_t i = 0; i < M * N; i++) error += pow((double)got[i] - (double)want[i], 2);
        norm = (double)K / 4.0 * sqrt((double)(M * N)) * row.alpha;  // of |a| |b|, whose mean is K / 4
        expect(sqrt(error) <= ldexp(norm, -19), "%d x %d x %d: %g of the norm", (int)M, (int)N, (int)K,
               sqrt(error) / norm);
    }
}

constexpr int64_t BATCH = 3;

// Rounds `host` to half precision, and returns a copy of it on the device.
static __half* halves_on(Room* room, float* host, int64_t n) {
    __half* bits = room->host<__half>(n);
    for (int64_t i = 0; i < n; i++) bits[i] = __float2half_rn(host[i]), host[i] = __half2float(bits[i]);
    return room->to_device(bits, n);
}

// The library's way rounds diagonals to fp16 before gamma is added and once more after: by 2^-11 of the largest without
// gamma, which may be far larger than what is left. What was checked becomes what is wanted.
static void check_diagonal(Test* test, double* worst, const MatmulProduct* p, const char* what, float* got,
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
static void check_symmetric_product(Test* test, const Device* dev, const MatmulProduct* p, double* worst) {
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
    MatmulProduct alone = *p;
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
    const int64_t sizes[][2] = {{768, 768}, {520, 1288}, {456, 456}, {64, 512}, {776, 1024}};
    for (const auto& size : sizes) {
        const int64_t side = size[0], depth = size[1];
        const MatmulProduct products[] = {
            {side, side, depth, false, true, 1.0f, 0.0f, BATCH, 0.0f, true},
            {side, side, depth, false, true, 0.3f, -0.7f, BATCH, 1.5f, true},
            {side, depth, side, false, false, 1.0f, 0.0f, BATCH},
            {depth, side, side, false, true, 1.0f, 0.0f, BATCH},
            {side, depth, side, false, false, 0.5f, 2.0f, BATCH, 0.25f},
        };
        // With few multiprocessors a block has several tiles, and sends one out while it multiplies the next.
        Device small = dev;
        small.sm_count = 5;
        for (const Device* on : {(const Device*)&dev, (const Device*)&small})
            for (const MatmulProduct& p : products) check_symmetric_product(test, on, &p, &worst);
    }
}

#endif
