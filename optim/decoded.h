// Weights that are stored in another type than the matmuls read, decoded one part of the model (ModelParts) at a time,
// so that memory holds no second copy of the model.
//
// Two layers have room at a time and take turns. The embeddings use the same room, since a pass reads them before its
// first layer and after its last. The last layernorm has its own room, since it is read together with the last layer.
// decoded_need decodes a part that is not there, on the device's stream, after all queued work that still reads the
// previous contents.
//
//     room     max(2 layers, embeddings) + last layernorm, in the compute type
//     cost     each use of a part reads its weights as stored and writes them decoded: 3 bytes a parameter for 8-bit
//              weights and bf16 products, twice a micro-batch (forward and backward), at the rate of a copy
//
// Tensors that are stored in the compute type are read in place. A decoded weight has the bits that it would have in a
// copy of the whole model, since the same function decodes it. Operands, matrices of layers whose codes fp8 products
// read, are not decoded while a model trains. Other passes that read them, such as a validation, pass a buffer for two
// layers of them.
#pragma once
#include "optim.h"

typedef struct Decoded Decoded;

// Bytes of the room under a resolved configuration, and of the buffer for operands that a caller passes, known before
// anything is allocated.
struct DecodedBytes {
    int64_t room, dequant_buffer;
};
DecodedBytes decoded_bytes(const OptimConfig* config, const ModelParts* model);

// Allocates the room. `optim` keeps no copy (OptimConfig.keeps_copy) and must outlive it.
Decoded* decoded_open(const Optim* optim, const ModelParts* model);
void decoded_close(Decoded* decoded);

// Returns the codes of an operand; NULL for other tensors.
const uint8_t* decoded_codes(const Decoded* decoded, int tensor);

// Sets a buffer of DecodedBytes.dequant_buffer bytes, into which operands are decoded from here on. NULL ends this and
// the caller has the buffer back.
void decoded_dequant_buffer(Decoded* decoded, void* room);

// Returns the address of a tensor's weights in the compute type, which are valid after decoded_need of its part. The
// address never changes, except for operands: theirs is in the dequant_buffer, or NULL.
void* decoded_at(const Decoded* decoded, int tensor);

// Decodes a part unless it is there. It stays until a part that shares its room is needed: layer l until layer l + 2 or
// the embeddings, the embeddings until a layer.
void decoded_need(Decoded* decoded, int part);

// Marks all parts as out of date, since the weights have changed.
void decoded_forget(Decoded* decoded);
