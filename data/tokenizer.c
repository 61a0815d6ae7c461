// Tokens <-> bytes: bytes themselves, or GPT-2's byte-pair encoding.
//
// Files: vocab.json maps every token's text to its number, in an alphabet where each byte is one printable character
// (the printable bytes of Latin-1 are themselves, the other 68 are U+0100 onwards in order); merges.txt lists pairs
// "left right", the earliest first. Both are read into byte strings and two hash tables (open addressing, at most half
// full): text -> token, used while the merges are read, and (left, right) -> (rank, joined), used by the encoder.
// Encoding cuts the text into words by GPT-2's pattern, which is written out by hand,
//     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// and, within a word, joins the adjacent pair of the lowest rank until none is listed: O(n^2) in a word's length.
// unicode.h says which characters are letters, numbers and white space.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "model_folder.h"
#include "text.h"
#include "tokenizer.h"
#include "unicode.h"

enum { MAX_VOCABULARY = 1 << 20 };

typedef enum { LETTER, DIGIT, SPACE, OTHER } CharClass;  // as numbered in unicode.h

typedef struct {
    uint64_t pair;  // left << 32 | right
    int rank;
    int joined;  // 0 .. ; -1 in a free slot
} Merge;

struct Tokenizer {
    int vocabulary;  // without tokens that were added later
    int tokens;      // with them
    int end;         // <|endoftext|>, or -1
    bool encodes;    // there are merges, or each token is a character
    int* added[2];   // tokens that were added later: a text is cut at those of the first, and its pieces at the others
    int adds[2];     // how many they are
    int byte[256];   // the token of each byte, -1 when there is none
    char* text;      // all tokens' bytes, one after another
    int64_t* first;  // (tokens) of a token in text
    int* length;     // (tokens)
    int* slot;       // (slots) tokens by the hash of their bytes, -1 when free
    int64_t slots;   // a power of two
    Merge* merge;    // (merges) slots, by the hash of the pair
    int64_t merges;  // a power of two
};

static const char* const end_of_text = "<|endoftext|>";

// A power of two at least twice `count`.
static int64_t table_size(int64_t count) {
    int64_t size = 16;
    while (size < 2 * count) size *= 2;
    return size;
}

// The slot of a token with these bytes, or the free slot where it would go.
static int64_t find_slot(const Tokenizer* tokenizer, const char* bytes, int64_t count) {
    int64_t slot = (int64_t)(bits_mix(text_hash(bytes, count)) & (uint64_t)(tokenizer->slots - 1));
    for (;; slot = (slot + 1) & (tokenizer->slots - 1)) {
        int token = tokenizer->slot[slot];
        if (token < 0) return slot;
        if (tokenizer->length[token] == count &&
            memcmp(tokenizer->text + tokenizer->first[token], bytes, (size_t)count) == 0) {
            return slot;
        }
    }
}

static uint64_t pair_of(int left, int right) {
    return (uint64_t)left << 32 | (uint64_t)right;
}

// The merge of two tokens, or the free slot where it would go.
static Merge* find_merge(const Tokenizer* tokenizer, int left, int right) {
    const uint64_t pair = pair_of(left, right);
    int64_t slot = (int64_t)(bits_mix(pair) & (uint64_t)(tokenizer->merges - 1));
    while (tokenizer->merge[slot].joined >= 0 && tokenizer->merge[slot].pair != pair) {
        slot = (slot + 1) & (tokenizer->merges - 1);
    }
    return &tokenizer->merge[slot];
}

// The byte that a character of the alphabet stands for; -1 for any other character.
static int byte_of(uint32_t point) {
    if ((point >= '!' && point <= '~') || (point >= 0xA1 && point <= 0xFF && point != 0xAD)) return (int)point;
    if (point < 256 || point >= 256 + 68) return -1;
    const int i = (int)point - 256;  // among the bytes 0x00 to 0x20, 0x7F to 0xA0, and 0xAD
    return i < 0x21 ? i : i < 0x21 + 0x22 ? i - 0x21 + 0x7F : 0xAD;
}

// Rewrites text from the alphabet into bytes at `to`, never more than the text has. Returns their number; -1: a
// character is not in the alphabet.
static int64_t to_bytes(const char* text, int64_t count, char* to) {
    int64_t used = 0;
    for (int64_t i = 0; i < count;) {
        uint32_t point = 0;
        int length = utf8_next(text + i, count - i, &point), byte = byte_of(point);
        if (length == 0 || byte < 0) return -1;
        to[used++] = (char)byte;
        i += length;
    }
    return used;
}

// True if `json` is absent, null, false or an empty text.
static bool is_nothing(const Json* json) {
    return !json || json->kind == JSON_NULL || (json->kind == JSON_BOOL && json->number == 0) ||
           (json->kind == JSON_STRING && json->text_bytes == 0);
}

// A token as a file gives it.
typedef struct {
    const char* text;
    int64_t bytes;
    const Json* number;
    bool added;  // later, by hand: it stands for its own text; otherwise the text is in the alphabet
    bool normalized;
} Entry;

typedef struct {
    Entry* entry;  // first, since SCOPED frees it
    int64_t count;
} Entries;

static void entries_add(Entries* entries, Entry entry) {
    const int64_t count = entries->count++;
    // Room for twice as many whenever it is full, which is when there is a power of two of them.
    if ((count & (count - 1)) == 0)
        entries->entry = memory_grow(entries->entry, (size_t)(2 * count + 1) * sizeof(Entry));
    entries->entry[count] = entry;
}

// Adds the members of an object, text: number.
static bool entries_object(Entries* entries, const Json* json, bool added, const char* path, char* error) {
    if (!json || json->kind != JSON_OBJECT) {
        return data_error(error, "%s is no vocabulary: it is not a JSON object", path);
    }
    for (const Json* member = json->child; member; member = member->next) {
        entries_add(entries, (Entry){member->key, (int64_t)strlen(member->key), member, added, true});
    }
    return true;
}

// Adds the list "added_tokens" of tokenizer.json, whose elements have an id and a content.
static bool entries_list(Entries* entries, const Json* list, const char* path, char* error) {
    for (const Json* token = list ? list->child : NULL; token; token = token->next) {
        static const char* const flags[] = {"single_word", "lstrip", "rstrip"};
        const Json *id = json_get(token, "id"), *content = json_get(token, "content");
        if (!id || !content || content->kind != JSON_STRING || content->text_bytes == 0) {
            return data_error(error, "%s has an added token without id and content", path);
        }
        for (int i = 0; i < 3 && strcmp(content->text, end_of_text) != 0; i++) {
            if (is_nothing(json_get(token, flags[i]))) continue;
            return data_error(error, "%s: its added token \"%.40s\" has %s, which nibble does not encode", path,
                              content->text, flags[i]);
        }
        const bool normalized = !is_nothing(json_get(token, "normalized"));
        entries_add(entries, (Entry){content->text, content->text_bytes, id, true, normalized});
    }
    return true;
}

// Sets the sizes that all entries need, and takes the memory.
static bool vocabulary_allocate(Tokenizer* tokenizer, const Entries* entries, const char* path, char* error) {
    int64_t bytes = 0, largest = -1, max = -1;
    for (int64_t i = 0; i < entries->count; i++) {
        const Entry* entry = &entries->entry[i];
        double token = entry->number->kind == JSON_NUMBER ? entry->number->number : -1.0;
        if (!(token >= 0.0 && token < MAX_VOCABULARY && token == (double)(int64_t)token)) {
            return data_error(error, "%s is no vocabulary: the number of token \"%.40s\" is not in 0 to %d", path,
                              entry->text, MAX_VOCABULARY - 1);
        }
        if ((int64_t)token > max) max = (int64_t)token;
        if ((int64_t)token > largest && !entry->added) largest = (int64_t)token;
        bytes += entry->bytes;
    }
    if (largest < 0) return data_error(error, "%s is no vocabulary: it is empty", path);
    tokenizer->vocabulary = (int)largest + 1;
    tokenizer->tokens = (int)max + 1;
    tokenizer->slots = table_size(entries->count);
    tokenizer->text = memory_take((size_t)bytes + 1);
    tokenizer->first = memory_zero((size_t)max + 1, sizeof(int64_t));
    tokenizer->length = memory_zero((size_t)max + 1, sizeof(int));
    tokenizer->slot = memory_take((size_t)tokenizer->slots * sizeof(int));
    memset(tokenizer->slot, 0xFF, (size_t)tokenizer->slots * sizeof(int));
    return true;
}

static void added_add(Tokenizer* tokenizer, int token, bool normalized) {
    int** list = &tokenizer->added[normalized];
    *list = memory_grow(*list, (size_t)(tokenizer->adds[normalized] + 1) * sizeof(int));
    (*list)[tokenizer->adds[normalized]++] = token;
}

static bool read_vocabulary(Tokenizer* tokenizer, const Entries* entries, const char* path, char* error) {
    if (!vocabulary_allocate(tokenizer, entries, path, error)) return false;
    int64_t used = 0;
    for (int64_t i = 0; i < entries->count; i++) {
        const Entry* entry = &entries->entry[i];
        int token = (int)entry->number->number;
        char* text = tokenizer->text + used;
        int64_t length = entry->added ? -1 : to_bytes(entry->text, entry->bytes, text);
        // A token outside the alphabet was added by hand and stands for its own text.
        if (length < 0) memcpy(text, entry->text, (size_t)(length = entry->bytes));
        if (tokenizer->length[token] > 0) {
            bool same = entry->added && tokenizer->length[token] == length &&
                        memcmp(tokenizer->text + tokenizer->first[token], text, (size_t)length) == 0;
            if (!same) return data_error(error, "%s gives token %d to two texts", path, token);
        }
        const bool is_end = length == (int64_t)strlen(end_of_text) && memcmp(text, end_of_text, (size_t)length) == 0;
        if (entry->added && !is_end && length > 0) added_add(tokenizer, token, entry->normalized);
        if (tokenizer->length[token] > 0) continue;  // files list a token again that was added by hand
        tokenizer->first[token] = used;
        tokenizer->length[token] = (int)length;
        if (length == 1 && !entry->added) tokenizer->byte[(unsigned char)*text] = token;
        tokenizer->slot[find_slot(tokenizer, text, length)] = token;
        if (is_end) tokenizer->end = token;
        used += length;
    }
    return true;
}

// Enters the merge of this rank, of two texts in the alphabet.
static bool read_merge(Tokenizer* tokenizer, const char* first, int64_t first_bytes, const char* second,
                       int64_t second_bytes, int rank) {
    SCOPED char* bytes = memory_take((size_t)(first_bytes + second_bytes));
    int64_t left = to_bytes(first, first_bytes, bytes);
    if (left < 1) return false;
    int64_t right = to_bytes(second, second_bytes, bytes + left);
    if (right < 1) return false;
    int left_token = tokenizer->slot[find_slot(tokenizer, bytes, left)];
    int right_token = tokenizer->slot[find_slot(tokenizer, bytes + left, right)];
    int joined = tokenizer->slot[find_slot(tokenizer, bytes, left + right)];
    if (left_token < 0 || right_token < 0 || joined < 0) return false;
    Merge* merge = find_merge(tokenizer, left_token, right_token);
    if (merge->joined < 0) *merge = (Merge){pair_of(left_token, right_token), rank, joined};
    return true;
}

// Enters a merge that is one text, "left right".
static bool read_merge_line(Tokenizer* tokenizer, const char* line, int64_t count, int rank) {
    const char* space = memchr(line, ' ', (size_t)count);
    return space && read_merge(tokenizer, line, space - line, space + 1, line + count - space - 1, rank);
}

// Takes room for `count` merges.
static void merges_allocate(Tokenizer* tokenizer, int64_t count) {
    tokenizer->merges = table_size(count);
    tokenizer->merge = memory_take((size_t)tokenizer->merges * sizeof(Merge));
    for (int64_t i = 0; i < tokenizer->merges; i++) tokenizer->merge[i] = (Merge){0, 0, -1};
}

static bool bytes_complete(const Tokenizer* tokenizer, const char* path, char* error) {
    for (int b = 0; b < 256; b++) {
        if (tokenizer->byte[b] < 0) {
            return data_error(error, "the vocabulary beside %s has no token for byte %d", path, b);
        }
    }
    return true;
}

static bool read_merges(Tokenizer* tokenizer, const char* text, int64_t count, const char* path, char* error) {
    int64_t lines = 1, number = 1;
    for (int64_t i = 0; i < count; i++) lines += text[i] == '\n';
    merges_allocate(tokenizer, lines);
    int rank = 0;
    for (const char *line = text, *end = text + count, *stop; line < end; line = stop + 1, number++) {
        stop = memchr(line, '\n', (size_t)(end - line));
        if (!stop) stop = end;
        int64_t length = stop - line;
        if (length > 0 && line[length - 1] == '\r') length--;
        // The first line names the version; a later line may well begin with '#', a token like any other.
        bool version = number == 1 && length >= 8 && memcmp(line, "#version", 8) == 0;
        if (length == 0 || version || read_merge_line(tokenizer, line, length, rank++)) continue;
        return data_error(error,
                          "%s does not belong to the vocabulary beside it: line %lld is no pair of tokens whose joined "
                          "text is a token",
                          path, (long long)number);
    }
    return bytes_complete(tokenizer, path, error);
}

// Reads tokenizer.json's list of merges: texts "left right", or pairs of texts.
static bool read_merge_list(Tokenizer* tokenizer, const Json* list, const char* path, char* error) {
    int64_t count = 0;
    for (const Json* merge = list->child; merge; merge = merge->next) count++;
    merges_allocate(tokenizer, count);
    int rank = 0;
    for (const Json* merge = list->child; merge; merge = merge->next, rank++) {
        const Json *left = merge->child, *right = left ? left->next : NULL;
        bool pair = merge->kind == JSON_ARRAY && right && left->kind == JSON_STRING && right->kind == JSON_STRING;
        if (!pair && merge->kind != JSON_STRING) {
            return data_error(error, "%s: merge %d is no pair of texts", path, rank);
        }
        bool good = pair ? read_merge(tokenizer, left->text, left->text_bytes, right->text, right->text_bytes, rank)
                         : read_merge_line(tokenizer, merge->text, merge->text_bytes, rank);
        if (good) continue;
        return data_error(error, "%s: merge %d is no pair of tokens whose joined text is a token", path, rank);
    }
    return bytes_complete(tokenizer, path, error);
}

// The path of the first of two names that is in the folder; NULL when neither is.
static const char* find_file(const char* folder, const char* name, const char* other) {
    const char* path = path_in(folder, name);
    if (access(path, F_OK) != 0) path = path_in(folder, other);
    return access(path, F_OK) == 0 ? path : NULL;
}

// True if tokenizer.json describes what the encoder here does: byte-pair encoding of bytes, in GPT-2's words.
static bool is_gpt2_tokenizer(const Json* json, const char* path, char* error) {
    static const char* const unknown[] = {"continuing_subword_prefix", "end_of_word_suffix", "byte_fallback",
                                          "ignore_merges", "dropout"};
    const Json *model = json_get(json, "model"), *cut = json_get(json, "pre_tokenizer");
    const char* type = json_string(model, "type", json_get(model, "merges") ? "BPE" : "no");
    if (strcmp(type, "BPE") != 0) {
        return data_error(error, "%s holds a tokenizer of type %s, and nibble reads GPT-2's byte-level BPE alone", path,
                          type);
    }
    const Json* use_regex = json_get(cut, "use_regex");
    bool plain = strcmp(json_string(cut, "type", ""), "ByteLevel") == 0 &&
                 is_nothing(json_get(cut, "add_prefix_space")) && (!use_regex || use_regex->number != 0) &&
                 is_nothing(json_get(json, "normalizer"));
    for (int i = 0; i < 5; i++) plain = plain && is_nothing(json_get(model, unknown[i]));
    return plain || data_error(error,
                               "%s holds a BPE tokenizer that normalizes text or cuts it into words otherwise than "
                               "GPT-2's, which alone nibble reads",
                               path);
}

// Reads the whole tokenizer from tokenizer.json.
static bool open_tokenizer_json(Tokenizer* tokenizer, const char* path, char* error) {
    SCOPED Entries entries = {NULL, 0};
    JSON_SCOPED Json* json = json_read(path, error);
    if (!json || !is_gpt2_tokenizer(json, path, error)) return false;
    const Json *model = json_get(json, "model"), *merges = json_get(model, "merges");
    if (!merges || merges->kind != JSON_ARRAY) return data_error(error, "%s holds no merges", path);
    tokenizer->encodes = true;
    return entries_object(&entries, json_get(model, "vocab"), false, path, error) &&
           entries_list(&entries, json_get(json, "added_tokens"), path, error) &&
           read_vocabulary(tokenizer, &entries, path, error) && read_merge_list(tokenizer, merges, path, error);
}

// Reads vocab.json at `path`, and what tokenizer.json or added_tokens.json beside it add to it.
static bool open_vocabulary(Tokenizer* tokenizer, const char* folder, const char* path, char* error) {
    SCOPED Entries entries = {NULL, 0};
    JSON_SCOPED Json *json = json_read(path, error), *more = NULL;
    if (!json || !entries_object(&entries, json, false, path, error)) return false;
    const char* beside = find_file(folder, "tokenizer.json", "added_tokens.json");
    if (beside) {
        const bool whole = text_ends(beside, "/tokenizer.json");
        more = json_read(beside, error);
        if (!more || !(whole ? entries_list(&entries, json_get(more, "added_tokens"), beside, error)
                             : entries_object(&entries, more, true, beside, error))) {
            return false;
        }
    }
    return read_vocabulary(tokenizer, &entries, path, error);
}

// True if each token is one character, as in a vocabulary of nanoGPT's.
static bool is_of_characters(const Tokenizer* tokenizer) {
    uint32_t point;
    for (int i = 0; i < tokenizer->tokens; i++) {
        const int length = tokenizer->length[i];
        if (length > 0 && utf8_next(tokenizer->text + tokenizer->first[i], length, &point) != length) return false;
    }
    return true;
}

static bool open_folder(Tokenizer* tokenizer, const char* folder, char* error) {
    int64_t bytes = 0;
    const char* path = find_file(folder, "vocab.json", "encoder.json");
    const char* merges = path ? find_file(folder, "merges.txt", "vocab.bpe") : NULL;
    const char* whole = merges ? NULL : find_file(folder, "tokenizer.json", "tokenizer.json");
    if (whole) return open_tokenizer_json(tokenizer, whole, error);
    if (!path) return data_error(error, "%s holds neither vocab.json nor encoder.json nor tokenizer.json", folder);
    if (!open_vocabulary(tokenizer, folder, path, error)) return false;
    if (!merges) return tokenizer->encodes = is_of_characters(tokenizer), true;
    SCOPED char* text = file_read(merges, &bytes, error);
    tokenizer->encodes = true;
    return text && read_merges(tokenizer, text, bytes, merges, error);
}

bool tokenizer_exists(const char* folder) {
    return find_file(folder, "vocab.json", "encoder.json") || find_file(folder, "tokenizer.json", "tokenizer.json");
}

Tokenizer* tokenizer_open(const char* folder, char* error) {
    Tokenizer* tokenizer = memory_zero(1, sizeof(Tokenizer));
    tokenizer->end = -1;
    memset(tokenizer->byte, 0xFF, sizeof(tokenizer->byte));
    if (folder && *folder) {
        if (open_folder(tokenizer, folder, error)) return tokenizer;
        tokenizer_close(tokenizer);
        return data_error(error, "%s; put the tokenizer's files there again, or name another folder", error), NULL;
    }
    // Bytes are a vocabulary of 256 without merges to make.
    tokenizer->vocabulary = tokenizer->tokens = 256;
    tokenizer->encodes = true;
    tokenizer->text = memory_take(256);
    tokenizer->first = memory_zero(256, sizeof(int64_t));
    tokenizer->length = memory_zero(256, sizeof(int));
    for (int b = 0; b < 256; b++) {
        tokenizer->text[b] = (char)b;
        tokenizer->first[b] = b;
        tokenizer->length[b] = 1;
        tokenizer->byte[b] = b;
    }
    return tokenizer;
}

bool tokenizers_agree(const char* folder, const char* other) {
    char ignored[DATA_ERROR_BYTES];
    Tokenizer* mine = *folder && tokenizer_exists(folder) ? tokenizer_open(folder, ignored) : NULL;
    Tokenizer* its = mine && *other && tokenizer_exists(other) ? tokenizer_open(other, ignored) : NULL;
    bool agree = true;
    for (int token = 0; its && agree && token < mine->tokens && token < its->tokens; token++) {
        int bytes[2] = {0};
        const char *text = tokenizer_decode(mine, token, &bytes[0]), *same = tokenizer_decode(its, token, &bytes[1]);
        if (bytes[0] == 0 || bytes[1] == 0) continue;  // one of them has no such token
        agree = bytes[0] == bytes[1] && memcmp(text, same, (size_t)bytes[0]) == 0;
    }
    tokenizer_close(mine), tokenizer_close(its);
    return agree;
}

// Returns whether each line of a text is a pair, "left right", but for an empty one and "#version ...".
static bool is_merges(const char* text, int64_t bytes) {
    bool pairs = text_is_utf8(text, bytes) && !memchr(text, 0, (size_t)bytes);
    for (const char* line = text; pairs && *line; line += strspn(line, "\r\n")) {
        const size_t length = strcspn(line, "\r\n"), left = strcspn(line, " ");
        const bool pair = left > 0 && left + 1 < length && left + 1 + strcspn(line + left + 1, " \r\n") == length;
        pairs = length == 0 || pair || strncmp(line, "#version", 8) == 0;
        line += length;
    }
    return pairs;
}

// Returns whether a JSON file is what its name says, as far as can be told: ids by token, a tokenizer, or settings.
static bool is_named_right(const Json* parsed, const char* name) {
    bool right = parsed->kind == JSON_OBJECT;
    for (const Json* one = parsed->child; right && one && text_ends(name, "vocab.json"); one = one->next) {
        right = one->kind == JSON_NUMBER;
    }
    return right && (strcmp(name, "tokenizer.json") != 0 || json_get(parsed, "model"));
}

// Copies FROM/NAME to TO/COPY unless TO/COPY exists or there is no FROM/NAME. What is in TO then must be a file of its
// own, and a JSON object or a list of merges, as its name says, because it is published.
static bool copy_one(const char* from, const char* name, const char* to, const char* copy, char* error) {
    const char *source = path_in(from, name), *target = path_in(to, copy);
    const bool there = access(target, F_OK) == 0, json = text_ends(copy, ".json");
    const char* path = there ? target : source;
    if (access(path, F_OK) != 0) return true;
    int64_t bytes;
    SCOPED char* text = file_read_own(path, &bytes, error);
    JSON_SCOPED Json* parsed = text && json ? json_parse(text, bytes, path, error) : NULL;
    if (!text || (json && !parsed)) return false;
    if (json ? !is_named_right(parsed, copy) : !is_merges(text, bytes)) {
        return data_error(error, "%s is no %s; fetch it again, or remove it", path,
                          !json                         ? "list of merges"
                          : parsed->kind == JSON_OBJECT ? copy
                                                        : "JSON object");
    }
    return there || file_write(target, text, bytes, error);
}

bool tokenizer_files_copy(const char* from, const char* to, char* error) {
    for (int i = 0; MODEL_FOLDER_FILES[i]; i++) {
        if (!copy_one(from, MODEL_FOLDER_FILES[i], to, MODEL_FOLDER_FILES[i], error)) return false;
    }
    return copy_one(from, "encoder.json", to, "vocab.json", error) &&
           copy_one(from, "vocab.bpe", to, "merges.txt", error);
}

bool tokenizer_write_bytes(const char* folder, char* error) {
    static const char config[] = "{\"tokenizer_class\": \"PreTrainedTokenizerFast\"}\n";
    static const char level[] = "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true}";
    SCOPED char* text;
    size_t length;
    FILE* file = text_stream(&text, &length);
    fprintf(file, "{\"version\": \"1.0\", \"added_tokens\": [], \"pre_tokenizer\": %s, \"decoder\": %s,\n", level,
            level);
    fputs("\"model\": {\"type\": \"BPE\", \"merges\": [], \"vocab\": {", file);
    const char* separator = "";
    for (uint32_t point = 0; point < 256 + 68; point++) {
        if (byte_of(point) < 0) continue;
        const char character[] = {point < 0x80 ? (char)point : (char)(0xC0 | point >> 6),
                                  point < 0x80 ? 0 : (char)(0x80 | (point & 0x3F)), 0};
        fputs(separator, file);
        json_write_string(file, character);
        fprintf(file, ": %d", byte_of(point));
        separator = ", ";
    }
    fputs("}}}\n", file);
    fclose(file);
    return file_write(path_in(folder, "tokenizer.json"), text, (int64_t)length, error) &&
           file_write(path_in(folder, "tokenizer_config.json"), config, sizeof(config) - 1, error);
}

const char* const SPECIAL_TOKEN_IDS[SPECIAL_TOKENS] = {"bos_token_id", "eos_token_id", "pad_token_id"};

bool tokenizer_special(const Tokenizer* tokenizer, const char* folder, SpecialTokens* tokens, char* error) {
    static const char* const files[] = {"special_tokens_map.json", "tokenizer_config.json"};
    static const char* const names[SPECIAL_TOKENS] = {"bos_token", "eos_token", "pad_token"};
    bool ok = true;
    for (int i = 0; i < SPECIAL_TOKENS; i++) tokens->id[i] = -1;
    for (int f = 0; f < 2 && tokenizer->slots > 0; f++) {
        const char* path = path_in(folder, files[f]);
        JSON_SCOPED Json* json = access(path, F_OK) == 0 ? json_read(path, error) : NULL;
        ok = ok && (json || access(path, F_OK) != 0);
        for (int i = 0; i < SPECIAL_TOKENS && json; i++) {
            const Json* text = json_get(json, names[i]);
            if (text && text->kind == JSON_OBJECT) text = json_get(text, "content");
            if (!text || text->kind != JSON_STRING || tokens->id[i] >= 0) continue;
            tokens->id[i] = tokenizer->slot[find_slot(tokenizer, text->text, text->text_bytes)];
        }
    }
    for (int i = 0; i < 2; i++) {
        if (tokens->id[i] < 0) tokens->id[i] = tokenizer->end;
    }
    return ok;
}

void tokenizer_close(Tokenizer* tokenizer) {
    if (!tokenizer) return;
    free(tokenizer->text), free(tokenizer->first), free(tokenizer->length), free(tokenizer->slot);
    free(tokenizer->added[0]), free(tokenizer->added[1]), free(tokenizer->merge), free(tokenizer);
}

int tokenizer_vocabulary(const Tokenizer* tokenizer) {
    return tokenizer->vocabulary;
}

int tokenizer_tokens(const Tokenizer* tokenizer) {
    return tokenizer->tokens;
}

int tokenizer_end(const Tokenizer* tokenizer) {
    return tokenizer->end;
}

const char* tokenizer_decode(const Tokenizer* tokenizer, int token, int* bytes) {
    bool known = token >= 0 && token < tokenizer->tokens;
    *bytes = known ? tokenizer->length[token] : 0;
    return known ? tokenizer->text + tokenizer->first[token] : "";
}

// Returns the class of a character, that of the run in which it is. The search is linear: prompts are short, and Latin
// letters are in the first of the 1,610 runs.
static CharClass class_of(uint32_t point) {
    const uint32_t* run = unicode_runs;
    while (point >= *run >> 2) point -= *run++ >> 2;
    return (CharClass)(*run & 3);
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
    // All spaces at the end of the text; otherwise all but the last, which begins the next word, if there are several.
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
            const Merge* merge = find_merge(tokenizer, token[i], token[i + 1]);
            rank[i] = merge->joined >= 0 ? merge->rank : none;
        }
        int64_t best = 0;
        for (int64_t i = 1; i < count - 1; i++) {
            if (rank[i] < rank[best]) best = i;
        }
        if (rank[best] == none) break;
        token[best] = find_merge(tokenizer, token[best], token[best + 1])->joined;
        int64_t moved = count - best - 2;
        memmove(token + best + 1, token + best + 2, (size_t)moved * sizeof(int));
        if (moved > 0) memmove(rank + best, rank + best + 1, (size_t)moved * sizeof(int));
        count--;
        refresh_first = best > 0 ? best - 1 : 0;
        refresh_last = best + 1 < count ? best + 1 : count - 1;
    }
    return count;
}

// The state of one tokenizer_encode.
typedef struct {
    const Tokenizer* tokenizer;
    int *tokens, max;
    int64_t total;
    int *token, *rank;  // room for the longest word, which may be the whole text
    bool failed;        // a character has no token
} Encoding;

static void put_token(Encoding* e, int token) {
    if (e->total < e->max) e->tokens[e->total] = token;
    e->total++;
}

// Encodes a text that has no added token.
static void encode_plain(Encoding* e, const char* text, int64_t bytes) {
    const Tokenizer* tokenizer = e->tokenizer;
    for (int64_t at = 0, count; at < bytes; at += count) {
        uint32_t point;
        if (tokenizer->slots > 0 && !tokenizer->merge) {
            count = utf8_next(text + at, bytes - at, &point);
            const int token = tokenizer->slot[find_slot(tokenizer, text + at, count)];
            if (token < 0) e->failed = true, count = 1;
            put_token(e, token);
            continue;
        }
        count = tokenizer->merge ? word_bytes(text + at, bytes - at) : bytes - at;
        for (int64_t i = 0; i < count; i++) e->token[i] = tokenizer->byte[(unsigned char)text[at + i]];
        const int64_t joined = tokenizer->merge ? join_word(tokenizer, e->token, e->rank, count) : count;
        for (int64_t i = 0; i < joined; i++) put_token(e, e->token[i]);
    }
}

// Encodes a text that is cut at the added tokens of list `list` and, between them, of those after it. The first place
// counts, and there the longest.
static void encode_from(Encoding* e, const char* text, int64_t bytes, int list) {
    const Tokenizer* tokenizer = e->tokenizer;
    while (list < 2 && tokenizer->adds[list] == 0) list++;
    if (list == 2) return encode_plain(e, text, bytes);
    int64_t begin = 0;
    for (int64_t at = 0; at < bytes; at++) {
        int best = -1, longest = 0;
        for (int i = 0; i < tokenizer->adds[list]; i++) {
            const int token = tokenizer->added[list][i], length = tokenizer->length[token];
            if (length <= longest || length > bytes - at) continue;
            if (memcmp(text + at, tokenizer->text + tokenizer->first[token], (size_t)length) == 0)
                best = token, longest = length;
        }
        if (best < 0) continue;
        encode_from(e, text + begin, at - begin, list + 1);
        put_token(e, best);
        begin = at + longest, at = begin - 1;
    }
    encode_from(e, text + begin, bytes - begin, list + 1);
}

int tokenizer_encode(const Tokenizer* tokenizer, const char* text, int64_t bytes, int* tokens, int max) {
    if (!tokenizer->encodes) return -1;
    SCOPED int* token = memory_take(2 * (size_t)(bytes + 1) * sizeof(int));
    Encoding e = {tokenizer, tokens, max, 0, token, token + bytes + 1, false};
    encode_from(&e, text, bytes, 0);
    return e.failed ? -1 : (int)e.total;
}

Tokenizer* tokenizer_open_for(const char* folder, int vocabulary, char* error) {
    Tokenizer* tokenizer = tokenizer_open(vocabulary == 256 && !tokenizer_exists(folder) ? NULL : folder, error);
    if (!tokenizer || tokenizer->vocabulary <= vocabulary) return tokenizer;
    data_error(error, "its tokenizer has %d tokens and its vocab_size is %d; put the tokenizer of the model there",
               tokenizer->vocabulary, vocabulary);
    return tokenizer_close(tokenizer), NULL;
}

int tokenizer_prompt(const Tokenizer* tokenizer, const char* prompt, int V, int* tokens, int max) {
    const int end = tokenizer->end, begin = end >= 0 && end < V;
    if (begin) tokens[0] = end;
    if (!begin && !*prompt) {  // something must come first: a line end where there is one
        if (tokenizer_encode(tokenizer, "\n", 1, tokens, 1) < 1 || tokens[0] >= V) tokens[0] = 0;
        return 1;
    }
    const int encoded = tokenizer_encode(tokenizer, prompt, (int64_t)strlen(prompt), tokens + begin, max - begin);
    return encoded < 0 ? -1 : begin + encoded;
}
