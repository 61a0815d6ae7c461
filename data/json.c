// JSON (RFC 8259): text -> tree -> text.
//
// The time is linear in the text's length. The parser and json_free recurse once per nesting level; MAX_DEPTH bounds
// their stack. It refuses anything after the value, control characters and lone surrogates in strings, NUL in a key
// (keys are C strings), and numbers such as 01, .5, 1. or +1.
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "files.h"
#include "json.h"
#include "text.h"

enum { MAX_DEPTH = 256 };

typedef struct {
    const char *begin, *at, *end;
    const char* what;
    char* error;
} Parser;

// Says where: the line and column of parser->at, both from 1.
static bool parse_error(Parser* parser, const char* problem) {
    int64_t line = 1, column = 1;
    for (const char* c = parser->begin; c < parser->at; c++) {
        column++;
        if (*c == '\n') line++, column = 1;
    }
    const char* where = parser->at == parser->end ? ", where the text ends" : "";
    return data_error(parser->error, "%s is not valid JSON: %s at line %lld, column %lld%s", parser->what, problem,
                      (long long)line, (long long)column, where);
}

static bool is_digit(const Parser* parser) {
    return parser->at < parser->end && *parser->at >= '0' && *parser->at <= '9';
}

// Steps over the next character if it is `c`.
static bool take(Parser* parser, char c) {
    const bool is_next = parser->at < parser->end && *parser->at == c;
    parser->at += is_next;
    return is_next;
}

static void skip_digits(Parser* parser) {
    while (is_digit(parser)) parser->at++;
}

static void skip_space(Parser* parser) {
    while (take(parser, ' ') || take(parser, '\n') || take(parser, '\t') || take(parser, '\r')) continue;
}

static char* utf8_write(char* to, uint32_t point) {
    static const unsigned char lead[] = {0, 0xC0, 0xE0, 0xF0};
    const int more = (point >= 0x80) + (point >= 0x800) + (point >= 0x10000);  // bytes after the first
    *to++ = (char)(lead[more] | point >> 6 * more);
    for (int i = more - 1; i >= 0; i--) *to++ = (char)(0x80 | (point >> 6 * i & 0x3F));
    return to;
}

// The four hexadecimal digits after \u; -1 when they are not there.
static int parse_hex(Parser* parser) {
    int value = 0;
    if (parser->end - parser->at < 4) return -1;
    for (int i = 0; i < 4; i++, parser->at++) {
        char c = *parser->at;
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c - 'A' + 10;
        if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'))) return -1;
        value = value << 4 | digit;
    }
    return value;
}

// One escape; parser->at stands after the backslash. Returns where to write on, NULL when it is malformed.
static char* parse_escape(Parser* parser, char* to) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    if (parser->at == parser->end) return parse_error(parser, "an unfinished escape"), NULL;
    char c = *parser->at++;
    const char* name = c ? strchr(names, c) : NULL;
    if (name) {
        *to++ = values[name - names];
        return to;
    }
    if (c != 'u') return parse_error(parser, "an unknown escape"), NULL;
    int point = parse_hex(parser);
    if (point < 0) return parse_error(parser, "\\u without four hexadecimal digits"), NULL;
    if (point >= 0xD800 && point < 0xE000) {
        int low = -1;
        if (point < 0xDC00 && parser->end - parser->at >= 6 && parser->at[0] == '\\' && parser->at[1] == 'u') {
            parser->at += 2;
            low = parse_hex(parser);
        }
        if (low < 0xDC00 || low >= 0xE000) return parse_error(parser, "half of a surrogate pair"), NULL;
        point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
    }
    return utf8_write(to, (uint32_t)point);
}

// Returns a string's text, which the caller frees; parser->at stands at the opening quote. Escapes only shrink it.
static char* parse_string(Parser* parser, int64_t* bytes) {
    const char* first = parser->at + 1;
    const char* last = first;
    while (last < parser->end && *last != '"') last += *last == '\\' && last + 1 < parser->end ? 2 : 1;
    if (last >= parser->end) return parse_error(parser, "a string without its closing quote"), NULL;
    char *text = memory_take((size_t)(last - first) + 1), *to = text;
    parser->at = first;
    while (to && !take(parser, '"')) {
        if ((unsigned char)*parser->at < 0x20) {
            parse_error(parser, "a control character in a string");
            to = NULL;
        } else if (take(parser, '\\')) {
            to = parse_escape(parser, to);
        } else {
            *to++ = *parser->at++;
        }
    }
    if (!to) return free(text), NULL;
    *to = 0;
    *bytes = to - text;
    return text;
}

static bool parse_number(Parser* parser, Json* json) {
    const char* first = parser->at;
    bool integer = true;
    take(parser, '-');
    if (!is_digit(parser)) return parse_error(parser, "something that is no value");
    if (!take(parser, '0')) skip_digits(parser);
    if (take(parser, '.')) {
        integer = false;
        if (!is_digit(parser)) return parse_error(parser, "a number without digits after its point");
        skip_digits(parser);
    }
    if (take(parser, 'e') || take(parser, 'E')) {
        integer = false;
        if (!take(parser, '+')) take(parser, '-');
        if (!is_digit(parser)) return parse_error(parser, "a number without digits in its exponent");
        skip_digits(parser);
    }
    int64_t length = parser->at - first;
    json->kind = JSON_NUMBER;
    json->text_bytes = length;
    json->text = text_part(first, (size_t)length);
    // strtod costs most of the parse of a vocabulary; small integers are exact in a double either way.
    json->number = integer && length <= 15 ? (double)atoll(json->text) : strtod(json->text, NULL);
    return true;
}

static bool parse_value(Parser* parser, Json* json, int depth);

// The members of an object or the elements of an array; parser->at stands after the opening bracket.
static bool parse_children(Parser* parser, Json* json, int depth) {
    bool object = json->kind == JSON_OBJECT;
    char close = object ? '}' : ']';
    Json** link = &json->child;
    if (depth >= MAX_DEPTH) return parse_error(parser, "nesting deeper than 256 levels");
    skip_space(parser);
    if (take(parser, close)) return true;
    for (;;) {
        Json* child = *link = memory_zero(1, sizeof(Json));
        link = &child->next;
        skip_space(parser);
        if (object) {
            int64_t bytes = 0;
            if (parser->at == parser->end || *parser->at != '"') return parse_error(parser, "no quoted key");
            child->key = parse_string(parser, &bytes);
            if (!child->key) return false;
            if ((int64_t)strlen(child->key) != bytes) return parse_error(parser, "a key that holds \\u0000");
            skip_space(parser);
            if (!take(parser, ':')) return parse_error(parser, "no ':' after a key");
        }
        if (!parse_value(parser, child, depth + 1)) return false;
        skip_space(parser);
        if (take(parser, close)) return true;
        if (!take(parser, ',')) {
            return parse_error(parser, object ? "neither ',' nor '}' after a member" : "neither ',' nor ']'");
        }
    }
}

// Takes a word if it is next.
static bool parse_word(Parser* parser, Json* json, const char* word, JsonKind kind, double number) {
    int64_t length = (int64_t)strlen(word);
    if (parser->end - parser->at < length || memcmp(parser->at, word, (size_t)length) != 0) return false;
    parser->at += length;
    json->kind = kind;
    json->number = number;
    return true;
}

static bool parse_value(Parser* parser, Json* json, int depth) {
    skip_space(parser);
    if (parser->at == parser->end) return parse_error(parser, "no value");
    if (*parser->at == '{' || *parser->at == '[') {
        json->kind = *parser->at++ == '{' ? JSON_OBJECT : JSON_ARRAY;
        return parse_children(parser, json, depth);
    }
    if (*parser->at == '"') {
        json->kind = JSON_STRING;
        json->text = parse_string(parser, &json->text_bytes);
        return json->text != NULL;
    }
    return parse_word(parser, json, "true", JSON_BOOL, 1.0) || parse_word(parser, json, "false", JSON_BOOL, 0.0) ||
           parse_word(parser, json, "null", JSON_NULL, 0.0) || parse_number(parser, json);
}

Json* json_parse(const char* text, int64_t bytes, const char* what, char* error) {
    Json* json = memory_zero(1, sizeof(Json));
    Parser parser = {text, text, text + bytes, what, error};
    bool ok = parse_value(&parser, json, 0);
    if (ok) skip_space(&parser);
    if (ok && parser.at == parser.end) return json;
    if (ok) parse_error(&parser, "something after the end of the value");
    return json_free(json), NULL;
}

Json* json_read(const char* path, char* error) {
    int64_t bytes = 0;
    SCOPED char* text = file_read(path, &bytes, error);
    return text ? json_parse(text, bytes, path, error) : NULL;
}

void json_free(Json* json) {
    if (!json) return;
    for (Json *child = json->child, *next; child; child = next) {
        next = child->next;
        json_free(child);
    }
    free(json->key), free(json->text), free(json);
}

void json_drop(Json** json) {
    json_free(*json);
}

const Json* json_get(const Json* object, const char* key) {
    if (!object || object->kind != JSON_OBJECT) return NULL;
    const Json* found = NULL;
    for (const Json* child = object->child; child; child = child->next) {
        if (strcmp(child->key, key) == 0) found = child;
    }
    return found;
}

double json_number(const Json* object, const char* key, double otherwise) {
    const Json* json = json_get(object, key);
    return json && (json->kind == JSON_NUMBER || json->kind == JSON_BOOL) ? json->number : otherwise;
}

int64_t json_int(const Json* object, const char* key, int64_t otherwise) {
    const Json* json = json_get(object, key);
    if (!json || json->kind != JSON_NUMBER) return otherwise;
    char* end = NULL;
    errno = 0;
    long long value = strtoll(json->text, &end, 10);
    if (*end == 0) return errno == 0 ? (int64_t)value : otherwise;
    // 1e6 and 3.0 are integers too, as far as a double is exact.
    bool exact = fabs(json->number) <= 9007199254740992.0 && json->number == floor(json->number);
    return exact ? (int64_t)json->number : otherwise;
}

const char* json_string(const Json* object, const char* key, const char* otherwise) {
    const Json* json = json_get(object, key);
    return json && json->kind == JSON_STRING ? json->text : otherwise;
}

static void write_string(FILE* file, const char* text, int64_t left) {
    fputc('"', file);
    while (left > 0) {
        uint32_t point = 0;
        int length = utf8_next(text, left, &point);
        if (length == 0) {
            length = 1;
            fputs("\xEF\xBF\xBD", file);
        } else if (point == '"' || point == '\\') {
            fprintf(file, "\\%c", (int)point);
        } else if (point == '\n') {
            fputs("\\n", file);
        } else if (point < 0x20 || point == 0x7F) {
            fprintf(file, "\\u%04x", point);
        } else {
            fwrite(text, 1, (size_t)length, file);
        }
        text += length;
        left -= length;
    }
    fputc('"', file);
}

void json_write_string(FILE* file, const char* text) {
    write_string(file, text, (int64_t)strlen(text));
}

void json_write(FILE* file, const Json* json) {
    const bool object = json->kind == JSON_OBJECT;
    if (json->kind == JSON_STRING) return write_string(file, json->text, json->text_bytes);
    if (!object && json->kind != JSON_ARRAY) {
        const char* word = json->kind == JSON_NULL ? "null" : json->number != 0 ? "true" : "false";
        fputs(json->kind == JSON_NUMBER ? json->text : word, file);
        return;
    }
    fputc(object ? '{' : '[', file);
    for (const Json* child = json->child; child; child = child->next) {
        if (object) json_write_string(file, child->key);
        if (object) fputs(": ", file);
        json_write(file, child);
        if (child->next) fputs(", ", file);
    }
    fputc(object ? '}' : ']', file);
}

void json_write_number(FILE* file, double value) {
    char text[32];
    if (!isfinite(value)) {
        fputs("null", file);
    } else if (value == floor(value) && fabs(value) <= 9007199254740992.0) {
        fprintf(file, "%.0f", value);
    } else {
        fputs(number_text(value, text, sizeof(text)), file);
    }
}

void json_write_text_member(FILE* file, const char* before, const char* name, const char* text) {
    fprintf(file, "%s\"%s\": ", before, name);
    json_write_string(file, text);
}

void json_write_number_member(FILE* file, const char* before, const char* name, double value) {
    fprintf(file, "%s\"%s\": ", before, name);
    json_write_number(file, value);
}
