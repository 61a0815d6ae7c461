#include "memory.h"
#include <search.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "errors.h"

static const char* checkpoint = "";  // global, since callers of memory_missing know nothing of the run

void memory_checkpoint(const char* path) {
    checkpoint = path;
}

// It takes no memory: the text is on the stack, and _exit runs no handlers that might take some.
void memory_missing(size_t bytes) {
    static atomic_flag ending = ATOMIC_FLAG_INIT;
    char text[8192], resume[4400] = "";
    if (checkpoint[0]) {
        const char* quote = strpbrk(checkpoint, " \t\"\\$&;|<>()*?[]{}#~!`") ? "'" : "";
        snprintf(resume, sizeof(resume), "; the last good checkpoint is %.2000s, go on with --resume %s%.2000s%s",
                 checkpoint, quote, checkpoint, quote);
    }
    int length = snprintf(text, sizeof(text),
                          "train: error: %zu bytes of memory were asked for and this process gets no more; free some, "
                          "raise its limit (ulimit -v or -d) or lower --batch%s\n",
                          bytes, resume);
    memory_failed(text);
    while (atomic_flag_test_and_set(&ending)) pause();  // another thread is already ending the process
    launch_failed(2, text);
    if (write(2, text, (size_t)length) < 0) _exit(2);
    _exit(2);
}

static void* there(void* pointer, size_t bytes) {
    if (!pointer) memory_missing(bytes);
    block_taken(pointer);
    return pointer;
}

void* memory_take(size_t bytes) {
    return there(malloc(bytes ? bytes : 1), bytes);
}

void* memory_try(size_t bytes) {
    return malloc(bytes ? bytes : 1);
}

void* memory_zero(size_t count, size_t bytes) {
    return there(calloc(count ? count : 1, bytes ? bytes : 1), count * bytes);
}

void* memory_grow(void* pointer, size_t bytes) {
    block_left(pointer);
    void* grown = realloc(pointer, bytes ? bytes : 1);
    if (!grown && pointer) block_taken(pointer);  // it is still there
    return there(grown, bytes);
}

void* memory_aligned(size_t alignment, size_t bytes) {
    void* pointer = NULL;
    if (posix_memalign(&pointer, alignment, bytes) != 0) pointer = NULL;
    return there(pointer, bytes);
}

void memory_drop(void* pointer) {
    free(*(void**)pointer);
}

// Returns the number that follows `name` in a line of a file of the kernel's; -1 if there is none.
static int64_t number_in(const char* path, const char* name) {
    FILE* file = fopen(path, "r");
    char line[256];
    long long number = -1;
    while (file && number < 0 && fgets(line, sizeof(line), file)) {
        if (strncmp(line, name, strlen(name)) == 0 && sscanf(line + strlen(name), "%lld", &number) != 1) number = -1;
    }
    if (file) fclose(file);
    return number;
}

int64_t memory_left(void) {
    const int64_t kilobytes = number_in("/proc/meminfo", "MemAvailable:");
    const int64_t available = kilobytes > 0 ? kilobytes * 1024 : INT64_MAX;
    // A container's limit may be lower. Its current use includes files in the page cache, which can be evicted.
    const int64_t limit = number_in("/sys/fs/cgroup/memory.max", ""),
                  current = number_in("/sys/fs/cgroup/memory.current", "");
    if (limit < 0 || current < 0) return available;
    const char* const stat = "/sys/fs/cgroup/memory.stat";
    const int64_t inactive = number_in(stat, "inactive_file "), active = number_in(stat, "active_file ");
    const int64_t left = limit - current + (inactive > 0 ? inactive : 0) + (active > 0 ? active : 0);
    return left < available ? left : available;
}

char* text_part(const char* text, size_t bytes) {
    return there(strndup(text, bytes), bytes);
}

char* text_copy(const char* text) {
    return text_part(text, strlen(text));
}

char* text_of(const char* format, va_list arguments) {
    char* text = NULL;
    if (vasprintf(&text, format, arguments) < 0) text = NULL;
    return there(text, strlen(format));
}

char* text_format(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    char* text = text_of(format, arguments);
    va_end(arguments);
    return text;
}

static int by_contents(const void* a, const void* b) {
    return strcmp(a, b);
}

// Equal texts are kept once, so that what a step prints again and again takes no more memory.
const char* text_kept(const char* format, ...) {
    static _Thread_local void* kept;
    va_list arguments;
    va_start(arguments, format);
    char* text = text_of(format, arguments);
    va_end(arguments);
    char** found = tsearch(text, &kept, by_contents);
    if (!found) memory_missing(sizeof(*found));
    if (*found != text) free(text);
    block_left(*found);
    return *found;
}

void text_add(const char** text, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    SCOPED char* more = text_of(format, arguments);
    va_end(arguments);
    *text = text_kept("%s%s", *text ? *text : "", more);
}

typedef struct {
    char** text;
    size_t* bytes;
} TextStream;

static ssize_t stream_write(void* cookie, const char* from, size_t count) {
    TextStream* stream = cookie;
    *stream->text = memory_grow(*stream->text, *stream->bytes + count + 1);
    memcpy(*stream->text + *stream->bytes, from, count);
    *stream->bytes += count;
    (*stream->text)[*stream->bytes] = 0;
    return (ssize_t)count;
}

static int stream_close(void* cookie) {
    free(cookie);
    return 0;
}

FILE* text_stream(char** text, size_t* bytes) {
    TextStream* stream = memory_take(sizeof(TextStream));
    *stream = (TextStream){text, bytes};
    *text = memory_zero(1, 1);
    *bytes = 0;
    FILE* file = fopencookie(stream, "w", (cookie_io_functions_t){.write = stream_write, .close = stream_close});
    return there(file, sizeof(FILE));
}
