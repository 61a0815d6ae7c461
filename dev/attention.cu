// Times attention variants: forward, backward and both, at the shapes of ../shared/reference/measured.md and one with
// heads of 128. Each variant is checked against the plain C version first. `prod` is what the trainer runs.
// FLOPs are the causal ones: 4 B NH T T HS / 2 forward (two products over half the square), 2.5 times that backward.
// Median of 20 runs by CUDA events after 3 for warm-up, random data; the variants take turns run by run, since a second
// of wgmma warms the GPU enough to cost a tenth. With an argument it only checks. -DNIBBLE_HANG_REPORT ends hangs.
//   nvcc -std=c++17 -O3 --expt-relaxed-constexpr -arch=native -Xcompiler -O3,-march=native,-fopenmp dev/attention.cu
//        -lcublasLt -o build/dev/attention && build/dev/attention
#include "../kernels/attention.cuh"
#include "timing.h"

// Each argument as in attention_forward and attention_backward, in bf16. Without a backward pass only forward is timed.
struct Variant {
    const char* name;
    void (*forward)(const Device* dev, bf16* out, float* lse, const bf16* qkv, int B, int T, int C, int NH);
    void (*backward)(const Device* dev, bf16* dqkv, void* scratch, const bf16* dout, const bf16* qkv, const bf16* out,
                     const float* lse, int B, int T, int C, int NH);
};

static void forward_mma(const Device* dev, bf16* out, float* lse, const bf16* qkv, int B, int T, int C, int NH) {
    if (C == NH * 64) return attention_forward_mma<64>(dev, out, lse, qkv, B, T, NH);
    attention_forward_mma<128>(dev, out, lse, qkv, B, T, NH);
}

static void backward_mma(const Device* dev, bf16* dqkv, void* scratch, const bf16* dout, const bf16* qkv,
                         const bf16* out, const float* lse, int B, int T, int C, int NH) {
    if (C == NH * 64) return attention_backward_any<bf16, 64>(dev, dqkv, (char*)scratch, dout, qkv, out, lse, B, T, NH);
    attention_backward_any<bf16, 128>(dev, dqkv, (char*)scratch, dout, qkv, out, lse, B, T, NH);
}

// The direction that production does not take.
static void backward_other_way(const Device* dev, bf16* dqkv, void* scratch, const bf16* dout, const bf16* qkv,
                               const bf16* out, const float* lse, int B, int T, int C, int NH) {
    char* memory = (char*)scratch;
    if (C == NH * 64)
        attention_hopper_backward<HopperBackwardShape<64, 128, false>>(dev, dqkv, memory, dout, qkv, out, lse, B, T,
                                                                       NH);
    else
        attention_hopper_backward<HopperBackwardShape<128, 64, true>>(dev, dqkv, memory, dout, qkv, out, lse, B, T, NH);
}

// The shapes for heads of 64 and of 128.
template <class Small, class Large>
static void forward_hopper(const Device* dev, bf16* out, float* lse, const bf16* qkv, int B, int T, int C, int NH) {
    if (C == NH * 64) return attention_hopper_forward<Small>(dev, out, lse, qkv, B, T, NH);
    attention_hopper_forward<Large>(dev, out, lse, qkv, B, T, NH);
}

template <int HS, int CONSUMERS, int BN, int STAGES, int OPTIONS>
using Hopper = HopperForwardShape<HS, CONSUMERS, BN, STAGES, OPTIONS>;

// The tiles of production with other options.
template <int OPTIONS>
static constexpr auto hopper_with = forward_hopper<Hopper<64, 3, 128, 4, OPTIONS>, Hopper<128, 2, 128, 2, OPTIONS>>;

// wgmma's, a step at a time: both products waited for (serial), exponentials during the product with v (overlap), half
// of the first tile left out where it is out of sight (half), references kept (keep), warpgroups in turn (turns, which
// is production); then other tiles (queries x keys, of heads of 64 / of 128).
static const Variant VARIANTS[] = {
    {"prod", attention_forward<bf16>, attention_backward<bf16>},
    {"mma", forward_mma, backward_mma},
    {"other way", attention_forward<bf16>, backward_other_way},
    {"serial", hopper_with<0>, nullptr},
    {"overlap", hopper_with<OVERLAP>, nullptr},
    {"half", hopper_with<OVERLAP | HALF>, nullptr},
    {"keep", hopper_with<OVERLAP | HALF | KEEP>, nullptr},
    {"turns", hopper_with<OVERLAP | HALF | KEEP | TURNS>, nullptr},
    {"256x64/192x64", forward_hopper<Hopper<64, 4, 64, 8, OVERLAP | KEEP>, Hopper<128, 3, 64, 2, OVERLAP | KEEP>>,
     nullptr},
    {"128x128/128x64",
     forward_hopper<Hopper<64, 2, 128, 4, OVERLAP | HALF | KEEP>, Hopper<128, 2, 64, 4, OVERLAP | KEEP>>, nullptr},
};

struct Shape {
    int B, NH, T, HS;
};

static const Shape SHAPES[] = {
    {64, 12, 1024, 64}, {16, 25, 1024, 64}, {16, 12, 4096, 64}, {4, 12, 16384, 64}, {16, 16, 1024, 128}};

// Uniform in [-size, size).
__global__ void fill_kernel(bf16* values, int64_t n, float size, uint32_t seed) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    uint32_t x = (uint32_t)i * 2654435761u + seed * 40503u + (uint32_t)(i >> 32);
    x ^= x >> 16, x *= 0x85ebca6bu, x ^= x >> 13, x *= 0xc2b2ae35u, x ^= x >> 16;
    values[i] = __float2bfloat16(((float)x / 2147483648.0f - 1.0f) * size);
}

struct Buffers {
    int64_t n;  // elements of out
    bf16 *qkv, *dqkv, *out, *dout;
    float* lse;
    void* scratch;
};

static Buffers buffers_open(const Device* dev, Shape s, float size = 1.7f) {
    Buffers b;
    b.n = (int64_t)s.B * s.T * s.NH * s.HS;
    b.qkv = (bf16*)device_alloc(dev, 3 * b.n * 2), b.dqkv = (bf16*)device_alloc(dev, 3 * b.n * 2);
    b.out = (bf16*)device_alloc(dev, b.n * 2), b.dout = (bf16*)device_alloc(dev, b.n * 2);
    b.lse = (float*)device_alloc(dev, (int64_t)s.B * s.T * s.NH * 4);
    b.scratch = device_alloc(dev, attention_backward_scratch_bytes(dev, s.B, s.T, s.NH * s.HS, s.NH));
    fill_kernel<<<(unsigned)ceil_div(3 * b.n, 256), 256, 0, dev->stream>>>(b.qkv, 3 * b.n, size, 1);
    fill_kernel<<<(unsigned)ceil_div(b.n, 256), 256, 0, dev->stream>>>(b.dout, b.n, 1.0f, 2);
    check_launch();
    return b;
}

static void buffers_close(const Device* dev, Buffers* b) {
    device_free(dev, b->qkv), device_free(dev, b->dqkv), device_free(dev, b->out), device_free(dev, b->dout);
    device_free(dev, b->lse), device_free(dev, b->scratch);
}

static void run_forward(const Device* dev, const Variant* v, const Buffers* b, Shape s) {
    v->forward(dev, b->out, b->lse, b->qkv, s.B, s.T, s.NH * s.HS, s.NH);
}

static void run_backward(const Device* dev, const Variant* v, const Buffers* b, Shape s) {
    v->backward(dev, b->dqkv, b->scratch, b->dout, b->qkv, b->out, b->lse, s.B, s.T, s.NH * s.HS, s.NH);
}

// Prints the first elements that are off by more than any rounding explains.
static void print_first_wrong(const float* got, const float* want, int64_t n, int T, int row, double bound) {
    for (int64_t i = 0, printed = 0; i < n && printed < 4; i++) {
        if (fabs((double)got[i] - want[i]) <= 8 * bound) continue;
        printf("    batch %lld token %lld channel %lld: %.6f, should be %.6f\n", (long long)(i / row / T),
               (long long)(i / row % T), (long long)(i % row), got[i], want[i]);
        printed++;
    }
}

// What the plain C version gives for the inputs of buffers_open.
struct Reference {
    Shape s;
    float size;       // of q, k and v
    int64_t n, rows;  // elements of out, rows of lse
    Buffers b;
    float *out, *lse, *dqkv;
};

static Reference reference_open(const Device* dev, Shape s, float size) {
    Reference r = {s, size, 0, (int64_t)s.B * s.NH * s.T, buffers_open(dev, s, size), nullptr, nullptr, nullptr};
    r.n = r.b.n;
    r.out = (float*)malloc(r.n * 4), r.lse = (float*)malloc(r.rows * 4), r.dqkv = (float*)malloc(3 * r.n * 4);
    float *qkv = host_floats(dev, r.b.qkv, 3 * r.n), *dout = host_floats(dev, r.b.dout, r.n);
    attention_forward_cpu(r.out, r.lse, qkv, s.B, s.T, s.NH * s.HS, s.NH);
    attention_backward_cpu(r.dqkv, dout, qkv, r.out, r.lse, s.B, s.T, s.NH * s.HS, s.NH);
    free(qkv), free(dout);
    return r;
}

static void reference_close(const Device* dev, Reference* r) {
    free(r->out), free(r->lse), free(r->dqkv);
    buffers_close(dev, &r->b);
}

static bool variant_is_right(const Device* dev, const Variant* v, const Reference* r) {
    const double bound = 1.0 / 256;  // bf16's epsilon
    double backward = 0.0;
    check(cudaMemsetAsync(r->b.out, 0xff, r->n * 2, dev->stream));
    check(cudaMemsetAsync(r->b.lse, 0xff, r->rows * 4, dev->stream));
    run_forward(dev, v, &r->b, r->s);
    float *out = host_floats(dev, r->b.out, r->n), *lse = (float*)malloc(r->rows * 4);
    copy_to_host(dev, lse, r->b.lse, r->rows * 4);
    const double forward = relative_error(out, r->out, r->n), log_sum = relative_error(lse, r->lse, r->rows);
    if (v->backward && r->size < 2.0f) {  // scores in the thousands are a test of the forward pass
        run_backward(dev, v, &r->b, r->s);
        float* dqkv = host_floats(dev, r->b.dqkv, 3 * r->n);
        backward = relative_error(dqkv, r->dqkv, 3 * r->n);
        free(dqkv);
    }
    // out is rounded before D is computed from it; lse is fp32 throughout
    const bool right = forward <= bound && backward <= 2 * bound && log_sum <= 1e-5;
    printf("%-14s HS %3d T %4d  error / bf16 epsilon: forward %.2f, backward %.2f, lse %.1e  %s\n", v->name, r->s.HS,
           r->s.T, forward / bound, backward / bound, log_sum, right ? "ok" : "WRONG");
    if (!right) {
        print_first_wrong(out, r->out, r->n, r->s.T, r->s.NH * r->s.HS, bound);
        print_first_wrong(lse, r->lse, r->rows, r->s.T, 1, 1e-5);
    }
    fflush(stdout);
    free(out), free(lse);
    return right;
}

static int compare_floats(const void* a, const void* b) {
    float x = *(const float*)a, y = *(const float*)b;
    return (x > y) - (x < y);
}

constexpr int WARM = 3, RUNS = 20;

static float time_once(const Device* dev, const Variant* v, const Buffers* b, Shape s, bool forward, bool backward) {
    static cudaEvent_t start = nullptr, stop = nullptr;
    float milliseconds;
    if (!start) {
        check(cudaEventCreate(&start));
        check(cudaEventCreate(&stop));
    }
    check(cudaEventRecord(start, dev->stream));
    if (forward) run_forward(dev, v, b, s);
    if (backward) run_backward(dev, v, b, s);
    check(cudaEventRecord(stop, dev->stream));
    check(cudaEventSynchronize(stop));
    check(cudaEventElapsedTime(&milliseconds, start, stop));
    return milliseconds;
}

static float median(float* times /*(RUNS)*/) {
    qsort(times, RUNS, sizeof(float), compare_floats);
    return (times[RUNS / 2 - 1] + times[RUNS / 2]) / 2;
}

// One run of each variant after the other, RUNS times, so that all share the GPU's temperature and clocks.
static void time_shape(const Device* dev, const Variant* variants, int count, Shape s) {
    Buffers b = buffers_open(dev, s);
    const double flops = 2.0 * s.B * s.NH * s.T * s.T * s.HS;
    float(*times)[3][RUNS] = (float(*)[3][RUNS])calloc(count, sizeof(*times));
    for (int run = -WARM; run < RUNS; run++)
        for (int i = 0; i < count; i++)
            for (int what = 0; what < (variants[i].backward ? 3 : 1); what++) {
                float now = time_once(dev, &variants[i], &b, s, what != 1, what != 0);
                if (run >= 0) times[i][what][run] = now;
            }
    for (int i = 0; i < count; i++) {
        const float forward = median(times[i][0]);
        printf("%-14s %3d %3d %6d %4d | %8.3f ", variants[i].name, s.B, s.NH, s.T, s.HS, forward);
        if (!variants[i].backward) {
            printf("%8s %8s    | %6.1f\n", "", "", flops / forward * 1e-9);
        } else {
            const float backward = median(times[i][1]), both = median(times[i][2]);
            printf("%8.3f %8.3f    | %6.1f %6.1f %6.1f\n", backward, both, flops / forward * 1e-9,
                   2.5 * flops / backward * 1e-9, 3.5 * flops / both * 1e-9);
        }
    }
    fflush(stdout);
    free(times);
    buffers_close(dev, &b);
}

#ifdef NIBBLE_HANG_REPORT
static int* report;

static void print_report() {
    if (report[0])
        printf("hang: place %d, block %d, thread %d, barrier %x, parity %d\n", report[0], report[1], report[2],
               (unsigned)report[3], report[4]);
}

static void report_hangs() {
    check(cudaHostAlloc((void**)&report, 5 * sizeof(int), cudaHostAllocMapped));
    memset(report, 0, 5 * sizeof(int));
    check(cudaMemcpyToSymbol(hang_report, &report, sizeof(report)));
    atexit(print_report);
}
#else
static void report_hangs() {}
#endif

int main([[maybe_unused]] int argc, [[maybe_unused]] char** argv) {
    static const struct {
        int T;
        float size;  // of q, k and v; large ones give scores with far maxima
    } INPUTS[] = {{64, 1.7f}, {1, 1.7f}, {17, 1.7f}, {65, 1.7f}, {128, 1.7f}, {1000, 1.7f}, {300, 8.0f}, {500, 40.0f}};
    Device dev;
    device_open(&dev, true, 0);
    report_hangs();
    printf("%s\n", dev.name);
    constexpr int COUNT = sizeof(VARIANTS) / sizeof(VARIANTS[0]);
    int wrong[COUNT] = {}, count = 0;
    for (int HS = 64; HS <= 128; HS += 64)
        for (auto input : INPUTS) {
            Reference r = reference_open(&dev, {2, 2, input.T, HS}, input.size);
            for (int i = 0; i < COUNT; i++) wrong[i] += !variant_is_right(&dev, &VARIANTS[i], &r);
            reference_close(&dev, &r);
        }
    Variant right[COUNT];
    for (int i = 0; i < COUNT; i++)
        if (!wrong[i]) right[count++] = VARIANTS[i];
    if (argc > 1) return count < COUNT;
    printf("%-14s %3s %3s %6s %4s | %8s %8s %8s ms | %6s %6s %6s TFLOP/s\n", "variant", "B", "NH", "T", "HS", "forward",
           "backward", "both", "fwd", "bwd", "both");
    for (const Shape& s : SHAPES) time_shape(&dev, right, count, s);
    device_close(&dev);
    return count < COUNT;
}
