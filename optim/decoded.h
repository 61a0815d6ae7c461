// The weights that the matmuls read, where they are not stored as the matmuls read them: decoded one part of the model
// (ModelParts) at a time, so that no second copy of the model is in memory.
//
// Two layers have room at a time and take turns. The embeddings use the same room, since a pass reads them before its
// first layer and after its last. The last layernorm has room of its own, since it is read together with the last
// layer. If a part is not there, decoded_need decodes it, on the device's stream, behind whatever still reads what lay
// in its place.
//
//     room     max(2 layers, embeddings) + last layernorm, in the compute type
//     cost     each use of a part reads its weights as stored and writes them decoded: 3 bytes a parameter for 8-bit
//              weights and bf16 products, twice a micro-batch (forward and backward), at the rate of a copy
//
// Tensors that are stored in the compute type are read where they are. A decoded weight has the bits that a copy of the
// whole model would have, since the same function makes it. Matrices of layers that fp8 products read as codes
// (operands) are not decoded while a model trains. What else reads them, such as a validation, lends room for two
// layers of them.
#pragma once
#include "optim.h"

typedef struct Decoded Decoded;

// Bytes of the room under a resolved configuration, and of the room for operands that a caller lends. Known before
// anything is allocated.
struct DecodedBytes {
    int64_t room, lent;
};
DecodedBytes decoded_bytes(const OptimConfig* config, const ModelParts* model);

// Allocates the room. `optim` keeps no copy (OptimConfig.keeps_copy) and must outlive it.
Decoded* decoded_open(const Optim* optim, const ModelParts* model);
void decoded_close(Decoded* decoded);

// The codes of an operand; NULL for other tensors.
const uint8_t* decoded_codes(const Decoded* decoded, int tensor);

// Lends the room of DecodedBytes.lent bytes into which operands are decoded from here on. With NULL they are no longer
// decoded, and the room is the caller's again.
void decoded_lend(Decoded* decoded, void* room);

// The place of a tensor's weights in the compute type once its part has been asked for. It does not change, but for
// operands, which are where room was lent, or NULL.
void* decoded_at(const Decoded* decoded, int tensor);

// Makes sure that a part is there. It stays until a part that shares its room is asked for: layer l until layer l + 2
// or the embeddings, the embeddings until a layer.
void decoded_need(Decoded* decoded, int part);

// The weights have changed: whatever is there is out of date.
void decoded_forget(Decoded* decoded);
