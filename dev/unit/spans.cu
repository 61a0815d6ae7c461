// Tests of storages whose scales reach further than a tile: steps against plain loops over whole matrices, what an fp8
// copy keeps for a matmul, what is not finite, checkpoints in other formats, and the refusal of shards that cut a
// tensor. laws.cu has what holds of all formats.
#include "../../optim/constants.h"
#include "../../optim/kernel.cuh"
#include "apart.h"
#include "steps.h"

// Rows or columns that are no multiple of a thread's elements, one row, one column, several tiles, a vector's tail.
static const OptimTensor model[] = {{"wpe.weight", 3, 1001, true, 0},      {"ln_f.weight", 1, 300, false, 0},
                                    {"h.0.one.weight", 70, 1, true, 0},    {"h.0.small.weight", 37, 16, false, 0},
                                    {"h.0.mlp.weight", 130, 257, true, 0}, {"h.0.mlp.bias", 1, 5000, false, 0},
                                    {"h.0.wide.weight", 5, 4099, true, 0}, {"h.1.little.weight", 2, 2, false, 0}};
constexpr int TENSORS = sizeof(model) / sizeof(model[0]);

static OptimConfig spans_config(const char* weights, const char* m, const char* v) {
    return states_config("adamw", weights, "fp32", m, v);
}

static int64_t length(const OptimTensor* tensor) {
    return tensor->rows * tensor->cols;
}

// Formats by plain loops: levels, and codes as they lie in memory.

struct PlainFormat {
    const char* name;
    int bits, largest;
    bool root, tensor;  // one scale a tensor, of the absmax over `largest`; else rank-1
    float (*level)(uint32_t code);
};

template <class Format>
static float level(uint32_t code) {
    static typename Format::Table table;
    static bool ready = false;
    if constexpr (HAS_TABLE<Format>) {
        if (!ready) Format::fill(&table);
    }
    ready = true;
    float x = Format::decode(&table, code, 1.0f);
    return Format::ROOT ? sqrtf(x) : x;
}

static const PlainFormat plain[] = {
    {"e4m3/tensor", 8, 448, false, true, level<E4m3>}, {"e5m2/tensor", 8, 57344, false, true, level<E5m2>},
    {"dyn8/rank1", 8, 1, false, false, level<Dyn8>},   {"udyn8/rank1", 8, 1, false, false, level<Udyn8>},
    {"de4/rank1", 4, 1, false, false, level<De4>},     {"lin4/rank1", 4, 1, false, false, level<Lin4>},
    {"sqrt4/rank1", 4, 1, true, false, level<Sqrt4>}};

static const PlainFormat* find_plain(const char* name) {
    for (const PlainFormat& format : plain) {
        if (strncmp(name, format.name, strlen(format.name)) == 0) return &format;
    }
    return nullptr;
}

static int64_t numbers_of(const PlainFormat* format, const OptimTensor* tensor) {
    if (format->tensor) return 3;
    return tensor->rows > 1 ? tensor->rows + tensor->cols : (tensor->cols + 127) / 128;
}

// Returns the number that scales element i of a tensor, from the tensor's numbers.
static float scale_at(const PlainFormat* format, const OptimTensor* tensor, const float* numbers, int64_t i) {
    if (format->tensor) return numbers[0] / (float)format->largest;
    if (tensor->rows == 1) return format->root && numbers[i / 128] <= 0x1p-50f ? 0.0f : numbers[i / 128];
    float row = numbers[i / tensor->cols], col = numbers[tensor->rows + i % tensor->cols];
    float top = row < col ? row : col;
    return format->root && top <= 0x1p-50f ? 0.0f : top;  // the root of nothing
}

// Computes the numbers that scale `values`, by their definition.
static void plain_numbers(const PlainFormat* format, const OptimTensor* tensor, const float* values, float* numbers) {
    memset(numbers, 0, (size_t)numbers_of(format, tensor) * 4);
    for (int64_t i = 0; i < length(tensor); i++) {
        float x = fabsf(format->root ? sqrtf(values[i]) : values[i]);
        if (format->root && values[i] < 0x1p-100f) x = 0x1p-50f;
        float* to[2] = {numbers, numbers};
        if (!format->tensor && tensor->rows == 1) to[0] = to[1] = numbers + i / 128;
        if (!format->tensor && tensor->rows > 1)
            to[0] = numbers + i / tensor->cols, to[1] = numbers + tensor->rows + i % tensor->cols;
        for (float* each : to) *each = x > *each ? x : *each;
    }
    if (!format->tensor) return;
    numbers[1] = numbers[0] / (float)format->largest;
    numbers[2] = numbers[0] > 0.0f ? 1.0f / numbers[1] : 0.0f;
}

static uint32_t code_at(const PlainFormat* format, const uint8_t* codes, int64_t element) {
    if (format->bits == 8) return codes[element];
    return element % 2 ? codes[element / 2] & 15u : codes[element / 2] >> 4;
}

static float plain_decode(const PlainFormat* format, const uint8_t* codes, int64_t element, float scale) {
    float level = format->level(code_at(format, codes, element)), unit = scale / 16;
    return format->root ? 16 * level * (16 * level) * (unit * unit) : level * scale;  // sqrt4's squares, multiplied
}

// True if the stored code is that of a level nearest to x: none is closer, but for the rounding of x / scale, which
// with 4 bits is to a multiple of 2^-21.
static bool is_nearest(const PlainFormat* format, uint32_t code, float x, float scale, bool is_v) {
    double y = format->root ? sqrt((double)x) : (double)x, got, slack = format->bits == 4 ? 0x1p-21 : 0.0;
    if (scale == 0.0f) return true;
    y /= (double)scale;
    got = fabs((double)format->level(code) - y);
    for (uint32_t other = 0; other < 1u << format->bits; other++) {
        double at = (double)format->level(other);
        if (isnan(at) || fabs(at) > (double)format->largest || (is_v && at <= 0.0)) continue;
        if (fabs(at - y) < got - 1e-6 * fabs(y) - slack) return false;
    }
    return true;
}

// One slot of a run, as values of the arena by plain loops.
static void plain_slot(const OptimRun* run, const PlainFormat* format, const char* slot, float* values) {
    const char* name = formatted("%s.%s", slot, format->tensor ? "scales" : "maxima");
    uint8_t* codes = (uint8_t*)run_array(run, slot);
    float *numbers = (float*)run_array(run, name), *at = numbers;
    for (int t = 0; t < TENSORS; t++) {
        const OptimTensor* tensor = &run->tensor[t];
        for (int64_t i = 0; i < length(tensor); i++) {
            int64_t element = tensor->offset + i;
            values[element] = plain_decode(format, codes, element, scale_at(format, tensor, at, i));
        }
        at += numbers_of(format, tensor);
    }
}

// Stored against values: numbers equal, codes nearest.
static void check_slot(Test* test, const OptimRun* run, const PlainFormat* format, const char* slot,
                       const float* values, int step) {
    static float want[16384];
    const char* name = formatted("%s.%s", slot, format->tensor ? "scales" : "maxima");
    uint8_t* codes = (uint8_t*)run_array(run, slot);
    float *numbers = (float*)run_array(run, name), *at = numbers;
    bool is_v = is(slot, "v");
    for (int t = 0; t < TENSORS && codes && numbers; t++) {
        const OptimTensor* tensor = &run->tensor[t];
        int64_t count = numbers_of(format, tensor), wrong = 0, far = 0;
        plain_numbers(format, tensor, values + tensor->offset, want);
        for (int64_t i = 0; i < count; i++) wrong += want[i] != at[i];
        expect(wrong == 0, "%s %s step %d tensor %d: %lld of %lld numbers differ; the first %a, want %a", slot,
               format->name, step, t, (long long)wrong, (long long)count, (double)at[0], (double)want[0]);
        for (int64_t i = 0; i < length(tensor); i++) {
            float x = values[tensor->offset + i], scale = scale_at(format, tensor, at, i);
            uint32_t code = code_at(format, codes, tensor->offset + i);
            far += !is_nearest(format, code, x, scale, is_v);
            float back = plain_decode(format, codes, tensor->offset + i, scale);
            if (is_v && x > 0.0f && scale > 0.0f)
                expect(back > 0.0f, "%s: a v of %g decodes to zero", format->name, (double)x);
        }
        expect(far == 0, "%s %s step %d tensor %d: %lld codes are not the nearest", slot, format->name, step, t,
               (long long)far);
        at += count;
    }
    expect(codes && numbers, "%s %s: no such arrays", slot, name);
}

// Does the update of a step from the stored states and weights, by AdamW's own formula an element at a time.
static void plain_update(const OptimRun* run, int step, float* p, float* m, float* v) {
    Settings settings[2] = {{1.0, 0.0}, {1.0, (double)run->config.weight_decay}};
    for (int t = 0; t < TENSORS; t++) {
        Hyper hyper = hyper_create(&run->config, &settings[run->tensor[t].decay], (double)1e-2f, step);
        for (int64_t i = 0; i < length(&run->tensor[t]); i++) {
            int64_t element = run->tensor[t].offset + i;
            float g = run_gradient(&model[t], step, t, i, Steps()) * 0.5f, slow, root;
            EachElement<AdamW>::update(hyper, &p[element], &g, &m[element], &v[element], &slow, &root, 1);
        }
    }
}

TEST(spans_states_against_plain_loops) {
    const char* const pairs[][2] = {{"e4m3/tensor", "e5m2/tensor"}, {"e5m2/tensor", "e4m3/tensor"},
                                    {"de4/rank1", "lin4/rank1"},    {"dyn8/rank1", "udyn8/rank1"},
                                    {"e4m3/tensor", "sqrt4/rank1"}, {"dyn8/rank1", "lin4/rank1"}};
    constexpr int STEPS = 4;
    for (const auto& pair : pairs) {
        OptimConfig config = spans_config("fp32", pair[0], pair[1]);
        const PlainFormat *format_m = find_plain(pair[0]), *format_v = find_plain(pair[1]);
        OptimRun run;
        run_open(&run, &config, model, OPTIM_FP32);
        float* all = run.room.zeros<float>(run.elements * 2);
        float *m = all, *v = all + run.elements, *p = (float*)run_array(&run, "weights");
        for (int step = 1; step <= STEPS; step++) {
            plain_slot(&run, format_m, "m", m);
            plain_slot(&run, format_v, "v", v);
            plain_update(&run, step, p, m, v);
            run_steps(&run, step, step);
            float* weights = (float*)run_array(&run, "weights");
            expect(memcmp(weights, p, (size_t)run.elements * 4) == 0, "%s %s step %d: the weights", pair[0], pair[1],
                   step);
            check_slot(test, &run, format_m, "m", m, step);
            check_slot(test, &run, format_v, "v", v, step);
        }
    }
}

// Threads of a GPU take 8 or 16 elements, a core a whole tile: the same maxima and codes, wherever rows end.
TEST(spans_pieces_of_a_tile) {
    typedef Spans<De4, SPAN_RANK1, STOCHASTIC> Storage;
    static float x[TILE_ELEMENTS], back[2][TILE_ELEMENTS], now[8000], next[3][8000];
    static uint8_t codes[3][TILE_ELEMENTS / 2], table[Storage::TABLE_BYTES] __attribute__((aligned(16)));
    const int sizes[3] = {TILE_ELEMENTS, 16, 8};
    Storage::fill(table);
    const int64_t pieces[][2] = {{3, 1001}, {1500, 3}, {4000, 1}, {37, 117}, {2, 5000}, {1, 4000}};
    for (const auto& shape : pieces) {
        OptimTensor tensor = {"tensor", shape[0], shape[1], true, 0};
        SpanTile tile = span_tile(SPAN_RANK1, &tensor, TILE_ELEMENTS, 5);
        int64_t kept = length(&tensor) - TILE_ELEMENTS;
        memset(next, 0, sizeof(next));
        for (int64_t i = 0; i < TILE_ELEMENTS; i++) x[i] = i < kept ? gradient(1, i) : 0.0f;
        for (int k = 0; k < 3; k++) {
            Streams streams = {codes[k], now, table, nullptr, next[k], &tile};
            for (int i = 0; i < TILE_ELEMENTS; i += sizes[k]) Storage::measure(streams, i, x + i, sizes[k]);
            NoiseKey key = {1, 2, NOISE_M, TILE_ELEMENTS};
            for (int i = 0; i < TILE_ELEMENTS; i += sizes[k]) Storage::store(streams, i, x + i, sizes[k], key);
            streams.scales = next[k];
            float* to = back[k > 0];
            for (int i = 0; i < TILE_ELEMENTS; i += sizes[k]) Storage::load(streams, i, to + i, sizes[k], NoiseKey{});
            bool same =
                memcmp(next[k], next[0], sizeof(next[0])) == 0 && memcmp(codes[k], codes[0], sizeof(codes[0])) == 0;
            expect(same && memcmp(to, back[0], sizeof(back[0])) == 0, "%lld x %lld by %d", (long long)shape[0],
                   (long long)shape[1], sizes[k]);
        }
        int64_t zeros = 0;
        for (int64_t i = kept < 0 ? 0 : kept; i < TILE_ELEMENTS; i++) zeros += back[0][i] == 0.0f;
        expect(kept >= TILE_ELEMENTS || zeros == TILE_ELEMENTS - kept, "padding of %lld x %lld", (long long)shape[0],
               (long long)shape[1]);
    }
}

// NaN does not count, infinity is cut to the most, zeros are zeros, and no v above zero becomes zero.
template <class Storage>
static void check_edges(Test* test, const char* name) {
    constexpr int N = 64;
    SpanTile tile = {0, 4, 16, 0, 0, 1, 1};
    float x[N], back[N], now[20] = {}, next[20] = {};
    static uint8_t codes[N], table[65536] __attribute__((aligned(16)));
    if constexpr (Storage::TABLE_BYTES > 0) Storage::fill(table);
    Streams streams = {codes, now, table, nullptr, next, &tile};
    for (int i = 0; i < N; i++) x[i] = i / 16 == 2 ? 0.0f : ldexpf(1.0f + fabsf(test_uniform(3, i)), -(i * 37 % 100));
    x[5] = NAN;
    Storage::measure(streams, 0, x, N);
    for (float top : next) expect(top >= 0.0f && top <= 2.0f, "%s: a maximum is %g", name, (double)top);
    Storage::store(streams, 0, x, N, NoiseKey{1, 1, NOISE_V});
    memcpy(now, next, sizeof(now));
    Storage::load(streams, 0, back, N, NoiseKey{});
    bool rank1 = Storage::STREAM[1].span == SPAN_RANK1;
    for (int i = 0; i < N; i++) {
        if (i == 5) continue;
        if (i / 16 == 2 && rank1) expect(back[i] == 0.0f, "%s: zero %d becomes %g", name, i, (double)back[i]);
        if (i / 16 != 2) expect(back[i] > 0.0f, "%s: v %d becomes %g", name, i, (double)back[i]);
    }
    if constexpr (!Storage::SIGNED) return;
    x[7] = INFINITY;
    Storage::measure(streams, 0, x, N);
    Storage::store(streams, 0, x, N, NoiseKey{1, 1, NOISE_M});
    memcpy(now, next, sizeof(now));
    Storage::load(streams, 0, back, N, NoiseKey{});
    expect(back[7] > 4.1e37f && back[7] < 4.3e37f, "%s: infinity becomes %g", name, (double)back[7]);
    for (int i = 0; i < N; i++) expect(i == 5 || isfinite(back[i]), "%s: element %d is %g", name, i, (double)back[i]);
}

TEST(spans_edges) {
    check_edges<Spans<E4m3, SPAN_TENSOR, NEAREST>>(test, "e4m3/tensor");
    check_edges<Spans<E5m2, SPAN_TENSOR, STOCHASTIC>>(test, "e5m2/tensor:sr");
    check_edges<Spans<Dyn8, SPAN_RANK1, NEAREST>>(test, "dyn8/rank1");
    check_edges<Spans<De4, SPAN_RANK1, STOCHASTIC>>(test, "de4/rank1:sr");
    check_edges<Spans<Udyn8, SPAN_RANK1, STOCHASTIC>>(test, "udyn8/rank1:sr");
    check_edges<Spans<Lin4, SPAN_RANK1, NEAREST>>(test, "lin4/rank1");
    check_edges<Spans<Sqrt4, SPAN_RANK1, NEAREST>>(test, "sqrt4/rank1");
}

// The scale of an fp8 copy of fp32 weights is exact, of the new master, after steps as after the weights were set.
static void check_copy(Test* test, const OptimRun* run, const PlainFormat* format, int step) {
    float* master = (float*)run_array(run, "master");
    check_slot(test, run, format, "weights", master, step);
    float *numbers = (float*)run_array(run, "weights.scales"), *seen = run->room.host<float>(run->elements);
    uint8_t* codes = (uint8_t*)run_array(run, "weights");
    uint16_t* copy = run->room.host<uint16_t>(run->elements);
    copy_to_host(&run->dev, copy, optim_weights(run->optim), run->elements * 2);
    for (int t = 0; t < TENSORS; t++) {
        const OptimTensor* tensor = &run->tensor[t];
        const float* number = numbers + 3 * t;
        expect(number[1] == number[0] / (float)format->largest && number[2] == 1.0f / number[1], "%s: %a %a %a",
               format->name, (double)number[0], (double)number[1], (double)number[2]);
        optim_get_weights(run->optim, t, seen);
        int64_t wrong = 0;
        for (int64_t i = 0; i < length(tensor); i++) {
            float want = format->level(codes[tensor->offset + i]) * number[1];
            wrong += seen[i] != want || copy[tensor->offset + i] != Bf16::encode(want);
        }
        expect(wrong == 0, "%s step %d tensor %d: %lld weights are not code times scale", format->name, step, t,
               (long long)wrong);
    }
}

TEST(spans_weights_with_master) {
    for (const char* name : {"e4m3/tensor", "e5m2/tensor"}) {
        const char* weights = formatted("%s+fp32", name);
        OptimConfig narrow = spans_config(weights, "fp32", "bf16"), wide = spans_config("fp32", "fp32", "bf16");
        OptimRun run, exact;
        run_open(&run, &narrow, model, OPTIM_BF16);
        run_open(&exact, &wide, model, OPTIM_BF16);
        check_copy(test, &run, find_plain(name), 0);
        for (int step = 1; step <= 3; step++) {
            run_steps(&run, step, step);
            run_steps(&exact, step, step);
            check_copy(test, &run, find_plain(name), step);
            float *master = (float*)run_array(&run, "master"), *want = (float*)run_array(&exact, "weights");
            expect(memcmp(master, want, (size_t)run.elements * 4) == 0, "%s: the master is an fp32 run's", weights);
        }
    }
}

// A tensor after a step whose exact result is p, m and v: the scale is the least power of two that holds the largest of
// the new weights, its inverse lies beside it, and what is stored is one of the two levels around them, with
// e4m3/tensor the nearest; m has what the rounding changed, in units of an update, if it is fed back.
static void check_in_place(Test* test, const OptimRun* run, int t, int step, const float* number, const float* p,
                           const float* m, const float* v, const float* m_now) {
    static float seen[130 * 257];
    const char* name = run->config.weights;
    const Settings settings = {1.0, run->tensor[t].decay ? (double)run->config.weight_decay : 0.0};
    const Hyper hyper = hyper_create(&run->config, &settings, (double)1e-2f, step);
    const float unit = number[1], feedback = strstr(name, ":ef") ? hyper.feedback : 0.0f;
    float top = 0.0f;
    int exponent;
    int64_t far = 0, wrong = 0;
    optim_get_weights(run->optim, t, seen);
    for (int64_t i = 0; i < length(&run->tensor[t]); i++) {
        const float y = p[i] / unit;
        frexpf(fabsf(y) < 0x1p-6f ? 0x1p-6f : y, &exponent);
        const float level = ldexpf(1.0f, exponent - 4);  // from one to the next
        const double fed = (double)feedback * (sqrt((double)v[i]) * hyper.root2 + hyper.eps) * ((double)seen[i] - p[i]);
        top = fmaxf(top, fabsf(p[i]));
        far += !(fabsf(seen[i] / unit - y) <= (strchr(name, ':') ? level : level / 2));
        wrong += !(fabs(m_now[i] - (m[i] + fed)) <= 1e-6 * (fabs((double)m[i]) + fabs(fed)));
    }
    expect(frexpf(unit, &exponent) == 0.5f && number[2] == 1.0f / unit && top <= 448 * unit && top > 224 * unit,
           "%s step %d: a scale of %a, %a for %a", name, step, (double)unit, (double)number[2], (double)top);
    expect(top == number[0] && far == 0 && wrong == 0,
           "%s step %d tensor %d: largest %a, want %a; %lld weights and %lld of m are off", name, step, t,
           (double)number[0], (double)top, (long long)far, (long long)wrong);
}

// Weights that are updated in place. Those of the first tensor grow beyond what their first scale holds.
TEST(spans_weights_in_place) {
    for (const char* name : {"e4m3/tensor", "e4m3/tensor:sr", "e4m3/tensor:ef"}) {
        OptimConfig config = spans_config(name, "fp32", "fp32");
        OptimRun run;
        run_open(&run, &config, model, OPTIM_BF16);
        float *all = run.room.zeros<float>(run.elements * 3), first = 0.0f;
        float *p = all, *m = p + run.elements, *v = m + run.elements;
        for (int64_t i = 0; i < length(&model[0]); i++) p[i] = i % 2 ? 0.87f : -0.87f;
        optim_set_weights(run.optim, 0, p);
        for (int step = 1; step <= 3; step++) {
            float* before[2] = {(float*)run_array(&run, "m"), (float*)run_array(&run, "v")};
            for (int t = 0; t < TENSORS; t++) optim_get_weights(run.optim, t, p + run.tensor[t].offset);
            memcpy(m, before[0], (size_t)run.elements * 4), memcpy(v, before[1], (size_t)run.elements * 4);
            plain_update(&run, step, p, m, v);
            if (step == 1) first = ((float*)optim_codes(run.optim, 0).numbers)[1];
            run_steps(&run, step, step);
            float *numbers = (float*)run_array(&run, "weights.scales"), *m_now = (float*)run_array(&run, "m");
            for (int t = 0; t < TENSORS; t++) {
                const int64_t at = run.tensor[t].offset;
                check_in_place(test, &run, t, step, numbers + 3 * t, p + at, m + at, v + at, m_now + at);
            }
            if (step == 1) expect(numbers[1] == 2 * first, "%s: the scale stays %a", name, (double)first);
        }
    }
}

// From fp32 into the formats and back: numbers of the loaded values, the nearest codes, and what they decode to.
TEST(spans_convert) {
    OptimConfig wide = spans_config("fp32", "fp32", "fp32");
    OptimRun exact;
    run_open(&exact, &wide, model, OPTIM_FP32);
    run_steps(&exact, 1, 3);
    float *m = (float*)run_array(&exact, "m"), *v = (float*)run_array(&exact, "v"),
          *p = (float*)run_array(&exact, "weights");
    const char* const pairs[][2] = {{"e4m3/tensor", "e5m2/tensor:sr"},
                                    {"de4/rank1:sr", "lin4/rank1"},
                                    {"dyn8/rank1", "udyn8/rank1"},
                                    {"e5m2/tensor", "sqrt4/rank1"}};
    for (const auto& pair : pairs) {
        OptimConfig config = spans_config("e4m3/tensor+fp32", pair[0], pair[1]);
        const PlainFormat* const formats[2] = {find_plain(pair[0]), find_plain(pair[1])};
        OptimRun narrow, back;
        run_open(&narrow, &config, model, OPTIM_BF16);
        run_open(&back, &wide, model, OPTIM_FP32);
        expect_load(test, &narrow, &exact);
        check_slot(test, &narrow, formats[0], "m", m, 0);
        check_slot(test, &narrow, formats[1], "v", v, 0);
        check_slot(test, &narrow, find_plain("e4m3/tensor"), "weights", p, 0);
        check_copy(test, &narrow, find_plain("e4m3/tensor"), 0);
        expect_load(test, &back, &narrow);
        float *weights = (float*)run_array(&back, "weights"), *want = back.room.zeros<float>(back.elements);
        expect(memcmp(weights, p, (size_t)back.elements * 4) == 0, "the master was not lossless");
        for (int k = 0; k < 2; k++) {
            float* got = (float*)run_array(&back, k ? "v" : "m");
            memset(want, 0, (size_t)back.elements * 4);
            plain_slot(&narrow, formats[k], k ? "v" : "m", want);
            expect(memcmp(got, want, (size_t)back.elements * 4) == 0, "%s is not what fp32 holds of it", pair[k]);
        }
    }
}
