// The kernels that are compiled ahead of time: those of the presets and of the tensors that a preset overrides, for
// both types of gradients; for weights in spans, also the measuring pass. They all follow from the rows of PRESETS
// (table.cuh). NVRTC compiles all other kernels on first use: other combinations, steps that write a copy of the
// weights, and on a GPU for which this file was not compiled, all of them.
#include <tuple>
#include <utility>

#include "kernel.cuh"
#include "measure.cuh"
#include "storage.h"
#include "table.cuh"

// The types of the tables' rows in order, followed by None, the type of a state that a rule does not keep.
#define RULE_TYPE(NAME, NOTE, SLOWER, ...) __VA_ARGS__,
#define STORAGE_TYPE(NAME, NOTE, ...) __VA_ARGS__,
typedef std::tuple<OPTIM_ALL_RULES(RULE_TYPE) None> RuleTypes;
typedef std::tuple<OPTIM_WEIGHTS(STORAGE_TYPE) None> WeightsTypes;
typedef std::tuple<OPTIM_STATES(STORAGE_TYPE) None> StateTypes;

// The type of row INDEX, or for -1 the last type.
template <class Types, int INDEX>
using TypeOf =
    typename std::tuple_element<(size_t)(INDEX >= 0 ? INDEX : (int)std::tuple_size<Types>::value - 1), Types>::type;

// Returns true if a text, up to its end, a space or a semicolon, is `name`.
constexpr bool same_name(const char* name, const char* text) {
    while (*name && *name == *text) name++, text++;
    return !*name && (!*text || *text == ' ' || *text == ';');
}

// Returns the index of a name in a table; -1 if there is none.
template <int COUNT>
constexpr int name_index(const char* const (&names)[COUNT], const char* text) {
    for (int i = 0; i < COUNT; i++) {
        if (same_name(names[i], text)) return i;
    }
    return -1;
}

// Returns the text after "weights=" in the overrides of a preset; null if they do not name weights.
constexpr const char* overriding_weights(const char* overrides) {
    const char key[] = "weights=";
    for (const char* at = overrides; *at; at++) {
        int i = 0;
        while (key[i] && at[i] == key[i]) i++;
        if (!key[i]) return at + i;
    }
    return nullptr;
}

// The rows and types of a preset or, if OVERRIDDEN, of the tensors that its overrides name.
template <int PRESET, bool OVERRIDDEN>
struct PresetTypes {
    static constexpr PresetRow ROW = PRESETS[PRESET];
    static constexpr const char* OTHER = overriding_weights(ROW.overrides);
    static constexpr int RULE = name_index(RULE_NAMES, ROW.rule);
    static constexpr int WEIGHTS = name_index(WEIGHTS_NAMES, OVERRIDDEN&& OTHER ? OTHER : ROW.weights);
    static constexpr int M = name_index(STATE_NAMES, ROW.m), V = name_index(STATE_NAMES, ROW.v);
    static_assert(RULE >= 0 && WEIGHTS >= 0 && M >= 0 && (V >= 0 || same_name(ROW.v, "none")),
                  "a preset names full names of rows of the tables");
    typedef TypeOf<RuleTypes, RULE> Rule;
    typedef TypeOf<WeightsTypes, WEIGHTS> Weights;
    typedef TypeOf<StateTypes, M> StateM;
    typedef std::conditional_t<Rule::ROWS != ROWS_NONE, NumbersOf<Rule>, TypeOf<StateTypes, V>> StateV;
};

struct BuiltInRow {
    int rule, weights, m, v;  // indices in the tables; v -1: none
    const void* kernel[2];    // with fp32 and bf16 gradients
    const void* measure[2];   // the pass before the step, with fp32 and bf16 gradients; null: there is none
};

typedef Elementwise<Fp32, NEAREST> Fp32s;
typedef Elementwise<Bf16, NEAREST> Bf16s;

// Returns the address of a kernel. Without CUDA, returns another address, so that the same combinations count as built
// in.
template <class Rule, class Weights, class M, class V, class Grads>
const void* step_kernel() {
#ifdef __CUDACC__
    return (const void*)optim_step_kernel<Rule, Weights, M, V, None, Grads>;
#else
    return PRESETS;
#endif
}

// Returns the kernel of the measuring pass; null for weights without spans.
template <class Types, class Grads>
const void* measure_kernel() {
    if constexpr (!Types::Weights::HAS_SPANS) return nullptr;
#ifdef __CUDACC__
    if constexpr (Types::Weights::HAS_SPANS) {
        return (const void*)optim_measure_kernel<typename Types::Rule, typename Types::Weights, typename Types::StateM,
                                                 typename Types::StateV, None, Grads>;
    }
#endif
    return PRESETS;
}

// Returns the row of a preset. A preset whose rule reads matrices has two rows, for its two steps (moment_rows and, as
// OVERRIDDEN, apply_rows). The tensors to which its overrides give another rule have the kernel of another preset.
template <int PRESET, bool OVERRIDDEN>
static BuiltInRow built_in_row() {
    typedef PresetTypes<PRESET, OVERRIDDEN> Types;
    typedef typename Types::Rule Rule;
    typedef typename Types::StateM M;
    typedef typename Types::StateV V;
    if constexpr (Rule::MATRIX == MATRIX_NONE) {
        typedef typename Types::Weights Weights;
        return {Types::RULE,
                Types::WEIGHTS,
                Types::M,
                Types::V,
                {step_kernel<Rule, Weights, M, V, Fp32s>(), step_kernel<Rule, Weights, M, V, Bf16s>()},
                {measure_kernel<Types, Fp32s>(), measure_kernel<Types, Bf16s>()}};
    } else if constexpr (!OVERRIDDEN) {
        BuiltInRow row = {Types::RULE, name_index(WEIGHTS_NAMES, "fp32"), Types::M, Types::V, {}, {}};
        row.kernel[0] = step_kernel<Rule, Fp32s, M, V, Fp32s>();
        if constexpr (Rule::MATRIX < MATRIX_GALORE) row.kernel[1] = step_kernel<Rule, Fp32s, M, V, Bf16s>();
        return row;
    } else {
        typedef typename PresetTypes<PRESET, false>::Weights Weights;
        return {
            -1, PresetTypes<PRESET, false>::WEIGHTS, -1, -1, {step_kernel<MatrixApply, Weights, None, None, Fp32s>()},
            {}};
    }
}

// Returns the index of a row in a table; -1 if it is not in the table.
template <class Row>
static int row_index(const Table<Row>& table, const Row* row) {
    for (int i = 0; i < table.count; i++) {
        if (row == &table.row[i]) return i;
    }
    return -1;
}

template <int... PRESET>
static const BuiltInRow* find_built_in(const Rows* rows, std::integer_sequence<int, PRESET...>) {
    static const BuiltInRow built_in[] = {built_in_row<PRESET, false>()..., built_in_row<PRESET, true>()...};
    for (const BuiltInRow& row : built_in) {
        const bool same = row.rule == row_index(rule_table(), rows->rule) &&
                          row.weights == row_index(weights_table(), rows->weights) &&
                          row.m == row_index(state_table(), rows->m) && row.v == row_index(state_table(), rows->v);
        if (same) return &row;
    }
    return nullptr;
}

static const BuiltInRow* built_in_row_of(const Rows* rows) {
    if (row_index(grads_table(), rows->grads) < 0) return nullptr;  // none
    return find_built_in(rows, std::make_integer_sequence<int, PRESET_COUNT>());
}

const void* built_in_kernel(const Rows* rows) {
    const BuiltInRow* row = built_in_row_of(rows);
    return row ? row->kernel[row_index(grads_table(), rows->grads)] : nullptr;
}

const void* built_in_measure(const Rows* rows) {
    const BuiltInRow* row = built_in_row_of(rows);
    return row ? row->measure[row_index(grads_table(), rows->grads)] : nullptr;
}
