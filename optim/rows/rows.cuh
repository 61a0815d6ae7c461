// Rules that read rows, columns or whole tensors. Before the step, passes over the tensors add up squares. Each pass
// ends by turning its sums into a few fp32 numbers for each row, column or tensor (SettleParts, SettleTensors), which
// the step then reads in place of v. So these rules work with every format, rounding and noise of the step.
//
// With g the gradient, and a tensor of R x C (a vector is one row), the passes sum and leave the following:
//     SUM_SQUARES    rows of g^2                        adam-mini: v_i = v_i + one_minus_beta2 (mean - v_i)
//     SUM_DIRECTION  rows of u^2 (rules/rmnp.cuh)       rmnp: a_i = s / |u_i|, s = sqrt(max(1, R / C))
//                                                       normuon-lite: v_i as above, o_i = u_i / sqrt(v_i), and
//                                                       a_i = s sqrt(R) / |o| / sqrt(v_i)
//     SUM_MOMENTS    rows and columns of g^2            adafactor, came: r_i and c_j as v_i;
//                                                       a_i = sqrt(mean r) / sqrt(r_i), b_j = 1 / sqrt(c_j)
//     SUM_UPDATE     all of (a_i b_j g)^2               adafactor, came: a_i = a_i / max(1, RMS / d), d: --clip-update
//     SUM_RESIDUAL   rows, columns of (a_i b_j g - m)^2   came: as SUM_MOMENTS with beta3 and 1e-16 more
//     SUM_MOMENTUM   all of (a_i b_j m)^2              adafactor8bit, came8bit: as SUM_UPDATE
//     SUM_WEIGHTS    all of p^2                         adafactor: a factor max(--eps2, RMS) of the step's update
//     SUM_STEP       all of the update for lr 1         every rule, by --limit-growth: limit() below
// For a vector, r_i / mean r is 1 and c_j is a v of each element: as in the papers, a vector is not factored.
//
// The order of each sum is fixed. A panel is 256 columns, a slab is 128 rows.
//     row      in a panel, lane l of 32 adds its columns 8 l .. 8 l + 7 in order, each by one fused operation; lane l
//              then takes lane l + 16, l + 8, l + 4, l + 2 and l + 1; last the panels are added in order
//     column   in a slab, number w of 8 adds rows w, w + 8, ... in order; then the 8 are added in order, then the slabs
//     tensor   number l of 1024 adds rows l, l + 1024, ... in order; then l takes l + 512, l + 256, ..., l + 1
// Sums belong to whole tensors, so a tensor is never cut between GPUs (optim_slice), and no bit depends on the device,
// the launch or the shards. In return, the embedding, 31 % of GPT-2 124M and 5 % of 1558M, has one owner.
//
// Bytes a parameter, besides the step's: a pass reads g (2 or 4 bytes), and m or p if its formula has them. With bf16
// gradients and an m of 8 bits, adam-mini reads 2 bytes, rmnp and normuon-lite 3, adafactor 4 (its passes read no m),
// came 7, and --limit-growth all that the step loads. Besides the states, memory holds partial sums: 4/256 bytes a
// parameter for rows and 4/128 for columns.
#pragma once
#include "../formats/bf16.cuh"
#include "../formats/fp32.cuh"
#include "../formats/spans.cuh"
#include "../rules/hyper.cuh"

EMBED_SOURCE

constexpr int SUM_ROWS = 128, SUM_COLS = 256, SUM_WARPS = 8, SUM_LANE = 8, SETTLE_LANES = 1024;

enum Sum { SUM_SQUARES, SUM_DIRECTION, SUM_MOMENTS, SUM_UPDATE, SUM_RESIDUAL, SUM_MOMENTUM, SUM_WEIGHTS, SUM_STEP };

// A row says what a pass reads besides the gradient, what it makes, and which rules run it. SUM_UPDATE and
// SUM_MOMENTUM also need --clip-update, SUM_WEIGHTS --adafactor-lr, and SUM_STEP --limit-growth, which serves every
// rule.
struct SumInfo {
    unsigned rules;  // bit r: RowRule r has this pass
    bool reads_m, reads_v, has_columns;
    unsigned whole;  // bit r: for rule r, a number of the tensor follows from those of its rows
};

OPTIM_INLINE constexpr SumInfo sum_info(Sum sum) {
    constexpr unsigned lite = 1u << ROWS_NORMUON_LITE, came = 1u << ROWS_CAME, came8 = 1u << ROWS_CAME8,
                       adafactor = 1u << ROWS_ADAFACTOR, package = 1u << ROWS_ADAFACTOR8 | came8;
    constexpr SumInfo rows[] = {
        // rules, reads_m, reads_v, has_columns, whole
        {1u << ROWS_ADAM_MINI, false, false, false, 0},                                // SUM_SQUARES
        {1u << ROWS_RMNP | lite, true, false, false, lite},                            // SUM_DIRECTION
        {adafactor | came | package, false, false, true, adafactor | came | package},  // SUM_MOMENTS
        {adafactor | came, false, true, false, adafactor | came},                      // SUM_UPDATE
        {came | came8, true, true, true, came | came8},                                // SUM_RESIDUAL
        {package, true, true, false, package},                                         // SUM_MOMENTUM
        {adafactor | package, false, false, false, adafactor | package},               // SUM_WEIGHTS
        {~0u, true, true, false, ~0u},                                                 // SUM_STEP
    };
    return rows[sum];
}

// A tensor of a launch.
struct SumTensor {
    int64_t tile;  // number of its first tile in the launch's list
    int64_t kept;  // number of that tile in the weights' arrays
    int64_t rows, cols, panels, slabs;
    int64_t number, ready;         // where its numbers begin among the kept ones, and among those that the step reads
    int64_t row_parts, col_parts;  // where its partial sums begin
    int64_t block;                 // number in the launch of its first thread block, a pair of a slab and a panel
    int64_t settle, settles;       // number in the launch of its first row or column; how many it has
    int64_t norm;                  // index of its number for --limit-growth
    uint32_t group;                // of constants (Plan)
};

// Returns how many thread blocks of a pass a multiprocessor runs at a time. With more blocks, a thread has too few
// registers for the loads in flight: SUM_DIRECTION with an m of 4 bits is fastest with 2, the other passes with 3.
OPTIM_INLINE constexpr int sum_blocks(RowRule rule) {
    return rule == ROWS_RMNP || rule == ROWS_NORMUON_LITE ? 2 : 3;
}

// Returns the row after a slab's last one.
OPTIM_INLINE int64_t sum_end(const SumTensor& tensor, int64_t slab) {
    const int64_t end = (slab + 1) * SUM_ROWS;
    return end < tensor.rows ? end : tensor.rows;
}

struct SumArguments {
    const SumTensor* tensor;  // (tensors) all or some of a launch's tensors
    int64_t tensors, blocks;
    int64_t first_block;  // of the first tensor
    Sum sum;
    float* parts;  // partial sums: at row_parts (panels, rows), at col_parts (slabs, cols)
};

// Each element of a tensor reads the number of its row, or the product of the numbers of its row and its column. The
// step reads a column's number for each element, so these numbers lie in the order in which a warp loads them. Of
// READY_COLS columns, each of 32 threads has 16, which it loads four at a time. The fours that the threads load at the
// same time are adjacent, so a load takes four lines of 128 bytes instead of 16. The numbers of the rows come first,
// padded to a whole line.
constexpr int READY_ROWS = 32, READY_COLS = 512;

OPTIM_INLINE constexpr int64_t ready_rows(int64_t rows) {
    return (rows + READY_ROWS - 1) / READY_ROWS * READY_ROWS;
}

// Returns how many numbers the step reads for a tensor's rows and columns, padding included.
OPTIM_INLINE constexpr int64_t ready_pair(int64_t rows, int64_t cols) {
    return ready_rows(rows) + (cols + READY_COLS - 1) / READY_COLS * READY_COLS;
}

// Returns the place of a column's number among those of the columns.
OPTIM_INLINE constexpr uint32_t ready_place(uint32_t col) {
    return col / READY_COLS * READY_COLS + col % 16 / 4 * (READY_COLS / 4) + col % READY_COLS / 16 * 4 + col % 4;
}

OPTIM_INLINE float number_at(Span span, const float* numbers, int64_t rows, int64_t row, int64_t col) {
    return is_by_columns(span) ? exact_mul(numbers[row], numbers[ready_rows(rows) + ready_place((uint32_t)col)])
                               : numbers[row];
}

// Loads the numbers of n columns (8 or 16) from `col` on, a multiple of n. `columns` are those of the tensor.
OPTIM_INLINE void ready_load(const float* columns, uint32_t col, float* x, int n) {
    const float* at = columns + ready_place(col);
    OPTIM_UNROLL
    for (int i = 0; i < n; i += 4) {
        const Packed<32, 4> four = load_value<Packed<32, 4>>(at, i * (READY_COLS / 4));
        OPTIM_UNROLL
        for (int k = 0; k < 4; k++) x[i + k] = bits_float(four.word[k]);
    }
}

// An update finds the numbers of its tile's rows and columns here.
struct RowInput {
    const float* numbers;  // those that the step reads, of all tensors of the launch
    const SpanTile* tile;
};

// Begins to load the numbers of n elements, or came's second numbers: they are x times the returned factor, by which
// numbers_finish multiplies x. A GPU's thread does other work while the loads are in flight.
OPTIM_INLINE float numbers_start(Span span, const RowInput& rows, int first, float* x, int n, bool second) {
    const SpanTile tile = *rows.tile;
    const float* numbers = rows.numbers + tile.at + (second ? ready_pair(tile.rows, tile.cols) : 0);
    SpanWalk walk = span_start(tile, first);
    const bool one_row = walk.row < tile.rows && walk.col + (uint32_t)n <= tile.cols;  // true for most runs
    float row = 1.0f;
    if (ON_GPU && one_row && (!is_by_columns(span) || walk.col % (uint32_t)n == 0)) {
        row = numbers[walk.row];
        if (is_by_columns(span)) ready_load(numbers + ready_rows(tile.rows), walk.col, x, n);
        OPTIM_UNROLL
        for (int i = 0; i < n && !is_by_columns(span); i++) x[i] = 1.0f;
    } else {
        OPTIM_UNROLL
        for (int i = 0; i < n; i++) {
            x[i] = walk.row < tile.rows ? number_at(span, numbers, tile.rows, walk.row, walk.col) : 0.0f;
            span_advance(tile, &walk);
        }
    }
    return row;
}

// Multiplies x by the factor that numbers_start returned. All lanes of a warp call it.
OPTIM_INLINE void numbers_finish(float row, float* x, int n) {
#ifdef __CUDA_ARCH__
    __syncwarp();  // keeps the compiler from waiting for the numbers before it loads anything else
#endif
    OPTIM_UNROLL
    for (int i = 0; i < n; i++) x[i] = exact_mul(row, x[i]);
}

// Returns the span of a rule's numbers.
OPTIM_INLINE constexpr Span numbers_span(RowRule rule) {
    return rule == ROWS_RMNP || rule == ROWS_NORMUON_LITE      ? SPAN_SCALES
           : rule == ROWS_ADAFACTOR || rule == ROWS_ADAFACTOR8 ? SPAN_FACTORS
           : rule == ROWS_CAME || rule == ROWS_CAME8           ? SPAN_PAIRS
                                                               : SPAN_ROWS;
}

// Returns the number of an element that a pass squares; for SUM_STEP use the rule's update instead.
OPTIM_INLINE float sum_value(Sum sum, RowRule rule, const Hyper& hyper, float p, float g, float m, float v) {
    if (sum == SUM_WEIGHTS) return p;
    if (sum == SUM_UPDATE) return exact_mul(g, v);
    if (sum == SUM_MOMENTUM) return exact_mul(average(m, g, hyper.one_minus_beta1), v);
    if (sum == SUM_RESIDUAL && rule == ROWS_CAME8) {
        return exact_mul(exact_add(g, -average(m, g, hyper.one_minus_beta1)), v);
    }
    if (sum == SUM_RESIDUAL) {
        const float u = exact_mul(g, v);
        return exact_add(u, -average(m, u, hyper.one_minus_beta1));
    }
    if (sum == SUM_DIRECTION) return nesterov(hyper, g, average(m, g, hyper.one_minus_beta1));
    return g;
}

// The end of a pass calls one function for each row, column and tensor, and then another one for each row and tile.

struct SettleArguments {
    const SumTensor* tensor;   // (tensors)
    int64_t tensors, numbers;  // rows and columns, from number tensor[0].settle on
    const float* grad_scale;
    Sum sum;
    RowRule rule;
    float *parts, *kept, *ready;  // `kept` and `ready` are Streams::scales and new_scales of v
    float* factor;                // (tiles of the weights' arrays) factors of the step's update
    float* norms;                 // (tensors)
    bool by_rms;                  // `factor` holds the RMS of the weights (SUM_WEIGHTS)
    float one_minus_beta2, root2, one_minus_beta3, root3;
    float clip, growth, eps2;  // --clip-update, or infinity; --limit-growth; --eps2
    float eps;                 // the least mean of r, and the root of the least r and c: --eps1, or the package's --eps
    const float*
        changing;  // device memory: one_minus_beta2, root2 and root3 of a step in a CUDA graph; null: those above
};

constexpr float RESIDUAL_EPS = 1e-16f;

// Return the new average of a row or column, from a sum of squares; `inverse` is 1 over the count of the squares.
OPTIM_INLINE float row_moment(float v, float sum, float inverse, float one_minus_beta) {
    return canonical(exact_fma(one_minus_beta, exact_fma(sum, inverse, -v), v));
}

// The package's begins at 1.
OPTIM_INLINE float residual_moment(RowRule rule, float s, float sum, float inverse, float one_minus_beta) {
    if (is_package(rule)) return row_moment(s > 0.0f ? s : 1.0f, sum, inverse, one_minus_beta);
    return canonical(exact_fma(one_minus_beta, exact_add(exact_fma(sum, inverse, RESIDUAL_EPS), -s), s));
}

// Returns the number of a row or column whose root divides the update, at least eps^2. `second`: after SUM_RESIDUAL,
// where its second average lies; the package multiplies the two.
OPTIM_INLINE float divisor(const SettleArguments& a, int64_t at, int64_t second) {
    const float x = a.kept[a.sum == SUM_RESIDUAL ? second : at];
    const float both = is_package(a.rule) && a.sum == SUM_RESIDUAL ? exact_mul(a.kept[at], x) : x;
    return a.eps > 0.0f ? exact_max(both, exact_mul(a.eps, a.eps)) : both;
}

// Keeps a GPU's compiler from using a loaded number before all loads above are in flight. Lanes of a warp may be on
// different paths, rows and columns, so only the active lanes wait for each other.
OPTIM_INLINE void loads_begin() {
#ifdef __CUDA_ARCH__
    __syncwarp(__activemask());
#endif
}

// Adds up `count` partial sums, `stride` apart, in order.
OPTIM_INLINE float parts_sum(const float* part, int64_t count, int64_t stride) {
    constexpr int AHEAD = 16;  // this many are loaded before they are added up
    float sum = *part, next[AHEAD];
    int64_t left = count - 1;
    for (; left >= AHEAD; left -= AHEAD) {
        OPTIM_UNROLL
        for (int i = 0; i < AHEAD; i++) next[i] = *(part += stride);
        loads_begin();
        OPTIM_UNROLL
        for (int i = 0; i < AHEAD; i++) sum = exact_add(sum, next[i]);
    }
    OPTIM_UNROLL
    for (int i = 0; i < AHEAD - 1; i++) next[i] = *(part += i < left ? stride : 0);  // past the end: the last again
    loads_begin();
    OPTIM_UNROLL
    for (int i = 0; i < AHEAD - 1; i++) sum = i < left ? exact_add(sum, next[i]) : sum;
    return sum;
}

// Returns sqrt(max(1, R / C)), the factor that gives an update of rows of length 1 about the same size for every shape.
OPTIM_INLINE float shape_scale(const SumTensor& t) {
    return t.rows > t.cols ? exact_sqrt(exact_div((float)t.rows, (float)t.cols)) : 1.0f;
}

// Ends a pass for row i: stores its number, and returns its part of the tensor's sum.
OPTIM_INLINE float settle_row(const SettleArguments& a, const SumTensor& t, int64_t i) {
    const float sum = parts_sum(a.parts + t.row_parts + i, t.panels, t.rows), inverse = exact_div(1.0f, (float)t.cols);
    const int64_t at = t.number + i, second = at + t.rows + t.cols;
    if (a.sum == SUM_SQUARES) {
        a.ready[t.ready + i] = row_moment(a.kept[at], sum, inverse, a.one_minus_beta2);
    } else if (a.sum == SUM_MOMENTS) {
        return a.kept[at] = row_moment(a.kept[at], sum, inverse, a.one_minus_beta2);
    } else if (a.sum == SUM_RESIDUAL) {
        a.kept[second] = residual_moment(a.rule, a.kept[second], sum, inverse, a.one_minus_beta3);
        return divisor(a, at, second);
    } else if (a.sum == SUM_DIRECTION && a.rule == ROWS_NORMUON_LITE) {
        a.kept[at] = row_moment(a.kept[at], sum, inverse, a.one_minus_beta2);
        const float root = moment_root(a.kept[at]);
        return exact_div(exact_div(sum, root), root);
    } else if (a.sum == SUM_DIRECTION) {
        a.ready[t.ready + i] = sum > 0.0f ? exact_div(shape_scale(t), moment_root(sum)) : 0.0f;
    }
    return sum;
}

// Ends a pass for column j: stores its average and the number that the step reads.
OPTIM_INLINE void settle_column(const SettleArguments& a, const SumTensor& t, int64_t j) {
    const float sum = parts_sum(a.parts + t.col_parts + j, t.slabs, t.cols), inverse = exact_div(1.0f, (float)t.rows);
    const bool residual = a.sum == SUM_RESIDUAL, second = residual && !is_package(a.rule);
    const int64_t first = t.number + t.rows + j, at = first + (residual ? t.rows + t.cols : 0);
    const int64_t place = (second ? ready_pair(t.rows, t.cols) : 0) + ready_rows(t.rows) + ready_place((uint32_t)j);
    a.kept[at] = residual ? residual_moment(a.rule, a.kept[at], sum, inverse, a.one_minus_beta3)
                          : row_moment(a.kept[at], sum, inverse, a.one_minus_beta2);
    const float root = exact_mul(moment_root(divisor(a, first, at)), second ? a.root3 : residual ? 1.0f : a.root2);
    if (residual && t.rows == 1) {  // a vector has no confidence
        if (second) a.ready[t.ready + place] = 1.0f;
        return;
    }
    a.ready[t.ready + place] = exact_div(1.0f, root);
}

// Returns the factor of Fira's norm-growth limiter (arXiv 2410.01623), which cuts a norm above `growth` times the last
// one to that. If the last norm is near 0, as it is for a tensor whose gradients were 0, or the norm is not finite, the
// factor is 1.
OPTIM_INLINE float limit(float norm, float last, float growth) {
    const float most = exact_mul(growth, last);
    return is_finite(norm) && last > MIN_ROOT && norm > most ? exact_div(most, norm) : 1.0f;
}

// Returns the number of a tensor, from the sum over its rows.
OPTIM_INLINE float settle_tensor(const SettleArguments& a, const SumTensor& t, float sum) {
    const float elements = (float)(t.rows * t.cols);
    if (a.sum == SUM_MOMENTS || a.sum == SUM_RESIDUAL) {
        const float least = t.rows > 1 ? a.eps : exact_mul(a.eps, a.eps);  // a vector's r has no part in V
        return moment_root(exact_max(exact_div(sum, (float)t.rows), least));
    }
    if (a.sum == SUM_UPDATE || a.sum == SUM_MOMENTUM) {
        const float over = exact_div(exact_sqrt(exact_div(sum, elements)), a.clip);
        return over > 1.0f ? exact_div(1.0f, over) : 1.0f;
    }
    if (a.sum == SUM_WEIGHTS) return exact_max(exact_sqrt(exact_div(sum, elements)), a.eps2);
    if (a.sum == SUM_STEP) return limit(exact_sqrt(sum), a.norms[t.norm], a.growth);
    if (a.rule != ROWS_NORMUON_LITE || !(sum > 0.0f)) return 0.0f;
    return exact_mul(shape_scale(t), exact_div(exact_sqrt((float)t.rows), exact_sqrt(sum)));
}

// Applies the tensor's number `whole` to the number that the step reads for row i.
OPTIM_INLINE void settle_ready(const SettleArguments& a, const SumTensor& t, int64_t i, float whole) {
    const int64_t at = t.number + i, ready = t.ready + i;
    if (a.sum == SUM_RESIDUAL) {
        if (is_package(a.rule) && t.rows == 1) return;
        const int64_t pair = is_package(a.rule) ? 0 : ready_pair(t.rows, t.cols);
        a.ready[ready + pair] = exact_div(whole, moment_root(divisor(a, at, at + t.rows + t.cols)));
    } else if (a.sum == SUM_MOMENTS || (a.sum == SUM_DIRECTION && a.rule == ROWS_NORMUON_LITE)) {
        a.ready[ready] = exact_div(whole, moment_root(divisor(a, at, at)));
    } else if (a.sum == SUM_UPDATE || a.sum == SUM_MOMENTUM) {
        a.ready[ready] = exact_mul(a.ready[ready], whole);
    }
}

// Keeps the norm of a tensor's update, after the limit, for --limit-growth.
OPTIM_INLINE void settle_norm(const SettleArguments& a, const SumTensor& t, float sum, float whole) {
    const float norm = exact_sqrt(sum);
    if (a.sum == SUM_STEP && is_finite(norm)) a.norms[t.norm] = exact_mul(norm, whole);
}
