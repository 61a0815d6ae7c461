// The parameters of a model while it trains: its weights as the matmuls read them, their gradients, and the step, in
// whichever way they are kept. A pass over the model calls the same functions for each of them:
//
//     whole       weights, states and gradients of the whole model are in memory
//     decoded     weights are stored otherwise than the matmuls read them, and decoded a part at a time (decoded.h)
//     spread      ranks keep parts of them and exchange weights and gradients (kernels/ranks/shard.cuh)
//     released    parts are stepped inside the backward pass, where their gradients take turns (release.h)
//     offloaded   states are in host memory and come a part at a time (offload.h)
//
// A part is a layer, or the embeddings, or the last layernorm (decoded_embeddings, decoded_final). An arena holds all
// tensors of a model at the offsets of optim_layout; gradients that are packed or take turns lie elsewhere, which
// arena_at knows. What an arena does costs what the files above say.
#pragma once
#include "decoded.h"
#include "release.h"

struct Shard;

struct Arena {
    // The caller sets these; arena_tensors makes the arrays.
    const Device* dev;
    Shard* shard;          // what the ranks share; NULL: this is the only one, or the model only runs forward
    OptimTensor* tensors;  // (count)
    int* part;             // (count) the part of each
    int64_t* place;        // (count) where the gradients of each begin, in elements, if steps are taken part by part
    int* slot;             // (count) of the scale of a matrix whose codes products may read as they are stored; or 0
    int count, layers;
    int64_t elements;  // length of an arena
    OptimType type;    // X: of weights as the matmuls read them
    bool grads_bf16;   // G: of gradients is bf16, otherwise float
    ClipBy clip_by;
    // arena_release sets these.
    bool releases;  // gradients are released
    bool folds;     // and those of matrices go into m
    // arena_spread sets these.
    int64_t lent_bytes;  // of the room that arena_lend is given
    bool scales_apart;   // some matrices have codes that products could read, and each rank has those of its own alone
    // arena_open and arena_begin set these.
    Optim* optim;      // owns the weights; NULL: the model only runs forward
    void* weights;     // X; NULL: `decoded` has them
    void* grads;       // G; NULL without optim
    Decoded* decoded;  // NULL: weights are whole or spread
    Release* release;  // NULL: a step has one norm and one factor
    Offload* offload;  // NULL: states are in device memory
    ReleaseStep step;  // the step that arena_begin began
    float* scalars;    // and its scalars
    bool stepping;     // the backward pass takes it
};

// Returns the tensors and their parts.
ModelParts arena_parts(const Arena* arena);
// Makes room for `count` tensors, all zero.
void arena_tensors(Arena* arena, int count);
// Plans what this rank keeps, and says so in the configuration. Exits with a sentence if there are more ranks than
// tiles of weights.
void arena_spread(Arena* arena, OptimConfig* config);

// Can the gradients of parts take turns, and (with clip_by) parts be stepped one by one, in steps of `tokens`, of which
// one micro-batch of all ranks has `micro`? `asked`: the user wants it, so it may change bits, and a refusal comes with
// a reason in `why` and what to type. Exits where clip_by needs what cannot be.
bool arena_may_release(const Arena* arena, const OptimConfig* config, double clip, int64_t tokens, int64_t micro,
                       bool asked, char* why);
// Releases gradients if `on`, for a plan of steps with one micro-batch. Returns false with a reason in `why` if
// --release, --clip-by or --offload asks for what cannot be.
bool arena_plan_release(Arena* arena, OptimConfig* config, double clip, bool on, char* why);
// Makes gradients take turns, and sets `folds` of the configuration. `several`: a step has several micro-batches.
void arena_release(Arena* arena, OptimConfig* config, bool several);

// Device memory in bytes, and host memory, known before anything is allocated. `other`: what exchange and release take
// for themselves.
struct ArenaBytes {
    int64_t weights, states, grads, other, host;
};
ArenaBytes arena_bytes(const Arena* arena, const OptimConfig* config);
int64_t arena_grads_bytes(const Arena* arena);
// Bytes of a checkpoint, with or without the optimizer's states.
int64_t arena_saved_bytes(const Arena* arena, const OptimConfig* config, bool states);

// Allocates weights, states and gradients, all zero; without a configuration weights alone.
void arena_open(Arena* arena, const OptimConfig* config);
void arena_close(Arena* arena);

// Returns the place of tensor t in `memory`, which is arena->weights or arena->grads, of elements of this size.
void* arena_at(const Arena* arena, void* memory, int t, int64_t element_bytes);
// The codes of a matrix that products read as it is stored; NULL: they read what arena_at says. Where ranks keep parts
// of the weights they gather decoded ones, so there it is NULL.
const uint8_t* arena_codes(const Arena* arena, int t);
// Writes the addresses of the numbers of these codes' scales (optim_codes) into device memory, by slot; NULL where this
// rank has none. Ranks that gather decoded weights get them too, since fp8_begin wants the scales there.
void arena_scales(const Arena* arena, const float** to, int slots);
// Room of lent_bytes in which such matrices are decoded from here on, for passes that read all weights from arena_at;
// NULL: they are no longer, and arena_at is NULL for them.
void arena_lend(const Arena* arena, void* room);
// Gives a tensor its weights (rows x cols, fp32, on the host), rounded to nearest. Call optim_decode after the last.
void arena_set(Arena* arena, int t, const float* values);
// These do the same with one value for all elements, and with normal numbers of this deviation (kernels/initial.cuh) in
// the first `rows` rows and zeros in the others. `memory`: device memory of `bytes` bytes in which nothing is wanted.
void arena_fill(Arena* arena, int t, float value);
void arena_draw(Arena* arena, int t, int64_t rows, uint64_t seed, float deviation, void* memory, int64_t bytes);

// The weights of a part are there from here on in the device's stream; where ranks keep them, those of layer `next` are
// on their way meanwhile.
void arena_need(const Arena* arena, int part, int next = -1);
// Call this before the states are read. What is queued on the device's stream from here on finds them up to date.
void arena_settle(const Arena* arena);

// The weights have changed, for all ranks.
void arena_changed(const Arena* arena);

// A step: arena_begin, for each micro-batch arena_micro_batch and a backward pass that calls arena_done for each part,
// arena_step.
//
// `scalars` is in device memory, as shard.cuh lists them; `lr` and `step` are optim_step's.
void arena_begin(Arena* arena, float* scalars, float clip, float lr, int64_t step);
// Begins micro-batch `number` of `count`; the first one's number is 0.
void arena_micro_batch(Arena* arena, int64_t number, int64_t count);
// Call this before the first gradient of a part is written; a layer's projection gets its first from the layer above.
// The gradients of another part that lay there are lost. Part `layers` is all that is in no layer.
void arena_room(const Arena* arena, int part);
// The gradients of a part in this micro-batch are complete: where they are released, takes its step or takes them into
// m; or begins their sum over the ranks.
void arena_done(const Arena* arena, int part);
// The norm of the gradients and the clip factor into `scalars`, and the update, which does nothing where the loss or
// the norm is not finite: then the factor is NaN. Where steps are taken part by part, each part has a factor of its
// own. `scratch`: a double for each tile of the arena, and global_norm's bytes.
void arena_step(Arena* arena, float* scalars, void* scratch);
