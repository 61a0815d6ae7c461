#include "errors.h"
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
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

void user_error(const char* format, ...) {
    char message[32768];
    va_list arguments;
    va_start(arguments, format);
    int used = snprintf(message, sizeof(message), "train: error: ");
    used += vsnprintf(message + used, sizeof(message) - (size_t)used - 1, format, arguments);
    va_end(arguments);
    strcpy(message + (used < (int)sizeof(message) - 2 ? used : (int)sizeof(message) - 2), "\n");
    text_disarm(message, true);  // it may quote names from a file that a stranger wrote
    launch_failed(2, message);
    fputs(message, stderr);
    exit(2);
}

int require_stdout(void) {
    struct pollfd out = {1, POLLOUT, 0};
    if (fflush(stdout) == 0 && !ferror(stdout)) return 0;
    if (poll(&out, 1, 0) == 1 && (out.revents & POLLERR)) exit(0);
    user_error("standard output cannot be written; free space, or name another file");
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
