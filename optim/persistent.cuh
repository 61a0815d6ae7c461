// The persistent kernel of the step (kernel.cuh): tiles travel through the stages of a group in shared memory, which a
// producer warp fills and stores by TMA while the group's threads compute. Without TMA, the threads read memory
// directly.
#pragma once
#include "kernel.cuh"

EMBED_SOURCE

#ifdef __CUDACC__
#ifdef OPTIM_STAGES
// Read and write 1, 2, 4 or 8 bytes.
__device__ __forceinline__ uint64_t read_small(const void* from, int bytes) {
    if (bytes == 1) return *(const uint8_t*)from;
    if (bytes == 2) return *(const uint16_t*)from;
    return bytes == 4 ? *(const uint32_t*)from : *(const uint64_t*)from;
}

__device__ __forceinline__ void write_small(void* to, int bytes, uint64_t value) {
    if (bytes == 1) *(uint8_t*)to = (uint8_t)value;
    if (bytes == 2) *(uint16_t*)to = (uint16_t)value;
    if (bytes == 4) *(uint32_t*)to = (uint32_t)value;
    if (bytes == 8) *(uint64_t*)to = value;
}

__device__ __forceinline__ unsigned char* shared_pointer(uint32_t address) {
    return (unsigned char*)__cvta_shared_to_generic(address);
}

// Returns x, and makes the compiler keep it in a register; it would otherwise recompute x wherever it is used.
__device__ __forceinline__ uint32_t register_kept(uint32_t x) {
    asm("" : "+r"(x));
    return x;
}

// The producer warps and the groups share this memory beside the stages.
constexpr uint32_t NO_TILE = 0xffffffffu;  // the `element` that follows a group's last tile

struct StageState {
    uint64_t full;  // a tile has arrived
    uint64_t done;  // all threads of the group have computed it
    Tile tile;
    SpanTile span;  // for rules that read rows: a group that loaded it itself would wait for memory twice
};

// A place in the ring of a group's stages: offsets in shared memory of a stage and of its state.
template <class Layout>
struct StageAt {
    static constexpr StepShape SHAPE = Layout::SHAPE;
    uint32_t memory, states;
    int s = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ unsigned char* stage() const { return shared_pointer(register_kept(memory)); }
    __device__ __forceinline__ StageState* state() const { return (StageState*)shared_pointer(register_kept(states)); }

    __device__ __forceinline__ void next() {
        memory += SHAPE.stage_bytes, states += sizeof(StageState);
        if (++s < SHAPE.stages) return;
        memory -= SHAPE.stages * SHAPE.stage_bytes, states -= SHAPE.stages * sizeof(StageState);
        s = 0, parity ^= 1;
    }
};

// The producer warp of a group issues its TMA copies, in one thread.
template <class Layout>
struct ProducerWarp {
    static constexpr StepShape SHAPE = Layout::SHAPE;
    static constexpr unsigned BY_TMA = ~SHAPE.small, SMALL = SHAPE.small;
    const StepArguments& step;
    StageAt<Layout> at;
    uint64_t small[STEP_ARRAYS];  // the small arrays of the next tile

    // Returns the number of the next tile that no group has, or a number beyond the last; the first tiles of each
    // group, which are fixed, do not count. Each group calls this until there are no more tiles, so the number of calls
    // is known, and the last call sets the counter back to 0.
    __device__ __forceinline__ uint32_t next_tile(uint32_t left) const {
        return atomicInc(step.next_tile, left + gridDim.x * SHAPE.groups - 1);
    }

    __device__ __forceinline__ void read(const Tile& tile) {
        Layout::each(step, tile, nullptr, SHAPE.loaded & SMALL,
                     [&](const void* from, void*, int bytes, int a) { small[a] = read_small(from, bytes); });
    }

    __device__ __forceinline__ void fill(const Tile& tile) {
        StageState* state = at.state();
        const uint32_t full = shared_offset(&state->full);
        state->tile = tile;
        Layout::each(step, tile, at.stage(), SHAPE.loaded & SMALL,
                     [&](const void*, void* to, int bytes, int a) { write_small(to, bytes, small[a]); });
        constexpr int span_bytes = Layout::READS_ROWS ? sizeof(SpanTile) : 0;
        barrier_expect(full, SHAPE.load_bytes + span_bytes);
        if constexpr (Layout::READS_ROWS) {
            const SpanTile* span = step.rows.tile + (tile.states - step.states);
            bulk_load(shared_offset(&state->span), span, span_bytes, full);
        }
        Layout::each(step, tile, at.stage(), SHAPE.loaded & BY_TMA, [&](const void* from, void* to, int bytes, int) {
            bulk_load(shared_offset(to), from, bytes, full);
        });
    }

    __device__ __forceinline__ void end() {
        at.state()->tile.element = NO_TILE;
        barrier_arrive(shared_offset(&at.state()->full));
    }

    // Stores a stage to memory once the group has computed it.
    __device__ __forceinline__ void take_back() {
        const StageState* state = at.state();
        while (!barrier_passed(shared_offset(&state->done), at.parity))
            __nanosleep(100);  // polling takes issue slots from other warps
        const Tile tile = state->tile;
        Layout::each(step, tile, at.stage(), SHAPE.stored & SMALL, [&](void* to, const void* from, int bytes, int) {
            write_small(to, bytes, read_small(from, bytes));
        });
        Layout::each(step, tile, at.stage(), SHAPE.stored & BY_TMA,
                     [&](void* to, const void* from, int bytes, int) { bulk_store(to, shared_offset(from), bytes); });
        store_commit();
    }

    // Fills the group's stages. Then, as the group computes one stage after another, it stores the stage, and fills it
    // with the next tile as soon as the store has read it.
    __device__ __forceinline__ void run(int group) {
        const StageAt<Layout> begin = at;
        const uint32_t count = (uint32_t)step.tile_count, groups = gridDim.x * SHAPE.groups;
        const uint32_t given = SHAPE.stages * groups, left = count > given ? count - given : 0;
        uint32_t next = next_tile(left), first = group * gridDim.x + blockIdx.x;
        int filled = 0;
        for (; filled < SHAPE.stages && first < count; filled++, first += groups, at.next()) {
            read(step.tiles[first]), fill(step.tiles[first]);
        }
        if (filled < SHAPE.stages) end();
        for (at = begin; next < left; at.next()) {
            const Tile coming = step.tiles[given + next];  // these loads are in flight during the wait
            next = next_tile(left);
            read(coming);
            take_back();
            store_wait_read<0>();
            fill(coming);
        }
        for (int i = 0; i < filled; i++, at.next()) {
            take_back();
            if (i == 0 && filled == SHAPE.stages) end();
        }
        store_wait_read<0>();
    }
};

// A thread block has 64k registers, which threads get in multiples of eight. All threads start with the same number.
// Then the producer warps release registers that they do not need and the groups take them, which avoids spills.
constexpr int PRODUCER_REGISTERS = 32;

OPTIM_INLINE constexpr int registers_at_start(const StepShape& shape) {
    return 65536 / shape.block_threads / 8 * 8;
}

OPTIM_INLINE constexpr int registers_of_groups(const StepShape& shape) {
    int max = 32 * shape.producer_warps * PRODUCER_REGISTERS;
    max = (registers_at_start(shape) * shape.block_threads - max) / (shape.groups * shape.threads) / 8 * 8;
    return max > 128 ? 0 : max;  // 0: the groups have enough registers from the start
}

template <int REGISTERS, bool MORE>
__device__ __forceinline__ void registers_set() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (MORE) {
        registers_grow<REGISTERS>();
    } else {
        registers_shrink<REGISTERS>();
    }
#endif
}
#endif

// The kernels of the step.
template <class Rule, class Weights, class M, class V, class Copy, class Grads>
__device__ __forceinline__ void step_run(const StepArguments& step) {
    typedef StepLayout<Rule, Weights, M, V, Copy, Grads> Layout;
    constexpr StepShape SHAPE = Layout::SHAPE;
    const int group = threadIdx.x / SHAPE.threads, thread = threadIdx.x % SHAPE.threads;
    const float grad_scale = *step.grad_scale;
    if (!is_finite(grad_scale)) return;  // the step changes nothing
    extern __shared__ __align__(128) unsigned char step_memory[];
    tables_prepare<M, V>(step, step_memory);
#ifdef OPTIM_STAGES
    __shared__ StageState shared[SHAPE.groups][SHAPE.stages];
    if (threadIdx.x < SHAPE.groups * SHAPE.stages) {
        barrier_init(shared_offset(&(&shared[0][0] + threadIdx.x)->full), 1);
        barrier_init(shared_offset(&(&shared[0][0] + threadIdx.x)->done), SHAPE.threads);
        fence_async();
    }
    __syncthreads();
    constexpr int registers = registers_of_groups(SHAPE), RING_BYTES = SHAPE.stages * SHAPE.stage_bytes;
    constexpr bool exchanges = registers > registers_at_start(SHAPE);
    if (group >= SHAPE.groups) {
        if constexpr (exchanges) registers_set<PRODUCER_REGISTERS, false>();
        const int warp = (threadIdx.x - SHAPE.groups * SHAPE.threads) / 32;
        if (warp < SHAPE.groups && is_elected()) {
            const uint32_t memory = shared_offset(step_memory) + SHAPE.table_bytes + warp * RING_BYTES;
            ProducerWarp<Layout>{step, {memory, shared_offset(&shared[warp][0])}, {}}.run(warp);
        }
        return;
    }
    if constexpr (exchanges) registers_set<registers, true>();
    const uint32_t thread_kept = register_kept(thread), tables = register_kept(shared_offset(step_memory));
    StageAt<Layout> at = {tables + SHAPE.table_bytes + group * RING_BYTES, shared_offset(&shared[group][0])};
    for (int turn = 0;; turn ^= 1, at.next()) {
        StageState* state = at.state();
        while (!barrier_passed(shared_offset(&state->full), at.parity)) {
        }
        if (state->tile.element == NO_TILE) break;
        update_tile<Rule, Weights, M, V, Copy, Grads>(step, state->tile, Layout::READS_ROWS ? &state->span : nullptr,
                                                      shared_pointer(tables), at.stage(), grad_scale, (int)thread_kept,
                                                      turn);
        fence_async();
        barrier_arrive(shared_offset(&state->done));
    }
#else
    __syncthreads();
    if (group >= SHAPE.groups) return;
    const int64_t stride = (int64_t)gridDim.x * SHAPE.groups;
    int turn = 0;
    for (int64_t t = group * (int64_t)gridDim.x + blockIdx.x; t < step.tile_count; t += stride, turn ^= 1) {
        update_tile<Rule, Weights, M, V, Copy, Grads>(step, step.tiles[t], nullptr, step_memory, nullptr, grad_scale,
                                                      thread, turn);
    }
#endif
}

// grid: at most a thread block for each multiprocessor; block: SHAPE.block_threads; shared memory: step_shared_bytes;
// deterministic.
template <class Rule, class Weights, class M, class V, class Copy, class Grads>
__global__ void __launch_bounds__((StepLayout<Rule, Weights, M, V, Copy, Grads>::SHAPE.block_threads), 1)
    optim_step_kernel(const __grid_constant__ StepArguments step) {
    step_run<Rule, Weights, M, V, Copy, Grads>(step);
}

// Does the same with arguments in device memory, which a CUDA graph changes from replay to replay (placed.h).
template <class Rule, class Weights, class M, class V, class Copy, class Grads>
__global__ void __launch_bounds__((StepLayout<Rule, Weights, M, V, Copy, Grads>::SHAPE.block_threads), 1)
    optim_replayed_kernel(const StepArguments* step) {
    step_run<Rule, Weights, M, V, Copy, Grads>(*step);
}
// The first pass of a step whose storages have scales that reach further than a tile (formats/spans.cuh). It computes
// the update as the step will, and keeps only the maxima. It reads once more all bytes that the step loads. Threads
// read memory directly, since this pass is rare and need not be fast.
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
        __syncthreads();  // threads of adalog8.cuh share memory, which the next tile overwrites
    }
}
#endif
