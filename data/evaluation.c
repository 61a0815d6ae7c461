#include "evaluation.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "files.h"
#include "json.h"
#include "text.h"

enum { HEADER_BYTES = 64, VERSION = 1, ROUND = 64 };  // lengths are rounded up to ROUND, so that shapes are few

static const char SCORES[] = "{\"task\": ";  // the first bytes of --eval-out's file

typedef struct {
    char magic[8];
    uint32_t version, kind, vocabulary, fingerprint, examples, rows;
    uint64_t tokens;
    uint32_t longest, zero[4], crc;
} Header;
_Static_assert(sizeof(Header) == HEADER_BYTES, "as data/README.md says");

// The checksum of the vocabulary, as data/README.md defines it.
static uint32_t fingerprint(const Tokenizer* tokenizer) {
    uint32_t crc = 0;
    for (int token = 0; token < tokenizer_tokens(tokenizer); token++) {
        int bytes = 0;
        const char* text = tokenizer_decode(tokenizer, token, &bytes);
        const uint32_t length = (uint32_t)bytes;
        crc = crc32c(crc32c(crc, &length, sizeof(length)), text, bytes);
    }
    return crc;
}

// True if examples and rows add up and every number is in its range; fills in `first`.
static bool parts_fit(Evaluation* e, uint64_t tokens) {
    uint64_t rows = 0, used = 0;
    for (int i = 0; i < e->examples; i++) {
        const EvaluationExample* example = &e->example[i];
        if (example->rows == 0 || example->answer >= example->rows) return false;
        if (e->kind == EVALUATION_LAST_WORD && example->rows != 1) return false;
        rows += example->rows;
    }
    if (rows != (uint64_t)e->rows) return false;
    for (int i = 0; i < e->rows; i++) {
        const EvaluationRow* row = &e->row[i];
        const uint64_t length = (uint64_t)row->context + row->continuation;
        if (row->context == 0 || row->continuation == 0 || length > tokens - used) return false;
        e->first[i] = (int64_t)used;
        used += length;
    }
    for (uint64_t i = 0; i < used; i++)
        if (e->tokens[i] >= e->vocabulary) return false;
    return used == tokens;
}

// Takes the parts of the file. Returns NULL, or what is wrong with it.
static const char* evaluation_parse(Evaluation* e, int64_t bytes, const Tokenizer* tokenizer) {
    static const char wrong[] = "is no whole evaluation file";
    Header header = {0};
    memcpy(&header, e->file, bytes < HEADER_BYTES ? (size_t)bytes : HEADER_BYTES);
    const uint64_t max = (uint64_t)bytes;
    const bool named = memcmp(header.magic, "nib-eval", 8) == 0;
    if (named && header.version != VERSION)
        return text_kept("is of version %u and this program reads %d", header.version, VERSION);
    const bool fits =
        named && header.kind <= 1 && header.examples > 0 && header.examples <= max && header.rows <= max &&
        header.tokens <= max &&
        HEADER_BYTES + 8 * (uint64_t)header.examples + 16 * (uint64_t)header.rows + 2 * header.tokens == max;
    if (!fits) return wrong;
    const uint32_t crc = crc32c(crc32c(0, e->file, HEADER_BYTES - 4), e->file + HEADER_BYTES, bytes - HEADER_BYTES);
    e->kind = header.kind == 0 ? EVALUATION_CHOICES : EVALUATION_LAST_WORD;
    e->vocabulary = (int)header.vocabulary, e->examples = (int)header.examples, e->rows = (int)header.rows;
    e->example = (const EvaluationExample*)(e->file + HEADER_BYTES);
    e->row = (const EvaluationRow*)(e->example + e->examples);
    e->tokens = (const uint16_t*)(e->row + e->rows);
    e->first = memory_zero((size_t)e->rows + 1, sizeof(int64_t));
    if (crc != header.crc || !parts_fit(e, header.tokens)) return wrong;
    const int vocabulary = tokenizer ? tokenizer_tokens(tokenizer) : e->vocabulary;
    if (e->vocabulary == vocabulary && (!tokenizer || header.fingerprint == fingerprint(tokenizer))) return NULL;
    return text_kept("was made for another vocabulary (of %u tokens) than the model's (of %d)", header.vocabulary,
                     vocabulary);
}

static bool is_path(const char* name) {
    return strchr(name, '/') || text_ends(name, ".eval");
}

// Returns the file that a name stands for (text_kept).
static const char* evaluation_path(const char* name, const Tokenizer* tokenizer) {
    if (is_path(name)) return name;
    if (!tokenizer) return text_kept("data/eval/VOCABULARY/%s.eval", name);
    return text_kept("data/eval/%d-%08x/%s.eval", tokenizer_tokens(tokenizer), fingerprint(tokenizer), name);
}

// Returns what to type so that prepare.py makes a task for the tokenizer.
static const char* how_made(const char* name, const Tokenizer* tokenizer) {
    const int tokens = tokenizer ? tokenizer_tokens(tokenizer) : 50257;  // GPT-2's, which prepare.py takes by itself
    const char* other = tokens == 256 ? " --tokenizer bytes" : " --tokenizer DIR, the folder of the model's tokenizer";
    return text_kept(".venv/bin/python data/prepare.py --eval %s%s --force%s", name,
                     text_among(name, "hellaswag lambada", ' ') ? "" : "=FILE.jsonl", tokens == 50257 ? "" : other);
}

bool evaluation_open(Evaluation* e, const char* name, const Tokenizer* tokenizer, char* error) {
    memset(e, 0, sizeof(*e));
    if (!*name) {
        return data_error(error,
                          "--eval names nothing where a task belongs; type names or paths with one comma between two, "
                          "such as --eval hellaswag,lambada, or --eval-every 0");
    }
    const char* path = evaluation_path(name, tokenizer);
    snprintf(e->name, sizeof(e->name), "%s", basename(path));
    char* dot = strrchr(e->name, '.');
    if (dot && dot != e->name) *dot = 0;
    text_disarm(e->name, false);
    int64_t bytes = 0;
    if (!is_path(name) && !file_exists(path)) {
        return data_error(error,
                          "--eval %s: there is no %s; type the path of an evaluation file, such as FOLDER/NAME.eval, "
                          "or make it with %s",
                          name, path, how_made(e->name, tokenizer));
    }
    e->file = file_read(path, &bytes, error);
    if (!e->file) return data_error(error, "--eval: %s; type the path of an evaluation file", error);
    const char* wrong = evaluation_parse(e, bytes, tokenizer);
    if (!wrong) return true;
    data_error(error, "%s %s; type --eval %s after %s", path, wrong, e->name, how_made(e->name, tokenizer));
    evaluation_close(e);
    return false;
}

void evaluation_close(Evaluation* e) {
    free(e->file), free(e->first);
    memset(e, 0, sizeof(*e));
}

bool evaluation_check(const char* names, const Tokenizer* tokenizer, int V, const char* out, uint32_t* crc,
                      char* error) {
    for (const char* name; (name = text_word(&names, ','));) {
        Evaluation e;
        if (!evaluation_open(&e, name, tokenizer, error)) return false;
        const int needs = e.vocabulary;
        *crc = crc32c(*crc, e.file, HEADER_BYTES);  // which has that of the rest
        evaluation_close(&e);
        if (needs <= V) continue;
        return data_error(error, "--eval %s has a vocabulary of %d tokens and the model of %d", name, needs, V);
    }
    const bool there = file_exists(out), folder = folder_exists(out);
    const char* place = there ? out : path_in(path_parent(out), ".");
    if (*out && (folder || access(place, W_OK) != 0)) {
        return data_error(error, "--eval-out %s cannot be written: %s; name a file that can", out,
                          folder ? "it is a folder" : strerror(errno));
    }
    char begin[sizeof(SCORES)] = "";
    FILE* file = there ? fopen(out, "re") : NULL;
    const bool own = !file || fread(begin, 1, sizeof(begin) - 1, file) == 0 || strcmp(begin, SCORES) == 0;
    if (file) fclose(file);
    return own || data_error(error, "--eval-out %s holds something else already; name a new file", out);
}

// Tokens of a row that a model with a context of T reads: all but the last one, which is only predicted.
static int row_length(const EvaluationRow* row, int T) {
    const int64_t length = (int64_t)row->context + row->continuation - 1;
    return length < T ? (int)length : T;
}

// True if a model with a context of T reads all of each choice of an example, whose first row is `row`.
static bool example_fits(const EvaluationExample* example, const EvaluationRow* row, int T) {
    bool fits = true;
    for (uint32_t i = 0; i < example->rows; i++) fits = fits && row[i].continuation <= (uint32_t)T;
    return fits;
}

bool evaluation_begin(EvaluationPass* pass, const Evaluation* e, int T, int64_t tokens, char* error) {
    const size_t room = (size_t)(tokens > T ? tokens : T);
    *pass = (EvaluationPass){.task = e, .T = T};
    pass->order = memory_take((size_t)e->rows * sizeof(int));
    pass->scores = memory_zero((size_t)e->rows, sizeof(EvaluationScore));
    pass->tokens = memory_take(4 * room * sizeof(int));
    pass->places = pass->tokens + room, pass->targets = pass->places + room, pass->likeliest = pass->targets + room;
    pass->losses = memory_take(room * sizeof(float));
    int used = 0;
    for (int length = ROUND; length < T + ROUND; length += ROUND) {  // rows of a length keep their order
        const int max = length < T ? length : T, first = used;
        for (int i = 0, row = 0; i < e->examples; row += (int)e->example[i++].rows) {
            const bool fits = example_fits(&e->example[i], &e->row[row], T);
            for (int r = row; r < row + (int)e->example[i].rows && fits; r++) {
                const int own = row_length(&e->row[r], T);
                if (own <= max && own > length - ROUND) pass->order[used++] = r;
            }
        }
        const int64_t fit = tokens / max > 0 ? tokens / max : 1;
        const int B = used - first < fit ? used - first : (int)fit;
        for (int at = first; at < used; at += B) {
            pass->batch = memory_grow(pass->batch, (size_t)(pass->batches + 1) * sizeof(EvaluationBatch));
            pass->batch[pass->batches++] = (EvaluationBatch){B, max, at, used - at < B ? used - at : B};
        }
    }
    return used > 0 ||
           data_error(error, "--eval %s: each choice is longer than the model's context of %d tokens; leave it out",
                      e->name, T);
}

const EvaluationBatch* evaluation_fill(EvaluationPass* pass, int batch) {
    const Evaluation* e = pass->task;
    const EvaluationBatch* b = &pass->batch[batch];
    pass->filled = batch, pass->count = 0;
    memset(pass->tokens, 0, (size_t)b->B * (size_t)b->T * sizeof(int));
    for (int i = 0; i < b->count; i++) {
        const int index = pass->order[b->first + i];
        const EvaluationRow* row = &e->row[index];
        const int length = row_length(row, b->T);
        const uint16_t* last = e->tokens + e->first[index] + row->context + row->continuation - 1;
        const uint16_t* first = last - length;
        for (int t = 0; t < length; t++) pass->tokens[i * b->T + t] = first[t];
        for (int t = length - (int)row->continuation; t < length; t++) {
            pass->places[pass->count] = i * b->T + t;
            pass->targets[pass->count++] = first[t + 1];
        }
    }
    return b;
}

void evaluation_take(EvaluationPass* pass) {
    const EvaluationBatch* b = &pass->batch[pass->filled];
    int at = 0;
    for (int i = 0; i < b->count; i++) {
        const int index = pass->order[b->first + i];
        EvaluationScore score = {0, 1};
        for (uint32_t t = 0; t < pass->task->row[index].continuation; t++, at++) {
            score.sum -= pass->losses[at];
            score.right = score.right && pass->likeliest[at];
        }
        pass->scores[index] = score;
    }
}

void evaluation_end(EvaluationPass* pass) {
    free(pass->order), free(pass->batch), free(pass->scores), free(pass->tokens), free(pass->losses);
}

// The choice with the largest score, the first of equal ones. With `norm` a sum is divided by the choice's characters.
static int best_choice(const EvaluationRow* row, const EvaluationScore* score, int count, bool norm) {
    int best = 0;
    double largest = -INFINITY;
    for (int i = 0; i < count; i++) {
        const double value = score[i].sum / (norm && row[i].characters > 0 ? row[i].characters : 1);
        if (value > largest) largest = value, best = i;
    }
    return best;
}

EvaluationResult evaluation_result(const EvaluationPass* pass) {
    const Evaluation* e = pass->task;
    const EvaluationScore* scores = pass->scores;
    const int T = pass->T;
    const bool words = e->kind == EVALUATION_LAST_WORD;
    EvaluationResult r = {e, T, 0, 0, 0, {{"acc", NAN, NAN}, {words ? "perplexity" : "acc_norm", NAN, NAN}}};
    int64_t right[2] = {0};
    double sum = 0;
    const EvaluationRow* row = e->row;
    for (int i = 0; i < e->examples; row += e->example[i].rows, scores += e->example[i].rows, i++) {
        const EvaluationExample* example = &e->example[i];
        bool cut = false;
        if (!example_fits(example, row, T)) {
            r.left_out++;
            continue;
        }
        for (int norm = 0; norm < 2; norm++)
            right[norm] += best_choice(row, scores, (int)example->rows, norm) == (int)example->answer;
        if (words) right[0] += scores->right > 0 ? 0 : -1;  // its only choice counted as right
        for (uint32_t j = 0; j < example->rows; j++) {
            sum += scores[j].sum;
            cut = cut || (uint64_t)row[j].context + row[j].continuation > (uint64_t)T + 1;
        }
        r.examples++, r.cut += cut;
    }
    if (!isfinite(sum)) return r;
    const double n = r.examples;
    for (int i = 0; i < 2; i++) {
        const double share = (double)right[i] / n;
        r.figure[i].value = share, r.figure[i].error = n > 1 ? sqrt(share * (1 - share) / (n - 1)) : 0;
    }
    if (words) r.figure[1].value = exp(-sum / n);
    return r;
}

const char* evaluation_describe(const EvaluationResult* r, double seconds) {
    const bool words = r->task->kind == EVALUATION_LAST_WORD;
    const EvaluationFigure *acc = &r->figure[0], *other = &r->figure[1];
    const char* line =
        text_kept("%s  acc %.4f ± %.4f  %s %.4f", r->task->name, acc->value, acc->error, other->name, other->value);
    if (!words) text_add(&line, " ± %.4f", other->error);
    text_add(&line, "  %d %s", r->examples, words ? "last words" : "questions");
    if (r->left_out) text_add(&line, "  %d left out: longer than the context of %d tokens", r->left_out, r->T);
    if (r->cut) text_add(&line, "  %d contexts cut", r->cut);
    text_add(&line, "  %.1f s", seconds);
    return line;
}

void evaluation_log(FILE* log, const EvaluationResult* r) {
    json_write_text_member(log, ", ", "name", r->task->name);
    fprintf(log, ", \"examples\": %d", r->examples);
    for (int i = 0; i < 2; i++) json_write_number_member(log, ", ", r->figure[i].name, r->figure[i].value);
    fprintf(log, ", \"left_out\": %d, \"cut\": %d", r->left_out, r->cut);
}

bool evaluation_out(FILE** file, const char* path, char* error) {
    *file = *path ? fopen(path, "we") : NULL;
    return *file || !*path ||
           data_error(error, "--eval-out %s cannot be written: %s; name a file that can", path, strerror(errno));
}

bool evaluation_write(FILE* file, const EvaluationPass* pass, char* error) {
    const Evaluation* e = pass->task;
    const EvaluationScore* scores = pass->scores;
    const EvaluationRow* row = e->row;
    for (int i = 0; i < e->examples; i++) {
        const int count = (int)e->example[i].rows;
        const bool fits = example_fits(&e->example[i], row, pass->T);
        json_write_text_member(file, "{", "task", e->name);
        fprintf(file, ", \"example\": %d, \"answer\": %u, \"scores\": [", i, e->example[i].answer);
        for (int j = 0; j < count; j++) {
            if (j) fputs(", ", file);
            json_write_number(file, fits ? scores[j].sum : NAN);
        }
        for (int j = 0; j < count; j++) fprintf(file, "%s%u", j ? ", " : "], \"characters\": [", row[j].characters);
        fputc(']', file);
        if (!fits) {
            fputs(", \"left_out\": true}\n", file);
        } else if (e->kind == EVALUATION_LAST_WORD) {
            fprintf(file, ", \"right\": %s}\n", scores->right > 0 ? "true" : "false");
        } else {
            fprintf(file, ", \"choice\": %d, \"choice_norm\": %d}\n", best_choice(row, scores, count, false),
                    best_choice(row, scores, count, true));
        }
        row += count, scores += count;
    }
    return fflush(file) == 0 || data_error(error, "the scores cannot be written: the disk may be full");
}
