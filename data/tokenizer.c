// Tokens <-> bytes: bytes themselves, or GPT-2's byte-pair encoding.
//
// Files: vocab.json maps every token's text to its number, in an alphabet where each byte is one printable character
// (the printable bytes of Latin-1 are themselves, the other 68 are U+0100 onwards in order); merges.txt lists pairs
// "left right", the earliest first. Both are read once into byte strings and two hash tables (open addressing, at most
// half full): text -> token, used while the merges are read, and (left, right) -> (rank, joined), used by the encoder.
// Encoding cuts the text into words by GPT-2's pattern
//     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// and, within a word, joins the adjacent pair of the lowest rank until none is listed: O(n^2) in a word's length, which
// is a dozen. The pattern is written out by hand; which characters are letters, numbers and white space is in
// unicode.h. Every encoding decodes to the bytes it came from.
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "../kernels/text.h"
#include "tokenizer.h"
#include "unicode.h"

enum { VOCABULARY_MOST = 1 << 20 };

typedef enum { LETTER, DIGIT, SPACE, OTHER } CharClass;  // as numbered in unicode.h

typedef struct {
    uint64_t pair;  // left << 32 | right
    int rank;
    int joined;  // 0 .. ; -1 in a free slot
} Merge;

struct Tokenizer {
    int vocabulary;
    int end;         // <|endoftext|>, or -1
    bool encodes;    // there are merges
    int byte[256];   // the token of each byte, -1 when there is none
    char* text;      // all tokens' bytes, one after another
    int64_t* first;  // (vocabulary) of a token in text
    int* length;     // (vocabulary)
    int* slot;       // (slots) tokens by the hash of their bytes, -1 when free
    int64_t slots;   // a power of two
    Merge* merge;    // (merges) slots, by the hash of the pair
    int64_t merges;  // a power of two
};

static const char* const end_of_text = "<|endoftext|>";

static uint64_t mix(uint64_t z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

static uint64_t hash_bytes(const char* bytes, int64_t count) {
    return mix(text_hash(bytes, count));
}

// A power of two at least twice `count`.
static int64_t table_size(int64_t count) {
    int64_t size = 16;
    while (size < 2 * count) size *= 2;
    return size;
}

// The slot of a token with these bytes, or the free slot where it would go.
static int64_t find_slot(const Tokenizer* tokenizer, const char* bytes, int64_t count) {
    int64_t slot = (int64_t)(hash_bytes(bytes, count) & (uint64_t)(tokenizer->slots - 1));
    for (;; slot = (slot + 1) & (tokenizer->slots - 1)) {
        int token = tokenizer->slot[slot];
        if (token < 0) return slot;
        if (tokenizer->length[token] == count &&
            memcmp(tokenizer->text + tokenizer->first[token], bytes, (size_t)count) == 0) {
            return slot;
        }
    }
}

static int64_t find_merge(const Tokenizer* tokenizer, uint64_t pair) {
    int64_t slot = (int64_t)(mix(pair) & (uint64_t)(tokenizer->merges - 1));
    while (tokenizer->merge[slot].joined >= 0 && tokenizer->merge[slot].pair != pair) {
        slot = (slot + 1) & (tokenizer->merges - 1);
    }
    return slot;
}

// byte_of[character] for the 324 characters of the alphabet; -1 for the others.
static void alphabet(int byte_of[324]) {
    int next = 256;
    for (int i = 0; i < 324; i++) byte_of[i] = -1;
    for (int b = 0; b < 256; b++) {
        bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b != 0xAD);
        byte_of[printable ? b : next++] = b;
    }
}

// Rewrites text from the alphabet into bytes at `to`; returns their number, or -1 when a character is not in the
// alphabet. Bytes are never more than the text's.
static int64_t to_bytes(const int byte_of[324], const char* text, int64_t count, char* to) {
    int64_t used = 0;
    for (int64_t i = 0; i < count;) {
        uint32_t point = 0;
        int length = utf8_next(text + i, count - i, &point);
        if (length == 0 || point >= 324 || byte_of[point] < 0) return -1;
        to[used++] = (char)byte_of[point];
        i += length;
    }
    return used;
}

// The members of vocab.json: sizes first, then every token's bytes.
static bool read_vocabulary(Tokenizer* tokenizer, const Json* json, const char* path, const int* byte_of, char* error) {
    int64_t bytes = 0, count = 0, largest = -1;
    if (json->kind != JSON_OBJECT) return data_error(error, "%s is no vocabulary: it is not a JSON object", path);
    for (const Json* entry = json->child; entry; entry = entry->next, count++) {
        double token = entry->kind == JSON_NUMBER ? entry->number : -1.0;
        if (!(token >= 0.0 && token < VOCABULARY_MOST && token == (double)(int64_t)token)) {
            return data_error(error, "%s is no vocabulary: the number of token \"%.40s\" is not in 0 to %d", path,
                              entry->key, VOCABULARY_MOST - 1);
        }
        if ((int64_t)token > largest) largest = (int64_t)token;
        bytes += (int64_t)strlen(entry->key);
    }
    if (count == 0) return data_error(error, "%s is no vocabulary: it is empty", path);
    tokenizer->vocabulary = (int)largest + 1;
    tokenizer->slots = table_size(count);
    tokenizer->text = malloc((size_t)bytes + 1);
    tokenizer->first = calloc((size_t)largest + 1, sizeof(int64_t));
    tokenizer->length = calloc((size_t)largest + 1, sizeof(int));
    tokenizer->slot = malloc((size_t)tokenizer->slots * sizeof(int));
    if (!tokenizer->text || !tokenizer->first || !tokenizer->length || !tokenizer->slot) {
        return data_error(error, "cannot read %s: out of memory", path);
    }
    memset(tokenizer->slot, 0xFF, (size_t)tokenizer->slots * sizeof(int));
    int64_t used = 0;
    for (const Json* entry = json->child; entry; entry = entry->next) {
        int token = (int)entry->number;
        int64_t size = (int64_t)strlen(entry->key);
        int64_t length = to_bytes(byte_of, entry->key, size, tokenizer->text + used);
        // A token outside the alphabet was added by hand and stands for its own text.
        if (length < 0) memcpy(tokenizer->text + used, entry->key, (size_t)(length = size));
        if (tokenizer->length[token] > 0) return data_error(error, "%s gives token %d to two texts", path, token);
        tokenizer->first[token] = used;
        tokenizer->length[token] = (int)length;
        if (length == 1) tokenizer->byte[(unsigned char)tokenizer->text[used]] = token;
        tokenizer->slot[find_slot(tokenizer, tokenizer->text + used, length)] = token;
        if (strcmp(entry->key, end_of_text) == 0) tokenizer->end = token;
        used += length;
    }
    return true;
}

// One line "left right" of merges.txt, as the merge of this rank.
static bool read_merge(Tokenizer* tokenizer, const int* byte_of, const char* line, int64_t count, int rank,
                       char* bytes) {
    const char* space = memchr(line, ' ', (size_t)count);
    if (!space) return false;
    int64_t left = to_bytes(byte_of, line, space - line, bytes);
    if (left < 1) return false;
    int64_t right = to_bytes(byte_of, space + 1, line + count - space - 1, bytes + left);
    if (right < 1) return false;
    int left_token = tokenizer->slot[find_slot(tokenizer, bytes, left)];
    int right_token = tokenizer->slot[find_slot(tokenizer, bytes + left, right)];
    int joined = tokenizer->slot[find_slot(tokenizer, bytes, left + right)];
    if (left_token < 0 || right_token < 0 || joined < 0) return false;
    uint64_t pair = (uint64_t)left_token << 32 | (uint64_t)right_token;
    Merge* merge = &tokenizer->merge[find_merge(tokenizer, pair)];
    if (merge->joined < 0) *merge = (Merge){pair, rank, joined};
    return true;
}

static bool read_merges(Tokenizer* tokenizer, const char* text, int64_t count, const char* path, const int* byte_of,
                        char* error) {
    int64_t lines = 1;
    for (int64_t i = 0; i < count; i++) lines += text[i] == '\n';
    tokenizer->merges = table_size(lines);
    tokenizer->merge = malloc((size_t)tokenizer->merges * sizeof(Merge));
    char* bytes = malloc((size_t)count + 1);
    bool fine = tokenizer->merge && bytes;
    if (!fine) data_error(error, "cannot read %s: out of memory", path);
    for (int64_t i = 0; fine && i < tokenizer->merges; i++) tokenizer->merge[i] = (Merge){0, 0, -1};
    int rank = 0;
    int64_t number = 1;
    for (const char *line = text, *end = text + count; fine && line < end; number++) {
        const char* stop = memchr(line, '\n', (size_t)(end - line));
        if (!stop) stop = end;
        int64_t length = stop - line;
        if (length > 0 && line[length - 1] == '\r') length--;
        // The first line names the version; a later line may well begin with '#', a token like any other.
        bool version = number == 1 && length >= 8 && memcmp(line, "#version", 8) == 0;
        if (length > 0 && !version && !read_merge(tokenizer, byte_of, line, length, rank++, bytes)) {
            fine = data_error(error,
                              "%s does not belong to the vocabulary beside it: line %lld is no pair of tokens whose "
                              "joined text is a token",
                              path, (long long)number);
        }
        line = stop + 1;
    }
    free(bytes);
    for (int b = 0; fine && b < 256; b++) {
        if (tokenizer->byte[b] < 0)
            fine = data_error(error, "the vocabulary beside %s has no token for byte %d", path, b);
    }
    return fine;
}

// The first of two names that is in the folder, written to `path`; false when neither is.
static bool find_file(const char* folder, const char* name, const char* other, char path[4352]) {
    snprintf(path, 4352, "%.4095s/%s", folder, name);
    if (access(path, F_OK) == 0) return true;
    snprintf(path, 4352, "%.4095s/%s", folder, other);
    return access(path, F_OK) == 0;
}

static bool open_folder(Tokenizer* tokenizer, const char* folder, char* error) {
    char path[4352];
    int byte_of[324];
    int64_t bytes = 0;
    alphabet(byte_of);
    if (!find_file(folder, "vocab.json", "encoder.json", path)) {
        return data_error(
            error, "%s holds no vocab.json (or encoder.json); put them there, or name a folder that has them", folder);
    }
    char* text = file_read(path, &bytes, error);
    if (!text) return false;
    Json* json = json_parse(text, bytes, path, error);
    free(text);
    bool fine = json && read_vocabulary(tokenizer, json, path, byte_of, error);
    json_free(json);
    if (!fine || !find_file(folder, "merges.txt", "vocab.bpe", path)) return fine;
    text = file_read(path, &bytes, error);
    if (!text) return false;
    fine = read_merges(tokenizer, text, bytes, path, byte_of, error);
    tokenizer->encodes = fine;
    free(text);
    return fine;
}

Tokenizer* tokenizer_open(const char* folder, char* error) {
    Tokenizer* tokenizer = calloc(1, sizeof(Tokenizer));
    if (!tokenizer) return data_error(error, "cannot open the tokenizer: out of memory"), NULL;
    tokenizer->end = -1;
    memset(tokenizer->byte, 0xFF, sizeof(tokenizer->byte));
    if (folder && *folder) {
        if (open_folder(tokenizer, folder, error)) return tokenizer;
        tokenizer_close(tokenizer);
        return NULL;
    }
    // Bytes are a vocabulary of 256 without merges to make.
    tokenizer->vocabulary = 256;
    tokenizer->encodes = true;
    tokenizer->text = malloc(256);
    tokenizer->first = calloc(256, sizeof(int64_t));
    tokenizer->length = calloc(256, sizeof(int));
    if (!tokenizer->text || !tokenizer->first || !tokenizer->length) {
        data_error(error, "cannot open the tokenizer: out of memory");
        tokenizer_close(tokenizer);
        return NULL;
    }
    for (int b = 0; b < 256; b++) {
        tokenizer->text[b] = (char)b;
        tokenizer->first[b] = b;
        tokenizer->length[b] = 1;
        tokenizer->byte[b] = b;
    }
    return tokenizer;
}

bool tokenizer_files_copy(const char* from, const char* to, char* error) {
    static const char* const names[][2] = {{"vocab.json", "vocab.json"},
                                           {"merges.txt", "merges.txt"},
                                           {"encoder.json", "vocab.json"},
                                           {"vocab.bpe", "merges.txt"}};
    for (int i = 0; i < 4; i++) {
        char source[4608], copy[4608];
        snprintf(source, sizeof(source), "%s/%s", from, names[i][0]);
        snprintf(copy, sizeof(copy), "%s/%s", to, names[i][1]);
        if (access(source, F_OK) != 0 || access(copy, F_OK) == 0) continue;
        int64_t bytes;
        char* text = file_read(source, &bytes, error);
        bool fine = text && file_write(copy, text, bytes, error);
        free(text);
        if (!fine) return false;
    }
    return true;
}

void tokenizer_close(Tokenizer* tokenizer) {
    if (!tokenizer) return;
    free(tokenizer->text);
    free(tokenizer->first);
    free(tokenizer->length);
    free(tokenizer->slot);
    free(tokenizer->merge);
    free(tokenizer);
}

int tokenizer_vocabulary(const Tokenizer* tokenizer) {
    return tokenizer->vocabulary;
}

int tokenizer_end(const Tokenizer* tokenizer) {
    return tokenizer->end;
}

const char* tokenizer_decode(const Tokenizer* tokenizer, int token, int* bytes) {
    bool known = token >= 0 && token < tokenizer->vocabulary;
    *bytes = known ? tokenizer->length[token] : 0;
    return known ? tokenizer->text + tokenizer->first[token] : "";
}

// The class of a character: that of the last entry of the table whose code point is not above it.
static CharClass class_of(uint32_t point) {
    int low = 0, high = (int)(sizeof(unicode_classes) / sizeof(unicode_classes[0]));
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (unicode_classes[middle] >> 2 <= point) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return (CharClass)(unicode_classes[low] & 3);
}

// The class and, in *length, the size of the character at text[0..bytes), bytes > 0. A malformed byte is a symbol.
static CharClass next_class(const char* text, int64_t bytes, int* length) {
    uint32_t point = 0;
    *length = utf8_next(text, bytes, &point);
    if (*length > 0) return class_of(point);
    *length = 1;
    return OTHER;
}

// The bytes that GPT-2's pattern matches at text[0..bytes), bytes > 0: at least one.
static int64_t word_bytes(const char* text, int64_t bytes) {
    static const char* const endings[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    for (int i = 0; i < 7; i++) {
        int64_t length = (int64_t)strlen(endings[i]);
        if (length <= bytes && memcmp(text, endings[i], (size_t)length) == 0) return length;
    }
    int length = 0;
    int64_t at = text[0] == ' ' && bytes > 1 ? 1 : 0;
    CharClass class = next_class(text + at, bytes - at, &length);
    if (class != SPACE) {
        do {
            at += length;
        } while (at < bytes && next_class(text + at, bytes - at, &length) == class);
        return at;
    }
    // Spaces: all at the end of the text, otherwise all but the last, which begins the next word, unless it is the
    // only.
    int64_t last = 0;
    for (at = 0; at < bytes && next_class(text + at, bytes - at, &length) == SPACE; at += length) last = at;
    return at == bytes || last == 0 ? at : last;
}

// Joins the tokens of one word in place; returns how many remain. rank[i] is that of the pair (i, i + 1).
static int64_t join_word(const Tokenizer* tokenizer, int* token, int* rank, int64_t count) {
    const int none = 0x7FFFFFFF;
    int64_t refresh_first = 0, refresh_last = count - 1;
    while (count > 1) {
        for (int64_t i = refresh_first; i < refresh_last; i++) {
            uint64_t pair = (uint64_t)token[i] << 32 | (uint64_t)token[i + 1];
            const Merge* merge = &tokenizer->merge[find_merge(tokenizer, pair)];
            rank[i] = merge->joined >= 0 ? merge->rank : none;
        }
        int64_t best = 0;
        for (int64_t i = 1; i < count - 1; i++) {
            if (rank[i] < rank[best]) best = i;
        }
        if (rank[best] == none) break;
        uint64_t pair = (uint64_t)token[best] << 32 | (uint64_t)token[best + 1];
        token[best] = tokenizer->merge[find_merge(tokenizer, pair)].joined;
        int64_t moved = count - best - 2;
        memmove(token + best + 1, token + best + 2, (size_t)moved * sizeof(int));
        if (moved > 0) memmove(rank + best, rank + best + 1, (size_t)moved * sizeof(int));
        count--;
        refresh_first = best > 0 ? best - 1 : 0;
        refresh_last = best + 1 < count ? best + 1 : count - 1;
    }
    return count;
}

int tokenizer_encode(const Tokenizer* tokenizer, const char* text, int64_t bytes, int* tokens, int most) {
    if (!tokenizer->encodes) return -1;
    // Two arrays for the longest word, which may be the whole text.
    int* token = malloc(2 * (size_t)(bytes + 1) * sizeof(int));
    if (!token) return -1;
    int* rank = token + bytes + 1;
    int64_t total = 0;
    for (int64_t at = 0; at < bytes;) {
        int64_t count = tokenizer->merge ? word_bytes(text + at, bytes - at) : bytes - at;
        for (int64_t i = 0; i < count; i++) token[i] = tokenizer->byte[(unsigned char)text[at + i]];
        at += count;
        if (tokenizer->merge) count = join_word(tokenizer, token, rank, count);
        for (int64_t i = 0; i < count && total + i < most; i++) tokens[total + i] = token[i];
        total += count;
    }
    free(token);
    return (int)total;
}

typedef struct {
    float logit;
    int token;
} Candidate;

static int candidate_order(const void* a, const void* b) {
    const Candidate *x = (const Candidate*)a, *y = (const Candidate*)b;
    if (x->logit != y->logit) return x->logit < y->logit ? 1 : -1;
    return x->token - y->token;
}

int draw_token(const float* logits, int V, double temperature, int64_t k, double coin) {
    Candidate* candidate = malloc(V * sizeof(Candidate));
    for (int i = 0; i < V; i++) candidate[i] = (Candidate){logits[i], i};
    qsort(candidate, V, sizeof(Candidate), candidate_order);
    if (k <= 0 || k > V) k = V;
    if (temperature == 0) k = 1;
    double sum = 0;
    for (int64_t i = 0; i < k; i++) sum += exp((candidate[i].logit - candidate[0].logit) / (k > 1 ? temperature : 1));
    int token = candidate[k - 1].token;
    double reach = coin * sum;
    for (int64_t i = 0; i < k; i++) {
        reach -= exp((candidate[i].logit - candidate[0].logit) / (k > 1 ? temperature : 1));
        if (reach < 0) {
            token = candidate[i].token;
            break;
        }
    }
    free(candidate);
    return token;
}
