// The user's own formats (--format FILE.cuh): the contents of such a file, and how the host learns from NVRTC which
// formats it holds.
//
// A file is like those of formats/. It has a struct and, for each name that it adds to --m and --v, a line
//     OPTIM_FORMAT("my8/64", "for m: when to use it", Blocks<My8, 64, ScaleFp32, NEAREST>)
// with the type last, because a type may hold commas; dev/examples/format.cuh is one. The file follows the optimizer's
// own source, so it need not include anything; #include "..." and #pragma once, which a file in formats/ has, are
// ignored.
//
// The host has no C++ compiler to ask for the type's STREAM, so it asks NVRTC. The line defines a constant of plain
// data of fixed size, and the host reads the bytes of its initialiser from the PTX, whose syntax is documented and
// stable. (Mangled names of templates could carry the numbers, but not the strings.)
#pragma once
#include "kernel.cuh"

EMBED_SOURCE

// One row of a file. Texts end with a 0.
struct UserRow {
    int file;      // counted from 0 in the order of --format
    int too_long;  // 1 if a text did not fit
    int table_bytes, has_sign;
    int bits[3], run[3], span[3];  // of STREAM
    char suffix[3][16], dtype[3][16];
    char name[32], note[128], type[512];
};

#ifdef __CUDACC_RTC__
template <int SIZE>
__device__ constexpr bool user_text(char (&to)[SIZE], const char* text) {
    int i = 0;
    for (; text[i] && i < SIZE - 1; i++) to[i] = text[i];
    return text[i] == 0;
}

template <class T>
__device__ constexpr UserRow user_row(int file, const char* name, const char* note, const char* type) {
    UserRow row = {};
    bool fits = user_text(row.name, name);
    fits = user_text(row.note, note) && fits;
    fits = user_text(row.type, type) && fits;
    for (int i = 0; i < 3; i++) {
        fits = user_text(row.suffix[i], T::STREAM[i].name) && fits;
        fits = user_text(row.dtype[i], T::STREAM[i].dtype) && fits;
        row.bits[i] = T::STREAM[i].bits;
        row.run[i] = T::STREAM[i].run;
        row.span[i] = T::STREAM[i].span;
    }
    row.file = file;
    row.too_long = !fits;
    row.table_bytes = T::TABLE_BYTES;
    row.has_sign = T::SIGNED;
    return row;
}

// Computes the constants that a format looks up, since the host has no function for them. A single thread runs it once
// a run. grid: 1, block: 1; table: (TABLE_BYTES) device memory.
template <class T>
__global__ void optim_fill_kernel(void* table) {
    T::fill(table);
}

// USER_FILE is the number of the file; it is defined before the file's text.
#define USER_NAME(FILE, LINE) optim_user_row_##FILE##_##LINE
#define USER_ROW(FILE, LINE, NAME, NOTE, ...) \
    __device__ constexpr UserRow USER_NAME(FILE, LINE) = user_row<__VA_ARGS__>(FILE, NAME, NOTE, #__VA_ARGS__);
#define OPTIM_FORMAT(NAME, NOTE, ...) USER_ROW(USER_FILE, __LINE__, NAME, NOTE, __VA_ARGS__)
#else
#define OPTIM_FORMAT(...)
#endif
