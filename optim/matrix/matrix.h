// Rules that read whole matrices. A step has three parts, so that these rules have the formats, rounding and noise of
// all rules:
//     1. the step's kernel, with the rule's element part (rules/muon.cuh): gradient and momentum -> new momentum, and a
//        direction u in fp32, in a scratch buffer that takes the weights' place
//     2. this file: matrix products turn u into the update U, in place
//     3. the step's kernel again, with U in the gradient's place: p = p (1 - lr wd) - lr U
// Muon (K. Jordan et al. 2024), for u of R x C, with a, b, c by --ns-coefficients and 5 steps by --ns-steps:
//     X = u / (||u|| + 1e-7);  each step:  A = X X^T;  B = b A + c A^2;  X = a X + B X      (Newton-Schulz)
//     U = 0.2 sqrt(max(R, C)) X
// X ends near the orthogonal factor of u: all its singular values lie near 1. A tall matrix (R > C) is
// transposed before and after. The factor 0.2 sqrt(max) is Moonshot's (arXiv 2502.16982): it gives U the size of an
// adamw update, so that matrices and the tensors left to adamw share one learning rate and one decay. NorMuon (arXiv
// 2510.05491) keeps a v for each row:
//     v_i = v_i + (1 - beta2) (mean over row i of X^2 - v_i);   Y_i = X_i / (sqrt(v_i) + eps)
//     U = 0.2 sqrt(R C) Y / ||Y||
// A tensor of several stacked matrices (GPT-2's queries, keys and values) counts as that many matrices, as in the
// papers' runs.
//
// Arithmetic: plain C, in fp32 and in the order above, is the definition. A GPU takes the symmetric form of the same
// polynomial (newton_schulz.cuh), in fp16 with fp32 sums. CPU and GPU agree within the sum of their error bounds
// (dev/unit/newton_schulz.h). Small singular values of u grow by a factor of up to |a| a step, so an error of 2^-11
// becomes up to 3 per cent of U. A matrix belongs to one rank (optim_slice), and its bits do not depend on the matrices
// beside it, so the same device gives the same bits for any number of ranks and chunks.
//
// Memory: tensors are taken in chunks of about 3 x 2^25 elements, 4 bytes of the scratch each; steps by parts (model/)
// take chunks of a layer. A launch makes one product of a batch: matrices of one shape or its transpose, with buffers
// of at most 512 MB or what one matrix needs. So the buffers do not grow with the number of layers: 0.9 GB for GPT-2
// 124M and for 1558M. The CPU takes one matrix at a time and needs buffers for the largest one only. Cost: 20 m^3 flop
// of a square matrix, 14 m^3 + 6 m^2 n of others, with m the shorter side, and a sixth more for whole tiles.
#pragma once
#include "../plan.h"
#include "../storage.h"

struct Matrix {
    int64_t at;   // of its first element in the scratch of its chunk
    int64_t row;  // of its first row among those of the launch
    int rows, cols;
    int tensor;  // number of its tensor; a chunk's matrices are sorted by shape, not by tensor
    // Rules that project the gradient (low_rank.h) need these: where its moments begin in work->low, where its basis
    // begins in the launch's, and its first element in the whole arena.
    int64_t low, basis, element;
    int group;       // of its tensor's constants (Plan)
    bool has_basis;  // on the host: a step has found that its basis is not zero
};

// Matrices of one shape, one after another in MatrixPlan.matrix.
struct MatrixBatch {
    int first, count;
};

// Whole tensors that are taken together: elements `begin` to `end` - 1 of the arena.
struct MatrixChunk {
    int64_t begin, end;
    int64_t tile, tiles;
    int matrix, matrices;
    int batch, batches;
    int64_t low_begin, low_end;  // of the moments of projected gradients
    int64_t low_tile;
};

// The chunks in which the matrices of a launch are taken, and the memory that they need.
struct MatrixPlan {
    Matrix* matrix;
    MatrixBatch* batch;
    MatrixChunk* chunk;
    int matrices, batches, chunks;
    int64_t scratch, work, sums, low, low_tiles;  // bytes
    bool by_eights;  // sides and ranks of all matrices of the launch in the whole model are multiples of 8
};

// Plans the chunks of launch `index`. matrix_plan_free frees the plan.
MatrixPlan matrix_plan(const Device* dev, const Plan* plan, int index, const OptimTensor* tensors, int count);
void matrix_plan_free(MatrixPlan* plan);

// Sets the coefficients of a step of Newton-Schulz; `step` counts from 0. Returns false if the name is unknown.
struct NewtonSchulz {
    float a, b, c;
};
bool newton_schulz_coefficients(const char* name, int step, NewtonSchulz* coefficients);

// A launch's plan, and its buffers in device memory.
struct MatrixWork {
    MatrixPlan plan;
    Matrix* matrix;          // (plan.matrices)
    float* scratch;          // the directions, then the updates, of one chunk
    void* work;              // X, the next X and squares of a batch's matrices
    float* sums;             // sums over its matrices and rows
    float* unit;             // factor of U: 1, or NaN if the step changes nothing
    float *low, *direction;  // projected gradients of a chunk, and Adam's directions for them
    Tile* low_tiles;         // tiles of their moments, for all chunks
};

// Returns where tile number `tile` of the launch's list has room in the scratch of its chunk, for numbers of
// `element_bytes` bytes.
void* matrix_scratch(const MatrixWork* work, int64_t tile, int64_t element_bytes);
