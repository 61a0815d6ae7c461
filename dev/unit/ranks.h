// Unit tests of what ranks do together run them here, each in a process of its own.
#pragma once
#include <omp.h>

#include "../../kernels/ranks/launch.h"
#include "apart.h"

// A rank that finds a mistake says so and ends all with code 7.
#define require_rank(condition)                                                                       \
    do {                                                                                              \
        if (!(condition)) launch_failed(7, text_kept("%s:%d: %s\n", __FILE__, __LINE__, #condition)); \
    } while (0)

// Runs `rank_main` as `ranks` ranks that launch_fork makes in a child.
inline Ended run_ranks(int ranks, void (*rank_main)(Launch*)) {
    return run_apart([&] {
        Launch launch;
        omp_set_num_threads(1);  // children do not inherit the threads of the process that forks them
        setenv("NIBBLE_SILENCE", "2", 1);
        if (!launch_fork(&launch, ranks, error) || !launch_join(&launch, 20, error)) {
            fprintf(stderr, "%s\n", error);
            _exit(3);
        }
        rank_main(&launch);
        _exit(launch_leave(&launch, 0));
    });
}

inline void expect_ranks(Test* test, int ranks, void (*rank_main)(Launch*), int code = 0, const char* says = "") {
    const Ended its = run_ranks(ranks, rank_main);
    expect(its.code == code && strstr(its.text, says), "%d ranks: code %d, want %d and '%s': %s", ranks, its.code, code,
           says, its.text);
}
