// Arithmetic that gives the same bits on the CPU and on any GPU, whatever the compiler's flags. Each operation here is
// one that IEEE 754 defines to the last bit; on the device it is the intrinsic with that guarantee. A product is added
// to a sum only by exact_fma, so that no compiler finds a multiply and an add to contract. IEEE leaves open only the
// bits of NaN, and x86 and CUDA differ there, so canonical() gives NaN one pattern before it is stored. NVRTC, which
// has no standard headers, also compiles this file and all that follow it.
#pragma once

#ifndef __CUDACC_RTC__
#include <math.h>
#include <string.h>
#endif
#include "../kernels/ptx.cuh"

EMBED_SOURCE

#ifdef __CUDACC__
#define OPTIM_INLINE __host__ __device__ __forceinline__
#else
#define OPTIM_INLINE inline __attribute__((always_inline))
#endif

// Marks a function that only the host calls. NVRTC compiles nothing for the host, so there it is an unused device
// function.
#ifdef __CUDACC_RTC__
#define OPTIM_HOST __device__
#else
#define OPTIM_HOST
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool ON_HOPPER = true;  // or on a later GPU
#else
constexpr bool ON_HOPPER = false;
#endif

// Marks a loop whose arrays must stay in registers on the GPU.
#ifdef __CUDA_ARCH__
#define OPTIM_UNROLL _Pragma("unroll")
#else
#define OPTIM_UNROLL
#endif

// Marks such a loop over elements that the CPU runs in vectors, also at -O2: no iteration may read what another writes.
#ifdef __CUDA_ARCH__
#define OPTIM_VECTORS OPTIM_UNROLL
#else
#define OPTIM_VECTORS _Pragma("omp simd")
#endif

// Selects the first expression on the GPU and the second on the CPU.
#ifdef __CUDA_ARCH__
#define OPTIM_EITHER(GPU, CPU) GPU
#else
#define OPTIM_EITHER(GPU, CPU) CPU
#endif

constexpr bool ON_GPU = OPTIM_EITHER(true, false);

OPTIM_INLINE float exact_mul(float a, float b) {
    return OPTIM_EITHER(__fmul_rn(a, b), a * b);
}

OPTIM_INLINE float exact_add(float a, float b) {
    return OPTIM_EITHER(__fadd_rn(a, b), a + b);
}

// Returns a * b + c, rounded once.
OPTIM_INLINE float exact_fma(float a, float b, float c) {
    return OPTIM_EITHER(__fmaf_rn(a, b, c), fmaf(a, b, c));
}

OPTIM_INLINE float exact_div(float a, float b) {
    return OPTIM_EITHER(__fdiv_rn(a, b), a / b);
}

OPTIM_INLINE float exact_sqrt(float a) {
    return OPTIM_EITHER(__fsqrt_rn(a), sqrtf(a));
}

// Returns the correctly rounded root of max(v, 2^-100), for a moment v; NaN for infinity. Below 2^-100 the approximate
// start would flush to zero. A root of 2^-50 is negligible beside eps, and formats that store roots treat one that
// small as zero (blocks.cuh). On a GPU this is the sequence of __fsqrt_rn without its test and branch, which cost as
// much as the arithmetic: the approximate instruction only starts it, and the last step rounds correctly. The tests try
// all mantissas.
constexpr float MIN_ROOT = 8.8817842e-16f;  // 2^-50

OPTIM_INLINE float moment_root(float v) {
    const float min = 7.8886091e-31f;  // 2^-100
#ifdef __CUDA_ARCH__
    float a = fmaxf(v, min), r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
    float s = __fmul_rn(a, r);
    return __fmaf_rn(__fmaf_rn(-s, s, a), __fmul_rn(r, 0.5f), s);
#else
    float a = v > min ? v : min;
    return sqrtf(a) + (a - a);
#endif
}

// Returns 1 / b, correctly rounded, for 2^-126 <= |b| <= 2^125, by the sequence of __frcp_rn without its test and
// branch.
OPTIM_INLINE float exact_reciprocal(float b) {
#ifdef __CUDA_ARCH__
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
    return __fmaf_rn(__fmaf_rn(-b, r, 1.0f), r, r);
#else
    return 1.0f / b;
#endif
}

// Returns a number of another type with the same bits.
template <class To, class From>
OPTIM_INLINE To same_bits(From from) {
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

OPTIM_INLINE uint32_t float_bits(float x) {
    return OPTIM_EITHER(__float_as_uint(x), same_bits<uint32_t>(x));
}

OPTIM_INLINE float bits_float(uint32_t bits) {
    return OPTIM_EITHER(__uint_as_float(bits), same_bits<float>(bits));
}

OPTIM_INLINE bool is_finite(float x) {
    return (float_bits(x) & 0x7f800000u) != 0x7f800000u;
}

OPTIM_INLINE bool is_nan(float x) {
    return x != x;
}

// Returns x, or for NaN the pattern `nan`, between 0x7f800001 and 0x7fffffff. A GPU's arithmetic gives NaN the bits
// 0x7fffffff, the largest integer among the bits of all floats, so there a minimum of integers suffices; stored NaN
// have that sign too.
OPTIM_INLINE float one_nan(float x, uint32_t nan) {
#ifdef __CUDA_ARCH__
    int bits = (int)__float_as_uint(x);
    return __uint_as_float((uint32_t)(bits < (int)nan ? bits : (int)nan));
#else
    return is_nan(x) ? bits_float(nan) : x;
#endif
}

// Returns the sign of x at bit 31; 0 for NaN, whose sign differs between machines (a GPU's arithmetic makes it
// positive).
OPTIM_INLINE uint32_t sign_bits(float x) {
    return OPTIM_EITHER(float_bits(x), is_nan(x) ? 0u : float_bits(x)) & 0x80000000u;
}

// Returns the result x of an arithmetic operation; NaN gets the pattern that a GPU gives it.
OPTIM_INLINE float one_nan(float x) {
    return OPTIM_EITHER(x, is_nan(x) ? bits_float(0x7fffffffu) : x);
}

OPTIM_INLINE float canonical(float x) {
    return is_nan(x) ? bits_float(0x7fc00000u) : x;
}

// Minimum and maximum with a defined result if `a` is NaN: b.
OPTIM_INLINE float exact_min(float a, float b) {
    return OPTIM_EITHER(fminf(a, b), a < b ? a : b);
}

OPTIM_INLINE float exact_max(float a, float b) {
    return OPTIM_EITHER(fmaxf(a, b), a > b ? a : b);
}

// Returns |a|. A GPU takes the absolute value as part of the comparison that follows, at no cost.
OPTIM_INLINE float exact_abs(float a) {
    return OPTIM_EITHER(fabsf(a), bits_float(float_bits(a) & 0x7fffffffu));
}
