// The forward pass of causal attention (kernels/attention.cuh says what it computes) in bf16 on Hopper.
//
// A block stays on its multiprocessor and draws pieces of work, a head's tile of 64 * CONSUMERS queries, until there
// are none. One thread is the producer: it draws, and has the copy engine bring q, two pieces ahead, and tiles of BN
// keys and values into two rings of STAGES each. CONSUMERS warpgroups of 128 threads own 64 queries each and walk the
// keys from the diagonal back to the first, so that the tile that needs a mask comes first and alone. Scores S = q k^T,
// probabilities P and the sums O stay in registers: wgmma leaves S in the layout in which P goes back in.
//
// A 64 x 128 tile of a head of 64 keeps the tensor cores busy for 512 cycles, and its 8192 exponentials keep the
// multiprocessor's 16 exponential units busy for 512 as well, so all the speed is in doing both at once:
//  - in a warpgroup: while it takes the exponentials of one tile, O += P V of the tile before is under way (OVERLAP);
//  - between warpgroups: each has its own tile under way; TURNS makes them issue products in turn;
//  - at the end of a piece: the first scores of the next one are under way while O is divided and stored.
// EMULATED of 8 exponentials are computed as a polynomial by the otherwise idle multiply-add units.
//
// Pieces lie back from the last query, so that a first tile, the shortest, is the one that is not full. T need not be a
// multiple of anything: the copy engine reads zeros and writes nothing outside a sequence, and whatever keys lie past
// the end, the mask hides from the queries that count.
// Registers: 65536 / (128 * (CONSUMERS + 1)) a thread at the start; the producer's warpgroup keeps 32 or 40 and the
// consumers share the rest: BN / 2 of S, BN / 4 of P and HS / 2 of O, of 232 (two warpgroups) or 160 (three).
#pragma once

#include <math.h>

#include "attention_parts.cuh"
#include "hopper.cuh"

enum HopperForwardOptions { OVERLAP = 1, TURNS = 2, LAZY = 4, HALF = 8, ROTATE = 16 };

template <int HS_, int CONSUMERS_, int BN_, int STAGES_, int OPTIONS_, int EMULATED_ = 0>
struct HopperForwardShape {
    static constexpr int HS = HS_, CONSUMERS = CONSUMERS_, BN = BN_, STAGES = STAGES_, EMULATED = EMULATED_;
    static constexpr int OPTIONS = OPTIONS_;
    static constexpr int THREADS = (CONSUMERS + 1) * 128;
    static constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
    static constexpr int REGISTERS = CONSUMERS == 2 ? 232 : CONSUMERS == 3 ? 160 : 112;
    static constexpr int Q_BYTES = 64 * HS * 2;  // of a warpgroup; O leaves through the same memory
    static constexpr int KV_BYTES = BN * HS * 2;
    // Offsets into shared memory, from a multiple of 1024.
    static constexpr int K = 2 * CONSUMERS * Q_BYTES, V = K + STAGES * KV_BYTES;
    static constexpr int SHARED = V + STAGES * KV_BYTES + 1024;
    static_assert(BN % 64 == 0 && CONSUMERS >= 2 && CONSUMERS <= 4 && (BN == 128 || !(OPTIONS & HALF)));
};

// What the trainer runs.
using HopperForward64 = HopperForwardShape<64, 3, 128, 4, OVERLAP | LAZY | HALF | ROTATE>;
using HopperForward128 = HopperForwardShape<128, 2, 128, 2, OVERLAP | LAZY | HALF | TURNS>;

struct HopperForwardPiece {
    int head, batch;
    int last_block;  // of 64 queries: the last one of the piece; -1: there is no more work
};

// Barriers of the 2 slots of q and of the stages of k and v: filled, emptied.
template <typename Shape>
struct HopperForwardShared {
    uint64_t q_full[2], q_empty[2];
    uint64_t k_full[Shape::STAGES], k_empty[Shape::STAGES];
    uint64_t v_full[Shape::STAGES], v_empty[Shape::STAGES];
    HopperForwardPiece piece[2];  // what the slots of q hold
};

struct HopperForwardArguments {
    float* lse;   // (B,NH,T)
    int* ticket;  // 0 between launches
    int B, T, NH;
    int group;  // of heads, see forward_work
    int tiles;  // of queries a head
    float scale;
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
    RingPlace<2> q;
    RingPlace<Shape::STAGES> k, v;
    const auto load = [&](uint64_t* full, uint64_t* empty, RingPlace<Shape::STAGES>& place, int base, int column,
                          int row, int batch) {
        barrier_wait(shared_offset(&empty[place.slot()]), place.parity() ^ 1, 100 + (base == Shape::V));
        const uint32_t barrier = shared_offset(&full[place.slot()]),
                       to = memory + base + place.slot() * Shape::KV_BYTES;
        barrier_expect(barrier, Shape::KV_BYTES);
#pragma unroll
        for (int panel = 0; panel < HS / 64; panel++)
            tensor_load(to + panel * BN * PANEL_ROW_BYTES, kv_map, barrier, column + panel * 64, row, batch);
        place.step();
    };
    for (int index = blockIdx.x, drawn = 0;;) {
        barrier_wait(shared_offset(&shared.q_empty[q.slot()]), q.parity() ^ 1, 102);
        const uint32_t full = shared_offset(&shared.q_full[q.slot()]);
        if (index >= pieces) {
            shared.piece[q.slot()].last_block = -1;
            if (drawn == pieces - 1) *a.ticket = 0;  // this was the last draw: a block draws until it gets nothing
            barrier_arrive(full);
            break;
        }
        const HopperForwardPiece piece = hopper_forward_piece(a, index, CONSUMERS);
        shared.piece[q.slot()] = piece;
        const int column = piece.head * HS;
        barrier_expect(full, CONSUMERS * Shape::Q_BYTES);
#pragma unroll
        for (int i = 0; i < CONSUMERS * HS / 64; i++)
            tensor_load(memory + q.slot() * CONSUMERS * Shape::Q_BYTES + i * 64 * PANEL_ROW_BYTES, q_map, full,
                        column + i % (HS / 64) * 64, (piece.last_block + 1 - CONSUMERS + i / (HS / 64)) * 64,
                        piece.batch);
        q.step();
        const int tiles = piece.last_block * 64 / BN + 1;
        for (int j = tiles - 1; j >= 0; j--) {
            if (j == 0) drawn = atomicAdd(a.ticket, 1);
            load(shared.k_full, shared.k_empty, k, Shape::K, C + column, j * BN, piece.batch);
            if (j + 1 < tiles)
                load(shared.v_full, shared.v_empty, v, Shape::V, 2 * C + column, (j + 1) * BN, piece.batch);
        }
        load(shared.v_full, shared.v_empty, v, Shape::V, 2 * C + column, 0, piece.batch);
        index = gridDim.x + drawn;
    }
}

// 2^x for x <= 0, relative error 3 * 2^-20: x is split into a whole number and the rest in [-0.5, 0.5].
__device__ __forceinline__ float exp2_polynomial(float x) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: added, it leaves the whole number in the low bits
    x = fmaxf(x, -126.0f);
    const float shifted = x + ROUND, rest = x - (shifted - ROUND);
    float y = fmaf(rest, 0.009582852944731712f, 0.055906426161527634f);
    y = fmaf(y, rest, 0.24024099111557007f);
    y = fmaf(y, rest, 0.6931241750717163f);
    y = fmaf(y, rest, 1.0f);
    return __int_as_float(__float_as_int(y) + (__float_as_int(shifted) << 23));
}

// Running softmax of a warpgroup's 64 x N scores: s becomes p, and O is to be multiplied by the factor, if any thread
// of the warp says so. LAZY: the value subtracted stays below the largest by up to 8 powers of two, until it does not,
// so that O rarely has to be touched.
template <bool LAZY_, int EMULATED, int N>
__device__ __forceinline__ bool hopper_softmax(float (&s)[N][4], float (&largest)[2], float (&sum)[2],
                                               float (&factor)[2], float scale_log2) {
    float top[2][2], partial[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) top[i / 2][i % 2] = s[0][i];
#pragma unroll
    for (int n = 1; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) top[i / 2][i % 2] = fmaxf(top[i / 2][i % 2], s[n][i]);
    bool changed = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float now = fmaxf(fmaxf(top[r][0], top[r][1]), largest[r]);
        now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
        now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
        if (LAZY_) now = (now - largest[r]) * scale_log2 > 8.0f ? now : largest[r];
        changed = changed || now != largest[r];
        factor[r] = exp2_approximate((largest[r] - now) * scale_log2);
        largest[r] = now;
        const float shift = now * scale_log2;
        partial[r][0] = sum[r] * factor[r], partial[r][1] = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float x = fmaf(s[n][2 * r + i], scale_log2, -shift);
                const bool emulated = (n * 2 + i) % 8 < EMULATED;
                const float p = emulated ? exp2_polynomial(x) : exp2_approximate(x);
                s[n][2 * r + i] = p;
                partial[r][i] += p;
            }
        sum[r] = partial[r][0] + partial[r][1];
    }
    return LAZY_ ? __any_sync(0xffffffffu, changed) : true;
}

// Hides the keys after each query: `diagonal` is the first query's column in the tile.
template <int N>
__device__ __forceinline__ void hopper_mask(float (&s)[N][4], int diagonal) {
    const int lane = threadIdx.x % 32, row = diagonal + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < N * 4; i++)
        if (i / 4 * 8 + lane % 4 * 2 + i % 2 > row + i / 2 % 2 * 8) s[i / 4][i % 4] = -INFINITY;
}

template <int N>
__device__ __forceinline__ void hopper_pack(uint32_t (&p)[N / 2][4], const float (&s)[N][4]) {
#pragma unroll
    for (int k = 0; k < N / 2; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[k][i] = pack_bf16(s[2 * k + i / 2][i % 2 * 2], s[2 * k + i / 2][i % 2 * 2 + 1]);
}

// The first tile of a piece, the one that the diagonal crosses. HALF: when only its first 64 keys are in sight, only
// their exponentials are taken.
template <typename Shape>
__device__ __forceinline__ void hopper_first(uint32_t (&p)[Shape::BN / 16][4], float (&s)[Shape::BN / 8][4],
                                             float (&largest)[2], float (&sum)[2], float scale_log2, int diagonal) {
    float factor[2];
    largest[0] = largest[1] = -INFINITY, sum[0] = sum[1] = 0.0f;
    if constexpr ((Shape::OPTIONS & HALF) != 0) {
        float(&near)[8][4] = reinterpret_cast<float(&)[8][4]>(s[0]),
        (&far)[8][4] = reinterpret_cast<float(&)[8][4]>(s[8]);
        uint32_t(&p_near)[4][4] = reinterpret_cast<uint32_t(&)[4][4]>(p[0]);
        if (diagonal <= 0) {
            hopper_mask(near, 0);
            hopper_softmax<false, 0>(near, largest, sum, factor, scale_log2);
            hopper_pack(p_near, near);
#pragma unroll
            for (int i = 0; i < 16; i++) p[4 + i / 4][i % 4] = 0;
            return;
        }
        hopper_mask(far, 0);
    } else {
        hopper_mask(s, diagonal);
    }
    hopper_softmax<false, 0>(s, largest, sum, factor, scale_log2);
    hopper_pack(p, s);
}

// s = q k^T and o += p v: issued and counted as one group each, to be waited for.
template <typename Shape>
__device__ __forceinline__ void hopper_scores(float (&s)[Shape::BN / 8][4], uint32_t q, uint32_t k) {
    const uint64_t left = uniform_operand(operand_k_major<64>(q, 0));
    const uint64_t right = uniform_operand(operand_k_major<Shape::BN>(k, 0));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Shape::HS / 16; step++)
        Wgmma<Shape::BN>::template shared<0, 0>(
            s, operand_step(left, step / 4 * 64 * PANEL_ROW_BYTES + step % 4 * 32),
            operand_step(right, step / 4 * Shape::BN * PANEL_ROW_BYTES + step % 4 * 32), step > 0);
    wgmma_commit();
}

template <typename Shape>
__device__ __forceinline__ void hopper_values(float (&o)[Shape::HS / 8][4], const uint32_t (&p)[Shape::BN / 16][4],
                                              uint32_t v) {
    const uint64_t right = uniform_operand(operand_mn_major<Shape::BN>(v, 0));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Shape::BN / 16; step++)
        Wgmma<Shape::HS>::template registers<1>(o, p[step], operand_step(right, step * 16 * PANEL_ROW_BYTES), 1);
    wgmma_commit();
}

// Divides and stores O and lse of a piece's 64 queries `part`, which may lie before the sequence. `own` is the q that
// is no longer needed. The store is under way on return.
template <typename Shape>
__device__ __forceinline__ void hopper_store(const float (&o)[Shape::HS / 8][4], const float (&largest)[2],
                                             float (&sum)[2], uint32_t own, const CUtensorMap* out_map,
                                             const HopperForwardArguments& a, HopperForwardPiece piece, int part,
                                             int warpgroup) {
    constexpr int HS = Shape::HS;
    const int row0 = (piece.last_block + 1 - Shape::CONSUMERS + part) * 64;
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, g = lane / 4;
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
        inverse[r] = __frcp_rn(sum[r]);
        const int row = row0 + warp * 16 + g + r * 8;
        if (lane % 4 == 0 && row >= 0 && row < a.T)
            a.lse[((int64_t)piece.batch * a.NH + piece.head) * a.T + row] = largest[r] * a.scale + logf(sum[r]);
    }
    group_sync(1 + warpgroup, 128);  // all four warps are done with q
    const int row = warp * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < HS / 16; k++)
        store_matrices(own + k / 4 * 64 * PANEL_ROW_BYTES + panel_offset(row, k % 4 * 2 + lane / 16),
                       pack_bf16(o[2 * k][0] * inverse[0], o[2 * k][1] * inverse[0]),
                       pack_bf16(o[2 * k][2] * inverse[1], o[2 * k][3] * inverse[1]),
                       pack_bf16(o[2 * k + 1][0] * inverse[0], o[2 * k + 1][1] * inverse[0]),
                       pack_bf16(o[2 * k + 1][2] * inverse[1], o[2 * k + 1][3] * inverse[1]));
    fence_async();
    group_sync(1 + warpgroup, 128);
    if (threadIdx.x % 128 == 0 && row0 >= 0) {
#pragma unroll
        for (int panel = 0; panel < HS / 64; panel++)
            tensor_store(out_map, own + panel * 64 * PANEL_ROW_BYTES, piece.head * HS + panel * 64, row0, piece.batch);
        store_commit();
    }
}

// 0, for sums of exponentials; but the compiler must have computed them to know.
__device__ __forceinline__ uint32_t zero_after(float x, float y) {
    return x < 0.0f || y < 0.0f;
}

// A warpgroup's way through a piece.
struct HopperForwardWalk {
    int first;     // the tile of keys that the diagonal crosses; -1: there is no piece
    int skipped;   // tiles after it, that only other warpgroups need
    int diagonal;  // the first query's column in it
};

// What a warpgroup keeps of the rings.
template <typename Shape>
struct HopperConsumer {
    static constexpr int CONSUMERS = Shape::CONSUMERS;
    HopperForwardShared<Shape>& shared;
    uint32_t memory;
    int warpgroup;
    int part;  // which 64 queries of the piece are its own
    RingPlace<2> q;
    RingPlace<Shape::STAGES> k, v;

    __device__ __forceinline__ void release(uint64_t* empty) {
        if (threadIdx.x % 32 == 0) barrier_arrive(shared_offset(empty));
    }
    // The next tile of keys, once it is there.
    __device__ __forceinline__ uint32_t keys_ready() {
        barrier_wait(shared_offset(&shared.k_full[k.slot()]), k.parity(), 200 + warpgroup);
        return memory + Shape::K + k.slot() * Shape::KV_BYTES;
    }
    __device__ __forceinline__ void keys_done() {
        release(&shared.k_empty[k.slot()]);
        k.step();
    }
    __device__ __forceinline__ void values_ready(uint32_t zero = 0) {
        barrier_wait(shared_offset(&shared.v_full[v.slot()]), v.parity() ^ zero, 300 + warpgroup);
    }
    __device__ __forceinline__ uint32_t values() const { return memory + Shape::V + v.slot() * Shape::KV_BYTES; }
    __device__ __forceinline__ void values_done() {
        release(&shared.v_empty[v.slot()]);
        v.step();
    }
    __device__ __forceinline__ uint32_t queries() const {
        return memory + (q.slot() * CONSUMERS + part) * Shape::Q_BYTES;
    }
    // The next piece, once its queries are there.
    __device__ __forceinline__ HopperForwardWalk open() {
        barrier_wait(shared_offset(&shared.q_full[q.slot()]), q.parity(), 400 + warpgroup);
        const int last_block = shared.piece[q.slot()].last_block;
        if (last_block < 0) return {-1, 0, 0};
        const int row0 = (last_block + 1 - CONSUMERS + part) * 64, first = max(row0, 0) / Shape::BN;
        return {first, last_block * 64 / Shape::BN - first, row0 - first * Shape::BN};
    }
    // Products are issued between these two, by one warpgroup after the other, as often by each.
    __device__ __forceinline__ void turn() {
        if constexpr ((Shape::OPTIONS & TURNS) != 0) group_sync(8 + warpgroup, 256);
    }
    __device__ __forceinline__ void turn_done() {
        if constexpr ((Shape::OPTIONS & TURNS) != 0) group_arrive(8 + (warpgroup + 1) % CONSUMERS, 256);
    }
};

// The tiles of keys of a piece that only other warpgroups need; on return the first of its own is there.
template <typename Shape>
__device__ __forceinline__ uint32_t hopper_skip_keys(HopperConsumer<Shape>& c, int tiles) {
    for (int i = 0; i < tiles; i++) {
        c.keys_ready();
        c.keys_done();
        c.turn();
        c.turn_done();
    }
    return c.keys_ready();
}

template <typename Shape>
__device__ __forceinline__ void hopper_forward_consume(HopperForwardShared<Shape>& shared, uint32_t memory,
                                                       int warpgroup, const CUtensorMap* out_map,
                                                       const HopperForwardArguments& a) {
    constexpr int HS = Shape::HS, BN = Shape::BN, CONSUMERS = Shape::CONSUMERS;
    HopperConsumer<Shape> c = {shared, memory, warpgroup, warpgroup, {}, {}, {}};
    const float scale_log2 = a.scale * LOG2_E;
    float s[BN / 8][4], o[HS / 8][4], largest[2], sum[2], factor[2];
    uint32_t p[BN / 16][4];
    if ((Shape::OPTIONS & TURNS) && warpgroup == CONSUMERS - 1) c.turn_done();  // the first begins
    HopperForwardWalk walk = c.open();
    uint32_t keys = hopper_skip_keys(c, walk.skipped);
    c.turn();
    hopper_scores<Shape>(s, c.queries(), keys);
    c.turn_done();
    for (bool begun = false;; begun = true) {
        wgmma_wait<0>();
        wgmma_hold(s);
        c.keys_done();
        hopper_first<Shape>(p, s, largest, sum, scale_log2, walk.diagonal);
        if (begun && threadIdx.x % 128 == 0) {  // the last piece's O has left its memory by now
            store_wait_read<0>();
            barrier_arrive(shared_offset(&shared.q_empty[c.q.slot() ^ 1]));
        }
        for (; walk.skipped > 0; walk.skipped--) {
            c.values_ready();
            c.values_done();
        }
        c.values_ready();
#pragma unroll
        for (int i = 0; i < HS / 2; i++) o[i / 4][i % 4] = 0.0f;
        for (int left = walk.first; left > 0; left--) {
            keys = c.keys_ready();
            c.turn();
            hopper_scores<Shape>(s, c.queries(), keys);
            hopper_values<Shape>(o, p, c.values());
            c.turn_done();
            wgmma_wait<Shape::OPTIONS & OVERLAP ? 1 : 0>();
            wgmma_hold(s);
            c.keys_done();
            const bool changed =
                hopper_softmax<(Shape::OPTIONS & LAZY) != 0, Shape::EMULATED>(s, largest, sum, factor, scale_log2);
            uint64_t* empty = &shared.v_empty[c.v.slot()];
            c.v.step();
            c.values_ready(zero_after(sum[0], sum[1]));  // or the exponentials are put behind the wait for O
            wgmma_wait<0>();
            wgmma_hold(o);
            c.release(empty);
            if (changed) {
#pragma unroll
                for (int i = 0; i < HS / 2; i++) o[i / 4][i % 4] *= factor[i / 2 % 2];
            }
            hopper_pack(p, s);
        }
        const uint32_t done = c.queries();
        const int done_slot = c.q.slot(), done_part = c.part;
        c.q.step();
        if constexpr ((Shape::OPTIONS & ROTATE) != 0) c.part = c.part + 1 < CONSUMERS ? c.part + 1 : 0;
        walk = c.open();
        if (walk.first < 0) break;
        keys = hopper_skip_keys(c, walk.skipped);
        c.turn();
        hopper_values<Shape>(o, p, c.values());
        hopper_scores<Shape>(s, c.queries(), keys);
        c.turn_done();
        wgmma_wait<1>();
        wgmma_hold(o);
        c.values_done();
        hopper_store<Shape>(o, largest, sum, done, out_map, a, shared.piece[done_slot], done_part, warpgroup);
    }
    hopper_values<Shape>(o, p, c.values());
    wgmma_wait<0>();
    wgmma_hold(o);
    const int last = c.q.slot() ^ 1;
    c.part = (Shape::OPTIONS & ROTATE) == 0 ? c.part : c.part > 0 ? c.part - 1 : CONSUMERS - 1;
    hopper_store<Shape>(o, largest, sum, memory + (last * CONSUMERS + c.part) * Shape::Q_BYTES, out_map, a,
                        shared.piece[last], c.part, warpgroup);
    if (threadIdx.x % 128 == 0) store_wait<0>();
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
            barrier_init(shared_offset(&shared.q_empty[i]), Shape::CONSUMERS);
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

// Whether the code was built for sm_90a: without it the kernels are empty and have no shared memory.
template <typename Kernel>
inline bool hopper_kernel_is_built(Kernel* kernel) {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, kernel));
    return attributes.sharedSizeBytes > 0;
}

// C = NH * HS.
template <typename Shape>
inline void attention_hopper_forward(const Device* dev, bf16* out /*(B,T,C)*/, float* lse /*(B,NH,T)*/,
                                     const bf16* qkv /*(B,T,3C)*/, int B, int T, int NH) {
    const int64_t C = (int64_t)NH * Shape::HS;
    HopperForwardArguments a = {lse, dev->ticket, B, T, NH, attention_group(T, Shape::HS, sizeof(bf16)), 0, 0.0f};
    a.tiles = (int)ceil_div(T, 64 * Shape::CONSUMERS);
    a.scale = 1.0f / sqrtf((float)Shape::HS);
    const int64_t pieces = (int64_t)B * NH * a.tiles;
    attention_set_shared(attention_hopper_forward_kernel<Shape>, Shape::SHARED);
    attention_hopper_forward_kernel<Shape>
        <<<(unsigned)(pieces < dev->sm_count ? pieces : dev->sm_count), Shape::THREADS, Shape::SHARED, dev->stream>>>(
            tensor_map(qkv, B, T, 3 * C, 64), tensor_map(qkv, B, T, 3 * C, Shape::BN), tensor_map(out, B, T, C, 64), a);
    check_launch();
}
