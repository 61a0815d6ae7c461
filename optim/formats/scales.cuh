// The scales of blocks (blocks.cuh) and of spans (spans.cuh), and the value limits that follow from them.
#pragma once
#include "elementwise.cuh"

EMBED_SOURCE

constexpr double SCALE_MAX = 4.25e37;  // below 2^125, so that the reciprocal is not subnormal

// The types of stored scales. ScaleE8m0 rounds up, so that no element of a block exceeds LARGEST.
struct ScaleFp32 {
    typedef float Code;
    static constexpr const char* DTYPE = "F32";
    static OPTIM_INLINE float encode(float scale) { return scale; }
    static OPTIM_INLINE float decode(float code) { return code; }
};

// A power of two, stored as fp32's exponent. Code 0 is zero, since no scale is below 2^-126.
struct ScaleE8m0 {
    typedef uint8_t Code;
    static constexpr const char* DTYPE = "F8_E8M0";
    static OPTIM_INLINE uint8_t encode(float scale) {
        uint32_t bits = float_bits(scale);
        return (uint8_t)((bits > 0x7f000000u ? 0x7f000000u : bits + 0x7fffffu) >> 23);
    }
    static OPTIM_INLINE float decode(uint8_t code) { return bits_float((uint32_t)code << 23); }
};

// The scale's ratio to an fp32 scale of the tile, which is 1 for the tile's largest scale:
//     second = the largest of the 2048 elements' scales
//     code = the ratio scale / second, rounded up to 3 bits of mantissa and 5 of exponent: 2^-32 (1 + 1/4) .. 1
//     scale = level(code) * second             0 for code 0, which only a block of zeros has
// The ratio is rounded up, so that no element exceeds the largest level; a scale is up to an eighth larger than it
// would be in fp32. The exponent has five bits, since v in the rows of rare tokens is easily below 2^-16 of their
// neighbours'. A block below 2^-32 of its tile's largest is stored with that scale, as if it were part of a longer
// block. This is for short blocks: fp32 scales would cost 1 bit an element for 32 elements and half a bit for 64; here
// they cost 0.27 and 0.14 bits.
struct ScaleDq8 {
    typedef uint8_t Code;
    static constexpr const char* DTYPE = "U8";
};

// Returns the limit to which a block's values are cut: the smallest of the format's MAX, 1.84e19 if roots are stored,
// and LARGEST times the largest scale.
template <class Format>
OPTIM_INLINE constexpr float block_max() {
    double limit = Format::ROOT && Format::MAX > 1.84e19 ? 1.84e19 : Format::MAX,
           max = SCALE_MAX * (double)Format::LARGEST;
    return (float)(limit < max ? limit : max);
}

// Returns absmax / LARGEST, correctly rounded (the tests try all mantissas) unless it is subnormal.
template <class Format>
OPTIM_INLINE float over_largest(float absmax) {
    if constexpr (Format::LARGEST == 1.0f) return absmax;
    constexpr float inverse = 1.0f / Format::LARGEST;
    float quotient = exact_mul(absmax, inverse);
    return exact_fma(exact_fma(-Format::LARGEST, quotient, absmax), inverse, quotient);
}

// The numbers that the elements of one block share while it is stored.
struct BlockScale {
    float scale, inverse;
};

template <class Format>
OPTIM_INLINE float scale_inverse(float scale) {
    float inverse = exact_reciprocal(scale);
    return Format::UNITS == 1.0f ? inverse : exact_mul(inverse, Format::UNITS);
}

// Returns the scale of a block, as stored, and its inverse; writes the stored scale to *code.
template <class Format, class Scale>
OPTIM_INLINE BlockScale block_scale(float absmax, typename Scale::Code* code) {
    absmax = exact_min(absmax, block_max<Format>());
    bool some = absmax > (Format::ROOT ? MIN_ROOT : 0.0f);
    *code = Scale::encode(some ? exact_max(over_largest<Format>(absmax), Format::UNITS * 1.17549435e-38f) : 0.0f);
    float scale = Scale::decode(*code);
    return {scale, some ? scale_inverse<Format>(scale) : 0.0f};
}

constexpr uint32_t DOUBLE_BASE = 0x3f800000u / (1u << 20) - 255u;  // code 255 is a ratio of 1

// Returns 1 / second, or 0 if second is 0.
OPTIM_INLINE float double_inverse(float second) {
    return second > 0.0f ? exact_reciprocal(second) : 0.0f;
}

// Returns the code of scale / second, rounded up, except that an excess which three roundings can cause does not count.
// The code is 0 for scale 0, otherwise 1 to 255.
OPTIM_INLINE uint32_t double_encode(float scale, float inverse) {
    uint32_t bits = float_bits(exact_min(exact_mul(scale, inverse), 1.0f));
    uint32_t code = (bits + 0xfffffu - 3u) >> 20;
    code = code > DOUBLE_BASE + 1u ? code - DOUBLE_BASE : 1u;
    return scale > 0.0f ? code : 0u;
}

template <class Format>
OPTIM_INLINE float double_decode(uint32_t code, float second) {
    float scale = exact_mul(bits_float((code + DOUBLE_BASE) << 20), second);
    return code > 0 ? exact_max(scale, Format::UNITS * 1.17549435e-38f) : 0.0f;
}

// Returns the scale of a block with largest value `absmax`, its inverse and its code. `second` is the tile's, and
// `inverse` double_inverse of it.
template <class Format>
OPTIM_INLINE BlockScale double_scale(float absmax, float second, float inverse, uint8_t* code) {
    float wanted;
    block_scale<Format, ScaleFp32>(absmax, &wanted);
    *code = (uint8_t)double_encode(wanted, inverse);
    float scale = double_decode<Format>(*code, second);
    return {scale, *code > 0 ? scale_inverse<Format>(scale) : 0.0f};
}
