// The step (optim.h), over all tensors or over some of them, whose gradients may lie anywhere. On a GPU it is one
// kernel launch for each combination of rule and formats; on the CPU the same template runs over the tables' function
// pointers, and each core takes a tile (build with -fno-math-errno: a square root is then one instruction, and the
// update about four times faster; the bits are the same).
#include "each.cuh"
#include "made.h"

struct SetGrads {
    Tile* tiles;
    const char* grads;
    int64_t bytes;

    OPTIM_INLINE void at(int64_t i) const { tiles[i].grads = grads + i * bytes; }
};

// Sets where the gradients of a tensor begin, or of its part that is kept here.
void optim_tensor_grads(Optim* optim, int t, const void* grads) {
    const Plan* plan = optim->plan;
    const StepLaunch* launch = &optim->launch[plan->tensor[t].launch];
    if (optim->grads[t] == grads) return;
    optim->grads[t] = grads;
    if (!launch->tiles) return;
    const KeptPart part = plan->tensor[t].here;
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
        if (measured(weights)) streams.weights.scales = streams.weights.new_scales;
        weights->view(streams.weights, 0, seen, TILE_ELEMENTS);
        copy->set(streams.copy, 0, seen, TILE_ELEMENTS);
    }
}

StepArguments launch_arguments(const Optim* optim, const StepLaunch* launch, const LaunchStep* step) {
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

void kernel_run(const Optim* optim, const StepKernel* kernel, const LaunchStep* step, StepArguments* arguments) {
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

void optim_launch(const Optim* optim, int index, const LaunchStep* step) {
    const StepLaunch* launch = &optim->launch[index];
    if (step->count == 0) return;
    StepArguments arguments = launch_arguments(optim, launch, step);
    if (launch->rows.rule->matrix) return launch_matrices(optim, launch, step, &arguments);
    kernel_run(optim, &launch->kernel, step, &arguments);
}

// Takes a step of `count` tiles of a launch, from number `first` of its list on.
static void launch_step(const Optim* optim, int index, int64_t first, int64_t count, const float* grad_scale, double lr,
                        int64_t number) {
    const StepLaunch* launch = &optim->launch[index];
    const OptimConfig* config = &launch->plan->config;
    LaunchStep step = {config, grad_scale, number, launch->tiles + first, launch->applied + first, first, count};
    step.constants.groups = optim->plan->groups;
    for (int i = 0; i < optim->plan->groups; i++) {
        step.constants.source[i] = hyper_source(config, &optim->plan->group[i]), step.constants.rate[i] = lr;
    }
    optim_passes(optim, index, &step);
    optim_launch(optim, index, &step);
}

void optim_step(Optim* optim, const void* grads, const float* grad_scale, float lr, int64_t step) {
    const Plan* plan = optim->plan;
    const int element = optim->launch[0].rows.grads->stream[0].bits / 8;
    for (int t = 0; t < optim->count && grads; t++) {
        optim_tensor_grads(optim, t, (const char*)grads + first_here(plan, t) * element);
    }
    for (int i = 0; i < plan->launches; i++) {
        launch_step(optim, i, 0, plan->launch[i].tiles, grad_scale, lr, step);
    }
    optim_commit_scales(optim, -1, grad_scale);  // last, since tensors of several launches share the weights' array
}

// Tensors of a launch that follow each other are stepped together.
void optim_step_tensors(Optim* optim, const int* tensor, int count, const float* grad_scale, float lr, int64_t step) {
    const Plan* plan = optim->plan;
    for (int i = 0, next; i < count; i = next) {
        const int launch = plan->tensor[tensor[i]].launch;
        const int64_t begin = first_here(plan, tensor[i]);
        int64_t end = begin;
        for (next = i; next < count && plan->tensor[tensor[next]].launch == launch; next++) {
            const KeptPart part = plan->tensor[tensor[next]].here;
            if (first_here(plan, tensor[next]) != end) break;
            end += part.end - part.begin;
        }
        const int64_t first = (begin - plan->launch[launch].run.begin) / TILE_ELEMENTS,
                      tiles = (end - begin) / TILE_ELEMENTS;
        launch_step(optim, launch, first, tiles, grad_scale, lr, step);
        for (int t = i; t < next; t++) optim_commit_scales(optim, tensor[t], grad_scale);
    }
}
