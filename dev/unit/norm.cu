// Tests of kernels/norm.cuh: the norm of all gradients, and the clip factors of a part of the model from its own.
#include "../../kernels/norm.cuh"
#include "kernels.h"

// Makes gradients of type G in device memory, with zeros up to a whole tile, and returns how many tiles there are.
// `host` receives their values.
template <typename G>
static int64_t make_gradients(Room* room, int seed, int64_t n, const float** host, G** device) {
    const int64_t tiles = ceil_div(n, TILE_ELEMENTS);
    G* typed = room->host<G>(tiles * TILE_ELEMENTS);
    float* values = room->host<float>(n);
    for (int64_t i = 0; i < tiles * TILE_ELEMENTS; i++) typed[i] = from_float<G>(i < n ? test_uniform(seed, i) : 0.0f);
    for (int64_t i = 0; i < n; i++) values[i] = to_float(typed[i]);
    *host = values, *device = room->to_device(typed, tiles * TILE_ELEMENTS);
    return tiles;
}

// Compares the norm with double, and the factor in all its cases.
template <typename G>
static void check_norm(Test* test, const Device* dev, int64_t n) {
    Room room(dev);
    const float* host;
    G* grads;
    const int64_t tiles = make_gradients(&room, 1, n, &host, &grads);
    double *squares = room.device<double>(tiles), sum = 0.0;
    float* result = room.device<float>(2);
    for (int64_t i = 0; i < n; i++) sum += (double)host[i] * host[i];
    const float length = (float)sqrt(sum), bound = 16 * ldexpf(1.0f, -24);
    const auto norm = [&](float last, float clip) {
        const G element = from_float<G>(last);
        copy_to_device(dev, grads + n - 1, &element, sizeof(G));
        tile_squares<G>(dev, dev->stream, squares, grads, tiles);
        norm_of_tiles(dev, result, squares, tiles, clip, nullptr);
        return room.to_host(result, 2);
    };
    for (const float clip : {0.0f, 2.0f, 0.25f}) {
        const float *got = norm(host[n - 1], clip * length), want = clip == 0.25f ? clip : 1.0f;
        expect(fabsf(got[0] - length) <= bound * length, "%lld: norm %.9g, want %.9g", (long long)n, got[0], length);
        expect(fabsf(got[1] - want) <= (want < 1 ? bound : 0), "%lld: factor %.9g, clip %g", (long long)n, got[1],
               clip);
    }
    const float* got = norm(NAN, 1.0f);
    expect(isnan(got[0]) && isnan(got[1]), "a NaN: norm %g, factor %g", got[0], got[1]);
    got = norm(INFINITY, 0.0f);
    expect(isinf(got[0]) && isnan(got[1]), "an infinity: norm %g, factor %g", got[0], got[1]);
    const G huge = from_float<G>(3e38f);
    copy_to_device(dev, grads, &huge, sizeof(G));
    got = norm(3e38f, 1.0f);
    expect(n == 1 || (isinf(got[0]) && isnan(got[1])), "beyond fp32: norm %g, factor %g", got[0], got[1]);
}

TEST_BOTH(norm) {
    Device dev = test_device(gpu);
    for (int64_t n : {1, 7, 5000, 1000003}) {
        check_norm<float>(test, &dev, n);
        if (gpu) check_norm<bf16>(test, &dev, n);
    }
}

constexpr int64_t LENGTH[] = {5, 4096, 70001};
constexpr int COUNT = 3;

struct PartCase {
    const char* what;
    ClipBy by;
    float clip, loss, last;
    int bad;  // tensor with an infinite gradient; -1: none
};

// Computes the factors that part_norm must give, from sums of squares in double.
static void want_factors(const PartCase& row, const double* square, double* total, float* factor) {
    *total = square[0] + square[1] + square[2];
    for (int t = 0; t < COUNT; t++) {
        double norm = sqrt(row.by == CLIP_TENSOR ? square[t] : *total);
        if (row.by == CLIP_LAST) norm = fmax(norm, row.last);
        factor[t] = row.clip > 0 && norm > row.clip ? (float)(row.clip / norm) : 1.0f;
        if (row.bad >= 0 || !isfinite(*total) || !isfinite(row.loss)) factor[t] = NAN;
    }
}

// Checks one row with gradients of type G.
template <typename G>
static void check_part(Test* test, const Device* dev, const PartCase& row) {
    Room room(dev);
    PartTiles tiles = {{}, {}, COUNT};
    double square[COUNT] = {}, *squares = room.device<double>(64);
    const double unset = NAN;
    for (int t = 0; t < COUNT; t++) {
        const float* host;
        G *grads, infinite = from_float<G>(INFINITY);
        tiles.first[t] = t ? tiles.first[t - 1] + tiles.tiles[t - 1] : 0;
        tiles.tiles[t] = make_gradients(&room, t, LENGTH[t], &host, &grads);
        if (t == row.bad) copy_to_device(dev, grads + LENGTH[t] - 1, &infinite, sizeof(G));
        for (int64_t i = 0; i < LENGTH[t]; i++) square[t] += (double)host[i] * host[i];
        tile_squares<G>(dev, dev->stream, squares + tiles.first[t], grads, tiles.tiles[t]);
    }
    float scalars[2] = {row.loss, row.last}, factor[PART_TENSORS], want[COUNT];
    double got, total;
    float* on_device = room.to_device(scalars, 2);
    PartClip clip = {
        row.by, row.clip, on_device, on_device + 1, room.to_device(&unset, 1), room.device<float>(PART_TENSORS)};
    part_norm(dev, clip, squares, tiles);
    copy_to_host(dev, factor, clip.factor, sizeof(factor));
    copy_to_host(dev, &got, clip.square, sizeof(got));
    want_factors(row, square, &total, want);
    const bool left = isnan(want[0]);
    // On a GPU a thread adds up to 32 squares in fp32, in two chains.
    const double bound = dev->gpu ? 33 * ldexp(1, -24) : 1e-12;
    expect(left ? isnan(got) : fabs(got - total) <= bound * total, "%s: square %.17g, want %.17g", row.what, got,
           total);
    for (int t = 0; t < COUNT; t++) {
        expect(left ? isnan(factor[t]) : fabs(factor[t] - want[t]) <= (bound + ldexp(1, -23)) * want[t],
               "%s: factor %d is %.9g, want %.9g", row.what, t, factor[t], want[t]);
    }
}

// The end of a step: parts that are NaN are left out and counted, and `last` stays where nothing was stepped.
static void check_end(Test* test, const Device* dev) {
    const struct {
        double square[3];
        float norm, factor, left, last;
    } rows[] = {{{9, 16, 0}, 5, 1, 0, 5}, {{9, NAN, 16}, 5, 1, 1, 5}, {{NAN, NAN, NAN}, NAN, NAN, 3, 7}};
    Room room(dev);
    float* values = room.device<float>(5);
    double* square = room.device<double>(3);
    for (const auto& row : rows) {
        float host[5] = {1, 0, 0, 0, 7};  // scalars, left alone, last
        copy_to_device(dev, values, host, sizeof(host));
        copy_to_device(dev, square, row.square, sizeof(row.square));
        for_each(dev, PartNormEnd{values, values + 3, values + 4, square, 3}, 1);
        copy_to_host(dev, host, values, sizeof(host));
        const float want[5] = {1, row.norm, row.factor, row.left, row.last};
        for (int i = 0; i < 5; i++) {
            expect(host[i] == want[i] || (isnan(host[i]) && isnan(want[i])), "value %d is %g, want %g", i, host[i],
                   want[i]);
        }
    }
}

TEST_BOTH(part_norm) {
    const PartCase rows[] = {{"no clipping", CLIP_LAST, 0, 2, 900, -1},
                             {"by last, which is larger", CLIP_LAST, 1.5f, 2, 900, -1},
                             {"by last, the part is larger", CLIP_LAST, 1.5f, 2, 3, -1},
                             {"by last, the first step", CLIP_LAST, 1.5f, 2, 0, -1},
                             {"by last, nothing to clip", CLIP_LAST, 1e6f, 2, 900, -1},
                             {"by tensor", CLIP_TENSOR, 1.5f, 2, 900, -1},
                             {"an infinite gradient", CLIP_TENSOR, 1.5f, 2, 900, 1},
                             {"a loss that is not finite", CLIP_LAST, 0, NAN, 0, -1}};
    Device dev = test_device(gpu);
    for (const PartCase& row : rows) {
        check_part<float>(test, &dev, row);
        if (gpu) check_part<bf16>(test, &dev, row);
    }
    check_end(test, &dev);
}
