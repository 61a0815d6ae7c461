// See release.h.
#include "release.h"

#include <string.h>

#include "../kernels/ranks/shard.cuh"
#include "decoded.h"
#include "kernel.cuh"
#include "plan.h"

struct Release {
    const Device* dev;
    ReleaseModel model;
    int parts;
    ClipBy by;
    bool grads_bf16;
    double* square;        // (parts) device memory
    float *factor, *last;  // (PART_TENSORS), scalar: device memory
    double* tile_square;   // of the tiles of the part that is stepped: device memory for the largest part
};

int part_tensors(const ModelParts* model, int part, int* tensor) {
    const OptimTensor* tensors = model->tensors;
    int found = 0;
    for (int t = 0; t < model->count; t++) {
        if (model->part[t] != part) continue;
        int i = found++;
        for (; i > 0 && tensors[tensor[i - 1]].offset > tensors[t].offset; i--) tensor[i] = tensor[i - 1];
        tensor[i] = t;
    }
    return found;
}

int64_t release_places(const ModelParts* parts, int64_t* place) {
    const OptimTensor* tensors = parts->tensors;
    const int layers = parts->layers;
    int* order = (int*)memory_zero((size_t)parts->count + 1, sizeof(int));
    int64_t layer = 0, used = 0;
    // All layers have the order of layer 0, so that the padding between tensors, which stays zero, lies in the same
    // places for all layers that share the room.
    const int in_layer = part_tensors(parts, 0, order);
    for (int l = 0; l < layers; l++) {
        const int shift = l * in_layer;  // layers follow each other in the list of tensors
        used = l % 2 * layer;
        for (int i = 0; i < in_layer; i++) {
            place[order[i] + shift] = used;
            used += tensor_padded(&tensors[order[i] + shift]);
        }
        if (l == 0) layer = used;
    }
    used = (layers > 1 ? 2 : 1) * layer;
    for (int p = layers; p < layers + 2; p++) {
        const int rest = part_tensors(parts, p, order);
        for (int i = 0; i < rest; i++) {
            place[order[i]] = used;
            used += tensor_padded(&tensors[order[i]]);
        }
    }
    free(order);
    return used;
}

// Returns the bytes of the allocation for squares, factors and last.
static int64_t numbers_bytes(int parts) {
    return parts * (int64_t)sizeof(double) + (PART_TENSORS + 1) * (int64_t)sizeof(float);
}

static int64_t squares_bytes(const ReleaseModel* model) {
    const ModelParts* parts = &model->parts;
    int64_t most = 0;
    for (int p = 0; p < parts->layers + 2; p++) {
        int64_t elements = 0;
        for (int t = 0; t < parts->count; t++) elements += parts->part[t] == p ? tensor_padded(&parts->tensors[t]) : 0;
        most = elements > most ? elements : most;
    }
    return most / TILE_ELEMENTS * (int64_t)sizeof(double);
}

int64_t release_bytes(const ReleaseModel* model) {
    return aligned_bytes(numbers_bytes(model->parts.layers + 2)) + aligned_bytes(squares_bytes(model));
}

Release* release_open(const Device* dev, const ReleaseModel* model, ClipBy by, bool grads_bf16) {
    Release* r = (Release*)memory_zero(1, sizeof(Release));
    r->dev = dev, r->model = *model;
    r->parts = model->parts.layers + 2, r->by = by, r->grads_bf16 = grads_bf16;
    const int64_t bytes = numbers_bytes(r->parts);
    r->square = (double*)device_alloc(dev, bytes);
    device_zero(dev, r->square, bytes);
    r->factor = (float*)(r->square + r->parts);
    r->last = r->factor + PART_TENSORS;
    r->tile_square = (double*)device_alloc(dev, squares_bytes(model));
    return r;
}

void release_close(Release* r) {
    if (!r) return;
    device_free(r->dev, r->square), device_free(r->dev, r->tile_square);
    free(r);
}

// Computes the norm of a part and its factors from the gradients of its tensors.
template <typename G>
static void release_norm(Release* r, const PartClip& clip, const int* tensor, const void* const* grads, int count) {
    PartTiles tiles = {{}, count};
    int64_t offset[PART_TENSORS];
    for (int i = 0; i < count; i++) {
        const OptimTensor* its = &r->model.parts.tensors[tensor[i]];
        const int64_t end = its->offset + tensor_padded(its);
        const Overlap own = shard_own(r->model.shard, its->offset, end);
        const int64_t before = own.begin - its->offset;
        tile_squares<G>(r->dev, r->tile_square + tiles.first[i] + before / TILE_ELEMENTS, (const G*)grads[i] + before,
                        (own.end - own.begin) / TILE_ELEMENTS);
        tiles.first[i + 1] = tiles.first[i] + (end - its->offset) / TILE_ELEMENTS;
        offset[i] = its->offset;
    }
    shard_part_squares(r->model.shard, r->tile_square, tiles, offset);
    part_norm(r->dev, clip, r->tile_square, tiles);
}

void release_part(Release* r, int part, const void* grads, const int64_t* place, const ReleaseStep* step) {
    const int64_t element = r->grads_bf16 ? 2 : 4;
    const ModelParts* model = &r->model.parts;
    int* tensor = (int*)memory_take((size_t)model->count * sizeof(int));
    const void* its[PART_TENSORS] = {};
    const int count = part_tensors(model, part, tensor);
    assert(count <= PART_TENSORS);
    for (int i = 0; i < count; i++) its[i] = (const char*)grads + place[tensor[i]] * element;
    const PartClip clip = {r->by, step->clip, step->loss, r->last, r->square + part, r->factor};
    r->grads_bf16 ? release_norm<bf16>(r, clip, tensor, its, count) : release_norm<float>(r, clip, tensor, its, count);
    offload_take(r->model.offload, part);
    // The part has one factor, or each tensor has its own.
    const int each = r->by == CLIP_TENSOR ? 1 : count;
    for (int i = 0; i < count; i += each) {
        optim_step_tensors(r->model.optim, tensor + i, its + i, each, r->factor + i, step->lr, step->step);
    }
    free(tensor);
    offload_give(r->model.offload, part);
}

void release_end(Release* r, float* scalars, int left_alone) {
    part_norm_finish(r->dev, scalars, scalars + left_alone, r->last, r->square, r->parts);
}

float release_last(const Release* r) {
    float last;
    copy_to_host(r->dev, &last, r->last, sizeof(last));
    return last;
}

void release_set_last(Release* r, float last) {
    copy_to_device(r->dev, r->last, &last, sizeof(last));
}
