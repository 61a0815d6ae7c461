// Rules whose moments are those of a projected gradient. A matrix G of R x C, with sides n >= m, is projected onto r
// directions of its shorter side, the rows of Q (r x m); r is --rank, or a quarter of the shorter side.
//     R >= C:  low = G Q^T  (R x r),  back: N Q          R < C:  low = Q G  (r x C),  back: Q^T N
// Adam on low, in any format in blocks, gives N (rules/lowrank.cuh). A channel is an index of the longer side.
//     galore       U = s N Q;  Q the leading singular directions of G, every --rank-gap steps
//     fira         U = s N Q + phi (G - low Q) / limit,  phi_i = ||N_i|| / (||low_i|| + 1e-8)
//     apollo       U = sqrt(s) phi G / limit;  Q of normal numbers of variance 1 / r
//     apollo-mini  the same with r = 1 and one phi, ||N|| / (||low|| + 1e-8), for the matrix
// galore is of Zhao et al., arXiv 2403.03507; fira of Chen et al., 2410.01623; apollo of Zhu et al., 2412.05270.
// s is --rank-scale. U is as one matrix for R >= C; phi multiplies rows there and columns otherwise. The limit keeps
// the norm of what it divides from growing by more than 1.01 a step: with `now` that norm and `last` the norm kept,
//     limit = max(now / (last + 1e-8), 1.01) / 1.01,  last = now / limit;   1 where last is 0 (nothing was there)
// Fira's residual is the paper's, G - low Q, and not its code's, which subtracts s low Q. Its norm follows from those
// of channels, as Q has orthonormal rows: ||G_i - (low Q)_i||^2 = ||G_i||^2 - ||low_i||^2.
//
// Q of galore and fira is found by a randomised range finder, warm: from the last Q, or normal numbers at first, two
// times Q <- rows of (Q G) G^T, or (G Q^T)^T G, made orthonormal by Gram-Schmidt, each row twice. A row that has
// nothing left becomes a random one. Moments stay as they are when Q changes, as in the papers' code. apollo's Q is
// made anew in each step from (seed, element of the arena, (step - 1) / gap), so it is not stored; what is normal is
// the sum of eight uniform numbers of 16 bits.
//
// Arithmetic: all fp32. Sums over a row or column have 32 partial sums as in rows.cuh, so CPU and GPU differ in the
// products' sums alone, of K terms: by at most about K 2^-24 of their norms, times 1 / (1 - share of the rest) for Q.
// Memory: the moments; 4 r m bytes of Q, or of galore's 2 or 1 by --rank-basis (bf16 to nearest, or lin8: whole numbers
// from -127 to 127 times a scale for each 256; what is stored is what projects); and buffers of a chunk (matrix.h).
// Cost: 4 R C r flop, and at each refresh 8 R C r.
//
// A step goes one of two ways, which low_rank_fuses chooses.
// Apart, the definition: G is copied to the scratch, products go through the library, and the step's kernel applies the
// updates, which lie in the scratch. G is read twice and written once, U written and read.
// Fused, on GPUs, for galore with weights of fp32, bf16 or bf16:sr and sizes and ranks that are multiples of 8: a
// launch for each matrix and product. Our products (kernels/low_rank.cuh; the library makes the first one of bf16
// gradients) read G where it is, and the second one updates the weights, with the bits that the step's kernel would
// give them. G is read once, U is never in memory. Gradients of fp32 have products as good as fp32's (2^-21); with
// those of bf16, Q and N are rounded to bf16, as in the paper's code. On sm_90a two products have kernels of their own
// (kernels/low_rank_project.cuh, low_rank_back.cuh), which the matrix alone chooses.
#pragma once
#include "../kernel.cuh"
#include "matrix.h"

// Sizes that a rule keeps for one matrix of rows x cols: the directions, the moments' shape, numbers of the basis.
struct LowShape {
    int64_t rank, rows, cols;
    int64_t basis;  // numbers: Q, if it is stored, and the norm of the limit
};
LowShape low_shape(const OptimConfig* config, int64_t rows, int64_t cols);

// True if the steps of these matrices go the fused way: all matrices of the launch in the whole model decide, so that a
// matrix's bits do not depend on which others a rank keeps.
bool low_rank_fuses(const Device* dev, const OptimConfig* config, const MatrixWork* work);

// The place of a matrix's weights, in the matmuls' type, if they are in a tensor of the caller's own (placed.h), and
// the number of its constants.
struct LowPlace {
    void* weights;  // aligned to 16 bytes
    int group;
};

// The functions below share these arguments, which describe a step of a launch.
struct LowStep {
    const Device* dev;
    const OptimConfig* config;
    const MatrixWork* work;
    const Streams* basis;
    const void* grads;  // of the whole arena
    bool is_bf16;       // the gradients are
    const float* grad_scale;
    int64_t step;
    bool fused;
};

// Sets Q where it is due, and projects the gradients of a chunk into work->low.
void low_rank_project(const LowStep* its, int chunk);

// The second half of a fused step: updates the weights that `apply` names from work->direction, or those at `places`,
// one for each of the launch's matrices, unless it is null.
void low_rank_apply(const LowStep* its, int chunk, const StepArguments* apply, const LowPlace* places);

// The second half of a step that is not fused: turns work->direction, N, and the gradients into the updates, in
// work->scratch.
void low_rank_update(const LowStep* its, int chunk);
