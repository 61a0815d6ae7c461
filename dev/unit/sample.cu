// Unit tests of sampling: the linear layer of few rows, attention over a cache, the draw, and texts from a small model
// with random weights. On the CPU the cache must not change one bit of a logit; on both devices a text must not depend
// on the cache or on what is sampled beside it.
#include <algorithm>
#include <functional>

#include "../../kernels/decode.cuh"
#include "../../kernels/embedding.cuh"
#include "kernels.h"

namespace {

const DecodeShape SMALL = {2, 128, 2, 300, 384, 24};

int64_t tensor_size(const DecodeShape* s, int i) {
    const int64_t C = s->C;
    const int64_t block[DECODE_TENSORS] = {C, C, 3 * C * C, 3 * C, C * C, C, C, C, 4 * C * C, 4 * C, 4 * C * C, C};
    const int blocks = s->L * DECODE_TENSORS;
    return i == 0 ? s->Vp * C : i == 1 ? s->T * C : i < 2 + blocks ? block[(i - 2) % DECODE_TENSORS] : C;
}

// A model's tensors in host memory, with values that bf16 holds where `narrow`.
struct Weights {
    int count;
    std::vector<int64_t> size;
    std::vector<float*> values;
    Room room{nullptr};

    Weights(const DecodeShape* s, bool narrow, uint64_t seed) : count(s->L * DECODE_TENSORS + 4) {
        for (int i = 0; i < count; i++) {
            const int which = (i - 2) % DECODE_TENSORS;
            const bool last = i >= count - 2;
            const bool scale = i == count - 2 || (i >= 2 && !last && (which == LN1W || which == LN2W));
            const int64_t n = tensor_size(s, i);
            float* x = room.host<float>(n);
            for (int64_t j = 0; j < n; j++) {
                // Larger than a model's initial weights, so that texts depend on all of their tokens.
                x[j] = (i < 2 ? 0.3f : 0.2f) * test_uniform(seed + i, j) + (scale ? 1.0f : 0.0f);
                if (narrow) x[j] = to_float(from_float<bf16>(x[j]));
            }
            size.push_back(n), values.push_back(x);
        }
    }
};

// The logits (Vp) after the last of T tokens by the forward pass that trains.
void plain_logits(float* logits, const DecodeShape* s, const Weights* w, const int* tokens, int T) {
    const int64_t C = s->C;
    Room room(nullptr);
    auto array = [&](int64_t n) { return room.host<float>(n); };
    float *residual = array(T * C), *normed = array(T * C), *qkv = array(T * 3 * C), *attention = array(T * C);
    float *branch = array(T * C), *fc = array(T * 4 * C), *gelu = array(T * 4 * C), *lse = array(T * s->NH);
    float *mean = array(T), *rstd = array(T);
    embedding_forward_cpu(residual, tokens, w->values[0], w->values[1], 1, T, s->C);
    float* const* p = &w->values[2];
    layernorm_forward_cpu(normed, mean, rstd, residual, p[LN1W], p[LN1B], T, s->C);
    for (int l = 0; l < s->L; l++, p += DECODE_TENSORS) {
        matmul_forward_cpu(qkv, nullptr, normed, p[QKVW], p[QKVB], T, s->C, 3 * s->C);
        attention_forward_cpu(attention, lse, qkv, 1, T, s->C, s->NH);
        matmul_forward_cpu(branch, nullptr, attention, p[PROJW], p[PROJB], T, s->C, s->C);
        residual_layernorm_forward_cpu(residual, normed, mean, rstd, residual, branch, p[LN2W], p[LN2B], T, s->C);
        matmul_forward_cpu(gelu, fc, normed, p[FCW], p[FCB], T, s->C, 4 * s->C);
        matmul_forward_cpu(branch, nullptr, gelu, p[FCPROJW], p[FCPROJB], T, 4 * s->C, s->C);
        residual_layernorm_forward_cpu(residual, normed, mean, rstd, residual, branch, p[DECODE_TENSORS],
                                       p[DECODE_TENSORS + 1], T, s->C);
    }
    matmul_forward_cpu(logits, nullptr, normed + (T - 1) * C, w->values[0], nullptr, 1, s->C, s->Vp);
}

// A decoder over weights on a device, and the logits that it had after each step. In parts, only the last two parts of
// the weights that were asked for hold their values.
struct Sampler {
    const Device* dev;
    const DecodeShape* shape;
    const Weights* weights;
    Room room;
    Decoder decoder;
    std::vector<const void*> tensors;
    float* logits;  // (length, S, Vp) of all steps, or NULL
    int steps = 0;
    int stop_at = -1;  // ends the text that draws this token; -1: none
    int last[2] = {-1, -1};

    Sampler(const Device* dev, const DecodeShape* s, const Weights* w, bool fp32, int S, const DrawOptions* draw,
            int64_t keep_steps, bool in_parts = false)
        : dev(dev), shape(s), weights(w), room(dev) {
        for (int i = 0; i < w->count; i++)
            tensors.push_back(fp32 ? (void*)room.to_device(w->values[i], w->size[i]) : rounded(w, i));
        logits = keep_steps ? room.host<float>(keep_steps * S * s->Vp) : nullptr;
        const DecodeCalls calls = {this, in_parts ? need : nullptr, next, nullptr};
        decode_open(&decoder, dev, s, fp32, tensors.data(), S, draw, &calls, nullptr);
    }

    ~Sampler() { decode_close(&decoder); }

    bf16* rounded(const Weights* w, int i) {
        Room staged(dev);
        bf16* values = staged.host<bf16>(w->size[i]);
        for (int64_t j = 0; j < w->size[i]; j++) values[j] = from_float<bf16>(w->values[i][j]);
        return room.to_device(values, w->size[i]);
    }

    static void need(void* context, int part) {
        Sampler* s = (Sampler*)context;
        if (part != s->last[1]) s->last[0] = s->last[1], s->last[1] = part;
        for (int i = 0; i < s->weights->count; i++) {
            const int L = s->shape->L, block = (i - 2) / DECODE_TENSORS, own = i < 2 ? L : block < L ? block : L + 1;
            const std::vector<float> none(s->weights->size[i], NAN);
            const bool there = own == s->last[0] || own == s->last[1];
            copy_to_device(s->dev, (void*)s->tensors[i], there ? s->weights->values[i] : none.data(), none.size() * 4);
        }
    }

    static bool next(void* context, int* tokens, int count) {
        Sampler* sampler = (Sampler*)context;
        const Decoder* d = &sampler->decoder;
        const int64_t n = (int64_t)count * d->shape.Vp;
        if (sampler->logits) copy_to_host(sampler->dev, sampler->logits + sampler->steps * n, d->logits, n * 4);
        sampler->steps++;
        for (int i = 0; i < count; i++)
            if (tokens[i] == sampler->stop_at) tokens[i] = DECODE_END;
        return true;
    }
};

constexpr int TEXT = 200;  // room of a test's text

DecodeText text_begin(Room* room, int prompt, int sample) {
    DecodeText text = {room->host<int>(TEXT), prompt, sample, 0, 0, false};
    for (int i = 0; i < prompt; i++) text.tokens[i] = (int)((1 + test_uniform(40 + sample, i)) * 150);
    return text;
}

// The first place where two texts differ, -1 where they do not.
int text_difference(const DecodeText* a, const DecodeText* b) {
    for (int i = 0; i < a->used && i < b->used; i++)
        if (a->tokens[i] != b->tokens[i]) return i;
    return a->used == b->used ? -1 : (int)(a->used < b->used ? a->used : b->used);
}

// Returns where the window of the token after `used` tokens begins, by the rule in decode.cuh, for a text with this
// prompt.
int64_t window_begin(int64_t prompt, int64_t used, int T) {
    int64_t begin = 0;
    for (int64_t n = prompt; n <= used; n++)
        if (n - begin > T) begin = n - (T - T / 2);
    return begin;
}

// Prompts of one token, of several, and longer than the context; the windows slide twice.
TEST(sampling_cache_changes_no_bit) {
    constexpr int STEPS = 40;
    Device dev = test_device(false);
    const Weights w(&SMALL, false, 7);
    const int prompts[] = {1, 5, 24, 25, 90};
    DecodeText texts[5];
    DrawOptions draw = {0.9, 20, 3};
    Sampler sampler(&dev, &SMALL, &w, true, 5, &draw, STEPS);
    for (int i = 0; i < 5; i++) texts[i] = text_begin(&sampler.room, prompts[i], i);
    decode_texts(&sampler.decoder, texts, 5, STEPS);
    float* want = sampler.room.host<float>(SMALL.Vp);
    for (int i = 0; i < 5; i++) {
        expect(texts[i].used == prompts[i] + STEPS, "text %d has %lld tokens", i, (long long)texts[i].used);
        for (int step = 0; step < STEPS; step++) {
            const int64_t used = prompts[i] + step, begin = window_begin(prompts[i], used, SMALL.T);
            plain_logits(want, &SMALL, &w, texts[i].tokens + begin, (int)(used - begin));
            const float* got = sampler.logits + ((int64_t)step * 5 + i) * SMALL.Vp;
            expect(memcmp(got, want, SMALL.V * 4) == 0, "text %d, step %d: other logits than without a cache", i, step);
            const int token = draw_row_cpu(want, SMALL.V, &draw, i, (int)used);
            expect(token == texts[i].tokens[used], "text %d, step %d: token %d, want %d", i, step,
                   texts[i].tokens[used], token);
            if (test->failures) break;
        }
    }
}

// Several tests ask this on either device: texts do not depend on the cache (each token by a new decoder that computes
// the window from nothing), nor on the texts beside them, nor on weights that are decoded or gathered a part at a time,
// and end where they are told to.
void expect_same_texts(Test* test, const Device* dev, const DecodeShape* s, bool fp32, double temperature) {
    constexpr int STEPS = 30, TEXTS = 3;
    Weights w(s, true, 11);
    DrawOptions draw = {temperature, 10, 5};
    DecodeText together[TEXTS];
    for (int i = 0; i < TEXTS; i++) together[i] = text_begin(&w.room, 1 + 9 * i, i);
    {
        Sampler sampler(dev, s, &w, fp32, TEXTS, &draw, 0);
        decode_texts(&sampler.decoder, together, TEXTS, STEPS);
    }
    Sampler sampler(dev, s, &w, fp32, 1, &draw, 0), in_parts(dev, s, &w, fp32, 1, &draw, 0, fp32);
    for (int i = 0; i < TEXTS; i++) {
        DecodeText alone = text_begin(&w.room, 1 + 9 * i, i), uncached = text_begin(&w.room, 1 + 9 * i, i);
        DecodeText of_parts = text_begin(&w.room, 1 + 9 * i, i);
        decode_texts(&sampler.decoder, &alone, 1, STEPS), decode_texts(&in_parts.decoder, &of_parts, 1, STEPS);
        int at = text_difference(&alone, &together[i]);
        expect(at < 0 && alone.used == 1 + 9 * i + STEPS, "text %d alone and beside others differ from token %d on", i,
               at);
        at = text_difference(&of_parts, &together[i]);
        expect(at < 0, "text %d with weights in parts differs from token %d on", i, at);
        for (int step = 0; step < STEPS; step++) {
            uncached.cached = 0;
            decode_texts(&sampler.decoder, &uncached, 1, 1);
        }
        at = text_difference(&uncached, &together[i]);
        expect(at < 0, "text %d with and without a cache differ from token %d on", i, at);
        DecodeText ended = text_begin(&w.room, 1 + 9 * i, i);
        sampler.stop_at = together[i].tokens[9 * i + 5];
        decode_texts(&sampler.decoder, &ended, 1, STEPS);
        sampler.stop_at = -1;
        expect(ended.ended && ended.used <= 9 * i + 5, "a text did not end: %lld tokens", (long long)ended.used);
    }
}

// Checks how often each token is drawn, against its probability, within five standard deviations.
void expect_draws(Test* test, const float* logits, int V, double temperature, int64_t k, const double* want) {
    constexpr int DRAWS = 40000;
    int count[16] = {};
    DrawOptions options = {temperature, k, 9};
    for (int i = 0; i < DRAWS; i++) {
        const int token = draw_row_cpu(logits, V, &options, i % 7, i);
        expect(token >= 0 && token < V, "token %d", token);
        count[token & 15]++;
    }
    for (int t = 0; t < V; t++) {
        const double deviation = sqrt(want[t] * (1 - want[t]) / DRAWS);
        expect(fabs((double)count[t] / DRAWS - want[t]) <= 5 * deviation,
               "token %d at temperature %g, top %lld: %g, want %g", t, temperature, (long long)k,
               (double)count[t] / DRAWS, want[t]);
    }
}

TEST(sampling_draws_the_softmax) {
    const float logits[] = {logf(2), logf(1), logf(4), logf(1), logf(8)};
    const double all[] = {2 / 16.0, 1 / 16.0, 4 / 16.0, 1 / 16.0, 8 / 16.0}, top2[] = {0, 0, 1 / 3.0, 0, 2 / 3.0};
    const double cold[] = {4 / 86.0, 1 / 86.0, 16 / 86.0, 1 / 86.0, 64 / 86.0}, best[] = {0, 0, 0, 0, 1};
    expect_draws(test, logits, 5, 1.0, 0, all);
    expect_draws(test, logits, 5, 1.0, 99, all);
    expect_draws(test, logits, 5, 1.0, 2, top2);
    expect_draws(test, logits, 5, 0.5, 0, cold);
    expect_draws(test, logits, 5, 0.0, 0, best);
    expect_draws(test, logits, 5, 2.0, 1, best);
    const float tied[] = {1, 3, 3, 2}, far[] = {-1e30f, 1e30f, 0}, bad[] = {0, NAN, 1}, endless[] = {0, INFINITY, 1};
    const float cold_logits[] = {-3, -1, -2};
    DrawOptions likeliest = {0, 0, 1}, usual = {0.7, 0, 1}, one = {0.7, 1, 1}, coldest = {1e-310, 0, 1};
    expect(draw_row_cpu(tied, 4, &likeliest, 0, 0) == 1, "of equal logits the first is the likeliest");
    expect(draw_row_cpu(tied, 4, &one, 0, 0) == 1, "of equal logits the first is the likeliest");
    expect(draw_row_cpu(far, 3, &usual, 0, 0) == 1, "logits far apart");
    expect(draw_row_cpu(cold_logits, 3, &coldest, 0, 0) == 1, "a temperature by which logits would overflow");
    expect(draw_row_cpu(bad, 3, &usual, 0, 0) == DRAW_NOT_FINITE, "NaN");
    expect(draw_row_cpu(endless, 3, &likeliest, 0, 0) == DRAW_NOT_FINITE, "infinity");
}

// Sampling keeps what is at least the k-th largest, which sorting gives here.
TEST(sampling_top_k) {
    constexpr int V = 5000;
    float *logits = random_floats(V, 3, 8), *sorted = floats(V);
    for (int v = 0; v < V; v += 7) logits[v] = (float)(int)logits[v];  // ties, and both zeros
    memcpy(sorted, logits, V * 4);
    std::sort(sorted, sorted + V, std::greater<>());
    for (int k : {1, 2, 50, 700, 2500, V - 1}) {
        const uint32_t got = draw_threshold_cpu(logits, V, k);
        int64_t above = 0, among = 0;
        for (int v = 0; v < V; v++) above += draw_key(logits[v]) > got, among += draw_key(logits[v]) >= got;
        expect(above < k && among >= k, "%d likeliest: %lld above and %lld from %x on", k, (long long)above,
               (long long)among, got);
        expect(got == draw_key(sorted[k - 1]) || sorted[k - 1] == 0, "%d likeliest", k);
    }
    expect(draw_threshold_cpu(logits, V, 0) == 0 && draw_threshold_cpu(logits, V, V) == 0, "all");
}

template <typename X>
void matmul_rows_case(Test* test, double* worst, const Device* dev, int N, int C, int OC, bool gelu) {
    Array<X> inp(dev, (int64_t)N * C, 1, 1), weight(dev, (int64_t)OC * C, 2, 1), bias(dev, OC, 3, 1),
        out(dev, (int64_t)N * OC);
    Array<float> logits(dev, (int64_t)N * OC);
    Room room(dev);
    float *want = room.host<float>((int64_t)N * OC), *fc = room.host<float>((int64_t)N * OC);
    matmul_forward_cpu(want, gelu ? fc : nullptr, inp.host, weight.host, bias.host, N, C, OC);
    check_output(test, worst, "rows", &out, nullptr, want, product_bound(C, 1),
                 [&] { matmul_rows<X, X>(dev, out.device, inp.device, weight.device, bias.device, gelu, N, C, OC); });
    matmul_forward_cpu(want, nullptr, inp.host, weight.host, nullptr, N, C, OC);
    check_output(test, worst, "logits", &logits, nullptr, want, product_bound(C, 1), [&] {
        matmul_rows<X, float>(dev, logits.device, inp.device, weight.device, nullptr, false, N, C, OC);
    });
}

OPERATOR_TEST(sampling_matmul_rows_gpu) {
    const int shapes[][2] = {{64, 64}, {768, 2304}, {3072, 768}, {1600, 6400}, {192, 384}};
    for (const auto& shape : shapes) {
        for (int N : {1, 2, 8, 9, 31, 33, 64, 65}) {
            matmul_rows_case<bf16>(test, &worst, &dev, N, shape[0], shape[1], N % 2 == 0);
            matmul_rows_case<float>(test, &worst, &dev, N, shape[0], shape[1], N % 2 == 0);
        }
    }
    dev.sm_count = 1;  // many rows and outputs a block, as for a head
    for (int N : {9, 31, 33, 64, 65}) {
        matmul_rows_case<bf16>(test, &worst, &dev, N, 64, 64, N % 2 == 0);
        matmul_rows_case<bf16>(test, &worst, &dev, N, 1600, 448, N % 2 == 0);
    }
}

// Row n of N has the bits that it has alone, by whichever kernel a GPU with so many multiprocessors computes N rows.
template <typename X>
void matmul_rows_bits(Test* test, Device dev, int C, int OC) {
    const int most = 80;
    Array<X> inp(&dev, (int64_t)most * C, 1, 1), weight(&dev, (int64_t)OC * C, 2, 1);
    Array<float> alone(&dev, (int64_t)most * OC), rows(&dev, alone.n);
    const auto run = [&](float* out, int first, int N) {
        matmul_rows<X, float>(&dev, out + (int64_t)first * OC, inp.device + (int64_t)first * C, weight.device, nullptr,
                              false, N, C, OC);
    };
    for (int n = 0; n < most; n++) run(alone.device, n, 1);
    copy_to_host(&dev, alone.host, alone.device, alone.n * 4);
    for (int sm_count : {1, 1 << 20}) {
        dev.sm_count = sm_count;
        for (int N : {3, 8, 9, 16, 17, 64, 80}) {
            run(rows.device, 0, N);
            copy_to_host(&dev, rows.host, rows.device, (int64_t)N * OC * 4);
            expect(memcmp(rows.host, alone.host, (int64_t)N * OC * 4) == 0,
                   "%d x %d, %d rows on %d multiprocessors: other bits than alone", OC, C, N, sm_count);
        }
    }
}

TEST(sampling_rows_bits_gpu) {
    const Device dev = test_device(true);
    const int shapes[][2] = {{64, 64}, {192, 384}, {1600, 448}, {4096, 128}};
    for (const auto& shape : shapes) {
        matmul_rows_bits<bf16>(test, dev, shape[0], shape[1]);
        matmul_rows_bits<float>(test, dev, shape[0], shape[1]);
    }
}

// A layernorm inside the linear layer, of few rows, gives the bits of one in a kernel of its own.
TEST(sampling_norm_bits_gpu) {
    constexpr int OC = 192;
    const Device dev = test_device(true);
    Device alone = dev;
    alone.sm_count = 0;
    for (int C : {64, 768, 1024, 1088, 1600, 2048, 2112}) {
        for (int N : {1, 3, 8, 9}) {
            const int64_t n = (int64_t)N * C;
            Array<bf16> inp(&dev, n, 1, 3), branch(&dev, n, 2, 1), weight(&dev, (int64_t)OC * C, 3, 1);
            Array<bf16> scale(&dev, C, 4, 1), shift(&dev, C, 5, 1), bias(&dev, OC, 6, 1), normed(&dev, n);
            Array<bf16> sum[2] = {{&dev, n}, {&dev, n}}, out[2] = {{&dev, N * OC}, {&dev, N * OC}};
            Array<float> mean(&dev, N), rstd(&dev, N);
            for (const bf16* adds : {(const bf16*)nullptr, (const bf16*)branch.device}) {
                normed.set(nullptr);
                const auto before = normed.bytes();
                for (int k : {0, 1}) {
                    matmul_rows<bf16, bf16>(
                        k ? &alone : &dev, out[k].device, inp.device, weight.device, bias.device, N == 3, N, C, OC,
                        {adds, scale.device, shift.device, sum[k].device, normed.device, mean.device, rstd.device});
                    const bool fused = k == 0 && N <= 8 && C <= 2048;
                    expect((normed.bytes() == before) == fused, "%d rows of %d: a kernel of its own %s", N, C,
                           fused ? "normalised" : "did not normalise");
                }
                expect(out[0].bytes() == out[1].bytes(), "%d rows of %d: other bits%s", N, C, adds ? " of a sum" : "");
                expect(!adds || sum[0].bytes() == sum[1].bytes(), "%d rows of %d: other sums", N, C);
            }
        }
    }
}

// A cache of more than 2^31 elements: the last sequence, and the last token of it, give what they give in a cache of
// their own. All but the row's own key and value are the same number.
TEST(sampling_cache_beyond_2_31_gpu) {
    constexpr int S = 48, T = 30000, NH = 12, HS = 64, C = NH * HS;
    Device dev = test_device(true);
    if (dev.memory < (int64_t)12 << 30) skip("needs 12 GiB of GPU memory");
    Array<bf16> qkv(&dev, 3 * C, 5, 1);
    static bf16 bits[2][C];
    for (int large : {0, 1}) {
        const int sequences = large ? S : 1, sequence = sequences - 1, position = T - 1;
        Room room(&dev);
        const AttentionCache at = {sequences, T, room.to_device(&sequence, 1), room.to_device(&position, 1)};
        const int64_t bytes = attention_cache_elements(sequences, T, C) * (int64_t)sizeof(bf16);
        bf16 *cache = room.device<bf16>(bytes / (int64_t)sizeof(bf16)), *out = room.device<bf16>(C);
        check(cudaMemsetAsync(cache, 0x3d, (size_t)bytes, dev.stream));
        check(cudaMemsetAsync(out, 0xff, C * sizeof(bf16), dev.stream));
        attention_decode<bf16>(&dev, out, qkv.device, cache, &at, 1, C, NH, true);
        copy_to_host(&dev, bits[large], out, C * sizeof(bf16));
        // The row's value is where it belongs: the last of the values.
        bf16 last;
        copy_to_host(&dev, &last, cache + bytes / (int64_t)sizeof(bf16) - 1, sizeof(last));
        expect(to_float(last) == qkv.host[3 * C - 1], "the last value is %g, not %g", to_float(last),
               qkv.host[3 * C - 1]);
    }
    for (int c = 0; c < C; c++) expect(isfinite(to_float(bits[0][c])), "value %d is not finite", c);
    expect(memcmp(bits[0], bits[1], C * sizeof(bf16)) == 0, "the row's bits depend on the size of the cache");
}

// Scores of order 1 to 8 standard deviations; out is a mean of values below 1.
// T: at least 3, so that rows of one sequence have places of their own.
template <typename X>
void attention_decode_case(Test* test, double* worst, const Device* dev, int NH, int HS, int T) {
    const int S = 3, R = 5, C = NH * HS;
    const int sequences[R] = {2, 0, 1, 1, 0}, positions[R] = {T - 1, 0, T / 2, T / 2 + 1, T / 3};
    const int64_t n = attention_cache_elements(S, T, C);
    Array<X> cache(dev, n, 4, 1), qkv(dev, (int64_t)R * 3 * C, 5, 1), out(dev, (int64_t)R * C);
    Room room(dev);
    int *sequence = room.to_device(sequences, R), *position = room.to_device(positions, R);
    const AttentionCache host = {S, T, sequences, positions}, device = {S, T, sequence, position};
    float *want_cache = room.copy(cache.host, n), *before = room.copy(cache.host, n);
    float* want = room.host<float>((int64_t)R * C);
    const Device cpu = {};
    attention_append(&cpu, want_cache, qkv.host, &host, R, C, NH);
    attention_decode_cpu(want, qkv.host, want_cache, &host, R, C, NH);
    check_output(test, worst, "cache", &cache, before, want_cache, 1e-30,
                 [&] { attention_append(dev, cache.device, qkv.device, &device, R, C, NH); });
    cache.set(want_cache);
    check_output(test, worst, "attention", &out, nullptr, want, product_bound(T + HS, 1),
                 [&] { attention_decode(dev, out.device, qkv.device, cache.device, &device, R, C, NH, false); });
    // The first three rows are of different sequences, and see nothing of the others.
    const int apart = 3;
    Array<X> outputs(dev, (int64_t)apart * C);
    float* appended = room.copy(before, n);
    attention_append(&cpu, appended, qkv.host, &host, apart, C, NH);
    const auto run = [&] {
        attention_decode(dev, outputs.device, qkv.device, cache.device, &device, apart, C, NH, true);
    };
    check_output(test, worst, "cache after attention", &cache, before, appended, 1e-30, run);
    check_output(test, worst, "attention that appends", &outputs, nullptr, want, product_bound(T + HS, 1), run);
    // One block a head gives the bits of four.
    const X* four = room.to_host(outputs.device, outputs.n);
    Device small = *dev;
    small.sm_count = 1;
    attention_decode(&small, outputs.device, qkv.device, cache.device, &device, apart, C, NH, true);
    const X* one = room.to_host(outputs.device, outputs.n);
    expect(memcmp(four, one, outputs.n * sizeof(X)) == 0, "%d keys: one block has other bits than four", T);
}

OPERATOR_TEST(sampling_attention_gpu) {
    for (int T : {3, 7, 64, 257, 1024, 1500}) {
        attention_decode_case<bf16>(test, &worst, &dev, 3, 64, T);
        attention_decode_case<bf16>(test, &worst, &dev, 2, 128, T);
        attention_decode_case<float>(test, &worst, &dev, 3, 64, T);
        attention_decode_case<float>(test, &worst, &dev, 2, 128, T);
    }
    Device older = dev;
    older.compute = 80;
    attention_decode_case<bf16>(test, &worst, &older, 3, 64, 257);
}

TEST(sampling_draw_gpu) {
    constexpr int R = 70, VP = 50304;
    Device dev = test_device(true);
    float* logits = random_floats((int64_t)R * VP, 6, 9);
    int numbers[2][R], want[R], got[R];
    for (int r = 0; r < R; r++) numbers[0][r] = r % 9, numbers[1][r] = 31 * r;
    // Some rows have thousands of equal logits, so that no short list holds the likeliest; in others all are equal.
    for (int64_t i = 0; i < R * (int64_t)VP; i++)
        if (i / VP % 5 == 1) logits[i] = rintf(i / VP % 2 ? logits[i] / 20 : logits[i]) - 100;
    logits[3 * (int64_t)VP + 17] = NAN;
    for (int v = 50257; v < VP; v++) logits[v] = NAN;  // the padding is never used
    Room room(&dev);
    float* device = room.to_device(logits, (int64_t)R * VP);
    int *samples = room.to_device(numbers[0], R), *places = room.to_device(numbers[1], R);
    int* tokens = room.device<int>(R);
    for (int draws = 0; draws < 3 * 8 * 4; draws++) {
        const int V = draws % 3 == 0 ? 50257 : draws % 3 == 1 ? 1300 : 300;  // the last are fewer than the threads
        const int64_t k[] = {0, 1, 2, 50, 512, 513, 20000, V - 1};
        const double temperature[] = {0.0, 0.8, 3.0, 1e-310};
        DrawOptions options = {temperature[draws / 24], k[draws / 3 % 8], 77};
        draw_cpu(want, logits, numbers[0], numbers[1], &options, R, V, VP);
        draw(&dev, tokens, device, samples, places, &options, R, V, VP);
        copy_to_host(&dev, got, tokens, R * 4);
        for (int r = 0; r < R; r++) {
            expect(got[r] == want[r], "row %d of %d at %g, top %lld: token %d, want %d", r, V, options.temperature,
                   (long long)options.top_k, got[r], want[r]);
        }
    }
    expect(want[3] == DRAW_NOT_FINITE, "NaN gives %d", want[3]);
}

// The logits of each step against the CPU's for the same text, relative to their norm. Roundings to bf16 (2^-9) happen
// seven times in a block and four times outside; they do not correlate. fp32: sums of 9C + HS + T terms in a block.
TEST(sampling_logits_gpu) {
    constexpr int STEPS = 30;
    const DecodeShape s = {3, 256, 4, 300, 384, 64};
    Device dev, cpu;
    device_open(&dev, true, 0), device_open(&cpu, false, 0);
    Weights w(&s, true, 21);
    float* want = w.room.host<float>(s.Vp);
    double worst = 0;
    for (bool fp32 : {true, false}) {
        const double sums = s.L * (9.0 * s.C + 64 + s.T) + s.C, roundings = 7.0 * s.L + 4.0;
        const double bound = fp32 ? 2.0 * ldexp(sqrt(sums), -24) : 4.0 * ldexp(sqrt(roundings), -9);
        DrawOptions draw = {0.8, 40, 3};
        DecodeText texts[2] = {text_begin(&w.room, 1, 0), text_begin(&w.room, 50, 1)};
        Sampler sampler(&dev, &s, &w, fp32, 2, &draw, STEPS);
        decode_texts(&sampler.decoder, texts, 2, STEPS);
        for (int i = 0; i < 2; i++) {
            const int prompt = i == 0 ? 1 : 50;
            for (int step = 0; step < STEPS; step++) {
                const int64_t used = prompt + step, begin = window_begin(prompt, used, s.T);
                plain_logits(want, &s, &w, texts[i].tokens + begin, (int)(used - begin));
                const float* got = sampler.logits + ((int64_t)step * 2 + i) * s.Vp;
                double difference = 0, norm = 0;
                for (int v = 0; v < s.V; v++) {
                    difference += ((double)got[v] - want[v]) * ((double)got[v] - want[v]);
                    norm += (double)want[v] * want[v];
                }
                const double multiple = sqrt(difference / norm) / bound;
                if (!(multiple <= worst)) worst = multiple;
            }
        }
        expect(worst <= 1, "%s: the logits differ by %.2f times the bound", fp32 ? "fp32" : "bf16", worst);
    }
    note_worst(test, worst);
}

TEST_BOTH(sampling_texts) {
    const DecodeShape s = {3, 256, 4, 300, 384, 64};
    const Device dev = test_device(gpu);
    for (bool fp32 : {true, false}) {
        if (gpu) expect_same_texts(test, &dev, &s, fp32, 0.8);
        if (gpu) expect_same_texts(test, &dev, &s, fp32, 0);
        for (int layers : {1, 2}) {
            DecodeShape small = SMALL;
            small.L = layers;
            if (gpu || fp32) expect_same_texts(test, &dev, &small, fp32, 0.8);
        }
    }
}

}  // namespace
