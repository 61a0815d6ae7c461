// Rules whose moments are those of a projected gradient. A matrix G of R x C, with sides n >= m, is projected onto r
// directions of its shorter side, the rows of Q (r x m); r is --rank, or a quarter of the shorter side.
//     R >= C:  low = G Q^T  (R x r),  back: N Q          R < C:  low = Q G  (r x C),  back: Q^T N
// Adam on low, in any format in blocks, gives N (rules/lowrank.cuh). A channel is an index of the longer side.
//     galore (Zhao et al., arXiv 2403.03507)   U = s N Q;  Q the leading singular directions of G, every --rank-gap
//     fira (Chen et al., 2410.01623)           U = s N Q + phi (G - low Q) / limit,  phi_i = ||N_i|| / (||low_i|| +
//     1e-8) apollo (Zhu et al., 2412.05270)          U = sqrt(s) phi G / limit;  Q of normal numbers of variance 1 / r
//     apollo-mini                              the same with r = 1 and one phi, ||N|| / (||low|| + 1e-8), for the
//     matrix
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
// Arithmetic: all fp32. Sums over a row or column have 32 partial sums as in rows.cuh, so that CPU and GPU differ in
// the products' sums alone, of K terms: by at most about K 2^-24 of their norms, times 1 / (1 - share of the rest) for
// Q. Memory: the moments, 4 r m bytes of Q; buffers of a chunk as matrix.h says. Cost: 4 R C r flop, and at each
// refresh 8 R C r; G is read three times and written twice. A launch for each matrix: simple, and not tuned.
#pragma once
#include "matrix.h"

// What tensors of a rule keep, for one matrix of rows x cols: the directions, the moments' shape, numbers of the basis.
struct LowShape {
    int64_t rank, rows, cols;
    int64_t basis;  // numbers: Q, if it is stored, and the norm of the limit
};
LowShape low_shape(const OptimConfig* config, int64_t rows, int64_t cols);

// Sets Q where it is due, and projects the gradients of a chunk, in work->scratch, into work->low.
void low_rank_project(const Device* dev, const OptimConfig* config, const MatrixWork* work, int chunk, float* basis,
                      int64_t step);

// Turns work->direction, N, and the gradients into the updates, in work->scratch.
void low_rank_update(const Device* dev, const OptimConfig* config, const MatrixWork* work, int chunk, float* basis);

// work->scratch = the gradients of a chunk, from the arena's first element on, times the factor.
void low_rank_gradients(const Device* dev, const MatrixWork* work, int chunk, const void* grads, bool is_bf16,
                        const float* grad_scale);
