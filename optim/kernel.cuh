// The step, one template for every combination of rule and storages:
//     load -> dequantise -> update in fp32 -> quantise -> store
// Arenas hold all tensors of the model one after another; a table cuts them into tiles of at most 2048 elements, none
// spanning two tensors, each with the group (decay or not) of its tensor. One launch covers the table. Each byte of
// weights, gradients and states is read once and each byte of weights and states written once: for bf16 throughout,
// 14 bytes a parameter, which is all the time it should take.
//
// On the GPU one thread block takes a tile and one thread 8 consecutive elements, loads of all streams in flight before
// the first use. On the CPU one core takes a tile and calls the same function with 2048 elements. Blocks that share a
// scale are runs of at most 2048 elements from a tensor's first one on, so they lie in one tile: the quantise step can
// reduce over a thread's neighbours on the GPU, and over its own array on the CPU.
//
// The template takes its storages as objects. On the GPU they are empty structs of static functions and vanish; on the
// CPU they may be rows of tables of function pointers, which makes any combination run without instantiating it.
#pragma once
#include "formats/elementwise.cuh"
#include "rules/hyper.cuh"

EMBED_SOURCE

constexpr int TILE_UNIT = 128;       // tensors start at multiples of this; tiles are counted in it
constexpr int TILE_ELEMENTS = 2048;  // at most
constexpr int THREAD_ELEMENTS = 8;   // 16 bytes of bf16, and one call of the noise
constexpr int STEP_THREADS = TILE_ELEMENTS / THREAD_ELEMENTS;
constexpr int STEP_GROUPS = 2;  // tensors without and with weight decay

struct alignas(8) Tile {
    uint32_t first;  // in units from the arena's start
    uint16_t units;  // length; the padding after a tensor belongs to its last tile
    uint16_t group;
};

struct StepArguments {
    Streams weights, grads, m, v;
    const float* grad_scale;  // device scalar
    const Tile* tiles;        // (tile_count)
    int64_t tile_count;
    uint64_t seed;
    uint32_t step;
    Hyper group[STEP_GROUPS];
};

// One step for n elements (n <= MOST) from `first` on. With a grad_scale that is NaN or infinite nothing is written.
template <int MOST, class Rule, class Weights, class Grads, class M, class V>
OPTIM_INLINE void update_elements(const Rule& rule, const Weights& weights, const Grads& grads, const M& state_m,
                                  const V& state_v, const StepArguments& step, const Hyper& hyper, int64_t first,
                                  int n) {
    float p[MOST], g[MOST], m[MOST], v[MOST];
    weights.load(step.weights, first, p, n);
    grads.load(step.grads, first, g, n);
    state_m.load(step.m, first, m, n);
    state_v.load(step.v, first, v, n);
    float grad_scale = *step.grad_scale;  // looked at only now, so that it does not hold the loads up
    if (!is_finite(grad_scale)) return;
    OPTIM_UNROLL
    for (int i = 0; i < n; i++) g[i] = exact_mul(g[i], grad_scale);
    rule.update(hyper, p, g, m, v, n);
    weights.store(step.weights, first, p, n, NoiseKey{step.seed, step.step, NOISE_WEIGHTS});
    state_m.store(step.m, first, m, n, NoiseKey{step.seed, step.step, NOISE_M});
    state_v.store(step.v, first, v, n, NoiseKey{step.seed, step.step, NOISE_V});
}

#ifdef __CUDACC__
// grid: any number of blocks (one a tile is right), block: STEP_THREADS, no shared memory; deterministic.
template <class Rule, class Weights, class Grads, class M, class V>
__global__ void __launch_bounds__(STEP_THREADS) optim_step_kernel(const __grid_constant__ StepArguments step) {
    for (int64_t t = blockIdx.x; t < step.tile_count; t += gridDim.x) {
        Tile tile = step.tiles[t];
        int element = threadIdx.x * THREAD_ELEMENTS;
        if (element >= tile.units * TILE_UNIT) continue;
        int64_t first = (int64_t)tile.first * TILE_UNIT + element;
        update_elements<THREAD_ELEMENTS>(EachElement<Rule>(), Weights(), Grads(), M(), V(), step,
                                         step.group[tile.group], first, THREAD_ELEMENTS);
    }
}

// The weights as the model sees them, rounded to nearest into the type that the matmuls read.
// grid: ceil(elements / THREAD_ELEMENTS / 256), block: 256, elements a multiple of 8; deterministic.
template <class Weights, class Copy>
__global__ void __launch_bounds__(256) optim_decode_kernel(Streams weights, Streams copy, int64_t elements) {
    int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * THREAD_ELEMENTS;
    if (first >= elements) return;
    float x[THREAD_ELEMENTS];
    Weights::view(weights, first, x, THREAD_ELEMENTS);
    Copy::set(copy, first, x, THREAD_ELEMENTS);
}
#endif
