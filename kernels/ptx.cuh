// Instructions of sm_90 and later that C++ has no name for, one function each: barriers in shared memory (mbarrier),
// copies of runs of bytes by TMA (cp.async.bulk), its fence, and the register budget of a warpgroup. Titles in brackets
// name the section of NVIDIA's PTX ISA that defines an instruction. hopper.cuh and the optimizer's step
// (optim/kernel.cuh) use them; NVRTC compiles this file as a part of the optimizer's source, so it includes nothing
// that NVRTC lacks. Shared memory is addressed by its 32-bit address.
#pragma once

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef short int16_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;
#else
#include <stdint.h>
#endif

// optim/jit.cu defines EMBED_SOURCE to put the text of each file that says it into the binary, for NVRTC; elsewhere it
// is empty.
#ifndef EMBED_SOURCE
#define EMBED_SOURCE
#endif
EMBED_SOURCE

#ifdef __CUDACC__
__device__ __forceinline__ uint32_t shared_offset(const void* pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

// True in one thread of a warp. The compiler knows that a thread chosen like this runs alone. Otherwise it puts each
// TMA instruction, which reads addresses from registers of the warp, into a loop over the warp's threads.
__device__ __forceinline__ bool is_elected() {
    uint32_t elected;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
    return elected != 0;
}

// Barriers in shared memory, 8 bytes each [Parallel Synchronization: mbarrier]. A phase ends when `arrivals` threads
// have arrived and all announced bytes have been copied; then the next phase begins. A wait names the phase by its
// parity. The first phase has parity 0, so a wait for parity 1 on a fresh barrier passes at once.
//
// After threads have read or written shared memory by ordinary instructions, each of them arrives. One arrival per warp
// after __syncwarp, or barrier.arrive, would be enough, but compute-sanitizer's racecheck (2025.3) does not follow
// these. It does not see copies of tensors at all.

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces bytes that TMA will write in this phase.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// True if the phase has ended; false if it has not ended within a time that the hardware chooses.
__device__ __forceinline__ bool barrier_passed(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// Orders this thread's earlier accesses to shared memory before later ones by TMA and wgmma; a barrier must follow
// [Memory Consistency Model: Proxies; membar/fence].
__device__ __forceinline__ void fence_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// TMA copies a run of bytes; addresses and size are multiples of 16 [Data Movement: cp.async.bulk]. One thread starts
// the copy. A barrier counts the bytes of a load; stores are counted in groups.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, uint32_t from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

// Ends the group of this thread's stores so far.
__device__ __forceinline__ void store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all groups but the newest N have read shared memory.
template <int N>
__device__ __forceinline__ void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Waits until all groups but the newest N have written memory.
template <int N>
__device__ __forceinline__ void store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// Sets the registers of a thread from here on, a multiple of 8 from 24 to 256; all warps of a warpgroup call it. It
// waits until they are free [Miscellaneous: setmaxnreg].
template <int N>
__device__ __forceinline__ void registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
__device__ __forceinline__ void registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
#endif
