// The products next to GELU at the trainer's shapes: cuBLASLt's plain product, the same with a kernel for GELU after
// it, cuBLASLt's epilogue, and ours. Ours is checked against the plain C version first, at odd shapes too.
//   make build/dev/matmul_gelu && ./build/dev/matmul_gelu
#include "../kernels/matmul.cuh"
#include "matmul_gelu.cuh"
#include "timing.h"

struct Arrays {
    int64_t N;
    int C, OC;  // inp (N, C), wide (N, OC)
    bf16 *inp, *weight, *bias, *pre, *out, *dout, *dweight;
    float *dbias, *scratch;
};

__global__ void fill_kernel(bf16* values, int64_t n, float scale, uint32_t seed) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    uint32_t x = (uint32_t)i * 2654435761u + seed * 40503u + (uint32_t)(i >> 32);
    x ^= x >> 16, x *= 0x85ebca6bu, x ^= x >> 13, x *= 0xc2b2ae35u, x ^= x >> 16;
    values[i] = __float2bfloat16(scale * ((float)x / 2147483648.0f - 1.0f));
}

static bf16* filled(const Device* dev, int64_t n, float scale, uint32_t seed) {
    bf16* values = (bf16*)device_alloc(dev, n * 2);
    fill_kernel<<<(unsigned)ceil_div(n, 256), 256, 0, dev->stream>>>(values, n, scale, seed);
    check_launch();
    return values;
}

// dweight is the weight of the layer above, (C, OC): its input is wide, its output narrow.
static Arrays arrays_open(const Device* dev, int64_t N, int C, int OC) {
    float scale = 2.0f / sqrtf((float)C);
    Arrays a;
    a.N = N, a.C = C, a.OC = OC;
    a.inp = filled(dev, N * C, 1.0f, 1), a.weight = filled(dev, (int64_t)OC * C, scale, 2);
    a.bias = filled(dev, OC, 1.0f, 3), a.pre = filled(dev, N * OC, 4.0f, 4), a.out = filled(dev, N * OC, 1.0f, 5);
    a.dout = filled(dev, N * C, 1.0f, 6), a.dweight = filled(dev, (int64_t)OC * C, scale, 7);
    a.dbias = (float*)device_alloc(dev, OC * 4);
    int64_t scratch = matmul_gelu_scratch_bytes(N, OC), other = matmul_backward_bias_scratch_bytes(dev, OC);
    a.scratch = (float*)device_alloc(dev, scratch > other ? scratch : other);
    return a;
}

static void arrays_close(const Device* dev, Arrays* a) {
    void* all[] = {a->inp, a->weight, a->bias, a->pre, a->out, a->dout, a->dweight, a->dbias, a->scratch};
    for (void* array : all) device_free(dev, array);
}

static void forward_plain(const Device* dev, const Arrays* a) {
    matmul_forward<bf16>(dev, a->pre, nullptr, a->inp, a->weight, a->bias, a->N, a->C, a->OC);
}
static void forward_kernel(const Device* dev, const Arrays* a) {
    forward_plain(dev, a);
    gelu_forward(dev, a->out, a->pre, a->N * a->OC);
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
static void backward_bias(const Device* dev, const Arrays* a) {
    matmul_backward_bias<bf16, float>(dev, a->dbias, a->scratch, a->out, a->N, a->OC, false);
}
static void backward_kernel(const Device* dev, const Arrays* a) {
    backward_plain(dev, a);
    gelu_backward_inplace(dev, a->out, a->pre, a->N * a->OC);
    backward_bias(dev, a);
}
static void backward_epilogue(const Device* dev, const Arrays* a) {
    MatmulPointers fused = {a->dweight, a->dout, a->out, nullptr, a->pre};
    matmul_launch<bf16, bf16>(dev, &fused, CUBLAS_OP_N, CUBLAS_OP_N, a->OC, a->N, a->C, CUBLASLT_EPILOGUE_DGELU, false);
    backward_bias(dev, a);
}
static void backward_ours(const Device* dev, const Arrays* a) {
    matmul_gelu_backward<float>(dev, a->out, a->dbias, a->scratch, a->dout, a->dweight, a->pre, a->N, a->OC, a->C,
                                false);
}

struct Variant {
    const char* name;
    void (*run)(const Device* dev, const Arrays* arrays);
};
static const Variant VARIANTS[] = {
    {"fc: plain product", forward_plain},
    {"fc: product, gelu kernel", forward_kernel},
    {"fc: cuBLASLt's epilogue", forward_epilogue},
    {"fc: ours", forward_ours},
    {"d fc: plain product", backward_plain},
    {"d fc: product, dgelu kernel, bias kernel", backward_kernel},
    {"d fc: cuBLASLt's epilogue, bias kernel", backward_epilogue},
    {"d fc: ours, with bias", backward_ours},
};

static float* host_floats(const Device* dev, const bf16* device, int64_t n) {
    bf16* bits = (bf16*)malloc(n * 2);
    float* values = (float*)malloc(n * 4);
    copy_to_host(dev, bits, device, n * 2);
    for (int64_t i = 0; i < n; i++) values[i] = __bfloat162float(bits[i]);
    free(bits);
    return values;
}

// ||got - want|| / ||want||, and at most 1e30 for what is not a number.
static double relative_error(const float* got, const float* want, int64_t n) {
    double error = 0.0, norm = 0.0;
    for (int64_t i = 0; i < n; i++) {
        double difference = (double)got[i] - want[i];
        error += isfinite(difference) ? difference * difference : 1e60;
        norm += (double)want[i] * want[i];
    }
    return sqrt(error / norm);
}

static bool is_right(const Device* dev, int64_t N, int C, int OC) {
    Arrays a = arrays_open(dev, N, C, OC);
    int64_t wide = N * OC;
    float *inp = host_floats(dev, a.inp, N * C), *weight = host_floats(dev, a.weight, (int64_t)OC * C);
    float *bias = host_floats(dev, a.bias, OC), *pre = host_floats(dev, a.pre, wide);
    float *dout = host_floats(dev, a.dout, N * C), *dweight = host_floats(dev, a.dweight, (int64_t)OC * C);
    float *want = (float*)malloc(wide * 4), *want_pre = (float*)malloc(wide * 4), *sums = (float*)malloc(2 * OC * 4);
    matmul_backward_gelu_cpu(want, sums, dout, dweight, pre, N, OC, C, false);
    backward_ours(dev, &a);
    check(cudaStreamSynchronize(dev->stream));
    float* got = host_floats(dev, a.out, wide);
    double error_d = relative_error(got, want, wide);
    column_sum_cpu(sums, got, N, OC, false);
    copy_to_host(dev, sums + OC, a.dbias, OC * 4);
    double error_bias = relative_error(sums + OC, sums, OC);
    matmul_forward_cpu(want, want_pre, inp, weight, bias, N, C, OC);
    forward_ours(dev, &a);
    check(cudaStreamSynchronize(dev->stream));
    float *out = host_floats(dev, a.out, wide), *out_pre = host_floats(dev, a.pre, wide);
    double error_out = relative_error(out, want, wide), error_pre = relative_error(out_pre, want_pre, wide);
    const double bound = 1.0 / 256;  // bf16's epsilon
    bool right = error_d < bound && error_out < 2 * bound && error_pre < bound && error_bias < 1e-5;
    printf("N %5lld C %4d OC %4d  errors / bf16 epsilon: pre %.2f, out %.2f, d %.2f; bias %.1e  %s\n", (long long)N, C,
           OC, error_pre / bound, error_out / bound, error_d / bound, error_bias, right ? "ok" : "WRONG");
    fflush(stdout);
    free(inp), free(weight), free(bias), free(pre), free(dout), free(dweight), free(want), free(want_pre), free(sums);
    free(got), free(out), free(out_pre);
    arrays_close(dev, &a);
    return right;
}

int main() {
    Device dev;
    device_open(&dev, true, 0);
    printf("%s\n", dev.name);
    bool right = true;
    const int64_t small[][3] = {
        {256, 64, 192}, {128, 128, 384}, {1000, 200, 1288}, {3000, 768, 3072}, {1111, 1600, 2000}};
    for (auto& s : small) right = is_right(&dev, s[0], (int)s[1], (int)s[2]) && right;
    const int64_t shapes[][2] = {{65536, 768}, {32768, 1024}, {32768, 1280}, {16384, 1600}};
    for (auto& s : shapes) {
        Arrays a = arrays_open(&dev, s[0], (int)s[1], 4 * (int)s[1]);
        for (const Variant& v : VARIANTS) {
            double ms = median_ms(&dev, 20, [&] { v.run(&dev, &a); });
            double flops = 8.0 * (double)s[0] * (double)s[1] * (double)s[1];
            printf("%-42s N %5lld C %4lld %8.4f ms %6.1f TFLOP/s\n", v.name, (long long)s[0], (long long)s[1], ms,
                   flops / ms * 1e-9);
            fflush(stdout);
        }
        arrays_close(&dev, &a);
    }
    device_close(&dev);
    return !right;
}
