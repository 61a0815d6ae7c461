// The tests of the operators share this. An operator at a shape is a function that makes its arrays, calls its plain C
// version, which is the oracle, and states its launcher with a bound for each output; check_outputs does the rest. On
// the CPU the launcher is that plain C version itself, so that the case is tried where there is no GPU.
//
// Inputs are uniform in [-scale, scale). A bound is epsilon of the output's format times the value (its rounding) plus
// epsilon of fp32 times the length of the sum times its terms' size (the order of the sum).
#pragma once
#include <functional>
#include <memory>
#include <vector>

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
// OPERATOR_BOTH defines NAME and NAME_gpu.
#define OPERATOR_TEST(NAME)                                              \
    static void operator_##NAME(Test* test, Device& dev, double& worst); \
    TEST(NAME) {                                                         \
        Device dev = test_device(strstr(#NAME, "_gpu") != nullptr);      \
        double worst = 0.0;                                              \
        operator_##NAME(test, dev, worst);                               \
        note_worst(test, worst);                                         \
    }                                                                    \
    static void operator_##NAME(Test* test, Device& dev, double& worst)
#define OPERATOR_BOTH(NAME)                                             \
    static void both_of_##NAME(Test* test, Device& dev, double& worst); \
    OPERATOR_TEST(NAME) {                                               \
        both_of_##NAME(test, dev, worst);                               \
    }                                                                   \
    OPERATOR_TEST(NAME##_gpu) {                                         \
        both_of_##NAME(test, dev, worst);                               \
    }                                                                   \
    static void both_of_##NAME(Test* test, Device& dev, double& worst)

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

// An array on the device behind which nothing may be written, and on the host the values that it begins with, rounded
// to its type; a kernel's output finds those, or NaN. `want`: what an oracle makes of them.
struct AnyArray {
    int64_t n = 0, size = 0;  // elements, and bytes of one
    double eps = 0;           // of its type
    float *host = nullptr, *want = nullptr;
    const Device* dev = nullptr;

    AnyArray() = default;
    AnyArray(const AnyArray&) = delete;
    virtual ~AnyArray() { free(host), free(want); }
    // Writes the values, or NaN where `values` is NULL, and the guard.
    virtual void set(const float* values) = 0;
    virtual char* memory() const = 0;
    virtual void to_floats(const char* bytes, float* values) const = 0;

    std::vector<char> bytes() const {
        std::vector<char> all((size_t)((n + GUARD) * size));
        copy_to_host(dev, all.data(), memory(), (int64_t)all.size());
        return all;
    }
    // Reads what is on the device into `values`.
    void read(float* values) const { to_floats(bytes().data(), values); }
};

template <typename T>
struct Array : AnyArray {
    T* device = nullptr;

    Array(const Device* on, int64_t count, const float* values = nullptr) {
        n = count, size = sizeof(T), eps = epsilon<T>(), dev = on;
        host = floats(n), want = floats(n), device = (T*)device_alloc(on, (n + GUARD) * size);
        set(values);
        memcpy(want, host, n * sizeof(float));
    }
    // Begins with random values, unless `begins` is false.
    Array(const Device* on, int64_t count, uint64_t seed, float scale, bool begins = true)
        : Array(on, count,
                begins ? std::unique_ptr<float, decltype(&free)>(random_floats(count, seed, scale), free).get()
                       : nullptr) {}
    ~Array() { device_free(dev, device); }

    void set(const float* values) override {
        std::vector<T> staged((size_t)(n + GUARD));
        memset((void*)staged.data(), 0xff, (n + GUARD) * sizeof(T));
        for (int64_t i = 0; i < n; i++) {
            if (values) staged[i] = from_float<T>(values[i]);
            host[i] = to_float(staged[i]);
        }
        copy_to_device(dev, device, staged.data(), (n + GUARD) * sizeof(T));
    }
    char* memory() const override { return (char*)device; }
    void to_floats(const char* bytes, float* values) const override {
        for (int64_t i = 0; i < n; i++) values[i] = to_float(((const T*)bytes)[i]);
    }
};

// An output of an operator: how far each element may be from `want`, besides roundings; or a measure of all of them, as
// a multiple of the bound.
struct Output {
    const char* what;
    AnyArray* array;
    double absolute;
    std::function<double(const float* got, const float* want)> measure = nullptr;
};

// Runs `runs` times from the same beginning. Compares all outputs with what is wanted, the runs with each other bit for
// bit, and the guards with what they were. The outputs are left on the device.
template <typename Run>
void check_outputs(Test* test, double* worst, Run run, const Output* list, int count, int runs = 2) {
    const std::vector<Output> outputs(list, list + count);
    std::vector<std::vector<char>> first;
    for (int i = 0; i < runs; i++) {
        for (const Output& out : outputs) out.array->set(out.array->host);
        run();
        int k = 0;
        for (const Output& out : outputs) {
            if (i == 0) first.push_back(out.array->bytes());
            expect(i == 0 || first[k] == out.array->bytes(), "%s: run %d differs", out.what, i);
            k++;
        }
    }
    int k = 0;
    for (const Output& out : outputs) {
        const AnyArray* array = out.array;
        std::vector<float> got((size_t)array->n);
        array->to_floats(first[k].data(), got.data());
        if (out.measure) {
            const double multiple = out.measure(got.data(), array->want);
            expect(multiple <= 1.0, "%s is off by %.3g times the bound", out.what, multiple);
            if (!(multiple <= *worst)) *worst = multiple;
        } else {
            close_to(test, worst, out.what, got.data(), array->want, array->n, out.absolute, array->eps + 4 * EPS32);
        }
        const std::vector<char> guard(first[k].begin() + array->n * array->size, first[k].end());
        expect(guard == std::vector<char>(guard.size(), (char)0xff), "%s: bytes behind it were written", out.what);
        k++;
    }
}

template <typename Run>
void check_outputs(Test* test, double* worst, Run run, std::initializer_list<Output> outputs) {
    check_outputs(test, worst, run, outputs.begin(), (int)outputs.size());
}

// Does this for one output, which begins with `before`, or NaN.
template <typename Run>
void check_output(Test* test, double* worst, const char* what, AnyArray* out, const float* before, const float* want,
                  double absolute, Run run) {
    out->set(before);
    memcpy(out->want, want, out->n * sizeof(float));
    check_outputs(test, worst, run, {{what, out, absolute}});
}

// Calls body(x, g) with zeros of the types that a model may have, of activations and of gradients: in fp32 on the CPU.
template <typename Body>
void in_types(const Device& dev, Body body) {
    body(0.0f, 0.0f);
    if (dev.gpu) body(bf16(), 0.0f), body(bf16(), bf16());
}

// The same for an operator without gradients of parameters.
template <typename Body>
void in_inputs(const Device& dev, Body body) {
    body(0.0f);
    if (dev.gpu) body(bf16());
}

// False for what takes too long on the CPU.
inline bool affordable(const Device& dev, double products) {
    return dev.gpu || products < 3e7;
}
