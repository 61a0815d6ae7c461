// The tests of the run-time compiler and those that compare its kernels share this. It gives them a cache of their own,
// sets variables of the environment, compiles in several processes, and tells which formats are for m.
#pragma once
#include <dirent.h>
#include <omp.h>
#include <sys/mman.h>

#include "../../optim/jit.h"
#include "../../optim/optim.h"
#include "files.h"

// Sets a variable of the environment until its scope ends.
struct Setting {
    const char* name;
    char* saved;

    Setting(const char* variable, const char* value) : name(variable) {
        if (!value) abort();
        saved = getenv(name) ? strdup(getenv(name)) : nullptr;
        setenv(name, value, 1);
    }
    Setting(const Setting&) = delete;
    ~Setting() {
        if (saved) setenv(name, saved, 1);
        if (!saved) unsetenv(name);
        free(saved);
    }
};

inline int folder_files(const char* path, bool remove_them) {
    DIR* folder = opendir(path);
    int count = 0;
    if (!folder) return -1;
    while (struct dirent* entry = readdir(folder)) {
        if (entry->d_name[0] == '.') continue;
        if (remove_them) unlink(joined(path, entry->d_name));
        count++;
    }
    closedir(folder);
    return count;
}

// A folder of its own for the cache of compiled kernels, named by NIBBLE_CACHE until its scope ends.
struct CacheFolder {
    const char* path = new_folder();
    Setting setting = {"NIBBLE_CACHE", path};
};

// Defines a case of this kind (TEST or JIT_TEST) with an empty cache of compiled kernels in the folder `cache`.
#define CACHE_TEST(KIND, NAME)                                           \
    static void with_cache_##NAME(Test* test, const CacheFolder& cache); \
    KIND(NAME) {                                                         \
        CacheFolder cache;                                               \
        with_cache_##NAME(test, cache);                                  \
    }                                                                    \
    static void with_cache_##NAME(Test* test, [[maybe_unused]] const CacheFolder& cache)

// Returns the path at which the cache keeps a kernel, "" if there is no cache; it is never freed.
inline const char* cache_path(const char* expression, const char* architecture) {
    char path[4352];
    return jit_cache_path(expression, architecture, path, sizeof(path)) ? strdup(path) : "";
}

inline bool expect_compiles(Test* test, const char* expression, const char* architecture = "sm_90") {
    JitImage image;
    const bool good = jit_get(expression, architecture, false, &image, error);
    expect(good && image.image_bytes > 1000, "%s, %s: %s", expression, architecture, good ? "it is empty" : error);
    if (good) jit_free(&image);
    return good;
}

// Calls body(k) for each k below `count` in as many processes as there are cores, and waits for them; returns how many
// did not end well. The processes must not
// call CUDA, and count their failures in copies of the case.
template <class Body>
int in_processes(Test* test, int count, Body body) {
    int* next = (int*)mmap(nullptr, sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int processes = omp_get_num_procs() < count ? omp_get_num_procs() : count, bad = 0;
    if (next == MAP_FAILED) return 1;
    fflush(stdout);
    for (int i = 0; i < processes; i++) {
        pid_t child = fork();
        if (child < 0) bad++;
        if (child != 0) continue;
        int before = test->failures;
        for (int k; (k = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < count;) body(k);
        fflush(stdout);
        _exit(test->failures > before ? 1 : 0);
    }
    for (int status, i = bad; i < processes; i++) bad += wait(&status) < 0 || status != 0;
    munmap(next, sizeof(int));
    return bad;
}

inline bool serves_m(const char* name) {
    OptimConfig config = {{}, "", "adamw", "fp32", "fp32", name, "fp32", 1};
    bool serves = optim_resolve(&config, error);
    if (!serves && !strstr(error, "holds no negative numbers")) printf("    %s\n", error), exit(1);
    return serves;
}

// True if weights of this storage go with a rule and an m: those whose errors are fed back do not with all.
inline bool goes_with(const char* rule, const char* weights, const char* m) {
    OptimConfig config = {{}, "", rule, weights, "fp32", m, "", 1};
    bool goes = optim_resolve(&config, error);
    if (!goes && !strstr(weights, ":ef")) printf("    %s\n", error), exit(1);
    return goes;
}
