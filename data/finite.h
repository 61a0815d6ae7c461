// This finds values that are not finite. A checkpoint asks for it as its arrays pass through host memory, in both
// directions, so a NaN or an infinity in weights or states is neither saved nor trained on.
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "linkage.h"
C_LINKAGE_BEGIN

// Returns true if every value is finite, and for types without NaN and infinity (integers, codes). Otherwise false,
// with "NAME holds VALUE at element N" in `error`, which may be NULL. `dtype` is safetensors' name; `first` is the
// number of the first element given, for arrays that come in pieces. `values` may be unaligned. Cost: one pass, at the
// speed of memory.
bool values_finite(const char* name, const char* dtype, const void* values, int64_t bytes, int64_t first, char* error);

C_LINKAGE_END
