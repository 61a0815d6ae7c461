// Tests of training text: every character of the tokenizer, files that are no text, and checksums of data.
#include <fcntl.h>

#include "../../data/loader.h"
#include "../../data/tokenizer.h"
#include "cli.h"

// Writes the vocabulary of dev/reference/make_unicode.py: bytes, and pairs of a probe and a byte above 127 in both
// orders.
static void put_word_vocabulary(const char* folder) {
    static const unsigned char probes[] = "a1. \n";
    char name[256][8];
    name_bytes(name);
    FILE *vocabulary = fopen(joined(folder, "vocab.json"), "w"), *merges = fopen(joined(folder, "merges.txt"), "w");
    print_bytes(vocabulary);
    for (int i = 0; i < 5 * 128 * 2; i++) {
        const char *probe = name[probes[i / 256]], *high = name[128 + i % 256 / 2];
        const char *left = i % 2 ? high : probe, *right = i % 2 ? probe : high;
        fprintf(vocabulary, ", \"%s%s\": %d", left, right, 256 + i);
        fprintf(merges, "%s %s\n", left, right);
    }
    fputc('}', vocabulary);
    fclose(vocabulary), fclose(merges);
}

// Writes the text of one line of dev/reference/words.txt. Returns how many bytes it has.
static int64_t word_text(uint32_t first, uint32_t count, char* text) {
    char* to = text;
    for (const char* context : {"a@a", "1@1", ".@.", " @ a", "@@ .", "  @1", "x'@s", "\xC3\xA9@", "@  ", ".\n@\n"}) {
        for (uint32_t point = first; point < first + count; point++) {
            if (point >= 0xD800 && point < 0xE000) continue;
            for (const char* c = context; *c; c++) {
                if (*c == '@') to = put_character(to, point);
                if (*c != '@') *to++ = *c;
            }
            *to++ = '\n';
        }
    }
    return to - text;
}

// Our tokens are tiktoken's, whose hashes are in dev/reference/words.txt.
DATA_TEST(corpus_every_character) {
    enum { BLOCK = 4096, BYTES = BLOCK * 10 * 12 };
    put_word_vocabulary(folder);
    Tokenizer* tokenizer = tokenizer_open(folder, error);
    expect(tokenizer, "%s", error);
    char *words = contents(test_folder(), "dev/reference/words.txt"), *text = (char*)malloc(BYTES);
    int* tokens = (int*)malloc(BYTES * sizeof(int));
    int blocks = 0;
    for (char* line = words; tokenizer && line && *line; line = strchr(line, '\n') + 1, blocks++) {
        unsigned first = 0;
        unsigned long long want = 0, got = 0;
        if (sscanf(line, "%x %llx", &first, &want) != 2) break;
        int count = tokenizer_encode(tokenizer, text, word_text(first, BLOCK, text), tokens, BYTES);
        for (int i = 0; i < count; i++) got = (got + (unsigned)tokens[i]) * 0x100000001B3ull;
        expect(got == want, "the words around U+%04X to U+%04X are not tiktoken's", first, first + BLOCK - 1);
    }
    expect(blocks == 0x110000 / BLOCK, "%d blocks", blocks);
    // The earlier line of merges.txt wins if two merges want the same byte: \xA9 joins a, so a does not join \xC3.
    const int joined = tokenizer_encode(tokenizer,
                                        "\xC3\xA9"
                                        "a\xC3\xA9",
                                        5, tokens, BYTES);
    expect(joined == 4 && tokens[1] == 256 + (0xA9 - 128) * 2 + 1, "%d tokens, %d", joined, tokens[1]);
    // Any bytes come back, of whatever script or none at all.
    uint64_t state = 7;
    for (int i = 0; i < 300; i++) {
        const int64_t length = (int64_t)(random_next(&state) % 200);
        for (int64_t b = 0; b < length; b++) {
            const uint64_t r = random_next(&state);
            text[b] = i % 2 ? (char)r : " etaoin'st\n\t1,\xC3\xA9"[r % 16];
        }
        const int count = tokenizer_encode(tokenizer, text, length, tokens, BYTES);
        int64_t used = 0;
        for (int t = 0, bytes = 0; t < count; t++, used += bytes) {
            const char* piece = tokenizer_decode(tokenizer, tokens[t], &bytes);
            expect(used + bytes <= length && memcmp(text + used, piece, (size_t)bytes) == 0, "text %d", i);
        }
        expect(used == length, "text %d does not come back", i);
    }
}

// A file that is no text is refused by its contents, with a way on, and --data-format bytes takes it. Texts of any
// encoding of 8 bits are texts; numbers and UTF-16 without a mark are not; and a stray NUL does not matter.
DATA_TEST(corpus_content) {
    enum { BYTES = 1 << 20 };
    static unsigned char bytes[BYTES];
#define BINARY "\x9C\0\x07\xF3", 4
    // A row has the first bytes, those that then repeat, their lengths and two parts of the refusal (empty: a text).
    static const std::tuple<const char*, int, const char*, int, const char*, const char*> cases[] = {
        {"\x1F\x8B\x08\x00", 4, BINARY, "is gzip data", "type make venv && .venv/bin/python data/prepare.py '/"},
        {"\3757zXZ\0", 6, BINARY, "is xz data", "data/prepare.py '/"},
        {"\x28\xB5\x2F\xFD", 4, BINARY, "is zstd data", "data/prepare.py '/"},
        {"PAR1", 4, BINARY, "is a parquet table", "data/prepare.py '/"},
        {"PK\3\4", 4, BINARY, "is a zip archive", "type unzip '/"},
        {"\x93NUMPY\1\0", 8, BINARY, "a NumPy array", "--from-nanogpt"},
        {"%PDF-1.7", 8, BINARY, "a PDF document", "type pdftotext '/"},
        {"\xFF\xFE", 2, "a\0", 2, "is UTF-16 text", "type iconv -f UTF-16 -t UTF-8 '/"},
        {"??", 2, BINARY, "is binary", "--from-nanogpt DIR"},
        {"PAR1", 4, "a printable signature may begin a text\n", 39, "", ""},
        {"", 0, "\xE9t\xE9 \xE0 la plage\r\n\t", 17, "", ""},                                // Latin-1
        {"", 0, "\xF0\xD2\xC9\xD7\xC5\xD4 ", 7, "", ""},                                     // KOI8-R
        {"", 0, "\xD6\xD0\xCE\xC4\xA1\xA3", 6, "", ""},                                      // GB 18030
        {"", 0, "\x1B[1mok\x1B[0m\n", 11, "", ""},                                           // a terminal's log
        {"", 0, "h\0i\0 \0!\0\n\0", 10, "is binary", "binary (50%"},                         // UTF-16, little-endian
        {"", 0, "\x0D\0\x06\1\x86\x34\x0B\0\x2C\1", 10, "is binary", "--from-nanogpt DIR"},  // GPT-2's tokens
        {"", 0, "{ \"text\": \"a\"}\n", 15, "is JSON, whose marks and names", "data/prepare.py '/"},
        {"", 0, " [\n{\"text\": \"a\"}]\n", 18, "is JSON", "data/prepare.py '/"},
        {"", 0, "{x} [y]\n", 8, "", ""},
        {"", 0, "abcdefghijklmnop\1", 17, "is binary", "control characters"},
        {"ab\0", 3, "an archive of texts begins with NUL bytes", 41, "is binary", ""},
    };
#undef BINARY
    const char* path = joined(folder, "it's a file.txt");
    const auto refusal = [&](int64_t count, DataFormat format) {
        Dataset data;
        put(path, bytes, count);
        return dataset_open(&data, path, format, DATASET_WHOLE, 0, 1, error) ? "" : error;
    };
    for (const auto& [head, head_length, piece, length, why, advice] : cases) {
        for (int i = 0; i < BYTES; i++)
            bytes[i] = (unsigned char)(i < head_length ? head[i] : piece[(i - head_length) % length]);
        for (int count : {100, (int)BYTES}) {
            const char* got = refusal(count, DATA_AUTO);
            expect(*why ? strstr(got, why) && strstr(got, advice) : !*got, "%s...: '%s', want '%s'", head, got, why);
            expect(!*got || strstr(got, "add --data-format bytes"), "%s", got);
            expect(!*refusal(count, DATA_BYTES), "%s", error);
        }
    }
    memset(bytes, 'a', BYTES);
    for (int i = 3000; i < BYTES; i += 5000) bytes[i] = 0;
    expect(!*refusal(BYTES, DATA_AUTO), "stray NULs: %s", error);
    memset(bytes + BYTES / 4, 0, BYTES / 2);  // a text at the beginning alone is not enough
    expect(strstr(refusal(BYTES, DATA_AUTO), "is binary"), "%s", error);
}

static uint32_t fingerprint(Test* test, const char* path, DatasetPart part, DataFormat format = DATA_AUTO) {
    Dataset data = {};
    expect(dataset_open(&data, path, format, part, 0.1, 16, error) && dataset_fingerprint(&data, error), "%s", error);
    return data.crc;
}

// A fingerprint depends on the tokens alone, not on names or times, and each part of a file has its own.
TEST(corpus_fingerprint) {
    char text[20000];
    const char* folder = new_folder();
    for (int i = 0; i < 20000; i++) text[i] = " etaoin\n"[i * 7 / 5 % 8];
    const char *one = joined(folder, "one.txt"), *two = joined(folder, "./two");
    put(one, text, sizeof(text)), put(two, text, sizeof(text));
    const uint32_t train = fingerprint(test, one, DATASET_TRAIN), val = fingerprint(test, one, DATASET_VALIDATION);
    expect(train != val && fingerprint(test, two, DATASET_TRAIN) == train, "%08x and %08x", train, val);
    for (int place : {0, 4095, 4096, 12345, 17999, 18000, 19999}) {
        change_byte(two, place, 1);
        expect((fingerprint(test, two, DATASET_TRAIN) == train) == (place >= 18000), "byte %d", place);
        expect((fingerprint(test, two, DATASET_VALIDATION) == val) == (place < 18000), "byte %d", place);
        change_byte(two, place, 1);
    }
    Dataset memory;
    expect(dataset_open_memory(&memory, text, sizeof(text), DATASET_VALIDATION, 0.1, 16, error), "%s", error);
    expect(dataset_fingerprint(&memory, error) && memory.crc == val, "%08x of memory, %08x", memory.crc, val);
    // A folder, and the same tokens by a pattern under other names.
    for (int i = 0; i < 2; i++) {
        write_shard(folder, i ? "train_1.bin" : "train_0.bin", 200, i);
        write_shard(folder, i ? "same_b.bin" : "same_a.bin", 200, i);
    }
    write_shard(folder, "val_0.bin", 50, 1);
    const uint32_t shards = fingerprint(test, folder, DATASET_TRAIN);
    expect(fingerprint(test, joined(folder, "same_*.bin"), DATASET_WHOLE) == shards, "under other names");
    write_shard(folder, "train_1.bin", 200, 7);
    expect(fingerprint(test, folder, DATASET_TRAIN) != shards, "with another token");
    // A file over 256 MiB (a sparse one) is read in blocks: the first and the last are among them.
    const char* large = joined(folder, "large");
    const int64_t size = 257 << 20;
    int descriptor = open(large, O_RDWR | O_CREAT, 0600);
    expect(ftruncate(descriptor, size) == 0, "%s", strerror(errno));
    const uint32_t zeros = fingerprint(test, large, DATASET_WHOLE, DATA_BYTES);
    for (int64_t at : {(int64_t)0, size - 1, (size - 4096) * 31 / 63 + 5}) {
        expect(pwrite(descriptor, "x", 1, at) == 1, "%s", strerror(errno));
        expect(fingerprint(test, large, DATASET_WHOLE, DATA_BYTES) != zeros, "byte %lld", (long long)at);
        expect(pwrite(descriptor, "", 1, at) == 1, "%s", strerror(errno));
    }
    expect(ftruncate(descriptor, size + 1) == 0 && fingerprint(test, large, DATASET_WHOLE, DATA_BYTES) != zeros,
           "one byte more");
    close(descriptor);
}
