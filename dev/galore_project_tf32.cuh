// The first product of galore_mma.cuh by products of warpgroups (wgmma) on operands that TMA brings (sm_90a):
//     right: low (R, rank) = G Q^T,  left: low (rank, C) = Q G;   summed over the shorter side
// It has few tiles and a long sum. A block has CHANNELS channels, 128 of the rank and a part of the sum; the blocks of
// a tile are a cluster, each of which adds up a part of the tile from all of their shared memories, in order, and hands
// it to the sink, which has asked for what it reads before the product began.
//
// A cluster that finds no room waits for another one's end, and clusters of four leave multiprocessors out where their
// number in a part of the processor (GPC) is not a multiple of four. So the plan takes the blocks of a cluster with
// which waves of clusters are done first, by the bytes of both operands that a multiprocessor loads.
//
//     float, 3      a: G, 64 of 128 channels a warpgroup, in registers; b: Q. Operands are in two parts of 11 bits;
//                   what Q's first part leaves is an array of its own
// dev/galore.cu also times float, 1 (TF32, with one part of each operand), and bf16, which has another end
// (dev/galore_project.cuh).
// Deterministic. Sizes are multiples of 8, addresses of 16 bytes.
#pragma once
#include "galore_hopper.cuh"

#ifdef __CUDACC__
constexpr int LH_PROJECT_THREADS = 288;

struct LowProjectMaps {
    CUtensorMap g, q, rest;  // rest: of Q, if fp32 is in two parts
};

// Stages of Q, of what it leaves, and of G, and barriers of each: it has come, it is free. In the end the block's sums
// take the stages' place, in rows of the result.
template <typename E, int PARTS, bool LEFT, int CHANNELS, int STAGES>
struct LowProject {
    static constexpr bool FP32 = sizeof(E) == 4, TURNED = LEFT == FP32;  // TURNED: the sums are the result transposed
    static constexpr int DEPTH = LowOperand<E>::DEPTH;
    static constexpr int G = (PARTS == 3 ? 2 : 1) * LH_PANEL_BYTES, STAGE = G + CHANNELS * PANEL_ROW_BYTES,
                         BYTES = STAGES * (STAGE + 16);
    static constexpr int N = FP32 ? LH_TILE : CHANNELS;  // of a warpgroup's sums, 64 x N
    static constexpr int ROW = LEFT ? CHANNELS : LH_TILE, STRIDE = ROW + (TURNED ? 4 : 8);
    // A thread's pieces of four elements at a time.
    static constexpr int AT_ONCE = (CHANNELS + 31) / 32, PIECES = LH_TILE * CHANNELS / 4;
    static_assert(!FP32 || CHANNELS == LH_TILE, "two warpgroups have 64 channels each");
    static_assert(LH_TILE * CHANNELS / ROW * STRIDE * 4 <= STAGES * STAGE, "the sums take the stages' place");
    static constexpr int full(int stage) { return STAGES * STAGE + stage * 8; }
    static constexpr int empty(int stage) { return full(STAGES + stage); }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// One thread: orders the operands of the block's steps.
template <typename Kind, typename E, bool LEFT, int CHANNELS, int STAGES>
__device__ __forceinline__ void lh_project_produce(uint32_t shared, const LowProjectMaps* maps, int rank, int channel,
                                                   int first, int steps) {
    constexpr int ACROSS = PANEL_ROW_BYTES / (int)sizeof(E), BYTES = Kind::DEPTH * PANEL_ROW_BYTES;
    Ring<STAGES> ring;
    for (int step = 0; step < steps; step++, ring.advance()) {
        const uint32_t q = shared + ring.stage * Kind::STAGE, g = q + Kind::G,
                       arrived = shared + Kind::full(ring.stage);
        const int k = (first + step) * Kind::DEPTH;
        barrier_wait(shared + Kind::empty(ring.stage), ring.parity ^ 1);
        barrier_expect(arrived, Kind::STAGE);
        if (LEFT) {
            for (int p = 0; p < CHANNELS / ACROSS; p++)
                tensor_load(g + p * BYTES, &maps->g, arrived, channel + p * ACROSS, k, 0);
        } else {
            tensor_load(g, &maps->g, arrived, k, channel, 0);
        }
        tensor_load(q, &maps->q, arrived, k, rank, 0);
        if (Kind::G > LH_PANEL_BYTES) tensor_load(q + LH_PANEL_BYTES, &maps->rest, arrived, k, rank, 0);
    }
}

// Starts a step of the product of a warpgroup, in TF32: 64 channels, all of the rank. dev/galore_project.cuh has one in
// bf16.
template <typename Kind, int PARTS, bool LEFT>
__device__ __forceinline__ void lh_project_step(float, float (&c)[Kind::N / 8][4], uint32_t q, int warp, int lane,
                                                bool add) {
    const uint64_t right = uniform_operand(operand_k_major<LH_TILE>(q, 0));
    const uint32_t g = q + Kind::G;
    uint32_t x[4][4], rest[4][4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (LEFT) {
            lh_read_down<PARTS, 32>(x[j], rest[j], g, warp * 16, j, lane);
        } else {
            load_matrices(x[j], g + panel_offset(warp * 16 + lane % 16, j * 2 + lane / 16));
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
template <typename Kind, typename E, int PARTS, bool LEFT, int STAGES>
__device__ __forceinline__ void lh_project_multiply(float (&c)[Kind::N / 8][4], uint32_t shared, int warp, int lane,
                                                    int steps) {
    Ring<STAGES> ring;
    int last = 0;
    for (int step = 0; step < steps; step++, ring.advance()) {
        barrier_wait(shared + Kind::full(ring.stage), ring.parity);
        lh_project_step<Kind, PARTS, LEFT>(E(), c, shared + ring.stage * Kind::STAGE, warp, lane, step > 0);
        wgmma_commit();
        if constexpr (Kind::FP32) {
            wgmma_wait<0>();
            wgmma_hold(c);
            if (lane == 0) barrier_arrive(shared + Kind::empty(ring.stage));
        } else {
            wgmma_wait<1>();
            if (step > 0 && lane == 0) barrier_arrive(shared + Kind::empty(last));
        }
        last = ring.stage;
    }
    wgmma_wait<0>();
    wgmma_hold(c);
}

// Leaves a warp's sums of 16 rows in shared memory.
template <typename Kind>
__device__ __forceinline__ void lh_leave(const float (&c)[Kind::N / 8][4], float* to, int row, int lane) {
#pragma unroll
    for (int n = 0; n < Kind::N / 8; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = row + lane / 4 + half * 8, column = n * 8 + lane % 4 * 2;
            if (Kind::TURNED) {
                to[column * Kind::STRIDE + r] = c[n][half * 2];
                to[(column + 1) * Kind::STRIDE + r] = c[n][half * 2 + 1];
            } else {
                *(float2*)(to + r * Kind::STRIDE + column) = make_float2(c[n][half * 2], c[n][half * 2 + 1]);
            }
        }
    }
}

// A thread's pieces of the tile.
template <typename Kind, typename Sink>
struct LowPieces {
    static constexpr int QUARTERS = Kind::ROW / 4;
    typename Sink::Old old[Kind::AT_ONCE];
    int next, step, row, column;  // next: the number of the first piece
    LowResult s;

    __device__ __forceinline__ bool find(int u, int* r, int* c) const {
        const int at = next + u * step;
        *r = row + at / QUARTERS, *c = column + at % QUARTERS * 4;
        return at < Kind::PIECES && *r < s.rows && *c < s.cols;
    }
    __device__ __forceinline__ void ask(const Sink& sink) {
#pragma unroll
        for (int u = 0; u < Kind::AT_ONCE; u++) {
            int r, c;
            if (find(u, &r, &c)) old[u] = sink.load(r, c);
        }
    }
    __device__ __forceinline__ void give(const Sink& sink, uint32_t shared) {
        float4 sum[Kind::AT_ONCE];
        int r, c;
#pragma unroll
        for (int u = 0; u < Kind::AT_ONCE; u++) {
            const int at = next + u * step;
            const uint32_t address = shared + (at / QUARTERS * Kind::STRIDE + at % QUARTERS * 4) * 4;
            if (find(u, &r, &c)) sum[u] = lp_sum<LP_SLICES>(address, s.slices);
        }
#pragma unroll
        for (int u = 0; u < Kind::AT_ONCE; u++) {
            if (find(u, &r, &c)) sink.take(r, c, sum[u], old[u]);
        }
        next += Kind::AT_ONCE * step;
    }
};
#endif

// Grid (slices, tiles of the rank, tiles of channels), clusters of `slices`, at most 8. The sink takes four elements of
// a row at a time, as galore_mma.cuh's do.
template <typename E, int PARTS, bool LEFT, int CHANNELS, int STAGES, typename Sink>
__global__ void __launch_bounds__(LH_PROJECT_THREADS, 1)
    low_project_kernel(const __grid_constant__ LowProjectMaps maps, LowResult s, Sink sink) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef LowProject<E, PARTS, LEFT, CHANNELS, STAGES> Kind;
    extern __shared__ __align__(1024) unsigned char low_project_shared[];
    const uint32_t shared = shared_offset(low_project_shared);
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared + Kind::full(i), 1);
            barrier_init(shared + Kind::empty(i), 8);
        }
        barrier_init_done();
    }
    __syncthreads();
    launch_next();
    const int rank = blockIdx.y * LH_TILE, channel = blockIdx.z * CHANNELS;
    const int all = (s.depth + Kind::DEPTH - 1) / Kind::DEPTH, first = all * (int)blockIdx.x / s.slices,
              steps = all * ((int)blockIdx.x + 1) / s.slices - first;
    LowPieces<Kind, Sink> pieces;
    pieces.next = blockIdx.x * 256 + threadIdx.x, pieces.step = s.slices * 256;
    pieces.row = LEFT ? rank : channel, pieces.column = LEFT ? channel : rank, pieces.s = s;
    if (warp == 8) {
        if (is_elected())
            lh_project_produce<Kind, E, LEFT, CHANNELS, STAGES>(shared, &maps, rank, channel, first, steps);
        __syncwarp();
        __syncthreads();
    } else {
        pieces.ask(sink);
        float c[Kind::N / 8][4];
        lh_project_multiply<Kind, E, PARTS, LEFT, STAGES>(c, shared, warp, lane, steps);
        __syncthreads();  // nobody reads the stages any more
        lh_leave<Kind>(c, (float*)low_project_shared, warp * 16, lane);
    }
    lp_cluster_sync();
    if (warp < 8) {
        pieces.give(sink, shared);
        while (pieces.next < Kind::PIECES) pieces.ask(sink), pieces.give(sink, shared);
    }
    __syncwarp();
    lp_cluster_sync();  // no block ends while another reads its shared memory
#else
    (void)maps, (void)s, (void)sink;
#endif
}

struct LowProjectPlan {
    LowProjectMaps maps;
    LowResult s;
    int channels;           // of a tile
    unsigned across, down;  // tiles of the rank and of channels
    bool left;
    double time;  // by which plans with other channels compare
};

// True if these kernels run here.
inline bool low_project_fits(const Device* dev) {
    return hopper_runs(dev, low_project_kernel<float, 3, false, LH_TILE, 4, LowStore>) &&
           dev->shared_memory >= LH_SHARED_BYTES;
}

// The clusters of so many blocks that an H100 or H200 was found to have room for at once, if a block needs a
// multiprocessor for itself. Another one of the same kind may have room for a few more or less, as its multiprocessors
// lie (cudaOccupancyMaxActiveClusters); but the parts of a sum, and so its bits, are the same on both.
inline int64_t low_clusters(const Device* dev, int slices) {
    const int room[LP_SLICES] = {132, 66, 39, 30, 22, 17, 15, 15};
    const int64_t scaled = (int64_t)room[slices - 1] * dev->sm_count / 132;
    return scaled > 0 ? scaled : 1;
}

// to = from rounded to TF32, or its transposed, and `rest`, if not null, what that leaves, rounded; from is (rows,
// cols). Grid any, block 256.
static __global__ void low_split_kernel(float* to, float* rest, const float* from, int rows, int cols, bool turned) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < (int64_t)rows * cols; i += 256ll * gridDim.x) {
        uint32_t word[4] = {__float_as_uint(from[turned ? i % rows * cols + i / rows : i])}, left[4];
        lp_split<3>(word, left);
        to[i] = __uint_as_float(word[0]);
        if (rest) rest[i] = __uint_as_float(left[0]);
    }
}

inline void low_split(const Device* dev, float* to, float* rest, const float* from, int64_t rows, int64_t cols,
                      bool turned) {
    low_split_kernel<<<1024, 256, 0, dev->stream>>>(to, rest, from, (int)rows, (int)cols, turned);
    check_launch();
}

// Chooses the slices for tiles of so many channels, and returns the time of the product: a block's is its bytes of both
// operands, and about four steps of 256 rows for the start and the sum.
inline double low_project_choose(const Device* dev, LowProjectPlan* p, int64_t rank, int64_t length, int64_t steps) {
    double least = INFINITY;
    const int64_t tiles = ceil_div(rank, LH_TILE) * ceil_div(length, p->channels);
    for (int slices = 1; slices <= LP_SLICES && slices <= steps; slices++) {
        const double waves = (double)ceil_div(tiles, low_clusters(dev, slices)),
                     time = waves * ((double)ceil_div(steps, slices) * (p->channels + LH_TILE) + 1024.0);
        if (time < least) least = time, p->s.slices = slices;
    }
    return least;
}

// q of fp32 is rounded to TF32; `rest`, if not null, is what that leaves of it (low_split).
template <typename E>
LowProjectPlan low_project_plan(const Device* dev, const E* g, const E* q, const E* rest, int64_t rows, int64_t cols,
                                int64_t rank, int channels = LH_TILE) {
    constexpr bool FP32 = sizeof(E) == 4;
    constexpr int DEPTH = LowOperand<E>::DEPTH;
    LowProjectPlan p;
    p.left = rows < cols, p.channels = channels;
    const int64_t side = p.left ? rows : cols, length = p.left ? cols : rows;
    p.s.rows = (int)(p.left ? rank : rows), p.s.cols = (int)(p.left ? cols : rank), p.s.depth = (int)side;
    p.time = low_project_choose(dev, &p, rank, length, ceil_div(side, DEPTH));
    p.across = (unsigned)ceil_div(rank, LH_TILE), p.down = (unsigned)ceil_div(length, p.channels);
    p.maps.g = tensor_map(g, 1, rows, cols, p.left ? DEPTH : p.channels, FP32);
    p.maps.q = tensor_map(q, 1, rank, side, LH_TILE, FP32);
    p.maps.rest = rest ? tensor_map(rest, 1, rank, side, LH_TILE, FP32) : p.maps.q;
    return p;
}

// Launches a kernel with the plan's grid and clusters.
template <typename... Given>
void low_project_start(const Device* dev, const LowProjectPlan* p, void (*kernel)(Given...), int bytes,
                       std::decay_t<Given>... given) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)p->s.slices, p->across, p->down), config.blockDim = dim3(LH_PROJECT_THREADS);
    config.dynamicSmemBytes = (size_t)bytes, config.stream = dev->stream;
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = (unsigned)p->s.slices, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.attrs = &cluster, config.numAttrs = 1;
    check(cudaLaunchKernelEx(&config, kernel, given...));
}

template <typename E, int PARTS, bool LEFT, int CHANNELS, int STAGES, typename Sink>
void low_project_launch(const Device* dev, const LowProjectPlan* p, const Sink& sink) {
    low_project_start(dev, p, low_project_kernel<E, PARTS, LEFT, CHANNELS, STAGES, Sink>,
                      LowProject<E, PARTS, LEFT, CHANNELS, STAGES>::BYTES, p->maps, p->s, sink);
}

template <int PARTS, typename Sink>
void low_project_run(const Device* dev, const LowProjectPlan* p, const Sink& sink) {
    constexpr int STAGES = PARTS == 3 ? 4 : 6;
    if (p->left) return low_project_launch<float, PARTS, true, LH_TILE, STAGES>(dev, p, sink);
    low_project_launch<float, PARTS, false, LH_TILE, STAGES>(dev, p, sink);
}
#endif
