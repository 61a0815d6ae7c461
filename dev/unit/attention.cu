// Tests of kernels/attention.cuh (model_golden holds the plain C version to PyTorch): forward and backward in bf16 and
// fp32 against the plain C version, at lengths that are and are not multiples of the tiles, for heads of 64 and 128,
// and twice for equal bits; in bf16 on Hopper forward both by wgmma and by mma.sync, as other GPUs run it. The ways of
// other cards are tried by a device that is said to be one: its compute capability and shared memory choose. Results
// are compared row by row (a row is one head of one token): the error's norm may be
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

// The largest error of a row of `size` values over its bound. Rows of `parts` parts, each with a mean of its own,
// alternate `heads` at a time. `zero` is the size of terms of which those of the first two parts cancel; 0: none do.
static double worst_row(const float* got, const float* want, int64_t rows, int size, double eps, int parts = 1,
                        int heads = 1, double zero = 0.0) {
    double total[3] = {}, worst = 0.0;
    std::vector<double> norm((size_t)rows), error((size_t)rows);
    for (int64_t i = 0; i < rows * size; i++) {
        norm[i / size] += (double)want[i] * want[i];
        error[i / size] += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
    }
    for (int64_t r = 0; r < rows; r++) total[r / heads % parts] += norm[r];
    for (int64_t r = 0; r < rows; r++) {
        const int64_t part = r / heads % parts;
        const double common = zero > 0.0 && part < 2 ? zero : 0.1 * sqrt(total[part] * parts / rows);
        const double multiple = sqrt(error[r]) / (eps * (sqrt(norm[r]) + common));
        if (!(multiple <= worst)) worst = multiple;
    }
    return worst;
}

// Attention at one shape. Queries and keys spread the scores by more than 1, as a trained model's do.
template <typename X>
struct Shape {
    const Device* dev;
    int B, T, NH, HS, C;
    double eps, slack = 1.0;  // of a row; a factor of all bounds
    Array<X> qkv, dout, out, dqkv;
    Array<float> lse, dbias;
    Room room;
    int64_t bytes;
    char* scratch;

    Shape(const Device* on, int batch, int length, int size, int heads, float spread = 2.0f)
        : dev(on),
          B(batch),
          T(length),
          NH(heads),
          HS(size),
          C(heads * size),
          eps(sizeof(X) == 2 ? 1.0 / 128 : 2.4e-7 * (size + length)),
          qkv(on, (int64_t)B * T * 3 * C, 3 + T, spread),
          dout(on, (int64_t)B * T * C, 4 + T, 1e-3f),
          out(on, dout.n),
          dqkv(on, qkv.n),
          lse(on, (int64_t)B * NH * T),
          dbias(on, 3 * C, 9, 1.0f),
          room(on) {
        const int64_t bias = matmul_backward_bias_scratch_bytes(on, 3 * C);
        bytes = attention_backward_scratch_bytes(on, B, T, C, NH);
        bytes = bytes > bias ? bytes : bias;
        scratch = room.device<char>(bytes);
    }

    void run_forward(const Device* card) { attention_forward(card, out.device, lse.device, qkv.device, B, T, C, NH); }
    void run_backward(const Device* card) {
        attention_backward(card, dqkv.device, dbias.device, scratch, dout.device, qkv.device, out.device, lse.device, B,
                           T, C, NH, true);
    }
    // The plain C version computes what is wanted forward; backward, of out and lse as they are wanted, which the
    // backward pass begins with so that it is tested by itself.
    void solve() { attention_forward_cpu(out.want, lse.want, qkv.host, B, T, C, NH); }
    void solve_backward() {
        out.set(out.want), lse.set(lse.want);
        attention_backward_cpu(dqkv.want, dout.host, qkv.host, out.host, lse.host, B, T, C, NH);
    }

    void check_forward(Test* test, double* worst, const Device* card) {
        const auto rows = [&](const float* got, const float* want) {
            return worst_row(got, want, (int64_t)B * T * NH, HS, slack * eps);
        };
        // Scores are exact products summed in fp32 for bf16 as well: the length of the two sums in sequence.
        const auto sums = [&](const float* got, const float* want) {
            double most = 0.0;
            for (int64_t i = 0; i < lse.n; i++) {
                const double error = fabs((double)got[i] - want[i]) / (1.2e-7 * (HS + T) * (1 + fabs(want[i])));
                if (!(error <= most)) most = error;
            }
            return most / slack;
        };
        check_outputs(test, worst, [&] { run_forward(card); }, {{"out", &out, 0, rows}, {"lse", &lse, 0, sums}});
    }

    // `run` fills dqkv; with `bias` it adds the column sums of what it stores to dbias.
    template <typename Run>
    void check_backward(Test* test, double* worst, bool bias, Run run) {
        double zero = 0.0;  // dq and dk of one token are zero
        for (int64_t i = 0; i < dout.n && T == 1; i++) zero += (double)dout.host[i] * dout.host[i] * HS / dout.n;
        const auto rows = [&](const float* got, const float* want) {
            return worst_row(got, want, (int64_t)B * T * 3 * NH, HS, slack * eps, 3, NH, sqrt(zero));
        };
        const auto columns = [&](const float* got, const float*) {
            std::vector<float> stored((size_t)dqkv.n);
            double most = 0.0;
            dqkv.read(stored.data());
            for (int64_t i = 0; i < 3 * C; i++) {
                double want = dbias.host[i], size = fabs(want);
                for (int64_t at = i; at < dqkv.n; at += 3 * C) want += stored[at], size += fabs(stored[at]);
                // An addition's error, once for each of the longest chain's levels.
                const double error = fabs(got[i] - want) / (1.2e-7 * 32 * size);
                if (!(error <= most)) most = error;
            }
            return most;
        };
        const auto poisoned = [&] {
            if (dev->gpu) check(cudaMemsetAsync(scratch, 0xff, bytes, dev->stream));
            run();
        };
        const Output outputs[] = {{"dqkv", &dqkv, 0, rows}, {"dbias", &dbias, 0, columns}};
        check_outputs(test, worst, poisoned, outputs, bias ? 2 : 1);
    }
};

// Checks the way that `card` takes.
template <typename X>
static void check_card(Test* test, double* worst, const Device* card, int HS, std::initializer_list<int> lengths,
                       int B = 2, int NH = 3) {
    for (int T : lengths) {
        const bool large = T > 2000;
        const int failed = test->failures;
        Shape<X> shape(card, large ? 1 : B, T, HS, large ? 2 : NH);
        shape.solve();
        shape.check_forward(test, worst, card);
        shape.solve_backward();
        shape.check_backward(test, worst, true, [&] { shape.run_backward(card); });
        expect(test->failures == failed, "at T %d, heads of %d, sm_%d", T, HS, card->compute);
    }
}

OPERATOR_TEST(attention_fp32) {
    check_card<float>(test, &worst, &dev, 64, {1, 37, 64, 129});
}

OPERATOR_TEST(attention_fp32_gpu) {
    for (int HS : {64, 128})
        check_card<float>(test, &worst, &dev, HS, {1, 37, 64, 100, 129, 192, 320, 1000, 1024, 2100});
}

#ifdef __CUDACC__
// On Hopper a persistent block takes one work item after another: the last shape has 288 items forward for heads of 64,
// 384 for 128, and 384 tiles of keys backward, so that of 132 blocks each goes on from one to the next.
OPERATOR_TEST(attention_bf16_gpu) {
    for (int HS : {64, 128}) {
        check_card<bf16>(test, &worst, &dev, HS, {1, 37, 64, 100, 129, 192, 320, 1000, 1024, 2100});
        check_card<bf16>(test, &worst, &dev, HS, {1000}, 4, 12);
    }
}

// Checks mma.sync's way, which an A100 and a B200 take. They differ in the backward pass of heads of 128 alone.
OPERATOR_TEST(attention_other_cards_gpu) {
    for (int HS : {64, 128}) {
        if (HS == 128 && dev.shared_memory < ATTENTION_WIDE_BYTES) continue;
        for (int compute : {80, 100}) {
            if (compute == 100 && (HS == 64 || dev.shared_memory < BackwardShape<128, 64>::SHARED)) continue;
            Device card = dev;
            card.compute = compute;
            check_card<bf16>(test, &worst, &card, HS, {1, 37, 64, 100, 129, 200, 320, 700, 1024, 2100});
        }
    }
}

// Scores whose largest value lies tens and thousands of powers of two over those seen before: one probability is
// near 1.
OPERATOR_TEST(attention_bf16_far_scores_gpu) {
    for (int HS : {64, 128}) {
        for (float size : {6.0f, 10.0f, 40.0f}) {
            Shape<bf16> shape(&dev, 1, 500, HS, 3, size);
            shape.solve();
            shape.check_forward(test, &worst, &dev);
        }
    }
}

// Sequences so long that a group of heads is one head, by this card's way and by mma.sync: one checks the other, so
// that they are two bounds apart at most.
OPERATOR_TEST(attention_bf16_long_gpu) {
    Device card = dev;
    card.compute = 80;
    for (int HS : {64, 128}) {
        if (HS == 128 && dev.shared_memory < ATTENTION_WIDE_BYTES) continue;
        Shape<bf16> shape(&dev, 1, HS == 64 ? 33001 : 17003, HS, 2);
        shape.slack = 2.0;
        shape.run_forward(&card);
        shape.out.read(shape.out.want), shape.lse.read(shape.lse.want);
        shape.check_forward(test, &worst, &dev);
        shape.out.set(shape.out.want), shape.lse.set(shape.lse.want);
        shape.run_backward(&card);
        shape.dqkv.read(shape.dqkv.want);
        shape.check_backward(test, &worst, false, [&] { shape.run_backward(&dev); });
    }
}

// The same sequence B times must give the same bits B times. Compares every `step`-th batch and the last with the
// first.
static void check_equal_batches(Test* test, const Device* dev, int B, int T, int C, int NH, int step) {
    const int64_t n = (int64_t)T * C;
    Shape<bf16> one(dev, 1, T, C / NH, NH);
    Room all(dev);
    bf16 *d_qkv = all.device<bf16>(B * 3 * n), *d_dqkv = all.device<bf16>(B * 3 * n);
    bf16 *d_dout = all.device<bf16>(B * n), *d_out = all.device<bf16>(B * n);
    float* d_lse = all.device<float>((int64_t)B * NH * T);
    const int64_t bias = matmul_backward_bias_scratch_bytes(dev, 3 * C),
                  bytes = attention_backward_scratch_bytes(dev, B, T, C, NH);
    char* scratch = all.device<char>(bytes > bias ? bytes : bias);
    for (int b = 0; b < B; b++) {
        check(cudaMemcpyAsync(d_qkv + b * 3 * n, one.qkv.device, 3 * n * 2, cudaMemcpyDeviceToDevice, dev->stream));
        check(cudaMemcpyAsync(d_dout + b * n, one.dout.device, n * 2, cudaMemcpyDeviceToDevice, dev->stream));
    }
    check(cudaMemsetAsync(d_dqkv, 0xff, B * 3 * n * 2, dev->stream));
    attention_forward<bf16>(dev, d_out, d_lse, d_qkv, B, T, C, NH);
    attention_backward(dev, d_dqkv, one.dbias.device, scratch, d_dout, d_qkv, d_out, d_lse, B, T, C, NH, false);
    const bf16 *first_out = all.to_host(d_out, n), *first_dqkv = all.to_host(d_dqkv, 3 * n);
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
static void check_uneven(Test* test, double* worst, const Device* dev, int B, int T, Even even, Uneven uneven) {
    Shape<bf16> shape(dev, B, T, HS, 2);
    int runs = 0;
    shape.solve();
    shape.solve_backward();
    shape.check_backward(test, worst, false, [&] {
        if (runs++ == 0)
            even(shape);
        else
            uneven(shape);
    });
}

OPERATOR_TEST(attention_bf16_uneven_blocks_gpu) {
    dev.compute = 80;
    const auto even = [&](const Shape<bf16>& c) {
        attention_backward_gpu<bf16, 64>(&dev, c.dqkv.device, c.scratch, c.dout.device, c.qkv.device, c.out.device,
                                         c.lse.device, c.B, c.T, c.NH, {});
    };
    check_uneven<64>(test, &worst, &dev, 2, 700, even, [&](const Shape<bf16>& c) {
        const AttentionScratch sizes = attention_scratch(c.B, c.T, c.NH, 64);
        even(c);  // leaves D
        check(cudaMemsetAsync(c.dqkv.device, 0xff, c.dqkv.n * 2, dev.stream));
        check(cudaMemsetAsync(c.scratch + sizes.flags + sizes.rows, 0xff, sizes.dq_sum, dev.stream));
        attention_backward_mma<BackwardShape<64, 64, true>>(&dev, c.dqkv.device, c.scratch, sizes, c.dout.device,
                                                            c.qkv.device, c.lse.device, c.B, c.T, c.NH);
    });
}

template <bool UNEVEN, int HS>
static void hopper_backward(const Device* dev, const Shape<bf16>& c) {
    attention_hopper_backward<HopperBackward<HS, UNEVEN>>(dev, c.dqkv.device, c.scratch, c.dout.device, c.qkv.device,
                                                          c.out.device, c.lse.device, c.B, c.T, c.NH);
}

template <int HS>
static void check_uneven_hopper(Test* test, double* worst, const Device* dev, int B, int T) {
    check_uneven<HS>(
        test, worst, dev, B, T, [&](const Shape<bf16>& c) { hopper_backward<false, HS>(dev, c); },
        [&](const Shape<bf16>& c) { hopper_backward<true, HS>(dev, c); });
}

OPERATOR_TEST(attention_hopper_uneven_blocks_gpu) {
    if (!hopper_runs(&dev, attention_hopper_backward_kernel<HopperBackward<64>>))
        skip("needs a GPU of compute capability 9.0 and a build for sm_90a");
    for (int T : {700, 2100}) {
        const int B = T < 1000 ? 2 : 1;
        check_uneven_hopper<64>(test, &worst, &dev, B, T);
        check_uneven_hopper<128>(test, &worst, &dev, B, T);
    }
}

// For `make sanitize`, whose race checker is slow: attention alone, several tiles, a ragged last one, on a GPU that is
// said to have two multiprocessors, so that blocks draw several tiles and use all of their shared memory again.
OPERATOR_TEST(attention_race_gpu) {
    dev.sm_count = 2;
    for (int compute : {dev.compute, 80}) {  // the kernels of this GPU, and those of older ones
        Device card = dev;
        card.compute = compute;
        for (int HS : {64, 128}) check_card<bf16>(test, &worst, &card, HS, {200});
    }
    for (int HS : {64, 128}) check_card<float>(test, &worst, &dev, HS, {70});
}
#endif
