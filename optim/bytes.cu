// optim_bytes (optim.h): the bytes of a combination before anything is allocated.
#include "bytes.h"

#include "matrix/matrix.h"
#include "optim.h"

static int64_t format_bytes(const FormatRow* format, const ArenaRun* run, bool offload = false, bool of_host = false) {
    int64_t bytes = 0;
    for (const StreamInfo& stream : format->stream) {
        if (on_host(offload, stream) == of_host) bytes += aligned_bytes(run_bytes(run, stream));
    }
    return bytes;
}

// Bytes that a storage needs beside its arrays: constants and, for spans, the next numbers and the places of its tiles.
static int64_t format_table_bytes(const FormatRow* format, const ArenaRun* run) {
    int64_t bytes = aligned_bytes(format->table_bytes), tiles = (run->end - run->begin) / TILE_ELEMENTS;
    if (format_span(format) == SPAN_RUN) return bytes;
    return bytes + aligned_bytes(next_bytes(run, format_span(format))) +
           aligned_bytes(tiles * (int64_t)sizeof(SpanTile));
}

// Bytes of the buffers of a rule that reads matrices.
static int64_t matrix_bytes(const Device* dev, const Plan* plan, int launch, const OptimTensor* tensors, int count) {
    MatrixPlan its = matrix_plan(dev, plan, launch, tensors, count);
    const int64_t bytes = aligned_bytes(its.matrices * (int64_t)sizeof(Matrix)) + aligned_bytes(its.scratch) +
                          aligned_bytes(its.work) + aligned_bytes(its.sums) + aligned_bytes(sizeof(float)) +
                          2 * aligned_bytes(its.low) + aligned_bytes(its.low_tiles);
    matrix_plan_free(&its);
    return bytes;
}

// Bytes of what the passes of a launch use.
static int64_t rows_bytes(const Plan* plan, int launch, const OptimTensor* tensors, int count) {
    RowPlan its = row_plan(plan, launch, tensors, count);
    const int64_t bytes =
        aligned_bytes(its.tensors * (int64_t)sizeof(SumTensor)) + aligned_bytes(its.parts * (int64_t)sizeof(float));
    row_plan_free(&its);
    return bytes;
}

OptimBytes optim_bytes(const Device* dev, const OptimConfig* config, const OptimTensor* tensors, int count,
                       OptimType compute) {
    Plan* plan = plan_ranges(config, tensors, count);
    OptimBytes bytes = {0, 0, 0, aligned_bytes(tiles_bytes((plan->end - plan->begin) / TILE_ELEMENTS)), 0};
    for (int i = 0; i < plan->weights_count; i++) {
        const FormatRow* weights = find_row(weights_table(), plan->weights[i].format);
        const ArenaRun* run = &plan->weights[i].run;
        bytes.weights += format_bytes(weights, run);
        const bool copies = config->keeps_copy && !serves_directly(weights, compute);
        bytes.compute += copies ? format_bytes(compute_row(compute), run) : 0;
        bytes.tables += format_table_bytes(weights, run);
    }
    for (int i = 0; i < plan->launches; i++) {
        for (int slot = SLOT_M; slot < SLOTS; slot++) {
            const FormatRow* format = slot_format(&plan->launch[i].config, (Slot)slot);
            const ArenaRun* run = &plan->launch[i].kept[slot];
            bytes.states += format_bytes(format, run, config->offload);
            bytes.host += format_bytes(format, run, config->offload, true);
            bytes.tables += format_table_bytes(format, run);
        }
        bytes.tables += rows_bytes(plan, i, tensors, count);
        if (rule_of(&plan->launch[i].config)->matrix) bytes.tables += matrix_bytes(dev, plan, i, tensors, count);
    }
    bytes.tables += aligned_bytes(factors_bytes(plan));
    plan_free(plan);
    return bytes;
}
