// The two matrix products next to GELU, with GELU's work hidden behind the next tile's product, in bf16 on sm_90a:
//     forward   pre = inp W^T + bias,  out = gelu(pre)                      inp (N, K), W (COLS, K), bias (COLS)
//     backward  d = (dout W) * gelu'(pre),  dbias = column sums of d        dout (N, K), W (K, COLS)
// with pre, out, d of (N, COLS). The plain C versions are matmul.cuh's. pre is rounded to bf16 before GELU is taken of
// it, as it is where the activation is computed again from the stored pre, so that both have the same bits. The column
// sums are those of d as stored.
//
// gemm_sm90.cuh has the loop that hides GELU behind the next tile's product. Backward, gelu' of a tile does not wait
// for the product: it is computed during it, kept as fp16 (whose error is an eighth of bf16's) in the registers that
// the results of the tile before leave, chunk by chunk, and multiplied in at the end. In GPT-2 K is short (768: twelve
// steps), and with GELU in their epilogues cuBLASLt's products take 1.2 to 1.5 times as long as without.
//
// Shared memory, 226 KB: 4 stages, and for each of the 8 warps two slots of 16 x 64 through which TMA writes results
// and, backward, reads pre; warps do not wait for each other there. Block of 384: a warpgroup with one thread that
// issues the loads (24 registers), two that multiply (240: 128 sums, 64 held, the rest for GELU).
//
// Deterministic: each sum runs over K in order, column sums over fixed rows (64, then column_sum.cuh).
#pragma once
#include "column_sum.cuh"
#include "common.cuh"
#include "gelu.cuh"
#include "gemm_sm90.cuh"

constexpr int MG_STAGES = 4, MG_SLOT_BYTES = 16 * PANEL_ROW_BYTES;
constexpr int MG_SLOTS = MG_STAGES * GEMM_STAGE_BYTES;   // offset of the slots: two for each of 8 warps
constexpr int MG_EXTRA = MG_SLOTS + 16 * MG_SLOT_BYTES;  // 1 KB a warpgroup, forward: bias; backward: column sums
constexpr int MG_BARRIERS = MG_EXTRA + 2048;             // of the stages, then one a warp for pre
constexpr int MG_SHARED_BYTES = MG_BARRIERS + (2 * MG_STAGES + 8) * 8;

struct MatmulGeluMaps {
    CUtensorMap a, b, out, pre;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ uint32_t mg_arrived(uint32_t shared, int warp) {
    return shared + MG_BARRIERS + (2 * MG_STAGES + warp) * 8;
}

// The values of four words of bf16, and their sigmoids as GELU takes them. All values go through one instruction after
// the other, so that none waits for the result of the one before it.
__device__ __forceinline__ void mg_sigmoids(float (&s)[8], float (&x)[8], const uint32_t (&word)[4]) {
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = i % 2 ? pair_floats(word[i / 2]).y : pair_floats(word[i / 2]).x;
#pragma unroll
    for (int i = 0; i < 8; i++) s[i] = gelu_sigmoid_fast(x[i]);
}

__device__ __forceinline__ void mg_gelu(uint32_t (&y)[4], const uint32_t (&word)[4]) {
    float x[8], s[8];
    mg_sigmoids(s, x, word);
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] = pack_bf16(x[2 * i] * s[2 * i], x[2 * i + 1] * s[2 * i + 1]);
}

// gelu' as fp16. 1 - s loses its digits where s is close to 1, and there it is small beside s.
__device__ __forceinline__ void mg_slopes(uint32_t (&y)[4], const uint32_t (&word)[4]) {
    float x[8], s[8];
    mg_sigmoids(s, x, word);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float rise = fmaf(3.0f * GELU_CUBIC, x[i] * x[i], GELU_LINEAR);
        s[i] = fmaf(x[i] * fmaf(-s[i], s[i], s[i]), rise, s[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] = pack_half(s[2 * i], s[2 * i + 1]);
}

// The state of a thread in a warpgroup that multiplies.
struct MatmulGeluWork {
    Gemm<MG_STAGES> gemm;
    const MatmulGeluMaps* maps;
    GemmShape shape;
    const bf16* bias;
    float* partial;
    uint32_t shared, slots, extra;       // slots: the warp's two; extra: the warpgroup's
    uint32_t place;                      // in a slot, this lane's address for matrices at column 0
    int warp, index;                     // of the warpgroup; number of the tile
    GemmTile before, tile, next;         // multiplied, being multiplied, to be multiplied
    bool full, more;                     // whether there is one before, and a next
    uint32_t parity;                     // of the tile's number
    uint32_t bias_pair;                  // two columns of its bias
    uint32_t held[GEMM_COLUMNS / 8][2];  // results of the tile before: pre or d; backward, then slopes of this one
};

// The address in the warp's first slot of the matrices of columns 8 n to 8 n + 15.
__device__ __forceinline__ uint32_t mg_matrices(const MatmulGeluWork& w, int n) {
    return w.place ^ (uint32_t)(n % 8 << 4);
}

// Waits until the last panel of 64 columns has been stored from the slots, so that the next one may be staged there.
__device__ __forceinline__ void mg_wait_slots(const MatmulGeluWork& w) {
    if (w.gemm.lane == 0) store_wait_read<0>();
    __syncwarp();
}

// Forward epilogue of the previous tile, columns 32 C and on: stages pre and gelu(pre) in shared memory.
template <int C>
__device__ __forceinline__ void mg_epilogue_forward(MatmulGeluWork& w) {
    if (C % 2 == 0) mg_wait_slots(w);
#pragma unroll
    for (int n = 4 * C; n < 4 * C + 4; n += 2) {
        const uint32_t x[4] = {w.held[n][0], w.held[n][1], w.held[n + 1][0], w.held[n + 1][1]};
        uint32_t y[4];
        store_matrices(mg_matrices(w, n), x[0], x[1], x[2], x[3]);
        mg_gelu(y, x);
        store_matrices(mg_matrices(w, n) + MG_SLOT_BYTES, y[0], y[1], y[2], y[3]);
    }
}

// Forward epilogue: stores panel P of the previous tile, columns 64 P and on, from shared memory.
template <int P>
__device__ __forceinline__ void mg_store_forward(const MatmulGeluWork& w) {
    fence_async();
    __syncwarp();
    if (w.gemm.lane != 0 || !w.full) return;
    int row = w.before.row + w.gemm.group * 64 + w.warp * 16, column = w.before.column + P * 64;
    tensor_store(&w.maps->pre, w.slots, column, row, 0);
    tensor_store(&w.maps->out, w.slots + MG_SLOT_BYTES, column, row, 0);
    store_commit();
}

// Backward epilogue of the previous tile, columns 32 C and on: stages d, stores every other chunk, sums the columns.
template <int C>
__device__ __forceinline__ void mg_epilogue_backward(MatmulGeluWork& w) {
    if (C % 2 == 0) mg_wait_slots(w);
    float sum[8];
#pragma unroll
    for (int n = 4 * C; n < 4 * C + 4; n++) {
        if (n % 2 == 0)
            store_matrices(mg_matrices(w, n), w.held[n][0], w.held[n][1], w.held[n + 1][0], w.held[n + 1][1]);
        float2 upper = pair_floats(w.held[n][0]), lower = pair_floats(w.held[n][1]);
        sum[n % 4 * 2] = upper.x + lower.x, sum[n % 4 * 2 + 1] = upper.y + lower.y;
    }
    uint32_t sums = w.extra + C % 2 * 512;  // of 32 columns, a row for each of 4 warps
    store_word(sums + w.warp * 128 + lane_column(w.gemm.lane) * 4, __float_as_uint(sum_lanes(sum, w.gemm.lane)));
    if (C % 2 == 1) fence_async();
    group_sync(1 + w.gemm.group, 128);
    int row = w.before.row + w.gemm.group * 64, column = w.before.column + C * 32 + w.gemm.lane;
    if (C % 2 == 1 && w.gemm.lane == 0 && w.full) {
        tensor_store(&w.maps->out, w.slots, w.before.column + C / 2 * 64, row + w.warp * 16, 0);
        store_commit();
    }
    if (w.warp == C % 4 && w.full && column < w.shape.columns && row < w.shape.rows) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) total += __uint_as_float(load_word(sums + i * 128 + w.gemm.lane * 4));
        w.partial[(int64_t)(row / 64) * w.shape.columns + column] = total;
    }
}

// One thread loads the warp's rows of 64 columns of pre.
__device__ __forceinline__ void mg_load_pre(const MatmulGeluWork& w, GemmTile tile, int panel) {
    uint32_t arrived = mg_arrived(w.shared, w.gemm.group * 4 + w.warp);
    barrier_expect(arrived, MG_SLOT_BYTES);
    tensor_load(w.slots + MG_SLOT_BYTES, &w.maps->pre, arrived, tile.column + panel * 64,
                tile.row + w.gemm.group * 64 + w.warp * 16, 0);
}

// Computes gelu' of columns 32 C and on of this tile from pre in the slot, then starts to load the next panel of pre.
template <int C>
__device__ __forceinline__ void mg_take_slopes(MatmulGeluWork& w) {
    if (C % 2 == 0) barrier_wait(mg_arrived(w.shared, w.gemm.group * 4 + w.warp), C / 2 % 2);  // four panels a tile
#pragma unroll
    for (int n = 4 * C; n < 4 * C + 4; n += 2) {
        uint32_t x[4], y[4];
        load_matrices(x, mg_matrices(w, n) + MG_SLOT_BYTES);
        mg_slopes(y, x);
        w.held[n][0] = y[0], w.held[n][1] = y[1], w.held[n + 1][0] = y[2], w.held[n + 1][1] = y[3];
    }
    if (C % 2 == 0) return;
    fence_async();  // the reads of this panel come before what TMA writes there next
    __syncwarp();
    if (w.gemm.lane == 0 && (C < GEMM_CHUNKS - 1 || w.more))
        mg_load_pre(w, C < GEMM_CHUNKS - 1 ? w.tile : w.next, C < GEMM_CHUNKS - 1 ? C / 2 + 1 : 0);
}

// The bias of a tile's 256 columns, for its end: a thread asks for two of them early, and leaves them in shared memory
// when they have come. Two tiles take turns there, so that one barrier is enough.
__device__ __forceinline__ void mg_ask_bias(MatmulGeluWork& w) {
    int column = w.tile.column + threadIdx.x % 128 * 2;
    w.bias_pair = column < w.shape.columns ? *reinterpret_cast<const uint32_t*>(w.bias + column) : 0;
}

__device__ __forceinline__ void mg_place_bias(uint32_t to, uint32_t pair, int group) {
    store_word(to + threadIdx.x % 128 * 4, pair);
    group_sync(1 + group, 128);
}

// Finds the tile after this one, in the course of the product, where nobody waits for the divisions.
__device__ __forceinline__ void mg_look_ahead(MatmulGeluWork& w) {
    int index = w.index + (int)gridDim.x;
    w.more = index < w.shape.tiles;
    w.next = w.more ? gemm_tile(index, w.shape) : w.tile;
}

// gemm_product calls chunk between the steps of a tile. The places of a chunk's further steps were chosen by
// measurement: forward after every second chunk, the first of them before its panel is sent; backward before its slopes
// are taken.
template <bool BACKWARD>
struct MatmulGeluUser {
    using T = bf16;
    using Work = MatmulGeluWork;
    static constexpr int A_MN = 0, B_MN = BACKWARD, COLUMNS = GEMM_COLUMNS, EVERY = BACKWARD ? 1 : 2;

    template <int C, bool LAST>
    static __device__ __forceinline__ void chunk(Work& w, int until) {
        if (C == 4 && !LAST) mg_look_ahead(w);
        if constexpr (BACKWARD)
            mg_epilogue_backward<C>(w);
        else
            mg_epilogue_forward<C>(w);
        if (!BACKWARD && C == 2 && !LAST) mg_place_bias(w.extra + w.parity * 512, w.bias_pair, w.gemm.group);
        if (!LAST && w.gemm.k < until) gemm_step<MatmulGeluUser>(w);
        if constexpr (!BACKWARD && C % 2 == 1) mg_store_forward<C / 2>(w);
        if constexpr (BACKWARD && !LAST) mg_take_slopes<C>(w);
    }
};

// The product is complete: what is held of it, in bf16.
template <bool BACKWARD>
__device__ __forceinline__ void mg_finish(MatmulGeluWork& w) {
#pragma unroll
    for (int n = 0; n < GEMM_COLUMNS / 8; n++) {
        const float* c = w.gemm.c[n];
        if (BACKWARD) {
            float2 upper = half_floats(w.held[n][0]), lower = half_floats(w.held[n][1]);
            w.held[n][0] = pack_bf16(c[0] * upper.x, c[1] * upper.y);
            w.held[n][1] = pack_bf16(c[2] * lower.x, c[3] * lower.y);
        } else {
            float2 bias = pair_floats(load_word(w.extra + w.parity * 512 + n * 16 + w.gemm.lane % 4 * 4));
            w.held[n][0] = pack_bf16(c[0] + bias.x, c[1] + bias.y);
            w.held[n][1] = pack_bf16(c[2] + bias.x, c[3] + bias.y);
        }
    }
}

// A warpgroup: its 64 rows of all tiles of this block.
template <bool BACKWARD>
__device__ __forceinline__ void mg_consume(MatmulGeluWork& w) {
    const int steps = gemm_steps(w.shape);
    w.tile = gemm_tile(blockIdx.x, w.shape);
    if (BACKWARD && w.gemm.lane == 0) mg_load_pre(w, w.tile, 0);
    for (w.index = blockIdx.x; w.index < w.shape.tiles; w.index += gridDim.x, w.parity ^= 1) {
        if (!BACKWARD) mg_ask_bias(w);
        gemm_product<MatmulGeluUser<BACKWARD>>(w, steps);
        mg_finish<BACKWARD>(w);
        w.before = w.tile, w.tile = w.next, w.full = true;
    }
    gemm_deliver_last<MatmulGeluUser<BACKWARD>>(w);
    if (w.gemm.lane == 0) store_wait_read<0>();
}

#endif

// Grid at most the tiles, block 384, shared memory MG_SHARED_BYTES; columns and depth multiples of 8, depth at least
// GEMM_MIN_DEPTH, any rows. bias (columns): forward. partial (ceil(rows / 64), columns): backward. Deterministic.
template <bool BACKWARD>
__global__ void __launch_bounds__(384, 1)
    matmul_gelu_kernel(const __grid_constant__ MatmulGeluMaps maps, GemmShape shape, const bf16* bias, float* partial) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char matmul_gelu_shared[];
    uint32_t shared = shared_offset(matmul_gelu_shared);
    const GemmStages<MG_STAGES> stages = {shared, shared + MG_BARRIERS};
    if (threadIdx.x == 0) {
        stages.init();
        for (int i = 0; i < 8; i++) barrier_init(mg_arrived(shared, i), 1);
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_shrink<24>();
        if (threadIdx.x == 0) gemm_produce<0, BACKWARD, GEMM_COLUMNS>(stages, &maps.a, &maps.b, shape);
        return;
    }
    registers_grow<240>();
    MatmulGeluWork w = {};
    w.gemm.stages = stages;
    w.maps = &maps, w.shape = shape, w.bias = bias, w.partial = partial, w.shared = shared;
    w.gemm.lane = threadIdx.x % 32;
    int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32 - 4, 0);
    w.gemm.group = warp / 4, w.warp = warp % 4;
    w.slots = shared + MG_SLOTS + warp * 2 * MG_SLOT_BYTES, w.extra = shared + MG_EXTRA + w.gemm.group * 1024;
    w.place = w.slots + panel_offset(w.gemm.lane % 16, w.gemm.lane / 16);
    mg_consume<BACKWARD>(w);
#else
    (void)maps, (void)shape, (void)bias, (void)partial;
#endif
}

// True if these kernels run here and the result has tiles for every multiprocessor.
inline bool matmul_gelu_fits(const Device* dev, int64_t rows, int columns, int depth) {
    return hopper_runs(dev, matmul_gelu_kernel<true>) && gemm_fits(dev, rows, columns, MG_SHARED_BYTES) &&
           columns % 8 == 0 && depth % 8 == 0 && depth >= GEMM_MIN_DEPTH;
}

// out, pre: (N, OC); inp: (N, C); weight: (OC, C); bias: (OC). Where matmul_gelu_fits(dev, N, OC, C).
inline void matmul_gelu_forward(const Device* dev, bf16* out, bf16* pre, const bf16* inp, const bf16* weight,
                                const bf16* bias, int64_t N, int C, int OC) {
    MatmulGeluMaps maps = {tensor_map(inp, 1, N, C, GEMM_ROWS), tensor_map(weight, 1, OC, C, GEMM_COLUMNS),
                           tensor_map(out, 1, N, OC, 16), tensor_map(pre, 1, N, OC, 16)};
    launch_kernel(dev, matmul_gelu_kernel<false>, dev->sm_count, 384, MG_SHARED_BYTES, maps, gemm_shape(N, OC, C), bias,
                  nullptr);
}

// dinp: (N, C) = (dout W) * gelu'(pre); dbias: (C) (+)= its column sums; scratch: matmul_gelu_scratch_bytes;
// dout: (N, OC); weight: (OC, C); pre: (N, C). Where matmul_gelu_fits(dev, N, C, OC).
template <typename G>
void matmul_gelu_backward(const Device* dev, bf16* dinp, G* dbias, float* scratch, const bf16* dout, const bf16* weight,
                          const bf16* pre, int64_t N, int C, int OC, bool accumulate) {
    MatmulGeluMaps maps = {tensor_map(dout, 1, N, OC, GEMM_ROWS), tensor_map(weight, 1, OC, C, GEMM_DEPTH),
                           tensor_map(dinp, 1, N, C, 16), tensor_map(pre, 1, N, C, 16)};
    launch_kernel(dev, matmul_gelu_kernel<true>, dev->sm_count, 384, MG_SHARED_BYTES, maps, gemm_shape(N, C, OC),
                  nullptr, scratch);
    column_sum(dev, &dbias, 1, scratch, (int)ceil_div(N, 64), C, accumulate);
}
