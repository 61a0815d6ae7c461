// Tests of the formats of states and of weights in blocks. Of each format: every code survives decoding and encoding,
// encoding is the nearest level against a search of all levels, stochastic rounding is linear in value counted over all
// its noise. Of each row of the tables (storage properties): scales are the least that hold, what is stored is the
// nearest level or, with noise, one of the two around and in the mean the value, a v of zero becomes the least level
// above it and no other v zero, NaN changes nothing else, and pieces do what the whole does. On a GPU what packs codes.
// Names and sizes are in tables.cu, whole steps in laws.cu. A new format is tested here by its rows in
// optim/table.cuh alone.
#include <algorithm>

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

// Every mantissa, at a magnitude where nothing is subnormal: the rest only shifts it.
template <class Format>
static void check_over_largest(Test* test, const char* name) {
    int differ = 0;
    for (uint32_t bits = 127u << 23; bits < 128u << 23; bits++) {
        float top = bits_float(bits);
        differ += over_largest<Format>(top) != top / Format::LARGEST;
    }
    expect(differ == 0, "%s: %d scales are not top / %g rounded once", name, differ, (double)Format::LARGEST);
}

#define NO_CASE(...)
#define FORMAT_CASE(NAME, NOTE, FORMAT, BLOCK) Case<FORMAT>::get(NAME, FORMAT::SIGNED),
#define CHECK_OVER(NAME, NOTE, FORMAT, BLOCK) check_over_largest<FORMAT>(test, NAME);
static const std::vector<FormatCase> cases = {OPTIM_STATES(NO_CASE, FORMAT_CASE, NO_CASE)};

TEST(formats_scales_are_rounded_once) {
    OPTIM_STATES(NO_CASE, CHECK_OVER, NO_CASE)
}

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
    for (float scale : {253.0f, 106.0f, 116.5625f, 26.0f}) {  // 126 + log2 of the largest
        static uint8_t codes[TILE_ELEMENTS];
        static float x[TILE_ELEMENTS];
        for (int i = 0; i < TILE_ELEMENTS; i++) codes[i] = (uint8_t)i;
        AdaLog8<NEAREST>::load({codes, &scale}, 0, x, TILE_ELEMENTS, NoiseKey{});
        for (int c = 0; c < 256; c++) {
            const double log = (double)scale * c / 255.0 - 126.0, slack = 8e-7 + ldexp(fabs(log) + 252.0, -24);
            expect(fabs(log2((double)x[c]) - log) <= slack, "adalog8 %d is 2^%.9g, want 2^%.9g", c, log2((double)x[c]),
                   log);
        }
    }
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

TEST(formats_stochastic_counts) {
    // A level is kept whatever the noise: zero, of which padding is made, and the largest, also from a rounding above.
    // Over all 65536 noise values, the mean is y: within one and a half counts of 65536, of a gap, and the rounding of
    // y and of the gap in fp32. Two places in the gaps between neighbours, of 8 bits in every third; subnormals,
    // binades' borders and the ends are gaps too.
    double worst = 0.0;
    for (const FormatCase& format : cases) {
        const SortedLevels levels = levels_of(&format);
        size_t stride = format.bits == 8 ? 3 : 1;
        const uint32_t top = format.nearest(format.largest, 0);
        int moved = 0;
        for (uint32_t noise = 0; noise < 65536; noise++) {
            if (format.zero > 0 || (format.zero == 0 && format.has_sign))
                moved += format.decode(format.stochastic(0.0f, noise, 0)) != 0.0f;
            if (format.zero == 0 && !format.has_sign) moved += format.stochastic(0.0f, noise, 0) > 1;
            for (float y : {format.largest, format.largest * 1.0000003f})
                moved += format.stochastic(y, noise, 0) != top;
        }
        expect(moved == 0 && format.nearest(format.largest * 1.0000005f, 0) == top, "%s: noise moves %d", format.name,
               moved);
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

// Properties of a storage, by the functions of its row.

constexpr int N = TILE_ELEMENTS;

// A tensor of one tile, as a row stores it.
struct Image {
    const FormatRow* row;
    OptimTensor tensor;
    SpanTile span;
    bool powers;  // scales are powers of two
    alignas(64) char codes[4 * N], table[65536];
    float scales[2 * N], third[N], next[2 * N];

    Streams streams() { return {codes, scales, table, third, next, &span}; }
    int bits() const { return row->stream[0].bits; }
    int code(int i) const { return bits() == 8 ? (uint8_t)codes[i] : codes[i / 2] >> (i % 2 ? 0 : 4) & 15; }
    bool named(const char* part) const { return strstr(row->name, part) != nullptr; }
    bool roots() const { return named("sqrt"); }

    // Stores x, `piece` elements at a time, and loads it again.
    void store(const float* x, float* back, const NoiseKey& key, int piece = N) {
        memset(codes, 0, sizeof(codes)), memset(scales, 0, sizeof(scales)), memset(third, 0, sizeof(third));
        memset(next, 0, sizeof(next));
        if (row->table_bytes) row->fill(table);
        const bool spans = row->stream[1].span != SPAN_RUN;
        for (int i = 0; i < N && spans; i += piece) row->measure(streams(), i, x + i, piece);
        for (int i = 0; i < N; i += piece) row->store(streams(), i, x + i, piece, key);
        if (spans) memcpy(scales, next, sizeof(next));
        for (int i = 0; i < N; i += piece) row->load(streams(), i, back + i, piece, NoiseKey{});
    }
};

// The largest magnitude among the elements that share element i's scale.
static void shared_tops(const Image& image, const float* x, float* top) {
    const StreamInfo& scales = image.row->stream[1];
    const int64_t cols = image.tensor.cols, used = image.tensor.rows * cols;
    const bool vector = image.tensor.rows == 1, rank1 = scales.span == SPAN_RANK1;
    const int run = scales.span == SPAN_TENSOR ? N : rank1 ? 128 : scales.run;
    std::vector<float> row(N), col(N), block(N);
    for (int64_t i = 0; i < used; i++) {
        for (float* each : {&row[i / cols], &col[i % cols], &block[i / run]}) *each = fmaxf(*each, fabsf(x[i]));
    }
    for (int64_t i = 0; i < N; i++) {
        top[i] = !rank1 || vector ? block[i / run] : i < used ? fminf(row[i / cols], col[i % cols]) : 0.0f;
    }
}

// The codes that a row writes for the largest of a block: of 128 mantissas, of both signs.
static void mark_largest(const FormatRow* row, bool is_v, bool* written) {
    static Image image;
    static float x[N], back[N];
    image.row = row, image.tensor = {"tensor", 1, N, true, 0};
    if (row->stream[1].span != SPAN_RUN) image.span = span_tile(row->stream[1].span, &image.tensor, 0, 0);
    const StreamInfo& scales = row->stream[1];
    const int run = scales.span == SPAN_RUN && scales.run > 0 && scales.run < N ? scales.run : N;
    for (int mantissa = 128; mantissa < 256; mantissa += N / run) {
        for (int i = 0; i < N; i++) x[i] = (float)(mantissa + i / run) * (i % 2 && !is_v ? -1.0f : 1.0f);
        image.store(x, back, NoiseKey{5, 1, NOISE_M});
        for (int i = 0; i < N; i += i % 2 ? run - 1 : 1) written[image.code(i)] = true;
    }
}

// All numbers that the codes of element i can stand for, with the scales that are stored, in order; of roots their
// roots. Not those that are never written: NaN, infinity, what lies beyond the largest; of a v above zero, zero.
static std::vector<std::vector<double>> stored_levels(Image* image, bool is_v) {
    static float of_code[256][N];
    std::vector<char> kept(image->codes, image->codes + sizeof(image->codes));
    std::vector<std::vector<double>> levels(N);
    const int codes = 1 << image->bits();
    bool written[256] = {};
    mark_largest(image->row, is_v, written);
    for (int i = 0; i < N; i++) written[image->code(i)] = true;
    for (int code = 0; code < codes; code++) {
        memset(image->codes, codes == 256 ? code : code * 17, N);
        image->row->load(image->streams(), 0, of_code[code], N, NoiseKey{});
    }
    for (int i = 0; i < N; i++) {
        float low = INFINITY, high = -INFINITY;
        for (int code = 0; code < codes; code++) {
            if (!written[code]) continue;
            low = fminf(low, of_code[code][i]), high = fmaxf(high, of_code[code][i]);
        }
        for (int code = 0; code < codes; code++) {
            const float x = of_code[code][i];
            const double level = image->roots() ? sqrt((double)x) : x;
            if (isfinite(level) && x >= low && x <= high && (!is_v || level > 0.0)) levels[i].push_back(level);
        }
    }
    memcpy(image->codes, kept.data(), kept.size());
    for (auto& each : levels) std::sort(each.begin(), each.end());
    return levels;
}

// Runs of 32 of magnitudes of their own, or of rows and columns; one run is zero.
static void image_values(const Image& image, bool has_sign, float* x) {
    for (int i = 0; i < N; i++) {
        const int run = i / 32, exponent = image.row->stream[1].span == SPAN_RUN ? run % 7 * 4 - 12 : i % 11 - i / 97;
        const float value = ldexpf(test_uniform(11, i), exponent);
        x[i] = run == 9 || i >= image.tensor.rows * image.tensor.cols ? 0.0f : has_sign ? value : fabsf(value);
    }
}

static void check_levels(Test* test, Image* image, const float* x, bool is_v) {
    const char* name = image->row->name;
    static float back[N], top[N];
    const bool noisy = image->named(":sr"), log = image->named("adalog8"), dq8 = image->named("@dq8");
    double sum = 0.0, variance = 0.0;
    std::vector<std::vector<double>> all;
    shared_tops(*image, x, top);
    const double most = *std::max_element(top, top + N);
    int far = 0, wide = 0, lost = 0;
    for (uint32_t step = 1; step <= (noisy ? 16 : 1); step++) {
        image->store(x, back, NoiseKey{5, step, (uint32_t)(is_v ? NOISE_V : NOISE_M)});
        if (step == 1) all = stored_levels(image, is_v);
        for (int i = 0; i < N; i++) {
            const std::vector<double>& levels = all[i];
            const double y = image->roots() ? sqrt((double)x[i]) : x[i], got = image->roots() ? sqrt(back[i]) : back[i],
                         absmax = image->roots() ? sqrt((double)top[i]) : top[i];
            lost += is_v && x[i] > 0.0f && !(back[i] > 0.0f);
            if (absmax == 0.0 || levels.empty()) {
                far += !log && back[i] != 0.0f;
                continue;
            }
            // The scale is the least that holds the largest: of its type, and no smaller than what the tile's allows.
            const double ratio = std::max(levels.back(), -levels.front()) / absmax, room = image->powers ? 2.0
                                                                                           : dq8         ? 1.1251
                                                                                                         : 1.0;
            const bool small = dq8 && absmax < (image->roots() ? sqrt(most) : most) * 0x1p-30;
            wide += ratio < 1.0 - (log ? 3e-5 : 1e-6) || (!small && ratio > room * (1.0 + (log ? 3e-5 : 1e-6)));
            if (x[i] == 0.0f && is_v) far += !(fabs(got - levels[0]) <= 1e-6 * levels[0]);
            if (x[i] == 0.0f) continue;
            const size_t above = std::upper_bound(levels.begin(), levels.end(), y) - levels.begin();
            const double down = above > 0 ? levels[above - 1] : levels[0],
                         up = above < levels.size() ? levels[above] : levels.back();
            const double slack = 3e-5 * absmax + (image->bits() == 8 ? 1e-4 * fabs(y) : 0.0);
            if (!noisy && log) {
                const double off = fabs(log2(got / y)), best = fmin(fabs(log2(down / y)), fabs(log2(up / y)));
                far += !(off <= best + 1e-4);
            } else if (!noisy) {
                far += !(fabs(got - y) <= fmin(fabs(down - y), fabs(up - y)) + slack);
            } else {
                far += !(got >= down - slack && got <= up + slack);
                const double part = (y - down) / (up - down);
                if (!(up > down) || log || up - down < 4.0 * slack) continue;
                sum += (got - y) / (up - down), variance += part * (1.0 - part);
            }
        }
    }
    expect(far == 0 && wide == 0 && lost == 0, "%s, %d x %d, %s: %d not next to what was stored, %d scales, %d lost",
           name, (int)image->tensor.rows, (int)image->tensor.cols, is_v ? "v" : "m", far, wide, lost);
    expect(fabs(sum) <= 5.0 * sqrt(variance) &&
               (variance > 100.0 || !noisy || log || image->row->stream[1].span != SPAN_RUN),
           "%s: the mean is off by %.1f standard errors of %.0f", name, sum / sqrt(variance + 1e-9), variance);
}

// Beside NaN all is as beside zero, and beside infinity finite. A v that is NaN becomes no less than one that is
// zero.
static void check_rare(Test* test, Image* image, const float* given, bool is_v) {
    static float x[N], back[2][N];
    memcpy(x, given, sizeof(x));
    for (int nan = 0; nan < 2; nan++) x[5] = nan ? NAN : 0.0f, image->store(x, back[nan], NoiseKey{5, 7, NOISE_V});
    expect(!is_v || (back[1][5] >= back[0][5] && isfinite(back[1][5])), "%s: NaN becomes %g, and zero %g",
           image->row->name, (double)back[1][5], (double)back[0][5]);
    back[0][5] = back[1][5] = 0.0f;
    expect(memcmp(back[0], back[1], sizeof(back[0])) == 0, "%s: NaN changes others", image->row->name);
    x[5] = INFINITY;
    image->store(x, back[0], NoiseKey{5, 7, NOISE_V});
    for (int i = 0; i < N; i++) expect(isfinite(back[0][i]), "%s: %g", image->row->name, (double)back[0][i]);
}

// Numbers that were stored are stored again as they were, noise or not, where scales are powers of two.
static void check_rest(Test* test, Image* image, const float* x) {
    static float back[2][N];
    image->store(x, back[0], NoiseKey{5, 1, NOISE_M}), image->store(back[0], back[1], NoiseKey{5, 2, NOISE_M});
    expect(memcmp(back[0], back[1], sizeof(back[0])) == 0, "%s changes", image->row->name);
    expect(memcmp(back[0], x, sizeof(back[0])) != 0, "%s rounds nothing", image->row->name);
}

// Threads of a GPU take 8 or 16 elements, a core a whole tile.
static void check_pieces(Test* test, Image* image, const float* x) {
    static Image whole;
    static float back[2][N];
    const NoiseKey key = {1, 2, NOISE_V};
    image->store(x, back[0], key);
    whole = *image;
    for (int piece : {8, 16}) {
        image->store(x, back[1], key, piece);
        expect(memcmp(&whole, image, sizeof(whole)) == 0 && memcmp(back[0], back[1], sizeof(back[0])) == 0, "%s by %d",
               image->row->name, piece);
    }
}

TEST(formats_storages) {
    static Image image;
    static float x[N];
    const Table<FormatRow>&states = state_table(), &of_weights = weights_table();
    int rows = 0;
    for (int r = 0; r < states.count + of_weights.count; r++) {
        const bool weights = r >= states.count;
        image.row = weights ? &of_weights.row[r - states.count] : &states.row[r];
        image.powers = weights || image.named("@e8m0");
        if (weights && (image.named("+") || image.row->feeds_back)) continue;  // rules.cu
        const StreamInfo& scales = image.row->stream[1];
        for (int64_t cols : {2043, 61, 1}) {
            const bool spans = scales.span != SPAN_RUN;
            if (cols != 2043 && !spans) continue;
            image.tensor = {"tensor", cols == 2043 ? 1 : cols == 61 ? 33 : 2000, cols, true, 0};
            if (spans) image.span = span_tile(scales.span, &image.tensor, 0, 0);
            for (bool is_v : {false, true}) {
                if (is_v ? weights : !image.row->has_sign) continue;
                image_values(image, !is_v, x);
                if (image.bits() <= 8) check_levels(test, &image, x, is_v);
                if (image.bits() <= 8 && weights) check_rest(test, &image, x);
            }
            if (image.bits() <= 8) check_rare(test, &image, x, !weights);
            if (spans || scales.bits == 0) check_pieces(test, &image, x);
            rows++;
        }
    }
    expect(rows > 200, "%d rows", rows);
    note(test, "%d rows", rows);
}

TEST(formats_narrow_scales) {
    // Never below the scale that is wanted, and the next one that the type has.
    for (int i = 0; i < 10000; i++) {
        float scale = ldexpf(1.0f + fabsf(test_uniform(1, i)), i % 250 - 125);
        float e8m0 = ScaleE8m0::decode(ScaleE8m0::encode(scale));
        expect(e8m0 >= scale && (double)e8m0 < (double)scale * 2.0, "e8m0 %a of %a", (double)e8m0, (double)scale);
        expect(ScaleE8m0::decode(ScaleE8m0::encode(e8m0)) == e8m0, "e8m0 %a", (double)e8m0);
    }
    expect(ScaleE8m0::encode(3.40282347e38f) == 254, "largest");
    expect(ScaleE8m0::encode(0.0f) == 0 && ScaleE8m0::decode(0) == 0.0f, "zero");
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

// Weights of linear levels are cut to the most that a scale reaches, beside which what is small becomes small.
TEST(formats_linear_weights_are_cut_at_2e33) {
    typedef Blocks<Lin8OfPowers, 32, ScaleE8m0, STOCHASTIC> Weights;
    static float x[N], back[N];
    static uint8_t codes[N], scales[N / 32];
    for (float top : {1.5e33f, 2e33f, 1e36f, 3.40282347e38f, INFINITY}) {
        // The scale is a power of two that makes a block's largest at least 63.5 steps: noise is less than one.
        const float want = top < 2e33f ? top : 2e33f, step = want / 63.0f;
        for (int i = 0; i < N; i++) x[i] = i % 32 == 9 ? top : i % 32 == 20 ? -top : 1.0f;
        for (int set = 0; set < 2; set++) {
            if (!set) Weights::store({codes, scales}, 0, x, N, NoiseKey{5, 7, NOISE_WEIGHTS});
            if (set) Weights::set({codes, scales}, 0, x, N);
            Weights::load({codes, scales}, 0, back, N, NoiseKey{});
            for (int i = 0; i < N; i++) {
                const float its = i % 32 == 9 ? want : i % 32 == 20 ? -want : 0.0f;
                expect(fabsf(back[i] - its) <= step, "%g became %g beside %g", (double)x[i], (double)back[i],
                       (double)top);
            }
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
