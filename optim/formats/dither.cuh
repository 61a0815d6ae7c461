// Subtractive dither: a block's number u is added before a code is rounded and taken away when it is decoded,
//     code = floor(y + u + 1/2),  y = code - u,  u uniform in (-1/2, 1/2), one for all elements of the block
// so the error is uniform within half a step whatever y is: no bias, and a variance of 1/12 of a step squared, where
// stochastic rounding, unbiased too, has up to 1/4. Moving averages do not stand still, as with rounding to nearest.
//
// Decoding comes at some later step, perhaps after a resume, so u is a function of what is then known: the bits of the
// block's stored scale, its place in the arena and the moment it belongs to, and neither the seed nor the step. From
// one step to the next the block's largest changes, and with it the scale and u. Scales are fp32 for that reason.
//
// u has 12 bits: y + u + 1/2 is below the largest level plus 1 even where y was rounded up, so that nothing saturates;
// what is decoded may lie half a step beyond the largest level. In v the least code is that of the least level above
// zero, and what it decodes to is above half a step. Cost on a GPU: one call of the generator for the 8 or 16 elements
// of a thread and a few operations; of an element at most one more than to nearest, and where there are two signs four.
//
// A format for it has
//     dither(x, inverse, u, lowest, zero)   as nearest of blocks.cuh; `zero`: what is zero must decode to zero, which
//                                           padding needs: a code that no level uses says so
//     undither(code, scale, u)              the inverse
// Formats whose levels are unequally far apart have none: a step there is as wide as the level it ends at, so the error
// would depend on the value again.
#pragma once
#include "elementwise.cuh"

EMBED_SOURCE

// Of the block whose first element is `first` from key.element on.
OPTIM_INLINE float dither_draw(const NoiseKey& key, int first, float scale) {
    const uint64_t constant = 0x6469746865723031ull;  // in place of a seed
    Noise noise = noise_draw({constant, float_bits(scale), key.stream, key.element}, first);
    return exact_add(bits_float(0x3f800400u + (noise.word[0] >> 20 << 11)), -1.5f);
}

// Codes of COUNT elements of one block, as block_put; and back.
template <class Format, int COUNT>
OPTIM_INLINE void dither_put(const Streams& streams, int first, const float* x, float inverse, float u,
                             const NoiseKey& key) {
    int lowest = key.stream == NOISE_V ? Format::ZERO + 1 : 0;
    Packed<Format::BITS, COUNT> packed = {};
    OPTIM_UNROLL
    for (int i = 0; i < COUNT; i++) {
        packed.add(i, Format::dither(x[i], inverse, u, lowest, key.stream != NOISE_V) - Format::BIAS);
    }
    store_value(streams.codes, first * Format::BITS / 8, packed);
}

template <class Format, int COUNT>
OPTIM_INLINE void dither_get(const Streams& streams, int first, float scale, float u, float* x) {
    auto packed = load_value<Packed<Format::BITS, COUNT>>(streams.codes, first * Format::BITS / 8);
    OPTIM_UNROLL
    for (int i = 0; i < COUNT; i++) x[i] = Format::undither(packed.get(i), scale, u);
}
