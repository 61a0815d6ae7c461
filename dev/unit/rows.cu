// Tests of rules that read rows, columns and tensors (optim/rows.cuh), and of --limit-growth: against the papers'
// formulas in double precision, over resumes, skipped steps and shards, and where there is a GPU equal bits.
#include "../../optim/rows.h"
#include "kinds.h"

struct RowCase {
    const char *rule, *m;
    float growth = 0.0f, clip = 1.0f;
    bool by_rms = false, relative = false, nesterov = true;
};

static const RowCase cases[] = {
    {"adam-mini", "fp32"},
    {"rmnp", "fp32"},
    {"normuon-lite", "fp32"},
    {"adafactor", "fp32"},
    {"adafactor", "none", 0.0f, 0.3f},
    {"adafactor", "none", 0.0f, 0.0f, true, true},
    {"came", "fp32"},
    {"came", "fp32", 1.01f},
    {"adafactor", "fp32", 1.02f, 1.0f, true},
    {"rmnp", "fp32", 1.0f},
    {"rmnp", "fp32", 1.05f, 1.0f, false, false, false},
    {"normuon-lite", "fp32", 0.0f, 1.0f, false, false, false},
    {"adamw", "fp32", 1.01f},
    {"sgd", "fp32", 1.05f},
};

static OptimConfig case_config(const RowCase* c, const char* weights, const char* m) {
    OptimConfig config = make_config(c->rule, weights, strcmp(c->m, "none") ? m : "fp32");
    config.m = strcmp(c->m, "none") ? m : "none";
    config.overrides = "none";
    config.limit_growth = c->growth, config.clip_update = c->clip;
    config.scale_by_rms = c->by_rms, config.relative_steps = c->relative;
    config.nesterov = c->nesterov;
    return resolved(config);
}

struct Exact {
    double p[MODEL_MAX], m[MODEL_MAX], v[MODEL_MAX], u[MODEL_MAX], g[MODEL_MAX];
    double row[2][2600], col[2][2600];  // averages of squares, and those of came's confidence
    double norm;                        // of the last step's update
    double bound[MODEL_MAX];            // of the error of p
};

// Moves averages by row and column towards the means of x^2 + eps.
static void average_factors(Exact* e, int k, int64_t rows, int64_t cols, const double* x, double rest, double eps) {
    static double row[2600], col[2600];
    memset(row, 0, sizeof(row));
    memset(col, 0, sizeof(col));
    for (int64_t i = 0; i < rows * cols; i++) {
        row[i / cols] += (x[i] * x[i] + eps) / (double)cols;
        col[i % cols] += (x[i] * x[i] + eps) / (double)rows;
    }
    for (int64_t i = 0; i < rows; i++) e->row[k][i] += rest * (row[i] - e->row[k][i]);
    for (int64_t j = 0; j < cols; j++) e->col[k][j] += rest * (col[j] - e->col[k][j]);
}

// Returns the second moment that the factors stand for, at element i.
static double factored(const Exact* e, int k, int64_t rows, int64_t cols, int64_t i, double correction) {
    double mean = 0.0;
    for (int64_t r = 0; r < rows; r++) mean += e->row[k][r] / (double)rows;
    return e->row[k][i / cols] * e->col[k][i % cols] / mean / correction;
}

static double norm_of(const double* x, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    return sqrt(sum);
}

// Computes the update u of the factored rules.
static void exact_factored(Exact* e, const OptimConfig* config, int64_t rows, int64_t cols, int step) {
    static double inverse[MODEL_MAX];
    const bool came = is(config->rule, "came");
    const double beta1 = is(config->m, "none") ? 0.0 : (double)config->beta1, beta2 = config->beta2;
    const int64_t n = rows * cols;
    average_factors(e, 0, rows, cols, e->g, came ? 1.0 - beta2 : pow(step, -0.8), 0.0);
    const double correction = came ? 1.0 - pow(beta2, step) : 1.0;
    for (int64_t r = 0; r < rows; r++) {  // a row's are in proportion, so the mean is taken once
        const double first = factored(e, 0, rows, cols, r * cols, correction) / e->col[0][0];
        for (int64_t j = 0; j < cols; j++) {
            const int64_t i = r * cols + j;
            e->u[i] = e->g[i] / sqrt(first * e->col[0][j]);
        }
    }
    const double rms = norm_of(e->u, n) / sqrt((double)n), clip = config->clip_update;
    for (int64_t i = 0; i < n; i++) {
        if (clip > 0.0 && rms > clip) e->u[i] *= clip / rms;
        e->m[i] += (1.0 - beta1) * (e->u[i] - e->m[i]);
        inverse[i] = e->u[i] - e->m[i];
        e->u[i] = e->m[i];
    }
    if (!came || rows == 1) return;
    average_factors(e, 1, rows, cols, inverse, 1.0 - (double)config->beta3, 1e-16);
    for (int64_t r = 0; r < rows; r++) {
        const double all = 1.0 - pow((double)config->beta3, step);
        const double first = factored(e, 1, rows, cols, r * cols, all) / e->col[1][0];
        for (int64_t j = 0; j < cols; j++) e->u[r * cols + j] /= sqrt(first * e->col[1][j]);
    }
}

// Computes the update u of the rules with normalised rows.
static void exact_rows(Exact* e, const OptimConfig* config, int64_t rows, int64_t cols) {
    const bool lite = is(config->rule, "normuon-lite");
    const double beta = config->momentum, look = config->nesterov ? beta : 1.0,
                 shape = sqrt(rows > cols ? (double)rows / (double)cols : 1.0);
    for (int64_t r = 0; r < rows; r++) {
        double *u = e->u + r * cols, *m = e->m + r * cols, *g = e->g + r * cols;
        for (int64_t j = 0; j < cols; j++) {
            m[j] += (1.0 - beta) * (g[j] - m[j]);
            u[j] = g[j] + look * (m[j] - g[j]);
        }
        const double norm = norm_of(u, cols);
        e->row[0][r] += (1.0 - (double)config->beta2) * (norm * norm / (double)cols - e->row[0][r]);
        for (int64_t j = 0; j < cols; j++) u[j] *= lite ? 1.0 / sqrt(e->row[0][r]) : shape / norm;
    }
    const double norm = norm_of(e->u, rows * cols);
    for (int64_t i = 0; i < rows * cols && lite; i++) e->u[i] *= shape * sqrt((double)rows) / norm;
}

// Computes the update u of adam-mini, adamw and sgd.
static void exact_others(Exact* e, const OptimConfig* config, int64_t rows, int64_t cols, int step, double wd) {
    const double beta1 = config->beta1, beta2 = config->beta2;
    for (int64_t i = 0; i < rows * cols; i++) {
        if (is(config->rule, "sgd")) {
            e->u[i] = e->m[i] = beta1 * e->m[i] + e->g[i] + wd * e->p[i];
            continue;
        }
        const double norm = i % cols == 0 ? norm_of(e->g + i, cols) : 0.0;
        const bool mini = is(config->rule, "adam-mini");
        double* v = mini ? &e->row[0][i / cols] : &e->v[i];
        if (!mini || i % cols == 0)
            *v += (1.0 - beta2) * ((mini ? norm * norm / (double)cols : e->g[i] * e->g[i]) - *v);
        e->m[i] += (1.0 - beta1) * (e->g[i] - e->m[i]);
        e->u[i] = e->m[i] / (1.0 - pow(beta1, step)) / (sqrt(*v / (1.0 - pow(beta2, step))) + (double)config->eps);
    }
}

// One step of a tensor. Sums of squares do not cancel: some 200 roundings bound them, and an update's error stays below
// 2^-16 of it; came's residual and sums of products do cancel, which costs 2 bits.
static void exact_step(Exact* e, const OptimConfig* config, const OptimTensor* t, int step, double lr) {
    const int64_t n = t->rows * t->cols;
    const double wd = t->decay ? (double)config->weight_decay : 0.0;
    const bool sgd = is(config->rule, "sgd");
    const RowRule rule = find_row(rule_table(), config->rule)->rows;
    if (rule == ROWS_ADAFACTOR || rule == ROWS_CAME) {
        exact_factored(e, config, t->rows, t->cols, step);
    } else if (rule == ROWS_RMNP || rule == ROWS_NORMUON_LITE) {
        exact_rows(e, config, t->rows, t->cols);
    } else {
        exact_others(e, config, t->rows, t->cols, step, wd);
    }
    double factor = config->scale_by_rms ? fmax(1e-3, norm_of(e->p, n) / sqrt((double)n)) : 1.0;
    const double norm = factor * norm_of(e->u, n), most = (double)config->limit_growth * e->norm;
    if (config->limit_growth > 0.0f && e->norm > 0.0 && norm > most) factor *= most / norm;
    e->norm = config->limit_growth > 0.0f && e->norm > 0.0 && norm > most ? most : norm;
    if (config->relative_steps) lr = fmin(lr, 1.0 / sqrt((double)step));
    const double most_u = norm_of(e->u, n);
    for (int64_t i = 0; i < n; i++) {
        e->p[i] = e->p[i] * (sgd ? 1.0 : 1.0 - lr * wd) - lr * factor * e->u[i];
        e->bound[i] += lr * factor * (fabs(e->u[i]) + most_u * 0x1p-8) * 0x1p-14 + fabs(e->p[i]) * 0x1p-22;
    }
}

static void check_case(Test* test, const RowCase* c) {
    static Exact e[TENSORS];
    static float got[MODEL_MAX];
    const OptimConfig config = case_config(c, "fp32", "fp32");
    constexpr int STEPS = 6;
    OptimRun run;
    run_open(&run, &config, model, OPTIM_FP32);
    run_steps(&run, 1, STEPS, plain_steps());
    memset(e, 0, sizeof(e));
    double worst = 0.0;
    for (int t = 0; t < TENSORS; t++) {
        const int64_t n = model[t].rows * model[t].cols;
        for (int64_t i = 0; i < n; i++) e[t].p[i] = run_start(t, i);
        for (int step = 1; step <= STEPS; step++) {
            for (int64_t i = 0; i < n; i++) e[t].g[i] = 0.5 * (double)gradient(step, t * 1000000 + i);
            exact_step(&e[t], &config, &model[t], step, (double)1e-2f);
        }
        optim_get_weights(run.optim, t, got);
        for (int64_t i = 0; i < n; i++) worst = fmax(worst, fabs((double)got[i] - e[t].p[i]) / e[t].bound[i]);
    }
    expect(worst <= 1.0 && worst > 1e-4, "%s, m %s, growth %g: %g of the bound", c->rule, c->m, (double)c->growth,
           worst);
    note(test, "%s %.2g of the bound", c->rule, worst);
    expect_planned(test, &run, c->rule);
}

TEST(rows_against_double) {
    for (const RowCase& c : cases) check_case(test, &c);
}

// The numbers that are kept, by hand: a tensor's rows, then its columns; came's confidence after them.
TEST(rows_numbers_kept) {
    const std::tuple<const char*, int, int> rows[] = {
        {"adam-mini", 1, 0}, {"rmnp", 0, 0}, {"normuon-lite", 1, 0}, {"adafactor", 1, 1}, {"came", 2, 2}};
    for (const auto& [rule, each_row, each_column] : rows) {
        const RowCase c = {rule, "fp32"};
        const OptimConfig config = case_config(&c, "fp32", "fp32");
        OptimRun run;
        run_open(&run, &config, model, OPTIM_FP32);
        int64_t want = 0, found = optim_stream_named(run.optim, "v").elements;
        for (const OptimTensor& t : model) want += each_row * t.rows + each_column * t.cols;
        expect(found == want, "%s: %lld numbers, %lld wanted", rule, (long long)found, (long long)want);
    }
}

TEST(rows_resume_skip_and_shard) {
    for (const RowCase& c : cases) {
        for (const char* m : {"bf16:sr", "dyn8/256", "de4/32@dq8", "e4m3/tensor"}) {
            const OptimConfig config = case_config(&c, "bf16:sr", m);
            if (is(c.m, "none") && !is(m, "bf16:sr")) continue;
            const int held = expect_resumed_and_sharded(test, &config, model, TENSORS, plain_steps(), false);
            expect(held == TENSORS, "%d tensors are whole in a shard", held);
        }
    }
}

// Conversions on load: what v becomes, from the checkpoint's run to another rule's.

static bool load(const OptimRun* from, OptimRun* to, char* error) {
    Stored context;
    return run_load(to, from, &context, 0, error);
}

static const float* numbers_of(const OptimRun* run) {
    return (const float*)optim_stream_named(run->optim, "v").data;
}

TEST(rows_convert_v) {
    const RowCase adamw = {"adamw", "fp32"}, adafactor = {"adafactor", "fp32"}, mini = {"adam-mini", "fp32"};
    const OptimConfig config[] = {case_config(&adamw, "fp32", "fp32"), case_config(&adafactor, "fp32", "fp32"),
                                  case_config(&mini, "fp32", "fp32")};
    OptimRun run[4];  // adamw, then adafactor and adam-mini made of it, then adamw made of adafactor
    for (int k = 0; k < 4; k++) run_open(&run[k], &config[k % 3], model, OPTIM_FP32);
    run_steps(&run[0], 1, 3, plain_steps());
    for (int k = 1; k < 3; k++) expect(load(&run[0], &run[k], error), "%s", error);
    expect(load(&run[1], &run[3], error), "%s", error);
    const float *v = numbers_of(&run[0]), *factors = numbers_of(&run[1]), *rows = numbers_of(&run[2]);
    const float* back = numbers_of(&run[3]);
    int64_t first = 0, row = 0;
    double worst = 0.0;
    for (int t = 0; t < TENSORS; t++) {
        const int64_t R = model[t].rows, C = model[t].cols, at = run[0].tensor[t].offset;
        double all = 0.0;
        for (int64_t i = 0; i < R; i++) {
            double mean = 0.0;
            for (int64_t j = 0; j < C; j++) mean += (double)v[at + i * C + j] / (double)C;
            worst = fmax(worst, fabs((double)factors[first + i] / mean - 1.0));
            worst = fmax(worst, fabs((double)rows[row + i] / mean - 1.0));
            all += mean / (double)R;
        }
        for (int64_t j = 0; j < C; j++) {
            double mean = 0.0;
            for (int64_t i = 0; i < R; i++) mean += (double)v[at + i * C + j] / (double)R;
            worst = fmax(worst, fabs((double)factors[first + R + j] - mean) / (mean > 0.0 ? mean : 1.0));
            for (int64_t i = 0; i < R; i++) {
                const double product = (double)factors[first + i] * (double)factors[first + R + j] / all;
                const double found = (double)back[at + i * C + j];
                worst = fmax(worst, fabs(found - product) / (product > 0.0 ? product : 1.0));
            }
        }
        first += R + C, row += R;
    }
    expect(worst < 1e-6, "off by %.1e", worst);
}

// A moment without a counterpart is refused; one that the new rule does not keep is left behind.
TEST(rows_convert_refusals) {
    const char* const rows[][3] = {{"adamw", "came", "is by rows"},
                                   {"adamw", "normuon-lite", "is by rows"},
                                   {"normuon-lite", "adamw", "is of elements"},
                                   {"lion", "adafactor", "keeps no second moment"},
                                   {"rmnp", "adam-mini", "keeps no second moment"},
                                   {"adamw", "rmnp", nullptr},
                                   {"lion", "rmnp", nullptr},
                                   {"came", "adafactor", nullptr},
                                   {"adafactor", "rmnp", nullptr}};
    for (const auto& [from, to, says] : rows) {
        OptimRun run[2];
        for (int k = 0; k < 2; k++) {
            const RowCase c = {k ? to : from, "fp32"};
            const OptimConfig config = case_config(&c, "fp32", "fp32");
            run_open(&run[k], &config, model, OPTIM_FP32);
        }
        run_steps(&run[0], 1, 1, plain_steps());
        error[0] = 0;
        const bool loaded = load(&run[0], &run[1], error);
        expect(loaded == !says && (loaded || strstr(error, says)), "%s to %s: %s", from, to, error);
    }
}

// The limiter's norms are part of a checkpoint, and a run without them begins anew.
TEST(limit_growth_resumes) {
    const RowCase off = {"adamw", "fp32"}, on = {"adamw", "fp32", 1.01f};
    const OptimConfig config[] = {case_config(&off, "fp32", "fp32"), case_config(&on, "fp32", "fp32")};
    for (int from = 0; from < 2; from++) {
        for (int to = 0; to < 2; to++) {
            OptimRun run[2];
            run_open(&run[0], &config[from], model, OPTIM_FP32);
            run_open(&run[1], &config[to], model, OPTIM_FP32);
            run_steps(&run[0], 1, 3, plain_steps());
            expect(load(&run[0], &run[1], error), "%s", error);
            for (OptimRun& each : run) run_steps(&each, 4, 6, plain_steps());
            expect(!difference(&run[0], &run[1]) == (from == to), "%d to %d", from, to);
        }
    }
}

// A tensor whose first gradients are zero must not be held near 0 afterwards (families.md: 1387 steps).
TEST(limit_growth_begins_after_zeros) {
    const SettleArguments none = {};
    expect(limit(5.0f, 0.0f, 1.01f) == 1.0f && limit(0.0f, 0.0f, 1.01f) == 1.0f, "a last norm of 0 limits nothing");
    expect(limit(2.0f, 1.0f, 1.5f) == 0.75f && limit(1.5f, 1.0f, 1.5f) == 1.0f, "cut to growth times the last");
    expect(limit(NAN, 1.0f, 1.5f) == 1.0f && limit(INFINITY, 1.0f, 1.5f) == 1.0f, "not finite: left alone");
    float norms[1] = {3.0f};
    SettleArguments a = none;
    SumTensor t = {};
    a.sum = SUM_STEP, a.norms = norms;
    settle_norm(a, t, NAN, 1.0f);
    expect(norms[0] == 3.0f, "a norm that is not finite is not kept: %g", (double)norms[0]);
}

CACHE_TEST(JIT_TEST, rows_equal_cpu_gpu) {
    for (const RowCase& c : cases) {
        for (const char* m : {"fp32", "bf16:sr", "dyn8/256", "de4/32@dq8", "e4m3/tensor"}) {
            if (is(c.m, "none") && !is(m, "fp32")) continue;
            const OptimConfig config = case_config(&c, "bf16:sr", m);
            expect_equal_cpu_gpu(test, &config, model, TENSORS, OPTIM_FP32, 8, plain_steps(5));
        }
    }
}

// More tensors than a warp of sums.cuh looks through at a time. Columns are multiples of 8, so passes load rows ahead;
// tensor 40 has broken slabs, panels and runs of columns.
CACHE_TEST(JIT_TEST, rows_of_many_tensors_equal_cpu_gpu) {
    static OptimTensor many[MAX_TENSORS];
    for (int t = 0; t < MAX_TENSORS; t++) {
        const int64_t rows = t % 3 == 0 ? 1
                             : t == 40  ? 130
                                        : 7 + t,
                      cols = t == 40 ? 1104 : 8 * (t % 5) + t % 2 * 24 + 8;
        many[t] = {formatted("h.%d.weight", t), rows, cols, t % 3 != 0, 0};
    }
    for (const char* rule : {"adam-mini", "rmnp", "normuon-lite", "adafactor", "came"}) {
        for (const char* m : {"bf16:sr", "soft8/32"}) {
            OptimConfig config = make_config(rule, "bf16:sr", "fp32");
            config.m = m, config.overrides = "none", config.grads = "bf16";
            config = resolved(config);
            expect_equal_cpu_gpu(test, &config, many, MAX_TENSORS, OPTIM_FP32, 3, plain_steps(2));
        }
    }
}

// Each thread of a warp finds the numbers of its 8 or 16 columns.
TEST(rows_columns_lie_as_they_are_loaded) {
    static float numbers[2 * READY_COLS];
    for (uint32_t col = 0; col < 2 * READY_COLS; col++) numbers[ready_place(col)] = (float)col;
    for (int n : {8, 16}) {
        for (uint32_t col = 0; col < 2 * READY_COLS; col += (uint32_t)n) {
            float x[16];
            ready_load(numbers, col, x, n);
            for (int i = 0; i < n; i++) expect(x[i] == (float)(col + (uint32_t)i), "%d of columns from %u on", n, col);
        }
    }
}

// The limiter reads v and slow in every kind of format.
CACHE_TEST(JIT_TEST, limit_growth_equals_cpu_gpu) {
    for (const char* v : {"adalog8:sr", "adalog8", "udyn8/256", "sqrt4/32@dq8", "udyn8/rank1", "ulin8/256"}) {
        for (const char* weights : {"bf16+16", "e4m3:sr", "bf16:kahan"}) {
            for (const char* rule : {"adam", "ademamix"}) {
                OptimConfig config = make_config(rule, weights, "fp32");
                config.m = "soft8/32", config.v = v, config.limit_growth = 1.01f;
                expect_equal_cpu_gpu(test, &config, model, TENSORS, OPTIM_FP32, 6, plain_steps(3));
            }
        }
    }
}
