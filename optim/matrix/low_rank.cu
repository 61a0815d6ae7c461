// See low_rank.h. Each loop over elements is a struct with a function of one index, or of one index and a lane
// (each.cuh).
#include "low_rank.h"

#include "../../kernels/matmul_product.cuh"
#include "../each.cuh"
#include "../formats/bf16.cuh"
#include "../formats/fp32.cuh"
#include "../rules/muon.cuh"

constexpr uint32_t NOISE_BASIS = 8;  // a stream of noise besides those of noise.cuh
constexpr int POWER_ITERATIONS = 2, BASIS_PADDED = 256;
constexpr float NORM_EPS = 1e-8f;

// The rules differ in these; low_rank.h has the formulas.
struct LowRule {
    bool stores;    // Q has directions of the gradient, which are stored; otherwise it is drawn in each step
    bool limits;    // the gradient is scaled, and the norm of this term limited
    bool residual;  // that term is the rest of the gradient, to which N is added
    bool one_phi;   // one phi serves all channels, and the rank is 1
    bool factored;  // v has averages of rows and columns
    float scale;    // --rank-scale by default; 0: the shorter side over the rank
    int gap;        // --rank-gap by default
};

static const LowRule& low_rule(const OptimConfig* config) {
    static constexpr LowRule rules[] = {{true, false, false, false, false, 0.25f, 200},
                                        {true, true, true, false, false, 0.25f, 200},
                                        {false, true, false, false, false, 0.0f, 10},
                                        {false, true, false, true, false, 128.0f, 10},
                                        {false, true, false, false, true, 0.0f, 10}};
    static_assert(MATRIX_APOLLO_FACTORED - MATRIX_GALORE + 1 == sizeof(rules) / sizeof(rules[0]), "one for each");
    return rules[rule_of(config)->matrix - MATRIX_GALORE];
}

LowShape low_shape(const OptimConfig* config, int64_t rows, int64_t cols) {
    const LowRule& rule = low_rule(config);
    const int64_t side = rows < cols ? rows : cols, length = rows + cols - side;
    int64_t rank = rule.one_phi ? 1 : config->rank > 0 ? config->rank : (side + 3) / 4;
    if (rank > side) rank = side;
    const int64_t kept = (rule.stores ? rank * side : 0) + (rule.factored ? length + rank : 0);
    // galore's is padded, as checkpoints have it.
    const int64_t basis = rule.limits ? kept + 1 : ceil_div(kept, BASIS_PADDED) * BASIS_PADDED;
    return {rank, rows >= cols ? rows : rank, rows >= cols ? rank : cols, basis};
}

static int64_t low_gap(const OptimConfig* config) {
    return config->rank_gap > 0 ? config->rank_gap : low_rule(config).gap;
}

bool low_rank_limits(const OptimConfig* config) {
    return is_low_rank(rule_of(config)) && low_rule(config).limits;
}

bool low_rank_resets(const OptimConfig* config, int64_t step) {
    return config->rank_reset && (step - 1) % low_gap(config) == 0;
}

void plan_low(Plan* plan, int index, int64_t first, const OptimTensor* tensors, int count) {
    LaunchPlan* launch = &plan->launch[index];
    const int64_t begin = launch->run.begin;
    int64_t offset[2] = {begin, begin};
    for (int t = 0; t < count; t++) {
        if (plan->tensor[t].launch != index) continue;
        OptimTensor* kept = plan->tensor[t].kept;
        const int64_t parts = tensors[t].parts;
        const LowShape shape = low_shape(&launch->config, tensors[t].rows / parts, tensors[t].cols);
        for (int slot = SLOT_M; slot <= SLOT_SLOW; slot++) {
            kept[slot].rows = parts * shape.rows, kept[slot].cols = shape.cols, kept[slot].offset = offset[0];
        }
        kept[SLOT_BASIS].rows = parts, kept[SLOT_BASIS].cols = shape.basis, kept[SLOT_BASIS].offset = offset[1];
        plan->tensor[t].noise = first;
        first += tensor_padded(&kept[SLOT_M]);
        if (is_elsewhere(plan, t)) continue;
        offset[0] += tensor_padded(&kept[SLOT_M]), offset[1] += tensor_padded(&kept[SLOT_BASIS]);
    }
    for (int slot = SLOT_M; slot <= SLOT_BASIS; slot++) {
        launch->kept[slot].begin = begin, launch->kept[slot].end = offset[slot == SLOT_BASIS];
    }
    for (const FormatRow* format : {launch->rows.m, launch->rows.v}) {
        if (format_span(format) == SPAN_RUN) continue;
        user_error(
            "%s keeps moments of another shape, and %s has scales of whole tensors; take a format in blocks, say "
            "dyn8 or lin4",
            launch->rows.rule->name, format->name);
    }
}

template <class Format>
struct Gradients {
    const Tile* tiles;
    const float* scale;
    float* to;

    OPTIM_INLINE void at(int64_t i) const {
        const auto* grads = (const typename Format::Code*)tiles[i / TILE_ELEMENTS].grads;
        to[i] = exact_mul(Format::decode(grads[i % TILE_ELEMENTS]), *scale);
    }
};

// Copies the gradients of a chunk, times their factor, to MatrixWork.scratch.
static void low_gradients(const LowStep* low, const MatrixChunk* chunk) {
    const int64_t count = chunk->tiles * TILE_ELEMENTS;
    const Tile* tiles = low->step->tiles + chunk->tile;
    float* to = low->launch->matrix.scratch;
    if (low->launch->rows.grads->stream[0].bits == 16)
        return for_each(low->optim->dev, Gradients<Bf16>{tiles, low->step->grad_scale, to}, count);
    for_each(low->optim->dev, Gradients<Fp32>{tiles, low->step->grad_scale, to}, count);
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

// Returns true if one of n numbers is not zero.
OPTIM_INLINE bool any_of(const float* x, int64_t n) {
    bool any = false;
    for (int64_t i = 0; i < n && !any; i++) any = x[i] != 0.0f;
    return any;
}

// Copies the last basis to `to` (rank, side). Rows that are zero, as all are at first, become random.
struct StartBasis {
    float* to;
    const float* from;
    uint64_t seed, element;
    uint32_t refresh;
    int64_t side;

    OPTIM_INLINE void at(int64_t row) const {
        const bool any = any_of(from + row * side, side);
        for (int64_t i = 0; i < side; i++) {
            to[row * side + i] = any ? from[row * side + i] : basis_normal(seed, element + row * side + i, refresh);
        }
    }
};

// Stores a row of a new basis, unless the step changes nothing or the row is zero, as all rows of a zero gradient are.
struct KeepBasis {
    float* to;
    const float *from, *unit;
    int64_t side;

    OPTIM_INLINE void at(int64_t row) const {
        const bool keeps = any_of(from + row * side, side) && is_finite(*unit);
        for (int64_t i = row * side; i < (row + 1) * side && keeps; i++) to[i] = from[i];
    }
};

// Makes the rows of y (rank, side) orthonormal, in order, by classical Gram-Schmidt, twice for each row. If less than a
// hundred-thousandth of a row is left, the row is a combination of earlier ones, and a random row takes its place. If
// all rows are zero, they stay so. c has room for `rank` numbers.
struct Orthonormal {
    float *y, *c;
    int64_t rank, side;
    uint64_t seed, element;
    uint32_t refresh;
};

// Makes the threads of a thread block wait for each other.
OPTIM_INLINE void block_sync() {
#ifdef __CUDA_ARCH__
    __syncthreads();
#endif
}

// Returns the sum of a[i] b[i], to all lanes of a GPU's warp.
OPTIM_INLINE float dot(const float* a, const float* b, int64_t n) {
#ifdef __CUDA_ARCH__
    float sum = 0.0f;
    for (int64_t i = threadIdx.x % 32; i < n; i += 32) sum = exact_fma(a[i], b[i], sum);
    for (int half = 16; half > 0; half /= 2) sum = exact_add(sum, __shfl_down_sync(0xffffffffu, sum, half));
    return __shfl_sync(0xffffffffu, sum, 0);
#else
    float sum[32] = {};
    for (int64_t i = 0; i < n; i += 32) {
        for (int l = 0; l < 32 && i + l < n; l++) sum[l] = exact_fma(a[i + l], b[i + l], sum[l]);
    }
    return sum_by_halves(sum);
#endif
}

// Runs on all threads of a thread block or, on the CPU, on one.
OPTIM_INLINE void orthonormal_rows(const Orthonormal& o) {
    const int64_t thread = OPTIM_EITHER(threadIdx.x, 0), threads = OPTIM_EITHER(blockDim.x, 1);
    const int64_t warp = thread / 32, warps = OPTIM_EITHER(threads / 32, 1);
    bool any = false;
    for (int64_t i = thread; i < o.rank * o.side; i += threads) any = any || o.y[i] != 0.0f;
    if (!OPTIM_EITHER(__syncthreads_or(any), any)) return;
    for (int64_t j = 0; j < o.rank; j++) {
        float* row = o.y + j * o.side;
        bool good = false;
        for (uint32_t attempt = 1; !good; attempt++) {
            const float before = dot(row, row, o.side);
            for (int pass = 0; pass < 2; pass++) {
                for (int64_t i = warp; i < j; i += warps) {
                    const float part = dot(o.y + i * o.side, row, o.side);
                    if (thread % 32 == 0) o.c[i] = part;
                }
                block_sync();
                for (int64_t k = thread; k < o.side; k += threads) {
                    float x = row[k];
                    for (int64_t i = 0; i < j; i++) x = exact_fma(-o.c[i], o.y[i * o.side + k], x);
                    row[k] = x;
                }
                block_sync();
            }
            const float after = dot(row, row, o.side);
            block_sync();
            good = after > exact_mul(1e-10f, before) || attempt == 4;
            const float inverse = after > 0.0f ? exact_div(1.0f, exact_sqrt(after)) : 0.0f;
            for (int64_t k = thread; k < o.side; k += threads) {
                row[k] = good ? exact_mul(row[k], inverse)
                              : basis_normal(o.seed, o.element + j * o.side + k, o.refresh ^ attempt << 28);
            }
            block_sync();
        }
    }
}

#ifdef __CUDACC__
// grid 1, block 1024; deterministic.
__global__ void __launch_bounds__(1024) orthonormal_kernel(Orthonormal o) {
    orthonormal_rows(o);
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
    orthonormal_rows(o);
}

// One matrix of a chunk, and where its buffers are.
struct LowMatrix {
    const Matrix* shape;
    LowRule rule;
    bool right;            // R >= C: Q multiplies from the right
    int64_t side, length;  // the shorter and the longer side
    int64_t rank;
    float *g, *low, *direction;
    float* last;       // the norm that the limit keeps
    float* averages;   // of `low` squared, of channels (length) and of the others (rank), if v is factored
    float *q, *y, *z;  // room for (rank, side), (rank, side) and the moments' shape
    float* parts;      // on a GPU room for two operands of a product, else null
    float* sums;       // room for 4 length + 4 numbers
};

static LowMatrix low_matrix(const LowStep* low, const Matrix* m) {
    const LowShape shape = low_shape(low->step->config, m->rows, m->cols);
    const MatrixWork* work = &low->launch->matrix;
    LowMatrix l = {};
    l.shape = m;
    l.rule = low_rule(low->step->config);
    l.right = m->rows >= m->cols;
    l.side = l.right ? m->cols : m->rows, l.length = l.right ? m->rows : m->cols;
    l.rank = shape.rank;
    l.g = work->scratch + m->at;
    l.low = work->low + m->low, l.direction = work->direction + m->low;
    float* basis = (float*)low->launch->kept[SLOT_BASIS].codes + m->basis;
    l.last = basis + shape.basis - 1, l.averages = basis;
    l.q = (float*)work->work, l.y = l.q + l.rank * l.side, l.z = l.y + l.rank * l.side;
    l.parts = low->optim->dev->gpu ? l.z + l.rank * l.length : nullptr;
    l.sums = work->sums;
    if (l.rule.stores) l.q = basis;
    return l;
}

// Calls function(matrix, number in the plan) for each matrix of a chunk.
template <class Function>
static void each_matrix(const LowStep* low, int chunk, Function function) {
    const MatrixPlan* plan = &low->launch->matrix.plan;
    const int first = plan->chunk[chunk].matrix;
    for (int i = first; i < first + plan->chunk[chunk].matrices; i++) {
        const LowMatrix l = low_matrix(low, &plan->matrix[i]);
        function(&l, i);
    }
}

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

// Computes low = G Q^T, or Q G for R < C.
template <class X>
static void project(const Device* dev, const LowMatrix* l, const X* g, const X* q, float* low) {
    const int64_t R = l->shape->rows, C = l->shape->cols;
    MatmulProduct p = l->right ? product_of(R, l->rank, C, false, true) : product_of(l->rank, C, R, false, false);
    p.parts = l->parts;
    matmul_product<X, float>(dev, &p, low, l->right ? g : q, l->right ? q : g, nullptr);
}

// Computes u = scale low Q + beta c, or scale Q^T low + beta c.
template <class X>
static void project_back(const Device* dev, const LowMatrix* l, const X* low, const X* q, X* u, float scale, float beta,
                         const X* c) {
    MatmulProduct p = product_of(l->shape->rows, l->shape->cols, l->rank, !l->right, false);
    p.alpha = scale, p.beta = beta, p.parts = l->parts;
    matmul_product<X, X>(dev, &p, u, l->right ? low : q, l->right ? q : low, c);
}

// Returns Q in bf16. The products of launches in bf16 read the gradient where it is, and U is bf16.
static const bf16* basis_bf16(const LowStep* low, const LowMatrix* l) {
    return in_bf16(low->optim->dev, l->q, l->y, l->rank * l->side);
}

// Computes new directions from g, and stores them. `refresh` is the number of the refresh, for the random numbers.
static void basis_refresh(const LowStep* low, const LowMatrix* l, uint32_t refresh) {
    const Device* dev = low->optim->dev;
    const uint64_t seed = low->step->config->seed;
    const int64_t R = l->shape->rows, C = l->shape->cols;
    const uint64_t element = (uint64_t)l->shape->element;
    const Orthonormal o = {l->y, l->sums, l->rank, l->side, seed, element, refresh};
    for_each(dev, StartBasis{l->y, l->q, seed, element, refresh, l->side}, l->rank);
    for (int i = 0; i < POWER_ITERATIONS; i++) {
        project(dev, l, l->g, l->y, l->z);
        MatmulProduct p = l->right ? product_of(l->rank, C, R, true, false) : product_of(l->rank, R, C, false, true);
        p.parts = l->parts;
        matmul_product<float, float>(dev, &p, l->y, l->z, l->g, nullptr);
        orthonormal(dev, o);
    }
    for_each(dev, KeepBasis{l->q, l->y, low->launch->matrix.unit, l->side}, l->rank);
}

bool low_rank_in_bf16(const Device* dev, const OptimConfig* config, const MatrixPlan* plan) {
    const Rows rows = config_rows(config);
    return dev->gpu && is_low_rank(rows.rule) && !low_rule(config).limits && rows.grads->stream[0].bits == 16 &&
           plan->by_eights;
}

// Finds out which matrices have directions, unless all had some before. It waits for the device, in the first two steps
// and while a matrix has had no gradient but zero.
static void find_directions(const LowStep* low) {
    const MatrixPlan* plan = &low->launch->matrix.plan;
    bool all = true;
    for (int i = 0; i < plan->matrices; i++) all = all && plan->matrix[i].has_basis;
    if (all || !low_rule(low->step->config).stores) return;
    const float* basis = (const float*)low->launch->kept[SLOT_BASIS].codes;
    for (Matrix* m = plan->matrix; m < plan->matrix + plan->matrices; m++) {
        if (m->has_basis) continue;
        const int side = m->rows < m->cols ? m->rows : m->cols;
        float* row = (float*)memory_take((size_t)side * sizeof(float));  // the first of Q
        copy_to_host(low->optim->dev, row, basis + m->basis, side * (int64_t)sizeof(float));
        m->has_basis = any_of(row, side);
        free(row);
    }
}

// Returns true if this step computes a new Q for a matrix, for which the gradients must lie in the scratch.
static bool refreshes(const LowStep* low, const Matrix* m) {
    const OptimConfig* config = low->step->config;
    return low_rule(config).stores && ((own_number(low->step) - 1) % low_gap(config) == 0 || !m->has_basis);
}

static float rank_scale(const OptimConfig* config, const LowMatrix* l) {
    if (config->rank_scale > 0.0) return (float)config->rank_scale;
    return l->rule.scale > 0.0f ? l->rule.scale : (float)l->side / (float)l->rank;
}

void low_rank_project(const LowStep* low, int chunk) {
    const OptimConfig* config = low->step->config;
    const uint32_t refresh = (uint32_t)((own_number(low->step) - 1) / low_gap(config));
    const MatrixChunk* taken = &low->launch->matrix.plan.chunk[chunk];
    int64_t padding = taken->end - taken->begin;
    bool reads = !low->in_bf16;
    if (chunk == 0) find_directions(low);
    each_matrix(low, chunk, [&](const LowMatrix* l, int) { reads = reads || refreshes(low, l->shape); });
    if (reads) low_gradients(low, taken);
    each_matrix(low, chunk, [&](const LowMatrix* l, int) {
        if (!l->rule.stores) {
            const float scale = (float)(1.0 / sqrt((double)l->rank));
            const RandomBasis random = {l->q, config->seed, (uint64_t)l->shape->element, refresh, scale};
            for_each(low->optim->dev, random, l->rank * l->side);
        } else if (refreshes(low, l->shape)) {
            basis_refresh(low, l, refresh);
        }
        padding -= (int64_t)l->shape->rows * l->shape->cols;
        if (!low->in_bf16) return project(low->optim->dev, l, l->g, l->q, l->low);
        const int t = l->shape->tensor;
        const bf16* g = (const bf16*)low->optim->grads[t] + (l->shape->element - low->optim->tensors[t].offset);
        project(low->optim->dev, l, g, basis_bf16(low, l), l->low);
    });
    // U will not cover the padding between tensors, whose gradients must be zero.
    if (low->in_bf16 && padding > 0)
        device_zero(low->optim->dev, low->launch->matrix.scratch, (taken->end - taken->begin) * 2);
}

// The update.

// Sums the numbers of each channel, a row or a column, of a matrix, or their squares.
struct ChannelSums {
    const float* x;
    int64_t count, next, step;  // elements of a channel, and from one channel or element to the next
    float* to;
    bool squares;

    OPTIM_INLINE float lane(int64_t i, int lane) const {
        float sum = 0.0f;
        for (int64_t k = lane; k < count; k += 32) {
            const float value = x[i * next + k * step];
            sum = squares ? exact_fma(value, value, sum) : exact_add(sum, value);
        }
        return sum;
    }
    OPTIM_INLINE void end(int64_t i, float sum) const { to[i] = sum; }
};

// Sums `count` numbers.
static void sum_of(const Device* dev, const float* x, int64_t count, float* to) {
    for_lanes(dev, ChannelSums{x, count, 0, 1, to, false}, 1);
}

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

// Computes 1 / limit from a sum of squares, and the norm that is kept. It has one index.
struct Limit {
    const float *sum, *unit;
    float *last, *inverse, growth;

    OPTIM_INLINE void at(int64_t) const {
        const float now = exact_sqrt(*sum), most = exact_mul(growth, exact_add(*last, NORM_EPS));
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

// Sums the squares of `lists` rows or columns of `count` numbers.
static void squares_of(const Device* dev, const float* x, int64_t lists, int64_t count, bool by_rows, float* to) {
    for_lanes(dev, ChannelSums{x, count, by_rows ? count : 1, by_rows ? 1 : lists, to, true}, lists);
}

// Moves averages towards the means of squares, of which `inverse` is 1 over the count.
struct MoveAverages {
    float* averages;
    const float *squares, *unit;
    float inverse, one_minus_beta2;
    bool begin;  // anew, from 0

    OPTIM_INLINE void at(int64_t i) const {
        const float last = begin ? 0.0f : averages[i];
        if (is_finite(*unit)) averages[i] = row_moment(last, squares[i], inverse, one_minus_beta2);
    }
};

// Divides m, in the direction's place, by the root of its factored v.
struct DivideByFactors {
    float* direction;
    const float *channels, *others, *sum;  // averages, and the sum of those of the channels
    float inverse;                         // 1 over their number
    Hyper hyper;
    int64_t cols;
    bool by_rows;  // channels are rows

    OPTIM_INLINE void at(int64_t i) const {
        const int64_t row = i / cols, col = i % cols;
        const float mean = exact_max(exact_mul(*sum, inverse), hyper.eps);
        const float product = exact_mul(channels[by_rows ? row : col], others[by_rows ? col : row]);
        const float root = exact_sqrt(exact_div(product, mean));
        direction[i] = exact_div(exact_mul(direction[i], hyper.step_size), exact_fma(root, hyper.root2, hyper.eps));
    }
};

static void divide_by_factors(const LowStep* low, const LowMatrix* l) {
    const Device* dev = low->optim->dev;
    const float* unit = low->launch->matrix.unit;
    const bool begin = low_rank_resets(low->step->config, own_number(low->step));
    const Settings settings = {1.0, 0.0};
    const Hyper hyper = hyper_create(hyper_source(low->step->config, &settings), 1.0, own_number(low->step));
    const int64_t n = l->length, cols = l->right ? l->rank : n;
    float *sum = l->sums + 1, *squares = l->sums + 4, *others = l->averages + n;
    squares_of(dev, l->low, l->rank, n, !l->right, squares);
    for_each(dev, MoveAverages{others, squares, unit, 1.0f / (float)n, hyper.one_minus_beta2, begin}, l->rank);
    squares_of(dev, l->low, n, l->rank, l->right, squares);
    for_each(dev, MoveAverages{l->averages, squares, unit, 1.0f / (float)l->rank, hyper.one_minus_beta2, begin}, n);
    sum_of(dev, l->averages, n, sum);
    const DivideByFactors divide = {l->direction, l->averages, others, sum, 1.0f / (float)n, hyper, cols, l->right};
    for_each(dev, divide, l->rank * n);
}

// Computes phi and 1 / limit. 1 / limit is sums[0], and phi begins at sums[4].
static void scale_factors(const LowStep* low, const LowMatrix* l) {
    const Device* dev = low->optim->dev;
    const int64_t n = l->length;
    float *inverse = l->sums, *total = inverse + 1, *factor = inverse + 4, *full = factor + n, *of_low = full + n,
          *squares = of_low + n;
    squares_of(dev, l->g, n, l->side, l->right, full);
    squares_of(dev, l->direction, n, l->rank, l->right, factor);
    squares_of(dev, l->low, n, l->rank, l->right, of_low);
    if (l->rule.one_phi) {
        sum_of(dev, factor, n, inverse + 2);
        sum_of(dev, of_low, n, inverse + 3);
        for_each(dev, Factors{factor, squares, inverse + 2, inverse + 3, full, 0, false}, n);
    } else {
        for_each(dev, Factors{factor, squares, factor, of_low, full, 1, l->rule.residual}, n);
    }
    sum_of(dev, squares, n, total);
    for_each(dev, Limit{total, low->launch->matrix.unit, l->last, inverse, low->step->config->rank_growth}, 1);
}

void low_rank_update(const LowStep* low, int chunk) {
    const Device* dev = low->optim->dev;
    each_matrix(low, chunk, [&](const LowMatrix* l, int) {
        const float scale = rank_scale(low->step->config, l), of_rest = l->rule.residual ? 1.0f : sqrtf(scale);
        if (low->in_bf16) {
            const bf16 *q = basis_bf16(low, l), *n = in_bf16(dev, l->direction, l->z, l->rank * l->length);
            return project_back(dev, l, n, q, (bf16*)low->launch->matrix.scratch + l->shape->at, scale, 0.0f,
                                (const bf16*)nullptr);
        }
        if (!l->rule.limits) return project_back(dev, l, l->direction, l->q, l->g, scale, 0.0f, l->g);
        if (l->rule.factored) divide_by_factors(low, l);
        scale_factors(low, l);
        const int64_t cols = l->shape->cols, low_cols = l->right ? l->rank : l->length;
        const float *inverse = l->sums, *factor = inverse + 4;
        for_each(dev, ScaleChannels{l->g, factor, inverse, cols, l->right, of_rest}, l->shape->rows * cols);
        if (!l->rule.residual) return;
        const ResidualDirection residual = {l->direction, l->low, factor, inverse, low_cols, l->right, scale};
        for_each(dev, residual, l->rank * l->length);
        project_back(dev, l, l->direction, l->q, l->g, 1.0f, 1.0f, l->g);
    });
}
