// Kernels compiled at run time by NVRTC from the source that is embedded in the binary, and kept in a folder:
// $NIBBLE_CACHE, else $XDG_CACHE_HOME/nibble, else ~/.cache/nibble. Compiling needs neither a GPU nor the toolkit's
// headers; it needs libnvrtc, which is opened when it is first wanted: $NIBBLE_NVRTC if that is set (the path of a
// library that the loader does not find by itself, such as pip's), else by its usual names.
//
// A file of the cache is named by a hash of all that decides its contents (source, options, architecture, NVRTC's
// version, the kernel asked for) and carries a checksum. It is written under a temporary name, synced and renamed, so
// several processes and crashes cannot damage it; one that is damaged all the same is compiled again. Temporary files
// of killed processes are removed when they are an hour old. A folder that cannot be written costs a second at each
// start and one line that says so. What fails to compile is never kept.
//
// Code that is read from the cache runs on the GPU. So a folder or file that others than this user and root own or may
// write, a symbolic link and what is no regular file are not used, and one line says so. Folders are created as 0700
// and files as 0600, whatever the umask; an administrator who fills a cache for others opens it with chmod -R a+rX.
//
// A first use takes 0.1 to 0.75 s, nearly all of it in NVRTC's optimizer, and one from the cache 7 ms.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#include <cuda.h>
#include <cuda_runtime.h>
#else
#include "../kernels/no_cuda.h"
#endif

struct JitImage {
    char* symbol;  // the kernel's mangled name
    char* image;   // cubin or PTX; allocated together with symbol, freed by jit_free
    int64_t image_bytes;
    bool cached;  // read from the cache
};

// The source that is compiled, caller frees: all of the optimizer's device code, then `user_source`.
char* jit_source(int64_t* bytes, const char* user_source = "");

// Opens a library of CUDA's, such as "libnvrtc": the one that the environment variable names or, if it names none, one
// that is found under the usual names; with `loaded` rather one that the process has loaded (torch's, say).
void* open_library(const char* variable, const char* name, bool loaded);

// True if libnvrtc can be opened.
bool jit_available();

// The architecture to compile for, on a device of compute capability `compute` (90 for 9.0): "sm_90", or the newest PTX
// that NVRTC knows ("compute_90") when it does not know the device.
bool jit_architecture(int compute, char* architecture, size_t bytes, char* error);

// Compiles the kernel that a C++ expression names, such as "optim_step_kernel<AdamW, ...>"; "" names none, and the
// image then has what variables the source defines. False with NVRTC's log in `error`, cut to DATA_ERROR_BYTES.
// `user_source` is what the optimizer's source is followed by: formats of the user's own (user.cuh).
bool jit_compile(const char* expression, const char* architecture, JitImage* image, char* error,
                 const char* user_source = "");

// Does the same through the cache.
bool jit_get(const char* expression, const char* architecture, JitImage* image, char* error,
             const char* user_source = "");
void jit_free(JitImage* image);

// The content address of a kernel compiled by NVRTC of a version: 32 hexadecimal digits.
constexpr size_t JIT_KEY_BYTES = 33;
void jit_key(const char* expression, const char* architecture, const char* user_source, int nvrtc_major,
             int nvrtc_minor, char key[JIT_KEY_BYTES]);

// The path of the cache's file for an expression; false when no folder is named by the environment.
bool jit_cache_path(const char* expression, const char* architecture, char* path, size_t bytes,
                    const char* user_source = "");

// A kernel in the current device's memory.
struct JitKernel {
    CUfunction function;  // NULL: there is none
    CUresult (*launch)(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void** arguments,
                       void** extra);
};

// A kernel that was compiled ahead of time or by NVRTC.
struct Kernel {
    const void* built_in;  // or null: then jit
    JitKernel jit;
    int threads, shared_bytes;
};

// Loads an image into the current device, where it stays until the process ends; false and a sentence when the driver
// refuses it. A launch's arguments are as cudaLaunchKernel takes them.
bool jit_load(const JitImage* image, JitKernel* kernel, char* error);
// Makes a kernel through the cache and loads it, for a device of compute capability `compute`; ends the process with a
// sentence if it cannot.
void jit_kernel(int compute, const char* expression, const char* user_source, JitKernel* kernel);
// Lets launches ask for as much dynamic shared memory.
void jit_shared_bytes(const JitKernel* kernel, int bytes);
void jit_launch(const JitKernel* kernel, int64_t grid, int block, int shared_bytes, void** arguments,
                cudaStream_t stream);
