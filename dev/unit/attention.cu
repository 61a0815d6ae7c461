// Tests of kernels/attention.cuh. On a GPU (model_golden holds the plain C version to PyTorch): forward and backward in
// bf16 and fp32 against the plain C version, at lengths that are and are not multiples of the tiles, for heads of 64
// and 128, and twice for equal bits; in bf16 on Hopper forward both by wgmma and by mma.sync, as other GPUs run it, and
// backward in both directions. A batch large enough that blocks draw several pieces of work is sampled by heads. The
// ways of other cards are tried by a device that is said to be one: its compute capability and shared memory choose.
// GPU results are compared row by row (a row is one head of one token): the error's norm may be
//   eps * (norm of the row + a tenth of the root mean square norm of all rows).
// bf16: two roundings (p or ds, then the result), each at most 2^-9 of a term, in a sum that may cancel to half the
// norm of its terms: eps = 2^-7. fp32: eps = 2^-23 * 2 (HS + T), the length of the two sums in sequence.
#include "../../kernels/attention.cuh"
#include "apart.h"
#include "kernels.h"

// Heads of 128 are refused in the plan where a block has too little shared memory for them, with the way out.
TEST(attention_wide_heads_refused) {
    for (int NH : {6, 3}) {  // of 64 and of 128 channels
        const Ended its = run_apart([NH] {
            Device dev = {};
            dev.gpu = true, dev.compute = 89, dev.sm_count = 128, dev.shared_memory = 99 << 10;
            if (attention_backward_scratch_bytes(&dev, 4, 1024, 384, NH) <= 0) abort();
        });
        NH == 6 ? expect_ended(test, its, 0) : expect_ended(test, its, 2, {"heads of 128", "--heads 6"});
    }
}

// The larger one; NaN when either is.
static double larger(double a, double b) {
    return a > b || isnan(a) ? a : b;
}

// Returns the root mean square of the norms of `rows` rows of `size` values.
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

// Inputs of a case on both sides. Queries and keys spread the scores by more than 1, as a trained model's do.
template <typename X>
struct GpuCase : Room {
    int B, T, C, NH;
    int64_t n, rows;  // elements of out, rows of lse
    float *qkv, *dout, *out, *lse;
    X *d_qkv, *d_dout, *d_out;
    float *d_lse, *d_dbias;  // dbias (3C) is added to

    GpuCase(const Device* dev, int batch, int length, int HS, int heads, float size = 2.0f)
        : Room(dev), B(batch), T(length), C(heads * HS), NH(heads), n((int64_t)B * T * C), rows((int64_t)B * NH * T) {
        qkv = host<float>(3 * n), dout = host<float>(n), out = host<float>(n), lse = host<float>(rows);
        d_out = device<X>(n), d_lse = device<float>(rows), d_dbias = device<float>(3 * C);
        for (int64_t i = 0; i < 3 * n; i++) qkv[i] = size * test_uniform(3 + T, i);
        for (int64_t i = 0; i < n; i++) dout[i] = 1e-3f * test_uniform(4 + T, i);
        d_qkv = rounded(qkv, 3 * n), d_dout = rounded(dout, n);
    }

    // Host values on the device as X; the host copy is rounded to X too.
    X* rounded(float* values, int64_t count) {
        X* bits = host<X>(count);
        for (int64_t i = 0; i < count; i++) bits[i] = from_float<X>(values[i]), values[i] = to_float(bits[i]);
        return to_device(bits, count);
    }

    // Device values as floats; *bits keeps them as they were.
    float* floats_of(const X* from, int64_t count, X** bits) {
        float* values = host<float>(count);
        *bits = to_host(from, count);
        for (int64_t i = 0; i < count; i++) values[i] = to_float((*bits)[i]);
        return values;
    }

    void solve() { attention_forward_cpu(out, lse, qkv, B, T, C, NH); }

    void hand_over() {
        d_out = rounded(out, n);
        copy_to_device(dev, d_lse, lse, rows * 4);
    }
};

// Memory for a backward pass with the bias gradient.
static char* backward_scratch(Room* room, int B, int T, int C, int NH, int64_t* bytes) {
    const int64_t bias = matmul_backward_bias_scratch_bytes(room->dev, 3 * C);
    *bytes = attention_backward_scratch_bytes(room->dev, B, T, C, NH);
    *bytes = *bytes > bias ? *bytes : bias;
    return room->device<char>(*bytes);
}

static void poison(const Device* dev, void* memory, int64_t bytes) {
    check(cudaMemsetAsync(memory, 0xff, bytes, dev->stream));
}

// Scores are exact products summed in fp32 for bf16 as well; `length` of the two sums in sequence.
static double worst_lse(const float* got, const float* want, int64_t rows, int length) {
    double worst = 0.0;
    for (int64_t i = 0; i < rows; i++)
        worst = larger(worst, fabs((double)got[i] - want[i]) / (1.2e-7 * length * (1 + fabs(want[i]))));
    return worst;
}

// dq, dk and dv (rows, 3, C) have norms of their own.
static double worst_gradient(const float* dout, const float* got, const float* want, int64_t N, int C, int HS,
                             bool one_token, double eps) {
    const int64_t rows = N * C / HS;
    double worst = 0.0;
    Room room(nullptr);
    float *of_got = room.host<float>(N * C), *of_want = room.host<float>(N * C);
    for (int part = 0; part < 3; part++) {
        for (int64_t i = 0; i < N * C; i++) {
            const int64_t at = (i / C * 3 + part) * C + i % C;
            of_got[i] = got[at], of_want[i] = want[at];
        }
        double common = 0.1 * mean_norm(of_want, rows, HS);
        if (one_token && part < 2) common = mean_norm(dout, rows, HS);  // dq and dk of one token are zero
        worst = larger(worst, worst_row(of_got, of_want, rows, HS, eps, common));
    }
    return worst;
}

template <typename X>
static double worst_gradient(const GpuCase<X>* c, const float* got, const float* want, double eps) {
    return worst_gradient(c->dout, got, want, (int64_t)c->B * c->T, c->C, c->C / c->NH, c->T == 1, eps);
}

// Two runs into poisoned memory: equal bits, and each row within its bound.
template <typename X>
static double run_forward(Test* test, GpuCase<X>* c, double eps,
                          void (*forward)(const Device*, X*, float*, const X*, int, int, int, int)) {
    X* bits[2];
    float* got = nullptr;
    for (int run = 0; run < 2; run++) {
        poison(c->dev, c->d_out, c->n * sizeof(X)), poison(c->dev, c->d_lse, c->rows * 4);
        forward(c->dev, c->d_out, c->d_lse, c->d_qkv, c->B, c->T, c->C, c->NH);
        got = c->floats_of(c->d_out, c->n, &bits[run]);
    }
    expect(memcmp(bits[0], bits[1], c->n * sizeof(X)) == 0, "T %d: two forward runs differ", c->T);
    const int HS = c->C / c->NH;
    double worst = worst_row(got, c->out, c->rows, HS, eps, 0.1 * mean_norm(c->out, c->rows, HS));
    return larger(worst, worst_lse(c->to_host(c->d_lse, c->rows), c->lse, c->rows, HS + c->T));
}

#ifdef __CUDACC__
static void forward_by_mma(const Device* dev, bf16* out, float* lse, const bf16* qkv, int B, int T, int C, int NH) {
    Device older = *dev;
    older.compute = 80;
    attention_forward(&older, out, lse, qkv, B, T, C, NH);
}

// dbias, to which a pass has added, is the column sums of what is stored.
template <typename X>
static void check_bias(Test* test, GpuCase<X>* c, const float* dqkv) {
    const int64_t N = (int64_t)c->B * c->T, columns = 3 * c->C;
    const float* bias = c->to_host(c->d_dbias, columns);
    for (int64_t i = 0; i < columns; i++) {
        double want = test_uniform(9, i), size = fabs(want);
        for (int64_t n = 0; n < N; n++) want += dqkv[n * columns + i], size += fabs(dqkv[n * columns + i]);
        const double bound = 1.2e-7 * 32 * size;  // an addition's error, once for each of the longest chain's levels
        expect(fabs(bias[i] - want) <= bound, "T %d: bias gradient %lld is %.9g, not %.9g: off by %.3g times the bound",
               c->T, (long long)i, bias[i], want, fabs(bias[i] - want) / bound);
    }
}

// Runs `backward` twice, given whether it is the second run, into poisoned memory: equal bits, and each row within its
// bound. It begins with the plain C version's out and lse, so that it is tested by itself.
template <typename X, typename Backward>
static double run_backward(Test* test, GpuCase<X>* c, double eps, bool with_bias, Backward backward) {
    int64_t bytes;
    X *bits[2], *d_dqkv = c->template device<X>(3 * c->n);
    float *got[2], *want = c->template host<float>(3 * c->n);
    char* scratch = backward_scratch(c, c->B, c->T, c->C, c->NH, &bytes);
    float* bias = c->template host<float>(3 * c->C);
    for (int64_t i = 0; i < 3 * c->C; i++) bias[i] = test_uniform(9, i);
    c->hand_over();
    for (int run = 0; run < 2; run++) {
        copy_to_device(c->dev, c->d_dbias, bias, 3 * c->C * sizeof(float));
        poison(c->dev, d_dqkv, 3 * c->n * sizeof(X)), poison(c->dev, scratch, bytes);
        backward(run == 1, d_dqkv, scratch);
        got[run] = c->floats_of(d_dqkv, 3 * c->n, &bits[run]);
    }
    expect(memcmp(bits[0], bits[1], 3 * c->n * sizeof(X)) == 0, "T %d, heads of %d: two backward runs differ", c->T,
           c->C / c->NH);
    attention_backward_cpu(want, c->dout, c->qkv, c->out, c->lse, c->B, c->T, c->C, c->NH);
    if (with_bias) check_bias(test, c, got[0]);
    return worst_gradient(c, got[0], want, eps);
}

// Checks the way that `card` takes; if `whole`, also mma.sync's forward pass and the bias gradient.
template <typename X>
static void check_gpu(Test* test, const Device* card, int HS, bool whole, std::initializer_list<int> lengths) {
    double worst_forward = 0.0, worst_backward = 0.0;
    for (int T : lengths) {
        const double eps = sizeof(X) == 2 ? 1.0 / 128 : 2.4e-7 * (HS + T);
        GpuCase<X> c(card, T > 2000 ? 1 : 2, T, HS, T > 2000 ? 2 : 3);
        c.solve();
        double forward = run_forward(test, &c, eps, attention_forward<X>);
        if constexpr (sizeof(X) == 2) {
            if (whole) forward = larger(forward, run_forward(test, &c, eps, forward_by_mma));
        }
        double backward = run_backward(test, &c, eps, whole, [&](bool, X* dqkv, char* scratch) {
            attention_backward(card, dqkv, c.d_dbias, scratch, c.d_dout, c.d_qkv, c.d_out, c.d_lse, c.B, T, c.C, c.NH,
                               true);
        });
        expect(forward <= 1.0, "T %d HS %d, sm_%d: forward is off by %.3g times the bound", T, HS, card->compute,
               forward);
        expect(backward <= 1.0, "T %d HS %d, sm_%d: backward is off by %.3g times the bound", T, HS, card->compute,
               backward);
        worst_forward = larger(worst_forward, forward), worst_backward = larger(worst_backward, backward);
    }
    note(test, "forward %.2f, backward %.2f of bound", worst_forward, worst_backward);
}

template <typename X>
static void check_own_gpu(Test* test) {
    const Device dev = test_device(true);
    for (int HS : {64, 128}) check_gpu<X>(test, &dev, HS, true, {1, 37, 64, 100, 129, 192, 320, 1000, 1024, 2100});
}

TEST(attention_bf16_gpu) {
    check_own_gpu<bf16>(test);
}

// Checks mma.sync's way, which an A100 and a B200 take. They differ in the backward pass of heads of 128 alone.
TEST(attention_other_cards_gpu) {
    Device card = test_device(true);
    for (int HS : {64, 128}) {
        if (HS == 128 && card.shared_memory < ATTENTION_WIDE_BYTES) continue;
        for (int compute : {80, 100}) {
            if (compute == 100 && (HS == 64 || card.shared_memory < BackwardShape<128, 64>::SHARED)) continue;
            card.compute = compute;
            check_gpu<bf16>(test, &card, HS, false, {1, 37, 129, 200, 320, 700});
        }
    }
}

// Scores whose largest value lies tens and thousands of powers of two over those seen before: one probability is
// near 1.
TEST(attention_bf16_far_scores_gpu) {
    const Device dev = test_device(true);
    double worst = 0.0;
    for (int HS : {64, 128}) {
        for (float size : {6.0f, 10.0f, 40.0f}) {
            GpuCase<bf16> c(&dev, 1, 500, HS, 3, size);
            c.solve();
            double forward = run_forward(test, &c, 1.0 / 128, attention_forward<bf16>);
            expect(forward <= 1.0, "size %g HS %d: forward is off by %.3g times the bound", size, HS, forward);
            worst = larger(worst, forward);
        }
    }
    note(test, "%.2f of bound", worst);
}

TEST(attention_fp32_gpu) {
    check_own_gpu<float>(test);
}

// Copies one head of one batch, (T, parts, HS), from (B, T, parts, NH, HS).
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
    Room room(nullptr);
    float *qkv = room.host<float>(3 * n), *dout = room.host<float>(n), *got_out = room.host<float>(n);
    float *want_out = room.host<float>(n), *got = room.host<float>(3 * n), *want = room.host<float>(3 * n);
    float *want_lse = room.host<float>(T), *lse = c->lse + bh * T;
    head_take(qkv, c->qkv, T, 3, c->NH, HS, bh), head_take(dout, c->dout, T, 1, c->NH, HS, bh);
    head_take(got_out, c->out, T, 1, c->NH, HS, bh), head_take(got, dqkv, T, 3, c->NH, HS, bh);
    attention_forward_cpu(want_out, want_lse, qkv, 1, T, HS, 1);
    attention_backward_cpu(want, dout, qkv, got_out, lse, 1, T, HS, 1);
    double worst = worst_row(got_out, want_out, T, HS, eps, 0.1 * mean_norm(want_out, T, HS));
    worst = larger(worst, worst_lse(lse, want_lse, T, HS + T));
    return larger(worst, worst_gradient(dout, got, want, T, HS, HS, T == 1, eps));
}

// Computes on the GPU twice, into poisoned memory: c->out, c->lse and dqkv, which it returns. The backward pass goes on
// from the out and lse of `from`.
static float* run_both(Test* test, GpuCase<bf16>* c, const GpuCase<bf16>* from) {
    int64_t bytes;
    bf16 *d_dqkv = c->device<bf16>(3 * c->n), *bits[2][2];
    char* scratch = backward_scratch(c, c->B, c->T, c->C, c->NH, &bytes);
    float* dqkv = nullptr;
    for (int run = 0; run < 2; run++) {
        poison(c->dev, c->d_out, c->n * 2), poison(c->dev, c->d_lse, c->rows * 4);
        poison(c->dev, d_dqkv, 3 * c->n * 2), poison(c->dev, scratch, bytes);
        attention_forward<bf16>(c->dev, c->d_out, c->d_lse, c->d_qkv, c->B, c->T, c->C, c->NH);
        attention_backward(c->dev, d_dqkv, c->d_dbias, scratch, c->d_dout, c->d_qkv, from->d_out, from->d_lse, c->B,
                           c->T, c->C, c->NH, false);
        c->out = c->floats_of(c->d_out, c->n, &bits[run][0]);
        dqkv = c->floats_of(d_dqkv, 3 * c->n, &bits[run][1]);
    }
    c->lse = c->to_host(c->d_lse, c->rows);
    expect(memcmp(bits[0][0], bits[1][0], c->n * 2) == 0, "two forward runs differ");
    expect(memcmp(bits[0][1], bits[1][1], 3 * c->n * 2) == 0, "two backward runs differ");
    return dqkv;
}

// On Hopper a block stays and draws work: 576 pieces forward for heads of 64, 768 for 128, and 768 tiles of keys
// backward, so that of 132 blocks each goes on from one to the next several times. Every fifth head is compared,
// the last one too.
TEST(attention_bf16_many_pieces_gpu) {
    const int B = 8, T = 1000, NH = 12;
    const Device dev = test_device(true);
    double worst = 0.0;
    for (int HS : {64, 128}) {
        GpuCase<bf16> c(&dev, B, T, HS, NH);
        const float* dqkv = run_both(test, &c, &c);
        const int heads = (B * NH - 1) / 5 + 1;
        double own[B * NH];
#pragma omp parallel for schedule(dynamic)
        for (int i = 0; i < heads; i++) own[i] = check_head(&c, dqkv, 5 * i);
        for (int i = 0; i < heads; i++) {
            expect(own[i] <= 1.0, "head %d of size %d is off by %.3g times the bound", 5 * i, HS, own[i]);
            worst = larger(worst, own[i]);
        }
    }
    note(test, "%.2f of bound", worst);
}

// Sequences so long that a group of heads is one head, by this card's way and by mma.sync: one checks the other.
TEST(attention_bf16_long_gpu) {
    const Device dev = test_device(true);
    Device card = dev;
    card.compute = 80;
    for (int HS : {64, 128}) {
        if (HS == 128 && dev.shared_memory < ATTENTION_WIDE_BYTES) continue;
        const int T = HS == 64 ? 33001 : 17003;
        GpuCase<bf16> own(&dev, 1, T, HS, 2), other(&card, 1, T, HS, 2);
        const float *got = run_both(test, &own, &own), *want = run_both(test, &other, &own);
        const double eps = 1.0 / 128, common = 0.1 * mean_norm(other.out, own.rows, HS);
        double worst = worst_row(own.out, other.out, own.rows, HS, eps, common);
        worst = larger(worst, worst_lse(own.lse, other.lse, own.rows, HS + T));
        worst = larger(worst, worst_gradient(&own, got, want, eps));
        expect(worst <= 2.0, "T %d, heads of %d: the two are %.3g bounds apart", T, HS, worst);
        note(test, "%.2f of bound", worst);
    }
}

// The same sequence B times must give the same bits B times. Compares every `step`-th batch and the last with the
// first.
static void check_equal_batches(Test* test, const Device* dev, int B, int T, int C, int NH, int step) {
    const int64_t n = (int64_t)T * C;
    int64_t bytes;
    GpuCase<bf16> one(dev, 1, T, C / NH, NH);
    bf16 *d_qkv = one.device<bf16>(B * 3 * n), *d_dqkv = one.device<bf16>(B * 3 * n);
    bf16 *d_dout = one.device<bf16>(B * n), *d_out = one.device<bf16>(B * n);
    float* d_lse = one.device<float>((int64_t)B * NH * T);
    char* scratch = backward_scratch(&one, B, T, C, NH, &bytes);
    for (int b = 0; b < B; b++) {
        check(cudaMemcpyAsync(d_qkv + b * 3 * n, one.d_qkv, 3 * n * 2, cudaMemcpyDeviceToDevice, dev->stream));
        check(cudaMemcpyAsync(d_dout + b * n, one.d_dout, n * 2, cudaMemcpyDeviceToDevice, dev->stream));
    }
    poison(dev, d_dqkv, B * 3 * n * 2);
    attention_forward<bf16>(dev, d_out, d_lse, d_qkv, B, T, C, NH);
    attention_backward(dev, d_dqkv, one.d_dbias, scratch, d_dout, d_qkv, d_out, d_lse, B, T, C, NH, false);
    const bf16 *first_out = one.to_host(d_out, n), *first_dqkv = one.to_host(d_dqkv, 3 * n);
    for (int64_t i = 0; i < 3 * n; i++) expect(!isnan(to_float(first_dqkv[i])), "gradient %lld is NaN", (long long)i);
    for (int64_t b = step; b < B + step; b += step) {
        if (b > B - 1) b = B - 1;
        Room room(dev);
        expect(memcmp(room.to_host(d_out + b * n, n), first_out, n * 2) == 0, "out of batch %lld differs",
               (long long)b);
        expect(memcmp(room.to_host(d_dqkv + b * 3 * n, 3 * n), first_dqkv, 3 * n * 2) == 0,
               "dqkv of batch %lld differs", (long long)b);
        if (b == B - 1) break;
    }
}

// More blocks than the GPU runs at a time, so that blocks wait for blocks of another wave.
TEST(attention_bf16_many_blocks_gpu) {
    const Device dev = test_device(true);
    for (int run = 0; run < 3; run++) check_equal_batches(test, &dev, 96, 777, 128, 2, 1);
    check_equal_batches(test, &dev, 64, 777, 256, 2, 1);
}

// qkv of more than 2^31 elements.
TEST(attention_bf16_large_gpu) {
    const Device dev = test_device(true);
    if (dev.memory <= (int64_t)24 << 30) skip("needs 24 GiB of GPU memory");
    check_equal_batches(test, &dev, 7300, 777, 128, 2, 900);
}

// The order of dq rests on flags, not on timing: a launch in which every other tile of keys takes ten times as long
// gives the same bits. What the tiles add up is poisoned first, so a tile that did not wait would give NaN. The even
// launch is compared with the plain C version.
template <int HS, typename Even, typename Uneven>
static void check_uneven(Test* test, const Device* dev, int B, int T, Even even, Uneven uneven) {
    GpuCase<bf16> c(dev, B, T, HS, 2);
    c.solve();
    double worst = run_backward(test, &c, 1.0 / 128, false, [&](bool second, bf16* dqkv, char* scratch) {
        if (second)
            uneven(dqkv, scratch, c);
        else
            even(dqkv, scratch, c);
    });
    expect(worst <= 1.0, "HS %d T %d: off by %.3g times the bound", HS, T, worst);
}

TEST(attention_bf16_uneven_blocks_gpu) {
    Device dev = test_device(true);
    dev.compute = 80;
    auto even = [&](bf16* dqkv, char* scratch, const GpuCase<bf16>& c) {
        attention_backward_gpu<bf16, 64>(&dev, dqkv, scratch, c.d_dout, c.d_qkv, c.d_out, c.d_lse, c.B, c.T, c.NH, {});
    };
    check_uneven<64>(test, &dev, 2, 700, even, [&](bf16* dqkv, char* scratch, const GpuCase<bf16>& c) {
        const AttentionScratch sizes = attention_scratch(c.B, c.T, c.NH, 64);
        even(dqkv, scratch, c);  // leaves D
        poison(&dev, dqkv, 3 * c.n * 2), poison(&dev, scratch + sizes.flags + sizes.rows, sizes.dq_sum);
        attention_backward_mma<BackwardShape<64, 64, true>>(&dev, dqkv, scratch, sizes, c.d_dout, c.d_qkv, c.d_lse, c.B,
                                                            c.T, c.NH);
    });
}

template <int HS>
static void check_uneven_hopper(Test* test, const Device* dev, int B, int T) {
    auto even = [&](bf16* dqkv, char* scratch, const GpuCase<bf16>& c) {
        attention_hopper_backward<HopperBackward<HS>>(dev, dqkv, scratch, c.d_dout, c.d_qkv, c.d_out, c.d_lse, c.B, c.T,
                                                      c.NH);
    };
    check_uneven<HS>(test, dev, B, T, even, [&](bf16* dqkv, char* scratch, const GpuCase<bf16>& c) {
        attention_hopper_backward<HopperBackward<HS, true>>(dev, dqkv, scratch, c.d_dout, c.d_qkv, c.d_out, c.d_lse,
                                                            c.B, c.T, c.NH);
    });
}

TEST(attention_hopper_uneven_blocks_gpu) {
    const Device dev = test_device(true);
    if (!hopper_runs(&dev, attention_hopper_backward_kernel<HopperBackward<64>>))
        skip("needs a GPU of compute capability 9.0 and a build for sm_90a");
    for (int T : {700, 2100}) {
        const int B = T < 1000 ? 2 : 1;
        check_uneven_hopper<64>(test, &dev, B, T);
        check_uneven_hopper<128>(test, &dev, B, T);
    }
}

// For `make sanitize`, whose race checker is slow: attention alone, several tiles, a ragged last one, on a GPU that is
// said to have two multiprocessors, so that blocks draw several tiles and use all of their shared memory again.
TEST(attention_race_gpu) {
    Device dev = test_device(true);
    dev.sm_count = 2;
    const int computes[] = {dev.compute, 80};  // the kernels of this GPU, and those of older ones
    for (int compute : computes) {
        dev.compute = compute;
        for (int HS : {64, 128}) check_gpu<bf16>(test, &dev, HS, true, {200});
    }
    for (int HS : {64, 128}) check_gpu<float>(test, &dev, HS, true, {70});
}
#endif
