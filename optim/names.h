// Finds the row of a table by its name, and writes the sentence for an unknown name. A row has `name` and `note`.
#pragma once
#include <stdio.h>
#include <string.h>
#include "../data/errors.h"
#include "../data/text.h"

template <class Row>
struct Table {
    const Row* row;
    int count;
};

// Returns true if `name` is the row's name without its block: "dyn8:sr" is short for "dyn8/256:sr".
inline bool name_is_short_for(const char* full, const char* name) {
    if (!*name || strchr(name, '/')) return false;
    size_t length = strcspn(name, ":@");
    bool same = strncmp(full, name, length) == 0 && full[length] == '/';
    return same && strcmp(full + strcspn(full, ":@"), name + length) == 0;
}

// Returns the row that a name means; null if there is none. A name without a block means the first row that it is short
// for.
template <class Row>
const Row* find_row(const Table<Row>& table, const char* name) {
    for (int i = 0; name && i < table.count; i++) {
        if (strcmp(table.row[i].name, name) == 0) return &table.row[i];
    }
    for (int i = 0; name && i < table.count; i++) {
        if (name_is_short_for(table.row[i].name, name)) return &table.row[i];
    }
    return nullptr;
}

// Returns the distance between a typed name and a row's name. The part before block, scale and rounding counts 1000
// times as much, since block and rounding are most of the letters of "dyn9/256:sr". The row's block does not count if
// none was typed, nor does "bit", with which other programs name adamw8bit.
inline int name_distance(const char* typed, const char* name) {
    char shorter[64];
    size_t base = strcspn(name, "/:@"), letters = strcspn(typed, "/:@");
    if (letters > 3 && strcmp(typed + letters - 3, "bit") == 0 && !text_ends(name, "bit")) letters -= 3;
    int bases = edit_distance(typed, letters, name, base);
    snprintf(shorter, sizeof(shorter), "%.*s%s", (int)base, name, name + strcspn(name, ":@"));
    const char* whole = strchr(typed, '/') ? name : shorter;
    return 1000 * bases + edit_distance(typed, strlen(typed), whole, strlen(whole));
}

// Writes a sentence such as "--m: "dyn9" is not known; did you mean dyn8/256? (known: ...)" and returns
// false. Rows without a note may be suggested but are not listed.
template <class Row>
bool name_unknown(const Table<Row>& table, const char* option, const char* name, char* error) {
    const char* nearest = table.row[0].name;
    char known[1024] = "";
    for (int i = 0; i < table.count; i++) {
        size_t used = strlen(known);
        const char* other = table.row[i].name;
        if (table.row[i].note[0]) snprintf(known + used, sizeof(known) - used, "%s%s", used ? ", " : "", other);
        if (name_distance(name, other) < name_distance(name, nearest)) nearest = other;
    }
    // A suggestion is at most one character off, in the whole or before block, scale and rounding, or has two letters
    // exchanged in a name of four or more.
    char guess[80] = "";
    const size_t letters = strcspn(name, "/:@"), its = strcspn(nearest, "/:@");
    const int distance = name_distance(name, nearest), wrong = distance / 1000;
    const bool near = wrong < 2 || distance % 1000 < 2 || (wrong == 2 && letters >= 4 && letters == its);
    if (letters > 1 && near) snprintf(guess, sizeof(guess), "; did you mean %s?", nearest);
    return data_error(error, "%s: \"%s\" is not known%s (known: %s)", option, name, guess, known);
}
