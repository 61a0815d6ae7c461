// The operators that only move bytes: embedding, GELU, the squares of the gradient, casts to fp8, and a format of the
// optimizer. Each is checked against its plain C version, then timed: GB/s of the bytes that must move, and their share
// of the copy rate of the same run.
//   make build/dev/small && ./build/dev/small
#include "../kernels/embedding.cuh"
#include "../kernels/fp8.cuh"
#include "../kernels/norm.cuh"
#include "../optim/formats/minifloat.cuh"
#include "../optim/kernel.cuh"
#include "variants.h"

typedef Blocks<E4m3, 128, ScaleFp32, NEAREST> Format;
constexpr int THREAD_ELEMENTS = 16;
static_assert(Format::TABLE_BYTES == 0, "the kernels below load no table");

struct Arrays : Room {
    Shape shape;
    int64_t N = shape.N, n = N * shape.C;  // N positions in sequences of T
    int C = shape.C, V = 50304, buckets = 0;
    bf16 *inp, *out, *wte, *wpe;             // (N, C); tables (V, C) and (T, C)
    float *grads, *dwte, *decoded, *scales;  // (n), of the gradients and of a format; (V, C); scales (n / 128)
    int *tokens, *order, *bucket, *host_tokens, *host_order, *host_bucket;
    double* square;
    uint8_t *codes, *columns;
    Fp8 fp8;

    Arrays(const Device* on, const Shape& of) : Room(on), shape(of) {
        inp = filled(this, n, 2.0f, 1), out = filled(this, n, 1.0f, 2), wte = filled(this, (int64_t)V * C, 1.0f, 3);
        wpe = filled(this, (int64_t)of.T * C, 1.0f, 4);
        grads = to_device(host_floats(this, inp, n), n), decoded = device<float>(n), scales = device<float>(n / 128);
        dwte = to_device(zeros<float>((int64_t)V * C), (int64_t)V * C);
        square = device<double>(n / TILE_ELEMENTS), codes = device<uint8_t>(n), columns = device<uint8_t>(n);
        fp8 = fp8_open(1, to_device(zeros<char>(fp8_bytes(1)), fp8_bytes(1)));
        fp8_begin(on, &fp8);
        fp8_rescale(on, &fp8, 0, 2.0f), fp8.use_current_scaling = false;
        draw_tokens();
    }

    // Draws tokens as text has them, the k-th one with a frequency of about 1 / k, and sorts their positions.
    void draw_tokens() {
        host_tokens = host<int>(N), host_order = host<int>(N), host_bucket = host<int>(2 * (N + 1));
        int* begin = zeros<int>(V + 1);
        uint32_t state = 1;
        for (int64_t i = 0; i < N; i++) {
            state = state * 1664525u + 1013904223u;
            host_tokens[i] = (int)fmin(V - 1.0, pow((double)V, (state >> 8) / 16777216.0)) - 1 + (state >> 31);
            begin[host_tokens[i] + 1]++;
        }
        for (int v = 0; v < V; v++) {
            if (begin[v + 1] > 0) host_bucket[2 * buckets] = v, host_bucket[2 * buckets++ + 1] = begin[v];
            begin[v + 1] += begin[v];
        }
        host_bucket[2 * buckets] = -1, host_bucket[2 * buckets + 1] = (int)N;
        for (int64_t i = 0; i < N; i++) host_order[begin[host_tokens[i]]++] = (int)i;
        tokens = to_device(host_tokens, N), order = to_device(host_order, N);
        bucket = to_device(host_bucket, 2 * (buckets + 1));
    }

    Streams format() const { return {codes, scales}; }
    double unit() const { return (double)n; }
};

static OPTIM_INLINE Streams tile_of(const Streams& whole, int64_t tile) {
    constexpr StreamInfo codes = Format::STREAM[0], scales = Format::STREAM[1], third = Format::STREAM[2];
    return tile_at(codes, scales, third, whole, tile);
}

// GELU as PyTorch writes it: with tanhf, a value a thread.
__global__ void tanh_kernel(bf16* out, const bf16* inp, int64_t n) {
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float x = to_float(inp[i]);
    out[i] = from_float<bf16>(0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x))));
}

// Grid: a block a tile; block: TILE_ELEMENTS / THREAD_ELEMENTS.
__global__ void encode_kernel(Streams to, const float* values) {
    const int first = threadIdx.x * THREAD_ELEMENTS;
    const Streams tile = tile_of(to, blockIdx.x);
    alignas(16) float x[THREAD_ELEMENTS];
#pragma unroll
    for (int i = 0; i < THREAD_ELEMENTS; i += 4)
        *(float4*)(x + i) = *(const float4*)(values + blockIdx.x * (int64_t)TILE_ELEMENTS + first + i);
    const NoiseKey key = {};
    const float absmax = block_absmax(Format(), x, key);
    if (needs_clamp(Format(), absmax)) Format::clamp<THREAD_ELEMENTS>(x, absmax);
    Format::put_scaled<THREAD_ELEMENTS>(tile, first, x, absmax, 0.0f, false, key);
}

__global__ void decode_kernel(float* values, Streams from) {
    const int first = threadIdx.x * THREAD_ELEMENTS;
    alignas(16) float x[THREAD_ELEMENTS];
    Format::view(tile_of(from, blockIdx.x), first, x, THREAD_ELEMENTS);
#pragma unroll
    for (int i = 0; i < THREAD_ELEMENTS; i += 4)
        *(float4*)(values + blockIdx.x * (int64_t)TILE_ELEMENTS + first + i) = *(const float4*)(x + i);
}

static void embed(const Device* dev, const Arrays* a) {
    const int T = a->shape.T;
    embedding_forward<bf16>(dev, a->out, a->tokens, a->wte, a->wpe, (int)(a->N / T), T, a->C);
}
// The gradient of wpe goes to `decoded`, which has room for it.
static void embed_backward(const Device* dev, const Arrays* a) {
    const int T = a->shape.T;
    embedding_backward<bf16, float>(dev, a->dwte, a->decoded, a->dwte, a->inp, a->order, a->bucket, a->buckets,
                                    (int)(a->N / T), T, a->C, a->V, false);
}
static void gelu(const Device* dev, const Arrays* a) {
    gelu_forward<bf16>(dev, a->out, a->inp, a->n);
}
static void gelu_tanh(const Device* dev, const Arrays* a) {
    launch_kernel(dev, tanh_kernel, ceil_div(a->n, 256), 256, 0, a->out, a->inp, a->n);
}
static void gelu_backward(const Device* dev, const Arrays* a) {
    gelu_backward_inplace<bf16>(dev, a->out, a->inp, a->n);
}
static void squares(const Device* dev, const Arrays* a) {
    tile_squares(dev, dev->stream, a->square, a->grads, a->n / TILE_ELEMENTS);
}
static void cast(const Device* dev, const Arrays* a) {
    Fp8 fp8 = a->fp8;
    const Operand<bf16> operand = {a->inp, a->codes, a->columns, &fp8};
    fp8_cast(dev, &operand, a->N, a->C);
}
static void transpose(const Device* dev, const Arrays* a) {
    fp8_by_columns(dev, a->columns, a->codes, a->N, a->C);
}
static void encode(const Device* dev, const Arrays* a) {
    launch_kernel(dev, encode_kernel, a->n / TILE_ELEMENTS, TILE_ELEMENTS / THREAD_ELEMENTS, 0, a->format(), a->grads);
}
static void decode(const Device* dev, const Arrays* a) {
    launch_kernel(dev, decode_kernel, a->n / TILE_ELEMENTS, TILE_ELEMENTS / THREAD_ELEMENTS, 0, a->decoded,
                  a->format());
}

static double error_embed(const Variant<Arrays>* v, Arrays* a) {
    const int T = a->shape.T;
    float* want = a->host<float>(a->n);
    embedding_forward_cpu(want, a->host_tokens, host_floats(a, a->wte, (int64_t)a->V * a->C),
                          host_floats(a, a->wpe, (int64_t)T * a->C), (int)(a->N / T), T, a->C);
    v->run(a->dev, a);
    return off(a, a->out, want, a->n);
}
static double error_embed_backward(const Variant<Arrays>* v, Arrays* a) {
    const int T = a->shape.T;
    const int64_t table = (int64_t)a->V * a->C, positions = (int64_t)T * a->C;
    float *dwte = a->to_host(a->dwte, table), *dwpe = a->host<float>(positions);
    embedding_backward_cpu(dwte, dwpe, host_floats(a, a->inp, a->n), a->host_order, a->host_bucket, a->buckets,
                           (int)(a->N / T), T, a->C, false);
    v->run(a->dev, a);
    return worst(off(a, a->dwte, dwte, table), off(a, a->decoded, dwpe, positions));
}
static double error_gelu(const Variant<Arrays>* v, Arrays* a) {
    float* want = a->host<float>(a->n);
    gelu_forward_cpu(want, host_floats(a, a->inp, a->n), a->n);
    v->run(a->dev, a);
    return off(a, a->out, want, a->n);
}
static double error_gelu_backward(const Variant<Arrays>* v, Arrays* a) {
    float* want = host_floats(a, a->out, a->n);
    gelu_backward_inplace_cpu(want, host_floats(a, a->inp, a->n), a->n);
    v->run(a->dev, a);
    return off(a, a->out, want, a->n);
}
static double error_squares(const Variant<Arrays>* v, Arrays* a) {
    const int64_t tiles = a->n / TILE_ELEMENTS;
    double *want = a->host<double>(tiles), most = 0.0;
    tile_squares_cpu(want, a->to_host(a->grads, a->n), tiles);
    v->run(a->dev, a);
    const double* got = a->to_host(a->square, tiles);
    for (int64_t i = 0; i < tiles; i++) most = worst(most, fabs(got[i] - want[i]) / want[i] * 1e5);
    return most;
}
// Codes of both kernels must be those of plain C.
static double error_codes(const Variant<Arrays>* v, Arrays* a) {
    Fp8 plain = a->fp8;
    float scale[1], scale_inv[4];
    uint32_t amax[2] = {};
    plain.scale = scale, plain.scale_inv = scale_inv, plain.amax = amax;
    fp8_set_scale(plain, 0, 2.0f, FP8_E4M3, 0);
    const Operand<float> to = {host_floats(a, a->inp, a->n), a->host<uint8_t>(a->n), a->host<uint8_t>(a->n), &plain};
    fp8_cast_cpu(&to, nullptr, nullptr, a->N, a->C, false);
    cast(a->dev, a);
    v->run(a->dev, a);
    return worst(off_bits(a, a->codes, to.rows, a->n), off_bits(a, a->columns, to.columns, a->n));
}
// Codes and values must be those of the CPU, to the bit.
static double error_format(const Variant<Arrays>* v, Arrays* a) {
    const float* values = a->to_host(a->grads, a->n);
    const Streams plain = {a->host<uint8_t>(a->n), a->host<float>(a->n / 128)};
    float* want = a->host<float>(a->n);
    for (int64_t i = 0; i < a->n; i += TILE_ELEMENTS) {
        const Streams tile = tile_of(plain, i / TILE_ELEMENTS);
        Format::set(tile, 0, values + i, TILE_ELEMENTS);
        Format::view(tile, 0, want + i, TILE_ELEMENTS);
    }
    encode(a->dev, a);
    decode(a->dev, a);
    v->run(a->dev, a);
    return worst(off_bits(a, a->codes, plain.codes, a->n), off_bits(a, a->decoded, want, a->n * 4));
}

// Bytes an element. The embedding's tables are small beside what else it moves, or lie in the L2 cache.
static const Variant<Arrays> VARIANTS[] = {
    {"embedding, prod", embed, 2, error_embed},
    {"embedding backward, prod", embed_backward, 4, error_embed_backward},
    {"gelu, tanhf, a value a thread", gelu_tanh, 4, error_gelu},
    {"gelu, prod", gelu, 4, error_gelu},
    {"gelu backward, prod", gelu_backward, 6, error_gelu_backward},
    {"squares of fp32 gradients, prod", squares, 4, error_squares},
    {"cast to e4m3 by rows and columns, prod", cast, 4, error_codes},
    {"codes by columns, prod", transpose, 2, error_codes},
    {"e4m3/128, encode", encode, 5.03125, error_format},
    {"e4m3/128, decode", decode, 5.03125, error_format},
};

int main() {
    Device dev;
    device_open(&dev, true, 0);
    return check_and_time(&dev, VARIANTS, {{2048, 768, 0, 0, 256}, {3072, 1600, 0, 0, 1024}},
                          {{65536, 768, 0, 0, 1024}, {16384, 1600, 0, 0, 1024}}, true);
}
