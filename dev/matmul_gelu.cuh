// The two matrix products next to GELU, with GELU's work hidden behind the next tile's product, in bf16 on sm_90a:
//     forward   pre = inp W^T + bias,  out = gelu(pre)                      inp (N, K), W (COLS, K), bias (COLS)
//     backward  d = (dout W) * gelu'(pre),  dbias = column sums of d        dout (N, K), W (K, COLS)
// with pre, out, d of (N, COLS). The plain C versions are matmul.cuh's. pre is rounded to bf16 before GELU is taken of
// it, as it is where the activation is computed again from the stored pre, so that both have the same bits. The column
// sums are those of d as stored.
#pragma once
#include "../kernels/attention_parts.cuh"
#include "../kernels/column_sum.cuh"
#include "../kernels/common.cuh"
#include "../kernels/gelu.cuh"
#include "../kernels/hopper.cuh"

constexpr int MG_ROWS = 128, MG_COLUMNS = 256, MG_DEPTH = 64, MG_STAGES = 4;
constexpr int MG_A_BYTES = MG_ROWS * MG_DEPTH * 2, MG_B_BYTES = MG_COLUMNS * MG_DEPTH * 2;
constexpr int MG_STAGE_BYTES = MG_A_BYTES + MG_B_BYTES;
constexpr int MG_SLOT_BYTES = 16 * PANEL_ROW_BYTES;       // 16 rows, a warp's, of 64 columns
constexpr int MG_SLOTS = MG_STAGES * MG_STAGE_BYTES;      // offset of the slots: two for each of 8 warps
constexpr int MG_EXTRA = MG_SLOTS + 16 * MG_SLOT_BYTES;   // forward: bias; backward: column sums; 1 KB a warpgroup
constexpr int MG_BARRIERS = MG_EXTRA + 2048;              // full and empty of each stage, one a warp for pre
constexpr int MG_SHARED_BYTES = MG_BARRIERS + (2 * MG_STAGES + 8) * 8;
constexpr int MG_LEAST_DEPTH = 8 * MG_DEPTH - MG_DEPTH + 1;  // a tile's product has a step for each chunk

struct MatmulGeluMaps {
    CUtensorMap a, b, out, pre;
};

struct MatmulGeluShape {
    int rows, columns, depth;  // of the result; depth is what the products sum over
    int group;                 // rows of clusters that are walked together, column by column
    int hint;                  // experiments
    long long* account;        // of block 0: cycles in all
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A box to the same place of all blocks of the cluster, counted by the barrier at the same place of each.
template <int CLUSTER>
__device__ __forceinline__ void tensor_load_all(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column,
                                                int row) {
    if (CLUSTER == 1) return tensor_load(to, map, barrier, column, row, 0);
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3,%4,%5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(0), "h"((uint16_t)((1 << CLUSTER) - 1))
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

// How long the L2 cache should keep what is stored.
__device__ __forceinline__ uint64_t mg_policy(int hint) {
    uint64_t first, normal;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
    return hint ? first : normal;
}

__device__ __forceinline__ void tensor_store_hint(const CUtensorMap* map, uint32_t from, int column, int row,
                                                  uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2,%3,%4}], [%1], %5;" ::"l"(
            map),
        "r"(from), "r"(column), "r"(row), "r"(0), "l"(policy)
        : "memory");
}

struct MatmulGeluTile {
    int row, column;  // of its first element
};

// Tile `index` of the cluster's, for its block `rank`.
template <int CLUSTER>
__device__ __forceinline__ MatmulGeluTile mg_tile(int index, MatmulGeluShape shape, int rank) {
    int across = (shape.columns + MG_COLUMNS - 1) / MG_COLUMNS;
    int down = (shape.rows + CLUSTER * MG_ROWS - 1) / (CLUSTER * MG_ROWS);
    int first = index / (shape.group * across) * shape.group, within = index % (shape.group * across);
    int high = down - first < shape.group ? down - first : shape.group;
    return {((first + within % high) * CLUSTER + rank) * MG_ROWS, within / high * MG_COLUMNS};
}

template <int CLUSTER>
__device__ __forceinline__ int mg_tiles(MatmulGeluShape shape) {
    return (shape.columns + MG_COLUMNS - 1) / MG_COLUMNS *
           ((shape.rows + CLUSTER * MG_ROWS - 1) / (CLUSTER * MG_ROWS));
}

// A place in the ring of stages, and the parity of its present round.
struct MatmulGeluRing {
    int stage;
    uint32_t parity;

    __device__ __forceinline__ void advance() {
        if (++stage == MG_STAGES) stage = 0, parity ^= 1;
    }
};

__device__ __forceinline__ uint32_t mg_full(uint32_t shared, int stage) {
    return shared + MG_BARRIERS + stage * 8;
}
__device__ __forceinline__ uint32_t mg_empty(uint32_t shared, int stage) {
    return shared + MG_BARRIERS + (MG_STAGES + stage) * 8;
}
__device__ __forceinline__ uint32_t mg_arrived(uint32_t shared, int warp) {
    return shared + MG_BARRIERS + (2 * MG_STAGES + warp) * 8;
}

// One thread: orders the operands of all tiles of this block, stage after stage.
template <bool BACKWARD, int CLUSTER>
__device__ __forceinline__ void mg_produce(uint32_t shared, const MatmulGeluMaps* maps, MatmulGeluShape shape,
                                           int rank) {
    MatmulGeluRing ring = {0, 1};  // the stages begin empty
    int tiles = mg_tiles<CLUSTER>(shape), steps = (shape.depth + MG_DEPTH - 1) / MG_DEPTH;
    for (int index = blockIdx.x / CLUSTER; index < tiles; index += gridDim.x / CLUSTER) {
        MatmulGeluTile tile = mg_tile<CLUSTER>(index, shape, rank);
        for (int k = 0; k < steps; k++, ring.advance()) {
            uint32_t full = mg_full(shared, ring.stage), a = shared + ring.stage * MG_STAGE_BYTES, b = a + MG_A_BYTES;
            constexpr int PART = MG_COLUMNS / CLUSTER;
            uint32_t part = b + rank * PART * PANEL_ROW_BYTES;
            barrier_wait(mg_empty(shared, ring.stage), ring.parity);
            barrier_expect(full, MG_STAGE_BYTES);
            tensor_load(a, &maps->a, full, k * MG_DEPTH, tile.row, 0);
            if (BACKWARD) {  // B (64 x 256) as panels of 64 columns
                for (int p = 0; p < PART / 64; p++)
                    tensor_load_all<CLUSTER>(part + p * 64 * PANEL_ROW_BYTES, &maps->b, full,
                                             tile.column + rank * PART + p * 64, k * MG_DEPTH);
            } else {  // B (256 x 64) as one panel
                tensor_load_all<CLUSTER>(part, &maps->b, full, k * MG_DEPTH, tile.column + rank * PART);
            }
        }
    }
}

__device__ __forceinline__ uint32_t mg_pack(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
}

__device__ __forceinline__ float2 mg_unpack(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

__device__ __forceinline__ uint32_t mg_pack_half(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
}

__device__ __forceinline__ float2 mg_unpack_half(uint32_t pair) {
    return __half22float2(*reinterpret_cast<__half2*>(&pair));
}

__device__ __forceinline__ uint32_t mg_load_word(uint32_t from) {
    uint32_t word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}

__device__ __forceinline__ void mg_store_word(uint32_t to, uint32_t word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// GELU of 2 N values.
template <int N>
__device__ __forceinline__ void mg_gelu(uint32_t (&y)[N], const uint32_t (&x)[N]) {
    float v[2 * N], s[2 * N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        float2 pair = mg_unpack(x[i]);
        v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
    }
#pragma unroll
    for (int i = 0; i < 2 * N; i++)
        s[i] = fast_exp2(v[i] * fmaf(-LOG2_OF_E * GELU_CUBIC, v[i] * v[i], -LOG2_OF_E * GELU_LINEAR));
#pragma unroll
    for (int i = 0; i < 2 * N; i++) s[i] = fast_reciprocal(1.0f + s[i]);
#pragma unroll
    for (int i = 0; i < N; i++) y[i] = mg_pack(v[2 * i] * s[2 * i], v[2 * i + 1] * s[2 * i + 1]);
}

// gelu' of 2 N values, as fp16, whose error is an eighth of bf16's. With s the sigmoid, 1 - s need not keep its digits:
// where it is small, s is close to 1.
template <int N>
__device__ __forceinline__ void mg_slopes(uint32_t (&y)[N], const uint32_t (&x)[N]) {
    float v[2 * N], s[2 * N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        float2 pair = mg_unpack(x[i]);
        v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
    }
#pragma unroll
    for (int i = 0; i < 2 * N; i++)
        s[i] = fast_exp2(v[i] * fmaf(-LOG2_OF_E * GELU_CUBIC, v[i] * v[i], -LOG2_OF_E * GELU_LINEAR));
#pragma unroll
    for (int i = 0; i < 2 * N; i++) s[i] = fast_reciprocal(1.0f + s[i]);
#pragma unroll
    for (int i = 0; i < 2 * N; i++) {
        float rise = fmaf(3.0f * GELU_CUBIC, v[i] * v[i], GELU_LINEAR);
        s[i] = fmaf(v[i] * fmaf(-s[i], s[i], s[i]), rise, s[i]);
    }
#pragma unroll
    for (int i = 0; i < N; i++) y[i] = mg_pack_half(s[2 * i], s[2 * i + 1]);
}

// What a thread knows about its place.
struct MatmulGeluPlace {
    uint32_t shared, slot;  // slot: this lane's address for matrices of its warp's first slot, at column 0
    uint32_t extra;         // its warpgroup's
    int rank, group, warp, lane;
};

// Of a thread: c in bf16 (forward: pre; backward: d), or slopes in fp16. held[n][h] are columns 8 n + 2 (lane % 4) and
// the next of row lane / 4 + 8 h of the warp's 16.
using MatmulGeluHeld = uint32_t[MG_COLUMNS / 8][2];

// Chunk C, 32 columns of pre, of a tile: pre and gelu(pre) into the slots, and every other chunk out.
template <int C>
__device__ __forceinline__ void mg_deliver_forward(const MatmulGeluHeld& held, MatmulGeluTile tile,
                                                   const MatmulGeluPlace& at, const MatmulGeluMaps* maps, bool full,
                                                   uint64_t policy) {
    if (C % 2 == 0) {
        if (at.lane == 0) store_wait_read<0>();
        __syncwarp();
    }
#pragma unroll
    for (int n = 4 * C; n < 4 * C + 4; n += 2) {
        const uint32_t x[4] = {held[n][0], held[n][1], held[n + 1][0], held[n + 1][1]};
        uint32_t to = at.slot ^ (n % 8 << 4), y[4];
        store_matrices(to, x[0], x[1], x[2], x[3]);
        mg_gelu(y, x);
        store_matrices(to + MG_SLOT_BYTES, y[0], y[1], y[2], y[3]);
    }
    if (C % 2 == 1) {
        fence_async();
        __syncwarp();
        if (at.lane == 0 && full) {
            uint32_t from = at.shared + MG_SLOTS + (at.group * 4 + at.warp) * 2 * MG_SLOT_BYTES;
            int row = tile.row + at.group * 64 + at.warp * 16, column = tile.column + C / 2 * 64;
            tensor_store_hint(&maps->pre, from, column, row, policy);
            tensor_store_hint(&maps->out, from + MG_SLOT_BYTES, column, row, policy);
            store_commit();
        }
    }
}

// sum[v] of a thread, over the 8 lanes with the same lane % 4: lane 4 v + t returns that of its v.
__device__ __forceinline__ float mg_sum_lanes(const float (&sum)[8], int lane) {
    float half[4], quarter[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float keep = lane & 16 ? sum[i + 4] : sum[i], send = lane & 16 ? sum[i] : sum[i + 4];
        half[i] = keep + __shfl_xor_sync(0xffffffffu, send, 16);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float keep = lane & 8 ? half[i + 2] : half[i], send = lane & 8 ? half[i] : half[i + 2];
        quarter[i] = keep + __shfl_xor_sync(0xffffffffu, send, 8);
    }
    float keep = lane & 4 ? quarter[1] : quarter[0], send = lane & 4 ? quarter[0] : quarter[1];
    return keep + __shfl_xor_sync(0xffffffffu, send, 4);
}

// Chunk C, 32 columns of d, of a tile: into the slot, every other chunk out; its column sums.
template <int C, int STYLE>
__device__ __forceinline__ void mg_deliver_backward(const MatmulGeluHeld& held, MatmulGeluTile tile,
                                                    const MatmulGeluPlace& at, const MatmulGeluMaps* maps, bool full,
                                                    float* partial, MatmulGeluShape shape, uint64_t policy) {
    if (C % 2 == 0) {
        if (at.lane == 0) store_wait_read<0>();
        __syncwarp();
    }
    float sum[8];
#pragma unroll
    for (int n = 4 * C; n < 4 * C + 4; n += 2) {
        store_matrices(at.slot ^ (n % 8 << 4), held[n][0], held[n][1], held[n + 1][0], held[n + 1][1]);
#pragma unroll
        for (int m = n; m < n + 2 && !(STYLE & 2); m++) {
            float2 low = mg_unpack(held[m][0]), high = mg_unpack(held[m][1]);
            sum[m % 4 * 2] = low.x + high.x, sum[m % 4 * 2 + 1] = low.y + high.y;
        }
    }
    uint32_t sums = at.extra + C % 2 * 512;
    if (STYLE & 2) {
        float total[4] = {};
        __syncwarp();
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
            uint32_t b[4];
            load_matrices_transposed(b, at.slot ^ ((4 * C + n) % 8 << 4));
#pragma unroll
            for (int m = n; m < n + 2; m++) {
                uint32_t ones = at.lane / 4 == m ? 0x3f803f80u : 0u;
                const uint32_t a[4] = {ones, 0, ones, 0};
                mma(total, a, b[(m - n) * 2], b[(m - n) * 2 + 1]);
            }
        }
        if (at.lane < 16) {
            uint32_t to = sums + at.warp * 128 + at.lane * 8;
            asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to), "f"(total[0]), "f"(total[1]) : "memory");
        }
    } else {
        int own = at.lane / 8 * 8 + at.lane % 4 * 2 + at.lane / 4 % 2;  // the column of this lane's sum
        mg_store_word(sums + at.warp * 128 + own * 4, __float_as_uint(mg_sum_lanes(sum, at.lane)));
    }
    if (C % 2 == 1) fence_async();
    group_sync(1 + at.group, 128);  // the other buffer's sums have been read
    if (C % 2 == 1 && at.lane == 0 && full) {
        uint32_t from = at.shared + MG_SLOTS + (at.group * 4 + at.warp) * 2 * MG_SLOT_BYTES;
        tensor_store_hint(&maps->out, from, tile.column + C / 2 * 64, tile.row + at.group * 64 + at.warp * 16, policy);
        store_commit();
    }
    int column = tile.column + C * 32 + at.lane;
    if (at.warp == C % 4 && full && column < shape.columns && tile.row + at.group * 64 < shape.rows) {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < 4; w++) total += __uint_as_float(mg_load_word(sums + w * 128 + at.lane * 4));
        partial[(int64_t)(tile.row / 64 + at.group) * shape.columns + column] = total;
    }
}

// One thread: asks for the warp's rows of a panel of 64 columns of pre.
__device__ __forceinline__ void mg_fetch_pre(const MatmulGeluPlace& at, MatmulGeluTile tile, int panel,
                                             const MatmulGeluMaps* maps) {
    int warp = at.group * 4 + at.warp;
    uint32_t arrived = mg_arrived(at.shared, warp);
    barrier_expect(arrived, MG_SLOT_BYTES);
    tensor_load(at.shared + MG_SLOTS + (warp * 2 + 1) * MG_SLOT_BYTES, &maps->pre, arrived, tile.column + panel * 64,
                tile.row + at.group * 64 + at.warp * 16, 0);
}

// Chunk C of the slopes of a tile, from pre in the slot; then the next panel of pre is asked for.
template <int C>
__device__ __forceinline__ void mg_take_slopes(MatmulGeluHeld& held, MatmulGeluTile tile, MatmulGeluTile next, bool more,
                                               const MatmulGeluPlace& at, const MatmulGeluMaps* maps,
                                               uint32_t parity) {
    if (C % 2 == 0) barrier_wait(mg_arrived(at.shared, at.group * 4 + at.warp), parity);
#pragma unroll
    for (int n = 4 * C; n < 4 * C + 4; n += 2) {
        uint32_t x[4], y[4];
        load_matrices(x, (at.slot ^ (n % 8 << 4)) + MG_SLOT_BYTES);
        mg_slopes(y, x);
        held[n][0] = y[0], held[n][1] = y[1], held[n + 1][0] = y[2], held[n + 1][1] = y[3];
    }
    if (C % 2 == 1) {
        __syncwarp();
        if (at.lane == 0 && (C < 7 || more)) mg_fetch_pre(at, C < 7 ? tile : next, C < 7 ? C / 2 + 1 : 0, maps);
    }
}

// A warpgroup: its 64 rows of all tiles of this block.
template <bool BACKWARD, int CLUSTER, int STYLE>
__device__ __forceinline__ void mg_consume(const MatmulGeluPlace& at, const MatmulGeluMaps* maps,
                                           MatmulGeluShape shape, const bf16* bias, float* partial) {
    const int tiles = mg_tiles<CLUSTER>(shape), steps = (shape.depth + MG_DEPTH - 1) / MG_DEPTH;
    const int clusters = gridDim.x / CLUSTER;
    MatmulGeluRing ring = {0, 0};
    MatmulGeluHeld held = {};
    MatmulGeluTile before = {0, 0}, tile = mg_tile<CLUSTER>(blockIdx.x / CLUSTER, shape, at.rank);
    float c[MG_COLUMNS / 8][4];
    uint32_t round = 0;  // of tiles; its lowest bit is also the bias buffer
    bool full = false;
    long long begun = clock64();
    uint64_t policy = mg_policy(shape.hint);
    if (BACKWARD && at.lane == 0 && (int)(blockIdx.x / CLUSTER) < tiles) mg_fetch_pre(at, tile, 0, maps);
    for (int index = blockIdx.x / CLUSTER; index < tiles; index += clusters, round++) {
        MatmulGeluTile next = mg_tile<CLUSTER>(index + clusters, shape, at.rank);
        bool more = index + clusters < tiles;
        int k = 0, last = 0;
        auto give_back = [&](int stage) {
            if (at.lane < CLUSTER) barrier_arrive_at(mg_empty(at.shared, stage), at.lane);
        };
        auto multiply = [&] {
            uint32_t a = at.shared + ring.stage * MG_STAGE_BYTES, b = a + MG_A_BYTES;
            uint64_t left = uniform_operand(operand_k_major<MG_ROWS>(a + at.group * 64 * PANEL_ROW_BYTES, 0));
            uint64_t right = uniform_operand(BACKWARD ? operand_mn_major<MG_DEPTH>(b, 0)
                                                      : operand_k_major<MG_COLUMNS>(b, 0));
            barrier_wait(mg_full(at.shared, ring.stage), ring.parity);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < MG_DEPTH / 16; j++)
                Wgmma<MG_COLUMNS>::template shared<0, BACKWARD>(
                    c, operand_step(left, j * 32), operand_step(right, j * (BACKWARD ? 16 * PANEL_ROW_BYTES : 32)),
                    k > 0 || j > 0);
            wgmma_commit();
        };
        auto settle = [&] {
            wgmma_wait<1>();
            if (k > 0) give_back(last);
            last = ring.stage;
            ring.advance();
            k++;
        };
        uint32_t own_bias = 0;
        if (!BACKWARD) {
            int column = tile.column + threadIdx.x % 128 * 2;
            if (column < shape.columns) own_bias = *reinterpret_cast<const uint32_t*>(bias + column);
        }
#define MG_CHUNK(C)                                                                              \
    multiply();                                                                                  \
    if (!(STYLE & 1)) settle();                                                                  \
    if (BACKWARD) {                                                                              \
        mg_deliver_backward<C, STYLE>(held, before, at, maps, full, partial, shape, policy);                    \
        mg_take_slopes<C>(held, tile, next, more, at, maps, C / 2 % 2);                          \
    } else {                                                                                     \
        mg_deliver_forward<C>(held, before, at, maps, full, policy);                         \
    }                                                                                            \
    if (STYLE & 1) settle();                                                                     \
    if (C % 2 == 1)                                                                              \
        while (k < (C / 2 + 1) * steps / 4) {                                                    \
            multiply();                                                                          \
            settle();                                                                            \
        }
        MG_CHUNK(0) MG_CHUNK(1)
        if (!BACKWARD) {
            mg_store_word(at.extra + (round & 1) * 512 + threadIdx.x % 128 * 4, own_bias);
            group_sync(1 + at.group, 128);
        }
        MG_CHUNK(2) MG_CHUNK(3) MG_CHUNK(4) MG_CHUNK(5) MG_CHUNK(6) MG_CHUNK(7)
#undef MG_CHUNK
        wgmma_wait<0>();
        wgmma_hold(c);
        give_back(last);
#pragma unroll
        for (int n = 0; n < MG_COLUMNS / 8; n++) {
            if (BACKWARD) {
                float2 low = mg_unpack_half(held[n][0]), high = mg_unpack_half(held[n][1]);
                held[n][0] = mg_pack(c[n][0] * low.x, c[n][1] * low.y);
                held[n][1] = mg_pack(c[n][2] * high.x, c[n][3] * high.y);
            } else {
                float2 add = mg_unpack(mg_load_word(at.extra + (round & 1) * 512 + n * 16 + at.lane % 4 * 4));
                held[n][0] = mg_pack(c[n][0] + add.x, c[n][1] + add.y);
                held[n][1] = mg_pack(c[n][2] + add.x, c[n][3] + add.y);
            }
        }
        before = tile, tile = next, full = true;
    }
#define MG_CHUNK(C)                                                                 \
    if (BACKWARD)                                                                   \
        mg_deliver_backward<C, STYLE>(held, before, at, maps, full, partial, shape, policy);       \
    else                                                                            \
        mg_deliver_forward<C>(held, before, at, maps, full, policy);
    MG_CHUNK(0) MG_CHUNK(1) MG_CHUNK(2) MG_CHUNK(3) MG_CHUNK(4) MG_CHUNK(5) MG_CHUNK(6) MG_CHUNK(7)
#undef MG_CHUNK
    if (at.lane == 0) store_wait_read<0>();
    if (blockIdx.x == 0 && threadIdx.x % 128 == 0) shape.account[at.group] = clock64() - begun;
}

template <int CLUSTER>
__device__ __forceinline__ void mg_barriers(uint32_t shared) {
    for (int i = 0; i < MG_STAGES; i++) {
        barrier_init(mg_full(shared, i), 1);
        barrier_init(mg_empty(shared, i), 8 * CLUSTER);  // a thread of each warp that multiplies, of all blocks
    }
    for (int i = 0; i < 8; i++) barrier_init(mg_arrived(shared, i), 1);
    barrier_init_done();
}

#endif

// Grid a multiple of CLUSTER blocks, block 384, shared memory MG_SHARED_BYTES; columns and depth multiples of 8, depth
// at least MG_LEAST_DEPTH, any rows. bias (columns): forward. partial (ceil(rows / 64), columns): backward.
// Deterministic.
template <bool BACKWARD, int CLUSTER, int STYLE>
__global__ void __launch_bounds__(384, 1) matmul_gelu_kernel(const __grid_constant__ MatmulGeluMaps maps,
                                                             MatmulGeluShape shape, const bf16* bias, float* partial) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char matmul_gelu_shared[];
    uint32_t shared = shared_offset(matmul_gelu_shared);
    int rank = CLUSTER > 1 ? cluster_rank() : 0;
    if (threadIdx.x == 0) mg_barriers<CLUSTER>(shared);
    __syncthreads();
    if (CLUSTER > 1) cluster_sync();
    if (threadIdx.x < 128) {
        registers_shrink<24>();
        if (threadIdx.x == 0) mg_produce<BACKWARD, CLUSTER>(shared, &maps, shape, rank);
    } else {
        registers_grow<240>();
        int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128 - 1, 0);
        int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;
        uint32_t slots = shared + MG_SLOTS + (group * 4 + warp) * 2 * MG_SLOT_BYTES;
        MatmulGeluPlace at = {
            shared, slots + panel_offset(lane % 16, lane / 16), shared + MG_EXTRA + group * 1024, rank, group,
            warp,   lane};
        mg_consume<BACKWARD, CLUSTER, STYLE>(at, &maps, shape, bias, partial);
    }
    if (CLUSTER > 1) cluster_sync();  // the other block may still write into this one's shared memory
#else
    (void)maps, (void)shape, (void)bias, (void)partial;
#endif
}

struct MatmulGeluTuning {
    int group, hint;
    long long* account;
};

template <bool BACKWARD, int CLUSTER, int STYLE>
void matmul_gelu_launch(const Device* dev, const MatmulGeluMaps* maps, MatmulGeluShape shape, const bf16* bias,
                        float* partial) {
    auto kernel = matmul_gelu_kernel<BACKWARD, CLUSTER, STYLE>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MG_SHARED_BYTES));
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = CLUSTER, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(dev->sm_count / CLUSTER * CLUSTER);
    config.blockDim = dim3(384);
    config.dynamicSmemBytes = MG_SHARED_BYTES;
    config.stream = dev->stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    if (CLUSTER > 2) {
        int active = 0;
        check(cudaOccupancyMaxActiveClusters(&active, kernel, &config));
        static int told = 0;
        if (!told++) printf("clusters of %d: %d at a time\n", CLUSTER, active);
        config.gridDim = dim3(active * CLUSTER);
    }
    check(cudaLaunchKernelEx(&config, kernel, *maps, shape, bias, partial));
}

// out, pre: (N, OC); inp: (N, C); weight: (OC, C); bias: (OC).
template <int CLUSTER, int STYLE>
void matmul_gelu_forward(const Device* dev, bf16* out, bf16* pre, const bf16* inp, const bf16* weight,
                         const bf16* bias, int64_t N, int C, int OC, MatmulGeluTuning t) {
    MatmulGeluMaps maps = {tensor_map(inp, 1, N, C, MG_ROWS), tensor_map(weight, 1, OC, C, MG_COLUMNS / CLUSTER),
                           tensor_map(out, 1, N, OC, 16), tensor_map(pre, 1, N, OC, 16)};
    matmul_gelu_launch<false, CLUSTER, STYLE>(dev, &maps, {(int)N, OC, C, t.group, t.hint, t.account}, bias, nullptr);
}

inline int64_t matmul_gelu_scratch_bytes(int64_t N, int C) {
    return ceil_div(N, 64) * C * (int64_t)sizeof(float);
}

// dinp: (N, C) = (dout W) * gelu'(pre); dbias: (C) (+)= its column sums; scratch: matmul_gelu_scratch_bytes;
// dout: (N, OC); weight: (OC, C); pre: (N, C).
template <int CLUSTER, int STYLE, typename G>
void matmul_gelu_backward(const Device* dev, bf16* dinp, G* dbias, float* scratch, const bf16* dout, const bf16* weight,
                          const bf16* pre, int64_t N, int C, int OC, bool accumulate, MatmulGeluTuning t) {
    MatmulGeluMaps maps = {tensor_map(dout, 1, N, OC, MG_ROWS), tensor_map(weight, 1, OC, C, MG_DEPTH),
                           tensor_map(dinp, 1, N, C, 16), tensor_map(pre, 1, N, C, 16)};
    matmul_gelu_launch<true, CLUSTER, STYLE>(dev, &maps, {(int)N, C, OC, t.group, t.hint, t.account}, nullptr, scratch);
    column_sum(dev, &dbias, 1, scratch, (int)ceil_div(N, 64), C, accumulate);
}
