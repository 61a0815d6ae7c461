// Tests of training text: every character of the tokenizer, files that are no text, shards too short for a window, data
// of several folders, and data that changed between two starts of a run.
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

static bool opens(const char* path, DataFormat format, DatasetPart part, int T, char* error) {
    Dataset data;
    return dataset_open(&data, path, format, part, 0.1, T, error);
}

// Writes 4000 bytes: numbers that no text has if `binary`, else text, with the signature at byte `at`.
static void put_signed(const char* path, int at, const char* signature, int length, bool binary) {
    static unsigned char bytes[4000];
    uint64_t state = 5;
    for (int i = 0; i < 4000; i++) bytes[i] = binary ? (unsigned char)random_next(&state) : " etaoin\n"[i % 8];
    memcpy(bytes + at, signature, (size_t)length);
    put(path, bytes, sizeof(bytes));
}

// A file that is no text is refused by its contents, with a way on, and --data-format bytes takes it.
DATA_TEST(corpus_content) {
    static const std::tuple<const char*, int, int, const char*, const char*> cases[] = {
        {"\x1F\x8B\x08\x00", 4, 0, "gzip", "type make venv && .venv/bin/python data/prepare.py"},
        {"\3757zXZ\0", 6, 0, "xz data", "type make venv && .venv/bin/python data/prepare.py"},
        {"\x28\xB5\x2F\xFD", 4, 0, "zstd", "type make venv && .venv/bin/python data/prepare.py"},
        {"PAR1", 4, 0, "parquet", "type make venv && .venv/bin/python data/prepare.py"},
        {"PK\3\4", 4, 0, "zip", "type unzip"},
        {"\x93NUMPY\1\0", 8, 0, "NumPy", "--from-nanogpt"},
        {"%PDF-1.7", 8, 0, "PDF", "type pdftotext"},
        {"\xFF\xFE"
         "a",
         4, 0, "UTF-16", "type iconv -f UTF-16 "},
        {"??", 2, 0, "binary", "--from-nanogpt"},
    };
    const char *path = joined(folder, "it's text.txt"), *model = joined(folder, "model.bin");
    for (const auto& [signature, length, at, name, advice] : cases) {
        put_signed(path, at, signature, length, true);
        expect_refused(opens(path, DATA_AUTO, DATASET_WHOLE, 16, error), error, name);
        expect(strstr(error, advice) && strstr(error, "--data-format bytes"), "%s", error);
        expect(!strstr(error, "type ") || strstr(error, "it'\\''s text.txt'"), "not quoted for a shell: %s", error);
        expect(opens(path, DATA_BYTES, DATASET_WHOLE, 16, error), "%s", error);
        put_signed(model, at, signature, length, true);
        expect_refused(opens(model, DATA_AUTO, DATASET_WHOLE, 16, error), error, name);
        expect(strstr(error, advice), "%s", error);
    }
    // A printable signature may begin a text.
    put_signed(path, 0, "PAR1", 4, false);
    expect(opens(path, DATA_AUTO, DATASET_WHOLE, 16, error), "%s", error);
}

// Texts of any encoding of 8 bits are texts; numbers and UTF-16 without a mark are not; and a stray NUL does not
// matter.
DATA_TEST(corpus_text_or_not) {
    enum { BYTES = 1 << 20 };
    static unsigned char bytes[BYTES];
    // A piece of the text and its length, and why it is refused; NULL: it is a text.
    static const std::tuple<const char*, const char*, int, const char*> cases[] = {
        {"Latin-1", "\xE9t\xE9 \xE0 la plage\r\n\t", 17, nullptr},
        {"Russian, KOI8-R", "\xF0\xD2\xC9\xD7\xC5\xD4 ", 7, nullptr},
        {"Chinese, GB 18030", "\xD6\xD0\xCE\xC4\xA1\xA3", 6, nullptr},
        {"a terminal's log", "\x1B[1mok\x1B[0m\n", 11, nullptr},
        {"UTF-16 little-endian", "h\0i\0 \0!\0\n\0", 10, "is binary"},
        {"UTF-16 big-endian", "\0h\0i\0 \0!\0\n", 10, "is binary"},
        {"tokens of characters", "\x27\0\1\0\x30\0\0\0\x28\0\x0A\0", 12, "--from-nanogpt DIR"},
        {"GPT-2's tokens", "\x0D\0\x06\1\x86\x34\x0B\0\x2C\1", 10, "--from-nanogpt DIR"},
        {"documents of JSON", "{ \"text\": \"a\"}\n", 15, "is JSON, whose marks and names"},
        {"an array", " [\n{\"text\": \"a\"}]\n", 18, "data/prepare.py"},
        {"a text with braces", "{x} [y]\n", 8, nullptr},
        {"control bytes", "abcdefghijklmnop\1", 17, "is binary"},
    };
    const char* path = joined(folder, "x");
    for (const auto& [what, piece, length, refused] : cases) {
        for (int i = 0; i < BYTES; i++) bytes[i] = (unsigned char)piece[i % length];
        put(path, bytes, BYTES);
        bool open = opens(path, DATA_AUTO, DATASET_WHOLE, 16, error);
        if (!refused) expect(open, "%s: %s", what, error);
        if (refused) expect(!open && strstr(error, refused), "%s: %s", what, open ? "taken" : error);
    }
    memset(bytes, 'a', BYTES);
    for (int i = 3000; i < BYTES; i += 5000) bytes[i] = 0;
    put(path, bytes, BYTES);
    expect(opens(path, DATA_AUTO, DATASET_WHOLE, 16, error), "%s", error);
    // A container of texts, such as a tar archive, has NUL bytes at its beginning; a text at the beginning alone is not
    // enough either.
    bytes[3] = 0;
    put(path, bytes, BYTES);
    expect_refused(opens(path, DATA_AUTO, DATASET_WHOLE, 16, error), error, "is binary");
    memset(bytes, 'a', BYTES);
    memset(bytes + BYTES / 4, 0, BYTES / 2);
    put(path, bytes, BYTES);
    expect_refused(opens(path, DATA_AUTO, DATASET_WHOLE, 16, error), error, "is binary");
    put(path, "a\0b", 3);
    expect_refused(opens(path, DATA_AUTO, DATASET_WHOLE, 1, error), error, "add --data-format bytes");
    put_text(path, "abc");
    expect(opens(path, DATA_AUTO, DATASET_WHOLE, 1, error), "%s", error);
    expect_refused(opens(path, DATA_SHARDS, DATASET_WHOLE, 1, error), error, "type --data-format auto");
}

// Files shorter than a window are left out, wherever they are. Each file gives its share of the validation part, unless
// that is less than a window, which the next one then gives too.
DATA_TEST(corpus_short_shards) {
    enum { T = 16 };
    static const struct {
        int tokens[4];  // of four shards
        int train, val, left_out;
        const char* refused;
    } cases[] = {
        {{100, 100, 100, 5}, 280, 20, 1, nullptr},
        {{5, 100, 0, 100}, 180, 20, 2, nullptr},
        {{100, 16, 17, 33}, 133, 17, 1, nullptr},
        {{100, 0, 0, 0}, 83, 17, 3, nullptr},
        {{100, 100, 34, 17}, 231, 20, 0, nullptr},
        {{16, 16, 5, 0}, 0, 0, 0, "has at most 16 tokens in each of 4 files"},
        {{1000, 400, 10, 400}, 1619, 181, 1, nullptr},
    };
    for (auto& item : cases) {
        for (int i = 0; i < 4; i++) {
            const char* name = formatted("s%d.bin", i);
            write_shard(folder, name, item.tokens[i], 3);
        }
        Dataset data;
        const char* path = joined(folder, "*.bin");
        if (item.refused) {
            expect_refused(opens(path, DATA_AUTO, DATASET_WHOLE, T, error), error, item.refused);
        } else if (dataset_open(&data, path, DATA_AUTO, DATASET_TRAIN, 0.1, T, error)) {
            expect(data.tokens == item.train && data.left_out == item.left_out, "%lld tokens, %d left out, want %d, %d",
                   (long long)data.tokens, data.left_out, item.train, item.left_out);
            expect(dataset_open(&data, path, DATA_AUTO, DATASET_VALIDATION, 0.1, T, error) && data.tokens == item.val,
                   "%lld, %s", (long long)data.tokens, error);
        } else {
            expect(false, "%s", error);
        }
    }
}

// Bits per byte are of the tokens that a validation reads, without <|endoftext|>. All shards must have one vocabulary.
DATA_TEST(corpus_vocabularies) {
    enum { T = 10 };
    static const char* const names[] = {"{\"a\": 0, \"bbb\": 1, \"<|endoftext|>\": 2}",
                                        "{\"a\": 0, \"ccc\": 1, \"b\": 2}",
                                        "{\"a\": 0, \"bbb\": 1, \"<|endoftext|>\": 2}"};
    const char* of[3];
    for (int i = 0; i < 3; i++) {
        of[i] = joined(folder, formatted("f%d", i));
        mkdir(of[i], 0755);
        put_text(joined(of[i], "vocab.json"), names[i]);
        put_text(joined(of[i], "meta.json"), i == 2 ? "{\"vocabulary\": 4}" : "{\"vocabulary\": 3}");
        put_shard(joined(of[i], "train_0.bin"), 0, 1000, [](int64_t n) { return n % 20 == 0 ? 2 : n < 500; });
        put_shard(joined(of[i], "val_0.bin"), 0, 1001, [](int64_t n) { return n % 20 == 0 ? 2 : n < 500; });
    }
    Dataset train, val;
    DataSource source = {of[0], "", "auto", 0.1, "", 0};
    // Targets 1 to 500 and 1 to 1000: of 20 tokens 19 have a text, of three bytes and then of one.
    for (const auto& [tokens, bytes] : {std::tuple(500, 475 * 3), std::tuple(1000, 475 * 3 + 475)}) {
        expect(dataset_open_both(&train, &val, &source, T, error) && dataset_count_bytes(&val, T, tokens, error), "%s",
               error);
        expect(val.bytes_per_token == (double)bytes / tokens, "%d tokens: %g bytes each", tokens, val.bytes_per_token);
    }
    for (int i = 1; i < 3; i++) {
        source = {of[0], of[i], "auto", 0.1, "", 0};
        expect_refused(dataset_open_both(&train, &val, &source, T, error), error, "has another vocabulary (of");
        source = {joined(folder, formatted("f[0%d]/train_*.bin", i)), "", "auto", 0.1, "", 0};
        expect_refused(dataset_open_both(&train, &val, &source, T, error), error, "prepare both with one --tokenizer");
    }
    put_text(joined(of[1], "vocab.json"), names[0]);
    source = {joined(folder, "f[01]/train_*.bin"), of[1], "auto", 0.1, "", 0};
    expect(dataset_open_both(&train, &val, &source, T, error), "%s", error);
}

// Each of several texts gives its end, and the first windows are of all of them.
DATA_TEST(corpus_mixed_validation) {
    enum { T = 16, FILES = 8 };
    for (int i = 0; i < FILES; i++) {
        char text[4001] = "";
        memset(text, 'a' + i, 4000);
        put_text(joined(folder, formatted("%d.txt", i)), text);
    }
    Dataset val;
    expect(dataset_open(&val, joined(folder, "*.txt"), DATA_AUTO, DATASET_VALIDATION, 0.1, T, error), "%s", error);
    expect(val.mixed && val.files == FILES && val.tokens == FILES * 400, "%lld tokens", (long long)val.tokens);
    Loader* loader = loader_open(&val, 24, T, 0, false, 0, {0, 0}, malloc, free, error);
    const Batch* batch = loader_next(loader, error);
    bool seen[FILES] = {};
    int found = 0;
    for (int b = 0; b < 24; b++) seen[batch->tokens[b * T] - 'a'] = true;
    for (bool one : seen) found += one;
    expect(found >= 6, "24 windows are of %d files", found);
    loader_close(loader);
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
        text[place] ^= 1;
        put(two, text, sizeof(text));
        expect((fingerprint(test, two, DATASET_TRAIN) == train) == (place >= 18000), "byte %d", place);
        expect((fingerprint(test, two, DATASET_VALIDATION) == val) == (place < 18000), "byte %d", place);
        text[place] ^= 1;
    }
    Dataset memory;
    expect(dataset_open_memory(&memory, text, sizeof(text), DATASET_VALIDATION, 0.1, 16, error), "%s", error);
    expect(dataset_fingerprint(&memory, error) && memory.crc == val, "%08x of memory, %08x", memory.crc, val);
    // A folder, its files by a pattern, and the same tokens under other names.
    for (int i = 0; i < 2; i++) {
        write_shard(folder, i ? "train_1.bin" : "train_0.bin", 200, i);
        write_shard(folder, i ? "same_b.bin" : "same_a.bin", 200, i);
    }
    write_shard(folder, "val_0.bin", 50, 1);
    const uint32_t shards = fingerprint(test, folder, DATASET_TRAIN);
    expect(fingerprint(test, joined(folder, "train_*.bin"), DATASET_WHOLE) == shards, "as a pattern");
    expect(fingerprint(test, joined(folder, "same_*.bin"), DATASET_WHOLE) == shards, "under other names");
    write_shard(folder, "train_1.bin", 200, 7);
    expect(fingerprint(test, folder, DATASET_TRAIN) != shards, "with another token");
    // A file over 256 MiB (a sparse one) is read in blocks: the first and the last are among them.
    const char* large = joined(folder, "large");
    const int64_t size = 257 << 20, changed[] = {0, size - 1, (size - 4096) * 31 / 63 + 5};
    int descriptor = open(large, O_RDWR | O_CREAT, 0600);
    expect(ftruncate(descriptor, size) == 0, "%s", strerror(errno));
    const uint32_t zeros = fingerprint(test, large, DATASET_WHOLE, DATA_BYTES);
    for (int64_t at : changed) {
        expect(pwrite(descriptor, "x", 1, at) == 1, "%s", strerror(errno));
        expect(fingerprint(test, large, DATASET_WHOLE, DATA_BYTES) != zeros, "byte %lld", (long long)at);
        expect(pwrite(descriptor, "", 1, at) == 1, "%s", strerror(errno));
    }
    expect(fingerprint(test, large, DATASET_WHOLE, DATA_BYTES) == zeros, "zeros again");
    expect(ftruncate(descriptor, size + 1) == 0 && fingerprint(test, large, DATASET_WHOLE, DATA_BYTES) != zeros,
           "one byte more");
    close(descriptor);
}
