// Operands of matrix products in fp8: casts of values to codes of 8 bits, and products of codes. fp8_scales.cuh has the
// scales.
//
// e4m3 (4 bits of exponent, 3 of mantissa, up to 448) is for activations, weights and gradients; e5m2 (2 of mantissa,
// up to 57344), which spreads wider, for the gradients of the logits. On a GPU the classifier writes these, rounded at
// random (fp8_codes.cuh); other rounding is to nearest even. What lies beyond the largest code becomes the largest code
// and is counted; NaN and infinity become NaN, so that the loss or the norm of the gradient shows them.
//
// Hopper's fp8 products want the summed dimension last in both operands. x W^T reads x and W by rows; dy W reads W by
// columns, dy^T x reads both by columns. Kernels that make a tensor write its codes by rows themselves (fp8_codes.cuh),
// and fp8_by_columns transposes them: 2 bytes per element. Other tensors are cast: the cast writes an operand by rows,
// by columns, or both, with 2 bytes read and up to 2 written per element. It can compute GELU or GELU's gradient too,
// and a linear layer's bias gradient, the column sums of the values before they are rounded.
//
// The CPU rounds every code to nearest even, and multiplies the values that the codes stand for by the plain C product.
#pragma once
#include <assert.h>

#include "column_sum.cuh"
#include "common.cuh"
#include "cpu_gemm.h"
#include "gelu.cuh"
#include "operand.cuh"
#ifdef __CUDACC__
#include "matmul_plan.cuh"
#endif

constexpr int FP8_TILE = 128;  // rows and columns of a block's tile

// Plain C: the code of a value that is scaled already, and the value of a code.
inline uint8_t fp8_encode(float x, Fp8Type type) {
    const int mantissa = type == FP8_E4M3 ? 3 : 2, least = type == FP8_E4M3 ? -6 : -14;
    const uint8_t sign = signbit(x) ? 0x80 : 0;
    if (!isfinite(x)) return sign | 0x7f;
    float a = fabsf(x);
    if (a >= fp8_largest(type)) return sign | (type == FP8_E4M3 ? 0x7e : 0x7b);
    int exponent = a > 0 ? ilogbf(a) : least;
    if (exponent < least) exponent = least;
    // In units of the last place: 2^mantissa or more for a normal number, less for a subnormal one.
    const int units = (int)nearbyintf(ldexpf(a, mantissa - exponent));
    return sign | (uint8_t)(((exponent - least) << mantissa) + units);
}

inline float fp8_decode(uint8_t code, Fp8Type type) {
    const int mantissa = type == FP8_E4M3 ? 3 : 2, least = type == FP8_E4M3 ? -6 : -14, magnitude = code & 0x7f;
    if (type == FP8_E4M3 ? magnitude == 0x7f : magnitude > 0x7b) return NAN;
    const int exponent = magnitude >> mantissa, units = magnitude & ((1 << mantissa) - 1);
    const float value = exponent == 0 ? ldexpf((float)units, least - mantissa)
                                      : ldexpf((float)(units + (1 << mantissa)), exponent - 1 + least - mantissa);
    return code & 0x80 ? -value : value;
}

// pre_gelu: (N, C); dbias: (C) or NULL. Without room for codes it only finds the largest magnitude.
inline void fp8_cast_cpu(const Operand<float>* o, const float* pre_gelu, float* dbias, int64_t N, int C,
                         bool accumulate) {
    const Fp8* f = o->fp8;
    float* values = (float*)memory_take(N * C * sizeof(float));
    const float scale = f->scale[o->slot], largest = fp8_largest(o->type);
    float amax = 0.0f;
    int64_t overflow_count = 0;
#pragma omp parallel for reduction(max : amax) reduction(+ : overflow_count) schedule(static)
    for (int64_t n = 0; n < N; n++) {
        float* row = values + n * C;
        if (o->op == FP8_GELU) gelu_forward_cpu(row, o->values + n * C, C);
        if (o->op != FP8_GELU) memcpy(row, o->values + n * C, C * sizeof(float));
        if (o->op == FP8_GELU_BACKWARD) gelu_backward_inplace_cpu(row, pre_gelu + n * C, C);
        for (int c = 0; c < C; c++) {
            amax = fabsf(row[c]) > amax ? fabsf(row[c]) : amax;
            overflow_count += fabsf(row[c] * scale) > largest;
            const uint8_t code = fp8_encode(row[c] * scale, o->type);
            if (o->rows) o->rows[n * C + c] = code;
            if (o->columns) o->columns[c * N + n] = code;
        }
    }
    if (fp8_bits(amax) > f->amax[o->slot]) f->amax[o->slot] = fp8_bits(amax);
    if (o->rows || o->columns) f->amax[f->slots] += (uint32_t)overflow_count;
    if (dbias) column_sum_cpu(dbias, values, N, C, accumulate);
    free(values);
}

// out: (rows, cols) (+)= a b^T / (scales of both) + bias, with a: (rows, depth), b: (cols, depth), bias: (cols) or NULL
inline void fp8_product_cpu(float* out, Fp8Factor a, Fp8Factor b, const float* bias, int64_t rows, int64_t cols,
                            int64_t depth, bool accumulate) {
    float* x = (float*)memory_take(rows * depth * sizeof(float));
    float* y = (float*)memory_take(cols * depth * sizeof(float));
    const float scale_inv = *a.scale_inv * *b.scale_inv;  // a power of two: exact
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows * depth; i++) x[i] = fp8_decode(a.codes[i], a.type) * scale_inv;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < cols * depth; i++) y[i] = fp8_decode(b.codes[i], b.type);
    if (bias) {
        for (int64_t r = 0; r < rows; r++) memcpy(out + r * cols, bias, cols * sizeof(float));
    }
    CpuGemm gemm = {rows, cols, depth, x, depth, 1, y, 1, depth, out, accumulate || bias};
    cpu_gemm(&gemm);
    free(x), free(y);
}

#ifdef __CUDACC__
// Four rows of four codes to four columns of four.
__device__ inline void fp8_transpose(uint32_t (&column)[4], uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint32_t ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
    const uint32_t ab2 = __byte_perm(a, b, 0x7362), cd2 = __byte_perm(c, d, 0x7362);
    column[0] = __byte_perm(ab, cd, 0x5410), column[1] = __byte_perm(ab, cd, 0x7632);
    column[2] = __byte_perm(ab2, cd2, 0x5410), column[3] = __byte_perm(ab2, cd2, 0x7632);
}

// Returns the place of the codes of column c, rows 4g to 4g + 3 of a tile. Places are permuted so that neither the
// threads that write (16 times eight columns, two g) nor those that read (all g of a column) have bank conflicts.
__device__ inline int fp8_place(int c, int g) {
    return c * 32 + (g ^ (2 * (c / 8)));
}

template <Fp8Op OP>
__device__ inline void fp8_values(float (&value)[8], Vec<bf16> x, Vec<bf16> pre_gelu) {
    vec_floats(value, x);
    if (OP == FP8_GELU) {
#pragma unroll
        for (int j = 0; j < 8; j++) value[j] = gelu_value<bf16>(value[j]);
    }
    if (OP == FP8_GELU_BACKWARD) {
        float slope[8];
        vec_floats(slope, pre_gelu);
#pragma unroll
        for (int j = 0; j < 8; j++) value[j] *= gelu_slope_fast(slope[j]);
    }
}

// The arguments of a cast: scale and amax are the slot's, partial: (ceil(N / 128), C) column sums, or NULL.
struct Fp8Cast {
    uint8_t *rows, *columns;
    const bf16 *inp, *pre_gelu;
    float* partial;
    const float* scale;
    uint32_t *amax, *overflow_count;
    int64_t N;
    int C;
};

// Grid (ceil(C / 128), ceil(N / 128)), block 256: a tile of 128 x 128. A thread takes 8 columns of 4 rows, twice. N a
// multiple of 16, C of 8. Shared memory: the transposed codes, then the column sums. Deterministic.
template <Fp8Op OP>
__global__ void __launch_bounds__(256, 4) fp8_cast_kernel(Fp8Cast k) {
    __shared__ uint32_t tile[FP8_TILE * 32];
    __shared__ float sums[16][FP8_TILE];
    const int eight = threadIdx.x % 16, group = threadIdx.x / 16, c = blockIdx.x * FP8_TILE + eight * 8;
    const int64_t first = (int64_t)blockIdx.y * FP8_TILE;
    const float scale = *k.scale;
    const bool writes = k.rows || k.columns;
    Fp8Stats stats = {};
    float sum[8] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int g = group + 16 * half;
        const int64_t row = first + 4 * g;
        if (row >= k.N || c >= k.C) continue;
        Vec<bf16> x[4], pre[4];
#pragma unroll
        for (int r = 0; r < 4; r++) x[r] = load_vec(k.inp + (row + r) * k.C + c);
        if (OP == FP8_GELU_BACKWARD) {
#pragma unroll
            for (int r = 0; r < 4; r++) pre[r] = load_vec(k.pre_gelu + (row + r) * k.C + c);
        }
        uint2 codes[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float value[8];
            fp8_values<OP>(value, x[r], pre[r]);
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += value[j];
            codes[r] = fp8_codes(value, scale, &stats);
            if (k.rows) *(uint2*)(k.rows + (row + r) * k.C + c) = codes[r];
        }
        uint32_t low[4], high[4];
        fp8_transpose(low, codes[0].x, codes[1].x, codes[2].x, codes[3].x);
        fp8_transpose(high, codes[0].y, codes[1].y, codes[2].y, codes[3].y);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            tile[fp8_place(eight * 8 + j, g)] = low[j];
            tile[fp8_place(eight * 8 + 4 + j, g)] = high[j];
        }
    }
    if (k.partial) {
#pragma unroll
        for (int j = 0; j < 8; j++) sums[group][eight * 8 + j] = sum[j];
    }
    if (!writes) stats.overflow_count = 0;
    publish_block_amax(k.amax, k.overflow_count, stats);
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32,
              columns = min(FP8_TILE, k.C - (int)blockIdx.x * FP8_TILE);
    if (k.columns && first + 4 * lane < k.N) {
#pragma unroll 4
        for (int i = warp; i < columns; i += 8) {
            uint32_t* to = (uint32_t*)(k.columns + (blockIdx.x * FP8_TILE + i) * k.N + first);
            to[lane] = tile[fp8_place(i, lane)];
        }
    }
    if (k.partial && threadIdx.x < columns) {
        float total = 0.0f;
        for (int i = 0; i < 16; i++) total += sums[i][threadIdx.x];
        k.partial[blockIdx.y * (int64_t)k.C + blockIdx.x * FP8_TILE + threadIdx.x] = total;
    }
}

// columns: (C, N) = rows: (N, C), transposed. Grid (ceil(C / 128), ceil(N / 128)), block 256: a tile of 128 x 128, of
// which a thread takes 16 columns of 4 rows. N a multiple of 16, C of 16.
__global__ static void __launch_bounds__(256, 6)
    fp8_transpose_kernel(uint8_t* columns, const uint8_t* rows, int64_t N, int C) {
    __shared__ uint32_t tile[FP8_TILE * 32];
    // A word is four rows of a column. Its place: neither the threads that write (8 sixteens of columns, 4 groups of
    // rows) nor those that read (all groups of a column) meet in a bank.
    const auto place = [](int c, int g) { return c * 32 + (g ^ (c / 16 * 4)); };
    const int sixteen = threadIdx.x % 8, group = threadIdx.x / 8, c = blockIdx.x * FP8_TILE + sixteen * 16;
    const int64_t first = (int64_t)blockIdx.y * FP8_TILE, row = first + 4 * group;
    if (row < N && c < C) {
        uint4 x[4];
#pragma unroll
        for (int r = 0; r < 4; r++) x[r] = __ldcs((const uint4*)(rows + (row + r) * C + c));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t column[4];
            fp8_transpose(column, (&x[0].x)[i], (&x[1].x)[i], (&x[2].x)[i], (&x[3].x)[i]);
#pragma unroll
            for (int j = 0; j < 4; j++) tile[place(sixteen * 16 + i * 4 + j, group)] = column[j];
        }
    }
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = min(FP8_TILE, C - (int)blockIdx.x * FP8_TILE);
    if (first + 4 * lane >= N) return;
#pragma unroll 4
    for (int i = warp; i < width; i += 8) {
        uint32_t* to = (uint32_t*)(columns + (blockIdx.x * FP8_TILE + i) * N + first);
        to[lane] = tile[place(i, lane)];
    }
}
#endif

// Bytes of the scratch memory that column sums take.
inline int64_t fp8_scratch_bytes(const Device* dev, int64_t N, int64_t C) {
    return dev->gpu ? ceil_div(N, FP8_TILE) * C * (int64_t)sizeof(float) : 0;
}

// Reads the values once, by fp8_cast_cpu or its kernel.
template <typename X, typename G>
void fp8_cast_once(const Device* dev, const Operand<X>* o, const X* pre_gelu, G* dbias, float* scratch, int64_t N,
                   int C, bool accumulate) {
    if constexpr (std::is_same_v<X, float>) fp8_cast_cpu(o, pre_gelu, dbias, N, C, accumulate);
#ifdef __CUDACC__
    if constexpr (std::is_same_v<X, bf16>) {
        assert(N % 16 == 0 && C % 8 == 0 && o->type == FP8_E4M3);
        const Fp8* f = o->fp8;
        Fp8Cast k = {};
        k.rows = o->rows, k.columns = o->columns, k.inp = o->values, k.pre_gelu = pre_gelu;
        k.partial = dbias ? scratch : nullptr;
        k.scale = f->scale + o->slot, k.amax = f->amax + o->slot, k.overflow_count = f->amax + f->slots;
        k.N = N, k.C = C;
        const auto kernel = o->op == FP8_COPY   ? fp8_cast_kernel<FP8_COPY>
                            : o->op == FP8_GELU ? fp8_cast_kernel<FP8_GELU>
                                                : fp8_cast_kernel<FP8_GELU_BACKWARD>;
        launch_kernel(dev, kernel, dim3(ceil_div(C, FP8_TILE), ceil_div(N, FP8_TILE)), 256, 0, k);
        if (dbias) column_sum<G>(dev, &dbias, 1, scratch, (int)ceil_div(N, FP8_TILE), C, accumulate);
    }
#endif
}

// Makes the operand's codes for which it has room, of op(values): (N, C); of FP8_GELU_BACKWARD, pre_gelu has the input.
// With dbias: (C) (+)= the column sums of what is rounded; scratch: fp8_scratch_bytes if there is one. N is a multiple
// of 16, C of 8.
template <typename X, typename G = float>
void fp8_cast(const Device* dev, const Operand<X>* o, int64_t N, int C, const X* pre_gelu = nullptr, G* dbias = nullptr,
              float* scratch = nullptr, bool accumulate = false) {
    if (o->fp8->use_current_scaling && o->type == FP8_E4M3) {
        Operand<X> read_only = *o;
        read_only.rows = read_only.columns = nullptr;
        fp8_cast_once(dev, &read_only, pre_gelu, (G*)nullptr, nullptr, N, C, false);
        fp8_rescale(dev, o->fp8, o->slot);
    }
    fp8_cast_once(dev, o, pre_gelu, dbias, scratch, N, C, accumulate);
}

// columns: (C, N) = rows: (N, C), transposed. N and C multiples of 16. Reads and writes a byte an element.
inline void fp8_by_columns(const Device* dev, uint8_t* columns, const uint8_t* rows, int64_t N, int C) {
    if (!dev->gpu) {
#pragma omp parallel for schedule(static)
        for (int64_t c = 0; c < C; c++) {
            for (int64_t n = 0; n < N; n++) columns[c * N + n] = rows[n * C + c];
        }
        return;
    }
#ifdef __CUDACC__
    assert(N % 16 == 0 && C % 16 == 0);
    launch_kernel(dev, fp8_transpose_kernel, dim3(ceil_div(C, FP8_TILE), ceil_div(N, FP8_TILE)), 256, 0, columns, rows,
                  N, C);
#endif
}

// out: (rows, cols) (+)= a b^T + bias, of codes a: (rows, depth), b: (cols, depth); bias: (cols) or NULL. Hopper's
// tensor cores keep 14 bits of a sum; they hand it to one of fp32 every 128 terms or so, or, with `fast`, at the end.
template <typename D>
void fp8_product(const Device* dev, D* out, Fp8Factor a, Fp8Factor b, const D* bias, int64_t rows, int64_t cols,
                 int64_t depth, bool fast, bool accumulate) {
    if constexpr (std::is_same_v<D, float>) {
        if (!dev->gpu) return fp8_product_cpu(out, a, b, bias, rows, cols, depth, accumulate);
    }
#ifdef __CUDACC__
    MatmulPointers pointers = {b.codes, a.codes, out, bias, nullptr, b.scale_inv, a.scale_inv};
    const cudaDataType_t type[] = {CUDA_R_8F_E4M3, CUDA_R_8F_E5M2};
    MatmulShape shape;
    matmul_shape(&shape, type[b.type], matmul_type<D>(), CUBLAS_OP_T, CUBLAS_OP_N, cols, rows, depth);
    shape.input_b = type[a.type], shape.fast = fast;
    if (bias) shape.epilogue = CUBLASLT_EPILOGUE_BIAS;
    if (!matmul_launch_shape(dev, &shape, &pointers, accumulate ? 1.0f : 0.0f)) {
        user_error("cuBLASLt has no fp8 product of %lld x %lld x %lld on %s; type --matmul bf16", (long long)rows,
                   (long long)cols, (long long)depth, dev->name);
    }
#endif
}
