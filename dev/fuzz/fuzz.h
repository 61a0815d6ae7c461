// What the files of the fuzzer share.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include "../../data/linkage.h"
C_LINKAGE_BEGIN

typedef struct {
    const char* bytes;
    size_t count;
} FuzzInput;

void demand(bool fact);  // aborts, which the fuzzer reports with the input, where a fact does not hold

__attribute__((noreturn)) void fuzz_leave(void);  // ends this input

// The targets that need the inside of a file, and so include it.
void fuzz_rendezvous(FuzzInput input);  // kernels/ranks/launch.c

C_LINKAGE_END
