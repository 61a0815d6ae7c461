// The parameters of a model while it trains: the weights that the matmuls read, their gradients, and the step. An arena
// keeps them in one or more of these ways, and the trainer calls the same functions for all of them:
//
//     whole       weights, states and gradients of the whole model are in memory
//     decoded     weights are stored in another type than the matmuls read, and decoded a part at a time
//     spread      ranks keep parts of them and exchange weights and gradients (kernels/ranks/shard.cuh)
//     released    parts are stepped inside the backward pass, and their gradients take turns in memory
//     offloaded   states are in host memory and are copied to the device a part at a time
//
// A part is a layer, the embeddings or the last layernorm. An arena holds all tensors of a model at the offsets of
// optim_layout; gradients that are packed or take turns lie elsewhere, and arena_at knows where. model.h says what each
// way costs.
#pragma once
#include "../../kernels/norm.cuh"
#include "../checkpoint/checkpoint.h"

struct Shard;
struct Fp8;
typedef struct Decoded Decoded;
typedef struct Offload Offload;

// The parts that are not layers: number L is the embeddings, L + 1 the last layernorm.
inline int part_embeddings(int layers) {
    return layers;
}
inline int part_final(int layers) {
    return layers + 1;
}

struct Arena {
    // The caller sets these; arena_tensors makes the arrays.
    const Device* dev;
    Shard* shard;          // the ranks' exchange; NULL: there is one rank, or the model only runs forward
    OptimTensor* tensors;  // (count)
    int* part;             // (count) the part of each
    int* order;            // (count) the tensors part by part
    int64_t* place;        // (count) first element of each tensor in packed memory, where two layers take turns
    Fp8* fp8;              // the scales of fp8 products, its slots set; NULL: there are none
    int* slot;             // (count) number of a matrix's scale if products may read its stored codes; else 0
    int count, layers;
    int64_t elements;  // length of an arena
    int64_t packed;    // length of packed memory
    OptimType type;    // X: the type of the weights that the matmuls read
    bool grads_bf16;   // G: the type of the gradients is bf16, otherwise float
    ClipBy clip_by;
    bool releases;  // gradients are released
    // arena_spread sets these.
    int64_t dequant_bytes;  // bytes that arena_dequant_buffer needs
    bool scales_apart;      // products could read the codes of some matrices, but each rank has only its own codes
    // arena_open and arena_begin set these.
    MemoryPlan memory;          // what is allocated; the total is left to the caller
    Optim* optim;               // owns the weights; NULL: the model only runs forward
    void* weights;              // X; NULL: `decoded` has them
    void* grads;                // G; NULL without optim
    double* squares;            // of the gradients, for each tile
    Decoded* decoded;           // NULL: weights are whole or spread
    Offload* offload;           // NULL: states are in device memory
    bool by_parts;              // steps are taken part by part; otherwise a step has one norm and one factor
    double* part_square;        // (layers + 2) device memory: squares of the gradients of each part
    float *factor, *last_norm;  // (PART_TENSORS) of the tensors of a part; what the next step clips by (--clip-by last)
    float clip, lr;             // of the step that arena_begin began
    int64_t step;               // its number, from 1
    float* scalars;             // its scalars
    bool stepping;              // the backward pass takes this step
};

// Allocates the arrays for `count` tensors, all zero; arena_close frees them.
void arena_tensors(Arena* arena, int count);
// Plans which part of the arena this rank keeps, and sets `runs` and `keeps_copy` of the configuration. Exits
// with a sentence if there are more ranks than tiles of weights.
void arena_spread(Arena* arena, OptimConfig* config);

// Returns false with a sentence in `why` if --clip-by or --offload asks for steps by parts, and the rule does not allow
// them.
bool arena_may_part(const Arena* arena, const OptimConfig* config, char* why);
// Returns true if the gradients of parts can take turns in memory. A step has `tokens` tokens, and one micro-batch of
// all ranks has `micro`. Otherwise writes a reason and what to type into `why`.
bool arena_may_release(const Arena* arena, const OptimConfig* config, double clip, int64_t tokens, int64_t micro,
                       char* why);

int64_t arena_grads_bytes(const Arena* arena);

// Allocates weights, states and gradients, all zero. If `config` is null, it allocates only weights and does not set
// them. arena_close frees everything. On an imagined device the arena is a copy of the one that is planned: arena_open
// counts arena->memory, and arena_close leaves the tensors' arrays and the exchange of ranks to the other one.
void arena_open(Arena* arena, const OptimConfig* config);
void arena_close(Arena* arena);

// Returns the address of tensor t in `memory`, which is arena->weights or arena->grads. `element_bytes`: bytes of an
// element.
void* arena_at(const Arena* arena, void* memory, int t, int64_t element_bytes);
// Returns the codes of a matrix that products read as they are stored; NULL: products read the weights at arena_at. It
// is NULL if ranks keep parts of the weights, since they gather decoded weights.
const uint8_t* arena_codes(const Arena* arena, int t);
// Sets a buffer of dequant_bytes into which such matrices are decoded from here on, for passes that read all weights
// from arena_at. NULL ends this, and arena_at is NULL for these matrices again.
void arena_dequant_buffer(const Arena* arena, void* buffer);
// Sets a tensor's weights from host values (rows x cols, fp32), rounded to nearest. Call arena_loaded after the last
// tensor.
void arena_set(Arena* arena, int t, const float* values);
// Does the same with normal numbers (kernels/random.h) in the first `rows` rows and zeros in the others. `values` has
// room for the tensor: a model of billions of parameters then takes fresh memory once, not for each tensor.
void arena_draw(Arena* arena, int t, int64_t rows, uint64_t seed, float mean, float deviation, float* values);

// Makes the weights of a part available to whatever is queued on the device's stream from here on. If ranks keep parts
// of the weights, it also begins to gather those of layer `next`.
void arena_need(const Arena* arena, int part, int next = -1);
// Makes the states up to date for whatever is queued on the device's stream from here on. Call it before reading
// states. Returns the norm that the next step clips by (--clip-by last), for a checkpoint; 0: there was no step.
float arena_settle(const Arena* arena);

// Call this when all weights have been set from outside: what the matmuls read is made anew, and other ranks receive
// the weights. `last_norm` is what arena_settle returned when they were saved.
void arena_loaded(const Arena* arena, float last_norm);

// A step is a call of arena_begin; for each micro-batch, shard_micro_batch and a backward pass that makes the calls
// arena_layer_begin, arena_before_attention and arena_layer_end; and arena_step.
//
// Begins a step, whose fp8 scales it sets. `scalars` is in device memory (shard.cuh lists them) and receives the norm,
// the clip factor and what else is known when the step ends; `lr` and `step` are those of optim_step.
void arena_begin(Arena* arena, float* scalars, float clip, float lr, int64_t step);
// Makes room for the gradients of a part; the gradients of another part that lay there are lost. Call it before the
// first gradient of the part is written, a layer's that of its last bias, which the layernorm above writes. The
// embeddings stand for both parts that are not layers.
void arena_layer_begin(const Arena* arena, int part);
// Call this before the attention's backward pass of each layer. Over fast NCCL, the sum of the gradients of the layer
// above begins here (shard.cuh).
void arena_before_attention(const Arena* arena);
// Call this when the gradients of a part are complete in this micro-batch: of the last layernorm, of each layer from
// the last one down, and of the embeddings. If gradients are released, it takes the part's step; otherwise it begins
// their sum over the ranks, or leaves that to arena_before_attention. Then it makes the weights of the layer below
// available, as arena_need does.
void arena_layer_end(const Arena* arena, int part);
// Computes the norm of the gradients and the clip factor, and takes the step. If the loss or the norm is not finite,
// the factor is NaN and the step changes nothing. If steps are taken part by part, each part has its own factor.
void arena_step(Arena* arena);
