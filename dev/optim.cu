// Speed of the optimizer step alone: bytes that must move (every stored stream read and written once, gradients read,
// what is only written counted once, all that is read counted twice where a first pass measures scales of tensors or of
// rows and columns, and what the passes of a rule by rows read besides) over the time of optim_step, as a share of the
// device-to-device copy rate measured in the same run (bytes read + written). Medians of CUDA-event times after a
// warm-up, on random data, with one tensor of 2^30 elements and with GPT-2's own tensors; states are those of a few
// steps, so no format sees zeros only. A combination is timed if three steps of 96 x 1024 elements give the bits of the
// plain C path in every array; rules that read matrices, whose products round otherwise, are not compared.
//
//   ./build/dev/optim [--csv FILE] [--sizes 1g,1558m,124m] [PRESET | WEIGHTS,M,V | RULE,WEIGHTS,M,V]...
//   without names: the presets and every listed format of the tables; dev/plot.py draws the CSV
#define TESTING
#include <errno.h>

#include "../train_gpt2.cu"
#include "../optim/made.h"
#include "../optim/storage.h"
#include "../optim/table.cuh"
#include "timing.h"

// Without names: each preset; each listed state format in m and v, or beside an m of bf16:sr if it has no sign, to
// nearest and with noise; each storage of weights beside states of bf16:sr.
static int usual_names(const char** names, int most) {
    int count = 0;
    for (const PresetRow& row : PRESETS) {
        if (!find_row(rule_table(), row.rule)->matrix) names[count++] = row.name;  // whose size 1g is no matrix
    }
    for (int i = 0; i < state_table().count; i++) {
        const FormatRow* row = &state_table().row[i];
        if (!row->note[0] || strchr(row->name, ':') || format_span(row) != SPAN_RUN) continue;
        for (const char* noise : {"", ":sr"}) {
            char *text = nullptr, *m = nullptr;
            if (asprintf(&m, "%s%s", row->has_sign ? row->name : "bf16:sr", row->has_sign ? noise : "") < 0) abort();
            if (asprintf(&text, "bf16:sr,%s,%s%s", m, row->name, noise) < 0) abort();
            if (count < most && (!*noise || strcmp(row->name, "fp32") != 0)) names[count++] = text;
            free(m);
        }
    }
    for (int i = 0; i < weights_table().count; i++) {
        char* text = nullptr;
        if (asprintf(&text, "%s,bf16:sr,bf16:sr", weights_table().row[i].name) < 0) abort();
        if (count < most) names[count++] = text;
    }
    return count;
}

__global__ void fill_kernel(bf16* values, int64_t n, uint64_t seed) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    uint64_t z = seed + (uint64_t)(i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    // Magnitudes over four decades, as gradients have.
    float magnitude = exp2f(-14.0f * (float)(z >> 40 & 0xffff) / 65536.0f);
    values[i] = from_float<bf16>((z & 1 ? -1.0f : 1.0f) * magnitude * 1e-2f);
}

// "adamw8", "bf16:sr,dyn8/256,udyn8/256" or "lion,bf16:sr,dyn8/256,none" to a resolved configuration.
static OptimConfig combination(const char* text) {
    OptimConfig config = {};
    char error[DATA_ERROR_BYTES];
    char *part[4] = {}, *copy = strdup(text), *rest;
    int count = 0;
    for (char* at = strtok_r(copy, ",", &rest); at && count < 4; at = strtok_r(nullptr, ",", &rest)) part[count++] = at;
    Options o;
    options_defaults(&o);
    o.grads = "bf16";
    if (count == 1) o.preset = part[0];
    if (count == 4) o.rule = part[0];
    if (count >= 3) o.weights = part[count - 3], o.m = part[count - 2], o.v = part[count - 1];
    if (count == 2) user_error("'%s': type PRESET, WEIGHTS,M,V or RULE,WEIGHTS,M,V", text);
    o.seq = 1024, o.tokens_per_step = 65536, o.steps = 1000, o.channels = 768;  // for what is auto
    require(optim_config_from(&o, &config, error) && defaults_choose(&o, 1, false, true, 1, error), error);
    optim_set_options(&config, &o.of_rule);
    return config;
}

// True if a format has scales that a pass of its own measures before the step.
static bool is_measured(const char* format) {
    return (strstr(format, "/tensor") && !strstr(format, "@given")) || strstr(format, "/rank1");
}

// Returns the bytes that the passes before the step of a rule by rows read (optim/rows/rows.cuh). --limit-growth, whose
// pass reads weights and v as well, is off here.
static int64_t passes_traffic(const OptimConfig* config, const Model* m) {
    Plan* plan = plan_ranges(config, m->arena.tensors, m->arena.count);
    double bytes = 0.0;
    for (int i = 0; i < plan->launches; i++) {
        const Rows rows = config_rows(&plan->launch[i].config);
        RowPlan its = row_plan(plan, i, m->arena.tensors, m->arena.count);
        double each = 0.0, elements = 0.0;
        for (int pass = 0; pass < its.passes; pass++) {
            each += format_bytes_each(its.pass[pass] == SUM_WEIGHTS ? rows.weights : rows.grads);
            each += sum_info(its.pass[pass]).reads_m ? format_bytes_each(rows.m) : 0.0;
        }
        for (int64_t t = 0; t < its.tensors; t++) elements += (double)(its.tensor[t].rows * its.tensor[t].cols);
        bytes += each * elements;
        row_plan_free(&its);
    }
    plan_free(plan);
    return (int64_t)bytes;
}

static int64_t traffic(const Optim* optim, const OptimConfig* config, const Model* m) {
    int64_t read = 2 * m->arena.elements, written = 0;  // bf16 gradients
    bool master = false;
    for (int i = 0; i < optim->stream_count; i++) master = master || !strcmp(optim->stream[i].name, "master");
    for (int i = 0; i < optim->stream_count; i++) {
        OptimStream stream = optim->stream[i];
        int64_t size = stream.elements * stream.element_bytes;
        bool copy = master && strncmp(stream.name, "weights", 7) == 0;  // with its scales only written
        read += copy ? 0 : size;
        written += size;
    }
    bool twice = is_measured(config->weights) || is_measured(config->m) || is_measured(config->v);
    written += optim->allocated.compute;  // the matmul's copy is only written
    return (twice ? 2 : 1) * read + written + passes_traffic(config, m);
}

static bool is_right(const Device* gpu, const char* text) {
    const OptimConfig config = combination(text);
    if (find_row(rule_table(), config.rule)->matrix) return true;
    OptimTensor tensor = {"weight", 96, 1024, true, 0};
    const int64_t n = optim_layout(&tensor, 1, &config);
    Device cpu;
    device_open(&cpu, false, 0);
    Room room(gpu);
    bf16* grads = room.device<bf16>(n);
    fill_kernel<<<(unsigned)ceil_div(n, 256), 256, 0, gpu->stream>>>(grads, n, 5);
    check_launch();
    const bf16* host_grads = room.to_host(grads, n);
    const float one = 1.0f, *scale = room.to_device(&one, 1);
    Optim *ours = optim_create(gpu, &config, &tensor, 1, OPTIM_BF16),
          *plain = optim_create(&cpu, &config, &tensor, 1, OPTIM_BF16);
    for (int step = 1; step <= 3; step++) {
        optim_step(ours, grads, scale, 1e-3f, step);
        optim_step(plain, host_grads, &one, 1e-3f, step);
    }
    bool right = true;
    for (int i = 0; i < plain->stream_count; i++) {
        const OptimStream got = ours->stream[i], want = plain->stream[i];
        const int64_t bytes = want.elements * want.element_bytes;
        right = right && memcmp(room.to_host((const char*)got.data, bytes), want.data, (size_t)bytes) == 0;
    }
    optim_free(ours), optim_free(plain);
    device_close(&cpu);
    return right;
}

struct Size {
    const char* name;
    Model model;  // its tensors
};

static Size size_of(const char* name) {
    Size size = {name, {}};
    Model* m = &size.model;
    if (strcmp(name, "1g") == 0) {
        m->arena.count = 1;
        m->arena.tensors = (OptimTensor*)calloc(1, sizeof(OptimTensor));
        *m->arena.tensors = {"weight", 32768, 32768, true, 0};
        m->arena.elements = m->parameters = optim_layout(m->arena.tensors, 1);
        return size;
    }
    bool large = strcmp(name, "1558m") == 0;
    if (!large && strcmp(name, "124m") != 0) user_error("--sizes %s: type 1g, 1558m or 124m", name);
    m->shape = large ? Gpt2Shape{48, 1600, 25, 1024, 50257, 50304} : Gpt2Shape{12, 768, 12, 1024, 50257, 50304};
    shape_tensors(m);
    return size;
}

static void bench(const Device* dev, FILE* csv, const char* text, const Size* size, double copy) {
    OptimConfig config = combination(text);
    const Model* m = &size->model;
    optim_layout(m->arena.tensors, m->arena.count, &config);
    Optim* optim = optim_create(dev, &config, m->arena.tensors, m->arena.count, OPTIM_BF16);
    Room room(dev);
    bf16* grads = room.device<bf16>(m->arena.elements);
    fill_kernel<<<(unsigned)ceil_div(m->arena.elements, 256), 256, 0, dev->stream>>>(grads, m->arena.elements, 3);
    check_launch();
    const float one = 1.0f, *scale = room.to_device(&one, 1);
    int64_t step = 0;
    double spread, ms = median_ms(
                       dev, 15, [&] { optim_step(optim, grads, scale, 1e-3f, ++step); }, &spread);
    double bytes = (double)traffic(optim, &config, m), share = 100 * bytes / (1e-3 * ms) / copy;
    double state =
        (double)optim_bytes(dev, &config, m->arena.tensors, m->arena.count, OPTIM_BF16).states / (double)m->parameters;
    printf(
        "%-34s %-6s %8.3f ms +-%4.1f %% %6.2f ps/param, moved %6.3f B/param, states %6.3f, %5.0f GB/s %5.1f %% of "
        "copy\n",
        text, size->name, ms, 100.0 * spread, 1e9 * ms / (double)m->arena.elements, bytes / (double)m->arena.elements,
        state, bytes / ms * 1e-6, share);
    fflush(stdout);
    if (csv) {
        fprintf(csv, "\"%s\",%s,%.6f,%.4f,%.4f,%.4f,%.1f,%.2f\n", text, size->name, ms,
                1e9 * ms / (double)m->arena.elements, bytes / (double)m->arena.elements, state, bytes / ms * 1e-6,
                share);
    }
    optim_free(optim);
}

int main(int argc, char** argv) {
    const char *csv_path = nullptr, *sizes = "1g,1558m,124m";
    const char* names[256];
    int count = 0;
    for (int i = 1; i < argc; i++) {
        bool option = strcmp(argv[i], "--csv") == 0 || strcmp(argv[i], "--sizes") == 0;
        if (option && i + 1 == argc) user_error("%s needs a value", argv[i]);
        if (strcmp(argv[i], "--csv") == 0)
            csv_path = argv[++i];
        else if (strcmp(argv[i], "--sizes") == 0)
            sizes = argv[++i];
        else if (count < 256)
            names[count++] = argv[i];
    }
    if (count == 0) count = usual_names(names, 256);
    Device dev;
    device_choose(&dev, "gpu", nullptr, 1);
    double copy = print_copy_rate(&dev, 4ll << 30);
    FILE* csv = csv_path ? fopen(csv_path, "w") : nullptr;
    if (csv_path && !csv) user_error("--csv %s cannot be written: %s", csv_path, strerror(errno));
    if (csv)
        fprintf(csv,
                "combination,size,ms,ps_per_param,moved_bytes_per_param,state_bytes_per_param,gb_s,percent_of_copy\n");
    int right = 0;
    for (int i = 0; i < count; i++) {
        if (is_right(&dev, names[i]))
            names[right++] = names[i];
        else
            printf("%-34s WRONG: its bits are not those of plain C\n", names[i]);
    }
    char *list = strdup(sizes), *rest;
    for (char* name = strtok_r(list, ",", &rest); name; name = strtok_r(nullptr, ",", &rest)) {
        Size size = size_of(strdup(name));
        for (int i = 0; i < right; i++) bench(&dev, csv, names[i], &size, copy);
    }
    if (csv) fclose(csv);
    device_close(&dev);
    return right < count;
}
