// The forward pass of causal attention (kernels/attention.cuh says what it computes) in bf16 on Hopper.
//
// A block stays on its multiprocessor and draws pieces of work, a head's tile of 64 * CONSUMERS queries, until there
// are none. One thread is the producer: it draws pieces, and loads q, one piece ahead, and tiles of BN keys and values
// by TMA into two rings of STAGES each. CONSUMERS warpgroups of 128 threads own 64 queries each and walk the keys from
// the diagonal back to the first, so that only the first tile needs a mask. Scores S = q k^T, probabilities P and the
// sums O stay in registers: wgmma leaves S in the layout in which P goes back in.
//
// A 64 x 128 tile of a head of 64 keeps the tensor cores busy for 512 cycles, and its 8192 exponentials keep the
// multiprocessor's 16 exponential units busy for 512 as well, so the speed is in doing both at once and little else:
//  - in a warpgroup: O += P V of one tile is in flight while it computes the exponentials of the next;
//  - between warpgroups: each works on its own tile, and they issue products in turn;
//  - at the end of a piece: the first scores of the next one are in flight while O is divided and stored;
//  - if only the first 64 keys of a first tile are not masked, only their exponentials are computed;
//  - a row subtracts the largest score of its first tile from all its scores, even if larger ones follow. P in
//    bf16 and the sums have the exponents of fp32, so only an overflow would matter. If the P of a thread's part of a
//    tile add up to KEEP_BELOW = 2^64, which is rare, the warp computes the tile's scores again and raises what it
//    subtracts. To search each tile for its largest score, and to rescale O, would be a third of all instructions.
//
// Pieces are counted back from the last query, so that the first piece, the shortest, is the one that is not full. T
// need not be a multiple of anything: TMA reads zeros and writes nothing outside a sequence, and keys past the end are
// masked. Registers: 65536 / (128 * (CONSUMERS + 1)) per thread at the start; the producer's warpgroup keeps 32 or 40
// and the consumers share the rest: BN / 2 of S, BN / 4 of P and HS / 2 of O, of 232 (two warpgroups) or 160 (three).
#pragma once

#include <math.h>

#include "attention_parts.cuh"
#include "hopper.cuh"

template <int HS_>
struct HopperForward {
    static constexpr int HS = HS_, CONSUMERS = HS == 64 ? 3 : 2, BN = 128, STAGES = HS == 64 ? 4 : 2;
    static constexpr int THREADS = (CONSUMERS + 1) * 128;
    static constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32, REGISTERS = CONSUMERS == 2 ? 232 : 160;
    static constexpr int Q_BYTES = 64 * HS * 2;  // of a warpgroup
    static constexpr int KV_BYTES = BN * HS * 2;
    static constexpr int O_BYTES = 16 * HS * 2;  // of a warp
    // Offsets into shared memory, from a multiple of 1024: two slots of q, the rings, each warp's way out.
    static constexpr int K = 2 * CONSUMERS * Q_BYTES, V = K + STAGES * KV_BYTES, O = V + STAGES * KV_BYTES;
    static constexpr int SHARED = O + CONSUMERS * 4 * O_BYTES + 1024;
    static_assert(SHARED <= 226 * 1024);
};

struct HopperForwardPiece {
    int head, batch;
    int last_block;  // the last block of 64 queries of the piece; -1: there is no more work
};

// Barriers of the 2 slots of q and of the stages of k and v: filled, emptied.
template <typename Shape>
struct HopperForwardShared {
    uint64_t q_full[2], q_empty[2];
    uint64_t k_full[Shape::STAGES], k_empty[Shape::STAGES];
    uint64_t v_full[Shape::STAGES], v_empty[Shape::STAGES];
    HopperForwardPiece piece[4];  // the latest ones, the first two in slots of q
};

struct HopperForwardArguments {
    float* lse;   // (B,NH,T)
    int* ticket;  // 0 between launches
    int B, T, NH;
    int group;         // of heads, see forward_work
    int tiles;         // of queries a head
    float scale_log2;  // log2(e) / sqrt(HS)
};

// A place in a ring of buffers, and the parity of its present use, in one register.
template <int SIZE>
struct RingPlace {
    uint32_t state = 0;
    __device__ __forceinline__ int slot() const { return (int)(state & 0xff); }
    __device__ __forceinline__ uint32_t parity() const { return state >> 31; }
    __device__ __forceinline__ void step() {
        state++;
        if ((state & 0xff) == SIZE) state = (state & 0x80000000u) ^ 0x80000000u;
    }
};

__device__ __forceinline__ HopperForwardPiece hopper_forward_piece(const HopperForwardArguments& a, int index,
                                                                   int consumers) {
    int bh, tile;
    forward_work(bh, tile, index, a.tiles, a.B * a.NH, a.group);
    return {bh % a.NH, bh / a.NH, (a.T + 63) / 64 - 1 - consumers * (a.tiles - 1 - tile)};
}

template <typename Shape>
__device__ __forceinline__ void hopper_forward_produce(HopperForwardShared<Shape>& shared, uint32_t memory,
                                                       const CUtensorMap* q_map, const CUtensorMap* kv_map,
                                                       const HopperForwardArguments& a) {
    constexpr int HS = Shape::HS, BN = Shape::BN, CONSUMERS = Shape::CONSUMERS;
    const int C = a.NH * HS, pieces = a.B * a.NH * a.tiles;
    RingPlace<Shape::STAGES> k, v;
    const auto load = [&](uint64_t* full, uint64_t* empty, RingPlace<Shape::STAGES>& place, int base, int column,
                          int row, int batch) {
        barrier_wait(shared_offset(&empty[place.slot()]), place.parity() ^ 1);
        const uint32_t barrier = shared_offset(&full[place.slot()]),
                       to = memory + base + place.slot() * Shape::KV_BYTES;
        barrier_expect(barrier, Shape::KV_BYTES);
        tile_load<BN, HS, BN>(to, kv_map, barrier, column, row, batch);
        place.step();
    };
    int index = blockIdx.x, drawn = 0;
    for (uint32_t n = 0;; n++) {
        barrier_wait(shared_offset(&shared.q_empty[n % 2]), (n / 2 & 1) ^ 1);
        const uint32_t full = shared_offset(&shared.q_full[n % 2]);
        if (index >= pieces) {
            shared.piece[n % 4].last_block = -1;
            if (drawn == pieces - 1) *a.ticket = 0;  // the last draw, since every block draws until there is nothing
            barrier_arrive(full);
            break;
        }
        drawn = atomicAdd(a.ticket, 1);
        const HopperForwardPiece piece = hopper_forward_piece(a, index, CONSUMERS);
        shared.piece[n % 4] = piece;
        const int column = piece.head * HS;
        barrier_expect(full, CONSUMERS * Shape::Q_BYTES);
#pragma unroll
        for (int i = 0; i < CONSUMERS; i++)
            tile_load<64, HS, 64>(memory + (n % 2 * CONSUMERS + i) * Shape::Q_BYTES, q_map, full, column,
                                  (piece.last_block + 1 - CONSUMERS + i) * 64, piece.batch);
        const int tiles = piece.last_block * 64 / BN + 1;
        for (int j = tiles - 1; j >= 0; j--) {
            load(shared.k_full, shared.k_empty, k, Shape::K, C + column, j * BN, piece.batch);
            if (j + 1 < tiles)
                load(shared.v_full, shared.v_empty, v, Shape::V, 2 * C + column, (j + 1) * BN, piece.batch);
        }
        load(shared.v_full, shared.v_empty, v, Shape::V, 2 * C + column, 0, piece.batch);
        index = gridDim.x + drawn;
    }
}

// Each thread's two rows: P = 2^(scale_log2 * S - reference), and the sum of the thread's P. Any reference gives the
// same quotient of sums.
struct HopperRows {
    float reference[2], sum[2];
};

constexpr float KEEP_BELOW = 18446744073709551616.0f;

// Raises the references to the largest of N * 8 scores of each row. The old sums must be multiplied by `factor`.
template <int N>
__device__ __forceinline__ void hopper_raise(const float (&s)[N][4], HopperRows& rows, float (&factor)[2],
                                             float scale_log2) {
    float top[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) top[i / 2][i % 2] = s[0][i];
#pragma unroll
    for (int n = 1; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) top[i / 2][i % 2] = fmaxf(top[i / 2][i % 2], s[n][i]);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float now = fmaxf(top[r][0], top[r][1]);
        now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
        now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
        now = fmaxf(now * scale_log2, rows.reference[r]);
        factor[r] = fast_exp2(rows.reference[r] - now);
        rows.reference[r] = now;
    }
}

// Turns scores into P, in place, and sums the thread's part of it.
template <int N>
__device__ __forceinline__ void hopper_exponentials(float (&s)[N][4], float (&total)[2], const HopperRows& rows,
                                                    float scale_log2) {
    float partial[2][2] = {};
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[n][i] = fast_exp2(fmaf(s[n][i], scale_log2, -rows.reference[i / 2]));
            partial[i / 2][i % 2] += s[n][i];
        }
#pragma unroll
    for (int r = 0; r < 2; r++) total[r] = partial[r][0] + partial[r][1];
}

// The first tile of a piece, which the diagonal crosses.
template <typename Shape>
__device__ __forceinline__ void hopper_first(uint32_t (&p)[Shape::BN / 16][4], float (&s)[Shape::BN / 8][4],
                                             HopperRows& rows, float scale_log2, int diagonal) {
    const int row = threadIdx.x % 128 / 32 * 16;  // the warp's first of the warpgroup's queries
    float factor[2];
    rows.reference[0] = rows.reference[1] = -INFINITY;
    float(&near)[8][4] = reinterpret_cast<float(&)[8][4]>(s[0]);
    float(&far)[8][4] = reinterpret_cast<float(&)[8][4]>(s[8]);
    if (diagonal <= 0) {
        mask_keys(near, 0, row);
        hopper_raise(near, rows, factor, scale_log2);
        hopper_exponentials(near, rows.sum, rows, scale_log2);
        pack_left(p, near);
#pragma unroll
        for (int i = 0; i < 16; i++) p[4 + i / 4][i % 4] = 0;
        return;
    }
    mask_keys(far, 0, row);
    hopper_raise(s, rows, factor, scale_log2);
    hopper_exponentials(s, rows.sum, rows, scale_log2);
    pack_left(p, s);
}

// A warp computes its 16 rows of S again, by mma.sync from the same shared memory.
template <typename Shape>
__device__ __forceinline__ void hopper_scores_again(float (&s)[Shape::BN / 8][4], uint32_t q, uint32_t k) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < Shape::BN / 2; i++) s[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int step = 0; step < Shape::HS / 16; step++) {
        uint32_t a[4], b[4];
        load_matrices(a, q + step / 4 * 64 * PANEL_ROW_BYTES + panel_offset(row, step % 4 * 2 + lane / 16));
#pragma unroll
        for (int n = 0; n < Shape::BN / 16; n++) {
            const int key = n * 16 + lane % 8 + lane / 16 * 8, chunk = step % 4 * 2 + lane / 8 % 2;
            load_matrices(b, k + step / 4 * Shape::BN * PANEL_ROW_BYTES + panel_offset(key, chunk));
            mma(s[2 * n], a, b[0], b[1]);
            mma(s[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// Starts s = q k^T, as a group of its own.
template <typename Shape>
__device__ __forceinline__ void hopper_scores(float (&s)[Shape::BN / 8][4], uint32_t q, uint32_t k) {
    const uint64_t left = uniform_operand(operand_k_major<64>(q, 0));
    const uint64_t right = uniform_operand(operand_k_major<Shape::BN>(k, 0));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Shape::HS / 16; step++)
        Wgmma<Shape::BN>::template shared<0, 0>(s, operand_step(left, k_major_step<64>(step)),
                                                operand_step(right, k_major_step<Shape::BN>(step)), step > 0);
    wgmma_commit();
}

// Divides and stores O and lse of a warpgroup's 64 queries of a piece, some of which may lie before the sequence. Each
// warp stores its 16 rows through its own shared memory. The store is in flight on return.
template <typename Shape>
__device__ __forceinline__ void hopper_store(const float (&o)[Shape::HS / 8][4], const HopperRows& rows,
                                             uint32_t memory, const CUtensorMap* out_map,
                                             const HopperForwardArguments& a, HopperForwardPiece piece, int warpgroup) {
    constexpr int HS = Shape::HS;
    const int lane = threadIdx.x % 32;
    const uint32_t own = memory + Shape::O + threadIdx.x / 32 * Shape::O_BYTES;
    const int row0 = (piece.last_block + 1 - Shape::CONSUMERS + warpgroup) * 64 + threadIdx.x % 128 / 32 * 16;
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = rows.sum[r] + __shfl_xor_sync(0xffffffffu, rows.sum[r], 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        inverse[r] = fast_reciprocal(sum);
        const int row = row0 + lane / 4 + r * 8;
        if (lane % 4 == 0 && row >= 0 && row < a.T)
            a.lse[((int64_t)piece.batch * a.NH + piece.head) * a.T + row] =
                (rows.reference[r] + fast_log2(sum)) * (1.0f / LOG2_OF_E);
    }
    if (lane == 0) store_wait_read<0>();  // the store of the last piece's O has read it
    __syncwarp();
#pragma unroll
    for (int k = 0; k < HS / 16; k++)
        store_matrices(own + k / 4 * 16 * PANEL_ROW_BYTES + panel_offset(lane % 16, k % 4 * 2 + lane / 16),
                       pack_bf16(o[2 * k][0] * inverse[0], o[2 * k][1] * inverse[0]),
                       pack_bf16(o[2 * k][2] * inverse[1], o[2 * k][3] * inverse[1]),
                       pack_bf16(o[2 * k + 1][0] * inverse[0], o[2 * k + 1][1] * inverse[0]),
                       pack_bf16(o[2 * k + 1][2] * inverse[1], o[2 * k + 1][3] * inverse[1]));
    fence_async();
    __syncwarp();
    if (lane == 0 && row0 >= 0) {
#pragma unroll
        for (int panel = 0; panel < HS / 64; panel++)
            tensor_store(out_map, own + panel * 16 * PANEL_ROW_BYTES, piece.head * HS + panel * 64, row0, piece.batch);
        store_commit();
    }
}

// Rescales O after its references were raised.
template <int N>
__device__ __forceinline__ void hopper_shrink(float (&o)[N][4], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < N * 4; i++) o[i / 4][i % 4] *= factor[i / 2 % 2];
}

// Returns 0 for sums of exponentials, but the compiler must compute them first to know.
__device__ __forceinline__ uint32_t zero_after(float x, float y) {
    return x < 0.0f || y < 0.0f;
}

// A warpgroup's way through a piece.
struct HopperForwardWalk {
    int first;     // the tile of keys that the diagonal crosses; -1: there is no piece
    int skipped;   // tiles after it that only other warpgroups need
    int diagonal;  // the first query's column in it
};

// A warpgroup's place in the rings.
template <typename Shape>
struct HopperConsumer {
    static constexpr int CONSUMERS = Shape::CONSUMERS;
    HopperForwardShared<Shape>& shared;
    uint32_t memory;
    int warpgroup;
    uint32_t n;  // pieces so far
    RingPlace<Shape::STAGES> k, v;

    __device__ __forceinline__ void release(uint32_t empty) {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty);
    }
    // Waits for the next tile of keys.
    __device__ __forceinline__ void keys_ready() { barrier_wait(shared_offset(&shared.k_full[k.slot()]), k.parity()); }
    __device__ __forceinline__ uint32_t keys() const { return memory + Shape::K + k.slot() * Shape::KV_BYTES; }
    __device__ __forceinline__ void keys_done() {
        release(shared_offset(&shared.k_empty[k.slot()]));
        k.step();
    }
    __device__ __forceinline__ void values_ready(uint32_t zero = 0) {
        barrier_wait(shared_offset(&shared.v_full[v.slot()]), v.parity() ^ zero);
    }
    __device__ __forceinline__ uint32_t values() const { return memory + Shape::V + v.slot() * Shape::KV_BYTES; }
    __device__ __forceinline__ void values_done() {
        release(shared_offset(&shared.v_empty[v.slot()]));
        v.step();
    }
    __device__ __forceinline__ uint32_t queries() const {
        return memory + (n % 2 * CONSUMERS + warpgroup) * Shape::Q_BYTES;
    }
    // Waits for the next piece's queries.
    __device__ __forceinline__ HopperForwardWalk open() {
        barrier_wait(shared_offset(&shared.q_full[n % 2]), n / 2 & 1);
        const int last_block = shared.piece[n % 4].last_block;
        if (last_block < 0) return {-1, 0, 0};
        const int row0 = (last_block + 1 - CONSUMERS + warpgroup) * 64, first = max(row0, 0) / Shape::BN;
        return {first, last_block * 64 / Shape::BN - first, row0 - first * Shape::BN};
    }
    // Between these two, one warpgroup after the other issues products, each as often as the others.
    __device__ __forceinline__ void turn() { group_sync(8 + warpgroup, 256); }
    __device__ __forceinline__ void turn_done() { group_arrive(8 + (warpgroup + 1) % CONSUMERS, 256); }
};

// Passes the tiles of keys that only other warpgroups need, and waits for the first one that this warpgroup needs.
template <typename Shape>
__device__ __forceinline__ void hopper_skip_keys(HopperConsumer<Shape>& c, int tiles) {
    for (int i = 0; i < tiles; i++) {
        c.keys_ready();
        c.keys_done();
        c.turn();
        c.turn_done();
    }
    c.keys_ready();
}

// Computes S and P again, since the references were too small.
template <typename Shape>
__device__ __forceinline__ void hopper_again(float (&s)[Shape::BN / 8][4], float (&o)[Shape::HS / 8][4],
                                             HopperRows& rows, uint32_t q, uint32_t k, float scale_log2) {
    float factor[2], total[2];
    hopper_scores_again<Shape>(s, q, k);
    hopper_raise(s, rows, factor, scale_log2);
    hopper_exponentials(s, total, rows, scale_log2);
    hopper_shrink(o, factor);
    rows.sum[0] = rows.sum[0] * factor[0] + total[0], rows.sum[1] = rows.sum[1] * factor[1] + total[1];
}

// Computes O += P V of one tile, and P of the next, which has no mask. On return the next tile's values have arrived.
template <typename Shape>
__device__ __forceinline__ void hopper_tile(HopperConsumer<Shape>& c, float (&s)[Shape::BN / 8][4],
                                            uint32_t (&p)[Shape::BN / 16][4], float (&o)[Shape::HS / 8][4],
                                            HopperRows& rows, float scale_log2) {
    float total[2];
    c.keys_ready();
    c.turn();
    hopper_scores<Shape>(s, c.queries(), c.keys());
    wgmma_columns(o, p, c.values(), true);
    c.turn_done();
    wgmma_wait<1>();
    wgmma_hold(s);
    hopper_exponentials(s, total, rows, scale_log2);
    const float sum[2] = {rows.sum[0] + total[0], rows.sum[1] + total[1]};
    const uint32_t empty = shared_offset(&c.shared.v_empty[c.v.slot()]);
    c.v.step();
    c.values_ready(zero_after(sum[0], sum[1]));  // otherwise the compiler moves the exponentials behind the wait for O
    wgmma_wait<0>();
    wgmma_hold(o);
    c.release(empty);
    const bool right = total[0] < KEEP_BELOW && total[1] < KEEP_BELOW;
    if (__any_sync(0xffffffffu, !right)) {
        hopper_again<Shape>(s, o, rows, c.queries(), c.keys(), scale_log2);
    } else {
        rows.sum[0] = sum[0], rows.sum[1] = sum[1];
    }
    c.keys_done();
    pack_left(p, s);
}

template <typename Shape>
__device__ __forceinline__ void hopper_forward_consume(HopperForwardShared<Shape>& shared, uint32_t memory,
                                                       int warpgroup, const CUtensorMap* out_map,
                                                       const HopperForwardArguments& a) {
    constexpr int HS = Shape::HS, BN = Shape::BN;
    HopperConsumer<Shape> c = {shared, memory, warpgroup, 0, {}, {}};
    float s[BN / 8][4], o[HS / 8][4];
    uint32_t p[BN / 16][4];
    HopperRows rows;
    if (warpgroup == Shape::CONSUMERS - 1) c.turn_done();  // the first begins
    HopperForwardWalk walk = c.open();
    hopper_skip_keys(c, walk.skipped);
    c.turn();
    hopper_scores<Shape>(s, c.queries(), c.keys());
    c.turn_done();
    for (;;) {
        wgmma_wait<0>();
        wgmma_hold(s);
        c.keys_done();
        hopper_first<Shape>(p, s, rows, a.scale_log2, walk.diagonal);
        for (; walk.skipped > 0; walk.skipped--) {
            c.values_ready();
            c.values_done();
        }
        c.values_ready();
#pragma unroll
        for (int i = 0; i < HS / 2; i++) o[i / 4][i % 4] = 0.0f;
        for (int left = walk.first; left > 0; left--) hopper_tile(c, s, p, o, rows, a.scale_log2);
        barrier_arrive(shared_offset(&shared.q_empty[c.n % 2]));  // each thread, since it has read `piece`
        c.n++;
        walk = c.open();
        if (walk.first < 0) break;
        hopper_skip_keys(c, walk.skipped);
        c.turn();
        wgmma_columns(o, p, c.values(), true);
        hopper_scores<Shape>(s, c.queries(), c.keys());
        c.turn_done();
        wgmma_wait<1>();
        wgmma_hold(o);
        c.values_done();
        hopper_store<Shape>(o, rows, memory, out_map, a, shared.piece[(c.n - 1) % 4], warpgroup);
    }
    wgmma_columns(o, p, c.values(), true);
    wgmma_wait<0>();
    wgmma_hold(o);
    hopper_store<Shape>(o, rows, memory, out_map, a, shared.piece[(c.n - 1) % 4], warpgroup);
    if (threadIdx.x % 32 == 0) store_wait<0>();
}

// grid at most a block for each multiprocessor, block THREADS, shared SHARED; HS 64 or 128, any T; deterministic:
// which block computes a piece does not change its bits.
template <typename Shape>
__global__ void __launch_bounds__(Shape::THREADS, 1)
    attention_hopper_forward_kernel(const __grid_constant__ CUtensorMap q_map,
                                    const __grid_constant__ CUtensorMap kv_map,
                                    const __grid_constant__ CUtensorMap out_map, const HopperForwardArguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ char dynamic[];
    __shared__ HopperForwardShared<Shape> shared;
    const uint32_t memory = (shared_offset(dynamic) + 1023) / 1024 * 1024;
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            barrier_init(shared_offset(&shared.q_full[i]), 1);
            barrier_init(shared_offset(&shared.q_empty[i]), Shape::CONSUMERS * 128);
        }
        for (int i = 0; i < Shape::STAGES; i++) {
            barrier_init(shared_offset(&shared.k_full[i]), 1), barrier_init(shared_offset(&shared.v_full[i]), 1);
            barrier_init(shared_offset(&shared.k_empty[i]), Shape::CONSUMERS * 4);
            barrier_init(shared_offset(&shared.v_empty[i]), Shape::CONSUMERS * 4);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (warpgroup == Shape::CONSUMERS) {
        registers_shrink<Shape::PRODUCER_REGISTERS>();
        if (threadIdx.x == Shape::CONSUMERS * 128) hopper_forward_produce<Shape>(shared, memory, &q_map, &kv_map, a);
    } else {
        registers_grow<Shape::REGISTERS>();
        hopper_forward_consume<Shape>(shared, memory, warpgroup, &out_map, a);
    }
#endif
}

// C = NH * HS.
template <typename Shape>
inline void attention_hopper_forward(const Device* dev, bf16* out /*(B,T,C)*/, float* lse /*(B,NH,T)*/,
                                     const bf16* qkv /*(B,T,3C)*/, int B, int T, int NH) {
    const int64_t C = (int64_t)NH * Shape::HS;
    HopperForwardArguments a = {lse, dev->ticket, B, T, NH, attention_group(T, Shape::HS, sizeof(bf16)), 0, 0.0f};
    a.tiles = (int)ceil_div(T, 64 * Shape::CONSUMERS);
    a.scale_log2 = LOG2_OF_E / sqrtf((float)Shape::HS);
    const int64_t pieces = (int64_t)B * NH * a.tiles;
    launch_kernel(dev, attention_hopper_forward_kernel<Shape>,
                  (unsigned)(pieces < dev->sm_count ? pieces : dev->sm_count), Shape::THREADS, Shape::SHARED,
                  tensor_map(qkv, B, T, 3 * C, 64), tensor_map(qkv, B, T, 3 * C, Shape::BN),
                  tensor_map(out, B, T, C, 16), a);
}
