// optim_bytes and optim_file_bytes (optim.h): the bytes of a combination before anything is allocated.
#include "bytes.h"

#include "matrix/matrix.h"
#include "optim.h"

static int64_t format_bytes(const FormatRow* format, const ArenaRun* run, bool offload = false, bool of_host = false) {
    int64_t bytes = 0;
    for (const StreamInfo& stream : format->stream) {
        if (on_host(offload, stream) == of_host) bytes += allocated_bytes(run_bytes(run, stream));
    }
    return bytes;
}

// Bytes that a storage needs beside its arrays: constants and, for spans, the next numbers and the places of its tiles.
static int64_t format_table_bytes(const FormatRow* format, const ArenaRun* run) {
    int64_t bytes = allocated_bytes(format->table_bytes), tiles = (run->end - run->begin) / TILE_ELEMENTS;
    if (format_span(format) == SPAN_RUN) return bytes;
    return bytes + allocated_bytes(span_bytes(run, format_span(format))) +
           allocated_bytes(tiles * (int64_t)sizeof(SpanTile));
}

// Bytes of the buffers of a rule that reads matrices.
static int64_t matrix_bytes(const Plan* plan, int launch, const OptimTensor* tensors, int count) {
    MatrixPlan its = matrix_plan(plan, launch, tensors, count);
    const int64_t bytes = allocated_bytes(its.matrices * (int64_t)sizeof(Matrix)) + allocated_bytes(its.scratch) +
                          allocated_bytes(its.work) + allocated_bytes(its.sums) + allocated_bytes(sizeof(float)) +
                          2 * allocated_bytes(its.low) + allocated_bytes(its.low_tiles);
    matrix_plan_free(&its);
    return bytes;
}

// Bytes of what the passes of a launch use.
static int64_t rows_bytes(const Plan* plan, int launch, const OptimTensor* tensors, int count) {
    RowPlan its = row_plan(plan, launch, tensors, count);
    const bool any = its.passes > 0;
    const int64_t bytes =
        allocated_bytes(its.tensors * (int64_t)sizeof(SumTensor)) + allocated_bytes(its.parts * (int64_t)sizeof(float));
    row_plan_free(&its);
    return any ? bytes : 0;
}

OptimFiles optim_file_bytes(const OptimConfig* config, const OptimTensor* tensors, int count) {
    OptimConfig whole = *config;
    whole.begin = whole.end = 0, whole.keeps_copy = false;
    const OptimBytes bytes = optim_bytes(&whole, tensors, count, OPTIM_FP32);
    OptimFiles files = {0, bytes.weights + bytes.states + bytes.host};
    Plan* plan = plan_ranges(&whole, tensors, count);
    for (int i = 0; i < plan->weights_count; i++) {
        const StreamInfo* first = &find_row(weights_table(), plan->weights[i].format)->stream[0];
        const int64_t elements = plan->weights[i].run.end - plan->weights[i].run.begin;
        const bool direct = optim_model_dtype(first->dtype);
        files.model += elements * (direct ? first->bits / 8 : 4);
        if (direct) files.optimizer -= stream_bytes(*first, elements);
    }
    plan_free(plan);
    return files;
}

OptimBytes optim_bytes(const OptimConfig* config, const OptimTensor* tensors, int count, OptimType compute) {
    Plan* plan = plan_ranges(config, tensors, count);
    OptimBytes bytes = {0, 0, 0, allocated_bytes(tiles_bytes((plan->end - plan->begin) / TILE_ELEMENTS)), 0};
    for (int i = 0; i < plan->weights_count; i++) {
        const FormatRow* weights = find_row(weights_table(), plan->weights[i].format);
        const ArenaRun* run = &plan->weights[i].run;
        bytes.weights += format_bytes(weights, run);
        const bool copies = config->keeps_copy && !serves_directly(weights, compute);
        bytes.compute += copies ? format_bytes(compute_row(compute), run) : 0;
        bytes.tables += format_table_bytes(weights, run);
    }
    for (int i = 0; i < plan->launches; i++) {
        Rows rows = config_rows(&plan->launch[i].config);
        for (int slot = SLOT_M; slot < SLOTS; slot++) {
            const FormatRow* format = slot_format(&plan->launch[i].config, &rows, (Slot)slot);
            const ArenaRun* run = &plan->launch[i].kept[slot];
            bytes.states += format_bytes(format, run, config->offload);
            bytes.host += format_bytes(format, run, config->offload, true);
            bytes.tables += format_table_bytes(format, run);
        }
        bytes.tables += rows_bytes(plan, i, tensors, count);
        if (rows.rule->matrix) bytes.tables += matrix_bytes(plan, i, tensors, count);
    }
    bytes.tables += allocated_bytes(factors_bytes(plan));
    plan_free(plan);
    return bytes;
}
