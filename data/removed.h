// Storage formats that earlier versions knew, with what to type instead.
#pragma once
#include "linkage.h"
C_LINKAGE_BEGIN

// Returns the answer for a format that was removed ("log8/256:sr"), whatever its block, scale and rounding are, unless
// the row names these too; NULL for other names.
const char* removed_format(const char* name);

C_LINKAGE_END
