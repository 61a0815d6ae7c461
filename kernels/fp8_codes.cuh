// How kernels write the tensors that they make as fp8 codes, so that no separate pass rounds them: where the codes go,
// conversion of eight values, of a product's accumulators to rows of codes, and the update of the tensor's counters.
// fp8.cuh explains codes, and fp8_scales.cuh scales.
//
// A kernel rounds a value to bf16 before it makes the code. So the codes equal, to the bit, those that a cast of the
// tensor in bf16 would give. Only the gradient of the logits is rounded at random instead, see fp8_codes_random.
#pragma once
#include "common.cuh"
#ifdef __CUDACC__
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#endif

enum Fp8Type { FP8_E4M3, FP8_E5M2 };

// The place where a kernel writes codes by rows instead of its values in bf16. The classifier's codes are e5m2, all
// others e4m3. With rows NULL a kernel writes its values.
struct Fp8Codes {
    uint8_t* rows;
    const float* scale;        // device scalar
    uint32_t* amax;            // bits of the largest magnitude so far
    uint32_t* overflow_count;  // elements that were too large for their codes
};

__host__ __device__ constexpr float fp8_largest(Fp8Type type) {
    return type == FP8_E4M3 ? 448.0f : 57344.0f;
}

#ifdef __CUDACC__
// Two codes of e4m3; the first in the low byte.
__device__ inline uint32_t fp8_pair(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

// The amax and the overflows of the elements that one thread has rounded.
struct Fp8Stats {
    float amax;
    uint32_t overflow_count;
};

// Eight values to four pairs of codes of e4m3: scaled, rounded, saturated. Only if one is beyond the largest code are
// they examined one by one: counted, and made NaN if infinite (x - x is 0, or NaN if x is not finite).
__device__ __forceinline__ void fp8_pairs(uint32_t (&pair)[4], const float (&value)[8], float scale, Fp8Stats* stats) {
    constexpr float largest = fp8_largest(FP8_E4M3);
    float amax = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) amax = fmaxf(amax, fabsf(value[j]));
    stats->amax = fmaxf(stats->amax, amax);
#pragma unroll
    for (int j = 0; j < 4; j++) pair[j] = fp8_pair(value[2 * j] * scale, value[2 * j + 1] * scale);
    if (amax * scale <= largest) return;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float a = value[2 * j], b = value[2 * j + 1], low = a * scale, high = b * scale;
        stats->overflow_count += (fabsf(low) > largest) + (fabsf(high) > largest);
        pair[j] = fp8_pair(low + (a - a), high + (b - b));
    }
}

__device__ inline uint2 fp8_codes(const float (&value)[8], float scale, Fp8Stats* stats) {
    uint32_t pair[4];
    fp8_pairs(pair, value, scale, stats);
    return make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
}

// 32 bits that depend on all bits of x (the last steps of MurmurHash3).
__device__ inline uint32_t fp8_noise(uint32_t x) {
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}

// Eight values to codes of e5m2, each rounded up or down at random, so that the mean of its codes is the value. Rounded
// to nearest, a row of the logits' gradient would no longer sum to zero, and the head would learn from the difference.
// A code is the upper byte of an fp16, to whose lower byte 8 bits of noise are added: equal `key`s give equal noise. No
// value times scale may be beyond the largest code. NaN stays NaN.
__device__ inline uint2 fp8_codes_random(const float (&value)[8], float scale, uint32_t key) {
    uint32_t noise = 0, half[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j % 2 == 0) noise = fp8_noise(key + j * 0x9e3779b9u);
        const __half2 pair = __floats2half2_rn(value[2 * j] * scale, value[2 * j + 1] * scale);
        const uint32_t bits = *(const uint32_t*)&pair, magnitude = bits & 0x7fff7fffu;
        const uint32_t added = (j % 2 == 0 ? noise : noise >> 8) & 0x00ff00ffu;
        half[j] = __viaddmin_u16x2(magnitude, added, 0x7fff7fffu) | (bits & 0x80008000u);
    }
    return make_uint2(__byte_perm(half[0], half[1], 0x7531), __byte_perm(half[2], half[3], 0x7531));
}

// Updates the tensor's counters with those of a thread or a warp; most have nothing to add. Bits of floats that are not
// negative have the order of the floats.
__device__ inline void publish_amax(uint32_t* amax, uint32_t* overflow_count, uint32_t bits, uint32_t count) {
    if (count > 0) atomicAdd(overflow_count, count);
    if (bits > *(volatile uint32_t*)amax) atomicMax(amax, bits);
}

// Adds those of a block's threads, which all call it.
__device__ inline void publish_block_amax(uint32_t* amax, uint32_t* overflow_count, Fp8Stats own) {
    const float block_amax = block_max(own.amax);
    const int count = __syncthreads_count(own.overflow_count > 0);
    if (count > 0 && own.overflow_count > 0) atomicAdd(overflow_count, own.overflow_count);
    if (threadIdx.x == 0) publish_amax(amax, overflow_count, __float_as_uint(block_amax), 0);
}

// The same for the lanes of a warp, which all call it at their end: for kernels with few warps.
__device__ inline void publish_warp_amax(const Fp8Codes& codes, Fp8Stats own) {
    const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(own.amax));
    const uint32_t count = __reduce_add_sync(0xffffffffu, own.overflow_count);
    if (threadIdx.x % 32 == 0) publish_amax(codes.amax, codes.overflow_count, bits, count);
}

// Codes of 32 columns of a row, which four neighbouring lanes hold as an accumulator of wgmma or mma.sync: lane t
// (lane % 4) has in word[k] the codes of columns 16 k + 2 t, 16 k + 2 t + 1, 16 k + 2 t + 8 and 16 k + 2 t + 9. Lane t
// gets those of columns 8 t to 8 t + 7: pairs of codes are transposed among the lanes in two exchanges.
__device__ __forceinline__ uint2 fp8_gather(uint32_t word0, uint32_t word1, int lane) {
    const bool odd = lane & 1, upper = lane & 2;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? word0 : word1, 2), own = upper ? word1 : word0;
    // Word t / 2 of lane t % 2, and of lane t % 2 + 2.
    const uint32_t first = upper ? other : own, second = upper ? own : other;
    const uint32_t low = __byte_perm(first, second, 0x5410), high = __byte_perm(first, second, 0x7632);
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1), kept = odd ? high : low;
    const uint32_t even_lane = odd ? got : kept, odd_lane = odd ? kept : got;
    return make_uint2(__byte_perm(even_lane, odd_lane, 0x5410), __byte_perm(even_lane, odd_lane, 0x7632));
}

// word[k] of the upper and of the lower row for fp8_gather, from pairs of bf16 as an accumulator has them: of columns
// 16 k + 2 t and the next in the upper row, in the lower row, and the same 8 columns further on.
__device__ __forceinline__ void fp8_words(uint32_t* upper, uint32_t* lower, uint32_t a, uint32_t b, uint32_t c,
                                          uint32_t d, float scale, Fp8Stats* stats) {
    const float2 x = pair_floats(a), y = pair_floats(b), z = pair_floats(c), w = pair_floats(d);
    const float value[8] = {x.x, x.y, y.x, y.y, z.x, z.y, w.x, w.y};
    uint32_t pair[4];
    fp8_pairs(pair, value, scale, stats);
    *upper = pair[0] | pair[2] << 16, *lower = pair[1] | pair[3] << 16;
}
#endif
