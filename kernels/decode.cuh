// Sampling from a GPT-2: tokens one after another, with the keys and values of all earlier tokens in a cache.
//
// One pass computes up to DECODE_ROWS rows, each a token at its place in one of S sequences: the next token of every
// sequence, or a piece of a prompt. Its operators are those of the forward pass that suit few rows, and those of
// matmul_rows.cuh, attention_decode.cuh and draw.cuh. In all of them a row's bits depend on its own sequence alone, so
// a text is the same with or without the cache, and with any other texts beside it. On the CPU the logits have the bits
// of the training forward pass.
//
// Cost of a step on a GPU: reading the weights once for all sequences, and each one's keys and values. Its 5 L + 3
// kernels, and one for each layernorm that RowsNorm (matmul_rows.cuh) gives a kernel of its own, each take a few
// microseconds, so their launches are recorded once as a CUDA graph, and a kernel begins to load its weights before the
// one before it has ended (launch_early).
//
// Past the context length: positions are learned, so the cache is useless once the window moves. When a window of T
// tokens is full, its older half is dropped and the rest computed again; so a text continues with T / 2 to T tokens of
// context, at the cost of two passes per token. The same rule shortens a prompt that is longer than the context.
#pragma once
#include "attention_decode.cuh"
#include "common.cuh"
#include "draw.cuh"
#include "embedding.cuh"
#include "layernorm.cuh"
#include "matmul_rows.cuh"

constexpr int DECODE_ROWS = 64;  // of one pass, and sequences of a decoder, at most
constexpr int DECODE_END = -1;   // a text that has ended gets this instead of a token

// T: tokens of context; weights have positions for at least as many. Vp: V padded, a multiple of 64.
struct DecodeShape {
    int L, C, NH, V, Vp, T;
};

// The tensors of a block, in the order in which a model's list of tensors has them. The list: wte (Vp, C), wpe, the
// blocks, ln_f.weight, ln_f.bias; of X each, a matrix being (outputs, inputs).
enum DecodeTensor { LN1W, LN1B, QKVW, QKVB, PROJW, PROJB, LN2W, LN2B, FCW, FCB, FCPROJW, FCPROJB, DECODE_TENSORS };

// The caller's part of the work, as functions.
struct DecodeCalls {
    void* context;
    // Is called before a part of the weights is used: a layer, or L, the embeddings, or L + 1, the last layernorm.
    // L must stay there beside L + 1. NULL: all weights are always there.
    void (*need)(void* context, int part);
    // Is called when each of `count` texts has a new token: DECODE_END if it had ended before, DRAW_NOT_FINITE if its
    // logits are not finite, which ends all. It may end a text by writing DECODE_END, and ends all by returning false.
    bool (*next)(void* context, int* tokens, int count);
    // Is called when text `index` of decode_run is complete: `used` tokens, with its prompt. Not after logits that
    // are not finite.
    void (*done)(void* context, int index, const int* tokens, int64_t used);
};

// A text that grows.
struct DecodeText {
    int* tokens;     // room for all that it may become; the first `used` are there
    int64_t used;    // at least 1
    int sample;      // its number for the draws, below 2^20
    int64_t begin;   // of its window
    int64_t cached;  // tokens of the window whose keys and values are in the cache
    bool ended;
};

struct Decoder {
    const Device* dev;
    Device early;  // what dev points to: the caller's, with launch_early where the weights are always there
    DecodeShape shape;
    bool fp32;    // X is float, otherwise bf16
    bool finite;  // all logits were, so far
    int S;        // sequences, at most DECODE_ROWS
    DrawOptions draw;
    DecodeCalls calls;
    const void* const* tensor;  // the list of the model's tensors, on the device
    // Laid out in `memory` by decode_layout. R is DECODE_ROWS.
    void* memory;
    bool own_memory;
    void *residual[2], *normed, *attention, *branch;  // (R, C) of X; a residual is read while the other is written
    void *qkv, *wide;                                 // (R, 3C), (R, 4C)
    float *mean, *rstd;                               // (R)
    float* logits;                                    // (S, Vp)
    int* numbers;                                     // (5, R): token, sequence, position, sample, place in the text
    char* cache;                                      // (L, 2, S, NH, T, HS)
    int host[5][DECODE_ROWS];                         // of `numbers`
    int* drawn;                                       // (R), pinned host memory
#ifdef __CUDACC__
    cudaGraphExec_t graph;  // of a step of graph_rows rows; NULL: none yet
    int graph_rows;
#endif
};

// Sets the pointers into `base`, and returns the bytes that they need.
inline int64_t decode_layout(Decoder* d, char* base) {
    const DecodeShape* s = &d->shape;
    const int64_t R = DECODE_ROWS, C = s->C, element = d->fp32 ? 4 : 2;
    Layout layout = {base, 0};
    for (void** rows : {&d->residual[0], &d->residual[1], &d->normed, &d->attention, &d->branch}) {
        *rows = layout_take<char>(&layout, R * C * element);
    }
    d->qkv = layout_take<char>(&layout, R * 3 * C * element);
    d->wide = layout_take<char>(&layout, R * 4 * C * element);
    d->mean = layout_take<float>(&layout, R), d->rstd = layout_take<float>(&layout, R);
    d->logits = layout_take<float>(&layout, (int64_t)d->S * s->Vp);
    d->numbers = layout_take<int>(&layout, 5 * R);
    d->cache = layout_take<char>(&layout, s->L * attention_cache_elements(d->S, s->T, s->C) * element);
    return layout.used;
}

inline int64_t decode_bytes(const DecodeShape* shape, bool fp32, int S) {
    Decoder d = {};
    d.shape = *shape, d.fp32 = fp32, d.S = S;
    return decode_layout(&d, nullptr);
}

// Returns how many sequences, at most `max` and DECODE_ROWS, a decoder in `bytes` can have; 0: not even one.
inline int decode_sequences(const DecodeShape* shape, bool fp32, int64_t max, int64_t bytes) {
    int S = (int)(max < DECODE_ROWS ? max : DECODE_ROWS);
    while (S > 0 && decode_bytes(shape, fp32, S) > bytes) S--;
    return S;
}

inline void decode_need(const Decoder* d, int part) {
    if (d->calls.need) d->calls.need(d->calls.context, part);
}

// tensors: the model's list, which must outlive the decoder; memory: decode_bytes(shape, fp32, S) on the device, which
// the caller keeps and frees, or NULL to allocate them.
inline void decode_open(Decoder* d, const Device* dev, const DecodeShape* shape, bool fp32, const void* const* tensors,
                        int S, const DrawOptions* draw, const DecodeCalls* calls, void* memory) {
    *d = {};
    d->early = *dev, d->early.early = !calls->need, d->dev = &d->early;
    d->shape = *shape, d->fp32 = fp32, d->S = S, d->draw = *draw, d->calls = *calls, d->finite = true;
    d->tensor = tensors;
    d->own_memory = !memory;
    d->memory = memory ? memory : device_alloc(dev, decode_bytes(shape, fp32, S));
    d->drawn = (int*)(dev->gpu ? pinned_alloc : memory_take)(DECODE_ROWS * sizeof(int));
    decode_layout(d, (char*)d->memory);
}

inline void decode_close(Decoder* d) {
#ifdef __CUDACC__
    if (d->graph) check(cudaGraphExecDestroy(d->graph));
#endif
    (d->dev->gpu ? pinned_free : free)(d->drawn);
    if (d->own_memory) device_free(d->dev, d->memory);
}

// out: (R, OC) = the linear layer whose weights are tensor `weight`. Its bias is the next one; the head, tensor 0, has
// none.
template <typename X, typename D = X>
void decode_linear(const Decoder* d, void* out, const void* inp, int weight, bool gelu, int R, int C, int OC,
                   const RowsNorm<X>& norm = {}) {
    const void* bias = weight > 0 ? d->tensor[weight + 1] : nullptr;
    matmul_rows<X, D>(d->dev, (D*)out, (const X*)inp, (const X*)d->tensor[weight], (const X*)bias, gelu, R, C, OC,
                      norm);
}

// The layernorm whose weight and bias are tensors at and at + 1. adds: of a residual and the branch, whose sum goes to
// the other residual, `sum`.
template <typename X>
RowsNorm<X> decode_norm(const Decoder* d, int at, bool adds, void* sum) {
    RowsNorm<X> norm = {};
    norm.branch = adds ? (const X*)d->branch : nullptr, norm.sum = (X*)sum;
    norm.weight = (const X*)d->tensor[at], norm.bias = (const X*)d->tensor[at + 1];
    norm.normed = (X*)d->normed, norm.mean = d->mean, norm.rstd = d->rstd;
    return norm;
}

// Computes the R rows that `numbers` describes up to the last layernorm, and caches their keys and values. Then
// residual[1] and `branch` are to be added. apart: each row is of another sequence.
template <typename X>
void decode_rows(const Decoder* d, int R, bool apart) {
    const DecodeShape* s = &d->shape;
    const int C = s->C;
    const AttentionCache at = {d->S, s->T, d->numbers + DECODE_ROWS, d->numbers + 2 * DECODE_ROWS};
    decode_need(d, s->L);
    embedding_forward<X>(d->dev, (X*)d->residual[0], d->numbers, (const X*)d->tensor[0], (const X*)d->tensor[1], 1, R,
                         C, d->numbers + 2 * DECODE_ROWS);
    for (int l = 0; l < s->L; l++) {
        X* cache = (X*)d->cache + l * attention_cache_elements(d->S, s->T, C);
        const int block = 2 + l * DECODE_TENSORS;
        const RowsNorm<X> first = decode_norm<X>(d, block + LN1W, l > 0, d->residual[0]),
                          second = decode_norm<X>(d, block + LN2W, true, d->residual[1]);
        decode_need(d, l);
        decode_linear<X>(d, d->qkv, d->residual[l > 0], block + QKVW, false, R, C, 3 * C, first);
        if (!apart) attention_append<X>(d->dev, cache, (const X*)d->qkv, &at, R, C, s->NH);
        attention_decode<X>(d->dev, (X*)d->attention, (const X*)d->qkv, cache, &at, R, C, s->NH, apart);
        decode_linear<X>(d, d->branch, d->attention, block + PROJW, false, R, C, C);
        decode_linear<X>(d, d->wide, d->residual[0], block + FCW, true, R, C, 4 * C, second);
        decode_linear<X>(d, d->branch, d->wide, block + FCPROJW, false, R, 4 * C, C);
    }
}

// The rows, their logits and a token drawn from each.
template <typename X>
void decode_and_draw(const Decoder* d, int R) {
    const DecodeShape* s = &d->shape;
    const RowsNorm<X> last = decode_norm<X>(d, 2 + s->L * DECODE_TENSORS, true, d->residual[0]);
    decode_rows<X>(d, R, true);
    decode_need(d, s->L + 1), decode_need(d, s->L);
    decode_linear<X, float>(d, d->logits, d->residual[1], 0, false, R, s->C, s->Vp, last);
    draw(d->dev, d->drawn, d->logits, d->numbers + 3 * DECODE_ROWS, d->numbers + 4 * DECODE_ROWS, &d->draw, R, s->V,
         s->Vp);
}

inline void decode_launch(const Decoder* d, int R, bool draws) {
    if (d->fp32) {
        draws ? decode_and_draw<float>(d, R) : decode_rows<float>(d, R, false);
    } else {
        draws ? decode_and_draw<bf16>(d, R) : decode_rows<bf16>(d, R, false);
    }
}

// The first step of so many rows is launched kernel by kernel, which loads them; then it is recorded.
inline void decode_step(Decoder* d, int R) {
#ifdef __CUDACC__
    if (d->graph && d->graph_rows == R) {
        check(cudaGraphLaunch(d->graph, d->dev->stream));
        return;
    }
#endif
    decode_launch(d, R, true);
#ifdef __CUDACC__
    if (!d->dev->gpu || d->calls.need) return;
    if (d->graph) check(cudaGraphExecDestroy(d->graph));
    cudaGraph_t graph;
    check(cudaStreamBeginCapture(d->dev->stream, cudaStreamCaptureModeThreadLocal));
    decode_launch(d, R, true);
    check(cudaStreamEndCapture(d->dev->stream, &graph));
    check(cudaGraphInstantiate(&d->graph, graph, 0));
    check(cudaGraphDestroy(graph));
    d->graph_rows = R;
#endif
}

// Row r is token `place` of a text that is sequence `sequence` of the decoder.
inline void decode_set(Decoder* d, int r, const DecodeText* text, int sequence, int64_t place) {
    const int numbers[5] = {text->tokens[place], sequence, (int)(place - text->begin), text->sample, (int)(place + 1)};
    for (int i = 0; i < 5; i++) d->host[i][r] = numbers[i];
}

// Moves a text's window if it is full, and caches all tokens but the last.
inline void decode_fill(Decoder* d, DecodeText* text, int sequence) {
    const int T = d->shape.T;
    if (text->used - text->begin > T) text->begin = text->used - (T - T / 2), text->cached = 0;
    int64_t place = text->begin + text->cached;
    while (place < text->used - 1) {
        int R = 0;
        while (R < DECODE_ROWS && place < text->used - 1) decode_set(d, R++, text, sequence, place++);
        copy_to_device(d->dev, d->numbers, d->host, sizeof(d->host));
        decode_launch(d, R, false);
    }
    text->cached = text->used - text->begin;
}

// Adds up to `length` tokens to each of `count` texts, at most d->S. False if calls.next ended all, or logits that are
// not finite did, which also clear d->finite.
inline bool decode_texts(Decoder* d, DecodeText* texts, int count, int64_t length) {
    bool goes_on = true, all_ended = false;
    for (int64_t i = 0; i < length && goes_on && !all_ended; i++) {
        for (int r = 0; r < count; r++) {
            if (!texts[r].ended) decode_fill(d, &texts[r], r);
        }
        for (int r = 0; r < count; r++) decode_set(d, r, &texts[r], r, texts[r].used - 1);
        // Waiting here would cost more than the copy; the wait below comes before the next change of d->host.
        copy_on(d->dev, d->dev->stream, d->numbers, d->host, sizeof(d->host));
        decode_step(d, count);
        device_sync(d->dev);
        for (int r = 0; r < count; r++) d->drawn[r] = texts[r].ended ? DECODE_END : d->drawn[r];
        goes_on = d->calls.next(d->calls.context, d->drawn, count);
        all_ended = true;
        for (int r = 0; r < count; r++) {
            d->finite = d->finite && d->drawn[r] != DRAW_NOT_FINITE;
            texts[r].ended = texts[r].ended || d->drawn[r] < 0;
            if (!texts[r].ended) texts[r].tokens[texts[r].used++] = d->drawn[r];
            all_ended = all_ended && texts[r].ended;
        }
        goes_on = goes_on && d->finite;
    }
    return goes_on;
}

// The prompts to be continued: each of `count`, `each` times, by up to `length` tokens.
struct DecodePrompts {
    const int* tokens;   // of all, one after another
    const int* lengths;  // (count) of the prompts
    int count, each;
    int64_t length;
};

// Continues the prompts with a decoder of as many sequences as `room` bytes hold, whose arguments are those of
// decode_open. calls.done gets the texts in order: `each` of the first prompt, of the second, ... A text's number is
// its sample's for the draws. Returns false where the model's output is not finite.
inline bool decode_run(const Device* dev, const DecodeShape* shape, bool fp32, const void* const* tensors,
                       const DecodePrompts* p, const DrawOptions* draw, const DecodeCalls* calls, void* memory,
                       int64_t room) {
    const int64_t texts = (int64_t)p->count * p->each;
    int64_t longest = 0;
    for (int i = 0; i < p->count; i++) longest = std::max(longest, p->lengths[i] + p->length);
    if (texts > DRAW_SAMPLES || longest >= DRAW_PLACES || shape->V > DRAW_TOKENS) {
        user_error(
            "%lld samples of up to %lld tokens out of %d, and draws repeat beyond %lld samples and 2^20 tokens; type "
            "fewer --samples, or a shorter prompt",
            (long long)texts, (long long)longest, shape->V, (long long)DRAW_SAMPLES);
    }
    const int S = decode_sequences(shape, fp32, (int)texts, room);
    if (S == 0) user_error("a sample with %d tokens of context does not fit in memory; type a shorter --seq", shape->T);
    Decoder d;
    decode_open(&d, dev, shape, fp32, tensors, S, draw, calls, memory);
    bool goes_on = true;
    const int* prompt_tokens = p->tokens;
    for (int first = 0; first < (int)texts && goes_on; first += S) {
        DecodeText text[DECODE_ROWS];
        const int count = (int)texts - first < S ? (int)texts - first : S;
        for (int i = 0; i < count; i++) {
            const int prompt = (first + i) / p->each, used = p->lengths[prompt];
            if ((first + i) % p->each == 0 && prompt > 0) prompt_tokens += p->lengths[prompt - 1];
            int* tokens = (int*)memory_take((size_t)(used + p->length) * sizeof(int));
            memcpy(tokens, prompt_tokens, used * sizeof(int));
            text[i] = {tokens, used, first + i, 0, 0, false};
        }
        goes_on = decode_texts(&d, text, count, p->length);
        for (int i = 0; i < count; i++) {
            if (d.finite) calls->done(calls->context, first + i, text[i].tokens, text[i].used);
            free(text[i].tokens);
        }
    }
    decode_close(&d);
    return d.finite;
}
