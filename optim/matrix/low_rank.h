// Rules that keep moments of a projected gradient. A matrix G of R x C, with sides n >= m, is projected onto r
// directions of its shorter side, the rows of Q (r x m); r is --rank, or a quarter of the shorter side.
//     R >= C:  low = G Q^T  (R x r),  back: N Q          R < C:  low = Q G  (r x C),  back: Q^T N
// Adam on `low`, in any format in blocks, gives N (rules/lowrank.cuh). A channel is an index of the longer side.
//     galore       U = s N Q;  Q the leading singular directions of G, every --rank-gap steps
//     fira         U = s N Q + phi (G - low Q) / limit,  phi_i = ||N_i|| / (||low_i|| + 1e-8)
//     apollo       U = sqrt(s) phi G / limit;  Q of normal numbers of variance 1 / r
//     apollo-mini  the same with r = 1 and one phi, ||N|| / (||low|| + 1e-8), for the matrix
//     apollo-factored  as apollo, and v = a_i b_k / max(mean a, eps), with averages a and b of the means of low^2 over
//                  row i and column k, in fp32 (adafactor8bit's apollo_factorize)
// galore is by Zhao et al., arXiv 2403.03507; fira by Chen et al., 2410.01623; apollo by Zhu et al., 2412.05270. s is
// --rank-scale: by default 0.25, of apollo-mini 128, and m / r for apollo, whose phi is about sqrt(r / m) of what the
// whole matrix would have. The formulas of U are for R >= C, where phi multiplies rows; otherwise it multiplies
// columns. The limit keeps the norm of the term that it divides from growing by more than a factor a step,
// --limit-growth or 1.01: with `now` that norm and `last` the norm kept,
//     limit = max(now / (last + 1e-8), 1.01) / 1.01,  last = now / limit;   1 where last is 0 (nothing was there)
// Fira's residual is the paper's, G - low Q; its code subtracts s low Q. The residual's norm follows from those of
// channels, since Q has orthonormal rows: ||G_i - (low Q)_i||^2 = ||G_i||^2 - ||low_i||^2.
//
// A randomised range finder computes Q of galore and fira. It starts from the last Q, or at first from normal numbers,
// and twice sets Q <- rows of (Q G) G^T, or (G Q^T)^T G, made orthonormal by Gram-Schmidt, each row twice. A row that
// is a combination of earlier rows becomes a random one. Moments keep their values when Q changes, as in the papers'
// code; with --rank-reset on, they begin anew. A matrix whose gradients were all zero so far has no Q and does not
// move; it takes its first directions from the first gradient that is not zero. A zero gradient changes no Q. apollo's
// Q is computed in each step from (seed, element of the arena, (step - 1) / gap), so it is not stored; its normal
// numbers are sums of eight uniform numbers of 16 bits.
//
// Arithmetic: fp32. Sums over a row or column have 32 partial sums as in rows.cuh, so CPU and GPU differ only in the
// products. A GPU makes a product of fp32 as three of TF32, within 3 2^-22 of the operands' magnitudes, and sums of K
// terms in another order, by at most about K 2^-24 of their norms; times 1 / (1 - share of the rest) for Q.
// galore with gradients of bf16 on a GPU, if sides and ranks are multiples of 8, reads G in place and rounds Q, N and U
// to bf16, each to 2^-9 of a number, as in the paper's code; directions are still found in fp32.
// Memory: the moments; 4 r m bytes of Q; the buffers of a chunk (matrix.h); and on a GPU 4 bytes for each element of
// the largest matrix, a part of a product's operand.
// Cost: 4 R C r flop, and at each refresh of Q 8 R C r; on a GPU three times these in fp32. G is copied to the scratch
// (bf16: only at a refresh), U is written there, and the step's kernel applies it.
#pragma once
#include "../made.h"

// The sizes that a rule keeps for one matrix of rows x cols: the number of directions, the moments' shape, and how many
// numbers the basis has.
struct LowShape {
    int64_t rank, rows, cols;
    int64_t basis;  // Q, if it is stored, and the norm of the limit
};
LowShape low_shape(const OptimConfig* config, int64_t rows, int64_t cols);

// Sets what each slot of a launch keeps of tensors whose gradients are projected. `first` is the first element of the
// launch's tensors in the whole arena, wherever they are kept.
void plan_low(Plan* plan, int index, int64_t first, const OptimTensor* tensors, int count);

// Returns true if a configuration's rule is one that limits a norm.
bool low_rank_limits(const OptimConfig* config);

// Returns true if moments begin anew with step number `step`.
bool low_rank_resets(const OptimConfig* config, int64_t step);

// Returns true if the products of a launch are those of bf16. All matrices of the launch in the whole model decide, so
// that a matrix's bits do not depend on which others a rank keeps.
bool low_rank_in_bf16(const Device* dev, const OptimConfig* config, const MatrixPlan* plan);

// A step of a launch.
struct LowStep {
    const Optim* optim;
    const StepLaunch* launch;
    const LaunchStep* step;
    bool in_bf16;  // low_rank_in_bf16
};

// Computes new directions Q if they are due, and projects the gradients of a chunk into MatrixWork.low.
void low_rank_project(const LowStep* low, int chunk);

// Turns N, in MatrixWork.direction, and the gradients into the updates, in MatrixWork.scratch.
void low_rank_update(const LowStep* low, int chunk);
