// The tests of the operators share this: inputs, bounds, and arrays on the GPU that
// are poisoned before and guarded behind.
//
// Inputs are uniform in [-scale, scale). A bound is epsilon of the output's format times the value (its rounding) plus
// epsilon of fp32 times the length of the sum times its terms' size (the order of the sum).
#pragma once
#include <assert.h>
#include <memory>
#include <utility>

#include "../room.h"
#include "test.h"

const double EPS32 = 1.0 / (1 << 23);

template <typename T>
constexpr double epsilon() {
    return std::is_same_v<T, float> ? 1.0 / (1 << 23) : 1.0 / (1 << 8);
}

// expect_close without its note; a case has many comparisons, and its note is the worst of them.
inline void close_to(Test* test, double* worst, const char* what, const float* got, const float* want, int64_t n,
                     double absolute, double relative) {
    char note[sizeof(test->note)];
    memcpy(note, test->note, sizeof(note));
    double multiple = expect_close(test, what, got, want, n, absolute, relative);
    memcpy(test->note, note, sizeof(note));
    if (!(multiple <= *worst)) *worst = multiple;
}

inline void note_worst(Test* test, double worst) {
    note(test, "worst %.2f of bound", worst);
}

// A case on `dev`, a GPU if its name ends in _gpu; it ends with the largest error, `worst`, as a multiple of the bound.
#define OPERATOR_TEST(NAME)                                              \
    static void operator_##NAME(Test* test, Device& dev, double& worst); \
    TEST(NAME) {                                                         \
        Device dev = test_device(strstr(#NAME, "_gpu") != nullptr);      \
        double worst = 0.0;                                              \
        operator_##NAME(test, dev, worst);                               \
        note_worst(test, worst);                                         \
    }                                                                    \
    static void operator_##NAME(Test* test, Device& dev, double& worst)

// A sum of K products of a uniform and another of the given scale, of mean size scale / 4. Each addition rounds by half
// an epsilon of the sum so far, which is of the size of sqrt(K) products: sqrt(K) such errors of random sign make
// epsilon * K * scale / 6 as the standard deviation, of which six are allowed.
inline double product_bound(int64_t K, double scale) {
    return EPS32 * (2 + scale * K);
}

inline float* floats(int64_t n) {
    float* values = (float*)malloc((n + 1) * sizeof(float));
    if (!values) abort();
    return values;
}

inline float* random_floats(int64_t n, uint64_t seed, float scale) {
    float* values = floats(n);
    for (int64_t i = 0; i < n; i++) values[i] = scale * test_uniform(seed, i);
    return values;
}

constexpr int GUARD = 64;  // elements behind every array that no kernel may touch

// n elements on the device, and on the host the same values after rounding to T. Both go with the array.
template <typename T>
struct Array {
    int64_t n = 0;
    float* host = nullptr;
    T* device = nullptr;
    const Device* dev = nullptr;

    Array() = default;
    // Makes an array of these values, or of NaN where there are none.
    Array(const Device* on, int64_t count, const float* values = nullptr)
        : n(count), host(floats(count)), device((T*)device_alloc(on, (count + GUARD) * sizeof(T))), dev(on) {
        set(values);
    }
    Array(const Device* on, int64_t count, uint64_t seed, float scale)
        : Array(on, count, std::unique_ptr<float, decltype(&free)>(random_floats(count, seed, scale), free).get()) {}
    Array(Array&& from) { *this = std::move(from); }
    Array& operator=(Array&& from) {
        std::swap(n, from.n), std::swap(host, from.host), std::swap(device, from.device), std::swap(dev, from.dev);
        return *this;
    }
    ~Array() {
        free(host);
        if (device) device_free(dev, device);
    }

    // Writes the values (rounded to T, in `host` too), or NaN where values is NULL, and the guard.
    void set(const float* values) {
        assert(n >= 0);
        int64_t bytes = (n + GUARD) * sizeof(T);
        T* staged = (T*)malloc(bytes);
        memset((void*)staged, 0xff, bytes);
        for (int64_t i = 0; i < n; i++) {
            if (values) staged[i] = from_float<T>(values[i]);
            host[i] = to_float(staged[i]);
        }
        copy_to_device(dev, device, staged, bytes);
        free(staged);
    }
};

// Runs twice from the same beginning (`before`, or NaN) and compares the output with `want`, the runs with each other
// bit for bit, and the guard with what it was. `host` of the array is left as it began.
template <typename T, typename Run>
void check_output(Test* test, double* worst, const char* what, Array<T>* out, const float* before, const float* want,
                  double absolute, Run run) {
    int64_t n = out->n;
    Room room(out->dev);
    T* got[2];
    for (int i = 0; i < 2; i++) {
        out->set(before);
        run();
        got[i] = room.to_host(out->device, n + GUARD);
    }
    float* values = room.host<float>(n);
    for (int64_t i = 0; i < n; i++) values[i] = to_float(got[0][i]);
    close_to(test, worst, what, values, want, n, absolute, epsilon<T>() + 4 * EPS32);
    expect(memcmp(got[0], got[1], n * sizeof(T)) == 0, "%s: two runs differ", what);
    const unsigned char* guard = (const unsigned char*)(got[0] + n);
    for (int64_t i = 0; i < (int64_t)(GUARD * sizeof(T)); i++) {
        expect(guard[i] == 0xff, "%s: byte %lld behind the output was written", what, (long long)i);
        if (guard[i] != 0xff) break;
    }
}
