// The data loader: which files, which windows of them, in which order, read ahead.
//
// Files are never read as a whole: a window is a read of T+1 tokens, widened to int32. The order needs no table
// (shuffle_index), so an epoch over any number of windows starts at once and a resume is an addition. Of the ring of
// RING batches the caller holds two, and a thread prepares the third.
// With each batch comes the order of its positions by token (a counting sort, about 1 ms for 65,536 tokens): the
// embedding's backward pass sums each row's gradients from it in a fixed order, without atomics.
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "json.h"
#include "loader.h"
#include "options.h"
#include "signals.h"
#include "text.h"
#include "tokenizer.h"

enum {
    SHARD_MAGIC = 20240520,
    SHARD_VERSION = 1,
    SHARD_HEADER = 1024,  // bytes: 256 int32
    GPT2_VOCABULARY = 50257,
    MAX_VOCABULARY = 65536,  // tokens are uint16
    RING = 3
};

typedef struct DatasetFile {
    const char* path;
    int descriptor;  // or -1
    int64_t begin;   // where its tokens begin, in bytes
    int64_t first;   // where the part that was opened begins, in tokens
    int64_t tokens;  // of that part
    int64_t share;   // tokens at the end of the file that are validation data
    int width;       // bytes of a token
} DatasetFile;

// Returns the pattern that one name alone matches; the caller frees it.
static char* literal(const char* name) {
    char *pattern = memory_take(2 * strlen(name) + 1), *to = pattern;
    for (; *name; *to++ = *name++) {
        if (strchr("*?[\\", *name)) *to++ = '\\';
    }
    *to = 0;
    return pattern;
}

// Lists the names that match a pattern, sorted by bytes, since the order is part of what defines a run.
static bool list_matches(glob_t* list, const char* pattern, char* error) {
    globfree(list);
    const int status = glob(pattern, 0, NULL, list);
    return status == 0 || status == GLOB_NOMATCH ||
           data_error(error, "cannot look for %s: %s", pattern, strerror(errno));
}

// Lists the files of a part of what the user named. Sets `split` if the validation part is the end of each.
static bool find_files(glob_t* list, bool* split, const char* path, DatasetPart part, char* error) {
    const bool folder = folder_exists(path), there = access(path, F_OK) == 0;
    if (!there && !strpbrk(path, "*?[")) {
        return data_error(error, "cannot open %s: %s; name a file, a folder of shards or a pattern in quotes", path,
                          strerror(errno));
    }
    SCOPED char* name = there ? literal(path) : text_copy(path);
    if (!list_matches(list, folder ? text_kept("%s/val_*.bin", name) : name, error)) return false;
    const bool validation = folder && list->gl_pathc > 0;
    *split = part != DATASET_WHOLE && !validation;
    const bool training = folder && !(validation && part == DATASET_VALIDATION);
    if (training && !list_matches(list, text_kept("%s/train_*.bin", name), error)) return false;
    if (list->gl_pathc > 0) return true;
    if (!folder) return data_error(error, "no file matches %s; name files that are there", path);
    if (file_exists(path_in(path, "train.bin"))) {
        return data_error(error,
                          "the folder %s is nanoGPT's; type make venv && .venv/bin/python data/prepare.py "
                          "--from-nanogpt %s --out DIR, and --data DIR here",
                          path, shell_word(path));
    }
    return data_error(error,
                      "the folder %s holds no train_*.bin to train on; prepare it with data/prepare.py, or name its "
                      "files, such as \"%s/*.bin\"",
                      path, path);
}

// Opens a file and finds its tokens.
static bool tokens_open(DatasetFile* file, const char* path, DataFormat format, char* error) {
    int32_t header[3] = {0, 0, 0};  // magic, version, tokens
    int64_t size;
    file->path = text_kept("%s", path);
    file->descriptor = file_open(path, &size, error);
    if (file->descriptor < 0) return data_error(error, "%s; name files with text or tokens in them", error);
    if (size == 0) return data_error(error, "%s is empty; name a file with text or tokens in it", path);
    if (!file_read_at(file->descriptor, path, header, 0, size < 12 ? size : 12, error)) return false;
    const bool shard = header[0] == SHARD_MAGIC;
    file->tokens = shard ? (uint32_t)header[2] : size;
    file->begin = shard ? SHARD_HEADER : 0, file->width = shard ? 2 : 1;
    if (shard && format == DATA_BYTES) {
        return data_error(error, "%s is a shard of tokens, not bytes; leave --data-format out", path);
    }
    const int64_t expected = file->begin + file->tokens * file->width;
    if (shard && (header[1] != SHARD_VERSION || size != expected)) {
        return data_error(error,
                          "%s is no whole shard: it has version %d and %lld bytes, and a shard of its %lld tokens has "
                          "version %d and %lld bytes; prepare it again",
                          path, header[1], (long long)size, (long long)file->tokens, SHARD_VERSION,
                          (long long)expected);
    }
    if (shard || format == DATA_BYTES) return true;
    if (!content_is_text(file->descriptor, size, path, error)) return false;
    return !text_ends(path, ".bin") ||
           data_error(error,
                      "%s is not a shard of tokens (its first number is %d, a shard's is %d); prepare it again, or "
                      "type --data-format bytes to train on it as a text",
                      path, header[0], SHARD_MAGIC);
}

// Opens files, which must be of one kind.
static bool open_files(Dataset* data, char** paths, size_t count, DataFormat format, char* error) {
    data->file = memory_zero(count, sizeof(DatasetFile));
    for (size_t i = 0; i < count; i++) {
        DatasetFile* file = &data->file[data->files++];
        if (!tokens_open(file, paths[i], format, error)) return false;
        if (file->width == data->file->width) continue;
        const bool shard = file->width == 2;
        return data_error(error, "%s stands for shards of tokens (%s) and other files (%s); name one kind", data->path,
                          paths[shard ? i : 0], paths[shard ? 0 : i]);
    }
    return true;
}

// Takes the vocabulary of a shard's folder, which must be that of the shards before it: as many tokens, and no number
// with two texts. It is that of meta.json, GPT-2's without one.
static bool take_vocabulary(Dataset* data, const char* folder, char* error) {
    const char *path = path_there(folder, "meta.json"), *tokenizer = tokenizer_exists(folder) ? folder : "";
    JSON_SCOPED Json* meta = path ? json_read(path, error) : NULL;
    if (path && !meta) return data_error(error, "%s; prepare the folder again", error);
    const int64_t found = json_get(meta, "vocabulary") ? json_int(meta, "vocabulary", -1) : GPT2_VOCABULARY;
    if (found < 1 || found > MAX_VOCABULARY) {
        return data_error(error, "%s gives no vocabulary between 1 and %d; prepare the folder again", path,
                          MAX_VOCABULARY);
    }
    const bool same = found == data->vocabulary && tokenizers_agree(tokenizer, data->tokenizer);
    if (data->vocabulary > 0 && !same) {
        return data_error(error,
                          "%s has another vocabulary (of %lld tokens) than %s (of %d); prepare both with one "
                          "--tokenizer",
                          folder, (long long)found, path_parent(data->file->path), data->vocabulary);
    }
    data->vocabulary = (int)found;
    if (!*data->tokenizer) data->tokenizer = tokenizer;
    return true;
}

// Keeps a part of each file, and of the files those with a window; it counts the others, but for those without
// validation data. With `split` the validation data is the end of each file, in all `fraction` of the tokens. A file
// whose share is below a window passes it on to the next. If no share is a window, the last file with two windows gives
// one.
static bool take_part(Dataset* data, DatasetPart part, bool split, double fraction, int T, char* error) {
    const int64_t window = (int64_t)T + 1, least = split ? 2 * window : window;
    const int files = data->files;
    const bool ends = split && part == DATASET_VALIDATION;
    DatasetFile* last = NULL;  // of those with `least` tokens
    int64_t longest = 0;
    double owed = 0.0;
    bool shared = false;
    for (DatasetFile* file = data->file; file < data->file + files; file++) {
        owed += fraction * (double)file->tokens;
        if (file->tokens > longest) longest = file->tokens;
        if (file->tokens >= least) last = file;
        if (!split || file->tokens < least || owed < (double)window) continue;
        file->share = (int64_t)owed < file->tokens - window ? (int64_t)owed : file->tokens - window;
        owed -= (double)file->share, shared = true;
    }
    if (!last) {
        return data_error(error,
                          "%s has at most %lld tokens in each of %d files: too few for %s of %lld tokens; take more "
                          "text or a shorter sequence length",
                          data->path, (long long)longest, files,
                          split ? "two windows (training, validation)" : "a window", (long long)window);
    }
    if (split && !shared) last->share = window;
    data->files = 0;
    for (int i = 0; i < files; i++) {
        DatasetFile file = data->file[i];
        file.first = ends ? file.tokens - file.share : 0;
        file.tokens = ends ? file.share : file.tokens - file.share;
        if (file.tokens >= window) {
            data->file[data->files++] = file, data->tokens += file.tokens;
            continue;
        }
        if (!ends) data->left_out++, data->left_out_tokens += file.tokens;
        close(file.descriptor);
    }
    data->mixed = ends && data->files > 1;
    return true;
}

// Takes the part of the files that were opened; closes them if that fails or `ok` is false.
static bool open_end(Dataset* data, bool ok, DatasetPart part, bool split, double fraction, int T, char* error) {
    data->bytes = ok && data->file->width == 1;
    ok = ok && take_part(data, part, split, fraction, T, error);
    for (int i = 0; ok && !data->bytes && i < data->files; i++) {
        const char* folder = path_parent(data->file[i].path);
        const bool seen = i > 0 && strcmp(folder, path_parent(data->file[i - 1].path)) == 0;
        ok = seen || take_vocabulary(data, folder, error);
    }
    if (data->bytes) data->vocabulary = 256, data->bytes_per_token = 1.0;
    if (!ok) dataset_close(data);
    return ok;
}

bool dataset_open(Dataset* data, const char* path, DataFormat format, DatasetPart part, double fraction, int T,
                  char* error) {
    __attribute__((cleanup(globfree))) glob_t list = {0};
    bool split = false;
    *data = (Dataset){.path = path, .tokenizer = ""};
    const bool ok =
        find_files(&list, &split, path, part, error) && open_files(data, list.gl_pathv, list.gl_pathc, format, error);
    return open_end(data, ok, part, split, fraction, T, error);
}

bool dataset_open_memory(Dataset* data, const void* text, int64_t bytes, DatasetPart part, double fraction, int T,
                         char* error) {
    *data = (Dataset){.path = "the built-in text", .tokenizer = "", .files = 1};
    data->file = memory_zero(1, sizeof(DatasetFile));
    *data->file = (DatasetFile){data->path, memfd_create(data->path, MFD_CLOEXEC), 0, 0, bytes, 0, 1};
    const bool ok = file_write_all(data->file->descriptor, data->path, text, bytes, error);
    return open_end(data, ok, part, part != DATASET_WHOLE, fraction, T, error);
}

// The default data is this repository's source text, which is linked in. Weak symbols let data/ do without it in tests.
extern const char corpus_begin[] __attribute__((weak)), corpus_end[] __attribute__((weak));

// Opens the training or the validation part.
static bool open_part(Dataset* data, const Options* o, DatasetPart part, int T, char* error) {
    const bool val = part == DATASET_VALIDATION && *o->val;
    const char* path = val ? o->val : o->data;
    const DataFormat format = strcmp(o->data_format, "bytes") == 0 ? DATA_BYTES : DATA_AUTO;
    if (!*path) {
        return dataset_open_memory(data, corpus_begin, corpus_end - corpus_begin, part, o->val_fraction, T, error);
    }
    // A folder has its own parts; a file that --data or --val names beside the other is used whole.
    if ((val || (part == DATASET_TRAIN && *o->val)) && !folder_exists(path)) part = DATASET_WHOLE;
    return dataset_open(data, path, format, part, o->val_fraction, T, error) ||
           data_error(error, "%s %s: %s", val ? "--val" : "--data", path, error);
}

bool dataset_open_both(Dataset* train, Dataset* val, const Options* o, int T, char* error) {
    if (!open_part(train, o, DATASET_TRAIN, T, error)) return false;
    if (!open_part(val, o, DATASET_VALIDATION, T, error)) return false;
    if (val->bytes != train->bytes) {
        return data_error(error, "--val %s is %s and --data %s; prepare both alike", o->val,
                          val->bytes ? "read as bytes" : "tokens", train->bytes ? "is read as bytes" : "tokens");
    }
    return val->bytes || take_vocabulary(train, path_parent(val->file->path), error);
}

bool dataset_look(const Options* o, int* vocabulary, bool* bytes, char* error) {
    Dataset data;
    if (!open_part(&data, o, DATASET_TRAIN, 1, error)) return false;
    *vocabulary = data.vocabulary, *bytes = data.bytes;
    dataset_close(&data);
    return true;
}

void dataset_close(Dataset* data) {
    for (int i = 0; i < data->files; i++) close(data->file[i].descriptor);
    free(data->file);
    *data = (Dataset){.path = "", .tokenizer = ""};
}

bool dataset_fingerprint(Dataset* data, char* error) {
    enum { BLOCK = 4096, BLOCKS = 64 };
    const bool whole = data->tokens * (data->bytes ? 1 : 2) <= 256 << 20;
    char block[BLOCK];
    data->crc = 0;
    for (int i = 0; i < data->files; i++) {
        const DatasetFile* file = &data->file[i];
        const int64_t bytes = file->tokens * file->width, first = file->begin + file->first * file->width;
        const bool all = whole || bytes <= BLOCK * BLOCKS;
        data->crc = crc32c(data->crc, &bytes, sizeof(bytes));
        for (int64_t n = 0; all ? n * BLOCK < bytes : n < BLOCKS; n++) {
            const int64_t at = all ? n * BLOCK : (bytes - BLOCK) * n / (BLOCKS - 1), left = bytes - at;
            const int64_t size = left < BLOCK ? left : BLOCK;
            if (!file_read_at(file->descriptor, file->path, block, first + at, size, error)) return false;
            data->crc = crc32c(data->crc, block, size);
        }
    }
    return true;
}

bool dataset_overlap(const Dataset* a, const Dataset* b) {
    for (int64_t i = 0; i < (int64_t)a->files * b->files; i++) {
        const DatasetFile *one = &a->file[i / b->files], *other = &b->file[i % b->files];
        struct stat status[2];
        if (one->first >= other->first + other->tokens || other->first >= one->first + one->tokens) continue;
        if (fstat(one->descriptor, &status[0]) != 0 || fstat(other->descriptor, &status[1]) != 0) continue;
        if (status[0].st_dev == status[1].st_dev && status[0].st_ino == status[1].st_ino) return true;
    }
    return false;
}

int64_t dataset_windows(const Dataset* data, int T) {
    int64_t windows = 0;
    for (int i = 0; i < data->files; i++) windows += (data->file[i].tokens - 1) / T;
    return windows;
}

int64_t dataset_windows_of(const Dataset* data, int T, int64_t tokens) {
    int64_t windows = dataset_windows(data, T), max = tokens / T > 0 ? tokens / T : 1;
    return max < windows ? max : windows;
}

bool dataset_window(const Dataset* data, int T, int64_t window, int* tokens, int* targets, char* error) {
    int64_t within = window;
    const DatasetFile* file = data->file;
    const DatasetFile* end = data->file + data->files;
    while (file < end && within >= (file->tokens - 1) / T) within -= (file++->tokens - 1) / T;
    assert(window >= 0 && file < end);
    int64_t first = file->first + within * T;
    int last = 0, width = data->bytes ? 1 : 2;
    const int64_t at = file->begin + first * width, bytes = (int64_t)(T + 1) * width;
    // The stored tokens, T + 1 of one or two bytes, are read into the memory of the targets. Files are not mapped: one
    // that is cut short would then end the process by a signal, while a short read is an error.
    if (!file_read_at(file->descriptor, file->path, targets, at, bytes, error)) return false;
    for (int t = 0; t <= T; t++) {
        uint16_t token = 0;
        memcpy(&token, (const char*)targets + (int64_t)t * width, (size_t)width);
        if (token >= data->vocabulary) {
            return data_error(error,
                              "%s holds token %d at position %lld and the vocabulary has %d tokens; prepare it with "
                              "the tokenizer that its vocabulary belongs to",
                              file->path, token, (long long)(first + t), data->vocabulary);
        }
        if (t < T) tokens[t] = token;
        last = token;
    }
    memcpy(targets, tokens + 1, (size_t)(T - 1) * sizeof(int));
    targets[T - 1] = last;
    return true;
}

// The window that comes at place `n` where nothing is shuffled: of a mixed data set, one drawn from all files.
static int64_t window_in_order(const Dataset* data, int64_t n, int64_t windows) {
    return data->mixed ? shuffle_index(0, 0, n % windows, windows) : n % windows;
}

bool dataset_count_bytes(Dataset* data, int T, int64_t tokens, char* error) {
    const int64_t windows = dataset_windows(data, T), read = dataset_windows_of(data, T, tokens);
    char ignored[DATA_ERROR_BYTES];
    Tokenizer* tokenizer = *data->tokenizer ? tokenizer_open(data->tokenizer, ignored) : NULL;
    SCOPED int* window = memory_take(2 * (size_t)T * sizeof(int));
    int* targets = window + T;
    double bytes = 0.0;
    bool ok = true;
    for (int64_t n = 0; ok && tokenizer && n < read; n++) {
        ok = dataset_window(data, T, window_in_order(data, n, windows), window, targets, error);
        for (int t = 0, length = 0; ok && t < T; t++) {
            if (targets[t] == tokenizer_end(tokenizer)) continue;
            tokenizer_decode(tokenizer, targets[t], &length);
            bytes += length;
        }
    }
    if (tokenizer) data->bytes_per_token = bytes / ((double)read * T);
    tokenizer_close(tokenizer);
    return ok;
}

// Six Feistel rounds over the smallest even number of bits that holds n permute 0..4^half-1. Repeated until the result
// is below n, they permute 0..n-1; since 4^half < 4n, that takes at most 4 turns on average.
int64_t shuffle_index(uint64_t seed, int64_t epoch, int64_t i, int64_t n) {
    enum { ROUNDS = 6 };
    const uint64_t golden = 0x9E3779B97F4A7C15ull;
    if (n < 2) return 0;
    int half = 1;
    while (half < 31 && (int64_t)1 << 2 * half < n) half++;
    uint64_t key = bits_mix(bits_mix(seed + golden) + (uint64_t)epoch * golden), mask = ((uint64_t)1 << half) - 1;
    uint64_t value = (uint64_t)i;
    do {
        uint64_t left = value >> half, right = value & mask;
        for (int round = 0; round < ROUNDS; round++) {
            uint64_t next = left ^ (bits_mix(right ^ bits_mix(key + (uint64_t)round * golden)) & mask);
            left = right;
            right = next;
        }
        value = left << half | right;
    } while (value >= (uint64_t)n);
    return (int64_t)value;
}

struct Loader {
    const Dataset* data;
    int B, T;
    uint64_t seed;
    bool shuffle;
    int64_t windows;
    int64_t first;  // sequence
    int64_t read;   // sequences that were read
    LoaderSlice slice;
    Batch batch[RING];
    int* memory;  // of all batches
    int* count;   // (vocabulary) of the counting sort
    void (*pinned_free)(void*);
    int64_t given;                 // batches that the caller took
    pthread_t thread;              // prepares the next one
    bool thread_runs;              // it has to be joined
    bool fails;                    // the next one cannot be read
    char error[DATA_ERROR_BYTES];  // why
};

// Sorts positions 0..n-1 by token, stably, and lists where each token's run begins.
static void batch_sort(Batch* batch, int n, int vocabulary, int* count) {
    memset(count, 0, (size_t)vocabulary * sizeof(int));
    for (int i = 0; i < n; i++) count[batch->tokens[i]]++;
    int first = 0, buckets = 0;
    for (int token = 0; token < vocabulary; token++) {
        int size = count[token];
        if (size == 0) continue;
        batch->bucket[2 * buckets] = token;
        batch->bucket[2 * buckets + 1] = first;
        buckets++;
        count[token] = first;
        first += size;
    }
    batch->bucket[2 * buckets] = -1;
    batch->bucket[2 * buckets + 1] = n;
    batch->buckets = buckets;
    for (int i = 0; i < n; i++) batch->order[count[batch->tokens[i]]++] = i;
}

static bool batch_prepare(Loader* loader, Batch* batch, char* error) {
    int B = loader->B, T = loader->T;
    for (int b = 0; b < B; b++) {
        const int64_t i = loader->read++, run = loader->slice.run, windows = loader->windows;
        const int64_t n = loader->first + (run == 0 ? i : i / run * loader->slice.stride + i % run);
        const int64_t window = loader->shuffle ? shuffle_index(loader->seed, n / windows, n % windows, windows)
                                               : window_in_order(loader->data, n, windows);
        int* tokens = batch->tokens + (int64_t)b * T;
        int* targets = batch->targets + (int64_t)b * T;
        if (!dataset_window(loader->data, T, window, tokens, targets, error)) return false;
    }
    batch_sort(batch, B * T, loader->data->vocabulary, loader->count);
    return true;
}

static void* loader_prepare(void* argument) {
    Loader* loader = argument;
    loader->fails = !batch_prepare(loader, &loader->batch[loader->given % RING], loader->error);
    return NULL;
}

// Prepares the next batch ahead, or at once where the system gives no thread.
static void loader_begin(Loader* loader) {
    loader->thread_runs = signals_thread(&loader->thread, loader_prepare, loader) == 0;
    if (!loader->thread_runs) loader_prepare(loader);
}

static void loader_wait(Loader* loader) {
    if (loader->thread_runs) pthread_join(loader->thread, NULL);
    loader->thread_runs = false;
}

// One allocation for all batches: tokens, targets, order and bucket of each.
static void loader_memory(Loader* loader, void* (*pinned_alloc)(size_t)) {
    int64_t n = (int64_t)loader->B * loader->T;
    int64_t rows = (n < loader->data->vocabulary ? n : loader->data->vocabulary) + 1;
    int64_t each = (3 * n + 2 * rows + 63) / 64 * 64;
    loader->memory = pinned_alloc((size_t)(RING * each) * sizeof(int));
    loader->count = memory_take((size_t)loader->data->vocabulary * sizeof(int));
    for (int i = 0; i < RING; i++) loader->batch[i] = batch_at(loader->memory + i * each, n);
}

Loader* loader_open(const Dataset* data, int B, int T, uint64_t seed, bool shuffle, int64_t first_sequence,
                    LoaderSlice slice, void* (*pinned_alloc)(size_t), void (*pinned_free)(void*)) {
    int64_t windows = T > 0 ? dataset_windows(data, T) : 0;
    assert(windows > 0 && B > 0 && (int64_t)B * T <= INT32_MAX && first_sequence >= 0 && slice.stride >= slice.run);
    Loader* loader = memory_zero(1, sizeof(Loader));
    loader->data = data, loader->B = B, loader->T = T, loader->windows = windows;
    loader->seed = seed, loader->shuffle = shuffle, loader->first = first_sequence, loader->slice = slice;
    loader->pinned_free = pinned_free;
    loader_memory(loader, pinned_alloc);
    loader_begin(loader);
    return loader;
}

const Batch* loader_next(Loader* loader, char* error) {
    loader_wait(loader);
    if (loader->fails) return data_error(error, "%s", loader->error), NULL;
    const Batch* batch = &loader->batch[loader->given++ % RING];
    loader_begin(loader);
    return batch;
}

void loader_close(Loader* loader) {
    loader_wait(loader);
    loader->pinned_free(loader->memory);
    free(loader->count), free(loader);
}
