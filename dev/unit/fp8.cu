// Tests of products in fp8 (kernels/fp8.cuh): the codes against a search through all of them, scales, casts on the GPU
// against the plain C version to the bit, products against it, and runs of ./train.
#include "../../kernels/attention.cuh"
#include "../../kernels/classifier.cuh"
#include "../../kernels/layernorm.cuh"
#include "../../kernels/linear_fp8.cuh"
#include "../../optim/optim.h"
#include "kernels.h"

namespace {

// The code that is nearest to x among all finite ones; of two at the same distance the even one.
uint8_t nearest_code(float x, Fp8Type type) {
    int best = 0;
    double distance = INFINITY;
    for (int code = 0; code < 256; code++) {
        const float value = fp8_decode((uint8_t)code, type);
        if (isnan(value) || signbit(value) != signbit(x)) continue;
        const double d = fabs((double)value - x);
        if (d < distance || (d == distance && code % 2 == 0)) best = code, distance = d;
    }
    return (uint8_t)best;
}

TEST(fp8_codes) {
    for (Fp8Type type : {FP8_E4M3, FP8_E5M2}) {
        int finite = 0;
        for (int code = 0; code < 256; code++) {
            const float value = fp8_decode((uint8_t)code, type);
            if (isnan(value)) continue;
            finite++;
            expect(fp8_encode(value, type) == code, "type %d: %g of code %d becomes %d", type, value, code,
                   fp8_encode(value, type));
        }
        expect(finite == (type == FP8_E4M3 ? 254 : 248), "type %d: %d finite codes", type, finite);
        for (int i = 0; i < 20000; i++) {
            const float x = ldexpf(test_uniform(1, i), (int)(20 * test_uniform(2, i)));
            const uint8_t code = fp8_encode(x, type), want = nearest_code(x, type);
            expect(code == want, "type %d: %.9g becomes %d, want %d", type, x, code, want);
            if (code != want) break;
        }
        const float largest = fp8_largest(type);
        expect(fp8_decode(fp8_encode(1e30f, type), type) == largest, "1e30 does not become the largest code");
        expect(fp8_decode(fp8_encode(-1e30f, type), type) == -largest, "-1e30 does not become the least code");
        for (float x : {NAN, INFINITY, -INFINITY}) expect(isnan(fp8_decode(fp8_encode(x, type), type)), "%g", x);
    }
    expect(fp8_decode(0x7e, FP8_E4M3) == 448.0f && fp8_decode(1, FP8_E4M3) == 0x1p-9f, "e4m3's ends");
    expect(fp8_decode(0x7b, FP8_E5M2) == 57344.0f && fp8_decode(1, FP8_E5M2) == 0x1p-16f, "e5m2's ends");
}

// A scale is a power of two, the largest that keeps the magnitude within the range.
TEST(fp8_scales) {
    for (Fp8Type type : {FP8_E4M3, FP8_E5M2}) {
        for (int i = 0; i < 10000; i++) {
            const float magnitude = ldexpf(1.001f + test_uniform(3, i), (int)(60 * test_uniform(4, i)));
            for (int spare : {0, 1}) {
                int exponent;
                const float scale = fp8_scale(magnitude, type, spare), room = fp8_largest(type) / (1 << spare);
                expect(frexpf(scale, &exponent) == 0.5f, "%g is no power of two", scale);
                expect(magnitude * scale <= room && magnitude * scale > room / 2, "%g times %g", magnitude, scale);
            }
        }
    }
    for (float x : {0.0f, NAN, INFINITY}) expect(fp8_scale(x, FP8_E4M3, 0) == 1.0f, "the scale of %g", x);
}

// Scales on the device with the slots that a test needs, none of them known.
Fp8 scales_open(Room* room, int slots) {
    void* memory = room->device<char>(fp8_bytes(slots));
    device_zero(room->dev, memory, fp8_bytes(slots));
    return fp8_open(slots, memory);
}

// A history keeps the largest of the last steps for FP8_HISTORY steps; a magnitude that is not finite changes nothing.
TEST(fp8_history) {
    const Device dev = test_device(false);
    Room room(&dev);
    Fp8 f = scales_open(&room, 3);
    float factor = 1.0f, saturated;
    for (int step = 0; step < 2 * FP8_HISTORY; step++) {
        fp8_begin(&dev, &f);
        const float want = step == 0             ? 1.0f
                           : step <= FP8_HISTORY ? fp8_scale(8.0f, FP8_E4M3, 1)
                                                 : fp8_scale(1.0f, FP8_E4M3, 1);
        expect(f.scale[0] == want && f.scale_inv[0] == 1.0f / want, "step %d: scale %g, want %g", step, f.scale[0],
               want);
        f.amax[0] = fp8_bits(step == 0 ? 8.0f : 1.0f), f.amax[f.slots] += (uint32_t)step;
        if (step == 3) f.amax[1] = fp8_bits(INFINITY);
        fp8_event(&dev, &f, FP8_END, &factor, &saturated);
        expect(saturated == (float)step, "step %d: %g saturated", step, saturated);
    }
    expect(f.amax_history[FP8_HISTORY] == 0.0f, "infinity is remembered");
    float before = f.amax_history[0];
    fp8_begin(&dev, &f);
    f.amax[0] = fp8_bits(100.0f);
    factor = NAN;
    fp8_event(&dev, &f, FP8_END, &factor, &saturated);
    expect(f.amax_history[0] == before, "a step that changed nothing is remembered");
}

struct CastShape {
    int64_t N;
    int C;
};

// One cast on both devices, from equal values: codes (by rows and by columns), magnitude and count to the bit where
// nothing is computed; with GELU, codes at most one step apart.
void check_cast(Test* test, double* worst, const Device* dev, CastShape s, Fp8Op op, bool current) {
    const Device cpu = test_device(false);
    Room room(dev), here(&cpu);
    const int64_t n = s.N * s.C;
    Array<bf16> inp(dev, n, 5, 3.0f), pre(dev, n, 6, 2.0f);
    Array<float> bias(dev, s.C);
    Fp8 f = scales_open(&room, 3), g = scales_open(&here, 3);
    uint8_t *codes[2], *want[2] = {room.host<uint8_t>(n), room.host<uint8_t>(n)}, *got = room.host<uint8_t>(n + 64);
    memset(got, 0xaa, n + 64);
    for (uint8_t*& code : codes) code = room.to_device(got, n + 64);
    float *scratch = (float*)room.device<char>(fp8_scratch_bytes(dev, s.N, s.C)), *sums = room.host<float>(s.C);
    fp8_begin(dev, &f), fp8_begin(&cpu, &g);
    f.use_current_scaling = g.use_current_scaling = current;
    if (!current) fp8_rescale(dev, &f, 1, 1.7f), fp8_rescale(&cpu, &g, 1, 1.7f);  // so that some saturate
    const Operand<bf16> to = {inp.device, codes[0], codes[1], &f, 1, FP8_E4M3, op};
    const Operand<float> there = {inp.host, want[0], want[1], &g, 1, FP8_E4M3, op};
    fp8_cast(dev, &to, s.N, s.C, pre.device, bias.device, scratch);
    fp8_cast(&cpu, &there, s.N, s.C, pre.host, sums);
    int64_t apart = 0;
    for (int i = 0; i < 2; i++) {
        copy_to_host(dev, got, codes[i], n + 64);
        for (int64_t j = 0; j < n; j++) apart += abs((int)got[j] - want[i][j]) > (op == FP8_COPY ? 0 : 1);
        for (int j = 0; j < 64; j++) expect(got[n + j] == 0xaa, "byte %d behind the codes was written", j);
    }
    expect(apart == 0, "%lld x %d, op %d: %lld codes differ", (long long)s.N, s.C, op, (long long)apart);
    uint32_t found[4];
    copy_to_host(dev, found, f.amax, sizeof(found));
    if (op == FP8_COPY) {
        expect(found[1] == g.amax[1], "largest magnitude %08x, want %08x", found[1], g.amax[1]);
        expect(found[3] == g.amax[3] && (current || found[3] > 0), "%u saturated, want %u", found[3], g.amax[3]);
    }
    copy_to_host(dev, bias.host, bias.device, s.C * sizeof(float));
    close_to(test, worst, "sums", bias.host, sums, s.C,
             EPS32 * (double)s.N * 4 + (op == FP8_COPY ? 0 : 1e-4 * (double)s.N), 0);
}

OPERATOR_TEST(fp8_cast_gpu) {
    for (CastShape s : {CastShape{16, 8}, CastShape{144, 200}, CastShape{256, 128}, CastShape{1040, 1032}}) {
        for (Fp8Op op : {FP8_COPY, FP8_GELU, FP8_GELU_BACKWARD}) {
            for (bool current : {false, true}) check_cast(test, &worst, &dev, s, op, current);
        }
    }
}

// Codes that a kernel writes of what it makes are those of a cast of what it would store, to the bit, with the same
// magnitude and count; the transposed ones are the cast's by columns.
struct Made {
    Room* room;
    Fp8 f, g;  // of the kernel and of the cast
    uint8_t *rows, *columns, *want[2];
    int64_t N;
    int C;
};

Made made_open(Room* room, int64_t N, int C, float largest = 0.9f, Fp8Type type = FP8_E4M3) {
    assert(N > 0 && C > 0);
    Made m = {room, scales_open(room, 3), scales_open(room, 3), nullptr, nullptr, {}, N, C};
    for (uint8_t** codes : {&m.rows, &m.columns, &m.want[0], &m.want[1]}) {
        *codes = room->device<uint8_t>(N * C);
        device_zero(room->dev, *codes, N * C);
    }
    for (Fp8* f : {&m.f, &m.g}) {
        fp8_begin(room->dev, f);
        f->use_current_scaling = false;
        fp8_rescale(room->dev, f, 1, largest, type);
    }
    return m;
}

// Returns in how many of n bytes two arrays on the device differ.
int64_t codes_differ(Room* room, const uint8_t* a, const uint8_t* b, int64_t n) {
    const uint8_t *x = room->to_host(a, n), *y = room->to_host(b, n);
    int64_t differ = 0;
    for (int64_t i = 0; i < n; i++) differ += x[i] != y[i];
    return differ;
}

Fp8Codes made_codes(const Made* m) {
    return {m->rows, m->f.scale + 1, m->f.amax + 1, m->f.amax + 3};
}

// `values`: (N, C) is what the kernel stores without codes, which it writes of `op` of them; in so many runs it has
// counted what saturates.
void made_check(Test* test, Made* m, const char* what, Fp8Op op, bf16* values, uint32_t runs) {
    const Operand<bf16> cast = {values, m->want[0], m->want[1], &m->g, 1, FP8_E4M3, op};
    fp8_cast(m->room->dev, &cast, m->N, m->C);
    for (int i = 0; i < 2; i++) {
        const int64_t differ = codes_differ(m->room, i ? m->columns : m->rows, m->want[i], m->N * m->C);
        expect(differ == 0, "%s, %lld x %d, by %s: %lld codes differ", what, (long long)m->N, m->C,
               i ? "columns" : "rows", (long long)differ);
    }
    const uint32_t *found = m->room->to_host(m->f.amax, 4), *want = m->room->to_host(m->g.amax, 4);
    expect(found[1] == want[1] && found[1] > 0 && found[3] == runs * want[3] && want[3] > 0,
           "%s: found %08x and %u, the cast %08x and %u", what, found[1], found[3], want[1], want[3]);
}

// A kernel that writes rows alone: the others are made of them.
void made_rows_check(Test* test, Made* m, const char* what, bf16* values) {
    fp8_by_columns(m->room->dev, m->columns, m->rows, m->N, m->C);
    made_check(test, m, what, FP8_COPY, values, 1);
}

void check_made_layernorm(Test* test, const Device* dev, int64_t N, int C) {
    Array<bf16> a(dev, N * C, 1, 1.0f), b(dev, N * C, 2, 1.0f), w(dev, C, 3, 1.0f), bias(dev, C, 4, 1.0f),
        out(dev, N * C), residual(dev, N * C);
    Array<float> mean(dev, N), rstd(dev, N), sums(dev, 3 * C);
    Room room(dev);
    float* scratch = (float*)room.device<char>(layernorm_backward_scratch_bytes<bf16>(dev, C));
    Made made = made_open(&room, N, C);
    Fp8Codes codes = made_codes(&made);
    for (const Fp8Codes& to : {Fp8Codes{}, codes})
        residual_layernorm_forward<bf16>(dev, residual.device, out.device, mean.device, rstd.device, a.device, b.device,
                                         w.device, bias.device, N, C, to);
    made_rows_check(test, &made, "layernorm", out.device);
    made = made_open(&room, N, C);
    codes = made_codes(&made);
    layernorm_backward<bf16, float>(dev, out.device, sums.device, sums.device + C, sums.device + 2 * C, scratch,
                                    b.device, residual.device, w.device, mean.device, rstd.device, N, C, false, codes);
    made_rows_check(test, &made, "layernorm backward", out.device);
}

// The gradient of the logits is rounded at random: each code is one of the two next to the value, and of those values
// that are nearer to the code below, as many are rounded up as their fractions say, to five standard errors.
void check_made_logits(Test* test, const Device* dev, int64_t N, int V, int Vp) {
    assert(N > 0);
    const float dloss = 1e-4f;
    Array<bf16> logits(dev, N * Vp, 1, 4.0f), again(dev, N * Vp, 1, 4.0f);
    Array<float> losses(dev, N);
    Room room(dev);
    int* host = room.host<int>(N);
    for (int64_t i = 0; i < N; i++) host[i] = (int)(i * 7919 % V);
    const int* targets = room.to_device(host, N);
    Made made = made_open(&room, N, Vp, dloss, FP8_E5M2);
    const Fp8Codes codes = made_codes(&made);
    classifier<bf16>(dev, losses.device, logits.device, targets, dloss, true, N, V, Vp);
    const uint8_t* got = nullptr;
    for (int run = 0; run < 2; run++) {
        classifier<bf16>(dev, losses.device, again.device, targets, dloss, true, N, V, Vp, codes);
        const uint8_t* before = got;
        got = room.to_host(made.rows, N * Vp);
        expect(run == 0 || memcmp(got, before, N * Vp) == 0, "classifier, %lld x %d: codes of two runs differ",
               (long long)N, Vp);
    }
    const float scale = *room.to_host(codes.scale, 1);
    const bf16* values = room.to_host(logits.device, N * Vp);
    int64_t wrong = 0;
    double up = 0.0, wanted = 0.0, variance = 0.0;
    for (int64_t i = 0; i < N * Vp; i++) {
        const float value = fabsf(to_float(values[i])) * scale, code = fabsf(fp8_decode(got[i], FP8_E5M2));
        int exponent = value > 0 ? ilogbf(value) : -14;
        const float quantum = ldexpf(1.0f, (exponent < -14 ? -14 : exponent) - 2);
        const float below = floorf(value / quantum) * quantum, fraction = (value - below) / quantum;
        wrong += fabsf(code - value) > quantum * 1.04f;  // the value was rounded to bf16
        if (fraction < 0.02f || fraction > 0.48f) continue;
        up += code > below, wanted += fraction, variance += fraction * (1.0 - fraction);
    }
    expect(wrong == 0 && fabs(up - wanted) < 5 * sqrt(variance) && variance > 100,
           "classifier, %lld x %d: %lld codes are not next to their values; %.0f are rounded up, want %.0f +- %.0f",
           (long long)N, Vp, (long long)wrong, up, wanted, sqrt(variance));
    device_fill(dev, again.device, 0xff, Vp * 2);  // NaN
    classifier<bf16>(dev, losses.device, again.device, targets, dloss, true, N, V, Vp, codes);
    got = room.to_host(made.rows, Vp);
    for (int v = 0; v < V; v++) expect(isnan(fp8_decode(got[v], FP8_E5M2)), "NaN becomes code %d", got[v]);
}

void check_made_attention(Test* test, const Device* dev, int B, int T, int NH, int HS) {
    const int C = NH * HS;
    const int64_t N = (int64_t)B * T;
    Array<bf16> qkv(dev, N * 3 * C, 1, 1.0f), dout(dev, N * C, 2, 2.0f), out(dev, N * C), dqkv(dev, N * 3 * C);
    Array<float> lse(dev, N * NH), bias(dev, 3 * C), again(dev, 3 * C);
    const int64_t more = matmul_backward_bias_scratch_bytes(dev, 3 * C),
                  bytes = attention_backward_scratch_bytes(dev, B, T, C, NH);
    Room room(dev);
    void* scratch = room.device<char>(bytes > more ? bytes : more);
    Made made = made_open(&room, N, 3 * C);
    const Fp8Codes codes = made_codes(&made);
    attention_forward<bf16>(dev, out.device, lse.device, qkv.device, B, T, C, NH);
    for (int i = 0; i < 2; i++)
        attention_backward(dev, dqkv.device, (i ? again : bias).device, scratch, dout.device, qkv.device, out.device,
                           lse.device, B, T, C, NH, false, i ? codes : Fp8Codes{});
    expect(bias.bytes() == again.bytes(), "the bias's gradient differs with codes");
    made_rows_check(test, &made, "attention backward", dqkv.device);
}

TEST(fp8_made_gpu) {
    Device dev = test_device(true);
    for (int C : {64, 384, 768, 1024, 1280, 1600, 2048, 2560, 4096, 6400}) check_made_layernorm(test, &dev, 272, C);
    check_made_logits(test, &dev, 48, 250, 256);
    check_made_logits(test, &dev, 272, 50257, 50304);
    if (!attention_backward_codes(&dev)) return;
    check_made_attention(test, &dev, 3, 208, 2, 64);
    check_made_attention(test, &dev, 2, 1024, 3, 64);
    check_made_attention(test, &dev, 2, 176, 3, 128);
}

// Infinity and NaN become NaN, on both devices.
TEST(fp8_cast_nonfinite_gpu) {
    Device dev = test_device(true);
    Array<bf16> inp(&dev, 16 * 8, 5, 1.0f);
    inp.host[3] = INFINITY, inp.host[50] = NAN, inp.host[77] = -INFINITY;
    float values[16 * 8];
    memcpy(values, inp.host, sizeof(values));
    inp.set(values);
    Room room(&dev);
    Fp8 f = scales_open(&room, 3);
    uint8_t* codes = room.device<uint8_t>(16 * 8);
    fp8_begin(&dev, &f);
    f.use_current_scaling = false;
    const Operand<bf16> to = {inp.device, codes, nullptr, &f};
    fp8_cast(&dev, &to, 16, 8);
    const uint8_t* got = room.to_host(codes, 16 * 8);
    for (int i = 0; i < 16 * 8; i++)
        expect(isnan(fp8_decode(got[i], FP8_E4M3)) == !isfinite(values[i]), "%g becomes code %d", values[i], got[i]);
}

// A product of random codes, with a bias or added to what is there, against the plain C version. Hopper's tensor cores
// cut the terms of an instruction (32 of them, and the sum so far) off at 13 bits below the largest; with `fast` the
// sum so far is all of it, otherwise at most 128 terms. Terms are at most 1, so 2 sqrt(n) is beyond a sum of n.
template <typename D>
void check_product(Test* test, double* worst, const Device* dev, int64_t rows, int64_t cols, int64_t depth,
                   Fp8Type type_a, bool fast, bool with_bias, bool accumulate) {
    const Device cpu = test_device(false);
    Room room(dev), here(&cpu);
    Array<bf16> a(dev, rows * depth, 7, 1.0f), b(dev, cols * depth, 8, 1.0f);
    Array<D> out(dev, rows * cols), bias(dev, cols, 9, 1.0f);
    Fp8 f = scales_open(&room, 3), g = scales_open(&here, 3);
    uint8_t* own[2] = {room.host<uint8_t>(rows * depth), room.host<uint8_t>(cols * depth)};
    fp8_begin(dev, &f), fp8_begin(&cpu, &g);
    fp8_rescale(dev, &f, 2, 1.0f, type_a), fp8_rescale(&cpu, &g, 2, 1.0f, type_a);
    const Operand<float> own_x = {a.host, own[0], nullptr, &g, 2, type_a}, own_y = {b.host, own[1], nullptr, &g, 1};
    fp8_cast(&cpu, &own_x, rows, (int)depth), fp8_cast(&cpu, &own_y, cols, (int)depth);
    const Operand<bf16> x = {a.device, room.to_device(own[0], rows * depth), nullptr, &f, 2, type_a},
                        y = {b.device, room.device<uint8_t>(cols * depth), nullptr, &f, 1};
    fp8_cast(dev, &y, cols, (int)depth);
    float *want = room.host<float>(rows * cols), *before = room.host<float>(rows * cols);
    for (int64_t i = 0; i < rows * cols; i++) want[i] = before[i] = to_float(from_float<D>(test_uniform(10, i)));
    fp8_product<float>(&cpu, want, operand_rows(&own_x), operand_rows(&own_y), with_bias ? bias.host : nullptr, rows,
                       cols, depth, fast, accumulate);
    // A number that is added to bf16 may be rounded before.
    double added = 0;
    for (int64_t i = 0; i < rows * cols && accumulate; i++) added = fmax(added, fabs((double)want[i] - before[i]));
    const double run = fast || depth < 128 ? (double)depth : 128;
    const double cut = 2 * sqrt(run) / (1 << 13) * (run / 32 + 1) * sqrt((double)depth / run);
    check_output(test, worst, "product", &out, accumulate ? before : nullptr, want,
                 cut + product_bound(depth, 1.0) + epsilon<D>() * added, [&] {
                     fp8_product<D>(dev, out.device, operand_rows(&x), operand_rows(&y),
                                    with_bias ? bias.device : nullptr, rows, cols, depth, fast, accumulate);
                 });
}

OPERATOR_TEST(fp8_product_gpu) {
    check_product<bf16>(test, &worst, &dev, 256, 1152, 384, FP8_E4M3, true, true, false);
    check_product<bf16>(test, &worst, &dev, 48, 64, 256, FP8_E4M3, true, true, false);
    check_product<bf16>(test, &worst, &dev, 256, 384, 1536, FP8_E4M3, false, false, false);
    check_product<bf16>(test, &worst, &dev, 256, 384, 1536, FP8_E5M2, false, false, false);
    check_product<bf16>(test, &worst, &dev, 384, 384, 2048, FP8_E4M3, false, false, true);
    check_product<float>(test, &worst, &dev, 384, 1536, 2048, FP8_E5M2, false, false, true);
    check_product<float>(test, &worst, &dev, 128, 64, 16, FP8_E4M3, false, false, false);
}

// A matrix as an optimizer stores it in `weights`, and a layer that reads its codes.
template <typename X>
struct StoredLayer {
    Optim* optim;
    OptimCodes stored;
    Fp8 f;
    Fp8Use use;
    float* weight;     // (OC, C), on the host
    uint8_t* columns;  // of the input
};

// Some weights are so small that their codes are subnormal.
template <typename X>
StoredLayer<X> stored_layer_open(Room* room, const char* weights, int64_t N, int C, int OC) {
    const Device* dev = room->dev;
    StoredLayer<X> layer = {};
    OptimConfig config = {{}, "fp8", "", weights, "fp32", "", "", 7};
    if (!optim_resolve(&config, error)) user_error("%s", error);
    config.keeps_copy = false;
    OptimTensor tensor = {"h.0.mlp.c_fc.weight", OC, C, true, 0};
    optim_layout(&tensor, 1, &config);
    layer.optim = optim_create(dev, &config, &tensor, 1, sizeof(X) == 4 ? OPTIM_FP32 : OPTIM_BF16);
    layer.weight = random_floats((int64_t)OC * C, 21, 0.1f);
    for (int64_t i = 0; i < (int64_t)OC * C; i += 3) layer.weight[i] *= 0x1p-14f;
    optim_set_weights(layer.optim, 0, layer.weight);
    optim_get_weights(layer.optim, 0, layer.weight);
    layer.stored = optim_codes(layer.optim, 0);
    layer.f = scales_open(room, 3);
    const float* const stored[3] = {nullptr, layer.stored.numbers, nullptr};
    copy_to_device(dev, layer.f.stored, stored, sizeof(stored));
    fp8_begin(dev, &layer.f);
    uint8_t** const buffers[] = {&layer.use.rows, &layer.use.weight, &layer.use.drows, &layer.use.dcolumns,
                                 &layer.columns};
    for (uint8_t** buffer : buffers) *buffer = room->device<uint8_t>((N > OC ? N : OC) * (C > OC ? C : OC));
    return layer;
}

// Returns the values of `count` codes of a slot.
float* code_values(Room* room, const Fp8* f, const uint8_t* codes, int64_t count, int slot) {
    const uint8_t* host = room->to_host(codes, count);
    const float inverse = *room->to_host(f->scale_inv + 4 * slot, 1);
    float* values = room->host<float>(count);
    for (int64_t i = 0; i < count; i++) values[i] = fp8_decode(host[i], FP8_E4M3) * inverse;
    return values;
}

// A layer whose weights are stored as codes, forward and back to its input, against sums in double of what the codes
// say and of the weights as the model sees them. Nothing else is rounded, so that sums are as close as those of any
// other codes (check_product). Weights are at most 13/128, since 0.1 may round up.
template <typename X>
void check_stored(Test* test, double* worst, const Device* dev, const char* weights, int64_t N, int C, int OC) {
    Room room(dev);
    StoredLayer<X> layer = stored_layer_open<X>(&room, weights, N, C, OC);
    layer.use.scales = &layer.f;
    Array<X> inp(dev, N * C, 22, 1.0f), bias(dev, OC, 23, 1.0f), dout(dev, N * OC, 24, 1.0f), out(dev, N * OC),
        dinp(dev, N * C);
    X* dweight = room.device<X>((int64_t)OC * C);  // not looked at
    Linear<X, X> linear = {C, OC, {inp.device, nullptr, layer.columns}, {}, {}, bias.device, dweight, nullptr};
    linear_set(&layer.use, &linear, 0, (X*)nullptr, layer.stored.codes, dout.device, FP8_NOTHING, FP8_NOTHING);
    const auto forward = [&] { linear_forward(dev, out.device, &linear, N); };
    const auto backward = [&] { linear_backward(dev, dinp.device, &linear, N, false); };
    forward(), backward();
    const float *x = code_values(&room, &layer.f, layer.use.rows, N * C, 0),
                *dy = code_values(&room, &layer.f, layer.use.drows, N * OC, FP8_GRADIENT);
    float *want = room.host<float>(N * OC), *dwant = room.host<float>(N * C);
    for (int64_t n = 0; n < N; n++) {
        for (int o = 0; o < OC; o++) {
            double sum = bias.host[o];
            for (int c = 0; c < C; c++) sum += (double)x[n * C + c] * layer.weight[(int64_t)o * C + c];
            want[n * OC + o] = (float)sum;
        }
        for (int c = 0; c < C; c++) {
            double sum = 0;
            for (int o = 0; o < OC; o++) sum += (double)dy[n * OC + o] * layer.weight[(int64_t)o * C + c];
            dwant[n * C + c] = (float)sum;
        }
    }
    // This is check_product's bound for terms of at most 0.102, since the code of a value up to 1 stands for at most 1.
    const auto cut = [&](double depth) {
        const double run = depth < 128 ? depth : 128;
        return dev->gpu ? 0.102 * 2 * sqrt(run) / (1 << 13) * (run / 32 + 1) * sqrt(depth / run) : 0.0;
    };
    const double fast = dev->gpu ? 0.102 * 2 * sqrt((double)C) / (1 << 13) * (C / 32 + 1) : 0.0;
    check_output(test, worst, weights, &out, nullptr, want, fast + product_bound(C, 0.102), forward);
    check_output(test, worst, weights, &dinp, nullptr, dwant, cut(OC) + product_bound(OC, 0.102), backward);
    const float* numbers = room.to_host(layer.stored.numbers, 3);
    float magnitude;
    memcpy(&magnitude, room.to_host(layer.f.amax + FP8_WEIGHT, 1), 4);
    expect(magnitude == 448 * numbers[1] && magnitude >= numbers[0], "%s: the largest magnitude is %g of %g", weights,
           magnitude, numbers[0]);
}

OPERATOR_TEST(fp8_stored_weights) {
    for (const char* weights : {"e4m3/tensor", "e4m3/tensor:sr", "e4m3/tensor:ef"})
        check_stored<float>(test, &worst, &dev, weights, 48, 80, 64);
}

OPERATOR_TEST(fp8_stored_weights_gpu) {
    check_stored<bf16>(test, &worst, &dev, "e4m3/tensor:ef", 256, 384, 1152);
    check_stored<bf16>(test, &worst, &dev, "e4m3/tensor:ef", 48, 80, 64);
}

#ifdef __CUDACC__
// The products next to GELU: codes of `left` (N, C) and `weight` (OC, C), what cuBLASLt makes of them, and what our
// kernel does. `cut`: how far the two products may be apart (check_product).
struct GeluProducts {
    Room room;
    Array<bf16> left, weight, bias, pre, product;
    Array<float> dbias;
    Fp8 f;
    Operand<bf16> left_codes, weight_codes;
    Made made;
    float* scratch;
    Operand<bf16> out;
    double cut;

    GeluProducts(const Device* dev, int64_t N, int C, int OC, bool forward)
        : room(dev),
          left(dev, N * C, 1, 1.0f),
          weight(dev, (int64_t)OC * C, 2, 0.1f),
          bias(dev, OC, 3, 1.0f),
          pre(dev, N * OC, 4, 3.0f, !forward),
          product(dev, N * OC),
          dbias(dev, OC),
          f(scales_open(&room, 3)),
          left_codes({left.device, room.device<uint8_t>(N * C), nullptr, &f}),
          weight_codes({weight.device, room.device<uint8_t>((int64_t)OC * C), nullptr, &f, 1}),
          made(made_open(&room, N, OC, 1.5f)),
          scratch((float*)room.device<char>(matmul_backward_gelu_scratch_bytes(dev, N, OC))),
          out({nullptr, made.rows, made.columns, &made.f, 1, FP8_E4M3, FP8_COPY, FP8_BOTH}),
          cut(2 * 0.1 * 2 * sqrt((double)C) / (1 << 13) * (C / 32 + 1)) {
        fp8_begin(dev, &f);
        fp8_cast(dev, &left_codes, N, C), fp8_cast(dev, &weight_codes, OC, C);
        fp8_product<bf16>(dev, product.device, operand_rows(&left_codes), operand_rows(&weight_codes),
                          forward ? bias.device : nullptr, N, OC, C, true, false);
    }
};

// pre against cuBLASLt's product; its GELU's codes and the counters against a cast of the very pre, to the bit.
void check_forward_gelu(Test* test, double* worst, const Device* dev, int64_t N, int C, int OC) {
    GeluProducts p(dev, N, C, OC, true);
    p.product.read(p.pre.want);
    const auto run = [&] {
        matmul_gelu_fp8_forward(dev, &p.out, p.pre.device, operand_rows(&p.left_codes), operand_rows(&p.weight_codes),
                                p.bias.device, N, C, OC);
    };
    check_outputs(test, worst, run, {{"pre", &p.pre, p.cut + product_bound(C, 0.1)}});
    made_check(test, &p.made, "GELU", FP8_GELU, p.pre.device, 2);
}

// Codes of (dout W) * gelu'(pre), and the sums of their columns, against cuBLASLt's product and a cast.
void check_backward_gelu(Test* test, double* worst, const Device* dev, int64_t N, int C, int OC) {
    GeluProducts p(dev, N, C, OC, false);
    const Operand<bf16> cast = {p.product.device, p.made.want[0],   p.made.want[1], &p.made.g, 1,
                                FP8_E4M3,         FP8_GELU_BACKWARD};
    fp8_cast(dev, &cast, N, OC, p.pre.device, p.dbias.device, p.scratch);
    p.dbias.read(p.dbias.want);
    // Both d are off by a rounding to bf16 of at most C * 0.1 / 4 or so in size besides.
    const double off = p.cut + 0.1 * sqrt((double)C) * epsilon<bf16>();
    const auto run = [&] {
        matmul_gelu_fp8_backward<float>(dev, &p.out, p.dbias.device, p.scratch, operand_rows(&p.left_codes),
                                        operand_rows(&p.weight_codes), p.pre.device, N, OC, C, false);
    };
    check_outputs(test, worst, run, {{"dbias", &p.dbias, sqrt((double)N) * 6 * off}});
    // By value a code may be off by one step of the larger's place, and by what the product is.
    const uint8_t *got = p.room.to_host(p.made.rows, N * OC), *want = p.room.to_host(p.made.want[0], N * OC);
    const uint8_t* columns = p.room.to_host(p.made.columns, N * OC);
    const float inverse = *p.room.to_host(p.made.f.scale_inv + 4, 1);
    int64_t apart = 0, turned = 0;
    for (int64_t i = 0; i < N * OC; i++) {
        const double a = fp8_decode(got[i], FP8_E4M3) * inverse, b = fp8_decode(want[i], FP8_E4M3) * inverse;
        const double step = fmax(fmax(fabs(a), fabs(b)) * 0.125, 0x1p-9 * inverse);
        apart += !(fabs(a - b) <= step + off);
        turned += columns[i % OC * N + i / OC] != got[i];
    }
    expect(apart == 0 && turned == 0, "%lld x %d x %d: %lld codes are off, %lld by columns are others", (long long)N,
           OC, C, (long long)apart, (long long)turned);
    float ours, theirs;
    memcpy(&ours, p.room.to_host(p.made.f.amax + 1, 1), 4), memcpy(&theirs, p.room.to_host(p.made.g.amax + 1, 1), 4);
    expect(fabs(ours - theirs) <= p.cut + 2 * epsilon<bf16>() * theirs && ours > 0,
           "largest magnitude %g, the cast's %g", ours, theirs);
}

OPERATOR_TEST(fp8_gelu_products_gpu) {
    if (!matmul_gelu_fp8_fits(&dev, 4096, 3072, 768)) skip("needs compute capability 9.0 and a build for it");
    const int shapes[][3] = {{2048, 400, 2304}, {4096, 80, 1536}, {4096, 768, 3072}, {2048, 1600, 6400}};
    for (auto& s : shapes) {
        check_forward_gelu(test, &worst, &dev, s[0], s[1], s[2]);
        check_backward_gelu(test, &worst, &dev, s[0], s[1], s[2]);
    }
}

#endif

}  // namespace
