// Laws that hold of every combination of rule, weights, gradients, states and overrides: it allocates what it plans; a
// step whose factor is not finite changes nothing; padding keeps the code of zero; threads, shards, chunks of matrices
// and a resume do not change a bit; a GPU has the CPU's bits, whatever the gradients, but for products of whole
// matrices. A new format, rule or preset is tested here by its row in optim/table.cuh alone. What a step computes is
// tested in laws_oracle.cu, and more of a GPU in laws_gpu.cu.
#include <algorithm>

#include "../../optim/placed.h"
#include "laws.h"

typedef void Law(Test* test, const OptimConfig& config, int k, bool gpu);

constexpr int PARTS = 6;

// Tries a law on the first `count` configurations, with a cache of kernels of its own; on all of them, or on every
// sixth from `part` on: on a GPU all would take one process minutes.
static void try_law(Test* test, Law* law, bool gpu, int count, int part = -1) {
    const std::vector<OptimConfig>& all = every_config();
    const auto has = [=](int k) { return part < 0 || k % PARTS == part; };
    CacheFolder folder;
    int ran = 0;
    if (gpu)
        compile_all(
            test, all, [&](int k) { return k < count && has(k); }, compute_of);
    for (int k = 0; k < count && test->failures < 20; k++) {
        if (has(k)) law(test, all[k], k, gpu), ran++;
    }
    expect(ran > (part < 0 ? 100 : 60), "%d configurations", ran);
    note(test, "%d configurations", ran);
}

#define LAW(NAME)                                                                   \
    static void law_##NAME(Test* test, const OptimConfig& config, int k, bool gpu); \
    TEST(laws_##NAME) {                                                             \
        try_law(test, law_##NAME, false, (int)every_config().size());               \
    }                                                                               \
    static void law_##NAME(Test* test, const OptimConfig& config, [[maybe_unused]] int k, [[maybe_unused]] bool gpu)

static const char* names_of(const OptimConfig& config) {
    return formatted("%s %s %s %s", config.weights, config.m, config.v, config.overrides);
}

// The matmuls read the stored weights, rounded once to their type.
static void expect_copies(Test* test, const OptimRun* run, const char* what) {
    Room room(&run->dev);
    float* stored = room.host<float>(run->elements);
    const int64_t size = run->compute == OPTIM_FP32 ? 4 : 2;
    const char* seen = room.to_host((const char*)run->optim->seen, run->elements * size);
    for (int t = 0; t < run->count; t++) {
        int64_t wrong = 0, at = run->tensor[t].offset;
        optim_get_weights(run->optim, t, stored);
        for (int64_t i = 0; i < model[t].rows * model[t].cols; i++) {
            wrong += size == 4 ? ((const float*)seen)[at + i] != stored[i]
                               : ((const uint16_t*)seen)[at + i] != Bf16::encode(stored[i]);
        }
        expect(wrong == 0, "%s: %lld weights of %s are not their copies", what, (long long)wrong, model[t].name);
    }
}

// A step whose factor is NaN or infinite, then a resume from the streams. The steps after it are those of a run that
// was not interrupted, on the CPU where the bits are the same. Another seed changes what rounds stochastically or
// projects at random, and that alone.
LAW(resume) {
    const OptimType compute = compute_of(k);
    const bool products = gpu && reads_matrices(config);
    const char* what = describe(&config);
    OptimConfig reseeded = config;
    OptimRun whole, first, second, other;
    reseeded.seed++;
    for (OptimRun* run : {&whole, &first}) open(run, config, compute, products);
    open(&second, config, compute, gpu), open(&other, reseeded, compute, products);
    expect_planned(test, &second, what);
    run_steps(&whole, 1, 5), run_steps(&first, 1, 3), run_steps(&other, 1, 5);
    expect_load(test, &second, &first);
    expect_same(test, &first, &second, formatted("%s, loaded", what));
    for (float factor : {NAN, INFINITY, -INFINITY}) {
        Steps how;
        how.factor = factor;
        run_steps(&second, 4, 4, how);
        expect_same(test, &first, &second, formatted("%s, a factor of %g", what, (double)factor));
    }
    run_steps(&second, 4, 5);
    expect_same(test, &whole, &second, formatted("%s, resumed", what));
    expect_copies(test, &second, what);
    expect(difference(&whole, &first), "%s: nothing moves", what);
    const bool draws = strstr(names_of(config), ":sr") || strstr(names_of(config), ":ef") ||
                       is_low_rank(find_row(rule_table(), config.rule));
    expect((difference(&whole, &other) != nullptr) == draws, "%s: another seed", what);
}

// A GPU keeps that law, and has the CPU's bits after many steps, of which one has gradients that are not finite.
static void law_gpu(Test* test, const OptimConfig& config, int k, bool) {
    Steps wildly;
    wildly.wild = true;
    law_resume(test, config, k, true);
    if (reads_matrices(config)) return;
    expect_equal_cpu_gpu(test, &config, model, model_count(config), compute_of(k), 20);
    expect_equal_cpu_gpu(test, &config, model, model_count(config), OPTIM_BF16, 4, wildly);
}

// The cases laws_1_gpu to laws_6_gpu have a part of the configurations each.
static void laws_of_part(Test* test) {
    if (!jit_available()) skip("libnvrtc was not found");
    try_law(test, law_gpu, true, (int)every_config().size(), test->name[5] - '1');
}

static Test* add_parts() {
    static Test cases[PARTS];
    static char names[PARTS][16];
    for (int i = 0; i < PARTS; i++) {
        snprintf(names[i], sizeof(names[i]), "laws_%d_gpu", i + 1);
        cases[i].name = names[i], cases[i].run = laws_of_part;
        TestRegistration registered(&cases[i]);
    }
    return cases;
}
static const Test* const parts = add_parts();

// Padding of the weights, and of moments in fp32 and bf16, keeps the bytes that it began with; the copy has zeros
// there. Everything else moves. One thread and five compute the same.
LAW(padding_and_threads) {
    const int threads = omp_get_max_threads();
    const char* what = describe(&config);
    OptimRun fresh, run;
    open(&run, config, OPTIM_FP32), open(&fresh, config, OPTIM_FP32);
    omp_set_num_threads(1), run_steps(&run, 1, 3);
    for (int s = 0; s < run.optim->stream_count; s++) {
        OptimStream stream = run.optim->stream[s], begin = fresh.optim->stream[s];
        const int64_t bytes = stream.elements * stream.element_bytes, bits = 8 * bytes / run.elements;
        const bool wide = is(stream.dtype, "F32") || is(stream.dtype, "BF16") || is(stream.dtype, "F16");
        const bool whole = !*config.overrides || is(config.overrides, "none");  // the arena's layout
        if ((!stream.is_weights && !wide) || !whole || bits < 4 || bits * run.elements != 8 * bytes) continue;
        const char *now = (const char*)stream.data, *before = (const char*)begin.data;
        int64_t wrong = 0;
        for (int t = 0; t < run.count; t++) {
            const int64_t used = run.tensor[t].offset + model[t].rows * model[t].cols;
            const int64_t end = run.tensor[t].offset + tensor_padded(&run.tensor[t]);
            for (int64_t b = ceil_div(used * bits, 8); b < end * bits / 8; b++) wrong += now[b] != before[b];
        }
        expect(wrong == 0, "%s: %lld bytes of %s's padding", what, (long long)wrong, stream.name);
        expect(memcmp(now, before, (size_t)bytes) != 0, "%s: %s stands still", what, stream.name);
    }
    const float* seen = (const float*)run.optim->seen;
    for (int t = 0; t < run.count; t++) {
        int64_t i = run.tensor[t].offset + model[t].rows * model[t].cols, wrong = 0;
        for (; i < run.tensor[t].offset + tensor_padded(&run.tensor[t]); i++) wrong += seen[i] != 0.0f;
        expect(wrong == 0, "%s: padding of %s is read", what, model[t].name);
    }
    omp_set_num_threads(5), run_steps(&fresh, 1, 3), omp_set_num_threads(threads);
    expect_same(test, &run, &fresh, formatted("%s, other threads", what));
}

// Shards are the whole's parts, for cuts between tensors, and within them where the formats allow it; the last cut
// leaves a shard without elements. On a GPU, without the last loop's configurations.
static void law_shards(Test* test, const OptimConfig& config, int k, bool gpu) {
    const int tiles[][4] = {{1, 7, 12, 16}, {2, 3, 4, 9}, {5, 6, 10, 18}};
    const OptimType compute = compute_of(k);
    OptimRun whole, shard[6];
    open(&whole, config, compute, gpu && reads_matrices(config));
    run_steps(&whole, 1, 3);
    const bool whole_tensors = in_spans(names_of(config));
    for (int c = 0; c < 3; c++) {
        int64_t cut[6] = {0};
        for (int i = 0; i < 4; i++)
            cut[i + 1] = whole_tensors ? whole.tensor[tiles[c][i] % whole.count].offset : tiles[c][i] * TILE_ELEMENTS;
        cut[5] = whole.elements;
        std::sort(cut + 1, cut + 5);
        cuts_allow(&config, whole.tensor, whole.count, cut, 6);
        int count = 0;
        for (int i = 0; i < 5; i++) {
            if (cut[i] == cut[i + 1] && i < 4) continue;
            open(&shard[count], shard_config(config, cut[i], cut[i + 1]), compute, gpu);
            run_steps(&shard[count++], 1, 3);
        }
        expect_joined(test, &whole, shard, count, describe(&config));
        if (k >= listed() || reads_matrices(config)) break;
    }
}

TEST_BOTH(laws_shards) {
    try_law(test, law_shards, gpu, gpu ? listed() : (int)every_config().size());
}

// No bit depends on how many matrices are taken at a time: all, a few tensors or one.
static void law_chunks(Test* test, const OptimConfig& config, int, bool gpu) {
    OptimConfig chunks = config;
    OptimRun whole, parts;
    Steps how;
    how.bad = 3;
    if (!reads_matrices(config)) return;
    open(&whole, config, OPTIM_FP32, gpu), run_steps(&whole, 1, 4, how);
    for (const int64_t tiles : {1, 4}) {
        chunks.matrix_chunk = tiles * TILE_ELEMENTS;
        open(&parts, chunks, OPTIM_FP32, gpu), run_steps(&parts, 1, 4, how);
        expect_same(test, &whole, &parts, formatted("%s, chunks of %d tiles", describe(&config), (int)tiles));
        expect_planned(test, &parts, config.rule);
        const Optim* its = parts.optim;
        MatrixPlan plan = matrix_plan(its->dev, its->plan, 0, its->tensors, its->count);
        expect(plan.chunks > 1, "%s: one chunk of %lld tiles", config.rule, (long long)tiles);
        matrix_plan_free(&plan);
    }
}

JIT_BOTH(laws_chunks) {
    try_law(test, law_chunks, gpu, listed());
}

// Numbers of spans are the largest magnitudes of what they scale, by plain loops.
static void expect_numbers(Test* test, const OptimRun* run, const char* slot, const float* values, const char* what) {
    const char* name = formatted("%s.%s", slot, strstr(what, "rank1") ? "maxima" : "scales");
    const float* numbers = (const float*)run_array(run, name);
    const bool rank1 = is(name + strlen(slot), ".maxima");
    for (int t = 0; t < run->count && numbers; t++) {
        const OptimTensor& tensor = run->tensor[t];
        std::vector<float> want((size_t)(rank1 && tensor.rows > 1 ? tensor.rows + tensor.cols
                                         : rank1                  ? (tensor.cols + 127) / 128
                                                                  : 1));
        for (int64_t i = 0; i < tensor.rows * tensor.cols; i++) {
            const float x = fabsf(values[tensor.offset + i]);
            float* first = &want[rank1 ? tensor.rows > 1 ? i / tensor.cols : i / 128 : 0];
            float* second = rank1 && tensor.rows > 1 ? &want[tensor.rows + i % tensor.cols] : first;
            *first = fmaxf(*first, x), *second = fmaxf(*second, x);
        }
        expect(memcmp(numbers, want.data(), want.size() * 4) == 0, "%s, %s of %s: %a, want %a", what, name, tensor.name,
               (double)numbers[0], (double)want[0]);
        numbers += rank1 ? (int64_t)want.size() : 3;
    }
}

// Gives the codes of padding in v to another run. They are the least level; a step decodes and encodes them as it does
// its elements, and a load encodes zeros. Both are the least level again unless a block's scale halves in a step, as
// powers of two do: then twice the least level is nearer to the next one, in formats whose first levels lie so close.
static void give_padding(Test* test, const OptimRun* from, OptimRun* to) {
    const int64_t bits = find_state(to->config.v)->stream[0].bits;
    const char* codes = (const char*)optim_stream_named(from->optim, "v").data;
    char* others = (char*)optim_stream_named(to->optim, "v").data;
    for (int t = 0; t < to->count; t++) {
        const OptimTensor& tensor = to->tensor[t];
        for (int64_t i = tensor.rows * tensor.cols; i < tensor_padded(&tensor); i++) {
            const int64_t at = (tensor.offset + i) * bits / 8;
            const int mask = bits == 8 ? 255 : i % 2 ? 15 : 240, unit = mask & -mask;
            expect(abs((codes[at] & mask) - (others[at] & mask)) <= unit, "%s: padding is not of the two least levels",
                   to->config.v);
            others[at] = (char)((codes[at] & mask) | (others[at] & ~mask));
        }
    }
}

// A step in a format that rounds to nearest is a step in fp32 of what it holds, rounded to the format: from an fp32 run
// that is loaded from it and stepped, it is loaded again.
static void check_narrow(Test* test, const char* weights, const char* m, const char* v, const char* overrides = "") {
    OptimConfig narrow = states_config("adamw", weights, "fp32", m, v),
                wide = states_config("adamw", "fp32", "fp32", "fp32", "fp32");
    const char* what = formatted("%s, m %s, v %s", weights, m, v);
    OptimRun run, exact, again;
    narrow.overrides = overrides, narrow = resolved(narrow);
    open(&run, narrow, OPTIM_BF16);
    for (int step = 1; step <= 3; step++) {
        open(&exact, wide, OPTIM_BF16), open(&again, narrow, OPTIM_BF16);
        expect_load(test, &exact, &run);
        for (OptimRun* each : {&run, &exact}) run_steps(each, step, step);
        expect_load(test, &again, &exact);
        if (strstr(v, "@e8m0")) give_padding(test, &run, &again);
        expect_same(test, &run, &again, formatted("%s, step %d", what, step));
    }
    const float *m_now = (const float*)run_array(&exact, "m"), *p = (const float*)run_array(&exact, "weights");
    if (in_spans(m)) expect_numbers(test, &run, "m", m_now, m);
    if (in_spans(v) && !strstr(v, "sqrt")) expect_numbers(test, &run, "v", (const float*)run_array(&exact, "v"), v);
    if (in_spans(weights) && strstr(weights, "+fp32")) expect_numbers(test, &run, "weights", p, weights);
}

TEST(laws_narrow) {
    for (const char* name : STATE_NAMES) {
        const bool usual = *find_row(state_table(), name)->note || strchr(name, '@') || strstr(name, "/2048");
        if (usual && !strstr(name, ":sr")) check_narrow(test, "fp32", serves_m(name) ? name : "fp32", name);
    }
    for (const char* name : WEIGHTS_NAMES) {
        if (!strstr(name, ":sr") && !strstr(name, ":ef")) check_narrow(test, name, "fp32", "fp32");
    }
    check_narrow(test, "fp32", "bf16", "bf16", "wpe|ln*: m=fp32 v=fp32");
    check_narrow(test, "e4m3", "fp32", "fp32", "ln*: weights=bf16+fp32; wpe: weights=bf16+8 m=bf16; *.bias: m=dyn8");
}

// Formats by tensor have arrays of their own, whose elements are those of the tensors.
TEST(laws_override_arrays) {
    OptimConfig config = states_config("adamw", "bf16", "fp32", "bf16", "bf16");
    config.overrides = "wpe|ln*: m=fp32 v=fp32; *.bias: weights=bf16+fp32", config = resolved(config);
    OptimRun run;
    open(&run, config, OPTIM_BF16);
    int64_t wide = 0, master = 0;
    for (int t = 0; t < run.count; t++) {
        const bool named = strncmp(model[t].name, "wpe", 3) == 0 || strstr(model[t].name, "ln_");
        wide += named ? tensor_padded(&run.tensor[t]) : 0;
        master += strstr(model[t].name, ".bias") ? tensor_padded(&run.tensor[t]) : 0;
    }
    const OptimStream m = optim_stream_named(run.optim, "m.1[wpe|ln*]"),
                      v = optim_stream_named(run.optim, "v.1[wpe|ln*]");
    expect(m.elements == wide && v.elements == wide && is(m.dtype, "F32"), "%lld of %lld", (long long)m.elements,
           (long long)wide);
    int64_t found = 0;
    for (int s = 0; s < run.optim->stream_count; s++) {
        const OptimStream stream = run.optim->stream[s];
        found += strstr(stream.name, "master") ? stream.elements : 0;
    }
    expect(found == master && master > 0, "masters of %lld elements, want %lld", (long long)found, (long long)master);
}
