// Arithmetic that gives the same bits on the CPU and on any GPU, whatever the compiler's flags: each operation here is
// one that IEEE 754 defines to the last bit, and on the device it is the intrinsic that says so. Products feed sums
// only through exact_fma, so that no compiler finds a multiply and an add to contract. NaN is the one result whose bits
// IEEE leaves open (x86 and CUDA differ): canonical() gives it one pattern before it is stored. This file and all that
// it is followed by is also compiled at run time by NVRTC, which has no standard headers.
#pragma once

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef short int16_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;
#else
#include <math.h>
#include <stdint.h>
#include <string.h>
#endif

// jit.cu defines EMBED_SOURCE to put the text of each file that says it into the binary, for NVRTC; elsewhere it is
// empty.
#ifndef EMBED_SOURCE
#define EMBED_SOURCE
#endif
EMBED_SOURCE

#define OPTIM_INLINE __host__ __device__ __forceinline__

// Before a function that only the host calls. NVRTC compiles none for the host; there it is for the device and unused.
#ifdef __CUDACC_RTC__
#define OPTIM_HOST __device__
#else
#define OPTIM_HOST
#endif

#ifdef __CUDA_ARCH__
constexpr bool ON_GPU = true;
#else
constexpr bool ON_GPU = false;
#endif

// Before a loop whose arrays must stay in registers on the GPU.
#ifdef __CUDA_ARCH__
#define OPTIM_UNROLL _Pragma("unroll")
#else
#define OPTIM_UNROLL
#endif

OPTIM_INLINE float exact_mul(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

OPTIM_INLINE float exact_add(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

// a * b + c, rounded once.
OPTIM_INLINE float exact_fma(float a, float b, float c) {
#ifdef __CUDA_ARCH__
    return __fmaf_rn(a, b, c);
#else
    return fmaf(a, b, c);
#endif
}

OPTIM_INLINE float exact_div(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

OPTIM_INLINE float exact_sqrt(float a) {
#ifdef __CUDA_ARCH__
    return __fsqrt_rn(a);
#else
    return sqrtf(a);
#endif
}

#ifdef __CUDACC__
// The same results as exact_sqrt and exact_div for operands in a window, by the sequences that those use there: without
// the test and the branch of each, which cost as much as the arithmetic and keep elements from overlapping. The
// approximate instructions only start them; the last step of each rounds correctly.
// fast_div: 2^-90 <= |a| <= 2^60, 2^-62 <= b < 2^32, so that the quotient is no subnormal, which the last step would
// round wrongly once in 1e7. fast_sqrt: 2^-101 <= a <= 2^40 (outside, any result).
__device__ __forceinline__ float fast_sqrt(float a) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
    float s = __fmul_rn(a, r);
    return __fmaf_rn(__fmaf_rn(-s, s, a), __fmul_rn(r, 0.5f), s);
}

__device__ __forceinline__ float fast_div(float a, float b) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
    r = __fmaf_rn(__fmaf_rn(-b, r, 1.0f), r, r);
    float q = __fmul_rn(a, r);
    q = __fmaf_rn(__fmaf_rn(-b, q, a), r, q);
    return __fmaf_rn(__fmaf_rn(-b, q, a), r, q);
}

// Gathers in *far how far operands lie from the window: the largest of (bits - least) as unsigned.
__device__ __forceinline__ void far_sqrt(uint32_t* far, float a) {
    uint32_t distance = __float_as_uint(a) - (26u << 23);  // 2^-101
    *far = distance > *far ? distance : *far;
}

__device__ __forceinline__ void far_div(uint32_t* far, float a) {
    uint32_t distance = 2u * __float_as_uint(a) - (37u << 24);  // 2^-90, the sign shifted out
    *far = distance > *far ? distance : *far;
}

constexpr uint32_t FAR_SQRT = (167u - 26u) << 23, FAR_DIV = (187u - 37u) << 24;
#endif

OPTIM_INLINE uint32_t float_bits(float x) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(x);
#else
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
#endif
}

OPTIM_INLINE float bits_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    float x;
    memcpy(&x, &bits, 4);
    return x;
#endif
}

OPTIM_INLINE bool is_finite(float x) {
    return (float_bits(x) & 0x7f800000u) != 0x7f800000u;
}

OPTIM_INLINE bool is_nan(float x) {
    return x != x;
}

OPTIM_INLINE float canonical(float x) {
    return is_nan(x) ? bits_float(0x7fc00000u) : x;
}
