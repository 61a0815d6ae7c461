// Unit tests of data/safetensors.h: checksum, files, JSON and safetensors.
//
// Everything is written into a folder that the case removes. dev/fuzz tests files with random damage.
#include <signal.h>
#include <sys/resource.h>
#include "files.h"
#include "tensors.h"

static SafetensorsWriter writer;  // of the file that is being written, or was

// Pieces of any length give the sum of the whole: eight bytes at a time are as many single ones.
TEST(data_crc32c) {
    expect(crc32c(0, "123456789", 9) == 0xE3069283u, "%08x", crc32c(0, "123456789", 9));
    unsigned char bytes[300];
    uint64_t state = 1;
    uint32_t single = 0;
    for (int length = 0; length < 300; length++) {
        const int cut = (int)(random_next(&state) % (uint64_t)(length + 1));
        const uint32_t pieces = crc32c(crc32c(0, bytes, cut), bytes + cut, length - cut);
        expect(crc32c(0, bytes, length) == single && pieces == single, "length %d cut at %d", length, cut);
        bytes[length] = (unsigned char)random_next(&state);
        single = crc32c(single, bytes + length, 1);
    }
}

// Calls body() while no file may have more than so many bytes, as on a full disk.
template <class Body>
static void with_file_limit(rlim_t bytes, Body body) {
    struct rlimit before, limit;
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before);
    limit = before, limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
    body();
    setrlimit(RLIMIT_FSIZE, &before);
}

DATA_TEST(data_files) {
    const char *path = joined(folder, "a"), *large = (char*)calloc(1, 200000);
    int64_t bytes = 0;
    for (const int length : {7, 0}) {
        expect(file_write(path, "one\0two", length, error), "%s", error);
        const char* text = file_read(path, &bytes, error);
        expect(text && bytes == length && memcmp(text, "one\0two", length) == 0 && !text[length], "%s", error);
    }
    expect(!exists(folder, "a.tmp"), "the temporary file is left");
    for (const char* name : {"b/c//d/", "b/c/d"}) expect(folder_make(joined(folder, name), error), "%s", error);
    expect(folder_remove(joined(folder, "b/c"), error) && !exists(folder, "b/c"), "%s", error);
    expect(folder_sync(folder, error), "%s", error);
    const char* const parents[][2] = {{"a/b/c", "a/b"}, {"/a/b", "/a"}, {"/a", "/"}, {"a", "."}};
    for (const auto& row : parents)
        expect(strcmp(path_parent(row[0]), row[1]) == 0, "%s of %s", path_parent(row[0]), row[0]);
    expect_refused(folder_make(path, error), error, "a file or link has that name");
    expect_refused(folder_make(joined(folder, "a/b"), error), error, "a file or link has that name");
    expect_refused(folder_make("", error), error, "without a name");
    expect_refused(file_read(joined(folder, "none"), &bytes, error), error, "none: No such file");
    expect_refused(file_read(folder, &bytes, error), error, "not a regular file");
    expect_refused(file_write(joined(folder, "x/y"), "", 0, error), error, "x/y.tmp: No such file");
    expect(folder_remove(joined(folder, "none"), error), "%s", error);
    expect(disk_holds(joined(folder, "x/y/z"), 1, error) && disk_holds("z", 1, error), "%s", error);
    expect_refused(disk_holds(joined(folder, "x/y"), 1ll << 60, error), error, "x/y needs 1.07e+09 GiB and ");
    const SafetensorsTensor huge = tensor_of("huge", "F32", {1ll << 50});
    expect_refused(safetensors_begin(&writer, joined(folder, "huge"), &huge, 1, nullptr, error), error,
                   "are free on its disk");
    expect(!exists(folder, "huge"), "a file that has no room was begun");
    // A write that the system cuts short leaves the old file as it was.
    put_text(path, "kept");
    with_file_limit(100000, [&] {
        expect_refused(file_write(path, large, 200000, error), error, formatted("%s.tmp: File too large", path));
    });
    expect(strcmp(contents(folder, "a"), "kept") == 0, "the old contents are gone");
}

static Json* parse_text(const char* text, char* error) {
    return json_parse(text, (int64_t)strlen(text), "text", error);
}

// malformed.txt has texts that are written again, or refused.
TEST(data_json_values) {
    const char* text =
        "{\"big\": 9223372036854775807, \"small\": -9223372036854775808, \"over\": 9223372036854775808, \"half\": 1.5, "
        "\"million\": 1e6, \"\": \"empty\\u0000key\", \"text\": \"\"}";
    Json* json = parse_text(text, error);
    expect(json_int(json, "big", 0) == INT64_MAX && json_int(json, "small", 0) == INT64_MIN, "64-bit integers");
    expect(json_int(json, "over", -7) == -7 && json_int(json, "half", -7) == -7, "no integers");
    expect(json_int(json, "million", 0) == 1000000 && json_int(json, "text", 5) == 5, "integers in other clothes");
    expect(json_number(json, "half", 0) == 1.5 && json_number(json, "none", 4) == 4, "numbers");
    expect(json_get(json, "")->text_bytes == 9 && !json_get(json, "none") && !json_get(json->child, "a"), "members");
}

// Doubles of every magnitude, floats and integers come back, and strings of any bytes but NUL that are valid UTF-8.
TEST(data_json_round_trip) {
    uint64_t state = 2;
    for (int i = 0; i < 2000; i++) {
        const uint64_t bits = random_next(&state);
        double value;
        char string[16] = "";
        memcpy(&value, &bits, 8);
        if (i % 4 == 1) value = (float)(1.0 / (double)(i + 1));
        if (i % 4 == 2) value = (double)((int64_t)(bits >> 12) - (1ll << 51));
        for (int used = 0; used < 10;) {
            const int byte = (int)(random_next(&state) % 127 + 1);
            used += sprintf(string + used, byte % 5 ? "%c" : "%c\xE2\x82\xAC", byte);
        }
        const char* text = printed([&](FILE* file) {
            json_write_number_member(file, "{", "a", value), json_write_text_member(file, ", ", "b", string);
            fputc('}', file);
        });
        Json* json = parse_text(text, error);
        expect(json_number(json, "a", -7) == (isfinite(value) ? value : -7), "%s for %.17g", text, value);
        expect(strcmp(json_string(json, "b", ""), string) == 0, "%s", text);
    }
    const std::tuple<double, const char*> shortest[] = {
        {0.1, "0.1"}, {20, "20"}, {1e8, "100000000"}, {3e-4, "0.0003"}, {-1.5, "-1.5"}, {0, "0"}, {-INFINITY, "null"}};
    for (const auto& [value, want] : shortest) {
        const char* text = printed([number = value](FILE* stream) { json_write_number(stream, number); });
        expect(strcmp(text, want) == 0, "%s for %s", text, want);
    }
    const char* text = printed([](FILE* stream) { json_write_string(stream, "a\xFFz\xC3"); });
    expect(strcmp(text, "\"a\xEF\xBF\xBDz\xEF\xBF\xBD\"") == 0, "bytes that are no UTF-8 become %s", text);
}

TEST(data_json_malformed) {
    for (const char* text : {" ", "\"a\nb\"", "\xFF"})
        expect_refused(parse_text(text, error), error, "text is not valid JSON");
    static char deep[400001];
    memset(deep, '[', 400000);
    expect_refused(parse_text(deep, error), error, "nesting deeper than 256");
    memset(deep + 256, ']', 256);
    Json* json = json_parse(deep, 512, "text", error);
    expect(json, "256 levels: %s", error);
    expect_refused(parse_text("{\n  \"a\": 1,\n  b\n}", error), error, "line 3, column 3");
}

static const SafetensorsTensor entries[] = {
    tensor_of("h.0.attn.weight", "F32", {3, 5}),
    tensor_of("empty", "BF16", {0, 7}),
    tensor_of("codes", "U8", {4097}),
    tensor_of("scalar", "I64", {}),
    tensor_of("a \"name\"\n", "BF16", {2, 3, 4, 5}),
};
static const int64_t entry_bytes[] = {60, 0, 4097, 8, 240};
enum { ENTRIES = 5, ENTRY_TOTAL = 60 + 4097 + 8 + 240 };

static unsigned char entry_byte(int64_t i) {
    return (unsigned char)(i * 31 + i / 256);
}

// Writes the five tensors above, in pieces of `piece` bytes.
static void put_safetensors(Test* test, const char* path, int64_t piece) {
    unsigned char data[ENTRY_TOTAL];
    for (int i = 0; i < ENTRY_TOTAL; i++) data[i] = entry_byte(i);
    expect(safetensors_begin(&writer, path, entries, ENTRIES, "pt", error), "%s", error);
    for (int64_t at = 0; at < ENTRY_TOTAL; at += piece) {
        int64_t count = piece < ENTRY_TOTAL - at ? piece : ENTRY_TOTAL - at;
        expect(safetensors_write(&writer, data + at, count), "%s", error);
    }
    expect(safetensors_finish(&writer), "%s", error);
}

DATA_TEST(data_safetensors_round_trip) {
    const char* path = joined(folder, "model.safetensors");
    uint32_t first_crc = 0;
    for (int64_t piece : {1, 7, 4096, 100000}) {
        int64_t at = 0;
        put_safetensors(test, path, piece);
        const uint32_t crc = writer.crc;
        if (!first_crc) first_crc = crc;
        expect(crc == first_crc, "pieces of %lld", (long long)piece);
        Safetensors file;
        expect(safetensors_open(&file, path, error), "%s", error);
        expect(file.file->bytes == writer.bytes && file_crc(path) == crc && file.count == ENTRIES, "size, sum, count");
        expect(strcmp(json_string(json_get(file.file->header, "__metadata__"), "format", ""), "pt") == 0, "metadata");
        for (int i = 0; i < ENTRIES; at += entry_bytes[i++]) {
            const SafetensorsTensor* tensor = safetensors_find(&file, entries[i].name);
            expect(tensor && tensor->bytes == entry_bytes[i] && tensor->dims == entries[i].dims, "tensor %d", i);
            if (!tensor) continue;
            expect(i > 0 || tensor->at % 64 == 0, "the data begins at %lld", (long long)tensor->at);
            expect(strcmp(tensor->dtype, entries[i].dtype) == 0, "type of %d", i);
            const bool same = memcmp(tensor->shape, entries[i].shape, tensor->dims * sizeof(int64_t)) == 0;
            expect(same, "shape of %d", i);
            int wrong = 0;
            const unsigned char* data = (const unsigned char*)tensor_data(&file, tensor);
            for (int64_t b = 0; b < tensor->bytes; b++) wrong += data[b] != entry_byte(at + b);
            expect(wrong == 0, "%d bytes of tensor %d", wrong, i);
        }
        expect(!safetensors_find(&file, "none"), "a tensor that is not there");
        safetensors_close(&file);
    }
}

DATA_TEST(data_safetensors_truncated) {
    const char* path = joined(folder, "whole");
    const char* cut = joined(folder, "cut");
    int64_t bytes = 0, refused = 0;
    put_safetensors(test, path, 100000);
    char* text = file_read(path, &bytes, error);
    put(cut, text, bytes);
    for (int64_t length = bytes - 1; length >= 0; length--) {
        expect(truncate(cut, length) == 0, "%s", strerror(errno));
        Safetensors opened;
        error[0] = 0;
        bool fine = safetensors_open(&opened, cut, error);
        refused += !fine;
        expect(!fine && strstr(error, cut) && strstr(error, "truncated"), "%lld bytes: %s", (long long)length, error);
    }
    expect(refused == bytes, "%lld of %lld", (long long)refused, (long long)bytes);
    // A byte too many is refused as well.
    char* longer = (char*)calloc(1, (size_t)bytes + 1);
    memcpy(longer, text, (size_t)bytes);
    put(cut, longer, bytes + 1);
    Safetensors opened;
    expect_refused(safetensors_open(&opened, cut, error), error, "corrupted");
}

// malformed.txt has headers.
DATA_TEST(data_safetensors_bad) {
    const char* path = joined(folder, "bad.safetensors");
    Safetensors opened;
    uint64_t huge = (100ull << 20) + 1;
    put(path, &huge, 8);
    expect_refused(safetensors_open(&opened, path, error), error, "would be 104857601 bytes");
    put_text(path, "");
    expect_refused(safetensors_open(&opened, path, error), error, "truncated or no safetensors file: it has 0 bytes");
    expect_refused(safetensors_open(&opened, joined(folder, "none"), error), error, "No such file");
    expect_refused(safetensors_open(&opened, folder, error), error, "not a regular file");
}

DATA_TEST(data_safetensors_writer_errors) {
    const char* path = joined(folder, "x");
    SafetensorsTensor entry = tensor_of("x", "F32", {8});
    char data[64] = {0};
    expect_refused(safetensors_begin(&writer, joined(folder, "no/x"), &entry, 1, NULL, error), error, "No such file");
    // A full disk shows at the write that finds it, be it the header's or a tensor's, and later calls fail too.
    with_file_limit(16, [&] {
        expect_refused(safetensors_begin(&writer, path, &entry, 1, NULL, error), error, "x: File too large");
    });
    with_file_limit(80, [&] {  // the header has 64 bytes
        expect(safetensors_begin(&writer, path, &entry, 1, NULL, error), "%s", error);
        expect_refused(safetensors_write(&writer, data, 32), error, "x: File too large");
        expect(!safetensors_finish(&writer), "it ends well");
    });
}
