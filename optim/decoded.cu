// See decoded.h.
#include "decoded.h"

#include <string.h>

#include "bytes.h"
#include "plan.h"
#include "storage.h"

struct Decoded {
    const Device* dev;
    const Optim* optim;
    int *part, *first;  // (count) the part of each tensor; (layers + 3) tensors of a part, as indices into `order`
    int* order;         // (count) tensors by part
    int count, layers;
    char *room, *lent;      // lent: for operands, or NULL
    int64_t* place;         // (count) bytes from the beginning of one of them
    void** at;              // (count) NULL for operands
    const uint8_t** codes;  // (count) of operands
    bool* fills;            // (layers + 2) parts that take some of the room
    bool* there;            // (layers + 2) parts that are decoded and up to date
};

enum DecodedKind { AS_STORED, DECODED, OPERAND };

static DecodedKind decoded_kind(const Plan* plan, const DecodedModel* model, int t) {
    const FormatRow* weights = config_rows(&plan->launch[plan->launch_of[t]].config).weights;
    if (serves_directly(weights, model->compute)) return AS_STORED;
    return model->slot && model->slot[t] > 0 && format_is_operand(weights) ? OPERAND : DECODED;
}

// Finds the place of each tensor in the room, or in the lent one, in bytes from its beginning; -1: it is read where it
// is stored. Returns the bytes of both.
static DecodedBytes decoded_places(const OptimConfig* config, const DecodedModel* model, int64_t* place) {
    const int layers = model->layers;
    const int64_t element = compute_row(model->compute)->stream[0].bits / 8;
    int64_t *used = (int64_t*)memory_zero(2 * ((size_t)layers + 2), sizeof(int64_t)), *lent = used + layers + 2;
    int64_t layer = 0, lent_layer = 0;
    Plan* plan = plan_ranges(config, model->tensors, model->count);
    for (int t = 0; t < model->count; t++) {
        const DecodedKind kind = decoded_kind(plan, model, t);
        int64_t* in = (kind == OPERAND ? lent : used) + model->part[t];
        place[t] = kind == AS_STORED ? -1 : *in;
        if (kind != AS_STORED) *in += tensor_padded(&model->tensors[t]) * element;
    }
    for (int l = 0; l < layers; l++) {
        layer = used[l] > layer ? used[l] : layer;
        lent_layer = lent[l] > lent_layer ? lent[l] : lent_layer;
    }
    const int64_t embeddings = used[decoded_embeddings(layers)];
    const int64_t shared = 2 * layer > embeddings ? 2 * layer : embeddings;
    for (int t = 0; t < model->count; t++) {
        if (place[t] < 0) continue;
        const int64_t half = decoded_kind(plan, model, t) == OPERAND ? lent_layer : layer;
        if (model->part[t] < layers) place[t] += model->part[t] % 2 * half;
        if (model->part[t] == decoded_final(layers)) place[t] += shared;
    }
    const DecodedBytes bytes = {shared + used[decoded_final(layers)], 2 * lent_layer};
    plan_free(plan);
    free(used);
    return bytes;
}

DecodedBytes decoded_bytes(const OptimConfig* config, const DecodedModel* model) {
    int64_t* place = (int64_t*)memory_take((size_t)model->count * sizeof(int64_t) + 1);
    const DecodedBytes bytes = decoded_places(config, model, place);
    free(place);
    return bytes;
}

Decoded* decoded_open(const Device* dev, const Optim* optim, const OptimConfig* config, const DecodedModel* model) {
    Decoded* d = (Decoded*)memory_zero(1, sizeof(Decoded));
    const int count = model->count, layers = model->layers;
    d->dev = dev, d->optim = optim;
    d->count = count, d->layers = layers;
    d->part = (int*)memory_take((size_t)count * sizeof(int) + 1);
    d->order = (int*)memory_take((size_t)count * sizeof(int) + 1);
    d->first = (int*)memory_zero((size_t)layers + 3, sizeof(int));
    d->at = (void**)memory_zero((size_t)count + 1, sizeof(void*));
    d->codes = (const uint8_t**)memory_zero((size_t)count + 1, sizeof(uint8_t*));
    d->fills = (bool*)memory_zero((size_t)layers + 2, sizeof(bool));
    d->there = (bool*)memory_zero((size_t)layers + 2, sizeof(bool));
    memcpy(d->part, model->part, (size_t)count * sizeof(int));
    d->place = (int64_t*)memory_take((size_t)count * sizeof(int64_t) + 1);
    d->room = (char*)device_alloc(dev, decoded_places(config, model, d->place).room);
    Plan* plan = plan_ranges(config, model->tensors, count);
    int used = 0;
    for (int p = 0; p < layers + 2; p++) {
        d->first[p] = used;
        for (int t = 0; t < count; t++) {
            if (d->part[t] != p) continue;
            const DecodedKind kind = decoded_kind(plan, model, t);
            if (kind == AS_STORED) d->at[t] = (void*)optim_stored_weights(optim, t);
            if (kind == DECODED) d->at[t] = d->room + d->place[t], d->fills[p] = true;
            if (kind == OPERAND) d->codes[t] = optim_codes(optim, t).codes;
            if (kind != AS_STORED) d->order[used++] = t;
        }
    }
    d->first[layers + 2] = used;
    plan_free(plan);
    return d;
}

void decoded_close(Decoded* d) {
    if (!d) return;
    device_free(d->dev, d->room);
    free(d->part), free(d->order), free(d->first), free(d->place), free(d->at), free(d->codes);
    free(d->fills), free(d->there);
    free(d);
}

const uint8_t* decoded_codes(const Decoded* d, int tensor) {
    return d->codes[tensor];
}

void decoded_lend(Decoded* d, void* room) {
    if (d->lent != room) decoded_forget(d);
    d->lent = (char*)room;
}

void* decoded_at(const Decoded* d, int tensor) {
    if (!d->codes[tensor]) return d->at[tensor];
    return d->lent ? d->lent + d->place[tensor] : nullptr;
}

// Parts whose room overlaps are no longer there.
static void decoded_evict(Decoded* d, int part) {
    const int embeddings = decoded_embeddings(d->layers);
    for (int p = 0; p <= embeddings; p++) {
        const bool same_half = part < d->layers && p < d->layers && p % 2 == part % 2;
        if ((d->fills[part] && (part == embeddings || p == embeddings)) || same_half) d->there[p] = false;
    }
}

void decoded_need(Decoded* d, int part) {
    if (d->there[part]) return;
    const bool has_room = d->first[part] < d->first[part + 1];
    if (part != decoded_final(d->layers) && has_room) decoded_evict(d, part);
    for (int i = d->first[part]; i < d->first[part + 1]; i++) {
        void* to = decoded_at(d, d->order[i]);
        if (to) optim_decode_tensor(d->optim, d->order[i], to);
    }
    d->there[part] = true;
}

void decoded_forget(Decoded* d) {
    memset(d->there, 0, ((size_t)d->layers + 2) * sizeof(bool));
}
