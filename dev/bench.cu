// `make bench`: what a training step costs on this GPU. For each model: tokens/s of whole steps (forward, backward,
// clipping, AdamW, the loader's copies, the loss read back), then every operator alone at the shapes of that step, its
// share, and its rate against the ceilings measured in the same run (a device-to-device copy of 4 GiB, read + written;
// an 8192^3 bf16 matrix product). Medians of CUDA-event times after a warm-up, random data. The ceilings are those of a
// cool card; in the steps it is at its power limit, and the clock printed beside them says how far below.
//
//   ./build/dev/bench [--OPTION VALUE]... [MODEL BATCH TOKENS_PER_STEP]...
//
// Options are those of ./train that have a value. Without models: gpt2 64 524288  gpt2-xl 16 262144. Without anything:
// these two, then whole steps of the models that fill a card (LARGEST). With --matmul fp8 a layer's row includes what
// makes its codes; its ceiling is then that of an 8192^3 fp8 product, and the head's too, unless --head bf16. Where a
// layer's gradients are gone when the next layer's come (--release on), operators are not timed alone.
#define TESTING
#include <errno.h>

#include "../train_gpt2.cu"
#include "timing.h"

struct Ceilings {
    double copy;  // bytes/s, read + written
    double gemm;  // FLOP/s, bf16
    double fp8;   // FLOP/s of e4m3 codes; 0 where there are none
};

// The codes of random values, so that the tensor cores take the power that they take in a step.
static double measure_fp8(const Device* dev, const bf16* values, bf16* out, int64_t n) {
    if (dev->compute < 89) return 0;
    Room room(dev);
    void* memory = room.device<char>(fp8_bytes(3));
    device_zero(dev, memory, fp8_bytes(3));
    Fp8 scales = fp8_open(3, memory);
    uint8_t* codes = room.device<uint8_t>(n * n);
    const Operand<bf16> operand = {(bf16*)values, codes, nullptr, &scales};
    fp8_begin(dev, &scales);
    fp8_cast(dev, &operand, n, (int)n);
    const Fp8Factor factor = operand_rows(&operand);
    const double ms =
        median_ms(dev, 10, [&] { fp8_product<bf16>(dev, out, factor, factor, nullptr, n, n, n, true, false); });
    return 2.0 * (double)n * (double)n * (double)n / (1e-3 * ms);
}

static Ceilings measure_ceilings(const Device* dev) {
    Ceilings ceilings;
    Room room(dev);
    int64_t bytes = 4ll << 30, n = 8192;
    bf16 *a = filled(&room, bytes / 2, 1.0f, 0), *b = filled(&room, bytes / 2, 1.0f, 0);
    bf16* c = filled(&room, n * n, 1.0f, 0);
    ceilings.copy = copy_rate(dev, b, a, bytes);
    double ms = median_ms(dev, 10, [&] { matmul_forward<bf16>(dev, c, nullptr, a, b, nullptr, n, (int)n, (int)n); });
    ceilings.gemm = 2.0 * n * n * n / (1e-3 * ms);
    ceilings.fp8 = measure_fp8(dev, a, c, n);
    return ceilings;
}

// A shard of tokens whose frequencies fall like those of text, so that the embedding's backward pass sees long buckets.
static void write_shard(const char* path, int64_t tokens, int V) {
    int32_t header[256] = {20240520, 1, (int32_t)tokens};
    uint16_t* token = (uint16_t*)malloc(tokens * 2);
    for (int64_t i = 0; i < tokens; i++) {
        double u = (double)(random_bits(7, 0, i) >> 11) / 9007199254740992.0;
        token[i] = (uint16_t)(pow((double)V, u) - 1);  // log-uniform: frequency ~ 1 / rank
    }
    FILE* file = fopen(path, "wb");
    bool fine =
        file && fwrite(header, sizeof(header), 1, file) == 1 && fwrite(token, 2, tokens, file) == (size_t)tokens;
    if (!fine || fclose(file) != 0) user_error("bench: %s cannot be written: %s", path, strerror(errno));
    free(token);
}

struct Account {
    const Device* dev;
    Ceilings ceilings;
    double step_ms;  // of a whole step
    double sum_ms, floor_ms;
    bool fp8;  // the next line's products are those of codes
};

// One line: an operator alone, `calls` of it in a step, FLOPs and bytes of one call (0: not what bounds it).
template <typename Function>
static void account(Account* account, const char* name, double calls, double flops, double bytes, Function run) {
    double ms = median_ms(account->dev, 10, run);
    double product = account->fp8 ? account->ceilings.fp8 : account->ceilings.gemm;
    double floor = fmax(flops / product, bytes / account->ceilings.copy) * 1e3;
    account->sum_ms += calls * ms;
    account->floor_ms += calls * floor;
    account->fp8 = false;
    char rate[64];
    if (flops > 0) snprintf(rate, sizeof(rate), "%7.1f TFLOP/s", flops / ms * 1e-9);
    if (flops <= 0) snprintf(rate, sizeof(rate), "%7.0f GB/s   ", bytes / ms * 1e-6);
    printf("  %-28s %8.3f ms x %5.0f = %8.2f ms %6.1f %%   %s %5.1f %% of ceiling\n", name, ms, calls, calls * ms,
           100 * calls * ms / account->step_ms, rate, 100 * floor / ms);
}

// The operators of a model's step, each alone, and what they are given: block 0's arrays stand for every block's.
template <typename G>
struct Operators {
    Model* m;
    Account* a;
    double mb;  // micro-batches
    const Device* dev = m->dev;
    Activations<bf16, G> act = activations_of<bf16, G>(m, m->activations, true);
    Block<bf16, G>* b = &act.block[0];
    const Fp8Use* use = &act.fp8;
    int B = m->B, T = m->T, C = m->shape.C, L = m->shape.L, NH = m->shape.NH, V = m->shape.V, Vp = m->shape.Vp;
    int64_t N = (int64_t)B * T, rows = m->logit_rows;
    double NC = (double)N * C, n = mb * L, chunks = mb * (double)ceil_div(N, rows);  // n: blocks of all micro-batches

    // A linear layer, forward and back. In fp8 it includes what makes its codes.
    template <typename D>
    void layer(const char* name, double calls, bf16* out, const Linear<bf16, D>* l, int64_t N) {
        a->fp8 = l->inp.fp8;
        account(a, name, calls, 2.0 * (double)N * l->C * l->OC, 0, [&] { linear_forward(dev, out, l, N); });
    }

    template <typename D>
    void back(const char* name, double calls, bf16* dinp, const Linear<bf16, D>* l, int64_t N, bool accumulate) {
        a->fp8 = l->inp.fp8;
        account(a, name, calls, 4.0 * (double)N * l->C * l->OC, 0,
                [&] { linear_backward(dev, dinp, l, N, accumulate); });
    }

    void forward() {
        account(a, "embedding forward", mb, 0, 2 * NC * 2,
                [&] { embedding_forward<bf16>(dev, act.residual[0], m->input.tokens, act.wte, act.wpe, B, T, C); });
        const Operand<bf16>* ln2 = &b->fc.inp;
        const Fp8Codes codes = operand_codes(ln2);
        account(a, "residual + layernorm", mb * (2 * L + 1), 0, (codes.rows ? 7 : 8) * NC,
                [&] { norm_forward(dev, ln2, &b->ln2, N, act.residual[0], act.branch, b->residual2); });
        account(a, "attention forward", n, 2.0 * T * NC, 0,
                [&] { attention_forward<bf16>(dev, b->attproj.inp.values, b->lse, b->qkv_out, B, T, C, NH); });
        layer("qkv", n, b->qkv_out, &b->qkv, N);
        layer("attention projection", n, act.branch, &b->attproj, N);
        a->fp8 = use->gelu_makes;
        account(a, "fc + gelu", n, 8.0 * NC * C, 0,
                [&] { linear_forward(dev, b->pre_gelu, &b->fc, N, &b->fcproj.inp); });
        layer("fc projection", n, act.branch, &b->fcproj, N);
    }

    void head() {
        const Linear<bf16, float> head = linear_head_begin(dev, use, m->head_slot, act.block[L].qkv.inp.values, act.wte,
                                                           act.logits, m->dwte_sum, 1e-5f, C, Vp);
        layer("head", chunks, act.logits, &head, rows);
        account(a, "classifier", chunks, 0, (m->head_fp8 ? 3.0 : 4.0) * (double)rows * Vp, [&] {
            classifier<bf16>(dev, m->losses, act.logits, m->input.targets, 1e-5f, true, rows, V, Vp,
                             operand_codes(&head.dout));
        });
        back("d head", chunks, act.dbranch, &head, rows, true);
    }

    // "d NAME": the gradient of it.
    void layers_backward() {
        const bool more = mb > 1;
        a->fp8 = use->scales;
        account(a, "d fc projection, gelu", n, 16.0 * NC * C, 0, [&] {
            Linear<bf16, G> fc = b->fc;
            linear_backward_gelu(dev, &fc, &b->fcproj, b->pre_gelu, act.scratch, N, more);
        });
        back("d fc", n, act.dbranch, &b->fc, N, more);
        back("d attention projection", n, act.dbranch, &b->attproj, N, more);
        back("d qkv", n, act.dbranch, &b->qkv, N, more);
    }

    // Attention, and what sums over rows: biases, layer norms, the gradients' norm and the embedding.
    void sums() {
        const Fp8Codes codes = operand_codes(&b->attproj.dout), wide = operand_codes(&b->qkv.dout);
        account(a, "layernorm backward", mb * (2 * L + 1), 0, (codes.rows ? 9 : 8) * NC, [&] {
            norm_backward(dev, act.dresidual, act.dbranch, &b->ln2, b->residual2, &b->attproj, act.scratch, N, false);
        });
        account(a, "attention backward", n, 2.5 * 2.0 * T * NC, 0, [&] {
            attention_backward(dev, act.dwide, b->qkv.dbias, act.scratch, act.dbranch, b->qkv_out,
                               b->attproj.inp.values, b->lse, B, T, C, NH, false, wide);
        });
        account(a, "gradient norm", 1, 0, sizeof(G) * (double)m->arena.elements, [&] {
            const int64_t tiles = m->arena.elements / TILE_ELEMENTS;
            tile_squares<G>(dev, dev->stream, m->arena.squares, (const G*)m->arena.grads, tiles);
            norm_of_tiles(dev, m->scalars + 1, m->arena.squares, tiles, 1.0f, nullptr);
        });
        account(a, "embedding backward", mb, 0, NC * 2, [&] {
            embedding_backward<bf16, G>(dev, act.dwte, act.dwpe, m->dwte_sum, act.dresidual, m->input.order,
                                        m->input.bucket, m->input.buckets, B, T, C, Vp, false);
        });
    }

    void all() {
        forward();
        head();
        layers_backward();
        sums();
    }
};

// Plans a model as the trainer would; returns its memory.
static MemoryPlan bench_plan(const Device* dev, Options* o, Model* m, OptimConfig* config) {
    m->dev = dev;
    const bool bytes = strcmp(o->data_format, "bytes") == 0;
    resolve_model(o, m, bytes ? 256 : 50257, bytes, "", false);
    require(resolve_optim(o, m, config), m->error);
    resolve_batch(o, m, config, bytes, 1 << 20);
    resolve_release(o, m, config);
    require(defaults_choose(o, 1, false, true, 1 << 20, m->error), m->error);
    optim_set_options(config, &o->of_rule);
    return memory_plan(m, config);
}

constexpr int STEPS = 5;       // of about a second and more, within a per cent of each other
constexpr float RATE = 1e-5f;  // with which 60B parameters do not diverge without a warm-up

// Milliseconds of whole steps, in order, after two for warm-up, and the least until the host had queued all of a step;
// returns the last loss.
static float time_steps(Model* m, Feeder* feeder, int64_t micro_batches, Times* times, double* queued) {
    float scalars[3];
    *queued = INFINITY;
    for (int i = -2; i < STEPS; i++) {
        double begin = seconds_now();
        train_step(m, feeder, micro_batches, RATE, 1.0f, i + 3);
        *queued = fmin(*queued, 1e3 * (seconds_now() - begin));
        copy_to_host(m->dev, scalars, m->scalars, sizeof(scalars));
        if (i >= 0) times->add(1e3 * (seconds_now() - begin));
    }
    return scalars[0];
}

// Every operator alone.
static void bench_operators(Model* m, Feeder* feeder, const OptimConfig* config, int64_t micro_batches, Account* a) {
    feeder_next(feeder, &m->input);
    if (m->arena.grads_bf16) Operators<bf16>{m, a, (double)micro_batches}.all();
    if (!m->arena.grads_bf16) Operators<float>{m, a, (double)micro_batches}.all();
    OptimBytes bytes = optim_bytes(m->dev, config, m->arena.tensors, m->arena.count, OPTIM_BF16);
    // All is read and written; but bf16+fp32's copy in bf16 is only written.
    const bool copy = strcmp(config->weights, "bf16+fp32") == 0;
    double traffic = 2.0 * (double)(bytes.states + bytes.weights) + (double)arena_grads_bytes(&m->arena) -
                     (copy ? 2.0 * (double)m->arena.elements : 0.0);
    // The operators' sums may be infinite, and a step with such gradients would be skipped.
    const float factor = 1.0f;
    device_zero(m->dev, m->arena.grads, arena_grads_bytes(&m->arena));
    copy_to_device(m->dev, m->scalars + 2, &factor, sizeof(factor));
    account(a, "optimizer", 1, 0, traffic,
            [&] { optim_step(m->arena.optim, m->arena.grads, m->scalars + 2, 1e-4f, 20); });
    printf("  sum of operators %.1f ms = %.1f %% of the step; sum of floors %.1f ms: sol %.1f %%\n", a->sum_ms,
           100 * a->sum_ms / a->step_ms, a->floor_ms, 100 * a->floor_ms / a->step_ms);
}

static void bench(const Device* dev, Ceilings ceilings, Options o) {
    char error[DATA_ERROR_BYTES], path[] = "/tmp/nibble_bench_XXXXXX.bin";
    Model m = {};
    OptimConfig config;
    const MemoryPlan plan = bench_plan(dev, &o, &m, &config);
    const double planned = (double)plan.total / (1 << 30);
    const int64_t batch = o.batch, tokens_per_step = o.tokens_per_step, micro_batches = tokens_per_step / (batch * m.T);
    if (plan.total > plan.available) {
        printf("\n%s, batch %lld: needs %.1f GiB, more than this card has free\n", o.model, (long long)batch, planned);
        return;
    }
    model_allocate(&m, &config);
    model_init(&m, 1);

    int descriptor = mkstemps(path, 4);
    if (descriptor < 0) user_error("bench: %s cannot be made: %s", path, strerror(errno));
    close(descriptor);
    write_shard(path, 16 * batch * m.T + 1, m.shape.V);
    Dataset data;
    if (!dataset_open(&data, path, DATA_AUTO, DATASET_WHOLE, 0, m.T, error)) user_error("%s", error);
    Feeder feeder;
    feeder_open(&feeder, dev, &data, m.B, m.T, 1, true, 0);
    Times times;
    double queued;
    float loss = time_steps(&m, &feeder, micro_batches, &times, &queued);
    if (!isfinite(loss))
        user_error("bench: the loss became %g, and such steps take less power; look for the cause", loss);
    double clock = clock_mhz(dev);
    size_t available, total;
    check(cudaMemGetInfo(&available, &total));
    double median = times.median(), rate = 1e3 * (double)tokens_per_step / median, peak = device_peak(dev, false);
    printf(
        "\n%s (%.0fM parameters)  %s, %s%s, batch %lld x %d x %lld micro-batches, gradients %s: %.1f ms a step "
        "(%.1f to %.1f of "
        "%d), "
        "%.0f tokens/s",
        o.model, 1e-6 * (double)m.parameters, o.preset, o.matmul, m.uses_fp8 && !m.head_fp8 ? ", head bf16" : "",
        (long long)batch, m.T, (long long)micro_batches, o.grads, median, times.ms[0], times.ms[STEPS - 1], STEPS,
        rate);
    if (peak > 0) printf(", mfu %.1f %%", 100 * rate * gpt2_flops(m.parameters, m.shape.L, m.shape.C, m.T) / peak);
    printf(", queued in %.1f ms, %.0f MHz after it, %.1f GiB in use, %.1f planned, release %s, loss %.3f\n", queued,
           clock, (double)(total - available) / (1 << 30), planned, o.release, loss);
    Account account = {dev, ceilings, median, 0, 0, false};
    if (!m.arena.releases) bench_operators(&m, &feeder, &config, micro_batches, &account);
    feeder_close(&feeder);
    dataset_close(&data);
    unlink(path);
    model_free(&m);
}

// The rows of "The largest runs" in dev/README.md, and what releasing gradients costs.
static const char* const FILLS =
    "--data-format bytes --preset int8w4 --grads bf16 --recompute block --release on --clip-by last";
static const struct {
    const char *options, *more;
} LARGEST[] = {
    {"--model gpt2-xl --batch 16 --tokens-per-step 16384", "--grads bf16 --clip-by last --release off"},
    {"--model gpt2-xl --batch 16 --tokens-per-step 16384", "--grads bf16 --clip-by last --release on"},
    {"--layers 52 --channels 6656 --heads 52 --batch 8 --tokens-per-step 8192 --kept-blocks 6", FILLS},
    {"--size 33B --batch 4 --tokens-per-step 4096", FILLS},
    {"--size 60B --batch 4 --tokens-per-step 4096", FILLS},
};

// Sets the options that argv[1] to argv[argc - 1] name, beside the defaults.
static void bench_options(Options* o, int argc, char** argv) {
    char error[DATA_ERROR_BYTES];
    options_defaults(o);
    o->preset = "adamw32";  // which the tables of speeds have
    require(options_parse(o, argc, argv, error) && gpt2_take_size(o, error), error);
}

static void bench_largest(const Device* dev, Ceilings ceilings) {
    for (const auto& row : LARGEST) {
        char *word[64] = {(char*)"bench"}, *text = nullptr, *rest;
        int count = 1;
        if (asprintf(&text, "%s %s", row.options, row.more) < 0) abort();
        printf("\n./train %s", text);
        for (char* at = strtok_r(text, " ", &rest); at; at = strtok_r(nullptr, " ", &rest)) word[count++] = at;
        Options o;
        bench_options(&o, count, word);
        bench(dev, ceilings, o);
        free(text);
    }
}

int main(int argc, char** argv) {
    int first = 1;
    while (first + 1 < argc && argv[first][0] == '-') first += 2;
    if ((argc - first) % 3 != 0) user_error("bench takes MODEL BATCH TOKENS_PER_STEP, each time all three");
    Options o;
    bench_options(&o, first, argv);
    for (const char* name : {"model", "size", "batch", "tokens-per-step"}) {
        if (!option_given(&o, name)) continue;
        user_error("bench takes MODEL BATCH TOKENS_PER_STEP as words; leave --%s out and type gpt2 64 524288", name);
    }
    if (strcmp(o.matmul, "auto") == 0) o.matmul = "bf16";
    Device dev;
    device_choose(&dev, "auto", nullptr, 1);
    dev.warms_up = true;  // the best algorithms are the ceilings
    Ceilings ceilings = measure_ceilings(&dev);
    dev.warms_up = false;
    printf("%s: copy %.0f GB/s, matrix product bf16 %.0f, fp8 %.0f TFLOP/s\n", dev.name, 1e-9 * ceilings.copy,
           1e-12 * ceilings.gemm, 1e-12 * ceilings.fp8);
    const char* const usual[] = {"gpt2", "64", "524288", "gpt2-xl", "16", "262144"};
    const char* const* model = argc > first ? argv + first : usual;
    for (int i = 0; i < (argc > first ? argc - first : 6); i += 3) {
        o.model = model[i], o.batch = atoll(model[i + 1]), o.tokens_per_step = atoll(model[i + 2]);
        bench(&dev, ceilings, o);
    }
    if (argc == 1) bench_largest(&dev, ceilings);
    device_close(&dev);
    return 0;
}
