// A study of GaLore's step of one matrix (optim/matrix/low_rank.h, whose way is like "plain"): project the gradient
// onto r directions, Adam there, project back, and update the weights:
//     low = G Q^T;  m, v, N = Adam of low;  W = keep W - rate N Q         (a wide matrix: low = Q G, W = ... Q^T N)
//     plain     the library's products, Adam and the update of the weights as kernels of their own; U is in memory
//     hybrid    the library's products, of which the second adds to the weights (beta = keep); Adam between them
//     ours      galore_mma.cuh: Adam in the epilogue of the first product, the weights in that of the second
//     wgmma     the same on sm_90a: in bf16 by galore_project.cuh and galore_back.cuh for ranks up to 256, in fp32 by
//               galore_project_tf32.cuh and galore_turned.cuh up to 128; the second product begins while the first one
//               ends
// in fp32 (ours: each product as three of TF32), fp32 with TF32 products, and bf16 (weights, gradients, Q and N bf16; m
// and v fp32). Each is checked against float64 first. Floor: the gradient read once, the weights and m and v read and
// written once, at the copy rate of the same run. The library's algorithm is the fastest of its first eight proposals.
//   make build/dev/galore && ./build/dev/galore [parts] [bf16] [128] [ours]
// "parts" times both halves of the step by themselves; a precision, a rank or a variant picks that one alone.
#include "galore_back.cuh"
#include "galore_project.cuh"
#include "galore_turned.cuh"
#include "double.h"
#include "timing.h"

enum Precision { FP32, TF32, BF16, PRECISIONS };
static const char* const NAMES[] = {"fp32", "tf32", "bf16"};

// Quotients and roots as / and sqrtf round them, if no number on the way is near the ends of fp32's range: the
// compiler's own way, without its branches, so that a thread's quotients are under way at the same time.

__device__ __forceinline__ float near_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return fmaf(y, fmaf(-x, y, 1.0f), y);
}
// a / b; `of_b` is near_reciprocal(b).
__device__ __forceinline__ float near_quotient(float a, float b, float of_b) {
    const float q = __fmul_rn(a, of_b);
    return fmaf(of_b, fmaf(-b, q, a), q);
}
__device__ __forceinline__ float near_root(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    const float root = __fmul_rn(x, y);
    return fmaf(fmaf(-root, root, x), __fmul_rn(0.5f, y), root);
}
// True if x lies from 2^low to 2^high, which 0, NaN and negative numbers do not.
__device__ __forceinline__ bool lies_between(float x, int low, int high) {
    return __float_as_uint(x) - ((uint32_t)(127 + low) << 23) <= (uint32_t)(high - low) << 23;
}

// Adam of the projected gradient.
struct Adam {
    float *m, *v;
    float rest1, rest2, bias1, root2, eps;  // 1 - beta, 1 - beta1^t, sqrt(1 - beta2^t)
    bool is_usual;                          // bias1 and root2 lie from 2^-10 to 1, eps from 0 to 1

    __device__ __forceinline__ float direction(float g, float& m, float& v) const {
        m = fmaf(rest1, g - m, m), v = fmaf(rest2, fmaf(g, g, -v), v);
        return m / bias1 / (sqrtf(v) / root2 + eps);
    }
    struct Old {
        float4 m, v;
    };
    __device__ __forceinline__ Old load(int64_t at) const { return {*(float4*)(m + at), *(float4*)(v + at)}; }
    __device__ __forceinline__ float4 directions(int64_t at, float4 g, Old old) const {
        float4 first = old.m, second = old.v;
        const float4 n = {direction(g.x, first.x, second.x), direction(g.y, first.y, second.y),
                          direction(g.z, first.z, second.z), direction(g.w, first.w, second.w)};
        *(float4*)(m + at) = first, *(float4*)(v + at) = second;
        return n;
    }

    // Four directions, with the bits of direction(). In the usual range quotients lie from 2^-92 to 2^108, and what
    // the products leave of a number on the way is never below fp32's least one.
    __device__ __forceinline__ void directions(float (&n)[4], const float (&g)[4], float (&m)[4], float (&v)[4]) const {
        const float of_bias = near_reciprocal(bias1), of_root = near_reciprocal(root2);
        bool usual = is_usual;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            m[i] = fmaf(rest1, g[i] - m[i], m[i]), v[i] = fmaf(rest2, fmaf(g[i], g[i], -v[i]), v[i]);
            usual = usual && lies_between(fabsf(m[i]), -50, 50) && lies_between(v[i], -96, 64);
            const float below = near_quotient(near_root(v[i]), root2, of_root) + eps;
            n[i] = near_quotient(near_quotient(m[i], bias1, of_bias), below, near_reciprocal(below));
        }
        if (usual) return;
#pragma unroll 1
        for (int i = 0; i < 4; i++) {  // one copy of the code, since it hardly ever runs
            const float first = i == 0   ? m[0]
                                : i == 1 ? m[1]
                                : i == 2 ? m[2]
                                         : m[3],
                        second = i == 0   ? v[0]
                                 : i == 1 ? v[1]
                                 : i == 2 ? v[2]
                                          : v[3],
                        exact = first / bias1 / (sqrtf(second) / root2 + eps);
#pragma unroll
            for (int j = 0; j < 4; j++) n[j] = i == j ? exact : n[j];
        }
    }
};

__device__ __forceinline__ void store_four(float* to, float4 x) {
    *(float4*)to = x;
}
__device__ __forceinline__ void store_four(bf16* to, float4 x) {
    *(uint2*)to = make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
}
__device__ __forceinline__ float4 load_four(const float* from) {
    return *(const float4*)from;
}
__device__ __forceinline__ float4 load_four(const bf16* from) {
    const uint2 x = *(const uint2*)from;
    const float2 low = pair_floats(x.x), high = pair_floats(x.y);
    return make_float4(low.x, low.y, high.x, high.y);
}

struct Update {
    float keep, rate;

    __device__ __forceinline__ float4 of(float4 w, float4 u) const {
        return make_float4(fmaf(-rate, u.x, keep * w.x), fmaf(-rate, u.y, keep * w.y), fmaf(-rate, u.z, keep * w.z),
                           fmaf(-rate, u.w, keep * w.w));
    }
};

// Sinks of our products.

// N is rounded to TF32 if `rest` or `rounds` ask for it; rest receives what that leaves.
template <typename E>
struct AdamSink {
    Adam adam;
    E* n;
    int64_t cols;
    bool rounds = false;
    float* rest = nullptr;

    typedef Adam::Old Old;
    __device__ void begin(int, int, int, int) const {}
    __device__ Old load(int row, int column) const { return adam.load(row * cols + column); }
    __device__ void take(int row, int column, float4 x, Old old) const {
        const int64_t at = row * cols + column;
        float4 to = adam.directions(at, x, old);
        if (sizeof(E) == 4 && rounds) {
            uint32_t word[4] = {__float_as_uint(to.x), __float_as_uint(to.y), __float_as_uint(to.z),
                                __float_as_uint(to.w)};
            uint32_t left[4];
            lp_split<3>(word, left);
            to = *(const float4*)word;
            if (rest) *(float4*)(rest + at) = *(const float4*)left;
        }
        store_four(n + at, to);
    }

    // galore_project.cuh asks a sink for these: two numbers side by side, and two such pairs.
    struct Two {
        float2 m, v;
    };
    static __device__ Two outside() { return {{1.0f, 1.0f}, {1.0f, 1.0f}}; }
    __device__ Two load_two(int row, int column) const {
        const int64_t at = row * cols + column;
        return {*(const float2*)(adam.m + at), *(const float2*)(adam.v + at)};
    }
    __device__ void take_twos(const int (&row)[2], const int (&column)[2], const bool (&inside)[2], const float (&x)[4],
                              const Two (&old)[2]) const {
        float m[4] = {old[0].m.x, old[0].m.y, old[1].m.x, old[1].m.y},
              v[4] = {old[0].v.x, old[0].v.y, old[1].v.x, old[1].v.y}, to[4];
        adam.directions(to, x, m, v);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (!inside[i]) continue;
            const int64_t at = row[i] * cols + column[i];
            *(float2*)(adam.m + at) = make_float2(m[2 * i], m[2 * i + 1]);
            *(float2*)(adam.v + at) = make_float2(v[2 * i], v[2 * i + 1]);
            *(uint32_t*)(n + at) = pack_bf16(to[2 * i], to[2 * i + 1]);
        }
    }
};

template <typename E>
struct UpdateSink {
    Update update;
    E* w;
    int64_t rows, cols;

    // The tile's weights come to the L2 cache while the product is made.
    __device__ void begin(int row, int column, int down, int across) const {
        const int lines = across * (int)sizeof(E) / 128;
        for (int i = threadIdx.x; i < down * lines; i += blockDim.x) {
            const int64_t r = row + i / lines, c = column + i % lines * (128 / (int)sizeof(E));
            if (r < rows && c < cols) asm volatile("prefetch.global.L2 [%0];" ::"l"(w + r * cols + c));
        }
    }
    struct Old {
        std::conditional_t<sizeof(E) == 2, uint2, float4> w;
    };
    __device__ Old load(int row, int column) const { return {*(decltype(Old::w)*)(w + row * cols + column)}; }
    __device__ void take(int row, int column, float4 x, Old old) const {
        store_four(w + row * cols + column, update.of(load_four((const E*)&old.w), x));
    }
    struct Line {};
    __device__ Line line(int, int) const { return {}; }
    __device__ __forceinline__ void pairs(Line, int, int, int, uint32_t (&words)[2], const float (&u)[4]) const {
        const float2 low = pair_floats(words[0]), high = pair_floats(words[1]);
        const float4 x = update.of(make_float4(low.x, low.y, high.x, high.y), make_float4(u[0], u[1], u[2], u[3]));
        words[0] = pack_bf16(x.x, x.y), words[1] = pack_bf16(x.z, x.w);
    }
    __device__ __forceinline__ float one(int, int, float x, float u) const {
        return fmaf(-update.rate, u, update.keep * x);
    }
};

// Kernels of the other variants. Grid any, block 256; n is a multiple of 4.
template <typename E>
__global__ void adam_kernel(Adam adam, E* n, const float* low, int64_t count) {
    const int64_t stride = 1024ll * gridDim.x;
    for (int64_t i = blockIdx.x * 1024ll + threadIdx.x * 4; i < count; i += stride)
        store_four(n + i, adam.directions(i, load_four(low + i), adam.load(i)));
}

template <typename E>
__global__ void update_kernel(Update update, E* w, const E* u, int64_t count) {
    const int64_t stride = 1024ll * gridDim.x;
    for (int64_t i = blockIdx.x * 1024ll + threadIdx.x * 4; i < count; i += stride)
        store_four(w + i, update.of(load_four(w + i), load_four(u + i)));
}

// The library's products: d = alpha op(a) op(b) + beta d, row-major.

struct Library {
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
};

static void library_run(const Device* dev, const Library* l, void* d, const void* a, const void* b, float alpha,
                        float beta) {
    check(cublasLtMatmul(dev->cublaslt, l->desc, &alpha, b, l->a, a, l->b, &beta, d, l->d, d, l->d, &l->algorithm,
                         dev->workspace, WORKSPACE_BYTES, dev->stream));
}

// The algorithm is chosen on the arrays of the product, whose output it overwrites.
static Library library_open(const Device* dev, Precision precision, cudaDataType_t output, bool at, bool bt,
                            int64_t rows, int64_t cols, int64_t depth, void* d, const void* a, const void* b) {
    Library l = {};
    const cudaDataType_t input = precision == BF16 ? CUDA_R_16BF : CUDA_R_32F;
    check(cublasLtMatmulDescCreate(&l.desc, precision == TF32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                                   CUDA_R_32F));
    matmul_set(l.desc, CUBLASLT_MATMUL_DESC_TRANSA, bt ? CUBLAS_OP_T : CUBLAS_OP_N);
    matmul_set(l.desc, CUBLASLT_MATMUL_DESC_TRANSB, at ? CUBLAS_OP_T : CUBLAS_OP_N);
    check(cublasLtMatrixLayoutCreate(&l.a, input, bt ? depth : cols, bt ? cols : depth, bt ? depth : cols));
    check(cublasLtMatrixLayoutCreate(&l.b, input, at ? rows : depth, at ? depth : rows, at ? rows : depth));
    check(cublasLtMatrixLayoutCreate(&l.d, output, cols, rows, cols));
    cublasLtMatmulPreference_t preference;
    check(cublasLtMatmulPreferenceCreate(&preference));
    const size_t workspace = WORKSPACE_BYTES;
    check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                               sizeof(workspace)));
    cublasLtMatmulHeuristicResult_t result[8];
    int found = 0;
    check(cublasLtMatmulAlgoGetHeuristic(dev->cublaslt, l.desc, l.a, l.b, l.d, l.d, preference, 8, result, &found));
    check(cublasLtMatmulPreferenceDestroy(preference));
    double least = INFINITY;
    Library tried = l;
    for (int i = 0; i < found; i++) {
        tried.algorithm = result[i].algo;
        const double ms = median_ms(dev, 5, [&] { library_run(dev, &tried, d, a, b, 1.0f, 0.0f); });
        if (ms < least) least = ms, l.algorithm = tried.algorithm;
    }
    if (found == 0)
        user_error("galore: cuBLASLt has no algorithm for %lld x %lld x %lld", (long long)rows, (long long)cols,
                   (long long)depth);
    return l;
}

static void library_close(Library* l) {
    check(cublasLtMatmulDescDestroy(l->desc));
    for (cublasLtMatrixLayout_t layout : {l->a, l->b, l->d}) check(cublasLtMatrixLayoutDestroy(layout));
}

// A matrix and its arrays; E is float or bf16 by precision.

struct Step {
    Precision precision;
    int64_t rows, cols, rank, length;  // of channels
    int64_t size, small;               // elements of G and of low
    void *g, *w, *u, *q, *n;
    float* rest;  // of N, where N is split
    float *low, *m, *v;
    Adam adam;
    Update update;
    Library project, back;
    bool by_wgmma;  // what follows is there
    LowProjectPlan of_project;
    LowBackPlan of_back;      // bf16
    LowTurnedPlan of_turned;  // TF32
};

template <typename E>
__global__ void fill_kernel(E* to, int64_t n, float middle, float scale, uint64_t seed) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += 256ll * gridDim.x) {
        uint64_t z = (seed << 40 | (uint64_t)(i + 1)) * 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull, z ^= z >> 27;
        to[i] = (E)(middle + scale * ((float)(z >> 40) / 8388608.0f - 1.0f));
    }
}

static void* new_array(Room* room, const Step* s, int64_t n, float scale, uint64_t seed) {
    void* x = room->device<char>(n * (s->precision == BF16 ? 2 : 4));
    cudaStream_t stream = room->dev->stream;
    if (s->precision == BF16) fill_kernel<bf16><<<4096, 256, 0, stream>>>((bf16*)x, n, 0.0f, scale, seed);
    if (s->precision != BF16) fill_kernel<float><<<4096, 256, 0, stream>>>((float*)x, n, 0.0f, scale, seed);
    check_launch();
    return x;
}

// m and v as they are before a step: v is not near 0, so that N is not a sign.
static void set_moments(const Device* dev, const Step* s) {
    fill_kernel<float><<<4096, 256, 0, dev->stream>>>(s->m, s->small, 0.0f, 1.0f, 5);
    check_launch();
    fill_kernel<float><<<4096, 256, 0, dev->stream>>>(s->v, s->small, 1.5f, 1.0f, 6);
    check_launch();
}

// Q of fp32 is rounded, split and transposed here, as it would be in each step that makes a new one.
static void open_wgmma(Room* room, Step* s) {
    const Device* dev = room->dev;
    const int64_t rows = s->rows, cols = s->cols, rank = s->rank;
    s->by_wgmma = s->precision == BF16 ? low_back_fits(dev, rank) : low_turned_fits(dev, rank);
    if (!s->by_wgmma) return;
    if (s->precision == BF16) {
        const bf16 *g = (const bf16*)s->g, *q = (const bf16*)s->q, *n = (const bf16*)s->n;
        s->of_project = low_project_plan_bf16(dev, g, q, rows, cols, rank);
        s->of_back = low_back_plan((bf16*)s->w, n, q, rows, cols, rank);
        return;
    }
    const bool left = rows < cols, splits = s->precision == FP32;
    const int64_t side = left ? rows : cols;
    float* q[4];  // Q and the transposed one, and what is left of them
    for (float*& part : q) part = room->device<float>(rank * side);
    low_split(dev, q[0], q[2], (const float*)s->q, rank, side, false);
    low_split(dev, q[1], q[3], (const float*)s->q, rank, side, true);
    if (splits && !left) s->rest = room->device<float>(s->small);
    const float *rest = splits ? q[2] : nullptr, *of_y = splits ? (left ? q[3] : s->rest) : nullptr;
    s->of_project = low_project_plan<float>(dev, (const float*)s->g, q[0], rest, rows, cols, rank);
    s->of_turned = low_turned_plan((float*)s->w, (const float*)s->n, (const float*)s->q, q[1], of_y, rows, cols, rank);
}

static Step step_open(Room* room, Precision precision, int64_t rows, int64_t cols, int64_t rank) {
    const Device* dev = room->dev;
    Step s = {};
    const bool left = rows < cols;
    const int64_t side = left ? rows : cols;
    s.precision = precision, s.rows = rows, s.cols = cols, s.rank = rank, s.length = left ? cols : rows;
    s.size = rows * cols, s.small = s.length * rank;
    s.g = new_array(room, &s, s.size, 1.0f, 1), s.w = new_array(room, &s, s.size, 1.0f, 2);
    s.u = new_array(room, &s, s.size, 1.0f, 3), s.n = new_array(room, &s, s.small, 1.0f, 4);
    s.q = new_array(room, &s, rank * side, 1.7f / sqrtf((float)side), 7);
    s.low = room->device<float>(s.small), s.m = room->device<float>(s.small), s.v = room->device<float>(s.small);
    set_moments(dev, &s);
    s.adam = {s.m, s.v, 0.1f, 0.001f, 0.5f, 0.07f, 1e-8f, true};
    s.update = {0.999f, 1e-3f};
    const cudaDataType_t type = precision == BF16 ? CUDA_R_16BF : CUDA_R_32F;
    if (left) {
        s.project = library_open(dev, precision, CUDA_R_32F, false, false, rank, cols, rows, s.low, s.q, s.g);
        s.back = library_open(dev, precision, type, true, false, rows, cols, rank, s.u, s.q, s.n);
    } else {
        s.project = library_open(dev, precision, CUDA_R_32F, false, true, rows, rank, cols, s.low, s.g, s.q);
        s.back = library_open(dev, precision, type, false, false, rows, cols, rank, s.u, s.n, s.q);
    }
    open_wgmma(room, &s);
    return s;
}

// Halves of a step: up to N, and from there.

template <typename E>
static void library_first(const Device* dev, const Step* s) {
    const bool left = s->rows < s->cols;
    library_run(dev, &s->project, s->low, left ? s->q : s->g, left ? s->g : s->q, 1.0f, 0.0f);
    adam_kernel<E><<<4 * dev->sm_count, 256, 0, dev->stream>>>(s->adam, (E*)s->n, s->low, s->small);
    check_launch();
}

template <typename E>
static void plain_second(const Device* dev, const Step* s) {
    const bool left = s->rows < s->cols;
    library_run(dev, &s->back, s->u, left ? s->q : s->n, left ? s->n : s->q, 1.0f, 0.0f);
    update_kernel<E><<<8 * dev->sm_count, 256, 0, dev->stream>>>(s->update, (E*)s->w, (const E*)s->u, s->size);
    check_launch();
}

static void hybrid_second(const Device* dev, const Step* s) {
    const bool left = s->rows < s->cols;
    library_run(dev, &s->back, s->w, left ? s->q : s->n, left ? s->n : s->q, -s->update.rate, s->update.keep);
}

template <typename E, int PARTS>
static void our_first(const Device* dev, const Step* s) {
    const AdamSink<E> sink = {s->adam, (E*)s->n, s->rows < s->cols ? s->cols : s->rank};
    low_project<E, PARTS>(dev, (const E*)s->g, (const E*)s->q, s->rows, s->cols, s->rank, sink);
}

template <typename E, int PARTS>
static void our_second(const Device* dev, const Step* s) {
    const UpdateSink<E> sink = {s->update, (E*)s->w, s->rows, s->cols};
    low_back<E, PARTS>(dev, (const E*)s->n, (const E*)s->q, s->rows, s->cols, s->rank, sink);
}

template <int PARTS>
static void wgmma_first(const Device* dev, const Step* s) {
    const AdamSink<float> sink = {s->adam, (float*)s->n, s->of_project.s.cols, s->precision == TF32 || s->rest,
                                  s->rest};
    low_project_run<PARTS>(dev, &s->of_project, sink);
}

static void wgmma_first_bf16(const Device* dev, const Step* s) {
    low_project_run_bf16(dev, &s->of_project, AdamSink<bf16>{s->adam, (bf16*)s->n, s->of_project.s.cols});
}

static void wgmma_second(const Device* dev, const Step* s) {
    low_back_run(dev, &s->of_back, UpdateSink<bf16>{s->update, (bf16*)s->w, s->rows, s->cols}, true);
}

template <int PARTS>
static void turned_second(const Device* dev, const Step* s) {
    low_turned_run<PARTS>(dev, &s->of_turned, UpdateSink<float>{s->update, (float*)s->w, s->rows, s->cols}, true);
}

typedef void (*Half)(const Device* dev, const Step* s);

struct Variant {
    const char* name;
    Half first[PRECISIONS], second[PRECISIONS];
    bool needs_wgmma = false;
};
static const Variant VARIANTS[] = {
    {"plain",
     {library_first<float>, library_first<float>, library_first<bf16>},
     {plain_second<float>, plain_second<float>, plain_second<bf16>}},
    {"hybrid",
     {library_first<float>, library_first<float>, library_first<bf16>},
     {hybrid_second, hybrid_second, hybrid_second}},
    {"ours",
     {our_first<float, 3>, our_first<float, 1>, our_first<bf16, 1>},
     {our_second<float, 3>, our_second<float, 1>, our_second<bf16, 1>}},
    {"wgmma",
     {wgmma_first<3>, wgmma_first<1>, wgmma_first_bf16},
     {turned_second<3>, turned_second<1>, wgmma_second},
     true},
};

// The command line asks for this; without words it asks for all.
struct Wish {
    bool parts = false;
    int precision = PRECISIONS;
    int64_t rank = 0;
    const char* variant = nullptr;
};

static bool is_there(const Variant& v, const Step& s, const Wish& wish) {
    const bool wanted = !wish.variant || strcmp(wish.variant, v.name) == 0;
    return wanted && v.first[s.precision] && (!v.needs_wgmma || s.by_wgmma);
}

// The check: the first moments, which hold low, and the weights' change, from weights of 0.

template <typename E>
__global__ void to_double_kernel(double* to, const E* from, int64_t n) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += 256ll * gridDim.x) to[i] = (double)(float)from[i];
}

static double* doubles_of(Room* room, Precision precision, const void* x, int64_t n) {
    double* d = room->device<double>(n);
    cudaStream_t stream = room->dev->stream;
    if (precision == BF16) to_double_kernel<bf16><<<4096, 256, 0, stream>>>(d, (const bf16*)x, n);
    if (precision != BF16) to_double_kernel<float><<<4096, 256, 0, stream>>>(d, (const float*)x, n);
    check_launch();
    return d;
}

__global__ void double_adam_kernel(Adam adam, double* low, double* m, int64_t n) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += 256ll * gridDim.x) {
        const double g = low[i], first = adam.m[i] + (double)adam.rest1 * (g - adam.m[i]),
                     second = adam.v[i] + (double)adam.rest2 * (g * g - adam.v[i]);
        m[i] = first, low[i] = first / adam.bias1 / (sqrt(second) / adam.root2 + adam.eps);
    }
}

// ||got - want|| / ||want||, both on the device. `factor` multiplies want.
static double error_of(const Device* dev, const double* want, const double* got, int64_t n, double factor) {
    Room room(dev);
    const double *a = room.to_host(want, n), *b = room.to_host(got, n);
    double error = 0.0, norm = 0.0;
    for (int64_t i = 0; i < n; i++) error += pow(b[i] - factor * a[i], 2), norm += pow(factor * a[i], 2);
    return sqrt(error / norm);
}

// Bounds: low is a sum of products of operands rounded to TF32 (2^-11 each, half of it on average) or exact; N and the
// weights are rounded to bf16 there. Sums of fp32 over K terms err by about sqrt(K) 2^-24.
static bool is_right(const Device* dev, Precision precision, int64_t rows, int64_t cols, int64_t rank,
                     const Wish& wish) {
    Room room(dev);
    Step s = step_open(&room, precision, rows, cols, rank);
    const bool left = rows < cols;
    const double *g = doubles_of(&room, precision, s.g, s.size),
                 *q = doubles_of(&room, precision, s.q, rank * (left ? rows : cols));
    double *low = room.device<double>(s.small), *m = room.device<double>(s.small), *u = room.device<double>(s.size);
    if (left) double_product(dev, low, q, false, g, false, (int)rank, (int)cols, (int)rows);
    if (!left) double_product(dev, low, g, false, q, true, (int)rows, (int)rank, (int)cols);
    double_adam_kernel<<<1024, 256, 0, dev->stream>>>(s.adam, low, m, s.small);
    check_launch();
    if (left) double_product(dev, u, q, true, low, false, (int)rows, (int)cols, (int)rank);
    if (!left) double_product(dev, u, low, false, q, false, (int)rows, (int)cols, (int)rank);
    const double of_low[] = {4e-6, 1.0 / 2048, 4e-6}, of_u[] = {8e-6, 1.0 / 1024, 1.0 / 200};
    bool right = true;
    printf("%5lld x %5lld r %3lld %s, errors of m and U:", (long long)rows, (long long)cols, (long long)rank,
           NAMES[precision]);
    for (const Variant& variant : VARIANTS) {
        if (!is_there(variant, s, wish)) continue;
        set_moments(dev, &s);
        check(cudaMemsetAsync(s.w, 0, (size_t)s.size * (precision == BF16 ? 2 : 4), dev->stream));
        check(cudaMemsetAsync(s.n, 0xff, (size_t)s.small * (precision == BF16 ? 2 : 4), dev->stream));
        variant.first[precision](dev, &s);
        variant.second[precision](dev, &s);
        const double e_m = error_of(dev, m, doubles_of(&room, FP32, s.m, s.small), s.small, 1.0);
        const double e_u = error_of(dev, u, doubles_of(&room, precision, s.w, s.size), s.size, -(double)s.update.rate);
        const bool good = e_m < of_low[precision] && e_u < of_u[precision];
        printf("  %s %.1e %.1e%s", variant.name, e_m, e_u, good ? "" : " WRONG");
        right = right && good;
    }
    printf("\n");
    library_close(&s.project), library_close(&s.back);
    return right;
}

static void time_step(const Device* dev, Precision precision, int64_t rows, int64_t cols, int64_t rank, double rate,
                      const Wish& wish) {
    Room room(dev);
    Step s = step_open(&room, precision, rows, cols, rank);
    const double element = precision == BF16 ? 2.0 : 4.0;
    const double floor = 1e3 * (3.0 * (double)s.size * element + 16.0 * (double)s.small) / rate;
    printf("%5lld x %5lld r %3lld %s: floor %.4f ms;", (long long)rows, (long long)cols, (long long)rank,
           NAMES[precision], floor);
    for (const Variant& variant : VARIANTS) {
        if (!is_there(variant, s, wish)) continue;
        auto first = [&] { variant.first[precision](dev, &s); };
        auto second = [&] { variant.second[precision](dev, &s); };
        auto both = [&] { first(), second(); };
        for (double warm = 0.0; warm < 50.0;) warm += 20.0 * median_ms(dev, 20, both);
        printf("  %s %.4f", variant.name, median_ms(dev, 50, both));
        if (wish.parts) printf(" (%.4f + %.4f)", median_ms(dev, 50, first), median_ms(dev, 50, second));
    }
    printf("\n");
    fflush(stdout);
    library_close(&s.project), library_close(&s.back);
}

static const int64_t RANKS[] = {32, 64, 128, 256, 512};

static Wish wish_of(int argc, char** argv) {
    Wish wish;
    for (int i = 1; i < argc; i++) {
        int p = 0;
        while (p < PRECISIONS && strcmp(argv[i], NAMES[p]) != 0) p++;
        const int64_t rank = atoll(argv[i]);
        bool is_variant = false, is_rank = false;
        for (int64_t known : RANKS) is_rank = is_rank || rank == known;
        for (const Variant& v : VARIANTS) is_variant = is_variant || strcmp(argv[i], v.name) == 0;
        if (strcmp(argv[i], "parts") == 0)
            wish.parts = true;
        else if (p < PRECISIONS)
            wish.precision = p;
        else if (is_rank)
            wish.rank = rank;
        else if (is_variant)
            wish.variant = argv[i];
        else
            user_error(
                "galore: %s is not parts, a precision, a rank (32 to 512) or a variant; type galore [parts] [bf16] "
                "[128] [ours]",
                argv[i]);
    }
    return wish;
}

int main(int argc, char** argv) {
    const Wish wish = wish_of(argc, argv);
    auto wanted = [&](int p, int64_t rank) {
        return (wish.precision == PRECISIONS || wish.precision == p) && (wish.rank == 0 || wish.rank == rank);
    };
    Device dev;
    device_open(&dev, true, 0);
    const double rate = print_copy_rate(&dev, 1ll << 30);
    const int64_t small[][3] = {{1024, 768, 128}, {520, 1288, 72}, {1288, 520, 32}, {512, 1024, 256}, {640, 640, 64}};
    bool right = true;
    for (const auto& shape : small) {
        for (int p = 0; p < PRECISIONS; p++) {
            if (wanted(p, wish.rank)) right = is_right(&dev, (Precision)p, shape[0], shape[1], shape[2], wish) && right;
        }
    }
    if (!right) return 1;
    for (int64_t cols : {4096, 11008}) {
        for (int p = PRECISIONS - 1; p >= 0; p--) {
            for (int64_t rank : RANKS) {
                if (wanted(p, rank)) time_step(&dev, (Precision)p, 4096, cols, rank, rate, wish);
            }
        }
    }
    device_close(&dev);
    return 0;
}
