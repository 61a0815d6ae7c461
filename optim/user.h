// Reads the files of --format (user.cuh), checks their rows, and keeps their text for NVRTC.
#pragma once
#include "../kernels/common.cuh"
#include "optim.h"
#include "user.cuh"

constexpr int USER_ROWS = 64, USER_FILES = 16;  // at most

struct FormatRow;  // storage.h

struct UserFormats {
    UserRow row[USER_ROWS];
    int count;
    uint64_t sum[USER_FILES];  // of each file's text
    char* source;              // the text of all files, for jit_get
    FormatRow* storage;        // (count) the same rows in the form of the built-in formats
};

// Reads and checks the files of a comma-separated list. Returns false with a sentence in `error`, followed by the
// compiler's log if the compiler refuses a file. The first time takes 0.1 s; later the result comes from the cache. It
// needs libnvrtc and no GPU; user_formats_free frees the result.
bool user_formats_open(const char* paths, UserFormats** formats, char* error);
void user_formats_free(UserFormats* formats);

// Writes the user's own formats that a configuration and its overrides name, as "my8/64=SUM my9/32=SUM"; "" if they
// name none. SUM is the checksum of the format's file, in which comments and white space do not count.
void user_sums(const OptimConfig* config, char* text, size_t bytes);

// Fills a table of constants in device memory by the function fill() of a type in the source. Exits with a sentence if
// that fails.
void user_table_fill(const Device* dev, const char* type, const char* source, void* table);
