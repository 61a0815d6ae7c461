// Muon's Newton-Schulz of all hidden matrices of GPT-2 124M and 1558M, five steps, batched over the matrices of a
// shape: the plain form with cuBLASLt in bf16; the Gram form (optim/matrix/newton_schulz.cuh) in fp16 with cuBLASLt;
// and with the kernel of kernels/matmul_symmetric.cuh, which is what the optimizer runs. Each is checked against
// float64 first. A run begins with a copy of its operands, so that a step's values do not become those of an orthogonal
// matrix. TFLOP: what the form needs, symmetric results by halves where the variant takes them so.
//   make build/dev/newton_schulz && ./build/dev/newton_schulz
#include "../optim/matrix/newton_schulz.cuh"
#include "double.h"
#include "variants.h"

static OptimConfig config_of(const char* coefficients) {
    OptimConfig config = {};
    config.ns_steps = 5, config.ns_coefficients = coefficients;
    return config;
}

// to = scale x, in T. Grid any, block 256.
template <class T>
__global__ void scale_kernel(T* to, const float* x, int64_t n, float scale) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += 256ll * gridDim.x) to[i] = (T)(scale * x[i]);
}

template <class T>
static void scaled(const Device* dev, T* to, const float* x, int64_t n, float scale) {
    scale_kernel<T><<<4096, 256, 0, dev->stream>>>(to, x, n, scale);
    check_launch();
}

// `count` matrices of norm 1: noise, and for odd ones two directions 20 times as strong, as a momentum has.
static float* unit_matrices(Room* room, int64_t rows, int64_t cols, int64_t count) {
    const int64_t size = rows * cols;
    Room own(room->dev);
    float* host = own.host<float>(size * count);
#pragma omp parallel for schedule(static)
    for (int64_t m = 0; m < count; m++) {
        uint64_t z = 0x9E3779B97F4A7C15ull * (uint64_t)(m + 1);
        double norm = 0.0;
        float* x = host + m * size;
        for (int64_t i = 0; i < size; i++) {
            z ^= z << 13, z ^= z >> 7, z ^= z << 17;
            const float noise = (float)(z >> 40) / 8388608.0f - 1.0f;
            const float strong = m % 2 ? (i / cols % 7 - 3) * (i % cols % 5 - 2) * 0.1f : 0.0f;
            x[i] = noise * (m % 2 ? 0.05f : 1.0f) + strong, norm += (double)x[i] * (double)x[i];
        }
        for (int64_t i = 0; i < size; i++) x[i] = (float)(x[i] / sqrt(norm));
    }
    return room->to_device(host, size * count);
}

// Newton-Schulz in double, for the check.

// y = p x + q y. Grid any, block 256.
__global__ void double_add_kernel(double* y, const double* x, int64_t n, double p, double q) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += 256ll * gridDim.x) y[i] = p * x[i] + q * y[i];
}

static float* exact_polar(Room* room, const OptimConfig* config, const float* values, int rows, int cols) {
    const Device* dev = room->dev;
    const int64_t size = (int64_t)rows * cols, square = (int64_t)rows * rows;
    Room own(dev);
    double *x = own.device<double>(size), *y = own.device<double>(size);
    double *r = own.device<double>(square), *b = own.device<double>(square);
    scaled(dev, x, values, size, 1.0f);
    for (int step = 0; step < config->ns_steps; step++) {
        NewtonSchulz c;
        newton_schulz_coefficients(config->ns_coefficients, step, &c);
        double_product(dev, r, x, false, x, true, rows, rows, cols);
        double_product(dev, b, r, false, r, false, rows, rows, rows);
        double_add_kernel<<<4096, 256, 0, dev->stream>>>(b, r, square, c.b, c.c);
        check_launch();
        double_product(dev, y, b, false, x, false, rows, cols, rows);
        double_add_kernel<<<4096, 256, 0, dev->stream>>>(x, y, size, 1.0, c.a);
        check_launch();
    }
    const double* host = own.to_host(x, size);
    float* result = room->host<float>(size);
    for (int64_t i = 0; i < size; i++) result[i] = (float)host[i];
    return result;
}

// The variants. Shape: N matrices of C x OC, with C <= OC. Buffers hold elements of two bytes.

struct Arrays : Room {
    Shape shape;
    int64_t rows = shape.C, cols = shape.OC, n = rows * cols * shape.N;
    float* values;  // (N, C, OC), each matrix of norm 1
    bf16 *bf16_given, *x, *y, *squares;
    __half* half_given;
    mutable void* result;  // of the last run: x or y

    Arrays(const Device* on, const Shape& of) : Room(on), shape(of) {
        values = unit_matrices(this, rows, cols, shape.N);
        x = device<bf16>(n), y = device<bf16>(n), squares = device<bf16>(4 * rows * rows * shape.N);
        bf16_given = device<bf16>(n), half_given = device<__half>(n);
        scaled(on, bf16_given, values, n, 1.0f), scaled(on, half_given, values, n, POLAR_SCALE);
    }
    double unit() const { return (double)shape.N * rows * rows * rows; }
    void begin(const void* given) const {
        check(cudaMemcpyAsync(x, given, (size_t)n * 2, cudaMemcpyDeviceToDevice, dev->stream));
    }
};

static void run_plain(const Device* dev, const Arrays* a, const OptimConfig* config) {
    a->begin(a->bf16_given);
    a->result = newton_schulz_plain<bf16>(dev, config, a->x, a->y, a->squares,
                                          a->squares + a->rows * a->rows * a->shape.N, a->rows, a->cols, a->shape.N);
}
// The Gram form, each product by itself.
static void run_library(const Device* dev, const Arrays* a, const OptimConfig* config) {
    const auto product = [&](const MatmulProduct* p, __half* d, const __half* left, const __half* right,
                             const __half* c) { symmetric_product_library(dev, p, d, left, right, c); };
    a->begin(a->half_given);
    a->result = newton_schulz_symmetric<__half>(config, product, (__half*)a->x, (__half*)a->y, (__half*)a->squares,
                                                a->rows, a->cols, a->shape.N, POLAR_SCALE, a->rows != a->cols);
}
static void run_ours(const Device* dev, const Arrays* a, const OptimConfig* config) {
    const PolarBatch batch = {(__half*)a->x, (__half*)a->y, (__half*)a->squares, a->rows, a->cols, a->shape.N};
    a->begin(a->half_given);
    a->result = newton_schulz_gpu(dev, config, &batch);
}

using Run = void (*)(const Device*, const Arrays*, const OptimConfig*);

template <Run RUN>
static void jordan(const Device* dev, const Arrays* a) {
    const OptimConfig config = config_of("jordan");
    RUN(dev, a, &config);
}

// How far the results of `run` are from float64, of the matrix that is furthest.
static double distance(Arrays* a, Run run, const OptimConfig* config) {
    run(a->dev, a, config);
    const bool is_half = run != run_plain;
    float* got = is_half ? host_floats(a, (__half*)a->result, a->n) : host_floats(a, (bf16*)a->result, a->n);
    for (int64_t i = 0; i < a->n && is_half; i++) got[i] /= POLAR_SCALE;
    double error = 0.0;
    for (int64_t k = 0, size = a->rows * a->cols; k < a->shape.N; k++) {
        const float* want = exact_polar(a, config, a->values + k * size, (int)a->rows, (int)a->cols);
        error = worst(error, relative_error(got + k * size, want, size));
    }
    return error;
}

// The form that ships may be twice as far from float64 as the plain form in bf16, which trains. The Gram form on the
// library's products may be further: it is here for its time.
template <Run RUN>
static double error_of(const Variant<Arrays>*, Arrays* a) {
    double error = 0.0;
    for (const char* coefficients : {"jordan", "polar-express"}) {
        const OptimConfig config = config_of(coefficients);
        const double bound = RUN == run_plain ? 0.1 : RUN == run_library ? 0.2 : 2.0 * distance(a, run_plain, &config);
        error = worst(error, distance(a, RUN, &config) / bound);
    }
    return error;
}

// Work: FLOPs of a square matrix of side m, and of one of m x 4 m, over m^3.
template <bool SQUARE>
static bool bench(const Device* dev, const std::vector<Shape>& small, const std::vector<Shape>& shapes) {
    const Variant<Arrays> rows[] = {
        {"plain, cuBLASLt, bf16", jordan<run_plain>, SQUARE ? 30 : 90, error_of<run_plain>},
        {"Gram form, cuBLASLt, fp16", jordan<run_library>, SQUARE ? 30 : 60, error_of<run_library>},
        {"prod: our kernel", jordan<run_ours>, SQUARE ? 20 : 38, error_of<run_ours>}};
    const auto right = right_ones(dev, rows, small);
    for (const Shape& s : shapes) time_in_turns(dev, right, s, 0.0);
    return right.size() == std::size(rows);
}

int main() {
    Device dev;
    device_open(&dev, true, 0);
    printf("%s\n", dev.name);
    bool right = bench<true>(&dev, {{2, 768, 768}, {2, 1600, 1600}}, {{48, 768, 768}, {192, 1600, 1600}});
    right = bench<false>(&dev, {{2, 768, 3072}, {2, 1600, 6400}, {2, 520, 1288}},
                         {{24, 768, 3072}, {96, 1600, 6400}, {2, 1600, 6400}}) &&
            right;
    device_close(&dev);
    return !right;
}
