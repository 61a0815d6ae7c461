#include "fit.h"

#include <stdio.h>
#include <string.h>

#include "memory.h"

// A run gives these up for memory, in this order: --recompute; from the fourth way on, all gradients at a time too.
// Gradients are fp32, as in steps of several micro-batches, unless --grads says otherwise or they are released.
static const char* const RECOMPUTE[] = {"none", "gelu", "block", "none", "block"};
enum { WAYS = 5, RELEASES = 3, ENOUGH = 8, SHOWN = 15 };  // a way is enough for a micro-batch of so many sequences

static bool plan_way(const Fit* fit, const char* model, const char* preset, int way, FitRow* row, char* error) {
    char later[DATA_ERROR_BYTES];
    memset(row, 0, sizeof(*row));
    row->o = *fit->asked, row->way = way;
    Options* o = &row->o;
    if (option_given(o, "recompute") && strcmp(RECOMPUTE[way], o->recompute) != 0) return false;
    if (way >= RELEASES && option_given(o, "release")) return false;
    if (way >= RELEASES) o->release = "on", o->clip_by = option_given(o, "clip-by") ? o->clip_by : "last";
    o->model = model, o->preset = preset, o->recompute = RECOMPUTE[way];
    if (strcmp(o->grads, "auto") == 0) o->grads = strcmp(o->release, "on") == 0 ? "bf16" : "fp32";
    return fit->plan(fit->context, row, *error ? later : error);
}

// Finds the first way that is enough, or else the one with the largest micro-batch; gradients are released if nothing
// else fits.
static bool plan_best(const Fit* fit, const char* model, const char* preset, FitRow* best, char* error) {
    bool found = false;
    best->batch = 0;
    for (int way = 0; way < WAYS && best->batch < (way == RELEASES ? 1 : ENOUGH); way++) {
        FitRow row;
        if (!plan_way(fit, model, preset, way, &row, error) || (found && row.batch <= best->batch)) continue;
        *best = row, found = true;
    }
    return found;
}

// The command of a choice; batches beyond 64 sequences gain nothing.
static const char* command(const FitRow* row) {
    const Options* o = &row->o;
    const long long batch = row->batch < 64 ? row->batch : 64;
    const char* less = row->way % RELEASES == 0 ? "" : text_kept(" --recompute %s", o->recompute);
    const char* release = strcmp(o->release, "on") != 0 ? ""
                                                        : text_kept(" --release on --clip-by %s --tokens-per-step %lld",
                                                                    o->clip_by, batch * o->seq);
    return text_kept("./train --%s %s --preset %s%s%s --batch %lld", option_given(o, "size") ? "size" : "model",
                     shell_word(o->model), o->preset, less, release, batch);
}

// Prints the largest of our models for each of four presets; false: there is none.
static bool print_models(const Fit* fit, char* error) {
    static const char* const presets[] = {"adamw32", "muon8", "adamw4l", "muon8w8"};
    static const char* const models[] = {"d120",    "d96",        "d84",         "d72", "d60",
                                         "gpt2-xl", "gpt2-large", "gpt2-medium", "gpt2"};
    bool any = false;
    for (int i = 0; i < 4; i++) {
        FitRow row = {0};
        for (int j = 0; j < 9 && row.batch == 0; j++) plan_best(fit, models[j], presets[i], &row, error);
        if (row.batch > 0) printf("%5.1fB parameters  %s\n", 1e-9 * (double)row.parameters, command(&row));
        any = any || row.batch > 0;
    }
    return any;
}

static void print_row(const FitRow* row, bool first) {
    const MemoryPlan* plan = &row->plan;
    const char* largest = row->batch > 0 ? text_kept("%lld", (long long)row->batch) : "-";
    const char* way = text_kept("%s%s", row->o.recompute, row->way < RELEASES ? "" : "+release");
    const double unit = 1.0 / (1 << 30);
    if (first) {
        printf(
            "%s, %lld parameters, sequences of %lld tokens; GiB at the largest --batch that fits (-: none; of 1)\n"
            "  %-12s %-13s %5s %8s %8s %9s %11s %7s %8s",
            row->o.model, (long long)row->parameters, row->o.seq, "--preset", "--recompute", "batch", "weights",
            "states", "gradients", "activations", "other", "total");
        plan->host > 0 ? printf(" %8s\n", "host") : printf("\n");
    }
    printf("  %-12s %-13s %5s %8.2f %8.2f %9.2f %11.2f %7.2f %8.2f", row->o.preset, way, largest,
           (double)plan->weights * unit, (double)plan->states * unit, (double)plan->grads * unit,
           (double)plan->activations * unit, (double)(plan->other + plan->taken) * unit, (double)plan->total * unit);
    plan->host > 0 ? printf(" %8.2f\n", (double)plan->host * unit) : printf("\n");
}

// Sorts a row into its place.
static void take_row(const Fit* fit, FitRow* rows, int count, FitRow row) {
    // By loss (dev/compare/README.md); the others follow in their own order.
    static const char* const by_loss[] = {"muon", "muon8", "muon8w8", "adamw32", "adamw8e", "adamw4l", "int8w4"};
    int rank = 0, at = count;
    while (rank < 7 && strcmp(by_loss[rank], row.o.preset) != 0) rank++;
    const int cost = (row.batch < ENOUGH) * 10 + (row.batch == 0) * 10 + (row.way < 2 ? 0 : row.way);
    row.order = 10 * cost + (fit->preset ? row.way : rank);
    for (; at > 0 && rows[at - 1].order > row.order; at--) rows[at] = rows[at - 1];
    rows[at] = row;
}

bool fit_print(const Fit* fit, char* error) {
    static FitRow rows[80], row;
    const Options* o = fit->asked;
    const bool typed = option_given(o, "model") || option_given(o, "size") || o->layers != OPTION_AUTO || fit->preset;
    int count = 0;
    *error = 0;
    if (!typed && print_models(fit, error)) return true;
    for (int way = 0; fit->preset && way < WAYS; way++) {
        if (plan_way(fit, fit->model, fit->preset, way, &row, error)) take_row(fit, rows, count++, row);
    }
    for (int i = 0; typed && !fit->preset && fit->presets(i); i++) {
        if (plan_best(fit, fit->model, fit->presets(i), &row, error)) take_row(fit, rows, count++, row);
    }
    if (count == 0) return data_error(error, "--fit lists nothing: %s", text_kept("%s", error));
    for (int i = 0; i < 2 && i < count && rows[i].batch > 0; i++)
        printf("%-8s %s\n", i == 0 ? "best" : "or", command(&rows[i]));
    for (int i = 0; i < SHOWN && i < count; i++) print_row(&rows[i], i == 0);
    return true;
}
