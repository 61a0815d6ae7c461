// The clip factors of a part of the model (a layer, the embeddings, the last layernorm) from its own gradients, for
// updates inside the backward pass, where the norm of all gradients is not known yet.
//
//     square_t = sum of g^2 over tensor t            norm_t = sqrt(square_t)        part = sqrt(sum of square_t)
//     by tensor:  factor_t = clip / norm_t where norm_t > clip, otherwise 1
//     by last:    factor = min(1, clip / last, clip / part), where `last` is the norm of all gradients one step ago (0:
//                 none), so that both the usual scale and a sudden outlier are clipped
//     clip 0:     1
//
// Every factor is NaN, which makes the optimizer leave the part alone, if the loss or the part's norm is not finite.
//
// G is float or bf16; a tensor begins at 16 bytes. Bytes: reads the gradients once, at the speed of a copy for large
// tensors. Sums are made of fixed pieces in a fixed order, so they do not depend on where the gradients lie.
#pragma once
#include "global_norm.cuh"

enum ClipBy { CLIP_STEP, CLIP_LAST, CLIP_TENSOR };

// Returns the value that --clip-by calls `name`.
inline ClipBy clip_by_from(const char* name) {
    return strcmp(name, "tensor") == 0 ? CLIP_TENSOR : strcmp(name, "last") == 0 ? CLIP_LAST : CLIP_STEP;
}

constexpr int PART_TENSORS = 12;      // of a part, at most
constexpr int PART_NORM_BLOCKS = 32;  // pieces of a tensor on a GPU

// The gradients of a part's tensors; passed to kernels by value.
struct PartGrads {
    const void* grads[PART_TENSORS];
    int64_t n[PART_TENSORS];
    int count;
};

// The kind of clipping, and the memory that is read and written, all of it on the device.
struct PartClip {
    ClipBy by;
    float clip;
    const float* loss;  // scalar
    const float* last;  // scalar
    double* square;     // scalar: the part's square, NaN if the part is left alone
    float* factor;      // (PART_TENSORS)
};

// square: (count) of the tensors.
__host__ __device__ inline void part_norm_result(const PartClip& c, const double* square, int count) {
    double sum = 0.0;
    for (int t = 0; t < count; t++) sum += square[t];
    const bool finite = isfinite((float)sqrt(sum)) && isfinite(*c.loss);
    *c.square = finite ? sum : NAN;
    for (int t = 0; t < count; t++) {
        double length = sqrt(c.by == CLIP_TENSOR ? square[t] : sum);
        if (c.by == CLIP_LAST && (double)*c.last > length) length = (double)*c.last;
        c.factor[t] = !finite ? NAN : c.clip > 0.0f && length > c.clip ? (float)(c.clip / length) : 1.0f;
    }
}

// The end of a step: scalars[1], the norm of all parts that were stepped, and scalars[2], 1 or, if nothing changed,
// NaN, as global_norm leaves them; *left_alone, the number of parts that were not stepped; and *last for the next step.
// scalars[0] is the loss; square: (parts).
__host__ __device__ inline void part_norm_end(float* scalars, float* left_alone, float* last, const double* square,
                                              int parts) {
    double sum = 0.0;
    int stepped = 0;
    for (int p = 0; p < parts; p++) {
        if (!isfinite(square[p])) continue;
        sum += square[p];
        stepped++;
    }
    scalars[1] = stepped ? (float)sqrt(sum) : NAN;
    scalars[2] = stepped ? 1.0f : NAN;
    *left_alone = (float)(parts - stepped);
    if (stepped) *last = scalars[1];
}

// scratch: GLOBAL_NORM_CPU_PARTS doubles.
inline void part_norm_cpu(const PartClip& c, const PartGrads& part, double* scratch) {
    double square[PART_TENSORS];
    for (int t = 0; t < part.count; t++) square[t] = squares_cpu(scratch, (const float*)part.grads[t], part.n[t]);
    part_norm_result(c, square, part.count);
}

#ifdef __CUDACC__
// Grid (PART_NORM_BLOCKS, tensors), block GLOBAL_NORM_THREADS, any n. Deterministic. pieces: (tensors,
// PART_NORM_BLOCKS)
template <typename G>
__global__ void __launch_bounds__(GLOBAL_NORM_THREADS) part_norm_kernel(double* pieces, PartGrads part) {
    const double total = squares_of_block((const G*)part.grads[blockIdx.y], part.n[blockIdx.y]);
    if (threadIdx.x == 0) pieces[blockIdx.y * PART_NORM_BLOCKS + blockIdx.x] = total;
}

// Grid 1, block 32. Deterministic.
__global__ static void part_norm_finish_kernel(PartClip c, const double* pieces, int count) {
    __shared__ double square[PART_TENSORS];
    if (threadIdx.x < count) {
        double sum = 0.0;
        for (int i = 0; i < PART_NORM_BLOCKS; i++) sum += pieces[threadIdx.x * PART_NORM_BLOCKS + i];
        square[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) part_norm_result(c, square, count);
}

// The squares of tiles by tensor: those of tensor t are parts[first[t]] to parts[first[t + 1]]. Grid 1, block
// GLOBAL_NORM_THREADS. Deterministic.
struct PartTiles {
    int64_t first[PART_TENSORS + 1];
};
__global__ static void __launch_bounds__(GLOBAL_NORM_THREADS)
    part_norm_tiles_kernel(PartClip c, const double* parts, PartTiles tiles, int count) {
    double square[PART_TENSORS];
    for (int t = 0; t < count; t++) {
        double sum = 0.0;
        for (int64_t i = tiles.first[t] + threadIdx.x; i < tiles.first[t + 1]; i += GLOBAL_NORM_THREADS)
            sum += parts[i];
        square[t] = global_norm_block_sum(sum);
        __syncthreads();
    }
    if (threadIdx.x == 0) part_norm_result(c, square, count);
}

// Grid 1, block 1.
__global__ static void part_norm_end_kernel(float* scalars, float* left_alone, float* last, const double* square,
                                            int parts) {
    part_norm_end(scalars, left_alone, last, square, parts);
}
#endif

inline int64_t part_norm_scratch_bytes(const Device* dev) {
    return (dev->gpu ? PART_TENSORS * PART_NORM_BLOCKS : GLOBAL_NORM_CPU_PARTS) * (int64_t)sizeof(double);
}

// scratch: part_norm_scratch_bytes of device memory, 8-byte aligned.
template <typename G>
void part_norm(const Device* dev, const PartClip& clip, const PartGrads& part, void* scratch) {
    assert(part.count <= PART_TENSORS);
    if (!dev->gpu) {
        assert(sizeof(G) == sizeof(float));
        part_norm_cpu(clip, part, (double*)scratch);
        return;
    }
#ifdef __CUDACC__
    double* pieces = (double*)scratch;
    part_norm_kernel<G>
        <<<dim3(PART_NORM_BLOCKS, (unsigned)part.count), GLOBAL_NORM_THREADS, 0, dev->stream>>>(pieces, part);
    check_launch();
    part_norm_finish_kernel<<<1, 32, 0, dev->stream>>>(clip, pieces, part.count);
    check_launch();
#endif
}

// The factors of a part from the squares of its tiles, where these are known; first: (count + 1), see above.
inline void part_norm_of_tiles(const Device* dev, const PartClip& clip, int count, const double* parts,
                               const int64_t* first) {
    assert(count <= PART_TENSORS);
#ifdef __CUDACC__
    if (dev->gpu) {
        PartTiles tiles = {};
        for (int t = 0; t <= count; t++) tiles.first[t] = first[t];
        part_norm_tiles_kernel<<<1, GLOBAL_NORM_THREADS, 0, dev->stream>>>(clip, parts, tiles, count);
        check_launch();
        return;
    }
#endif
    double square[PART_TENSORS] = {};
    for (int t = 0; t < count; t++) {
        for (int64_t i = first[t]; i < first[t + 1]; i++) square[t] += parts[i];
    }
    part_norm_result(clip, square, count);
}

inline void part_norm_finish(const Device* dev, float* scalars, float* left_alone, float* last, const double* square,
                             int parts) {
#ifdef __CUDACC__
    if (dev->gpu) {
        part_norm_end_kernel<<<1, 1, 0, dev->stream>>>(scalars, left_alone, last, square, parts);
        check_launch();
        return;
    }
#endif
    part_norm_end(scalars, left_alone, last, square, parts);
}
