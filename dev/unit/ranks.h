// Ranks in processes of their own, for unit tests of what they do together.
#pragma once
#include <omp.h>

#include "../../kernels/ranks/launch.h"
#include "apart.h"
#include "test.h"

// Runs `rank_main` as `ranks` ranks that launch_fork makes in a child; its exit code, and what went to stderr.
inline int run_ranks(int ranks, void (*rank_main)(Launch*), char* text, size_t bytes) {
    const auto body = [&] {
        Launch launch;
        omp_set_num_threads(1);  // the threads of a process that forks are not its children's
        setenv("NIBBLE_SILENCE", "2", 1);
        if (!launch_fork(&launch, ranks, error) || !launch_join(&launch, 20, error)) {
            fprintf(stderr, "%s\n", error);
            _exit(3);
        }
        rank_main(&launch);
        launch_leave(&launch);
    };
    return run_apart(body, text, bytes);
}

// Expects that they end with this code, and say so.
inline void expect_ranks(Test* test, int ranks, void (*rank_main)(Launch*), int code = 0, const char* says = "") {
    char text[8192];
    const int got = run_ranks(ranks, rank_main, text, sizeof(text));
    expect(got == code && strstr(text, says), "%d ranks: code %d, want %d and '%s': %s", ranks, got, code, says, text);
}
