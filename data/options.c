// See options.h.
#include "options.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "../kernels/text.h"

static bool fail(char* error, const char* format, const char* a, const char* b, const char* c) {
    snprintf(error, DATA_ERROR_BYTES, format, a, b, c);
    return false;
}

const Option* option_find(const OptionTable* table, const char* name) {
    for (int i = 0; i < table->count; i++) {
        if (strcmp(table->option[i].name, name) == 0) return &table->option[i];
    }
    return NULL;
}

static const char* nearest_name(const OptionTable* table, const char* name) {
    const char* nearest = table->option[0].name;
    for (int i = 1; i < table->count; i++) {
        if (text_distance(name, table->option[i].name) < text_distance(name, nearest)) nearest = table->option[i].name;
    }
    return nearest;
}

// Is `text` one of the names in `values`, which '|' separates?
static bool choice_known(const char* text, const char* values) {
    size_t length = strlen(text);
    for (const char* at = values; at; at = strchr(at, '|') ? strchr(at, '|') + 1 : NULL) {
        if (length > 0 && strncmp(at, text, length) == 0 && (at[length] == '|' || at[length] == 0)) return true;
    }
    return false;
}

static bool is_utf8(const char* text) {
    uint32_t point;
    int64_t left = (int64_t)strlen(text);
    for (int length; left > 0; text += length, left -= length) {
        length = utf8_next(text, left, &point);
        if (length == 0) return false;
    }
    return true;
}

static bool set_number(const Option* option, void* field, const char* text, char* error) {
    char *end, range[64];
    errno = 0;
    double number = strtod(text, &end);
    int64_t whole = option->type == OPTION_INT ? strtoll(text, &end, 10) : 0;
    if (end == text || *end != 0 || !isfinite(number) || strpbrk(text, "xX")) {
        return fail(error, "--%s takes %s, not '%s'", option->name,
                    option->type == OPTION_INT ? "a whole number" : "a number", text);
    }
    if (number < option->low || number > option->high) {
        snprintf(range, sizeof(range), "%.12g to %.12g", option->low, option->high);
        return fail(error, "--%s %s is out of range; type a number from %s", option->name, text, range);
    }
    if (option->type == OPTION_INT) *(int64_t*)field = whole;
    if (option->type == OPTION_REAL) *(double*)field = number;
    return true;
}

bool option_set(const Option* option, void* fields, const char* text, char* error) {
    void* field = (char*)fields + option->offset;
    bool number = option->type == OPTION_INT || option->type == OPTION_REAL;
    if (number && strcmp(option->standard, "auto") == 0 && strcmp(text, "auto") == 0) {
        if (option->type == OPTION_INT) *(int64_t*)field = OPTION_AUTO;
        if (option->type == OPTION_REAL) *(double*)field = OPTION_AUTO;
        return true;
    }
    if (number) return set_number(option, field, text, error);
    if (option->type == OPTION_FLAG) {
        *(bool*)field = strcmp(text, "true") == 0;
        return true;
    }
    if (!is_utf8(text))
        return fail(error, "--%s is not UTF-8, which config.json is written in: %s%s", option->name, text, "");
    if (option->type == OPTION_CHOICE && !choice_known(text, option->values)) {
        return fail(error, "--%s '%s' is not known; type one of %s", option->name, text, option->values);
    }
    *(const char**)field = strdup(text);
    return true;
}

const char* option_text(const Option* option, const void* fields, char* text, size_t bytes) {
    const void* field = (const char*)fields + option->offset;
    bool automatic = (option->type == OPTION_INT && *(const int64_t*)field == OPTION_AUTO) ||
                     (option->type == OPTION_REAL && *(const double*)field == OPTION_AUTO);
    if (automatic) {
        snprintf(text, bytes, "auto");
    } else if (option->type == OPTION_FLAG) {
        snprintf(text, bytes, "%s", *(const bool*)field ? "true" : "false");
    } else if (option->type == OPTION_INT) {
        snprintf(text, bytes, "%lld", (long long)*(const int64_t*)field);
    } else if (option->type == OPTION_REAL) {
        // The shortest text that reads back as the same number.
        for (int digits = 1; digits <= 17; digits++) {
            snprintf(text, bytes, "%.*g", digits, *(const double*)field);
            if (strtod(text, NULL) == *(const double*)field) break;
        }
    } else {
        return *(const char* const*)field;
    }
    return text;
}

bool options_defaults(const OptionTable* table, void* fields, char* error) {
    for (int i = 0; i < table->count; i++) {
        if (!option_set(&table->option[i], fields, table->option[i].standard, error)) return false;
    }
    return true;
}

bool options_parse(const OptionTable* table, void* fields, bool* given, int argc, char** argv, char* error) {
    for (int i = 1; i < argc; i++) {
        const char* word = strcmp(argv[i], "-h") == 0 ? "--help" : argv[i];
        if (strncmp(word, "--", 2) != 0) {
            return fail(error, "'%s' is not an option; options begin with --, and --help lists them%s%s", word, "", "");
        }
        char name[64];
        const char* equals = strchr(word, '=');
        size_t length = equals ? (size_t)(equals - word - 2) : strlen(word + 2);
        snprintf(name, sizeof(name), "%.*s", (int)(length < 63 ? length : 63), word + 2);
        const Option* option = option_find(table, name);
        if (!option)
            return fail(error, "unknown option --%s; did you mean --%s? (--help lists all)%s", name,
                        nearest_name(table, name), "");
        given[option - table->option] = true;
        const char* value = equals ? equals + 1 : NULL;
        if (option->type == OPTION_FLAG) {
            if (value) return fail(error, "--%s takes no value; type --%s alone%s", name, name, "");
            value = "true";
        } else if (!value) {
            if (i + 1 == argc) return fail(error, "--%s needs a value: --%s %s", name, name, option->values);
            value = argv[++i];
            char other[64];
            snprintf(other, sizeof(other), "%.*s", (int)strcspn(value, "="), value);
            if (strncmp(other, "--", 2) == 0 && option_find(table, other + 2)) {
                return fail(error, "--%s needs a value and %s is an option; type --%s=... where that is meant", name,
                            value, name);
            }
        }
        if (!option_set(option, fields, value, error)) return false;
    }
    return true;
}

void options_help(const OptionTable* table, FILE* file) {
    for (int i = 0; i < table->count; i++) {
        const Option* option = &table->option[i];
        if (i == 0 || strcmp(option->group, option[-1].group) != 0) fprintf(file, "\n%s\n", option->group);
        char left[256];
        snprintf(left, sizeof(left), "--%s %s", option->name, option->values);
        if (strlen(left) > 38) fprintf(file, "  %s\n", left), left[0] = 0;
        fprintf(file, "  %-38s %s", left, option->help);
        if (option->standard[0]) fprintf(file, " [%s]", option->standard);
        fprintf(file, "\n");
    }
}

void options_json(const OptionTable* table, const void* fields, FILE* file) {
    const char* separator = "";
    fputc('{', file);
    for (int i = 0; i < table->count; i++) {
        if (table->option[i].type == OPTION_FLAG) continue;
        char text[OPTION_TEXT_BYTES];
        fprintf(file, "%s", separator);
        json_write_string(file, table->option[i].name);
        fputs(": ", file);
        json_write_string(file, option_text(&table->option[i], fields, text, sizeof(text)));
        separator = ", ";
    }
    fputc('}', file);
}

void format_count(double n, char* text, size_t bytes) {
    const char* unit = n >= 1e9 ? "B" : n >= 1e6 ? "M" : n >= 1e3 ? "k" : "";
    double scaled = n >= 1e9 ? n / 1e9 : n >= 1e6 ? n / 1e6 : n >= 1e3 ? n / 1e3 : n;
    snprintf(text, bytes,
             scaled < 10 && unit[0]    ? "%.2f%s"
             : scaled < 100 && unit[0] ? "%.1f%s"
                                       : "%.0f%s",
             scaled, unit);
}

void format_duration(double seconds, char* text, size_t bytes) {
    int64_t s = (int64_t)(seconds + 0.5);
    if (s < 60) snprintf(text, bytes, "%llds", (long long)s);
    if (s >= 60 && s < 3600) snprintf(text, bytes, "%lldm%02llds", (long long)(s / 60), (long long)(s % 60));
    if (s >= 3600) snprintf(text, bytes, "%lldh%02lldm", (long long)(s / 3600), (long long)(s / 60 % 60));
}

const char* shell_word(const char* text) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-";
    char* word = text[0] && !text[strspn(text, plain)] ? NULL : malloc(4 * strlen(text) + 3);
    if (!word) return text;
    char* to = word;
    *to++ = '\'';
    for (; *text; text++) {
        if (*text != '\'') *to++ = *text;
        if (*text == '\'') memcpy(to, "'\\''", 4), to += 4;
    }
    *to++ = '\'', *to = 0;
    return word;
}
