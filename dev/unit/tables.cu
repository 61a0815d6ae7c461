// Tests of the tables row by row, against what is said of them: a run allocates what the lists and the banner print,
// and the lists have every row.
#include "../../optim/plan.h"
#include "steps.h"

static OptimConfig table_config(const char* preset, const char* weights, const char* m, const char* v) {
    OptimConfig config = {{}, preset, "", weights, "fp32", m, v, 77};
    return resolved(config);
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
