// Makes the rows of the tables (table.cuh) for the host: names, function pointers and the constants of the types.
#include <assert.h>

#include "kernel.cuh"
#include "names.h"
#include "storage.h"
#include "table.cuh"

// Returns a row without its functions.
template <class T>
static FormatRow constants_row(const char* name, const char* note, const char* type) {
    FormatRow row = {};
    row.name = name, row.note = note, row.type = type;
    for (int i = 0; i < 3; i++) row.stream[i] = T::STREAM[i];
    row.measure = T::measure;
    row.table_bytes = T::TABLE_BYTES, row.fill = T::fill;
    row.has_sign = T::SIGNED, row.feeds_back = T::FEEDS_BACK;
    return row;
}

template <class T>
static FormatRow format_row(const char* name, const char* note, const char* type) {
    FormatRow row = constants_row<T>(name, note, type);
    row.row_load = [](const FormatRow&, const Streams& streams, int first, float* x, int n, const NoiseKey& key) {
        T::load(streams, first, x, n, key);
    };
    row.row_store = [](const FormatRow&, const Streams& streams, int first, const float* x, int n,
                       const NoiseKey& key) { T::store(streams, first, x, n, key); };
    return row;
}

// Returns a row that can also be written and seen from outside.
template <class T>
static FormatRow weights_row(const char* name, const char* note, const char* type) {
    FormatRow row = format_row<T>(name, note, type);
    row.set = T::set, row.view = T::view;
#ifdef __CUDACC__
    row.decode[0] = (const void*)optim_decode_kernel<T, Elementwise<Fp32, NEAREST>>;
    row.decode[1] = (const void*)optim_decode_kernel<T, Elementwise<Bf16, NEAREST>>;
#endif
    return row;
}

// The rows of the formats of states. Those in blocks are made here, one for each block, scale and rounding.
struct StateRows {
    FormatRow row[320];
    int count;
};

static FormatRow* add_row(StateRows* rows, const FormatRow& row) {
    assert(rows->count < (int)(sizeof(rows->row) / sizeof(rows->row[0])));
    rows->row[rows->count] = row;
    return &rows->row[rows->count++];
}

// Adds the row of a storage in blocks of `block` elements, whose scales are called `scale` after an @.
template <class Format, class Scale, Rounding ROUNDING>
static void add_block(StateRows* rows, const char* base, int block, const char* scale, const char* note,
                      const char* format) {
    typedef Blocks<Format, 32, Scale, ROUNDING> Storage;  // whose functions take another block
    const bool noisy = ROUNDING == STOCHASTIC;
    const char* name = text_format("%s/%d%s%s", base, block, scale, noisy ? ":sr" : "");
    const char* type = SAME_TYPE<Scale, ScaleFp32> ? "Fp32" : SAME_TYPE<Scale, ScaleE8m0> ? "E8m0" : "Dq8";
    type = text_kept("Blocks<%s, %d, Scale%s, %s>", format, block, type, noisy ? "STOCHASTIC" : "NEAREST");
    FormatRow* row = add_row(rows, constants_row<Storage>(name, noisy ? "" : note, type));
    row->stream[1].run = block;
    row->row_load = [](const FormatRow& self, const Streams& streams, int first, float* x, int n, const NoiseKey& key) {
        load_blocks<Storage>(self.stream[1].run, streams, first, x, n, key);
    };
    row->row_store = [](const FormatRow& self, const Streams& streams, int first, const float* x, int n,
                        const NoiseKey& key) { store_blocks<Storage>(self.stream[1].run, streams, first, x, n, key); };
}

template <class Format, class Scale>
static void add_rounded(StateRows* rows, const char* base, int block, const char* scale, const char* note,
                        const char* format) {
    add_block<Format, Scale, NEAREST>(rows, base, block, scale, note, format);
    add_block<Format, Scale, STOCHASTIC>(rows, base, block, scale, note, format);
}

template <class Format>
static void add_blocks(StateRows* rows, const char* base, const char* note, const char* format, int usual) {
    const int blocks[] = {usual, 32, 64, 128, 256, 512, 1024, 2048};
    for (int i = 0; i < 8; i++) {
        if (i > 0 && blocks[i] == usual) continue;
        add_rounded<Format, ScaleFp32>(rows, base, blocks[i], "", i == 0 ? note : "", format);
    }
    add_rounded<Format, ScaleE8m0>(rows, base, usual, "@e8m0", "", format);
}

template <class T>
constexpr RuleRow rule_row(const char* name, const char* note, double slower, const char* type) {
    return {.name = name,
            .note = note,
            .type = type,
            .keeps_v = T::KEEPS_V,
            .keeps_slow = T::KEEPS_SLOW,
            .by_rows = T::BY_ROWS,
            .rows = T::ROWS,
            .pairs = T::PAIRS,
            .has_momentum = T::HAS_MOMENTUM,
            .leaves_vectors_to_adamw = T::HAS_MOMENTUM || T::MATRIX != MATRIX_NONE,
            .decoupled = T::DECOUPLED,
            .grows = T::GROWS,
            .divides_by_root_v = T::DIVIDES_BY_ROOT_V,
            .matrix = T::MATRIX,
            .slower = slower,
            .update = EachElement<T>::update};
}

template <class Row, int COUNT>
constexpr Table<Row> table_of(const Row (&rows)[COUNT]) {
    return {rows, COUNT};
}

#define FORMAT_ROW(NAME, NOTE, ...) format_row<__VA_ARGS__>(NAME, NOTE, #__VA_ARGS__),
#define WEIGHTS_ROW(NAME, NOTE, ...) weights_row<__VA_ARGS__>(NAME, NOTE, #__VA_ARGS__),
#define RULE_ROW(NAME, NOTE, SLOWER, TYPE) rule_row<TYPE>(NAME, NOTE, SLOWER, #TYPE),

Table<RuleRow> rule_table() {
    static const RuleRow rows[] = {OPTIM_ALL_RULES(RULE_ROW)};
    return table_of(rows);
}

Table<FormatRow> weights_table() {
    static const FormatRow rows[] = {OPTIM_WEIGHTS(WEIGHTS_ROW)};
    return table_of(rows);
}

Table<FormatRow> grads_table() {
    static const FormatRow rows[] = {OPTIM_GRADS(FORMAT_ROW)};
    return table_of(rows);
}

#define STATE_ROW(NAME, NOTE, ...) add_row(rows, format_row<__VA_ARGS__>(NAME, NOTE, #__VA_ARGS__));
#define STATE_BLOCKS(NAME, NOTE, FORMAT, BLOCK) add_blocks<FORMAT>(rows, NAME, NOTE, #FORMAT, BLOCK);
#define STATE_DOUBLED(NAME, NOTE, FORMAT, BLOCK) \
    add_rounded<FORMAT, ScaleDq8>(rows, NAME, BLOCK, "@dq8", NOTE, #FORMAT);

static const StateRows* state_rows_create() {
    StateRows* rows = (StateRows*)memory_zero(1, sizeof(StateRows));
    OPTIM_STATES(STATE_ROW, STATE_BLOCKS, STATE_DOUBLED)
    return rows;
}

Table<FormatRow> state_table() {
    static const StateRows* rows = state_rows_create();
    return {rows->row, rows->count};
}

// Makes the table before any call of the library, since a call that ends early frees what it has taken.
[[maybe_unused]] static const int made_when_loaded = state_table().count;

Table<PresetRow> preset_table() {
    return table_of(PRESETS);
}

const FormatRow* none_row() {
    static const FormatRow row = format_row<None>("none", "", "None");
    return &row;
}

// Returns the row of numbers of rows, columns or tensors, which a checkpoint keeps if `kept`. Only a conversion loads
// them, as the v that they stand for.
static FormatRow span_row(const char* name, Span span, bool kept) {
    FormatRow row = format_row<None>(name, "", "None");
    row.stream[1] = {"", "F32", kept ? 32 : 0, 1, false, span};
    row.row_load = [](const FormatRow& self, const Streams& streams, int first, float* x, int n, const NoiseKey&) {
        const RowInput rows = {(const float*)streams.scales, streams.span};
        numbers_finish(numbers_start(self.stream[1].span, rows, first, x, n, false), x, n);
    };
    return row;
}

const FormatRow* numbers_row(const RuleRow* rule) {
    static const FormatRow moments = span_row("fp32/row", SPAN_ROWS, true),  // the step reads a row's new v
        scales = span_row("none", SPAN_SCALES, false),                       // a factor for each row
        scaled_v = span_row("fp32/row", SPAN_SCALES, true),                  // the same, made of a v for each row
        factors = span_row("fp32/row+column", SPAN_FACTORS, true),           // factors of rows and columns, of r and c
        pairs = span_row("fp32/row+column", SPAN_PAIRS, true);               // two of each, of came's r, c, R and C
    const Span span = numbers_span(rule->rows);
    if (span == SPAN_SCALES) return rule->rows == ROWS_RMNP ? &scales : &scaled_v;
    return span == SPAN_FACTORS ? &factors : span == SPAN_PAIRS ? &pairs : &moments;
}

const FormatRow* norms_row() {
    static const FormatRow row = span_row("fp32/tensor", SPAN_NORM, true);
    return &row;
}

const FormatRow* compute_row(OptimType compute) {
    static const char* const names[] = {"fp32", "bf16", "fp16"};
    return find_row(weights_table(), names[compute]);
}

const FormatRow* find_state(const char* name) {
    if (name && strcmp(name, none_row()->name) == 0) return none_row();
    return find_row(state_table(), name);
}

Rows config_rows(const OptimConfig* config) {
    Rows rows = {rule_of(config), find_row(weights_table(), config->weights), find_row(grads_table(), config->grads),
                 find_state(config->m), find_state(config->v)};
    if (!rows.rule || !rows.weights || !rows.grads || !rows.m || !rows.v) {
        user_error("the optimizer's configuration was not resolved: optim_resolve comes before any other call");
    }
    if (rows.rule->by_rows) rows.v = numbers_row(rows.rule);
    return rows;
}

bool reads_whole(const RuleRow* rule) {
    return rule->by_rows || rule->matrix != MATRIX_NONE;
}

bool is_low_rank(const RuleRow* rule) {
    return rule->matrix >= MATRIX_GALORE;
}

Rows moment_rows(const Rows* rows) {
    const FormatRow* grads = is_low_rank(rows->rule) ? find_row(grads_table(), "fp32") : rows->grads;
    return {rows->rule, find_row(weights_table(), "fp32"), grads, rows->m, rows->rule->by_rows ? none_row() : rows->v};
}

Rows apply_rows(const Rows* rows) {
    static const RuleRow row = rule_row<MatrixApply>("apply", "", 1, "MatrixApply");
    return {&row, rows->weights, find_row(grads_table(), "fp32"), none_row(), none_row()};
}
