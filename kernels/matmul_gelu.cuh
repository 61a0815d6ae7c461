// The two matrix products next to GELU, with GELU's work hidden behind the next tile's product, in bf16 on sm_90a:
//     forward   pre = inp W^T + bias,  out = gelu(pre)                      inp (N, K), W (COLS, K), bias (COLS)
//     backward  d = (dout W) * gelu'(pre),  dbias = column sums of d        dout (N, K), W (K, COLS)
// with pre, out, d of (N, COLS). The plain C versions are matmul.cuh's. pre is rounded to bf16 before GELU is taken of
// it, as it is where the activation is computed again from the stored pre, so that both have the same bits. The column
// sums are those of d as stored.
//
// Why not a library's epilogue: in GPT-2 K is short (768: twelve steps of 64), and with GELU in their epilogues
// cuBLASLt's products take 1.2 to 1.5 times as long as without. Here a warpgroup that has multiplied a tile only rounds
// its 64 x 256 sums to bf16, which halves the registers they take, and goes on to the next tile. Between two steps in K
// of that one, while the tensor cores work, it takes GELU of 32 columns and sends them out. Backward, gelu' of a tile
// does not wait for the product: it is computed during it, kept as fp16 (whose error is an eighth of bf16's) in the
// registers that the results of the tile before leave, chunk by chunk, and multiplied in at the end.
//
// Tile 128 x 256, two warpgroups with 64 rows each: 64 x 256 is the largest product of a warpgroup and the one that
// reads the fewest bytes of shared memory for its work. Shared memory, 226 KB: 4 stages of A (128 x 64) and B (256 x
// 64), and for each of the 8 warps two slots of 16 x 64 through which TMA writes results and, backward, reads pre;
// warps do not wait for each other there. Block of 384: a warpgroup with one thread that issues the loads (24
// registers), two that multiply (240: 128 sums, 64 held, the rest for GELU). Blocks stay and walk over tiles in groups
// of MG_GROUP rows of tiles, column by column, so that what runs at one time shares its operands in L2.
//
// Deterministic: each sum runs over K in order, column sums over fixed rows (64, then column_sum.cuh).
#pragma once
#include "column_sum.cuh"
#include "common.cuh"
#include "gelu.cuh"
#include "hopper.cuh"

constexpr int MG_ROWS = 128, MG_COLUMNS = 256, MG_DEPTH = 64, MG_STAGES = 4, MG_GROUP = 16;
constexpr int MG_A_BYTES = MG_ROWS * MG_DEPTH * 2, MG_B_BYTES = MG_COLUMNS * MG_DEPTH * 2;
constexpr int MG_STAGE_BYTES = MG_A_BYTES + MG_B_BYTES, MG_SLOT_BYTES = 16 * PANEL_ROW_BYTES;
constexpr int MG_SLOTS = MG_STAGES * MG_STAGE_BYTES;     // offset of the slots: two for each of 8 warps
constexpr int MG_EXTRA = MG_SLOTS + 16 * MG_SLOT_BYTES;  // 1 KB a warpgroup, forward: bias; backward: column sums
constexpr int MG_BARRIERS = MG_EXTRA + 2048;             // full and empty of each stage, one a warp for pre
constexpr int MG_SHARED_BYTES = MG_BARRIERS + (2 * MG_STAGES + 8) * 8;
constexpr int MG_CHUNKS = MG_COLUMNS / 32;  // one between two steps, so a tile's product has as many steps
constexpr int MG_MIN_DEPTH = (MG_CHUNKS - 1) * MG_DEPTH + 1;

struct MatmulGeluMaps {
    CUtensorMap a, b, out, pre;
};

struct MatmulGeluShape {
    int rows, columns, depth;  // of the result; depth is what the products sum over
    int tiles;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct MatmulGeluTile {
    int row, column;  // of its first element
};

__device__ __forceinline__ MatmulGeluTile mg_tile(int index, MatmulGeluShape shape) {
    int across = (shape.columns + MG_COLUMNS - 1) / MG_COLUMNS, down = (shape.rows + MG_ROWS - 1) / MG_ROWS;
    int first = index / (MG_GROUP * across) * MG_GROUP, within = index % (MG_GROUP * across);
    int high = down - first < MG_GROUP ? down - first : MG_GROUP;
    return {(first + within % high) * MG_ROWS, within / high * MG_COLUMNS};
}

__device__ __forceinline__ uint32_t mg_full(uint32_t shared, int stage) {
    return shared + MG_BARRIERS + stage * 8;
}
__device__ __forceinline__ uint32_t mg_empty(uint32_t shared, int stage) {
    return shared + MG_BARRIERS + (MG_STAGES + stage) * 8;
}
__device__ __forceinline__ uint32_t mg_arrived(uint32_t shared, int warp) {
    return shared + MG_BARRIERS + (2 * MG_STAGES + warp) * 8;
}

// One thread loads the operands of all tiles of this block, stage after stage.
template <bool BACKWARD>
__device__ __forceinline__ void mg_produce(uint32_t shared, const MatmulGeluMaps* maps, MatmulGeluShape shape) {
    Ring<MG_STAGES> ring = {0, 1};  // the stages begin empty
    int steps = (shape.depth + MG_DEPTH - 1) / MG_DEPTH;
    for (int index = blockIdx.x; index < shape.tiles; index += gridDim.x) {
        MatmulGeluTile tile = mg_tile(index, shape);
        for (int k = 0; k < steps; k++, ring.advance()) {
            uint32_t full = mg_full(shared, ring.stage), a = shared + ring.stage * MG_STAGE_BYTES, b = a + MG_A_BYTES;
            barrier_wait(mg_empty(shared, ring.stage), ring.parity);
            barrier_expect(full, MG_STAGE_BYTES);
            tensor_load(a, &maps->a, full, k * MG_DEPTH, tile.row, 0);
            if (BACKWARD) {  // B (64 x 256) as panels of 64 columns
                for (int p = 0; p < MG_COLUMNS; p += 64)
                    tensor_load(b + p * PANEL_ROW_BYTES, &maps->b, full, tile.column + p, k * MG_DEPTH, 0);
            } else {  // B (256 x 64) as one panel
                tensor_load(b, &maps->b, full, k * MG_DEPTH, tile.column, 0);
            }
        }
    }
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
    for (int i = 0; i < 4; i++) {
        __half2 pair = __floats2half2_rn(s[2 * i], s[2 * i + 1]);
        y[i] = *reinterpret_cast<uint32_t*>(&pair);
    }
}

// The state of a thread in a warpgroup that multiplies.
struct MatmulGeluWork {
    const MatmulGeluMaps* maps;
    MatmulGeluShape shape;
    const bf16* bias;
    float* partial;
    uint32_t shared, slots, extra;  // slots: the warp's two; extra: the warpgroup's
    uint32_t place;                 // in a slot, this lane's address for matrices at column 0
    int group, warp, lane;
    Ring<MG_STAGES> ring;
    int index, k, last;                 // number of the tile, step of it, and the stage of the step before
    MatmulGeluTile before, tile, next;  // multiplied, being multiplied, to be multiplied
    bool full, more;                    // whether there is one before, and a next
    uint32_t parity;                    // of the tile's number
    uint32_t bias_pair;                 // two columns of its bias
    float c[MG_COLUMNS / 8][4];         // sums: [n] are columns 8 n + 2 (lane % 4) and the next, of two rows
    uint32_t held[MG_COLUMNS / 8][2];   // results of the tile before: pre or d; backward, then slopes of this one
};

// Starts the next step of the tile's product.
template <bool BACKWARD>
__device__ __forceinline__ void mg_start_step(MatmulGeluWork& w) {
    uint32_t a = w.shared + w.ring.stage * MG_STAGE_BYTES, b = a + MG_A_BYTES;
    uint64_t left = uniform_operand(operand_k_major<MG_ROWS>(a + w.group * 64 * PANEL_ROW_BYTES, 0));
    uint64_t right = uniform_operand(BACKWARD ? operand_mn_major<MG_DEPTH>(b, 0) : operand_k_major<MG_COLUMNS>(b, 0));
    barrier_wait(mg_full(w.shared, w.ring.stage), w.ring.parity);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < MG_DEPTH / 16; j++)
        Wgmma<MG_COLUMNS>::shared<0, BACKWARD>(w.c, operand_step(left, j * 32),
                                               operand_step(right, j * (BACKWARD ? 16 * PANEL_ROW_BYTES : 32)),
                                               w.k > 0 || j > 0);
    wgmma_commit();
}

// This warp has multiplied with a stage.
__device__ __forceinline__ void mg_give_back(const MatmulGeluWork& w, int stage) {
    if (w.lane == 0) barrier_arrive(mg_empty(w.shared, stage));
}

// Ends the step before the one that was started.
__device__ __forceinline__ void mg_end_step(MatmulGeluWork& w) {
    wgmma_wait<1>();
    if (w.k > 0) mg_give_back(w, w.last);
    w.last = w.ring.stage;
    w.ring.advance();
    w.k++;
}

// The address in the warp's first slot of the matrices of columns 8 n to 8 n + 15.
__device__ __forceinline__ uint32_t mg_matrices(const MatmulGeluWork& w, int n) {
    return w.place ^ (uint32_t)(n % 8 << 4);
}

// Waits until the last panel of 64 columns has been stored from the slots, so that the next one may be staged there.
__device__ __forceinline__ void mg_wait_slots(const MatmulGeluWork& w) {
    if (w.lane == 0) store_wait_read<0>();
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
    if (w.lane != 0 || !w.full) return;
    int row = w.before.row + w.group * 64 + w.warp * 16, column = w.before.column + P * 64;
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
    store_word(sums + w.warp * 128 + lane_column(w.lane) * 4, __float_as_uint(sum_lanes(sum, w.lane)));
    if (C % 2 == 1) fence_async();
    group_sync(1 + w.group, 128);
    int row = w.before.row + w.group * 64, column = w.before.column + C * 32 + w.lane;
    if (C % 2 == 1 && w.lane == 0 && w.full) {
        tensor_store(&w.maps->out, w.slots, w.before.column + C / 2 * 64, row + w.warp * 16, 0);
        store_commit();
    }
    if (w.warp == C % 4 && w.full && column < w.shape.columns && row < w.shape.rows) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) total += __uint_as_float(load_word(sums + i * 128 + w.lane * 4));
        w.partial[(int64_t)(row / 64) * w.shape.columns + column] = total;
    }
}

// One thread loads the warp's rows of 64 columns of pre.
__device__ __forceinline__ void mg_load_pre(const MatmulGeluWork& w, MatmulGeluTile tile, int panel) {
    uint32_t arrived = mg_arrived(w.shared, w.group * 4 + w.warp);
    barrier_expect(arrived, MG_SLOT_BYTES);
    tensor_load(w.slots + MG_SLOT_BYTES, &w.maps->pre, arrived, tile.column + panel * 64,
                tile.row + w.group * 64 + w.warp * 16, 0);
}

// Computes gelu' of columns 32 C and on of this tile from pre in the slot, then starts to load the next panel of pre.
template <int C>
__device__ __forceinline__ void mg_take_slopes(MatmulGeluWork& w) {
    if (C % 2 == 0) barrier_wait(mg_arrived(w.shared, w.group * 4 + w.warp), C / 2 % 2);  // four panels a tile
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
    if (w.lane == 0 && (C < MG_CHUNKS - 1 || w.more))
        mg_load_pre(w, C < MG_CHUNKS - 1 ? w.tile : w.next, C < MG_CHUNKS - 1 ? C / 2 + 1 : 0);
}

// The bias of a tile's 256 columns, for its end: a thread asks for two of them early, and leaves them in shared memory
// when they have come. Two tiles take turns there, so that one barrier is enough.
__device__ __forceinline__ void mg_ask_bias(MatmulGeluWork& w) {
    int column = w.tile.column + threadIdx.x % 128 * 2;
    w.bias_pair = column < w.shape.columns ? *reinterpret_cast<const uint32_t*>(w.bias + column) : 0;
}

__device__ __forceinline__ void mg_place_bias(const MatmulGeluWork& w) {
    store_word(w.extra + w.parity * 512 + threadIdx.x % 128 * 4, w.bias_pair);
    group_sync(1 + w.group, 128);
}

// Finds the tile after this one, in the course of the product, where nobody waits for the divisions.
__device__ __forceinline__ void mg_look_ahead(MatmulGeluWork& w) {
    int index = w.index + (int)gridDim.x;
    w.more = index < w.shape.tiles;
    w.next = w.more ? mg_tile(index, w.shape) : w.tile;
}

// The next step of the tile's product, and the end of the one before.
template <bool BACKWARD>
__device__ __forceinline__ void mg_step(MatmulGeluWork& w) {
    mg_start_step<BACKWARD>(w);
    mg_end_step(w);
}

// The steps of a tile's product from chunk C on: one before each chunk, which goes on beside it, and the others where
// they pay most (dev/LOG.md has the times): forward after every second chunk, the first of them before its panel is
// sent; backward after a chunk's results, the first of them before its slopes are taken.
template <bool BACKWARD, int C>
__device__ __forceinline__ void mg_multiply(MatmulGeluWork& w, int steps) {
    if constexpr (C < MG_CHUNKS) {
        const int until = BACKWARD || C % 2 == 1 ? (C + 1) * steps / MG_CHUNKS : 0;
        mg_start_step<BACKWARD>(w);
        if (C == 4) mg_look_ahead(w);
        mg_end_step(w);
        if constexpr (BACKWARD)
            mg_epilogue_backward<C>(w);
        else
            mg_epilogue_forward<C>(w);
        if (!BACKWARD && C == 2) mg_place_bias(w);
        if (w.k < until) mg_step<BACKWARD>(w);
        if constexpr (BACKWARD)
            mg_take_slopes<C>(w);
        else if (C % 2 == 1)
            mg_store_forward<C / 2>(w);
        while (w.k < until) mg_step<BACKWARD>(w);
        mg_multiply<BACKWARD, C + 1>(w, steps);
    }
}

// Delivers the last tile.
template <bool BACKWARD, int C>
__device__ __forceinline__ void mg_epilogue_last(MatmulGeluWork& w) {
    if constexpr (C < MG_CHUNKS) {
        if constexpr (BACKWARD)
            mg_epilogue_backward<C>(w);
        else
            mg_epilogue_forward<C>(w);
        if constexpr (!BACKWARD && C % 2 == 1) mg_store_forward<C / 2>(w);
        mg_epilogue_last<BACKWARD, C + 1>(w);
    }
}

// The product is complete: what is held of it, in bf16.
template <bool BACKWARD>
__device__ __forceinline__ void mg_finish(MatmulGeluWork& w) {
    wgmma_wait<0>();
    wgmma_hold(w.c);
    mg_give_back(w, w.last);
#pragma unroll
    for (int n = 0; n < MG_COLUMNS / 8; n++) {
        const float* c = w.c[n];
        if (BACKWARD) {
            float2 upper = __half22float2(*reinterpret_cast<__half2*>(&w.held[n][0]));
            float2 lower = __half22float2(*reinterpret_cast<__half2*>(&w.held[n][1]));
            w.held[n][0] = pack_bf16(c[0] * upper.x, c[1] * upper.y);
            w.held[n][1] = pack_bf16(c[2] * lower.x, c[3] * lower.y);
        } else {
            float2 bias = pair_floats(load_word(w.extra + w.parity * 512 + n * 16 + w.lane % 4 * 4));
            w.held[n][0] = pack_bf16(c[0] + bias.x, c[1] + bias.y);
            w.held[n][1] = pack_bf16(c[2] + bias.x, c[3] + bias.y);
        }
    }
}

// A warpgroup: its 64 rows of all tiles of this block.
template <bool BACKWARD>
__device__ __forceinline__ void mg_consume(MatmulGeluWork& w) {
    const int steps = (w.shape.depth + MG_DEPTH - 1) / MG_DEPTH;
    w.tile = mg_tile(blockIdx.x, w.shape);
    if (BACKWARD && w.lane == 0) mg_load_pre(w, w.tile, 0);
    for (w.index = blockIdx.x; w.index < w.shape.tiles; w.index += gridDim.x, w.parity ^= 1) {
        w.k = 0;
        if (!BACKWARD) mg_ask_bias(w);
        mg_multiply<BACKWARD, 0>(w, steps);
        mg_finish<BACKWARD>(w);
        w.before = w.tile, w.tile = w.next, w.full = true;
    }
    mg_epilogue_last<BACKWARD, 0>(w);
    if (w.lane == 0) store_wait_read<0>();
}

__device__ __forceinline__ void mg_barriers(uint32_t shared) {
    for (int i = 0; i < MG_STAGES; i++) {
        barrier_init(mg_full(shared, i), 1);
        barrier_init(mg_empty(shared, i), 8);  // a thread of each warp that multiplies
    }
    for (int i = 0; i < 8; i++) barrier_init(mg_arrived(shared, i), 1);
    barrier_init_done();
}

#endif

// Grid at most the tiles, block 384, shared memory MG_SHARED_BYTES; columns and depth multiples of 8, depth at least
// MG_MIN_DEPTH, any rows. bias (columns): forward. partial (ceil(rows / 64), columns): backward. Deterministic.
template <bool BACKWARD>
__global__ void __launch_bounds__(384, 1) matmul_gelu_kernel(const __grid_constant__ MatmulGeluMaps maps,
                                                             MatmulGeluShape shape, const bf16* bias, float* partial) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char matmul_gelu_shared[];
    uint32_t shared = shared_offset(matmul_gelu_shared);
    if (threadIdx.x == 0) mg_barriers(shared);
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_shrink<24>();
        if (threadIdx.x == 0) mg_produce<BACKWARD>(shared, &maps, shape);
        return;
    }
    registers_grow<240>();
    MatmulGeluWork w = {};
    w.maps = &maps, w.shape = shape, w.bias = bias, w.partial = partial, w.shared = shared;
    w.lane = threadIdx.x % 32;
    int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32 - 4, 0);
    w.group = warp / 4, w.warp = warp % 4;
    w.slots = shared + MG_SLOTS + warp * 2 * MG_SLOT_BYTES, w.extra = shared + MG_EXTRA + w.group * 1024;
    w.place = w.slots + panel_offset(w.lane % 16, w.lane / 16);
    mg_consume<BACKWARD>(w);
#else
    (void)maps, (void)shape, (void)bias, (void)partial;
#endif
}

// True if these kernels run here and the result has tiles for every multiprocessor.
inline bool matmul_gelu_fits(const Device* dev, int64_t rows, int columns, int depth) {
    int64_t tiles = ceil_div(rows, MG_ROWS) * ceil_div(columns, MG_COLUMNS);
    if (dev->compute != 90 || tiles < dev->sm_count || rows >= (1ll << 31) - MG_ROWS || tiles >= 1ll << 30)
        return false;
    static const bool built = hopper_kernel_is_built(matmul_gelu_kernel<true>);
    return built && dev->shared_memory >= MG_SHARED_BYTES && columns % 8 == 0 && depth % 8 == 0 &&
           depth >= MG_MIN_DEPTH;
}

template <bool BACKWARD>
void matmul_gelu_launch(const Device* dev, const MatmulGeluMaps* maps, int rows, int columns, int depth,
                        const bf16* bias, float* partial) {
    auto kernel = matmul_gelu_kernel<BACKWARD>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MG_SHARED_BYTES));
    int tiles = (int)(ceil_div(rows, MG_ROWS) * ceil_div(columns, MG_COLUMNS));
    MatmulGeluShape shape = {rows, columns, depth, tiles};
    kernel<<<dev->sm_count, 384, MG_SHARED_BYTES, dev->stream>>>(*maps, shape, bias, partial);
    check_launch();
}

// out, pre: (N, OC); inp: (N, C); weight: (OC, C); bias: (OC). Where matmul_gelu_fits(dev, N, OC, C).
inline void matmul_gelu_forward(const Device* dev, bf16* out, bf16* pre, const bf16* inp, const bf16* weight,
                                const bf16* bias, int64_t N, int C, int OC) {
    MatmulGeluMaps maps = {tensor_map(inp, 1, N, C, MG_ROWS), tensor_map(weight, 1, OC, C, MG_COLUMNS),
                           tensor_map(out, 1, N, OC, 16), tensor_map(pre, 1, N, OC, 16)};
    matmul_gelu_launch<false>(dev, &maps, (int)N, OC, C, bias, nullptr);
}

// dinp: (N, C) = (dout W) * gelu'(pre); dbias: (C) (+)= its column sums; scratch: matmul_gelu_scratch_bytes;
// dout: (N, OC); weight: (OC, C); pre: (N, C). Where matmul_gelu_fits(dev, N, C, OC).
template <typename G>
void matmul_gelu_backward(const Device* dev, bf16* dinp, G* dbias, float* scratch, const bf16* dout, const bf16* weight,
                          const bf16* pre, int64_t N, int C, int OC, bool accumulate) {
    MatmulGeluMaps maps = {tensor_map(dout, 1, N, OC, MG_ROWS), tensor_map(weight, 1, OC, C, MG_DEPTH),
                           tensor_map(dinp, 1, N, C, 16), tensor_map(pre, 1, N, C, 16)};
    matmul_gelu_launch<true>(dev, &maps, (int)N, C, OC, nullptr, scratch);
    column_sum(dev, &dbias, 1, scratch, (int)ceil_div(N, 64), C, accumulate);
}
