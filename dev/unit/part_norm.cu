// Tests of kernels/part_norm.cuh: clip factors of a part of the model from its own gradients.
#include "../../kernels/part_norm.cuh"
#include "kernels.h"

constexpr int64_t LENGTH[] = {5, 4096, 70001};
constexpr int COUNT = 3;

struct PartCase {
    const char* what;
    ClipBy by;
    float clip, loss, last;
    int bad;  // tensor with an infinite gradient; -1: none
};

// Computes what part_norm must give, from sums of squares in double.
static void want_factors(const PartCase& row, const double* square, double* total, float* factor) {
    *total = square[0] + square[1] + square[2];
    for (int t = 0; t < COUNT; t++) {
        double norm = sqrt(row.by == CLIP_TENSOR ? square[t] : *total);
        if (row.by == CLIP_LAST) norm = fmax(norm, row.last);
        factor[t] = row.clip > 0 && norm > row.clip ? (float)(row.clip / norm) : 1.0f;
        if (row.bad >= 0 || !isfinite(*total) || !isfinite(row.loss)) factor[t] = NAN;
    }
}

// Checks one row with gradients of type G. `tiled`: the norm comes from squares of tiles, which are summed here.
template <typename G>
static void check_part(Test* test, const Device* dev, const PartCase& row, bool tiled) {
    constexpr int64_t TILE = 4000;
    Room room(dev);
    PartGrads part = {{}, {}, COUNT};
    double square[COUNT] = {}, tiles[64] = {};
    int64_t first[COUNT + 1] = {};
    const double unset = NAN;
    for (int t = 0; t < COUNT; t++) {
        G* host = room.host<G>(LENGTH[t]);
        for (int64_t i = 0; i < LENGTH[t]; i++) host[i] = from_float<G>(test_uniform(t, i));
        if (t == row.bad) host[LENGTH[t] - 1] = from_float<G>(INFINITY);
        first[t + 1] = first[t] + ceil_div(LENGTH[t], TILE);
        for (int64_t i = 0; i < LENGTH[t]; i++) {
            const double each = (double)to_float(host[i]) * to_float(host[i]);
            square[t] += each, tiles[first[t] + i / TILE] += each;
        }
        part.grads[t] = room.to_device(host, LENGTH[t]), part.n[t] = LENGTH[t];
    }
    float scalars[2] = {row.loss, row.last}, factor[PART_TENSORS], want[COUNT];
    double got, total;
    float* on_device = room.to_device(scalars, 2);
    PartClip clip = {
        row.by, row.clip, on_device, on_device + 1, room.to_device(&unset, 1), room.device<float>(PART_TENSORS)};
    if (tiled) part_norm_of_tiles(dev, clip, COUNT, room.to_device(tiles, 64), first);
    if (!tiled) part_norm<G>(dev, clip, part, room.device<char>(part_norm_scratch_bytes(dev)));
    copy_to_host(dev, factor, clip.factor, sizeof(factor));
    copy_to_host(dev, &got, clip.square, sizeof(got));
    want_factors(row, square, &total, want);
    const bool left = isnan(want[0]);
    // On a GPU a thread adds up to 70001 / (32 * 512) squares in fp32.
    const double bound = dev->gpu ? 6 * ldexp(1, -24) : 1e-12;
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
        part_norm_finish(dev, values, values + 3, values + 4, square, 3);
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
        for (const bool tiled : {false, true}) check_part<float>(test, &dev, row, tiled);
        if (gpu) check_part<bf16>(test, &dev, row, false);
    }
    check_end(test, &dev);
}
