// The name of this program's build. The version stands in version.c; the commit and the build are the Makefile's.
#pragma once
#include "linkage.h"
C_LINKAGE_BEGIN

extern const char NIBBLE_VERSION[];  // "0.1.0"
extern const char NIBBLE_COMMIT[];   // "73330cd1a2", with "-dirty" where files were changed; "unknown" outside of git
extern const char NIBBLE_BUILD[];    // "CUDA 12.8 for sm_90a", "CPU alone"

C_LINKAGE_END
