// The products of Newton-Schulz (optim/matrix/newton_schulz.cuh), most of whose results are symmetric. For each of
// `batch` matrices, row-major and one after another without gaps:
//     d = alpha op(a) op(b) + beta c + gamma I          op(a) (rows, depth), op(b) (depth, cols), c and d (rows, cols)
// If the result is symmetric, the elements on and below the diagonal are computed; the others mirror them. The
// plain C version, in fp32, defines that. On a GPU elements are fp16 and sums fp32.
//
// Kernel for sm_90a: half the work of a symmetric result is left out. Its tiles are 128 x 256: a tile whose right half
// lies above the diagonal multiplies the left half alone, so 128 x 128 is the grain (21 of 36 squares at 768, 91 of 169
// at 1600). A tile below the diagonal is written twice, as it is and transposed.
//
// Newton-Schulz is a chain of some fifteen products, and many of them have less than two tiles for each multiprocessor.
// So one launch makes all products of several chains. Its blocks stay until no tile is left, and take tiles by a ticket
// that all of them count up. Tickets follow the order of the products, so a tile needs results of tiles with smaller
// tickets alone: the block that has the smallest unfinished one never waits for another, wherever and whenever the
// others run. A block that takes a tile waits until the count of the tile's matrix says that memory has all of the
// matrix's products before. These have read their operands by then, so a product may write where one before it reads. A
// tile's bits depend neither on the block that makes it nor on what else is in the launch.
//
// The loop is gemm_sm90.cuh's, in fp16. The registers that a delivered chunk leaves receive c of the tile at hand.
// Shared memory: 4 stages, and for each warpgroup a panel of 64 x 64 for results and one for their mirror images. Block
// of 384: one thread takes tiles and loads their operands, two warps send panels out and count the parts of tiles that
// memory has, and two warpgroups multiply. If the next tile has to wait, that thread tells the warpgroups to hand out
// what they hold, since the tile may wait for that. Deterministic.
//
// Where that kernel does not run (other GPUs, or K below 449) the library multiplies all of it, and gamma I is added by
// a kernel of its own, which rounds once more.
#pragma once
#include "common.cuh"
#include "matmul_product.cuh"
#ifdef __CUDACC__
#include "gemm_sm90.cuh"
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
    const int matrix = index / (s.whole + s.half);
    int i = index % (s.whole + s.half);
    if (i >= s.whole) {
        i -= s.whole;
        if (s.symmetric) return {matrix, 2 * i * SP_ROWS, i * SP_COLUMNS, 1};
        return {matrix, i * SP_ROWS, s.across * SP_COLUMNS, 1};
    }
    if (!s.symmetric) return {matrix, i % s.down * SP_ROWS, i / s.down * SP_COLUMNS, 0};
    int row = 1;
    while (i >= (row + 1) / 2) i -= (row + 1) / 2, row++;
    return {matrix, row * SP_ROWS, i * SP_COLUMNS, 0};
}

#ifdef __CUDACC__
constexpr int SP_STAGES = 4, SP_PANEL_BYTES = 64 * PANEL_ROW_BYTES;
constexpr int SP_PANELS = SP_STAGES * GEMM_STAGE_BYTES;   // offset: two for each warpgroup
constexpr int SP_TILES = SP_PANELS + 4 * SP_PANEL_BYTES;  // a SymmetricTask for each stage
constexpr int SP_TASKS = SP_TILES + SP_STAGES * 32;       // and for each warpgroup's panels
constexpr int SP_BARRIERS = SP_TASKS + 2 * 32;            // of the stages
constexpr int SP_SHARED_BYTES = SP_BARRIERS + SP_STAGES * 16;

// A product's kind says which of its operands have rows that do not lie along K.
enum SymmetricKind { SP_NONE_MN, SP_B_MN, SP_BOTH_MN };

// One of the products that a launch computes.
struct SymmetricItem {
    SymmetricShape shape;
    float alpha, beta, gamma;
    const __half* c;        // null if beta is 0
    int first;              // number of its first tile in the launch
    int counter;            // number of its first matrix's count
    int before;             // what a matrix's count is when memory has all its products before
    unsigned char a, b, d;  // numbers of maps
    unsigned char kind;
};

constexpr int SP_MAX_MAPS = 40, SP_MAX_ITEMS = 64;

// The kernel's argument. Arguments of more than 4 KB need CUDA 12.1 and driver 530, and this code needs newer ones.
struct SymmetricLaunch {
    CUtensorMap map[SP_MAX_MAPS];
    SymmetricItem item[SP_MAX_ITEMS];
    int maps, items, tiles;
    int* counts;   // the next ticket; then each matrix's count of parts of tiles, 64 rows each, that memory has
    int counters;  // matrices with counts
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A task tells a warpgroup what to do next.
struct SymmetricTask {
    int item;  // number of the product whose tile comes next, SP_FLUSH or SP_END
    SymmetricTile tile;
};
constexpr int SP_FLUSH = -1;  // hand out the tile that is held
constexpr int SP_END = -2;    // the same, and end

__device__ __forceinline__ uint32_t sp_parity(uint32_t turn) {
    return turn / SP_STAGES % 2;
}

// Writes a task to shared memory, and reads it.
__device__ __forceinline__ void sp_write(uint32_t at, const SymmetricTask& t) {
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(t.item), "r"(t.tile.matrix), "r"(t.tile.row),
                 "r"(t.tile.column * 2 + t.tile.half)
                 : "memory");
}
__device__ __forceinline__ SymmetricTask sp_read(uint32_t at) {
    int item, matrix, row, column;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(item), "=r"(matrix), "=r"(row), "=r"(column)
                 : "r"(at)
                 : "memory");
    // This tells the compiler that they are the same in all threads of the warp.
    item = __shfl_sync(0xffffffffu, item, 0), matrix = __shfl_sync(0xffffffffu, matrix, 0);
    row = __shfl_sync(0xffffffffu, row, 0), column = __shfl_sync(0xffffffffu, column, 0);
    return {item, {matrix, row, column / 2, column % 2}};
}

// The state of the thread that issues the TMA loads.
struct SymmetricProducer {
    const SymmetricLaunch* launch;
    uint32_t shared;
    GemmStages<SP_STAGES> stages;
    uint32_t turn;  // of all steps; the stages begin empty
};

// Pushes a task without a GEMM (SP_FLUSH or SP_END) to the warpgroups, in a stage of its own.
__device__ __forceinline__ void push_control_task(SymmetricProducer& p, int item) {
    const uint32_t stage = p.turn % SP_STAGES;
    barrier_wait(p.stages.empty(stage), sp_parity(p.turn) ^ 1);
    sp_write(p.shared + SP_TILES + stage * 32, {item, {0, 0, 0, 0}});
    barrier_arrive(p.stages.full(stage));
    p.turn++;
}

// Waits until memory has all products before this one of the tile's matrix. They may lack a tile that this block's
// warpgroups still hold, so these are asked to send it out when they have nothing else to do. What TMA reads from here
// on is what the TMA stores of other blocks had written before they counted: sp_send releases, this acquires.
__device__ __forceinline__ void sp_await(SymmetricProducer& p, const int* count, int before) {
    bool flushed = p.turn == 0;
    for (;;) {
        int now;
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(count) : "memory");
        if (now >= before) break;
        const uint32_t last = p.turn - 1;
        if (!flushed && barrier_is_past(p.stages.empty(last % SP_STAGES), sp_parity(last)))
            push_control_task(p, SP_FLUSH), flushed = true;
    }
    fence_async_all();
}

template <int A_MN, int B_MN>
__device__ __forceinline__ void sp_load(SymmetricProducer& p, const SymmetricItem& item, const SymmetricTask& task) {
    const SymmetricTile& tile = task.tile;
    uint32_t maps = item.a | item.b << 16;
    const int steps = (item.shape.depth + GEMM_DEPTH - 1) / GEMM_DEPTH;
    for (int k = 0; k < steps; k++, p.turn++) {
        const uint32_t stage = p.turn % SP_STAGES;
        barrier_wait(p.stages.empty(stage), sp_parity(p.turn) ^ 1);
        if (k == 0) sp_write(p.shared + SP_TILES + stage * 32, task);
        asm volatile("" : "+r"(maps));  // so that two addresses are not kept in four registers
        gemm_load_step<A_MN, B_MN, SP_HALF>(p.stages.at(stage), p.stages.full(stage), &p.launch->map[maps & 0xffff],
                                            &p.launch->map[maps >> 16], tile.row, tile.column, tile.matrix, k,
                                            tile.half ? SP_HALF : SP_COLUMNS);
    }
}

// One thread of a block takes tiles, and loads their operands, stage after stage. An operand whose rows do not lie
// along K (MN) comes as panels of 64 columns.
__device__ __forceinline__ void sp_produce(uint32_t shared, const GemmStages<SP_STAGES>& stages,
                                           const SymmetricLaunch* launch) {
    SymmetricProducer p = {launch, shared, stages, 0};
    int next = atomicAdd(launch->counts, 1), i = 0;
    while (next < launch->tiles) {
        const int index = next;
        next = atomicAdd(launch->counts, 1);  // a tile ahead, since it takes long
        while (i + 1 < launch->items && index >= launch->item[i + 1].first) i++;
        const SymmetricItem& item = launch->item[i];
        const SymmetricTask task = {i, symmetric_tile(index - item.first, item.shape)};
        if (item.before > 0) sp_await(p, launch->counts + 1 + item.counter + task.tile.matrix, item.before);
        if (item.kind == SP_NONE_MN)
            sp_load<0, 0>(p, item, task);
        else if (item.kind == SP_B_MN)
            sp_load<0, 1>(p, item, task);
        else
            sp_load<1, 1>(p, item, task);
    }
    push_control_task(p, SP_END);
}

// The panels of a tile, and the first ones of them, which have mirror images.
__device__ __forceinline__ int sp_panels(const SymmetricTile& t) {
    return t.half ? 2 : 4;
}
__device__ __forceinline__ int sp_mirrored(const SymmetricShape& s, const SymmetricTile& t) {
    const int left = (t.row / SP_ROWS - t.column / SP_ROWS) * 2;
    return !s.symmetric ? 0 : left < sp_panels(t) ? left : sp_panels(t);
}

// For each warpgroup one warp sends its panels out, and counts a part of a tile when memory has all of it.
__device__ __forceinline__ void sp_send(uint32_t shared, const SymmetricLaunch* launch, int group) {
    const uint32_t panel = shared + SP_PANELS + group * 2 * SP_PANEL_BYTES;
    for (;;) {
        SymmetricTask task;
        for (int i = 0; i == 0 || i < sp_panels(task.tile); i++) {
            group_arrive(3 + group, 160);  // the panels are free
            group_sync(1 + group, 160);    // they are full
            if (i == 0) task = sp_read(shared + SP_TASKS + group * 32);
            if (task.item == SP_END) return;
            const SymmetricItem& item = launch->item[task.item];
            const CUtensorMap* map = &launch->map[item.d];
            const SymmetricTile& t = task.tile;
            const int row = t.row + group * 64, column = t.column + i * 64;
            if (is_elected()) {
                tensor_store(map, panel, column, row, t.matrix);
                if (i < sp_mirrored(item.shape, t)) tensor_store(map, panel + SP_PANEL_BYTES, row, column, t.matrix);
                store_commit();
                store_wait_read<0>();
                if (i == sp_panels(t) - 1) {
                    store_wait<0>();
                    fence_async_all();
                    const int* count = launch->counts + 1 + item.counter + t.matrix;
                    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
                }
            }
            __syncwarp();
        }
    }
}

// The state of a thread in a warpgroup that multiplies.
struct SymmetricWork {
    Gemm<SP_STAGES> gemm;
    const SymmetricLaunch* launch;
    uint32_t shared;
    uint32_t place, mirror_place;      // this lane's addresses for the matrices of column 0
    int row, column;                   // of gemm.c[0][0]
    int panels, mirrored;              // of the tile before, or 0
    SymmetricTask task;                // being multiplied
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
    const SymmetricItem& item = w.launch->item[w.task.item];
    const SymmetricTile& tile = w.task.tile;
    if (!item.c || (tile.half && C >= GEMM_CHUNKS / 2)) return;
    const int row = tile.row + w.row, column = tile.column + C * 32, rows = item.shape.rows,
              columns = item.shape.columns;
    const char* c = (const char*)(item.c + (int64_t)tile.matrix * rows * columns);  // the same in all threads
    const uint32_t from = (uint32_t)(row * columns + column + w.column) * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool inside = column + 8 * i < columns;
        w.held[4 * C + i][0] = inside && row < rows ? __ldcg((const uint32_t*)(c + from + 16 * i)) : 0;
        w.held[4 * C + i][1] =
            inside && row + 8 < rows ? __ldcg((const uint32_t*)(c + from + (uint32_t)columns * 16 + 16 * i)) : 0;
    }
}

// gemm_product calls chunk between the steps of a tile. Only products of K-major operands may have c.
template <int A, int B, int WIDTH>
struct SymmetricUser {
    using T = __half;
    using Work = SymmetricWork;
    static constexpr int A_MN = A, B_MN = B, COLUMNS = WIDTH, EVERY = GEMM_CHUNKS;

    template <int C, bool LAST>
    static __device__ __forceinline__ void chunk(Work& w, int) {
        sp_deliver<C>(w);
        if constexpr (!A_MN && !B_MN && !LAST) sp_fetch<C>(w);
    }
};

__device__ __forceinline__ float2 sp_floats(uint32_t pair) {
    return __half22float2(*reinterpret_cast<__half2*>(&pair));
}

__device__ __forceinline__ uint32_t sp_pack(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
}

// Computes what is held of panel P of a product with c. DIAGONAL says that the panel has a part of the diagonal.
template <int P, bool DIAGONAL>
__device__ __forceinline__ void sp_combine(SymmetricWork& w, float alpha, float beta, float gamma) {
#pragma unroll
    for (int n = 8 * P; n < 8 * P + 8; n++) {
        // Column 8 n of this thread lies `off` to the left of the diagonal in its upper row, and 8 more in its lower.
        const int off = w.row % 64 - w.column - n % 8 * 8;
        auto add = [&](bool here) { return DIAGONAL && here ? gamma : 0.0f; };
        const float2 upper = sp_floats(w.held[n][0]), lower = sp_floats(w.held[n][1]);
        const float* s = w.gemm.c[n];
        w.held[n][0] = sp_pack(fmaf(alpha, s[0], fmaf(beta, upper.x, add(off == 0))),
                               fmaf(alpha, s[1], fmaf(beta, upper.y, add(off == 1))));
        w.held[n][1] = sp_pack(fmaf(alpha, s[2], fmaf(beta, lower.x, add(off + 8 == 0))),
                               fmaf(alpha, s[3], fmaf(beta, lower.y, add(off + 8 == 1))));
    }
}

template <int P>
__device__ __forceinline__ void sp_combine_all(SymmetricWork& w, const SymmetricItem& f) {
    if constexpr (P < SP_COLUMNS / 64) {
        if (w.task.tile.row + w.gemm.group * 64 == w.task.tile.column + P * 64)
            sp_combine<P, true>(w, f.alpha, f.beta, f.gamma);
        else
            sp_combine<P, false>(w, f.alpha, f.beta, f.gamma);
        sp_combine_all<P + 1>(w, f);
    }
}

// The product is complete: what is held of it, in fp16. Products without c are plain (symmetric_product_fits).
template <bool HAS_C>
__device__ __forceinline__ void sp_finish(SymmetricWork& w) {
    const SymmetricItem& item = w.launch->item[w.task.item];
    if (HAS_C && item.c) {
        sp_combine_all<0>(w, item);
    } else {
#pragma unroll
        for (int n = 0; n < SP_COLUMNS / 8; n++) {
            const float* s = w.gemm.c[n];
            // The additions are those of a beta of 0: they turn a sum of -0 into 0.
            w.held[n][0] = sp_pack(s[0] + 0.0f, s[1] + 0.0f), w.held[n][1] = sp_pack(s[2] + 0.0f, s[3] + 0.0f);
        }
    }
    w.panels = sp_panels(w.task.tile), w.mirrored = sp_mirrored(item.shape, w.task.tile);
    if (threadIdx.x % 128 == 0) sp_write(w.shared + SP_TASKS + w.gemm.group * 32, w.task);
}

template <int A_MN, int B_MN>
__device__ __forceinline__ void sp_tile(SymmetricWork& w, int steps) {
    if (w.task.tile.half)
        gemm_product<SymmetricUser<A_MN, B_MN, SP_HALF>>(w, steps);
    else
        gemm_product<SymmetricUser<A_MN, B_MN, SP_COLUMNS>>(w, steps);
    sp_finish<!A_MN && !B_MN>(w);
}

// Passes stages of which this warpgroup needs nothing.
__device__ __forceinline__ void sp_pass(SymmetricWork& w, int steps) {
    Gemm<SP_STAGES>& g = w.gemm;
    for (int k = 0; k < steps; k++) {
        barrier_wait(g.stages.full(g.ring.stage), g.ring.parity);
        gemm_give_back(g, g.ring.stage);
        g.ring.advance();
    }
}

// A warpgroup: its 64 rows of all tiles of this block.
__device__ __forceinline__ void sp_consume(SymmetricWork& w) {
    for (;;) {
        barrier_wait(w.gemm.stages.full(w.gemm.ring.stage), w.gemm.ring.parity);
        w.task = sp_read(w.shared + SP_TILES + w.gemm.ring.stage * 32);
        const bool product = w.task.item >= 0;
        const SymmetricItem& item = w.launch->item[product ? w.task.item : 0];
        const int steps = product ? (item.shape.depth + GEMM_DEPTH - 1) / GEMM_DEPTH : 1;
        if (!product || w.task.tile.row + w.gemm.group * 64 >= item.shape.rows) {
            gemm_deliver_last<SymmetricUser<0, 0, SP_COLUMNS>>(w);
            w.panels = 0;
            sp_pass(w, steps);
            if (w.task.item == SP_END) break;
            continue;
        }
        if (item.kind == SP_NONE_MN)
            sp_tile<0, 0>(w, steps);
        else if (item.kind == SP_B_MN)
            sp_tile<0, 1>(w, steps);
        else
            sp_tile<1, 1>(w, steps);
    }
    group_sync(3 + w.gemm.group, 160);
    if (threadIdx.x % 128 == 0) sp_write(w.shared + SP_TASKS + w.gemm.group * 32, {SP_END, {0, 0, 0, 0}});
    group_arrive(1 + w.gemm.group, 160);
}

#endif

// Grid at most the tiles, block 384, shared memory SP_SHARED_BYTES; columns and depth multiples of 8, depth at least
// GEMM_MIN_DEPTH; the ticket and counts are 0. Deterministic.
static __global__ void __launch_bounds__(384, 1)
    symmetric_product_kernel(const __grid_constant__ SymmetricLaunch launch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char symmetric_shared[];
    const uint32_t shared = shared_offset(symmetric_shared);
    const GemmStages<SP_STAGES> stages = {shared, shared + SP_BARRIERS};
    if (threadIdx.x == 0) stages.init(), barrier_init_done();
    __syncthreads();
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
    if (warp < 4) {
        registers_shrink<24>();  // a block has 168 x 384 registers, which are 24 x 128 + 240 x 256
        if (warp == 0 && is_elected()) sp_produce(shared, stages, &launch);
        if (warp == 1 || warp == 2) sp_send(shared, &launch, warp - 1);
        return;
    }
    registers_grow<240>();
    SymmetricWork w = {};
    w.gemm.stages = stages, w.launch = &launch, w.shared = shared;
    w.gemm.lane = threadIdx.x % 32, w.gemm.group = warp / 4 - 1;
    w.row = (warp - 4) * 16 + w.gemm.lane / 4, w.column = w.gemm.lane % 4 * 2;
    const uint32_t panel = shared + SP_PANELS + w.gemm.group * 2 * SP_PANEL_BYTES;
    w.place = panel + panel_offset(warp % 4 * 16 + w.gemm.lane % 16, w.gemm.lane / 16);
    w.mirror_place = panel + SP_PANEL_BYTES +
                     panel_offset(w.gemm.lane / 16 * 8 + w.gemm.lane % 8, warp % 4 * 2 + w.gemm.lane / 8 % 2);
    sp_consume(w);
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
inline bool symmetric_product_fits(const Device* dev, const SymmetricProduct* p) {
    if (dev->compute != 90) return false;  // a CPU has no driver to ask
    static const bool built = hopper_kernel_is_built(symmetric_product_kernel);
    return built && dev->shared_memory >= SP_SHARED_BYTES && p->cols % 8 == 0 && p->depth % 8 == 0 &&
           p->rows % 8 == 0 && p->depth >= GEMM_MIN_DEPTH && p->depth < 1 << 20 && p->rows < 1 << 20 &&
           p->cols < 1 << 20 && p->rows * p->cols < 1 << 30 && !(p->transpose_a && p->transpose_b) &&
           (p->beta == 0.0f ? p->alpha == 1.0f && p->gamma == 0.0f : !p->transpose_a && p->transpose_b);
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

// A product of a chain, as callers describe it.
struct SymmetricCall {
    SymmetricProduct product;
    __half* d;  // differs from a, b and c
    const __half *a, *b, *c;
    int counter;  // of its first matrix: products of the same matrices have the same
};

// Launches what has been added, and empties the launch.
inline void symmetric_launch(const Device* dev, SymmetricLaunch* launch) {
    if (launch->items == 0) return;
    check(cudaFuncSetAttribute(symmetric_product_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SP_SHARED_BYTES));
    check(cudaMemsetAsync(launch->counts, 0, (size_t)(launch->counters + 1) * sizeof(int), dev->stream));
    const int blocks = launch->tiles < dev->sm_count ? launch->tiles : dev->sm_count;
    symmetric_product_kernel<<<(unsigned)blocks, 384, SP_SHARED_BYTES, dev->stream>>>(*launch);
    check_launch();
    launch->maps = launch->items = launch->tiles = launch->counters = 0;
}

// Returns the number of the map of `batch` matrices of rows x cols, in boxes of so many rows; makes it if need be.
inline unsigned char symmetric_map(SymmetricLaunch* launch, const __half* address, int64_t batch, int64_t rows,
                                   int64_t cols, int box) {
    // Maps of bf16: TMA moves two bytes an element, whatever they mean, and writes zeros past the end.
    const CUtensorMap map = tensor_map(address, batch, rows, cols, box);
    int i = 0;
    while (i < launch->maps && memcmp(&launch->map[i], &map, sizeof(map)) != 0) i++;
    if (i == launch->maps) launch->map[launch->maps++] = map;
    return (unsigned char)i;
}

// Adds a product to a launch, which is zeros at first, except `counts`, which has an int more than there are counters.
// A product is added after those whose results it reads, and writes nothing that a product of other matrices reads. A
// full launch is launched first, and so is a launch before a product of the library's. Dimensions are multiples of 8.
inline void symmetric_add(const Device* dev, SymmetricLaunch* launch, const SymmetricCall* call) {
    const SymmetricProduct* p = &call->product;
    if (p->batch == 0) return;
    const bool fits = symmetric_product_fits(dev, p);
    if (!fits || launch->items == SP_MAX_ITEMS || launch->maps + 3 > SP_MAX_MAPS) symmetric_launch(dev, launch);
    if (!fits) return symmetric_product_library(dev, p, call->d, call->a, call->b, call->c);
    SymmetricItem item = {};
    item.shape = symmetric_shape(p);
    item.alpha = p->alpha, item.beta = p->beta, item.gamma = p->gamma, item.c = p->beta != 0.0f ? call->c : nullptr;
    const bool a_mn = p->transpose_a, b_mn = !p->transpose_b;
    item.kind = a_mn ? SP_BOTH_MN : b_mn ? SP_B_MN : SP_NONE_MN;
    item.a = symmetric_map(launch, call->a, p->batch, a_mn ? p->depth : p->rows, a_mn ? p->rows : p->depth,
                           a_mn ? GEMM_DEPTH : SP_ROWS);
    item.b = symmetric_map(launch, call->b, p->batch, b_mn ? p->depth : p->cols, b_mn ? p->cols : p->depth,
                           b_mn ? GEMM_DEPTH : SP_HALF);
    item.d = symmetric_map(launch, call->d, p->batch, p->rows, p->cols, 64);
    item.counter = call->counter, item.first = launch->tiles;
    int i = launch->items - 1;  // the last product of the same matrices
    while (i >= 0 && launch->item[i].counter != item.counter) i--;
    if (i >= 0) {
        const SymmetricItem* last = &launch->item[i];
        assert(last->shape.batch == item.shape.batch);
        item.before = last->before;
        for (int tile = 0; tile < last->shape.whole + last->shape.half; tile++)
            item.before += symmetric_tile(tile, last->shape).row + 64 < last->shape.rows ? 2 : 1;
    }
    launch->item[launch->items++] = item;
    const int64_t tiles = launch->tiles + (int64_t)(item.shape.whole + item.shape.half) * item.shape.batch;
    assert(tiles < 1 << 30);
    launch->tiles = (int)tiles;
    const int counters = item.counter + item.shape.batch;
    launch->counters = counters > launch->counters ? counters : launch->counters;
}

// Launches one product on a GPU. `counts` has room for batch + 1.
inline void symmetric_product(const Device* dev, const SymmetricProduct* p, __half* d, const __half* a, const __half* b,
                              const __half* c, int* counts) {
    SymmetricLaunch launch = {};
    launch.counts = counts;
    const SymmetricCall call = {*p, d, a, b, c, 0};
    symmetric_add(dev, &launch, &call);
    symmetric_launch(dev, &launch);
}
#endif
