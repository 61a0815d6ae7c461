// Arithmetic that gives the same bits on the CPU and on any GPU, whatever the compiler's flags: each operation here is
// one that IEEE 754 defines to the last bit, and on the device it is the intrinsic that says so. Products feed sums
// only through exact_fma, so that no compiler finds a multiply and an add to contract. NaN is the one result whose bits
// IEEE leaves open (x86 and CUDA differ): canonical() gives it one pattern before it is stored. This file and all that
// it is followed by is also compiled at run time by NVRTC, which has no standard headers.
#pragma once

#ifdef __CUDACC_RTC__
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
    return (float_bits(x) & 0x7fffffffu) > 0x7f800000u;
}

OPTIM_INLINE float canonical(float x) {
    return is_nan(x) ? bits_float(0x7fc00000u) : x;
}
