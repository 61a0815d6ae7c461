// Times attention variants: forward, backward and both, at the shapes of the table in kernels/README.md. Each variant
// is checked against the plain C version first. `prod` is what the trainer runs. FLOPs are the causal ones: 4 B NH T T
// HS / 2 forward (two products over half the square), 2.5 times that backward. It prints the median of 20 runs by CUDA
// events after 3 for warm-up, of random data; the variants take turns run by run, since a second of wgmma warms the GPU
// enough to cost a tenth. With an argument it only checks.
//   nvcc -std=c++17 -O3 --expt-relaxed-constexpr -arch=native -Xcompiler -O3,-march=native,-fopenmp dev/attention.cu
//        -lcublasLt -o build/dev/attention && build/dev/attention
#include "../kernels/attention.cuh"
#include "timing.h"

// Each argument as in attention_forward and attention_backward, in bf16.
struct Variant {
    const char* name;
    void (*forward)(const Device* dev, bf16* out, float* lse, const bf16* qkv, int B, int T, int C, int NH);
    void (*backward)(const Device* dev, bf16* dqkv, float* dbias, void* scratch, const bf16* dout, const bf16* qkv,
                     const bf16* out, const float* lse, int B, int T, int C, int NH);
};

static void backward(const Device* dev, bf16* dqkv, float* dbias, void* scratch, const bf16* dout, const bf16* qkv,
                     const bf16* out, const float* lse, int B, int T, int C, int NH) {
    attention_backward(dev, dqkv, dbias, scratch, dout, qkv, out, lse, B, T, C, NH, false);
}

// Returns the device as if it had no wgmma, so that the kernels of other GPUs run on it.
static Device without_wgmma(const Device* dev) {
    Device other = *dev;
    other.compute = 100;
    return other;
}

static void forward_mma(const Device* dev, bf16* out, float* lse, const bf16* qkv, int B, int T, int C, int NH) {
    const Device other = without_wgmma(dev);
    attention_forward(&other, out, lse, qkv, B, T, C, NH);
}

static void backward_mma(const Device* dev, bf16* dqkv, float* dbias, void* scratch, const bf16* dout, const bf16* qkv,
                         const bf16* out, const float* lse, int B, int T, int C, int NH) {
    const Device other = without_wgmma(dev);
    backward(&other, dqkv, dbias, scratch, dout, qkv, out, lse, B, T, C, NH);
}

static const Variant VARIANTS[] = {{"prod", attention_forward<bf16>, backward}, {"mma", forward_mma, backward_mma}};

struct Shape {
    int B, NH, T, HS;
};

static const Shape SHAPES[] = {{64, 12, 1024, 64}, {16, 25, 1024, 64},  {16, 12, 4096, 64},
                               {4, 12, 16384, 64}, {16, 16, 1024, 128}, {4, 52, 1024, 128}};

struct Buffers : Room {
    Shape s;
    int64_t n, rows;  // elements of out, rows of lse
    bf16 *qkv, *dqkv, *out, *dout;
    float *lse, *dbias;
    void* scratch;

    Buffers(const Device* on, Shape shape, float size = 1.7f)
        : Room(on), s(shape), n((int64_t)s.B * s.T * s.NH * s.HS), rows((int64_t)s.B * s.NH * s.T) {
        qkv = filled(this, 3 * n, size, 1), dout = filled(this, n, 1.0f, 2);
        dqkv = device<bf16>(3 * n), out = device<bf16>(n), lse = device<float>(rows);
        const int64_t bytes = attention_backward_scratch_bytes(on, s.B, s.T, s.NH * s.HS, s.NH),
                      bias = matmul_backward_bias_scratch_bytes(on, 3 * s.NH * s.HS);
        dbias = device<float>(3 * s.NH * s.HS), scratch = device<char>(bytes > bias ? bytes : bias);
    }
};

static void run_forward(const Variant* v, const Buffers* b) {
    v->forward(b->dev, b->out, b->lse, b->qkv, b->s.B, b->s.T, b->s.NH * b->s.HS, b->s.NH);
}

static void run_backward(const Variant* v, const Buffers* b) {
    v->backward(b->dev, b->dqkv, b->dbias, b->scratch, b->dout, b->qkv, b->out, b->lse, b->s.B, b->s.T,
                b->s.NH * b->s.HS, b->s.NH);
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

// Inputs, and the plain C version's results for them.
struct Reference : Buffers {
    float size;  // of q, k and v
    float *want, *want_lse, *want_dqkv;

    Reference(const Device* on, Shape shape, float largest) : Buffers(on, shape, largest), size(largest) {
        const float *values = host_floats(this, qkv, 3 * n), *gradient = host_floats(this, dout, n);
        want = host<float>(n), want_lse = host<float>(rows), want_dqkv = host<float>(3 * n);
        attention_forward_cpu(want, want_lse, values, s.B, s.T, s.NH * s.HS, s.NH);
        attention_backward_cpu(want_dqkv, gradient, values, want, want_lse, s.B, s.T, s.NH * s.HS, s.NH);
    }
};

static bool variant_is_right(const Variant* v, Reference* r) {
    const double bound = 1.0 / 256;  // bf16's epsilon
    double backward = 0.0;
    check(cudaMemsetAsync(r->out, 0xff, r->n * 2, r->dev->stream));
    check(cudaMemsetAsync(r->lse, 0xff, r->rows * 4, r->dev->stream));
    run_forward(v, r);
    const float *out = host_floats(r, r->out, r->n), *lse = r->to_host(r->lse, r->rows);
    const double forward = relative_error(out, r->want, r->n), log_sum = relative_error(lse, r->want_lse, r->rows);
    if (r->size < 2.0f) {  // scores in the thousands are a test of the forward pass
        run_backward(v, r);
        backward = relative_error(host_floats(r, r->dqkv, 3 * r->n), r->want_dqkv, 3 * r->n);
    }
    // out is rounded before D is computed from it; lse is fp32 throughout
    const bool right = forward <= bound && backward <= 2 * bound && log_sum <= 1e-5;
    printf("%-14s HS %3d T %4d  error / bf16 epsilon: forward %.2f, backward %.2f, lse %.1e  %s\n", v->name, r->s.HS,
           r->s.T, forward / bound, backward / bound, log_sum, right ? "ok" : "WRONG");
    if (!right) {
        print_first_wrong(out, r->want, r->n, r->s.T, r->s.NH * r->s.HS, bound);
        print_first_wrong(lse, r->want_lse, r->rows, r->s.T, 1, 1e-5);
    }
    fflush(stdout);
    return right;
}

// One run of each variant after the other, 20 times after 3, so that all share the GPU's temperature and clocks.
static void time_shape(const Device* dev, const Variant* variants, int count, Shape s) {
    const Buffers b(dev, s);
    const double flops = 2.0 * s.B * s.NH * s.T * s.T * s.HS;
    std::vector<Times> times(3 * count);  // of each variant: forward, backward, both
    for (int run = -3; run < 20; run++) {
        for (int i = 0; i < 3 * count; i++) {
            const Variant* v = &variants[i / 3];
            const double now = elapsed_ms(dev, [&] {
                if (i % 3 != 1) run_forward(v, &b);
                if (i % 3 != 0) run_backward(v, &b);
            });
            if (run >= 0) times[i].add(now);
        }
    }
    for (int i = 0; i < count; i++) {
        const double forward = times[3 * i].median(), backward = times[3 * i + 1].median(),
                     both = times[3 * i + 2].median();
        printf("%-14s %3d %3d %6d %4d | %8.3f %8.3f %8.3f    | %6.1f %6.1f %6.1f\n", variants[i].name, s.B, s.NH, s.T,
               s.HS, forward, backward, both, flops / forward * 1e-9, 2.5 * flops / backward * 1e-9,
               3.5 * flops / both * 1e-9);
    }
    fflush(stdout);
}

int main([[maybe_unused]] int argc, [[maybe_unused]] char** argv) {
    static const struct {
        int T;
        float size;  // of q, k and v; large ones give scores with far maxima
    } INPUTS[] = {{64, 1.7f}, {1, 1.7f}, {17, 1.7f}, {65, 1.7f}, {128, 1.7f}, {1000, 1.7f}, {300, 8.0f}, {500, 40.0f}};
    Device dev;
    device_open(&dev, true, 0);
    printf("%s\n", dev.name);
    constexpr int COUNT = sizeof(VARIANTS) / sizeof(VARIANTS[0]);
    int wrong[COUNT] = {}, count = 0;
    for (int HS = 64; HS <= 128; HS += 64)
        for (auto input : INPUTS) {
            Reference r(&dev, {2, 2, input.T, HS}, input.size);
            for (int i = 0; i < COUNT; i++) wrong[i] += !variant_is_right(&VARIANTS[i], &r);
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
