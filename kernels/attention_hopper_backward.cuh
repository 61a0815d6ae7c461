// The backward pass of causal attention (kernels/attention.cuh says what it computes) in bf16 on Hopper.
//
// Cost of a tile of scores of 128 queries x 128 keys, heads of 64: five products of 2.1 MFLOP keep the tensor cores
// busy for 2560 cycles, 16384 exponentials take the exponential units 1024 cycles, and 288 KiB of operands and ds take
// shared memory 2300 cycles. If all three overlap, the products are the limit. A block owns a tile of keys, whose dk
// and dv stay in registers; dq of a tile of queries is a sum over blocks. There are three ways to compute that sum:
//  - a second kernel, whose blocks own queries, computes scores and dp again: 7 products instead of 5, and twice the
//    exponentials;
//  - a cluster of all blocks of a head exchanges dq through shared memory: its T / 128 blocks, which have 1 to T / 128
//    tiles to do, must all run at once, which wastes half of the multiprocessors' time;
//  - summing in memory, as here, costs no product and sends 32 KiB of fp32 per tile to the L2 cache, 0.9 GB at (B 64,
//    NH 12, T 1024): measured, 0.4 to 0.6 us of a tile's 2.6. An addition in the cache costs as much as a plain store;
//    to read, add and store costs more.
//
// A block stays on its multiprocessor and draws tiles of keys until there are none. It has four warpgroups, and takes
// the scores transposed: s^T = k q^T and dp^T = v dout^T come out of wgmma in the layout in which p^T and ds^T go back
// in, from registers, for dv += p^T dout and dk += ds^T q. Tiles have 128 queries (heads of 64) or 64 (heads of 128):
//  - two groups compute dk and dv of 64 keys each. s and dp take turns in the same registers: p, rounded, replaces s;
//    dv needs it and ds is made from it. dv begins while ds is made, then dk, then the next s; the other groups'
//    products fill the gaps. ds goes through shared memory. 208 registers.
//  - one computes dq = ds k, 64 queries x 64 columns at a time, and adds it. So waiting for dq's turn does not delay
//  the
//    other groups' next tile, unless this group is two tiles behind. 72 registers.
//  - one loads (one thread: k of two tiles of keys, v of one, q and dout of two tiles of queries, by TMA) and keeps the
//    order of dq (one warp, see hopper_backward_order). 24 registers. That is 512 registers per lane, all there are.
// At the first queries that heads of 128 see of a tile of keys, the later 64 keys are masked, so their group goes on to
// its next tile. The groups exchange the halves of the keys from one tile of keys to the next, so that both save this
// work: 4 of 72 tiles of a head at T 1024.
//
// Flags keep the order of dq, which makes it deterministic: of the tiles of keys that a tile of queries sees, the first
// in the order stores its share, the others add theirs when the flag says that it is their turn, and the last one reads
// the sum and writes the bf16 result, so there is no pass that clears or converts. Tiles of keys are drawn by ticket,
// so that a block waits only for blocks with earlier tickets, and the wait ends (hopper_backward_work). q, dout and the
// sums of all heads in flight fit in the L2 cache together.
//
// The bias of the linear layer below needs the column sums of dqkv. A warp sums its 16 rows in registers when it stores
// them, and writes 64 floats beside 16 x 64 results; a separate kernel would read all of dqkv again.
#pragma once

#include "attention_hopper_backward_parts.cuh"

// True if the second half of the keys is later than all queries of a tile.
template <typename Shape>
__device__ __forceinline__ bool hopper_backward_half(const HopperBackwardTile& tile) {
    return Shape::SKIPS && tile.query_tile * Shape::BM == tile.key_tile * Shape::BN;
}

// Returns the half of the keys that a group has in the block's tile of keys number `sequence`.
__device__ __forceinline__ int hopper_backward_part(int group, int sequence) {
    return group ^ (sequence & 1);
}

// The group that computes dq. The last tile of keys that adds to a tile of queries starts from the sum of the others,
// so it waits for its turn before its product.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_queries(HopperBackwardShared<Shape>& shared, uint32_t memory,
                                                        const HopperBackwardArguments& a) {
    EpilogueStaging out = {nullptr, 0, 0, Shape::CODES ? *a.codes.scale : 1.0f, {}};
    HopperBackwardTile tile;
    int count = 0;  // of tiles
    for (int n = 0; hopper_backward_take<Shape>(tile, shared, a, n); n++) {
        const int last = hopper_backward_last<Shape>(tile.key_tile);
        for (; tile.query_tile >= last; tile.query_tile--, count++) {
            const uint32_t ds_tile = memory + Shape::DS + count % 2 * Shape::DS_BYTES;
            const uint32_t k_tile = memory + n % 2 * Shape::KEY_BYTES;
            const bool final = hopper_backward_final<Shape>(tile.key_tile, tile.query_tile);
            const bool add = final && tile.key_tile > 0;
            hopper_backward_uneven<Shape>(tile);
            if (add) group_sync(GO_BARRIER, ORDER_THREADS);
#pragma unroll
            for (int part = 0; part < 2; part++) {
                float dq[Shape::DQ_COLUMNS / 8][4];
                if (add) hopper_backward_dq_before<Shape>(dq, a, tile, part);
                if (part == 0) barrier_wait(shared_offset(&shared.ds_full[count % 2]), count / 2 % 2);
                // Each branch has a whole product, since the compiler makes products that are in flight across a branch
                // wait for each other.
                if (hopper_backward_half<Shape>(tile))
                    hopper_backward_dq<Shape, Shape::BN / 2>(dq, ds_tile, k_tile, part, add);
                else
                    hopper_backward_dq<Shape, Shape::BN>(dq, ds_tile, k_tile, part, add);
                if (part == 1) {
                    warp_arrive(&shared.ds_empty[count % 2]);
                    if (tile.query_tile == last) barrier_arrive(shared_offset(&shared.key_empty[n % 2]));
                } else if (!add) {
                    group_sync(GO_BARRIER, ORDER_THREADS);
                }
                if (final)
                    hopper_backward_dq_write<Shape>(dq, out, a, tile, part);
                else
                    hopper_backward_dq_add<Shape>(dq, a, tile, part);
            }
            group_arrive(DONE_BARRIER, ORDER_THREADS);
        }
    }
    if (Shape::CODES) publish_warp_amax(a.codes, out.stats);
}

// ds = p (dp - D), from the rounded p. The product for dv, in flight, reads p too, so p must stay until dv is done.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_ds(uint32_t (&ds)[Shape::BM / 16][4],
                                                   const uint32_t (&p)[Shape::BM / 16][4],
                                                   const float (&dp)[Shape::BM / 8][4], const float* D /*(BM)*/) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < Shape::BM / 8; n++) {
        const float2 d = *reinterpret_cast<const float2*>(D + n * 8 + t * 2);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float2 pair = pair_floats(p[n / 2][n % 2 * 2 + r]);
            ds[n / 2][n % 2 * 2 + r] = pack_bf16(pair.x * (dp[n][r * 2] - d.x), pair.y * (dp[n][r * 2 + 1] - d.y));
        }
    }
}

// Releases the buffers of a tile whose keys are masked for this group, as if it had computed it.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_pass(HopperBackwardShared<Shape>& shared,
                                                     const HopperBackwardArguments& a, const HopperBackwardTile& tile,
                                                     int count) {
    barrier_wait(shared_offset(&shared.full[count % 2]), count / 2 % 2);
    barrier_arrive(shared_offset(&shared.empty[count % 2]));
    barrier_wait(shared_offset(&shared.ds_empty[count % 2]), count / 2 % 2 ^ 1);
    warp_arrive(&shared.ds_full[count % 2]);
    if (tile.query_tile != hopper_backward_last<Shape>(tile.key_tile)) return;
    warp_arrive(&shared.v_empty);
    barrier_arrive(shared_offset(&shared.key_empty[tile.sequence % 2]));
}

// Moves on to a group's next tile: the block's next one or, if its keys are masked, the one after it. False when there
// is none.
template <typename Shape>
__device__ __forceinline__ bool hopper_backward_advance(HopperBackwardTile& tile, int& count,
                                                        HopperBackwardShared<Shape>& shared,
                                                        const HopperBackwardArguments& a, int group) {
    for (;;) {
        if (tile.query_tile == hopper_backward_last<Shape>(tile.key_tile)) {
            if (!hopper_backward_take<Shape>(tile, shared, a, tile.sequence + 1)) return false;
        } else {
            tile.query_tile--;
        }
        count++;
        if (hopper_backward_part(group, tile.sequence) == 0 || !hopper_backward_half<Shape>(tile)) return true;
        hopper_backward_pass<Shape>(shared, a, tile, count);
    }
}

// Starts the scores of a tile.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_tile_scores(float (&s)[Shape::BM / 8][4], uint32_t memory,
                                                            const HopperBackwardTile& tile, int count, int group) {
    const int part = hopper_backward_part(group, tile.sequence);
    hopper_backward_scores<Shape>(s, memory + tile.sequence % 2 * Shape::KEY_BYTES + part * 64 * PANEL_ROW_BYTES,
                                  memory + Shape::RING + count % 2 * 2 * Shape::QUERY_BYTES);
}

// One of the two groups that compute dk and dv. The scores of the next tile overlap with the stores of dk and dv of a
// finished tile of keys. After the last tile there is one more round, whose scores are not used: the compiler makes
// products wait for each other if a loop can be left while some are in flight.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_keys(HopperBackwardShared<Shape>& shared, uint32_t memory,
                                                     const CUtensorMap* dqkv, const HopperBackwardArguments& a,
                                                     int group) {
    constexpr int BM = Shape::BM, HS = Shape::HS;
    EpilogueStaging out = epilogue_staging<Shape>(dqkv, memory, a);
    HopperBackwardTile tile, before;
    if (!hopper_backward_take<Shape>(tile, shared, a, 0)) return;
    int count = 0;  // of tiles
    if (hopper_backward_part(group, 0) == 1 && hopper_backward_half<Shape>(tile)) {
        hopper_backward_pass<Shape>(shared, a, tile, count);
        if (!hopper_backward_advance<Shape>(tile, count, shared, a, group)) return;
    }
    float s[BM / 8][4], dk[HS / 8][4] = {}, dv[HS / 8][4] = {};
    wgmma_hold(dk);
    wgmma_hold(dv);
    barrier_wait(shared_offset(&shared.full[count % 2]), count / 2 % 2);
    hopper_backward_tile_scores<Shape>(s, memory, tile, count, group);
    for (bool more = true;;) {
        const int stage = count % 2, part = hopper_backward_part(group, tile.sequence);
        const uint32_t q_tile = memory + Shape::RING + stage * 2 * Shape::QUERY_BYTES;
        const int shorter = Shape::SKIPS ? part : 0;  // tiles that the walk of the later half is shorter by
        const bool first = tile.query_tile == a.query_tiles - 1;
        const bool last = tile.query_tile == hopper_backward_last<Shape>(tile.key_tile) + shorter;
        wgmma_wait<0>();
        wgmma_hold(s);
        if (!more) break;
        hopper_backward_exp<Shape>(s, shared.rows[stage][0], tile, a.scale * LOG2_OF_E, part);
        uint32_t p[BM / 16][4], ds[BM / 16][4];
        pack_left(p, s);  // the rounded p
        if (first) barrier_wait(shared_offset(&shared.v_full), tile.sequence % 2);
        float dp[BM / 8][4];
        hopper_backward_scores<Shape>(dp, memory + Shape::V + part * 64 * PANEL_ROW_BYTES, q_tile + Shape::QUERY_BYTES);
        wgmma_columns(dv, p, q_tile + Shape::QUERY_BYTES, !first);
        wgmma_wait<1>();
        wgmma_hold(dp);
        if (last && shorter == 0) {
            warp_arrive(&shared.v_empty);
            barrier_arrive(shared_offset(&shared.key_empty[tile.sequence % 2]));
        }
        hopper_backward_ds<Shape>(ds, p, dp, shared.rows[stage][1]);
        wgmma_columns(dk, ds, q_tile, !first);
        hopper_backward_share<Shape>(shared, memory, ds, count, part);
        before = tile;
        if (!last) {
            tile.query_tile--, count++;
            barrier_wait(shared_offset(&shared.full[count % 2]), count / 2 % 2);
        }
        wgmma_wait<0>();
        wgmma_hold(dv);
        wgmma_hold(dk);
        barrier_arrive(shared_offset(&shared.empty[stage]));
        if (last) {
            more = hopper_backward_advance<Shape>(tile, count, shared, a, group);
            if (more) barrier_wait(shared_offset(&shared.full[count % 2]), count / 2 % 2);
        }
        hopper_backward_tile_scores<Shape>(s, memory, tile, count, group);
        if (last) hopper_backward_keys_out<Shape>(dk, dv, out, a, before, part);
    }
    if (Shape::CODES) publish_warp_amax(a.codes, out.stats);
    if (threadIdx.x % 32 == 0) store_wait<0>();
}

template <typename Shape>
__device__ __forceinline__ void hopper_backward_barriers(HopperBackwardShared<Shape>& shared) {
    for (int i = 0; i < 2; i++) {
        barrier_init(shared_offset(&shared.key_full[i]), 1);
        // It counts the threads that compute and those that keep the order.
        barrier_init(shared_offset(&shared.key_empty[i]), 256 + 128 + 32);
        barrier_init(shared_offset(&shared.ds_full[i]), 8);
        barrier_init(shared_offset(&shared.ds_empty[i]), 4);
    }
    barrier_init(shared_offset(&shared.v_full), 1);
    barrier_init(shared_offset(&shared.v_empty), 8);
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
    if (group == 3) {
        registers_shrink<24>();
        if (threadIdx.x % 128 == 0) hopper_backward_produce<Shape>(shared, memory, a, &qkv, &dout);
        if (threadIdx.x / 32 % 4 == 1) hopper_backward_order<Shape>(shared, a);
    } else if (group == 2) {
        registers_shrink<72>();
        hopper_backward_queries<Shape>(shared, memory, a);
    } else {
        registers_grow<208>();
        hopper_backward_keys<Shape>(shared, memory, &dqkv, a, group);
    }
#endif
}

// Writes every element of dqkv, or with CODES of the codes; C = NH * HS. `scratch` has attention_scratch's bytes,
// contents irrelevant. Returns the column sums of dqkv, (hopper_backward_strips, 3C), in scratch.
template <typename Shape>
inline float* attention_hopper_backward(const Device* dev, bf16* dqkv /*(B,T,3C)*/, char* scratch,
                                        const bf16* dout /*(B,T,C)*/, const bf16* qkv /*(B,T,3C)*/,
                                        const bf16* out /*(B,T,C)*/, const float* lse /*(B,NH,T)*/, int B, int T,
                                        int NH, const Fp8Codes& codes = {}) {
    constexpr int TOGETHER = 4 << 20;  // values of q of a group of heads: with dout and dq_sum 32 MiB of L2 cache
    const AttentionScratch sizes = attention_scratch(B, T, NH, Shape::HS);
    const int64_t C = (int64_t)NH * Shape::HS;
    HopperBackwardArguments a;
    a.dq_sum = (float*)(scratch + sizes.flags + sizes.rows);
    a.flags = (int*)(scratch + 256), a.ticket = (int*)scratch, a.rows = (float*)(scratch + sizes.flags);
    a.sums = a.dq_sum + sizes.dq_sum / 4;
    a.T = T, a.NH = NH, a.heads = B * NH, a.codes = codes, a.dqkv = dqkv;
    const int64_t group = TOGETHER / ((int64_t)T * Shape::HS);
    const int64_t groups = ceil_div(a.heads, group < 1 ? 1 : group);
    a.group = (int)ceil_div(a.heads, groups);  // groups of equal size, so that the last one is not too small
    a.key_tiles = (int)ceil_div(T, Shape::BN), a.query_tiles = (int)ceil_div(T, Shape::BM);
    // Along diagonals as many heads are in flight as a group has.
    a.shift = (int)((group + a.key_tiles / 2) / a.key_tiles);
    a.scale = 1.0f / sqrtf((float)Shape::HS);
    attention_rows<bf16, Shape::HS, Shape::BM>(dev, (float*)a.rows, (int*)scratch, sizes.flags / 4, dout, out, lse, B,
                                               T, NH);
    launch_kernel(dev, attention_hopper_backward_kernel<Shape>, (unsigned)dev->sm_count, Shape::THREADS, Shape::SHARED,
                  tensor_map(qkv, B, T, 3 * C, 64), tensor_map(dout, B, T, C, 64), tensor_map(dqkv, B, T, 3 * C, 16),
                  a);
    return a.sums;
}
