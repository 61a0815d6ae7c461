// Formats that are a list of levels with no simple formula: dynamic exponents, NF4, softsign companding. A code is the
// index of a level; decoding looks it up.
// Encoding looks up a cell, of which there are two kinds:
//     EVEN     y is rounded to a multiple of 2^-21 and cells are 2^-CELL_BITS wide, for maps whose bounds lie no closer
//              to each other: 6 + y is a float in [4, 8) whose mantissa's upper bits are the cell
//     by size  the upper bits of |y| as a float are the cell: sign, BINADE_BITS of exponent (|y| below
//              2^(1 - 2^BINADE_BITS) counts as that) and CELL_BITS of mantissa; exact
// The bounds between levels lie so that a cell holds at most one, and its word is made such that adding the rest of the
// float's bits carries into the code when y has passed the bound. Two operations, no branch, and exactly the search of
// a sorted table of bounds. A bound is the middle of two levels, and y on it takes the upper level (torchao's rule).
//
// Stochastic: of the nearest level and its neighbour on y's side, the latter with probability (y - near) / (far -
// near).
//
// A Map is a struct of BITS, DTYPE, ZERO, SIGNED, EVEN, CELL_BITS, BINADE_BITS and, on the host, level(code) and
// bound(code), the least y of code + 1, both as double.
#pragma once
#include "blocks.cuh"

EMBED_SOURCE

// bits of a float >= 2^-126 next to x > 0: the smallest float that is not below it, or strictly above.
OPTIM_HOST inline uint32_t bits_above(double x, bool strictly) {
    uint32_t bits = float_bits((float)x);
    double rounded = (double)bits_float(bits);
    return bits + (rounded < x || (strictly && rounded == x) ? 1u : 0u);
}

template <class Map>
struct Levels {
    static constexpr int BITS = Map::BITS, ZERO = Map::ZERO, COUNT = 1 << BITS;
    static constexpr bool SIGNED = Map::SIGNED, EVEN = Map::EVEN;
    static constexpr int KEY_BITS = (EVEN ? 2 : Map::BINADE_BITS) + Map::CELL_BITS;
    static constexpr int REST_BITS = (EVEN ? 21 : 23) - Map::CELL_BITS;
    static constexpr int CELLS = (SIGNED && !EVEN ? 2 : 1) << KEY_BITS;
    static constexpr const char* DTYPE = Map::DTYPE;
    static constexpr float LARGEST = 1.0f, UNITS = 1.0f, MIDDLE = 6.0f;
    static constexpr bool ROOT = false, HARDWARE = false, IN_UPPER_BITS = ON_GPU, PAIRS = ON_GPU && BITS == 4;
    static constexpr uint32_t BIAS = 0;

    // Levels of a byte's two codes of 4 bits lie side by side, so that one look-up decodes both.
    struct Table {
        float level[COUNT];
        FloatPair pair[BITS == 4 ? 256 : 2];
        uint32_t cell[CELLS];
    };

    // The code of y by search: how many bounds lie at or below it. Without a sign this is a v, whose zero is no code.
    static OPTIM_HOST int search(double y) {
        int code = 0;
        for (int step = COUNT / 2; step > 0; step /= 2) code += y >= Map::bound(code + step - 1) ? step : 0;
        return code == 0 && !Map::SIGNED ? 1 : code;
    }

    // The y that a nearest code is the nearest of.
    static OPTIM_HOST double seen(float x, float inverse) {
        return EVEN ? (double)exact_fma(x, inverse, MIDDLE) - (double)MIDDLE : (double)exact_mul(x, inverse);
    }

    // The word of the cell whose first float, 6 + y or |y|, has the bits `start`.
    static OPTIM_HOST uint32_t cell_word(uint32_t start, bool negative) {
        double sign = negative ? -1.0 : 1.0, zero = EVEN ? (double)MIDDLE : 0.0;
        uint32_t size = 1u << REST_BITS, end = start + size - 1, rest = size;
        int code = search(sign * ((double)bits_float(start) - zero));
        int last = search(sign * ((double)bits_float(end) - zero));
        // Negative values are counted down, as the complement of a count up.
        if (code != last) {
            double bound = Map::bound(negative ? last : code);
            rest = bits_above(EVEN ? bound + zero : fabs(bound), negative) - start;
        }
        uint32_t count = negative ? (uint32_t)(COUNT - 1 - code) : (uint32_t)code;
        return (count << (32 - BITS)) + ((size - rest - start) << (32 - BITS - REST_BITS));
    }

    static OPTIM_HOST void fill(Table* table) {
        for (int code = 0; code < COUNT; code++) table->level[code] = (float)Map::level(code);
        for (int byte = 0; byte < (BITS == 4 ? 256 : 0); byte++) {
            table->pair[byte] = {table->level[byte >> 4], table->level[byte & 15]};
        }
        uint32_t lowest = EVEN ? 129u << 23 : (128u - (1u << Map::BINADE_BITS)) << 23;
        for (int negative = 0; negative < (SIGNED && !EVEN ? 2 : 1); negative++) {
            for (uint32_t key = 0; key < 1u << KEY_BITS; key++) {
                uint32_t start = lowest + (key << REST_BITS);
                uint32_t index = (start >> REST_BITS ^ (negative ? ~0u : 0u)) & (CELLS - 1);
                table->cell[index] = cell_word(start, negative != 0);
            }
        }
    }

    static OPTIM_INLINE float decode(const Table* table, uint32_t code, float scale) {
        return exact_mul(table->level[code], scale);
    }

    static OPTIM_INLINE void decode_pair(const Table* table, uint32_t byte, float scale, float* x) {
        FloatPair pair = table->pair[byte];
        x[0] = exact_mul(pair.first, scale);
        x[1] = exact_mul(pair.second, scale);
    }

    static OPTIM_INLINE uint32_t cell_at(const Table* table, uint32_t byte) {
        return *(const uint32_t*)((const char*)table->cell + byte);
    }

    // The code of the nearest level in the upper bits of a word, with anything below.
    static OPTIM_INLINE uint32_t nearest_word(const Table* table, float x, float inverse, int lowest) {
        constexpr uint32_t mask = (uint32_t)(CELLS - 1) << 2;  // four times the index of the cell
        uint32_t bits, negative = 0;
        if constexpr (EVEN) {
            bits = float_bits(one_nan(exact_fma(x, inverse, MIDDLE)));
        } else {
            const float least = 1.0f / (float)(1u << ((1 << Map::BINADE_BITS) - 1));
            bits = float_bits(exact_max(exact_abs(exact_mul(x, inverse)), least));
            if (SIGNED) negative = (uint32_t)((int)float_bits(x) >> 31);
        }
        uint32_t word = cell_at(table, (bits >> (REST_BITS - 2) ^ negative) & mask) + (bits << (32 - BITS - REST_BITS));
        uint32_t least_word = (uint32_t)lowest << (32 - BITS);
        word ^= negative;
        return SIGNED && lowest > 0 && word < least_word ? least_word : word;
    }

    static OPTIM_INLINE uint32_t nearest(const Table* table, float x, float inverse, int lowest) {
        return nearest_word(table, x, inverse, lowest) >> (32 - BITS);
    }

    static OPTIM_INLINE uint32_t stochastic_word(const Table* table, float x, float inverse, uint32_t noise,
                                                 int lowest) {
        return stochastic(table, x, inverse, noise, lowest) << (32 - BITS);
    }

    static OPTIM_INLINE uint32_t stochastic(const Table* table, float x, float inverse, uint32_t noise, int lowest) {
        float y = exact_mul(x, inverse);
        int code = (int)nearest(table, x, inverse, 0);
        float near = table->level[code], away = exact_add(y, -near);
        int other = code + (away > 0.0f ? 1 : -1);
        other = other < 0 ? 0 : other > COUNT - 1 ? COUNT - 1 : other;
        float gap = exact_abs(exact_add(table->level[other], -near));
        code = exact_abs(away) > exact_mul(gap, noise_uniform(noise)) ? other : code;
        return (uint32_t)(code > lowest ? code : lowest);
    }
};
