// Times attention variants, forward and backward, at the shapes of the table in kernels/README.md, in bf16. Each is
// checked against the plain C version first. `prod` is what the trainer runs. FLOPs are the causal ones: 4 B NH T T
// HS / 2 forward (two products over half the square), 2.5 times that backward.
//   make build/dev/attention && ./build/dev/attention
#include "../kernels/attention.cuh"
#include "variants.h"

struct Arrays : Room {
    Shape shape;
    int B = (int)(shape.N / shape.T), T = shape.T, C = shape.C, NH = shape.NH;
    int64_t n = shape.N * C;  // elements of out
    bf16 *qkv, *dqkv, *out, *dout;
    float *lse, *dbias;
    void* scratch;

    Arrays(const Device* on, const Shape& of) : Room(on), shape(of) {
        qkv = filled(this, 3 * n, 1.7f, 1), dout = filled(this, n, 1.0f, 2);
        dqkv = device<bf16>(3 * n), out = device<bf16>(n), lse = device<float>(shape.N * NH);
        const int64_t bytes = attention_backward_scratch_bytes(on, B, T, C, NH),
                      bias = matmul_backward_bias_scratch_bytes(on, 3 * C);
        dbias = device<float>(3 * C), scratch = device<char>(bytes > bias ? bytes : bias);
        attention_forward(on, out, lse, qkv, B, T, C, NH);
    }
    double unit() const { return (double)shape.N * C * T; }
};

static void forward_prod(const Device* dev, const Arrays* a) {
    attention_forward(dev, a->out, a->lse, a->qkv, a->B, a->T, a->C, a->NH);
}

static void backward_prod(const Device* dev, const Arrays* a) {
    attention_backward(dev, a->dqkv, a->dbias, a->scratch, a->dout, a->qkv, a->out, a->lse, a->B, a->T, a->C, a->NH,
                       false);
}

// Runs on the device as if it had no wgmma: by the kernels of other GPUs.
template <void (*RUN)(const Device*, const Arrays*)>
static void mma(const Device* dev, const Arrays* a) {
    Device other = *dev;
    other.compute = 100;
    RUN(&other, a);
}

// The sums of logarithms are in fp32 throughout.
static double error_forward(const Variant<Arrays>* v, Arrays* a) {
    float *want = a->host<float>(a->n), *lse = a->host<float>(a->shape.N * a->NH);
    attention_forward_cpu(want, lse, host_floats(a, a->qkv, 3 * a->n), a->B, a->T, a->C, a->NH);
    check(cudaMemsetAsync(a->out, 0xff, a->n * 2, a->dev->stream));
    check(cudaMemsetAsync(a->lse, 0xff, a->shape.N * a->NH * 4, a->dev->stream));
    v->run(a->dev, a);
    return worst(off(a, a->out, want, a->n), off(a, a->lse, lse, a->shape.N * a->NH));
}

// out is rounded before D is computed from it.
static double error_backward(const Variant<Arrays>* v, Arrays* a) {
    float *want = a->host<float>(3 * a->n), *out = a->host<float>(a->n), *lse = a->host<float>(a->shape.N * a->NH);
    const float* qkv = host_floats(a, a->qkv, 3 * a->n);
    attention_forward_cpu(out, lse, qkv, a->B, a->T, a->C, a->NH);
    attention_backward_cpu(want, host_floats(a, a->dout, a->n), qkv, out, lse, a->B, a->T, a->C, a->NH);
    check(cudaMemsetAsync(a->dqkv, 0xff, 3 * a->n * sizeof(bf16), a->dev->stream));  // what is not written is found
    v->run(a->dev, a);
    return off(a, a->dqkv, want, 3 * a->n, 2.0 / 256);
}

static const Variant<Arrays> VARIANTS[] = {{"forward, mma", mma<forward_prod>, 2, error_forward},
                                           {"forward, prod", forward_prod, 2, error_forward},
                                           {"backward, mma", mma<backward_prod>, 5, error_backward},
                                           {"backward, prod", backward_prod, 5, error_backward}};

// B sequences of T tokens, NH heads of HS.
static constexpr Shape sequences(int B, int NH, int T, int HS) {
    return {(int64_t)B * T, NH * HS, 0, NH, T};
}

int main() {
    Device dev;
    device_open(&dev, true, 0);
    return check_and_time(&dev, VARIANTS,
                          {sequences(2, 2, 1, 64), sequences(2, 2, 17, 64), sequences(2, 2, 65, 64),
                           sequences(2, 2, 1000, 64), sequences(2, 2, 17, 128), sequences(2, 2, 1000, 128)},
                          {sequences(64, 12, 1024, 64), sequences(16, 25, 1024, 64), sequences(16, 12, 4096, 64),
                           sequences(8, 12, 8192, 64), sequences(4, 12, 16384, 64), sequences(16, 16, 1024, 128),
                           sequences(4, 52, 1024, 128), sequences(8, 16, 4096, 128), sequences(4, 16, 8192, 128),
                           sequences(2, 16, 16384, 128)},
                          false);
}
