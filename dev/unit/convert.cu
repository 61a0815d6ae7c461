// Tests of optim_load: what a checkpoint stores in one format comes into an optimizer of another as that format's
// nearest store has it, what is stored alike comes back to the bit wherever it lies, and what cannot be is refused.
// Checkpoints are optimizers in host memory here; cli.cu has those of files.
#include "../../optim/plan.h"
#include "../../optim/table.cuh"
#include "rules.h"

#define ROW_NAME(NAME, NOTE, ...) NAME,
static const char* const all_states[] = {OPTIM_STATES(ROW_NAME)};
static const char* const all_weights[] = {OPTIM_WEIGHTS(ROW_NAME)};

constexpr int TENSORS = 4;
static const char* const tensor_names[TENSORS] = {"wpe.weight", "h.0.ln_1.weight", "h.0.attn.c_attn.weight",
                                                  "ln_f.bias"};

struct Fixture {
    Device dev;
    OptimConfig config;
    OptimTensor tensor[TENSORS];
    int64_t elements;
    Optim* optim;
    char notices[8][256];  // of the load that filled it
    int notice_count;
};

// `long_tensor`: elements of the third tensor, in columns of one row.
static void fixture_open(Fixture* f, const OptimConfig* config, int64_t long_tensor, bool gpu) {
    const int64_t lengths[TENSORS] = {2500, 33, long_tensor, 4097};
    memset((void*)f, 0, sizeof(*f));
    device_open(&f->dev, gpu, 0);
    f->config = *config;
    for (int t = 0; t < TENSORS; t++) f->tensor[t] = {tensor_names[t], 1, lengths[t], t % 2 == 0, 0};
    f->elements = optim_layout(f->tensor, TENSORS, config);
    f->optim = optim_create(&f->dev, config, f->tensor, TENSORS, OPTIM_FP32);
}

static void fixture_close(Fixture* f) {
    optim_free(f->optim);
    device_close(&f->dev);
}

static void fixture_steps(Fixture* f, int first, int last) {
    float *values = (float*)calloc((size_t)f->elements, sizeof(float)), one = 1.0f;
    float *grads = (float*)device_alloc(&f->dev, f->elements * 4), *scale = (float*)device_alloc(&f->dev, 4);
    copy_to_device(&f->dev, scale, &one, 4);
    for (int step = first; step <= last; step++) {
        memset(values, 0, (size_t)f->elements * sizeof(float));
        for (int t = 0; t < TENSORS; t++) {
            float* at = values + f->tensor[t].offset;
            for (int64_t i = 0; i < f->tensor[t].cols; i++) at[i] = gradient(step, t * 1000000 + i);
        }
        copy_to_device(&f->dev, grads, values, f->elements * 4);
        optim_step(f->optim, grads, scale, 1e-2f, step);
    }
    device_sync(&f->dev);
    device_free(&f->dev, grads);
    device_free(&f->dev, scale);
    free(values);
}

// Weights, and some steps to fill the moments.
static void fixture_train(Fixture* f, int steps) {
    float* values = (float*)calloc((size_t)f->elements, sizeof(float));
    for (int t = 0; t < TENSORS; t++) {
        for (int64_t i = 0; i < f->tensor[t].cols; i++) values[i] = start(t * 1000000 + i);
        optim_set_weights(f->optim, t, values);
    }
    free(values);
    fixture_steps(f, 1, steps);
}

// A fixture on the CPU as a checkpoint.
struct Checkpoint {
    const Fixture* from;
    Fixture* to;
};

static const void* checkpoint_array(void* context, const char* name, const char* dtype, int64_t bytes) {
    const Optim* optim = ((Checkpoint*)context)->from->optim;
    for (int s = 0; s < optim_stream_count(optim); s++) {
        OptimStream stream = optim_stream(optim, s);
        bool same = is(stream.name, name) && is(stream.dtype, dtype) && stream.elements * stream.element_bytes == bytes;
        if (same) return stream.data;
    }
    return nullptr;
}

static void checkpoint_weights(void* context, int tensor, float* values) {
    optim_get_weights(((Checkpoint*)context)->from->optim, tensor, values);
}

static void checkpoint_notice(void* context, const char* line) {
    Fixture* to = ((Checkpoint*)context)->to;
    if (to->notice_count < 8) snprintf(to->notices[to->notice_count++], sizeof(to->notices[0]), "%s", line);
}

static bool in_model_file(const OptimStream& stream) {
    return stream.is_weights && (is(stream.dtype, "F32") || is(stream.dtype, "BF16"));
}

static bool fixture_load(Fixture* to, const Fixture* from, int more_arrays, char* error, size_t bytes) {
    Checkpoint context = {from, to};
    OptimStored stored = {from->config, more_arrays, checkpoint_array, checkpoint_weights, checkpoint_notice, &context};
    for (int s = 0; s < optim_stream_count(from->optim); s++) {
        stored.arrays += !in_model_file(optim_stream(from->optim, s));
    }
    to->notice_count = 0;
    return optim_load(to->optim, &stored, error, bytes);
}

static void expect_load(Test* test, Fixture* to, const Fixture* from) {
    char error[512] = "";
    expect(fixture_load(to, from, 0, error, sizeof(error)), "%s", error);
}

// A slot of a tensor, padding included, by the row's own functions.

static void* table_of(const FormatRow* format) {
    if (format->table_bytes == 0) return nullptr;
    void* table = malloc((size_t)format->table_bytes);
    format->fill(table);
    return table;
}

static Streams place_streams(const Fixture* f, int tensor, const Place* place) {
    void* data[3] = {};
    for (int i = 0; i < 3; i++) {
        const StreamInfo& info = place->format->stream[i];
        char name[256];
        stream_name(place->array, info, name, sizeof(name));
        for (int s = 0; s < optim_stream_count(f->optim) && info.bits > 0; s++) {
            OptimStream stream = optim_stream(f->optim, s);
            if (is(stream.name, name))
                data[i] = (char*)stream.data + stream_bytes(info, f->tensor[tensor].offset - place->begin);
        }
    }
    return {data[0], data[1], table_of(place->format), data[2]};
}

static Place find_place(const Fixture* f, int tensor, Slot slot) {
    Plan* plan = plan_ranges(&f->config, f->tensor, TENSORS);
    Place place = plan_place(plan, tensor, slot);
    plan_free(plan);
    return place;
}

// What decides a slot's zeros.
static NoiseKey slot_key(const Fixture* f, int tensor, Slot slot) {
    const uint32_t noise[SLOTS] = {NOISE_WEIGHTS, NOISE_M, NOISE_V, NOISE_SLOW};
    return {0, 0, noise[slot], f->tensor[tensor].offset};
}

// What the update reads; the caller frees it. Padding counts as zero.
static float* slot_values(const Fixture* f, int tensor, Slot slot) {
    Place place = find_place(f, tensor, slot);
    Streams streams = place_streams(f, tensor, &place);
    int64_t padded = tensor_padded(&f->tensor[tensor]);
    float* values = (float*)malloc((size_t)padded * sizeof(float));
    for (int64_t i = 0; i < padded; i += TILE_ELEMENTS)
        place.format->load(streams, (int)i, values + i, TILE_ELEMENTS, slot_key(f, tensor, slot));
    for (int64_t i = f->tensor[tensor].cols; i < padded; i++) values[i] = 0.0f;
    free((void*)streams.table);
    return values;
}

// Whether the slot's arrays hold these bytes: those of `values` stored to nearest.
static bool holds_nearest(const Fixture* f, int tensor, Slot slot, const float* values) {
    Place place = find_place(f, tensor, slot);
    Streams there = place_streams(f, tensor, &place), want = there;
    int64_t padded = tensor_padded(&f->tensor[tensor]);
    void** to[3] = {&want.codes, &want.extra, &want.more};
    void *const from[3] = {there.codes, there.extra, there.more}, *table = table_of(place.nearest);
    if (slot != SLOT_WEIGHTS) want.table = table;
    for (int i = 0; i < 3; i++) *to[i] = calloc(1, (size_t)stream_bytes(place.format->stream[i], padded) + 1);
    for (int64_t i = 0; i < padded; i += TILE_ELEMENTS) {
        if (slot == SLOT_WEIGHTS) place.format->set(want, i, values + i, TILE_ELEMENTS);
        if (slot == SLOT_WEIGHTS) continue;
        place.nearest->store(want, (int)i, values + i, TILE_ELEMENTS, slot_key(f, tensor, slot));
    }
    bool same = true;
    for (int i = 0; i < 3; i++) {
        int64_t bytes = stream_bytes(place.format->stream[i], padded);
        same = same && (bytes == 0 || memcmp(*to[i], from[i], (size_t)bytes) == 0);
        free(*to[i]);
    }
    free((void*)there.table);
    free(table);
    return same;
}

static void expect_converted(Test* test, const Fixture* to, const Fixture* from, Slot slot) {
    for (int t = 0; t < TENSORS; t++) {
        float* values = slot_values(from, t, slot);
        expect(holds_nearest(to, t, slot, values), "%s of %s, %s in %s and %s here", slot_name(slot), tensor_names[t],
               find_place(from, t, slot).format->name, "the checkpoint", find_place(to, t, slot).format->name);
        free(values);
    }
}

static OptimConfig states_config(const char* m, const char* v) {
    OptimConfig config = {"", "adamw", "bf16+fp32", "fp32", m, v, 0.9f, 0.95f, 1e-8f, 0.1f, 77};
    char error[4096];
    if (!optim_resolve(&config, error, sizeof(error))) printf("    %s\n", error), exit(1);
    return config;
}

// Elements of `slot` that differ between a and b, of all tensors; as values.
static int64_t differing(const Fixture* a, const Fixture* b, Slot slot) {
    int64_t count = 0;
    for (int t = 0; t < TENSORS; t++) {
        float *x = slot_values(a, t, slot), *y = slot_values(b, t, slot);
        for (int64_t i = 0; i < a->tensor[t].cols; i++) count += memcmp(&x[i], &y[i], 4) != 0;
        free(x), free(y);
    }
    return count;
}

// Whether values of the format may move when they are stored again. A block's largest may come back smaller, and its
// scale with it: dyn8 and de4 have no -1, and a scale rounded up to bf16, or to 8 bits, leaves the largest a level
// below the last. adalog8's scale is the logarithm of a level, which is rounded.
static bool may_move(const char* name) {
    return strncmp(name, "dyn8", 4) == 0 || strncmp(name, "de4", 3) == 0 || strstr(name, "@bf16") ||
           strstr(name, "@dq8") || strncmp(name, "adalog8", 7) == 0;
}

// Every state format from fp32 and back to fp32, in m (where it has a sign) and v, and into the format again.
TEST(convert_states) {
    int formats = 0, idempotent = 0;
    OptimConfig wide = states_config("fp32", "fp32");
    Fixture exact;
    fixture_open(&exact, &wide, 3000, false);
    fixture_train(&exact, 3);
    for (const char* name : all_states) {
        if (in_spans(name)) continue;
        OptimConfig config = states_config(serves_m(name) ? name : "bf16", name);
        Fixture narrow, back, again;
        fixture_open(&narrow, &config, 3000, false);
        fixture_open(&back, &wide, 3000, false);
        fixture_open(&again, &config, 3000, false);
        expect_load(test, &narrow, &exact);
        expect_load(test, &back, &narrow);
        expect_load(test, &again, &back);
        int64_t moved = 0;
        for (Slot slot : {SLOT_M, SLOT_V}) {
            expect_converted(test, &narrow, &exact, slot);
            expect(differing(&back, &narrow, slot) == 0, "%s is not what fp32 holds of it", name);
            moved += differing(&again, &narrow, slot);
        }
        formats++, idempotent += moved == 0;
        expect(moved == 0 || may_move(name), "%s: %lld elements move when they are stored again", name,
               (long long)moved);
        for (Fixture* f : {&narrow, &back, &again}) fixture_close(f);
    }
    fixture_close(&exact);
    snprintf(test->note, sizeof(test->note), "%d formats, %d of them idempotent", formats, idempotent);
}

// Every storage of the weights into every other: what the update read is what it will read, rounded once.
TEST(convert_weights) {
    int pairs = 0;
    for (const char* from : all_weights) {
        if (in_spans(from)) continue;
        OptimConfig config = make_config("adamw", from, "bf16");
        Fixture old;
        fixture_open(&old, &config, 3000, false);
        fixture_train(&old, 2);
        for (const char* to : all_weights) {
            if (in_spans(to)) continue;
            OptimConfig other = make_config("adamw", to, "bf16");
            Fixture now;
            fixture_open(&now, &other, 3000, false);
            expect_load(test, &now, &old);
            bool same = find_place(&old, 0, SLOT_WEIGHTS).nearest == find_place(&now, 0, SLOT_WEIGHTS).nearest;
            if (!same) expect_converted(test, &now, &old, SLOT_WEIGHTS);
            if (same) expect(differing(&now, &old, SLOT_WEIGHTS) == 0, "%s to %s", from, to);
            expect(now.notice_count == !same, "%s to %s: %d notices", from, to, now.notice_count);
            expect(differing(&now, &old, SLOT_M) == 0 && differing(&now, &old, SLOT_V) == 0, "%s to %s: the moments",
                   from, to);
            fixture_close(&now), pairs++;
        }
        fixture_close(&old);
    }
    snprintf(test->note, sizeof(test->note), "%d pairs", pairs);
}

// fp32 in three disguises: none loses a bit of it, over several pieces of a tensor.
TEST(convert_keeps_a_master) {
    const char* const names[] = {"bf16+fp32", "bf16+16", "fp32", "e4m3+fp32", "bf16+16", "fp16+fp32", "bf16+fp32"};
    constexpr int COUNT = sizeof(names) / sizeof(names[0]);
    Fixture f[COUNT];
    for (int i = 0; i < COUNT; i++) {
        OptimConfig config = make_config("adamw", names[i], i % 2 ? "fp32" : "bf16");
        fixture_open(&f[i], &config, 1200001, false);
        if (i == 0) fixture_train(&f[i], 2);
        if (i > 0) expect_load(test, &f[i], &f[i - 1]);
        expect(differing(&f[i], &f[0], SLOT_WEIGHTS) == 0, "%s has lost bits of the weights", names[i]);
        expect(differing(&f[i], &f[0], SLOT_M) == 0, "bf16 in fp32 and back is not what it was");
    }
    for (Fixture& each : f) fixture_close(&each);
}

// Tensors that move from one launch to another, and formats by tensor.
// The third is told in `changes` lines, `last` begins that of the fourth.
static void check_overrides(Test* test, const char* weights, const char* const (&texts)[4], int changes,
                            const char* last) {
    Fixture f[4];
    for (int i = 0; i < 4; i++) {
        OptimConfig config = make_config("adamw", weights, "bf16:sr");
        config.overrides = texts[i];
        fixture_open(&f[i], &config, 3000, false);
        if (i == 0) fixture_train(&f[i], 3);
        if (i > 0) expect_load(test, &f[i], &f[0]);
    }
    for (Slot slot : {SLOT_WEIGHTS, SLOT_M, SLOT_V}) {
        expect(differing(&f[1], &f[0], slot) == 0, "%s: the same formats in another order", slot_name(slot));
        for (int i = 2; i < 4; i++) {
            for (int t = 0; t < TENSORS; t++) {
                Place from = find_place(&f[0], t, slot), to = find_place(&f[i], t, slot);
                float *x = slot_values(&f[0], t, slot), *y = slot_values(&f[i], t, slot);
                bool same = memcmp(x, y, (size_t)f[0].tensor[t].cols * 4) == 0;
                if (from.nearest == to.nearest) expect(same, "%s of %s", slot_name(slot), tensor_names[t]);
                if (from.nearest != to.nearest) {
                    expect(holds_nearest(&f[i], t, slot, x), "%s of %s", slot_name(slot), tensor_names[t]);
                }
                free(x), free(y);
            }
        }
    }
    expect(f[1].notice_count == 0, "%s", f[1].notices[0]);
    expect(f[2].notice_count == changes, "%d notices", f[2].notice_count);
    expect(strncmp(f[3].notices[0], last, strlen(last)) == 0, "%s", f[3].notices[0]);
    for (Fixture& each : f) fixture_close(&each);
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
        Fixture from, whole, shard[2];
        fixture_open(&from, &wide, 1200001, false);
        fixture_train(&from, 2);
        fixture_open(&whole, &config, 1200001, false);
        expect_load(test, &whole, &from);
        int64_t used[16] = {};
        for (int k = 0; k < 2; k++) {
            OptimConfig part = config;
            part.begin = k ? 300 * TILE_ELEMENTS : 0, part.end = k ? whole.elements : 300 * TILE_ELEMENTS;
            fixture_open(&shard[k], &part, 1200001, false);
            expect_load(test, &shard[k], &from);
            for (int s = 0; s < optim_stream_count(whole.optim); s++) {
                OptimStream want = optim_stream(whole.optim, s);
                for (int i = 0; i < optim_stream_count(shard[k].optim); i++) {
                    OptimStream got = optim_stream(shard[k].optim, i);
                    if (!is(got.name, want.name)) continue;
                    int64_t bytes = got.elements * got.element_bytes;
                    expect(memcmp((char*)want.data + used[s], got.data, (size_t)bytes) == 0, "%s: %s of shard %d",
                           state, got.name, k);
                    used[s] += bytes;
                }
            }
        }
        for (int s = 0; s < optim_stream_count(whole.optim); s++) {
            OptimStream want = optim_stream(whole.optim, s);
            expect(used[s] == want.elements * want.element_bytes, "%s: %lld bytes", want.name, (long long)used[s]);
        }
        for (Fixture* f : {&from, &whole, &shard[0], &shard[1]}) fixture_close(f);
    }
}

// What other rules keep: v and the slow average come and go.
TEST(convert_rules) {
    OptimConfig adamw = make_config("adamw", "bf16", "fp32"), slow = make_config("ademamix", "bf16", "fp32"),
                lion = make_config("lion", "bf16", "fp32");
    const OptimConfig* const pairs[][2] = {{&adamw, &slow}, {&slow, &adamw}, {&slow, &lion}};
    for (const auto& pair : pairs) {
        Fixture from, to;
        fixture_open(&from, pair[0], 3000, false);
        fixture_open(&to, pair[1], 3000, false);
        fixture_train(&from, 3);
        expect_load(test, &to, &from);
        expect(differing(&from, &to, SLOT_M) == 0, "m");
        bool has_v = pair[1] != &lion, begins = pair[1] == &slow;
        if (has_v) expect(differing(&from, &to, SLOT_V) == 0, "v");
        expect(to.notice_count == (has_v ? 1 : 2), "%d notices", to.notice_count);
        expect(strstr(to.notices[to.notice_count - 1], begins ? "slow: not in" : "slow: left behind"), "%s",
               to.notices[0]);
        for (int t = 0; t < TENSORS && begins; t++) {
            float* values = slot_values(&to, t, SLOT_SLOW);
            for (int64_t i = 0; i < to.tensor[t].cols; i++) expect(values[i] == 0.0f, "%g", values[i]);
            free(values);
        }
        fixture_close(&from), fixture_close(&to);
    }
    Fixture from, to;
    char error[512] = "";
    fixture_open(&from, &lion, 3000, false);
    fixture_open(&to, &adamw, 3000, false);
    expect(!fixture_load(&to, &from, 0, error, sizeof(error)) && strstr(error, "lion keeps no second moment"), "%s",
           error);
    fixture_close(&from), fixture_close(&to);
}

TEST(convert_refuses_other_arrays) {
    OptimConfig config = make_config("adamw", "bf16", "fp32"), said = make_config("adamw", "bf16", "dyn8");
    Fixture from, to;
    char error[512] = "";
    fixture_open(&from, &config, 3000, false);
    fixture_open(&to, &config, 3000, false);
    expect(!fixture_load(&to, &from, 1, error, sizeof(error)) && strstr(error, "holds 3 arrays"), "%s", error);
    from.config = said;  // not what its arrays are
    expect(!fixture_load(&to, &from, 0, error, sizeof(error)) && strstr(error, "no array m of U8"), "%s", error);
    fixture_close(&from), fixture_close(&to);
}

// The same loads into an optimizer on the GPU give the same bytes.
TEST(convert_equal_gpu) {
    const char* const formats[][3] = {{"bf16:sr", "dyn8", "udyn8"},
                                      {"bf16+16", "de4", "sqrt4"},
                                      {"e4m3+8:sr", "bf16:sr", "fp32"},
                                      {"bf16+fp32", "fp32", "fp32"}};
    OptimConfig wide = states_config("fp32", "fp32");
    Fixture exact;
    fixture_open(&exact, &wide, 1200001, false);
    fixture_train(&exact, 3);
    for (const auto& format : formats) {
        OptimConfig config = states_config(format[1], format[2]);
        config.weights = format[0];
        Fixture to[2];
        for (int gpu = 0; gpu < 2; gpu++) {
            fixture_open(&to[gpu], &config, 1200001, gpu == 1);
            expect_load(test, &to[gpu], &exact);
        }
        for (int s = 0; s < optim_stream_count(to[0].optim); s++) {
            OptimStream a = optim_stream(to[0].optim, s), b = optim_stream(to[1].optim, s);
            int64_t bytes = a.elements * a.element_bytes;
            char* copy = (char*)malloc((size_t)bytes);
            copy_to_host(&to[1].dev, copy, b.data, bytes);
            expect(memcmp(a.data, copy, (size_t)bytes) == 0, "%s %s %s: %s", format[0], format[1], format[2], a.name);
            free(copy);
        }
        fixture_close(&to[0]), fixture_close(&to[1]);
    }
    fixture_close(&exact);
}
