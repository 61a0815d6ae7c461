// Errors: how a function reports what went wrong, and hooks that a program with other needs replaces.
// Every other file of data/ may include this one.
#pragma once
#include <stdbool.h>
#include "linkage.h"
C_LINKAGE_BEGIN

#define DATA_ERROR_BYTES 16384  // the room of every `error`: two paths and a sentence, or a compiler's log

// Writes the sentence (cut to DATA_ERROR_BYTES) and returns false. Control characters, which a file's name or contents
// may bring along, become '?', so that the sentence can be printed on a terminal. The arguments may be in `error`
// itself: a caller adds to the sentence of a function that it called.
__attribute__((format(printf, 2, 3))) bool data_error(char* error, const char* format, ...);

// Answers a user's mistake: prints one sentence (what was asked, what was found, what to type) and exits with code 2.
__attribute__((noreturn, format(printf, 1, 2))) void user_error(const char* format, ...);
// Ends the program with the sentence in `error` unless `ok`.
static inline void require(bool ok, const char* error) {
    if (!ok) user_error("%s", error);
}
// Ends the program if stdout cannot be written: without a message if the reader of the pipe has gone. Returns 0, the
// exit code of a program that has only printed.
int require_stdout(void);

// A process that must end calls this first, with its exit code and its message. This one does nothing; with several
// ranks, kernels/ranks/launch.c replaces it by one that prints the message once and ends all ranks. If it returns, the
// caller prints the message and exits.
void launch_failed(int code, const char* text);

// memory_missing calls this first. It does nothing; a library whose caller can go on without the memory
// (optim/nibble_optim.cu) replaces it by a function that does not return.
void memory_failed(const char* text);

// memory.h tells what it hands out, and block_left what was moved or stays for good. They do nothing; such a library
// keeps a list, to free what a function had taken that ended early.
void block_taken(void* block);
void block_left(void* block);

// Prints a notice to stderr; a library replaces it by a function that prints nothing.
void notice(const char* text);

C_LINKAGE_END
