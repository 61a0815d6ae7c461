// Times layernorm's kernels and the bias gradient at the trainer's shapes, in bf16, each against the plain C version
// first: GB/s of the bytes that must move, and their share of the copy rate of the same run.
//   make build/dev/layernorm && ./build/dev/layernorm
#include "../kernels/layernorm.cuh"
#include "../kernels/matmul.cuh"
#include "variants.h"

// Sums two values over the block: the same in every thread; `partial` not that of the call just before.
__device__ inline float2 registers_block_sums(float2 value, float2 partial[16]) {
    value = make_float2(warp_sum(value.x), warp_sum(value.y));
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    value = make_float2(0.0f, 0.0f);
    for (int warp = 0; warp < blockDim.x / 32; warp++) value.x += partial[warp].x, value.y += partial[warp].y;
    return value;
}

// The backward pass without the column sums of dinp, a block a row at a time, each row asked for one turn ahead into
// registers and taken apart in both passes: what prod is measured against.
__global__ void __launch_bounds__(384, 2)
    registers_kernel(bf16* dinp, float* partial, const bf16* dout, const bf16* inp, const bf16* weight,
                     const float* mean, const float* rstd, int64_t N, int C) {
    __shared__ float2 sums[2][16];
    struct Row {
        Vec<bf16> dout, inp, dinp;
        float mean, rstd;
    };
    int c = threadIdx.x * 8;
    auto load = [&](int64_t i) {
        Row row = {};
        if (c < C) {
            row.dout = load_vec(dout + i * C + c);
            row.inp = load_vec(inp + i * C + c);
            row.dinp = load_vec(dinp + i * C + c);
        }
        row.mean = mean[i], row.rstd = rstd[i];
        return row;
    };
    Vec<bf16> w = {};
    if (c < C) w = load_vec(weight + c);
    float dweight[8] = {}, dbias[8] = {};
    Row next = load(blockIdx.x);
    int turn = 0;
    for (int64_t i = blockIdx.x; i < N; i += gridDim.x) {
        Row row = next;
        if (i + gridDim.x < N) next = load(i + gridDim.x);
        float2 sum = make_float2(0.0f, 0.0f);
        for (int j = 0; j < 8; j++) {
            float d = to_float(row.dout.lane[j]), norm = (to_float(row.inp.lane[j]) - row.mean) * row.rstd;
            dbias[j] += d;
            dweight[j] = fmaf(d, norm, dweight[j]);
            d *= to_float(w.lane[j]);
            sum.x += d;
            sum.y = fmaf(d, norm, sum.y);
        }
        sum = registers_block_sums(sum, sums[turn]);
        turn ^= 1;
        for (int j = 0; j < 8; j++) {
            float d = to_float(row.dout.lane[j]) * to_float(w.lane[j]);
            float norm = (to_float(row.inp.lane[j]) - row.mean) * row.rstd;
            float change = row.rstd * (d - sum.x / C - norm * (sum.y / C));
            row.dinp.lane[j] = from_float<bf16>(to_float(row.dinp.lane[j]) + change);
        }
        if (c < C) store_vec(dinp + i * C + c, row.dinp);
    }
    float* own = partial + (int64_t)blockIdx.x * 2 * C;
    if (c >= C) return;
    for (int j = 0; j < 8; j++) own[c + j] = dweight[j], own[C + c + j] = dbias[j];
}

static int registers_blocks(const Device* dev, int C) {
    return dev->sm_count * (768 / ((int)ceil_div(C, 256) * 32));
}

struct Arrays : Room {
    Shape shape;
    int64_t N = shape.N;
    int C = shape.C;
    bf16 *dinp, *dout, *inp, *weight, *out, *sum, *wide;
    float *dweight, *dbias, *dcolumns, *mean, *rstd, *scratch;

    Arrays(const Device* on, const Shape& of) : Room(on), shape(of) {
        dinp = filled(this, N * C, 1.0f, 1), dout = filled(this, N * C, 1.0f, 2), inp = filled(this, N * C, 1.0f, 3);
        weight = filled(this, C, 1.0f, 4), out = filled(this, N * C, 1.0f, 5), sum = filled(this, N * C, 1.0f, 6);
        wide = filled(this, 4 * N * C, 1.0f, 7);
        dweight = device<float>(C), dcolumns = device<float>(C), dbias = device<float>(4 * C);
        mean = device<float>(N), rstd = device<float>(N);
        int64_t bytes = (int64_t)registers_blocks(on, C) * 2 * C * sizeof(float);
        for (int64_t other :
             {layernorm_backward_scratch_bytes<bf16>(on, C), matmul_backward_bias_scratch_bytes(on, 4 * C)})
            bytes = bytes > other ? bytes : other;
        scratch = (float*)device<char>(bytes);
        layernorm_forward<bf16>(on, out, mean, rstd, inp, weight, weight, N, C);
    }
    double unit() const { return (double)N * C * sizeof(bf16); }
};

static void run_registers(const Device* dev, const Arrays* a) {
    int threads = (int)ceil_div(a->C, 256) * 32, blocks = registers_blocks(dev, a->C);
    registers_kernel<<<blocks, threads, 0, dev->stream>>>(a->dinp, a->scratch, a->dout, a->inp, a->weight, a->mean,
                                                          a->rstd, a->N, a->C);
    check_launch();
    float* totals[2] = {a->dweight, a->dbias};
    column_sum(dev, totals, 2, a->scratch, blocks, a->C, false);
}

static void run_prod(const Device* dev, const Arrays* a) {
    layernorm_backward<bf16, float>(dev, a->dinp, a->dweight, a->dbias, a->dcolumns, a->scratch, a->dout, a->inp,
                                    a->weight, a->mean, a->rstd, a->N, a->C, false);
}

template <int WIDTH>
static void run_bias(const Device* dev, const Arrays* a) {
    matmul_backward_bias<bf16, float>(dev, a->dbias, a->scratch, a->wide, a->N, WIDTH * a->C, false);
}

static void run_forward(const Device* dev, const Arrays* a) {
    residual_layernorm_forward<bf16>(dev, a->sum, a->out, a->mean, a->rstd, a->inp, a->dout, a->weight, a->weight, a->N,
                                     a->C);
}

static double error_forward(const Variant<Arrays>* v, Arrays* a) {
    const int64_t n = a->N * a->C;
    float *sum = a->host<float>(n), *out = a->host<float>(n), *mean = a->host<float>(a->N),
          *rstd = a->host<float>(a->N);
    const float* weight = host_floats(a, a->weight, a->C);
    residual_layernorm_forward_cpu(sum, out, mean, rstd, host_floats(a, a->inp, n), host_floats(a, a->dout, n), weight,
                                   weight, a->N, a->C);
    v->run(a->dev, a);
    return worst(worst(off(a, a->sum, sum, n), off(a, a->out, out, n)), off(a, a->rstd, rstd, a->N, 1e-2));
}

// Only prod has dcolumns.
static double error_backward(const Variant<Arrays>* v, Arrays* a) {
    const int64_t n = a->N * a->C;
    float *want = host_floats(a, a->dinp, n), *sums[3];
    for (float*& each : sums) each = a->host<float>(a->C);
    layernorm_backward_cpu(want, sums[0], sums[1], sums[2], host_floats(a, a->dout, n), host_floats(a, a->inp, n),
                           host_floats(a, a->weight, a->C), a->to_host(a->mean, a->N), a->to_host(a->rstd, a->N), a->N,
                           a->C, false);
    v->run(a->dev, a);
    double error = off(a, a->dinp, want, n);
    error = worst(error, worst(off(a, a->dweight, sums[0], a->C), off(a, a->dbias, sums[1], a->C)));
    return v->run == run_prod ? worst(error, off(a, a->dcolumns, sums[2], a->C, 1.0 / 256)) : error;
}

template <int WIDTH>
static double error_bias(const Variant<Arrays>* v, Arrays* a) {
    float* want = a->host<float>(WIDTH * a->C);
    column_sum_cpu(want, host_floats(a, a->wide, WIDTH * a->N * a->C), a->N, WIDTH * a->C, false);
    v->run(a->dev, a);
    return off(a, a->dbias, want, WIDTH * a->C);
}

static const Variant<Arrays> VARIANTS[] = {
    {"forward, residual", run_forward, 4, error_forward}, {"backward, registers", run_registers, 4, error_backward},
    {"backward, prod", run_prod, 4, error_backward},      {"bias of 3C", run_bias<3>, 3, error_bias<3>},
    {"bias of 4C", run_bias<4>, 4, error_bias<4>},
};

int main() {
    Device dev;
    device_open(&dev, true, 0);
    return check_and_time(&dev, VARIANTS, {{3000, 768, 0}, {3000, 1600, 0}},
                          {{65536, 384, 0}, {65536, 768, 0}, {32768, 1024, 0}, {32768, 1280, 0}, {16384, 1600, 0}},
                          true);
}
