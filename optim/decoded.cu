// See decoded.h.
#include "decoded.h"

#include <string.h>

#include "plan.h"
#include "storage.h"

struct Decoded {
    const Device* dev;
    const Optim* optim;
    int *part, *first;  // (count) the part of each tensor; (layers + 3) tensors of a part, as indices into `order`
    int* order;         // (count) tensors by part
    int count, layers;
    void** at;  // (count)
    char* room;
    bool* there;  // (layers + 2) parts that are decoded and up to date
};

// Finds the place of each tensor in the room, in bytes from its beginning; -1: it is read where it is stored. Returns
// the bytes of the room.
static int64_t decoded_places(const OptimConfig* config, const OptimTensor* tensors, const int* part, int count,
                              int layers, OptimType compute, int64_t* place) {
    const int64_t element = compute_row(compute)->stream[0].bits / 8;
    int64_t *used = (int64_t*)memory_zero((size_t)layers + 2, sizeof(int64_t)), layer = 0;
    Plan* plan = plan_ranges(config, tensors, count);
    for (int t = 0; t < count; t++) {
        const FormatRow* weights = config_rows(&plan->launch[plan->launch_of[t]].config).weights;
        place[t] = -1;
        if (strcmp(weights->stream[0].dtype, compute_row(compute)->stream[0].dtype) == 0) continue;
        place[t] = used[part[t]];
        used[part[t]] += tensor_padded(&tensors[t]) * element;
    }
    for (int l = 0; l < layers; l++) layer = used[l] > layer ? used[l] : layer;
    const int64_t embeddings = used[decoded_embeddings(layers)];
    const int64_t shared = 2 * layer > embeddings ? 2 * layer : embeddings;
    for (int t = 0; t < count; t++) {
        if (place[t] < 0) continue;
        if (part[t] < layers) place[t] += part[t] % 2 * layer;
        if (part[t] == decoded_final(layers)) place[t] += shared;
    }
    const int64_t bytes = shared + used[decoded_final(layers)];
    plan_free(plan);
    free(used);
    return bytes;
}

int64_t decoded_bytes(const OptimConfig* config, const OptimTensor* tensors, const int* part, int count, int layers,
                      OptimType compute) {
    int64_t* place = (int64_t*)memory_take((size_t)count * sizeof(int64_t) + 1);
    const int64_t bytes = decoded_places(config, tensors, part, count, layers, compute, place);
    free(place);
    return bytes;
}

Decoded* decoded_open(const Device* dev, const Optim* optim, const OptimConfig* config, const OptimTensor* tensors,
                      const int* part, int count, int layers, OptimType compute) {
    Decoded* d = (Decoded*)memory_zero(1, sizeof(Decoded));
    d->dev = dev, d->optim = optim;
    d->count = count, d->layers = layers;
    d->part = (int*)memory_take((size_t)count * sizeof(int) + 1);
    d->order = (int*)memory_take((size_t)count * sizeof(int) + 1);
    d->first = (int*)memory_zero((size_t)layers + 3, sizeof(int));
    d->at = (void**)memory_zero((size_t)count + 1, sizeof(void*));
    d->there = (bool*)memory_zero((size_t)layers + 2, sizeof(bool));
    memcpy(d->part, part, (size_t)count * sizeof(int));
    int64_t* place = (int64_t*)memory_take((size_t)count * sizeof(int64_t) + 1);
    d->room = (char*)device_alloc(dev, decoded_places(config, tensors, part, count, layers, compute, place));
    int used = 0;
    for (int p = 0; p < layers + 2; p++) {
        d->first[p] = used;
        for (int t = 0; t < count; t++) {
            if (part[t] != p) continue;
            d->at[t] = place[t] < 0 ? (void*)optim_stored_weights(optim, t) : d->room + place[t];
            if (place[t] >= 0) d->order[used++] = t;
        }
    }
    d->first[layers + 2] = used;
    free(place);
    return d;
}

void decoded_close(Decoded* d) {
    if (!d) return;
    device_free(d->dev, d->room);
    free(d->part), free(d->order), free(d->first), free(d->at), free(d->there);
    free(d);
}

void* decoded_at(const Decoded* d, int tensor) {
    return d->at[tensor];
}

// Parts whose room overlaps are no longer there.
static void decoded_evict(Decoded* d, int part) {
    const int embeddings = decoded_embeddings(d->layers);
    for (int p = 0; p <= embeddings; p++) {
        const bool same_half = part < d->layers && p < d->layers && p % 2 == part % 2;
        if (part == embeddings || p == embeddings || same_half) d->there[p] = false;
    }
}

void decoded_need(Decoded* d, int part) {
    if (d->there[part]) return;
    const bool has_room = d->first[part] < d->first[part + 1];
    if (part != decoded_final(d->layers) && has_room) decoded_evict(d, part);
    for (int i = d->first[part]; i < d->first[part + 1]; i++) {
        optim_decode_tensor(d->optim, d->order[i], d->at[d->order[i]]);
    }
    d->there[part] = true;
}

void decoded_forget(Decoded* d) {
    memset(d->there, 0, ((size_t)d->layers + 2) * sizeof(bool));
}
