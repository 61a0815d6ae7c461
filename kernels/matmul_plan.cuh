// Calls of cuBLASLt. The first call of a shape makes a plan (descriptors and algorithm), which is kept, so that later
// calls are one launch. Algorithms that sum by atomics are excluded, and so are those that sum in the output's type,
// which would round partial sums to bf16; the rest give equal bits for equal inputs.
//
// Choice of algorithm: cuBLASLt's first proposal is up to a tenth slower than its best, so all proposals for a large
// product are timed once, on random operands, when its plan is made during a warm-up: about 50 ms per shape, in the
// product's own memory, which has no values yet. Later plans take the first proposal. Timing must not change bits
// (the same command twice, or a run and its resumption, give the same losses to the last bit), so only proposals whose
// result equals the first one's bit by bit take part. The first one runs where there is no search. Operands and bias
// are random because a run's may be zeros, for which all algorithms agree. Most proposals agree with the first: without
// a split of k, each sum runs over k in the same order, whatever the tile.
#pragma once
#include "common.cuh"

// A product d (m, n) = op(a) op(b) in cuBLASLt's column-major terms. Compared byte by byte: zero it first. A batched
// one (matmul_product) has strides, in elements; others have none.
struct MatmulShape {
    int64_t m, n, k;
    cublasOperation_t op_a, op_b;
    cudaDataType_t input, output;
    cudaDataType_t input_b;  // of b, where a is fp8; otherwise b is as a
    int32_t fast;            // fp8: sums may have fewer bits between instructions
    int32_t tf32;            // fp32: operands may be rounded to TF32
    cublasLtEpilogue_t epilogue;
    uint32_t alignment;  // of every pointer, at most 256 bytes
    bool batched;
    int64_t stride_a, stride_b, stride_d;
};

struct MatmulPlan {
    MatmulShape shape;
    bool found;  // false: cuBLASLt has no algorithm for this shape and epilogue
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
};

struct MatmulPointers {
    const void *a, *b;
    void* d;
    const void* bias;                                    // or NULL
    const void* aux;                                     // GELU's input, written (GELU_AUX) or read (DGELU); or NULL
    const float *scale_a = nullptr, *scale_b = nullptr;  // fp8: what a and b are to be multiplied by
    const void* c = nullptr;                             // what beta multiplies; NULL: d
    float alpha = 1.0f;
    int32_t batch = 0;  // of a batched product
};

// Describes d (m, n) = op(a) op(b) without anything special.
inline void matmul_shape(MatmulShape* s, cudaDataType_t input, cudaDataType_t output, cublasOperation_t op_a,
                         cublasOperation_t op_b, int64_t m, int64_t n, int64_t k) {
    memset(s, 0, sizeof(*s));
    s->m = m, s->n = n, s->k = k, s->op_a = op_a, s->op_b = op_b;
    s->input = input, s->output = output, s->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
}

inline bool matmul_is_fp8(const MatmulShape* s) {
    return s->input == CUDA_R_8F_E4M3 || s->input == CUDA_R_8F_E5M2;
}

template <typename T>
constexpr cudaDataType_t matmul_type() {
    return std::is_same_v<T, float> ? CUDA_R_32F : std::is_same_v<T, __half> ? CUDA_R_16F : CUDA_R_16BF;
}

template <typename Value>
inline void matmul_set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, Value value) {
    check(cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof(value)));
}

inline void matmul_point(MatmulPlan* plan, const MatmulPointers* pointers) {
    if (pointers->bias) matmul_set(plan->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, pointers->bias);
    if (pointers->aux) matmul_set(plan->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, pointers->aux);
    if (pointers->scale_a) matmul_set(plan->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, pointers->scale_a);
    if (pointers->scale_b) matmul_set(plan->desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, pointers->scale_b);
}

constexpr int MATMUL_CANDIDATES = 16;
constexpr double MATMUL_SEARCH_FLOPS = 4e9;  // smaller products keep the first proposal

// Asks cuBLASLt for algorithms for a plan, its best guess first. Returns their number: at most `most`, 0 if it has
// none.
inline int matmul_candidates(const Device* dev, const MatmulPlan* plan, cublasLtMatmulAlgo_t* algorithms, int most) {
    cublasLtMatmulPreference_t preference;
    check(cublasLtMatmulPreferenceCreate(&preference));
    auto prefer = [preference](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (size_t)WORKSPACE_BYTES);
    // A batched product does not split k: its bits must not depend on how many matrices share the launch.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           (uint32_t)(plan->shape.batched ? CUBLASLT_REDUCTION_SCHEME_NONE : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, plan->shape.alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, plan->shape.alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, plan->shape.alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, plan->shape.alignment);
    cublasLtMatmulHeuristicResult_t result[MATMUL_CANDIDATES];
    int proposed = 0, count = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(dev->cublaslt, plan->desc, plan->a, plan->b, plan->d,
                                                           plan->d, preference, most, result, &proposed);
    // These two mean that there is no algorithm, or no such epilogue for these types; any other status is an error.
    bool none = status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
    if (!none) check(status);
    for (int i = 0; i < proposed && !none; i++)
        if (result[i].state == CUBLAS_STATUS_SUCCESS) algorithms[count++] = result[i].algo;
    check(cublasLtMatmulPreferenceDestroy(preference));
    return count;
}

// d = alpha op(a) op(b) + beta c with the plan's epilogue.
inline void matmul_run(const Device* dev, const MatmulPlan* plan, const MatmulPointers* pointers,
                       const cublasLtMatmulAlgo_t* algorithm, float beta) {
    check(cublasLtMatmul(dev->cublaslt, plan->desc, &pointers->alpha, pointers->a, plan->a, pointers->b, plan->b, &beta,
                         pointers->c ? pointers->c : pointers->d, plan->d, pointers->d, plan->d, algorithm,
                         dev->workspace, WORKSPACE_BYTES, dev->stream));
}

// Random bits, of which `keep` stay, and those of `set` are set. Grid ceil(words / 256), block 256.
__global__ static void matmul_fill_kernel(uint32_t* to, int64_t words, uint32_t keep, uint32_t set, uint32_t seed) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= words) return;
    uint64_t z = ((uint64_t)seed << 40 | (uint64_t)(i + 1)) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    to[i] = ((uint32_t)(z >> 32) & keep) | set;
}

// sum += a hash of every word and its place. Integers: the order does not matter. Grid any, block 256.
__global__ static void matmul_hash_kernel(unsigned long long* sum, const uint32_t* words, int64_t n) {
    unsigned long long own = 0;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        uint64_t z = ((uint64_t)words[i] << 32 ^ (uint64_t)i) * 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 29)) * 0xBF58476D1CE4E5B9ull;
        own += z ^ (z >> 32);
    }
    atomicAdd(sum, own);
}

// What algorithms are tried on: the product's own operands, which a trial overwrites.
struct MatmulTrial {
    MatmulPointers pointers;
    unsigned long long* hash;  // device memory
    int64_t output_bytes;
    int64_t aux_bytes;  // of GELU's input where it is an output, otherwise 0
    bool sums;          // also with beta = 1, as a weight's gradient is added to
};

// Fills an operand with values of either sign: of 16 bits from a half to two, or, fp8, codes over the whole range of
// exponents (bit 3 is 0, so that none is NaN or infinite, whether they are e4m3 or e5m2). Few exponents would not do
// for fp8: sums of such codes are exact, so that algorithms agree whose sums of a run's values differ.
inline void matmul_fill(const Device* dev, const void* to, int64_t bytes, bool fp8, uint32_t seed) {
    const int64_t words = bytes / 4;
    launch_kernel(dev, matmul_fill_kernel, (unsigned)ceil_div(words, 256), 256, 0, (uint32_t*)to, words,
                  fp8 ? 0xf7f7f7f7u : 0x80ff80ffu, fp8 ? 0u : 0x3f003f00u, seed);
}

// Fills the operands with random values, so that algorithms that sum in different orders differ in bits. `memory`: 256
// bytes of device memory.
inline MatmulTrial matmul_trial(const Device* dev, const MatmulShape* s, const MatmulPointers* used, char* memory) {
    const bool writes_aux = s->epilogue == CUBLASLT_EPILOGUE_GELU_AUX || s->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    const int64_t outputs = s->m * s->n, bytes = outputs * (s->output == CUDA_R_32F ? 4 : 2);
    MatmulTrial trial = {*used, (unsigned long long*)memory, bytes, writes_aux ? outputs * 2 : 0,
                         s->epilogue == CUBLASLT_EPILOGUE_DEFAULT};
    trial.pointers.c = nullptr, trial.pointers.alpha = 1.0f;
    const bool fp8 = matmul_is_fp8(s);
    if (fp8) {
        const float one = 1.0f;
        trial.pointers.scale_a = trial.pointers.scale_b = (float*)(memory + 64);
        copy_to_device(dev, memory + 64, &one, sizeof(one));
    }
    matmul_fill(dev, used->a, s->m * s->k * (fp8 ? 1 : 2), fp8, 0);
    matmul_fill(dev, used->b, s->k * s->n * (fp8 ? 1 : 2), fp8, 1);
    if (used->bias) matmul_fill(dev, used->bias, s->m * bytes / outputs, false, 0);
    if (used->aux && !writes_aux) matmul_fill(dev, used->aux, outputs * 2, false, 0);
    return trial;
}

// A hash of what a product has written.
inline unsigned long long matmul_hash(const Device* dev, const MatmulTrial* trial) {
    unsigned long long hash;
    device_zero(dev, trial->hash, sizeof(hash));
    const auto add = [&](const void* values, int64_t bytes) {
        launch_kernel(dev, matmul_hash_kernel, 4 * dev->sm_count, 256, 0, trial->hash, (const uint32_t*)values,
                      bytes / 4);
    };
    add(trial->pointers.d, trial->output_bytes);
    if (trial->aux_bytes > 0) add(trial->pointers.aux, trial->aux_bytes);
    copy_to_host(dev, &hash, trial->hash, sizeof(hash));
    return hash;
}

// The bits of a product and of its sum with itself.
struct MatmulBits {
    unsigned long long product, sum;
};

inline MatmulBits matmul_bits(const Device* dev, const MatmulPlan* plan, const MatmulTrial* trial,
                              const cublasLtMatmulAlgo_t* algorithm) {
    MatmulBits bits = {};
    matmul_run(dev, plan, &trial->pointers, algorithm, 0.0f);
    bits.product = matmul_hash(dev, trial);
    if (!trial->sums) return bits;
    matmul_run(dev, plan, &trial->pointers, algorithm, 1.0f);
    bits.sum = matmul_hash(dev, trial);
    return bits;
}

// The fastest of the proposals with the first one's bits, by the shortest of four runs.
inline void matmul_search(const Device* dev, MatmulPlan* plan, const cublasLtMatmulAlgo_t* algorithm, int count,
                          const MatmulTrial* trial) {
    matmul_point(plan, &trial->pointers);
    MatmulBits first = {};
    float best = INFINITY;
    for (int i = 0; i < count; i++) {
        MatmulBits own = matmul_bits(dev, plan, trial, &algorithm[i]);
        if (i == 0) first = own;
        if (own.product != first.product || own.sum != first.sum) continue;
        const auto run = [&] { matmul_run(dev, plan, &trial->pointers, &algorithm[i], 0.0f); };
        float ms = INFINITY;
        for (int j = 0; j < 4; j++) ms = fminf(ms, stream_ms(dev->stream, run));
        if (ms < best) best = ms, plan->algorithm = algorithm[i];
    }
}

// Takes cuBLASLt's first proposal, or for a large product in a warm-up the best that a search finds. It asks for as
// many proposals without a search as with one, since the first of 16 may differ from the only one of 1.
inline void matmul_choose(const Device* dev, MatmulPlan* plan, const MatmulPointers* pointers) {
    const MatmulShape* s = &plan->shape;
    cublasLtMatmulAlgo_t algorithm[MATMUL_CANDIDATES];
    bool large = !s->batched && s->input != CUDA_R_32F && 2.0 * s->m * s->n * s->k >= MATMUL_SEARCH_FLOPS;
    int count = matmul_candidates(dev, plan, algorithm, large ? MATMUL_CANDIDATES : 1);
    plan->found = count > 0;
    if (count > 0) plan->algorithm = algorithm[0];
    if (count < 2 || !dev->warms_up) return;
    char* memory = (char*)device_alloc(dev, 256);
    const MatmulTrial trial = matmul_trial(dev, s, pointers, memory);
    matmul_search(dev, plan, algorithm, count, &trial);
    device_free(dev, memory);
}

// Sets how many matrices a batched plan multiplies.
inline void matmul_batch(MatmulPlan* plan, int32_t batch) {
    const MatmulShape* s = &plan->shape;
    const cublasLtMatrixLayout_t layout[] = {plan->a, plan->b, plan->d};
    const int64_t stride[] = {s->stride_a, s->stride_b, s->stride_d};
    for (int i = 0; i < 3; i++) {
        check(cublasLtMatrixLayoutSetAttribute(layout[i], CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof(batch)));
        check(cublasLtMatrixLayoutSetAttribute(layout[i], CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride[i],
                                               sizeof(stride[i])));
    }
}

// The algorithm of a batched product is chosen for this many matrices, however many a launch has.
constexpr int32_t MATMUL_BATCH = 8;

// cuBLASLt's descriptions of a shape.
inline void matmul_describe(MatmulPlan* plan, const MatmulShape* shape) {
    plan->shape = *shape;
    const bool fp8 = matmul_is_fp8(shape);
    bool transpose_a = shape->op_a == CUBLAS_OP_T, transpose_b = shape->op_b == CUBLAS_OP_T;
    check(cublasLtMatmulDescCreate(&plan->desc, shape->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                                   CUDA_R_32F));
    matmul_set(plan->desc, CUBLASLT_MATMUL_DESC_TRANSA, shape->op_a);
    matmul_set(plan->desc, CUBLASLT_MATMUL_DESC_TRANSB, shape->op_b);
    matmul_set(plan->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, shape->epilogue);
    if (fp8) {
        matmul_set(plan->desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, (int8_t)shape->fast);
        if (shape->epilogue == CUBLASLT_EPILOGUE_BIAS)
            matmul_set(plan->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, (int32_t)CUDA_R_16BF);
    }
    if (shape->epilogue == CUBLASLT_EPILOGUE_GELU_AUX || shape->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
        shape->epilogue == CUBLASLT_EPILOGUE_DGELU)
        matmul_set(plan->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, shape->m);
    int64_t a_rows = transpose_a ? shape->k : shape->m, a_cols = transpose_a ? shape->m : shape->k;
    int64_t b_rows = transpose_b ? shape->n : shape->k, b_cols = transpose_b ? shape->k : shape->n;
    check(cublasLtMatrixLayoutCreate(&plan->a, shape->input, a_rows, a_cols, a_rows));
    check(cublasLtMatrixLayoutCreate(&plan->b, fp8 ? shape->input_b : shape->input, b_rows, b_cols, b_rows));
    check(cublasLtMatrixLayoutCreate(&plan->d, shape->output, shape->m, shape->n, shape->m));
    if (shape->batched) matmul_batch(plan, MATMUL_BATCH);
}

inline MatmulPlan matmul_plan_create(const Device* dev, const MatmulShape* shape, const MatmulPointers* pointers) {
    MatmulPlan plan = {};
    matmul_describe(&plan, shape);
    matmul_point(&plan, pointers);
    matmul_choose(dev, &plan, pointers);
    return plan;
}

inline void matmul_plans_close(MatmulPlans* plans) {
    for (int i = 0; i < plans->count; i++) {
        const MatmulPlan* plan = &plans->plan[i];
        for (cublasLtMatrixLayout_t layout : {plan->a, plan->b, plan->d}) check(cublasLtMatrixLayoutDestroy(layout));
        check(cublasLtMatmulDescDestroy(plan->desc));
    }
    free(plans->plan);
}

// The plan of a shape, from the table of those that were made: a training run has a few dozen.
inline MatmulPlan* matmul_plan(const Device* dev, const MatmulShape* shape, const MatmulPointers* pointers) {
    MatmulPlans* plans = dev->matmul_plans;
    for (int i = 0; i < plans->count; i++)
        if (memcmp(&plans->plan[i].shape, shape, sizeof(*shape)) == 0) return &plans->plan[i];
    if (plans->count == plans->capacity) {
        plans->capacity = plans->capacity ? 2 * plans->capacity : 64;
        plans->plan = (MatmulPlan*)memory_grow(plans->plan, plans->capacity * sizeof(MatmulPlan));
        if (!plans->plan) user_error("out of host memory for %d matmul plans", plans->capacity);
    }
    plans->close = matmul_plans_close;
    plans->plan[plans->count] = matmul_plan_create(dev, shape, pointers);
    return &plans->plan[plans->count++];
}

// The alignment of all pointers, and of the matrices of a batch behind them.
inline uint32_t matmul_alignment(const MatmulShape* s, const MatmulPointers* pointers) {
    const auto size = [](cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; };
    uintptr_t bits = 256 | (uintptr_t)pointers->a | (uintptr_t)pointers->b | (uintptr_t)pointers->c |
                     (uintptr_t)pointers->d | (uintptr_t)pointers->bias | (uintptr_t)pointers->aux |
                     (uintptr_t)(s->stride_a | s->stride_b) * size(s->input) | (uintptr_t)s->stride_d * size(s->output);
    return (uint32_t)(bits & -bits);
}

// Launches the product of a shape; false when cuBLASLt has no algorithm for it.
inline bool matmul_launch_shape(const Device* dev, MatmulShape* shape, const MatmulPointers* pointers, float beta) {
    shape->alignment = matmul_alignment(shape, pointers);
    MatmulPlan* plan = matmul_plan(dev, shape, pointers);
    if (!plan->found) return false;
    matmul_point(plan, pointers);
    if (shape->batched) matmul_batch(plan, pointers->batch);
    matmul_run(dev, plan, pointers, &plan->algorithm, beta);
    return true;
}

[[noreturn]] inline void matmul_unsupported(int64_t rows, int64_t cols, int64_t depth) {
    user_error(
        "cuBLASLt has no algorithm for a product of %lld x %lld and %lld x %lld; take --channels and --heads that are "
        "multiples of 8, or another --rule",
        (long long)rows, (long long)depth, (long long)depth, (long long)cols);
}

// Launches d = op(a) op(b) (+ d when accumulating) with the epilogue; false when cuBLASLt has no algorithm for it.
template <typename X, typename D>
bool matmul_launch(const Device* dev, const MatmulPointers* pointers, cublasOperation_t op_a, cublasOperation_t op_b,
                   int64_t m, int64_t n, int64_t k, cublasLtEpilogue_t epilogue, bool accumulate) {
    MatmulShape shape;
    matmul_shape(&shape, matmul_type<X>(), matmul_type<D>(), op_a, op_b, m, n, k);
    shape.epilogue = epilogue;
    return matmul_launch_shape(dev, &shape, pointers, accumulate ? 1.0f : 0.0f);
}
