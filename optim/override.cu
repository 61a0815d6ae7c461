// See override.h. Parsing takes time in the length of the text; a match takes at most the product of both lengths.
#include "override.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/errors.h"

// Returns true if the pattern [p, end) matches `name` from its first character up to its end or to a dot. On a
// mismatch, the last star takes one more character.
static bool matches_here(const char* p, const char* end, const char* name) {
    const char *star = nullptr, *taken = nullptr;
    for (;;) {
        if (p < end && *p == '*') {
            star = ++p, taken = name;
        } else if (p == end && (*name == 0 || *name == '.')) {
            return true;
        } else if (p < end && *name && (*p == '?' || *p == *name)) {
            p++, name++;
        } else if (star && *taken) {
            p = star, name = ++taken;
        } else {
            return false;
        }
    }
}

bool pattern_matches(const char* begin, const char* end, const char* name) {
    for (const char* part = name; part; part = strchr(part, '.')) {
        if (*part == '.') part++;
        if (matches_here(begin, end, part)) return true;
    }
    return false;
}

bool patterns_match(const char* patterns, const char* name) {
    for (const char *p = patterns, *end; *p; p = *end ? end + 1 : end) {
        end = p + strcspn(p, "|");
        if (pattern_matches(p, end, name)) return true;
    }
    return false;
}

// Copies [begin, end) without its spaces. Returns false if nothing is left or it does not fit.
static bool copy_word(char* out, size_t bytes, const char* begin, const char* end) {
    size_t used = 0;
    for (; begin < end; begin++) {
        if (isspace((unsigned char)*begin)) continue;
        if (used + 1 == bytes) return false;
        out[used++] = *begin;
    }
    out[used] = 0;
    return used > 0;
}

// Parses one setting, "key=value".
static bool setting_parse(Override* rule, const char* word, char* error) {
    const struct {
        const char *key, *kind;
        char* name;
        double* number;
    } settings[] = {{"weights=", "format", rule->weights, nullptr},
                    {"m=", "format", rule->m, nullptr},
                    {"v=", "format", rule->v, nullptr},
                    {"rule=", "rule", rule->rule, nullptr},
                    {"lr=", "", nullptr, &rule->lr},
                    {"wd=", "", nullptr, &rule->decay}};
    for (const auto& known : settings) {
        const char* value = word + strlen(known.key);
        if (strncmp(word, known.key, strlen(known.key)) != 0) continue;
        if (known.name) {
            return copy_word(known.name, sizeof(rule->m), value, value + strlen(value)) ||
                   data_error(error, "--override: \"%s\" names no %s; type --list-formats for a list", word,
                              known.kind);
        }
        char* rest;
        *known.number = strtod(value, &rest);
        return (*value && !*rest && *known.number >= 0.0 && *known.number <= 1e6) ||
               data_error(error, "--override: \"%s\" was found and a number from 0 to 1e6 is needed after %s", word,
                          known.key);
    }
    return data_error(error, "--override: \"%s\" is not known; type weights=, m=, v=, rule=, lr= or wd= and a value",
                      word);
}

// Parses one override, [begin, end).
static bool override_parse(Override* rule, const char* begin, const char* end, char* error) {
    const char* colon = begin;
    while (colon < end && *colon != ':') colon++;
    *rule = {};
    rule->lr = 1.0;
    rule->decay = -1.0;
    const bool words = colon < end && copy_word(rule->patterns, sizeof(rule->patterns), begin, colon);
    if (!words && rule->patterns[0]) {
        return data_error(error,
                          "--override: \"%.40s...\" has patterns of more than %zu characters; take two overrides",
                          begin, sizeof(rule->patterns) - 1);
    }
    if (!words) {
        return data_error(error, "--override: \"%.*s\" has no patterns and colon; type, say, \"wpe|ln*: m=fp32\"",
                          (int)(end - begin), begin);
    }
    if (rule->patterns[strspn(rule->patterns,
                              "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-*?|")]) {
        return data_error(
            error,
            "--override: \"%s\" is no pattern; a pattern has letters, digits, . _ - * and ?, and | between patterns",
            rule->patterns);
    }
    int settings = 0;
    for (const char* at = colon + 1; at < end; settings++) {
        while (at < end && isspace((unsigned char)*at)) at++;
        const char* stop = at;
        while (stop < end && !isspace((unsigned char)*stop)) stop++;
        if (stop == at) break;
        char word[64];
        if (!copy_word(word, sizeof(word), at, stop)) {
            return data_error(error, "--override: \"%.*s\" is too long", (int)(stop - at), at);
        }
        if (!setting_parse(rule, word, error)) return false;
        at = stop;
    }
    if (settings > 0) return true;
    return data_error(error,
                      "--override: nothing follows \"%s:\"; type weights=, m=, v=, rule=, lr= or wd= and a value",
                      rule->patterns);
}

bool overrides_parse(const char* text, Override* overrides, int* count, char* error) {
    *count = 0;
    bool none = false, others = false;
    for (const char* at = text ? text : ""; *at;) {
        const char* end = at + strcspn(at, ";");
        if (strspn(at, " \t") < (size_t)(end - at)) {
            if (*count == OVERRIDES) {
                return data_error(error, "--override: more than %d overrides; join patterns with |", OVERRIDES);
            }
            char word[8];
            bool is_none = copy_word(word, sizeof(word), at, end) && strcmp(word, "none") == 0;
            none = none || is_none;
            others = others || !is_none;
            if (none && others) {
                return data_error(error,
                                  "--override: \"none\" was found among others; it stands alone, so leave it out");
            }
            if (!none && !override_parse(&overrides[(*count)++], at, end, error)) return false;
        }
        at = *end ? end + 1 : end;
    }
    return true;
}
