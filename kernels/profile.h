// --profile: named ranges for NVIDIA's profilers (NVTX). Each step is a range that contains one range after another for
// the work that the host queues, with the names of `make bench`'s rows; nsys shows the kernels of each. The run ends
// after PROFILE_STEPS such steps. NVTX is a header of the CUDA toolkit; without it --profile makes no ranges. A range
// costs nothing unless a profiler is attached.
#pragma once
#include "common.cuh"
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define PROFILE_RANGES 1
#else
#define PROFILE_RANGES 0
#endif
#ifdef __CUDACC__
#include <cuda_profiler_api.h>
#endif

constexpr int PROFILE_AFTER = 2;  // steps before the first that is recorded: algorithms are chosen, kernels loaded
constexpr int PROFILE_STEPS = 3;

inline void profile_begin([[maybe_unused]] const char* name) {
#if PROFILE_RANGES
    nvtxRangePushA(name);
#endif
}

inline void profile_end() {
#if PROFILE_RANGES
    nvtxRangePop();
#endif
}

// Names the work that is queued until the next call. Returns `dev`, so that the call can be an argument of the operator
// that it names.
inline const Device* named(const Device* dev, const char* name) {
    if (dev->profile) profile_end(), profile_begin(name);
    return dev;
}

// Switches the recording of profilers that wait for it on or off (nsys --capture-range=cudaProfilerApi, ncu
// --profile-from-start off).
inline void profile_record(Device* dev, bool on) {
    dev->profile = on;
#ifdef __CUDACC__
    if (dev->gpu) check(on ? cudaProfilerStart() : cudaProfilerStop());
#endif
}

// The trainer calls this before each step of a run with --profile, after `done` steps. It ends the last step's range
// and begins the next. It returns false when the run must end.
inline bool profile_step(Device* dev, int64_t done) {
    if (dev->profile) profile_end(), profile_end();
    if (done == PROFILE_AFTER) profile_record(dev, true);
    if (done == PROFILE_AFTER + PROFILE_STEPS) profile_record(dev, false);
    if (dev->profile) profile_begin("step"), profile_begin("data");
    return done < PROFILE_AFTER + PROFILE_STEPS;
}
