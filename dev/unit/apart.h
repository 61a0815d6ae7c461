// A case runs a part of itself in a child if that part ends its process, by an error of the user's or a failed check.
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

// A child at work, and the end of a pipe at which its standard error is read.
struct Apart {
    pid_t pid;
    int out;
};

// Begins to run the body in a child.
template <class Body>
Apart apart_begin(Body body) {
    int out[2];
    if (pipe2(out, O_CLOEXEC) != 0) abort();
    fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
        dup2(out[1], 2);
        body();
        _exit(0);
    }
    close(out[1]);
    return {child, out[0]};
}

inline Ended apart_end(const Apart& child) {
    constexpr size_t bytes = 8192;
    char* text = (char*)malloc(bytes);
    int status = 0;
    size_t used = 0;
    for (ssize_t got; used + 1 < bytes && (got = read(child.out, text + used, bytes - 1 - used)) > 0;)
        used += (size_t)got;
    text[used] = 0;
    close(child.out);
    if (child.pid < 0 || waitpid(child.pid, &status, 0) != child.pid) return {-1, text};
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), text};
}

// Runs the body in a child to the end.
template <class Body>
Ended run_apart(Body body) {
    return apart_end(apart_begin(body));
}

// Does the same with a part of a case, whose failures are the case's.
template <class Body>
Ended run_part(Test* test, Body body) {
    return run_apart([&] {
        const int before = test->failures;
        body();
        fflush(stdout);
        _exit(test->failures > before ? 1 : 0);
    });
}

// Expects an exit code and each of these texts in what was written; where there are no texts, that nothing was.
inline void expect_ended(Test* test, const Ended& its, int code, std::initializer_list<const char*> says = {}) {
    expect(its.code == code && (says.size() > 0 || !its.text[0]), "code %d, want %d: %s", its.code, code, its.text);
    for (const char* each : says) expect(strstr(its.text, each), "'%s' is not in: %s", each, its.text);
}
