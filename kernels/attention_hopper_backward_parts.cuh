// The parts of attention's backward pass on Hopper (attention_hopper_backward.cuh explains it): tiles and their order,
// the warps that load and keep the order, products, and the stores of results.
#pragma once

#include "attention_parts.cuh"
#include "fp8_codes.cuh"
#include "hopper.cuh"

// BM queries by 128 keys. A block walks from the last queries back to its diagonal, and dq is summed from the first
// tile of keys on, so the longest walks come first and all multiprocessors end together. UNEVEN is for the test of the
// order: every other tile of keys is slow. With CODES, dqkv is written as fp8 codes.
template <int HS_, bool UNEVEN_ = false, bool CODES_ = false>
struct HopperBackward {
    static constexpr int HS = HS_, BM = HS == 64 ? 128 : 64, BN = 128, THREADS = 512;
    static constexpr bool UNEVEN = UNEVEN_, CODES = CODES_;
    static constexpr bool SKIPS = BM < BN;  // at the diagonal the later half of the keys sees none of the queries
    static constexpr int DQ_ROWS = 64, DQ_COLUMNS = BM == 128 ? HS : HS / 2;  // a part of a tile of dq
    static constexpr int KEY_BYTES = BN * HS * 2, QUERY_BYTES = BM * HS * 2, DS_BYTES = BM * BN * 2;
    static constexpr int OUT_BYTES = 16 * PANEL_ROW_BYTES;  // 16 rows of 64 results of a warp, to be stored
    // Offsets into shared memory: k of two tiles of keys, v of one, two stages {q, dout}, two tiles of ds, two places
    // of each warp for results.
    static constexpr int V = 2 * KEY_BYTES, RING = V + KEY_BYTES, DS = RING + 2 * 2 * QUERY_BYTES;
    static constexpr int OUT = DS + 2 * DS_BYTES, SHARED = OUT + 8 * 2 * OUT_BYTES;
    static_assert(HS * BM == 64 * 128 && DQ_COLUMNS == 64 && SHARED <= 224 * 1024);
};

// Numbers of barriers.
enum { GO_BARRIER = 1, DONE_BARRIER = 2, ORDER_THREADS = 128 + 32 };

// The struct's size is a multiple of 1024 bytes, to which the tiles behind it are aligned.
template <typename Shape>
struct alignas(1024) HopperBackwardShared {
    uint64_t key_full[2], key_empty[2], v_full, v_empty;
    uint64_t full[2], empty[2];  // of q and dout, lse and D
    uint64_t ds_full[2], ds_empty[2];
    int2 drawn[2];                            // {bh, tile of keys} of k; a negative bh: there is no more
    alignas(16) float rows[2][2][Shape::BM];  // {lse * log2(e), D}
};

struct HopperBackwardArguments {
    float* dq_sum;      // (B*NH, tiles of queries, BM*HS), each tile in the order of the threads' registers
    int* flags;         // (B*NH, tiles of queries): how many tiles of keys have added their share
    int* ticket;        // (1)
    const float* rows;  // (B*NH, tiles of queries, {lse * log2(e), D}, BM)
    float* sums;        // (B, strips of 16 tokens, 3C): column sums of dqkv
    int T, NH, heads /*B*NH*/, group /*of heads*/, shift /*hopper_backward_work*/, key_tiles, query_tiles;
    float scale;
    Fp8Codes codes;  // of dqkv, with CODES
    bf16* dqkv;      // (B, T, 3C)
};

// A tile of scores.
struct HopperBackwardTile {
    int sequence;  // number of the tile of keys among those of this block
    int bh, key_tile, query_tile;
};

// Returns the last tile of queries of a tile of keys, on the diagonal. The walk begins at the last of all.
template <typename Shape>
__device__ __forceinline__ int hopper_backward_last(int key_tile) {
    return key_tile * Shape::BN / Shape::BM;
}

// True if no tile of keys adds to dq of the queries after this one.
template <typename Shape>
__device__ __forceinline__ bool hopper_backward_final(int key_tile, int query_tile) {
    return query_tile * Shape::BM / Shape::BN == key_tile;
}

// Waits for the next tile of keys and sets `tile` to its first tile; false when there is none.
template <typename Shape>
__device__ __forceinline__ bool hopper_backward_take(HopperBackwardTile& tile, HopperBackwardShared<Shape>& shared,
                                                     const HopperBackwardArguments& a, int sequence) {
    barrier_wait(shared_offset(&shared.key_full[sequence % 2]), sequence / 2 % 2);
    int2 drawn = shared.drawn[sequence % 2];
    // One number a warp, for the compiler too.
    drawn.x = __shfl_sync(0xffffffffu, drawn.x, 0), drawn.y = __shfl_sync(0xffffffffu, drawn.y, 0);
    if (drawn.x < 0) return false;
    tile = {sequence, drawn.x, drawn.y, a.query_tiles - 1};
    return true;
}

// Arrives once per warp, after all of its threads, at barriers of data that only wgmma reads or stmatrix writes. For
// data that threads load themselves (lse, D, `drawn`) each thread arrives, since racecheck does not follow a __syncwarp
// to an arrival.
__device__ __forceinline__ void warp_arrive(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_offset(barrier));
}

// Finds {bh, tile of keys} of a ticket, -1 past the last one; false if the ticket has none. Level 0 is the tile of keys
// that comes first in the order of dq. With a shift, tickets go along diagonals: level l of head h is drawn with level
// 0 of head h + l shift. So walks that start together have all lengths, and no tile waits for one that has just begun.
// Without a shift they go level by level in groups of heads.
template <typename Shape>
__device__ __forceinline__ bool hopper_backward_work(int2& drawn, const HopperBackwardArguments& a, int ticket) {
    int level = ticket % a.key_tiles, diagonal = ticket / a.key_tiles;
    drawn = {-1, 0};
    if (diagonal >= a.heads + (a.key_tiles - 1) * a.shift) return true;
    if (a.shift > 0) {
        drawn.x = diagonal - level * a.shift;
        if (drawn.x < 0 || drawn.x >= a.heads) return false;
    } else {
        forward_work(drawn.x, level, ticket, a.key_tiles, a.heads, a.group);
        level = a.key_tiles - 1 - level;
    }
    drawn.y = level;
    return true;
}

// Draws a tile of keys for a slot of k, and starts to load k; x < 0 when there is none.
template <typename Shape>
__device__ __forceinline__ int2 hopper_backward_draw(HopperBackwardShared<Shape>& shared, uint32_t memory, int slot,
                                                     const HopperBackwardArguments& a, const CUtensorMap* qkv) {
    const uint32_t full = shared_offset(&shared.key_full[slot]);
    int2 drawn;
    while (!hopper_backward_work<Shape>(drawn, a, atomicAdd(a.ticket, 1))) {
    }
    shared.drawn[slot] = drawn;
    if (drawn.x < 0) {
        barrier_arrive(full);
        return drawn;
    }
    const int C = a.NH * Shape::HS, column = drawn.x % a.NH * Shape::HS, row = drawn.y * Shape::BN;
    const int batch = drawn.x / a.NH;
    barrier_expect(full, Shape::KEY_BYTES);
    tile_load<Shape::BN, Shape::HS, 64>(memory + slot * Shape::KEY_BYTES, qkv, full, C + column, row, batch);
    return drawn;
}

// One thread: draws tiles of keys and loads what they need.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_produce(HopperBackwardShared<Shape>& shared, uint32_t memory,
                                                        const HopperBackwardArguments& a, const CUtensorMap* qkv,
                                                        const CUtensorMap* dout) {
    constexpr int HS = Shape::HS, BM = Shape::BM, BN = Shape::BN;
    int stage = 0, parity = 0;
    for (int n = 0;; n++) {
        barrier_wait(shared_offset(&shared.key_empty[n % 2]), n / 2 % 2 ^ 1);
        const int2 drawn = hopper_backward_draw<Shape>(shared, memory, n % 2, a, qkv);
        if (drawn.x < 0) return;
        const int batch = drawn.x / a.NH, column = drawn.x % a.NH * HS;
        for (int m = a.query_tiles - 1; m >= hopper_backward_last<Shape>(drawn.y); m--) {
            const uint32_t full = shared_offset(&shared.full[stage]), v_full = shared_offset(&shared.v_full);
            const uint32_t q_tile = memory + Shape::RING + stage * 2 * Shape::QUERY_BYTES;
            barrier_wait(shared_offset(&shared.empty[stage]), parity ^ 1);
            barrier_expect(full, 2 * Shape::QUERY_BYTES + 2 * BM * 4);
            tile_load<BM, HS, 64>(q_tile, qkv, full, column, m * BM, batch);
            tile_load<BM, HS, 64>(q_tile + Shape::QUERY_BYTES, dout, full, column, m * BM, batch);
            bulk_load(shared_offset(&shared.rows[stage]), a.rows + ((int64_t)drawn.x * a.query_tiles + m) * 2 * BM,
                      2 * BM * 4, full);
            if (m == a.query_tiles - 1) {
                barrier_wait(shared_offset(&shared.v_empty), n % 2 ^ 1);
                barrier_expect(v_full, Shape::KEY_BYTES);
                tile_load<BN, HS, 64>(memory + Shape::V, qkv, v_full, 2 * a.NH * HS + column, drawn.y * BN, batch);
            }
            if (++stage == 2) stage = 0, parity ^= 1;
        }
    }
}

// One warp: waits until the tiles of keys before have added their share of dq, lets the group that computes dq add its
// own, and sets the flag. The release orders the whole group's additions before the flag, since a barrier separates
// them.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_order(HopperBackwardShared<Shape>& shared,
                                                      const HopperBackwardArguments& a) {
    HopperBackwardTile tile;
    const bool one = threadIdx.x % 32 == 0;
    for (int n = 0;; n++) {
        const bool more = hopper_backward_take<Shape>(tile, shared, a, n);
        barrier_arrive(shared_offset(&shared.key_empty[n % 2]));
        if (!more) return;
        for (int m = tile.query_tile; m >= hopper_backward_last<Shape>(tile.key_tile); m--) {
            int* flag = a.flags + (int64_t)tile.bh * a.query_tiles + m;
            while (one && load_acquire(flag) != tile.key_tile) {
            }
            __syncwarp();
            group_arrive(GO_BARRIER, ORDER_THREADS);
            group_sync(DONE_BARRIER, ORDER_THREADS);
            if (!one || hopper_backward_final<Shape>(tile.key_tile, m)) continue;
            store_release(flag, tile.key_tile + 1);
        }
    }
}

// Starts c (64 keys x BM queries) = rows (this group's 64 of k or v) columns^T (q or dout), as a group of its own.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_scores(float (&c)[Shape::BM / 8][4], uint32_t rows, uint32_t columns) {
    wgmma_fence();
    const uint64_t left = uniform_operand(operand_k_major<Shape::BN>(rows, 0));
    const uint64_t right = uniform_operand(operand_k_major<Shape::BM>(columns, 0));
#pragma unroll
    for (int k = 0; k < Shape::HS / 16; k++)
        Wgmma<Shape::BM>::template shared<0, 0>(c, operand_step(left, k_major_step<Shape::BN>(k)),
                                                operand_step(right, k_major_step<Shape::BM>(k)), k > 0);
    wgmma_commit();
}

// Part 0 or 1 of dq (64 queries x DQ_COLUMNS) = or += ds (BM x BN) k (BN x HS), of the first KEYS of BN keys.
template <typename Shape, int KEYS>
__device__ __forceinline__ void hopper_backward_dq(float (&dq)[Shape::DQ_COLUMNS / 8][4], uint32_t ds_tile,
                                                   uint32_t k_tile, int part, bool add) {
    wgmma_fence();
    constexpr int ROW = Shape::BM == 128 ? 64 : 0, COLUMN = Shape::BM == 128 ? 0 : Shape::DQ_COLUMNS;
    const uint32_t b = k_tile + part * COLUMN / 64 * Shape::BN * PANEL_ROW_BYTES + part * COLUMN % 64 * 2;
    const uint64_t left = operand_k_major<Shape::BM>(ds_tile + part * ROW * PANEL_ROW_BYTES, 0);
    const uint64_t right = uniform_operand(operand_mn_major<Shape::BN>(b, 0));
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
        Wgmma<Shape::DQ_COLUMNS>::template shared<0, 1>(dq, operand_step(left, k_major_step<Shape::BM>(k)),
                                                        operand_step(right, k * 16 * PANEL_ROW_BYTES), add || k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(dq);
}

// A warp's scores, of 16 keys and BM queries, to p, in place. Queries past T have lse = infinity, which makes their p
// zero; keys past T are later than every query.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_exp(float (&s)[Shape::BM / 8][4], const float* lse /*(BM)*/,
                                                    const HopperBackwardTile& tile, float scale_log2, int part) {
    int thread = threadIdx.x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));  // read anew, so that no register holds it
    const int key = tile.key_tile * Shape::BN + part * 64 + thread / 32 % 4 * 16, query = tile.query_tile * Shape::BM;
    const int lane = thread % 32, g = lane / 4, t = lane % 4;
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

// Stores a group's ds, keys x queries in registers, in its panel of the tile: BM queries x 64 keys.
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

// The shared memory that stages a warp's results for TMA stores, 16 rows of 64 at a time; `turn` selects one of two.
struct EpilogueStaging {
    const CUtensorMap* map;  // of dqkv, in boxes of 16 rows
    uint32_t place;
    int turn;
    float scale;  // of codes
    Fp8Stats stats;
};

template <typename Shape>
__device__ __forceinline__ EpilogueStaging epilogue_staging(const CUtensorMap* dqkv, uint32_t memory,
                                                            const HopperBackwardArguments& a) {
    const uint32_t place = memory + Shape::OUT + threadIdx.x / 32 * 2 * Shape::OUT_BYTES;
    return {dqkv, place, 0, Shape::CODES ? *a.codes.scale : 1.0f, {}};
}

// Stores 32 columns of the warp's 16 rows as codes, with CODES. Each lane writes 8 of a row, without shared memory.
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

// Gathers words among the four lanes of a quad: lane t gets word t of each, in the order of the lanes.
__device__ __forceinline__ uint4 gather_quad(const uint32_t (&word)[4], int lane) {
    const bool odd = lane & 1, upper = lane & 2;
    uint32_t first[2], second[2];  // words 2 * (t / 2) and the next, of lane t % 2 and of lane t % 2 + 2
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t own = upper ? word[2 + i] : word[i];
        const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? word[i] : word[2 + i], 2);
        first[i] = upper ? other : own, second[i] = upper ? own : other;
    }
    const uint32_t a = odd ? first[1] : first[0], b = __shfl_xor_sync(0xffffffffu, odd ? first[0] : first[1], 1);
    const uint32_t c = odd ? second[1] : second[0], d = __shfl_xor_sync(0xffffffffu, odd ? second[0] : second[1], 1);
    return make_uint4(odd ? b : a, odd ? a : b, odd ? d : c, odd ? c : d);
}

// Stores a warp's accumulators (16 rows x COLUMNS) times `factor` as bf16 in dqkv, and their column sums. Rows past T
// are zero and not written. DIRECT: without shared memory.
template <typename Shape, int COLUMNS, bool DIRECT = false>
__device__ __forceinline__ void hopper_backward_store(EpilogueStaging& out, const HopperBackwardArguments& a,
                                                      const float (&c)[COLUMNS / 8][4], float factor, int column,
                                                      int row, int batch) {
    const int lane = threadIdx.x % 32;
    const int64_t strip = (int64_t)batch * ((a.T + 15) / 16) + row / 16;
    float* sums = a.sums + strip * (3 * a.NH * Shape::HS) + column + lane_column(lane);
#pragma unroll
    for (int panel = 0; panel < COLUMNS / 64; panel++) {
        const uint32_t place = out.place + out.turn * 16 * PANEL_ROW_BYTES;
        if (!DIRECT && !Shape::CODES && lane == 0) store_wait_read<1>();  // the last store from this place
        __syncwarp();
        float sum[8];  // of the thread's columns among 32
        [[maybe_unused]] uint32_t upper[2], lower[2], above[4], below[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t word[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* pair = c[panel * 8 + k * 2 + i / 2] + i % 2 * 2;
                word[i] = pack_bf16(pair[0] * factor, pair[1] * factor);
            }
            if constexpr (Shape::CODES) {
                fp8_words(&upper[k % 2], &lower[k % 2], word[0], word[1], word[2], word[3], out.scale, &out.stats);
                if (k % 2 == 1)
                    hopper_backward_store_codes<Shape>(upper, lower, a, column + panel * 64 + k / 2 * 32, row, batch);
            } else if constexpr (DIRECT) {
                above[k % 2 * 2] = word[0], above[k % 2 * 2 + 1] = word[2];
                below[k % 2 * 2] = word[1], below[k % 2 * 2 + 1] = word[3];
                if (k % 2 == 1) {
                    const int64_t width = (int64_t)3 * a.NH * Shape::HS;
                    const int token = row + lane / 4;
                    bf16* to = a.dqkv + ((int64_t)batch * a.T + token) * width + column + panel * 64 + k / 2 * 32 +
                               lane % 4 * 8;
                    const uint4 one = gather_quad(above, lane), two = gather_quad(below, lane);
                    if (token < a.T) *(uint4*)to = one;
                    if (token + 8 < a.T) *(uint4*)(to + 8 * width) = two;
                }
            } else {
                store_matrices(place + panel_offset(lane % 16, k * 2 + lane / 16), word[0], word[1], word[2], word[3]);
            }
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const float2 upper = pair_floats(word[i]), lower = pair_floats(word[i + 1]);
                sum[k % 2 * 4 + i] = upper.x + lower.x, sum[k % 2 * 4 + i + 1] = upper.y + lower.y;
            }
            if (k % 2 == 0) continue;
            const float total = sum_lanes(sum, lane);
            if (row < a.T) sums[panel * 64 + k / 2 * 32] = total;
        }
        if (DIRECT || Shape::CODES) continue;
        fence_async();
        __syncwarp();
        if (lane == 0) tensor_store(out.map, place, column + panel * 64, row, batch), store_commit();
        out.turn ^= 1;
    }
}

// Returns the place of a thread's first four values of a part of a tile of dq_sum; each next four lie 512 further on.
template <typename Shape>
__device__ __forceinline__ float* hopper_backward_sum_of(const HopperBackwardArguments& a,
                                                         const HopperBackwardTile& tile, int part) {
    return a.dq_sum + ((int64_t)tile.bh * a.query_tiles + tile.query_tile) * Shape::BM * Shape::HS +
           part * Shape::DQ_ROWS * Shape::DQ_COLUMNS + threadIdx.x % 128 * 4;
}

// Loads what the tiles of keys before have added to a part of a tile of dq.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_dq_before(float (&dq)[Shape::DQ_COLUMNS / 8][4],
                                                          const HopperBackwardArguments& a,
                                                          const HopperBackwardTile& tile, int part) {
    const float* sum = hopper_backward_sum_of<Shape>(a, tile, part);
#pragma unroll
    for (int n = 0; n < Shape::DQ_COLUMNS / 8; n++) {
        const float4 before = __ldcg(reinterpret_cast<const float4*>(sum + n * 512));
        dq[n][0] = before.x, dq[n][1] = before.y, dq[n][2] = before.z, dq[n][3] = before.w;
    }
}

// Adds a part of a tile of dq to the sum.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_dq_add(const float (&dq)[Shape::DQ_COLUMNS / 8][4],
                                                       const HopperBackwardArguments& a, const HopperBackwardTile& tile,
                                                       int part) {
    constexpr int N = Shape::DQ_COLUMNS / 8;
    float* sum = hopper_backward_sum_of<Shape>(a, tile, part);
    if (tile.key_tile > 0) {
#pragma unroll
        for (int n = 0; n < N; n++) add_4(sum + n * 512, dq[n]);
    } else {
#pragma unroll
        for (int n = 0; n < N; n++)
            __stcg(reinterpret_cast<float4*>(sum + n * 512), make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]));
    }
}

// Writes a part of a tile of dq.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_dq_write(const float (&dq)[Shape::DQ_COLUMNS / 8][4],
                                                         EpilogueStaging& out, const HopperBackwardArguments& a,
                                                         const HopperBackwardTile& tile, int part) {
    constexpr int BM = Shape::BM, HS = Shape::HS;
    const int row = tile.query_tile * BM + (BM == 128 ? part * 64 : 0) + threadIdx.x / 32 % 4 * 16;
    const int column = tile.bh % a.NH * HS + (BM == 128 ? 0 : part * Shape::DQ_COLUMNS);
    hopper_backward_store<Shape, Shape::DQ_COLUMNS, true>(out, a, dq, a.scale, column, row, tile.bh / a.NH);
}

// In the test of the order, every other tile of keys is late.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_uneven(const HopperBackwardTile& tile) {
    if (Shape::UNEVEN && tile.key_tile % 2 == 1)
        for (long long start = clock64(); clock64() - start < 50000;) {
        }
}

// Writes dk and dv of half `part` of a tile of keys.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_keys_out(const float (&dk)[Shape::HS / 8][4],
                                                         const float (&dv)[Shape::HS / 8][4], EpilogueStaging& out,
                                                         const HopperBackwardArguments& a,
                                                         const HopperBackwardTile& tile, int part) {
    const int key = tile.key_tile * Shape::BN + part * 64 + threadIdx.x / 32 % 4 * 16;
    const int column = (a.NH + tile.bh % a.NH) * Shape::HS;
    hopper_backward_store<Shape, Shape::HS>(out, a, dk, a.scale, column, key, tile.bh / a.NH);
    hopper_backward_store<Shape, Shape::HS>(out, a, dv, 1.0f, column + a.NH * Shape::HS, key, tile.bh / a.NH);
}

// Shares ds of a tile through shared memory, once the tile before the last has been read.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_share(HopperBackwardShared<Shape>& shared, uint32_t memory,
                                                      const uint32_t (&ds)[Shape::BM / 16][4], int count, int part) {
    barrier_wait(shared_offset(&shared.ds_empty[count % 2]), count / 2 % 2 ^ 1);
    hopper_backward_store_ds<Shape>(
        memory + Shape::DS + count % 2 * Shape::DS_BYTES + part * Shape::BM * PANEL_ROW_BYTES, ds);
    fence_async();
    warp_arrive(&shared.ds_full[count % 2]);
}
