// The first pass of a step whose storages have scales that reach further than a tile (formats/spans.cuh). It computes
// the update as the step will, and keeps only the maxima. It reads once more all bytes that the step loads. Threads
// read memory directly, since this pass is rare and need not be fast.
#pragma once
#include "kernel.cuh"
#include "formats/spans.cuh"

EMBED_SOURCE

#ifdef __CUDACC__
// grid: any, block: StepLayout::SHAPE.threads, which share a tile; shared memory: SHAPE.table_bytes; deterministic,
// since its only atomics are maxima.
template <class Rule, class Weights, class M, class V, class Copy, class Grads>
__global__ void __launch_bounds__((StepLayout<Rule, Weights, M, V, Copy, Grads>::SHAPE.threads))
    optim_measure_kernel(const __grid_constant__ StepArguments step) {
    typedef StepLayout<Rule, Weights, M, V, Copy, Grads> Layout;
    constexpr StepArrays arrays = Layout::ARRAYS;
    constexpr int COUNT = Layout::SHAPE.elements;
    const float grad_scale = *step.grad_scale;
    if (!is_finite(grad_scale)) return;  // the step changes nothing
    extern __shared__ __align__(128) unsigned char step_memory[];
    tables_prepare<M, V>(step, step_memory);
    __syncthreads();
    for (int64_t t = blockIdx.x; t < step.tile_count; t += gridDim.x) {
        const Tile tile = step.tiles[t];
        TileStreams streams = tile_streams(arrays, step, tile);
        tables_set<M>(&streams, step_memory);
        const Hyper& group = step.group[tile.group];
        const Hyper hyper = Rule::SCALED ? hyper_scaled(group, step.factor[tile.kept]) : group;
        update_elements<COUNT, MEASURE>(EachElement<Rule>(), Weights(), Grads(), M(), V(), step, streams, hyper,
                                        grad_scale, (int64_t)tile.element * TILE_ELEMENTS, (int)threadIdx.x * COUNT,
                                        COUNT);
        __syncthreads();  // threads of log.cuh share memory, which the next tile overwrites
    }
}
#endif
