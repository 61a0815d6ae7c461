// Storage with scales that reach further than a tile: one scale for each tensor, or rank-1 scales (lpmm, arXiv
// 2309.01507).
//     tensor    absmax = max |x| over the tensor
//     rank-1    absmax of element (i, j) of a matrix = min(max |x| of row i, max |x| of column j);
//               in a vector, absmax of each 128 elements = max |x|
// Scale and code follow from absmax as in blocks.cuh, which also says how zeros, NaN and infinity are stored. Weights
// that are updated in place have a power of two as scale (ScaleE8m0). So unchanged weights keep their codes while the
// largest weight stays in its binade, and fp8 products can read the codes in place (kernels/linear_fp8.cuh).
//
// A scale must be known before the first code is written, so a step takes two passes. First optim_measure_kernel
// (persistent.cuh) computes the update in registers and keeps only its maxima, in new_scales. Then the step loads with
// the maxima of the last step and stores with the next ones, which become the current ones at the end. Maxima do not
// round, so their order does not matter; they are integer atomics on the bits of non-negative floats. Cost: the first
// pass reads once more all that a step reads, for bf16 weights and 8-bit states 16 bytes a parameter in place of 10;
// rank-1 scales also take a reciprocal for each element. Use spans for weights that are operands of fp8 products, for
// study, and for states that others have scaled like this; blocks are faster and more precise.
//
// With a given scale ("@given") a step takes one pass. The caller of the library writes the inverse, which is what
// TransformerEngine calls the scale; a step takes 1 for 0, as at first. The step stores with it, cuts larger values to
// the largest level, and finds absmax, from which the caller may choose the next scale. With bf16 gradients, fp32
// states and an fp32 master, adamw moves 27 bytes a parameter: gradient 2, master, m and v 8 each, code 1. A scale that
// is measured first makes these 41, since gradient, master, m and v are read twice. A bf16 copy for the model adds 2 to
// both.
//
// Beside the codes, each tensor keeps the largest |x|, the scale (the factor of a code) and its inverse; or with rank-1
// the maxima of its rows and then of its columns, or of a vector's blocks.
#pragma once
#include "blocks.cuh"

EMBED_SOURCE

constexpr int SPAN_BLOCK = 128;    // of a vector
constexpr int TENSOR_NUMBERS = 3;  // absmax, scale, inverse

// The place of a tile among the numbers of its tensor. A vector is a matrix of rows of SPAN_BLOCK whose columns have no
// maxima.
struct alignas(16) SpanTile {
    int64_t at;           // index of the tensor's first number
    uint32_t rows, cols;  // of the tensor
    uint32_t row, col;    // of the tile's first element
    uint32_t columns;     // 1 if columns have maxima
    uint32_t begins;      // 1 if the tensor begins with this tile
};

// Sets maximum = max(maximum, absmax) atomically; NaN does not count.
OPTIM_INLINE void span_raise(float* maximum, float absmax) {
#ifdef __CUDA_ARCH__
    // Most tops do not exceed the current maximum. A stale read of it is never too large, so the test is safe.
    if (absmax > *(volatile const float*)maximum) atomicMax((int*)maximum, __float_as_int(absmax));
#else
    float seen;
    __atomic_load(maximum, &seen, __ATOMIC_RELAXED);
    while (absmax > seen) {
        if (__atomic_compare_exchange(maximum, &seen, &absmax, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) break;
    }
#endif
}

// The row and column of an element, for walking over a tensor.
struct SpanWalk {
    uint32_t row, col;
};

OPTIM_INLINE SpanWalk span_start(const SpanTile& tile, int first) {
    uint32_t col = tile.col + (uint32_t)first, rows = col / tile.cols;
    return {tile.row + rows, col - rows * tile.cols};
}

// Moves to the next element; returns true if it begins a row.
OPTIM_INLINE bool span_advance(const SpanTile& tile, SpanWalk* walk) {
    walk->col++;
    if (walk->col != tile.cols) return false;
    walk->col = 0;
    walk->row++;
    return true;
}

// Returns the absmax of an element, the largest magnitude that it can have; 0 in the padding.
OPTIM_INLINE float span_absmax(const SpanTile& tile, const SpanWalk& walk, const float* maxima) {
    if (walk.row >= tile.rows) return 0.0f;
    float absmax = maxima[tile.at + walk.row];
    return tile.columns ? exact_min(absmax, maxima[tile.at + tile.rows + walk.col]) : absmax;
}

template <class Format, class Scale>
OPTIM_INLINE BlockScale span_scale(float absmax) {
    typename Scale::Code code;
    return block_scale<Format, Scale>(absmax, &code);
}

// Scale is ScaleFp32 or ScaleE8m0; it says how the scale is rounded. The stored scale is fp32.
template <class Format_, Span SPAN, Rounding ROUNDING, class Scale = ScaleFp32>
struct Spans
    : TableStorage<StorageFunctions<Spans<Format_, SPAN, ROUNDING, Scale>>, typename Rounded<Format_, ROUNDING>::Type> {
    typedef typename Rounded<Format_, ROUNDING>::Type Format;
    typedef Spans<Format, SPAN, NEAREST, Scale> Nearest;
    static constexpr StreamInfo STREAM[3] = {{"", Format::DTYPE, Format::BITS, 1},
                                             {SPAN == SPAN_RANK1 ? ".maxima" : ".scales", "F32", 32, 1, false, SPAN}};
    static constexpr bool HAS_SPANS = SPAN != SPAN_GIVEN;  // a step stores with other scales than it loads with

    // Returns the scale of a tensor with these numbers.
    static OPTIM_INLINE BlockScale tensor_scale(const float* numbers) {
        if constexpr (SPAN == SPAN_GIVEN) {
            const float inverse = numbers[2] > 0.0f ? numbers[2] : 1.0f;
            return {exact_div(1.0f, inverse), inverse};
        } else {
            return span_scale<Format, Scale>(numbers[0]);
        }
    }

    template <int COUNT>
    static OPTIM_INLINE void get(const Streams& streams, int first, float* x, const NoiseKey&) {
        const SpanTile tile = *streams.span;
        const float* maxima = (const float*)streams.scales;
        if constexpr (SPAN != SPAN_RANK1) {
            block_get<Format, COUNT>(streams, first, tensor_scale(maxima + tile.at).scale, x, NoiseKey{});
        } else {
            const auto* table = format_table<Format>(streams);
            auto packed = load_value<Packed<Format::BITS, COUNT>>(streams.codes, first * Format::BITS / 8);
            SpanWalk walk = span_start(tile, first);
            OPTIM_UNROLL
            for (int i = 0; i < COUNT; i++) {
                float scale = span_scale<Format, Scale>(span_absmax(tile, walk, maxima)).scale;
                x[i] = Format::decode(table, packed.get(i), scale);
                span_advance(tile, &walk);
            }
        }
    }

    // Stores elements that share one scale: that of the next absmax or, if it is given, the present one, and the next
    // absmax is raised here. The first thread of a tensor writes the scale for readers of the weights.
    template <int COUNT>
    static OPTIM_INLINE void put_tensor(const Streams& streams, int first, const float* x, const NoiseKey& key) {
        const SpanTile tile = *streams.span;
        constexpr bool GIVEN = SPAN == SPAN_GIVEN;
        float value[COUNT], absmax = GIVEN ? 0.0f : streams.new_scales[tile.at];
        BlockScale s = tensor_scale((GIVEN ? (const float*)streams.scales : streams.new_scales) + tile.at);
        if (GIVEN) measure(streams, first, x, COUNT);
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) value[i] = block_value<Format>(x[i]);
        block_clamp<Format, ROUNDING>(absmax, value, COUNT);
        const float inverse = block_inverse<Format, ROUNDING>(absmax, s.inverse);
        block_put<Format, ROUNDING, COUNT>(streams, first, value, inverse, key);
        if (!tile.begins || first > 0) return;
        streams.new_scales[tile.at + 1] = s.scale;
        streams.new_scales[tile.at + 2] = s.inverse;
    }

    // Stores elements that each have their own scale.
    template <int COUNT>
    static OPTIM_INLINE void put_rank1(const Streams& streams, int first, const float* x, const NoiseKey& key) {
        const auto* table = format_table<Format>(streams);
        int lowest = key.stream == NOISE_V ? Format::ZERO + 1 : 0;
        const SpanTile tile = *streams.span;
        SpanWalk walk = span_start(tile, first);
        Packed<Format::BITS, COUNT> packed = {};
        Noise noise = {};
        OPTIM_UNROLL
        for (int i = 0; i < COUNT; i++) {
            float value = block_value<Format>(x[i]), absmax = span_absmax(tile, walk, streams.new_scales);
            block_clamp<Format, ROUNDING>(absmax, &value, 1);
            const float inverse = block_inverse<Format, ROUNDING>(absmax, span_scale<Format, Scale>(absmax).inverse);
            if (ROUNDING == STOCHASTIC && i % NOISE_ELEMENTS == 0) noise = noise_draw(key, first + i);
            uint32_t code;
            if constexpr (ROUNDING == STOCHASTIC) {
                code = Format::stochastic(table, value, inverse, noise_lane(noise, i % NOISE_ELEMENTS), lowest);
            } else {
                code = Format::nearest(table, value, inverse, lowest);
            }
            packed.add(i, code);
            span_advance(tile, &walk);
        }
        store_value(streams.codes, first * Format::BITS / 8, packed);
    }

    template <int COUNT>
    static OPTIM_INLINE void put(const Streams& streams, int first, const float* x, const NoiseKey& key) {
        if constexpr (SPAN != SPAN_RANK1) {
            put_tensor<COUNT>(streams, first, x, key);
        } else {
            put_rank1<COUNT>(streams, first, x, key);
        }
    }

    // Raises the next maxima to include elements that are going to be stored. On a GPU all threads of a warp call it.
    static OPTIM_INLINE void measure(const Streams& streams, int first, const float* x, int n) {
        const SpanTile tile = *streams.span;
        float absmax = 0.0f;
        if constexpr (SPAN != SPAN_RANK1) {
            OPTIM_UNROLL
            for (int i = 0; i < n; i++) absmax = exact_max(exact_abs(block_value<Format>(x[i])), absmax);
#ifdef __CUDA_ARCH__
            absmax = neighbours_max<32, TILE_ELEMENTS>(absmax, NoiseKey{});
            if (threadIdx.x % 32 != 0) return;
#endif
            span_raise(&streams.new_scales[tile.at], absmax);
        } else {
            SpanWalk walk = span_start(tile, first);
            OPTIM_UNROLL
            for (int i = 0; i < n; i++) {
                if (walk.row >= tile.rows) continue;
                float size = exact_abs(block_value<Format>(x[i])), *row = &streams.new_scales[tile.at + walk.row];
                absmax = exact_max(size, absmax);
                if (tile.columns) span_raise(&streams.new_scales[tile.at + tile.rows + walk.col], size);
                bool over = span_advance(tile, &walk);
                if (over || i + 1 == n) span_raise(row, absmax);
                if (over) absmax = 0.0f;
            }
        }
    }
};
