// Back, in bf16, with operands and weights in rings of their own: see low_rank_hopper.cuh. K comes in chunks of 64.
#pragma once
#include "low_rank_hopper.cuh"

#ifdef __CUDACC__
constexpr int LR_CHUNK = 64, LR_THREADS = 320, LR_STAGES = 6, LR_MOST_WEIGHTS = 16;
constexpr int LR_A_BYTES = LH_TILE * LR_CHUNK * 2, LR_B_BYTES = LR_CHUNK * PANEL_ROW_BYTES;

// Where things lie in shared memory: barriers, b's stages, the weights' stages, and the 128 rows of a, a chunk of K
// after the other. A stage of the weights is 128 rows of 64 columns.
struct LowRingsShape {
    LowResult s;
    int chunks, stages;  // of K, of the weights
};
constexpr int LR_BARRIERS = 1024, LR_B = LR_BARRIERS, LR_W = LR_B + LR_STAGES * LR_B_BYTES;

constexpr int lr_here() {
    return 0;
}
constexpr int lr_done() {
    return 8;
}
constexpr int lr_b_full(int stage) {
    return 16 + stage * 8;
}
constexpr int lr_b_empty(int stage) {
    return lr_b_full(LR_STAGES + stage);
}
__host__ __device__ constexpr int lr_w_full(int stage) {
    return lr_b_full(2 * LR_STAGES) + stage * 8;
}
__host__ __device__ constexpr int lr_w_empty(int stage) {
    return lr_w_full(LR_MOST_WEIGHTS + stage);
}
static_assert(lr_w_empty(LR_MOST_WEIGHTS) <= LR_BARRIERS, "the barriers have their kilobyte");

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A place among stages of the weights, whose number the rank decides.
struct LowTurn {
    int stages, stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

// One thread: orders the weights.
__device__ __forceinline__ void lr_weights(uint32_t shared, const LowBackMaps* maps, LowRingsShape s, LowWalk walk) {
    LowTurn turn = {s.stages};
    for (; walk.at < walk.end; walk.at++, turn.advance()) {
        const uint32_t full = shared + lr_w_full(turn.stage);
        barrier_wait(shared + lr_w_empty(turn.stage), turn.parity ^ 1, 3);
        barrier_expect(full, LH_PANEL_BYTES);
        tensor_load(shared + LR_W + turn.stage * LH_PANEL_BYTES, &maps->from, full, walk.at % walk.across * 64,
                    walk.at / walk.across * LH_TILE, 0);
    }
}

// Another one: orders the operands, which may be results of the last launch.
template <bool LEFT>
__device__ __forceinline__ void lr_operands(uint32_t shared, const LowBackMaps* maps, LowRingsShape s, LowWalk walk) {
    const uint32_t here = shared + lr_here(), a = shared + LR_W + s.stages * LH_PANEL_BYTES;
    LowRing<LR_STAGES> ring;
    int present = -1;
    uint32_t free = 1;
    wait_for_last();
    for (; walk.at < walk.end; walk.at++) {
        const int row = walk.at / walk.across, column = walk.at % walk.across * 64;
        if (row != present) {
            barrier_wait(shared + lr_done(), free, 4);
            barrier_expect(here, s.chunks * LR_A_BYTES);
            for (int k = 0; k < s.chunks; k++) {
                const uint32_t to = a + k * LR_A_BYTES;
                if (LEFT) {
                    for (int p = 0; p < 2; p++)
                        tensor_load(to + p * LR_B_BYTES, &maps->a, here, row * LH_TILE + p * 64, k * LR_CHUNK, 0);
                } else {
                    tensor_load(to, &maps->a, here, k * LR_CHUNK, row * LH_TILE, 0);
                }
            }
            present = row, free ^= 1;
        }
        for (int k = 0; k < s.chunks; k++, ring.advance()) {
            const uint32_t full = shared + lr_b_full(ring.stage);
            barrier_wait(shared + lr_b_empty(ring.stage), ring.parity ^ 1, 5);
            barrier_expect(full, LR_B_BYTES);
            tensor_load(shared + LR_B + ring.stage * LR_B_BYTES, &maps->b, full, column, k * LR_CHUNK, 0);
        }
    }
}

// A warpgroup: c = its 64 rows of a, at `a`, times b.
template <bool LEFT>
__device__ __forceinline__ void lr_multiply(float (&c)[8][4], uint32_t shared, uint32_t a, int chunks, int lane,
                                            LowRing<LR_STAGES>* ring) {
    int last = 0;
    for (int k = 0; k < chunks; k++, ring->advance()) {
        const uint32_t at = a + k * LR_A_BYTES, b = shared + LR_B + ring->stage * LR_B_BYTES;
        const uint64_t left =
                           uniform_operand(LEFT ? operand_mn_major<LR_CHUNK>(at, 0) : operand_k_major<LH_TILE>(at, 0)),
                       right = uniform_operand(operand_mn_major<LR_CHUNK>(b, 0));
        barrier_wait(shared + lr_b_full(ring->stage), ring->parity, 7);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < LR_CHUNK / 16; j++)
            Wgmma<64>::shared<LEFT, 1>(c, operand_step(left, j * (LEFT ? 16 * PANEL_ROW_BYTES : 32)),
                                       operand_step(right, j * 16 * PANEL_ROW_BYTES), k > 0 || j > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (k > 0 && lane == 0) barrier_arrive(shared + lr_b_empty(last));
        last = ring->stage;
    }
    wgmma_wait<0>();
    wgmma_hold(c);
    if (lane == 0) barrier_arrive(shared + lr_b_empty(last));
}

template <bool LEFT, typename Sink>
__device__ __forceinline__ void lr_consume(uint32_t shared, const LowBackMaps* maps, LowRingsShape s, LowWalk walk,
                                           const Sink& sink, int warp, int lane) {
    const uint32_t a = shared + LR_W + s.stages * LH_PANEL_BYTES + warp / 4 * (LR_A_BYTES / 2);
    LowRing<LR_STAGES> ring;
    LowTurn turn = {s.stages};
    int present = -1, last = -1;
    uint32_t arrived = 0;
    for (; walk.at < walk.end; walk.at++, turn.advance()) {
        const int row = walk.at / walk.across, column = walk.at % walk.across * 64;
        const uint32_t slot = shared + LR_W + turn.stage * LH_PANEL_BYTES + warp * 16 * PANEL_ROW_BYTES;
        if (row != present) {
            if (present >= 0 && lane == 0) barrier_arrive(shared + lr_done());
            barrier_wait(shared + lr_here(), arrived, 6);
            present = row, arrived ^= 1;
        }
        float c[8][4];
        lr_multiply<LEFT>(c, shared, a, s.chunks, lane, &ring);
        if (last >= 0 && lane == 0) {
            store_wait_read<0>();  // the copy engine has read the stage before
            barrier_arrive(shared + lr_w_empty(last));
        }
        barrier_wait(shared + lr_w_full(turn.stage), turn.parity, 8);
        lh_back_update<1>(sink, c, slot, row * LH_TILE + warp * 16, column, lane);
        fence_async();
        __syncwarp();
        if (lane == 0) {
            tensor_store(&maps->to, slot, column, row * LH_TILE + warp * 16, 0);
            store_commit();
        }
        last = turn.stage;
    }
    if (lane == 0) store_wait_read<0>();
}
#endif

template <bool LEFT, typename Sink>
__global__ void __launch_bounds__(LR_THREADS, 1)
    low_rings_kernel(const __grid_constant__ LowBackMaps maps, LowRingsShape s, Sink sink) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char low_rings_shared[];
    const uint32_t shared = shared_offset(low_rings_shared);
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < LR_STAGES; i++) {
            barrier_init(shared + lr_b_full(i), 1);
            barrier_init(shared + lr_b_empty(i), 8);
        }
        for (int i = 0; i < s.stages; i++) {
            barrier_init(shared + lr_w_full(i), 1);
            barrier_init(shared + lr_w_empty(i), 8);
        }
        barrier_init(shared + lr_here(), 1);
        barrier_init(shared + lr_done(), 8);
        barrier_init_done();
    }
    __syncthreads();
    const LowWalk walk(s.s, 64);
    if (warp == 8) {
        if (is_elected()) lr_weights(shared, &maps, s, walk);
    } else if (warp == 9) {
        if (is_elected()) lr_operands<LEFT>(shared, &maps, s, walk);
    } else {
        lr_consume<LEFT>(shared, &maps, s, walk, sink, warp, lane);
    }
#else
    (void)maps, (void)s, (void)sink;
#endif
}

struct LowRingsPlan {
    LowBackMaps maps;
    LowRingsShape s;
    bool left;
};

inline LowRingsPlan low_rings_plan(bf16* w, const bf16* n, const bf16* q, int64_t rows, int64_t cols, int64_t rank) {
    LowRingsPlan p;
    p.left = rows < cols;
    const int chunks = (int)ceil_div(rank, LR_CHUNK),
              stages = (LH_SHARED_BYTES - LR_W - chunks * LR_A_BYTES) / LH_PANEL_BYTES;
    p.s = {{(int)rows, (int)cols, (int)rank, 1}, chunks, stages < LR_MOST_WEIGHTS ? stages : LR_MOST_WEIGHTS};
    p.maps.a = p.left ? tensor_map(q, 1, rank, rows, LR_CHUNK) : tensor_map(n, 1, rows, rank, LH_TILE);
    p.maps.b = tensor_map(p.left ? n : q, 1, rank, cols, LR_CHUNK);
    p.maps.from = tensor_map(w, 1, rows, cols, LH_TILE), p.maps.to = tensor_map(w, 1, rows, cols, 16);
    return p;
}

template <typename Sink>
void low_rings_run(const Device* dev, const LowRingsPlan* p, const Sink& sink, bool early) {
    auto kernel = p->left ? low_rings_kernel<true, Sink> : low_rings_kernel<false, Sink>;
    const int bytes = LR_W + p->s.stages * LH_PANEL_BYTES + p->s.chunks * LR_A_BYTES;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    const int64_t steps = ceil_div(p->s.s.rows, LH_TILE) * ceil_div(p->s.s.cols, 64);
    low_stream_launch(dev, kernel, steps, LR_THREADS, bytes, early, p->maps, p->s, sink);
}
#endif
