// The passes that add up squares before the step of a rule that reads rows (rows.cuh has the formulas and the order of
// the sums). Threads read memory directly. A thread block takes a slab of 128 rows by a panel of 256 columns: each warp
// every eighth row, each lane 8 columns of it, which lie in one or, where a row does not begin at a multiple of 8, two
// runs of 8 elements. Where they lie in one, a warp loads SUM_AHEAD rows before it adds them up, so that as many loads
// are under way; SUM_STEP, which needs too many registers for that, and other shapes go row by row.
#pragma once
#include "kernel.cuh"

EMBED_SOURCE

#ifdef __CUDACC__
// Loads the 8 elements of the arena from `element`, a multiple of 8, on.
template <class Storage>
__device__ __forceinline__ void sum_load_run(const Streams& whole, const void* table, int64_t element, float* x) {
    constexpr StreamInfo codes = Storage::STREAM[0], extra = Storage::STREAM[1], more = Storage::STREAM[2];
    Streams streams = tile_at(codes, extra, more, whole, element / TILE_ELEMENTS);
    streams.table = table;
    const int first = (int)(element % TILE_ELEMENTS);
    if constexpr (Storage::LOADS_TOGETHER) Storage::load_alone(streams, first, x);
    if constexpr (!Storage::LOADS_TOGETHER) Storage::load(streams, first, x, SUM_LANE, NoiseKey{});
}

// Loads the 8 elements from `element` of the arena on; `held` of them lie in the tensor.
template <class Storage>
__device__ __forceinline__ void sum_load(const Streams& whole, const void* table, int64_t element, int held, float* x) {
    const int shift = (int)(element % 8);
    if (shift == 0) return sum_load_run<Storage>(whole, table, element, x);
    float wide[16];
    sum_load_run<Storage>(whole, table, element - shift, wide);
    if (shift + held > 8) sum_load_run<Storage>(whole, table, element - shift + 8, wide + 8);
    for (int i = 0; i < 8; i++) x[i] = i < held ? wide[shift + i] : 0.0f;
}

constexpr int SUM_AHEAD = 4;  // rows

// A lane keeps the numbers of its 8 columns here, as every row needs them; `slow` are came's second ones.
struct SumColumns {
    float v[SUM_LANE], slow[SUM_LANE];
};

// True if a rule's number of an element is a product of its row's and its column's.
template <class V>
OPTIM_INLINE constexpr bool sum_multiplies() {
    return V::STREAM[1].span == SPAN_FACTORS || V::STREAM[1].span == SPAN_PAIRS;
}

// Reads these numbers for a pass that needs them; otherwise they are 0.
template <class Rule, class V>
__device__ __forceinline__ SumColumns sum_columns(const SumArguments& sums, const SumTensor& tensor, int64_t col,
                                                  int held) {
    SumColumns columns = {};
    if constexpr (Rule::BY_ROWS && sum_multiplies<V>()) {
        const float* its = sums.numbers + tensor.number + tensor.rows + col;
#pragma unroll
        for (int i = 0; i < SUM_LANE; i++) {
            if (i >= held || !sum_reads_v(sums.sum)) continue;
            columns.v[i] = its[i];
            if (Rule::PAIRS) columns.slow[i] = its[tensor.rows + tensor.cols + i];
        }
    }
    return columns;
}

// Fills v with the numbers that a rule by rows has in its place for 8 elements of a row, and `slow` with came's second.
template <class Rule, class V>
__device__ __forceinline__ void sum_numbers(const SumArguments& sums, const SumTensor& tensor,
                                            const SumColumns& columns, int64_t row, float* v, float* slow) {
    const float* its = sums.numbers + tensor.number + row;
    const float first = its[0], second = Rule::PAIRS ? its[tensor.rows + tensor.cols] : 0.0f;
#pragma unroll
    for (int i = 0; i < SUM_LANE; i++) {
        v[i] = sum_multiplies<V>() ? exact_mul(first, columns.v[i]) : first;
        if (Rule::PAIRS) slow[i] = exact_mul(second, columns.slow[i]);
    }
}

// Loads a lane's 8 columns of SUM_AHEAD rows, SUM_WARPS apart.
template <class Storage>
__device__ __forceinline__ void sum_load_rows(const Streams& whole, const void* table, int64_t element, int64_t cols,
                                              float (&x)[SUM_AHEAD][SUM_LANE]) {
#pragma unroll
    for (int r = 0; r < SUM_AHEAD; r++) sum_load_run<Storage>(whole, table, element + r * SUM_WARPS * cols, x[r]);
}

// Makes the values that a pass other than SUM_STEP squares, of SUM_AHEAD rows from `row` on. A lane's 8 lie in one run.
template <class Rule, class Weights, class M, class V, class Grads>
__device__ __forceinline__ void sum_values_of_rows(const StepArguments& step, const SumArguments& sums,
                                                   const SumTensor& tensor, const SumColumns& columns,
                                                   const unsigned char* tables, float grad_scale, int64_t row,
                                                   int64_t col, float (&x)[SUM_AHEAD][SUM_LANE]) {
    const int64_t element = tensor.offset + row * tensor.cols + col;
    const Hyper& group = step.group[tensor.group];
    if (sums.sum == SUM_WEIGHTS) return sum_load_rows<Weights>(step.weights, nullptr, element, tensor.cols, x);
    float m[SUM_AHEAD][SUM_LANE] = {};
    sum_load_rows<Grads>(step.grads, nullptr, element, tensor.cols, x);
    if (sum_reads_m(sums.sum)) sum_load_rows<M>(step.m, tables, element, tensor.cols, m);
#pragma unroll
    for (int r = 0; r < SUM_AHEAD; r++) {
        float v[SUM_LANE] = {}, slow[SUM_LANE];
        if constexpr (Rule::BY_ROWS) {
            if (sum_reads_v(sums.sum)) sum_numbers<Rule, V>(sums, tensor, columns, row + r * SUM_WARPS, v, slow);
        }
#pragma unroll
        for (int i = 0; i < SUM_LANE; i++)
            x[r][i] = sum_value(sums.sum, group, 0.0f, exact_mul(x[r][i], grad_scale), m[r][i], v[i]);
    }
}

// The values of 8 elements that a pass squares: columns `col` to `col` + 7 of a row, of which `held` exist.
template <class Rule, class Weights, class M, class V, class Grads>
__device__ __forceinline__ void sum_values(const StepArguments& step, const SumArguments& sums, const SumTensor& tensor,
                                           const SumColumns& columns, const unsigned char* tables, float grad_scale,
                                           int64_t row, int64_t col, int held, float* x) {
    float p[8] = {}, g[8], m[8] = {}, v[8] = {}, slow[8] = {}, root[8];
    const int64_t element = tensor.offset + row * tensor.cols + col;
    const bool decays = sums.sum == SUM_STEP && !Rule::DECOUPLED;
    const Hyper& group = step.group[tensor.group];
    if (sums.sum != SUM_WEIGHTS) {
        sum_load<Grads>(step.grads, nullptr, element, held, g);
#pragma unroll
        for (int i = 0; i < 8; i++) g[i] = exact_mul(g[i], grad_scale);
    }
    if (sums.sum == SUM_WEIGHTS || decays) sum_load<Weights>(step.weights, nullptr, element, held, p);
    if (sum_reads_m(sums.sum)) sum_load<M>(step.m, tables, element, held, m);
    if (sum_reads_v(sums.sum)) {
        if constexpr (Rule::BY_ROWS) {
            sum_numbers<Rule, V>(sums, tensor, columns, row, v, slow);
        } else {
            sum_load<V>(step.v, tables + M::TABLE_BYTES, element, held, v);
            if (Rule::KEEPS_SLOW) sum_load<M>(step.slow, tables, element, held, slow);
        }
    }
    if (Rule::SCALED && sums.sum == SUM_STEP) {
        Hyper hyper = sums.scaled ? hyper_scaled(group, step.factor[tensor.offset / TILE_ELEMENTS]) : group;
        if (decays) {
#pragma unroll
            for (int i = 0; i < 8; i++) g[i] = exact_fma(hyper.decay, p[i], g[i]), p[i] = 0.0f;
            hyper.decay = 0.0f;
        }
        EachElement<Rule>::update(hyper, p, g, m, v, slow, root, 8);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = p[i];
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = sum_value(sums.sum, group, p[i], g[i], m[i], v[i]);
    }
}

// Adds the squares of a row's 8 values, of which `held` exist, to those of their columns, and stores the row's sum over
// the panel.
__device__ __forceinline__ void sum_row(const float* x, int held, float* column, float* part) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SUM_LANE; i++) {
        if (i >= held) continue;
        sum = exact_fma(x[i], x[i], sum);
        column[i] = exact_fma(x[i], x[i], column[i]);
    }
    for (int half = 16; half > 0; half /= 2) sum = exact_add(sum, __shfl_down_sync(0xffffffffu, sum, half));
    if (threadIdx.x % 32 == 0) *part = sum;
}

template <class Rule, class Weights, class M, class V, class Grads>
__device__ __forceinline__ void sums_run(const StepArguments& step, const SumArguments& sums) {
    const float grad_scale = *step.grad_scale;
    if (!is_finite(grad_scale)) return;  // the step changes nothing
    extern __shared__ __align__(128) unsigned char step_memory[];
    __shared__ float columns[SUM_WARPS][SUM_COLS];
    tables_prepare<M, V>(step, step_memory);
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int64_t t = 0;
    for (int64_t b = sums.first_block + blockIdx.x; b < sums.first_block + sums.blocks; b += gridDim.x) {
        while (t + 1 < sums.tensors && sums.tensor[t + 1].block <= b) t++;
        const SumTensor tensor = sums.tensor[t];
        const int64_t slab = (b - tensor.block) / tensor.panels, panel = (b - tensor.block) % tensor.panels;
        const int64_t col = panel * SUM_COLS + lane * SUM_LANE, end = sum_end(tensor, slab);
        const int held = tensor.cols - col >= SUM_LANE ? SUM_LANE : tensor.cols > col ? (int)(tensor.cols - col) : 0;
        const bool even = (tensor.cols | tensor.offset) % SUM_LANE == 0 && sums.sum != SUM_STEP;
        const SumColumns numbers = sum_columns<Rule, V>(sums, tensor, col, held);
        float* parts = sums.parts + tensor.row_parts + panel * tensor.rows;
        float column[SUM_LANE] = {};
        int64_t row = slab * SUM_ROWS + warp;
        for (; even && row + (SUM_AHEAD - 1) * SUM_WARPS < end; row += SUM_AHEAD * SUM_WARPS) {
            float x[SUM_AHEAD][SUM_LANE];
            if (held > 0) {
                sum_values_of_rows<Rule, Weights, M, V, Grads>(step, sums, tensor, numbers, step_memory, grad_scale,
                                                               row, col, x);
            }
#pragma unroll
            for (int r = 0; r < SUM_AHEAD; r++) sum_row(x[r], held, column, parts + row + r * SUM_WARPS);
        }
        for (; row < end; row += SUM_WARPS) {
            float x[SUM_LANE] = {};
            if (held > 0) {
                sum_values<Rule, Weights, M, V, Grads>(step, sums, tensor, numbers, step_memory, grad_scale, row, col,
                                                       held, x);
            }
            sum_row(x, held, column, parts + row);
        }
        if (!sum_has_columns(sums.sum)) continue;
#pragma unroll
        for (int i = 0; i < SUM_LANE; i++) columns[warp][lane * SUM_LANE + i] = column[i];
        __syncthreads();
        const int64_t its = panel * SUM_COLS + threadIdx.x;
        float sum = columns[0][threadIdx.x];
        for (int w = 1; w < SUM_WARPS; w++) sum = exact_add(sum, columns[w][threadIdx.x]);
        if (its < tensor.cols) sums.parts[tensor.col_parts + slab * tensor.cols + its] = sum;
        __syncthreads();
    }
}

// grid: any, block: 256; shared memory: the moments' tables; deterministic.
template <class Rule, class Weights, class M, class V, class Copy, class Grads>
__global__ void __launch_bounds__(32 * SUM_WARPS)
    optim_sums_kernel(const __grid_constant__ StepArguments step, const __grid_constant__ SumArguments sums) {
    sums_run<Rule, Weights, M, V, Grads>(step, sums);
}

// The same with arguments from device memory, as optim_replayed_kernel.
template <class Rule, class Weights, class M, class V, class Copy, class Grads>
__global__ void __launch_bounds__(32 * SUM_WARPS)
    optim_sums_replayed_kernel(const StepArguments* step, const __grid_constant__ SumArguments sums) {
    sums_run<Rule, Weights, M, V, Grads>(*step, sums);
}
#endif
