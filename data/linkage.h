// Declarations between C_LINKAGE_BEGIN and C_LINKAGE_END have C's names in C++ too.
#pragma once
#ifdef __cplusplus
#define C_LINKAGE_BEGIN extern "C" {
#define C_LINKAGE_END }
#else
#define C_LINKAGE_BEGIN
#define C_LINKAGE_END
#endif
