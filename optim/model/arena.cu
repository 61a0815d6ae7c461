// See arena.h: how weights, gradients and states are kept, and how weights are set.
#include "../../kernels/fp8_scales.cuh"
#include "../../kernels/random.h"
#include "../../kernels/ranks/shard.cuh"
#include "../made.h"
#include "model.h"

void arena_tensors(Arena* a, int count) {
    a->count = count;
    a->tensors = (OptimTensor*)memory_zero(count, sizeof(OptimTensor));
    a->part = (int*)memory_zero(count, sizeof(int));
    a->order = (int*)memory_zero(count, sizeof(int));
    a->place = (int64_t*)memory_zero(count, sizeof(int64_t));
    a->slot = (int*)memory_zero(count, sizeof(int));
}

// Lists the tensors part by part, and places gradients that are packed or take turns in this order: layers two apart in
// one place, and the rest behind them. All layers have the order of layer 0 in the arena, so that the padding between
// tensors, which stays zero, lies in the same places for all layers that share a place.
static void arena_order(Arena* a) {
    const PartList layer = part_list(a, 0);
    int64_t of_layer = 0;
    int listed = 0;
    for (int p = 0; p < a->layers + 2; p++) {
        // Layers follow each other in the list of tensors.
        const PartList list = p < a->layers ? layer : part_list(a, p);
        if (p <= a->layers) a->packed = (p < a->layers ? p % 2 : p > 1 ? 2 : p) * of_layer;
        for (int i = 0; i < list.count; i++) {
            const int t = a->order[listed++] = list.tensor[i] + (p < a->layers ? p * layer.count : 0);
            a->place[t] = a->packed;
            a->packed += tensor_padded(&a->tensors[t]);
        }
        if (p == 0) of_layer = a->packed;
    }
}

// Plans which slices of the layers this rank keeps.
static void spread_ranks(const Arena* a, OptimConfig* config) {
    Shard* s = a->shard;
    const long long tiles = a->elements / TILE_ELEMENTS, ranks = s->comm.world;
    if (tiles < ranks)
        user_error("the model has %lld tiles of weights for %lld ranks; start %lld", tiles, ranks, tiles);
    s->gradient_bytes = a->grads_bf16 ? 2 : 4;
    s->weight_bytes = a->type == OPTIM_FP32 ? 4 : 2;
    const int64_t tile = TILE_ELEMENTS * s->gradient_bytes, part = PEER_PART / tile;
    const int64_t most = (s->comm.peers ? 8192 : (64 << 20) / tile) / s->comm.members;  // 64 MiB of all
    s->piece = !a->dev->gpu ? 16 : s->comm.peers && part < most ? part : most < 1 ? 1 : most;
    SliceTensor* tensors = (SliceTensor*)memory_take((size_t)a->count * sizeof(SliceTensor));
    int64_t *grain = (int64_t*)memory_zero(2 * (size_t)a->count, sizeof(int64_t)), *cost = grain + a->count;
    optim_slice(config, a->tensors, a->count, grain, cost);
    const bool splits = shard_splits(s, SHARD_STATES);
    for (int i = 0; i < a->count; i++) {
        const int t = a->order[i];
        tensors[i] = {a->tensors[t].offset / TILE_ELEMENTS, tensor_padded(&a->tensors[t]) / TILE_ELEMENTS,
                      a->part[t] < a->layers ? a->part[t] : a->layers, splits ? grain[t] : 1, splits ? cost[t] : 1};
    }
    shard_plan(s, tensors, a->count);
    if (splits) config->runs = s->own, config->run_count = s->own_runs;
    free(grain), free(tensors);
}

void arena_spread(Arena* a, OptimConfig* config) {
    arena_order(a);
    if (a->shard) spread_ranks(a, config);
    config->keeps_copy = shard_splits(a->shard, SHARD_STATES);  // for the others, or to be gathered by them
    const int64_t bytes = decoded_bytes(a, config).dequant_buffer;
    a->dequant_bytes = config->keeps_copy ? 0 : bytes;
    a->scales_apart = config->keeps_copy && bytes > 0;
}

bool arena_may_part(const Arena* a, const OptimConfig* config, char* why) {
    char reason[DATA_ERROR_BYTES];
    const bool whole = !config->offload && a->clip_by == CLIP_STEP;
    if (whole || optim_releases(config, a->tensors, a->count, reason)) return true;
    if (config->offload) return data_error(why, "--offload states goes by layers, and %s; type --offload none", reason);
    return data_error(why, "--clip-by %s: %s; type --clip-by step", a->clip_by == CLIP_LAST ? "last" : "tensor",
                      reason);
}

bool arena_may_release(const Arena* a, const OptimConfig* config, double clip, int64_t tokens, int64_t micro,
                       char* why) {
    char reason[DATA_ERROR_BYTES];
    if (!optim_releases(config, a->tensors, a->count, reason)) return data_error(why, "%s; type --release off", reason);
    if (tokens != micro) {
        return data_error(why,
                          "the gradients of several micro-batches need room for their sum; type --release off, or "
                          "--tokens-per-step %lld",
                          (long long)micro);
    }
    if (clip <= 0 || a->clip_by != CLIP_STEP) return true;
    return data_error(why, "--clip %g by the norm of the step needs all gradients; type --clip-by last", clip);
}

// Returns true if steps are taken part by part.
static bool takes_parts(const Arena* a) {
    return a->releases || a->clip_by != CLIP_STEP;
}

// Gradients are those of the whole arena, or take turns, or are packed with the ranks' sums behind them.
int64_t arena_grads_bytes(const Arena* a) {
    int64_t elements = a->releases ? a->packed : a->elements;
    if (!a->releases && shard_splits(a->shard, SHARD_GRADS)) elements = a->packed + a->shard->own_tiles * TILE_ELEMENTS;
    return elements * (a->grads_bf16 ? 2 : 4);
}

// Returns the configuration for the optimizer: steps by parts take a layer's matrices at a time, whose buffers are
// less.
static OptimConfig arena_config(const Arena* a, const OptimConfig* config) {
    OptimConfig own_config = *config;
    int64_t layer = 0;
    for (int t = 0; t < a->count; t++) {
        if (a->part[t] == 0 && a->tensors[t].rows > 1) layer += tensor_padded(&a->tensors[t]);
    }
    if ((takes_parts(a) || config->offload) && layer < own_config.matrix_chunk) own_config.matrix_chunk = layer;
    return own_config;
}

// Tells the optimizer where the gradients, or the ranks' sums of them, lie that it takes its steps with.
static void point_to_sums(const Arena* a) {
    const Plan* plan = a->optim->plan;
    const int64_t bytes = a->grads_bf16 ? 2 : 4;
    const bool apart = !a->releases && shard_splits(a->shard, SHARD_GRADS);
    for (int t = 0; t < a->count; t++) {
        const char* at = apart ? (const char*)a->shard->sums + plan->tensor[t].kept[SLOT_WEIGHTS].offset * bytes
                               : (const char*)arena_at(a, a->grads, t, bytes);
        optim_tensor_grads(a->optim, t, at + plan->tensor[t].here.begin * bytes);
    }
}

// Allocates the scales of fp8 products, and tells them where the numbers of stored codes lie (optim_codes). Ranks that
// gather decoded weights need these scales too.
static void open_scales(Arena* a) {
    const int slots = a->fp8->slots;
    void* memory = device_alloc(a->dev, fp8_bytes(slots), &a->memory.other);
    device_zero(a->dev, memory, fp8_bytes(slots));
    *a->fp8 = fp8_open(slots, memory);
    const float** numbers = (const float**)memory_zero(slots, sizeof(float*));
    for (int t = 0; t < a->count; t++) {
        if (a->slot[t]) numbers[a->slot[t]] = optim_codes(a->optim, t).numbers;
    }
    copy_to_device(a->dev, a->fp8->stored, numbers, slots * (int64_t)sizeof(float*));
    free(numbers);
}

// Allocates what steps part by part keep beside the gradients.
static void open_parts(Arena* a) {
    const int64_t squares = (a->layers + 2) * (int64_t)sizeof(double),
                  bytes = squares + (PART_TENSORS + 1) * (int64_t)sizeof(float);
    a->part_square = (double*)device_alloc(a->dev, bytes, &a->memory.other);
    device_zero(a->dev, a->part_square, bytes);
    a->factor = (float*)(a->part_square + a->layers + 2), a->last_norm = a->factor + PART_TENSORS;
}

void arena_open(Arena* a, const OptimConfig* config) {
    MemoryPlan* memory = &a->memory;
    *memory = {};
    a->optim = nullptr, a->decoded = nullptr, a->offload = nullptr;
    a->grads = nullptr, a->squares = a->part_square = nullptr;
    if (!config) {
        a->weights = device_alloc(a->dev, a->elements * (a->type == OPTIM_FP32 ? 4 : 2), &memory->weights);
        return;
    }
    const OptimConfig own_config = arena_config(a, config);
    a->optim = optim_create(a->dev, &own_config, a->tensors, a->count, a->type);
    const OptimBytes* optim = &a->optim->allocated;
    memory->weights = optim->weights + optim->compute, memory->states = optim->states + optim->tables;
    memory->host = optim->host;
    a->weights = a->optim->seen;
    if (!config->keeps_copy) a->decoded = decoded_open(a);
    a->grads = device_alloc(a->dev, arena_grads_bytes(a), &memory->grads);
    device_zero(a->dev, a->grads, arena_grads_bytes(a));
    const int64_t tiles = a->elements / TILE_ELEMENTS;
    a->squares = (double*)device_alloc(a->dev, tiles * (int64_t)sizeof(double), &memory->other);
    if (a->shard) {
        a->shard->releases = a->releases, a->shard->gradient_bytes = a->grads_bf16 ? 2 : 4;
        a->weights = shard_open(a->shard, a->dev, a->grads, a->weights, a->squares, a->elements, memory);
    }
    point_to_sums(a);
    if (config->offload) a->offload = offload_open(a);
    if (a->fp8) open_scales(a);
    a->by_parts = takes_parts(a);
    if (a->by_parts) open_parts(a);
}

void arena_close(Arena* a) {
    if (!a->optim || shard_splits(a->shard, SHARD_STATES)) device_free(a->dev, a->weights);
    decoded_close(a->decoded);
    offload_close(a->offload);
    if (a->optim) optim_free(a->optim);
    if (a->shard && !a->dev->imagined) shard_close(a->shard);
    if (a->fp8) device_free(a->dev, a->fp8->scale_inv);
    device_free(a->dev, a->grads), device_free(a->dev, a->squares), device_free(a->dev, a->part_square);
    if (a->dev->imagined) return;
    free(a->tensors), free(a->part), free(a->order), free(a->place), free(a->slot);
}

void* arena_at(const Arena* a, void* memory, int t, int64_t element_bytes) {
    if (!memory && a->decoded) return decoded_at(a, t);
    int64_t at = a->tensors[t].offset;
    if ((memory == a->grads && a->releases) || shard_is_packed(a->shard, memory)) at = a->place[t];
    return (char*)memory + element_bytes * at;
}

void arena_set(Arena* a, int t, const float* values) {
    if (a->optim) return optim_set_weights(a->optim, t, values);
    const int64_t n = a->tensors[t].rows * a->tensors[t].cols, offset = a->tensors[t].offset;
    if (a->type == OPTIM_FP32) {
        copy_to_device(a->dev, (float*)a->weights + offset, values, n * 4);
        return;
    }
    bf16* rounded = (bf16*)memory_take(n * sizeof(bf16));
    for (int64_t i = 0; i < n; i++) rounded[i] = from_float<bf16>(values[i]);
    copy_to_device(a->dev, (bf16*)a->weights + offset, rounded, n * 2);
    free(rounded);
}

void arena_draw(Arena* a, int t, int64_t rows, uint64_t seed, float mean, float deviation, float* values) {
    const int64_t n = rows * a->tensors[t].cols, all = a->tensors[t].rows * a->tensors[t].cols;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i += 2) {
        float two[2];
        random_normals(two, seed, (uint64_t)t, (uint64_t)i / 2);
        for (int k = 0; k < 2 && i + k < n; k++) values[i + k] = mean + deviation * two[k];
    }
    memset(values + n, 0, (size_t)(all - n) * sizeof(float));
    arena_set(a, t, values);
}

void arena_need(const Arena* a, int part, int next) {
    decoded_need(a, part);
    if (part <= a->layers) shard_need(a->shard, part, next);
}

void arena_changed(const Arena* a) {
    decoded_forget(a->decoded);
    if (a->shard) shard_publish(a->shard);
}

void arena_loaded(const Arena* a, float last_norm) {
    if (!a->optim) return;
    optim_decode(a->optim);
    arena_changed(a);
    if (a->by_parts) copy_to_device(a->dev, a->last_norm, &last_norm, sizeof(last_norm));
}
