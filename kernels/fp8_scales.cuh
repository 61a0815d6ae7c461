// The scales of fp8 codes: one for each tensor that products read as codes, from one step to the next.
//
// A tensor has one scale, a power of two: code = round(value * scale), value ~ code / scale. The scale of a step comes
// from the largest magnitudes (amax) of the FP8_HISTORY steps before it (delayed scaling), with a factor of 2 to spare.
// So a tensor is read once, and its own largest magnitude is a by-product. In the first step, which has no history,
// each tensor is read twice and scaled by its own largest magnitude so far. The magnitudes of a step are maxima over
// all micro-batches and ranks, and belong to a checkpoint. Weights that are stored as codes (linear_fp8.cuh) keep the
// scale that they are stored with.
#pragma once
#include "common.cuh"
#include "each.cuh"
#include "fp8_codes.cuh"

constexpr int FP8_HISTORY = 16;

// All scales of a model. A slot is a tensor: input, weight or output gradient of a linear layer.
struct Fp8 {
    int slots;
    bool use_current_scaling;  // there is no amax history yet: a cast computes its amax first
    int64_t first;             // number of the first such step; 0: there was none
    float* amax_history;       // (slots, FP8_HISTORY) the last step's amax comes first; 0: unknown
    float* scale;              // (slots)
    float* scale_inv;          // (slots, 4), of which the first counts: cuBLASLt wants 16 bytes for each
    uint32_t* amax;            // (slots + 1) bits of this step's amax of each slot; then the overflow count
    const float** stored;  // (slots) of a tensor that is stored as codes: [1] is its inverse, [2] its scale; or NULL
};

// The largest power of two that keeps `amax` times 2^spare within the type's range; 1 where it is 0.
__host__ __device__ inline float fp8_scale(float amax, Fp8Type type, int spare) {
    if (!(amax > 0.0f) || amax > 3e38f) return 1.0f;
    // amax = f 2^e with f in [0.5, 1); the largest code is 0.875 2^9, or 0.875 2^16.
    int e;
    const float f = frexpf(amax, &e);
    int k = (type == FP8_E4M3 ? 9 : 16) - e - (f > 0.875f) - spare;
    k = k > 100 ? 100 : k < -100 ? -100 : k;
    return ldexpf(1.0f, k);
}

// A magnitude's bits, whose order is that of the magnitudes, and back.
__host__ __device__ inline uint32_t fp8_bits(float magnitude) {
    uint32_t bits;
    memcpy(&bits, &magnitude, sizeof(bits));
    return bits;
}
__host__ __device__ inline float fp8_magnitude(uint32_t bits) {
    float magnitude;
    memcpy(&magnitude, &bits, sizeof(magnitude));
    return magnitude;
}

__host__ __device__ inline void fp8_set_scale(const Fp8& f, int slot, float amax, Fp8Type type, int spare) {
    f.scale[slot] = fp8_scale(amax, type, spare);
    f.scale_inv[4 * slot] = 1.0f / f.scale[slot];
}

// The three things that a step does to the slots, on both devices.
enum Fp8Event { FP8_BEGIN, FP8_AGREE, FP8_END };

// BEGIN sets the scales of a step from the history, and clears what it will find. A tensor that is stored as codes has
// their scale; its magnitude is the largest that such codes can hold, so that any rank (AGREE), and a run that resumes
// with another storage, can compute the scale from it. END adds the step's magnitude to the history, unless it is not
// finite or was not measured.
__host__ __device__ inline void fp8_slot_event(const Fp8& f, int slot, Fp8Event event) {
    float *history = f.amax_history + slot * FP8_HISTORY, amax = 0.0f;
    if (event == FP8_BEGIN) {
        if (const float* stored = f.stored[slot]) {
            f.amax[slot] = fp8_bits(fp8_largest(FP8_E4M3) * stored[1]);
            f.scale_inv[4 * slot] = stored[1], f.scale[slot] = stored[2];
            return;
        }
        for (int i = 0; i < FP8_HISTORY; i++) amax = fmaxf(amax, history[i]);
        fp8_set_scale(f, slot, amax, FP8_E4M3, 1);
        f.amax[slot] = 0;
        return;
    }
    amax = fp8_magnitude(f.amax[slot]);
    if (event == FP8_AGREE && amax != 0) fp8_set_scale(f, slot, amax, FP8_E4M3, 0);
    if (event == FP8_AGREE || !(amax > 0.0f) || !isfinite(amax)) return;
    for (int i = FP8_HISTORY - 1; i > 0; i--) history[i] = history[i - 1];
    history[0] = amax;
}

// Sets the scale of a tensor whose values are at most `amax`; below 0: at most the magnitude that was found just now.
struct Fp8Rescale {
    Fp8 f;
    int slot;
    float amax;
    Fp8Type type;

    __host__ __device__ void at(int64_t) const {
        fp8_set_scale(f, slot, amax < 0.0f ? fp8_magnitude(f.amax[slot]) : amax, type, 0);
    }
};

inline void fp8_rescale(const Device* dev, const Fp8* f, int slot, float amax = -1.0f, Fp8Type type = FP8_E4M3) {
    for_each(dev, Fp8Rescale{*f, slot, amax, type}, 1);
}

inline int64_t fp8_bytes(int slots) {
    return (int64_t)slots * ((FP8_HISTORY + 6) * (int64_t)sizeof(float) + (int64_t)sizeof(float*)) + 256;
}

// After BEGIN, if each rank has the scales of some stored tensors alone, the arena calls this with AGREE: it sets
// these scales, powers of two, from the all-reduced amax array. After the update it calls it with END, which changes
// the history unless `factor` says that the step changed nothing, and sets overflow_count to the number of elements
// that were too large for their codes.
struct Fp8SlotEvent {
    Fp8 f;
    Fp8Event event;
    const float* factor;
    float* overflow_count;

    __host__ __device__ void at(int64_t slot) const {
        if (event == FP8_BEGIN && slot == 0) f.amax[f.slots] = 0;
        if (event == FP8_END && slot == 0) *overflow_count = (float)f.amax[f.slots];
        if (event != FP8_END || isfinite(*factor)) fp8_slot_event(f, (int)slot, event);
    }
};

inline void fp8_event(const Device* dev, const Fp8* f, Fp8Event event, const float* factor = nullptr,
                      float* overflow_count = nullptr) {
    for_each(dev, Fp8SlotEvent{*f, event, factor, overflow_count}, f->slots);
}

// The arena calls this before the first micro-batch of a step. `step` does not count skipped steps, so a first step
// that was skipped is repeated, again without a history.
inline void fp8_begin(const Device* dev, Fp8* f, int64_t step = 1) {
    if (f->first == 0) f->first = step;
    f->use_current_scaling = f->use_current_scaling && step == f->first;
    fp8_event(dev, f, FP8_BEGIN);
}

// Chooses current scaling unless earlier steps have left a magnitude in a slot below `head` and, if the head is in fp8,
// in one from there on. A skipped step leaves none, nor does one that multiplied these tensors in bf16.
inline void fp8_resume(const Device* dev, Fp8* f, int head, bool head_fp8) {
    const int64_t bytes = (int64_t)f->slots * FP8_HISTORY * (int64_t)sizeof(float);
    SCOPED float* history = (float*)memory_take(bytes);
    copy_to_host(dev, history, f->amax_history, bytes);
    bool has[2] = {false, !head_fp8};
    for (int i = 0; i < f->slots * FP8_HISTORY; i++) has[i >= head * FP8_HISTORY] |= history[i] > 0.0f;
    f->use_current_scaling = !has[0] || !has[1];
}

// `memory`: fp8_bytes of device memory, set to zero. The caller sets `stored`.
inline Fp8 fp8_open(int slots, void* memory) {
    float *scale_inv = (float*)memory, *history = scale_inv + (int64_t)slots * 4;
    const float** stored = (const float**)(history + (int64_t)slots * FP8_HISTORY);
    float* scale = (float*)(stored + slots);
    return {slots, true, 0, history, scale, scale_inv, (uint32_t*)(scale + slots), stored};
}
