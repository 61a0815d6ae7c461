// Host memory: all blocks, texts and in-memory streams of the program come from here. None of these functions but
// memory_try returns NULL: if there is no more memory, or a limit such as `ulimit -v` is reached, the process ends with
// exit code 2 and one sentence, which names the last good checkpoint. The caller frees what is returned with free().
#pragma once
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include "linkage.h"
C_LINKAGE_BEGIN

// A plan of what a run takes: bytes of memory of the device, which is host memory on the CPU.
typedef struct {
    int64_t weights, states, grads, activations, other;
    int64_t taken, host;       // taken: also in use: the driver's context, NCCL, and loaded kernels; 0 on a CPU
    int64_t total, available;  // host: of host memory, part of the total only on a CPU; available: that it may take
} MemoryPlan;

void* memory_take(size_t bytes);  // not initialised
void* memory_zero(size_t count, size_t bytes);
void* memory_try(size_t bytes);  // for threads that report the lack to another: NULL if there is no more memory
void* memory_grow(void* pointer, size_t bytes);
void* memory_aligned(size_t alignment, size_t bytes);
// SCOPED char* text = text_copy(...); is freed where its scope ends, however the function returns.
#define SCOPED __attribute__((cleanup(memory_drop)))
void memory_drop(void* pointer);  // frees what the variable at `pointer` points to

// Returns the bytes of memory that this machine can still give.
int64_t memory_left(void);

char* text_copy(const char* text);
char* text_part(const char* text, size_t bytes);  // its first `bytes` at most
__attribute__((format(printf, 1, 2))) char* text_format(const char* format, ...);
// Returns a formatted text that stays valid. It is meant for texts of which a program makes few different ones.
__attribute__((format(printf, 1, 2))) const char* text_kept(const char* format, ...);
// Appends to such a text; NULL stands for an empty one.
__attribute__((format(printf, 2, 3))) void text_add(const char** text, const char* format, ...);
// Returns what printf would print; the caller frees it.
__attribute__((format(printf, 1, 0))) char* text_of(const char* format, va_list arguments);
// Opens a stream whose text, followed by a NUL byte, is in *text with its length in *bytes after each fflush and after
// fclose. open_memstream drops what it has no memory for and reports nothing; this one loses nothing.
FILE* text_stream(char** text, size_t* bytes);

// Sets where the path of the last good checkpoint is, for that sentence. The text there may change; "": none yet.
void memory_checkpoint(const char* path);
// Ends the process for want of so many bytes.
__attribute__((noreturn)) void memory_missing(size_t bytes);

C_LINKAGE_END
