// Tests of subtractive dither: the error is uniform and does not depend on the value, decoding draws the number that
// encoding drew wherever the block lies in a call, zeros and ends of the range, and averages that rounding to nearest
// leaves standing. formats.cu has its random combinations and its twins on the GPU, convert.cu its checkpoints.
#include "../../optim/kernel.cuh"
#include "../../optim/table.cuh"
#include "rules.h"

// Tiles of a storage on the CPU, blocks of 32.
constexpr int TILES = 256, BLOCK = 32, ELEMENTS = TILES * TILE_ELEMENTS, BLOCKS = ELEMENTS / BLOCK;

struct Arena {
    unsigned char codes[ELEMENTS];
    float scales[BLOCKS];
    float x[ELEMENTS], back[ELEMENTS];
};

static Arena arena;

// Stores arena.x and reads it again, as of element `element` of a larger arena.
template <class Storage>
static void there_and_back(uint32_t slot, int64_t element = 0) {
    Streams streams = {arena.codes, arena.scales};
    NoiseKey key = {5, 7, slot, element}, later = {6, 19, slot, element};
    Storage::store(streams, 0, arena.x, ELEMENTS, key);
    Storage::load(streams, 0, arena.back, ELEMENTS, later);
}

// What stands for the element in units of a step, in (-1/2, 1/2) of the level that its code is.
template <class Format>
static double in_steps(double x, double unit, bool decoded) {
    return Format::ROOT ? sqrt(x / (unit * unit) + (decoded ? 1.0 / 12.0 : 0.0)) : x / unit;
}

template <class Format>
constexpr double LAST = (double)Format::LARGEST* Format::UNITS;

// Element k of each block is magnitude k, the first the block's largest. Of `last` steps; v holds no less than one.
static double magnitude(int k, double last, bool has_sign) {
    if (k == 0) return last;
    double part = k < 8 ? (double)k / 7.0 * 3.0 / last : (double)(k - 4) / 28.0;
    return has_sign ? (k % 2 ? -part : part) * last : 1.0 + part * (last - 1.0);
}

template <class Format>
static double check_errors(Test* test, const char* name, uint32_t slot) {
    const double last = LAST<Format>, n = BLOCKS;
    for (int i = 0; i < ELEMENTS; i++) {
        double top = exp2(8.0 * (double)test_uniform(1, i / BLOCK)), y = magnitude(i % BLOCK, last, Format::SIGNED);
        double value = (double)(float)top * y / last;
        arena.x[i] = (float)(Format::ROOT ? value * value : value);
    }
    there_and_back<Blocks<Format, BLOCK, ScaleFp32, DITHER>>(slot, 11 * TILE_ELEMENTS);
    double worst = 0.0;
    for (int k = 0; k < BLOCK; k++) {
        double sum = 0.0, squares = 0.0, most = 0.0;
        int bin[16] = {};
        for (int b = 0; b < BLOCKS; b++) {
            double unit = (double)arena.scales[b] / (double)Format::UNITS, x = (double)arena.x[b * BLOCK + k];
            double back = in_steps<Format>((double)arena.back[b * BLOCK + k], unit, true);
            double error = back - in_steps<Format>(x, unit, false);
            sum += error, squares += error * error;
            if (!(fabs(error) <= most)) most = fabs(error);
            bin[(int)fmin(fmax((error + 0.5) * 16.0, 0.0), 15.0)]++;
        }
        double y = magnitude(k, last, Format::SIGNED), counts = 0.0;
        double mean = fabs(sum / n) / sqrt(1.0 / 12.0 / n),
               square = fabs(squares / n - 1.0 / 12.0) / sqrt(1 / 180.0 / n);
        for (int count : bin) counts = fmax(counts, fabs(count - n / 16.0) / sqrt(n * 15.0 / 256.0));
        expect(most <= 0.5005, "%s: %g steps come back off by %g", name, y, most);
        expect(mean < 4.0 && square < 4.0, "%s at %g steps: mean %.1f, square %.1f standard errors off", name, y, mean,
               square);
        expect(counts < 4.5, "%s at %g steps: a sixteenth is %.1f standard errors off", name, y, counts);
        worst = fmax(worst, fmax(mean, square));
    }
    return worst;
}

TEST(dither_error_is_uniform) {
    double worst = check_errors<Lin8>(test, "lin8 in m", NOISE_M);
    worst = fmax(worst, check_errors<Ulin8>(test, "ulin8", NOISE_V));
    worst = fmax(worst, check_errors<Lin4>(test, "lin4", NOISE_V));
    worst = fmax(worst, check_errors<Sqrt8>(test, "sqrt8", NOISE_V));
    worst = fmax(worst, check_errors<Sqrt4>(test, "sqrt4", NOISE_V));
    snprintf(test->note, sizeof(test->note), "%.1f standard errors of 4", worst);
}

TEST(dither_is_drawn_by_block_stream_and_scale) {
    // 512 blocks of 32, 4 streams, 8 neighbouring scales: their 16384 draws fill the 4096 numbers evenly, the mean of
    // the count of distinct ones is 4096 (1 - e^-4) = 4021, its standard error below 9. Neither seed nor step matters.
    static bool seen[4096];
    int distinct = 0, draws = 0;
    memset(seen, 0, sizeof(seen));
    for (int block = 0; block < 512; block++) {
        for (uint32_t draw = 0; draw < 32; draw++) {
            float scale = bits_float(0x3f800000u + draw / 4);
            NoiseKey key = {1, 2, draw % 4, (int64_t)1 << 40}, other = {3, 4, draw % 4, (int64_t)1 << 40};
            float u = dither_draw(key, block * 32, scale);
            expect(u > -0.5f && u < 0.5f && u == dither_draw(other, block * 32, scale), "%g", (double)u);
            int k = (int)((u + 0.5f) * 4096.0f);
            expect((float)k + 0.5f == (u + 0.5f) * 4096.0f, "%g", (double)u);
            distinct += !seen[k], draws++;
            seen[k] = true;
        }
    }
    expect(draws == 16384 && abs(distinct - 4021) < 40, "%d distinct numbers of %d", distinct, draws);
}

TEST(dither_is_the_same_in_parts) {
    // Blocks of 256 read and written 8 to 256 elements at a time are those of the whole, at the same place in the
    // arena; at another one they are not.
    typedef Blocks<Lin8, 256, ScaleFp32, DITHER> Storage;
    static float part[ELEMENTS];
    for (int i = 0; i < ELEMENTS; i++) arena.x[i] = test_uniform(8, i) * ldexpf(1.0f, i / 256 % 20);
    const int64_t element = 5ll << 32;
    there_and_back<Storage>(NOISE_M, element);
    Streams streams = {arena.codes, arena.scales};
    for (int n = 8, first = 0; first < ELEMENTS; first += n, n = first / 512 % 2 ? 8 : 256) {
        NoiseKey key = {9, 9, NOISE_M, element};
        Storage::load(streams, first, part + first, n, key);
    }
    expect(memcmp(part, arena.back, sizeof(part)) == 0, "parts");
    for (int tile = 0; tile < TILES; tile++) {
        Streams there = {arena.codes + tile * TILE_ELEMENTS, arena.scales + tile * TILE_ELEMENTS / 256};
        NoiseKey key = {9, 9, NOISE_M, element + tile * TILE_ELEMENTS};
        Storage::load(there, 0, part + tile * TILE_ELEMENTS, TILE_ELEMENTS, key);
    }
    expect(memcmp(part, arena.back, sizeof(part)) == 0, "tiles");
    int same = 0;
    for (uint32_t stream : {NOISE_V, NOISE_SLOW, NOISE_M}) {
        Storage::load(streams, 0, part, ELEMENTS, {9, 9, stream, element + (stream == NOISE_M ? 2048 : 0)});
        for (int i = 0; i < ELEMENTS; i += 256) same += part[i] == arena.back[i];
    }
    expect(same < 10, "%d of %d blocks have the dither of another place", same, 3 * ELEMENTS / 256);
}

// Ends of the range, zeros, subnormals, NaN and infinity. In v, `least` of the square of a step or of a step is the
// smallest that comes back.
template <class Format>
static void check_limits(Test* test, const char* name, uint32_t slot, double least) {
    const double last = LAST<Format>;
    for (int i = 0; i < ELEMENTS; i++) {
        int block = i / BLOCK, k = i % BLOCK;
        float value = ldexpf(fabsf(test_uniform(3, i)), -(i * 37 % 120));
        if (k == 0) value = 1.0f + fabsf(test_uniform(4, i));
        if (k == 1) value = 0.0f;
        if (k == 2) value = -0.0f;
        if (block % 8 == 1) value = 0.0f;
        if (block % 8 == 2) value = ldexpf(value, -133);
        if (block % 8 == 3 && k == 5) value = Format::ROOT ? 3.19e38f : INFINITY;
        if (block % 8 == 4 && k == 6) value = NAN;
        arena.x[i] = value;
    }
    there_and_back<Blocks<Format, BLOCK, ScaleFp32, DITHER>>(slot);
    double most = 0.0;
    for (int i = 0; i < ELEMENTS; i++) {
        float x = arena.x[i], back = arena.back[i];
        double unit = (double)arena.scales[i / BLOCK] / (double)Format::UNITS, step = Format::ROOT ? unit * unit : unit;
        expect(isfinite(back), "%s: %g becomes %g", name, (double)x, (double)back);
        if (unit == 0.0) expect(back == 0.0f && (x == 0.0f || Format::ROOT), "%s: %g", name, (double)back);
        if (unit == 0.0) continue;
        if (slot == NOISE_V) {
            expect(back > 0.0f && (double)back >= least * step * 0.999, "%s: a v of %g becomes %g of a step", name,
                   (double)x, (double)back / step);
        } else {
            expect((back == 0.0f) == (x == 0.0f), "%s: %g becomes %g", name, (double)x, (double)back);
        }
        double beyond = in_steps<Format>((double)back, unit, true) - last;
        expect(beyond <= 0.5005, "%s: %g steps beyond the largest level", name, beyond);
        most = fmax(most, beyond);
    }
    expect(most > 0.49, "%s: at most %g beyond the largest level", name, most);
}

TEST(dither_zeros_and_limits) {
    check_limits<Lin8>(test, "lin8 in m", NOISE_M, 0.0);
    check_limits<Lin8>(test, "lin8 in slow", NOISE_SLOW, 0.0);
    check_limits<Lin8>(test, "lin8 in v", NOISE_V, 0.5);
    check_limits<Ulin8>(test, "ulin8", NOISE_V, 0.5);
    check_limits<Lin4>(test, "lin4", NOISE_V, 0.5);
    check_limits<Sqrt8>(test, "sqrt8", NOISE_V, 1.0 / 6.0);
    check_limits<Sqrt4>(test, "sqrt4", NOISE_V, 1.0 / 6.0);
}

// What is left of a gap between an average and its aim after some steps, over all blocks: the mean in units of the gap
// at the start, and its standard error. Each step closes less than half a step of the format; the first element of a
// block keeps its largest, which differs a little between blocks and steps.
template <class Storage, class Format>
static void close_gap(uint32_t slot, int steps, double rest, double* left, double* error) {
    const double last = LAST<Format>, low = Format::ROOT ? last / 2.0 : last / 4.0;
    const double first = low / last, begin = Format::ROOT ? first * first : first, aim = begin + 1.5 / last;
    for (int i = 0; i < ELEMENTS; i++) arena.x[i] = (float)begin;
    memset(arena.scales, 0, sizeof(arena.scales));
    for (int step = 1; step <= steps; step++) {
        for (int i = 0; i < ELEMENTS; i++) {
            bool top = i % BLOCK == 0;
            double x = step == 1 ? begin : (double)arena.back[i];
            double largest = 1.0 + 1e-4 * (double)test_uniform((uint64_t)step, i);
            arena.x[i] = (float)(top ? largest : x + rest * (aim - x));
        }
        there_and_back<Storage>(slot);
    }
    double sum = 0.0, squares = 0.0;
    for (int b = 0; b < BLOCKS; b++) {
        double mean = 0.0;
        for (int k = 1; k < BLOCK; k++) mean += (double)arena.back[b * BLOCK + k] / (BLOCK - 1);
        double part = (aim - mean) / (aim - begin);
        sum += part, squares += part * part;
    }
    *left = sum / BLOCKS;
    *error = sqrt((squares / BLOCKS - *left * *left) / BLOCKS);
}

template <class Format>
static double check_average(Test* test, const char* name, uint32_t slot) {
    const double rest = 0.05, want = pow(1.0 - rest, 30.0);
    double left, error, stale, stale_error;
    close_gap<Blocks<Format, BLOCK, ScaleFp32, DITHER>, Format>(slot, 30, rest, &left, &error);
    close_gap<Blocks<Format, BLOCK, ScaleFp32, NEAREST>, Format>(slot, 30, rest, &stale, &stale_error);
    expect(error < 0.02 && fabs(left - want) < 4.0 * error, "%s: %.4f of the gap is left, %.4f is right, +- %.4f", name,
           left, want, error);
    expect(fabs(stale - want) > 0.1, "%s to nearest: %.4f of the gap is left, and %.4f is right", name, stale, want);
    return fabs(left - want) / error;
}

TEST(dither_averages_move) {
    double worst = check_average<Lin8>(test, "lin8 in m", NOISE_M);
    worst = fmax(worst, check_average<Ulin8>(test, "ulin8", NOISE_V));
    worst = fmax(worst, check_average<Lin4>(test, "lin4", NOISE_V));
    worst = fmax(worst, check_average<Sqrt8>(test, "sqrt8", NOISE_V));
    worst = fmax(worst, check_average<Sqrt4>(test, "sqrt4", NOISE_V));
    snprintf(test->note, sizeof(test->note), "%.1f standard errors of 4", worst);
}

static OptimConfig dither_config(const char* m, const char* v) {
    OptimConfig config = {"", "adamw", "bf16+fp32", "fp32", m, v, 0.9f, 0.95f, 1e-8f, 0.1f, 77};
    char error[4096];
    if (!optim_resolve(&config, error, sizeof(error))) printf("    %s\n", error), exit(1);
    return config;
}

TEST(dither_names) {
    OptimConfig config = dither_config("lin8:dither", "sqrt4:dither");
    expect(is(config.m, "lin8/256:dither") && is(config.v, "sqrt4/128:dither"), "%s %s", config.m, config.v);
    config = dither_config("lin8/2048:dither", "ulin8/32:dither");
    expect(is(config.m, "lin8/2048:dither") && is(config.v, "ulin8/32:dither"), "%s %s", config.m, config.v);
    for (const char* name : {"lin4:dither", "sqrt8:dither", "ulin8:dither", "lin4/64:dither"}) {
        config = dither_config("bf16", name);
    }
    for (const char* name : {"dyn8:dither", "lin8@bf16:dither", "bf16:dither", "soft8/32:dither"}) {
        OptimConfig wrong = {"", "adamw", "bf16:sr", "fp32", name, "", 0.9f, 0.95f, 1e-8f, 0.1f, 77};
        char error[4096] = "";
        expect(!optim_resolve(&wrong, error, sizeof(error)) && strstr(error, "is not known"), "%s: %s", name, error);
    }
    OptimConfig wrong = {"", "adamw", "bf16:sr", "fp32", "sqrt4:dither", "", 0.9f, 0.95f, 1e-8f, 0.1f, 77};
    expect_refusal(test, wrong, "--m: \"sqrt4/128:dither\"", "holds no negative numbers");
}

TEST(dither_padding_of_weights_stays_zero) {
    // A tensor's last block is half padding: the zeros of m there come back as zeros.
    Device dev;
    device_open(&dev, false, 0);
    OptimConfig config = dither_config("lin8:dither", "sqrt4:dither");
    OptimTensor tensor = {"tensor", 1, 300, true, 0};
    int64_t elements = optim_layout(&tensor, 1);
    float values[300], one = 1.0f, *grads = (float*)calloc((size_t)elements, sizeof(float));
    for (int i = 0; i < 300; i++) values[i] = start(i);
    Optim* optim = optim_create(&dev, &config, &tensor, 1, OPTIM_FP32);
    optim_set_weights(optim, 0, values);
    for (int step = 1; step <= 10; step++) {
        for (int i = 0; i < 300; i++) grads[i] = gradient(step, i);
        optim_step(optim, grads, &one, 1e-2f, step);
    }
    int64_t moved = 0, checked = 0;
    for (int s = 0; s < optim_stream_count(optim); s++) {
        OptimStream stream = optim_stream(optim, s);
        if (!is(stream.name, "master")) continue;
        for (int64_t i = 300; i < elements; i++) moved += ((const float*)stream.data)[i] != 0.0f, checked++;
    }
    expect(checked == elements - 300 && moved == 0, "%lld of %lld", (long long)moved, (long long)checked);
    optim_free(optim);
    free(grads);
}
