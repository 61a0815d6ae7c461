#include "schedule.h"
#include "gpt2_config.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "text.h"

bool products_choose(Options* o, const char* gpu, int compute, char* error) {
    if (!gpu && strcmp(o->matmul, "bf16") == 0) {
        return data_error(error, "--matmul bf16 needs a GPU; type --matmul fp32");
    }
    if (strcmp(o->matmul, "auto") == 0) o->matmul = gpu ? "bf16" : "fp32";
    if (strcmp(o->matmul, "fp8") != 0) return true;
    if (strcmp(o->head, "auto") == 0) o->head = "fp8";
    return !gpu || compute >= 89 ||
           data_error(
               error,
               "--matmul fp8 needs a GPU of compute capability 8.9 or more, and %s has %d.%d; type --matmul bf16", gpu,
               compute / 10, compute % 10);
}

long long default_logit_rows(const Options* o, int64_t rows, bool gpu) {
    const long long most = o->logit_rows != OPTION_AUTO ? o->logit_rows : gpu ? 8192 : 1024;
    return most < rows ? most : rows;
}

bool batch_choose(Options* o, int64_t ranks, int64_t fits, int64_t usual, bool gpu, char* error) {
    const bool fp8 = strcmp(o->matmul, "fp8") == 0, bf16 = gpu && strcmp(o->matmul, "fp32") != 0;
    const long long T = o->seq, tokens = o->tokens_per_step, sequence = T * ranks;  // tokens of one a rank
    if (o->batch < 0) {
        o->batch = 1;
        while (o->batch * 2 <= fits) o->batch *= 2;
        while (tokens >= 0 && tokens / sequence % o->batch != 0) o->batch /= 2;
    }
    const long long rows = o->batch * T, micro = rows * ranks;  // tokens of a micro-batch, of a rank and of all
    if (tokens < 0) {
        const int64_t micro_batches = usual ? (usual / ranks + rows / 2) / rows : 1;
        o->tokens_per_step = micro * (micro_batches > 0 ? micro_batches : 1);
    }
    if (o->tokens_per_step % micro != 0) {
        long long batch = o->batch < tokens / sequence ? o->batch : tokens / sequence;
        while (batch > 1 && tokens / sequence % batch != 0) batch--;
        const char* smaller = tokens % sequence == 0 ? text_kept("--batch %lld or ", batch) : "";
        return data_error(error,
                          "--tokens-per-step %lld is not a multiple of --batch %lld x --seq %lld x %lld GPU%s = %lld; "
                          "type %s--tokens-per-step %lld",
                          tokens, o->batch, T, (long long)ranks, ranks > 1 ? "s" : "", micro, smaller,
                          tokens < micro ? micro : tokens / micro * micro);
    }
    if (fp8 && rows % 16 != 0) {
        return data_error(
            error,
            "--matmul fp8 sums over rows in sixteens, and --batch %lld of --seq %lld are %lld rows; type --seq %lld",
            o->batch, T, rows, T / 16 > 0 ? T / 16 * 16 : 16);
    }
    o->logit_rows = default_logit_rows(o, rows, gpu);
    if (fp8 && strcmp(o->head, "fp8") == 0 && o->logit_rows % 16 != 0) {
        return data_error(
            error, "--head fp8 multiplies multiples of 16 rows, and --logit-rows is %lld; type --logit-rows %lld",
            o->logit_rows, (o->logit_rows + 15) / 16 * 16);
    }
    if (strcmp(o->grads, "auto") == 0) o->grads = bf16 && o->tokens_per_step == micro ? "bf16" : "fp32";
    return bf16 || strcmp(o->grads, "bf16") != 0 ||
           data_error(error, "--grads bf16 goes with --matmul bf16, and --matmul is %s; type --grads fp32", o->matmul);
}

static double usual_rate(const Options* o, int64_t step) {
    if (step < o->warmup) return o->lr * (double)(step + 1) / (double)o->warmup;
    if (strcmp(o->schedule, "constant") == 0) return o->lr;
    const double end = o->lr * o->final_lr, last = (double)(o->steps - 1);
    const bool wsd = strcmp(o->schedule, "wsd") == 0;
    // The rate falls from here, which may lie between two steps with wsd, to the last step.
    const double begin = wsd ? last - last * o->decay_fraction : (double)o->warmup;
    double done = last > begin ? ((double)step - begin) / (last - begin) : last > 0;
    done = done < 0 ? 0 : done > 1 ? 1 : done;
    if (wsd) return end + (o->lr - end) * (1.0 - sqrt(done));
    if (strcmp(o->schedule, "linear") == 0) return o->lr + (end - o->lr) * done;
    return end + (o->lr - end) * 0.5 * (1.0 + cos(3.14159265358979 * done));
}

double learning_rate(const Options* o, const RateRise* rise, int64_t step) {
    const int64_t half = (o->steps - rise->step) / 2, length = o->warmup < half ? o->warmup : half;
    const double rate = usual_rate(o, step), since = (double)(step - rise->step);
    if (rise->step == 0 || since < 0 || since >= (double)length || rate <= rise->lr) return rate;
    return rise->lr + (rate - rise->lr) * (since + 1) / (double)length;
}

static double least(double a, double b) {
    return a < b ? a : b;
}

static double between(double low, double x, double high) {
    return x < low ? low : least(x, high);
}

// Rounds a number to two digits, as one would type it.
static double two_digits(double x) {
    char text[32];
    snprintf(text, sizeof(text), "%.1e", x);
    return strtod(text, NULL);
}

// B* for a run of `tokens`.
static double suited(double tokens) {
    return 65536 * sqrt(tokens / 180e6);
}

long long default_tokens_per_step(const Options* o, int64_t epoch) {
    // With N known, the equation B = 65536 sqrt(N B / 180M) gives B.
    const double one = suited((double)o->steps), batch = o->steps > 0 ? one * one : suited((double)epoch);
    const double sequences = between(32768, batch, 524288) / (double)o->seq;
    return o->seq * (long long)exp2(round(log2(sequences > 1 ? sequences : 1)));
}

const char* default_preset(const Options* o) {
    if (*o->preset && strcmp(o->preset, "auto") != 0) return o->preset;
    return *o->rule || *o->weights || *o->m || *o->v || !gpt2_named(o->model) ? "adamw32" : "muon";
}

static bool is_muon(const Options* o) {
    return text_among(o->rule, "muon|normuon", '|');
}

const char* default_overrides(const Options* o) {
    const bool adds = is_muon(o) && o->of_rule.weight_decay == OPTION_AUTO && !strstr(o->overrides, "wd=");
    return adds ? text_kept("%s" DEFAULT_DECAY, o->overrides) : o->overrides;
}

bool default_v_falls(const Options* o) {
    bool falls = !strstr(o->v, "@dq8");
    for (const char* at = o->overrides; (at = strstr(at, "v=")); at++) {
        const char* end = at + strcspn(at, " ;");
        falls = falls && !memmem(at, (size_t)(end - at), "@dq8", 4);
    }
    return falls;
}

// ademamix's slow average remembers a third of the run, and came's confidence ten times as many steps as v does.
static double usual_beta3(const char* rule, double beta2, double steps) {
    if (strncmp(rule, "came", 4) == 0) return 1.0 - 0.1 * (1.0 - beta2);
    return steps > 30 ? fmin(0.9999, 1.0 - 3.0 / steps) : 0.9;
}

// Ends the warm-up where the run ends, and before wsd's decay; refuses a typed one that is longer, and a rate of 0.
static bool schedule_fits(Options* o, char* error) {
    const double decay = strcmp(o->schedule, "wsd") == 0 ? (double)o->steps * o->decay_fraction : 0;
    const long long flat = (long long)((double)o->steps - decay);          // steps before the rate falls
    if (o->warmup > flat && !option_given(o, "warmup")) o->warmup = flat;  // as in a resumed run that was made shorter
    if ((float)o->lr == 0 && o->steps > 0) {
        return data_error(error, "--lr %g leaves every weight as it is; leave --lr out, or type a larger one", o->lr);
    }
    return o->warmup <= flat || o->steps == 0 ||
           data_error(error, "--warmup %lld is more than the %lld steps that are left for it; type --warmup %lld",
                      o->warmup, flat, flat);
}

bool defaults_choose(Options* o, double rate, bool trained, bool gpu, int64_t windows, char* error) {
    if (o->steps == OPTION_AUTO && !*o->data) o->steps = gpu ? 400 : 1500;
    if (o->steps == OPTION_AUTO) o->steps = (long long)fmax(1, windows / (o->tokens_per_step / o->seq));
    if (o->profile) o->val_every = o->sample_every = o->eval_every = 0;
    if (o->val_every == OPTION_AUTO) o->val_every = o->steps < 2000 ? (o->steps + 4) / 5 : 250;
    if (o->print_every == OPTION_AUTO) o->print_every = o->steps < 1200 ? (o->steps + 60) / 60 : 20;
    if (o->val_tokens == OPTION_AUTO) o->val_tokens = gpu ? 655360 : 10240;
    if (o->sample_every == OPTION_AUTO) o->sample_every = o->steps > 0 ? o->steps : 1;
    if (o->of_rule.ramp == OPTION_AUTO) o->of_rule.ramp = o->steps;
    const bool muon = is_muon(o);
    const bool adam = text_among(o->rule, "adamw|adam|nadamw|ademamix|muon", '|');
    const double N = (double)o->steps, B = (double)o->tokens_per_step, D = N > 0 ? N * B : B;
    if (o->lr == OPTION_AUTO) {
        const double adamw = least(0.0018 * 768 / (double)o->channels * sqrt(B / suited(D)), 0.003);
        o->lr = two_digits(adamw * rate / (trained ? 30 : 1));
    }
    if (o->of_rule.momentum_warmup == OPTION_AUTO) {
        o->of_rule.momentum_warmup = muon && B >= 32768 ? (long long)least(N / 4, 300) : 0;
    }
    if (o->warmup == OPTION_AUTO) {
        const double usual = muon ? 40 : between(60, floor(N / 20), 700);
        o->warmup = (long long)least(usual, floor(0.75 * N));
    }
    if (o->of_rule.weight_decay == OPTION_AUTO)
        o->of_rule.weight_decay = muon ? two_digits(between(0.05, 4 / (N * o->lr), 0.4)) : 0.1;
    if (o->of_rule.beta2 == OPTION_AUTO) {
        const double half = least(10e6, D / 20);
        o->of_rule.beta2 = 1 - (adam && default_v_falls(o) ? least(two_digits(1 - exp2(-B / half)), 0.05) : 0.05);
    }
    if (o->of_rule.beta3 == OPTION_AUTO) o->of_rule.beta3 = usual_beta3(o->rule, o->of_rule.beta2, N);
    return schedule_fits(o, error);
}
