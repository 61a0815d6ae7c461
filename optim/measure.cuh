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
        auto at = [&](int a, const Streams& whole) {
            return tile_at(arrays.array[a], arrays.array[a + 1], arrays.array[a + 2], whole, tile.index);
        };
        const StreamInfo grads = arrays.array[GRADS_ARRAY];
        const TilePlace place = Layout::place_of(step, t);
        TileStreams streams = {
            at(0, step.weights),
            {Layout::in_memory(GRADS_ARRAY, step.grads.codes, tile_bytes(grads), tile, place), nullptr},
            at(4, step.m),
            at(7, step.v),
            at(10, step.slow),
            {}};
        if (Layout::PLACED_ARRAY == 0) streams.weights.codes = place.weights;
        tables_set<M>(&streams, step_memory);
        const Hyper& group = step.group[tile.group];
        const Hyper hyper = Rule::SCALED ? hyper_scaled(group, step.factor[tile.index]) : group;
        update_elements<COUNT, MEASURE>(
            EachElement<Rule>(), Weights(), Grads(), M(), V(), step, streams, hyper, grad_scale,
            Layout::PLACED ? place.element : (int64_t)tile.index * TILE_ELEMENTS, (int)threadIdx.x * COUNT, COUNT);
        __syncthreads();  // threads of log.cuh share memory, which the next tile overwrites
    }
}
#endif
