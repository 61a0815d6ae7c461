// See rows.h.
#include "../made.h"

#include "../each.cuh"
#include "../formats/adalog8.cuh"
#include "sums.cuh"

// The plan.

bool config_scaled(const OptimConfig* config) {
    return config->limit_growth > 0.0f || has_adafactor_lr(config, "scaled");
}

bool update_reads_whole(const OptimConfig* config) {
    return config->limit_growth > 0.0f || reads_whole(rule_of(config));
}

bool config_reads_whole(const OptimConfig* config) {
    if (update_reads_whole(config)) return true;
    const Rows rows = config_rows(config);
    return format_span(rows.weights) == SPAN_GIVEN || measured(rows.weights) || measured(rows.m) || measured(rows.v);
}

static void passes_add(RowPlan* plan, const OptimConfig* config) {
    for (int sum = SUM_SQUARES; sum <= SUM_STEP; sum++) {
        const bool asked = sum == SUM_UPDATE || sum == SUM_MOMENTUM ? config->clip_update > 0.0f
                           : sum == SUM_WEIGHTS                     ? has_adafactor_lr(config, "scaled")
                           : sum == SUM_STEP                        ? config->limit_growth > 0.0f
                                                                    : true;
        if (asked && sum_info((Sum)sum).rules >> rule_of(config)->rows & 1) plan->pass[plan->passes++] = (Sum)sum;
    }
}

RowPlan row_plan(const Plan* plan, int index, const OptimTensor* tensors, int count) {
    const LaunchPlan* launch = &plan->launch[index];
    const ArenaRun* run = &launch->run;
    const Span span = format_span(launch->rows.v);
    RowPlan result = {};
    passes_add(&result, &launch->config);
    result.tensor = (SumTensor*)memory_zero((size_t)count + 1, sizeof(SumTensor));
    bool columns = false;
    int64_t tile = 0;
    for (int i = 0; i < result.passes; i++) columns = columns || sum_info(result.pass[i]).has_columns;
    for (int t = 0; t < count && result.passes > 0; t++) {
        const OptimTensor* tensor = &tensors[t];
        const TensorPlan* own = &plan->tensor[t];
        if (own->launch != index || is_elsewhere(plan, t)) continue;
        SumTensor* sum = &result.tensor[result.tensors++];
        sum->tile = tile,
        sum->kept = (own->kept[SLOT_WEIGHTS].offset - plan->weights[launch->weights].run.begin) / TILE_ELEMENTS;
        tile += tensor_padded(tensor) / TILE_ELEMENTS;
        sum->rows = tensor->rows, sum->cols = tensor->cols;
        sum->panels = ceil_div(tensor->cols, SUM_COLS), sum->slabs = ceil_div(tensor->rows, SUM_ROWS);
        sum->number = span == SPAN_RUN ? 0 : own->at[span] - run->at[span];
        sum->ready = own->ready;
        sum->norm = own->at[SPAN_NORM] - run->at[SPAN_NORM];
        sum->group = (uint32_t)own->group;
        sum->block = result.blocks;
        result.blocks += sum->slabs * sum->panels;
        sum->settle = result.settles;
        sum->settles = sum->rows + (columns ? sum->cols : 0);
        result.settles += sum->settles;
        sum->row_parts = result.parts;
        sum->col_parts = sum->row_parts + sum->panels * sum->rows;
        result.parts = sum->col_parts + (columns ? sum->slabs * sum->cols : 0);
    }
    result.tensor[result.tensors].block = result.blocks, result.tensor[result.tensors].settle = result.settles;
    return result;
}

void row_plan_free(RowPlan* plan) {
    free(plan->tensor);
    *plan = {};
}

void rows_create(Optim* optim, int index) {
    StepLaunch* launch = &optim->launch[index];
    const Device* dev = optim->dev;
    RowWork* work = &launch->passes;
    work->plan = row_plan(optim->plan, index, optim->tensors, optim->count);
    if (work->plan.passes == 0) return;
    const int64_t bytes = work->plan.tensors * (int64_t)sizeof(SumTensor);
    work->tensor = table_memory(optim, bytes, work->plan.tensor);
    work->parts = table_memory<float>(optim, work->plan.parts * (int64_t)sizeof(float));
    if (!dev->gpu || launch->plan->tiles == 0 || dev->imagined) return;
    const OptimConfig* config = &launch->plan->config;
    const int shared_bytes = launch->kernel.measure.shared_bytes;
    auto make = [&](const char* name, Kernel* kernel) {
        kernel_make(optim, config, &launch->rows, name, 32 * SUM_WARPS, shared_bytes, kernel);
    };
    make("optim_sums_kernel", &work->kernel);
    if (optim->config.replays) make("optim_sums_replayed_kernel", &work->replayed);
}

// Sums, in plain C.

OPTIM_INLINE void sum_load_run(const FormatRow& format, const Streams& whole, int64_t element, float* x) {
    const StreamInfo* info = format.stream;
    const Streams streams = tile_at(info[0], info[1], info[2], whole, element / TILE_ELEMENTS);
    format.load(streams, (int)(element % TILE_ELEMENTS), x, SUM_LANE, NoiseKey{});
}

// Makes the partial sums of a slab and panel.
static void sum_block(const Rows* rows, const SumPass& pass, int64_t slab, int64_t panel) {
    const SumTensor& tensor = pass.tensor;
    const Sum sum = pass.sums.sum;
    float column[SUM_WARPS][SUM_COLS] = {};
    const int64_t first = slab * SUM_ROWS, begin = panel * SUM_COLS;
    const int64_t end = begin + SUM_COLS < tensor.cols ? begin + SUM_COLS : tensor.cols;
    for (int64_t row = first; row < sum_end(tensor, slab); row++) {
        float lane[32] = {}, x[1][SUM_LANE];
        for (int64_t col = begin; col < end; col += SUM_LANE) {
            const int held = (int)(end - col < SUM_LANE ? end - col : SUM_LANE);
            const SumColumns numbers = sum_columns(sum, rows->rule->rows, pass, col, held);
            sum_values(sum, *rows->rule, *rows->weights, *rows->grads, *rows->m, *rows->v, pass, numbers, row, col,
                       held, x);
            float* columns = &column[(row - first) % SUM_WARPS][col - begin];
            lane[(col - begin) / SUM_LANE] = sum_squares(x[0], held, columns);
        }
        pass.sums.parts[tensor.row_parts + panel * tensor.rows + row] = sum_by_halves(lane);
    }
    for (int64_t col = begin; col < end && sum_info(sum).has_columns; col++) {
        float whole = column[0][col - begin];
        for (int w = 1; w < SUM_WARPS; w++) whole = exact_add(whole, column[w][col - begin]);
        pass.sums.parts[tensor.col_parts + slab * tensor.cols + col] = whole;
    }
}

// Makes the partial sums of one pass on the CPU, as optim_sums_kernel does on a GPU.
static void rows_sum_cpu(const Rows* rows, const StepArrays* arrays, const StepArguments* step,
                         const SumArguments* sums) {
    if (!is_finite(*step->grad_scale)) return;  // the step changes nothing
    for (int64_t t = 0; t < sums->tensors; t++) {
        const SumTensor* tensor = &sums->tensor[t];
        const TileStreams whole = tile_streams(*arrays, *step, step->tiles[tensor->tile]);
        const SumPass pass = {*step, *sums, *tensor, whole, *step->grad_scale};
#pragma omp parallel for schedule(static)
        for (int64_t b = 0; b < tensor->slabs * tensor->panels; b++) {
            sum_block(rows, pass, b / tensor->panels, b % tensor->panels);
        }
    }
}

// The end of a pass, in three loops: over rows and columns, tensors, and rows again. A row leaves its part of the
// tensor's sum in the place of its first partial sum, and a tensor leaves its number in the place of its first row's.

// Returns the tensor of a row or column, given its number in the loop, and in *i its number in the tensor.
OPTIM_INLINE const SumTensor& settle_find(const SettleArguments& a, int64_t number, int64_t* i) {
    const int64_t at = a.tensor[0].settle + number;
    int64_t first = 0, end = a.tensors;
    while (end - first > 1) {
        const int64_t middle = (first + end) / 2;
        (a.tensor[middle].settle <= at ? first : end) = middle;
    }
    *i = at - a.tensor[first].settle;
    return a.tensor[first];
}

struct SettleParts {
    SettleArguments a;

    OPTIM_INLINE void at(int64_t number) const {
        if (!is_finite(*a.grad_scale)) return;  // the step changes nothing
        SettleArguments now = a;
        if (a.changing) now.one_minus_beta2 = a.changing[0], now.root2 = a.changing[1], now.root3 = a.changing[2];
        int64_t i;
        const SumTensor t = settle_find(a, number, &i);
        if (i < t.rows) {
            a.parts[t.row_parts + i] = settle_row(now, t, i);
        } else if (sum_info(a.sum).has_columns) {
            settle_column(now, t, i - t.rows);
        }
    }
};

struct SettleTensors {
    SettleArguments a;

    OPTIM_INLINE float lane(int64_t tensor, int lane) const {
        const SumTensor& t = a.tensor[tensor];
        float sum = 0.0f;
        for (int64_t i = lane; i < t.rows; i += SETTLE_LANES) sum = exact_add(sum, a.parts[t.row_parts + i]);
        return sum;
    }
    OPTIM_INLINE void end(int64_t tensor, float sum) const {
        if (!is_finite(*a.grad_scale)) return;
        const SumTensor& t = a.tensor[tensor];
        const float whole = settle_tensor(a, t, sum);
        a.parts[t.row_parts] = whole;
        settle_norm(a, t, sum, whole);
    }
};

struct SettleReady {
    SettleArguments a;

    OPTIM_INLINE void at(int64_t number) const {
        if (!is_finite(*a.grad_scale)) return;
        int64_t i;
        const SumTensor t = settle_find(a, number, &i);
        const float whole = a.parts[t.row_parts];
        if (i < t.rows) settle_ready(a, t, i, whole);
        const bool scales = a.sum == SUM_WEIGHTS || a.sum == SUM_STEP;  // the update in each tile of the tensor
        const int64_t tiles = scales ? (t.rows * t.cols + TILE_ELEMENTS - 1) / TILE_ELEMENTS : 0;
        for (int64_t k = i; k < tiles; k += t.settles) {
            float* factor = &a.factor[t.kept + k];
            *factor = a.sum == SUM_STEP && a.by_rms ? exact_mul(*factor, whole) : whole;
        }
    }
};

constexpr int64_t CODED_ELEMENTS = 4096;  // smaller tensors keep fp32, by the package's min_8bit_size
constexpr int ROUNDERS = 32;              // iterations that share the blocks of 2048 numbers of a list

// Rounds kept numbers as adafactor8bit's 8-bit codes do, once all passes have read them.
struct RoundNumbers {
    const SumTensor* tensor;
    const float* grad_scale;
    float* kept;
    int lists;  // of a tensor: its rows, its columns, and these again where there are two numbers of each

    OPTIM_INLINE void at(int64_t i) const {
        const SumTensor& t = tensor[i / ROUNDERS / lists];
        const int64_t list = i / ROUNDERS % lists, length = list % 2 ? t.cols : t.rows;
        float* numbers = kept + t.number + list / 2 * (t.rows + t.cols) + list % 2 * t.rows;
        if (!is_finite(*grad_scale) || t.rows * t.cols < CODED_ELEMENTS) return;
        for (int64_t first = i % ROUNDERS * TILE_ELEMENTS; first < length; first += ROUNDERS * TILE_ELEMENTS) {
            block(numbers + first, length - first < TILE_ELEMENTS ? length - first : TILE_ELEMENTS);
        }
    }

    static OPTIM_INLINE void block(float* x, int64_t count) {
        float most = 0.0f;
        for (int64_t k = 0; k < count; k++) most = exact_max(x[k], most);
        const float scale = log_scale(most), step = log_step(scale);
        const LogEncoding encoding = log_encoding<NEAREST>(scale);
        for (int64_t k = 0; k < count; k++) {
            const uint32_t code = log_word<NEAREST>(x[k], encoding, 0) - LOG_BIAS<NEAREST>;
            x[k] = log_level(bits_float(0x4b000000u + code), step);
        }
    }
};

// The passes of a step.

// A run of a launch's tensors and its thread blocks. row_range returns those between tiles `begin` and `end` of its
// list.
struct RowRange {
    int64_t first, tensors, first_block, blocks, settles;
};

static RowRange row_range(const RowPlan* plan, int64_t begin, int64_t end) {
    int64_t first = 0;
    while (first < plan->tensors && plan->tensor[first].tile < begin) first++;
    int64_t last = first;
    while (last < plan->tensors && plan->tensor[last].tile < end) last++;
    const SumTensor *begins = &plan->tensor[first], *ends = &plan->tensor[last];
    return {first, last - first, begins->block, ends->block - begins->block, ends->settle - begins->settle};
}

// Runs one pass over the tensors of a range, and its end.
static void pass_run(const Optim* optim, const StepLaunch* launch, RowRange range, Sum sum, const LaunchStep* step) {
    const Device* dev = optim->dev;
    const RowWork* work = &launch->passes;
    const OptimConfig* config = &launch->plan->config;
    const Streams* v = &launch->kept[SLOT_V];
    const RowRule rule = launch->rows.rule->rows;
    StepArguments arguments = launch_arguments(optim, launch, step);
    arguments.tiles -= step->first;
    SumArguments sums = {work->tensor + range.first, range.tensors, range.blocks, range.first_block, sum, work->parts};
    if (dev->gpu) {
        const Kernel* kernel = step->replayed ? &work->replayed : &work->kernel;
        const StepArguments* at = step->replayed ? placed_replay(dev, step, &arguments) : nullptr;
        void* pointers[] = {at ? (void*)&at : &arguments, &sums};
        const int64_t blocks = sum_blocks(rule) * (int64_t)dev->sm_count;
        jit_launch(kernel, sums.blocks < blocks ? sums.blocks : blocks,
                   sum_info(sum).reads_m ? kernel->shared_bytes : 0, pointers, dev->stream);
    } else {
        rows_sum_cpu(&launch->rows, &launch->kernel.arrays, &arguments, &sums);
    }
    SettleArguments settle = {};
    settle.tensor = sums.tensor, settle.tensors = sums.tensors, settle.numbers = range.settles;
    settle.grad_scale = step->grad_scale;
    settle.sum = sum, settle.rule = rule;
    settle.by_rms = has_adafactor_lr(config, "scaled");
    settle.parts = work->parts, settle.kept = (float*)v->scales, settle.ready = v->new_scales;
    settle.factor = (float*)arguments.factor, settle.norms = (float*)launch->kept[SLOT_NORMS].scales;
    settle.one_minus_beta2 = arguments.group[0].one_minus_beta2, settle.root2 = arguments.group[0].root2;
    settle.one_minus_beta3 = one_minus_beta2_at(config->beta3, own_number(step)),
    settle.root3 = (float)bias_root(config->beta3, own_number(step));
    settle.clip = (float)config->clip_update, settle.growth = (float)config->limit_growth;
    settle.eps2 = (float)config->eps2;
    settle.eps = is_package(rule) ? arguments.group[0].eps : rule == ROWS_ADAFACTOR ? (float)config->eps1 : 0.0f;
    settle.changing = step->replayed ? step->replayed->changing : nullptr;
    for_each(dev, SettleParts{settle}, settle.numbers);
    if (!(sum_info(sum).whole >> rule & 1)) return;
    for_lanes<SETTLE_LANES>(dev, SettleTensors{settle}, settle.tensors);
    for_each(dev, SettleReady{settle}, settle.numbers);
}

// The pass for --limit-growth computes the update for a learning rate of 1.
void optim_passes(const Optim* optim, int index, const LaunchStep* step) {
    const StepLaunch* launch = &optim->launch[index];
    const RowPlan* plan = &launch->passes.plan;
    const RowRange range = row_range(plan, step->first, step->first + step->count);
    LaunchStep own = *step;
    for (int i = 0; i < plan->passes && range.tensors > 0; i++) {
        for (int group = 0; group < own.constants.groups && plan->pass[i] == SUM_STEP; group++) {
            const Settings settings = {1.0, optim->plan->group[group].decay};
            own.constants.source[group] = hyper_source(step->config, &settings);
            own.constants.source[group].of_norm = true, own.constants.source[group].relative = false;
            own.constants.rate[group] = 1.0, own.constants.rate_at[group] = nullptr;
        }
        pass_run(optim, launch, range, plan->pass[i], &own);
    }
    if (!is_package(launch->rows.rule->rows)) return;
    const RoundNumbers round = {launch->passes.tensor + range.first, step->grad_scale,
                                (float*)launch->kept[SLOT_V].scales, launch->rows.rule->rows == ROWS_CAME8 ? 4 : 2};
    for_each(optim->dev, round, range.tensors * round.lists * ROUNDERS);
}
