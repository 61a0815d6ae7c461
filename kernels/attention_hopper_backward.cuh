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
// A block stays on its multiprocessor and draws tiles of keys until there are none. For heads of 64 it has three
// warpgroups (for heads of 128 four, see attention_hopper_backward_wide.cuh):
//  - two compute. Each owns 64 of the 128 keys and takes the scores transposed: s^T = k q^T and dp^T = v dout^T come
//    out of wgmma in the layout in which p^T and ds^T go back in, from registers, for dv += p^T dout and dk += ds^T q.
//    ds goes through shared memory, for dq = ds k, of which each group computes 64 queries. That product is made a tile
//    late, when the other group has long written its half of ds, so that the groups need not run in lockstep: while one
//    computes exponentials, the other's products keep the tensor cores busy.
//  - one loads (one thread: k and v of two tiles of keys, q and dout of two tiles of queries, by TMA) and
//    keeps the order of dq (a warp for each computing group, see hopper_backward_order).
// Flags keep the order of dq, which makes it deterministic: of the tiles of keys that a tile of queries sees, the first
// in the order stores its share, the others add theirs when the flag says that it is their turn, and the last one reads
// the sum and writes the bf16 result, so there is no pass that clears or converts. Tiles of keys are drawn by ticket,
// so that a block waits only for blocks with earlier tickets, and the wait ends (hopper_backward_work). q, dout and the
// sums of all heads in flight fit in the L2 cache together. Two directions are possible, see HopperBackward.
//
// The bias of the linear layer below needs the column sums of dqkv. A warp sums its 16 rows in registers when it stores
// them, and writes 64 floats beside 16 x 64 results; a separate kernel would read all of dqkv again.
//
// Registers, of 240 per thread: s and dp 64 each (p and ds replace them in bf16), dk and dv 32 each, dq 32 in dp's
// place.
#pragma once

#include "attention_hopper_backward_parts.cuh"
#include "attention_hopper_backward_wide.cuh"

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

// Ends a tile's dq: frees its ds and, after the last tile, its k, and adds dq to the sum when it is its turn, or writes
// the result.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_dq_done(float (&dq)[Shape::DQ_COLUMNS / 8][4],
                                                        HopperBackwardShared<Shape>& shared, int buffer,
                                                        EpilogueStaging& out, const HopperBackwardArguments& a,
                                                        const HopperBackwardTile& tile, int group) {
    warp_arrive(&shared.ds_empty[buffer]);
    if (tile.query_tile == hopper_backward_last<Shape>(a, tile.key_tile))
        barrier_arrive(shared_offset(&shared.key_empty[tile.sequence % 2]));
    hopper_backward_uneven<Shape>(tile);
    group_sync(GO_BARRIER + group, ORDER_THREADS);
    if (!hopper_backward_final<Shape>(tile.key_tile, tile.query_tile)) {
        hopper_backward_dq_add<Shape>(dq, a, tile, group);
    } else {
        float sum[Shape::DQ_COLUMNS / 8][4] = {};
        if (hopper_backward_before<Shape>(tile.key_tile, tile.query_tile) > 0)
            hopper_backward_dq_before<Shape>(sum, a, tile, group);
#pragma unroll
        for (int i = 0; i < Shape::DQ_COLUMNS / 2; i++) dq[i / 4][i % 4] += sum[i / 4][i % 4];
        hopper_backward_dq_write<Shape>(dq, out, a, tile, group);
    }
    group_arrive(DONE_BARRIER + group, ORDER_THREADS);
}

// One of the two groups that compute. A tile's products overlap with the end of the last tile's dq; the next tile's
// scores overlap with the stores of dk and dv of a finished tile of keys. After the last tile there is one more round,
// whose scores are not used: the compiler makes products wait for each other if a loop can be left while some are in
// flight. For the same reason the first round computes a dq that is not used.
template <typename Shape>
__device__ __forceinline__ void hopper_backward_consume(HopperBackwardShared<Shape>& shared, uint32_t memory,
                                                        const CUtensorMap* dqkv, const HopperBackwardArguments& a,
                                                        int group) {
    constexpr int BM = Shape::BM, HS = Shape::HS;
    EpilogueStaging out = epilogue_staging<Shape>(dqkv, memory, a);
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
        hopper_backward_exp<Shape>(s, shared.rows[stage][0], tile, a.scale * LOG2_OF_E, group);
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

        before = tile, tile.query_tile++;
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
    if (Shape::CODES) publish_warp_amax(a.codes, out.stats);
    if (threadIdx.x % 32 == 0) store_wait<0>();
}

template <typename Shape>
__device__ __forceinline__ void hopper_backward_barriers(HopperBackwardShared<Shape>& shared) {
    for (int i = 0; i < 2; i++) {
        barrier_init(shared_offset(&shared.key_full[i]), 1);
        // It counts the threads that compute and those that keep the order.
        barrier_init(shared_offset(&shared.key_empty[i]), Shape::WIDE ? 256 + 128 + 32 : 256 + 64);
        barrier_init(shared_offset(&shared.ds_full[i]), 8);
        barrier_init(shared_offset(&shared.ds_empty[i]), Shape::WIDE ? 4 : 8);
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
    const int warp = threadIdx.x / 32 % 4, fetches = Shape::THREADS / 128 - 1;
    if (group == fetches) {
        registers_shrink<24>();
        if (threadIdx.x % 128 == 0) hopper_backward_produce<Shape>(shared, memory, a, &qkv, &dout);
        if (warp == 1 || (warp == 2 && !Shape::WIDE)) hopper_backward_order<Shape>(shared, a, warp - 1);
    } else if constexpr (!Shape::WIDE) {
        registers_grow<240>();
        hopper_backward_consume<Shape>(shared, memory, &dqkv, a, group);
    } else if (group == 2) {
        registers_shrink<72>();
        hopper_backward_wide_queries<Shape>(shared, memory, a);
    } else {
        registers_grow<208>();
        hopper_backward_wide_keys<Shape>(shared, memory, &dqkv, a, group);
    }
#endif
}

// Writes rows (B*NH, ceil(T/BM), {lse * log2(e), D = dout . out}, BM), infinity and 0 past T, and zeros the flags.
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
    const AttentionScratch sizes = attention_scratch(B, T, NH, Shape::HS);
    const int64_t warps = B * ceil_div(T, Shape::BM) * (Shape::BM / 32) * NH;
    attention_hopper_rows_kernel<Shape::HS, Shape::BM><<<(unsigned)ceil_div(warps, 8), 256, 0, dev->stream>>>(
        (float*)(scratch + sizes.flags), (int*)scratch, sizes.flags / 4, dout, out, lse, B, T, NH);
    check_launch();
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
    // Along diagonals as many heads are in flight as a group has. Heads of 64 keep to groups: they walk up, so that the
    // longest walks of a diagonal would come last.
    a.shift = Shape::WIDE ? (int)(group / ceil_div(T, Shape::BN)) : 0;
    a.key_tiles = (int)ceil_div(T, Shape::BN), a.query_tiles = (int)ceil_div(T, Shape::BM);
    a.scale = 1.0f / sqrtf((float)Shape::HS);
    attention_hopper_rows<Shape>(dev, scratch, dout, out, lse, B, T, NH);
    attention_set_shared(attention_hopper_backward_kernel<Shape>, Shape::SHARED);
    attention_hopper_backward_kernel<Shape><<<(unsigned)dev->sm_count, Shape::THREADS, Shape::SHARED, dev->stream>>>(
        tensor_map(qkv, B, T, 3 * C, 64), tensor_map(dout, B, T, C, 64), tensor_map(dqkv, B, T, 3 * C, 16), a);
    check_launch();
    return a.sums;
}
