// The second product of galore_mma.cuh in bf16 with its update of the weights, by products of warpgroups (sm_90a):
//     right: U (R, C) = N Q,  left: U = Q^T N;   summed over the rank, at most 256
// The weights' bytes are what takes time. A block stays, keeps 128 rows of the left operand in shared memory, and walks
// along their columns, 64 at a time: TMA brings columns of the right operand and the weights there, the product is
// made, the sink updates the weights where they lie, in the form that TMA brought them in (each lane reads what belongs
// to its sums with ldmatrix), and TMA takes them away. Where stages suffice, a step's weights are updated while the
// next step's product is made. The blocks share all steps evenly.
//
// Deterministic. Sizes are multiples of 8, addresses of 16 bytes.
#pragma once
#include "galore_project_tf32.cuh"

#ifdef __CUDACC__
struct LowBackMaps {
    CUtensorMap a, b, from, to;  // the weights as they are read and written
};

constexpr int LH_BACK_THREADS = 320;

// This says where things lie in shared memory. DEPTH is the rank, rounded up; zeros fill the rest.
template <int DEPTH>
struct LowBackLayout {
    static constexpr int A = LH_TILE * DEPTH * 2, B = DEPTH * PANEL_ROW_BYTES, STAGE = B + LH_PANEL_BYTES,
                         STAGES = (LH_SHARED_BYTES - A - 512) / STAGE, BARRIERS = A + STAGES * STAGE,
                         BYTES = BARRIERS + STAGES * 16 + 16;
    static constexpr bool HOLDS = STAGES >= 5;  // a step's sums, while the next step is multiplied
    static_assert(STAGES >= 2, "a stage becomes free in the course of the next step");

    // Barriers: the stage has come, the stage is free; a has come, a is free.
    static constexpr int full(int stage) { return BARRIERS + stage * 8; }
    static constexpr int empty(int stage) { return BARRIERS + (STAGES + stage) * 8; }
    static constexpr int HERE = BARRIERS + STAGES * 16, DONE = HERE + 8;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A block's steps: they go along rows of tiles.
struct LowWalk {
    int at, end, across;

    __device__ __forceinline__ LowWalk(LowResult s, int columns) {
        across = (s.cols + columns - 1) / columns;
        const int64_t all = (int64_t)across * ((s.rows + LH_TILE - 1) / LH_TILE);
        at = (int)(all * blockIdx.x / gridDim.x), end = (int)(all * (blockIdx.x + 1) / gridDim.x);
    }
};

// One thread: orders the weights.
template <int DEPTH>
__device__ __forceinline__ void lh_back_weights(uint32_t shared, const LowBackMaps* maps, LowWalk walk) {
    typedef LowBackLayout<DEPTH> Layout;
    Ring<Layout::STAGES> ring;
    for (; walk.at < walk.end; walk.at++, ring.advance()) {
        const uint32_t full = shared + Layout::full(ring.stage),
                       to = shared + Layout::A + ring.stage * Layout::STAGE + Layout::B;
        const int row = walk.at / walk.across * LH_TILE, column = walk.at % walk.across * 64;
        barrier_wait(shared + Layout::empty(ring.stage), ring.parity ^ 1);
        barrier_expect(full, LH_PANEL_BYTES);
        tensor_load(to, &maps->from, full, column, row, 0);
    }
}

// Another one: orders the operands, which may be results of the last launch.
template <bool LEFT, int DEPTH>
__device__ __forceinline__ void lh_back_operands(uint32_t shared, const LowBackMaps* maps, LowWalk walk) {
    typedef LowBackLayout<DEPTH> Layout;
    Ring<Layout::STAGES> ring;
    int present = -1;
    uint32_t free = 1;
    wait_for_last();
    for (; walk.at < walk.end; walk.at++, ring.advance()) {
        const int row = walk.at / walk.across, column = walk.at % walk.across * 64;
        const uint32_t here = shared + Layout::HERE, full = shared + Layout::full(ring.stage),
                       to = shared + Layout::A + ring.stage * Layout::STAGE;
        if (row != present) {
            barrier_wait(shared + Layout::DONE, free);
            barrier_expect(here, Layout::A);
            if (LEFT) {
                for (int p = 0; p < 2; p++)
                    tensor_load(shared + p * Layout::B, &maps->a, here, row * LH_TILE + p * 64, 0, 0);
            } else {
                for (int p = 0; p < DEPTH / 64; p++)
                    tensor_load(shared + p * LH_PANEL_BYTES, &maps->a, here, p * 64, row * LH_TILE, 0);
            }
            present = row, free ^= 1;
        }
        barrier_wait(shared + Layout::empty(ring.stage), ring.parity ^ 1);
        barrier_expect(full, Layout::B);
        tensor_load(to, &maps->b, full, column, 0, 0);
    }
}

// A warpgroup: starts c = its 64 rows of a times b.
template <bool LEFT, int DEPTH>
__device__ __forceinline__ void lh_back_multiply(float (&c)[8][4], uint32_t shared, uint32_t b, int group) {
    const uint32_t a = shared + group * (LEFT ? DEPTH : 64) * PANEL_ROW_BYTES;
    const uint64_t left = uniform_operand(LEFT ? operand_mn_major<DEPTH>(a, 0) : operand_k_major<LH_TILE>(a, 0)),
                   right = uniform_operand(operand_mn_major<DEPTH>(b, 0));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++)
        Wgmma<64>::template shared<LEFT, 1>(
            c, operand_step(left, LEFT ? k * 16 * PANEL_ROW_BYTES : k / 4 * LH_PANEL_BYTES + k % 4 * 32),
            operand_step(right, k * 16 * PANEL_ROW_BYTES), k > 0);
    wgmma_commit();
}

// A warp: updates its 16 rows of the weights, at `slot`, whose first element is (row, column).
template <typename Sink>
__device__ __forceinline__ void lh_back_update(const Sink& sink, const float (&c)[8][4], uint32_t slot, int row,
                                               int column, int lane) {
    const uint32_t place = slot + panel_offset(lane % 16, lane / 16);
    const typename Sink::Line line[2] = {sink.line(row + lane / 4, column), sink.line(row + lane / 4 + 8, column)};
#pragma unroll
    for (int group = 0; group < 4; group++) {
        const int n = group * 2;
        uint32_t x[4];
        load_matrices(x, place ^ (uint32_t)(group << 5));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t w[2] = {x[half], x[half + 2]};
            const float u[4] = {c[n][half * 2], c[n][half * 2 + 1], c[n + 1][half * 2], c[n + 1][half * 2 + 1]};
            sink.pairs(line[half], group, row + lane / 4 + half * 8, column + n * 8 + lane % 4 * 2, w, u);
            x[half] = w[0], x[half + 2] = w[1];
        }
        store_matrices(place ^ (uint32_t)(group << 5), x[0], x[1], x[2], x[3]);
    }
}

struct LowBackStep {
    int stage, row, column;
};

// A warp: updates the weights of a step, and orders them away. `last` is the stage of the step before.
template <int DEPTH, typename Sink>
__device__ __forceinline__ void lh_back_deliver(uint32_t shared, const LowBackMaps* maps, const Sink& sink,
                                                const float (&c)[8][4], LowBackStep step, int* last, int warp,
                                                int lane) {
    typedef LowBackLayout<DEPTH> Layout;
    const uint32_t slot = shared + Layout::A + step.stage * Layout::STAGE + Layout::B + warp * 16 * PANEL_ROW_BYTES;
    if (*last >= 0 && lane == 0) {
        store_wait_read<0>();  // TMA has read it
        barrier_arrive(shared + Layout::empty(*last));
    }
    lh_back_update(sink, c, slot, step.row + warp * 16, step.column, lane);
    fence_async();
    __syncwarp();
    if (lane == 0) {
        tensor_store(&maps->to, slot, step.column, step.row + warp * 16, 0);
        store_commit();
    }
    *last = step.stage;
}

template <bool LEFT, int DEPTH, typename Sink>
__device__ __forceinline__ void lh_back_consume(uint32_t shared, const LowBackMaps* maps, LowWalk walk,
                                                const Sink& sink, int warp, int lane) {
    typedef LowBackLayout<DEPTH> Layout;
    Ring<Layout::STAGES> ring;
    LowBackStep held = {-1, 0, 0};
    float sums[8][4];  // of `held`
    int present = -1, last = -1;
    uint32_t arrived = 0;
    for (; walk.at < walk.end; walk.at++, ring.advance()) {
        const int row = walk.at / walk.across;
        if (row != present) {
            if (present >= 0 && lane == 0) barrier_arrive(shared + Layout::DONE);
            barrier_wait(shared + Layout::HERE, arrived);
            present = row, arrived ^= 1;
        }
        barrier_wait(shared + Layout::full(ring.stage), ring.parity);
        float c[8][4];
        lh_back_multiply<LEFT, DEPTH>(c, shared, shared + Layout::A + ring.stage * Layout::STAGE, warp / 4);
        if (Layout::HOLDS && held.stage >= 0) lh_back_deliver<DEPTH>(shared, maps, sink, sums, held, &last, warp, lane);
        wgmma_wait<0>();
        wgmma_hold(c);
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[n][i] = c[n][i];
        }
        held.stage = ring.stage, held.row = row * LH_TILE, held.column = walk.at % walk.across * 64;
        if (!Layout::HOLDS) lh_back_deliver<DEPTH>(shared, maps, sink, sums, held, &last, warp, lane);
    }
    if (Layout::HOLDS && held.stage >= 0) lh_back_deliver<DEPTH>(shared, maps, sink, sums, held, &last, warp, lane);
    if (lane == 0) store_wait_read<0>();
}
#endif

// Any grid. The sink's pairs(line, group, row, column, w, u) updates the weights at column, column + 1, column + 8 and
// column + 9 of a row, of which a word has two, from those elements of U; some lie outside of the matrix, and are not
// stored. All lanes of a warp call it together, the four of a row with the same `group` of 16 of 64 columns, and `line`
// is what line(row, first of the 64 columns) has returned to the lane.
template <bool LEFT, int DEPTH, typename Sink>
__global__ void __launch_bounds__(LH_BACK_THREADS, 1)
    low_back_kernel(const __grid_constant__ LowBackMaps maps, LowResult s, Sink sink) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef LowBackLayout<DEPTH> Layout;
    extern __shared__ __align__(1024) unsigned char low_back_shared[];
    const uint32_t shared = shared_offset(low_back_shared);
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < Layout::STAGES; i++) {
            barrier_init(shared + Layout::full(i), 2);
            barrier_init(shared + Layout::empty(i), 8);
        }
        barrier_init(shared + Layout::HERE, 1);
        barrier_init(shared + Layout::DONE, 8);
        barrier_init_done();
    }
    __syncthreads();
    const LowWalk walk(s, 64);
    if (warp == 8) {
        if (is_elected()) lh_back_weights<DEPTH>(shared, &maps, walk);
    } else if (warp == 9) {
        if (is_elected()) lh_back_operands<LEFT, DEPTH>(shared, &maps, walk);
    } else {
        lh_back_consume<LEFT, DEPTH>(shared, &maps, walk, sink, warp, lane);
    }
#else
    (void)maps, (void)s, (void)sink;
#endif
}

struct LowBackPlan {
    LowBackMaps maps;
    LowResult s;
    bool left;
};

// True if this kernel runs here for that rank.
inline bool low_back_fits(const Device* dev, int64_t rank) {
    return low_project_fits(dev) && rank <= 256;
}

inline int low_back_depth(int64_t rank) {
    return (int)ceil_div(rank, 64) * 64;
}

inline LowBackPlan low_back_plan(bf16* w, const bf16* n, const bf16* q, int64_t rows, int64_t cols, int64_t rank) {
    LowBackPlan p;
    p.left = rows < cols;
    const int depth = low_back_depth(rank);
    p.s = {(int)rows, (int)cols, (int)rank, 1};
    p.maps.a = p.left ? tensor_map(q, 1, rank, rows, depth) : tensor_map(n, 1, rows, rank, LH_TILE);
    p.maps.b = tensor_map(p.left ? n : q, 1, rank, cols, depth);
    p.maps.from = tensor_map(w, 1, rows, cols, LH_TILE), p.maps.to = tensor_map(w, 1, rows, cols, 16);
    return p;
}

template <int DEPTH, typename Sink>
void low_back_launch(const Device* dev, const LowBackPlan* p, const Sink& sink, bool early) {
    auto kernel = p->left ? low_back_kernel<true, DEPTH, Sink> : low_back_kernel<false, DEPTH, Sink>;
    constexpr int BYTES = LowBackLayout<DEPTH>::BYTES;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
    const int64_t steps = ceil_div(p->s.rows, LH_TILE) * ceil_div(p->s.cols, 64);
    low_stream_launch(dev, kernel, steps, LH_BACK_THREADS, BYTES, early, p->maps, p->s, sink);
}

// `early`: the blocks may begin while the last launch, which lets them, ends; it must not write the weights.
template <typename Sink>
void low_back_run(const Device* dev, const LowBackPlan* p, const Sink& sink, bool early) {
    const int depth = low_back_depth(p->s.depth);
    if (depth == 64)
        low_back_launch<64>(dev, p, sink, early);
    else if (depth == 128)
        low_back_launch<128>(dev, p, sink, early);
    else if (depth == 192)
        low_back_launch<192>(dev, p, sink, early);
    else
        low_back_launch<256>(dev, p, sink, early);
}
#endif
