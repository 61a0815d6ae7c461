// The step, one template for every combination of rule and storages:
//     load -> dequantise -> update in fp32 -> quantise -> store
// Arenas hold all tensors of the model one after another; a table cuts them into tiles of 2048 elements, none spanning
// two tensors (a tensor's padding, zeros, fills its last tile), each with the group (decay or not) of its tensor. One
// launch covers the table. Each byte of weights, gradients and states is read once and each byte of weights and states
// written once: for bf16 throughout, 14 bytes a parameter, which is all the time it should take.
//
// On the GPU one thread block takes a tile and one thread 8 consecutive elements, or 16 where both moments are 8 bits
// or fewer, loads of all streams in flight before the first use. On the CPU one core takes a tile and calls the same
// function with 2048 elements. Blocks that share a scale are runs of at most 2048 elements from a tensor's first one
// on, so they lie in one tile: the quantise step can reduce over a thread's neighbours on the GPU, where all threads of
// a thread block always run together, and over its own array on the CPU.
//
// The template takes its storages as objects. On the GPU they are empty structs of static functions and vanish; on the
// CPU they may be rows of tables of function pointers, which makes any combination run without instantiating it.
#pragma once
#include "formats/blocks.cuh"
#include "rules/hyper.cuh"

EMBED_SOURCE

constexpr int TILE_ELEMENTS = 2048;  // tensors start at multiples of this
constexpr int DECODE_ELEMENTS = 8;   // a thread of optim_decode_kernel

// Elements a thread takes in a step, by the bits of the moments' codes: 16 bytes of the narrower, where that is 8 bits.
// More would need more registers than two thread blocks have.
OPTIM_INLINE constexpr int thread_elements(int m_bits, int v_bits) {
    return m_bits <= 8 && v_bits <= 8 ? 16 : 8;
}

constexpr int STEP_GROUPS = 8;  // tensors without and with weight decay, and those of overrides

struct alignas(8) Tile {
    uint32_t index;  // its first element is index * TILE_ELEMENTS of the arena
    uint32_t group;
};

struct StepArguments {
    Streams weights, grads, m, v;
    Streams slow;             // the third state of a rule that keeps one, in m's format
    const float* grad_scale;  // device scalar
    const Tile* tiles;        // (tile_count)
    int64_t tile_count;
    uint64_t seed;
    uint32_t step;
    Hyper group[STEP_GROUPS];
};

// One step for n elements (n <= MOST) from `first` on.
template <int MOST, class Rule, class Weights, class Grads, class M, class V>
OPTIM_INLINE void update_elements(const Rule& rule, const Weights& weights, const Grads& grads, const M& state_m,
                                  const V& state_v, const StepArguments& step, const Hyper& hyper, float grad_scale,
                                  int64_t first, int n) {
    float p[MOST], g[MOST], m[MOST], v[MOST], slow[MOST], root[MOST];
    weights.load(step.weights, first, p, n);
    grads.load(step.grads, first, g, n);
    state_m.load(step.m, first, m, n);
    state_v.load(step.v, first, v, n);
    if (rule.keeps_slow) state_m.load(step.slow, first, slow, n);
    OPTIM_UNROLL
    for (int i = 0; i < n; i++) g[i] = exact_mul(g[i], grad_scale);
    rule.update(hyper, p, g, m, v, slow, root, n);
    weights.store(step.weights, first, p, n, NoiseKey{step.seed, step.step, NOISE_WEIGHTS});
    state_m.store(step.m, first, m, n, NoiseKey{step.seed, step.step, NOISE_M});
    state_v.store(step.v, first, v, n, NoiseKey{step.seed, step.step, NOISE_V, rule.adaptive ? root : nullptr});
    if (rule.keeps_slow) state_m.store(step.slow, first, slow, n, NoiseKey{step.seed, step.step, NOISE_SLOW});
}

#ifdef __CUDACC__
// Bytes of constants that a storage keeps in shared memory: 0 for one that has none to prepare.
template <class Storage, class = void>
constexpr int SHARED_BYTES = 0;
template <class Storage>
constexpr int SHARED_BYTES<Storage, decltype((void)Storage::TABLE_BYTES)> = Storage::TABLE_BYTES;

// Thread blocks that a multiprocessor must hold at least: what its registers allow without spilling.
template <class Rule, class Weights, class M, class V>
OPTIM_INLINE constexpr int resident_blocks() {
    if (thread_elements(M::STREAM[0].bits, V::STREAM[0].bits) == 8) return Rule::KEEPS_SLOW ? 3 : 4;
    return Rule::KEEPS_SLOW ? 4 : Weights::STREAM[1].bits > 0 ? 5 : 6;
}

// grid: any number of blocks up to the tiles' (as many; with SHARED_BYTES what is resident), block: TILE_ELEMENTS /
// thread_elements, shared memory static: the formats' tables; deterministic.
template <class Rule, class Weights, class Grads, class M, class V>
__global__ void __launch_bounds__(TILE_ELEMENTS / thread_elements(M::STREAM[0].bits, V::STREAM[0].bits),
                                  resident_blocks<Rule, Weights, M, V>())
    optim_step_kernel(const __grid_constant__ StepArguments step) {
    constexpr int COUNT = thread_elements(M::STREAM[0].bits, V::STREAM[0].bits);
    if constexpr (SHARED_BYTES<M> != 0) M::prepare(step.m);
    if constexpr (SHARED_BYTES<V> != 0) V::prepare(step.v);
    if constexpr (SHARED_BYTES<M> + SHARED_BYTES<V> != 0) __syncthreads();
    float grad_scale = *step.grad_scale;
    if (!is_finite(grad_scale)) return;  // changes nothing
    Tile next = step.tiles[blockIdx.x];
    for (int64_t t = blockIdx.x; t < step.tile_count;) {
        Tile tile = next;
        t += gridDim.x;
        if (t < step.tile_count) next = step.tiles[t];
        int64_t first = (int64_t)tile.index * TILE_ELEMENTS + threadIdx.x * COUNT;
        update_elements<COUNT>(EachElement<Rule>(), Weights(), Grads(), M(), V(), step, step.group[tile.group],
                               grad_scale, first, COUNT);
    }
}

// The weights as the model sees them, rounded to nearest into the type that the matmuls read.
// grid: ceil(elements / DECODE_ELEMENTS / 256), block: 256, elements a multiple of 8; deterministic.
template <class Weights, class Copy>
__global__ void __launch_bounds__(256) optim_decode_kernel(Streams weights, Streams copy, int64_t elements) {
    int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * DECODE_ELEMENTS;
    if (first >= elements) return;
    float x[DECODE_ELEMENTS];
    Weights::view(weights, first, x, DECODE_ELEMENTS);
    Copy::set(copy, first, x, DECODE_ELEMENTS);
}
#endif
