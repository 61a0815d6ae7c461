// Times layernorm's kernels and the bias gradient at the trainer's shapes, in bf16, each against the plain C version
// first: GB/s of the bytes that must move, and their share of the copy rate of the same run.
//   make build/dev/layernorm && ./build/dev/layernorm
#include "../kernels/layernorm.cuh"
#include "../kernels/matmul.cuh"
#include "timing.h"

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
    int64_t N;
    int C;
    bf16 *dinp, *dout, *inp, *weight, *out, *sum, *wide;
    float *dweight, *dbias, *dcolumns, *mean, *rstd, *scratch;

    Arrays(const Device* on, int64_t rows, int channels) : Room(on), N(rows), C(channels) {
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

static void run_first_stage(const Device* dev, const Arrays* a) {
    layernorm_backward_launch(dev, a->dinp, a->scratch, a->dout, a->inp, a->weight, a->mean, a->rstd, a->N, a->C,
                              nullptr);
}

static void run_bias_qkv(const Device* dev, const Arrays* a) {
    matmul_backward_bias<bf16, float>(dev, a->dbias, a->scratch, a->wide, a->N, 3 * a->C, false);
}

static void run_bias_fc(const Device* dev, const Arrays* a) {
    matmul_backward_bias<bf16, float>(dev, a->dbias, a->scratch, a->wide, a->N, 4 * a->C, false);
}

static void run_forward(const Device* dev, const Arrays* a) {
    residual_layernorm_forward<bf16>(dev, a->sum, a->out, a->mean, a->rstd, a->inp, a->dout, a->weight, a->weight, a->N,
                                     a->C);
}

struct Variant {
    const char* name;
    void (*run)(const Device* dev, const Arrays* arrays);
    double accesses;  // of (N, C) bf16 values
};

static const Variant VARIANTS[] = {
    {"forward, residual", run_forward, 4}, {"backward, registers", run_registers, 4},
    {"backward, prod", run_prod, 4},       {"  its first stage", run_first_stage, 4},
    {"bias of 3C", run_bias_qkv, 3},       {"bias of 4C", run_bias_fc, 4},
};

// A backward variant on 3000 rows.
static bool is_right(const Device* dev, const Variant* v, int C) {
    const int64_t N = 3000;
    Arrays a(dev, N, C);
    float *want = host_floats(&a, a.dinp, N * C), *sums[3];
    for (float*& each : sums) each = a.host<float>(C);
    layernorm_backward_cpu(want, sums[0], sums[1], sums[2], host_floats(&a, a.dout, N * C),
                           host_floats(&a, a.inp, N * C), host_floats(&a, a.weight, C), a.to_host(a.mean, N),
                           a.to_host(a.rstd, N), N, C, false);
    v->run(dev, &a);
    const double dinp = relative_error(host_floats(&a, a.dinp, N * C), want, N * C),
                 dweight = relative_error(a.to_host(a.dweight, C), sums[0], C),
                 dbias = relative_error(a.to_host(a.dbias, C), sums[1], C),
                 dcolumns = v->run == run_prod ? relative_error(a.to_host(a.dcolumns, C), sums[2], C) : 0.0;
    const bool right = dinp < 1.0 / 256 && dweight < 1e-5 && dbias < 1e-5 && dcolumns < 1.0 / 256;
    printf("%-22s C %4d  dinp %.2g, dweight %.2g, dbias %.2g, dcolumns %.2g  %s\n", v->name, C, dinp, dweight, dbias,
           dcolumns, right ? "ok" : "WRONG");
    return right;
}

int main() {
    Device dev;
    device_open(&dev, true, 0);
    bool right = true;
    for (int C : {768, 1600})
        for (const Variant& v : VARIANTS)
            if (v.run == run_prod || v.run == run_registers) right = is_right(&dev, &v, C) && right;
    const double rate = print_copy_rate(&dev, 2ll << 30);
    const int64_t shapes[][2] = {{65536, 384}, {65536, 768}, {32768, 1024}, {32768, 1280}, {16384, 1600}};
    for (auto& s : shapes) {
        Arrays a(&dev, s[0], (int)s[1]);
        for (const Variant& v : VARIANTS) {
            const double ms = median_ms(&dev, 20, [&] { v.run(&dev, &a); });
            print_rate(v.name, s[0], s[1], ms, v.accesses * (double)s[0] * (double)s[1] * 2, rate);
            printf("\n");
        }
    }
    device_close(&dev);
    return !right;
}
