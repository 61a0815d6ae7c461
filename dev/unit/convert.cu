// Tests of optim_load: what a checkpoint stores in one format comes into an optimizer of another as that format's
// nearest store has it (laws_narrow), whichever way it comes; what is stored alike comes back to the bit wherever it
// lies, and what cannot be is refused. Checkpoints are optimizers in host memory here; commands.txt has those of files.
#include "steps.h"

constexpr int TENSORS = 4;

// `long_tensor`: elements of the third tensor, in columns of one row.
static void model_open(OptimRun* run, const OptimConfig* config, int64_t long_tensor = 3000) {
    const OptimTensor model[TENSORS] = {{"wpe.weight", 1, 2500, true, 0},
                                        {"h.0.ln_1.weight", 1, 33, false, 0},
                                        {"h.0.attn.c_attn.weight", 1, long_tensor, true, 0},
                                        {"ln_f.bias", 1, 4097, false, 0}};
    run_open(run, config, model, TENSORS, OPTIM_FP32);
}

// Loads `to` from a run, and checks that it is as if it had come by way of an optimizer in fp32. Returns what the load
// told.
static Stored load_both_ways(Test* test, OptimRun* to, const OptimConfig* config, const OptimRun* from,
                             const char* what) {
    const OptimConfig fp32 = states_config("adamw", "fp32", "fp32", "fp32", "fp32");
    OptimRun wide, via;
    model_open(to, config), model_open(&wide, &fp32), model_open(&via, config);
    expect_load(test, &wide, from), expect_load(test, &via, &wide);
    const Stored told = expect_load(test, to, from);
    expect_same(test, to, &via, what);
    return told;
}

static bool same_array(const OptimRun* a, const OptimRun* b, const char* name) {
    const OptimStream x = optim_stream_named(a->optim, name), y = optim_stream_named(b->optim, name);
    return x.data && x.elements == y.elements && same_bytes(a, x.data, b, y.data, x.elements * x.element_bytes);
}

// True if a block whose largest is -1 comes back smaller, since the format has no such level, as dyn8 and de4.
static bool lacks_minus_one(const FormatRow* row) {
    alignas(64) static char codes[4 * TILE_ELEMENTS], scales[4 * TILE_ELEMENTS], table[65536];
    float x[TILE_ELEMENTS] = {-1.0f};
    const Streams streams = {codes, scales, table};
    if (row->table_bytes) row->fill(table);
    row->store(streams, 0, x, TILE_ELEMENTS, NoiseKey{});
    row->load(streams, 0, x, TILE_ELEMENTS, NoiseKey{});
    return row->has_sign && x[0] != -1.0f;
}

// True if values of the format may move when they are stored again. A block's largest may come back smaller, and its
// scale with it: the format may lack -1, and a scale rounded up to 8 bits leaves the largest a level below the last.
// adalog8's scale is the logarithm of a level, which is rounded, and that of a tensor a quotient.
static bool may_move(const char* name) {
    return strstr(name, "@dq8") || strncmp(name, "adalog8", 7) == 0 || in_spans(name) ||
           lacks_minus_one(find_state(name));
}

// Every state format from fp32, in m (where it has a sign) and v, as the format without noise has it, and again.
TEST(convert_states) {
    OptimConfig wide = states_config("adamw", "bf16+fp32", "fp32", "fp32", "fp32");
    OptimRun exact;
    model_open(&exact, &wide);
    run_steps(&exact, 1, 3);
    for (const char* name : STATE_NAMES) {
        const char* plain = formatted("%.*s", (int)strcspn(name, ":"), name);
        OptimConfig config[2];
        OptimRun narrow[2], back[2], again;
        for (int k = 0; k < 2; k++) {
            const char* its = k ? plain : name;
            config[k] = states_config("adamw", "bf16+fp32", "fp32", serves_m(its) ? its : "bf16", its);
            model_open(&narrow[k], &config[k]);
            expect_load(test, &narrow[k], &exact);
        }
        expect_same(test, &narrow[0], &narrow[1], name);
        for (OptimRun& each : back) model_open(&each, &wide);
        model_open(&again, &config[0]);
        expect_load(test, &back[0], &narrow[0]), expect_load(test, &again, &back[0]);
        expect_load(test, &back[1], &again);
        const char* moved = difference(&back[0], &back[1]);
        expect(!moved || may_move(name), "%s: elements of %s move when they are stored again", name, moved);
    }
}

// Names of one storage, whatever the rounding of steps; lin8 has no row that rounds to nearest.
static bool same_storage(const char* a, const char* b) {
    const size_t base = strcspn(a, ":");
    const bool apart = strstr(a, ":kahan") || strstr(b, ":kahan") || strncmp(a, "lin8", 4) == 0;
    return is(a, b) || (!apart && base == strcspn(b, ":") && strncmp(a, b, base) == 0);
}

// Every storage of the weights into every other: what the update read is what it will read, rounded once.
TEST(convert_weights) {
    for (const char* from : WEIGHTS_NAMES) {
        OptimConfig config = make_config("adamw", from, "bf16");
        OptimRun old;
        model_open(&old, &config);
        run_steps(&old, 1, 2);
        for (const char* to : WEIGHTS_NAMES) {
            const char* what = formatted("%s to %s", from, to);
            OptimConfig other = make_config("adamw", to, "bf16");
            const bool same = same_storage(from, to);
            OptimRun now;
            if (same) model_open(&now, &other);
            const int notices = same ? expect_load(test, &now, &old).notice_count
                                     : load_both_ways(test, &now, &other, &old, what).notice_count;
            if (same) expect_same(test, &now, &old, what);
            expect(notices == !same, "%s: %d notices", what, notices);
            expect(same_array(&now, &old, "m") && same_array(&now, &old, "v"), "%s: the moments", what);
        }
    }
}

// Tensors that move from one launch to another, and formats by tensor: what is told in `changes` lines of the third
// text, and `last` begins that of the fourth.
static void check_overrides(Test* test, const char* weights, const char* const (&texts)[4], int changes,
                            const char* last) {
    OptimRun from, to;
    for (int i = 0; i < 4; i++) {
        OptimConfig config = make_config("adamw", weights, "bf16:sr");
        config.overrides = texts[i];
        if (i == 0) model_open(&from, &config), run_steps(&from, 1, 3);
        if (i == 0) continue;
        const Stored told = load_both_ways(test, &to, &config, &from, texts[i]);
        expect(i == 3 || told.notice_count == (i == 1 ? 0 : changes), "%d notices", told.notice_count);
        expect(i < 3 || strncmp(told.notices[0], last, strlen(last)) == 0, "%s", told.notices[0]);
    }
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
        model_open(&from, pair[0]);
        model_open(&to, pair[1]);
        run_steps(&from, 1, 3);
        const Stored load = expect_load(test, &to, &from);
        const bool has_v = pair[1] != &lion, begins = pair[1] == &slow;
        expect(same_array(&from, &to, "m") && (!has_v || same_array(&from, &to, "v")), "the moments");
        expect(load.notice_count == (has_v ? 1 : 2), "%d notices", load.notice_count);
        expect(strstr(load.notices[load.notice_count - 1], begins ? "slow: not in" : "slow: left behind"), "%s",
               load.notices[0]);
        const float* values = begins ? (const float*)run_array(&to, "slow") : nullptr;
        for (int64_t i = 0; i < to.elements && values; i++) expect(values[i] == 0.0f, "%g", (double)values[i]);
    }
}

TEST(convert_refuses_other_arrays) {
    OptimConfig config = make_config("adamw", "bf16", "fp32"), said = make_config("adamw", "bf16", "dyn8");
    OptimRun from, to;
    Stored context;
    model_open(&from, &config);
    model_open(&to, &config);
    expect_refused(run_load(&to, &from, &context, 1, error), error, "holds 3 arrays");
    from.config = said;  // not what its arrays are
    expect_refused(run_load(&to, &from, &context, 0, error), error, "no array m of U8");
}
