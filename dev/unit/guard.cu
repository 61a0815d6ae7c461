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

// Writes state.json's sums and seal anew, as somebody would who changed a file of the checkpoint on purpose.
static void seal_again(Test* test, const char* checkpoint) {
    char *state = contents(checkpoint, "state.json"), *files = state ? strstr(state, "\"files\"") : nullptr;
    expect(files, "%s/state.json has no files", checkpoint);
    if (files) *files = 0;
    CheckpointFile all[] = {{"model.safetensors", 0, -1}, {"optimizer.safetensors", 0, -1}, {"config.json", 0, -1}};
    if (files) expect(checkpoint_seal(checkpoint, state, all, 3, error), "%s", error);
}

// One NaN or infinity in the last value of a file: no option that loads it goes on.
FOLDER_TEST(guard_poisoned_checkpoints) {
    const std::tuple<const char*, const char*, const char*, int> poisons[] = {
        {"--preset adamw32", "model.safetensors", "\x80\x7f", 2},
        {"--preset adamw32", "optimizer.safetensors", "\x00\x00\xc0\x7f", 4},  // v, or the master
        {"--weights fp32 --m fp32 --v bf16:sr", "optimizer.safetensors", "\x80\x7f", 2},
        {"--weights bf16:sr --m dyn8 --v udyn8", "optimizer.safetensors", "\x00\x00\x80\x7f", 4},  // a scale
    };
    int number = 0;
    for (const auto& [formats, file, poison, count] : poisons) {
        int64_t bytes;
        const char* run = formatted("%s/run%d", work, number++);
        train_well(SHAPE " " QUICK " --data %s/text.txt --device cpu --run %s --steps 2 %s", work, run, formats);
        const char* step = checkpoint_name(run, 2);
        char* text = contents(step, file, &bytes);
        memcpy(text + bytes - count, poison, (size_t)count);
        write_bytes(step, file, text, (size_t)bytes);
        seal_again(test, step);
        refused("--resume", " holds ", " at element ", "--resume %s --steps 4 --device cpu", run);
        if (strcmp(file, "model.safetensors") == 0) {
            run_train(sampled, "--sample a --model %s --device cpu", step);
            expect_error(test, &sampled, "--sample", " holds ", " at element ");
            expect(!*OUT(sampled), "text from bad weights: %s", OUT(sampled));
            refused("--model", " holds ", " at element ",
                    QUICK " --data %s/text.txt --model %s --device cpu --run %s/begun --steps 1", work, step, work);
        }
    }
}

// A run that ends with weights that are of no use, or not even finite, keeps its good checkpoint and fails, with and
// without validations and whatever --keep says.
FOLDER_TEST(guard_diverging_run) {
    const char* run = joined(work, "run");
    train_well(SHAPE " " QUICK " --data %s/text.txt --device cpu --run %s --steps 2 --weights fp32", work, run);
    for (const char* validation : {"--val-every 0", "--val-every 1 --val-tokens 64"}) {
        run_train(child,
                  "--resume %s --steps 9 --rule sgd --lr 1000 --final-lr 1 --clip 0 --warmup 0 --weight-decay 100 "
                  "--keep 1 --save-every 0 --device cpu %s",
                  run, validation);
        expect(child.code == 2 && (strstr(ERR(child), "was not saved") || strstr(ERR(child), "without a finite loss")),
               "%s: exit code %d: %s", validation, child.code, ERR(child));
        expect(exists(run, "step_00000002"), "%s: the good checkpoint is gone", validation);
        remove_tree(joined(run, "step_00000009"));
    }
    train_well("--resume %s/step_00000002 --run %s/again --steps 3 --device cpu", run, work);
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
        Child child = new_child();
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
    Child twice = new_child(), nohup = new_child();
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

// A shell can do this to the three standard descriptors: a reader that leaves, and descriptors that are closed.
FOLDER_TEST(guard_closed_output) {
    static const char* const ways[] = {"| head -n 1 > /dev/null", "<&- >&- 2>&-", ">&-", "2>&- > /dev/null", "<&- >&-"};
    for (int i = 0; i < (int)(sizeof(ways) / sizeof(ways[0])); i++) {
        const char* run = formatted("%s/run%d", work, i);
        const char* command = formatted(
            "CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 timeout 60 %s/train %s --batch 2 --data %s/text.txt --device cpu "
            "--steps 30 --print-every 1 --val-every 5 --run %s %s",
            test_folder(), SHAPE, work, run, ways[i]);
        int status = system(command);
        expect(status == 0, "%s: status %d", ways[i], status);
        expect(exists(run, "step_00000030"), "%s: the run did not end", ways[i]);
        static Losses losses;
        read_losses(test, run, &losses);  // every line is JSON
        expect(losses.lines == 30, "%s: %d lines", ways[i], losses.lines);
    }
    // Text that is only printed is lost on a full disk, which is an error; a reader that has enough is none.
    const char* const printing[] = {"--help", "--list-formats", "--list-presets", "--dry-run --device cpu",
                                    "--sample a --device cpu --sample-tokens 9 --model WORK/run0/step_00000030"};
    for (const char* words : printing) {
        for (int full = 0; full < 2; full++) {
            const char* command = formatted(
                "bash -c 'cd %s && CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 timeout 60 %s/train %s 2> said %s; exit "
                "${PIPESTATUS[0]}'",
                work, test_folder(), replaced(words, "WORK", work), full ? "> /dev/full" : "| head -c 1 > /dev/null");
            int status = WEXITSTATUS(system(command));
            char* said = contents(work, "said");
            expect(status == (full ? 2 : 0), "%s: status %d: %s", command, status, said);
            expect(!full == !strstr(said, "standard output cannot be written"), "%s: %s", command, said);
        }
    }
}
