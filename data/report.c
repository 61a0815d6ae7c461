// See report.h.
#include "report.h"
#include <math.h>
#include <string.h>

void report_data(RunFolder* run, const Dataset* train, const Dataset* val, int T, int64_t val_tokens, int vocabulary) {
    const struct {
        const char* name;
        const Dataset* data;
    } parts[] = {{"data", train}, {"validation data", val}};
    char tokens[32], all[32], read[32], left_out[32];
    format_count((double)train->tokens, tokens, sizeof(tokens));
    format_count((double)val->tokens, all, sizeof(all));
    format_count((double)(dataset_windows_of(val, T, val_tokens) * T), read, sizeof(read));
    run_say(run, " data     %s  %s tokens in %d file%s  validation reads %s of %s  vocabulary %d%s\n", train->path,
            tokens, train->files, train->files == 1 ? "" : "s", read, all, vocabulary, train->bytes ? " (bytes)" : "");
    for (int i = 0; i < 2; i++) {
        const int files = parts[i].data->left_out;
        if (files == 0) continue;
        format_count((double)parts[i].data->left_out_tokens, left_out, sizeof(left_out));
        run_say(run, " notice   %d file%s of the %s, shorter than a window of %d tokens, %s left out: %s tokens\n",
                files, files == 1 ? "" : "s", parts[i].name, T + 1, files == 1 ? "is" : "are", left_out);
    }
}

bool report_step_log(RunFolder* run, const RunState* state, const StepReport* step, int64_t tokens, char* error) {
    static const char* const names[] = {"loss", "lr", "norm", "step_s", "tok_s", "skipped", "mfu"};
    const double rate = (double)step->tokens / step->seconds, loss = state->skipped_last > 0 ? NAN : step->loss;
    const double values[] = {
        loss, step->lr, step->norm, step->seconds, rate, (double)state->skipped, rate * step->flops / step->peak};
    return run_log(run, "train", state->step, tokens, step->peak > 0 ? 7 : 6, names, values, error);
}

void report_step(RunFolder* run, const RunState* state, const StepReport* step) {
    char rate[32], left[32] = "-", size[32], mfu[32] = "-";
    const double tokens_per_second = (double)step->tokens / step->seconds;
    if (step->peak > 0) snprintf(mfu, sizeof(mfu), "%.1f%%", 100 * tokens_per_second * step->flops / step->peak);
    format_count(tokens_per_second, rate, sizeof(rate));
    if (step->eta >= 0) format_duration(step->eta, left, sizeof(left));
    const bool small = step->memory < (1ll << 30);
    snprintf(size, sizeof(size), small ? "%.0f MiB" : "%.1f GiB",
             (double)step->memory / (double)(small ? 1 << 20 : 1 << 30));
    run_say(run, "step %6lld/%lld %5.1f%%  loss %.4f  norm %.3f  lr %.2e  %6.1f ms  %s tok/s  mfu %s  %s  eta %s",
            (long long)state->step, (long long)step->steps, 100.0 * (double)state->step / (double)step->steps,
            step->loss, step->norm, step->lr, 1e3 * step->seconds, rate, mfu, size, left);
    if (state->skipped > 0) run_say(run, "  skipped %lld", (long long)state->skipped);
    run_say(run, "\n");
}

bool report_skip(RunFolder* run, const RunState* state, const StepReport* step, bool stop, double lr, char* error) {
    enum { MAX_IN_A_ROW = 10 };  // a bad batch is one; after as many, the weights are beyond help
    if (!stop) {
        run_say(run, "skip %6lld  loss %g  norm %g: weights and states stay as they were (%lld skipped so far)\n",
                (long long)state->step, step->loss, step->norm, (long long)state->skipped);
    }
    if (!stop && state->skipped_last < MAX_IN_A_ROW) return true;
    char row[64] = "";
    if (!stop) snprintf(row, sizeof(row), "%lld steps in a row were skipped; ", (long long)state->skipped_last);
    return data_error(error,
                      "step %lld: the loss is %g and the norm of the gradient %g; %sthe last good checkpoint is %s; "
                      "type a smaller --lr (now %g), a longer --warmup or a smaller --clip",
                      (long long)state->step, step->loss, step->norm, row,
                      run->last_checkpoint[0] ? run->last_checkpoint : "none", lr);
}

bool report_validation(RunFolder* run, RunState* state, double loss, double bytes_per_token, double seconds,
                       int64_t tokens, char* error) {
    static const char* const names[] = {"loss", "bpb"};
    const bool known = bytes_per_token > 0;
    const double values[] = {loss, known ? loss / log(2.0) / bytes_per_token : NAN};
    if (loss < state->best_val) state->best_val = loss;
    run_say(run, "val  %6lld  loss %.4f (best %.4f)", (long long)state->step, loss, state->best_val);
    if (known) run_say(run, "  %.4f bits per byte", values[1]);
    run_say(run, "  %.1f s\n", seconds);
    return run_log(run, "val", state->step, tokens, known ? 2 : 1, names, values, error);
}

bool report_end(RunFolder* run, const RunState* state, bool stopped, double steps, double tokens, double seconds,
                bool useless, double lr, char* error) {
    char rate[32];
    const char* how = stopped ? "stopped" : "done   ";
    if (steps > 0) {
        format_count(steps * tokens / seconds, rate, sizeof(rate));
        run_say(run, "%s  %.1f ms a step, %s tok/s after warm-up\n", how, 1e3 * seconds / steps, rate);
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
    return !useless || data_error(error,
                                  "the run ended without a finite loss and gradient, so the weights of %s are of no "
                                  "use; type a smaller --lr (now %g)",
                                  run->last_checkpoint, lr);
}

double step_timed(StepTimer* timer, int64_t step, double begin, double now) {
    const int64_t done = step - timer->first;
    timer->seconds += now - begin;
    if (done == 1 || done == 10) timer->from = step, timer->since = now, timer->seconds = 0;
    return step == timer->from ? now - begin : (now - timer->since) / (double)(step - timer->from);
}
