// Tests of optim_load: what a checkpoint stores in one format comes into an optimizer of another as that format's
// nearest store has it, what is stored alike comes back to the bit wherever it lies, and what cannot be is refused.
// Checkpoints are optimizers in host memory here; commands.txt has those of files.
#include "../../optim/made.h"
#include "steps.h"

constexpr int TENSORS = 4;

// `long_tensor`: elements of the third tensor, in columns of one row.
static void model_open(OptimRun* run, const OptimConfig* config, int64_t long_tensor, bool gpu = false) {
    const OptimTensor model[TENSORS] = {{"wpe.weight", 1, 2500, true, 0},
                                        {"h.0.ln_1.weight", 1, 33, false, 0},
                                        {"h.0.attn.c_attn.weight", 1, long_tensor, true, 0},
                                        {"ln_f.bias", 1, 4097, false, 0}};
    run_open(run, config, model, TENSORS, OPTIM_FP32, gpu);
}

// These encode and decode a slot of a tensor, padding included, by the row's own functions.

static void* table_of(const OptimRun* f, const FormatRow* format) {
    if (format->table_bytes == 0) return nullptr;
    void* table = f->room.host<char>(format->table_bytes);
    format->fill(table);
    return table;
}

static ArrayRef find_place(const OptimRun* f, int tensor, Slot slot) {
    return plan_array_ref(f->optim->plan, tensor, slot);
}

static Streams place_streams(const OptimRun* f, int tensor, Slot slot) {
    const ArrayRef place = find_place(f, tensor, slot);
    void* data[3] = {};
    for (int i = 0; i < 3; i++) {
        char* array = (char*)optim_array(f->optim, tensor, slot, i);
        if (array) data[i] = array + array_bytes(&place, i).begin;
    }
    return {data[0], data[1], table_of(f, place.format), data[2]};
}

// Returns the properties that decide how a slot's zeros are stored.
static NoiseKey slot_key(const OptimRun* f, int tensor, Slot slot) {
    const uint32_t noise[SLOTS] = {NOISE_WEIGHTS, NOISE_M, NOISE_V, NOISE_SLOW};
    return {0, 0, noise[slot], f->tensor[tensor].offset};
}

// Returns the values that the update reads, in memory that goes with the run. Padding counts as zero.
static float* slot_values(const OptimRun* f, int tensor, Slot slot) {
    ArrayRef place = find_place(f, tensor, slot);
    Streams streams = place_streams(f, tensor, slot);
    int64_t padded = tensor_padded(&f->tensor[tensor]);
    float* values = f->room.host<float>(padded);
    for (int64_t i = 0; i < padded; i += TILE_ELEMENTS)
        place.format->load(streams, (int)i, values + i, TILE_ELEMENTS, slot_key(f, tensor, slot));
    for (int64_t i = f->tensor[tensor].cols; i < padded; i++) values[i] = 0.0f;
    return values;
}

// True if the slot's arrays hold these bytes: those of `values` stored to nearest.
static bool holds_nearest(const OptimRun* f, int tensor, Slot slot, const float* values) {
    ArrayRef place = find_place(f, tensor, slot);
    Streams there = place_streams(f, tensor, slot), want = there;
    int64_t padded = tensor_padded(&f->tensor[tensor]);
    void** to[3] = {&want.codes, &want.scales, &want.third};
    void *const from[3] = {there.codes, there.scales, there.third}, *table = table_of(f, place.nearest);
    if (slot != SLOT_WEIGHTS) want.table = table;
    for (int i = 0; i < 3; i++) *to[i] = f->room.zeros<char>(stream_bytes(place.format->stream[i], padded));
    for (int64_t i = 0; i < padded; i += TILE_ELEMENTS) {
        if (slot == SLOT_WEIGHTS) place.format->set(want, i, values + i, TILE_ELEMENTS);
        if (slot == SLOT_WEIGHTS) continue;
        place.nearest->store(want, (int)i, values + i, TILE_ELEMENTS, slot_key(f, tensor, slot));
    }
    bool same = true;
    for (int i = 0; i < 3; i++) {
        int64_t bytes = stream_bytes(place.format->stream[i], padded);
        same = same && (bytes == 0 || memcmp(*to[i], from[i], (size_t)bytes) == 0);
    }
    return same;
}

static void expect_converted(Test* test, const OptimRun* to, const OptimRun* from, Slot slot) {
    for (int t = 0; t < TENSORS; t++) {
        float* values = slot_values(from, t, slot);
        expect(holds_nearest(to, t, slot, values), "%s of %s, %s in %s and %s here", slot_name(slot),
               from->tensor[t].name, find_place(from, t, slot).format->name, "the checkpoint",
               find_place(to, t, slot).format->name);
    }
}

// Elements of `slot` that differ between a and b, of all tensors; as values.
static int64_t differing(const OptimRun* a, const OptimRun* b, Slot slot) {
    int64_t count = 0;
    for (int t = 0; t < TENSORS; t++) {
        float *x = slot_values(a, t, slot), *y = slot_values(b, t, slot);
        for (int64_t i = 0; i < a->tensor[t].cols; i++) count += memcmp(&x[i], &y[i], 4) != 0;
    }
    return count;
}

// True if values of the format may move when they are stored again. A block's largest may come back smaller, and its
// scale with it: dyn8 and de4 have no -1, and a scale rounded up to 8 bits leaves the largest a level
// below the last. adalog8's scale is the logarithm of a level, which is rounded.
static bool may_move(const char* name) {
    return strncmp(name, "dyn8", 4) == 0 || strncmp(name, "de4", 3) == 0 || strstr(name, "@dq8") ||
           strncmp(name, "adalog8", 7) == 0;
}

// Every state format from fp32 and back to fp32, in m (where it has a sign) and v, and into the format again.
TEST(convert_states) {
    OptimConfig wide = states_config("adamw", "bf16+fp32", "fp32", "fp32", "fp32");
    OptimRun exact;
    model_open(&exact, &wide, 3000);
    run_steps(&exact, 1, 3);
    for (const char* name : STATE_NAMES) {
        if (in_spans(name)) continue;
        OptimConfig config = states_config("adamw", "bf16+fp32", "fp32", serves_m(name) ? name : "bf16", name);
        OptimRun narrow, back, again;
        model_open(&narrow, &config, 3000);
        model_open(&back, &wide, 3000);
        model_open(&again, &config, 3000);
        expect_load(test, &narrow, &exact);
        expect_load(test, &back, &narrow);
        expect_load(test, &again, &back);
        int64_t moved = 0;
        for (Slot slot : {SLOT_M, SLOT_V}) {
            expect_converted(test, &narrow, &exact, slot);
            expect(differing(&back, &narrow, slot) == 0, "%s is not what fp32 holds of it", name);
            moved += differing(&again, &narrow, slot);
        }
        expect(moved == 0 || may_move(name), "%s: %lld elements move when they are stored again", name,
               (long long)moved);
    }
}

// Every storage of the weights into every other: what the update read is what it will read, rounded once.
TEST(convert_weights) {
    for (const char* from : WEIGHTS_NAMES) {
        if (in_spans(from)) continue;
        OptimConfig config = make_config("adamw", from, "bf16");
        OptimRun old;
        model_open(&old, &config, 3000);
        run_steps(&old, 1, 2);
        for (const char* to : WEIGHTS_NAMES) {
            if (in_spans(to)) continue;
            OptimConfig other = make_config("adamw", to, "bf16");
            OptimRun now;
            model_open(&now, &other, 3000);
            const int notices = expect_load(test, &now, &old).notice_count;
            bool same = find_place(&old, 0, SLOT_WEIGHTS).nearest == find_place(&now, 0, SLOT_WEIGHTS).nearest;
            if (!same) expect_converted(test, &now, &old, SLOT_WEIGHTS);
            if (same) expect(differing(&now, &old, SLOT_WEIGHTS) == 0, "%s to %s", from, to);
            expect(notices == !same, "%s to %s: %d notices", from, to, notices);
            expect(differing(&now, &old, SLOT_M) == 0 && differing(&now, &old, SLOT_V) == 0, "%s to %s: the moments",
                   from, to);
        }
    }
}

// Tensors that move from one launch to another, and formats by tensor.
// The third is told in `changes` lines, `last` begins that of the fourth.
static void check_overrides(Test* test, const char* weights, const char* const (&texts)[4], int changes,
                            const char* last) {
    OptimRun f[4];
    Stored loads[4];
    for (int i = 0; i < 4; i++) {
        OptimConfig config = make_config("adamw", weights, "bf16:sr");
        config.overrides = texts[i];
        model_open(&f[i], &config, 3000);
        if (i == 0) run_steps(&f[i], 1, 3);
        if (i > 0) loads[i] = expect_load(test, &f[i], &f[0]);
    }
    for (Slot slot : {SLOT_WEIGHTS, SLOT_M, SLOT_V}) {
        expect(differing(&f[1], &f[0], slot) == 0, "%s: the same formats in another order", slot_name(slot));
        for (int i = 2; i < 4; i++) {
            for (int t = 0; t < TENSORS; t++) {
                ArrayRef from = find_place(&f[0], t, slot), to = find_place(&f[i], t, slot);
                float *x = slot_values(&f[0], t, slot), *y = slot_values(&f[i], t, slot);
                bool same = memcmp(x, y, (size_t)f[0].tensor[t].cols * 4) == 0;
                if (from.nearest == to.nearest) expect(same, "%s of %s", slot_name(slot), f[0].tensor[t].name);
                if (from.nearest != to.nearest)
                    expect(holds_nearest(&f[i], t, slot, x), "%s of %s", slot_name(slot), f[0].tensor[t].name);
            }
        }
    }
    expect(loads[1].notice_count == 0, "%s", loads[1].notices[0]);
    expect(loads[2].notice_count == changes, "%d notices", loads[2].notice_count);
    expect(strncmp(loads[3].notices[0], last, strlen(last)) == 0, "%s", loads[3].notices[0]);
}

TEST(convert_overrides) {
    check_overrides(
        test, "bf16:sr",
        {"ln*: m=fp32 v=fp32; wpe: m=fp16", "wpe: m=fp16; ln*: m=fp32 v=fp32", "ln*|wpe: m=dyn8 v=fp32", ""}, 3,
        "m: fp16 in the checkpoint in 1 tensors, converted to bf16:sr (to nearest)");
    check_overrides(test, "e4m3:sr",
                    {"ln*: weights=bf16:sr m=fp32; wpe: weights=bf16+fp32",
                     "wpe: weights=bf16+fp32; ln*: weights=bf16:sr m=fp32", "ln*|wpe: weights=fp32 v=fp32", ""},
                    4, "weights: bf16+fp32 in the checkpoint in 1 tensors, converted to e4m3:sr (to nearest)");
}

// A checkpoint into two shards, cut within a tensor, is what it is in one optimizer, cut.
TEST(convert_into_shards) {
    OptimConfig wide = make_config("adamw", "bf16+fp32", "fp32");
    for (const char* state : {"fp32", "de4", "lin8"}) {
        OptimConfig config = make_config("adamw", "bf16:sr", state);
        config.overrides = "wpe: m=bf16; ln*: weights=lin8:sr";
        OptimRun from, whole, shard[2];
        model_open(&from, &wide, 1200001);
        run_steps(&from, 1, 2);
        model_open(&whole, &config, 1200001);
        expect_load(test, &whole, &from);
        for (int k = 0; k < 2; k++) {
            const int64_t cut = 300 * TILE_ELEMENTS;
            const OptimConfig part = shard_config(config, k ? cut : 0, k ? whole.elements : cut);
            model_open(&shard[k], &part, 1200001);
            expect_load(test, &shard[k], &from);
        }
        expect_joined(test, &whole, shard, 2, state);
    }
}

// Moments of other rules: v and the slow average come and go.
TEST(convert_rules) {
    OptimConfig adamw = make_config("adamw", "bf16", "fp32"), slow = make_config("ademamix", "bf16", "fp32"),
                lion = make_config("lion", "bf16", "fp32");
    const OptimConfig* const pairs[][2] = {{&adamw, &slow}, {&slow, &adamw}, {&slow, &lion}};
    for (const auto& pair : pairs) {
        OptimRun from, to;
        model_open(&from, pair[0], 3000);
        model_open(&to, pair[1], 3000);
        run_steps(&from, 1, 3);
        const Stored load = expect_load(test, &to, &from);
        expect(differing(&from, &to, SLOT_M) == 0, "m");
        bool has_v = pair[1] != &lion, begins = pair[1] == &slow;
        if (has_v) expect(differing(&from, &to, SLOT_V) == 0, "v");
        expect(load.notice_count == (has_v ? 1 : 2), "%d notices", load.notice_count);
        expect(strstr(load.notices[load.notice_count - 1], begins ? "slow: not in" : "slow: left behind"), "%s",
               load.notices[0]);
        for (int t = 0; t < TENSORS && begins; t++) {
            float* values = slot_values(&to, t, SLOT_SLOW);
            for (int64_t i = 0; i < to.tensor[t].cols; i++) expect(values[i] == 0.0f, "%g", values[i]);
        }
    }
}

TEST(convert_refuses_other_arrays) {
    OptimConfig config = make_config("adamw", "bf16", "fp32"), said = make_config("adamw", "bf16", "dyn8");
    OptimRun from, to;
    Stored context;
    model_open(&from, &config, 3000);
    model_open(&to, &config, 3000);
    expect_refused(run_load(&to, &from, &context, 1, error), error, "holds 3 arrays");
    from.config = said;  // not what its arrays are
    expect_refused(run_load(&to, &from, &context, 0, error), error, "no array m of U8");
}

TEST(convert_equal_gpu) {
    const char* const formats[][3] = {{"bf16:sr", "dyn8", "udyn8"},
                                      {"bf16+16", "de4", "sqrt4"},
                                      {"e4m3:sr", "bf16:sr", "fp32"},
                                      {"bf16+fp32", "fp32", "fp32"}};
    OptimConfig wide = states_config("adamw", "bf16+fp32", "fp32", "fp32", "fp32");
    OptimRun exact;
    model_open(&exact, &wide, 1200001);
    run_steps(&exact, 1, 3);
    for (const auto& format : formats) {
        OptimConfig config = states_config("adamw", "bf16+fp32", "fp32", format[1], format[2]);
        config.weights = format[0];
        OptimRun to[2];
        for (int gpu = 0; gpu < 2; gpu++) {
            model_open(&to[gpu], &config, 1200001, gpu == 1);
            expect_load(test, &to[gpu], &exact);
        }
        expect_same(test, &to[0], &to[1], describe(&config));
    }
}
