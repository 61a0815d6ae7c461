// Operands of matrix products in fp8: casts of values to codes of 8 bits, and the scales of codes.
//
// A tensor has one scale, a power of two: code = round(value * scale), value ~ code / scale. e4m3 (4 bits of exponent,
// 3 of mantissa, up to 448) is for activations, weights and gradients; e5m2 (2 of mantissa, up to 57344), which spreads
// wider, for the gradients of the logits and, by --fp8-grads e5m2, for all: the loss then ends higher (dev/compare).
// Rounding is to nearest even. What lies beyond the largest code becomes the largest code and is counted; NaN and
// infinity become NaN, so that the loss or the norm of the gradient shows them.
//
// The scale of a step comes from the largest magnitudes (amax) of the FP8_HISTORY steps before it (delayed scaling),
// with a factor of 2 to spare. So a tensor is read once, and its own largest magnitude is a by-product. In the first
// step, which has no history, each tensor is read twice and scaled by its own largest magnitude so far. The magnitudes
// of a step are maxima over all micro-batches and ranks, and belong to a checkpoint. Weights that are stored as codes
// (linear_fp8.cuh) keep the scale that they are stored with.
//
// Hopper's fp8 products want the summed dimension last in both operands. x W^T reads x and W by rows; dy W reads W by
// columns, dy^T x reads both by columns. Kernels that make a tensor write its codes by rows themselves (fp8_codes.cuh),
// and fp8_by_columns transposes them: 2 bytes per element. Other tensors are cast: the cast writes an operand by rows,
// by columns, or both, with 2 bytes read and up to 2 written per element. It can compute GELU or GELU's gradient too,
// and a linear layer's bias gradient, the column sums of the values before they are rounded.
//
// On the CPU the same codes go through the plain C product, decoded.
#pragma once
#include <assert.h>

#include "column_sum.cuh"
#include "common.cuh"
#include "cpu_gemm.h"
#include "fp8_codes.cuh"
#include "gelu.cuh"
#ifdef __CUDACC__
#include "matmul_plan.cuh"
#endif

constexpr int FP8_HISTORY = 16;
constexpr int FP8_TILE = 128;  // rows and columns of a block's tile

// A cast may change a value before it rounds it: not at all; to gelu(x); to x * gelu'(pre_gelu).
enum Fp8Op { FP8_COPY, FP8_GELU, FP8_GELU_BACKWARD };

// All scales of a model. A slot is a tensor: input, weight or output gradient of a linear layer.
struct Fp8 {
    int slots;
    Fp8Type gradients;
    bool use_current_scaling;  // there is no amax history yet: a cast computes its amax first
    int64_t first;             // number of the first such step; 0: there was none
    float* amax_history;       // (slots, FP8_HISTORY) the last step's amax comes first; 0: unknown
    float* scale;              // (slots)
    float* scale_inv;          // (slots, 4), of which the first counts: cuBLASLt wants 16 bytes for each
    uint32_t* amax;            // (slots + 1) bits of this step's amax of each slot; then the overflow count
    const float** stored;  // (slots) of a tensor that is stored as codes: [1] is its inverse, [2] its scale; or NULL
    int fixed;             // slot of fp8_fix, whose scale needs no amax; -1: none
};

// Codes of a matrix (N, C) by rows, or by columns: (C, N); either may be NULL.
struct Fp8Operand {
    uint8_t *rows, *columns;
    int slot;
    Fp8Type type;
};

// One of the two factors of a product: codes, the summed dimension last.
struct Fp8Factor {
    const uint8_t* codes;
    int slot;
    Fp8Type type;
};

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

// The largest power of two that keeps `amax` times 2^spare within the type's range; 1 where it is 0.
__host__ __device__ inline float fp8_scale(float amax, Fp8Type type, int spare) {
    if (!(amax > 0.0f) || amax > 3e38f) return 1.0f;
    // amax = f 2^e with f in [0.5, 1); the largest code is 0.875 2^9, or 0.875 2^16.
    int e;
    const float f = frexpf(amax, &e);
    int k = (type == FP8_E4M3 ? 9 : 16) - e - (f > 0.875f) - spare;
    k = k > 100 ? 100 : k < -100 ? -100 : k;
    return ldexpf(1.0f, k);
}

// A magnitude's bits, whose order is that of the magnitudes, and back.
__host__ __device__ inline uint32_t fp8_bits(float magnitude) {
    uint32_t bits;
    memcpy(&bits, &magnitude, sizeof(bits));
    return bits;
}
__host__ __device__ inline float fp8_magnitude(uint32_t bits) {
    float magnitude;
    memcpy(&magnitude, &bits, sizeof(magnitude));
    return magnitude;
}

// inp, pre_gelu: (N, C); dbias: (C) or NULL. With to->rows and to->columns NULL it only finds the largest magnitude.
inline void fp8_cast_cpu(Fp8* f, const Fp8Operand* to, Fp8Op op, const float* inp, const float* pre_gelu, float* dbias,
                         int64_t N, int C, bool accumulate) {
    float* values = (float*)memory_take(N * C * sizeof(float));
    const float scale = f->scale[to->slot], largest = fp8_largest(to->type);
    float amax = 0.0f;
    int64_t overflow_count = 0;
    const bool writes = to->rows || to->columns;
#pragma omp parallel for reduction(max : amax) reduction(+ : overflow_count) schedule(static)
    for (int64_t n = 0; n < N; n++) {
        float* row = values + n * C;
        if (op == FP8_GELU) gelu_forward_cpu(row, inp + n * C, C);
        if (op != FP8_GELU) memcpy(row, inp + n * C, C * sizeof(float));
        if (op == FP8_GELU_BACKWARD) gelu_backward_inplace_cpu(row, pre_gelu + n * C, C);
        for (int c = 0; c < C; c++) {
            amax = fabsf(row[c]) > amax ? fabsf(row[c]) : amax;
            overflow_count += fabsf(row[c] * scale) > largest;
            const uint8_t code = fp8_encode(row[c] * scale, to->type);
            if (to->rows) to->rows[n * C + c] = code;
            if (to->columns) to->columns[c * N + n] = code;
        }
    }
    if (fp8_bits(amax) > f->amax[to->slot]) f->amax[to->slot] = fp8_bits(amax);
    if (writes) f->amax[f->slots] += (uint32_t)overflow_count;
    if (dbias) column_sum_cpu(dbias, values, N, C, accumulate);
    free(values);
}

// out: (rows, cols) (+)= a b^T / (scales of both) + bias, with a: (rows, depth), b: (cols, depth), bias: (cols) or NULL
inline void fp8_product_cpu(const Fp8* f, float* out, Fp8Factor a, Fp8Factor b, const float* bias, int64_t rows,
                            int64_t cols, int64_t depth, bool accumulate) {
    float* x = (float*)memory_take(rows * depth * sizeof(float));
    float* y = (float*)memory_take(cols * depth * sizeof(float));
    const float scale_inv = f->scale_inv[4 * a.slot] * f->scale_inv[4 * b.slot];  // a power of two: exact
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

__host__ __device__ inline void fp8_set_scale(const Fp8& f, int slot, float amax, Fp8Type type, int spare) {
    f.scale[slot] = fp8_scale(amax, type, spare);
    f.scale_inv[4 * slot] = 1.0f / f.scale[slot];
}

// The three things that a step does to the slots, on both devices.
enum Fp8Event { FP8_BEGIN, FP8_AGREE, FP8_END };

// BEGIN sets the scales of a step from the history, and clears what it will find. A tensor that is stored as codes has
// their scale; its magnitude is the largest that such codes can hold, so that any rank (AGREE), and a run that resumes
// with another storage, can compute the scale from it. END adds the step's magnitude to the history, unless it is not
// finite or was not measured.
__host__ __device__ inline void fp8_slot_event(const Fp8& f, int slot, Fp8Event event) {
    float *history = f.amax_history + slot * FP8_HISTORY, amax = 0.0f;
    if (event == FP8_BEGIN) {
        if (const float* stored = f.stored[slot]) {
            f.amax[slot] = fp8_bits(fp8_largest(FP8_E4M3) * stored[1]);
            f.scale_inv[4 * slot] = stored[1], f.scale[slot] = stored[2];
            return;
        }
        for (int i = 0; i < FP8_HISTORY; i++) amax = fmaxf(amax, history[i]);
        fp8_set_scale(f, slot, amax, slot % 3 == 2 ? f.gradients : FP8_E4M3, 1);
        f.amax[slot] = 0;
        return;
    }
    amax = fp8_magnitude(f.amax[slot]);
    if (event == FP8_AGREE && amax != 0) fp8_set_scale(f, slot, amax, FP8_E4M3, 0);
    if (event == FP8_AGREE || !(amax > 0.0f) || !isfinite(amax)) return;
    for (int i = FP8_HISTORY - 1; i > 0; i--) history[i] = history[i - 1];
    history[0] = amax;
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
    bool e5m2;
};

// Grid (ceil(C / 128), ceil(N / 128)), block 256: a tile of 128 x 128. A thread takes 8 columns of 4 rows, twice. N a
// multiple of 16, C of 8. Shared memory: the transposed codes, then the column sums. Deterministic.
template <Fp8Op OP>
__global__ void __launch_bounds__(256, 4) fp8_cast_kernel(Fp8Cast k) {
    __shared__ uint32_t tile[FP8_TILE * 32];
    __shared__ float sums[16][FP8_TILE];
    const int eight = threadIdx.x % 16, group = threadIdx.x / 16, c = blockIdx.x * FP8_TILE + eight * 8;
    const int64_t first = (int64_t)blockIdx.y * FP8_TILE;
    const float scale = *k.scale, largest = k.e5m2 ? 57344.0f : 448.0f;
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
            codes[r] = fp8_codes(value, scale, largest, k.e5m2, &stats);
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

// Grid 1, block 1: the scale of a tensor whose amax was found just now, or is at most this.
__global__ static void fp8_rescale_kernel(Fp8 f, int slot, Fp8Type type) {
    fp8_set_scale(f, slot, fp8_magnitude(f.amax[slot]), type, 0);
}
__global__ static void fp8_fix_kernel(Fp8 f, int slot, float amax, Fp8Type type) {
    fp8_set_scale(f, slot, amax, type, 0);
}

// Grid ceil(slots / 256), block 256.
__global__ static void fp8_event_kernel(Fp8 f, Fp8Event event, const float* factor, float* overflow_count) {
    const int slot = blockIdx.x * blockDim.x + threadIdx.x;
    if (event == FP8_BEGIN && slot == 0) f.amax[f.slots] = 0;
    if (event == FP8_END && slot == 0) *overflow_count = (float)f.amax[f.slots];
    if (slot < f.slots && (event != FP8_END || isfinite(*factor))) fp8_slot_event(f, slot, event);
}

inline void fp8_cast_run(const Device* dev, Fp8Op op, const Fp8Cast* k) {
    const auto kernel = op == FP8_COPY   ? fp8_cast_kernel<FP8_COPY>
                        : op == FP8_GELU ? fp8_cast_kernel<FP8_GELU>
                                         : fp8_cast_kernel<FP8_GELU_BACKWARD>;
    launch_kernel(dev, kernel, dim3(ceil_div(k->C, FP8_TILE), ceil_div(k->N, FP8_TILE)), 256, 0, *k);
}
#endif

// Bytes of the scratch memory that column sums take.
inline int64_t fp8_scratch_bytes(const Device* dev, int64_t N, int64_t C) {
    return dev->gpu ? ceil_div(N, FP8_TILE) * C * (int64_t)sizeof(float) : 0;
}

// Codes of op(inp), op(pre_gelu, inp): (N, C) -> `to`; with dbias: (C) (+)= the column sums of the values. scratch:
// fp8_scratch_bytes if there is a dbias. N is a multiple of 16, C of 8.
template <typename X, typename G = float>
void fp8_cast(const Device* dev, Fp8* f, const Fp8Operand* to, Fp8Op op, const X* inp, const X* pre_gelu, G* dbias,
              float* scratch, int64_t N, int C, bool accumulate) {
    const bool finds_scale = f->use_current_scaling && to->slot != f->fixed;
    if constexpr (std::is_same_v<X, float>) {
        const Fp8Operand none = {nullptr, nullptr, to->slot, to->type};
        if (finds_scale) {
            fp8_cast_cpu(f, &none, op, inp, pre_gelu, nullptr, N, C, false);
            fp8_set_scale(*f, to->slot, fp8_magnitude(f->amax[to->slot]), to->type, 0);
        }
        fp8_cast_cpu(f, to, op, inp, pre_gelu, dbias, N, C, accumulate);
    }
#ifdef __CUDACC__
    if constexpr (std::is_same_v<X, bf16>) {
        assert(N % 16 == 0 && C % 8 == 0);
        Fp8Cast k = {};
        k.inp = inp, k.pre_gelu = pre_gelu, k.N = N, k.C = C, k.e5m2 = to->type == FP8_E5M2;
        k.scale = f->scale + to->slot, k.amax = f->amax + to->slot, k.overflow_count = f->amax + f->slots;
        if (finds_scale) {
            fp8_cast_run(dev, op, &k);
            launch_kernel(dev, fp8_rescale_kernel, 1, 1, 0, *f, to->slot, to->type);
        }
        k.rows = to->rows, k.columns = to->columns, k.partial = dbias ? scratch : nullptr;
        fp8_cast_run(dev, op, &k);
        if (dbias) column_sum<G>(dev, &dbias, 1, scratch, (int)ceil_div(N, FP8_TILE), C, accumulate);
    }
#endif
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

// Sets a scale that is known beforehand, for values of at most `amax`.
inline void fp8_fix(const Device* dev, Fp8* f, int slot, float amax, Fp8Type type) {
    f->fixed = slot;
    if (!dev->gpu) return fp8_set_scale(*f, slot, amax, type, 0);
#ifdef __CUDACC__
    launch_kernel(dev, fp8_fix_kernel, 1, 1, 0, *f, slot, amax, type);
#endif
}

// out: (rows, cols) (+)= a b^T + bias, of codes a: (rows, depth), b: (cols, depth); bias: (cols) or NULL. Hopper's
// tensor cores keep 14 bits of a sum; they hand it to one of fp32 every 128 terms or so, or, with `fast`, at the end.
template <typename D>
void fp8_product(const Device* dev, const Fp8* f, D* out, Fp8Factor a, Fp8Factor b, const D* bias, int64_t rows,
                 int64_t cols, int64_t depth, bool fast, bool accumulate) {
    if constexpr (std::is_same_v<D, float>) {
        if (!dev->gpu) return fp8_product_cpu(f, out, a, b, bias, rows, cols, depth, accumulate);
    }
#ifdef __CUDACC__
    MatmulPointers pointers = {
        b.codes, a.codes, out, bias, nullptr, f->scale_inv + 4 * b.slot, f->scale_inv + 4 * a.slot};
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

inline int64_t fp8_bytes(int slots) {
    return (int64_t)slots * ((FP8_HISTORY + 6) * (int64_t)sizeof(float) + (int64_t)sizeof(float*)) + 256;
}

// After BEGIN, if each rank has the scales of some stored tensors alone, the arena calls this with AGREE: it sets
// these scales, powers of two, from the all-reduced amax array. After the update it calls it with END, which changes
// the history unless `factor` says that the step changed nothing, and sets overflow_count to the number of elements
// that were too large for their codes.
inline void fp8_event(const Device* dev, const Fp8* f, Fp8Event event, const float* factor = nullptr,
                      float* overflow_count = nullptr) {
    if (!dev->gpu) {
        if (event == FP8_BEGIN) f->amax[f->slots] = 0;
        if (event == FP8_END) *overflow_count = (float)f->amax[f->slots];
        for (int slot = 0; slot < f->slots && (event != FP8_END || isfinite(*factor)); slot++)
            fp8_slot_event(*f, slot, event);
        return;
    }
#ifdef __CUDACC__
    launch_kernel(dev, fp8_event_kernel, (unsigned)ceil_div(f->slots, 256), 256, 0, *f, event, factor, overflow_count);
#endif
}

// The arena calls this before the first micro-batch of a step. `step` does not count skipped steps, so a first step
// that was skipped is repeated, again without a history.
inline void fp8_begin(const Device* dev, Fp8* f, int64_t step = 1) {
    if (f->first == 0) f->first = step;
    f->use_current_scaling = f->use_current_scaling && step == f->first;
    fp8_event(dev, f, FP8_BEGIN);
}

// True if an earlier step has left a magnitude in one of `count` slots from `first` on. A skipped step leaves none, nor
// does one that multiplied these tensors in bf16.
inline bool fp8_has_history(const Device* dev, const Fp8* f, int first, int count) {
    const int64_t bytes = (int64_t)count * FP8_HISTORY * (int64_t)sizeof(float);
    float* history = (float*)memory_take(bytes);
    copy_to_host(dev, history, f->amax_history + (int64_t)first * FP8_HISTORY, bytes);
    bool has = false;
    for (int i = 0; i < count * FP8_HISTORY; i++) has = has || history[i] > 0.0f;
    free(history);
    return has;
}

// `memory`: fp8_bytes of device memory, set to zero. The caller sets `stored`.
inline Fp8 fp8_open(int slots, Fp8Type gradients, void* memory) {
    float *scale_inv = (float*)memory, *history = scale_inv + (int64_t)slots * 4;
    const float** stored = (const float**)(history + (int64_t)slots * FP8_HISTORY);
    float* scale = (float*)(stored + slots);
    return {slots, gradients, true, 0, history, scale, scale_inv, (uint32_t*)(scale + slots), stored, -1};
}
