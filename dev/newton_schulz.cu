// Muon's Newton-Schulz of all hidden matrices of GPT-2 124M and 1558M, five steps, batched over the matrices of a
// shape: the plain form with cuBLASLt in bf16; the Gram form (optim/matrix/newton_schulz.cuh) in fp16 with cuBLASLt;
// and with the kernel of kernels/matmul_symmetric.cuh, which is what the optimizer runs. First each variant's result is
// checked against float64. Then the variants take turns, after half a second of products, since a card draws all its
// power then and its clock depends on what ran before; the operands are renewed, untimed, before each run. flop: what
// the form needs, symmetric results by halves where the variant takes them so; the ceiling is cuBLASLt's bf16 product
// of 8192^3 in the same run.
//   make build/dev/newton_schulz && ./build/dev/newton_schulz
#include "../optim/matrix/newton_schulz.cuh"
#include "double.h"
#include "timing.h"

static OptimConfig config_of(const char* coefficients) {
    OptimConfig config = {};
    config.ns_steps = 5, config.ns_coefficients = coefficients;
    return config;
}

static float half_float(__half x) {
    return __half2float(x);
}
static float half_float(bf16 x) {
    return __bfloat162float(x);
}

template <class T>
static float* host_values(Room* room, const T* device, int64_t n) {
    const T* bits = room->to_host(device, n);
    float* values = room->host<float>(n);
    for (int64_t i = 0; i < n; i++) values[i] = half_float(bits[i]);
    return values;
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
    const bool tall = rows > cols;
    const int side = tall ? cols : rows, depth = tall ? rows : cols;
    const int64_t size = (int64_t)rows * cols, square = (int64_t)side * side;
    Room own(dev);
    double *x = own.device<double>(size), *y = own.device<double>(size);
    double *r = own.device<double>(square), *b = own.device<double>(square);
    scaled(dev, x, values, size, 1.0f);
    for (int step = 0; step < config->ns_steps; step++) {
        NewtonSchulz c;
        newton_schulz_coefficients(config->ns_coefficients, step, &c);
        double_product(dev, r, x, tall, x, !tall, side, side, depth);
        double_product(dev, b, r, false, r, false, side, side, side);
        double_add_kernel<<<4096, 256, 0, dev->stream>>>(b, r, square, c.b, c.c);
        check_launch();
        double_product(dev, y, tall ? x : b, false, tall ? b : x, false, rows, cols, side);
        double_add_kernel<<<4096, 256, 0, dev->stream>>>(x, y, size, 1.0, c.a);
        check_launch();
    }
    const double* host = own.to_host(x, size);
    float* result = room->host<float>(size);
    for (int64_t i = 0; i < size; i++) result[i] = (float)host[i];
    return result;
}

// The variants, on matrices of one shape. Buffers hold elements of two bytes.

constexpr int64_t SQUARES = 4;  // for each matrix

struct Matrices {
    int64_t rows, cols, count;
    void *given, *x, *y, *squares;
};

static Matrices matrices_open(Room* room, int64_t rows, int64_t cols, int64_t count) {
    const int64_t side = rows < cols ? rows : cols, n = rows * cols * count;
    bf16* buffer[3];
    for (bf16*& b : buffer) b = room->device<bf16>(n);
    return {rows, cols, count, buffer[0], buffer[1], buffer[2], room->device<bf16>(SQUARES * side * side * count)};
}

// Each runs n shapes, and leaves the results in x.
static void run_plain(const Device* dev, const OptimConfig* config, Matrices* m, int n) {
    for (int i = 0; i < n; i++, m++) {
        const int64_t side = m->rows < m->cols ? m->rows : m->cols;
        bf16* squares = (bf16*)m->squares;
        m->x = newton_schulz_plain<bf16>(dev, config, (bf16*)m->x, (bf16*)m->y, squares,
                                         squares + side * side * m->count, m->rows, m->cols, m->count);
    }
}
// The Gram form, each product by itself.
template <class Product>
static void run_each(const OptimConfig* config, Product product, Matrices* m) {
    m->x = newton_schulz_symmetric<__half>(config, product, (__half*)m->x, (__half*)m->y, (__half*)m->squares, m->rows,
                                           m->cols, m->count, POLAR_SCALE, m->rows != m->cols);
}
static void run_library(const Device* dev, const OptimConfig* config, Matrices* m, int n) {
    auto product = [&](const SymmetricProduct* p, __half* d, const __half* a, const __half* b, const __half* c) {
        symmetric_product_library(dev, p, d, a, b, c);
    };
    for (int i = 0; i < n; i++) run_each(config, product, &m[i]);
}
static void run_ours(const Device* dev, const OptimConfig* config, Matrices* m, int n) {
    for (int i = 0; i < n; i++) {
        const PolarBatch batch = {(__half*)m[i].x, (__half*)m[i].y, (__half*)m[i].squares,
                                  m[i].rows,       m[i].cols,       m[i].count};
        m[i].x = newton_schulz_gpu(dev, config, &batch);
    }
}

// flop of a matrix of sides m <= n.
static double flop_plain(double m, double n) {
    return 5.0 * (4.0 * m * m * n + 2.0 * m * m * m);
}
static double flop_library(double m, double n) {
    return m == n ? 30.0 * m * m * m : 28.0 * m * m * m + 8.0 * m * m * n;
}
static double flop_ours(double m, double n) {
    return m == n ? 20.0 * m * m * m : 14.0 * m * m * m + 6.0 * m * m * n;
}

struct Variant {
    const char* name;
    bool is_half;
    void (*run)(const Device* dev, const OptimConfig* config, Matrices* m, int n);
    double (*flop)(double m, double n);
};
static const Variant VARIANTS[] = {
    {"plain, cuBLASLt, bf16", false, run_plain, flop_plain},
    {"Gram form, cuBLASLt, fp16", true, run_library, flop_library},
    {"prod: our kernel", true, run_ours, flop_ours},
};
constexpr int VARIANT_COUNT = sizeof(VARIANTS) / sizeof(VARIANTS[0]);

static void give(const Device* dev, const Variant* v, const Matrices* m, const float* values, void* to) {
    const int64_t n = m->rows * m->cols * m->count;
    if (v->is_half) scaled(dev, (__half*)to, values, n, POLAR_SCALE);
    if (!v->is_half) scaled(dev, (bf16*)to, values, n, 1.0f);
}

// True if the form that ships is at most twice as far from float64 as the plain form in bf16, which trains. The Gram
// form on the library's products may be further: it is here for its time.
static bool polar_is_right(const Device* dev, const char* coefficients, int rows, int cols) {
    const OptimConfig config = config_of(coefficients);
    const int64_t size = (int64_t)rows * cols;
    Room room(dev);
    const float* values = unit_matrices(&room, rows, cols, 2);
    const Matrices opened = matrices_open(&room, rows, cols, 2);
    double error[VARIANT_COUNT] = {};
    for (int i = 0; i < VARIANT_COUNT; i++) {
        Matrices m = opened;
        give(dev, &VARIANTS[i], &m, values, m.x);
        VARIANTS[i].run(dev, &config, &m, 1);
        float* got =
            VARIANTS[i].is_half ? host_values(&room, (__half*)m.x, 2 * size) : host_values(&room, (bf16*)m.x, 2 * size);
        for (int64_t k = 0; k < 2 * size && VARIANTS[i].is_half; k++) got[k] /= POLAR_SCALE;
        for (int k = 0; k < 2; k++) {
            const float* want = exact_polar(&room, &config, values + k * size, rows, cols);
            const double e = relative_error(got + k * size, want, size);
            error[i] = isnan(error[i]) || e <= error[i] ? error[i] : e;
        }
    }
    const bool right = error[0] < 0.1 && error[1] < 0.2 && error[2] <= 2.0 * error[0];
    printf("%4d x %4d, %-14s: off float64 by %.2g (plain, bf16), %.2g (Gram, library), %.2g (prod)  %s\n", rows, cols,
           coefficients, error[0], error[1], error[2], right ? "ok" : "WRONG");
    return right;
}

// Times.

struct Model {
    const char* name;
    int64_t layers, channels;
};

// A part of the matrices, as the optimizer takes them in chunks of so many layers.
static Matrices part_of(const Matrices* m, int64_t first, int64_t count, int64_t layers) {
    const int64_t each = m->count / layers, side = m->rows < m->cols ? m->rows : m->cols;
    Matrices part = *m;
    part.count = count * each;
    part.x = (char*)m->x + first * each * m->rows * m->cols * 2;
    part.y = (char*)m->y + first * each * m->rows * m->cols * 2;
    part.squares = (char*)m->squares + first * each * SQUARES * side * side * 2;
    return part;
}

static void time_model(const Device* dev, const Model* model, double ceiling) {
    const OptimConfig config = config_of("jordan");
    const int64_t C = model->channels, L = model->layers;
    Room room(dev);
    const Matrices m[] = {matrices_open(&room, C, C, 4 * L), matrices_open(&room, 4 * C, C, L),
                          matrices_open(&room, C, 4 * C, L)};
    const float* values[3];
    for (int i = 0; i < 3; i++) values[i] = unit_matrices(&room, m[i].rows, m[i].cols, m[i].count);
    const int64_t chunks[] = {L, 1 << 27, 3 << 25, 1 << 26};
    for (int v = 0; v < VARIANT_COUNT + 3; v++) {
        const Variant* variant = &VARIANTS[v < VARIANT_COUNT ? v : VARIANT_COUNT - 1];
        const int chunk = v < VARIANT_COUNT ? 0 : v - VARIANT_COUNT + 1;
        int64_t layers = chunk == 0 ? L : chunks[chunk] / (12 * C * C);
        layers = layers < 1 ? 1 : layers > L ? L : layers;
        double flop = 0.0, spread;
        for (int i = 0; i < 3; i++) {
            give(dev, variant, &m[i], values[i], m[i].given);
            flop += (double)m[i].count * variant->flop((double)C, m[i].rows == m[i].cols ? (double)C : 4.0 * C);
        }
        auto before = [&] {
            for (int i = 0; i < 3; i++) {
                check(cudaMemcpyAsync(m[i].x, m[i].given, (size_t)(m[i].rows * m[i].cols * m[i].count * 2),
                                      cudaMemcpyDeviceToDevice, dev->stream));
            }
        };
        auto run = [&] {
            for (int64_t first = 0; first < L; first += layers) {
                Matrices part[3];
                for (int i = 0; i < 3; i++) part[i] = part_of(&m[i], first, first + layers < L ? layers : L - first, L);
                variant->run(dev, &config, part, 3);
            }
        };
        for (double warm = 0.0; warm < 500.0;) warm += median_ms_after(dev, 3, before, run);
        const double ms = median_ms_after(dev, 25, before, run, &spread);
        char name[80];
        snprintf(name, sizeof(name), "prod, in chunks of %lld layers", (long long)layers);
        printf("%-6s %-34s %8.3f ms (+- %4.1f %%) %7.3f TFLOP %6.1f TFLOP/s %5.1f %% of the ceiling\n", model->name,
               chunk ? name : variant->name, ms, 100.0 * spread, 1e-12 * flop, 1e-9 * flop / ms,
               100.0 * 1e3 * flop / ms / ceiling);
        fflush(stdout);
    }
}

static double ceiling_of(const Device* dev) {
    constexpr int64_t n = 8192;
    Room room(dev);
    bf16 *a = filled(&room, n * n, 1.0f, 1), *b = filled(&room, n * n, 1.0f, 2), *d = room.device<bf16>(n * n);
    const MatmulProduct p = {n, n, n, false, false, 1.0f, 0.0f, 1, 0, 0, 0};
    auto run = [&] { matmul_product<bf16, bf16>(dev, &p, d, a, b, nullptr); };
    median_ms(dev, 60, run);
    return 2.0 * n * n * n / (1e-3 * median_ms(dev, 20, run));
}

int main() {
    Device dev;
    device_open(&dev, true, 0);
    const double ceiling = ceiling_of(&dev);
    printf("%s: bf16 product of 8192^3 %.0f TFLOP/s\n", dev.name, 1e-12 * ceiling);
    bool right = true;
    const int shapes[][2] = {{768, 768},   {768, 3072}, {3072, 768}, {1600, 1600},
                             {1600, 6400}, {520, 1288}, {1288, 520}};
    for (const auto& s : shapes) {
        for (const char* coefficients : {"jordan", "polar-express"})
            right = polar_is_right(&dev, coefficients, s[0], s[1]) && right;
    }
    if (!right) return 1;
    const Model models[] = {{"124M", 12, 768}, {"1558M", 48, 1600}};
    for (const Model& model : models) time_model(&dev, &model, ceiling);
    device_close(&dev);
    return 0;
}
