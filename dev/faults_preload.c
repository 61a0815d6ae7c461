// A library that dev/faults.py preloads into ./train: it counts the calls that can fail, and makes some of them fail.
//
//   FAULT=name:first:last:ERRNO   calls number `first` to `last` of this function (or group of functions) fail with
//                                 ERRNO; `short` instead of it lets a write or a read transfer half of what was asked
//   FAULT_COUNT=path              at its end the process writes "name count" lines there
//
// Calls count from main on. Of `memory`, `map` and `thread` only those count that ./train itself and the C library
// make: what libgomp does when it gets nothing is its own, and so is what the CUDA runtime does before main.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OPEN, FOLDER, READ, WRITE, FLUSH, SYNC, RENAME, MKDIR, RESIZE, REMOVE, MAP, MEMORY, THREAD, KINDS };
static const char* const names[KINDS] = {"open",  "folder", "read",   "write", "flush",  "sync",  "rename",
                                         "mkdir", "resize", "remove", "map",   "memory", "thread"};
static const struct {
    const char* name;
    int number;
} errors[] = {{"EIO", EIO},       {"ENOSPC", ENOSPC}, {"ENOMEM", ENOMEM}, {"EACCES", EACCES}, {"EMFILE", EMFILE},
              {"EDQUOT", EDQUOT}, {"EROFS", EROFS},   {"EAGAIN", EAGAIN}, {"EINTR", EINTR},   {"short", 0}};

static _Atomic long calls[KINDS];
static bool begun;  // main has
static int failing = -1, reason;
static long first_call, last_call;
static struct { uintptr_t begin, end; } own[16];  // where the code of ./train and of the C library lies
static int owns;

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

// Counts a call; true: it is to fail, with errno set.
static bool fails(int kind) {
    if (!begun) return false;
    long call = atomic_fetch_add(&calls[kind], 1) + 1;
    if (kind != failing || call < first_call || call > last_call) return false;
    errno = reason;
    return true;
}

static bool is_own(const void* caller) {
    for (int i = 0; i < owns; i++) {
        if ((uintptr_t)caller >= own[i].begin && (uintptr_t)caller < own[i].end) return true;
    }
    return false;
}

// The code of the program and of the C library, from the list of what is mapped; without memory of the heap.
static void find_own(void) {
    static char text[65536];
    char program[4096];
    ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1), used = 0, got;
    program[length > 0 ? length : 0] = 0;
    int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    while (maps >= 0 && (got = read(maps, text + used, sizeof(text) - 1 - (size_t)used)) > 0) used += got;
    if (maps >= 0) close(maps);
    for (char *rest = text, *line; (line = strsep(&rest, "\n")) && owns < 16;) {
        unsigned long begin, end;
        char rights[8];
        const char* path = strchr(line, '/');
        if (!path || sscanf(line, "%lx-%lx %7s", &begin, &end, rights) != 3 || rights[2] != 'x') continue;
        if (strcmp(path, program) != 0 && !strstr(path, "/libc.so.6")) continue;
        own[owns].begin = begin, own[owns++].end = end;
    }
}

__attribute__((constructor)) static void begin(void) {
    char name[16], error[16];
    const char* fault = getenv("FAULT");
    int wanted = -1;
    find_own();
    if (fault && sscanf(fault, "%15[^:]:%ld:%ld:%15s", name, &first_call, &last_call, error) == 4) {
        for (int i = 0; i < KINDS; i++) wanted = strcmp(name, names[i]) == 0 ? i : wanted;
        for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
            if (strcmp(error, errors[i].name) == 0) reason = errors[i].number;
        }
    }
    failing = wanted;
}

static int (*real_main)(int, char**, char**);

static int counted_main(int count, char** words, char** environment) {
    begun = true;
    return real_main(count, words, environment);
}

int __libc_start_main(int (*main)(int, char**, char**), int count, char** words, void (*init)(void), void (*fini)(void),
                      void (*rtld_fini)(void), void* stack) {
    int (*next)(int (*)(int, char**, char**), int, char**, void (*)(void), void (*)(void), void (*)(void), void*);
    next = (__typeof__(next))dlsym(RTLD_NEXT, "__libc_start_main");
    real_main = main;
    return next(counted_main, count, words, init, fini, rtld_fini, stack);
}

__attribute__((destructor)) static void end(void) {
    const char* path = getenv("FAULT_COUNT");
    if (!path) return;
    char text[1024];
    int used = 0;
    for (int i = 0; i < KINDS; i++) {
        used += snprintf(text + used, sizeof(text) - (size_t)used, "%s %ld\n", names[i], calls[i]);
    }
    failing = -1;
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file >= 0 && write(file, text, (size_t)used) < 0) _exit(99);
    if (file >= 0) close(file);
}

// The function that this library stands before.
#define NEXT(name)                 \
    static __typeof__(&name) next; \
    if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

// Functions that fail as a whole: what they return then, and their kind.
#define WHOLE(type, name, failure, kind, parameters, arguments) \
    type name parameters {                                      \
        NEXT(name);                                             \
        return fails(kind) ? failure : next arguments;          \
    }
WHOLE(FILE*, fopen, NULL, OPEN, (const char* path, const char* mode), (path, mode))
WHOLE(FILE*, fdopen, NULL, OPEN, (int file, const char* mode), (file, mode))
WHOLE(DIR*, opendir, NULL, FOLDER, (const char* path), (path))
WHOLE(DIR*, fdopendir, NULL, FOLDER, (int file), (file))
WHOLE(int, fsync, -1, SYNC, (int file), (file))
WHOLE(int, fdatasync, -1, SYNC, (int file), (file))
WHOLE(int, rename, -1, RENAME, (const char* from, const char* to), (from, to))
WHOLE(int, renameat, -1, RENAME, (int a, const char* from, int b, const char* to), (a, from, b, to))
WHOLE(int, renameat2, -1, RENAME, (int a, const char* from, int b, const char* to, unsigned f), (a, from, b, to, f))
WHOLE(int, mkdir, -1, MKDIR, (const char* path, mode_t mode), (path, mode))
WHOLE(int, mkdirat, -1, MKDIR, (int folder, const char* path, mode_t mode), (folder, path, mode))
WHOLE(int, ftruncate, -1, RESIZE, (int file, off_t bytes), (file, bytes))
WHOLE(int, truncate, -1, RESIZE, (const char* path, off_t bytes), (path, bytes))
WHOLE(int, unlink, -1, REMOVE, (const char* path), (path))
WHOLE(int, unlinkat, -1, REMOVE, (int folder, const char* path, int flags), (folder, path, flags))
WHOLE(int, rmdir, -1, REMOVE, (const char* path), (path))

// These calls open a file; they have a mode if the file may be created.
#define OPENS(name, parameters, ...)                                                                  \
    int name parameters {                                                                             \
        NEXT(name);                                                                                   \
        va_list rest;                                                                                 \
        va_start(rest, flags);                                                                        \
        mode_t mode = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                                                 \
        return fails(OPEN) ? -1 : next(__VA_ARGS__, flags, mode);                                     \
    }
OPENS(open, (const char* path, int flags, ...), path)
OPENS(open64, (const char* path, int flags, ...), path)
OPENS(openat, (int folder, const char* path, int flags, ...), folder, path)

// A transfer that fails, or moves half of what was asked.
#define TRANSFER(kind, call, half) \
    if (!fails(kind)) return call; \
    return reason == 0 && count > 1 ? half : -1

ssize_t read(int file, void* bytes, size_t count) {
    NEXT(read);
    TRANSFER(READ, next(file, bytes, count), next(file, bytes, count / 2));
}

ssize_t pread(int file, void* bytes, size_t count, off_t at) {
    NEXT(pread);
    TRANSFER(READ, next(file, bytes, count, at), next(file, bytes, count / 2, at));
}

ssize_t write(int file, const void* bytes, size_t count) {
    NEXT(write);
    TRANSFER(WRITE, next(file, bytes, count), next(file, bytes, count / 2));
}

ssize_t pwrite(int file, const void* bytes, size_t count, off_t at) {
    NEXT(pwrite);
    TRANSFER(WRITE, next(file, bytes, count, at), next(file, bytes, count / 2, at));
}

// A stream that fails says so from then on; one that reads less than it was asked is at its end, so nothing is short.
static void mark_failed(FILE* file) {
    file->_flags |= 0x20;  // glibc's _IO_ERR_SEEN
    if (reason == 0) errno = EIO;
}

size_t fread(void* bytes, size_t size, size_t count, FILE* file) {
    NEXT(fread);
    return fails(READ) ? (mark_failed(file), (size_t)0) : next(bytes, size, count, file);
}

// A stream's own writes do not pass here, so what fails is the call that empties its buffer.
int fflush(FILE* file) {
    NEXT(fflush);
    if (!fails(FLUSH)) return next(file);
    next(file);
    errno = reason;
    if (file) mark_failed(file);
    return EOF;
}

void* mmap(void* at, size_t bytes, int rights, int flags, int file, off_t offset) {
    NEXT(mmap);
    if (!is_own(__builtin_return_address(0))) return next(at, bytes, rights, flags, file, offset);
    return fails(MAP) ? MAP_FAILED : next(at, bytes, rights, flags, file, offset);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
    NEXT(pthread_create);
    if (!is_own(__builtin_return_address(0))) return next(thread, attributes, run, argument);
    return fails(THREAD) ? (reason ? reason : EAGAIN) : next(thread, attributes, run, argument);
}

#define MEMORY_FAILS() (is_own(__builtin_return_address(0)) && fails(MEMORY))

void* malloc(size_t bytes) {
    return MEMORY_FAILS() ? NULL : __libc_malloc(bytes);
}

void* calloc(size_t count, size_t bytes) {
    return MEMORY_FAILS() ? NULL : __libc_calloc(count, bytes);
}

void* realloc(void* pointer, size_t bytes) {
    return MEMORY_FAILS() ? NULL : __libc_realloc(pointer, bytes);
}

void* aligned_alloc(size_t alignment, size_t bytes) {
    return MEMORY_FAILS() ? NULL : __libc_memalign(alignment, bytes);
}

int posix_memalign(void** pointer, size_t alignment, size_t bytes) {
    if (MEMORY_FAILS()) return ENOMEM;
    void* memory = __libc_memalign(alignment, bytes);
    if (memory) *pointer = memory;
    return memory ? 0 : ENOMEM;
}
