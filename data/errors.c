#include "errors.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "text.h"

bool data_error(char* error, const char* format, ...) {
    char text[DATA_ERROR_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    text_disarm(text, false);  // it may quote what a stranger wrote
    strcpy(error, text);
    return false;
}

// Weak: a program with several ranks links kernels/ranks/launch.c, whose function takes the place of this one.
__attribute__((weak)) void launch_failed(int code, const char* text) {
    (void)code, (void)text;
}

__attribute__((weak)) void memory_failed(const char* text) {
    (void)text;
}

__attribute__((weak)) void block_taken(void* block) {
    (void)block;
}

__attribute__((weak)) void block_left(void* block) {
    (void)block;
}

__attribute__((weak)) void notice(const char* text) {
    fputs(text, stderr);
}
