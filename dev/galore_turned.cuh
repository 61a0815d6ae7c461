// The second product of galore_mma.cuh, U = x^T y^T turned, with its update of the weights, in fp32 with TF32 products
// on sm_90a: for matrices W (rows, cols),
//     right: x = Q (rank, C), y = N (R, rank),      left: x = N (rank, C), y = Q^T (R, rank)
// wgmma takes operands of TF32 from shared memory only with K along a row, which y has and x has not. So x goes through
// registers, and what a block makes is U transposed: it keeps 128 columns of x as operands of its two warpgroups, walks
// down the weights, 32 rows a step, and reads and writes the weights word by word in shared memory, where the copy
// engine's permutation puts the words of a warp in different banks. The blocks share all steps evenly.
//
// y must be rounded to TF32 (low_split), since the tensor cores cut; x is rounded here. With PARTS 3, x and y are in
// two parts of 11 bits, as in galore_mma.cuh, and y's second one is an array of its own. The rank is at most 128.
// The optimizer, whose products of fp32 have a rank of any size, does not use it. Deterministic. Sizes are multiples of
// 8, addresses of 16 bytes.
#pragma once
#include "galore_project_tf32.cuh"

#ifdef __CUDACC__
constexpr int LT_ROWS = 32, LT_THREADS = 384, LT_PANEL_BYTES = LT_ROWS * PANEL_ROW_BYTES;

struct LowTurnedMaps {
    CUtensorMap x, y, rest, weights;  // rest: of y, if fp32 is in two parts
};

// This says where things lie in shared memory: a stage has 32 rows of y and of the weights, as panels of 32 columns,
// or a warpgroup's half of x.
template <int DEPTH, int PARTS>
struct LowTurnedLayout {
    static constexpr int Y = (PARTS == 3 ? 2 : 1) * DEPTH / 32 * LT_PANEL_BYTES, STAGE = Y + 4 * LT_PANEL_BYTES,
                         X = 2 * DEPTH * PANEL_ROW_BYTES, STAGES = (LH_SHARED_BYTES - 512) / STAGE,
                         BARRIERS = STAGES * STAGE, BYTES = BARRIERS + STAGES * 16;
    static_assert(X <= STAGE && STAGES >= 4, "x takes two of several stages");
    static constexpr int full(int stage) { return BARRIERS + stage * 8; }
    static constexpr int empty(int stage) { return BARRIERS + (STAGES + stage) * 8; }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A block's steps: they go down columns of tiles. Before the first one here of each, two bring x, half by half.
template <int DEPTH, int PARTS>
struct LowDescent {
    typedef LowTurnedLayout<DEPTH, PARTS> Layout;
    int at, end, down, present, halves;  // halves: of x that have come for the tile
    Ring<Layout::STAGES> ring;

    __device__ __forceinline__ LowDescent(LowResult s) {
        down = (s.rows + LT_ROWS - 1) / LT_ROWS, present = -1, halves = 0;
        const int64_t all = (int64_t)down * ((s.cols + LH_TILE - 1) / LH_TILE);
        at = (int)(all * blockIdx.x / gridDim.x), end = (int)(all * (blockIdx.x + 1) / gridDim.x);
    }
    __device__ __forceinline__ bool more() const { return at < end; }
    __device__ __forceinline__ bool brings_x() const { return at / down != present; }
    __device__ __forceinline__ void advance() {
        if (!brings_x())
            at++;
        else if (++halves == 2)
            present = at / down, halves = 0;
        ring.advance();
    }
    __device__ __forceinline__ int row() const { return at % down * LT_ROWS; }
    __device__ __forceinline__ int column() const { return at / down * LH_TILE; }
};

// One thread: orders the weights.
template <int DEPTH, int PARTS>
__device__ __forceinline__ void lt_weights(uint32_t shared, const LowTurnedMaps* maps, LowDescent<DEPTH, PARTS> d) {
    typedef LowTurnedLayout<DEPTH, PARTS> Layout;
    for (; d.more(); d.advance()) {
        const uint32_t full = shared + Layout::full(d.ring.stage),
                       to = shared + d.ring.stage * Layout::STAGE + Layout::Y;
        barrier_wait(shared + Layout::empty(d.ring.stage), d.ring.parity ^ 1);
        if (d.brings_x()) {
            barrier_arrive(full);
            continue;
        }
        barrier_expect(full, 4 * LT_PANEL_BYTES);
        for (int p = 0; p < 4; p++)
            tensor_load(to + p * LT_PANEL_BYTES, &maps->weights, full, d.column() + p * 32, d.row(), 0);
    }
}

// Another one: orders the operands, which may be results of the last launch.
template <int DEPTH, int PARTS>
__device__ __forceinline__ void lt_operands(uint32_t shared, const LowTurnedMaps* maps, LowDescent<DEPTH, PARTS> d) {
    typedef LowTurnedLayout<DEPTH, PARTS> Layout;
    wait_for_last();
    for (; d.more(); d.advance()) {
        const uint32_t full = shared + Layout::full(d.ring.stage), to = shared + d.ring.stage * Layout::STAGE;
        barrier_wait(shared + Layout::empty(d.ring.stage), d.ring.parity ^ 1);
        barrier_expect(full, d.brings_x() ? Layout::X : Layout::Y);
        if (d.brings_x()) {
            for (int p = 0; p < 2; p++) {
                const int column = d.column() + d.halves * 64 + p * 32;
                tensor_load(to + p * DEPTH * PANEL_ROW_BYTES, &maps->x, full, column, 0, 0);
            }
        } else {
            for (int p = 0; p < DEPTH / 32; p++)
                tensor_load(to + p * LT_PANEL_BYTES, &maps->y, full, p * 32, d.row(), 0);
            for (int p = 0; p < DEPTH / 32 && PARTS == 3; p++)
                tensor_load(to + Layout::Y / 2 + p * LT_PANEL_BYTES, &maps->rest, full, p * 32, d.row(), 0);
        }
    }
}

// A warp: updates its 16 columns of a step's rows of the weights, whose four panels begin at `panels`.
template <typename Sink>
__device__ __forceinline__ void lt_update(const Sink& sink, const float (&c)[LT_ROWS / 8][4], uint32_t panels, int row,
                                          int column, int warp, int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int across = warp * 16 + half * 8 + lane / 4;
        const uint32_t panel = panels + across / 32 * LT_PANEL_BYTES + across % 4 * 4;
#pragma unroll
        for (int n = 0; n < LT_ROWS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int down = n * 8 + lane % 4 * 2 + i;
                const uint32_t at = panel + panel_offset(down, across % 32 / 4);
                const float w =
                    sink.one(row + down, column + across, __uint_as_float(load_word(at)), c[n][half * 2 + i]);
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(w) : "memory");
            }
        }
    }
}

struct LowTurnedStep {
    int stage, row, column;
};

// A warp: updates the weights of a step; the first of two, which have a panel of them, orders them away. `last` is the
// stage of the step before.
template <typename Layout, typename Sink>
__device__ __forceinline__ void lt_deliver(uint32_t shared, const LowTurnedMaps* maps, const Sink& sink,
                                           const float (&c)[LT_ROWS / 8][4], LowTurnedStep step, int* last, int warp,
                                           int lane) {
    const uint32_t panels = shared + step.stage * Layout::STAGE + Layout::Y;
    const bool first = warp % 2 == 0 && lane == 0;
    if (*last >= 0 && first) {
        store_wait_read<0>();  // TMA has read it
        barrier_arrive(shared + Layout::empty(*last));
    }
    lt_update(sink, c, panels, step.row, step.column, warp, lane);
    fence_async();
    group_sync(1 + warp / 2, 64);
    if (first) {
        const int panel = warp / 2;
        tensor_store(&maps->weights, panels + panel * LT_PANEL_BYTES, step.column + panel * 32, step.row, 0);
        store_commit();
    }
    *last = step.stage;
}

// A step's weights are updated while the next step's product is made.
template <int DEPTH, int PARTS, typename Sink>
__device__ __forceinline__ void lt_consume(uint32_t shared, const LowTurnedMaps* maps, LowDescent<DEPTH, PARTS> d,
                                           const Sink& sink, int warp, int lane) {
    typedef LowTurnedLayout<DEPTH, PARTS> Layout;
    uint32_t x[DEPTH / 8][4], rest[DEPTH / 8][4];
    float sums[LT_ROWS / 8][4];  // of `held`
    LowTurnedStep held = {-1, 0, 0};
    int last = -1;
    for (; d.more(); d.advance()) {
        const uint32_t stage = shared + d.ring.stage * Layout::STAGE;
        barrier_wait(shared + Layout::full(d.ring.stage), d.ring.parity);
        if (d.brings_x()) {
            // Sums that are held would keep stages that the next steps need.
            if (held.stage >= 0) {
                lt_deliver<Layout>(shared, maps, sink, sums, held, &last, warp, lane);
                if (warp % 2 == 0 && lane == 0) {
                    store_wait_read<0>();
                    barrier_arrive(shared + Layout::empty(last));
                }
                held.stage = last = -1;
            }
            if (warp / 4 == d.halves) {
#pragma unroll
                for (int k = 0; k < DEPTH / 8; k++)
                    lh_read_down<PARTS, DEPTH>(x[k], rest[k], stage, warp % 4 * 16, k, lane);
            }
            fence_async();
            group_sync(1 + warp / 2, 64);
            if (warp % 2 == 0 && lane == 0) barrier_arrive(shared + Layout::empty(d.ring.stage));
            continue;
        }
        float c[LT_ROWS / 8][4];
        const uint64_t y = uniform_operand(operand_k_major<LT_ROWS>(stage, 0));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < DEPTH / 8; k++) {
            const int at = k / 4 * LT_PANEL_BYTES + k % 4 * 32;
            lh_multiply_tf32<PARTS, LT_ROWS>(c, x[k], rest[k], operand_step(y, at), operand_step(y, Layout::Y / 2 + at),
                                             k > 0);
        }
        wgmma_commit();
        if (held.stage >= 0) lt_deliver<Layout>(shared, maps, sink, sums, held, &last, warp, lane);
        wgmma_wait<0>();
        wgmma_hold(c);
#pragma unroll
        for (int n = 0; n < LT_ROWS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[n][i] = c[n][i];
        }
        held = {d.ring.stage, d.row(), d.column()};
    }
    if (held.stage >= 0) lt_deliver<Layout>(shared, maps, sink, sums, held, &last, warp, lane);
    if (warp % 2 == 0 && lane == 0) store_wait_read<0>();
}
#endif

// Any grid. The sink's one(row, column, w, u) returns the new weight; some lie outside of the matrix.
template <int DEPTH, int PARTS, typename Sink>
__global__ void __launch_bounds__(LT_THREADS, 1)
    low_turned_kernel(const __grid_constant__ LowTurnedMaps maps, LowResult s, Sink sink) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef LowTurnedLayout<DEPTH, PARTS> Layout;
    extern __shared__ __align__(1024) unsigned char low_turned_shared[];
    const uint32_t shared = shared_offset(low_turned_shared);
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < Layout::STAGES; i++) {
            barrier_init(shared + Layout::full(i), 2);
            barrier_init(shared + Layout::empty(i), 4);  // a thread for each panel of the weights
        }
        barrier_init_done();
    }
    __syncthreads();
    const LowDescent<DEPTH, PARTS> descent(s);
    if (warp >= 8) {
        registers_shrink<24>();
        if (warp == 8 && is_elected()) lt_weights<DEPTH, PARTS>(shared, &maps, descent);
        if (warp == 9 && is_elected()) lt_operands<DEPTH, PARTS>(shared, &maps, descent);
    } else {
        registers_grow<240>();
        lt_consume<DEPTH, PARTS>(shared, &maps, descent, sink, warp, lane);
    }
#else
    (void)maps, (void)s, (void)sink;
#endif
}

struct LowTurnedPlan {
    LowTurnedMaps maps;
    LowResult s;
};

inline bool low_turned_fits(const Device* dev, int64_t rank) {
    return low_project_fits(dev) && rank <= 128;
}

// y is n, or on the left q_turned, (R, rank), which is not read otherwise; `rest`, if not null, is what it leaves.
inline LowTurnedPlan low_turned_plan(float* w, const float* n, const float* q, const float* q_turned, const float* rest,
                                     int64_t rows, int64_t cols, int64_t rank) {
    LowTurnedPlan p;
    p.s = {(int)rows, (int)cols, (int)rank, 1};
    p.maps.x = tensor_map(rows < cols ? n : q, 1, rank, cols, rank <= 64 ? 64 : 128, true);
    p.maps.y = tensor_map(rows < cols ? q_turned : n, 1, rows, rank, LT_ROWS, true);
    p.maps.rest = rest ? tensor_map(rest, 1, rows, rank, LT_ROWS, true) : p.maps.y;
    p.maps.weights = tensor_map(w, 1, rows, cols, LT_ROWS, true);
    return p;
}

template <int DEPTH, int PARTS, typename Sink>
void low_turned_launch(const Device* dev, const LowTurnedPlan* p, const Sink& sink, bool early) {
    auto kernel = low_turned_kernel<DEPTH, PARTS, Sink>;
    constexpr int BYTES = LowTurnedLayout<DEPTH, PARTS>::BYTES;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
    const int64_t steps = ceil_div(p->s.rows, LT_ROWS) * ceil_div(p->s.cols, LH_TILE);
    low_stream_launch(dev, kernel, steps, LT_THREADS, BYTES, early, p->maps, p->s, sink);
}

// `early`: as low_back_run's.
template <int PARTS, typename Sink>
void low_turned_run(const Device* dev, const LowTurnedPlan* p, const Sink& sink, bool early) {
    if (p->s.depth <= 64)
        low_turned_launch<64, PARTS>(dev, p, sink, early);
    else
        low_turned_launch<128, PARTS>(dev, p, sink, early);
}
#endif
