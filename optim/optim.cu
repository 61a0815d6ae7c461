// Implements optim.h: the arrays of an optimizer by its plan (plan.h), the tile table, and the step. On a GPU a step is
// one kernel launch for each combination of rule and formats; NVRTC compiles the kernel in
// optim_create. On the CPU the same template runs over the tables' function pointers, and each core takes a tile (build
// with -fno-math-errno: a square root is then one instruction, and the update about four times faster; the bits are the
// same). Bytes a parameter: those of the storages' STREAM, and 8 bytes of tile table every 2048 elements.
#include "optim.h"

#include <assert.h>

#include "jit.h"
#include "matrix/low_rank.h"
#include "matrix/matrix.h"
#include "placed.h"
#include "plan.h"
#include "rows.h"
#include "sums.cuh"
#include "storage.h"

static_assert(OPTIM_STREAMS == 3 * SLOTS * LAUNCHES, "three arrays a slot");

// Returns the format of the copy that a step writes beside the weights: bf16 or none. optim_decode writes an fp32 copy,
// which only --matmul fp32 needs.
static const FormatRow* step_copy(const OptimConfig* config, const FormatRow* weights, OptimType compute) {
    const bool copies = config->keeps_copy && compute == OPTIM_BF16 && !serves_directly(weights, compute);
    return copies ? compute_row(OPTIM_BF16) : none_row();
}

// The optimizer itself.

// The weights of all tensors that are stored in one format.
struct Weights {
    const FormatRow* row;
    const ArenaRun* run;  // of these arrays
    Streams streams;
    const FormatRow* copy;  // the copy that a step writes beside them; none_row(): it writes none
    bool are_seen;          // the matmuls read the codes as stored; the codes then lie in Optim.seen if there is one
};

// A kernel of the step for these rows, and its measuring pass.
struct StepKernel {
    Rows rows;
    StepArrays arrays;
    int64_t grid;
    Kernel step;
    Kernel replayed;  // the same with arguments in device memory, for steps that may be captured in a CUDA graph
    bool measures;    // the measuring pass comes first, for formats in spans
    Kernel measure;
};

// The tensors that have the same rule and formats. Their step is one kernel launch or, with a rule that reads matrices,
// two for each chunk of matrices.
struct StepLaunch {
    const LaunchPlan* plan;
    Rows rows;
    const Weights* weights;
    Streams kept[SLOTS];     // the states; kept[SLOT_WEIGHTS] is empty
    Streams at[OPTIM_KEPT];  // where steps find m, v and slow, from tile `states` of the launch on
    uint32_t states;
    Tile* tiles;    // (plan->tiles) device memory
    Tile* applied;  // with a rule that reads matrices, the tiles of the second kernel; those of the first one differ in
                    // the weights, whose place the directions take
    uint32_t* next_tile;
    StepKernel kernel;  // with a rule that reads matrices: from gradients to directions
    StepKernel apply;   // with such a rule: from updates to weights
    MatrixWork matrix;
    RowWork passes;  // before the step, of a rule that reads rows and of --limit-growth
};

struct Optim {
    const Device* dev;
    OptimConfig config;
    OptimType compute;
    OptimTensor* tensors;  // (count), with names of their own
    int count;
    Plan* plan;
    void* seen;                   // all weights in the compute type, stored or copied; NULL: no copy is kept
    Weights weights[LAUNCHES];    // as many as the plan has
    StepLaunch launch[LAUNCHES];  // as many as the plan has
    float* factors;               // device memory: factor of the update in each tile, or null
    Tile* tiles;                  // device memory: the tiles of the launches, then a counter for each launch
    const void** grads;           // (count) where each tensor's gradients begin here, as the tiles have it
    OptimBytes allocated;
    bool counts;  // true in optim_bytes: nothing is allocated and no kernel is made; only `allocated` is summed up
    OptimStream stream[OPTIM_STREAMS];  // the arrays of the weights and of each launch's states
    char stream_name[OPTIM_STREAMS][ARRAY_NAME_BYTES];
    int stream_count;
    Settle settle[4 * LAUNCHES];
    int settles;
    JitRequest request[8 * LAUNCHES];  // the kernels that optim_make compiles
    int requests;
};

// Allocates zeroed device memory and adds its size to *total.
static void* allocate_zero(const Optim* optim, int64_t bytes, int64_t* total) {
    *total += aligned_bytes(bytes);
    if (optim->counts) return nullptr;
    void* memory = device_alloc(optim->dev, bytes);
    device_zero(optim->dev, memory, bytes);
    return memory;
}

// Copies host memory to device memory.
static void upload(const Optim* optim, void* to, const void* from, int64_t bytes) {
    if (!optim->counts) copy_to_device(optim->dev, to, from, bytes);
}

// Returns true if an array of states is in host memory: with `offload`, all but the numbers of whole tensors are.
static bool on_host(bool offload, const StreamInfo& stream) {
    return offload && stream.span == SPAN_RUN;
}

// Allocates and fills the constants that a format looks up; returns null if there are none.
static void* table_create(Optim* optim, const FormatRow* format) {
    if (format->table_bytes == 0) return nullptr;
    void* table = allocate_zero(optim, format->table_bytes, &optim->allocated.tables);
    if (optim->counts) return nullptr;
    void* host = memory_take((size_t)format->table_bytes);
    format->fill(host);
    copy_to_device(optim->dev, table, host, format->table_bytes);
    free(host);
    return table;
}

// Makes the table and the next numbers of a format in spans, for a run of the arena.
static void spans_create(Optim* optim, const ArenaRun* run, const FormatRow* format, Streams* streams) {
    Span span = format_span(format);
    if (span == SPAN_RUN) return;
    int64_t tiles = (run->end - run->begin) / TILE_ELEMENTS, bytes = tiles * (int64_t)sizeof(SpanTile);
    SpanTile* device = (SpanTile*)allocate_zero(optim, bytes, &optim->allocated.tables);
    streams->span = device;  // set at once, so that optim_free finds it if a later allocation fails
    streams->new_scales = (float*)allocate_zero(optim, next_bytes(run, span), &optim->allocated.tables);
    if (optim->counts) return;
    SpanTile* host = (SpanTile*)memory_take((size_t)bytes + 1);
    for (int t = 0; t < optim->count; t++) {
        const OptimTensor* tensor = &optim->plan->kept[t][SLOT_WEIGHTS];
        if (!is_in_run(optim->plan, t, run)) continue;
        const int64_t at = is_by_rows(span) ? optim->plan->ready[t] : optim->plan->at[t][span] - run->at[span];
        for (int64_t first = 0; first < tensor_padded(tensor); first += TILE_ELEMENTS) {
            host[(tensor->offset + first - run->begin) / TILE_ELEMENTS] = span_tile(span, tensor, first, at);
        }
    }
    copy_to_device(optim->dev, device, host, bytes);
    free(host);
    if (span < SPAN_SCALES)
        optim->settle[optim->settles++] = {(float*)streams->scales, streams->new_scales, run->numbers[span], run, span};
}

// Allocates a zeroed array that checkpoints write, in the memory that `total` counts.
static void* allocate_stream(Optim* optim, int64_t bytes, int64_t* total) {
    const OptimConfig* config = &optim->config;
    const bool host = total == &optim->allocated.host;
    if (optim->counts || (!host && (!config->allocate || bytes == 0))) return allocate_zero(optim, bytes, total);
    *total += aligned_bytes(bytes);
    if (!host) {
        void* memory = config->allocate(config->allocator, aligned_bytes(bytes));
        device_zero(optim->dev, memory, bytes);
        return memory;
    }
    void* memory = host_alloc(optim->dev, bytes, "the optimizer's states");
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < bytes; at += 1 << 20) {
        memset((char*)memory + at, 0, (size_t)(bytes - at < 1 << 20 ? bytes - at : 1 << 20));
    }
    return memory;
}

// Allocates the arrays of weights or states for a run of the arena, from array `first` on; with first 1, `codes` is
// array 0. Each address is stored at once, so that optim_free frees the array if a later allocation fails.
static void allocate_streams(Optim* optim, const ArenaRun* run, const FormatRow* format, int first, void* codes,
                             bool states, Streams* streams) {
    OptimBytes* all = &optim->allocated;
    void** const data[3] = {&streams->codes, &streams->scales, &streams->third};
    streams->codes = codes;
    for (int i = first; i < 3; i++) {
        const StreamInfo& stream = format->stream[i];
        int64_t* total = states && on_host(optim->config.offload, stream) ? &all->host : &all->states;
        *data[i] = allocate_stream(optim, run_bytes(run, stream), states ? total : &all->weights);
    }
    streams->table = table_create(optim, format);
    spans_create(optim, run, format, streams);
}

// Adds a storage's arrays to the list that checkpoints write.
static void list_streams(Optim* optim, Slot slot, int index, const FormatRow* format, const Streams* streams,
                         const ArenaRun* run) {
    const bool is_weights = slot == SLOT_WEIGHTS;
    char array[ARRAY_NAME_BYTES];
    plan_array(optim->plan, index, slot, array);
    for (int i = 0; i < 3; i++) {
        const StreamInfo& info = format->stream[i];
        void* data = stream_data(streams, i);
        if (info.bits == 0 || (run->begin == run->end && !optim->config.runs)) continue;
        if (i == 0 && is_weights && !data && optim->config.placed) continue;  // the caller has these weights
        const int number = optim->stream_count++, element_bytes = info.bits < 8 ? 1 : info.bits / 8;
        char* name = optim->stream_name[number];
        stream_name(array, info, name, sizeof(optim->stream_name[number]));
        const int64_t elements = run_bytes(run, info) / element_bytes;
        optim->stream[number] = {name, info.dtype, data, elements, element_bytes, i == 0 && is_weights, slot, index, i};
    }
}

static void free_streams(const Optim* optim, const FormatRow* format, Streams* streams, bool states) {
    const Device* dev = optim->dev;
    device_free(dev, (void*)streams->table);
    for (int i = 0; i < 3; i++) {
        const bool host = states && on_host(optim->config.offload, format->stream[i]);
        if (host) host_free(dev, stream_data(streams, i));
        if (!host && !optim->config.allocate) device_free(dev, stream_data(streams, i));
    }
    device_free(dev, streams->new_scales), device_free(dev, (void*)streams->span);
}

// Makes tile `i` of a tensor, which is number `number` of its launch's list, without its gradients. With a rule that
// reads matrices it also makes *applied.
Tile optim_tile(const Optim* optim, int t, int64_t i, int64_t number, Tile* applied) {
    const Plan* plan = optim->plan;
    const StepLaunch* launch = &optim->launch[plan->launch_of[t]];
    const Weights* weights = launch->weights;
    const bool copies = weights->copy != none_row();
    const int64_t at = plan->kept[t][SLOT_WEIGHTS].offset / TILE_ELEMENTS + i,
                  kept = at - weights->run->begin / TILE_ELEMENTS;
    Tile tile = {};
    tile.seen = copies ? array_at(weights->copy->stream[0], optim->seen, at)
                       : array_at(weights->row->stream[0], weights->streams.codes, kept);
    tile.kept = (uint32_t)kept, tile.states = (uint32_t)(at - launch->plan->run.begin / TILE_ELEMENTS);
    tile.element = (uint32_t)(optim->tensors[t].offset / TILE_ELEMENTS + i), tile.group = (uint32_t)plan->group_of[t];
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
    optim->tiles = (Tile*)allocate_zero(optim, bytes + counters, &optim->allocated.tables);
    if (optim->counts) return;
    Tile *tiles = (Tile*)memory_take((size_t)bytes + 1), *next = tiles;
    for (int l = 0; l < plan->launches; l++) {
        StepLaunch* launch = &optim->launch[l];
        launch->next_tile = (uint32_t*)(optim->tiles + count) + l;
        if (placed) continue;
        Tile *first = next, *applied = next += launch->plan->tiles;
        launch->tiles = optim->tiles + (first - tiles), launch->applied = optim->tiles + (applied - tiles);
        if (launch->rows.rule->matrix) next += launch->plan->tiles;
        for (int t = 0, n = 0; t < optim->count; t++) {
            if (plan->launch_of[t] != l) continue;
            for (int64_t i = plan->here[t].begin / TILE_ELEMENTS; i < plan->here[t].end / TILE_ELEMENTS; i++, n++) {
                first[n] = optim_tile(optim, t, i, n, &applied[n]);
            }
        }
    }
    copy_to_device(optim->dev, optim->tiles, tiles, bytes);
    free(tiles);
}

// Sets where the gradients of a tensor begin, or of its part that is kept here.
void optim_tensor_grads(Optim* optim, int t, const void* grads) {
    const Plan* plan = optim->plan;
    const StepLaunch* launch = &optim->launch[plan->launch_of[t]];
    if (optim->grads[t] == grads) return;
    optim->grads[t] = grads;
    if (!launch->tiles) return;
    const KeptPart part = plan->here[t];
    const int64_t first = plan->kept[t][SLOT_WEIGHTS].offset + part.begin - launch->plan->run.begin;
    tiles_set_grads(optim->dev, launch->tiles + first / TILE_ELEMENTS, (part.end - part.begin) / TILE_ELEMENTS, grads,
                    tile_bytes(launch->rows.grads->stream[0]));
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

// Asks for a kernel, which optim_make has compiled with all others at its end.
static void kernel_make(Optim* optim, const OptimConfig* config, const Rows* rows, const char* name, int threads,
                        int shared_bytes, Kernel* kernel) {
    char expression[2100];
    kernel_expression(name, config, rows, optim->compute, expression, sizeof(expression));
    *kernel = {{}, threads, shared_bytes};
    optim->request[optim->requests++] = {text_copy(expression), kernel, {}, nullptr, 0};
}

// Launches a kernel of the step with its only argument: StepArguments or, if it is replayed, their address.
static void step_launch(const Device* dev, const Kernel* kernel, int64_t blocks, void* argument) {
    jit_launch(kernel, blocks, kernel->shared_bytes, &argument, dev->stream);
}

// Makes a kernel of the step for up to `tiles` tiles: at most one thread block for each multiprocessor, with the
// threads and shared memory of step_shape.
static void kernel_create(Optim* optim, const OptimConfig* config, StepKernel* kernel, const Rows* rows,
                          int64_t tiles) {
    const Device* dev = optim->dev;
    kernel->rows = *rows;
    kernel->measures = measured(rows->weights) || measured(rows->m) || measured(rows->v);
    const FormatRow *weights = rows->weights, *m = rows->m, *v = rows->v,
                    *slow = rows->rule->keeps_slow ? m : none_row(), *copy = rows_copy(config, rows, optim->compute);
    kernel->arrays = {{weights->stream[0], weights->stream[1], weights->stream[2], rows->grads->stream[0], m->stream[0],
                       m->stream[1], m->stream[2], v->stream[0], v->stream[1], v->stream[2], slow->stream[0],
                       slow->stream[1], slow->stream[2], copy->stream[0]}};
    if (!dev->gpu || tiles == 0) return;
    StepShape shape = step_shape(kernel->arrays, m->table_bytes + v->table_bytes, rows->rule->rows);
    if (has_stages(dev->compute) && shape.stages < 2) {
        user_error(
            "%s and %s take %d KB of shared memory a tile and with their tables leave no room for two; take others",
            m->name, v->name, shape.stage_bytes / 1024);
    }
    int64_t blocks = ceil_div(tiles, shape.groups);
    kernel->grid = blocks < dev->sm_count ? blocks : dev->sm_count;
    kernel_make(optim, config, rows, "optim_step_kernel", shape.block_threads, step_shared_bytes(shape, dev->compute),
                &kernel->step);
    kernel->measure.shared_bytes = shape.table_bytes;
    if (!kernel->measures) return;
    kernel_make(optim, config, rows, "optim_measure_kernel", shape.threads, shape.table_bytes, &kernel->measure);
}

// Allocates and lists the arrays of weights number `index` of the plan.
static void weights_create(Optim* optim, int index) {
    const Plan* plan = optim->plan;
    const ArenaRun* run = &plan->weights[index].run;
    Weights* weights = &optim->weights[index];
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
    allocate_streams(optim, run, format, there ? 1 : 0, there ? at : nullptr, false, &weights->streams);
    list_streams(optim, SLOT_WEIGHTS, index, format, &weights->streams, run);
}

// Makes the tables and the kernels of the passes before the step.
static void rows_create(Optim* optim, int index) {
    StepLaunch* launch = &optim->launch[index];
    const Device* dev = optim->dev;
    RowWork* work = &launch->passes;
    work->plan = row_plan(optim->plan, index, optim->tensors, optim->count);
    if (work->plan.passes == 0) return;
    const int64_t bytes = work->plan.tensors * (int64_t)sizeof(SumTensor);
    work->tensor = (SumTensor*)allocate_zero(optim, bytes, &optim->allocated.tables);
    upload(optim, work->tensor, work->plan.tensor, bytes);
    work->parts = (float*)allocate_zero(optim, work->plan.parts * (int64_t)sizeof(float), &optim->allocated.tables);
    if (!dev->gpu || launch->plan->tiles == 0 || optim->counts) return;
    const OptimConfig* config = &launch->plan->config;
    const int shared_bytes = launch->kernel.measure.shared_bytes;
    auto make = [&](const char* name, Kernel* kernel) {
        kernel_make(optim, config, &launch->rows, name, 32 * SUM_WARPS, shared_bytes, kernel);
    };
    make("optim_sums_kernel", &work->kernel);
    if (optim->config.replays) make("optim_sums_replayed_kernel", &work->replayed);
}

static void rows_free(const Device* dev, RowWork* work) {
    device_free(dev, work->tensor), device_free(dev, work->parts);
    row_plan_free(&work->plan);
}

// Returns the number of tiles for which a launch's kernels are made; 0 if none is to be made.
static int64_t kernel_tiles(const Optim* optim, const LaunchPlan* plan) {
    return optim->counts ? 0 : plan->tiles;
}

// Makes the buffers and the second kernel of a rule that reads matrices.
static void matrix_create(Optim* optim, int index) {
    StepLaunch* launch = &optim->launch[index];
    const Device* dev = optim->dev;
    MatrixWork* work = &launch->matrix;
    int64_t* total = &optim->allocated.tables;
    work->plan = matrix_plan(dev, optim->plan, index, optim->tensors, optim->count);
    Rows rows = apply_rows(&launch->rows);
    if (low_rank_in_bf16(dev, &launch->plan->config, &work->plan)) rows.grads = launch->rows.grads;
    kernel_create(optim, &launch->plan->config, &launch->apply, &rows, kernel_tiles(optim, launch->plan));
    const int64_t bytes = work->plan.matrices * (int64_t)sizeof(Matrix);
    work->matrix = (Matrix*)allocate_zero(optim, bytes, total);
    upload(optim, work->matrix, work->plan.matrix, bytes);
    work->scratch = (float*)allocate_zero(optim, work->plan.scratch, total);
    work->work = allocate_zero(optim, work->plan.work, total);
    work->sums = (float*)allocate_zero(optim, work->plan.sums, total);
    work->unit = (float*)allocate_zero(optim, sizeof(float), total);
    work->low = (float*)allocate_zero(optim, work->plan.low, total);
    work->direction = (float*)allocate_zero(optim, work->plan.low, total);
    work->low_tiles = (Tile*)allocate_zero(optim, work->plan.low_tiles, total);
    if (work->plan.low_tiles == 0 || optim->counts) return;
    Tile* tiles = (Tile*)memory_take((size_t)work->plan.low_tiles);
    matrix_low_tiles(optim->plan, index, optim->tensors, optim->count, work, tiles);
    copy_to_device(dev, work->low_tiles, tiles, work->plan.low_tiles);
    free(tiles);
}

static void matrix_free(const Device* dev, MatrixWork* work) {
    device_free(dev, work->matrix), device_free(dev, work->scratch), device_free(dev, work->work);
    device_free(dev, work->sums), device_free(dev, work->unit), device_free(dev, work->low);
    device_free(dev, work->direction), device_free(dev, work->low_tiles);
    matrix_plan_free(&work->plan);
}

// Makes the kernels for steps in CUDA graphs, if the launch's steps can be captured.
static void replayed_create(Optim* optim, int index) {
    StepLaunch* launch = &optim->launch[index];
    const Device* dev = optim->dev;
    const RuleRow* rule = launch->rows.rule;
    const bool measures = launch->kernel.measures || launch->apply.measures;
    if (!optim->config.replays || !dev->gpu || kernel_tiles(optim, launch->plan) == 0) return;
    if (measures || is_low_rank(rule)) return;
    for (StepKernel* kernel : {&launch->kernel, &launch->apply}) {
        if (kernel == &launch->apply && !rule->matrix) continue;
        kernel_make(optim, &launch->plan->config, &kernel->rows, "optim_replayed_kernel", kernel->step.threads,
                    kernel->step.shared_bytes, &kernel->replayed);
    }
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
        allocate_streams(optim, run, format, 0, nullptr, true, kept);
        list_streams(optim, (Slot)slot, index, format, kept, run);
        if (slot < SLOT_M + OPTIM_KEPT) launch->at[slot - SLOT_M] = *kept;
    }
    const Rows first = first_rows(&planned->config);
    kernel_create(optim, &planned->config, &launch->kernel, &first, kernel_tiles(optim, planned));
    rows_create(optim, index);
    if (launch->rows.rule->matrix) matrix_create(optim, index);
    replayed_create(optim, index);
}

static void requests_free(Optim* optim) {
    jit_requests_free(optim->request, optim->requests);
    optim->requests = 0;
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
    if (scaled) optim->factors = (float*)allocate_zero(optim, factors, &optim->allocated.tables);
    tiles_create(optim);
    jit_kernels(optim->dev->compute, optim->request, optim->requests);
    requests_free(optim);
}

Optim* optim_create(const Device* dev, const OptimConfig* config, const OptimTensor* tensors, int count,
                    OptimType compute) {
    Optim* optim = (Optim*)memory_zero(1, sizeof(Optim));
    if (config->made) *config->made = optim;
    optim->dev = dev;
    optim->config = *config;
    if (strcmp(config->decay_mode, "independent") == 0 && !(config->lr_max > 0.0f)) {
        user_error("--decay-mode independent divides by the largest learning rate; give %s a value above 0",
                   config->placed ? "lr_max" : "--lr");
    }
    optim_make(optim, tensors, count, compute);
    return optim;
}

OptimBytes optim_bytes(const Device* dev, const OptimConfig* config, const OptimTensor* tensors, int count,
                       OptimType compute) {
    Optim* optim = (Optim*)memory_zero(1, sizeof(Optim));
    optim->dev = dev;
    optim->config = *config;
    optim->counts = true;
    optim_make(optim, tensors, count, compute);
    const OptimBytes bytes = optim->allocated;
    const Device host = {};
    optim->dev = &host;  // nothing was allocated on the device, which need not exist (--fit)
    optim_free(optim);
    return bytes;
}

// An optimizer that was not made completely has no plan yet, or lacks some of the plan's weights and launches.
void optim_free(Optim* optim) {
    if (!optim) return;
    const int weights = optim->plan ? optim->plan->weights_count : 0,
              launches = optim->plan ? optim->plan->launches : 0;
    for (int i = 0; i < weights; i++) {
        if (!optim->weights[i].row) continue;
        if (optim->seen && optim->weights[i].are_seen) optim->weights[i].streams.codes = nullptr;
        free_streams(optim, optim->weights[i].row, &optim->weights[i].streams, false);
    }
    device_free(optim->dev, optim->seen);
    for (int i = 0; i < launches; i++) {
        StepLaunch* launch = &optim->launch[i];
        for (int slot = SLOT_M; slot < SLOTS && launch->plan; slot++) {
            const FormatRow* format = slot_format(launch->plan, (Slot)slot);
            free_streams(optim, format, &launch->kept[slot], true);
        }
        rows_free(optim->dev, &launch->passes);
        matrix_free(optim->dev, &launch->matrix);
    }
    device_free(optim->dev, optim->factors), device_free(optim->dev, optim->tiles);
    if (optim->plan) plan_free(optim->plan);
    for (int i = 0; i < optim->count; i++) free((void*)optim->tensors[i].name);
    requests_free(optim);
    free(optim->tensors), free(optim->grads), free(optim);
}

OptimParts optim_parts(const Optim* optim) {
    return {optim->dev, &optim->config, optim->plan, optim->tensors, optim->count};
}

const Streams* optim_kept(const Optim* optim, int launch) {
    return &optim->launch[launch].kept[SLOT_M];
}

void optim_kept_at(Optim* optim, int index, const Streams (&at)[OPTIM_KEPT], int64_t first) {
    for (int k = 0; k < OPTIM_KEPT; k++) optim->launch[index].at[k] = at[k];
    optim->launch[index].states = (uint32_t)first;
}

static const Weights* weights_of(const Optim* optim, int tensor) {
    const Plan* plan = optim->plan;
    return &optim->weights[plan->launch[plan->launch_of[tensor]].weights];
}

// Returns the number of a tensor's first tile in the arrays of its weights.
static int64_t weights_tile(const Optim* optim, int tensor) {
    return (optim->plan->kept[tensor][SLOT_WEIGHTS].offset - weights_of(optim, tensor)->run->begin) / TILE_ELEMENTS;
}

OptimBytes optim_allocated(const Optim* optim) {
    return optim->allocated;
}

void* optim_weights(const Optim* optim) {
    return optim->seen;
}

// Decodes `tiles` tiles of weights, from tile `first` of their arrays on, to `to`.
static void decode_tiles(const Optim* optim, const Weights* weights, int64_t first, int64_t tiles, void* to) {
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
        const Weights* weights = &optim->weights[i];
        const int64_t first = weights->run->begin / TILE_ELEMENTS, end = weights->run->end / TILE_ELEMENTS;
        void* to = array_at(compute_row(optim->compute)->stream[0], optim->seen, first);
        if (!weights->are_seen) decode_tiles(optim, weights, 0, end - first, to);
    }
}

const void* optim_stored_weights(const Optim* optim, int tensor) {
    const Weights* weights = weights_of(optim, tensor);
    const int64_t first = weights_tile(optim, tensor);
    return weights->are_seen ? row_tile(weights->row, weights->streams, first).codes : nullptr;
}

OptimCodes optim_codes(const Optim* optim, int tensor) {
    const Weights* weights = weights_of(optim, tensor);
    if (!format_is_operand(weights->row) || is_elsewhere(optim->plan, tensor)) return {};
    const int64_t at = optim->plan->at[tensor][SPAN_TENSOR] - weights->run->at[SPAN_TENSOR];
    return {(const uint8_t*)row_tile(weights->row, weights->streams, weights_tile(optim, tensor)).codes,
            (const float*)weights->streams.scales + at};
}

void optim_decode_tensor(const Optim* optim, int tensor, void* to) {
    const Weights* weights = weights_of(optim, tensor);
    const int64_t tiles = tensor_padded(&optim->tensors[tensor]) / TILE_ELEMENTS;
    decode_tiles(optim, weights, weights_tile(optim, tensor), tiles, to);
}

// The step.

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
                          const LaunchStep* its) {
    const RowPlan* plan = &launch->passes.plan;
    const RowRange range = row_range(plan, its->first, its->first + arguments->tile_count);
    StepArguments own = *arguments;
    own.tiles -= its->first;
    Replay replay = its->replay ? *its->replay : Replay{};
    for (int i = 0; i < plan->passes && range.tensors > 0; i++) {
        for (int group = 0; group < STEP_GROUPS && plan->pass[i] == SUM_STEP; group++) {
            const Settings settings = {1.0, optim->plan->group[group].decay};
            replay.source[group] = hyper_source(its->config, &settings);
            replay.rate[group] = 1.0, replay.rate_at[group] = nullptr;
            own.group[group] = hyper_create(replay.source[group], 1.0, its->step);
        }
        pass_run(optim, launch, range, plan->pass[i], &own, its->replay ? &replay : nullptr, its->step);
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
                            const LaunchStep* its) {
    const MatrixWork* work = &launch->matrix;
    const Device* dev = optim->dev;
    const Streams none = {nullptr, nullptr}, *v = &launch->kept[SLOT_V];
    const bool projects = is_low_rank(launch->rows.rule), is_bf16 = launch->rows.grads->stream[0].bits == 16,
               in_bf16 = low_rank_in_bf16(dev, &launch->plan->config, &work->plan);
    const LowStep low = {dev,
                         its->config,
                         work,
                         &launch->kept[SLOT_BASIS],
                         arguments->tiles,
                         is_bf16,
                         arguments->grad_scale,
                         its->step,
                         in_bf16,
                         optim->tensors,
                         optim->grads};
    matrix_begin(dev, work, arguments->grad_scale);
    for (int i = 0; i < work->plan.chunks; i++) {
        const MatrixChunk* chunk = &work->plan.chunk[i];
        const MatrixRange range = range_create(chunk, its->first, arguments->tile_count);
        if (range.at >= range.end) continue;
        StepArguments moment = *arguments, apply = *arguments;
        // The padding of a matrix's projection must stay zero, and other chunks have matrices of other sizes.
        const int64_t low_bytes = (chunk->low_end - chunk->low_begin) * (int64_t)sizeof(float);
        if (projects && work->plan.chunks > 1) device_zero(dev, work->low, low_bytes);
        if (projects) low_rank_project(&low, i);
        moment_arguments(launch, &range, its->first, &low, &moment);
        kernel_run(optim, &launch->kernel, its->replay, &moment);
        if (projects) low_rank_update(&low, i);
        if (!projects) matrix_update(dev, its->config, work, &range, (const float*)v->scales, v->new_scales);
        range_tiles(&range, its->applied, its->first, &apply);
        apply.grad_scale = work->unit;
        apply.m = apply.v = none;
        kernel_run(optim, &launch->apply, its->replay, &apply);
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
                         const LaunchStep* its) {
    if (launch->rows.rule->matrix) return launch_matrices(optim, launch, arguments, its);
    kernel_run(optim, &launch->kernel, its->replay, arguments);
}

void optim_passes(const Optim* optim, int launch, StepArguments* arguments, const LaunchStep* its) {
    launch_passes(optim, launch_begin(optim, launch, arguments), arguments, its);
}

void optim_launch(const Optim* optim, int launch, StepArguments* arguments, const LaunchStep* its) {
    launch_tiles(optim, launch_begin(optim, launch, arguments), arguments, its);
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
        const Settle its = {all->now + at, all->next + at, span_numbers(all->span, tensor), all->run, all->span};
        spans_settle(optim->dev, &its, grad_scale);
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

void optim_step_tiles(const Optim* optim, const TileRun* run, const float* grad_scale, float lr, int64_t step) {
    const StepLaunch* launch = &optim->launch[run->launch];
    if (run->tiles == 0) return;
    StepArguments arguments = step_arguments(optim, launch, grad_scale, lr, step);
    arguments.tiles = launch->tiles + run->first, arguments.tile_count = run->tiles;
    const LaunchStep its = {&launch->plan->config, step, launch->applied + run->first, run->first};
    if (!launch->rows.rule->matrix) optim_passes(optim, run->launch, &arguments, &its);
    optim_launch(optim, run->launch, &arguments, &its);
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

// Streams.

int optim_stream_count(const Optim* optim) {
    return optim->stream_count;
}

OptimStream optim_stream(const Optim* optim, int index) {
    return optim->stream[index];
}

OptimStream optim_stream_named(const Optim* optim, const char* name) {
    for (int i = 0; i < optim->stream_count; i++) {
        if (strcmp(optim->stream[i].name, name) == 0) return optim->stream[i];
    }
    return {};
}
