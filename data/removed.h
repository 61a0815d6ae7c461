// Names that earlier versions knew, with what to type instead. One table answers the command line and checkpoints.
#pragma once
#include <stdbool.h>
#include "linkage.h"
C_LINKAGE_BEGIN

// Returns the answer for an option that was removed, without its dashes; NULL for other names. The answer is the rest
// of a sentence that begins "--NAME was removed: ". With `value`, an option whose value had no effect is no mistake and
// gives NULL, since checkpoints hold the values of all options.
const char* removed_option(const char* name, const char* value);
// Returns the same for one value of an option that still exists, as in "--data-format nanogpt was removed: ".
const char* removed_value(const char* option, const char* value);
// Returns the same for a storage format ("log8/256:sr"), whatever its block, scale and rounding are, unless the row
// names these too.
const char* removed_format(const char* name);

C_LINKAGE_END
