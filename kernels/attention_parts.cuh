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
