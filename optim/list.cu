// Prints the tables for --list-formats and --list-presets, and writes the banner's line.
#include "plan.h"
#include "table.cuh"

double format_bytes_each(const FormatRow* format) {
    double bits = 0.0;
    for (const StreamInfo& stream : format->stream) bits += stream.span ? 0.0 : (double)stream.bits / stream.run;
    return bits / 8.0;
}

static double rows_bytes_each(const Rows* rows) {
    if (is_low_rank(rows->rule)) return format_bytes_each(rows->weights);  // the moments' share depends on shapes
    return format_bytes_each(rows->weights) + format_bytes_each(rows->m) * (rows->rule->keeps_slow ? 2 : 1) +
           format_bytes_each(rows->v);
}

const char* optim_describe(const OptimConfig* config) {
    const Rows rows = config_rows(config);
    const bool has_v = rows.rule->keeps_v || (rows.rule->by_rows && rows.v->stream[1].bits > 0),
               slow = rows.rule->keeps_slow, low = is_low_rank(rows.rule);
    return text_kept("%s  weights %s  grads %s  m %s%s%s%s%s%s  %.4g B/param%s", rows.rule->name, rows.weights->name,
                     rows.grads->name, rows.m->name, slow ? "  slow " : "", slow ? rows.m->name : "",
                     has_v ? "  v " : "", has_v ? rows.v->name : "", low ? " (of a projection)" : "",
                     rows_bytes_each(&rows), low ? " without these" : "");
}

static void list_row(FILE* file, const FormatRow* row) {
    int block = row->stream[1].run > row->stream[0].run ? row->stream[1].run : row->stream[0].run;
    char blocks[32] = "-";
    if (block > 1) snprintf(blocks, sizeof(blocks), "%d", block);
    if (format_span(row) != SPAN_RUN) {
        snprintf(blocks, sizeof(blocks), "%s", format_span(row) == SPAN_RANK1 ? "rank1" : "tensor");
    }
    fprintf(file, "  %-16s %5d %6s %8.4g   %s\n", row->name, row->stream[0].bits, blocks, format_bytes_each(row),
            row->note);
}

// Lists the rows that have a note; the others are variants of the row before them.
static void list_table(FILE* file, const char* option, const char* what, const Table<FormatRow>& table) {
    fprintf(file, "%s: %s\n  %-16s %5s %6s %8s\n", option, what, "name", "bits", "block", "B/param");
    for (int i = 0; i < table.count; i++) {
        if (table.row[i].note[0]) list_row(file, &table.row[i]);
    }
}

void optim_list_formats(FILE* file) {
    list_table(file, "--weights", "the parameters, and what keeps small updates alive", weights_table());
    list_table(file, "--grads", "the gradients", grads_table());
    list_table(file, "--m, --v", "the first and the second moment", state_table());
    fprintf(file,
            "  NAME alone takes the block above. Formats in blocks also have NAME/32 to NAME/2048 (adalog8 2048\n"
            "  only), and NAME@e8m0, whose scales are powers of two. NAME:sr is any of these but fp32 with stochastic\n"
            "  rounding. With 8-bit scales of scales, in v for a --beta2 up to 0.95:");
    int doubled = 0;
    for (int i = 0; i < state_table().count; i++) {
        const char* name = state_table().row[i].name;
        if (!strstr(name, "@dq8") || strchr(name, ':')) continue;
        fprintf(file, "%s%s", doubled++ % 8 ? ", " : "\n  ", name);
    }
    fprintf(file, "\n--rule\n");
    for (int i = 0; i < rule_table().count; i++) {
        fprintf(file, "  %-16s %s\n", rule_table().row[i].name, rule_table().row[i].note);
    }
}

// B/param is the bytes of a parameter in a checkpoint. Gradients, and the room for decoded layers, which depends on the
// model's shape, are in the banner.
void optim_list_presets(FILE* file) {
    const char* const columns = "  %-11s %-11s %-14s %-11s %-12s %6s  %s\n";
    fprintf(file, columns, "--preset", "--rule", "--weights", "--m", "--v", "B/param", "");
    for (const PresetRow& row : PRESETS) {
        OptimConfig config = {};
        config.rule = row.rule, config.weights = row.weights, config.grads = "bf16", config.m = row.m, config.v = row.v;
        const Rows rows = config_rows(&config);
        fprintf(file, columns, row.name, row.rule, row.weights, row.m, row.v, text_kept("%.4g", rows_bytes_each(&rows)),
                row.note);
        if (*row.overrides) fprintf(file, "  %-11s --override \"%s\"\n", "", row.overrides);
    }
}
