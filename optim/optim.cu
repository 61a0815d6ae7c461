// The optimizer behind optim.h: names to rows of the tables, arenas and the tile table, and the step, which is one
// kernel launch (built in, or compiled by NVRTC when first asked for) or, on the CPU, the same template over the
// tables' function pointers, a core a tile (build with -fno-math-errno: a square root is then one instruction, and the
// update some four times faster; the bits are the same).
// Bytes a parameter: what the storages' STREAM say, and 8 bytes of tile table every 2048 elements.
#include "optim.h"
#include "jit.h"
#include "kernel.cuh"
#include "table.cuh"

static_assert(TILE_UNIT == OPTIM_ALIGN, "tiles are counted in units of the tensors' alignment");

// Rows of the tables. A FormatRow is also what update_elements takes for a storage on the CPU.
struct FormatRow {
    const char* name;
    const char* note;
    const char* type;  // as NVRTC is told it
    StreamInfo stream[2];
    void (*load)(const Streams& streams, int64_t first, float* x, int n);
    void (*store)(const Streams& streams, int64_t first, const float* x, int n, const NoiseKey& key);
    void (*set)(const Streams& streams, int64_t first, const float* x, int n);
    void (*view)(const Streams& streams, int64_t first, float* x, int n);
};

struct WeightsRow {
    FormatRow format;
    const void* decode[2];  // optim_decode_kernel into each OptimType
};

struct RuleRow {
    const char* name;
    const char* note;
    const char* type;
    void (*update)(const Hyper& hyper, float* p, const float* g, float* m, float* v, int n);
};

struct PresetRow {
    const char* name;
    const char *rule, *weights, *m, *v;
    const char* note;
};

struct BuiltInRow {
    const char* types;
    const void* kernel;
};

// What a template's function pointers make of a type: T::load and its sisters, copied into a row.
template <class T>
constexpr FormatRow format_row(const char* name, const char* note, const char* type) {
    return {name, note, type, {T::STREAM[0], T::STREAM[1]}, T::load, T::store, T::set, T::view};
}

#define FORMAT_ROW(NAME, NOTE, ...) format_row<__VA_ARGS__>(NAME, NOTE, #__VA_ARGS__),
#define WEIGHTS_ROW(NAME, NOTE, ...)                                             \
    {format_row<__VA_ARGS__>(NAME, NOTE, #__VA_ARGS__),                          \
     {(const void*)optim_decode_kernel<__VA_ARGS__, Elementwise<Fp32, NEAREST>>, \
      (const void*)optim_decode_kernel<__VA_ARGS__, Elementwise<Bf16, NEAREST>>}},
#define RULE_ROW(NAME, NOTE, TYPE) {NAME, NOTE, #TYPE, EachElement<TYPE>::update},
#define PRESET_ROW(NAME, RULE, WEIGHTS, M, V, NOTE) {NAME, RULE, WEIGHTS, M, V, NOTE},
#define BUILT_IN_ROW(...) {#__VA_ARGS__, (const void*)optim_step_kernel<__VA_ARGS__>},

static const RuleRow rule_rows[] = {OPTIM_RULES(RULE_ROW)};
static const WeightsRow weights_rows[] = {OPTIM_WEIGHTS(WEIGHTS_ROW)};
static const FormatRow grads_rows[] = {OPTIM_GRADS(FORMAT_ROW)};
static const FormatRow state_rows[] = {OPTIM_STATES(FORMAT_ROW)};
static const PresetRow preset_rows[] = {OPTIM_PRESETS(PRESET_ROW)};
static const BuiltInRow built_in_rows[] = {OPTIM_BUILT_IN(BUILT_IN_ROW)};
// The types that the matmuls read, by OptimType.
static const FormatRow compute_rows[] = {format_row<Elementwise<Fp32, NEAREST>>("fp32", "", ""),
                                         format_row<Elementwise<Bf16, NEAREST>>("bf16", "", "")};

static const char* row_name(const WeightsRow& row) {
    return row.format.name;
}
template <class Row>
static const char* row_name(const Row& row) {
    return row.name;
}

template <class Row, int COUNT>
static const Row* find(const Row (&rows)[COUNT], const char* name) {
    for (const Row& row : rows) {
        if (name && strcmp(row_name(row), name) == 0) return &row;
    }
    return nullptr;
}

struct Rows {
    const RuleRow* rule;
    const WeightsRow* weights;
    const FormatRow *grads, *m, *v;
};

static Rows config_rows(const OptimConfig* config) {
    Rows rows = {find(rule_rows, config->rule), find(weights_rows, config->weights), find(grads_rows, config->grads),
                 find(state_rows, config->m), find(state_rows, config->v)};
    if (!rows.rule || !rows.weights || !rows.grads || !rows.m || !rows.v) {
        user_error("the optimizer's configuration was not resolved: optim_resolve comes before any other call");
    }
    return rows;
}

// Names and values.

static int edit_distance(const char* a, const char* b) {
    int row[64], length = (int)strnlen(b, 63);
    for (int j = 0; j <= length; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= length; j++) {
            int change = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < change) change = row[j] + 1;
            if (row[j - 1] + 1 < change) change = row[j - 1] + 1;
            row[j] = change;
        }
    }
    return row[length];
}

// Looks a name up; when it is unknown the sentence lists the known ones and suggests the nearest.
template <class Row, int COUNT>
static bool resolve_name(const Row (&rows)[COUNT], const char* option, const char** name, char* error, size_t bytes) {
    const Row* row = find(rows, *name);
    if (row) {
        *name = row_name(*row);
        return true;
    }
    const char* nearest = row_name(rows[0]);
    char known[1024] = "";
    for (const Row& other : rows) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof(known) - used, "%s%s", used ? ", " : "", row_name(other));
        if (edit_distance(*name, row_name(other)) < edit_distance(*name, nearest)) nearest = row_name(other);
    }
    snprintf(error, bytes, "%s: \"%s\" is not known; did you mean %s? (known: %s)", option, *name, nearest, known);
    return false;
}

static bool resolve_number(const char* option, float value, bool fits, const char* range, char* error, size_t bytes) {
    if (fits) return true;
    snprintf(error, bytes, "%s: %g was found and %s is needed", option, (double)value, range);
    return false;
}

static void take_default(const char** name, const char* preset) {
    if (!*name || !**name) *name = preset;
}

bool optim_resolve(OptimConfig* config, char* error, size_t bytes) {
    take_default(&config->preset, preset_rows[0].name);
    if (!resolve_name(preset_rows, "--preset", &config->preset, error, bytes)) return false;
    const PresetRow* preset = find(preset_rows, config->preset);
    take_default(&config->rule, preset->rule);
    take_default(&config->weights, preset->weights);
    take_default(&config->grads, "");
    take_default(&config->m, preset->m);
    take_default(&config->v, preset->v);
    float beta1 = config->beta1, beta2 = config->beta2, eps = config->eps, decay = config->weight_decay;
    const char* unit = "a number from 0 to below 1";
    return resolve_name(rule_rows, "--rule", &config->rule, error, bytes) &&
           resolve_name(weights_rows, "--weights", &config->weights, error, bytes) &&
           resolve_name(grads_rows, "--grads", &config->grads, error, bytes) &&
           resolve_name(state_rows, "--m", &config->m, error, bytes) &&
           resolve_name(state_rows, "--v", &config->v, error, bytes) &&
           resolve_number("--beta1", beta1, beta1 >= 0.0f && beta1 < 1.0f, unit, error, bytes) &&
           resolve_number("--beta2", beta2, beta2 >= 0.0f && beta2 < 1.0f, unit, error, bytes) &&
           resolve_number("--eps", eps, eps > 0.0f && eps < INFINITY, "a number above 0", error, bytes) &&
           resolve_number("--weight-decay", decay, decay >= 0.0f && decay < INFINITY, "a number from 0 on", error,
                          bytes);
}

// Sizes.

int64_t optim_layout(OptimTensor* tensors, int count) {
    int64_t offset = 0;
    for (int i = 0; i < count; i++) {
        tensors[i].offset = offset;
        offset += ceil_div(tensors[i].rows * tensors[i].cols, OPTIM_ALIGN) * OPTIM_ALIGN;
    }
    return offset;
}

static int64_t tensor_padded(const OptimTensor* tensor) {
    return ceil_div(tensor->rows * tensor->cols, OPTIM_ALIGN) * OPTIM_ALIGN;
}

static int64_t arena_elements(const OptimTensor* tensors, int count) {
    return count ? tensors[count - 1].offset + tensor_padded(&tensors[count - 1]) : 0;
}

static int64_t arena_tiles(const OptimTensor* tensors, int count) {
    int64_t tiles = 0;
    for (int i = 0; i < count; i++) tiles += ceil_div(tensor_padded(&tensors[i]), TILE_ELEMENTS);
    return tiles;
}

// Of one stream for a run of elements of the arena.
static int64_t stream_bytes(const StreamInfo& stream, int64_t elements) {
    return ceil_div(ceil_div(elements, stream.run) * stream.bits, 8);
}

// As device_alloc rounds it.
static int64_t allocated_bytes(int64_t bytes) {
    return ceil_div(bytes, 256) * 256;
}

static int64_t format_bytes(const FormatRow* format, int64_t elements) {
    return allocated_bytes(stream_bytes(format->stream[0], elements)) +
           allocated_bytes(stream_bytes(format->stream[1], elements));
}

static double format_bytes_each(const FormatRow* format) {
    double bits = 0.0;
    for (const StreamInfo& stream : format->stream) bits += (double)stream.bits / stream.run;
    return bits / 8.0;
}

static bool serves_directly(const FormatRow* weights, OptimType compute) {
    return strcmp(weights->stream[0].dtype, compute_rows[compute].stream[0].dtype) == 0;
}

OptimBytes optim_bytes(const OptimConfig* config, const OptimTensor* tensors, int count, OptimType compute) {
    Rows rows = config_rows(config);
    int64_t elements = arena_elements(tensors, count);
    OptimBytes bytes;
    bytes.weights = format_bytes(&rows.weights->format, elements);
    bytes.compute =
        serves_directly(&rows.weights->format, compute) ? 0 : format_bytes(&compute_rows[compute], elements);
    bytes.states = format_bytes(rows.m, elements) + format_bytes(rows.v, elements);
    bytes.tables = allocated_bytes(arena_tiles(tensors, count) * (int64_t)sizeof(Tile));
    return bytes;
}

void optim_describe(const OptimConfig* config, char* line, size_t bytes) {
    Rows rows = config_rows(config);
    double each = format_bytes_each(&rows.weights->format) + format_bytes_each(rows.m) + format_bytes_each(rows.v);
    snprintf(line, bytes, "%s  weights %s  grads %s  m %s  v %s  %.4g B/param", rows.rule->name,
             rows.weights->format.name, rows.grads->name, rows.m->name, rows.v->name, each);
}

// The optimizer itself.

struct Optim {
    const Device* dev;
    OptimConfig config;
    Rows rows;
    OptimType compute;
    OptimTensor* tensors;  // (count), with names of their own
    int count;
    int64_t elements;  // of the arena
    Streams weights, m, v;
    Streams copy;  // of the weights in the compute type; codes null when the stored weights serve
    Tile* tiles;   // (tile_count), device memory
    int64_t tile_count;
    const void* built_in;  // the step's kernel on a GPU: this one or jit
    JitKernel jit;
    OptimBytes allocated;
    OptimStream stream[6];  // codes and extra of weights, m and v
    char stream_name[6][32];
    int stream_count;
};

static void* allocate_zero(const Device* dev, int64_t bytes, int64_t* total) {
    void* memory = device_alloc(dev, bytes);
    device_zero(dev, memory, bytes);
    *total += allocated_bytes(bytes);
    return memory;
}

static Streams allocate_streams(Optim* optim, const FormatRow* format, int64_t* total) {
    return {allocate_zero(optim->dev, stream_bytes(format->stream[0], optim->elements), total),
            allocate_zero(optim->dev, stream_bytes(format->stream[1], optim->elements), total)};
}

// Adds a storage's arrays to the list that checkpoints write. A name with a leading dot follows the slot's.
static void list_streams(Optim* optim, const char* slot, const FormatRow* format, const Streams* streams) {
    void* data[2] = {streams->codes, streams->extra};
    for (int i = 0; i < 2; i++) {
        const StreamInfo& info = format->stream[i];
        if (info.bits == 0) continue;
        int index = optim->stream_count++, element_bytes = info.bits < 8 ? 1 : info.bits / 8;
        char* name = optim->stream_name[index];
        bool own_name = info.name[0] && info.name[0] != '.';
        snprintf(name, sizeof(optim->stream_name[index]), "%s%s", own_name ? "" : slot, info.name);
        optim->stream[index] = {name,          info.dtype,
                                data[i],       stream_bytes(info, optim->elements) / element_bytes,
                                element_bytes, i == 0 && streams == &optim->weights};
    }
}

static void free_streams(const Device* dev, Streams* streams) {
    device_free(dev, streams->codes);
    device_free(dev, streams->extra);
}

static void tiles_create(Optim* optim) {
    optim->tile_count = arena_tiles(optim->tensors, optim->count);
    int64_t bytes = optim->tile_count * (int64_t)sizeof(Tile);
    Tile* tiles = (Tile*)malloc((size_t)bytes + 1);
    int64_t t = 0;
    for (int i = 0; i < optim->count; i++) {
        const OptimTensor* tensor = &optim->tensors[i];
        int64_t padded = tensor_padded(tensor);
        for (int64_t start = 0; start < padded; start += TILE_ELEMENTS) {
            int64_t length = padded - start < TILE_ELEMENTS ? padded - start : TILE_ELEMENTS;
            tiles[t++] = {(uint32_t)((tensor->offset + start) / TILE_UNIT), (uint16_t)(length / TILE_UNIT),
                          (uint16_t)(tensor->decay ? 1 : 0)};
        }
    }
    optim->tiles = (Tile*)allocate_zero(optim->dev, bytes, &optim->allocated.tables);
    copy_to_device(optim->dev, optim->tiles, tiles, bytes);
    free(tiles);
}

static void config_types(const OptimConfig* config, char* types, size_t bytes) {
    Rows rows = config_rows(config);
    snprintf(types, bytes, "%s, %s, %s, %s, %s", rows.rule->type, rows.weights->format.type, rows.grads->type,
             rows.m->type, rows.v->type);
}

static const void* built_in_kernel(const OptimConfig* config) {
    char types[1024];
    config_types(config, types, sizeof(types));
    for (const BuiltInRow& row : built_in_rows) {
        if (strcmp(row.types, types) == 0) return row.kernel;
    }
    return nullptr;
}

bool optim_built_in(const OptimConfig* config) {
    return built_in_kernel(config) != nullptr;
}

void optim_expression(const OptimConfig* config, char* expression, size_t bytes) {
    char types[1024];
    config_types(config, types, sizeof(types));
    snprintf(expression, bytes, "optim_step_kernel<%s>", types);
}

// The kernel of the step: built in or, failing that or when NIBBLE_JIT=1 asks for it, from NVRTC.
static void kernel_create(Optim* optim) {
    const char* always = getenv("NIBBLE_JIT");
    optim->built_in = always && strcmp(always, "1") == 0 ? nullptr : built_in_kernel(&optim->config);
    if (optim->built_in) return;
    char expression[1200], architecture[32];
    char* error = (char*)calloc(1, JIT_ERROR_BYTES);
    JitImage image;
    memset(&image, 0, sizeof(image));
    optim_expression(&optim->config, expression, sizeof(expression));
    if (!jit_architecture(optim->dev->compute, architecture, sizeof(architecture), error) ||
        !jit_get(expression, architecture, &image, error) || !jit_load(&image, &optim->jit, error)) {
        user_error("%s", error);
    }
    jit_free(&image);
    free(error);
}

Optim* optim_create(const Device* dev, const OptimConfig* config, const OptimTensor* tensors, int count,
                    OptimType compute) {
    Optim* optim = (Optim*)calloc(1, sizeof(Optim));
    optim->dev = dev;
    optim->config = *config;
    optim->rows = config_rows(config);
    optim->compute = compute;
    optim->tensors = (OptimTensor*)malloc((size_t)count * sizeof(OptimTensor) + 1);
    optim->count = count;
    for (int i = 0; i < count; i++) {
        optim->tensors[i] = tensors[i];
        optim->tensors[i].name = strdup(tensors[i].name);
    }
    optim->elements = arena_elements(tensors, count);
    optim->weights = allocate_streams(optim, &optim->rows.weights->format, &optim->allocated.weights);
    optim->m = allocate_streams(optim, optim->rows.m, &optim->allocated.states);
    optim->v = allocate_streams(optim, optim->rows.v, &optim->allocated.states);
    if (!serves_directly(&optim->rows.weights->format, compute)) {
        optim->copy = allocate_streams(optim, &compute_rows[compute], &optim->allocated.compute);
    }
    list_streams(optim, "weights", &optim->rows.weights->format, &optim->weights);
    list_streams(optim, "m", optim->rows.m, &optim->m);
    list_streams(optim, "v", optim->rows.v, &optim->v);
    tiles_create(optim);
    if (dev->gpu) kernel_create(optim);
    return optim;
}

void optim_free(Optim* optim) {
    if (!optim) return;
    free_streams(optim->dev, &optim->weights);
    free_streams(optim->dev, &optim->m);
    free_streams(optim->dev, &optim->v);
    free_streams(optim->dev, &optim->copy);
    device_free(optim->dev, optim->tiles);
    for (int i = 0; i < optim->count; i++) free((void*)optim->tensors[i].name);
    free(optim->tensors);
    free(optim);
}

OptimBytes optim_allocated(const Optim* optim) {
    return optim->allocated;
}

// Weights in and out, a piece at a time through the host's memory. A piece is whole tiles, so it cuts no block.

constexpr int64_t PIECE_ELEMENTS = 256 * TILE_ELEMENTS;

struct Piece {
    float* values;    // (PIECE_ELEMENTS)
    Streams streams;  // the piece as stored
};

static Piece piece_create(const FormatRow* format) {
    return {(float*)calloc(PIECE_ELEMENTS, sizeof(float)),
            {calloc(1, (size_t)stream_bytes(format->stream[0], PIECE_ELEMENTS)),
             calloc(1, (size_t)stream_bytes(format->stream[1], PIECE_ELEMENTS) + 1)}};
}

static void piece_free(Piece* piece) {
    free(piece->values);
    free(piece->streams.codes);
    free(piece->streams.extra);
}

static char* stream_at(void* base, const StreamInfo& stream, int64_t element) {
    return (char*)base + stream_bytes(stream, element);
}

void optim_set_weights(Optim* optim, int index, const float* values) {
    const OptimTensor* tensor = &optim->tensors[index];
    const FormatRow* format = &optim->rows.weights->format;
    int64_t elements = tensor->rows * tensor->cols, padded = tensor_padded(tensor);
    Piece piece = piece_create(format);
    for (int64_t start = 0; start < padded; start += PIECE_ELEMENTS) {
        int64_t n = padded - start < PIECE_ELEMENTS ? padded - start : PIECE_ELEMENTS;
        int64_t given = elements - start < n ? elements - start : n;
        memcpy(piece.values, values + start, (size_t)given * sizeof(float));
        memset(piece.values + given, 0, (size_t)(n - given) * sizeof(float));
#pragma omp parallel for schedule(static)
        for (int64_t tile = 0; tile < n; tile += TILE_ELEMENTS) {
            int length = (int)(n - tile < TILE_ELEMENTS ? n - tile : TILE_ELEMENTS);
            format->set(piece.streams, tile, piece.values + tile, length);
        }
        int64_t first = tensor->offset + start;
        copy_to_device(optim->dev, stream_at(optim->weights.codes, format->stream[0], first), piece.streams.codes,
                       stream_bytes(format->stream[0], n));
        copy_to_device(optim->dev, stream_at(optim->weights.extra, format->stream[1], first), piece.streams.extra,
                       stream_bytes(format->stream[1], n));
    }
    piece_free(&piece);
}

void optim_get_weights(const Optim* optim, int index, float* values) {
    const OptimTensor* tensor = &optim->tensors[index];
    const FormatRow* format = &optim->rows.weights->format;
    int64_t elements = tensor->rows * tensor->cols, padded = tensor_padded(tensor);
    Piece piece = piece_create(format);
    for (int64_t start = 0; start < padded; start += PIECE_ELEMENTS) {
        int64_t n = padded - start < PIECE_ELEMENTS ? padded - start : PIECE_ELEMENTS;
        int64_t wanted = elements - start < n ? elements - start : n;
        int64_t first = tensor->offset + start;
        copy_to_host(optim->dev, piece.streams.codes, stream_at(optim->weights.codes, format->stream[0], first),
                     stream_bytes(format->stream[0], n));
        copy_to_host(optim->dev, piece.streams.extra, stream_at(optim->weights.extra, format->stream[1], first),
                     stream_bytes(format->stream[1], n));
#pragma omp parallel for schedule(static)
        for (int64_t tile = 0; tile < n; tile += TILE_ELEMENTS) {
            int length = (int)(n - tile < TILE_ELEMENTS ? n - tile : TILE_ELEMENTS);
            format->view(piece.streams, tile, piece.values + tile, length);
        }
        memcpy(values + start, piece.values, (size_t)wanted * sizeof(float));
    }
    piece_free(&piece);
}

void* optim_weights(const Optim* optim) {
    return optim->copy.codes ? optim->copy.codes : optim->weights.codes;
}

void optim_decode(Optim* optim) {
    if (!optim->copy.codes) return;
    const FormatRow *weights = &optim->rows.weights->format, *copy = &compute_rows[optim->compute];
    if (optim->dev->gpu) {
        void* arguments[] = {&optim->weights, &optim->copy, &optim->elements};
        dim3 grid((unsigned)ceil_div(optim->elements, 256 * THREAD_ELEMENTS));
        check(cudaLaunchKernel(optim->rows.weights->decode[optim->compute], grid, dim3(256), arguments, 0,
                               optim->dev->stream));
        return;
    }
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < optim->tile_count; t++) {
        float x[TILE_ELEMENTS];
        int64_t first = (int64_t)optim->tiles[t].first * TILE_UNIT;
        weights->view(optim->weights, first, x, optim->tiles[t].units * TILE_UNIT);
        copy->set(optim->copy, first, x, optim->tiles[t].units * TILE_UNIT);
    }
}

// The step.

// base^exponent by squaring: products alone, so the same bits on every machine, which a library's pow does not promise.
static double power(double base, int64_t exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent /= 2, base *= base) {
        if (exponent % 2) result *= base;
    }
    return result;
}

static Hyper hyper_create(const OptimConfig* config, double lr, bool decay, int64_t step) {
    double beta1 = config->beta1, beta2 = config->beta2;
    Hyper hyper;
    hyper.keep = decay ? (float)(1.0 - lr * (double)config->weight_decay) : 1.0f;
    hyper.step_size = (float)(lr / (1.0 - power(beta1, step)));
    hyper.beta1 = config->beta1;
    hyper.rest1 = (float)(1.0 - beta1);
    hyper.beta2 = config->beta2;
    hyper.rest2 = (float)(1.0 - beta2);
    hyper.root2 = (float)(1.0 / sqrt(1.0 - power(beta2, step)));
    hyper.eps = config->eps;
    return hyper;
}

static void step_cpu(const Rows* rows, const StepArguments* arguments) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < arguments->tile_count; t++) {
        Tile tile = arguments->tiles[t];
        update_elements<TILE_ELEMENTS>(*rows->rule, rows->weights->format, *rows->grads, *rows->m, *rows->v, *arguments,
                                       arguments->group[tile.group], (int64_t)tile.first * TILE_UNIT,
                                       tile.units * TILE_UNIT);
    }
}

void optim_step(Optim* optim, const void* grads, const float* grad_scale, float lr, int64_t step) {
    StepArguments arguments;
    arguments.weights = optim->weights;
    arguments.grads = {(void*)grads, nullptr};
    arguments.m = optim->m;
    arguments.v = optim->v;
    arguments.grad_scale = grad_scale;
    arguments.tiles = optim->tiles;
    arguments.tile_count = optim->tile_count;
    arguments.seed = optim->config.seed;
    arguments.step = (uint32_t)step;
    for (int group = 0; group < STEP_GROUPS; group++) {
        arguments.group[group] = hyper_create(&optim->config, (double)lr, group == 1, step);
    }
    if (optim->tile_count == 0) return;
    int64_t grid = optim->tile_count < INT32_MAX ? optim->tile_count : INT32_MAX;
    void* pointers[] = {&arguments};
    if (!optim->dev->gpu) {
        step_cpu(&optim->rows, &arguments);
    } else if (optim->built_in) {
        check(cudaLaunchKernel(optim->built_in, dim3((unsigned)grid), dim3(STEP_THREADS), pointers, 0,
                               optim->dev->stream));
    } else {
        jit_launch(&optim->jit, grid, STEP_THREADS, pointers, optim->dev->stream);
    }
    optim_decode(optim);
}

// Streams.

int optim_stream_count(const Optim* optim) {
    return optim->stream_count;
}

OptimStream optim_stream(const Optim* optim, int index) {
    return optim->stream[index];
}

// Lists.

static void list_row(FILE* file, const FormatRow* row) {
    int block = row->stream[1].run > row->stream[0].run ? row->stream[1].run : row->stream[0].run;
    char blocks[32] = "-";
    if (block > 1) snprintf(blocks, sizeof(blocks), "%d", block);
    fprintf(file, "  %-12s %5d %6s %8.4g   %s\n", row->name, row->stream[0].bits, blocks, format_bytes_each(row),
            row->note);
}

static void list_heading(FILE* file, const char* option, const char* what) {
    fprintf(file, "%s: %s\n  %-12s %5s %6s %8s\n", option, what, "name", "bits", "block", "B/param");
}

void optim_list_formats(FILE* file) {
    list_heading(file, "--weights", "the parameters, and what keeps small updates alive");
    for (const WeightsRow& row : weights_rows) list_row(file, &row.format);
    list_heading(file, "--grads", "the gradients");
    for (const FormatRow& row : grads_rows) list_row(file, &row);
    list_heading(file, "--m, --v", "the first and the second moment");
    for (const FormatRow& row : state_rows) list_row(file, &row);
    fprintf(file, "--rule\n");
    for (const RuleRow& row : rule_rows) fprintf(file, "  %-12s %s\n", row.name, row.note);
}

void optim_list_presets(FILE* file) {
    fprintf(file, "  %-10s %-8s %-12s %-10s %-10s %8s\n", "--preset", "--rule", "--weights", "--m", "--v", "B/param");
    for (const PresetRow& row : preset_rows) {
        double each = format_bytes_each(&find(weights_rows, row.weights)->format) +
                      format_bytes_each(find(state_rows, row.m)) + format_bytes_each(find(state_rows, row.v));
        fprintf(file, "  %-10s %-8s %-12s %-10s %-10s %8.4g   %s\n", row.name, row.rule, row.weights, row.m, row.v,
                each, row.note);
    }
}
