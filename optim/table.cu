// Makes the rows of the tables (table.cuh) for the host: names, function pointers and the constants of the types.
#include "kernel.cuh"
#include "names.h"
#include "storage.h"
#include "table.cuh"

template <class T>
constexpr FormatRow format_row(const char* name, const char* note, const char* type) {
    FormatRow row = {};
    row.name = name, row.note = note, row.type = type;
    for (int i = 0; i < 3; i++) row.stream[i] = T::STREAM[i];
    row.load = T::load, row.store = T::store, row.set = T::set, row.view = T::view, row.measure = T::measure;
    row.table_bytes = T::TABLE_BYTES, row.fill = T::fill;
    row.has_sign = T::SIGNED, row.feeds_back = T::FEEDS_BACK;
    return row;
}

template <class T>
static FormatRow weights_row(const char* name, const char* note, const char* type) {
    FormatRow row = format_row<T>(name, note, type);
#ifdef __CUDACC__
    row.decode[0] = (const void*)optim_decode_kernel<T, Elementwise<Fp32, NEAREST>>;
    row.decode[1] = (const void*)optim_decode_kernel<T, Elementwise<Bf16, NEAREST>>;
    if constexpr (!T::HAS_SPANS) row.set_tiles = (const void*)optim_set_kernel<T>;
#endif
    return row;
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
            .leaves_rest = T::HAS_MOMENTUM || T::MATRIX != MATRIX_NONE,
            .decoupled = T::DECOUPLED,
            .divides = T::ADAPTIVE,
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

Table<FormatRow> state_table() {
    static const FormatRow rows[] = {OPTIM_STATES(FORMAT_ROW)};
    return table_of(rows);
}

Table<PresetRow> preset_table() {
    return table_of(PRESETS);
}

static const RuleRow* matrix_apply_row() {
    static const RuleRow row = rule_row<MatrixApply>("apply", "", 1, "MatrixApply");
    return &row;
}

const FormatRow* none_row() {
    static const FormatRow row = format_row<None>("none", "", "None");
    return &row;
}

const FormatRow* numbers_row(const RuleRow* rule) {
    static const FormatRow moments = format_row<RowMoments>("fp32/row", "", "RowMoments"),
                           scales = format_row<RowScales>("none", "", "RowScales"),
                           scaled_v = format_row<RowScaledV>("fp32/row", "", "RowScaledV"),
                           factors = format_row<RowFactors>("fp32/row+column", "", "RowFactors"),
                           pairs = format_row<RowPairs>("fp32/row+column", "", "RowPairs");
    const Span span = numbers_span(rule->rows);
    if (span == SPAN_SCALES) return rule->rows == ROWS_RMNP ? &scales : &scaled_v;
    return span == SPAN_FACTORS ? &factors : span == SPAN_PAIRS ? &pairs : &moments;
}

const FormatRow* norms_row() {
    static const FormatRow row = format_row<TensorNorms>("fp32/tensor", "", "TensorNorms");
    return &row;
}

const FormatRow* compute_row(OptimType compute) {
    static const FormatRow rows[] = {format_row<Elementwise<Fp32, NEAREST>>("fp32", "", ""),
                                     format_row<Elementwise<Bf16, NEAREST>>("bf16", "", "Elementwise<Bf16, NEAREST>")};
    return &rows[compute];
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
    return {matrix_apply_row(), rows->weights, find_row(grads_table(), "fp32"), none_row(), none_row()};
}
