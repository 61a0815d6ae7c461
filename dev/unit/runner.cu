// The runner behind test.h: `./test_gpt2 [--list] [--here] [-k SUBSTRING]... [-j N]`.
//
// Every case is a process of its own, N at a time: most of the time beside a GPU is spent in NVRTC, which compiles one
// program at a time in a process. Each is forked before this process has called CUDA, which does not survive a fork.
// Its output is collected and printed when it has ended, so that the lines of two cases do not mix; one that
// crashes, leaves or takes longer than CASE_SECONDS is a failure by its name, and the others go on. The default is half
// the cores, at most 8, because a GPU case keeps a core busy and its NVRTC, or the driver, another.
//
// --here: one after another in this process, for a debugger or compute-sanitizer. There a crash is the debugger's to
// report, and there is no time limit.
#include <errno.h>
#include <omp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "../../data/clock.h"
#include "../../kernels/gpus.cuh"
#include "apart.h"
#include "files.h"

constexpr int MOST_JOBS = 64;
constexpr double CASE_SECONDS = 300.0;  // NIBBLE_TEST_SECONDS overrides it

Test** test_list() {
    static Test* head = nullptr;
    return &head;
}

int test_gpus() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

struct Counts {
    int passed, failed, skipped;
};

static bool needs_gpu(const Test* test) {
    size_t length = strlen(test->name);
    return length >= 4 && strcmp(test->name + length - 4, "_gpu") == 0;
}

static void print_line(const Test* test, double seconds) {
    const char* word = test->failures ? "FAIL" : test->skipped ? "skip" : "ok";
    printf("%-4s  %-44s %6.2f s  %s\n", word, test->name, seconds, test->note);
}

static void count_case(const Test* test, Counts* counts) {
    (test->failures ? counts->failed : test->skipped ? counts->skipped : counts->passed)++;
}

// A folder that is TMPDIR while a case runs, and goes with all that is in it when the case has ended.
static void case_folder_make(char (&path)[1024]) {
    static const char* const base = strdup(getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    snprintf(path, sizeof(path), "%s/nibble_test_XXXXXX", base);
    if (!mkdtemp(path) || chmod(path, 0755) != 0) user_error("%s: no folder: %s", path, strerror(errno));
}

static void run_case(Test* test, bool gpu) {
    double begin = seconds_now();
    if (needs_gpu(test) && !gpu) {
        test->skipped = true;
        snprintf(test->note, sizeof(test->note), "no GPU");
    } else {
        test->run(test);
    }
    print_line(test, seconds_now() - begin);
}

// With --here: ends a program that a case has left with a failure; a process that the case has forked may leave.
static pid_t here_pid;
static const char* here_name;

static void case_left() {
    if (getpid() != here_pid) return;
    printf("FAIL  %s left the program\n", here_name), fflush(stdout);
    _exit(1);
}

static void run_here(Test** cases, int count, Counts* counts) {
    bool gpu = test_gpus() > 0;
    atexit(case_left);
    for (int i = 0; i < count; i++) {
        char folder[1024];
        case_folder_make(folder);
        setenv("TMPDIR", folder, 1);
        here_pid = getpid(), here_name = cases[i]->name;
        run_case(cases[i], gpu);
        here_pid = 0;
        remove_tree(folder);
        count_case(cases[i], counts);
    }
}

struct Ending {  // in memory that both processes see
    bool reached;
    bool skipped;
    int failures;
};

struct Worker {
    Test* test;  // null: free
    pid_t pid;
    FILE* output;  // a file without a name, for what it writes
    double begin;
    bool overdue;  // and therefore killed
    Ending* ending;
    char folder[1024];
};

// Cases that take several GPUs have such names; every other case sees one GPU. It is another one for each `number`, so
// that the GPUs of a machine share the cases; and CUDA starts faster, as it need not open all of them.
static void show_gpus(const char* name, int number, int gpus) {
    if (gpus < 2 || strncmp(name, "multi_", 6) == 0 || strncmp(name, "exchange_", 9) == 0) return;
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    char list[1024], one[16];
    snprintf(list, sizeof(list), "%s", visible ? visible : "");
    const char* word = strtok(list, ",");
    for (int i = 0; word && i < number % gpus; i++) word = strtok(nullptr, ",");
    snprintf(one, sizeof(one), "%d", number % gpus);
    setenv("CUDA_VISIBLE_DEVICES", word ? word : one, 1);
}

// `number`: its place among the cases that were picked.
static void worker_start(Worker* worker, Test* test, int number, int gpus, int threads) {
    fflush(stdout);
    *worker->ending = {};
    worker->output = tmpfile();
    if (!worker->output) user_error("%s: no file: %s", test->name, strerror(errno));
    case_folder_make(worker->folder);
    worker->begin = seconds_now();
    worker->pid = fork();
    if (worker->pid < 0) user_error("%s: no process: %s; type --here", test->name, strerror(errno));
    if (worker->pid == 0) {
        setpgid(0, 0);                     // a group with what the case starts, to be killed together
        prctl(PR_SET_PDEATHSIG, SIGKILL);  // not to outlive a runner that is killed
        dup2(fileno(worker->output), 1), dup2(fileno(worker->output), 2);
        omp_set_num_threads(threads);
        setenv("TMPDIR", worker->folder, 1);
        show_gpus(test->name, number, gpus);
        run_case(test, gpus > 0);
        fflush(stdout);
        *worker->ending = {true, test->skipped, test->failures};
        _exit(0);
    }
    worker->test = test;
    worker->overdue = false;
    setpgid(worker->pid, worker->pid);  // whoever comes first
}

static double case_seconds() {
    const char* given = getenv("NIBBLE_TEST_SECONDS");
    return given ? atof(given) : CASE_SECONDS;
}

// Kills a case that takes too long, and all that it has started.
static void worker_limit(Worker* worker) {
    if (worker->overdue || seconds_now() - worker->begin < case_seconds()) return;
    worker->overdue = true;
    kill(-worker->pid, SIGKILL);
}

// Prints and counts the case of a process that has ended, and kills what it has left behind.
static void worker_end(Worker* worker, int status, Counts* counts) {
    Test* test = worker->test;
    kill(-worker->pid, SIGKILL);
    rewind(worker->output);
    for (int byte; (byte = getc(worker->output)) != EOF;) putchar(byte);
    fclose(worker->output);
    test->failures = worker->ending->failures;
    test->skipped = worker->ending->skipped;
    if (!worker->ending->reached) {
        bool killed = WIFSIGNALED(status);
        test->failures = 1;
        snprintf(test->note, sizeof(test->note), killed ? "killed by signal %d, %s" : "left with exit code %d%s",
                 killed ? WTERMSIG(status) : WEXITSTATUS(status), killed ? strsignal(WTERMSIG(status)) : "");
        if (worker->overdue)
            snprintf(test->note, sizeof(test->note), "killed, it took longer than %g s", case_seconds());
        print_line(test, seconds_now() - worker->begin);
    }
    remove_tree(worker->folder);
    count_case(test, counts);
    worker->test = nullptr;
}

// Waits a little, and collects what has ended.
static void workers_wait(Worker* workers, int jobs, Counts* counts) {
    usleep(5000);
    for (int i = 0; i < jobs; i++) {
        int status = 0;
        if (!workers[i].test) continue;
        worker_limit(&workers[i]);
        if (waitpid(workers[i].pid, &status, WNOHANG) == workers[i].pid) worker_end(&workers[i], status, counts);
    }
}

// The cases of (count) that are, or are not, to be alone.
static void run_beside(Test** cases, int count, bool alone, int jobs, int threads, int gpus, Counts* counts) {
    Worker workers[MOST_JOBS] = {};
    size_t bytes = MOST_JOBS * sizeof(Ending);
    Ending* endings = (Ending*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (endings == MAP_FAILED) user_error("no shared memory: %s; type --here", strerror(errno));
    for (int i = 0; i < jobs; i++) workers[i].ending = &endings[i];
    int next = 0, busy;
    do {
        busy = 0;
        for (int i = 0; i < jobs; i++) {
            while (next < count && cases[next]->alone != alone) next++;
            if (!workers[i].test && next < count) {
                worker_start(&workers[i], cases[next], next, gpus, threads);
                next++;
            }
            busy += workers[i].test != nullptr;
        }
        if (busy > 0) workers_wait(workers, jobs, counts);
    } while (busy > 0);
    munmap(endings, bytes);
}

static bool name_picked(const char* name, int argc, char** argv) {
    bool any = false;
    for (int i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], "-k") != 0) continue;
        any = true;
        if (strstr(name, argv[i + 1])) return true;
    }
    return !any;
}

struct Asked {
    bool list, here;
    int jobs;  // cases at a time: -j, or the default
};

static Asked words_read(int argc, char** argv) {
    int cores = omp_get_num_procs();
    Asked asked = {false, false, cores <= 2 ? 1 : cores / 2 < 8 ? cores / 2 : 8};
    for (int i = 1; i < argc; i++) {
        bool takes = strcmp(argv[i], "-k") == 0 || strcmp(argv[i], "-j") == 0;
        bool list = strcmp(argv[i], "--list") == 0, here = strcmp(argv[i], "--here") == 0;
        asked.list |= list, asked.here |= here;
        if (list || here) continue;
        if (!takes || i + 1 == argc) user_error("'%s' was found; type --list, --here, -k SUBSTRING or -j N", argv[i]);
        if (strcmp(argv[i++], "-j") != 0) continue;
        char* end;
        long number = strtol(argv[i], &end, 10);
        if (*end || number < 1 || number > MOST_JOBS) user_error("-j %s: type 1 to %d", argv[i], MOST_JOBS);
        asked.jobs = (int)number;
    }
    return asked;
}

// Crashes, leaves or hangs, even with a process of its own that keeps the output open, as runner_reads_its_words asks.
TEST(runner_ill) {
    const char* ill = getenv("NIBBLE_TEST_RUNNER");
    if (!ill) return;
    printf("    before\n"), fflush(stdout);
    if (strcmp(ill, "abort") == 0) abort();
    if (strcmp(ill, "hang") != 0) exit(atoi(ill));
    fork();
    for (;;) pause();
}

int main(int argc, char** argv) {
    openmp_wait_asleep(argv);
    Counts counts = {0, 0, 0};
    Test* picked[4096];
    Asked asked = words_read(argc, argv);
    int count = 0, jobs = asked.jobs;
    setvbuf(stdout, nullptr, _IOLBF, 0);
    for (Test* test = *test_list(); test && count < 4096; test = test->next) {
        if (name_picked(test->name, argc, argv)) picked[count++] = test;
    }
    if (asked.list) {
        for (int k = 0; k < count; k++) printf("%s\n", picked[k]->name);
        return 0;
    }
    if (asked.here) {
        run_here(picked, count, &counts);
    } else {
        int cores = omp_get_max_threads();
        // A process of its own counts the GPUs, since this one, which forks the cases, must not call CUDA.
        const int counted = run_apart([] { _exit(test_gpus()); }).code;
        const int gpus = counted > 0 && counted < 128 ? counted : 0;
        run_beside(picked, count, false, jobs, cores > jobs ? cores / jobs : 1, gpus, &counts);
        run_beside(picked, count, true, 1, cores, gpus, &counts);
    }
    printf("%d passed, %d failed, %d skipped\n", counts.passed, counts.failed, counts.skipped);
    return counts.failed > 0 || counts.passed == 0;
}
