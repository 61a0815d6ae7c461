// The kernel of the passes that add up squares before the step of a rule that reads rows (rows.cuh has the formulas and
// the order of the sums). Threads read memory directly. A thread block takes a slab of 128 rows by a panel of 256
// columns. Each warp takes every eighth row, and each lane 8 columns of it, which lie in one run of 8 elements or, if a
// row does not begin at a multiple of 8, in two. If they lie in one run, a warp loads SUM_AHEAD rows before it adds
// them up, so that all these loads are in flight together, and adds up the lanes of all rows together. SUM_STEP, which
// needs too many registers for that, and other shapes go row by row. Each pass has its own code in the rule's kernel. A
// sum of squares takes 5 instructions an element and came's residual 16, less time than a GPU needs to read the
// elements.
#pragma once
#include "kernel.cuh"

EMBED_SOURCE

#ifdef __CUDACC__
constexpr int SUM_AHEAD = 8;  // rows

// Returns true if a rule has this pass.
template <class Rule>
OPTIM_INLINE constexpr bool sum_serves(Sum sum) {
    constexpr RowRule rule = Rule::ROWS;
    constexpr bool factored = rule == ROWS_ADAFACTOR || rule == ROWS_CAME;
    return sum == SUM_SQUARES     ? rule == ROWS_ADAM_MINI
           : sum == SUM_DIRECTION ? rule == ROWS_RMNP || rule == ROWS_NORMUON_LITE
           : sum == SUM_RESIDUAL  ? rule == ROWS_CAME
           : sum == SUM_WEIGHTS   ? rule == ROWS_ADAFACTOR && Rule::SCALED
           : sum == SUM_STEP      ? Rule::SCALED
                                  : factored;
}

// Returns the address of an array's number for `element` of a tensor.
__device__ __forceinline__ char* sum_at(const StreamInfo& info, void* base, int64_t element) {
    const uint64_t number = (uint64_t)element / info.run;
    return (char*)base + (info.bits < 8 ? number * info.bits / 8 : number * (info.bits / 8));
}

// Loads 8 elements of a tensor, whose arrays are `whole`, from `element` on, a multiple of 8.
template <class Storage>
__device__ __forceinline__ void sum_load_run(const Streams& whole, const void* table, int64_t element, float* x) {
    constexpr StreamInfo codes = Storage::STREAM[0], extra = Storage::STREAM[1], more = Storage::STREAM[2];
    if constexpr (Storage::HAS_SPANS) {
        Streams streams = tile_at(codes, extra, more, whole, element / TILE_ELEMENTS);
        streams.table = table;
        Storage::template get<8>(streams, (int)(element % TILE_ELEMENTS), x, NoiseKey{});
    } else {
        const Streams streams = {sum_at(codes, whole.codes, element), sum_at(extra, whole.extra, element), table,
                                 sum_at(more, whole.more, element)};
        Storage::template get<8>(streams, 0, x, NoiseKey{});
    }
}

// Loads 8 elements of a tensor from `element` on, any number; `held` of them lie in the row, and the others become 0.
template <class Storage>
__device__ __forceinline__ void sum_load(const Streams& whole, const void* table, int64_t element, int held, float* x) {
    const int shift = (int)(element % 8);
    if (shift == 0) return sum_load_run<Storage>(whole, table, element, x);
    float wide[16];
    sum_load_run<Storage>(whole, table, element - shift, wide);
    if (shift + held > 8) sum_load_run<Storage>(whole, table, element - shift + 8, wide + 8);
    for (int i = 0; i < 8; i++) x[i] = i < held ? wide[shift + i] : 0.0f;
}

// The numbers of a lane's 8 columns, which every row needs; `slow` are came's second numbers.
struct SumColumns {
    float v[SUM_LANE], slow[SUM_LANE];
};

// Reads these numbers for a pass that needs them; otherwise they are 0.
template <Sum SUM, class Rule, class V>
__device__ __forceinline__ SumColumns sum_columns(const SumArguments& sums, const SumTensor& tensor, int64_t col,
                                                  int held) {
    SumColumns columns = {};
    if constexpr (Rule::BY_ROWS && is_by_columns(V::STREAM[1].span) && sum_reads_v(SUM)) {
        const float* its = sums.numbers + tensor.ready + ready_rows(tensor.rows);
        const int64_t second = ready_pair(tensor.rows, tensor.cols);
        constexpr bool pairs = Rule::PAIRS && SUM == SUM_STEP;
        if (held == SUM_LANE) {
            ready_load(its, (uint32_t)col, columns.v, SUM_LANE);
            if (pairs) ready_load(its + second, (uint32_t)col, columns.slow, SUM_LANE);
        } else {
#pragma unroll
            for (int i = 0; i < SUM_LANE; i++) {
                const uint32_t place = ready_place((uint32_t)col + i);
                if (i < held) columns.v[i] = its[place];
                if (i < held && pairs) columns.slow[i] = its[second + place];
            }
        }
    }
    return columns;
}

// For a rule by rows, fills v with the numbers of 8 elements of a row, and `slow` with came's second numbers.
template <Sum SUM, class Rule, class V>
__device__ __forceinline__ void sum_numbers(const SumArguments& sums, const SumTensor& tensor,
                                            const SumColumns& columns, int64_t row, float* v, float* slow) {
    constexpr bool second = Rule::PAIRS && SUM == SUM_STEP;
    const float* its = sums.numbers + tensor.ready + row;
    const float first = its[0], other = second ? its[ready_pair(tensor.rows, tensor.cols)] : 0.0f;
#pragma unroll
    for (int i = 0; i < SUM_LANE; i++) {
        v[i] = is_by_columns(V::STREAM[1].span) ? exact_mul(first, columns.v[i]) : first;
        if (second) slow[i] = exact_mul(other, columns.slow[i]);
    }
}

// Loads a lane's 8 columns of SUM_AHEAD rows, SUM_WARPS apart.
template <class Storage>
__device__ __forceinline__ void sum_load_rows(const Streams& whole, const void* table, int64_t element, int64_t cols,
                                              float (&x)[SUM_AHEAD][SUM_LANE]) {
#pragma unroll
    for (int r = 0; r < SUM_AHEAD; r++) sum_load_run<Storage>(whole, table, element + r * SUM_WARPS * cols, x[r]);
}

// Computes the values that a pass other than SUM_STEP squares, for SUM_AHEAD rows from `row` on. A lane's 8 elements
// lie in one run.
template <Sum SUM, class Rule, class Weights, class M, class V, class Grads>
__device__ __forceinline__ void sum_values_of_rows(const TileStreams& whole, const SumArguments& sums,
                                                   const SumTensor& tensor, const Hyper& hyper,
                                                   const SumColumns& columns, const unsigned char* tables,
                                                   float grad_scale, int64_t row, int64_t col,
                                                   float (&x)[SUM_AHEAD][SUM_LANE]) {
    const int64_t element = row * tensor.cols + col;
    if constexpr (SUM == SUM_WEIGHTS) return sum_load_rows<Weights>(whole.weights, nullptr, element, tensor.cols, x);
    float m[SUM_AHEAD][SUM_LANE] = {};
    sum_load_rows<Grads>(whole.grads, nullptr, element, tensor.cols, x);
    if constexpr (sum_reads_m(SUM)) sum_load_rows<M>(whole.m, tables, element, tensor.cols, m);
#pragma unroll
    for (int r = 0; r < SUM_AHEAD; r++) {
        float v[SUM_LANE] = {}, slow[SUM_LANE];
        if constexpr (Rule::BY_ROWS && sum_reads_v(SUM)) {
            sum_numbers<SUM, Rule, V>(sums, tensor, columns, row + r * SUM_WARPS, v, slow);
        }
#pragma unroll
        for (int i = 0; i < SUM_LANE; i++)
            x[r][i] = sum_value(SUM, hyper, 0.0f, exact_mul(x[r][i], grad_scale), m[r][i], v[i]);
    }
}

// Computes the values that a pass squares, for columns `col` to `col` + 7 of a row, of which `held` exist.
template <Sum SUM, class Rule, class Weights, class M, class V, class Grads>
__device__ __forceinline__ void sum_values(const StepArguments& step, const TileStreams& whole,
                                           const SumArguments& sums, const SumTensor& tensor, const SumColumns& columns,
                                           const unsigned char* tables, float grad_scale, int64_t row, int64_t col,
                                           int held, float* x) {
    float p[8] = {}, g[8], m[8] = {}, v[8] = {}, slow[8] = {}, root[8];
    const int64_t element = row * tensor.cols + col;
    constexpr bool decays = SUM == SUM_STEP && !Rule::DECOUPLED;
    const Hyper& group = step.group[tensor.group];
    if constexpr (SUM != SUM_WEIGHTS) {
        sum_load<Grads>(whole.grads, nullptr, element, held, g);
#pragma unroll
        for (int i = 0; i < 8; i++) g[i] = exact_mul(g[i], grad_scale);
    }
    if constexpr (SUM == SUM_WEIGHTS || decays) sum_load<Weights>(whole.weights, nullptr, element, held, p);
    if constexpr (sum_reads_m(SUM)) sum_load<M>(whole.m, tables, element, held, m);
    if constexpr (sum_reads_v(SUM) && Rule::BY_ROWS) {
        sum_numbers<SUM, Rule, V>(sums, tensor, columns, row, v, slow);
    } else if constexpr (sum_reads_v(SUM)) {
        sum_load<V>(whole.v, tables + M::TABLE_BYTES, element, held, v);
        if (Rule::KEEPS_SLOW) sum_load<M>(whole.slow, tables, element, held, slow);
    }
    if constexpr (SUM == SUM_STEP) {
        Hyper hyper = sums.by_rms ? hyper_scaled(group, step.factor[tensor.kept]) : group;
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
        for (int i = 0; i < 8; i++) x[i] = sum_value(SUM, group, p[i], g[i], m[i], v[i]);
    }
}

// Adds the squares of a row's 8 values to the sums of their columns, and returns the sum of the squares.
__device__ __forceinline__ float sum_squares(const float* x, int held, float* column) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SUM_LANE; i++) {
        if (i >= held) continue;
        sum = exact_fma(x[i], x[i], sum);
        column[i] = exact_fma(x[i], x[i], column[i]);
    }
    return sum;
}

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
// `whole` has the tensor's arrays.
template <Sum SUM, class Rule, class Weights, class M, class V, class Grads>
__device__ __forceinline__ void sum_block(const StepArguments& step, const TileStreams& whole, const SumArguments& sums,
                                          const SumTensor& tensor, const unsigned char* tables, float grad_scale,
                                          int64_t slab, int64_t panel, float* column) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t col = panel * SUM_COLS + lane * SUM_LANE, end = sum_end(tensor, slab);
    const int held = tensor.cols - col >= SUM_LANE ? SUM_LANE : tensor.cols > col ? (int)(tensor.cols - col) : 0;
    const bool even = tensor.cols % SUM_LANE == 0;
    const SumColumns numbers = sum_columns<SUM, Rule, V>(sums, tensor, col, held);
    const Hyper hyper = step.group[tensor.group];
    float* parts = sums.parts + tensor.row_parts + panel * tensor.rows;
    int64_t row = slab * SUM_ROWS + warp;
    if constexpr (SUM != SUM_STEP) {
        for (; even && row + (SUM_AHEAD - 1) * SUM_WARPS < end; row += SUM_AHEAD * SUM_WARPS) {
            float sum[SUM_AHEAD] = {};
            if (held > 0) {
                float x[SUM_AHEAD][SUM_LANE];
                sum_values_of_rows<SUM, Rule, Weights, M, V, Grads>(whole, sums, tensor, hyper, numbers, tables,
                                                                    grad_scale, row, col, x);
#pragma unroll
                for (int r = 0; r < SUM_AHEAD; r++) sum[r] = sum_squares(x[r], SUM_LANE, column);
            }
            constexpr int LANES = 32 / SUM_AHEAD;
            const float its = sum_lanes(sum);
            if (lane % LANES == 0) parts[row + lane / LANES * SUM_WARPS] = its;
        }
    }
    for (; row < end; row += SUM_WARPS) {
        float x[SUM_LANE] = {};
        if (held > 0) {
            sum_values<SUM, Rule, Weights, M, V, Grads>(step, whole, sums, tensor, numbers, tables, grad_scale, row,
                                                        col, held, x);
        }
        float sum[1] = {sum_squares(x, held, column)};
        const float its = sum_lanes(sum);
        if (lane == 0) parts[row] = its;
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
    if constexpr (!sum_serves<Rule>(SUM)) return;
    if (sums.sum != SUM) return;
    if constexpr (sum_reads_m(SUM)) {
        tables_prepare<M, V>(step, tables);
        __syncthreads();
    }
    int64_t t = 0, next = 0;
    for (int64_t b = sums.first_block + blockIdx.x; b < sums.first_block + sums.blocks; b += gridDim.x) {
        if (b >= next) sum_find(sums, b, &t, &next);
        const SumTensor tensor = sums.tensor[t];
        constexpr StepArrays arrays = StepLayout<Rule, Weights, M, V, Copy, Grads>::ARRAYS;
        const TileStreams whole = tile_streams(arrays, step, step.tiles[tensor.tile]);
        const uint32_t its = (uint32_t)(b - tensor.block), panels = (uint32_t)tensor.panels, slab = its / panels;
        float column[SUM_LANE] = {};
        sum_block<SUM, Rule, Weights, M, V, Grads>(step, whole, sums, tensor, tables, grad_scale, slab,
                                                   its - slab * panels, column);
        if constexpr (sum_has_columns(SUM)) {
            float* mine = &columns[threadIdx.x / 32][threadIdx.x % 32 * SUM_LANE];
#pragma unroll
            for (int i = 0; i < SUM_LANE; i += 4) *(float4*)&mine[i] = *(const float4*)&column[i];
            __syncthreads();
            const int64_t col = (int64_t)(its - slab * panels) * SUM_COLS + threadIdx.x;
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
