// A case is a function registered by TEST(name); `./test_gpt2` runs all (runner.cu), prints one line per case and ends
// with `N passed, N failed, N skipped`. `--list` names them, `-k substring` (repeatable) picks, `-j N` runs N at a
// time. A case whose name ends in _gpu is skipped where there is no GPU. A case fails through expect() or
// expect_close() and goes on, so that one run shows all that is wrong. Each runs in a process of its own, for at most
// five minutes (`--here`: all in one, for a debugger), so a small case need not free its memory. Files go under TMPDIR,
// a folder of the case that the runner removes. TEST_ALONE: nothing runs beside it, as it measures time or free memory.
#pragma once
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <tuple>

#include "../../data/text.h"
#include "../../kernels/common.cuh"

struct Test {
    const char* name;
    void (*run)(Test*);
    int failures;
    bool skipped;
    bool alone;
    char note[256];  // printed at the end of the case's line: the figure it measured, or why it was skipped
    Test* next;
};

Test** test_list();  // head of the list of registered cases, in order of registration within a file

struct TestRegistration {
    TestRegistration(Test* test) {
        Test** tail = test_list();
        while (*tail) tail = &(*tail)->next;
        *tail = test;
    }
};

#define TEST_CASE(NAME, ALONE)                                                          \
    static void test_##NAME(Test* test);                                                \
    static Test test_case_##NAME = {#NAME, test_##NAME, 0, false, ALONE, {0}, nullptr}; \
    static TestRegistration test_registration_##NAME(&test_case_##NAME);                \
    static void test_##NAME([[maybe_unused]] Test* test)
#define TEST(NAME) TEST_CASE(NAME, false)
#define TEST_ALONE(NAME) TEST_CASE(NAME, true)
#define BOTH(NAME, LACKS_NVRTC)                          \
    static void both_##NAME(Test* test, bool gpu);       \
    TEST(NAME) {                                         \
        both_##NAME(test, false);                        \
    }                                                    \
    TEST(NAME##_gpu) {                                   \
        if (LACKS_NVRTC) skip("libnvrtc was not found"); \
        both_##NAME(test, true);                         \
    }                                                    \
    static void both_##NAME(Test* test, bool gpu)
// Defines two cases, NAME on the CPU and NAME_gpu on a GPU; the body has `gpu`. With JIT_BOTH the second one needs
// NVRTC (optim/jit.h).
#define TEST_BOTH(NAME) BOTH(NAME, false)
#define JIT_BOTH(NAME) BOTH(NAME, !jit_available())
// Defines a case that is skipped where NVRTC is not found (optim/jit.h).
#define JIT_TEST(NAME)                                        \
    static void with_jit_##NAME(Test* test);                  \
    TEST(NAME) {                                              \
        if (!jit_available()) skip("libnvrtc was not found"); \
        with_jit_##NAME(test);                                \
    }                                                         \
    static void with_jit_##NAME([[maybe_unused]] Test* test)

inline char error[DATA_ERROR_BYTES];  // where functions that fail put their sentence

// Fails the case with a printf message when the condition is false.
#define expect(condition, ...)                                         \
    do {                                                               \
        if (!(condition)) {                                            \
            test->failures++;                                          \
            printf("    %s:%d: %s: ", __FILE__, __LINE__, #condition); \
            printf(__VA_ARGS__);                                       \
            printf("\n");                                              \
        }                                                              \
    } while (0)

// Expects a failure whose sentence holds `piece`.
#define expect_refused(succeeded, error, piece)                                                      \
    do {                                                                                             \
        error[0] = 0;                                                                                \
        expect(!(succeeded), "succeeded, and should be refused: %s", piece);                         \
        expect(strstr(error, piece), "the sentence is \"%s\" and should hold \"%s\"", error, piece); \
    } while (0)

#define skip(...)                                              \
    do {                                                       \
        test->skipped = true;                                  \
        snprintf(test->note, sizeof(test->note), __VA_ARGS__); \
        return;                                                \
    } while (0)

// Adds to what is printed at the end of the case's line.
__attribute__((format(printf, 2, 3))) inline void note(Test* test, const char* format, ...) {
    size_t used = strlen(test->note);
    if (used > 0 && used + 2 < sizeof(test->note)) used += (size_t)snprintf(test->note + used, 3, ", ");
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(test->note + used, sizeof(test->note) - used, format, arguments);
    va_end(arguments);
}

// Returns a formatted text, which is never freed.
__attribute__((format(printf, 1, 2))) inline const char* formatted(const char* format, ...) {
    char* text = nullptr;
    va_list arguments;
    va_start(arguments, format);
    if (vasprintf(&text, format, arguments) < 0) abort();
    va_end(arguments);
    return text;
}

// Compares n values with a bound for each: |got - want| <= bound(i) = absolute + relative * |want|. A NaN fails.
// Returns the largest error as a multiple of the bound (1.0 = at the bound) and notes it on the case's line.
inline double expect_close(Test* test, const char* what, const float* got, const float* want, int64_t n,
                           double absolute, double relative) {
    double worst = 0.0;
    int64_t index = 0;
    for (int64_t i = 0; i < n; i++) {
        double bound = absolute + relative * fabs((double)want[i]);
        double multiple = fabs((double)got[i] - (double)want[i]) / bound;
        if (!(multiple <= worst)) worst = multiple, index = i;
        if (isnan(multiple)) break;
    }
    note(test, "%s %.2f of bound", what, worst);
    if (!(worst <= 1.0)) {
        test->failures++;
        printf("    %s: element %lld of %lld is %.9g, want %.9g: %.2f times the bound\n", what, (long long)index,
               (long long)n, got[index], want[index], worst);
    }
    return worst;
}

// Returns test data in [-1, 1), the same in every run: splitmix64 of (seed, i).
inline float test_uniform(uint64_t seed, int64_t i) {
    const uint64_t z = bits_mix(seed * 0x9E3779B97F4A7C15ull + (uint64_t)(i + 1) * 0xBF58476D1CE4E5B9ull);
    return (float)((double)(z >> 11) / 9007199254740992.0 * 2.0 - 1.0);
}

// Lists n positions by their tokens as the loader does, with order (n) and bucket (n + 1, 2). Returns how many buckets
// there are, and in *largest the positions of the largest.
inline int list_by_token(const int* tokens, int n, int V, int* order, int* bucket, int* largest = nullptr) {
    int buckets = 0, used = 0, most = 0;
    for (int token = 0; token < V; token++) {
        const int begin = used;
        for (int i = 0; i < n; i++) {
            if (tokens[i] == token) order[used++] = i;
        }
        if (used > begin) bucket[2 * buckets] = token, bucket[2 * buckets++ + 1] = begin;
        most = used - begin > most ? used - begin : most;
    }
    bucket[2 * buckets] = -1, bucket[2 * buckets + 1] = n;
    if (largest) *largest = most;
    return buckets;
}

// Returns the folder of this program, where ./train and the sources are too.
inline const char* test_folder() {
    static char path[2048];
    ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
    path[length > 0 ? length : 0] = 0;
    if (strrchr(path, '/')) *strrchr(path, '/') = 0;
    return path;
}

int test_gpus();  // how many CUDA devices answer

inline Device test_device(bool gpu) {
    Device dev;
    device_open(&dev, gpu, 0);
    return dev;
}
