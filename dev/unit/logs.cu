// Tests of adalog8 (optim/formats/adalog8.cuh): codes that survive decoding and encoding, encoding against the nearest
// level in double, stochastic rounding counted over all its noise, and what becomes of zeros, subnormals, NaN and
// infinity. Whole steps and equal bits on a GPU: laws.cu.
#include <float.h>

#include "../../optim/formats/adalog8.cuh"
#include "test.h"

constexpr int BLOCKS = 8;

// Blocks of a storage on the CPU.
struct LogBlocks {
    uint8_t codes[BLOCKS * TILE_ELEMENTS];
    float scales[BLOCKS], x[BLOCKS * TILE_ELEMENTS], back[BLOCKS * TILE_ELEMENTS];
};

static Streams streams_of(LogBlocks* blocks) {
    return {blocks->codes, blocks->scales};
}

template <Rounding ROUNDING>
static void blocks_through(LogBlocks* to, uint32_t step, int count = 1) {
    AdaLog8<ROUNDING>::store(streams_of(to), 0, to->x, count * TILE_ELEMENTS, NoiseKey{5, step, NOISE_V});
    AdaLog8<ROUNDING>::load(streams_of(to), 0, to->back, count * TILE_ELEMENTS, NoiseKey{});
}

// log2 of a level, exactly.
static double level_log(float scale, int code) {
    return (double)scale * code / 255.0 - 126.0;
}

// A value this far from a bound, in units, may be taken for one beyond it: its logarithm is off by the polynomial and
// by the sum with its exponent; the place by three roundings.
static double place_slack(float scale, double place) {
    return (2.4e-6 + ldexp((double)scale + 1.0, -24)) / ((double)scale / 255.0) + 3.0 * ldexp(place, -24);
}

// Scales to try, 126 + log2 of the largest: all there is, usual ones, and at the bottom.
static const float scales[] = {253.0f, 106.0f, 116.5625f, 122.75f, 26.0f};

TEST(logs_codes_survive) {
    static LogBlocks blocks, again;
    for (float scale : scales) {
        blocks.scales[0] = scale;
        // All codes, with the largest among them.
        for (int i = 0; i < TILE_ELEMENTS; i++) blocks.codes[i] = (uint8_t)(255 - i % 256);
        AdaLog8<NEAREST>::load(streams_of(&blocks), 0, again.x, TILE_ELEMENTS, NoiseKey{});
        blocks_through<NEAREST>(&again, 0);
        for (int i = 0; i < TILE_ELEMENTS && test->failures < 20; i++) {
            int code = blocks.codes[i];
            double log = level_log(scale, code), slack = 8e-7 + ldexp(fabs(log) + 252.0, -24);
            float x = again.x[i], back = again.back[i];
            expect(again.codes[i] == code && fabs((double)back / (double)x - 1.0) < 3e-5, "%d became %u, %a became %a",
                   code, again.codes[i], (double)x, (double)back);
            expect(fabs(log2((double)x) - log) <= slack, "level %d is 2^%.9g, want 2^%.9g", code, log2((double)x), log);
        }
        // The peer's scale is on no grid: two units in the last place.
        expect(fabsf(again.scales[0] / scale - 1.0f) < 0x1.01p-22f, "%a became %a", (double)scale,
               (double)again.scales[0]);
    }
}

// Every float of a sweep up to the largest, in blocks that hold it.
TEST(logs_nearest_against_search) {
    static LogBlocks blocks;
    for (float range : scales) {
        const float top = exp2f(range - 126.0f);
        uint32_t bits = 0x00800000u;
        while (bits < float_bits(top)) {
            for (int i = 0; i < TILE_ELEMENTS; i++) {
                bool inside = i > 0 && bits < float_bits(top);
                blocks.x[i] = inside ? bits_float(bits) : top;
                if (inside) bits += 1u + (bits * 2654435761u >> 8) % (2u << 13);
            }
            blocks_through<NEAREST>(&blocks, 0);
            const float scale = blocks.scales[0];
            for (int i = 0; i < TILE_ELEMENTS && test->failures < 20; i++) {
                double place = (log2((double)blocks.x[i]) + 126.0) / ((double)scale / 255.0);
                expect(fabs(place - blocks.codes[i]) - 0.5 <= place_slack(scale, place), "%a becomes %u, place %.9g",
                       (double)blocks.x[i], blocks.codes[i], place);
            }
        }
    }
}

// Over all 65536 noises the mean is the value: within one count and a half, and what the logarithm is off.
TEST(logs_stochastic_counts) {
    double worst = 0.0;
    for (float scale : scales) {
        const LogEncoding s = log_encoding<STOCHASTIC>(scale);
        for (int part = 0; part < 40; part++) {
            int code = part == 39 ? 254 : part < 4 ? part : 255 * part / 40;
            double low = exp2(level_log(scale, code)), high = exp2(level_log(scale, code + 1));
            float x = (float)(low + (high - low) * (part % 2 ? 0.0837 : 0.71));
            double want = ((double)x - low) / (high - low);
            int up = 0, wrong = 0;
            for (uint32_t noise = 0; noise < 65536; noise++) {
                int got = (int)((log_word<STOCHASTIC>(x, s, noise) - LOG_BIAS<STOCHASTIC>) >> 16);
                up += got == code + 1, wrong += got != code && got != code + 1;
            }
            double slack = place_slack(scale, code);
            double bound = 1.5 / 65536.0 + 2.0 * slack, error = fabs(up / 65536.0 - want);
            // The logarithm's error may reach over a level.
            expect(wrong <= 65536.0 * slack + 1.0, "%a goes elsewhere %d times", (double)x, wrong);
            expect(error <= bound, "%a goes up %d of 65536 times, not %.1f", (double)x, up, want * 65536.0);
            worst = fmax(worst, error / bound);
        }
    }
    note(test, "%.2f of bound", worst);
}

// Zeros, subnormals, NaN, infinity, what is negative, in a block each.
template <Rounding ROUNDING>
static void check_limits(Test* test) {
    static LogBlocks blocks, plain;
    for (int i = 0; i < BLOCKS * TILE_ELEMENTS; i++) {
        int block = i / TILE_ELEMENTS;
        float x = ldexpf(1.0f + fabsf(test_uniform(2, i)), block * 9 - 50 - i % 23);
        blocks.x[i] = block == 2 ? 0.0f : block == 3 ? ldexpf(x, -100) : x;  // 3: mostly subnormal
        if (block == 4) blocks.x[i] = 0x1.234p-33f;
        if (block == 1 && i % 7 == 0) blocks.x[i] = FLT_TRUE_MIN;  // beside what is not small
        plain.x[i] = blocks.x[i];
        if (block == 6 && i % 4 == 0) {
            const float strange[] = {NAN, -1.0f, -0.0f, -INFINITY};
            blocks.x[i] = strange[i / 4 % 4], plain.x[i] = 0.0f;
        }
        if (block == 7 && i % 5 == 0) blocks.x[i] = INFINITY, plain.x[i] = LOG_MAX;
        if (block == 5 && i % 5 == 0) blocks.x[i] = plain.x[i] = 0.0f;
    }
    blocks_through<ROUNDING>(&blocks, 3, BLOCKS);
    blocks_through<ROUNDING>(&plain, 3, BLOCKS);
    for (int b = 0; b < BLOCKS; b++) {
        expect(blocks.scales[b] == plain.scales[b], "scale %d", b);
        for (int i = b * TILE_ELEMENTS; i < (b + 1) * TILE_ELEMENTS; i++) {
            double x = plain.x[i], got = blocks.back[i];
            expect(got == (double)plain.back[i], "%g became %g, %g %g", (double)blocks.x[i], got, x,
                   (double)plain.back[i]);
            double off = fabs(log2(got) - log2(fmax(x, 0x1p-126)));
            expect(x > 0.0 ? off <= (ROUNDING == NEAREST ? 0.5001 : 1.0001) * (double)plain.scales[b] / 255.0 + 1e-4
                           : got == (double)FLT_MIN,
                   "%g became %g", x, got);
        }
    }
    expect(blocks.scales[2] == 0.0f, "the scale of zeros");
    // These were never written.
    memset(&blocks, 0, sizeof(blocks));
    AdaLog8<ROUNDING>::load(streams_of(&blocks), 0, blocks.back, TILE_ELEMENTS, NoiseKey{});
    for (int i = 0; i < TILE_ELEMENTS; i++) {
        expect(blocks.back[i] == FLT_MIN, "never written, %g", (double)blocks.back[i]);
    }
}

TEST(logs_limits) {
    check_limits<NEAREST>(test);
    check_limits<STOCHASTIC>(test);
}
