// Tests of what guards a run: values that are not finite are neither saved nor loaded, and signals in every phase.
#include "../../data/safetensors.h"
#include "cli.h"

TEST(guard_values) {
    // These are the type's largest value, infinity (0: it has none) and NaN.
    const std::tuple<const char*, int, uint64_t, uint64_t, uint64_t> types[] = {
        {"F32", 4, 0x7f7fffff, 0xff800000, 0x7fc00001},
        {"BF16", 2, 0x7f7f, 0xff80, 0x7fff},
        {"F16", 2, 0xfbff, 0x7c00, 0x7e00},
        {"F64", 8, 0x7fefffffffffffff, 0xfff0000000000000, 0x7ff8000000000000},
        {"F8_E5M2", 1, 0x7b, 0xfc, 0x7d},
        {"F8_E4M3", 1, 0x7e, 0, 0xff},
        {"F8_E8M0", 1, 0xfe, 0, 0xff},
        {"U8", 1, 0xff, 0, 0},
    };
    constexpr int COUNT = 200000;
    char* values = (char*)malloc(8 * COUNT + 1);
    for (const auto& [dtype, bytes, good, infinite, nan] : types) {
        char* at = values + 1;  // not aligned
        for (int i = 0; i < COUNT; i++) memcpy(at + (int64_t)i * bytes, &good, bytes);
        expect(values_finite("x", dtype, at, (int64_t)COUNT * bytes, 0, error), "%s: %s", dtype, error);
        for (int place : {0, 70001, COUNT - 1}) {
            for (uint64_t bad : {infinite, nan}) {
                if (!bad) continue;
                memcpy(at + (int64_t)place * bytes, &bad, bytes);
                const char* want = formatted("x holds %s at element %d", bad == nan ? "nan" : "infinity", place + 5);
                bool found = !values_finite("x", dtype, at, (int64_t)COUNT * bytes, 5, error);
                expect(found && strcmp(error, want) == 0, "%s: '%s', want '%s'", dtype, error, want);
                memcpy(at + (int64_t)place * bytes, &good, bytes);
            }
        }
    }
}

// Sends a signal and expects that the run ends with its exit code.
static void signalled(Test* test, Child* child, int number) {
    kill(child->pid, number);
    finish(child);
    expect(child->code == 128 + number, "signal %d: exit code %d: %s", number, child->code, ERR(*child));
}

#define LONG_RUN SHAPE " " QUICK " --device cpu --steps 100000 --save-every 0 --data %s/text.txt --run %s"

// dev/faults.py sends signals at any moment.
TEST(guard_signals) {
    signal(SIGHUP, SIG_DFL);  // the tests themselves may run under nohup
    const char* work = work_folder();
    int number = 0;
    // A run whose parent left signals blocked hears them; what a CPU limit and timers send saves too, however often.
    sigset_t all, before;
    sigfillset(&all);
    for (int signal : {SIGTERM, SIGHUP, SIGXCPU, SIGALRM, SIGPWR, SIGPROF}) {
        Child child = {};
        const char* run = formatted("%s/run%d", work, number++);
        sigprocmask(SIG_BLOCK, &all, &before);
        start(&child, LONG_RUN " --val-every 3 --val-tokens 1000000", work, run);
        sigprocmask(SIG_SETMASK, &before, nullptr);
        expect(wait_for_step(&child, run, 1), "it does not start");
        for (int i = 0; i < 3 && signal == SIGXCPU; i++) kill(child.pid, signal), pause_ms(10);
        signalled(test, &child, signal);
        expect(strstr(ERR(child), "press again to quit without saving"), "signal %d: %s", signal, ERR(child));
    }
    // A second Ctrl-C ends a run at once; SIGHUP that is ignored at the start, as under nohup, stays ignored.
    const char* run = joined(work, "nohup");
    Child twice = {}, nohup = {};
    start(&twice, LONG_RUN "/twice --val-every 1 --val-tokens 1000000", work, work);
    pause_ms(700);
    kill(twice.pid, SIGINT);
    pause_ms(600);
    signalled(test, &twice, SIGINT);
    signal(SIGHUP, SIG_IGN);
    start(&nohup, BRIEF " --device cpu --steps 400", work, run);
    expect(wait_for_step(&nohup, run, 5), "it does not start");
    kill(nohup.pid, SIGHUP);
    finish(&nohup);
    expect_code(nohup, 0);
    expect(exists(run, "step_00000400"), "it did not go on");
}
