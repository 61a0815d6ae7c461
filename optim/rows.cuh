// The state of a rule that reads rows: one fp32 number for each row of a matrix, and one for a vector. It is computed
// in a pass over the gradients before the step; the step then reads it as a storage that it does not write.
//
// The pass, row_moment_cpu, defines the sum of the squares of a row: 32 partial sums, of which number l takes columns
// l, l + 32, l + 64, ... in this order, each by one fused operation; then sum l takes sum l + 16, l + 8, l + 4, l + 2
// and l + 1. A warp has the same 32 sums, one in each thread. A row is never cut between GPUs (optim_cuts), so the bits
// do not depend on the device, the launch or the shards.
//
// Cost: the gradients are read once more, 2 or 4 bytes a parameter.
#pragma once
#include "formats/bf16.cuh"
#include "formats/fp32.cuh"
#include "formats/spans.cuh"
#include "rules/hyper.cuh"

EMBED_SOURCE

// The storage of v as the step sees it: what `extra` points to are the new numbers, which the pass has made.
struct RowMoments : StorageDefaults {
    static constexpr StreamInfo STREAM[3] = {{}, {"", "F32", 32, 1, false, SPAN_ROWS}};

    static OPTIM_INLINE void load(const Streams& streams, int first, float* x, int n, const NoiseKey&) {
        const SpanTile tile = *streams.span;
        SpanWalk walk = span_start(tile, first);
        OPTIM_UNROLL
        for (int i = 0; i < n; i++) {
            x[i] = span_top(tile, walk, (const float*)streams.extra);
            span_advance(tile, &walk);
        }
    }

    static OPTIM_INLINE void set(const Streams&, int, const float*, int) {}

    static OPTIM_INLINE void store(const Streams&, int, const float*, int, const NoiseKey&) {}

    static OPTIM_INLINE void view(const Streams& streams, int first, float* x, int n) {
        load(streams, first, x, n, NoiseKey{});
    }
};

// The rows of one tensor among those of a launch.
struct RowTensor {
    int64_t first;   // number of its first row
    int64_t offset;  // of its first gradient, from where the gradients of the launch's shard begin
    int64_t rows, cols;
};

// The new number of a row, from the sum of squares of its scaled gradients.
OPTIM_INLINE float row_moment(float v, float sum, float inverse_cols, float rest2) {
    return canonical(exact_fma(rest2, exact_fma(sum, inverse_cols, -v), v));
}

#ifndef __CUDACC_RTC__
template <class Format>
inline float row_moment_cpu(const typename Format::Code* grads, int64_t cols, float scale, float v, float rest2) {
    float sum[32] = {};
    for (int64_t i = 0; i < cols; i += 32) {
        for (int l = 0; l < 32 && i + l < cols; l++) {
            const float g = exact_mul(Format::decode(grads[i + l]), scale);
            sum[l] = exact_fma(g, g, sum[l]);
        }
    }
    for (int half = 16; half > 0; half /= 2) {
        for (int l = 0; l < half; l++) sum[l] = exact_add(sum[l], sum[l + half]);
    }
    return row_moment(v, sum[0], 1.0f / (float)cols, rest2);
}

#ifdef __CUDACC__
// grid: any, block: 256, a warp a row; deterministic. `now` and `next` have a number for each row.
template <class Format>
__global__ void __launch_bounds__(256)
    row_moments_kernel(const typename Format::Code* grads, const RowTensor* tensors, int count, int64_t rows,
                       const float* now, float* next, const float* grad_scale, float rest2) {
    const float scale = *grad_scale;
    if (!is_finite(scale)) return;  // the step changes nothing
    const int lane = threadIdx.x % 32;
    int t = 0;
    for (int64_t row = (int64_t)blockIdx.x * 8 + threadIdx.x / 32; row < rows; row += (int64_t)gridDim.x * 8) {
        while (t + 1 < count && tensors[t + 1].first <= row) t++;
        const RowTensor tensor = tensors[t];
        const typename Format::Code* at = grads + tensor.offset + (row - tensor.first) * tensor.cols;
        float sum = 0.0f;
#pragma unroll 4
        for (int64_t i = lane; i < tensor.cols; i += 32) {
            const float g = exact_mul(Format::decode(at[i]), scale);
            sum = exact_fma(g, g, sum);
        }
        for (int half = 16; half > 0; half /= 2) sum = exact_add(sum, __shfl_down_sync(0xffffffffu, sum, half));
        if (lane == 0) next[row] = row_moment(now[row], sum, __frcp_rn((float)tensor.cols), rest2);
    }
}
#endif
#endif
