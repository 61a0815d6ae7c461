// The one matrix product of the plain C path: c(m, n) = [c(m, n) +] sum over k of a(m, k) * b(k, n), in fp32.
//
// Definition: every element of c is one chain of fmaf over k = 0, 1, ..., K - 1, begun at 0 or, when accumulating, at
// the element itself (a bias is put there first). Blocking changes the order in which elements are visited and never a
// chain, so the result has the same bits as three nested loops, for any number of threads.
//
// a and b are read through two strides, so that one function serves x W^T, dy W and dy^T x. Why it is blocked: both
// operands are copied into panels (ROWS rows of a, COLS columns of b, k outermost) from which the innermost loop reads
// consecutive memory while a tile of c stays in registers; a panel of b (32 KiB) stays in the first level of cache
// while the rows of a task pass over it. Panels at the edge are filled up with zeros.
#pragma once
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/memory.h"

struct CpuGemm {
    int64_t rows, cols, depth;  // M, N, K
    const float* a;             // a(m, k) = a[m * a_row + k * a_depth]
    int64_t a_row, a_depth;
    const float* b;  // b(k, n) = b[k * b_depth + n * b_col]
    int64_t b_depth, b_col;
    float* c;  // (M, N), row-major
    bool accumulate;
};

// A tile of c is ROWS x COLS: 12 vector registers with AVX2 or AVX-512, which leaves room for 2 of b and 1 of a.
constexpr int CPU_GEMM_ROWS = 6;
#ifdef __AVX512F__
constexpr int CPU_GEMM_COLS = 32;
#else
constexpr int CPU_GEMM_COLS = 16;
#endif
constexpr int CPU_GEMM_DEPTH = 256;   // k of one panel
constexpr int CPU_GEMM_WIDTH = 1024;  // columns of b that are packed at a time: 1 MiB
constexpr int CPU_GEMM_TASK = 96;     // most rows of a in one task: 96 KiB packed

inline int64_t cpu_gemm_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

// panel[k][lane] = source[lane * lane_stride + k * depth_stride], zero in the lanes beyond `lanes`.
template <int LANES>
inline void cpu_gemm_pack(float* __restrict__ panel, const float* __restrict__ source, int64_t lane_stride,
                          int64_t depth_stride, int64_t lanes, int64_t depth) {
    if (lanes >= LANES && lane_stride == 1) {
        for (int64_t k = 0; k < depth; k++) memcpy(panel + k * LANES, source + k * depth_stride, LANES * sizeof(float));
        return;
    }
    for (int i = 0; i < LANES; i++) {
        const float* line = source + i * lane_stride;
        if (i < lanes) {
            for (int64_t k = 0; k < depth; k++) panel[k * LANES + i] = line[k * depth_stride];
        } else {
            for (int64_t k = 0; k < depth; k++) panel[k * LANES + i] = 0.0f;
        }
    }
}

// The innermost loops: every element of the tile continues its chain over `depth` values of k.
inline void cpu_gemm_chains(float tile[CPU_GEMM_ROWS][CPU_GEMM_COLS], const float* __restrict__ a_panel,
                            const float* __restrict__ b_panel, int64_t depth) {
    float sum[CPU_GEMM_ROWS][CPU_GEMM_COLS];
    memcpy(sum, tile, sizeof(sum));
    for (int64_t k = 0; k < depth; k++) {
        const float* a = a_panel + k * CPU_GEMM_ROWS;
        const float* b = b_panel + k * CPU_GEMM_COLS;
        for (int i = 0; i < CPU_GEMM_ROWS; i++) {
#pragma omp simd
            for (int j = 0; j < CPU_GEMM_COLS; j++) sum[i][j] = fmaf(a[i], b[j], sum[i][j]);
        }
    }
    memcpy(tile, sum, sizeof(sum));
}

// One tile of c, of which rows x cols exist. `begin`: its chains start at 0 and not at what c holds.
inline void cpu_gemm_tile(float* c, int64_t c_row, int64_t rows, int64_t cols, bool begin, const float* a_panel,
                          const float* b_panel, int64_t depth) {
    alignas(64) float tile[CPU_GEMM_ROWS][CPU_GEMM_COLS] = {};
    if (rows > CPU_GEMM_ROWS) rows = CPU_GEMM_ROWS;
    if (cols > CPU_GEMM_COLS) cols = CPU_GEMM_COLS;
    if (!begin)
        for (int i = 0; i < rows; i++) memcpy(tile[i], c + i * c_row, cols * sizeof(float));
    cpu_gemm_chains(tile, a_panel, b_panel, depth);
    for (int i = 0; i < rows; i++) memcpy(c + i * c_row, tile[i], cols * sizeof(float));
}

// Rows [m0, m0 + rows) of c against the packed columns [n0, n0 + cols), for k in [k0, k0 + depth).
inline void cpu_gemm_task(const CpuGemm* gemm, const float* b_panels, int64_t m0, int64_t rows, int64_t n0,
                          int64_t cols, int64_t k0, int64_t depth) {
    alignas(64) float a_panels[CPU_GEMM_TASK * CPU_GEMM_DEPTH];
    for (int64_t m = 0; m < rows; m += CPU_GEMM_ROWS) {
        const float* source = gemm->a + (m0 + m) * gemm->a_row + k0 * gemm->a_depth;
        cpu_gemm_pack<CPU_GEMM_ROWS>(a_panels + m * depth, source, gemm->a_row, gemm->a_depth, rows - m, depth);
    }
    bool begin = k0 == 0 && !gemm->accumulate;
    for (int64_t n = 0; n < cols; n += CPU_GEMM_COLS) {
        for (int64_t m = 0; m < rows; m += CPU_GEMM_ROWS) {
            float* c = gemm->c + (m0 + m) * gemm->cols + n0 + n;
            cpu_gemm_tile(c, gemm->cols, rows - m, cols - n, begin, a_panels + m * depth, b_panels + n * depth, depth);
        }
    }
}

inline void cpu_gemm(const CpuGemm* gemm) {
    float* b_panels = (float*)memory_aligned(64, CPU_GEMM_WIDTH * CPU_GEMM_DEPTH * sizeof(float));
    // Few rows are dealt out in smaller tasks, so that every thread has some.
    int64_t task = (gemm->rows / (2 * omp_get_max_threads()) + CPU_GEMM_ROWS) / CPU_GEMM_ROWS * CPU_GEMM_ROWS;
    task = cpu_gemm_min(task, CPU_GEMM_TASK);
#pragma omp parallel
    for (int64_t n0 = 0; n0 < gemm->cols; n0 += CPU_GEMM_WIDTH) {
        int64_t cols = cpu_gemm_min(CPU_GEMM_WIDTH, gemm->cols - n0);
        for (int64_t k0 = 0; k0 < gemm->depth; k0 += CPU_GEMM_DEPTH) {
            int64_t depth = cpu_gemm_min(CPU_GEMM_DEPTH, gemm->depth - k0);
#pragma omp for schedule(dynamic)
            for (int64_t n = 0; n < cols; n += CPU_GEMM_COLS) {
                const float* source = gemm->b + (n0 + n) * gemm->b_col + k0 * gemm->b_depth;
                cpu_gemm_pack<CPU_GEMM_COLS>(b_panels + n * depth, source, gemm->b_col, gemm->b_depth, cols - n, depth);
            }
#pragma omp for schedule(dynamic)
            for (int64_t m0 = 0; m0 < gemm->rows; m0 += task)
                cpu_gemm_task(gemm, b_panels, m0, cpu_gemm_min(task, gemm->rows - m0), n0, cols, k0, depth);
        }
    }
    free(b_panels);
}
