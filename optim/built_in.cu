// The kernels that are compiled ahead of time: those of the presets, of the tensors that a preset overrides, and of
// both kinds of gradient; with weights in spans, the pass before the step as well. All of it follows from the rows of
// PRESETS (table.cuh); NVRTC compiles every other combination when it is first asked for.
#include <utility>

#include "kernel.cuh"
#include "measure.cuh"
#include "storage.h"
#include "table.cuh"

// The type of a row, by its index in the table. Each expansion of a row counts __COUNTER__ up by one.
template <int INDEX>
struct RuleType;
template <int INDEX>
struct WeightsType;
template <int INDEX>
struct StateType;

constexpr int RULE_BASE = __COUNTER__ + 1;
#define RULE_TYPE(NAME, NOTE, SLOWER, TYPE)    \
    template <>                                \
    struct RuleType<__COUNTER__ - RULE_BASE> { \
        typedef TYPE Type;                     \
    };
OPTIM_ALL_RULES(RULE_TYPE)
constexpr int WEIGHTS_BASE = __COUNTER__ + 1;
#define WEIGHTS_TYPE(NAME, NOTE, ...)                \
    template <>                                      \
    struct WeightsType<__COUNTER__ - WEIGHTS_BASE> { \
        typedef __VA_ARGS__ Type;                    \
    };
OPTIM_WEIGHTS(WEIGHTS_TYPE)
constexpr int STATE_BASE = __COUNTER__ + 1;
#define STATE_TYPE(NAME, NOTE, ...)              \
    template <>                                  \
    struct StateType<__COUNTER__ - STATE_BASE> { \
        typedef __VA_ARGS__ Type;                \
    };
OPTIM_STATES(STATE_TYPE)

// A state that the rule does not keep.
template <>
struct StateType<-1> {
    typedef None Type;
};

// The v of a preset's rule.
template <class Rule, int V, bool BY_ROWS = Rule::ROWS != ROWS_NONE>
struct StateVType : StateType<V> {};
template <class Rule, int V>
struct StateVType<Rule, V, true> {
    typedef NumbersOf<Rule> Type;
};

// Compares `name` with a text up to its end, a space or a semicolon.
constexpr bool same_name(const char* name, const char* text) {
    while (*name && *name == *text) name++, text++;
    return !*name && (!*text || *text == ' ' || *text == ';');
}

// The index of a name in a table; -1 if there is none.
template <int COUNT>
constexpr int name_index(const char* const (&names)[COUNT], const char* text) {
    for (int i = 0; i < COUNT; i++) {
        if (same_name(names[i], text)) return i;
    }
    return -1;
}

// Returns the text behind "weights=" in the overrides of a preset; null if they do not name weights.
constexpr const char* overriding_weights(const char* overrides) {
    const char key[] = "weights=";
    for (const char* at = overrides; *at; at++) {
        int i = 0;
        while (key[i] && at[i] == key[i]) i++;
        if (!key[i]) return at + i;
    }
    return nullptr;
}

// The rows and types of a preset, or of the tensors that its overrides name.
template <int PRESET, bool OVERRIDDEN>
struct PresetTypes {
    static constexpr PresetRow ROW = PRESETS[PRESET];
    static constexpr const char* OTHER = overriding_weights(ROW.overrides);
    static constexpr int RULE = name_index(RULE_NAMES, ROW.rule);
    static constexpr int WEIGHTS = name_index(WEIGHTS_NAMES, OVERRIDDEN&& OTHER ? OTHER : ROW.weights);
    static constexpr int M = name_index(STATE_NAMES, ROW.m), V = name_index(STATE_NAMES, ROW.v);
    static_assert(RULE >= 0 && WEIGHTS >= 0 && M >= 0 && (V >= 0 || same_name(ROW.v, "none")),
                  "a preset names full names of rows of the tables");
    typedef typename RuleType<RULE>::Type Rule;
    typedef typename WeightsType<WEIGHTS>::Type Weights;
    typedef typename StateType<M>::Type StateM;
    typedef typename StateVType<Rule, V>::Type StateV;
};

struct BuiltInRow {
    int rule, weights, m, v;   // indices in the tables; v -1: none
    const void* kernel[2][2];  // without and with a bf16 copy, with fp32 and bf16 gradients
    const void* measure[2];    // the pass before the step, with fp32 and bf16 gradients; null: there is none
};

// The address of a kernel; without CUDA something in its place, so that the same combinations count as built in.
template <class Types, class Copy>
const void* step_kernel([[maybe_unused]] bool bf16_gradients) {
#ifdef __CUDACC__
    typedef Elementwise<Fp32, NEAREST> Fp32s;
    typedef Elementwise<Bf16, NEAREST> Bf16s;
    return bf16_gradients ? (const void*)optim_step_kernel<typename Types::Rule, typename Types::Weights,
                                                           typename Types::StateM, typename Types::StateV, Copy, Bf16s>
                          : (const void*)optim_step_kernel<typename Types::Rule, typename Types::Weights,
                                                           typename Types::StateM, typename Types::StateV, Copy, Fp32s>;
#else
    return PRESETS;
#endif
}

// The pass before the step; null for weights without spans.
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

// A preset whose rule reads matrices has the kernels of its two steps (moment_rows, apply_rows). The tensors that its
// overrides give another rule have the kernel of another preset.
template <class Types, class Grads>
const void* moment_kernel() {
#ifdef __CUDACC__
    return (const void*)optim_step_kernel<typename Types::Rule, Elementwise<Fp32, NEAREST>, typename Types::StateM,
                                          typename Types::StateV, None, Grads>;
#else
    return PRESETS;
#endif
}

template <class Weights, class Copy>
const void* apply_kernel() {
#ifdef __CUDACC__
    return (const void*)optim_step_kernel<MatrixApply, Weights, None, None, Copy, Elementwise<Fp32, NEAREST>>;
#else
    return PRESETS;
#endif
}

// The matmuls read weights that are stored as bf16 as they are, so these never have a copy.
template <class Weights>
constexpr bool is_copied = !same_name("BF16", Weights::STREAM[0].dtype);

template <int PRESET, bool OVERRIDDEN>
static BuiltInRow built_in_row() {
    typedef PresetTypes<PRESET, OVERRIDDEN> Types;
    if constexpr (Types::Rule::MATRIX == MATRIX_NONE) {
        BuiltInRow row = {Types::RULE, Types::WEIGHTS, Types::M, Types::V, {}, {}};
        row.measure[0] = measure_kernel<Types, Elementwise<Fp32, NEAREST>>();
        row.measure[1] = measure_kernel<Types, Elementwise<Bf16, NEAREST>>();
        for (int grads = 0; grads < 2; grads++) {
            row.kernel[0][grads] = step_kernel<Types, None>(grads == 1);
            if constexpr (is_copied<typename Types::Weights>) {
                row.kernel[1][grads] = step_kernel<Types, Elementwise<Bf16, NEAREST>>(grads == 1);
            }
        }
        return row;
    } else if constexpr (!OVERRIDDEN) {
        BuiltInRow row = {Types::RULE, name_index(WEIGHTS_NAMES, "fp32"), Types::M, Types::V, {}, {}};
        row.kernel[0][0] = moment_kernel<Types, Elementwise<Fp32, NEAREST>>();
        if constexpr (Types::Rule::MATRIX < MATRIX_GALORE) {
            row.kernel[0][1] = moment_kernel<Types, Elementwise<Bf16, NEAREST>>();
        }
        return row;
    } else {
        typedef typename PresetTypes<PRESET, false>::Weights Weights;
        BuiltInRow row = {-1, PresetTypes<PRESET, false>::WEIGHTS, -1, -1, {}, {}};
        row.kernel[0][0] = apply_kernel<Weights, None>();
        if constexpr (is_copied<Weights>) row.kernel[1][0] = apply_kernel<Weights, Elementwise<Bf16, NEAREST>>();
        return row;
    }
}

// The index of a row in its table; -1 if it is in none.
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
    if (rows->m->source || rows->v->source) return nullptr;  // the user's own
    return find_built_in(rows, std::make_integer_sequence<int, PRESET_COUNT>());
}

const void* built_in_kernel(const Rows* rows, bool copy) {
    const BuiltInRow* row = built_in_row_of(rows);
    return row ? row->kernel[copy][row_index(grads_table(), rows->grads)] : nullptr;
}

const void* built_in_measure(const Rows* rows) {
    const BuiltInRow* row = built_in_row_of(rows);
    return row ? row->measure[row_index(grads_table(), rows->grads)] : nullptr;
}
