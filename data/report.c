#include "report.h"
#include "sampling.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "clock.h"
#include "text.h"

// Says how much data there is, how much of it a validation reads, what is left out, and whether validation is of
// training texts.
static void report_data(RunFolder* run, const Dataset* train, const Dataset* val, int T, int64_t val_tokens,
                        int vocabulary) {
    const Dataset* const parts[] = {train, val};
    const char *tokens = text_count((double)train->tokens), *all = text_count((double)val->tokens);
    const char* read = text_count((double)(dataset_windows_of(val, T, val_tokens) * T));
    const char* ends = val->mixed ? text_kept(", the ends of %d files", val->files) : "";
    run_say(run, " data     %s  %s tokens in %d file%s  validation reads %s of %s%s  vocabulary %d%s\n", train->path,
            tokens, train->files, train->files == 1 ? "" : "s", read, all, ends, vocabulary,
            train->bytes ? " (bytes)" : "");
    for (int i = 0; i < 2; i++) {
        const int files = parts[i]->left_out;
        if (files == 0) continue;
        run_say(run, " notice   %d file%s of the %s, shorter than a window of %d tokens, %s left out: %s tokens\n",
                files, files == 1 ? "" : "s", i == 0 ? "data" : "validation data", T + 1, files == 1 ? "is" : "are",
                text_count((double)parts[i]->left_out_tokens));
    }
    if (dataset_overlap(train, val)) {
        run_say(run, " notice   the validation data is trained on, so its loss says nothing of other texts\n");
    }
}

// Says how much is trained, and warns of too many epochs or of a name that does not fit bytes.
static void report_batch(RunFolder* run, const PlanReport* plan, int V) {
    const long long tokens = run_int(run, "tokens-per-step"), batch = run_int(run, "batch"), seq = run_int(run, "seq"),
                    steps = run_int(run, "steps"), sequences = tokens / seq, micro = sequences / batch / plan->world;
    const char* ranks = plan->world > 1 ? text_kept("%d ranks x ", plan->world) : "";
    const double epochs = (double)steps * (double)sequences / (double)plan->windows;
    run_say(run, " batch    %lld x %lld x %s%lld micro-batch%s = %lld tokens a step  %lld steps = %.2f epochs\n", batch,
            seq, ranks, micro, micro == 1 ? "" : "es", tokens, steps, epochs);
    if (epochs >= 1000) {
        run_say(run,
                " notice   each text is read %.0f times, so the model will learn it by heart; give more --data or "
                "fewer --steps\n",
                epochs);
    }
    if (V == 256 && strncmp(run_text(run, "model"), "gpt2", 4) == 0 && !*run_text(run, "data")) {
        run_say(run,
                " notice   %s has a vocabulary of 256 here, since the built-in text is read as bytes; its own 50257 "
                "tokens come with --data of data/prepare.py\n",
                run_text(run, "model"));
    }
}

static void report_schedule(RunFolder* run, const PlanReport* plan) {
    const bool constant = strcmp(run_text(run, "schedule"), "constant") == 0;
    const double lr = run_real(run, "lr"), usual = plan->usual_lr;
    const char* rate = "";
    if (plan->trained && lr == usual / 10) {
        rate = text_format(" (a tenth of the usual %g: the weights of --model are trained)", usual);
    } else if (lr == usual && lr != plan->usual_lr_of_any) {
        rate = text_format(", usual for %s", run_text(run, "rule"));
    }
    run_say(run, " schedule lr %g%s, %s to %g of it, warm-up %lld steps, clip %g, weight decay %g\n", lr, rate,
            run_text(run, "schedule"), constant ? 1.0 : run_real(run, "final-lr"), run_int(run, "warmup"),
            run_real(run, "clip"), run_real(run, "weight-decay"));
}

// Warns of a v whose 8-bit scales do not fall as v does with a larger beta2 (optim/README.md, "How v falls").
static void report_v(RunFolder* run) {
    const char *v = run_text(run, "v"), *override = run_text(run, "override"), *at = override;
    if (run_real(run, "beta2") <= 0.95) return;
    const bool own = strstr(v, "@dq8") != NULL;
    while (!own && (at = strstr(at, "v=")) != NULL &&
           !strstr(v = text_kept("%.*s", (int)strcspn(at, " ;"), at), "@dq8"))
        at++;
    if (!at) return;
    const char* other = strstr(v, "4/") ? "lin4/64" : "udyn8";
    const bool more = own && *override && strcmp(override, "none") != 0;
    const char* type =
        own ? text_format("--v %s%s%s", other, more ? " --override " : "", more ? shell_word(override) : "")
            : text_format("v=%s in --override", other);
    if (strcmp(run_text(run, "preset"), "adamw4d") == 0 && own) type = "--preset adamw4l";
    run_say(run,
            " notice   v in %s with --beta2 %g costs loss, since its 8-bit scales do not fall as v does; type --beta2 "
            "0.95, or %s\n",
            v + (own ? 0 : 2), run_real(run, "beta2"), type);
}

static void report_memory(RunFolder* run, const PlanReport* plan) {
    const MemoryPlan* memory = &plan->memory;
    const bool several = plan->world > 1, large = memory->total >= (1ll << 30);
    const double unit = large ? 1.0 / (1 << 30) : 1.0 / (1 << 20);
    run_say(run, " memory   %sweights %.2f  states %.2f  gradients %.2f  activations %.2f  other %.2f",
            several ? "of rank 0: " : "", (double)memory->weights * unit, (double)memory->states * unit,
            (double)memory->grads * unit, (double)memory->activations * unit, (double)memory->other * unit);
    if (memory->taken > 0)
        run_say(run, "  driver%s %.2f", several ? " and exchange" : "", (double)memory->taken * unit);
    if (memory->host > 0) run_say(run, "  host %.2f", (double)memory->host * unit);
    // Bytes of a parameter while it trains, the room for decoded weights and the gradients included.
    const double each = (double)(memory->weights + memory->states + memory->grads) / (double)plan->parameters;
    run_say(run, " = %.2f %s of %.1f GiB  (matmul %s, recompute %s, %.4g B/param held)\n", (double)memory->total * unit,
            large ? "GiB" : "MiB", (double)plan->available / (1 << 30), run_text(run, "matmul"),
            run_text(run, "recompute"), each);
}

void report_plan(RunFolder* run, const PlanReport* plan, const Dataset* train, const Dataset* val, int V) {
    run_say(run, "nibble  %s  %lld layers, %lld channels, %lld heads  %lld parameters\n", run_text(run, "model"),
            run_int(run, "layers"), run_int(run, "channels"), run_int(run, "heads"), (long long)plan->parameters);
    run_say(run, " device   %s\n", plan->device);
    if (plan->world > 1) {
        run_say(run, " ranks    %d, from %s  %s  shard %s  gradients sent as %s\n", plan->world, plan->source,
                plan->transport, run_text(run, "shard"), run_text(run, "grads"));
    }
    report_data(run, train, val, (int)run_int(run, "seq"), run_int(run, "val-tokens"), V);
    report_batch(run, plan, V);
    run_say(run, " optim    %s\n", plan->optim);
    if (strcmp(run_text(run, "override"), "none") != 0) run_say(run, " override %s\n", run_text(run, "override"));
    report_v(run);
    report_schedule(run, plan);
    report_memory(run, plan);
    if (run->taken) run_say(run, " resume   takes the checkpoint's%s\n", run->taken);
    if (*plan->changed) run_say(run, " changed %s\n", plan->changed);
}

void report_fit(const char* model, int64_t parameters, int T, const char* preset, const char* recompute,
                const Planner* planner, int64_t memory, bool first) {
    const int64_t batch = plan_largest_batch(planner, 512, false, memory - planner->plan(planner, 1, false).taken);
    const MemoryPlan plan = planner->plan(planner, batch > 0 ? batch : 1, false);
    const char* largest = batch > 0 ? text_kept("%lld", (long long)batch) : "-";
    const double unit = 1.0 / (1 << 30);
    if (first) {
        printf(
            "%s, %lld parameters, sequences of %d tokens; GiB at the largest --batch that fits (-: none; of 1)\n"
            "  %-12s %-11s %5s %8s %8s %9s %11s %7s %8s",
            model, (long long)parameters, T, "--preset", "--recompute", "batch", "weights", "states", "gradients",
            "activations", "other", "total");
        plan.host > 0 ? printf(" %8s\n", "host") : printf("\n");
    }
    printf("  %-12s %-11s %5s %8.2f %8.2f %9.2f %11.2f %7.2f %8.2f", preset, recompute, largest,
           (double)plan.weights * unit, (double)plan.states * unit, (double)plan.grads * unit,
           (double)plan.activations * unit, (double)(plan.other + plan.taken) * unit, (double)plan.total * unit);
    plan.host > 0 ? printf(" %8.2f\n", (double)plan.host * unit) : printf("\n");
}

const char* run_identity(RunFolder* run, const Json* checkpoint, Dataset* train, Dataset* val) {
    char* text;
    size_t length;
    if (!dataset_fingerprint(train, run->error) || !dataset_fingerprint(val, run->error)) {
        return data_error(run->error, "--data: %s", run->error), NULL;
    }
    FILE* file = text_stream(&text, &length);
    for (int i = 0; i < run->table->count; i++) {
        const Option* option = &run->table->option[i];
        if (option->type == OPTION_FLAG || text_among(option->name, "run resume data val join-timeout", ' ')) continue;
        fprintf(file, "--%s %s\1", option->name, shell_word(option_text(option, run->fields)));
    }
    fprintf(file, "--resume of a checkpoint with checksum %08llx\1", (long long)json_int(checkpoint, "crc32c", 0));
    fprintf(file, "--data of %lld tokens (checksum %08x)\1--val of %lld tokens (checksum %08x)\1",
            (long long)train->tokens, train->crc, (long long)val->tokens, val->crc);
    fclose(file);
    return text;
}

const char* report_weights_differ(const RunFolder* run) {
    return text_format(
        "step %lld: the weights of the ranks differ, which no rounding explains: a GPU or its memory is faulty; go on "
        "elsewhere with --resume %s",
        (long long)run->state.step, run_resume_words(run));
}

bool report_already_done(RunFolder* run, const char* checkpoint) {
    if (run->state.step < run_int(run, "steps")) return false;
    run_say(run, "done     %s is at step %lld of %lld; type --steps N to train on\n", checkpoint,
            (long long)run->state.step, run_int(run, "steps"));
    return true;
}

void report_new_weights(RunFolder* run, const char* model) {
    if (!file_exists(path_in(model, "model.safetensors"))) return;
    run_say(run, " notice   %s is built in and its weights are new; type --model ./%s for those of the folder\n", model,
            model);
}

static bool step_log(RunFolder* run, const StepReport* step) {
    const RunState* state = &run->state;
    const char* names[8] = {"loss", "lr", "norm", "step_s", "tok_s", "skipped"};
    const double rate = (double)run_int(run, "tokens-per-step") / step->seconds;
    const double loss = state->skipped_last > 0 ? NAN : step->loss;
    double values[8] = {loss, step->lr, step->norm, step->seconds, rate, (double)state->skipped};
    int count = 6;
    if (step->peak > 0) names[count] = "mfu", values[count++] = rate * step->flops / step->peak;
    if (step->saturated >= 0) names[count] = "saturated", values[count++] = step->saturated;
    static const char* const bytes[] = {"planned_bytes", "used_bytes"};
    const double memory[] = {(double)step->memory, (double)step->used};  // used by all processes
    return run_log(run, "train", count, names, values) && (step->used == 0 || run_log(run, "memory", 2, bytes, memory));
}

static void step_say(RunFolder* run, const StepReport* step) {
    const RunState* state = &run->state;
    const long long steps = run_int(run, "steps");
    const double rate = (double)run_int(run, "tokens-per-step") / step->seconds;
    const char* mfu = step->peak > 0 ? text_kept("%.1f%%", 100 * rate * step->flops / step->peak) : "-";
    const char* left = step->eta >= 0 ? text_duration(step->eta) : "-";
    const bool small = step->memory < (1ll << 30);
    const char* size =
        text_kept(small ? "%.0f MiB" : "%.1f GiB", (double)step->memory / (double)(small ? 1 << 20 : 1 << 30));
    run_say(run, "step %6lld/%lld %5.1f%%  loss %.4f  norm %.3f  lr %.2e  %6.1f ms  %s tok/s  mfu %s  %s  eta %s",
            (long long)state->step, steps, 100.0 * (double)state->step / (double)steps, step->loss, step->norm,
            step->lr, 1e3 * step->seconds, text_count(rate), mfu, size, left);
    if (state->skipped > 0) run_say(run, "  skipped %lld", (long long)state->skipped);
    run_say(run, "\n");
}

static bool step_skipped(RunFolder* run, const StepReport* step) {
    const RunState* state = &run->state;
    const bool stops = strcmp(run_text(run, "on-nonfinite"), "stop") == 0;
    enum { MAX_IN_A_ROW = 10 };  // a bad batch is one; after as many, the weights are beyond help
    if (!stops) {
        run_say(run, "skip %6lld  loss %g  norm %g: weights and states stay as they were (%lld skipped so far)\n",
                (long long)state->step, step->loss, step->norm, (long long)state->skipped);
    }
    if (!stops && state->skipped_last < MAX_IN_A_ROW) return true;
    const char* row = stops ? "" : text_kept("%lld steps in a row were skipped; ", (long long)state->skipped_last);
    return data_error(run->error,
                      "step %lld: the loss is %g and the norm of the gradient %g; %sthe last good checkpoint is %s; "
                      "type a smaller --lr (now %g), a longer --warmup or a smaller --clip",
                      (long long)state->step, step->loss, step->norm, row, run_last_checkpoint(run),
                      run_real(run, "lr"));
}

double step_timed(StepTimer* timer, int64_t step, double begin, double now) {
    const int64_t done = step - timer->first;
    timer->seconds += now - begin;
    if (done == 1 || done == 10) timer->from = step, timer->since = now, timer->seconds = 0;
    return step == timer->from ? now - begin : (now - timer->since) / (double)(step - timer->from);
}

bool report_step_done(RunFolder* run, StepReport* step, double begin, StepTimer* timer) {
    RunState* state = &run->state;
    const int64_t tokens = run_int(run, "tokens-per-step"), steps = run_int(run, "steps");
    const double now = seconds_now();
    state->step++;
    const double takes = step_timed(timer, state->step, begin, now);
    step->seconds = now - begin;
    step->first = state->step == timer->first + 1, step->last = state->step == steps;
    // The first step on a GPU is slower than those to come, so it gives no estimate.
    step->eta = step->gpu && step->first && !step->last ? -1 : takes * (double)(steps - state->step);
    state->sequences += tokens / run_int(run, "seq"), state->tokens += tokens;
    state->skipped += step->skipped;
    if (step->saturated > 0) state->saturated += (int64_t)step->saturated;
    state->skipped_last = step->skipped ? state->skipped_last + 1 : 0;
    if (isnan(step->loss)) step->loss = NAN;  // printed as nan, not -nan
    if (isnan(step->norm)) step->norm = NAN;
    if (step->parts_left > 0 && !step->skipped) {
        state->parts_left += (int64_t)step->parts_left;
        run_say(run, "skip %6lld  %.0f layers whose gradients are not finite kept their weights (%lld so far)\n",
                (long long)state->step, step->parts_left, (long long)state->parts_left);
    }
    if (!step_log(run, step)) return false;
    if (step->skipped) return step_skipped(run, step);
    if (step->first || step->last || state->step % run_int(run, "print-every") == 0) step_say(run, step);
    return true;
}

bool report_validation(RunFolder* run, double loss, double bytes_per_token, double seconds) {
    RunState* state = &run->state;
    static const char* const names[] = {"loss", "bpb"};
    const bool known = bytes_per_token > 0;
    if (isnan(loss)) loss = NAN;  // printed as nan, not -nan
    const double values[] = {loss, known ? loss / log(2.0) / bytes_per_token : NAN};
    if (loss < state->best_val) state->best_val = loss;
    run_say(run, "val  %6lld  loss %.4f (best %.4f)", (long long)state->step, loss, state->best_val);
    if (known) run_say(run, "  %.4f bits per byte", values[1]);
    run_say(run, "  %.1f s\n", seconds);
    return run_log(run, "val", known ? 2 : 1, names, values);
}

void report_sample(void* context, int index, const char* prompt, const char* text, size_t bytes) {
    RunFolder* run = context;
    const int count = run->prompts.count * (int)run_int(run, "samples");
    SCOPED char *shown, *members;
    size_t length, members_length;
    FILE* memory = text_stream(&shown, &length);
    sample_write(memory, index, count, prompt, text, bytes);
    fclose(memory);
    for (size_t i = 0; i < length; i++) shown[i] = shown[i] ? shown[i] : '?';  // a model of bytes writes NULs too
    memory = text_stream(&members, &members_length);
    fprintf(memory, "\"index\": %d", index);
    json_write_text_member(memory, ", ", "prompt", prompt);
    json_write_text_member(memory, ", ", "text", text);
    fclose(memory);
    if (index == 0) run_say(run, "sample ------------------------------------------------------------\n");
    run_say(run, "%s", shown);
    if (index == count - 1) run_say(run, "-------------------------------------------------------------------\n");
    run_log_members(run, "sample", members);
}

void report_evaluation(void* context, const Evaluation* evaluation, const EvaluationResult* result, double seconds) {
    RunFolder* run = context;
    SCOPED char* members;
    size_t bytes;
    run_say(run, "eval %6lld  %s\n", (long long)run->state.step, evaluation_describe(evaluation, result, seconds));
    FILE* memory = text_stream(&members, &bytes);
    evaluation_log(memory, evaluation, result);
    fclose(memory);
    run_log_members(run, "eval", members);
}

bool report_end(RunFolder* run, bool stopped, double steps, double seconds, bool useless) {
    const RunState* state = &run->state;
    const char* how = stopped ? "stopped" : "done   ";
    if (steps > 0) {
        run_say(run, "%s  %.1f ms a step, %s tok/s after warm-up\n", how, 1e3 * seconds / steps,
                text_count(steps * (double)run_int(run, "tokens-per-step") / seconds));
    } else {
        run_say(run, "%s  at step %lld\n", how, (long long)state->step);
    }
    if (state->skipped > 0) {
        run_say(run, "skipped  %lld of %lld steps, whose loss or gradient was not finite\n", (long long)state->skipped,
                (long long)state->step);
    }
    if (state->skipped_last > 0) {
        run_say(run, "skipped  the last %lld of them in a row, so the weights are those of step %lld\n",
                (long long)state->skipped_last, (long long)(state->step - state->skipped_last));
    }
    return !useless || data_error(run->error,
                                  "the run ended without a finite loss and gradient, so the weights of %s are of no "
                                  "use; type a smaller --lr (now %g)",
                                  run->last_checkpoint[0] ? run->last_checkpoint : "the run", run_real(run, "lr"));
}
