// One oracle for all rules: a step of a whole tensor by the papers' formulas, in numbers of any type. In double it is
// the definition. The same program in fp32 shows how far roundings carry, from which the tests take their bounds.
#pragma once
#include <vector>

#include "../../optim/formats/fp16.cuh"
#include "../../optim/matrix/low_rank.h"
#include "../../optim/matrix/newton_schulz.cuh"
#include "steps.h"

template <class R>
struct Dense {
    int64_t rows = 0, cols = 0;
    std::vector<R> x = {};

    Dense() = default;
    Dense(int64_t r, int64_t c) : rows(r), cols(c), x((size_t)(r * c)) {}
    R* row(int64_t i) { return x.data() + i * cols; }
    const R* row(int64_t i) const { return x.data() + i * cols; }
};

template <class R>
Dense<R> transposed(const Dense<R>& a) {
    Dense<R> t(a.cols, a.rows);
    for (int64_t i = 0; i < a.rows; i++)
        for (int64_t j = 0; j < a.cols; j++) t.row(j)[i] = a.row(i)[j];
    return t;
}

template <class R>
Dense<R> operator*(const Dense<R>& a, const Dense<R>& b) {
    Dense<R> d(a.rows, b.cols);
    for (int64_t i = 0; i < a.rows; i++) {
        for (int64_t k = 0; k < a.cols; k++)
            for (int64_t j = 0; j < b.cols; j++) d.row(i)[j] += a.row(i)[k] * b.row(k)[j];
    }
    return d;
}

template <class R>
R squares_of(const R* x, int64_t n) {
    R sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    return sum;
}

template <class R>
R norm_of(const std::vector<R>& x) {
    return std::sqrt(squares_of(x.data(), (int64_t)x.size()));
}

template <class R>
double distance(const std::vector<double>& a, const R* b) {
    double sum = 0.0;
    for (size_t i = 0; i < a.size(); i++) sum += pow(a[i] - (double)b[i], 2);
    return sqrt(sum);
}

template <class R>
void scale_by(std::vector<R>* x, R factor) {
    for (R& each : *x) each *= factor;
}

// Newton-Schulz in its two forms (optim/matrix/newton_schulz.cuh), of x divided by its norm.

template <class R>
void polar_plain(const OptimConfig* config, Dense<R>* x) {
    scale_by(&x->x, R(1) / (norm_of(x->x) + R(1e-7)));
    const bool tall = x->rows > x->cols;
    if (tall) *x = transposed(*x);
    for (int step = 0; step < config->ns_steps; step++) {
        NewtonSchulz c;
        newton_schulz_coefficients(config->ns_coefficients, step, &c);
        const Dense<R> gram = *x * transposed(*x);
        Dense<R> b = gram * gram;
        for (size_t i = 0; i < b.x.size(); i++) b.x[i] = c.b * gram.x[i] + c.c * b.x[i];
        const Dense<R> product = b * *x;
        for (size_t i = 0; i < x->x.size(); i++) x->x[i] = c.a * x->x[i] + product.x[i];
    }
    if (tall) *x = transposed(*x);
}

// Rounds to fp16, `scale` times as large as it is.
inline void round_fp16(Dense<double>* a, bool rounds, double scale) {
    for (double& x : a->x) x = rounds ? (double)Fp16::decode(Fp16::encode((float)(x * scale))) / scale : x;
}

// With `rounds`, what is stored is rounded to fp16 as on a GPU.
inline void polar_symmetric(const OptimConfig* config, Dense<double>* x, bool rounds) {
    const double of_x = POLAR_SCALE, of_gram = of_x * of_x;
    scale_by(&x->x, 1.0 / (norm_of(x->x) + 1e-7));
    round_fp16(x, rounds, of_x);
    const bool tall = x->rows > x->cols;
    if (tall) *x = transposed(*x);
    for (int64_t step = 0, until = 0; step < config->ns_steps;) {
        Dense<double> r = *x * transposed(*x), q;
        until += x->rows == x->cols ? 1 : step == 0 ? POLAR_FIRST : POLAR_NEXT;
        until = until < config->ns_steps ? until : config->ns_steps;
        round_fp16(&r, rounds, of_gram);
        for (bool first = true; step < until; step++, first = false) {
            NewtonSchulz c;
            newton_schulz_coefficients(config->ns_coefficients, (int)step, &c);
            Dense<double> z = r * r;
            for (int64_t i = 0; i < r.rows * r.rows; i++)
                z.x[i] = (i % (r.rows + 1) ? 0.0 : c.a) + c.b * r.x[i] + c.c * z.x[i];
            round_fp16(&z, rounds, 1.0);
            if (step + 1 < until) {
                r = r * z, round_fp16(&r, rounds, of_gram);
                r = r * z, round_fp16(&r, rounds, of_gram);
            }
            q = first ? z : q * z;
            round_fp16(&q, rounds && !first, 1.0);
        }
        *x = q * *x;
        round_fp16(x, rounds, of_x);
    }
    if (tall) *x = transposed(*x);
}

// A tensor, or one of the matrices that are stacked in it, under a rule.
template <class R>
struct Whole {
    const OptimConfig* config;  // of its launch
    Settings settings;
    int64_t rows, cols, element;  // the first element's number in the arena
    bool rounds = false;          // as a GPU does: a polar factor in fp16; galore's gradient, Q, N and U in bf16
    std::vector<R> p, m, v, slow, u, moved;
    std::vector<R> row[2], col[2];  // averages of squares; came's confidence
    std::vector<bool> lost;         // of an update: its sign, which decides, was too close to call
    Dense<R> q;                     // directions
    R last = 0;                     // the norm that a limit keeps
    R keep = 1, bias1 = 1, bias2 = 1;

    int64_t size() const { return rows * cols; }
    bool rule(const char* name) const { return is(config->rule, name); }

    void begin() {
        const size_t n = (size_t)size();
        for (auto* each : {&p, &m, &v, &slow, &u, &moved}) each->assign(n, 0);
        for (int k = 0; k < 2; k++) row[k].assign((size_t)rows, 0), col[k].assign((size_t)cols, 0);
        lost.assign(n, false);
    }
};

template <class R>
void average_to(R* a, R x, R beta) {
    *a += (1 - beta) * (x - *a);
}

// The update of rules that read single elements, and of adam-mini, whose v is the mean over a row.
template <class R>
void oracle_elements(Whole<R>* w, const std::vector<R>& g, int step) {
    const OptimConfig* c = w->config;
    const R beta1 = c->beta1, beta2 = c->beta2;
    const bool averages = strncmp(c->rule, "sgd", 3) != 0, ahead = strstr(c->rule, "-nesterov") != nullptr,
               mini = w->rule("adam-mini"), mixes = w->rule("ademamix");
    const double done = c->ramp > step ? (double)step / (double)c->ramp : 1.0, start = log((double)c->beta1),
                 end = log((double)c->beta3);
    const R beta3 = mixes ? (R)exp(start * end / ((1.0 - done) * end + done * start)) : R(0);
    for (int64_t i = 0; i < w->size(); i++) {
        const R x = g[i], before = w->m[i];
        if (w->rule("lion")) {
            const R sum = beta1 * before + (1 - beta1) * x;
            const double close = 0x1p-22 * (fabs((double)(beta1 * before)) + fabs((double)((1 - beta1) * x)));
            w->lost[i] = w->lost[i] || (close > 0.0 && fabs((double)sum) <= close);
            w->u[i] = sum > 0 ? 1 : sum < 0 ? -1 : 0;
            average_to(&w->m[i], x, beta2);
            continue;
        }
        if (averages) average_to(&w->m[i], x, beta1);
        if (!averages) {
            w->m[i] = beta1 * before + x;
            w->u[i] = ahead ? beta1 * w->m[i] + x : w->m[i];
            continue;
        }
        R *v = mini ? &w->row[0][i / w->cols] : &w->v[i], numerator = w->m[i];
        if (!mini) average_to(v, x * x, beta2);
        if (mini && i % w->cols == 0) average_to(v, squares_of(&g[i], w->cols) / w->cols, beta2);
        if (w->rule("nadamw")) numerator = beta1 * w->m[i] + (1 - beta1) * x;
        numerator /= w->bias1;
        if (mixes) average_to(&w->slow[i], x, beta3), numerator += (R)(c->alpha * done) * w->slow[i];
        w->u[i] = numerator / (std::sqrt(*v / w->bias2) + (R)c->eps);
    }
}

// Moves averages by row and column towards the means of x^2 + eps, and divides u by the root of what they stand for.
template <class R>
void divide_by_factors(Whole<R>* w, int k, const std::vector<R>& x, R beta, R eps, R bias) {
    R mean = 0;
    std::vector<R> row((size_t)w->rows), col((size_t)w->cols);
    for (int64_t i = 0; i < w->size(); i++) {
        row[i / w->cols] += (x[i] * x[i] + eps) / w->cols;
        col[i % w->cols] += (x[i] * x[i] + eps) / w->rows;
    }
    for (int64_t i = 0; i < w->rows; i++) average_to(&w->row[k][i], row[i], beta);
    for (int64_t j = 0; j < w->cols; j++) average_to(&w->col[k][j], col[j], beta);
    for (R each : w->row[k]) mean += each / w->rows;
    const R e = w->rule("adafactor") ? (R)w->config->eps1 : 0, least = e * e;
    for (int64_t i = 0; i < w->size(); i++) {
        const R r = std::max(w->row[k][i / w->cols], least) / std::max(mean, w->rows > 1 ? e : least);
        const R square = r * std::max(w->col[k][i % w->cols], least) / bias;
        w->u[i] = w->u[i] == 0 ? 0 : w->u[i] / std::sqrt(square);
    }
}

template <class R>
void oracle_factored(Whole<R>* w, const std::vector<R>& g, int step) {
    const OptimConfig* c = w->config;
    const bool came = w->rule("came");
    const R beta1 = is(c->m, "none") ? 0 : c->beta1,
            beta2 = came ? (R)c->beta2 : (R)(1.0 - pow(step, (float)c->beta2_decay));
    w->u = g;
    divide_by_factors(w, 0, g, beta2, R(0), came ? w->bias2 : R(1));
    const R rms = norm_of(w->u) / std::sqrt((R)w->size()), clip = c->clip_update;
    if (clip > 0 && rms > clip) scale_by(&w->u, clip / rms);
    std::vector<R> rest = w->u;
    for (int64_t i = 0; i < w->size(); i++) average_to(&w->m[i], w->u[i], beta1), rest[i] -= w->m[i];
    w->u = w->m;
    if (came && w->rows > 1)
        divide_by_factors(w, 1, rest, (R)c->beta3, R(1e-16), (R)(1.0 - pow((double)c->beta3, step)));
}

// Rounds averages as the codes of adalog8 do. The oracle in fp32 is off as a logarithm near 126 is in fp32.
template <class R>
void round_codes(std::vector<R>* x) {
    for (size_t first = 0; first < x->size(); first += 2048) {
        const size_t end = std::min(x->size(), first + 2048);
        double most = 0x1p-126;
        for (size_t i = first; i < end; i++) most = fmax(most, (double)(*x)[i]);
        const double gap = (log2(most) + 126.0) / 255.0;
        for (size_t i = first; i < end; i++) {
            const double level = (log2(fmax((double)(*x)[i], 0x1p-126)) + 126.0) / gap;
            (*x)[i] = (R)exp2(floor(level + 0.5) * gap - 126.0 + (std::is_same_v<R, float> ? 0x1p-18 : 0.0));
        }
    }
}

// adafactor8bit and came8bit. The correction of m comes later, since the limit does not see it.
template <class R>
void oracle_package(Whole<R>* w, const std::vector<R>& g, int step) {
    const OptimConfig* c = w->config;
    const bool came = w->rule("came8bit");
    const int pairs = came && w->rows > 1 ? 2 : 1;
    const R beta1 = is(c->m, "none") ? 0 : c->beta1, floor = (R)c->eps * (R)c->eps;
    const R beta2 = came ? (R)c->beta2 : (R)(1.0 - pow(step, (float)c->beta2_decay));
    std::vector<R> rest = g;
    for (int64_t i = 0; i < w->size(); i++) average_to(&w->m[i], g[i], beta1), rest[i] -= w->m[i];
    for (int k = 0; k < pairs; k++) {
        std::vector<R>&row = w->row[k], &col = w->col[k], product[2] = {w->row[0], w->col[0]};
        if (k == 1 && step == 1) row.assign(row.size(), 1), col.assign(col.size(), 1);
        w->u.assign(w->u.size(), 0);  // divide_by_factors divides nothing here
        divide_by_factors(w, k, k ? rest : g, k ? (R)c->beta3 : beta2, R(0), R(1));
        R mean = 0;
        for (size_t i = 0; i < row.size(); i++) {
            product[0][i] = k ? product[0][i] * row[i] : row[i];
            mean += (k ? std::max(product[0][i], floor) : row[i]) / w->rows;
        }
        for (size_t j = 0; j < col.size(); j++) product[1][j] = k ? product[1][j] * col[j] : col[j];
        for (int64_t i = 0; i < w->size(); i++) {
            const R r = std::max(product[0][i / w->cols], floor), of_col = std::max(product[1][i % w->cols], floor);
            const R root = std::sqrt(w->rows > 1 ? r / std::max(mean, (R)c->eps) * of_col : of_col);
            rest[i] /= root, w->u[i] = w->m[i] / root;
        }
    }
    const R rms = norm_of(w->u) / std::sqrt((R)w->size()), clip = c->clip_update;
    if (clip > 0 && rms > clip) scale_by(&w->u, clip / rms);
    for (int k = 0; k < pairs && w->size() >= 4096; k++) round_codes(&w->row[k]), round_codes(&w->col[k]);
}

// Rules with momentum: u is its direction, of which rows are scaled, or the matrix is made orthogonal.
template <class R>
void oracle_directions(Whole<R>* w, const std::vector<R>& g, int step) {
    const OptimConfig* c = w->config;
    const double end = c->momentum, risen = (double)step / (double)c->momentum_warmup;
    const R momentum = (R)(step < c->momentum_warmup ? 0.85 + (end - 0.85) * risen : end);
    const int64_t rows = w->rows, cols = w->cols;
    const bool polar = w->rule("muon") || w->rule("normuon"), by_v = !w->rule("muon") && !w->rule("rmnp");
    const R shape = std::sqrt(rows > cols ? (R)rows / cols : R(1)), look = c->nesterov ? momentum : R(1);
    for (int64_t i = 0; i < w->size(); i++) {
        average_to(&w->m[i], g[i], momentum);
        w->u[i] = g[i] + look * (w->m[i] - g[i]);
    }
    if (norm_of(w->u) == 0) return;
    if (polar) {
        Dense<R> x(rows, cols);
        x.x = w->u;
        if constexpr (std::is_same_v<R, double>) w->rounds ? polar_symmetric(c, &x, true) : polar_plain(c, &x);
        if constexpr (!std::is_same_v<R, double>) polar_plain(c, &x);
        w->u = x.x;
    }
    for (int64_t r = 0; r < rows && !w->rule("muon"); r++) {
        R *u = &w->u[r * cols], *v = &w->row[0][r];
        const R sum = squares_of(u, cols);
        average_to(v, sum / cols, (R)c->beta2);
        const R by = by_v ? std::sqrt(*v) + (polar ? (R)c->eps : R(0)) : std::sqrt(sum) / shape;
        for (int64_t j = 0; j < cols; j++) u[j] = sum == 0 ? 0 : u[j] / by;
    }
    const R norm = norm_of(w->u), all = std::sqrt((R)w->size());
    if (w->rule("muon")) scale_by(&w->u, R(0.2) * std::sqrt((R)(rows > cols ? rows : cols)));
    if (w->rule("normuon")) scale_by(&w->u, R(0.2) * all / (norm + R(1e-7)));
    if (w->rule("normuon-lite")) scale_by(&w->u, shape * std::sqrt((R)rows) / norm);
}

// Rules that project a gradient (low_rank.h). Here the matrix is turned, so that its rows are the channels.

// Element `element` of the random directions. The factor is sqrt(1.5) / 65536, as the step has it, up to 2e-5 of it.
inline double random_direction(const OptimConfig* c, int64_t element, uint32_t refresh) {
    const Noise counter = {{(uint32_t)element, (uint32_t)(element >> 32), 8, refresh}};
    const Noise noise = philox4x32(counter, (uint32_t)c->seed, (uint32_t)(c->seed >> 32), NOISE_ROUNDS);
    double sum = 0.0;
    for (uint32_t word : noise.word) sum += (double)(word & 0xffff) + (double)(word >> 16);
    return (sum - 4.0 * 65535.0) * (double)1.8688408e-5f;
}

// Makes the rows orthonormal, in order, by Gram-Schmidt.
template <class R>
void orthonormal_rows(Dense<R>* y) {
    for (int64_t j = 0; j < y->rows; j++) {
        for (int64_t i = 0; i < 2 * j; i++) {
            R dot = 0;
            for (int64_t k = 0; k < y->cols; k++) dot += y->row(i % j)[k] * y->row(j)[k];
            for (int64_t k = 0; k < y->cols; k++) y->row(j)[k] -= dot * y->row(i % j)[k];
        }
        const R norm = std::sqrt(squares_of(y->row(j), y->cols));
        for (int64_t k = 0; k < y->cols; k++) y->row(j)[k] /= norm;
    }
}

template <class R>
void round_bf16(std::vector<R>* x, bool rounds) {
    for (R& each : *x) each = rounds ? (R)Bf16::decode(Bf16::encode((float)each)) : each;
}

template <class R>
void new_directions(Whole<R>* w, const Dense<R>& g, int64_t rank, int step) {
    const OptimConfig* c = w->config;
    const bool stored = w->rule("galore") || w->rule("fira"), none = w->q.x.empty() || norm_of(w->q.x) == 0;
    const int64_t gap = c->rank_gap > 0 ? c->rank_gap : stored ? 200 : 10;
    const uint32_t refresh = (uint32_t)((step - 1) / gap);
    Dense<R> y = w->q;
    for (auto* each : {&w->m, &w->v, &w->row[0], &w->col[0]}) {
        if (c->rank_reset && (step - 1) % gap == 0) each->assign(each->size(), 0);
    }
    if (stored && !none && (step - 1) % gap != 0) return;
    if (!stored || none) {
        y = Dense<R>(rank, g.cols);
        for (size_t i = 0; i < y.x.size(); i++)
            y.x[i] = (R)(random_direction(c, w->element + (int64_t)i, refresh) / (stored ? 1.0 : sqrt((double)rank)));
    }
    if (norm_of(g.x) == 0 && stored) y = Dense<R>(rank, g.cols);
    for (int i = 0; i < 2 && stored && norm_of(g.x) > 0; i++) {
        y = y * transposed(g) * g;
        orthonormal_rows(&y);
    }
    if (!stored || norm_of(g.x) > 0 || none) w->q = y;
}

template <class R>
void oracle_low_rank(Whole<R>* w, const std::vector<R>& gradient, int step) {
    const OptimConfig* c = w->config;
    const bool turns = w->rows < w->cols, galore = w->rule("galore"), fira = w->rule("fira"),
               mini = w->rule("apollo-mini");
    const int64_t rank = low_shape(c, w->rows, w->cols).rank;
    Dense<R> g(w->rows, w->cols);
    g.x = gradient;
    if (turns) g = transposed(g);
    new_directions(w, g, rank, step);
    Dense<R> q = w->q;
    round_bf16(&q.x, w->rounds);
    const Dense<R> low = g * transposed(q);
    Dense<R> n(low.rows, rank);
    w->m.resize(n.x.size()), w->v.resize(n.x.size());
    w->row[0].resize(low.rows), w->col[0].resize(rank);
    std::vector<R> row((size_t)low.rows), col((size_t)rank);
    for (size_t i = 0; i < n.x.size(); i++) {
        row[i / rank] += low.x[i] * low.x[i] / rank, col[i % rank] += low.x[i] * low.x[i] / low.rows;
    }
    for (int64_t i = 0; i < low.rows; i++) average_to(&w->row[0][i], row[i], (R)c->beta2);
    for (int64_t i = 0; i < rank; i++) average_to(&w->col[0][i], col[i], (R)c->beta2);
    R mean = 0;
    for (R each : w->row[0]) mean += each / low.rows;
    for (size_t i = 0; i < n.x.size(); i++) {
        average_to(&w->m[i], low.x[i], (R)c->beta1);
        average_to(&w->v[i], low.x[i] * low.x[i], (R)c->beta2);
        if (w->rule("apollo-factored")) w->v[i] = w->row[0][i / rank] * w->col[0][i % rank] / std::max(mean, (R)c->eps);
        n.x[i] = w->m[i] / w->bias1 / (std::sqrt(w->v[i] / w->bias2) + (R)c->eps);
    }
    round_bf16(&n.x, w->rounds);
    Dense<R> back = n * q, rest = g;
    const Dense<R> inside = low * q;
    for (int64_t i = 0; i < g.rows; i++) {
        const R of_n = mini ? norm_of(n.x) : std::sqrt(squares_of(n.row(i), rank)),
                of_low = mini ? norm_of(low.x) : std::sqrt(squares_of(low.row(i), rank));
        for (int64_t k = 0; k < g.cols; k++) {
            if (fira) rest.row(i)[k] -= inside.row(i)[k];
            rest.row(i)[k] *= of_n / (of_low + R(1e-8));
        }
    }
    const R norm = norm_of(rest.x), over = norm / (w->last + R(1e-8));
    const R limit = w->last > 0 && over > (R)c->rank_growth ? over / (R)c->rank_growth : 1;
    w->last = norm / limit;
    const R scale = fira ? R(1) : std::sqrt(mini ? R(128) : (R)g.cols / rank);
    scale_by(&back.x, R(0.25)), scale_by(&rest.x, scale / limit);
    for (size_t i = 0; i < g.x.size(); i++) back.x[i] = galore ? back.x[i] : fira ? back.x[i] + rest.x[i] : rest.x[i];
    round_bf16(&back.x, w->rounds);
    w->u = turns ? transposed(back).x : back.x;
}

// One step with gradient g, which is scaled already.
template <class R>
void oracle_step(Whole<R>* w, std::vector<R> g, double rate, int step) {
    const OptimConfig* c = w->config;
    const RuleRow* rule = find_row(rule_table(), c->rule);
    if (has_adafactor_lr(c, "relative")) rate = fmin(rate, 1.0 / sqrt((double)step));
    const double lr = rate * w->settings.lr, share = rate / (double)c->lr_max;
    const bool cautious = is(c->decay_mode, "cautious"), falls = cautious || is(c->decay_mode, "falling");
    const double decay = is(c->decay_mode, "independent") ? share : falls ? lr * share : lr;
    const R keep = rule->decoupled ? (R)(1.0 - decay * w->settings.decay) : R(1);
    w->bias1 = (R)(1.0 - pow((double)c->beta1, step)), w->bias2 = (R)(1.0 - pow((double)c->beta2, step));
    round_bf16(&g, w->rounds && is_low_rank(rule));
    for (int64_t i = 0; i < w->size() && !rule->decoupled; i++) g[i] += (R)w->settings.decay * w->p[i];
    if (is_low_rank(rule)) {
        oracle_low_rank(w, g, step);
    } else if (rule->matrix || rule->has_momentum) {
        oracle_directions(w, g, step);
    } else if (w->rule("adafactor") || w->rule("came")) {
        oracle_factored(w, g, step);
    } else if (is_package(rule->rows)) {
        oracle_package(w, g, step);
    } else {
        oracle_elements(w, g, step);
    }
    R factor = 1;
    const bool has_m = !is(c->m, "none");
    if (has_adafactor_lr(c, "scaled")) factor = std::max((R)c->eps2, norm_of(w->p) / std::sqrt((R)w->size()));
    if (c->limit_growth > 0) {
        const R norm = norm_of(w->u) / (rule->grows && has_m ? w->bias1 : R(1)), most = (R)c->limit_growth * w->last;
        const bool cut = w->last > 0 && norm > most;
        if (cut) factor *= most / norm;
        w->last = cut ? most : norm;
    }
    if (is_package(rule->rows) && has_m && !has_adafactor_lr(c, "relative")) {
        factor *= (w->rule("came8bit") ? std::sqrt(w->bias2) : R(1)) / w->bias1;
    }
    const R close = norm_of(w->u) / std::sqrt((R)w->size()) * R(1e-5);  // too close to zero to call its sign
    for (int64_t i = 0; i < w->size(); i++) {
        const R by = (R)lr * factor * w->u[i];
        const bool away = cautious && rule->matrix && by * w->p[i] < 0;
        w->lost[i] = w->lost[i] || (cautious && std::fabs(w->u[i]) < close);
        w->p[i] = w->p[i] * (away ? R(1) : keep) - by;
        w->moved[i] += std::fabs(by);
    }
}
