// The backward pass of causal attention (kernels/attention.cuh says what it computes) in bf16 on Hopper.
//
// The account, for a tile of scores of 128 queries x 128 keys, heads of 64. Five products of 2.1 MFLOP keep the tensor
// cores busy for 2560 cycles, 16384 exponentials the exponential units for 1024, and operands and ds cross shared
// memory with 288 KiB, 2300 cycles: the products are the bound when all three go on at once. A block owns a tile of
// keys, whose dk and dv stay in registers; dq of a tile of queries is a sum over blocks. What that can cost:
//  - a second kernel whose blocks own queries computes scores and dp again: 7 products for 5, and all exponentials;
//  - a cluster of the blocks of a head, exchanging dq through each other's shared memory, must have all T / 128 of
//    them running at once, which have 1 to T / 128 tiles to do: half of the multiprocessors' time;
//  - summing in memory, as here, costs no product and sends 32 KiB of fp32 a tile to the L2 cache, 0.9 GB at (B 64,
//    NH 12, T 1024): measured, 0.4 to 0.6 us a tile of 2.6. Additions cost what plain stores would; to read, add and
//    store costs more.
//
// A block stays on its multiprocessor and draws tiles of keys until there are none. Three warpgroups:
//  - two compute. Each owns 64 of the 128 keys and takes the scores transposed: s^T = k q^T and dp^T = v dout^T come
//    out of wgmma in the layout in which p^T and ds^T go back in, from registers, for dv += p^T dout and dk += ds^T q.
//    ds crosses shared memory, for dq = ds k: of dq each group computes 64 queries (heads of 64) or 64 columns. That
//    product is made a tile late, when the other group has long written its half of ds, so that the groups need not
//    go in step: while one takes exponentials, the other's products keep the tensor cores busy.
//  - one fetches (one thread: k of two tiles of keys, v of two or one, q and dout of two tiles of queries, by the copy
//    engine) and keeps the order of dq (a warp for each computing group, see hopper_backward_order).
// The order of dq, which makes it deterministic, is kept by flags: of the tiles of keys that a tile of queries sees,
// the first in the order stores its share, the others add theirs when the flag says that it is their turn, and the last
// one reads the sum and writes the bf16 result, so there is no pass that clears or converts. Tiles of keys are drawn by
// ticket, in that same order, so whoever waits has a later ticket than those it waits for and the wait ends. Tickets
// take turns among a group of heads, so that the one before has a start and there is little to wait for; the group's
// q, dout and sums fit in the L2 cache. Two directions are possible, see HopperBackwardShape.
//
// The linear layer below wants the column sums of dqkv for its bias. A warp takes those of its 16 rows from registers,
// as the rows leave, and writes 64 floats beside 16 x 64 results; a kernel of its own would read all of dqkv again.
//
// Registers, of 240 a thread: s and dp 64 each (p and ds take their place in bf16), dk and dv 32 each, dq 32 where dp
// was; heads of 128, in tiles of 64 queries: 32, 32, 64, 64, 32.
#pragma once

#include "attention_parts.cuh"
#include "fp8_codes.cuh"
#include "hopper.cuh"

// BM queries by 128 keys. UP: a block walks from its diagonal to the last queries, and dq is summed from the nearest
// tile of keys on, so that walks which start together meet no one at a tile. Else it walks back to its diagonal, and dq
// is summed from the first tile of keys on, so that the longest walks come first and all multiprocessors end together.
// UNEVEN is for the test of the order: every other tile of keys is slow. With CODES, dqkv leaves as fp8 codes.
template <int HS_, int BM_, bool UP_, bool UNEVEN_ = false, bool CODES_ = false>
struct HopperBackwardShape {
    static constexpr int HS = HS_, BM = BM_, BN = 128, THREADS = 384, V_SLOTS = HS == 64 ? 2 : 1;
    static constexpr bool UP = UP_, UNEVEN = UNEVEN_, CODES = CODES_;
    static constexpr int DQ_ROWS = 64, DQ_COLUMNS = BM == 128 ? HS : HS / 2;  // a group's part of a tile of dq
    static constexpr int KEY_BYTES = BN * HS * 2, QUERY_BYTES = BM * HS * 2, DS_BYTES = BM * BN * 2;
    static constexpr int OUT_BYTES = 16 * PANEL_ROW_BYTES;  // 16 rows of 64 results of a warp, on their way out
    // Offsets into shared memory: k of two tiles of keys, v of V_SLOTS, two stages {q, dout}, two tiles
    // of ds, two places of each warp for results.
    static constexpr int V = 2 * KEY_BYTES, RING = V + V_SLOTS * KEY_BYTES, DS = RING + 2 * 2 * QUERY_BYTES;
    static constexpr int OUT = DS + 2 * DS_BYTES, SHARED = OUT + 8 * 2 * OUT_BYTES;
    static_assert(HS * BM == 64 * 128 && DQ_COLUMNS == 64 && SHARED <= 224 * 1024);
};

// The shapes that the trainer runs: each takes the direction that is faster for it, by up to 20 %.
template <int HS, bool UNEVEN = false, bool CODES = false>
using HopperBackward = HopperBackwardShape<HS, HS == 64 ? 128 : 64, HS == 64, UNEVEN, CODES>;

// Numbers of barriers, one for each group.
enum { GO_BARRIER = 1, DONE_BARRIER = 3, ORDER_THREADS = 128 + 32 };

// Its size is a multiple of the 1024 bytes to which the tiles behind it are aligned.
template <typename Shape>
struct alignas(1024) HopperBackwardShared {
    uint64_t key_full[2], key_empty[2], v_full[Shape::V_SLOTS], v_empty[Shape::V_SLOTS];
    uint64_t full[2], empty[2];  // of q and dout, lse and D
    uint64_t ds_full[2], ds_empty[2];
    int4 drawn[2];                            // {bh, batch, head, tile of keys} of k; a negative bh: there is no more
    alignas(16) float rows[2][2][Shape::BM];  // {lse * log2(e), D}
};

struct HopperBackwardArguments {
    float* dq_sum;      // (B*NH, tiles of queries, BM*HS), each tile in the order of the threads' registers
    int* flags;         // (B*NH, tiles of queries, 2): how many tiles of keys have added their share, by group
    int* ticket;        // (1)
    const float* rows;  // (B*NH, tiles of queries, {lse * log2(e), D}, BM)
    float* sums;        // (B, strips of 16 tokens, 3C): column sums of dqkv; or NULL
    int T, NH, heads /*B*NH*/, group /*of heads*/, key_tiles, query_tiles;
    float scale;
    Fp8Codes codes;  // of dqkv, with CODES
};

// A tile of scores.
struct HopperBackwardTile {
    int sequence;  // number of the tile of keys among those of this block
    int bh, batch, head, key_tile, query_tile;
};

// A block's walk along the tiles of queries.
template <typename Shape>
__device__ __forceinline__ int hopper_backward_first(const HopperBackwardArguments& a, int key_tile) {
    return Shape::UP ? key_tile * Shape::BN / Shape::BM : a.query_tiles - 1;
}

template <typename Shape>
__device__ __forceinline__ int hopper_backward_last(const HopperBackwardArguments& a, int key_tile) {
    return Shape::UP ? a.query_tiles - 1 : key_tile * Shape::BN / Shape::BM;
}

// The number of tiles of keys that add their share of dq of a tile of queries before this one does.
template <typename Shape>
__device__ __forceinline__ int hopper_backward_before(int key_tile, int query_tile) {
    return Shape::UP ? query_tile * Shape::BM / Shape::BN - key_tile : key_tile;
}

// True if no tile adds after this one.
template <typename Shape>
__device__ __forceinline__ bool hopper_backward_final(int key_tile, int query_tile) {
    return Shape::UP ? key_tile == 0 : query_tile * Shape::BM / Shape::BN == key_tile;
}

// The first tile of the next tile of keys, once it is there; false when there is none.
template <typename Shape>
__device__ __forceinline__ bool hopper_backward_take(HopperBackwardTile& tile, HopperBackwardShared<Shape>& shared,
                                                     const HopperBackwardArguments& a, int sequence) {
    barrier_wait(shared_offset(&shared.key_full[sequence % 2]), sequence / 2 % 2, 1);
    const int4 drawn = shared.drawn[sequence % 2];
    if (drawn.x < 0) return false;
    tile = {sequence, drawn.x, drawn.y, drawn.z, drawn.w, hopper_backward_first<Shape>(a, drawn.w)};
    return true;
}

// One arrival a warp, after all of its threads, where only wgmma reads or stmatrix writes what the barrier is about.
// Each thread gives back what it has loaded itself (lse, D, `drawn`), since racecheck does not follow a __syncwarp to
// an arrival.
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

// Until *flag is `value`.
__device__ __forceinline__ void flag_wait(const int* flag, int value, [[maybe_unused]] int place) {
#ifdef NIBBLE_HANG_REPORT
    const long long start = clock64();
    while (load_acquire(flag) != value)
        if (clock64() - start > 3000000000ll) hang(place, 0, value);
#else
    while (load_acquire(flag) != value) {
    }
#endif
}

// Draws a tile of keys into a slot of k, and has k fetched; x < 0 when there is none.
template <typename Shape>
__device__ __forceinline__ int4 hopper_backward_draw(HopperBackwardShared<Shape>& shared, uint32_t memory, int slot,
                                                     const HopperBackwardArguments& a, const CUtensorMap* qkv) {
    const uint32_t full = shared_offset(&shared.key_full[slot]);
    const int ticket = atomicAdd(a.ticket, 1);
    int4 drawn = {-1, 0, 0, 0};
    if (ticket < a.heads * a.key_tiles) forward_work(drawn.x, drawn.w, ticket, a.key_tiles, a.heads, a.group);
    if (!Shape::UP) drawn.w = a.key_tiles - 1 - drawn.w;  // first tiles first
    drawn.y = drawn.x / a.NH, drawn.z = drawn.x % a.NH;
    shared.drawn[slot] = drawn;
    if (drawn.x < 0) {
        barrier_arrive(full);
        return drawn;
    }
    barrier_expect(full, Shape::KEY_BYTES);
    hopper_backward_load<Shape::BN, Shape::HS>(memory + slot * Shape::KEY_BYTES, qkv, full,
                                               (a.NH + drawn.z) * Shape::HS, drawn.w * Shape::BN, drawn.y);
    return drawn;
}

// One thread: draws tiles of keys and has fetched what they need.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_produce(HopperBackwardShared<Shape>& shared, uint32_t memory,
                                                        const HopperBackwardArguments& a, const CUtensorMap* qkv,
                                                        const CUtensorMap* dout) {
    constexpr int HS = Shape::HS, BM = Shape::BM, BN = Shape::BN;
    int stage = 0, parity = 0;
    for (int n = 0;; n++) {
        barrier_wait(shared_offset(&shared.key_empty[n % 2]), n / 2 % 2 ^ 1, 2);
        const int4 drawn = hopper_backward_draw<Shape>(shared, memory, n % 2, a, qkv);
        if (drawn.x < 0) return;
        const int batch = drawn.y, column = drawn.z * HS, first = hopper_backward_first<Shape>(a, drawn.w);
        const int end = hopper_backward_last<Shape>(a, drawn.w) + (Shape::UP ? 1 : -1);
        for (int m = first; m != end; m += Shape::UP ? 1 : -1) {
            const uint32_t full = shared_offset(&shared.full[stage]),
                           v_full = shared_offset(&shared.v_full[n % Shape::V_SLOTS]);
            const uint32_t q_tile = memory + Shape::RING + stage * 2 * Shape::QUERY_BYTES;
            barrier_wait(shared_offset(&shared.empty[stage]), parity ^ 1, 3);
            barrier_expect(full, 2 * Shape::QUERY_BYTES + 2 * BM * 4);
            hopper_backward_load<BM, HS>(q_tile, qkv, full, column, m * BM, batch);
            hopper_backward_load<BM, HS>(q_tile + Shape::QUERY_BYTES, dout, full, column, m * BM, batch);
            bulk_load(shared_offset(&shared.rows[stage]), a.rows + ((int64_t)drawn.x * a.query_tiles + m) * 2 * BM,
                      2 * BM * 4, full);
            if (m == first) {
                const int slot = n % Shape::V_SLOTS;
                barrier_wait(shared_offset(&shared.v_empty[slot]), n / Shape::V_SLOTS % 2 ^ 1, 4);
                barrier_expect(v_full, Shape::KEY_BYTES);
                hopper_backward_load<BN, HS>(memory + Shape::V + slot * Shape::KEY_BYTES, qkv, v_full,
                                             2 * a.NH * HS + column, drawn.w * BN, batch);
            }
            if (++stage == 2) stage = 0, parity ^= 1;
        }
    }
}

// One warp for each group: waits until the tiles of keys before have added their share of dq, lets the group add its
// own, and says so. The fence orders the whole group's additions before the flag, since the barrier came between.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_order(HopperBackwardShared<Shape>& shared,
                                                      const HopperBackwardArguments& a, int group) {
    HopperBackwardTile tile;
    const bool one = threadIdx.x % 32 == 0;
    for (int n = 0;; n++) {
        const bool more = hopper_backward_take<Shape>(tile, shared, a, n);
        barrier_arrive(shared_offset(&shared.key_empty[n % 2]));
        if (!more) return;
        const int end = hopper_backward_last<Shape>(a, tile.key_tile) + (Shape::UP ? 1 : -1);
        for (int m = tile.query_tile; m != end; m += Shape::UP ? 1 : -1) {
            int* flag = a.flags + ((int64_t)tile.bh * a.query_tiles + m) * 2 + group;
            const int before = hopper_backward_before<Shape>(tile.key_tile, m);
            if (one) flag_wait(flag, before, 5);
            __syncwarp();
            group_arrive(GO_BARRIER + group, ORDER_THREADS);
            group_sync(DONE_BARRIER + group, ORDER_THREADS);
            if (!one || hopper_backward_final<Shape>(tile.key_tile, m)) continue;
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

// A warp's scores, of 16 keys and BM queries, to p, in place. Queries past T have lse = infinity, which makes their p
// zero; keys past T are later than every query.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_exp(float (&s)[Shape::BM / 8][4], const float* lse /*(BM)*/,
                                                    const HopperBackwardTile& tile, float scale_log2) {
    const int key = tile.key_tile * Shape::BN + (int)threadIdx.x / 32 * 16, query = tile.query_tile * Shape::BM;
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
            s[n][e] = fast_exp2(fmaf(s[n][e], scale_log2, -(e % 2 ? l.y : l.x)));
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

// to[i] += value[i] in the L2 cache, which saves the way here and back. Only one group at a time adds to a place, in
// the order of the flags, so the sum does not depend on time.
__device__ __forceinline__ void add_4(float* to, const float (&value)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(value[0]), "f"(value[1]),
                 "f"(value[2]), "f"(value[3])
                 : "memory");
}

// The place in shared memory through which a warp's results leave, 16 rows of 64 at a time; `turn` alternates between
// two of them.
struct HopperBackwardExit {
    const CUtensorMap* map;  // of dqkv, in boxes of 16 rows
    uint32_t place;
    int turn;
    float scale;  // of codes
    Fp8Seen seen;
};

// With CODES: 32 columns of the warp's 16 rows, as codes. Each lane writes 8 of a row, without shared memory.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_store_codes(const uint32_t (&upper)[2], const uint32_t (&lower)[2],
                                                            const HopperBackwardArguments& a, int column, int row,
                                                            int batch) {
    const int lane = threadIdx.x % 32, width = 3 * a.NH * Shape::HS;
    row += lane / 4;
    uint8_t* to = a.codes.rows + ((int64_t)batch * a.T + row) * width + column + lane % 4 * 8;
    const uint2 first = fp8_gather(upper[0], upper[1], lane), second = fp8_gather(lower[0], lower[1], lane);
    if (row < a.T) *(uint2*)to = first;
    if (row + 8 < a.T) *(uint2*)(to + (int64_t)8 * width) = second;
}

// A warp's accumulators (16 rows x COLUMNS) times `factor` as bf16 to dqkv, and their column sums. Rows past T are zero
// and not written.
template <typename Shape, int COLUMNS>
__device__ __forceinline__ void hopper_backward_store(HopperBackwardExit& out, const HopperBackwardArguments& a,
                                                      const float (&c)[COLUMNS / 8][4], float factor, int column,
                                                      int row, int batch) {
    const int lane = threadIdx.x % 32;
    const int64_t strip = (int64_t)batch * ((a.T + 15) / 16) + row / 16;
    float* sums = a.sums + strip * (3 * a.NH * Shape::HS) + column + lane_column(lane);
#pragma unroll
    for (int panel = 0; panel < COLUMNS / 64; panel++) {
        const uint32_t place = out.place + out.turn * 16 * PANEL_ROW_BYTES;
        if (!Shape::CODES && lane == 0) store_wait_read<1>();  // what left from here the last time
        __syncwarp();
        float sum[8];  // of the thread's columns among 32
        [[maybe_unused]] uint32_t upper[2], lower[2];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t word[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* pair = c[panel * 8 + k * 2 + i / 2] + i % 2 * 2;
                word[i] = pack_bf16(pair[0] * factor, pair[1] * factor);
            }
            if constexpr (Shape::CODES) {
                const bool e5m2 = a.codes.type == FP8_E5M2;
                const float largest = fp8_largest(a.codes.type);
                fp8_words(&upper[k % 2], &lower[k % 2], word[0], word[1], word[2], word[3], out.scale, largest, e5m2,
                          &out.seen);
                if (k % 2 == 1)
                    hopper_backward_store_codes<Shape>(upper, lower, a, column + panel * 64 + k / 2 * 32, row, batch);
            } else {
                store_matrices(place + panel_offset(lane % 16, k * 2 + lane / 16), word[0], word[1], word[2], word[3]);
            }
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const float2 upper = pair_floats(word[i]), lower = pair_floats(word[i + 1]);
                sum[k % 2 * 4 + i] = upper.x + lower.x, sum[k % 2 * 4 + i + 1] = upper.y + lower.y;
            }
            if (k % 2 == 0 || !a.sums) continue;
            const float total = sum_lanes(sum, lane);
            if (row < a.T) sums[panel * 64 + k / 2 * 32] = total;
        }
        if (Shape::CODES) continue;
        fence_async();
        __syncwarp();
        if (lane == 0) tensor_store(out.map, place, column + panel * 64, row, batch), store_commit();
        out.turn ^= 1;
    }
}

// Adds a group's part of dq to the sum when it is its turn, or writes the result.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_dq_out(float (&dq)[Shape::DQ_COLUMNS / 8][4], HopperBackwardExit& out,
                                                       const HopperBackwardArguments& a, const HopperBackwardTile& tile,
                                                       int group) {
    constexpr int N = Shape::DQ_COLUMNS / 8, BM = Shape::BM, HS = Shape::HS;
    if (Shape::UNEVEN && tile.key_tile % 2 == 1)
        for (long long start = clock64(); clock64() - start < 50000;) {
        }
    float* sum = a.dq_sum + ((int64_t)tile.bh * a.query_tiles + tile.query_tile) * BM * HS +
                 group * Shape::DQ_ROWS * Shape::DQ_COLUMNS + threadIdx.x % 128 * 4;
    const bool first = hopper_backward_before<Shape>(tile.key_tile, tile.query_tile) == 0;
    group_sync(GO_BARRIER + group, ORDER_THREADS);
    if (!hopper_backward_final<Shape>(tile.key_tile, tile.query_tile)) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            if (!first)
                add_4(sum + n * 512, dq[n]);
            else
                __stcg(reinterpret_cast<float4*>(sum + n * 512), make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]));
        }
    } else {
        float4 before[N] = {};
        if (!first) {
#pragma unroll
            for (int n = 0; n < N; n++) before[n] = __ldcg(reinterpret_cast<const float4*>(sum + n * 512));
        }
#pragma unroll
        for (int n = 0; n < N; n++)
            dq[n][0] += before[n].x, dq[n][1] += before[n].y, dq[n][2] += before[n].z, dq[n][3] += before[n].w;
        const int row = tile.query_tile * BM + (BM == 128 ? group * 64 : 0) + threadIdx.x / 32 % 4 * 16;
        const int column = tile.head * HS + (BM == 128 ? 0 : group * Shape::DQ_COLUMNS);
        hopper_backward_store<Shape, Shape::DQ_COLUMNS>(out, a, dq, a.scale, column, row, tile.batch);
    }
    group_arrive(DONE_BARRIER + group, ORDER_THREADS);
}

template <typename Shape>
__device__ __forceinline__ void hopper_backward_keys_out(const float (&dk)[Shape::HS / 8][4],
                                                         const float (&dv)[Shape::HS / 8][4], HopperBackwardExit& out,
                                                         const HopperBackwardArguments& a,
                                                         const HopperBackwardTile& tile, int group) {
    const int key = tile.key_tile * Shape::BN + group * 64 + threadIdx.x / 32 % 4 * 16;
    const int column = (a.NH + tile.head) * Shape::HS;
    hopper_backward_store<Shape, Shape::HS>(out, a, dk, a.scale, column, key, tile.batch);
    hopper_backward_store<Shape, Shape::HS>(out, a, dv, 1.0f, column + a.NH * Shape::HS, key, tile.batch);
}

// ds of a tile into shared memory, where the other group is done with the tile before the last.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_share(HopperBackwardShared<Shape>& shared, uint32_t memory,
                                                      const uint32_t (&ds)[Shape::BM / 16][4], int count, int group) {
    barrier_wait(shared_offset(&shared.ds_empty[count % 2]), count / 2 % 2 ^ 1, 12);
    hopper_backward_store_ds<Shape>(
        memory + Shape::DS + count % 2 * Shape::DS_BYTES + group * Shape::BM * PANEL_ROW_BYTES, ds);
    fence_async();
    warp_arrive(&shared.ds_full[count % 2]);
}

// Starts a group's dq of tile number `count`, which `tile` is.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_dq_start(float (&dq)[Shape::DQ_COLUMNS / 8][4], uint32_t memory,
                                                         const HopperBackwardTile& tile, int count, int group) {
    wgmma_fence();
    hopper_backward_dq<Shape>(dq, memory + Shape::DS + count % 2 * Shape::DS_BYTES,
                              memory + tile.sequence % 2 * Shape::KEY_BYTES, group);
    wgmma_commit();
}

// Starts a group's dv += p dout and dk += ds q, from q and dout in a stage.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_keys_start(float (&dk)[Shape::HS / 8][4], float (&dv)[Shape::HS / 8][4],
                                                           const uint32_t (&p)[Shape::BM / 16][4],
                                                           const uint32_t (&ds)[Shape::BM / 16][4], uint32_t q_tile,
                                                           bool add) {
    wgmma_fence();
    hopper_backward_sum<Shape>(dv, p, q_tile + Shape::QUERY_BYTES, add);
    hopper_backward_sum<Shape>(dk, ds, q_tile, add);
    wgmma_commit();
}

// Starts a product of scores as a group of its own.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_scores_start(float (&c)[Shape::BM / 8][4], uint32_t rows,
                                                             uint32_t columns) {
    wgmma_fence();
    hopper_backward_scores<Shape>(c, rows, columns);
    wgmma_commit();
}

// dq of a tile is there: frees its ds and, after the last tile, its k, and lets dq go.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_dq_done(float (&dq)[Shape::DQ_COLUMNS / 8][4],
                                                        HopperBackwardShared<Shape>& shared, int buffer,
                                                        HopperBackwardExit& out, const HopperBackwardArguments& a,
                                                        const HopperBackwardTile& tile, int group) {
    warp_arrive(&shared.ds_empty[buffer]);
    if (tile.query_tile == hopper_backward_last<Shape>(a, tile.key_tile))
        barrier_arrive(shared_offset(&shared.key_empty[tile.sequence % 2]));
    hopper_backward_dq_out<Shape>(dq, out, a, tile, group);
}

// One of the two groups that compute. A tile's products are under way while the tile before gives its dq; the scores
// of the next tile while dk and dv of a finished tile of keys leave. After the last tile there is one more round, whose
// scores are of whatever is there and not used: the compiler makes products wait for each other when a loop can be
// left while some are under way. So is dq of the first round.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_consume(HopperBackwardShared<Shape>& shared, uint32_t memory,
                                                        const CUtensorMap* dqkv, const HopperBackwardArguments& a,
                                                        int group) {
    constexpr int BM = Shape::BM, HS = Shape::HS;
    HopperBackwardExit out = {dqkv,
                              memory + Shape::OUT + threadIdx.x / 32 * 2 * Shape::OUT_BYTES,
                              0,
                              Shape::CODES ? *a.codes.scale : 1.0f,
                              {}};
    const uint32_t k_tile = memory + group * 64 * PANEL_ROW_BYTES, v_tile = k_tile + Shape::V;
    HopperBackwardTile tile, before;
    if (!hopper_backward_take<Shape>(tile, shared, a, 0)) return;
    before = tile;
    float s[BM / 8][4], dp[BM / 8][4], dq[Shape::DQ_COLUMNS / 8][4], dk[HS / 8][4] = {}, dv[HS / 8][4] = {};
    wgmma_hold(dk);
    wgmma_hold(dv);
    barrier_wait(shared_offset(&shared.full[0]), 0, 10);
    hopper_backward_scores_start<Shape>(s, k_tile, memory + Shape::RING);
    barrier_wait(shared_offset(&shared.v_full[0]), 0, 11);
    hopper_backward_scores_start<Shape>(dp, v_tile, memory + Shape::RING + Shape::QUERY_BYTES);
    int count = 0;  // of tiles
    for (bool more = true;; count++) {
        const int stage = count % 2;
        const uint32_t q_tile = memory + Shape::RING + stage * 2 * Shape::QUERY_BYTES;
        const bool last = tile.query_tile == hopper_backward_last<Shape>(a, tile.key_tile);
        wgmma_wait<1>();
        wgmma_hold(s);
        hopper_backward_exp<Shape>(s, shared.rows[stage][0], tile, a.scale * LOG2_OF_E);
        wgmma_wait<0>();
        wgmma_hold(dp);
        if (!more) break;
        if (last) warp_arrive(&shared.v_empty[tile.sequence % Shape::V_SLOTS]);
        uint32_t p[BM / 16][4], ds[BM / 16][4];
        hopper_backward_pack<Shape>(p, ds, s, dp, shared.rows[stage][1]);
        hopper_backward_share<Shape>(shared, memory, ds, count, group);

        if (count > 0) barrier_wait(shared_offset(&shared.ds_full[stage ^ 1]), (count - 1) / 2 % 2, 13);
        hopper_backward_dq_start<Shape>(dq, memory, before, count + 1, group);
        hopper_backward_keys_start<Shape>(dk, dv, p, ds, q_tile,
                                          tile.query_tile != hopper_backward_first<Shape>(a, tile.key_tile));
        wgmma_wait<1>();
        wgmma_hold(dq);
        if (count > 0) hopper_backward_dq_done<Shape>(dq, shared, stage ^ 1, out, a, before, group);

        before = tile, tile.query_tile += Shape::UP ? 1 : -1;
        if (last) more = hopper_backward_take<Shape>(tile, shared, a, tile.sequence + 1);
        const uint32_t next = memory + Shape::RING + (stage ^ 1) * 2 * Shape::QUERY_BYTES;
        if (more) barrier_wait(shared_offset(&shared.full[stage ^ 1]), (count + 1) / 2 % 2, 14);
        wgmma_wait<0>();
        wgmma_hold(dv);
        wgmma_hold(dk);
        hopper_backward_scores_start<Shape>(s, k_tile + tile.sequence % 2 * Shape::KEY_BYTES, next);
        barrier_arrive(shared_offset(&shared.empty[stage]));
        if (last) hopper_backward_keys_out<Shape>(dk, dv, out, a, before, group);
        const int slot = tile.sequence % Shape::V_SLOTS;
        if (more) barrier_wait(shared_offset(&shared.v_full[slot]), tile.sequence / Shape::V_SLOTS % 2, 15);
        hopper_backward_scores_start<Shape>(dp, v_tile + slot * Shape::KEY_BYTES, next + Shape::QUERY_BYTES);
    }
    barrier_wait(shared_offset(&shared.ds_full[(count - 1) % 2]), (count - 1) / 2 % 2, 16);
    hopper_backward_dq_start<Shape>(dq, memory, before, count - 1, group);
    wgmma_wait<0>();
    wgmma_hold(dq);
    hopper_backward_dq_done<Shape>(dq, shared, (count - 1) % 2, out, a, before, group);
    if (Shape::CODES) fp8_tell_warp(a.codes, out.seen);
    if (threadIdx.x % 32 == 0) store_wait<0>();
}

template <typename Shape>
__device__ __forceinline__ void hopper_backward_barriers(HopperBackwardShared<Shape>& shared) {
    for (int i = 0; i < 2; i++) {
        barrier_init(shared_offset(&shared.key_full[i]), 1);
        barrier_init(shared_offset(&shared.key_empty[i]), 256 + 64);  // those that compute, and keep the order
        barrier_init(shared_offset(&shared.ds_full[i]), 8);
        barrier_init(shared_offset(&shared.ds_empty[i]), 8);
    }
    for (int i = 0; i < Shape::V_SLOTS; i++) {
        barrier_init(shared_offset(&shared.v_full[i]), 1);
        barrier_init(shared_offset(&shared.v_empty[i]), 8);
    }
    for (int i = 0; i < 2; i++) {
        barrier_init(shared_offset(&shared.full[i]), 1);
        barrier_init(shared_offset(&shared.empty[i]), 256);
    }
    barrier_init_done();
}

// grid a block for each multiprocessor, block THREADS, shared SHARED; flags and ticket zero before; HS 64 or 128, any
// T; deterministic (dq is summed in a fixed order).
template <typename Shape>
__global__ void __launch_bounds__(Shape::THREADS, 1)
    attention_hopper_backward_kernel(const __grid_constant__ CUtensorMap qkv /*(B,T,3C)*/,
                                     const __grid_constant__ CUtensorMap dout /*(B,T,C)*/,
                                     const __grid_constant__ CUtensorMap dqkv /*(B,T,3C)*/,
                                     const __grid_constant__ HopperBackwardArguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ char dynamic[];
    __shared__ HopperBackwardShared<Shape> shared;
    const uint32_t memory = shared_offset(dynamic);
    const int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0);  // one number a warp, for the compiler too
    if (memory % 1024 != 0) __trap();
    if (threadIdx.x == 0) hopper_backward_barriers<Shape>(shared);
    __syncthreads();
    if (group == 2) {
        registers_shrink<24>();
        const int warp = threadIdx.x / 32 % 4;
        if (threadIdx.x % 128 == 0) hopper_backward_produce<Shape>(shared, memory, a, &qkv, &dout);
        if (warp == 1 || warp == 2) hopper_backward_order<Shape>(shared, a, warp - 1);
    } else {
        registers_grow<240>();
        hopper_backward_consume<Shape>(shared, memory, &dqkv, a, group);
    }
#endif
}

// rows (B*NH, ceil(T/BM), {lse * log2(e), D = dout . out}, BM), infinity and 0 for rows past T; and zeros the flags.
// A warp has 32 tokens of one head, HS / 8 lanes a token; the warps of a block have neighbouring heads. grid (ceil(B *
// padded * NH / 256)), block 256; deterministic.
template <int HS, int BM>
__global__ void attention_hopper_rows_kernel(float* rows, int* flags, int64_t flag_count,
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
    to[0] = t < T ? lse[bh * T + t] * LOG2_OF_E : INFINITY;
    to[BM] = mine;
}

template <typename Shape>
inline void attention_hopper_rows(const Device* dev, char* scratch, const bf16* dout, const bf16* out, const float* lse,
                                  int B, int T, int NH) {
    const HopperBackwardScratch sizes = hopper_backward_scratch(B, T, NH, Shape::HS);
    const int64_t warps = B * ceil_div(T, Shape::BM) * (Shape::BM / 32) * NH;
    attention_hopper_rows_kernel<Shape::HS, Shape::BM><<<(unsigned)ceil_div(warps, 8), 256, 0, dev->stream>>>(
        (float*)(scratch + sizes.flags), (int*)scratch, sizes.flags / 4, dout, out, lse, B, T, NH);
    check_launch();
}

// Writes every element of dqkv, or with CODES of codes; C = NH * HS. `scratch` has hopper_backward_scratch's bytes,
// contents irrelevant.
// With `columns`, returns the column sums of dqkv: (hopper_backward_strips, 3C), in scratch; otherwise NULL.
template <typename Shape>
inline float* attention_hopper_backward(const Device* dev, bf16* dqkv /*(B,T,3C)*/, char* scratch,
                                        const bf16* dout /*(B,T,C)*/, const bf16* qkv /*(B,T,3C)*/,
                                        const bf16* out /*(B,T,C)*/, const float* lse /*(B,NH,T)*/, int B, int T,
                                        int NH, bool columns = false, const Fp8Codes& codes = {}) {
    constexpr int TOGETHER = 4 << 20;  // values of q of a group of heads: with dout and dq_sum 32 MiB of L2 cache
    const HopperBackwardScratch sizes = hopper_backward_scratch(B, T, NH, Shape::HS);
    const int64_t C = (int64_t)NH * Shape::HS;
    HopperBackwardArguments a;
    a.dq_sum = (float*)(scratch + sizes.flags + sizes.rows);
    a.flags = (int*)(scratch + 256), a.ticket = (int*)scratch, a.rows = (float*)(scratch + sizes.flags);
    a.sums = columns ? a.dq_sum + sizes.dq_sum / 4 : nullptr;
    a.T = T, a.NH = NH, a.heads = B * NH, a.codes = codes;
    const int64_t group = TOGETHER / ((int64_t)T * Shape::HS);
    a.group = (int)(group < 1 ? 1 : group > a.heads ? a.heads : group);
    a.key_tiles = (int)ceil_div(T, Shape::BN), a.query_tiles = (int)ceil_div(T, Shape::BM);
    a.scale = 1.0f / sqrtf((float)Shape::HS);
    attention_hopper_rows<Shape>(dev, scratch, dout, out, lse, B, T, NH);
    attention_set_shared(attention_hopper_backward_kernel<Shape>, Shape::SHARED);
    attention_hopper_backward_kernel<Shape><<<(unsigned)dev->sm_count, Shape::THREADS, Shape::SHARED, dev->stream>>>(
        tensor_map(qkv, B, T, 3 * C, 64), tensor_map(dout, B, T, C, 64), tensor_map(dqkv, B, T, 3 * C, 16), a);
    check_launch();
    return a.sums;
}
