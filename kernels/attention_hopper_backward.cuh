#pragma once

#include "attention_parts.cuh"
#include "hopper.cuh"

enum {  // trials
    BACKWARD_NO_EXP = 1,
    BACKWARD_NO_DQ_OUT = 2,
    BACKWARD_NO_ORDER = 4,
    BACKWARD_UNEVEN = 16,
    BACKWARD_UP = 32,
    BACKWARD_TWO_STAGES = 64,
    BACKWARD_NO_SPLIT = 128,
    BACKWARD_RED = 256,
    BACKWARD_TURNS = 512,
    BACKWARD_TURNS_EARLY = 1024,
};

// BM queries by BN keys; two warpgroups of 64 keys each compute, a third one fetches (one thread) and keeps the order
// of dq (a warp for each of the two).
template <int HS_, int BM_, int TRIAL_ = 0>
struct HopperBackwardShape {
    static constexpr int HS = HS_, BM = BM_, BN = 128, THREADS = 384, TRIAL = TRIAL_;
    static constexpr bool BULK = !(TRIAL & BACKWARD_RED), DOWN = !(TRIAL & BACKWARD_UP),
                          SPLIT = !(TRIAL & BACKWARD_NO_SPLIT);
    static constexpr int STAGES = BULK || TRIAL & BACKWARD_TWO_STAGES ? 2 : 3;
    static constexpr int V_SLOTS = HS == 64 && STAGES == 2 ? 2 : 1;
    static constexpr int DQ_COLUMNS = BM == 128 ? HS : HS / 2;  // a group's part of dq is 64 rows of so many columns
    static constexpr int KEY_BYTES = BN * HS * 2, QUERY_BYTES = BM * HS * 2, DS_BYTES = BM * BN * 2;
    static constexpr int ROW_BYTES = 2 * BM * 4, DQ_BYTES = 64 * DQ_COLUMNS * 4;
    // Offsets into shared memory: k of two tiles of keys, v of one, stages {q, dout}, two buffers of ds, dq of each
    // group.
    static constexpr int V = 2 * KEY_BYTES, RING = V + V_SLOTS * KEY_BYTES, DS = RING + STAGES * 2 * QUERY_BYTES;
    static constexpr int DQ = DS + 2 * DS_BYTES, SHARED = DQ + (BULK ? 2 * DQ_BYTES : 0);
    static_assert((BM == 64 || BM == 128) && SHARED <= 224 * 1024);
};

// What the trainer runs.
template <int HS>
using HopperBackward = HopperBackwardShape<HS, HS == 64 ? 128 : 64>;

template <int HS>
using HopperBackwardUneven = HopperBackwardShape<HS, HS == 64 ? 128 : 64, BACKWARD_UNEVEN>;

enum { GO_BARRIER = 1, DONE_BARRIER = 3, TURN_BARRIER = 5, ORDER_THREADS = 128 + 32 };

template <typename Shape>
struct alignas(1024) HopperBackwardShared {
    uint64_t key_full[2], key_empty[2], v_full[Shape::V_SLOTS], v_empty[Shape::V_SLOTS];
    uint64_t full[Shape::STAGES], empty[Shape::STAGES];
    uint64_t ds_full[2], ds_empty[2];
    int4 drawn[2];  // {bh, batch, head, tile of keys}; a negative bh: there is no more
    alignas(16) float rows[Shape::STAGES][2][Shape::BM];  // {lse * log2(e), D} of a stage
};

struct HopperBackwardWork {
    bf16* dqkv;         // (B,T,3,NH,HS)
    float* dq_sum;      // (B*NH, query tiles, BM*HS), each tile in the order of the threads' registers
    int* flags;         // (B*NH, query tiles, 2): how many tiles of keys have added their share, for each group
    int* ticket;        // (1)
    const float* rows;  // (B*NH, query tiles, {lse * log2(e), D}, BM)
    int T, NH, heads, group, key_tiles, query_tiles;
    float scale;
};

// A tile of scores. The tiles of a block come in sequence: tiles of queries of its first tile of keys, from the last
// one back to the diagonal, then those of its next tile of keys.
struct HopperBackwardTile {
    int sequence;  // number of the tile of keys among those of this block
    int bh, batch, head, key_tile, query_tile;
};

template <typename Shape>
__device__ __forceinline__ int hopper_backward_first(const HopperBackwardWork& work, int key_tile) {
    return Shape::DOWN ? work.query_tiles - 1 : key_tile * Shape::BN / Shape::BM;
}

template <typename Shape>
__device__ __forceinline__ int hopper_backward_last(const HopperBackwardWork& work, int key_tile) {
    return Shape::DOWN ? key_tile * Shape::BN / Shape::BM : work.query_tiles - 1;
}

// The first tile of the next tile of keys, once it is there; false when there is none.
template <typename Shape>
__device__ __forceinline__ bool hopper_backward_take(HopperBackwardTile& tile, HopperBackwardShared<Shape>& shared,
                                                     const HopperBackwardWork& work, int sequence) {
    barrier_wait(shared_offset(&shared.key_full[sequence % 2]), sequence / 2 % 2, 1);
    const int4 drawn = shared.drawn[sequence % 2];
    if (drawn.x < 0) return false;
    tile.sequence = sequence;
    tile.bh = drawn.x, tile.batch = drawn.y, tile.head = drawn.z, tile.key_tile = drawn.w;
    tile.query_tile = hopper_backward_first<Shape>(work, tile.key_tile);
    return true;
}

// One arrival a warp, after all of its threads.
__device__ __forceinline__ void warp_arrive(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_offset(barrier));
}

// ROWS rows of HS columns, 64 rows a copy.
template <int ROWS, int HS>
__device__ __forceinline__ void hopper_backward_load(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column,
                                                     int row, int batch) {
#pragma unroll
    for (int panel = 0; panel < HS / 64; panel++)
#pragma unroll
        for (int r = 0; r < ROWS; r += 64)
            tensor_load(to + (panel * ROWS + r) * PANEL_ROW_BYTES, map, barrier, column + panel * 64, row + r, batch);
}

// One thread: draws tiles of keys and fetches what they need.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_produce(HopperBackwardShared<Shape>& shared, uint32_t memory,
                                                        const HopperBackwardWork& work, const CUtensorMap* qkv,
                                                        const CUtensorMap* dout) {
    constexpr int HS = Shape::HS, BM = Shape::BM, BN = Shape::BN;
    const int items = work.heads * work.key_tiles;
    int stage = 0, parity = 0;
    for (int n = 0;; n++) {
        const uint32_t key_full = shared_offset(&shared.key_full[n % 2]);
        const uint32_t v_full = shared_offset(&shared.v_full[n % Shape::V_SLOTS]);
        barrier_wait(shared_offset(&shared.key_empty[n % 2]), n / 2 % 2 ^ 1, 2);
        const int drawn = atomicAdd(work.ticket, 1);
        int4 item = {-1, 0, 0, 0};
        if (drawn < items) forward_work(item.x, item.w, drawn, work.key_tiles, work.heads, work.group);
        if (Shape::DOWN) item.w = work.key_tiles - 1 - item.w;
        item.y = item.x / work.NH, item.z = item.x % work.NH;
        shared.drawn[n % 2] = item;
        if (drawn >= items) {
            barrier_arrive(key_full);
            return;
        }
        const int batch = item.y, C = work.NH * HS, column = item.z * HS, key_tile = item.w;
        const int key = key_tile * BN, first = hopper_backward_first<Shape>(work, key_tile);
        barrier_expect(key_full, Shape::KEY_BYTES);
        hopper_backward_load<BN, HS>(memory + n % 2 * Shape::KEY_BYTES, qkv, key_full, column + C, key, batch);
        const int count = work.query_tiles - key / BM;
        for (int i = 0; i < count; i++) {
            const int m = Shape::DOWN ? first - i : first + i;
            const uint32_t full = shared_offset(&shared.full[stage]);
            const uint32_t q_tile = memory + Shape::RING + stage * 2 * Shape::QUERY_BYTES;
            barrier_wait(shared_offset(&shared.empty[stage]), parity ^ 1, 3);
            barrier_expect(full, 2 * Shape::QUERY_BYTES + Shape::ROW_BYTES);
            hopper_backward_load<BM, HS>(q_tile, qkv, full, column, m * BM, batch);
            hopper_backward_load<BM, HS>(q_tile + Shape::QUERY_BYTES, dout, full, column, m * BM, batch);
            bulk_load(shared_offset(&shared.rows[stage]), work.rows + ((int64_t)item.x * work.query_tiles + m) * 2 * BM,
                      Shape::ROW_BYTES, full);
            if (i == 0) {
                barrier_wait(shared_offset(&shared.v_empty[n % Shape::V_SLOTS]), n / Shape::V_SLOTS % 2 ^ 1, 4);
                barrier_expect(v_full, Shape::KEY_BYTES);
                hopper_backward_load<BN, HS>(memory + Shape::V + n % Shape::V_SLOTS * Shape::KEY_BYTES, qkv, v_full,
                                             column + 2 * C, key, batch);
            }
            if (++stage == Shape::STAGES) stage = 0, parity ^= 1;
        }
    }
}

// Whose share of dq of a tile of queries comes before this tile of keys: so many tiles of keys.
template <typename Shape>
__device__ __forceinline__ int hopper_backward_before(int key_tile, int query_tile) {
    return Shape::DOWN ? key_tile : query_tile * Shape::BM / Shape::BN - key_tile;
}

template <typename Shape>
__device__ __forceinline__ bool hopper_backward_is_final(int key_tile, int query_tile) {
    return Shape::DOWN ? query_tile * Shape::BM / Shape::BN == key_tile : key_tile == 0;
}

__device__ __forceinline__ void hopper_backward_poll(const int* flag, int before) {
#ifdef NIBBLE_HANG_REPORT
    const long long start = clock64();
    while (load_acquire(flag) != before)
        if (clock64() - start > 3000000000ll) hang(100, 0, before);
#else
    while (load_acquire(flag) != before) {
    }
#endif
}

// One warp for each group: waits until the tiles of keys before have added their share of dq, lets the group add its
// own, and says so.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_order(HopperBackwardShared<Shape>& shared, uint32_t memory,
                                                      const HopperBackwardWork& work, int group) {
    HopperBackwardTile tile;
    const bool one = threadIdx.x % 32 == 0;
    for (int n = 0;; n++) {
        const bool more = hopper_backward_take<Shape>(tile, shared, work, n);
        warp_arrive(&shared.key_empty[n % 2]);
        if (!more) return;
        const int count = work.query_tiles - tile.key_tile * Shape::BN / Shape::BM;
        for (int i = 0; i < count; i++) {
            const int m = Shape::DOWN ? tile.query_tile - i : tile.query_tile + i;
            const int64_t index = (int64_t)tile.bh * work.query_tiles + m;
            int* flag = work.flags + index * 2 + group;
            const int before = hopper_backward_before<Shape>(tile.key_tile, m);
            const bool final = hopper_backward_is_final<Shape>(tile.key_tile, m);
            if (one && !(Shape::TRIAL & BACKWARD_NO_ORDER) && (!Shape::BULK || final))
                hopper_backward_poll(flag, before);
            __syncwarp();
            group_arrive(GO_BARRIER + group, ORDER_THREADS);
            group_sync(DONE_BARRIER + group, ORDER_THREADS);
            if (!one || final) continue;
            if (Shape::BULK) {
                if (!(Shape::TRIAL & BACKWARD_NO_ORDER)) hopper_backward_poll(flag, before);
                float* sum = work.dq_sum + index * Shape::BM * Shape::HS + group * 64 * Shape::DQ_COLUMNS;
                const uint32_t from = memory + Shape::DQ + group * Shape::DQ_BYTES;
                asm volatile("fence.proxy.async;" ::: "memory");
                if (before == 0)
                    bulk_store(sum, from, Shape::DQ_BYTES);
                else
                    bulk_add(sum, from, Shape::DQ_BYTES);
                store_commit();
                store_wait<0>();
                asm volatile("fence.proxy.async;" ::: "memory");
            }
            __threadfence();
            store_release(flag, before + 1);
        }
    }
}

// c (64 keys x BM queries) = rows (this group's 64 of k or v) columns^T (q or dout).
template <typename Shape>
__device__ __forceinline__ void hopper_backward_scores(float (&c)[Shape::BM / 8][4], uint32_t rows, uint32_t columns) {
#pragma unroll
    for (int k = 0; k < Shape::HS / 16; k++)
        Wgmma<Shape::BM>::template shared<0, 0>(c, operand_k_major<Shape::BN>(rows, k),
                                                operand_k_major<Shape::BM>(columns, k), k > 0);
}

// c (64 keys x HS) = or += a (64 x BM, in registers) tile (BM x HS).
template <typename Shape>
__device__ __forceinline__ void hopper_backward_sum(float (&c)[Shape::HS / 8][4],
                                                    const uint32_t (&a)[Shape::BM / 16][4], uint32_t tile, bool add) {
#pragma unroll
    for (int k = 0; k < Shape::BM / 16; k++)
        Wgmma<Shape::HS>::template registers<1>(c, a[k], operand_mn_major<Shape::BM>(tile, k), add || k > 0);
}

// dq (this group's 64 queries x DQ_COLUMNS) = ds (BM x BN) k (BN x HS).
template <typename Shape>
__device__ __forceinline__ void hopper_backward_dq(float (&dq)[Shape::DQ_COLUMNS / 8][4], uint32_t ds_tile,
                                                   uint32_t k_tile, int group) {
    constexpr int ROW = Shape::BM == 128 ? 64 : 0, COLUMN = Shape::BM == 128 ? 0 : Shape::DQ_COLUMNS;
    const uint32_t a = ds_tile + group * ROW * PANEL_ROW_BYTES;
    const uint32_t b = k_tile + group * COLUMN / 64 * Shape::BN * PANEL_ROW_BYTES + group * COLUMN % 64 * 2;
#pragma unroll
    for (int k = 0; k < Shape::BN / 16; k++)
        Wgmma<Shape::DQ_COLUMNS>::template shared<0, 1>(dq, operand_k_major<Shape::BM>(a, k),
                                                        operand_mn_major<Shape::BN>(b, k), k > 0);
}

// Scores of 16 keys from `key` on and BM queries from `query` on to p, in place. Queries past T have lse = infinity,
// which makes their p zero; keys past T are later than every query.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_exp(float (&s)[Shape::BM / 8][4], const float* lse /*(BM)*/, int key,
                                                    int query, float scale_log2) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (key + 15 > query) {
        const int first = key + g - query - t * 2;
#pragma unroll
        for (int i = 0; i < Shape::BM / 2; i++)
            if (first + i / 2 % 2 * 8 > i / 4 * 8 + i % 2) s[i / 4][i % 4] = -INFINITY;
    }
#pragma unroll
    for (int n = 0; n < Shape::BM / 8; n++) {
        const float2 l = *reinterpret_cast<const float2*>(lse + n * 8 + t * 2);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float x = fmaf(s[n][e], scale_log2, -(e % 2 ? l.y : l.x));
            s[n][e] = Shape::TRIAL & BACKWARD_NO_EXP ? x : exp2_approximate(x);
        }
    }
}

// p and ds = p (dp - D) as left operands.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_pack(uint32_t (&p)[Shape::BM / 16][4],
                                                     uint32_t (&ds)[Shape::BM / 16][4],
                                                     const float (&s)[Shape::BM / 8][4],
                                                     const float (&dp)[Shape::BM / 8][4], const float* D /*(BM)*/) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < Shape::BM / 8; n++) {
        const float2 d = *reinterpret_cast<const float2*>(D + n * 8 + t * 2);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float p0 = s[n][r * 2], p1 = s[n][r * 2 + 1];
            p[n / 2][n % 2 * 2 + r] = pack_bf16(p0, p1);
            ds[n / 2][n % 2 * 2 + r] = pack_bf16(p0 * (dp[n][r * 2] - d.x), p1 * (dp[n][r * 2 + 1] - d.y));
        }
    }
}

// A group's ds, keys x queries in registers, into its panel of the tile: BM queries x 64 keys.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_store_ds(uint32_t panel, const uint32_t (&ds)[Shape::BM / 16][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const uint32_t to = panel + panel_offset(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < Shape::BM / 16; k++)
        store_matrices_transposed(to + k * 16 * PANEL_ROW_BYTES, ds[k][0], ds[k][1], ds[k][2], ds[k][3]);
}

__device__ __forceinline__ void add_4(float* to, const float (&value)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(value[0]), "f"(value[1]),
                 "f"(value[2]), "f"(value[3])
                 : "memory");
}

// Rows of bf16 from a warp's accumulators: row g and g + 8 where they are below `rows`.
template <int COLUMNS>
__device__ __forceinline__ void hopper_backward_rows(bf16* to, int64_t stride, int rows,
                                                     const float (&c)[COLUMNS / 8][4], float factor) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (g + r * 8 >= rows) continue;
        bf16* row = to + (g + r * 8) * stride + t * 2;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
            *reinterpret_cast<uint32_t*>(row + n * 8) = pack_bf16(c[n][r * 2] * factor, c[n][r * 2 + 1] * factor);
    }
}

template <typename Shape>
__device__ __forceinline__ void hopper_backward_dq_final(float (&dq)[Shape::DQ_COLUMNS / 8][4],
                                                         const HopperBackwardWork& work, const HopperBackwardTile& tile,
                                                         int group, const float* sum, bool first) {
    constexpr int BM = Shape::BM, N = Shape::DQ_COLUMNS / 8;
    if (!first) {
        float4 before[N];
#pragma unroll
        for (int n = 0; n < N; n++) before[n] = __ldcg(reinterpret_cast<const float4*>(sum + n * 512));
#pragma unroll
        for (int n = 0; n < N; n++)
            dq[n][0] += before[n].x, dq[n][1] += before[n].y, dq[n][2] += before[n].z, dq[n][3] += before[n].w;
    }
    const int64_t C = (int64_t)work.NH * Shape::HS;
    const int row = tile.query_tile * BM + (BM == 128 ? group * 64 : 0) + threadIdx.x / 32 % 4 * 16;
    bf16* to = work.dqkv + ((int64_t)tile.batch * work.T + row) * 3 * C + tile.head * Shape::HS +
               (BM == 128 ? 0 : group * Shape::DQ_COLUMNS);
    hopper_backward_rows<Shape::DQ_COLUMNS>(to, 3 * C, work.T - row, dq, work.scale);
}

// Adds a group's part of dq in its turn: the nearest tile of keys stores, the first tile of keys writes the result.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_dq_out(float (&dq)[Shape::DQ_COLUMNS / 8][4], char* base,
                                                       const HopperBackwardWork& work, const HopperBackwardTile& tile,
                                                       int group) {
    constexpr int N = Shape::DQ_COLUMNS / 8;
    if (Shape::TRIAL & BACKWARD_UNEVEN && tile.key_tile % 2 == 1)
        for (long long start = clock64(); clock64() - start < 50000;) {
        }
    const int m = tile.query_tile, thread = threadIdx.x % 128;
    float* sum = work.dq_sum + ((int64_t)tile.bh * work.query_tiles + m) * Shape::BM * Shape::HS +
                 group * 64 * Shape::DQ_COLUMNS + thread * 4;
    const bool first = hopper_backward_before<Shape>(tile.key_tile, m) == 0;
    group_sync(GO_BARRIER + group, ORDER_THREADS);
    if (!(Shape::TRIAL & BACKWARD_NO_DQ_OUT)) {
        if (hopper_backward_is_final<Shape>(tile.key_tile, m)) {
            hopper_backward_dq_final<Shape>(dq, work, tile, group, sum, first);
        } else if (Shape::BULK) {
            float4* to = reinterpret_cast<float4*>(base + Shape::DQ + group * Shape::DQ_BYTES) + thread;
#pragma unroll
            for (int n = 0; n < N; n++) to[n * 128] = make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]);
            fence_async();
        } else if (first) {
#pragma unroll
            for (int n = 0; n < N; n++)
                __stcg(reinterpret_cast<float4*>(sum + n * 512), make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]));
        } else {
#pragma unroll
            for (int n = 0; n < N; n++) add_4(sum + n * 512, dq[n]);
        }
    }
    group_arrive(DONE_BARRIER + group, ORDER_THREADS);
}

template <typename Shape>
__device__ __forceinline__ void hopper_backward_keys_out(const float (&dk)[Shape::HS / 8][4],
                                                         const float (&dv)[Shape::HS / 8][4],
                                                         const HopperBackwardWork& work, const HopperBackwardTile& tile,
                                                         int group) {
    const int64_t C = (int64_t)work.NH * Shape::HS;
    const int key = tile.key_tile * Shape::BN + group * 64 + threadIdx.x / 32 % 4 * 16;
    bf16* to = work.dqkv + ((int64_t)tile.batch * work.T + key) * 3 * C + tile.head * Shape::HS;
    hopper_backward_rows<Shape::HS>(to + C, 3 * C, work.T - key, dk, work.scale);
    hopper_backward_rows<Shape::HS>(to + 2 * C, 3 * C, work.T - key, dv, 1.0f);
}

// One of the two groups that compute.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_consume(HopperBackwardShared<Shape>& shared, char* base,
                                                        const HopperBackwardWork& work, int group) {
    constexpr int BM = Shape::BM, BN = Shape::BN, HS = Shape::HS;
    constexpr bool LATE_TURN = Shape::TRIAL & BACKWARD_TURNS && !(Shape::TRIAL & BACKWARD_TURNS_EARLY);
    const uint32_t memory = shared_offset(base), own_rows = group * 64 * PANEL_ROW_BYTES;
    HopperBackwardTile tile, before;
    if (!hopper_backward_take<Shape>(tile, shared, work, 0)) return;
    before = tile;
    float s[BM / 8][4], dp[BM / 8][4], dq[Shape::DQ_COLUMNS / 8][4], dk[HS / 8][4] = {}, dv[HS / 8][4] = {};
    int stage = 0, parity = 0;
    barrier_wait(shared_offset(&shared.full[0]), 0, 10);
    barrier_wait(shared_offset(&shared.v_full[0]), 0, 11);
    if (Shape::TRIAL & BACKWARD_TURNS && group == 1) group_arrive(TURN_BARRIER, 256);
    wgmma_hold(dk);
    wgmma_hold(dv);
    wgmma_fence();
    hopper_backward_scores<Shape>(s, memory + own_rows, memory + Shape::RING);
    wgmma_commit();
    wgmma_fence();
    hopper_backward_scores<Shape>(dp, memory + Shape::V + own_rows, memory + Shape::RING + Shape::QUERY_BYTES);
    wgmma_commit();
    int count = 0;  // of tiles
    bool more = true;
    for (;; count++) {
        const uint32_t q_tile = memory + Shape::RING + stage * 2 * Shape::QUERY_BYTES;
        const int key = tile.key_tile * BN + group * 64 + threadIdx.x / 32 % 4 * 16;
        const bool last = tile.query_tile == hopper_backward_last<Shape>(work, tile.key_tile);
        wgmma_wait<1>();
        wgmma_hold(s);
        hopper_backward_exp<Shape>(s, shared.rows[stage][0], key, tile.query_tile * BM, work.scale * LOG2_E);
        wgmma_wait<0>();
        wgmma_hold(dp);
        if (!more) break;
        if (last) warp_arrive(&shared.v_empty[tile.sequence % Shape::V_SLOTS]);
        uint32_t p[BM / 16][4], ds[BM / 16][4];
        hopper_backward_pack<Shape>(p, ds, s, dp, shared.rows[stage][1]);
        const uint32_t ds_tile = memory + Shape::DS + count % 2 * Shape::DS_BYTES;
        barrier_wait(shared_offset(&shared.ds_empty[count % 2]), count / 2 % 2 ^ 1, 12);
        hopper_backward_store_ds<Shape>(ds_tile + group * BM * PANEL_ROW_BYTES, ds);
        fence_async();
        warp_arrive(&shared.ds_full[count % 2]);

        if (count > 0) barrier_wait(shared_offset(&shared.ds_full[(count - 1) % 2]), (count - 1) / 2 % 2, 13);
        if (Shape::TRIAL & BACKWARD_TURNS) group_sync(TURN_BARRIER + group, 256);
        wgmma_fence();
        hopper_backward_dq<Shape>(dq, memory + Shape::DS + (count + 1) % 2 * Shape::DS_BYTES,
                                  memory + before.sequence % 2 * Shape::KEY_BYTES, group);
        wgmma_commit();
        const bool add = tile.query_tile != hopper_backward_first<Shape>(work, tile.key_tile);
        wgmma_fence();
        hopper_backward_sum<Shape>(dv, p, q_tile + Shape::QUERY_BYTES, add);
        hopper_backward_sum<Shape>(dk, ds, q_tile, add);
        wgmma_commit();
        if (Shape::TRIAL & BACKWARD_TURNS && Shape::TRIAL & BACKWARD_TURNS_EARLY)
            group_arrive(TURN_BARRIER + 1 - group, 256);
        wgmma_wait<Shape::SPLIT ? 1 : 0>();
        wgmma_hold(dq);
        if (count > 0) {
            warp_arrive(&shared.ds_empty[(count - 1) % 2]);
            if (before.query_tile == hopper_backward_last<Shape>(work, before.key_tile))
                warp_arrive(&shared.key_empty[before.sequence % 2]);
            hopper_backward_dq_out<Shape>(dq, base, work, before, group);
        }
        before = tile;
        tile.query_tile += Shape::DOWN ? -1 : 1;
        // Not with the turn: what is waited for may need the other group.
        if (LATE_TURN && last) group_arrive(TURN_BARRIER + 1 - group, 256);
        if (last) more = hopper_backward_take<Shape>(tile, shared, work, tile.sequence + 1);
        uint64_t* empty = &shared.empty[stage];
        if (++stage == Shape::STAGES) stage = 0, parity ^= 1;
        const uint32_t next = memory + Shape::RING + stage * 2 * Shape::QUERY_BYTES;
        if (more) barrier_wait(shared_offset(&shared.full[stage]), parity, 14);
        if (more)
            barrier_wait(shared_offset(&shared.v_full[tile.sequence % Shape::V_SLOTS]),
                         tile.sequence / Shape::V_SLOTS % 2, 15);
        wgmma_wait<0>();
        wgmma_hold(dv);
        wgmma_hold(dk);
        wgmma_fence();
        hopper_backward_scores<Shape>(s, memory + tile.sequence % 2 * Shape::KEY_BYTES + own_rows, next);
        wgmma_commit();
        warp_arrive(empty);
        if (last) hopper_backward_keys_out<Shape>(dk, dv, work, before, group);
        wgmma_fence();
        hopper_backward_scores<Shape>(dp,
                                      memory + Shape::V + tile.sequence % Shape::V_SLOTS * Shape::KEY_BYTES + own_rows,
                                      next + Shape::QUERY_BYTES);
        wgmma_commit();
        if (LATE_TURN && !last) group_arrive(TURN_BARRIER + 1 - group, 256);
    }
    count--;
    barrier_wait(shared_offset(&shared.ds_full[count % 2]), count / 2 % 2, 16);
    wgmma_fence();
    hopper_backward_dq<Shape>(dq, memory + Shape::DS + count % 2 * Shape::DS_BYTES,
                              memory + before.sequence % 2 * Shape::KEY_BYTES, group);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(dq);
    hopper_backward_dq_out<Shape>(dq, base, work, before, group);
}

// grid: as many blocks as multiprocessors, block THREADS, shared SHARED; flags and ticket zero before; HS 64 or 128,
// any T; deterministic (dq is summed in a fixed order).
template <typename Shape>
__global__ void __launch_bounds__(Shape::THREADS, 1)
    attention_hopper_backward_kernel(const __grid_constant__ CUtensorMap qkv /*(B,T,3C)*/,
                                     const __grid_constant__ CUtensorMap dout /*(B,T,C)*/,
                                     const __grid_constant__ HopperBackwardWork work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ char dynamic[];
    __shared__ HopperBackwardShared<Shape> shared;
    char* base = dynamic;
#ifdef NIBBLE_HANG_REPORT
    if (shared_offset(base) % 1024) hang(200, shared_offset(base), 0);
#endif
    const int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0);  // one number a warp, for the compiler too
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            barrier_init(shared_offset(&shared.key_full[i]), 1);
            barrier_init(shared_offset(&shared.key_empty[i]), 8 + 2);
            barrier_init(shared_offset(&shared.ds_full[i]), 8);
            barrier_init(shared_offset(&shared.ds_empty[i]), 8);
        }
        for (int i = 0; i < Shape::V_SLOTS; i++) {
            barrier_init(shared_offset(&shared.v_full[i]), 1);
            barrier_init(shared_offset(&shared.v_empty[i]), 8);
        }
        for (int i = 0; i < Shape::STAGES; i++) {
            barrier_init(shared_offset(&shared.full[i]), 1);
            barrier_init(shared_offset(&shared.empty[i]), 8);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (group == 2) {
        registers_shrink<24>();
        const int warp = threadIdx.x / 32 % 4;
        if (threadIdx.x % 128 == 0) hopper_backward_produce<Shape>(shared, shared_offset(base), work, &qkv, &dout);
        if (warp == 1 || warp == 2) hopper_backward_order<Shape>(shared, shared_offset(base), work, warp - 1);
    } else {
        registers_grow<240>();
        hopper_backward_consume<Shape>(shared, base, work, group);
    }
#endif
}

// rows (B*NH, ceil(T/BM), {lse * log2(e), D = dout . out}, BM), infinity and 0 for rows past T; and zeros the flags.
// A warp has 32 tokens of one head, HS / 8 lanes a token; the warps of a block have neighbouring heads. grid (ceil(B *
// padded * NH / 256)), block 256; deterministic.
template <int HS, int BM>
__global__ void attention_backward_rows_kernel(float* rows, int* flags, int64_t flag_count,
                                               const bf16* dout /*(B,T,NH,HS)*/, const bf16* out /*(B,T,NH,HS)*/,
                                               const float* lse /*(B,NH,T)*/, int B, int T, int NH) {
    constexpr int LANES = HS / 8, TOKENS = 32 / LANES;
    const int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (int64_t i = thread; i < flag_count; i += (int64_t)gridDim.x * blockDim.x) flags[i] = 0;
    const int lane = threadIdx.x % 32, padded = (T + BM - 1) / BM * BM;
    const int64_t warp = thread / 32;
    const int head = (int)(warp % NH), first = (int)(warp / NH % (padded / 32)) * 32;
    const int64_t batch = warp / NH / (padded / 32);
    if (batch >= B) return;
    float mine = 0.0f;
#pragma unroll
    for (int half = 0; half < 32; half += 16) {
        float sum[LANES / 2];
#pragma unroll
        for (int i = 0; i < LANES / 2; i++) {
            const int t = first + half + i * TOKENS + lane / LANES;
            const int64_t from = ((batch * T + t) * NH + head) * HS + lane % LANES * 8;
            Vec<bf16> a = {}, b = {};
            if (t < T) a = load_vec(dout + from), b = load_vec(out + from);
            sum[i] = 0.0f;
#pragma unroll
            for (int l = 0; l < 8; l++) sum[i] = fmaf(to_float(a.lane[l]), to_float(b.lane[l]), sum[i]);
        }
#pragma unroll
        for (int i = 0; i < LANES / 2; i++) {
#pragma unroll
            for (int offset = LANES / 2; offset > 0; offset /= 2)
                sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], offset);
            const float token = __shfl_sync(0xffffffffu, sum[i], lane % TOKENS * LANES);
            if (lane / TOKENS == half / TOKENS + i) mine = token;
        }
    }
    const int t = first + lane;
    const int64_t bh = batch * NH + head;
    float* to = rows + (bh * (padded / BM) + t / BM) * 2 * BM + t % BM;
    to[0] = t < T ? lse[bh * T + t] * LOG2_E : INFINITY;
    to[BM] = mine;
}

// Bytes of scratch: {ticket, flags}, rows, dq_sum.
struct HopperBackwardScratch {
    int64_t flags, rows, bytes;
};

inline HopperBackwardScratch hopper_backward_scratch(int B, int T, int NH, int HS) {
    const int64_t heads = (int64_t)B * NH, padded = ceil_div(T, 128) * 128;
    HopperBackwardScratch scratch;
    scratch.flags = 256 + ceil_div(heads * (padded / 64) * 2 * 4, 256) * 256;
    scratch.rows = heads * padded * 2 * 4;
    scratch.bytes = scratch.flags + scratch.rows + heads * padded * HS * 4;
    return scratch;
}

template <typename Shape>
inline void attention_hopper_backward_rows(const Device* dev, char* scratch, const bf16* dout, const bf16* out,
                                           const float* lse, int B, int T, int NH) {
    const HopperBackwardScratch sizes = hopper_backward_scratch(B, T, NH, Shape::HS);
    const int64_t warps = B * ceil_div(T, Shape::BM) * (Shape::BM / 32) * NH;
    attention_backward_rows_kernel<Shape::HS, Shape::BM><<<(unsigned)ceil_div(warps, 8), 256, 0, dev->stream>>>(
        (float*)(scratch + sizes.flags), (int*)scratch, sizes.flags / 4, dout, out, lse, B, T, NH);
    check_launch();
}

template <typename Shape>
inline void attention_hopper_backward(const Device* dev, bf16* dqkv /*(B,T,3C)*/, char* scratch,
                                      const bf16* dout /*(B,T,C)*/, const bf16* qkv /*(B,T,3C)*/,
                                      const bf16* out /*(B,T,C)*/, const float* lse /*(B,NH,T)*/, int B, int T, int NH,
                                      int tokens = 65536) {
    constexpr int HS = Shape::HS;
    const HopperBackwardScratch sizes = hopper_backward_scratch(B, T, NH, HS);
    const int64_t C = (int64_t)NH * HS;
    HopperBackwardWork work;
    work.dqkv = dqkv;
    work.dq_sum = (float*)(scratch + sizes.flags + sizes.rows);
    work.flags = (int*)(scratch + 256);
    work.ticket = (int*)scratch;
    work.rows = (float*)(scratch + sizes.flags);
    work.T = T, work.NH = NH, work.heads = B * NH;
    work.group = tokens / T < 1 ? 1 : tokens / T > work.heads ? work.heads : tokens / T;
    work.key_tiles = (int)ceil_div(T, Shape::BN), work.query_tiles = (int)ceil_div(T, Shape::BM);
    work.scale = 1.0f / sqrtf((float)HS);
    attention_hopper_backward_rows<Shape>(dev, scratch, dout, out, lse, B, T, NH);
    attention_set_shared(attention_hopper_backward_kernel<Shape>, Shape::SHARED);
    attention_hopper_backward_kernel<Shape><<<(unsigned)dev->sm_count, Shape::THREADS, Shape::SHARED, dev->stream>>>(
        tensor_map(qkv, B, T, 3 * C, 64), tensor_map(dout, B, T, C, 64), work);
    check_launch();
}
