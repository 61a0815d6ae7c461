// The products next to GELU at the trainer's shapes: cuBLASLt's plain product, its epilogue (backward with the bias
// gradient's kernel, which ours needs not), and ours (kernels/matmul_gelu.cuh). A product draws all the power that the
// card may use, so its clock depends on what ran before: variants.h warms the card and takes turns.
//   make build/dev/matmul_gelu && ./build/dev/matmul_gelu
#include "../kernels/matmul.cuh"
#include "variants.h"

struct Arrays : Room {
    Shape shape;
    int64_t N = shape.N;
    int C = shape.C, OC = shape.OC;  // inp, dout (N, C); pre, given, out (N, OC); weight (OC, C); dweight (C, OC)
    bf16 *inp, *weight, *bias, *pre, *given, *out, *dout, *dweight;
    float *dbias, *scratch;

    Arrays(const Device* on, const Shape& of) : Room(on), shape(of) {
        const float scale = 2.0f / sqrtf((float)C);
        inp = filled(this, N * C, 1.0f, 1), weight = filled(this, (int64_t)OC * C, scale, 2);
        bias = filled(this, OC, 1.0f, 3), given = filled(this, N * OC, 4.0f, 4), out = filled(this, N * OC, 1.0f, 5);
        dout = filled(this, N * C, 1.0f, 6), dweight = filled(this, (int64_t)OC * C, scale, 7);
        pre = filled(this, N * OC, 1.0f, 8), dbias = device<float>(OC);
        scratch = (float*)device<char>(matmul_backward_gelu_scratch_bytes(on, N, OC));
    }
    double unit() const { return 2.0 * (double)N * C * OC; }
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

static double error_forward(const Variant<Arrays>* v, Arrays* a) {
    const int64_t n = a->N * a->OC;
    float *out = a->host<float>(n), *pre = a->host<float>(n);
    matmul_forward_cpu(out, pre, host_floats(a, a->inp, a->N * a->C), host_floats(a, a->weight, (int64_t)a->OC * a->C),
                       host_floats(a, a->bias, a->OC), a->N, a->C, a->OC);
    v->run(a->dev, a);
    const double error = off(a, a->pre, pre, n);
    return v->run == forward_plain ? error : worst(error, off(a, a->out, out, n, 2.0 / 256));
}

static double error_backward(const Variant<Arrays>* v, Arrays* a) {
    const int64_t n = a->N * a->OC;
    const float *dout = host_floats(a, a->dout, a->N * a->C), *given = host_floats(a, a->given, n);
    const float* dweight = host_floats(a, a->dweight, (int64_t)a->OC * a->C);
    float *want = a->host<float>(n), *sums = a->host<float>(a->OC);
    v->run(a->dev, a);
    if (v->run == backward_plain) {
        const Device cpu = {};
        matmul_backward_input<float>(&cpu, want, dout, dweight, a->N, a->OC, a->C);
        return off(a, a->out, want, n);
    }
    matmul_backward_gelu_cpu(want, sums, dout, dweight, given, a->N, a->OC, a->C, false);
    column_sum_cpu(sums, host_floats(a, a->out, n), a->N, a->OC, false);  // of what was rounded
    return worst(off(a, a->out, want, n), off(a, a->dbias, sums, a->OC));
}

static const Variant<Arrays> VARIANTS[] = {
    {"fc: plain product", forward_plain, 1, error_forward},
    {"fc: cuBLASLt's epilogue", forward_epilogue, 1, error_forward},
    {"fc: prod", forward_ours, 1, error_forward},
    {"d fc: plain product", backward_plain, 1, error_backward},
    {"d fc: cuBLASLt's epilogue, bias kernel", backward_epilogue, 1, error_backward},
    {"d fc: prod", backward_ours, 1, error_backward},
};

int main() {
    Device dev;
    device_open(&dev, true, 0);
    if (!matmul_gelu_fits(&dev, 65536, 3072, 768)) user_error("matmul_gelu: ours needs an H100 or H200, and sm_90a");
    return check_and_time(&dev, VARIANTS, {{640, 512, 768}, {1000, 456, 1288}, {1111, 1600, 520}, {9000, 768, 1032}},
                          {{65536, 768, 3072}, {32768, 1024, 4096}, {32768, 1280, 5120}, {16384, 1600, 6400}}, false);
}
