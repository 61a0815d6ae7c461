// Instructions of sm_80 and later that C++ has no name for: asynchronous copies to shared memory and to the L2 cache,
// matrices from shared memory to registers, and the matrix product of a warp. Shared memory is addressed by its 32-bit
// address; "memory" keeps the compiler from moving loads of shared memory across the waits.
#pragma once
#include "common.cuh"

#ifdef __CUDACC__
// Asynchronous copies of 16 bytes from global to shared memory. After copy_async_wait a thread sees the data of its own
// copies; after a barrier, also that of other threads.

__device__ inline void copy_async(void* shared, const void* global) {
    unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

// Copies 16 bytes to shared memory, or zeros when not `valid`.
__device__ inline void copy_16_async(uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

// Ends a group of copies; groups complete in order.
__device__ inline void copy_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the last `pending` groups are in flight.
template <int pending>
__device__ inline void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Asks for the cache line of a global address to be brought to the L2 cache.
__device__ inline void prefetch_l2(const void* global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// Four 8 x 8 matrices of 16-bit values from shared memory to registers: thread l gives the address of row l % 8 of
// matrix l / 8 (16 bytes), register i gets the thread's part of matrix i as mma.sync wants its operands.
__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// The same with each matrix transposed.
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ inline uint32_t load_word(uint32_t address) {
    uint32_t word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}

__device__ inline void store_word(uint32_t address, uint32_t word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

// c (16 x 8, fp32) += a (16 x 16) b (16 x 8). With g = lane / 4 and t = lane % 4, c[0..1] are row g, columns 2t and
// 2t + 1, c[2..3] the same of row g + 8.
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif
