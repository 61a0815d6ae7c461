// The step (optim.h), over all tensors or over some of them, whose gradients may lie anywhere. On a GPU it is one
// kernel launch for each combination of rule and formats; on the CPU the same template runs over the tables' function
// pointers, and each core takes a tile (build with -fno-math-errno: a square root is then one instruction, and the
// update about four times faster; the bits are the same).
#include "each.cuh"
#include "made.h"
#include "matrix/low_rank.h"

struct SetGrads {
    Tile* tiles;
    const char* grads;
    int64_t bytes;

    OPTIM_INLINE void at(int64_t i) const { tiles[i].grads = grads + i * bytes; }
};

// Sets where the gradients of a tensor begin, or of its part that is kept here.
void optim_tensor_grads(Optim* optim, int t, const void* grads) {
    const Plan* plan = optim->plan;
    const StepLaunch* launch = &optim->launch[plan->launch_of[t]];
    if (optim->grads[t] == grads) return;
    optim->grads[t] = grads;
    if (!launch->tiles) return;
    const KeptPart part = plan->here[t];
    const int64_t first = plan->kept[t][SLOT_WEIGHTS].offset + part.begin - launch->plan->run.begin;
    const int bytes = tile_bytes(launch->rows.grads->stream[0]);
    const SetGrads set = {launch->tiles + first / TILE_ELEMENTS, (const char*)grads, bytes};
    for_each(optim->dev, set, (part.end - part.begin) / TILE_ELEMENTS);
}

// Launches a kernel of the step with its only argument: StepArguments or, if it is replayed, their address.
static void step_launch(const Device* dev, const Kernel* kernel, int64_t blocks, void* argument) {
    jit_launch(kernel, blocks, kernel->shared_bytes, &argument, dev->stream);
}

template <Pass PASS>
static void step_cpu(const StepKernel* kernel, const FormatRow* copy, const StepArguments* arguments) {
    if (!is_finite(*arguments->grad_scale)) return;  // the step changes nothing
    const Rows* rows = &kernel->rows;
    const FormatRow* weights = rows->weights;
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < arguments->tile_count; t++) {
        const Tile tile = arguments->tiles[t];
        TileStreams streams = tile_streams(kernel->arrays, *arguments, tile);
        const Hyper& group = arguments->group[tile.group];
        const Hyper hyper = arguments->factor ? hyper_scaled(group, arguments->factor[tile.kept]) : group;
        update_elements<TILE_ELEMENTS, PASS>(*rows->rule, *weights, *rows->grads, *rows->m, *rows->v, *arguments,
                                             streams, hyper, *arguments->grad_scale,
                                             (int64_t)tile.element * TILE_ELEMENTS, 0, TILE_ELEMENTS);
        if (PASS == MEASURE || !streams.copy.codes) continue;
        float seen[TILE_ELEMENTS];
        if (format_span(weights) != SPAN_RUN) streams.weights.scales = streams.weights.new_scales;
        weights->view(streams.weights, 0, seen, TILE_ELEMENTS);
        copy->set(streams.copy, 0, seen, TILE_ELEMENTS);
    }
}

// Runs one pass before step number `step`, and its end. `arguments` has the arrays and constants that the pass needs.
static void pass_run(const Optim* optim, const StepLaunch* launch, RowRange range, Sum sum, StepArguments* arguments,
                     const Replay* replay, int64_t step) {
    const Device* dev = optim->dev;
    const RowWork* work = &launch->passes;
    const OptimConfig* config = &launch->plan->config;
    const Streams* v = &launch->kept[SLOT_V];
    const RowRule rule = launch->rows.rule->rows;
    const bool by_rms = config->scale_by_rms && rule == ROWS_ADAFACTOR;
    SumArguments sums = {
        work->tensor + range.first, range.tensors, range.blocks, range.first_block, sum, by_rms, work->parts};
    const StepArguments* at = replay ? &replay->to->step : nullptr;
    if (dev->gpu) {
        void* pointers[] = {replay ? (void*)&at : arguments, &sums};
        const int64_t blocks = sum_blocks(rule) * (int64_t)dev->sm_count;
        if (replay) placed_replay(dev, replay, arguments);
        const Kernel* kernel = replay ? &work->replayed : &work->kernel;
        jit_launch(kernel, sums.blocks < blocks ? sums.blocks : blocks,
                   sum_info(sum).reads_m ? kernel->shared_bytes : 0, pointers, dev->stream);
    } else {
        rows_sum_cpu(&launch->rows, &launch->kernel.arrays, arguments, &sums);
    }
    SettleArguments settle = {};
    settle.tensor = sums.tensor, settle.tensors = sums.tensors, settle.numbers = range.settles;
    settle.grad_scale = arguments->grad_scale;
    settle.sum = sum, settle.rule = rule, settle.by_rms = by_rms;
    settle.parts = work->parts, settle.kept = (float*)v->scales, settle.ready = v->new_scales;
    settle.factor = (float*)arguments->factor, settle.norms = (float*)launch->kept[SLOT_NORMS].scales;
    settle.one_minus_beta2 = arguments->group[0].one_minus_beta2, settle.root2 = arguments->group[0].root2;
    settle.one_minus_beta3 = one_minus_beta2_at(config->beta3, step),
    settle.root3 = (float)bias_root(config->beta3, step);
    settle.clip = config->clip_update, settle.growth = config->limit_growth;
    settle.changing = replay ? replay->to->changing : nullptr;
    rows_settle(dev, &settle);
}

// Runs the passes before a step of the arguments' tensors. The pass for --limit-growth computes the update for a
// learning rate of 1.
static void launch_passes(const Optim* optim, const StepLaunch* launch, const StepArguments* arguments,
                          const LaunchStep* launch_step) {
    const RowPlan* plan = &launch->passes.plan;
    const RowRange range = row_range(plan, launch_step->first, launch_step->first + arguments->tile_count);
    StepArguments own = *arguments;
    own.tiles -= launch_step->first;
    Replay replay = launch_step->replay ? *launch_step->replay : Replay{};
    for (int i = 0; i < plan->passes && range.tensors > 0; i++) {
        for (int group = 0; group < STEP_GROUPS && plan->pass[i] == SUM_STEP; group++) {
            const Settings settings = {1.0, optim->plan->group[group].decay};
            replay.source[group] = hyper_source(launch_step->config, &settings);
            replay.rate[group] = 1.0, replay.rate_at[group] = nullptr;
            own.group[group] = hyper_create(replay.source[group], 1.0, launch_step->step);
        }
        pass_run(optim, launch, range, plan->pass[i], &own, launch_step->replay ? &replay : nullptr, launch_step->step);
    }
}

// Runs a kernel of the step, or its CPU version, on the tiles of the arguments.
static void kernel_run(const Optim* optim, const StepKernel* kernel, const Replay* replay, StepArguments* arguments) {
    if (!optim->dev->gpu) {
        const FormatRow* copy = compute_row(optim->compute);
        if (kernel->measures) step_cpu<MEASURE>(kernel, copy, arguments);
        step_cpu<STORE>(kernel, copy, arguments);
        return;
    }
    const int64_t tiles = arguments->tile_count, blocks = 8 * (int64_t)optim->dev->sm_count;
    if (replay) {
        const StepArguments* at = &replay->to->step;
        placed_replay(optim->dev, replay, arguments);
        step_launch(optim->dev, &kernel->replayed, tiles < kernel->grid ? tiles : kernel->grid, &at);
        return;
    }
    if (kernel->measures) step_launch(optim->dev, &kernel->measure, tiles < blocks ? tiles : blocks, arguments);
    step_launch(optim->dev, &kernel->step, tiles < kernel->grid ? tiles : kernel->grid, arguments);
}

// Returns what the tiles of a step take of a chunk.
static MatrixRange range_create(const MatrixChunk* chunk, int64_t first, int64_t count) {
    const int64_t at = first - chunk->tile, end = at + count;
    return {chunk, (at > 0 ? at : 0) * TILE_ELEMENTS, (end < chunk->tiles ? end : chunk->tiles) * TILE_ELEMENTS};
}

// Restricts the arguments to the tiles of a range; `tiles` begins with tile `first` of the launch's list.
static void range_tiles(const MatrixRange* range, const Tile* tiles, int64_t first, StepArguments* arguments) {
    arguments->tiles = tiles + (range->chunk->tile + range->at / TILE_ELEMENTS - first);
    arguments->tile_count = (range->end - range->at) / TILE_ELEMENTS;
}

// Sets the arguments of a range's first kernel, which turns gradients, or their projections, into directions.
static void moment_arguments(const StepLaunch* launch, const MatrixRange* range, int64_t first, const LowStep* low,
                             StepArguments* moment) {
    const MatrixChunk* chunk = range->chunk;
    const MatrixWork* work = &launch->matrix;
    if (!is_low_rank(launch->rows.rule)) return range_tiles(range, moment->tiles, first, moment);
    moment->tiles = work->low_tiles + chunk->low_tile;
    moment->tile_count = (chunk->low_end - chunk->low_begin) / TILE_ELEMENTS;
    if (!low->in_bf16) moment->grad_scale = work->unit;  // the scratch includes the factor
    const Settings rate = {1.0, 0.0};                    // a direction has learning rate 1; the update has the real one
    for (Hyper& hyper : moment->group) hyper = hyper_create(low->config, &rate, 1.0, low->step);
}

// Takes the step of a rule that reads matrices (matrix/matrix.h, low_rank.h), a chunk at a time. The arguments have
// tiles of whole tensors; if the rule projects gradients, all of the launch.
static void launch_matrices(const Optim* optim, const StepLaunch* launch, const StepArguments* arguments,
                            const LaunchStep* launch_step) {
    const MatrixWork* work = &launch->matrix;
    const Device* dev = optim->dev;
    const Streams none = {nullptr, nullptr}, *v = &launch->kept[SLOT_V];
    const bool projects = is_low_rank(launch->rows.rule), is_bf16 = launch->rows.grads->stream[0].bits == 16,
               in_bf16 = low_rank_in_bf16(dev, &launch->plan->config, &work->plan);
    const LowStep low = {dev,
                         launch_step->config,
                         work,
                         &launch->kept[SLOT_BASIS],
                         arguments->tiles,
                         is_bf16,
                         arguments->grad_scale,
                         launch_step->step,
                         in_bf16,
                         optim->tensors,
                         optim->grads};
    matrix_begin(dev, work, arguments->grad_scale);
    for (int i = 0; i < work->plan.chunks; i++) {
        const MatrixChunk* chunk = &work->plan.chunk[i];
        const MatrixRange range = range_create(chunk, launch_step->first, arguments->tile_count);
        if (range.at >= range.end) continue;
        StepArguments moment = *arguments, apply = *arguments;
        // The padding of a matrix's projection must stay zero, and other chunks have matrices of other sizes.
        const int64_t low_bytes = (chunk->low_end - chunk->low_begin) * (int64_t)sizeof(float);
        if (projects && work->plan.chunks > 1) device_zero(dev, work->low, low_bytes);
        if (projects) low_rank_project(&low, i);
        moment_arguments(launch, &range, launch_step->first, &low, &moment);
        kernel_run(optim, &launch->kernel, launch_step->replay, &moment);
        if (projects) low_rank_update(&low, i);
        if (!projects) matrix_update(dev, launch_step->config, work, &range, (const float*)v->scales, v->new_scales);
        range_tiles(&range, launch_step->applied, launch_step->first, &apply);
        apply.grad_scale = work->unit;
        apply.m = apply.v = none;
        kernel_run(optim, &launch->apply, launch_step->replay, &apply);
    }
}

// Sets the arrays of a launch's step.
static const StepLaunch* launch_begin(const Optim* optim, int index, StepArguments* arguments) {
    const StepLaunch* launch = &optim->launch[index];
    const Weights* weights = launch->weights;
    arguments->weights = weights->streams;
    arguments->m = launch->at[0], arguments->v = launch->at[1], arguments->slow = launch->at[2];
    arguments->rows = {launch->at[1].new_scales, launch->at[1].span};
    arguments->states = launch->states;
    const bool scaled = config_scaled(&launch->plan->config);
    arguments->factor = scaled ? optim->factors + weights->run->begin / TILE_ELEMENTS : nullptr;
    arguments->next_tile = launch->next_tile;
    return launch;
}

// Updates the tiles of the arguments, after the passes.
static void launch_tiles(const Optim* optim, const StepLaunch* launch, StepArguments* arguments,
                         const LaunchStep* launch_step) {
    if (launch->rows.rule->matrix) return launch_matrices(optim, launch, arguments, launch_step);
    kernel_run(optim, &launch->kernel, launch_step->replay, arguments);
}

void optim_passes(const Optim* optim, int launch, StepArguments* arguments, const LaunchStep* launch_step) {
    launch_passes(optim, launch_begin(optim, launch, arguments), arguments, launch_step);
}

void optim_launch(const Optim* optim, int launch, StepArguments* arguments, const LaunchStep* launch_step) {
    launch_tiles(optim, launch_begin(optim, launch, arguments), arguments, launch_step);
}

void optim_loaded(Optim* optim) {
    for (StepLaunch& launch : optim->launch) {
        MatrixPlan* plan = &launch.matrix.plan;
        for (int i = 0; i < plan->matrices; i++) plan->matrix[i].has_basis = false;
    }
}

bool optim_replays(const Optim* optim, int launch) {
    return optim->launch[launch].kernel.replayed.jit.function != nullptr;
}

void optim_commit_scales(const Optim* optim, const float* grad_scale) {
    for (int i = 0; i < optim->settles; i++) spans_settle(optim->dev, &optim->settle[i], grad_scale);
}

void optim_settle_tensor(const Optim* optim, int t, const float* grad_scale) {
    const OptimTensor* tensor = &optim->tensors[t];
    for (int i = 0; i < optim->settles; i++) {
        const Settle* all = &optim->settle[i];
        if (!is_in_run(optim->plan, t, all->run)) continue;
        const int64_t at = optim->plan->at[t][all->span] - all->run->at[all->span];
        const Settle part = {all->now + at, all->next + at, span_numbers(all->span, tensor), all->run, all->span};
        spans_settle(optim->dev, &part, grad_scale);
    }
}

StepArguments step_begin(const Optim* optim, const float* grad_scale, int64_t step) {
    StepArguments arguments = {};
    arguments.grad_scale = grad_scale;
    arguments.seed = optim->config.seed;
    arguments.step = (uint32_t)step;
    return arguments;
}

// Returns the arguments of a launch's step, with its constants but without arrays.
static StepArguments step_arguments(const Optim* optim, const StepLaunch* launch, const float* grad_scale, float lr,
                                    int64_t step) {
    StepArguments arguments = step_begin(optim, grad_scale, step);
    const bool relative = launch->plan->config.relative_steps && launch->rows.rule->rows == ROWS_ADAFACTOR;
    double rate = lr;
    if (relative && rate > 1.0 / sqrt((double)step)) rate = 1.0 / sqrt((double)step);
    for (int group = 0; group < STEP_GROUPS; group++) {
        arguments.group[group] = hyper_create(&launch->plan->config, &optim->plan->group[group], rate, step);
    }
    return arguments;
}

// Some tiles of a launch's list.
struct TileRun {
    int launch;
    int64_t first, tiles;
};

static void optim_step_tiles(const Optim* optim, const TileRun* run, const float* grad_scale, float lr, int64_t step) {
    const StepLaunch* launch = &optim->launch[run->launch];
    if (run->tiles == 0) return;
    StepArguments arguments = step_arguments(optim, launch, grad_scale, lr, step);
    arguments.tiles = launch->tiles + run->first, arguments.tile_count = run->tiles;
    const LaunchStep launch_step = {&launch->plan->config, step, launch->applied + run->first, run->first};
    if (!launch->rows.rule->matrix) optim_passes(optim, run->launch, &arguments, &launch_step);
    optim_launch(optim, run->launch, &arguments, &launch_step);
}

void optim_step(Optim* optim, const void* grads, const float* grad_scale, float lr, int64_t step) {
    const Plan* plan = optim->plan;
    const int element = optim->launch[0].rows.grads->stream[0].bits / 8;
    for (int t = 0; t < optim->count && grads; t++) {
        const int64_t at = plan->kept[t][SLOT_WEIGHTS].offset + plan->here[t].begin;
        optim_tensor_grads(optim, t, (const char*)grads + at * element);
    }
    for (int i = 0; i < plan->launches; i++) {
        const TileRun all = {i, 0, plan->launch[i].tiles};
        optim_step_tiles(optim, &all, grad_scale, lr, step);
    }
    optim_commit_scales(optim, grad_scale);  // last, since tensors of several launches share the weights' array
    optim_step_end(optim);
}

void optim_step_end(Optim* optim) {
    if (optim->compute != OPTIM_BF16) optim_decode(optim);  // the step itself writes a bf16 copy
}

// Returns the tiles of the first tensors that can share a launch; *taken is the number of these tensors.
static TileRun tensor_run(const Plan* plan, const int* tensor, int count, int* taken) {
    const int l = plan->launch_of[tensor[0]];
    const int64_t begin = plan->kept[tensor[0]][SLOT_WEIGHTS].offset + plan->here[tensor[0]].begin;
    int64_t end = begin;
    int n = 0;
    for (; n < count && plan->launch_of[tensor[n]] == l; n++) {
        const KeptPart part = plan->here[tensor[n]];
        if (plan->kept[tensor[n]][SLOT_WEIGHTS].offset + part.begin != end) break;
        end += part.end - part.begin;
    }
    *taken = n;
    return {l, (begin - plan->launch[l].run.begin) / TILE_ELEMENTS, (end - begin) / TILE_ELEMENTS};
}

void optim_step_tensors(Optim* optim, const int* tensor, const void* const* grads, int count, const float* grad_scale,
                        float lr, int64_t step) {
    const Plan* plan = optim->plan;
    const int element = plan->launch[0].rows.grads->stream[0].bits / 8;
    for (int i = 0; i < count && grads; i++) {
        const int64_t begin = plan->here[tensor[i]].begin;
        optim_tensor_grads(optim, tensor[i], (const char*)grads[i] + begin * element);
    }
    for (int i = 0, taken; i < count; i += taken) {
        const TileRun run = tensor_run(plan, tensor + i, count - i, &taken);
        optim_step_tiles(optim, &run, grad_scale, lr, step);
        for (int t = 0; t < taken; t++) optim_settle_tensor(optim, tensor[i + t], grad_scale);
    }
}
