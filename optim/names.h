// Rows of tables by name: the row that a name means, and the sentence when it means none; and what resolve.cu knows:
// the presets, and which weights go with which m.
#pragma once
#include <stdio.h>
#include <string.h>
#include "../kernels/text.h"

// The presets, which resolve.cu has.
struct PresetRow {
    const char *name, *rule, *weights, *m, *v, *note;
    const char* overrides = "";
};
int preset_count();
const PresetRow* preset_row(int index);

// Whether a resolved configuration's rule and m can take what rounding its weights loses, if these give it back (:ef);
// false and a sentence where not. `overridden`: weights or m are what --override asks for.
struct OptimConfig;
bool optim_feedback_fits(const OptimConfig* config, bool overridden, char* error, size_t error_bytes);

// Whether a row's name is what was typed. A format in blocks may be named without its block: "dyn8:sr" is the first row
// of "dyn8/...:sr".
inline bool name_is_short_for(const char* full, const char* name) {
    if (!*name || strchr(name, '/')) return false;
    size_t length = strcspn(name, ":@");
    bool same = strncmp(full, name, length) == 0 && full[length] == '/';
    return same && strcmp(full + strcspn(full, ":@"), name + length) == 0;
}

// Of rows with row_name(row); null when there is none.
template <class Row>
const Row* find_row(const Row* rows, int count, const char* name) {
    for (int i = 0; name && i < count; i++) {
        if (strcmp(row_name(rows[i]), name) == 0) return &rows[i];
    }
    for (int i = 0; name && i < count; i++) {
        if (name_is_short_for(row_name(rows[i]), name)) return &rows[i];
    }
    return nullptr;
}

// How far what was typed is from a row's name: the names before block, scale and rounding count first, since those of
// "dyn9/256:sr" are most of its letters. Where no block was typed the row's does not count.
inline int name_distance(const char* typed, const char* name) {
    char shorter[64];
    size_t base = strcspn(name, "/:@");
    int bases = edit_distance(typed, strcspn(typed, "/:@"), name, base);
    snprintf(shorter, sizeof(shorter), "%.*s%s", (int)base, name, name + strcspn(name, ":@"));
    const char* whole = strchr(typed, '/') ? name : shorter;
    return 1000 * bases + edit_distance(typed, strlen(typed), whole, strlen(whole));
}

// "--m: "dyn9" is not known; did you mean dyn8/256? (known: ...)": rows without a note are found but not listed.
template <class Row>
void name_unknown(const Row* rows, int count, const char* option, const char* name, char* error, size_t bytes) {
    const char* nearest = row_name(rows[0]);
    char known[1024] = "";
    for (int i = 0; i < count; i++) {
        size_t used = strlen(known);
        const char* other = row_name(rows[i]);
        if (row_note(rows[i])[0]) snprintf(known + used, sizeof(known) - used, "%s%s", used ? ", " : "", other);
        if (name_distance(name, other) < name_distance(name, nearest)) nearest = other;
    }
    // A guess is one letter off before block, scale and rounding, or has two letters of four or more exchanged.
    char guess[80] = "";
    const size_t letters = strcspn(name, "/:@"), its = strcspn(nearest, "/:@");
    const int wrong = name_distance(name, nearest) / 1000;
    if (letters > 1 && (wrong < 2 || (wrong == 2 && letters >= 4 && letters == its)))
        snprintf(guess, sizeof(guess), "; did you mean %s?", nearest);
    snprintf(error, bytes, "%s: \"%s\" is not known%s (known: %s)", option, name, guess, known);
}
