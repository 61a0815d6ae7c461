// See decoded.h.
#include "decoded.h"

#include <string.h>

#include "plan.h"
#include "storage.h"

struct Decoded {
    const Device* dev;
    const Optim* optim;
    ModelParts model;
    char *room, *dequant_buffer;  // dequant_buffer: the caller's, for operands; or NULL
    int64_t* place;  // (count) byte in `room`, or for operands in dequant_buffer; -1: the tensor is read in place
    void** at;       // (count) address of the weights; NULL for operands
    const uint8_t** codes;  // (count) codes of operands; NULL for others
    bool* fills;            // (layers + 2) parts that take room
    bool* there;            // (layers + 2) parts that are decoded and up to date
};

enum DecodedKind { AS_STORED, DECODED, OPERAND };

static DecodedKind decoded_kind(const Plan* plan, const ModelParts* model, int t) {
    const FormatRow* weights = plan->launch[plan->launch_of[t]].rows.weights;
    if (serves_directly(weights, model->compute)) return AS_STORED;
    return model->slot && model->slot[t] > 0 && format_is_operand(weights) ? OPERAND : DECODED;
}

// Sets the place of each tensor in the room, or in the dequant_buffer (Decoded::place). Returns the bytes of both.
static DecodedBytes decoded_places(const Plan* plan, const ModelParts* model, int64_t* place) {
    const int layers = model->layers;
    const int64_t element = compute_row(model->compute)->stream[0].bits / 8;
    int64_t *used = (int64_t*)memory_zero(2 * ((size_t)layers + 2), sizeof(int64_t)), *operands = used + layers + 2;
    int64_t layer = 0, operand_layer = 0;
    for (int t = 0; t < model->count; t++) {
        const DecodedKind kind = decoded_kind(plan, model, t);
        int64_t* in = (kind == OPERAND ? operands : used) + model->part[t];
        place[t] = kind == AS_STORED ? -1 : *in;
        if (kind != AS_STORED) *in += tensor_padded(&model->tensors[t]) * element;
    }
    for (int l = 0; l < layers; l++) {
        layer = used[l] > layer ? used[l] : layer;
        operand_layer = operands[l] > operand_layer ? operands[l] : operand_layer;
    }
    const int64_t embeddings = used[decoded_embeddings(layers)];
    const int64_t shared = 2 * layer > embeddings ? 2 * layer : embeddings;
    for (int t = 0; t < model->count; t++) {
        if (place[t] < 0) continue;
        const int64_t half = decoded_kind(plan, model, t) == OPERAND ? operand_layer : layer;
        if (model->part[t] < layers) place[t] += model->part[t] % 2 * half;
        if (model->part[t] == decoded_final(layers)) place[t] += shared;
    }
    const DecodedBytes bytes = {shared + used[decoded_final(layers)], 2 * operand_layer};
    free(used);
    return bytes;
}

DecodedBytes decoded_bytes(const OptimConfig* config, const ModelParts* model) {
    int64_t* place = (int64_t*)memory_take((size_t)model->count * sizeof(int64_t) + 1);
    Plan* plan = plan_ranges(config, model->tensors, model->count);
    const DecodedBytes bytes = decoded_places(plan, model, place);
    plan_free(plan);
    free(place);
    return bytes;
}

Decoded* decoded_open(const Optim* optim, const ModelParts* model) {
    Decoded* d = (Decoded*)memory_zero(1, sizeof(Decoded));
    const OptimParts parts = optim_parts(optim);
    const size_t count = (size_t)model->count + 1, all = (size_t)model->layers + 2;
    d->dev = parts.dev, d->optim = optim, d->model = *model;
    d->place = (int64_t*)memory_zero(count, sizeof(int64_t));
    d->at = (void**)memory_zero(count, sizeof(void*));
    d->codes = (const uint8_t**)memory_zero(count, sizeof(uint8_t*));
    d->fills = (bool*)memory_zero(all, sizeof(bool));
    d->there = (bool*)memory_zero(all, sizeof(bool));
    d->room = (char*)device_alloc(d->dev, decoded_places(parts.plan, model, d->place).room);
    for (int t = 0; t < model->count; t++) {
        const DecodedKind kind = decoded_kind(parts.plan, model, t);
        if (kind == AS_STORED) d->at[t] = (void*)optim_stored_weights(optim, t);
        if (kind == DECODED) d->at[t] = d->room + d->place[t], d->fills[model->part[t]] = true;
        if (kind == OPERAND) d->codes[t] = optim_codes(optim, t).codes;
    }
    return d;
}

void decoded_close(Decoded* d) {
    if (!d) return;
    device_free(d->dev, d->room);
    free(d->place), free(d->at), free(d->codes), free(d->fills), free(d->there), free(d);
}

const uint8_t* decoded_codes(const Decoded* d, int tensor) {
    return d->codes[tensor];
}

void decoded_dequant_buffer(Decoded* d, void* room) {
    if (d->dequant_buffer != room) decoded_forget(d);
    d->dequant_buffer = (char*)room;
}

void* decoded_at(const Decoded* d, int tensor) {
    if (!d->codes[tensor]) return d->at[tensor];
    return d->dequant_buffer ? d->dequant_buffer + d->place[tensor] : nullptr;
}

// Marks parts whose room overlaps with that of `part` as not there.
static void decoded_evict(Decoded* d, int part) {
    const int layers = d->model.layers, embeddings = decoded_embeddings(layers);
    for (int p = 0; p <= embeddings; p++) {
        const bool same_half = part < layers && p < layers && p % 2 == part % 2;
        if ((d->fills[part] && (part == embeddings || p == embeddings)) || same_half) d->there[p] = false;
    }
}

void decoded_need(Decoded* d, int part) {
    const ModelParts* model = &d->model;
    if (d->there[part]) return;
    auto has_room = [&](int t) { return model->part[t] == part && d->place[t] >= 0; };
    bool any = false;
    for (int t = 0; t < model->count; t++) any = any || has_room(t);
    if (any && part != decoded_final(model->layers)) decoded_evict(d, part);
    for (int t = 0; t < model->count; t++) {
        void* to = has_room(t) ? decoded_at(d, t) : nullptr;
        if (to) optim_decode_tensor(d->optim, t, to);
    }
    d->there[part] = true;
}

void decoded_forget(Decoded* d) {
    memset(d->there, 0, ((size_t)d->model.layers + 2) * sizeof(bool));
}
