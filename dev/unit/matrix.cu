// Tests of the rules that read whole matrices: muon and normuon against the papers' equations in double, with bounds
// that are carried along with the reference; resumes, skipped steps and shards to the bit; what is refused.
#include "../../optim/placed.h"
#include "kernels.h"
#include "newton_schulz.h"
#include "steps.h"

constexpr int TENSORS = 6;
static const OptimTensor model[TENSORS] = {{"wte.weight", 50, 32, true, 0},
                                           {"h.0.ln_1.weight", 1, 32, false, 0},
                                           {"h.0.attn.c_attn.weight", 96, 32, true, 0, 3},
                                           {"h.0.mlp.c_fc.weight", 96, 40, true, 0},
                                           {"h.0.mlp.c_proj.weight", 17, 75, true, 0},
                                           {"h.1.mlp.c_proj.weight", 17, 75, true, 0}};
constexpr float LR = 0.02f;

static OptimConfig matrix_config(const char* rule, const char* weights, const char* m) {
    OptimConfig config = {"", rule, weights, "fp32", m, "", 0.9f, 0.95f, 1e-8f, 0.1f, 77};
    return resolved(config);
}

// Gradients of one size, since a bound of matrices is of norms; some matrix of them is zero in the first step.
static float matrix_gradient(int64_t step, int t, int64_t i) {
    return step == 1 && t == 5 ? 0.0f : test_uniform(100 + (uint64_t)step, t * 10000 + i);
}

static Steps matrix_steps(int bad = 0) {
    Steps how;
    how.lr = LR, how.bad = bad, how.given = matrix_gradient;
    return how;
}

// The update U of direction x, and a bound on its error (0 with `rounds`: the plain form's bound stands for both);
// NorMuon's v and the bound on it are kept in `v` and `v_error`.
static double reference_update(const OptimConfig* config, Dense* x, double* v, double* v_error, double unit,
                               bool rounds) {
    double error = 0.0;
    if (rounds) reference_symmetric(config, x, true);
    if (!rounds) error = reference_polar(config, x, unit);
    const int rows = x->rows, cols = x->cols;
    double factor = 0.2 * sqrt(rows > cols ? rows : cols);
    if (is(config->rule, "normuon")) {
        double of_y = 0.0, largest = 0.0;
        for (int i = 0; i < rows; i++) {
            double sum = 0.0;
            for (int j = 0; j < cols; j++) sum += x->x[i * cols + j] * x->x[i * cols + j];
            const double one_minus_beta2 = 1.0 - (double)config->beta2;
            v[i] += one_minus_beta2 * (sum / cols - v[i]);
            v_error[i] += one_minus_beta2 * ((2.0 * sqrt(sum) * error + 1e-6 * sum) / cols - v_error[i]);
            const double root = sqrt(v[i]) + (double)config->eps, lost = v_error[i] / (2.0 * v[i]);
            for (int j = 0; j < cols; j++) x->x[i * cols + j] /= root;
            largest = fmax(largest, 1.0 / root);
            of_y = fmax(of_y, lost * sqrt(sum) / root);  // the squares of the rows' errors add up to error^2
        }
        error = largest * error + of_y;
        factor = 0.2 * sqrt((double)rows * cols) / (frobenius(x) + 1e-7);
        error *= 2.0;  // the factor's own
    }
    for (int i = 0; i < rows * cols; i++) x->x[i] *= factor;
    return factor * error + 1e-6 * frobenius(x);
}

constexpr int STEPS = 5;

// Five steps of a matrix, part `part` of tensor t, in double; `p` receives the weights. Returns the bound. `rounds`: by
// the form that a GPU has, and what is stored is rounded to fp16.
static double reference_steps(const OptimConfig* config, int t, int part, Dense* p, double unit, bool rounds = false) {
    static Dense u, m;
    double v[128] = {}, v_error[128] = {}, bound = 0.0;
    const int rows = (int)(model[t].rows / model[t].parts), cols = (int)model[t].cols, n = rows * cols;
    p->rows = u.rows = m.rows = rows, p->cols = u.cols = m.cols = cols;
    for (int i = 0; i < n; i++) p->x[i] = run_start(t, part * n + i), m.x[i] = 0.0;
    for (int step = 1; step <= STEPS; step++) {
        const double end = config->momentum, risen = (double)step / (double)config->momentum_warmup, lr = LR;
        const double mu = step < config->momentum_warmup ? 0.85 + (end - 0.85) * risen : end;
        const double look = config->nesterov ? mu : 1.0;
        for (int i = 0; i < n; i++) {
            const double g = 0.5 * (double)matrix_gradient(step, t, part * n + i);
            m.x[i] = mu * m.x[i] + (1.0 - mu) * g;
            u.x[i] = (1.0 - look) * g + look * m.x[i];
        }
        const double error = frobenius(&u) > 0.0 ? reference_update(config, &u, v, v_error, unit, rounds) : 0.0;
        const bool cautious = is(config->decay_mode, "cautious");
        const double lost = lr * (double)config->weight_decay * (cautious ? lr / (double)config->lr_max : 1.0);
        for (int i = 0; i < n; i++)
            p->x[i] = p->x[i] * (cautious && u.x[i] * p->x[i] < 0.0 ? 1.0 : 1.0 - lost) - lr * u.x[i];
        bound += lr * error + 4.0 * ldexp(1.0, -24) * frobenius(p);
    }
    return bound;
}

// On a GPU the bound, which holds for any roundings, is wider than the update itself; there the error is also held to
// four times that of a reference which rounds at the same places.
static void check_against_double(Test* test, const OptimConfig* config, bool gpu) {
    static Dense p, rounded;
    static float got[MOST];
    OptimRun run;
    run_open(&run, config, model, OPTIM_FP32, gpu);
    run_steps(&run, 1, STEPS, matrix_steps());
    double worst = 0.0, share = 0.0;
    for (int t = 2; t < TENSORS; t++) {
        optim_get_weights(run.optim, t, got);
        for (int part = 0; part < model[t].parts; part++) {
            double bound = reference_steps(config, t, part, &p, ldexp(1.0, gpu ? -11 : -24)), sum = 0.0, usual = 0.0;
            const int n = p.rows * p.cols;
            if (gpu) reference_steps(config, t, part, &rounded, 0.0, true);
            for (int i = 0; i < n; i++) {
                sum += pow((double)got[part * n + i] - p.x[i], 2);
                usual += gpu ? pow(rounded.x[i] - p.x[i], 2) : 0.0;
            }
            if (gpu) bound = fmin(bound, 4.0 * sqrt(usual));
            worst = fmax(worst, sqrt(sum) / bound);
            // Updates of five steps, each 0.2 in every element.
            share = fmax(share, bound / (STEPS * (double)LR * 0.2 * sqrt(n)));
        }
    }
    expect(worst <= 1.0, "%s, %s: %g of the bound", config->rule, config->ns_coefficients, worst);
    expect(worst > 1e-5 && share < 0.5, "%s: the bound tells nothing, %g and %g", config->rule, worst, share);
    note(test, "%s %.2g of the bound, which is %.1g of the steps", config->rule, worst, share);
}

JIT_BOTH(matrix_against_double) {
    for (const char* rule : {"muon", "normuon"}) {
        for (const char* coefficients : {"jordan", "polar-express"}) {
            OptimConfig config = matrix_config(rule, "fp32", "fp32");
            config.ns_coefficients = coefficients;
            check_against_double(test, &config, gpu);
            if (is(coefficients, "jordan")) config.nesterov = false, check_against_double(test, &config, gpu);
            config.nesterov = true, config.momentum_warmup = 4, config.decay_mode = "cautious";
            config.lr_max = 2.0f * LR, config.weight_decay = 1.0f;
            if (is(coefficients, "jordan")) check_against_double(test, &config, gpu);
        }
    }
}

// Matrices whose products our own kernel makes (kernels/matmul_symmetric.cuh): tall, wide and square, in batches, with
// tiles that are not whole. Rounding to fp16 costs an eighth of an update at most, as newton_schulz_in_fp16 finds; and
// no bit depends on the batch.
TEST(matrix_large_gpu) {
    constexpr int LARGE = 4;
    const OptimTensor large[LARGE] = {{"h.0.attn.c_attn.weight", 3 * 456, 520, true, 0, 3},
                                      {"h.0.mlp.c_fc.weight", 600, 456, true, 0},
                                      {"h.0.mlp.c_proj.weight", 464, 464, true, 0},
                                      {"h.1.mlp.c_fc.weight", 600, 456, true, 0}};
    CacheFolder folder;
    for (const char* rule : {"muon", "normuon"}) {
        OptimConfig config = matrix_config(rule, "fp32", "fp32");
        OptimRun run[3];  // on the CPU, on the GPU, and there each tensor by itself
        for (int k = 0; k < 3; k++) {
            if (k == 2) config.matrix_chunk = TILE_ELEMENTS;
            run_open(&run[k], &config, large, LARGE, OPTIM_FP32, k > 0);
            run_steps(&run[k], 1, 2, matrix_steps());
        }
        expect(!difference(&run[1], &run[2]), "%s: the batch matters", rule);
        for (int t = 0; t < LARGE; t++) {
            const int64_t n = large[t].rows * large[t].cols;
            float *want = floats(n), *got = floats(n);
            double off = 0.0, moved = 0.0;
            optim_get_weights(run[0].optim, t, want), optim_get_weights(run[1].optim, t, got);
            for (int64_t i = 0; i < n; i++) {
                off += pow((double)got[i] - (double)want[i], 2);
                moved += pow((double)want[i] - (double)run_start(t, i), 2);
            }
            expect(off > 0.0 && off < moved / 64.0, "%s: %s is %g of the steps off", rule, large[t].name,
                   sqrt(off / moved));
        }
    }
}

TEST(matrix_orthogonalises) {
    // Jordan's polynomial leaves singular values in 0.68 to 1.14; Polar Express with the margins of its coefficients
    // for rounding, whose product is about 0.9, below 1.
    static Dense x, gram;
    for (const char* coefficients : {"jordan", "polar-express"}) {
        OptimConfig config = matrix_config("muon", "fp32", "fp32");
        config.ns_coefficients = coefficients;
        x.rows = 24, x.cols = 96;
        for (int i = 0; i < x.rows * x.cols; i++) x.x[i] = test_uniform(3, i);
        reference_polar(&config, &x, 0.0);
        multiply(&gram, &x, false, &x, true);
        for (int i = 0; i < gram.rows; i++) gram.x[i * gram.cols + i] -= 1.0;
        const double off = spectral(&gram);
        expect(off * off <= (is(coefficients, "jordan") ? 0.56 : 0.3), "%s: X X^T is %g off", coefficients, off * off);
    }
}

static void check_resume_and_shards(Test* test, const OptimConfig* config, bool gpu) {
    const int held = expect_resumed_and_sharded(test, config, model, TENSORS, matrix_steps(), gpu);
    expect(held >= TENSORS - 1, "%d tensors are whole in a shard", held);  // adamw's may be cut
}

JIT_BOTH(matrix_resume_skip_and_shard) {
    CacheFolder folder;
    const char* const formats[][2] = {{"fp32", "fp32"},          {"bf16+fp32", "bf16:sr"},   {"bf16:sr", "soft8/32"},
                                      {"lin8:sr", "de4/32@dq8"}, {"bf16+8:sr", "nf4/64:sr"}, {"bf16", "e4m3/tensor"}};
    for (const char* rule : {"muon", "normuon"}) {
        for (const auto& format : formats) {
            OptimConfig config = matrix_config(rule, format[0], format[1]);
            check_resume_and_shards(test, &config, gpu);
        }
    }
    for (const char* rule : {"galore", "fira", "apollo", "apollo-mini"}) {
        for (const auto& format : formats) {
            OptimConfig config = matrix_config(rule, format[0], in_spans(format[1]) ? "de4/64" : format[1]);
            config.rank_gap = 2;
            check_resume_and_shards(test, &config, gpu);
        }
    }
    for (const char* preset : {"muon", "muon8", "muon4", "galore8", "apollo-mini"}) {
        OptimConfig config = {preset, "", "", "bf16", "", "", 0.9f, 0.95f, 1e-8f, 0.1f, 5};
        config.grads = "fp32";
        expect(optim_resolve(&config, error), "%s", error);
        check_resume_and_shards(test, &config, gpu);
    }
}

// No bit depends on how many matrices are taken at a time: all, two tensors or one.
JIT_BOTH(matrix_chunks) {
    CacheFolder folder;
    const char* const rows[][4] = {{"muon", "bf16:sr", "bf16:sr", ""},
                                   {"normuon", "fp32", "soft8/32", ""},
                                   {"fira", "bf16:sr", "fp32", ""},
                                   {"apollo", "fp32", "de4/64", ""},
                                   {"galore", "bf16:sr", "fp32", ""},
                                   {"galore", "fp32", "fp32", "wte|ln*|c_proj.weight: rule=adamw v=fp32"},
                                   {"galore", "bf16:sr", "de4/64", "wte|ln*|c_proj.weight: rule=adamw v=fp32"}};
    for (const auto& [rule, weights, m, overrides] : rows) {
        OptimConfig config = matrix_config(rule, weights, m);
        if (*overrides) config.overrides = overrides, config.rank = 8;
        config.rank_gap = 2;
        OptimRun whole, parts;
        run_open(&whole, &config, model, OPTIM_FP32, gpu);
        run_steps(&whole, 1, STEPS, matrix_steps(3));
        for (const int64_t tiles : {1, 4}) {
            config.matrix_chunk = tiles * TILE_ELEMENTS;
            run_open(&parts, &config, model, OPTIM_FP32, gpu);
            run_steps(&parts, 1, STEPS, matrix_steps(3));
            expect_same(test, &whole, &parts, formatted("%s, m %s, chunks of %d tiles", rule, m, (int)tiles));
            const OptimParts its = optim_parts(parts.optim);
            MatrixPlan plan = matrix_plan(its.dev, its.plan, 0, its.tensors, its.count);
            expect(plan.chunks > 1 || (tiles == 4 && *overrides), "%s: one chunk of %lld tiles", rule,
                   (long long)tiles);
            matrix_plan_free(&plan);
            expect_planned(test, &parts, rule);
        }
    }
}

// A batch has no more matrices than a grid has rows.
TEST(matrix_many_matrices) {
    constexpr int COUNT = 70, PARTS = 1024;
    OptimTensor tensors[COUNT];
    for (OptimTensor& tensor : tensors) tensor = {"h.0.w", 2 * PARTS, 1, true, 0, PARTS};
    const OptimConfig config = matrix_config("muon", "fp32", "fp32");
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
    const OptimConfig config = matrix_config("muon", "fp32", "fp32");
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

// The momentum and what adamw has are the same to the bit on a GPU; the weights of matrices are within the bound.
JIT_TEST(matrix_moments_equal_cpu_gpu) {
    for (const char* m : {"fp32", "bf16:sr", "soft8/32", "de4/32@dq8"}) {
        OptimConfig config = matrix_config("muon", "bf16:sr", m);
        OptimRun run[2];
        for (int gpu = 0; gpu < 2; gpu++) {
            run_open(&run[gpu], &config, model, OPTIM_FP32, gpu == 1);
            run_steps(&run[gpu], 1, 4, matrix_steps(3));
        }
        for (int t = 0; t < 2; t++) expect(same_tensor(&run[0], &run[1], t), "m %s: %s", m, model[t].name);
        for (int s = 0; s < optim_stream_count(run[0].optim); s++) {
            OptimStream x = optim_stream(run[0].optim, s), y = optim_stream(run[1].optim, s);
            const int64_t bytes = x.elements * x.element_bytes;
            expect(x.is_weights || same_bytes(&run[0], x.data, &run[1], y.data, bytes), "m %s: %s", m, x.name);
        }
    }
}

constexpr int PART = 32 * 64;

// A tensor of three matrices is as three tensors are.
TEST(matrix_parts_are_matrices) {
    const OptimConfig config = matrix_config("muon", "fp32", "fp32");
    static float got[2][3 * PART], zeros[3 * PART];
    for (int split = 0; split < 2; split++) {
        const int count = split ? 3 : 1;
        OptimTensor tensor[3];
        OptimRun run;
        Steps how;
        how.lr = 1.0f, how.given = [](int64_t, int t, int64_t i) { return test_uniform(4, t * PART + i); };
        for (OptimTensor& each : tensor) each = {"h.0.w", split ? 32 : 96, 64, true, 0, split ? 1 : 3};
        run_open(&run, &config, tensor, count, OPTIM_FP32);
        for (int t = 0; t < count; t++) optim_set_weights(run.optim, t, zeros);
        run_steps(&run, 1, 1, how);
        for (int t = 0; t < count; t++) optim_get_weights(run.optim, t, got[split] + t * PART);
    }
    expect(memcmp(got[0], got[1], sizeof(got[0])) == 0, "parts and tensors differ");
    expect(memcmp(got[0], zeros, sizeof(zeros)) != 0, "nothing moves");
}

TEST(matrix_rest_and_overrides_of_presets) {
    const char* const its = "ln*|*.bias|wpe: weights=bf16:ef";
    const char* const rows[][7] = {
        {"", "muon", "", "", "", "", "wte|wpe|ln*|*.bias: rule=adamw m=fp32 v=fp32"},
        {"adamw8", "muon", "", "", "", "", "wte|wpe|ln*|*.bias: rule=adamw m=dyn8/256 v=udyn8/256"},
        {"muon4", "", "", "", "", "", "wte|wpe|ln*|*.bias: rule=adamw m=de4/32@dq8 v=lin4/64"},
        {"muon4", "", "", "soft8", "", "", "wte|wpe|ln*|*.bias: rule=adamw m=fp32 v=fp32"},
        {"muon", "", "", "", "", "wpe: lr=0.5", "wte|wpe|ln*|*.bias: rule=adamw m=fp32 v=fp32; wpe: lr=0.5"},
        {"int8w4", "muon", "", "", "", "",
         "wte|wpe|ln*|*.bias: rule=adamw m=de4/32@dq8 v=sqrt4/32@dq8; ln*|*.bias: weights=bf16:sr"},
        {"muon", "", "", "", "", "none", "none"},
        {"fp8w8e", "", "", "", "", "", its},
        {"fp8w8e", "", "e4m3:ef", "e4m3:sr", "sqrt8", "", its},
        {"fp8w8e", "", "", "dyn8:sr", "", "", "none"},
        {"fp8w8e", "", "", "", "udyn8", "", "none"},
        {"fp8w8e", "", "lin8:ef", "", "", "", "none"},
        {"fp8w8e", "", "", "", "", "none;", "none"},
        {"fp8w8e", "", "", "", "", "wpe:lr=2", "wpe:lr=2"},
    };
    for (const auto& [preset, rule, weights, m, v, overrides, want] : rows) {
        OptimConfig config = {preset, rule, weights, "fp32", m, v, 0.9f, 0.95f, 1e-8f, 0.1f, 7};
        config.overrides = overrides;
        expect(optim_resolve(&config, error), "%s", error);
        expect(is(config.overrides, want), "%s: %s", preset, config.overrides);
        expect(optim_resolve(&config, error) && is(config.overrides, want), "again: %s", error);
    }
}

// Both kernels of a step.
JIT_TEST(matrix_kernels_compile) {
    const char* const formats[][2] = {{"lin8:sr", "nf4/64:sr"}, {"bf16+8:sr", "e4m3/tensor"}};
    for (const char* rule : {"normuon", "galore"}) {
        for (const auto& format : formats) {
            OptimConfig config = matrix_config(rule, format[0], format[1]);
            expect_compiles(test, kernel_of(config));
            const char* apply = "optim_step_kernel<MatrixApply, TYPE, None, None, None, Elementwise<Fp32, NEAREST>>";
            expect_compiles(test, replaced(apply, "TYPE", find_row(weights_table(), format[0])->type));
        }
    }
}
