// Tests of scales that are quantised themselves (optim/formats/doubleblocks.cuh): the codes of a ratio, what a block is
// stored with against its own maximum, elements against a search of all levels, zeros, NaN and infinity. Whole steps
// and equal bits on a GPU: formats.cu.
#include <float.h>

#include "../../optim/kernel.cuh"
#include "../../optim/table.cuh"
#include "test.h"

// Levels of the ratio: each is stored as itself, whatever the tile's scale, and they rise by 1/16 to 1/8.
TEST(doublescales_codes_survive) {
    for (float second : {1.0f, 0x1.234566p-30f, 3e37f, 0x1p-93f, 0x1.fffffep-94f}) {
        float inverse = double_inverse(second), before = 0.0f;
        for (uint32_t code = 0; code < 256; code++) {
            float scale = double_decode<Lin8>(code, second);
            expect(double_encode(scale, inverse) == code, "%u of %g became %u", code, (double)second,
                   double_encode(scale, inverse));
            expect(scale > before || code == 0, "code %u of %g", code, (double)second);
            if (code > 1)
                expect(scale <= before * 1.2501f, "code %u: %g after %g", code, (double)scale, (double)before);
            before = scale;
        }
        expect(before == second, "code 255 of %g is %g", (double)second, (double)before);
    }
    expect(double_decode<Lin8>(0, 1.0f) == 0.0f && double_decode<Lin8>(1, 1.0f) == 0x1.4p-32f, "the ends");
    expect(double_decode<Lin8>(1, 0x1p-100f) == FLT_MIN && double_decode<Lin8>(0, 0x1p-100f) == 0.0f, "the floor");
    expect(double_encode(0.0f, 0.0f) == 0 && double_encode(0.0f, 1.0f) == 0, "zero");
}

// Any ratio is rounded up, to the next code.
TEST(doublescales_round_up) {
    for (int i = 0; i < 200000; i++) {
        float second = ldexpf(1.0f + fabsf(test_uniform(1, i)), i % 200 - 90);
        float ratio = ldexpf(0.5f + 0.5f * fabsf(test_uniform(2, i)), -(i % 37)), scale = ratio * second;
        uint32_t code = double_encode(scale, double_inverse(second));
        double got = double_decode<Lin8>(code, second), want = scale;
        expect(code > 0 && code < 256 && got >= want * (1.0 - 6e-7), "%g of %g became %g", want, (double)second, got);
        if (code > 1) {
            double lower = double_decode<Lin8>(code - 1, second);
            expect(lower < want && got <= want * 1.1251, "%g of %g became %g", want, (double)second, got);
        }
    }
}

struct DoubleTile {
    char codes[TILE_ELEMENTS], table[65536];
    uint8_t scales[TILE_ELEMENTS / 32];
    float second;
    float x[TILE_ELEMENTS], back[TILE_ELEMENTS];
};

template <class Storage>
static void tile_store(DoubleTile* tile, uint32_t slot) {
    Storage::fill(tile->table);
    Streams streams = {tile->codes, tile->scales, tile->table, &tile->second};
    Storage::store(streams, 0, tile->x, TILE_ELEMENTS, NoiseKey{5, 7, slot});
    Storage::load(streams, 0, tile->back, TILE_ELEMENTS, NoiseKey{});
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
static void fill_tile(DoubleTile* tile, int block, bool has_sign) {
    for (int i = 0; i < TILE_ELEMENTS; i++) {
        float value = test_uniform(6, i);
        tile->x[i] = i / block == 1 ? 0.0f : ldexpf(has_sign ? value : fabsf(value), i / block * 5 % 79 - 90);
    }
}

template <class Format, int BLOCK>
static void check_blocks(Test* test, const char* name, bool has_sign) {
    static DoubleTile tile;
    fill_tile(&tile, BLOCK, has_sign);
    tile_store<DoubleBlocks<Format, BLOCK, NEAREST>>(&tile, NOISE_M);
    const auto* table = (const typename Format::Table*)tile.table;
    expect(tile.second == wanted_scale<Format>(tile.x, TILE_ELEMENTS), "%s: second %a", name, (double)tile.second);
    int largest = 0, least = 0;
    for (int b = 0; b < TILE_ELEMENTS / BLOCK; b++) {
        double want = wanted_scale<Format>(tile.x + b * BLOCK, BLOCK);
        float scale = double_decode<Format>(tile.scales[b], tile.second);
        largest += tile.scales[b] == 255, least += tile.scales[b] == 1;
        expect((tile.scales[b] == 0) == (want == 0.0), "%s: scale %d has code %d", name, b, tile.scales[b]);
        expect((double)scale >= want * (1.0 - 6e-7), "%s: scale %d is %g, want %g", name, b, (double)scale, want);
        expect(tile.scales[b] < 2 || (double)scale <= want * 1.1251, "%s: scale %d is %g, want %g", name, b,
               (double)scale, want);
        float decoded[1 << Format::BITS];
        for (uint32_t code = 0; code < 1u << Format::BITS; code++) decoded[code] = Format::decode(table, code, scale);
        for (int i = b * BLOCK; i < (b + 1) * BLOCK && test->failures < 20; i++) {
            // The nearest of all levels, of the root where that is stored.
            double nearest = INFINITY, x = Format::ROOT ? sqrt((double)tile.x[i]) : (double)tile.x[i];
            for (float level : decoded)
                nearest = fmin(nearest, fabs(x - (Format::ROOT ? sqrt((double)level) : (double)level)));
            double off = fabs(x - (Format::ROOT ? sqrt((double)tile.back[i]) : (double)tile.back[i]));
            double unit = (double)scale * (double)Format::LARGEST;
            // soft8's bounds are the middle in z, not of the levels: formats.cu. moment_root begins at 2^-50.
            double slack = 3e-5 * unit + (Format::BITS == 8 ? 1e-4 * fabs(x) : 0.0) + (Format::ROOT ? 0x1p-50 : 0.0);
            expect(off <= nearest + slack, "%s: %g became %g, off by %g and not %g", name, (double)tile.x[i],
                   (double)tile.back[i], off, nearest);
        }
    }
    expect(largest >= 1 && least >= 1, "%s: %d scales are the tile's, %d the least", name, largest, least);
    // As v, nothing but a block of zeros decodes to zero.
    for (Rounding rounding : {NEAREST, STOCHASTIC}) {
        for (float& x : tile.x) x = fabsf(x) < 0x1p-99f && x != 0.0f ? 0x1p-99f : fabsf(x);
        if (rounding == NEAREST) tile_store<DoubleBlocks<Format, BLOCK, NEAREST>>(&tile, NOISE_V);
        if (rounding == STOCHASTIC) tile_store<DoubleBlocks<Format, BLOCK, STOCHASTIC>>(&tile, NOISE_V);
        for (int i = 0; i < TILE_ELEMENTS; i++) {
            bool zeros = i / BLOCK == 1;
            expect(zeros ? tile.back[i] == 0.0f : tile.back[i] > 0.0f, "%s: v %g became %g", name, (double)tile.x[i],
                   (double)tile.back[i]);
        }
    }
}

TEST(doublescales_blocks) {
    check_blocks<Soft8, 32>(test, "soft8", true);
    check_blocks<Sqrt8, 32>(test, "sqrt8", false);
    check_blocks<Dyn8, 64>(test, "dyn8", true);
    check_blocks<Udyn8, 64>(test, "udyn8", false);
    check_blocks<E4m3, 64>(test, "e4m3", true);
    check_blocks<De4, 32>(test, "de4", true);
    check_blocks<De4, 64>(test, "de4/64", true);
    check_blocks<Sqrt4, 32>(test, "sqrt4", false);
    check_blocks<Lin4, 64>(test, "lin4", false);
    check_blocks<Nf4, 64>(test, "nf4", true);
    check_blocks<E2m1, 32>(test, "e2m1", true);
}

// Infinity is the most, NaN does not count, subnormal blocks keep a scale, all beside blocks that they do not touch.
template <class Format>
static void check_strange(Test* test, const char* name, bool has_sign) {
    static DoubleTile tile, plain;
    for (int i = 0; i < TILE_ELEMENTS; i++) {
        float value = test_uniform(9, i);
        plain.x[i] = has_sign ? value : fabsf(value);
    }
    memcpy(tile.x, plain.x, sizeof(tile.x));
    for (int i = 64; i < 96; i++) tile.x[i] = i == 70 ? NAN : tile.x[i];
    for (int i = 128; i < 160; i++) tile.x[i] = ldexpf(fabsf(tile.x[i]), -140);
    tile_store<DoubleBlocks<Format, 32, NEAREST>>(&tile, NOISE_M);
    tile_store<DoubleBlocks<Format, 32, NEAREST>>(&plain, NOISE_M);
    expect(tile.second == plain.second, "%s: %a, %a", name, (double)tile.second, (double)plain.second);
    for (int i = 0; i < TILE_ELEMENTS; i++) {
        bool touched = i == 70 || (i >= 128 && i < 160);
        expect(touched || tile.back[i] == plain.back[i], "%s: %g became %g", name, (double)tile.x[i],
               (double)tile.back[i]);
    }
    tile.x[1000] = INFINITY, tile.x[70] = 0.0f;
    tile_store<DoubleBlocks<Format, 32, NEAREST>>(&tile, NOISE_M);
    for (float x : tile.back) expect(isfinite(x), "%s: %g", name, (double)x);
    if (!Format::ROOT) expect(tile.back[1000] > 4.1e37f, "%s: infinity became %g", name, (double)tile.back[1000]);
    memset(&tile, 0, sizeof(tile));
    tile_store<DoubleBlocks<Format, 32, NEAREST>>(&tile, NOISE_V);
    expect(tile.second == 0.0f, "%s: second %g", name, (double)tile.second);
    for (float x : tile.back) expect(x == 0.0f, "%s: a zero became %g", name, (double)x);
}

TEST(doublescales_limits) {
    check_strange<Soft8>(test, "soft8", true);
    check_strange<Sqrt8>(test, "sqrt8", false);
    check_strange<E4m3>(test, "e4m3", true);
    check_strange<De4>(test, "de4", true);
    check_strange<Sqrt4>(test, "sqrt4", false);
    check_strange<E2m1>(test, "e2m1", true);
}

// The mean over all noise is the value: block scales do not change what formats.cu counts, but are they the same in
// every step? 400 steps of one tile, 4 standard errors for the 32 elements of a block together.
TEST(doublescales_stochastic_means) {
    constexpr int STEPS = 400;
    static DoubleTile tile;
    static double sum[TILE_ELEMENTS], squares[TILE_ELEMENTS];
    double worst = 0.0;
    int counted = 0;
    fill_tile(&tile, 32, true);
    typedef DoubleBlocks<De4, 32, STOCHASTIC> Storage;
    Storage::fill(tile.table);
    Streams streams = {tile.codes, tile.scales, tile.table, &tile.second};
    for (uint32_t step = 1; step <= STEPS; step++) {
        Storage::store(streams, 0, tile.x, TILE_ELEMENTS, NoiseKey{5, step, NOISE_M});
        Storage::load(streams, 0, tile.back, TILE_ELEMENTS, NoiseKey{});
        for (int i = 0; i < TILE_ELEMENTS; i++) {
            double off = (double)tile.back[i] - (double)tile.x[i];
            sum[i] += off, squares[i] += off * off;
        }
    }
    for (int b = 0; b < TILE_ELEMENTS / 32; b++) {
        double off = 0.0, square = 0.0;
        for (int i = b * 32; i < (b + 1) * 32; i++) {
            // A negative largest may lie below the least level.
            double least = -0.8875 * (double)double_decode<De4>(tile.scales[b], tile.second);
            if ((double)tile.x[i] > least) off += sum[i], square += squares[i];
        }
        // Zeros, and what lies so far below the tile's largest that 16 bits of noise do not tell it from zero.
        if (tile.scales[b] < 2) continue;
        counted++;
        worst = fmax(worst, fabs(off) / sqrt(square));
        expect(fabs(off) <= 4.0 * sqrt(square), "block %d: %.2f standard errors", b, off / sqrt(square));
    }
    expect(counted >= 20, "%d blocks", counted);
    note(test, "%d blocks, %.1f of 4 standard errors", counted, worst);
}
