// The tests share this: folders of a case, files in them, texts, commands of a shell, and refusals, which are tested by
// a piece of their sentence, so that a case cannot pass on the wrong error.
#pragma once
#include <errno.h>
#include <ftw.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../data/files.h"
#include "test.h"

// Nobody frees these texts.
inline const char* joined(const char* folder, const char* name) {
    return formatted("%s/%s", folder, name);
}

// Returns the text that body(file) writes to a stream; it is never freed.
template <class Body>
char* printed(Body body) {
    char* text = nullptr;
    size_t bytes = 0;
    FILE* file = open_memstream(&text, &bytes);
    body(file);
    fclose(file);
    return text;
}

// Returns a copy of a text with each `from` in it replaced.
inline const char* replaced(const char* text, const char* from, const char* to) {
    return printed([&](FILE* file) {
        for (const char* at; (at = strstr(text, from)) != nullptr; text = at + strlen(from))
            fprintf(file, "%.*s%s", (int)(at - text), text, to);
        fputs(text, file);
    });
}

// Makes a new folder under TMPDIR. It is removed when the case has ended.
inline const char* new_folder() {
    const char* base = getenv("TMPDIR");
    char* path = strdup(joined(base && *base ? base : "/tmp", "nibble_test_XXXXXX"));
    if (!mkdtemp(path)) user_error("%s: %s", path, strerror(errno));
    return path;
}

// Defines a case with a folder, which a call makes.
#define TEST_IN(NAME, FOLDER, MAKE)                        \
    static void in_##NAME(Test* test, const char* FOLDER); \
    TEST(NAME) {                                           \
        in_##NAME(test, MAKE);                             \
    }                                                      \
    static void in_##NAME([[maybe_unused]] Test* test, [[maybe_unused]] const char* FOLDER)
#define DATA_TEST(NAME) TEST_IN(NAME, folder, new_folder())

// Removes a folder with all that is in it, or a file, if there is one. Links are not followed.
inline void remove_tree(const char* path) {
    const auto remove_one = [](const char* name, const struct stat*, int, struct FTW*) { return remove(name); };
    if (nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS) != 0 && errno != ENOENT) {
        fprintf(stderr, "%s cannot be removed: %s\n", path, strerror(errno));
        abort();
    }
}

inline void put(const char* path, const void* bytes, int64_t count) {
    FILE* file = fopen(path, "wb");
    if (!file || (int64_t)fwrite(bytes, 1, (size_t)count, file) != count || fclose(file) != 0)
        user_error("%s: %s", path, strerror(errno));
}

// Writes a shard whose header says `claimed` tokens (-1: all) and that holds `tokens`: token i is value(first + i).
template <class Value>
void put_shard(const char* path, int64_t first, int64_t tokens, Value value, int64_t claimed = -1, int magic = 20240520,
               int version = 1) {
    char* file = (char*)calloc(1, (size_t)(1024 + 2 * tokens));
    const int32_t header[3] = {magic, version, (int32_t)(claimed < 0 ? tokens : claimed)};
    memcpy(file, header, sizeof(header));
    for (int64_t i = 0; i < tokens; i++) {
        const uint16_t token = (uint16_t)value(first + i);
        memcpy(file + 1024 + 2 * i, &token, 2);
    }
    put(path, file, 1024 + 2 * tokens);
}

inline void put_text(const char* path, const char* text) {
    put(path, text, (int64_t)strlen(text));
}

inline bool exists(const char* folder, const char* name) {
    return access(joined(folder, name), F_OK) == 0;
}

// Returns a file's bytes with a NUL behind them, and how many there are; NULL where it cannot be read.
inline char* contents(const char* folder, const char* name, int64_t* bytes = nullptr) {
    int64_t length;
    return file_read(joined(folder, name), bytes ? bytes : &length, error);
}

// Changes the bits `change` of a byte of a file.
inline void change_byte(const char* path, int64_t at, int change) {
    int64_t bytes;
    char* text = file_read(path, &bytes, error);
    if (!text) abort();
    text[at] = (char)(text[at] ^ change);
    put(path, text, bytes);
}

inline int lines_of(const char* text) {
    int lines = 0;
    for (; *text; text++) lines += *text == '\n';
    return lines;
}

// Runs a command in a shell. Returns what it writes to its standard output, and its exit code in *code.
inline const char* shell(const char* command, int* code) {
    constexpr size_t PIECE = 4096;
    char* text = nullptr;
    FILE* pipe = popen(command, "r");
    for (size_t used = 0, got = 1; got > 0; used += got) {
        text = (char*)realloc(text, used + PIECE + 1);
        got = pipe ? fread(text + used, 1, PIECE, pipe) : 0;
        text[used + got] = 0;
    }
    const int status = pipe ? pclose(pipe) : -1;
    *code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return text;
}

inline uint64_t random_next(uint64_t* state) {
    return bits_mix(*state += 0x9E3779B97F4A7C15ull);
}
