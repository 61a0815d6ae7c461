// Tests of the tables row by row, against what is said of them: a run allocates what the lists and the banner print,
// the lists have every row, and zeros, NaN and infinity stay what they may be in each format of states.
#include "../../optim/plan.h"
#include "steps.h"

static OptimConfig table_config(const char* preset, const char* weights, const char* m, const char* v) {
    OptimConfig config = {{}, preset, "", weights, "fp32", m, v, 77};
    return resolved(config);
}

// The row of a name that may leave its block out.
static const FormatRow* state_row(const char* name) {
    return find_row(state_table(), table_config("", "fp32", "fp32", name).v);
}

// The second element of a tile of ones becomes this; the others stay near one, and finite beside infinity.
static float becomes(Test* test, const FormatRow* format, uint32_t slot, float strange) {
    static float codes[TILE_ELEMENTS], extra[TILE_ELEMENTS], more[TILE_ELEMENTS], x[TILE_ELEMENTS], back[TILE_ELEMENTS];
    void* table = malloc((size_t)format->table_bytes + 1);
    if (format->table_bytes) format->fill(table);
    for (float& one : x) one = 1.0f;
    x[1] = strange;
    Streams streams = {codes, extra, table, more};
    format->store(streams, 0, x, TILE_ELEMENTS, NoiseKey{5, 7, slot});
    format->load(streams, 0, back, TILE_ELEMENTS, NoiseKey{5, 8, slot});
    for (int i = 0; i < TILE_ELEMENTS; i++) {
        const bool stays = isinf(strange) ? isfinite(back[i]) && back[i] >= 0.0f : back[i] > 0.5f && back[i] < 1.5f;
        expect(i == 1 || stays, "%s: beside %g a one became %g", format->name, (double)strange, (double)back[i]);
    }
    return back[1];
}

// A matrix in which the arrays of every format in blocks are a multiple of 256 bytes: nothing is rounded up.
constexpr int64_t ROWS = 256, COLS = 512, ELEMENTS = ROWS * COLS;

static void open_matrix(OptimRun* run, const OptimConfig* config) {
    const OptimTensor tensor = {"tensor", ROWS, COLS, true, 0};
    run_open(run, config, &tensor, 1, OPTIM_FP32);
}

// Bytes an element of one optimizer: as the banner says, and as allocated for weights and for moments.
struct Cost {
    double banner, weights, states;
};

static Cost cost_of(Test* test, const OptimConfig* config) {
    OptimRun run;
    open_matrix(&run, config);
    const Optim* optim = run.optim;
    const OptimBytes real = optim->allocated;
    int64_t listed = 0;
    for (int s = 0; s < optim->stream_count; s++) listed += optim->stream[s].elements * optim->stream[s].element_bytes;
    const char *line = described(*config), *cost;
    for (cost = line; strstr(cost + 1, "  "); cost = strstr(cost + 1, "  ")) continue;
    expect_planned(test, &run, line);
    // A few numbers of tensors, rows and columns are rounded up to 256 bytes.
    expect(listed <= real.weights + real.states && listed > real.weights + real.states - 3 * 256,
           "%s: checkpoints have %lld bytes", line, (long long)listed);
    return {atof(cost), (double)real.weights / ELEMENTS, (double)real.states / ELEMENTS};
}

// Bytes that numbers of tensors, or of rows and columns, may add. No list counts them.
static double more_of(const char* name) {
    return in_spans(name) ? (double)((ROWS + COLS) * 4 + 256) / ELEMENTS : 0.0;
}

// The error of a number that was printed with four digits.
static bool says(double printed, double real, double more) {
    return real >= printed * (1.0 - 5e-4) && real <= printed * (1.0 + 5e-4) + more;
}

static char* list_text(Test* test, bool presets) {
    char* text = printed([=](FILE* file) { presets ? optim_list_presets(file) : optim_list_formats(file); });
    for (const char* line = text; *line; line += strcspn(line, "\n"), line += *line == '\n')
        expect(strcspn(line, "\n") <= 120, "%zu characters: %.120s", strcspn(line, "\n"), line);
    return text;
}

// One row of a list of formats, whose name is not 0.
struct Listed {
    char name[64], block[16];
    int bits;
    double bytes;
};

// A row as the codes and scales of an optimizer are: bits of a code, elements of a scale.
static void check_listed(Test* test, const Listed* row, const OptimConfig* config, const char* array) {
    OptimRun run;
    open_matrix(&run, config);
    const Optim* optim = run.optim;
    const char *scales = formatted("%s.scales", array), *low = formatted("%s.low", array);
    int64_t bits = 0, block = 0, bytes = 0;
    for (int s = 0; s < optim->stream_count; s++) {
        OptimStream stream = optim->stream[s];
        if (is(stream.name, array)) bits = stream.elements * stream.element_bytes * 8 / ELEMENTS;
        bool scale = is(stream.name, scales) || (is(stream.name, low) && is(stream.dtype, "F32"));
        if (scale) block = ELEMENTS / stream.elements;
        bool own = is(array, "weights") ? strncmp(stream.name, "m", 2) != 0 && strncmp(stream.name, "v", 2) != 0
                                        : strncmp(stream.name, array, strlen(array)) == 0 && !is(stream.name, "master");
        if (own) bytes += stream.elements * stream.element_bytes;
    }
    bool spans = in_spans(row->name);
    expect(bits == row->bits, "%s: %d bits, stored in %lld", row->name, row->bits, (long long)bits);
    expect(spans   ? is(row->block, strstr(row->name, "rank1") ? "rank1" : "tensor")
           : block ? atoi(row->block) == block
                   : is(row->block, "-"),
           "%s: block %s, stored every %lld", row->name, row->block, (long long)block);
    expect(says(row->bytes, (double)bytes / ELEMENTS, more_of(row->name)), "%s: %g bytes, %lld of %lld elements",
           row->name, row->bytes, (long long)bytes, (long long)ELEMENTS);
}

// Columns of every row that --list-formats prints, and a line on when to use it.
TEST(tables_list_of_formats) {
    char *text = list_text(test, false), *whole = strdup(text), section = 0;
    int rows = 0;
    for (char *line = text, *end; (end = strchr(line, '\n')) != nullptr; line = end + 1) {
        *end = 0;
        Listed row = {};
        int used = 0;
        if (strncmp(line, "--", 2) == 0) section = line[2];
        if (sscanf(line, "  %63s %d %15s %lf %n", row.name, &row.bits, row.block, &row.bytes, &used) != 4) continue;
        expect(used > 0 && strlen(line + used) > 3, "%s: no line on when to use it", row.name);
        rows++;
        if (section == 'g') continue;
        const bool weights = section == 'w', m = !weights && serves_m(row.name);
        OptimConfig config = weights ? table_config("", row.name, "fp32", "fp32")
                                     : table_config("", "fp32", m ? row.name : "fp32", row.name);
        check_listed(test, &row, &config, weights ? "weights" : "v");
        if (m) check_listed(test, &row, &config, "m");
    }
    int listed = 0;
    for (const Table<FormatRow>& table : {weights_table(), grads_table(), state_table()}) {
        for (int i = 0; i < table.count; i++) listed += table.row[i].note[0] != 0;
    }
    expect(rows == listed, "%d rows of %d", rows, listed);
    // Other names follow from those of the list by its last lines.
    for (const char* more : {"NAME/32", "NAME/2048", "NAME@e8m0", "NAME:sr"})
        expect(strstr(whole, more), "%s is not explained", more);
    note(test, "%d rows", rows);
}

// Columns of every row that --list-presets prints.
TEST(tables_list_of_presets) {
    char* text = list_text(test, true);
    int rows = 0;
    for (char *line = text, *end; (end = strchr(line, '\n')) != nullptr; line = end + 1) {
        *end = 0;
        char name[32], rule[32], weights[32], m[32], v[32];
        double bytes;
        int used = 0;
        int got = sscanf(line, "  %31s %31s %31s %31s %31s %lf %n", name, rule, weights, m, v, &bytes, &used);
        if (got < 6) continue;
        OptimConfig config = table_config(name, "", "", "");
        expect(is(config.rule, rule) && is(config.weights, weights) && is(config.m, m) && is(config.v, v), "%s", line);
        Cost cost = cost_of(test, &config);
        expect(cost.banner == bytes, "%s: %g bytes, and %g in the banner", name, bytes, cost.banner);
        const bool low = is_low_rank(find_row(rule_table(), rule));  // of whose moments no list counts bytes
        const char *others = optim_preset_overrides(name),
                   *rate = formatted("lr=%g", find_row(rule_table(), rule)->slower);
        expect(!low || strstr(others, rate), "%s: the rule says %s and the preset %s", name, rate, others);
        const double counted = cost.weights + (low ? 0.0 : cost.states);
        // A rule that keeps numbers of rows and columns has a few more, which depend on the shape and are not listed.
        const bool fits = find_row(rule_table(), rule)->by_rows ? bytes <= counted && counted < bytes + 0.1
                                                                : says(bytes, counted, more_of(weights));
        expect(fits, "%s: %g bytes, allocated %g", name, bytes, counted);
        expect(strlen(line + used) > 10, "%s: no line on when to use it", name);
        rows++;
    }
    expect(rows == PRESET_COUNT, "%d rows", rows);
}

static const char* number(float x, char (&text)[32]) {
    snprintf(text, sizeof(text), "%.3g", fabs((double)x) == 0.0 ? 0.0 : isnan(x) ? (double)NAN : (double)x);
    return text;
}

// `dyn8` | 5.5e-07 | 0, 0 | ... : what a v of zero becomes, NaN in m and in v, to nearest and with noise, infinity.
static void strange_row(Test* test, const char* name, char* row, size_t bytes) {
    char noisy_name[64], cell[7][32];
    snprintf(noisy_name, sizeof(noisy_name), "%s:sr", name);
    const FormatRow *plain = state_row(name), *noisy = is(name, "fp32") ? plain : state_row(noisy_name);
    number(becomes(test, plain, NOISE_V, 0.0f), cell[0]);
    for (int v = 0; v < 2; v++) {
        uint32_t slot = v ? NOISE_V : NOISE_M;
        number(becomes(test, plain, slot, NAN), cell[1 + 2 * v]);
        number(becomes(test, noisy, slot, NAN), cell[2 + 2 * v]);
        if (v || plain->has_sign) continue;
        for (int i = 1; i < 3; i++) snprintf(cell[i], sizeof(cell[i]), "–");
    }
    number(becomes(test, plain, NOISE_V, INFINITY), cell[5]);
    number(becomes(test, noisy, NOISE_V, INFINITY), cell[6]);
    snprintf(row, bytes, "| `%.*s` | %s | %s, %s | %s, %s | %s, %s |\n", (int)strcspn(name, "/"), name, cell[0],
             cell[1], cell[2], cell[3], cell[4], cell[5], cell[6]);
}

// A row for each format at its default block, as strange_row writes it. A format without a row is not compared.
static const char* const recorded[] = {
    "| `fp32` | 0 | nan, nan | nan, nan | inf, inf |\n",
    "| `bf16` | 0 | nan, nan | nan, nan | inf, inf |\n",
    "| `fp16` | 0 | nan, 6.55e+04 | nan, 6.55e+04 | inf, 6.55e+04 |\n",
    "| `dyn8` | 5.5e-07 | 0, 0 | 5.5e-07, 5.5e-07 | 4.25e+37, 4.25e+37 |\n",
    "| `udyn8` | 3.25e-07 | –, – | 3.25e-07, 3.25e-07 | 4.25e+37, 4.25e+37 |\n",
    "| `e4m3` | 4.36e-06 | nan, 0 | 4.36e-06, 4.36e-06 | 4.25e+37, 4.25e+37 |\n",
    "| `e5m2` | 2.66e-10 | nan, 0 | 2.66e-10, 2.66e-10 | 4.25e+37, 4.25e+37 |\n",
    "| `soft8` | 0.00395 | 1, 0 | 1, 0.00395 | 4.25e+37, 4.25e+37 |\n",
    "| `sqrt8` | 1.54e-05 | –, – | 1.54e-05, 1.54e-05 | 1.54e-05, 1.54e-05 |\n",
    "| `lin8` | 0.00787 | -1, -1 | 0.00787, 0.00787 | 4.25e+37, 4.25e+37 |\n",
    "| `ulin8` | 0.00392 | –, – | 0.00392, 0.00392 | 4.25e+37, 4.25e+37 |\n",
    "| `de4` | 0.0055 | 1, -0.887 | 1, 0.0055 | 4.25e+37, 4.25e+37 |\n",
    "| `lin4` | 0.0625 | –, – | 0.0625, 0.0625 | 4.25e+37, 4.25e+37 |\n",
    "| `sqrt4` | 0.00391 | –, – | 0.00391, 0.00391 | 0.00391, 0.00391 |\n",
    "| `nf4` | 0.0796 | 1, -1 | 1, 0.0796 | 4.25e+37, 4.25e+37 |\n",
    "| `adanf4` | 0.0796 | 1, -1 | 1, 0.0796 | 4.25e+37, 4.25e+37 |\n",
    "| `e2m1` | 0.0833 | 0, 0 | 0.0833, 0.0833 | 4.25e+37, 4.25e+37 |\n",
    "| `adalog8` | 1.18e-38 | –, – | 1.18e-38, 1.18e-38 | 1.7e+38, 1.7e+38 |\n",
};

TEST(tables_strange_is_as_recorded) {
    char row[512];
    const char* last = "";
    int compared = 0;
    for (const char* name : STATE_NAMES) {
        bool first = strncmp(name, last, strcspn(name, "/:@") + 1) != 0;  // of its kind, the default
        if (in_spans(name) || strpbrk(name, ":@") || !first) continue;
        last = name;
        strange_row(test, name, row, sizeof(row));
        for (const char* want : recorded) {
            if (strncmp(want, row, strcspn(row + 3, "`") + 4) != 0) continue;
            expect(is(want, row), "%s was recorded and is now\n%s", want, row);
            compared++;
        }
    }
    expect(compared == (int)(sizeof(recorded) / sizeof(recorded[0])), "%d rows were compared", compared);
}
