// Tells from the contents of a file that was named as training data whether it is plain text, or what else it is.
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "linkage.h"
C_LINKAGE_BEGIN

// Returns whether an open file of `size` bytes is text other than JSON. If not, `error` says "PATH is ...; type ...".
bool content_is_text(int descriptor, int64_t size, const char* path, char* error);

C_LINKAGE_END
