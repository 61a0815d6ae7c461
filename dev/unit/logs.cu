// Tests of the logarithmic formats (optim/formats/log.cuh): codes that survive decoding and encoding, encoding against
// the nearest level in double, stochastic rounding counted over all its noise, and what becomes of zeros, subnormals,
// NaN and infinity. Whole steps and equal bits on a GPU: every.cu.
#include <float.h>

#include "../../optim/formats/log.cuh"
#include "test.h"

// One tile of a storage on the CPU.
struct LogTile {
    uint16_t codes[TILE_ELEMENTS];  // 8 or 16 bits each
    float extra[TILE_ELEMENTS / 32], more[TILE_ELEMENTS / 32];
    float x[TILE_ELEMENTS], back[TILE_ELEMENTS];
};

static Streams tile_streams(LogTile* tile) {
    return {tile->codes, tile->extra, nullptr, tile->more};
}

template <class Codes>
static uint32_t tile_code(const LogTile* tile, int i) {
    return Codes::BITS == 8 ? ((const uint8_t*)tile->codes)[i] : tile->codes[i];
}

template <class Codes, int BLOCK, Rounding ROUNDING>
static void tile_store(LogTile* tile, uint32_t step) {
    typedef LogBlocks<Codes, BLOCK, ROUNDING> Storage;
    Storage::store(tile_streams(tile), 0, tile->x, TILE_ELEMENTS, NoiseKey{5, step, NOISE_V});
    Storage::load(tile_streams(tile), 0, tile->back, TILE_ELEMENTS, NoiseKey{});
}

// log2 of a level, exactly.
template <class Codes>
static double level_log(LogRange range, int64_t code) {
    double span = Codes::OWN ? (double)range.high - (double)range.low : (double)range.high;
    return (double)range.low + span * (double)(code - Codes::FIRST) / (double)Codes::STEPS;
}

// Returns the distance of two neighbouring levels in log2.
template <class Codes>
static double level_unit(LogRange range) {
    return (level_log<Codes>(range, Codes::LAST) - level_log<Codes>(range, Codes::FIRST)) / (double)Codes::STEPS;
}

// A value this far from a bound, in units, may be taken for one beyond it: its logarithm is off by the polynomial and
// by the sum with its exponent, counted from the range's low; the place by three roundings.
template <class Codes>
static double place_slack(LogRange range, double place) {
    double unit = level_unit<Codes>(range), span = unit * (double)Codes::STEPS + 1.0;
    return (2.4e-6 + ldexp(span, -24)) / unit + 3.0 * ldexp(place, -24);
}

// Calls body(codes, name) for each format.
template <class Body>
static void for_formats(Body body) {
    body(Log8(), "log8"), body(Log16(), "log16"), body(AdaLog8(), "adalog8");
}

// Returns the least v that is told from smaller ones.
template <class Codes>
constexpr double LEAST_V = Codes::OWN ? 0x1p-125 : 0x1p-126;

// Ranges to try: all there is, a usual one, one with its ends off whole powers, the shortest, and at the bottom.
static const LogRange ranges[] = {{-125.0f, 127.0f},
                                  {-60.0f, -20.0f},
                                  {-47.8125f, -9.4375f},
                                  {-3.25f - 65534.0f / 4096.0f, -3.25f},
                                  {-125.0f, -100.0f}};

// Gives the tile a range: as it is stored; adalog8's begins at 2^-126.
template <class Codes>
static LogRange tile_range(LogTile* tile, LogRange range) {
    range.low = grid_below(range.low, Codes::GRID);
    if (!Codes::OWN) range = {-126.0f, range.high + 126.0f};
    log_keep<Codes>(tile_streams(tile), 0, range);
    return range;
}

template <class Codes>
static void check_survive(Test* test, const char* name) {
    static LogTile tile, again;
    for (LogRange wanted : ranges) {
        LogRange range = tile_range<Codes>(&tile, wanted);
        // All codes, with both ends of the range in every tile.
        for (int from = 0; from <= Codes::LAST; from += TILE_ELEMENTS - 2) {
            for (int i = 0; i < TILE_ELEMENTS; i++) {
                int code = i == 0 ? Codes::LAST : i == 1 ? Codes::FIRST : (from + i - 2) % (Codes::LAST + 1);
                if (Codes::BITS == 8) ((uint8_t*)tile.codes)[i] = (uint8_t)code;
                if (Codes::BITS == 16) tile.codes[i] = (uint16_t)code;
            }
            LogBlocks<Codes, 2048, NEAREST>::load(tile_streams(&tile), 0, again.x, TILE_ELEMENTS, NoiseKey{});
            tile_store<Codes, 2048, NEAREST>(&again, 0);
            for (int i = 0; i < TILE_ELEMENTS && test->failures < 20; i++) {
                int code = (int)tile_code<Codes>(&tile, i);
                double log = level_log<Codes>(range, code), slack = 8e-7 + ldexp(fabs(log) + 252.0, -24);
                bool zero = Codes::OWN && code == 0;
                float x = again.x[i], back = again.back[i];
                bool same = Codes::OWN ? x == back : fabs((double)back / (double)x - 1.0) < 3e-5;
                expect((int)tile_code<Codes>(&again, i) == code && same, "%s: %d became %u, %a became %a", name, code,
                       tile_code<Codes>(&again, i), (double)x, (double)back);
                expect(zero ? again.x[i] == 0.0f : fabs(log2((double)again.x[i]) - log) <= slack,
                       "%s: level %d is 2^%.9g, want 2^%.9g", name, code, log2((double)again.x[i]), log);
            }
            // The peer's scale is on no grid: two units in the last place.
            bool kept = Codes::OWN ? again.extra[0] == tile.extra[0] && again.more[0] == tile.more[0]
                                   : fabsf(again.extra[0] / tile.extra[0] - 1.0f) < 0x1.01p-22f;
            expect(kept, "%s: %a, %a became %a, %a", name, (double)tile.extra[0], (double)tile.more[0],
                   (double)again.extra[0], (double)again.more[0]);
        }
    }
}

TEST(logs_codes_survive) {
    for_formats([&](auto codes, const char* name) { check_survive<decltype(codes)>(test, name); });
}

// Every float of a sweep between the ends, in tiles that hold the ends.
template <class Codes>
static void check_nearest(Test* test, const char* name) {
    static LogTile tile;
    for (LogRange wanted : ranges) {
        float least = exp2f(wanted.low), top = exp2f(wanted.high);
        uint32_t bits = float_bits(least), step = wanted.high - wanted.low > 30.0f ? 1u << 13 : 1u << 10;
        if (bits < 0x00800000u) bits = 0x00800000u;
        while (bits < float_bits(top)) {
            for (int i = 0; i < TILE_ELEMENTS; i++) {
                bool inside = i > 1 && bits < float_bits(top);
                tile.x[i] = i == 0 ? top : inside ? bits_float(bits) : least;
                if (inside) bits += 1u + (bits * 2654435761u >> 8) % (2u * step);
            }
            tile_store<Codes, 2048, NEAREST>(&tile, 0);
            LogRange range = log_load<Codes>(tile_streams(&tile), 0);
            double unit = level_unit<Codes>(range);
            for (int i = 0; i < TILE_ELEMENTS && test->failures < 20; i++) {
                double log = log2(fmax((double)tile.x[i], LEAST_V<Codes>));
                int64_t code = tile_code<Codes>(&tile, i);
                double place = (log - level_log<Codes>(range, Codes::FIRST)) / unit + Codes::FIRST;
                double off = fabs(place - (double)code) - 0.5;
                expect(off <= place_slack<Codes>(range, place), "%s: 2^%.9g becomes %lld, place %.9g", name, log,
                       (long long)code, place);
            }
        }
    }
}

TEST(logs_nearest_against_search) {
    for_formats([&](auto codes, const char* name) { check_nearest<decltype(codes)>(test, name); });
}

// Over all 65536 noises the mean is the value: within one count and a half, and what the logarithm is off.
template <class Codes>
static void check_counts(Test* test, const char* name) {
    double worst = 0.0;
    for (LogRange wanted : ranges) {
        LogRange range = Codes::OWN ? wanted : LogRange{-126.0f, wanted.high + 126.0f};
        LogScale s = log_encoding<Codes, STOCHASTIC>(range);
        int64_t least = Codes::FIRST, gaps = Codes::LAST - least;
        for (int part = 0; part < 40; part++) {
            int64_t code = least + (part == 39 ? gaps - 1 : part < 4 ? part : gaps * part / 40);
            double low = exp2(level_log<Codes>(range, code)), high = exp2(level_log<Codes>(range, code + 1));
            float x = (float)(low + (high - low) * (part % 2 ? 0.0837 : 0.71));
            double want = ((double)x - low) / (high - low);
            int up = 0, wrong = 0;
            for (uint32_t noise = 0; noise < 65536; noise++) {
                uint32_t word = log_word<Codes, STOCHASTIC>(x, s, noise);
                int64_t got = (word - LOG_BIAS<Codes, STOCHASTIC>) >> 16;
                up += got == code + 1, wrong += got != code && got != code + 1;
            }
            double slack = place_slack<Codes>(range, (double)code);
            double bound = 1.5 / 65536.0 + 2.0 * slack, error = fabs(up / 65536.0 - want);
            // The logarithm's error may reach over a level.
            expect(wrong <= 65536.0 * slack + 1.0, "%s: %a goes elsewhere %d times", name, (double)x, wrong);
            expect(error <= bound, "%s: %a goes up %d of 65536 times, not %.1f", name, (double)x, up, want * 65536.0);
            worst = fmax(worst, error / bound);
        }
    }
    note(test, "%s %.2f of bound", name, worst);
}

TEST(logs_stochastic_counts) {
    for_formats([&](auto codes, const char* name) { check_counts<decltype(codes)>(test, name); });
}

// Zeros, subnormals, NaN, infinity, what is negative, in blocks of 256 with a range each.
template <class Codes, Rounding ROUNDING>
static void check_limits(Test* test, const char* name) {
    static LogTile tile, plain;
    for (int i = 0; i < TILE_ELEMENTS; i++) {
        int block = i / 256;
        float x = ldexpf(1.0f + fabsf(test_uniform(2, i)), block * 9 - 50 - i % 23);
        tile.x[i] = block == 2 ? 0.0f : block == 3 ? ldexpf(x, -100) : x;  // 3: mostly subnormal
        if (block == 4) tile.x[i] = 0x1.234p-33f;
        if (block == 1 && i % 7 == 0) tile.x[i] = FLT_TRUE_MIN;  // beside what is not small
        plain.x[i] = tile.x[i];
        if (block == 6 && i % 4 == 0) {
            const float strange[] = {NAN, -1.0f, -0.0f, -INFINITY};
            tile.x[i] = strange[i / 4 % 4], plain.x[i] = 0.0f;
        }
        if (block == 7 && i % 5 == 0) tile.x[i] = INFINITY, plain.x[i] = LOG_MAX;
        if (block == 5 && i % 5 == 0) tile.x[i] = plain.x[i] = 0.0f;
    }
    tile_store<Codes, 256, ROUNDING>(&tile, 3);
    tile_store<Codes, 256, ROUNDING>(&plain, 3);
    for (int b = 0; b < TILE_ELEMENTS / 256; b++) {
        LogRange range = log_load<Codes>(tile_streams(&tile), b);
        expect(tile.extra[b] == plain.extra[b] && (!Codes::OWN || tile.more[b] == plain.more[b]), "%s: range %d", name,
               b);
        double unit = level_log<Codes>(range, Codes::FIRST + 1) - level_log<Codes>(range, Codes::FIRST);
        for (int i = b * 256; i < (b + 1) * 256; i++) {
            double x = plain.x[i], got = tile.back[i];
            expect(tile.back[i] == plain.back[i], "%s: %g became %g, %g %g", name, (double)tile.x[i], got, x,
                   (double)plain.back[i]);
            if (x == 0.0) {
                expect(got == (Codes::OWN ? 0.0 : (double)FLT_MIN), "%s: a zero became %g", name, got);
                continue;
            }
            double off = fabs(log2(got) - log2(fmax(x, LEAST_V<Codes>)));
            expect(got > 0.0 && off <= (ROUNDING == NEAREST ? 0.5001 : 1.0001) * unit + 1e-4, "%s: %g became %g", name,
                   x, got);
        }
    }
    expect(tile.extra[2] == 0.0f && (!Codes::OWN || tile.more[2] == 0.0f), "%s: a range of zeros", name);
    // These were never written.
    memset(&tile, 0, sizeof(tile));
    LogBlocks<Codes, 256, ROUNDING>::load(tile_streams(&tile), 0, tile.back, TILE_ELEMENTS, NoiseKey{});
    for (float x : tile.back) expect(x == (Codes::OWN ? 0.0f : FLT_MIN), "%s: never written, %g", name, (double)x);
}

TEST(logs_limits) {
    for_formats([&](auto codes, const char* name) {
        check_limits<decltype(codes), NEAREST>(test, name);
        check_limits<decltype(codes), STOCHASTIC>(test, formatted("%s:sr", name));
    });
}
