// See arena.h: how weights, gradients and states are kept, and how weights are set.
#include "../../kernels/initial.cuh"
#include "../../kernels/ranks/shard.cuh"
#include "model.h"

void arena_tensors(Arena* a, int count) {
    a->count = count;
    a->tensors = (OptimTensor*)memory_zero(count, sizeof(OptimTensor));
    a->part = (int*)memory_zero(count, sizeof(int));
    a->place = (int64_t*)memory_zero(count, sizeof(int64_t));
    a->slot = (int*)memory_zero(count, sizeof(int));
}

// Returns the tensors as ranks exchange them; the caller frees the array.
static ShardTensor* shard_tensors(const Arena* a) {
    ShardTensor* tensors = (ShardTensor*)memory_take(a->count * sizeof(ShardTensor));
    for (int t = 0; t < a->count; t++) {
        const OptimTensor* tensor = &a->tensors[t];
        tensors[t] = {tensor->offset, tensor->rows * tensor->cols, a->part[t] < a->layers ? a->part[t] : a->layers};
    }
    return tensors;
}

// Plans which part of the arena this rank keeps.
static void spread_ranks(const Arena* a, OptimConfig* config) {
    Shard* s = a->shard;
    if (!s) return;
    const int ranks = s->comm.world;
    const long long tiles = a->elements / TILE_ELEMENTS;
    if (tiles < ranks) user_error("the model has %lld tiles of weights for %d ranks; start %lld", tiles, ranks, tiles);
    ShardTensor* tensors = shard_tensors(a);
    s->gradient_bytes = a->grads_bf16 ? 2 : 4;
    s->weight_bytes = a->type == OPTIM_FP32 ? 4 : 2;
    const int64_t slices = ranks * (PEER_PART / (TILE_ELEMENTS * s->gradient_bytes));  // tiles of slots in all
    const int64_t most = s->comm.peers ? slices < 8192 ? slices : 8192 : tiles < 16384 ? tiles : 16384;
    s->chunk = a->dev->gpu ? most : 64;
    shard_plan(s, tensors, a->count, a->layers, a->elements);
    optim_cuts(config, a->tensors, a->count, s->cut, ranks + 1);
    if (shard_splits(s, SHARD_STATES)) config->begin = s->cut[s->comm.rank], config->end = s->cut[s->comm.rank + 1];
    free(tensors);
}

void arena_spread(Arena* a, OptimConfig* config) {
    spread_ranks(a, config);
    config->keeps_copy = shard_splits(a->shard, SHARD_STATES);  // for the others, or to be gathered by them
    const int64_t bytes = decoded_bytes(a, config).dequant_buffer;
    a->dequant_bytes = config->keeps_copy ? 0 : bytes;
    a->scales_apart = config->keeps_copy && bytes > 0;
}

bool arena_may_release(const Arena* a, const OptimConfig* config, double clip, int64_t tokens, int64_t micro,
                       char* why) {
    char reason[DATA_ERROR_BYTES];
    const bool by_parts = a->clip_by != CLIP_STEP, together = !optim_releases(config, a->tensors, a->count, reason);
    if (together && by_parts) {
        user_error("--clip-by %s: %s; type --clip-by step", a->clip_by == CLIP_TENSOR ? "tensor" : "last", reason);
    }
    if (together) return data_error(why, "%s; type --release off", reason);
    if (tokens != micro) {
        return data_error(why,
                          "the gradients of several micro-batches need room for their sum; type --release off, or "
                          "--tokens-per-step %lld",
                          (long long)micro);
    }
    if (clip <= 0 || by_parts) return true;
    return data_error(why, "--clip %g by the norm of the step needs all gradients; type --clip-by last", clip);
}

bool arena_plan_release(Arena* a, const OptimConfig* config, double clip, bool on, char* why) {
    const bool parts = config->offload || a->clip_by != CLIP_STEP;
    char reason[DATA_ERROR_BYTES];
    if (parts && !optim_releases(config, a->tensors, a->count, reason)) {
        return data_error(why, "%s; type %s", reason, config->offload ? "--offload none" : "--clip-by step");
    }
    a->releases = on;
    return !on || arena_may_release(a, config, clip, 1, 1, why);
}

// Returns true if steps are taken part by part.
static bool takes_parts(const Arena* a) {
    return a->releases || a->clip_by != CLIP_STEP;
}

// Gradients are those of the whole arena, or packed with the ranks' sums behind them, or take turns.
int64_t arena_grads_bytes(const Arena* a) {
    int64_t elements = a->elements;
    if (shard_splits(a->shard, SHARD_GRADS)) elements = a->shard->packed + shard_sums(a->shard);
    if (a->releases && a->shard) elements = a->shard->packed;
    if (a->releases && !a->shard) elements = parts_room(a, nullptr, 1, true, a->place);
    return elements * (a->grads_bf16 ? 2 : 4);
}

// Returns the configuration for the optimizer: steps by parts take a layer's matrices at a time, whose buffers are
// less.
static OptimConfig arena_config(const Arena* a, const OptimConfig* config) {
    OptimConfig its = *config;
    int64_t layer = 0;
    for (int t = 0; t < a->count; t++) {
        if (a->part[t] == 0 && a->tensors[t].rows > 1) layer += tensor_padded(&a->tensors[t]);
    }
    if ((takes_parts(a) || config->offload) && layer < its.matrix_chunk) its.matrix_chunk = layer;
    return its;
}

ArenaBytes arena_bytes(const Arena* a, const OptimConfig* config) {
    const OptimConfig its = arena_config(a, config);
    const OptimBytes optim = optim_bytes(a->dev, &its, a->tensors, a->count, a->type);
    int64_t weights = optim.weights + optim.compute + shard_gathered_bytes(a->shard);
    if (!config->keeps_copy) weights += decoded_bytes(a, config).room;
    int64_t states = optim.states + optim.tables;
    if (config->offload) states += offload_bytes(a, config);
    return {weights, states, arena_grads_bytes(a),
            (a->shard ? shard_bytes(a->shard) : 0) + (takes_parts(a) ? release_bytes(a) : 0), optim.host};
}

int64_t arena_saved_bytes(const Arena* a, const OptimConfig* config, bool states) {
    const OptimFiles files = optim_file_bytes(config, a->tensors, a->count);
    return files.model + (states ? files.optimizer : 0);
}

// Sets where the gradients of each tensor begin, or those of a step over the whole arena if that takes a part's.
static void grads_place(Arena* a) {
    const Shard* shard = a->shard;
    // The sums lie after the packed gradients, or are all that a step gets.
    const int64_t begin = shard_splits(shard, SHARD_STATES) ? shard->cut[shard->comm.rank] : 0;
    const int64_t sums = shard_splits(shard, SHARD_GRADS) ? shard->packed - begin : 0;
    for (int t = 0; t < a->count; t++) {
        if (!a->releases) a->place[t] = a->tensors[t].offset + (takes_parts(a) ? sums : -begin);
        if (a->releases && shard) a->place[t] = shard->packed_offset[t];
    }
}

void arena_open(Arena* a, const OptimConfig* config) {
    if (!config) {
        a->weights = device_alloc(a->dev, a->elements * (a->type == OPTIM_FP32 ? 4 : 2));
        return;
    }
    const OptimConfig its = arena_config(a, config);
    a->optim = optim_create(a->dev, &its, a->tensors, a->count, a->type);
    a->weights = optim_weights(a->optim);
    if (!config->keeps_copy) a->decoded = decoded_open(a);
    a->grads = device_alloc(a->dev, arena_grads_bytes(a));
    device_zero(a->dev, a->grads, arena_grads_bytes(a));
    if (a->shard) a->shard->releases = a->releases, a->weights = shard_open(a->shard, a->grads, a->weights);
    if (config->offload) a->offload = offload_open(a);
    // All ranks must agree, and GPUs of other kinds have other activations.
    const bool may_defer = a->shard && !takes_parts(a) && shard_may_defer(a->shard, a->scratch);
    if (a->shard) a->shard->may_defer = shard_min(a->shard, may_defer) > 0;
    grads_place(a);
    if (takes_parts(a)) a->release = release_open(a);
}

void arena_close(Arena* a) {
    if (!a->optim || shard_splits(a->shard, SHARD_STATES)) device_free(a->dev, a->weights);
    decoded_close(a->decoded);
    release_close(a);
    offload_close(a->offload);
    if (a->optim) optim_free(a->optim);
    if (a->shard) shard_close(a->shard);
    device_free(a->dev, a->grads);
    free(a->tensors), free(a->part), free(a->place), free(a->slot);
}

void* arena_at(const Arena* a, void* memory, int t, int64_t element_bytes) {
    if (!memory && a->decoded) return decoded_at(a->decoded, t);
    int64_t at = a->tensors[t].offset;
    if (memory == a->grads && a->releases) at = a->place[t];
    if (shard_is_packed(a->shard, memory)) at = a->shard->packed_offset[t];
    return (char*)memory + element_bytes * at;
}

void arena_scales(const Arena* a, const float** to, int slots) {
    const float** numbers = (const float**)memory_zero(slots, sizeof(float*));
    for (int t = 0; t < a->count; t++) {
        if (a->slot[t]) numbers[a->slot[t]] = optim_codes(a->optim, t).numbers;
    }
    copy_to_device(a->dev, to, numbers, slots * (int64_t)sizeof(float*));
    free(numbers);
}

void arena_set(Arena* a, int t, const float* values) {
    if (a->optim) {
        optim_set_weights(a->optim, t, values);
        decoded_forget(a->decoded);
        return;
    }
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

// Sets elements `start` to start + n - 1 of a tensor from values in device memory (optim_set_part). Returns false, and
// sets nothing, if the tensor can only be set as a whole.
static bool arena_set_part(Arena* a, int t, int64_t start, int64_t n, const float* values) {
    decoded_forget(a->decoded);
    return a->optim && optim_set_part(a->optim, t, start, n, values);
}

void arena_fill(Arena* a, int t, float value) {
    const int64_t n = a->tensors[t].rows * a->tensors[t].cols;
    float* values = (float*)memory_take((size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++) values[i] = value;
    arena_set(a, t, values);
    free(values);
}

// The device draws the numbers a piece at a time, and each piece is stored from device memory. Only formats with scales
// of whole tensors need host memory.
void arena_draw(Arena* a, int t, int64_t rows, uint64_t seed, float deviation, void* memory, int64_t bytes) {
    constexpr int64_t max = 1 << 24;  // elements of a piece
    const int64_t n = a->tensors[t].rows * a->tensors[t].cols, used = rows * a->tensors[t].cols;
    const int64_t room = bytes - NORMAL_LIST_BYTES, few = TILE_ELEMENTS * 4;
    void* own = room < few ? device_alloc(a->dev, NORMAL_LIST_BYTES + few) : nullptr;
    uint32_t* list = (uint32_t*)(own ? own : memory);
    float *drawn = (float*)((char*)list + NORMAL_LIST_BYTES), *whole = nullptr;
    const int64_t fit = (own ? few : room) / few * TILE_ELEMENTS, piece = fit < max ? fit : max;
    for (int64_t start = 0; start < n; start += piece) {
        const int64_t count = n - start < piece ? n - start : piece, left = used - start;
        const int64_t normal = left < 0 ? 0 : left < count ? left : count;
        initial_normals(a->dev, drawn, normal, seed, (uint64_t)t, start, deviation, list);
        device_zero(a->dev, drawn + normal, (count - normal) * (int64_t)sizeof(float));
        if (arena_set_part(a, t, start, count, drawn)) continue;
        if (!whole) whole = (float*)memory_take((size_t)n * sizeof(float));
        copy_to_host(a->dev, whole + start, drawn, count * (int64_t)sizeof(float));
    }
    if (whole) arena_set(a, t, whole);
    device_sync(a->dev);
    device_free(a->dev, own);
    free(whole);
}

void arena_need(const Arena* a, int part, int next) {
    decoded_need(a, part);
    if (part <= a->layers) shard_need(a->shard, part, next);
}

void arena_changed(const Arena* a) {
    decoded_forget(a->decoded);
    if (a->shard) shard_publish(a->shard);
}
