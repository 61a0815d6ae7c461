// GELU in the tanh form: gelu(x) = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
// Since 0.5 (1 + tanh(u)) = 1 / (1 + e^-2u), it is computed as x s with s = sigmoid(z), z = 2 sqrt(2/pi) (x + 0.044715
// x^3): one exp and one division, and no cancellation for negative x, where 1 + tanh loses every digit. Then
//     gelu'(x) = s + x s (1 - s) z',    z' = 2 sqrt(2/pi) (1 + 3 * 0.044715 x^2).
//
// Elementwise over n elements; any n, pointers 16-byte aligned. Bytes: forward reads n and writes n, backward reads 2 n
// and writes n. In the trainer both usually ride in a matrix product, on Hopper our own (matmul_gelu.cuh), elsewhere in
// cuBLASLt's epilogue (matmul.cuh); these run where there is none, and when the activation is recomputed.
#pragma once
#include "common.cuh"
#include "cpu_math.h"

constexpr float GELU_LINEAR = 1.59576912160573071f;             // 2 sqrt(2 / pi)
constexpr float GELU_CUBIC = 0.044715f * 1.59576912160573071f;  // the same times 0.044715

inline void gelu_forward_cpu(float* out, const float* inp, int64_t n) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) {
        float x = inp[i];
        out[i] = x * cpu_sigmoid(x * fmaf(GELU_CUBIC, x * x, GELU_LINEAR));
    }
}

inline void gelu_backward_inplace_cpu(float* d, const float* inp, int64_t n) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) {
        float x = inp[i];
        float z = x * fmaf(GELU_CUBIC, x * x, GELU_LINEAR);
        float e = cpu_exp(z > -80.0f ? -z : 80.0f);  // below, s is as good as 0, and e would overflow
        float s = 1.0f / (1.0f + e);
        d[i] *= fmaf(x * (e * s) * s, fmaf(3.0f * GELU_CUBIC, x * x, GELU_LINEAR), s);
    }
}

#ifdef __CUDACC__
__device__ inline float gelu_sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x * fmaf(GELU_CUBIC, x * x, GELU_LINEAR)));
}

// For bf16: 7 instructions, the error far below bf16's rounding.
__device__ inline float gelu_sigmoid_fast(float x) {
    return fast_reciprocal(1.0f + fast_exp2(x * fmaf(-LOG2_OF_E * GELU_CUBIC, x * x, -LOG2_OF_E * GELU_LINEAR)));
}

template <typename X>
__device__ inline float gelu_value(float x) {
    return x * (std::is_same_v<X, float> ? gelu_sigmoid(x) : gelu_sigmoid_fast(x));
}

// 1 - s is taken as e^-z s, which keeps its digits where s is close to 1; below z = -80, s is as good as 0.
__device__ inline float gelu_slope(float x) {
    float e = expf(fminf(-x * fmaf(GELU_CUBIC, x * x, GELU_LINEAR), 80.0f));
    float s = 1.0f / (1.0f + e);
    return fmaf(x * (e * s) * s, fmaf(3.0f * GELU_CUBIC, x * x, GELU_LINEAR), s);
}

__device__ inline float gelu_slope_fast(float x) {
    float e = fast_exp2(fminf(x * fmaf(-LOG2_OF_E * GELU_CUBIC, x * x, -LOG2_OF_E * GELU_LINEAR), 120.0f));
    float s = fast_reciprocal(1.0f + e);
    return fmaf(x * (e * s) * s, fmaf(3.0f * GELU_CUBIC, x * x, GELU_LINEAR), s);
}

template <typename X>
__device__ inline float gelu_slope_of(float x) {
    return std::is_same_v<X, float> ? gelu_slope(x) : gelu_slope_fast(x);
}

// out = gelu(inp) or, BACKWARD, out *= gelu'(inp). Grid ceil(n / (256 vectors)), block 256, any n. Deterministic.
template <typename X, bool BACKWARD>
__global__ void gelu_kernel(X* out, const X* inp, int64_t n) {
    constexpr int size = Vec<X>::size;
    const auto value = [](X d, X x) {
        return BACKWARD ? to_float(d) * gelu_slope_of<X>(to_float(x)) : gelu_value<X>(to_float(x));
    };
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * size;
    if (i + size <= n) {
        Vec<X> x = load_vec(inp + i), d = BACKWARD ? load_vec(out + i) : x;
        float values[size];
        for (int j = 0; j < size; j++) values[j] = value(d.lane[j], x.lane[j]);
        store_vec(out + i, round_vec<X>(values));
    } else {
        for (; i < n; i++) out[i] = from_float<X>(value(BACKWARD ? out[i] : inp[i], inp[i]));
    }
}

template <bool BACKWARD, typename X>
void gelu_launch(const Device* dev, X* out, const X* inp, int64_t n) {
    if (n == 0) return;
    launch_kernel(dev, gelu_kernel<X, BACKWARD>, ceil_div(n, 256 * Vec<X>::size), 256, 0, out, inp, n);
}
#endif

// out, inp: (n)
template <typename X>
void gelu_forward(const Device* dev, X* out, const X* inp, int64_t n) {
    if constexpr (std::is_same_v<X, float>) {
        if (!dev->gpu) return gelu_forward_cpu(out, inp, n);
    }
#ifdef __CUDACC__
    gelu_launch<false>(dev, out, inp, n);
#endif
}

// d: (n), in: the gradient of gelu(inp), out: that of inp.
template <typename X>
void gelu_backward_inplace(const Device* dev, X* d, const X* inp, int64_t n) {
    if constexpr (std::is_same_v<X, float>) {
        if (!dev->gpu) return gelu_backward_inplace_cpu(d, inp, n);
    }
#ifdef __CUDACC__
    gelu_launch<true>(dev, d, inp, n);
#endif
}
