// The products next to GELU at the trainer's shapes: cuBLASLt's plain product, its epilogue, and ours. Ours is checked
// against the plain C version first, at odd shapes too, and timed in turn with cuBLASLt on a warm card.
//   make build/dev/matmul_gelu && ./build/dev/matmul_gelu
#include "../kernels/matmul.cuh"
#include "matmul_gelu.cuh"
#include "timing.h"

struct Arrays {
    int64_t N;
    int C, OC;  // inp (N, C), wide (N, OC)
    bf16 *inp, *weight, *bias, *pre, *out, *dout, *dweight, *pre_out, *want, *want_pre;
    float *dbias, *scratch;
    long long* account;
};

__global__ void fill_kernel(bf16* values, int64_t n, float scale, uint32_t seed) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    uint32_t x = (uint32_t)i * 2654435761u + seed * 40503u + (uint32_t)(i >> 32);
    x ^= x >> 16, x *= 0x85ebca6bu, x ^= x >> 13, x *= 0xc2b2ae35u, x ^= x >> 16;
    values[i] = __float2bfloat16(scale * ((float)x / 2147483648.0f - 1.0f));
}

// Sums of (got - want)^2 and want^2, a pair a block.
__global__ void difference_kernel(double* sums, const bf16* got, const bf16* want, int64_t n) {
    __shared__ double part[2][256];
    double error = 0.0, norm = 0.0;
    for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < n; i += (int64_t)gridDim.x * 256) {
        double w = __bfloat162float(want[i]), d = __bfloat162float(got[i]) - w;
        error += d * d, norm += w * w;
    }
    part[0][threadIdx.x] = error, part[1][threadIdx.x] = norm;
    __syncthreads();
    if (threadIdx.x > 0) return;
    error = norm = 0.0;
    for (int i = 0; i < 256; i++) error += part[0][i], norm += part[1][i];
    sums[2 * blockIdx.x] = error, sums[2 * blockIdx.x + 1] = norm;
}

static double device_error(const Device* dev, const bf16* got, const bf16* want, int64_t n) {
    static double* sums = (double*)device_alloc(dev, 1024 * 16);
    difference_kernel<<<1024, 256, 0, dev->stream>>>(sums, got, want, n);
    check_launch();
    double host[2048], error = 0.0, norm = 0.0;
    copy_to_host(dev, host, sums, sizeof(host));
    for (int i = 0; i < 1024; i++) error += host[2 * i], norm += host[2 * i + 1];
    return sqrt(error / norm);
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
    a.pre_out = filled(dev, N * OC, 1.0f, 8), a.want = filled(dev, N * OC, 1.0f, 9);
    a.want_pre = filled(dev, N * OC, 1.0f, 10);
    a.dbias = (float*)device_alloc(dev, OC * 4);
    a.scratch = (float*)device_alloc(dev, matmul_gelu_scratch_bytes(N, OC) + matmul_backward_bias_scratch_bytes(dev, OC));
    a.account = (long long*)device_alloc(dev, 64);
    return a;
}

static void arrays_close(const Device* dev, Arrays* a) {
    void* all[] = {a->inp,     a->weight, a->bias,     a->pre,   a->out,     a->dout,   a->dweight,
                   a->pre_out, a->want,   a->want_pre, a->dbias, a->scratch, a->account};
    for (void* array : all) device_free(dev, array);
}

static void backward_bias(const Device* dev, const Arrays* a, const bf16* d) {
    matmul_backward_bias<bf16, float>(dev, a->dbias, a->scratch, d, a->N, a->OC, false);
}

enum Kind { PLAIN, EPILOGUE, EPILOGUE_BIAS, OURS };
struct Variant {
    const char* name;
    Kind kind;
    bool backward;
    int cluster, group, style, hint;
};

static void cublaslt(const Device* dev, const Arrays* a, bool backward, bf16* out, bf16* pre_out) {
    if (!backward) {
        MatmulPointers fused = {a->weight, a->inp, out, a->bias, pre_out};
        matmul_launch<bf16, bf16>(dev, &fused, CUBLAS_OP_T, CUBLAS_OP_N, a->OC, a->N, a->C,
                                  CUBLASLT_EPILOGUE_GELU_AUX_BIAS, false);
    } else {
        MatmulPointers fused = {a->dweight, a->dout, out, nullptr, a->pre};
        matmul_launch<bf16, bf16>(dev, &fused, CUBLAS_OP_N, CUBLAS_OP_N, a->OC, a->N, a->C, CUBLASLT_EPILOGUE_DGELU,
                                  false);
    }
}

template <int CLUSTER, int STYLE>
static void ours(const Device* dev, const Arrays* a, const Variant* v) {
    MatmulGeluTuning t = {v->group, v->hint, a->account};
    if (v->backward)
        matmul_gelu_backward<CLUSTER, STYLE, float>(dev, a->out, a->dbias, a->scratch, a->dout, a->dweight, a->pre, a->N,
                                             a->OC, a->C, false, t);
    else
        matmul_gelu_forward<CLUSTER, STYLE & 1>(dev, a->out, a->pre_out, a->inp, a->weight, a->bias, a->N, a->C, a->OC, t);
}

static void run(const Device* dev, const Arrays* a, const Variant* v) {
    if (v->kind == PLAIN && v->backward) matmul_backward_input<bf16>(dev, a->out, a->dout, a->dweight, a->N, a->OC, a->C);
    if (v->kind == PLAIN && !v->backward)
        matmul_forward<bf16>(dev, a->pre_out, nullptr, a->inp, a->weight, a->bias, a->N, a->C, a->OC);
    if (v->kind == EPILOGUE || v->kind == EPILOGUE_BIAS) cublaslt(dev, a, v->backward, a->out, a->pre_out);
    if (v->kind == EPILOGUE_BIAS) backward_bias(dev, a, a->out);
    if (v->kind != OURS) return;
    if (v->cluster == 1 && v->style == 0) ours<1, 0>(dev, a, v);
    if (v->cluster == 2 && v->style == 0) ours<2, 0>(dev, a, v);
    if (v->cluster == 1 && v->style == 1) ours<1, 1>(dev, a, v);
    if (v->cluster == 2 && v->style == 1) ours<2, 1>(dev, a, v);
    if (v->cluster == 1 && v->style == 3) ours<1, 3>(dev, a, v);
    if (v->cluster == 2 && v->style == 3) ours<2, 3>(dev, a, v);
}

static const Variant VARIANTS[] = {
    {"fc plain product", PLAIN, false, 0, 0, 0, 0},
    {"fc cuBLASLt's epilogue", EPILOGUE, false, 0, 0, 0, 0},
    {"fc c2 g8", OURS, false, 2, 8, 0, 0},
    {"fc c2 g8 late", OURS, false, 2, 8, 1, 0},
    {"fc c2 g8 late hint", OURS, false, 2, 8, 1, 1},
    {"fc c2 g2 late", OURS, false, 2, 2, 1, 0},
    {"fc c1 g16", OURS, false, 1, 16, 0, 0},
    {"fc c1 g16 late", OURS, false, 1, 16, 1, 0},
    {"fc c1 g16 late hint", OURS, false, 1, 16, 1, 1},
    {"fc c1 g8 late", OURS, false, 1, 8, 1, 0},
    {"fc c1 g32 late", OURS, false, 1, 32, 1, 0},
    {"fc c1 g1 late hint", OURS, false, 1, 1, 1, 1},
    {"d fc cuBLASLt's epilogue", EPILOGUE, true, 0, 0, 0, 0},
    {"d fc cuBLASLt's epilogue, bias kernel", EPILOGUE_BIAS, true, 0, 0, 0, 0},
    {"d fc c2 g8", OURS, true, 2, 8, 0, 0},
    {"d fc c2 g8 late", OURS, true, 2, 8, 1, 0},
    {"d fc c2 g8 late mma", OURS, true, 2, 8, 3, 0},
    {"d fc c2 g8 late mma hint", OURS, true, 2, 8, 3, 1},
    {"d fc c2 g2 late mma", OURS, true, 2, 2, 3, 0},
    {"d fc c1 g16 late", OURS, true, 1, 16, 1, 0},
    {"d fc c1 g16 late mma", OURS, true, 1, 16, 3, 0},
    {"d fc c1 g16 late mma hint", OURS, true, 1, 16, 3, 1},
    {"d fc c1 g8 late mma", OURS, true, 1, 8, 3, 0},
    {"d fc c1 g32 late mma", OURS, true, 1, 32, 3, 0},
};
constexpr int VARIANT_COUNT = sizeof(VARIANTS) / sizeof(VARIANTS[0]);

static bool is_right(const Device* dev, int64_t N, int C, int OC) {
    Arrays a = arrays_open(dev, N, C, OC);
    int64_t wide = N * OC;
    float *inp = host_floats(dev, a.inp, N * C), *weight = host_floats(dev, a.weight, (int64_t)OC * C);
    float *bias = host_floats(dev, a.bias, OC), *pre = host_floats(dev, a.pre, wide);
    float *dout = host_floats(dev, a.dout, N * C), *dweight = host_floats(dev, a.dweight, (int64_t)OC * C);
    float *want_d = (float*)malloc(wide * 4), *want = (float*)malloc(wide * 4), *want_pre = (float*)malloc(wide * 4);
    float* sums = (float*)malloc(2 * OC * 4);
    matmul_backward_gelu_cpu(want_d, sums, dout, dweight, pre, N, OC, C, false);
    matmul_forward_cpu(want, want_pre, inp, weight, bias, N, C, OC);
    bool all = true;
    const double bound = 1.0 / 256;  // bf16's epsilon
    for (const Variant& v : VARIANTS) {
        if (v.kind != OURS) continue;
        device_zero(dev, a.out, wide * 2), device_zero(dev, a.pre_out, wide * 2);
        run(dev, &a, &v);
        check(cudaStreamSynchronize(dev->stream));
        float *got = host_floats(dev, a.out, wide), *got_pre = host_floats(dev, a.pre_out, wide);
        double error = relative_error(got, v.backward ? want_d : want, wide), second;
        if (v.backward) {
            column_sum_cpu(sums, got, N, OC, false);
            copy_to_host(dev, sums + OC, a.dbias, OC * 4);
            second = relative_error(sums + OC, sums, OC);
        } else {
            second = relative_error(got_pre, want_pre, wide) / bound;
        }
        bool right = v.backward ? error < bound && second < 1e-5 : error < 2 * bound && second < 1.0;
        printf("%-24s N %5lld C %4d OC %4d  error / bf16 epsilon %.3f; %s %.2g  %s\n", v.name, (long long)N, C, OC,
               error / bound, v.backward ? "bias" : "pre", second, right ? "ok" : "WRONG");
        fflush(stdout);
        all = all && right;
        free(got), free(got_pre);
    }
    free(inp), free(weight), free(bias), free(pre), free(dout), free(dweight), free(want), free(want_pre), free(sums);
    free(want_d);
    arrays_close(dev, &a);
    return all;
}

static double run_ms(const Device* dev, const Arrays* a, const Variant* v, int times, const cudaEvent_t event[2]) {
    check(cudaEventRecord(event[0], dev->stream));
    for (int i = 0; i < times; i++) run(dev, a, v);
    check(cudaEventRecord(event[1], dev->stream));
    check(cudaEventSynchronize(event[1]));
    float ms;
    check(cudaEventElapsedTime(&ms, event[0], event[1]));
    return ms / times;
}

static void time_shape(const Device* dev, int64_t N, int C, int rounds) {
    Arrays a = arrays_open(dev, N, C, 4 * C);
    int64_t wide = N * 4 * C;
    cudaEvent_t event[2];
    check(cudaEventCreate(&event[0]));
    check(cudaEventCreate(&event[1]));
    const double flops = 8.0 * (double)N * (double)C * (double)C;
    const int times = 1 + (int)(20e9 / (flops / 600));
    double warm = 0.0;
    while (warm < 500.0) warm += times * run_ms(dev, &a, &VARIANTS[1], times, event);
    double ms[VARIANT_COUNT][16], kcycles[VARIANT_COUNT];
    for (int round = 0; round < rounds; round++)
        for (int i = 0; i < VARIANT_COUNT; i++) {
            run_ms(dev, &a, &VARIANTS[i], times, event);  // what it draws sets the clock
            ms[i][round] = run_ms(dev, &a, &VARIANTS[i], times, event);
            long long cycles;
            copy_to_host(dev, &cycles, a.account, sizeof(cycles));
            kcycles[i] = 1e-3 * (double)cycles;
            for (int at = round; at > 0 && ms[i][at - 1] > ms[i][at]; at--) {
                double swap = ms[i][at];
                ms[i][at] = ms[i][at - 1], ms[i][at - 1] = swap;
            }
        }
    for (int i = 0; i < VARIANT_COUNT; i++) {
        const Variant* v = &VARIANTS[i];
        double median = ms[i][rounds / 2];
        printf("%-40s N %5lld C %4d %8.4f ms (%.4f %.4f) %6.1f TFLOP/s", v->name, (long long)N, C, median, ms[i][0],
               ms[i][rounds - 1], flops / median * 1e-9);
        if (v->kind == OURS) {
            cublaslt(dev, &a, v->backward, a.want, a.want_pre);
            run(dev, &a, v);
            printf(" kcycles %.0f (%.2f GHz); differs %.5f", kcycles[i], kcycles[i] / median * 1e-3,
                   device_error(dev, a.out, a.want, wide));
            if (!v->backward) printf(", pre %.6f", device_error(dev, a.pre_out, a.want_pre, wide));
        }
        printf("\n");
        fflush(stdout);
    }
    arrays_close(dev, &a);
}

int main(int argc, char**) {
    Device dev;
    device_open(&dev, true, 0);
    printf("%s\n", dev.name);
    bool right = true;
    if (argc > 1) {
        const int64_t small[][3] = {{640, 512, 768}, {1000, 456, 1288}, {1111, 1600, 520}};
        for (auto& s : small) right = is_right(&dev, s[0], (int)s[1], (int)s[2]) && right;
    } else {
        time_shape(&dev, 65536, 768, 5);
        time_shape(&dev, 16384, 1600, 5);
        time_shape(&dev, 32768, 1280, 3);
    }
    device_close(&dev);
    return !right;
}
