// Tests of rules that read rows, columns and tensors (optim/rows/rows.cuh), and of --limit-growth: conversions on load,
// how the limiter begins, and where the numbers of columns lie. What a step computes is in laws_oracle.cu.
#include "../../optim/placed.h"
#include "../../optim/rows/rows.h"
#include "laws.h"

constexpr int TENSORS = MODEL_COUNT;

static OptimConfig rows_config(const char* rule) {
    OptimConfig config = make_config(rule, "fp32", "fp32");
    config.overrides = "none";
    return resolved(config);
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
    const OptimConfig config[] = {rows_config("adamw"), rows_config("adafactor"), rows_config("adam-mini")};
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

// A v that is given to came, as from another package's states, leaves the second numbers at zero.
TEST(rows_moment_of_came) {
    const OptimConfig config = rows_config("came");
    OptimRun run;
    run_open(&run, &config, model, OPTIM_FP32);
    const float* numbers = numbers_of(&run);
    for (int t = 0; t < TENSORS; t++) {
        const int64_t R = model[t].rows, C = model[t].cols;
        std::vector<float> v((size_t)(R * C), 3.0f);
        expect(optim_moment(run.optim, t, SLOT_V, v.data(), true), "%s keeps no v", model[t].name);
        for (int64_t i = 0; i < 2 * (R + C); i++)
            expect(fabsf(numbers[i] - (i < R + C ? 3.0f : 0.0f)) < 1e-5f, "%s: number %d is %g", model[t].name, (int)i,
                   (double)numbers[i]);
        numbers += 2 * (R + C);
    }
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
            const OptimConfig config = rows_config(k ? to : from);
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
    OptimConfig config[] = {rows_config("adamw"), rows_config("adamw")};
    config[1].limit_growth = 1.01f;
    for (int from = 0; from < 2; from++) {
        OptimRun run[2];
        run_open(&run[0], &config[from], model, OPTIM_FP32);
        run_open(&run[1], &config[1 - from], model, OPTIM_FP32);
        run_steps(&run[0], 1, 3, plain_steps());
        expect(load(&run[0], &run[1], error), "%s", error);
        for (OptimRun& each : run) run_steps(&each, 4, 6, plain_steps());
        expect(difference(&run[0], &run[1]), "the limiter does nothing");
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
