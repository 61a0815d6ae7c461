// Unit tests of data/safetensors.h: checksum, files, JSON and safetensors.
//
// Everything is written into a folder that the case removes. dev/fuzz tests files with random damage.
#include <signal.h>
#include <sys/resource.h>
#include "files.h"
#include "tensors.h"

TEST(data_crc32c) {
    expect(crc32c(0, "123456789", 9) == 0xE3069283u, "%08x", crc32c(0, "123456789", 9));
    expect(crc32c(0, "", 0) == 0, "empty");
    enum { SIZE = 20000 };
    static unsigned char bytes[SIZE];
    uint64_t state = 1;
    for (int i = 0; i < SIZE; i++) bytes[i] = (unsigned char)random_next(&state);
    uint32_t slow = 0xFFFFFFFFu;
    for (int length = 0; length < SIZE; length++) {
        bool whole = length < 300 || length % 997 < 9;
        if (whole) expect(crc32c(0, bytes, length) == ~slow, "length %d", length);
        int cut = (int)(random_next(&state) % (uint64_t)(length + 1));
        uint32_t pieces = whole ? crc32c(crc32c(0, bytes, cut), bytes + cut, length - cut) : 0;
        if (whole) expect(pieces == ~slow, "length %d cut at %d", length, cut);
        slow ^= bytes[length];
        for (int bit = 0; bit < 8; bit++) slow = slow & 1 ? slow >> 1 ^ 0x82F63B78u : slow >> 1;
    }
}

DATA_TEST(data_files) {
    const char* path = joined(folder, "a");
    expect(file_write(path, "one\0two", 7, error), "%s", error);
    int64_t bytes = 0;
    char* text = file_read(path, &bytes, error);
    expect(text && bytes == 7 && memcmp(text, "one\0two", 8) == 0, "%s", error);
    expect(file_write(path, "", 0, error), "%s", error);
    text = file_read(path, &bytes, error);
    expect(text && bytes == 0 && text[0] == 0, "%s", error);
    expect(access(joined(folder, "a.tmp"), F_OK) != 0, "the temporary file is left");
    expect(folder_make(joined(folder, "b/c//d/"), error), "%s", error);
    expect(folder_make(joined(folder, "b/c/d"), error), "an existing folder: %s", error);
    expect(folder_remove(joined(folder, "b/c"), error), "%s", error);
    expect(access(joined(folder, "b/c"), F_OK) != 0, "still there");
    expect(folder_sync(folder, error), "%s", error);
    const char* const parents[][2] = {{"a/b/c", "a/b"}, {"/a/b", "/a"}, {"/a", "/"}, {"a", "."}};
    for (const auto& row : parents)
        expect(strcmp(path_parent(row[0]), row[1]) == 0, "%s of %s", path_parent(row[0]), row[0]);
    expect_refused(folder_make(path, error), error, "there is a file of that name");
    expect_refused(folder_make(joined(folder, "a/b"), error), error, "there is a file of that name");
    expect_refused(folder_make("", error), error, "without a name");
    expect_refused(file_read(joined(folder, "none"), &bytes, error), error, "none: No such file");
    expect_refused(file_read(folder, &bytes, error), error, "not a regular file");
    expect_refused(file_write(joined(folder, "x/y"), "", 0, error), error, "x/y.tmp: No such file");
    expect(folder_remove(joined(folder, "none"), error), "%s", error);
    expect(disk_holds(joined(folder, "x/y/z"), 1, error) && disk_holds("z", 1, error), "%s", error);
    expect_refused(disk_holds(joined(folder, "x/y"), 1ll << 60, error), error, "x/y needs 1073741824.00 GiB and ");
    const SafetensorsTensor huge = tensor_of("huge", "F32", {1ll << 50});
    expect_refused(safetensors_begin(joined(folder, "huge"), &huge, 1, nullptr, error), error, "are free on its disk");
    expect(access(joined(folder, "huge"), F_OK) != 0, "a file that has no room was begun");
    // A write that the system cuts short leaves the old file as it was.
    put_text(path, "kept");
    struct rlimit before, limit;
    getrlimit(RLIMIT_FSIZE, &before);
    limit = before;
    limit.rlim_cur = 100000;
    signal(SIGXFSZ, SIG_IGN);
    char* large = (char*)calloc(1, 200000);
    setrlimit(RLIMIT_FSIZE, &limit);
    bool wrote = file_write(path, large, 200000, error);
    setrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, SIG_DFL);
    expect(!wrote && strstr(error, "File too large") && strstr(error, path), "%s", error);
    text = file_read(path, &bytes, error);
    expect(text && strcmp(text, "kept") == 0, "the old contents are gone");
}

static Json* parse_text(const char* text, char* error) {
    return json_parse(text, (int64_t)strlen(text), "text", error);
}

TEST(data_json_values) {
    const char* text =
        " {\"a\": [1, -2.5e3, 0, true, false, null], \"b\": {\"c\": \"x\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\u00e9\\u20AC"
        "\\ud83d\\ude00\"}, \"big\": 9223372036854775807, \"small\": -9223372036854775808, \"over\": "
        "9223372036854775808, \"half\": 1.5, \"million\": 1e6, \"\": \"empty\\u0000key\", \"utf\": \"\xC3\xA9\"}\n ";
    Json* json = parse_text(text, error);
    expect(json, "%s", error);
    const Json* a = json_get(json, "a");
    const JsonKind kinds[] = {JSON_NUMBER, JSON_NUMBER, JSON_NUMBER, JSON_BOOL, JSON_BOOL, JSON_NULL};
    const double numbers[] = {1, -2500, 0, 1, 0, 0};
    int count = 0;
    for (const Json* child = a->child; child; child = child->next, count++)
        expect(count < 6 && child->kind == kinds[count] && child->number == numbers[count], "element %d", count);
    expect(count == 6, "%d elements", count);
    const char* want = "x\"\\/\b\f\n\r\tA\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80";
    expect(strcmp(json_string(json_get(json, "b"), "c", ""), want) == 0, "escapes");
    expect(json_int(json, "big", 0) == INT64_MAX && json_int(json, "small", 0) == INT64_MIN, "64-bit integers");
    expect(json_int(json, "over", -7) == -7 && json_int(json, "half", -7) == -7, "no integers");
    expect(json_int(json, "million", 0) == 1000000 && json_int(json, "utf", 5) == 5, "integers in other clothes");
    expect(json_number(json, "half", 0) == 1.5 && json_number(json, "none", 4) == 4, "numbers");
    expect(json_get(json, "")->text_bytes == 9 && json_get(json, "none") == NULL && !json_get(a, "a"), "members");
    expect(strcmp(json_get(json, "big")->text, "9223372036854775807") == 0, "a number's text");
}

TEST(data_json_round_trip) {
    uint64_t state = 2;
    static double values[2000];
    static char strings[2000][16];
    for (int i = 0; i < 2000; i++) {
        // Doubles of every magnitude, floats and integers; strings of any bytes but NUL, all valid UTF-8.
        uint64_t bits = random_next(&state);
        memcpy(&values[i], &bits, 8);
        if (i % 4 == 1) values[i] = (float)(1.0 / (double)(i + 1));
        if (i % 4 == 2) values[i] = (double)((int64_t)(bits >> 12) - (1ll << 51));
        if (!isfinite(values[i])) values[i] = -0.1;
        int used = 0;
        while (used < 10) {
            uint32_t byte = (uint32_t)(random_next(&state) % 127 + 1);
            strings[i][used++] = (char)byte;
            if (byte % 5 != 0) continue;
            memcpy(strings[i] + used, "\xE2\x82\xAC", 3);
            used += 3;
        }
    }
    const char* text = printed([&](FILE* file) {
        fputc('[', file);
        for (int i = 0; i < 2000; i++) {
            json_write_number(file, values[i]), fputc(',', file);
            json_write_string(file, strings[i]), fputc(',', file);
        }
        json_write_number(file, NAN), fputc(',', file);
        json_write_number(file, -INFINITY), fputc(',', file);
        json_write_string(file, "a\xFFz\xC3"), fputc(']', file);
    });
    Json* json = parse_text(text, error);
    expect(json, "%s", error);
    const Json* at = json ? json->child : NULL;
    for (int i = 0; i < 2000 && at; i++, at = at->next) {
        expect(at->number == values[i], "%s for %.17g", at->text, values[i]);
        at = at->next;
        expect(strcmp(at->text, strings[i]) == 0, "string %d", i);
    }
    expect(at && at->kind == JSON_NULL && at->next->kind == JSON_NULL, "non-finite numbers");
    if (at) expect(strcmp(at->next->next->text, "a\xEF\xBF\xBDz\xEF\xBF\xBD") == 0, "bytes that are no UTF-8");
    const std::tuple<double, const char*> shortest[] = {{0.1, "0.1"},     {20, "20"},     {1e8, "100000000"},
                                                        {3e-4, "0.0003"}, {-1.5, "-1.5"}, {0, "0"}};
    for (const auto& [value, want] : shortest) {
        text = printed([number = value](FILE* stream) { json_write_number(stream, number); });
        expect(strcmp(text, want) == 0, "%s for %s", text, want);
    }
}

TEST(data_json_malformed) {
    for (const char* text : {" ", "\"a\nb\"", "\xFF"})
        expect_refused(parse_text(text, error), error, "text is not valid JSON");
    // Every proper prefix of an object is malformed.
    const char* whole = "{\"a\":[1,-2.5e+3,{\"b\":null}],\"c\":\"\\ud83d\\ude00\\n\",\"d\":[true,false]}";
    int length = (int)strlen(whole);
    for (int i = 0; i < length; i++) {
        error[0] = 0;
        expect(!json_parse(whole, i, "text", error) && error[0], "prefix of %d", i);
    }
    static char deep[400001];
    memset(deep, '[', 400000);
    expect_refused(parse_text(deep, error), error, "nesting deeper than 256");
    memset(deep + 256, ']', 256);
    Json* json = json_parse(deep, 512, "text", error);
    expect(json, "256 levels: %s", error);
    expect_refused(parse_text("{\n  \"a\": 1,\n  b\n}", error), error, "line 3, column 3");
}

// Parsing takes linear time: 200,000 members, two strings each, would take minutes if a member's cost grew with their
// number.
TEST(data_json_large) {
    const char* text = printed([](FILE* file) {
        for (int i = 0; i < 200000; i++) fprintf(file, "%c\"\\u0120key%d\":[\"v%d\",%d]", i ? ',' : '{', i, i, i);
        fputc('}', file);
    });
    Json* json = parse_text(text, error);
    expect(json, "%s", error);
    int64_t count = 0, sum = 0;
    for (const Json* at = json ? json->child : NULL; at; at = at->next, count++)
        sum += (int64_t)at->child->next->number;
    expect(count == 200000 && sum == 199999ll * 100000, "%lld members, sum %lld", (long long)count, (long long)sum);
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
static void put_safetensors(Test* test, const char* path, int64_t piece, uint32_t* crc, int64_t* bytes) {
    unsigned char data[ENTRY_TOTAL];
    for (int i = 0; i < ENTRY_TOTAL; i++) data[i] = entry_byte(i);
    SafetensorsWriter* writer = safetensors_begin(path, entries, ENTRIES, "pt", error);
    expect(writer, "%s", error);
    for (int64_t at = 0; at < ENTRY_TOTAL; at += piece) {
        int64_t count = piece < ENTRY_TOTAL - at ? piece : ENTRY_TOTAL - at;
        expect(safetensors_write(writer, data + at, count), "%s", error);
    }
    expect(safetensors_finish(writer, crc, bytes), "%s", error);
}

DATA_TEST(data_safetensors_round_trip) {
    const char* path = joined(folder, "model.safetensors");
    uint32_t first_crc = 0;
    const int64_t pieces[] = {1, 7, 4096, 100000};
    for (int64_t piece : pieces) {
        uint32_t crc = 0;
        int64_t bytes = 0;
        put_safetensors(test, path, piece, &crc, &bytes);
        if (!first_crc) first_crc = crc;
        expect(crc == first_crc, "pieces of %lld", (long long)piece);
        Safetensors file;
        expect(safetensors_open(&file, path, error), "%s", error);
        expect(file.file->bytes == bytes && file_crc(path) == crc && file.count == ENTRIES, "size, checksum, count");
        uint64_t header;
        expect(file_read_at(file.file->descriptor, path, &header, 0, 8, error), "%s", error);
        expect((header + 8) % 64 == 0, "the data begins at %llu", (unsigned long long)header + 8);
        expect(strcmp(json_string(json_get(file.file->header, "__metadata__"), "format", ""), "pt") == 0, "metadata");
        int64_t at = 0;
        for (int i = 0; i < ENTRIES; at += entry_bytes[i++]) {
            const SafetensorsTensor* tensor = safetensors_find(&file, entries[i].name);
            expect(tensor && tensor->bytes == entry_bytes[i] && tensor->dims == entries[i].dims, "tensor %d", i);
            if (!tensor) continue;
            expect(strcmp(tensor->dtype, entries[i].dtype) == 0, "type of %d", i);
            for (int d = 0; d < tensor->dims; d++) expect(tensor->shape[d] == entries[i].shape[d], "shape of %d", i);
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
    uint32_t crc = 0;
    int64_t bytes = 0, refused = 0;
    put_safetensors(test, path, 100000, &crc, &bytes);
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
    expect_refused(safetensors_open(&opened, path, error), error, "truncated: it has 0 bytes");
    expect_refused(safetensors_open(&opened, joined(folder, "none"), error), error, "No such file");
    expect_refused(safetensors_open(&opened, folder, error), error, "not a regular file");
}

DATA_TEST(data_safetensors_writer_errors) {
    const char* path = joined(folder, "x");
    SafetensorsTensor entry = tensor_of("x", "F32", {8}), unknown = tensor_of("x", "F31", {8}),
                      over = tensor_of("x", "F32", {1ll << 62, 4});
    uint32_t crc = 0;
    int64_t bytes = 0;
    char data[64] = {0};
    SafetensorsWriter* writer = safetensors_begin(path, &entry, 1, NULL, error);
    expect(safetensors_write(writer, data, 20), "%s", error);
    expect_refused(safetensors_finish(writer, &crc, &bytes), error, "12 of the bytes");
    writer = safetensors_begin(path, &entry, 1, NULL, error);
    expect_refused(safetensors_write(writer, data, 33), error, "1 bytes more");
    safetensors_abandon(writer);
    expect_refused(safetensors_begin(path, &unknown, 1, NULL, error), error, "F31");
    expect_refused(safetensors_begin(path, &over, 1, NULL, error), error, "impossible shape");
    expect_refused(safetensors_begin(joined(folder, "no/x"), &entry, 1, NULL, error), error, "No such file");
    // A full disk shows at the write that finds it, be it the header's or a tensor's, and later calls fail too.
    struct rlimit before, limit;
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before);
    limit = before;
    limit.rlim_cur = 16;
    setrlimit(RLIMIT_FSIZE, &limit);
    expect_refused(safetensors_begin(path, &entry, 1, NULL, error), error, "x: File too large");
    limit.rlim_cur = 80;  // the header has 64 bytes
    setrlimit(RLIMIT_FSIZE, &limit);
    writer = safetensors_begin(path, &entry, 1, NULL, error);
    expect_refused(safetensors_write(writer, data, 32), error, "x: File too large");
    expect(!safetensors_finish(writer, &crc, &bytes), "it ends well");
    setrlimit(RLIMIT_FSIZE, &before);
}
