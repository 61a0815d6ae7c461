#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "memory.h"
#include "rule_options.h"
#include "text.h"

double text_number(const char* text, const char* units, double factor, const char** end) {
    double number = strtod(text, (char**)end);
    if (*end == text || strpbrk(text, "xX")) *end = "x";
    const char* unit = **end ? strchr(units, **end & ~32) : NULL;
    if (unit && *unit) number *= pow(factor, 1 + (double)(unit - units)), ++*end;
    return number;
}

// Returns the word that may stand for a number; "": none.
static const char* word_of(const Option* option) {
    if (option->type != OPTION_INT && option->type != OPTION_REAL) return "";
    return strcmp(option->standard, "auto") == 0 ? "auto" : strstr(option->values, "best") ? "best" : "";
}

bool option_is_auto(const Option* option, const void* values) {
    const void* field = (const char*)values + option->offset;
    return *word_of(option) && (option->type == OPTION_INT ? *(const long long*)field == OPTION_AUTO
                                                           : *(const double*)field == OPTION_AUTO);
}

// Refuses a number that is out of range. `text` is how it was typed; NULL: it was not.
static bool number_fits(const Option* option, double number, const char* text, char* error) {
    const bool whole = option->type == OPTION_INT;
    char shown[32];
    if (number >= option->low && number <= option->high) return true;
    const char* range = whole ? "a number from %.0f to %.0f" : "a number from %.12g to %.12g";
    return data_error(error, "--%s %s is out of range; type %s", option->name,
                      text ? text : number_text(number, shown, sizeof(shown)),
                      option->type == OPTION_SIZE ? text_kept("--%s %s", option->name, option->values)
                                                  : text_kept(range, option->low, option->high));
}

static bool choice_fits(const Option* option, const char* text, char* error) {
    return text_among(text, option->values, '|') ||
           data_error(error, "--%s '%s' is not known; type one of %s", option->name, text, option->values);
}

bool option_fits(const Option* option, const void* values, char* error) {
    const void* field = (const char*)values + option->offset;
    if (option->type == OPTION_CHOICE) return choice_fits(option, *(const char* const*)field, error);
    if (option->type != OPTION_INT && option->type != OPTION_REAL) return true;
    const double number = option->type == OPTION_INT ? (double)*(const long long*)field : *(const double*)field;
    return number_fits(option, number, NULL, error);
}

// Sets a number. A size such as 24G, 24GB, 24GiB or 800M counts in powers of 1024.
static bool set_number(const Option* option, void* field, const char* text, char* error) {
    const bool size = option->type == OPTION_SIZE, whole = option->type == OPTION_INT;
    const char *end, *kind = size ? "a size such as 24G" : whole ? "a whole number" : "a number";
    const double number = text_number(text, size ? "KMGT" : whole ? "KMB" : "", size ? 1024 : 1e3, &end);
    if (size && *end == 'i') end++;
    if (size && *end == 'B') end++;
    if (*end || !isfinite(number) || (whole && number != floor(number))) {  // 10k are a whole number alone
        return data_error(error, "--%s takes %s, not '%s'; type --%s %s", option->name, kind, text, option->name,
                          option->values);
    }
    if (!number_fits(option, number, text, error)) return false;
    if (option->type == OPTION_REAL) {
        *(double*)field = number;
    } else {
        *(long long*)field = (long long)number;
    }
    return true;
}

bool option_set(const Option* option, void* values, const char* text, char* error) {
    void* field = (char*)values + option->offset;
    bool number = option->type == OPTION_INT || option->type == OPTION_REAL;
    if (*text && strcmp(text, word_of(option)) == 0) {
        if (option->type == OPTION_INT) *(long long*)field = OPTION_AUTO;
        if (option->type == OPTION_REAL) *(double*)field = OPTION_AUTO;
        return true;
    }
    if (number || option->type == OPTION_SIZE) return set_number(option, field, text, error);
    if (!text_is_utf8(text, (int64_t)strlen(text)))
        return data_error(error, "--%s is not UTF-8, which config.json is written in: %s", option->name, text);
    const bool chosen = option->type == OPTION_CHOICE || option->type == OPTION_SWITCH;
    if (chosen && !choice_fits(option, text, error)) return false;
    if (option->type == OPTION_FLAG || option->type == OPTION_SWITCH) {
        *(bool*)field = strcmp(text, "true") == 0 || strcmp(text, "on") == 0;
    } else {
        *(const char**)field = text_copy(text);
    }
    return true;
}

const char* option_text(const Option* option, const void* values) {
    const void* field = (const char*)values + option->offset;
    char text[32];
    if (option_is_auto(option, values)) return word_of(option);
    switch (option->type) {
        case OPTION_FLAG:
            return *(const bool*)field ? "true" : "false";
        case OPTION_SWITCH:
            return *(const bool*)field ? "on" : "off";
        case OPTION_SIZE:
            if (*(const long long*)field == 0) return option->standard;
            return text_kept("%lld", *(const long long*)field);
        case OPTION_INT:
            return text_kept("%lld", *(const long long*)field);
        case OPTION_REAL:
            return text_kept("%s", number_text(*(const double*)field, text, sizeof(text)));
        default:
            return *(const char* const*)field;
    }
}

// The options of rules.

#define ROW(KIND, FIELD, DEFAULT, NAME, TYPED, LOW, HIGH, VALUES, NEEDS, HELP) \
    {NAME, OPTION_##KIND, offsetof(RuleOptions, FIELD), TYPED, LOW, HIGH, VALUES, "", HELP, NEEDS},
const Option RULE_OPTION[] = {RULE_OPTIONS(ROW)};

const Option* rule_option_find(const char* name) {
    for (const Option* option = RULE_OPTION; option < RULE_OPTION + RULE_OPTION_COUNT; option++) {
        const char *a = option->name, *b = name;
        while (*a && (*a == *b || (*a == '-' && *b == '_'))) a++, b++;
        if (!*a && !*b) return option;
    }
    return NULL;
}
