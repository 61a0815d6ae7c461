// The products of Newton-Schulz (optim/matrix/newton_schulz.cuh), most of whose results are symmetric. For each of
// `batch` matrices
//     d = alpha a op(b) + beta c + gamma I                                     (MatmulProduct; a is not transposed)
// If the result is symmetric, the elements on and below the diagonal are computed; the others mirror them. The
// plain C version, in fp32, defines that. On a GPU elements are fp16 and sums fp32.
//
// Kernel for sm_90a: half the work of a symmetric result is left out. Its tiles are 128 x 256: a tile whose right half
// lies above the diagonal multiplies the left half alone, so 128 x 128 is the grain (21 of 36 squares at 768, 91 of 169
// at 1600). A tile below the diagonal is written twice, as it is and transposed.
//
// The loop is gemm_sm90.cuh's, in fp16. The registers that a delivered chunk leaves receive c of the tile at hand.
// Shared memory: 4 stages, and for each warpgroup a panel of 64 x 64 for results and one for their mirror images. Block
// of 384: one thread loads operands, two warps send panels out, and two warpgroups multiply. Blocks stay, and all of a
// block's warps walk over the same tiles. Deterministic.
//
// Where that kernel does not run (other GPUs, or K below 449) the library multiplies all of it, and gamma I is added by
// a kernel of its own, which rounds once more.
#pragma once
#include "common.cuh"
#include "matmul_product.cuh"
#ifdef __CUDACC__
#include "gemm_sm90.cuh"
#endif

inline void symmetric_product_cpu(const MatmulProduct* p, float* d, const float* a, const float* b, const float* c) {
    matmul_product_cpu(p, d, a, b, c);
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
    int tiles;         // of all matrices: half tiles come last, so that they fill the last wave of thread blocks
};

struct SymmetricTile {
    int matrix, row, column;  // of its first element
    int half;                 // only the left SP_HALF columns are computed

    __host__ __device__ int columns() const { return half ? SP_HALF : SP_COLUMNS; }
};

inline SymmetricShape symmetric_shape(const MatmulProduct* p) {
    SymmetricShape s = {};
    s.rows = (int)p->rows, s.columns = (int)p->cols, s.depth = (int)p->depth, s.batch = (int)p->batch;
    s.symmetric = p->symmetric, s.down = (int)ceil_div(p->rows, SP_ROWS);
    if (s.symmetric) {
        s.half = (s.down + 1) / 2;
        for (int row = 0; row < s.down; row++) s.whole += (row + 1) / 2;
    } else {
        const int rest = s.columns % SP_COLUMNS;
        s.across = s.columns / SP_COLUMNS + (rest > SP_HALF);
        s.whole = s.down * s.across, s.half = rest > 0 && rest <= SP_HALF ? s.down : 0;
    }
    s.tiles = (s.whole + s.half) * s.batch;
    return s;
}

__host__ __device__ inline SymmetricTile gemm_tile(int index, const SymmetricShape& s) {
    const int behind = index - s.whole * s.batch, matrix = behind < 0 ? index / s.whole : behind / s.half;
    if (behind >= 0) {
        const int row = behind % s.half;
        if (s.symmetric) return {matrix, 2 * row * SP_ROWS, row * SP_COLUMNS, 1};
        return {matrix, row * SP_ROWS, s.across * SP_COLUMNS, 1};
    }
    int i = index % s.whole;
    if (!s.symmetric) return {matrix, i % s.down * SP_ROWS, i / s.down * SP_COLUMNS, 0};
    int row = 1;
    while (i >= (row + 1) / 2) i -= (row + 1) / 2, row++;
    return {matrix, row * SP_ROWS, i * SP_COLUMNS, 0};
}

#ifdef __CUDACC__
constexpr int SP_STAGES = 4, SP_PANEL_BYTES = 64 * PANEL_ROW_BYTES;
constexpr int SP_PANELS = SP_STAGES * GEMM_STAGE_BYTES;      // offset: two for each warpgroup
constexpr int SP_BARRIERS = SP_PANELS + 4 * SP_PANEL_BYTES;  // of the stages
constexpr int SP_SHARED_BYTES = SP_BARRIERS + SP_STAGES * 16;

// The kernel's argument.
struct SymmetricLaunch {
    CUtensorMap a, b, d;
    SymmetricShape shape;
    float alpha, beta, gamma;
    const __half* c;  // null if beta is 0
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Returns how many of the first panels of a tile have mirror images.
__device__ __forceinline__ int sp_mirrored(const SymmetricShape& s, const SymmetricTile& t) {
    const int left = (t.row / SP_ROWS - t.column / SP_ROWS) * 2;
    return !s.symmetric ? 0 : left < t.columns() / 64 ? left : t.columns() / 64;
}

// For each warpgroup one warp sends its panels out.
__device__ __forceinline__ void sp_send(uint32_t shared, const SymmetricLaunch& l, int group) {
    const uint32_t panel = shared + SP_PANELS + group * 2 * SP_PANEL_BYTES;
    for (int index = blockIdx.x; index < l.shape.tiles; index += gridDim.x) {
        const SymmetricTile t = gemm_tile(index, l.shape);
        const int row = t.row + group * 64, panels = row < l.shape.rows ? t.columns() / 64 : 0;
        for (int i = 0; i < panels; i++) {
            const int column = t.column + i * 64;
            group_arrive(3 + group, 160);  // the panels are free
            group_sync(1 + group, 160);    // they are full
            if (is_elected()) {
                tensor_store(&l.d, panel, column, row, t.matrix);
                if (i < sp_mirrored(l.shape, t)) tensor_store(&l.d, panel + SP_PANEL_BYTES, row, column, t.matrix);
                store_commit();
                store_wait_read<0>();
            }
            __syncwarp();
        }
    }
}

// The state of a thread in a warpgroup that multiplies.
struct SymmetricWork {
    Gemm<SP_STAGES> gemm;
    const SymmetricLaunch* launch;
    uint32_t place, mirror_place;      // this lane's addresses for the matrices of column 0
    int row, column;                   // of gemm.c[0][0]
    int panels, mirrored;              // of the tile before, or 0
    SymmetricTile tile;                // being multiplied
    uint32_t held[SP_COLUMNS / 8][2];  // the tile before; then c of this one
};

// Chunk C of the tile before: into the panels, which every other chunk fills.
template <int C>
__device__ __forceinline__ void sp_deliver(SymmetricWork& w) {
    if (C / 2 >= w.panels) return;
    const bool mirrored = C / 2 < w.mirrored;
    if (C % 2 == 0) group_sync(3 + w.gemm.group, 160);
#pragma unroll
    for (int n = 4 * C; n < 4 * C + 4; n += 2) {
        const uint32_t x[4] = {w.held[n][0], w.held[n][1], w.held[n + 1][0], w.held[n + 1][1]};
        store_matrices(w.place ^ (uint32_t)(n % 8 << 4), x[0], x[1], x[2], x[3]);
        if (mirrored) store_matrices_transposed(w.mirror_place + n % 8 * 1024, x[0], x[1], x[2], x[3]);
    }
    if (C % 2 == 0) return;
    fence_async();
    group_arrive(1 + w.gemm.group, 160);
}

// Asks for chunk C of this tile's c.
template <int C>
__device__ __forceinline__ void sp_fetch(SymmetricWork& w) {
    const SymmetricLaunch& l = *w.launch;
    const SymmetricTile& tile = w.tile;
    if (!l.c || (tile.half && C >= GEMM_CHUNKS / 2)) return;
    const int row = tile.row + w.row, column = tile.column + C * 32, rows = l.shape.rows, columns = l.shape.columns;
    const char* c = (const char*)(l.c + (int64_t)tile.matrix * rows * columns);  // the same in all threads
    const uint32_t from = (uint32_t)(row * columns + column + w.column) * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool inside = column + 8 * i < columns;
        w.held[4 * C + i][0] = inside && row < rows ? __ldcg((const uint32_t*)(c + from + 16 * i)) : 0;
        w.held[4 * C + i][1] =
            inside && row + 8 < rows ? __ldcg((const uint32_t*)(c + from + (uint32_t)columns * 16 + 16 * i)) : 0;
    }
}

// gemm_product calls chunk between the steps of a tile. Only products with b transposed may have c.
template <int B, int WIDTH>
struct SymmetricUser {
    using T = __half;
    using Work = SymmetricWork;
    static constexpr int A_MN = 0, B_MN = B, COLUMNS = WIDTH, EVERY = GEMM_CHUNKS;

    template <int C, bool LAST>
    static __device__ __forceinline__ void chunk(Work& w, int) {
        sp_deliver<C>(w);
        if constexpr (!B_MN && !LAST) sp_fetch<C>(w);
    }
};

// Computes what is held of panel P of a product with c. DIAGONAL says that the panel has a part of the diagonal.
template <int P, bool DIAGONAL>
__device__ __forceinline__ void sp_combine(SymmetricWork& w, float alpha, float beta, float gamma) {
#pragma unroll
    for (int n = 8 * P; n < 8 * P + 8; n++) {
        // Column 8 n of this thread lies `off` to the left of the diagonal in its upper row, and 8 more in its lower.
        const int off = w.row % 64 - w.column - n % 8 * 8;
        auto add = [&](bool here) { return DIAGONAL && here ? gamma : 0.0f; };
        const float2 upper = half_floats(w.held[n][0]), lower = half_floats(w.held[n][1]);
        const float* s = w.gemm.c[n];
        w.held[n][0] = pack_half(fmaf(alpha, s[0], fmaf(beta, upper.x, add(off == 0))),
                                 fmaf(alpha, s[1], fmaf(beta, upper.y, add(off == 1))));
        w.held[n][1] = pack_half(fmaf(alpha, s[2], fmaf(beta, lower.x, add(off + 8 == 0))),
                                 fmaf(alpha, s[3], fmaf(beta, lower.y, add(off + 8 == 1))));
    }
}

template <int P>
__device__ __forceinline__ void sp_combine_all(SymmetricWork& w) {
    if constexpr (P < SP_COLUMNS / 64) {
        const SymmetricLaunch& l = *w.launch;
        if (w.tile.row + w.gemm.group * 64 == w.tile.column + P * 64)
            sp_combine<P, true>(w, l.alpha, l.beta, l.gamma);
        else
            sp_combine<P, false>(w, l.alpha, l.beta, l.gamma);
        sp_combine_all<P + 1>(w);
    }
}

// The product is complete: what is held of it, in fp16. Products without c are plain (symmetric_product_fits).
template <bool HAS_C>
__device__ __forceinline__ void sp_finish(SymmetricWork& w) {
    if (HAS_C && w.launch->c) {
        sp_combine_all<0>(w);
    } else {
#pragma unroll
        for (int n = 0; n < SP_COLUMNS / 8; n++) {
            const float* s = w.gemm.c[n];
            // The additions are those of a beta of 0: they turn a sum of -0 into 0.
            w.held[n][0] = pack_half(s[0] + 0.0f, s[1] + 0.0f), w.held[n][1] = pack_half(s[2] + 0.0f, s[3] + 0.0f);
        }
    }
    w.panels = w.tile.columns() / 64, w.mirrored = sp_mirrored(w.launch->shape, w.tile);
}

// Passes stages of which this warpgroup needs nothing.
__device__ __forceinline__ void sp_pass(Gemm<SP_STAGES>& g, int steps) {
    for (int k = 0; k < steps; k++) {
        barrier_wait(g.stages.full(g.ring.stage), g.ring.parity);
        gemm_give_back(g, g.ring.stage);
        g.ring.advance();
    }
}

// A warpgroup: its 64 rows of all tiles of this block.
template <int B_MN>
__device__ __forceinline__ void sp_consume(SymmetricWork& w) {
    const SymmetricLaunch& l = *w.launch;
    const int steps = gemm_steps(l.shape);
    for (int index = blockIdx.x; index < l.shape.tiles; index += gridDim.x) {
        w.tile = gemm_tile(index, l.shape);
        if (w.tile.row + w.gemm.group * 64 >= l.shape.rows) {
            sp_pass(w.gemm, steps);
            continue;
        }
        if (w.tile.half)
            gemm_product<SymmetricUser<B_MN, SP_HALF>>(w, steps);
        else
            gemm_product<SymmetricUser<B_MN, SP_COLUMNS>>(w, steps);
        sp_finish<!B_MN>(w);
    }
    gemm_deliver_last<SymmetricUser<B_MN, SP_COLUMNS>>(w);
}

#endif

// Grid at most the tiles, block 384, shared memory SP_SHARED_BYTES; columns and depth multiples of 8, depth at least
// GEMM_MIN_DEPTH. Deterministic.
template <int B_MN>
__global__ void __launch_bounds__(384, 1) symmetric_product_kernel(const __grid_constant__ SymmetricLaunch launch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char symmetric_shared[];
    const uint32_t shared = shared_offset(symmetric_shared);
    const GemmStages<SP_STAGES> stages = {shared, shared + SP_BARRIERS};
    if (threadIdx.x == 0) stages.init(), barrier_init_done();
    __syncthreads();
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
    if (warp < 4) {
        registers_shrink<24>();  // a block has 168 x 384 registers, which are 24 x 128 + 240 x 256
        if (warp == 0 && is_elected()) gemm_produce<0, B_MN, SP_HALF>(stages, &launch.a, &launch.b, launch.shape);
        if (warp == 1 || warp == 2) sp_send(shared, launch, warp - 1);
        return;
    }
    registers_grow<240>();
    SymmetricWork w = {};
    w.gemm.stages = stages, w.launch = &launch;
    w.gemm.lane = threadIdx.x % 32, w.gemm.group = warp / 4 - 1;
    w.row = (warp - 4) * 16 + w.gemm.lane / 4, w.column = w.gemm.lane % 4 * 2;
    const uint32_t panel = shared + SP_PANELS + w.gemm.group * 2 * SP_PANEL_BYTES;
    w.place = panel + panel_offset(warp % 4 * 16 + w.gemm.lane % 16, w.gemm.lane / 16);
    w.mirror_place = panel + SP_PANEL_BYTES +
                     panel_offset(w.gemm.lane / 16 * 8 + w.gemm.lane % 8, warp % 4 * 2 + w.gemm.lane / 8 % 2);
    sp_consume<B_MN>(w);
#else
    (void)launch;
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

// True if our kernel runs here. The batch does not matter, since bits must not depend on it. Only one kind of product
// may have c, and with it factors, so that the others do not need more registers. The kernel counts in ints.
inline bool symmetric_product_fits(const Device* dev, const MatmulProduct* p) {
    return hopper_runs(dev, symmetric_product_kernel<0>) && dev->shared_memory >= SP_SHARED_BYTES && p->cols % 8 == 0 &&
           p->depth % 8 == 0 && p->rows % 8 == 0 && p->depth >= GEMM_MIN_DEPTH && p->depth < 1 << 20 &&
           p->rows < 1 << 20 && p->cols < 1 << 20 && p->rows * p->cols < 1 << 30 &&
           (p->beta == 0.0f ? p->alpha == 1.0f && p->gamma == 0.0f : p->transpose_b);
}

inline void symmetric_product_library(const Device* dev, const MatmulProduct* p, __half* d, const __half* a,
                                      const __half* b, const __half* c) {
    MatmulProduct plain = *p;
    plain.gamma = 0.0f;
    matmul_product<__half, __half>(dev, &plain, d, a, b, c);
    if (p->gamma == 0.0f) return;
    const int64_t blocks = ceil_div((p->rows < p->cols ? p->rows : p->cols) * p->batch, 256);
    launch_kernel(dev, symmetric_diagonal_kernel, (unsigned)(blocks < 4096 ? blocks : 4096), 256, 0, d, p->rows,
                  p->cols, p->batch, p->gamma);
}

// Makes a product on a GPU. d differs from a, b and c. Dimensions are multiples of 8.
inline void symmetric_product(const Device* dev, const MatmulProduct* p, __half* d, const __half* a, const __half* b,
                              const __half* c) {
    if (p->batch == 0) return;
    if (!symmetric_product_fits(dev, p)) return symmetric_product_library(dev, p, d, a, b, c);
    // Maps of bf16: TMA moves two bytes an element, whatever they mean, and writes zeros past the end.
    const SymmetricLaunch launch = {tensor_map(a, p->batch, p->rows, p->depth, SP_ROWS),
                                    p->transpose_b ? tensor_map(b, p->batch, p->cols, p->depth, SP_HALF)
                                                   : tensor_map(b, p->batch, p->depth, p->cols, GEMM_DEPTH),
                                    tensor_map(d, p->batch, p->rows, p->cols, 64),
                                    symmetric_shape(p),
                                    p->alpha,
                                    p->beta,
                                    p->gamma,
                                    p->beta != 0.0f ? c : nullptr};
    const auto kernel = p->transpose_b ? symmetric_product_kernel<0> : symmetric_product_kernel<1>;
    const int tiles = launch.shape.tiles, blocks = tiles < dev->sm_count ? tiles : dev->sm_count;
    launch_kernel(dev, kernel, (unsigned)blocks, 384, SP_SHARED_BYTES, launch);
}
#endif
