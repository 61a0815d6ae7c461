// Tests of kernels/initial.cuh and of optim_set_part: initial weights have the host's bits on every device, and weights
// that are set from the device, in pieces, have those that are set from the host.
#include "../../kernels/initial.cuh"
#include "../room.h"
#include "steps.h"

// The definition, apart from the shared functions.
static float want_normal(uint64_t seed, uint64_t tensor, uint64_t element) {
    const uint64_t bits = random_bits(seed, tensor, element / 2);
    const double u = ((double)(bits >> 32) + 0.5) / 4294967296.0;
    const double angle = 2.0 * 3.14159265358979323846 * ((double)(bits & 0xffffffffu) / 4294967296.0);
    return (float)(sqrt(-2.0 * log(u)) * (element % 2 ? sin(angle) : cos(angle)));
}

// Draws n elements on a device and compares them with the definition; returns how many were doubtful.
static int64_t check_normals(Test* test, bool gpu, int64_t n, int64_t first, uint64_t tensor) {
    constexpr float deviation = 0.02f;
    const Device dev = test_device(gpu);
    Room room(&dev);
    float* to = room.device<float>(n);
    initial_normals(&dev, to, n, 5, tensor, first, deviation, (uint32_t*)room.device<char>(NORMAL_LIST_BYTES));
    const float* got = room.to_host(to, n);
    int64_t wrong = 0, doubtful = 0;
#pragma omp parallel for reduction(+ : wrong, doubtful)
    for (int64_t i = 0; i < n; i++) {
        const float want = deviation * want_normal(5, tensor, (uint64_t)(first + i));
        wrong += memcmp(&want, &got[i], 4) != 0;
        doubtful += normal_is_doubtful(normal_double(5, tensor, (uint64_t)(first + i)));
    }
    expect(wrong == 0, "%lld of %lld elements from %lld on", (long long)wrong, (long long)n, (long long)first);
    return doubtful;
}

TEST(initial_normals) {
    check_normals(test, false, 100003, 0, 3);
    check_normals(test, false, 4096, ((int64_t)1 << 33) + 1, 7);
}

TEST(initial_normals_gpu) {
    const int64_t n = 1 << 24, doubtful = check_normals(test, true, n, 0, 3) + check_normals(test, true, n, n + 1, 7);
    expect(doubtful > 0, "no element was doubtful");
    note(test, "%lld of %lld doubtful", (long long)doubtful, (long long)(2 * n));
}

// A number that is not doubtful rounds to the same fp32 number wherever it is moved by up to NORMAL_UNITS units, and
// one in the middle of two is doubtful on either side of it.
TEST(initial_doubts) {
    int64_t doubtful = 0, alike = 0;
    const int64_t n = 400000;
    for (int64_t i = 0; i < n; i++) {
        double x = normal_double(9, 1, (uint64_t)i);
        int64_t bits;
        memcpy(&bits, &x, 8);
        if (i % 4 == 0) bits = (bits & ~(int64_t)0x1fffffff) + 0x10000000 + i / 4 % 200 - 100, memcpy(&x, &bits, 8);
        bool same = true;
        for (int64_t move : {-NORMAL_UNITS, (int64_t)-1, (int64_t)1, NORMAL_UNITS}) {
            const int64_t there = bits + move;
            double y;
            memcpy(&y, &there, 8);
            same = same && (float)x == (float)y;
        }
        doubtful += normal_is_doubtful(x), alike += same;
        expect(same || normal_is_doubtful(x), "%a may round to another number", x);
    }
    // 129 in 200 of the constructed ones are within reach of the middle, and one in four million of the others.
    const int64_t built = n / 4 / 200 * (2 * NORMAL_UNITS + 1);
    expect(doubtful >= built && doubtful <= built + 5, "%lld doubtful, want %lld", (long long)doubtful,
           (long long)built);
    expect(alike >= n - doubtful && alike < n, "%lld alike", (long long)alike);
}

// Pieces of a tensor on the device against the whole of it from the host, for a tail that is no whole tile.
static void check_set(Test* test, const char* weights, int64_t begin, int64_t end, bool gpu) {
    constexpr int64_t ROWS = 61, COLS = 203, N = ROWS * COLS, PIECE = 3 * TILE_ELEMENTS;
    const OptimTensor tensors[] = {{"wte.weight", 30, 100, true, 0}, {"h.0.mlp.c_fc.weight", ROWS, COLS, true, 0}};
    OptimConfig config = make_config("adamw", weights, "fp32");
    OptimRun run[2];
    if (end > 0) config = shard_config(config, begin, end);
    for (OptimRun& each : run) run_open(&each, &config, tensors, OPTIM_BF16, gpu);
    float* values = run[0].room.host<float>(N);
    for (int64_t i = 0; i < N; i++) values[i] = start(i);
    const float* on_device = run[1].room.to_device(values, N);
    bool set = true;
    optim_set_weights(run[0].optim, 1, values);
    for (int64_t at = 0; at < N; at += PIECE)
        set = optim_set_part(run[1].optim, 1, at, N - at < PIECE ? N - at : PIECE, on_device + at);
    expect(set == !in_spans(weights), "%s: %s", weights, set ? "set" : "refused");
    for (OptimRun& each : run) optim_decode(each.optim);
    if (set) expect_same(test, &run[0], &run[1], formatted("%s, shard from %lld on", weights, (long long)begin));
}

TEST_BOTH(initial_set_part) {
    CacheFolder folder;
    const Table<FormatRow>& table = weights_table();
    for (int i = 0; i < table.count; i++) {
        if (table.row[i].feeds_back) continue;
        check_set(test, table.row[i].name, 0, 0, gpu);
        if (in_spans(table.row[i].name)) continue;
        check_set(test, table.row[i].name, 0, 4 * TILE_ELEMENTS, gpu);
        check_set(test, table.row[i].name, 4 * TILE_ELEMENTS, 9 * TILE_ELEMENTS, gpu);
    }
}
