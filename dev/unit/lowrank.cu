// Tests of the rules that project gradients: galore, fira, apollo and apollo-mini against the papers' equations in
// double, five steps; the directions of galore against the gradient's leading ones; and the products of its fused way.
#include "../../kernels/matmul_product.cuh"
#include "../../optim/matrix/low_rank.h"
#include "steps.h"
#include "tensor_cores.h"

constexpr int STEPS = 5, MOST_LOW = 64 * 48;
constexpr float LR = 0.02f;

struct Shape {
    int rows, cols, parts = 1;
};
static const Shape shapes[] = {{64, 24}, {24, 64}, {32, 32}};

// Returns element i of a gradient of rank 4 with a tenth of noise.
static double low_gradient(int step, const Shape& s, int i) {
    double sum = 0.1 * (double)test_uniform(50 + (uint64_t)step, i);
    for (int k = 0; k < 4; k++) {
        sum += (double)test_uniform(7, 1000 * k + i / s.cols) *
               (double)test_uniform(8 + (uint64_t)(step % 2), 1000 * k + i % s.cols);
    }
    return sum;
}

struct LowRun {
    OptimConfig config;
    float p[MOST_LOW], q[MOST_LOW];  // weights and basis after the steps
};

static Shape stepped;  // the shape of given_gradient's matrix
static int zeros;      // steps before its first gradient that is not zero

static float given_gradient(int64_t step, int, int64_t i) {
    return step > zeros ? (float)low_gradient((int)step - zeros, stepped, (int)i) : 0.0f;
}

// Five steps with low->config, whose gradients are fp32 or bf16; if `beside`, next to another matrix, which comes
// first.
static void low_steps(LowRun* low, const Shape& s, bool gpu, bool beside = false) {
    const OptimTensor tensors[] = {{"h.0.w", s.rows, s.cols, true, 0, s.parts}, {"h.1.w", 40, 24, true, 0}};
    const OptimTensor turned[] = {tensors[1], tensors[0]};
    OptimRun run;
    Steps how;
    stepped = s;
    low->config = resolved(low->config);
    how.lr = LR, how.given = given_gradient;
    run_open(&run, &low->config, beside ? turned : tensors, beside ? 2 : 1, OPTIM_FP32, gpu);
    run_steps(&run, 1, STEPS, how);
    optim_get_weights(run.optim, beside ? 1 : 0, low->p);
    for (int i = 0; i < optim_stream_count(run.optim); i++) {
        const OptimStream stream = optim_stream(run.optim, i);
        const int64_t n = stream.elements < MOST_LOW ? stream.elements : MOST_LOW;
        if (is(stream.name, "basis")) copy_to_host(&run.dev, low->q, stream.data, n * (int64_t)sizeof(float));
    }
}

static void low_run(LowRun* run, const char* rule, const Shape& s, bool gpu) {
    run->config = {"", rule, "fp32", "fp32", "fp32", "fp32", 0.9f, 0.95f, 1e-8f, 0.1f, 77};
    run->config.rank_gap = 100;
    low_steps(run, s, gpu);
}

// Returns element (i, j) of the random directions, as low_rank.h describes them.
static double random_basis(uint64_t seed, int64_t element, int64_t rank) {
    Noise noise = philox4x32({{(uint32_t)element, 0, 8, 0}}, (uint32_t)seed, 0, NOISE_ROUNDS);
    double sum = 0.0;
    for (uint32_t word : noise.word) sum += (double)(word & 0xffff) + (double)(word >> 16);
    return (sum / 65536.0 - 4.0 + 4.0 / 65536.0) * sqrt(1.5) / sqrt((double)rank);
}

static double in_bf16(double x, bool rounds) {
    return rounds ? (double)Bf16::decode(Bf16::encode((float)x)) : (double)(float)x;
}

// A weight as the run's format stores it, which is fp32, bf16 or bf16:sr. The matrix is at the arena's start.
static double stored_weight(const OptimConfig* config, int step, int i, double p) {
    if (is(config->weights, "fp32")) return p;
    if (!is(config->weights, "bf16:sr")) return in_bf16(p, true);
    const int first = i / NOISE_ELEMENTS * NOISE_ELEMENTS;
    const Noise noise = noise_draw({config->seed, (uint32_t)step, NOISE_WEIGHTS, first}, 0);
    return (double)Bf16::decode(Bf16::encode((float)p, noise_lane(noise, i - first)));
}

// The papers' steps in double, with the directions q (rank, side); channel c is an index of the longer side. With
// `rounds`, gradients, N and U are rounded to bf16.
static void reference_low(const LowRun* run, const Shape& s, const double* q, double* p, bool rounds = false) {
    const OptimConfig* config = &run->config;
    static double g[MOST_LOW], low[MOST_LOW], m[MOST_LOW], v[MOST_LOW], direction[MOST_LOW];
    const bool right = s.rows >= s.cols, fira = is(config->rule, "fira"), galore = is(config->rule, "galore"),
               mini = is(config->rule, "apollo-mini");
    const int side = right ? s.cols : s.rows, length = right ? s.rows : s.cols;
    const int rank = (int)low_shape(config, s.rows, s.cols).rank;
    auto at = [&](int channel, int k) { return right ? channel * s.cols + k : k * s.cols + channel; };
    for (int i = 0; i < s.rows * s.cols; i++) {
        p[i] = in_bf16(start(i), !is(config->weights, "fp32"));
        m[i] = v[i] = 0.0;
    }
    double last = 0.0;
    for (int step = 1; step <= STEPS; step++) {
        static double update[MOST_LOW];
        double all_n = 0.0, all_low = 0.0, norm = 0.0;
        static double phi[96];
        for (int i = 0; i < s.rows * s.cols; i++) g[i] = 0.5 * in_bf16(low_gradient(step, s, i), rounds);
        for (int c = 0; c < length; c++) {
            double of_n = 0.0, of_low = 0.0;
            for (int r = 0; r < rank; r++) {
                const int i = c * rank + r;
                low[i] = 0.0;
                for (int k = 0; k < side; k++) low[i] += g[at(c, k)] * q[r * side + k];
                m[i] += (1.0 - (double)config->beta1) * (low[i] - m[i]);
                v[i] += (1.0 - (double)config->beta2) * (low[i] * low[i] - v[i]);
                const double bias1 = 1.0 - pow((double)config->beta1, step),
                             bias2 = 1.0 - pow((double)config->beta2, step);
                direction[i] = m[i] / bias1 / (sqrt(v[i] / bias2) + (double)config->eps);
                if (rounds) direction[i] = in_bf16(direction[i], true);
                of_n += direction[i] * direction[i], of_low += low[i] * low[i];
            }
            phi[c] = sqrt(of_n) / (sqrt(of_low) + 1e-8);
            all_n += of_n, all_low += of_low;
        }
        for (int c = 0; c < length; c++) {
            const double scale = mini ? sqrt(all_n) / (sqrt(all_low) + 1e-8) : phi[c];
            for (int k = 0; k < side; k++) {
                double inside = 0.0, back = 0.0;
                for (int r = 0; r < rank; r++) inside += low[c * rank + r] * q[r * side + k];
                for (int r = 0; r < rank; r++) back += direction[c * rank + r] * q[r * side + k];
                const double rest = scale * (fira ? g[at(c, k)] - inside : g[at(c, k)]);
                update[at(c, k)] = galore ? (rounds ? in_bf16(0.25 * back, true) : 0.25 * back) : rest;
                norm += rest * rest;
                if (fira) g[at(c, k)] = 0.25 * back;  // no channel reads it again
            }
        }
        norm = sqrt(norm);
        const double limit = last > 0.0 ? fmax(norm / (last + 1e-8), 1.01) / 1.01 : 1.0;
        last = norm / limit;
        for (int i = 0; i < s.rows * s.cols; i++) {
            double u = update[i];
            if (fira) u = g[i] + update[i] / limit;
            if (!fira && !galore) u = sqrt(mini ? 128.0 : 1.0) * update[i] / limit;
            const double moved = p[i] * (1.0 - (double)LR * (double)config->weight_decay) - (double)LR * u;
            p[i] = stored_weight(config, step, i, moved);
        }
    }
}

// How far the weights after a run are from p, as a share of the way from where they began.
static double share_off(const LowRun* run, const Shape& s, const double* p) {
    double error = 0.0, moved = 0.0;
    for (int i = 0; i < s.rows * s.cols; i++)
        error += pow((double)run->p[i] - p[i], 2), moved += pow(p[i] - (double)start(i), 2);
    return sqrt(error / moved);
}

// Sums of fp32 over at most 64 terms err by 2^-18 of their norms; Adam's division passes that on to elements in
// proportion to one over their size, and few are below 2^-6 of the others: 2^-10 of the steps, in the norm of
// Frobenius.
TEST_BOTH(lowrank_against_double) {
    static LowRun run;
    static double q[MOST_LOW], p[MOST_LOW];
    double worst = 0.0;
    for (const char* rule : {"galore", "fira", "apollo", "apollo-mini"}) {
        for (const Shape& s : shapes) {
            low_run(&run, rule, s, gpu);
            const int side = s.rows < s.cols ? s.rows : s.cols, rank = (int)low_shape(&run.config, s.rows, s.cols).rank;
            const bool stored = is(rule, "galore") || is(rule, "fira");
            for (int i = 0; i < rank * side; i++) q[i] = stored ? (double)run.q[i] : random_basis(77, i, rank);
            reference_low(&run, s, q, p);
            const double share = share_off(&run, s, p) * 1024.0;
            expect(share <= 1.0 && share > 0.0, "%s, %d x %d: %g of the bound", rule, s.rows, s.cols, share);
            worst = fmax(worst, share);
        }
    }
    snprintf(test->note, sizeof(test->note), "%.2g of the bound", worst);
}

// A GPU with gradients of fp32 against the CPU, with a refresh in between. Weights of fp32 are within the bound above.
// Those of bf16 are the same codes but where the two updates lie on both sides of a rounding, whose share is about the
// bound times the steps' size in codes, and one code apart there.
static void check_fp32(Test* test, const char* weights) {
    static LowRun run[2];
    for (const Shape& s : {Shape{96, 32}, Shape{32, 96}, Shape{48, 48}, Shape{96, 32, 3}}) {
        for (LowRun& each : run) {
            each.config = {"", "galore", weights, "fp32", "fp32", "fp32", 0.9f, 0.95f, 1e-8f, 0.1f, 77};
            each.config.rank = 16, each.config.rank_gap = 3;
            low_steps(&each, s, &each == &run[1], true);
        }
        double error = 0.0, moved = 0.0;
        int differ = 0;
        const int n = s.rows * s.cols;
        for (int i = 0; i < n; i++) {
            error += pow((double)run[1].p[i] - (double)run[0].p[i], 2);
            moved += pow((double)run[0].p[i] - (double)run_start(1, i), 2);
            differ += run[1].p[i] != run[0].p[i];
        }
        const bool rounds = !is(weights, "fp32");
        expect(sqrt(error / moved) <= (rounds ? 1.0 / 64 : 1.0 / 1024), "%s, %d x %d: %g off", weights, s.rows, s.cols,
               sqrt(error / moved));
        expect(!rounds || differ <= n / 50, "%s, %d x %d: %d of %d codes differ", weights, s.rows, s.cols, differ, n);
    }
}

// With gradients of bf16, Q, N and U are rounded to bf16. Against a reference in double that rounds where the step
// does, with the step's own Q, the sums of fp32 are left, as above; and an N or U on both sides of a rounding, by 2^-8
// of itself, whose share is that of the sums' error in a place of bf16, 2^-18 / 2^-9: 2^-8 sqrt(2^-9) each, a fourth of
// the bound together. (Beside a step that does not round, Adam makes more of it: in the first step N is the sign of
// low, and the leading directions leak into the others through the rounding of Q.) Codes of weights are the reference's
// but for updates on both sides of a rounding, and those are one code apart; rows of 40 and 72 are not whole draws of
// noise.
static void check_bf16(Test* test, const char* weights, std::initializer_list<Shape> some) {
    static LowRun run;
    static double q[MOST_LOW], p[MOST_LOW];
    const bool codes = !is(weights, "fp32");
    for (const Shape& s : some) {
        run.config = {"", "galore", weights, "bf16", "fp32", "fp32", 0.9f, 0.95f, 1e-8f, 0.1f, 77};
        run.config.rank = 16, run.config.rank_gap = 100;
        low_steps(&run, s, true);
        const int side = s.rows < s.cols ? s.rows : s.cols, n = s.rows * s.cols;
        for (int i = 0; i < 16 * side; i++) q[i] = in_bf16((double)run.q[i], true);
        reference_low(&run, s, q, p, true);
        const double share = share_off(&run, s, p);
        expect(codes || (share <= 1.0 / 1024 && share > 0.0), "%d x %d: %g off", s.rows, s.cols, share);
        int differ = 0;
        double worst = 0.0;
        for (int i = 0; i < n; i++) {
            differ += (double)run.p[i] != p[i];
            worst = fmax(worst, fabs((double)run.p[i] - p[i]) / fmax(fabs(p[i]), 0x1p-6));
        }
        expect(!codes || differ <= n / 50, "%s, %d x %d: %d of %d codes differ", weights, s.rows, s.cols, differ, n);
        expect(!codes || worst <= 0x1p-7, "%s, %d x %d: a weight is %g of itself off", weights, s.rows, s.cols, worst);
    }
}

TEST(lowrank_formats_gpu) {
    for (const char* weights : {"fp32", "bf16", "bf16:sr"}) check_fp32(test, weights);
    check_bf16(test, "fp32", {Shape{96, 32}, Shape{32, 96}, Shape{48, 48}});
    for (const char* weights : {"bf16", "bf16:sr"})
        check_bf16(test, weights, {Shape{96, 32}, Shape{32, 96}, Shape{72, 40}, Shape{40, 72}});
}

// The matmuls read one of two formats of weights as it is stored: its memory is that of the other one's copy. adamw has
// equal bits on both devices.
TEST_BOTH(lowrank_copies) {
    const OptimTensor tensors[] = {{"wte.weight", 64, 64, true, 0}, {"h.0.c_fc.weight", 40, 24, true, 0}};
    for (const auto& [weights, overrides] :
         {std::pair{"fp32", "c_fc.weight: weights=bf16"}, std::pair{"bf16", "c_fc.weight: weights=fp32"}}) {
        OptimConfig config = {"", "galore", weights, "fp32", "fp32", "fp32", 0.9f, 0.95f, 1e-8f, 0.1f, 77};
        config.overrides = overrides, config.rank = 8;
        config = resolved(config);
        for (const OptimType compute : {OPTIM_FP32, OPTIM_BF16}) {
            OptimRun cpu, run;
            run_open(&cpu, &config, tensors, 2, compute, false);
            run_open(&run, &config, tensors, 2, compute, gpu);
            run_steps(&cpu, 1, STEPS);
            run_steps(&run, 1, STEPS);
            expect(same_tensor(&cpu, &run, 0), "%s, %s: another tensor differs", weights, overrides);
            for (int t = 0; t < 2; t++) {
                const int64_t n = tensors[t].rows * tensors[t].cols, size = compute == OPTIM_FP32 ? 4 : 2;
                float *stored = floats(n), *seen = floats(n);
                const char* at = (const char*)optim_weights(run.optim) + run.tensor[t].offset * size;
                copy_to_host(&run.dev, seen, at, n * size);
                optim_get_weights(run.optim, t, stored);
                int64_t wrong = 0;
                for (int64_t i = 0; i < n; i++) {
                    wrong += compute == OPTIM_FP32 ? seen[i] != stored[i]
                                                   : ((const uint16_t*)seen)[i] != Bf16::encode(stored[i]);
                }
                expect(wrong == 0, "%s, %s: %lld weights of %s are not their copies", weights, overrides,
                       (long long)wrong, tensors[t].name);
            }
        }
    }
}

#ifdef __CUDACC__
// Products of fp32 in parts of TF32, of uniform numbers: at most 3 2^-22 of each term is left out, and six standard
// deviations of these; a few thread blocks may share a sum. The norm of the error is within 2^-19 of the operands'.
OPERATOR_TEST(lowrank_products_gpu) {
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
        const MatmulProduct p = {M, N, K, row.transpose_a, false, row.alpha, row.beta, 1, 0, 0, 0, true, parts.device};
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
#endif

// Rows of the basis are orthonormal, and hold the 4 leading directions of the first gradient that is not zero: what
// they leave of it is the noise.
TEST_BOTH(lowrank_basis) {
    static LowRun run;
    for (const auto& [rule, before] : {std::pair{"galore", 0}, {"galore", 2}, {"fira", 1}})
        for (const Shape& s : shapes) {
            zeros = before;
            low_run(&run, rule, s, gpu);
            const bool right = s.rows >= s.cols;
            const int side = right ? s.cols : s.rows, length = right ? s.rows : s.cols;
            const int rank = (int)low_shape(&run.config, s.rows, s.cols).rank;
            double off = 0.0, all = 0.0, inside = 0.0, noise = 0.0;
            for (int i = 0; i < rank; i++) {
                for (int j = 0; j <= i; j++) {
                    double dot = 0.0;
                    for (int k = 0; k < side; k++) dot += (double)run.q[i * side + k] * (double)run.q[j * side + k];
                    off = fmax(off, fabs(dot - (i == j)));
                }
            }
            for (int c = 0; c < length; c++) {
                for (int r = 0; r < rank; r++) {
                    double low = 0.0;
                    for (int k = 0; k < side; k++)
                        low +=
                            low_gradient(1, s, right ? c * s.cols + k : k * s.cols + c) * (double)run.q[r * side + k];
                    inside += low * low;
                }
            }
            for (int i = 0; i < s.rows * s.cols; i++)
                all += pow(low_gradient(1, s, i), 2), noise += pow(0.1 * (double)test_uniform(51, i), 2);
            expect(off <= side * 0x1p-22, "%d x %d: rows are %g from orthonormal", s.rows, s.cols, off);
            // A row that is longer than 1 by its rounding has that share of `all` in it too much.
            expect(fabs(all - inside) <= noise + side * 0x1p-22 * all && all > 10.0 * noise,
                   "%d x %d: %g of %g are outside", s.rows, s.cols, all - inside, all);
        }
}
