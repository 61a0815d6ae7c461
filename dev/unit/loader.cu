// Unit tests of data/loader.h, and of the tokenizer's files.
//
// Shards hold tokens that are a function of their position, so a window tells where it was read. test_prepare.py and
// test_vocabulary.py compare the tokenizer with tiktoken's and the tokenizers library's.
#include <fcntl.h>
#include "../../data/loader.h"
#include "../../data/tokenizer.h"
#include "files.h"

static int token_of(int64_t i) {
    return (int)((i * 7919 + i / 257) % 50257);
}

TEST(data_shuffle) {
    const int64_t sizes[] = {1, 2, 3, 10, 1000, 65537};
    static unsigned char seen[65537];
    for (int64_t n : sizes) {
        for (int variant = 0; variant < 6; variant++) {
            uint64_t seed = variant < 3 ? 1337 : UINT64_MAX - (uint64_t)variant;
            int64_t wrong = 0;
            memset(seen, 0, sizeof(seen));
            for (int64_t i = 0; i < n; i++) {
                int64_t to = shuffle_index(seed, variant, i, n);
                wrong += to < 0 || to >= n || seen[to]++;
            }
            expect(wrong == 0, "n %lld, variant %d: %lld are no permutation", (long long)n, variant, (long long)wrong);
        }
    }
    // Two permutations that have nothing to do with each other agree in one place on average (Poisson), and so does one
    // with the identity; neighbours stay neighbours in 2 places.
    const int64_t n = 65537;
    int seeds = 0, epochs = 0, fixed = 0, neighbours = 0, swapped = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t to = shuffle_index(1, 0, i, n);
        seeds += to == shuffle_index(2, 0, i, n);
        epochs += to == shuffle_index(1, 1, i, n);
        fixed += to == i;
        neighbours += i + 1 < n && llabs(shuffle_index(1, 0, i + 1, n) - to) == 1;
    }
    expect(seeds < 12 && epochs < 12 && fixed < 12 && neighbours < 12, "%d %d %d %d", seeds, epochs, fixed, neighbours);
    for (uint64_t seed = 0; seed < 1000; seed++) swapped += shuffle_index(seed, 0, 0, 2) == 1;
    expect(swapped > 400 && swapped < 600, "of two, %d in 1000 seeds are swapped", swapped);
    // No table could hold these sizes.
    const int64_t huge = (1ll << 61) + 12345;
    for (int64_t i = 0; i < 1000; i++) {
        int64_t to = shuffle_index(3, i, huge - 1 - i, huge);
        expect(to >= 0 && to < huge, "%lld of %lld", (long long)to, (long long)huge);
    }
}

// Opens all of a file. T is part of what is checked on opening.
static Dataset open_data(Test* test, const char* path, int T) {
    Dataset data;
    expect(dataset_open(&data, path, DATA_AUTO, DATASET_WHOLE, 0, T, error), "%s", error);
    return data;
}

// Reads the first `count` sequences from `first` on, T+1 tokens each, through batches of B.
static void stream(Test* test, const Dataset* data, int B, int T, bool shuffle, int64_t first, int64_t count, int* out,
                   LoaderSlice slice = {0, 0}) {
    Loader* loader = loader_open(data, B, T, 1337, shuffle, first, slice, malloc, free);
    for (int64_t done = 0; done < count; done += B) {
        const Batch* batch = loader_next(loader, error);
        expect(batch, "%s", error);
        if (!batch) break;
        for (int b = 0; b < B && done + b < count; b++) {
            memcpy(out + (done + b) * (T + 1), batch->tokens + b * T, (size_t)T * sizeof(int));
            out[(done + b) * (T + 1) + T] = batch->targets[b * T + T - 1];
            int same = memcmp(batch->tokens + b * T + 1, batch->targets + b * T, (size_t)(T - 1) * sizeof(int));
            expect(same == 0, "targets are not the tokens moved by one");
        }
    }
    loader_close(loader);
}

DATA_TEST(data_loader_order) {
    enum { T = 8, TOKENS = 8 * 37 + 5, SEQUENCES = 37 * 2 + 10 };
    put_shard(joined(folder, "train.bin"), 0, TOKENS, token_of);
    const Dataset data = open_data(test, joined(folder, "train.bin"), T);
    expect(dataset_windows(&data, T) == 37 && data.tokens == TOKENS && !data.bytes, "windows");
    static int want[SEQUENCES * (T + 1)], got[SEQUENCES * (T + 1)];
    // The order by definition: sequence n is window permutation(seed, n / windows, n mod windows).
    int moved = 0;
    for (int n = 0; n < SEQUENCES; n++) {
        int64_t window = shuffle_index(1337, n / 37, n % 37, 37);
        moved += window != n % 37;
        for (int t = 0; t <= T; t++) want[n * (T + 1) + t] = token_of(window * T + t);
    }
    expect(moved > SEQUENCES / 2, "%d of %d windows moved", moved, SEQUENCES);
    for (int B : {1, 4, 64}) {
        for (int first : {0, 1, 36, 37, 74}) {
            stream(test, &data, B, T, true, first, SEQUENCES - first, got);
            const size_t bytes = (size_t)((SEQUENCES - first) * (T + 1)) * sizeof(int);
            expect(memcmp(got, want + first * (T + 1), bytes) == 0, "B = %d from %d on", B, first);
        }
    }
    // A step's sequences are the same for any number of ranks, batch size and step to resume from, over epochs.
    constexpr int STEP = 12, STEPS = SEQUENCES / STEP;
    for (int ranks : {1, 2, 3, 4, 6, 12}) {
        const int run = STEP / ranks, from = ranks % 3;
        for (int B = 1; B <= run; B++) {
            for (int rank = 0; rank < ranks && run % B == 0; rank++) {
                const int first = from * STEP + rank * run;
                stream(test, &data, B, T, true, first, (STEPS - from) * run, got, {run, STEP});
                for (int step = from; step < STEPS; step++) {
                    const int *its = got + (step - from) * run * (T + 1),
                              *all = want + (step * STEP + rank * run) * (T + 1);
                    expect(memcmp(its, all, (size_t)(run * (T + 1)) * sizeof(int)) == 0,
                           "%d ranks, B %d, step %d, rank %d", ranks, B, step, rank);
                }
            }
        }
    }
    stream(test, &data, 4, T, false, 3, 80, got);
    for (int n = 0; n < 80; n++) expect(got[n * (T + 1)] == token_of((n + 3) % 37 * T), "unshuffled sequence %d", n);
}

// A batch keeps its contents through the next call, while the thread fills the buffers ahead. Its positions are listed
// by token.
DATA_TEST(data_loader_batches) {
    enum { T = 32, B = 8, N = B * T };
    put_shard(joined(folder, "x.bin"), 0, 10000, [](int64_t i) { return i % 3 ? (int)(i * i % 50257) : 50256; });
    const Dataset data = open_data(test, joined(folder, "x.bin"), T);
    Loader* loader = loader_open(&data, B, T, 1, true, 0, {0, 0}, malloc, free);
    static int kept[N];
    const Batch* last = NULL;
    for (int i = 0; i < 300; i++) {
        const Batch* batch = loader_next(loader, error);
        if (i % 50 == 0) usleep(3000);
        if (last) expect(memcmp(last->tokens, kept, sizeof(kept)) == 0, "batch %d changed", i - 1);
        memcpy(kept, batch->tokens, sizeof(kept));
        last = batch;
        bool seen[N] = {false};
        int distinct = 0, wrong = 0;
        for (int j = 0; j < N; j++) {
            int at = batch->order[j], before = j ? batch->order[j - 1] : -1;
            wrong += at < 0 || at >= N || seen[at];
            seen[at] = true;
            int token = batch->tokens[at], token_before = j ? batch->tokens[before] : -1;
            wrong += token < token_before || (token == token_before && at < before);
            if (token == token_before) continue;
            wrong += batch->bucket[2 * distinct] != token || batch->bucket[2 * distinct + 1] != j;
            distinct++;
        }
        expect(wrong == 0 && distinct == batch->buckets, "%d wrong, %d buckets of %d", wrong, batch->buckets, distinct);
        expect(batch->bucket[2 * distinct] == -1 && batch->bucket[2 * distinct + 1] == N, "the last row");
    }
    loader_close(loader);
    // It can be closed at once, with the thread at work, and with a thread that waits.
    for (int i = 0; i < 20; i++) {
        loader = loader_open(&data, B, T, 1, true, 0, {0, 0}, malloc, free);
        if (i % 2) usleep(500);
        loader_close(loader);
    }
}

// Returns the first token of every window of T = 10, which tells which files were taken, in which order and where they
// were cut; or why nothing was opened. A quarter is for validation.
static const char* opened(const char* path, DataFormat format, DatasetPart part) {
    Dataset data;
    if (!dataset_open(&data, path, format, part, 0.25, 10, error))
        return data.file || data.files ? "the dataset is left half open" : error;
    return printed([&](FILE* file) {
        int tokens[10], targets[10];
        for (int64_t w = 0; w < dataset_windows(&data, 10); w++)
            fprintf(file, "%s%d", w ? " " : "", dataset_window(&data, 10, w, tokens, targets, error) ? tokens[0] : -1);
        if (data.left_out) fprintf(file, ", %lld tokens left out", (long long)data.left_out_tokens);
    });
}

// Each row has files (a name, the first token or character, how many), what of them is opened, and what comes of it.
TEST(data_loader_files) {
    const DatasetPart T = DATASET_TRAIN, V = DATASET_VALIDATION, W = DATASET_WHOLE;
    const char *three = "c_1.bin 100 25 c_0.bin 0 31 c_2.bin 200 41", *text = "d.txt 97 35",
               *folder = "train_0.bin 0 31 train_1.bin 100 25 val_0.bin 300 21 notes.txt 97 40";
    const std::tuple<const char*, const char*, DatasetPart, const char*> rows[] = {
        // The parts of one file are the file; a small one gives a window.
        {"x.bin 0 100", "x.bin", T, "0 10 20 30 40 50 60"},
        {"x.bin 0 100", "x.bin", V, "75 85"},
        {"x.bin 0 30", "x.bin", T, "0"},
        {"x.bin 0 30", "x.bin", V, "19"},
        {"x.bin 0 22", "x.bin", T, "0"},
        {"x.bin 0 22", "x.bin", V, "11"},
        {"x.bin 0 21", "x.bin", T, "x.bin has at most 21 tokens in each of 1 files: too few for two windows"},
        {"x.bin 0 10", "x.bin", W, "too few for a window of 11 tokens"},
        {"x.bin 0 0", "x.bin", W, "has at most 0 tokens"},
        // The last target needs a token of its own. Bytes are from 0 to 255.
        {"x 250 30", "x", W, "250 4"},
        // Several files, by their names. A quarter of the first is 7.75 tokens, less than a window, which the second
        // gives with its 6.25.
        {three, "c_?.bin", W, "0 10 20 100 110 200 210 220 230"},
        {three, "c_?.bin", T, "0 10 20 100 200 210 220 230"},
        {three, "c_?.bin", V, "111"},
        {three, "none*", T, "no file matches"},
        {"c_0.bin 0 31 c_1.txt 40 35", "c_*", W, "name one kind"},
        {"b.txt 42 30 a.txt 40 30", "*.txt", W, "40 50 42 52"},
        {"a[1].txt 97 30 a1.txt 40 30", "a[1].txt", W, "97 107"},
        // Files shorter than a window are left out, wherever they are, and their share is that of others.
        {"a 97 100 b 97 100 c 97 5", "?", T,
         "97 107 117 127 137 147 157 97 107 117 127 137 147 157, 5 tokens left out"},
        {"a 97 100 b 97 5 c 97 100", "?", V, "172 182 171 181"},
        {"a 97 5 b 97 16", "?", W, "97, 5 tokens left out"},
        {"a 97 10 b 97 10 c 97 100", "?", V, "167 177"},
        {"a 97 24 b 97 21 c 97 20", "?", T, "97 97 107 97"},
        {"a 97 24 b 97 21 c 97 20", "?", V, "110"},
        {"a 97 10 b 97 5 c 97 1", "?", W, "has at most 10 tokens in each of 3 files"},
        // A folder has its own parts.
        {folder, "", T, "0 10 20 100 110"},
        {folder, "", V, "300 310"},
        {"train_0.bin 0 44", "", V, "33"},
        {"val_0.bin 0 44 notes.txt 97 40", "", T, "holds no train_*.bin to train on"},
        {text, "none.bin", T, "No such file"},
        {text, "d.txt/y", T, "Not a directory"},
        {"x.bin 97 2", "x.txt", W, "No such file"},
    };
    for (const auto& [files, path, part, want] : rows) {
        const char* in = new_folder();
        char name[64];
        int first, count, used;
        for (const char* at = files; sscanf(at, "%63s %d %d%n", name, &first, &count, &used) == 3; at += used) {
            char bytes[256];
            for (int i = 0; i < count && i < 256; i++) bytes[i] = (char)(first + i);
            if (text_ends(name, ".bin")) {
                put_shard(joined(in, name), first, count, [](int64_t i) { return i; });
            } else {
                put(joined(in, name), bytes, count);
            }
        }
        const char* got = opened(*path ? joined(in, path) : in, strchr(files, '.') ? DATA_AUTO : DATA_BYTES, part);
        expect(*want <= '9' ? strcmp(got, want) == 0 : strstr(got, want) != nullptr, "%s of %s: '%s', want '%s'", path,
               files, got, want);
    }
}

// A shard's header is wrong, or the file ends within it (at `bytes`), or it is no shard.
DATA_TEST(data_loader_bad_files) {
    const std::tuple<int, int, int, int, const char*> rows[] = {
        {20240520, 2, -1, 0, "no whole shard: it has version 2"},
        {20240520, 1, 101, 0, "1224 bytes, and a shard of its 101 tokens has version 1 and 1226 bytes"},
        {20240520, 1, 99, 0, "no whole shard"},
        {20240520, 1, 2000000000, 0, "no whole shard"},
        {20240520, 1, -1, 1023, "no whole shard"},
        {20240520, 1, -1, 12, "no whole shard"},
        {20240520, 1, -1, 8, "no whole shard"},
        {20240520, 1, -1, 4, "no whole shard"},
        {20240801, 7, -1, 0, "is binary"},
        {'\n' << 24 | 'c' << 16 | 'b' << 8 | 'a', ' ' << 8 | 'd', -1, 5, "or type --data-format bytes to train"},
        {'b' << 8 | 'a', 0, -1, 2, "not a shard of tokens"}};
    const char* path = joined(folder, "x.bin");
    for (const auto& [magic, version, claimed, bytes, why] : rows) {
        put_shard(path, 0, 100, token_of, claimed, magic, version);
        expect(truncate(path, bytes ? bytes : 1224) == 0, "%s", strerror(errno));
        const char* got = opened(path, DATA_AUTO, DATASET_WHOLE);
        expect(strstr(got, "x.bin") && strstr(got, why), "'%s', want '%s'", got, why);
    }
    put_text(path, "");
    expect(strstr(opened(path, DATA_AUTO, DATASET_WHOLE), "x.bin is empty"), "%s", error);
    expect(strstr(opened("/dev/null", DATA_AUTO, DATASET_WHOLE), "not a regular file"), "%s", error);
    // A name of any length must fit the sentence's buffer.
    static char longest[5000];
    memset(longest, 'a', 4999);
    expect(strstr(opened(longest, DATA_AUTO, DATASET_WHOLE), "cannot open aaa"), "%s", error);
}

// Bits per byte are of the tokens that a validation reads, without <|endoftext|>. All shards must have one vocabulary.
DATA_TEST(data_loader_vocabularies) {
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
    Options o = {};
    o.data = of[0], o.val = "", o.data_format = "auto", o.val_fraction = 0.1;
    // Targets 1 to 500 and 1 to 1000: of 20 tokens 19 have a text, of three bytes and then of one.
    for (const auto& [tokens, bytes] : {std::tuple(500, 475 * 3), std::tuple(1000, 475 * 3 + 475)}) {
        expect(dataset_open_both(&train, &val, &o, T, error) && dataset_count_bytes(&val, T, tokens, error), "%s",
               error);
        expect(val.bytes_per_token == (double)bytes / tokens, "%d tokens: %g bytes each", tokens, val.bytes_per_token);
        expect(val.vocabulary == 3 && strcmp(val.tokenizer, of[0]) == 0, "%d tokens", val.vocabulary);
    }
    for (int i = 1; i < 3; i++) {
        o.data = of[0], o.val = of[i];
        expect_refused(dataset_open_both(&train, &val, &o, T, error), error, "has another vocabulary (of");
        o.data = joined(folder, formatted("f[0%d]/train_*.bin", i)), o.val = "";
        expect_refused(dataset_open_both(&train, &val, &o, T, error), error, "prepare both with one --tokenizer");
    }
    put_text(joined(of[1], "vocab.json"), names[0]);
    o.data = joined(folder, "f[01]/train_*.bin"), o.val = of[1];
    expect(dataset_open_both(&train, &val, &o, T, error), "%s", error);
    unlink(joined(of[0], "meta.json")), unlink(joined(of[0], "vocab.json"));
    const Dataset plain = open_data(test, joined(of[0], "*.bin"), T);
    expect(plain.vocabulary == 50257 && plain.bytes_per_token == 0 && !*plain.tokenizer, "without meta.json");
}

// Each of several files gives its end, and what is not shuffled is drawn from all of them.
DATA_TEST(data_loader_mixed_validation) {
    enum { T = 10, WINDOWS = 3 * 4 };
    for (int i = 0; i < 3; i++)
        put_shard(joined(folder, formatted("%d.bin", i)), 1000 * i, 410, [](int64_t at) { return (int)at; });
    Dataset val;
    expect(dataset_open(&val, joined(folder, "*.bin"), DATA_AUTO, DATASET_VALIDATION, 0.1, T, error), "%s", error);
    expect(val.files == 3 && dataset_windows(&val, T) == WINDOWS, "%lld windows", (long long)dataset_windows(&val, T));
    int got[WINDOWS * (T + 1)], in_order = 0;
    stream(test, &val, 3, T, false, 0, WINDOWS, got);
    for (int n = 0; n < WINDOWS; n++) {
        const int64_t window = shuffle_index(0, 0, n, WINDOWS), want = window / 4 * 1000 + 369 + window % 4 * T;
        expect(got[n * (T + 1)] == want, "window %d begins with %d, not %lld", n, got[n * (T + 1)], (long long)want);
        in_order += window == n;
    }
    expect(in_order < WINDOWS / 2, "%d windows of %d are in order", in_order, WINDOWS);
}

DATA_TEST(data_loader_token_above_vocabulary) {
    enum { T = 10 };
    put_shard(joined(folder, "x.bin"), 0, 101, [](int64_t i) { return i == 70 ? 50257 : (int)i; });
    put_shard(joined(folder, "y.bin"), 0, 31, [](int64_t i) { return i == 30 ? 65535 : 50256; });
    const Dataset data = open_data(test, joined(folder, "?.bin"), T);
    int tokens[T], targets[T];
    const char* wanted = "x.bin holds token 50257 at position 70 and the vocabulary has 50257 tokens";
    expect(dataset_window(&data, T, 5, tokens, targets, error), "%s", error);
    expect_refused(dataset_window(&data, T, 6, tokens, targets, error), error, wanted);  // as the last target
    expect_refused(dataset_window(&data, T, 7, tokens, targets, error), error, wanted);
    expect(dataset_window(&data, T, 8, tokens, targets, error), "%s", error);
    expect(dataset_window(&data, T, 11, tokens, targets, error), "50256 is a token: %s", error);
    expect_refused(dataset_window(&data, T, 12, tokens, targets, error), error,
                   "y.bin holds token 65535 at position 30");
    // Through the loader the batches before it come, then NULL, again and again.
    Loader* loader = loader_open(&data, 2, T, 1, false, 0, {0, 0}, malloc, free);
    for (int i = 0; i < 3; i++) expect(loader_next(loader, error), "batch %d: %s", i, error);
    for (int i = 0; i < 3; i++) expect_refused(loader_next(loader, error), error, wanted);
    loader_close(loader);
}

// Files may be over 2 GiB: of a shard and of bytes, both sparse, the last window holds what was written there.
DATA_TEST(data_loader_over_2_gib) {
    enum { T = 64 };
    for (int width : {1, 2}) {
        const char* path = joined(folder, width == 1 ? "x.dat" : "x.bin");
        const int64_t tokens = (int64_t)((5ll << 29) / width) / T * T + 1, begin = width == 1 ? 0 : 1024;
        const int32_t header[3] = {20240520, 1, (int32_t)tokens};
        uint16_t last[T + 1];
        uint8_t last_bytes[T + 1];
        for (int i = 0; i <= T; i++) last[i] = last_bytes[i] = (uint8_t)(i + 3);
        const int descriptor = open(path, O_RDWR | O_CREAT, 0600);
        const int64_t piece = (T + 1) * width;
        bool fine = ftruncate(descriptor, begin + tokens * width) == 0;
        fine = fine && (width == 1 || pwrite(descriptor, header, 12, 0) == 12);
        const void* from = width == 1 ? (void*)last_bytes : (void*)last;
        fine = fine && pwrite(descriptor, from, (size_t)piece, begin + tokens * width - piece) == piece;
        close(descriptor);
        if (!fine) skip("no sparse files of 2.5 GiB here: %s", strerror(errno));
        for (DatasetPart part : {DATASET_WHOLE, DATASET_VALIDATION}) {
            Dataset data;
            int got[T], targets[T];
            // Zeros are no text.
            expect(dataset_open(&data, path, width == 1 ? DATA_BYTES : DATA_AUTO, part, 0.01, T, error), "%s", error);
            const int64_t want = part == DATASET_WHOLE ? tokens : (int64_t)(0.01 * (double)tokens),
                          windows = dataset_windows(&data, T);
            expect(data.tokens == want && windows == (want - 1) / T, "%lld tokens", (long long)data.tokens);
            expect(dataset_window(&data, T, windows / 2, got, targets, error) && got[0] == 0, "the middle");
            expect(dataset_window(&data, T, windows - 1, got, targets, error), "%s", error);
            for (int t = 0; t < T && part == DATASET_WHOLE; t++)
                expect(got[t] == last[t] && targets[t] == last[t + 1], "%s: position %d is %d", path, t, got[t]);
            dataset_close(&data);
        }
    }
}

DATA_TEST(data_tokenizer_files) {
    expect_refused(tokenizer_open(folder, error), error, "holds neither vocab.json");
    const char* vocabulary = joined(folder, "vocab.json");
    put_text(vocabulary, "{\"a\":0,\"\\u0120b\":2,\"\xC4\x8A\":3,\"<|endoftext|>\":4,\"two words\":5}");
    Tokenizer* tokenizer = tokenizer_open(folder, error);
    expect(tokenizer, "%s", error);
    const std::tuple<int, const char*> decoded[] = {
        {0, "a"}, {1, ""}, {2, " b"}, {3, "\n"}, {4, "<|endoftext|>"}, {5, "two words"}, {6, ""}, {-1, ""}};
    int tokens[8], bytes = 0;
    for (const auto& [token, want] : decoded) {
        const char* text = tokenizer_decode(tokenizer, token, &bytes);
        bool same = bytes == (int)strlen(want) && memcmp(text, want, (size_t)bytes) == 0;
        expect(same, "token %d is \"%.*s\"", token, bytes, text);
    }
    expect(tokenizer_vocabulary(tokenizer) == 6 && tokenizer_end(tokenizer) == 4, "size");
    expect(tokenizer_encode(tokenizer, "a", 1, tokens, 8) == -1, "there are no merges");
    tokenizer_close(tokenizer);
}
