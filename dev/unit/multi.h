// Several ranks, from the command line: for multi.cu and multi_ends.cu.
#pragma once
#include <sys/file.h>

#include "gpus.h"
#include "cli.h"

// The arguments are the folder of text.txt and that of the run.
#define SEVERAL                                                                                                    \
    "--layers 3 --channels 64 --heads 1 --seq 16 --val-every 0 --sample-every 0 --warmup 2 --print-every 1000000 " \
    "--data %s/text.txt --run %s"

// Returns how many GPUs a case uses: 8, or 4 or 2 where there are not as many.
inline int ranks_on_gpus() {
    return test_gpus() < 4 ? 2 : test_gpus() < 8 ? 4 : 8;
}

#define GPUS_TEST(NAME)                                                \
    static void on_gpus_##NAME(Test* test, int ranks);                 \
    TEST(NAME) {                                                       \
        if (getenv("NIBBLE_SANITIZE")) skip("processes of their own"); \
        if (test_gpus() < 2) skip("%d GPU, needs 2", test_gpus());     \
        const int ranks = ranks_on_gpus();                             \
        note(test, "%d GPUs", ranks);                                  \
        on_gpus_##NAME(test, ranks);                                   \
    }                                                                  \
    static void on_gpus_##NAME(Test* test, [[maybe_unused]] int ranks)

// Defines two cases, NAME on CPU_RANKS ranks of the CPU and NAME_gpu on `ranks` GPUs; the body has `gpu` and `ranks`.
#define RANKS_TEST(NAME, CPU_RANKS)                               \
    static void on_ranks_##NAME(Test* test, bool gpu, int ranks); \
    TEST(NAME) {                                                  \
        on_ranks_##NAME(test, false, CPU_RANKS);                  \
    }                                                             \
    GPUS_TEST(NAME##_gpu) {                                       \
        on_ranks_##NAME(test, true, ranks);                       \
    }                                                             \
    static void on_ranks_##NAME(Test* test, bool gpu, [[maybe_unused]] int ranks)

inline void finish_well(Test* test, Child* child) {
    finish(child);
    expect_code(*child, 0);
}

// Waits until no other case runs on more than four GPUs, and returns a file that keeps them waiting as long as a
// process has it open. The driver starts one process on many GPUs after another, so all runs at once would run into
// their time limits; a case's own limit counts the wait (NIBBLE_TEST_SECONDS=900 on eight GPUs).
inline int take_turn(bool gpu, int ranks) {
    if (!gpu || ranks <= 4) return -1;
    const char* path = formatted("/tmp/nibble_test_turn_%d", (int)getuid());
    const int turn = open(path, O_CREAT | O_RDWR | O_NOFOLLOW, 0600);
    while (turn >= 0 && flock(turn, LOCK_EX) != 0 && errno == EINTR) {
    }
    if (turn < 0) printf("    no turns are taken: %s: %s\n", path, strerror(errno));
    return turn;
}

// Starts ./train with `ranks` ranks on GPUs or over the stand-in. The child's processes keep the turn until they end.
#define start_ranks(child, on_gpu, ranks, format, ...)                                               \
    do {                                                                                             \
        const int ranks_turn = take_turn(on_gpu, ranks);                                             \
        (child)->gpu = on_gpu;                                                                       \
        setenv("NIBBLE_STAND_IN", (on_gpu) ? "0" : "1", 1);                                          \
        start(child, format " --gpus %d --device %s", __VA_ARGS__, ranks, (on_gpu) ? "gpu" : "cpu"); \
        unsetenv("NIBBLE_STAND_IN");                                                                 \
        if (ranks_turn >= 0) close(ranks_turn);                                                      \
    } while (0)

// Runs it to the end and expects success. `child` stays, to be looked at.
#define ranks_well(child, on_gpu, ranks, ...)        \
    Child child = {};                                \
    start_ranks(&child, on_gpu, ranks, __VA_ARGS__); \
    finish_well(test, &child)

#define train_ranks(on_gpu, ranks, ...)                                   \
    do {                                                                  \
        ranks_well(ranks_child, on_gpu, ranks, __VA_ARGS__);              \
        expect(ERR(ranks_child)[0] == 0, "stderr: %s", ERR(ranks_child)); \
    } while (0)

#define refused_ranks(what, needle, needle2, on_gpu, ranks, ...) \
    do {                                                         \
        Child ranks_child = {};                                  \
        start_ranks(&ranks_child, on_gpu, ranks, __VA_ARGS__);   \
        finish(&ranks_child);                                    \
        expect_error(test, &ranks_child, what, needle, needle2); \
    } while (0)

static const char* const modes[] = {"none", "states", "grads", "weights"};

// A run on four GPUs takes two seconds to start, and one on eight takes four to eight, whatever runs beside it. So
// these cases leave out combinations there, which say nothing new about the number of ranks.
inline bool runs_few(bool gpu, int ranks) {
    return gpu && ranks > 2;
}

// Lists rank 0, which is the child, and the processes that it has made, in their order. Returns how many there are.
inline int ranks_of(const Child* child, pid_t* ranks, int most) {
    char text[1024] = "";
    FILE* file = fopen(formatted("/proc/%d/task/%d/children", child->pid, child->pid), "r");
    if (file && !fgets(text, sizeof(text), file)) text[0] = 0;
    if (file) fclose(file);
    int count = 0;
    ranks[count++] = child->pid;
    for (char* word = strtok(text, " "); word && count < most; word = strtok(nullptr, " ")) ranks[count++] = atoi(word);
    return count;
}

// Waits until each has ended; a zombie counts as ended. Returns whether that came true.
inline bool gone(const pid_t* ranks, int count, double seconds = 5) {
    return comes_true(seconds, 100, [=] {
        int left = 0;
        for (int i = 0; i < count; i++) {
            FILE* file = fopen(formatted("/proc/%d/cmdline", ranks[i]), "r");  // a zombie's is empty
            left += file && fgetc(file) != EOF;
            if (file) fclose(file);
        }
        return left == 0;
    });
}
