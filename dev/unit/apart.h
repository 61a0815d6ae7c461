// A part of a case that ends its process: an error of the user's, or a failed check.
#pragma once
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include <initializer_list>

#include "test.h"

// How a child ended: its exit code, 0 when it came to its end, or 128 and the signal that ended it; and what it wrote
// to standard error.
struct Ended {
    int code;
    const char* text;  // never freed
};

// Runs the body in a child.
template <class Body>
Ended run_apart(Body body) {
    constexpr size_t bytes = 8192;
    char* text = (char*)malloc(bytes);
    int out[2], status = 0;
    size_t used = 0;
    if (pipe2(out, O_CLOEXEC) != 0) abort();
    fflush(nullptr);
    pid_t child = fork();
    if (child == 0) {
        dup2(out[1], 2);
        body();
        _exit(0);
    }
    close(out[1]);
    for (ssize_t got; used + 1 < bytes && (got = read(out[0], text + used, bytes - 1 - used)) > 0;) used += (size_t)got;
    text[used] = 0;
    close(out[0]);
    if (child < 0 || waitpid(child, &status, 0) != child) return {-1, text};
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), text};
}

// Expects an exit code and each of these texts, or where there are none that nothing was written.
inline void expect_ended(Test* test, const Ended& its, int code, std::initializer_list<const char*> says = {}) {
    expect(its.code == code && (says.size() > 0 || !its.text[0]), "code %d, want %d: %s", its.code, code, its.text);
    for (const char* each : says) expect(strstr(its.text, each), "'%s' is not in: %s", each, its.text);
}
