// See override.h. Parsing takes time in the length of the text; a match takes at most the product of both lengths.
#include "override.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/errors.h"
#include "../data/memory.h"
#include "../data/text.h"

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

// Does the same for one pattern, [begin, end), at any part of the name between dots.
static bool pattern_matches(const char* begin, const char* end, const char* name) {
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

// Returns a text without its spaces, kept as by text_kept.
static const char* without_spaces(const char* text) {
    char *copy = text_copy(text), *end = copy;
    for (const char* at = text; *at; at++) {
        if (!isspace((unsigned char)*at)) *end++ = *at;
    }
    *end = 0;
    const char* kept = text_kept("%s", copy);
    free(copy);
    return kept;
}

// Parses one setting, "key=value".
static bool setting_parse(Override* rule, const char* word, char* error) {
    const struct {
        const char *key, *kind, **name;
        double* number;
    } settings[] = {{"weights=", "format", &rule->weights, nullptr},
                    {"m=", "format", &rule->m, nullptr},
                    {"v=", "format", &rule->v, nullptr},
                    {"rule=", "rule", &rule->rule, nullptr},
                    {"lr=", "", nullptr, &rule->lr},
                    {"wd=", "", nullptr, &rule->decay}};
    for (const auto& known : settings) {
        const char* value = word + strlen(known.key);
        if (strncmp(word, known.key, strlen(known.key)) != 0) continue;
        if (known.name) {
            *known.name = value;
            return *value || data_error(error, "--override: \"%s\" names no %s; type --list-formats for a list", word,
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

// Parses one override.
static bool override_parse(Override* rule, const char* text, char* error) {
    const char *settings = text, *patterns = without_spaces(text_word(&settings, ':'));
    *rule = {patterns, "", "", "", "", 1.0, -1.0};
    if (!settings || !*patterns) {
        return data_error(error, "--override: \"%s\" has no patterns and colon; type, say, \"wpe|ln*: m=fp32\"", text);
    }
    if (strlen(patterns) > OVERRIDE_PATTERNS) {
        return data_error(error,
                          "--override: \"%.40s...\" has patterns of more than %zu characters; take two overrides", text,
                          OVERRIDE_PATTERNS);
    }
    if (patterns[strspn(patterns, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-*?|")]) {
        return data_error(
            error,
            "--override: \"%s\" is no pattern; a pattern has letters, digits, . _ - * and ?, and | between patterns",
            patterns);
    }
    const char* const spaces = " \t\n\v\f\r";
    const char* at = settings + strspn(settings, spaces);
    if (!*at) {
        return data_error(error,
                          "--override: nothing follows \"%s:\"; type weights=, m=, v=, rule=, lr= or wd= and a value",
                          patterns);
    }
    for (size_t length; *at; at += length + strspn(at + length, spaces)) {
        length = strcspn(at, spaces);
        if (!setting_parse(rule, text_kept("%.*s", (int)length, at), error)) return false;
    }
    return true;
}

bool overrides_parse(const char* text, Override* overrides, int* count, char* error) {
    *count = 0;
    bool none = false, others = false;
    while (const char* one = text_word(&text, ';')) {
        const char* word = without_spaces(one);
        if (!*word) continue;
        if (*count == OVERRIDES) {
            return data_error(error, "--override: more than %d overrides; join patterns with |", OVERRIDES);
        }
        const bool is_none = strcmp(word, "none") == 0;
        none = none || is_none, others = others || !is_none;
        if (none && others) {
            return data_error(error, "--override: \"none\" was found among others; it stands alone, so leave it out");
        }
        if (!none && !override_parse(&overrides[(*count)++], one, error)) return false;
    }
    return true;
}
