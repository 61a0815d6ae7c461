// Tests of products in fp8 (kernels/fp8.cuh): the codes against a search through all of them, scales, casts on the GPU
// against the plain C version to the bit, products against it, and runs of ./train.
#include "../../kernels/attention.cuh"
#include "../../kernels/classifier.cuh"
#include "../../kernels/layernorm.cuh"
#include "../../kernels/linear_fp8.cuh"
#include "../../optim/optim.h"
#include "cli.h"
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
    return fp8_open(slots, FP8_E5M2, memory);
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
void check_cast(Test* test, double* worst, const Device* dev, CastShape s, Fp8Op op, Fp8Type type, bool current) {
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
    if (!current) fp8_fix(dev, &f, 1, 1.7f, type), fp8_fix(&cpu, &g, 1, 1.7f, type);  // so that some saturate
    const Fp8Operand to = {codes[0], codes[1], 1, type}, there = {want[0], want[1], 1, type};
    fp8_cast<bf16>(dev, &f, &to, op, inp.device, pre.device, bias.device, scratch, s.N, s.C, false);
    fp8_cast<float>(&cpu, &g, &there, op, inp.host, pre.host, sums, nullptr, s.N, s.C, false);
    int64_t apart = 0;
    for (int i = 0; i < 2; i++) {
        copy_to_host(dev, got, codes[i], n + 64);
        for (int64_t j = 0; j < n; j++) apart += abs((int)got[j] - want[i][j]) > (op == FP8_COPY ? 0 : 1);
        for (int j = 0; j < 64; j++) expect(got[n + j] == 0xaa, "byte %d behind the codes was written", j);
    }
    expect(apart == 0, "%lld x %d, op %d, type %d: %lld codes differ", (long long)s.N, s.C, op, type, (long long)apart);
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
            for (Fp8Type type : {FP8_E4M3, FP8_E5M2}) {
                check_cast(test, &worst, &dev, s, op, type, false);
                check_cast(test, &worst, &dev, s, op, type, true);
            }
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

Made made_open(Room* room, int64_t N, int C, Fp8Type type, float largest = 0.9f) {
    assert(N > 0 && C > 0);
    Made m = {room, scales_open(room, 3), scales_open(room, 3), nullptr, nullptr, {}, N, C};
    for (uint8_t** codes : {&m.rows, &m.columns, &m.want[0], &m.want[1]}) {
        *codes = room->device<uint8_t>(N * C);
        device_zero(room->dev, *codes, N * C);
    }
    for (Fp8* f : {&m.f, &m.g}) {
        fp8_begin(room->dev, f);
        f->use_current_scaling = false;
        fp8_fix(room->dev, f, 1, largest, type);
    }
    return m;
}

Fp8Codes made_codes(const Made* m, Fp8Type type) {
    return {m->rows, m->f.scale + 1, m->f.amax + 1, m->f.amax + 3, type};
}

// `values` is what the kernel stores without codes: (N, C). counted: it tells magnitude and count.
void made_check(Test* test, Made* m, const char* what, const bf16* values, Fp8Type type, bool counted) {
    const int64_t n = m->N * m->C;
    const Device* dev = m->room->dev;
    const Fp8Operand to = {m->want[0], m->want[1], 1, type};
    fp8_cast<bf16>(dev, &m->g, &to, FP8_COPY, values, (const bf16*)nullptr, (float*)nullptr, nullptr, m->N, m->C,
                   false);
    fp8_by_columns(dev, m->columns, m->rows, m->N, m->C);
    for (int i = 0; i < 2; i++) {
        const uint8_t *got = m->room->to_host(i ? m->columns : m->rows, n), *want = m->room->to_host(m->want[i], n);
        int64_t differ = 0, zero = 0;
        for (int64_t j = 0; j < n; j++) differ += got[j] != want[j], zero += want[j] == 0;
        expect(differ == 0 && zero < n / 2, "%s, %lld x %d, type %d, %s: %lld codes differ, %lld are zero", what,
               (long long)m->N, m->C, type, i ? "by columns" : "by rows", (long long)differ, (long long)zero);
    }
    const uint32_t *found = m->room->to_host(m->f.amax, 4), *cast = m->room->to_host(m->g.amax, 4);
    if (counted)
        expect(found[1] == cast[1] && found[3] == cast[3] && cast[3] > 0, "%s: found %08x and %u, the cast %08x and %u",
               what, found[1], found[3], cast[1], cast[3]);
}

void check_made_layernorm(Test* test, const Device* dev, int64_t N, int C, Fp8Type type) {
    Array<bf16> a(dev, N * C, 1, 1.0f), b(dev, N * C, 2, 1.0f), w(dev, C, 3, 1.0f), bias(dev, C, 4, 1.0f),
        out(dev, N * C), residual(dev, N * C);
    Array<float> mean(dev, N), rstd(dev, N), sums(dev, 3 * C);
    Room room(dev);
    float* scratch = (float*)room.device<char>(layernorm_backward_scratch_bytes<bf16>(dev, C));
    Made made = made_open(&room, N, C, type);
    Fp8Codes codes = made_codes(&made, type);
    for (const Fp8Codes& to : {Fp8Codes{}, codes})
        residual_layernorm_forward<bf16>(dev, residual.device, out.device, mean.device, rstd.device, a.device, b.device,
                                         w.device, bias.device, N, C, to);
    made_check(test, &made, "layernorm", out.device, type, true);
    made = made_open(&room, N, C, type);
    codes = made_codes(&made, type);
    layernorm_backward<bf16, float>(dev, out.device, sums.device, sums.device + C, sums.device + 2 * C, scratch,
                                    b.device, residual.device, w.device, mean.device, rstd.device, N, C, false, codes);
    made_check(test, &made, "layernorm backward", out.device, type, true);
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
    Made made = made_open(&room, N, Vp, FP8_E5M2, dloss);
    const Fp8Codes codes = made_codes(&made, FP8_E5M2);
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
}

void check_made_attention(Test* test, const Device* dev, int B, int T, int NH, int HS, Fp8Type type) {
    const int C = NH * HS;
    const int64_t N = (int64_t)B * T;
    Array<bf16> qkv(dev, N * 3 * C, 1, 1.0f), dout(dev, N * C, 2, 2.0f), out(dev, N * C), dqkv(dev, N * 3 * C);
    Array<float> lse(dev, N * NH), bias[2];
    for (auto& sums : bias) sums = Array<float>(dev, 3 * C);
    const int64_t more = matmul_backward_bias_scratch_bytes(dev, 3 * C),
                  bytes = attention_backward_scratch_bytes(dev, B, T, C, NH);
    Room room(dev);
    void* scratch = room.device<char>(bytes > more ? bytes : more);
    Made made = made_open(&room, N, 3 * C, type);
    const Fp8Codes codes = made_codes(&made, type);
    attention_forward<bf16>(dev, out.device, lse.device, qkv.device, B, T, C, NH);
    for (int i = 0; i < 2; i++)
        attention_backward(dev, dqkv.device, bias[i].device, scratch, dout.device, qkv.device, out.device, lse.device,
                           B, T, C, NH, false, i ? codes : Fp8Codes{});
    for (auto& sums : bias) copy_to_host(dev, sums.host, sums.device, 3 * C * sizeof(float));
    expect(memcmp(bias[0].host, bias[1].host, 3 * C * sizeof(float)) == 0, "the bias's gradient differs with codes");
    made_check(test, &made, "attention backward", dqkv.device, type, true);
}

TEST(fp8_made_gpu) {
    Device dev = test_device(true);
    for (Fp8Type type : {FP8_E4M3, FP8_E5M2}) {
        for (int C : {64, 384, 768, 1024, 1280, 1600, 2048, 2560, 4096, 6400})
            check_made_layernorm(test, &dev, 272, C, type);
        if (!attention_backward_codes(&dev)) continue;
        check_made_attention(test, &dev, 3, 208, 2, 64, type);
        check_made_attention(test, &dev, 2, 1024, 3, 64, type);
        check_made_attention(test, &dev, 2, 176, 3, 128, type);
    }
    check_made_logits(test, &dev, 48, 250, 256);
    check_made_logits(test, &dev, 272, 50257, 50304);
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
    for (Fp8Type type : {FP8_E4M3, FP8_E5M2}) {
        const Fp8Operand to = {codes, nullptr, 0, type};
        fp8_cast<bf16>(&dev, &f, &to, FP8_COPY, inp.device, nullptr, (float*)nullptr, nullptr, 16, 8, false);
        const uint8_t* got = room.to_host(codes, 16 * 8);
        for (int i = 0; i < 16 * 8; i++)
            expect(isnan(fp8_decode(got[i], type)) == !isfinite(values[i]), "%g becomes code %d", values[i], got[i]);
    }
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
    uint8_t* codes[2] = {room.device<uint8_t>(rows * depth), room.device<uint8_t>(cols * depth)};
    uint8_t* own[2] = {room.host<uint8_t>(rows * depth), room.host<uint8_t>(cols * depth)};
    fp8_begin(dev, &f), fp8_begin(&cpu, &g);
    const Fp8Operand to[] = {{codes[0], nullptr, 2, type_a}, {codes[1], nullptr, 1, FP8_E4M3}};
    const Fp8Operand there[] = {{own[0], nullptr, 2, type_a}, {own[1], nullptr, 1, FP8_E4M3}};
    fp8_cast<bf16>(dev, &f, &to[0], FP8_COPY, a.device, nullptr, (float*)nullptr, nullptr, rows, (int)depth, false);
    fp8_cast<bf16>(dev, &f, &to[1], FP8_COPY, b.device, nullptr, (float*)nullptr, nullptr, cols, (int)depth, false);
    fp8_cast<float>(&cpu, &g, &there[0], FP8_COPY, a.host, nullptr, (float*)nullptr, nullptr, rows, (int)depth, false);
    fp8_cast<float>(&cpu, &g, &there[1], FP8_COPY, b.host, nullptr, (float*)nullptr, nullptr, cols, (int)depth, false);
    float *want = room.host<float>(rows * cols), *before = room.host<float>(rows * cols);
    for (int64_t i = 0; i < rows * cols; i++) want[i] = before[i] = to_float(from_float<D>(test_uniform(10, i)));
    fp8_product<float>(&cpu, &g, want, {own[0], 2, type_a}, {own[1], 1, FP8_E4M3}, with_bias ? bias.host : nullptr,
                       rows, cols, depth, fast, accumulate);
    // A number that is added to bf16 may be rounded before.
    double added = 0;
    for (int64_t i = 0; i < rows * cols && accumulate; i++) added = fmax(added, fabs((double)want[i] - before[i]));
    const double run = fast || depth < 128 ? (double)depth : 128;
    const double cut = 2 * sqrt(run) / (1 << 13) * (run / 32 + 1) * sqrt((double)depth / run);
    check_output<D>(test, worst, "product", &out, accumulate ? before : nullptr, want,
                    cut + product_bound(depth, 1.0) + epsilon<D>() * added, [&] {
                        fp8_product<D>(dev, &f, out.device, {codes[0], 2, type_a}, {codes[1], 1, FP8_E4M3},
                                       with_bias ? bias.device : nullptr, rows, cols, depth, fast, accumulate);
                    });
}

OPERATOR_TEST(fp8_product_gpu) {
    check_product<bf16>(test, &worst, &dev, 256, 1152, 384, FP8_E4M3, true, true, false);
    check_product<bf16>(test, &worst, &dev, 48, 64, 256, FP8_E4M3, true, true, false);
    check_product<bf16>(test, &worst, &dev, 256, 384, 1536, FP8_E5M2, false, false, false);
    check_product<bf16>(test, &worst, &dev, 384, 384, 2048, FP8_E5M2, false, false, true);
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
    OptimConfig config = {"fp8", "", weights, "fp32", "", "", 0.9f, 0.95f, 1e-8f, 0.1f, 7};
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
float* code_values(Room* room, const Fp8* f, const uint8_t* codes, int64_t count, int slot, Fp8Type type) {
    const uint8_t* host = room->to_host(codes, count);
    const float inverse = *room->to_host(f->scale_inv + 4 * slot, 1);
    float* values = room->host<float>(count);
    for (int64_t i = 0; i < count; i++) values[i] = fp8_decode(host[i], type) * inverse;
    return values;
}

// A layer whose weights are stored as codes, forward and back to its input, against sums in double of what the codes
// say and of the weights as the model sees them. Nothing else is rounded, so that sums are as close as those of any
// other codes (check_product). Weights are at most 0.1.
template <typename X>
void check_stored(Test* test, double* worst, const Device* dev, const char* weights, int64_t N, int C, int OC) {
    Room room(dev);
    StoredLayer<X> layer = stored_layer_open<X>(&room, weights, N, C, OC);
    layer.use.scales = &layer.f;
    Array<X> inp(dev, N * C, 22, 1.0f), bias(dev, OC, 23, 1.0f), dout(dev, N * OC, 24, 1.0f), out(dev, N * OC),
        dinp(dev, N * C);
    X* dweight = room.device<X>((int64_t)OC * C);  // not looked at
    Linear<X, X> linear = {C, OC, {}, {}, {}, bias.device, dweight, nullptr};
    linear.inp = linear_input(&layer.use, 0, inp.device, layer.columns, false);
    linear.weight = linear_weight(&layer.use, 0, (X*)nullptr, layer.stored.codes);
    linear.dout = linear_gradient(&layer.use, 0, dout.device, false);
    const auto forward = [&] { linear_forward(dev, out.device, &linear, N); };
    const auto backward = [&] { linear_backward(dev, dinp.device, &linear, N, false); };
    forward(), backward();
    const float *x = code_values(&room, &layer.f, layer.use.rows, N * C, 0, FP8_E4M3),
                *dy = code_values(&room, &layer.f, layer.use.drows, N * OC, FP8_GRADIENT, FP8_E5M2);
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
    // As check_product has it, for terms of at most 0.1; x and gradients are rounded up to 1/16 and 1/8 beyond 1.
    const auto cut = [&](double depth) {
        const double run = depth < 128 ? depth : 128;
        return dev->gpu ? 0.115 * 2 * sqrt(run) / (1 << 13) * (run / 32 + 1) * sqrt(depth / run) : 0.0;
    };
    const double fast = dev->gpu ? 0.115 * 2 * sqrt((double)C) / (1 << 13) * (C / 32 + 1) : 0.0;
    check_output<X>(test, worst, weights, &out, nullptr, want, fast + product_bound(C, 0.115), forward);
    check_output<X>(test, worst, weights, &dinp, nullptr, dwant, cut(OC) + product_bound(OC, 0.115), backward);
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
// The products next to GELU: what they are given, and what a step would compute of it by other means.
struct GeluProducts {
    Array<bf16> left, weight, bias, pre, want;
    Array<float> dbias;
    Fp8 f;
    uint8_t *left_codes, *weight_codes, *codes, *columns, *cast, *cast_columns;
    float* scratch;
};

GeluProducts gelu_products_open(Room* room, int64_t N, int C, int OC, Fp8Type type) {
    const Device* dev = room->dev;
    GeluProducts p;
    p.left = Array<bf16>(dev, N * C, 1, 1.0f), p.weight = Array<bf16>(dev, (int64_t)OC * C, 2, 0.1f);
    p.bias = Array<bf16>(dev, OC, 3, 1.0f), p.pre = Array<bf16>(dev, N * OC, 4, 3.0f);
    p.want = Array<bf16>(dev, N * OC), p.dbias = Array<float>(dev, OC);
    p.f = scales_open(room, 6);
    for (uint8_t** codes : {&p.left_codes, &p.weight_codes, &p.codes, &p.columns, &p.cast, &p.cast_columns}) {
        const int64_t n = codes == &p.left_codes ? N * C : codes == &p.weight_codes ? (int64_t)OC * C : N * OC;
        *codes = room->device<uint8_t>(n);
    }
    p.scratch = (float*)room->device<char>(matmul_backward_gelu_scratch_bytes(dev, N, OC));
    fp8_begin(dev, &p.f);
    const Fp8Operand left = {p.left_codes, nullptr, 0, type}, right = {p.weight_codes, nullptr, 1, FP8_E4M3};
    float* none = nullptr;
    fp8_cast<bf16>(dev, &p.f, &left, FP8_COPY, p.left.device, nullptr, none, nullptr, N, C, false);
    fp8_cast<bf16>(dev, &p.f, &right, FP8_COPY, p.weight.device, nullptr, none, nullptr, OC, C, false);
    p.f.use_current_scaling = false;
    for (int slot : {2, 3}) fp8_fix(dev, &p.f, slot, 1.5f, type);
    return p;
}

// Elements in which the kernel's codes differ from the cast's, by value, more than by one step of the larger's place
// and `beside`, what the product may be off by. Slot 2 is the kernel's, 3 the cast's.
int64_t codes_apart(Room* room, const GeluProducts* p, int64_t n, Fp8Type type, double beside) {
    const uint8_t *got = room->to_host(p->codes, n), *want = room->to_host(p->cast, n);
    const float inverse = *room->to_host(p->f.scale_inv + 8, 1);
    int64_t apart = 0;
    for (int64_t i = 0; i < n; i++) {
        const double a = fp8_decode(got[i], type) * inverse, b = fp8_decode(want[i], type) * inverse;
        const double step = fmax(fmax(fabs(a), fabs(b)) * (type == FP8_E4M3 ? 0.125 : 0.25), 0x1p-9 * inverse);
        apart += !(fabs(a - b) <= step + beside);
    }
    return apart;
}

// Codes by columns are those by rows, transposed.
void check_columns(Test* test, Room* room, const GeluProducts* p, int64_t N, int OC) {
    const uint8_t *rows = room->to_host(p->codes, N * OC), *columns = room->to_host(p->columns, N * OC);
    int64_t differ = 0;
    for (int64_t n = 0; n < N; n++)
        for (int c = 0; c < OC; c++) differ += rows[n * OC + c] != columns[c * N + n];
    expect(differ == 0, "%lld x %d: %lld codes by columns are not those by rows", (long long)N, OC, (long long)differ);
}

// pre against cuBLASLt's product, within both products' cuts (check_product); its GELU's codes and the counters against
// a cast of the very pre, to the bit.
void check_forward_gelu(Test* test, double* worst, const Device* dev, int64_t N, int C, int OC) {
    Room room(dev);
    GeluProducts p = gelu_products_open(&room, N, C, OC, FP8_E4M3);
    const Fp8Codes out = {p.codes, p.f.scale + 2, p.f.amax + 2, p.f.amax + 6, FP8_E4M3};
    const MatmulGeluFp8 codes = {{}, nullptr, nullptr, nullptr, p.columns, out, p.f.scale_inv, p.f.scale_inv + 4};
    fp8_product<bf16>(dev, &p.f, p.want.device, {p.left_codes, 0, FP8_E4M3}, {p.weight_codes, 1, FP8_E4M3},
                      p.bias.device, N, OC, C, true, false);
    const bf16* stored = room.to_host(p.want.device, N * OC);
    float* want = room.host<float>(N * OC);
    for (int64_t i = 0; i < N * OC; i++) want[i] = to_float(stored[i]);
    const double cut = 2 * 0.1 * 2 * sqrt((double)C) / (1 << 13) * (C / 32 + 1);
    check_output<bf16>(test, worst, "pre", &p.pre, nullptr, want, cut + product_bound(C, 0.1), [&] {
        matmul_gelu_fp8_forward(dev, codes, p.pre.device, p.left_codes, p.weight_codes, p.bias.device, N, C, OC);
    });
    const uint32_t* found = room.to_host(p.f.amax, 7);
    const Fp8Operand cast = {p.cast, p.cast_columns, 3, FP8_E4M3};
    fp8_cast<bf16>(dev, &p.f, &cast, FP8_GELU, p.pre.device, nullptr, (float*)nullptr, nullptr, N, OC, false);
    const uint8_t *got = room.to_host(p.codes, N * OC), *other = room.to_host(p.cast, N * OC);
    int64_t differ = 0;
    for (int64_t i = 0; i < N * OC; i++) differ += got[i] != other[i];
    expect(differ == 0, "%lld x %d x %d: %lld codes of GELU differ from the cast's", (long long)N, OC, C,
           (long long)differ);
    check_columns(test, &room, &p, N, OC);
    const uint32_t* after = room.to_host(p.f.amax, 7);
    expect(found[2] == after[3] && found[2] > 0, "largest magnitude %08x, the cast's %08x", found[2], after[3]);
    const uint32_t once = after[6] - found[6];
    expect(once > 0 && found[6] == 2 * once, "%u saturated in two runs, in the cast %u", found[6], once);
}

// Codes of (dout W) * gelu'(pre), and the sums of their columns, against cuBLASLt's product and a cast.
void check_backward_gelu(Test* test, double* worst, const Device* dev, int64_t N, int C, int OC, Fp8Type type) {
    Room room(dev);
    GeluProducts p = gelu_products_open(&room, N, C, OC, type);
    const Fp8Codes out = {p.codes, p.f.scale + 2, p.f.amax + 2, p.f.amax + 6, type};
    const MatmulGeluFp8 codes = {{}, nullptr, nullptr, nullptr, p.columns, out, p.f.scale_inv, p.f.scale_inv + 4};
    fp8_product<bf16>(dev, &p.f, p.want.device, {p.left_codes, 0, type}, {p.weight_codes, 1, FP8_E4M3},
                      (const bf16*)nullptr, N, OC, C, true, false);
    const Fp8Operand cast = {p.cast, p.cast_columns, 3, type};
    fp8_cast<bf16>(dev, &p.f, &cast, FP8_GELU_BACKWARD, p.want.device, p.pre.device, p.dbias.device, p.scratch, N, OC,
                   false);
    const float* want = room.to_host(p.dbias.device, OC);
    // The products are off by their cut; both d by a rounding to bf16 of at most C * 0.1 / 4 or so in size.
    const double cut = 2 * 0.1 * 2 * sqrt((double)C) / (1 << 13) * (C / 32 + 1), size = 0.1 * sqrt((double)C);
    check_output<float>(test, worst, "dbias", &p.dbias, nullptr, want,
                        sqrt((double)N) * 6 * (cut + size * epsilon<bf16>()), [&] {
                            matmul_gelu_fp8_backward<float>(dev, codes, p.dbias.device, p.scratch, p.left_codes,
                                                            p.weight_codes, p.pre.device, N, OC, C, false);
                        });
    const int64_t apart = codes_apart(&room, &p, N * OC, type, cut + size * epsilon<bf16>());
    expect(apart == 0, "%lld x %d x %d, type %d: %lld codes are too far from the cast's", (long long)N, OC, C, type,
           (long long)apart);
    check_columns(test, &room, &p, N, OC);
    const uint32_t* found = room.to_host(p.f.amax, 7);
    float magnitude[2];
    memcpy(magnitude, found + 2, sizeof(magnitude));
    expect(fabs(magnitude[0] - magnitude[1]) <= cut + 2 * epsilon<bf16>() * magnitude[1] && magnitude[0] > 0,
           "largest magnitude %g, the cast's %g", magnitude[0], magnitude[1]);
}

OPERATOR_TEST(fp8_gelu_products_gpu) {
    if (!matmul_gelu_fp8_fits(&dev, 4096, 3072, 768)) skip("needs compute capability 9.0 and a build for it");
    check_forward_gelu(test, &worst, &dev, 2048, 400, 2304);
    check_forward_gelu(test, &worst, &dev, 4096, 80, 1536);
    check_forward_gelu(test, &worst, &dev, 4096, 768, 3072);
    check_forward_gelu(test, &worst, &dev, 2048, 1600, 6400);
    for (Fp8Type type : {FP8_E4M3, FP8_E5M2}) {
        check_backward_gelu(test, &worst, &dev, 2048, 400, 2304, type);
        check_backward_gelu(test, &worst, &dev, 4096, 80, 1536, type);
        check_backward_gelu(test, &worst, &dev, 4096, 768, 3072, type);
        check_backward_gelu(test, &worst, &dev, 2048, 1600, 6400, type);
    }
}

#endif

}  // namespace
