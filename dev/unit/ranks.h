// Ranks in processes of their own, for unit tests of what they do together.
#pragma once
#include <fcntl.h>
#include <omp.h>
#include <signal.h>
#include <sys/wait.h>

#include "../../kernels/ranks/launch.h"
#include "test.h"

// Runs `rank_main` as `ranks` ranks that launch_fork makes in a child; its exit code, and what went to stderr.
inline int run_ranks(int ranks, void (*rank_main)(Launch*), char* text, size_t bytes) {
    int out[2], status = 0;
    size_t used = 0;
    if (pipe2(out, O_CLOEXEC) != 0) abort();
    fflush(nullptr);
    pid_t child = fork();
    if (child == 0) {
        char error[DATA_ERROR_BYTES];
        Launch launch;
        dup2(out[1], 2);
        omp_set_num_threads(1);  // the threads of a process that forks are not its children's
        setenv("NIBBLE_SILENCE", "2", 1);
        if (!launch_fork(&launch, ranks, error) || !launch_join(&launch, 20, error)) {
            fprintf(stderr, "%s\n", error);
            _exit(3);
        }
        rank_main(&launch);
        launch_leave(&launch);
        _exit(0);
    }
    close(out[1]);
    for (ssize_t got; used + 1 < bytes && (got = read(out[0], text + used, bytes - 1 - used)) > 0;) used += (size_t)got;
    text[used] = 0;
    close(out[0]);
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
