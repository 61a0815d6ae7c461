// Backward attention on Hopper, variants: check against the plain C version at small shapes, equal bits of two runs,
// and times. Arguments: check NAME | equal NAME | time.
#include "../kernels/attention.cuh"
#include "../kernels/attention_hopper_backward.cuh"

struct Inputs {
    int B, T, NH, HS;
    int64_t n;  // elements of out
    bf16 *qkv, *dqkv, *out, *dout;
    float* lse;
    char* scratch;
    int64_t scratch_bytes;
};

typedef void (*Backward)(const Device* dev, const Inputs* in);

template <typename Shape>
static void run_hopper(const Device* dev, const Inputs* in) {
    attention_hopper_backward<Shape>(dev, in->dqkv, in->scratch, in->dout, in->qkv, in->out, in->lse, in->B, in->T,
                                     in->NH);
}

template <int HS>
static void run_mma(const Device* dev, const Inputs* in) {
    attention_backward_any<bf16, HS>(dev, in->dqkv, in->scratch, in->dout, in->qkv, in->out, in->lse, in->B, in->T,
                                     in->NH);
}

struct Variant {
    const char* name;
    int HS;
    Backward run;
};

static void run_prod(const Device* dev, const Inputs* in) {
    attention_backward<bf16>(dev, in->dqkv, in->scratch, in->dout, in->qkv, in->out, in->lse, in->B, in->T,
                             in->NH * in->HS, in->NH);
}

// Names: x, ablations, timed at two shapes; t, in turns, timed in a process of their own.
static const Variant VARIANTS[] = {
    {"mma64", 64, run_mma<64>},
    {"prod64", 64, run_prod},
    {"down64", 64, run_hopper<HopperBackwardShape<64, 128, false>>},
    {"mma128", 128, run_mma<128>},
    {"prod128", 128, run_prod},
    {"up128", 128, run_hopper<HopperBackwardShape<128, 64, true>>},
    {"uneven64", 64, run_hopper<HopperBackward<64, true>>},
    {"uneven128", 128, run_hopper<HopperBackward<128, true>>},
    {"xrows", 64,
     [](const Device* dev, const Inputs* in) {
         attention_hopper_rows<HopperBackward<64>>(dev, in->scratch, in->dout, in->out, in->lse, in->B, in->T, in->NH);
     }},
};

static uint32_t mix(uint32_t x) {
    x ^= x >> 16, x *= 0x85ebca6bu, x ^= x >> 13, x *= 0xc2b2ae35u, x ^= x >> 16;
    return x;
}

__global__ void fill_kernel(bf16* values, int64_t n, float size, uint32_t seed) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    uint32_t x = (uint32_t)i * 2654435761u + seed * 40503u + (uint32_t)(i >> 32);
    x ^= x >> 16, x *= 0x85ebca6bu, x ^= x >> 13, x *= 0xc2b2ae35u, x ^= x >> 16;
    values[i] = __float2bfloat16(((float)x / 2147483648.0f - 1.0f) * size);
}

static Inputs inputs_open(const Device* dev, int B, int T, int NH, int HS) {
    Inputs in = {B, T, NH, HS, (int64_t)B * T * NH * HS, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 0};
    in.qkv = (bf16*)device_alloc(dev, 3 * in.n * 2), in.dqkv = (bf16*)device_alloc(dev, 3 * in.n * 2);
    in.out = (bf16*)device_alloc(dev, in.n * 2), in.dout = (bf16*)device_alloc(dev, in.n * 2);
    in.lse = (float*)device_alloc(dev, (int64_t)B * NH * T * 4);
    HopperBackwardScratch sizes = hopper_backward_scratch(B, T, NH, HS);
    in.scratch_bytes = sizes.bytes;
    int64_t other = attention_backward_scratch_bytes(dev, B, T, NH * HS, NH);
    if (other > in.scratch_bytes) in.scratch_bytes = other;
    in.scratch = (char*)device_alloc(dev, in.scratch_bytes);
    fill_kernel<<<(unsigned)ceil_div(3 * in.n, 256), 256, 0, dev->stream>>>(in.qkv, 3 * in.n, 1.7f, 1);
    fill_kernel<<<(unsigned)ceil_div(in.n, 256), 256, 0, dev->stream>>>(in.dout, in.n, 1.0f, 2);
    if (HS == 64)
        attention_forward_mma<64>(dev, in.out, in.lse, in.qkv, B, T, NH);
    else
        attention_forward_mma<128>(dev, in.out, in.lse, in.qkv, B, T, NH);
    return in;
}

static void inputs_close(const Device* dev, Inputs* in) {
    device_free(dev, in->qkv), device_free(dev, in->dqkv), device_free(dev, in->out), device_free(dev, in->dout);
    device_free(dev, in->lse), device_free(dev, in->scratch);
}

static void poison(const Device* dev, const Inputs* in) {
    check(cudaMemsetAsync(in->dqkv, 0xff, 3 * in->n * 2, dev->stream));
    check(cudaMemsetAsync(in->scratch, 0xff, in->scratch_bytes, dev->stream));
}

static float* host_floats(const Device* dev, const bf16* device, int64_t n) {
    bf16* bits = (bf16*)malloc(n * 2);
    float* values = (float*)malloc(n * 4);
    copy_to_host(dev, bits, device, n * 2);
    for (int64_t i = 0; i < n; i++) values[i] = __bfloat162float(bits[i]);
    free(bits);
    return values;
}

#ifdef NIBBLE_HANG_REPORT
static int* report;
static void hang_open() {
    check(cudaHostAlloc(&report, 64, cudaHostAllocMapped));
    memset(report, 0, 64);
    check(cudaMemcpyToSymbol(hang_report, &report, sizeof(report)));
}
#endif

static void finish(const Device* dev, const char* what) {
    cudaError_t status = cudaStreamSynchronize(dev->stream);
    if (status == cudaSuccess) return;
    printf("%s: %s", what, cudaGetErrorString(status));
#ifdef NIBBLE_HANG_REPORT
    printf("; hang: place %d block %d thread %d barrier %d parity %d", report[0], report[1], report[2], report[3],
           report[4]);
#endif
    printf("\n");
    exit(1);
}

static bool check_shape(const Device* dev, const Variant* v, int B, int T, int NH) {
    const int HS = v->HS, C = NH * HS;
    Inputs in = inputs_open(dev, B, T, NH, HS);
    poison(dev, &in);
    v->run(dev, &in);
    finish(dev, v->name);
    float *qkv = host_floats(dev, in.qkv, 3 * in.n), *dout = host_floats(dev, in.dout, in.n);
    float *out = host_floats(dev, in.out, in.n), *got = host_floats(dev, in.dqkv, 3 * in.n);
    float *want = (float*)malloc(3 * in.n * 4), *lse = (float*)malloc((int64_t)B * NH * T * 4);
    copy_to_host(dev, lse, in.lse, (int64_t)B * NH * T * 4);
    attention_backward_cpu(want, dout, qkv, out, lse, B, T, C, NH);
    bool right = true;
    double off[3];
    int64_t bad_count[3] = {}, first_bad[3] = {-1, -1, -1};
    for (int part = 0; part < 3; part++) {
        double error = 0, norm = 0;
        for (int64_t row = 0; row < (int64_t)B * T; row++)
            for (int c = 0; c < C; c++) {
                const int64_t i = (row * 3 + part) * C + c;
                const double e = (double)got[i] - want[i];
                error += e * e, norm += (double)want[i] * want[i];
                if (!(fabs(e) <= 0.02 * fabs(want[i]) + 0.02)) {
                    if (bad_count[part]++ == 0) first_bad[part] = i;
                }
            }
        off[part] = sqrt(error / (norm + 1e-6 * in.n));
        if (!(off[part] < 2.0 / 256)) right = false;
    }
    printf("%-14s B%d T%d NH%d: error/eps dq %.3f dk %.3f dv %.3f, bad %lld %lld %lld %s\n", v->name, B, T, NH,
           off[0] * 256, off[1] * 256, off[2] * 256, (long long)bad_count[0], (long long)bad_count[1],
           (long long)bad_count[2], right ? "ok" : "WRONG");
    for (int part = 0; !right && part < 3; part++) {
        if (first_bad[part] < 0) continue;
        const int64_t i = first_bad[part];
        printf("   %s first bad: token %lld head %lld column %lld\n",
               part == 0   ? "dq"
               : part == 1 ? "dk"
                           : "dv",
               (long long)(i / (3 * C)), (long long)(i % C / HS), (long long)(i % HS));
        for (int token = 0; token < T && token < 128; token += token % 64 == 8 ? 56 : token % 64 == 0 ? 1 : 7) {
            printf("    token %3d:", token);
            for (int c = 0; c < HS; c += c % 32 == 8 ? 24 : c % 32 < 2 ? 1 : 6) {
                const int64_t j = ((int64_t)token * 3 + part) * C + c;
                printf(" [%d] %.4f/%.4f", c, got[j], want[j]);
            }
            printf("\n");
        }
    }
    free(qkv), free(dout), free(out), free(got), free(want), free(lse);
    inputs_close(dev, &in);
    return right;
}

static bool equal_runs(const Device* dev, const Variant* v, int B, int T, int NH) {
    Inputs in = inputs_open(dev, B, T, NH, v->HS);
    const int64_t bytes = 3 * in.n * 2;
    char* bits[3];
    for (int run = 0; run < 3; run++) {
        bits[run] = (char*)malloc(bytes);
        poison(dev, &in);
        if (run < 2)
            v->run(dev, &in);
        else
            (v->HS == 64 ? run_mma<64> : run_mma<128>)(dev, &in);
        finish(dev, v->name);
        copy_to_host(dev, bits[run], in.dqkv, bytes);
    }
    const bool same = memcmp(bits[0], bits[1], bytes) == 0;
    double error = 0, norm = 0;
    uint32_t hash = 0;
    for (int64_t i = 0; i < 3 * in.n; i++) {
        float a = __bfloat162float(((bf16*)bits[0])[i]), b = __bfloat162float(((bf16*)bits[2])[i]);
        error += (double)(a - b) * (a - b), norm += (double)b * b;
        hash = mix(hash ^ ((uint16_t*)bits[0])[i]);
    }
    printf("%-14s B%d T%d NH%d: two runs %s, difference to mma / eps %.3f, hash %08x\n", v->name, B, T, NH,
           same ? "equal" : "DIFFER", sqrt(error / norm) * 256, hash);
    for (int run = 0; run < 3; run++) free(bits[run]);
    inputs_close(dev, &in);
    return same;
}

static int compare_floats(const void* a, const void* b) {
    float x = *(const float*)a, y = *(const float*)b;
    return (x > y) - (x < y);
}

static void time_shape(const Device* dev, int B, int NH, int T, int HS, const char* only) {
    Inputs in = inputs_open(dev, B, T, NH, HS);
    float base = 0;
    for (const Variant& v : VARIANTS) {
        if (v.HS != HS || strstr(v.name, "uneven") || (v.name[0] == 'x' && only[0] != 'x')) continue;
        constexpr int WARM = 2, RUNS = 8;
        float times[RUNS];
        cudaEvent_t start, stop;
        check(cudaEventCreate(&start));
        check(cudaEventCreate(&stop));
        for (int i = 0; i < WARM + RUNS; i++) {
            check(cudaEventRecord(start, dev->stream));
            v.run(dev, &in);
            check(cudaEventRecord(stop, dev->stream));
            finish(dev, v.name);
            if (i >= WARM) check(cudaEventElapsedTime(&times[i - WARM], start, stop));
        }
        qsort(times, RUNS, sizeof(float), compare_floats);
        const float ms = (times[RUNS / 2 - 1] + times[RUNS / 2]) / 2;
        if (base == 0 && strstr(v.name, "mma")) base = ms;
        printf("%-14s B%-3d NH%-3d T%-6d HS%-4d %8.3f ms %7.1f TFLOP/s  %.2f of mma's rate\n", v.name, B, NH, T, HS, ms,
               5.0 * B * NH * T * T * HS / ms * 1e-9, base / ms);
        fflush(stdout);
    }
    inputs_close(dev, &in);
}

int main(int argc, char** argv) {
    setvbuf(stdout, nullptr, _IOLBF, 1 << 16);
    Device dev;
    device_open(&dev, true, 0);
#ifdef NIBBLE_HANG_REPORT
    hang_open();
#endif
    const char *what = argc > 1 ? argv[1] : "time", *name = argc > 2 ? argv[2] : "x";
    int wrong = 0;
    if (!strcmp(what, "time")) {
        const char* rest = name[0] == 't' ? name : "";
        time_shape(&dev, 64, 12, 1024, 64, name);
        time_shape(&dev, 16, 25, 1024, 64, rest);
        time_shape(&dev, 16, 12, 4096, 64, name);
        time_shape(&dev, 4, 12, 16384, 64, rest);
        time_shape(&dev, 16, 16, 1024, 128, rest);
        time_shape(&dev, 4, 16, 4096, 128, rest);
    }
    for (const Variant& v : VARIANTS) {
        if (strcmp(v.name, name)) continue;
        if (!strcmp(what, "check")) {
            static const int lengths[] = {64, 128, 1, 17, 65, 192, 256, 300, 1000};
            for (int T : lengths) wrong += !check_shape(&dev, &v, 1, T, 1);
            wrong += !check_shape(&dev, &v, 2, 300, 3);
            wrong += !check_shape(&dev, &v, 3, 1024, 4);
        }
        if (!strcmp(what, "equal")) {
            wrong += !equal_runs(&dev, &v, 3, 1000, 4);
            wrong += !equal_runs(&dev, &v, 32, 777, 12);
            if (!strstr(name, "uneven")) wrong += !equal_runs(&dev, &v, 1, 8192, 12);
        }
    }
    return wrong != 0;
}
