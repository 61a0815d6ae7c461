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

struct Arrays {
    int64_t N;
    int C;
    bf16 *dinp, *dout, *inp, *weight, *out, *sum, *wide;
    float *dweight, *dbias, *dcolumns, *mean, *rstd, *scratch;
};

static int registers_blocks(const Device* dev, int C) {
    return dev->sm_count * (768 / ((int)ceil_div(C, 256) * 32));
}

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

static Arrays arrays_open(const Device* dev, int64_t N, int C) {
    Arrays a;
    a.N = N, a.C = C;
    a.dinp = filled(dev, N * C, 1.0f, 1), a.dout = filled(dev, N * C, 1.0f, 2), a.inp = filled(dev, N * C, 1.0f, 3);
    a.weight = filled(dev, C, 1.0f, 4), a.out = filled(dev, N * C, 1.0f, 5), a.sum = filled(dev, N * C, 1.0f, 6);
    a.wide = filled(dev, 4 * N * C, 1.0f, 7);
    a.dweight = (float*)device_alloc(dev, C * 4), a.dcolumns = (float*)device_alloc(dev, C * 4);
    a.dbias = (float*)device_alloc(dev, 4 * C * 4);
    a.mean = (float*)device_alloc(dev, N * 4), a.rstd = (float*)device_alloc(dev, N * 4);
    int64_t scratch = layernorm_backward_scratch_bytes<bf16>(dev, C);
    int64_t other = matmul_backward_bias_scratch_bytes(dev, 4 * C);
    int64_t registers = (int64_t)registers_blocks(dev, C) * 2 * C * sizeof(float);
    scratch = scratch > other ? scratch : other;
    a.scratch = (float*)device_alloc(dev, scratch > registers ? scratch : registers);
    layernorm_forward<bf16>(dev, a.out, a.mean, a.rstd, a.inp, a.weight, a.weight, N, C);
    return a;
}

static void arrays_close(const Device* dev, Arrays* a) {
    void* all[] = {a->dinp,    a->dout,  a->inp,      a->weight, a->out,  a->sum,    a->wide,
                   a->dweight, a->dbias, a->dcolumns, a->mean,   a->rstd, a->scratch};
    for (void* array : all) device_free(dev, array);
}

// A backward variant on 3000 rows.
static bool is_right(const Device* dev, const Variant* v, int C) {
    const int64_t N = 3000;
    Arrays a = arrays_open(dev, N, C);
    float *want = host_floats(dev, a.dinp, N * C), *dout = host_floats(dev, a.dout, N * C);
    float *inp = host_floats(dev, a.inp, N * C), *weight = host_floats(dev, a.weight, C);
    float *mean = (float*)malloc(N * 4), *rstd = (float*)malloc(N * 4), *sums = (float*)malloc(5 * C * 4);
    copy_to_host(dev, mean, a.mean, N * 4), copy_to_host(dev, rstd, a.rstd, N * 4);
    layernorm_backward_cpu(want, sums, sums + C, sums + 2 * C, dout, inp, weight, mean, rstd, N, C, false);
    v->run(dev, &a);
    float* got = host_floats(dev, a.dinp, N * C);
    copy_to_host(dev, sums + 3 * C, a.dweight, C * 4), copy_to_host(dev, sums + 4 * C, a.dbias, C * 4);
    double dinp = relative_error(got, want, N * C), dweight = relative_error(sums + 3 * C, sums, C);
    double dbias = relative_error(sums + 4 * C, sums + C, C), dcolumns = 0.0;
    if (v->run == run_prod) {
        copy_to_host(dev, sums + 4 * C, a.dcolumns, C * 4);
        dcolumns = relative_error(sums + 4 * C, sums + 2 * C, C);
    }
    bool right = dinp < 1.0 / 256 && dweight < 1e-5 && dbias < 1e-5 && dcolumns < 1.0 / 256;
    printf("%-22s C %4d  dinp %.2g, dweight %.2g, dbias %.2g, dcolumns %.2g  %s\n", v->name, C, dinp, dweight, dbias,
           dcolumns, right ? "ok" : "WRONG");
    free(want), free(dout), free(inp), free(weight), free(mean), free(rstd), free(sums), free(got);
    arrays_close(dev, &a);
    return right;
}

int main() {
    Device dev;
    device_open(&dev, true, 0);
    bool right = true;
    for (int C : {768, 1600})
        for (const Variant& v : VARIANTS)
            if (v.run == run_prod || v.run == run_registers) right = is_right(&dev, &v, C) && right;
    double rate = print_copy_rate(&dev, 2ll << 30);
    const int64_t shapes[][2] = {{65536, 384}, {65536, 768}, {32768, 1024}, {32768, 1280}, {16384, 1600}};
    for (auto& s : shapes) {
        Arrays a = arrays_open(&dev, s[0], (int)s[1]);
        for (const Variant& v : VARIANTS) {
            double ms = median_ms(&dev, 20, [&] { v.run(&dev, &a); });
            double moved = v.accesses * (double)s[0] * (double)s[1] * 2;
            printf("%-22s N %5lld C %4lld %8.4f ms %6.0f GB/s %5.1f %% of copy\n", v.name, (long long)s[0],
                   (long long)s[1], ms, moved / ms * 1e-6, 100 * moved / (1e-3 * ms) / rate);
        }
        arrays_close(&dev, &a);
    }
    device_close(&dev);
    return !right;
}
