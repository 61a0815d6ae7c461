// Norms of gradients, and the factors that clip them: of the whole model, or of one part of it (a layer, the
// embeddings, the last layernorm) for updates inside the backward pass, where the norm of all gradients is not known
// yet.
//
//     square_t = sum of g^2 over tile t of TILE_ELEMENTS elements, one double each
//     norm     = sqrt(sum of square_t) over the tiles of the model, of a part, or of a tensor
//     all:        factor = clip / norm where norm > clip, otherwise 1
//     by tensor:  the same with the norm of each tensor
//     by last:    factor = min(1, clip / last, clip / part), where `last` is the norm of all gradients one step ago (0:
//                 none), so that both the usual scale and a sudden outlier are clipped
//     clip 0:     1
//
// Every factor is NaN, which makes the optimizer's step change nothing, if the loss or the norm is not finite. All
// results stay on the device: the step reads the factor there, and nobody waits for it.
//
// g is float or bf16; it begins at 16 bytes, and zeros follow it up to a whole tile. Bytes: reads g once, at the speed
// of a copy. A GPU adds up each tile in fp32 and the tiles in double. All sums are made of tiles in a fixed order, so
// one GPU and several, and gradients in any place, give the same bits.
#pragma once
#include <assert.h>

#include "common.cuh"
#include "each.cuh"
#include "tile.h"

enum ClipBy { CLIP_STEP, CLIP_LAST, CLIP_TENSOR };

// Returns the value that --clip-by calls `name`.
inline ClipBy clip_by_from(const char* name) {
    return strcmp(name, "tensor") == 0 ? CLIP_TENSOR : strcmp(name, "last") == 0 ? CLIP_LAST : CLIP_STEP;
}

constexpr int PART_TENSORS = 12;  // of a part, at most
constexpr int NORM_THREADS = 512;

// The tiles of a part's tensors: the squares of tensor t are square[first[t]] and the next tiles[t] - 1.
struct PartTiles {
    int64_t first[PART_TENSORS], tiles[PART_TENSORS];
    int count;
};

// The kind of clipping of a part, and the memory that is read and written, all of it on the device.
struct PartClip {
    ClipBy by;
    float clip;
    const float* loss;      // scalar, or NULL
    const float* last;      // scalar, for CLIP_LAST
    double* square;         // scalar: the part's square, NaN if the part is left alone; or NULL
    float* factor;          // (PART_TENSORS)
    float* norm = nullptr;  // scalar, or NULL
};

// square: (count) of the tensors.
__host__ __device__ inline void part_norm_result(const PartClip& c, const double* square, int count) {
    double sum = 0.0;
    for (int t = 0; t < count; t++) sum += square[t];
    const bool finite = isfinite((float)sqrt(sum)) && (!c.loss || isfinite(*c.loss));
    if (c.square) *c.square = finite ? sum : NAN;
    if (c.norm) *c.norm = (float)sqrt(sum);
    for (int t = 0; t < count; t++) {
        double length = sqrt(c.by == CLIP_TENSOR ? square[t] : sum);
        if (c.by == CLIP_LAST && (double)*c.last > length) length = (double)*c.last;
        c.factor[t] = !finite ? NAN : c.clip > 0.0f && length > c.clip ? (float)(c.clip / length) : 1.0f;
    }
}

// The end of a step: scalars[1], the norm of all parts that were stepped, and scalars[2], 1 or, if nothing changed,
// NaN, as norm_of_tiles leaves them; *left_alone, the number of parts that were not stepped; and *last for the next
// step. scalars[0] is the loss; square: (parts).
struct PartNormEnd {
    float *scalars, *left_alone, *last;
    const double* square;
    int parts;

    __host__ __device__ void at(int64_t) const {
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
};

inline void tile_squares_cpu(double* square, const float* grads, int64_t tiles) {
#pragma omp parallel for schedule(static)
    for (int64_t tile = 0; tile < tiles; tile++) {
        double sum = 0.0;
        for (int i = 0; i < TILE_ELEMENTS; i++)
            sum += (double)grads[tile * TILE_ELEMENTS + i] * grads[tile * TILE_ELEMENTS + i];
        square[tile] = sum;
    }
}

inline double sum_squares_cpu(const double* square, int64_t tiles) {
    double sum = 0.0;
    for (int64_t i = 0; i < tiles; i++) sum += square[i];
    return sum;
}

#ifdef __CUDACC__
// Grid: ceil(tiles / 8), a warp a tile; block 256. Deterministic.
template <typename G>
__global__ void __launch_bounds__(256) tile_squares_kernel(double* square, const G* grads, int64_t tiles) {
    int64_t tile = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    if (tile >= tiles) return;
    float sum[2] = {0.0f, 0.0f};  // two chains a thread: the additions wait for each other half as long
#pragma unroll 4
    for (int i = threadIdx.x % 32 * Vec<G>::size; i < TILE_ELEMENTS; i += 32 * Vec<G>::size) {
        Vec<G> g = load_vec(grads + tile * TILE_ELEMENTS + i);
        for (int j = 0; j < Vec<G>::size; j++) sum[j % 2] = fmaf(to_float(g.lane[j]), to_float(g.lane[j]), sum[j % 2]);
    }
    double total = (double)sum[0] + (double)sum[1];
    for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(0xffffffffu, total, offset);
    if (threadIdx.x % 32 == 0) square[tile] = total;
}

// The sum of the squares of tiles, valid in thread 0. Block NORM_THREADS.
__device__ inline double sum_squares(const double* square, int64_t tiles) {
    __shared__ double partial[NORM_THREADS / 32];
    double sum = 0.0;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < tiles; i += NORM_THREADS) sum += square[i];
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    __syncthreads();  // the last sum has been read
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.0;
    if (threadIdx.x == 0)
        for (int warp = 0; warp < NORM_THREADS / 32; warp++) sum += partial[warp];
    return sum;
}

// Grid 1, block NORM_THREADS. Deterministic.
__global__ static void __launch_bounds__(NORM_THREADS)
    part_norm_kernel(PartClip c, const double* square, PartTiles tiles) {
    double sum[PART_TENSORS];
    for (int t = 0; t < tiles.count; t++) sum[t] = sum_squares(square + tiles.first[t], tiles.tiles[t]);
    if (threadIdx.x == 0) part_norm_result(c, sum, tiles.count);
}
#endif

// square: (tiles) device memory; grads: (tiles, TILE_ELEMENTS)
template <typename G>
void tile_squares(const Device* dev, cudaStream_t stream, double* square, const G* grads, int64_t tiles) {
    if (tiles == 0) return;
#ifdef __CUDACC__
    if (dev->gpu) return launch_on(stream, tile_squares_kernel<G>, ceil_div(tiles, 8), 256, 0, square, grads, tiles);
#endif
    assert(sizeof(G) == sizeof(float));
    tile_squares_cpu(square, (const float*)grads, tiles);
}

// The factors of a part from the squares of its tiles.
inline void part_norm(const Device* dev, const PartClip& clip, const double* square, const PartTiles& tiles) {
    assert(tiles.count <= PART_TENSORS);
#ifdef __CUDACC__
    if (dev->gpu) return launch_kernel(dev, part_norm_kernel, 1, NORM_THREADS, 0, clip, square, tiles);
#endif
    double sum[PART_TENSORS];
    for (int t = 0; t < tiles.count; t++) sum[t] = sum_squares_cpu(square + tiles.first[t], tiles.tiles[t]);
    part_norm_result(clip, sum, tiles.count);
}

// The same of all gradients: norm (2) in device memory gets the norm and the factor. loss: a device scalar that must be
// finite too, or null.
inline void norm_of_tiles(const Device* dev, float* norm, const double* square, int64_t tiles, float clip,
                          const float* loss) {
    part_norm(dev, {CLIP_STEP, clip, loss, nullptr, nullptr, norm + 1, norm}, square, {{0}, {tiles}, 1});
}
