// Tests of what guards a run: values that are not finite are neither saved nor loaded.
#include "../../data/safetensors.h"
#include "test.h"

TEST(guard_values) {
    // These are the type's largest value, infinity (0: it has none) and NaN.
    const std::tuple<const char*, int, uint64_t, uint64_t, uint64_t> types[] = {
        {"F32", 4, 0x7f7fffff, 0xff800000, 0x7fc00001},
        {"BF16", 2, 0x7f7f, 0xff80, 0x7fff},
        {"F16", 2, 0xfbff, 0x7c00, 0x7e00},
        {"F64", 8, 0x7fefffffffffffff, 0xfff0000000000000, 0x7ff8000000000000},
        {"F8_E5M2", 1, 0x7b, 0xfc, 0x7d},
        {"F8_E4M3", 1, 0x7e, 0, 0xff},
        {"F8_E8M0", 1, 0xfe, 0, 0xff},
        {"U8", 1, 0xff, 0, 0},
    };
    constexpr int COUNT = 200000;
    char* values = (char*)malloc(8 * COUNT + 1);
    for (const auto& [dtype, bytes, good, infinite, nan] : types) {
        char* at = values + 1;  // not aligned
        for (int i = 0; i < COUNT; i++) memcpy(at + (int64_t)i * bytes, &good, bytes);
        expect(values_finite("x", dtype, at, (int64_t)COUNT * bytes, 0, error), "%s: %s", dtype, error);
        for (int place : {0, 70001, COUNT - 1}) {
            for (uint64_t bad : {infinite, nan}) {
                if (!bad) continue;
                memcpy(at + (int64_t)place * bytes, &bad, bytes);
                const char* want = formatted("x holds %s at element %d", bad == nan ? "nan" : "infinity", place + 5);
                bool found = !values_finite("x", dtype, at, (int64_t)COUNT * bytes, 5, error);
                expect(found && strcmp(error, want) == 0, "%s: '%s', want '%s'", dtype, error, want);
                memcpy(at + (int64_t)place * bytes, &good, bytes);
            }
        }
    }
}
