// See placed.h.
#include "placed.h"

#include "each.cuh"

// One tile of the table: the tensor and the elements that it covers.
struct PlacedTile {
    int64_t from;  // the tile's first element, counted in the caller's tensor; below 0 in a cut tensor's first tile
    uint32_t tensor;
    int32_t weights_slot, grads_slot;  // its tiles in the arenas beside; -1: it is read in place
    uint16_t begin, end;               // the elements of the tile that the caller's tensor has
    bool matrix;                       // the rule reads matrices: the weights are those of the second kernel
};

struct PlacedPointers {
    void* weights;
    const void* grads;
};

// A tensor in the last step, and in the tables.
struct PlacedState {
    PlacedTensor placed;
    int group;                    // the caller's; -1: no gradient
    bool weights_off, grads_off;  // true if they do not begin at a multiple of 16 bytes
};

// Tiles of a launch that share a list of at most STEP_GROUPS constants: one launch of the kernel.
struct PlacedRun {
    int launch;
    bool has_passes, matrix;  // the launch has passes before its step, or its rule reads matrices
    bool by_rms;              // the passes read the weights
    int64_t first, tiles;
    int group[STEP_GROUPS], settings[STEP_GROUPS];  // the caller's group and the plan's
    int groups;
};

// The part of the tables that the kernels of this file read, in device memory.
struct PlacedView {
    PlacedTile* tile;          // (tiles)
    Tile *step, *applied;      // (tiles) of the launches' kernels, and of the second ones of rules that read matrices
    uint32_t* beside;          // (staged) numbers of the tiles with a slot in an arena beside
    PlacedPointers* pointers;  // (tensors)
    char *weights, *grads;     // the arenas beside the tensors
    int weight_bytes, grad_bytes;
};

struct PlacedTables {
    Optim* optim;
    PlacedState* tensor;       // (count)
    PlacedPointers* pointers;  // (count) of the last step
    PlacedRun* run;            // a launch's runs but the last have STEP_GROUPS tensors or more
    int runs;
    int64_t tiles, staged;
    int32_t weights_slots, grads_slots;
    float* scalars;      // device: 1, and the scale of a step
    int64_t* clock;      // device: the number of the last step
    Replayed* replayed;  // device: the arguments of a graph's kernels
    bool built;
    bool moved;             // the device has other addresses than `pointers`
    bool captured;          // a graph may change the tiles without this host code
    bool kept;              // a graph uses the present tables, so they are not freed when others replace them
    PlacedView host, view;  // the lists of tiles as they are built, and what the kernels read
};

// Loops over the tables (each.cuh).

// Sets where the weights and the gradients of each tile lie.
struct PlaceTiles {
    PlacedView view;

    OPTIM_INLINE void at(int64_t t) const {
        const PlacedTile tile = view.tile[t];
        const PlacedPointers of = view.pointers[tile.tensor];
        char* weights = (char*)of.weights + tile.from * view.weight_bytes;
        const char* grads = (const char*)of.grads + tile.from * view.grad_bytes;
        if (tile.weights_slot >= 0) {
            weights = view.weights + (int64_t)tile.weights_slot * TILE_ELEMENTS * view.weight_bytes;
        }
        if (tile.grads_slot >= 0) grads = view.grads + (int64_t)tile.grads_slot * TILE_ELEMENTS * view.grad_bytes;
        view.step[t].grads = grads;
        (tile.matrix ? view.applied : view.step)[t].seen = weights;
    }
};

// Copies one element of 2 or 4 bytes, or writes zero if it is not `there`.
OPTIM_INLINE void placed_copy(void* to, int64_t to_index, const void* from, int64_t from_index, int bytes, bool there) {
    if (bytes == 2) ((uint16_t*)to)[to_index] = there ? ((const uint16_t*)from)[from_index] : (uint16_t)0;
    if (bytes == 4) ((uint32_t*)to)[to_index] = there ? ((const uint32_t*)from)[from_index] : 0u;
}

constexpr int MOVERS = 256;  // iterations that share the elements of a tile

// Copies the tiles with a slot into the arenas beside or, if `back`, their weights back.
struct MoveTiles {
    PlacedView view;
    bool back;

    OPTIM_INLINE void at(int64_t index) const {
        const PlacedTile tile = view.tile[view.beside[index / MOVERS]];
        const PlacedPointers of = view.pointers[tile.tensor];
        const int64_t weights = (int64_t)tile.weights_slot * TILE_ELEMENTS,
                      grads = (int64_t)tile.grads_slot * TILE_ELEMENTS;
        for (int i = (int)(index % MOVERS); i < TILE_ELEMENTS; i += MOVERS) {
            const bool there = i >= tile.begin && i < tile.end;
            if (weights >= 0 && back && there) {
                placed_copy(of.weights, tile.from + i, view.weights, weights + i, view.weight_bytes, true);
            }
            if (back) continue;
            if (weights >= 0) {
                placed_copy(view.weights, weights + i, of.weights, tile.from + i, view.weight_bytes, there);
            }
            if (grads >= 0) placed_copy(view.grads, grads + i, of.grads, tile.from + i, view.grad_bytes, there);
        }
    }
};

// Begins a step: sets the factor of its gradients, and the clock to its number or, if that is 0, to the next number.
struct BeginStep {
    const float *grad_scale, *found_inf;
    float* scale;
    int64_t *clock, step;

    OPTIM_INLINE void at(int64_t) const {
        const bool skips = found_inf && *found_inf != 0.0f;
        *scale = skips ? bits_float(0x7fc00000u) : grad_scale ? *grad_scale : 1.0f;
        *clock = step > 0 ? step : *clock + 1;
    }
};

static const Device host_memory = {};

// Makes room for the lists of all tiles, in one block that begins with `step`, and returns its bytes.
static int64_t lists_take(const PlacedTables* tables, const Device* dev, PlacedView* view) {
    const int64_t most = tables->optim->plan->elements / TILE_ELEMENTS;
    const int64_t bytes = most * (int64_t)(2 * sizeof(Tile) + sizeof(PlacedTile) + sizeof(uint32_t));
    view->step = (Tile*)device_alloc(dev, bytes);
    view->applied = view->step + most;
    view->tile = (PlacedTile*)(view->applied + most);
    view->beside = (uint32_t*)(view->tile + most);
    return bytes;
}

// Drops the lists and the arenas.
static void view_free(const Device* dev, PlacedView* view) {
    device_free(dev, view->step), device_free(dev, view->weights), device_free(dev, view->grads);
    view->step = nullptr, view->weights = view->grads = nullptr;
}

void placed_create(PlacedTables** made, Optim* optim, OptimType compute, const PlacedTensor* tensors) {
    PlacedTables* tables = *made = (PlacedTables*)memory_zero(1, sizeof(PlacedTables));
    const Device* dev = optim->dev;
    const size_t count = (size_t)optim->count;
    const float scalars[2] = {1.0f, 1.0f};
    tables->optim = optim;
    tables->tensor = (PlacedState*)memory_zero(count, sizeof(PlacedState));
    for (size_t t = 0; t < count; t++) tables->tensor[t].placed = tensors[t];
    tables->pointers = (PlacedPointers*)memory_zero(count, sizeof(PlacedPointers));
    tables->run = (PlacedRun*)memory_zero(LAUNCHES + count / STEP_GROUPS, sizeof(PlacedRun));
    tables->clock = (int64_t*)device_alloc(dev, sizeof(int64_t));
    device_zero(dev, tables->clock, sizeof(int64_t));
    tables->scalars = (float*)device_alloc(dev, sizeof(scalars));
    // This waits for the stream and so for the work that optim_create has queued, since steps may use another stream.
    copy_to_device(dev, tables->scalars, scalars, sizeof(scalars));
    if (optim->config.replays) tables->replayed = (Replayed*)device_alloc(dev, sizeof(Replayed));
    tables->view.weight_bytes = compute == OPTIM_FP32 ? 4 : 2;
    tables->view.grad_bytes = config_rows(&optim->config).grads->stream[0].bits / 8;
    tables->view.pointers = (PlacedPointers*)device_alloc(dev, (int64_t)(count * sizeof(PlacedPointers)) + 1);
    lists_take(tables, &host_memory, &tables->host);
}

void placed_free(PlacedTables* tables) {
    if (!tables) return;
    const Device* dev = tables->optim->dev;
    view_free(&host_memory, &tables->host), view_free(dev, &tables->view);
    device_free(dev, tables->scalars), device_free(dev, tables->clock), device_free(dev, tables->replayed);
    device_free(dev, tables->view.pointers);
    free(tables->tensor), free(tables->pointers), free(tables->run), free(tables);
}

// Building the tables.

// Refuses a step in which only some tensors of a launch have gradients.
static void require_all(const PlacedTables* tables, int launch, const Rows* rows) {
    const Optim* optim = tables->optim;
    const char *with = nullptr, *without = nullptr;
    for (int t = 0; t < optim->count; t++) {
        if (optim->plan->tensor[t].launch != launch || tables->tensor[t].placed.count == 0) continue;
        (tables->tensor[t].group < 0 ? without : with) = optim->tensors[t].name;
    }
    if (!with || !without) return;
    user_error(
        "%s has a gradient and %s has none, and a step of %s with m %s and v %s%s takes all tensors or none; give "
        "both a gradient, or override the formats of one",
        with, without, rows->rule->name, rows->m->name, rows->v->name,
        optim->config.limit_growth > 0.0f ? " and limit_growth" : "");
}

// Returns the number of a tensor's constants among those of a run, which are added if need be; -1 if the run has no
// room for them. `group` is the caller's, `settings` the plan's.
static int run_group(PlacedRun* run, int group, int settings) {
    for (int i = 0; i < run->groups; i++) {
        if (run->group[i] == group && run->settings[i] == settings) return i;
    }
    if (run->groups == STEP_GROUPS) return -1;
    run->group[run->groups] = group;
    run->settings[run->groups] = settings;
    return run->groups++;
}

// Adds the tiles of one tensor. `number` is that of its first tile in its launch's list.
static void build_tensor(PlacedTables* tables, int t, int group, const PlacedRun* run, int64_t number) {
    const PlacedState* state = &tables->tensor[t];
    const PlacedTensor* placed = &state->placed;
    const PlacedView* host = &tables->host;
    const int64_t tiles = tensor_padded(&tables->optim->tensors[t]) / TILE_ELEMENTS;
    for (int64_t i = 0; i < tiles; i++) {
        const int64_t from = i * TILE_ELEMENTS - placed->head, left = placed->count - from, at = tables->tiles++;
        PlacedTile tile = {from, (uint32_t)t, -1, -1, 0, 0, run->matrix};
        tile.begin = (uint16_t)(from < 0 ? -from : 0);
        tile.end = (uint16_t)(left < TILE_ELEMENTS ? left : TILE_ELEMENTS);
        const bool partly = tile.end - tile.begin < TILE_ELEMENTS;
        if (run->by_rms || partly || state->weights_off) tile.weights_slot = tables->weights_slots++;
        if (run->has_passes || run->matrix || partly || state->grads_off) tile.grads_slot = tables->grads_slots++;
        if (tile.weights_slot >= 0 || tile.grads_slot >= 0) host->beside[tables->staged++] = (uint32_t)at;
        host->tile[at] = tile;
        host->applied[at] = {};
        host->step[at] = optim_tile(tables->optim, t, i, number + i, &host->applied[at]);
        for (Tile* its : {&host->step[at], &host->applied[at]}) {
            its->element = (uint32_t)(placed->element / TILE_ELEMENTS + i), its->group = (uint32_t)group;
        }
    }
}

// Adds a run of a launch, which has at most STEP_GROUPS different constants.
static PlacedRun* build_run(PlacedTables* tables, int launch) {
    const OptimConfig* config = &tables->optim->plan->launch[launch].config;
    const bool matrix = rule_of(config)->matrix != MATRIX_NONE;
    PlacedRun* run = &tables->run[tables->runs++];
    const bool by_rms = has_adafactor_lr(config, "scaled");
    *run = {launch, update_reads_whole(config) && !matrix, matrix, by_rms, tables->tiles, 0, {}, {}, 0};
    return run;
}

// Adds the tiles of a launch, in runs.
static void build_launch(PlacedTables* tables, int launch) {
    const Optim* optim = tables->optim;
    const LaunchPlan* plan = &optim->plan->launch[launch];
    if (config_reads_whole(&plan->config)) require_all(tables, launch, &plan->rows);
    const int64_t first = tables->tiles;
    PlacedRun* run = nullptr;
    for (int t = 0; t < optim->count; t++) {
        const PlacedState* state = &tables->tensor[t];
        if (state->group < 0 || optim->plan->tensor[t].launch != launch || state->placed.count == 0) continue;
        int number = run ? run_group(run, state->group, optim->plan->tensor[t].group) : -1;
        if (number < 0 && run && run->matrix) {
            user_error(
                "%s takes all its matrices together, and they were given more than %d learning rates and decays; give "
                "them fewer",
                plan->rows.rule->name, STEP_GROUPS);
        }
        if (number < 0) run = build_run(tables, launch);
        if (number < 0) number = run_group(run, state->group, optim->plan->tensor[t].group);
        build_tensor(tables, t, number, run, tables->tiles - first);
        run->tiles = tables->tiles - run->first;
    }
}

// Builds the tables from the state of each tensor, and uploads them. A refusal leaves them to the next step.
static void tables_build(PlacedTables* tables) {
    const Device* dev = tables->optim->dev;
    const PlacedView* host = &tables->host;
    PlacedView* view = &tables->view;
    tables->built = false;
    tables->runs = 0, tables->tiles = tables->staged = 0, tables->weights_slots = tables->grads_slots = 0;
    for (int launch = 0; launch < tables->optim->plan->launches; launch++) build_launch(tables, launch);
    if (!tables->kept) view_free(dev, view);
    const int64_t lists = lists_take(tables, dev, view);  // which sets view->step
    copy_to_device(dev, view->step, host->step, lists);
    const int64_t weights = (int64_t)tables->weights_slots * TILE_ELEMENTS * view->weight_bytes,
                  grads = (int64_t)tables->grads_slots * TILE_ELEMENTS * view->grad_bytes;
    view->weights = (char*)device_alloc(dev, weights);
    view->grads = (char*)device_alloc(dev, grads);
    tables->kept = false;
    device_zero(dev, view->grads, grads);  // some padding is never copied
    for (int64_t i = tables->tiles - 1; i >= 0; i--) {
        const PlacedTile* tile = &host->tile[i];  // the first of a tensor comes last
        const void* at = view->grads + (int64_t)tile->grads_slot * TILE_ELEMENTS * view->grad_bytes;
        if (tile->matrix) optim_tensor_grads(tables->optim, (int)tile->tensor, at);
    }
    tables->built = true;
}

// The step.

// Records the addresses and groups of this step. Rebuilds the tables if tensors with gradients, groups or alignments
// have changed, which is refused during a capture.
static void tables_update(PlacedTables* tables, const NibbleStep* step, bool capturing) {
    bool same = tables->built, moved = tables->moved || tables->captured;
    for (int t = 0; t < tables->optim->count; t++) {
        PlacedState* state = &tables->tensor[t];
        const int64_t shift = -state->placed.head;
        const void* grads = state->placed.count > 0 ? step->grads[t] : nullptr;
        const int group = !grads ? -1 : step->group_of ? step->group_of[t] : 0;
        const PlacedPointers now = {grads ? step->weights[t] : nullptr, grads};
        const bool weights_off = ((uintptr_t)now.weights + (uintptr_t)(shift * tables->view.weight_bytes)) % 16 != 0;
        const bool grads_off = ((uintptr_t)now.grads + (uintptr_t)(shift * tables->view.grad_bytes)) % 16 != 0;
        const bool other = weights_off != state->weights_off || grads_off != state->grads_off;
        same = same && group == state->group && (group < 0 || !other);
        moved = moved || now.weights != tables->pointers[t].weights || now.grads != tables->pointers[t].grads;
        state->group = group;
        state->weights_off = weights_off, state->grads_off = grads_off;
        tables->pointers[t] = now;
    }
    if (!same && capturing) {
        tables->built = false;
        user_error(
            "a step is captured that differs from the last one in the tensors with gradients, their types or "
            "groups; take such a step before the capture");
    }
    tables->moved = moved || !same;
    if (!same) tables_build(tables);
}

constexpr int POINTERS_AT_ONCE = 128;

// Sets addresses that come as a kernel's arguments, which a CUDA graph captures; the host's array changes later.
struct SetPointers {
    PlacedPointers pointers[POINTERS_AT_ONCE], *to;

    OPTIM_INLINE void at(int64_t i) const { to[i] = pointers[i]; }
};

// Computes where the tiles lie from the tensors' addresses.
static void tables_places(const PlacedTables* tables) {
    const Device* dev = tables->optim->dev;
    const int count = tables->optim->count;
    for (int first = 0; first < count; first += POINTERS_AT_ONCE) {
        const int some = count - first < POINTERS_AT_ONCE ? count - first : POINTERS_AT_ONCE;
        SetPointers set = {{}, tables->view.pointers + first};
        memcpy(set.pointers, tables->pointers + first, (size_t)some * sizeof(PlacedPointers));
        for_each(dev, set, some);
    }
    for_each(dev, PlaceTiles{tables->view}, tables->tiles);
}

// Returns a launch's configuration with a group's betas and eps.
static OptimConfig run_config(const OptimConfig* config, const NibbleGroup* group) {
    OptimConfig own = *config;
    own.beta2 = group->beta2, own.eps = group->eps;
    if (!rule_of(config)->has_momentum) own.beta1 = group->beta1;
    return own;
}

// Returns the source of the constants of a caller's group under a plan's settings.
static HyperSource run_source(const OptimConfig* config, const NibbleGroup* group, const Settings* settings) {
    const OptimConfig own = run_config(config, group);
    Settings used = *settings;  // the plan's decay is -1 times a factor where the caller's group has it
    if (used.decay < 0.0) used.decay *= -group->weight_decay;
    return hyper_source(&own, &used);
}

// Steps in CUDA graphs.

bool is_capturing(const Device* dev) {
#ifdef __CUDACC__
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (dev->gpu) check(cudaStreamIsCapturing(dev->stream, &status));
    return status != cudaStreamCaptureStatusNone;
#endif
    return false;
}

// Refuses a capture if some launch cannot be captured.
static void require_replays(const PlacedTables* tables) {
    if (!tables->optim->config.replays) {
        user_error("a step is captured in a CUDA graph, and the optimizer was made without capturable=1");
    }
    for (int i = 0; i < tables->runs; i++) {
        const StepLaunch* launch = &tables->optim->launch[tables->run[i].launch];
        const OptimConfig* config = &launch->plan->config;
        const bool second = launch->rows.rule->matrix;
        if (launch->kernel.replayed.jit.function && (!second || launch->apply.replayed.jit.function)) continue;
        if (is_low_rank(rule_of(config))) {
            user_error(
                "%s projects gradients, and the host decides when it takes new directions, which a CUDA graph cannot "
                "repeat; step outside of the graph, or take another rule",
                config->rule);
        }
        user_error(
            "%s with weights %s, m %s and v %s has scales of whole tensors, which cannot be captured in a CUDA graph; "
            "step outside of the graph, or take formats in blocks",
            config->rule, config->weights, config->m, config->v);
    }
}

// Writes the arguments of a captured kernel, with the constants of the clock's step: a word of the arguments before
// their groups of constants, or one of these.
struct WriteReplay {
    StepArguments step;
    StepConstants constants;
    const int64_t* clock;
    Replayed* to;
    static constexpr int WORDS = offsetof(StepArguments, group) / 4, NUMBER = offsetof(StepArguments, step) / 4;

    OPTIM_INLINE void at(int64_t i) const {
        const int64_t now = *clock;
        if (i < WORDS) {
            ((uint32_t*)&to->step)[i] = i == NUMBER ? (uint32_t)now : ((const uint32_t*)&step)[i];
            return;
        }
        const int group = (int)i - WORDS;
        const double rate = constants.rate_at[group] ? (double)*constants.rate_at[group] : constants.rate[group];
        const int64_t own = now - constants.lag[group];
        const Hyper hyper = hyper_create(constants.source[group], rate, own);
        to->step.group[group] = hyper;
        if (group > 0) return;
        to->changing[0] = hyper.one_minus_beta2, to->changing[1] = hyper.root2;
        to->changing[2] = (float)bias_root(constants.source[0].beta3, own);
    }
};

const StepArguments* placed_replay(const Device* dev, const LaunchStep* step, const StepArguments* arguments) {
    const WriteReplay write = {*arguments, step->constants, step->clock, step->replayed};
    for_each(dev, write, WriteReplay::WORDS + step->constants.groups);
    return &step->replayed->step;
}

int64_t placed_clock(const PlacedTables* tables) {
    int64_t clock;
    copy_to_host(tables->optim->dev, &clock, tables->clock, sizeof(clock));
    return clock;
}

// Returns true if the run is the first one of a launch with passes.
static bool begins_passes(const PlacedTables* tables, const PlacedRun* run) {
    return run->has_passes && (run == tables->run || run[-1].launch != run->launch);
}

// Takes the step of a run or, with `passes`, runs the passes of its launch. These read neither the learning rate nor
// the decay of a group, and the other constants are the same for all tensors (require_same_constants).
static void run_take(const PlacedTables* tables, const PlacedRun* run, const NibbleStep* step, const float* scale,
                     bool passes, bool capturing) {
    const Plan* plan = tables->optim->plan;
    const LaunchPlan* launch = &plan->launch[run->launch];
    const NibbleGroup* first = &step->group[run->group[0]];  // all groups of a matrix rule have its betas
    const OptimConfig own = run_config(&launch->config, first);
    LaunchStep taken = {&own, scale, step->step, tables->view.step + run->first, tables->view.applied + run->first, 0};
    StepConstants* constants = &taken.constants;
    taken.count = passes ? launch->tiles : run->tiles;
    constants->groups = passes ? plan->groups : run->groups;
    for (int i = 0; i < constants->groups; i++) {
        const NibbleGroup* group = passes ? first : &step->group[run->group[i]];
        constants->source[i] = run_source(&launch->config, group, &plan->group[passes ? i : run->settings[i]]);
        constants->rate[i] = group->lr, constants->rate_at[i] = group->lr_at;
        constants->lag[i] = group->step > 0 ? step->step - group->step : 0;  // its tensors may count their own steps
    }
    taken.clock = tables->clock, taken.replayed = capturing ? tables->replayed : nullptr;
    (passes ? optim_passes : optim_launch)(tables->optim, run->launch, &taken);
}

// Refuses different constants or numbers of steps for tensors that a step takes all together.
static void require_same_constants(const PlacedTables* tables, const NibbleStep* step) {
    const NibbleGroup* first = nullptr;
    for (int i = 0; i < tables->runs; i++) {
        const PlacedRun* run = &tables->run[i];
        if (begins_passes(tables, run) || run->matrix) first = &step->group[run->group[0]];
        for (int g = 0; g < run->groups && (run->has_passes || run->matrix); g++) {
            const NibbleGroup* group = &step->group[run->group[g]];
            const OptimConfig* config = &tables->optim->plan->launch[run->launch].config;
            const bool same = group->beta1 == first->beta1 && group->beta2 == first->beta2 && group->eps == first->eps;
            if (same && group->step == first->step) continue;
            user_error(
                "%s reads whole %s and its tensors were given betas (%g, %g), eps %g at step %lld and (%g, %g), %g at "
                "step %lld; give them the same betas and eps and step them together, or override the rule of some",
                config->limit_growth > 0.0f ? "limit_growth" : config->rule,
                run->matrix                   ? "matrices"
                : config->limit_growth > 0.0f ? "tensors"
                                              : "rows",
                (double)first->beta1, (double)first->beta2, (double)first->eps, (long long)first->step,
                (double)group->beta1, (double)group->beta2, (double)group->eps, (long long)group->step);
        }
    }
}

// Ends a step. The scales of tensors without gradients stay unchanged.
static void tables_settle(const PlacedTables* tables, const float* scale) {
    const int count = tables->optim->count;
    bool all = true;
    for (int t = 0; t < count; t++) all = all && (tables->tensor[t].group >= 0 || tables->tensor[t].placed.count == 0);
    if (all) return optim_commit_scales(tables->optim, -1, scale);
    for (int t = 0; t < count; t++) {
        if (tables->tensor[t].group >= 0) optim_commit_scales(tables->optim, t, scale);
    }
}

void placed_step(PlacedTables* tables, const NibbleStep* step) {
    const Device* dev = tables->optim->dev;
    const bool capturing = is_capturing(dev);
    tables_update(tables, step, capturing);
    if (tables->tiles == 0) return;
    if (capturing) require_replays(tables);
    if (tables->moved || capturing) tables_places(tables);
    tables->moved = false;
    tables->captured = tables->captured || capturing;
    tables->kept = tables->kept || capturing;
    require_same_constants(tables, step);
    const bool begins = step->grad_scale || step->found_inf || tables->optim->config.replays;
    const float* scale = tables->scalars + (begins ? 1 : 0);
    const BeginStep begin = {step->grad_scale, step->found_inf, tables->scalars + 1, tables->clock,
                             capturing ? 0 : step->step};
    if (begins) for_each(dev, begin, 1);
    for_each(dev, MoveTiles{tables->view, false}, tables->staged * MOVERS);
    for (int i = 0; i < tables->runs; i++) {
        const PlacedRun* run = &tables->run[i];
        if (begins_passes(tables, run)) run_take(tables, run, step, scale, true, capturing);
        run_take(tables, run, step, scale, false, capturing);
    }
    tables_settle(tables, scale);
    for_each(dev, MoveTiles{tables->view, true}, tables->staged * MOVERS);
}
