// Unit tests of data/loader.h and data/tokenizer.h.
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
    int seeds = 0, epochs = 0, fixed = 0, neighbours = 0;
    double distance = 0.0;
    for (int64_t i = 0; i < n; i++) {
        int64_t to = shuffle_index(1, 0, i, n);
        seeds += to == shuffle_index(2, 0, i, n);
        epochs += to == shuffle_index(1, 1, i, n);
        fixed += to == i;
        neighbours += i + 1 < n && llabs(shuffle_index(1, 0, i + 1, n) - to) == 1;
        distance += (double)llabs(to - i) / (double)n;
    }
    expect(seeds < 12 && epochs < 12 && fixed < 12 && neighbours < 12, "%d %d %d %d", seeds, epochs, fixed, neighbours);
    // |to - i| / n of independent uniforms: mean 1/3, deviation sqrt(1/18 / n) = 0.0009.
    expect(fabs(distance / (double)n - 1.0 / 3.0) < 0.006, "mean distance %g", distance / (double)n);
    int swapped = 0;
    for (uint64_t seed = 0; seed < 1000; seed++) swapped += shuffle_index(seed, 0, 0, 2) == 1;
    expect(swapped > 400 && swapped < 600, "of two, %d in 1000 seeds are swapped", swapped);
    // No table could hold these sizes.
    const int64_t huge = (1ll << 61) + 12345;
    for (int64_t i = 0; i < 1000; i++) {
        int64_t to = shuffle_index(3, i, huge - 1 - i, huge);
        expect(to >= 0 && to < huge, "%lld of %lld", (long long)to, (long long)huge);
    }
}

// T is part of what is checked on opening.
static Dataset open_data(Test* test, const char* path, DatasetPart part, double fraction, int T) {
    Dataset data;
    expect(dataset_open(&data, path, DATA_AUTO, part, fraction, T, error), "%s", error);
    return data;
}

static void expect_not_opened(Test* test, const char* path, DatasetPart part, double fraction, int T, const char* why) {
    Dataset data;
    expect_refused(dataset_open(&data, path, DATA_AUTO, part, fraction, T, error), error, why);
    expect(data.file == NULL && data.files == 0, "the dataset is left half open");
}

// Reads the first `count` sequences from `first` on, T+1 tokens each, through batches of B.
static void stream(Test* test, const Dataset* data, int B, int T, bool shuffle, int64_t first, int64_t count, int* out,
                   LoaderSlice slice = {0, 0}) {
    Loader* loader = loader_open(data, B, T, 1337, shuffle, first, slice, malloc, free, error);
    expect(loader, "%s", error);
    for (int64_t done = 0; loader && done < count; done += B) {
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
    const Dataset data = open_data(test, joined(folder, "train.bin"), DATASET_WHOLE, 0, T);
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
    for (int B : {1, 2, 4, 8, 64}) {
        memset(got, 0xFF, sizeof(got));
        stream(test, &data, B, T, true, 0, SEQUENCES, got);
        expect(memcmp(got, want, sizeof(got)) == 0, "B = %d", B);
    }
    for (int first : {1, 5, 36, 37, 38, 74}) {
        int count = SEQUENCES - first;
        memset(got, 0xFF, sizeof(got));
        stream(test, &data, 4, T, true, first, count, got);
        size_t bytes = (size_t)(count * (T + 1)) * sizeof(int);
        expect(memcmp(got, want + first * (T + 1), bytes) == 0, "resumed at %d", first);
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

// A batch keeps its contents through the next call, while the thread fills the buffers ahead.
TEST(data_loader_two_batches_in_use) {
    enum { T = 64, B = 16, N = B * T };
    static char text[100000];
    uint64_t state = 4;
    for (char& c : text) c = (char)random_next(&state);
    Dataset data;
    expect(dataset_open_memory(&data, text, sizeof(text), DATASET_WHOLE, 0, T, error), "%s", error);
    Loader* loader = loader_open(&data, B, T, 1, true, 0, {0, 0}, malloc, free, error);
    expect(loader, "%s", error);
    static int kept[N];
    const Batch* last = NULL;
    for (int i = 0; i < 300; i++) {
        const Batch* batch = loader_next(loader, error);
        if (i % 50 == 0) usleep(3000);
        if (last) expect(memcmp(last->tokens, kept, sizeof(kept)) == 0, "batch %d changed", i - 1);
        memcpy(kept, batch->tokens, sizeof(kept));
        last = batch;
    }
    loader_close(loader);
    // It can be closed at once, with the thread at work, and with a thread that waits.
    for (int i = 0; i < 20; i++) {
        loader = loader_open(&data, B, T, 1, true, 0, {0, 0}, malloc, free, error);
        if (i % 2) usleep(500);
        loader_close(loader);
    }
}

static int identity(int64_t i) {
    return (int)i;
}

DATA_TEST(data_loader_buckets) {
    enum { T = 32, B = 8, N = B * T };
    put_shard(joined(folder, "x.bin"), 0, 10000, [](int64_t i) { return i % 3 ? (int)(i * i % 50257) : 50256; });
    const Dataset data = open_data(test, joined(folder, "x.bin"), DATASET_WHOLE, 0, T);
    Loader* loader = loader_open(&data, B, T, 1, true, 0, {0, 0}, malloc, free, error);
    expect(loader, "%s", error);
    for (int i = 0; loader && i < 20; i++) {
        const Batch* batch = loader_next(loader, error);
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
}

// The parts of one file share no token, and together they are the file.
DATA_TEST(data_loader_split) {
    enum { T = 10 };
    const char* path = joined(folder, "x.bin");
    put_shard(path, 0, 1000, identity);
    Dataset train = open_data(test, path, DATASET_TRAIN, 0.1, T);
    Dataset validation = open_data(test, path, DATASET_VALIDATION, 0.1, T);
    expect(train.tokens == 900 && validation.tokens == 100, "%lld and %lld", (long long)train.tokens,
           (long long)validation.tokens);
    int tokens[T], targets[T], largest = -1, least = 1 << 20;
    for (int64_t w = 0; w < dataset_windows(&train, T); w++) {
        dataset_window(&train, T, w, tokens, targets, error);
        if (targets[T - 1] > largest) largest = targets[T - 1];
    }
    for (int64_t w = 0; w < dataset_windows(&validation, T); w++) {
        dataset_window(&validation, T, w, tokens, targets, error);
        if (tokens[0] < least) least = tokens[0];
    }
    expect(largest < least && least == 900 && largest == 890, "training to %d, validation from %d", largest, least);
    dataset_close(&train), dataset_close(&validation);
    // A fraction below a window is raised to one; the smallest file that can be split.
    validation = open_data(test, path, DATASET_VALIDATION, 1e-6, T);
    expect(validation.tokens == T + 1 && dataset_windows(&validation, T) == 1, "%lld", (long long)validation.tokens);
    char text[64] = "0123456789012345678901234567890";
    expect(dataset_open_memory(&train, text, 2 * T + 2, DATASET_TRAIN, 0.1, T, error), "%s", error);
    expect(train.tokens == T + 1 && train.vocabulary == 256, "%lld", (long long)train.tokens);
    expect_refused(dataset_open_memory(&train, text, 2 * T + 1, DATASET_TRAIN, 0.1, T, error), error, "too few");
    expect_refused(dataset_open_memory(&train, text, T, DATASET_WHOLE, 0, T, error), error,
                   "a window of T = 10 needs 11");
    // The last target needs a token of its own: 30 bytes make 2 windows of 10 and not 3.
    text[5] = '\xFF';
    expect(dataset_open_memory(&train, text, 30, DATASET_WHOLE, 0, T, error), "%s", error);
    expect(train.bytes && train.bytes_per_token == 1.0 && dataset_windows(&train, T) == 2, "windows of bytes");
    expect(dataset_window(&train, T, 0, tokens, targets, error) && tokens[5] == 255 && targets[4] == 255, "%s", error);
}

// Opens what the pattern names in a folder, and expects the first token of every window, which tells which files were
// taken and in which order, or a refusal.
static void expect_opens(Test* test, const char* folder, const char* pattern, DatasetPart part, const char* want) {
    Dataset data;
    const char* path = *pattern ? joined(folder, pattern) : folder;
    const bool opened = dataset_open(&data, path, DATA_AUTO, part, 0.25, 10, error);
    const char* firsts = printed([&](FILE* file) {
        int tokens[10], targets[10];
        for (int64_t w = 0; opened && w < dataset_windows(&data, 10); w++)
            fprintf(file, "%s%d", w ? " " : "", dataset_window(&data, 10, w, tokens, targets, error) ? tokens[0] : -1);
    });
    expect(opened ? strcmp(firsts, want) == 0 : data.file == NULL && strstr(error, want) != NULL, "%s: '%s', want '%s'",
           pattern, opened ? firsts : error, want);
}

DATA_TEST(data_loader_glob) {
    const auto shard = [&](const char* name, int first, int tokens) {
        put_shard(joined(folder, name), first, tokens, identity);
    };
    shard("c_train_1.bin", 100, 25), shard("c_train_0.bin", 0, 31), shard("c_train_2.bin", 200, 41);
    const char* all = "0 10 20 100 110 200 210 220 230";
    expect_opens(test, folder, "c_train_*.bin", DATASET_WHOLE, all);
    // A quarter of the first shard is 7.75 tokens, less than a window, which the second gives with its 6.25.
    expect_opens(test, folder, "c_train_*.bin", DATASET_TRAIN, "0 10 20 100 200 210 220 230");
    expect_opens(test, folder, "c_train_*.bin", DATASET_VALIDATION, "111");
    expect_opens(test, folder, "none*", DATASET_TRAIN, "no file matches");
    put_text(joined(folder, "c_train_3.txt"), "some text, long enough for a window");
    expect_opens(test, folder, "c_train_*", DATASET_WHOLE, "name one kind");
    put_text(joined(folder, "d.txt"), "some more text, long enough for a window");
    expect_opens(test, folder, "*.txt", DATASET_WHOLE, "115 32 103 115 116 32");
}

DATA_TEST(data_loader_folder) {
    put_text(joined(folder, "notes.txt"), "notes");
    expect_opens(test, folder, "", DATASET_TRAIN, "holds no train_*.bin");
    put_shard(joined(folder, "val_000000.bin"), 300, 21, identity);
    expect_opens(test, folder, "", DATASET_TRAIN, "no train_*.bin to train on");
    put_shard(joined(folder, "train_000000.bin"), 0, 31, identity);
    put_shard(joined(folder, "train_000001.bin"), 100, 25, identity);
    expect_opens(test, folder, "", DATASET_TRAIN, "0 10 20 100 110");
    expect_opens(test, folder, "", DATASET_VALIDATION, "300 310");
    expect_opens(test, folder, "", DATASET_WHOLE, "0 10 20 100 110 300 310");
    Dataset data = open_data(test, folder, DATASET_TRAIN, 0.1, 10);
    expect(data.vocabulary == 50257 && data.bytes_per_token == 0 && !data.tokenizer[0], "without meta.json");
    put_text(joined(folder, "meta.json"), "{\"vocabulary\": 320, \"tokenizer\": \"gpt2\"}");
    put_text(joined(folder, "vocab.json"), "{}");
    for (const char* path : {folder, joined(folder, "train_*.bin"), joined(folder, "val_000000.bin")}) {
        for (DatasetPart part : {DATASET_TRAIN, DATASET_VALIDATION, DATASET_WHOLE}) {
            if (path != folder && part != DATASET_WHOLE) continue;
            data = open_data(test, path, part, 0.1, 10);
            expect(data.vocabulary == 320 && data.bytes_per_token == 0, "%s: %g", path, data.bytes_per_token);
            expect(strcmp(data.tokenizer, folder) == 0, "tokenizer %s", data.tokenizer);
        }
    }
}

DATA_TEST(data_loader_bad_files) {
    enum { T = 10 };
    Dataset data;
    const char* path = joined(folder, "x.bin");
    const std::tuple<int, int, int, int, const char*> headers[] = {
        {100, -1, 20240522, 1, "a file of llm.c, but no shard of 16-bit tokens"},
        {100, -1, 20240326, 1, "(its first number is 20240326); name those or a text"},
        {100, -1, 20240801, 7, "a file of llm.c, but no shard of 16-bit tokens"},
        {100, -1, 20240520, 2, "version 2 and version 1 can be read"},
        {100, 101, 20240520, 1, "truncated: its header says 101 tokens, which make 1226 bytes, and it has 1224"},
        {100, 99, 20240520, 1, "corrupted: its header says 99 tokens"},
        {100, 2000000000, 20240520, 1, "truncated"},
        {T, -1, 20240520, 1, "a window of T = 10 needs 11"},
        {0, -1, 20240520, 1, "has at most 0 tokens"}};
    const char* const texts[][2] = {
        {"", "is empty"},
        {"ab", "not a shard of tokens"},
        {"Once upon a time there was a text in a file called .bin", "or type --data-format bytes to train"}};
    auto refused = [&](const char* why) {
        expect_refused(dataset_open(&data, path, DATA_AUTO, DATASET_WHOLE, 0.1, T, error), error, why);
        expect(strstr(error, "x.bin"), "%s does not name the file", error);
        expect(data.file == NULL && data.files == 0, "the dataset is left half open");
    };
    refused("No such file");
    for (const auto& [text, why] : texts) {
        put_text(path, text);
        refused(why);
    }
    for (const auto& [tokens, claimed, magic, version, why] : headers) {
        put_shard(path, 0, tokens, token_of, claimed, magic, version);
        refused(why);
    }
    put_shard(path, 0, 100, token_of);
    for (int length : {1023, 600, 12, 8, 7, 4}) {
        expect(truncate(path, length) == 0, "%s", strerror(errno));
        refused("truncated");
    }
    path = joined(folder, "x.bin/y");
    refused("Not a directory");
    expect_not_opened(test, "/dev/null", DATASET_WHOLE, 0.1, T, "not a regular file");
    static char longest[5000];
    memset(longest, 'a', 4999);
    expect_not_opened(test, longest, DATASET_WHOLE, 0.1, T, "over 4000 characters");
    // A name of any length must fit the sentence's buffer.
    longest[3999] = 0;
    expect_not_opened(test, longest, DATASET_WHOLE, 0.1, T, "cannot open aaa");
}

DATA_TEST(data_loader_token_above_vocabulary) {
    enum { T = 10 };
    put_shard(joined(folder, "x.bin"), 0, 101, [](int64_t i) { return i == 70 ? 50257 : (int)i; });
    put_shard(joined(folder, "y.bin"), 0, 31, [](int64_t i) { return i == 30 ? 65535 : 50256; });
    const Dataset data = open_data(test, joined(folder, "?.bin"), DATASET_WHOLE, 0, T);
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
    Loader* loader = loader_open(&data, 2, T, 1, false, 0, {0, 0}, malloc, free, error);
    for (int i = 0; i < 3; i++) expect(loader_next(loader, error), "batch %d: %s", i, error);
    for (int i = 0; i < 3; i++) expect_refused(loader_next(loader, error), error, wanted);
    loader_close(loader);
}

// Files may be over 2 GiB: of a shard and of bytes, both sparse, the last window holds what was written there.
DATA_TEST(data_loader_over_2_gib) {
    enum { T = 64 };
    const int64_t tokens = 64 * (20ll << 20) + 1;  // 1.34e9 tokens, 2.5 GiB
    const char* names[] = {"x.bin", "x.dat"};
    for (int bytes = 0; bytes < 2; bytes++) {
        const char* path = joined(folder, names[bytes]);
        int width = bytes ? 1 : 2;
        int64_t count = bytes ? 2 * tokens - 1 : tokens, start = bytes ? 0 : 1024, size = start + count * width;
        int descriptor = open(path, O_RDWR | O_CREAT, 0600);
        int32_t header[3] = {20240520, 1, (int32_t)tokens};
        unsigned char last[(T + 1) * 2];
        for (int i = 0; i < (T + 1) * 2; i++) last[i] = (unsigned char)(i % 2 && !bytes ? 1 : i + 3);
        bool fine = ftruncate(descriptor, size) == 0 && (bytes || pwrite(descriptor, header, 12, 0) == 12);
        fine = fine && pwrite(descriptor, last, (size_t)((T + 1) * width), size - (T + 1) * width) == (T + 1) * width;
        close(descriptor);
        if (!fine) skip("no sparse files of 2.5 GiB here: %s", strerror(errno));
        Dataset data;
        const DataFormat format = bytes ? DATA_BYTES : DATA_AUTO;  // zeros are no text
        expect(dataset_open(&data, path, format, DATASET_WHOLE, 0, T, error), "%s", error);
        int64_t windows = dataset_windows(&data, T);
        expect(data.tokens == count && windows == (count - 1) / T, "%lld tokens", (long long)data.tokens);
        int in_window[T], targets[T];
        expect(dataset_window(&data, T, windows - 1, in_window, targets, error), "%s", error);
        for (int t = 0; t <= T; t++) {
            int want = bytes ? last[t] : last[2 * t] | last[2 * t + 1] << 8,
                got = t < T ? in_window[t] : targets[T - 1];
            expect(got == want, "%s: position %d is %d, not %d", names[bytes], t, got, want);
        }
        expect(dataset_window(&data, T, windows / 2, in_window, targets, error) && in_window[0] == 0, "the middle");
        dataset_close(&data);
        expect(dataset_open(&data, path, format, DATASET_VALIDATION, 0.001, T, error), "%s", error);
        expect(data.tokens == (int64_t)(0.001 * (double)count), "%lld", (long long)data.tokens);
        windows = dataset_windows(&data, T);
        expect(dataset_window(&data, T, windows - 1, in_window, targets, error), "%s", error);
        dataset_close(&data);
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
