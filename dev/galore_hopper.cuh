// The parts that the sm_90a kernels of galore_mma.cuh's two products share. TMA loads their operands, and warpgroups
// multiply them (wgmma):
//     galore_project_tf32.cuh  the first product, in fp32
//     galore_back.cuh     the second one and the weights' update, in bf16
#pragma once
#include "galore_mma.cuh"
#ifdef __CUDACC__
#include "../kernels/hopper.cuh"

// launch_next lets blocks of the next launch in the stream begin as soon as there is room. wait_for_last waits until
// the last launch has ended and its results are visible; it must come before any access to memory (PTX ISA, Parallel
// Synchronization: griddepcontrol).
__device__ __forceinline__ void launch_next() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void wait_for_last() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Products of more widths than the kernels that ship need.
#define REGISTERS_72 REGISTERS_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define OPERANDS_72(n) OPERANDS_64(n), OPERANDS_8(n + 16)
#define OPERANDS_80(n) OPERANDS_64(n), OPERANDS_16(n + 16)
#define OPERANDS_96(n) OPERANDS_64(n), OPERANDS_32(n + 16)
WGMMA(bf16, "bf16", 144, 72, 72, 73, 74, 75, 76, 77, 78)
WGMMA(bf16, "bf16", 160, 80, 80, 81, 82, 83, 84, 85, 86)
WGMMA(bf16, "bf16", 192, 96, 96, 97, 98, 99, 100, 101, 102)

// TF32: a (64 x 8) in registers, words of fp32 of which the tensor cores read 19 bits, with the layout of mma.sync
// m16n8k8; b (8 x N) k_major, a step of 32 bytes. R = N / 2 registers, followed by the numbers R to R + 5.
#define WGMMA_TF32(N, R, r0, r1, r2, r3, r4, r5)                                                                   \
    template <>                                                                                                    \
    struct Wgmma<N, float> {                                                                                       \
        static __device__ __forceinline__ void registers(float (&c)[N / 8][4], const uint32_t (&a)[4], uint64_t b, \
                                                         int add) {                                                \
            asm volatile("{.reg .pred p; setp.ne.b32 p, %" #r5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N         \
                         "k8.f32.tf32.tf32 {" REGISTERS_##R "}, {%" #r0 ",%" #r1 ",%" #r2 ",%" #r3 "}, %" #r4      \
                                                            ", p, 1, 1;}"                                          \
                         : OPERANDS_##R(0)                                                                         \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                          \
        }                                                                                                          \
    };
WGMMA_TF32(32, 16, 16, 17, 18, 19, 20, 21)
WGMMA_TF32(128, 64, 64, 65, 66, 67, 68, 69)
#undef WGMMA_TF32

constexpr int LH_SHARED_BYTES = 227 * 1024;
constexpr int LH_TILE = 128, LH_PANEL_BYTES = LH_TILE * PANEL_ROW_BYTES;

// The result of a product: its sides in memory, what the sum runs over, and the blocks that share a tile.
struct LowResult {
    int rows, cols, depth, slices;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The words of fp32 of step k of an operand a whose rows in shared memory are of K, rounded to TF32, and what that
// leaves: this warp's 16 of M, from `first` on. DEPTH: rows of a panel.
template <int PARTS, int DEPTH>
__device__ __forceinline__ void lh_read_down(uint32_t (&x)[4], uint32_t (&rest)[4], uint32_t panels, int first, int k,
                                             int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int of_m = first + i % 2 * 8 + lane / 4, of_k = k * 8 + i / 2 * 4 + lane % 4;
        x[i] =
            load_word(panels + of_m / 32 * DEPTH * PANEL_ROW_BYTES + panel_offset(of_k, of_m % 32 / 4) + of_m % 4 * 4);
    }
    lp_split<PARTS>(x, rest);
}

// A step of K of a product in TF32 with a in registers; with PARTS 3, the small products first. rest_b: as b, of what
// it leaves.
template <int PARTS, int N>
__device__ __forceinline__ void lh_multiply_tf32(float (&c)[N / 8][4], const uint32_t (&a)[4],
                                                 const uint32_t (&rest)[4], uint64_t b, uint64_t rest_b, bool add) {
    if (PARTS == 3) {
        Wgmma<N, float>::registers(c, rest, b, add);
        Wgmma<N, float>::registers(c, a, rest_b, true);
    }
    Wgmma<N, float>::registers(c, a, b, PARTS == 3 || add);
}
#endif

// Launches a kernel whose blocks stay and share `steps`.
template <typename... Given>
void low_stream_launch(const Device* dev, void (*kernel)(Given...), int64_t steps, int threads, int bytes, bool early,
                       std::decay_t<Given>... given) {
    cudaLaunchAttribute serial = {};
    serial.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    serial.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(steps < dev->sm_count ? steps : dev->sm_count)), config.blockDim = dim3(threads);
    config.dynamicSmemBytes = (size_t)bytes, config.stream = dev->stream;
    config.attrs = &serial, config.numAttrs = early ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, given...));
}
#endif
