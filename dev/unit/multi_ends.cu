// How runs of several ranks end, from the command line (multi.cu): dead and stopped ranks, signals, bad data and faults
// that one rank alone finds.
#include "apart.h"
#include "multi.h"

// Starts `count` ranks that would train for long, and waits for their fifth step.
static void start_long(Test* test, Child* child, const char* work, const char* name, pid_t* ranks, bool gpu = false,
                       int count = 3, const char* silence = "5") {
    const char* run = joined(work, name);
    *child = {};
    setenv("NIBBLE_SILENCE", silence, 1);  // 0: as users have it
    start_ranks(child, gpu, count, SEVERAL " --batch 1 --tokens-per-step %d --steps 1000000", work, run, 16 * count);
    unsetenv("NIBBLE_SILENCE");
    expect(wait_for_step(child, run, 5), "%s: no fifth step: %s", name, ERR(*child));
    expect(ranks_of(child, ranks, count) == count, "%s: not %d ranks", name, count);
}

// Sends a signal to a rank, and expects that all end within half a minute with this code and say so, or name no rank
// where `says` is "": rank 0, which a shell waits for, when it goes on if the signal has stopped it.
static void check_death(Test* test, const char* name, int rank, int signal, int code, const char* says,
                        const char* also, bool gpu = false, int count = 3, const char* silence = "5") {
    const char* work = work_folder();
    pid_t ranks[8] = {};
    Child child;
    start_long(test, &child, work, name, ranks, gpu, count, silence);
    double begin = seconds_now();
    kill(ranks[rank], signal);
    if (rank == 0 && signal == SIGSTOP) expect(gone(ranks + 1, count - 1, 30), "%s: a rank lives on", name);
    kill(child.pid, SIGCONT);
    finish(&child);
    double took = seconds_now() - begin;
    expect(child.code == code && took < 30, "%s: code %d, want %d, after %.1f s", name, child.code, code, took);
    expect(strstr(ERR(child), says) && strstr(ERR(child), also), "%s: '%s' or '%s' is missing: %s", name, says, also,
           ERR(child));
    expect(says[0] || !strstr(ERR(child), "rank "), "%s: a rank is named: %s", name, ERR(child));
    expect(gone(ranks, count), "%s: a rank lives on", name);
}

TEST(multi_dead_ranks) {
    check_death(test, "killed", 1, SIGKILL, 137, "rank 1 on ", "been ended by signal 9");
    check_death(test, "first_killed", 0, SIGKILL, 137, "", "");
    check_death(test, "aborted", 2, SIGABRT, 134, "rank 2 on ", "been ended by signal 6");
    check_death(test, "first_stopped", 0, SIGSTOP, 1, "rank 0 on ", "has been silent for 5 s");
    // With the patience that users have.
    check_death(test, "stopped", 1, SIGSTOP, 1, "rank 1 on ", "has been silent for 20 s", false, 3, "0");
}

GPUS_TEST(multi_dead_ranks_gpu) {
    const char* last = formatted("rank %d on ", ranks - 1);
    check_death(test, "killed", ranks - 1, SIGKILL, 137, last, "been ended by signal 9", true, ranks);
    check_death(test, "first_killed", 0, SIGKILL, 137, "", "", true, ranks);
    check_death(test, "stopped", ranks - 1, SIGSTOP, 1, last, "has been silent for 5 s", true, ranks);
}

// A process that becomes ./train may have a child that has ended, which is no rank.
TEST(multi_stranger_child) {
    const char* work = work_folder();
    const Ended its = run_apart([work] {
        const Child child = {};
        const int out[2] = {-1, 2};  // all goes to standard error
        char* words[64] = {nullptr};
        int count = 1;
        siginfo_t ended;
        const pid_t stranger = fork();
        if (stranger == 0) _exit(0);
        waitid(P_PID, (id_t)stranger, &ended, WEXITED | WNOWAIT);
        setenv("NIBBLE_STAND_IN", "1", 1);
        const char* line = formatted(SEVERAL " --batch 1 --tokens-per-step 48 --steps 3 --gpus 3 --device cpu", work,
                                     joined(work, "run"));
        for (char* word = strtok(strdup(line), " "); word; word = strtok(nullptr, " ")) words[count++] = word;
        become_train(&child, out, out, words);
    });
    expect_ended(test, its, 0, {"done "});
}

// One rank alone is told, as some launchers do, or all: every rank ends at the same step, and the run goes on from it.
RANKS_TEST(multi_signals, 3) {
    for (int which = runs_few(gpu, ranks) ? 1 : 0; which < 3; which++) {
        const char* work = work_folder();
        pid_t process[8] = {};
        Child child;
        start_long(test, &child, work, "run", process, gpu, ranks);
        const char* run = joined(work, "run");
        if (which == 2) {
            kill(process[1], SIGUSR1);
            const auto saved = [run] {
                int64_t newest;
                return checkpoints(run, &newest) > 0 && newest > 0;
            };
            expect(comes_true(20, 10, saved), "SIGUSR1 saved nothing");
        }
        kill(which == 0 ? child.pid : process[which == 1 ? 1 : ranks - 1], SIGTERM);
        finish(&child);
        expect_code(child, 128 + SIGTERM);
        expect(strstr(OUT(child), "stopped") && strstr(OUT(child), "save"), "%d: %s", which, OUT(child));
        int64_t newest;
        expect(checkpoints(run, &newest) > 0, "%d: nothing is saved", which);
        ranks_well(again, gpu, ranks, "--resume %s --steps %lld", run, (long long)newest + 2);
    }
}

// One rank reads a bad token: all save the good steps before it, then that rank tells.
static void check_bad_token(Test* test, bool gpu, int ranks) {
    const char* work = work_folder();
    write_shard(work, "bad.bin", 321, 60000);
    const char* run = joined(work, "token");
    refused_ranks("bad token", "holds token 60000", "last checkpoint is ", gpu, ranks,
                  "--layers 1 --channels 64 --heads 1 --seq 16 --val-every 0 --sample-every 0 --data %s/bad.bin --val "
                  "%s/bad.bin --run %s --batch 1 --tokens-per-step %d --steps 40 --logit-rows 16",
                  work, work, run, 16 * ranks);
    expect(checkpoints(run) == 1, "no checkpoint of the steps before the bad token");
}

TEST(multi_bad_token) {
    for (int ranks : {2, 4}) check_bad_token(test, false, ranks);
}

GPUS_TEST(multi_bad_token_gpu) {
    check_bad_token(test, true, ranks);
}
