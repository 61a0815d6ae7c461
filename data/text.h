// Texts: UTF-8, what may be shown on a terminal, the distance of two names for suggestions, and a checksum.
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "linkage.h"

// Returns how many edits (insert, delete or replace a letter) turn a into b, of which only the first 63 letters count.
static inline int edit_distance(const char* a, size_t a_letters, const char* b, size_t b_letters) {
    int row[64], length = (int)(b_letters < 63 ? b_letters : 63);
    for (int j = 0; j <= length; j++) row[j] = j;
    for (size_t i = 1; i <= a_letters; i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (int j = 1; j <= length; j++) {
            int change = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < change) change = row[j] + 1;
            if (row[j - 1] + 1 < change) change = row[j - 1] + 1;
            row[j] = change;
        }
    }
    return row[length];
}

// Returns FNV-1a in 64 bits. Checkpoints hold it, so it stays as it is.
static inline uint64_t text_hash(const char* text, int64_t bytes) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (int64_t i = 0; i < bytes; i++) hash = (hash ^ (unsigned char)text[i]) * 0x100000001b3u;
    return hash;
}

// Returns splitmix64's finalizer of z: every bit of z affects every bit of the result.
static inline uint64_t bits_mix(uint64_t z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

C_LINKAGE_BEGIN

// Finds the code point at text[0..bytes). Returns its length: 1 to 4 bytes, or 0 where there is no well-formed UTF-8.
int utf8_next(const char* text, int64_t bytes, uint32_t* point);
// Returns whether all of the text is well-formed UTF-8.
bool text_is_utf8(const char* text, int64_t bytes);
// Returns whether the text ends with `end`.
bool text_ends(const char* text, const char* end);
// Takes the first word of a list, whose words have `between` between two; kept as by text_kept. NULL: there is none
// left.
const char* text_word(const char** list, char between);
// Returns whether such a list has the text as a word.
bool text_among(const char* text, const char* list, char between);
// Writes the shortest decimal that reads back as the same number. Returns `text`.
const char* number_text(double number, char* text, size_t bytes);
// Replaces what could control a terminal in a text from elsewhere (control characters, and bytes that are not UTF-8) by
// '?'. Newlines and tabs stay if `lines`.
void text_disarm(char* text, bool lines);
// Prints a text from elsewhere, which may end within a character: as it is, but on a terminal with text_disarm. Returns
// how many bytes at its end are a begun character, which a terminal does not get.
size_t text_print(FILE* to, const char* text, size_t bytes);

C_LINKAGE_END
