// The products next to GELU at the trainer's shapes: cuBLASLt's plain product, its epilogue (backward with the bias
// gradient's kernel, which ours needs not), and ours (kernels/matmul_gelu.cuh). Ours is checked against the plain C
// version first, at odd shapes too. A product draws all the power that the card may use, so its clock depends on what
// ran before: half a second of products comes first, then the variants take turns, each run 20 ms before its 20 ms
// count, and the median of the rounds is printed.
//   make build/dev/matmul_gelu && ./build/dev/matmul_gelu
#include "../kernels/matmul.cuh"
#include "timing.h"

struct Arrays : Room {
    int64_t N;
    int C, OC;  // inp, dout (N, C); pre, given, out (N, OC); weight (OC, C); dweight (C, OC)
    bf16 *inp, *weight, *bias, *pre, *given, *out, *dout, *dweight;
    float *dbias, *scratch;

    Arrays(const Device* on, int64_t rows, int channels, int wide) : Room(on), N(rows), C(channels), OC(wide) {
        const float scale = 2.0f / sqrtf((float)C);
        inp = filled(this, N * C, 1.0f, 1), weight = filled(this, (int64_t)OC * C, scale, 2);
        bias = filled(this, OC, 1.0f, 3), given = filled(this, N * OC, 4.0f, 4), out = filled(this, N * OC, 1.0f, 5);
        dout = filled(this, N * C, 1.0f, 6), dweight = filled(this, (int64_t)OC * C, scale, 7);
        pre = filled(this, N * OC, 1.0f, 8), dbias = device<float>(OC);
        scratch = (float*)device<char>(matmul_backward_gelu_scratch_bytes(on, N, OC));
    }
};

static void forward_plain(const Device* dev, const Arrays* a) {
    matmul_forward<bf16>(dev, a->pre, nullptr, a->inp, a->weight, a->bias, a->N, a->C, a->OC);
}
static void forward_epilogue(const Device* dev, const Arrays* a) {
    MatmulPointers fused = {a->weight, a->inp, a->out, a->bias, a->pre};
    matmul_launch<bf16, bf16>(dev, &fused, CUBLAS_OP_T, CUBLAS_OP_N, a->OC, a->N, a->C, CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
                              false);
}
static void forward_ours(const Device* dev, const Arrays* a) {
    matmul_gelu_forward(dev, a->out, a->pre, a->inp, a->weight, a->bias, a->N, a->C, a->OC);
}
static void backward_plain(const Device* dev, const Arrays* a) {
    matmul_backward_input<bf16>(dev, a->out, a->dout, a->dweight, a->N, a->OC, a->C);
}
static void backward_epilogue(const Device* dev, const Arrays* a) {
    MatmulPointers fused = {a->dweight, a->dout, a->out, nullptr, a->given};
    matmul_launch<bf16, bf16>(dev, &fused, CUBLAS_OP_N, CUBLAS_OP_N, a->OC, a->N, a->C, CUBLASLT_EPILOGUE_DGELU, false);
    matmul_backward_bias<bf16, float>(dev, a->dbias, a->scratch, a->out, a->N, a->OC, false);
}
static void backward_ours(const Device* dev, const Arrays* a) {
    matmul_gelu_backward<float>(dev, a->out, a->dbias, a->scratch, a->dout, a->dweight, a->given, a->N, a->OC, a->C,
                                false);
}

struct Variant {
    const char* name;
    void (*run)(const Device* dev, const Arrays* arrays);
};
static const Variant VARIANTS[] = {
    {"fc: plain product", forward_plain},
    {"fc: cuBLASLt's epilogue", forward_epilogue},
    {"fc: prod", forward_ours},
    {"d fc: plain product", backward_plain},
    {"d fc: cuBLASLt's epilogue, bias kernel", backward_epilogue},
    {"d fc: prod", backward_ours},
};
constexpr int VARIANT_COUNT = sizeof(VARIANTS) / sizeof(VARIANTS[0]);

static bool is_right(const Device* dev, int64_t N, int C, int OC) {
    Arrays a(dev, N, C, OC);
    const int64_t wide = N * OC;
    const float *inp = host_floats(&a, a.inp, N * C), *weight = host_floats(&a, a.weight, (int64_t)OC * C);
    const float *bias = host_floats(&a, a.bias, OC), *given = host_floats(&a, a.given, wide);
    const float *dout = host_floats(&a, a.dout, N * C), *dweight = host_floats(&a, a.dweight, (int64_t)OC * C);
    float *want = a.host<float>(wide), *want_pre = a.host<float>(wide), *sums = a.host<float>(OC);
    matmul_backward_gelu_cpu(want, sums, dout, dweight, given, N, OC, C, false);
    backward_ours(dev, &a);
    const float* got = host_floats(&a, a.out, wide);
    const double error_d = relative_error(got, want, wide);
    column_sum_cpu(sums, got, N, OC, false);
    const double error_bias = relative_error(a.to_host(a.dbias, OC), sums, OC);
    matmul_forward_cpu(want, want_pre, inp, weight, bias, N, C, OC);
    forward_ours(dev, &a);
    const double error_out = relative_error(host_floats(&a, a.out, wide), want, wide),
                 error_pre = relative_error(host_floats(&a, a.pre, wide), want_pre, wide);
    const double bound = 1.0 / 256;  // bf16's epsilon
    const bool right = error_d < bound && error_out < 2 * bound && error_pre < bound && error_bias < 1e-5;
    printf("N %5lld C %4d OC %4d  errors / bf16 epsilon: pre %.2f, out %.2f, d %.2f; bias %.1e  %s\n", (long long)N, C,
           OC, error_pre / bound, error_out / bound, error_d / bound, error_bias, right ? "ok" : "WRONG");
    return right;
}

static void time_shape(const Device* dev, int64_t N, int C) {
    Arrays a(dev, N, C, 4 * C);
    const double flops = 8.0 * (double)N * (double)C * (double)C;
    const int times = 1 + (int)(20e-3 * 600e12 / flops);
    const auto run_ms = [&](const Variant& v) {  // of one of `times` runs
        return elapsed_ms(dev,
                          [&] {
                              for (int i = 0; i < times; i++) v.run(dev, &a);
                          }) /
               times;
    };
    for (double warm = 0.0; warm < 500.0;) warm += times * run_ms(VARIANTS[0]);
    Times measured[VARIANT_COUNT];
    for (int round = 0; round < 7; round++) {
        for (int i = 0; i < VARIANT_COUNT; i++) {
            run_ms(VARIANTS[i]);
            measured[i].add(run_ms(VARIANTS[i]));
        }
    }
    for (int i = 0; i < VARIANT_COUNT; i++) {
        const Times& t = measured[i];
        printf("%-42s N %5lld C %4d %8.4f ms (%.4f to %.4f) %6.1f TFLOP/s\n", VARIANTS[i].name, (long long)N, C,
               t.median(), t.ms[0], t.ms[t.count - 1], flops / t.median() * 1e-9);
    }
    fflush(stdout);
}

int main() {
    Device dev;
    device_open(&dev, true, 0);
    printf("%s\n", dev.name);
    if (!matmul_gelu_fits(&dev, 65536, 3072, 768)) user_error("matmul_gelu: ours needs an H100 or H200, and sm_90a");
    bool right = true;
    const int64_t small[][3] = {{640, 512, 768}, {1000, 456, 1288}, {1111, 1600, 520}, {9000, 768, 1032}};
    for (auto& s : small) right = is_right(&dev, s[0], (int)s[1], (int)s[2]) && right;
    const int64_t shapes[][2] = {{65536, 768}, {32768, 1024}, {32768, 1280}, {16384, 1600}};
    for (auto& s : shapes) time_shape(&dev, s[0], (int)s[1]);
    device_close(&dev);
    return !right;
}
