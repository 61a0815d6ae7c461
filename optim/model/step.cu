// The step of a model: over the whole arena, or part by part (model.h), after the backward pass or inside it; and the
// exchange of gradients between ranks that comes before.
#include <assert.h>

#include "../../kernels/fp8_scales.cuh"
#include "../../kernels/profile.h"
#include "../../kernels/ranks/shard.cuh"
#include "model.h"

PartList part_list(const Arena* a, int part) {
    PartList list = {};
    for (int t = 0; t < a->count; t++) {
        if (a->part[t] != part) continue;
        assert(list.count < PART_TENSORS);
        int i = list.count++;
        for (; i > 0 && a->tensors[list.tensor[i - 1]].offset > a->tensors[t].offset; i--) {
            list.tensor[i] = list.tensor[i - 1];
        }
        list.tensor[i] = t;
    }
    return list;
}

// Computes the squares of gradients that begin at `grads`, if there are no other ranks that have agreed on their sums'.
static void arena_squares(const Arena* a, const void* grads, int64_t first, int64_t tiles) {
    const Device* dev = a->dev;
    if (a->shard) return;
    if (a->grads_bf16) tile_squares(dev, dev->stream, a->squares + first, (const bf16*)grads, tiles);
    if (!a->grads_bf16) tile_squares(dev, dev->stream, a->squares + first, (const float*)grads, tiles);
}

// Steps a part with one factor or, with `each`, one for each tensor.
static void part_step(const Arena* a, int part, const PartList* list, const float* factor, bool each) {
    const int some = each ? 1 : list->count;
    offload_take(a->offload, part);
    for (int i = 0; i < list->count; i += some) {
        optim_step_tensors(a->optim, list->tensor + i, some, factor + i, a->lr, a->step);
    }
    offload_give(a->offload, part);
}

// Computes the norm of a part's gradients and steps the part.
static void release_part(const Arena* a, int part) {
    const PartList list = part_list(a, part);
    const PartClip clip = {a->clip_by, a->clip, a->scalars + SCALAR_LOSS, a->last_norm, a->part_square + part,
                           a->factor};
    PartTiles tiles = {{}, {}, list.count};
    named(a->dev, "optimizer");
    for (int i = 0; i < list.count; i++) {
        const int t = list.tensor[i];
        tiles.first[i] = a->tensors[t].offset / TILE_ELEMENTS;
        tiles.tiles[i] = tensor_padded(&a->tensors[t]) / TILE_ELEMENTS;
        arena_squares(a, arena_at(a, a->grads, t, a->grads_bf16 ? 2 : 4), tiles.first[i], tiles.tiles[i]);
    }
    part_norm(a->dev, clip, a->squares, tiles);
    part_step(a, part, &list, a->factor, a->clip_by == CLIP_TENSOR);
}

void arena_begin(Arena* a, float* scalars, float clip, float lr, int64_t step) {
    a->clip = clip, a->lr = lr, a->step = step, a->scalars = scalars;
    a->stepping = a->releases;
    if (!a->fp8) return;
    fp8_begin(a->dev, a->fp8, step);
    if (!a->scales_apart) return;
    shard_all_reduce(a->shard, a->fp8->amax, a->fp8->slots, SHARD_MAX);
    fp8_event(a->dev, a->fp8, FP8_AGREE);
}

void arena_before_attention(const Arena* a) {
    a->grads_bf16 ? shard_reduce_waiting<bf16>(a->shard) : shard_reduce_waiting<float>(a->shard);
}

// Waits for the sums of a part's gradients, and steps what this rank keeps of the part.
static void arena_step_sums(const Arena* a, int part) {
    if (part <= a->layers) shard_summed(a->shard, part);
    release_part(a, part);
}

void arena_layer_begin(const Arena* a, int part) {
    if (a->stepping && a->shard && part + 2 < a->layers) return arena_step_sums(a, part + 2);
    shard_grads_free(a->shard, part);
}

// Begins to sum a part's gradients over the ranks; the last layernorm's are summed with the embeddings'. If they are
// released, a layer is stepped when its room is needed again, or at the end, since a sum takes some time.
static void arena_sum(const Arena* a, int part) {
    const int embeddings = part_embeddings(a->layers), final = part_final(a->layers);
    const bool steps = a->stepping;
    if (steps && part == final) shard_agree(a->shard, a->scalars);  // on the loss, before they step the first part
    if (steps && part == 0 && a->layers > 1) arena_step_sums(a, 1);
    if (steps && part == embeddings) arena_step_sums(a, 0);
    if (part != final) a->grads_bf16 ? shard_reduce<bf16>(a->shard, part) : shard_reduce<float>(a->shard, part);
    if (steps && part == embeddings) arena_step_sums(a, embeddings), arena_step_sums(a, final);
}

void arena_layer_end(const Arena* a, int part) {
    if (a->shard) arena_sum(a, part);
    if (a->stepping && !a->shard) release_part(a, part);
    const int layer = part == part_final(a->layers) ? a->layers : part == part_embeddings(a->layers) ? 0 : part;
    if (layer > 0) arena_need(a, layer - 1, layer - 2);
}

void offload_step(const Arena* a, const float* factor) {
    for (int i = 0; i < a->layers + 2; i++) {
        const int part = offload_part(a->offload, i);
        const PartList list = part < 0 ? PartList{} : part_list(a, part);
        if (part >= 0) part_step(a, part, &list, factor, false);
    }
}

void arena_step(Arena* a) {
    float* scalars = a->scalars;
    if (!a->stepping) shard_agree(a->shard, scalars);  // also waits for the last sums
    if (a->by_parts) {
        for (int part = 0; part <= part_final(a->layers) && !a->stepping; part++) release_part(a, part);
        const PartNormEnd end = {scalars, scalars + SCALAR_LEFT, a->last_norm, a->part_square, a->layers + 2};
        for_each(a->dev, end, 1);
    } else {
        const int64_t tiles = a->elements / TILE_ELEMENTS;
        named(a->dev, "gradient norm");
        arena_squares(a, a->grads, 0, tiles);
        norm_of_tiles(a->dev, scalars + SCALAR_NORM, a->squares, tiles, a->clip, scalars);
        named(a->dev, "optimizer");
        const float* factor = scalars + SCALAR_FACTOR;
        if (a->offload) offload_step(a, factor);
        if (!a->offload) optim_step(a->optim, nullptr, factor, a->lr, a->step);
    }
    a->stepping = false;
    arena_changed(a);
    if (!a->fp8) return;
    shard_all_reduce(a->shard, a->fp8->amax, a->fp8->slots, SHARD_MAX);
    shard_all_reduce(a->shard, a->fp8->amax + a->fp8->slots, 1, SHARD_SUM);
    fp8_event(a->dev, a->fp8, FP8_END, scalars + SCALAR_FACTOR, scalars + SCALAR_SATURATED);
}
