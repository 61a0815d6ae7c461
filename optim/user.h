// Reads the files of --format (user.cuh): their rows, which it checks, and their text for NVRTC.
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
    FormatRow* storage;        // (count): the same as the optimizer has its own formats
};

// Reads and checks the files of a list that commas separate. Returns false with a sentence in `error`, followed by the
// compiler's log if the compiler refuses a file. The first time takes a moment, then the result comes from the cache.
// It needs libnvrtc and no GPU; user_formats_free frees the result.
bool user_formats_open(const char* paths, UserFormats** formats, char* error);
void user_formats_free(UserFormats* formats);

// Writes which of these formats a configuration, its overrides included, names: "my8/64=SUM my9/32=SUM". SUM is the
// checksum of the file that has the format; comments and white space do not count. "" if it names none.
void user_sums(const OptimConfig* config, char* text, size_t bytes);

// Fills a table of constants in device memory by the fill() of a type of the source. Exits with a sentence if it fails.
void user_table_fill(const Device* dev, const char* type, const char* source, void* table);
