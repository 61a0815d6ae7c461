// The loop of our own matrix products (GEMMs) on sm_90a: c (rows, columns) = a b, summed over `depth`, in tiles of
// 128 x 256. matmul_gelu.cuh, matmul_gelu_fp8.cuh and matmul_symmetric.cuh build on it; dev/gemm.cu is the shortest
// user, whose epilogue only stores c: begin there for a product of your own.
//
// Why not a library: its epilogue runs after a tile's product, while the tensor cores wait. Here a warpgroup rounds a
// finished tile to 16 bits, which halves the registers that it takes, and begins the next tile. It delivers the
// finished tile in eight chunks of 32 columns, one between each two steps of the next tile's product, so what is done
// to a result costs no time of its own as long as a chunk is shorter than a step.
//
// A step multiplies 128 bytes of each row: 64 elements of 16 bits, or 128 codes of fp8. A stage in shared memory holds
// the operands of a step, a (128 x 64) and b (256 x 64), as panels of 128-byte rows (hopper.cuh). One thread loads
// stages by TMA; two warpgroups of 64 rows each multiply them. A stage has two barriers: `full` counts the bytes that
// arrive, `empty` the eight warps that have multiplied. 64 x 256 is the largest product of a warpgroup, and the one
// that reads the fewest bytes of shared memory for its work.
//
// An operand may lie K-major (its rows lie along the sum) or MN-major (A_MN, B_MN: the sum runs down its rows).
// Deterministic: each sum runs over K in order.
#pragma once
#include "common.cuh"
#include "hopper.cuh"

constexpr int GEMM_ROWS = 128, GEMM_COLUMNS = 256, GEMM_DEPTH = 64;
constexpr int GEMM_A_BYTES = GEMM_ROWS * PANEL_ROW_BYTES, GEMM_B_BYTES = GEMM_COLUMNS * PANEL_ROW_BYTES;
constexpr int GEMM_STAGE_BYTES = GEMM_A_BYTES + GEMM_B_BYTES;
constexpr int GEMM_CHUNKS = GEMM_COLUMNS / 32;
constexpr int GEMM_MIN_DEPTH = (GEMM_CHUNKS - 1) * GEMM_DEPTH + 1;  // so that a tile has a step for each chunk

struct GemmShape {
    int rows, columns, depth;  // of the result; depth is what the products sum over
    int tiles;
};

inline GemmShape gemm_shape(int64_t rows, int columns, int depth) {
    return {(int)rows, columns, depth, (int)(ceil_div(rows, GEMM_ROWS) * ceil_div(columns, GEMM_COLUMNS))};
}

// True if a kernel with so much shared memory runs here and the result has tiles for every multiprocessor.
inline bool gemm_fits(const Device* dev, int64_t rows, int columns, int shared_bytes) {
    const int64_t tiles = ceil_div(rows, GEMM_ROWS) * ceil_div(columns, GEMM_COLUMNS);
    return dev->compute == 90 && dev->shared_memory >= shared_bytes && tiles >= dev->sm_count &&
           rows < (1ll << 31) - GEMM_ROWS && tiles < 1ll << 30;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// pack_bf16 and pair_floats in fp16.
__device__ inline uint32_t pack_half(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
}

__device__ inline float2 half_floats(uint32_t pair) {
    return __half22float2(*reinterpret_cast<__half2*>(&pair));
}

struct GemmTile {
    int row, column;  // of its first element
    static constexpr int matrix = 0;
    __device__ int columns() const { return GEMM_COLUMNS; }
};

template <typename Shape>
__device__ __forceinline__ int gemm_steps(const Shape& shape) {
    return (shape.depth + GEMM_DEPTH - 1) / GEMM_DEPTH;
}

// Blocks stay, and walk over the tiles in groups of 16 rows of tiles, column by column, so that what runs at one time
// shares its operands in the L2 cache.
__device__ __forceinline__ GemmTile gemm_tile(int index, GemmShape shape) {
    constexpr int GROUP = 16;
    int across = (shape.columns + GEMM_COLUMNS - 1) / GEMM_COLUMNS, down = (shape.rows + GEMM_ROWS - 1) / GEMM_ROWS;
    int first = index / (GROUP * across) * GROUP, within = index % (GROUP * across);
    int high = down - first < GROUP ? down - first : GROUP;
    return {(first + within % high) * GEMM_ROWS, within / high * GEMM_COLUMNS};
}

// The barriers of STAGES stages, at `barriers` in shared memory: 16 bytes a stage.
template <int STAGES>
struct GemmStages {
    uint32_t shared, barriers;  // shared: of the stages

    __device__ __forceinline__ uint32_t at(int stage) const { return shared + stage * GEMM_STAGE_BYTES; }
    __device__ __forceinline__ uint32_t full(int stage) const { return barriers + stage * 8; }
    __device__ __forceinline__ uint32_t empty(int stage) const { return barriers + (STAGES + stage) * 8; }

    // One thread calls this, then barrier_init_done.
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full(i), 1);
            barrier_init(empty(i), 8);  // a thread of each warp that multiplies
        }
    }
};

// Loads the operands of a tile's step k, once the stage is empty. An MN-major operand comes as panels of 64 columns, a
// K-major b in boxes of B_BOX rows. `columns`: of b, 256 or the left 128.
template <int A_MN, int B_MN, int B_BOX>
__device__ __forceinline__ void gemm_load_step(uint32_t stage, uint32_t full, const CUtensorMap* map_a,
                                               const CUtensorMap* map_b, int row, int column, int matrix, int k,
                                               int columns) {
    const uint32_t a = stage, b = a + GEMM_A_BYTES;
    const int step = A_MN ? 64 : GEMM_ROWS, step_b = B_MN ? 64 : B_BOX;
    barrier_expect(full, GEMM_A_BYTES + columns * PANEL_ROW_BYTES);
    for (int i = 0; i < GEMM_ROWS; i += step)
        tensor_load(a + i * PANEL_ROW_BYTES, map_a, full, A_MN ? row + i : k * GEMM_DEPTH,
                    A_MN ? k * GEMM_DEPTH : row + i, matrix);
    for (int i = 0; i < columns; i += step_b)
        tensor_load(b + i * PANEL_ROW_BYTES, map_b, full, B_MN ? column + i : k * GEMM_DEPTH,
                    B_MN ? k * GEMM_DEPTH : column + i, matrix);
}

// One thread loads the operands of all tiles of this block, stage after stage. A user with tiles of its own has an
// overload of gemm_tile for its shape.
template <int A_MN, int B_MN, int B_BOX, int STAGES, typename Shape>
__device__ __forceinline__ void gemm_produce(const GemmStages<STAGES>& stages, const CUtensorMap* map_a,
                                             const CUtensorMap* map_b, const Shape& shape) {
    Ring<STAGES> ring = {0, 1};  // the stages begin empty
    const int steps = gemm_steps(shape);
    for (int index = blockIdx.x; index < shape.tiles; index += gridDim.x) {
        const auto tile = gemm_tile(index, shape);
        for (int k = 0; k < steps; k++, ring.advance()) {
            barrier_wait(stages.empty(ring.stage), ring.parity);
            gemm_load_step<A_MN, B_MN, B_BOX>(stages.at(ring.stage), stages.full(ring.stage), map_a, map_b, tile.row,
                                              tile.column, tile.matrix, k, tile.columns());
        }
    }
}

// The state of a thread in a warpgroup that multiplies.
template <int STAGES>
struct Gemm {
    GemmStages<STAGES> stages;
    int group, lane;  // the warpgroup has rows 64 group to 64 group + 63 of a tile
    Ring<STAGES> ring;
    int k, last;                   // the step of the tile, and the stage of the step before
    float c[GEMM_COLUMNS / 8][4];  // sums: [n] are columns 8 n + 2 (lane % 4) and the next, of two rows
};

// Starts the next step of a tile's product, of its first COLUMNS columns. T: bf16, __half, or uint8_t for e4m3 codes,
// whose products take 128 columns at a time: blocks of 512 threads have no registers for 256.
template <typename T, int A_MN, int B_MN, int COLUMNS, int STAGES>
__device__ __forceinline__ void gemm_start_step(Gemm<STAGES>& g) {
    constexpr bool codes = sizeof(T) == 1;
    constexpr int WIDTH = codes ? 128 : COLUMNS, STEP = 32,
                  STEP_MN = 16 * PANEL_ROW_BYTES;  // bytes between two products
    const uint32_t a = g.stages.at(g.ring.stage) + g.group * 64 * PANEL_ROW_BYTES,
                   b = g.stages.at(g.ring.stage) + GEMM_A_BYTES;
    const uint64_t left = uniform_operand(A_MN ? operand_mn_major<GEMM_DEPTH>(a, 0) : operand_k_major<GEMM_ROWS>(a, 0));
    const uint64_t right =
        uniform_operand(B_MN ? operand_mn_major<GEMM_DEPTH>(b, 0) : operand_k_major<GEMM_COLUMNS>(b, 0));
    barrier_wait(g.stages.full(g.ring.stage), g.ring.parity);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int first = 0; first < COLUMNS; first += WIDTH) {
            auto& c = *reinterpret_cast<float(*)[WIDTH / 8][4]>(&g.c[first / 8]);
            const uint64_t x = operand_step(left, j * (A_MN ? STEP_MN : STEP)),
                           y = operand_step(right, j * (B_MN ? STEP_MN : STEP) + first * PANEL_ROW_BYTES);
            if constexpr (codes)
                Wgmma<WIDTH>::shared_fp8(c, x, y, g.k > 0 || j > 0);
            else
                Wgmma<WIDTH, T>::template shared<A_MN, B_MN>(c, x, y, g.k > 0 || j > 0);
        }
    }
    wgmma_commit();
}

// This warp has multiplied with a stage.
template <int STAGES>
__device__ __forceinline__ void gemm_give_back(const Gemm<STAGES>& g, int stage) {
    if (g.lane == 0) barrier_arrive(g.stages.empty(stage));
}

// Ends the step before the one that was started.
template <int STAGES>
__device__ __forceinline__ void gemm_end_step(Gemm<STAGES>& g) {
    wgmma_wait<1>();
    if (g.k > 0) gemm_give_back(g, g.last);
    g.last = g.ring.stage;
    g.ring.advance();
    g.k++;
}

// Ends the tile's last step: its sums are complete.
template <int STAGES>
__device__ __forceinline__ void gemm_end_tile(Gemm<STAGES>& g) {
    wgmma_wait<0>();
    wgmma_hold(g.c);
    gemm_give_back(g, g.last);
}

// The next step of the tile's product, and the end of the one before.
template <typename User>
__device__ __forceinline__ void gemm_step(typename User::Work& w) {
    gemm_start_step<typename User::T, User::A_MN, User::B_MN, User::COLUMNS>(w.gemm);
    gemm_end_step(w.gemm);
}

// A tile's product from chunk C on, while the tile before is delivered. User has the types T and Work (a struct whose
// `gemm` is a Gemm), the constants A_MN, B_MN, COLUMNS and EVERY, and a function chunk<C, LAST>(w, until): it delivers
// columns 32 C and on of the tile before, and takes into the registers that these leave what this tile needs. Each
// EVERYth chunk ends when its share of the steps, `until`, has been started; chunk may start one of them itself where
// that pays.
template <typename User, int C = 0>
__device__ __forceinline__ void gemm_product(typename User::Work& w, int steps) {
    if constexpr (C < GEMM_CHUNKS) {
        const int until = (C + 1) % User::EVERY == 0 ? (C + 1) * steps / GEMM_CHUNKS : 0;
        if (C == 0) w.gemm.k = 0;
        gemm_step<User>(w);
        User::template chunk<C, false>(w, until);
        while (w.gemm.k < until) gemm_step<User>(w);
        gemm_product<User, C + 1>(w, steps);
    } else {
        gemm_end_tile(w.gemm);
    }
}

// Delivers the last tile.
template <typename User, int C = 0>
__device__ __forceinline__ void gemm_deliver_last(typename User::Work& w) {
    if constexpr (C < GEMM_CHUNKS) {
        User::template chunk<C, true>(w, 0);
        gemm_deliver_last<User, C + 1>(w);
    }
}

#endif
