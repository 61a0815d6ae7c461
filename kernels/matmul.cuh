// Linear layers, row-major: out = inp W^T + bias with inp (N, C), weight (OC, C), out (N, OC); N is B * T. Plainly:
//     for n, o:  out[n][o] = bias[o];  for k = 0 .. C - 1:  out[n][o] += inp[n][k] * weight[o][k]
// dinp = dout W and dweight (+)= dout^T inp are the other two products, dbias (+)= the column sums of dout.
//
// On the GPU the products are cuBLASLt's, always with fp32 accumulation, and fp32 inputs are multiplied as fp32 (never
// TF32). The two next to GELU, which write the input of GELU beside its output, or multiply the gradient by gelu'
// before it is stored, are ours on Hopper (matmul_gelu.cuh) and cuBLASLt's epilogues elsewhere and at small shapes.
// cuBLASLt thinks in columns: a row-major (R, K) matrix is its (K, R) matrix, so that out^T = op(W) inp^T and so on;
// MatmulShape is in its terms.
//
// A plan (descriptors and algorithm) is made at the first call of a shape and kept: afterwards a call is one launch.
// Algorithms that split k and add up by atomics are excluded, and so are those that add up in the output's type, which
// would round partial sums to bf16; the rest give equal bits for equal inputs. Where an epilogue has no algorithm, the
// product runs without it and gelu.cuh's kernel follows; so it does in fp32, where the epilogue's tanh is not promised
// to be good to fp32.
#pragma once
#include <assert.h>

#include "column_sum.cuh"
#include "common.cuh"
#include "cpu_gemm.h"
#include "gelu.cuh"
#include "matmul_gelu.cuh"

// out: (N, OC); pre_gelu: (N, OC) or NULL; inp: (N, C); weight: (OC, C); bias: (OC) or NULL
inline void matmul_forward_cpu(float* out, float* pre_gelu, const float* inp, const float* weight, const float* bias,
                               int64_t N, int C, int OC) {
    float* product = pre_gelu ? pre_gelu : out;
    if (bias) {
#pragma omp parallel for schedule(static)
        for (int64_t n = 0; n < N; n++) memcpy(product + n * OC, bias, OC * sizeof(float));
    }
    CpuGemm gemm = {N, OC, C, inp, C, 1, weight, 1, C, product, bias != nullptr};
    cpu_gemm(&gemm);
    if (pre_gelu) gelu_forward_cpu(out, pre_gelu, N * OC);
}

// dinp: (N, C); dout: (N, OC); weight: (OC, C)
inline void matmul_backward_input_cpu(float* dinp, const float* dout, const float* weight, int64_t N, int C, int OC) {
    CpuGemm gemm = {N, C, OC, dout, OC, 1, weight, C, 1, dinp, false};
    cpu_gemm(&gemm);
}

// dinp, pre_gelu: (N, C); dbias: (C); dout: (N, OC); weight: (OC, C)
inline void matmul_backward_gelu_cpu(float* dinp, float* dbias, const float* dout, const float* weight,
                                     const float* pre_gelu, int64_t N, int C, int OC, bool accumulate) {
    matmul_backward_input_cpu(dinp, dout, weight, N, C, OC);
    gelu_backward_inplace_cpu(dinp, pre_gelu, N * C);
    column_sum_cpu(dbias, dinp, N, C, accumulate);
}

// dweight: (OC, C); dout: (N, OC); inp: (N, C)
inline void matmul_backward_weight_cpu(float* dweight, const float* dout, const float* inp, int64_t N, int C, int OC,
                                       bool accumulate) {
    CpuGemm gemm = {OC, C, N, dout, 1, OC, inp, C, 1, dweight, accumulate};
    cpu_gemm(&gemm);
}

// A product d (m, n) = op(a) op(b) in cuBLASLt's column-major terms. Compared byte by byte: zero it first.
struct MatmulShape {
    int64_t m, n, k;
    cublasOperation_t op_a, op_b;
    cudaDataType_t input, output;
    cublasLtEpilogue_t epilogue;
    uint32_t alignment;  // of every pointer, at most 256 bytes
};

struct MatmulPlan {
    MatmulShape shape;
    bool found;  // false: cuBLASLt has no algorithm for this shape and epilogue
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
};

constexpr int MATMUL_CANDIDATES = 16;

struct MatmulPointers {
    const void *a, *b;
    void* d;
    const void* bias;  // or NULL
    const void* aux;   // GELU's input, written (GELU_AUX) or read (DGELU); or NULL
};

template <typename T>
constexpr cudaDataType_t matmul_type() {
    return std::is_same_v<T, float> ? CUDA_R_32F : CUDA_R_16BF;
}

template <typename Value>
inline void matmul_set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, Value value) {
    check(cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof(value)));
}

inline void matmul_point(MatmulPlan* plan, const MatmulPointers* pointers) {
    if (pointers->bias) matmul_set(plan->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, pointers->bias);
    if (pointers->aux) matmul_set(plan->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, pointers->aux);
}

// What cuBLASLt proposes for a plan, its best guess first: at most `most` algorithms, 0 when it has none.
inline int matmul_candidates(const Device* dev, const MatmulPlan* plan, cublasLtMatmulAlgo_t* algorithms, int most) {
    cublasLtMatmulPreference_t preference;
    check(cublasLtMatmulPreferenceCreate(&preference));
    auto prefer = [preference](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (size_t)WORKSPACE_BYTES);
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, plan->shape.alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, plan->shape.alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, plan->shape.alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, plan->shape.alignment);
    cublasLtMatmulHeuristicResult_t result[MATMUL_CANDIDATES];
    int proposed = 0, count = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(dev->cublaslt, plan->desc, plan->a, plan->b, plan->d,
                                                           plan->d, preference, most, result, &proposed);
    // These two are answers (no algorithm; no such epilogue for these types), anything else is an error.
    bool none = status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
    if (!none) check(status);
    for (int i = 0; i < proposed && !none; i++)
        if (result[i].state == CUBLAS_STATUS_SUCCESS) algorithms[count++] = result[i].algo;
    check(cublasLtMatmulPreferenceDestroy(preference));
    return count;
}

inline MatmulPlan matmul_plan_create(const Device* dev, const MatmulShape* shape, const MatmulPointers* pointers) {
    MatmulPlan plan = {};
    plan.shape = *shape;
    bool transpose_a = shape->op_a == CUBLAS_OP_T, transpose_b = shape->op_b == CUBLAS_OP_T;
    check(cublasLtMatmulDescCreate(&plan.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    matmul_set(plan.desc, CUBLASLT_MATMUL_DESC_TRANSA, shape->op_a);
    matmul_set(plan.desc, CUBLASLT_MATMUL_DESC_TRANSB, shape->op_b);
    matmul_set(plan.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, shape->epilogue);
    if (shape->epilogue == CUBLASLT_EPILOGUE_GELU_AUX || shape->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
        shape->epilogue == CUBLASLT_EPILOGUE_DGELU)
        matmul_set(plan.desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, shape->m);
    int64_t a_rows = transpose_a ? shape->k : shape->m, a_cols = transpose_a ? shape->m : shape->k;
    int64_t b_rows = transpose_b ? shape->n : shape->k, b_cols = transpose_b ? shape->k : shape->n;
    check(cublasLtMatrixLayoutCreate(&plan.a, shape->input, a_rows, a_cols, a_rows));
    check(cublasLtMatrixLayoutCreate(&plan.b, shape->input, b_rows, b_cols, b_rows));
    check(cublasLtMatrixLayoutCreate(&plan.d, shape->output, shape->m, shape->n, shape->m));
    matmul_point(&plan, pointers);
    plan.found = matmul_candidates(dev, &plan, &plan.algorithm, 1) > 0;
    return plan;
}

// The plan of a shape, from the table of those that were made: a training run has a few dozen.
inline MatmulPlan* matmul_plan(const Device* dev, const MatmulShape* shape, const MatmulPointers* pointers) {
    MatmulPlans* plans = dev->matmul_plans;
    for (int i = 0; i < plans->count; i++)
        if (memcmp(&plans->plan[i].shape, shape, sizeof(*shape)) == 0) return &plans->plan[i];
    if (plans->count == plans->capacity) {
        plans->capacity = plans->capacity ? 2 * plans->capacity : 64;
        plans->plan = (MatmulPlan*)realloc(plans->plan, plans->capacity * sizeof(MatmulPlan));
        if (!plans->plan) user_error("out of host memory for %d matmul plans", plans->capacity);
    }
    plans->plan[plans->count] = matmul_plan_create(dev, shape, pointers);
    return &plans->plan[plans->count++];
}

inline uint32_t matmul_alignment(const MatmulPointers* pointers) {
    uintptr_t bits = 256 | (uintptr_t)pointers->a | (uintptr_t)pointers->b | (uintptr_t)pointers->d |
                     (uintptr_t)pointers->bias | (uintptr_t)pointers->aux;
    return (uint32_t)(bits & -bits);
}

// Launches d = op(a) op(b) (+ d when accumulating) with the epilogue; false when cuBLASLt has no algorithm for it.
template <typename X, typename D>
bool matmul_launch(const Device* dev, const MatmulPointers* pointers, cublasOperation_t op_a, cublasOperation_t op_b,
                   int64_t m, int64_t n, int64_t k, cublasLtEpilogue_t epilogue, bool accumulate) {
    MatmulShape shape;
    memset(&shape, 0, sizeof(shape));
    shape.m = m, shape.n = n, shape.k = k;
    shape.op_a = op_a, shape.op_b = op_b;
    shape.input = matmul_type<X>(), shape.output = matmul_type<D>();
    shape.epilogue = epilogue;
    shape.alignment = matmul_alignment(pointers);
    MatmulPlan* plan = matmul_plan(dev, &shape, pointers);
    if (!plan->found) return false;
    matmul_point(plan, pointers);
    float alpha = 1.0f, beta = accumulate ? 1.0f : 0.0f;
    check(cublasLtMatmul(dev->cublaslt, plan->desc, &alpha, pointers->a, plan->a, pointers->b, plan->b, &beta,
                         pointers->d, plan->d, pointers->d, plan->d, &plan->algorithm, dev->workspace, WORKSPACE_BYTES,
                         dev->stream));
    return true;
}

[[noreturn]] inline void matmul_unsupported(const char* product, int64_t N, int C, int OC) {
    user_error(
        "cuBLASLt has no algorithm for the %s of a linear layer with %lld rows, %d inputs and %d outputs; take "
        "--channels and --heads that are multiples of 8",
        product, (long long)N, C, OC);
}

// The columns of dout that a block of matmul_backward_bias_kernel takes, and the rows of partial sums: at most eight
// blocks a multiprocessor, since one block more would run alone.
template <typename X>
constexpr int matmul_bias_columns = 32 * Vec<X>::size;

template <typename X>
int matmul_bias_slices(const Device* dev, int OC) {
    int slices = 8 * dev->sm_count / (int)ceil_div(OC, matmul_bias_columns<X>);
    return slices < 1 ? 1 : slices;
}

// Grid (ceil(OC / (32 vectors)), slices), block (32, 8), OC a multiple of 8, any N: a lane sums one vector of columns
// over every 8 * slices-th row; row `slice` of partial: (slices, OC) gets the block's sum. Deterministic.
template <typename X>
__global__ void __launch_bounds__(256, 8)
    matmul_backward_bias_kernel(float* partial, const X* dout, int64_t N, int OC) {
    constexpr int size = Vec<X>::size;
    __shared__ float sums[8][size][32];
    int column = (blockIdx.x * 32 + threadIdx.x) * size;
    float sum[size] = {};
    if (column < OC) {
        int64_t step = 8 * (int64_t)gridDim.y;
#pragma unroll 4
        for (int64_t n = blockIdx.y * 8 + threadIdx.y; n < N; n += step) {
            Vec<X> d = load_vec(dout + n * OC + column);
            for (int j = 0; j < size; j++) sum[j] += to_float(d.lane[j]);
        }
    }
    for (int j = 0; j < size; j++) sums[threadIdx.y][j][threadIdx.x] = sum[j];
    __syncthreads();
    if (threadIdx.y >= size || column >= OC) return;
    float total = 0.0f;  // warp j finishes lane j of every vector; size is at most the 8 warps
    for (int warp = 0; warp < 8; warp++) total += sums[warp][threadIdx.y][threadIdx.x];
    partial[(int64_t)blockIdx.y * OC + column + threadIdx.y] = total;
}

// out: (N, OC) = inp W^T + bias; with pre_gelu: (N, OC) that goes there and out = gelu(pre_gelu).
// inp: (N, C); weight: (OC, C); bias: (OC) or NULL
template <typename X>
void matmul_forward(const Device* dev, X* out, X* pre_gelu, const X* inp, const X* weight, const X* bias, int64_t N,
                    int C, int OC) {
    if (!dev->gpu) {
        assert(sizeof(X) == sizeof(float));
        matmul_forward_cpu((float*)out, (float*)pre_gelu, (const float*)inp, (const float*)weight, (const float*)bias,
                           N, C, OC);
        return;
    }
    cublasLtEpilogue_t plain = bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    if constexpr (std::is_same_v<X, bf16>) {
        if (pre_gelu && bias && matmul_gelu_fits(dev, N, OC, C)) {
            matmul_gelu_forward(dev, out, pre_gelu, inp, weight, bias, N, C, OC);
            return;
        }
    }
    if (pre_gelu && std::is_same_v<X, bf16>) {
        cublasLtEpilogue_t gelu = bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
        MatmulPointers fused = {weight, inp, out, bias, pre_gelu};
        if (matmul_launch<X, X>(dev, &fused, CUBLAS_OP_T, CUBLAS_OP_N, OC, N, C, gelu, false)) return;
    }
    MatmulPointers pointers = {weight, inp, pre_gelu ? pre_gelu : out, bias, nullptr};
    if (!matmul_launch<X, X>(dev, &pointers, CUBLAS_OP_T, CUBLAS_OP_N, OC, N, C, plain, false))
        matmul_unsupported("output", N, C, OC);
    if (pre_gelu) gelu_forward(dev, out, pre_gelu, N * OC);
}

// dinp: (N, C) = dout W. dout: (N, OC); weight: (OC, C)
template <typename X>
void matmul_backward_input(const Device* dev, X* dinp, const X* dout, const X* weight, int64_t N, int C, int OC) {
    if (!dev->gpu) {
        assert(sizeof(X) == sizeof(float));
        matmul_backward_input_cpu((float*)dinp, (const float*)dout, (const float*)weight, N, C, OC);
        return;
    }
    MatmulPointers pointers = {weight, dout, dinp, nullptr, nullptr};
    if (!matmul_launch<X, X>(dev, &pointers, CUBLAS_OP_N, CUBLAS_OP_N, C, N, OC, CUBLASLT_EPILOGUE_DEFAULT, false))
        matmul_unsupported("input's gradient", N, C, OC);
}

// dweight: (OC, C) (+)= dout^T inp. dout: (N, OC); inp: (N, C). Adding to float loses one fp32 rounding; adding to bf16
// rounds the product and the sum, which is why the trainer accumulates in float only.
template <typename X, typename G>
void matmul_backward_weight(const Device* dev, G* dweight, const X* dout, const X* inp, int64_t N, int C, int OC,
                            bool accumulate) {
    if (!dev->gpu) {
        assert(sizeof(X) == sizeof(float) && sizeof(G) == sizeof(float));
        matmul_backward_weight_cpu((float*)dweight, (const float*)dout, (const float*)inp, N, C, OC, accumulate);
        return;
    }
    MatmulPointers pointers = {inp, dout, dweight, nullptr, nullptr};
    if (!matmul_launch<X, G>(dev, &pointers, CUBLAS_OP_N, CUBLAS_OP_T, C, OC, N, CUBLASLT_EPILOGUE_DEFAULT, accumulate))
        matmul_unsupported("weight's gradient", N, C, OC);
}

inline int64_t matmul_backward_bias_scratch_bytes(const Device* dev, int OC) {
    if (!dev->gpu) return 0;
    int a = matmul_bias_slices<float>(dev, OC), b = matmul_bias_slices<bf16>(dev, OC);
    return (int64_t)(a > b ? a : b) * OC * sizeof(float);
}

// dbias: (OC) (+)= the column sums of dout: (N, OC); scratch: matmul_backward_bias_scratch_bytes
template <typename X, typename G>
void matmul_backward_bias(const Device* dev, G* dbias, float* scratch, const X* dout, int64_t N, int OC,
                          bool accumulate) {
    assert(OC % 8 == 0);
    if (!dev->gpu) {
        assert(sizeof(X) == sizeof(float) && sizeof(G) == sizeof(float));
        column_sum_cpu((float*)dbias, (const float*)dout, N, OC, accumulate);
        return;
    }
    int slices = matmul_bias_slices<X>(dev, OC);
    dim3 grid(ceil_div(OC, matmul_bias_columns<X>), slices), block(32, 8);
    matmul_backward_bias_kernel<<<grid, block, 0, dev->stream>>>(scratch, dout, N, OC);
    check_launch();
    column_sum<G>(dev, &dbias, 1, scratch, slices, OC, accumulate);
}

inline int64_t matmul_backward_gelu_scratch_bytes(const Device* dev, int64_t N, int C) {
    if (!dev->gpu) return 0;
    int64_t ours = matmul_gelu_scratch_bytes(N, C), bias = matmul_backward_bias_scratch_bytes(dev, C);
    return ours > bias ? ours : bias;
}

// Back through a linear layer to the GELU before it and the bias before that: dinp: (N, C) = (dout W) *
// gelu'(pre_gelu), dbias: (C) (+)= its column sums. dout: (N, OC); weight: (OC, C); pre_gelu: (N, C); scratch:
// matmul_backward_gelu_scratch_bytes
template <typename X, typename G>
void matmul_backward_gelu(const Device* dev, X* dinp, G* dbias, float* scratch, const X* dout, const X* weight,
                          const X* pre_gelu, int64_t N, int C, int OC, bool accumulate) {
    if (!dev->gpu) {
        assert(sizeof(X) == sizeof(float) && sizeof(G) == sizeof(float));
        matmul_backward_gelu_cpu((float*)dinp, (float*)dbias, (const float*)dout, (const float*)weight,
                                 (const float*)pre_gelu, N, C, OC, accumulate);
        return;
    }
    bool fused = false;
    if constexpr (std::is_same_v<X, bf16>) {
        if (matmul_gelu_fits(dev, N, C, OC)) {
            matmul_gelu_backward(dev, dinp, dbias, scratch, dout, weight, pre_gelu, N, C, OC, accumulate);
            return;
        }
        MatmulPointers pointers = {weight, dout, dinp, nullptr, pre_gelu};
        fused = matmul_launch<X, X>(dev, &pointers, CUBLAS_OP_N, CUBLAS_OP_N, C, N, OC, CUBLASLT_EPILOGUE_DGELU, false);
    }
    if (!fused) {
        matmul_backward_input(dev, dinp, dout, weight, N, C, OC);
        gelu_backward_inplace(dev, dinp, pre_gelu, N * C);
    }
    matmul_backward_bias(dev, dbias, scratch, dinp, N, C, accumulate);
}
