// Rows of tables by name: the row that a name means, and the sentence when it means none.
#pragma once
#include <stdio.h>
#include <string.h>

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

// Changes of a letter that make one of the other.
inline int edit_distance(const char* a, const char* b) {
    int row[64], length = (int)strnlen(b, 63);
    for (int j = 0; j <= length; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= length; j++) {
            int change = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < change) change = row[j] + 1;
            if (row[j - 1] + 1 < change) change = row[j - 1] + 1;
            row[j] = change;
        }
    }
    return row[length];
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
        if (edit_distance(name, other) < edit_distance(name, nearest)) nearest = other;
    }
    snprintf(error, bytes, "%s: \"%s\" is not known; did you mean %s? (known: %s)", option, name, nearest, known);
}
