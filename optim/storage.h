// The files of optim/ share this beside optim.h: rows of the tables, and what an optimizer holds.
#pragma once
#include "formats/storage.cuh"
#include "formats/spans.cuh"
#include "names.h"
#include "optim.h"
#include "rules/hyper.cuh"

// A storage of weights, gradients or a moment, by function pointers; update_elements takes it on the CPU.
struct FormatRow : StorageDefaults {
    static constexpr bool HAS_SPANS = true, FEEDS_BACK = true;  // some do
    const char* name;
    const char* note;
    const char* type;      // the type as NVRTC is told it
    StreamInfo stream[3];  // codes, extra and more; arrays that do not exist have no bits
    void (*load)(const Streams& streams, int first, float* x, int n, const NoiseKey& key);
    void (*store)(const Streams& streams, int first, const float* x, int n, const NoiseKey& key);
    void (*set)(const Streams& streams, int first, const float* x, int n);
    void (*view)(const Streams& streams, int first, float* x, int n);
    void (*measure)(const Streams& streams, int first, const float* x, int n);  // does nothing without spans
    int table_bytes;  // of constants that the format looks up, which fill makes
    void (*fill)(void* table);
    bool has_sign;
    bool feeds_back;        // the rounding error of these weights goes into m
    const void* decode[2];  // of weights: optim_decode_kernel into each OptimType
    const void* set_tiles;  // of weights: optim_set_kernel; null with spans
    const char* source;     // of the user's own formats: their text for NVRTC; such a row has no functions
};

struct RuleRow {
    static constexpr bool adaptive = false;  // roots of v are kept for GPUs only
    const char* name;
    const char* note;
    const char* type;
    bool keeps_v, keeps_slow;
    bool by_rows;       // v is made of numbers for rows or rows and columns; keeps_v is then false
    RowRule rows;       // what the passes of rows.cuh sum up; ROWS_NONE: nothing
    bool pairs;         // v has a second number
    bool has_momentum;  // m decays by the configuration's momentum, which is then the launch's beta1
    bool leaves_rest;   // vectors and embeddings have adamw unless --override says otherwise
    bool decoupled;     // the decay does not pass through the gradient
    bool divides;       // the update divides by the root of v
    MatrixRule matrix;  // not MATRIX_NONE: the rule reads whole matrices, and a step has three parts (matrix/matrix.h)
    double slower;      // adamw's usual learning rate over this rule's
    float (*fold)(const Hyper& hyper);  // with which m may take gradients before the step; 0: it may not
    void (*update)(const Hyper& hyper, float* p, const float* g, float* m, float* v, float* slow, float* root, int n);
};

struct PresetRow;

// The tables (table.cuh).
Table<RuleRow> rule_table();
Table<FormatRow> weights_table();
Table<FormatRow> grads_table();
Table<FormatRow> state_table();
Table<PresetRow> preset_table();
const RuleRow* matrix_apply_row();                  // the second step of a rule that reads matrices
const FormatRow* none_row();                        // for a state that a rule does not keep
const FormatRow* numbers_row(const RuleRow* rule);  // the v of a rule that reads rows
const FormatRow* norms_row();                       // what --limit-growth keeps
const FormatRow* compute_row(OptimType compute);    // the type that the matmuls read

// The rule of a resolved configuration.
inline const RuleRow* rule_of(const OptimConfig* config) {
    return find_row(rule_table(), config->rule);
}

// One of the three arrays of a storage.
inline void* stream_data(const Streams* streams, int index) {
    return index == 0 ? streams->codes : index == 1 ? streams->extra : streams->more;
}

// The rows that a resolved configuration names. A moment may be in a format of the user's own.
struct Rows {
    const RuleRow* rule;
    const FormatRow *weights, *grads, *m, *v;
};
Rows config_rows(const OptimConfig* config);

// True if the matmuls read the codes as they are.
inline bool serves_directly(const FormatRow* weights, OptimType compute) {
    return strcmp(weights->stream[0].dtype, compute_row(compute)->stream[0].dtype) == 0;
}

// The text of the user's own formats, which NVRTC reads behind the optimizer's source; "" if a combination has none.
const char* user_source(const Rows* rows);

// The row of a moment's format, "none" and the user's own included; null if there is none of this name.
const FormatRow* find_state(const OptimConfig* config, const char* name);

// True if a rule reads more than an element, so that no tensor of it may be cut between shards.
bool reads_whole(const RuleRow* rule);

// True if the scales of a storage need a pass before the step that computes the update.
bool measured(const FormatRow* format);

// True if a launch's step reads whole tensors, and all of them, by its rule, for its formats' scales or for
// --limit-growth.
bool config_reads_whole(const OptimConfig* config);
// True if its update does. The formats, some of which measure whole tensors, do not count here.
bool update_reads_whole(const OptimConfig* config);

// The storages of the two steps of a rule that reads matrices: from the gradient to its direction, which takes the
// weights' place in fp32; and from the update, which takes the gradient's place, to the weights.
Rows moment_rows(const Rows* rows);
// True for a rule whose moments are those of a projected gradient, which takes the place of the gradient.
bool is_low_rank(const RuleRow* rule);
Rows apply_rows(const Rows* rows);
// The rows of the kernel that takes the gradients of a micro-batch into m (rules/fold.cuh).
Rows fold_rows(const Rows* rows);

// The kernel of a combination without a copy that was compiled ahead of time; null if it was not.
const void* built_in_kernel(const Rows* rows);
// The kernel of the pass before the step; null if it was not. It is the same with and without a copy.
const void* built_in_measure(const Rows* rows);

// Bytes of weights or of a moment for each parameter; the numbers of spans, a few for each tensor, are left out.
double format_bytes_each(const FormatRow* format);

// Checks that a resolved configuration's rule and m can take the rounding error of its weights, if these give it back
// (:ef); false and a sentence otherwise. `overridden`: weights or m are what --override asks for.
bool optim_feedback_fits(const OptimConfig* config, bool overridden, char* error);

// Checks that the rule of a launch goes with its v and with the run's --decay-mode; false and a sentence otherwise.
// `run` is the configuration without overrides.
bool optim_rule_fits(const OptimConfig* launch, const OptimConfig* run, char* error);

// The span of the numbers that a storage has beside its codes, if it has such.
Span format_span(const FormatRow* format);

// True if weights are stored as codes of e4m3 with one scale a tensor, as fp8 products read them.
bool format_is_operand(const FormatRow* weights);

// The count of these numbers for a tensor; and where those of its elements from `first` on, a multiple of a tile, lie
// in an array in which the tensor's begin at `at`.
int64_t span_numbers(Span span, const OptimTensor* tensor);
SpanTile span_tile(Span span, const OptimTensor* tensor, int64_t first, int64_t at);
// Returns how many numbers of a tensor the step reads: those of columns are padded and in another order (rows.cuh).
int64_t ready_numbers(Span span, const OptimTensor* tensor);

// The numbers that a step uses, and those that it makes, which replace them unless the step changed nothing.
struct Settle {
    float *now, *next;  // (count), device memory
    int64_t count;
    const struct ArenaRun* run;  // whose tensors they belong to
    Span span;
};
void spans_settle(const Device* dev, const Settle* settle, const float* grad_scale);

// These do not change during an optimizer's life.
struct Plan;
struct OptimParts {
    const Device* dev;
    const OptimConfig* config;
    const Plan* plan;
    const OptimTensor* tensors;  // (count)
    int count;
};
OptimParts optim_parts(const Optim* optim);

// Some tiles of a launch, and where the arena of their gradients would begin.
struct TileRun {
    int launch;
    Streams grads;
    int64_t first, tiles;  // of the launch's list
};
// The step of these tiles, and the same of what takes their gradients into m (optim_fold_tensors, whose `number` this
// is). A tensor's step ends once all its tiles are stepped.
void optim_step_tiles(const Optim* optim, const TileRun* run, const float* grad_scale, float lr, int64_t step);
void optim_fold_tiles(const Optim* optim, const TileRun* run, const float* grad_scale, int64_t step, int number);
void optim_settle_tensor(const Optim* optim, int tensor, const float* grad_scale);

// The states of a launch that its step reads and writes: m, v, and the slow average of rules that keep one.
constexpr int OPTIM_KEPT = 3;
const Streams* optim_kept(const Optim* optim, int launch);  // from the first element of the launch's run on
// Tells a launch where its next steps find these states. The arrays' addresses are those that they would have if they
// began at the arena's first element.
void optim_kept_at(Optim* optim, int launch, const Streams (&at)[OPTIM_KEPT]);

// The arrays of weights that contain a tensor's, in device memory.
Streams weights_arrays(const Optim* optim, int tensor);
