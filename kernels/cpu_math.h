// exp and the logistic function for the plain C versions: branch-free, so that gcc vectorises a loop over them
// (`#pragma omp simd`) without -ffast-math, where libm's expf would be one call per element.
//
// cpu_exp(x) = 2^n e^r with n = round(x / ln 2) and r = x - n ln 2 in [-0.347, 0.347]. ln 2 is split in two so that r
// carries no rounding of n ln 2; e^r is its Taylor polynomial of degree 7, whose remainder r^8 / 8! is below 6e-9.
// The relative error is below 1.2e-7 (tested over the whole range). Beyond the range: 0 below -86.5 (where the result
// is below 2.8e-38), infinity above 88.72283, NaN for NaN.
// cpu_sigmoid(x) = 1 / (1 + e^-x), relative error below 5e-7 on the same terms.
//
// Sums over a row run in CPU_CHAINS interleaved chains (element i belongs to chain i % CPU_CHAINS) that cpu_chains_sum
// joins: a vector register's worth of sums, in an order that is written down and the same on every machine.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

inline float cpu_exp(float x) {
    const float shift = 12582912.0f;                 // 1.5 * 2^23: adding it leaves round(x / ln 2) in the low bits
    const float ln2_high = 0.693359375f;             // 9 bits: n * ln2_high is exact
    const float ln2_low = -2.12194440054690583e-4f;  // ln 2 - ln2_high
    float t = x > 88.8f ? 88.8f : x;                 // a NaN compares false and passes
    t = t < -86.5f ? -86.5f : t;
    float shifted = fmaf(t, 1.44269504088896341f, shift);
    float n = shifted - shift;
    float r = fmaf(n, -ln2_low, fmaf(n, -ln2_high, t));
    float p = fmaf(r, 1.0f / 5040, 1.0f / 720);
    p = fmaf(p, r, 1.0f / 120);
    p = fmaf(p, r, 1.0f / 24);
    p = fmaf(p, r, 1.0f / 6);
    p = fmaf(p, r, 1.0f / 2);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    int32_t bits, shift_bits;
    memcpy(&bits, &shifted, 4);
    memcpy(&shift_bits, &shift, 4);
    bits = (int32_t)((uint32_t)(bits - shift_bits + 126) << 23);  // 2^(n - 1): n = 128 is still in range
    float scale;
    memcpy(&scale, &bits, 4);
    float y = (p + p) * scale;
    y = x > 88.7228317f ? INFINITY : y;
    return x < -86.5f ? 0.0f : y;
}

inline float cpu_sigmoid(float x) {
    return 1.0f / (1.0f + cpu_exp(-x));
}

constexpr int CPU_CHAINS = 8;

inline float cpu_chains_sum(const float chain[CPU_CHAINS]) {
    return ((chain[0] + chain[1]) + (chain[2] + chain[3])) + ((chain[4] + chain[5]) + (chain[6] + chain[7]));
}
