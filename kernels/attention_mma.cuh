// Causal attention in bf16 by mma.sync m16n8k16 with fp32 sums, for GPUs from sm_80 on that are not Hopper's
// (kernels/attention.cuh says what it computes). Tiles come by cp.async into XOR-swizzled shared memory. Forward: a
// block owns a tile of queries and walks the keys up to the diagonal. Backward: a block owns a tile of keys and walks
// the queries from the diagonal down; scores are computed transposed (keys x queries), so that p^T and ds^T come out of
// the tensor cores in the very layout in which they go back in for dv and dk, and only ds goes through shared memory,
// for dq (see backward_block).
#pragma once
#include "attention_parts.cuh"
#include "mma.cuh"

__device__ inline void copy_4_async(uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

__device__ inline int4 load_shared(uint32_t from) {
    int4 value;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(from)
                 : "memory");
    return value;
}

// Tiles of bf16 in shared memory: rows of COLS elements in chunks of 16 bytes, the chunk's index XORed with the row so
// that 8 consecutive rows of one chunk (an ldmatrix) lie in 8 different groups of banks. COLS is 32, 64 or 128.

// Byte offset of a chunk.
template <int COLS>
__device__ inline uint32_t tile_offset(int row, int chunk) {
    int twist = COLS == 32 ? (row >> 1) & 3 : row & 7;
    return (uint32_t)(row * COLS * 2 + (chunk ^ twist) * 16);
}

// Starts the copy of rows first_row .. first_row + ROWS - 1, zeros from row `rows` on.
template <int ROWS, int COLS, int THREADS>
__device__ inline void tile_copy(uint32_t tile, const bf16* source /*(rows,COLS)*/, int64_t stride, int first_row,
                                 int rows) {
    constexpr int CHUNKS = COLS / 8, STEP = THREADS / CHUNKS;
    static_assert(THREADS % CHUNKS == 0 && ROWS % STEP == 0);
    const int row0 = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
#pragma unroll
    for (int r = 0; r < ROWS; r += STEP) {
        int row = row0 + r, from = first_row + row;
        bool valid = from < rows;
        copy_16_async(tile + tile_offset<COLS>(row, chunk), source + (valid ? from : 0) * stride + chunk * 8, valid);
    }
}

// The left operand (MT x 16 rows by COLS) of a product, kept in registers or read again from shared memory.
template <int MT, int COLS, bool IN_REGISTERS>
struct LeftOperand {
    uint32_t address;  // of the tile's first row
    uint32_t part[IN_REGISTERS ? COLS / 16 : 1][MT][4];
};

template <int COLS>
__device__ inline void left_load(uint32_t (&a)[4], uint32_t address, int row, int k) {
    const int lane = threadIdx.x % 32;
    load_matrices(a, address + tile_offset<COLS>(row + lane % 16, k * 2 + lane / 16));
}

template <int MT, int COLS, bool IN_REGISTERS>
__device__ inline void left_open(LeftOperand<MT, COLS, IN_REGISTERS>& left, uint32_t address) {
    left.address = address;
    if constexpr (IN_REGISTERS) {
#pragma unroll
        for (int k = 0; k < COLS / 16; k++)
#pragma unroll
            for (int m = 0; m < MT; m++) left_load<COLS>(left.part[k][m], address, m * 16, k);
    }
}

// c[m] (16 x N each) += left (MT x 16 rows by COLS) * tile^T, where tile is N rows by COLS.
template <int MT, int N, int COLS, bool IN_REGISTERS>
__device__ inline void multiply_rows(float (&c)[MT][N / 8][4], LeftOperand<MT, COLS, IN_REGISTERS>& left,
                                     uint32_t tile) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < COLS / 16; k++) {
        uint32_t(&a)[MT][4] = left.part[IN_REGISTERS ? k : 0];
        if constexpr (!IN_REGISTERS) {
#pragma unroll
            for (int m = 0; m < MT; m++) left_load<COLS>(a[m], left.address, m * 16, k);
        }
#pragma unroll
        for (int n = 0; n < N / 16; n++) {
            uint32_t b[4];
            load_matrices(b, tile + tile_offset<COLS>(n * 16 + lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma(c[m][n * 2], a[m], b[0], b[1]);
                mma(c[m][n * 2 + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// c (16 x COLS) += a (16 x K) * tile, where tile is K rows by COLS.
template <int K, int COLS>
__device__ inline void multiply_columns(float (&c)[COLS / 8][4], const uint32_t (&a)[K / 16][4], uint32_t tile) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < K / 16; k++)
#pragma unroll
        for (int n = 0; n < COLS / 16; n++) {
            uint32_t b[4];
            load_matrices_transposed(b, tile + tile_offset<COLS>(k * 16 + lane % 16, n * 2 + lane / 16));
            mma(c[n * 2], a[k], b[0], b[1]);
            mma(c[n * 2 + 1], a[k], b[2], b[3]);
        }
}

// Writes a warp's 16 rows to memory in bf16, times a factor for row g and one for row g + 8. Columns go, 64 at a time,
// through 2 KiB of the warp's own shared memory, so that whole 16-byte chunks are stored.
template <int COLS>
__device__ inline void store_rows(bf16* to /*(16,COLS)*/, int64_t stride, int rows, uint32_t own,
                                  const float (&c)[COLS / 8][4], float factor0, float factor1) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int first = 0; first < COLS; first += 64) {
        __syncwarp();
#pragma unroll
        for (int chunk = 0; chunk < 8; chunk++) {
            const float(&from)[4] = c[first / 8 + chunk];
            store_word(own + tile_offset<64>(g, chunk) + t * 4, pack_bf16(from[0] * factor0, from[1] * factor0));
            store_word(own + tile_offset<64>(g + 8, chunk) + t * 4, pack_bf16(from[2] * factor1, from[3] * factor1));
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = i * 4 + lane / 8, chunk = lane % 8;
            int4 value = load_shared(own + tile_offset<64>(row, chunk));
            if (row < rows) *reinterpret_cast<int4*>(to + row * stride + first + chunk * 8) = value;
        }
    }
    __syncwarp();
}

// Running softmax of one 16 x N tile of scores: s becomes p, and the sums so far are rescaled to the new maximum.
template <int N, int HS>
__device__ inline void softmax_step(float (&s)[N / 8][4], float (&o)[HS / 8][4], float (&largest)[2], float (&sum)[2],
                                    float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = largest[r];
#pragma unroll
        for (int n = 0; n < N / 8; n++) top = fmaxf(top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        float shift = top * scale_log2, partial = 0.0f;
        float factor = fast_exp2(largest[r] * scale_log2 - shift);
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
            s[n][2 * r] = fast_exp2(fmaf(s[n][2 * r], scale_log2, -shift));
            s[n][2 * r + 1] = fast_exp2(fmaf(s[n][2 * r + 1], scale_log2, -shift));
            partial += s[n][2 * r] + s[n][2 * r + 1];
        }
        sum[r] = sum[r] * factor + partial;
        largest[r] = top;
#pragma unroll
        for (int n = 0; n < HS / 8; n++) o[n][2 * r] *= factor, o[n][2 * r + 1] *= factor;
    }
}

template <int HS_>
struct ForwardShape {
    static constexpr int HS = HS_, BM = 128, BN = 64, WARPS = 4, MT = BM / 16 / WARPS, THREADS = WARPS * 32;
    static constexpr int BLOCKS = 2;  // on a multiprocessor
    static constexpr bool Q_IN_REGISTERS = HS == 64;
    static constexpr int Q_BYTES = BM * HS * 2, KV_BYTES = BN * HS * 2;
    static constexpr int SHARED = Q_BYTES + 4 * KV_BYTES;  // q, then {k, v} of two stages
};

// grid B * NH * ceil(T / BM), block THREADS, shared SHARED; HS 64 or 128, any T; deterministic.
template <typename Shape>
__global__ void __launch_bounds__(Shape::THREADS, Shape::BLOCKS)
    attention_forward_kernel(bf16* out /*(B,T,C)*/, float* lse /*(B,NH,T)*/, const bf16* qkv /*(B,T,3C)*/, int B, int T,
                             int NH, int group, float scale) {
    constexpr int HS = Shape::HS, BM = Shape::BM, BN = Shape::BN, MT = Shape::MT, THREADS = Shape::THREADS;
    extern __shared__ __align__(128) char shared[];
    const uint32_t q_tile = (uint32_t)__cvta_generic_to_shared(shared), kv_tiles = q_tile + Shape::Q_BYTES;
    int bh, tile;
    forward_work(bh, tile, blockIdx.x, (T + BM - 1) / BM, B * NH, group);
    const int64_t C = (int64_t)NH * HS, stride = 3 * C, first = (int64_t)(bh / NH) * T;
    const bf16* q = qkv + first * stride + bh % NH * HS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row0 = tile * BM + warp * 16 * MT;  // this warp's first query
    const int tiles = (min(tile * BM + BM, T) + BN - 1) / BN;
    const float scale_log2 = scale * LOG2_OF_E;

    tile_copy<BM, HS, THREADS>(q_tile, q, stride, tile * BM, T);
    tile_copy<BN, HS, THREADS>(kv_tiles, q + C, stride, 0, T);
    tile_copy<BN, HS, THREADS>(kv_tiles + Shape::KV_BYTES, q + 2 * C, stride, 0, T);
    copy_async_commit();
    LeftOperand<MT, HS, Shape::Q_IN_REGISTERS> left;
    float o[MT][HS / 8][4] = {}, largest[MT][2], sum[MT][2] = {};
    for (int m = 0; m < MT; m++) largest[m][0] = largest[m][1] = -INFINITY;
    for (int j = 0; j < tiles; j++) {
        const uint32_t k_tile = kv_tiles + (j % 2) * 2 * Shape::KV_BYTES, v_tile = k_tile + Shape::KV_BYTES;
        copy_async_wait<0>();
        __syncthreads();  // tile j has arrived, and all threads are done with tile j - 1
        if (j == 0) left_open(left, q_tile + warp * 16 * MT * HS * 2);
        if (j + 1 < tiles) {
            const uint32_t next = kv_tiles + ((j + 1) % 2) * 2 * Shape::KV_BYTES;
            tile_copy<BN, HS, THREADS>(next, q + C, stride, (j + 1) * BN, T);
            tile_copy<BN, HS, THREADS>(next + Shape::KV_BYTES, q + 2 * C, stride, (j + 1) * BN, T);
            copy_async_commit();
        }
        if (j * BN > row0 + 16 * MT - 1) continue;  // every key lies after this warp's queries
        float s[MT][BN / 8][4] = {};
        multiply_rows<MT, BN, HS, Shape::Q_IN_REGISTERS>(s, left, k_tile);
        if (j * BN + BN - 1 > row0) {
#pragma unroll
            for (int m = 0; m < MT; m++) mask_keys(s[m], j * BN, row0 + m * 16);
        }
#pragma unroll
        for (int m = 0; m < MT; m++) {
            uint32_t p[BN / 16][4];
            softmax_step<BN, HS>(s[m], o[m], largest[m], sum[m], scale_log2);
            pack_left(p, s[m]);
            multiply_columns<BN, HS>(o[m], p, v_tile);  // reads v MT times, so that products overlap with softmaxes
        }
    }
#pragma unroll
    for (int m = 0; m < MT; m++) {
        const int row = row0 + m * 16;
        for (int r = 0; r < 2; r++) {
            sum[m][r] += __shfl_xor_sync(0xffffffffu, sum[m][r], 1);
            sum[m][r] += __shfl_xor_sync(0xffffffffu, sum[m][r], 2);
            if (t == 0 && row + g + r * 8 < T)
                lse[(int64_t)bh * T + row + g + r * 8] = largest[m][r] * scale + logf(sum[m][r]);
        }
        store_rows<HS>(out + (first + row) * C + bh % NH * HS, C, T - row, q_tile + (warp * MT + m) * 16 * HS * 2, o[m],
                       1.0f / sum[m][0], 1.0f / sum[m][1]);
    }
}

// BM queries by BN keys. Among shapes for heads of 128, BM = 64 is faster and needs Hopper's shared memory. UNEVEN is
// for the test of the order of dq: it slows down every other tile of keys.
template <int HS_, int BM_, bool UNEVEN_ = false>
struct BackwardShape {
    static constexpr int HS = HS_, BM = BM_, BN = 128, WARPS = BN / 16, THREADS = WARPS * 32;
    static constexpr bool UNEVEN = UNEVEN_, IN_REGISTERS = HS == 64;  // a warp's 16 keys and values
    static constexpr int DQ_ROWS = BM / 16;                           // dq is spread over the warps as DQ_ROWS x
    static constexpr int DQ_COLUMNS = HS / (WARPS / DQ_ROWS);         // (WARPS / DQ_ROWS) tiles of 16 x DQ_COLUMNS
    static constexpr int KEY_BYTES = BN * HS * 2, QUERY_BYTES = BM * HS * 2, DS_BYTES = BN * BM * 2;
    // Offsets into shared memory: k, ds (two buffers), v (when it is kept in registers it only passes through the
    // first buffer of ds), then three stages {q, dout}, then three stages {lse, D}.
    static constexpr int DS = KEY_BYTES, V = IN_REGISTERS ? DS : DS + 2 * DS_BYTES;
    static constexpr int STAGES = DS + 2 * DS_BYTES + (IN_REGISTERS ? 0 : KEY_BYTES);
    static constexpr int ROWS = STAGES + 3 * 2 * QUERY_BYTES;
    static constexpr int SHARED = ROWS + 3 * 2 * BM * 4;
    static_assert(!IN_REGISTERS || KEY_BYTES <= 2 * DS_BYTES);
    static_assert(THREADS >= 2 * BM && BN % BM == 0);
};

// A tile of keys of one head, and what its work needs.
struct BackwardWork {
    const bf16* q;     // (T,HS), rows 3C apart: token 0 of this head
    const bf16* dout;  // (T,HS), rows C apart
    const float* lse;  // (T)
    const float* D;    // (T)
    bf16* dq;          // (T,HS), rows 3C apart
    float* dq_sum;     // (tiles of queries, BM * HS), each tile in the order of the threads' registers
    int* flags;        // (tiles of queries): how many tiles of keys have added their share
    int64_t C;
    int T, key_tile;
    float scale;
};

// Starts the copy of tile m of queries, their dout, lse and D into a stage.
template <typename Shape>
__device__ inline void backward_load(uint32_t shared, const BackwardWork& work, int m) {
    constexpr int BM = Shape::BM;
    const int stage = m % 3;
    const uint32_t q = shared + Shape::STAGES + stage * 2 * Shape::QUERY_BYTES;
    tile_copy<BM, Shape::HS, Shape::THREADS>(q, work.q, 3 * work.C, m * BM, work.T);
    tile_copy<BM, Shape::HS, Shape::THREADS>(q + Shape::QUERY_BYTES, work.dout, work.C, m * BM, work.T);
    if (threadIdx.x < 2 * BM) {
        const int row = m * BM + threadIdx.x % BM;
        const float* from = threadIdx.x < BM ? work.lse : work.D;
        copy_4_async(shared + Shape::ROWS + (stage * 2 * BM + threadIdx.x) * 4, from + min(row, work.T - 1),
                     row < work.T);
    }
}

// Replaces scores s by probabilities p, and dp by ds (16 keys x 32 queries). Queries past T have zero q, dout, lse and
// D, so p = 1 meets dout = 0 and ds = 0.
__device__ inline void backward_softmax(float (&s)[4][4], float (&dp)[4][4], const float* lse /*(32)*/,
                                        const float* D /*(32)*/, int key, int query, float scale_log2) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (key + 15 > query) {
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (key + g + i / 2 % 2 * 8 > query + i / 4 * 8 + t * 2 + i % 2) s[i / 4][i % 4] = -INFINITY;
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float2 l = *reinterpret_cast<const float2*>(lse + n * 8 + t * 2);
        const float2 d = *reinterpret_cast<const float2*>(D + n * 8 + t * 2);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[n][e] = fast_exp2(fmaf(s[n][e], scale_log2, -(e % 2 ? l.y : l.x) * LOG2_OF_E));
            dp[n][e] = s[n][e] * (dp[n][e] - (e % 2 ? d.y : d.x));
        }
    }
}

// Stores a warp's ds (16 keys x BM queries, as a left operand) into the block's tile (BN x BM).
template <typename Shape>
__device__ inline void backward_store_ds(uint32_t tile, const uint32_t (&ds)[Shape::BM / 16][4]) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < Shape::BM / 16 * 4; i++) {
        const int k = i / 4, e = i % 4;
        uint32_t to = tile + tile_offset<Shape::BM>(row + e % 2 * 8, k * 2 + e / 2) + lane % 4 * 4;
        store_word(to, ds[k][e]);
    }
}

// dq (16 x DQ_COLUMNS, this warp's part of a tile of queries) += ds^T k over the first `keys` keys.
template <typename Shape>
__device__ inline void backward_dq(float (&dq)[Shape::DQ_COLUMNS / 8][4], uint32_t ds_tile, uint32_t k_tile, int keys) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int m = warp % Shape::DQ_ROWS, n0 = warp / Shape::DQ_ROWS * (Shape::DQ_COLUMNS / 8);
#pragma unroll
    for (int k = 0; k < Shape::BN / 16; k++) {
        if (k * 16 >= keys) break;
        uint32_t a[4], b[4];
        load_matrices_transposed(
            a, ds_tile + tile_offset<Shape::BM>(k * 16 + lane % 8 + lane / 16 * 8, m * 2 + lane / 8 % 2));
#pragma unroll
        for (int n = 0; n < Shape::DQ_COLUMNS / 16; n++) {
            load_matrices_transposed(b, k_tile + tile_offset<Shape::HS>(k * 16 + lane % 16, n0 + n * 2 + lane / 16));
            mma(dq[n * 2], a, b[0], b[1]);
            mma(dq[n * 2 + 1], a, b[2], b[3]);
        }
    }
}

// Adds this warp's part of dq to the sum that the tiles of later keys left (none if `first`), and leaves the sum for
// the next tile of keys, or writes the result if there is none.
template <typename Shape>
__device__ inline void backward_dq_add(uint32_t ds_tile, uint32_t k_tile, const BackwardWork& work, int m, bool first) {
    constexpr int N = Shape::DQ_COLUMNS / 8;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float4* sum = reinterpret_cast<float4*>(work.dq_sum + (int64_t)m * Shape::BM * Shape::HS) + warp * N * 32 + lane;
    float dq[N][4] = {};
    float4 before[N] = {};  // read now, needed after the product
    if (!first) {
#pragma unroll
        for (int n = 0; n < N; n++) before[n] = __ldcg(sum + n * 32);
    }
    backward_dq<Shape>(dq, ds_tile, k_tile, (m + 1) * Shape::BM - work.key_tile * Shape::BN);
#pragma unroll
    for (int n = 0; n < N; n++)
        dq[n][0] += before[n].x, dq[n][1] += before[n].y, dq[n][2] += before[n].z, dq[n][3] += before[n].w;
    if (work.key_tile > 0) {
#pragma unroll
        for (int n = 0; n < N; n++) __stcg(sum + n * 32, make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]));
        return;
    }
    const int row = m * Shape::BM + warp % Shape::DQ_ROWS * 16 + lane / 4;
    bf16* to = work.dq + row * 3 * work.C + warp / Shape::DQ_ROWS * Shape::DQ_COLUMNS + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2 * N; i++) {
        const int n = i / 2, r = i % 2;
        if (row + r * 8 < work.T)
            *reinterpret_cast<uint32_t*>(to + r * 8 * 3 * work.C + n * 8) =
                pack_bf16(dq[n][r * 2] * work.scale, dq[n][r * 2 + 1] * work.scale);
    }
}

// One tile of keys against all queries from the diagonal on. dq of a tile of queries is a sum over blocks, added in
// fp32 in one fixed order, nearest keys first: the block of keys n waits for the flag that block n + 1 sets. Blocks
// that start together arrive in that order, so waits are short. The nearest block stores without reading and block 0
// writes the bf16 result, so there are no float atomics and no pass that clears or converts. Blocks draw their work by
// ticket: work that a block waits for has an earlier ticket, so its block is running and the wait ends. There is one
// barrier per tile of queries: it separates the writing of ds from its reading, shows the next stage to all threads,
// and frees the stage and the ds buffer of the tile before. It also orders the additions to dq: warp 1 sees the flag of
// tile m before it, warp 0 sets the flag of tile m - 1 after it.
template <typename Shape>
__device__ inline void backward_block(float (&dk)[Shape::HS / 8][4], float (&dv)[Shape::HS / 8][4], char* base,
                                      const BackwardWork& work) {
    constexpr int HS = Shape::HS, BM = Shape::BM, BN = Shape::BN;
    const uint32_t shared = (uint32_t)__cvta_generic_to_shared(base);
    const int warp = threadIdx.x / 32, key0 = work.key_tile * BN, key = key0 + warp * 16;
    const int tiles = (work.T + BM - 1) / BM, tile0 = key0 / BM;
    tile_copy<BN, HS, Shape::THREADS>(shared, work.q + work.C, 3 * work.C, key0, work.T);
    tile_copy<BN, HS, Shape::THREADS>(shared + Shape::V, work.q + 2 * work.C, 3 * work.C, key0, work.T);
    backward_load<Shape>(shared, work, tile0);
    copy_async_commit();
    if (tile0 + 1 < tiles) backward_load<Shape>(shared, work, tile0 + 1);
    copy_async_commit();
    copy_async_wait<1>();
    __syncthreads();
    LeftOperand<1, HS, Shape::IN_REGISTERS> k, v;
    left_open(k, shared + warp * 16 * HS * 2);
    left_open(v, shared + Shape::V + warp * 16 * HS * 2);
    if (Shape::IN_REGISTERS) __syncthreads();  // v is read before ds takes its place
    for (int m = tile0; m < tiles; m++) {
        const uint32_t q_tile = shared + Shape::STAGES + m % 3 * 2 * Shape::QUERY_BYTES;
        const uint32_t dout_tile = q_tile + Shape::QUERY_BYTES, ds_tile = shared + Shape::DS + m % 2 * Shape::DS_BYTES;
        const int before = m * BM / BN - work.key_tile;  // tiles of keys that add to dq of tile m before this one
        if (threadIdx.x == 32 && before > 0)
            while (load_acquire(work.flags + m) != before) {
            }
        if (Shape::UNEVEN && work.key_tile % 2 == 1)
            for (long long start = clock64(); clock64() - start < 50000;) {
            }
        __syncwarp();
        if (m * BM + BM > key) {  // some query of the tile sees a key of this warp
            const float* rows = reinterpret_cast<const float*>(base + Shape::ROWS) + m % 3 * 2 * BM;
            uint32_t p[BM / 16][4], ds[BM / 16][4];
#pragma unroll
            for (int i = 0; i < BM; i += 32) {  // 32 queries at a time, which saves registers
                float s[1][4][4] = {}, dp[1][4][4] = {};
                multiply_rows<1, 32, HS, Shape::IN_REGISTERS>(s, k, q_tile + i * HS * 2);
                multiply_rows<1, 32, HS, Shape::IN_REGISTERS>(dp, v, dout_tile + i * HS * 2);
                backward_softmax(s[0], dp[0], rows + i, rows + BM + i, key, m * BM + i, work.scale * LOG2_OF_E);
                pack_left(p + i / 16, s[0]);
                pack_left(ds + i / 16, dp[0]);
            }
            backward_store_ds<Shape>(ds_tile, ds);
            multiply_columns<BM, HS>(dv, p, dout_tile);
            multiply_columns<BM, HS>(dk, ds, q_tile);
        }
        copy_async_wait<0>();
        __syncthreads();
        if (threadIdx.x == 0 && m > tile0 && work.key_tile > 0)
            store_release(work.flags + m - 1, (m - 1) * BM / BN - work.key_tile + 1);
        if (m + 2 < tiles) backward_load<Shape>(shared, work, m + 2);
        copy_async_commit();
        backward_dq_add<Shape>(ds_tile, shared, work, m, before == 0);
    }
    __syncthreads();
    if (threadIdx.x == 0 && work.key_tile > 0)
        store_release(work.flags + tiles - 1, (tiles - 1) * BM / BN - work.key_tile + 1);
}

// grid B * NH * ceil(T / BN), block THREADS, shared SHARED; flags and ticket zero before; HS 64 or 128, any T;
// deterministic (dq is summed in a fixed order).
template <typename Shape>
__global__ void __launch_bounds__(Shape::THREADS, 1)
    attention_backward_kernel(bf16* dqkv /*(B,T,3C)*/, float* dq_sum /*(B*NH, ceil(T/BM)*BM*HS)*/,
                              int* flags /*(B*NH, ceil(T/BM))*/, int* ticket /*(1)*/, const bf16* dout /*(B,T,C)*/,
                              const bf16* qkv /*(B,T,3C)*/, const float* lse /*(B,NH,T)*/, const float* D /*(B,NH,T)*/,
                              int T, int NH, float scale) {
    constexpr int HS = Shape::HS, BM = Shape::BM, BN = Shape::BN;
    extern __shared__ __align__(128) char shared[];
    __shared__ int drawn;
    if (threadIdx.x == 0) drawn = atomicAdd(ticket, 1);
    __syncthreads();
    const int warp = threadIdx.x / 32, key_tiles = (T + BN - 1) / BN, query_tiles = (T + BM - 1) / BM;
    const int64_t bh = drawn / key_tiles, first = bh / NH * T, column = bh % NH * HS, C = (int64_t)NH * HS;
    BackwardWork work;
    work.q = qkv + first * 3 * C + column;
    work.dout = dout + first * C + column;
    work.lse = lse + bh * T;
    work.D = D + bh * T;
    work.dq = dqkv + first * 3 * C + column;
    work.dq_sum = dq_sum + bh * query_tiles * BM * HS;
    work.flags = flags + bh * query_tiles;
    work.C = C;
    work.T = T;
    work.key_tile = key_tiles - 1 - drawn % key_tiles;  // the later keys of a head come first
    work.scale = scale;
    float dk[HS / 8][4] = {}, dv[HS / 8][4] = {};
    backward_block<Shape>(dk, dv, shared, work);

    const int key = work.key_tile * BN + warp * 16;
    const uint32_t own = (uint32_t)__cvta_generic_to_shared(shared) + warp * 16 * 64 * 2;  // in place of k
    bf16* to = work.dq + key * 3 * C;
    store_rows<HS>(to + C, 3 * C, T - key, own, dk, scale, scale);
    store_rows<HS>(to + 2 * C, 3 * C, T - key, own, dv, 1.0f, 1.0f);
}

// Launches the forward pass.
template <int HS>
void attention_forward_mma(const Device* dev, bf16* out, float* lse, const bf16* qkv, int B, int T, int NH) {
    using Shape = ForwardShape<HS>;
    launch_kernel(dev, attention_forward_kernel<Shape>, (unsigned)(B * NH * ceil_div(T, Shape::BM)), Shape::THREADS,
                  Shape::SHARED, out, lse, qkv, B, T, NH, attention_group(T, HS, sizeof(bf16)),
                  1.0f / sqrtf((float)HS));
}

// The backward pass by mma.sync, of which `scratch` has D already.
template <typename Shape>
inline void attention_backward_mma(const Device* dev, bf16* dqkv, char* scratch, AttentionScratch sizes,
                                   const bf16* dout, const bf16* qkv, const float* lse, int B, int T, int NH) {
    device_zero(dev, scratch, sizes.flags);
    launch_kernel(dev, attention_backward_kernel<Shape>, (unsigned)(B * NH * ceil_div(T, Shape::BN)), Shape::THREADS,
                  Shape::SHARED, dqkv, (float*)(scratch + sizes.flags + sizes.rows), (int*)(scratch + 256),
                  (int*)scratch, dout, qkv, lse, (float*)(scratch + sizes.flags), T, NH,
                  1.0f / sqrtf((float)Shape::HS));
}

static_assert(BackwardShape<128, 32>::SHARED == ATTENTION_WIDE_BYTES);
