// A case asks the GPUs these questions before it says that it needs more than they have.
#pragma once
#include "../../kernels/common.cuh"
#include "apart.h"

// True if the first `most` GPUs can write to each other's memory, and ranks can tell that they are on one machine: what
// kernels/ranks/peer.cuh needs.
inline bool gpus_reach_each_other(int most) {
    int gpus = 0, can = 1;
    if (access("/proc/sys/kernel/random/boot_id", R_OK) != 0 || cudaGetDeviceCount(&gpus) != cudaSuccess) return false;
    if (gpus > most) gpus = most;
    for (int i = 0; i < gpus * gpus; i++) {
        if (i / gpus == i % gpus) continue;
        if (cudaDeviceCanAccessPeer(&can, i / gpus, i % gpus) != cudaSuccess || !can) return false;
    }
    return true;
}

// Does the same for a case that forks ranks. Where a process has called CUDA, those that it forks cannot; so another
// process asks.
inline bool gpus_reach_each_other_asked_apart(int most) {
    return run_apart([most] { _exit(gpus_reach_each_other(most) ? 0 : 1); }).code == 0;
}
