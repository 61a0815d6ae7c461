// The base of every operator and the trainer: the device, its memory, the check of library calls, the element types,
// 16-byte vectors and the few reductions.
// An operator `op` in kernels/op.cuh has one launcher, `op_forward(dev, ...)`, that runs either the CUDA kernel on
// dev->stream or, when dev->gpu is false, the plain C version `op_forward_cpu` beside it (fp32 only). X is the element
// type of activations and weights (float or bf16), G that of parameter gradients (float or bf16); statistics (mean,
// rstd, lse, losses) are always fp32, and so is every sum.
#pragma once

#ifdef __CUDACC__
#include <cublasLt.h>
#include <cuda.h>  // types; the driver's functions are found at run time, so that nothing links with it
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#else
#include "no_cuda.h"
#endif
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <type_traits>

#include "../data/errors.h"
#include "../data/memory.h"
#include "../data/text.h"

typedef __nv_bfloat16 bf16;

// Errors. A failed library call prints all details and exits with code 1; data/errors.h answers a user's mistake.

[[noreturn]] inline void check_failed(const char* library, const char* name, const char* text, const char* expression,
                                      const char* file, int line) {
    char message[4096];
    const char* rank = getenv("RANK");  // as the launcher or launch_join has set it
    int device = -1;
    if (cudaGetDevice(&device) != cudaSuccess) device = -1;
    snprintf(message, sizeof(message), "%s error %s: %s\n  %s\n  at %s:%d, rank %d, device %d\n", library, name, text,
             expression, file, line, rank ? atoi(rank) : 0, device);
    launch_failed(EXIT_FAILURE, message);
    fputs(message, stderr);
    exit(EXIT_FAILURE);
}

inline void check_status(cudaError_t status, const char* expression, const char* file, int line) {
    if (status == cudaSuccess) return;
    check_failed("CUDA", cudaGetErrorName(status), cudaGetErrorString(status), expression, file, line);
}

inline void check_status(cublasStatus_t status, const char* expression, const char* file, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    check_failed("cuBLASLt", cublasLtGetStatusName(status), cublasLtGetStatusString(status), expression, file, line);
}

// The driver's codes are the runtime's.
inline void check_status(CUresult status, const char* expression, const char* file, int line) {
    if (status == CUDA_SUCCESS) return;
    cudaError_t same = (cudaError_t)status;
    check_failed("CUDA driver", cudaGetErrorName(same), cudaGetErrorString(same), expression, file, line);
}

// One check for every library: another library adds an overload of check_status beside its first use.
#define check(expression) check_status((expression), #expression, __FILE__, __LINE__)

// Finds the driver's function of this name, in CUDA 12.0's version; false if the driver has none.
template <typename Function>
bool driver_bind(const char* name, Function* function) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    check(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result));
#else
    check(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result));
#endif
    *function = (Function)found;
    return found != nullptr;
}

// The device: a GPU, or this machine's cores.

struct MatmulPlan;

// A table that grows; see kernels/matmul_plan.cuh.
struct MatmulPlans {
    MatmulPlan* plan;
    int count, capacity;
    void (*close)(MatmulPlans* plans);  // set with the first plan
};

struct Device {
    bool gpu;           // false: the plain C versions run, and "device memory" is host memory
    bool imagined;      // for plans: memory is counted but not allocated; copies and fills do nothing
    char name[256];     // "NVIDIA H200", or the CPU's
    int sm_count;       // multiprocessors; 0 on the CPU
    int compute;        // compute capability times 10: 90 for sm_90; 0 on the CPU
    int64_t memory;     // bytes of device memory, total
    int shared_memory;  // bytes that a block can ask for
    cudaStream_t stream;
    cublasLtHandle_t cublaslt;
    int64_t context;            // bytes in use after the driver's context was made: its own and other processes'
    bool profile;               // kernels/profile.h: kernels get names
    bool early;                 // launch_early may begin a kernel before the one before it has ended
    bool warms_up;              // memory has no values yet, so that operators may overwrite their inputs
    void* workspace;            // cuBLASLt's, WORKSPACE_BYTES
    int* ticket;                // device: the counter by which a kernel's blocks draw work; 0 between kernels
    MatmulPlans* matmul_plans;  // what kernels/matmul_plan.cuh has chosen so far on this device
};

constexpr int64_t WORKSPACE_BYTES = 32 << 20;  // cuBLASLt's advice for Hopper; its best algorithms need it
constexpr int64_t MODULE_BYTES = 16 << 20;     // kernels, ours and cuBLASLt's, that are loaded when they are first used

// Returns the bytes of the GPU's memory that all processes use.
inline int64_t memory_used(const Device* dev) {
    size_t available = 0, total = 0;
    if (dev->gpu) check(cudaMemGetInfo(&available, &total));
    return (int64_t)(total - available);
}

// Opens GPU `index`, or the CPU when gpu is false.
inline void device_open(Device* dev, bool gpu, int index) {
    memset(dev, 0, sizeof(*dev));
    dev->gpu = gpu;
    if (!gpu) {
        snprintf(dev->name, sizeof(dev->name), "CPU");
        return;
    }
    check(cudaSetDevice(index));
    // The stack of functions whose needs the compiler does not know; we have none. The driver's default of 1024 bytes
    // for every thread that the GPU can hold takes 264 MiB on an H200.
    check(cudaDeviceSetLimit(cudaLimitStackSize, 256));
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, index));
    snprintf(dev->name, sizeof(dev->name), "%s", properties.name);
    dev->sm_count = properties.multiProcessorCount;
    dev->compute = properties.major * 10 + properties.minor;
    dev->memory = (int64_t)properties.totalGlobalMem;
    dev->shared_memory = (int)properties.sharedMemPerBlockOptin;
    check(cudaStreamCreateWithFlags(&dev->stream, cudaStreamNonBlocking));
    check(cublasLtCreate(&dev->cublaslt));
    dev->context = memory_used(dev);
    check(cudaMalloc(&dev->workspace, WORKSPACE_BYTES));
    check(cudaMalloc(&dev->ticket, sizeof(int)));
    check(cudaMemsetAsync(dev->ticket, 0, sizeof(int), dev->stream));
    dev->matmul_plans = (MatmulPlans*)memory_zero(1, sizeof(MatmulPlans));
}

inline void device_close(Device* dev) {
    if (!dev->gpu || dev->imagined) return;
    if (dev->matmul_plans->close) dev->matmul_plans->close(dev->matmul_plans);
    free(dev->matmul_plans);
    check(cudaFree(dev->workspace));
    check(cudaFree(dev->ticket));
    check(cublasLtDestroy(dev->cublaslt));
    check(cudaStreamDestroy(dev->stream));
}

// Returns the bytes that device_alloc takes for `bytes`.
inline int64_t aligned_bytes(int64_t bytes) {
    return (bytes + 255) / 256 * 256;
}

// Device memory from which arrays are taken one after another. With base NULL it only counts their bytes.
struct Layout {
    char* base;
    int64_t used;
};

// Returns the next array of n elements, 256-byte aligned.
template <typename T>
T* layout_take(Layout* layout, int64_t n) {
    T* array = layout->base ? (T*)(layout->base + layout->used) : nullptr;
    layout->used = aligned_bytes(layout->used + n * (int64_t)sizeof(T));
    return array;
}

// An imagined device's memory begins here: offsets from NULL would be undefined.
inline void* const IMAGINED_MEMORY = (void*)256;

// Returns device memory, 256-byte aligned, not initialised; NULL for 0 bytes. The caller frees it with device_free. Its
// bytes are added to *counted, so that the same calls make a plan and carry it out.
inline void* device_alloc(const Device* dev, int64_t bytes, int64_t* counted = nullptr) {
    void* pointer = nullptr;
    bytes = aligned_bytes(bytes);
    if (counted) *counted += bytes;
    if (bytes == 0) return nullptr;
    if (dev->imagined) return IMAGINED_MEMORY;
    if (dev->gpu) {
        check(cudaMalloc(&pointer, (size_t)bytes));
    } else {
        pointer = memory_aligned(256, (size_t)bytes);
    }
    return pointer;
}

inline void device_free(const Device* dev, void* pointer) {
    if (dev->imagined) return;
    if (dev->gpu && pointer) {
        check(cudaFree(pointer));
    } else {
        free(pointer);
    }
}

// Returns pinned host memory, not initialised, on a machine with a GPU. The caller frees it with pinned_free.
inline void* pinned_alloc(size_t bytes) {
    void* pointer;
    check(cudaMallocHost(&pointer, bytes));
    return pointer;
}

inline void pinned_free(void* pointer) {
    check(cudaFreeHost(pointer));
}

// Sets each byte to `value`.
inline void device_fill(const Device* dev, void* pointer, int value, int64_t bytes) {
    if (bytes == 0 || dev->imagined) return;
    if (dev->gpu) {
        check(cudaMemsetAsync(pointer, value, (size_t)bytes, dev->stream));
    } else {
        memset(pointer, value, (size_t)bytes);
    }
}

inline void device_zero(const Device* dev, void* pointer, int64_t bytes) {
    device_fill(dev, pointer, 0, bytes);
}

inline void device_sync(const Device* dev) {
    if (dev->gpu && !dev->imagined) check(cudaStreamSynchronize(dev->stream));
}

// Makes a stream wait for what is queued on another one so far. The caller may use `event` again.
inline void stream_after(cudaStream_t stream, cudaStream_t other, cudaEvent_t event) {
    check(cudaEventRecord(event, other));
    check(cudaStreamWaitEvent(stream, event, 0));
}

// Returns the milliseconds that a stream takes for what `run` queues. It waits for them.
template <typename Run>
float stream_ms(cudaStream_t stream, const Run& run) {
    cudaEvent_t event[2];
    float ms;
    for (cudaEvent_t& each : event) check(cudaEventCreate(&each));
    check(cudaEventRecord(event[0], stream));
    run();
    check(cudaEventRecord(event[1], stream));
    check(cudaEventSynchronize(event[1]));
    check(cudaEventElapsedTime(&ms, event[0], event[1]));
    for (cudaEvent_t each : event) check(cudaEventDestroy(each));
    return ms;
}

// Queues a copy on a stream of the device; on the CPU it copies at once. "Device memory" may be pinned host memory,
// where an optimizer's states are (optim/model/offload.cu), so the addresses decide the direction.
inline void copy_on(const Device* dev, cudaStream_t stream, void* to, const void* from, int64_t bytes) {
    if (bytes <= 0 || dev->imagined) return;
    if (dev->gpu) {
        check(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDefault, stream));
    } else {
        memcpy(to, from, (size_t)bytes);
    }
}

// Copies between host and device, ordered on the stream and complete on return.
inline void copy_to_device(const Device* dev, void* device, const void* host, int64_t bytes) {
    copy_on(dev, dev->stream, device, host, bytes);
    if (bytes > 0) device_sync(dev);
}

inline void copy_to_host(const Device* dev, void* host, const void* device, int64_t bytes) {
    copy_to_device(dev, host, device, bytes);
}

// Returns the bytes that can be allocated now: the GPU's free memory, or this machine's available memory.
inline int64_t memory_available(const Device* dev) {
    if (dev->imagined) return dev->memory - dev->context - WORKSPACE_BYTES;
    if (dev->gpu) {
        size_t available, total;
        check(cudaMemGetInfo(&available, &total));
        return (int64_t)available;
    }
    return memory_left();
}

// Every kernel launch is followed by this call, so that launch errors (bad grid, no kernel image) show there.
#define check_launch() check(cudaGetLastError())

#ifdef __CUDACC__
// Launches a kernel that calls early_begin first, and early_wait before it reads or writes what a kernel before it
// writes or reads. On Hopper, with dev->early, its blocks start while the kernel before still runs ("programmatic
// dependent launch"): the launch costs no time of its own, and loads that need not wait are under way. The kernel
// before must not write what is loaded so; neither may an earlier one, unless a kernel that was launched otherwise
// comes after that one. cluster: blocks of a cluster, side by side in the grid's x; 1 before Hopper. shared: bytes of
// dynamic shared memory, at most 48 KiB with the kernel's static ones.
template <typename... Parameters, typename... Arguments>
void launch_early(const Device* dev, void (*kernel)(Parameters...), dim3 grid, int block, int cluster, int shared,
                  Arguments... arguments) {
    cudaLaunchAttribute attributes[2] = {};
    unsigned count = 0;
    if (dev->early && dev->compute >= 90) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count++].val.clusterDim = {(unsigned)cluster, 1, 1};
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = dim3(block), config.stream = dev->stream;
    config.dynamicSmemBytes = (size_t)shared, config.attrs = attributes, config.numAttrs = count;
    check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

// Launches a kernel with so many bytes of dynamic shared memory, and shows launch errors (bad grid, no kernel image).
template <typename... Parameters, typename... Arguments>
void launch_on(cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid, dim3 block, int shared,
               const Arguments&... arguments) {
    if (shared > 0) check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    kernel<<<grid, block, shared, stream>>>(arguments...);
    check_launch();
}

template <typename Kernel, typename... Arguments>
void launch_kernel(const Device* dev, Kernel* kernel, dim3 grid, dim3 block, int shared,
                   const Arguments&... arguments) {
    launch_on(dev->stream, kernel, grid, block, shared, arguments...);
}

// The next kernel may start, if it was launched by launch_early.
__device__ inline void early_begin() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Returns when the kernels before have ended and their writes can be read.
__device__ inline void early_wait() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}
#endif

constexpr int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// Element types.

template <typename T>
__host__ __device__ inline float to_float(T value) {
    if constexpr (std::is_same_v<T, float>) {
        return value;
    } else {
        return __bfloat162float(value);
    }
}

// Round to nearest even.
template <typename T>
__host__ __device__ inline T from_float(float value) {
    if constexpr (std::is_same_v<T, float>) {
        return value;
    } else {
        return __float2bfloat16(value);
    }
}

// 16 bytes of T: one load or store instruction.
template <typename T>
struct alignas(16) Vec {
    static constexpr int size = 16 / sizeof(T);
    T lane[size];
};

#ifdef __CUDACC__
template <typename T>
__device__ inline Vec<T> load_vec(const T* address) {
    Vec<T> vec;
    *reinterpret_cast<int4*>(&vec) = *reinterpret_cast<const int4*>(address);
    return vec;
}

template <typename T>
__device__ inline void store_vec(T* address, Vec<T> vec) {
    *reinterpret_cast<int4*>(address) = *reinterpret_cast<int4*>(&vec);
}

// from_float of a vector, for bf16 two values an instruction.
template <typename T>
__device__ inline Vec<T> round_vec(const float (&value)[Vec<T>::size]) {
    Vec<T> vec;
    if constexpr (std::is_same_v<T, float>) {
        for (int j = 0; j < Vec<T>::size; j++) vec.lane[j] = value[j];
    } else {
        __nv_bfloat162* pair = reinterpret_cast<__nv_bfloat162*>(&vec);
        for (int j = 0; j < Vec<T>::size / 2; j++) pair[j] = __floats2bfloat162_rn(value[2 * j], value[2 * j + 1]);
    }
    return vec;
}

// Two values rounded to a pair of bf16 in a word, the first in its low half.
__device__ inline uint32_t pack_bf16(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
}

// Such a pair as floats: a shift and a mask.
__device__ inline float2 pair_floats(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// to_float of a vector. It unpacks whole words: if lanes are taken one by one, nvcc first moves most of them to
// registers of their own, and keeps them there if the vector was loaded under a condition.
template <typename T>
__device__ inline void vec_floats(float* value, Vec<T> vec) {
    const uint4 words = *reinterpret_cast<const uint4*>(&vec);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if constexpr (std::is_same_v<T, float>) {
            value[j] = __uint_as_float(word[j]);
        } else {
            float2 floats = pair_floats(word[j]);
            value[2 * j] = floats.x, value[2 * j + 1] = floats.y;
        }
    }
}

// One instruction each, with an error of up to 2 fp32 units in the last place. A result that is then rounded to bf16 is
// the nearest one, unless it lies within these 2 units of the middle between two.
constexpr float LOG2_OF_E = 1.44269504088896341f;

// 2^x, or 0 if that is below 2^-126.
__device__ inline float fast_exp2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// 1 / x; 0 for infinity.
__device__ inline float fast_reciprocal(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Reductions. The order of the sums is fixed by the launch shape, so equal inputs give equal bits.

__device__ inline float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

__device__ inline float warp_max(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
}

// Reduces over the block, the same value returned in every thread; `none` changes nothing. blockDim.x a multiple of 32,
// at most 1024; every thread takes part. Uses its own shared memory; safe to call again at once.
template <float (*WARP)(float)>
__device__ inline float block_reduce(float value, float none) {
    __shared__ float partial[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    value = WARP(value);
    __syncthreads();  // the last call's reads are done
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    return WARP(lane < warps ? partial[lane] : none);
}

__device__ inline float block_sum(float value) {
    return block_reduce<warp_sum>(value, 0.0f);
}

__device__ inline float block_max(float value) {
    return block_reduce<warp_max>(value, -INFINITY);
}
#endif
