// HMAC-SHA256 (RFC 2104, FIPS 180-4): the keyed hash by which two ranks prove to each other that they know one secret.
#pragma once
#include <stddef.h>
#include "../../data/linkage.h"
C_LINKAGE_BEGIN

enum { HMAC_BYTES = 32 };

// Computes the hash of `count` bytes under a key of any length.
void hmac_sha256(const void* key, size_t key_bytes, const void* bytes, size_t count, unsigned char hash[HMAC_BYTES]);

C_LINKAGE_END
