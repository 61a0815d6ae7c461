// The first product of low_rank.cuh in bf16 on sm_90a, as kernels/low_rank_project.cuh makes it in fp32:
//     a: Q, 64 rows a warpgroup;  b: G, 128 to 192 channels, as many as are done first
// The optimizer, which leaves this product to the library, does not use it. Deterministic. Sizes are multiples of 8,
// addresses of 16 bytes.
#pragma once
#include "../kernels/low_rank_project.cuh"

#ifdef __CUDACC__
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Starts a step of the product of a warpgroup, in bf16: 64 of the rank, all channels.
template <typename Kind, int PARTS, bool LEFT>
__device__ __forceinline__ void lh_project_step(bf16, float (&c)[Kind::N / 8][4], uint32_t q, int warp, int, bool add) {
    const uint32_t g = q + Kind::G;
    const uint64_t left = uniform_operand(operand_k_major<LH_TILE>(q + warp / 4 * 64 * PANEL_ROW_BYTES, 0)),
                   right = uniform_operand(LEFT ? operand_mn_major<64>(g, 0) : operand_k_major<Kind::N>(g, 0));
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++)
        Wgmma<Kind::N>::template shared<0, LEFT>(
            c, operand_step(left, j * 32), operand_step(right, j * (LEFT ? 16 * PANEL_ROW_BYTES : 32)), add || j > 0);
}

#endif

inline LowProjectPlan low_project_plan_bf16(const Device* dev, const bf16* g, const bf16* q, int64_t rows, int64_t cols,
                                            int64_t rank) {
    LowProjectPlan best;
    best.time = INFINITY;
    for (int channels : {128, 144, 160, 192}) {
        if (rows < cols && channels % 64 != 0) continue;
        const LowProjectPlan plan = low_project_plan<bf16>(dev, g, q, nullptr, rows, cols, rank, channels);
        if (plan.time < best.time) best = plan;
    }
    return best;
}

template <typename Sink>
void low_project_run_bf16(const Device* dev, const LowProjectPlan* p, const Sink& sink) {
    if (p->left && p->channels == 128) return low_project_launch<bf16, 1, true, 128, 6>(dev, p, sink);
    if (p->left) return low_project_launch<bf16, 1, true, 192, 5>(dev, p, sink);
    if (p->channels == 128) return low_project_launch<bf16, 1, false, 128, 6>(dev, p, sink);
    if (p->channels == 144) return low_project_launch<bf16, 1, false, 144, 6>(dev, p, sink);
    if (p->channels == 160) return low_project_launch<bf16, 1, false, 160, 6>(dev, p, sink);
    low_project_launch<bf16, 1, false, 192, 5>(dev, p, sink);
}
#endif
