#include "options.h"
#include <stdlib.h>
#include <string.h>
#include "files.h"
#include "json.h"
#include "memory.h"
#include "options_synonyms.h"
#include "text.h"

enum { SYNONYM_ROWS = sizeof(SYNONYMS) / sizeof(SYNONYMS[0]), APART_ROWS = sizeof(APART) / sizeof(APART[0]) };

const Option* option_find(const char* name) {
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (strcmp(OPTIONS[i].name, name) == 0) return &OPTIONS[i];
    }
    return NULL;
}

// Copies a name in lower case, with '-' for '_', up to its 63rd letter.
static void name_plain(char to[64], const char* name) {
    snprintf(to, 64, "%s", name);
    for (char* c = to; *c; c++) *c = *c == '_' ? '-' : *c >= 'A' && *c <= 'Z' ? (char)(*c - 'A' + 'a') : *c;
}

// True if `typed`, of four letters or more, may be a slip for `name`: one edit away, or two if that has eight letters
// or more and the same first letter, or two neighbours are exchanged. The digits must be the same: beta3 is not beta2.
static bool name_is_near(const char* typed, const char* name) {
    static const char DIGITS[] = "0123456789";
    const size_t length = strlen(name), letters = strlen(typed);
    const char *a = strpbrk(typed, DIGITS), *b = strpbrk(name, DIGITS);
    while (a && b && *a == *b) a = strpbrk(a + 1, DIGITS), b = strpbrk(b + 1, DIGITS);
    if (a || b || letters < 4) return false;
    for (size_t i = 0; i + 1 < letters && letters == length; i++) {  // are these two exchanged?
        const bool exchanged = typed[i] == name[i + 1] && typed[i + 1] == name[i];
        if (exchanged && strncmp(typed, name, i) == 0 && strcmp(typed + i + 2, name + i + 2) == 0) return true;
    }
    return edit_distance(typed, letters, name, length) <= (length >= 8 && *typed == *name ? 2 : 1);
}

// Returns the answer for an option name of another program, with `near` also for a mistyped one; NULL for other names.
static const char* synonym_answer(const char* typed, bool near) {
    for (int i = 0; i < SYNONYM_ROWS; i++) {
        for (const char *at = SYNONYMS[i].names, *name; (name = text_word(&at, ' '));) {
            if (strcmp(typed, name) == 0 || (near && name_is_near(typed, name))) return SYNONYMS[i].answer;
        }
    }
    return NULL;
}

// Returns the only option that begins with the typed name, or for whose name it may be a slip; NULL: there is none, or
// several.
static const Option* option_near(const char* typed) {
    const Option *begins = NULL, *near = NULL;
    int beginnings = 0, slips = 0;
    for (const Option* option = OPTIONS; option < OPTIONS + OPTION_COUNT; option++) {
        if (strncmp(option->name, typed, strlen(typed)) == 0) begins = option, beginnings++;
        if (name_is_near(typed, option->name)) near = option, slips++;
    }
    return beginnings == 1 ? begins : slips == 1 ? near : NULL;
}

// Returns what to type instead of a word that is not an option; NULL: that is not known.
static const char* advice_for(const char* word, int dashes, int length) {
    static const char* const groups[] = {"training.", "optimizer.", "model.", "debug.", NULL};  // torchtitan's
    char plain[64];
    name_plain(plain, text_kept("%.*s", length - dashes, word + dashes));
    const char* name = plain;
    for (int i = 0; groups[i]; i++) name += strncmp(name, groups[i], strlen(groups[i])) == 0 ? strlen(groups[i]) : 0;
    const Option* option = option_find(name);
    if (option) return text_kept("type --%s%s%s", name, *option->values ? " " : "", option->values);
    // llm.c's options have one dash.
    const char* answer = synonym_answer(dashes == 1 ? text_kept("-%s", name) : name, false);
    const Option* near = answer ? NULL : option_near(name);
    if (near && dashes == 2) return text_kept("did you mean --%s? (--help lists all)", near->name);
    return answer || near ? answer : synonym_answer(name, true);
}

// Refuses a word that is not an option.
static bool unknown_option(const char* word, char* error) {
    const int length = (int)strcspn(word, "="), dashes = (int)strspn(word, "-");
    const char* advice = advice_for(word, dashes, length);
    if (!advice && dashes != 2)
        return data_error(error, "'%s' is not an option; options begin with --, and --help lists them", word);
    return data_error(error, "unknown option %.*s; %s", length, word, advice ? advice : "--help lists all");
}

void options_defaults(Options* options) {
    char error[DATA_ERROR_BYTES];
    *options = (Options){0};
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (OPTIONS[i].type != OPTION_SIZE) option_set(&OPTIONS[i], options, OPTIONS[i].standard, error);
    }
}

// Takes argv[*at] and its value, to which *at moves. A value that may be that of an unknown option is passed over.
static bool parse_one(Options* options, int argc, char** argv, int* at, char* error) {
    const char* word = strcmp(argv[*at], "-h") == 0 ? "--help" : argv[*at];
    const char *equals = strchr(word, '='), *value = equals ? equals + 1 : NULL;
    const char* next = *at + 1 < argc ? argv[*at + 1] : NULL;
    const char* name = text_kept("%.*s", (int)(equals ? equals - word : (ptrdiff_t)strlen(word)), word);
    const Option* option = strncmp(name, "--", 2) == 0 ? option_find(name += 2) : NULL;
    if (!option) {
        if ((*word == '-' || option_find(word)) && !equals && next && *next != '-') ++*at;
        return unknown_option(word, error);
    }
    options->given[option - OPTIONS] = true;
    if (option->type == OPTION_FLAG) {
        if (value) return data_error(error, "--%s takes no value; type --%s alone", name, name);
        return option_set(option, options, "true", error);
    }
    if (!value) {
        const char* other = next ? text_kept("%.*s", (int)strcspn(next, "="), next) : "";
        const bool is_option = strncmp(other, "--", 2) == 0 && option_find(other + 2);
        if (!next || is_option) {
            const bool meant = is_option && option->type == OPTION_TEXT;  // perhaps: a text may begin with dashes
            return data_error(error, "--%s needs a value; type --%s%s%s", name, name, meant ? "=" : " ",
                              meant ? shell_word(next) : option->values);
        }
        value = next, ++*at;
    }
    if (!*value && text_among(name, "data val model run resume", ' '))  // an unset shell variable, perhaps
        return data_error(error, "--%s '' is empty; give it a value or leave it out", name);
    return option_set(option, options, value, error);
}

// Options of a file that a typed one leaves out, since they belong to what it replaces.
static const char* const REPLACED[][2] = {{"preset", "rule weights m v override"},
                                          {"model", "size layers channels heads"},
                                          {"size", "model layers channels heads"},
                                          {"prompt", "prompt-file"},
                                          {"prompt-file", "prompt"}};

// Takes an option of --config that is not typed.
static bool config_take(Options* o, const char* name, const char* value, char* error) {
    const Option* option = option_find(name);
    if (!option) return unknown_option(text_kept("--%s", name), error);
    if (!option_is_saved(option)) return data_error(error, "--%s is of one start alone; type it", name);
    bool left = option_given(o, name) || text_among(name, "run resume config", ' ');
    for (size_t i = 0; i < sizeof(REPLACED) / sizeof(REPLACED[0]); i++) {
        left = left || (option_given(o, REPLACED[i][0]) && text_among(name, REPLACED[i][1], ' '));
    }
    return left || option_set(option, o, value, error);
}

// Reads --config: the object of a run's config.json, or lines of an option and its value, or # and a comment.
static bool config_read(Options* o, char* error) {
    const char* path = o->config;
    char why[DATA_ERROR_BYTES];
    bool ok = true;
    int64_t bytes;
    SCOPED char* text = file_read(path, &bytes, why);
    if (!text) return data_error(error, "--config: %s", why);
    const bool object = text[strspn(text, " \t\r\n")] == '{';
    JSON_SCOPED Json* json = object ? json_read(path, why) : NULL;
    for (const Json* one = json ? json->child : NULL; one && ok; one = one->next) {
        ok = config_take(o, one->key, one->text ? one->text : "", why);
    }
    const char* lines = object ? NULL : text;
    for (const char* line; ok && (line = text_word(&lines, '\n'));) {
        line += strspn(line, " \t\r-");
        const size_t length = strcspn(line, " \t\r=#");
        const char *name = text_kept("%.*s", (int)length, line), *value = line + length;
        value += strspn(value, " \t=");
        if (length) ok = config_take(o, name, text_kept("%.*s", (int)strcspn(value, "\r"), value), why);
    }
    return (ok && (json || !object)) || data_error(error, "--config %s: %s", path, why);
}

bool options_parse(Options* options, int argc, char** argv, char* error) {
    char one[DATA_ERROR_BYTES];
    size_t used = 0;
    for (int i = 1; i < argc; i++) {
        if (parse_one(options, argc, argv, &i, one)) continue;
        if (used < DATA_ERROR_BYTES) {  // one line for each mistake
            used +=
                (size_t)snprintf(error + used, DATA_ERROR_BYTES - used, "%s%s", used ? "\ntrain: error: " : "", one);
        }
    }
    for (int i = 0; i < argc && used == 0; i++) {
        text_add(&options->command, "%s%s", i ? " " : "", shell_word(argv[i]));
    }
    return used == 0 && (!*options->config || config_read(options, error));
}

bool option_given(const Options* options, const char* name) {
    return options->given[option_find(name) - OPTIONS];
}

bool options_apart(const Options* options, char* error) {
    for (int i = 0; i < APART_ROWS; i++) {
        const char *one = APART[i][0], *other = APART[i][1];
        const bool eval = strcmp(one, "eval") == 0;
        if (!option_given(options, one) || !option_given(options, other) || (eval && options->eval_every > 0)) continue;
        return data_error(error, "--%s does one thing, to which --%s does not belong; leave one of them out%s", one,
                          other, eval ? ", or type --eval-every N too" : "");
    }
    return true;
}

// True if --override gives an option one of these values.
static bool is_overridden(const char* overrides, const char* name, const char* values) {
    for (const char* value; (value = text_word(&values, '|'));) {
        const char* word = text_kept("%s=%s", name, value);
        for (const char* at = overrides; (at = strstr(at, word)); at++) {
            if (strchr(" \t;", at[strlen(word)])) return true;  // or its end
        }
    }
    return false;
}

bool options_needed(const Options* options, char* error) {
    Options standard;
    options_defaults(&standard);
    if (*options->val && !*options->data) {
        return data_error(error, "--val %s validates, and nothing is named to train on; type --data PATH too",
                          options->val);
    }
    if (options->keep == OPTION_AUTO && options->val_every == 0) {
        return data_error(error,
                          "--keep best goes by the validation loss, which --val-every 0 never measures; "
                          "type another --val-every, or --keep N");
    }
    if (options->eval_every > 0 && !*options->eval) {
        return data_error(error, "--eval-every %lld has nothing to score; type --eval NAMES too, or leave it out",
                          options->eval_every);
    }
    for (int i = 0; i < OPTION_COUNT; i++) {
        const Option* option = &OPTIONS[i];
        const char *values = option->needs, *needed = text_word(&values, '='), *value = option_text(option, options);
        if (!values || !options->given[i] || strcmp(value, option_text(option, &standard)) == 0) continue;
        if (text_among(option_text(option_find(needed), options), values, '|')) continue;
        if (is_overridden(options->overrides, needed, values)) continue;
        return data_error(error, "--%s %s goes with --%s %s; leave --%s out, or type both", option->name, value, needed,
                          values, option->name);
    }
    return true;
}

static void options_help(FILE* file) {
    fputs("nibble: pre-trains GPT-2-family language models.\n\n  ./train [--option value ...]\n", file);
    for (int i = 0; i < OPTION_COUNT; i++) {
        const Option* option = &OPTIONS[i];
        if (*option->group) fprintf(file, "\n%s\n", option->group);
        const char* left = text_kept("--%s %s", option->name, option->values);
        if (strlen(left) > 38) fprintf(file, "  %s\n", left), left = "";
        fprintf(file, "  %-38s ", left);
        const char *values = option->needs, *needed = text_word(&values, '=');
        if (values) fprintf(file, "with --%s %s: ", needed, values);
        fputs(option->help, file);
        if (option->standard[0]) fprintf(file, " [%s]", option->standard);
        fprintf(file, "\n");
    }
}

bool option_is_saved(const Option* option) {
    return option->type != OPTION_FLAG && option < option_find("sample");  // the first of "instead of training"
}

void options_json(const Options* options, const Options* asked, bool typed, FILE* file) {
    const char* derived = "grads weight-decay override logit-rows val-every sample-every print-every release";
    const char* separator = "";
    fputc('{', file);
    for (int i = 0; i < OPTION_COUNT; i++) {
        const Option* option = &OPTIONS[i];
        if (!option_is_saved(option)) continue;
        const char* value = option_text(option, text_among(option->name, derived, ' ') ? asked : options);
        const bool number = option->type == OPTION_INT || option->type == OPTION_REAL;
        if (typed && number && *value <= '9') {  // not "auto" or "best"
            fprintf(file, "%s\"%s\": %s", separator, option->name, value);
        } else {
            json_write_text_member(file, separator, option->name, value);
        }
        separator = ", ";
    }
    fputc('}', file);
}

bool options_print(const Options* options, FILE* file) {
    if (options->help) options_help(file);
    if (options->version) fprintf(file, "nibble %s (commit %s, %s)\n", NIBBLE_VERSION, NIBBLE_COMMIT, NIBBLE_BUILD);
    return options->help || options->version;
}

const char* shell_word(const char* text) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-";
    if (text[0] && !text[strspn(text, plain)]) return text;
    const char* word = NULL;
    for (const char* part; (part = text_word(&text, '\''));) text_add(&word, "%s%s", word ? "'\\''" : "'", part);
    text_add(&word, "'");
    return word;
}
