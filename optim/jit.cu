// See jit.h. The source is embedded in the binary by EMBED_SOURCE: for each header that has this macro, the assembler
// puts the header's text into the section optim_sources, in the order in which the compiler meets the headers. So the
// section, read from end to end, is one program; only the headers' own #include lines must be blanked. The includes
// below alone decide which files are embedded. Therefore make's dependencies are right, and a new format needs no line
// here.
#include "../data/files.h"
#include "../kernels/common.cuh"
#include "jit.h"

#ifndef __CUDA_ARCH__
#define EMBED_SOURCE                                                                                         \
    asm(".pushsection optim_sources, \"a\"\n.ascii \"#line 1 \\\"" __FILE__ "\\\"\\n\"\n.incbin \"" __FILE__ \
        "\"\n.popsection\n");
#endif
#include "persistent.cuh"
#include "sums.cuh"
#include "table.cuh"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

extern "C" const char __start_optim_sources[], __stop_optim_sources[];

typedef unsigned __int128 Hash;

// FNV-1a in 128 bits. It names files and finds damage; it is no protection against attackers.
static Hash hash_bytes(Hash hash, const void* bytes, int64_t count) {
    const Hash prime = ((Hash)1 << 88) + 0x13b;
    for (int64_t i = 0; i < count; i++) hash = (hash ^ ((const unsigned char*)bytes)[i]) * prime;
    return hash;
}

static Hash hash_start() {
    return ((Hash)0x6c62272e07bb0142ull << 64) + 0x62b821756295c58dull;
}

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
    snprintf(error, DATA_ERROR_BYTES,
             "the optimizer's kernels are compiled at run time, and %s could not be opened: install cuda-nvrtc-13-0 "
             "(or -12-8) by apt-get, or nvidia-cuda-nvrtc by pip, and set NIBBLE_NVRTC to the library's path if the "
             "loader does not find it",
             own && *own ? own : "libnvrtc.so.13 or .12");
    return false;
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
    if (newest == 0) {
        snprintf(error, DATA_ERROR_BYTES, "this libnvrtc compiles for no device of compute capability %d.%d or older",
                 compute / 10, compute % 10);
    }
    return newest != 0;
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

// Allocates an image.
static JitImage image_take(int64_t symbol_bytes, int64_t image_bytes) {
    char* symbol = (char*)memory_take((size_t)(symbol_bytes + image_bytes));
    return {symbol, symbol + symbol_bytes, image_bytes, false};
}

void jit_free(JitImage* image) {
    free(image->symbol);
    memset(image, 0, sizeof(*image));
}

// Makes and compiles a program, and returns NVRTC's status. It takes no memory from memory.h, which could not report
// a lack of it from the threads that call this.
static int program_compile(const Nvrtc* nvrtc, const char* source, const char* expression, const char* architecture,
                           NvrtcProgram* program) {
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
    int status = nvrtc->create(program, source, "optim.cu", 0, nullptr, nullptr);
    if (status == 0 && *expression) status = nvrtc->add_name(*program, expression);
    return status == 0 ? nvrtc->compile(*program, count, options) : status;
}

// Copies the image of a compiled program. Otherwise writes NVRTC's status and log, and returns false.
static bool program_image(const Nvrtc* nvrtc, const JitRequest* request, const char* architecture, JitImage* image,
                          char* error) {
    const char *symbol = "", *expression = request->expression;
    const bool ptx = strncmp(architecture, "compute_", 8) == 0;
    const NvrtcProgram program = request->program;
    int status = request->status;
    size_t bytes = 0;
    if (status == 0 && *expression) status = nvrtc->lowered_name(program, expression, &symbol);
    if (status == 0) status = ptx ? nvrtc->ptx_size(program, &bytes) : nvrtc->cubin_size(program, &bytes);
    if (status == 0) {
        *image = image_take((int64_t)strlen(symbol) + 1, (int64_t)bytes);
        memcpy(image->symbol, symbol, strlen(symbol) + 1);
        status = ptx ? nvrtc->ptx(program, image->image) : nvrtc->cubin(program, image->image);
    }
    if (status == 0) return true;
    if (status == NVRTC_NO_MEMORY) memory_missing(0);
    const bool logged = nvrtc->log_size(program, &bytes) == 0 && bytes > 1;
    char* log = (char*)memory_zero(1, logged ? bytes + 1 : 1);
    if (logged && nvrtc->log(program, log) != 0) log[0] = 0;
    snprintf(error, DATA_ERROR_BYTES, "NVRTC could not compile %s: %s\n%s", *expression ? expression : "it",
             nvrtc->error_string(status), log);
    free(log);
    return false;
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
    int version[2] = {major, minor};
    Hash hash = hash_bytes(hash_start(), __start_optim_sources, __stop_optim_sources - __start_optim_sources);
    for (const char* option : jit_options) hash = hash_bytes(hash, option, (int64_t)strlen(option) + 1);
    hash = hash_bytes(hash, version, sizeof(version));
    for (const char* text : {architecture, expression}) hash = hash_bytes(hash, text, (int64_t)strlen(text) + 1);
    snprintf(key, JIT_KEY_BYTES, "%016llx%016llx", (unsigned long long)(hash >> 64), (unsigned long long)hash);
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
    Hash checksum;  // of the sizes and of everything after the header
};

static const char cache_magic[16] = "nibble kernel 2";

static Hash cache_checksum(const CacheHeader* header, const char* payload) {
    const Hash hash = hash_bytes(hash_start(), &header->symbol_bytes, 16);
    return hash_bytes(hash, payload, header->symbol_bytes + header->image_bytes);
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
    if (good) {
        *image = image_take(header.symbol_bytes, header.image_bytes);
        char* symbol = image->symbol;
        good = file_read_at(file, "", symbol, sizeof(header), header.symbol_bytes + header.image_bytes, ignored) &&
               cache_checksum(&header, symbol) == header.checksum && symbol[header.symbol_bytes - 1] == 0;
        image->cached = good;
        if (!good) jit_free(image);
    }
    close(file);
    return good;
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

// Compiles what the requests need, each kernel in a thread.
static bool requests_compile(JitRequest* request, int count, const char* architecture, char* error) {
    Nvrtc nvrtc;
    if (!nvrtc_open(&nvrtc)) return nvrtc_missing(error);
    char* source = jit_source();
    bool good = true;
#pragma omp parallel for schedule(dynamic) num_threads(count)
    for (int i = 0; i < count; i++) {
        JitRequest* its = &request[i];
        if (!request_needs(request, i)) continue;
        its->status = program_compile(&nvrtc, source, its->expression, architecture, &its->program);
    }
    free(source);
    for (int i = 0; i < count && good; i++) {
        JitRequest* its = &request[i];
        if (its->program) good = program_image(&nvrtc, its, architecture, &its->image, error);
    }
    return good;
}

void jit_requests_free(JitRequest* request, int count) {
    Nvrtc nvrtc;
    for (int i = 0; i < count; i++) {
        if (request[i].program && nvrtc_open(&nvrtc)) nvrtc.destroy(&request[i].program);
        jit_free(&request[i].image);
        free((void*)request[i].expression);
    }
}

// Compiles without the cache if `caches` is false.
static bool requests_get(JitRequest* request, int count, const char* architecture, bool caches, char* error) {
    char path[4352];
    bool all = true;
    for (int i = 0; i < count; i++) {
        if (!request_needs(request, i)) continue;
        const bool named = caches && jit_cache_path(request[i].expression, architecture, path, sizeof(path));
        if (!named || !cache_read(path, &request[i].image)) all = false;
    }
    if (all) return true;
    if (!requests_compile(request, count, architecture, error)) return false;
    for (int i = 0; i < count && caches; i++) {
        if (!request[i].program) continue;
        const bool named = jit_cache_path(request[i].expression, architecture, path, sizeof(path));
        if (!named || !cache_write(path, &request[i].image)) cache_notice();
    }
    return true;
}

static bool image_get(const char* expression, const char* architecture, bool caches, JitImage* image, char* error) {
    JitRequest request = {text_copy(expression), nullptr, {}, nullptr, 0};
    const bool good = requests_get(&request, 1, architecture, caches, error);
    *image = request.image, request.image = {};
    if (!good) jit_free(image);
    jit_requests_free(&request, 1);
    return good;
}

bool jit_compile(const char* expression, const char* architecture, JitImage* image, char* error) {
    return image_get(expression, architecture, false, image, error);
}

bool jit_get(const char* expression, const char* architecture, JitImage* image, char* error) {
    return image_get(expression, architecture, true, image, error);
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
        snprintf(error, DATA_ERROR_BYTES, "the NVIDIA driver lacks a call that loads a kernel; install 525 or later");
        return false;
    }
    CUresult status = module_load(&module, image->image);
    if (status == CUDA_SUCCESS) status = module_function(&kernel->function, module, image->symbol);
    if (status == CUDA_SUCCESS) return true;
    snprintf(error, DATA_ERROR_BYTES, "the driver refused the compiled kernel %s: %s", image->symbol,
             cudaGetErrorName((cudaError_t)status));
    return false;
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
