// Whom the cache of compiled kernels trusts (optim/jit.h): folders and files that this user or root owns and nobody
// else may write. Everything else is passed over with one line, and the kernel is compiled.
#include <errno.h>
#include <sys/stat.h>

#include "../../optim/jit.h"
#include "apart.h"
#include "cache.h"

#define ARCHITECTURE "compute_80"

// Calls body() in a process of its own, whose exit code is what it returns; one that hangs is ended.
template <class Body>
static Ended in_child(Body body) {
    return run_apart([&] { alarm(60), _exit(body()); });
}

// Fetches an image without a kernel, which is quick to compile: 1 if it came from the cache, 0 if it was compiled, 3 if
// neither.
static int fetch_small(const char* architecture = ARCHITECTURE) {
    JitImage image;
    if (!jit_get("", architecture, &image, error)) return 3;
    int cached = image.cached;
    jit_free(&image);
    return cached;
}

static Ended fetch_apart() {
    return in_child([] { return fetch_small(); });
}

static const char* small_path() {
    return cache_path("", ARCHITECTURE);
}

// Expects that the kernel was compiled, and one line that says why the cache's was passed over.
static void expect_line(Test* test, const Ended& its, const char* says) {
    expect_ended(test, its, 0, {says});
    expect(strchr(its.text, '\n') == its.text + strlen(its.text) - 1, "not one line: %s", its.text);
}

static unsigned mode_of(const char* path) {
    struct stat info;
    return lstat(path, &info) == 0 ? (unsigned)(info.st_mode & 07777) : 0xffff;
}

// A file of the cache that is whole, but not this user's own: moved aside and put back as something else.
JIT_TEST(jit_cache_files_of_others) {
    enum Kind { LINK, DANGLING, FIFO, GROUP, WORLD, OWNER, FOLDER };
    const std::tuple<Kind, const char*> cases[] = {
        {LINK, "is a symbolic link"},        {DANGLING, "is a symbolic link"},    {FIFO, "is no regular file"},
        {GROUP, "can be written by others"}, {WORLD, "can be written by others"}, {OWNER, "belongs to another user"},
        {FOLDER, "is no regular file"}};
    CacheFolder folder;
    const char* path = small_path();
    const char* aside = formatted("%s/aside", folder.path);
    for (const auto& [kind, says] : cases) {
        if (kind == OWNER && geteuid() != 0) continue;
        Ended its = fetch_apart();
        expect(its.code != 3 && !its.text[0], "%s", its.text);
        expect(mode_of(path) == 0600, "%s: mode %o", path, mode_of(path));
        rename(path, aside);
        if (kind == DANGLING) unlink(aside);
        bool made = kind == LINK || kind == DANGLING ? symlink(aside, path) == 0
                    : kind == FIFO                   ? mkfifo(path, 0600) == 0
                    : kind == FOLDER                 ? mkdir(path, 0700) == 0
                    : kind == OWNER                  ? rename(aside, path) == 0 && chown(path, 65534, 65534) == 0
                                    : rename(aside, path) == 0 && chmod(path, kind == GROUP ? 0620 : 0602) == 0;
        expect(made, "%s", strerror(errno));
        expect_line(test, fetch_apart(), says);
        if (kind == FOLDER) rmdir(path);
        // All but a folder have been replaced by a file of this user's own.
        expect_ended(test, fetch_apart(), kind != FOLDER);
        unlink(aside);
    }
}

// A folder that is not this user's own: neither read nor written, and several kernels cost one line.
JIT_TEST(jit_cache_folders_of_others) {
    enum Kind { LINK, SLASH, GROUP, WORLD, OWNER, FIFO };
    const std::tuple<Kind, const char*> cases[] = {
        {LINK, "is a symbolic link"},        {SLASH, "is a symbolic link"},      {GROUP, "can be written by others"},
        {WORLD, "can be written by others"}, {OWNER, "belongs to another user"}, {FIFO, "is no folder"}};
    CacheFolder folder;
    const char* link = formatted("%s-link", folder.path);
    expect_ended(test, fetch_apart(), 0);
    for (const auto& [kind, says] : cases) {
        if (kind == OWNER && geteuid() != 0) continue;
        bool made = true, is_link = kind == LINK || kind == SLASH;
        const char* named = formatted("%s%s", is_link || kind == FIFO ? link : folder.path, kind == SLASH ? "//" : "");
        if (is_link) made = symlink(folder.path, link) == 0;
        if (kind == FIFO) made = mkfifo(link, 0600) == 0;
        if (kind == GROUP || kind == WORLD) made = chmod(folder.path, kind == GROUP ? 0770 : 01777) == 0;
        if (kind == OWNER) made = chown(folder.path, 65534, 65534) == 0;
        expect(made, "%s", strerror(errno));
        setenv("NIBBLE_CACHE", named, 1);
        const auto both = [] { return fetch_small() + fetch_small("compute_90"); };
        expect_line(test, in_child(both), says);
        expect(folder_files(folder.path, false) == 1, "%s: the folder was written", says);
        unlink(link);
        chmod(folder.path, 0700);
        if (kind == OWNER) made = chown(folder.path, 0, 0) == 0;
    }
    char endless[5001];
    memset(endless, 'x', sizeof(endless) - 1), endless[5000] = 0;
    setenv("NIBBLE_CACHE", endless, 1);
    expect_ended(test, fetch_apart(), 0, {"names one of at most"});
    setenv("NIBBLE_CACHE", folder.path, 1);
    expect_ended(test, fetch_apart(), 1);
}

// Files and folders that are created are this user's alone, whatever the umask.
JIT_TEST(jit_cache_modes) {
    for (unsigned mask : {0u, 022u, 077u, 0277u, 0777u}) {
        CacheFolder folder;
        const char *outer = formatted("%s/outer", folder.path), *inner = formatted("%s/inner", outer);
        setenv("NIBBLE_CACHE", inner, 1);
        const Ended its = in_child([&] {
            if (geteuid() == 0 && (chown(folder.path, 65534, 65534) != 0 || setresuid(65534, 65534, 65534) != 0))
                return 4;
            umask(mask);
            return fetch_small() == 0 && fetch_small() == 1 ? 0 : 5;
        });
        const char* path = small_path();
        expect_ended(test, its, 0);
        expect(mode_of(outer) == 0700 && mode_of(inner) == 0700 && mode_of(path) == 0600, "umask %o: modes %o %o %o",
               mask, mode_of(outer), mode_of(inner), mode_of(path));
    }
}
