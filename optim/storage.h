// The files of optim/ share these declarations beside optim.h: the rows of the tables, and functions about rows.
// Nothing here allocates; rows live as long as the process.
#pragma once
#include "formats/none.cuh"
#include "formats/spans.cuh"
#include "names.h"
#include "optim.h"
#include "rules/hyper.cuh"

// A storage of weights, gradients or a moment, known at run time. On the CPU, update_elements takes it as a storage;
// for a GPU the functions of None only let it compile.
struct FormatRow : StorageFunctions<None> {
    static constexpr bool HAS_SPANS = true, FEEDS_BACK = true;  // some rows have these properties
    const char* name;
    const char* note;
    const char* type;      // the C++ type, for NVRTC
    StreamInfo stream[3];  // codes, scales and third; arrays that do not exist have no bits
    // The functions of the storage (formats/storage.cuh). The first two get the row: functions of a format in blocks
    // read the block and the scale's type there. Only rows of weights have set and view; measure does nothing without
    // spans.
    void (*row_load)(const FormatRow& row, const Streams& streams, int first, float* x, int n, const NoiseKey& key);
    void (*row_store)(const FormatRow& row, const Streams& streams, int first, const float* x, int n,
                      const NoiseKey& key);
    void (*set)(const Streams& streams, int first, const float* x, int n);
    void (*view)(const Streams& streams, int first, float* x, int n);
    void (*measure)(const Streams& streams, int first, const float* x, int n);
    int table_bytes;  // of the constants that the format looks up; fill makes them
    void (*fill)(void* table);
    bool has_sign;
    bool feeds_back;        // the rounding error of these weights goes into m
    const void* decode[2];  // of weights: optim_decode_kernel to each OptimType; null without CUDA

    OPTIM_INLINE void load(const Streams& streams, int first, float* x, int n, const NoiseKey& key) const {
        row_load(*this, streams, first, x, n, key);
    }
    OPTIM_INLINE void store(const Streams& streams, int first, const float* x, int n, const NoiseKey& key) const {
        row_store(*this, streams, first, x, n, key);
    }
};

struct RuleRow {
    static constexpr bool keeps_roots = false;  // only GPUs keep the roots of v
    const char* name;
    const char* note;
    const char* type;
    bool keeps_v, keeps_slow;
    bool by_rows;                  // v is made of numbers of rows, or of rows and columns; keeps_v is then false
    RowRule rows;                  // the sums that the passes of rows.cuh make; ROWS_NONE: there are no passes
    bool pairs;                    // v has a second number
    bool has_momentum;             // m decays by OptimConfig.momentum, which becomes the launch's beta1
    bool leaves_vectors_to_adamw;  // vectors and embeddings get adamw by an override (NON_MATRIX_TENSORS in override.h)
    bool decoupled;                // the decay does not pass through the gradient
    bool grows;                    // the update starts at 0, as m does
    bool divides_by_root_v;        // the update divides by the root of v
    MatrixRule matrix;  // not MATRIX_NONE: the rule reads whole matrices, and a step has three parts (matrix/matrix.h)
    double slower;      // adamw's usual learning rate over this rule's
    void (*update)(const Hyper& hyper, float* p, const float* g, float* m, float* v, float* slow, float* root, int n);
};

struct PresetRow;

// The tables (table.cuh).
Table<RuleRow> rule_table();
Table<FormatRow> weights_table();
Table<FormatRow> grads_table();
Table<FormatRow> state_table();
Table<PresetRow> preset_table();
const FormatRow* none_row();                        // of a state that the rule does not keep
const FormatRow* numbers_row(const RuleRow* rule);  // the v of rules that read rows
const FormatRow* norms_row();                       // the norms that --limit-growth keeps
const FormatRow* compute_row(OptimType compute);    // the type that the matmuls read

// Returns the rule of a resolved configuration.
inline const RuleRow* rule_of(const OptimConfig* config) {
    return find_row(rule_table(), config->rule);
}

// Returns true if the rule reads --adafactor-lr, and that is `kind` ("relative" or "scaled") or both.
inline bool has_adafactor_lr(const OptimConfig* config, const char* kind) {
    const RowRule rows = rule_of(config)->rows;
    return (rows == ROWS_ADAFACTOR || is_package(rows)) &&
           (strcmp(config->adafactor_lr, kind) == 0 || strcmp(config->adafactor_lr, "paper") == 0);
}

// Returns array 0, 1 or 2 of a storage.
inline void* stream_data(const Streams* streams, int index) {
    return index == 0 ? streams->codes : index == 1 ? streams->scales : streams->third;
}

// The rows that a resolved configuration names. config_rows exits with a sentence if the configuration is not resolved.
struct Rows {
    const RuleRow* rule;
    const FormatRow *weights, *grads, *m, *v;
};
Rows config_rows(const OptimConfig* config);

// Returns true if the matmuls can read the codes as they are stored.
inline bool serves_directly(const FormatRow* weights, OptimType compute) {
    return strcmp(weights->stream[0].dtype, compute_row(compute)->stream[0].dtype) == 0;
}

// Returns the row of a moment's format, "none" included; null if the name is unknown.
const FormatRow* find_state(const char* name);

// Returns true if a rule reads rows or matrices, so that no tensor of it may be cut between shards.
bool reads_whole(const RuleRow* rule);

// Returns true if the scales of a storage need a pass before the step that measures the update (persistent.cuh).
bool measured(const FormatRow* format);

// Returns true if a launch's step reads whole tensors: because of its rule, its formats' scales or --limit-growth. Such
// a step takes all tensors of the launch.
bool config_reads_whole(const OptimConfig* config);
// Returns true if the update itself does, because of the rule or --limit-growth; the formats' scales do not count here.
bool update_reads_whole(const OptimConfig* config);

// Return the rows of the two steps of a rule that reads matrices. moment_rows: from the gradient to the direction,
// which is in fp32 and takes the weights' place. apply_rows: from the update, which takes the gradient's place, to the
// weights.
Rows moment_rows(const Rows* rows);
Rows apply_rows(const Rows* rows);
// Returns true for a rule that keeps moments of a projected gradient; the projection takes the gradient's place.
bool is_low_rank(const RuleRow* rule);

// Returns the bytes of weights or of a moment for each parameter, without the few numbers for each tensor that spans
// have.
double format_bytes_each(const FormatRow* format);

// Checks that a resolved configuration's rule and m can take the rounding error of its weights, if these feed it back
// (:ef). Returns false with a sentence otherwise. `overridden`: weights or m come from --override, which the sentence
// then names.
bool optim_feedback_fits(const OptimConfig* config, bool overridden, char* error);

// Checks that the rule of a launch fits its m and v, --limit-growth and the run's --decay-mode. Returns false with a
// sentence otherwise. `run` is the configuration without overrides.
bool optim_rule_fits(const OptimConfig* launch, const OptimConfig* run, char* error);

// Returns true if eps keeps a rule from a division by 0: it divides by the root of a v, or of numbers in its place.
inline bool divides_by_eps(const RuleRow* rule) {
    return rule->keeps_v || (rule->by_rows && rule->rows != ROWS_RMNP);
}

// Returns the weights of fp16 parameters in place of those that presets and callers name for bf16: fp16+fp32 where
// these have more bits beside bf16, fp16 for bf16, else fp16:sr. Weights that are `typed` and not bf16's stay.
const char* weights_of_fp16(const char* name, bool typed);

// Checks the ranges of all options of rules. Returns false with a sentence that names the option.
bool optim_options_fit(const OptimConfig* config, char* error);

// Returns the span of a storage's second array; SPAN_RUN if `format` is null.
Span format_span(const FormatRow* format);

// Returns true if weights are stored as codes of e4m3 with one scale a tensor and no master, so that fp8 products can
// read them.
bool format_is_operand(const FormatRow* weights);

// span_numbers returns how many numbers of this span a tensor has. span_tile returns the place of a tile among them:
// the tile begins at element `first` of the tensor, and the tensor's numbers begin at `at` in their array. It exits
// with a sentence if a tensor has too many rows or columns.
int64_t span_numbers(Span span, const OptimTensor* tensor);
SpanTile span_tile(Span span, const OptimTensor* tensor, int64_t first, int64_t at);
// Returns how many numbers of a tensor the step reads. Numbers of columns are padded there, and in another order
// (rows.cuh).
int64_t ready_numbers(Span span, const OptimTensor* tensor);
