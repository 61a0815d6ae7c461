// Weights that are decoded a part of the model at a time (model.h).
#include "../made.h"
#include "model.h"

struct Decoded {
    LayerRing ring;               // the embeddings take all of it
    char *room, *dequant_buffer;  // dequant_buffer: the caller's, for operands; or NULL
    bool last_is_there;           // the last layernorm
    int64_t* place;  // (count) byte in `room`, or for operands in dequant_buffer; -1: the tensor is read in place
};

enum DecodedKind { AS_STORED, DECODED, OPERAND };

static DecodedKind decoded_kind(const Arena* a, const Plan* plan, int t) {
    const FormatRow* weights = launch_of(plan, t)->rows.weights;
    if (serves_directly(weights, a->type)) return AS_STORED;
    return a->slot && a->slot[t] > 0 && format_is_operand(weights) ? OPERAND : DECODED;
}

// Lays out the tensors of a kind: those of a layer one after another, two layers in turn, which the embeddings share,
// then the last layernorm. Sets the bytes in place[t] at which these tensors begin, and returns the bytes of all.
static int64_t parts_room(const Arena* a, const Plan* plan, DecodedKind kind, int64_t* place) {
    const int layers = a->layers, embeddings = part_embeddings(layers), last = part_final(layers);
    const int64_t element_bytes = a->type == OPTIM_FP32 ? 4 : 2;
    int64_t *used = (int64_t*)memory_zero((size_t)layers + 2, sizeof(int64_t)), layer = 0;
    for (int t = 0; t < a->count; t++) {
        int64_t* in = &used[a->part[t]];
        if (decoded_kind(a, plan, t) != kind) continue;
        place[t] = *in;
        *in += tensor_padded(&a->tensors[t]) * element_bytes;
    }
    for (int l = 0; l < layers; l++) layer = used[l] > layer ? used[l] : layer;
    const int64_t two = (layers > 1 ? 2 : 1) * layer, whole = used[embeddings];
    const int64_t shared = two > whole ? two : whole, bytes = shared + used[last];
    for (int t = 0; t < a->count; t++) {
        const int part = a->part[t];
        if (decoded_kind(a, plan, t) != kind) continue;
        place[t] += part < layers ? part % 2 * layer : part == last ? shared : 0;
    }
    free(used);
    return bytes;
}

// Sets Decoded::place.
static DecodedBytes decoded_places(const Arena* a, const Plan* plan, int64_t* place) {
    for (int t = 0; t < a->count; t++) place[t] = -1;
    return {parts_room(a, plan, DECODED, place), parts_room(a, plan, OPERAND, place)};
}

DecodedBytes decoded_bytes(const Arena* a, const OptimConfig* config) {
    int64_t* place = (int64_t*)memory_take((size_t)a->count * sizeof(int64_t) + 1);
    Plan* plan = plan_ranges(config, a->tensors, a->count);
    const DecodedBytes bytes = decoded_places(a, plan, place);
    plan_free(plan);
    free(place);
    return bytes;
}

Decoded* decoded_open(Arena* a) {
    Decoded* d = (Decoded*)memory_zero(1, sizeof(Decoded));
    ring_open(&d->ring, a->dev, 2, false);
    d->place = (int64_t*)memory_zero((size_t)a->count + 1, sizeof(int64_t));
    const int64_t bytes = decoded_places(a, a->optim->plan, d->place).room;
    d->room = (char*)device_alloc(a->dev, bytes, &a->memory.weights);
    return d;
}

void decoded_close(Decoded* d) {
    if (!d) return;
    device_free(d->ring.dev, d->room);
    free(d->place), free(d);
}

const uint8_t* arena_codes(const Arena* a, int t) {
    const bool reads = a->decoded && decoded_kind(a, a->optim->plan, t) == OPERAND;
    return reads ? optim_codes(a->optim, t).codes : nullptr;
}

void arena_dequant_buffer(const Arena* a, void* buffer) {
    if (!a->decoded) return;
    if (a->decoded->dequant_buffer != buffer) decoded_forget(a->decoded);
    a->decoded->dequant_buffer = (char*)buffer;
}

void* decoded_at(const Arena* a, int t) {
    const DecodedKind kind = decoded_kind(a, a->optim->plan, t);
    if (kind == AS_STORED) return (void*)optim_stored_weights(a->optim, t);
    char* room = kind == OPERAND ? a->decoded->dequant_buffer : a->decoded->room;
    return room ? room + a->decoded->place[t] : nullptr;
}

void decoded_need(const Arena* a, int part) {
    Decoded* d = a->decoded;
    const bool last = part == part_final(a->layers);
    bool takes_room = false;
    for (int t = 0; t < a->count && d; t++) takes_room = takes_room || (a->part[t] == part && d->place[t] >= 0);
    if (!takes_room) return;
    if (last ? d->last_is_there : !ring_fetch(&d->ring, part, part == part_embeddings(a->layers))) return;
    d->last_is_there = d->last_is_there || last;
    for (int t = 0; t < a->count; t++) {
        void* to = a->part[t] == part && d->place[t] >= 0 ? decoded_at(a, t) : nullptr;
        if (to) optim_decode_tensor(a->optim, t, to);
    }
}

void decoded_forget(Decoded* d) {
    if (!d) return;
    ring_forget(&d->ring);
    d->last_is_there = false;
}
