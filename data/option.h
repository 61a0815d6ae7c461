// One option: its name and range, where its value lies in a struct, and the value from text and back.
#pragma once
#include <stddef.h>
#include "errors.h"
C_LINKAGE_BEGIN

#define OPTION_AUTO (-1)  // the value of an INT or REAL that is "auto": the program chooses it; --keep best has it too

// Values are, in order: long long, double, const char*, one of `values`, bool, bool and long long. A SWITCH is typed on
// or off; a FLAG is true if its name was typed.
typedef enum {
    OPTION_INT,
    OPTION_REAL,
    OPTION_TEXT,
    OPTION_CHOICE,
    OPTION_SWITCH,
    OPTION_FLAG,
    OPTION_SIZE
} OptionType;

typedef struct {
    const char* name;  // without the dashes
    OptionType type;
    size_t offset;         // of the value in a struct of values
    const char* standard;  // the default, as typed; with the default "auto", "auto" may be typed too
    double low, high;      // range of a number
    const char* values;    // choices separated by '|', or a name for the value in --help
    const char* group;     // for --help; "": the same as in the row before
    const char* help;
    const char* needs;  // another option and its values, "rule=muon|normuon", without which this one changes nothing
} Option;

// Sets one value from text; texts are copied and live as long as the program.
bool option_set(const Option* option, void* values, const char* text, char* error);
// Refuses a number that is out of range, as `auto` is, and a text that is none of the choices.
bool option_fits(const Option* option, const void* values, char* error);
// Returns true if a number is `auto` (or best).
bool option_is_auto(const Option* option, const void* values);
// Returns the value as one would type it: a text itself, or a number, kept as by text_kept.
const char* option_text(const Option* option, const void* values);

// Reads a number and a letter of `units` behind it, in either case: the first one multiplies it by `factor`, the second
// by its square, and so on. *end is what follows: "" if nothing does, and not "" if the text is no decimal number.
double text_number(const char* text, const char* units, double factor, const char** end);

C_LINKAGE_END
