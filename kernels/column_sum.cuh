// Sums over rows: totals[c] = [totals[c] +] sum over r of rows[r][c], in fp32, rounded once.
//
// On the GPU it is the second stage of such sums. The first stages (layernorm's weight and bias gradients, matmul's
// bias gradient) leave one row of partial sums per block in scratch memory, so that no float atomic is needed and equal
// inputs give equal bits. It reads a few MB from the L2 cache. A row may hold up to three vectors, one after the other
// (weight, bias, columns), which one launch finishes.
#pragma once
#include "common.cuh"

constexpr int COLUMN_SUM_WARPS = 32;

// totals: (columns); rows: (N, columns)
inline void column_sum_cpu(float* totals, const float* rows, int64_t N, int columns, bool accumulate) {
#pragma omp parallel for schedule(static)
    for (int begin = 0; begin < columns; begin += 32) {
        int end = begin + 32 < columns ? begin + 32 : columns;
        float sum[32] = {};
        for (int64_t n = 0; n < N; n++)
            for (int c = begin; c < end; c++) sum[c - begin] += rows[n * columns + c];
        for (int c = begin; c < end; c++) totals[c] = (accumulate ? totals[c] : 0.0f) + sum[c - begin];
    }
}

#ifdef __CUDACC__
template <typename G>
struct ColumnTotals {
    G* vector[3];  // (columns) each, or NULL: not wanted
};

// Grid (ceil(columns / 32), vectors in a row), block (32, COLUMN_SUM_WARPS): a lane per column, the rows dealt to the
// warps. Deterministic.
template <typename G>
__global__ void __launch_bounds__(1024)
    column_sum_kernel(ColumnTotals<G> all, const float* partial, int rows, int columns, bool accumulate) {
    __shared__ float sums[COLUMN_SUM_WARPS][32];
    G* totals = all.vector[blockIdx.y];
    int column = blockIdx.x * 32 + threadIdx.x;
    if (!totals) return;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int row = threadIdx.y; row < rows; row += COLUMN_SUM_WARPS)
            sum += partial[((int64_t)row * gridDim.y + blockIdx.y) * columns + column];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= columns) return;
    sum = accumulate ? to_float(totals[column]) : 0.0f;
    for (int warp = 0; warp < COLUMN_SUM_WARPS; warp++) sum += sums[warp][threadIdx.x];
    totals[column] = from_float<G>(sum);
}

// totals: `vectors` (at most 3) of (columns), any of them NULL; partial: (rows, vectors, columns)
template <typename G>
void column_sum(const Device* dev, G* const* totals, int vectors, const float* partial, int rows, int columns,
                bool accumulate) {
    ColumnTotals<G> all = {};
    for (int i = 0; i < vectors; i++) all.vector[i] = totals[i];
    dim3 grid(ceil_div(columns, 32), vectors), block(32, COLUMN_SUM_WARPS);
    launch_kernel(dev, column_sum_kernel<G>, grid, block, 0, all, partial, rows, columns, accumulate);
}
#endif
