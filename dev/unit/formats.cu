// Tests of the block formats: every code survives decoding and encoding, encoding is the nearest level against a search
// of all levels, stochastic rounding is linear in value counted over all its noise, blocks and their scales, of which
// some are quantised themselves, and on a GPU what packs codes. What becomes of NaN and infinity, names and sizes are
// in tables.cu, whole steps in laws.cu. A new format is tested here by its rows in optim/table.cuh alone.
#include <float.h>

#include <algorithm>
#include <vector>

#include "../../optim/kernel.cuh"
#include "../../optim/table.cuh"
#include "steps.h"

// A format as function pointers, over a table of its own.
struct FormatCase {
    const char* name;
    int bits, zero;
    bool root, has_sign, even;  // even: codes are looked up in even cells
    float largest;
    float (*decode)(uint32_t code);  // in units of the scale; of the root where the root is stored
    uint32_t (*nearest)(float y, int lowest);
    uint32_t (*stochastic)(float y, uint32_t noise, int lowest);
};

template <class Format>
constexpr auto in_even_cells(int) -> decltype(Format::EVEN) {
    return Format::EVEN;
}
template <class Format>
constexpr bool in_even_cells(long) {
    return false;
}

template <class Format>
struct Case {
    typedef typename Rounded<Format, STOCHASTIC>::Type Noisy;

    template <class F>
    static const typename F::Table* table_of() {
        static typename F::Table made;
        static bool ready = false;
        if constexpr (HAS_TABLE<F>) {
            if (!ready) F::fill(&made);
        }
        ready = true;
        return &made;
    }
    static const typename Format::Table* table() { return table_of<Format>(); }

    static float decode(uint32_t code) {
        float x = Format::decode(table(), code, 1.0f);
        return Format::ROOT ? sqrtf(x) : x;
    }
    static uint32_t nearest(float y, int lowest) { return Format::nearest(table(), y, Format::UNITS, lowest); }
    static uint32_t stochastic(float y, uint32_t noise, int lowest) {
        return Noisy::stochastic(table_of<Noisy>(), y, Format::UNITS, noise, lowest);
    }
    static FormatCase get(const char* name, bool has_sign) {
        return {name,   Format::BITS, Format::ZERO, Format::ROOT, has_sign, in_even_cells<Format>(0), Format::LARGEST,
                decode, nearest,      stochastic};
    }
};

template <class Format, int BLOCK>
void check_blocks(Test* test, const char* name);
template <class Format, int BLOCK>
void check_double_blocks(Test* test, const char* name);
template <class Format>
void check_over_largest(Test* test, const char* name);

// Each format that the table has in blocks, once, and what is checked of each kind of block.
typedef void Check(Test* test, const char* name);
struct Cases {
    std::vector<FormatCase> formats;
    std::vector<std::pair<const char*, Check*>> scales, blocks, double_blocks;
};

static void check_rows(Test* test, const std::vector<std::pair<const char*, Check*>>& rows) {
    for (const auto& [name, its] : rows) its(test, name);
    expect(rows.size() > 10, "%zu rows", rows.size());
    note(test, "%zu rows", rows.size());
}

template <class Format, int USUAL>
static void add_blocks(Cases* cases, const char* name) {
    cases->formats.push_back(Case<Format>::get(name, Format::SIGNED));
    cases->scales.push_back({name, check_over_largest<Format>});
    cases->blocks.push_back({strdup(formatted("%s/%d", name, USUAL)), check_blocks<Format, USUAL>});
    cases->blocks.push_back({strdup(formatted("%s/512", name)), check_blocks<Format, 512>});
    cases->blocks.push_back({strdup(formatted("%s/2048", name)), check_blocks<Format, 2048>});
}

static Cases all_cases() {
    Cases all;
#define NO_CASE(...)
#define ADD_BLOCKS(NAME, NOTE, FORMAT, BLOCK) add_blocks<FORMAT, BLOCK>(&all, NAME);
#define ADD_DOUBLED(NAME, NOTE, FORMAT, BLOCK) \
    all.double_blocks.push_back({NAME "/" #BLOCK "@dq8", check_double_blocks<FORMAT, BLOCK>});
    OPTIM_STATES(NO_CASE, ADD_BLOCKS, ADD_DOUBLED)
    return all;
}

static const Cases every = all_cases();
static const std::vector<FormatCase>& cases = every.formats;

// The levels that are written, in order.
typedef std::vector<double> SortedLevels;

static SortedLevels levels_of(const FormatCase* format) {
    SortedLevels levels;
    for (uint32_t code = 0; code < 1u << format->bits; code++) {
        double x = (double)format->decode(code);
        // Not written: NaN, what lies beyond the largest, what rounds to another code. Minus zero is zero.
        if (fabs(x) <= (double)format->largest * 1.000001 && format->nearest((float)x, 0) == code &&
            !(x == 0.0 && (int)code != format->zero))
            levels.push_back(x);
    }
    std::sort(levels.begin(), levels.end());
    return levels;
}

TEST(formats_codes_survive) {
    // Codes that nothing is rounded to: soft8's 255, lin8's 255, fp8's NaN and infinities, minus zero, udyn8's zero. A
    // format that is not listed may have one.
    const std::tuple<const char*, int> known[] = {{"soft8", 1}, {"udyn8", 1}, {"lin8", 1},  {"e4m3", 3}, {"e5m2", 9},
                                                  {"e2m1", 1},  {"dyn8", 0},  {"sqrt8", 0}, {"de4", 0},  {"lin4", 0},
                                                  {"ulin8", 0}, {"sqrt4", 0}, {"nf4", 0}};
    for (const FormatCase& format : cases) {
        const SortedLevels levels = levels_of(&format);
        int least = 0, most = 1;
        for (const auto& [name, codes] : known) {
            if (is(name, format.name)) least = most = codes;
        }
        const int unused = (1 << format.bits) - (int)levels.size();
        expect(unused >= least && unused <= most, "%s has %zu codes in use", format.name, levels.size());
        for (size_t i = 1; i < levels.size(); i++)
            expect(levels[i] > levels[i - 1], "%s: level %zu is not above the one before", format.name, i);
        expect(fabs(levels.back() - (double)format.largest) <= 1e-6 * (double)format.largest,
               "%s: the largest level is %g", format.name, levels.back());
        if (format.zero >= 0) expect(format.decode((uint32_t)format.zero) == 0.0f, "%s: zero", format.name);
    }
}

// peers.cu compares all levels of the other published formats.
TEST(formats_levels_are_the_published_ones) {
    expect(Case<E4m3>::decode(1) == ldexpf(1.0f, -9) && Case<E4m3>::decode(0xfe) == -448.0f, "e4m3");
    expect(Case<E5m2>::decode(1) == ldexpf(1.0f, -16) && Case<E5m2>::decode(0x7b) == 57344.0f, "e5m2");
    const float e2m1[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (uint32_t c = 0; c < 8; c++) expect(Case<E2m1>::decode(c) == e2m1[c], "e2m1 %u", c);
}

// Fails unless y's code is that of the nearest level, to within `slack`. Returns whether all was well.
static void check_nearest(Test* test, const FormatCase* format, const SortedLevels& levels, float y, double slack) {
    const size_t above = (size_t)(std::upper_bound(levels.begin(), levels.end(), (double)y) - levels.begin());
    const size_t high = std::clamp<size_t>(above, 1, levels.size() - 1);
    double down = fabs((double)y - levels[high - 1]), up = fabs((double)y - levels[high]);
    uint32_t code = format->nearest(y, 0);
    double error = fabs((double)y - (double)format->decode(code));
    expect(error <= (down < up ? down : up) + slack, "%s: %a becomes %u, off by %g; its neighbours by %g and %g",
           format->name, (double)y, code, error, down, up);
}

// Uniform formats, whose levels are equally far apart, add 1/2 to y in fp32: a y that near to the middle may go either
// way.
static double nearest_slack(const FormatCase* format, const SortedLevels& levels, double y) {
    bool uniform = true;
    for (size_t i = 2; i < levels.size(); i++) {
        const double wider = (levels[i] - levels[i - 1]) - (levels[1] - levels[0]);
        uniform = uniform && fabs(wider) < 1e-5 * (double)format->largest;
    }
    // soft8's bounds are the middle in z, at most 1/500 of a step from the middle of the levels.
    if (strcmp(format->name, "soft8") == 0) return 2e-5 + 1e-4 * fabs(y);
    // In even cells y counts as the multiple of 2^-21 next to it; e2m1's y below 1 is rounded to 2^-23.
    if (format->even) return 0x1p-21;
    if (strcmp(format->name, "e2m1") == 0) return 0x1p-22;
    return uniform ? ldexp((double)format->largest, -15) : 0.0;
}

TEST(formats_nearest_against_search) {
    for (const FormatCase& format : cases) {
        const SortedLevels levels = levels_of(&format);
        // Next to each bound between two levels, and at it.
        for (size_t i = 1; i < levels.size(); i++) {
            float middle = (float)(0.5 * (levels[i - 1] + levels[i]));
            for (int step = -3; step <= 3; step++) {
                float y = bits_float(float_bits(middle) + (uint32_t)step);
                if (middle != 0.0f) check_nearest(test, &format, levels, y, nearest_slack(&format, levels, (double)y));
            }
        }
        // The upper 18 bits of every float up to the largest, of both signs.
        for (uint32_t bits = 0; bits < float_bits(format.largest); bits += 1u << 13) {
            float y = bits_float(bits + (bits * 2654435761u >> 20));
            if (y > format.largest) y = format.largest;
            check_nearest(test, &format, levels, y, nearest_slack(&format, levels, (double)y));
            if (format.has_sign) check_nearest(test, &format, levels, -y, nearest_slack(&format, levels, (double)y));
        }
        if (test->failures > 20) return;
    }
}

TEST(formats_ties) {
    // The upper level in tables and uniform formats, the even code in small floats.
    expect(Case<Dyn8>::nearest(0.996484375f, 0) == 255 && Case<Dyn8>::nearest(-0.9859375f, 0) == 1, "dyn8");
    expect(Case<Lin4>::nearest(1.5f / 16.0f, 0) == 1 && Case<Sqrt4>::nearest(2.5f / 16.0f, 0) == 2, "lin4, sqrt4");
    expect(Case<E4m3>::nearest(17.0f, 0) == Case<E4m3>::nearest(16.0f, 0), "e4m3 17 between 16 and 18");
    expect(Case<E4m3>::nearest(19.0f, 0) == Case<E4m3>::nearest(20.0f, 0), "e4m3 19 between 18 and 20");
}

TEST(formats_zero_and_the_largest_are_kept) {
    // Whatever the noise: zero, of which padding is made, and the levels at the ends, also when y lies a rounding
    // above.
    for (const FormatCase& format : cases) {
        uint32_t zero = format.nearest(0.0f, 0), top = format.nearest(format.largest, 0);
        for (float y : {format.largest * 1.0000002f, format.largest * 1.0000005f}) {
            expect(format.nearest(y, 0) == top, "%s: %g becomes %u", format.name, (double)y, format.nearest(y, 0));
            expect(format.stochastic(y, 0x8000, 0) == top, "%s: %g with noise", format.name, (double)y);
        }
        expect(format.decode(zero) == 0.0f || !format.has_sign, "%s: zero", format.name);
        for (uint32_t noise = 0; noise < 65536; noise++) {
            bool kept = true;
            if (format.zero >= 0) {
                kept = format.decode(format.stochastic(0.0f, noise, 0)) == 0.0f &&
                       format.decode(format.stochastic(-0.0f, noise, 0)) == 0.0f;
                if (!format.has_sign && format.zero == 0) kept = format.stochastic(0.0f, noise, 0) <= 1;
            }
            for (float y : {format.largest, format.largest * 1.0000001f, format.largest * 1.0000003f})
                kept = kept && format.stochastic(y, noise, 0) == top;
            expect(kept, "%s: noise %u: zero is %u and not %u, the largest not %u", format.name, noise,
                   format.stochastic(0.0f, noise, 0), zero, top);
            if (!kept) break;
        }
    }
}

TEST(formats_stochastic_counts) {
    // Over all 65536 noise values, the mean is y: within one and a half counts of 65536, of a gap, and the rounding of
    // y and of the gap in fp32. Two places in the gaps between neighbours, of 8 bits in every third; subnormals,
    // binades' borders and the ends are gaps too.
    double worst = 0.0;
    for (const FormatCase& format : cases) {
        const SortedLevels levels = levels_of(&format);
        size_t stride = format.bits == 8 ? 3 : 1;
        for (size_t i = 1; i < levels.size(); i += i < 12 || i + 12 > levels.size() ? 1 : stride) {
            double low = levels[i - 1], high = levels[i];
            for (int part = 1; part <= 2; part++) {
                float y = (float)(low + (high - low) * (part == 1 ? 0.0837 : 0.71));
                int up = 0;
                for (uint32_t noise = 0; noise < 65536; noise += 1) {
                    double got = (double)format.decode(format.stochastic(y, noise, 0));
                    if (test->failures < 20)
                        expect(got == low || got == high, "%s: %a becomes %a", format.name, (double)y, got);
                    up += got == high;
                }
                double want = ((double)y - low) / (high - low), error = fabs(up / 65536.0 - want);
                // Uniform formats add y and the noise in fp32.
                double slack = 1.5 / 65536.0 + ldexp((double)format.largest, -23) / (high - low);
                if (error / slack > worst) worst = error / slack;
                if (test->failures < 20) {
                    expect(error <= slack, "%s: %a goes up %d of 65536 times, not %.1f", format.name, (double)y, up,
                           want * 65536.0);
                }
            }
        }
    }
    note(test, "%.2f of bound", worst);
}

// One tile of a storage on the CPU; `second` is the scale of quantised scales.
struct Store {
    char codes[4 * TILE_ELEMENTS];
    alignas(16) char table[65536];
    float scales[TILE_ELEMENTS], second;
    float x[TILE_ELEMENTS], back[TILE_ELEMENTS];

    Streams streams() { return {codes, scales, table, &second}; }
};

// Stores x, and loads it again.
template <class Storage>
static void store_tile(Store* store, uint32_t slot, uint32_t step = 7) {
    Storage::fill(store->table);
    Storage::store(store->streams(), 0, store->x, TILE_ELEMENTS, NoiseKey{5, step, slot});
    Storage::load(store->streams(), 0, store->back, TILE_ELEMENTS, NoiseKey{});
}

// The table's row, whose functions get block and scale as arguments, does what the type does.
template <class Storage>
static void check_row(Test* test, const float* x, const char* name) {
    static Store own, other;
    const FormatRow* row = find_row(state_table(), name);
    expect(row && is(row->name, name), "%s is not in the table", name);
    memset(&own, 0, sizeof(own)), memset(&other, 0, sizeof(other));
    for (Store* store : {&own, &other}) memcpy(store->x, x, sizeof(store->x));
    store_tile<Storage>(&own, NOISE_V);
    row->fill(other.table);
    row->store(other.streams(), 0, other.x, TILE_ELEMENTS, NoiseKey{5, 7, NOISE_V});
    row->load(other.streams(), 0, other.back, TILE_ELEMENTS, NoiseKey{});
    expect(memcmp(&own, &other, sizeof(own)) == 0, "the row of %s does something else", name);
    for (int i = 0; i < 3; i++) {
        const StreamInfo &its = Storage::STREAM[i], &listed = row->stream[i];
        expect(is(its.name, listed.name) && is(its.dtype, listed.dtype) && its.bits == listed.bits &&
                   its.run == listed.run,
               "array %d of %s", i, name);
    }
}

// Every mantissa, at a magnitude where nothing is subnormal: the rest only shifts it.
template <class Format>
void check_over_largest(Test* test, const char* name) {
    int differ = 0;
    for (uint32_t bits = 127u << 23; bits < 128u << 23; bits++) {
        float top = bits_float(bits);
        differ += over_largest<Format>(top) != top / Format::LARGEST;
    }
    expect(differ == 0, "%s: %d scales are not top / %g rounded once", name, differ, (double)Format::LARGEST);
}

TEST(formats_scales_are_rounded_once) {
    check_rows(test, every.scales);
}

// In a v, only a block of zeros decodes to zero, however much its values differ.
template <class Storage>
static void check_v(Test* test, Store* store, const char* name) {
    store_tile<Storage>(store, NOISE_V);
    for (int i = 0; i < TILE_ELEMENTS; i++) {
        expect((store->back[i] > 0.0f) == (store->x[i] > 0.0f) && store->back[i] >= 0.0f, "%s: v %g became %g", name,
               (double)store->x[i], (double)store->back[i]);
    }
}

template <class Format, int BLOCK>
void check_blocks(Test* test, const char* name) {
    static Store store;
    float* const x = store.x;
    // Each block has a magnitude of its own; one block is all zero, one has infinity, one is subnormal.
    for (int i = 0; i < TILE_ELEMENTS; i++) {
        int block = i / BLOCK, exponent = block % 7 * 9 - 30;
        float value = test_uniform(11, i);
        x[i] = ldexpf(Format::SIGNED ? value : fabsf(value), exponent);
        if (TILE_ELEMENTS / BLOCK >= 4) {
            if (block == 1) x[i] = 0.0f;
            if (block == 2) x[i] = ldexpf(fabsf(value), -135);
            if (block == 3 && i % BLOCK == 5) x[i] = INFINITY;
        }
    }
    store_tile<Blocks<Format, BLOCK, ScaleFp32, NEAREST>>(&store, NOISE_M);
    for (int b = 0; b < TILE_ELEMENTS / BLOCK; b++) {
        float top = 0.0f;
        for (int i = 0; i < BLOCK; i++) {
            float value = x[b * BLOCK + i];
            if (Format::ROOT && isinf(value)) continue;  // its root is NaN
            if (fabsf(value) > top) top = fabsf(value);
        }
        if (Format::ROOT) top = top < 0x1p-100f ? 0.0f : sqrtf(top);
        if (top > 4.25e37f) top = 4.25e37f;
        float want = Format::LARGEST == 1.0f ? top : top / Format::LARGEST, least = FLT_MIN * Format::UNITS;
        if (top > 0.0f && want < least) want = least;
        expect(store.scales[b] == want, "%s block %d: scale %a, want %a", name, b, (double)store.scales[b],
               (double)want);
        for (int i = b * BLOCK; i < (b + 1) * BLOCK; i++) {
            float back = store.back[i];
            expect(isfinite(back) && (top > 0.0f || back == 0.0f), "%s: %g became %g", name, (double)x[i],
                   (double)back);
        }
    }
    for (int i = 0; i < TILE_ELEMENTS; i++) x[i] = ldexpf(1.0f + fabsf(test_uniform(3, i)), -(i * 37 % 120));
    check_v<Blocks<Format, BLOCK, ScaleFp32, NEAREST>>(test, &store, name);
    check_v<Blocks<Format, BLOCK, ScaleFp32, STOCHASTIC>>(test, &store, name);
    check_row<Blocks<Format, BLOCK, ScaleFp32, NEAREST>>(test, x, name);
    check_row<Blocks<Format, BLOCK, ScaleFp32, STOCHASTIC>>(test, x, formatted("%s:sr", name));
}

TEST(formats_blocks) {
    check_rows(test, every.blocks);
}

TEST(formats_narrow_scales) {
    // Never below the scale that is wanted, and the next one that the type has.
    for (int i = 0; i < 10000; i++) {
        float scale = ldexpf(1.0f + fabsf(test_uniform(1, i)), i % 250 - 125);
        float e8m0 = ScaleE8m0::decode(ScaleE8m0::encode(scale));
        expect(e8m0 >= scale && (double)e8m0 < (double)scale * 2.0, "e8m0 %a of %a", (double)e8m0, (double)scale);
        expect(ScaleE8m0::decode(ScaleE8m0::encode(e8m0)) == e8m0, "e8m0 %a", (double)e8m0);
    }
    expect(ScaleE8m0::encode(FLT_MAX) == 254, "largest");
    expect(ScaleE8m0::encode(0.0f) == 0 && ScaleE8m0::decode(0) == 0.0f, "zero");
}

// The scale that a block should have, in fp32.
template <class Format>
static float wanted_scale(const float* x, int n) {
    float top = 0.0f, scale;
    for (int i = 0; i < n; i++) top = exact_max(exact_abs(block_value<Format>(x[i])), top);
    block_scale<Format, ScaleFp32>(top, &scale);
    return scale;
}

// Blocks of magnitudes 2^32 apart and more, one of zeros.
static void fill_tile(Store* tile, int block, bool has_sign) {
    for (int i = 0; i < TILE_ELEMENTS; i++) {
        float value = test_uniform(6, i);
        tile->x[i] = i / block == 1 ? 0.0f : ldexpf(has_sign ? value : fabsf(value), i / block * 5 % 79 - 90);
    }
}

// Scales that are quantised themselves (ScaleDq8 in optim/formats/scales.cuh).
template <class Format, int BLOCK>
void check_double_blocks(Test* test, const char* name) {
    static Store tile;
    const uint8_t* scales = (const uint8_t*)tile.scales;
    fill_tile(&tile, BLOCK, Format::SIGNED);
    store_tile<Blocks<Format, BLOCK, ScaleDq8, NEAREST>>(&tile, NOISE_M);
    const auto* table = (const typename Format::Table*)tile.table;
    expect(tile.second == wanted_scale<Format>(tile.x, TILE_ELEMENTS), "%s: second %a", name, (double)tile.second);
    int largest = 0, least = 0;
    for (int b = 0; b < TILE_ELEMENTS / BLOCK; b++) {
        double want = wanted_scale<Format>(tile.x + b * BLOCK, BLOCK);
        float scale = double_decode<Format>(scales[b], tile.second);
        largest += scales[b] == 255, least += scales[b] == 1;
        expect((scales[b] == 0) == (want == 0.0), "%s: scale %d has code %d", name, b, scales[b]);
        expect((double)scale >= want * (1.0 - 6e-7), "%s: scale %d is %g, want %g", name, b, (double)scale, want);
        expect(scales[b] < 2 || (double)scale <= want * 1.1251, "%s: scale %d is %g, want %g", name, b, (double)scale,
               want);
        float decoded[1 << Format::BITS];
        for (uint32_t code = 0; code < 1u << Format::BITS; code++) decoded[code] = Format::decode(table, code, scale);
        for (int i = b * BLOCK; i < (b + 1) * BLOCK && test->failures < 20; i++) {
            // The nearest of all levels, of the root where that is stored.
            double nearest = INFINITY, x = Format::ROOT ? sqrt((double)tile.x[i]) : (double)tile.x[i];
            for (float level : decoded)
                nearest = fmin(nearest, fabs(x - (Format::ROOT ? sqrt((double)level) : (double)level)));
            double off = fabs(x - (Format::ROOT ? sqrt((double)tile.back[i]) : (double)tile.back[i]));
            double unit = (double)scale * (double)Format::LARGEST;
            // soft8's bounds are the middle in z, not of the levels. moment_root begins at 2^-50.
            double slack = 3e-5 * unit + (Format::BITS == 8 ? 1e-4 * fabs(x) : 0.0) + (Format::ROOT ? 0x1p-50 : 0.0);
            expect(off <= nearest + slack, "%s: %g became %g, off by %g and not %g", name, (double)tile.x[i],
                   (double)tile.back[i], off, nearest);
        }
    }
    expect(largest >= 1 && least >= 1, "%s: %d scales are the tile's, %d the least", name, largest, least);
    for (float& x : tile.x) x = fabsf(x) < 0x1p-99f && x != 0.0f ? 0x1p-99f : fabsf(x);
    check_v<Blocks<Format, BLOCK, ScaleDq8, NEAREST>>(test, &tile, name);
    check_v<Blocks<Format, BLOCK, ScaleDq8, STOCHASTIC>>(test, &tile, name);
    check_row<Blocks<Format, BLOCK, ScaleDq8, NEAREST>>(test, tile.x, name);
    check_row<Blocks<Format, BLOCK, ScaleDq8, STOCHASTIC>>(test, tile.x, formatted("%s:sr", name));
    // A block of subnormal numbers, then nothing but zeros.
    for (int i = 0; i < TILE_ELEMENTS; i++) tile.x[i] = i / BLOCK == 4 ? 0x1p-140f : 1.0f;
    store_tile<Blocks<Format, BLOCK, ScaleDq8, NEAREST>>(&tile, NOISE_V);
    for (float x : tile.back) expect(isfinite(x), "%s: %g", name, (double)x);
    memset(&tile, 0, sizeof(tile));
    store_tile<Blocks<Format, BLOCK, ScaleDq8, NEAREST>>(&tile, NOISE_V);
    for (float x : tile.back) expect(x == 0.0f, "%s: a zero became %g", name, (double)x);
}

TEST(formats_double_blocks) {
    check_rows(test, every.double_blocks);
}

// No mantissa of a block's largest takes it beyond the last level, so that no noise takes it to the code after.
TEST(formats_linear_weights_end_at_127) {
    for (uint32_t bits = 130u << 23; bits < 134u << 23; bits++) {
        uint8_t code;
        BlockScale s = block_scale<Lin8OfPowers, ScaleE8m0>(bits_float(bits), &code);
        float y = exact_mul(bits_float(bits), s.inverse);
        expect(y > 63.0f && y <= 127.0f, "%a is %a steps", (double)bits_float(bits), (double)y);
    }
}

typedef Blocks<Lin8OfPowers, 32, ScaleE8m0, STOCHASTIC> LinearWeights;

// Levels times any scale are what a product says, and what no scale reaches becomes the most that one does.
TEST(formats_linear_weights_are_cut_at_2e33) {
    static Store store;
    float *const x = store.x, *const back = store.back;
    for (float top : {1.5e33f, 2e33f, 1e36f, FLT_MAX, INFINITY}) {
        // The scale is a power of two that makes a block's largest at least 63.5 steps: noise is less than one.
        const float want = top < 2e33f ? top : 2e33f, step = want / 63.0f;
        for (int i = 0; i < TILE_ELEMENTS; i++) x[i] = i % 32 == 9 ? top : i % 32 == 20 ? -top : 1.0f;
        for (int set = 0; set < 2; set++) {
            store_tile<LinearWeights>(&store, NOISE_WEIGHTS);
            if (set) LinearWeights::set(store.streams(), 0, x, TILE_ELEMENTS);
            if (set) LinearWeights::load(store.streams(), 0, back, TILE_ELEMENTS, NoiseKey{});
            for (int i = 9; i < TILE_ELEMENTS; i += 32) {
                expect(fabsf(back[i] - want) <= step && fabsf(back[i + 11] + want) <= step, "%g became %g, %g",
                       (double)top, (double)back[i], (double)back[i + 11]);
            }
            for (int i = 0; i < TILE_ELEMENTS; i++) {
                if (i % 32 == 9 || i % 32 == 20) continue;
                expect(fabsf(back[i]) <= step, "beside %g 1 became %g", (double)top, (double)back[i]);
            }
        }
    }
    uint8_t most;
    block_scale<Lin8OfPowers, ScaleE8m0>(INFINITY, &most);
    for (int scale = 1; scale <= most; scale++) {
        for (uint32_t code = 0; code <= 254; code++) {
            float unit = ScaleE8m0::decode((uint8_t)scale), got = Lin8OfPowers::decode(nullptr, code, unit);
            expect(got == (float)((int)code - 127) * unit, "code %u, scale %a: %a", code, (double)unit, (double)got);
        }
    }
}

template <class Format>
constexpr bool IS_LINEAR = false;
template <int BITS, int FIRST, int LAST, bool ROOT, bool POWERS>
constexpr bool IS_LINEAR<Uniform<BITS, FIRST, LAST, ROOT, POWERS>> = true;

// Counts where the vector functions of a format on a GPU differ from those of one element, over all floats: with noise
// and to nearest, as m and as v, in blocks of two scales; what decodes them; and the bf16 that the model sees. Of
// linear levels only what a block can hold is compared, and, since they share the sum, only how it is packed. total:
// {differences, floats compared}, the latter 0 where the code was built for an older GPU.
template <class Format>
__device__ unsigned long long packed_differ(uint32_t first, float inverse, int lowest) {
    unsigned long long wrong = 0;
    float x[8], decoded[8];
    bool within[8];
    const Noise noise = noise_draw({first, 3, NOISE_M}, 0);
    for (int i = 0; i < 8; i++) x[i] = bits_float(first + (uint32_t)i);
    for (int i = 0; i < 8; i++) {  // as in a block
        within[i] = exact_abs(exact_mul(x[i], inverse)) <= Format::LARGEST * Format::UNITS || is_nan(x[i]);
        if (IS_LINEAR<Format> && !within[i]) x[i] = 0.0f;  // its sum would carry into its neighbours' codes
    }
    Packed<Format::BITS, 8> noisy = {}, nearest = {};
    uint32_t seen[4];
    Format::template put<STOCHASTIC, 8>(nullptr, x, inverse, noise, lowest, &noisy, seen);
    Format::template put<NEAREST, 8>(nullptr, x, inverse, noise, lowest, &nearest, nullptr);
    for (int i = 0; i < 8; i++) {
        wrong += noisy.get(i) != Format::stochastic(nullptr, x[i], inverse, noise_lane(noise, i), lowest);
        wrong += nearest.get(i) != Format::nearest(nullptr, x[i], inverse, lowest);
    }
    if constexpr (Format::BITS == 8) {
        Format::template get<8>(nullptr, noisy, 0.37f, decoded);
        for (int i = 0; i < 8; i++) {
            float want = Format::decode(nullptr, noisy.get(i), 0.37f);
            wrong += within[i] && (is_nan(want) ? !is_nan(decoded[i]) : float_bits(decoded[i]) != float_bits(want));
        }
    }
    if constexpr (Format::WRITES_BF16) {
        uint32_t scale = (first >> 3) * 2654435761u >> 24;
        if (lowest > 0 || scale == 0 || scale == 255) return wrong;
        Format::template bf16_scaled<8>(scale, true, seen);
        for (int i = 0; i < 8; i++) {
            float value = Format::decode(nullptr, noisy.get(i), ScaleE8m0::decode((uint8_t)scale));
            uint32_t got = seen[i / 2] >> i % 2 * 16 & 0xffffu;
            wrong += within[i] && is_finite(value) && got != Bf16::encode(value);
        }
    }
    return wrong;
}

#ifdef __CUDACC__
template <class Format>
__global__ void packed_kernel(unsigned long long* total) {
#if __CUDA_ARCH__ >= 900
    int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, threads = (int64_t)gridDim.x * blockDim.x;
    unsigned long long wrong = 0, compared = 0;
    for (int64_t first = 8 * thread; first < 1ll << 32; first += 8 * threads) {
        bool other = first >> 8 & 1;
        compared += 8;
        const float inverse = !other ? 1.0f : Format::OF_POWERS ? 0.015625f : 0.0123f;
        wrong += packed_differ<Format>((uint32_t)first, inverse, first >> 9 & 1 ? Format::ZERO + 1 : 0);
    }
    atomicAdd(total, wrong);
    atomicAdd(total + 1, compared);
#endif
}

TEST(formats_packed_codes_equal_the_portable_gpu) {
    const std::tuple<const char*, void (*)(unsigned long long* total)> rows[] = {
        {"e4m3", packed_kernel<E4m3>},
        {"e5m2", packed_kernel<E5m2>},
        {"e2m1", packed_kernel<E2m1>},
        {"lin8", packed_kernel<Lin8>},
        {"lin8 of powers", packed_kernel<Lin8OfPowers>},
        {"ulin8", packed_kernel<Ulin8>},
        {"sqrt8", packed_kernel<Sqrt8>},
        {"lin4", packed_kernel<Lin4>},
        {"sqrt4", packed_kernel<Sqrt4>}};
    const Device gpu = test_device(true);
    if (gpu.compute < 90) skip("needs compute capability 9.0");
    for (const auto& [name, kernel] : rows) {
        unsigned long long count[2], *total = (unsigned long long*)device_alloc(&gpu, sizeof(count));
        device_zero(&gpu, total, sizeof(count));
        kernel<<<1056, 256, 0, gpu.stream>>>(total);
        check(cudaGetLastError());
        copy_to_host(&gpu, count, total, sizeof(count));
        if (count[1] == 0) skip("needs a build for sm_90 or later");
        expect(count[0] == 0, "%llu codes of %s differ", count[0], name);
        expect(count[1] == 1ull << 32, "%llu floats compared as %s", count[1], name);
    }
    note(test, "all floats");
}
#endif

#ifdef __CUDACC__
// Counts where the sequences without branches differ from the correctly rounded instructions, over every float that
// each may be given. grid: any, block: any; a count by atomic adds of integers.
__global__ void fast_arithmetic_kernel(unsigned long long* wrong) {
    int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, threads = (int64_t)gridDim.x * blockDim.x;
    unsigned long long roots = 0, reciprocals = 0;
    for (int64_t bits = thread; bits <= 0x7f800000ll; bits += threads) {
        float v = bits_float((uint32_t)bits), root = moment_root(v), want = exact_sqrt(fmaxf(v, 7.8886091e-31f));
        roots += is_finite(v) ? float_bits(root) != float_bits(want) : !is_nan(root);
    }
    for (int64_t bits = (1ll << 23) + thread; bits <= 252ll << 23; bits += threads) {
        float b = bits_float((uint32_t)bits);
        reciprocals += float_bits(exact_reciprocal(b)) != float_bits(__frcp_rn(b));
        reciprocals += float_bits(exact_reciprocal(-b)) != float_bits(__frcp_rn(-b));
    }
    atomicAdd(&wrong[0], roots);
    atomicAdd(&wrong[1], reciprocals);
}

TEST(formats_fast_arithmetic_is_exact_gpu) {
    const Device gpu = test_device(true);
    unsigned long long* wrong = (unsigned long long*)device_alloc(&gpu, 16);
    unsigned long long count[2] = {1, 1};
    device_zero(&gpu, wrong, 16);
    fast_arithmetic_kernel<<<1056, 256, 0, gpu.stream>>>(wrong);
    check(cudaGetLastError());
    copy_to_host(&gpu, count, wrong, 16);
    note(test, "all 2.1e9 roots, all 4.2e9 reciprocals");
    expect(count[0] == 0 && count[1] == 0, "%llu roots and %llu reciprocals differ", count[0], count[1]);
}
#endif
