#include "files.h"
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include "text.h"
#ifdef __SSE4_2__
#include <nmmintrin.h>
#endif

enum { PIECE_BYTES = 8 << 20 };

#ifdef __SSE4_2__

// Eight bytes an instruction, three cycles each: faster than any disk.
uint32_t crc32c(uint32_t crc, const void* bytes, int64_t count) {
    const unsigned char* b = bytes;
    uint64_t state = ~crc;
    for (; count >= 8; count -= 8, b += 8) {
        uint64_t word;
        memcpy(&word, b, 8);
        state = _mm_crc32_u64(state, word);
    }
    uint32_t low = (uint32_t)state;
    for (; count > 0; count--, b++) low = _mm_crc32_u8(low, *b);
    return ~low;
}

#else

uint32_t crc32c(uint32_t crc, const void* bytes, int64_t count) {
    const unsigned char* b = bytes;
    uint32_t table[256];  // the checksum of each byte alone
    for (uint32_t i = 0; i < 256; i++) {
        table[i] = i;
        for (int bit = 0; bit < 8; bit++) table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0x82F63B78u : 0);
    }
    crc = ~crc;
    for (; count > 0; count--, b++) crc = table[(crc ^ *b) & 255] ^ crc >> 8;
    return ~crc;
}

#endif

const char* path_in(const char* folder, const char* name) {
    return text_kept("%s%s%s", folder, text_ends(folder, "/") ? "" : "/", name);
}

const char* path_there(const char* folder, const char* name) {
    const char* path = path_in(folder, name);
    return access(path, F_OK) == 0 ? path : NULL;
}

char* path_absolute(const char* path) {
    SCOPED char* folder = !path[0] || path[0] == '/' ? NULL : getcwd(NULL, 0);
    const bool joins = folder && text_is_utf8(folder, (int64_t)strlen(folder));
    return joins ? text_format("%s/%s", folder, path) : text_copy(path);
}

const char* path_parent(const char* path) {
    const char* slash = strrchr(path, '/');
    if (!slash) return ".";
    return text_kept("%.*s", slash > path ? (int)(slash - path) : 1, path);
}

bool folder_exists(const char* path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

bool file_exists(const char* path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISREG(status.st_mode);
}

bool file_name_plain(const char* name) {
    return *name && strlen(name) < 256 && !strchr(name, '/') && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

bool more_descriptors(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return false;
    limit.rlim_cur = limit.rlim_max;
    return setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

int file_open(const char* path, int64_t* bytes, char* error) {
    struct stat status;
    const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;  // a pipe would wait for its writer
    int descriptor = open(path, flags);
    if (descriptor < 0 && errno == EMFILE && more_descriptors()) descriptor = open(path, flags);
    if (descriptor < 0) return data_error(error, "cannot open %s: %s", path, strerror(errno)), -1;
    if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
        close(descriptor);
        return data_error(error, "cannot read %s: it is not a regular file", path), -1;
    }
    *bytes = (int64_t)status.st_size;
    return descriptor;
}

bool file_read_at(int descriptor, const char* path, void* to, int64_t at, int64_t count, char* error) {
    for (char* next = to; count > 0;) {
        ssize_t got = pread(descriptor, next, (size_t)(count < 1 << 30 ? count : 1 << 30), (off_t)at);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return data_error(error, "cannot read %s: %s", path, strerror(errno));
        if (got == 0) return data_error(error, "cannot read %s: it was cut short while it was read", path);
        next += got;
        at += got;
        count -= got;
    }
    return true;
}

char* file_read(const char* path, int64_t* bytes, char* error) {
    int descriptor = file_open(path, bytes, error);
    if (descriptor < 0) return NULL;
    const bool fits =
        *bytes <= FILE_READ_MAX || data_error(error, "cannot read %s: it has %lld bytes and such a file may have %d",
                                              path, (long long)*bytes, FILE_READ_MAX);
    char* text = fits ? memory_zero((size_t)*bytes + 1, 1) : NULL;
    if (text && !file_read_at(descriptor, path, text, 0, *bytes, error)) free(text), text = NULL;
    close(descriptor);
    return text;
}

bool file_sum(const char* folder, const char* name, uint32_t* crc, int64_t* bytes, char* error) {
    const char* path = path_in(folder, name);
    *crc = 0;
    int descriptor = file_open(path, bytes, error);
    if (descriptor < 0) return false;
    SCOPED char* piece = memory_take(PIECE_BYTES);
    bool ok = true;
    for (int64_t at = 0; ok && at < *bytes; at += PIECE_BYTES) {
        int64_t count = *bytes - at < PIECE_BYTES ? *bytes - at : PIECE_BYTES;
        ok = file_read_at(descriptor, path, piece, at, count, error);
        if (ok) *crc = crc32c(*crc, piece, count);
    }
    close(descriptor);
    return ok;
}

bool disk_holds(const char* path, int64_t bytes, char* error) {
    struct statvfs disk;
    for (const char* folder = path; statvfs(folder, &disk) != 0; folder = path_parent(folder)) {
        if (errno != ENOENT || strcmp(folder, ".") == 0 || strrchr(folder, '/') == folder) return true;
    }
    const double room = (double)disk.f_bavail * (double)disk.f_frsize, unit = 1.0 / (1 << 30);
    if (disk.f_blocks == 0 || (double)bytes <= room) return true;  // no blocks: no disk, such as /proc
    return data_error(error, "%s needs %.3g GiB and %.3g GiB are free on its disk", path, (double)bytes * unit,
                      room * unit);
}

int file_create(const char* path, char* error) {
    struct stat status;
    bool replaced = lstat(path, &status) == 0 && (S_ISREG(status.st_mode) || S_ISLNK(status.st_mode));
    if (replaced) unlink(path);
    int descriptor = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (descriptor < 0) data_error(error, "cannot create %s: %s", path, strerror(errno));
    return descriptor;
}

// Writes all of it in as many calls as it takes; one call writes at most 2 GB.
bool file_write_all(int descriptor, const char* path, const void* bytes, int64_t count, char* error) {
    const char* from = bytes;
    while (count > 0) {
        ssize_t written = write(descriptor, from, (size_t)(count < 1 << 30 ? count : 1 << 30));
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) {
            const char* reason = written < 0 ? strerror(errno) : "nothing was written";
            return data_error(error, "cannot write %s: %s (%lld bytes were left to write)", path, reason,
                              (long long)count);
        }
        from += written;
        count -= written;
    }
    return true;
}

// Devices and some network file systems cannot sync; that is no failure of the write.
bool file_sync(int descriptor, const char* path, char* error) {
    if (fsync(descriptor) == 0 || errno == EINVAL || errno == ENOTSUP) return true;
    return data_error(error, "cannot sync %s to the disk: %s", path, strerror(errno));
}

bool file_write(const char* path, const void* bytes, int64_t count, char* error) {
    SCOPED char* name = text_format("%s.tmp", path);
    int descriptor = file_create(name, error);
    if (descriptor < 0) return false;
    bool ok = file_write_all(descriptor, name, bytes, count, error) && file_sync(descriptor, name, error);
    if (close(descriptor) != 0 && ok) ok = data_error(error, "cannot write %s: %s", name, strerror(errno));
    if (ok && rename(name, path) != 0) {
        ok = data_error(error, "cannot rename %s to %s: %s; remove what has that name", name, path, strerror(errno));
    }
    if (!ok) unlink(name);
    return ok && folder_sync(path_parent(path), error);
}

// The size of an open log without the half line at its end; -1 when it cannot be read.
static int64_t whole_lines(int descriptor, const char* path, int64_t bytes, char* error) {
    char piece[4096];
    while (bytes > 0) {
        int64_t count = bytes < (int64_t)sizeof(piece) ? bytes : (int64_t)sizeof(piece);
        if (!file_read_at(descriptor, path, piece, bytes - count, count, error)) return -1;
        const char* end = memrchr(piece, '\n', (size_t)count);
        if (end) return bytes - count + (end - piece) + 1;
        bytes -= count;
    }
    return 0;
}

FILE* log_open(const char* path, char* error) {
    struct stat status;
    const int descriptor = open(path, O_RDWR | O_APPEND | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (descriptor < 0) {
        data_error(error, "%s cannot be written: %s; %s", path, strerror(errno),
                   errno == EMFILE ? "type ulimit -n 1024 first" : "name a folder that is writable");
        return NULL;
    }
    const bool known = fstat(descriptor, &status) == 0;
    const int64_t bytes = known ? whole_lines(descriptor, path, (int64_t)status.st_size, error) : -1;
    const bool ok = bytes >= 0 && (bytes == status.st_size || ftruncate(descriptor, bytes) == 0);
    FILE* file = ok ? fdopen(descriptor, "a") : NULL;
    if (!file) data_error(error, "%s cannot be written: %s", path, strerror(errno)), close(descriptor);
    return file;
}

bool folder_make(const char* path, char* error) {
    if (*path == 0) return data_error(error, "cannot create a folder without a name");
    // Every prefix that ends before a slash, then the whole.
    for (const char* end = path; *end;) {
        end += 1 + strcspn(end + 1, "/");
        SCOPED char* name = text_part(path, (size_t)(end - path));
        int reason = mkdir(name, 0777) == 0 ? 0 : errno;
        if (reason == 0 || folder_exists(name)) continue;
        const char* why = reason == EEXIST || reason == ENOTDIR ? "a file or link has that name" : strerror(reason);
        return data_error(error, "cannot create the folder %s: %s", name, why);
    }
    return true;
}

bool folder_new(const char* path, char* error) {
    if (!folder_remove(path, error)) return false;
    return mkdir(path, 0777) == 0 || data_error(error, "cannot create the folder %s: %s", path, strerror(errno));
}

bool folder_sync(const char* path, char* error) {
    int descriptor = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) return data_error(error, "cannot open the folder %s: %s", path, strerror(errno));
    bool ok = file_sync(descriptor, path, error);
    close(descriptor);
    return ok;
}

static int remove_one(const char* path, const struct stat* status, int type, struct FTW* place) {
    (void)status, (void)type, (void)place;
    return remove(path);
}

bool folder_remove(const char* path, char* error) {
    if (nftw(path, remove_one, 8, FTW_DEPTH | FTW_PHYS) == 0 || errno == ENOENT) return true;
    return data_error(error, "cannot remove %s: %s", path, strerror(errno));
}
