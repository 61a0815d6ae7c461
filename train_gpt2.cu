// nibble: pre-trains GPT-2-family language models on one GPU or several, or on this machine's cores.
//
// Read from top to bottom: options -> model (its tensors and activations) -> forward -> backward -> schedule ->
// sampling -> checkpoints -> run folder and log -> the step loop -> main. Operators are in kernels/, the optimizer
// behind optim/optim.h, files in data/. Everything below main's first lines works on one Model on one Device; where it
// is one rank of several, m->shard is what it shares with the others (kernels/ranks/shard.cuh), otherwise null.
//
// Conventions: B batch (sequences), T time (tokens of a sequence), C channels, L layers, NH heads, V vocabulary, Vp
// vocabulary padded to a multiple of 128; N = B*T rows. X is the element type of activations and of the weights that
// the matmuls read (float or bf16), G that of the gradients of parameters (float or bf16); `d` before a name: gradient.
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "data/checkpoint.h"        // checkpoint_commit, checkpoint_verify, ...: whole or not there
#include "data/clock.h"             // seconds_now
#include "data/finite.h"            // values_finite: nothing that is not finite is saved or loaded
#include "data/gpt2_config.h"       // gpt2_config_read, gpt2_config_write: the model's shape in a folder
#include "data/memory.h"            // memory_take, memory_zero, text_copy, ...: never NULL
#include "data/model_folder.h"      // ModelFolder: the files of weights in a folder
#include "data/loader.h"            // Dataset, Loader, Batch: windows of tokens in a seeded order
#include "data/json.h"              // Json
#include "data/options_synonyms.h"  // SYNONYMS: names of other programs for the options
#include "data/safetensors.h"       // Safetensors, crc32c, file_write
#include "data/signals.h"           // signal_stop, signal_save
#include "data/text.h"              // text_disarm: nothing from a file steers the terminal
#include "data/tokenizer.h"         // Tokenizer: text <-> tokens
#include "kernels/attention.cuh"    // attention_forward, attention_backward
#include "kernels/classifier.cuh"   // classifier (fused softmax and cross-entropy), loss_mean
#include "kernels/common.cuh"       // Device, check, user_error
#include "kernels/embedding.cuh"    // embedding_forward, embedding_backward
#include "kernels/feeder.cuh"       // Feeder, Input: micro-batches to the device
#include "kernels/gelu.cuh"         // gelu_forward
#include "kernels/global_norm.cuh"  // global_norm
#include "kernels/layernorm.cuh"    // layernorm_forward, residual_layernorm_forward, layernorm_backward
#include "kernels/matmul.cuh"       // matmul_forward, matmul_backward_input / _gelu / _weight / _bias
#include "kernels/random.h"         // random_bits, random_normal
#include "kernels/ranks/launch.h"   // Launch: ranks, one a GPU
#include "kernels/ranks/shard.cuh"  // Shard: gradients, states and weights over several ranks
#include "optim/optim.h"            // Optim: weights, states and the step

extern "C" const char corpus_begin[];  // this repository's own source text, linked in: the default data
extern "C" const char corpus_end[];

// Options: one table drives parsing, --help, the banner, config.json and what a resume restores and reports.

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

// The model: GPT-2 as OpenAI and transformers define it. Pre-norm blocks, learned positions, tanh GELU, and the output
// matrix is the token embedding.

constexpr int MAX_LAYERS = 256;
constexpr int MAX_CHANNELS = 12288;  // what layernorm_backward keeps in shared memory

struct Config {
    int L, C, NH;
    int max_T;  // rows of the position embedding
    int V, Vp;
};

enum Recompute { RECOMPUTE_NONE, RECOMPUTE_GELU, RECOMPUTE_BLOCK };

// The twelve tensors of a block, in arena order. In files a matrix stands as (in, out), transformers' Conv1D; here as
// (out, in), so that a row is an output's weights.
struct BlockTensor {
    const char* name;
    int rows, cols;  // in multiples of C; rows 0: a vector of cols*C
    bool transposed;
    bool residual;  // writes into the residual stream: initialised 1/sqrt(2L) smaller
};
static const BlockTensor BLOCK[] = {
    {"ln_1.weight", 0, 1, false, false},       {"ln_1.bias", 0, 1, false, false},
    {"attn.c_attn.weight", 3, 1, true, false}, {"attn.c_attn.bias", 0, 3, false, false},
    {"attn.c_proj.weight", 1, 1, true, true},  {"attn.c_proj.bias", 0, 1, false, false},
    {"ln_2.weight", 0, 1, false, false},       {"ln_2.bias", 0, 1, false, false},
    {"mlp.c_fc.weight", 4, 1, true, false},    {"mlp.c_fc.bias", 0, 4, false, false},
    {"mlp.c_proj.weight", 1, 4, true, true},   {"mlp.c_proj.bias", 0, 1, false, false},
};
constexpr int BLOCK_TENSORS = sizeof(BLOCK) / sizeof(BLOCK[0]);
// Arena order: wte, wpe, the blocks, ln_f.weight, ln_f.bias.
constexpr int WTE = 0, WPE = 1, FIRST_BLOCK = 2;

struct Model {
    const Device* dev;
    Config config;
    int B, T;  // of one micro-batch
    Recompute recompute;
    int64_t logit_rows;  // rows of logits in memory at a time

    OptimTensor* tensors;
    int count;
    int64_t elements;    // length of an arena
    int64_t parameters;  // sum of the tensors' sizes, padding of the vocabulary included

    OptimType type;     // X: of weights and activations
    bool grads_bf16;    // G is bf16, otherwise float
    Optim* optim;       // owns the weights; NULL when the model only runs forward
    void* weights;      // X, the arena
    void* grads;        // G, the arena; NULL without optim
    float* dwte_sum;    // (Vp, C) fp32 sum of the head's gradient; in `grads` when G is float
    void* activations;  // laid out by activations_layout
    int* input;         // laid out by input_layout
    float* losses;      // (N)
    float* scalars;     // [0] mean loss of the step, [1] norm of the gradient, [2] clip factor, NaN: nothing changed;
                        // then what ranks agree upon, see SCALARS
    Shard* shard;       // NULL: this is the only rank
};

static int rank_of(const Model* m) {
    return m->shard ? m->shard->comm.rank : 0;
}
static int ranks_of(const Model* m) {
    return m->shard ? m->shard->comm.world : 1;
}

static void config_tensors(Model* model) {
    const Config* c = &model->config;
    model->count = 2 + c->L * BLOCK_TENSORS + 2;
    model->tensors = (OptimTensor*)memory_zero(model->count, sizeof(OptimTensor));
    OptimTensor* t = model->tensors;
    *t++ = {"wte.weight", c->Vp, c->C, true, 0};
    *t++ = {"wpe.weight", c->max_T, c->C, true, 0};
    for (int l = 0; l < c->L; l++) {
        for (int i = 0; i < BLOCK_TENSORS; i++) {
            char name[64];
            snprintf(name, sizeof(name), "h.%d.%s", l, BLOCK[i].name);
            int64_t rows = BLOCK[i].rows ? (int64_t)BLOCK[i].rows * c->C : 1;
            *t++ = {text_copy(name), rows, (int64_t)BLOCK[i].cols * c->C, BLOCK[i].rows > 0, 0};
        }
    }
    *t++ = {"ln_f.weight", 1, c->C, false, 0};
    *t++ = {"ln_f.bias", 1, c->C, false, 0};
    model->elements = optim_layout(model->tensors, model->count);
    model->parameters = 0;
    for (int i = 0; i < model->count; i++) model->parameters += model->tensors[i].rows * model->tensors[i].cols;
}

// An arena of parameters seen as the model's tensors: weights (T = X) or gradients (T = G). Where it is packed, those
// of two layers are there at a time.
template <typename T>
struct BlockParameters {
    T *ln1w, *ln1b;          // (C)
    T *qkvw, *qkvb;          // (3C, C), (3C)
    T *attprojw, *attprojb;  // (C, C), (C)
    T *ln2w, *ln2b;          // (C)
    T *fcw, *fcb;            // (4C, C), (4C)
    T *fcprojw, *fcprojb;    // (C, 4C), (C)
};

template <typename T>
struct Parameters {
    T* wte;  // (Vp, C)
    T* wpe;  // (max_T, C)
    BlockParameters<T> block[MAX_LAYERS];
    T *lnfw, *lnfb;  // (C)
};

template <typename T>
static void parameters_view(const Model* model, void* arena, Parameters<T>* p) {
    static_assert(sizeof(BlockParameters<T>) == BLOCK_TENSORS * sizeof(T*), "one pointer for each row of BLOCK");
    bool packed = shard_is_packed(model->shard, arena);
    auto at = [&](int t) { return (T*)arena + (packed ? model->shard->place[t] : model->tensors[t].offset); };
    p->wte = at(WTE);
    p->wpe = at(WPE);
    for (int l = 0; l < model->config.L; l++) {
        T** pointer = (T**)&p->block[l];
        for (int i = 0; i < BLOCK_TENSORS; i++) pointer[i] = at(FIRST_BLOCK + l * BLOCK_TENSORS + i);
    }
    p->lnfw = at(model->count - 2);
    p->lnfb = at(model->count - 1);
}

// What the forward pass keeps of a block for the backward pass.
template <typename X>
struct BlockActivations {
    float *ln1_mean, *ln1_rstd;  // (N)
    X* ln1;                      // (N, C)
    X* qkv;                      // (N, 3C)
    float* lse;                  // (B, NH, T)
    X* attention;                // (N, C)
    X* residual2;                // (N, C) residual stream after attention
    float *ln2_mean, *ln2_rstd;  // (N)
    X* ln2;                      // (N, C)
    X* fc;                       // (N, 4C) before GELU
    X* gelu;                     // (N, 4C) after GELU
};

template <typename X>
struct Activations {
    X* residual[MAX_LAYERS + 1];  // (N, C) residual stream into each block; the last goes into ln_f
    BlockActivations<X> block[MAX_LAYERS];
    float *lnf_mean, *lnf_rstd;  // (N)
    X* lnf;                      // (N, C)
    X* branch;                   // (N, C) what a sublayer adds to the residual stream
    X* logits;                   // (logit_rows, Vp), then their gradient
    // backward only
    X* dresidual;   // (N, C) gradient of the residual stream
    X* dbranch;     // (N, C)
    X* dwide;       // (N, 4C) gradient of fc; of qkv in its first 3C
    void* scratch;  // of the operator that runs
    int64_t bytes;
};

static int64_t arena_take(int64_t* used, int64_t bytes) {
    int64_t offset = *used;
    *used = (*used + bytes + 255) / 256 * 256;
    return offset;
}

template <typename X>
static int64_t scratch_bytes(const Model* m) {
    const Config* c = &m->config;
    int64_t bytes = attention_backward_scratch_bytes(m->dev, m->B, m->T, c->C, c->NH);
    int64_t others[] = {layernorm_backward_scratch_bytes<X>(m->dev, c->C),
                        matmul_backward_bias_scratch_bytes(m->dev, 3 * c->C), global_norm_scratch_bytes(m->dev),
                        matmul_backward_gelu_scratch_bytes(m->dev, (int64_t)m->B * m->T, 4 * c->C),
                        m->shard ? m->elements / TILE_ELEMENTS * (int64_t)sizeof(double) : 0};
    for (int64_t other : others) bytes = other > bytes ? other : bytes;
    return bytes;
}

// Lays the activations of m->B x m->T tokens out from `base`; with base NULL only a->bytes means anything. This one
// function is the memory plan, the allocation and the pointers. With recompute=block the blocks share one set of
// buffers and keep only their inputs, residual[l]; with recompute=gelu they share `gelu`.
template <typename X>
static void activations_layout(const Model* m, void* base, bool backward, Activations<X>* a) {
    int64_t N = (int64_t)m->B * m->T, C = m->config.C, used = 0;
    auto floats = [&](int64_t n) { return (float*)((char*)base + arena_take(&used, n * (int64_t)sizeof(float))); };
    auto values = [&](int64_t n) { return (X*)((char*)base + arena_take(&used, n * (int64_t)sizeof(X))); };
    bool keep = backward && m->recompute != RECOMPUTE_BLOCK, keep_gelu = keep && m->recompute != RECOMPUTE_GELU;
    a->residual[0] = values(N * C);
    for (int l = 0; l < m->config.L; l++) {
        BlockActivations<X>* b = &a->block[l];
        // Without backward the stream needs two places: a block's input and output.
        a->residual[l + 1] = backward || l == 0 ? values(N * C) : a->residual[l - 1];
        if (l > 0 && !keep) {
            *b = a->block[0];
            continue;
        }
        b->ln1_mean = floats(N), b->ln1_rstd = floats(N);
        b->ln1 = values(N * C);
        b->qkv = values(N * 3 * C);
        b->lse = floats(N * m->config.NH);
        b->attention = values(N * C);
        b->residual2 = values(N * C);
        b->ln2_mean = floats(N), b->ln2_rstd = floats(N);
        b->ln2 = values(N * C);
        b->fc = values(N * 4 * C);
        b->gelu = l > 0 && !keep_gelu ? a->block[0].gelu : values(N * 4 * C);
    }
    a->lnf_mean = floats(N), a->lnf_rstd = floats(N);
    a->lnf = values(N * C);
    a->branch = values(N * C);
    int64_t blocks = used;
    a->logits = values(m->logit_rows * m->config.Vp);
    a->bytes = used;
    if (!backward) return;
    used = blocks;  // what the blocks' backward pass needs lies where the logits were, which are over by then
    a->dresidual = values(N * C);
    a->dbranch = a->branch;  // the forward pass is over when it is needed; so is the block that is computed again
    a->dwide = values(N * 4 * C);
    a->scratch = (char*)base + arena_take(&used, scratch_bytes<X>(m));
    a->bytes = used > a->bytes ? used : a->bytes;
}

static Input input_layout(const Model* m, int* base) {
    return input_at(base, (int64_t)m->B * m->T);
}

// Forward.

// Block l from its input to the GELU. `ln1` is already there except when the block is computed again.
template <typename X>
static void block_forward(const Model* m, const Parameters<X>* w, Activations<X>* a, int l, int B, int T) {
    const Device* dev = m->dev;
    const BlockParameters<X>* p = &w->block[l];
    BlockActivations<X>* b = &a->block[l];
    int64_t N = (int64_t)B * T;
    int C = m->config.C;
    matmul_forward<X>(dev, b->qkv, nullptr, b->ln1, p->qkvw, p->qkvb, N, C, 3 * C);
    attention_forward<X>(dev, b->attention, b->lse, b->qkv, B, T, C, m->config.NH);
    matmul_forward<X>(dev, a->branch, nullptr, b->attention, p->attprojw, p->attprojb, N, C, C);
    residual_layernorm_forward<X>(dev, b->residual2, b->ln2, b->ln2_mean, b->ln2_rstd, a->residual[l], a->branch,
                                  p->ln2w, p->ln2b, N, C);
    matmul_forward<X>(dev, b->gelu, b->fc, b->ln2, p->fcw, p->fcb, N, C, 4 * C);
}

// Tokens (B, T) to lnf (B*T, C).
template <typename X>
static void gpt2_forward(const Model* m, Activations<X>* a, const int* tokens, int B, int T) {
    const Device* dev = m->dev;
    Parameters<X> w;
    parameters_view(m, m->weights, &w);
    int64_t N = (int64_t)B * T;
    int L = m->config.L, C = m->config.C;
    shard_need(m->shard, L);
    shard_need(m->shard, 0);
    embedding_forward<X>(dev, a->residual[0], tokens, w.wte, w.wpe, B, T, C);
    BlockActivations<X>* first = &a->block[0];
    layernorm_forward<X>(dev, first->ln1, first->ln1_mean, first->ln1_rstd, a->residual[0], w.block[0].ln1w,
                         w.block[0].ln1b, N, C);
    for (int l = 0; l < L; l++) {
        BlockActivations<X>* b = &a->block[l];
        shard_prefetch(m->shard, l + 1);
        block_forward(m, &w, a, l, B, T);
        matmul_forward<X>(dev, a->branch, nullptr, b->gelu, w.block[l].fcprojw, w.block[l].fcprojb, N, 4 * C, C);
        bool last = l == L - 1;
        BlockActivations<X>* next = last ? nullptr : &a->block[l + 1];
        if (!last) shard_need(m->shard, l + 1);
        residual_layernorm_forward<X>(dev, a->residual[l + 1], last ? a->lnf : next->ln1,
                                      last ? a->lnf_mean : next->ln1_mean, last ? a->lnf_rstd : next->ln1_rstd,
                                      b->residual2, a->branch, last ? w.lnfw : w.block[l + 1].ln1w,
                                      last ? w.lnfb : w.block[l + 1].ln1b, N, C);
    }
}

// Whether gradients are added to those that are there: not where each micro-batch's are summed over the ranks at once.
static bool accumulates(const Model* m, bool first) {
    return !first && !shard_splits(m->shard, SHARD_GRADS);
}

// Losses (N) from lnf, logit_rows rows of logits at a time so that their memory is bounded. With `backward` the logits
// become their own gradient in place, and that of lnf (into dbranch) and of wte (into dwte_sum) follow at once; dloss
// is 1 / (rows of the whole step). `first` micro-batch of a step: sums begin anew.
template <typename X>
static void gpt2_losses(const Model* m, Activations<X>* a, const int* targets, int64_t N, bool backward, float dloss,
                        bool first) {
    const Device* dev = m->dev;
    Parameters<X> w;
    parameters_view(m, m->weights, &w);
    int C = m->config.C, V = m->config.V, Vp = m->config.Vp;
    for (int64_t row = 0; row < N; row += m->logit_rows) {
        int64_t rows = N - row < m->logit_rows ? N - row : m->logit_rows;
        const X* lnf = a->lnf + row * C;
        matmul_forward<X>(dev, a->logits, nullptr, lnf, w.wte, nullptr, rows, C, Vp);
        classifier<X>(dev, m->losses + row, a->logits, targets + row, dloss, backward, rows, V, Vp);
        if (!backward) continue;
        matmul_backward_input<X>(dev, a->dbranch + row * C, a->logits, w.wte, rows, C, Vp);
        if (row == 0) shard_grads_free(m->shard, m->config.L);
        matmul_backward_weight<X, float>(dev, m->dwte_sum, a->logits, lnf, rows, C, Vp,
                                         accumulates(m, first) || row > 0);
    }
}

// Backward.

// Block l: dresidual comes in as the gradient of the block's output and goes out as that of its input. Each of its
// values is the output's gradient of the projection below, whose bias gradient layernorm's backward pass leaves beside
// its own.
template <typename X, typename G>
static void block_backward(const Model* m, const Parameters<X>* w, const Parameters<G>* d, Activations<X>* a, int l,
                           int B, int T, bool accumulate) {
    const Device* dev = m->dev;
    const BlockParameters<X>* p = &w->block[l];
    const BlockParameters<G>* g = &d->block[l];
    BlockActivations<X>* b = &a->block[l];
    int64_t N = (int64_t)B * T;
    int C = m->config.C;
    float* scratch = (float*)a->scratch;
    if (m->recompute == RECOMPUTE_BLOCK) {
        layernorm_forward<X>(dev, b->ln1, b->ln1_mean, b->ln1_rstd, a->residual[l], p->ln1w, p->ln1b, N, C);
        block_forward(m, w, a, l, B, T);
    } else if (m->recompute == RECOMPUTE_GELU) {
        gelu_forward<X>(dev, b->gelu, b->fc, N * 4 * C);
    }
    matmul_backward_gelu<X, G>(dev, a->dwide, g->fcb, scratch, a->dresidual, p->fcprojw, b->fc, N, 4 * C, C,
                               accumulate);
    matmul_backward_weight<X, G>(dev, g->fcprojw, a->dresidual, b->gelu, N, 4 * C, C, accumulate);
    matmul_backward_input<X>(dev, a->dbranch, a->dwide, p->fcw, N, C, 4 * C);
    matmul_backward_weight<X, G>(dev, g->fcw, a->dwide, b->ln2, N, C, 4 * C, accumulate);
    layernorm_backward<X, G>(dev, a->dresidual, g->ln2w, g->ln2b, g->attprojb, scratch, a->dbranch, b->residual2,
                             p->ln2w, b->ln2_mean, b->ln2_rstd, N, C, accumulate);

    matmul_backward_input<X>(dev, a->dbranch, a->dresidual, p->attprojw, N, C, C);
    matmul_backward_weight<X, G>(dev, g->attprojw, a->dresidual, b->attention, N, C, C, accumulate);
    attention_backward_bias(dev, a->dwide, g->qkvb, a->scratch, a->dbranch, b->qkv, b->attention, b->lse, B, T, C,
                            m->config.NH, accumulate);
    matmul_backward_input<X>(dev, a->dbranch, a->dwide, p->qkvw, N, C, 3 * C);
    matmul_backward_weight<X, G>(dev, g->qkvw, a->dwide, b->ln1, N, C, 3 * C, accumulate);
    G* below = l > 0 ? d->block[l - 1].fcprojb : nullptr;
    if (below) shard_grads_free(m->shard, l - 1);
    layernorm_backward<X, G>(dev, a->dresidual, g->ln1w, g->ln1b, below, scratch, a->dbranch, a->residual[l], p->ln1w,
                             b->ln1_mean, b->ln1_rstd, N, C, accumulate);
}

// Every gradient from dbranch (that of lnf). The first micro-batch of a step overwrites, later ones add. Each sum over
// rows is fp32 and is rounded to G once a micro-batch; unless --grads bf16 asks for less memory, G is float wherever a
// step has several.
template <typename X, typename G>
static void gpt2_backward(const Model* m, Activations<X>* a, const Input* input, int buckets, int B, int T,
                          bool first) {
    const Device* dev = m->dev;
    Parameters<X> w;
    Parameters<G> d;
    parameters_view(m, m->weights, &w);
    parameters_view(m, m->grads, &d);
    int64_t N = (int64_t)B * T;
    int L = m->config.L, C = m->config.C;
    bool accumulate = accumulates(m, first);
    device_zero(dev, a->dresidual, N * C * (int64_t)sizeof(X));
    shard_grads_free(m->shard, L - 1);
    layernorm_backward<X, G>(dev, a->dresidual, d.lnfw, d.lnfb, d.block[L - 1].fcprojb, (float*)a->scratch, a->dbranch,
                             a->residual[L], w.lnfw, a->lnf_mean, a->lnf_rstd, N, C, accumulate);
    for (int l = L - 1; l >= 0; l--) {
        shard_need(m->shard, l);
        shard_prefetch(m->shard, l - 1);
        block_backward<X, G>(m, &w, &d, a, l, B, T, accumulate);
        shard_reduce<G>(m->shard, l);
    }
    embedding_backward<X, G>(dev, d.wte, d.wpe, m->dwte_sum, a->dresidual, input->order, input->bucket, buckets, B, T,
                             C, m->config.Vp, accumulate);
    shard_reduce<G>(m->shard, L);
}

// One micro-batch: the mean loss times `share` is added to scalars[0] (set when `first`) and, with `train`, the
// gradients of loss * share to m->grads. `input` is on the device.
template <typename X, typename G>
static void gpt2_micro_batch(const Model* m, const Input* input, int buckets, int B, int T, bool train, bool first,
                             float share) {
    Activations<X> a;
    activations_layout(m, m->activations, m->optim != nullptr, &a);
    int64_t N = (int64_t)B * T;
    gpt2_forward(m, &a, input->tokens, B, T);
    gpt2_losses(m, &a, input->targets, N, train, share / (float)N, first);
    loss_mean(m->dev, m->scalars, m->losses, N, !first, share / (float)N);
    if (train) gpt2_backward<X, G>(m, &a, input, buckets, B, T, first);
}

static void micro_batch(const Model* m, const Input* input, int buckets, int B, int T, bool train, bool first,
                        float share) {
    if (m->type == OPTIM_FP32) {
        gpt2_micro_batch<float, float>(m, input, buckets, B, T, train, first, share);
    } else if (m->grads_bf16) {
        gpt2_micro_batch<bf16, bf16>(m, input, buckets, B, T, train, first, share);
    } else {
        gpt2_micro_batch<bf16, float>(m, input, buckets, B, T, train, first, share);
    }
}

// Logits of the last of T tokens (B = 1), V of them, to the host.
template <typename X>
static void gpt2_next_logits(const Model* m, int T, int last, float* logits) {
    Activations<X> a;
    activations_layout(m, m->activations, m->optim != nullptr, &a);
    Parameters<X> w;
    parameters_view(m, m->weights, &w);
    int C = m->config.C, V = m->config.V;
    gpt2_forward(m, &a, m->input, 1, T);
    matmul_forward<X>(m->dev, a.logits, nullptr, a.lnf + (int64_t)last * C, w.wte, nullptr, 1, C, m->config.Vp);
    X* host = (X*)memory_take(V * sizeof(X));
    copy_to_host(m->dev, host, a.logits, V * (int64_t)sizeof(X));
    for (int i = 0; i < V; i++) logits[i] = to_float(host[i]);
    free(host);
}

static void next_logits(const Model* m, int T, int last, float* logits) {
    if (m->type == OPTIM_FP32) {
        gpt2_next_logits<float>(m, T, last, logits);
    } else {
        gpt2_next_logits<bf16>(m, T, last, logits);
    }
}

// Memory. The plan is made of the same figures that are allocated.

struct MemoryPlan {
    int64_t weights, states, grads, activations, other;
    int64_t taken;  // before anything of these: the driver's context, NCCL, and kernels that are loaded on the way
    int64_t total;
};

static int64_t activations_bytes(const Model* m, bool backward) {
    if (m->type == OPTIM_FP32) {
        Activations<float> a;
        activations_layout(m, nullptr, backward, &a);
        return a.bytes;
    }
    Activations<bf16> a;
    activations_layout(m, nullptr, backward, &a);
    return a.bytes;
}

// The arena, or what is packed and the sums of the part.
static int64_t grads_bytes(const Model* m) {
    bool split = shard_splits(m->shard, SHARD_GRADS);
    return (split ? m->shard->packed + shard_kept(m->shard) : m->elements) * (m->grads_bf16 ? 2 : 4);
}

static int64_t wte_sum_bytes(const Model* m) {
    return m->grads_bf16 ? (int64_t)m->config.Vp * m->config.C * (int64_t)sizeof(float) : 0;
}

static MemoryPlan memory_plan(const Model* m, const OptimConfig* config) {
    OptimBytes bytes = optim_bytes(config, m->tensors, m->count, m->type);
    MemoryPlan plan;
    plan.weights = bytes.weights + bytes.compute + shard_gathered_bytes(m->shard);
    plan.states = bytes.states + bytes.tables;
    plan.grads = grads_bytes(m) + wte_sum_bytes(m);
    plan.activations = activations_bytes(m, true);
    plan.other = input_layout(m, nullptr).bytes + (int64_t)m->B * m->T * (int64_t)sizeof(float) +
                 (m->dev->gpu ? WORKSPACE_BYTES : 0) + (m->shard ? shard_bytes(m->shard) : 0);
    plan.taken = m->dev->gpu ? m->dev->context + (m->shard ? m->shard->comm.bytes : 0) + MODULE_BYTES : 0;
    plan.total = plan.weights + plan.states + plan.grads + plan.activations + plan.other + plan.taken;
    return plan;
}

static void model_allocate(Model* m, const OptimConfig* config) {
    bool train = config != nullptr;
    int64_t N = (int64_t)m->B * m->T;
    if (train) {
        m->optim = optim_create(m->dev, config, m->tensors, m->count, m->type);
        m->weights = optim_weights(m->optim);
        m->grads = device_alloc(m->dev, grads_bytes(m));
        device_zero(m->dev, m->grads, grads_bytes(m));
        if (m->shard) m->weights = shard_open(m->shard, m->grads, m->weights);
        bool packed = shard_is_packed(m->shard, m->grads);
        m->dwte_sum = m->grads_bf16 ? (float*)device_alloc(m->dev, wte_sum_bytes(m))
                                    : (float*)m->grads + (packed ? m->shard->place[WTE] : m->tensors[WTE].offset);
    } else {
        m->weights = device_alloc(m->dev, m->elements * (m->type == OPTIM_FP32 ? 4 : 2));
    }
    m->activations = device_alloc(m->dev, activations_bytes(m, train));
    m->input = (int*)device_alloc(m->dev, input_layout(m, nullptr).bytes);
    m->losses = (float*)device_alloc(m->dev, N * (int64_t)sizeof(float));
    m->scalars = (float*)device_alloc(m->dev, SCALARS * sizeof(float));
    device_zero(m->dev, m->scalars, SCALARS * sizeof(float));
}

static void model_free(Model* m) {
    if (m->optim && m->grads_bf16) device_free(m->dev, m->dwte_sum);
    if (!m->optim || shard_splits(m->shard, SHARD_STATES)) device_free(m->dev, m->weights);
    if (m->optim) optim_free(m->optim);
    if (m->shard) shard_close(m->shard);
    device_free(m->dev, m->grads);
    device_free(m->dev, m->activations);
    device_free(m->dev, m->input);
    device_free(m->dev, m->losses);
    device_free(m->dev, m->scalars);
    for (int i = FIRST_BLOCK; i < m->count - 2; i++) free((void*)m->tensors[i].name);
    free(m->tensors);
}

// One micro-batch before anything has a value: matmul_choose tries algorithms on the memory that is there, so that
// training takes no more than the plan, and kernels are loaded.
static void rehearse(Model* m, Device* dev) {
    if (!dev->gpu) return;
    Input input = input_layout(m, m->input);
    dev->rehearsal = true;
    shard_micro_batch(m->shard, true, true);
    micro_batch(m, &input, input_blank(dev, &input, (int64_t)m->B * m->T), m->B, m->T, true, true, 1.0f);
    if (m->shard) device_after_comm(&m->shard->comm);
    shard_rest(m->shard);
    dev->rehearsal = false;
    device_zero(dev, m->grads, grads_bytes(m));
}

// Gives a tensor its values (rows x cols, fp32).
static void model_set_tensor(Model* m, int tensor, const float* values) {
    if (m->optim) {
        optim_set_weights(m->optim, tensor, values);
        return;
    }
    int64_t n = m->tensors[tensor].rows * m->tensors[tensor].cols, offset = m->tensors[tensor].offset;
    if (m->type == OPTIM_FP32) {
        copy_to_device(m->dev, (float*)m->weights + offset, values, n * 4);
        return;
    }
    bf16* rounded = (bf16*)memory_take(n * sizeof(bf16));
    for (int64_t i = 0; i < n; i++) rounded[i] = from_float<bf16>(values[i]);
    copy_to_device(m->dev, (bf16*)m->weights + offset, rounded, n * 2);
    free(rounded);
}

// Initial weights as GPT-2's: normal of deviation 0.02, 0.02/sqrt(2L) where a matrix writes into the residual stream,
// biases 0, layernorms 1 and 0, padding of the vocabulary 0. Computed on the host whatever the device.

static void model_init(Model* m, uint64_t seed) {
    for (int t = 0; t < m->count; t++) {
        const OptimTensor* tensor = &m->tensors[t];
        int64_t n = tensor->rows * tensor->cols, used = t == WTE ? (int64_t)m->config.V * m->config.C : n;
        int in_block = t >= FIRST_BLOCK && t < m->count - 2 ? (t - FIRST_BLOCK) % BLOCK_TENSORS : -1;
        float deviation = in_block >= 0 && BLOCK[in_block].residual ? 0.02f / sqrtf(2.0f * m->config.L) : 0.02f;
        const char* dot = strrchr(tensor->name, '.');
        bool layernorm_weight = tensor->rows == 1 && strcmp(dot, ".weight") == 0;
        float* values = (float*)memory_zero(n, sizeof(float));
        if (tensor->rows > 1) {
#pragma omp parallel for
            for (int64_t i = 0; i < used; i++) values[i] = deviation * random_normal(seed, t, i);
        }
        for (int64_t i = 0; layernorm_weight && i < n; i++) values[i] = 1.0f;
        model_set_tensor(m, t, values);
        free(values);
    }
    if (m->optim) optim_decode(m->optim);
}

// Choosing: what the options left to the program becomes numbers, and what cannot work is refused.

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

constexpr int PATH_BYTES = 4096;

// FOLDER/NAME, with room left for an ending; a longer path is refused.
static void path_join(char (&path)[PATH_BYTES], const char* folder, const char* name) {
    int length = snprintf(path, PATH_BYTES, "%s%s%s", folder, name ? "/" : "", name ? name : "");
    if (length >= PATH_BYTES - 32)
        user_error("the path %s/%s is too long; name a shorter one", folder, name ? name : "");
}

// The shape in FOLDER/config.json.
static void config_read(Config* config, const char* folder) {
    const Gpt2Shape most = {MAX_LAYERS, MAX_CHANNELS, 1024, 65536, 1 << 20};
    Gpt2Shape shape;
    char error[DATA_ERROR_BYTES];
    if (!gpt2_config_read(folder, &most, &shape, error)) user_error("%s", error);
    *config = {(int)shape.layers,    (int)shape.channels,   (int)shape.heads,
               (int)shape.positions, (int)shape.vocabulary, 0};
}

// Model and sequence length from the options; or from `checkpoint` unless it is NULL, or from `folder`, which is what
// model_folder returned, unless it is "". `vocabulary` is the data's.
static void config_resolve(Options* o, const Device* dev, int vocabulary, bool bytes, const char* checkpoint,
                           const char* folder, Config* config) {
    if (strcmp(o->model, "auto") == 0) o->model = !dev->gpu ? "nano" : bytes ? "d6" : "gpt2";
    if (strcmp(o->model, "d6") == 0 && bytes && o->seq == AUTO) o->seq = 256;
    if (checkpoint) {
        config_read(config, checkpoint);
    } else if (!*folder) {
        const Gpt2Name* named = gpt2_named(o->model);
        *config = {named->layers, named->channels, named->heads, named->positions, vocabulary, 0};
        if (o->layers != AUTO) config->L = (int)o->layers;
        if (o->channels != AUTO) config->C = (int)o->channels;
        if (o->heads != AUTO) config->NH = (int)o->heads;
        if (o->channels != AUTO && o->heads == AUTO) config->NH = config->C / 64 > 0 ? config->C / 64 : 1;
        if (o->seq != AUTO) config->max_T = (int)o->seq;
    } else {
        config_read(config, folder);
        if (o->layers != AUTO || o->channels != AUTO || o->heads != AUTO) {
            user_error("--model %s fixes the shape; leave --layers, --channels and --heads out", o->model);
        }
    }
    if (vocabulary > config->V || (bytes && config->V != 256)) {
        user_error(
            "the data has a vocabulary of %d tokens and --model %s of %d; prepare the data with the model's "
            "tokenizer (data/prepare.py)",
            vocabulary, o->model, config->V);
    }
    if (o->seq == AUTO) o->seq = config->max_T;
    if (o->seq > config->max_T) {
        user_error("--seq %lld is longer than the model's %d positions; type --seq %d or less", (long long)o->seq,
                   config->max_T, config->max_T);
    }
    config->Vp = (config->V + 127) / 128 * 128;
    const bool heads_fit =
        config->C % config->NH == 0 && (config->C / config->NH == 64 || config->C / config->NH == 128);
    if (!heads_fit && (checkpoint || *folder)) {
        user_error(
            "--model %s has %d channels over %d heads, and nibble has 64 or 128 channels a head; name another one",
            o->model, config->C, config->NH);
    }
    if (config->C % 64 != 0) {
        user_error("%d channels are not a multiple of a head's 64; type --channels %d", config->C,
                   (config->C + 63) / 64 * 64);
    }
    if (!heads_fit) {
        user_error("%d channels over %d heads is %.4g channels a head; nibble has 64 and 128: type --heads %d",
                   config->C, config->NH, (double)config->C / config->NH, config->C / 64);
    }
    o->layers = config->L, o->channels = config->C, o->heads = config->NH;
}

static int64_t logit_rows_for(const Options* o, const Model* m) {
    int64_t N = (int64_t)m->B * m->T;
    // Enough rows keep the head's matrix products at full rate; on the CPU a cache-sized piece.
    int64_t rows = o->logit_rows != AUTO ? o->logit_rows : m->dev->gpu ? 8192 : 1024;
    return rows < N ? rows : N;
}

// The largest B up to `most` whose plan fits, 0 when not even one sequence does.
static int64_t largest_batch(const Options* o, Model m, const OptimConfig* config, int64_t most, int64_t available) {
    for (m.B = (int)most; m.B > 0; m.B--) {
        m.logit_rows = logit_rows_for(o, &m);
        MemoryPlan plan = memory_plan(&m, config);
        if (plan.total - plan.taken <= available) return m.B;
    }
    return 0;
}

// Batch sizes. Four numbers must agree: batch x seq x micro-batches x ranks = tokens-per-step.
static void batch_resolve(Options* o, Model* m, const OptimConfig* optim, bool bytes, int64_t windows) {
    int64_t T = m->T, ranks = ranks_of(m), unit = T * ranks;
    if (o->tokens_per_step != AUTO && o->tokens_per_step % unit != 0) {
        int64_t below = o->tokens_per_step / unit * unit;
        char gpus[32] = "";
        if (ranks > 1) snprintf(gpus, sizeof(gpus), " x %lld GPUs", (long long)ranks);
        user_error("--tokens-per-step %lld is not a multiple of --seq %lld%s; type --tokens-per-step %lld",
                   (long long)o->tokens_per_step, (long long)T, gpus, (long long)(below > 0 ? below : unit));
    }
    int64_t sequences = o->tokens_per_step != AUTO ? o->tokens_per_step / unit : 0;  // of one rank
    int64_t most = !m->dev->gpu ? 8 : bytes ? 32 : 64;
    if (windows < most) most = windows;
    // Of the whole memory, not of what happens to be free: the same command takes the same batch.
    int64_t exchange = m->shard ? m->shard->comm.bytes : 0;
    int64_t usable = m->dev->gpu ? m->dev->memory - (1ll << 30) - exchange : INT64_MAX;
    int64_t fits = shard_least(m->shard, o->batch == AUTO ? largest_batch(o, *m, optim, most, usable) : 0);
    if (o->batch == AUTO) {
        int64_t batch = 1;
        while (batch * 2 <= fits) batch *= 2;
        while (sequences && sequences % batch != 0) batch /= 2;
        o->batch = batch;
    }
    if (o->tokens_per_step == AUTO) {
        // GPT-2's and llm.c's half million
        int64_t usual = bytes || !m->dev->gpu ? o->batch * T : 524288 / ranks;
        int64_t micro_batches = (usual + o->batch * T / 2) / (o->batch * T);
        o->tokens_per_step = o->batch * unit * (micro_batches > 0 ? micro_batches : 1);
        sequences = o->tokens_per_step / unit;
    }
    if (sequences % o->batch != 0) {
        int64_t batch = o->batch < sequences ? o->batch : sequences;
        while (sequences % batch != 0) batch--;
        user_error(
            "--batch %lld x --seq %lld x %lld GPU%s = %lld tokens does not divide --tokens-per-step %lld; type --batch "
            "%lld or --tokens-per-step %lld",
            (long long)o->batch, (long long)T, (long long)ranks, ranks > 1 ? "s" : "", (long long)(o->batch * unit),
            (long long)o->tokens_per_step, (long long)batch,
            (long long)ceil_div(o->tokens_per_step, o->batch * unit) * o->batch * unit);
    }
    m->B = (int)o->batch;
    m->logit_rows = logit_rows_for(o, m);
    o->logit_rows = m->logit_rows;
}

// Samples.

// Whether the run is to end: by a signal, of which several ranks take notice where they ask each other, all at once.
static bool stops(const Model* m) {
    return m->shard ? m->shard->stop : signal_stop;
}
static bool asks_to_stop(const Model* m) {
    if (m->shard) m->shard->stop = launch_any(m->shard->comm.launch, signal_stop || m->shard->stop);
    return stops(m);
}

// The prompt in tokens, after the end-of-text token where there is one; returns how many.
static int prompt_tokens(const Tokenizer* tokenizer, const char* prompt, int V, int* tokens, int most) {
    int used = 0, end = tokenizer_end(tokenizer);
    if (end >= 0 && end < V) tokens[used++] = end;
    int encoded = tokenizer_encode(tokenizer, prompt, (int64_t)strlen(prompt), tokens + used, most - 1);
    if (encoded < 0) user_error("the prompt cannot be encoded without merges.txt; put it beside vocab.json");
    used += encoded;
    if (used == 0) tokens[used++] = '\n';
    return used;
}

// Continues `prompt` by `length` tokens and hands each piece of text to `put`. There is no key-value cache: the whole
// window is computed again for each token, its length rounded up to 64 so that few matmul shapes occur. Of several
// ranks the first alone has a tokenizer and draws; the others compute with it.
// Returns false where the model's output is not finite: there it ends.
static bool sample(const Model* m, const Tokenizer* tokenizer, const char* prompt, int64_t length, double temperature,
                   int64_t top_k, uint64_t seed, void (*put)(void*, const char*, int), void* context) {
    constexpr int END = -1, NOT_FINITE = -2;
    int T = m->T, V = m->config.V, most = (int)strlen(prompt) + 16;
    int* tokens = (int*)memory_zero(most + length + 1, sizeof(int));
    int used = tokenizer ? prompt_tokens(tokenizer, prompt, V, tokens, most) : 0;
    shard_share(m->shard, &used, sizeof(used));
    shard_share(m->shard, tokens, most * (int64_t)sizeof(int));
    float* logits = (float*)memory_take(V * sizeof(float));
    int* window = (int*)memory_take(T * sizeof(int));
    int token = 0;
    for (int64_t i = 0; i < length && !asks_to_stop(m); i++) {
        shard_hurry(m->shard, "a sample");
        int visible = used < T ? used : T;  // the last T tokens
        int rounded = (visible + 63) / 64 * 64 < T ? (visible + 63) / 64 * 64 : T;
        memset(window, 0, T * sizeof(int));
        memcpy(window, tokens + used - visible, visible * sizeof(int));
        copy_to_device(m->dev, m->input, window, rounded * (int64_t)sizeof(int));
        next_logits(m, rounded, visible - 1, logits);
        double coin = (double)(random_bits(seed, (uint64_t)1 << 20, used) >> 11) / 9007199254740992.0;
        int bytes = 0;
        token = draw_token(logits, V, temperature, top_k, coin);
        if (tokenizer && token == tokenizer_end(tokenizer)) token = END;
        if (!values_finite("", "F32", logits, V * (int64_t)sizeof(float), 0, nullptr)) token = NOT_FINITE;
        shard_share(m->shard, &token, sizeof(token));
        if (i == 0 && token != NOT_FINITE) put(context, prompt, (int)strlen(prompt));
        if (token < 0) break;
        tokens[used++] = token;
        const char* text = tokenizer ? tokenizer_decode(tokenizer, token, &bytes) : "";
        put(context, text, bytes);
    }
    shard_rest(m->shard);
    free(window);
    free(logits);
    free(tokens);
    return token != NOT_FINITE;
}

// Model folders in Hugging Face's format. model.safetensors has transformers' names and orientation and no padding of
// the vocabulary; weights stand there as they are stored (fp32 or bf16), other formats as fp32.

static bool is_transposed(int t, int count) {
    return t >= FIRST_BLOCK && t < count - 2 && BLOCK[(t - FIRST_BLOCK) % BLOCK_TENSORS].transposed;
}

static bool is_in_model_file(const OptimStream* stream) {
    return stream->is_weights && (strcmp(stream->dtype, "F32") == 0 || strcmp(stream->dtype, "BF16") == 0);
}

// The stored weights of a tensor when a Hugging Face file can hold them as they are; otherwise is_weights is false.
static OptimStream weights_stream(const Model* m, int t) {
    OptimStream stream = optim_weights_stream(m->optim, t);
    if (is_in_model_file(&stream)) return stream;
    stream = {};
    stream.dtype = "F32";
    stream.element_bytes = 4;
    return stream;
}

// The stored weights of a tensor into rank 0's `values`, which elsewhere are room for one's own part.
static void model_collect(const Model* m, const OptimStream* stream, int t, void* values) {
    const OptimTensor* tensor = &m->tensors[t];
    int64_t n = tensor->rows * tensor->cols, size = stream->element_bytes;
    if (!stream->is_weights) optim_get_weights(m->optim, t, (float*)values);
    if (shard_splits(m->shard, SHARD_STATES)) {
        shard_collect(m->shard, values, tensor->offset, n, (int)size, stream->is_weights ? stream->data : nullptr);
    } else if (stream->is_weights) {
        copy_to_host(m->dev, values, (char*)stream->data + tensor->offset * size, n * size);
    }
}

// On ranks but the first only what it asks of them.
static bool model_write(const Model* m, const char* path, CheckpointFile* file, char* error) {
    SafetensorsEntry* entries = (SafetensorsEntry*)memory_zero(m->count, sizeof(SafetensorsEntry));
    int64_t largest = 0;
    for (int t = 0; t < m->count; t++) {
        const OptimTensor* tensor = &m->tensors[t];
        char name[128];
        snprintf(name, sizeof(name), "transformer.%s", tensor->name);
        int64_t rows = t == WTE ? m->config.V : tensor->rows, cols = tensor->cols;
        entries[t] = {text_copy(name), weights_stream(m, t).dtype, {rows, cols}, 2};
        if (is_transposed(t, m->count)) entries[t].shape[0] = cols, entries[t].shape[1] = rows;
        if (tensor->rows == 1) entries[t].shape[0] = cols, entries[t].dims = 1;
        if (tensor->rows * cols > largest) largest = tensor->rows * cols;
    }
    bool first = rank_of(m) == 0;
    SafetensorsWriter* writer = first ? safetensors_begin(path, entries, m->count, "pt", error) : nullptr;
    bool fine = writer || !first;
    void* values = memory_take(largest * sizeof(float));
    void* turned = memory_take(largest * sizeof(float));
    for (int t = 0; t < m->count && fine; t++) {
        const OptimTensor* tensor = &m->tensors[t];
        const OptimStream stream = weights_stream(m, t);
        const int size = stream.element_bytes;
        int64_t rows = t == WTE ? m->config.V : tensor->rows, n = rows * tensor->cols;
        model_collect(m, &stream, t, values);
        if (!first) continue;
        bool turn = is_transposed(t, m->count);
        if (turn) transpose(turned, values, rows, tensor->cols, size);
        file->nonfinite = !values_finite(tensor->name, stream.dtype, values, n * size, 0, error);
        fine = !file->nonfinite && safetensors_write(writer, turn ? turned : values, n * size, error);
    }
    if (fine && writer) {
        fine = safetensors_finish(writer, &file->crc, &file->bytes, error);
    } else if (writer) {
        safetensors_abandon(writer);
    }
    for (int t = 0; t < m->count; t++) free((void*)entries[t].name);
    free(entries);
    free(values);
    free(turned);
    return fine;
}

// The weights of one tensor (rows x cols) from a model folder.
static void model_tensor_read(const Model* m, const ModelFolder* folder, int t, float* values) {
    const OptimTensor* tensor = &m->tensors[t];
    const Safetensors* file = nullptr;
    const SafetensorsTensor* found = model_folder_find(folder, tensor->name, &file);
    char error[DATA_ERROR_BYTES];
    if (!found) {
        user_error("%s has no tensor %s; is it a GPT-2 of the shape in config.json?", folder->file->path, tensor->name);
    }
    int64_t rows = t == WTE ? m->config.V : tensor->rows, cols = tensor->cols, n = rows * cols;
    bool turn = is_transposed(t, m->count), vector = tensor->rows == 1;
    bool shaped =
        vector ? found->dims == 1 && found->shape[0] == cols
               : found->dims == 2 && found->shape[0] == (turn ? cols : rows) && found->shape[1] == (turn ? rows : cols);
    bool known =
        strcmp(found->dtype, "F32") == 0 || strcmp(found->dtype, "BF16") == 0 || strcmp(found->dtype, "F16") == 0;
    if (!shaped || !known) {
        user_error("%s: tensor %s is %s of shape [%lld, %lld]; want F32, BF16 or F16 of [%lld, %lld]", file->path,
                   found->name, found->dtype, (long long)found->shape[0],
                   (long long)(found->dims > 1 ? found->shape[1] : 1), (long long)(turn || vector ? cols : rows),
                   (long long)(vector ? 1
                               : turn ? rows
                                      : cols));
    }
    memset(values + n, 0, (tensor->rows * cols - n) * sizeof(float));  // padding of the vocabulary
    float* turned = turn ? (float*)memory_take(n * sizeof(float)) : nullptr;
    if (!safetensors_floats(file, found, 0, n, turn ? turned : values, error)) user_error("%s", error);
    if (turn) transpose(values, turned, cols, rows, 4);
    free(turned);
    if (!values_finite(found->name, "F32", values, n * (int64_t)sizeof(float), 0, error)) {
        user_error("%s: %s, so the model is of no use; name another one", file->path, error);
    }
}

// Opens a folder of weights, all of which the model must use.
static void model_files_open(const Model* m, const char* path, ModelFolder* folder) {
    char error[DATA_ERROR_BYTES];
    const char** names = (const char**)memory_take(m->count * sizeof(char*));
    if (!model_folder_open(folder, path, error)) user_error("%s", error);
    for (int t = 0; t < m->count; t++) names[t] = m->tensors[t].name;
    if (!model_folder_used(folder, names, m->count, m->config.L, error)) user_error("%s", error);
    free(names);
}

// The weights of a folder into the model.
static void model_read(Model* m, const char* path) {
    ModelFolder folder;
    model_files_open(m, path, &folder);
    for (int t = 0; t < m->count; t++) {
        float* values = (float*)memory_take(m->tensors[t].rows * m->tensors[t].cols * sizeof(float));
        model_tensor_read(m, &folder, t, values);
        model_set_tensor(m, t, values);
        free(values);
    }
    model_folder_close(&folder);
    if (m->optim) optim_decode(m->optim);
}

// Checkpoints: a Hugging Face model folder with optimizer.safetensors (the optimizer's streams as stored) and
// state.json (step, data position, options, checksums) beside the model. data/checkpoint.h writes and finds them whole.

struct Run {
    Options* options;
    Options asked;  // before the program decided what was left to it: for the next checkpoint
    bool held;      // the run folder, from other processes
    Model* model;
    const char* model_folder;  // with the weights that the run begins with; "": they are drawn, or a checkpoint's
    bool quiet;                // not the first rank: it prints and writes nothing
    char folder[PATH_BYTES];
    FILE* text;  // what the terminal shows, again; in memory until the run folder exists
    char* banner;
    size_t banner_bytes;
    FILE* log;  // log.jsonl
    Tokenizer* tokenizer;
    bool samples;           // the tokenizer fits the model
    SpecialTokens special;  // of the tokenizer
    Json* config;           // config.json of the model or checkpoint that it began with, or NULL
    double bytes_per_token;
    int64_t step;                       // optimizer steps done
    int64_t sequences;                  // consumed so far: the data position
    int64_t data_tokens;                // of the training data: their number decides the order
    int64_t data_crc;                   // checksum of the training data
    int64_t val_crc;                    // checksum of the validation data
    double best_val;                    // infinite until the first validation
    int64_t skipped;                    // of the steps done: those that changed nothing, see --on-nonfinite
    int64_t skipped_last;               // the last ones among them, without a good one in between
    bool nonfinite;                     // the checkpoint that could not be written held a value that is not finite
    double last_val;                    // loss of the last validation; 0 before the first
    double step_seconds, save_seconds;  // of the last step and of the last save; 0 before the first
    char last_checkpoint[PATH_BYTES];
    double started;  // seconds
};

__attribute__((format(printf, 2, 3))) static void say(Run* run, const char* format, ...) {
    FILE* to[2] = {stdout, run->text};
    for (FILE* file : to) {
        if (!file || run->quiet) continue;
        va_list arguments;
        va_start(arguments, format);
        vfprintf(file, format, arguments);
        va_end(arguments);
        fflush(file);
    }
}

static_assert(OPTIM_STREAMS <= SHARD_ARRAYS, "each may be an array of a checkpoint");
constexpr int64_t COPY_BYTES = 64 << 20;  // host memory in which streams pass between device and file

// Likewise.
static bool optimizer_write(const Model* m, const char* path, CheckpointFile* file, char* error) {
    int own = 0, most = optim_stream_count(m->optim);
    ShardArray* mine = (ShardArray*)memory_zero(most, sizeof(*mine));
    for (int i = 0; i < most; i++) {
        OptimStream stream = optim_stream(m->optim, i);
        if (is_in_model_file(&stream)) continue;
        ShardArray* array = &mine[own++];
        *array = {"", "", stream.elements, stream.element_bytes, stream.data};
        snprintf(array->name, sizeof(array->name), "%s", stream.name);
        snprintf(array->dtype, sizeof(array->dtype), "%s", stream.dtype);
    }
    ShardArrays arrays = shard_arrays(m->shard, mine, own);
    SafetensorsEntry* entries = (SafetensorsEntry*)memory_zero(arrays.count + 1, sizeof(*entries));
    for (int i = 0; i < arrays.count; i++) {
        entries[i] = {arrays.whole[i].name, arrays.whole[i].dtype, {arrays.whole[i].elements}, 1};
    }
    bool first = rank_of(m) == 0;
    SafetensorsWriter* writer = first ? safetensors_begin(path, entries, arrays.count, nullptr, error) : nullptr;
    int64_t piece =
        arrays.ranks > 1 && shard_staging_bytes(m->shard) < COPY_BYTES ? shard_staging_bytes(m->shard) : COPY_BYTES;
    void* host = memory_take(piece);
    bool fine = writer || !first;
    for (int i = 0; i < arrays.count * arrays.ranks && fine; i++) {
        const char* data = (const char*)arrays.own[i / arrays.ranks];
        for (int64_t at = 0; at < arrays.bytes[i] && fine; at += piece) {
            int64_t count = arrays.bytes[i] - at < piece ? arrays.bytes[i] - at : piece;
            if (arrays.ranks > 1) shard_to_first(m->shard, host, data + at, count, i % arrays.ranks, false);
            if (arrays.ranks == 1 && first) copy_to_host(m->dev, host, data + at, count);
            if (!first) continue;
            const ShardArray* array = &arrays.whole[i / arrays.ranks];
            file->nonfinite = !values_finite(array->name, array->dtype, host, count, at / array->element_bytes, error);
            fine = !file->nonfinite && safetensors_write(writer, host, count, error);
        }
    }
    free(host);
    free(mine);
    free(entries);
    shard_arrays_free(&arrays);
    if (!first) return true;
    if (fine) return safetensors_finish(writer, &file->crc, &file->bytes, error);
    if (writer) safetensors_abandon(writer);
    return false;
}

// What optim_load reads a checkpoint through.
struct CheckpointReader {
    Run* run;
    ModelFolder model;
    Safetensors optimizer;
};

// An array stands for itself as the file's tensor.
static const void* reader_array(void* context, const char* name, const char* dtype, int64_t bytes) {
    const CheckpointReader* reader = (const CheckpointReader*)context;
    const SafetensorsTensor* found = safetensors_find(&reader->optimizer, name);
    return found && strcmp(found->dtype, dtype) == 0 && found->bytes == bytes ? found : nullptr;
}

static void reader_read(void* context, const void* array, int64_t at, int64_t bytes, void* to) {
    const CheckpointReader* reader = (const CheckpointReader*)context;
    char error[DATA_ERROR_BYTES];
    if (!safetensors_read(&reader->optimizer, (const SafetensorsTensor*)array, at, bytes, to, error)) {
        user_error("%s", error);
    }
    const SafetensorsTensor* found = (const SafetensorsTensor*)array;
    const int64_t first = at * found->shape[0] / (found->bytes > 0 ? found->bytes : 1);
    if (!values_finite(found->name, found->dtype, to, bytes, first, error)) {
        user_error("%s: %s, so the run cannot go on from it; name an earlier checkpoint", reader->optimizer.path,
                   error);
    }
}

static void reader_weights(void* context, int tensor, float* values) {
    const CheckpointReader* reader = (const CheckpointReader*)context;
    model_tensor_read(reader->run->model, &reader->model, tensor, values);
}

static void reader_notice(void* context, const char* line) {
    say(((const CheckpointReader*)context)->run, " notice   %s\n", line);
}

// Weights and states from a checkpoint. Its formats are in `state`, or, in one of before, among the options.
static void checkpoint_read(Run* run, const OptimConfig* config, const Json* state, const char* folder) {
    char path[PATH_BYTES], error[DATA_ERROR_BYTES];
    const Json *formats = json_get(state, "formats"), *from = formats ? formats : json_get(state, "options");
    CheckpointReader reader = {run, {}, {}};
    model_files_open(run->model, folder, &reader.model);
    path_join(path, folder, "optimizer.safetensors");
    if (!safetensors_open(&reader.optimizer, path, error)) user_error("%s", error);
    OptimStored stored = {*config, reader.optimizer.count, reader_array, reader_weights, reader_notice, &reader};
    stored.read = reader_read;
    stored.own_formats = json_string(from, "own", "");
    stored.config.rule = json_string(from, "rule", "");
    stored.config.weights = json_string(from, "weights", "");
    stored.config.m = json_string(from, "m", "");
    stored.config.v = json_string(from, "v", "");
    stored.config.overrides = json_string(from, "override", "");
    stored.config.decay_mode = "coupled";  // whatever it was: nothing is stored of it
    stored.config.stored = true;
    if (!optim_resolve(&stored.config, error, sizeof(error))) user_error("%s/state.json: %s", folder, error);
    if (!optim_load(run->model->optim, &stored, error, sizeof(error))) user_error("%s: %s", path, error);
    model_folder_close(&reader.model);
    safetensors_close(&reader.optimizer);
}

// Step, data position and what else the run goes on with, the formats, and all options. Version 1 had what --grads auto
// became among these, and it and version 2 what became of --override.
static void state_write(const Run* run, FILE* state) {
    const Options* o = run->options;
    fprintf(state,
            "{\n\"version\": 3,\n\"step\": %lld,\n\"sequences\": %lld,\n\"data_tokens\": %lld,\n\"data_crc\": %lld,\n"
            "\"val_crc\": %lld,\n\"skipped\": %lld,\n"
            "\"skipped_last\": %lld,\n\"best_val\": ",
            (long long)run->step, (long long)run->sequences, (long long)run->data_tokens, (long long)run->data_crc,
            (long long)run->val_crc, (long long)run->skipped, (long long)run->skipped_last);
    json_write_number(state, run->best_val);
    fprintf(state, ",\n\"formats\": ");
    const char* const formats[][2] = {
        {"rule", o->rule}, {"weights", o->weights}, {"m", o->m}, {"v", o->v}, {"override", o->overrides}};
    for (int i = 0; i < 5; i++) {
        fprintf(state, "%s\"%s\": ", i ? ", " : "{", formats[i][0]);
        json_write_string(state, formats[i][1]);
    }
    char own[OPTIM_OWN_FORMATS_BYTES];
    optim_own_formats(run->model->optim, own);
    fprintf(state, ", \"own\": ");
    json_write_string(state, own);
    fprintf(state, "},\n\"options\": ");
    Options saved = *o;
    const Options* asked = &run->asked;
    saved.grads = asked->grads, saved.overrides = asked->overrides;
    saved.val_every = asked->val_every, saved.sample_every = asked->sample_every;
    saved.print_every = asked->print_every;
    options_json(&TABLE, &saved, state);
    fprintf(state, ",\n");
}

static bool checkpoint_write(Run* run, const char* folder, char* error) {
    CheckpointFile files[16] = {
        {"model.safetensors", 0, -1, false}, {"optimizer.safetensors", 0, -1, false}, {"config.json", 0, -1, false}};
    int count = 3;
    const Config* c = &run->model->config;
    if (rank_of(run->model) > 0) {
        bool alone = !shard_splits(run->model->shard, SHARD_STATES);  // then rank 0 has all that it needs
        return alone ||
               (model_write(run->model, "", nullptr, error) && optimizer_write(run->model, "", nullptr, error));
    }
    const Gpt2Shape shape = {c->L, c->C, c->NH, c->max_T, c->V};
    const char* dtype = "bfloat16";
    for (int t = 0; t < run->model->count; t++) {
        if (strcmp(weights_stream(run->model, t).dtype, "BF16") != 0) dtype = "float32";
    }
    char path[PATH_BYTES];
    path_join(path, folder, files[0].name);
    if (!folder_new(folder, error)) return false;
    bool written = model_write(run->model, path, &files[0], error);
    path_join(path, folder, files[1].name);
    written = written && optimizer_write(run->model, path, &files[1], error);
    run->nonfinite = files[0].nonfinite || files[1].nonfinite;
    if (!written) return false;
    path_join(path, folder, files[2].name);
    if (!gpt2_config_write(path, &shape, dtype, run->config, &run->special, error)) return false;
    for (int i = 0; MODEL_FOLDER_FILES[i]; i++) {
        files[count++] = {MODEL_FOLDER_FILES[i], 0, -1, false};
        if (!file_copy(run->folder, MODEL_FOLDER_FILES[i], folder, error)) return false;
    }
    char* text = nullptr;
    size_t length = 0;
    FILE* state = text_stream(&text, &length);
    state_write(run, state);
    fclose(state);
    bool fine = checkpoint_seal(folder, text, files, count, error);
    free(text);
    return fine;
}

// What goes on from the last checkpoint when it is typed after --resume.
static const char* resume_words(const Run* run) {
    if (run->last_checkpoint[0]) return shell_word(run->last_checkpoint);
    return text_format("auto --run %s", shell_word(run->folder));
}

// Weights or states are not finite, so the run ends without a checkpoint of them.
[[noreturn]] static void nonfinite_failed(const Run* run, const char* what) {
    if (run->last_checkpoint[0]) {
        user_error("step %lld: %s, so it was not saved; type --resume %s with a smaller --lr (now %g)",
                   (long long)run->step, what, resume_words(run), run->options->lr);
    }
    user_error(
        "step %lld: %s, so it was not saved, and there is no earlier checkpoint; begin anew with a smaller --lr "
        "(now %g)",
        (long long)run->step, what, run->options->lr);
}

// Saves, then removes what --keep no longer keeps. A save that fails leaves the older checkpoints alone. All ranks call
// it. Without `prune` all older ones stay: this one may be of no use.
static void checkpoint_save(Run* run, bool prune = true) {
    char path[PATH_BYTES], temporary[PATH_BYTES], error[DATA_ERROR_BYTES], ignored[DATA_ERROR_BYTES];
    double begin = seconds_now();
    signals_doing("this save", run->save_seconds);
    checkpoint_name(run->folder, run->step, path, sizeof(path));
    path_join(temporary, path, nullptr);
    strcat(temporary, ".tmp");
    const Model* m = run->model;
    bool whole = m->shard && !shard_splits(m->shard, SHARD_WEIGHTS);
    if (whole && !shard_equal(m->shard, m->weights, m->elements * m->shard->weight_bytes)) {
        user_error(
            "step %lld: the weights of the ranks differ, which no rounding explains: a GPU or its memory is faulty; "
            "go on elsewhere with --resume %s",
            (long long)run->step, resume_words(run));
    }
    if (rank_of(m) > 0) {
        checkpoint_write(run, temporary, error);
        memcpy(run->last_checkpoint, path, sizeof(path));
        return;
    }
    if (!checkpoint_write(run, temporary, error) || !checkpoint_commit(path, error)) {
        folder_remove(temporary, ignored);
        if (run->nonfinite) nonfinite_failed(run, error);
        user_error("checkpoint of step %lld: %s; free space or name another --run, and go on with --resume %s",
                   (long long)run->step, error, resume_words(run));
    }
    memcpy(run->last_checkpoint, path, sizeof(path));
    say(run, "save %6lld  %s  %.1f s\n", (long long)run->step, path, seconds_now() - begin);
    run->save_seconds = seconds_now() - begin;
    if (prune && !checkpoint_prune(run->folder, run->options->keep, run->step, error)) {
        fprintf(stderr, "train: notice: %s\n", error);
    }
}

// The run folder, the banner and the lines.

// From its first use on no other process trains in it.
static void run_folder_hold(Run* run, const char* folder) {
    char error[DATA_ERROR_BYTES];
    if (!run->held && !run_folder_lock(folder, error)) user_error("%s", error);
    run->held = true;
}

// Makes runs/DATE_TIME_MODEL, or the first of runs/DATE_TIME_MODEL_2, _3, ... that nobody has: of several runs that
// start in the same second mkdir lets one through.
static void run_folder_name(Run* run) {
    char error[DATA_ERROR_BYTES], date[32];
    time_t now = time(nullptr);
    strftime(date, sizeof(date), "%Y-%m-%d_%H%M%S", localtime(&now));
    const char *slash = strrchr(run->options->model, '/'), *model = slash ? slash + 1 : run->options->model;
    if (!folder_make("runs", error)) user_error("%s; name another folder with --run DIR", error);
    int length = snprintf(run->folder, sizeof(run->folder), "runs/%s_%.128s", date, model);
    for (int next = 2; mkdir(run->folder, 0777) != 0; next++) {
        if (errno != EEXIST) {
            user_error("cannot create the folder %s: %s; name another with --run DIR", run->folder, strerror(errno));
        }
        snprintf(run->folder + length, sizeof(run->folder) - length, "_%d", next);
    }
    run->options->run = text_copy(run->folder);
}

static void run_folder_make(Run* run, bool resumed) {
    Options* o = run->options;
    char error[DATA_ERROR_BYTES], path[PATH_BYTES];
    if (!o->run[0]) run_folder_name(run);
    snprintf(run->folder, sizeof(run->folder), "%s", o->run);
    path_join(path, run->folder, "log.jsonl");
    if (!folder_make(run->folder, error)) user_error("--run %s: %s", run->folder, error);
    run_folder_hold(run, run->folder);
    if (!run_folder_free(run->folder, resumed, error)) user_error("%s", error);
    char banner_path[PATH_BYTES];
    path_join(banner_path, run->folder, "log.txt");
    // The one whose refusal leaves nothing that makes this the folder of a run comes first.
    FILE* file = log_open(banner_path, error);
    if (file) run->log = log_open(path, error);
    if (!file || !run->log) user_error("--run %s: %s", run->folder, error);
    path_join(path, run->folder, "config.json");
    char* text = nullptr;
    size_t length = 0;
    FILE* config = text_stream(&text, &length);
    options_json(&TABLE, o, config);
    fputc('\n', config);
    fclose(config);
    if (!file_write(path, text, (int64_t)length, error)) user_error("--run %s: %s", run->folder, error);
    free(text);
    fclose(run->text);  // completes run->banner
    fwrite(run->banner, 1, run->banner_bytes, file);
    free(run->banner);
    run->text = file;
}

// Keeps in the run folder what comes with the tokenizer and the model, whatever becomes of where they came from, and
// opens the tokenizer. Without one that fits there are no samples. A resumed run takes nothing from the folder of its
// first weights.
static void run_tokenizer_open(Run* run, const char* data_folder, const char* checkpoint, const Json* state,
                               bool bytes) {
    const char* model = *checkpoint ? "" : run->model_folder;
    const char* sources[] = {checkpoint, model, data_folder};
    char error[DATA_ERROR_BYTES], path[PATH_BYTES];
    if (state && !checkpoint_has_copies(checkpoint, state, run->folder, error)) user_error("--resume: %s", error);
    for (const char* source : sources) {
        if (!source[0] || !folder_exists(source)) continue;
        if (!tokenizer_files_copy(source, run->folder, error)) user_error("--run %s: %s", run->folder, error);
    }
    if (*checkpoint || *model) {
        path_join(path, *checkpoint ? checkpoint : model, "config.json");
        run->config = json_read(path, error);
        if (!run->config) user_error("%s", error);
    }
    bool there = bytes || tokenizer_exists(run->folder);
    run->tokenizer = there ? tokenizer_open(bytes ? nullptr : run->folder, error) : nullptr;
    for (int& id : run->special.id) id = -1;
    if (run->tokenizer && !tokenizer_special(run->tokenizer, run->folder, &run->special, error)) {
        say(run, " notice   %s: config.json of the checkpoints may lack special tokens\n", error);
    }
    int token;
    bool fits = run->tokenizer && tokenizer_encode(run->tokenizer, "a", 1, &token, 1) >= 0 &&
                tokenizer_vocabulary(run->tokenizer) <= run->model->config.V;
    run->samples = fits;
    if (fits) return;
    if (there && !run->tokenizer)
        say(run, " notice   %s: no samples\n", error);
    else
        say(run, " notice   no vocab.json and merges.txt of %d tokens beside the data: no samples\n",
            run->model->config.V);
    run->options->sample_every = 0;
}

// One line of log.jsonl: {"type": ..., "step": ..., name: value, ...}. A full disk stops the run.
static void log_line(Run* run, const char* type, int count, const char* const* names, const double* values) {
    if (run->quiet) return;
    fprintf(run->log, "{\"type\": \"%s\", \"step\": %lld, \"tokens\": %lld, \"time_s\": %.3f", type,
            (long long)run->step, (long long)(run->sequences * run->options->seq), seconds_now() - run->started);
    bool finite = true;
    for (int i = 0; i < count; i++) {
        fprintf(run->log, ", \"%s\": ", names[i]);
        json_write_number(run->log, values[i]);
        finite = finite && isfinite(values[i]);
    }
    if (!finite) fputs(", \"nonfinite\": true", run->log);
    fputs("}\n", run->log);
    if (fflush(run->log) != 0) {
        user_error("%s/log.jsonl cannot be written: %s; the last checkpoint is %s", run->folder, strerror(errno),
                   run->last_checkpoint[0] ? run->last_checkpoint : "none");
    }
}

// FLOPs of training on one token: 6 a parameter, and attention's 6 L C T (the causal half of 12).
static double flops_per_token(const Model* m) {
    return 6.0 * (double)m->parameters + 6.0 * m->config.L * (double)m->config.C * m->T;
}

// FLOP/s of all ranks; 0 when unknown.
static double peak_of(const Model* m) {
    return ranks_of(m) * device_peak(m->dev, m->type == OPTIM_FP32);
}

static void log_step(Run* run, double loss, double norm, double lr, double seconds) {
    const Model* m = run->model;
    double rate = (double)run->options->tokens_per_step / seconds, peak = peak_of(m);
    const char* names[] = {"loss", "lr", "norm", "step_s", "tok_s", "skipped", "mfu"};
    const double values[] = {loss, lr, norm, seconds, rate, (double)run->skipped, rate * flops_per_token(m) / peak};
    log_line(run, "train", peak > 0 ? 7 : 6, names, values);
}

// Of the GPU, by all processes on it.
static void log_memory(Run* run, int64_t planned) {
    const char* names[] = {"planned_bytes", "used_bytes"};
    const double values[] = {(double)planned, (double)memory_used(run->model->dev)};
    if (run->model->dev->gpu) log_line(run, "memory", 2, names, values);
}

static void log_config(Run* run, const char* device) {
    if (run->quiet) return;
    fputs("{\"type\": \"config\", \"options\": ", run->log);
    options_json(&TABLE, run->options, run->log);
    fputs(", \"device\": ", run->log);
    json_write_string(run->log, device);
    fprintf(run->log, ", \"parameters\": %lld, \"bytes_per_token\": %.9g}\n", (long long)run->model->parameters,
            run->bytes_per_token);
    fflush(run->log);
}

// Free, or taken already for what is in the plan.
static int64_t available_to(const Model* m) {
    const Device* dev = m->dev;
    return memory_available(dev) + (dev->gpu ? WORKSPACE_BYTES + dev->context : 0) +
           (m->shard ? m->shard->comm.bytes : 0);
}

// The windows that a validation reads of at most `tokens` tokens.
static int64_t validation_windows(const Dataset* data, int T, int64_t tokens) {
    int64_t windows = dataset_windows(data, T), most = tokens / T > 0 ? tokens / T : 1;
    return most < windows ? most : windows;
}

// The data, how much of it a validation reads, and what is left out of it.
static void print_data(Run* run, const Dataset* train, const Dataset* val) {
    const Model* m = run->model;
    const struct {
        const char* name;
        const Dataset* data;
    } parts[] = {{"data", train}, {"validation data", val}};
    char tokens[32], val_tokens[32], read[32], short_tokens[32];
    format_count((double)train->tokens, tokens, sizeof(tokens));
    format_count((double)val->tokens, val_tokens, sizeof(val_tokens));
    format_count((double)(validation_windows(val, m->T, run->options->val_tokens) * m->T), read, sizeof(read));
    say(run, " data     %s  %s tokens in %d file%s  validation reads %s of %s  vocabulary %d%s\n", train->path, tokens,
        train->files, train->files == 1 ? "" : "s", read, val_tokens, m->config.V, train->bytes ? " (bytes)" : "");
    for (const auto& part : parts) {
        int files = part.data->left_out;
        if (files == 0) continue;
        format_count((double)part.data->left_out_tokens, short_tokens, sizeof(short_tokens));
        say(run, " notice   %d file%s of the %s, shorter than a window of %d tokens, %s left out: %s tokens\n", files,
            files == 1 ? "" : "s", part.name, m->T + 1, files == 1 ? "is" : "are", short_tokens);
    }
}

static void print_plan(Run* run, const OptimConfig* config, const MemoryPlan* plan, const Dataset* train,
                       const Dataset* val, const char* changed) {
    const Options* o = run->options;
    const Model* m = run->model;
    const Device* dev = m->dev;
    char line[256], ranks[32] = "";
    say(run, "nibble  %s  %lld layers, %lld channels, %lld heads  %lld parameters\n", o->model, (long long)o->layers,
        (long long)o->channels, (long long)o->heads, (long long)m->parameters);
    if (dev->gpu) {
        int driver = 0, runtime = 0;
        check(cudaDriverGetVersion(&driver));
        check(cudaRuntimeGetVersion(&runtime));
        double peak = device_peak(dev, m->type == OPTIM_FP32);
        say(run, " device   %s  sm_%d  %d multiprocessors  driver's cuda %d.%d, built with %d.%d", dev->name,
            dev->compute, dev->sm_count, driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
        if (peak > 0) say(run, "  peak %.0f TFLOP/s %s", peak * 1e-12, o->matmul);
        say(run, "\n");
    } else {
        say(run, " device   CPU, %ld cores: the plain C versions, fp32\n", sysconf(_SC_NPROCESSORS_ONLN));
    }
    if (m->shard) {
        comm_describe(&m->shard->comm, line, sizeof(line));
        say(run, " ranks    %d, from %s  %s  shard %s  gradients sent as %s\n", ranks_of(m),
            m->shard->comm.launch->source, line, o->shard, strcmp(o->comm, "grads") == 0 ? o->grads : o->comm);
    }
    print_data(run, train, val);
    int64_t sequences = o->tokens_per_step / o->seq, windows = dataset_windows(train, m->T);
    int64_t micro_batches = sequences / o->batch / ranks_of(m);
    if (m->shard) snprintf(ranks, sizeof(ranks), "%d ranks x ", ranks_of(m));
    say(run, " batch    %lld x %lld x %s%lld micro-batch%s = %lld tokens a step  %lld steps = %.2f epochs\n",
        (long long)o->batch, (long long)o->seq, ranks, (long long)micro_batches, micro_batches == 1 ? "" : "es",
        (long long)o->tokens_per_step, (long long)o->steps, (double)o->steps * (double)sequences / (double)windows);
    optim_describe(config, line, sizeof(line));
    say(run, " optim    %s\n", line);
    if (strcmp(o->overrides, "none") != 0) say(run, " override %s\n", o->overrides);
    bool usual = o->lr == optim_usual_lr(o->rule, o->channels) && o->lr != optim_usual_lr("", o->channels);
    say(run, " schedule lr %g%s%s, %s to %g of it, warm-up %lld steps, clip %g, weight decay %g\n", o->lr,
        usual ? ", usual for " : "", usual ? o->rule : "", o->schedule,
        strcmp(o->schedule, "constant") == 0 ? 1.0 : o->final_lr, (long long)o->warmup, o->clip, o->weight_decay);
    double unit = plan->total >= (1ll << 30) ? 1.0 / (1 << 30) : 1.0 / (1 << 20);
    say(run, " memory   %sweights %.2f  states %.2f  gradients %.2f  activations %.2f  other %.2f",
        m->shard ? "of rank 0: " : "", plan->weights * unit, plan->states * unit, plan->grads * unit,
        plan->activations * unit, plan->other * unit);
    if (dev->gpu) say(run, "  driver%s %.2f", m->shard ? " and exchange" : "", plan->taken * unit);
    say(run, " = %.2f %s", plan->total * unit, unit == 1.0 / (1 << 30) ? "GiB" : "MiB");
    say(run, " of %.1f GiB  (matmul %s, recompute %s)\n", (double)available_to(m) / (1 << 30), o->matmul, o->recompute);
    if (changed[0]) say(run, " changed %s\n", changed);
}

static void require_memory(const Options* o, const Model* m, const OptimConfig* config, const MemoryPlan* plan) {
    int64_t available = available_to(m);
    if (plan->total <= available) return;
    int64_t fits = largest_batch(o, *m, config, m->B, available - plan->taken);
    int64_t sequences = o->tokens_per_step / o->seq / ranks_of(m);
    while (fits > 0 && sequences % fits != 0) fits--;
    double need = (double)plan->total / (1 << 30), have = (double)available / (1 << 30);
    Model block = *m;
    block.recompute = RECOMPUTE_BLOCK;
    // --recompute block is advice only where it is enough.
    bool whole = memory_plan(&block, config).total <= available;
    bool one = m->recompute != RECOMPUTE_BLOCK && largest_batch(o, block, config, 1, available - plan->taken) > 0;
    if (fits > 0) {
        user_error("--batch %d needs %.2f GiB and %.2f GiB are free on %s; type --batch %lld or less%s", m->B, need,
                   have, m->dev->name, (long long)fits, whole ? ", or --recompute block" : "");
    }
    user_error(
        "even --batch 1 needs more than the %.2f GiB that are free on %s; %s a shorter --seq, a smaller --model or "
        "a smaller --preset",
        have, m->dev->name, one ? "type --recompute block --batch 1, or take" : "take");
}

// Training.

// The norm of the gradients, the clip factor and the update, which does nothing when the loss or the norm is not
// finite: then the factor is NaN.
static void update(Model* m, float lr, float clip, int64_t step) {
    // The activations are dead by now: their first bytes serve as the norm's scratch.
    float *norm = m->scalars + SCALAR_NORM, *scratch = (float*)m->activations;
    if (m->shard && m->grads_bf16) {
        shard_norm<bf16>(m->shard, m->scalars, (double*)scratch, clip);
    } else if (m->shard) {
        shard_norm<float>(m->shard, m->scalars, (double*)scratch, clip);
    } else if (m->grads_bf16) {
        global_norm<bf16>(m->dev, norm, scratch, (const bf16*)m->grads, m->elements, clip, m->scalars);
    } else {
        global_norm<float>(m->dev, norm, scratch, (const float*)m->grads, m->elements, clip, m->scalars);
    }
    bool split = shard_splits(m->shard, SHARD_STATES);
    optim_step(m->optim, split ? m->shard->kept_grads : m->grads, m->scalars + SCALAR_FACTOR, lr, step);
    if (m->shard) shard_publish(m->shard);
}

// One optimizer step: gradients of `micro_batches` and the update. All of it is queued without waiting for the device;
// the caller reads the scalars. `step` counts from 1. False on bad data: nothing is changed; then other ranks must not
// wait for this one, which goes through the step like them, and all find SCALAR_BAD.
static bool train_step(Model* m, Feeder* feeder, int64_t micro_batches, float lr, float clip, int64_t step) {
    Input input = input_layout(m, m->input);
    for (int64_t i = 0; i < micro_batches; i++) {
        shard_micro_batch(m->shard, i == 0, i == micro_batches - 1);
        int buckets = feeder_next(feeder, &input, (int64_t)m->B * m->T);
        if (buckets < 0 && !m->shard) return false;
        if (buckets < 0) m->shard->flags[SCALAR_BAD - SCALAR_STOP] = 1;
        if (buckets < 0) buckets = input_blank(m->dev, &input, (int64_t)m->B * m->T);
        micro_batch(m, &input, buckets, m->B, m->T, true, i == 0, 1.0f / (float)(micro_batches * ranks_of(m)));
    }
    update(m, lr, clip, step);
    return true;
}

// Mean loss over the first windows of the validation data, `tokens` at most, whatever the batch; NaN when a signal
// came. Ranks take batches in turn, and all the same number, of which the last may count nothing.
static double validate(const Model* m, const Dataset* data, int64_t tokens) {
    int64_t windows = validation_windows(data, m->T, tokens), before = (int64_t)rank_of(m) * m->B;
    LoaderSlice slice = {m->B, (int64_t)ranks_of(m) * m->B};
    Feeder feeder;
    feeder_open(&feeder, m->dev, data, m->B, m->T, 0, false, before, slice);
    Input input = input_layout(m, m->input);
    for (int64_t done = 0; done < windows && !asks_to_stop(m); done += slice.stride) {
        shard_hurry(m->shard, "validation");
        int64_t left = windows - done - before;
        int B = left < 0 ? 0 : left < m->B ? (int)left : m->B;  // of the last batch only the first rows count
        int buckets = feeder_next(&feeder, &input, (int64_t)m->B * m->T);
        if (buckets < 0) user_error("validation data: %s", feeder.error);
        micro_batch(m, &input, buckets, B > 0 ? B : 1, m->T, false, done == 0, (float)B / (float)windows);
    }
    float loss;
    if (m->shard && !stops(m)) shard_loss(m->shard, m->scalars);
    copy_to_host(m->dev, &loss, m->scalars, sizeof(float));
    shard_rest(m->shard);
    feeder_close(&feeder);
    return stops(m) ? NAN : loss;
}

static void run_validation(Run* run, const Dataset* data) {
    signals_doing("this batch of the validation", run->step_seconds);
    double begin = seconds_now(), loss = validate(run->model, data, run->options->val_tokens);
    if (stops(run->model)) return;
    if (isnan(loss)) loss = fabs(loss);  // printed as nan, not -nan
    run->last_val = loss;
    if (loss < run->best_val) run->best_val = loss;
    double bpb = run->bytes_per_token > 0 ? loss / log(2.0) / run->bytes_per_token : NAN;
    say(run, "val  %6lld  loss %.4f (best %.4f)", (long long)run->step, loss, run->best_val);
    if (run->bytes_per_token > 0) say(run, "  %.4f bits per byte", bpb);
    say(run, "  %.1f s\n", seconds_now() - begin);
    const char* names[] = {"loss", "bpb"};
    const double values[] = {loss, bpb};
    log_line(run, "val", run->bytes_per_token > 0 ? 2 : 1, names, values);
}

static void put_text(void* context, const char* text, int bytes) {
    FILE** to = (FILE**)context;
    for (int i = 0; i < 2; i++) {
        if (to[i]) fwrite(text, 1, bytes, to[i]);
        if (to[i]) fflush(to[i]);
    }
    if (to[0] == stdout && !to[1] && ferror(stdout)) exit(0);  // of --sample: nobody reads on
}

static void run_sample(Run* run) {
    Options* o = run->options;
    char* text = nullptr;
    size_t bytes = 0;
    FILE* memory = text_stream(&text, &bytes);
    FILE* to[2] = {memory, nullptr};
    signals_doing("this token of the sample", run->step_seconds);
    const bool finite = sample(run->model, run->tokenizer, o->prompt, o->sample_tokens, o->temperature, o->top_k,
                               (uint64_t)o->seed, put_text, to);
    fclose(memory);
    if (!finite) {
        say(run, "sample   none: the model's output is not finite\n");
        free(text);
        return;
    }
    say(run, "sample ------------------------------------------------------------\n");
    FILE* copies[2] = {run->quiet ? nullptr : stdout, run->quiet ? nullptr : run->text};
    put_text(copies, text, (int)bytes);
    say(run, "\n-------------------------------------------------------------------\n");
    free(text);
}

// `eta` in seconds; below 0: it is not known yet.
static void print_step(Run* run, double loss, double norm, double lr, double seconds, double eta, int64_t memory) {
    const Options* o = run->options;
    char rate[32], left[32], size[32], mfu[32] = "-";
    double tokens_per_second = (double)o->tokens_per_step / seconds;
    double peak = peak_of(run->model);
    if (peak > 0) snprintf(mfu, sizeof(mfu), "%.1f%%", 100 * tokens_per_second * flops_per_token(run->model) / peak);
    format_count(tokens_per_second, rate, sizeof(rate));
    format_duration(eta, left, sizeof(left));
    if (eta < 0) snprintf(left, sizeof(left), "-");
    bool small = memory < (1ll << 30);
    snprintf(size, sizeof(size), small ? "%.0f MiB" : "%.1f GiB", (double)memory / (small ? 1 << 20 : 1 << 30));
    say(run, "step %6lld/%lld %5.1f%%  loss %.4f  norm %.3f  lr %.2e  %6.1f ms  %s tok/s  mfu %s  %s  eta %s",
        (long long)run->step, (long long)o->steps, 100.0 * (double)run->step / (double)o->steps, loss, norm, lr,
        1e3 * seconds, rate, mfu, size, left);
    if (run->skipped > 0) say(run, "  skipped %lld", (long long)run->skipped);
    say(run, "\n");
}

// A step that changed nothing: told, and the end of the run when --on-nonfinite says so or nothing else comes any more.
static void step_skipped(Run* run, double loss, double norm) {
    constexpr int64_t MOST_IN_A_ROW = 10;  // a bad batch is one; after as many, the weights are beyond help
    bool stop = strcmp(run->options->on_nonfinite, "stop") == 0;
    if (!stop) {
        say(run, "skip %6lld  loss %g  norm %g: weights and states stay as they were (%lld skipped so far)\n",
            (long long)run->step, loss, norm, (long long)run->skipped);
    }
    if (!stop && run->skipped_last < MOST_IN_A_ROW) return;
    char row[64] = "";
    if (!stop) snprintf(row, sizeof(row), "%lld steps in a row were skipped; ", (long long)run->skipped_last);
    user_error(
        "step %lld: the loss is %g and the norm of the gradient %g; %sthe last good checkpoint is %s; type a smaller "
        "--lr (now %g), a longer --warmup or a smaller --clip",
        (long long)run->step, loss, norm, row, run->last_checkpoint[0] ? run->last_checkpoint : "none",
        run->options->lr);
}

// A signal, or a file called save in the run folder.
static bool save_asked(const Run* run) {
    char request[PATH_BYTES];
    path_join(request, run->folder, "save");
    bool asked = signal_save || (!run->quiet && file_exists(request));
    if (asked && !run->quiet) unlink(request);
    signal_save = 0;
    return asked;
}

// Whether the weights at the end of a run are of no use: no step of it changed them, or they give no finite loss, by
// the last validation or, without one, by a window of the validation data where the last step was skipped. All ranks
// ask.
static bool ends_useless(const Run* run, const Dataset* val_data) {
    const Model* m = run->model;
    if (stops(m) || (run->options->val_every == 0 && run->skipped_last == 0)) return false;
    if (run->skipped > 0 && run->skipped == run->step) return true;
    const double loss = run->options->val_every > 0 ? run->last_val : validate(m, val_data, m->T);
    return !isfinite(loss) && !stops(m);
}

// `counted` steps took `seconds`; `useless`: see ends_useless.
static void tell_end(Run* run, double counted, double seconds, bool useless) {
    char rate[32];
    const char* how = stops(run->model) ? "stopped" : "done   ";
    if (counted > 0) {
        format_count(counted * (double)run->options->tokens_per_step / seconds, rate, sizeof(rate));
        say(run, "%s  %.1f ms a step, %s tok/s after warm-up\n", how, 1e3 * seconds / counted, rate);
    } else {
        say(run, "%s  at step %lld\n", how, (long long)run->step);
    }
    if (run->skipped > 0) {
        say(run, "skipped  %lld of %lld steps, whose loss or gradient was not finite\n", (long long)run->skipped,
            (long long)run->step);
    }
    if (run->skipped_last > 0) {
        say(run, "skipped  the last %lld of them in a row, so the weights are those of step %lld\n",
            (long long)run->skipped_last, (long long)(run->step - run->skipped_last));
    }
    if (!useless) return;
    user_error(
        "the run ended without a finite loss and gradient, so the weights of %s are of no use; type a smaller --lr "
        "(now %g)",
        run->last_checkpoint, run->options->lr);
}

// The data cannot be read on: what there is is saved, and the rank with bad data ends all.
[[noreturn]] static void data_failed(Run* run, const Feeder* feeder, bool saved) {
    const Shard* shard = run->model->shard;
    if (!saved) checkpoint_save(run);
    if (shard && !feeder->error[0]) launch_any(shard->comm.launch, false);
    user_error("--data: %s; the last checkpoint is %s", feeder->error, run->last_checkpoint);
}

// The time of the steps after `from`, which is moved when the first is done and when ten are: they are slower, the
// first most of all, which loads what the GPU runs.
struct StepTimer {
    int64_t first, from;
    double since, seconds;  // the clock when `from` was done; spent in the steps after it
};

// Step `step` is done, which began at `begin`: seconds that one takes, with what lies between them.
static double step_timed(StepTimer* timer, int64_t step, double begin, double now) {
    int64_t done = step - timer->first;
    timer->seconds += now - begin;
    if (done == 1 || done == 10) timer->from = step, timer->since = now, timer->seconds = 0;
    return step == timer->from ? now - begin : (now - timer->since) / (double)(step - timer->from);
}

// A step is done, with these scalars: counted, logged and told.
static void step_done(Run* run, const float* scalars, double lr, double begin, StepTimer* timer, int64_t memory) {
    const Options* o = run->options;
    run->step++;
    run->sequences += o->tokens_per_step / o->seq;
    bool skipped = !isfinite(scalars[SCALAR_FACTOR]);
    run->skipped += skipped;
    run->skipped_last = skipped ? run->skipped_last + 1 : 0;
    double now = seconds_now(), loss = scalars[SCALAR_LOSS], norm = scalars[SCALAR_NORM];
    if (isnan(loss)) loss = fabs(loss);  // printed as nan, not -nan
    if (isnan(norm)) norm = fabs(norm);
    double each = step_timed(timer, run->step, begin, now);
    log_step(run, skipped ? NAN : loss, norm, lr, now - begin);
    if (run->step == timer->first + 2) log_memory(run, memory);
    if (skipped) {
        step_skipped(run, loss, norm);
    } else if (run->step % o->print_every == 0 || run->step == timer->first + 1 || run->step == o->steps) {
        double eta = each * (double)(o->steps - run->step);
        bool warms_up = run->model->dev->gpu && run->step == timer->first + 1 && run->step < o->steps;
        print_step(run, loss, norm, lr, now - begin, warms_up ? -1 : eta, memory);
    }
}

// From run->step to the end, or to a signal.
static void train(Run* run, const Dataset* train_data, const Dataset* val_data, int64_t memory) {
    Options* o = run->options;
    Model* m = run->model;
    int64_t sequences = o->tokens_per_step / o->seq;
    LoaderSlice slice = {sequences / ranks_of(m), sequences};
    Feeder feeder;
    feeder_open(&feeder, m->dev, train_data, m->B, m->T, (uint64_t)o->seed, true,
                run->sequences + rank_of(m) * slice.run, slice);
    float* scalars = (float*)(m->dev->gpu ? pinned_alloc : memory_take)(SCALARS * sizeof(float));
    int64_t saved_at = run->last_checkpoint[0] ? run->step : -1;
    bool due = false, useless = false;  // a checkpoint; the weights at the end
    if (run->step == 0 && o->val_every > 0) run_validation(run, val_data);
    StepTimer timer = {run->step, run->step, seconds_now(), 0};
    while (run->step < o->steps && !stops(m)) {
        double begin = seconds_now(), lr = learning_rate(o, run->step);
        signals_doing("this step", run->step_seconds);
        int64_t update = run->step + 1 - run->skipped;  // what moments and their bias corrections count
        if (m->shard) m->shard->flags[0] = signal_stop, m->shard->flags[1] = save_asked(run);
        int64_t micro_batches = slice.run / m->B;
        bool fine = train_step(m, &feeder, micro_batches, (float)lr, (float)o->clip, update);
        copy_to_host(m->dev, scalars, m->scalars, SCALARS * sizeof(float));
        shard_agreed(m->shard, scalars, (seconds_now() - begin) / (double)micro_batches);
        if (!fine || scalars[SCALAR_BAD] > 0) data_failed(run, &feeder, run->step <= saved_at);
        run->step_seconds = seconds_now() - begin;
        step_done(run, scalars, lr, begin, &timer, memory);
        bool last = run->step == o->steps;
        if (o->val_every > 0 && (run->step % o->val_every == 0 || last)) run_validation(run, val_data);
        bool asked = m->shard ? scalars[SCALAR_SAVE] > 0 : save_asked(run);
        due = due || (o->save_every > 0 && run->step % o->save_every == 0);
        // While steps are skipped the weights may be beyond help: no good checkpoint gives way to them.
        if (asked || last || stops(m) || (due && run->skipped_last == 0)) {
            due = false;
            useless = last && ends_useless(run, val_data);
            checkpoint_save(run, run->skipped_last == 0 && !useless);
            saved_at = run->step;
        }
        if (o->sample_every > 0 && (run->step % o->sample_every == 0 || last) && !stops(m)) run_sample(run);
    }
    if (saved_at != run->step) checkpoint_save(run);  // a signal came before the first step, or while sampling
    tell_end(run, (double)(run->step - timer.from), timer.seconds, useless);
    signals_doing(nullptr, 0);
    feeder_close(&feeder);
    (m->dev->gpu ? pinned_free : free)(scalars);
}

// The GPU of a rank among `gpus`. A launcher may show each rank its own alone.
static int device_index(const Options* o, const Launch* launch, int gpus) {
    if (gpus == 0 || strcmp(o->device, "cpu") == 0) {
        if (stand_in_asked()) return 0;
        user_error("%d ranks were asked for and each needs a GPU of its own, %s; leave --gpus, or the launcher, out",
                   launch->world, gpus == 0 ? "and no GPU answers" : "and --device cpu is typed");
    }
    if (gpus == 1 && o->gpus == 1) return 0;
    if (o->gpus > gpus) {
        user_error("--gpus %lld was typed and this machine shows %d; type --gpus %d", (long long)o->gpus, gpus, gpus);
    }
    if (launch->local_rank >= gpus) {
        user_error("rank %d is number %d on this machine, which shows %d GPU%s; start %d here", launch->rank,
                   launch->local_rank + 1, gpus, gpus == 1 ? "" : "s", gpus);
    }
    return launch->local_rank;
}

// The device of --device, and its matmul precision.
static OptimType device_resolve(Options* o, Device* dev, const Launch* launch = nullptr) {
    int gpus = 0;
    cudaError_t status = cudaGetDeviceCount(&gpus);
    if (status != cudaSuccess) gpus = 0;
    if (strcmp(o->device, "gpu") == 0 && gpus == 0) {
        user_error("--device gpu: no GPU answers (%s); type --device cpu",
                   status == cudaSuccess ? "none is there" : cudaGetErrorString(status));
    }
    int index = launch && launch->world > 1 ? device_index(o, launch, gpus) : 0;
    device_open(dev, gpus > 0 && strcmp(o->device, "cpu") != 0, index);
    openmp_start();
    if (dev->gpu && dev->compute < 80) {
        user_error("%s has compute capability %d.%d; nibble's kernels need 8.0 (type --device cpu)", dev->name,
                   dev->compute / 10, dev->compute % 10);
    }
    if (!dev->gpu && strcmp(o->matmul, "bf16") == 0) user_error("--matmul bf16 needs a GPU; type --matmul fp32");
    if (strcmp(o->matmul, "auto") == 0) o->matmul = dev->gpu ? "bf16" : "fp32";
    return strcmp(o->matmul, "bf16") == 0 ? OPTIM_BF16 : OPTIM_FP32;
}

static DataFormat data_format_from(const char* name) {
    const char* const names[] = {"auto", "bytes", "shards", "nanogpt"};  // as DataFormat numbers them
    int format = 0;
    while (strcmp(names[format], name) != 0) format++;
    return (DataFormat)format;
}

static void data_open(const Options* o, Dataset* data, DatasetPart part, int T) {
    const DataFormat format = data_format_from(o->data_format);
    char error[DATA_ERROR_BYTES];
    bool fine;
    if (part == DATASET_VALIDATION && o->val[0]) {
        DatasetPart whole = folder_exists(o->val) ? DATASET_VALIDATION : DATASET_WHOLE;
        fine = dataset_open_as(data, o->val, format, whole, o->val_fraction, T, error);
        if (!fine) user_error("--val %s: %s", o->val, error);
    } else if (o->data[0]) {
        if (part == DATASET_TRAIN && o->val[0] && !folder_exists(o->data)) part = DATASET_WHOLE;
        fine = dataset_open_as(data, o->data, format, part, o->val_fraction, T, error);
        if (!fine) user_error("--data %s: %s", o->data, error);
    } else {
        fine = dataset_open_memory(data, corpus_begin, corpus_end - corpus_begin, part, o->val_fraction, T, error);
        if (!fine) user_error("the built-in text: %s", error);
    }
}

static Recompute recompute_from(const char* name) {
    return strcmp(name, "block") == 0 ? RECOMPUTE_BLOCK : strcmp(name, "gelu") == 0 ? RECOMPUTE_GELU : RECOMPUTE_NONE;
}

// The folder that --model names, or "" where it names a built-in shape. Nothing else decides which of the two is meant:
// a built-in shape's bare name is always that shape, and a folder of the same name is written ./NAME. A run folder
// stands for its newest checkpoint; a checkpoint must be whole. o->model becomes the path from the root, for the
// checkpoints to come.
static const char* model_folder(Options* o) {
    char path[4500], names[256], error[DATA_ERROR_BYTES];
    if (strcmp(o->model, "auto") == 0 || gpt2_named(o->model)) return "";
    char* folder = folder_exists(o->model) ? realpath(o->model, nullptr) : nullptr;
    if (!folder) {
        user_error("--model '%s' is neither a folder nor a name that nibble knows; type one of %s, or a folder's path",
                   o->model, gpt2_names(names, sizeof(names)));
    }
    const bool model = model_folder_has_weights(folder);
    Json* state = model ? nullptr : checkpoint_newest(folder, path, sizeof(path));
    o->model = state ? text_copy(path) : folder;
    json_free(state);
    snprintf(path, sizeof(path), "%s/state.json", o->model);
    if (model && access(path, F_OK) == 0 && !checkpoint_model_whole(o->model, error)) {
        user_error("--model %s: damaged checkpoint: %s; name another one", o->model, error);
    }
    return o->model;
}

// --sample: continue a prompt with a model folder.
static int sample_main(Options* o) {
    char error[DATA_ERROR_BYTES];
    Device dev;
    Model m = {};
    const char* folder = model_folder(o);
    if (!*folder && folder_exists(o->model)) {
        user_error("--model %s is a built-in shape, without weights to sample from; type --model ./%s for the folder",
                   o->model, o->model);
    }
    if (!*folder) {
        user_error("--sample needs --model DIR, a folder with config.json and model.safetensors (a checkpoint is one)");
    }
    m.type = device_resolve(o, &dev);
    m.dev = &dev;
    config_resolve(o, &dev, 0, false, nullptr, folder, &m.config);
    m.B = 1;
    m.T = (int)o->seq;
    m.logit_rows = 1;
    config_tensors(&m);
    Tokenizer* tokenizer = tokenizer_open(m.config.V == 256 ? nullptr : folder, error);
    if (!tokenizer) user_error("--model %s: %s", o->model, error);
    if (tokenizer_vocabulary(tokenizer) > m.config.V) {
        user_error("--model %s: its tokenizer has %d tokens and its vocab_size is %d; they do not belong together",
                   o->model, tokenizer_vocabulary(tokenizer), m.config.V);
    }
    model_allocate(&m, nullptr);
    model_read(&m, folder);
    FILE* to[2] = {stdout, nullptr};
    if (!sample(&m, tokenizer, o->sample, o->sample_tokens, o->temperature, o->top_k, (uint64_t)o->seed, put_text,
                to)) {
        user_error("--model %s: its output is not finite, so there is no sample; name another one", o->model);
    }
    printf("\n");
    tokenizer_close(tokenizer);
    model_free(&m);
    device_close(&dev);
    return 0;
}

// Data and model, from the options. The data first says its vocabulary, which the model needs, then is opened with the
// model's sequence length.
static void data_and_model_resolve(Options* o, const char* checkpoint, const char* folder, Dataset* train, Dataset* val,
                                   Model* m) {
    data_open(o, train, DATASET_TRAIN, 1);
    config_resolve(o, m->dev, train->vocabulary, train->bytes, checkpoint, folder, &m->config);
    m->T = (int)o->seq;
    m->recompute = recompute_from(o->recompute);
    config_tensors(m);
    dataset_close(train);
    data_open(o, train, DATASET_TRAIN, m->T);
    data_open(o, val, DATASET_VALIDATION, m->T);
    if (val->bytes != train->bytes) {
        user_error("--val %s is %s and --data %s; prepare both alike", o->val, val->bytes ? "read as bytes" : "tokens",
                   train->bytes ? "is read as bytes" : "tokens");
    }
    if (val->vocabulary > m->config.V) {
        user_error("the validation data has a vocabulary of %d tokens and the model of %d; prepare both alike",
                   val->vocabulary, m->config.V);
    }
}

static void shard_part(const Model* m, OptimConfig* config) {
    if (!shard_splits(m->shard, SHARD_STATES)) return;
    config->begin = m->shard->cut[rank_of(m)];
    config->end = m->shard->cut[rank_of(m) + 1];
}

// What this rank keeps, once the arena's layout is known.
static void shard_resolve(Model* m, OptimConfig* config) {
    Shard* s = m->shard;
    if (!s) return;
    long long tiles = m->elements / TILE_ELEMENTS;
    if (tiles < ranks_of(m))
        user_error("the model has %lld tiles of weights for %d ranks; start %lld", tiles, ranks_of(m), tiles);
    ShardTensor* tensors = (ShardTensor*)memory_take(m->count * sizeof(ShardTensor));
    for (int t = 0; t < m->count; t++) {
        bool in_block = t >= FIRST_BLOCK && t < m->count - 2;
        tensors[t] = {m->tensors[t].offset, m->tensors[t].rows * m->tensors[t].cols,
                      in_block ? (t - FIRST_BLOCK) / BLOCK_TENSORS : m->config.L};
    }
    s->gradient_bytes = m->grads_bf16 ? 2 : 4;
    s->weight_bytes = m->type == OPTIM_FP32 ? 4 : 2;
    s->chunk = m->dev->gpu ? 8192 : 64;
    shard_plan(s, tensors, m->count, m->config.L, m->elements);
    optim_cuts(config, m->tensors, m->count, s->cut, ranks_of(m) + 1);
    shard_part(m, config);
    free(tensors);
}

// Batches and the optimizer's formats: gradients are bf16 where a step has one micro-batch of bf16, which rounds them
// once, and fp32 elsewhere, unless the user wants otherwise.
static void batch_and_optim_resolve(Options* o, Model* m, const Dataset* train, OptimConfig* config) {
    bool automatic = strcmp(o->grads, "auto") == 0;
    if (automatic) o->grads = "fp32";
    optim_config_from(o, config);
    m->elements = optim_layout(m->tensors, m->count, config);
    m->grads_bf16 = strcmp(o->grads, "bf16") == 0;
    shard_resolve(m, config);
    batch_resolve(o, m, config, train->bytes, dataset_windows(train, m->T));
    int64_t micro_batches = o->tokens_per_step / (o->batch * o->seq * ranks_of(m));
    if (automatic && micro_batches == 1 && m->type == OPTIM_BF16) o->grads = "bf16";
    m->grads_bf16 = strcmp(o->grads, "bf16") == 0;
    if (m->grads_bf16 && m->type == OPTIM_FP32) {
        user_error("--grads bf16 goes with --matmul bf16, and --matmul is %s; type --grads fp32", o->matmul);
    }
    if (m->shard) m->shard->gradient_bytes = m->grads_bf16 ? 2 : 4;
}

// Says that a built-in shape was taken although a model lies in a folder of the same name.
static void model_shadow_notice(Run* run) {
    char path[PATH_BYTES];
    path_join(path, run->options->model, "model.safetensors");
    if (!file_exists(path)) return;
    say(run, " notice   %s is built in and its weights are new; type --model ./%s for those of the folder\n",
        run->options->model, run->options->model);
}

// Weights and states: from the checkpoint, from --model DIR, or drawn.
static void model_begin(Run* run, const OptimConfig* config, const Json* state, const char* checkpoint) {
    Model* m = run->model;
    if (checkpoint) {
        checkpoint_read(run, config, state, checkpoint);
        snprintf(run->last_checkpoint, sizeof(run->last_checkpoint), "%s", checkpoint);
        say(run, " resume   %s, step %lld\n", checkpoint, (long long)run->step);
    } else if (*run->model_folder) {
        model_read(m, run->model_folder);
    } else {
        model_shadow_notice(run);
        model_init(m, (uint64_t)run->options->seed);
    }
}

// The run folder is rank 0's, and so is the tokenizer in it; all know whether there are samples.
static void run_begin(Run* run, const Launch* launch, const char* tokenizer, const char* checkpoint, const Json* state,
                      bool bytes, bool resumed) {
    launch_any(launch, false);  // all have come this far: what one of them refuses leaves no folder
    if (launch->rank == 0) {
        run_folder_make(run, resumed);
        say(run, " run      %s\n", run->folder);
        run_tokenizer_open(run, tokenizer, checkpoint, state, bytes);
    }
    launch_share(launch, 0, run->folder, sizeof(run->folder));
    run->folder[sizeof(run->folder) - 1] = 0;
    launch_share(launch, 0, &run->options->sample_every, sizeof(run->options->sample_every));
}

// Resuming: choose the checkpoint and merge its saved options with those that were typed.

// What was typed as empty, as from a shell's variable that is not set, is not what was meant; but that a run goes on
// without the data that it had may be.
static void require_words(const Options* o, const bool* given) {
    const struct {
        const char *name, *text;
    } words[] = {{"data", o->data}, {"val", o->val}, {"model", o->model}, {"run", o->run}, {"resume", o->resume}};
    const bool goes_on = strcmp(o->resume, "off") != 0 && strcmp(o->resume, "auto") != 0;
    for (const auto& word : words) {
        if (goes_on && *o->resume && (word.text == o->data || word.text == o->val)) continue;
        if (!given[option_find(&TABLE, word.name) - OPTIONS] || *word.text) continue;
        user_error("--%s '' is empty; give it a value or leave it out", word.name);
    }
}

// The checkpoint to go on from into `folder`, and its state.json's tree: rank 0 chooses. NULL: begin anew.
static Json* resume_locate(Options* o, const Launch* launch, char* folder, size_t bytes, bool* named_itself) {
    char error[DATA_ERROR_BYTES];
    Json* state = nullptr;
    if (launch->rank == 0 && !checkpoint_locate(o->resume, o->run, folder, bytes, named_itself, &state, error)) {
        user_error("%s", error);
    }
    if (!state) folder[0] = 0;
    launch_share(launch, 0, folder, (int64_t)bytes);
    folder[bytes - 1] = 0;
    if (launch->rank > 0 && folder[0]) state = checkpoint_state(folder, error);
    if (folder[0] && !state) user_error("%s", error);
    return state;
}

// Options that belong to one start of the program and are not taken over from a checkpoint.
static bool is_restored(const Option* option) {
    static const char* const own[] = {"run", "resume", "device", "sample", "gpus", "join-timeout"};
    for (const char* name : own) {
        if (strcmp(option->name, name) == 0) return false;
    }
    return option->type != OPTION_FLAG;
}

static bool is_given(const bool* given, const char* name) {
    return given[option_find(&TABLE, name) - OPTIONS];
}

// Whether an option that was not typed is left to another preset than the saved one, which was typed.
static bool left_to_preset(const Options* o, const bool* given, const Json* saved, const char* name) {
    static const char* const names[] = {"rule", "weights", "m", "v"};
    if (!is_given(given, "preset") || strcmp(json_string(saved, "preset", ""), o->preset) == 0) return false;
    for (const char* its : names) {
        if (strcmp(name, its) == 0) return true;
    }
    return false;
}

// The model's shape hangs on these, so a run cannot change them.
static bool is_fixed(const char* name) {
    for (const char* fixed : {"model", "layers", "channels", "heads", "seq"}) {
        if (strcmp(name, fixed) == 0) return true;
    }
    return false;
}

// Options that were not typed are taken from the checkpoint; typed ones that differ are listed in `changed`, or refused
// where the model's shape hangs on them. `asked`: the checkpoint has --grads as it was asked for, not what became of
// it.
static void resume_options(Options* o, const bool* given, const Json* saved, bool asked, char* changed,
                           size_t changed_bytes) {
    char error[DATA_ERROR_BYTES];
    for (int i = 0; i < OPTION_COUNT; i++) {
        const Option* option = &OPTIONS[i];
        const char* text = json_string(saved, option->name, nullptr);
        if (!is_restored(option) || !text || strcmp(option->name, "override") == 0) continue;
        if (!given[i] && left_to_preset(o, given, saved, option->name)) continue;
        const size_t used = strlen(changed);
        const bool fixed = is_fixed(option->name);
        if (!given[i] && !asked && strcmp(option->name, "grads") == 0 && strcmp(text, "bf16") == 0) {
            snprintf(changed + used, changed_bytes - used, " --grads auto (was bf16, asked for or not)");
            continue;
        }
        char number[OPTION_TEXT_BYTES];
        const char* now = option_text(option, o, number, sizeof(number));
        const bool typed = given[i] && !(fixed && strcmp(now, "auto") == 0);
        if (typed && strcmp(now, text) == 0) continue;
        // A folder that was typed as --model, as a job script does each time, is not read: it may be gone by now, or
        // the script may run in another place.
        const bool folder = typed && strcmp(option->name, "model") == 0 && !gpt2_named(now) && !gpt2_named(text);
        if (folder) snprintf(changed + used, changed_bytes - used, " --model %s: the checkpoint's weights go on", now);
        if ((!typed || folder) && !option_set(option, o, text, error)) user_error("--resume: %s", error);
        if (!typed || folder) continue;
        if (fixed) {
            user_error("--%s %s: the checkpoint goes on with %s; leave --%s out, or name another --run to begin anew",
                       option->name, now, text, option->name);
        }
        snprintf(changed + used, changed_bytes - used, " --%s %s (was %s)", option->name, *now ? now : "''",
                 *text ? text : "''");
    }
}

// Why the code in a --format file that only the checkpoint in `folder` names may be a stranger's; NULL: it is not. This
// program writes paths that name a file in one way, so that a path which can mean another file in another place, such
// as a downloaded one, is not its own.
static const char* format_distrust(const char* path, const char* folder) {
    struct stat info;
    char parent[4500];
    if (stat(path, &info) != 0) return nullptr;  // there is no code, which another sentence says
    char *real = realpath(path, nullptr), *run = realpath(folder_parent(folder, parent, sizeof(parent)), nullptr);
    const size_t length = run ? strlen(run) : 0;
    const bool same = real && strcmp(real, path) == 0;
    const bool beside = real && length > 1 && strncmp(real, run, length) == 0 && real[length] == '/';
    free(real), free(run);
    if (!same) return "its path is not one that this program writes";
    if (beside) return "the file lies in the run's folder";
    if (info.st_uid != geteuid() && info.st_uid != 0) return "the file belongs to another user";
    return info.st_mode & S_IWOTH ? "everybody can write the file" : nullptr;
}

// Code that was not typed runs only if this user's own run has used it before.
static void require_own_formats(const Options* o, const bool* given, const char* folder, bool first) {
    char path[4500];
    struct stat info;
    if (is_given(given, "format") || !o->formats[0]) return;
    snprintf(path, sizeof(path), "%s/state.json", folder);
    const bool own = stat(path, &info) == 0 && info.st_uid == geteuid();
    const char* reason = own ? nullptr : "the checkpoint belongs to another user";
    char *list = text_copy(o->formats), *shown = text_copy(o->formats), *rest = nullptr;
    for (char* one = strtok_r(list, ",", &rest); one && !reason; one = strtok_r(nullptr, ",", &rest)) {
        reason = format_distrust(one, folder);
    }
    text_disarm(shown, false);
    if (reason) {
        user_error(
            "--resume: %s names --format %s, whose code would run, and %s; type --format '%s' if you trust it, or "
            "begin "
            "anew without --resume",
            folder, shown, reason, shown);
    }
    if (first) fprintf(stderr, "train: note: the code in %s runs, since %s names it as --format\n", shown, folder);
    free(list), free(shown);
}

// A learning rate that was not typed is the new rule's usual one where that differs from the old rule's.
static void resume_usual_lr(Options* o, const bool* given, const char* rule, const Json* saved, char* changed,
                            size_t changed_bytes) {
    const char* before = json_string(saved, "rule", rule);
    double old = optim_usual_lr(before, o->channels), usual = optim_usual_lr(rule, o->channels);
    if (given[option_find(&TABLE, "lr") - OPTIONS] || old == usual || o->lr == usual) return;
    size_t used = strlen(changed);
    snprintf(changed + used, changed_bytes - used, " --lr %g, usual for %s (was %g, for %s)", usual, rule, o->lr,
             before);
    o->lr = usual;
}

// Another rule may have no use for the saved v, or need one where there was none, and has a learning rate of its own.
static void resume_rule(Options* o, const bool* given, const Json* saved, char* changed, size_t changed_bytes) {
    char error[DATA_ERROR_BYTES];
    OptimConfig config;
    Options trial = *o;
    trial.grads = "fp32", trial.overrides = "none";  // which has no part in v and the learning rate
    bool v_typed = given[option_find(&TABLE, "v") - OPTIONS];
    if (!v_typed && !optim_config_try(&trial, &config, error, sizeof(error))) trial.v = o->v = "";
    if (optim_config_try(&trial, &config, error, sizeof(error))) {
        resume_usual_lr(o, given, config.rule, saved, changed, changed_bytes);
    }
}

// Whether the checkpoint's format of `kind`, which is saved by its full name, is this one.
static bool has_format(const Json* formats, const char* kind, const char* name) {
    return strcmp(json_string(formats, kind, ""), name) == 0;
}

// --override, once the other options are known: what is typed; else what the user had asked for ("none" of its preset
// only); else what the run had, with its own preset and formats; else "", the preset's. Returns what was asked for, for
// the next checkpoint: "" where the run keeps what it had, as it will then again. Versions before 3 did not say what
// was asked for: what is not the preset's of today is taken for the user's.
static const char* resume_override(Options* o, const bool* given, const Json* state, char* changed, size_t bytes) {
    char error[DATA_ERROR_BYTES];
    const Json *saved = json_get(state, "options"), *formats = json_get(state, "formats");
    if (!formats) formats = saved;
    const char *preset = json_string(saved, "preset", ""), *had = json_string(formats, "override", "");
    const char* asked = json_string(saved, "override", "");
    const bool typed = is_given(given, "override"), other = strcmp(preset, o->preset) != 0;
    const bool older = json_int(state, "version", 1) < 3;
    if (!*had) had = "none";  // as it was said before presets had some
    if (older && strcmp(had, optim_preset_overrides(preset)) == 0) asked = "";
    if ((older || other) && strcmp(had, "none") == 0) asked = "";
    OptimConfig config;
    Options trial = *o;
    trial.grads = "fp32", trial.overrides = "";
    const bool known = optim_config_try(&trial, &config, error, sizeof(error));
    const bool same = known && !other && has_format(formats, "weights", config.weights) &&
                      has_format(formats, "m", config.m) && has_format(formats, "v", config.v);
    const bool has_own = known && strcmp(config.overrides, "none") != 0;
    if (!typed) o->overrides = text_copy(*asked ? asked : same ? had : "");
    trial.overrides = o->overrides;
    const char* next = typed ? o->overrides : text_copy(asked);
    if (!optim_config_try(&trial, &config, error, sizeof(error))) return next;  // it will be refused
    const size_t used = strlen(changed);
    if (strcmp(config.overrides, had) != 0) {
        snprintf(changed + used, bytes - used, " --override %s (was %s)", config.overrides, had);
    } else if (!typed && *asked && other && has_own) {
        snprintf(changed + used, bytes - used, " --override %s (the run's, not %s's)", had, o->preset);
    }
    return next;
}

// Ranks that would not train the same are a mistake: other options, or other data.
static void require_same(const Options* o, const Launch* launch, const Dataset* train, const Dataset* val) {
    char* text = nullptr;
    size_t length = 0;
    Options same = *o;
    same.run = same.resume = same.data = same.val = same.formats = "";
    same.join_timeout = 0;
    FILE* file = text_stream(&text, &length);
    options_json(&TABLE, &same, file);
    fprintf(file, ", %lld tokens of --data, %lld of --val (checksums %08x and %08x)", (long long)train->tokens,
            (long long)val->tokens, train->crc, val->crc);
    fclose(file);
    uint32_t own = crc32c(0, text, (int64_t)length), first = own;
    launch_share(launch, 0, &first, sizeof(first));
    if (first != own) user_error("it has other options or other data than rank 0: %s; start all alike", text);
    free(text);
}

// A run and all that it is made of, from its plan to its end.
struct Training {
    Options* options;
    const bool* given;  // (OPTION_COUNT) which of them were typed
    const Launch* launch;
    Json* state;              // of the checkpoint that it goes on from; NULL: it begins anew
    char folder[PATH_BYTES];  // of that checkpoint
    char changed[16384];      // what is not as it was then, for the banner
    Device dev;
    Model model;
    Shard shard;
    Run run;
    Dataset train_data, val_data;
    OptimConfig config;
    MemoryPlan plan;
};

static const char* training_checkpoint(const Training* t) {
    return t->state ? t->folder : nullptr;
}

// The run folder is held before one of its checkpoints is chosen.
static void training_hold(Training* t) {
    const Options* o = t->options;
    const bool again = strcmp(o->resume, "off") != 0;
    char error[DATA_ERROR_BYTES], state[PATH_BYTES];
    if (o->run[0] && !run_folder_free(o->run, again, error)) user_error("%s", error);
    const char* folder = o->run[0] ? o->run : o->resume;
    path_join(state, folder, "state.json");  // of a checkpoint: its run is held once it is known
    if (again && !o->dry_run && folder_exists(folder) && !file_exists(state)) run_folder_hold(&t->run, folder);
}

// The checkpoint to go on from, if any, and its options.
static void training_resume(Training* t) {
    Options* o = t->options;
    bool named_itself = false, first = t->launch->rank == 0;
    char error[DATA_ERROR_BYTES], parent[PATH_BYTES];
    require_words(o, t->given);
    if (first) training_hold(t);
    t->run.asked = *o;
    t->state = resume_locate(o, t->launch, t->folder, sizeof(t->folder), &named_itself);
    if (!t->state) return;
    const Json* saved = json_get(t->state, "options");
    bool asked = json_int(t->state, "version", 1) > 1;
    resume_options(o, t->given, saved, asked, t->changed, sizeof(t->changed) - 256);
    require_own_formats(o, t->given, t->folder, first);
    resume_rule(o, t->given, saved, t->changed, sizeof(t->changed) - 256);
    const char* overrides = resume_override(o, t->given, t->state, t->changed, sizeof(t->changed) - 256);
    t->run.asked = *o, t->run.asked.overrides = overrides;
    if (!o->run[0]) {
        if (first && named_itself && !checkpoint_run(t->folder, parent, sizeof(parent), error)) user_error("%s", error);
        o->run = text_copy(folder_parent(t->folder, parent, sizeof(parent)));
        if (first && !o->dry_run) run_folder_hold(&t->run, o->run);
    }
    if (first && !checkpoint_continue(o->run, t->folder, named_itself, !o->dry_run, error)) {
        user_error("%s", error);
    }
}

// The device, and what this rank shares with others.
static void training_open(Training* t) {
    Options* o = t->options;
    Model* m = &t->model;
    t->run.options = o;
    t->run.model = m;
    t->run.quiet = t->launch->rank > 0;
    t->run.text = text_stream(&t->run.banner, &t->run.banner_bytes);
    m->type = device_resolve(o, &t->dev, t->launch);
    m->dev = &t->dev;
    if (!t->dev.gpu && o->formats[0]) {
        user_error(
            "--format %s: a format of your own is compiled for a GPU, and this run is on the CPU; type --format '', "
            "with a built-in one for --m and --v (--list-formats names them), or run on a GPU",
            o->formats);
    }
    if (t->launch->world == 1) return;
    if (t->dev.gpu) comm_require_own_gpu(t->launch);
    comm_open(&t->shard.comm, t->launch, &t->dev);
    t->shard.mode = shard_mode_from(o->shard);
    t->shard.late = !t->shard.comm.peers && t->shard.comm.rate > SHARD_LATE_RATE;
    t->shard.format = comm_format_from(o->comm);
    m->shard = &t->shard;
}

// Data, model, batches, optimizer and length.
static void training_resolve(Training* t) {
    Options* o = t->options;
    Model* m = &t->model;
    data_and_model_resolve(o, training_checkpoint(t), t->run.model_folder, &t->train_data, &t->val_data, m);
    batch_and_optim_resolve(o, m, &t->train_data, &t->config);
    length_resolve(o, dataset_windows(&t->train_data, m->T), !o->data[0], t->dev.gpu,
                   t->given[option_find(&TABLE, "warmup") - OPTIONS]);
    optim_config_from(o, &t->config);  // with the steps and learning rate that are known by now
    shard_part(m, &t->config);
    char error[DATA_ERROR_BYTES];
    if (!dataset_fingerprint(&t->train_data, error) || !dataset_fingerprint(&t->val_data, error)) {
        user_error("--data: %s", error);
    }
    require_same(o, t->launch, &t->train_data, &t->val_data);
}

// Where the run stands.
static void training_count(Training* t) {
    const Json* state = t->state;
    Run* run = &t->run;
    int64_t tokens = t->train_data.tokens, before = state ? json_int(state, "data_tokens", tokens) : tokens;
    run->step = state ? json_int(state, "step", 0) : 0;
    run->sequences = state ? json_int(state, "sequences", 0) : 0;
    run->best_val = state ? json_number(state, "best_val", INFINITY) : INFINITY;
    run->skipped = state ? json_int(state, "skipped", 0) : 0;
    run->skipped_last = state ? json_int(state, "skipped_last", 0) : 0;
    run->data_tokens = tokens;
    run->data_crc = t->train_data.crc, run->val_crc = t->val_data.crc;
    char* end = strchr(t->changed, 0);
    if (before != tokens) {
        end += sprintf(end, " the data: %lld tokens (were %lld), so the order from here on is another",
                       (long long)tokens, (long long)before);
    } else if (state && json_int(state, "data_crc", run->data_crc) != run->data_crc) {
        end += sprintf(end, " the data: as many tokens as before, and others");
    }
    if (!state || json_int(state, "val_crc", run->val_crc) == run->val_crc) return;
    run->best_val = INFINITY;
    sprintf(end, " the validation data, so the best loss begins anew");
}

// The weights come before the run folder: a bad model file leaves nothing behind.
static void training_begin(Training* t) {
    Options* o = t->options;
    Model* m = &t->model;
    const char* checkpoint = training_checkpoint(t);
    memory_checkpoint(t->run.last_checkpoint);
    model_allocate(m, &t->config);
    rehearse(m, &t->dev);
    model_begin(&t->run, &t->config, t->state, checkpoint);
    if (m->shard) shard_publish(m->shard);
    signals_doing("this step", 0);
    // Paths as they are found from any folder, so that the run can be resumed from anywhere.
    if (o->data[0]) o->data = path_absolute(o->data);
    if (o->val[0]) o->val = path_absolute(o->val);
    if (o->formats[0]) o->formats = paths_absolute(o->formats);
    run_begin(&t->run, t->launch, t->train_data.tokenizer, checkpoint ? checkpoint : "", t->state, t->train_data.bytes,
              t->state != nullptr || strcmp(o->resume, "auto") == 0);
    t->run.bytes_per_token = t->val_data.bytes_per_token;
    t->run.started = seconds_now();
    log_config(&t->run, t->dev.name);
    if (t->state) log_line(&t->run, "resume", 0, nullptr, nullptr);
}

static void training_end(Training* t) {
    Run* run = &t->run;
    if (run->log) fclose(run->log);
    fclose(run->text);
    json_free(t->state);
    json_free(run->config);
    if (run->tokenizer) tokenizer_close(run->tokenizer);
    dataset_close(&t->train_data);
    dataset_close(&t->val_data);
    model_free(&t->model);
    device_close(&t->dev);
}

// Commands to go on with, as a shell takes them: this program as it was started, and the plot where it can be drawn.
static void say_next(Run* run) {
    const char* self = shell_word(program_invocation_name);
    if (stops(run->model)) say(run, "next     %s --resume %s\n", self, shell_word(run->folder));
    const bool samples = !stops(run->model) && run->samples;
    if (samples) {
        say(run, "next     %s --sample \"...\" --model %s\n", self, shell_word(run->last_checkpoint));
    }
    char here[PATH_BYTES], python[PATH_BYTES] = "", plot[PATH_BYTES];
    ssize_t length = readlink("/proc/self/exe", plot, sizeof(plot) - 64);
    plot[length > 0 ? length : 0] = 0;
    const char* folder = folder_parent(plot, here, sizeof(here));
    snprintf(python, sizeof(python), "%.4000s/.venv/bin/python", folder);
    snprintf(plot, sizeof(plot), "%.4000s/dev/plot.py", folder);
    if (!file_exists(python) || !file_exists(plot)) return;
    char* cwd = getcwd(nullptr, 0);
    size_t skip = cwd && strcmp(cwd, folder) == 0 ? strlen(folder) + 1 : 0;
    say(run, "%-9s%s %s %s\n", samples || stops(run->model) ? "" : "next", shell_word(python + skip),
        shell_word(plot + skip), shell_word(run->folder));
    free(cwd);
}

static int train_main(Options* o, const bool* given, const Launch* launch) {
    Training t = {};
    t.options = o, t.given = given, t.launch = launch;
    training_resume(&t);
    t.run.model_folder = t.state ? "" : model_folder(o);
    training_open(&t);
    training_resolve(&t);
    training_count(&t);
    t.plan = memory_plan(&t.model, &t.config);
    print_plan(&t.run, &t.config, &t.plan, &t.train_data, &t.val_data, t.changed);
    if (t.state && t.run.step >= o->steps) {
        say(&t.run, "done     %s is at step %lld of %lld; type --steps N to train on\n", t.folder,
            (long long)t.run.step, (long long)o->steps);
        return 0;
    }
    require_memory(o, &t.model, &t.config, &t.plan);
    if (o->dry_run) return 0;

    training_begin(&t);
    train(&t.run, &t.train_data, &t.val_data, t.plan.total);
    say_next(&t.run);
    training_end(&t);
    return 0;
}

#ifndef TESTING
// The system calls this before any library begins, so that a signal finds its handler whenever it comes, and the stack
// is there before a limit can refuse it.
static void before_libraries(int, char**, char**) {
    signals_catch();
    memory_begin();
}
__attribute__((section(".preinit_array"), used)) static void (*const first_of_all)(int, char**,
                                                                                   char**) = before_libraries;

int main(int argc, char** argv) {
    openmp_wait_asleep(argv);
    Options options = {};
    bool given[OPTION_COUNT] = {};
    char error[DATA_ERROR_BYTES];
    if (!options_defaults(&TABLE, &options, error) || !options_parse(&TABLE, &options, given, argc, argv, error)) {
        user_error("%s", error);
    }
    if (options.help) {
        printf("nibble: pre-trains GPT-2-family language models.\n\n  ./train [--option value ...]\n");
        options_help(&TABLE, stdout);
    }
    if (options.list_formats) optim_list_formats(stdout, options.formats);
    if (options.list_presets) optim_list_presets(stdout);
    if (options.help || options.list_formats || options.list_presets) return 0;
    bool samples = given[option_find(&TABLE, "sample") - OPTIONS];
    Launch launch;
    if (!launch_environment(&launch, options.gpus, error)) user_error("%s", error);
    if (launch.rank > 0) signals_quiet();
    if (samples) return launch.rank == 0 ? sample_main(&options) : 0;
    if (options.gpus > 1 && !stand_in_asked() && strcmp(options.device, "cpu") == 0) {
        user_error("--gpus %lld goes with GPUs and --device cpu was typed; leave --gpus out, or --device cpu",
                   (long long)options.gpus);
    }
    if (options.gpus > 1 && !launch_fork(&launch, (int)options.gpus, error)) user_error("%s", error);
    if (launch.rank > 0) signals_quiet();
    if (!launch_join(&launch, options.join_timeout, error)) user_error("%s", error);
    int code = train_main(&options, given, &launch);
    launch_leave(&launch);
    return code;
}
#endif
