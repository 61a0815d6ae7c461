// Tests against other optimizers: torchao, bitsandbytes and FlashOptim. dev/reference/make_peers.py ran their own code
// and wrote what they store for given numbers; here the same numbers go through our formats (on the CPU, whose bits are
// the GPU's), and levels, codes and scales are compared. Steps are compared by test_torch_peers.py and
// dev/reference/check_rules.py, where the packages are installed.
//
// These differ by intent:
//   v's zero     theirs has a code of zero, ours the least level instead; torchao's lin4 has none either
//   small scales torchao's and FlashOptim's are 1e-12 at least, ours and bitsandbytes' as small as fp32 has them
//   fp16 scales  FlashOptim rounds a scale after it was divided by, so its codes are those of our fp32 scales
// Not here: bitsandbytes' CUDA kernels keep m's sign where it rounds to zero; its CPU kernel misplaces small codes
// (make_peers.py). formats.cu has the bounds between levels and scales of other types.
#include "steps.h"
#include "tensors.h"

namespace {

static const char PEERS[] = "dev/reference/peers.safetensors";
constexpr int64_t MOST = 3072;         // elements of the largest array of the file
constexpr double U = 1.0 / (1 << 24);  // half a unit in the last place of 1: one rounding of fp32

struct Floats {
    int64_t n;
    float x[MOST];
};

struct Bytes {
    int64_t n;
    uint8_t x[MOST];
};

static const Safetensors* peers() {
    static Safetensors file;
    if (!file.count && !safetensors_open(&file, PEERS, error)) printf("    %s\n", error), exit(1);
    return &file;
}

static const SafetensorsTensor* peers_find(const char* name) {
    const SafetensorsTensor* tensor = safetensors_find(peers(), name);
    if (!tensor) printf("    %s holds no %s\n", PEERS, name), exit(1);
    return tensor;
}

static Floats peers_floats(const SafetensorsTensor* tensor) {
    Floats floats = {1, {}};
    for (int d = 0; d < tensor->dims; d++) floats.n *= tensor->shape[d];
    char error[DATA_ERROR_BYTES] = "it is too large";
    if (floats.n > MOST || !safetensors_floats(peers(), tensor, 0, floats.n, floats.x, error))
        printf("    %s: %s\n", tensor->name, error), exit(1);
    return floats;
}

static Bytes peers_bytes(const SafetensorsTensor* tensor) {
    Bytes bytes = {tensor->bytes, {}};
    if (bytes.n > MOST) printf("    %s\n", tensor->name), exit(1);
    memcpy(bytes.x, tensor_data(peers(), tensor), (size_t)bytes.n);
    return bytes;
}

// The formats, and how a peer's storage is brought to our convention: code + `shift`, scale / `units`.
struct Format {
    const char *name, *peer;
    int bits, block;
    bool moment_v;  // kept in v, where no code of zero is written
    int shift;
    float units;
};

static const Format formats[] = {
    {"dyn8", "torchao", 8, 256, false, 0, 1.0f},     {"dyn8", "bitsandbytes", 8, 256, false, 0, 1.0f},
    {"udyn8", "torchao", 8, 256, true, 0, 1.0f},     {"udyn8", "bitsandbytes", 8, 256, true, 0, 1.0f},
    {"de4", "torchao", 4, 128, false, 0, 1.0f},      {"lin4", "torchao", 4, 128, true, 0, 1.0f},
    {"e4m3", "torchao", 8, 256, false, 0, 1.0f},     {"e4m3", "torchao", 8, 256, true, 0, 1.0f},
    {"nf4", "bitsandbytes", 4, 64, false, 0, 1.0f},  {"soft8", "flashoptim", 8, 32, false, 127, 1.0f},
    {"sqrt8", "flashoptim", 8, 32, true, 0, 255.0f},
};

// Elements with a code each and a scale a block, in our convention.
struct Codes {
    int64_t n;
    uint8_t code[MOST];
    float scale[MOST / 32];
};

static void unpack(Codes* stored, const Format* format, const uint8_t* bytes) {
    for (int64_t i = 0; i < stored->n; i++)
        stored->code[i] = format->bits == 8 ? bytes[i] : (uint8_t)(i % 2 ? bytes[i / 2] & 15 : bytes[i / 2] >> 4);
}

static Codes peers_stored(const Format* format, const SafetensorsTensor* codes, const SafetensorsTensor* scales) {
    Bytes bytes = peers_bytes(codes);
    Floats scale = peers_floats(scales);
    Codes stored = {bytes.n * 8 / format->bits, {}, {}};
    unpack(&stored, format, bytes.x);
    for (int64_t i = 0; i < stored.n; i++) stored.code[i] = (uint8_t)(stored.code[i] + format->shift);
    for (int64_t b = 0; b < scale.n; b++) stored.scale[b] = scale.x[b] / format->units;
    return stored;
}

// The peer decodes each of our codes to these numbers with scale 1.
static Floats peers_map(const Format* format) {
    bool theirs = !strcmp(format->peer, "bitsandbytes") && format->bits == 8;
    Floats raw = peers_floats(peers_find(formatted("map.%s%s", format->name, theirs ? ".bitsandbytes" : ""))),
           map = raw;
    for (int64_t code = 0; code < raw.n; code++) map.x[(code + format->shift) % raw.n] = raw.x[code];
    return map;
}

// A format's row, with arrays of two tiles.
struct Ours {
    const FormatRow* row;
    uint8_t bytes[2 * TILE_ELEMENTS] = {}, table[65536];
    float x[2 * TILE_ELEMENTS] = {}, scales[2 * TILE_ELEMENTS / 32];
    Streams streams = {bytes, scales, table};

    explicit Ours(const Format* format) {
        const char *m = format->moment_v ? "fp32" : format->name, *v = format->moment_v ? format->name : "fp32";
        const OptimConfig config = resolved({{}, "", "adamw", "fp32", "fp32", m, v, 1});
        row = find_row(state_table(), format->moment_v ? config.v : config.m);
        if (row->table_bytes) row->fill(table);
    }
};

static Codes store_ours(const Format* format, const Floats* x) {
    static Codes stored;
    Ours ours(format);
    for (int64_t i = 0; i < x->n; i++) ours.x[i] = format->moment_v ? x->x[i] * x->x[i] : x->x[i];
    for (int first : {0, TILE_ELEMENTS}) {
        const NoiseKey key = {1, 1, (uint32_t)(format->moment_v ? NOISE_V : NOISE_M)};
        ours.row->store(ours.streams, first, ours.x + first, TILE_ELEMENTS, key);
    }
    stored = {x->n, {}, {}};
    memcpy(stored.scale, ours.scales, sizeof(stored.scale));
    unpack(&stored, format, ours.bytes);
    return stored;
}

TEST(peers_stored_numbers) {
    for (const Format& format : formats) {
        const char *set = format.moment_v ? "v" : "m", *what = formatted("%s.%s.%s", format.peer, format.name, set);
        const Floats inputs = peers_floats(peers_find(formatted("input.%s", set))), map = peers_map(&format);
        const Codes ours = store_ours(&format, &inputs);
        const Codes theirs =
            peers_stored(&format, peers_find(formatted("%s.codes", what)), peers_find(formatted("%s.scales", what)));
        const double least = strcmp(format.peer, "bitsandbytes") ? 1e-12 : 0.0;
        const double rounds = strcmp(format.peer, "flashoptim") ? 2.0 * U : 0x1p-11;
        int zeros = 0, compared = 0;
        for (int64_t i = 0; i < theirs.n; i++) {
            const double a = ours.scale[i / format.block], b = theirs.scale[i / format.block];
            const double level = map.x[ours.code[i]], its = map.x[theirs.code[i]];
            double top = 0.0;
            for (int64_t k = i / format.block * format.block; k < inputs.n && k / format.block == i / format.block; k++)
                top = fmax(top, format.moment_v ? inputs.x[k] * inputs.x[k] : fabs(inputs.x[k]));
            if (top <= least) continue;
            expect(fabs(a - b) <= rounds * a + 0x1p-25 / format.units, "%s: scale of %d: %.9g, theirs %.9g", what,
                   (int)i, a, b);
            const bool zero = format.moment_v && its == 0.0 && level > 0.0;
            expect(level == its || (zero && ours.code[i] <= theirs.code[i] + 1), "%s: element %d: %.9g, theirs %.9g",
                   what, (int)i, level, its);
            zeros += zero, compared++;
        }
        // torchao takes no tail.
        expect(theirs.n >= inputs.n / format.block * format.block && compared > theirs.n / 2, "%s: %d", what, compared);
        expect((zeros > 0) == (format.moment_v && strcmp(format.name, "lin4") != 0), "%s: %d zeros", what, zeros);
    }
}

// All codes' levels, with a scale of 1 as theirs have it.
static void levels_ours(const Format* format, Floats* level) {
    Ours ours(format);
    for (int64_t i = 0; i < level->n; i++) {
        if (format->bits == 8) ours.bytes[i] = (uint8_t)i;
        if (format->bits == 4) ours.bytes[i / 2] = (uint8_t)(ours.bytes[i / 2] | i << (i % 2 ? 0 : 4));
    }
    for (float& scale : ours.scales) scale = 1.0f / format->units;
    ours.row->load(ours.streams, 0, ours.x, TILE_ELEMENTS, NoiseKey{});
    memcpy(level->x, ours.x, (size_t)level->n * 4);
}

// Their dynamic maps come from a partition in fp32, ours are rounded once: up to 2 units in the last place apart. Their
// softsign and square are computed when decoding, 4 roundings; ours, likewise or looked up.
TEST(peers_levels) {
    for (const Format& format : formats) {
        Floats theirs = peers_map(&format), ours = theirs;
        levels_ours(&format, &ours);
        bool exact = !strcmp(format.name, "lin4") || !strcmp(format.name, "nf4") || !strcmp(format.name, "e4m3");
        double bound = (exact ? 0.0 : strcmp(format.peer, "flashoptim") ? 4.0 * U : 8.0 * U);
        int differ = 0;
        for (int64_t code = 0; code < ours.n; code++) {
            double a = ours.x[code], b = theirs.x[code];
            if (format.shift && code == 255) continue;  // -128, which occurs neither here nor there
            if (isnan(b) && isnan(a)) continue;
            differ += a != b;
            expect(fabs(a - b) <= bound * fabs(b), "%s %s: level %lld is %.9g, theirs %.9g", format.peer, format.name,
                   (long long)code, a, b);
        }
        if (!format.moment_v && !exact) note(test, "%s %s: %d in the last bits", format.peer, format.name, differ);
    }
}

}  // namespace
