// Tests of kernels/attention.cuh. On the CPU: the forward pass against a double-precision one written here from the
// definition, and the backward pass against central differences of that one. On a GPU: forward and backward in bf16
// and fp32 against the plain C version, at lengths that are and are not multiples of the tiles, for heads of 64 and
// 128, and twice for equal bits; in bf16 on Hopper forward both by wgmma and by mma.sync, as other GPUs run it, and
// backward in both directions. A batch large enough that blocks draw several pieces of work is sampled by heads.
// GPU results are compared row by row (a row is one head of one token): the error's norm may be
//   eps * (norm of the row + a tenth of the root mean square norm of all rows).
// bf16: two roundings (p or ds, then the result), each at most 2^-9 of a term, in a sum that may cancel to half the
// norm of its terms: eps = 2^-7. fp32: eps = 2^-23 * 2 (HS + T), the length of the two sums in sequence.
#include "../../kernels/attention.cuh"
#include "test.h"

// out and lse of one batch, in double; qkv as in attention.cuh.
static void reference_forward(double* out, double* lse, const double* qkv, int B, int T, int C, int NH) {
    const int HS = C / NH;
    double* p = (double*)malloc(T * sizeof(double));
    for (int64_t i = 0; i < (int64_t)B * NH * T; i++) {
        int t = i % T, h = i / T % NH;
        int64_t b = i / T / NH;
        const double* q = qkv + (b * T + t) * 3 * C + h * HS;
        double sum = 0.0, *row = out + (b * T + t) * C + h * HS;
        for (int d = 0; d < HS; d++) row[d] = 0.0;
        for (int j = 0; j <= t; j++) {
            const double* k = qkv + (b * T + j) * 3 * C + C + h * HS;
            double score = 0.0;
            for (int d = 0; d < HS; d++) score += q[d] * k[d];
            p[j] = exp(score / sqrt((double)HS));
            sum += p[j];
        }
        for (int j = 0; j <= t; j++)
            for (int d = 0; d < HS; d++) row[d] += p[j] / sum * qkv[(b * T + j) * 3 * C + 2 * C + h * HS + d];
        lse[i] = log(sum);
    }
    free(p);
}

static double reference_loss(const double* weights, double* out, double* lse, const double* qkv, int B, int T, int C,
                             int NH) {
    reference_forward(out, lse, qkv, B, T, C, NH);
    double loss = 0.0;
    for (int64_t i = 0; i < (int64_t)B * T * C; i++) loss += weights[i] * out[i];
    return loss;
}

static void check_gradient_cpu(Test* test, int B, int T, int C, int NH) {
    const int64_t n = (int64_t)B * T * C;
    Device dev = test_device(false);
    float *qkv = (float*)malloc(3 * n * 4), *dqkv = (float*)malloc(3 * n * 4), *want = (float*)malloc(3 * n * 4);
    float *out = (float*)malloc(n * 4), *dout = (float*)malloc(n * 4), *want_out = (float*)malloc(n * 4);
    float *lse = (float*)malloc((int64_t)B * NH * T * 4), *want_lse = (float*)malloc((int64_t)B * NH * T * 4);
    double *qkv_double = (double*)malloc(3 * n * 8), *out_double = (double*)malloc(n * 8);
    double *weights = (double*)malloc(n * 8), *lse_double = (double*)malloc((int64_t)B * NH * T * 8);
    for (int64_t i = 0; i < 3 * n; i++) qkv_double[i] = qkv[i] = 1.5f * test_uniform(1, i), dqkv[i] = NAN;
    for (int64_t i = 0; i < n; i++) weights[i] = dout[i] = test_uniform(2, i), out[i] = NAN;
    reference_forward(out_double, lse_double, qkv_double, B, T, C, NH);
    for (int64_t i = 0; i < n; i++) want_out[i] = (float)out_double[i];
    for (int64_t i = 0; i < B * NH * T; i++) want_lse[i] = (float)lse_double[i], lse[i] = NAN;
    const double step = 1e-4;  // truncation 1e-8, cancellation 1e-11: below fp32's epsilon
    for (int64_t i = 0; i < 3 * n; i++) {
        double kept = qkv_double[i];
        qkv_double[i] = kept + step;
        double above = reference_loss(weights, out_double, lse_double, qkv_double, B, T, C, NH);
        qkv_double[i] = kept - step;
        double below = reference_loss(weights, out_double, lse_double, qkv_double, B, T, C, NH);
        qkv_double[i] = kept;
        want[i] = (float)((above - below) / (2.0 * step));
    }
    attention_forward(&dev, out, lse, qkv, B, T, C, NH);
    attention_backward(&dev, dqkv, (void*)nullptr, dout, qkv, out, lse, B, T, C, NH);
    const double bound = 1.2e-7 * (C / NH + T);  // epsilon times the length of the sums; values are of order 1
    char name[64];
    snprintf(name, sizeof(name), "T%d HS%d", T, C / NH);
    expect_close(test, name, out, want_out, n, bound, bound);
    expect_close(test, "lse", lse, want_lse, (int64_t)B * NH * T, bound, bound);
    expect_close(test, "dqkv", dqkv, want, 3 * n, bound, bound);
    free(qkv), free(dqkv), free(want), free(out), free(dout), free(want_out), free(lse), free(want_lse);
    free(qkv_double), free(out_double), free(weights), free(lse_double);
}

TEST(attention_gradient) {
    check_gradient_cpu(test, 2, 7, 24, 3);
    check_gradient_cpu(test, 1, 13, 36, 2);
}

TEST(attention_gradient_one_token) {
    check_gradient_cpu(test, 3, 1, 16, 2);
}

TEST(attention_gradient_head_size_64) {
    check_gradient_cpu(test, 1, 6, 128, 2);
}

// The larger one; NaN when either is.
static double larger(double a, double b) {
    return a > b || isnan(a) ? a : b;
}

// Root mean square of the norms of `rows` rows of `size` values.
static double mean_norm(const float* values, int64_t rows, int size) {
    double total = 0.0;
    for (int64_t i = 0; i < rows * size; i++) total += (double)values[i] * values[i];
    return sqrt(total / rows);
}

// The largest error of a row over its bound eps * (its norm + common). NaN gives NaN.
static double worst_row(const float* got, const float* want, int64_t rows, int size, double eps, double common) {
    double worst = 0.0;
    for (int64_t r = 0; r < rows; r++) {
        double error = 0.0, norm = 0.0;
        for (int64_t i = r * size; i < (r + 1) * size; i++) {
            error += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
            norm += (double)want[i] * want[i];
        }
        worst = larger(worst, sqrt(error) / (eps * (sqrt(norm) + common)));
    }
    return worst;
}

// Host values on the device as X; the host copy is rounded to X too.
template <typename X>
static X* to_device(const Device* dev, float* values, int64_t n) {
    X* host = (X*)malloc(n * sizeof(X));
    for (int64_t i = 0; i < n; i++) host[i] = from_float<X>(values[i]), values[i] = to_float(host[i]);
    X* device = (X*)device_alloc(dev, n * sizeof(X));
    copy_to_device(dev, device, host, n * sizeof(X));
    free(host);
    return device;
}

// Device values as floats. Both copies are the caller's to free; *bits keeps the values as they were.
template <typename X>
static float* to_host(const Device* dev, const X* device, int64_t n, X** bits) {
    *bits = (X*)malloc(n * sizeof(X));
    float* values = (float*)malloc(n * sizeof(float));
    copy_to_host(dev, *bits, device, n * sizeof(X));
    for (int64_t i = 0; i < n; i++) values[i] = to_float((*bits)[i]);
    return values;
}

// Inputs of a case on both sides. Queries and keys spread the scores by more than 1, as a trained model's do.
template <typename X>
struct GpuCase {
    int B, T, C, NH;
    int64_t n, rows;  // elements of out, rows of lse
    float *qkv, *dout, *out, *lse;
    X *d_qkv, *d_dout, *d_out;
    float* d_lse;
};

template <typename X>
static void case_fill(GpuCase<X>* c, const Device* dev, int B, int T, int HS, int NH, float size) {
    c->B = B, c->T = T, c->C = NH * HS, c->NH = NH;
    c->n = (int64_t)B * T * c->C, c->rows = (int64_t)B * NH * T;
    c->qkv = (float*)malloc(3 * c->n * 4), c->dout = (float*)malloc(c->n * 4);
    c->out = (float*)malloc(c->n * 4), c->lse = (float*)malloc(c->rows * 4);
    for (int64_t i = 0; i < 3 * c->n; i++) c->qkv[i] = size * test_uniform(3 + T, i);
    for (int64_t i = 0; i < c->n; i++) c->dout[i] = 1e-3f * test_uniform(4 + T, i);
    c->d_qkv = to_device<X>(dev, c->qkv, 3 * c->n);
    c->d_dout = to_device<X>(dev, c->dout, c->n);
}

// With the plain C version's out and lse.
template <typename X>
static void case_open(GpuCase<X>* c, const Device* dev, int B, int T, int HS, int NH, float size = 2.0f) {
    case_fill(c, dev, B, T, HS, NH, size);
    attention_forward_cpu(c->out, c->lse, c->qkv, B, T, c->C, NH);
}

template <typename X>
static void case_close(GpuCase<X>* c, const Device* dev) {
    free(c->qkv), free(c->dout), free(c->out), free(c->lse);
    device_free(dev, c->d_qkv), device_free(dev, c->d_dout), device_free(dev, c->d_out), device_free(dev, c->d_lse);
}

// Scores are exact products summed in fp32 for bf16 as well; `length` of the two sums in sequence.
static double worst_lse(const float* got, const float* want, int64_t rows, int length) {
    double worst = 0.0;
    for (int64_t i = 0; i < rows; i++)
        worst = larger(worst, fabs((double)got[i] - want[i]) / (1.2e-7 * length * (1 + fabs(want[i]))));
    return worst;
}

// dq, dk and dv (rows, 3, C) have norms of their own.
template <typename X>
static double worst_gradient(const GpuCase<X>* c, const float* got, const float* want, double eps) {
    const int HS = c->C / c->NH;
    double worst = 0.0;
    float* parts[2] = {(float*)malloc(c->n * 4), (float*)malloc(c->n * 4)};
    for (int part = 0; part < 3; part++) {
        for (int64_t row = 0; row < (int64_t)c->B * c->T; row++)
            for (int i = 0; i < c->C; i++) {
                parts[0][row * c->C + i] = got[(row * 3 + part) * c->C + i];
                parts[1][row * c->C + i] = want[(row * 3 + part) * c->C + i];
            }
        double common = 0.1 * mean_norm(parts[1], c->rows, HS);
        if (c->T == 1 && part < 2) common = mean_norm(c->dout, c->rows, HS);  // dq and dk of one token are zero
        worst = larger(worst, worst_row(parts[0], parts[1], c->rows, HS, eps, common));
    }
    free(parts[0]), free(parts[1]);
    return worst;
}

// Two runs into poisoned memory: equal bits, and each row within its bound.
template <typename X>
static double run_forward(Test* test, GpuCase<X>* c, const Device* dev, double eps,
                          void (*forward)(const Device*, X*, float*, const X*, int, int, int, int)) {
    X* bits[2];
    float* got[2];
    c->d_out = (X*)device_alloc(dev, c->n * sizeof(X));
    c->d_lse = (float*)device_alloc(dev, c->rows * 4);
    for (int run = 0; run < 2; run++) {
        check(cudaMemsetAsync(c->d_out, 0xff, c->n * sizeof(X), dev->stream));
        check(cudaMemsetAsync(c->d_lse, 0xff, c->rows * 4, dev->stream));
        forward(dev, c->d_out, c->d_lse, c->d_qkv, c->B, c->T, c->C, c->NH);
        got[run] = to_host(dev, c->d_out, c->n, &bits[run]);
    }
    expect(memcmp(bits[0], bits[1], c->n * sizeof(X)) == 0, "T %d: two forward runs differ", c->T);
    const int HS = c->C / c->NH;
    double worst = worst_row(got[0], c->out, c->rows, HS, eps, 0.1 * mean_norm(c->out, c->rows, HS));
    float *lse_bits, *lse = to_host(dev, c->d_lse, c->rows, &lse_bits);
    worst = larger(worst, worst_lse(lse, c->lse, c->rows, HS + c->T));
    free(lse), free(lse_bits), free(got[0]), free(got[1]), free(bits[0]), free(bits[1]);
    device_free(dev, c->d_out), device_free(dev, c->d_lse);
    return worst;
}

#ifdef __CUDACC__
static void forward_by_mma(const Device* dev, bf16* out, float* lse, const bf16* qkv, int B, int T, int C, int NH) {
    if (C == NH * 64) return attention_forward_mma<64>(dev, out, lse, qkv, B, T, NH);
    attention_forward_mma<128>(dev, out, lse, qkv, B, T, NH);
}

// With the bias gradient, dqkv has the same bits, and dbias, added to, is the column sums of what is stored.
template <typename X>
static void check_bias(Test* test, const GpuCase<X>* c, const Device* dev, X* d_dqkv, const X* bits,
                       const float* dqkv) {
    const int64_t N = (int64_t)c->B * c->T, columns = 3 * c->C;
    int64_t bytes = attention_backward_scratch_bytes(dev, c->B, c->T, c->C, c->NH);
    const int64_t other = matmul_backward_bias_scratch_bytes(dev, (int)columns);
    bytes = bytes > other ? bytes : other;
    void* scratch = device_alloc(dev, bytes);
    float *d_bias = (float*)device_alloc(dev, columns * 4), *bias = (float*)malloc(columns * 4);
    for (int64_t i = 0; i < columns; i++) bias[i] = test_uniform(9, i);
    copy_to_device(dev, d_bias, bias, columns * 4);
    check(cudaMemsetAsync(scratch, 0xff, bytes, dev->stream));
    check(cudaMemsetAsync(d_dqkv, 0xff, 3 * c->n * sizeof(X), dev->stream));
    attention_backward_bias(dev, d_dqkv, d_bias, scratch, c->d_dout, c->d_qkv, c->d_out, c->d_lse, c->B, c->T, c->C,
                            c->NH, true);
    X* again;
    free(to_host(dev, d_dqkv, 3 * c->n, &again));
    expect(memcmp(bits, again, 3 * c->n * sizeof(X)) == 0, "T %d: dqkv differs where the bias gradient is wanted",
           c->T);
    copy_to_host(dev, bias, d_bias, columns * 4);
    for (int64_t i = 0; i < columns; i++) {
        double want = test_uniform(9, i), size = fabs(want);
        for (int64_t n = 0; n < N; n++) want += dqkv[n * columns + i], size += fabs(dqkv[n * columns + i]);
        const double bound = 1.2e-7 * 32 * size;  // an addition's error, once for each of the longest chain's levels
        expect(fabs(bias[i] - want) <= bound, "T %d: bias gradient %lld is %.9g, not %.9g: off by %.3g times the bound",
               c->T, (long long)i, bias[i], want, fabs(bias[i] - want) / bound);
    }
    free(bias), free(again);
    device_free(dev, d_bias), device_free(dev, scratch);
}

// From the plain C version's out and lse, so that the backward pass is tested by itself.
template <typename X>
static double run_backward(Test* test, GpuCase<X>* c, const Device* dev, double eps) {
    const int64_t bytes = attention_backward_scratch_bytes(dev, c->B, c->T, c->C, c->NH);
    X *bits[2], *d_dqkv = (X*)device_alloc(dev, 3 * c->n * sizeof(X));
    float *got[2], *want = (float*)malloc(3 * c->n * 4);
    void* scratch = device_alloc(dev, bytes);
    c->d_out = to_device<X>(dev, c->out, c->n);
    c->d_lse = (float*)device_alloc(dev, c->rows * 4);
    copy_to_device(dev, c->d_lse, c->lse, c->rows * 4);
    for (int run = 0; run < 2; run++) {
        check(cudaMemsetAsync(d_dqkv, 0xff, 3 * c->n * sizeof(X), dev->stream));
        check(cudaMemsetAsync(scratch, 0xff, bytes, dev->stream));
        attention_backward<X>(dev, d_dqkv, scratch, c->d_dout, c->d_qkv, c->d_out, c->d_lse, c->B, c->T, c->C, c->NH);
        got[run] = to_host(dev, d_dqkv, 3 * c->n, &bits[run]);
    }
    expect(memcmp(bits[0], bits[1], 3 * c->n * sizeof(X)) == 0, "T %d: two backward runs differ", c->T);
    attention_backward_cpu(want, c->dout, c->qkv, c->out, c->lse, c->B, c->T, c->C, c->NH);
    double worst = worst_gradient(c, got[0], want, eps);
    check_bias(test, c, dev, d_dqkv, bits[0], got[0]);
    free(got[0]), free(got[1]), free(bits[0]), free(bits[1]), free(want);
    device_free(dev, scratch), device_free(dev, d_dqkv);
    return worst;
}

template <typename X>
static void check_gpu(Test* test, int HS) {
    static const int lengths[] = {1, 37, 64, 100, 129, 192, 320, 1000, 1024, 2100};
    Device dev = test_device(true);
    double worst_forward = 0.0, worst_backward = 0.0;
    for (int T : lengths) {
        const int B = T > 2000 ? 1 : 2, NH = T > 2000 ? 2 : 3;
        const double eps = sizeof(X) == 2 ? 1.0 / 128 : 2.4e-7 * (HS + T);
        GpuCase<X> c;
        case_open(&c, &dev, B, T, HS, NH);
        double forward = run_forward(test, &c, &dev, eps, attention_forward<X>);
        if constexpr (sizeof(X) == 2) forward = larger(forward, run_forward(test, &c, &dev, eps, forward_by_mma));
        double backward = run_backward(test, &c, &dev, eps);
        expect(forward <= 1.0, "T %d HS %d: forward is off by %.3g times the bound", T, HS, forward);
        expect(backward <= 1.0, "T %d HS %d: backward is off by %.3g times the bound", T, HS, backward);
        worst_forward = larger(worst_forward, forward), worst_backward = larger(worst_backward, backward);
        case_close(&c, &dev);
    }
    snprintf(test->note, sizeof(test->note), "forward %.2f, backward %.2f of bound", worst_forward, worst_backward);
    device_close(&dev);
}

TEST(attention_bf16_head_size_64_gpu) {
    check_gpu<bf16>(test, 64);
}

TEST(attention_bf16_head_size_128_gpu) {
    check_gpu<bf16>(test, 128);
}

// Scores whose largest value lies tens and thousands of powers of two over those seen before: one probability is
// near 1.
TEST(attention_bf16_far_scores_gpu) {
    Device dev = test_device(true);
    double worst = 0.0;
    for (int HS = 64; HS <= 128; HS += 64)
        for (float size : {6.0f, 10.0f, 40.0f}) {
            GpuCase<bf16> c;
            case_open(&c, &dev, 1, 500, HS, 3, size);
            double forward = run_forward(test, &c, &dev, 1.0 / 128, attention_forward<bf16>);
            expect(forward <= 1.0, "size %g HS %d: forward is off by %.3g times the bound", size, HS, forward);
            worst = larger(worst, forward);
            free(c.qkv), free(c.dout), free(c.out), free(c.lse);
            device_free(&dev, c.d_qkv), device_free(&dev, c.d_dout);
        }
    snprintf(test->note, sizeof(test->note), "%.2f of bound", worst);
}

TEST(attention_fp32_head_size_64_gpu) {
    check_gpu<float>(test, 64);
}

TEST(attention_fp32_head_size_128_gpu) {
    check_gpu<float>(test, 128);
}

// One head of one batch, (T, parts, HS), from (B, T, parts, NH, HS).
static void head_take(float* head, const float* all, int T, int parts, int NH, int HS, int64_t bh) {
    for (int64_t i = 0; i < (int64_t)T * parts; i++)
        memcpy(head + i * HS, all + ((bh / NH * T * parts + i) * NH + bh % NH) * HS, HS * sizeof(float));
}

// The larger of the forward and of the backward errors of a head, over its bound. The plain C version's backward pass
// gets the GPU's out and lse.
static double check_head(const GpuCase<bf16>* c, const float* dqkv, int64_t bh) {
    const int T = c->T, HS = c->C / c->NH;
    const int64_t n = (int64_t)T * HS;
    const double eps = 1.0 / 128;
    float* memory = (float*)malloc((12 * n + T) * sizeof(float));
    float *qkv = memory, *dout = qkv + 3 * n, *got_out = dout + n, *want_out = got_out + n, *got = want_out + n;
    float *want = got + 3 * n, *want_lse = want + 3 * n, *lse = c->lse + bh * T;
    head_take(qkv, c->qkv, T, 3, c->NH, HS, bh), head_take(dout, c->dout, T, 1, c->NH, HS, bh);
    head_take(got_out, c->out, T, 1, c->NH, HS, bh), head_take(got, dqkv, T, 3, c->NH, HS, bh);
    attention_forward_cpu(want_out, want_lse, qkv, 1, T, HS, 1);
    attention_backward_cpu(want, dout, qkv, got_out, lse, 1, T, HS, 1);
    GpuCase<bf16> head = {1, T, HS, 1, n, T, qkv, dout, got_out, lse, nullptr, nullptr, nullptr, nullptr};
    double worst = worst_row(got_out, want_out, T, HS, eps, 0.1 * mean_norm(want_out, T, HS));
    worst = larger(worst, worst_lse(lse, want_lse, T, HS + T));
    worst = larger(worst, worst_gradient(&head, got, want, eps));
    free(memory);
    return worst;
}

// Computes on the GPU twice, into poisoned memory: c->out and c->lse, and dqkv, which the caller frees.
static float* run_both(Test* test, GpuCase<bf16>* c, const Device* dev) {
    const int64_t scratch_bytes = attention_backward_scratch_bytes(dev, c->B, c->T, c->C, c->NH);
    bf16 *d_dqkv = (bf16*)device_alloc(dev, 3 * c->n * 2), *bits[2][2];
    char* scratch = (char*)device_alloc(dev, scratch_bytes);
    float *lse_bits, *values[2];
    c->d_out = (bf16*)device_alloc(dev, c->n * 2), c->d_lse = (float*)device_alloc(dev, c->rows * 4);
    for (int run = 0; run < 2; run++) {
        check(cudaMemsetAsync(c->d_out, 0xff, c->n * 2, dev->stream));
        check(cudaMemsetAsync(c->d_lse, 0xff, c->rows * 4, dev->stream));
        check(cudaMemsetAsync(d_dqkv, 0xff, 3 * c->n * 2, dev->stream));
        check(cudaMemsetAsync(scratch, 0xff, scratch_bytes, dev->stream));
        attention_forward<bf16>(dev, c->d_out, c->d_lse, c->d_qkv, c->B, c->T, c->C, c->NH);
        attention_backward<bf16>(dev, d_dqkv, scratch, c->d_dout, c->d_qkv, c->d_out, c->d_lse, c->B, c->T, c->C,
                                 c->NH);
        free(c->out), c->out = to_host(dev, c->d_out, c->n, &bits[run][0]);
        values[run] = to_host(dev, d_dqkv, 3 * c->n, &bits[run][1]);
    }
    free(c->lse), c->lse = to_host(dev, c->d_lse, c->rows, &lse_bits);
    expect(memcmp(bits[0][0], bits[1][0], c->n * 2) == 0, "two forward runs differ");
    expect(memcmp(bits[0][1], bits[1][1], 3 * c->n * 2) == 0, "two backward runs differ");
    for (auto& run : bits) free(run[0]), free(run[1]);
    free(lse_bits), free(values[0]);
    device_free(dev, d_dqkv), device_free(dev, scratch);
    return values[1];
}

// On Hopper a block stays and draws work: 576 pieces forward for heads of 64, 768 for 128, and 768 tiles of keys
// backward, so that of 132 blocks each goes on from one to the next several times. Every fifth head is compared,
// the last one too.
TEST(attention_bf16_many_pieces_gpu) {
    const int B = 8, T = 1000, NH = 12;
    Device dev = test_device(true);
    double worst = 0.0;
    for (int HS = 64; HS <= 128; HS += 64) {
        GpuCase<bf16> c;
        case_fill(&c, &dev, B, T, HS, NH, 2.0f);
        float* dqkv = run_both(test, &c, &dev);
        const int heads = (B * NH - 1) / 5 + 1;
        double own[B * NH];
#pragma omp parallel for schedule(dynamic)
        for (int i = 0; i < heads; i++) own[i] = check_head(&c, dqkv, 5 * i);
        for (int i = 0; i < heads; i++) {
            expect(own[i] <= 1.0, "head %d of size %d is off by %.3g times the bound", 5 * i, HS, own[i]);
            worst = larger(worst, own[i]);
        }
        free(dqkv);
        case_close(&c, &dev);
    }
    snprintf(test->note, sizeof(test->note), "%.2f of bound", worst);
}

// The same sequence B times must give the same bits B times. Compares every `step`-th batch and the last with the
// first.
static void check_equal_batches(Test* test, const Device* dev, int B, int T, int C, int NH, int step) {
    const int64_t n = (int64_t)T * C;
    float *qkv = (float*)malloc(3 * n * 4), *dout = (float*)malloc(n * 4);
    for (int64_t i = 0; i < 3 * n; i++) qkv[i] = 2.0f * test_uniform(5, i);
    for (int64_t i = 0; i < n; i++) dout[i] = test_uniform(6, i);
    bf16 *one_qkv = to_device<bf16>(dev, qkv, 3 * n), *one_dout = to_device<bf16>(dev, dout, n);
    bf16 *d_qkv = (bf16*)device_alloc(dev, B * 3 * n * 2), *d_dqkv = (bf16*)device_alloc(dev, B * 3 * n * 2);
    bf16 *d_dout = (bf16*)device_alloc(dev, B * n * 2), *d_out = (bf16*)device_alloc(dev, B * n * 2);
    float* d_lse = (float*)device_alloc(dev, (int64_t)B * NH * T * 4);
    void* scratch = device_alloc(dev, attention_backward_scratch_bytes(dev, B, T, C, NH));
    for (int b = 0; b < B; b++) {
        check(cudaMemcpyAsync(d_qkv + b * 3 * n, one_qkv, 3 * n * 2, cudaMemcpyDeviceToDevice, dev->stream));
        check(cudaMemcpyAsync(d_dout + b * n, one_dout, n * 2, cudaMemcpyDeviceToDevice, dev->stream));
    }
    check(cudaMemsetAsync(d_dqkv, 0xff, B * 3 * n * 2, dev->stream));
    attention_forward<bf16>(dev, d_out, d_lse, d_qkv, B, T, C, NH);
    attention_backward<bf16>(dev, d_dqkv, scratch, d_dout, d_qkv, d_out, d_lse, B, T, C, NH);
    bf16 *out, *dqkv, *first_out, *first_dqkv;
    free(to_host(dev, d_out, n, &first_out)), free(to_host(dev, d_dqkv, 3 * n, &first_dqkv));
    for (int64_t i = 0; i < 3 * n; i++) expect(!isnan(to_float(first_dqkv[i])), "gradient %lld is NaN", (long long)i);
    for (int64_t b = step; b < B + step; b += step) {
        if (b > B - 1) b = B - 1;
        free(to_host(dev, d_out + b * n, n, &out)), free(to_host(dev, d_dqkv + b * 3 * n, 3 * n, &dqkv));
        expect(memcmp(out, first_out, n * 2) == 0, "out of batch %lld differs", (long long)b);
        expect(memcmp(dqkv, first_dqkv, 3 * n * 2) == 0, "dqkv of batch %lld differs", (long long)b);
        free(out), free(dqkv);
        if (b == B - 1) break;
    }
    free(qkv), free(dout), free(first_out), free(first_dqkv);
    device_free(dev, one_qkv), device_free(dev, one_dout), device_free(dev, d_qkv), device_free(dev, d_dqkv);
    device_free(dev, d_dout), device_free(dev, d_out), device_free(dev, d_lse), device_free(dev, scratch);
}

// More blocks than the GPU runs at a time, so that blocks wait for blocks of another wave.
TEST(attention_bf16_many_blocks_gpu) {
    Device dev = test_device(true);
    for (int run = 0; run < 3; run++) check_equal_batches(test, &dev, 96, 777, 128, 2, 1);
    check_equal_batches(test, &dev, 64, 777, 256, 2, 1);
}

// qkv of more than 2^31 elements.
TEST(attention_bf16_large_gpu) {
    Device dev = test_device(true);
    const bool fits = dev.memory > (int64_t)24 << 30;
    if (fits) check_equal_batches(test, &dev, 7300, 777, 128, 2, 900);
    device_close(&dev);
    if (!fits) skip("needs 24 GiB of GPU memory");
}

// The order of dq rests on flags, not on timing: a launch in which every other tile of keys takes ten times as long
// gives the same bits. What the tiles add up is poisoned first, so a tile that did not wait would give NaN. The even
// launch is compared with the plain C version: the trainer takes one of two directions for each size of heads.
template <int HS, typename Even, typename Uneven>
static void check_uneven(Test* test, const Device* dev, int B, int T, Even even, Uneven uneven) {
    const int NH = 2, C = NH * HS;
    const int64_t n = (int64_t)B * T * C, bytes = attention_backward_scratch_bytes(dev, B, T, C, NH);
    GpuCase<bf16> c;
    case_open(&c, dev, B, T, HS, NH);
    c.d_out = to_device<bf16>(dev, c.out, n);
    c.d_lse = (float*)device_alloc(dev, c.rows * 4);
    copy_to_device(dev, c.d_lse, c.lse, c.rows * 4);
    char* scratch = (char*)device_alloc(dev, bytes);
    bf16 *bits[2], *d_dqkv = (bf16*)device_alloc(dev, 3 * n * 2);
    float *got[2], *want = (float*)malloc(3 * n * 4);
    for (int run = 0; run < 2; run++) {
        check(cudaMemsetAsync(d_dqkv, 0xff, 3 * n * 2, dev->stream));
        check(cudaMemsetAsync(scratch, 0xff, bytes, dev->stream));
        if (run == 0)
            even(d_dqkv, scratch, c);
        else
            uneven(d_dqkv, scratch, c);
        got[run] = to_host(dev, d_dqkv, 3 * n, &bits[run]);
    }
    expect(memcmp(bits[0], bits[1], 3 * n * 2) == 0, "HS %d: dqkv depends on the speed of the blocks", HS);
    attention_backward_cpu(want, c.dout, c.qkv, c.out, c.lse, B, T, C, NH);
    double worst = worst_gradient(&c, got[0], want, 1.0 / 128);
    expect(worst <= 1.0, "HS %d T %d: off by %.3g times the bound", HS, T, worst);
    free(bits[0]), free(bits[1]), free(got[0]), free(got[1]), free(want);
    device_free(dev, d_dqkv), device_free(dev, scratch);
    case_close(&c, dev);
}

TEST(attention_bf16_uneven_blocks_gpu) {
    Device dev = test_device(true);
    auto even = [&](bf16* dqkv, char* scratch, const GpuCase<bf16>& c) {
        attention_backward_any<bf16, 64>(&dev, dqkv, scratch, c.d_dout, c.d_qkv, c.d_out, c.d_lse, c.B, c.T, c.NH);
    };
    check_uneven<64>(test, &dev, 2, 700, even, [&](bf16* dqkv, char* scratch, const GpuCase<bf16>& c) {
        const AttentionScratch sizes = attention_scratch(c.B, c.T, c.C, c.NH);
        even(dqkv, scratch, c);  // leaves D
        check(cudaMemsetAsync(dqkv, 0xff, 3 * c.n * 2, dev.stream));
        check(cudaMemsetAsync(scratch + sizes.flags + sizes.D, 0xff, sizes.dq_sum, dev.stream));
        attention_backward_bf16<BackwardShape<64, 64, true>>(&dev, dqkv, scratch, sizes, c.d_dout, c.d_qkv, c.d_lse,
                                                             c.B, c.T, c.NH);
    });
}

template <int HS, int BM, bool UP>
static void check_uneven_hopper(Test* test, const Device* dev, int B, int T) {
    auto even = [&](bf16* dqkv, char* scratch, const GpuCase<bf16>& c) {
        attention_hopper_backward<HopperBackwardShape<HS, BM, UP, false>>(dev, dqkv, scratch, c.d_dout, c.d_qkv,
                                                                          c.d_out, c.d_lse, c.B, c.T, c.NH);
    };
    check_uneven<HS>(test, dev, B, T, even, [&](bf16* dqkv, char* scratch, const GpuCase<bf16>& c) {
        attention_hopper_backward<HopperBackwardShape<HS, BM, UP, true>>(dev, dqkv, scratch, c.d_dout, c.d_qkv, c.d_out,
                                                                         c.d_lse, c.B, c.T, c.NH);
    });
}

TEST(attention_hopper_uneven_blocks_gpu) {
    Device dev = test_device(true);
    const bool hopper =
        dev.compute == 90 && hopper_kernel_is_built(attention_hopper_backward_kernel<HopperBackward<64>>);
    if (hopper) {
        for (int T : {700, 2100}) {
            const int B = T < 1000 ? 2 : 1;
            check_uneven_hopper<64, 128, false>(test, &dev, B, T);
            check_uneven_hopper<64, 128, true>(test, &dev, B, T);
            check_uneven_hopper<128, 64, false>(test, &dev, B, T);
            check_uneven_hopper<128, 64, true>(test, &dev, B, T);
        }
    }
    device_close(&dev);
    if (!hopper) skip("needs a GPU of compute capability 9.0 and a build for sm_90a");
}
#endif

// For `make sanitize`, whose race checker is slow: attention alone, several tiles, a ragged last one, on a GPU that is
// said to have two multiprocessors, so that blocks draw several tiles and use all of their shared memory again. The
// second run takes the bias gradient along, which is the sum of dqkv's rows but for the rounding of each.
template <typename X>
static void attention_twice(Test* test, const Device* dev, int T, int C, int NH) {
    int64_t n = (int64_t)2 * T * C;
    X* host = (X*)malloc(3 * n * sizeof(X));
    for (int64_t i = 0; i < 3 * n; i++) host[i] = from_float<X>(test_uniform(6, i));
    X *qkv = (X*)device_alloc(dev, 3 * n * sizeof(X)), *dqkv = (X*)device_alloc(dev, 3 * n * sizeof(X));
    X *out = (X*)device_alloc(dev, n * sizeof(X)), *dout = (X*)device_alloc(dev, n * sizeof(X));
    X* dbias = (X*)device_alloc(dev, 3 * C * sizeof(X));
    float* lse = (float*)device_alloc(dev, (int64_t)2 * NH * T * 4);
    int64_t bytes = attention_backward_scratch_bytes(dev, 2, T, C, NH);
    const int64_t other = matmul_backward_bias_scratch_bytes(dev, 3 * C);
    void* scratch = device_alloc(dev, bytes > other ? bytes : other);
    copy_to_device(dev, qkv, host, 3 * n * sizeof(X));
    copy_to_device(dev, dout, host, n * sizeof(X));
    X* result[2];
    for (int run = 0; run < 2; run++) {
        attention_forward<X>(dev, out, lse, qkv, 2, T, C, NH);
        if (run == 0) attention_backward<X>(dev, dqkv, scratch, dout, qkv, out, lse, 2, T, C, NH);
        if (run == 1) attention_backward_bias(dev, dqkv, dbias, scratch, dout, qkv, out, lse, 2, T, C, NH, false);
        result[run] = (X*)malloc(4 * n * sizeof(X));
        copy_to_host(dev, result[run], dqkv, 3 * n * sizeof(X));
        copy_to_host(dev, result[run] + 3 * n, out, n * sizeof(X));
    }
    X* bias = (X*)malloc(3 * C * sizeof(X));
    copy_to_host(dev, bias, dbias, 3 * C * sizeof(X));
    for (int64_t c = 0; c < 3 * C; c++) {
        double sum = 0.0, size = 0.0, unit = sizeof(X) == 2 ? 0x1p-8 : 0x1p-16;
        for (int64_t t = 0; t < 2 * T; t++) {
            sum += to_float(result[1][t * 3 * C + c]);
            size += fabs(to_float(result[1][t * 3 * C + c]));
        }
        // The key's bias has no gradient: all that is left of it is rounding, and the bound is of the terms.
        expect(fabs(to_float(bias[c]) - sum) <= unit * size, "T %d: bias %lld is %g, not %g", T, (long long)c,
               to_float(bias[c]), sum);
    }
    expect(memcmp(result[0], result[1], 4 * n * sizeof(X)) == 0, "T %d, heads of %d: other bits", T, C / NH);
    for (int64_t i = 0; i < 4 * n; i++) {
        if (!isfinite(to_float(result[0][i]))) {
            expect(false, "T %d: element %lld is not finite", T, (long long)i);
            break;
        }
    }
    for (void* block : {(void*)qkv, (void*)dqkv, (void*)out, (void*)dout, (void*)dbias, (void*)lse, scratch})
        device_free(dev, block);
    free(host), free(bias), free(result[0]), free(result[1]);
}

TEST(attention_race_gpu) {
    Device dev = test_device(true);
    dev.sm_count = 2;
    const int computes[] = {dev.compute, 80};  // the kernels of this GPU, and those of older ones
    for (int compute : computes) {
        dev.compute = compute;
        for (int HS = 64; HS <= 128; HS *= 2) attention_twice<bf16>(test, &dev, 200, 2 * HS, 2);
    }
    for (int HS = 64; HS <= 128; HS *= 2) attention_twice<float>(test, &dev, 70, 2 * HS, 2);
}
