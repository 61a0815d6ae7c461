// Wrappers of sm_90a's instructions, besides those of ptx.cuh, for the attention kernels, the classifier, layernorm's
// backward pass and the products next to GELU: copies of tensors by TMA, the matrix product of a warpgroup of 128
// threads (wgmma) and barriers of some of a block's warps. Each instruction is a function, whose comment says what it
// does, which layout it needs, and which section of NVIDIA's PTX ISA defines it (by title, since the numbers change
// between editions).
//
// Tiles. A tile of ROWS x COLS bf16 (ROWS a multiple of 8, COLS of 64) lies in shared memory as COLS / 64 panels, one
// after another. A panel is ROWS rows of 64 elements = 128 bytes, begins at a multiple of 1024 bytes, and its 16-byte
// chunks are permuted by the 128-byte swizzle: chunk c of row r is at chunk c ^ (r % 8) of that row, so that eight rows
// of one column lie in different banks. TMA writes and reads panels in this form, one copy per panel, and wgmma reads
// them. Two functions of ROWS give the descriptors:
//   operand_k_major    the tile's rows are the operand's M or N, and the product sums along a row  (q, k of q k^T)
//   operand_mn_major   the product sums down the tile's rows                                      (v of p v)
#pragma once

#include "common.cuh"
#include "mma.cuh"
#include "ptx.cuh"

// Host: tensor maps.

constexpr int PANEL_ROW_BYTES = 128;

using TensorMapEncode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                     const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's cuTensorMapEncodeTiled (CUDA driver API, Tensor Map Object Management).
inline TensorMapEncode tensor_map_encoder() {
    TensorMapEncode encode;
    if (!driver_bind("cuTensorMapEncodeTiled", &encode))
        user_error("the NVIDIA driver has no cuTensorMapEncodeTiled; install driver 525 or later");
    return encode;
}

// A map of (batches, rows, columns) bf16 with rows `columns` apart and batches rows * columns apart, for copies of one
// panel: box_rows <= 256 rows of 64 columns of one batch. Rows past `rows` are read as zeros and not written. Making
// one takes about a microsecond; pass it as a `const __grid_constant__ CUtensorMap` parameter. A panel of fp32 has 32
// columns.
inline CUtensorMap tensor_map(const void* address, int64_t batches, int64_t rows, int64_t columns, int box_rows,
                              bool fp32 = false) {
    static const TensorMapEncode encode = tensor_map_encoder();
    CUtensorMap map = {};
    const int size = fp32 ? 4 : 2;
    const cuuint64_t sizes[3] = {(cuuint64_t)columns, (cuuint64_t)rows, (cuuint64_t)batches};
    const cuuint64_t strides[2] = {(cuuint64_t)(columns * size),
                                   (cuuint64_t)(rows * columns * size)};  // of dim 1 and 2
    const cuuint32_t box[3] = {(cuuint32_t)(PANEL_ROW_BYTES / size), (cuuint32_t)box_rows, 1}, steps[3] = {1, 1, 1};
    check(encode(&map, fp32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void*)address,
                 sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return map;
}

// True if this is Hopper and a kernel was built for sm_90a: otherwise it is empty and uses few registers. Kernels with
// the same parameters share the answer.
template <typename Kernel>
bool hopper_runs(const Device* dev, Kernel* kernel) {
    if (dev->compute != 90) return false;  // a CPU has no driver to ask
    static const bool built = [&] {
        cudaFuncAttributes attributes;
        check(cudaFuncGetAttributes(&attributes, kernel));
        return attributes.numRegs > 64;
    }();
    return built;
}

// Device. Shared memory is addressed by its 32-bit address.

// Byte offset in a panel of a row's 16-byte chunk (PTX ISA, Tensors: Swizzling Modes, 128B: address bits 4-6 are XORed
// with bits 7-9).
__device__ __forceinline__ uint32_t panel_offset(int row, int chunk) {
    return (uint32_t)(row * PANEL_ROW_BYTES + ((chunk ^ (row & 7)) << 4));
}

// The thread that initialised barriers calls this before the __syncthreads() after which other threads and TMA use
// them.
__device__ __forceinline__ void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async();
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    while (!barrier_passed(barrier, parity)) {
    }
}

// A place in a ring of stages in shared memory, and the parity of its present round.
template <int STAGES>
struct Ring {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Barriers of `threads` threads, a multiple of 32, with numbers 1 to 15; 0 is __syncthreads() (PTX ISA, Parallel
// Synchronization: barrier). sync waits for the others, arrive does not.

__device__ __forceinline__ void group_sync(int number, int threads) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ __forceinline__ void group_arrive(int number, int threads) {
    asm volatile("barrier.cta.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// TMA copies (PTX ISA, Data Movement: cp.async.bulk.tensor). One thread starts a copy. Coordinates are column, row and
// batch of the box's first element.

// The barrier counts all bytes of the box, also those past the tensor's end.
__device__ __forceinline__ void tensor_load(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column, int row,
                                            int batch) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(batch)
        : "memory");
}

// Loads a tile (ROWS x COLS, see above) in boxes of BOX rows.
template <int ROWS, int COLS, int BOX>
__device__ __forceinline__ void tile_load(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column, int row,
                                          int batch) {
#pragma unroll
    for (int panel = 0; panel < COLS / 64; panel++)
#pragma unroll
        for (int r = 0; r < ROWS; r += BOX)
            tensor_load(to + (panel * ROWS + r) * PANEL_ROW_BYTES, map, barrier, column + panel * 64, row + r, batch);
}

// No coordinate may be negative (CUDA C++ Programming Guide, Tensor Memory Access), as one of a load may.
__device__ __forceinline__ void tensor_store(const CUtensorMap* map, uint32_t from, int column, int row, int batch) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2,%3,%4}], [%1];" ::"l"(map),
                 "r"(from), "r"(column), "r"(row), "r"(batch)
                 : "memory");
}

// Four 8 x 8 matrices from registers to shared memory: thread l gives the address of row l % 8 of matrix l / 8 (16
// bytes), register i holds the thread's part of matrix i as in an accumulator of mma.sync (PTX ISA, Warp Level Matrix
// Instructions: stmatrix). Transposed: the address is that of a row of the transposed matrix.
__device__ __forceinline__ void store_matrices(uint32_t to, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(r0), "r"(r1), "r"(r2),
                 "r"(r3)
                 : "memory");
}

__device__ __forceinline__ void store_matrices_transposed(uint32_t to, uint32_t r0, uint32_t r1, uint32_t r2,
                                                          uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

// Sums sum[v] over the 8 lanes with the same lane % 4: lane 4 v + t returns the sum for v. If sum[2 n + e] belongs to
// column 8 n + 2 t + e of accumulators (below), these are sums of 32 columns, and each lane has that of lane_column.
__device__ __forceinline__ float sum_lanes(const float (&sum)[8], int lane) {
    float half[4], quarter[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float keep = lane & 16 ? sum[i + 4] : sum[i], send = lane & 16 ? sum[i] : sum[i + 4];
        half[i] = keep + __shfl_xor_sync(0xffffffffu, send, 16);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float keep = lane & 8 ? half[i + 2] : half[i], send = lane & 8 ? half[i] : half[i + 2];
        quarter[i] = keep + __shfl_xor_sync(0xffffffffu, send, 8);
    }
    float keep = lane & 4 ? quarter[1] : quarter[0], send = lane & 4 ? quarter[0] : quarter[1];
    return keep + __shfl_xor_sync(0xffffffffu, send, 4);
}

__device__ __forceinline__ int lane_column(int lane) {
    return lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2;
}

// wgmma (PTX ISA, Asynchronous Warpgroup Level Matrix Instructions).
//
// The order of events: wgmma_fence, products, wgmma_commit, wgmma_wait<N>, wgmma_hold. Until the wait, nobody touches
// the accumulators or an operand in registers. The fence is needed before the first product after any other
// instruction wrote registers that it uses, accumulators included.

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the newest N groups of products are in flight.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// The compiler assumes that a product is done where it is issued; this keeps it from moving uses across the wait.
template <int N>
__device__ __forceinline__ void wgmma_hold(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
}

// Descriptor of an operand in shared memory (PTX ISA, same chapter: Matrix Descriptor Format): bits 0-13 address / 16,
// 16-29 leading-dimension byte offset / 16, 32-45 stride-dimension byte offset / 16, 49-51 base offset, 62-63 swizzle,
// 1 = 128 bytes. The base offset is 0 as long as address bits 7-9 are, which holds for every step below.
__device__ __forceinline__ uint64_t operand(uint32_t address, uint32_t leading, uint32_t stride) {
    return (uint64_t)((address & 0x3ffffu) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
           (uint64_t)1 << 62;
}

// Step k (16 columns, 32 bytes) of a tile of ROWS rows, or of its rows from a multiple of 8 on (then `tile` is that
// row's address). Stride: from 8 rows to the next 8. Leading is not used when the swizzle is as wide as a row (same
// chapter: Strides).
template <int ROWS>
__device__ __forceinline__ uint64_t operand_k_major(uint32_t tile, int k) {
    return operand(tile + (uint32_t)(k / 4 * ROWS * PANEL_ROW_BYTES + k % 4 * 32), 16, 8 * PANEL_ROW_BYTES);
}

// Step k (rows 16 k to 16 k + 15) of a tile of ROWS rows. Stride: from 8 rows to the next 8. Leading: from 64 columns
// to the next 64, a panel.
template <int ROWS>
__device__ __forceinline__ uint64_t operand_mn_major(uint32_t tile, int k) {
    return operand(tile + (uint32_t)(k * 16 * PANEL_ROW_BYTES), ROWS * PANEL_ROW_BYTES, 8 * PANEL_ROW_BYTES);
}

// Returns the operand `bytes`, a constant, further on in the tile. If the compiler knows that a descriptor is the same
// in all threads of the warp (uniform_operand), a step costs one instruction, not a computation and two moves.
__device__ __forceinline__ uint64_t operand_step(uint64_t operand, int bytes) {
    return (operand & 0xffffffff00000000ull) | ((uint32_t)operand + (uint32_t)(bytes >> 4));
}

__device__ __forceinline__ uint64_t uniform_operand(uint64_t operand) {
    return (operand & 0xffffffff00000000ull) | __shfl_sync(0xffffffffu, (uint32_t)operand, 0);
}

// c (64 x N, fp32) = a (64 x 16) b (16 x N), or += when `add`. With w the warp of the warpgroup, g = lane / 4 and
// t = lane % 4, c[n][0..1] are row 16 w + g, columns 8 n + 2 t and the next, c[n][2..3] the same of row 16 w + g + 8
// (same chapter: Register Fragments). That is mma.sync's layout, so c in bf16 is the next product's a in registers:
// a[0] = c[2k][0..1], a[1] = c[2k][2..3], a[2] = c[2k+1][0..1], a[3] = c[2k+1][2..3] for its step k.
// A_MN, B_MN: that operand is mn_major. T: bf16 or __half. shared_fp8: a (64 x 32) and b (32 x N) are codes, both
// k_major: a step has as many bytes. The codes are e4m3; the tensor cores keep 14 bits of a sum.
template <int N, typename T = bf16>
struct Wgmma;

// An asm statement spells out each register, so each N needs a text of its own.
// These macros stay defined: benches of dev/ add widths of their own.
#define REGISTERS_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define REGISTERS_32 REGISTERS_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define REGISTERS_48 REGISTERS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define REGISTERS_64 REGISTERS_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define REGISTERS_80 REGISTERS_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define REGISTERS_96 REGISTERS_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define REGISTERS_112 REGISTERS_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define REGISTERS_128 REGISTERS_112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define OPERANDS_8(n)                                                                                 \
    "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3]), "+f"(c[n + 1][0]), "+f"(c[n + 1][1]), \
        "+f"(c[n + 1][2]), "+f"(c[n + 1][3])
#define OPERANDS_16(n) OPERANDS_8(n), OPERANDS_8(n + 2)
#define OPERANDS_32(n) OPERANDS_16(n), OPERANDS_16(n + 4)
#define OPERANDS_64(n) OPERANDS_32(n), OPERANDS_32(n + 8)
#define OPERANDS_128(n) OPERANDS_64(n), OPERANDS_64(n + 16)
// R = N / 2 registers, followed by the numbers R to R + 6 of the operands after them.
#define WGMMA(T, TYPE, N, R, r0, r1, r2, r3, r4, r5, r6)                                                               \
    template <>                                                                                                        \
    struct Wgmma<N, T> {                                                                                               \
        template <int A_MN, int B_MN>                                                                                  \
        static __device__ __forceinline__ void shared(float (&c)[N / 8][4], uint64_t a, uint64_t b, int add) {         \
            asm volatile("{.reg .pred p; setp.ne.b32 p, %" #r2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N             \
                         "k16.f32." TYPE "." TYPE " {" REGISTERS_##R "}, %" #r0 ", %" #r1 ", p, 1, 1, %" #r3 ", %" #r4 \
                                                                     ";}"                                              \
                         : OPERANDS_##R(0)                                                                             \
                         : "l"(a), "l"(b), "r"(add), "n"(A_MN), "n"(B_MN));                                            \
        }                                                                                                              \
        static __device__ __forceinline__ void shared_fp8(float (&c)[N / 8][4], uint64_t a, uint64_t b, int add) {     \
            asm volatile("{.reg .pred p; setp.ne.b32 p, %" #r2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N             \
                         "k32.f32.e4m3.e4m3 {" REGISTERS_##R "}, %" #r0 ", %" #r1 ", p, 1, 1;}"                        \
                         : OPERANDS_##R(0)                                                                             \
                         : "l"(a), "l"(b), "r"(add));                                                                  \
        }                                                                                                              \
        template <int B_MN>                                                                                            \
        static __device__ __forceinline__ void registers(float (&c)[N / 8][4], const uint32_t (&a)[4], uint64_t b,     \
                                                         int add) {                                                    \
            asm volatile("{.reg .pred p; setp.ne.b32 p, %" #r5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N             \
                         "k16.f32." TYPE "." TYPE " {" REGISTERS_##R "}, {%" #r0 ",%" #r1 ",%" #r2 ",%" #r3 "}, %" #r4 \
                                                                     ", p, 1, 1, %" #r6 ";}"                           \
                         : OPERANDS_##R(0)                                                                             \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(B_MN));                   \
        }                                                                                                              \
    };
WGMMA(bf16, "bf16", 64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA(bf16, "bf16", 128, 64, 64, 65, 66, 67, 68, 69, 70)
WGMMA(bf16, "bf16", 256, 128, 128, 129, 130, 131, 132, 133, 134)
WGMMA(__half, "f16", 128, 64, 64, 65, 66, 67, 68, 69, 70)
WGMMA(__half, "f16", 256, 128, 128, 129, 130, 131, 132, 133, 134)

// Bytes from the first step (16 columns) of a tile of ROWS rows to step k.
template <int ROWS>
__device__ __forceinline__ constexpr int k_major_step(int k) {
    return k / 4 * ROWS * PANEL_ROW_BYTES + k % 4 * 32;
}

// Starts c (64 x 8 N) = or += a b, as a group of its own: a (64 x 16 K) is in registers, b a tile of 16 K rows.
template <int N, int K>
__device__ __forceinline__ void wgmma_columns(float (&c)[N][4], const uint32_t (&a)[K][4], uint32_t b, bool add) {
    const uint64_t right = uniform_operand(operand_mn_major<16 * K>(b, 0));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K; k++)
        Wgmma<8 * N>::template registers<1>(c, a[k], operand_step(right, k * 16 * PANEL_ROW_BYTES), add || k > 0);
    wgmma_commit();
}
