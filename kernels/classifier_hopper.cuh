// The classifier of long bf16 rows on Hopper: a part of classifier.cuh.
//
// Long bf16 rows (GPT-2's 50304 columns are 98 KB) on Hopper stay in shared memory between the two passes, two blocks a
// multiprocessor so that one computes while the other waits. Rows are cut into chunks; a warp of its own has TMA write
// a chunk back as soon as its gradient is there, and then bring that chunk of the block's next row.
//
// At an H200's copy rate a multiprocessor must process 8 logits per nanosecond. At 1 GHz that leaves 16 instructions
// per logit, or 2 exponentials (MUFU, 16 per cycle); in a training step the card is at its power limit and runs at 1.4
// GHz. Hence one exponential per logit: the first pass stores it in the logit's place as fp16, scaled so that the
// largest one that the warp has seen is near 2^15, and the second pass multiplies. An exponential then has 11 bits, 3
// more than the gradient, down to 2^-29 of the largest, and is 0 below 2^-40 of it. In all, 10 instructions per logit.
#pragma once
#include "classifier_parts.cuh"
#include "hopper.cuh"

// Rows in shared memory: 18 warps that compute (11 vectors a thread of GPT-2's rows, with little left over) and one
// that orders, chunks of 3 vectors a thread.
constexpr int CLASSIFIER_RESIDENT_THREADS = 576, CLASSIFIER_VECS = 3;
constexpr int CLASSIFIER_CHUNK = CLASSIFIER_VECS * CLASSIFIER_RESIDENT_THREADS * 8;
constexpr int CLASSIFIER_CHUNKS = 8;  // at most: each has two barriers

// Bytes of a block's row and barriers in shared memory.
constexpr int classifier_resident_bytes(int Vp) {
    return Vp * (int)sizeof(bf16) + CLASSIFIER_CHUNKS * 2 * 8;
}

// A maximum of logits, and a sum of 2^(x log2(e) - classifier_offset(maximum)).
struct ClassifierSum {
    float maximum, sum;
};

// Below every logit, so that a difference of two maxima is never one of infinities.
constexpr float CLASSIFIER_LOWEST = -1e30f;

// A whole number, so that exponentials by another one differ by a power of two, less what makes the largest of them
// 2^15 to within a factor of 1.42: the most that fp16 holds.
__device__ inline float classifier_offset(float maximum) {
    return rintf(maximum * LOG2_OF_E) - 15.0f;
}

// The pair of logits v and v + 1, -inf from V on.
__device__ inline uint32_t classifier_mask(uint32_t pair, int v, int V) {
    return v + 1 < V ? pair : v < V ? (pair & 0xffffu) | 0xff800000u : 0xff80ff80u;
}

// The largest bf16 of the warp's pairs, at least CLASSIFIER_LOWEST; NaN is ignored. Floats order like integers once the
// negative ones have all bits but the sign flipped.
__device__ inline float classifier_warp_max(__nv_bfloat162 pair) {
    float2 value = pair_floats(*(uint32_t*)&pair);
    int bits = __float_as_int(fmaxf(fmaxf(value.x, value.y), CLASSIFIER_LOWEST));
    bits = __reduce_max_sync(0xffffffffu, bits ^ (bits >> 31 & 0x7fffffff));
    return __int_as_float(bits ^ (bits >> 31 & 0x7fffffff));
}

// The thread's vectors of a chunk, v < V, are added to `own`, whose maximum is the warp's, and their exponentials take
// their place as fp16. `whole`: the chunk ends before V.
template <bool whole>
__device__ inline void classifier_take(ClassifierSum* own, bf16* row, int begin, int V) {
    uint4 x[CLASSIFIER_VECS];
    __nv_bfloat162 most = __float2bfloat162_rn(-INFINITY);
#pragma unroll
    for (int i = 0; i < CLASSIFIER_VECS; i++) {
        int v = begin + (i * CLASSIFIER_RESIDENT_THREADS + threadIdx.x) * 8;
        if (!whole && v >= V) continue;
        x[i] = *(uint4*)(row + v);
        uint32_t* pair = &x[i].x;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (!whole && v + 8 > V) pair[j] = classifier_mask(pair[j], v + 2 * j, V);
            most = __hmax2(most, *(__nv_bfloat162*)&pair[j]);
        }
    }
    float top = classifier_warp_max(most);
    if (top > own->maximum) {
        own->sum *= fast_exp2(classifier_offset(own->maximum) - classifier_offset(top));
        own->maximum = top;
    }
    float offset = classifier_offset(own->maximum), sum[2] = {};
#pragma unroll
    for (int i = 0; i < CLASSIFIER_VECS; i++) {
        int v = begin + (i * CLASSIFIER_RESIDENT_THREADS + threadIdx.x) * 8;
        if (!whole && v >= V) continue;
        uint32_t* pair = &x[i].x;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float2 value = pair_floats(pair[j]);
            value.x = fast_exp2(fmaf(value.x, LOG2_OF_E, -offset));
            value.y = fast_exp2(fmaf(value.y, LOG2_OF_E, -offset));
            sum[0] += value.x, sum[1] += value.y;
            *(__half2*)&pair[j] = __floats2half2_rn(value.x, value.y);
        }
        *(uint4*)(row + v) = x[i];
    }
    own->sum += sum[0] + sum[1];
}

// The gradient of the thread's vectors of a chunk, from their exponentials, in place, or to the codes of the row that
// begins at `at`, in units of `unit`; 0 in the padding. The target's is given: next to 1, a probability kept with 11
// bits would leave nothing of the difference.
template <bool whole>
__device__ inline void classifier_give(bf16* row, int begin, int end, int V, float scale, int target,
                                       float target_gradient, const Fp8Codes& codes, int64_t at, float unit,
                                       uint32_t noise) {
#pragma unroll
    for (int i = 0; i < CLASSIFIER_VECS; i++) {
        int v = begin + (i * CLASSIFIER_RESIDENT_THREADS + threadIdx.x) * 8;
        if (!whole && v >= end) continue;
        uint4 kept = *(uint4*)(row + v);
        float d[8];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float2 value = __half22float2(((__half2*)&kept)[j]);
            d[2 * j] = value.x * scale, d[2 * j + 1] = value.y * scale;
        }
        if ((unsigned)(target - v) < 8 || (!whole && v + 8 > V)) {
#pragma unroll
            for (int j = 0; j < 8; j++) d[j] = v + j >= V ? 0.0f : v + j == target ? target_gradient : d[j];
        }
        classifier_put(row + v, codes, at, v, d, unit, noise);
    }
}

// The same in every computing thread; `own.maximum` is the warp's, `parts` has a place a warp.
__device__ inline ClassifierSum classifier_block_sum(ClassifierSum own, ClassifierSum parts[32]) {
    int lane = threadIdx.x % 32;
    own.sum = warp_sum(own.sum);
    if (lane == 0) parts[threadIdx.x / 32] = own;
    group_sync(1, CLASSIFIER_RESIDENT_THREADS);
    ClassifierSum part = {CLASSIFIER_LOWEST, 0.0f};
    if (lane < CLASSIFIER_RESIDENT_THREADS / 32) part = parts[lane];
    float maximum = warp_max(part.maximum);
    return {maximum, warp_sum(part.sum * fast_exp2(classifier_offset(part.maximum) - classifier_offset(maximum)))};
}

// Returns a row's loss from its maximum and sum.
__device__ inline float classifier_loss(ClassifierSum row, float target_logit) {
    // log2 of the maximum's exponential, rounded as in classifier_take: where that is nearly all of the sum, it
    // cancels.
    float largest = fmaf(row.maximum, LOG2_OF_E, -classifier_offset(row.maximum)) - 15.0f;
    return logf(row.sum / 32768.0f) - largest * 0.693147180559945309f - (target_logit - row.maximum);
}

// The thread that orders: brings the block's first row, then writes each chunk back when it is computed (`backward`)
// and brings that chunk of the next row. A chunk has a barrier for its bytes and one for those who have computed it.
__device__ inline void classifier_order(bf16* slot, uint32_t barriers, uint32_t done, bf16* logits, bool backward,
                                        int64_t N, int Vp) {
    int chunks = (Vp + CLASSIFIER_CHUNK - 1) / CLASSIFIER_CHUNK;
    uint32_t parity = 0;
    auto bytes = [&](int q) {
        return (int)sizeof(bf16) * (q + 1 < chunks ? CLASSIFIER_CHUNK : Vp - q * CLASSIFIER_CHUNK);
    };
    auto bring = [&](int q, int64_t i) {
        barrier_expect(barriers + q * 8, bytes(q));
        bulk_load(shared_offset(slot + q * CLASSIFIER_CHUNK), logits + i * Vp + q * CLASSIFIER_CHUNK, bytes(q),
                  barriers + q * 8);
    };
    for (int q = 0; q < chunks; q++) bring(q, blockIdx.x);
    for (int64_t i = blockIdx.x; i < N; i += gridDim.x, parity ^= 1) {
        for (int q = 0; q < chunks; q++) {
            barrier_wait(done + q * 8, parity);
            if (backward) {
                bulk_store(logits + i * Vp + q * CLASSIFIER_CHUNK, shared_offset(slot + q * CLASSIFIER_CHUNK),
                           bytes(q));
                store_commit();
                store_wait_read<0>();
            }
            if (i + gridDim.x < N) bring(q, i + gridDim.x);
        }
    }
    store_wait_read<0>();
}

// Grid any up to N (rows are dealt to the blocks), block CLASSIFIER_RESIDENT_THREADS + 32, shared memory
// classifier_resident_bytes(Vp); Vp a multiple of 8, at most CLASSIFIER_CHUNKS chunks; sm_90; when backward, logits in
// place or to codes, which threads write themselves. Deterministic.
__global__ static void __launch_bounds__(CLASSIFIER_RESIDENT_THREADS + 32, 2)
    classifier_resident_kernel(float* losses, bf16* logits, const int* targets, float dloss, bool backward, int64_t N,
                               int V, int Vp, Fp8Codes codes) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char classifier_shared[];
    __shared__ ClassifierSum parts[32];
    bf16* row = (bf16*)classifier_shared;
    uint32_t barriers = shared_offset(classifier_shared + Vp * sizeof(bf16)), done = barriers + CLASSIFIER_CHUNKS * 8;
    uint32_t parity = 0;
    int chunks = (Vp + CLASSIFIER_CHUNK - 1) / CLASSIFIER_CHUNK;
    if (threadIdx.x == 0) {
        for (int q = 0; q < chunks; q++) {
            barrier_init(barriers + q * 8, 1);
            barrier_init(done + q * 8, CLASSIFIER_RESIDENT_THREADS);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x >= CLASSIFIER_RESIDENT_THREADS) {
        if (threadIdx.x == CLASSIFIER_RESIDENT_THREADS)
            classifier_order(row, barriers, done, logits, backward && !codes.rows, N, Vp);
        return;
    }
    int target = targets[blockIdx.x], lane = threadIdx.x % 32;
    const float unit = codes.rows ? *codes.scale : 1.0f;
    for (int64_t i = blockIdx.x; i < N; i += gridDim.x, parity ^= 1) {
        int next_target = i + gridDim.x < N ? targets[i + gridDim.x] : 0;
        float target_logit = to_float(logits[i * Vp + target]);  // shared memory will be overwritten
        ClassifierSum own = {CLASSIFIER_LOWEST, 0.0f};
        float offset = 0.0f;  // of the warp's exponentials of chunk `lane`
        for (int q = 0; q < chunks; q++) {
            barrier_wait(barriers + q * 8, parity);
            if ((q + 1) * CLASSIFIER_CHUNK <= V) {
                classifier_take<true>(&own, row, q * CLASSIFIER_CHUNK, V);
            } else {
                classifier_take<false>(&own, row, q * CLASSIFIER_CHUNK, V);
            }
            if (lane == q) offset = classifier_offset(own.maximum);
        }
        own = classifier_block_sum(own, parts);
        if (threadIdx.x == 0) losses[i] = classifier_loss(own, target_logit);
        const uint32_t noise = classifier_noise(own.maximum, own.sum);
        float scale = dloss / own.sum, row_offset = classifier_offset(own.maximum);
        float target_gradient = fast_exp2(fmaf(target_logit, LOG2_OF_E, -row_offset)) * scale - dloss;
        for (int q = 0; q < chunks; q++) {
            int begin = q * CLASSIFIER_CHUNK, end = q + 1 < chunks ? begin + CLASSIFIER_CHUNK : Vp;
            float chunk_scale = scale * fast_exp2(__shfl_sync(0xffffffffu, offset, q) - row_offset);
            if (backward && begin + CLASSIFIER_CHUNK <= V) {
                classifier_give<true>(row, begin, end, V, chunk_scale, target, target_gradient, codes, i * Vp, unit,
                                      noise);
            } else if (backward) {
                classifier_give<false>(row, begin, end, V, chunk_scale, target, target_gradient, codes, i * Vp, unit,
                                       noise);
            }
            fence_async();
            barrier_arrive(done + q * 8);
        }
        target = next_target;
    }
#else
    (void)losses, (void)logits, (void)targets, (void)dloss, (void)backward, (void)N, (void)V, (void)Vp, (void)codes;
#endif
}

// True if a row of Vp fits and the code was built for this GPU. Built from PTX for an older one, the kernel is empty
// and has no shared memory.
inline bool classifier_resident_fits(const Device* dev, int Vp) {
    if (dev->compute < 90 || Vp < 16384 || Vp > CLASSIFIER_CHUNKS * CLASSIFIER_CHUNK) return false;
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, classifier_resident_kernel));
    return attributes.sharedSizeBytes > 0 && classifier_resident_bytes(Vp) + 1024 <= dev->shared_memory;
}
