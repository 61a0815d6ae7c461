// Moves weights and moments between an optimizer and host memory: as fp32 values, or from a checkpoint's arrays in the
// same or other formats (optim_load). Each tensor goes through pieces of 2^19 elements, whole tiles, so that no block
// is cut. The tables' functions encode and decode on the host's cores, whatever the device. A shard touches only its
// parts of the tensors. Formats in spans need two passes over a tensor, the first one for its maxima. Cost: the arrays
// are read and written once; a piece has some 10 MB.
#include "plan.h"
#include "user.h"

constexpr int64_t PIECE_ELEMENTS = 256 * TILE_ELEMENTS;

struct Piece {
    float* values;    // (PIECE_ELEMENTS)
    Streams streams;  // the piece as stored; numbers of spans are those of the whole tensor and begin at 0
    Span span;
    int64_t number_bytes;
    SpanTile place;
};

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

// These run a row's functions over a piece; each core takes a tile.

enum Decode { AS_UPDATED, AS_SEEN };  // as the update reads it; as the model sees it

// A key that draws no noise; its stream decides what a zero becomes.
static NoiseKey piece_key(Slot slot) {
    const uint32_t noise[SLOTS] = {NOISE_WEIGHTS, NOISE_M, NOISE_V, NOISE_SLOW, NOISE_SLOW, NOISE_SLOW};
    return {0, 0, noise[slot]};
}

static void piece_decode(const FormatRow* format, Piece* piece, int64_t n, Decode decode, const NoiseKey& key) {
#pragma omp parallel for schedule(static)
    for (int tile = 0; tile < n; tile += TILE_ELEMENTS) {
        if (decode == AS_UPDATED) format->load(piece->streams, tile, piece->values + tile, TILE_ELEMENTS, key);
        if (decode == AS_SEEN) format->view(piece->streams, tile, piece->values + tile, TILE_ELEMENTS);
    }
}

// `format` rounds to nearest.
static void piece_encode(const FormatRow* format, const Piece* piece, int64_t n, Slot slot) {
    const NoiseKey key = piece_key(slot);
#pragma omp parallel for schedule(static)
    for (int tile = 0; tile < n; tile += TILE_ELEMENTS) {
        if (slot == SLOT_WEIGHTS) format->set(piece->streams, tile, piece->values + tile, TILE_ELEMENTS);
        if (slot != SLOT_WEIGHTS) format->store(piece->streams, tile, piece->values + tile, TILE_ELEMENTS, key);
    }
}

static void piece_measure(const FormatRow* format, const Piece* piece, int64_t n) {
#pragma omp parallel for schedule(static)
    for (int tile = 0; tile < n; tile += TILE_ELEMENTS) {
        format->measure(piece->streams, tile, piece->values + tile, TILE_ELEMENTS);
    }
}

static int64_t piece_length(int64_t end, int64_t start) {
    return end - start < PIECE_ELEMENTS ? end - start : PIECE_ELEMENTS;
}

// The elements of a tensor, padding included, that lie in the arrays of a run of the arena.
struct Held {
    int64_t begin, end;
};

static Held held_of(const OptimTensor* tensor, const ArenaRun* run) {
    int64_t padded = tensor_padded(tensor), first = run->begin - tensor->offset, end = run->end - tensor->offset;
    return {first < 0 ? 0 : first, end < padded ? end : padded};
}

// Copies `given` values of a tensor into the piece and sets the padding to zero.
static void piece_values(Piece* piece, const float* values, int64_t given, int64_t n) {
    given = given < 0 ? 0 : given < n ? given : n;
    if (given > 0) memcpy(piece->values, values, (size_t)given * sizeof(float));
    memset(piece->values + given, 0, (size_t)(n - given) * sizeof(float));
}

// A tensor's weights in an optimizer's arrays.
struct TensorWeights {
    const Device* dev;
    const OptimTensor* tensor;
    Place place;
    Streams arrays;
    Held held;         // the elements that lie in the arrays
    int64_t elements;  // of the tensor, without padding
    int64_t numbers;   // bytes before its numbers of spans
};

static TensorWeights tensor_weights(const Optim* optim, int index) {
    const OptimParts parts = optim_parts(optim);
    const OptimTensor* tensor = &parts.tensors[index];
    const Place place = plan_place(parts.plan, index, SLOT_WEIGHTS);
    const Held held = held_of(tensor, place.run);
    const int64_t elements = tensor->rows * tensor->cols, numbers = place.at * (int64_t)sizeof(float);
    return {parts.dev, tensor, place, weights_arrays(optim, index), held, elements, numbers};
}

// The piece from element `start` of the tensor on, in array `i`.
static char* weights_at(const TensorWeights* w, int i, int64_t start) {
    return (char*)stream_data(&w->arrays, i) +
           stream_bytes(w->place.format->stream[i], w->tensor->offset + start - w->place.run->begin);
}

void optim_set_weights(Optim* optim, int index, const float* values) {
    const TensorWeights w = tensor_weights(optim, index);
    const FormatRow* format = w.place.format;
    if (w.held.begin >= w.held.end) return;
    Piece piece = piece_create(format, w.tensor);
    for (int measure = piece.span ? 1 : 0; measure >= 0; measure--) {
        for (int64_t start = w.held.begin; start < w.held.end; start += PIECE_ELEMENTS) {
            int64_t n = piece_length(w.held.end, start);
            piece_values(&piece, values + start, w.elements - start, n);
            piece_at(&piece, w.tensor, start);
            if (measure) piece_measure(format, &piece, n);
            if (!measure) piece_encode(format, &piece, n, SLOT_WEIGHTS);
            for (int i = 0; i < 3 && !measure; i++) {
                if (!stream_data(&w.arrays, i)) continue;
                copy_to_device(w.dev, weights_at(&w, i, start), stream_data(&piece.streams, i),
                               stream_bytes(format->stream[i], n));
            }
        }
    }
    if (piece.span) {
        copy_to_device(w.dev, (char*)w.arrays.extra + w.numbers, piece.streams.next, piece.number_bytes);
    }
    piece_free(&piece);
}

bool optim_set_part(Optim* optim, int index, int64_t start, int64_t n, const float* values) {
    const TensorWeights w = tensor_weights(optim, index);
    const FormatRow* format = w.place.format;
    if (format_span(format) != SPAN_RUN) return false;
    const int64_t padded = start + ceil_div(n, TILE_ELEMENTS) * TILE_ELEMENTS;
    const int64_t begin = start > w.held.begin ? start : w.held.begin, end = padded < w.held.end ? padded : w.held.end;
    if (begin >= end) return true;
    const int64_t tiles = (end - begin) / TILE_ELEMENTS;
    const Streams to = row_tile(format, w.arrays, (w.tensor->offset + begin - w.place.run->begin) / TILE_ELEMENTS);
    values += begin - start, n -= begin - start;
    if (w.dev->gpu) {
        void* arguments[] = {(void*)&to, (void*)&values, (void*)&n};
        dim3 grid((unsigned)tiles), block(TILE_ELEMENTS / DECODE_ELEMENTS);
        check(cudaLaunchKernel(format->set_tiles, grid, block, arguments, 0, w.dev->stream));
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
    const TensorWeights w = tensor_weights(optim, index);
    const FormatRow* format = w.place.format;
    if (w.held.begin >= w.held.end) return;
    Piece piece = piece_create(format, w.tensor);
    if (piece.span) copy_to_host(w.dev, piece.streams.extra, (char*)w.arrays.extra + w.numbers, piece.number_bytes);
    for (int64_t start = w.held.begin; start < w.held.end; start += PIECE_ELEMENTS) {
        int64_t n = piece_length(w.held.end, start), wanted = w.elements - start < n ? w.elements - start : n;
        piece_at(&piece, w.tensor, start);
        for (int i = 0; i < 3; i++) {
            copy_to_host(w.dev, stream_data(&piece.streams, i), weights_at(&w, i, start),
                         stream_bytes(format->stream[i], n));
        }
        piece_decode(format, &piece, n, AS_SEEN, NoiseKey{});
        memcpy(values + start, piece.values, (size_t)wanted * sizeof(float));
    }
    piece_free(&piece);
}

// Checkpoints.

constexpr int CHANGES = SLOTS * LAUNCHES * LAUNCHES;  // an upper bound

struct Change {
    Slot slot;
    const char *from, *to;
    const char *old_rule, *rule;  // of the first of the tensors
    int tensors;
};

struct Conversion {
    Optim* optim;
    const OptimStored* stored;
    OptimParts to;
    OptimConfig from;      // the checkpoint's, of the whole arena
    OptimTensor* tensors;  // (to.count), laid out as the checkpoint was
    Plan* from_plan;
    Change change[CHANGES];
    int changes;
};

// True if the model file holds this array of the weights.
static bool in_model_file(Slot slot, int index, const StreamInfo& info) {
    return slot == SLOT_WEIGHTS && index == 0 && optim_model_dtype(info.dtype);
}

static const void* stored_array(const Conversion* c, const Place* place, const StreamInfo& info) {
    char name[256];
    stream_name(place->array, info, name, sizeof(name));
    return c->stored->array(c->stored->context, name, info.dtype, run_bytes(place->run, info));
}

// Checks that the checkpoint holds all arrays that its formats need, and no others.
static bool arrays_complete(const Conversion* c, char* error) {
    int arrays = 0;
    for (int slot = 0; slot < SLOTS; slot++) {
        for (int t = 0; t < c->to.count; t++) {
            Place place = plan_place(c->from_plan, t, (Slot)slot);
            if (!place.format || place.run->begin != c->from_plan->kept[t][slot].offset)
                continue;  // once an array, at its first tensor
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

static bool rule_fits(const Conversion* c, char* error) {
    for (int t = 0; t < c->to.count; t++) {
        const Place from = plan_place(c->from_plan, t, SLOT_V), to = plan_place(c->to.plan, t, SLOT_V);
        if (!to.format || from.format) continue;
        return data_error(
            error,
            "--rule: \"%s\" was found and the checkpoint's %s keeps no second moment to go on with; leave --rule, "
            "--preset and rule= of --override out, or begin anew from its weights with --model",
            to.rule, from.rule);
    }
    return true;
}

// True if a tensor's arrays are taken as they are. Rows of --format are read anew for each configuration, so these are
// compared by name.
static bool same_storage(const Place* from, const Place* to) {
    if (from->nearest == to->nearest) return true;
    bool user = from->format && to->format && from->format->source && to->format->source;
    return user && strcmp(from->format->name, to->format->name) == 0;
}

// True if v is an average of squares of gradients: of elements, or by rows and columns.
static bool averages_gradients(const char* name) {
    const RuleRow* rule = find_row(rule_table(), name);
    const RowRule rows = rule->rows;
    return rule->keeps_v || rows == ROWS_ADAM_MINI || rows == ROWS_ADAFACTOR || rows == ROWS_CAME;
}

static bool by_numbers(const FormatRow* format) {
    return format_span(format) >= SPAN_ROWS && format_span(format) <= SPAN_PAIRS;
}

// Refuses a v that means something else than the checkpoint's. came's confidence has no counterpart.
static bool rows_convert(const Conversion* c, char* error) {
    for (int t = 0; t < c->to.count; t++) {
        const Place from = plan_place(c->from_plan, t, SLOT_V), to = plan_place(c->to.plan, t, SLOT_V);
        if (!to.format || from.format == to.format || !(by_numbers(from.format) || by_numbers(to.format))) continue;
        const bool came = find_row(rule_table(), to.rule)->rows == ROWS_CAME;
        if (!came && averages_gradients(from.rule) && averages_gradients(to.rule)) continue;
        return data_error(error,
                          "--rule: \"%s\" was found, whose v %s, and the checkpoint's %s keeps none of this kind; "
                          "leave --rule and rule= of --override out, or begin anew from its weights with --model",
                          to.rule, by_numbers(to.format) ? "is by rows" : "is of elements", from.rule);
    }
    return true;
}

// Refuses moments of another shape: those of a projected gradient, of another rank or of none.
static bool shapes_convert(const Conversion* c, char* error) {
    for (int slot = SLOT_M; slot < SLOTS; slot++) {
        for (int t = 0; t < c->to.count; t++) {
            const Place from = plan_place(c->from_plan, t, (Slot)slot), to = plan_place(c->to.plan, t, (Slot)slot);
            const OptimTensor *had = &c->from_plan->kept[t][slot], *has = &c->to.plan->kept[t][slot];
            const bool same = had->rows == has->rows && had->cols == has->cols;
            const bool starts = slot == SLOT_BASIS && !from.format && to.format;
            if ((same || !from.format || !to.format) && !starts) continue;
            return data_error(
                error,
                "--rule: \"%s\" keeps %s of %s in another shape than the checkpoint's %s does; leave --rule, --rank "
                "and rule= of --override as they were, or begin anew from its weights with --model",
                to.rule, slot_name((Slot)slot), c->to.tensors[t].name, from.rule);
        }
    }
    return true;
}

// Refuses to convert the user's own formats: they exist for NVRTC only, and conversion runs on the host.
static bool formats_convert(const Conversion* c, char* error) {
    for (int slot = 0; slot < SLOTS; slot++) {
        for (int t = 0; t < c->to.count; t++) {
            Place from = plan_place(c->from_plan, t, (Slot)slot), to = plan_place(c->to.plan, t, (Slot)slot);
            bool user = (from.format && from.format->source) || (to.format && to.format->source);
            if (!user || !from.format || !to.format || same_storage(&from, &to)) continue;
            return data_error(error,
                              "%s is %s in the checkpoint and %s was asked for, and a format of --format is not "
                              "converted; resume in the checkpoint's",
                              slot_name((Slot)slot), from.format->name, to.format->name);
        }
    }
    return true;
}

void optim_own_formats(const Optim* optim, char text[OPTIM_OWN_FORMATS_BYTES]) {
    user_sums(optim_parts(optim).config, text, OPTIM_OWN_FORMATS_BYTES);
}

// Checks that the files of the user's own formats have not changed since the checkpoint was written, since a name alone
// does not tell what the codes mean.
static bool formats_unchanged(const Conversion* c, char* error) {
    char now[OPTIM_OWN_FORMATS_BYTES], then[OPTIM_OWN_FORMATS_BYTES], *rest;
    user_sums(&c->from, now, sizeof(now));
    snprintf(then, sizeof(then), "%s", c->stored->own_formats);
    for (const char* entry = strtok_r(then, " ", &rest); entry; entry = strtok_r(nullptr, " ", &rest)) {
        if (strstr(now, entry)) continue;
        return data_error(error,
                          "the file of --format that holds its %.*s has been changed since, so that its codes may mean "
                          "other numbers; put the file back as it was (comments and white space do not count), or "
                          "begin anew from the weights with --model",
                          (int)strcspn(entry, "="), entry);
    }
    return true;
}

static void note_change(Conversion* c, Slot slot, const Place* from, const Place* to) {
    const char *old = from->format ? from->format->name : nullptr, *now = to->format ? to->format->name : nullptr;
    for (int i = 0; i < c->changes; i++) {
        Change* known = &c->change[i];
        if (known->slot != slot || known->from != old || known->to != now) continue;
        known->tensors++;
        return;
    }
    if (c->changes < CHANGES) c->change[c->changes++] = {slot, old, now, from->rule, to->rule, 1};
}

// Reads the piece from element `start` of a tensor on, as the checkpoint has it. `values` are the model file's weights.
static void piece_read(const Conversion* c, const Place* from, Slot slot, int tensor, const float* values,
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

OptimStream place_stream(const Optim* optim, const Place* place, const StreamInfo& info) {
    char name[256];
    stream_name(place->array, info, name, sizeof(name));
    return info.bits > 0 ? optim_stream_named(optim, name) : OptimStream{};
}

// Writes a piece as stored into the optimizer's arrays, from element `first` of the arena on.
static void piece_write(const Conversion* c, const Place* to, int64_t first, int64_t n, const Piece* piece) {
    for (int i = 0; i < 3; i++) {
        const StreamInfo& info = to->format->stream[i];
        char* array = (char*)place_stream(c->optim, to, info).data;
        if (!array) continue;
        copy_to_device(c->to.dev, array + stream_bytes(info, first - to->run->begin), stream_data(&piece->streams, i),
                       stream_bytes(info, n));
    }
}

// Read the numbers of spans of a tensor from the checkpoint; write them into the optimizer's array.
static void numbers_read(const Conversion* c, const Place* from, Piece* piece) {
    if (!piece->span) return;
    c->stored->read(c->stored->context, stored_array(c, from, from->format->stream[1]),
                    from->at * (int64_t)sizeof(float), piece->number_bytes, piece->streams.extra);
}

static void numbers_write(const Conversion* c, const Place* to, const Piece* piece, const void* numbers) {
    if (!piece->span) return;
    char* array = (char*)place_stream(c->optim, to, to->format->stream[1]).data;
    copy_to_device(c->to.dev, array + to->at * (int64_t)sizeof(float), numbers, piece->number_bytes);
}

// Makes a checkpoint's numbers by row and column what `load` multiplies to v, laid out as the step's are: r is divided
// by its mean. came's second numbers are overwritten, as no other rule reads them.
static void numbers_prepare(const Place* from, const OptimTensor* tensor, Piece* piece) {
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

// Adds v of a piece, whose first element is `start`, to the means of the rows and columns of a tensor.
static void numbers_add(const OptimTensor* tensor, int64_t start, int64_t n, const float* values, double* mean) {
    const int64_t end = start + n < tensor->rows * tensor->cols ? start + n : tensor->rows * tensor->cols;
    for (int64_t i = start; i < end; i++) {
        mean[i / tensor->cols] += (double)values[i - start] / (double)tensor->cols;
        mean[tensor->rows + i % tensor->cols] += (double)values[i - start] / (double)tensor->rows;
    }
}

static void slot_load(Conversion* c, int index, Slot slot) {
    Place from = plan_place(c->from_plan, index, slot), to = plan_place(c->to.plan, index, slot);
    if (!from.format && !to.format) return;
    bool same = same_storage(&from, &to);
    if (!same) note_change(c, slot, &from, &to);
    if (!from.format || !to.format) return;
    const OptimTensor* tensor = &c->to.plan->kept[index][slot];
    int64_t elements = tensor->rows * tensor->cols;
    Held held = held_of(tensor, to.run);
    if (held.begin >= held.end) return;
    // Each piece has the table of the row that works on it.
    Piece old = piece_create(from.format, tensor), now = piece_create(to.nearest, tensor);
    float* values = slot == SLOT_WEIGHTS ? (float*)memory_zero((size_t)elements, sizeof(float)) : nullptr;
    if (values) c->stored->weights(c->stored->context, index, values);
    numbers_read(c, &from, &old);
    if (!same) numbers_prepare(&from, tensor, &old);
    const bool by_rows = !same && by_numbers(to.format);
    double* mean = by_rows ? (double*)memory_zero((size_t)(tensor->rows + tensor->cols), sizeof(double)) : nullptr;
    for (int measure = !same && now.span ? 1 : 0; measure >= 0; measure--) {
        for (int64_t start = held.begin; start < held.end; start += PIECE_ELEMENTS) {
            int64_t n = piece_length(held.end, start);
            piece_read(c, &from, slot, index, values, start, n, &old);
            if (!same) {
                piece_decode(from.format, &old, n, AS_UPDATED, piece_key(slot));
                piece_values(&now, old.values, elements - start, n);
                piece_at(&now, tensor, start);
            }
            if (measure) piece_measure(to.nearest, &now, n);
            if (measure) continue;
            if (by_rows) numbers_add(tensor, start, n, now.values, mean);
            if (by_rows) continue;
            if (!same) piece_encode(to.nearest, &now, n, slot);
            piece_write(c, &to, tensor->offset + start, n, same ? &old : &now);
        }
    }
    for (int64_t i = 0; by_rows && i < span_numbers(now.span, tensor); i++) now.streams.next[i] = (float)mean[i];
    free(mean);
    numbers_write(c, &to, &now, same ? old.streams.extra : now.streams.next);
    free(values);
    piece_free(&old), piece_free(&now);
}

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
    bool ok = rule_fits(c, error) && rows_convert(c, error) && shapes_convert(c, error) && arrays_complete(c, error) &&
              formats_unchanged(c, error) && formats_convert(c, error);
    for (int slot = 0; slot < SLOTS && ok; slot++) {
        for (int t = 0; t < c->to.count; t++) slot_load(c, t, (Slot)slot);
    }
    if (ok) tell_changes(c);
    if (ok) optim_decode(optim);
    plan_free(c->from_plan);
    free(c->tensors), free(c);
    return ok;
}
