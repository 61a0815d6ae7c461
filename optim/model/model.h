// What the files of optim/model share: the parts of a model that take turns in device memory. A part is a layer, the
// embeddings or the last layernorm.
#pragma once
#include "../../kernels/layer_ring.cuh"
#include "../plan.h"
#include "arena.h"

// The tensors of a part in the arena's order.
struct PartList {
    int count, tensor[PART_TENSORS];
};
PartList part_list(const Arena* arena, int part);
// Drops decoded copies of the weights, which have changed, and sends other ranks the new weights.
void arena_changed(const Arena* arena);

// Weights that are stored in another type than the matmuls read are decoded a part at a time (decode.cu), so that
// memory holds no second copy of the model. A part that is not there is decoded on the device's stream, after all
// queued work that still reads what lay in its room.
//
//     room     max(2 layers, embeddings) + last layernorm, in the compute type: a pass reads the embeddings before its
//              first layer and after its last, and the last layernorm together with the last layer
//     cost     each use of a part reads its weights as stored and writes them decoded: 3 bytes a parameter for 8-bit
//              weights and bf16 products, twice a micro-batch (forward and backward), at the rate of a copy
//
// Tensors that are stored in the compute type are read in place. A decoded weight has the bits that it would have in a
// copy of the whole model, since the same function decodes it. Operands, matrices of layers whose codes fp8 products
// read, are not decoded while a model trains. Other passes that read them, such as a validation, pass a buffer for two
// layers of them (arena_dequant_buffer).
struct DecodedBytes {
    int64_t room, dequant_buffer;
};
DecodedBytes decoded_bytes(const Arena* arena, const OptimConfig* config);
// Allocates the room; the optimizer keeps no copy (OptimConfig.keeps_copy).
Decoded* decoded_open(Arena* arena);
void decoded_close(Decoded* decoded);
// Returns the address of a tensor's weights in the compute type, which are valid after decoded_need of its part. The
// address never changes, except for operands: theirs is in the buffer, or NULL.
void* decoded_at(const Arena* arena, int tensor);
// Decodes a part unless it is there. It stays until a part that shares its room is needed: layer l until layer l + 2 or
// the embeddings, the embeddings until a layer.
void decoded_need(const Arena* arena, int part);
// Marks all parts as out of date, since the weights have changed.
void decoded_forget(Decoded* decoded);

// The states of an optimizer in host memory, copied through two slots of device memory a part at a time (offload.cu).
// While a part is stepped in one slot, the next part's states are copied into the other. After the step, they are
// copied back, and those of the part after next take their place (kernels/layer_ring.cuh).
//
//     host memory    the states as stored, pinned
//     device memory  twice the states of the largest part
//     cost           each step moves the states once in either direction: 1.1 bytes a parameter with 4-bit states, at
//                    about 50 GB/s each way over PCIe 5; hidden behind whatever runs between two parts' steps
//
// The bits are those of states on the device, since the same kernel steps the same bytes. optim_releases must allow
// steps by parts, since other steps read all states at once.
//
// Allocates the slots. Parts are stepped in the order of the backward pass if that takes the step (arena->releases),
// otherwise in the arena's. Once a step has begun, only steps may change the states.
Offload* offload_open(Arena* arena);
void offload_close(Offload* offload);
// Between these two calls the states of a part are on the device, and optim_step_tensors may step its tensors. With
// NULL they do nothing, since the states are always on the device.
void offload_take(Offload* offload, int part);
void offload_give(Offload* offload, int part);
// Returns number i of the parts in the order of a step; -1 after the last.
int offload_part(const Offload* offload, int i);
// Takes the step over the whole arena with one factor for all gradients, part by part.
void offload_step(const Arena* arena, const float* factor);

// Steps that are taken part by part (step.cu): inside the backward pass, each part is stepped as soon as its gradients
// are complete. The next layer but one then writes its gradients to the same memory, so that gradients take the room
// of two layers and the embeddings instead of the model's. If all gradients are kept until after the backward pass, the
// same calls give the same bits.
//
// kernels/norm.cuh computes the factor that clips a part. A part whose gradients are not finite keeps its weights and
// states and is counted; if the loss is not finite, all parts do. Several ranks sum the gradients of a part, agree on
// its norm, and each steps what it keeps of the part. Only a step of one micro-batch is taken in this way, since memory
// has no room for sums of several, and only by rules that do not project gradients.
//
// Cost: a part's gradients are read once for its norm; two small kernels, and a launch of the step for each launch of
// the optimizer.
