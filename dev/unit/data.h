// The tests of data/ share this: a folder of their own under $TMPDIR (or /tmp), files in it, and refusals, which are
// tested by a piece of their sentence, so that a case cannot pass on the wrong error.
#pragma once
#include <errno.h>
#include <unistd.h>
#include "../../data/safetensors.h"
#include "test.h"

struct Folder {
    char path[1024];
};

inline Folder folder_new(Test* test) {
    Folder folder;
    const char* parent = getenv("TMPDIR");
    snprintf(folder.path, sizeof(folder.path), "%s/nibble_data_XXXXXX", parent && *parent ? parent : "/tmp");
    expect(mkdtemp(folder.path), "%s: %s", folder.path, strerror(errno));
    return folder;
}

// A case with a folder of this kind and room for a sentence, `folder` and `error`.
#define DATA_TEST(NAME)                                                                            \
    static void in_data_##NAME(Test* test, const Folder& folder, char(&error)[DATA_ERROR_BYTES]);  \
    TEST(NAME) {                                                                                   \
        char error[DATA_ERROR_BYTES] = "";                                                         \
        in_data_##NAME(test, folder_new(test), error);                                             \
    }                                                                                              \
    static void in_data_##NAME([[maybe_unused]] Test* test, [[maybe_unused]] const Folder& folder, \
                               [[maybe_unused]] char(&error)[DATA_ERROR_BYTES])

// folder/name, in one of a few rotating buffers.
inline const char* in(const Folder& folder, const char* name) {
    static char paths[64][2048];
    static int next = 0;
    char* path = paths[next++ % 64];
    snprintf(path, sizeof(paths[0]), "%s/%s", folder.path, name);
    return path;
}

inline uint64_t random_next(uint64_t* state) {
    uint64_t z = (*state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

inline void put(Test* test, const char* path, const void* bytes, int64_t count) {
    FILE* file = fopen(path, "wb");
    expect(file, "%s: %s", path, strerror(errno));
    if (!file) return;
    expect((int64_t)fwrite(bytes, 1, (size_t)count, file) == count, "%s: %s", path, strerror(errno));
    expect(fclose(file) == 0, "%s: %s", path, strerror(errno));
}

inline void put_text(Test* test, const char* path, const char* text) {
    put(test, path, text, (int64_t)strlen(text));
}

// Expects a failure whose sentence holds `piece`.
#define expect_refused(succeeded, error, piece)                                                      \
    do {                                                                                             \
        error[0] = 0;                                                                                \
        expect(!(succeeded), "succeeded, and should be refused: %s", piece);                         \
        expect(strstr(error, piece), "the sentence is \"%s\" and should hold \"%s\"", error, piece); \
    } while (0)
