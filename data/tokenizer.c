// Tokens <-> bytes: bytes themselves, or GPT-2's byte-pair encoding.
//
// Files: vocab.json maps every token's text to its number, in an alphabet where each byte is one printable character
// (the printable bytes of Latin-1 are themselves, the other 68 are U+0100 onwards in order); merges.txt lists pairs
// "left right", the earliest first. Both are read into one table of tokens, each with the rank of the merge that makes
// it, and a hash table from bytes to tokens (open addressing). Both have room for the largest vocabulary; what is not
// used takes no memory.
// Encoding cuts the text into words by GPT-2's pattern, which is written out by hand,
//     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// and, within a word, joins the adjacent pieces whose joined bytes are the token of the lowest rank, until none has a
// rank, as tiktoken does for data/prepare.py: O(n^2) in a word's length.
// unicode.h says which characters are letters, numbers and white space.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "model_folder.h"
#include "text.h"
#include "tokenizer.h"
#include "unicode.h"

enum { MAX_VOCABULARY = 1 << 18, SLOTS = 2 * MAX_VOCABULARY, UNRANKED = 0x7FFFFFFF };

typedef enum { LETTER, DIGIT, SPACE, OTHER } CharClass;  // as numbered in unicode.h

typedef struct {
    char* bytes;  // NULL: the number has no token
    int length;
    int rank;  // of the merge that makes it, from 1 on; 0: none does
} Token;

struct Tokenizer {
    int vocabulary;           // without tokens that were added later
    int tokens;               // with them
    int end;                  // <|endoftext|>, or -1
    bool encodes;             // there are merges, or each token is a byte or a character
    bool merges, characters;  // there are merges; each token is a character
    int *added, adds;         // tokens that were added later, at which a text is cut, and how many they are
    Token* token;             // (MAX_VOCABULARY)
    int* slot;                // (SLOTS) tokens by the hash of their bytes, plus one; 0: free
};

static const char* const end_of_text = "<|endoftext|>";

// The slot of a token with these bytes, or the free slot where it would go.
static int64_t find_slot(const Tokenizer* tokenizer, const char* bytes, int64_t count) {
    int64_t slot = (int64_t)(bits_mix(text_hash(bytes, count)) % SLOTS);
    for (; tokenizer->slot[slot] > 0; slot = (slot + 1) % SLOTS) {
        const Token* token = &tokenizer->token[tokenizer->slot[slot] - 1];
        if (token->length == count && memcmp(token->bytes, bytes, (size_t)count) == 0) break;
    }
    return slot;
}

// Returns the number of the token with these bytes, or -1.
static int find_token(const Tokenizer* tokenizer, const char* bytes, int64_t count) {
    return tokenizer->slot[find_slot(tokenizer, bytes, count)] - 1;
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

// Adds a token with this text in the alphabet. A text outside it was added by hand and stands for itself, and so does
// one that was `added` later. Like the functions below, it returns NULL, or what is wrong with the file.
static const char* token_add(Tokenizer* tokenizer, const char* text, int64_t count, double number, bool added) {
    if (!(number >= 0.0 && number < MAX_VOCABULARY && number == (double)(int)number))
        return text_kept("is no vocabulary: the number of token \"%.40s\" is not in 0 to %d", text, MAX_VOCABULARY - 1);
    const int at = (int)number;
    Token* token = &tokenizer->token[at];
    char* bytes = memory_take((size_t)count + 1);
    int64_t length = added ? -1 : to_bytes(text, count, bytes);
    if (length < 0) length = count, memcpy(bytes, text, (size_t)count);
    const bool same = token->length > 0 && token->length == length && memcmp(token->bytes, bytes, (size_t)length) == 0;
    if (token->length > 0 && !(added && same)) return free(bytes), text_kept("gives token %d to two texts", at);
    free(token->bytes);  // files list a token again that was added by hand
    *token = (Token){bytes, (int)length, 0};
    if (at >= tokenizer->tokens) tokenizer->tokens = at + 1;
    if (at >= tokenizer->vocabulary && !added) tokenizer->vocabulary = at + 1;
    if (length == 0) return NULL;
    tokenizer->slot[find_slot(tokenizer, bytes, length)] = at + 1;
    if (length == (int64_t)strlen(end_of_text) && memcmp(bytes, end_of_text, (size_t)length) == 0) {
        tokenizer->end = at;
    } else if (added) {
        tokenizer->added = memory_grow(tokenizer->added, (size_t)(tokenizer->adds + 1) * sizeof(int));
        tokenizer->added[tokenizer->adds++] = at;
    }
    return NULL;
}

static double number_of(const Json* json) {
    return json && json->kind == JSON_NUMBER ? json->number : -1;
}

// Adds the members of an object, text: number.
static const char* add_object(Tokenizer* tokenizer, const Json* json, bool added) {
    const char* wrong = json && json->kind == JSON_OBJECT ? NULL : "is no vocabulary: it is not a JSON object";
    for (const Json* one = wrong ? NULL : json->child; one && !wrong; one = one->next)
        wrong = token_add(tokenizer, one->key, (int64_t)strlen(one->key), number_of(one), added);
    return wrong || tokenizer->tokens > 0 ? wrong : "is no vocabulary: it is empty";
}

// Adds the list "added_tokens" of tokenizer.json, whose elements have an id and a content.
static const char* add_list(Tokenizer* tokenizer, const Json* list) {
    static const char* const flags[] = {"single_word", "lstrip", "rstrip"};
    const char* wrong = NULL;
    for (const Json* token = list ? list->child : NULL; token && !wrong; token = token->next) {
        const Json* content = json_get(token, "content");
        if (!content || content->kind != JSON_STRING || content->text_bytes == 0)
            return "has an added token without content";
        for (int i = 0; i < 3 && strcmp(content->text, end_of_text) != 0; i++) {
            if (!is_nothing(json_get(token, flags[i])))
                return text_kept("adds the token \"%.40s\" with %s, which nibble does not encode", content->text,
                                 flags[i]);
        }
        wrong = token_add(tokenizer, content->text, content->text_bytes, number_of(json_get(token, "id")), true);
    }
    return wrong;
}

// Enters a merge, "left right" in the alphabet. If several make a token, the first counts.
static bool read_merge(Tokenizer* tokenizer, const char* line, int64_t count, int rank) {
    SCOPED char* bytes = memory_take((size_t)count);
    const char* space = memchr(line, ' ', (size_t)count);
    const int64_t left = space ? to_bytes(line, space - line, bytes) : -1;
    const int64_t right = left > 0 ? to_bytes(space + 1, line + count - space - 1, bytes + left) : -1;
    if (right < 1 || find_token(tokenizer, bytes, left) < 0 || find_token(tokenizer, bytes + left, right) < 0)
        return false;
    const int joined = find_token(tokenizer, bytes, left + right);
    if (joined >= 0 && tokenizer->token[joined].rank == 0) tokenizer->token[joined].rank = rank;
    return joined >= 0;
}

// Reads the lines of merges.txt. The first one names the version; a later one may well begin with '#', a token like any
// other.
static const char* read_merges(Tokenizer* tokenizer, const char* text, int64_t bytes) {
    int rank = 1, number = 1;
    if ((int64_t)strlen(text) != bytes) return "is damaged: a byte of it is 0";
    for (const char* line = text; *line; line += strcspn(line, "\n"), line += *line == '\n', number++) {
        const int64_t length = (int64_t)strcspn(line, "\r\n");
        if (length == 0 || (number == 1 && strncmp(line, "#version", 8) == 0)) continue;
        if (!read_merge(tokenizer, line, length, rank++))
            return text_kept("has a line %d that is no pair of tokens whose joined text is a token", number);
    }
    return NULL;
}

// Reads tokenizer.json's list of merges: texts "left right", or pairs of texts.
static const char* list_merges(Tokenizer* tokenizer, const Json* list) {
    int rank = 1;
    if (!list || list->kind != JSON_ARRAY) return "holds no merges";
    for (const Json* merge = list->child; merge; merge = merge->next, rank++) {
        const Json *left = merge->kind == JSON_ARRAY ? merge->child : NULL, *right = left ? left->next : NULL;
        const bool pair = right && left->kind == JSON_STRING && right->kind == JSON_STRING;
        SCOPED char* line =
            pair ? text_format("%s %s", left->text, right->text) : text_copy(merge->text ? merge->text : "");
        if (!read_merge(tokenizer, line, (int64_t)strlen(line), rank))
            return text_kept("has a merge %d that is no pair of tokens whose joined text is a token", rank);
    }
    return NULL;
}

// True if tokenizer.json describes what the encoder here does: byte-pair encoding of bytes in GPT-2's words.
static bool is_of_gpt2(const Json* json) {
    static const char* const unknown[] = {"continuing_subword_prefix", "end_of_word_suffix", "byte_fallback",
                                          "ignore_merges", "dropout"};
    const Json *model = json_get(json, "model"), *cut = json_get(json, "pre_tokenizer");
    const Json* use_regex = json_get(cut, "use_regex");
    bool same = strcmp(json_string(model, "type", json_get(model, "merges") ? "BPE" : ""), "BPE") == 0 &&
                strcmp(json_string(cut, "type", ""), "ByteLevel") == 0 &&
                is_nothing(json_get(cut, "add_prefix_space")) && (!use_regex || use_regex->number != 0) &&
                is_nothing(json_get(json, "normalizer"));
    for (int i = 0; i < 5; i++) same = same && is_nothing(json_get(model, unknown[i]));
    return same;
}

// True if each token is one character, as in a vocabulary of nanoGPT's.
static bool is_of_characters(const Tokenizer* tokenizer) {
    uint32_t point;
    for (int i = 0; i < tokenizer->tokens; i++) {
        const Token* token = &tokenizer->token[i];
        if (token->length > 0 && utf8_next(token->bytes, token->length, &point) != token->length) return false;
    }
    return true;
}

// Says which bytes have no token of their own, which byte-pair encoding begins with; NULL: none.
static const char* bytes_missing(const Tokenizer* tokenizer) {
    for (int b = 0; b < 256; b++) {
        const char byte = (char)b;
        if (find_token(tokenizer, &byte, 1) < 0)
            return text_kept("belongs to a vocabulary without a token for byte %d", b);
    }
    return NULL;
}

// Reads tokenizer.json, or vocab.json, merges.txt, and the tokens that one of the others adds.
static bool open_folder(Tokenizer* tokenizer, const char* folder, char* error) {
    const char *path = path_there(folder, "vocab.json"), *whole = path_there(folder, "tokenizer.json"),
               *merges = path ? path_there(folder, "merges.txt") : NULL,
               *more = whole ? whole : path_there(folder, "added_tokens.json"), *wrong = NULL;
    const bool alone = whole && !merges;
    int64_t bytes = 0;
    if (!path && !whole) return data_error(error, "%s holds neither vocab.json nor tokenizer.json", folder);
    if (alone) path = whole;
    JSON_SCOPED Json* names = json_read(path, error);
    JSON_SCOPED Json* beside = names && more ? json_read(more, error) : NULL;
    SCOPED char* lines = names && merges ? file_read(merges, &bytes, error) : NULL;
    if (!names || (more && !beside) || (merges && !lines)) return false;
    const Json* model = json_get(names, "model");
    if (alone && !is_of_gpt2(names))
        wrong =
            "holds a tokenizer that is no byte-level BPE, normalizes text or cuts it into words otherwise than GPT-2's";
    if (!wrong) wrong = add_object(tokenizer, alone ? json_get(model, "vocab") : names, false);
    if (!wrong && more) {
        path = more;
        wrong = whole ? add_list(tokenizer, json_get(beside, "added_tokens")) : add_object(tokenizer, beside, true);
    }
    if (wrong) return data_error(error, "%s %s", path, wrong);
    tokenizer->merges = alone || merges;
    tokenizer->characters = !tokenizer->merges && is_of_characters(tokenizer);
    tokenizer->encodes = tokenizer->merges || tokenizer->characters;
    if (merges) path = merges;
    if (tokenizer->merges)
        wrong = alone ? list_merges(tokenizer, json_get(model, "merges")) : read_merges(tokenizer, lines, bytes);
    if (tokenizer->merges && !wrong) wrong = bytes_missing(tokenizer);
    return !wrong || data_error(error, "%s %s", path, wrong);
}

bool tokenizer_exists(const char* folder) {
    return *folder && (path_there(folder, "vocab.json") || path_there(folder, "tokenizer.json"));
}

Tokenizer* tokenizer_open(const char* folder, char* error) {
    Tokenizer* tokenizer = memory_zero(1, sizeof(Tokenizer));
    tokenizer->end = -1;
    tokenizer->token = memory_zero(MAX_VOCABULARY, sizeof(Token));
    tokenizer->slot = memory_zero(SLOTS, sizeof(int));
    if (folder && *folder) {
        if (open_folder(tokenizer, folder, error)) return tokenizer;
        tokenizer_close(tokenizer);
        return data_error(error, "%s; put the tokenizer's files there again, or name another folder", error), NULL;
    }
    for (int b = 0; b < 256; b++) token_add(tokenizer, &(char){(char)b}, 1, b, false);
    tokenizer->encodes = true;
    return tokenizer;
}

bool tokenizers_agree(const char* folder, const char* other) {
    char ignored[DATA_ERROR_BYTES];
    if (!tokenizer_exists(folder) || !tokenizer_exists(other) || strcmp(folder, other) == 0) return true;
    Tokenizer *mine = tokenizer_open(folder, ignored), *theirs = tokenizer_open(other, ignored);
    bool agree = true;
    for (int i = 0; mine && theirs && agree && i < mine->tokens && i < theirs->tokens; i++) {
        const Token *a = &mine->token[i], *b = &theirs->token[i];
        if (a->length == 0 || b->length == 0) continue;  // one of them has no such token
        agree = a->length == b->length && memcmp(a->bytes, b->bytes, (size_t)a->length) == 0;
    }
    tokenizer_close(mine), tokenizer_close(theirs);
    return agree;
}

// Copies FROM/NAME, if it exists, to TO/NAME unless that exists and `replace` is false. What is in TO then must be JSON
// if its name says so.
static bool copy_one(const char* from, const char* name, const char* to, bool replace, char* error) {
    const char *source = path_there(from, name), *target = path_in(to, name);
    const bool there = access(target, F_OK) == 0 && !(replace && source), json = text_ends(name, ".json");
    const char* path = there ? target : source;
    if (!path) return true;
    int64_t bytes;
    SCOPED char* text = file_read(path, &bytes, error);
    JSON_SCOPED Json* parsed = text && json ? json_parse(text, bytes, path, error) : NULL;
    if (!text || (json && !parsed)) return false;
    if (json && parsed->kind != JSON_OBJECT) {
        return data_error(error, "%s is no JSON object; fetch it again, or remove it", path);
    }
    return there || file_write(target, text, bytes, error);
}

bool tokenizer_files_copy(const char* from, const char* to, bool replace, char* error) {
    bool ok = true;
    for (int i = 0; ok && MODEL_FOLDER_FILES[i]; i++) ok = copy_one(from, MODEL_FOLDER_FILES[i], to, replace, error);
    return ok;
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
        fprintf(file, "%s\"\\u%04x\": %d", separator, point, byte_of(point));
        separator = ", ";
    }
    fputs("}}}\n", file);
    fclose(file);
    return file_write(path_in(folder, "tokenizer.json"), text, (int64_t)length, error) &&
           file_write(path_in(folder, "tokenizer_config.json"), config, sizeof(config) - 1, error);
}

void tokenizer_close(Tokenizer* tokenizer) {
    if (!tokenizer) return;
    for (int i = 0; i < tokenizer->tokens; i++) free(tokenizer->token[i].bytes);
    free(tokenizer->token), free(tokenizer->slot), free(tokenizer->added), free(tokenizer);
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
    bool known = token >= 0 && token < tokenizer->tokens && tokenizer->token[token].length > 0;
    *bytes = known ? tokenizer->token[token].length : 0;
    return known ? tokenizer->token[token].bytes : "";
}

// The class and, in *length, the size of the character at text[0..bytes), bytes > 0. A malformed byte is a symbol. The
// search is linear: prompts are short, and Latin letters are in the first of the 1,610 runs.
static CharClass next_class(const char* text, int64_t bytes, int* length) {
    uint32_t point = 0;
    const uint32_t* run = unicode_runs;
    *length = utf8_next(text, bytes, &point);
    if (*length == 0) {
        *length = 1;
        return OTHER;
    }
    while (point >= *run >> 2) point -= *run++ >> 2;
    return (CharClass)(*run & 3);
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

// Joins the pieces of one word in place; returns how many remain. Piece i has the bytes begin[i] to begin[i + 1] of the
// word, and rank[i] is that of the pair (i, i + 1).
static int64_t join_word(const Tokenizer* tokenizer, const char* word, int* begin, int* rank, int64_t count) {
    int64_t refresh_first = 0, refresh_last = count - 1;
    while (count > 1) {
        for (int64_t i = refresh_first; i < refresh_last; i++) {
            const int joined = find_token(tokenizer, word + begin[i], begin[i + 2] - begin[i]);
            rank[i] = joined >= 0 && tokenizer->token[joined].rank > 0 ? tokenizer->token[joined].rank : UNRANKED;
        }
        int64_t best = 0;
        for (int64_t i = 1; i < count - 1; i++) {
            if (rank[i] < rank[best]) best = i;
        }
        if (rank[best] == UNRANKED) break;
        const int64_t moved = count - best - 2;
        memmove(begin + best + 1, begin + best + 2, (size_t)(moved + 1) * sizeof(int));
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
    int *begin, *rank;  // room for the longest word, which may be the whole text
    bool failed;        // a character has no token
} Encoding;

static void put_token(Encoding* e, int token) {
    if (e->total < e->max) e->tokens[e->total] = token;
    e->total++;
}

// Encodes a text that has no added token.
static void encode_plain(Encoding* e, const char* text, int64_t bytes) {
    const Tokenizer* tokenizer = e->tokenizer;
    for (int64_t at = 0, size; at < bytes; at += size) {
        uint32_t point;
        int64_t count = 1;  // a byte, a character, or the bytes of a word
        size = tokenizer->characters ? utf8_next(text + at, bytes - at, &point) : 1;
        if (size == 0) size = 1;
        e->begin[0] = 0, e->begin[1] = (int)size;
        if (tokenizer->merges) {
            size = count = word_bytes(text + at, bytes - at);
            for (int64_t i = 0; i <= size; i++) e->begin[i] = (int)i;
            count = join_word(tokenizer, text + at, e->begin, e->rank, count);
        }
        for (int64_t i = 0; i < count; i++) {
            const int token = find_token(tokenizer, text + at + e->begin[i], e->begin[i + 1] - e->begin[i]);
            e->failed = e->failed || token < 0;
            put_token(e, token);
        }
    }
}

// Encodes a text, which is cut at added tokens. The first place counts, and there the longest.
static void encode_all(Encoding* e, const char* text, int64_t bytes) {
    const Tokenizer* tokenizer = e->tokenizer;
    int64_t begin = 0;
    for (int64_t at = 0; at < bytes && tokenizer->adds > 0; at++) {
        int best = -1, longest = 0;
        for (int i = 0; i < tokenizer->adds; i++) {
            const int token = tokenizer->added[i], length = tokenizer->token[token].length;
            if (length <= longest || length > bytes - at) continue;
            if (memcmp(text + at, tokenizer->token[token].bytes, (size_t)length) == 0) best = token, longest = length;
        }
        if (best < 0) continue;
        encode_plain(e, text + begin, at - begin);
        put_token(e, best);
        begin = at + longest, at = begin - 1;
    }
    encode_plain(e, text + begin, bytes - begin);
}

int tokenizer_encode(const Tokenizer* tokenizer, const char* text, int64_t bytes, int* tokens, int max) {
    if (!tokenizer->encodes) return -1;
    SCOPED int* begin = memory_take(2 * (size_t)(bytes + 2) * sizeof(int));
    Encoding e = {tokenizer, tokens, max, 0, begin, begin + bytes + 2, false};
    encode_all(&e, text, bytes);
    return e.failed ? -1 : (int)e.total;
}

Tokenizer* tokenizer_open_for(const char* folder, int vocabulary, char* error) {
    Tokenizer* tokenizer = tokenizer_open(vocabulary == 256 && !tokenizer_exists(folder) ? NULL : folder, error);
    if (!tokenizer || tokenizer->vocabulary <= vocabulary) return tokenizer;
    data_error(error, "its tokenizer has %d tokens and its vocab_size is %d; put the tokenizer of the model there",
               tokenizer->vocabulary, vocabulary);
    return tokenizer_close(tokenizer), NULL;
}

// Adds a prompt, after the end-of-text token if the vocabulary has it.
static bool prompts_add(Prompts* prompts, const char* text, const Tokenizer* tokenizer, int V, char* error) {
    const int at = prompts->count++, room = (int)strlen(text) + 16;
    prompts->text = memory_grow(prompts->text, (size_t)prompts->count * sizeof(char*));
    prompts->length = memory_grow(prompts->length, (size_t)prompts->count * sizeof(int));
    prompts->tokens = memory_grow(prompts->tokens, (size_t)(prompts->all + room) * sizeof(int));
    int* own = prompts->tokens + prompts->all;
    const int end = tokenizer ? tokenizer->end : -1, begins = end >= 0 && end < V;
    int length = 1;
    own[0] = begins ? end : 0;
    if (tokenizer && !begins && !*text) {  // something must come first: a line end where there is one
        if (tokenizer_encode(tokenizer, "\n", 1, own, 1) < 1 || own[0] >= V) own[0] = 0;
    } else if (tokenizer) {
        const int encoded = tokenizer_encode(tokenizer, text, (int64_t)strlen(text), own + begins, room - begins);
        length = encoded < 0 ? 0 : begins + encoded;
    }
    for (int i = 0; i < length && tokenizer; i++) {
        if (own[i] >= V)
            return data_error(error, "the prompt has token %d, and the model's vocabulary has %d; type another prompt",
                              own[i], V);
    }
    prompts->text[at] = text, prompts->length[at] = length, prompts->all += length;
    if (length > 0) return true;
    return data_error(error, !tokenizer->encodes
                                 ? "the prompt cannot be encoded without merges.txt; put it beside vocab.json"
                                 : "the prompt has a character that the model's vocabulary lacks; type another prompt");
}

bool prompts_open(Prompts* prompts, const char* text, const char* file, const Tokenizer* tokenizer, int V,
                  char* error) {
    int64_t bytes = 0;
    memset(prompts, 0, sizeof(*prompts));
    if (!*file) return prompts_add(prompts, text, tokenizer, V, error);
    SCOPED char* whole = file_read(file, &bytes, error);
    if (!whole) return data_error(error, "--prompt-file: %s; name a file of prompts, one a line", error);
    const char* line = strncmp(whole, "\xEF\xBB\xBF", 3) == 0 ? whole + 3 : whole;
    // A NUL would end its prompt.
    bool ok = strlen(whole) == (size_t)bytes && text_is_utf8(whole, bytes) && line[strspn(line, "\r\n")];
    if (!ok) data_error(error, "--prompt-file %s is no UTF-8 text, or empty; write prompts as UTF-8, one a line", file);
    for (const char* prompt; ok && (prompt = text_word(&line, '\n'));) {
        const int length = (int)strlen(prompt) - text_ends(prompt, "\r");
        if (length > 0) ok = prompts_add(prompts, text_kept("%.*s", length, prompt), tokenizer, V, error);
    }
    return ok;
}

void prompts_close(Prompts* prompts) {
    free(prompts->text), free(prompts->tokens), free(prompts->length);
    memset(prompts, 0, sizeof(*prompts));
}
