// Unit tests of evaluations: the file and what is refused of it, the batches, the figures, and the scores of tokens.
#include "../../data/evaluation.h"
#include "../../kernels/score.cuh"
#include "cli.h"
#include "kernels.h"

namespace {

// This is an evaluation file in memory; data/README.md lists its numbers.
struct File {
    uint32_t header[16];
    unsigned char bytes[4096];
    int used;
};

void put(File* file, const void* bytes, int count) {
    memcpy(file->bytes + file->used, bytes, count);
    file->used += count;
}

// Returns the checksum of a tokenizer whose tokens are the 256 bytes.
uint32_t bytes_fingerprint() {
    uint32_t crc = 0;
    for (int i = 0; i < 256; i++) {
        const uint32_t length = 1;
        const unsigned char byte = (unsigned char)i;
        crc = crc32c(crc32c(crc, &length, 4), &byte, 1);
    }
    return crc;
}

// Makes examples of `choices` rows each (0 ends the list). Row r has 2 + r % 3 tokens of context and 1 + r % 4 after
// it.
File file_make(uint32_t kind, const uint32_t (*examples)[2]) {
    File file = {};
    uint32_t rows = 0, tokens = 0, longest = 0, count = 0;
    for (; examples[count][0]; count++) rows += examples[count][0];
    put(&file, examples, 8 * (int)count);
    for (uint32_t r = 0; r < rows; r++) {
        const uint32_t row[4] = {2 + r % 3, 1 + r % 4, 3 + r, 5 + 2 * r};
        put(&file, row, 16);
        tokens += row[0] + row[1];
        if (row[0] + row[1] > longest) longest = row[0] + row[1];
    }
    for (uint32_t i = 0; i < tokens; i++) {
        const uint16_t token = (uint16_t)(7 * i % 256);
        put(&file, &token, 2);
    }
    memcpy(file.header, "nib-eval", 8);
    const uint32_t rest[] = {1, kind, 256, bytes_fingerprint(), count, rows, tokens, 0, longest};
    memcpy(file.header + 2, rest, sizeof(rest));
    return file;
}

// Writes a file, without its last `cut` bytes, and with the checksum of `sealed`: of itself, or of what it was before.
void write_sealed(const File* file, const File* sealed, const char* folder, const char* name, int cut = 0) {
    static unsigned char all[sizeof(File)];
    const uint32_t crc = crc32c(crc32c(0, sealed->header, 60), sealed->bytes, sealed->used);
    memcpy(all, file->header, 60), memcpy(all + 60, &crc, 4), memcpy(all + 64, file->bytes, file->used);
    ::put(joined(folder, name), all, 64 + file->used - cut);
}

const uint32_t FOUR[][2] = {{4, 2}, {3, 0}, {4, 3}, {2, 1}, {0, 0}};
const uint32_t WORDS[][2] = {{1, 0}, {1, 0}, {1, 0}, {1, 0}, {1, 0}, {0, 0}};

FOLDER_TEST(evaluation_file) {
    Tokenizer* bytes = tokenizer_open(nullptr, error);
    Evaluation e;
    struct Case {
        const char* what;
        int word;  // of the header that is changed, 16: none
        uint32_t value;
        int byte, cut;  // of the parts: the byte that is changed (-1: none), and how many at the end are missing
        bool seal;      // the checksum follows the change
        const char* says;
    };
    const Case cases[] = {{"whole", 16, 0, -1, 0, true, nullptr},
                          {"another beginning", 0, 1, -1, 0, true, "no whole evaluation file"},
                          {"another version", 2, 9, -1, 0, true, "is of version 9 and this program reads 1"},
                          {"another kind", 3, 2, -1, 0, true, "no whole evaluation file"},
                          {"another vocabulary", 4, 300, -1, 0, true, "another vocabulary (of 300 tokens)"},
                          {"other tokens", 5, 1, -1, 0, true, "another vocabulary"},
                          {"no example", 6, 0, -1, 0, true, "no whole evaluation file"},
                          {"more rows", 7, 14, -1, 0, true, "no whole evaluation file"},
                          {"as many as there can be", 7, 0xffffffffu, -1, 0, true, "no whole evaluation file"},
                          {"cut", 16, 0, -1, 2, true, "no whole evaluation file"},
                          {"one byte of the header", 16, 0, -1, 60, true, "no whole evaluation file"},
                          {"another token", 16, 0, 250, 0, false, "no whole evaluation file"},
                          {"an answer that is no choice", 16, 0, 4, 0, true, "no whole evaluation file"},
                          {"an example without rows", 16, 0, 0, 0, true, "no whole evaluation file"},
                          {"a row without context", 16, 0, 32, 0, true, "no whole evaluation file"}};
    const char* path = joined(work, "task.eval");
    for (const Case& c : cases) {
        File file = file_make(0, FOUR), before = file;
        if (c.word < 16) file.header[c.word] = c.value;
        if (c.byte >= 0) file.bytes[c.byte] = c.byte == 4 ? 4 : c.byte == 250 ? 99 : 0;
        write_sealed(&file, c.seal ? &file : &before, work, "task.eval", c.cut);
        const bool opened = evaluation_open(&e, path, bytes, error);
        expect(opened == !c.says, "%s: %s", c.what, opened ? "opened" : error);
        if (!opened && c.says) expect(strstr(error, c.says) && strstr(error, path), "%s: %s", c.what, error);
        if (opened) {
            expect(strcmp(e.name, "task") == 0 && e.examples == 4 && e.rows == 13, "%s: %d rows", e.name, e.rows);
            evaluation_close(&e);
        }
    }
    expect(!evaluation_open(&e, "nowhere", bytes, error) && strstr(error, "data/prepare.py --eval nowhere"), "%s",
           error);
}

}  // namespace

// commands.txt uses these files.
void write_evaluations(const char* folder) {
    File four = file_make(0, FOUR), words = file_make(1, WORDS), other = four;
    other.header[4] = 50257;
    write_sealed(&four, &four, folder, "four.eval"), write_sealed(&words, &words, folder, "words.eval");
    write_sealed(&other, &other, folder, "gpt2.eval");
}

namespace {

Evaluation evaluation_make(Test* test, uint32_t kind, const uint32_t (*examples)[2]) {
    const char* work = work_folder();
    Tokenizer* bytes = tokenizer_open(nullptr, error);
    Evaluation e;
    File file = file_make(kind, examples);
    write_sealed(&file, &file, work, "task.eval");
    expect(evaluation_open(&e, joined(work, "task.eval"), bytes, error), "%s", error);
    return e;
}

// Stands for the model's loss at a place: it depends on the tokens from the window's beginning to there, and the
// target.
template <class Token>
uint32_t loss_of(const Token* tokens, int count, int target) {
    uint32_t crc = 0;
    for (int i = 0; i < count; i++) {
        const int token = tokens[i];
        crc = crc32c(crc, &token, sizeof(token));
    }
    return crc32c(crc, &target, sizeof(target)) % 1000;
}

// Whatever the batches, each row's score is the sum of the losses at its continuation, with as much before it as the
// context holds. Batches hold what they may, and rows whose example does not fit are not scored.
TEST(evaluation_batches) {
    Evaluation e = evaluation_make(test, 0, FOUR);
    const bool fits[] = {false, true, false, false};  // in 3 tokens: the choices of rows 3, 7 and 11 have 4
    for (int T : {3, 4, 64, 100}) {
        for (int tokens : {1, 64, 130, 5000}) {
            EvaluationPass pass;
            expect(evaluation_begin(&pass, &e, T, tokens, error), "%s", error);
            int rows = 0;
            for (int b = 0; b < pass.batches; b++) {
                const EvaluationBatch* batch = evaluation_fill(&pass, b);
                rows += batch->count;
                expect(batch->T <= T && batch->count > 0 && batch->count <= batch->B, "a batch of %d x %d", batch->B,
                       batch->T);
                expect(batch->B == 1 || batch->B * batch->T <= tokens, "%d x %d tokens", batch->B, batch->T);
                for (int i = 0; i < pass.count; i++) {
                    const int first = pass.places[i] / batch->T * batch->T;
                    const uint32_t loss = loss_of(pass.tokens + first, pass.places[i] - first + 1, pass.targets[i]);
                    pass.losses[i] = (float)loss, pass.likeliest[i] = loss > 200;
                }
                evaluation_take(&pass);
            }
            expect(rows == (T > 3 ? 13 : 3), "%d rows in all batches", rows);
            for (int r = 0, i = 0, end = 4; r < e.rows; r++) {
                const EvaluationRow* row = &e.row[r];
                const uint16_t* own = e.tokens + e.first[r];
                const int all = (int)(row->context + row->continuation), begin = all - 1 > T ? all - 1 - T : 0;
                EvaluationScore want = {0, 1};
                if (r == end) end += (int)e.example[++i].rows;
                for (int t = (int)row->context; t < all; t++) {
                    const uint32_t loss = t > begin ? loss_of(own + begin, t - begin, own[t]) : 0;
                    want.sum -= loss, want.right = want.right && loss > 200;
                }
                if (T == 3 && !fits[i]) want = {0, 0};
                expect(memcmp(&pass.scores[r], &want, sizeof(want)) == 0, "T %d, %d tokens, row %d: %g, want %g", T,
                       tokens, r, pass.scores[r].sum, want.sum);
            }
        }
    }
}

// The figures are those computed by hand. Row r has 3 + r characters and 5 + 2 r bytes.
TEST(evaluation_figures) {
    Evaluation e = evaluation_make(test, 0, FOUR);
    // Choices by sum: 2 (right), the first of equal ones, 0 (right), 0 and 0. By characters: 3, 1, 0 and 0, all wrong.
    const double sums[] = {-9, -8, -3, -3.5, -2, -2, -5, -1, -4, -5, -9, -3, -3.218};
    EvaluationScore scores[16];
    for (int i = 0; i < 13; i++) scores[i] = {sums[i], 0};
    EvaluationPass pass = {}, small = {};
    pass.task = small.task = &e, pass.scores = small.scores = scores, pass.T = 64, small.T = 3;
    EvaluationResult r = evaluation_result(&pass);
    const EvaluationFigure *acc = &r.figure[0], *other = &r.figure[1];
    expect(acc->value == 0.5, "acc %g", acc->value);
    expect(fabs(acc->error - sqrt(0.25 / 3)) < 1e-15, "its error %g", acc->error);
    expect(other->value == 0, "acc_norm %g", other->value);
    expect(r.examples == 4 && r.left_out == 0 && r.cut == 0, "%d, %d, %d", r.examples, r.left_out, r.cut);
    // In a context of 3 tokens a choice of 4 does not fit, and other rows lose the beginning of their contexts.
    r = evaluation_result(&small);
    expect(acc->value == 1 && r.examples == 1 && r.left_out == 3 && r.cut == 1, "%g: %d, %d, %d", acc->value,
           r.examples, r.left_out, r.cut);
    const char* line = evaluation_describe(&r, 1);
    expect(strstr(line, "1 questions  3 left out: longer than the context of 3 tokens  1 cont"), "%s", line);
    scores[5].sum = NAN;
    r = evaluation_result(&pass);
    expect(isnan(acc->value) && isnan(other->value), "NaN counts as an answer");
    e = evaluation_make(test, 1, WORDS);
    for (int i = 0; i < 5; i++) scores[i] = {-1.0 - i, i < 2 ? 1.0 : 0.0};
    r = evaluation_result(&pass);
    expect(acc->value == 0.4 && fabs(other->value - exp(3)) < 1e-12, "acc %g, perplexity %g", acc->value, other->value);
}

// Scores are compared with double. Of equal logits the first is the likeliest.
void score_case(Test* test, double* worst, const Device* dev, int R, int V, int Vp) {
    Room room(dev);
    float *logits = random_floats((int64_t)R * Vp, 5, 6), *want = room.host<float>(R);
    int *targets = room.host<int>(R), *right = room.host<int>(R);
    for (int r = 0; r < R; r++) {
        float* row = logits + (int64_t)r * Vp;
        for (int v = V; v < Vp; v++) row[v] = NAN;  // the padding is never used
        int best = 0;
        for (int v = 1; v < V; v++)
            if (row[v] > row[best]) best = v;
        const int other = (best + 1 + r % 5) % V;
        if (r % 4 == 3) row[other] = row[best];  // a tie, of which the target is the second
        targets[r] = r % 4 == 3 ? (other > best ? other : best) : r % 2 ? best : other;
        right[r] = r % 4 == 1;
        double sum = 0;
        for (int v = 0; v < V; v++) sum += exp((double)row[v] - row[best]);
        want[r] = (float)(log(sum) - ((double)row[targets[r]] - row[best]));
    }
    float* losses = room.device<float>(R);
    int* flags = room.device<int>(R);
    score(dev, losses, flags, room.to_device(logits, (int64_t)R * Vp), room.to_device(targets, R), R, V, Vp);
    close_to(test, worst, "losses", room.to_host(losses, R), want, R, 16 * EPS32, sqrt((double)V) * EPS32);
    const int* likeliest = room.to_host(flags, R);
    for (int r = 0; r < R; r++)
        expect(likeliest[r] == right[r], "row %d: the likeliest? %d, want %d", r, likeliest[r], right[r]);
}

template <typename X>
void gather_case(Test* test, const Device* dev) {
    const int N = 9, C = 192, places[] = {8, 0, 3, 3};
    Room room(dev);
    X rounded[N * C], *out = room.device<X>(4 * C);
    for (int i = 0; i < N * C; i++) rounded[i] = from_float<X>(test_uniform(8, i));
    for_each(dev, GatherRows<X>{out, room.to_device(rounded, N * C), room.to_device(places, 4), C}, 4 * C);
    const X* got = room.to_host(out, 4 * C);
    for (int r = 0; r < 4; r++) expect(memcmp(got + r * C, rounded + places[r] * C, C * sizeof(X)) == 0, "row %d", r);
}

OPERATOR_TEST(evaluation_scores) {
    score_case(test, &worst, &dev, 13, 21, 128);
    score_case(test, &worst, &dev, 9, 50257, 50304);
    gather_case<float>(test, &dev);
}

OPERATOR_TEST(evaluation_scores_gpu) {
    score_case(test, &worst, &dev, 13, 21, 128);
    score_case(test, &worst, &dev, 70, 50257, 50304);
    gather_case<float>(test, &dev);
    gather_case<bf16>(test, &dev);
    const int R = 24, C = 768, Vp = 1024;  // bf16 operands, fp32 logits
    Array<bf16> inp(&dev, R * C, 1, 1), wte(&dev, Vp * C, 2, 1);
    Array<float> out(&dev, R * Vp);
    float* want = floats(R * Vp);
    matmul_forward_cpu(want, nullptr, inp.host, wte.host, nullptr, R, C, Vp);
    check_output(test, &worst, "logits", &out, nullptr, want, product_bound(C, 1),
                 [&] { matmul_forward<bf16>(&dev, out.device, nullptr, inp.device, wte.device, nullptr, R, C, Vp); });
}

}  // namespace
