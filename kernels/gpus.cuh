// This file counts GPUs, says why there is none, makes one for plans, and describes it for the banner; and it says how
// the CPU's threads wait.
#pragma once
#include <signal.h>
#include <unistd.h>

#include "../data/signals.h"
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

constexpr int64_t ASSUMED_CONTEXT_BYTES = 512 << 20;  // of the driver, on a card that is not here

// Makes a GPU with `memory` bytes for plans on a machine without one. Its multiprocessors and shared memory, which
// determine the sizes of some scratch buffers, are those of an H100 or H200.
inline void device_imagine(Device* dev, int64_t memory) {
    memset(dev, 0, sizeof(*dev));
    dev->gpu = dev->imagined = true;
    snprintf(dev->name, sizeof(dev->name), "a GPU of %.4g GiB", (double)memory / (1ll << 30));
    dev->sm_count = 132, dev->compute = 90, dev->memory = memory, dev->shared_memory = 227 << 10;
    dev->context = ASSUMED_CONTEXT_BYTES;
}

// Returns the dense peak of the device in FLOP/s by its vendor's figures; 0: unknown, and MFU is shown as "-".
inline double device_peak(const Device* dev, bool fp32) {
    struct Peak {
        const char* name;
        double bf16, fp32;  // TFLOP/s
    };
    static const Peak peaks[] = {{"H200", 989, 67},   {"H100 PCIe", 756, 51},  {"H100 NVL", 835, 60},
                                 {"H100", 989, 67},   {"A100", 312, 19.5},     {"B200", 2250, 75},
                                 {"L40S", 362, 91.6}, {"RTX 4090", 165, 82.6}, {"RTX 3090", 71, 35.6}};
    for (const Peak& peak : peaks) {
        if (dev->gpu && strstr(dev->name, peak.name)) return 1e12 * (fp32 ? peak.fp32 : peak.bf16);
    }
    return 0;
}

// Describes the device in one line, for the banner.
inline const char* device_describe(const Device* dev, bool fp32) {
    if (!dev->gpu) return text_kept("CPU, %ld cores: the plain C versions, fp32", sysconf(_SC_NPROCESSORS_ONLN));
    if (dev->imagined) return text_kept("%s, which need not be here: this is a plan", dev->name);
    int driver = 0, runtime = 0;
    check(cudaDriverGetVersion(&driver));
    check(cudaRuntimeGetVersion(&runtime));
    const double peak = device_peak(dev, fp32);
    const char* known = peak > 0 ? text_kept("  peak %.0f TFLOP/s %s", peak * 1e-12, fp32 ? "fp32" : "bf16") : "";
    return text_kept("%s  sm_%d  %d multiprocessors  driver's cuda %d.%d, built with %d.%d%s", dev->name, dev->compute,
                     dev->sm_count, driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10, known);
}

// Restarts the program with OMP_WAIT_POLICY=passive, unless the user has set how OpenMP's threads wait. By default they
// spin; if another program uses a core, each short loop of the plain C versions then waits for a time slice: a step of
// the default run on two cores with other work took 473 ms spinning and 33 ms sleeping. libgomp reads the variable
// before main, so it cannot be set later. Call it first in main.
inline void openmp_wait_asleep(char** argv) {
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return;
    setenv("OMP_WAIT_POLICY", "passive", 1);
    sigset_t handled, before;
    signals_handled(&handled);
    sigprocmask(SIG_BLOCK, &handled, &before);  // they wait for the new program's signals_catch
    execv("/proc/self/exe", argv);              // on failure: go on, only slower
    sigprocmask(SIG_SETMASK, &before, nullptr);
}
