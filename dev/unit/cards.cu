// Tests of what kernels do on other cards than this one. A kernel's way is chosen by the device's compute capability,
// multiprocessors and shared memory, which can be said to be another card's. sample.cu, classifier.cu and
// newton_schulz.cu have such cases among their own.
#include "../../kernels/attention.cuh"
#include "apart.h"
#include "kernels.h"

namespace {

// Heads of 128 are refused in the plan where a block has too little shared memory for them, with the way out.
TEST(cards_wide_heads_refused) {
    char text[512];
    for (int NH : {6, 3}) {  // of 64 and of 128 channels
        const auto ask = [NH] {
            Device dev = {};
            dev.gpu = true, dev.compute = 89, dev.sm_count = 128, dev.shared_memory = 99 << 10;
            if (attention_backward_scratch_bytes(&dev, 4, 1024, 384, NH) <= 0) abort();
        };
        const int code = run_apart(ask, text, sizeof(text));
        expect(NH == 6 ? code == 0 : code == 2 && strstr(text, "heads of 128") && strstr(text, "--heads 6"),
               "%d heads: %d, %s", NH, code, text);
    }
}

#ifdef __CUDACC__
template <typename X>
void read_back(Array<X>* array) {
    X* values = (X*)malloc(array->n * sizeof(X));
    copy_to_host(array->dev, values, array->device, array->n * (int64_t)sizeof(X));
    for (int64_t i = 0; i < array->n; i++) array->host[i] = to_float(values[i]);
    free(values);
}

// Attention in bf16: what it is given and what comes out.
struct Attention {
    int B, T, HS, NH;
    Array<bf16> qkv, dout, out, dqkv;
    Array<float> lse;
};

Attention attention_inputs(const Device* dev, int B, int T, int HS, int NH) {
    const int64_t n = (int64_t)B * T * NH * HS, rows = (int64_t)B * NH * T;
    return {B,
            T,
            HS,
            NH,
            array_random<bf16>(dev, 3 * n, 1, 1.5f),
            array_random<bf16>(dev, n, 2, 1.0f),
            array_of<bf16>(dev, n, nullptr),
            array_of<bf16>(dev, 3 * n, nullptr),
            array_of<float>(dev, rows, nullptr)};
}

// Both passes as `card` does them; the backward pass goes on from the out and lse of `from`.
void attention_on(const Device* card, Attention* a, const Attention* from) {
    const int C = a->NH * a->HS;
    const int64_t bytes = attention_backward_scratch_bytes(card, a->B, a->T, C, a->NH);
    void* scratch = device_alloc(card, bytes);
    check(cudaMemsetAsync(scratch, 0xff, bytes, card->stream));
    attention_forward<bf16>(card, a->out.device, a->lse.device, a->qkv.device, a->B, a->T, C, a->NH);
    attention_backward<bf16>(card, a->dqkv.device, scratch, a->dout.device, a->qkv.device, from->out.device,
                             from->lse.device, a->B, a->T, C, a->NH);
    read_back(&a->out), read_back(&a->dqkv), read_back(&a->lse);
    device_free(card, scratch);
}

// The plain C version's, from the out and lse of `from`.
void attention_plain(Attention* a, const Attention* from) {
    const int C = a->NH * a->HS;
    attention_forward_cpu(a->out.host, a->lse.host, a->qkv.host, a->B, a->T, C, a->NH);
    attention_backward_cpu(a->dqkv.host, a->dout.host, a->qkv.host, from->out.host, from->lse.host, a->B, a->T, C,
                           a->NH);
}

// The largest error of a row, which is a head of a token, as attention.cu bounds it: two roundings to bf16, of the row
// and a tenth of all rows' mean. values: (tokens, parts, NH, HS). Where all rows are zero, `least` is their mean.
double worst_row(const float* got, const float* want, int64_t tokens, int parts, int part, int NH, int HS,
                 double least) {
    const auto square = [&](int64_t row, bool error) {
        double sum = 0.0;
        const int64_t at = ((row / NH * parts + part) * NH + row % NH) * HS;
        for (int64_t i = at; i < at + HS; i++) sum += pow(error ? (double)got[i] - want[i] : (double)want[i], 2);
        return sum;
    };
    double total = 0.0, worst = 0.0;
    for (int64_t row = 0; row < tokens * NH; row++) total += square(row, false);
    const double common = 0.1 * fmax(sqrt(total / (double)(tokens * NH)), least);
    for (int64_t row = 0; row < tokens * NH; row++) {
        const double own = sqrt(square(row, true)) * 128 / (sqrt(square(row, false)) + common);
        if (!(own <= worst)) worst = own;
        if (isnan(own)) break;
    }
    return worst;
}

// `bounds`: how many of them the two may be apart.
void attention_compare(Test* test, double* worst, const char* what, const Attention* got, const Attention* want,
                       double bounds) {
    const int64_t tokens = (int64_t)got->B * got->T;
    const char* const names[] = {"dq", "dk", "dv", "out", "lse"};
    for (int part = 0; part < 5; part++) {
        // The gradients of the queries and keys of one token are zero.
        const double least = got->T == 1 && part < 2 ? sqrt(got->HS / 3.0) : 0.0;
        double own = 0.0;
        if (part < 3)
            own = worst_row(got->dqkv.host, want->dqkv.host, tokens, 3, part, got->NH, got->HS, least);
        else if (part == 3)
            own = worst_row(got->out.host, want->out.host, tokens, 1, 0, got->NH, got->HS, least);
        for (int64_t i = 0; part == 4 && i < got->lse.n && !isnan(own); i++) {
            const double off = fabs((double)got->lse.host[i] - want->lse.host[i]) /
                               (EPS32 * (got->T + got->HS) * (1.0 + fabs(want->lse.host[i])));
            if (!(off <= own)) own = off;
        }
        expect(own <= bounds, "%s, T %d, heads of %d: %s is off by %.3g times the bound", what, got->T, got->HS,
               names[part], own);
        if (!(own <= *worst)) *worst = own;
    }
}

// Attention by mma.sync, as an A100 and a B200 do it, against the plain C version.
OPERATOR_TEST(cards_attention_gpu) {
    for (int compute : {80, 100}) {
        Device card = dev;
        card.compute = compute;
        for (int HS : {64, 128}) {
            if (HS == 128 && dev.shared_memory < ATTENTION_WIDE_BYTES) continue;
            // They differ in the backward pass of heads of 128 alone.
            if (compute == 100 && (HS == 64 || dev.shared_memory < BackwardShape<128, 64>::SHARED)) continue;
            for (int T : {1, 37, 129, 200, 320, 700}) {
                Attention got = attention_inputs(&dev, 2, T, HS, 3), want = attention_inputs(&dev, 2, T, HS, 3);
                attention_on(&card, &got, &got);
                attention_plain(&want, &got);
                attention_compare(test, &worst, compute == 80 ? "as sm_80" : "as sm_100", &got, &want, 1.0);
            }
        }
    }
}

// Sequences so long that a group of heads is one head, by this card's way and by mma.sync: one checks the other.
OPERATOR_TEST(cards_attention_long_gpu) {
    Device card = dev;
    card.compute = 80;
    for (int HS : {64, 128}) {
        if (HS == 128 && dev.shared_memory < ATTENTION_WIDE_BYTES) continue;
        const int T = HS == 64 ? 33001 : 17003;
        Attention own = attention_inputs(&dev, 1, T, HS, 2), other = attention_inputs(&dev, 1, T, HS, 2);
        attention_on(&dev, &own, &own);
        attention_on(&card, &other, &own);
        attention_compare(test, &worst, "this card", &own, &other, 2.0);
    }
}
#endif

}  // namespace
