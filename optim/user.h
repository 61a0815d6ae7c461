// Reads the files of --format: their rows, checked, and their text for NVRTC. See user.cuh.
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

// Reads and checks the files of a list that commas separate; false and a sentence in `error`, followed by the
// compiler's log where it is that which refuses a file. Takes a moment the first time, and then comes from the cache.
// Needs libnvrtc and no GPU. Freed by user_formats_free.
bool user_formats_open(const char* paths, UserFormats** formats, char* error, size_t error_bytes);
void user_formats_free(UserFormats* formats);

// The formats of these that a configuration, its overrides included, names: "my8/64=SUM my9/32=SUM", SUM the checksum
// of the file that names it, in which comments and white space do not count. "" when it names none.
void user_sums(const OptimConfig* config, char* text, size_t bytes);

// Fills a table of constants in device memory as a type of the source says. Exits with a sentence when that fails.
void user_table_fill(const Device* dev, const char* type, const char* source, void* table);
