// JSON (RFC 8259): text -> tree -> text.
//
// The time is linear in the text's length. The parser and json_free recurse once per nesting level; MAX_DEPTH bounds
// their stack. It refuses anything after the value, control characters and lone surrogates in strings, NUL in a key
// (keys are C strings), and numbers such as 01, .5, 1. or +1.
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "files.h"
#include "json.h"
#include "text.h"

enum { MAX_DEPTH = 256 };

// The first problem ends the text where it is, so that nothing more is read.
typedef struct {
    const char *at, *end;
    const char* problem;  // NULL: none so far
} Parser;

static bool fail(Parser* parser, const char* problem) {
    if (!parser->problem) parser->problem = problem, parser->end = parser->at;
    return false;
}

// Returns the next character; 0 at the end.
static char peek(const Parser* parser) {
    return parser->at < parser->end ? *parser->at : 0;
}

// Steps over the next character if it is `c`.
static bool take(Parser* parser, char c) {
    const bool is_next = parser->at < parser->end && *parser->at == c;
    parser->at += is_next;
    return is_next;
}

static void skip_space(Parser* parser) {
    while (take(parser, ' ') || take(parser, '\n') || take(parser, '\t') || take(parser, '\r')) continue;
}

static void take_digits(Parser* parser, const char* problem) {
    if (peek(parser) < '0' || peek(parser) > '9') fail(parser, problem);
    while (peek(parser) >= '0' && peek(parser) <= '9') parser->at++;
}

static char* utf8_write(char* to, uint32_t point) {
    static const unsigned char lead[] = {0, 0xC0, 0xE0, 0xF0};
    const int more = (point >= 0x80) + (point >= 0x800) + (point >= 0x10000);  // bytes after the first
    *to++ = (char)(lead[more] | point >> 6 * more);
    for (int i = more - 1; i >= 0; i--) *to++ = (char)(0x80 | (point >> 6 * i & 0x3F));
    return to;
}

// The four hexadecimal digits after \u; 0 when they are not there.
static uint32_t parse_hex(Parser* parser) {
    uint32_t value = 0;
    for (int i = 0; i < 4; i++, parser->at++) {
        const int c = (unsigned char)peek(parser);
        if (!isxdigit(c)) return fail(parser, "\\u without four hexadecimal digits");
        value = value << 4 | (uint32_t)(c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
    }
    return value;
}

// One escape; parser->at stands after the backslash. Returns where to write on.
static char* parse_escape(Parser* parser, char* to) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    const char c = peek(parser), *name = c ? strchr(names, c) : NULL;
    if (!name && c != 'u') return fail(parser, "an unknown escape"), to;
    parser->at++;
    if (name) return *to = values[name - names], to + 1;
    uint32_t point = parse_hex(parser);
    if (point >= 0xD800 && point < 0xE000) {
        const bool pair = point < 0xDC00 && take(parser, '\\') && take(parser, 'u');
        const uint32_t low = pair ? parse_hex(parser) : 0;
        if (low < 0xDC00 || low >= 0xE000) fail(parser, "half of a surrogate pair");
        point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
    }
    return parser->problem ? to : utf8_write(to, point);
}

// Returns a string's text, which the caller frees; parser->at stands after the opening quote. Escapes only shrink it.
static char* parse_string(Parser* parser, int64_t* bytes) {
    const char* last = parser->at;
    while (last < parser->end && *last != '"') last += *last == '\\' && last + 1 < parser->end ? 2 : 1;
    char *text = memory_take((size_t)(last - parser->at) + 1), *to = text;
    while (!parser->problem && !take(parser, '"')) {
        if (parser->at == parser->end) {
            fail(parser, "a string without its closing quote");
        } else if ((unsigned char)*parser->at < 0x20) {
            fail(parser, "a control character in a string");
        } else if (take(parser, '\\')) {
            to = parse_escape(parser, to);
        } else {
            *to++ = *parser->at++;
        }
    }
    *to = 0;
    *bytes = to - text;
    return text;
}

static void parse_number(Parser* parser, Json* json) {
    const char* first = parser->at;
    take(parser, '-');
    if (!take(parser, '0')) take_digits(parser, "something that is no value");
    if (take(parser, '.')) take_digits(parser, "a number without digits after its point");
    if (take(parser, 'e') || take(parser, 'E')) {
        if (!take(parser, '+')) take(parser, '-');
        take_digits(parser, "a number without digits in its exponent");
    }
    json->kind = JSON_NUMBER;
    json->text_bytes = parser->at - first;
    json->text = text_part(first, (size_t)json->text_bytes);
    json->number = strtod(json->text, NULL);
}

static void parse_value(Parser* parser, Json* json, int depth);

// The members of an object or the elements of an array; parser->at stands after the opening bracket.
static void parse_children(Parser* parser, Json* json, int depth) {
    const bool object = json->kind == JSON_OBJECT;
    const char close = object ? '}' : ']';
    Json** link = &json->child;
    if (depth >= MAX_DEPTH) fail(parser, "nesting deeper than 256 levels");
    skip_space(parser);
    if (take(parser, close)) return;
    while (!parser->problem) {
        Json* child = *link = memory_zero(1, sizeof(Json));
        link = &child->next;
        skip_space(parser);
        if (object) {
            int64_t bytes = 0;
            if (!take(parser, '"')) fail(parser, "no quoted key");
            child->key = parse_string(parser, &bytes);
            if ((int64_t)strlen(child->key) != bytes) fail(parser, "a key that holds \\u0000");
            skip_space(parser);
            if (!take(parser, ':')) fail(parser, "no ':' after a key");
        }
        parse_value(parser, child, depth + 1);
        skip_space(parser);
        if (take(parser, close)) return;
        if (!take(parser, ',')) fail(parser, object ? "neither ',' nor '}' after a member" : "neither ',' nor ']'");
    }
}

static bool take_word(Parser* parser, const char* word) {
    const size_t length = strlen(word);
    if ((size_t)(parser->end - parser->at) < length || memcmp(parser->at, word, length) != 0) return false;
    parser->at += length;
    return true;
}

static void parse_value(Parser* parser, Json* json, int depth) {
    skip_space(parser);
    if (take(parser, '{')) return json->kind = JSON_OBJECT, parse_children(parser, json, depth);
    if (take(parser, '[')) return json->kind = JSON_ARRAY, parse_children(parser, json, depth);
    if (take(parser, '"')) {
        json->kind = JSON_STRING;
        json->text = parse_string(parser, &json->text_bytes);
    } else if (take_word(parser, "true")) {
        json->kind = JSON_BOOL, json->number = 1;
    } else if (take_word(parser, "false")) {
        json->kind = JSON_BOOL;
    } else if (!take_word(parser, "null")) {  // a new one is null
        parse_number(parser, json);
    }
}

Json* json_parse(const char* text, int64_t bytes, const char* what, char* error) {
    Json* json = memory_zero(1, sizeof(Json));
    Parser parser = {text, text + bytes, NULL};
    parse_value(&parser, json, 0);
    skip_space(&parser);
    if (parser.at < parser.end) fail(&parser, "something after the end of the value");
    if (!parser.problem) return json;
    int64_t line = 1, column = 1;
    for (const char* c = text; c < parser.end; c++) {
        column++;
        if (*c == '\n') line++, column = 1;
    }
    const char* where = parser.end == text + bytes ? ", where the text ends" : "";
    data_error(error, "%s is not valid JSON: %s at line %lld, column %lld%s", what, parser.problem, (long long)line,
               (long long)column, where);
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

char* json_text(const Json* json) {
    char* text;
    size_t bytes;
    FILE* file = text_stream(&text, &bytes);
    json_write(file, json);
    fclose(file);
    return text;
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
