// The two products of low_rank.cuh in bf16 on sm_90a, by products of warpgroups (wgmma) on operands that the copy
// engine brings. Shapes are of results as they lie in memory, (rows, cols) = a b, summed over `depth`:
//     project   right: low (R, rank) = G Q^T,  left: low (rank, C) = Q G;   depth is the shorter side
//     back      right: U (R, C) = N Q,         left: U = Q^T N;             depth is the rank, at most 256
// A projection is a result of few tiles and a long sum. A block has a tile of 128 x 128 and a part of the sum; the
// blocks of a tile are a cluster, each of which adds up a part of the tile from all of their shared memories, in order,
// and hands it to the sink. Two blocks live on a multiprocessor, so that one loads while the other one adds.
//
// Back, the weights' bytes are what takes time. A block stays, keeps 128 rows of a in shared memory, and walks along
// their columns, 64 PANELS at a time: the copy engine brings columns of b and the weights there, the product is made,
// the sink updates the weights where they lie, in the form that the copy engine brought them in (each lane reads what
// belongs to its sums with ldmatrix), and the copy engine takes them away. The blocks share all such steps evenly.
//
// Both products are deterministic. Sizes are multiples of 8, addresses of 16 bytes.
#pragma once
#include "low_rank.cuh"
#ifdef __CUDACC__
#include "hopper.cuh"

constexpr int LH_TILE = 128, LH_PANEL_BYTES = LH_TILE * PANEL_ROW_BYTES;

// The result of a product: its sides in memory, what the sum runs over, and the blocks that share a tile.
struct LowResult {
    int rows, cols, depth, slices;
};

struct LowProjectMaps {
    CUtensorMap a, b, rest, next;  // rest: of Q, if fp32 is in two parts; next: see LowAhead
};

// What the blocks of a projection bring to the L2 cache when their own operands are on the way: `fetched` boxes of what
// each of `blocks` blocks of the launch after it begins with, of (down, across) boxes of box_rows x box_columns that
// they walk over row by row, or with `turned` column by column. None: fetched is 0.
struct LowAhead {
    int fetched, blocks, down, across, box_rows, box_columns;
    bool turned;
};

struct LowBackMaps {
    CUtensorMap a, b, from, to;  // the weights as they are read and written
};

// A place among the stages, and the parity of its present round.
template <int STAGES>
struct LowRing {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Projection.

constexpr int LH_PROJECT_THREADS = 288, LH_STRIDE = LH_TILE + 8;

// Stages of a, b and, of fp32 in two parts, what b leaves; then the barriers of each, it has come and it is free.
template <int PARTS, int STAGES>
struct LowProjectLayout {
    static constexpr int STAGE = (PARTS == 3 ? 3 : 2) * LH_PANEL_BYTES, BYTES = STAGES * (STAGE + 16);
    static constexpr int full(int stage) { return STAGES * STAGE + stage * 8; }
    static constexpr int empty(int stage) { return full(STAGES + stage); }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The halves of a cluster's barrier, between which a block may do what concerns itself alone.
__device__ __forceinline__ void lh_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}
__device__ __forceinline__ void lh_cluster_wait() {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// One thread: orders the operands of the block's steps. In bf16, a is the result's rows; in TF32 it is G, whose rows
// or, on the left, columns are channels.
template <typename E, int PARTS, bool LEFT, int STAGES>
__device__ __forceinline__ void lh_project_produce(uint32_t shared, const LowProjectMaps* maps, int row, int column,
                                                   int first, int steps) {
    typedef LowProjectLayout<PARTS, STAGES> Layout;
    constexpr bool FP32 = sizeof(E) == 4;
    constexpr int DEPTH = LowOperand<E>::DEPTH, ACROSS = PANEL_ROW_BYTES / (int)sizeof(E),
                  BYTES = DEPTH * PANEL_ROW_BYTES;  // of a panel whose rows are of K
    LowRing<STAGES> ring;
    for (int step = 0; step < steps; step++, ring.advance()) {
        const uint32_t a = shared + ring.stage * Layout::STAGE, b = a + LH_PANEL_BYTES,
                       arrived = shared + Layout::full(ring.stage);
        const int k = (first + step) * DEPTH;
        barrier_wait(shared + Layout::empty(ring.stage), ring.parity ^ 1, 1);
        barrier_expect(arrived, Layout::STAGE);
        if (PARTS == 3) tensor_load(b + LH_PANEL_BYTES, &maps->rest, arrived, k, LEFT ? row : column, 0);
        if (!LEFT || !FP32) tensor_load(a, &maps->a, arrived, k, row, 0);
        if (!LEFT) tensor_load(b, &maps->b, arrived, k, column, 0);
        if (LEFT && FP32) tensor_load(b, &maps->b, arrived, k, row, 0);
        if (LEFT) {
            for (int p = 0; p < LH_TILE / ACROSS; p++)
                tensor_load((FP32 ? a : b) + p * BYTES, FP32 ? &maps->a : &maps->b, arrived, column + p * ACROSS, k, 0);
        }
    }
}

// Starts a step of the product of a warpgroup: 64 of the result's rows.
template <int PARTS, bool LEFT>
__device__ __forceinline__ void lh_project_step(bf16, float (&c)[LH_TILE / 8][4], uint32_t a, int warp, int, bool add) {
    const uint32_t b = a + LH_PANEL_BYTES;
    const uint64_t left = uniform_operand(operand_k_major<LH_TILE>(a + warp / 4 * 64 * PANEL_ROW_BYTES, 0)),
                   right = uniform_operand(LEFT ? operand_mn_major<64>(b, 0) : operand_k_major<LH_TILE>(b, 0));
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++)
        Wgmma<LH_TILE>::shared<0, LEFT>(c, operand_step(left, j * 32),
                                        operand_step(right, j * (LEFT ? 16 * PANEL_ROW_BYTES : 32)), add || j > 0);
}

// The words of fp32 of step k of an operand a whose rows in shared memory are of K, rounded to TF32, and what that
// leaves: this warp's 16 of M, from `first` on. DEPTH: rows of a panel.
template <int PARTS, int DEPTH>
__device__ __forceinline__ void lh_read_down(uint32_t (&x)[4], uint32_t (&rest)[4], uint32_t panels, int first, int k,
                                             int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int of_m = first + i % 2 * 8 + lane / 4, of_k = k * 8 + i / 2 * 4 + lane % 4;
        x[i] =
            load_word(panels + of_m / 32 * DEPTH * PANEL_ROW_BYTES + panel_offset(of_k, of_m % 32 / 4) + of_m % 4 * 4);
    }
    lp_split<PARTS>(x, rest);
}

// A step of K of a product in TF32 with a in registers; with PARTS 3, the small products first. rest_b: as b, of what
// it leaves.
template <int PARTS, int N>
__device__ __forceinline__ void lh_multiply_tf32(float (&c)[N / 8][4], const uint32_t (&a)[4],
                                                 const uint32_t (&rest)[4], uint64_t b, uint64_t rest_b, bool add) {
    if (PARTS == 3) {
        Wgmma<N, float>::registers(c, rest, b, add);
        Wgmma<N, float>::registers(c, a, rest_b, true);
    }
    Wgmma<N, float>::registers(c, a, b, PARTS == 3 || add);
}

// In TF32: 64 channels, by all of the rank. G goes through registers, rounded; Q is rounded already.
template <int PARTS, bool LEFT>
__device__ __forceinline__ void lh_project_step(float, float (&c)[LH_TILE / 8][4], uint32_t a, int warp, int lane,
                                                bool add) {
    const uint64_t right = uniform_operand(operand_k_major<LH_TILE>(a + LH_PANEL_BYTES, 0));
    uint32_t x[4][4], rest[4][4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (LEFT) {
            lh_read_down<PARTS, 32>(x[j], rest[j], a, warp * 16, j, lane);
        } else {
            load_matrices(x[j], a + panel_offset(warp * 16 + lane % 16, j * 2 + lane / 16));
            lp_split<PARTS>(x[j], rest[j]);
        }
    }
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++)
        lh_multiply_tf32<PARTS, LH_TILE>(c, x[j], rest[j], operand_step(right, j * 32),
                                         operand_step(right, LH_PANEL_BYTES + j * 32), add || j > 0);
}

// Two warpgroups multiply. With operands in registers, a step ends before the next one overwrites them.
template <typename E, int PARTS, bool LEFT, int STAGES>
__device__ __forceinline__ void lh_project_multiply(float (&c)[LH_TILE / 8][4], uint32_t shared, int warp, int lane,
                                                    int steps) {
    typedef LowProjectLayout<PARTS, STAGES> Layout;
    LowRing<STAGES> ring;
    int last = 0;
    for (int step = 0; step < steps; step++, ring.advance()) {
        barrier_wait(shared + Layout::full(ring.stage), ring.parity, 2);
        lh_project_step<PARTS, LEFT>(E(), c, shared + ring.stage * Layout::STAGE, warp, lane, step > 0);
        wgmma_commit();
        if constexpr (sizeof(E) == 4) {
            wgmma_wait<0>();
            wgmma_hold(c);
            if (lane == 0) barrier_arrive(shared + Layout::empty(ring.stage));
        } else {
            wgmma_wait<1>();
            if (step > 0 && lane == 0) barrier_arrive(shared + Layout::empty(last));
        }
        last = ring.stage;
    }
    wgmma_wait<0>();
    wgmma_hold(c);
}

// One thread, see LowAhead.
__device__ __forceinline__ void lh_fetch_ahead(const CUtensorMap* map, LowAhead a) {
    const int all = gridDim.x * gridDim.y * gridDim.z,
              self = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    for (int block = self; block < a.blocks && a.fetched > 0; block += all) {
        const int64_t steps = (int64_t)a.down * a.across;
        const int begin = (int)(steps * block / a.blocks), end = (int)(steps * (block + 1) / a.blocks);
        for (int at = begin; at < end && at < begin + a.fetched; at++) {
            const int row = a.turned ? at % a.down : at / a.across, column = a.turned ? at / a.down : at % a.across;
            for (int c = 0; c < (a.turned ? LH_TILE : a.box_columns); c += a.box_columns)
                tensor_fetch(map, column * (a.turned ? LH_TILE : a.box_columns) + c, row * a.box_rows, 0);
        }
    }
}

// Leaves a thread's sums in shared memory, in rows of LH_STRIDE; TURNED: the result is their transposed.
template <bool TURNED>
__device__ __forceinline__ void lh_leave(const float (&c)[LH_TILE / 8][4], float* to, int row, int lane) {
#pragma unroll
    for (int n = 0; n < LH_TILE / 8; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = row + lane / 4 + half * 8, column = n * 8 + lane % 4 * 2;
            if (TURNED) {
                to[column * LH_STRIDE + r] = c[n][half * 2];
                to[(column + 1) * LH_STRIDE + r] = c[n][half * 2 + 1];
            } else {
                *(float2*)(to + r * LH_STRIDE + column) = make_float2(c[n][half * 2], c[n][half * 2 + 1]);
            }
        }
    }
}

// A thread's pieces of four elements of the tile, AT_ONCE at a time: each is asked for from memory first.
template <int AT_ONCE, typename Sink>
struct LowPieces {
    static constexpr int QUARTERS = LH_TILE / 4, PIECES = LH_TILE * QUARTERS;
    typename Sink::Old old[AT_ONCE];
    int next, step, row, column;  // next: the number of the first piece
    LowResult s;

    __device__ __forceinline__ bool find(int u, int* r, int* c) const {
        const int at = next + u * step;
        *r = row + at / QUARTERS, *c = column + at % QUARTERS * 4;
        return at < PIECES && *r < s.rows && *c < s.cols;
    }
    __device__ __forceinline__ void ask(const Sink& sink) {
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            int r, c;
            if (find(u, &r, &c)) old[u] = sink.load(r, c);
        }
    }
    __device__ __forceinline__ void give(const Sink& sink, uint32_t shared) {
        float4 sum[AT_ONCE];
        int r, c;
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            const int at = next + u * step;
            const uint32_t address = shared + (at / QUARTERS * LH_STRIDE + at % QUARTERS * 4) * 4;
            if (find(u, &r, &c)) sum[u] = lp_sum<LP_SLICES>(address, s.slices);
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            if (find(u, &r, &c)) sink.take(r, c, sum[u], old[u]);
        }
        next += AT_ONCE * step;
    }
};
#endif

// Grid (slices, tiles of the rank, tiles of channels), clusters of `slices`, at most 8. The sink takes four elements of
// a row at a time, as low_rank.cuh's do.
template <typename E, int PARTS, bool LEFT, int STAGES, typename Sink>
__global__ void __launch_bounds__(LH_PROJECT_THREADS, STAGES == 3 ? 2 : 1)
    low_project_kernel(const __grid_constant__ LowProjectMaps maps, LowResult s, LowAhead ahead, Sink sink) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef LowProjectLayout<PARTS, STAGES> Layout;
    extern __shared__ __align__(1024) unsigned char low_project_shared[];
    const uint32_t shared = shared_offset(low_project_shared);
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared + Layout::full(i), 1);
            barrier_init(shared + Layout::empty(i), 8);
        }
        barrier_init_done();
    }
    __syncthreads();
    launch_next();
    const int row = (LEFT ? blockIdx.y : blockIdx.z) * LH_TILE, column = (LEFT ? blockIdx.z : blockIdx.y) * LH_TILE;
    constexpr int DEPTH = LowOperand<E>::DEPTH;
    const int all = (s.depth + DEPTH - 1) / DEPTH, first = all * (int)blockIdx.x / s.slices,
              steps = all * ((int)blockIdx.x + 1) / s.slices - first;
    constexpr bool ASKS_FIRST = STAGES > 3;  // registers hold what the sink reads while the product is made
    typedef LowPieces<ASKS_FIRST ? 4 : 2, Sink> Pieces;
    Pieces pieces;
    pieces.next = blockIdx.x * 256 + threadIdx.x, pieces.step = s.slices * 256;
    pieces.row = row, pieces.column = column, pieces.s = s;
    if (warp == 8) {
        if (is_elected()) {
            lh_project_produce<E, PARTS, LEFT, STAGES>(shared, &maps, row, column, first, steps);
            lh_fetch_ahead(&maps.next, ahead);
        }
        __syncwarp();
        __syncthreads();
    } else {
        if (ASKS_FIRST) pieces.ask(sink);
        float c[LH_TILE / 8][4];
        lh_project_multiply<E, PARTS, LEFT, STAGES>(c, shared, warp, lane, steps);
        __syncthreads();  // nobody reads the stages any more
        lh_leave<LEFT && sizeof(E) == 4>(c, (float*)low_project_shared, warp * 16, lane);
    }
    lh_cluster_arrive();
    if (warp < 8 && !ASKS_FIRST) pieces.ask(sink);
    lh_cluster_wait();
    if (warp < 8) {
        pieces.give(sink, shared);
        while (pieces.next < Pieces::PIECES) pieces.ask(sink), pieces.give(sink, shared);
    }
    __syncwarp();
    lh_cluster_arrive();
    lh_cluster_wait();  // no block ends while another reads its shared memory
#else
    (void)maps, (void)s, (void)ahead, (void)sink;
#endif
}

struct LowProjectPlan {
    LowProjectMaps maps;
    LowResult s;
    LowAhead ahead;
    unsigned across, down;  // tiles of the rank and of channels
    bool left;
};

// The number of blocks that share a tile: a multiprocessor's steps in K, and about four for each of its blocks.
inline int low_project_slices(const Device* dev, int64_t tiles, int64_t steps) {
    int best = 1;
    double least = INFINITY;
    for (int slices = 1; slices <= LP_SLICES; slices *= 2) {
        const double time = (double)ceil_div(tiles * slices, dev->sm_count) * ((double)ceil_div(steps, slices) + 4.0);
        if (steps >= slices && time < least) least = time, best = slices;
    }
    return best;
}

// q of fp32 is rounded to TF32; `rest`, if not null, is what that leaves of it.
template <typename E>
LowProjectPlan low_project_plan(const Device* dev, const E* g, const E* q, const E* rest, int64_t rows, int64_t cols,
                                int64_t rank) {
    constexpr bool FP32 = sizeof(E) == 4;
    LowProjectPlan p;
    p.left = rows < cols;
    const int64_t side = p.left ? rows : cols, length = p.left ? cols : rows;
    p.across = (unsigned)ceil_div(rank, LH_TILE), p.down = (unsigned)ceil_div(length, LH_TILE);
    p.s.rows = (int)(p.left ? rank : rows), p.s.cols = (int)(p.left ? cols : rank), p.s.depth = (int)side;
    p.s.slices = low_project_slices(dev, (int64_t)p.across * p.down, ceil_div(side, LowOperand<E>::DEPTH));
    const CUtensorMap of_q = tensor_map(q, 1, rank, side, LH_TILE, FP32),
                      of_g = tensor_map(g, 1, rows, cols, p.left ? LowOperand<E>::DEPTH : LH_TILE, FP32);
    p.maps.a = p.left && !FP32 ? of_q : of_g, p.maps.b = p.left && !FP32 ? of_g : of_q;
    p.maps.rest = rest ? tensor_map(rest, 1, rank, side, LH_TILE, FP32) : of_q;
    p.maps.next = of_g, p.ahead = {};
    return p;
}

template <typename E, int PARTS, int STAGES, typename Sink>
void low_project_run(const Device* dev, const LowProjectPlan* p, const Sink& sink) {
    auto kernel =
        p->left ? low_project_kernel<E, PARTS, true, STAGES, Sink> : low_project_kernel<E, PARTS, false, STAGES, Sink>;
    constexpr int BYTES = LowProjectLayout<PARTS, STAGES>::BYTES;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)p->s.slices, p->across, p->down), config.blockDim = dim3(LH_PROJECT_THREADS);
    config.dynamicSmemBytes = BYTES, config.stream = dev->stream;
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = (unsigned)p->s.slices, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.attrs = &cluster, config.numAttrs = 1;
    check(cudaLaunchKernelEx(&config, kernel, p->maps, p->s, p->ahead, sink));
}

// Back.

constexpr int LH_BACK_THREADS = 320, LH_SHARED_BYTES = 227 * 1024;

// Where things lie in shared memory. DEPTH: the rank, rounded up; zeros fill the rest.
template <int DEPTH, int PANELS>
struct LowBackLayout {
    static constexpr int A = LH_TILE * DEPTH * 2, B = DEPTH * PANEL_ROW_BYTES, STAGE = PANELS * (B + LH_PANEL_BYTES),
                         STAGES = (LH_SHARED_BYTES - A - 512) / STAGE, BARRIERS = A + STAGES * STAGE,
                         BYTES = BARRIERS + STAGES * 16 + 16;
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
template <int DEPTH, int PANELS>
__device__ __forceinline__ void lh_back_weights(uint32_t shared, const LowBackMaps* maps, LowWalk walk) {
    typedef LowBackLayout<DEPTH, PANELS> Layout;
    LowRing<Layout::STAGES> ring;
    for (; walk.at < walk.end; walk.at++, ring.advance()) {
        const uint32_t full = shared + Layout::full(ring.stage),
                       to = shared + Layout::A + ring.stage * Layout::STAGE + PANELS * Layout::B;
        const int row = walk.at / walk.across * LH_TILE, column = walk.at % walk.across * 64 * PANELS;
        barrier_wait(shared + Layout::empty(ring.stage), ring.parity ^ 1, 3);
        barrier_expect(full, PANELS * LH_PANEL_BYTES);
        for (int p = 0; p < PANELS; p++)
            tensor_load(to + p * LH_PANEL_BYTES, &maps->from, full, column + p * 64, row, 0);
    }
}

// Another one: orders the operands, which may be results of the last launch.
template <bool LEFT, int DEPTH, int PANELS>
__device__ __forceinline__ void lh_back_operands(uint32_t shared, const LowBackMaps* maps, LowWalk walk) {
    typedef LowBackLayout<DEPTH, PANELS> Layout;
    LowRing<Layout::STAGES> ring;
    int present = -1;
    uint32_t free = 1;
    wait_for_last();
    for (; walk.at < walk.end; walk.at++, ring.advance()) {
        const int row = walk.at / walk.across, column = walk.at % walk.across * 64 * PANELS;
        const uint32_t here = shared + Layout::HERE, full = shared + Layout::full(ring.stage),
                       to = shared + Layout::A + ring.stage * Layout::STAGE;
        if (row != present) {
            barrier_wait(shared + Layout::DONE, free, 4);
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
        barrier_wait(shared + Layout::empty(ring.stage), ring.parity ^ 1, 5);
        barrier_expect(full, PANELS * Layout::B);
        for (int p = 0; p < PANELS; p++) tensor_load(to + p * Layout::B, &maps->b, full, column + p * 64, 0, 0);
    }
}

// A warpgroup: c = its 64 rows of a times b.
template <bool LEFT, int DEPTH, int PANELS>
__device__ __forceinline__ void lh_back_multiply(float (&c)[PANELS * 8][4], uint32_t shared, uint32_t b, int group) {
    const uint32_t a = shared + group * (LEFT ? DEPTH : 64) * PANEL_ROW_BYTES;
    const uint64_t left = uniform_operand(LEFT ? operand_mn_major<DEPTH>(a, 0) : operand_k_major<LH_TILE>(a, 0)),
                   right = uniform_operand(operand_mn_major<DEPTH>(b, 0));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++)
        Wgmma<PANELS * 64>::template shared<LEFT, 1>(
            c, operand_step(left, LEFT ? k * 16 * PANEL_ROW_BYTES : k / 4 * LH_PANEL_BYTES + k % 4 * 32),
            operand_step(right, k * 16 * PANEL_ROW_BYTES), k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(c);
}

// A warp: updates its 16 rows of the weights, at `slot` in the first panel, whose first element is (row, column).
template <int PANELS, typename Sink>
__device__ __forceinline__ void lh_back_update(const Sink& sink, const float (&c)[PANELS * 8][4], uint32_t slot,
                                               int row, int column, int lane) {
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
        const uint32_t place = slot + panel * LH_PANEL_BYTES + panel_offset(lane % 16, lane / 16);
        const typename Sink::Line line[2] = {sink.line(row + lane / 4, column + panel * 64),
                                             sink.line(row + lane / 4 + 8, column + panel * 64)};
#pragma unroll
        for (int group = 0; group < 4; group++) {
            const int n = panel * 8 + group * 2;
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
}

template <bool LEFT, int DEPTH, int PANELS, typename Sink>
__device__ __forceinline__ void lh_back_consume(uint32_t shared, const LowBackMaps* maps, LowWalk walk,
                                                const Sink& sink, int warp, int lane) {
    typedef LowBackLayout<DEPTH, PANELS> Layout;
    LowRing<Layout::STAGES> ring;
    int present = -1, last = -1;
    uint32_t arrived = 0;
    for (; walk.at < walk.end; walk.at++, ring.advance()) {
        const int row = walk.at / walk.across, column = walk.at % walk.across * 64 * PANELS;
        const uint32_t b = shared + Layout::A + ring.stage * Layout::STAGE,
                       slot = b + PANELS * Layout::B + warp * 16 * PANEL_ROW_BYTES;
        if (row != present) {
            if (present >= 0 && lane == 0) barrier_arrive(shared + Layout::DONE);
            barrier_wait(shared + Layout::HERE, arrived, 6);
            present = row, arrived ^= 1;
        }
        barrier_wait(shared + Layout::full(ring.stage), ring.parity, 7);
        float c[PANELS * 8][4];
        lh_back_multiply<LEFT, DEPTH, PANELS>(c, shared, b, warp / 4);
        if (last >= 0 && lane == 0) {
            store_wait_read<0>();  // the copy engine has read the stage before
            barrier_arrive(shared + Layout::empty(last));
        }
        lh_back_update<PANELS>(sink, c, slot, row * LH_TILE + warp * 16, column, lane);
        fence_async();
        __syncwarp();
        if (lane == 0) {
            for (int p = 0; p < PANELS; p++)
                tensor_store(&maps->to, slot + p * LH_PANEL_BYTES, column + p * 64, row * LH_TILE + warp * 16, 0);
            store_commit();
        }
        last = ring.stage;
    }
    if (lane == 0) store_wait_read<0>();
}
#endif

// Any grid. The sink's pairs(line, group, row, column, w, u) updates the weights at column, column + 1, column + 8 and
// column + 9 of a row, of which a word has two, from those elements of U; some lie outside of the matrix, and are not
// stored. All lanes of a warp call it together, the four of a row with the same `group` of 16 of 64 columns, and `line`
// is what line(row, first of the 64 columns) has returned to the lane.
template <bool LEFT, int DEPTH, int PANELS, typename Sink>
__global__ void __launch_bounds__(LH_BACK_THREADS, 1)
    low_back_kernel(const __grid_constant__ LowBackMaps maps, LowResult s, Sink sink) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef LowBackLayout<DEPTH, PANELS> Layout;
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
    const LowWalk walk(s, 64 * PANELS);
    if (warp == 8) {
        if (is_elected()) lh_back_weights<DEPTH, PANELS>(shared, &maps, walk);
    } else if (warp == 9) {
        if (is_elected()) lh_back_operands<LEFT, DEPTH, PANELS>(shared, &maps, walk);
    } else {
        lh_back_consume<LEFT, DEPTH, PANELS>(shared, &maps, walk, sink, warp, lane);
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

// True if these kernels run here for that rank.
inline bool low_hopper_fits(const Device* dev, int64_t rank) {
    static const bool built = hopper_kernel_is_built(low_project_kernel<bf16, 1, false, 3, LowStore>);
    return built && dev->compute == 90 && dev->shared_memory >= LH_SHARED_BYTES && rank <= 256;
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

// Launches a kernel whose blocks stay and share `steps`.
template <typename... Given>
void low_stream_launch(const Device* dev, void (*kernel)(Given...), int64_t steps, int threads, int bytes, bool early,
                       std::decay_t<Given>... given) {
    cudaLaunchAttribute serial = {};
    serial.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    serial.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(steps < dev->sm_count ? steps : dev->sm_count)), config.blockDim = dim3(threads);
    config.dynamicSmemBytes = (size_t)bytes, config.stream = dev->stream;
    config.attrs = &serial, config.numAttrs = early ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, given...));
}

template <int DEPTH, int PANELS, typename Sink>
void low_back_launch(const Device* dev, const LowBackPlan* p, const Sink& sink, bool early) {
    auto kernel = p->left ? low_back_kernel<true, DEPTH, PANELS, Sink> : low_back_kernel<false, DEPTH, PANELS, Sink>;
    constexpr int BYTES = LowBackLayout<DEPTH, PANELS>::BYTES;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
    const int64_t steps = ceil_div(p->s.rows, LH_TILE) * ceil_div(p->s.cols, 64 * PANELS);
    low_stream_launch(dev, kernel, steps, LH_BACK_THREADS, BYTES, early, p->maps, p->s, sink);
}

// Has the projection fetch the weights of the first steps of the launch after it, low_back_run<1>.
inline void low_fetch_ahead(const Device* dev, LowProjectPlan* p, const LowBackPlan* back, int steps) {
    const int down = (int)ceil_div(back->s.rows, LH_TILE), across = (int)ceil_div(back->s.cols, 64);
    const int blocks = (int64_t)down * across < dev->sm_count ? down * across : dev->sm_count;
    p->maps.next = back->maps.from;
    p->ahead = {steps, blocks, down, across, LH_TILE, 64, false};
}

// `early`: the blocks may begin while the last launch, which lets them, ends; it must not write the weights.
template <int PANELS, typename Sink>
void low_back_run(const Device* dev, const LowBackPlan* p, const Sink& sink, bool early) {
    const int depth = low_back_depth(p->s.depth);
    if (depth == 64)
        low_back_launch<64, PANELS>(dev, p, sink, early);
    else if (depth == 128)
        low_back_launch<128, PANELS>(dev, p, sink, early);
    else if (depth == 192)
        low_back_launch<192, PANELS>(dev, p, sink, early);
    else
        low_back_launch<256, 1>(dev, p, sink, early);  // two panels would leave room for one stage
}
#endif
