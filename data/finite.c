#include "finite.h"
#include <string.h>
#include "errors.h"

// A value is NaN or infinite where all bits of `mask` are set: the exponent's, or for types without infinity those of
// the one NaN.
typedef struct {
    const char* dtype;
    int bytes;
    uint64_t mask, mantissa;  // infinity where no bit of `mantissa` is set besides
} FloatType;

static const FloatType FLOAT_TYPES[] = {
    {"F32", 4, 0x7f800000, 0x007fffff}, {"BF16", 2, 0x7f80, 0x007f},
    {"F16", 2, 0x7c00, 0x03ff},         {"F64", 8, 0x7ff0000000000000, 0x000fffffffffffff},
    {"F8_E5M2", 1, 0x7c, 0x03},         {"F8_E4M3", 1, 0x7f, 0x7f},
    {"F8_E8M0", 1, 0xff, 0xff},
};

static inline uint64_t value_at(const char* values, int64_t i, int bytes) {
    uint64_t value = 0;
    memcpy(&value, values + i * bytes, (size_t)bytes);
    return value;
}

static inline bool any_bad_of(int bytes, uint64_t mask, const char* values, int64_t count) {
    int bad = 0;
    for (int64_t i = 0; i < count; i++) bad |= (value_at(values, i, bytes) & mask) == mask;
    return bad;
}

// True if any of `count` values is not finite. Each call has a constant size, so that the compiler makes vectors of its
// loop.
static bool any_bad(const FloatType* type, const char* values, int64_t count) {
    if (type->bytes == 1) return any_bad_of(1, type->mask, values, count);
    if (type->bytes == 2) return any_bad_of(2, type->mask, values, count);
    if (type->bytes == 4) return any_bad_of(4, type->mask, values, count);
    return any_bad_of(8, type->mask, values, count);
}

bool values_finite(const char* name, const char* dtype, const void* values, int64_t bytes, int64_t first, char* error) {
    const FloatType* type = NULL;
    for (size_t t = 0; t < sizeof(FLOAT_TYPES) / sizeof(FLOAT_TYPES[0]); t++) {
        if (strcmp(FLOAT_TYPES[t].dtype, dtype) == 0) type = &FLOAT_TYPES[t];
    }
    const int64_t piece = 1 << 16, count = type ? bytes / type->bytes : 0;
    int64_t found = -1;
#pragma omp parallel for schedule(static) reduction(max : found)
    for (int64_t p = 0; p < (count + piece - 1) / piece; p++) {
        const int64_t begin = p * piece, length = count - begin < piece ? count - begin : piece;
        if (any_bad(type, (const char*)values + begin * type->bytes, length)) found = begin;
    }
    if (found < 0 || !error) return found < 0;
    while (!any_bad(type, (const char*)values + found * type->bytes, 1)) found++;
    const uint64_t value = value_at(values, found, type->bytes);
    return data_error(error, "%s holds %s at element %lld", name, value & type->mantissa ? "nan" : "infinity",
                      (long long)(first + found));
}
