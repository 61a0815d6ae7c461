// The tests of the command line, of text and of tokenizers share this: a folder with a text, shards, a small tokenizer,
// and changes to a checkpoint.
#pragma once
#include "../../data/checkpoint.h"
#include "files.h"

inline void write_words(const char* folder, const char* name, int sentences) {
    static const char* const words[] = {"the", "fox", "sees", "a", "dog", "and", "the", "quick", "bird", "sleeps"};
    put_text(joined(folder, name), printed([&](FILE* file) {
                 for (int i = 0; i < 8 * sentences; i++)
                     fprintf(file, "%s%s", words[(int)((1 + test_uniform(17, i)) * 5)], i % 8 == 7 ? ".\n" : " ");
             }));
}

inline const char* work_folder() {
    const char* path = new_folder();
    write_words(path, "text.txt", 500);
    return path;
}

#define FOLDER_TEST(NAME) TEST_IN(NAME, work, work_folder())

// Writes llm.c's shard of `tokens` tokens, which repeat with a period of 7 but for the last one, `last`.
inline void write_shard(const char* folder, const char* name, int tokens, int last) {
    const auto token = [=](int64_t i) { return i == tokens - 1 ? last : (int)(40 * (i % 7) + 3); };
    put_shard(joined(folder, name), 0, tokens, token);
}

// A small tokenizer has these tokens: all bytes, "th", "the" and <|endoftext|>.
constexpr int VOCABULARY = 259, END = 258;

// Appends the UTF-8 of a character. Returns where it ends.
inline char* put_character(char* to, uint32_t point) {
    static const int lead[] = {0, 0xC0, 0xE0, 0xF0};
    const int more = point < 0x80 ? 0 : point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
    *to++ = (char)(lead[more] | point >> 6 * more);
    for (int i = more - 1; i >= 0; i--) *to++ = (char)(0x80 | (point >> 6 * i & 63));
    return to;
}

// The files of a tokenizer spell each byte as the printable character that stands for it.
inline void name_bytes(char (*name)[8]) {
    for (uint32_t byte = 0, other = 256; byte < 256; byte++) {
        const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
        *put_character(name[byte], printable ? byte : other++) = 0;
    }
}

// Prints the beginning of vocab.json: all bytes, whose tokens are their numbers.
inline void print_bytes(FILE* file) {
    char name[256][8];
    name_bytes(name);
    for (int byte = 0; byte < 256; byte++) {
        fputs(byte ? ", " : "{", file);
        json_write_string(file, name[byte]);
        fprintf(file, ": %d", byte);
    }
}

// Writes it as vocab.json and merges.txt or, if `whole`, as tokenizer.json.
inline void write_tokenizer(const char* folder, bool whole = false, const char* pre_tokenizer = "") {
    FILE* file = fopen(joined(folder, whole ? "tokenizer.json" : "vocab.json"), "w");
    if (whole) {
        fprintf(file,
                "{\"added_tokens\": [{\"id\": %d, \"content\": \"<|endoftext|>\"}, {\"id\": 259, \"content\": "
                "\"<pad>\"}], \"normalizer\": null, \"pre_tokenizer\": %s, \"model\": {\"type\": \"BPE\", \"merges\": "
                "[\"t h\", [\"th\", \"e\"]], \"vocab\": ",
                END, pre_tokenizer);
    }
    print_bytes(file);
    fprintf(file, ", \"th\": 256, \"the\": 257, \"<|endoftext|>\": %d}%s", END, whole ? "}}" : "");
    fclose(file);
    if (!whole) put_text(joined(folder, "merges.txt"), "#version: 0.2\nt h\nth e\n");
}

// Replaces words in a checkpoint's state.json, and writes the checksum that it then has.
inline void rewrite_state(const char* folder, const char* from, const char* to) {
    const char *text = contents(folder, "state.json"), *changed = replaced(text, from, to), *seal = nullptr;
    for (const char* at = changed; (at = strstr(at, "\n\"crc32c\": ")) != nullptr; at++) seal = at + 1;
    if (!strstr(text, from) || !seal) abort();
    const uint32_t crc = crc32c(0, changed, seal - changed);
    put_text(joined(folder, "state.json"), formatted("%.*s\"crc32c\": %u\n}\n", (int)(seal - changed), changed, crc));
}
