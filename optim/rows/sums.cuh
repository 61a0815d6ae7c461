// The kernel of the passes that add up squares before the step of a rule that reads rows (rows.cuh has the formulas and
// the order of the sums). Threads read memory directly. A thread block takes a slab of 128 rows by a panel of 256
// columns. Each warp takes every eighth row, and each lane 8 columns of it, which lie in one run of 8 elements or, if a
// row does not begin at a multiple of 8, in two. If they lie in one run, a warp loads SUM_AHEAD rows before it adds
// them up, so that all these loads are in flight together, and adds up the lanes of all rows together. SUM_STEP, which
// needs too many registers for that, and other shapes go row by row. Each pass has its own code in the rule's kernel. A
// sum of squares takes 5 instructions an element and came's residual 16, less time than a GPU needs to read the
// elements.
#pragma once
#include "../kernel.cuh"

EMBED_SOURCE

constexpr int SUM_AHEAD = 8;  // rows

// A pass reads these arrays of one tensor. `whole` has the tensor's arrays.
struct SumPass {
    const StepArguments& step;
    const SumArguments& sums;
    SumTensor tensor;
    TileStreams whole;
    float grad_scale;
};

// Returns the address of an array's number for `element` of a tensor.
OPTIM_INLINE char* sum_at(const StreamInfo& info, void* base, int64_t element) {
    const uint64_t number = (uint64_t)element / info.run;
    return (char*)base + (info.bits < 8 ? number * info.bits / 8 : number * (info.bits / 8));
}

// Loads 8 elements of a tensor, whose arrays are `whole`, from `element` on, a multiple of 8. rows.cu does the same for
// a row of the tables.
template <class Storage>
OPTIM_INLINE void sum_load_run(const Storage&, const Streams& whole, int64_t element, float* x) {
    constexpr StreamInfo codes = Storage::STREAM[0], scales = Storage::STREAM[1], third = Storage::STREAM[2];
    if constexpr (Storage::HAS_SPANS) {
        const Streams streams = tile_at(codes, scales, third, whole, element / TILE_ELEMENTS);
        Storage::template get<8>(streams, (int)(element % TILE_ELEMENTS), x, NoiseKey{});
    } else {
        const Streams streams = {sum_at(codes, whole.codes, element), sum_at(scales, whole.scales, element),
                                 whole.table, sum_at(third, whole.third, element)};
        Storage::template get<8>(streams, 0, x, NoiseKey{});
    }
}

// Loads 8 elements of N rows, SUM_WARPS apart, from `element` on, any number; `held` of them lie in the row, and the
// others become 0. Of several rows, all elements begin at a multiple of 8.
template <int N, class Storage>
OPTIM_INLINE void sum_load(const Storage& storage, const Streams& whole, int64_t element, int64_t cols, int held,
                           float (&x)[N][SUM_LANE]) {
    const int shift = N > 1 ? 0 : (int)(element % 8);
    if (shift == 0) {
        OPTIM_UNROLL
        for (int r = 0; r < N; r++) sum_load_run(storage, whole, element + r * SUM_WARPS * cols, x[r]);
        return;
    }
    float wide[16];
    sum_load_run(storage, whole, element - shift, wide);
    if (shift + held > 8) sum_load_run(storage, whole, element - shift + 8, wide + 8);
    for (int i = 0; i < 8; i++) x[0][i] = i < held ? wide[shift + i] : 0.0f;
}

// The numbers of a lane's 8 columns, which every row needs; `slow` are came's second numbers.
struct SumColumns {
    float v[SUM_LANE], slow[SUM_LANE];
};

// Reads these numbers for a pass that needs them; otherwise they are 0.
OPTIM_INLINE SumColumns sum_columns(Sum sum, RowRule rule, const SumPass& pass, int64_t col, int held) {
    SumColumns columns = {};
    if (!is_by_columns(numbers_span(rule)) || !sum_info(sum).reads_v) return columns;
    const float* numbers = pass.step.rows.numbers + pass.tensor.ready + ready_rows(pass.tensor.rows);
    const int64_t second = ready_pair(pass.tensor.rows, pass.tensor.cols);
    const bool pairs = rule == ROWS_CAME && sum == SUM_STEP;
    if (held == SUM_LANE) {
        ready_load(numbers, (uint32_t)col, columns.v, SUM_LANE);
        if (pairs) ready_load(numbers + second, (uint32_t)col, columns.slow, SUM_LANE);
        return columns;
    }
    OPTIM_UNROLL
    for (int i = 0; i < SUM_LANE; i++) {
        const uint32_t place = ready_place((uint32_t)col + i);
        if (i < held) columns.v[i] = numbers[place];
        if (i < held && pairs) columns.slow[i] = numbers[second + place];
    }
    return columns;
}

// Computes the values that a pass squares, for columns `col` to `col` + 7, of which `held` exist, of N rows from `row`
// on, SUM_WARPS apart.
template <int N, class Rule, class Weights, class Grads, class M, class V>
OPTIM_INLINE void sum_values(Sum sum, const Rule& rule, const Weights& weights, const Grads& grads, const M& state_m,
                             const V& state_v, const SumPass& pass, const SumColumns& columns, int64_t row, int64_t col,
                             int held, float (&x)[N][SUM_LANE]) {
    const SumTensor& tensor = pass.tensor;
    const int64_t element = row * tensor.cols + col;
    const bool by_rows = rule.rows != ROWS_NONE, decays = sum == SUM_STEP && !rule.decoupled;
    float g[N][SUM_LANE] = {}, m[N][SUM_LANE] = {}, v[N][SUM_LANE] = {}, slow[N][SUM_LANE] = {}, root[SUM_LANE];
    Hyper hyper = pass.step.group[tensor.group];
    OPTIM_UNROLL
    for (int r = 0; r < N; r++) {
        OPTIM_UNROLL
        for (int i = 0; i < SUM_LANE; i++) x[r][i] = 0.0f;
    }
    if (sum != SUM_WEIGHTS) sum_load<N>(grads, pass.whole.grads, element, tensor.cols, held, g);
    if (sum == SUM_WEIGHTS || decays) sum_load<N>(weights, pass.whole.weights, element, tensor.cols, held, x);
    if (sum_info(sum).reads_m) sum_load<N>(state_m, pass.whole.m, element, tensor.cols, held, m);
    if (sum_info(sum).reads_v && !by_rows) {
        sum_load<N>(state_v, pass.whole.v, element, tensor.cols, held, v);
        if (rule.keeps_slow) sum_load<N>(state_m, pass.whole.slow, element, tensor.cols, held, slow);
    }
    OPTIM_UNROLL
    for (int r = 0; r < N; r++) {
        const bool second = rule.pairs && sum == SUM_STEP;
        const bool reads = by_rows && sum_info(sum).reads_v, columned = is_by_columns(numbers_span(rule.rows));
        const float* numbers = reads ? pass.step.rows.numbers + tensor.ready + row + r * SUM_WARPS : nullptr;
        const float first = reads ? numbers[0] : 0.0f;
        const float other = reads && second ? numbers[ready_pair(tensor.rows, tensor.cols)] : 0.0f;
        OPTIM_UNROLL
        for (int i = 0; i < SUM_LANE; i++) {
            g[r][i] = exact_mul(g[r][i], pass.grad_scale);
            if (decays) g[r][i] = exact_fma(hyper.decay, x[r][i], g[r][i]), x[r][i] = 0.0f;
            if (reads) v[r][i] = columned ? exact_mul(first, columns.v[i]) : first;
            if (reads && second) slow[r][i] = exact_mul(other, columns.slow[i]);
            if (sum != SUM_STEP) x[r][i] = sum_value(sum, rule.rows, hyper, x[r][i], g[r][i], m[r][i], v[r][i]);
        }
        if (sum != SUM_STEP) continue;
        hyper.decay = 0.0f;
        rule.update(hyper, x[r], g[r], m[r], v[r], slow[r], root, SUM_LANE);
    }
}

// Adds the squares of a row's 8 values to the sums of their columns, and returns the sum of the squares.
OPTIM_INLINE float sum_squares(const float* x, int held, float* column) {
    float sum = 0.0f;
    OPTIM_UNROLL
    for (int i = 0; i < SUM_LANE; i++) {
        if (i >= held) continue;
        sum = exact_fma(x[i], x[i], sum);
        column[i] = exact_fma(x[i], x[i], column[i]);
    }
    return sum;
}

#ifdef __CUDACC__
// Adds up N rows over the lanes of a warp; lanes from r * 32 / N on get the sum of row r. While several rows are left,
// each half of the lanes continues with half of the rows. a + b is b + a, so the sums are those of the fixed order.
template <int N>
__device__ __forceinline__ float sum_lanes(float (&sum)[N]) {
    int rows = N;
#pragma unroll
    for (int half = 16; half > 0; half /= 2) {
        if (rows == 1) {
            sum[0] = exact_add(sum[0], __shfl_xor_sync(0xffffffffu, sum[0], half));
            continue;
        }
        rows /= 2;
        const bool upper = threadIdx.x & half;
#pragma unroll
        for (int r = 0; r < N / 2; r++) {
            if (r >= rows) continue;
            const float kept = upper ? sum[r + rows] : sum[r], given = upper ? sum[r] : sum[r + rows];
            sum[r] = exact_add(kept, __shfl_xor_sync(0xffffffffu, given, half));
        }
    }
    return sum[0];
}

// Sums a slab and panel: stores the partial sums of the rows, and leaves the sums of a thread's columns in `column`.
template <Sum SUM, class Rule, class Weights, class M, class V, class Grads>
__device__ __forceinline__ void sum_block(const SumPass& pass, int64_t slab, int64_t panel, float* column) {
    const SumTensor& tensor = pass.tensor;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t col = panel * SUM_COLS + lane * SUM_LANE, end = sum_end(tensor, slab);
    const int held = tensor.cols - col >= SUM_LANE ? SUM_LANE : tensor.cols > col ? (int)(tensor.cols - col) : 0;
    const SumColumns numbers = sum_columns(SUM, Rule::ROWS, pass, col, held);
    float* parts = pass.sums.parts + tensor.row_parts + panel * tensor.rows;
    const EachElement<Rule> rule;
    int64_t row = slab * SUM_ROWS + warp;
    if constexpr (SUM != SUM_STEP) {
        const bool even = tensor.cols % SUM_LANE == 0;
        for (; even && row + (SUM_AHEAD - 1) * SUM_WARPS < end; row += SUM_AHEAD * SUM_WARPS) {
            float sum[SUM_AHEAD] = {};
            if (held > 0) {
                float x[SUM_AHEAD][SUM_LANE];
                sum_values(SUM, rule, Weights(), Grads(), M(), V(), pass, numbers, row, col, held, x);
#pragma unroll
                for (int r = 0; r < SUM_AHEAD; r++) sum[r] = sum_squares(x[r], SUM_LANE, column);
            }
            constexpr int LANES = 32 / SUM_AHEAD;
            const float of_row = sum_lanes(sum);
            if (lane % LANES == 0) parts[row + lane / LANES * SUM_WARPS] = of_row;
        }
    }
    for (; row < end; row += SUM_WARPS) {
        float x[1][SUM_LANE] = {};
        if (held > 0) sum_values(SUM, rule, Weights(), Grads(), M(), V(), pass, numbers, row, col, held, x);
        float sum[1] = {sum_squares(x[0], held, column)};
        const float of_row = sum_lanes(sum);
        if (lane == 0) parts[row] = of_row;
    }
}

// Moves *t to the tensor of thread block b, looking at 32 tensors at a time, and sets *next to the block after that
// tensor's last one.
__device__ __forceinline__ void sum_find(const SumArguments& sums, int64_t b, int64_t* t, int64_t* next) {
    for (;;) {
        const int64_t at = *t + 1 + threadIdx.x % 32, none = sums.first_block + sums.blocks;
        const int64_t block = at < sums.tensors ? sums.tensor[at].block : none;
        const int before = __popc(__ballot_sync(0xffffffffu, block <= b));
        *next = __shfl_sync(0xffffffffu, block, before % 32);
        *t += before;
        if (before < 32) return;
    }
}

template <Sum SUM, class Rule, class Weights, class M, class V, class Copy, class Grads>
__device__ __forceinline__ void sums_pass(const StepArguments& step, const SumArguments& sums, float grad_scale,
                                          unsigned char* tables, float (&columns)[SUM_WARPS][SUM_COLS]) {
    constexpr bool by_option = SUM == SUM_WEIGHTS || SUM == SUM_STEP;
    if constexpr (!(sum_info(SUM).rules >> Rule::ROWS & 1) || (by_option && !Rule::SCALED)) return;
    if (sums.sum != SUM) return;
    if constexpr (sum_info(SUM).reads_m) {
        tables_prepare<M, V>(step, tables);
        __syncthreads();
    }
    int64_t t = 0, next = 0;
    for (int64_t b = sums.first_block + blockIdx.x; b < sums.first_block + sums.blocks; b += gridDim.x) {
        if (b >= next) sum_find(sums, b, &t, &next);
        const SumTensor tensor = sums.tensor[t];
        constexpr StepArrays arrays = StepLayout<Rule, Weights, M, V, Copy, Grads>::ARRAYS;
        SumPass pass = {step, sums, tensor, tile_streams(arrays, step, step.tiles[tensor.tile]), grad_scale};
        tables_set<M>(&pass.whole, tables);
        const uint32_t block = (uint32_t)(b - tensor.block), panels = (uint32_t)tensor.panels, slab = block / panels;
        float column[SUM_LANE] = {};
        sum_block<SUM, Rule, Weights, M, V, Grads>(pass, slab, block - slab * panels, column);
        if constexpr (sum_info(SUM).has_columns) {
            float* mine = &columns[threadIdx.x / 32][threadIdx.x % 32 * SUM_LANE];
#pragma unroll
            for (int i = 0; i < SUM_LANE; i += 4) *(float4*)&mine[i] = *(const float4*)&column[i];
            __syncthreads();
            const int64_t col = (int64_t)(block - slab * panels) * SUM_COLS + threadIdx.x;
            float sum = columns[0][threadIdx.x];
            for (int w = 1; w < SUM_WARPS; w++) sum = exact_add(sum, columns[w][threadIdx.x]);
            if (col < tensor.cols) sums.parts[tensor.col_parts + slab * tensor.cols + col] = sum;
            __syncthreads();
        }
    }
}

template <class Rule, class Weights, class M, class V, class Copy, class Grads>
__device__ __forceinline__ void sums_run(const StepArguments& step, const SumArguments& sums) {
    const float scale = *step.grad_scale;
    if (!is_finite(scale)) return;  // the step changes nothing
    extern __shared__ __align__(128) unsigned char step_memory[];
    __shared__ __align__(16) float columns[SUM_WARPS][SUM_COLS];
    sums_pass<SUM_SQUARES, Rule, Weights, M, V, Copy, Grads>(step, sums, scale, step_memory, columns);
    sums_pass<SUM_DIRECTION, Rule, Weights, M, V, Copy, Grads>(step, sums, scale, step_memory, columns);
    sums_pass<SUM_MOMENTS, Rule, Weights, M, V, Copy, Grads>(step, sums, scale, step_memory, columns);
    sums_pass<SUM_UPDATE, Rule, Weights, M, V, Copy, Grads>(step, sums, scale, step_memory, columns);
    sums_pass<SUM_RESIDUAL, Rule, Weights, M, V, Copy, Grads>(step, sums, scale, step_memory, columns);
    sums_pass<SUM_MOMENTUM, Rule, Weights, M, V, Copy, Grads>(step, sums, scale, step_memory, columns);
    sums_pass<SUM_WEIGHTS, Rule, Weights, M, V, Copy, Grads>(step, sums, scale, step_memory, columns);
    sums_pass<SUM_STEP, Rule, Weights, M, V, Copy, Grads>(step, sums, scale, step_memory, columns);
}

// grid: any, block: 256; shared memory: the moments' tables if the pass reads m; deterministic.
template <class Rule, class Weights, class M, class V, class Copy, class Grads>
__global__ void __launch_bounds__(32 * SUM_WARPS, sum_blocks(Rule::ROWS))
    optim_sums_kernel(const __grid_constant__ StepArguments step, const __grid_constant__ SumArguments sums) {
    sums_run<Rule, Weights, M, V, Copy, Grads>(step, sums);
}

// Does the same with arguments in device memory, as optim_replayed_kernel.
template <class Rule, class Weights, class M, class V, class Copy, class Grads>
__global__ void __launch_bounds__(32 * SUM_WARPS, sum_blocks(Rule::ROWS))
    optim_sums_replayed_kernel(const StepArguments* step, const __grid_constant__ SumArguments sums) {
    sums_run<Rule, Weights, M, V, Copy, Grads>(*step, sums);
}
#endif
