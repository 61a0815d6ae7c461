// Formats whose levels have no simple formula: dynamic exponents, NF4, softsign companding. A code is the index of a
// level, and decoding looks the level up. On a GPU the table lies in shared memory in COPIES copies side by side, so
// that at most two lanes of a warp read the same bank: a look-up of 32 lanes takes one or two cycles, where a plain
// table took three and a half. With 4 bits, one look-up gives the pair of levels of a byte.
//
// Encoding to nearest looks up the cell of y. There are two kinds of cells:
//     EVEN     y is rounded to a multiple of 2^-21 and cells are 2^-CELL_BITS wide; 6 + y is a float in [4, 8), and
//              the upper bits of its mantissa are the cell. For maps whose bounds lie at least a cell apart
//     by size  the upper bits of |y| as a float are the cell: sign, BINADE_BITS of exponent (|y| below
//              2^(1 - 2^BINADE_BITS) counts as that) and CELL_BITS of mantissa; exact
// A cell holds at most one bound between levels. Its word is chosen so that adding the remaining bits of the float
// carries into the code if y has reached the bound. This takes two operations and no branch, and gives exactly the
// result of a search in a sorted table of bounds. A bound is the middle of two levels, and a y equal to it takes the
// upper level (torchao's rule).
//
// Stochastic: the code is floor(G(y) + noise). G is the code as a function of y, linear between neighbouring levels, so
// that y is rounded up with probability (y - below) / (above - below). Over many levels in a row, such as those of a
// decade, G is one straight line; it bends where the distance between levels changes. So a few hundred cells of y, each
// with at most one bend, describe it:
//     G(y) = start + slope y + bend max(y - from, 0)
// This takes one look-up without bank conflicts and three operations, and is exact to 1.5 of the noise's 65536ths.
// (Looking up the code instead would also need both neighbouring levels.) Maps with the same levels on both sides
// (MIRRORED) take |y| and apply the sign to several codes at a time.
//
// A Map derives from MapDefaults and has BITS, ZERO, SIGNED, EVEN, CELL_BITS, BINADE_BITS and, on the host, level(code)
// as double. To be stochastic it has MIN, the level above zero, and Cells.
#pragma once
#include "blocks.cuh"

EMBED_SOURCE

template <class Map>
struct MapDefaults {
    static constexpr bool MIRRORED = false, MINUS_ONE = false;  // MINUS_ONE: of MIRRORED maps, -1 is a level too

    // Returns the least y that is encoded as code + 1.
    static OPTIM_HOST double bound(int code) { return 0.5 * (Map::level(code) + Map::level(code + 1)); }
};

// Returns the bits of the smallest float that is not below x > 0 or, if `strictly`, that is above x. The float is at
// least 2^-126.
OPTIM_HOST inline uint32_t bits_above(double x, bool strictly) {
    uint32_t bits = float_bits((float)x);
    double rounded = (double)bits_float(bits);
    return bits + (rounded < x || (strictly && rounded == x) ? 1u : 0u);
}

// Returns the code of y by search: the number of bounds at or below y. A map without a sign serves v, which never has
// code 0.
template <class Map>
OPTIM_HOST int level_search(double y) {
    int code = 0;
    for (int step = (1 << Map::BITS) / 2; step > 0; step /= 2) code += y >= Map::bound(code + step - 1) ? step : 0;
    return code == 0 && !Map::SIGNED ? 1 : code;
}

// The table of levels, for both ways of rounding.
template <class Map, int COPIES>
struct LevelTable {
    static constexpr int BITS = Map::BITS, COUNT = 1 << BITS;
    struct Spread {
        float level[COUNT * COPIES];
    };
    float level[COUNT];
    typename Either<BITS == 8, Spread, PairTable>::Type spread;

    OPTIM_HOST void fill() {
        for (int code = 0; code < COUNT; code++) level[code] = (float)Map::level(code);
        if constexpr (BITS == 8) {
            for (int i = 0; i < COUNT * COPIES; i++) spread.level[i] = level[i / COPIES];
        } else {
            for (int byte = 0; byte < 256; byte++) spread.set(byte, level[byte >> 4], level[byte & 15]);
        }
    }

#ifdef __CUDACC__
    template <int N>
    __device__ __forceinline__ void decode(const Packed<BITS, N>& packed, float scale, float* x) const {
        if constexpr (BITS == 8) {
            const uint32_t copy = table_address(spread.level + threadIdx.x % COPIES);
#pragma unroll
            for (int i = 0; i < N; i++) {
                x[i] = exact_mul(table_load(table_at_byte<4 * COPIES>(copy, packed.word[i / 4], i % 4)), scale);
            }
        } else {
            spread.template decode<N>(packed.word, scale, x);
        }
    }
#endif
};

// The members that the formats of both ways of rounding share.
template <class Format, class Map>
struct LevelFormat : BlockFormat<Format> {
    static constexpr int BITS = Map::BITS, ZERO = Map::ZERO, COUNT = 1 << BITS;
    static constexpr bool SIGNED = Map::SIGNED, CROWDS_BANKS = !Map::EVEN && BITS == 8;
    static constexpr const char* DTYPE = "U8";
    static constexpr float LARGEST = 1.0f;

    template <class Table>
    static OPTIM_INLINE float decode(const Table* table, uint32_t code, float scale) {
        return exact_mul(table->list.level[code], scale);
    }

#ifdef __CUDA_ARCH__
    template <int N, class Table>
    static __device__ __forceinline__ void get(const Table* table, const Packed<BITS, N>& codes, float scale,
                                               float* x) {
        table->list.decode(codes, scale, x);
    }
#else
    // A recursion, since look-ups become no vectors, and -O2 would leave them in a loop.
    template <int N, int I = 0, class Table>
    static OPTIM_INLINE void get(const Table* table, const Packed<BITS, N>& codes, float scale, float* x) {
        x[I] = decode(table, codes.get(I), scale);
        if constexpr (I + 1 < N) get<N, I + 1>(table, codes, scale, x);
    }
#endif
};

template <class Map>
struct StochasticLevels;

template <class Map>
struct Levels : LevelFormat<Levels<Map>, Map> {
    static constexpr int BITS = Map::BITS, COUNT = 1 << BITS;
    static constexpr bool SIGNED = Map::SIGNED, EVEN = Map::EVEN;
    static constexpr int KEY_BITS = (EVEN ? 2 : Map::BINADE_BITS) + Map::CELL_BITS;
    static constexpr int REST_BITS = (EVEN ? 21 : 23) - Map::CELL_BITS;
    static constexpr int CELLS = (SIGNED && !EVEN ? 2 : 1) << KEY_BITS;
    static constexpr int COPIES = CELLS > 1024 ? 16 : 32;  // as many as fit beside the cells
    static constexpr float MIDDLE = 6.0f;
    typedef StochasticLevels<Map> Stochastic;

    struct Table {
        LevelTable<Map, COPIES> list;
        uint32_t cell[CELLS];
    };

    // Returns the word of the cell whose first float, 6 + y or |y|, has the bits `start`.
    static OPTIM_HOST uint32_t cell_word(uint32_t start, bool negative) {
        double sign = negative ? -1.0 : 1.0, zero = EVEN ? (double)MIDDLE : 0.0;
        uint32_t size = 1u << REST_BITS, end = start + size - 1, rest = size;
        int code = level_search<Map>(sign * ((double)bits_float(start) - zero));
        int last = level_search<Map>(sign * ((double)bits_float(end) - zero));
        // Negative values are counted down, as the complement of a count up.
        if (code != last) {
            double bound = Map::bound(negative ? last : code);
            rest = bits_above(EVEN ? bound + zero : fabs(bound), negative) - start;
        }
        uint32_t count = negative ? (uint32_t)(COUNT - 1 - code) : (uint32_t)code;
        return (count << (32 - BITS)) + ((size - rest - start) << (32 - BITS - REST_BITS));
    }

    static OPTIM_HOST void fill(Table* table) {
        table->list.fill();
        uint32_t lowest = EVEN ? 129u << 23 : (128u - (1u << Map::BINADE_BITS)) << 23;
        for (int negative = 0; negative < (SIGNED && !EVEN ? 2 : 1); negative++) {
            for (uint32_t key = 0; key < 1u << KEY_BITS; key++) {
                uint32_t start = lowest + (key << REST_BITS);
                uint32_t index = (start >> REST_BITS ^ (negative ? ~0u : 0u)) & (CELLS - 1);
                table->cell[index] = cell_word(start, negative != 0);
            }
        }
    }

    // Returns the word of the cell that the upper bits of a float select; a negative value has all bits inverted.
    // Without a sign no value lies outside of the cells, so the upper bits need no mask.
    static OPTIM_INLINE uint32_t cell_of(const Table* table, uint32_t bits) {
        constexpr bool cut = EVEN || SIGNED;
        constexpr uint32_t first = cut ? 0 : (128u - (1u << Map::BINADE_BITS)) << Map::CELL_BITS;
#ifdef __CUDA_ARCH__
        const uint32_t cells = table_address(table->cell);
        uint32_t word, at;
        if constexpr (cut) {
            at = table_at_shifted<REST_BITS - 2>(cells, bits & (uint32_t)(CELLS - 1) << REST_BITS);
        } else {
            at = table_at<4>(cells, bits >> REST_BITS);
        }
        asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(word) : "r"(at), "n"(-4 * (int)first));
        return word;
#else
        return table->cell[(cut ? bits >> REST_BITS & (uint32_t)(CELLS - 1) : bits >> REST_BITS) - first];
#endif
    }

    // Returns a word whose upper bits are the code of the nearest level; the lower bits are arbitrary.
    static OPTIM_INLINE uint32_t nearest_word(const Table* table, float x, float inverse, int lowest) {
        uint32_t bits, negative = 0;
        if constexpr (EVEN) {
            bits = float_bits(one_nan(exact_fma(x, inverse, MIDDLE)));
        } else {
            const float min = 1.0f / (float)(1u << ((1 << Map::BINADE_BITS) - 1));
            bits = float_bits(exact_max(exact_saturated(exact_abs(x), inverse, 0.0f), min));
            if (SIGNED) negative = (uint32_t)((int)float_bits(x) >> 31);
        }
        uint32_t word = cell_of(table, bits ^ negative) + (bits << (32 - BITS - REST_BITS));
        uint32_t min_word = (uint32_t)lowest << (32 - BITS);
        word ^= negative;
        return SIGNED && lowest > 0 && word < min_word ? min_word : word;
    }

    static OPTIM_INLINE uint32_t nearest(const Table* table, float x, float inverse, int lowest) {
        return nearest_word(table, x, inverse, lowest) >> (32 - BITS);
    }

    template <Rounding, int N>
    static OPTIM_INLINE void put(const Table* table, const float* x, float inverse, const Noise&, int lowest,
                                 Packed<BITS, N>* codes, uint32_t*) {
        uint32_t word[N];
        OPTIM_UNROLL
        for (int i = 0; i < N; i++) word[i] = nearest_word(table, x[i], inverse, lowest);
        codes->gather(word);
    }
};

// The cells of d in [0, 1]: the upper bits of the float SCALE d + OFFSET. EvenCells are N steps of the same width, by
// rounding to a whole number. FloatCells have BITS bits of mantissa, from exponent LOWEST on. No cell may hold two
// bends.
template <int N>
struct EvenCells {
    static constexpr bool EVEN = true;
    static constexpr int COUNT = N + 1, REST_BITS = 0;
    static constexpr uint32_t FIRST = 0x4b000000u;
    static constexpr float SCALE = (float)N, OFFSET = 8388608.0f;
};

template <int COUNT_, int BITS, int LOWEST, int QUARTERS, int SMALL>
struct FloatCells {
    static constexpr bool EVEN = false;
    static constexpr int COUNT = COUNT_, REST_BITS = 23 - BITS;
    static constexpr uint32_t FIRST = (uint32_t)LOWEST << BITS;
    static constexpr float SCALE = 0.25f * (float)QUARTERS, OFFSET = 1.0f / (float)(1 << SMALL);
};

// G in a cell, as a function of d: start + slope d + bend max(d - from, 0).
struct alignas(16) Line {
    float from, slope, start, bend;
};

// The table is looked up at d, a number that the hardware cuts to [0, 1] at no cost (NaN becomes 0):
//     |y| where MIRRORED;  y / 2 + 1/2 where there is another sign;  y less the least level in formats of v
// G is a float in [BASE, 2 BASE]. Its bits, shifted by SHIFT, have its integer from byte 2 on and its fraction, in the
// noise's 65536ths, below.
template <class Map>
struct StochasticLevels : LevelFormat<StochasticLevels<Map>, Map> {
    static constexpr int BITS = Map::BITS, ZERO = Map::ZERO, COUNT = 1 << BITS;
    static constexpr bool SIGNED = Map::SIGNED, MIRRORED = Map::MIRRORED;
    static constexpr int SHIFT = MIRRORED || BITS == 4 ? 0 : 1;
    static constexpr float BASE = SHIFT == 0 ? 128.0f : 256.0f;
    static constexpr float UNIT = SIGNED && !MIRRORED ? 0.5f : 1.0f;
    static constexpr float ORIGIN = MIRRORED ? 0.0f : SIGNED ? 0.5f : -Map::MIN;
    static constexpr int FIRST_CODE = MIRRORED ? ZERO : 0;
    typedef typename Map::Cells Cells;

    // On a GPU a line lies in 8 copies side by side, one for each of the 8 lanes that are served at a time.
    struct Table {
        LevelTable<Map, 16> list;
        Line line[Cells::COUNT * 8];
    };

    static OPTIM_HOST double d_of(int code) { return Map::level(code) * (double)UNIT + (double)ORIGIN; }

    // The levels at which G bends: their distances to the level below and to the one above differ.
    struct Bends {
        int count, code[COUNT + 1];
        double at[COUNT + 1], slope[COUNT + 1];  // slope[i] holds from at[i] on
    };

    static OPTIM_HOST void find_bends(Bends* bends) {
        bends->count = 0;
        double before = -1.0;
        if (d_of(FIRST_CODE) > 0.0 && SIGNED) {  // values below the lowest level become that
            bends->code[0] = FIRST_CODE, bends->at[0] = 0.0, bends->slope[0] = before = 0.0;
            bends->count = 1;
        }
        for (int code = FIRST_CODE; code < COUNT; code++) {
            bool last = Map::level(code) == 1.0;
            double slope = last ? 0.0 : 1.0 / (d_of(code + 1) - d_of(code));
            if (fabs(slope - before) > 1e-4 * before) {
                int i = bends->count++;
                bends->code[i] = code, bends->at[i] = d_of(code), bends->slope[i] = slope;
            }
            before = slope;
            if (last) break;
        }
        // The distances between levels are rounded, so the slope over many levels is computed from its ends.
        for (int i = 0; i + 1 < bends->count; i++) {
            bends->slope[i] = (bends->code[i + 1] - bends->code[i]) / (bends->at[i + 1] - bends->at[i]);
        }
    }

    static OPTIM_INLINE float line_at(const Line& line, float d) {
        return exact_fma(line.bend, exact_saturated(d, 1.0f, -line.from), exact_fma(line.slope, d, line.start));
    }

    // The exact line: start + slope d from `low` to `high`. Its float version must be exact to the last bit at d =
    // `pinned`, and not below the exact line at d = `min`, unless these are below 0.
    struct Wanted {
        double slope, start, low, high, pinned, min;
    };

    // Returns by how much a line exceeds the exact one at d.
    static OPTIM_HOST double excess(const Line& line, const Wanted& wanted, double d) {
        return (double)line_at(line, (float)d) - (wanted.slope * d + wanted.start);
    }

    // Returns the float line nearest to the exact one, among those with about its slope and start.
    static OPTIM_HOST Line best_line(Line line, const Wanted& wanted) {
        Line best = line;
        double min = 1e30;
        for (int i = -40; i <= 40; i++) {
            line.slope = bits_float(float_bits((float)wanted.slope) + (uint32_t)(wanted.slope == 0.0 ? 0 : i));
            double off = (double)line.slope - wanted.slope;
            float first = (float)(wanted.start - off * 0.5 * (wanted.low + wanted.high));
            for (int j = -1; j <= 1; j++) {
                line.start = bits_float(float_bits(first) + (uint32_t)j);
                double at = (double)line.start - wanted.start;
                double error = fmax(fabs(off * wanted.low + at), fabs(off * wanted.high + at));
                if (wanted.pinned >= 0.0 && fabs(excess(line, wanted, wanted.pinned)) > 1e-9) error += 1.0;
                if (wanted.min >= 0.0 && excess(line, wanted, wanted.min) < -1e-9) error += 1.0;
                if (error < min) min = error, best = line;
            }
        }
        return best;
    }

    static OPTIM_HOST double cell_begin(int cell) {
        double f = Cells::EVEN ? 8388608.0 + cell - 0.5  // rounded to nearest
                               : (double)bits_float((Cells::FIRST + (uint32_t)cell) << Cells::REST_BITS);
        return (f - (double)Cells::OFFSET) / (double)Cells::SCALE;
    }

    static OPTIM_HOST Line make_line(const Bends* bends, int cell) {
        double low = cell_begin(cell), high = cell_begin(cell + 1);
        int i = 0;
        while (i + 1 < bends->count && bends->at[i + 1] <= low + 1e-12) i++;
        bool bent = i + 1 < bends->count && bends->at[i + 1] < high - 1e-12;
        double end = bent ? bends->at[i + 1] : high, zero = (double)ORIGIN, largest = d_of(COUNT - 1);
        Wanted wanted = {bends->slope[i], 0.0, fmax(low, 0.0), fmax(low, end), -1.0, -1.0};
        wanted.start = (double)BASE + bends->code[i] - FIRST_CODE - wanted.slope * bends->at[i];
        double min = d_of(ZERO + 1);
        if (SIGNED && wanted.low <= zero && zero <= end) wanted.pinned = zero;
        if (wanted.low <= largest && largest <= end) wanted.pinned = largest;
        if (wanted.low <= min && min <= end) wanted.min = min;
        Line line = {2.0f, 0.0f, 0.0f, 0.0f};
        if (bent) line.from = (float)end;
        line = best_line(line, wanted);
        if (bent) line.bend = (float)(bends->slope[i + 1] - (double)line.slope);
        return line;
    }

    static OPTIM_HOST void fill(Table* table) {
        table->list.fill();
        Bends bends;
        find_bends(&bends);
        for (int i = 0; i < Cells::COUNT * 8; i++) table->line[i] = make_line(&bends, i / 8);
    }

#ifdef __CUDACC__
    // Loads the line at `address` less the bytes of the cells below the first one.
    static __device__ __forceinline__ Line line_load(uint32_t address) {
        Line line;
        asm("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4 + %5];"
            : "=f"(line.from), "=f"(line.slope), "=f"(line.start), "=f"(line.bend)
            : "r"(address), "n"(Cells::EVEN ? 0 : -(int)Cells::FIRST * 128));
        return line;
    }
#endif

    // Returns a word with the integer of G plus noise from byte 2 on, and the fraction below it.
    static OPTIM_INLINE uint32_t word(const Table* table, float x, float inverse, uint32_t noise, int lowest) {
        float d = exact_saturated(MIRRORED ? exact_abs(x) : x, exact_mul(inverse, UNIT), ORIGIN);
        if (SIGNED && lowest > 0) d = exact_max(d, Map::MIN * UNIT + ORIGIN);
        uint32_t cell = float_bits(exact_fma(d, Cells::SCALE, Cells::OFFSET)) >> Cells::REST_BITS;
#ifdef __CUDA_ARCH__
        constexpr uint32_t before = Cells::EVEN ? Cells::FIRST * 128u : 0;
        const uint32_t copy = table_address(table->line + threadIdx.x % 8, before);
        const Line line = line_load(table_at<128>(copy, cell));
#else
        const Line line = table->line[(cell - Cells::FIRST) * 8];
#endif
        return (float_bits(line_at(line, d)) << SHIFT) + noise;
    }

    static OPTIM_INLINE uint32_t stochastic(const Table* table, float x, float inverse, uint32_t noise, int lowest) {
        uint32_t k = word(table, x, inverse, noise, lowest) >> 16 & (uint32_t)(COUNT - 1);
        if (!MIRRORED) return k;
        if (sign_bits(x) == 0) return (uint32_t)ZERO + k;
        return (uint32_t)ZERO - (k > (uint32_t)ZERO ? (uint32_t)ZERO : k);
    }

#ifdef __CUDA_ARCH__
    // Returns byte 2 of four words, or with SIGN four bytes that are all ones where a word is negative.
    template <bool SIGN>
    static __device__ __forceinline__ uint32_t bytes(const uint32_t* w) {
        uint32_t low, high;
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(low) : "r"(w[0]), "r"(w[1]), "n"(SIGN ? 0xfb : 0x62));
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(high) : "r"(w[2]), "r"(w[3]), "n"(SIGN ? 0xfb : 0x62));
        return __byte_perm(low, high, 0x5410);
    }

    // Stores ZERO + k or ZERO - k, the latter not below 0. All bits of ZERO but the highest are set, so nothing carries
    // out of a code.
    template <Rounding ROUNDING, int N>
    static __device__ __forceinline__ void put(const Table* table, const float* x, float inverse, const Noise& noise,
                                               int lowest, Packed<BITS, N>* packed, uint32_t*) {
        static_assert(ROUNDING == STOCHASTIC, "only the CPU rounds these to nearest");
        static_assert(!MIRRORED || BITS == 8, "4 bits have room for the cells of both signs");
        constexpr uint32_t zero = 0x7f7f7f7fu;
        uint32_t all[N], sign[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            all[i] = word(table, x[i], inverse, noise_lane(noise, i), lowest);
            sign[i] = __float_as_uint(x[i]);
        }
        if constexpr (BITS == 4) {
            packed->template gather_bytes<2>(all);
        } else {
#pragma unroll
            for (int w = 0; w < N / 4; w++) {
                uint32_t k = bytes<false>(all + w * 4);
                if constexpr (MIRRORED) {
                    uint32_t negative = bytes<true>(sign + w * 4);
                    if constexpr (!Map::MINUS_ONE) k -= (k & negative & ~zero) >> (BITS - 1);
                    k = (k ^ (negative & zero)) + (~negative & zero);
                }
                packed->word[w] = k;
            }
        }
    }
#endif
};
