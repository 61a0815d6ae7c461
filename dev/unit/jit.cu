// Tests of the run-time compiler, none of which needs a GPU: the compiler, the cache under
// all that can happen to a file (damage, truncation, another owner, a folder that is read-only, another's or full, a
// process killed as it writes, eight at once), what happens without NVRTC, and how long it takes. That combinations
// compile is tested in laws_gpu.cu.
#include <errno.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <signal.h>
#include <time.h>

#include <functional>

#include "apart.h"
#include "steps.h"

// A small kernel, which is quick to compile.
static const char* small_expression() {
    return kernel_of(states_config("adamw", "fp32", "bf16", "bf16:sr", "bf16"));
}

// An empty cache, and that kernel, or none (""), which is quick to compile.
struct Cached {
    CacheFolder folder;
    const char* expression;
    JitImage want;  // compiled, not through the cache

    explicit Cached(Test* test, const char* of = small_expression()) : expression(of) {
        expect(jit_get(expression, "sm_90", false, &want, error), "%s", error);
    }
    ~Cached() { jit_free(&want); }
};

// Fetches the kernel and compares it with the one first compiled; returns whether it came from the cache.
static bool fetch(Test* test, const Cached& cached, const char* when) {
    const JitImage* want = &cached.want;
    JitImage image;
    bool ok = jit_get(cached.expression, "sm_90", true, &image, error);
    expect(ok, "%s: %s", when, error);
    if (!ok) return false;
    bool kept = image.cached;
    expect(strcmp(image.symbol, want->symbol) == 0 && image.image_bytes == want->image_bytes &&
               memcmp(image.image, want->image, (size_t)want->image_bytes) == 0,
           "%s: another kernel", when);
    jit_free(&image);
    return kept;
}

// Runs a part of a case, as `nobody` if need be, and expects that it writes so many lines to standard error.
template <class Body>
static void expect_lines(Test* test, int lines, bool nobody, const char* what, Body body) {
    const Ended its = run_part(test, [&] {
        if (nobody && getuid() == 0 && setresuid(65534, 65534, 65534) != 0) expect(false, "%s", strerror(errno));
        body();
    });
    expect(its.code == 0 && lines_of(its.text) == lines && (nobody || strstr(its.text, what)), "%s: code %d, %s", what,
           its.code, its.text);
}

JIT_TEST(jit_compiles_where_there_is_no_device) {
    char architecture[32];
    expect(jit_architecture(90, architecture, sizeof(architecture), error), "%s", error);
    expect(strcmp(architecture, "sm_90") == 0, "%s", architecture);
    expect(jit_architecture(9999, architecture, sizeof(architecture), error), "%s", error);
    expect(strncmp(architecture, "compute_", 8) == 0, "%s", architecture);
    for (const char* target : {"sm_90", "sm_80", (const char*)architecture}) {
        JitImage image;
        bool good = jit_get(small_expression(), target, false, &image, error);
        expect(good, "%s", error);
        if (!good) continue;
        expect(strstr(image.symbol, "optim_step_kernel") && image.image_bytes > 1000, "%s", image.symbol);
        bool cubin = strcmp(target, architecture) != 0;
        expect((memcmp(image.image, "\177ELF", 4) == 0) == cubin, "%s", target);
    }
}

CACHE_TEST(JIT_TEST, jit_failure_shows_its_log) {
    JitImage image;
    expect(!jit_get("optim_step_kernel<NoSuchRule>", "sm_90", true, &image, error), "compiled");
    expect(strstr(error, "NoSuchRule") && strstr(error, "error"), "%s", error);
    expect(!image.symbol && !image.image, "an image of what failed");
    expect(folder_files(cache.path, false) == 0, "a failure was kept");
    expect(!jit_get("optim_step_kernel<AdamW>", "sm_12345", true, &image, error), "compiled");
    expect(folder_files(cache.path, false) == 0, "a failure was kept");
}

TEST(jit_key_names_all_that_decides) {
    // Each of the arguments makes another address, also where their texts put one after another would be equal.
    const struct {
        const char *expression, *architecture;
        int major, minor;
    } asked[] = {{"kernel<A>", "sm_90", 13, 0},  {"kernel<B>", "sm_90", 13, 0},  {"kernel<A>", "sm_80", 13, 0},
                 {"kernel<A>x", "sm_90", 13, 0}, {"kernel<A>", "sm_90k", 13, 0}, {"ernel<A>", "sm_90k", 13, 0},
                 {"kernel<A>", "sm_90", 13, 1},  {"kernel<A>", "sm_90", 12, 0},  {"kernel<A>", "sm_90", 0, 13}};
    constexpr int COUNT = sizeof(asked) / sizeof(asked[0]);
    char key[COUNT][JIT_KEY_BYTES];
    for (int i = 0; i < COUNT; i++) {
        jit_key(asked[i].expression, asked[i].architecture, asked[i].major, asked[i].minor, key[i]);
        expect(strlen(key[i]) == 32 && strspn(key[i], "0123456789abcdef") == 32, "%s", key[i]);
        for (int j = 0; j < i; j++) expect(strcmp(key[i], key[j]) != 0, "%d and %d have the same address", i, j);
    }
    char again[JIT_KEY_BYTES];
    jit_key(asked[0].expression, asked[0].architecture, asked[0].major, asked[0].minor, again);
    expect(strcmp(again, key[0]) == 0, "%s", again);
}

enum Kind { LINK, DANGLING, FIFO, GROUP, WORLD, OWNER };

// Makes something of others out of the file or folder at `path`, which it moves to `aside` if need be.
static bool taken(Kind kind, const char* path, const char* aside) {
    if (kind == GROUP || kind == WORLD) return chmod(path, kind == GROUP ? 0720 : 0702) == 0;
    if (kind == OWNER) return chown(path, 65534, 65534) == 0;
    if (rename(path, aside) != 0 || (kind == DANGLING && unlink(aside) != 0)) return false;
    return kind == FIFO ? mkfifo(path, 0600) == 0 : symlink(aside, path) == 0;
}

// A file of the cache that is not whole, or not this user's own, is replaced.
JIT_TEST(jit_cache) {
    Cached cached(test, "");
    const char *path = cache_path(cached.expression, "sm_90"), *aside = formatted("%s.aside", cached.folder.path);
    std::vector<std::pair<const char*, std::function<bool()>>> harms;
    expect(!fetch(test, cached, "empty"), "an empty folder had it");
    expect(strcmp(path, cache_path(cached.expression, "sm_80")) != 0, "architecture");
    expect(folder_files(cached.folder.path, false) == 1 && access(path, R_OK) == 0, "one file is kept: %s", path);
    expect(fetch(test, cached, "whole"), "it was compiled again");
    struct stat info;
    expect(stat(path, &info) == 0, "%s", path);
    const off_t size = info.st_size;
    for (off_t at : {(off_t)0, (off_t)16, (off_t)24, (off_t)32, (off_t)49, size / 2, size - 1})
        harms.push_back({formatted("byte %d", (int)at), [=] { return change_byte(path, at, 0x10), true; }});
    for (off_t length : {(off_t)0, (off_t)1, (off_t)47, (off_t)48, size / 2, size - 1, size + 1})
        harms.push_back({formatted("%d bytes", (int)length), [=] { return truncate(path, length) == 0; }});
    for (int kind = LINK; kind < (geteuid() == 0 ? OWNER + 1 : OWNER); kind++)
        harms.push_back({formatted("kind %d", kind), [=] { return taken((Kind)kind, path, aside); }});
    for (const auto& [what, harm] : harms) {
        expect(harm() && !fetch(test, cached, what), "%s: it was taken", what);
        expect(fetch(test, cached, what), "%s: it was not written again", what);
        unlink(aside);
    }
    expect(folder_files(cached.folder.path, false) == 1, "temporary files are left");
    const char* nested = formatted("%s/a", cached.folder.path);
    setenv("NIBBLE_CACHE", nested, 1);
    expect(!fetch(test, cached, "new folder") && fetch(test, cached, "made"), "mkdir");
}

// A folder that is not this user's own, or cannot be made or written, is neither read nor written, and one line says
// so.
JIT_TEST(jit_cache_folders) {
    Cached cached(test, "");
    chmod(cached.folder.path, 0555);
    for (const char* path : {"/proc/nibble", "/dev/null/nibble", (const char*)cached.folder.path}) {
        setenv("NIBBLE_CACHE", path, 1);
        expect_lines(test, 1, true, path, [&] { expect(!fetch(test, cached, path), "%s: from where?", path); });
    }
    expect(folder_files(cached.folder.path, false) == 0, "the read-only folder was written");
    // A file that root has put into a read-only folder, and made readable, is used.
    chmod(cached.folder.path, 0755);
    setenv("NIBBLE_CACHE", cached.folder.path, 1);
    expect(!fetch(test, cached, "written"), "from where?");
    expect(chmod(cache_path(cached.expression, "sm_90"), 0644) == 0, "%s", strerror(errno));
    chmod(cached.folder.path, 0555);
    expect_lines(test, 0, true, "read-only", [&] { expect(fetch(test, cached, "read-only"), "compiled again"); });
    for (Kind kind : {LINK, FIFO, GROUP, WORLD, OWNER}) {
        if (kind == OWNER && geteuid() != 0) continue;
        const char *inner = formatted("%s/inner", new_folder()), *aside = formatted("%s.aside", inner);
        setenv("NIBBLE_CACHE", inner, 1);
        expect(!fetch(test, cached, "made") && taken(kind, inner, aside), "%d: %s", kind, strerror(errno));
        if (kind == LINK) setenv("NIBBLE_CACHE", formatted("%s//", inner), 1);
        expect_lines(test, 1, false, "NIBBLE_CACHE names another folder",
                     [&] { expect(!fetch(test, cached, "of others"), "%d", kind); });
    }
}

// A full disk as a limit on a file's size, which fails a write after its first part as ENOSPC does.
static void limit_files(int64_t bytes, bool killed) {
    struct rlimit limit = {(rlim_t)bytes, (rlim_t)bytes};
    signal(SIGXFSZ, killed ? SIG_DFL : SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    limit = {0, 0};
    setrlimit(RLIMIT_CORE, &limit);
}

JIT_TEST(jit_full_disk_or_killed) {
    Cached cached(test);
    const char* path = cache_path(cached.expression, "sm_90");
    for (const auto& [max, killed] : {std::pair(0, false), {20, false}, {4096, false}, {4096, true}}) {
        const Ended its = run_part(test, [&, max = max, killed = killed] {
            limit_files(max, killed);
            expect(!fetch(test, cached, "limited"), "from where?");
        });
        expect(its.code == (killed ? 128 + SIGXFSZ : 0), "code %d", its.code);
        expect(folder_files(cached.folder.path, false) == killed && access(path, F_OK) != 0,
               "a part was left after %d bytes", max);
    }
    // There is room again.
    expect(!fetch(test, cached, "room") && fetch(test, cached, "kept"),
           "half of a file was taken, or the whole not kept");
}

JIT_TEST(jit_eight_processes_at_once) {
    constexpr int PROCESSES = 8;
    Cached cached(test);
    Apart child[PROCESSES];
    int start[2];
    expect(pipe(start) == 0, "%s", strerror(errno));
    for (Apart& one : child) {
        one = apart_begin([&] {
            char byte;
            close(start[1]);
            if (read(start[0], &byte, 1) != 0) _exit(2);  // until all have been started
            fetch(test, cached, "at once");
            fflush(stdout);
            _exit(test->failures);
        });
    }
    close(start[0]), close(start[1]);
    for (const Apart& one : child) expect_ended(test, apart_end(one), 0);
    expect(folder_files(cached.folder.path, false) == 1, "%d files", folder_files(cached.folder.path, false));
    expect(fetch(test, cached, "after"), "what they left is not whole");
}

// True if a text is one sentence that names the library and what to install.
static bool says_what_is_missing(const char* text) {
    return strstr(text, "/nowhere/libnvrtc.so") && strstr(text, "install cuda-nvrtc-") &&
           strstr(text, "nvidia-cuda-nvrtc by pip") && !strchr(text, '\n');
}

TEST(jit_without_nvrtc) {
    Setting setting("NIBBLE_NVRTC", "/nowhere/libnvrtc.so");
    CacheFolder folder;
    char architecture[32];
    const char* expression = small_expression();
    JitImage image;
    expect(!jit_available(), "it was found");
    expect(!jit_get(expression, "sm_90", true, &image, error) && says_what_is_missing(error), "%s", error);
    expect(!jit_get(expression, "sm_90", false, &image, error) && says_what_is_missing(error), "%s", error);
    expect(!jit_architecture(90, architecture, sizeof(architecture), error) && says_what_is_missing(error), "%s",
           error);
    expect(!*cache_path(expression, "sm_90"), "a path");
    expect(folder_files(folder.path, false) == 0, "something was kept");
}

// Threads that compile at the same time give what one after another gives.
CACHE_TEST(JIT_TEST, jit_compiles_in_threads) {
    const char* const formats[] = {"bf16", "lin8", "bf16:sr"};
    constexpr int COUNT = sizeof(formats) / sizeof(formats[0]);
    const char* expression[COUNT];
    JitImage image[COUNT] = {}, alone;
    int made = 0;
    for (int i = 0; i < COUNT; i++)
        expression[i] = kernel_of(states_config("adamw", "bf16:sr", "bf16", formats[i], "bf16"));
#pragma omp parallel for schedule(dynamic) num_threads(COUNT) reduction(+ : made)
    for (int i = 0; i < COUNT; i++) {
        char reason[DATA_ERROR_BYTES];
        made += jit_get(expression[i], "sm_90", true, &image[i], reason);
    }
    expect(made == COUNT && folder_files(cache.path, false) == COUNT, "%d kernels", made);
    for (int i = 0; i < COUNT && made == COUNT; i++) {
        expect(jit_get(expression[i], "sm_90", false, &alone, error), "%s", error);
        expect(image[i].image_bytes == alone.image_bytes && strcmp(image[i].symbol, alone.symbol) == 0 &&
                   memcmp(image[i].image, alone.image, (size_t)alone.image_bytes) == 0,
               "%s: another kernel", expression[i]);
        jit_free(&image[i]), jit_free(&alone);
    }
}

static double cpu_ms() {
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec * 1e-6;
}

// The processor's time, all threads', of the first call in a process that has not opened libnvrtc, as it does so too.
static double first_call_ms(Test* test, const char* expression, bool cached) {
    const Ended its = run_apart([&] {
        JitImage image;
        const double begin = cpu_ms();
        const bool good = jit_get(expression, "sm_90", true, &image, error);
        fprintf(stderr, "%.3f %d", cpu_ms() - begin, good ? image.cached : -1);
    });
    double ms = NAN;
    int was_cached = -1;
    expect(its.code == 0 && sscanf(its.text, "%lf %d", &ms, &was_cached) == 2, "code %d: %s", its.code, its.text);
    expect(was_cached == (cached ? 1 : 0), "cached %d", was_cached);
    return ms;
}

// Processor time, and the least of three, or of up to twelve until it is within the limits: other work, on this machine
// or on its host, only adds to it, for seconds at a time. One of the formats whose kernels are longest.
TEST_ALONE(jit_times) {
    if (run_apart([] { _exit(jit_available() ? 0 : 1); }).code != 0) skip("libnvrtc was not found");
    constexpr double COMPILED_MS = 1000.0, CACHED_MS = 20.0;
    CacheFolder folder;
    const char* expression =
        kernel_of(states_config("adamw", "bf16+8:sr", "bf16", "e5m2/256@e8m0:sr", "sqrt4/1024:sr"));
    double compiled = INFINITY, cached = INFINITY;
    for (int i = 0; i < 3 || (i < 12 && (compiled >= COMPILED_MS || cached >= CACHED_MS)); i++) {
        folder_files(folder.path, true);
        compiled = fmin(compiled, first_call_ms(test, expression, false));
        cached = fmin(cached, first_call_ms(test, expression, true));
    }
    expect(compiled < COMPILED_MS, "%.0f ms", compiled);
    expect(cached < CACHED_MS, "%.1f ms from the cache", cached);
    note(test, "first use %.0f ms of %.0f, from the cache %.1f ms of %.0f", compiled, COMPILED_MS, cached, CACHED_MS);
}
