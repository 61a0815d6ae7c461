// Counts the GPUs that answer, and says why none does.
#pragma once
#include "common.cuh"

// Counts the GPUs that this process may use. If CUDA_VISIBLE_DEVICES hides all of them, it does not start the driver,
// which takes seconds.
inline cudaError_t count_gpus(int* gpus) {
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    *gpus = 0;
    if (visible && visible[0] == 0) return cudaSuccess;
    const cudaError_t status = cudaGetDeviceCount(gpus);
    if (status != cudaSuccess) *gpus = 0;
    return status;
}

// Returns why there is no GPU; `driver` is the CUDA version of the driver, such as 12020 for 12.2, or 0: there is none.
inline const char* no_gpu_reason(cudaError_t status, int driver) {
    if (status == cudaSuccess) return "none is there";
#ifdef __CUDACC__
    if (status != cudaErrorInsufficientDriver || driver == 0) return cudaGetErrorString(status);
    constexpr int major = CUDART_VERSION / 1000, minor = CUDART_VERSION % 1000 / 10;
    return text_kept("%s: the driver has CUDA %d.%d and this program %d.%d; install NVIDIA's driver %s or later",
                     cudaGetErrorString(status), driver / 1000, driver % 1000 / 10, major, minor,
                     major >= 13 ? "580" : "525");
#else
    (void)driver;
    return cudaGetErrorString(status);
#endif
}

inline int driver_version() {
    int version = 0;
#ifdef __CUDACC__
    if (cudaDriverGetVersion(&version) != cudaSuccess) version = 0;
#endif
    return version;
}
