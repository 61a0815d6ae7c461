// Moves weights and moments between an optimizer and host memory: as fp32 values, or from a checkpoint's arrays in the
// same or other formats (optim_load). Each tensor goes through pieces of 2^19 elements, which are whole tiles, so that
// no block is cut. The tables' functions encode and decode on the host's cores, for any device. A shard touches only
// its parts of the tensors. Formats in spans need two passes over a tensor, the first one for its maxima. Cost: the
// arrays are read and written once; a piece takes about 10 MB.
#include "plan.h"

constexpr int64_t PIECE_ELEMENTS = 256 * TILE_ELEMENTS;

struct Piece {
    float* values;    // (PIECE_ELEMENTS)
    Streams streams;  // the piece as stored; numbers of spans are those of the whole tensor
    Span span;
    int64_t number_bytes;
    SpanTile place;
};

// Allocates a piece for a tensor in a format; piece_free frees it.
static Piece piece_create(const FormatRow* format, const OptimTensor* tensor) {
    Span span = format_span(format);
    const int64_t number = (int64_t)sizeof(float), numbers = span_numbers(span, tensor) * number;
    const int64_t ready = ready_numbers(span, tensor) * number;
    Piece piece = {(float*)memory_zero(PIECE_ELEMENTS, sizeof(float)),
                   {memory_zero(1, (size_t)stream_bytes(format->stream[0], PIECE_ELEMENTS) + 1),
                    memory_zero(1, (size_t)(stream_bytes(format->stream[1], PIECE_ELEMENTS) + ready) + 1), nullptr,
                    memory_zero(1, (size_t)stream_bytes(format->stream[2], PIECE_ELEMENTS) + 1),
                    (float*)memory_zero(1, (size_t)numbers + 1)},
                   span,
                   numbers,
                   {}};
    if (format->table_bytes > 0 && format->fill) {
        void* table = memory_take((size_t)format->table_bytes);
        format->fill(table);
        piece.streams.table = table;
    }
    return piece;
}

static void piece_free(Piece* piece) {
    free(piece->values), free(piece->streams.codes), free(piece->streams.extra);
    free(piece->streams.more), free(piece->streams.next), free((void*)piece->streams.table);
}

// Moves the piece to element `start` of the tensor.
static void piece_at(Piece* piece, const OptimTensor* tensor, int64_t start) {
    piece->place = span_tile(piece->span, tensor, start, 0);
    piece->streams.span = &piece->place;
}

// Calls function(tile) for each tile of a piece of n elements; each core takes a tile.
template <class Function>
static void piece_tiles(int64_t n, Function function) {
#pragma omp parallel for schedule(static)
    for (int tile = 0; tile < n; tile += TILE_ELEMENTS) function(tile);
}

// Returns a key for rounding to nearest; its stream decides how a zero is stored.
static NoiseKey piece_key(Slot slot) {
    const uint32_t noise[SLOTS] = {NOISE_WEIGHTS, NOISE_M, NOISE_V, NOISE_SLOW, NOISE_SLOW, NOISE_SLOW};
    return {0, 0, noise[slot]};
}

// Encodes the piece's values. `format` rounds to nearest.
static void piece_encode(const FormatRow* format, const Piece* piece, int64_t n, Slot slot) {
    piece_tiles(n, [&](int tile) {
        const float* values = piece->values + tile;
        if (slot == SLOT_WEIGHTS) format->set(piece->streams, tile, values, TILE_ELEMENTS);
        if (slot != SLOT_WEIGHTS) format->store(piece->streams, tile, values, TILE_ELEMENTS, piece_key(slot));
    });
}

// Copies `given` values of a tensor into the piece of n elements, and sets the rest to zero.
static void piece_values(Piece* piece, const float* values, int64_t given, int64_t n) {
    given = given < 0 ? 0 : given < n ? given : n;
    if (given > 0) memcpy(piece->values, values, (size_t)given * sizeof(float));
    memset(piece->values + given, 0, (size_t)(n - given) * sizeof(float));
}

// A slot of a tensor in the arrays of an optimizer.
struct Kept {
    const Optim* optim;
    const Device* dev;
    const OptimTensor* tensor;  // the shape in which the slot keeps it
    ArrayRef place;
    int64_t elements;    // of the tensor, without padding
    int64_t begin, end;  // those that lie in the arrays, with padding
};

static Kept kept_of(const Optim* optim, int index, Slot slot) {
    const OptimParts parts = optim_parts(optim);
    const OptimTensor* tensor = &parts.plan->kept[index][slot];
    const ArrayRef place = plan_array_ref(parts.plan, index, slot);
    const int64_t padded = tensor_padded(tensor), first = place.run->begin - tensor->offset,
                  end = place.run->end - tensor->offset;
    return {optim,
            parts.dev,
            tensor,
            place,
            tensor->rows * tensor->cols,
            first < 0 ? 0 : first,
            end < padded ? end : padded};
}

OptimStream array_ref_stream(const Optim* optim, const ArrayRef* place, const StreamInfo& info) {
    char name[256];
    stream_name(place->array, info, name, sizeof(name));
    return info.bits > 0 ? optim_stream_named(optim, name) : OptimStream{};
}

// Returns the address of element `start` of the tensor in array i, or of its numbers of spans; null if there is no such
// array.
static char* kept_at(const Kept* kept, int i, int64_t start) {
    const StreamInfo& info = kept->place.format->stream[i];
    char* array = (char*)array_ref_stream(kept->optim, &kept->place, info).data;
    if (!array) return nullptr;
    if (info.span != SPAN_RUN) return array + kept->place.at * (int64_t)sizeof(float);
    return array + stream_bytes(info, kept->tensor->offset + start - kept->place.run->begin);
}

// Calls function(start, n) for each piece of the tensor that lies in the arrays.
template <class Function>
static void kept_pieces(const Kept* kept, Function function) {
    for (int64_t start = kept->begin; start < kept->end; start += PIECE_ELEMENTS) {
        function(start, kept->end - start < PIECE_ELEMENTS ? kept->end - start : PIECE_ELEMENTS);
    }
}

// Writes a stored piece to the arrays, from element `start` of the tensor on.
static void kept_write(const Kept* kept, int64_t start, int64_t n, const Piece* piece) {
    for (int i = 0; i < 3; i++) {
        char* array = kept_at(kept, i, start);
        if (!array) continue;
        copy_to_device(kept->dev, array, stream_data(&piece->streams, i),
                       stream_bytes(kept->place.format->stream[i], n));
    }
}

// Writes the tensor's numbers of spans, if it has any.
static void kept_write_numbers(const Kept* kept, const Piece* piece, const void* numbers) {
    if (piece->span) copy_to_device(kept->dev, kept_at(kept, 1, 0), numbers, piece->number_bytes);
}

// Stores the values that fill(start, n, piece) puts into pieces, rounded to nearest.
template <class Fill>
static void kept_encode(const Kept* kept, Slot slot, Fill fill) {
    const FormatRow* format = kept->place.nearest;
    Piece piece = piece_create(format, kept->tensor);
    for (int measure = piece.span ? 1 : 0; measure >= 0; measure--) {
        kept_pieces(kept, [&](int64_t start, int64_t n) {
            fill(start, n, &piece);
            piece_at(&piece, kept->tensor, start);
            if (measure) {
                piece_tiles(
                    n, [&](int tile) { format->measure(piece.streams, tile, piece.values + tile, TILE_ELEMENTS); });
                return;
            }
            piece_encode(format, &piece, n, slot);
            kept_write(kept, start, n, &piece);
        });
    }
    kept_write_numbers(kept, &piece, piece.streams.next);
    piece_free(&piece);
}

void optim_set_weights(Optim* optim, int index, const float* values) {
    const Kept kept = kept_of(optim, index, SLOT_WEIGHTS);
    if (kept.begin >= kept.end) return;
    kept_encode(&kept, SLOT_WEIGHTS, [&](int64_t start, int64_t n, Piece* piece) {
        piece_values(piece, values + start, kept.elements - start, n);
    });
}

bool optim_set_part(Optim* optim, int index, int64_t start, int64_t n, const float* values) {
    const Kept kept = kept_of(optim, index, SLOT_WEIGHTS);
    const FormatRow* format = kept.place.format;
    if (format_span(format) != SPAN_RUN) return false;
    const int64_t padded = start + ceil_div(n, TILE_ELEMENTS) * TILE_ELEMENTS;
    const int64_t begin = start > kept.begin ? start : kept.begin, end = padded < kept.end ? padded : kept.end;
    if (begin >= end) return true;
    const int64_t tiles = (end - begin) / TILE_ELEMENTS;
    const Streams to = {kept_at(&kept, 0, begin), kept_at(&kept, 1, begin), nullptr, kept_at(&kept, 2, begin)};
    values += begin - start, n -= begin - start;
    if (kept.dev->gpu) {
        void* arguments[] = {(void*)&to, (void*)&values, (void*)&n};
        dim3 grid((unsigned)tiles), block(TILE_ELEMENTS / DECODE_ELEMENTS);
        check(cudaLaunchKernel(format->set_tiles, grid, block, arguments, 0, kept.dev->stream));
        return true;
    }
#pragma omp parallel for schedule(static)
    for (int64_t tile = 0; tile < tiles; tile++) {
        float x[TILE_ELEMENTS] = {};
        const int64_t first = tile * TILE_ELEMENTS, given = n - first < TILE_ELEMENTS ? n - first : TILE_ELEMENTS;
        if (given > 0) memcpy(x, values + first, (size_t)given * sizeof(float));
        format->set(row_tile(format, to, tile), 0, x, TILE_ELEMENTS);
    }
    return true;
}

void optim_get_weights(const Optim* optim, int index, float* values) {
    const Kept kept = kept_of(optim, index, SLOT_WEIGHTS);
    const FormatRow* format = kept.place.format;
    if (kept.begin >= kept.end) return;
    Piece piece = piece_create(format, kept.tensor);
    if (piece.span) copy_to_host(kept.dev, piece.streams.extra, kept_at(&kept, 1, 0), piece.number_bytes);
    kept_pieces(&kept, [&](int64_t start, int64_t n) {
        piece_at(&piece, kept.tensor, start);
        for (int i = 0; i < 3; i++) {
            copy_to_host(kept.dev, stream_data(&piece.streams, i), kept_at(&kept, i, start),
                         stream_bytes(format->stream[i], n));
        }
        piece_tiles(n, [&](int tile) { format->view(piece.streams, tile, piece.values + tile, TILE_ELEMENTS); });
        const int64_t wanted = kept.elements - start < n ? kept.elements - start : n;
        memcpy(values + start, piece.values, (size_t)wanted * sizeof(float));
    });
    piece_free(&piece);
}

// Checkpoints.

constexpr int CHANGES = SLOTS * LAUNCHES * LAUNCHES;  // at most

// A change of format, for a notice.

struct Change {
    Slot slot;
    const char *from, *to;
    const char *old_rule, *rule;  // of the first tensor that changes so
    int tensors;                  // how many do
};

struct Conversion {
    Optim* optim;
    const OptimStored* stored;
    OptimParts to;
    OptimConfig from;      // the checkpoint's, of the whole arena
    OptimTensor* tensors;  // (to.count) with the offsets that they had in the checkpoint's arena
    Plan* from_plan;
    Change change[CHANGES];
    int changes;
};

// Returns true if the model file holds this array of the weights.
static bool in_model_file(Slot slot, int index, const StreamInfo& info) {
    return slot == SLOT_WEIGHTS && index == 0 && optim_model_dtype(info.dtype);
}

// Returns the checkpoint's array for a stream of a place; null if there is none.
static const void* stored_array(const Conversion* c, const ArrayRef* place, const StreamInfo& info) {
    char name[256];
    stream_name(place->array, info, name, sizeof(name));
    return c->stored->array(c->stored->context, name, info.dtype, run_bytes(place->run, info));
}

// Checks that the checkpoint holds all arrays that its formats need, and no others. Otherwise writes a sentence.
static bool arrays_complete(const Conversion* c, char* error) {
    int arrays = 0;
    for (int slot = 0; slot < SLOTS; slot++) {
        for (int t = 0; t < c->to.count; t++) {
            ArrayRef place = plan_array_ref(c->from_plan, t, (Slot)slot);
            // An array is checked once, at its first tensor.
            if (!place.format || place.run->begin != c->from_plan->kept[t][slot].offset) continue;
            for (int i = 0; i < 3; i++) {
                const StreamInfo& info = place.format->stream[i];
                if (info.bits == 0 || in_model_file((Slot)slot, i, info)) continue;
                arrays++;
                if (stored_array(c, &place, info)) continue;
                char name[256];
                stream_name(place.array, info, name, sizeof(name));
                return data_error(error, "it holds no array %s of %s with %lld bytes, which %s needs", name, info.dtype,
                                  (long long)run_bytes(place.run, info), place.format->name);
            }
        }
    }
    if (arrays == c->stored->arrays) return true;
    return data_error(error, "it holds %d arrays and its formats (weights %s, m %s, v %s) make %d", c->stored->arrays,
                      c->stored->config.weights, c->stored->config.m, c->stored->config.v, arrays);
}

// A slot of a tensor in the checkpoint and in the optimizer.
struct Pair {
    Slot slot;
    int tensor;
    ArrayRef from, to;
};

// Returns true if `fits` accepts each slot of each tensor.
static bool all_fit(const Conversion* c, bool (*fits)(const Conversion*, const Pair*, char*), char* error) {
    for (int slot = 0; slot < SLOTS; slot++) {
        for (int t = 0; t < c->to.count; t++) {
            const Pair its = {(Slot)slot, t, plan_array_ref(c->from_plan, t, (Slot)slot),
                              plan_array_ref(c->to.plan, t, (Slot)slot)};
            if (!fits(c, &its, error)) return false;
        }
    }
    return true;
}

// Refuses a rule that needs a v where the checkpoint has none.
static bool rule_fits(const Conversion*, const Pair* its, char* error) {
    if (its->slot != SLOT_V || !its->to.format || its->from.format) return true;
    return data_error(
        error,
        "--rule: \"%s\" was found and the checkpoint's %s keeps no second moment to go on with; leave --rule, "
        "--preset and --override out, or begin anew from its weights with --model",
        its->to.rule, its->from.rule);
}

// Returns true if v is an average of squared gradients: of elements, or by rows and columns.
static bool averages_gradients(const char* name) {
    const RuleRow* rule = find_row(rule_table(), name);
    const RowRule rows = rule->rows;
    return rule->keeps_v || rows == ROWS_ADAM_MINI || rows == ROWS_ADAFACTOR || rows == ROWS_CAME;
}

// Returns true if v is made of numbers of rows and columns.
static bool by_numbers(const FormatRow* format) {
    return format_span(format) >= SPAN_ROWS && format_span(format) <= SPAN_PAIRS;
}

// Refuses a v that means something else than the checkpoint's. came's confidence has no counterpart in other rules.
static bool rows_convert(const Conversion*, const Pair* its, char* error) {
    const ArrayRef *from = &its->from, *to = &its->to;
    if (its->slot != SLOT_V || !to->format || from->format == to->format) return true;
    if (!by_numbers(from->format) && !by_numbers(to->format)) return true;
    const bool came = find_row(rule_table(), to->rule)->rows == ROWS_CAME;
    if (!came && averages_gradients(from->rule) && averages_gradients(to->rule)) return true;
    return data_error(error,
                      "--rule: \"%s\" was found, whose v %s, and the checkpoint's %s keeps none of this kind; "
                      "leave --rule, --preset and --override out, or begin anew from its weights with --model",
                      to->rule, by_numbers(to->format) ? "is by rows" : "is of elements", from->rule);
}

// Refuses moments of another shape: those of a gradient that is projected to another rank, or not at all.
static bool shapes_convert(const Conversion* c, const Pair* its, char* error) {
    const int t = its->tensor;
    const bool had = its->from.format, has = its->to.format;
    const OptimTensor *before = &c->from_plan->kept[t][its->slot], *now = &c->to.plan->kept[t][its->slot];
    const bool other = before->rows != now->rows || before->cols != now->cols;
    const bool starts = its->slot == SLOT_BASIS && !had && has;
    if (its->slot == SLOT_WEIGHTS || !((other && had && has) || starts)) return true;
    return data_error(error,
                      "--rule: \"%s\" keeps %s of %s in another shape than the checkpoint's %s does; leave --rule, "
                      "--preset, --rank and --override as they were, or begin anew from its weights with --model",
                      its->to.rule, slot_name(its->slot), c->to.tensors[t].name, its->from.rule);
}

// Counts a change of format.
static void note_change(Conversion* c, Slot slot, const ArrayRef* from, const ArrayRef* to) {
    const char *old = from->format ? from->format->name : nullptr, *now = to->format ? to->format->name : nullptr;
    for (int i = 0; i < c->changes; i++) {
        Change* known = &c->change[i];
        if (known->slot != slot || known->from != old || known->to != now) continue;
        known->tensors++;
        return;
    }
    if (c->changes < CHANGES) c->change[c->changes++] = {slot, old, now, from->rule, to->rule, 1};
}

// Reads a piece of the checkpoint, from element `start` of a tensor on. `values` are the model file's weights.
static void piece_read(const Conversion* c, const ArrayRef* from, Slot slot, int tensor, const float* values,
                       int64_t start, int64_t n, Piece* piece) {
    const OptimTensor* kept = &c->from_plan->kept[tensor][slot];
    int64_t elements = kept->rows * kept->cols;
    piece_at(piece, kept, start);
    if (in_model_file(slot, 0, from->format->stream[0])) {
        piece_values(piece, values + start, elements - start, n);
        piece_encode(from->format, piece, n, slot);
    }
    for (int i = 0; i < 3; i++) {
        const StreamInfo& info = from->format->stream[i];
        if (info.bits == 0 || in_model_file(slot, i, info)) continue;
        int64_t at = stream_bytes(info, kept->offset + start - from->run->begin);
        c->stored->read(c->stored->context, stored_array(c, from, info), at, stream_bytes(info, n),
                        stream_data(&piece->streams, i));
    }
}

// Reads a tensor's numbers of spans.
static void numbers_read(const Conversion* c, const ArrayRef* from, Piece* piece) {
    if (!piece->span) return;
    c->stored->read(c->stored->context, stored_array(c, from, from->format->stream[1]),
                    from->at * (int64_t)sizeof(float), piece->number_bytes, piece->streams.extra);
}

// Turns a checkpoint's numbers of rows and columns into those whose products `load` returns as v: r is divided by its
// mean, and c gets the layout of the step. It may overwrite came's second numbers, which no other rule reads.
static void numbers_prepare(const ArrayRef* from, const OptimTensor* tensor, Piece* piece) {
    if (!is_by_columns(format_span(from->format))) return;
    float *rows = (float*)piece->streams.extra, *to = rows + ready_rows(tensor->rows);
    float* columns = (float*)memory_take((size_t)tensor->cols * sizeof(float));
    memcpy(columns, rows + tensor->rows, (size_t)tensor->cols * sizeof(float));
    for (int64_t j = 0; j < tensor->cols; j++) to[ready_place((uint32_t)j)] = columns[j];
    free(columns);
    double mean = 0.0;
    for (int64_t i = 0; i < tensor->rows; i++) mean += (double)rows[i] / (double)tensor->rows;
    for (int64_t i = 0; i < tensor->rows && mean > 0.0; i++) rows[i] = (float)((double)rows[i] / mean);
}

// Turns a v of elements, which fill(start, n, piece) puts into pieces, into a v of rows and columns, or only of rows:
// the means over each.
template <class Fill>
static void kept_means(const Kept* kept, Fill fill) {
    const int64_t rows = kept->tensor->rows, cols = kept->tensor->cols;
    Piece piece = piece_create(kept->place.nearest, kept->tensor);
    double* mean = (double*)memory_zero((size_t)(rows + cols), sizeof(double));
    kept_pieces(kept, [&](int64_t start, int64_t n) {
        fill(start, n, &piece);
        for (int64_t i = start; i < start + n && i < kept->elements; i++) {
            mean[i / cols] += (double)piece.values[i - start] / (double)cols;
            mean[rows + i % cols] += (double)piece.values[i - start] / (double)rows;
        }
    });
    for (int64_t i = 0; i < span_numbers(piece.span, kept->tensor); i++) piece.streams.next[i] = (float)mean[i];
    kept_write_numbers(kept, &piece, piece.streams.next);
    free(mean);
    piece_free(&piece);
}

// Loads a slot of a tensor: copies its arrays, or converts them.
static void slot_load(Conversion* c, int index, Slot slot) {
    const ArrayRef from = plan_array_ref(c->from_plan, index, slot);
    const Kept to = kept_of(c->optim, index, slot);
    if (!from.format && !to.place.format) return;
    const bool same = from.nearest == to.place.nearest;
    if (!same) note_change(c, slot, &from, &to.place);
    if (!from.format || !to.place.format || to.begin >= to.end) return;
    Piece old = piece_create(from.format, to.tensor);
    float* values = slot == SLOT_WEIGHTS ? (float*)memory_zero((size_t)to.elements, sizeof(float)) : nullptr;
    if (values) c->stored->weights(c->stored->context, index, values);
    numbers_read(c, &from, &old);
    auto read = [&](int64_t start, int64_t n) { piece_read(c, &from, slot, index, values, start, n, &old); };
    auto decode = [&](int64_t start, int64_t n, Piece* now) {
        read(start, n);
        piece_tiles(n, [&](int tile) {
            from.format->load(old.streams, tile, old.values + tile, TILE_ELEMENTS, piece_key(slot));
        });
        piece_values(now, old.values, to.elements - start, n);
    };
    if (same) {
        kept_pieces(&to, [&](int64_t start, int64_t n) { read(start, n), kept_write(&to, start, n, &old); });
        kept_write_numbers(&to, &old, old.streams.extra);
    } else {
        numbers_prepare(&from, to.tensor, &old);
        by_numbers(to.place.format) ? kept_means(&to, decode) : kept_encode(&to, slot, decode);
    }
    free(values);
    piece_free(&old);
}

// Reports all changes of formats through `notice`.
static void tell_changes(const Conversion* c) {
    for (int i = 0; i < c->changes; i++) {
        const Change* change = &c->change[i];
        const char* slot = slot_name(change->slot);
        char line[512], share[64] = "";
        if (change->tensors < c->to.count) snprintf(share, sizeof(share), " in %d tensors", change->tensors);
        if (!change->from) {
            snprintf(line, sizeof(line), "%s: not in the checkpoint, whose rule is %s; it starts at zero", slot,
                     change->old_rule);
        } else if (!change->to) {
            snprintf(line, sizeof(line), "%s: left behind; %s keeps none", slot, change->rule);
        } else {
            snprintf(line, sizeof(line), "%s: %s in the checkpoint%s, converted to %s (to nearest); not bit-exact",
                     slot, change->from, share, change->to);
        }
        c->stored->notice(c->stored->context, line);
    }
}

bool optim_load(Optim* optim, const OptimStored* stored, char* error) {
    Conversion* c = (Conversion*)memory_zero(1, sizeof(Conversion));
    c->optim = optim;
    c->stored = stored;
    c->to = optim_parts(optim);
    c->tensors = (OptimTensor*)memory_take((size_t)c->to.count * sizeof(OptimTensor) + 1);
    memcpy(c->tensors, c->to.tensors, (size_t)c->to.count * sizeof(OptimTensor));
    c->from = stored->config;
    c->from.begin = c->from.end = 0;
    optim_layout(c->tensors, c->to.count, &c->from);
    c->from_plan = plan_ranges(&c->from, c->tensors, c->to.count);
    bool ok = all_fit(c, rule_fits, error) && all_fit(c, rows_convert, error) && all_fit(c, shapes_convert, error) &&
              arrays_complete(c, error);
    for (int slot = 0; slot < SLOTS && ok; slot++) {
        for (int t = 0; t < c->to.count; t++) slot_load(c, t, (Slot)slot);
    }
    if (ok) tell_changes(c);
    if (ok) optim_decode(optim);
    plan_free(c->from_plan);
    free(c->tensors), free(c);
    return ok;
}
