// A library that dev/faults.py preloads into ./train: it counts the calls that can fail, and makes some of them fail.
//
//   FAULT=name:first:last:ERRNO   calls number `first` to `last` of this function (or group of functions) fail with
//                                 the error of this number; with 0 a write or a read transfers half of what was asked
//   FAULT_COUNT=path              at its end the process writes "name count" lines there
//
// Calls count from main on. Of `memory`, `map` and `thread` only those count that ./train itself and the C library
// make: what libgomp does when it gets nothing is its own, and so is what the CUDA runtime does before main.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
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

// Notes where the code of the program and of the C library lies.
static int note_own(struct dl_phdr_info* object, size_t size, void* unused) {
    (void)size, (void)unused;
    if (object->dlpi_name[0] && !strstr(object->dlpi_name, "/libc.so.6")) return 0;  // the program's name is empty
    for (int i = 0; i < object->dlpi_phnum && owns < 16; i++) {
        if (object->dlpi_phdr[i].p_type != PT_LOAD || !(object->dlpi_phdr[i].p_flags & PF_X)) continue;
        own[owns].begin = object->dlpi_addr + object->dlpi_phdr[i].p_vaddr;
        own[owns].end = own[owns].begin + object->dlpi_phdr[i].p_memsz;
        owns++;
    }
    return 0;
}

__attribute__((constructor)) static void begin(void) {
    char name[16];
    const char* fault = getenv("FAULT");
    dl_iterate_phdr(note_own, NULL);
    if (!fault || sscanf(fault, "%15[^:]:%ld:%ld:%d", name, &first_call, &last_call, &reason) != 4) return;
    for (int i = 0; i < KINDS; i++) failing = strcmp(name, names[i]) == 0 ? i : failing;
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

// Transfers fail, or move half of what was asked.
#define TRANSFER(name, kind, parameters, arguments, half) \
    ssize_t name parameters {                             \
        NEXT(name);                                       \
        if (!fails(kind)) return next arguments;          \
        return reason == 0 && count > 1 ? next half : -1; \
    }
TRANSFER(read, READ, (int file, void* to, size_t count), (file, to, count), (file, to, count / 2))
TRANSFER(pread, READ, (int file, void* to, size_t count, off_t at), (file, to, count, at), (file, to, count / 2, at))
TRANSFER(write, WRITE, (int file, const void* from, size_t count), (file, from, count), (file, from, count / 2))
TRANSFER(pwrite, WRITE, (int file, const void* from, size_t count, off_t at), (file, from, count, at),
         (file, from, count / 2, at))

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

// These fail only where the program or the C library calls them.
#define OWN(type, name, failure, kind, parameters, call)                              \
    type name parameters {                                                            \
        return is_own(__builtin_return_address(0)) && fails(kind) ? (failure) : call; \
    }
OWN(void*, malloc, NULL, MEMORY, (size_t bytes), __libc_malloc(bytes))
OWN(void*, calloc, NULL, MEMORY, (size_t count, size_t bytes), __libc_calloc(count, bytes))
OWN(void*, realloc, NULL, MEMORY, (void* pointer, size_t bytes), __libc_realloc(pointer, bytes))
OWN(void*, aligned_alloc, NULL, MEMORY, (size_t alignment, size_t bytes), __libc_memalign(alignment, bytes))
OWN(int, posix_memalign, ENOMEM, MEMORY, (void** pointer, size_t alignment, size_t bytes),
    (*pointer = __libc_memalign(alignment, bytes)) ? 0 : ENOMEM)
OWN(void*, mmap, MAP_FAILED, MAP, (void* at, size_t bytes, int rights, int flags, int file, off_t offset), ({
        NEXT(mmap);
        next(at, bytes, rights, flags, file, offset);
    }))
OWN(int, pthread_create, reason, THREAD,
    (pthread_t * thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument), ({
        NEXT(pthread_create);
        next(thread, attributes, run, argument);
    }))
