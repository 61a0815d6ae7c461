// nibble: pre-trains GPT-2-family language models on one GPU or several, or on this machine's cores.
//
// Read from top to bottom: options -> model -> forward -> backward -> memory -> update -> samples and evaluations ->
// checkpoints -> resolving `auto` options -> resuming -> step loop -> main. Operators are in kernels/, the optimizer is
// in optim/, files and messages are in data/. A Model lives on one Device. With several GPUs, m->arena.shard
// (kernels/ranks/shard.cuh) is this rank's part in what they compute together; alone it is NULL.
//
// Conventions: B batch (sequences), T time (tokens of a sequence), C channels, L layers, NH heads, V vocabulary, Vp
// vocabulary padded to a multiple of 128; N = B*T rows. X is the element type of activations and of the weights that
// the matmuls read (float or bf16), G that of the gradients of parameters (float or bf16); `d` before a name is a
// gradient.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>

#include "data/checkpoint.h"        // Checkpoint, CheckpointReader: a run's folder step_N, whole or not there
#include "data/clock.h"             // seconds_now
#include "data/errors.h"            // user_error, require
#include "data/evaluation.h"        // Evaluation: questions in tokens, their batches and figures
#include "data/fit.h"               // Fit: plans of models for a card that need not be here
#include "data/gpt2_config.h"       // gpt2_shape_choose: the model's shape by name or from a folder
#include "data/loader.h"            // Dataset, Loader, Batch: windows of tokens in a seeded order
#include "data/memory.h"            // memory_take, memory_zero, text_copy, ...: never NULL
#include "data/model_folder.h"      // ModelFolder: the files of weights in a folder
#include "data/options.h"           // Options: what a run was asked for, and the table of all options
#include "data/report.h"            // report_step_done, ...: lines of the terminal and of log.jsonl
#include "data/resume.h"            // resume_find, ...: options of a checkpoint and typed ones
#include "data/run_folder.h"        // RunFolder: the folder, its log, the tokenizer in it
#include "data/sampling.h"          // Samples: tokens as text, printed or logged
#include "data/schedule.h"          // learning_rate, defaults_choose: what `auto` means
#include "data/signals.h"           // signal_stop, signal_save
#include "data/tokenizer.h"         // Tokenizer: text <-> tokens; Prompts
#include "kernels/attention.cuh"    // attention_forward, attention_backward
#include "kernels/classifier.cuh"   // classifier (fused softmax and cross-entropy), loss_mean
#include "kernels/common.cuh"       // Device, check, copy_to_host, ...
#include "kernels/decode.cuh"       // Decoder: sampling with a cache of keys and values
#include "kernels/embedding.cuh"    // embedding_forward, embedding_backward
#include "kernels/feeder.cuh"       // Feeder: micro-batches to the device
#include "kernels/gpus.cuh"         // device_imagine, device_describe, device_peak
#include "kernels/linear_fp8.cuh"   // Linear, Norm, linear_forward, norm_forward, ...: in bf16, fp32 or fp8
#include "kernels/profile.h"        // named: names of what is queued, for NVIDIA's profilers
#include "kernels/ranks/launch.h"   // Launch: ranks, one a GPU
#include "kernels/ranks/shard.cuh"  // Shard: gradients, states and weights over several ranks
#include "kernels/score.cuh"        // score_places: losses of given tokens
#include "kernels/spill.cuh"        // Spill: the residual stream in host memory
#include "optim/model/arena.h"      // Arena: weights, gradients and the step, in whichever way they are kept
#include "optim/optim.h"            // Optim: weights, states and the step

// Options. data/options.h lists them; their table in data/options_table.c drives parsing, --help, the banner,
// config.json and what a resume restores and reports.

// Returns the options' optimizer. Names that the preset chooses are "".
static OptimConfig optim_config_of(const Options* o) {
    OptimConfig c = {};
    optim_set_options(&c, &o->of_rule);
    c.preset = default_preset(o), c.rule = o->rule, c.weights = o->weights, c.m = o->m, c.v = o->v;
    c.grads = strcmp(o->grads, "auto") == 0 ? "fp32" : o->grads;
    c.lr_max = (float)o->lr, c.seed = (uint64_t)o->seed, c.overrides = o->overrides;
    return c;
}

// The same, resolved; writes the names that the preset chooses back into the options. False with a sentence.
[[nodiscard]] static bool optim_config_from(Options* o, OptimConfig* config, char* error) {
    *config = optim_config_of(o);
    o->preset = config->preset;
    if (!optim_resolve(config, error)) return false;
    o->rule = config->rule, o->weights = config->weights, o->m = config->m, o->v = config->v;
    o->overrides = config->overrides;
    config->overrides = o->overrides = default_overrides(o);
    return true;
}

// The model: GPT-2 as OpenAI defines it: pre-norm blocks, learned positions, tanh GELU; the head is the embedding.

// Arena order, as in data/model_folder.h: wte, wpe, the blocks, ln_f.weight, ln_f.bias.
constexpr int WTE = 0, WPE = 1, FIRST_BLOCK = 2, BLOCK_TENSORS = MODEL_BLOCK_TENSORS;

struct Model {
    const Device* dev;
    Gpt2Shape shape;
    int B, T;                 // sequences and tokens of a sequence in one micro-batch
    bool recomputes_gelu;     // of every block, in the backward pass
    int recomputed;           // blocks, from the first on, that the backward pass computes again
    int64_t logit_rows;       // rows of logits in memory at a time
    bool uses_fp8, head_fp8;  // products in fp8; the head's too
    Fp8 fp8;                  // their scales, which the arena opens
    int head_slot;            // its first slot for the head, after those of the blocks

    bool spills;  // the residual stream is in host memory
    Spill spill;

    Arena arena;          // the tensors and how they are kept: weights, gradients, states
    ModelTensor* stored;  // the same tensors as files hold them
    int64_t parameters;   // sum of the tensors' sizes, padding of the vocabulary included
    int64_t largest;      // elements of the largest tensor

    float* dwte_sum;    // (Vp, C) fp32 sum of the head's gradient; arena.grads has it when G is float
    void* activations;  // laid out by activations_of
    Batch input;        // a micro-batch
    float* losses;      // (N)
    float* scalars;     // [0] mean loss of the step, [1] norm of the gradient, [2] clip factor, NaN: nothing changed;
                        // then what ranks agree upon, see SCALARS
    const Launch* launch = &LAUNCH_ALONE;  // all ranks
    char error[DATA_ERROR_BYTES];          // the sentence of a function that could not do its work for the model
};

// Lists the tensors. The matrices of the blocks, whose products may be fp8, get their slots among the scales.
static void shape_tensors(Model* model) {
    const Gpt2Shape* c = &model->shape;
    Arena* a = &model->arena;
    arena_tensors(a, model_tensors(c->L, c->C, c->max_T, c->V, c->Vp, &model->stored));
    a->dev = model->dev, a->layers = c->L;
    a->fp8 = model->uses_fp8 ? &model->fp8 : nullptr;
    model->head_slot = 0, model->parameters = model->largest = 0;
    for (int i = 0; i < a->count; i++) {
        const ModelTensor* t = &model->stored[i];
        a->tensors[i] = {t->name, t->rows, t->cols, t->rows > 1, 0, t->parts};
        a->part[i] = t->layer >= 0 ? t->layer : i < FIRST_BLOCK ? part_embeddings(c->L) : part_final(c->L);
        model->parameters += t->rows * t->cols;
        if (t->rows * t->cols > model->largest) model->largest = t->rows * t->cols;
        if (!model->uses_fp8 || t->layer < 0 || t->rows == 1) continue;
        a->slot[i] = model->head_slot + FP8_WEIGHT, model->head_slot += FP8_SLOTS;
    }
    model->fp8.slots = model->head_slot + FP8_SLOTS;
    a->elements = optim_layout(a->tensors, a->count);
}

// The tensors that a micro-batch's passes use. Weights are valid once arena_need has been called for their layer.

// A block: its parameters, their gradients, and the results that the forward pass keeps for the backward pass. The
// input of a linear layer is the output of what comes before it. The last layernorm is the first one of a block L that
// has nothing else.
template <typename X, typename G>
struct Block {
    Norm<X, G> ln1, ln2;
    Linear<X, G> qkv, attproj, fc, fcproj;
    X* qkv_out;    // (N, 3C)
    float* lse;    // (B, NH, T)
    X* residual2;  // (N, C) residual stream after attention
    X* pre_gelu;   // (N, 4C)
};

template <typename X, typename G>
struct Activations {
    int B, T;        // of this pass: sequences, and tokens of each
    int64_t N;       // B*T
    bool adds;       // true: this pass adds to the gradients in memory; false: it overwrites them
    X *wte, *wpe;    // (Vp, C), (max_T, C)
    G *dwte, *dwpe;  // their gradients
    Block<X, G> block[GPT2_MAX_LAYERS + 1];
    X* residual[GPT2_MAX_LAYERS + 1];  // (N, C) residual stream into each block; the last goes into ln_f
    const Spill* spill;                // moves them to host memory and back, in turn; NULL: all stay on the device
    X* branch;                         // (N, C) what a sublayer adds to the residual stream
    X* logits;                         // (logit_rows, Vp), then their gradient
    Fp8Use fp8;                        // codes in use
    // backward only
    X* dresidual;    // (N, C) gradient of the residual stream
    X* dbranch;      // (N, C) in the place of `branch`
    X* dwide;        // (N, 4C) gradient of pre_gelu; of qkv_out in its first 3C
    float* scratch;  // of the operator that runs
    int64_t bytes;
};

template <typename X>
static int64_t scratch_bytes(const Model* m) {
    const int C = m->shape.C;
    const int64_t N = (int64_t)m->B * m->T;
    return std::max({attention_backward_scratch_bytes(m->dev, m->B, m->T, C, m->shape.NH),
                     layernorm_backward_scratch_bytes<X>(m->dev, C), matmul_backward_bias_scratch_bytes(m->dev, 3 * C),
                     matmul_backward_gelu_scratch_bytes(m->dev, N, 4 * C),
                     m->uses_fp8 ? fp8_scratch_bytes(m->dev, N, 4 * C) : 0});
}

// Finds tensor t's weights and, if the model trains, their gradients.
template <typename X, typename G>
static void tensor_at(const Model* m, int t, X** weights, G** gradients) {
    *weights = (X*)arena_at(&m->arena, m->arena.weights, t, sizeof(X));
    *gradients = m->arena.grads ? (G*)arena_at(&m->arena, m->arena.grads, t, sizeof(G)) : nullptr;
}

template <typename X, typename G>
static void norm_at(const Model* m, int t, Norm<X, G>* norm) {
    norm->C = (int)m->arena.tensors[t].cols;
    tensor_at(m, t, &norm->weight, &norm->dweight);
    tensor_at(m, t + 1, &norm->bias, &norm->dbias);
}

// Sets the linear layer of matrix t, whose input has its arrays. dout: the gradient of its output. made, dmade: the
// codes of the input and of dout that kernels make.
template <typename X, typename G>
static void linear_at(const Model* m, const Fp8Use* use, int t, Linear<X, G>* linear, X* dout, Fp8Made made,
                      Fp8Made dmade) {
    const Arena* a = &m->arena;
    X* weight;
    tensor_at(m, t, &weight, &linear->dweight);
    tensor_at(m, t + 1, &linear->bias, &linear->dbias);
    linear->C = (int)a->tensors[t].cols, linear->OC = (int)a->tensors[t].rows;
    linear_set(use, linear, a->slot[t] - FP8_WEIGHT, weight, arena_codes(a, t), dout, made, dmade);
}

// Takes the arrays of block l. With recompute=gelu all blocks share `gelu`. With fp8 each keeps the codes by columns of
// what its products read, and all share the arrays that these codes are made of.
template <typename X, typename G>
static Block<X, G> block_arrays(const Model* m, Layout* layout, const Block<X, G>* first, int l, bool fp8) {
    Block<X, G> b = {};
    const int64_t N = (int64_t)m->B * m->T, C = m->shape.C;
    const bool shares_gelu = l > 0 && m->recomputes_gelu;
    Operand<X>*ln1 = &b.qkv.inp, *attention = &b.attproj.inp, *ln2 = &b.fc.inp, *gelu = &b.fcproj.inp;
    b.ln1.mean = layout_take<float>(layout, N), b.ln1.rstd = layout_take<float>(layout, N);
    ln1->values = fp8 && l > 0 ? first->qkv.inp.values : layout_take<X>(layout, N * C);
    b.qkv_out = layout_take<X>(layout, N * 3 * C);
    b.lse = layout_take<float>(layout, N * m->shape.NH);
    attention->values = layout_take<X>(layout, N * C);
    b.residual2 = layout_take<X>(layout, N * C);
    b.ln2.mean = layout_take<float>(layout, N), b.ln2.rstd = layout_take<float>(layout, N);
    ln2->values = fp8 ? ln1->values : layout_take<X>(layout, N * C);
    b.pre_gelu = layout_take<X>(layout, N * 4 * C);
    if (!fp8) gelu->values = shares_gelu ? first->fcproj.inp.values : layout_take<X>(layout, N * 4 * C);
    if (!fp8) return b;
    for (Operand<X>* inp : {ln1, attention, ln2}) inp->columns = layout_take<uint8_t>(layout, N * C);
    gelu->columns = shares_gelu ? first->fcproj.inp.columns : layout_take<uint8_t>(layout, N * 4 * C);
    return b;
}

// Sets the parameters of block l, in arena order, and what its products read.
template <typename X, typename G>
static void block_parameters(const Model* m, const Activations<X, G>* a, Block<X, G>* b, int l) {
    const int t = FIRST_BLOCK + l * BLOCK_TENSORS;
    const Fp8Use* use = &a->fp8;
    const Fp8Made makes = use->layernorm_makes;
    norm_at(m, t, &b->ln1);
    linear_at(m, use, t + 2, &b->qkv, a->dwide, makes, use->attention_makes);
    linear_at(m, use, t + 4, &b->attproj, a->dresidual, FP8_NOTHING, makes);
    norm_at(m, t + 6, &b->ln2);
    linear_at(m, use, t + 8, &b->fc, a->dwide, makes, FP8_NOTHING);
    linear_at(m, use, t + 10, &b->fcproj, a->dresidual, FP8_NOTHING, makes);
    linear_gelu(use, &b->fc, &b->fcproj, b->pre_gelu);
}

// Returns what passes over m->B x m->T tokens work with, laid out from `base` on. This one function gives the memory
// plan, the allocation and the pointers; with base NULL only `bytes` has a meaning. With recompute=block, blocks that
// are computed again, and the first that is kept, share arrays; the forward pass leaves the kept one there.
template <typename X, typename G>
static Activations<X, G> activations_of(const Model* m, void* base, bool train) {
    Activations<X, G> a = {};
    Layout layout = {(char*)base, 0};
    const int64_t N = (int64_t)m->B * m->T, C = m->shape.C, rows = m->logit_rows, Vp = m->shape.Vp;
    const int L = m->shape.L, sharing = train ? m->recomputed + 1 : L;  // blocks, from the first on, that share arrays
    const bool fp8 = train && m->uses_fp8;
    a.B = m->B, a.T = m->T, a.N = N;
    a.logits = layout_take<X>(&layout, (rows > 1 ? rows : 2) * Vp);  // at least a row of fp32
    if (fp8 && m->head_fp8) linear_use_head(&layout, &a.fp8, rows, C, Vp);
    const int64_t logits = layout.used;
    layout.used = 0;  // the blocks' backward pass begins when the logits are done, and takes their place
    a.dresidual = layout_take<X>(&layout, train ? N * C : 0);
    a.dwide = layout_take<X>(&layout, train ? N * 4 * C : 0);
    if (fp8) linear_use_gradients(&layout, &a.fp8, N, (int)C);
    a.scratch = (float*)layout_take<char>(&layout, train ? scratch_bytes<X>(m) : 0);
    if (layout.used < logits) layout.used = logits;
    if (fp8) linear_use_layer(&layout, &a.fp8, N, (int)C);
    if (fp8 && base) linear_use_begin(&a.fp8, m->dev, (Fp8*)&m->fp8, attention_backward_codes(m->dev), N, (int)C);
    void* dequant_buffer = layout_take<char>(&layout, train ? 0 : m->arena.dequant_bytes);
    if (base) arena_dequant_buffer(&m->arena, train ? nullptr : dequant_buffer);
    a.branch = a.dbranch = layout_take<X>(&layout, N * C);  // the backward pass no longer needs it
    a.spill = train && m->spills ? &m->spill : nullptr;
    // Without a backward pass the stream needs two places: a block's input and output.
    const int places = !train ? 2 : m->spills && L >= SPILL_PLACES ? SPILL_PLACES : L + 1;
    a.residual[0] = layout_take<X>(&layout, N * C);
    for (int l = 0; l < L; l++) {
        a.residual[l + 1] = l + 1 < places ? layout_take<X>(&layout, N * C) : a.residual[l + 1 - places];
        a.block[l] = l > 0 && l < sharing ? a.block[0] : block_arrays(m, &layout, a.block, l, fp8);
        if (base) block_parameters(m, &a, &a.block[l], l);
    }
    Block<X, G>* last = &a.block[L];
    last->ln1.mean = layout_take<float>(&layout, N), last->ln1.rstd = layout_take<float>(&layout, N);
    last->qkv.inp = {layout_take<X>(&layout, N * C)};
    a.bytes = layout.used;
    if (!base) return a;
    norm_at(m, m->arena.count - 2, &last->ln1);
    tensor_at(m, WTE, &a.wte, &a.dwte);
    tensor_at(m, WPE, &a.wpe, &a.dwpe);
    return a;
}

// Forward.

// Block l from its input to the GELU. The first layernorm's result is already there except when the block is computed
// again.
template <typename X, typename G>
static void block_forward(const Model* m, Activations<X, G>* a, int l) {
    const Device* dev = m->dev;
    const Block<X, G>* b = &a->block[l];
    linear_forward(named(dev, "qkv"), b->qkv_out, &b->qkv, a->N);
    attention_forward(named(dev, "attention forward"), b->attproj.inp.values, b->lse, b->qkv_out, a->B, a->T,
                      m->shape.C, m->shape.NH);
    linear_forward(named(dev, "attention projection"), a->branch, &b->attproj, a->N);
    norm_forward(dev, &b->fc.inp, &b->ln2, a->N, a->residual[l], a->branch, b->residual2);
    linear_forward(named(dev, "fc + gelu"), b->pre_gelu, &b->fc, a->N, &b->fcproj.inp);
}

// Tokens (B, T) to what the head reads (B*T, C): the last layernorm's result.
template <typename X, typename G>
static void gpt2_forward(const Model* m, Activations<X, G>* a, const int* tokens) {
    const Device* dev = m->dev;
    const int L = m->shape.L;
    arena_need(&m->arena, part_embeddings(L));
    embedding_forward(named(dev, "embedding forward"), a->residual[0], tokens, a->wte, a->wpe, a->B, a->T, m->shape.C);
    spill_out(a->spill, 0, a->residual[0]);
    arena_need(&m->arena, 0, 1);
    Block<X, G>* b = a->block;
    norm_forward(dev, &b->qkv.inp, &b->ln1, a->N, a->residual[0]);
    for (int l = 0; l < L; l++, b++) {
        block_forward(m, a, l);
        linear_forward(named(dev, "fc projection"), a->branch, &b->fcproj, a->N);
        arena_need(&m->arena, l < L - 1 ? l + 1 : part_final(L), l + 2);
        spill_room(a->spill, l + 1);
        norm_forward(dev, &b[1].qkv.inp, &b[1].ln1, a->N, b->residual2, a->branch, a->residual[l + 1]);
        spill_out(a->spill, l + 1, a->residual[l + 1]);
    }
}

// Losses (N) from the last layernorm, logit_rows rows of logits at a time so that their memory is bounded. With
// `backward` the logits become their own gradient in place, from which those of its result (dbranch) and wte (dwte_sum)
// are computed at once. dloss is 1 / (rows of the whole step).
template <typename X, typename G>
static void gpt2_losses(const Model* m, Activations<X, G>* a, const int* targets, bool backward, float dloss) {
    const Device* dev = m->dev;
    arena_need(&m->arena, part_embeddings(m->shape.L));
    int L = m->shape.L, C = m->shape.C, V = m->shape.V, Vp = m->shape.Vp;
    X* lnf = a->block[L].qkv.inp.values;
    Linear<X, float> head =
        linear_head_begin(named(dev, "head"), &a->fp8, m->head_slot, lnf, a->wte, a->logits, m->dwte_sum, dloss, C, Vp);
    for (int64_t row = 0; row < a->N; row += m->logit_rows) {
        int64_t rows = a->N - row < m->logit_rows ? a->N - row : m->logit_rows;
        head.inp.values = lnf + row * C;
        linear_forward(named(dev, "head"), a->logits, &head, rows);
        classifier(named(dev, "classifier"), m->losses + row, a->logits, targets + row, dloss, backward, rows, V, Vp,
                   operand_codes(&head.dout));
        if (!backward) continue;
        if (row == 0) arena_layer_begin(&m->arena, L);
        linear_backward(named(dev, "d head"), a->dbranch + row * C, &head, rows, a->adds || row > 0);
    }
}

// Backward.

// Block l down to its first layernorm, the gradient of whose output it leaves in dbranch. dresidual is the gradient of
// the block's output at first.
template <typename X, typename G>
static void block_backward(const Model* m, Activations<X, G>* a, int l) {
    const Device* dev = m->dev;
    Block<X, G>* b = &a->block[l];
    const Operand<X>* gelu = &b->fcproj.inp;
    const int64_t N = a->N;
    const bool adds = a->adds;
    if (l < m->recomputed) {
        norm_forward(dev, &b->qkv.inp, &b->ln1, N, a->residual[l]);
        block_forward(m, a, l);
    }
    const bool lacks_codes = gelu->fp8 && gelu->made != FP8_BOTH;  // after block_forward
    if (m->recomputes_gelu || (l < m->recomputed && lacks_codes)) {
        linear_gelu_again(dev, gelu, b->pre_gelu, N, b->fc.OC);
    }
    linear_backward_gelu(named(dev, "d fc projection, gelu"), &b->fc, &b->fcproj, b->pre_gelu, a->scratch, N, adds);
    linear_backward(named(dev, "d fc"), a->dbranch, &b->fc, N, adds);
    norm_backward(dev, a->dresidual, a->dbranch, &b->ln2, b->residual2, &b->attproj, a->scratch, N, adds);
    linear_backward(named(dev, "d attention projection"), a->dbranch, &b->attproj, N, adds);
    arena_before_attention(&m->arena);
    attention_backward(named(dev, "attention backward"), a->dwide, b->qkv.dbias, a->scratch, a->dbranch, b->qkv_out,
                       b->attproj.inp.values, b->lse, a->B, a->T, m->shape.C, m->shape.NH, adds,
                       operand_codes(&b->qkv.dout));
    linear_backward(named(dev, "d qkv"), a->dbranch, &b->qkv, N, adds);
}

// Computes the gradients of all parameters from dbranch, that of the last layernorm's result. Sums over rows are fp32
// and are rounded to G once per micro-batch; with several micro-batches G is float, unless --grads bf16 asks for less
// memory.
template <typename X, typename G>
static void gpt2_backward(const Model* m, Activations<X, G>* a) {
    const Device* dev = m->dev;
    const int L = m->shape.L, C = m->shape.C;
    device_zero(dev, a->dresidual, a->N * C * (int64_t)sizeof(X));
    for (int l = L; l >= 0; l--) {
        if (l < L) block_backward(m, a, l);
        if (l > 0) arena_layer_begin(&m->arena, l - 1);
        norm_backward(dev, a->dresidual, a->dbranch, &a->block[l].ln1, a->residual[l],
                      l > 0 ? &a->block[l - 1].fcproj : nullptr, a->scratch, a->N, a->adds);
        spill_in(a->spill, l, a->residual[l]);
        arena_layer_end(&m->arena, l < L ? l : part_final(L));
    }
    embedding_backward<X, G>(named(dev, "embedding backward"), a->dwte, a->dwpe, m->dwte_sum, a->dresidual,
                             m->input.order, m->input.bucket, m->input.buckets, a->B, a->T, C, m->shape.Vp, a->adds);
    arena_layer_end(&m->arena, part_embeddings(L));
}

// One micro-batch: the mean loss times `share` is added to scalars[0] (set when `first`) and, with `train`, the
// gradients of loss * share to m->arena.grads. The first one of a step overwrites these, and so does each one if it is
// reduced across ranks at once. m->input has the tokens.
template <typename X, typename G>
static void gpt2_micro_batch(const Model* m, int B, bool train, bool first, float share) {
    Activations<X, G> a = activations_of<X, G>(m, m->activations, train);
    a.B = B, a.N = (int64_t)B * a.T, a.adds = !first && !shard_splits(m->arena.shard, SHARD_GRADS);
    gpt2_forward(m, &a, m->input.tokens);
    gpt2_losses(m, &a, m->input.targets, train, share / (float)a.N);
    loss_mean(m->dev, m->scalars, m->losses, a.N, !first, share / (float)a.N);
    if (train) gpt2_backward(m, &a);
}

static void micro_batch(const Model* m, int B, bool train, bool first, float share) {
    if (m->arena.type == OPTIM_FP32) return gpt2_micro_batch<float, float>(m, B, train, first, share);
    if (m->arena.grads_bf16) return gpt2_micro_batch<bf16, bf16>(m, B, train, first, share);
    gpt2_micro_batch<bf16, float>(m, B, train, first, share);
}

// Scores a batch that evaluation_fill has made: the loss (-ln p) at each place, and whether its token is the likeliest.
// The logits are fp32, in training's memory, so fewer rows fit if X is bf16.
template <typename X>
static void gpt2_score(const Model* m, EvaluationPass* pass, const EvaluationBatch* batch) {
    Activations<X, float> a = activations_of<X, float>(m, m->activations, false);
    const Batch* input = &m->input;
    const int64_t rows = m->logit_rows * (int64_t)sizeof(X) / (int64_t)sizeof(float);
    const ScoreRoom<X> room = {rows > 1 ? rows : 1, a.branch,      (float*)a.logits, input->order,
                               input->targets,      input->bucket, m->losses};
    a.B = batch->B, a.T = batch->T, a.N = (int64_t)a.B * a.T;
    copy_to_device(m->dev, input->tokens, pass->tokens, a.N * (int64_t)sizeof(int));
    gpt2_forward(m, &a, input->tokens);
    arena_need(&m->arena, part_embeddings(m->shape.L));
    score_places<X>(m->dev, pass->losses, pass->likeliest, a.block[m->shape.L].qkv.inp.values, a.wte, pass->places,
                    pass->targets, pass->count, &room, m->shape.C, m->shape.V, m->shape.Vp);
}

// Memory.

static DecodeShape decode_shape(const Model* m) {
    return {m->shape.L, m->shape.C, m->shape.NH, m->shape.V, m->shape.Vp, m->T};
}

// Bytes for passes forward and, with `backward`, for training and for sampling one text (see sample).
static int64_t activations_bytes(const Model* m, bool backward) {
    const DecodeShape shape = decode_shape(m);
    const bool fp32 = m->arena.type == OPTIM_FP32;
    int64_t bytes = backward ? m->arena.dequant_bytes + decode_bytes(&shape, fp32, 1) : 0;
    for (bool train : {false, backward}) {
        bytes = std::max(bytes, fp32 ? activations_of<float, float>(m, nullptr, train).bytes
                                     : activations_of<bf16, float>(m, nullptr, train).bytes);
    }
    return bytes;
}

// Allocates the model's memory; without a `config` for forward passes alone. Counts it in m->arena.memory.
static void model_allocate(Model* m, const OptimConfig* config) {
    const Device* dev = m->dev;
    const int64_t N = (int64_t)m->B * m->T, C = m->shape.C, number = sizeof(float);
    MemoryPlan* memory = &m->arena.memory;
    arena_open(&m->arena, config);
    if (config) m->dwte_sum = (float*)arena_at(&m->arena, m->arena.grads, WTE, number);
    if (m->arena.grads_bf16) m->dwte_sum = (float*)device_alloc(dev, m->shape.Vp * C * number, &memory->grads);
    m->activations = device_alloc(dev, activations_bytes(m, config != nullptr), &memory->activations);
    m->input = batch_at((int*)device_alloc(dev, input_bytes(N), &memory->other), N);
    m->losses = (float*)device_alloc(dev, N * number, &memory->other);
    m->scalars = (float*)device_alloc(dev, SCALARS * number, &memory->other);
    device_zero(dev, m->scalars, SCALARS * number);
    const int64_t residual = N * C * (m->arena.type == OPTIM_FP32 ? 4 : 2);
    if (config && m->spills) spill_open(&m->spill, dev, m->shape.L, residual, &memory->host);
}

static void model_free(Model* m) {
    void* const memory[] = {m->activations, m->input.tokens, m->losses, m->scalars};
    for (void* block : memory) device_free(m->dev, block);
    if (m->arena.grads_bf16) device_free(m->dev, m->dwte_sum);
    free(m->stored);
    spill_close(&m->spill);
    arena_close(&m->arena);
}

// Runs a micro-batch before any memory has values: it loads kernels, and matmul_choose times its algorithms in the
// memory of training. With fp8 there are two kinds of step, with an amax history and, as the first one is, without.
static void warm_up_and_autotune(Model* m, Device* dev) {
    if (!dev->gpu) return;
    dev->warms_up = true;
    input_blank(dev, &m->input);
    for (int way = m->uses_fp8 ? 0 : 1; way < 2; way++) {
        m->fp8.use_current_scaling = way == 1;
        shard_micro_batch(m->arena.shard, true, true);
        micro_batch(m, m->B, true, true, 1.0f);
    }
    if (m->arena.shard) device_after_comm(&m->arena.shard->comm);
    dev->warms_up = false;
    device_zero(dev, m->arena.grads, arena_grads_bytes(&m->arena));
}

// Reads the weights of a folder into the model or, if that is "", draws them; they are equal on every device.
static void model_init(Model* m, uint64_t seed, const char* folder = "") {
    Safetensors files = {};
    require(!*folder || model_folder_open(&files, folder, m->stored, m->arena.count, m->error), m->error);
    float* values = (float*)memory_take((size_t)m->largest * sizeof(float));
    for (int t = 0; t < m->arena.count; t++) {
        const ModelTensor* tensor = &m->stored[t];
        require(!*folder || model_folder_read(&files, tensor, values, m->error), m->error);
        if (*folder) arena_set(&m->arena, t, values);
        if (!*folder) arena_draw(&m->arena, t, tensor->stored_rows, seed, tensor->mean, tensor->deviation, values);
    }
    free(values);
    safetensors_close(&files);
    arena_loaded(&m->arena, 0.0f);
}

// Update and steps.

// One optimizer step: the gradients of `micro_batches` and the update. It queues all work without waiting for the
// device; the caller reads the scalars. `step` counts from 1. feeder->error, or SCALAR_BAD from another rank, reports
// bad data; the loss is then NaN and the step changes nothing.
static void train_step(Model* m, Feeder* feeder, int64_t micro_batches, float lr, float clip, int64_t step) {
    arena_begin(&m->arena, m->scalars, clip, lr, step);
    for (int64_t i = 0; i < micro_batches; i++) {
        shard_micro_batch(m->arena.shard, i == 0, i == micro_batches - 1);
        named(m->dev, "data");
        const bool bad = !feeder_next(feeder, &m->input);
        if (bad) input_blank(m->dev, &m->input);
        if (bad && m->arena.shard) m->arena.shard->flags[SCALAR_BAD - SCALAR_STOP] = 1;
        micro_batch(m, m->B, true, i == 0, bad ? NAN : 1.0f / (float)(micro_batches * m->launch->world));
    }
    arena_step(&m->arena);
}

// Returns the signal that asks to stop, or 0. Several ranks agree on it, all at once, at asks_to_stop().
static int stops(const Model* m) {
    return m->arena.shard ? m->arena.shard->stop : signal_stop;
}
static bool asks_to_stop(const Model* m) {
    double stop = stops(m) ? stops(m) : signal_stop;
    launch_all_reduce(m->launch, &stop, 1, LAUNCH_MAX);
    if (m->arena.shard) m->arena.shard->stop = (int)stop;
    return stop > 0;
}

// Returns the mean loss over the first windows of the validation data, at most `tokens` tokens, or NaN if a signal
// stops it. Ranks take turns at batches, as many each; rows beyond the last window do not count.
static double validate(Model* m, const Dataset* data, int64_t tokens) {
    int64_t windows = dataset_windows_of(data, m->T, tokens), before = (int64_t)m->launch->rank * m->B;
    LoaderSlice slice = {m->B, (int64_t)m->launch->world * m->B};
    Feeder feeder;
    feeder_open(&feeder, m->dev, data, m->B, m->T, 0, false, before, slice);
    for (int64_t done = 0; done < windows && !asks_to_stop(m); done += slice.stride) {
        const int B = (int)std::clamp<int64_t>(windows - done - before, 0, m->B);  // of the last batch only the first
        if (!feeder_next(&feeder, &m->input)) user_error("validation data: %s", feeder.error);
        micro_batch(m, B > 0 ? B : 1, false, done == 0, (float)B / (float)windows);
    }
    float loss;
    copy_to_host(m->dev, &loss, m->scalars, sizeof(float));
    double sum = loss;  // of the ranks
    if (!stops(m)) launch_all_reduce(m->launch, &sum, 1, LAUNCH_SUM);
    feeder_close(&feeder);
    return stops(m) ? NAN : (float)sum;
}

// Samples and evaluations: the trainer's part of kernels/decode.cuh, data/sampling.h and data/evaluation.h.

static void sample_need(void* samples, int part) {
    arena_need(&((const Model*)((Samples*)samples)->model)->arena, part);
}

// Rank 0 decides when texts end; the other ranks compute the same and receive its tokens.
static bool sample_next(void* context, int* tokens, int count) {
    Samples* samples = (Samples*)context;
    const Model* m = (const Model*)samples->model;
    samples_next(samples, tokens, count, DECODE_END);
    launch_broadcast(m->launch, tokens, count * (int64_t)sizeof(int));
    return !asks_to_stop(m);
}

// Continues each prompt of the folder by up to --sample-tokens tokens, which go to `to` or, if that is null, to the
// run's logs. In a run the decoder uses the activations' memory. Returns false if the model's output is not finite. All
// ranks call it.
static bool sample(const Model* m, RunFolder* folder, FILE* to) {
    const Options* o = folder->options;
    const Prompts* prompts = &folder->prompts;
    Samples samples = {};
    samples.run = folder, samples.to = to, samples.model = m;
    const DecodeShape shape = decode_shape(m);
    const bool fp32 = m->arena.type == OPTIM_FP32, run = m->arena.optim != nullptr;
    const int64_t dequant_bytes = m->arena.dequant_bytes,
                  room = run ? m->arena.memory.activations - dequant_bytes : memory_available(m->dev) / 2;
    const void** tensors = (const void**)memory_take(m->arena.count * sizeof(void*));
    arena_dequant_buffer(&m->arena, m->activations);
    for (int t = 0; t < m->arena.count; t++) tensors[t] = arena_at(&m->arena, m->arena.weights, t, fp32 ? 4 : 2);
    const DrawOptions draw = {o->temperature, o->top_k, (uint64_t)o->seed};
    const DecodeCalls calls = {&samples, m->arena.decoded || m->arena.shard ? sample_need : nullptr, sample_next,
                               samples_done};
    const DecodePrompts texts = {prompts->tokens, prompts->length, prompts->count, (int)o->samples, o->sample_tokens};
    const bool finite = decode_run(m->dev, &shape, fp32, tensors, &texts, &draw, &calls,
                                   run ? (char*)m->activations + dequant_bytes : nullptr, room);
    free(tensors);
    return finite;
}

constexpr int64_t EVALUATION_TOKENS = 16384;  // of a batch at most, whatever --batch is

// Scores one task of --eval and reports its figures. Ranks take batches in turn, as many each, and add their scores;
// all call it. Returns false, and reports nothing, if a signal stops them.
static bool evaluate_task(Model* m, const char* name, RunFolder* folder, FILE* out) {
    const int rank = m->launch->rank, world = m->launch->world;
    const int64_t room = (int64_t)m->B * m->T, tokens = room < EVALUATION_TOKENS ? room : EVALUATION_TOKENS;
    const auto score = m->arena.type == OPTIM_FP32 ? gpt2_score<float> : gpt2_score<bf16>;
    const double began = seconds_now();
    double told = began;
    Evaluation task;
    EvaluationPass pass;
    require(evaluation_open(&task, name, folder->tokenizer, m->error), m->error);
    require(evaluation_begin(&pass, &task, m->T, tokens, m->error), m->error);
    bool stopped = false;
    for (int i = 0; i < pass.batches && !stopped; i += world) {
        const int own = i + rank, last = pass.batches - 1;
        score(m, &pass, evaluation_fill(&pass, own < last ? own : last));
        if (own <= last) evaluation_take(&pass);
        stopped = asks_to_stop(m);
        if (rank > 0 || seconds_now() < told + 5) continue;
        fprintf(stderr, "eval     %s  %d of %d batches\n", task.name, i + world, pass.batches);
        told = seconds_now();
    }
    launch_all_reduce(m->launch, &pass.scores->sum, 2 * task.rows, LAUNCH_SUM);
    const bool reports = rank == 0 && !stopped;
    require(!reports || report_evaluation(folder, &pass, out, seconds_now() - began), folder->error);
    evaluation_end(&pass);
    evaluation_close(&task);
    return !stopped;
}

// Scores the tasks of --eval, which evaluation_check has seen. All ranks call it.
static void evaluate(Model* m, RunFolder* folder) {
    const Options* o = folder->options;
    if (*folder->path) signals_doing("this batch of the evaluation");
    FILE* out = nullptr;
    require(m->launch->rank > 0 || evaluation_out(&out, o->eval_out, m->error), m->error);
    bool goes_on = true;
    for (const char *names = o->eval, *name; goes_on && (name = text_word(&names, ','));) {
        goes_on = evaluate_task(m, name, folder, out);
    }
    if (out) fclose(out);
}

// Checkpoints: data/checkpoint.h writes and verifies them; this part supplies the arrays and reads them back.

// A run and what it consists of, from the choice of its options to its end.
struct Run {
    Options* options;
    Options asked;  // as typed or resumed, before resolve()
    Device dev;
    Shard shard;
    Model* model;
    OptimConfig config;
    RunFolder folder;
    StepReport step;         // the last one
    float scalars[SCALARS];  // of the last step
    double last_val;         // loss of the last validation; 0 before the first
    int64_t saved_at;        // the step of the last checkpoint; -1: there is none
};

// The amax history that fp8 scales come from: an array of a checkpoint beside the optimizer's.
static OptimStream amax_history_of(const Model* m) {
    return {"fp8.magnitudes", "F32", m->fp8.amax_history, (int64_t)m->fp8.slots * FP8_HISTORY, 4, false};
}

// Reads weights and states of a checkpoint, in any formats. Without an amax history of fp8 the first step begins one.
static void checkpoint_read(Run* run) {
    Model* m = run->model;
    const char* folder = run->folder.checkpoint;
    CheckpointReader reader;
    require(checkpoint_open(&reader, folder, m->stored, m->arena.count, m->error), m->error);
    const OptimStream history = amax_history_of(m);
    OptimStored stored = {run->config,           reader.optimizer.count, checkpoint_array,
                          checkpoint_array_read, checkpoint_weights,     &reader};
    const Json* formats = json_get(run->folder.resumed, "formats");
    const bool loaded = optim_saved_load(m->arena.optim, &stored, formats, &history, m->error);
    require(!*reader.error, reader.error);
    if (stored.notices) run_say(&run->folder, "%s", stored.notices);
    if (!loaded) user_error("%s/%s", folder, m->error);
    if (m->uses_fp8) fp8_resume(m->dev, &m->fp8, m->head_slot, m->head_fp8);
    checkpoint_close(&reader);
    arena_loaded(&m->arena, (float)run->folder.state.last_norm);
}

// Writes a checkpoint's tensors and, with --save all, the optimizer's arrays. All ranks that keep parts call it, and
// send rank 0, which writes, what it lacks.
static bool checkpoint_write_arrays(Run* run, CheckpointWriter* writer) {
    constexpr int64_t PIECE = 64 << 20;  // bytes of an array that pass through host memory at a time
    const Model* m = run->model;
    const Arena* a = &m->arena;
    RunFolder* folder = &run->folder;
    const OptimStream history = amax_history_of(m);
    OptimSaved* saved = optim_saved_open(a->optim, a->shard, m->uses_fp8 ? &history : nullptr);
    const bool states = strcmp(run->options->save, "all") == 0;
    SafetensorsTensor arrays[OPTIM_STREAMS + 1] = {};
    for (int i = 0; i < saved->arrays; i++) {
        const OptimStream& array = saved->array[i];
        const int64_t cols = array.name == history.name ? FP8_HISTORY : 1, bytes = array.elements * array.element_bytes;
        arrays[i] = {array.name, array.dtype, {array.elements / cols, cols}, cols > 1 ? 2 : 1, 0, bytes, 0};
    }
    for (int t = 0; t < a->count; t++) m->stored[t].dtype = optim_saved_dtype(a->optim, t);
    void* values = memory_take(std::max(PIECE, m->largest * (int64_t)sizeof(float)));
    bool ok = m->launch->rank > 0 ||
              checkpoint_begin(writer, folder->path, folder->state.step, m->stored, a->count, folder->error);
    for (int t = 0; t < a->count && ok; t++) {
        optim_saved_weights(saved, t, values);
        ok = checkpoint_tensor(writer, &m->stored[t], values);
    }
    ok = ok && (!states || checkpoint_begin_arrays(writer, arrays, saved->arrays));
    for (int i = 0; i < saved->arrays && states; i++) {
        for (int64_t at = 0; at < arrays[i].bytes && ok; at += PIECE) {
            const int64_t piece = std::min(arrays[i].bytes - at, PIECE);
            optim_saved_read(saved, i, at, piece, values);
            ok = checkpoint_bytes(writer, &arrays[i], at, piece, values);
        }
    }
    free(values);
    optim_saved_close(saved);
    return ok;
}

// Writes a checkpoint; `begin` is when the save began; with `prune` it removes older ones. All ranks call it. False
// with a sentence in run->folder.error.
static bool checkpoint_write(Run* run, double begin, bool prune) {
    const Model* m = run->model;
    RunFolder* folder = &run->folder;
    char* formats = optim_saved_formats(&run->config);
    const int end = folder->tokenizer ? tokenizer_end(folder->tokenizer) : -1;
    const CheckpointFacts facts = {&folder->state, run->options, &run->asked, formats, m->shape, folder->config, end};
    CheckpointWriter writer = {};
    const bool sends = m->launch->rank == 0 || shard_splits(m->arena.shard, SHARD_STATES);
    bool ok = !sends || checkpoint_write_arrays(run, &writer);
    ok = report_save(folder, &writer, ok && checkpoint_end(&writer, &facts), begin, prune);
    free(formats);
    return ok;
}

// Saves a checkpoint, unless --save is none; with `prune`, removes older ones beyond --keep. All ranks call it.
static void checkpoint_save(Run* run, bool prune = true) {
    if (strcmp(run->options->save, "none") == 0) return;
    const double begin = seconds_now();
    const Arena* a = &run->model->arena;
    signals_doing("this save");
    if (a->shard && !optim_saved_equal(a->optim, a->shard, a->weights, a->elements)) {
        user_error(
            "step %lld: the weights of the ranks differ, which no rounding explains: a GPU or its memory is faulty; go "
            "on elsewhere with --resume %s",
            (long long)run->folder.state.step, run_resume_words(&run->folder));
    }
    run->folder.state.last_norm = arena_settle(a);
    require(checkpoint_write(run, begin, prune), run->folder.error);
    launch_any(run->model->launch, false);  // rank 0 has written it: a rank that fails from here on may end the others
}

// Resolving: resolve() replaces `auto` options by values, each of which depends only on those before it, and refuses
// combinations that cannot work.

// Chooses precision, shape and sequence length, and lists the tensors. The shape comes from `folder`, a model's or, if
// `resumed`, a checkpoint, or if that is "" from the model's name. `vocabulary` is the data's; 0: no data.
static void resolve_model(Options* o, Model* m, int vocabulary, bool bytes, const char* folder, bool resumed) {
    const bool gpu = m->dev->gpu;
    require(products_choose(o, gpu ? m->dev->name : nullptr, m->dev->compute, m->error), m->error);
    m->arena.type = gpu && strcmp(o->matmul, "fp32") != 0 ? OPTIM_BF16 : OPTIM_FP32;
    m->uses_fp8 = strcmp(o->matmul, "fp8") == 0, m->head_fp8 = m->uses_fp8 && strcmp(o->head, "fp8") == 0;
    m->recomputes_gelu = strcmp(o->recompute, "gelu") == 0;
    require(gpt2_shape_choose(o, folder, resumed, vocabulary, bytes, gpu, &m->shape, m->error), m->error);
    m->T = (int)o->seq;
    m->recomputed = strcmp(o->recompute, "block") != 0 ? 0 : (int)std::max(o->layers - o->kept_blocks, 0ll);
    shape_tensors(m);
}

// Chooses how the optimizer keeps the tensors, and which part of them is this rank's. False with a sentence in
// m->error.
[[nodiscard]] static bool resolve_optim(Options* o, Model* m, OptimConfig* config) {
    if (!optim_config_from(o, config, m->error)) return false;
    m->arena.elements = optim_layout(m->arena.tensors, m->arena.count, config);
    m->arena.grads_bf16 = strcmp(o->grads, "bf16") == 0;
    arena_spread(&m->arena, config);
    config->offload = strstr(o->offload, "states") != nullptr;
    if (strstr(config->weights, "@given") || strstr(config->overrides, "@given"))
        return data_error(m->error,
                          "--weights: a library's caller gives such a scale; type --weights e4m3/tensor+fp32");
    m->arena.clip_by = clip_by_from(o->clip_by);
    m->spills = strstr(o->offload, "residuals") != nullptr;
    return options_needed(o, m->error);
}

// Plans the memory of a model, before it is allocated: model_allocate counts it on an imagined device. `batch`:
// sequences of a micro-batch, for which `o` has the options as they were asked for; 0: its own. `block`: for
// --recompute block alone.
static MemoryPlan memory_plan(const Model* model, const OptimConfig* config, const Options* o = nullptr,
                              int64_t batch = 0, bool block = false) {
    Model m = *model;
    Device dev = *model->dev;
    dev.imagined = true, m.dev = m.arena.dev = &dev;
    m.arena.fp8 = m.uses_fp8 ? &m.fp8 : nullptr;
    Shard shard;
    if (m.arena.shard) shard = *m.arena.shard, m.arena.shard = &shard;
    const bool several = batch > 0 && batch < m.B;  // micro-batches, where a step has one now
    if (several && strcmp(o->grads, "auto") == 0) m.arena.grads_bf16 = false;
    if (several) m.arena.releases = false;
    if (block) m.recomputes_gelu = false, m.recomputed = m.shape.L - 1;
    if (batch > 0) m.B = (int)batch, m.logit_rows = default_logit_rows(o, batch * m.T, dev.gpu);
    model_allocate(&m, config);
    arena_close(&m.arena);
    MemoryPlan plan = m.arena.memory;
    plan.available = memory_available(model->dev);
    if (dev.gpu) {  // what this process holds already is in the plan, and available to it
        const int64_t held = dev.context + (m.arena.shard ? m.arena.shard->comm.bytes : 0);
        plan.other += WORKSPACE_BYTES, plan.taken = held + MODULE_BYTES, plan.available += WORKSPACE_BYTES + held;
    }
    plan.total = plan.weights + plan.states + plan.grads + plan.activations + plan.other + plan.taken;
    if (!dev.gpu) plan.total += plan.host;  // it is all one memory
    return plan;
}

// Returns the largest batch up to `max` whose plan fits into `available` bytes; 0: none.
static int64_t largest_batch(const Model* m, const OptimConfig* config, const Options* o, int64_t max,
                             int64_t available) {
    int64_t fits = 0;
    while (fits < max) {
        const int64_t batch = (fits + max + 1) / 2;
        if (memory_plan(m, config, o, batch).total <= available) fits = batch;
        if (fits < batch) max = batch - 1;
    }
    return fits;
}

// Chooses the sizes of a micro-batch and of a step, for a data set of so many windows, and the gradients' type.
static void resolve_batch(Options* o, Model* m, OptimConfig* config, bool bytes, int64_t windows) {
    int64_t max = std::min<int64_t>(!m->dev->gpu ? 8 : bytes ? 32 : 64, windows);
    // The size of the memory counts, not what is free now, so that the same command always chooses the same batch. A
    // GiB is left for the context and the kernels, in place of what the plan counts for them.
    int64_t usable = m->dev->gpu ? m->dev->memory - (1ll << 30) + m->dev->context + MODULE_BYTES : INT64_MAX;
    const int64_t usual = bytes || !m->dev->gpu ? 0 : default_tokens_per_step(o, windows * o->seq);
    const int64_t share = usual / o->seq / m->launch->world;  // sequences of a step that a rank gets
    if (usual && o->tokens_per_step == OPTION_AUTO && share < max) max = share > 0 ? share : 1;
    int64_t fits = o->batch == OPTION_AUTO ? largest_batch(m, config, o, max, usable) : 0;
    fits = shard_min(m->arena.shard, fits);
    require(batch_choose(o, m->launch->world, fits, usual, m->dev->gpu, m->error), m->error);
    m->B = (int)o->batch, m->logit_rows = o->logit_rows;
    config->grads = o->grads, m->arena.grads_bf16 = strcmp(o->grads, "bf16") == 0;
}

// Decides if each layer is updated inside the backward pass, so that layers take turns at the gradients' memory
// (--release). `auto` does so if the plan does not fit otherwise and no bits change. All ranks decide the same.
static void resolve_release(Options* o, Model* m, OptimConfig* config) {
    const bool on = strcmp(o->release, "on") == 0, off = strcmp(o->release, "off") == 0;
    const int64_t tokens = o->tokens_per_step, micro = o->batch * o->seq * m->launch->world;
    require(arena_may_part(&m->arena, config, m->error), m->error);
    const bool may = arena_may_release(&m->arena, config, o->clip, tokens, micro, m->error);
    if (on && !may) user_error("--release on: %s", m->error);
    const MemoryPlan plan = off || !may ? MemoryPlan{} : memory_plan(m, config);
    const bool fits = plan.total <= plan.available;
    m->arena.releases = on || shard_min(m->arena.shard, fits) == 0;
    o->release = m->arena.releases ? "on" : "off";
}

static void resolve(Run* run) {
    Options* o = run->options;
    Model* m = run->model;
    OptimConfig* config = &run->config;
    int vocabulary;
    bool bytes;
    require(dataset_look(o, &vocabulary, &bytes, m->error), m->error);
    resolve_model(o, m, vocabulary, bytes, run->folder.weights, run->folder.resumed);
    require(dataset_open_both(&run->folder.train_data, &run->folder.val_data, o, m->T, m->error), m->error);
    const int64_t windows = dataset_windows(&run->folder.train_data, m->T);
    run->folder.parameters = m->parameters;
    require(resolve_optim(o, m, config), m->error);
    resolve_batch(o, m, config, bytes, windows);
    resolve_release(o, m, config);
    require(defaults_choose(o, optim_usual_rate(o->rule), !gpt2_named(o->model), m->dev->gpu, windows, m->error),
            m->error);
    require(dataset_count_bytes(&run->folder.val_data, m->T, o->val_tokens, m->error), m->error);
    optim_set_options(config, &o->of_rule), config->lr_max = (float)o->lr;
}

// Returns NULL if the run's plan fits; otherwise a sentence that says what to type.
static const char* plan_lacks(const Run* run, const MemoryPlan* plan) {
    const Model* m = run->model;
    const Options *o = run->options, *asked = &run->asked;
    if (plan->total <= plan->available) return nullptr;
    int64_t fits = largest_batch(m, &run->config, asked, o->batch, plan->available);
    while (fits > 0 && o->tokens_per_step / o->seq / m->launch->world % fits != 0) fits--;
    const bool less = memory_plan(m, &run->config, asked, fits > 0 ? 0 : 1, true).total <= plan->available;
    return report_lack(o, plan, m->dev->name, fits, less);
}

// --fit (data/fit.h).

// Plans a row; false if its options exclude each other. `error` has the sentence about the first such row.
static bool fit_plan(Fit* fit, const Device* card, char* error) {
    FitRow* row = &fit->row;
    Options* o = &row->o;
    OptimConfig config;
    Model m = {};
    m.dev = card;
    resolve_model(o, &m, fit->vocabulary, fit->bytes, fit->folder, false);
    const bool releases = m.arena.releases = strcmp(o->release, "on") == 0;
    if (!resolve_optim(o, &m, &config) || !arena_may_part(&m.arena, &config, m.error) ||
        (releases && !arena_may_release(&m.arena, &config, o->clip, 1, 1, m.error))) {
        if (!*error) data_error(error, "%s", m.error);
        return false;
    }
    row->batch = largest_batch(&m, &config, o, 512, card->memory);
    row->plan = memory_plan(&m, &config, o, row->batch > 0 ? row->batch : 1);
    row->parameters = m.parameters;
    return true;
}

static int fit_main(const Options* asked) {
    char error[DATA_ERROR_BYTES] = "";
    static Fit fit;
    Device card;
    require(fit_open(&fit, asked, error), error);
    for (int i = 0; optim_preset(i); i++) fit.presets[i] = optim_preset(i);
    device_imagine(&card, asked->fit);
    while (fit_next(&fit)) fit.row.planned = fit_plan(&fit, &card, error);
    if (!fit_print(&fit)) user_error("--fit lists nothing: %s", error);
    return require_stdout();
}

// Resuming.

// Merges the optimizer's options with the state of a checkpoint. Returns --override as the user asked for it.
static const char* resume_optim(RunFolder* folder) {
    Options* o = folder->options;
    const Json *options = json_get(folder->resumed, "options"), *formats = json_get(folder->resumed, "formats");
    OptimResume r = {};
    r.config = optim_config_of(o), r.lr = o->lr, r.options = options, r.formats = formats, r.changed = folder->changed;
    r.v_typed = option_given(o, "v"), r.lr_typed = option_given(o, "lr"),
    r.overrides_typed = option_given(o, "override");
    r.asked = "";
    optim_resume(&r, DEFAULT_DECAY);
    o->preset = r.config.preset, o->v = r.config.v, o->lr = r.lr, o->overrides = r.config.overrides,
    folder->changed = r.changed;
    // beta3 and ramp were chosen for the old rule; `auto` chooses them for the new one.
    if (r.other_rule && !option_given(o, "beta3")) o->of_rule.beta3 = OPTION_AUTO;
    if (r.other_rule && !option_given(o, "ramp")) o->of_rule.ramp = OPTION_AUTO;
    return r.asked;
}

// Chooses the checkpoint to go on from, if any, on rank 0, and merges its options with the typed ones.
static void resume(Run* run) {
    RunFolder* folder = &run->folder;
    const Launch* launch = run->model->launch;
    require(launch->rank > 0 || resume_find(folder, folder->error), folder->error);
    launch_broadcast(launch, folder->checkpoint, sizeof(folder->checkpoint));
    require(resume_take(folder, folder->error), folder->error);
    const char* overrides = folder->resumed ? resume_optim(folder) : run->options->overrides;
    run->asked = *run->options, run->asked.overrides = overrides;
}

// The step loop.

static void run_validation(Run* run) {
    signals_doing("this batch of the validation");
    double begin = seconds_now(), loss = validate(run->model, &run->folder.val_data, run->options->val_tokens);
    if (stops(run->model)) return;
    run->last_val = loss;
    require(report_validation(&run->folder, loss, seconds_now() - begin), run->folder.error);
}

static void run_sample(Run* run) {
    signals_doing("this token of the sample");
    RunFolder* folder = &run->folder;
    folder->error[0] = 0;
    if (!sample(run->model, folder, nullptr)) run_say(folder, "sample   none: the model's output is not finite\n");
    require(!folder->error[0], folder->error);
}

// True if the weights at the end of a run are useless: no step changed them, or their loss is not finite. The loss is
// the last validation's; without validations, that of one window if the last step was skipped. All ranks call it.
static bool ends_useless(const Run* run) {
    Model* m = run->model;
    const RunState* state = &run->folder.state;
    if (stops(m) || (run->options->val_every == 0 && state->skipped_last == 0)) return false;
    if (state->skipped > 0 && state->skipped == state->step) return true;
    const double loss = run->options->val_every > 0 ? run->last_val : validate(m, &run->folder.val_data, m->T);
    return !isfinite(loss) && !stops(m);
}

// Takes a step, and counts, logs and prints it. Other ranks learn what this one is asked for.
static void run_step(Run* run, Feeder* feeder, int64_t micro_batches) {
    const Options* o = run->options;
    const RunState* state = &run->folder.state;
    StepReport* step = &run->step;
    Model* m = run->model;
    Shard* shard = m->arena.shard;
    float* scalars = run->scalars;
    const double begin = seconds_now();
    const int64_t number = state->step + 1 - state->skipped;  // what moments and their bias corrections count
    signals_doing("this step");
    if (shard) shard->flags[0] = signal_stop, shard->flags[1] = run_folder_asks_save(&run->folder);
    step->lr = learning_rate(o, &state->rise, state->step);
    train_step(m, feeder, micro_batches, (float)step->lr, (float)o->clip, number);
    copy_to_host(m->dev, scalars, m->scalars, SCALARS * sizeof(float));
    shard_agreed(shard, scalars, (seconds_now() - begin) / (double)micro_batches);
    if (feeder->error[0] || scalars[SCALAR_BAD] > 0) {
        if (run->saved_at < state->step) checkpoint_save(run);
        // The rank that found the bad data ends all ranks with its message; the others wait here for that.
        if (!feeder->error[0]) launch_any(m->launch, false);
        user_error("--data: %s; the last checkpoint is %s", feeder->error, run_last_checkpoint(&run->folder));
    }
    step->loss = scalars[SCALAR_LOSS], step->norm = scalars[SCALAR_NORM];
    step->skipped = !isfinite(scalars[SCALAR_FACTOR]);
    step->parts_left = m->arena.by_parts ? scalars[SCALAR_LEFT] : 0;
    step->saturated = m->uses_fp8 ? scalars[SCALAR_SATURATED] : -1;
    step->used = state->step == step->timer.first + 1 ? memory_used(m->dev) : 0;
    require(report_step_done(&run->folder, step, begin), run->folder.error);
}

// True after each `every`-th step and after the last one; 0: never.
static bool is_due(const Run* run, int64_t every) {
    const int64_t step = run->folder.state.step;
    return every > 0 && (step % every == 0 || step == run->options->steps);
}

// Trains from the step where the run stands to the end, or until a signal comes.
static void train(Run* run) {
    const Options* o = run->options;
    Model* m = run->model;
    const RunState* state = &run->folder.state;
    int64_t sequences = o->tokens_per_step / o->seq;
    LoaderSlice slice = {sequences / m->launch->world, sequences};
    const int64_t micro_batches = slice.run / m->B;
    Feeder feeder;
    feeder_open(&feeder, m->dev, &run->folder.train_data, m->B, m->T, (uint64_t)o->seed, true,
                state->sequences + m->launch->rank * slice.run, slice);
    run->saved_at = run->folder.last_checkpoint[0] ? state->step : -1;
    bool due = false, useless = false;  // a checkpoint; the weights at the end
    if (state->step == 0 && o->val_every > 0) run_validation(run);
    StepTimer* timer = &run->step.timer;
    *timer = {state->step, state->step, seconds_now(), 0};
    while (state->step < o->steps && !stops(m)) {
        if (o->profile && !profile_step(&run->dev, state->step - timer->first)) break;
        run_step(run, &feeder, micro_batches);
        if (is_due(run, o->val_every)) run_validation(run);
        const bool asked = m->arena.shard ? run->scalars[SCALAR_SAVE] > 0 : run_folder_asks_save(&run->folder);
        const bool last = state->step == o->steps, best = o->keep == OPTION_AUTO && state->best_step == state->step;
        due = due || is_due(run, o->save_every);
        // While steps are skipped the weights may be useless, so they must not displace a good checkpoint.
        if (!o->profile && (asked || last || best || stops(m) || (due && state->skipped_last == 0))) {
            due = false;
            useless = last && ends_useless(run);
            checkpoint_save(run, state->skipped_last == 0 && !useless);
            run->saved_at = state->step;
        }
        if (is_due(run, o->eval_every) && !stops(m)) evaluate(m, &run->folder);
        if (is_due(run, o->sample_every) && !stops(m)) run_sample(run);
    }
    // A signal came before the first step, or while sampling.
    if (run->saved_at != state->step && !o->profile) checkpoint_save(run);
    require(report_end(&run->folder, stops(m), (double)(state->step - timer->from), timer->seconds, useless),
            run->folder.error);
    signals_doing(nullptr);
    feeder_close(&feeder);
}

// Main: a run from its options to its end, or samples or scores of a model.

// Instead of training, with --model DIR: with `samples` it continues the prompts of --sample, on rank 0 alone;
// otherwise it scores the tasks of --eval, in batches of up to EVALUATION_TOKENS tokens.
static int forward_main(Options* o, const Launch* launch, bool samples) {
    if (*o->sample && *o->prompt_file) user_error("--sample and --prompt-file both give prompts; type --sample ''");
    const int64_t tokens = samples ? 1 : EVALUATION_TOKENS;
    static RunFolder folder;  // has options, tokenizer and prompts alone: there is no folder
    Device dev;
    Model m = {};
    const char* path = checkpoint_model(&o->model, true, m.error);
    require(path != nullptr, m.error);
    m.dev = &dev, m.launch = samples ? &LAUNCH_ALONE : launch;
    device_choose(&dev, o->device, m.launch, o->gpus);
    resolve_model(o, &m, 0, false, path, false);
    m.B = tokens > m.T ? (int)(tokens / m.T) : 1;
    m.logit_rows = samples ? 1 : 1024;
    folder.options = o, folder.tokenizer = tokenizer_open_for(path, m.shape.V, m.error);
    if (!folder.tokenizer) user_error("--model %s: %s", o->model, m.error);
    model_allocate(&m, nullptr);
    model_init(&m, 0, path);
    if (samples) {
        require(prompts_open(&folder.prompts, o->sample, o->prompt_file, folder.tokenizer, m.shape.V, m.error),
                m.error);
        if (!sample(&m, &folder, stdout)) {
            user_error("--model %s: its output is not finite, so there is no sample; name another one", o->model);
        }
        require_stdout();
    } else {
        // All tasks are checked before the first is scored.
        require(evaluation_check(o->eval, folder.tokenizer, m.shape.V, o->eval_out, &folder.tasks, m.error), m.error);
        comm_require_same(launch, run_identity(&folder));
        evaluate(&m, &folder);
    }
    run_folder_close(&folder);
    model_free(&m);
    device_close(&dev);
    return 0;
}

// Opens the device and, with several ranks, the exchange between them.
static void open_device(Run* run) {
    const Options* o = run->options;
    Model* m = run->model;
    const bool plans = o->dry_run && strcmp(o->device, "cpu") != 0 && m->launch->world == 1;
    run->folder.quiet = m->launch->rank > 0, run->folder.ranks = m->launch->world;
    run->folder.text = text_stream(&run->folder.banner, &run->folder.banner_bytes);
    if (o->memory > 0 && !plans) {
        user_error("--memory plans for one GPU that need not be here; type --dry-run, without --device cpu or --gpus");
    }
    if (o->memory > 0) device_imagine(&run->dev, o->memory);
    if (o->memory == 0) device_choose(&run->dev, o->device, m->launch, o->gpus);
    m->dev = &run->dev;
    m->arena.shard = shard_connect(&run->shard, m->launch, &run->dev, o->shard);
}

// Allocates and fills everything. It reads weights before it makes the run folder: a bad model file leaves no folder.
static void begin(Run* run) {
    Model* m = run->model;
    memory_checkpoint(run->folder.last_checkpoint);
    model_allocate(m, &run->config);
    warm_up_and_autotune(m, &run->dev);
    if (run->folder.resumed)
        checkpoint_read(run);
    else
        model_init(m, (uint64_t)run->options->seed, run->folder.weights);
    signals_doing("this step");
    launch_any(m->launch, false);  // waits for all ranks: if one of them refuses to run, no folder is made
    require(m->launch->rank > 0 || run_folder_make(&run->folder, run->dev.name), run->folder.error);
    launch_broadcast(m->launch, run->folder.path, sizeof(run->folder.path));
}

static int train_main(Options* o, const Launch* launch) {
    static Model model;
    static Run run;
    run.options = run.folder.options = o, run.model = &model;
    model.launch = launch;
    resume(&run);
    open_device(&run);
    resolve(&run);
    require(resume_state(&run.folder), run.folder.error);
    MemoryPlan plan = memory_plan(run.model, &run.config);
    run.step.flops = gpt2_flops(model.parameters, model.shape.L, model.shape.C, model.T), run.step.gpu = run.dev.gpu;
    run.step.peak = launch->world * device_peak(&run.dev, model.arena.type == OPTIM_FP32);
    run.step.memory = plan.total;
    report_banner(&run.folder, model.shape.V, device_describe(&run.dev, model.arena.type == OPTIM_FP32),
                  model.arena.shard ? comm_describe(&run.shard.comm) : nullptr, optim_describe(&run.config), &plan);
    const bool done = run.folder.resumed && run.folder.state.step >= o->steps;
    const char* lacks = done ? nullptr : plan_lacks(&run, &plan);
    if (lacks && !run.dev.imagined) user_error("%s", lacks);
    if (lacks) run_say(&run.folder, " notice   %s\n", lacks);
    const OptimFiles files = optim_file_bytes(&run.config, model.arena.tensors, model.arena.count);
    const int64_t size = o->profile ? 0 : files.model + (strcmp(o->save, "all") == 0 ? files.optimizer : 0);
    require(run.dev.imagined || done || run_folder_open(&run.folder, model.shape.V, size), run.folder.error);
    comm_require_same(launch, run_identity(&run.folder));
    if (done)
        run_say(&run.folder, "done     %s is at step %lld of %lld; type --steps N to train on\n", run.folder.checkpoint,
                (long long)run.folder.state.step, o->steps);
    if (done || o->dry_run) return require_stdout();
    begin(&run);
    train(&run);
    const int stop = stops(&model);
    if (!o->profile) run_say_next(&run.folder, stop);
    run_folder_close(&run.folder);
    model_free(&model);
    device_close(&run.dev);
    return stop ? 128 + stop : 0;
}

#ifndef TESTING
// Runs before the libraries' own initialisation, so that signals have handlers.
static void before_libraries(int, char**, char**) {
    signals_catch();
}
__attribute__((section(".preinit_array"), used)) static const auto first_of_all = before_libraries;

int main(int argc, char** argv) {
    openmp_wait_asleep(argv);
    char error[DATA_ERROR_BYTES];
    Options options;
    options_defaults(&options);
    require(options_parse(&options, argc, argv, error), error);
    bool printed = options_print(&options, stdout);
    if (options.list_formats) optim_list_formats(stdout), printed = true;
    if (options.list_presets) optim_list_presets(stdout), printed = true;
    if (printed) return require_stdout();
    require(options_apart(&options, error) && gpt2_take_size(&options, error), error);
    if (options.fit > 0) return fit_main(&options);
    Launch launch;
    require(launch_environment(&launch, options.gpus, error), error);
    if (launch.rank > 0) signals_quiet();
    if (option_given(&options, "sample")) return launch.rank == 0 ? forward_main(&options, &launch, true) : 0;
    comm_launch(&launch, options.gpus, strcmp(options.device, "cpu") == 0, options.join_timeout);
    const bool evaluates = option_given(&options, "eval") && options.eval_every == 0;
    const int code = evaluates ? forward_main(&options, &launch, false) : train_main(&options, &launch);
    return launch_leave(&launch, code);
}
#endif
