// See low_rank.h. Each loop over elements is a struct with a function of one index, or of one index and a lane
// (each.cuh).
#include "low_rank.h"

#include "../../kernels/low_rank_back.cuh"
#include "../../kernels/matmul_product.cuh"
#include "../each.cuh"
#include "../formats/bf16.cuh"
#include "../formats/fp32.cuh"
#include "../rules/muon.cuh"

constexpr uint32_t NOISE_BASIS = 8;  // a stream of noise besides those of noise.cuh
constexpr int POWER_ITERATIONS = 2, BASIS_PADDED = 256;
constexpr float LIMIT = 1.01f, NORM_EPS = 1e-8f;

static bool stores_basis(MatrixRule rule) {
    return rule == MATRIX_GALORE || rule == MATRIX_FIRA;
}

LowShape low_shape(const OptimConfig* config, int64_t rows, int64_t cols) {
    const MatrixRule rule = rule_of(config)->matrix;
    const int64_t side = rows < cols ? rows : cols;
    int64_t rank = rule == MATRIX_APOLLO_MINI ? 1 : config->rank > 0 ? config->rank : (side + 3) / 4;
    if (rank > side) rank = side;
    // galore's is padded, as checkpoints have it.
    const int64_t basis = rule == MATRIX_GALORE ? ceil_div(rank * side, BASIS_PADDED) * BASIS_PADDED
                                                : (rule == MATRIX_FIRA ? rank * side : 0) + 1;
    return {rank, rows >= cols ? rows : rank, rows >= cols ? rank : cols, basis};
}

template <class Format>
struct Gradients {
    const typename Format::Code* grads;
    const float* scale;
    float* to;

    OPTIM_INLINE void at(int64_t i) const { to[i] = exact_mul(Format::decode(grads[i]), *scale); }
};

// Copies the gradients of a chunk, times their factor, to work->scratch.
static void low_gradients(const LowStep* its, const MatrixChunk* chunk) {
    const int64_t count = chunk->end - chunk->begin;
    float* to = its->work->scratch;
    if (its->is_bf16) {
        const uint16_t* grads = (const uint16_t*)its->grads + chunk->begin;
        for_each(its->dev, Gradients<Bf16>{grads, its->grad_scale, to}, count);
    } else {
        for_each(its->dev, Gradients<Fp32>{(const float*)its->grads + chunk->begin, its->grad_scale, to}, count);
    }
}

// The basis.

// Returns a nearly normal number of mean 0 and variance 1 for an element of the arena and a refresh of the basis.
OPTIM_INLINE float basis_normal(uint64_t seed, uint64_t element, uint32_t refresh) {
    const Noise counter = {{(uint32_t)element, (uint32_t)(element >> 32), NOISE_BASIS, refresh}};
    const Noise noise = philox4x32(counter, (uint32_t)seed, (uint32_t)(seed >> 32), NOISE_ROUNDS);
    int sum = 0;
    for (int i = 0; i < 4; i++) sum += (int)(noise.word[i] & 0xffffu) + (int)(noise.word[i] >> 16);
    // It is a sum of eight numbers of mean 65535 / 2 and, within 2^-32, variance 65536^2 / 12.
    return exact_mul((float)(sum - 4 * 65535), 1.8688408e-5f);  // sqrt(12 / 8) / 65536
}

struct RandomBasis {
    float* to;
    uint64_t seed, element;
    uint32_t refresh;
    float scale;

    OPTIM_INLINE void at(int64_t i) const { to[i] = exact_mul(basis_normal(seed, element + i, refresh), scale); }
};

// Copies the last basis to `to` (rank, side). Rows that are zero, as all are at first, become random.
struct StartBasis {
    float* to;
    const float* from;
    uint64_t seed, element;
    uint32_t refresh;
    int64_t side;

    OPTIM_INLINE void at(int64_t row) const {
        bool any = false;
        for (int64_t i = 0; i < side && !any; i++) any = from[row * side + i] != 0.0f;
        for (int64_t i = 0; i < side; i++) {
            to[row * side + i] = any ? from[row * side + i] : basis_normal(seed, element + row * side + i, refresh);
        }
    }
};

// Stores a new basis, unless the step changes nothing.
struct KeepBasis {
    float* to;
    const float *from, *unit;

    OPTIM_INLINE void at(int64_t i) const {
        if (is_finite(*unit)) to[i] = from[i];
    }
};

// Makes the rows of y (rank, side) orthonormal, in order, by classical Gram-Schmidt, twice for each row. If less than a
// hundred-thousandth of a row is left, the row is a combination of earlier ones, and a random row takes its place. c
// has room for `rank` numbers.
struct Orthonormal {
    float *y, *c;
    int64_t rank, side;
    uint64_t seed, element;
    uint32_t refresh;
};

static float dot_cpu(const float* a, const float* b, int64_t n) {
    float sum[32] = {};
    for (int64_t i = 0; i < n; i += 32) {
        for (int l = 0; l < 32 && i + l < n; l++) sum[l] = exact_fma(a[i + l], b[i + l], sum[l]);
    }
    return sum_by_halves(sum);
}

static void orthonormal_cpu(const Orthonormal& o) {
    for (int64_t j = 0; j < o.rank; j++) {
        float* row = o.y + j * o.side;
        for (uint32_t attempt = 1;; attempt++) {
            const float before = dot_cpu(row, row, o.side);
            for (int pass = 0; pass < 2; pass++) {
                for (int64_t i = 0; i < j; i++) o.c[i] = dot_cpu(o.y + i * o.side, row, o.side);
                for (int64_t k = 0; k < o.side; k++) {
                    for (int64_t i = 0; i < j; i++) row[k] = exact_fma(-o.c[i], o.y[i * o.side + k], row[k]);
                }
            }
            const float after = dot_cpu(row, row, o.side);
            if (after > exact_mul(1e-10f, before) || attempt == 4) {
                const float inverse = 1.0f / sqrtf(after);
                for (int64_t k = 0; k < o.side; k++) row[k] = exact_mul(row[k], after > 0.0f ? inverse : 0.0f);
                break;
            }
            for (int64_t k = 0; k < o.side; k++) {
                row[k] = basis_normal(o.seed, o.element + j * o.side + k, o.refresh ^ attempt << 28);
            }
        }
    }
}

#ifdef __CUDACC__
// Does the same as dot_cpu with a warp; all lanes get the sum.
__device__ inline float dot_warp(const float* a, const float* b, int64_t n) {
    float sum = 0.0f;
    for (int64_t i = threadIdx.x % 32; i < n; i += 32) sum = exact_fma(a[i], b[i], sum);
    for (int half = 16; half > 0; half /= 2) sum = exact_add(sum, __shfl_down_sync(0xffffffffu, sum, half));
    return __shfl_sync(0xffffffffu, sum, 0);
}

// grid 1, block 1024; deterministic, with the bits of orthonormal_cpu.
__global__ void __launch_bounds__(1024) orthonormal_kernel(Orthonormal o) {
    const int warp = threadIdx.x / 32;
    for (int64_t j = 0; j < o.rank; j++) {
        float* row = o.y + j * o.side;
        for (uint32_t attempt = 1;; attempt++) {
            const float before = dot_warp(row, row, o.side);
            for (int pass = 0; pass < 2; pass++) {
                for (int64_t i = warp; i < j; i += 32) {
                    const float dot = dot_warp(o.y + i * o.side, row, o.side);
                    if (threadIdx.x % 32 == 0) o.c[i] = dot;
                }
                __syncthreads();
                for (int64_t k = threadIdx.x; k < o.side; k += 1024) {
                    float x = row[k];
                    for (int64_t i = 0; i < j; i++) x = exact_fma(-o.c[i], o.y[i * o.side + k], x);
                    row[k] = x;
                }
                __syncthreads();
            }
            const float after = dot_warp(row, row, o.side);
            __syncthreads();
            const bool good = after > exact_mul(1e-10f, before) || attempt == 4;
            const float inverse = after > 0.0f ? __frcp_rn(exact_sqrt(after)) : 0.0f;
            for (int64_t k = threadIdx.x; k < o.side; k += 1024) {
                row[k] = good ? exact_mul(row[k], inverse)
                              : basis_normal(o.seed, o.element + j * o.side + k, o.refresh ^ attempt << 28);
            }
            __syncthreads();
            if (good) break;
        }
    }
}
#endif

static void orthonormal(const Device* dev, const Orthonormal& o) {
#ifdef __CUDACC__
    if (dev->gpu) {
        orthonormal_kernel<<<1, 1024, 0, dev->stream>>>(o);
        check_launch();
        return;
    }
#endif
    orthonormal_cpu(o);
}

// One matrix of a chunk, and where its buffers are.
struct LowMatrix {
    const Matrix* shape;
    MatrixRule rule;
    bool right;            // R >= C: Q multiplies from the right
    int64_t side, length;  // the shorter and the longer side
    int64_t rank;
    float *g, *low, *direction;
    float* last;       // the norm that the limit keeps, or null
    float *q, *y, *z;  // room for (rank, side), (rank, side) and the moments' shape
    float* sums;       // room for 4 length + 4 numbers
};

static LowMatrix low_matrix(const LowStep* its, const Matrix* m) {
    const LowShape shape = low_shape(its->config, m->rows, m->cols);
    const MatrixWork* work = its->work;
    LowMatrix l = {};
    l.shape = m;
    l.rule = rule_of(its->config)->matrix;
    l.right = m->rows >= m->cols;
    l.side = l.right ? m->cols : m->rows, l.length = l.right ? m->rows : m->cols;
    l.rank = shape.rank;
    l.g = work->scratch + m->at;
    l.low = work->low + m->low, l.direction = work->direction + m->low;
    float* basis = (float*)its->basis->codes + m->basis;
    l.last = l.rule == MATRIX_GALORE ? nullptr : basis + shape.basis - 1;
    l.q = (float*)work->work, l.y = l.q + l.rank * l.side, l.z = l.y + l.rank * l.side;
    l.sums = work->sums;
    if (stores_basis(l.rule)) l.q = basis;
    return l;
}

// Calls function(matrix, number in the plan) for each matrix of a chunk.
template <class Function>
static void each_matrix(const LowStep* its, int chunk, Function function) {
    const MatrixPlan* plan = &its->work->plan;
    const int first = plan->chunk[chunk].matrix;
    for (int i = first; i < first + plan->chunk[chunk].matrices; i++) {
        const LowMatrix l = low_matrix(its, &plan->matrix[i]);
        function(&l, i);
    }
}

// Sets low = G Q^T, or Q G for R < C.
static void project(const Device* dev, const LowMatrix* l, const float* q, float* low) {
    const int64_t R = l->shape->rows, C = l->shape->cols;
    const MatmulProduct right = {R, l->rank, C, false, true, 1.0f, 0.0f, 1, 0, 0, 0};
    const MatmulProduct left = {l->rank, C, R, false, false, 1.0f, 0.0f, 1, 0, 0, 0};
    matmul_product<float, float>(dev, l->right ? &right : &left, low, l->right ? l->g : q, l->right ? q : l->g,
                                 nullptr);
}

// Sets g = scale low Q + beta g, in the full shape.
static void project_back(const Device* dev, const LowMatrix* l, const float* low, float scale, float beta) {
    const int64_t R = l->shape->rows, C = l->shape->cols;
    const MatmulProduct product = {R, C, l->rank, !l->right, false, scale, beta, 1, 0, 0, 0};
    matmul_product<float, float>(dev, &product, l->g, l->right ? low : l->q, l->right ? l->q : low, l->g);
}

// Computes new directions from g, and stores them. `refresh` is the number of the refresh, for the random numbers.
static void basis_refresh(const LowStep* its, const LowMatrix* l, uint32_t refresh) {
    const Device* dev = its->dev;
    const uint64_t seed = its->config->seed;
    const int64_t R = l->shape->rows, C = l->shape->cols;
    const uint64_t element = (uint64_t)l->shape->element;
    const Orthonormal o = {l->y, l->sums, l->rank, l->side, seed, element, refresh};
    for_each(dev, StartBasis{l->y, l->q, seed, element, refresh, l->side}, l->rank);
    for (int i = 0; i < POWER_ITERATIONS; i++) {
        project(dev, l, l->y, l->z);
        const MatmulProduct right = {l->rank, C, R, true, false, 1.0f, 0.0f, 1, 0, 0, 0};
        const MatmulProduct left = {l->rank, R, C, false, true, 1.0f, 0.0f, 1, 0, 0, 0};
        matmul_product<float, float>(dev, l->right ? &right : &left, l->y, l->z, l->g, nullptr);
        orthonormal(dev, o);
    }
    for_each(dev, KeepBasis{l->q, l->y, its->work->unit}, l->rank * l->side);
}

// The fused way.

#ifdef __CUDACC__
struct RoundToBf16 {
    const float* from;
    uint16_t* to;

    OPTIM_INLINE void at(int64_t i) const { to[i] = Bf16::encode(from[i]); }
};

// Writes `count` numbers as bf16 to the memory at `to`, and returns it.
static const bf16* in_bf16(const Device* dev, const float* from, float* to, int64_t count) {
    for_each(dev, RoundToBf16{from, (uint16_t*)to}, count);
    return (const bf16*)to;
}

// Sets low = G Q^T or Q G in bf16, with the library: its products, which share K among thread blocks, are faster than
// ours here.
static void project_bf16(const Device* dev, const LowMatrix* l, const bf16* g, const bf16* q) {
    // cuBLASLt reads all matrices transposed: low^T = op(b)^T op(a)^T.
    const Matrix* m = l->shape;
    MatmulShape shape;
    memset(&shape, 0, sizeof(shape));
    shape.m = l->right ? l->rank : m->cols, shape.n = l->right ? m->rows : l->rank, shape.k = l->side;
    shape.op_a = l->right ? CUBLAS_OP_T : CUBLAS_OP_N, shape.op_b = CUBLAS_OP_N;
    shape.input = CUDA_R_16BF, shape.output = CUDA_R_32F, shape.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    const MatmulPointers pointers = {l->right ? q : g, l->right ? g : q, l->low, nullptr, nullptr};
    shape.alignment = matmul_alignment(&pointers);
    const MatmulPlan* plan = matmul_plan(dev, &shape, &pointers, false);
    if (!plan->found) {
        user_error("cuBLASLt has no algorithm for a projection of %d x %d to rank %lld; take --grads fp32", m->rows,
                   m->cols, (long long)l->rank);
    }
    matmul_run(dev, plan, &pointers, &plan->algorithm, false);
}

static void project_fused(const LowStep* its, const LowMatrix* l) {
    const Device* dev = its->dev;
    const Matrix* m = l->shape;
    const LowStore sink = {l->low, l->right ? l->rank : l->length};
    const float* g = (const float*)its->grads + m->element;
    if (its->is_bf16) {
        const bf16* q = in_bf16(dev, l->q, l->y, l->rank * l->side);
        project_bf16(dev, l, (const bf16*)its->grads + m->element, q);
    } else if (low_project_fits(dev)) {
        low_split(dev, l->y, l->z, l->q, l->rank, l->side, false);
        const LowProjectPlan plan = low_project_plan<float>(dev, g, l->y, l->z, m->rows, m->cols, l->rank);
        low_project_run<3>(dev, &plan, sink);
    } else {
        low_project<float, 3>(dev, g, l->q, m->rows, m->cols, l->rank, sink);
    }
}

enum LowWeights { LOW_FP32, LOW_BF16, LOW_BF16_SR, LOW_OTHER };

// Applies elements of U to the weights, with the bits of MatrixApply (rules/muon.cuh) and of the weights' storage.
template <LowWeights KIND>
struct ApplySink {
    typedef std::conditional_t<KIND == LOW_FP32, float, uint16_t> Code;
    Code* weights;   // from the arena's first element on
    uint16_t* copy;  // the copy that the matmuls read, or null
    Hyper hyper;
    uint64_t seed;
    uint32_t step;
    float scale;
    const float* unit;
    int64_t element, rows, cols;  // element: the matrix's first one in the arena

    // Prefetches the tile's weights into the L2 cache while the product is computed.
    __device__ void begin(int row, int column, int down, int across) const {
        const int lines = across * (int)sizeof(Code) / 128;
        for (int i = threadIdx.x; i < down * lines; i += blockDim.x) {
            const int64_t r = row + i / lines, c = column + i % lines * (128 / (int)sizeof(Code));
            if (r < rows && c < cols) asm volatile("prefetch.global.L2 [%0];" ::"l"(weights + element + r * cols + c));
        }
    }

    struct Old {
        std::conditional_t<KIND == LOW_FP32, uint4, uint2> codes;
    };
    __device__ Old load(int row, int column) const {
        return {*(const decltype(Old::codes)*)(weights + element + row * cols + column)};
    }

    __device__ void take(int row, int column, float4 x, const Old& old) const {
        if (!is_finite(*unit)) return;
        const int64_t at = element + row * cols + column;
        const float u[4] = {x.x, x.y, x.z, x.w};
        alignas(16) Code code[4];
        float p[4];
        *(decltype(Old::codes)*)code = old.codes;
        Noise noise = {};
        if (KIND == LOW_BF16_SR) {
            noise = noise_draw({seed, step, NOISE_WEIGHTS, at & ~(int64_t)(NOISE_ELEMENTS - 1)}, 0);
            const int word = (int)(at % NOISE_ELEMENTS) / 4;
            noise.word[0] = word == 0   ? noise.word[0]
                            : word == 1 ? noise.word[1]
                            : word == 2 ? noise.word[2]
                                        : noise.word[3];
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (KIND == LOW_FP32) p[i] = code[i];
            if constexpr (KIND != LOW_FP32) p[i] = Bf16::decode(code[i]);
            MatrixApply::update(hyper, exact_mul(scale, u[i]), &p[i], nullptr, nullptr, nullptr);
            if constexpr (KIND == LOW_FP32) code[i] = p[i];
            if constexpr (KIND == LOW_BF16) code[i] = Bf16::encode(p[i]);
            if constexpr (KIND == LOW_BF16_SR) code[i] = Bf16::encode(p[i], noise_lane(noise, i));
        }
        *(decltype(Old::codes)*)(weights + at) = *(const decltype(Old::codes)*)code;
        if (copy) *(uint2*)(copy + at) = make_uint2(pack_bf16(p[0], p[1]), pack_bf16(p[2], p[3]));
    }

    // The functions below serve low_rank_back.cuh, which passes weights of bf16 as two pairs, the second one eight
    // columns after the first. If the matrix's rows begin at multiples of 16 elements, each of the four lanes of a row
    // draws the noise of 16 of its 64 columns.

    struct Line {
        Noise noise;
    };
    __device__ bool draws_by_line() const {
        return element % NOISE_ELEMENTS == 0 && cols % NOISE_ELEMENTS == 0;
    }
    __device__ Noise draw(int64_t at) const {
        return noise_draw({seed, step, NOISE_WEIGHTS, at & ~(int64_t)(NOISE_ELEMENTS - 1)}, 0);
    }
    __device__ __forceinline__ Line line(int row, int column) const {
        if (KIND != LOW_BF16_SR || !draws_by_line()) return {};
        return {draw(element + row * cols + column + threadIdx.x % 4 * NOISE_ELEMENTS)};
    }
    // Returns the words of noise of the two pairs in word[0] and [1], and their shared bytes in word[2] and [3].
    __device__ __forceinline__ Noise noise_of(const Line& line, int group, int64_t at) const {
        const int lane = (int)(at % NOISE_ELEMENTS);
        Noise noise = line.noise, more;
        if (draws_by_line()) {
            for (uint32_t& word : noise.word) word = __shfl_sync(0xffffffffu, word, group, 4);
            noise.shared = __shfl_sync(0xffffffffu, noise.shared, group, 4);
            more = noise;
        } else {
            // The element eight further is in the other half of the same 16, or in the first half of the next 16.
            noise = draw(at), more = draw(at + 8);
        }
        const bool second = lane % 8 >= 4, upper = lane >= 8;
        const uint32_t low = second ? noise.word[1] : noise.word[0], high = second ? noise.word[3] : noise.word[2];
        const uint32_t more_low = second ? more.word[1] : more.word[0],
                       more_high = second ? more.word[3] : more.word[2];
        return {{upper ? high : low, upper ? more_low : more_high, noise.shared, more.shared}, 0};
    }
    __device__ __forceinline__ void pairs(const Line& line, int group, int row, int column, uint32_t (&w)[2],
                                          const float (&u)[4]) const {
        if (!is_finite(*unit)) return;
        const int64_t at = element + row * cols + column;
        Noise noise = {};
        if (KIND == LOW_BF16_SR) noise = noise_of(line, group, at);
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            Noise mine = {};
            mine.word[0] = noise.word[pair], mine.shared = noise.word[pair + 2];
            uint32_t code[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float p = Bf16::decode((uint16_t)(w[pair] >> i * 16));
                MatrixApply::update(hyper, exact_mul(scale, u[pair * 2 + i]), &p, nullptr, nullptr, nullptr);
                const uint32_t bits = at % 4 ? noise_lane(mine, 2 + i) : noise_lane(mine, i);
                code[i] = KIND == LOW_BF16_SR ? Bf16::encode(p, bits) : Bf16::encode(p);
            }
            w[pair] = code[0] | code[1] << 16;
        }
    }
};

static LowWeights low_weights(const OptimConfig* config) {
    const char* const names[] = {"fp32", "bf16", "bf16:sr"};
    int kind = 0;
    while (kind < LOW_OTHER && strcmp(config->weights, names[kind]) != 0) kind++;
    return (LowWeights)kind;
}

template <LowWeights KIND>
static void apply_fused(const LowStep* its, const LowMatrix* l, const StepArguments* apply, const LowPlace* place,
                        float scale) {
    const Device* dev = its->dev;
    const Matrix* m = l->shape;
    typedef typename ApplySink<KIND>::Code Code;
    Code* weights = (Code*)apply->weights.codes;
    uint16_t* copy = (uint16_t*)apply->copy.codes;
    // A matrix of the caller's own gets the address of an arena in which it would lie.
    if (place && copy) copy = (uint16_t*)place->weights - m->element;
    if (place && !apply->copy.codes) weights = (Code*)place->weights - m->element;
    const Hyper& hyper = apply->group[place ? place->group : m->group];
    const ApplySink<KIND> sink = {weights,         copy,       hyper,   apply->seed.seed, apply->step, scale,
                                  its->work->unit, m->element, m->rows, m->cols};
    if (its->is_bf16) {
        const bf16* q = in_bf16(dev, l->q, l->y, l->rank * l->side);
        const bf16* n = in_bf16(dev, l->direction, l->z, l->rank * l->length);
        if constexpr (KIND != LOW_FP32) {
            if (!copy && low_back_fits(dev, l->rank)) {
                const LowBackPlan plan = low_back_plan((bf16*)weights + m->element, n, q, m->rows, m->cols, l->rank);
                low_back_run(dev, &plan, sink, false);
                return;
            }
        }
        low_back<bf16, 1>(dev, n, q, m->rows, m->cols, l->rank, sink);
    } else {
        low_back<float, 3>(dev, l->direction, l->q, m->rows, m->cols, l->rank, sink);
    }
}
#endif

bool low_rank_fuses(const Device* dev, const OptimConfig* config, const MatrixWork* work) {
#ifdef __CUDACC__
    // Only this function chooses the way (dev/galore.cu has the times). The choice is the same for all matrices of the
    // launch, whichever rank owns them, so that the bits do not depend on the sharding.
    return dev->gpu && dev->compute >= 80 && rule_of(config)->matrix == MATRIX_GALORE &&
           low_weights(config) != LOW_OTHER && work->plan.by_eights;
#else
    return false;
#endif
}

// Returns true if this step computes a new Q, for which the gradients must lie in the scratch.
static bool refreshes(const OptimConfig* config, int64_t step) {
    return stores_basis(rule_of(config)->matrix) && (step - 1) % config->rank_gap == 0;
}

static float rank_scale(const OptimConfig* config) {
    const MatrixRule rule = rule_of(config)->matrix;
    const float usual = stores_basis(rule) ? 0.25f : rule == MATRIX_APOLLO_MINI ? 128.0f : 1.0f;
    return config->rank_scale > 0.0f ? config->rank_scale : usual;
}

void low_rank_apply(const LowStep* its, int chunk, const StepArguments* apply, const LowPlace* places) {
#ifdef __CUDACC__
    const LowWeights weights = low_weights(its->config);
    const auto run = weights == LOW_FP32   ? apply_fused<LOW_FP32>
                     : weights == LOW_BF16 ? apply_fused<LOW_BF16>
                                           : apply_fused<LOW_BF16_SR>;
    each_matrix(its, chunk, [&](const LowMatrix* l, int number) {
        run(its, l, apply, places ? &places[number] : nullptr, rank_scale(its->config));
    });
#endif
}

void low_rank_project(const LowStep* its, int chunk) {
    const OptimConfig* config = its->config;
    const bool due = refreshes(config, its->step);
    const uint32_t refresh = (uint32_t)((its->step - 1) / config->rank_gap);
    if (!its->fused || due) low_gradients(its, &its->work->plan.chunk[chunk]);
    each_matrix(its, chunk, [&](const LowMatrix* l, int) {
        if (!stores_basis(l->rule)) {
            const float scale = (float)(1.0 / sqrt((double)l->rank));
            const RandomBasis random = {l->q, config->seed, (uint64_t)l->shape->element, refresh, scale};
            for_each(its->dev, random, l->rank * l->side);
        } else if (due) {
            basis_refresh(its, l, refresh);
        }
#ifdef __CUDACC__
        if (its->fused) return project_fused(its, l);
#endif
        project(its->dev, l, l->q, l->low);
    });
}

// The update.

// Sums the squares of each channel, a row or a column, of a matrix.
struct ChannelSquares {
    const float* x;
    int64_t count, next, step;  // elements of a channel, and from one channel or element to the next
    float* to;

    OPTIM_INLINE float lane(int64_t i, int lane) const {
        float sum = 0.0f;
        for (int64_t k = lane; k < count; k += 32) {
            const float value = x[i * next + k * step];
            sum = exact_fma(value, value, sum);
        }
        return sum;
    }
    OPTIM_INLINE void end(int64_t i, float sum) const { to[i] = sum; }
};

// Returns phi of a channel, from the sums of squares of N and low.
OPTIM_INLINE float channel_factor(float direction, float low) {
    return exact_div(exact_sqrt(direction), exact_add(exact_sqrt(low), NORM_EPS));
}

// Computes phi of each channel, and the channel's part of the squared norm that is limited. `direction` and `low` have
// the sums of squares of N and low, `next` apart; next 0: one phi serves all channels.
struct Factors {
    float *factor, *squares;              // (length)
    const float *direction, *low, *full;  // full: (length) sums of squares of G
    int64_t next;
    bool residual;

    OPTIM_INLINE void at(int64_t i) const {
        const float of_low = low[i * next], phi = channel_factor(direction[i * next], of_low);
        const float rest = residual ? exact_max(exact_add(full[i], -of_low), 0.0f) : full[i];
        factor[i] = phi;
        squares[i] = exact_mul(exact_mul(phi, phi), rest);
    }
};

// Sums `count` numbers.
struct SumOf {
    const float* x;
    int64_t count;
    float* to;

    OPTIM_INLINE float lane(int64_t, int lane) const {
        float sum = 0.0f;
        for (int64_t k = lane; k < count; k += 32) sum = exact_add(sum, x[k]);
        return sum;
    }
    OPTIM_INLINE void end(int64_t, float sum) const { *to = sum; }
};

// Computes 1 / limit from a sum of squares, and the norm that is kept. It has one index.
struct Limit {
    const float *sum, *unit;
    float *last, *inverse;

    OPTIM_INLINE void at(int64_t) const {
        const float now = exact_sqrt(*sum), most = exact_mul(LIMIT, exact_add(*last, NORM_EPS));
        const bool limited = *last > 0.0f && now > most;
        *inverse = limited ? exact_div(most, now) : 1.0f;
        if (is_finite(*unit)) *last = limited ? most : now;
    }
};

// Sets x = scale x phi / limit; phi belongs to rows of `cols` elements or to columns.
struct ScaleChannels {
    float* x;
    const float *factor, *inverse;
    int64_t cols;
    bool by_rows;
    float scale;

    OPTIM_INLINE void at(int64_t i) const {
        const float phi = exact_mul(factor[by_rows ? i / cols : i % cols], *inverse);
        x[i] = exact_mul(x[i], exact_mul(scale, phi));
    }
};

// Sets N = scale N - phi / limit low, in the moments' shape.
struct ResidualDirection {
    float* direction;
    const float *low, *factor, *inverse;
    int64_t cols;
    bool by_rows;
    float scale;

    OPTIM_INLINE void at(int64_t i) const {
        const float phi = exact_mul(factor[by_rows ? i / cols : i % cols], *inverse);
        direction[i] = exact_fma(scale, direction[i], -exact_mul(phi, low[i]));
    }
};

static void channel_squares(const Device* dev, const LowMatrix* l, const float* x, int64_t count, float* to) {
    const ChannelSquares rows = {x, count, count, 1, to}, columns = {x, count, 1, l->length, to};
    for_lanes(dev, l->right ? rows : columns, l->length);
}

// Computes phi and 1 / limit. 1 / limit is sums[0], and phi begins at sums[4].
static void scale_factors(const Device* dev, const MatrixWork* work, const LowMatrix* l) {
    const int64_t n = l->length;
    float *inverse = l->sums, *total = inverse + 1, *factor = inverse + 4, *full = factor + n, *of_low = full + n,
          *squares = of_low + n;
    channel_squares(dev, l, l->g, l->side, full);
    channel_squares(dev, l, l->direction, l->rank, factor);
    channel_squares(dev, l, l->low, l->rank, of_low);
    if (l->rule == MATRIX_APOLLO_MINI) {
        for_lanes(dev, SumOf{factor, n, inverse + 2}, 1);
        for_lanes(dev, SumOf{of_low, n, inverse + 3}, 1);
        for_each(dev, Factors{factor, squares, inverse + 2, inverse + 3, full, 0, false}, n);
    } else {
        for_each(dev, Factors{factor, squares, factor, of_low, full, 1, l->rule == MATRIX_FIRA}, n);
    }
    for_lanes(dev, SumOf{squares, n, total}, 1);
    for_each(dev, Limit{total, work->unit, l->last, inverse}, 1);
}

void low_rank_update(const LowStep* its, int chunk) {
    const Device* dev = its->dev;
    const float scale = rank_scale(its->config), root = sqrtf(scale);
    each_matrix(its, chunk, [&](const LowMatrix* l, int) {
        if (l->rule == MATRIX_GALORE) return project_back(dev, l, l->direction, scale, 0.0f);
        scale_factors(dev, its->work, l);
        const bool fira = l->rule == MATRIX_FIRA;
        const int64_t cols = l->shape->cols, low_cols = l->right ? l->rank : l->length;
        const float *inverse = l->sums, *factor = inverse + 4;
        for_each(dev, ScaleChannels{l->g, factor, inverse, cols, l->right, fira ? 1.0f : root}, l->shape->rows * cols);
        if (!fira) return;
        const ResidualDirection residual = {l->direction, l->low, factor, inverse, low_cols, l->right, scale};
        for_each(dev, residual, l->rank * l->length);
        project_back(dev, l, l->direction, 1.0f, 1.0f);
    });
}
