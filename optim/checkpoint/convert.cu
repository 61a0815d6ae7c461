// Moves weights and moments between an optimizer and host memory: as fp32 values, or from a checkpoint (optim_load),
// which is a second optimizer whose arrays lie in files. A side is what either keeps of one slot of a tensor. Each
// tensor goes through pieces of 2^19 elements, which are whole tiles, so that no block is cut. The tables' functions
// encode and decode on the host's cores, for any device. A shard touches only its parts of the tensors. Formats in
// spans need two passes over a tensor, the first one for its maxima. Cost: the arrays are read and written once; a side
// takes about 10 MB.
#include "../placed.h"

constexpr int64_t PIECE_ELEMENTS = 256 * TILE_ELEMENTS;

struct Side {
    ArrayRef place;
    const FormatRow* format;    // the place's, to nearest; null: nothing is kept
    const OptimTensor* tensor;  // place.kept
    Slot slot;
    int64_t begin, end;         // its elements that lie in the arrays, with padding
    const Device* dev;          // of an optimizer
    const OptimStored* stored;  // of a checkpoint
    const void* array[3];       // null: there is no such array
    // The piece at hand, as values and as stored. Numbers of spans are those of the whole tensor.
    float* values;  // (PIECE_ELEMENTS)
    Streams piece;
    SpanTile tile;
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

// Allocates the piece, and reads the numbers of spans. side_close frees it.
static void side_open(Side* side) {
    const FormatRow* format = side->format;
    const Span span = format_span(format);
    const int64_t ready = ready_numbers(span, side->tensor) * (int64_t)sizeof(float);
    side->values = (float*)memory_zero(PIECE_ELEMENTS, sizeof(float));
    void* table = format->table_bytes > 0 && format->fill ? memory_take((size_t)format->table_bytes) : nullptr;
    if (table) format->fill(table);
    side->piece = {memory_zero(1, (size_t)stream_bytes(format->stream[0], PIECE_ELEMENTS) + 1),
                   memory_zero(1, (size_t)(stream_bytes(format->stream[1], PIECE_ELEMENTS) + ready) + 1), table,
                   memory_zero(1, (size_t)stream_bytes(format->stream[2], PIECE_ELEMENTS) + 1),
                   (float*)memory_zero(span_numbers(span, side->tensor) + 1, sizeof(float))};
}

static void side_close(Side* side) {
    free(side->values), free(side->piece.codes), free(side->piece.scales), free((void*)side->piece.table);
    free(side->piece.third), free(side->piece.new_scales);
}

// Copies bytes of array i, from byte `at` on, to host memory or, if `writes`, from there.
static void array_move(const Side* side, int i, int64_t at, int64_t bytes, void* host, bool writes) {
    if (!side->array[i] || bytes == 0) return;
    char* there = (char*)side->array[i] + at;
    if (side->stored) {
        side->stored->read(side->stored->context, side->array[i], at, bytes, host);
    } else if (writes) {
        copy_to_device(side->dev, there, host, bytes);
    } else {
        copy_to_host(side->dev, host, there, bytes);
    }
}

// Copies n elements from element `start` of the tensor on.
static void piece_move(const Side* side, int64_t start, int64_t n, const Streams* piece, bool writes) {
    for (int i = 0; i < 3; i++) {
        const StreamInfo& info = side->format->stream[i];
        const int64_t at = array_bytes(&side->place, i).begin + stream_bytes(info, start);
        array_move(side, i, at, stream_bytes(info, n), stream_data(piece, i), writes);
    }
}

// Copies the tensor's numbers of spans, if it has any.
static void numbers_move(const Side* side, void* numbers, bool writes) {
    const ArrayBytes own = array_bytes(&side->place, 1);
    if (format_span(side->format) != SPAN_RUN) array_move(side, 1, own.begin, own.bytes, numbers, writes);
}

// Calls function(start, n) for each piece of the tensor that lies in the arrays.
template <class Function>
static void side_pieces(const Side* side, Function function) {
    for (int64_t start = side->begin; start < side->end; start += PIECE_ELEMENTS) {
        function(start, side->end - start < PIECE_ELEMENTS ? side->end - start : PIECE_ELEMENTS);
    }
}

// Calls function(tile) for each tile of a piece of n elements that begins at `start`; each core takes a tile.
template <class Function>
static void piece_tiles(Side* side, int64_t start, int64_t n, Function function) {
    side->tile = span_tile(format_span(side->format), side->tensor, start, 0);
    side->piece.span = &side->tile;
#pragma omp parallel for schedule(static)
    for (int tile = 0; tile < n; tile += TILE_ELEMENTS) function(tile);
}

// Returns a key for rounding to nearest; its stream decides how a zero is stored.
static NoiseKey piece_key(Slot slot) {
    const uint32_t noise[SLOTS] = {NOISE_WEIGHTS, NOISE_M, NOISE_V, NOISE_SLOW, NOISE_SLOW, NOISE_SLOW};
    return {0, 0, noise[slot]};
}

// Encodes the piece's values.
static void piece_encode(Side* side, int64_t start, int64_t n) {
    piece_tiles(side, start, n, [&](int tile) {
        const float* values = side->values + tile;
        if (side->slot == SLOT_WEIGHTS) side->format->set(side->piece, tile, values, TILE_ELEMENTS);
        if (side->slot != SLOT_WEIGHTS)
            side->format->store(side->piece, tile, values, TILE_ELEMENTS, piece_key(side->slot));
    });
}

// Copies the values of a piece out of those of the tensor, which begin at `values`; the padding is zero.
static void piece_values(Side* side, const float* values, int64_t start, int64_t n) {
    int64_t given = side->tensor->rows * side->tensor->cols - start;
    given = given < 0 ? 0 : given < n ? given : n;
    if (given > 0) memcpy(side->values, values, (size_t)given * sizeof(float));
    memset(side->values + given, 0, (size_t)(n - given) * sizeof(float));
}

// Stores the values that fill(start, n) puts into the pieces.
template <class Fill>
static void side_store(Side* side, Fill fill) {
    for (int measure = format_span(side->format) != SPAN_RUN ? 1 : 0; measure >= 0; measure--) {
        side_pieces(side, [&](int64_t start, int64_t n) {
            fill(start, n);
            if (measure) {
                piece_tiles(side, start, n, [&](int tile) {
                    side->format->measure(side->piece, tile, side->values + tile, TILE_ELEMENTS);
                });
                return;
            }
            piece_encode(side, start, n);
            piece_move(side, start, n, &side->piece, true);
        });
    }
    numbers_move(side, side->piece.new_scales, true);
}

// Returns true if v is made of numbers of rows and columns.
static bool by_numbers(const FormatRow* format) {
    return format_span(format) >= SPAN_ROWS && format_span(format) <= SPAN_PAIRS;
}

// Turns stored numbers of rows and columns into those whose products `load` returns as v: r is divided by its
// mean, and c gets the layout of the step. It may overwrite came's second numbers, which no other rule reads.
static void numbers_prepare(Side* side) {
    const OptimTensor* tensor = side->tensor;
    if (!is_by_columns(format_span(side->format))) return;
    float *rows = (float*)side->piece.scales, *to = rows + ready_rows(tensor->rows);
    float* columns = (float*)memory_take((size_t)tensor->cols * sizeof(float));
    memcpy(columns, rows + tensor->rows, (size_t)tensor->cols * sizeof(float));
    for (int64_t j = 0; j < tensor->cols; j++) to[ready_place((uint32_t)j)] = columns[j];
    free(columns);
    double mean = 0.0;
    for (int64_t i = 0; i < tensor->rows; i++) mean += (double)rows[i] / (double)tensor->rows;
    for (int64_t i = 0; i < tensor->rows && mean > 0.0; i++) rows[i] = (float)((double)rows[i] / mean);
}

// Turns a v of elements, which fill(start, n) puts into the pieces, into a v of rows and columns, or only of rows: the
// means over each.
template <class Fill>
static void side_means(Side* side, Fill fill) {
    const int64_t rows = side->tensor->rows, cols = side->tensor->cols;
    double* mean = (double*)memory_zero((size_t)(rows + cols), sizeof(double));
    side_pieces(side, [&](int64_t start, int64_t n) {
        fill(start, n);
        for (int64_t i = start; i < start + n && i < rows * cols; i++) {
            mean[i / cols] += (double)side->values[i - start] / (double)cols;
            mean[rows + i % cols] += (double)side->values[i - start] / (double)rows;
        }
    });
    const int64_t numbers = span_numbers(format_span(side->format), side->tensor);
    for (int64_t i = 0; i < numbers; i++) side->piece.new_scales[i] = (float)mean[i];
    numbers_move(side, side->piece.new_scales, true);
    free(mean);
}

// Stores the values of a tensor.
static void values_store(Side* side, const float* values) {
    if (side->begin >= side->end) return;
    side_open(side);
    auto fill = [&](int64_t start, int64_t n) { piece_values(side, values + start, start, n); };
    by_numbers(side->format) ? side_means(side, fill) : side_store(side, fill);
    side_close(side);
}

// Reads the values of a tensor: of weights, as the model sees them.
static void values_load(Side* side, float* values) {
    const int64_t elements = side->tensor->rows * side->tensor->cols;
    if (side->begin >= side->end) return;
    side_open(side);
    numbers_move(side, side->piece.scales, false);
    if (side->slot != SLOT_WEIGHTS) numbers_prepare(side);
    side_pieces(side, [&](int64_t start, int64_t n) {
        piece_move(side, start, n, &side->piece, false);
        piece_tiles(side, start, n, [&](int tile) {
            float* to = side->values + tile;
            if (side->slot == SLOT_WEIGHTS) side->format->view(side->piece, tile, to, TILE_ELEMENTS);
            if (side->slot != SLOT_WEIGHTS)
                side->format->load(side->piece, tile, to, TILE_ELEMENTS, piece_key(side->slot));
        });
        memcpy(values + start, side->values, (size_t)(elements - start < n ? elements - start : n) * sizeof(float));
    });
    side_close(side);
}

void optim_set_weights(Optim* optim, int index, const float* values) {
    Side side = side_of_optim(optim, index, SLOT_WEIGHTS);
    values_store(&side, values);
}

void optim_get_weights(const Optim* optim, int index, float* values) {
    Side side = side_of_optim(optim, index, SLOT_WEIGHTS);
    values_load(&side, values);
}

bool optim_moment(Optim* optim, int index, Slot slot, float* values, bool writes) {
    Side side = side_of_optim(optim, index, slot);
    const OptimTensor* shape = &optim->tensors[index];
    if (!side.format || side.tensor->rows != shape->rows || side.tensor->cols != shape->cols) return false;
    writes ? values_store(&side, values) : values_load(&side, values);
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

// The changes of format, for notices.
struct Changes {
    struct Change {
        Slot slot;
        const char *from, *to;
        const char *old_rule, *rule;  // of the first tensor that changes so
        int tensors;                  // how many do
    } change[SLOTS * LAUNCHES * LAUNCHES];
    int count;
};

// Counts a change of format.
static void note_change(Changes* changes, const Side* from, const Side* to) {
    const char *old = from->format ? from->place.format->name : nullptr,
               *now = to->format ? to->place.format->name : nullptr;
    int i = 0;
    for (; i < changes->count; i++) {
        const Changes::Change* known = &changes->change[i];
        if (known->slot == to->slot && known->from == old && known->to == now) break;
    }
    if (i == changes->count)
        changes->change[changes->count++] = {to->slot, old, now, from->place.rule, to->place.rule, 0};
    changes->change[i].tensors++;
}

// Reports all changes of formats through `notice`.
static void tell_changes(const Changes* changes, const OptimStored* stored, int tensors) {
    for (int i = 0; i < changes->count; i++) {
        const Changes::Change* change = &changes->change[i];
        const char* slot = slot_name(change->slot);
        char line[512], share[64] = "";
        if (change->tensors < tensors) snprintf(share, sizeof(share), " in %d tensors", change->tensors);
        if (!change->from) {
            snprintf(line, sizeof(line), "%s: not in the checkpoint, whose rule is %s; it starts at zero", slot,
                     change->old_rule);
        } else if (!change->to) {
            snprintf(line, sizeof(line), "%s: left behind; %s keeps none", slot, change->rule);
        } else {
            snprintf(line, sizeof(line), "%s: %s in the checkpoint%s, converted to %s (to nearest); not bit-exact",
                     slot, change->from, share, change->to);
        }
        stored->notice(stored->context, line);
    }
}

// Reads a piece of the checkpoint. `weights` are those of the model file.
static void stored_read(Side* side, const float* weights, int64_t start, int64_t n) {
    if (in_model_file(side->slot, 0, side->format->stream[0])) {
        piece_values(side, weights + start, start, n);
        piece_encode(side, start, n);
    }
    piece_move(side, start, n, &side->piece, false);
}

// Copies or converts a slot of tensor `index`.
static void slot_load(const Optim* optim, const Plan* plan, const OptimStored* stored, int index, Slot slot,
                      Changes* changes) {
    Side from = side_of(plan, index, slot), to = side_of_optim(optim, index, slot);
    if (from.format != to.format) note_change(changes, &from, &to);
    int arrays = 0;
    char ignored[DATA_ERROR_BYTES];
    if (!from.format || !to.format || to.begin >= to.end || !stored_find(&from, plan, stored, &arrays, ignored)) return;
    const size_t elements = (size_t)(to.tensor->rows * to.tensor->cols);
    float* weights = slot == SLOT_WEIGHTS ? (float*)memory_zero(elements, sizeof(float)) : nullptr;
    if (weights) stored->weights(stored->context, index, weights);
    side_open(&from), side_open(&to);
    numbers_move(&from, from.piece.scales, false);
    auto decode = [&](int64_t start, int64_t n) {
        stored_read(&from, weights, start, n);
        piece_tiles(&from, start, n, [&](int tile) {
            from.format->load(from.piece, tile, from.values + tile, TILE_ELEMENTS, piece_key(slot));
        });
        piece_values(&to, from.values, start, n);
    };
    if (from.format == to.format) {
        side_pieces(&to, [&](int64_t start, int64_t n) {
            stored_read(&from, weights, start, n);
            piece_move(&to, start, n, &from.piece, true);
        });
        numbers_move(&to, from.piece.scales, true);
    } else {
        numbers_prepare(&from);
        by_numbers(to.format) ? side_means(&to, decode) : side_store(&to, decode);
    }
    free(weights);
    side_close(&from), side_close(&to);
}

bool optim_load(Optim* optim, const OptimStored* stored, char* error) {
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
    if (ok) optim_decode(optim);
    plan_free(plan);
    free(tensors), free(changes);
    return ok;
}
