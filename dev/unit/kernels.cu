// Unit tests of the operators in kernels/ (attention and the classifier have their own files). Two kinds:
//   cpu_*       the helpers of the plain C path against libm, or against plain loops bit for bit;
//   the others  launchers against the plain C version on the same (rounded) inputs, at odd shapes, with outputs full of
//               NaN beforehand, guard elements behind them, and a second run that must give the same bits.
// The plain C version itself is held to PyTorch's float64 by model_golden, with the gradient of every tensor.
// kernels.h has what they share.
#include <malloc.h>

#include <vector>

#include "../../kernels/classifier.cuh"
#include "../../kernels/embedding.cuh"
#include "../../kernels/gelu.cuh"
#include "../../kernels/layernorm.cuh"
#include "../../kernels/matmul.cuh"
#include "apart.h"
#include "kernels.h"
#include "tensor_cores.h"

namespace {

// The plain C path's helpers.

TEST(cpu_exp_error) {
    double worst = 0.0, worst_sigmoid = 0.0;
    for (double at = -86.4; at < 88.72; at += 1e-5) {
        float x = (float)at;
        worst = fmax(worst, fabs(cpu_exp(x) / exp((double)x) - 1.0));
        if (x < 86.4f) worst_sigmoid = fmax(worst_sigmoid, fabs(cpu_sigmoid(x) * (1.0 + exp(-(double)x)) - 1.0));
    }
    expect(worst < 1.2e-7, "relative error of cpu_exp %.3g", worst);
    expect(worst_sigmoid < 5e-7, "relative error of cpu_sigmoid %.3g", worst_sigmoid);
    expect(cpu_exp(0.0f) == 1.0f, "%g", cpu_exp(0.0f));
    expect(cpu_exp(-1000.0f) == 0.0f && cpu_exp(-INFINITY) == 0.0f, "underflow");
    expect(isinf(cpu_exp(89.0f)) && isinf(cpu_exp(INFINITY)), "overflow");
    expect(isnan(cpu_exp(NAN)) && isnan(cpu_sigmoid(NAN)), "NaN");
    note(test, "exp %.3g, sigmoid %.3g", worst, worst_sigmoid);
}

// Computes the product as cpu_gemm.h defines it.
void gemm_naive(const CpuGemm* g, float* c) {
    for (int64_t m = 0; m < g->rows; m++) {
        for (int64_t n = 0; n < g->cols; n++) {
            float sum = g->accumulate ? c[m * g->cols + n] : 0.0f;
            for (int64_t k = 0; k < g->depth; k++)
                sum = fmaf(g->a[m * g->a_row + k * g->a_depth], g->b[k * g->b_depth + n * g->b_col], sum);
            c[m * g->cols + n] = sum;
        }
    }
}

TEST(cpu_gemm_bits) {
    const int shapes[][3] = {{1, 1, 1}, {1, 8, 300}, {5, 33, 7}, {6, 32, 256}, {37, 40, 257}, {100, 1030, 513}};
    for (auto& s : shapes) {
        int64_t M = s[0], N = s[1], K = s[2];
        for (int variant = 0; variant < 8; variant++) {
            float *a = random_floats(M * K, 1, 1.0f), *b = random_floats(K * N, 2, 1.0f);
            float *c = random_floats(M * N, 3, 1.0f), *want = random_floats(M * N, 3, 1.0f);
            bool accumulate = variant & 4;
            if (!accumulate) memset(c, 0xff, M * N * sizeof(float));
            const bool by_a = variant & 1, by_b = variant & 2;  // the factor is transposed
            CpuGemm gemm = {M, N, K, a, by_a ? 1 : K, by_a ? M : 1, b, by_b ? 1 : N, by_b ? K : 1, c, accumulate};
            cpu_gemm(&gemm);
            gemm_naive(&gemm, want);
            expect(memcmp(c, want, M * N * sizeof(float)) == 0, "M %d N %d K %d variant %d", s[0], s[1], s[2], variant);
        }
    }
}

// The operators.

template <typename X>
void gelu_case(Test* test, double* worst, const Device* dev, int64_t n) {
    Array<X> x(dev, n, 1, 12.0f), out(dev, n), d(dev, n, 2, 1.0f);
    gelu_forward_cpu(out.want, x.host, n);
    gelu_backward_inplace_cpu(d.want, x.host, n);
    const auto run = [&] {
        gelu_forward(dev, out.device, x.device, n);
        gelu_backward_inplace(dev, d.device, x.device, n);
    };
    check_outputs(test, worst, run, {{"gelu", &out, EPS32}, {"dgelu", &d, 4 * EPS32}});
}

OPERATOR_BOTH(gelu) {
    for (int64_t n : {1, 7, 8, 2049, 1000003}) {
        in_inputs(dev, [&](auto x) { gelu_case<decltype(x)>(test, &worst, &dev, n); });
    }
}

// Three ways: a sum is normalised, and kept in a third place or in the first operand's; or one operand alone.
template <typename X>
void layernorm_forward_case(Test* test, double* worst, const Device* dev, int64_t N, int C) {
    Array<X> x(dev, N * C, 1, 1.0f), y(dev, N * C, 2, 1.0f), weight(dev, C, 3, 1.0f), bias(dev, C, 4, 1.0f),
        sum(dev, N * C), out(dev, N * C);
    Array<float> mean(dev, N), rstd(dev, N);
    const double bound = EPS32 * (8 + sqrt((double)C));
    for (int way = 0; way < 3; way++) {
        Array<X>* to = way == 0 ? &sum : &x;
        for (int64_t i = 0; i < N * C; i++)
            to->want[i] = to_float(from_float<X>(x.host[i] + (way < 2 ? y.host[i] : 0)));
        layernorm_forward_cpu(out.want, mean.want, rstd.want, to->want, weight.host, bias.host, N, C);
        const auto run = [&] {
            if (way == 2)
                return layernorm_forward(dev, out.device, mean.device, rstd.device, x.device, weight.device,
                                         bias.device, N, C);
            residual_layernorm_forward(dev, to->device, out.device, mean.device, rstd.device, x.device, y.device,
                                       weight.device, bias.device, N, C);
        };
        check_outputs(test, worst, run,
                      {{"residual", to, EPS32}, {"out", &out, bound}, {"mean", &mean, bound}, {"rstd", &rstd, bound}});
    }
}

// Rows of 1 to 8 vectors a lane, longer ones, and such as leave room for one stage alone (12288 in fp32).
const int LAYERNORM_SHAPES[][2] = {{1, 8},     {3, 64},   {37, 768},  {1000, 768}, {5000, 1600},
                                   {40, 1032}, {3, 2056}, {37, 5120}, {300, 5120}, {3, 8192},
                                   {9, 512},   {9, 640},  {9, 1024},  {9, 2048},   {150, 12288}};

OPERATOR_BOTH(layernorm_forward) {
    for (auto& s : LAYERNORM_SHAPES) {
        if (!affordable(dev, 10.0 * s[0] * s[1])) continue;
        in_inputs(dev, [&](auto x) { layernorm_forward_case<decltype(x)>(test, &worst, &dev, s[0], s[1]); });
    }
}

// The second time with the column sums of dinp, which are those of the values that dinp has on return.
template <typename X, typename G>
void layernorm_backward_case(Test* test, double* worst, const Device* dev, int64_t N, int C, bool accumulate,
                             int runs = 2) {
    Array<X> d(dev, N * C, 1, 1.0f), x(dev, N * C, 2, 1.0f), weight(dev, C, 3, 1.0f), dinp(dev, N * C, 4, 1.0f);
    Array<G> dweight(dev, C, 5, 1.0f, accumulate), dbias(dev, C, 6, 1.0f, accumulate),
        columns(dev, C, 9, 1.0f, accumulate);
    Array<float> mean(dev, N, 7, 0.1f), rstd(dev, N, 8, 0.5f);
    Room room(dev);
    float* scratch = (float*)room.device<char>(layernorm_backward_scratch_bytes<X>(dev, C));
    layernorm_backward_cpu(dinp.want, dweight.want, dbias.want, nullptr, d.host, x.host, weight.host, mean.host,
                           rstd.host, N, C, accumulate);
    const double bound = EPS32 * (4 + 0.5 * sqrt((double)C)), bound_sum = product_bound(N, 1.0);
    for (bool sums : {false, true}) {
        const auto run = [&] {
            layernorm_backward(dev, dinp.device, dweight.device, dbias.device, sums ? columns.device : (G*)nullptr,
                               scratch, d.device, x.device, weight.device, mean.device, rstd.device, N, C, accumulate);
        };
        if (sums) {
            std::vector<float> rounded((size_t)(N * C));
            dinp.read(rounded.data());
            column_sum_cpu(columns.want, rounded.data(), N, C, accumulate);
        }
        const Output outputs[] = {{"dinp", &dinp, bound},
                                  {"dweight", &dweight, bound_sum},
                                  {"dbias", &dbias, bound_sum},
                                  {"dcolumns", &columns, 2 * bound_sum}};
        check_outputs(test, worst, run, outputs, sums ? 4 : 3, sums ? runs : 2);
    }
}

OPERATOR_BOTH(layernorm_backward) {
    for (auto& s : LAYERNORM_SHAPES) {
        if (!affordable(dev, 10.0 * s[0] * s[1])) continue;
        for (bool accumulate : {false, true}) {
            in_types(dev, [&](auto x, auto g) {
                layernorm_backward_case<decltype(x), decltype(g)>(test, &worst, &dev, s[0], s[1], accumulate);
            });
        }
    }
    // A row's place in shared memory is filled again as soon as all warps are past the barrier: were it too soon for
    // one of them, few runs of many would show it.
    for (int C : {384, 768, 1280, 1600}) {
        if (dev.gpu) layernorm_backward_case<bf16, float>(test, &worst, &dev, 3001, C, false, 60);
    }
}

#ifdef __CUDACC__
// Tables that a device keeps of its products go with it: many tables one after another take no more memory than a few.
TEST(matmul_plans_close_leaves_nothing) {
    MatmulShape shape;
    memset(&shape, 0, sizeof(shape));
    shape.m = 64, shape.n = 32, shape.k = 16, shape.op_a = CUBLAS_OP_T, shape.op_b = CUBLAS_OP_N;
    shape.input = CUDA_R_16BF, shape.output = CUDA_R_32F, shape.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    size_t before = 0;
    for (int round = 0; round < 40; round++) {
        if (round == 20) before = mallinfo2().uordblks;
        MatmulPlans plans = {(MatmulPlan*)calloc(50, sizeof(MatmulPlan)), 50, 50, nullptr};
        for (int i = 0; i < 50; i++) matmul_describe(&plans.plan[i], &shape);
        matmul_plans_close(&plans);
    }
    int64_t left = (int64_t)(mallinfo2().uordblks - before);
    expect(left < 4096, "%lld bytes of 1000 plans are left", (long long)left);
}
#endif

// Returns how a process ends, and what it says, that asks for the scratch of a layer norm's backward pass on a GPU of
// which a block gets 100 KB of shared memory.
template <typename X>
Ended layernorm_small_gpu(int C) {
    return run_apart([C] {
        Device dev = {};
        dev.gpu = true, dev.sm_count = 84, dev.shared_memory = 100 << 10;
        if (layernorm_backward_scratch_bytes<X>(&dev, C) <= 0) abort();
    });
}

// A row that does not fit is refused in the plan, in the model's own type, with the way out that there is.
TEST(layernorm_backward_refused) {
    expect_ended(test, layernorm_small_gpu<float>(8192), 0);
    expect_ended(test, layernorm_small_gpu<float>(12288), 2, {"12288 channels in fp32", "--matmul bf16"});
    expect_ended(test, layernorm_small_gpu<bf16>(12288), 0);
    const Ended wide = layernorm_small_gpu<bf16>(20480);
    expect_ended(test, wide, 2, {"20480 channels in bf16"});
    expect(!strstr(wide.text, "--matmul"), "%s", wide.text);
}

float largest(const float* values, int64_t n) {
    float top = 0.0f;
    for (int64_t i = 0; i < n; i++) top = fmaxf(top, fabsf(values[i]));
    return top;
}

// The distance of a product with factors of type X from the plain C version: both may be off.
template <typename X>
double kernel_bound(const Device* dev, int64_t K, double scale) {
    double tensor_cores = tensor_core_bound(tensor_core(dev->compute), K, scale);
    return product_bound(K, scale) + (sizeof(X) == 2 ? tensor_cores : 0.0);
}

// Without a bias, with one, and with GELU behind it.
template <typename X>
void matmul_forward_case(Test* test, double* worst, const Device* dev, int64_t N, int C, int OC) {
    Array<X> inp(dev, N * C, 1, 1.0f), bias(dev, OC, 3, 1.0f), weight(dev, (int64_t)OC * C, 2, 2.0f / sqrtf((float)C)),
        out(dev, N * OC), pre(dev, N * OC);
    double bound = kernel_bound<X>(dev, C, 2.0 / sqrt(C));
    for (int way = 0; way < 3; way++) {
        matmul_forward_cpu(out.want, way == 2 ? pre.want : nullptr, inp.host, weight.host, way ? bias.host : nullptr, N,
                           C, OC);
        const auto run = [&] {
            matmul_forward(dev, out.device, way == 2 ? pre.device : (X*)nullptr, inp.device, weight.device,
                           way ? bias.device : (const X*)nullptr, N, C, OC);
        };
        const double pre_bound = bound;
        // The slope of GELU is at most 1.13, and in bf16 its input may have been rounded and its tanh is the
        // hardware's.
        if (way == 2) bound = 1.13 * (bound + (sizeof(X) == 2 ? epsilon<X>() * largest(pre.want, N * OC) : 8 * EPS32));
        const Output outputs[] = {{"out", &out, bound}, {"pre_gelu", &pre, pre_bound}};
        check_outputs(test, worst, run, outputs, way == 2 ? 2 : 1);
    }
}

// The products next to GELU of our own give GELU the bits of the kernel that computes it again.
template <typename X>
void matmul_gelu_case([[maybe_unused]] Test* test, [[maybe_unused]] const Device* dev, int64_t N, int C, int OC) {
#ifdef __CUDACC__
    if (!hopper_runs(dev, matmul_gelu_kernel<true>)) return;
    expect(matmul_gelu_fits(dev, N, OC, C), "(%lld, %d) x %d goes to cuBLASLt", (long long)N, OC, C);
    Array<X> inp(dev, N * C, 1, 1.0f), bias(dev, OC, 3, 1.0f), weight(dev, (int64_t)OC * C, 2, 2.0f / sqrtf((float)C)),
        out(dev, N * OC), pre(dev, N * OC), again(dev, N * OC);
    matmul_forward(dev, out.device, pre.device, inp.device, weight.device, bias.device, N, C, OC);
    gelu_forward(dev, again.device, pre.device, N * OC);
    expect(out.bytes() == again.bytes(), "(%lld, %d) x %d: GELU in the product has other bits", (long long)N, OC, C);
#endif
}

template <typename X, typename G>
void matmul_backward_input_case(Test* test, double* worst, const Device* dev, int64_t N, int C, int OC,
                                bool accumulate) {
    Array<X> d(dev, N * OC, 1, 1.0f), pre(dev, N * C, 3, 4.0f),
        weight(dev, (int64_t)OC * C, 2, 2.0f / sqrtf((float)OC)), dinp(dev, N * C);
    Array<G> dbias(dev, C, 4, 1.0f, accumulate);
    Room room(dev);
    float* scratch = (float*)room.device<char>(matmul_backward_gelu_scratch_bytes(dev, N, C));
    double bound = kernel_bound<X>(dev, OC, 2.0 / sqrt(OC));
    const Device cpu = test_device(false);
    matmul_backward_input(&cpu, dinp.want, d.host, weight.host, N, C, OC);
    const auto plain = [&] { matmul_backward_input(dev, dinp.device, d.device, weight.device, N, C, OC); };
    check_outputs(test, worst, plain, {{"dinp", &dinp, bound}});
    // In bf16 the slope may come from the hardware's tanh, good to 2^-11; 0.5 x sqrt(2/pi) (1 + 0.134 x^2) makes up to
    // 4 of it for |x| < 4, twice that through the square.
    const double size = largest(dinp.want, N * C);
    bound += size * (sizeof(X) == 2 ? 8.0 / 2048 : 8 * EPS32);
    const auto run = [&] {
        matmul_backward_gelu(dev, dinp.device, dbias.device, scratch, d.device, weight.device, pre.device, N, C, OC,
                             accumulate);
    };
    // The bias gradient is the column sums of the values that dinp has on return.
    std::vector<float> rounded((size_t)(N * C)), unused((size_t)C);
    dbias.set(dbias.host), run(), dinp.read(rounded.data());
    column_sum_cpu(dbias.want, rounded.data(), N, C, accumulate);
    matmul_backward_gelu_cpu(dinp.want, unused.data(), d.host, weight.host, pre.host, N, C, OC, false);
    check_outputs(
        test, worst, run,
        {{"dinp dgelu", &dinp, bound}, {"dbias dgelu", &dbias, product_bound(N, largest(rounded.data(), N * C))}});
}

template <typename X, typename G>
void matmul_backward_weight_case(Test* test, double* worst, const Device* dev, int64_t N, int C, int OC,
                                 bool accumulate) {
    const int64_t n = (int64_t)OC * C;
    Array<X> d(dev, N * OC, 1, 1.0f), inp(dev, N * C, 2, 1.0f);
    Array<G> dweight(dev, n, 3, 1.0f, accumulate), dbias(dev, OC, 4, 1.0f, accumulate);
    Room room(dev);
    float* scratch = (float*)room.device<char>(matmul_backward_bias_scratch_bytes(dev, OC));
    CpuGemm gemm = {OC, C, N, d.host, 1, OC, inp.host, C, 1, dweight.want, accumulate};
    exact_gemm(&gemm);
    column_sum_cpu(dbias.want, d.host, N, OC, accumulate);
    double bound = sizeof(X) == 2 ? tensor_core_bound(tensor_core(dev->compute), N, 1.0) : product_bound(N, 1.0);
    // cuBLASLt rounds a product to bf16 before it adds it to bf16: half a step, 2^-8, of the largest product more.
    float product = 0.0f;
    for (int64_t i = 0; i < n && accumulate; i++) product = fmaxf(product, fabsf(dweight.want[i] - dweight.host[i]));
    if (sizeof(G) == 2) bound += product / 256;
    const auto run = [&] {
        matmul_backward_weight(dev, dweight.device, d.device, inp.device, N, C, OC, accumulate);
        matmul_backward_bias(dev, dbias.device, scratch, d.device, N, OC, accumulate);
    };
    check_outputs(test, worst, run, {{"dweight", &dweight, bound}, {"dbias", &dbias, product_bound(N, 1.0)}});
}

const int MATMUL_SHAPES[][3] = {{1, 64, 64},       {3, 8, 24},        {37, 64, 200},      {257, 200, 72},
                                {37, 64, 50304},   {1000, 768, 2304}, {1000, 1600, 6400}, {37, 5120, 1288},
                                {3000, 456, 1544}, {3000, 1544, 456}};

OPERATOR_BOTH(matmul_forward) {
    for (auto& s : MATMUL_SHAPES) {
        if (!affordable(dev, (double)s[0] * s[1] * s[2])) continue;
        in_inputs(dev, [&](auto x) { matmul_forward_case<decltype(x)>(test, &worst, &dev, s[0], s[1], s[2]); });
    }
    // Shapes with rows, columns and steps over, blocks with one tile and with two.
    matmul_gelu_case<bf16>(test, &dev, 3000, 456, 1544);
    matmul_gelu_case<bf16>(test, &dev, 16384, 768, 3072);
    matmul_gelu_case<bf16>(test, &dev, 20001, 1600, 264);
}

OPERATOR_BOTH(matmul_backward) {
    double of_sums = 0.0;  // that of tensor cores in fp32 is shown by itself
    for (auto& s : MATMUL_SHAPES) {
        if (!affordable(dev, (double)s[0] * s[1] * s[2])) continue;
        for (bool accumulate : {false, true}) {
            in_types(dev, [&](auto x, auto g) {
                typedef decltype(x) X;
                typedef decltype(g) G;
                double* its = sizeof(X) < sizeof(G) ? &of_sums : &worst;
                matmul_backward_input_case<X, G>(test, &worst, &dev, s[0], s[1], s[2], accumulate);
                matmul_backward_weight_case<X, G>(test, its, &dev, s[0], s[1], s[2], accumulate);
            });
        }
    }
    note(test, "tensor cores' sums %.2f of bound", of_sums);
}

template <typename X, typename G>
void embedding_case(Test* test, double* worst, const Device* dev, int B, int T, int C, int V, int Vp, double skew) {
    int64_t n = (int64_t)B * T * C, table = (int64_t)Vp * C, places = (int64_t)T * C;
    const int N = B * T;
    Room room(dev);
    int *host = room.host<int>(N), *host_order = room.host<int>(N), *host_bucket = room.host<int>(2 * (N + 1)), largest;
    for (int i = 0; i < N; i++) host[i] = (int)(V * pow(0.5 + 0.5 * test_uniform(11, i), skew)) % V;  // most are small
    const int buckets = list_by_token(host, N, V, host_order, host_bucket, &largest);
    int *tokens = room.to_device(host, N), *order = room.to_device(host_order, N);
    int* bucket = room.to_device(host_bucket, 2 * (buckets + 1));
    const bool tied = std::is_same_v<G, float>;  // then the gradient is the sum
    Array<X> wte(dev, table, 1, 1.0f), wpe(dev, places, 2, 1.0f), out(dev, n), d(dev, n, 3, 1.0f);
    Array<float> sum(dev, table, 4, 1.0f);
    embedding_forward_cpu(out.want, host, wte.host, wpe.host, B, T, C);
    const auto forward = [&] { embedding_forward(dev, out.device, tokens, wte.device, wpe.device, B, T, C); };
    check_outputs(test, worst, forward, {{"out", &out, EPS32}});
    for (bool accumulate : {false, true}) {
        Array<G> dwte(dev, tied ? 1 : table), dwpe(dev, places, 5, 1.0f, accumulate);
        memcpy(sum.want, sum.host, table * sizeof(float));
        embedding_backward_cpu(sum.want, dwpe.want, d.host, host_order, host_bucket, buckets, B, T, C, accumulate);
        if (!tied) memcpy(dwte.want, sum.want, table * sizeof(float));
        const auto run = [&] {
            embedding_backward(dev, tied ? (G*)sum.device : dwte.device, dwpe.device, sum.device, d.device, order,
                               bucket, buckets, B, T, C, Vp, accumulate);
        };
        const double bound = product_bound(largest, 1.0);
        const Output outputs[] = {
            {"dwpe", &dwpe, product_bound(B, 1.0)}, {"dwte_sum", &sum, bound}, {"dwte", &dwte, bound}};
        check_outputs(test, worst, run, outputs, tied ? 2 : 3);
    }
}

OPERATOR_BOTH(embedding) {
    const int shapes[][5] = {{1, 1, 8, 256, 256},         {3, 37, 64, 256, 256},    {16, 256, 768, 256, 256},
                             {8, 256, 128, 50257, 50304}, {5, 100, 1600, 257, 384}, {2, 64, 5120, 1000, 1024}};
    for (auto& s : shapes) {
        in_types(dev, [&](auto x, auto g) {
            embedding_case<decltype(x), decltype(g)>(test, &worst, &dev, s[0], s[1], s[2], s[3], s[4],
                                                     sizeof(g) == 2 ? 1.0 : 6.0);
        });
    }
}

// Arrays of more than 2^31 elements: the last rows, which 32-bit indices would miss.
TEST(kernels_beyond_2_31_elements_gpu) {
    Device dev = test_device(true);
    if (dev.memory < (int64_t)32 << 30) skip("needs 32 GiB of GPU memory");
    const int C = 50304, V = 50257, tail = 8;
    const int64_t N = ((int64_t)1 << 31) / C + 10, n = N * C;
    Room room(&dev);
    bf16 *a = room.device<bf16>(n), *b = room.device<bf16>(n), *got = room.host<bf16>(C);
    int* targets = room.host<int>(N);
    float *losses = room.device<float>(N), loss = NAN;
    for (int64_t i = 0; i < N; i++) targets[i] = tail;
    const int* device_targets = room.to_device(targets, N);
    check(cudaMemsetAsync(a, 0x3f, n * 2, dev.stream));  // every element is 0x3f3f
    copy_to_host(&dev, got, a + n - tail, tail * 2);
    gelu_forward(&dev, b, a, n);
    copy_to_host(&dev, got + tail, b + n - tail, tail * 2);
    float want, first = to_float(got[0]), value = to_float(got[tail + tail - 1]);
    gelu_forward_cpu(&want, &first, 1);
    expect(fabsf(value - want) <= want / 256, "gelu: the last element is %g, want %g", value, want);
    classifier(&dev, losses, a, device_targets, 1.0f, true, N, V, C);
    copy_to_host(&dev, &loss, losses + N - 1, sizeof(float));
    copy_to_host(&dev, got, a + n - C, C * 2);
    expect(fabs(loss - log((double)V)) < 1e-4, "classifier: the last loss is %g, want %g", loss, log((double)V));
    value = to_float(got[tail]), want = 1.0f / V - 1.0f;
    expect(fabsf(value - want) < 1.0 / 256, "classifier: the last target's gradient is %g, want %g", value, want);
    value = to_float(got[V - 1]);
    expect(fabsf(value * V - 1.0f) < 1.0 / 256, "classifier: the last gradient is %g, want %g", value, 1.0 / V);
    expect(to_float(got[C - 1]) == 0.0f, "classifier: the padding is %g", to_float(got[C - 1]));
}

}  // namespace
