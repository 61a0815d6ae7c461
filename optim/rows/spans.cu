// The numbers of storages in spans (formats/spans.cuh): where they lie, in arrays that hold the numbers of one tensor
// after another in the arena's order; and the end of a step that computed new ones.
#include "../each.cuh"
#include "../made.h"

// The rows and columns to which rank-1 scales belong. A matrix of more than 2^31 rows or columns counts as a vector.
struct SpanShape {
    int64_t rows, cols;
    bool columns;
};

static SpanShape span_shape(const OptimTensor* tensor) {
    bool matrix = tensor->rows > 1 && tensor->rows <= 1ll << 31 && tensor->cols <= 1ll << 31;
    if (matrix) return {tensor->rows, tensor->cols, true};
    return {ceil_div(tensor->rows * tensor->cols, SPAN_BLOCK), SPAN_BLOCK, false};
}

Span format_span(const FormatRow* format) {
    return format ? format->stream[1].span : SPAN_RUN;
}

bool measured(const FormatRow* format) {
    return format_span(format) == SPAN_TENSOR || format_span(format) == SPAN_RANK1;
}

bool format_is_operand(const FormatRow* weights) {
    bool alone = true;  // with a master, scales are no powers of two
    for (int i = 1; i < 3; i++) alone = alone && (weights->stream[i].bits == 0 || weights->stream[i].span != SPAN_RUN);
    return alone && strcmp(weights->stream[0].dtype, "F8_E4M3") == 0 && format_span(weights) == SPAN_TENSOR;
}

int64_t span_numbers(Span span, const OptimTensor* tensor) {
    SpanShape shape = span_shape(tensor);
    if (span == SPAN_TENSOR || span == SPAN_GIVEN) return TENSOR_NUMBERS;
    if (span == SPAN_ROWS || span == SPAN_SCALES) return tensor->rows;
    if (span == SPAN_FACTORS) return tensor->rows + tensor->cols;
    if (span == SPAN_PAIRS) return 2 * (tensor->rows + tensor->cols);
    if (span == SPAN_NORM) return 1;
    return span == SPAN_RANK1 ? shape.rows + (shape.columns ? shape.cols : 0) : 0;
}

int64_t ready_numbers(Span span, const OptimTensor* tensor) {
    if (!is_by_columns(span)) return span_numbers(span, tensor);
    return (span == SPAN_PAIRS ? 2 : 1) * ready_pair(tensor->rows, tensor->cols);
}

SpanTile span_tile(Span span, const OptimTensor* tensor, int64_t first, int64_t at) {
    SpanShape shape = span_shape(tensor);
    SpanTile tile = {at, 1, 1, 0, 0, 0, first == 0};
    if (is_by_rows(span)) {
        if (tensor->cols >= 1ll << 31 || tensor->rows >= 1ll << 31) {
            user_error(
                "%s has %lld rows of %lld elements, and rules that read rows take fewer than 2^31 of each; give "
                "it rule=adamw",
                tensor->name, (long long)tensor->rows, (long long)tensor->cols);
        }
        shape = {tensor->rows, tensor->cols, false};
    }
    if (span != SPAN_RANK1 && !is_by_rows(span)) return tile;
    tile.rows = (uint32_t)shape.rows;
    tile.cols = (uint32_t)shape.cols;
    tile.row = (uint32_t)(first / shape.cols);
    tile.col = (uint32_t)(first % shape.cols);
    tile.columns = shape.columns;
    return tile;
}

void spans_create(Optim* optim, const ArenaRun* run, const FormatRow* format, Streams* streams) {
    Span span = format_span(format);
    if (span == SPAN_RUN) return;
    int64_t tiles = (run->end - run->begin) / TILE_ELEMENTS, bytes = tiles * (int64_t)sizeof(SpanTile);
    streams->new_scales = table_memory<float>(optim, next_bytes(run, span));
    SpanTile* host = (SpanTile*)memory_take((size_t)bytes + 1);
    for (int t = 0; t < optim->count && !optim->dev->imagined; t++) {
        const TensorPlan* own = &optim->plan->tensor[t];
        const OptimTensor* tensor = &own->kept[SLOT_WEIGHTS];
        if (!is_in_run(optim->plan, t, run)) continue;
        const int64_t at = is_by_rows(span) ? own->ready : own->at[span] - run->at[span];
        for (int64_t first = 0; first < tensor_padded(tensor); first += TILE_ELEMENTS) {
            host[(tensor->offset + first - run->begin) / TILE_ELEMENTS] = span_tile(span, tensor, first, at);
        }
    }
    streams->span = table_memory(optim, bytes, host);
    free(host);
    if (span < SPAN_SCALES)
        optim->settle[optim->settles++] = {(float*)streams->scales, streams->new_scales, run->numbers[span], run, span};
}

// Replaces the numbers that steps read by those that this one made, and sets the latter to 0, unless grad_scale is NaN
// or infinite.
struct SettleNumbers {
    float *now, *next;
    const float* grad_scale;

    OPTIM_INLINE void at(int64_t i) const {
        if (!is_finite(*grad_scale)) return;
        now[i] = next[i];
        next[i] = 0.0f;
    }
};

void optim_commit_scales(const Optim* optim, int t, const float* grad_scale) {
    for (int i = 0; i < optim->settles; i++) {
        const Settle* all = &optim->settle[i];
        SettleNumbers numbers = {all->now, all->next, grad_scale};
        if (t >= 0 && !is_in_run(optim->plan, t, all->run)) continue;
        const int64_t at = t < 0 ? 0 : optim->plan->tensor[t].at[all->span] - all->run->at[all->span];
        numbers.now += at, numbers.next += at;
        for_each(optim->dev, numbers, t < 0 ? all->count : span_numbers(all->span, &optim->tensors[t]));
    }
}
