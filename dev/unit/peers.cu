// Tests against other optimizers: torchao, bitsandbytes and FlashOptim. dev/reference/make_peers.py ran their own code
// and wrote what they store for given numbers; here the same numbers go through our formats (on the CPU, whose bits are
// the GPU's), and levels, codes and scales are compared. Steps: laws_oracle.cu, and dev/reference/check_rules.py.
//
// If conventions are the same, a code may differ for one reason: the number lies on the bound between two levels as
// nearly as either program's rounding of y = x / scale can tell (near_bound, below). So every code that differs must be
// the neighbour of theirs, and the exact y that near to the bound; of numbers that were not put there on purpose, none
// may differ. What differs by intent is told apart and counted:
//   v's zero     theirs has a code of zero, ours the least level instead; torchao's lin4 has none either
//   small scales torchao's and FlashOptim's are 1e-12 at least, ours and bitsandbytes' as small as fp32 has them
//   fp16 scales  FlashOptim rounds a scale after it was divided by, so its codes are those of our fp32 scales
//   all zero     then the scale is 0 and all decode to 0; torchao's lin4 makes 6e-14 of them
//   ties         where y is a bound, up as in torchao and FlashOptim; bitsandbytes' PyTorch quantiser goes down
//   -1           in no signed dynamic map: code 0, -0.993, is the least of ours and theirs
//   logarithms   adafactor8bit's own go through fp32 logarithms of up to 126: 2^-17 of a binade off
// Not here: bitsandbytes' CUDA kernels keep m's sign where it rounds to zero; its CPU kernel misplaces small codes
// (make_peers.py).
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
enum Bound { MIDDLE, ROOT, SOFTSIGN };  // between two levels: of them, of their roots, of their softsigns

struct Format {
    const char *name, *peer;
    int bits, block;
    bool moment_v;  // kept in v, where no code of zero is written
    Bound bound;
    int shift;
    float units;
};

static const Format formats[] = {
    {"dyn8", "torchao", 8, 256, false, MIDDLE, 0, 1.0f},    {"dyn8", "bitsandbytes", 8, 256, false, MIDDLE, 0, 1.0f},
    {"udyn8", "torchao", 8, 256, true, MIDDLE, 0, 1.0f},    {"udyn8", "bitsandbytes", 8, 256, true, MIDDLE, 0, 1.0f},
    {"de4", "torchao", 4, 128, false, MIDDLE, 0, 1.0f},     {"lin4", "torchao", 4, 128, true, MIDDLE, 0, 1.0f},
    {"e4m3", "torchao", 8, 256, false, MIDDLE, 0, 1.0f},    {"e4m3", "torchao", 8, 256, true, MIDDLE, 0, 1.0f},
    {"nf4", "bitsandbytes", 4, 64, false, MIDDLE, 0, 1.0f}, {"soft8", "flashoptim", 8, 32, false, SOFTSIGN, 127, 1.0f},
    {"sqrt8", "flashoptim", 8, 32, true, ROOT, 0, 255.0f},
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
        const OptimConfig config = resolved({"", "adamw", "fp32", "fp32", m, v, 0.9f, 0.95f, 1e-8f, 0.1f, 1});
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

// y at which a code gives way to the next, for two neighbouring levels, in double.
static double bound_between(Bound bound, double a, double b) {
    if (bound == ROOT) return pow(0.5 * (sqrt(a) + sqrt(b)), 2.0);
    if (bound == MIDDLE) return 0.5 * (a + b);
    double z = a / (1.0 + fabs(a)) + b / (1.0 + fabs(b));
    return z / (2.0 - fabs(z));
}

// Two programs may disagree about a y that is as near to a bound as this share of it. Ours rounds 1 / scale and the
// product, 2 U, and the level's last bit may be off theirs, whose map was made in fp32, by 2 U more. Companding takes
// two more operations of theirs (and a root, whose square doubles all errors, or a softsign, whose slope is up to 2).
// With a scale of 1 only the map is left.
static double near_bound(const Format* format, double top) {
    if (top == 1.0 && format->bound == MIDDLE && strcmp(format->name, "e4m3") != 0) return 2.0 * U;
    return format->bound == MIDDLE ? 4.0 * U : 12.0 * U;
}

// The least scale: torchao and FlashOptim have one.
static double least_scale(const Format* format) {
    return !strcmp(format->peer, "bitsandbytes") ? 0.0 : 1e-12;
}

struct Comparison {
    int differ;  // by a level, the number being as near to the bound as rounding can tell
    int zeros;   // of theirs in v, where ours is the least level
    int64_t elements;
    double worst;  // off a bound, as a share of y
};

// Returns y of element i, which is x[i] over the largest magnitude of its block, and that magnitude in *top.
static double share_of_block(const Format* format, const double* x, int64_t n, int64_t i, double* top) {
    int64_t first = i / format->block * format->block;
    *top = 0.0;
    for (int64_t k = first; k < first + format->block && k < n; k++) *top = fmax(*top, fabs(x[k]));
    return *top > 0.0 ? x[i] / *top : 0.0;
}

static double largest_level(const Floats* map) {
    double largest = 0.0;
    for (int64_t code = 0; code < map->n; code++) largest = fmax(largest, (double)map->x[code]);  // not of NaN
    return largest;
}

static bool level_between(const Floats* map, double a, double b) {
    for (int64_t code = 0; code < map->n; code++) {
        double level = map->x[code];
        if (level > fmin(a, b) && level < fmax(a, b)) return true;
    }
    return false;
}

// These encoders round y, in units of the block's largest, to a multiple of 2^-21 before they look it up (levels.cuh).
static double rounding_of_y(const Format* format) {
    bool even = !strcmp(format->name, "soft8") || !strcmp(format->name, "de4") || !strcmp(format->name, "nf4");
    return even ? 0x1p-22 : 0.0;
}

// Expects that our codes are theirs, or their neighbours where x is so near a bound that rounding decides. x has the
// exact numbers.
static Comparison compare_codes(Test* test, const char* what, const Format* format, const Floats* map,
                                const Codes* ours, const Codes* theirs, const double* x) {
    Comparison result = {0, 0, theirs->n, 0.0};
    double largest = largest_level(map);
    for (int64_t i = 0; i < theirs->n; i++) {
        double a = map->x[ours->code[i]], b = map->x[theirs->code[i]], top;
        double y = largest * share_of_block(format, x, theirs->n, i, &top);
        if (top == 0.0) {
            // A block of zeros. Ours and bitsandbytes' scale is 0; torchao's lin4, with 1e-12, makes it 6e-14.
            double scale = ours->scale[i / format->block], their_scale = theirs->scale[i / format->block];
            double most = format->moment_v ? 1e-13 : 0.0;
            expect(scale == 0.0 && fabs(b * their_scale) <= most, "%s: element %lld is no 0", what, (long long)i);
            continue;
        }
        if (a == b || top < least_scale(format)) continue;
        double bound = bound_between(format->bound, a, b), off = fabs(y - bound), near = near_bound(format, top);
        expect(!level_between(map, a, b), "%s: element %lld: %.9g and %.9g", what, (long long)i, a, b);
        double allowed = near * fabs(y) + rounding_of_y(format);
        if (format->moment_v && b == 0.0) {
            expect(y <= bound + allowed, "%s: element %lld, %.9g, is no zero", what, (long long)i, y);
            result.zeros++;
            continue;
        }
        expect(off <= allowed, "%s: element %lld is %.9g and theirs %.9g for %.9g, %.2g of y off the bound", what,
               (long long)i, a, b, y, off / fabs(y));
        result.worst = fmax(result.worst, off / fabs(y));
        result.differ++;
    }
    return result;
}

// Scales are the same number but for what differs by intent.
static void check_scales(Test* test, const char* what, const Format* format, const Codes* ours, const Codes* theirs) {
    bool fp16 = !strcmp(format->peer, "flashoptim");
    for (int64_t b = 0; b * format->block < theirs->n; b++) {
        double a = (double)ours->scale[b] * (double)format->units, c = (double)theirs->scale[b] * (double)format->units;
        double unit = !strcmp(format->name, "e4m3") ? 448.0 : 1.0;
        bool least = a * unit < least_scale(format) && c * unit <= 1.0001 * least_scale(format);
        double bound = fp16 ? 0x1p-11 * a + 0x1p-25 : 0.0;
        bound += format->units != 1.0f ? 2.0 * U * a : 0.0;  // divided and multiplied again
        expect(least || fabs(a - c) <= bound, "%s: scale %lld is %.9g, theirs %.9g", what, (long long)b, a, c);
    }
}

static Comparison compare_input(Test* test, const Format* format, const char* set) {
    const char* what = formatted("%s.%s.%s", format->peer, format->name, set);
    Floats inputs = peers_floats(peers_find(formatted("input.%s", set))), map = peers_map(format);
    Codes ours = store_ours(format, &inputs);
    Codes theirs =
        peers_stored(format, peers_find(formatted("%s.codes", what)), peers_find(formatted("%s.scales", what)));
    double x[MOST];
    for (int64_t i = 0; i < inputs.n; i++)
        x[i] = format->moment_v ? (double)(inputs.x[i] * inputs.x[i]) : (double)inputs.x[i];
    bool whole = theirs.n == inputs.n / format->block * format->block;  // torchao takes no tail
    expect(theirs.n == inputs.n || (whole && !strcmp(format->peer, "torchao")), "%s: %lld", what, (long long)theirs.n);
    check_scales(test, what, format, &ours, &theirs);
    return compare_codes(test, what, format, &map, &ours, &theirs, x);
}

TEST(peers_stored_numbers) {
    for (const Format& format : formats) {
        Comparison result = compare_input(test, &format, format.moment_v ? "v" : "m");
        expect(result.differ == 0, "%s %s: %d codes differ", format.peer, format.name, result.differ);
        bool has_zero = format.moment_v && strcmp(format.name, "lin4") != 0;
        expect((result.zeros > 0) == has_zero, "%s %s: %d zeros", format.peer, format.name, result.zeros);
    }
}

// Numbers on the bounds and beside them, where roundings show. Of three, one on the bound and one in each last place
// beside it, one may fall to the other side.
TEST(peers_stored_edges) {
    for (const Format& format : formats) {
        if (!strcmp(format.name, "e4m3") && format.moment_v) continue;
        const char* set = formatted("edges.%s", format.name);
        Comparison result = compare_input(test, &format, set);
        int differ = result.differ;
        // With y rounded all three of a bound may.
        bool counted = rounding_of_y(&format) == 0.0;
        expect(!counted || 3 * (differ + result.zeros) <= result.elements, "%s %s: %d codes", format.peer, format.name,
               differ);
        note(test, "%.1s %s %d", format.peer, format.name, differ);
    }
}

// adafactor8bit's logarithmic codes of v, and its scale, 126 + log2 of the largest. Both programs' logarithms are sums
// in fp32 with what lies at 64 or above, so scales may be 2 units in the last place apart, and codes a level where the
// exact place is that near to the middle of two.
TEST(peers_logarithms) {
    const Format format = {"adalog8", "adafactor8bit", 8, 2048, true, MIDDLE, 0, 1.0f};
    Floats inputs = peers_floats(peers_find("input.v"));
    Codes ours = store_ours(&format, &inputs);
    Codes theirs =
        peers_stored(&format, peers_find("adafactor8bit.log8.v.codes"), peers_find("adafactor8bit.log8.v.scales"));
    double scale = theirs.scale[0];
    expect(theirs.n == inputs.n, "%lld", (long long)theirs.n);
    expect(fabs((double)ours.scale[0] - scale) <= 2.0 * ldexp(1.0, (int)floor(log2(scale)) - 23), "%.9g, theirs %.9g",
           (double)ours.scale[0], scale);
    int differ = 0, least = 0;
    for (int64_t i = 0; i < theirs.n; i++) {
        double x = fmax((double)(inputs.x[i] * inputs.x[i]), 0x1p-126);
        double place = (log2(x) + 126.0) / scale * 255.0, near = 255.0 / scale * (ldexp(scale, -23) + 2.4e-6);
        bool same = ours.code[i] == theirs.code[i];
        double bound = fmin((double)ours.code[i], (double)theirs.code[i]) + 0.5;
        expect(same || fabs(place - bound) <= near, "element %lld is %d and theirs %d for %.9g", (long long)i,
               ours.code[i], theirs.code[i], place);
        differ += !same, least += theirs.code[i] == 0;
    }
    expect(least > 0 && differ == 0, "%d at 2^-126, %d differ", least, differ);
    note(test, "%d of %lld differ, scales by %.2g", differ, (long long)theirs.n, fabs((double)ours.scale[0] - scale));
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
        double bound = (exact ? 0.0 : format.bound == MIDDLE ? 4.0 * U : 8.0 * U);
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
