// The two products of rules that project gradients (optim/matrix/low_rank.h), each with its element-wise work as its
// epilogue. A matrix G (R, C) with sides length >= side has channels along its longer side; Q is (rank, side).
//     right, R >= C:   low = G Q^T (R, rank),   U = N Q (R, C)
//     left,  R < C:    low = Q G (rank, C),     U = Q^T N (R, C)
// low_project hands each element of low to a sink (store it, or Adam's moments and direction N), low_back each element
// of U (the weights' update), so that G is read once, the weights are read and written once, and U is never in memory.
//
// Both sides are one computation: M = channels by N = rank (project) or side (back), whose memory is transposed on the
// left. Tile 128 x N, N = 32, 64 or 128, by 256 threads with mma.sync on any GPU from sm_80 on; operands come by
// cp.async through three stages of 128 bytes along K. Types of the operands:
//     bf16          products exact, fp32 sums
//     float, 1      TF32: operands rounded to 11 bits
//     float, 3      each operand in two parts of 11 bits, three products: 2^-21, as good as fp32
// A projection has few tiles (32 for 4096 channels and rank 128) and a long K, so up to 8 blocks share a tile, each
// with a part of K; they are a cluster, and add up through each other's shared memory, in order (sm_90; elsewhere one
// block does all). Deterministic. Sizes are multiples of 8. galore_hopper.cuh lists kernels for sm_90a alone.
#pragma once
#include "../kernels/mma.cuh"

#ifdef __CUDACC__
constexpr int LP_ROWS = 128, LP_THREADS = 256, LP_STAGES = 3, LP_LINE = 128, LP_SLICES = 8;

struct LowShapes {
    int channels, across, depth;  // M, N and K
    int slices;                   // blocks that share a tile
};

// Operands of a product, elements.

template <typename E>
struct LowOperand {
    static constexpr int CHUNK = 16 / (int)sizeof(E), DEPTH = LP_LINE / (int)sizeof(E);
};

// The place in a tile of a 16-byte chunk of an operand. With K along a row, `row` is of M or N and a row has 128 bytes.
// With K down the rows, `row` is of K and panels of 128 bytes lie one after another. Chunks of a row are permuted so
// that what a warp reads at a time lies in different banks; fp32 with K down the rows is read word by word, four rows
// at a time.
template <typename E, bool DOWN>
__device__ __forceinline__ uint32_t lp_place(int row, int chunk) {
    if (!DOWN) return (uint32_t)(row * LP_LINE + ((chunk ^ (row & 7)) << 4));
    const int turn = sizeof(E) == 2 ? row & 7 : (row & 3) << 1;
    return (uint32_t)(chunk / 8 * LowOperand<E>::DEPTH * LP_LINE + row * LP_LINE + ((chunk % 8 ^ turn) << 4));
}

// A thread's copies of an operand's tiles, of ROWS of M or N: COPIES of 16 bytes a stage, each STEP rows of the tile
// further, at the same chunk.
template <typename E, bool DOWN, int ROWS>
struct LowCopy {
    static constexpr int CHUNK = LowOperand<E>::CHUNK, DEPTH = LowOperand<E>::DEPTH, ACROSS = DOWN ? ROWS / CHUNK : 8,
                         COPIES = ROWS * 8 / LP_THREADS, STEP = LP_THREADS / ACROSS;
    const E *all, *from;
    int m, k, limit, depth;
    uint32_t place;

    // The copy begins at row `first` of `limit` and at column its_k.
    __device__ __forceinline__ LowCopy(const E* x, int first, int its_limit, int its_k, int its_depth) {
        const int row = threadIdx.x / ACROSS, chunk = threadIdx.x % ACROSS;
        all = x, limit = its_limit, depth = its_depth;
        m = first + (DOWN ? chunk * CHUNK : row), k = its_k + (DOWN ? row : chunk * CHUNK);
        from = x + (DOWN ? (int64_t)k * limit + m : (int64_t)m * depth + k);
        place = lp_place<E, DOWN>(row, chunk);
    }

    // Asks for the next stage.
    __device__ __forceinline__ void fetch(uint32_t tile) {
        const int64_t step = (int64_t)STEP * (DOWN ? limit : depth);
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const bool valid = m + (DOWN ? 0 : i * STEP) < limit && k + (DOWN ? i * STEP : 0) < depth;
            copy_16_async(tile + place + i * STEP * LP_LINE, valid ? from + i * step : all, valid);
        }
        k += DEPTH, from += DOWN ? (int64_t)DEPTH * limit : DEPTH;
    }
};

// The addresses in a tile that a lane reads fragments of 16 of M (or N) by a step of K (32 bytes) from: `place` is that
// of the warp's first one, and the others differ in bits that no sum carries into.
template <typename E, bool DOWN>
struct LowReader {
    uint32_t place;

    // `first` is the warp's first of M or N; left and right operands of mma.sync order their four parts differently.
    __device__ __forceinline__ LowReader(int first, int lane, bool left) {
        const int low = lane % 8, of_m = left ? lane / 8 % 2 : lane / 16, of_k = left ? lane / 16 : lane / 8 % 2;
        if (!DOWN) place = lp_place<E, false>(first + of_m * 8 + low, of_k);
        if (DOWN && sizeof(E) == 2) place = lp_place<E, true>(of_k * 8 + low, first / 8 + of_m);
        if (DOWN && sizeof(E) == 4)
            place = lp_place<E, true>(lane % 4, (first + lane / 4) / 4) + (first + lane / 4) % 4 * 4;
    }

    // Part `m`, a constant, of the warp's, at a step.
    __device__ __forceinline__ void read(uint32_t (&x)[4], uint32_t tile, int m, int step, bool left) const {
        if constexpr (!DOWN) {
            load_matrices(x, tile + (place ^ (uint32_t)(step << 5)) + m * 16 * LP_LINE);
        } else if constexpr (sizeof(E) == 2) {
            load_matrices_transposed(x, tile + (place ^ (uint32_t)(m << 5)) + step * 16 * LP_LINE);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int of_m = left ? i % 2 : i / 2, of_k = left ? i / 2 : i % 2;
                x[i] = load_word(tile + (place ^ (uint32_t)((m % 2 * 4 + of_m * 2) << 4)) +
                                 m / 2 * LowOperand<E>::DEPTH * LP_LINE + (step * 8 + of_k * 4) * LP_LINE);
            }
        }
    }
};

// c (16 x 8, fp32) += a b; columns 2 (lane % 4) and the next of rows lane / 4 and that + 8.
__device__ __forceinline__ void lp_mma(bf16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma(c, a, b0, b1);
}
__device__ __forceinline__ void lp_mma(float, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// fp32 words rounded to TF32, and with PARTS 3 what that leaves.
template <int PARTS>
__device__ __forceinline__ void lp_split(uint32_t (&x)[4], uint32_t (&rest)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float value = __uint_as_float(x[i]);
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(x[i]) : "f"(value));
        if (PARTS == 3) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rest[i]) : "f"(value - __uint_as_float(x[i])));
    }
}

// A warp's part of a tile of 128 x COLUMNS: 16 MI x 32.
template <int COLUMNS>
struct LowTile {
    static constexpr int ACROSS = COLUMNS / 32, MI = ACROSS, DOWN = 8 / ACROSS;
    float c[MI][4][4];
    int row, column, lane;
};

template <typename E, int PARTS, bool A_DOWN, bool B_DOWN, int COLUMNS>
__device__ __forceinline__ void lp_multiply(LowTile<COLUMNS>& t, const LowReader<E, A_DOWN>& left,
                                            const LowReader<E, B_DOWN>& right, uint32_t stage) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
        uint32_t b[2][4], b_rest[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            right.read(b[n], stage + LP_ROWS * LP_LINE, n, step, false);
            if (sizeof(E) == 4) lp_split<PARTS>(b[n], b_rest[n]);
        }
#pragma unroll
        for (int m = 0; m < LowTile<COLUMNS>::MI; m++) {
            uint32_t a[4], a_rest[4];
            left.read(a, stage, m, step, true);
            if (sizeof(E) == 4) lp_split<PARTS>(a, a_rest);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const uint32_t(&of_b)[4] = b[n / 2];
                const int i = n % 2 * 2;
                if (PARTS == 3) {
                    const uint32_t(&rest)[4] = b_rest[n / 2];
                    lp_mma(E(), t.c[m][n], a_rest, of_b[i], of_b[i + 1]);
                    lp_mma(E(), t.c[m][n], a, rest[i], rest[i + 1]);
                }
                lp_mma(E(), t.c[m][n], a, of_b[i], of_b[i + 1]);
            }
        }
    }
}

// The blocks of a cluster (PTX ISA: barrier.cluster, mapa).

__device__ __forceinline__ void lp_cluster_sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ float4 lp_load_from(uint32_t address, int block) {
    float4 x;
#if __CUDA_ARCH__ >= 900
    uint32_t its;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(its) : "r"(address), "r"(block));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(its)
                 : "memory");
#else
    (void)block;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
#endif
    return x;
}

// Leaves the tile in shared memory as it lies in memory: rows of `fast` elements and four more.
template <bool LEFT, int COLUMNS>
__device__ __forceinline__ void lp_leave(const LowTile<COLUMNS>& t, float* to) {
    constexpr int STRIDE = (LEFT ? LP_ROWS : COLUMNS) + 4;
#pragma unroll
    for (int m = 0; m < LowTile<COLUMNS>::MI; m++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = t.row + 16 * m + t.lane / 4 + i / 2 * 8,
                          column = t.column + 8 * n + t.lane % 4 * 2 + i % 2;
                to[LEFT ? column * STRIDE + row : row * STRIDE + column] = t.c[m][n][i];
            }
        }
    }
}

template <typename E, int COLUMNS>
constexpr int lp_shared_bytes() {
    return LP_STAGES * (LP_ROWS + COLUMNS) * LP_LINE;
}

// Sums four elements of a tile over the blocks of the cluster, at most MOST, in order.
template <int MOST>
__device__ __forceinline__ float4 lp_sum(uint32_t address, int slices) {
    float4 x[MOST];
#pragma unroll
    for (int block = 0; block < MOST; block++)
        if (block < slices) x[block] = lp_load_from(address, block);
#pragma unroll
    for (int block = 1; block < MOST; block++) {
        if (block < slices) x[0].x += x[block].x, x[0].y += x[block].y, x[0].z += x[block].z, x[0].w += x[block].w;
    }
    return x[0];
}

// Gives the sink the block's part of the tile, which lies in shared memory, some pieces at a time: what it reads from
// memory is asked for first.
template <bool LEFT, bool BACK, int COLUMNS, typename Sink>
__device__ __forceinline__ void lp_give(const Sink& sink, uint32_t shared, int m, int n, const LowShapes& s) {
    constexpr int AT_ONCE = BACK ? 8 : 2, FAST = LEFT ? LP_ROWS : COLUMNS, QUARTERS = FAST / 4,
                  PIECES = LP_ROWS * COLUMNS / 4;
    const int step = s.slices * LP_THREADS, down = LEFT ? s.across : s.channels, across = LEFT ? s.channels : s.across;
    for (int i = blockIdx.x * LP_THREADS + threadIdx.x; i < PIECES; i += AT_ONCE * step) {
        int row[AT_ONCE], column[AT_ONCE];
        bool inside[AT_ONCE];
        typename Sink::Old old[AT_ONCE];
        float4 sum[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            const int at = i + u * step;
            row[u] = (LEFT ? n : m) + at / QUARTERS, column[u] = (LEFT ? m : n) + at % QUARTERS * 4;
            inside[u] = at < PIECES && row[u] < down && column[u] < across;
            if (inside[u]) old[u] = sink.load(row[u], column[u]);
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            const int at = i + u * step;
            const uint32_t address = shared + (at / QUARTERS * (FAST + 4) + at % QUARTERS * 4) * 4;
            if (inside[u]) sum[u] = lp_sum < BACK ? 1 : LP_SLICES > (address, s.slices);
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            if (inside[u]) sink.take(row[u], column[u], sum[u], old[u]);
        }
    }
}

// a (channels, depth), on the left (depth, channels); b (across, depth), BACK (depth, across). The sink gets four
// elements of a row of the result's memory, (channels, across) or on the left (across, channels), at a time. Grid
// (slices, tiles across, tiles of channels), clusters of `slices`, block 256.
template <typename E, int PARTS, bool LEFT, bool BACK, int COLUMNS, typename Sink>
__global__ void __launch_bounds__(LP_THREADS, 2)
    low_rank_kernel(const E* __restrict__ a, const E* __restrict__ b, LowShapes s, Sink sink) {
    extern __shared__ __align__(1024) unsigned char low_shared[];
    constexpr int DEPTH = LowOperand<E>::DEPTH, STAGE = (LP_ROWS + COLUMNS) * LP_LINE;
    const int m = blockIdx.z * LP_ROWS, n = blockIdx.y * COLUMNS, warp = threadIdx.x / 32;
    const uint32_t shared = (uint32_t)__cvta_generic_to_shared(low_shared);
    LowTile<COLUMNS> t = {};
    t.row = warp / LowTile<COLUMNS>::ACROSS * 16 * LowTile<COLUMNS>::MI;
    t.column = warp % LowTile<COLUMNS>::ACROSS * 32;
    t.lane = threadIdx.x % 32;
    const int all = (s.depth + DEPTH - 1) / DEPTH, first = all * (int)blockIdx.x / s.slices,
              steps = all * ((int)blockIdx.x + 1) / s.slices - first;
    LowCopy<E, LEFT, LP_ROWS> left(a, m, s.channels, first * DEPTH, s.depth);
    LowCopy<E, BACK, COLUMNS> right(b, n, s.across, first * DEPTH, s.depth);
    auto fetch = [&](int step) {
        const uint32_t stage = shared + step % LP_STAGES * STAGE;
        left.fetch(stage);
        right.fetch(stage + LP_ROWS * LP_LINE);
    };
    for (int step = 0; step < LP_STAGES - 1; step++) {
        if (step < steps) fetch(step);
        copy_async_commit();
    }
    sink.begin(LEFT ? n : m, LEFT ? m : n, LEFT ? COLUMNS : LP_ROWS, LEFT ? LP_ROWS : COLUMNS);
    const LowReader<E, LEFT> read_left(t.row, t.lane, true);
    const LowReader<E, BACK> read_right(t.column, t.lane, false);
    for (int step = 0; step < steps; step++) {
        copy_async_wait<LP_STAGES - 2>();
        __syncthreads();
        if (step + LP_STAGES - 1 < steps) fetch(step + LP_STAGES - 1);
        copy_async_commit();
        lp_multiply<E, PARTS, LEFT, BACK, COLUMNS>(t, read_left, read_right, shared + step % LP_STAGES * STAGE);
    }
    copy_async_wait<0>();
    __syncthreads();
    lp_leave<LEFT, COLUMNS>(t, (float*)low_shared);
    __syncthreads();
    if (s.slices > 1) lp_cluster_sync();
    lp_give<LEFT, BACK, COLUMNS>(sink, shared, m, n, s);
    if (s.slices > 1) lp_cluster_sync();  // no block ends while another reads its shared memory
}

// Sinks. Rows and columns are those of the result's memory, whose rows are `cols` long.

// low, in fp32.
struct LowStore {
    struct Old {};  // what a sink reads from memory beforehand
    float* low;
    int64_t cols;

    __device__ void begin(int, int, int, int) const {}
    __device__ Old load(int, int) const { return {}; }
    __device__ void take(int row, int column, float4 x, Old) const { *(float4*)(low + row * cols + column) = x; }
};

// True if the device runs a kernel that was compiled with clusters; one compiled from sm_80's PTX has none.
template <typename Kernel>
bool low_has_clusters(Kernel* kernel) {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, kernel));
    return attributes.ptxVersion >= 90;
}

// Returns how many blocks share a tile of a projection: the number that keeps the multiprocessors, which have room for
// two blocks each, busiest.
inline int low_slices(const Device* dev, int64_t tiles, int64_t steps) {
    int best = 1;
    double least = INFINITY;
    for (int slices = 1; slices <= LP_SLICES; slices++) {
        const double waves = (double)ceil_div(tiles * slices, 2 * dev->sm_count);
        // A block's time: its part of K, and about four steps for the start and the sum.
        const double time = waves * ((double)ceil_div(steps, slices) + 4.0);
        if (steps >= slices && time < least) least = time, best = slices;
    }
    return best;
}

template <typename E, int PARTS, bool LEFT, bool BACK, int COLUMNS, typename Sink>
void low_rank_launch(const Device* dev, const E* a, const E* b, LowShapes s, const Sink& sink) {
    auto kernel = low_rank_kernel<E, PARTS, LEFT, BACK, COLUMNS, Sink>;
    constexpr int BYTES = lp_shared_bytes<E, COLUMNS>();
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
    const unsigned across = (unsigned)ceil_div(s.across, COLUMNS), down = (unsigned)ceil_div(s.channels, LP_ROWS);
    const bool shares = !BACK && low_has_clusters(kernel);
    s.slices = shares ? low_slices(dev, (int64_t)across * down, ceil_div(s.depth, LowOperand<E>::DEPTH)) : 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)s.slices, across, down), config.blockDim = dim3(LP_THREADS);
    config.dynamicSmemBytes = BYTES, config.stream = dev->stream;
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = (unsigned)s.slices, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.attrs = &cluster, config.numAttrs = s.slices > 1 ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, a, b, s, sink));
}

// low, of g and q, into the sink. rank, rows and cols: multiples of 8.
template <typename E, int PARTS, typename Sink>
void low_project(const Device* dev, const E* g, const E* q, int64_t rows, int64_t cols, int64_t rank,
                 const Sink& sink) {
    const bool left = rows < cols;
    const LowShapes s = {(int)(left ? cols : rows), (int)rank, (int)(left ? rows : cols), 1};
    auto launch = [&](auto columns) {
        constexpr int COLUMNS = decltype(columns)::value;
        if (left) low_rank_launch<E, PARTS, true, false, COLUMNS>(dev, g, q, s, sink);
        if (!left) low_rank_launch<E, PARTS, false, false, COLUMNS>(dev, g, q, s, sink);
    };
    if (rank <= 32)
        launch(std::integral_constant<int, 32>());
    else if (rank <= 64)
        launch(std::integral_constant<int, 64>());
    else
        launch(std::integral_constant<int, 128>());
}

// U, of n and q, into the sink.
template <typename E, int PARTS, typename Sink>
void low_back(const Device* dev, const E* n, const E* q, int64_t rows, int64_t cols, int64_t rank, const Sink& sink) {
    const bool left = rows < cols;
    const LowShapes s = {(int)(left ? cols : rows), (int)(left ? rows : cols), (int)rank, 1};
    if (left) low_rank_launch<E, PARTS, true, true, 128>(dev, n, q, s, sink);
    if (!left) low_rank_launch<E, PARTS, false, true, 128>(dev, n, q, s, sink);
}
#endif
