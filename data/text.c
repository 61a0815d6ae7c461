#include "text.h"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "memory.h"

int utf8_next(const char* text, int64_t bytes, uint32_t* point) {
    const unsigned char* b = (const unsigned char*)text;
    if (bytes < 1) return 0;
    if (b[0] < 0x80) return *point = b[0], 1;
    int length = b[0] >= 0xF0 ? 4 : b[0] >= 0xE0 ? 3 : 2;
    if (b[0] < 0xC2 || b[0] > 0xF4 || length > bytes) return 0;
    uint32_t value = b[0] & (0x7F >> length);
    for (int i = 1; i < length; i++) {
        if ((b[i] & 0xC0) != 0x80) return 0;
        value = value << 6 | (b[i] & 0x3F);
    }
    if ((length == 3 && value < 0x800) || (length == 4 && value < 0x10000)) return 0;  // longer than it need be
    if (value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) return 0;
    return *point = value, length;
}

bool text_is_utf8(const char* text, int64_t bytes) {
    uint32_t point;
    for (int length; bytes > 0; text += length, bytes -= length) {
        length = utf8_next(text, bytes, &point);
        if (length == 0) return false;
    }
    return true;
}

bool text_ends(const char* text, const char* end) {
    const size_t length = strlen(text), tail = strlen(end);
    return length >= tail && strcmp(text + length - tail, end) == 0;
}

const char* text_word(const char** list, char between) {
    const char *word = *list, *end = word ? strchrnul(word, between) : NULL;
    *list = end && *end ? end + 1 : NULL;
    return word ? text_kept("%.*s", (int)(end - word), word) : NULL;
}

bool text_among(const char* text, const char* list, char between) {
    const char* word = text_word(&list, between);
    while (word && strcmp(word, text) != 0) word = text_word(&list, between);
    return word != NULL;
}

const char* number_text(double number, char* text, size_t bytes) {
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, bytes, "%.*g", digits, number);
        if (strtod(text, NULL) == number) break;
    }
    return text;
}

void text_disarm(char* text, bool lines) {
    uint32_t point = 0;
    int64_t left = (int64_t)strlen(text);
    for (int length; left > 0; text += length, left -= length) {
        length = utf8_next(text, left, &point);
        bool kept = lines && (*text == '\n' || *text == '\t');
        bool control = point < 0x20 || (point >= 0x7f && point < 0xa0);
        bool turns = (point >= 0x200e && point <= 0x200f) || (point >= 0x2028 && point <= 0x202e) ||
                     (point >= 0x2066 && point <= 0x2069);  // other lines, and other directions of writing
        if (length > 0 && (kept || (!control && !turns))) continue;
        if (length == 0) length = 1;
        memset(text, '?', (size_t)length);
    }
}

size_t text_print(FILE* to, const char* text, size_t bytes) {
    if (!isatty(fileno(to))) return fwrite(text, 1, bytes, to), 0;
    size_t begun = 0;
    for (size_t n = 1; n <= 3 && n <= bytes; n++) {
        const unsigned char byte = (unsigned char)text[bytes - n];
        if ((byte & 0xC0) == 0x80) continue;
        begun = byte >= 0xC0 && n < (byte >= 0xF0 ? 4u : byte >= 0xE0 ? 3u : 2u) ? n : 0;
        break;
    }
    char* shown = memory_take(bytes + 1);
    for (size_t i = 0; i < bytes - begun; i++) shown[i] = text[i] ? text[i] : '?';
    shown[bytes - begun] = 0;
    text_disarm(shown, true);
    fputs(shown, to);
    free(shown);
    return begun;
}
