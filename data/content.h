// Tells from the contents of a file that was named as training data whether it is plain text, or what else it is.
#pragma once
#include <stdint.h>
#include "linkage.h"
C_LINKAGE_BEGIN

typedef enum {
    CONTENT_TEXT,
    CONTENT_KNOWN,   // packed, UTF-16, or a kind of file that has a name
    CONTENT_BINARY,  // numbers of an unknown kind
    CONTENT_UNREADABLE
} Content;
// Finds what an open file of `size` bytes holds. For all but a text the sentence "PATH is ...; type ..." is in `error`.
Content content_of(int descriptor, int64_t size, const char* path, char* error);
// Returns the integer of `key` in a pickled dictionary, such as nanoGPT's meta.pkl, without running it; -1: not found.
int64_t pickle_int(const char* pickle, int64_t bytes, const char* key);

C_LINKAGE_END
