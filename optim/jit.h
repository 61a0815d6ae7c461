// Compiles kernels at run time with NVRTC, from the source that is embedded in the binary, and caches them in a folder:
// $NIBBLE_CACHE, else $XDG_CACHE_HOME/nibble, else ~/.cache/nibble. Compiling needs neither a GPU nor the toolkit's
// headers, but libnvrtc, which is opened on first use: $NIBBLE_NVRTC if that is set (the path of a library that the
// loader does not find by itself, such as pip's), else its usual names.
//
// A file of the cache is named by a hash of everything that decides its contents (source, options, architecture,
// NVRTC's version, the kernel's name) and carries a checksum. It is written under a temporary name, synced and renamed,
// so that neither several processes nor crashes can damage it; a damaged file is compiled again. A kernel that fails to
// compile is never cached.
//
// Code from the cache runs on the GPU. So a folder or file that others than this user and root own or may write, a
// symbolic link, and anything but a regular file are not used. If nothing can be kept, each start compiles again, and
// one line says so. Folders are created with mode 0700 and files with 0600; an administrator who fills a cache for
// others opens it with chmod -R a+rX.
//
// A first use takes 0.1 to 0.75 s a kernel, nearly all of it in NVRTC's optimizer, which works in several threads at a
// time; reading the cache takes 7 ms.
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
    bool cached;  // true if it was read from the cache
};

// Opens a library of CUDA's, such as "libnvrtc", and returns its handle or null. It opens the path in the environment
// variable `variable` or, if that is not set, one of the usual names. With `loaded`, it prefers a library that the
// process has loaded already, such as torch's.
void* open_library(const char* variable, const char* name, bool loaded);

// Returns true if libnvrtc can be opened.
bool jit_available();

// Writes the architecture to compile for on a device of compute capability `compute` (90 for 9.0): "sm_90", or the
// newest PTX that NVRTC knows ("compute_90") if it does not know the device. Returns false with a sentence if there is
// no libnvrtc or it knows neither.
bool jit_architecture(int compute, char* architecture, size_t bytes, char* error);

// Compiles the kernel that a C++ expression names, such as "optim_step_kernel<AdamW, ...>", or takes it from the cache
// if it `caches`; with "" it compiles no kernel. Returns false with NVRTC's log in `error`, cut to DATA_ERROR_BYTES.
// jit_free frees the image.
bool jit_get(const char* expression, const char* architecture, bool caches, JitImage* image, char* error);
void jit_free(JitImage* image);

// Writes the hash that names a kernel's file in the cache, for a version of NVRTC: 32 hexadecimal digits.
constexpr size_t JIT_KEY_BYTES = 33;
void jit_key(const char* expression, const char* architecture, int nvrtc_major, int nvrtc_minor,
             char key[JIT_KEY_BYTES]);

// Writes the path of the cache's file for an expression. Returns false if the environment names no folder, or if there
// is no libnvrtc.
bool jit_cache_path(const char* expression, const char* architecture, char* path, size_t bytes);

// A kernel in the current device's memory.
struct JitKernel {
    CUfunction function;  // NULL: there is none
    CUresult (*allow)(CUfunction function, CUfunction_attribute attribute, int value);
    CUresult (*launch)(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void** arguments,
                       void** extra);
};

// A kernel and the shape of its launches; shared_bytes is the dynamic shared memory of the largest.
struct Kernel {
    JitKernel jit;
    int threads, shared_bytes;
};

// A kernel that is asked for: jit_kernels fills kernel->jit, and keeps the rest for jit_requests_free.
struct JitRequest {
    const char* expression;
    Kernel* kernel;
    JitImage image;
    int status;  // NVRTC's, if it could not compile the kernel
    char* log;   // what NVRTC said then, or null
};

// Compiles kernels through the cache, each in a thread, and loads them, for a device of compute capability `compute`.
// Kernels that this process has loaded already are taken as they are. A kernel stays loaded until the process ends.
// Exits with a sentence if that fails.
void jit_kernels(int compute, JitRequest* request, int count);
// Frees expressions, images and logs, also after a failure.
void jit_requests_free(JitRequest* request, int count);
// Launches a kernel; `arguments` is as for cudaLaunchKernel.
void jit_launch(const Kernel* kernel, int64_t grid, int shared_bytes, void** arguments, cudaStream_t stream);
