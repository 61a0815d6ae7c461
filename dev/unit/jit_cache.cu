// Whom the cache of compiled kernels trusts (optim/jit.h): folders and files that this user or root owns and nobody
// else may write. Everything else is passed over, and the kernel is compiled.
#include <errno.h>
#include <sys/stat.h>

#include "../../optim/jit.h"
#include "apart.h"
#include "cache.h"

// Fetches an image without a kernel, which is quick to compile, in a process of its own that ends if it hangs. Its code
// is 1 if the image came from the cache, 0 if it was compiled, 3 if neither.
static Ended fetch_apart() {
    return run_apart([] {
        alarm(60);
        JitImage image;
        _exit(jit_get("", "compute_80", &image, error) ? image.cached : 3);
    });
}

enum Kind { LINK, DANGLING, FIFO, GROUP, WORLD, OWNER };

// Makes something of others out of the file or folder at `path`, which it moves to `aside` if need be.
static bool taken(Kind kind, const char* path, const char* aside) {
    if (kind == GROUP || kind == WORLD) return chmod(path, kind == GROUP ? 0720 : 0702) == 0;
    if (kind == OWNER) return chown(path, 65534, 65534) == 0;
    if (rename(path, aside) != 0 || (kind == DANGLING && unlink(aside) != 0)) return false;
    return kind == FIFO ? mkfifo(path, 0600) == 0 : symlink(aside, path) == 0;
}

// A file of the cache that is whole, but not this user's own, is replaced.
JIT_TEST(jit_cache_files_of_others) {
    CacheFolder folder;
    const char *path = cache_path("", "compute_80"), *aside = formatted("%s/aside", folder.path);
    for (Kind kind : {LINK, DANGLING, FIFO, GROUP, WORLD, OWNER}) {
        if (kind == OWNER && geteuid() != 0) continue;
        expect(fetch_apart().code != 3 && taken(kind, path, aside), "%d: %s", kind, strerror(errno));
        expect_ended(test, fetch_apart(), 0);
        expect_ended(test, fetch_apart(), 1);
        unlink(aside);
    }
}

// A folder that is not this user's own is neither read nor written, and one line says so.
JIT_TEST(jit_cache_folders_of_others) {
    for (Kind kind : {LINK, FIFO, GROUP, WORLD, OWNER}) {
        if (kind == OWNER && geteuid() != 0) continue;
        CacheFolder folder;
        const char *inner = formatted("%s/inner", folder.path), *aside = formatted("%s/aside", folder.path);
        setenv("NIBBLE_CACHE", inner, 1);
        expect_ended(test, fetch_apart(), 0);
        expect(taken(kind, inner, aside), "%d: %s", kind, strerror(errno));
        if (kind == LINK) setenv("NIBBLE_CACHE", formatted("%s//", inner), 1);
        const Ended its = fetch_apart();
        expect_ended(test, its, 0, {"NIBBLE_CACHE names another folder"});
        expect(lines_of(its.text) == 1, "not one line: %s", its.text);
    }
}
