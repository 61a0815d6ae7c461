// See version.h.
#include "version.h"

const char NIBBLE_VERSION[] = "0.1.0";
const char NIBBLE_COMMIT[] = COMMIT;
const char NIBBLE_BUILD[] = BUILT;
