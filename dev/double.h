// Products in double on the GPU, slow and plain: what the programs in dev/ compare with.
#pragma once
#include "../kernels/common.cuh"

// d = op(a) op(b), where op(a) is (rows, depth) and sa, ta are the steps in memory from one row and one column of it to
// the next. Grid (ceil(cols / 16), ceil(rows / 16)), block (16, 16).
static __global__ void double_product_kernel(double* d, const double* a, int64_t sa, int64_t ta, const double* b,
                                             int64_t sb, int64_t tb, int rows, int cols, int depth) {
    __shared__ double left[16][17], right[16][17];
    const int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x;
    double sum = 0.0;
    for (int k = 0; k < depth; k += 16) {
        const int ka = k + threadIdx.x, kb = k + threadIdx.y;
        left[threadIdx.y][threadIdx.x] = i < rows && ka < depth ? a[i * sa + ka * ta] : 0.0;
        right[threadIdx.y][threadIdx.x] = j < cols && kb < depth ? b[kb * sb + j * tb] : 0.0;
        __syncthreads();
        for (int l = 0; l < 16; l++) sum += left[threadIdx.y][l] * right[l][threadIdx.x];
        __syncthreads();
    }
    if (i < rows && j < cols) d[(int64_t)i * cols + j] = sum;
}

// An operand that is transposed (at, bt) lies in memory as (depth, rows) or (cols, depth).
inline void double_product(const Device* dev, double* d, const double* a, bool at, const double* b, bool bt, int rows,
                           int cols, int depth) {
    const dim3 grid((unsigned)ceil_div(cols, 16), (unsigned)ceil_div(rows, 16)), block(16, 16);
    double_product_kernel<<<grid, block, 0, dev->stream>>>(d, a, at ? 1 : depth, at ? rows : 1, b, bt ? 1 : cols,
                                                           bt ? depth : 1, rows, cols, depth);
    check_launch();
}
