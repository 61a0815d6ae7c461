// Implements optim.h but for the step (step.cu): the arrays of an optimizer by its plan (plan.h), the tile table, and
// the kernels, which NVRTC compiles in optim_create. Bytes a parameter: those of the storages' STREAM, and 32 bytes of
// tile table every 2048 elements.
#include "../kernels/layer_ring.cuh"
#include "made.h"

#include <assert.h>

static_assert(OPTIM_STREAMS == 3 * SLOTS * LAUNCHES, "three arrays a slot");

// Returns the format of the copy that a step writes beside the weights.
static const FormatRow* step_copy(const OptimConfig* config, const FormatRow* weights, OptimType compute) {
    return config->keeps_copy && !serves_directly(weights, compute) ? compute_row(compute) : none_row();
}

// Allocates zeroed memory, which optim_free frees, and adds its size to *total, which says whose memory it is.
static void* allocate_zero(Optim* optim, int64_t bytes, int64_t* total) {
    const Device* dev = optim->dev;
    const bool on_host = total == &optim->allocated.host;
    assert(optim->memories < (int)(sizeof(optim->memory) / sizeof(optim->memory[0])));
    void* memory = on_host ? host_alloc(dev, bytes, "the optimizer's states", total) : device_alloc(dev, bytes, total);
    optim->memory[optim->memories++] = {memory, on_host};
    if (!on_host) device_zero(dev, memory, bytes);
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < (on_host && !dev->imagined ? bytes : 0); at += 1 << 20) {
        memset((char*)memory + at, 0, (size_t)(bytes - at < 1 << 20 ? bytes - at : 1 << 20));
    }
    return memory;
}

void* optim_table(Optim* optim, int64_t bytes, const void* from) {
    void* table = allocate_zero(optim, bytes, &optim->allocated.tables);
    if (from) copy_to_device(optim->dev, table, from, bytes);
    return table;
}

// Allocates and fills the constants that a format looks up; returns null if there are none.
static void* table_create(Optim* optim, const FormatRow* format) {
    if (format->table_bytes == 0) return nullptr;
    char* host = (char*)memory_take((size_t)format->table_bytes);
    if (!optim->dev->imagined) format->fill(host);
    void* table = table_memory(optim, format->table_bytes, host);
    free(host);
    return table;
}

// Allocates a zeroed array that checkpoints write, in the caller's memory if it gives any.
static void* allocate_stream(Optim* optim, int64_t bytes, int64_t* total) {
    const OptimConfig* config = &optim->config;
    const bool own = !config->allocate || bytes == 0 || total == &optim->allocated.host;
    if (own) return allocate_zero(optim, bytes, total);
    *total += aligned_bytes(bytes);
    void* memory = config->allocate(config->allocator, aligned_bytes(bytes));
    device_zero(optim->dev, memory, bytes);
    return memory;
}

// Allocates the arrays of a slot of weights or launch `index`, and adds them to the list that checkpoints write. If
// array 0 is `there`, it begins at `codes`. With `offload`, states but the numbers of whole tensors are in host memory.
static void streams_create(Optim* optim, Slot slot, int index, const FormatRow* format, const ArenaRun* run, bool there,
                           void* codes, Streams* streams) {
    const bool is_weights = slot == SLOT_WEIGHTS;
    OptimBytes* all = &optim->allocated;
    void** const data[3] = {&streams->codes, &streams->scales, &streams->third};
    streams->codes = codes;
    for (int i = 0; i < 3; i++) {
        const StreamInfo& info = format->stream[i];
        const bool on_host = optim->config.offload && info.span == SPAN_RUN;
        int64_t* total = is_weights ? &all->weights : on_host ? &all->host : &all->states;
        const int64_t bytes = run_bytes(run, info);
        if (i > 0 || !there) *data[i] = allocate_stream(optim, bytes, total);
        if (info.bits == 0 || (run->begin == run->end && !optim->config.runs)) continue;
        if (i == 0 && is_weights && !*data[0] && optim->config.placed) continue;  // the caller has these weights
        const int number = optim->stream_count++, element_bytes = info.bits < 8 ? 1 : info.bits / 8;
        char* name = optim->stream_name[number];
        stream_name(optim->plan, index, slot, info, name, sizeof(optim->stream_name[number]));
        optim->stream[number] = {name, info.dtype, *data[i], bytes / element_bytes, element_bytes, i == 0 && is_weights,
                                 slot, index,      i};
    }
    streams->table = table_create(optim, format);
    spans_create(optim, run, format, streams);
}

// Makes tile `i` of a tensor, which is number `number` of its launch's list, without its gradients. With a rule that
// reads matrices it also makes *applied.
Tile optim_tile(const Optim* optim, int t, int64_t i, int64_t number, Tile* applied) {
    const Plan* plan = optim->plan;
    const TensorPlan* own = &plan->tensor[t];
    const StepLaunch* launch = &optim->launch[own->launch];
    const StoredWeights* weights = launch->weights;
    const bool copies = weights->copy != none_row();
    const int64_t at = own->kept[SLOT_WEIGHTS].offset / TILE_ELEMENTS + i,
                  kept = at - weights->run->begin / TILE_ELEMENTS;
    Tile tile = {};
    tile.seen = copies ? array_at(weights->copy->stream[0], optim->seen, at)
                       : array_at(weights->row->stream[0], weights->streams.codes, kept);
    tile.kept = (uint32_t)kept, tile.states = (uint32_t)(at - launch->plan->run.begin / TILE_ELEMENTS);
    tile.element = (uint32_t)(optim->tensors[t].offset / TILE_ELEMENTS + i), tile.group = (uint32_t)own->group;
    if (!launch->rows.rule->matrix) return tile;
    *applied = tile;
    applied->grads = matrix_scratch(&launch->matrix, number, launch->apply.rows.grads->stream[0].bits / 8);
    tile.seen = matrix_scratch(&launch->matrix, number, sizeof(float));
    return tile;
}

// Makes the tile tables of all launches, and their counters.
static void tiles_create(Optim* optim) {
    const Plan* plan = optim->plan;
    const bool placed = optim->config.placed;  // placed.cu then makes a table of its own
    int64_t count = 0;
    for (int l = 0; l < plan->launches && !placed; l++) {
        count += plan->launch[l].tiles * (plan->launch[l].rows.rule->matrix ? 2 : 1);
    }
    const int64_t bytes = count * (int64_t)sizeof(Tile), counters = LAUNCHES * (int64_t)sizeof(uint32_t);
    optim->tiles = table_memory<Tile>(optim, bytes + counters);
    if (optim->dev->imagined) return;
    Tile *tiles = (Tile*)memory_take((size_t)bytes + 1), *next = tiles;
    for (int l = 0; l < plan->launches; l++) {
        StepLaunch* launch = &optim->launch[l];
        launch->next_tile = (uint32_t*)(optim->tiles + count) + l;
        if (placed) continue;
        Tile *first = next, *applied = next += launch->plan->tiles;
        launch->tiles = optim->tiles + (first - tiles), launch->applied = optim->tiles + (applied - tiles);
        if (launch->rows.rule->matrix) next += launch->plan->tiles;
        for (int t = 0, n = 0; t < optim->count; t++) {
            const KeptPart here = plan->tensor[t].here;
            if (plan->tensor[t].launch != l) continue;
            for (int64_t i = here.begin / TILE_ELEMENTS; i < here.end / TILE_ELEMENTS; i++, n++) {
                first[n] = optim_tile(optim, t, i, n, &applied[n]);
            }
        }
    }
    copy_to_device(optim->dev, optim->tiles, tiles, bytes);
    free(tiles);
}

// Returns the format of the copy that a kernel writes. A direction, in the weights' place, has no copy.
static const FormatRow* rows_copy(const OptimConfig* config, const Rows* rows, OptimType compute) {
    return rows->rule->matrix || rows->weights == none_row() ? none_row() : step_copy(config, rows->weights, compute);
}

// Returns the rows of the first kernel of a step, which is the only one except with rules that read matrices.
static Rows first_rows(const OptimConfig* config) {
    Rows rows = config_rows(config);
    if (rows.rule->rows != ROWS_NONE) rows.v = none_row();  // the numbers of rows are inputs of the rule
    return rows.rule->matrix ? moment_rows(&rows) : rows;
}

// Writes the C++ expression that names a kernel for NVRTC.
static void kernel_expression(const char* kernel, const OptimConfig* config, const Rows* rows, OptimType compute,
                              char* expression, size_t bytes) {
    const bool scaled = config_scaled(config);
    snprintf(expression, bytes, "%s<%s%s%s, %s, %s, %s, %s, %s>", kernel, scaled ? "Scaled<" : "", rows->rule->type,
             scaled ? ">" : "", rows->weights->type, rows->m->type, rows->v->type,
             rows_copy(config, rows, compute)->type, rows->grads->type);
}

void optim_expression(const OptimConfig* config, OptimType compute, char* expression, size_t bytes) {
    const Rows rows = first_rows(config);
    kernel_expression("optim_step_kernel", config, &rows, compute, expression, bytes);
}

void kernel_make(Optim* optim, const OptimConfig* config, const Rows* rows, const char* name, int threads,
                 int shared_bytes, Kernel* kernel) {
    char expression[2100];
    kernel_expression(name, config, rows, optim->compute, expression, sizeof(expression));
    *kernel = {{}, threads, shared_bytes};
    optim->request[optim->requests++] = {text_copy(expression), kernel, {}, 0, nullptr};
}

void kernel_create(Optim* optim, const LaunchPlan* plan, StepKernel* kernel, const Rows* rows) {
    const Device* dev = optim->dev;
    const OptimConfig* config = &plan->config;
    kernel->rows = *rows;
    kernel->measures = measured(rows->weights) || measured(rows->m) || measured(rows->v);
    const FormatRow *weights = rows->weights, *m = rows->m, *v = rows->v,
                    *slow = rows->rule->keeps_slow ? m : none_row(), *copy = rows_copy(config, rows, optim->compute);
    kernel->arrays = {{weights->stream[0], weights->stream[1], weights->stream[2], rows->grads->stream[0], m->stream[0],
                       m->stream[1], m->stream[2], v->stream[0], v->stream[1], v->stream[2], slow->stream[0],
                       slow->stream[1], slow->stream[2], copy->stream[0]}};
    if (!dev->gpu || plan->tiles == 0 || optim->dev->imagined) return;
    StepShape shape = step_shape(kernel->arrays, m->table_bytes + v->table_bytes, rows->rule->rows);
    if (has_stages(dev->compute) && shape.stages < 2) {
        user_error(
            "%s and %s take %d KB of shared memory a tile and with their tables leave no room for two; take others",
            m->name, v->name, shape.stage_bytes / 1024);
    }
    int64_t blocks = ceil_div(plan->tiles, shape.groups);
    kernel->grid = blocks < dev->sm_count ? blocks : dev->sm_count;
    kernel_make(optim, config, rows, "optim_step_kernel", shape.block_threads, step_shared_bytes(shape, dev->compute),
                &kernel->step);
    kernel->measure.shared_bytes = shape.table_bytes;
    if (kernel->measures) {
        kernel_make(optim, config, rows, "optim_measure_kernel", shape.threads, shape.table_bytes, &kernel->measure);
    } else if (config->replays && !is_low_rank(rule_of(config))) {
        kernel_make(optim, config, rows, "optim_replayed_kernel", kernel->step.threads, kernel->step.shared_bytes,
                    &kernel->replayed);
    }
}

// Allocates and lists the arrays of weights number `index` of the plan.
static void weights_create(Optim* optim, int index) {
    const Plan* plan = optim->plan;
    const ArenaRun* run = &plan->weights[index].run;
    StoredWeights* weights = &optim->weights[index];
    weights->row = plan->weights[index].format;
    weights->run = run;
    const FormatRow* format = weights->row;
    weights->are_seen = serves_directly(format, optim->compute);
    weights->copy = step_copy(&optim->config, format, optim->compute);
    const StreamInfo& seen = compute_row(optim->compute)->stream[0];
    const bool copied = optim->config.keeps_copy && !optim->config.placed;
    char* at = optim->seen ? (char*)optim->seen + stream_bytes(seen, run->begin) : nullptr;
    if (copied) *(weights->are_seen ? &optim->allocated.weights : &optim->allocated.compute) += run_bytes(run, seen);
    const bool there = weights->are_seen && (copied || optim->config.placed);
    streams_create(optim, SLOT_WEIGHTS, index, format, run, there, there ? at : nullptr, &weights->streams);
}

// Allocates and lists the states of launch `index`, and makes its kernels.
static void launch_create(Optim* optim, int index) {
    StepLaunch* launch = &optim->launch[index];
    const LaunchPlan* planned = &optim->plan->launch[index];
    launch->plan = planned;
    launch->rows = planned->rows;
    launch->weights = &optim->weights[planned->weights];
    for (int slot = SLOT_M; slot < SLOTS; slot++) {
        const FormatRow* format = slot_format(planned, (Slot)slot);
        const ArenaRun* run = &planned->kept[slot];
        Streams* kept = &launch->kept[slot];
        streams_create(optim, (Slot)slot, index, format, run, false, nullptr, kept);
        if (slot < SLOT_M + OPTIM_KEPT) launch->at[slot - SLOT_M] = *kept;
    }
    const Rows first = first_rows(&planned->config);
    kernel_create(optim, planned, &launch->kernel, &first);
    rows_create(optim, index);
    if (launch->rows.rule->matrix) matrix_create(optim, index);
}

// Makes the arrays, tables and kernels of an optimizer.
static void optim_make(Optim* optim, const OptimTensor* tensors, int count, OptimType compute) {
    const OptimConfig* config = &optim->config;
    optim->compute = compute;
    optim->tensors = (OptimTensor*)memory_zero((size_t)count + 1, sizeof(OptimTensor));
    optim->grads = (const void**)memory_zero((size_t)count + 1, sizeof(void*));
    optim->count = count;
    for (int i = 0; i < count; i++) {
        const char* name = text_copy(tensors[i].name);
        optim->tensors[i] = tensors[i];
        optim->tensors[i].name = name;
    }
    Plan* plan = optim->plan = plan_ranges(config, optim->tensors, count);
    int64_t none = 0;  // not counted here, since weights_create counts these bytes
    int64_t bytes = stream_bytes(compute_row(compute)->stream[0], plan->elements);
    optim->seen = config->keeps_copy && !config->placed ? allocate_zero(optim, bytes, &none) : nullptr;
    // Streams are listed in the arena's order, so that a shard lists some of the streams of the whole arena.
    for (int w = 0; w < plan->weights_count; w++) {
        weights_create(optim, w);
        for (int i = 0; i < plan->launches; i++) {
            if (plan->launch[i].weights == w) launch_create(optim, i);
        }
    }
    bool scaled = false;
    for (int i = 0; i < plan->launches; i++) scaled = scaled || config_scaled(&plan->launch[i].config);
    const int64_t factors = plan->elements / TILE_ELEMENTS * (int64_t)sizeof(float);
    if (scaled) optim->factors = table_memory<float>(optim, factors);
    tiles_create(optim);
    jit_kernels(optim->dev->compute, optim->request, optim->requests);
    jit_requests_free(optim->request, optim->requests);
    optim->requests = 0;
}

Optim* optim_create(const Device* dev, const OptimConfig* config, const OptimTensor* tensors, int count,
                    OptimType compute) {
    Optim* optim = (Optim*)memory_zero(1, sizeof(Optim));
    if (config->made) *config->made = optim;
    optim->dev = dev;
    optim->config = *config;
    if (strcmp(config->decay_mode, "coupled") != 0 && !(config->lr_max > 0.0f) && !dev->imagined) {
        user_error("--decay-mode %s divides by the largest learning rate; give %s a value above 0", config->decay_mode,
                   config->placed ? "lr_max" : "--lr");
    }
    optim_make(optim, tensors, count, compute);
    return optim;
}

OptimBytes optim_bytes(const Device* dev, const OptimConfig* config, const OptimTensor* tensors, int count,
                       OptimType compute) {
    Device imagined = *dev;
    imagined.imagined = true;
    OptimConfig plan = *config;
    plan.made = nullptr, plan.allocate = nullptr;
    Optim* optim = optim_create(&imagined, &plan, tensors, count, compute);
    const OptimBytes bytes = optim->allocated;
    optim_free(optim);
    return bytes;
}

// An optimizer that was not made completely may have no plan yet.
void optim_free(Optim* optim) {
    if (!optim) return;
    for (int i = 0; i < optim->memories; i++) {
        (optim->memory[i].on_host ? host_free : device_free)(optim->dev, optim->memory[i].at);
    }
    for (int i = 0; i < (optim->plan ? optim->plan->launches : 0); i++) {
        row_plan_free(&optim->launch[i].passes.plan), matrix_plan_free(&optim->launch[i].matrix.plan);
    }
    if (optim->plan) plan_free(optim->plan);
    for (int i = 0; i < optim->count; i++) free((void*)optim->tensors[i].name);
    jit_requests_free(optim->request, optim->requests);
    free(optim->tensors), free(optim->grads), free(optim);
}

static const StoredWeights* weights_of(const Optim* optim, int tensor) {
    const Plan* plan = optim->plan;
    return &optim->weights[launch_of(plan, tensor)->weights];
}

// Returns the number of a tensor's first tile in the arrays of its weights.
static int64_t weights_tile(const Optim* optim, int tensor) {
    const OptimTensor* kept = &optim->plan->tensor[tensor].kept[SLOT_WEIGHTS];
    return (kept->offset - weights_of(optim, tensor)->run->begin) / TILE_ELEMENTS;
}

// Decodes `tiles` tiles of weights, from tile `first` of their arrays on, to `to`.
static void decode_tiles(const Optim* optim, const StoredWeights* weights, int64_t first, int64_t tiles, void* to) {
    const FormatRow *format = weights->row, *seen = compute_row(optim->compute);
    const Streams from = row_tile(format, weights->streams, first), decoded = {to, nullptr};
    if (tiles == 0) return;
    if (optim->dev->gpu) {
        void* arguments[] = {(void*)&from, (void*)&decoded};
        dim3 grid((unsigned)tiles), block(TILE_ELEMENTS / DECODE_ELEMENTS);
        check(cudaLaunchKernel(weights->row->decode[optim->compute], grid, block, arguments, 0, optim->dev->stream));
        return;
    }
#pragma omp parallel for schedule(static)
    for (int64_t tile = 0; tile < tiles; tile++) {
        float x[TILE_ELEMENTS];
        format->view(row_tile(format, from, tile), 0, x, TILE_ELEMENTS);
        seen->set(row_tile(seen, decoded, tile), 0, x, TILE_ELEMENTS);
    }
}

void optim_decode(Optim* optim) {
    for (int i = 0; i < optim->plan->weights_count && optim->seen; i++) {
        const StoredWeights* weights = &optim->weights[i];
        const int64_t first = weights->run->begin / TILE_ELEMENTS, end = weights->run->end / TILE_ELEMENTS;
        void* to = array_at(compute_row(optim->compute)->stream[0], optim->seen, first);
        if (!weights->are_seen) decode_tiles(optim, weights, 0, end - first, to);
    }
}

const void* optim_stored_weights(const Optim* optim, int tensor) {
    const StoredWeights* weights = weights_of(optim, tensor);
    const int64_t first = weights_tile(optim, tensor);
    return weights->are_seen ? row_tile(weights->row, weights->streams, first).codes : nullptr;
}

OptimCodes optim_codes(const Optim* optim, int tensor) {
    const StoredWeights* weights = weights_of(optim, tensor);
    if (!format_is_operand(weights->row) || is_elsewhere(optim->plan, tensor)) return {};
    const int64_t at = optim->plan->tensor[tensor].at[SPAN_TENSOR] - weights->run->at[SPAN_TENSOR];
    return {(const uint8_t*)row_tile(weights->row, weights->streams, weights_tile(optim, tensor)).codes,
            (const float*)weights->streams.scales + at};
}

void optim_decode_tensor(const Optim* optim, int tensor, void* to) {
    const StoredWeights* weights = weights_of(optim, tensor);
    const int64_t tiles = tensor_padded(&optim->tensors[tensor]) / TILE_ELEMENTS;
    decode_tiles(optim, weights, weights_tile(optim, tensor), tiles, to);
}

void* optim_array(const Optim* optim, int tensor, Slot slot, int i) {
    const StepLaunch* launch = &optim->launch[optim->plan->tensor[tensor].launch];
    return stream_data(slot == SLOT_WEIGHTS ? &launch->weights->streams : &launch->kept[slot], i);
}
