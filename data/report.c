#include "report.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "clock.h"
#include "text.h"

// These return readable numbers: 124475904 as "124M", 3725 seconds as "1h02m".
static const char* text_count(double n) {
    const char* unit = n >= 1e9 ? "B" : n >= 1e6 ? "M" : n >= 1e3 ? "k" : "";
    double scaled = n >= 1e9 ? n / 1e9 : n >= 1e6 ? n / 1e6 : n >= 1e3 ? n / 1e3 : n;
    const int digits = !unit[0] || scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2;
    return text_kept("%.*f%s", digits, scaled, unit);
}

static const char* text_duration(double seconds) {
    const long long s = (long long)(seconds + 0.5);
    if (s < 60) return text_kept("%llds", s);
    if (s < 3600) return text_kept("%lldm%02llds", s / 60, s % 60);
    return text_kept("%lldh%02lldm", s / 3600, s / 60 % 60);
}

static void report_data(RunFolder* run, int V) {
    const Dataset *train = &run->train_data, *val = &run->val_data, *const parts[] = {train, val};
    const int T = (int)run->options->seq;
    const char *tokens = text_count((double)train->tokens), *all = text_count((double)val->tokens);
    const char* read = text_count((double)(dataset_windows_of(val, T, run->options->val_tokens) * T));
    const char* ends = val->mixed ? text_kept(", the ends of %d files", val->files) : "";
    run_say(run, " data     %s  %s tokens in %d file%s  validation reads %s of %s%s  vocabulary %d%s\n", train->path,
            tokens, train->files, train->files == 1 ? "" : "s", read, all, ends, V, train->bytes ? " (bytes)" : "");
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

static void report_training(RunFolder* run, const char* optimizer) {
    const Options* o = run->options;
    const int world = run->ranks;
    const long long tokens = o->tokens_per_step, batch = o->batch, seq = o->seq, steps = o->steps,
                    sequences = tokens / seq, micro = sequences / batch / world;
    const char* ranks = world > 1 ? text_kept("%d ranks x ", world) : "";
    const double epochs = (double)steps * (double)sequences / (double)dataset_windows(&run->train_data, (int)seq);
    run_say(run, " batch    %lld x %lld x %s%lld micro-batch%s = %lld tokens a step  %lld steps = %.2f epochs\n", batch,
            seq, ranks, micro, micro == 1 ? "" : "es", tokens, steps, epochs);
    if (epochs >= 1000) {
        run_say(run,
                " notice   each text is read %.0f times, so the model will learn it by heart; give more --data or "
                "fewer --steps\n",
                epochs);
    }
    const bool constant = strcmp(o->schedule, "constant") == 0;
    run_say(run, " optim    %s\n", optimizer);
    if (strcmp(o->overrides, "none") != 0) run_say(run, " override %s\n", o->overrides);
    if (!default_v_falls(o) && o->of_rule.beta2 > 0.95) {
        run_say(run,
                " notice   a v with @dq8 and --beta2 %g costs loss, since its 8-bit scales do not fall as v does; type "
                "--beta2 0.95, or a v such as udyn8 or lin4/64\n",
                o->of_rule.beta2);
    }
    const long long rise = o->of_rule.momentum_warmup;
    run_say(run, " schedule lr %g, %s to %g of it, warm-up %lld steps, clip %g, weight decay %g, beta2 %g%s\n", o->lr,
            o->schedule, constant ? 1.0 : o->final_lr, o->warmup, o->clip, o->of_rule.weight_decay, o->of_rule.beta2,
            rise > 0 ? text_kept(", momentum from 0.85 in %lld steps", rise) : "");
}

void report_banner(RunFolder* run, int V, const char* device, const char* ranks, const char* optimizer,
                   const MemoryPlan* memory) {
    const Options* o = run->options;
    const char* changed = run->changed;
    run_say(run, "nibble  %s  %lld layers, %lld channels, %lld heads  %lld parameters\n", o->model, o->layers,
            o->channels, o->heads, (long long)run->parameters);
    run_say(run, " device   %s\n", device);
    if (ranks)
        run_say(run, " ranks    %d, %s  shard %s  gradients sent as %s\n", run->ranks, ranks, o->shard, o->grads);
    report_data(run, V);
    report_training(run, optimizer);
    const bool several = run->ranks > 1, large = memory->total >= (1ll << 30);
    const double unit = large ? 1.0 / (1 << 30) : 1.0 / (1 << 20);
    run_say(run, " memory   %sweights %.2f  states %.2f  gradients %.2f  activations %.2f  other %.2f",
            several ? "of rank 0: " : "", (double)memory->weights * unit, (double)memory->states * unit,
            (double)memory->grads * unit, (double)memory->activations * unit, (double)memory->other * unit);
    if (memory->taken > 0)
        run_say(run, "  driver%s %.2f", several ? " and exchange" : "", (double)memory->taken * unit);
    if (memory->host > 0) run_say(run, "  host %.2f", (double)memory->host * unit);
    // Bytes of a parameter while it trains, the room for decoded weights and the gradients included.
    const double each = (double)(memory->weights + memory->states + memory->grads) / (double)run->parameters;
    run_say(run, " = %.2f %s of %.1f GiB  (matmul %s, recompute %s, %.4g B/param held)\n", (double)memory->total * unit,
            large ? "GiB" : "MiB", (double)memory->available / (1 << 30), o->matmul, o->recompute, each);
    if (changed) run_say(run, " changed %s\n", changed + (*changed == ';'));
}

const char* report_lack(const Options* o, const MemoryPlan* plan, const char* device, int64_t fits, bool less) {
    const double have = (double)plan->available / (1 << 30);
    const char* type = strcmp(o->recompute, "block") == 0 ? "--kept-blocks 1" : "--recompute block";
    if (fits > 0) {
        return text_kept("--batch %lld needs %.2f GiB and %.2f GiB are free on %s; type --batch %lld or less%s%s",
                         o->batch, (double)plan->total / (1 << 30), have, device, (long long)fits, less ? ", or " : "",
                         less ? type : "");
    }
    return text_kept(
        "even --batch 1 needs more than the %.2f GiB that are free on %s; %stake a shorter --seq, a smaller --model or "
        "a smaller --preset",
        have, device, less ? text_kept("type %s --batch 1, or ", type) : "");
}

const char* run_identity(const RunFolder* run) {
    const Dataset *train = &run->train_data, *val = &run->val_data;
    const Prompts* p = &run->prompts;
    const char* text = text_kept("--data or --model with%s a tokenizer\1", run->samples ? "" : "out");
    for (int i = 0; i < OPTION_COUNT; i++) {
        const Option* option = &OPTIONS[i];
        if (option->type == OPTION_FLAG || text_among(option->name, "run resume data val join-timeout", ' ')) continue;
        text_add(&text, "--%s %s\1", option->name, shell_word(option_text(option, run->options)));
    }
    text_add(&text, "--resume of a checkpoint with checksum %08llx\1", (long long)json_int(run->resumed, "crc32c", 0));
    text_add(&text, "--data of %lld tokens (checksum %08x)\1--val of %lld tokens (checksum %08x)\1",
             (long long)train->tokens, train->crc, (long long)val->tokens, val->crc);
    text_add(&text, "--prompt-file of %d prompts (checksum %08x)\1--eval of files with checksum %08x\1", p->count,
             crc32c(crc32c(0, p->length, 4ll * p->count), p->tokens, 4ll * p->all), run->tasks);
    return text;
}

static bool step_log(RunFolder* run, const StepReport* step) {
    const Options* o = run->options;
    const RunState* state = &run->state;
    const char* names[8] = {"loss", "lr", "norm", "step_s", "tok_s", "skipped"};
    const double rate = (double)o->tokens_per_step / step->seconds;
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
    const Options* o = run->options;
    const RunState* state = &run->state;
    const long long steps = o->steps;
    const double rate = (double)o->tokens_per_step / step->seconds;
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
    const Options* o = run->options;
    const RunState* state = &run->state;
    const bool stops = strcmp(o->on_nonfinite, "stop") == 0;
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
                      (long long)state->step, step->loss, step->norm, row, run_last_checkpoint(run), o->lr);
}

double step_timed(StepTimer* timer, int64_t step, double begin, double now) {
    const int64_t done = step - timer->first;
    timer->seconds += now - begin;
    if (done == 1 || done == 10) timer->from = step, timer->since = now, timer->seconds = 0;
    return step == timer->from ? now - begin : (now - timer->since) / (double)(step - timer->from);
}

bool report_step_done(RunFolder* run, StepReport* step, double begin) {
    const Options* o = run->options;
    RunState* state = &run->state;
    const int64_t tokens = o->tokens_per_step, steps = o->steps;
    const double now = seconds_now();
    state->step++;
    const double takes = step_timed(&step->timer, state->step, begin, now);
    step->seconds = now - begin;
    const bool first = state->step == step->timer.first + 1, last = state->step == steps;
    // The first step on a GPU is slower than those to come, so it gives no estimate.
    step->eta = step->gpu && first && !last ? -1 : takes * (double)(steps - state->step);
    state->sequences += tokens / o->seq;
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
    if (first || last || state->step % o->print_every == 0) step_say(run, step);
    return true;
}

bool report_validation(RunFolder* run, double loss, double seconds) {
    RunState* state = &run->state;
    const double bytes_per_token = run->val_data.bytes_per_token;
    static const char* const names[] = {"loss", "bpb"};
    const bool known = bytes_per_token > 0;
    if (isnan(loss)) loss = NAN;  // printed as nan, not -nan
    const double values[] = {loss, known ? loss / log(2.0) / bytes_per_token : NAN};
    if (loss < state->best_val) state->best_val = loss, state->best_step = state->step;
    run_say(run, "val  %6lld  loss %.4f (best %.4f)", (long long)state->step, loss, state->best_val);
    if (known) run_say(run, "  %.4f bits per byte", values[1]);
    run_say(run, "  %.1f s\n", seconds);
    return run_log(run, "val", known ? 2 : 1, names, values);
}

bool report_save(RunFolder* run, CheckpointWriter* writer, bool ok, double begin, bool prune) {
    const long long step = run->state.step;
    const bool best = run->options->keep == OPTION_AUTO;
    char* error = run->error;
    const char* path = checkpoint_name(run->path, step);
    if (!ok) {
        const char* advice = writer->nonfinite ? text_kept("with a smaller --lr (now %g)", run->options->lr)
                                               : "free space or name another --run, and";
        checkpoint_abandon(writer);
        return data_error(error, "checkpoint of step %lld was not saved: %s; %s go on with --resume %s", step, error,
                          advice, run_resume_words(run));
    }
    // First of all, since every error message that may follow names it.
    snprintf(run->last_checkpoint, sizeof(run->last_checkpoint), "%.4095s", path);
    if (!writer->folder) return true;
    run_say(run, "save %6lld  %s  %.1f s\n", step, path, seconds_now() - begin);
    if (best && run->state.best_step == step && !checkpoint_mark_best(run->path, step, error)) return false;
    if (prune && !checkpoint_prune(run->path, best ? 2 : run->options->keep, step, error)) {
        fprintf(stderr, "train: notice: %s\n", error);
    }
    return true;
}

bool report_evaluation(RunFolder* run, const EvaluationPass* pass, FILE* out, double seconds) {
    const EvaluationResult result = evaluation_result(pass);
    const char* step = *run->path ? text_kept("%6lld", (long long)run->state.step) : "  ";
    run_say(run, "eval %s  %s\n", step, evaluation_describe(&result, seconds));
    FILE* log = run_log_begin(run, "eval");
    if (log) evaluation_log(log, &result);
    return (!log || run_log_end(run)) && (!out || evaluation_write(out, pass, run->error));
}

bool report_end(RunFolder* run, bool stopped, double steps, double seconds, bool useless) {
    const Options* o = run->options;
    const RunState* state = &run->state;
    const char* how = stopped ? "stopped" : "done   ";
    if (steps > 0) {
        run_say(run, "%s  %.1f ms a step, %s tok/s after warm-up\n", how, 1e3 * seconds / steps,
                text_count(steps * (double)o->tokens_per_step / seconds));
    } else {
        run_say(run, "%s  at step %lld\n", how, (long long)state->step);
    }
    if (state->skipped > 0) {
        const char* last = text_kept("; the last %lld in a row", (long long)state->skipped_last);
        run_say(run, "skipped  %lld of %lld steps, whose loss or gradient was not finite%s\n",
                (long long)state->skipped, (long long)state->step, state->skipped_last ? last : "");
    }
    return !useless || data_error(run->error,
                                  "the run ended without a finite loss and gradient, so the weights of %s are of no "
                                  "use; type a smaller --lr (now %g)",
                                  run->last_checkpoint[0] ? run->last_checkpoint : "the run", o->lr);
}
