// The Makefile defines COMMIT and BUILT.
#include "options.h"
#ifndef COMMIT
#define COMMIT "unknown"
#define BUILT "unknown"
#endif

const char NIBBLE_VERSION[] = "0.1.0";
const char NIBBLE_COMMIT[] = COMMIT;
const char NIBBLE_BUILD[] = BUILT;
