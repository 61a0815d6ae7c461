// Attention's backward pass on Hopper for heads of 128, with four warpgroups (attention_hopper_backward.cuh explains
// the method and has the kernel).
//
// Tiles are 64 queries x 128 keys. dk and dv of 64 keys take 128 registers per thread. Two groups that also held dq, s,
// dp, p and ds would fill their registers and wait for each product, and for dq's turn in between. Instead
//  - two groups compute dk and dv. s and dp take turns in 32 registers: p, rounded, replaces s; dv needs it and ds is
//    made from it. dv begins while ds is made, then dk, then the next s; the other groups' products fill the gaps. 208
//    registers.
//  - one computes dq, 64 queries x 64 columns at a time, and adds it. So waiting for dq's turn does not delay the other
//    groups' next tile, unless this group is two tiles behind. 72 registers.
//  - one loads and keeps the order, as with heads of 64. 24 registers.
// That is 512 registers per lane, all there are.
//
// At the first queries of a tile of keys, the later 64 keys are masked, so their group goes on to its next tile. The
// groups exchange the halves of the keys from one tile of keys to the next, so that both save this work: 4 of 72 tiles
// of a head at T 1024.
#pragma once

#include "attention_hopper_backward_parts.cuh"

// True if the second half of the keys is later than all queries of a tile.
template <typename Shape>
__device__ __forceinline__ bool hopper_backward_half(const HopperBackwardTile& tile) {
    return tile.query_tile * Shape::BM == tile.key_tile * Shape::BN;
}

// Returns the half of the keys that a group has in the block's tile of keys number `sequence`.
__device__ __forceinline__ int hopper_backward_part(int group, int sequence) {
    return group ^ (sequence & 1);
}

// dq = or += ds k, for half its columns. Each branch has a whole product, since the compiler makes products that are in
// flight across a branch wait for each other.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_wide_dq(float (&dq)[Shape::DQ_COLUMNS / 8][4], uint32_t ds_tile,
                                                        uint32_t k_tile, const HopperBackwardTile& tile, int part,
                                                        bool add) {
    if (hopper_backward_half<Shape>(tile)) {
        wgmma_fence();
        hopper_backward_dq<Shape, Shape::BN / 2>(dq, ds_tile, k_tile, part, add);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(dq);
    } else {
        wgmma_fence();
        hopper_backward_dq<Shape>(dq, ds_tile, k_tile, part, add);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(dq);
    }
}

// The group that computes dq. The last tile of keys that adds to a tile of queries starts from the sum of the others,
// so it waits for its turn before its product.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_wide_queries(HopperBackwardShared<Shape>& shared, uint32_t memory,
                                                             const HopperBackwardArguments& a) {
    EpilogueStaging out = {nullptr, 0, 0, Shape::CODES ? *a.codes.scale : 1.0f, {}};
    HopperBackwardTile tile;
    int count = 0;  // of tiles
    for (int n = 0; hopper_backward_take<Shape>(tile, shared, a, n); n++) {
        const int step = -1, end = hopper_backward_last<Shape>(a, tile.key_tile) + step;
        for (; tile.query_tile != end; tile.query_tile += step, count++) {
            const uint32_t ds_tile = memory + Shape::DS + count % 2 * Shape::DS_BYTES;
            const uint32_t k_tile = memory + n % 2 * Shape::KEY_BYTES;
            const bool final = hopper_backward_final<Shape>(tile.key_tile, tile.query_tile);
            const bool add = final && hopper_backward_before<Shape>(tile.key_tile, tile.query_tile) > 0;
            hopper_backward_uneven<Shape>(tile);
            if (add) group_sync(GO_BARRIER, ORDER_THREADS);
#pragma unroll
            for (int part = 0; part < 2; part++) {
                float dq[Shape::DQ_COLUMNS / 8][4];
                if (add) hopper_backward_dq_before<Shape>(dq, a, tile, part);
                if (part == 0) barrier_wait(shared_offset(&shared.ds_full[count % 2]), count / 2 % 2, 13);
                hopper_backward_wide_dq<Shape>(dq, ds_tile, k_tile, tile, part, add);
                if (part == 1) {
                    warp_arrive(&shared.ds_empty[count % 2]);
                    if (tile.query_tile + step == end) barrier_arrive(shared_offset(&shared.key_empty[n % 2]));
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

// Rounds s, which holds p, to a left operand.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_wide_round(uint32_t (&p)[Shape::BM / 16][4],
                                                           const float (&s)[Shape::BM / 8][4]) {
#pragma unroll
    for (int n = 0; n < Shape::BM / 8; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) p[n / 2][n % 2 * 2 + r] = pack_bf16(s[n][r * 2], s[n][r * 2 + 1]);
}

// ds = p (dp - D), from the rounded p. The product for dv, in flight, reads p too, so p must stay until dv is done.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_wide_ds(uint32_t (&ds)[Shape::BM / 16][4],
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
__device__ __forceinline__ void hopper_backward_wide_pass(HopperBackwardShared<Shape>& shared,
                                                          const HopperBackwardArguments& a,
                                                          const HopperBackwardTile& tile, int count) {
    barrier_wait(shared_offset(&shared.full[count % 2]), count / 2 % 2, 17);
    barrier_arrive(shared_offset(&shared.empty[count % 2]));
    barrier_wait(shared_offset(&shared.ds_empty[count % 2]), count / 2 % 2 ^ 1, 18);
    warp_arrive(&shared.ds_full[count % 2]);
    if (tile.query_tile != hopper_backward_last<Shape>(a, tile.key_tile)) return;
    warp_arrive(&shared.v_empty[0]);
    barrier_arrive(shared_offset(&shared.key_empty[tile.sequence % 2]));
}

// Moves on to a group's next tile: the block's next one or, if its keys are masked, the one after it. False when there
// is none.
template <typename Shape>
__device__ __forceinline__ bool hopper_backward_wide_advance(HopperBackwardTile& tile, int& count,
                                                             HopperBackwardShared<Shape>& shared,
                                                             const HopperBackwardArguments& a, int group) {
    for (;;) {
        if (tile.query_tile == hopper_backward_last<Shape>(a, tile.key_tile)) {
            if (!hopper_backward_take<Shape>(tile, shared, a, tile.sequence + 1)) return false;
        } else {
            tile.query_tile--;
        }
        count++;
        if (hopper_backward_part(group, tile.sequence) == 0 || !hopper_backward_half<Shape>(tile)) return true;
        hopper_backward_wide_pass<Shape>(shared, a, tile, count);
    }
}

// Starts the scores of a tile.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_wide_scores(float (&s)[Shape::BM / 8][4], uint32_t memory,
                                                            const HopperBackwardTile& tile, int count, int group) {
    const int part = hopper_backward_part(group, tile.sequence);
    hopper_backward_scores_start<Shape>(s, memory + tile.sequence % 2 * Shape::KEY_BYTES + part * 64 * PANEL_ROW_BYTES,
                                        memory + Shape::RING + count % 2 * 2 * Shape::QUERY_BYTES);
}

// Starts dk or dv = or += a tile, from registers.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_sum_start(float (&c)[Shape::HS / 8][4],
                                                          const uint32_t (&a)[Shape::BM / 16][4], uint32_t tile,
                                                          bool add) {
    wgmma_fence();
    hopper_backward_sum<Shape>(c, a, tile, add);
    wgmma_commit();
}

// One of the two groups that compute dk and dv. The scores of the next tile overlap with the stores of dk and dv of a
// finished tile of keys. After the last tile there is one more round, whose scores are not used: the compiler makes
// products wait for each other if a loop can be left while some are in flight.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_wide_keys(HopperBackwardShared<Shape>& shared, uint32_t memory,
                                                          const CUtensorMap* dqkv, const HopperBackwardArguments& a,
                                                          int group) {
    constexpr int BM = Shape::BM, HS = Shape::HS;
    EpilogueStaging out = epilogue_staging<Shape>(dqkv, memory, a);
    HopperBackwardTile tile, before;
    if (!hopper_backward_take<Shape>(tile, shared, a, 0)) return;
    int count = 0;  // of tiles
    if (hopper_backward_part(group, 0) == 1 && hopper_backward_half<Shape>(tile)) {
        hopper_backward_wide_pass<Shape>(shared, a, tile, count);
        if (!hopper_backward_wide_advance<Shape>(tile, count, shared, a, group)) return;
    }
    float s[BM / 8][4], dk[HS / 8][4] = {}, dv[HS / 8][4] = {};
    wgmma_hold(dk);
    wgmma_hold(dv);
    barrier_wait(shared_offset(&shared.full[count % 2]), count / 2 % 2, 10);
    hopper_backward_wide_scores<Shape>(s, memory, tile, count, group);
    for (bool more = true;;) {
        const int stage = count % 2, part = hopper_backward_part(group, tile.sequence);
        const uint32_t q_tile = memory + Shape::RING + stage * 2 * Shape::QUERY_BYTES;
        // The second half's walk is a tile shorter at the diagonal's end.
        const bool first = tile.query_tile == hopper_backward_first<Shape>(a, tile.key_tile);
        const bool last = tile.query_tile == hopper_backward_last<Shape>(a, tile.key_tile) + part;
        wgmma_wait<0>();
        wgmma_hold(s);
        if (!more) break;
        hopper_backward_exp<Shape>(s, shared.rows[stage][0], tile, a.scale * LOG2_OF_E, part);
        uint32_t p[BM / 16][4], ds[BM / 16][4];
        hopper_backward_wide_round<Shape>(p, s);
        if (first) barrier_wait(shared_offset(&shared.v_full[0]), tile.sequence % 2, 11);
        float dp[BM / 8][4];
        hopper_backward_scores_start<Shape>(dp, memory + Shape::V + part * 64 * PANEL_ROW_BYTES,
                                            q_tile + Shape::QUERY_BYTES);
        hopper_backward_sum_start<Shape>(dv, p, q_tile + Shape::QUERY_BYTES, !first);
        wgmma_wait<1>();
        wgmma_hold(dp);
        if (last && part == 0) {
            warp_arrive(&shared.v_empty[0]);
            barrier_arrive(shared_offset(&shared.key_empty[tile.sequence % 2]));
        }
        hopper_backward_wide_ds<Shape>(ds, p, dp, shared.rows[stage][1]);
        hopper_backward_sum_start<Shape>(dk, ds, q_tile, !first);
        hopper_backward_share<Shape>(shared, memory, ds, count, part);
        before = tile;
        if (!last) {
            tile.query_tile--, count++;
            barrier_wait(shared_offset(&shared.full[count % 2]), count / 2 % 2, 14);
        }
        wgmma_wait<0>();
        wgmma_hold(dv);
        wgmma_hold(dk);
        barrier_arrive(shared_offset(&shared.empty[stage]));
        if (last) {
            more = hopper_backward_wide_advance<Shape>(tile, count, shared, a, group);
            if (more) barrier_wait(shared_offset(&shared.full[count % 2]), count / 2 % 2, 14);
        }
        hopper_backward_wide_scores<Shape>(s, memory, tile, count, group);
        if (last) hopper_backward_keys_out<Shape>(dk, dv, out, a, before, part);
    }
    if (Shape::CODES) publish_warp_amax(a.codes, out.stats);
    if (threadIdx.x % 32 == 0) store_wait<0>();
}
