// See rows.h.
#include "rows.h"

#include "each.cuh"

// The plan.

bool config_scaled(const OptimConfig* config) {
    const bool by_rms = config->scale_by_rms && rule_of(config)->rows == ROWS_ADAFACTOR;
    return config->limit_growth > 0.0f || by_rms;
}

bool update_reads_whole(const OptimConfig* config) {
    return config->limit_growth > 0.0f || reads_whole(rule_of(config));
}

bool config_reads_whole(const OptimConfig* config) {
    if (update_reads_whole(config)) return true;
    const Rows rows = config_rows(config);
    return measured(rows.weights) || measured(rows.m) || measured(rows.v);
}

static void passes_add(RowPlan* its, const OptimConfig* config) {
    const RowRule rule = rule_of(config)->rows;
    const bool factored = rule == ROWS_ADAFACTOR || rule == ROWS_CAME;
    auto add = [&](bool wanted, Sum sum) {
        if (wanted) its->pass[its->passes++] = sum;
    };
    add(rule == ROWS_ADAM_MINI, SUM_SQUARES);
    add(rule == ROWS_RMNP || rule == ROWS_NORMUON_LITE, SUM_DIRECTION);
    add(factored, SUM_MOMENTS);
    add(factored && config->clip_update > 0.0f, SUM_UPDATE);
    add(rule == ROWS_CAME, SUM_RESIDUAL);
    add(rule == ROWS_ADAFACTOR && config->scale_by_rms, SUM_WEIGHTS);
    add(config->limit_growth > 0.0f, SUM_STEP);
}

RowPlan row_plan(const Plan* plan, int index, const OptimTensor* tensors, int count) {
    const LaunchPlan* launch = &plan->launch[index];
    const ArenaRun* run = &launch->run;
    const Span span = format_span(launch->rows.v);
    RowPlan its = {};
    passes_add(&its, &launch->config);
    its.tensor = (SumTensor*)memory_zero((size_t)count + 1, sizeof(SumTensor));
    bool columns = false;
    int64_t tile = 0;
    for (int i = 0; i < its.passes; i++) columns = columns || sum_has_columns(its.pass[i]);
    for (int t = 0; t < count && its.passes > 0; t++) {
        const OptimTensor* tensor = &tensors[t];
        if (plan->launch_of[t] != index || tensor->offset < run->begin || tensor->offset >= run->end) continue;
        if (tensor->cols == 0) continue;  // an empty part of a tensor has no sums
        SumTensor* sum = &its.tensor[its.tensors++];
        sum->tile = tile, sum->kept = (tensor->offset - plan->weights[launch->weights].run.begin) / TILE_ELEMENTS;
        tile += tensor_padded(tensor) / TILE_ELEMENTS;
        sum->rows = tensor->rows, sum->cols = tensor->cols;
        sum->panels = ceil_div(tensor->cols, SUM_COLS), sum->slabs = ceil_div(tensor->rows, SUM_ROWS);
        sum->number = span == SPAN_RUN ? 0 : plan->at[t][span] - run->at[span];
        sum->ready = plan->ready[t];
        sum->norm = plan->at[t][SPAN_NORM] - run->at[SPAN_NORM];
        sum->group = (uint32_t)plan->group_of[t];
        sum->block = its.blocks;
        its.blocks += sum->slabs * sum->panels;
        sum->settle = its.settles;
        sum->settles = ceil_div(sum->rows + (columns ? sum->cols : 0), SETTLE_BLOCK);
        its.settles += sum->settles;
        sum->row_parts = its.parts;
        sum->col_parts = sum->row_parts + sum->panels * sum->rows;
        its.parts = sum->col_parts + (columns ? sum->slabs * sum->cols : 0);
    }
    its.tensor[its.tensors].block = its.blocks, its.tensor[its.tensors].settle = its.settles;
    return its;
}

RowRange row_range(const RowPlan* plan, int64_t begin, int64_t end) {
    int64_t first = 0;
    while (first < plan->tensors && plan->tensor[first].tile < begin) first++;
    int64_t last = first;
    while (last < plan->tensors && plan->tensor[last].tile < end) last++;
    const SumTensor *begins = &plan->tensor[first], *ends = &plan->tensor[last];
    return {first, last - first, begins->block, ends->block - begins->block, ends->settle - begins->settle};
}

void row_plan_free(RowPlan* plan) {
    free(plan->tensor);
    *plan = {};
}

// Sums, in plain C.

constexpr int PANEL = SUM_COLS + 32;  // a panel and the rest of its first and last runs of 16 elements

// Loads `n` elements of a tensor from `element` on, both multiples of 16.
static void sum_load(const FormatRow* format, const Streams& whole, int64_t element, int64_t n, float* x) {
    for (int64_t done = 0; done < n;) {
        const int64_t tile = (element + done) / TILE_ELEMENTS, first = (element + done) % TILE_ELEMENTS;
        const int64_t some = n - done < TILE_ELEMENTS - first ? n - done : TILE_ELEMENTS - first;
        format->load(row_tile(format, whole, tile), (int)first, x + done, (int)some, NoiseKey{});
        done += some;
    }
}

// Computes the values that a pass squares, for `held` columns of a row from `col` on.
static void sum_values(const Rows* rows, const StepArguments* step, const TileStreams* whole, const SumArguments* sums,
                       const SumTensor* tensor, int64_t row, int64_t col, int held, float* x) {
    float p[PANEL] = {}, g[PANEL] = {}, m[PANEL] = {}, v[PANEL] = {}, slow[PANEL] = {}, root[PANEL];
    const int64_t element = row * tensor->cols + col, from = element / 16 * 16;
    const int64_t shift = element - from, n = ceil_div(shift + held, 16) * 16;
    const bool decays = sums->sum == SUM_STEP && !rows->rule->decoupled;
    Hyper hyper = step->group[tensor->group];
    if (sums->sum != SUM_WEIGHTS) sum_load(rows->grads, whole->grads, from, n, g);
    if (sums->sum == SUM_WEIGHTS || decays) sum_load(rows->weights, whole->weights, from, n, p);
    if (sum_reads_m(sums->sum)) sum_load(rows->m, whole->m, from, n, m);
    const float* numbers = sums->numbers + tensor->ready;
    const Span span = format_span(rows->v);
    if (sum_reads_v(sums->sum) && !rows->rule->rows) sum_load(rows->v, whole->v, from, n, v);
    if (sum_reads_v(sums->sum) && rows->rule->keeps_slow) sum_load(rows->m, whole->slow, from, n, slow);
    for (int i = 0; i < held; i++) {
        g[shift + i] = exact_mul(g[shift + i], *step->grad_scale);
        if (decays) g[shift + i] = exact_fma(hyper.decay, p[shift + i], g[shift + i]), p[shift + i] = 0.0f;
        if (!sum_reads_v(sums->sum) || !rows->rule->rows) continue;
        v[shift + i] = number_at(span, numbers, tensor->rows, row, col + i);
        if (!rows->rule->pairs) continue;
        slow[shift + i] = number_at(span, numbers + ready_pair(tensor->rows, tensor->cols), tensor->rows, row, col + i);
    }
    if (sums->sum == SUM_STEP) {
        if (sums->by_rms) hyper = hyper_scaled(hyper, step->factor[tensor->kept]);
        hyper.decay = 0.0f;
        rows->rule->update(hyper, p + shift, g + shift, m + shift, v + shift, slow + shift, root, held);
        memcpy(x, p + shift, (size_t)held * sizeof(float));
        return;
    }
    for (int64_t i = shift; i < shift + held; i++) x[i - shift] = sum_value(sums->sum, hyper, p[i], g[i], m[i], v[i]);
}

// Returns a panel's part of a row's sum of squares, and adds the squares to the columns' sums.
static float row_sum(const float* x, int held, float* column) {
    float lane[32] = {};
    for (int i = 0; i < held; i++) {
        lane[i / SUM_LANE] = exact_fma(x[i], x[i], lane[i / SUM_LANE]);
        column[i] = exact_fma(x[i], x[i], column[i]);
    }
    return sum_by_halves(lane);
}

// Makes the partial sums of a slab and panel. `whole` has the tensor's arrays.
static void sum_block(const Rows* rows, const StepArguments* step, const TileStreams* whole, const SumArguments* sums,
                      const SumTensor* tensor, int64_t slab, int64_t panel) {
    float column[SUM_WARPS][SUM_COLS] = {}, x[SUM_COLS];
    const int64_t first = slab * SUM_ROWS, col = panel * SUM_COLS;
    const int held = (int)(tensor->cols - col < SUM_COLS ? tensor->cols - col : SUM_COLS);
    for (int64_t row = first; row < sum_end(*tensor, slab); row++) {
        sum_values(rows, step, whole, sums, tensor, row, col, held, x);
        sums->parts[tensor->row_parts + panel * tensor->rows + row] =
            row_sum(x, held, column[(row - first) % SUM_WARPS]);
    }
    for (int i = 0; i < held && sum_has_columns(sums->sum); i++) {
        float sum = column[0][i];
        for (int w = 1; w < SUM_WARPS; w++) sum = exact_add(sum, column[w][i]);
        sums->parts[tensor->col_parts + slab * tensor->cols + col + i] = sum;
    }
}

void rows_sum_cpu(const Rows* rows, const StepArrays* arrays, const StepArguments* step, const SumArguments* sums) {
    if (!is_finite(*step->grad_scale)) return;  // the step changes nothing
    for (int64_t t = 0; t < sums->tensors; t++) {
        const SumTensor* tensor = &sums->tensor[t];
        const TileStreams whole = tile_streams(*arrays, *step, step->tiles[tensor->tile]);
#pragma omp parallel for schedule(static)
        for (int64_t b = 0; b < tensor->slabs * tensor->panels; b++) {
            sum_block(rows, step, &whole, sums, tensor, b / tensor->panels, b % tensor->panels);
        }
    }
}

// The end of a pass.

static void settle_cpu(const SettleArguments* a, const SumTensor* t) {
    float sum[SETTLE_THREADS] = {};
    for (int64_t i = 0; i < t->rows; i++) {
        sum[i % SETTLE_THREADS] = exact_add(sum[i % SETTLE_THREADS], settle_row(*a, *t, i));
    }
    for (int64_t j = 0; j < t->cols && sum_has_columns(a->sum); j++) settle_column(*a, *t, j);
    const float whole = settle_tensor(*a, *t, sum_by_halves(sum));
    for (int64_t i = 0; i < t->rows; i++) settle_ready(*a, *t, i, whole);
    for (int64_t k = 0; k < settle_tiles(*a, *t); k++) settle_tile(*a, *t, k, whole);
    settle_norm(*a, *t, sum[0], whole);
}

#ifdef __CUDACC__
// Three kernels do the same, so that thread blocks share the rows, columns and tiles of each tensor. A row leaves its
// part of the tensor's sum at its first partial sum, and the tensor leaves its number at the first row's. A thread
// takes one row or column, or one row and some tiles.

// Finds a thread's tensor, and returns the thread's number within the tensor. The lanes of a warp look at 32 tensors at
// a time, which divide the remaining ones into 32 parts.
__device__ __forceinline__ int64_t settle_find(const SettleArguments& a, SumTensor* t) {
    const int64_t b = a.tensor[0].settle + blockIdx.x;
    int64_t first = 0;
    for (int64_t left = a.tensors; left > 1;) {
        const int64_t step = (left + 31) / 32, at = threadIdx.x % 32 * step;
        const bool before = at < left && a.tensor[first + at].settle <= b;
        const int64_t skipped = (__popc(__ballot_sync(0xffffffffu, before)) - 1) * step;
        first += skipped;
        left = left - skipped < step ? left - skipped : step;
    }
    *t = a.tensor[first];
    return (b - t->settle) * SETTLE_BLOCK + threadIdx.x;
}

// grid: a.blocks, block: SETTLE_BLOCK; deterministic.
__global__ void __launch_bounds__(SETTLE_BLOCK) rows_settle_parts_kernel(SettleArguments a) {
    if (!is_finite(*a.grad_scale)) return;  // the step changes nothing
    if (a.changing) a.one_minus_beta2 = a.changing[0], a.root2 = a.changing[1], a.root3 = a.changing[2];
    SumTensor t;
    const int64_t i = settle_find(a, &t);
    if (i < t.rows) {
        a.parts[t.row_parts + i] = settle_row(a, t, i);
    } else if (sum_has_columns(a.sum) && i < t.rows + t.cols) {
        settle_column(a, t, i - t.rows);
    }
}

// grid: a thread block a tensor, block: SETTLE_THREADS; deterministic.
__global__ void __launch_bounds__(SETTLE_THREADS) rows_settle_tensor_kernel(SettleArguments a) {
    if (!is_finite(*a.grad_scale)) return;
    __shared__ float sum[SETTLE_THREADS];
    const SumTensor t = a.tensor[blockIdx.x];
    const float* part = a.parts + t.row_parts;
    float its = 0.0f;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < t.rows; i += SETTLE_THREADS) its = exact_add(its, part[i]);
    sum[threadIdx.x] = its;
    for (int half = SETTLE_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half) sum[threadIdx.x] = exact_add(sum[threadIdx.x], sum[threadIdx.x + half]);
    }
    if (threadIdx.x > 0) return;
    const float whole = settle_tensor(a, t, sum[0]);
    a.parts[t.row_parts] = whole;
    settle_norm(a, t, sum[0], whole);
}

// grid: a.blocks, block: SETTLE_BLOCK; deterministic.
__global__ void __launch_bounds__(SETTLE_BLOCK) rows_settle_ready_kernel(SettleArguments a) {
    if (!is_finite(*a.grad_scale)) return;
    SumTensor t;
    const int64_t i = settle_find(a, &t);
    const float whole = a.parts[t.row_parts];
    if (i < t.rows) settle_ready(a, t, i, whole);
    for (int64_t k = i; k < settle_tiles(a, t); k += t.settles * SETTLE_BLOCK) settle_tile(a, t, k, whole);
}

static void settle_gpu(const Device* dev, const SettleArguments* a) {
    const bool rows_alone = a->sum == SUM_SQUARES || (a->sum == SUM_DIRECTION && a->rule != ROWS_NORMUON_LITE);
    const unsigned blocks = (unsigned)a->blocks;
    rows_settle_parts_kernel<<<blocks, SETTLE_BLOCK, 0, dev->stream>>>(*a);
    check_launch();
    if (rows_alone) return;  // no number belongs to the tensor
    rows_settle_tensor_kernel<<<(unsigned)a->tensors, SETTLE_THREADS, 0, dev->stream>>>(*a);
    check_launch();
    rows_settle_ready_kernel<<<blocks, SETTLE_BLOCK, 0, dev->stream>>>(*a);
    check_launch();
}
#endif

void rows_settle(const Device* dev, const SettleArguments* settle) {
    if (settle->tensors == 0) return;
#ifdef __CUDACC__
    if (dev->gpu) return settle_gpu(dev, settle);
#endif
    if (!is_finite(*settle->grad_scale)) return;
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < settle->tensors; t++) settle_cpu(settle, &settle->tensor[t]);
}
