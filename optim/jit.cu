// See jit.h. The source is embedded in the binary by EMBED_SOURCE: for each header that has this macro, the assembler
// puts the header's text into the section optim_sources, in the order in which the compiler meets the headers. So the
// section, read from end to end, is one program; only the headers' own #include lines must be blanked. The includes
// below alone decide which files are embedded. Therefore make's dependencies are right, and a new format needs no line
// here.
#include "../data/files.h"
#include "../data/rule_options.h"
#include "../kernels/common.cuh"
#include "jit.h"

#ifndef __CUDA_ARCH__
#define EMBED(WHAT) asm(".pushsection optim_sources, \"a\"\n.ascii \"" WHAT "\"\n.popsection\n");
#define EMBED_SOURCE EMBED("#line 1 \\\"" __FILE__ "\\\"\\n\"\n.incbin \"" __FILE__)
#define HYPER_ROW(KIND, FIELD, ...) " ROW(" #KIND ", " #FIELD ")"
EMBED("#define HYPER_OPTIONS(ROW)" HYPER_OPTIONS(HYPER_ROW) "\\n")
#endif
#include "persistent.cuh"
#include "rows/sums.cuh"
#include "table.cuh"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

extern "C" const char __start_optim_sources[], __stop_optim_sources[];

typedef struct NvrtcProgram_* NvrtcProgram;

// The calls of NVRTC that are needed, declared here since the library is opened at run time and its header need not be
// installed.
#define NVRTC_CALLS(CALL)                                                                                      \
    CALL(int, version, "nvrtcVersion", (int* major, int* minor))                                               \
    CALL(const char*, error_string, "nvrtcGetErrorString", (int))                                              \
    CALL(int, create, "nvrtcCreateProgram",                                                                    \
         (NvrtcProgram*, const char* source, const char* name, int headers, const char* const* header_sources, \
          const char* const* header_names))                                                                    \
    CALL(int, destroy, "nvrtcDestroyProgram", (NvrtcProgram*))                                                 \
    CALL(int, add_name, "nvrtcAddNameExpression", (NvrtcProgram, const char* expression))                      \
    CALL(int, compile, "nvrtcCompileProgram", (NvrtcProgram, int options, const char* const* option))          \
    CALL(int, lowered_name, "nvrtcGetLoweredName", (NvrtcProgram, const char* expression, const char** name))  \
    CALL(int, log_size, "nvrtcGetProgramLogSize", (NvrtcProgram, size_t*))                                     \
    CALL(int, log, "nvrtcGetProgramLog", (NvrtcProgram, char*))                                                \
    CALL(int, cubin_size, "nvrtcGetCUBINSize", (NvrtcProgram, size_t*))                                        \
    CALL(int, cubin, "nvrtcGetCUBIN", (NvrtcProgram, char*))                                                   \
    CALL(int, ptx_size, "nvrtcGetPTXSize", (NvrtcProgram, size_t*))                                            \
    CALL(int, ptx, "nvrtcGetPTX", (NvrtcProgram, char*))                                                       \
    CALL(int, arch_count, "nvrtcGetNumSupportedArchs", (int*))                                                 \
    CALL(int, archs, "nvrtcGetSupportedArchs", (int*))

struct Nvrtc {
#define MEMBER(RESULT, FIELD, NAME, PARAMETERS) RESULT(*FIELD) PARAMETERS;
    NVRTC_CALLS(MEMBER)
};

void* open_library(const char* variable, const char* name, bool loaded) {
    const char* own = getenv(variable);
    if (own && *own) return dlopen(own, RTLD_NOW | RTLD_LOCAL);
    for (int flag : {RTLD_NOLOAD, 0}) {
        for (const char* pattern : {"%s.so.13", "%s.so.12", "%s.so", "/usr/local/cuda/lib64/%s.so"}) {
            char path[64];
            snprintf(path, sizeof(path), pattern, name);
            void* library = flag && !loaded ? nullptr : dlopen(path, RTLD_NOW | RTLD_LOCAL | flag);
            if (library) return library;
        }
    }
    return nullptr;
}

// Opens libnvrtc. The loader counts openings, so this may be called repeatedly.
static bool nvrtc_open(Nvrtc* nvrtc) {
    void* library = open_library("NIBBLE_NVRTC", "libnvrtc", false);
    bool whole = library != nullptr;
#define BIND(RESULT, MEMBER, NAME, PARAMETERS)                             \
    if (whole) nvrtc->MEMBER = (RESULT(*) PARAMETERS)dlsym(library, NAME); \
    whole = whole && nvrtc->MEMBER;
    NVRTC_CALLS(BIND)
    return whole;
}

static bool nvrtc_missing(char* error) {
    const char* own = getenv("NIBBLE_NVRTC");
    return data_error(error,
                      "the optimizer's kernels are compiled at run time, and %s could not be opened: install "
                      "cuda-nvrtc-13-0 (or -12-8) by apt-get, or nvidia-cuda-nvrtc by pip, and set NIBBLE_NVRTC to the "
                      "library's path if the loader does not find it",
                      own && *own ? own : "libnvrtc.so.13 or .12");
}

bool jit_available() {
    Nvrtc nvrtc;
    return nvrtc_open(&nvrtc);
}

bool jit_architecture(int compute, char* architecture, size_t bytes, char* error) {
    Nvrtc nvrtc;
    if (!nvrtc_open(&nvrtc)) return nvrtc_missing(error);
    int count = 0, newest = 0, known[64];
    if (nvrtc.arch_count(&count) != 0 || count > 64 || nvrtc.archs(known) != 0) count = 0;
    for (int i = 0; i < count; i++) {
        if (known[i] == compute) {
            snprintf(architecture, bytes, "sm_%d", compute);
            return true;
        }
        if (known[i] < compute && known[i] > newest) newest = known[i];
    }
    snprintf(architecture, bytes, "compute_%d", newest);
    return newest != 0 || data_error(error, "this libnvrtc compiles for no device of compute capability %d.%d or older",
                                     compute / 10, compute % 10);
}

// Returns the source that is compiled: all of the optimizer's device code. The caller frees it. The headers' own
// includes are blanked, since the included text precedes them already.
static char* jit_source() {
    char* source = text_part(__start_optim_sources, (size_t)(__stop_optim_sources - __start_optim_sources));
    for (char* line = source; *line;) {
        char* end = strchr(line, '\n');
        if (!end) end = line + strlen(line);
        if (strncmp(line, "#include \"", 10) == 0 || strncmp(line, "#pragma once", 12) == 0) {
            memset(line, ' ', (size_t)(end - line));
        }
        line = *end ? end + 1 : end;
    }
    return source;
}

// These options decide the arithmetic. They are spelt out, although the source does not rely on them.
static const char* const jit_options[] = {"--std=c++17",     "-fmad=false",      "--ftz=false",
                                          "--prec-div=true", "--prec-sqrt=true", "--disable-warnings"};
constexpr int NVRTC_NO_MEMORY = 1;  // a status
constexpr int JIT_OPTIONS = sizeof(jit_options) / sizeof(jit_options[0]);

// Allocates an image; returns false if there is no memory.
static bool image_take(int64_t symbol_bytes, int64_t image_bytes, JitImage* image) {
    char* symbol = (char*)memory_try((size_t)(symbol_bytes + image_bytes));
    if (symbol) *image = {symbol, symbol + symbol_bytes, image_bytes, false};
    return symbol != nullptr;
}

void jit_free(JitImage* image) {
    free(image->symbol);
    memset(image, 0, sizeof(*image));
}

// Compiles the kernel of a request into its image, or sets its status and NVRTC's log.
static bool request_compile(const Nvrtc* nvrtc, const char* source, const char* architecture, JitRequest* request) {
    const char *symbol = "", *expression = request->expression;
    const bool ptx = strncmp(architecture, "compute_", 8) == 0;
    char option_arch[64];
    // The "a" allows instructions that only Hopper has, which kernel.cuh uses if it may.
    const char* hopper = strcmp(architecture, "sm_90") == 0 ? "a" : "";
    snprintf(option_arch, sizeof(option_arch), "--gpu-architecture=%s%s", architecture, hopper);
    const char* options[JIT_OPTIONS + 2];
    memcpy(options, jit_options, sizeof(jit_options));
    int major = 0, minor = 0, count = JIT_OPTIONS;
    options[count++] = option_arch;
    // NVRTC from 13 on has its own cache, and starts the driver to find it, which takes more time than it could save.
    if (nvrtc->version(&major, &minor) == 0 && major >= 13) options[count++] = "--no-cache";
    NvrtcProgram program = nullptr;
    size_t bytes = 0;
    int status = nvrtc->create(&program, source, "optim.cu", 0, nullptr, nullptr);
    if (status == 0 && *expression) status = nvrtc->add_name(program, expression);
    if (status == 0) status = nvrtc->compile(program, count, options);
    if (status == 0 && *expression) status = nvrtc->lowered_name(program, expression, &symbol);
    if (status == 0) status = ptx ? nvrtc->ptx_size(program, &bytes) : nvrtc->cubin_size(program, &bytes);
    const int64_t symbol_bytes = (int64_t)strlen(symbol) + 1;
    if (status == 0 && !image_take(symbol_bytes, (int64_t)bytes, &request->image)) status = NVRTC_NO_MEMORY;
    if (status == 0) {
        memcpy(request->image.symbol, symbol, (size_t)symbol_bytes);
        status = (ptx ? nvrtc->ptx : nvrtc->cubin)(program, request->image.image);
    }
    const bool logged = status != 0 && program && nvrtc->log_size(program, &bytes) == 0 && bytes > 1;
    if (logged) request->log = (char*)memory_try(bytes + 1);
    if (request->log) request->log[bytes] = 0;
    if (request->log && nvrtc->log(program, request->log) != 0) request->log[0] = 0;
    if (program) nvrtc->destroy(&program);
    request->status = status;
    return status == 0;
}

// Writes the cache's folder. Returns false if the environment names none or its name is too long.
static bool cache_folder(char* folder, size_t bytes) {
    const char* own = getenv("NIBBLE_CACHE");
    const char* xdg = getenv("XDG_CACHE_HOME");
    const char* home = getenv("HOME");
    int length = own ? (int)strlen(own) : 0;
    while (length > 1 && own[length - 1] == '/') length--;  // a slash at the end would follow a symbolic link
    if (own && *own) return snprintf(folder, bytes, "%.*s", length, own) < (int)bytes;
    if (xdg && *xdg) return snprintf(folder, bytes, "%s/nibble", xdg) < (int)bytes;
    if (home && *home) return snprintf(folder, bytes, "%s/.cache/nibble", home) < (int)bytes;
    return false;
}

void jit_key(const char* expression, const char* architecture, int major, int minor, char key[JIT_KEY_BYTES]) {
    char text[4096];
    int used = 0;
    for (const char* option : jit_options) used += snprintf(text + used, sizeof(text) - (size_t)used, "%s ", option);
    snprintf(text + used, sizeof(text) - (size_t)used, "%s %d.%d %s", architecture, major, minor, expression);
    const uint64_t source = text_hash(__start_optim_sources, __stop_optim_sources - __start_optim_sources),
                   rest = text_hash(text, (int64_t)strlen(text));
    snprintf(key, JIT_KEY_BYTES, "%016llx%016llx", (unsigned long long)source, (unsigned long long)rest);
}

bool jit_cache_path(const char* expression, const char* architecture, char* path, size_t bytes) {
    char folder[4096], key[JIT_KEY_BYTES];
    Nvrtc nvrtc;
    int major = 0, minor = 0;
    if (!cache_folder(folder, sizeof(folder)) || !nvrtc_open(&nvrtc)) return false;
    if (nvrtc.version(&major, &minor) != 0) return false;
    jit_key(expression, architecture, major, minor, key);
    int length = snprintf(path, bytes, "%s/%s.kernel", folder, key);
    return length > 0 && length < (int)bytes;
}

// A file of the cache consists of this header, the symbol with its 0, and the image.
struct CacheHeader {
    char magic[16];
    int64_t symbol_bytes, image_bytes;
    uint64_t checksum;  // of the sizes and of everything after the header; no protection against attackers
};

static const char cache_magic[16] = "nibble kernel 3";

static uint64_t cache_checksum(const CacheHeader* header, const char* payload) {
    return text_hash(payload, header->symbol_bytes + header->image_bytes) ^ bits_mix((uint64_t)header->symbol_bytes);
}

// Returns true for a folder or regular file (`type`) that only this user or root could have written.
static bool is_own(const struct stat* info, mode_t type) {
    return (info->st_mode & S_IFMT) == type && (info->st_uid == geteuid() || info->st_uid == 0) &&
           !(info->st_mode & (S_IWGRP | S_IWOTH));
}

// Returns true if the cache's folder may be used.
static bool cache_usable(const char* path) {
    char folder[4352];
    struct stat info;
    snprintf(folder, sizeof(folder), "%.*s", (int)(strrchr(path, '/') - path), path);
    return lstat(*folder ? folder : "/", &info) == 0 && is_own(&info, S_IFDIR);
}

// Reads an image from the cache. Returns false if there is no file, or none that may be used. It does not wait for a
// FIFO.
static bool cache_read(const char* path, JitImage* image) {
    CacheHeader header;
    struct stat info;
    char ignored[DATA_ERROR_BYTES];
    const int64_t most = (int64_t)1 << 30;
    const int file = cache_usable(path) ? open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK) : -1;
    if (file < 0) return false;
    bool good = fstat(file, &info) == 0 && is_own(&info, S_IFREG) &&
                file_read_at(file, "", &header, 0, sizeof(header), ignored) &&
                memcmp(header.magic, cache_magic, sizeof(cache_magic)) == 0 && header.symbol_bytes > 0 &&
                header.symbol_bytes < most && header.image_bytes > 0 && header.image_bytes < most &&
                info.st_size == (int64_t)sizeof(header) + header.symbol_bytes + header.image_bytes;
    if (good && image_take(header.symbol_bytes, header.image_bytes, image)) {
        char* symbol = image->symbol;
        good = file_read_at(file, "", symbol, sizeof(header), header.symbol_bytes + header.image_bytes, ignored) &&
               cache_checksum(&header, symbol) == header.checksum && symbol[header.symbol_bytes - 1] == 0;
        image->cached = good;
        if (!good) jit_free(image);
    }
    close(file);
    return good && image->cached;
}

// Creates the folders of a path. A failure will show when the file is opened.
static void folders_make(const char* path) {
    char folder[4352];
    snprintf(folder, sizeof(folder), "%s", path);
    for (char* slash = strchr(folder + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(folder, 0700);
        *slash = '/';
    }
}

// Writes an image to the cache. Returns false if it cannot.
static bool cache_write(const char* path, const JitImage* image) {
    CacheHeader header = {"", image->image - image->symbol, image->image_bytes, 0};
    char temporary[4400], ignored[DATA_ERROR_BYTES];
    memcpy(header.magic, cache_magic, sizeof(cache_magic));
    header.checksum = cache_checksum(&header, image->symbol);
    snprintf(temporary, sizeof(temporary), "%s.XXXXXX", path);
    folders_make(path);
    const int file = cache_usable(path) ? mkostemp(temporary, O_CLOEXEC) : -1;
    if (file < 0) return false;
    bool good = file_write_all(file, path, &header, sizeof(header), ignored) &&
                file_write_all(file, path, image->symbol, header.symbol_bytes + header.image_bytes, ignored) &&
                file_sync(file, path, ignored);
    good = close(file) == 0 && good && rename(temporary, path) == 0;
    if (!good) unlink(temporary);
    return good;
}

// Prints one notice in a process, and only on the first rank of a machine, since its ranks share the cache.
static void cache_notice() {
    static bool told;
    const char* rank = getenv("LOCAL_RANK");
    char folder[4096], text[8192];
    if ((rank && atoi(rank) > 0) || __atomic_exchange_n(&told, true, __ATOMIC_RELAXED)) return;
    if (!cache_folder(folder, sizeof(folder))) snprintf(folder, sizeof(folder), "a cache folder");
    snprintf(text, sizeof(text),
             "train: note: a compiled kernel could not be kept in %s, so each start compiles it again; NIBBLE_CACHE "
             "names another folder, which must be yours and closed to writes by others\n",
             folder);
    notice(text);
}

// Returns true if request `index` needs an image that no earlier request has.
static bool request_needs(const JitRequest* request, int index) {
    bool needs = !request[index].image.image && !(request[index].kernel && request[index].kernel->jit.function);
    for (int i = 0; i < index; i++) needs = needs && strcmp(request[i].expression, request[index].expression) != 0;
    return needs;
}

// Reads the image of a request from the cache, or compiles it and writes it there.
static void request_get(const Nvrtc* nvrtc, const char* source, const char* architecture, bool caches,
                        JitRequest* request) {
    char path[4352];
    const bool named = caches && jit_cache_path(request->expression, architecture, path, sizeof(path));
    if (named && cache_read(path, &request->image)) return;
    if (!request_compile(nvrtc, source, architecture, request) || !caches) return;
    if (!named || !cache_write(path, &request->image)) cache_notice();
}

// Gets the images that the requests need, each in a thread; without the cache if `caches` is false.
static bool requests_get(JitRequest* request, int count, const char* architecture, bool caches, char* error) {
    Nvrtc nvrtc;
    int needed = 0;
    for (int i = 0; i < count; i++) needed += request_needs(request, i) ? 1 : 0;
    if (needed == 0) return true;
    if (!nvrtc_open(&nvrtc)) return nvrtc_missing(error);
    char* source = jit_source();
#pragma omp parallel for schedule(dynamic) num_threads(needed)
    for (int i = 0; i < count; i++) {
        if (request_needs(request, i)) request_get(&nvrtc, source, architecture, caches, &request[i]);
    }
    free(source);
    for (int i = 0; i < count; i++) {
        const JitRequest* failed = &request[i];
        if (failed->status == 0) continue;
        if (failed->status == NVRTC_NO_MEMORY) memory_missing(0);
        // data_error would take the line breaks out of the log.
        snprintf(error, DATA_ERROR_BYTES, "NVRTC could not compile %s: %s\n%s",
                 *failed->expression ? failed->expression : "it", nvrtc.error_string(failed->status),
                 failed->log ? failed->log : "");
        return false;
    }
    return true;
}

void jit_requests_free(JitRequest* request, int count) {
    for (int i = 0; i < count; i++) {
        jit_free(&request[i].image);
        free(request[i].log), free((void*)request[i].expression);
    }
}

bool jit_get(const char* expression, const char* architecture, bool caches, JitImage* image, char* error) {
    JitRequest request = {text_copy(expression), nullptr, {}, 0, nullptr};
    const bool good = requests_get(&request, 1, architecture, caches, error);
    *image = request.image, request.image = {};
    if (!good) jit_free(image);
    jit_requests_free(&request, 1);
    return good;
}

// Loads an image into the current device, where it stays until the process ends. Returns false with a sentence if the
// driver refuses it.
static bool jit_load(const JitImage* image, JitKernel* kernel, char* error) {
    CUresult (*module_load)(CUmodule * module, const void* image);
    CUresult (*module_function)(CUfunction * function, CUmodule module, const char* name);
    CUmodule module = nullptr;
    memset(kernel, 0, sizeof(*kernel));
    if (!driver_bind("cuModuleLoadData", &module_load) || !driver_bind("cuModuleGetFunction", &module_function) ||
        !driver_bind("cuLaunchKernel", &kernel->launch) || !driver_bind("cuFuncSetAttribute", &kernel->allow)) {
        return data_error(error, "the NVIDIA driver lacks a call that loads a kernel; install 525 or later");
    }
    CUresult status = module_load(&module, image->image);
    if (status == CUDA_SUCCESS) status = module_function(&kernel->function, module, image->symbol);
    return status == CUDA_SUCCESS || data_error(error, "the driver refused the compiled kernel %s: %s", image->symbol,
                                                cudaGetErrorName((cudaError_t)status));
}

// The kernels that this process has loaded. Optimizers share them: with step_in_backward of the PyTorch package each
// parameter has an optimizer of its own.
struct LoadedKernel {
    int device;
    char key[JIT_KEY_BYTES];
    JitKernel kernel;
    LoadedKernel* next;
};

static LoadedKernel* loaded_kernels;
static pthread_mutex_t loaded_lock = PTHREAD_MUTEX_INITIALIZER;

// Returns true, with the kernel, if it is loaded in this device's memory.
static bool loaded_find(int device, const char* key, JitKernel* kernel) {
    pthread_mutex_lock(&loaded_lock);
    const LoadedKernel* at = loaded_kernels;
    while (at && (at->device != device || strcmp(at->key, key) != 0)) at = at->next;
    if (at) *kernel = at->kernel;
    pthread_mutex_unlock(&loaded_lock);
    return at != nullptr;
}

static void loaded_add(int device, const char* key, const JitKernel* kernel) {
    LoadedKernel* added = (LoadedKernel*)memory_zero(1, sizeof(LoadedKernel));
    block_left(added);
    added->device = device, added->kernel = *kernel;
    memcpy(added->key, key, JIT_KEY_BYTES);
    pthread_mutex_lock(&loaded_lock);
    added->next = loaded_kernels;
    loaded_kernels = added;
    pthread_mutex_unlock(&loaded_lock);
}

void jit_kernels(int compute, JitRequest* request, int count) {
    char architecture[32], error[DATA_ERROR_BYTES], key[JIT_KEY_BYTES];
    int device;
    if (count == 0) return;
    check(cudaGetDevice(&device));
    require(jit_architecture(compute, architecture, sizeof(architecture), error), error);
    for (int i = 0; i < count; i++) {
        jit_key(request[i].expression, architecture, 0, 0, key);  // the process has one NVRTC
        loaded_find(device, key, &request[i].kernel->jit);
    }
    require(requests_get(request, count, architecture, true, error), error);
    for (int i = 0; i < count; i++) {
        Kernel* kernel = request[i].kernel;
        jit_key(request[i].expression, architecture, 0, 0, key);
        if (!loaded_find(device, key, &kernel->jit)) {
            check(cudaFree(nullptr));  // the runtime's context is current after this
            require(jit_load(&request[i].image, &kernel->jit, error), error);
            loaded_add(device, key, &kernel->jit);
        }
        check(kernel->jit.allow(kernel->jit.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                kernel->shared_bytes));
    }
}

void jit_launch(const Kernel* kernel, int64_t grid, int shared_bytes, void** arguments, cudaStream_t stream) {
    check(kernel->jit.launch(kernel->jit.function, (unsigned)grid, 1, 1, (unsigned)kernel->threads, 1, 1,
                             (unsigned)shared_bytes, stream, arguments, nullptr));
}
