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
    const int64_t first = first_here(plan, t) - launch->plan->run.begin;
    const int bytes = tile_bytes(launch->rows.grads->stream[0]);
    const SetGrads set = {launch->tiles + first / TILE_ELEMENTS, (const char*)grads, bytes};
    for_each(optim->dev, set, (part.end - part.begin) / TILE_ELEMENTS);
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

// Returns the arguments of a launch's step: its arrays and constants.
static StepArguments launch_arguments(const Optim* optim, const StepLaunch* launch, const LaunchStep* step) {
    const StepConstants* constants = &step->constants;
    StepArguments arguments = {};
    arguments.weights = launch->weights->streams;
    arguments.m = launch->at[0], arguments.v = launch->at[1], arguments.slow = launch->at[2];
    arguments.rows = {launch->at[1].new_scales, launch->at[1].span};
    arguments.states = launch->states;
    const bool scaled = config_scaled(&launch->plan->config);
    arguments.factor = scaled ? optim->factors + launch->weights->run->begin / TILE_ELEMENTS : nullptr;
    arguments.next_tile = launch->next_tile;
    arguments.grad_scale = step->grad_scale;
    arguments.tiles = step->tiles, arguments.tile_count = step->count;
    arguments.seed = optim->config.seed, arguments.step = (uint32_t)step->number;
    for (int i = 0; i < constants->groups; i++) {
        const int64_t number = step->number - constants->lag[i];
        arguments.group[i] = hyper_create(constants->source[i], constants->rate[i], number);
    }
    return arguments;
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
    settle.by_rms = config->scale_by_rms && has_adafactor_lr(config);
    settle.parts = work->parts, settle.kept = (float*)v->scales, settle.ready = v->new_scales;
    settle.factor = (float*)arguments.factor, settle.norms = (float*)launch->kept[SLOT_NORMS].scales;
    settle.one_minus_beta2 = arguments.group[0].one_minus_beta2, settle.root2 = arguments.group[0].root2;
    settle.one_minus_beta3 = one_minus_beta2_at(config->beta3, own_number(step)),
    settle.root3 = (float)bias_root(config->beta3, own_number(step));
    settle.clip = config->clip_update, settle.growth = config->limit_growth;
    settle.eps = is_package(rule) ? arguments.group[0].eps : 0.0f;
    settle.changing = step->replayed ? step->replayed->changing : nullptr;
    rows_settle(dev, &settle);
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
    if (is_package(launch->rows.rule->rows)) {
        rows_round(optim->dev, launch->passes.tensor + range.first, range.tensors, step->grad_scale,
                   (float*)launch->kept[SLOT_V].scales, launch->rows.rule->rows == ROWS_CAME8);
    }
}

// Runs a kernel of the step, or its CPU version, on the tiles of the arguments.
static void kernel_run(const Optim* optim, const StepKernel* kernel, const LaunchStep* step, StepArguments* arguments) {
    const Device* dev = optim->dev;
    if (!dev->gpu) {
        const FormatRow* copy = compute_row(optim->compute);
        if (kernel->measures) step_cpu<MEASURE>(kernel, copy, arguments);
        return step_cpu<STORE>(kernel, copy, arguments);
    }
    const int64_t tiles = arguments->tile_count, blocks = 8 * (int64_t)dev->sm_count;
    const StepArguments* at = step->replayed ? placed_replay(dev, step, arguments) : nullptr;
    const Kernel *measure = &kernel->measure, *own = at ? &kernel->replayed : &kernel->step;
    void* argument = at ? (void*)&at : arguments;
    if (kernel->measures) {
        jit_launch(measure, tiles < blocks ? tiles : blocks, measure->shared_bytes, &argument, dev->stream);
    }
    jit_launch(own, tiles < kernel->grid ? tiles : kernel->grid, own->shared_bytes, &argument, dev->stream);
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

// Takes the step of a rule that reads matrices (matrix/matrix.h, low_rank.h), a chunk at a time. If the rule projects
// gradients, the step takes all tiles of the launch.
static void launch_matrices(const Optim* optim, const StepLaunch* launch, const LaunchStep* step,
                            const StepArguments* arguments) {
    const MatrixWork* work = &launch->matrix;
    const Device* dev = optim->dev;
    const Streams none = {nullptr, nullptr}, *v = &launch->kept[SLOT_V];
    const bool projects = is_low_rank(launch->rows.rule), is_bf16 = launch->rows.grads->stream[0].bits == 16,
               in_bf16 = low_rank_in_bf16(dev, &launch->plan->config, &work->plan);
    const LowStep low = {dev,
                         step->config,
                         work,
                         &launch->kept[SLOT_BASIS],
                         step->tiles,
                         is_bf16,
                         step->grad_scale,
                         own_number(step),
                         in_bf16,
                         optim->tensors,
                         optim->grads};
    matrix_begin(dev, work, step->grad_scale);
    for (int slot = SLOT_M; slot <= SLOT_V && projects && low_rank_resets(low.config, low.step); slot++) {
        const FormatRow* format = slot_format(launch->plan, (Slot)slot);
        for (int i = 0; i < 3; i++) {
            device_zero(dev, stream_data(&launch->kept[slot], i),
                        run_bytes(&launch->plan->kept[slot], format->stream[i]));
        }
    }
    for (int i = 0; i < work->plan.chunks; i++) {
        const MatrixChunk* chunk = &work->plan.chunk[i];
        const MatrixRange range = range_create(chunk, step->first, step->count);
        if (range.at >= range.end) continue;
        StepArguments moment = *arguments, apply = *arguments;
        // The padding of a matrix's projection must stay zero, and other chunks have matrices of other sizes.
        const int64_t low_bytes = (chunk->low_end - chunk->low_begin) * (int64_t)sizeof(float);
        if (projects && work->plan.chunks > 1) device_zero(dev, work->low, low_bytes);
        if (projects) low_rank_project(&low, i);
        moment_arguments(launch, &range, step->first, &low, &moment);
        kernel_run(optim, &launch->kernel, step, &moment);
        if (projects) low_rank_update(&low, i);
        if (!projects) matrix_update(dev, step->config, work, &range, (const float*)v->scales, v->new_scales);
        range_tiles(&range, step->applied, step->first, &apply);
        apply.grad_scale = work->unit;
        apply.m = apply.v = none;
        kernel_run(optim, &launch->apply, step, &apply);
    }
}

void optim_launch(const Optim* optim, int index, const LaunchStep* step) {
    const StepLaunch* launch = &optim->launch[index];
    if (step->count == 0) return;
    StepArguments arguments = launch_arguments(optim, launch, step);
    if (launch->rows.rule->matrix) return launch_matrices(optim, launch, step, &arguments);
    kernel_run(optim, &launch->kernel, step, &arguments);
}

void optim_loaded(Optim* optim) {
    for (StepLaunch& launch : optim->launch) {
        MatrixPlan* plan = &launch.matrix.plan;
        for (int i = 0; i < plan->matrices; i++) plan->matrix[i].has_basis = false;
    }
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

// Returns a step of `count` tiles of a launch, from number `first` of its list on.
static LaunchStep launch_step(const Optim* optim, int index, int64_t first, int64_t count, const float* grad_scale,
                              double lr, int64_t number) {
    const StepLaunch* launch = &optim->launch[index];
    const OptimConfig* config = &launch->plan->config;
    LaunchStep step = {config, grad_scale, number, launch->tiles + first, launch->applied + first, first, count};
    step.constants.groups = optim->plan->groups;
    for (int i = 0; i < optim->plan->groups; i++) {
        step.constants.source[i] = hyper_source(config, &optim->plan->group[i]), step.constants.rate[i] = lr;
    }
    return step;
}

void optim_step(Optim* optim, const void* grads, const float* grad_scale, float lr, int64_t step) {
    const Plan* plan = optim->plan;
    const int element = optim->launch[0].rows.grads->stream[0].bits / 8;
    for (int t = 0; t < optim->count && grads; t++) {
        optim_tensor_grads(optim, t, (const char*)grads + first_here(plan, t) * element);
    }
    for (int i = 0; i < plan->launches; i++) {
        const LaunchStep own = launch_step(optim, i, 0, plan->launch[i].tiles, grad_scale, lr, step);
        optim_passes(optim, i, &own);
        optim_launch(optim, i, &own);
    }
    optim_commit_scales(optim, grad_scale);  // last, since tensors of several launches share the weights' array
}

// Tensors of a launch that follow each other are stepped together.
void optim_step_tensors(Optim* optim, const int* tensor, int count, const float* grad_scale, float lr, int64_t step) {
    const Plan* plan = optim->plan;
    for (int i = 0, next; i < count; i = next) {
        const int launch = plan->launch_of[tensor[i]];
        const int64_t begin = first_here(plan, tensor[i]);
        int64_t end = begin;
        for (next = i; next < count && plan->launch_of[tensor[next]] == launch; next++) {
            const KeptPart part = plan->here[tensor[next]];
            if (first_here(plan, tensor[next]) != end) break;
            end += part.end - part.begin;
        }
        const int64_t first = (begin - plan->launch[launch].run.begin) / TILE_ELEMENTS,
                      tiles = (end - begin) / TILE_ELEMENTS;
        const LaunchStep own = launch_step(optim, launch, first, tiles, grad_scale, lr, step);
        optim_passes(optim, launch, &own);
        optim_launch(optim, launch, &own);
        for (int t = i; t < next; t++) optim_settle_tensor(optim, tensor[t], grad_scale);
    }
}
