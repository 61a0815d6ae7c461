// A stand-in for CUDA's headers where there is no toolkit: the types that structs hold, bf16 on the host, and the calls
// that only a run on a GPU makes. The files' CUDA halves are in #ifdef __CUDACC__. The program first asks how many GPUs
// there are; here that fails, so none of the other calls is ever reached.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define __host__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))

enum cudaError_t { cudaSuccess, cudaErrorNoDevice = 100, cudaErrorNotSupported = 801 };
enum cublasStatus_t { CUBLAS_STATUS_SUCCESS };
enum CUresult { CUDA_SUCCESS, CUDA_ERROR_NOT_SUPPORTED = 801 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
typedef struct CUstream_st *CUstream, *cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
typedef struct CUmod_st* CUmodule;
typedef struct CUfunc_st* CUfunction;
typedef struct cublasLtContext* cublasLtHandle_t;
typedef unsigned long long CUdeviceptr;
typedef unsigned cuuint32_t;
typedef int CUfunction_attribute;

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct cudaIpcMemHandle_t {
    char reserved[64];
};
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlockOptin;
    int major, minor, multiProcessorCount;
};

constexpr int cudaStreamNonBlocking = 0, cudaEventDisableTiming = 0, cudaLimitStackSize = 0, cudaEnableDefault = 0;
constexpr int cudaMemcpyDeviceToDevice = 0, cudaMemcpyDefault = 0;
constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 0, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 0;
constexpr int cudaDevAttrCanFlushRemoteWrites = 0, cudaIpcMemLazyEnablePeerAccess = 0;
constexpr unsigned CU_STREAM_WAIT_VALUE_GEQ = 0, CU_STREAM_WAIT_VALUE_FLUSH = 1u << 30;

inline const char* cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorNotSupported ? "cudaErrorNotSupported" : "cudaErrorNoDevice";
}
inline const char* cudaGetErrorString(cudaError_t) {
    return "this ./train was built without the CUDA toolkit";
}
inline const char* cublasLtGetStatusName(cublasStatus_t) {
    return "no CUDA";
}
inline const char* cublasLtGetStatusString(cublasStatus_t) {
    return "no CUDA";
}
inline cublasStatus_t cublasLtCreate(cublasLtHandle_t*) {
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t) {
    return CUBLAS_STATUS_SUCCESS;
}

// The result is hidden from the compiler, which would otherwise warn about all that follows a call that must fail.
inline cudaError_t no_cuda() {
    int error = cudaErrorNoDevice;
    asm("" : "+r"(error));
    return (cudaError_t)error;
}

#define NO_CUDA(call)                       \
    template <class... Arguments>           \
    inline cudaError_t call(Arguments...) { \
        return no_cuda();                   \
    }
NO_CUDA(cudaDeviceCanAccessPeer)
NO_CUDA(cudaDeviceGetAttribute)
NO_CUDA(cudaDeviceGetStreamPriorityRange)
NO_CUDA(cudaDeviceSetLimit)
NO_CUDA(cudaDeviceSynchronize)
NO_CUDA(cudaDriverGetVersion)
NO_CUDA(cudaEventCreate)
NO_CUDA(cudaEventCreateWithFlags)
NO_CUDA(cudaEventDestroy)
NO_CUDA(cudaEventElapsedTime)
NO_CUDA(cudaEventRecord)
NO_CUDA(cudaEventSynchronize)
NO_CUDA(cudaFree)
NO_CUDA(cudaFreeHost)
NO_CUDA(cudaFuncSetAttribute)
NO_CUDA(cudaGetDevice)
NO_CUDA(cudaGetDeviceCount)
NO_CUDA(cudaGetDeviceProperties)
NO_CUDA(cudaGetDriverEntryPoint)
NO_CUDA(cudaGetLastError)
NO_CUDA(cudaIpcCloseMemHandle)
NO_CUDA(cudaIpcGetMemHandle)
NO_CUDA(cudaIpcOpenMemHandle)
NO_CUDA(cudaLaunchKernel)
NO_CUDA(cudaMalloc)
NO_CUDA(cudaMallocHost)
NO_CUDA(cudaMemcpyAsync)
NO_CUDA(cudaMemGetInfo)
NO_CUDA(cudaMemsetAsync)
NO_CUDA(cudaRuntimeGetVersion)
NO_CUDA(cudaSetDevice)
NO_CUDA(cudaStreamCreateWithFlags)
NO_CUDA(cudaStreamCreateWithPriority)
NO_CUDA(cudaStreamDestroy)
NO_CUDA(cudaStreamSynchronize)
NO_CUDA(cudaStreamWaitEvent)
#undef NO_CUDA

struct __nv_bfloat16 {
    uint16_t code;
};

inline float __bfloat162float(__nv_bfloat16 value) {
    uint32_t bits = (uint32_t)value.code << 16;
    float result;
    memcpy(&result, &bits, sizeof(result));
    return result;
}

// Rounds to nearest even; every NaN becomes 0x7fff, as CUDA's does.
inline __nv_bfloat16 __float2bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    if (value != value) return {0x7fff};
    return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
