// See matrix.h.
#include "../made.h"
#include "low_rank.h"
#include "newton_schulz.cuh"

#include "../each.cuh"
#include "../rules/muon.cuh"

constexpr int MAX_MATRICES = 65535;  // of a chunk: the largest y dimension of a grid
constexpr int SLICES = 16;           // of a matrix; the sums of their squares are added in order
constexpr float NORM_EPS = 1e-7f;
constexpr int64_t BATCH_BYTES = 1 << 29;  // of the products' buffers of a batch, unless one matrix needs more

// Pads a dimension to a multiple of 8, which products in fp16 need. The padding is zero and stays zero.
static int64_t padded(int64_t n) {
    return ceil_div(n, 8) * 8;
}

// The plan.

// A matrix's shape for Newton-Schulz, which transposes it if it is tall.
static int shorter_side(const Matrix* m) {
    return m->rows < m->cols ? m->rows : m->cols;
}

static int longer_side(const Matrix* m) {
    return m->rows > m->cols ? m->rows : m->cols;
}

static bool same_shape(const Matrix* a, const Matrix* b) {
    return shorter_side(a) == shorter_side(b) && longer_side(a) == longer_side(b);
}

static int compare_shapes(const void* a, const void* b) {
    const Matrix *x = (const Matrix*)a, *y = (const Matrix*)b;
    if (same_shape(x, y)) return x->at < y->at ? -1 : x->at > y->at;
    const int difference = shorter_side(x) - shorter_side(y);
    return difference != 0 ? difference : longer_side(x) - longer_side(y);
}

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

// Sorts the last chunk's matrices into batches, and raises the plan's buffers to what the chunk needs.
static void chunk_close(const Device* dev, MatrixPlan* plan) {
    MatrixChunk* chunk = &plan->chunk[plan->chunks - 1];
    const int first = chunk->matrix;
    qsort(plan->matrix + first, plan->matrices - first, sizeof(Matrix), compare_shapes);
    chunk->matrices = plan->matrices - first;
    chunk->batch = plan->batches;
    plan->low = larger(plan->low, (chunk->low_end - chunk->low_begin) * (int64_t)sizeof(float));
    int64_t work = 0, sums = 0;  // of a batch
    for (int i = first; i < plan->matrices; i++) {
        const Matrix* matrix = &plan->matrix[i];
        const int64_t side = shorter_side(matrix), length = longer_side(matrix);
        const int64_t of_sides = polar_squares(padded(side), padded(length)) * padded(side) * padded(side);
        const int64_t bytes = (2 * padded(side) * padded(length) + of_sides) * (int64_t)sizeof(uint16_t);
        const bool full = plan->low == 0 && work + bytes > BATCH_BYTES;
        if (i == first || !same_shape(matrix, matrix - 1) || full)
            plan->batch[plan->batches++] = {i, 0}, work = sums = 0;
        plan->batch[plan->batches - 1].count++;
        if (plan->low > 0) continue;  // low_place has counted its buffers
        work += bytes;
        sums += (SLICES + 2 * length + 1) * (int64_t)sizeof(float);
        // The CPU takes one matrix at a time, in fp32 and without sums.
        const int64_t alone = 2 * (side * length + side * side) * (int64_t)sizeof(float);
        plan->work = larger(plan->work, dev->gpu ? work : alone);
        plan->sums = dev->gpu ? larger(plan->sums, sums) : 0;
    }
    chunk->batches = plan->batches - chunk->batch;
    plan->scratch = larger(plan->scratch, (chunk->end - chunk->begin) * (int64_t)sizeof(float));
}

// Sets where a matrix's moments and basis begin, and raises the plan's buffers to what its products need.
static void low_place(const Device* dev, const Plan* plan, int index, int tensor, int part, const MatrixChunk* chunk,
                      Matrix* matrix, MatrixPlan* matrices) {
    const LaunchPlan* launch = &plan->launch[index];
    const OptimTensor* kept = plan->tensor[tensor].kept;
    const LowShape shape = low_shape(&launch->config, matrix->rows, matrix->cols);
    const int64_t side = shorter_side(matrix), length = longer_side(matrix);
    matrix->low = kept[SLOT_M].offset - chunk->low_begin + part * shape.rows * shape.cols;
    matrix->basis = kept[SLOT_BASIS].offset - launch->kept[SLOT_BASIS].begin + part * shape.basis;
    const int64_t parts = dev->gpu ? side * length + shape.rank * length : 0;
    matrices->work =
        larger(matrices->work, (2 * shape.rank * side + shape.rank * length + parts) * (int64_t)sizeof(float));
    matrices->sums = larger(matrices->sums, (4 * length + 4) * (int64_t)sizeof(float));
}

void* matrix_scratch(const MatrixWork* work, int64_t tile, int64_t element_bytes) {
    const MatrixChunk* chunk = work->plan.chunk;
    while (tile >= chunk->tile + chunk->tiles) chunk++;
    return (char*)work->scratch + (tile - chunk->tile) * TILE_ELEMENTS * element_bytes;
}

// Writes the tiles of the moments of projected gradients: MatrixPlan.low_tiles / sizeof(Tile).
static void matrix_low_tiles(const Plan* plan, int index, int count, const MatrixWork* work, Tile* tiles) {
    const MatrixChunk* chunk = work->plan.chunk;
    for (int t = 0; t < count; t++) {
        const OptimTensor* kept = &plan->tensor[t].kept[SLOT_M];
        if (plan->tensor[t].launch != index || is_elsewhere(plan, t)) continue;
        for (int64_t i = 0; i < tensor_padded(kept); i += TILE_ELEMENTS) {
            const int64_t at = kept->offset + i;
            while (at >= chunk->low_end) chunk++;
            const int64_t low = at - chunk->low_begin, states = at - plan->launch[index].kept[SLOT_M].begin;
            *tiles++ = {work->direction + low,
                        work->low + low,
                        0,
                        (uint32_t)(states / TILE_ELEMENTS),
                        (uint32_t)((plan->tensor[t].noise + i) / TILE_ELEMENTS),
                        (uint32_t)plan->tensor[t].group};
        }
    }
}

// Begins a chunk with tensor t, which starts at element `begin`.
static void chunk_open(const Plan* plan, int index, int t, int64_t begin, MatrixPlan* its) {
    MatrixChunk* chunk = &its->chunk[its->chunks++];
    chunk->begin = begin;
    if (its->chunks > 1) chunk->tile = chunk[-1].tile + chunk[-1].tiles;
    chunk->matrix = its->matrices;
    chunk->low_begin = chunk->low_end = plan->tensor[t].kept[SLOT_M].offset;
    chunk->low_tile = (chunk->low_begin - plan->launch[index].kept[SLOT_M].begin) / TILE_ELEMENTS;
}

// Adds tensor t, whose first element in the whole arena is `element`, to the last chunk.
static void chunk_add(const Device* dev, const Plan* plan, int index, int t, int64_t element, bool low,
                      MatrixPlan* its) {
    const OptimTensor* tensor = &plan->tensor[t].kept[SLOT_WEIGHTS];
    MatrixChunk* chunk = &its->chunk[its->chunks - 1];
    const OptimTensor* moments = &plan->tensor[t].kept[SLOT_M];
    const int64_t rows = tensor->rows / tensor->parts;
    const int64_t row = plan->tensor[t].at[SPAN_ROWS] - plan->launch[index].run.at[SPAN_ROWS];
    for (int part = 0; part < tensor->parts; part++) {
        Matrix* matrix = &its->matrix[its->matrices++];
        matrix->element = element + part * rows * tensor->cols;
        matrix->at = tensor->offset - chunk->begin + part * rows * tensor->cols;
        matrix->row = row + part * rows;
        matrix->rows = (int)rows, matrix->cols = (int)tensor->cols;
        matrix->tensor = t;
        matrix->group = plan->tensor[t].group;
        if (low) low_place(dev, plan, index, t, part, chunk, matrix, its);
    }
    if (low) chunk->low_end = moments->offset + tensor_padded(moments);
    chunk->end = tensor->offset + tensor_padded(tensor);
    chunk->tiles += tensor_padded(tensor) / TILE_ELEMENTS;
}

// Returns MatrixPlan.by_eights.
static bool low_by_eights(const Plan* plan, int index, const OptimTensor* tensors, int count) {
    for (int t = 0; t < count; t++) {
        if (tensors[t].cols == 0 || plan->tensor[t].launch != index) continue;
        const int64_t rows = tensors[t].rows / tensors[t].parts, cols = tensors[t].cols;
        if ((rows | cols | low_shape(&plan->launch[index].config, rows, cols).rank) % 8 != 0) return false;
    }
    return true;
}

MatrixPlan matrix_plan(const Device* dev, const Plan* plan, int index, const OptimTensor* tensors, int count) {
    MatrixPlan its = {};
    int64_t matrices = 1;
    const OptimConfig* config = &plan->launch[index].config;
    const bool low = is_low_rank(rule_of(config));
    for (int t = 0; t < count; t++) matrices += tensors[t].parts;
    its.matrix = (Matrix*)memory_zero((size_t)matrices, sizeof(Matrix));
    its.batch = (MatrixBatch*)memory_zero((size_t)matrices, sizeof(MatrixBatch));
    its.chunk = (MatrixChunk*)memory_zero((size_t)count + 1, sizeof(MatrixChunk));
    its.by_eights = !low || low_by_eights(plan, index, tensors, count);
    for (int t = 0; t < count; t++) {
        const OptimTensor* tensor = &plan->tensor[t].kept[SLOT_WEIGHTS];
        const int64_t begin = tensor->offset, end = begin + tensor_padded(tensor);
        if (plan->tensor[t].launch != index || is_elsewhere(plan, t)) continue;
        const MatrixChunk* chunk = its.chunks ? &its.chunk[its.chunks - 1] : nullptr;
        const bool full = chunk && (its.matrices - chunk->matrix + tensor->parts > MAX_MATRICES ||
                                    end - chunk->begin > config->matrix_chunk);
        if (full) chunk_close(dev, &its);
        if (full || !chunk) chunk_open(plan, index, t, begin, &its);
        chunk_add(dev, plan, index, t, tensors[t].offset, low, &its);
    }
    if (its.chunks) chunk_close(dev, &its);
    const ArenaRun* moments = &plan->launch[index].kept[SLOT_M];
    if (low) its.low_tiles = (moments->end - moments->begin) / TILE_ELEMENTS * (int64_t)sizeof(Tile);
    return its;
}

void matrix_plan_free(MatrixPlan* plan) {
    free(plan->matrix), free(plan->batch), free(plan->chunk);
}

void matrix_create(Optim* optim, int index) {
    StepLaunch* launch = &optim->launch[index];
    const Device* dev = optim->dev;
    MatrixWork* work = &launch->matrix;
    work->plan = matrix_plan(dev, optim->plan, index, optim->tensors, optim->count);
    Rows rows = apply_rows(&launch->rows);
    if (low_rank_in_bf16(dev, &launch->plan->config, &work->plan)) rows.grads = launch->rows.grads;
    kernel_create(optim, launch->plan, &launch->apply, &rows);
    const int64_t bytes = work->plan.matrices * (int64_t)sizeof(Matrix);
    work->matrix = table_memory(optim, bytes, work->plan.matrix);
    work->scratch = table_memory<float>(optim, work->plan.scratch);
    work->work = table_memory<char>(optim, work->plan.work);
    work->sums = table_memory<float>(optim, work->plan.sums);
    work->unit = table_memory<float>(optim, sizeof(float));
    work->low = table_memory<float>(optim, work->plan.low);
    work->direction = table_memory<float>(optim, work->plan.low);
    work->low_tiles = table_memory<Tile>(optim, work->plan.low_tiles);
    if (work->plan.low_tiles == 0 || dev->imagined) return;
    Tile* tiles = (Tile*)memory_take((size_t)work->plan.low_tiles);
    matrix_low_tiles(optim->plan, index, optim->count, work, tiles);
    copy_to_device(dev, work->low_tiles, tiles, work->plan.low_tiles);
    free(tiles);
}

// Newton-Schulz.

bool newton_schulz_coefficients(const char* name, int step, NewtonSchulz* coefficients) {
    // Jordan's coefficients are the same in every step. Those of Polar Express (Amsel et al., arXiv 2505.16932) include
    // its safety factor of 1.01 to the power of the degree; the last ones repeat.
    static const NewtonSchulz polar[] = {{8.2051f, -22.9019f, 16.4607f}, {4.0664f, -2.8612f, 0.5184f},
                                         {3.9096f, -2.8234f, 0.5250f},   {3.2856f, -2.4153f, 0.4853f},
                                         {2.2779f, -1.6198f, 0.3985f},   {1.8750f, -1.2500f, 0.3750f}};
    const bool express = strcmp(name, "polar-express") == 0;
    *coefficients = express ? polar[step < 5 ? step : 5] : NewtonSchulz{3.4445f, -4.7750f, 2.0315f};
    return express || strcmp(name, "jordan") == 0;
}

// Elements `at` to `end` - 1 of a chunk's scratch: whole tensors that a step takes.
struct MatrixRange {
    const MatrixChunk* chunk;
    int64_t at, end;
};

static bool by_rows(const OptimConfig* config) {
    return rule_of(config)->matrix == MATRIX_NORMUON;
}

// Part 2 in plain C.

static double sum_of_squares(const float* x, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
    return sum;
}

// Updates NorMuon's v of the rows of u, and divides each row by its root.
static void rows_cpu(const OptimConfig* config, const Matrix* m, float* u, const float* now, float* next) {
    const float one_minus_beta2 = (float)(1.0 - (double)config->beta2);
    for (int64_t i = 0; i < m->rows; i++) {
        float* row = u + i * m->cols;
        const float mean = (float)(sum_of_squares(row, m->cols) / m->cols);
        next[m->row + i] = canonical(exact_fma(one_minus_beta2, exact_add(mean, -now[m->row + i]), now[m->row + i]));
        const float factor = 1.0f / (sqrtf(next[m->row + i]) + (float)config->eps);
        for (int64_t j = 0; j < m->cols; j++) row[j] *= factor;
    }
}

static void update_cpu(const Device* dev, const OptimConfig* config, const MatrixWork* work, const Matrix* m,
                       const float* now, float* next) {
    const int64_t side = shorter_side(m), length = longer_side(m), size = side * length;
    // Element (row, col) of u is number row * down + col * right of X.
    const bool tall = m->rows > m->cols;
    const int64_t down = tall ? 1 : length, right = tall ? length : 1;
    float *u = work->scratch + m->at, *x = (float*)work->work, *y = x + size, *a = y + size, *b = a + side * side;
    const float inverse = 1.0f / ((float)sqrt(sum_of_squares(u, size)) + NORM_EPS);
    for (int64_t i = 0; i < size; i++) x[i / m->cols * down + i % m->cols * right] = u[i] * inverse;
    x = newton_schulz_plain<float>(dev, config, x, y, a, b, side, length, 1);
    for (int64_t i = 0; i < size; i++) u[i] = x[i / m->cols * down + i % m->cols * right];
    float factor = 0.2f * sqrtf((float)length);
    if (by_rows(config)) {
        rows_cpu(config, m, u, now, next);
        factor = 0.2f * sqrtf((float)size) / ((float)sqrt(sum_of_squares(u, size)) + NORM_EPS);
    }
    for (int64_t i = 0; i < size; i++) u[i] *= factor;
}

// Part 2 on a GPU.
#ifdef __CUDACC__
// Matrices of one shape. X of a matrix has `side` rows and `length` columns, padded.
struct BatchArguments {
    const Matrix* matrix;  // (count)
    float* scratch;
    int side, length, padded_side, padded_length;
    float* slices;   // (count, SLICES)
    float* factors;  // (count, length): of each row of the matrix
    float* squares;  // (count, length): sum of the squares of each row of Y
    float* norms;    // (count): 0.2 sqrt(R C) / ||Y||
};

constexpr int PART = 64;  // rows and columns of what a block moves between a matrix and X

static dim3 parts_grid(const BatchArguments* batch, int count) {
    return dim3((unsigned)(ceil_div(batch->padded_side, PART) * ceil_div(batch->padded_length, PART)), (unsigned)count);
}

// The first element of a block's part, in a matrix and in its X.
struct PartPlace {
    int row, col, x_row, x_col;
    bool tall;
};

__device__ __forceinline__ PartPlace part_place(const BatchArguments& batch, const Matrix& m) {
    const int across = (batch.padded_length + PART - 1) / PART;
    const int row = (int)blockIdx.x / across * PART, col = (int)blockIdx.x % across * PART;
    const bool tall = m.rows > m.cols;
    return {tall ? col : row, tall ? row : col, row, col, tall};
}

// A thread adds every 4096th square in order, and has eight loads in flight. grid (SLICES, count), block 256;
// deterministic.
__global__ void __launch_bounds__(256) matrix_norm_kernel(BatchArguments batch) {
    const float* u = batch.scratch + batch.matrix[blockIdx.y].at;
    const int64_t size = (int64_t)batch.side * batch.length;
    constexpr int EIGHT = 8, STRIDE = 256 * SLICES;
    float sum = 0.0f;
    int64_t i = blockIdx.x * 256 + threadIdx.x;
    for (; i + (EIGHT - 1) * STRIDE < size; i += EIGHT * STRIDE) {
        float x[EIGHT];
#pragma unroll
        for (int k = 0; k < EIGHT; k++) x[k] = u[i + k * STRIDE];
#pragma unroll
        for (int k = 0; k < EIGHT; k++) sum = exact_fma(x[k], x[k], sum);
    }
    for (; i < size; i += STRIDE) sum = exact_fma(u[i], u[i], sum);
    sum = block_sum(sum);
    if (threadIdx.x == 0) batch.slices[blockIdx.y * SLICES + blockIdx.x] = sum;
}

// Writes POLAR_SCALE X, padded. grid parts_grid, block 256; deterministic.
__global__ void __launch_bounds__(256) matrix_pack_kernel(BatchArguments batch, __half* x) {
    __shared__ float part[PART][PART + 1];
    const Matrix& m = batch.matrix[blockIdx.y];
    const PartPlace at = part_place(batch, m);
    const float* u = batch.scratch + m.at;
    float sum = 0.0f;
    for (int s = 0; s < SLICES; s++) sum += batch.slices[blockIdx.y * SLICES + s];
    const float inverse = POLAR_SCALE / (exact_sqrt(sum) + NORM_EPS);
#pragma unroll
    for (int k = 0; k < PART * PART; k += 256) {
        const int row = (k + threadIdx.x) / PART, col = threadIdx.x % PART;
        const bool inside = at.row + row < m.rows && at.col + col < m.cols;
        part[row][col] = inside ? u[(int64_t)(at.row + row) * m.cols + at.col + col] * inverse : 0.0f;
    }
    __syncthreads();
    x += blockIdx.y * (int64_t)batch.padded_side * batch.padded_length;
#pragma unroll
    for (int k = 0; k < PART * PART / 2; k += 256) {
        const int row = (k + threadIdx.x) / (PART / 2), col = threadIdx.x % (PART / 2) * 2;
        if (at.x_row + row >= batch.padded_side || at.x_col + col >= batch.padded_length) continue;
        *(__half2*)(x + (int64_t)(at.x_row + row) * batch.padded_length + at.x_col + col) = __floats2half2_rn(
            at.tall ? part[col][row] : part[row][col], at.tall ? part[col + 1][row] : part[row][col + 1]);
    }
}

// NorMuon's v. grid (ceil(rows / 8), count), block 256, a warp a row; deterministic.
__global__ void __launch_bounds__(256) matrix_rows_kernel(BatchArguments batch, const __half* x, const float* now,
                                                          float* next, float one_minus_beta2, float eps) {
    const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    const Matrix& m = batch.matrix[blockIdx.y];
    if (row >= m.rows) return;
    const bool tall = m.rows > m.cols;
    x += blockIdx.y * (int64_t)batch.padded_side * batch.padded_length +
         (tall ? row : (int64_t)row * batch.padded_length);
    float sum = 0.0f;
    for (int i = lane; i < m.cols; i += 32) {
        const float value = __half2float(x[tall ? (int64_t)i * batch.padded_length : i]) / POLAR_SCALE;
        sum = exact_fma(value, value, sum);
    }
    sum = warp_sum(sum);
    if (lane != 0) return;
    const int64_t i = m.row + row;
    const float mean = sum / (float)m.cols;
    next[i] = canonical(exact_fma(one_minus_beta2, exact_add(mean, -now[i]), now[i]));
    const float factor = 1.0f / (exact_sqrt(next[i]) + eps);
    batch.factors[blockIdx.y * batch.length + row] = factor;
    batch.squares[blockIdx.y * batch.length + row] = factor * factor * sum;
}

// grid (count), block 256; deterministic.
__global__ void __launch_bounds__(256) matrix_rows_norm_kernel(BatchArguments batch) {
    float sum = 0.0f;
    const int rows = batch.matrix[blockIdx.x].rows;
    for (int i = threadIdx.x; i < rows; i += 256) sum += batch.squares[blockIdx.x * batch.length + i];
    sum = block_sum(sum);
    const float size = (float)batch.side * (float)batch.length;
    if (threadIdx.x == 0) batch.norms[blockIdx.x] = 0.2f * exact_sqrt(size) / (exact_sqrt(sum) + NORM_EPS);
}

// Writes U; `factor` is 0 where each row has its own. grid parts_grid, block 256; deterministic.
__global__ void __launch_bounds__(256) matrix_unpack_kernel(BatchArguments batch, const __half* x, float factor) {
    __shared__ float part[PART][PART + 1];  // of X
    const Matrix& m = batch.matrix[blockIdx.y];
    const PartPlace at = part_place(batch, m);
    x += blockIdx.y * (int64_t)batch.padded_side * batch.padded_length;
#pragma unroll
    for (int k = 0; k < PART * PART / 2; k += 256) {
        const int row = (k + threadIdx.x) / (PART / 2), col = threadIdx.x % (PART / 2) * 2;
        if (at.x_row + row >= batch.padded_side || at.x_col + col >= batch.padded_length) continue;
        const float2 pair =
            __half22float2(*(const __half2*)(x + (int64_t)(at.x_row + row) * batch.padded_length + at.x_col + col));
        part[row][col] = pair.x / POLAR_SCALE, part[row][col + 1] = pair.y / POLAR_SCALE;
    }
    __syncthreads();
    float* u = batch.scratch + m.at;
#pragma unroll
    for (int k = 0; k < PART * PART; k += 256) {
        const int row = (k + threadIdx.x) / PART, col = threadIdx.x % PART;
        if (at.row + row >= m.rows || at.col + col >= m.cols) continue;
        float of_row = factor;
        if (factor == 0.0f)
            of_row = batch.norms[blockIdx.y] * batch.factors[blockIdx.y * (int64_t)batch.length + at.row + row];
        u[(int64_t)(at.row + row) * m.cols + at.col + col] = (at.tall ? part[col][row] : part[row][col]) * of_row;
    }
}

// Packs a batch, whose sums begin at `sums`, at x.
static BatchArguments batch_begin(const Device* dev, const MatrixWork* work, const MatrixBatch* batch, float* sums,
                                  __half* x) {
    const Matrix* first = &work->plan.matrix[batch->first];
    const int side = shorter_side(first), length = longer_side(first), count = batch->count;
    float *factors = sums + count * SLICES, *squares = factors + (int64_t)count * length;
    const BatchArguments arguments = {
        work->matrix + batch->first, work->scratch, side,    length,  (int)padded(side),
        (int)padded(length),         sums,          factors, squares, squares + (int64_t)count * length};
    launch_kernel(dev, matrix_norm_kernel, dim3(SLICES, (unsigned)count), 256, 0, arguments);
    launch_kernel(dev, matrix_pack_kernel, parts_grid(&arguments, count), 256, 0, arguments, x);
    return arguments;
}

static void batch_end(const Device* dev, const OptimConfig* config, const BatchArguments* batch, int count,
                      const __half* x, const float* now, float* next) {
    float factor = 0.2f * sqrtf((float)batch->length);
    if (by_rows(config)) {
        launch_kernel(dev, matrix_rows_kernel, dim3((unsigned)ceil_div(batch->length, 8), (unsigned)count), 256, 0,
                      *batch, x, now, next, (float)(1.0 - (double)config->beta2), config->eps);
        launch_kernel(dev, matrix_rows_norm_kernel, (unsigned)count, 256, 0, *batch);
        factor = 0.0f;
    }
    launch_kernel(dev, matrix_unpack_kernel, parts_grid(batch, count), 256, 0, *batch, x, factor);
}

// Returns the matrices of a batch that lie in the range.
static MatrixBatch batch_within(const MatrixPlan* plan, MatrixBatch batch, const MatrixRange* range) {
    for (; batch.count > 0 && plan->matrix[batch.first].at < range->at; batch.count--) batch.first++;
    while (batch.count > 0 && plan->matrix[batch.first + batch.count - 1].at >= range->end) batch.count--;
    return batch;
}

static void update_gpu(const Device* dev, const OptimConfig* config, const MatrixWork* work, const MatrixRange* range,
                       const float* now, float* next) {
    const MatrixBatch* batches = &work->plan.batch[range->chunk->batch];
    __half* at = (__half*)work->work;
    for (int i = 0; i < range->chunk->batches; i++) {
        const MatrixBatch batch = batch_within(&work->plan, batches[i], range);
        if (batch.count == 0) continue;
        const BatchArguments of = batch_begin(dev, work, &batch, work->sums, at);
        const int64_t size = (int64_t)of.padded_side * of.padded_length * batch.count;
        const PolarBatch polar = {at, at + size, at + 2 * size, of.padded_side, of.padded_length, batch.count};
        batch_end(dev, config, &of, (int)batch.count, newton_schulz_gpu(dev, config, &polar), now, next);
    }
}
#endif

// Sets a number to 1 if the gradients' factor is finite, otherwise to NaN.
struct SetUnit {
    float* unit;
    const float* grad_scale;

    OPTIM_INLINE void at(int64_t) const { *unit = is_finite(*grad_scale) ? 1.0f : bits_float(0x7fc00000u); }
};

// Runs part 2: turns a range's directions in the scratch into updates. `now` and `next` are the old and the new v of
// rows, for a rule that keeps one.
static void matrix_update(const Device* dev, const OptimConfig* config, const MatrixWork* work,
                          const MatrixRange* range, const float* now, float* next) {
#ifdef __CUDACC__
    if (dev->gpu) {
        update_gpu(dev, config, work, range, now, next);
        return;
    }
#endif
    for (int i = 0; i < range->chunk->matrices && isfinite(*work->unit); i++) {
        const Matrix* matrix = &work->plan.matrix[range->chunk->matrix + i];
        if (matrix->at >= range->at && matrix->at < range->end) update_cpu(dev, config, work, matrix, now, next);
    }
}

// The step, a chunk at a time.

// Returns what the tiles of a step take of a chunk.
static MatrixRange range_create(const MatrixChunk* chunk, int64_t first, int64_t count) {
    const int64_t at = first - chunk->tile, end = at + count;
    return {chunk, (at > 0 ? at : 0) * TILE_ELEMENTS, (end < chunk->tiles ? end : chunk->tiles) * TILE_ELEMENTS};
}

// Restricts the arguments to the tiles of a range; `tiles` begins with tile `first` of the launch's list.
static void range_tiles(const MatrixRange* range, const Tile* tiles, int64_t first, StepArguments* arguments) {
    arguments->tiles = tiles + (range->chunk->tile + range->at / TILE_ELEMENTS - first);
    arguments->tile_count = (range->end - range->at) / TILE_ELEMENTS;
}

// Sets the arguments of a range's first kernel, which turns gradients, or their projections, into directions.
static void moment_arguments(const StepLaunch* launch, const MatrixRange* range, int64_t first, const LowStep* low,
                             StepArguments* moment) {
    const MatrixChunk* chunk = range->chunk;
    const MatrixWork* work = &launch->matrix;
    if (!is_low_rank(launch->rows.rule)) return range_tiles(range, moment->tiles, first, moment);
    moment->tiles = work->low_tiles + chunk->low_tile;
    moment->tile_count = (chunk->low_end - chunk->low_begin) / TILE_ELEMENTS;
    if (!low->in_bf16) moment->grad_scale = work->unit;  // the scratch includes the factor
    const Settings rate = {1.0, 0.0};                    // a direction has learning rate 1; the update has the real one
    for (Hyper& hyper : moment->group)
        hyper = hyper_create(hyper_source(low->step->config, &rate), 1.0, own_number(low->step));
}

void launch_matrices(const Optim* optim, const StepLaunch* launch, const LaunchStep* step,
                     const StepArguments* arguments) {
    const MatrixWork* work = &launch->matrix;
    const Device* dev = optim->dev;
    const Streams none = {nullptr, nullptr}, *v = &launch->kept[SLOT_V];
    const bool projects = is_low_rank(launch->rows.rule);
    const LowStep low = {optim, launch, step, low_rank_in_bf16(dev, &launch->plan->config, &work->plan)};
    for_each(dev, SetUnit{work->unit, step->grad_scale}, 1);
    for (int slot = SLOT_M; slot <= SLOT_V && projects && low_rank_resets(step->config, own_number(step)); slot++) {
        const FormatRow* format = slot_format(launch->plan, (Slot)slot);
        for (int i = 0; i < 3; i++) {
            device_zero(dev, stream_data(&launch->kept[slot], i),
                        run_bytes(&launch->plan->kept[slot], format->stream[i]));
        }
    }
    for (int i = 0; i < work->plan.chunks; i++) {
        const MatrixChunk* chunk = &work->plan.chunk[i];
        const MatrixRange range = range_create(chunk, step->first, step->count);
        if (range.at >= range.end) continue;
        StepArguments moment = *arguments, apply = *arguments;
        // The padding of a matrix's projection must stay zero, and other chunks have matrices of other sizes.
        const int64_t low_bytes = (chunk->low_end - chunk->low_begin) * (int64_t)sizeof(float);
        if (projects && work->plan.chunks > 1) device_zero(dev, work->low, low_bytes);
        if (projects) low_rank_project(&low, i);
        moment_arguments(launch, &range, step->first, &low, &moment);
        kernel_run(optim, &launch->kernel, step, &moment);
        if (projects) low_rank_update(&low, i);
        if (!projects) matrix_update(dev, step->config, work, &range, (const float*)v->scales, v->new_scales);
        range_tiles(&range, step->applied, step->first, &apply);
        apply.grad_scale = work->unit;
        apply.m = apply.v = none;
        kernel_run(optim, &launch->apply, step, &apply);
    }
}

void optim_loaded(Optim* optim) {
    for (StepLaunch& launch : optim->launch) {
        MatrixPlan* plan = &launch.matrix.plan;
        for (int i = 0; i < plan->matrices; i++) plan->matrix[i].has_basis = false;
    }
}
