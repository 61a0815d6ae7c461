#include "fit.h"
#include <stdio.h>
#include <string.h>
#include "checkpoint.h"
#include "loader.h"
#include "text.h"

// A run gives these up for memory, in this order: --recompute; from the fourth way on, all gradients at a time too.
// Gradients are fp32, as in steps of several micro-batches, unless --grads says otherwise or they are released.
static const char* const RECOMPUTE[] = {"none", "gelu", "block", "none", "block"};
enum { WAYS = 5, RELEASES = 3, ENOUGH = 8, SHOWN = 15 };  // a way is enough for a micro-batch of so many sequences

// Without a model and a preset, the largest model of each of these presets is found.
static const char* const PRESETS[] = {"adamw32", "muon8", "adamw4l", "muon8w8"};
static const char* const MODELS[] = {"d120",    "d96",        "d84",         "d72", "d60",
                                     "gpt2-xl", "gpt2-large", "gpt2-medium", "gpt2"};
enum { PRESET_COUNT = 4, MODEL_COUNT = 9 };

static bool finds_models(const Fit* fit) {
    const Options* o = fit->asked;
    return !option_given(o, "model") && !option_given(o, "size") && o->layers == OPTION_AUTO && !fit->preset;
}

bool fit_open(Fit* fit, const Options* asked, char* error) {
    fit->asked = asked, fit->model = asked->model, fit->preset = option_given(asked, "preset") ? asked->preset : NULL;
    fit->folder = checkpoint_model(&fit->model, false, error);
    if (!fit->folder) return false;
    fit->vocabulary = *fit->folder ? 0 : 50257;
    return !*asked->data || dataset_look(asked, &fit->vocabulary, &fit->bytes, error);
}

// Sets the options of a way; false if a typed option excludes it.
static bool way_begin(Fit* fit, int way) {
    const bool models = finds_models(fit);
    Options* o = &fit->row.o;
    fit->row = (FitRow){.o = *fit->asked, .way = way};
    if (option_given(o, "recompute") && strcmp(RECOMPUTE[way], o->recompute) != 0) return false;
    if (way >= RELEASES && option_given(o, "release")) return false;
    if (way >= RELEASES) o->release = "on", o->clip_by = option_given(o, "clip-by") ? o->clip_by : "last";
    o->model = models ? MODELS[fit->at_model] : fit->model;
    o->preset = models ? PRESETS[fit->at_preset] : fit->preset ? fit->preset : fit->presets[fit->at_preset];
    o->recompute = RECOMPUTE[way];
    if (strcmp(o->grads, "auto") == 0) o->grads = strcmp(o->release, "on") == 0 ? "bf16" : "fp32";
    return true;
}

// Sorts a row into its place.
static void take_row(Fit* fit, FitRow row) {
    // By loss (dev/compare/README.md); the others follow in their own order.
    static const char* const by_loss[] = {"muon", "muon8", "muon8w8", "adamw32", "adamw8e", "adamw4l", "int8w4"};
    FitRow* rows = fit->rows;
    int rank = 0, at = fit->count++;
    while (rank < 7 && strcmp(by_loss[rank], row.o.preset) != 0) rank++;
    const int cost = (row.batch < ENOUGH) * 10 + (row.batch == 0) * 10 + (row.way < 2 ? 0 : row.way);
    row.order = 10 * cost + (fit->preset ? row.way : rank);
    for (; at > 0 && rows[at - 1].order > row.order; at--) rows[at] = rows[at - 1];
    rows[at] = row;
}

bool fit_next(Fit* fit) {
    const bool models = finds_models(fit);
    FitRow* best = &fit->best;
    if (fit->row.planned && fit->preset) take_row(fit, fit->row);
    if (fit->row.planned && (!best->planned || fit->row.batch > best->batch)) *best = fit->row;
    for (;;) {
        // The first way that is enough is the best one, else that with the largest micro-batch; gradients are released
        // if nothing else fits.
        while (fit->way < WAYS && (fit->preset || best->batch < (fit->way == RELEASES ? 1 : ENOUGH))) {
            if (way_begin(fit, fit->way++)) return true;
        }
        if (models && best->batch > 0) fit->rows[fit->count++] = *best;
        if (!models && !fit->preset && best->planned) take_row(fit, *best);
        const bool next_model = models && best->batch == 0 && ++fit->at_model < MODEL_COUNT;
        if (!next_model) fit->at_preset++, fit->at_model = 0;
        if (fit->preset || (models ? fit->at_preset == PRESET_COUNT : !fit->presets[fit->at_preset])) return false;
        *best = (FitRow){0}, fit->way = 0;
    }
}

// The command of a choice, with all that was typed but the --tokens-per-step of several micro-batches where gradients
// are released; batches beyond 64 sequences gain nothing.
static const char* command(const Fit* fit, const FitRow* row) {
    const Options *o = &row->o, *asked = fit->asked;
    const bool releases = strcmp(o->release, "on") == 0, computes = row->way % RELEASES != 0;
    const char* own = text_kept("fit model size preset batch%s%s", computes ? " recompute" : "",
                                releases ? " release clip-by tokens-per-step" : "");
    const char* text = text_kept("./train --%s %s --preset %s", option_given(o, "size") ? "size" : "model",
                                 shell_word(o->model), o->preset);
    long long batch = row->batch < 64 ? row->batch : 64;
    while (!releases && asked->tokens_per_step > 0 && asked->tokens_per_step / o->seq % batch != 0) batch--;
    if (computes) text_add(&text, " --recompute %s", o->recompute);
    if (releases) text_add(&text, " --release on --clip-by %s --tokens-per-step %lld", o->clip_by, batch * o->seq);
    text_add(&text, " --batch %lld", batch);
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (!asked->given[i] || text_among(OPTIONS[i].name, own, ' ')) continue;
        text_add(&text, " --%s %s", OPTIONS[i].name, shell_word(option_text(&OPTIONS[i], asked)));
    }
    return text;
}

static void print_row(const FitRow* row, bool first) {
    const MemoryPlan* plan = &row->plan;
    const char* largest = row->batch > 0 ? text_kept("%lld", (long long)row->batch) : "-";
    const char* way = text_kept("%s%s", row->o.recompute, row->way < RELEASES ? "" : "+release");
    const double unit = 1.0 / (1 << 30);
    if (first) {
        printf(
            "%s, %lld parameters, sequences of %lld tokens; GiB at the largest --batch that fits (-: none; of 1)\n"
            "  %-12s %-13s %5s %8s %8s %9s %11s %7s %8s%s\n",
            row->o.model, (long long)row->parameters, row->o.seq, "--preset", "--recompute", "batch", "weights",
            "states", "gradients", "activations", "other", "total", plan->host > 0 ? "     host" : "");
    }
    printf("  %-12s %-13s %5s %8.2f %8.2f %9.2f %11.2f %7.2f %8.2f", row->o.preset, way, largest,
           (double)plan->weights * unit, (double)plan->states * unit, (double)plan->grads * unit,
           (double)plan->activations * unit, (double)(plan->other + plan->taken) * unit, (double)plan->total * unit);
    plan->host > 0 ? printf(" %8.2f\n", (double)plan->host * unit) : printf("\n");
}

bool fit_print(const Fit* fit) {
    const FitRow* rows = fit->rows;
    const bool models = finds_models(fit);
    for (int i = 0; i < (models ? PRESET_COUNT : 2) && i < fit->count && rows[i].batch > 0; i++) {
        const char* size = text_kept("%5.1fB parameters  ", 1e-9 * (double)rows[i].parameters);
        printf("%s%s\n", models ? size : i == 0 ? "best     " : "or       ", command(fit, &rows[i]));
    }
    if (fit->count > 0 && rows[0].batch > 0 && !*fit->asked->data)
        printf("add      --data DIR, your text in %s tokens; else they train on the built-in text\n",
               *fit->folder ? "the model's" : "GPT-2's");
    for (int i = 0; !models && i < SHOWN && i < fit->count; i++) print_row(&rows[i], i == 0);
    return fit->count > 0;
}
