// The two matrix products next to GELU, with GELU's work hidden behind them, in bf16 on sm_90a:
//     forward   pre = inp W^T + bias,  out = gelu(pre)                      inp (N, K), W (COLS, K), bias (COLS)
//     backward  d = (dout W) * gelu'(pre),  dbias = column sums of d        dout (N, K), W (K, COLS)
// with pre, out, d of (N, COLS). The plain C versions are matmul.cuh's. pre is rounded to bf16 before GELU is taken of
// it, as it is where the activation is computed again from the stored pre, so that both have the same bits. The column
// sums are those of d as stored.
//
// Not in the trainer: on an H200 it multiplies at cuBLASLt's rate, but GELU of a tile takes longer than the product of
// the next where K is short, so that it only draws level with cuBLASLt's best epilogue (dev/LOG.md).
//
// Why not a library's epilogue: in GPT-2 K is short (768: twelve steps of 64), and an epilogue that follows its tile's
// product leaves the tensor cores idle for a third of the time. Here two warpgroups take turns: one multiplies its tile
// while the other computes GELU of the tile before and writes it.
//
// Tile 128 x 192, a cluster of two blocks one above the other: both need the same 192 columns of W, so each fetches
// half and the copy engine gives it to both; a step of 64 in K then costs a block 28 KB from L2 for 3 million
// multiply-adds. Shared memory, 226 KB: 4 stages of A (128 x 64) and B (192 x 64), and for each warpgroup two slots of
// 128 x 64 through which the copy engine writes results and, backward, reads pre. Block of 384: a warpgroup with one
// thread that orders the copies (24 registers), two that multiply (240: 192 sums, the rest for GELU). Blocks stay and
// walk over tiles in groups of 16 rows of tiles, column by column, so that what runs at one time shares its operands in
// L2.
//
// Deterministic: each sum runs over K in order, column sums over fixed rows (128, then column_sum.cuh).
#pragma once
#include "../kernels/column_sum.cuh"
#include "../kernels/common.cuh"
#include "../kernels/gelu.cuh"
#include "../kernels/hopper.cuh"

constexpr int MG_ROWS = 128, MG_COLUMNS = 192, MG_DEPTH = 64, MG_STAGES = 4, MG_GROUP = 8;
constexpr int MG_CLUSTER = 2, MG_PANELS = MG_COLUMNS / 64;
constexpr int MG_A_BYTES = MG_ROWS * MG_DEPTH * 2, MG_B_BYTES = MG_COLUMNS * MG_DEPTH * 2;
constexpr int MG_STAGE_BYTES = MG_A_BYTES + MG_B_BYTES, MG_SLOT_BYTES = MG_ROWS * 64 * 2;
constexpr int MG_SLOTS = MG_STAGES * MG_STAGE_BYTES;   // offset of the slots: 2 for each of 2 warpgroups
constexpr int MG_SUMS = MG_SLOTS + 4 * MG_SLOT_BYTES;  // of the column sums: 64 for each of 8 warps
constexpr int MG_BARRIERS = MG_SUMS + 8 * 64 * 4;      // full and empty of each stage, one a slot, one a warpgroup
constexpr int MG_SHARED_BYTES = MG_BARRIERS + (2 * MG_STAGES + 6) * 8;

struct MatmulGeluMaps {
    CUtensorMap a, b, out, pre;
};

struct MatmulGeluShape {
    int rows, columns, depth;  // of the result; depth is what the products sum over
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A box to the same place of both blocks of the cluster, counted by the barrier at the same place of each.
__device__ __forceinline__ void tensor_load_both(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column,
                                                 int row) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3,%4,%5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(0), "h"((uint16_t)((1 << MG_CLUSTER) - 1))
        : "memory");
}

// Arrives at the barrier at this place of block `rank` of the cluster. Nothing that this thread wrote goes with it: a
// release over the cluster would be a fence of all memory, 500 cycles each time.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, int rank) {
    asm volatile(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there];}" ::
            "r"(barrier),
        "r"(rank)
        : "memory");
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ int cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return (int)rank;
}

struct MatmulGeluTile {
    int row, column;  // of its first element
};

// Tile `index` of a cluster of two tiles' height, for its block `rank`.
__device__ __forceinline__ MatmulGeluTile mg_tile(int index, MatmulGeluShape shape, int rank) {
    int across = (shape.columns + MG_COLUMNS - 1) / MG_COLUMNS;
    int pairs = (shape.rows + MG_CLUSTER * MG_ROWS - 1) / (MG_CLUSTER * MG_ROWS);
    int first = index / (MG_GROUP * across) * MG_GROUP, within = index % (MG_GROUP * across);
    int high = pairs - first < MG_GROUP ? pairs - first : MG_GROUP;
    return {((first + within % high) * MG_CLUSTER + rank) * MG_ROWS, within / high * MG_COLUMNS};
}

__device__ __forceinline__ int mg_tiles(MatmulGeluShape shape) {
    return (shape.columns + MG_COLUMNS - 1) / MG_COLUMNS *
           ((shape.rows + MG_CLUSTER * MG_ROWS - 1) / (MG_CLUSTER * MG_ROWS));
}

// A place in the ring of stages, and the parity of its present round.
struct MatmulGeluRing {
    int stage;
    uint32_t parity;

    __device__ __forceinline__ void advance(int steps) {
        stage += steps;
        parity ^= (uint32_t)(stage / MG_STAGES) & 1;
        stage %= MG_STAGES;
    }
};

__device__ __forceinline__ uint32_t mg_full(uint32_t shared, int stage) {
    return shared + MG_BARRIERS + stage * 8;
}
__device__ __forceinline__ uint32_t mg_empty(uint32_t shared, int stage) {
    return shared + MG_BARRIERS + (MG_STAGES + stage) * 8;
}
__device__ __forceinline__ uint32_t mg_arrived(uint32_t shared, int slot) {
    return shared + MG_BARRIERS + (2 * MG_STAGES + slot) * 8;
}

__device__ __forceinline__ uint32_t mg_turn(uint32_t shared, int group) {
    return shared + MG_BARRIERS + (2 * MG_STAGES + 4 + group) * 8;
}

// One thread: orders the operands of all tiles of this block, stage after stage.
template <bool BACKWARD>
__device__ __forceinline__ void mg_produce(uint32_t shared, const MatmulGeluMaps* maps, MatmulGeluShape shape,
                                           int rank) {
    MatmulGeluRing ring = {0, 1};  // the stages begin empty
    int tiles = mg_tiles(shape), steps = (shape.depth + MG_DEPTH - 1) / MG_DEPTH;
    for (int index = blockIdx.x / MG_CLUSTER; index < tiles; index += gridDim.x / MG_CLUSTER) {
        MatmulGeluTile tile = mg_tile(index, shape, rank);
        for (int k = 0; k < steps; k++, ring.advance(1)) {
            uint32_t full = mg_full(shared, ring.stage), a = shared + ring.stage * MG_STAGE_BYTES, b = a + MG_A_BYTES;
            barrier_wait(mg_empty(shared, ring.stage), ring.parity);
            barrier_expect(full, MG_STAGE_BYTES);
            tensor_load(a, &maps->a, full, k * MG_DEPTH, tile.row, 0);
            constexpr int PART = MG_DEPTH / MG_CLUSTER, WIDE = MG_COLUMNS / MG_CLUSTER;
            if (BACKWARD) {  // B (64 x 192) as panels of 64 columns: this block's half of the rows
                for (int p = 0; p < MG_PANELS; p++)
                    tensor_load_both(b + p * (MG_B_BYTES / MG_PANELS) + rank * PART * PANEL_ROW_BYTES, &maps->b, full,
                                     tile.column + p * 64, k * MG_DEPTH + rank * PART);
            } else {  // B (192 x 64) as one panel
                tensor_load_both(b + rank * WIDE * PANEL_ROW_BYTES, &maps->b, full, k * MG_DEPTH,
                                 tile.column + rank * WIDE);
            }
        }
    }
}

// c (two of 64 x 192) = the product of a tile's `steps` stages. A stage is given back to both blocks, which fill it.
// The other warpgroup's turn begins when this one has seen its last stage: earlier, the parity of a stage's barrier
// could be that of an older round.
template <bool BACKWARD>
__device__ __forceinline__ void mg_multiply(float (&c)[2][MG_COLUMNS / 8][4], uint32_t shared, MatmulGeluRing* ring,
                                            int steps, int group) {
    int before = 0;
    auto give_back = [&](int stage) {
        if (threadIdx.x % 32 < MG_CLUSTER) barrier_arrive_at(mg_empty(shared, stage), threadIdx.x % 32);
    };
    for (int k = 0; k < steps; k++, ring->advance(1)) {
        uint32_t a = shared + ring->stage * MG_STAGE_BYTES, b = a + MG_A_BYTES;
        barrier_wait(mg_full(shared, ring->stage), ring->parity);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < MG_DEPTH / 16; j++) {
            uint64_t right = BACKWARD ? operand_mn_major<MG_DEPTH>(b, j) : operand_k_major<MG_COLUMNS>(b, j);
#pragma unroll
            for (int m = 0; m < 2; m++)
                Wgmma<MG_COLUMNS>::shared<0, BACKWARD>(c[m], operand_k_major<MG_ROWS>(a + m * 64 * PANEL_ROW_BYTES, j),
                                                       right, k > 0 || j > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (k > 0) give_back(before);
        before = ring->stage;
    }
    if (threadIdx.x % 32 == 0) barrier_arrive(mg_turn(shared, 1 - group));
    wgmma_wait<0>();
    wgmma_hold(c[0]);
    wgmma_hold(c[1]);
    give_back(before);
}

__device__ __forceinline__ uint32_t mg_pack(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
}

__device__ __forceinline__ float2 mg_unpack(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

__device__ __forceinline__ void mg_store(uint32_t to, uint32_t word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

__device__ __forceinline__ uint32_t mg_load(uint32_t from) {
    uint32_t word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}

// The address in a slot of a thread's pair of columns: row 64 m + 16 (warp) + 8 h + lane / 4, columns 8 j + 2 (lane %
// 4). A warp's 32 pairs lie in 32 banks.
__device__ __forceinline__ uint32_t mg_place(uint32_t slot, int m, int j, int h) {
    int lane = threadIdx.x % 32, row = m * 64 + threadIdx.x / 32 % 4 * 16 + h * 8 + lane / 4;
    return slot + panel_offset(row, j) + lane % 4 * 4;
}

// Forward: bias, GELU and both results of columns 64 s to 64 s + 63 of the tile. `group` is the warpgroup, 0 or 1.
__device__ __forceinline__ void mg_finish_forward(float (&c)[2][MG_COLUMNS / 8][4], int s, MatmulGeluTile tile,
                                                  uint32_t slots, const MatmulGeluMaps* maps, MatmulGeluShape shape,
                                                  const bf16* bias, int group) {
    bool orders = threadIdx.x % 128 == 0;
    if (orders) store_wait_read<0>();  // the slots' last contents are out
    group_sync(1 + group, 128);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int column = tile.column + s * 64 + j * 8 + threadIdx.x % 4 * 2;
        float2 add = make_float2(0.0f, 0.0f);
        if (column < shape.columns) add = mg_unpack(*reinterpret_cast<const uint32_t*>(bias + column));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int m = i / 2, h = i % 2;
            float* sum = c[m][s * 8 + j] + 2 * h;
            uint32_t pre = mg_pack(sum[0] + add.x, sum[1] + add.y), place = mg_place(slots, m, j, h);
            float2 x = mg_unpack(pre);
            mg_store(place, pre);
            mg_store(place + MG_SLOT_BYTES, mg_pack(x.x * gelu_sigmoid_fast(x.x), x.y * gelu_sigmoid_fast(x.y)));
        }
    }
    fence_async();
    group_sync(1 + group, 128);
    if (!orders) return;
    tensor_store(&maps->pre, slots, tile.column + s * 64, tile.row, 0);
    tensor_store(&maps->out, slots + MG_SLOT_BYTES, tile.column + s * 64, tile.row, 0);
    store_commit();
}

// sum[2 j + e] of a thread, over the 8 lanes with the same lane % 4: lane 4 j + t returns those of its j.
__device__ __forceinline__ float2 mg_column_sums(const float (&sum)[16]) {
    int lane = threadIdx.x % 32;
    float half[8], quarter[4], result[2];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float keep = lane & 16 ? sum[i + 8] : sum[i], send = lane & 16 ? sum[i] : sum[i + 8];
        half[i] = keep + __shfl_xor_sync(0xffffffffu, send, 16);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float keep = lane & 8 ? half[i + 4] : half[i], send = lane & 8 ? half[i] : half[i + 4];
        quarter[i] = keep + __shfl_xor_sync(0xffffffffu, send, 8);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float keep = lane & 4 ? quarter[i + 2] : quarter[i], send = lane & 4 ? quarter[i] : quarter[i + 2];
        result[i] = keep + __shfl_xor_sync(0xffffffffu, send, 4);
    }
    return make_float2(result[0], result[1]);
}

// Backward: times gelu'(pre), whose tile of 128 x 64 is in the slot and makes room for the result; column sums.
__device__ __forceinline__ void mg_finish_backward(float (&c)[2][MG_COLUMNS / 8][4], int s, MatmulGeluTile tile,
                                                   uint32_t slot, float* sums, float* partial,
                                                   const MatmulGeluMaps* maps, MatmulGeluShape shape, int group) {
    float sum[16] = {};
    uint32_t pre[4], next[4];
#pragma unroll
    for (int i = 0; i < 4; i++) next[i] = mg_load(mg_place(slot, i / 2, 0, i % 2));
#pragma unroll
    for (int j = 0; j < 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            pre[i] = next[i];
            if (j < 7) next[i] = mg_load(mg_place(slot, i / 2, j + 1, i % 2));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 x = mg_unpack(pre[i]);
            float* product = c[i / 2][s * 8 + j] + i % 2 * 2;
            uint32_t d = mg_pack(product[0] * gelu_slope_fast(x.x), product[1] * gelu_slope_fast(x.y));
            mg_store(mg_place(slot, i / 2, j, i % 2), d);
            float2 rounded = mg_unpack(d);
            sum[2 * j] += rounded.x, sum[2 * j + 1] += rounded.y;
        }
    }
    float2 columns = mg_column_sums(sum);
    int lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    *reinterpret_cast<float2*>(sums + thread / 32 * 64 + lane * 2) = columns;
    fence_async();
    group_sync(1 + group, 128);
    if (thread == 0) {
        tensor_store(&maps->out, slot, tile.column + s * 64, tile.row, 0);
        store_commit();
    }
    int column = tile.column + s * 64 + thread;
    if (thread < 64 && column < shape.columns && tile.row < shape.rows)
        partial[(int64_t)(tile.row / MG_ROWS) * shape.columns + column] =
            sums[thread] + sums[64 + thread] + sums[128 + thread] + sums[192 + thread];
    group_sync(1 + group, 128);  // the sums are read
}

// One thread: asks for columns 64 s to 64 s + 63 of the tile's pre into slot s % 2.
__device__ __forceinline__ void mg_fetch_pre(uint32_t shared, uint32_t slots, int s, MatmulGeluTile tile,
                                             const MatmulGeluMaps* maps, int group) {
    uint32_t arrived = mg_arrived(shared, group * 2 + s % 2);
    barrier_expect(arrived, MG_SLOT_BYTES);
    tensor_load(slots + s % 2 * MG_SLOT_BYTES, &maps->pre, arrived, tile.column + s * 64, tile.row, 0);
}

// A warpgroup: every other tile of this block.
template <bool BACKWARD>
__device__ __forceinline__ void mg_consume(uint32_t shared, float* sums, const MatmulGeluMaps* maps,
                                           MatmulGeluShape shape, const bf16* bias, float* partial, int rank,
                                           int group) {
    int tiles = mg_tiles(shape), steps = (shape.depth + MG_DEPTH - 1) / MG_DEPTH, clusters = gridDim.x / MG_CLUSTER;
    uint32_t slots = shared + MG_SLOTS + group * 2 * MG_SLOT_BYTES, parity[2] = {0, 0};
    bool orders = threadIdx.x % 128 == 0;
    MatmulGeluRing ring = {0, 0};
    ring.advance(group * steps);
    uint32_t turn = 1 - group;  // the first turn is warpgroup 0's, at once
    for (int index = blockIdx.x / MG_CLUSTER + group * clusters; index < tiles; index += 2 * clusters) {
        MatmulGeluTile tile = mg_tile(index, shape, rank);
        if (BACKWARD && orders) {
            store_wait_read<0>();
            mg_fetch_pre(shared, slots, 0, tile, maps, group);
            mg_fetch_pre(shared, slots, 1, tile, maps, group);
        }
        float c[2][MG_COLUMNS / 8][4];
        barrier_wait(mg_turn(shared, group), turn);
        turn ^= 1;
        mg_multiply<BACKWARD>(c, shared, &ring, steps, group);
        ring.advance(steps);  // the other warpgroup's
#pragma unroll
        for (int s = 0; s < MG_PANELS; s++) {
            if (!BACKWARD) {
                mg_finish_forward(c, s, tile, slots, maps, shape, bias, group);
                continue;
            }
            barrier_wait(mg_arrived(shared, group * 2 + s % 2), parity[s % 2]);
            parity[s % 2] ^= 1;
            mg_finish_backward(c, s, tile, slots + s % 2 * MG_SLOT_BYTES, sums + group * 256, partial, maps, shape,
                               group);
            if (s == 0 && MG_PANELS > 2 && orders) {
                store_wait_read<0>();
                mg_fetch_pre(shared, slots, 2, tile, maps, group);
            }
        }
    }
    if (orders) store_wait_read<0>();
}

__device__ __forceinline__ void mg_barriers(uint32_t shared) {
    for (int i = 0; i < MG_STAGES; i++) {
        barrier_init(mg_full(shared, i), 1);
        barrier_init(mg_empty(shared, i), 4 * MG_CLUSTER);  // a thread of each warp of a warpgroup of both blocks
    }
    for (int i = 0; i < 4; i++) barrier_init(mg_arrived(shared, i), 1);
    for (int i = 0; i < 2; i++) barrier_init(mg_turn(shared, i), 4);  // a thread of each of the other's warps
    barrier_init_done();
}

#endif

// Grid an even number of blocks in clusters of 2, block 384, shared memory MG_SHARED_BYTES; columns and depth multiples
// of 8, any rows. bias (columns): forward. partial (ceil(rows / 128), columns): backward. Deterministic.
template <bool BACKWARD>
__global__ void __launch_bounds__(384, 1) matmul_gelu_kernel(const __grid_constant__ MatmulGeluMaps maps,
                                                             MatmulGeluShape shape, const bf16* bias, float* partial) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char matmul_gelu_shared[];
    uint32_t shared = shared_offset(matmul_gelu_shared);
    int rank = cluster_rank();
    if (threadIdx.x == 0) mg_barriers(shared);
    __syncthreads();
    cluster_sync();
    if (threadIdx.x < 128) {
        registers_shrink<24>();
        if (threadIdx.x == 0) mg_produce<BACKWARD>(shared, &maps, shape, rank);
    } else {
        registers_grow<240>();
        mg_consume<BACKWARD>(shared, (float*)(matmul_gelu_shared + MG_SUMS), &maps, shape, bias, partial, rank,
                             threadIdx.x / 128 - 1);
    }
    cluster_sync();  // the other block may still write into this one's shared memory
#else
    (void)maps, (void)shape, (void)bias, (void)partial;
#endif
}

// Whether the code was built for sm_90a: without it the kernels are empty and need few registers.
inline bool matmul_gelu_is_built() {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, matmul_gelu_kernel<true>));
    return attributes.numRegs > 64;
}

// Whether these kernels run here, and the result has tiles for every multiprocessor.
inline bool matmul_gelu_fits(const Device* dev, int64_t rows, int columns, int depth) {
    int64_t tiles = ceil_div(rows, MG_ROWS) * ceil_div(columns, MG_COLUMNS);
    if (dev->compute != 90 || tiles < dev->sm_count || rows >= (1ll << 31) - 256) return false;
    static const bool built = matmul_gelu_is_built();
    return built && dev->shared_memory >= MG_SHARED_BYTES && columns % 8 == 0 && depth % 8 == 0;
}

template <bool BACKWARD>
void matmul_gelu_launch(const Device* dev, const MatmulGeluMaps* maps, MatmulGeluShape shape, const bf16* bias,
                        float* partial) {
    auto kernel = matmul_gelu_kernel<BACKWARD>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MG_SHARED_BYTES));
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = MG_CLUSTER, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(dev->sm_count / MG_CLUSTER * MG_CLUSTER);
    config.blockDim = dim3(384);
    config.dynamicSmemBytes = MG_SHARED_BYTES;
    config.stream = dev->stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    check(cudaLaunchKernelEx(&config, kernel, *maps, shape, bias, partial));
}

// out, pre: (N, OC); inp: (N, C); weight: (OC, C); bias: (OC). Where matmul_gelu_fits(dev, N, OC, C).
inline void matmul_gelu_forward(const Device* dev, bf16* out, bf16* pre, const bf16* inp, const bf16* weight,
                                const bf16* bias, int64_t N, int C, int OC) {
    MatmulGeluMaps maps = {tensor_map(inp, 1, N, C, MG_ROWS), tensor_map(weight, 1, OC, C, MG_COLUMNS / MG_CLUSTER),
                           tensor_map(out, 1, N, OC, MG_ROWS), tensor_map(pre, 1, N, OC, MG_ROWS)};
    matmul_gelu_launch<false>(dev, &maps, {(int)N, OC, C}, bias, nullptr);
}

inline int64_t matmul_gelu_scratch_bytes(int64_t N, int C) {
    return ceil_div(N, MG_ROWS) * C * (int64_t)sizeof(float);
}

// dinp: (N, C) = (dout W) * gelu'(pre); dbias: (C) (+)= its column sums; scratch: matmul_gelu_scratch_bytes;
// dout: (N, OC); weight: (OC, C); pre: (N, C). Where matmul_gelu_fits(dev, N, C, OC).
template <typename G>
void matmul_gelu_backward(const Device* dev, bf16* dinp, G* dbias, float* scratch, const bf16* dout, const bf16* weight,
                          const bf16* pre, int64_t N, int C, int OC, bool accumulate) {
    MatmulGeluMaps maps = {tensor_map(dout, 1, N, OC, MG_ROWS), tensor_map(weight, 1, OC, C, MG_DEPTH / MG_CLUSTER),
                           tensor_map(dinp, 1, N, C, MG_ROWS), tensor_map(pre, 1, N, C, MG_ROWS)};
    matmul_gelu_launch<true>(dev, &maps, {(int)N, C, OC}, nullptr, scratch);
    column_sum(dev, &dbias, 1, scratch, (int)ceil_div(N, MG_ROWS), C, accumulate);
}
