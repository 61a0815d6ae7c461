// Newton-Schulz in double for the tests: its two forms (optim/matrix/newton_schulz.cuh), the plain one with a bound on
// the error of an arithmetic of fewer bits, carried along to first order in the norm of Frobenius.
//
// For the plain form, to first order and in the norm of Frobenius, with what is stored rounded by `unit` of itself
// (2^-24 for fp32), an error e of X becomes
//     e' = L e + s e_B + unit ||X'|| + sums (a + ||B||) ||X||
//     e_B = (|b| + 2 |c| s^2) e_A + unit ||B|| + sums (|b| + |c| ||A||) ||A||;   e_A = unit ||A|| + sums ||X||^2
// where s is the largest singular value, L the steepest slope of a x + b x^3 + c x^5 up to it, and sums = sqrt(K) 2^-24
// for sums of K terms. A reference that rounds to fp16 where a GPU does takes 0.03 of its bound.
#pragma once
#include <math.h>
#include "../../optim/formats/fp16.cuh"
#include "../../optim/matrix/newton_schulz.cuh"

constexpr int64_t MOST = 96 * 40;  // elements of a matrix

// Products and norms in double.

struct Dense {
    int rows, cols;
    double x[MOST];
};

// op(a) op(b), where a `t` transposes.
inline void multiply(Dense* d, const Dense* a, bool at, const Dense* b, bool bt) {
    const int depth = at ? a->rows : a->cols;
    d->rows = at ? a->cols : a->rows, d->cols = bt ? b->rows : b->cols;
    for (int i = 0; i < d->rows; i++) {
        for (int j = 0; j < d->cols; j++) {
            double sum = 0.0;
            for (int k = 0; k < depth; k++)
                sum += a->x[at ? k * a->cols + i : i * a->cols + k] * b->x[bt ? j * b->cols + k : k * b->cols + j];
            d->x[i * d->cols + j] = sum;
        }
    }
}

inline double frobenius(const Dense* a) {
    double sum = 0.0;
    for (int i = 0; i < a->rows * a->cols; i++) sum += a->x[i] * a->x[i];
    return sqrt(sum);
}

// Returns a bound from above on the largest singular value of a Gram matrix: what 60 steps of power iteration give, and
// a hundredth more.
inline double spectral(const Dense* gram) {
    double v[128], next[128], norm = 0.0;
    for (int i = 0; i < gram->rows; i++) v[i] = 1.0 + 0.01 * i;
    for (int k = 0; k < 60; k++) {
        norm = 0.0;
        for (int i = 0; i < gram->rows; i++) {
            next[i] = 0.0;
            for (int j = 0; j < gram->cols; j++) next[i] += gram->x[i * gram->cols + j] * v[j];
            norm += next[i] * next[i];
        }
        norm = sqrt(norm);
        for (int i = 0; i < gram->rows; i++) v[i] = norm > 0.0 ? next[i] / norm : 0.0;
    }
    return 1.01 * sqrt(norm);
}

// Returns the steepest slope of a x + b x^3 + c x^5 between 0 and s.
inline double steepest(NewtonSchulz c, double s) {
    double most = 0.0;
    for (int i = 0; i <= 200; i++) {
        const double y = s * s * i * i / 40000.0;
        most = fmax(most, fabs(c.a + 3.0 * c.b * y + 5.0 * c.c * y * y));
    }
    return most;
}

// x divided by its norm.
inline void normalise(Dense* x) {
    const double norm = frobenius(x);
    for (int i = 0; i < x->rows * x->cols; i++) x->x[i] /= norm + 1e-7;
}

// The plain form, of x divided by its norm. Returns the bound for an arithmetic that rounds what it stores by `unit` of
// itself and what it adds up, over K terms, by sqrt(K) 2^-24, as independent roundings do. The head of this file has
// the formula.
inline double reference_polar(const OptimConfig* config, Dense* x, double unit) {
    static Dense gram, square, b, product;
    const bool tall = x->rows > x->cols;
    const double sums = ldexp(sqrt(tall ? x->rows : x->cols), -24);
    normalise(x);
    double error = (unit + 64 * ldexp(1.0, -24)) * frobenius(x);
    for (int step = 0; step < config->ns_steps; step++) {
        NewtonSchulz c;
        newton_schulz_coefficients(config->ns_coefficients, step, &c);
        multiply(&gram, x, tall, x, !tall);
        const double s = 1.02 * spectral(&gram), size = frobenius(x), of_gram = frobenius(&gram);
        multiply(&square, &gram, false, &gram, false);
        b = gram;
        for (int i = 0; i < b.rows * b.cols; i++) b.x[i] = c.b * gram.x[i] + c.c * square.x[i];
        multiply(&product, tall ? x : &b, false, tall ? &b : x, false);
        for (int i = 0; i < x->rows * x->cols; i++) x->x[i] = c.a * x->x[i] + product.x[i];
        const double a_error = unit * of_gram + sums * size * size, a = of_gram;
        const double b_error = unit * frobenius(&b) + sums * (fabs(c.c) * a * a + fabs(c.b) * a) +
                               (fabs(c.b) + 2.0 * fabs(c.c) * s * s) * a_error;
        const double x_error = unit * frobenius(x) + sums * (c.a + frobenius(&b)) * size + s * b_error;
        error = steepest(c, s) * error + x_error;
    }
    return error;
}

// Rounds to fp16, `scale` times as large as it is.
inline void round_fp16(Dense* a, bool rounds, double scale) {
    for (int i = 0; rounds && i < a->rows * a->cols; i++)
        a->x[i] = (double)Fp16::decode(Fp16::encode((float)(a->x[i] * scale))) / scale;
}

// The symmetric form, of x divided by its norm. With `rounds`, what is stored is rounded to fp16 as on a GPU.
inline void reference_symmetric(const OptimConfig* config, Dense* x, bool rounds) {
    static Dense r, square, z, t, q, product;
    const bool tall = x->rows > x->cols;
    const int side = tall ? x->cols : x->rows, depth = tall ? x->rows : x->cols;
    normalise(x);
    round_fp16(x, rounds, POLAR_SCALE);
    for (int64_t step = 0, until = 0; step < config->ns_steps;) {
        until += side == depth ? 1 : step == 0 ? POLAR_FIRST : POLAR_NEXT;
        until = until < config->ns_steps ? until : config->ns_steps;
        multiply(&r, x, tall, x, !tall);
        round_fp16(&r, rounds, POLAR_SCALE * POLAR_SCALE);
        for (bool first = true; step < until; step++, first = false) {
            NewtonSchulz c;
            newton_schulz_coefficients(config->ns_coefficients, (int)step, &c);
            multiply(&square, &r, false, &r, false);
            z = r;
            for (int i = 0; i < side * side; i++)
                z.x[i] = (i % (side + 1) ? 0.0 : c.a) + c.b * r.x[i] + c.c * square.x[i];
            round_fp16(&z, rounds, 1.0);
            if (step + 1 < until) {
                multiply(&t, &r, false, &z, false);
                round_fp16(&t, rounds, POLAR_SCALE * POLAR_SCALE);
                multiply(&r, &t, false, &z, false);
                round_fp16(&r, rounds, POLAR_SCALE * POLAR_SCALE);
            }
            multiply(&product, first ? &z : &q, false, &z, false);
            q = first ? z : product;
            round_fp16(&q, rounds && !first, 1.0);
        }
        multiply(&product, tall ? x : &q, false, tall ? &q : x, false);
        *x = product;
        round_fp16(x, rounds, POLAR_SCALE);
    }
}
