// Moves weights and moments between an optimizer and host memory: as fp32 values, or from a checkpoint (optim_load),
// which is a second optimizer whose arrays lie in files. A side is what either keeps of one slot of a tensor, with a
// copy of its arrays in host memory. The tables' functions encode and decode there, a tile on each of the host's cores,
// for any device. A shard touches only its parts of the tensors. Formats in spans need two passes over a tensor, the
// first one for its maxima. Cost: the arrays of one tensor at a time in host memory; they are read and written once.
#include "../made.h"
#include "arrays.h"
#include "checkpoint.h"

// Writes the name of the row with the same arrays that rounds to nearest, and returns it.
static const char* nearest_name(const char* name, char (&nearest)[64]) {
    size_t length = strlen(name), suffix = strlen(":sr");
    const char* end = length > suffix ? name + length - suffix : "";
    bool noisy = strcmp(end, ":sr") == 0 || strcmp(end, ":ef") == 0;
    snprintf(nearest, sizeof(nearest), "%.*s", (int)(noisy ? length - suffix : length), name);
    return nearest;
}

ArrayRef plan_array_ref(const Plan* plan, int tensor, Slot slot) {
    const int launch = plan->tensor[tensor].launch;
    const LaunchPlan* launch_plan = &plan->launch[launch];
    const FormatRow* format = slot_format(launch_plan, slot);
    const bool weights = slot == SLOT_WEIGHTS;
    ArrayRef place = {};
    place.rule = launch_plan->config.rule;
    place.kept = &plan->tensor[tensor].kept[slot];
    place.index = weights ? launch_plan->weights : launch;
    place.run = weights ? &plan->weights[launch_plan->weights].run : &launch_plan->kept[slot];
    if (format->stream[0].bits == 0 && format->stream[1].bits == 0) return place;  // the rule keeps nothing there
    char nearest[64];
    nearest_name(format->name, nearest);
    place.format = format;
    place.nearest = weights ? find_row(weights_table(), nearest) : find_state(nearest);
    if (!place.nearest) place.nearest = format;
    place.at = plan->tensor[tensor].at[format_span(format)] - place.run->at[format_span(format)];
    return place;
}

ArrayBytes array_bytes(const ArrayRef* place, int i) {
    const StreamInfo& info = place->format->stream[i];
    const int64_t number = sizeof(float), tile = stream_bytes(info, TILE_ELEMENTS);
    if (info.span != SPAN_RUN) return {place->at * number, span_numbers(info.span, place->kept) * number};
    return {(place->kept->offset - place->run->begin) / TILE_ELEMENTS * tile,
            tensor_padded(place->kept) / TILE_ELEMENTS * tile};
}

struct Side {
    ArrayRef place;
    const FormatRow* format;    // the place's, to nearest; null: nothing is kept
    const OptimTensor* tensor;  // place.kept
    Slot slot;
    int64_t begin, end;         // its elements that lie in the arrays, with padding
    const Device* dev;          // of an optimizer
    const OptimStored* stored;  // of a checkpoint
    const void* array[3];       // null: there is no such array
    Streams host;  // copies of the arrays, of these elements; numbers of spans are those of the whole tensor
};

static Side side_of(const Plan* plan, int tensor, Slot slot) {
    Side side = {};
    side.place = plan_array_ref(plan, tensor, slot);
    side.format = side.place.nearest;
    side.tensor = side.place.kept, side.slot = slot;
    const KeptPart part = kept_part(plan, tensor, slot);
    side.begin = part.begin, side.end = part.end;
    return side;
}

static Side side_of_optim(const Optim* optim, int tensor, Slot slot) {
    Side side = side_of(optim->plan, tensor, slot);
    side.dev = optim->dev;
    for (int i = 0; i < 3; i++) side.array[i] = optim_array(optim, tensor, slot, i);
    return side;
}

// Allocates the copies of the arrays; side_close frees them.
static void side_open(Side* side) {
    const FormatRow* format = side->format;
    const Span span = format_span(format);
    const int64_t n = side->end - side->begin, ready = ready_numbers(span, side->tensor) * (int64_t)sizeof(float);
    void* table = format->table_bytes > 0 && format->fill ? memory_take((size_t)format->table_bytes) : nullptr;
    if (table) format->fill(table);
    side->host = {memory_zero(1, (size_t)stream_bytes(format->stream[0], n) + 1),
                  memory_zero(1, (size_t)(stream_bytes(format->stream[1], n) + ready) + 1), table,
                  memory_zero(1, (size_t)stream_bytes(format->stream[2], n) + 1),
                  (float*)memory_zero(span_numbers(span, side->tensor) + 1, sizeof(float))};
}

static void side_close(Side* side) {
    free(side->host.codes), free(side->host.scales), free((void*)side->host.table);
    free(side->host.third), free(side->host.new_scales);
}

// Copies a side's arrays to host memory or, if `writes`, from there.
static void side_move(const Side* side, const Streams* host, bool writes) {
    for (int i = 0; i < 3; i++) {
        const StreamInfo& info = side->format->stream[i];
        const ArrayBytes own = array_bytes(&side->place, i);
        const bool run = info.span == SPAN_RUN;
        const int64_t at = own.begin + (run ? stream_bytes(info, side->begin) : 0),
                      bytes = run ? stream_bytes(info, side->end - side->begin) : own.bytes;
        if (!side->array[i] || bytes == 0) continue;
        if (side->stored) {
            side->stored->read(side->stored->context, side->array[i], at, bytes, stream_data(host, i));
        } else if (writes) {
            copy_to_device(side->dev, (char*)side->array[i] + at, stream_data(host, i), bytes);
        } else {
            copy_to_host(side->dev, stream_data(host, i), (const char*)side->array[i] + at, bytes);
        }
    }
}

// Calls function(streams, values, count) for each tile, on all cores: where it lies, and `count` values of the tensor.
template <class Values, class Function>
static void side_tiles(const Side* side, Values* values, Function function) {
    const int64_t elements = side->tensor->rows * side->tensor->cols;
#pragma omp parallel for schedule(static)
    for (int64_t first = side->begin; first < side->end; first += TILE_ELEMENTS) {
        const SpanTile place = span_tile(format_span(side->format), side->tensor, first, 0);
        Streams tile = row_tile(side->format, side->host, (first - side->begin) / TILE_ELEMENTS);
        tile.span = &place;
        const int64_t left = elements - first;
        function(tile, values + first, (size_t)(left < 0 ? 0 : left < TILE_ELEMENTS ? left : TILE_ELEMENTS));
    }
}

// Returns a key for rounding to nearest; its stream decides how a zero is stored.
static NoiseKey side_key(const Side* side) {
    const uint32_t noise[SLOTS] = {NOISE_WEIGHTS, NOISE_M, NOISE_V, NOISE_SLOW, NOISE_SLOW, NOISE_SLOW};
    return {0, 0, noise[side->slot]};
}

// The new numbers of spans replace the old ones.
static void numbers_replace(Side* side) {
    if (format_span(side->format) == SPAN_RUN) return;
    const int64_t bytes = span_numbers(format_span(side->format), side->tensor) * (int64_t)sizeof(float);
    memcpy(side->host.scales, side->host.new_scales, (size_t)bytes);
}

// Encodes the values of a tensor.
static void side_encode(Side* side, const float* values) {
    for (int measure = format_span(side->format) != SPAN_RUN ? 1 : 0; measure >= 0; measure--) {
        side_tiles(side, values, [&](const Streams& tile, const float* from, size_t count) {
            float x[TILE_ELEMENTS] = {};
            if (count > 0) memcpy(x, from, count * sizeof(float));
            if (measure) return side->format->measure(tile, 0, x, TILE_ELEMENTS);
            if (side->slot == SLOT_WEIGHTS) return side->format->set(tile, 0, x, TILE_ELEMENTS);
            side->format->store(tile, 0, x, TILE_ELEMENTS, side_key(side));
        });
    }
    numbers_replace(side);
}

// Decodes the values of a tensor; with `view` those that the model sees.
static void side_decode(const Side* side, float* values, bool view) {
    side_tiles(side, values, [&](const Streams& tile, float* to, size_t count) {
        float x[TILE_ELEMENTS];
        if (view) side->format->view(tile, 0, x, TILE_ELEMENTS);
        if (!view) side->format->load(tile, 0, x, TILE_ELEMENTS, side_key(side));
        if (count > 0) memcpy(to, x, count * sizeof(float));
    });
}

// Returns true if v is made of numbers of rows and columns.
static bool by_numbers(const FormatRow* format) {
    return is_by_rows(format_span(format));
}

// Turns stored numbers of rows and columns into those whose products `load` returns as v: r is divided by its
// mean, and c gets the layout of the step. It may overwrite came's second numbers, which no other rule reads.
static void numbers_prepare(const Side* side) {
    const OptimTensor* tensor = side->tensor;
    if (!is_by_columns(format_span(side->format))) return;
    float *rows = (float*)side->host.scales, *to = rows + ready_rows(tensor->rows);
    float* columns = (float*)memory_take((size_t)tensor->cols * sizeof(float));
    memcpy(columns, rows + tensor->rows, (size_t)tensor->cols * sizeof(float));
    for (int64_t j = 0; j < tensor->cols; j++) to[ready_place((uint32_t)j)] = columns[j];
    free(columns);
    double mean = 0.0;
    for (int64_t i = 0; i < tensor->rows; i++) mean += (double)rows[i] / (double)tensor->rows;
    for (int64_t i = 0; i < tensor->rows && mean > 0.0; i++) rows[i] = (float)((double)rows[i] / mean);
}

// Turns a v of elements into a v of rows and columns, or only of rows: the means over each. came's second numbers begin
// at zero.
static void side_means(Side* side, const float* values) {
    const int64_t rows = side->tensor->rows, cols = side->tensor->cols;
    const int64_t numbers = span_numbers(format_span(side->format), side->tensor);
    double* mean = (double*)memory_zero((size_t)(rows + cols + numbers), sizeof(double));
    for (int64_t i = side->begin; i < side->end && i < rows * cols; i++) {
        mean[i / cols] += (double)values[i] / (double)cols;
        mean[rows + i % cols] += (double)values[i] / (double)rows;
    }
    for (int64_t i = 0; i < numbers; i++) side->host.new_scales[i] = (float)mean[i];
    numbers_replace(side);
    free(mean);
}

// Stores the values of a tensor.
static void side_store(Side* side, const float* values) {
    if (format_span(side->format) == SPAN_GIVEN) side_move(side, &side->host, false);  // for the scale, which stays
    by_numbers(side->format) ? side_means(side, values) : side_encode(side, values);
    side_move(side, &side->host, true);
}

// Reads or, if `writes`, stores the values of a tensor: of weights, as the model sees them.
static void side_values(Side side, float* values, bool writes) {
    const bool weights = side.slot == SLOT_WEIGHTS;
    if (side.begin >= side.end) return;
    side_open(&side);
    if (writes) {
        side_store(&side, values);
    } else {
        side_move(&side, &side.host, false);
        if (!weights) numbers_prepare(&side);
        side_decode(&side, values, weights);
    }
    side_close(&side);
}

void optim_set_weights(Optim* optim, int index, const float* values) {
    side_values(side_of_optim(optim, index, SLOT_WEIGHTS), (float*)values, true);
}

void optim_get_weights(const Optim* optim, int index, float* values) {
    side_values(side_of_optim(optim, index, SLOT_WEIGHTS), values, false);
}

bool optim_moment(Optim* optim, int index, Slot slot, float* values, bool writes) {
    const Side side = side_of_optim(optim, index, slot);
    const OptimTensor* shape = &optim->tensors[index];
    if (!side.format || side.tensor->rows != shape->rows || side.tensor->cols != shape->cols) return false;
    side_values(side, values, writes);
    return true;
}

// Checkpoints.

// Returns true if the model file holds this array of the weights.
static bool in_model_file(Slot slot, int index, const StreamInfo& info) {
    return slot == SLOT_WEIGHTS && index == 0 && optim_model_dtype(info.dtype);
}

// Finds a side's arrays in the checkpoint's file, and counts those that begin with this tensor. Returns false with a
// sentence if one is missing.
static bool stored_find(Side* side, const Plan* plan, const OptimStored* stored, int* arrays, char* error) {
    side->stored = stored;
    for (int i = 0; i < 3; i++) {
        const StreamInfo& info = side->format->stream[i];
        const int64_t bytes = run_bytes(side->place.run, info);
        char name[256];
        if (info.bits == 0 || in_model_file(side->slot, i, info)) continue;
        stream_name(plan, side->place.index, side->slot, info, name, sizeof(name));
        side->array[i] = stored->array(stored->context, name, info.dtype, bytes);
        *arrays += side->place.run->begin == side->tensor->offset;
        if (side->array[i]) continue;
        return data_error(error, "it holds no array %s of %s with %lld bytes, which %s needs", name, info.dtype,
                          (long long)bytes, side->place.format->name);
    }
    return true;
}

// Returns true if v is an average of squared gradients: of elements, or by rows and columns.
static bool averages_gradients(const char* name) {
    const RuleRow* rule = find_row(rule_table(), name);
    const RowRule rows = rule->rows;
    return rule->keeps_v || rows == ROWS_ADAM_MINI || rows >= ROWS_ADAFACTOR;
}

// Refuses moments that the checkpoint lacks, that mean something else there, or that have another shape: those of a
// gradient that is projected to another rank, or not at all. came's confidence has no counterpart in other rules.
static bool slot_fits(const Side* from, const Side* to, const char* tensor, char* error) {
    const char *rule = to->place.rule, *before = from->place.rule;
    const bool v = to->slot == SLOT_V && to->format, other = from->format != to->format;
    if (v && !from->format) {
        return data_error(
            error,
            "--rule: \"%s\" was found and the checkpoint's %s keeps no second moment to go on with; leave "
            "--rule, --preset and --override out, or begin anew from its weights with --model",
            rule, before);
    }
    const bool numbers = v && other && (by_numbers(from->format) || by_numbers(to->format));
    const bool pairs = to->format && format_span(to->format) == SPAN_PAIRS;
    if (numbers && (pairs || !averages_gradients(before) || !averages_gradients(rule))) {
        return data_error(error,
                          "--rule: \"%s\" was found, whose v %s, and the checkpoint's %s keeps none of this kind; "
                          "leave --rule, --preset and --override out, or begin anew from its weights with --model",
                          rule, by_numbers(to->format) ? "is by rows" : "is of elements", before);
    }
    const bool reshaped = from->tensor->rows != to->tensor->rows || from->tensor->cols != to->tensor->cols;
    const bool starts = to->slot == SLOT_BASIS && !from->format && to->format;
    if (to->slot == SLOT_WEIGHTS || !((reshaped && from->format && to->format) || starts)) return true;
    return data_error(error,
                      "--rule: \"%s\" keeps %s of %s in another shape than the checkpoint's %s does; leave --rule, "
                      "--preset, --rank and --override as they were, or begin anew from its weights with --model",
                      rule, slot_name(to->slot), tensor, before);
}

// The notices of a load, one for each change of format, and in how many tensors it was made.
struct Changes {
    struct Change {
        Slot slot;
        const FormatRow *from, *to;  // null: nothing was or is kept
        const char* rule;  // of the first tensor that changes so: the checkpoint's, or this run's without `to`
        int tensors;
    } change[SLOTS * LAUNCHES * LAUNCHES];
    int count;
};

// Counts a change of format.
static void note_change(Changes* changes, const Side* from, const Side* to) {
    const FormatRow *old = from->format ? from->place.format : nullptr, *now = to->format ? to->place.format : nullptr;
    Changes::Change* change = changes->change;
    const Changes::Change* end = change + changes->count;
    while (change < end && (change->slot != to->slot || change->from != old || change->to != now)) change++;
    if (change == end) {
        *change = {to->slot, old, now, now ? from->place.rule : to->place.rule, 0};
        changes->count++;
    }
    change->tensors++;
}

// Adds all changes of formats to `notices`.
static void tell_changes(const Changes* changes, OptimStored* stored, int tensors) {
    for (int i = 0; i < changes->count; i++) {
        const Changes::Change* change = &changes->change[i];
        const char *slot = slot_name(change->slot), *rule = change->rule, *line;
        if (!change->from) {
            line = text_kept("%s: not in the checkpoint, whose rule is %s; it starts at zero", slot, rule);
        } else if (!change->to) {
            line = text_kept("%s: left behind; %s keeps none", slot, rule);
        } else {
            const char* share = change->tensors < tensors ? text_kept(" in %d tensors", change->tensors) : "";
            line = text_kept("%s: %s in the checkpoint%s, converted to %s (to nearest); not bit-exact", slot,
                             change->from->name, share, change->to->name);
        }
        text_add(&stored->notices, " notice   %s\n", line);
    }
}

// Copies or converts a slot of tensor `index`.
static void slot_load(const Optim* optim, const Plan* plan, const OptimStored* stored, int index, Slot slot,
                      Changes* changes) {
    Side from = side_of(plan, index, slot), to = side_of_optim(optim, index, slot);
    if (from.format != to.format) note_change(changes, &from, &to);
    int arrays = 0;
    char ignored[DATA_ERROR_BYTES];
    if (!from.format || !to.format || to.begin >= to.end || !stored_find(&from, plan, stored, &arrays, ignored)) return;
    float* values = (float*)memory_zero((size_t)(to.tensor->rows * to.tensor->cols), sizeof(float));
    from.begin = to.begin, from.end = to.end;
    side_open(&from);
    if (slot == SLOT_WEIGHTS) stored->weights(stored->context, index, values);
    if (in_model_file(slot, 0, from.format->stream[0])) side_encode(&from, values);
    side_move(&from, &from.host, false);
    if (from.format == to.format) {
        side_move(&to, &from.host, true);
    } else {
        side_open(&to);
        numbers_prepare(&from);
        side_decode(&from, values, false);
        side_store(&to, values);
        side_close(&to);
    }
    free(values);
    side_close(&from);
}

bool optim_load(Optim* optim, OptimStored* stored, char* error) {
    const int slots = SLOTS * optim->count;
    OptimConfig config = stored->config;
    Changes* changes = (Changes*)memory_zero(1, sizeof(Changes));
    OptimTensor* tensors = (OptimTensor*)memory_take((size_t)optim->count * sizeof(OptimTensor) + 1);
    memcpy(tensors, optim->tensors, (size_t)optim->count * sizeof(OptimTensor));
    config.runs = nullptr;
    optim_layout(tensors, optim->count, &config);
    Plan* plan = plan_ranges(&config, tensors, optim->count);
    int arrays = 0;
    bool ok = true;
    for (int i = 0; i < slots && ok; i++) {
        const int t = i % optim->count;
        Side from = side_of(plan, t, (Slot)(i / optim->count));
        const Side to = side_of(optim->plan, t, (Slot)(i / optim->count));
        ok = slot_fits(&from, &to, optim->tensors[t].name, error) &&
             (!from.format || stored_find(&from, plan, stored, &arrays, error));
    }
    if (ok && arrays != stored->arrays) {
        ok = data_error(error, "it holds %d arrays and its formats (weights %s, m %s, v %s) make %d", stored->arrays,
                        config.weights, config.m, config.v, arrays);
    }
    for (int i = 0; i < slots && ok; i++)
        slot_load(optim, plan, stored, i % optim->count, (Slot)(i / optim->count), changes);
    if (ok) tell_changes(changes, stored, optim->count);
    plan_free(plan);
    free(tensors), free(changes);
    return ok;
}
