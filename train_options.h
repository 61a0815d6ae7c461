// What can be typed: one table drives parsing, --help, the banner, config.json and what a resume restores and reports.
// It is train_gpt2.cu's, which resolves what is left to the program, but for the length of a run and its learning rate.
#pragma once
#include <string.h>

#include "data/options.h"
#include "kernels/common.cuh"  // user_error
#include "optim/optim.h"       // OptimConfig
#include "train_synonyms.h"    // SYNONYMS: names of other programs for the options

constexpr int64_t AUTO = OPTION_AUTO;  // an option left to the program; the functions *_resolve replace it

struct Options {
    // data
    const char *data, *data_format;
    const char* val;
    double val_fraction;
    // model
    const char* model;
    int64_t layers, channels, heads, seq;
    // batch and length
    int64_t batch, tokens_per_step, steps;
    // optimizer
    const char *preset, *rule, *weights, *grads, *m, *v;
    double lr, beta1, beta2, eps, weight_decay, beta3, alpha, clip;
    const char *decay_mode, *overrides, *formats;
    int64_t ramp;
    const char *on_nonfinite, *schedule;
    int64_t warmup;
    double final_lr, decay_fraction;
    // precision and memory
    const char* matmul;
    const char* recompute;
    int64_t logit_rows;
    // several GPUs
    int64_t gpus;
    const char *shard, *comm;
    int64_t join_timeout;
    // validation and samples
    int64_t val_every, val_tokens, sample_every, sample_tokens;
    const char* prompt;
    double temperature;
    int64_t top_k;
    // run
    const char* run;
    int64_t print_every, save_every, keep;
    const char* resume;
    const char* device;
    int64_t seed;
    // instead of training
    const char* sample;
    bool dry_run, list_formats, list_presets, help;
};

#define FIELD(name) offsetof(Options, name)
static const Option OPTIONS[] = {
    {"data", OPTION_TEXT, FIELD(data), "", 0, 0, "PATH", "data",
     "folder of data/prepare.py, .bin shard or glob, or any file, read as bytes; none: this program's own source"},
    {"data-format", OPTION_CHOICE, FIELD(data_format), "auto", 0, 0, "auto|bytes|shards|nanogpt", "data",
     "what --data and --val hold; auto: shards or text; bytes: any file; nanogpt: its train.bin, val.bin and meta.pkl"},
    {"val", OPTION_TEXT, FIELD(val), "", 0, 0, "PATH", "data",
     "validation data; none: the folder's, or a part of --data"},
    {"val-fraction", OPTION_REAL, FIELD(val_fraction), "0.05", 0.0001, 0.5, "F", "data",
     "share of a single file that is kept for validation"},
    {"model", OPTION_TEXT, FIELD(model), "auto", 0, 0, "NAME|DIR", "model",
     "gpt2|gpt2-medium|gpt2-large|gpt2-xl|nano|d6|d12|d24|d36|d48|d60|d72|d84, or a Hugging Face GPT-2 folder"},
    {"layers", OPTION_INT, FIELD(layers), "auto", 1, 256, "L", "model", "instead of the model's"},
    {"channels", OPTION_INT, FIELD(channels), "auto", 64, 12288, "C", "model",
     "a multiple of the heads times 64 or 128"},
    {"heads", OPTION_INT, FIELD(heads), "auto", 1, 1024, "NH", "model", "channels / heads is 64 or 128"},
    {"seq", OPTION_INT, FIELD(seq), "auto", 1, 65536, "T", "model", "tokens of a training sequence"},
    {"batch", OPTION_INT, FIELD(batch), "auto", 1, 65536, "B", "batch and length", "sequences of one micro-batch"},
    {"tokens-per-step", OPTION_INT, FIELD(tokens_per_step), "auto", 1, 1e12, "N", "batch and length",
     "total batch of an optimizer step, a multiple of batch x seq"},
    {"steps", OPTION_INT, FIELD(steps), "auto", 0, 1e12, "N", "batch and length",
     "optimizer steps; auto: one epoch, or of the built-in text 400 on a GPU and 1500 on the CPU"},
    {"preset", OPTION_TEXT, FIELD(preset), "adamw32", 0, 0, "NAME", "optimizer", "see --list-presets"},
    {"rule", OPTION_TEXT, FIELD(rule), "", 0, 0, "NAME", "optimizer", "the update, instead of the preset's"},
    {"weights", OPTION_TEXT, FIELD(weights), "", 0, 0, "FORMAT", "optimizer",
     "storage of the weights: see --list-formats"},
    {"grads", OPTION_TEXT, FIELD(grads), "auto", 0, 0, "FORMAT", "optimizer",
     "fp32, or bf16, half the memory: rounded once a micro-batch; auto: bf16 where a step has one"},
    {"m", OPTION_TEXT, FIELD(m), "", 0, 0, "FORMAT", "optimizer", "storage of the first moment"},
    {"v", OPTION_TEXT, FIELD(v), "", 0, 0, "FORMAT", "optimizer", "storage of the second moment"},
    {"format", OPTION_TEXT, FIELD(formats), "", 0, 0, "FILE", "optimizer",
     "formats of your own for --m and --v on a GPU, such as dev/examples/format.cuh; commas between files; runs the "
     "code in them, and so does a checkpoint that names one"},
    {"override", OPTION_TEXT, FIELD(overrides), "", 0, 0, "TEXT", "optimizer",
     "by tensor name, such as \"wpe|ln*: weights=fp32 m=fp32 lr=0.5; *.bias: wd=0 rule=sgd\"; none: not even the "
     "preset's, which go with its --weights, --m and --v"},
    {"lr", OPTION_REAL, FIELD(lr), "auto", 0, 1000, "F", "optimizer",
     "largest learning rate; auto: by the model's width and the rule"},
    {"beta1", OPTION_REAL, FIELD(beta1), "0.9", 0, 0.999999, "F", "optimizer", "decay of m"},
    {"beta2", OPTION_REAL, FIELD(beta2), "0.95", 0, 0.999999, "F", "optimizer", "decay of v"},
    {"eps", OPTION_REAL, FIELD(eps), "1e-8", 1e-30, 1, "F", "optimizer", "added to the root of v"},
    {"weight-decay", OPTION_REAL, FIELD(weight_decay), "0.1", 0, 100, "F", "optimizer", "of matrices and embeddings"},
    {"decay-mode", OPTION_CHOICE, FIELD(decay_mode), "coupled", 0, 0, "coupled|independent", "optimizer",
     "decay by lr x F a step, or by F x lr / largest lr (then F is near 1e-4)"},
    {"beta3", OPTION_REAL, FIELD(beta3), "auto", 0, 0.9999999, "F", "optimizer",
     "ademamix: decay of the slow average; auto: it remembers a third of the run, at most 10000 steps"},
    {"alpha", OPTION_REAL, FIELD(alpha), "2", 0, 1000, "F", "optimizer", "ademamix: weight of the slow average"},
    {"ramp", OPTION_INT, FIELD(ramp), "auto", 0, 1e12, "N", "optimizer",
     "ademamix: steps until beta3 and alpha are reached; auto: all"},
    {"clip", OPTION_REAL, FIELD(clip), "1.0", 0, 1e9, "F", "optimizer", "largest norm of the gradient; 0: no clipping"},
    {"on-nonfinite", OPTION_CHOICE, FIELD(on_nonfinite), "skip", 0, 0, "skip|stop", "optimizer",
     "a step whose loss or gradient is not finite changes nothing: go on (at most 10 in a row), or stop"},
    {"schedule", OPTION_CHOICE, FIELD(schedule), "cosine", 0, 0, "cosine|linear|constant|wsd", "optimizer",
     "how the learning rate falls"},
    {"warmup", OPTION_INT, FIELD(warmup), "auto", 0, 1e12, "N", "optimizer", "steps of linear warm-up"},
    {"final-lr", OPTION_REAL, FIELD(final_lr), "0.1", 0, 1, "F", "optimizer", "last learning rate as a share of --lr"},
    {"decay-fraction", OPTION_REAL, FIELD(decay_fraction), "0.2", 0.001, 1, "F", "optimizer",
     "share of the steps in which wsd decays"},
    {"matmul", OPTION_CHOICE, FIELD(matmul), "auto", 0, 0, "auto|bf16|fp32", "precision and memory",
     "precision of the matrix products; sums are fp32"},
    {"recompute", OPTION_CHOICE, FIELD(recompute), "none", 0, 0, "none|gelu|block", "precision and memory",
     "what the backward pass computes again instead of keeping it"},
    {"logit-rows", OPTION_INT, FIELD(logit_rows), "auto", 1, 1e9, "N", "precision and memory",
     "rows of logits in memory at a time"},
    {"gpus", OPTION_INT, FIELD(gpus), "1", 1, 1024, "N", "several GPUs",
     "of this machine, a process each; torchrun, srun and mpirun give their own number"},
    {"shard", OPTION_CHOICE, FIELD(shard), "none", 0, 0, "none|states|grads|weights", "several GPUs",
     "what is spread over the GPUs instead of kept by each: ZeRO 0, 1, 2, 3"},
    {"comm", OPTION_CHOICE, FIELD(comm), "grads", 0, 0, "grads|bf16", "several GPUs",
     "what gradients are sent as: as they are, or rounded to bf16; their sum is fp32"},
    {"join-timeout", OPTION_INT, FIELD(join_timeout), "300", 1, 1e6, "SECONDS", "several GPUs",
     "how long the first wait for the last"},
    {"val-every", OPTION_INT, FIELD(val_every), "auto", 0, 1e12, "N", "validation and samples", "steps; 0: never"},
    {"val-tokens", OPTION_INT, FIELD(val_tokens), "auto", 1, 1e12, "N", "validation and samples",
     "tokens of one validation, at most: the first windows of the validation data"},
    {"sample-every", OPTION_INT, FIELD(sample_every), "auto", 0, 1e12, "N", "validation and samples",
     "steps; 0: never; auto: at the end"},
    {"sample-tokens", OPTION_INT, FIELD(sample_tokens), "128", 1, 65536, "N", "validation and samples",
     "length of a sample"},
    {"prompt", OPTION_TEXT, FIELD(prompt), "", 0, 0, "TEXT", "validation and samples", "begins the samples of a run"},
    {"temperature", OPTION_REAL, FIELD(temperature), "0.8", 0, 100, "F", "validation and samples",
     "0: the likeliest token"},
    {"top-k", OPTION_INT, FIELD(top_k), "50", 0, 1e9, "N", "validation and samples",
     "draw from the k likeliest; 0: all"},
    {"run", OPTION_TEXT, FIELD(run), "", 0, 0, "DIR", "run", "run folder; none: runs/DATE_TIME_MODEL"},
    {"print-every", OPTION_INT, FIELD(print_every), "auto", 1, 1e12, "N", "run",
     "steps between lines on the terminal; log.jsonl has every step"},
    {"save-every", OPTION_INT, FIELD(save_every), "1000", 0, 1e12, "N", "run",
     "steps between checkpoints; one is always written at the end and on a signal"},
    {"keep", OPTION_INT, FIELD(keep), "2", 1, 1e9, "N", "run", "checkpoints that stay; older ones are removed"},
    {"resume", OPTION_TEXT, FIELD(resume), "off", 0, 0, "off|auto|DIR", "run",
     "auto: the newest whole checkpoint of --run, if any; DIR: a run folder or a checkpoint"},
    {"device", OPTION_CHOICE, FIELD(device), "auto", 0, 0, "auto|gpu|cpu", "run", "auto: a GPU when there is one"},
    {"seed", OPTION_INT, FIELD(seed), "1", 0, 9e15, "N", "run", "of initial weights, data order and rounding noise"},
    {"sample", OPTION_TEXT, FIELD(sample), "", 0, 0, "PROMPT", "instead of training",
     "continue PROMPT with --model DIR"},
    {"dry-run", OPTION_FLAG, FIELD(dry_run), "", 0, 0, "", "instead of training", "print the plan and stop"},
    {"list-formats", OPTION_FLAG, FIELD(list_formats), "", 0, 0, "", "instead of training", "storage formats"},
    {"list-presets", OPTION_FLAG, FIELD(list_presets), "", 0, 0, "", "instead of training", "optimizer presets"},
    {"help", OPTION_FLAG, FIELD(help), "", 0, 0, "", "instead of training", "this text"},
};
#undef FIELD
constexpr int OPTION_COUNT = sizeof(OPTIONS) / sizeof(OPTIONS[0]);
static const OptionTable TABLE = {OPTIONS, OPTION_COUNT, SYNONYMS, sizeof(SYNONYMS) / sizeof(SYNONYMS[0])};

// The optimizer that the options ask for, with names for what they leave to the preset; false with a sentence where
// there is none.
static bool optim_config_try(const Options* o, OptimConfig* config, char* error, size_t error_bytes) {
    *config = {o->preset,
               o->rule,
               o->weights,
               o->grads,
               o->m,
               o->v,
               (float)o->beta1,
               (float)o->beta2,
               (float)o->eps,
               (float)o->weight_decay,
               (uint64_t)o->seed,
               o->decay_mode,
               (float)o->lr,
               (float)(o->beta3 == AUTO ? 0.9999 : o->beta3),  // of a run whose steps are not known yet
               (float)o->alpha,
               o->ramp,
               o->overrides,
               o->formats};
    return optim_resolve(config, error, error_bytes);
}

static void optim_config_from(Options* o, OptimConfig* config) {
    char error[DATA_ERROR_BYTES];
    if (!optim_config_try(o, config, error, sizeof(error))) user_error("%s", error);
    o->rule = config->rule, o->weights = config->weights, o->m = config->m, o->v = config->v;
    o->overrides = config->overrides;
}

// Steps and what depends on them.
static void length_resolve(Options* o, int64_t windows, bool builtin, bool gpu, bool warmup_typed) {
    int64_t sequences = o->tokens_per_step / o->seq;
    if (o->steps == AUTO) o->steps = builtin ? (gpu ? 400 : 1500) : windows / sequences > 0 ? windows / sequences : 1;
    // wsd: the first step that decays, as in learning_rate.
    const bool wsd = strcmp(o->schedule, "wsd") == 0, automatic = o->warmup == AUTO;
    const int64_t flat = wsd ? (int64_t)((double)o->steps - (double)o->steps * o->decay_fraction) : o->steps;
    if (o->warmup == AUTO) o->warmup = o->steps / 20 < 700 ? o->steps / 20 : 700;
    if (o->lr == AUTO) o->lr = optim_usual_lr(o->rule, o->channels);
    if (o->val_every == AUTO) o->val_every = o->steps < 2000 ? (o->steps + 4) / 5 : 250;
    if (o->print_every == AUTO) o->print_every = o->steps < 1200 ? ceil_div(o->steps + 1, 60) : 20;
    if (o->val_tokens == AUTO) o->val_tokens = gpu ? 655360 : 10240;
    if (o->sample_every == AUTO) o->sample_every = o->steps > 0 ? o->steps : 1;
    if (o->ramp == AUTO) o->ramp = o->steps;
    if (o->beta3 == AUTO) o->beta3 = o->steps > 30 ? fmin(0.9999, 1.0 - 3.0 / (double)o->steps) : 0.9;
    if (automatic && o->warmup > flat) o->warmup = flat;
    if (o->warmup > o->steps && !warmup_typed) o->warmup = o->steps;  // a resumed run that was made shorter
    if (wsd && warmup_typed && o->warmup > flat && o->steps > 0) {
        user_error(
            "--warmup %lld reaches into wsd's decay, which begins at step %lld; type --warmup %lld or a smaller "
            "--decay-fraction",
            (long long)o->warmup, (long long)flat, (long long)flat);
    }
    if (o->warmup > o->steps && o->steps > 0) {
        user_error("--warmup %lld is longer than --steps %lld; type --warmup %lld or less", (long long)o->warmup,
                   (long long)o->steps, (long long)o->steps);
    }
}

// The learning rate of step 0, 1, ... steps-1.
static double learning_rate(const Options* o, int64_t step) {
    double last = o->lr * o->final_lr;
    if (step < o->warmup) return o->lr * (double)(step + 1) / (double)o->warmup;
    double done = (double)(step - o->warmup) / (double)(o->steps > o->warmup ? o->steps - o->warmup : 1);
    if (done > 1) done = 1;
    if (strcmp(o->schedule, "cosine") == 0) return last + (o->lr - last) * 0.5 * (1.0 + cos(3.14159265358979 * done));
    if (strcmp(o->schedule, "linear") == 0) return o->lr + (last - o->lr) * done;
    if (strcmp(o->schedule, "constant") == 0) return o->lr;
    // wsd: flat, then down by 1 - sqrt(share of the decay done).
    double decay = (double)o->steps * o->decay_fraction, begin = (double)o->steps - decay;
    if ((double)step < begin) return o->lr;
    return last + (o->lr - last) * (1.0 - sqrt(((double)step - begin) / decay));
}
