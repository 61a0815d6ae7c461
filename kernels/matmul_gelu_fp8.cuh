// The two matrix products next to GELU, of e4m3 codes, with such codes as their result, on sm_90a:
//     forward   pre = inp W^T + bias,  out = gelu(pre)                      inp (N, K), W (COLS, K), bias (COLS)
//     backward  d = (dout W) * gelu'(pre),  dbias = column sums of d        dout (N, K), W by columns (COLS, K)
// pre is bf16 (N, COLS). out and d leave as codes by rows (N, COLS) and by columns (COLS, N), with their largest
// magnitude and how many saturated. That replaces a product and a cast (fp8.cuh), which computes the same: the product
// is rounded to bf16 before GELU or gelu' is taken of it, and the codes are those of the cast to the bit.
//
// Bytes per element of the result: forward writes 2 + 1 + 1, backward reads 2 and writes 1 + 1; a product and a cast
// move 6 and 8. At GPT-2 124M these bytes take longer than the product, so the block is divided: two warpgroups only
// multiply (gemm_sm90.cuh's steps), and two compute GELU, make codes and transpose them, 4 x 8 elements per thread at a
// time. The tile passes between them through shared memory in four panels of 64 columns, each with its own barriers, so
// that both sides always work. The two that make codes take turns at the panels: while one computes, the other stores.
//
// Tile 128 x 256, 64 rows a multiplying warpgroup, in two products of 128 columns: one of 256 would need more registers
// than a block of this size can be compiled with. Shared memory, 226 KB: 3 stages of A (128 x 128 codes) and B (256 x
// 128), 4 panels (128 x 64 bf16), two buffers of transposed codes (64 x 128), and 2 KB for the bias (forward) or the
// column sums of 8 warps (backward). Block of 512: 8 warps that multiply (168 registers), of which one thread orders
// the copies two steps ahead, and 8 that make codes (88). Blocks stay and walk over tiles as gemm_tile says.
//
// Deterministic: each sum runs over K in order (14 bits are kept of it), column sums over fixed rows (128, then
// column_sum.cuh).
#pragma once
#include "fp8.cuh"
#include "matmul_gelu.cuh"

constexpr int MQ_STAGES = 3, MQ_DEPTH = 128, MQ_PANEL_BYTES = GEMM_ROWS * PANEL_ROW_BYTES;
constexpr int MQ_PANELS = MQ_STAGES * GEMM_STAGE_BYTES;                   // offset of the panels
constexpr int MQ_WORDS = MQ_PANELS + GEMM_COLUMNS / 64 * MQ_PANEL_BYTES;  // of the transposed codes
constexpr int MQ_WORDS_BYTES = 64 * GEMM_ROWS;
constexpr int MQ_EXTRA = MQ_WORDS + 2 * MQ_WORDS_BYTES;
constexpr int MQ_BARRIERS = MQ_EXTRA + 2048;  // full and empty of each stage, then of each panel
constexpr int MQ_SHARED_BYTES = MQ_BARRIERS + (2 * MQ_STAGES + 8) * 8;
constexpr int MQ_THREADS = 512, MQ_TEAM = 128;  // of a block, and of each of the two teams that make codes

struct MatmulGeluFp8Maps {
    CUtensorMap a, b, pre;
};

// The arguments that both sides work with.
struct MatmulGeluFp8 {
    GemmShape shape;                            // its depth is in codes
    const bf16* bias;                           // (columns), forward
    const bf16* pre;                            // (rows, columns), backward
    float* partial;                             // (rows / 128, columns) column sums, backward
    uint8_t* transposed;                        // (columns, rows) codes
    Fp8Codes codes;                             // by rows
    const float *inverse_left, *inverse_right;  // device scalars
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ uint32_t mq_panel_full(uint32_t shared, int panel) {
    return shared + MQ_BARRIERS + (2 * MQ_STAGES + panel) * 8;
}
__device__ __forceinline__ uint32_t mq_panel_empty(uint32_t shared, int panel) {
    return shared + MQ_BARRIERS + (2 * MQ_STAGES + 4 + panel) * 8;
}

__device__ __forceinline__ int mq_steps(const GemmShape& shape) {
    return (shape.depth + MQ_DEPTH - 1) / MQ_DEPTH;
}

// The state of the thread that issues the TMA loads: the next step of this block's tiles, and its stage.
struct MatmulGeluFp8Loads {
    const MatmulGeluFp8Maps* maps;
    GemmStages<MQ_STAGES> stages;
    Ring<MQ_STAGES> ring;  // the stages begin empty
    int index, k;
};

// Loads the operands of the next step. The maps are those of bf16, so K counts pairs of codes.
__device__ __forceinline__ void mq_load(MatmulGeluFp8Loads& o, const GemmShape& shape) {
    if (o.index >= shape.tiles) return;
    const GemmTile tile = gemm_tile(o.index, shape);
    barrier_wait(o.stages.empty(o.ring.stage), o.ring.parity);
    gemm_load_step<0, 0, GEMM_COLUMNS>(o.stages.at(o.ring.stage), o.stages.full(o.ring.stage), &o.maps->a, &o.maps->b,
                                       tile.row, tile.column, 0, o.k, GEMM_COLUMNS);
    o.ring.advance();
    if (++o.k == mq_steps(shape)) o.k = 0, o.index += gridDim.x;
}

// A multiplying warpgroup's product of one tile, 64 x 256. When a step has ended, and its stage is free, the step after
// the next one is loaded into it.
__device__ __forceinline__ void mq_product(Gemm<MQ_STAGES>& g, const GemmShape& shape, MatmulGeluFp8Loads& loads) {
    const int steps = mq_steps(shape);
#pragma unroll 1
    for (g.k = 0; g.k < steps;) {
        gemm_start_step<uint8_t, 0, 0, GEMM_COLUMNS>(g);
        gemm_end_step(g);
        if (threadIdx.x == 0) mq_load(loads, shape);
        __syncwarp();
    }
    gemm_end_tile(g);
}

// A multiplying warpgroup: its 64 rows of all tiles of this block, as bf16 into the panels.
template <bool BACKWARD>
__device__ __forceinline__ void mq_multiply(uint32_t shared, const GemmStages<MQ_STAGES>& stages,
                                            const MatmulGeluFp8Maps* maps, const MatmulGeluFp8& w) {
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), group = warp / 4, lane = threadIdx.x % 32;
    const float unit = *w.inverse_left * *w.inverse_right;
    const uint32_t place = shared + MQ_PANELS + warp * 16 * PANEL_ROW_BYTES + panel_offset(lane % 16, lane / 16);
    MatmulGeluFp8Loads loads = {maps, stages, {0, 1}, (int)blockIdx.x, 0};
    for (int i = 0; i < MQ_STAGES - 1 && threadIdx.x == 0; i++) mq_load(loads, w.shape);
    __syncwarp();
    Gemm<MQ_STAGES> g;
    g.stages = stages, g.group = group, g.lane = lane, g.last = 0;
    uint32_t parity = 0;
    for (int index = blockIdx.x; index < w.shape.tiles; index += gridDim.x, parity ^= 1) {
        const uint32_t bias = shared + MQ_EXTRA + group * 1024 + parity * 512;
        uint32_t bias_pair = 0;
        if (!BACKWARD)
            bias_pair =
                *reinterpret_cast<const uint32_t*>(w.bias + gemm_tile(index, w.shape).column + threadIdx.x % 128 * 2);
        mq_product(g, w.shape, loads);
        if (!BACKWARD) mg_place_bias(bias, bias_pair, group);
#pragma unroll
        for (int panel = 0; panel < 4; panel++) {
            barrier_wait(mq_panel_empty(shared, panel), parity ^ 1);
#pragma unroll
            for (int n = panel * 8; n < panel * 8 + 8; n += 2) {
                uint32_t word[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float* pair = g.c[n + i / 2] + i % 2 * 2;
                    float2 add = {0.0f, 0.0f};
                    if (!BACKWARD) add = pair_floats(load_word(bias + (n + i / 2) * 16 + lane % 4 * 4));
                    word[i] = pack_bf16(fmaf(pair[0], unit, add.x), fmaf(pair[1], unit, add.y));
                }
                store_matrices((place ^ (uint32_t)(n % 8 << 4)) + panel * MQ_PANEL_BYTES, word[0], word[1], word[2],
                               word[3]);
            }
            fence_async();
            __syncwarp();
            if (lane == 0) barrier_arrive(mq_panel_full(shared, panel));
        }
    }
}

// The codes of 4 rows of 8 columns: by rows to memory, by columns as words of 4 rows into a buffer. `at`: of the first
// in the codes by rows. A word's place: neither the threads that write (8 eights of columns, 4 groups of rows) nor
// those that read (all groups of a column) meet in a bank.
__device__ __forceinline__ void mq_put(const MatmulGeluFp8& w, uint32_t* words, const uint2 (&codes)[4], int64_t at,
                                       int eight, int group) {
    uint32_t low[4], high[4];
#pragma unroll
    for (int r = 0; r < 4; r++) *(uint2*)(w.codes.rows + at + (int64_t)r * w.shape.columns) = codes[r];
    fp8_transpose(low, codes[0].x, codes[1].x, codes[2].x, codes[3].x);
    fp8_transpose(high, codes[0].y, codes[1].y, codes[2].y, codes[3].y);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        words[(eight * 8 + j) * 32 + (group ^ (eight * 4))] = low[j];
        words[(eight * 8 + 4 + j) * 32 + (group ^ (eight * 4))] = high[j];
    }
}

// A warp's sums of 64 columns over its rows, of which a thread has 8 over 8 of them.
__device__ __forceinline__ void mq_put_sums(float* sums, float (&sum)[8], int lane) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], 8);
        sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], 16);
    }
    if (lane >= 8) return;
#pragma unroll
    for (int j = 0; j < 8; j += 4)
        *(float4*)(sums + lane * 8 + j) = make_float4(sum[j], sum[j + 1], sum[j + 2], sum[j + 3]);
}

// Sends out a team's buffers: codes by columns of a panel, and backward the column sums of its 128 rows.
template <bool BACKWARD>
__device__ __forceinline__ void mq_send(const MatmulGeluFp8& w, const uint32_t* words, const float* sums, int row,
                                        int column, int thread) {
    const int warp = thread / 32, lane = thread % 32;
#pragma unroll 8
    for (int i = warp; i < 64; i += MQ_TEAM / 32) {
        uint32_t* to = (uint32_t*)(w.transposed + (int64_t)(column + i) * w.shape.rows + row);
        to[lane] = words[i * 32 + (lane ^ (i / 8 * 4))];
    }
    if (!BACKWARD || thread >= 64) return;
    const float total = (sums[thread] + sums[64 + thread]) + (sums[128 + thread] + sums[192 + thread]);
    w.partial[(int64_t)(row / GEMM_ROWS) * w.shape.columns + column + thread] = total;
}

// The state of a thread of a team, which has 8 columns of 4 rows of a panel, and of the 4 rows 64 further down.
struct MatmulGeluFp8Maker {
    int team, thread, eight, group;
    float scale;
    uint32_t* words;
    float* sums;
    Fp8Stats stats;
};

// The index in the result of the thread's first element.
__device__ __forceinline__ int64_t mq_place(const MatmulGeluFp8Maker& m, const MatmulGeluFp8& w, GemmTile tile,
                                            int panel, int half) {
    return (int64_t)(tile.row + 4 * (m.group + 16 * half)) * w.shape.columns + tile.column + panel * 64 + m.eight * 8;
}

// Backward: its part of a panel of pre.
__device__ __forceinline__ void mq_load_pre(Vec<bf16> (&pre)[8], const MatmulGeluFp8Maker& m, const MatmulGeluFp8& w,
                                            GemmTile tile, int panel) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bf16* from = w.pre + mq_place(m, w, tile, panel, half);
#pragma unroll
        for (int r = 0; r < 4; r++) pre[4 * half + r] = load_vec(from + (int64_t)r * w.shape.columns);
    }
}

// The codes of a panel, from shared memory at `from`, which is given back as soon as it is read, if `gives`.
template <bool BACKWARD>
__device__ __forceinline__ void mq_make_panel(MatmulGeluFp8Maker& m, const MatmulGeluFp8& w, const char* from,
                                              uint32_t empty, bool gives, const Vec<bf16> (&pre)[8], GemmTile tile,
                                              int panel) {
    constexpr Fp8Op OP = BACKWARD ? FP8_GELU_BACKWARD : FP8_GELU;
    float sum[8] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int group = m.group + 16 * half;
        Vec<bf16> x[4];
#pragma unroll
        for (int r = 0; r < 4; r++) x[r] = *(const Vec<bf16>*)(from + panel_offset(4 * group + r, m.eight));
        if (half == 1) {
            __syncwarp();
            if (gives) barrier_arrive(empty);
        }
        uint2 codes[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float value[8];
            fp8_values<OP>(value, x[r], pre[4 * half + r]);
#pragma unroll
            for (int j = 0; j < 8 && BACKWARD; j++) sum[j] += value[j];
            codes[r] = fp8_codes(value, m.scale, &m.stats);
        }
        mq_put(w, m.words, codes, mq_place(m, w, tile, panel, half), m.eight, group);
    }
    if (BACKWARD) mq_put_sums(m.sums + m.thread / 32 * 64, sum, m.thread % 32);
}

// A team that makes codes: two panels of all tiles of this block. Backward, what it needs of pre is on its way while
// the panel before leaves.
template <bool BACKWARD>
__device__ __forceinline__ void mq_make_codes(uint32_t shared, char* memory, const MatmulGeluFp8Maps* maps,
                                              const MatmulGeluFp8& w) {
    const int thread = threadIdx.x % MQ_TEAM, team = __shfl_sync(0xffffffffu, (int)threadIdx.x / MQ_TEAM % 2, 0);
    MatmulGeluFp8Maker m = {team,
                            thread,
                            thread % 8,
                            thread / 8,
                            *w.codes.scale,
                            (uint32_t*)(memory + MQ_WORDS + team * MQ_WORDS_BYTES),
                            (float*)(memory + MQ_EXTRA) + team * 256,
                            {}};
    // The warp whose thread 0 orders a panel's way to memory waits for it before it gives the panel back.
    const bool first = thread % 32 == 0, waits = !BACKWARD && thread < 32;
    Vec<bf16> pre[8] = {};
    uint32_t parity = 0;
    GemmTile tile = gemm_tile(blockIdx.x, w.shape);
    if (BACKWARD) mq_load_pre(pre, m, w, tile, team);
    for (int index = blockIdx.x; index < w.shape.tiles; index += gridDim.x, parity ^= 1) {
        const int after = index + (int)gridDim.x;
        const GemmTile next = after < w.shape.tiles ? gemm_tile(after, w.shape) : tile;
#pragma unroll 1
        for (int panel = team; panel < 4; panel += 2) {
            const uint32_t offset = MQ_PANELS + panel * MQ_PANEL_BYTES, empty = mq_panel_empty(shared, panel);
            barrier_wait(mq_panel_full(shared, panel), parity);
            if (!BACKWARD && thread == 0) {
                tensor_store(&maps->pre, shared + offset, tile.column + panel * 64, tile.row, 0);
                store_commit();
            }
            mq_make_panel<BACKWARD>(m, w, memory + offset, empty, first && !waits, pre, tile, panel);
            if (BACKWARD) mq_load_pre(pre, m, w, panel < 2 ? tile : next, panel < 2 ? panel + 2 : team);
            group_sync(3 + team, MQ_TEAM);
            mq_send<BACKWARD>(w, m.words, m.sums, tile.row, tile.column + panel * 64, thread);
            if (first && waits) store_wait_read<0>(), barrier_arrive(empty);
            group_sync(3 + team, MQ_TEAM);  // the buffers have been read
        }
        tile = next;
    }
    publish_warp_amax(w.codes, m.stats);
}

#endif

// Grid at most the tiles, block MQ_THREADS, shared memory MQ_SHARED_BYTES; rows a multiple of 128, columns of 256,
// depth of 16. Deterministic.
template <bool BACKWARD>
__global__ void __launch_bounds__(MQ_THREADS, 1)
    matmul_gelu_fp8_kernel(const __grid_constant__ MatmulGeluFp8Maps maps, const __grid_constant__ MatmulGeluFp8 w) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char matmul_gelu_shared[];
    const uint32_t shared = shared_offset(matmul_gelu_shared);
    const bool makes = __shfl_sync(0xffffffffu, (int)threadIdx.x / 256, 0) == 1;
    const GemmStages<MQ_STAGES> stages = {shared, shared + MQ_BARRIERS};
    if (threadIdx.x == 0) {
        stages.init();
        for (int i = 0; i < 4; i++) {
            barrier_init(mq_panel_full(shared, i), 8);
            barrier_init(mq_panel_empty(shared, i), MQ_TEAM / 32);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (makes) {
        registers_shrink<88>();
        mq_make_codes<BACKWARD>(shared, (char*)matmul_gelu_shared, &maps, w);
    } else {
        registers_grow<168>();
        mq_multiply<BACKWARD>(shared, stages, &maps, w);
    }
#else
    (void)maps, (void)w;
#endif
}

// True if these kernels run here and the result has tiles for every multiprocessor.
inline bool matmul_gelu_fp8_fits(const Device* dev, int64_t rows, int columns, int depth) {
    return hopper_runs(dev, matmul_gelu_kernel<true>) && gemm_fits(dev, rows, columns, MQ_SHARED_BYTES) &&
           rows % GEMM_ROWS == 0 && columns % GEMM_COLUMNS == 0 && depth % 16 == 0;
}

// pre: (N, OC) bf16, and the codes of out: gelu(pre), from codes inp: (N, C) and weight: (OC, C); bias: (OC) bf16.
// matmul_gelu_fp8_fits(dev, N, OC, C) must hold.
inline void matmul_gelu_fp8_forward(const Device* dev, const Operand<bf16>* out, bf16* pre, Fp8Factor inp,
                                    Fp8Factor weight, const bf16* bias, int64_t N, int C, int OC) {
    const MatmulGeluFp8Maps maps = {tensor_map(inp.codes, 1, N, C / 2, GEMM_ROWS),
                                    tensor_map(weight.codes, 1, OC, C / 2, GEMM_COLUMNS),
                                    tensor_map(pre, 1, N, OC, GEMM_ROWS)};
    const MatmulGeluFp8 work = {gemm_shape(N, OC, C), bias,          nullptr,         nullptr, out->columns,
                                operand_codes(out),   inp.scale_inv, weight.scale_inv};
    launch_kernel(dev, matmul_gelu_fp8_kernel<false>, dev->sm_count, MQ_THREADS, MQ_SHARED_BYTES, maps, work);
}

// The codes of d = (dout W) * gelu'(pre); dbias: (C) (+)= the column sums of d; scratch: matmul_gelu_scratch_bytes;
// dout: (N, OC) codes; weight: (C, OC), codes of W by columns; pre: (N, C). matmul_gelu_fp8_fits(dev, N, C, OC) holds.
template <typename G>
void matmul_gelu_fp8_backward(const Device* dev, const Operand<bf16>* d, G* dbias, float* scratch, Fp8Factor dout,
                              Fp8Factor weight, const bf16* pre, int64_t N, int C, int OC, bool accumulate) {
    const MatmulGeluFp8Maps maps = {tensor_map(dout.codes, 1, N, OC / 2, GEMM_ROWS),
                                    tensor_map(weight.codes, 1, C, OC / 2, GEMM_COLUMNS),
                                    tensor_map(pre, 1, N, C, GEMM_ROWS)};
    const MatmulGeluFp8 work = {gemm_shape(N, C, OC), nullptr,         pre, scratch, d->columns, operand_codes(d),
                                dout.scale_inv,       weight.scale_inv};
    launch_kernel(dev, matmul_gelu_fp8_kernel<true>, dev->sm_count, MQ_THREADS, MQ_SHARED_BYTES, maps, work);
    column_sum(dev, &dbias, 1, scratch, (int)(N / GEMM_ROWS), C, accumulate);
}
