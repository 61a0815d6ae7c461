// The runner behind test.h: `./test_gpt2 [--list] [-k SUBSTRING]... [-j N]`.
//
// With N above 1 every case is a process of its own, N at a time: most of the time beside a GPU is spent in NVRTC,
// which compiles one program at a time in a process. Each is forked before this process has called CUDA, which does not
// survive a fork. What it writes is collected and printed when it has ended, so that the lines of two cases do not mix;
// one that crashes or leaves is a failure by its name, and the others go on. The default is half the cores, at most 8,
// because a GPU case keeps a core busy and its NVRTC, or the driver, another.
#include <errno.h>
#include <fcntl.h>
#include <omp.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

#include "../../kernels/common.cuh"
#include "test.h"

constexpr int MOST_JOBS = 64;

Test** test_list() {
    static Test* head = nullptr;
    return &head;
}

bool test_gpu_present() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

struct Counts {
    int passed, failed, skipped;
};

static double clock_seconds() {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

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

static void run_case(Test* test, bool gpu) {
    double begin = clock_seconds();
    if (needs_gpu(test) && !gpu) {
        test->skipped = true;
        snprintf(test->note, sizeof(test->note), "no GPU");
    } else {
        test->run(test);
    }
    print_line(test, clock_seconds() - begin);
}

// A process that runs one case.

struct Ending {  // in memory that both processes see
    bool reached;
    bool skipped;
    int failures;
};

struct Worker {
    Test* test;  // null: free
    pid_t pid;
    int output;  // what it writes; -1: it has closed it
    char* text;
    size_t bytes;
    double begin;
    Ending* ending;
};

static void worker_start(Worker* worker, Test* test, bool gpu, int threads) {
    int ends[2];
    fflush(stdout);
    *worker->ending = {};
    if (pipe2(ends, O_CLOEXEC) != 0) user_error("%s: no pipe: %s", test->name, strerror(errno));
    worker->begin = clock_seconds();
    worker->pid = fork();
    if (worker->pid < 0) user_error("%s: no process: %s; type -j 1", test->name, strerror(errno));
    if (worker->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);  // not to outlive a runner that is killed
        dup2(ends[1], 1), dup2(ends[1], 2);
        omp_set_num_threads(threads);
        run_case(test, gpu);
        fflush(stdout);
        *worker->ending = {true, test->skipped, test->failures};
        _exit(0);
    }
    close(ends[1]);
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    worker->test = test;
    worker->output = ends[0];
    worker->text = nullptr, worker->bytes = 0;
}

// What it has written by now.
static void worker_read(Worker* worker) {
    char piece[4096];
    ssize_t got = 0;
    while (worker->output >= 0 && (got = read(worker->output, piece, sizeof(piece))) > 0) {
        worker->text = (char*)realloc(worker->text, worker->bytes + (size_t)got);
        memcpy(worker->text + worker->bytes, piece, (size_t)got);
        worker->bytes += (size_t)got;
    }
    if (worker->output >= 0 && got == 0) close(worker->output), worker->output = -1;
}

// Prints and counts the case of a process that has ended.
static void worker_end(Worker* worker, int status, Counts* counts) {
    Test* test = worker->test;
    worker_read(worker);
    if (worker->output >= 0) close(worker->output);  // a process that the case left behind has it too
    fwrite(worker->text, 1, worker->bytes, stdout);
    test->failures = worker->ending->failures;
    test->skipped = worker->ending->skipped;
    if (!worker->ending->reached) {
        bool killed = WIFSIGNALED(status);
        test->failures = 1;
        snprintf(test->note, sizeof(test->note), killed ? "killed by signal %d, %s" : "left with exit code %d%s",
                 killed ? WTERMSIG(status) : WEXITSTATUS(status), killed ? strsignal(WTERMSIG(status)) : "");
        print_line(test, clock_seconds() - worker->begin);
    }
    count_case(test, counts);
    free(worker->text);
    worker->test = nullptr;
}

// Waits until there is something to read or to collect, and collects it.
static void workers_wait(Worker* workers, int jobs, Counts* counts) {
    struct pollfd watched[MOST_JOBS];
    for (int i = 0; i < jobs; i++) watched[i] = {workers[i].test ? workers[i].output : -1, POLLIN, 0};
    poll(watched, (nfds_t)jobs, 20);
    for (int i = 0; i < jobs; i++) {
        int status = 0;
        if (!workers[i].test) continue;
        worker_read(&workers[i]);
        if (waitpid(workers[i].pid, &status, WNOHANG) == workers[i].pid) worker_end(&workers[i], status, counts);
    }
}

// The cases of (count) that are, or are not, to be alone.
static void run_beside(Test** cases, int count, bool alone, int jobs, int threads, bool gpu, Counts* counts) {
    Worker workers[MOST_JOBS] = {};
    size_t bytes = MOST_JOBS * sizeof(Ending);
    Ending* endings = (Ending*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (endings == MAP_FAILED) user_error("no shared memory: %s; type -j 1", strerror(errno));
    for (int i = 0; i < jobs; i++) workers[i].ending = &endings[i];
    int next = 0, busy;
    do {
        busy = 0;
        for (int i = 0; i < jobs; i++) {
            while (next < count && cases[next]->alone != alone) next++;
            if (!workers[i].test && next < count) worker_start(&workers[i], cases[next++], gpu, threads);
            busy += workers[i].test != nullptr;
        }
        if (busy > 0) workers_wait(workers, jobs, counts);
    } while (busy > 0);
    munmap(endings, bytes);
}

// Asked by a process of its own: see above.
static bool gpu_present_asked_aside() {
    int status = 1;
    pid_t child = fork();
    if (child == 0) _exit(test_gpu_present() ? 0 : 1);
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
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

// Cases at a time: -j, or the default.
static int jobs_asked(int argc, char** argv) {
    int cores = omp_get_num_procs(), jobs = cores <= 2 ? 1 : cores / 2 < 8 ? cores / 2 : 8;
    for (int i = 1; i < argc; i++) {
        bool takes = strcmp(argv[i], "-k") == 0 || strcmp(argv[i], "-j") == 0;
        if (!takes && strcmp(argv[i], "--list") == 0) continue;
        if (!takes || i + 1 == argc) user_error("'%s' was found; type --list, -k SUBSTRING or -j N", argv[i]);
        if (strcmp(argv[i++], "-j") != 0) continue;
        char* end;
        long number = strtol(argv[i], &end, 10);
        if (*end || number < 1 || number > MOST_JOBS) user_error("-j %s: type 1 to %d", argv[i], MOST_JOBS);
        jobs = (int)number;
    }
    return jobs;
}

// This program with these words; returns its exit code. NIBBLE_TEST_RUNNER has the two cases below crash and leave.
static int run_self(const char* words, bool crash, char* output, size_t bytes) {
    char command[256];
    snprintf(command, sizeof(command), "%s/proc/%d/exe %s 2>&1", crash ? "NIBBLE_TEST_RUNNER=1 " : "", (int)getpid(),
             words);
    FILE* pipe = popen(command, "r");
    size_t used = pipe ? fread(output, 1, bytes - 1, pipe) : 0;
    output[used] = 0;
    int status = pipe ? pclose(pipe) : -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(runner_goes_on_after_a_crash) {
    if (getenv("NIBBLE_TEST_RUNNER")) {
        printf("    before\n");
        abort();
    }
    char text[4096];
    int code = run_self("-j 2 -k runner_ -k data_crc", true, text, sizeof(text));
    const char* const lines[] = {"    before\nFAIL  runner_goes_on_after_a_crash", "killed by signal 6, ",
                                 "    here\nFAIL  runner_reads_its_words", "left with exit code 3\n", "ok    data_crc"};
    for (const char* line : lines) expect(strstr(text, line), "\"%s\" is not in\n%s", line, text);
    const char* counts = strstr(text, " passed, ");
    expect(code == 1 && counts && strcmp(counts, " passed, 2 failed, 0 skipped\n") == 0, "exit code %d\n%s", code,
           text);
}

TEST(runner_reads_its_words) {
    if (getenv("NIBBLE_TEST_RUNNER")) {
        printf("    here\n");
        exit(3);
    }
    char text[65536];
    const struct {
        const char *words, *says;
        int code;
    } runs[] = {{"-j 0", "-j 0: type 1 to 64", 2},        {"-j", "type --list, -k SUBSTRING or -j N", 2},
                {"crc", "'crc' was found; type", 2},      {"-k no_such_case -j 4", "0 passed, 0 failed, 0 skipped", 1},
                {"--list -k runner_", "runner_reads", 0}, {"-j 1 -k data_crc", " passed, 0 failed, 0 skipped", 0}};
    for (const auto& run : runs) {
        int code = run_self(run.words, false, text, sizeof(text));
        expect(code == run.code && strstr(text, run.says), "%s: exit code %d\n%s", run.words, code, text);
    }
}

int main(int argc, char** argv) {
    openmp_wait_asleep(argv);
    Counts counts = {0, 0, 0};
    Test* picked[4096];
    int count = 0, jobs = jobs_asked(argc, argv);
    setvbuf(stdout, nullptr, _IOLBF, 0);
    for (Test* test = *test_list(); test && count < 4096; test = test->next) {
        if (name_picked(test->name, argc, argv)) picked[count++] = test;
    }
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--list") != 0) continue;
        for (int k = 0; k < count; k++) printf("%s\n", picked[k]->name);
        return 0;
    }
    if (jobs > 1 && count > 1) {
        int cores = omp_get_max_threads();
        bool gpu = gpu_present_asked_aside();
        run_beside(picked, count, false, jobs, cores > jobs ? cores / jobs : 1, gpu, &counts);
        run_beside(picked, count, true, 1, cores, gpu, &counts);
    } else {
        bool gpu = test_gpu_present();
        for (int k = 0; k < count; k++) run_case(picked[k], gpu), count_case(picked[k], &counts);
    }
    printf("%d passed, %d failed, %d skipped\n", counts.passed, counts.failed, counts.skipped);
    return counts.failed > 0 || counts.passed == 0;
}
