// One table of options drives parsing, --help, JSON and shell completion. The error message for a mistake names the
// option, what was found and what to type.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include "errors.h"
C_LINKAGE_BEGIN

#define OPTION_AUTO (-1)  // the value of an INT or REAL that is "auto": the program chooses it

typedef enum { OPTION_INT, OPTION_REAL, OPTION_TEXT, OPTION_CHOICE, OPTION_FLAG, OPTION_SIZE } OptionType;

typedef struct {
    const char* name;  // without the dashes
    OptionType type;
    size_t offset;         // of the value in the fields: int64_t, double, const char*, const char*, bool, int64_t
    const char* standard;  // the default, as typed; with the default "auto", "auto" may be typed too
    double low, high;      // range of a number
    const char* values;    // choices separated by '|', or a name for the value in --help
    const char* group;     // for --help; "": the same as in the row before
    const char* help;
} Option;

// Option names of other programs: lower case, '-' between words and a space between names.
typedef struct {
    const char* names;
    const char* answer;  // the rest of a sentence that begins "unknown option --NAME; "
} OptionSynonym;

// Options that have no effect unless another option has one of these values.
typedef struct {
    const char* names;   // of the options, with a space between two
    const char* other;   // the option that they need
    const char* values;  // with '|' between two
} OptionNeed;

typedef struct {
    const Option* option;
    int count;
    const OptionSynonym* synonym;
    int synonyms;
    const OptionNeed* need;  // ends with a row without names
} OptionTable;

const Option* option_find(const OptionTable* table, const char* name);  // NULL when absent
// Returns the address of an option's value, which has the option's type.
void* option_value(const OptionTable* table, const void* fields, const char* name);
const char* option_group(const OptionTable* table, const Option* option);
// Sets one value from text; texts are copied and live as long as the program.
bool option_set(const Option* option, void* fields, const char* text, char* error);
// Returns the value as one would type it: a text itself, or a number, kept as by text_kept.
const char* option_text(const Option* option, const void* fields);
bool options_defaults(const OptionTable* table, void* fields, char* error);
// --name value, --name=value or a bare --flag; -h is --help. given[i] becomes true where option i was typed.
bool options_parse(const OptionTable* table, void* fields, bool* given, int argc, char** argv, char* error);
bool option_given(const OptionTable* table, const bool* given, const char* name);  // was it typed?
// Refuses two options that exclude each other if both were typed.
bool options_apart(const OptionTable* table, const bool* given, const char* one, const char* other, char* error);
// Refuses an option that was typed, with another value than its default, if it has no effect: neither the other option
// nor a word NAME=VALUE of `settings` (--override) has a value that it needs.
bool options_needed(const OptionTable* table, const void* fields, const bool* given, const char* settings, char* error);
// Returns whether files keep the option: flags and the options of "instead of training" are of one start alone.
bool option_is_saved(const OptionTable* table, const Option* option);
// Writes {"name": value, ...} of the options that files keep. Values are strings; with
// `typed`, numbers are JSON numbers.
void options_json(const OptionTable* table, const void* fields, bool typed, FILE* file);
// Prints what --help, --version and --completion ask for; true if one of them was typed.
bool options_print(const OptionTable* table, const void* fields, FILE* file);

// These return readable numbers, kept as by text_kept: 124475904 as "124M", 3725 seconds as "1h02m".
const char* text_count(double n);
const char* text_duration(double seconds);
// Reads a size such as 24G, 24GB, 24GiB or 800M, in powers of 1024, rounded to KiB; false if `text` is not a size.
bool size_parse(const char* text, int64_t* bytes);
// Copies a name in lower case, with '-' for '_', up to its 63rd letter.
void name_plain(char to[64], const char* name);
// Returns whether `typed`, of four letters or more, may be a slip for `name`: one edit away, or two if that has eight
// letters or more and the same first letter, or two neighbours are exchanged. The digits must be the same, since beta3
// is not beta2.
bool name_is_near(const char* typed, const char* name);
// Returns the text as one word of a shell's command: itself, or in quotes. It lives as long as the program.
const char* shell_word(const char* text);

C_LINKAGE_END
