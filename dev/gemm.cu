// The shortest user of kernels/gemm_sm90.cuh, beside cuBLASLt: c (N, OC) = inp (N, C) weight (OC, C)^T in bf16, stored
// as it is. Copy this file for a product of your own, and change what chunk does between the steps of the next tile.
// It is checked against the plain C version, and not timed if it is wrong.
//   make build/dev/gemm && ./build/dev/gemm
#include "../kernels/matmul.cuh"
#include "variants.h"

constexpr int PG_STAGES = 4, PG_SLOT_BYTES = 16 * PANEL_ROW_BYTES;  // a slot: 16 rows x 64 columns that a warp stores
constexpr int PG_SLOTS = PG_STAGES * GEMM_STAGE_BYTES, PG_BARRIERS = PG_SLOTS + 8 * PG_SLOT_BYTES;
constexpr int PG_SHARED_BYTES = PG_BARRIERS + 2 * PG_STAGES * 8;

struct PlainMaps {
    CUtensorMap a, b, c;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The state of a thread in a warpgroup that multiplies.
struct PlainWork {
    Gemm<PG_STAGES> gemm;
    const PlainMaps* maps;
    uint32_t slot, place;  // the warp's slot, and this lane's address in it for the matrices of column 0
    int warp;              // of the warpgroup
    GemmTile before;
    bool full;                           // whether there is a tile before
    uint32_t held[GEMM_COLUMNS / 8][2];  // that tile in bf16
};

struct PlainUser {
    using T = bf16;
    using Work = PlainWork;
    static constexpr int A_MN = 0, B_MN = 0, COLUMNS = GEMM_COLUMNS, EVERY = 1;

    // Columns 32 C and on of the tile before: into the slot, which every other chunk fills.
    template <int C, bool LAST>
    static __device__ __forceinline__ void chunk(Work& w, int) {
        if (C % 2 == 0 && w.gemm.lane == 0) store_wait_read<0>();
        __syncwarp();
#pragma unroll
        for (int n = 4 * C; n < 4 * C + 4; n += 2)
            store_matrices(w.place ^ (uint32_t)(n % 8 << 4), w.held[n][0], w.held[n][1], w.held[n + 1][0],
                           w.held[n + 1][1]);
        if (C % 2 == 0) return;
        fence_async();
        __syncwarp();
        if (w.gemm.lane != 0 || !w.full) return;
        tensor_store(&w.maps->c, w.slot, w.before.column + C / 2 * 64, w.before.row + w.gemm.group * 64 + w.warp * 16,
                     0);
        store_commit();
    }
};

__device__ __forceinline__ void plain_consume(PlainWork& w, GemmShape shape) {
    for (int index = blockIdx.x; index < shape.tiles; index += gridDim.x) {
        gemm_product<PlainUser>(w, gemm_steps(shape));
#pragma unroll
        for (int n = 0; n < GEMM_COLUMNS / 8; n++) {
            const float* c = w.gemm.c[n];
            w.held[n][0] = pack_bf16(c[0], c[1]), w.held[n][1] = pack_bf16(c[2], c[3]);
        }
        w.before = gemm_tile(index, shape), w.full = true;
    }
    gemm_deliver_last<PlainUser>(w);
    if (w.gemm.lane == 0) store_wait_read<0>();
}

#endif

// Grid at most the tiles, block 384, shared memory PG_SHARED_BYTES; columns and depth multiples of 8, depth at least
// GEMM_MIN_DEPTH. Deterministic.
__global__ void __launch_bounds__(384, 1) plain_gemm_kernel(const __grid_constant__ PlainMaps maps, GemmShape shape) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = shared_offset(memory);
    const GemmStages<PG_STAGES> stages = {shared, shared + PG_BARRIERS};
    if (threadIdx.x == 0) stages.init(), barrier_init_done();
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_shrink<24>();
        if (threadIdx.x == 0) gemm_produce<0, 0, GEMM_COLUMNS>(stages, &maps.a, &maps.b, shape);
        return;
    }
    registers_grow<240>();
    PlainWork w = {};
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32 - 4, 0);
    w.gemm.stages = stages, w.gemm.group = warp / 4, w.gemm.lane = threadIdx.x % 32, w.maps = &maps;
    w.warp = warp % 4, w.slot = shared + PG_SLOTS + warp * PG_SLOT_BYTES;
    w.place = w.slot + panel_offset(w.gemm.lane % 16, w.gemm.lane / 16);
    plain_consume(w, shape);
#else
    (void)maps, (void)shape;
#endif
}

struct Arrays : Room {
    Shape shape;
    int64_t N = shape.N;
    int C = shape.C, OC = shape.OC;
    bf16 *inp, *weight, *out;  // (N, C), (OC, C), (N, OC)

    Arrays(const Device* on, const Shape& of) : Room(on), shape(of) {
        inp = filled(this, N * C, 1.0f, 1), weight = filled(this, (int64_t)OC * C, 2.0f / sqrtf((float)C), 2);
        out = filled(this, N * OC, 1.0f, 3);
    }
    double unit() const { return 2.0 * (double)N * C * OC; }
};

static void run_plain(const Device* dev, const Arrays* a) {
    const PlainMaps maps = {tensor_map(a->inp, 1, a->N, a->C, GEMM_ROWS),
                            tensor_map(a->weight, 1, a->OC, a->C, GEMM_COLUMNS),
                            tensor_map(a->out, 1, a->N, a->OC, 16)};
    check(cudaFuncSetAttribute(plain_gemm_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, PG_SHARED_BYTES));
    plain_gemm_kernel<<<dev->sm_count, 384, PG_SHARED_BYTES, dev->stream>>>(maps, gemm_shape(a->N, a->OC, a->C));
    check_launch();
}

static void run_library(const Device* dev, const Arrays* a) {
    matmul_forward<bf16>(dev, a->out, nullptr, a->inp, a->weight, nullptr, a->N, a->C, a->OC);
}

static double error_of(const Variant<Arrays>* v, Arrays* a) {
    const int64_t n = a->N * a->OC;
    float* want = a->host<float>(n);
    matmul_forward_cpu(want, nullptr, host_floats(a, a->inp, a->N * a->C),
                       host_floats(a, a->weight, (int64_t)a->OC * a->C), nullptr, a->N, a->C, a->OC);
    v->run(a->dev, a);
    return off(a, a->out, want, n);
}

static const Variant<Arrays> VARIANTS[] = {{"cuBLASLt", run_library, 1, error_of},
                                           {"this loop", run_plain, 1, error_of}};

int main() {
    Device dev;
    device_open(&dev, true, 0);
    if (!gemm_fits(&dev, 65536, 3072, PG_SHARED_BYTES)) user_error("gemm: ours needs an H100 or H200");
    return check_and_time(&dev, VARIANTS, {{640, 768, 512}, {1000, 1288, 456}, {1111, 520, 1600}, {9000, 1032, 768}},
                          {{65536, 768, 2304}, {65536, 768, 3072}, {65536, 3072, 768}, {16384, 1600, 6400}}, false);
}
