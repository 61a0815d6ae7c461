// The parts that all attention kernels share, whatever instructions they are made of.
#pragma once

#include "common.cuh"

__device__ inline float fast_log2(float x) {  // absolute error 2^-22 from 0.5 to 2, else relative error 2^-22
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline int load_acquire(const int* address) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ inline void store_release(int* address, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// A warp's accumulators of a product (16 x 8 N) as the left operand of the next one.
template <int N>
__device__ __forceinline__ void pack_left(uint32_t (*a)[4] /*(N/2)*/, const float (&c)[N][4]) {
#pragma unroll
    for (int k = 0; k < N / 2; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) a[k][i] = pack_bf16(c[2 * k + i / 2][i % 2 * 2], c[2 * k + i / 2][i % 2 * 2 + 1]);
}

// Hides the keys after each query in a warp's scores of 16 queries and 8 N keys, from these on.
template <int N>
__device__ __forceinline__ void mask_keys(float (&s)[N][4], int key, int query) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < N * 4; i++)
        if (key + i / 4 * 8 + t * 2 + i % 2 > query + g + i / 2 % 2 * 8) s[i / 4][i % 4] = -INFINITY;
}

// Head bh and tile of queries of piece `index` of the forward pass. Heads come in groups whose keys and values fit in
// the L2 cache together; within a group the longest rows go first, so that the last pieces are short ones.
__device__ inline void forward_work(int& bh, int& tile, int index, int tiles, int heads, int group) {
    int g = index / (group * tiles), within = index % (group * tiles);
    int size = min(group, heads - g * group);
    bh = g * group + within % size;
    tile = tiles - 1 - within / size;
}

// Heads whose keys and values fill a third of an H100's or A100's L2 cache.
inline int attention_group(int T, int HS, int element_bytes) {
    int64_t head = (int64_t)T * HS * 2 * element_bytes, group = (16 << 20) / head;
    return (int)(group < 1 ? 1 : group > 64 ? 64 : group);
}

// Writes D = dout . out of each head, which the backward pass reads, and zeros the flags. BM 0: rows is (B*NH, T), D
// alone. Otherwise it is (B*NH, ceil(T/BM), {lse * log2(e), D}, BM), past T infinity and 0. A warp has 32 tokens of one
// head, a lane 16 bytes of a token; the warps of a block have neighbouring heads. grid (ceil(B * padded * NH / 256)),
// block 256; deterministic.
template <typename X, int HS, int BM>
__global__ void attention_rows_kernel(float* rows, int* flags, int64_t flag_count, const X* dout /*(B,T,NH,HS)*/,
                                      const X* out /*(B,T,NH,HS)*/, const float* lse /*(B,NH,T)*/, int B, int T,
                                      int NH) {
    constexpr int SIZE = Vec<X>::size, LANES = HS / SIZE, TOKENS = 32 / LANES, TILE = BM > 0 ? BM : 32;
    const int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (int64_t i = thread; i < flag_count; i += (int64_t)gridDim.x * blockDim.x) flags[i] = 0;
    const int lane = threadIdx.x % 32, padded = (T + TILE - 1) / TILE * TILE;
    const int64_t warp = thread / 32;
    const int head = (int)(warp % NH), first = (int)(warp / NH % (padded / 32)) * 32;
    const int64_t batch = warp / NH / (padded / 32);
    if (batch >= B) return;
    float mine = 0.0f;
#pragma unroll
    for (int half = 0; half < 32; half += 16) {
        float sum[LANES / 2];
#pragma unroll
        for (int i = 0; i < LANES / 2; i++) {
            const int t = first + half + i * TOKENS + lane / LANES;
            const int64_t from = ((batch * T + t) * NH + head) * HS + lane % LANES * SIZE;
            Vec<X> a = {}, b = {};
            if (t < T) a = load_vec(dout + from), b = load_vec(out + from);
            sum[i] = 0.0f;
#pragma unroll
            for (int l = 0; l < SIZE; l++) sum[i] = fmaf(to_float(a.lane[l]), to_float(b.lane[l]), sum[i]);
        }
#pragma unroll
        for (int i = 0; i < LANES / 2; i++) {
#pragma unroll
            for (int offset = LANES / 2; offset > 0; offset /= 2)
                sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], offset);
            const float token = __shfl_sync(0xffffffffu, sum[i], lane % TOKENS * LANES);
            if (lane / TOKENS == half / TOKENS + i) mine = token;
        }
    }
    const int t = first + lane;
    const int64_t bh = batch * NH + head;
    if constexpr (BM == 0) {
        if (t < T) rows[bh * T + t] = mine;
    } else {
        float* to = rows + (bh * (padded / BM) + t / BM) * 2 * BM + t % BM;
        to[0] = t < T ? lse[bh * T + t] * LOG2_OF_E : INFINITY;
        to[BM] = mine;
    }
}

template <typename X, int HS, int BM>
void attention_rows(const Device* dev, float* rows, int* flags, int64_t flag_count, const X* dout, const X* out,
                    const float* lse, int B, int T, int NH) {
    constexpr int TILE = BM > 0 ? BM : 32;
    const int64_t warps = B * ceil_div(T, TILE) * (TILE / 32) * NH;
    launch_kernel(dev, attention_rows_kernel<X, HS, BM>, (unsigned)ceil_div(warps, 8), 256, 0, rows, flags, flag_count,
                  dout, out, lse, B, T, NH);
}
