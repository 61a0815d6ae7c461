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
    float *factor, *last;  // (PART_TENSORS), (2) device memory, which part_norm_end sets
    void* scratch;         // of the norm: device memory; with a shard a double for each tile of the largest part
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

bool release_turns(const OptimTensor* tensor, int part, int layers, bool folds) {
    return part < layers && (!folds || tensor->rows > 1);
}

int64_t release_places(const ModelParts* parts, bool folds, int64_t* place) {
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
            if (!release_turns(&tensors[order[i]], l, layers, folds)) continue;
            place[order[i] + shift] = used;
            used += tensor_padded(&tensors[order[i] + shift]);
        }
        if (l == 0) layer = used;
    }
    used = (layers > 1 ? 2 : 1) * layer;
    for (int p = 0; p < layers + 2; p++) {
        const int rest = part_tensors(parts, p, order);
        for (int i = 0; i < rest; i++) {
            if (release_turns(&tensors[order[i]], p, layers, folds)) continue;
            place[order[i]] = used;
            used += tensor_padded(&tensors[order[i]]);
        }
    }
    free(order);
    return used;
}

// Returns the bytes of the allocation for squares, factors and last.
static int64_t numbers_bytes(int parts) {
    return parts * (int64_t)sizeof(double) + (PART_TENSORS + 2) * (int64_t)sizeof(float);
}

static int64_t scratch_bytes(const Device* dev, const ReleaseModel* model) {
    const ModelParts* parts = &model->parts;
    int64_t most = 0;
    if (!model->shard) return part_norm_scratch_bytes(dev);
    for (int p = 0; p < parts->layers + 2; p++) {
        int64_t elements = 0;
        for (int t = 0; t < parts->count; t++) elements += parts->part[t] == p ? tensor_padded(&parts->tensors[t]) : 0;
        most = elements > most ? elements : most;
    }
    return most / TILE_ELEMENTS * (int64_t)sizeof(double);
}

int64_t release_bytes(const Device* dev, const ReleaseModel* model) {
    return aligned_bytes(numbers_bytes(model->parts.layers + 2)) + aligned_bytes(scratch_bytes(dev, model));
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
    r->scratch = device_alloc(dev, scratch_bytes(dev, model));
    return r;
}

void release_close(Release* r) {
    if (!r) return;
    device_free(r->dev, r->square), device_free(r->dev, r->scratch);
    free(r);
}

// Computes the norm of a part and its factors.
template <typename G>
static void release_norm(Release* r, const PartClip& clip, const PartGrads& its, const int* tensor) {
    if (!r->model.shard) return part_norm<G>(r->dev, clip, its, r->scratch);
    int64_t offset[PART_TENSORS] = {};
    for (int i = 0; i < its.count; i++) offset[i] = r->model.parts.tensors[tensor[i]].offset;
    shard_part_norm<G>(r->model.shard, clip, its, offset, (double*)r->scratch);
}

void release_part(Release* r, int part, const void* grads, const int64_t* place, const ReleaseStep* step) {
    const int64_t element = r->grads_bf16 ? 2 : 4;
    const int layers = r->parts - 2;
    const ModelParts* model = &r->model.parts;
    int tensor[PART_TENSORS], *all = (int*)memory_take((size_t)model->count * sizeof(int));
    const int found = part_tensors(model, part, all);
    PartGrads its = {};
    assert(found <= PART_TENSORS);
    for (int i = 0; i < found; i++) {
        const int t = all[i];
        if (!step->last && !release_turns(&model->tensors[t], part, layers, true)) continue;
        tensor[its.count] = t;
        its.grads[its.count] = (const char*)grads + place[t] * element;
        its.n[its.count++] = model->tensors[t].rows * model->tensors[t].cols;
    }
    free(all);
    // Ranks agree on the loss before the first part of the last micro-batch; earlier micro-batches have none to check.
    const bool follows = part < layers && step->micro_batch > 1;
    const float* loss = step->last ? step->loss : nullptr;
    const PartClip clip = {r->by, step->clip, loss, r->last, r->square + part, r->factor, follows};
    if (its.count > 0)
        r->grads_bf16 ? release_norm<bf16>(r, clip, its, tensor) : release_norm<float>(r, clip, its, tensor);
    offload_take(r->model.offload, part);
    if (!step->last) {
        optim_fold_tensors(r->model.optim, tensor, its.grads, its.count, r->factor, step->step, step->micro_batch);
        return offload_give(r->model.offload, part);
    }
    // The part has one factor, or each tensor has its own.
    const int each = r->by == CLIP_TENSOR ? 1 : its.count;
    for (int i = 0; i < its.count; i += each) {
        optim_step_tensors(r->model.optim, tensor + i, its.grads + i, each, r->factor + i, step->lr, step->step);
    }
    offload_give(r->model.offload, part);
}

void release_end(Release* r, float* scalars, int left_alone, const ReleaseStep* step) {
    part_norm_finish(r->dev, scalars, scalars + left_alone, r->last, r->square, r->parts);
    optim_step_matrices(r->model.optim, r->last + 1, step->lr, step->step);
}

float release_last(const Release* r) {
    float last;
    copy_to_host(r->dev, &last, r->last, sizeof(last));
    return last;
}

void release_set_last(Release* r, float last) {
    copy_to_device(r->dev, r->last, &last, sizeof(last));
}
