#pragma once

#include "hopper.cuh"

// BM queries by BN keys; two warpgroups of 64 keys each compute, a third one fetches (one thread) and keeps the order
// of dq (a warp for each of the two).
template <int HS_, int BM_, int TRIAL_ = 0>
struct HopperBackwardShape {
    static constexpr int HS = HS_, BM = BM_, BN = 128, THREADS = 384, STAGES = 3, TRIAL = TRIAL_;
    static constexpr int DQ_COLUMNS = BM == 128 ? HS : HS / 2;  // a group's part of dq is 64 rows of so many columns
    static constexpr int KEY_BYTES = BN * HS * 2, QUERY_BYTES = BM * HS * 2, DS_BYTES = BM * BN * 2;
    static constexpr int ROW_BYTES = 2 * BM * 4;
    // Offsets into shared memory: k of two tiles of keys, v of one, stages {q, dout}, two buffers of ds, stages
    // {lse, D}, the barriers, and the numbers of the two tiles of keys.
    static constexpr int V = 2 * KEY_BYTES, RING = V + KEY_BYTES, DS = RING + STAGES * 2 * QUERY_BYTES;
    static constexpr int ROWS = DS + 2 * DS_BYTES, KEY_FULL = ROWS + STAGES * ROW_BYTES, KEY_EMPTY = KEY_FULL + 16;
    static constexpr int V_FULL = KEY_EMPTY + 16, V_EMPTY = V_FULL + 8, FULL = V_EMPTY + 8;
    static constexpr int EMPTY = FULL + STAGES * 8, DS_FULL = EMPTY + STAGES * 8, DS_EMPTY = DS_FULL + 16;
    static constexpr int DRAWN = DS_EMPTY + 16, SHARED = DRAWN + 8;
    static_assert((BM == 64 || BM == 128) && SHARED <= 227 * 1024);
};

enum {  // trials
    NO_EXP = 1,
    NO_DQ_OUT = 2,
    NO_ORDER = 4,
    NO_DQ = 8,
    UNEVEN = 16,
    LATE_DQ = 32,
    EARLY = 64,
    SPLIT = 128,
};

enum { GO_BARRIER = 1, DONE_BARRIER = 3, ORDER_THREADS = 128 + 32 };

struct HopperBackwardWork {
    bf16* dqkv;         // (B,T,3,NH,HS)
    float* dq_sum;      // (B*NH, query tiles, BM*HS), each tile in the order of the threads' registers
    int* flags;         // (B*NH, query tiles, 2): how many tiles of keys have added their share, for each group
    int* ticket;        // (1)
    const float* rows;  // (B*NH, query tiles, {lse * log2(e), D}, BM)
    int T, NH, key_tiles, query_tiles, items;
    float scale;
};

// A tile of scores. Tiles of a block come in sequence: the queries of its first tile of keys from the diagonal on, then
// those of its next tile of keys.
struct HopperBackwardTile {
    int sequence;  // number of the tile of keys among those of this block
    int bh, key_tile, query_tile;
};

// The first tile of the next tile of keys, once it is there; false when there is none.
template <typename Shape>
__device__ __forceinline__ bool hopper_backward_take(HopperBackwardTile& tile, uint32_t shared,
                                                     const HopperBackwardWork& work, int sequence) {
    barrier_wait(shared + Shape::KEY_FULL + sequence % 2 * 8, sequence / 2 % 2, 1);
    int drawn;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(drawn) : "r"(shared + Shape::DRAWN + sequence % 2 * 4) : "memory");
    if (drawn < 0) return false;
    tile.sequence = sequence;
    tile.bh = drawn / work.key_tiles;
    tile.key_tile = work.key_tiles - 1 - drawn % work.key_tiles;
    tile.query_tile = tile.key_tile * Shape::BN / Shape::BM;
    return true;
}

// One arrival a warp, after all of its threads.
__device__ __forceinline__ void warp_arrive(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// ROWS rows of HS columns, 64 rows a copy.
template <int ROWS, int HS>
__device__ __forceinline__ void hopper_backward_load(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                                     int64_t column, int row, int batch) {
#pragma unroll
    for (int panel = 0; panel < HS / 64; panel++)
#pragma unroll
        for (int r = 0; r < ROWS; r += 64)
            tensor_load(to + (panel * ROWS + r) * PANEL_ROW_BYTES, map, barrier, (int)column + panel * 64, row + r,
                        batch);
}

// One thread: draws tiles of keys and fetches what they need.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_produce(uint32_t shared, const HopperBackwardWork& work,
                                                        const CUtensorMap* qkv, const CUtensorMap* dout) {
    constexpr int HS = Shape::HS, BM = Shape::BM, BN = Shape::BN;
    int stage = 0, parity = 0;
    for (int n = 0;; n++) {
        const uint32_t key_full = shared + Shape::KEY_FULL + n % 2 * 8;
        barrier_wait(shared + Shape::KEY_EMPTY + n % 2 * 8, n / 2 % 2 ^ 1, 2);
        const int drawn = atomicAdd(work.ticket, 1);
        store_shared(shared + Shape::DRAWN + n % 2 * 4, (uint32_t)(drawn < work.items ? drawn : -1));
        if (drawn >= work.items) {
            barrier_arrive(key_full);
            return;
        }
        const int bh = drawn / work.key_tiles, key_tile = work.key_tiles - 1 - drawn % work.key_tiles;
        const int batch = bh / work.NH, C = work.NH * HS, column = bh % work.NH * HS;
        barrier_expect(key_full, Shape::KEY_BYTES);
        hopper_backward_load<BN, HS>(shared + n % 2 * Shape::KEY_BYTES, qkv, key_full, column + C, key_tile * BN, batch);
        const int first = key_tile * BN / BM;
        for (int m = first; m < work.query_tiles; m++) {
            const uint32_t full = shared + Shape::FULL + stage * 8;
            const uint32_t q_tile = shared + Shape::RING + stage * 2 * Shape::QUERY_BYTES;
            barrier_wait(shared + Shape::EMPTY + stage * 8, parity ^ 1, 3);
            barrier_expect(full, 2 * Shape::QUERY_BYTES + Shape::ROW_BYTES);
            hopper_backward_load<BM, HS>(q_tile, qkv, full, column, m * BM, batch);
            hopper_backward_load<BM, HS>(q_tile + Shape::QUERY_BYTES, dout, full, column, m * BM, batch);
            bulk_load(shared + Shape::ROWS + stage * Shape::ROW_BYTES,
                      work.rows + ((int64_t)bh * work.query_tiles + m) * 2 * BM, Shape::ROW_BYTES, full);
            if (m == first) {
                barrier_wait(shared + Shape::V_EMPTY, n % 2 ^ 1, 4);
                barrier_expect(shared + Shape::V_FULL, Shape::KEY_BYTES);
                hopper_backward_load<BN, HS>(shared + Shape::V, qkv, shared + Shape::V_FULL, column + 2 * C,
                                             key_tile * BN, batch);
            }
            if (++stage == Shape::STAGES) stage = 0, parity ^= 1;
        }
    }
}

// One warp for each group: waits until the tiles of later keys have added their share of dq, lets the group add its
// own, and says so.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_order(uint32_t shared, const HopperBackwardWork& work, int group) {
    HopperBackwardTile tile;
    for (int n = 0;; n++) {
        const bool more = hopper_backward_take<Shape>(tile, shared, work, n);
        warp_arrive(shared + Shape::KEY_EMPTY + n % 2 * 8);
        if (!more) return;
        for (int m = tile.query_tile; m < work.query_tiles; m++) {
            int* flag = work.flags + ((int64_t)tile.bh * work.query_tiles + m) * 2 + group;
            const int before = m * Shape::BM / Shape::BN - tile.key_tile;
            if (threadIdx.x % 32 == 0 && !(Shape::TRIAL & NO_ORDER)) {
#ifdef NIBBLE_HANG_REPORT
                const long long start = clock64();
                while (load_acquire(flag) != before)
                    if (clock64() - start > 3000000000ll) hang(100 + tile.key_tile, m, before);
#else
                while (load_acquire(flag) != before) {
                }
#endif
            }
            __syncwarp();
            group_arrive(GO_BARRIER + group, ORDER_THREADS);
            group_sync(DONE_BARRIER + group, ORDER_THREADS);
            if (threadIdx.x % 32 == 0 && tile.key_tile > 0) {
                __threadfence();
                store_release(flag, before + 1);
            }
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
__device__ __forceinline__ void hopper_backward_sum(float (&c)[Shape::HS / 8][4], const uint32_t (&a)[Shape::BM / 16][4],
                                                    uint32_t tile, bool add) {
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
            s[n][e] = Shape::TRIAL & NO_EXP ? x : exp2_approximate(x);
        }
    }
}

// p and ds = p (dp - D) as left operands.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_pack(uint32_t (&p)[Shape::BM / 16][4], uint32_t (&ds)[Shape::BM / 16][4],
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

// Adds a group's part of dq in its turn: the nearest tile of keys stores, the first tile of keys writes the result.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_dq_out(float (&dq)[Shape::DQ_COLUMNS / 8][4],
                                                       const HopperBackwardWork& work, const HopperBackwardTile& tile,
                                                       int group) {
    constexpr int BM = Shape::BM, N = Shape::DQ_COLUMNS / 8;
    if (Shape::TRIAL & UNEVEN && tile.key_tile % 2 == 1)
        for (long long start = clock64(); clock64() - start < 50000;) {
        }
    const int m = tile.query_tile, thread = threadIdx.x % 128;
    float* sum = work.dq_sum + ((int64_t)tile.bh * work.query_tiles + m) * BM * Shape::HS +
                 group * 64 * Shape::DQ_COLUMNS + thread * 4;
    const bool first = m * BM / Shape::BN == tile.key_tile;
    group_sync(GO_BARRIER + group, ORDER_THREADS);
    if (!(Shape::TRIAL & NO_DQ_OUT)) {
        if (tile.key_tile > 0 && first) {
#pragma unroll
            for (int n = 0; n < N; n++)
                __stcg(reinterpret_cast<float4*>(sum + n * 512), make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]));
        } else if (tile.key_tile > 0) {
#pragma unroll
            for (int n = 0; n < N; n++) add_4(sum + n * 512, dq[n]);
        } else {
            if (!first) {
                float4 before[N];
#pragma unroll
                for (int n = 0; n < N; n++) before[n] = __ldcg(reinterpret_cast<const float4*>(sum + n * 512));
#pragma unroll
                for (int n = 0; n < N; n++)
                    dq[n][0] += before[n].x, dq[n][1] += before[n].y, dq[n][2] += before[n].z, dq[n][3] += before[n].w;
            }
            const int64_t C = (int64_t)work.NH * Shape::HS;
            const int row = m * BM + (BM == 128 ? group * 64 : 0) + thread / 32 * 16;
            bf16* to = work.dqkv + ((int64_t)(tile.bh / work.NH) * work.T + row) * 3 * C + tile.bh % work.NH * Shape::HS +
                       (BM == 128 ? 0 : group * Shape::DQ_COLUMNS);
            hopper_backward_rows<Shape::DQ_COLUMNS>(to, 3 * C, work.T - row, dq, work.scale);
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
    bf16* to = work.dqkv + ((int64_t)(tile.bh / work.NH) * work.T + key) * 3 * C + tile.bh % work.NH * Shape::HS;
    hopper_backward_rows<Shape::HS>(to + C, 3 * C, work.T - key, dk, work.scale);
    hopper_backward_rows<Shape::HS>(to + 2 * C, 3 * C, work.T - key, dv, 1.0f);
}

// One of the two groups that compute.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_consume(char* base, const HopperBackwardWork& work, int group) {
    constexpr int BM = Shape::BM, BN = Shape::BN, HS = Shape::HS;
    constexpr bool LATE = Shape::TRIAL & LATE_DQ;
    const uint32_t shared = shared_offset(base), own_rows = group * 64 * PANEL_ROW_BYTES;
    HopperBackwardTile tile, before;
    if (!hopper_backward_take<Shape>(tile, shared, work, 0)) return;
    before = tile;
    float s[BM / 8][4], dp[BM / 8][4], dq[Shape::DQ_COLUMNS / 8][4], dk[HS / 8][4] = {}, dv[HS / 8][4] = {};
    int stage = 0, parity = 0;
    barrier_wait(shared + Shape::FULL, 0, 10);
    wgmma_fence();
    hopper_backward_scores<Shape>(s, shared + own_rows, shared + Shape::RING);
    wgmma_commit();
    barrier_wait(shared + Shape::V_FULL, 0, 11);
    wgmma_fence();
    hopper_backward_scores<Shape>(dp, shared + Shape::V + own_rows, shared + Shape::RING + Shape::QUERY_BYTES);
    wgmma_commit();
    int count = 0;  // of tiles
    for (;; count++) {
        const uint32_t q_tile = shared + Shape::RING + stage * 2 * Shape::QUERY_BYTES;
        const float* rows = reinterpret_cast<const float*>(base + Shape::ROWS + stage * Shape::ROW_BYTES);
        const int key = tile.key_tile * BN + group * 64 + threadIdx.x / 32 % 4 * 16;
        const bool last = tile.query_tile == work.query_tiles - 1;
        wgmma_wait<1>();
        wgmma_hold(s);
        hopper_backward_exp<Shape>(s, rows, key, tile.query_tile * BM, work.scale * LOG2_E);
        wgmma_wait<0>();
        wgmma_hold(dp);
        if (last) warp_arrive(shared + Shape::V_EMPTY);
        uint32_t p[BM / 16][4], ds[BM / 16][4];
        hopper_backward_pack<Shape>(p, ds, s, dp, rows + BM);
        const uint32_t ds_tile = shared + Shape::DS + count % 2 * Shape::DS_BYTES;
        barrier_wait(shared + Shape::DS_EMPTY + count % 2 * 8, count / 2 % 2 ^ 1, 12);
        hopper_backward_store_ds<Shape>(ds_tile + group * BM * PANEL_ROW_BYTES, ds);
        fence_async();
        warp_arrive(shared + Shape::DS_FULL + count % 2 * 8);

        // The first tile of all has none before it: its product is of whatever is there, and not used.
        if (count > 0) barrier_wait(shared + Shape::DS_FULL + (count - 1) % 2 * 8, (count - 1) / 2 % 2, 13);
        wgmma_fence();
        hopper_backward_dq<Shape>(dq, shared + Shape::DS + (count + 1) % 2 * Shape::DS_BYTES,
                                  shared + before.sequence % 2 * Shape::KEY_BYTES, group);
        wgmma_commit();
        const bool add = tile.query_tile > tile.key_tile * BN / BM;
        hopper_backward_sum<Shape>(dv, p, q_tile + Shape::QUERY_BYTES, add);
        hopper_backward_sum<Shape>(dk, ds, q_tile, add);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(dq);
        wgmma_hold(dv);
        wgmma_hold(dk);
        warp_arrive(shared + Shape::EMPTY + stage * 8);
        if (count > 0) {
            warp_arrive(shared + Shape::DS_EMPTY + (count - 1) % 2 * 8);
            if (before.query_tile == work.query_tiles - 1)
                warp_arrive(shared + Shape::KEY_EMPTY + before.sequence % 2 * 8);
            if (!LATE) hopper_backward_dq_out<Shape>(dq, work, before, group);
        }
        HopperBackwardTile now = tile;
        tile.query_tile++;
        if (last && !hopper_backward_take<Shape>(tile, shared, work, tile.sequence + 1)) break;
        if (++stage == Shape::STAGES) stage = 0, parity ^= 1;
        const uint32_t next = shared + Shape::RING + stage * 2 * Shape::QUERY_BYTES;
        barrier_wait(shared + Shape::FULL + stage * 8, parity, 14);
        wgmma_fence();
        hopper_backward_scores<Shape>(s, shared + tile.sequence % 2 * Shape::KEY_BYTES + own_rows, next);
        wgmma_commit();
        barrier_wait(shared + Shape::V_FULL, tile.sequence % 2, 15);
        wgmma_fence();
        hopper_backward_scores<Shape>(dp, shared + Shape::V + own_rows, next + Shape::QUERY_BYTES);
        wgmma_commit();
        if (LATE && count > 0) hopper_backward_dq_out<Shape>(dq, work, before, group);
        before = now;
        if (last) hopper_backward_keys_out<Shape>(dk, dv, work, before, group);
    }
    if (LATE && count > 0) hopper_backward_dq_out<Shape>(dq, work, before, group);
    before = tile, before.query_tile--;
    barrier_wait(shared + Shape::DS_FULL + count % 2 * 8, count / 2 % 2, 16);
    wgmma_fence();
    hopper_backward_dq<Shape>(dq, shared + Shape::DS + count % 2 * Shape::DS_BYTES,
                              shared + before.sequence % 2 * Shape::KEY_BYTES, group);
    wgmma_commit();
    hopper_backward_keys_out<Shape>(dk, dv, work, before, group);
    wgmma_wait<0>();
    wgmma_hold(dq);
    hopper_backward_dq_out<Shape>(dq, work, before, group);
}

// The same with dq leaving while dv and dk are under way, and the next scores right behind them.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_consume_split(char* base, const HopperBackwardWork& work, int group) {
    constexpr int BM = Shape::BM, BN = Shape::BN, HS = Shape::HS;
    const uint32_t shared = shared_offset(base), own_rows = group * 64 * PANEL_ROW_BYTES;
    HopperBackwardTile tile, before;
    if (!hopper_backward_take<Shape>(tile, shared, work, 0)) return;
    before = tile;
    float s[BM / 8][4], dp[BM / 8][4], dq[Shape::DQ_COLUMNS / 8][4], dk[HS / 8][4] = {}, dv[HS / 8][4] = {};
    int stage = 0, parity = 0;
    barrier_wait(shared + Shape::FULL, 0, 10);
    barrier_wait(shared + Shape::V_FULL, 0, 11);
    wgmma_hold(dk);
    wgmma_hold(dv);
    wgmma_fence();
    hopper_backward_scores<Shape>(s, shared + own_rows, shared + Shape::RING);
    wgmma_commit();
    wgmma_fence();
    hopper_backward_scores<Shape>(dp, shared + Shape::V + own_rows, shared + Shape::RING + Shape::QUERY_BYTES);
    wgmma_commit();
    int count = 0;  // of tiles
    bool more = true;
    for (;; count++) {
        const uint32_t q_tile = shared + Shape::RING + stage * 2 * Shape::QUERY_BYTES;
        const float* rows = reinterpret_cast<const float*>(base + Shape::ROWS + stage * Shape::ROW_BYTES);
        const int key = tile.key_tile * BN + group * 64 + threadIdx.x / 32 % 4 * 16;
        const bool last = tile.query_tile == work.query_tiles - 1;
        wgmma_wait<1>();
        wgmma_hold(s);
        hopper_backward_exp<Shape>(s, rows, key, tile.query_tile * BM, work.scale * LOG2_E);
        wgmma_wait<0>();
        wgmma_hold(dp);
        if (!more) break;
        if (last) warp_arrive(shared + Shape::V_EMPTY);
        uint32_t p[BM / 16][4], ds[BM / 16][4];
        hopper_backward_pack<Shape>(p, ds, s, dp, rows + BM);
        const uint32_t ds_tile = shared + Shape::DS + count % 2 * Shape::DS_BYTES;
        barrier_wait(shared + Shape::DS_EMPTY + count % 2 * 8, count / 2 % 2 ^ 1, 12);
        hopper_backward_store_ds<Shape>(ds_tile + group * BM * PANEL_ROW_BYTES, ds);
        fence_async();
        warp_arrive(shared + Shape::DS_FULL + count % 2 * 8);

        if (count > 0) barrier_wait(shared + Shape::DS_FULL + (count - 1) % 2 * 8, (count - 1) / 2 % 2, 13);
        wgmma_fence();
        hopper_backward_dq<Shape>(dq, shared + Shape::DS + (count + 1) % 2 * Shape::DS_BYTES,
                                  shared + before.sequence % 2 * Shape::KEY_BYTES, group);
        wgmma_commit();
        const bool add = tile.query_tile > tile.key_tile * BN / BM;
        wgmma_fence();
        hopper_backward_sum<Shape>(dv, p, q_tile + Shape::QUERY_BYTES, add);
        hopper_backward_sum<Shape>(dk, ds, q_tile, add);
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_hold(dq);
        if (count > 0) {
            warp_arrive(shared + Shape::DS_EMPTY + (count - 1) % 2 * 8);
            if (before.query_tile == work.query_tiles - 1)
                warp_arrive(shared + Shape::KEY_EMPTY + before.sequence % 2 * 8);
            hopper_backward_dq_out<Shape>(dq, work, before, group);
        }
        before = tile;
        tile.query_tile++;
        if (last) more = hopper_backward_take<Shape>(tile, shared, work, tile.sequence + 1);
        const uint32_t empty = shared + Shape::EMPTY + stage * 8;
        if (++stage == Shape::STAGES) stage = 0, parity ^= 1;
        const uint32_t next = shared + Shape::RING + stage * 2 * Shape::QUERY_BYTES;
        if (more) barrier_wait(shared + Shape::FULL + stage * 8, parity, 14);
        if (more) barrier_wait(shared + Shape::V_FULL, tile.sequence % 2, 15);
        wgmma_wait<0>();
        wgmma_hold(dv);
        wgmma_hold(dk);
        wgmma_fence();
        hopper_backward_scores<Shape>(s, shared + tile.sequence % 2 * Shape::KEY_BYTES + own_rows, next);
        wgmma_commit();
        warp_arrive(empty);
        if (last) hopper_backward_keys_out<Shape>(dk, dv, work, before, group);
        wgmma_fence();
        hopper_backward_scores<Shape>(dp, shared + Shape::V + own_rows, next + Shape::QUERY_BYTES);
        wgmma_commit();
    }
    count--;
    barrier_wait(shared + Shape::DS_FULL + count % 2 * 8, count / 2 % 2, 16);
    wgmma_fence();
    hopper_backward_dq<Shape>(dq, shared + Shape::DS + count % 2 * Shape::DS_BYTES,
                              shared + before.sequence % 2 * Shape::KEY_BYTES, group);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(dq);
    hopper_backward_dq_out<Shape>(dq, work, before, group);
}

// The same with the products of a tile under way while the exponentials of the next one are taken.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_consume_early(char* base, const HopperBackwardWork& work, int group) {
    constexpr int BM = Shape::BM, BN = Shape::BN, HS = Shape::HS;
    const uint32_t shared = shared_offset(base), own_rows = group * 64 * PANEL_ROW_BYTES;
    HopperBackwardTile tile, before, before2;
    if (!hopper_backward_take<Shape>(tile, shared, work, 0)) return;
    before = before2 = tile;
    float s[BM / 8][4], dp[BM / 8][4], dq[Shape::DQ_COLUMNS / 8][4] = {}, dk[HS / 8][4] = {}, dv[HS / 8][4] = {};
    int stage = 0, parity = 0;
    barrier_wait(shared + Shape::FULL, 0, 10);
    barrier_wait(shared + Shape::V_FULL, 0, 11);
    wgmma_hold(dq);
    wgmma_hold(dk);
    wgmma_hold(dv);
    wgmma_fence();
    hopper_backward_scores<Shape>(s, shared + own_rows, shared + Shape::RING);
    hopper_backward_scores<Shape>(dp, shared + Shape::V + own_rows, shared + Shape::RING + Shape::QUERY_BYTES);
    wgmma_commit();
    wgmma_commit();
    int count = 0, last_stage = 0;
    bool more = true;
    for (;; count++) {
        const uint32_t q_tile = shared + Shape::RING + stage * 2 * Shape::QUERY_BYTES;
        const float* rows = reinterpret_cast<const float*>(base + Shape::ROWS + stage * Shape::ROW_BYTES);
        const int key = tile.key_tile * BN + group * 64 + threadIdx.x / 32 % 4 * 16;
        const bool last = tile.query_tile == work.query_tiles - 1;
        wgmma_wait<1>();
        wgmma_hold(s);
        wgmma_hold(dp);
        if (last) warp_arrive(shared + Shape::V_EMPTY);
        hopper_backward_exp<Shape>(s, rows, key, tile.query_tile * BM, work.scale * LOG2_E);
        uint32_t p[BM / 16][4], ds[BM / 16][4];
        hopper_backward_pack<Shape>(p, ds, s, dp, rows + BM);
        wgmma_wait<0>();
        wgmma_hold(dq);
        wgmma_hold(dv);
        wgmma_hold(dk);
        if (!more) break;
        if (count > 0) {
            warp_arrive(shared + Shape::EMPTY + last_stage * 8);
            if (before.query_tile == work.query_tiles - 1)
                hopper_backward_keys_out<Shape>(dk, dv, work, before, group);
        }
        if (count > 1) {
            warp_arrive(shared + Shape::DS_EMPTY + count % 2 * 8);
            if (before2.query_tile == work.query_tiles - 1)
                warp_arrive(shared + Shape::KEY_EMPTY + before2.sequence % 2 * 8);
            hopper_backward_dq_out<Shape>(dq, work, before2, group);
        }
        const uint32_t ds_tile = shared + Shape::DS + count % 2 * Shape::DS_BYTES;
        barrier_wait(shared + Shape::DS_EMPTY + count % 2 * 8, count / 2 % 2 ^ 1, 12);
        hopper_backward_store_ds<Shape>(ds_tile + group * BM * PANEL_ROW_BYTES, ds);
        fence_async();
        warp_arrive(shared + Shape::DS_FULL + count % 2 * 8);

        const bool add = tile.query_tile > tile.key_tile * BN / BM;
        before2 = before, before = tile;
        last_stage = stage;
        tile.query_tile++;
        if (last) more = hopper_backward_take<Shape>(tile, shared, work, tile.sequence + 1);
        if (++stage == Shape::STAGES) stage = 0, parity ^= 1;
        const uint32_t next = shared + Shape::RING + stage * 2 * Shape::QUERY_BYTES;
        if (more) {
            barrier_wait(shared + Shape::FULL + stage * 8, parity, 14);
            barrier_wait(shared + Shape::V_FULL, tile.sequence % 2, 15);
        }
        if (count > 0) barrier_wait(shared + Shape::DS_FULL + (count - 1) % 2 * 8, (count - 1) / 2 % 2, 13);
        wgmma_fence();
        hopper_backward_scores<Shape>(s, shared + tile.sequence % 2 * Shape::KEY_BYTES + own_rows, next);
        hopper_backward_scores<Shape>(dp, shared + Shape::V + own_rows, next + Shape::QUERY_BYTES);
        wgmma_commit();
        hopper_backward_dq<Shape>(dq, shared + Shape::DS + (count + 1) % 2 * Shape::DS_BYTES,
                                  shared + before2.sequence % 2 * Shape::KEY_BYTES, group);
        hopper_backward_sum<Shape>(dv, p, q_tile + Shape::QUERY_BYTES, add);
        hopper_backward_sum<Shape>(dk, ds, q_tile, add);
        wgmma_commit();
    }
    count--;
    hopper_backward_keys_out<Shape>(dk, dv, work, before, group);
    if (count > 0) hopper_backward_dq_out<Shape>(dq, work, before2, group);
    barrier_wait(shared + Shape::DS_FULL + count % 2 * 8, count / 2 % 2, 16);
    wgmma_fence();
    hopper_backward_dq<Shape>(dq, shared + Shape::DS + count % 2 * Shape::DS_BYTES,
                              shared + before.sequence % 2 * Shape::KEY_BYTES, group);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(dq);
    hopper_backward_dq_out<Shape>(dq, work, before, group);
}

// grid: as many blocks as multiprocessors, block THREADS, shared SHARED; flags and ticket zero before; HS 64 or 128,
// any T; deterministic (dq is summed in a fixed order).
template <typename Shape>
__global__ void __launch_bounds__(Shape::THREADS, 1)
    attention_backward_hopper_kernel(const __grid_constant__ CUtensorMap qkv /*(B,T,3C)*/,
                                     const __grid_constant__ CUtensorMap dout /*(B,T,C)*/,
                                     const __grid_constant__ HopperBackwardWork work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) char hopper_shared[];
    const uint32_t shared = shared_offset(hopper_shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            barrier_init(shared + Shape::KEY_FULL + i * 8, 1);
            barrier_init(shared + Shape::KEY_EMPTY + i * 8, 8 + 2);
            barrier_init(shared + Shape::DS_FULL + i * 8, 8);
            barrier_init(shared + Shape::DS_EMPTY + i * 8, 8);
        }
        barrier_init(shared + Shape::V_FULL, 1);
        barrier_init(shared + Shape::V_EMPTY, 8);
        for (int i = 0; i < Shape::STAGES; i++) {
            barrier_init(shared + Shape::FULL + i * 8, 1);
            barrier_init(shared + Shape::EMPTY + i * 8, 8);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_shrink<24>();
        const int warp = threadIdx.x / 32;
        if (threadIdx.x == 0) hopper_backward_produce<Shape>(shared, work, &qkv, &dout);
        if (warp == 1 || warp == 2) hopper_backward_order<Shape>(shared, work, warp - 1);
    } else {
        registers_grow<240>();
        // The shuffle tells the compiler that the group is one number a warp, hence the descriptors too.
        const int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128 - 1, 0);
        if constexpr (Shape::TRIAL & SPLIT)
            hopper_backward_consume_split<Shape>(hopper_shared, work, group);
        else if constexpr (Shape::TRIAL & EARLY)
            hopper_backward_consume_early<Shape>(hopper_shared, work, group);
        else
            hopper_backward_consume<Shape>(hopper_shared, work, group);
    }
#endif
}

// rows (B*NH, ceil(T/BM), {lse * log2(e), dout . out}, BM), infinity and 0 for rows past T; and zeros the flags.
// HS / 8 threads a row; grid ceil(B * tiles * BM * NH * HS / 8 / 256), block 256; deterministic.
template <int HS, int BM>
__global__ void attention_backward_rows_kernel(float* rows, int* flags, int64_t flag_count,
                                               const bf16* dout /*(B,T,NH,HS)*/, const bf16* out /*(B,T,NH,HS)*/,
                                               const float* lse /*(B,NH,T)*/, int64_t count /*B*tiles*BM*NH*/, int T,
                                               int NH) {
    constexpr int THREADS = HS / 8;
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / THREADS;
    if (i < flag_count) flags[i] = 0;
    const unsigned padded = (unsigned)(T + BM - 1) / BM * BM;
    const unsigned token = (unsigned)row / NH, head = (unsigned)row % NH, batch = token / padded, t = token % padded;
    const bool inside = row < count && t < (unsigned)T;
    float sum = 0.0f;
    if (inside) {
        const int64_t from = (((int64_t)batch * T + t) * NH + head) * HS + i % THREADS * 8;
        Vec<bf16> a = load_vec(dout + from), b = load_vec(out + from);
#pragma unroll
        for (int l = 0; l < 8; l++) sum = fmaf(to_float(a.lane[l]), to_float(b.lane[l]), sum);
    }
#pragma unroll
    for (int offset = THREADS / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (row < count && i % THREADS == 0) {
        const int64_t bh = (int64_t)batch * NH + head;
        float* to = rows + (bh * (padded / BM) + t / BM) * 2 * BM + t % BM;
        to[0] = inside ? lse[bh * T + t] * LOG2_E : INFINITY;
        to[BM] = sum;
    }
}

// Bytes of scratch: {ticket, flags}, rows, dq_sum.
struct HopperBackwardScratch {
    int64_t flags, rows, dq_sum;
};

inline HopperBackwardScratch hopper_backward_scratch(int B, int T, int NH, int HS) {
    const int64_t heads = (int64_t)B * NH, padded = ceil_div(T, 128) * 128;
    HopperBackwardScratch scratch;
    scratch.flags = 256 + ceil_div(heads * (padded / 64) * 2 * 4, 256) * 256;
    scratch.rows = heads * padded * 2 * 4;
    scratch.dq_sum = heads * padded * HS * 4;
    return scratch;
}

template <typename Shape>
inline void attention_backward_hopper(const Device* dev, bf16* dqkv /*(B,T,3C)*/, char* scratch,
                                      const bf16* dout /*(B,T,C)*/, const bf16* qkv /*(B,T,3C)*/,
                                      const bf16* out /*(B,T,C)*/, const float* lse /*(B,NH,T)*/, int B, int T, int NH) {
    constexpr int HS = Shape::HS, BM = Shape::BM;
    const HopperBackwardScratch sizes = hopper_backward_scratch(B, T, NH, HS);
    const int64_t C = (int64_t)NH * HS, tiles = ceil_div(T, BM), count = (int64_t)B * tiles * BM * NH;
    HopperBackwardWork work;
    work.dqkv = dqkv;
    work.dq_sum = (float*)(scratch + sizes.flags + sizes.rows);
    work.flags = (int*)(scratch + 256);
    work.ticket = (int*)scratch;
    float* rows = (float*)(scratch + sizes.flags);
    work.rows = rows;
    work.T = T, work.NH = NH;
    work.key_tiles = (int)ceil_div(T, Shape::BN), work.query_tiles = (int)tiles;
    work.items = B * NH * work.key_tiles;
    work.scale = 1.0f / sqrtf((float)HS);
    attention_backward_rows_kernel<HS, BM><<<(unsigned)ceil_div(count * (HS / 8), 256), 256, 0, dev->stream>>>(
        rows, (int*)scratch, sizes.flags / 4, dout, out, lse, count, T, NH);
    check_launch();
    check(cudaFuncSetAttribute(attention_backward_hopper_kernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               Shape::SHARED));
    attention_backward_hopper_kernel<Shape><<<(unsigned)dev->sm_count, Shape::THREADS, Shape::SHARED, dev->stream>>>(
        tensor_map(qkv, B, T, 3 * C, 64), tensor_map(dout, B, T, C, 64), work);
    check_launch();
}
