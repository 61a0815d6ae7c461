// The second stage of a sum over rows: totals[c] = [totals[c] +] sum over r of partial[r][c], in fp32, rounded once.
// The first stages (layernorm's weight and bias gradients, matmul's bias gradient) leave one row per block in scratch
// memory, so that no float atomic is needed and equal inputs give equal bits. A few MB, read from the L2 cache.
// A row may hold two vectors one after the other (weight and bias): one launch then finishes both.
#pragma once
#include "common.cuh"

constexpr int COLUMN_SUM_WARPS = 32;

// Grid (ceil(columns / 32), vectors in a row), block (32, COLUMN_SUM_WARPS): a lane per column, the rows dealt to the
// warps. Deterministic.
template <typename G>
__global__ void column_sum_kernel(G* first, G* second, const float* partial, int rows, int columns, bool accumulate) {
    __shared__ float sums[COLUMN_SUM_WARPS][32];
    int column = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 4
        for (int row = threadIdx.y; row < rows; row += COLUMN_SUM_WARPS)
            sum += partial[((int64_t)row * gridDim.y + blockIdx.y) * columns + column];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= columns) return;
    G* totals = blockIdx.y == 0 ? first : second;
    sum = accumulate ? to_float(totals[column]) : 0.0f;
    for (int warp = 0; warp < COLUMN_SUM_WARPS; warp++) sum += sums[warp][threadIdx.x];
    totals[column] = from_float<G>(sum);
}

// first: (columns); second: (columns) or NULL; partial: (rows, 1 or 2, columns)
template <typename G>
void column_sum(const Device* dev, G* first, G* second, const float* partial, int rows, int columns, bool accumulate) {
    dim3 grid(ceil_div(columns, 32), second ? 2 : 1), block(32, COLUMN_SUM_WARPS);
    column_sum_kernel<<<grid, block, 0, dev->stream>>>(first, second, partial, rows, columns, accumulate);
    check_launch();
}
