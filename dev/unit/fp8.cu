// Tests of products in fp8 (kernels/fp8.cuh): the codes against a search through all of them, scales, casts on the GPU
// against the plain C version to the bit, products against it, and runs of ./train.
#include "../../kernels/fp8.cuh"
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

// A history keeps the largest of the last steps for FP8_HISTORY steps; a magnitude that is not finite changes nothing.
TEST(fp8_history) {
    Device dev = test_device(false);
    void* memory = device_alloc(&dev, fp8_bytes(3));
    device_zero(&dev, memory, fp8_bytes(3));
    Fp8 f = fp8_open(3, FP8_E5M2, memory);
    float factor = 1.0f, saturated;
    for (int step = 0; step < 2 * FP8_HISTORY; step++) {
        fp8_begin(&dev, &f);
        const float want = step == 0             ? 1.0f
                           : step <= FP8_HISTORY ? fp8_scale(8.0f, FP8_E4M3, 1)
                                                 : fp8_scale(1.0f, FP8_E4M3, 1);
        expect(f.scale[0] == want && f.inverse[0] == 1.0f / want, "step %d: scale %g, want %g", step, f.scale[0], want);
        fp8_found_cpu(&f, 0, step == 0 ? 8.0f : 1.0f, step);
        if (step == 3) fp8_found_cpu(&f, 1, INFINITY, 0);
        fp8_end(&dev, &f, &factor, &saturated);
        expect(saturated == (float)step, "step %d: %g saturated", step, saturated);
    }
    expect(f.history[FP8_HISTORY] == 0.0f, "infinity is remembered");
    float before = f.history[0];
    fp8_begin(&dev, &f);
    fp8_found_cpu(&f, 0, 100.0f, 0);
    factor = NAN;
    fp8_end(&dev, &f, &factor, &saturated);
    expect(f.history[0] == before, "a step that changed nothing is remembered");
}

// Scales on the device with the slots that a test needs, none of them known.
Fp8 scales_open(const Device* dev, int slots) {
    void* memory = device_alloc(dev, fp8_bytes(slots));
    device_zero(dev, memory, fp8_bytes(slots));
    return fp8_open(slots, FP8_E5M2, memory);
}

struct CastShape {
    int64_t N;
    int C;
};

// One cast on both devices, from equal values: codes (by rows and by columns), magnitude and count to the bit where
// nothing is computed; with GELU, codes at most one step apart.
void check_cast(Test* test, double* worst, const Device* dev, CastShape s, Fp8Op op, Fp8Type type, bool current) {
    Device cpu;
    device_open(&cpu, false, 0);
    const int64_t n = s.N * s.C;
    Array<bf16> inp = array_random<bf16>(dev, n, 5, 3.0f), pre = array_random<bf16>(dev, n, 6, 2.0f);
    Array<float> bias = array_of<float>(dev, s.C, nullptr);
    Fp8 f = scales_open(dev, 3), g = scales_open(&cpu, 3);
    uint8_t *codes[2], *want[2] = {(uint8_t*)malloc(n), (uint8_t*)malloc(n)}, *got = (uint8_t*)malloc(n + 64);
    for (uint8_t*& code : codes) {
        code = (uint8_t*)device_alloc(dev, n + 64);
        copy_to_device(dev, code, memset(got, 0xaa, n + 64), n + 64);
    }
    float* scratch = (float*)device_alloc(dev, fp8_scratch_bytes(dev, s.N, s.C));
    float* sums = floats(s.C);
    fp8_begin(dev, &f), fp8_begin(&cpu, &g);
    f.current = g.current = current;
    if (!current) fp8_fix(dev, &f, 1, 1.7f, type), fp8_fix(&cpu, &g, 1, 1.7f, type);  // so that some saturate
    const Fp8Operand to = {codes[0], codes[1], 1, type}, here = {want[0], want[1], 1, type};
    fp8_cast<bf16>(dev, &f, &to, op, inp.device, pre.device, bias.device, scratch, s.N, s.C, false);
    fp8_cast<float>(&cpu, &g, &here, op, inp.host, pre.host, sums, nullptr, s.N, s.C, false);
    int64_t apart = 0;
    for (int i = 0; i < 2; i++) {
        copy_to_host(dev, got, codes[i], n + 64);
        for (int64_t j = 0; j < n; j++) apart += abs((int)got[j] - want[i][j]) > (op == FP8_COPY ? 0 : 1);
        for (int j = 0; j < 64; j++) expect(got[n + j] == 0xaa, "byte %d behind the codes was written", j);
    }
    expect(apart == 0, "%lld x %d, op %d, type %d: %lld codes differ", (long long)s.N, s.C, op, type, (long long)apart);
    uint32_t found[4];
    copy_to_host(dev, found, f.found, sizeof(found));
    if (op == FP8_COPY) {
        expect(found[1] == g.found[1], "largest magnitude %08x, want %08x", found[1], g.found[1]);
        expect(found[3] == g.found[3] && (current || found[3] > 0), "%u saturated, want %u", found[3], g.found[3]);
    }
    copy_to_host(dev, bias.host, bias.device, s.C * sizeof(float));
    close_to(test, worst, "sums", bias.host, sums, s.C,
             EPS32 * (double)s.N * 4 + (op == FP8_COPY ? 0 : 1e-4 * (double)s.N), 0);
    array_free(dev, &inp), array_free(dev, &pre), array_free(dev, &bias);
    for (int i = 0; i < 2; i++) device_free(dev, codes[i]), free(want[i]);
    device_free(dev, scratch), device_free(dev, f.inverse), free(g.inverse), free(got), free(sums);
}

TEST(fp8_cast_gpu) {
    Device dev = test_device(true);
    double worst = 0;
    for (CastShape s : {CastShape{16, 8}, CastShape{144, 200}, CastShape{256, 128}, CastShape{1040, 1032}}) {
        for (Fp8Op op : {FP8_COPY, FP8_GELU, FP8_GELU_BACKWARD}) {
            for (Fp8Type type : {FP8_E4M3, FP8_E5M2}) {
                check_cast(test, &worst, &dev, s, op, type, false);
                check_cast(test, &worst, &dev, s, op, type, true);
            }
        }
    }
    note_worst(test, worst);
}

// Infinity and NaN become NaN, on both devices.
TEST(fp8_cast_nonfinite_gpu) {
    Device dev = test_device(true);
    Array<bf16> inp = array_random<bf16>(&dev, 16 * 8, 5, 1.0f);
    inp.host[3] = INFINITY, inp.host[50] = NAN, inp.host[77] = -INFINITY;
    float values[16 * 8];
    memcpy(values, inp.host, sizeof(values));
    array_set(&dev, &inp, values);
    Fp8 f = scales_open(&dev, 3);
    uint8_t *codes = (uint8_t*)device_alloc(&dev, 16 * 8), got[16 * 8];
    fp8_begin(&dev, &f);
    f.current = false;
    for (Fp8Type type : {FP8_E4M3, FP8_E5M2}) {
        const Fp8Operand to = {codes, nullptr, 0, type};
        fp8_cast<bf16>(&dev, &f, &to, FP8_COPY, inp.device, nullptr, (float*)nullptr, nullptr, 16, 8, false);
        copy_to_host(&dev, got, codes, sizeof(got));
        for (int i = 0; i < 16 * 8; i++) {
            expect(isnan(fp8_decode(got[i], type)) == !isfinite(values[i]), "%g becomes code %d", values[i], got[i]);
        }
    }
}

// A product of random codes, with a bias or added to what is there, against the plain C version. Hopper's tensor cores
// cut the terms of an instruction (32 of them, and the sum so far) off at 13 bits below the largest; with `fast` the
// sum so far is all of it, otherwise at most 128 terms. Terms are at most 1, so 2 sqrt(n) is beyond a sum of n.
template <typename D>
void check_product(Test* test, double* worst, const Device* dev, int64_t rows, int64_t cols, int64_t depth,
                   Fp8Type type_a, bool fast, bool with_bias, bool accumulate) {
    Device cpu;
    device_open(&cpu, false, 0);
    Array<bf16> a = array_random<bf16>(dev, rows * depth, 7, 1.0f), b = array_random<bf16>(dev, cols * depth, 8, 1.0f);
    Array<D> out = array_of<D>(dev, rows * cols, nullptr), bias = array_random<D>(dev, cols, 9, 1.0f);
    Fp8 f = scales_open(dev, 3), g = scales_open(&cpu, 3);
    uint8_t* codes[2] = {(uint8_t*)device_alloc(dev, rows * depth), (uint8_t*)device_alloc(dev, cols * depth)};
    uint8_t* own[2] = {(uint8_t*)malloc(rows * depth), (uint8_t*)malloc(cols * depth)};
    fp8_begin(dev, &f), fp8_begin(&cpu, &g);
    const Fp8Operand to[] = {{codes[0], nullptr, 2, type_a}, {codes[1], nullptr, 1, FP8_E4M3}};
    const Fp8Operand here[] = {{own[0], nullptr, 2, type_a}, {own[1], nullptr, 1, FP8_E4M3}};
    fp8_cast<bf16>(dev, &f, &to[0], FP8_COPY, a.device, nullptr, (float*)nullptr, nullptr, rows, (int)depth, false);
    fp8_cast<bf16>(dev, &f, &to[1], FP8_COPY, b.device, nullptr, (float*)nullptr, nullptr, cols, (int)depth, false);
    fp8_cast<float>(&cpu, &g, &here[0], FP8_COPY, a.host, nullptr, (float*)nullptr, nullptr, rows, (int)depth, false);
    fp8_cast<float>(&cpu, &g, &here[1], FP8_COPY, b.host, nullptr, (float*)nullptr, nullptr, cols, (int)depth, false);
    float *want = random_floats(rows * cols, 10, 1.0f), *before = random_floats(rows * cols, 10, 1.0f);
    for (int64_t i = 0; i < rows * cols; i++) want[i] = before[i] = to_float(from_float<D>(before[i]));
    fp8_product<float>(&cpu, &g, want, own[0], 2, type_a, own[1], 1, FP8_E4M3, with_bias ? bias.host : nullptr, rows,
                       cols, depth, fast, accumulate);
    // What is added to bf16 may be rounded before.
    double added = 0;
    for (int64_t i = 0; i < rows * cols && accumulate; i++) added = fmax(added, fabs((double)want[i] - before[i]));
    const double run = fast || depth < 128 ? (double)depth : 128;
    const double cut = 2 * sqrt(run) / (1 << 13) * (run / 32 + 1) * sqrt((double)depth / run);
    check_output<D>(test, worst, dev, "product", &out, accumulate ? before : nullptr, want,
                    cut + product_bound(depth, 1.0) + epsilon<D>() * added, [&] {
                        fp8_product<D>(dev, &f, out.device, codes[0], 2, type_a, codes[1], 1, FP8_E4M3,
                                       with_bias ? bias.device : nullptr, rows, cols, depth, fast, accumulate);
                    });
    array_free(dev, &a), array_free(dev, &b), array_free(dev, &out), array_free(dev, &bias);
    for (int i = 0; i < 2; i++) device_free(dev, codes[i]), free(own[i]);
    device_free(dev, f.inverse), free(g.inverse), free(want), free(before);
}

TEST(fp8_product_gpu) {
    Device dev = test_device(true);
    double worst = 0;
    check_product<bf16>(test, &worst, &dev, 256, 1152, 384, FP8_E4M3, true, true, false);
    check_product<bf16>(test, &worst, &dev, 48, 64, 256, FP8_E4M3, true, true, false);
    check_product<bf16>(test, &worst, &dev, 256, 384, 1536, FP8_E5M2, false, false, false);
    check_product<bf16>(test, &worst, &dev, 384, 384, 2048, FP8_E5M2, false, false, true);
    check_product<float>(test, &worst, &dev, 384, 1536, 2048, FP8_E5M2, false, false, true);
    check_product<float>(test, &worst, &dev, 128, 64, 16, FP8_E4M3, false, false, false);
    note_worst(test, worst);
}

// Runs of ./train.

constexpr const char* RUN =
    "--layers 2 --channels 64 --heads 1 --seq 32 --batch 4 --tokens-per-step 256 --steps 30 --lr 3e-3 "
    "--val-every 30 --val-tokens 512 --sample-every 0 --warmup 2";

// The loss of the last step of a run with these options, into the folder WORK/NAME.
double last_loss(Test* test, bool gpu, const char* work, const char* name, const char* options) {
    static Losses losses;
    Child child = new_child();
    child.gpu = gpu;
    start(&child, "%s --data %s/text.txt --run %s/%s --device %s %s", RUN, work, work, name, gpu ? "gpu" : "cpu",
          options);
    finish(&child);
    expect_code(child, 0);
    read_losses(test, joined(work, name), &losses);
    expect(losses.last == 30, "%s: %d steps", name, losses.last);
    return losses.last == 30 ? atof(losses.text[30]) : NAN;
}

// fp8 loses little on a run this short, and what is recomputed instead of kept changes no bit.
void check_runs(Test* test, bool gpu) {
    const char* work = work_folder();
    const double other = last_loss(test, gpu, work, "other", ""),
                 fp8 = last_loss(test, gpu, work, "fp8", "--matmul fp8");
    expect(fabs(fp8 - other) < 0.05 && fp8 != other, "a loss of %.4f, without fp8 %.4f", fp8, other);
    note(test, "loss %.4f, without fp8 %.4f", fp8, other);
    for (const char* recompute : {"gelu", "block"}) {
        char options[64];
        snprintf(options, sizeof(options), "--matmul fp8 --recompute %s", recompute);
        expect(last_loss(test, gpu, work, recompute, options) == fp8, "--recompute %s changes the loss", recompute);
        char path[64];
        snprintf(path, sizeof(path), "%s/step_00000030", recompute);
        for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
            expect_equal_files(test, joined(work, "fp8/step_00000030"), joined(work, path), file);
        }
    }
    const double head = last_loss(test, gpu, work, "head", "--matmul fp8 --head fp8 --fp8-grads e4m3");
    expect(fabs(head - other) < 0.05 && head != fp8, "a loss of %.4f with the head, without fp8 %.4f", head, other);
}

TEST(fp8_runs) {
    check_runs(test, false);
}

TEST(fp8_runs_gpu) {
    check_runs(test, true);
}

FOLDER_TEST(fp8_bad_options) {
    run_train(rows,
              "%s --data %s/text.txt --run %s/a --device cpu --matmul fp8 --seq 20 --batch 1 --tokens-per-step 20", RUN,
              work, work);
    expect_error(test, &rows, "20 rows", "are 20 rows", "--seq 16");
    run_train(head, "%s --data %s/text.txt --run %s/b --device cpu --head fp8", RUN, work, work);
    expect_error(test, &head, "--head fp8 alone", "--head fp8 goes with --matmul fp8", "type both");
}

}  // namespace
