// The data loader reads windows of T+1 tokens from files, in an order that depends on (seed, epoch) alone.
//
// Sources: llm.c's .bin shards (256 int32 header: magic 20240520, version 1, token count; uint16 tokens), one or a
// glob of them, a folder that data/prepare.py wrote, or any other file, read as bytes (vocabulary 256).
// A file is cut into windows of T tokens at multiples of T; the token after a window is its last target. A tail that
// does not fill a window is left out. Sequence n of a run is window permutation(seed, epoch, n mod windows) of epoch
// n / windows. So the data position is the number of sequences consumed, and the order is the same for any batch size,
// any number of GPUs and after a resume.
#pragma once
#include "files.h"
#include "options.h"
C_LINKAGE_BEGIN

typedef struct {
    const char* path;  // what the user named
    int vocabulary;    // 256 for bytes; for shards the folder's meta.json or GPT-2's 50257
    bool bytes;        // tokens are bytes
    int64_t tokens;    // in all files
    int files;
    int left_out;             // files that are shorter than a window
    int64_t left_out_tokens;  // in these
    uint32_t crc;             // set by dataset_fingerprint
    double bytes_per_token;   // for bits per byte: 1 for bytes, else set by dataset_count_bytes; 0 when unknown
    const char* tokenizer;    // folder that holds the tokenizer's files, "" when unknown or bytes
    bool mixed;               // the ends of several files: what is not shuffled is drawn from all of them
    struct DatasetFile* file;
} Dataset;

typedef enum { DATASET_TRAIN, DATASET_VALIDATION, DATASET_WHOLE } DatasetPart;
// The contents of the files. AUTO: a shard if a file begins like one, else text as bytes. BYTES: any other file too.
typedef enum { DATA_AUTO, DATA_BYTES } DataFormat;

// Opens a folder, file or glob. prepare.py writes the parts of a folder as train_*.bin and val_*.bin. Elsewhere the
// last `validation_fraction` of each file is the validation part, at least one window of T+1 tokens in all, and the
// rest is the training part. The whole of a folder is its training shards. If there are several files, those without a
// window are left out and counted.
// Checks magic, version and length of each header, and that all shards' folders have one vocabulary.
bool dataset_open(Dataset* data, const char* path, DataFormat format, DatasetPart part, double validation_fraction,
                  int T, char* error);
// Does the same over memory (the built-in corpus), as bytes.
bool dataset_open_memory(Dataset* data, const void* text, int64_t bytes, DatasetPart part, double validation_fraction,
                         int T, char* error);
// Opens both parts of --data and --val, which must be of one kind and vocabulary. Without --data they are the built-in
// text. The error message names the option.
bool dataset_open_both(Dataset* train, Dataset* val, const Options* options, int T, char* error);
// Finds, before the length of a window is known, whether the training data is bytes, and its vocabulary.
bool dataset_look(const Options* options, int* vocabulary, bool* bytes, char* error);
void dataset_close(Dataset* data);
// Sets data->crc, a checksum of all tokens, or, beyond 256 MiB, of 64 blocks of each file.
bool dataset_fingerprint(Dataset* data, char* error);
// Returns whether some token of a file belongs to both data sets, as when --val names a file of --data.
bool dataset_overlap(const Dataset* a, const Dataset* b);
int64_t dataset_windows(const Dataset* data, int T);
// Returns how many windows a validation of at most `tokens` tokens reads: at least one.
int64_t dataset_windows_of(const Dataset* data, int T, int64_t tokens);
// Sets data->bytes_per_token to the mean over the targets of a validation of at most `tokens` tokens, if the tokenizer
// is known.
bool dataset_count_bytes(Dataset* data, int T, int64_t tokens, char* error);
// Copies window `window` (not permuted) into tokens[T] and targets[T]. Returns false if a token is not below
// data->vocabulary; then only a part of the window is copied.
bool dataset_window(const Dataset* data, int T, int64_t window, int* tokens, int* targets, char* error);

// Returns whether an open file of `size` bytes is text other than JSON. If not, `error` says "PATH is ...; type ...".
bool content_is_text(int descriptor, int64_t size, const char* path, char* error);

// Returns where a pseudo-random permutation of 0..n-1, keyed by (seed, epoch), puts i.
int64_t shuffle_index(uint64_t seed, int64_t epoch, int64_t i, int64_t n);

// A loader reads batches of B windows, the next one ahead on a thread. Without shuffle, sequence n is window n mod
// windows, or, of a mixed data set, a fixed permutation of it.
typedef struct Loader Loader;
// The arrays lie one after another, as batch_at puts them into memory for N = B*T tokens.
typedef struct {
    int* tokens;   // (B, T)
    int* targets;  // (B, T)
    int* order;    // (B*T) positions sorted by token, ties by position: for the embedding's backward pass
    int* bucket;   // (buckets, 2) [token, first index into order], one more row [-1, B*T] at the end
    int buckets;   // number of distinct tokens
} Batch;
static inline Batch batch_at(int* memory, int64_t N) {
    return (Batch){memory, memory + N, memory + 2 * N, memory + 3 * N, 0};
}
// The sequences that one of several ranks reads: `run` of each `stride`. With S sequences in a step, rank r of W has
// run = S / W and stride = S, and begins at first + r * run. Both 0: all sequences.
typedef struct {
    int64_t run, stride;
} LoaderSlice;
// `pinned_alloc`, which never returns NULL, and `pinned_free` manage the batches' host memory.
Loader* loader_open(const Dataset* data, int B, int T, uint64_t seed, bool shuffle, int64_t first_sequence,
                    LoaderSlice slice, void* (*pinned_alloc)(size_t), void (*pinned_free)(void*));
// Returns the next batch, valid until the second loader_next after it; NULL with a sentence on a bad token or file.
const Batch* loader_next(Loader* loader, char* error);
void loader_close(Loader* loader);

C_LINKAGE_END
