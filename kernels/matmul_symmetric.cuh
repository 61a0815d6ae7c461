// The products of Newton-Schulz (optim/matrix/newton_schulz.cuh), most of whose results are symmetric. For each of
// `batch` matrices, row-major and one after another without gaps:
//     d = alpha op(a) op(b) + beta c + gamma I          op(a) (rows, depth), op(b) (depth, cols), c and d (rows, cols)
// If the result is symmetric, the elements on and below the diagonal are computed; the others mirror them. The
// plain C version, in fp32, defines that. On a GPU elements are fp16 and sums fp32.
//
// Kernel for sm_90a: half the work of a symmetric result is left out. Its tiles are 128 x 256: a tile whose right half
// lies above the diagonal multiplies the left half alone, so 128 x 128 is the grain (21 of 36 squares at 768, 91 of 169
// at 1600). A tile below the diagonal is written twice, as it is and transposed. Blocks stay and take tiles by turns,
// all whole tiles of a launch first and then all halves, in an order that turns back at each end (0 1 2 2 1 0 0 ...),
// so that blocks which took one more before take one less after: with 24 matrices of 768 a launch lasts two tiles.
//
// A warpgroup (64 x 256 sums of a tile) does as in matmul_gelu.cuh: it rounds a finished tile to fp16, in half as many
// registers, and sends it out in eight chunks of 32 columns between the steps in K of the next tile, while the tensor
// cores work. The registers that a chunk leaves receive c of the tile at hand. Shared memory: 4 stages of a (128 x 64)
// and b (256 x 64), and for each warpgroup a panel of 64 x 64 for results and one for their mirror images. Block of
// 384: one thread that orders copies and two warpgroups that multiply. Newton-Schulz is a chain of some fifteen short
// launches, so the next one's blocks are placed while this one's end, and wait there for its results (programmatic
// dependent launch). Deterministic; a matrix's bits do not depend on the others in its launch.
//
// Where that kernel does not run (other GPUs, or K below 449) the library multiplies all of it, and gamma I is added by
// a kernel of its own, which rounds once more.
#pragma once
#include "common.cuh"
#include "matmul_product.cuh"
#ifdef __CUDACC__
#include "hopper.cuh"
#endif

struct SymmetricProduct {
    int64_t rows, cols, depth;
    bool transpose_a, transpose_b;  // the operand lies in memory as (depth, rows) or (cols, depth)
    float alpha, beta, gamma;
    bool symmetric;  // the result is
    int64_t batch;
};

inline MatmulProduct symmetric_as_plain(const SymmetricProduct* p) {
    return {p->rows, p->cols,  p->depth,           p->transpose_a,     p->transpose_b,   p->alpha,
            p->beta, p->batch, p->rows * p->depth, p->depth * p->cols, p->rows * p->cols};
}

inline void symmetric_product_cpu(const SymmetricProduct* p, float* d, const float* a, const float* b, const float* c) {
    const MatmulProduct plain = symmetric_as_plain(p);
    matmul_product_cpu(&plain, d, a, b, c);
    for (int64_t m = 0; m < p->batch; m++, d += p->rows * p->cols) {
        for (int64_t i = 0; i < p->rows && i < p->cols; i++) d[i * p->cols + i] += p->gamma;
        for (int64_t i = 0; p->symmetric && i < p->rows; i++) {
            for (int64_t j = 0; j < i; j++) d[j * p->cols + i] = d[i * p->cols + j];
        }
    }
}

// The numbers of a launch's tiles.

constexpr int SP_ROWS = 128, SP_COLUMNS = 256, SP_HALF = 128;

struct SymmetricShape {
    int rows, columns, depth, batch;
    int symmetric;
    int down, across;  // rows of tiles, and whole tiles in a row, of a result that is not symmetric
    int whole, half;   // tiles of a matrix: of SP_COLUMNS columns, and of the left SP_HALF of these
};

struct SymmetricTile {
    int matrix, row, column;  // of its first element
    int half;
};

inline SymmetricShape symmetric_shape(const SymmetricProduct* p) {
    SymmetricShape s = {(int)p->rows, (int)p->cols, (int)p->depth, (int)p->batch, p->symmetric, 0, 0, 0, 0};
    const int rest = s.columns % SP_COLUMNS;
    s.down = (int)ceil_div(p->rows, SP_ROWS);
    s.across = s.columns / SP_COLUMNS + (rest > SP_HALF);
    s.whole = s.down * s.across, s.half = rest > 0 && rest <= SP_HALF ? s.down : 0;
    if (!s.symmetric) return s;
    s.whole = 0, s.half = (s.down + 1) / 2;
    for (int row = 0; row < s.down; row++) s.whole += (row + 1) / 2;
    return s;
}

#ifdef __CUDACC__
__host__ __device__
#endif
    inline SymmetricTile
    symmetric_tile(int index, const SymmetricShape& s) {
    const int all = s.whole * s.batch;
    if (index >= all) {
        const int i = (index - all) % s.half, matrix = (index - all) / s.half;
        if (s.symmetric) return {matrix, 2 * i * SP_ROWS, i * SP_COLUMNS, 1};
        return {matrix, i * SP_ROWS, s.across * SP_COLUMNS, 1};
    }
    int i = index % s.whole;
    const int matrix = index / s.whole;
    if (!s.symmetric) return {matrix, i % s.down * SP_ROWS, i / s.down * SP_COLUMNS, 0};
    int row = 1;
    while (i >= (row + 1) / 2) i -= (row + 1) / 2, row++;
    return {matrix, row * SP_ROWS, i * SP_COLUMNS, 0};
}

// The number of a block's tile in a round.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline int
    symmetric_index(int round, int block, int blocks) {
    return round * blocks + (round % 2 ? blocks - 1 - block : block);
}

#ifdef __CUDACC__
constexpr int SP_DEPTH = 64, SP_STAGES = 4, SP_CHUNKS = SP_COLUMNS / 32;
constexpr int SP_A_BYTES = SP_ROWS * SP_DEPTH * 2, SP_STAGE_BYTES = SP_A_BYTES + SP_COLUMNS * SP_DEPTH * 2;
constexpr int SP_PANEL_BYTES = 64 * PANEL_ROW_BYTES;
constexpr int SP_PANELS = SP_STAGES * SP_STAGE_BYTES;        // offset: two for each warpgroup
constexpr int SP_BARRIERS = SP_PANELS + 4 * SP_PANEL_BYTES;  // full and empty of each stage
constexpr int SP_SHARED_BYTES = SP_BARRIERS + SP_STAGES * 16;
constexpr int SP_LEAST_DEPTH = (SP_CHUNKS - 1) * SP_DEPTH + 1;  // a step in K for each chunk

struct SymmetricMaps {
    CUtensorMap a, b, d;
};

struct SymmetricFactors {
    float alpha, beta, gamma;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ uint32_t sp_full(uint32_t shared, int stage) {
    return shared + SP_BARRIERS + stage * 8;
}
__device__ __forceinline__ uint32_t sp_empty(uint32_t shared, int stage) {
    return shared + SP_BARRIERS + (SP_STAGES + stage) * 8;
}

// One thread: orders the operands of all tiles of this block, stage after stage. An operand whose rows are not along K
// (MN) comes as panels of 64 columns.
template <int A_MN, int B_MN>
__device__ __forceinline__ void sp_produce(uint32_t shared, const SymmetricMaps* maps, SymmetricShape s) {
    uint32_t turn = 0;  // of all steps; the stages begin empty
    const int steps = (s.depth + SP_DEPTH - 1) / SP_DEPTH, tiles = (s.whole + s.half) * s.batch;
    for (int round = 0;; round++) {
        const int index = symmetric_index(round, blockIdx.x, gridDim.x);
        if (index >= tiles) return;
        const SymmetricTile tile = symmetric_tile(index, s);
        const int columns = tile.half ? SP_HALF : SP_COLUMNS;
        for (int k = 0; k < steps; k++, turn++) {
            const uint32_t stage = turn % SP_STAGES, full = sp_full(shared, stage), a = shared + stage * SP_STAGE_BYTES,
                           b = a + SP_A_BYTES;
            barrier_wait(sp_empty(shared, stage), (turn / SP_STAGES + 1) % 2);
            barrier_expect(full, SP_A_BYTES + columns * SP_DEPTH * 2);
            const int step = A_MN ? 64 : SP_ROWS, step_b = B_MN ? 64 : SP_HALF;
            for (int i = 0; i < SP_ROWS; i += step) {
                tensor_load(a + i * PANEL_ROW_BYTES, &maps->a, full, A_MN ? tile.row + i : k * SP_DEPTH,
                            A_MN ? k * SP_DEPTH : tile.row + i, tile.matrix);
            }
            for (int i = 0; i < columns; i += step_b) {
                tensor_load(b + i * PANEL_ROW_BYTES, &maps->b, full, B_MN ? tile.column + i : k * SP_DEPTH,
                            B_MN ? k * SP_DEPTH : tile.column + i, tile.matrix);
            }
        }
    }
}

// The state of a thread in a warpgroup that multiplies.
struct SymmetricWork {
    const SymmetricMaps* maps;
    SymmetricShape shape;
    SymmetricFactors factors;
    const __half* c;               // or null
    uint32_t shared, panel;        // panel: the warpgroup's two, results and mirror images
    uint32_t place, mirror_place;  // this lane's addresses for the matrices of column 0
    int group, warp, lane;
    uint32_t turn;                     // number of the step among all of this block
    int k;                             // of the tile
    SymmetricTile before, tile;        // multiplied, being multiplied
    float sum[SP_COLUMNS / 8][4];      // [n] are columns 8 n + 2 (lane % 4) and the next, of two rows
    uint32_t held[SP_COLUMNS / 8][2];  // the tile before; then c of this one
};

// True if none of a tile's rows is this warpgroup's, as of the tile before the first one.
__device__ __forceinline__ bool sp_is_idle(const SymmetricWork& w, const SymmetricTile& tile) {
    return tile.row + w.group * 64 >= w.shape.rows;
}

// Starts the next step of the tile's product, of its first COLUMNS columns.
template <int A_MN, int B_MN, int COLUMNS>
__device__ __forceinline__ void sp_start_step(SymmetricWork& w) {
    const uint32_t stage = w.turn % SP_STAGES, a = w.shared + stage * SP_STAGE_BYTES + w.group * SP_PANEL_BYTES,
                   b = w.shared + stage * SP_STAGE_BYTES + SP_A_BYTES;
    const uint64_t left = uniform_operand(A_MN ? operand_mn_major<SP_DEPTH>(a, 0) : operand_k_major<SP_ROWS>(a, 0));
    const uint64_t right = uniform_operand(B_MN ? operand_mn_major<SP_DEPTH>(b, 0) : operand_k_major<SP_COLUMNS>(b, 0));
    float(&sum)[COLUMNS / 8][4] = *reinterpret_cast<float(*)[COLUMNS / 8][4]>(&w.sum);
    barrier_wait(sp_full(w.shared, stage), w.turn / SP_STAGES % 2);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < SP_DEPTH / 16; j++) {
        Wgmma<COLUMNS, __half>::template shared<A_MN, B_MN>(
            sum, operand_step(left, j * (A_MN ? 16 * PANEL_ROW_BYTES : 32)),
            operand_step(right, j * (B_MN ? 16 * PANEL_ROW_BYTES : 32)), w.k > 0 || j > 0);
    }
    wgmma_commit();
}

// This warp has multiplied with the stage of the step before.
__device__ __forceinline__ void sp_give_back(const SymmetricWork& w) {
    if (w.lane == 0) barrier_arrive(sp_empty(w.shared, (w.turn - 1) % SP_STAGES));
}

// Ends the step before the one that was started.
__device__ __forceinline__ void sp_end_step(SymmetricWork& w) {
    wgmma_wait<1>();
    if (w.k > 0) sp_give_back(w);
    w.turn++, w.k++;
}

// Chunk C of the tile before: into the panels, and every other chunk out.
template <int C>
__device__ __forceinline__ void sp_deliver(SymmetricWork& w) {
    if (sp_is_idle(w, w.before) || (w.before.half && C >= SP_CHUNKS / 2)) return;
    const int row = w.before.row + w.group * 64, column = w.before.column + C / 2 * 64;
    const bool mirrored = w.shape.symmetric && column / SP_ROWS < w.before.row / SP_ROWS;
    const bool first = threadIdx.x % 128 == 0;
    if (C % 2 == 0) {
        if (first) store_wait_read<0>();
        group_sync(1 + w.group, 128);
    }
#pragma unroll
    for (int n = 4 * C; n < 4 * C + 4; n += 2) {
        const uint32_t x[4] = {w.held[n][0], w.held[n][1], w.held[n + 1][0], w.held[n + 1][1]};
        store_matrices(w.place ^ (uint32_t)(n % 8 << 4), x[0], x[1], x[2], x[3]);
        if (mirrored) store_matrices_transposed(w.mirror_place + n % 8 * 1024, x[0], x[1], x[2], x[3]);
    }
    if (C % 2 == 0) return;
    fence_async();
    group_sync(1 + w.group, 128);
    if (!first) return;
    tensor_store(&w.maps->d, w.panel, column, row, w.before.matrix);
    if (mirrored) tensor_store(&w.maps->d, w.panel + SP_PANEL_BYTES, row, column, w.before.matrix);
    store_commit();
}

// Asks for chunk C of this tile's c.
template <int C>
__device__ __forceinline__ void sp_fetch(SymmetricWork& w) {
    if (!w.c || (w.tile.half && C >= SP_CHUNKS / 2)) return;
    const int row = w.tile.row + w.group * 64 + w.warp * 16 + w.lane / 4;
    const int column = w.tile.column + C * 32 + w.lane % 4 * 2;
    const __half* from = w.c + ((int64_t)w.tile.matrix * w.shape.rows + row) * w.shape.columns + column;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool inside = column + 8 * i < w.shape.columns;
        w.held[4 * C + i][0] = inside && row < w.shape.rows ? __ldcg((const uint32_t*)(from + 8 * i)) : 0;
        w.held[4 * C + i][1] =
            inside && row + 8 < w.shape.rows ? __ldcg((const uint32_t*)(from + 8 * w.shape.columns + 8 * i)) : 0;
    }
}

// The first steps of a tile's product, each with a chunk of the tile before it.
template <int A_MN, int B_MN, int COLUMNS, int C>
__device__ __forceinline__ void sp_steps(SymmetricWork& w) {
    if constexpr (C < SP_CHUNKS) {
        sp_start_step<A_MN, B_MN, COLUMNS>(w);
        sp_end_step(w);
        sp_deliver<C>(w);
        if constexpr (!A_MN && !B_MN) sp_fetch<C>(w);
        sp_steps<A_MN, B_MN, COLUMNS, C + 1>(w);
    }
}

template <int C>
__device__ __forceinline__ void sp_deliver_last(SymmetricWork& w) {
    if constexpr (C < SP_CHUNKS) {
        sp_deliver<C>(w);
        sp_deliver_last<C + 1>(w);
    }
}

__device__ __forceinline__ float2 sp_floats(uint32_t pair) {
    return __half22float2(*reinterpret_cast<__half2*>(&pair));
}

__device__ __forceinline__ uint32_t sp_pack(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
}

// The product is complete: what is held of it, in fp16.
template <bool HAS_C>
__device__ __forceinline__ void sp_finish(SymmetricWork& w) {
    const SymmetricFactors f = w.factors;
    // Column 8 n of this thread lies `off` - 8 n to the left of the diagonal in its upper row, and 8 more in its lower.
    const int off = w.tile.row - w.tile.column + w.group * 64 + w.warp * 16 + w.lane / 4 - w.lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < SP_COLUMNS / 8; n++) {
        const float2 none = make_float2(0.0f, 0.0f);
        const bool there = HAS_C && w.c;
        const float2 upper = there ? sp_floats(w.held[n][0]) : none, lower = there ? sp_floats(w.held[n][1]) : none;
        const float* s = w.sum[n];
        w.held[n][0] = sp_pack(fmaf(f.alpha, s[0], fmaf(f.beta, upper.x, off == 8 * n ? f.gamma : 0.0f)),
                               fmaf(f.alpha, s[1], fmaf(f.beta, upper.y, off == 8 * n + 1 ? f.gamma : 0.0f)));
        w.held[n][1] = sp_pack(fmaf(f.alpha, s[2], fmaf(f.beta, lower.x, off + 8 == 8 * n ? f.gamma : 0.0f)),
                               fmaf(f.alpha, s[3], fmaf(f.beta, lower.y, off + 8 == 8 * n + 1 ? f.gamma : 0.0f)));
    }
}

// A tile's product, while the tile before is sent out.
template <int A_MN, int B_MN, int COLUMNS>
__device__ __forceinline__ void sp_product(SymmetricWork& w, int steps) {
    sp_steps<A_MN, B_MN, COLUMNS, 0>(w);
    while (w.k < steps) {
        sp_start_step<A_MN, B_MN, COLUMNS>(w);
        sp_end_step(w);
    }
    wgmma_wait<0>();
    wgmma_hold(w.sum);
    sp_give_back(w);
}

// Passes the stages of a tile of which this warpgroup has no row.
__device__ __forceinline__ void sp_pass(SymmetricWork& w, int steps) {
    for (; w.k < steps; w.k++) {
        barrier_wait(sp_full(w.shared, w.turn % SP_STAGES), w.turn / SP_STAGES % 2);
        w.turn++;
        sp_give_back(w);
    }
}

// A warpgroup: its 64 rows of all tiles of this block.
template <int A_MN, int B_MN>
__device__ __forceinline__ void sp_consume(SymmetricWork& w) {
    const int steps = (w.shape.depth + SP_DEPTH - 1) / SP_DEPTH, tiles = (w.shape.whole + w.shape.half) * w.shape.batch;
    for (int round = 0;; round++) {
        const int index = symmetric_index(round, blockIdx.x, gridDim.x);
        if (index >= tiles) break;
        w.tile = symmetric_tile(index, w.shape);
        w.k = 0;
        if (sp_is_idle(w, w.tile)) {
            sp_deliver_last<0>(w);
            sp_pass(w, steps);
        } else {
            if (w.tile.half)
                sp_product<A_MN, B_MN, SP_HALF>(w, steps);
            else
                sp_product<A_MN, B_MN, SP_COLUMNS>(w, steps);
            sp_finish<!A_MN && !B_MN>(w);
        }
        w.before = w.tile;
    }
    sp_deliver_last<0>(w);
    if (threadIdx.x % 128 == 0) store_wait_read<0>();
}

#endif

// Grid at most the tiles, block 384, shared memory SP_SHARED_BYTES; columns and depth multiples of 8, depth at least
// SP_LEAST_DEPTH. A_MN, B_MN: a is transposed, b is not. c: null if beta is 0, as it is with A_MN or B_MN.
// Deterministic.
template <int A_MN, int B_MN>
__global__ void __launch_bounds__(384, 1)
    symmetric_product_kernel(const __grid_constant__ SymmetricMaps maps, SymmetricShape shape, SymmetricFactors factors,
                             const __half* c) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char symmetric_shared[];
    const uint32_t shared = shared_offset(symmetric_shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < SP_STAGES; i++) {
            barrier_init(sp_full(shared, i), 1);
            barrier_init(sp_empty(shared, i), 8);  // a thread of each warp that multiplies
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_shrink<24>();
        launch_next();
        wait_for_last();  // the others wait for what this thread orders
        if (threadIdx.x == 0) sp_produce<A_MN, B_MN>(shared, &maps, shape);
        return;
    }
    registers_grow<240>();
    SymmetricWork w = {};
    w.maps = &maps, w.shape = shape, w.factors = factors, w.c = c, w.shared = shared;
    w.before.row = shape.rows;
    w.lane = threadIdx.x % 32;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32 - 4, 0);
    w.group = warp / 4, w.warp = warp % 4;
    w.panel = shared + SP_PANELS + w.group * 2 * SP_PANEL_BYTES;
    w.place = w.panel + panel_offset(w.warp * 16 + w.lane % 16, w.lane / 16);
    w.mirror_place = w.panel + SP_PANEL_BYTES + panel_offset(w.lane / 16 * 8 + w.lane % 8, w.warp * 2 + w.lane / 8 % 2);
    sp_consume<A_MN, B_MN>(w);
#else
    (void)maps, (void)shape, (void)factors, (void)c;
#endif
}

// Adds gamma to the diagonals. grid any, block 256.
static __global__ void symmetric_diagonal_kernel(__half* d, int64_t rows, int64_t cols, int64_t batch, float gamma) {
    const int64_t side = rows < cols ? rows : cols;
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < side * batch; i += 256ll * gridDim.x) {
        __half* at = d + i / side * rows * cols + i % side * (cols + 1);
        *at = __float2half_rn(__half2float(*at) + gamma);
    }
}

// True if our kernel runs here. The batch has no say, since bits may not depend on it. c goes with one kind of product
// alone, so that the others keep within their registers.
inline bool symmetric_product_fits(const Device* dev, const SymmetricProduct* p) {
    static const bool built = hopper_kernel_is_built(symmetric_product_kernel<0, 0>);
    return built && dev->compute == 90 && dev->shared_memory >= SP_SHARED_BYTES && p->cols % 8 == 0 &&
           p->depth % 8 == 0 && p->rows % 8 == 0 && p->depth >= SP_LEAST_DEPTH && p->rows < 1 << 20 &&
           p->cols < 1 << 20 && (p->beta == 0.0f || (!p->transpose_a && p->transpose_b));
}

template <int A_MN, int B_MN>
void symmetric_product_launch(const Device* dev, const SymmetricProduct* p, __half* d, const __half* a, const __half* b,
                              const __half* c) {
    auto kernel = symmetric_product_kernel<A_MN, B_MN>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SP_SHARED_BYTES));
    // Maps of bf16: the copy engine moves two bytes an element, whatever they mean, and writes zeros past the end.
    const SymmetricMaps maps = {
        tensor_map(a, p->batch, A_MN ? p->depth : p->rows, A_MN ? p->rows : p->depth, A_MN ? SP_DEPTH : SP_ROWS),
        tensor_map(b, p->batch, B_MN ? p->depth : p->cols, B_MN ? p->cols : p->depth, B_MN ? SP_DEPTH : SP_HALF),
        tensor_map(d, p->batch, p->rows, p->cols, 64)};
    const SymmetricShape shape = symmetric_shape(p);
    const int64_t tiles = (int64_t)(shape.whole + shape.half) * shape.batch;
    assert(tiles < 1 << 30);
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(tiles < dev->sm_count ? tiles : dev->sm_count)), config.blockDim = dim3(384);
    config.dynamicSmemBytes = SP_SHARED_BYTES, config.stream = dev->stream;
    config.attrs = &early, config.numAttrs = 1;
    const SymmetricFactors factors = {p->alpha, p->beta, p->gamma};
    check(cudaLaunchKernelEx(&config, kernel, maps, shape, factors, p->beta != 0.0f ? c : (const __half*)nullptr));
}

inline void symmetric_product_library(const Device* dev, const SymmetricProduct* p, __half* d, const __half* a,
                                      const __half* b, const __half* c) {
    const MatmulProduct plain = symmetric_as_plain(p);
    matmul_product<__half, __half>(dev, &plain, d, a, b, c);
    if (p->gamma == 0.0f) return;
    const int64_t blocks = ceil_div((p->rows < p->cols ? p->rows : p->cols) * p->batch, 256);
    symmetric_diagonal_kernel<<<(unsigned)(blocks < 4096 ? blocks : 4096), 256, 0, dev->stream>>>(d, p->rows, p->cols,
                                                                                                  p->batch, p->gamma);
    check_launch();
}

// Launches the product on a GPU. d is none of the others. Dimensions are multiples of 8.
inline void symmetric_product(const Device* dev, const SymmetricProduct* p, __half* d, const __half* a, const __half* b,
                              const __half* c) {
    if (p->batch == 0) return;
    if (!symmetric_product_fits(dev, p) || (p->transpose_a && p->transpose_b))
        return symmetric_product_library(dev, p, d, a, b, c);
    if (p->transpose_a)
        symmetric_product_launch<1, 1>(dev, p, d, a, b, c);
    else if (p->transpose_b)
        symmetric_product_launch<0, 0>(dev, p, d, a, b, c);
    else
        symmetric_product_launch<0, 1>(dev, p, d, a, b, c);
}
#endif
