#include "evaluation.h"
#include <glob.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "clock.h"
#include "files.h"
#include "json.h"
#include "text.h"

enum { HEADER_BYTES = 64, VERSION = 1, ROUND = 64 };  // lengths are rounded up to ROUND, so that shapes are few

static const double TELL_SECONDS = 5;  // between two lines of progress

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
    uint32_t longest = 0;
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
        if (length > longest) longest = (uint32_t)length;
    }
    for (uint64_t i = 0; i < used; i++)
        if (e->tokens[i] >= e->vocabulary) return false;
    return used == tokens && longest == (uint32_t)e->longest;
}

// True if prepare.py downloads this task.
static bool is_public(const char* name) {
    return strcmp(name, "hellaswag") == 0 || strcmp(name, "lambada") == 0;
}

static bool evaluation_parse(Evaluation* e, const char* path, int64_t bytes, const Tokenizer* tokenizer, char* error) {
    Header header;
    if (bytes < HEADER_BYTES || memcmp(e->file, "nib-eval", 8) != 0) {
        return data_error(
            error, "%s is no evaluation file; make one with .venv/bin/python data/prepare.py --eval NAME=FILE.jsonl",
            path);
    }
    memcpy(&header, e->file, HEADER_BYTES);
    if (header.version != VERSION) {
        return data_error(error,
                          "%s is an evaluation file of version %u and this program reads %d; make it again with "
                          ".venv/bin/python data/prepare.py",
                          path, header.version, VERSION);
    }
    const uint64_t max = (uint64_t)bytes;
    const bool fits =
        header.examples <= max && header.rows <= max && header.tokens <= max &&
        HEADER_BYTES + 8 * (uint64_t)header.examples + 16 * (uint64_t)header.rows + 2 * header.tokens == max;
    const uint32_t crc = crc32c(crc32c(0, e->file, HEADER_BYTES - 4), e->file + HEADER_BYTES, bytes - HEADER_BYTES);
    if (!fits || crc != header.crc) {
        return data_error(error, "%s is damaged: its %s; make it again with .venv/bin/python data/prepare.py", path,
                          fits ? "checksum differs" : "size is not what its header says");
    }
    if (tokenizer &&
        ((int)header.vocabulary != tokenizer_tokens(tokenizer) || header.fingerprint != fingerprint(tokenizer))) {
        const int vocabulary = tokenizer_tokens(tokenizer);
        return data_error(error,
                          "%s was made for another vocabulary (of %u tokens) than the model's (of %d); make it again "
                          "with .venv/bin/python data/prepare.py --eval %s%s --force --tokenizer %s",
                          path, header.vocabulary, vocabulary, e->name, is_public(e->name) ? "" : "=FILE.jsonl",
                          vocabulary == 256 ? "bytes" : "DIR, the folder of the model's tokenizer");
    }
    e->kind = header.kind == 0 ? EVALUATION_CHOICES : EVALUATION_LAST_WORD;
    e->vocabulary = (int)header.vocabulary, e->examples = (int)header.examples, e->rows = (int)header.rows;
    e->longest = (int)header.longest;
    e->example = (const EvaluationExample*)(e->file + HEADER_BYTES);
    e->row = (const EvaluationRow*)(e->example + e->examples);
    e->tokens = (const uint16_t*)(e->row + e->rows);
    e->first = memory_zero((size_t)e->rows + 1, sizeof(int64_t));
    if (header.kind > 1 || header.examples == 0 || !parts_fit(e, header.tokens)) {
        return data_error(error,
                          "%s contradicts itself: its examples, rows and tokens do not add up; make it again with "
                          ".venv/bin/python data/prepare.py",
                          path);
    }
    return true;
}

static bool is_path(const char* name) {
    return strchr(name, '/') || text_ends(name, ".eval");
}

bool evaluation_is_name(const char* name) {
    return name[strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")] == 0;
}

// Returns the file that a name stands for: of the tokenizer's vocabulary, or the only one if that is not known.
static const char* task_path(const char* name, const Tokenizer* tokenizer) {
    if (is_path(name)) return name;
    if (tokenizer) {
        return text_kept("data/eval/%d-%08x/%s.eval", tokenizer_tokens(tokenizer), fingerprint(tokenizer), name);
    }
    const char* path = text_kept("data/eval/*/%s.eval", name);
    glob_t found;
    if (!evaluation_is_name(name) || glob(path, 0, NULL, &found) != 0) return path;
    if (found.gl_pathc == 1) path = text_kept("%s", found.gl_pathv[0]);
    globfree(&found);
    return path;
}

const char* evaluation_paths(const char* names) {
    const char* all = "";
    if (!*names) return names;
    for (const char* name; (name = text_word(&names, ','));) {
        SCOPED char* path = is_path(name) ? path_absolute(name) : text_copy(name);
        all = text_kept("%s%s%s", all, *all ? "," : "", strchr(path, ',') ? name : path);
    }
    return all;
}

bool evaluation_open(Evaluation* e, const char* name, const Tokenizer* tokenizer, char* error) {
    memset(e, 0, sizeof(*e));
    if (!*name) {
        return data_error(error,
                          "--eval names nothing where a task belongs; type names or paths with one comma between two, "
                          "such as --eval hellaswag,lambada, or --eval-every 0");
    }
    const char* path = task_path(name, tokenizer);
    snprintf(e->name, sizeof(e->name), "%s", path_name(path));
    char* dot = strrchr(e->name, '.');
    if (dot && dot != e->name) *dot = 0;
    text_disarm(e->name, false);
    int64_t bytes = 0;
    if (!is_path(name) && !file_exists(path)) {
        return data_error(error,
                          "--eval %s: there is no %s%s; make it with .venv/bin/python data/prepare.py --eval %s%s, or "
                          "type the path of an evaluation file, such as FOLDER/NAME.eval",
                          name, path, strchr(path, '*') ? ", or more than one" : "",
                          evaluation_is_name(name) ? name : "NAME", is_public(name) ? "" : "=FILE.jsonl");
    }
    e->file = file_read(path, &bytes, error);
    if (!e->file) return data_error(error, "--eval: %s; type the path of an evaluation file", error);
    if (evaluation_parse(e, path, bytes, tokenizer, error)) return true;
    evaluation_close(e);
    return false;
}

void evaluation_close(Evaluation* e) {
    free(e->file), free(e->first);
    memset(e, 0, sizeof(*e));
}

bool evaluation_check(const char* names, const Tokenizer* tokenizer, char* error) {
    for (const char* name; (name = text_word(&names, ','));) {
        Evaluation e;
        if (!evaluation_open(&e, name, tokenizer, error)) return false;
        evaluation_close(&e);
    }
    return true;
}

bool evaluation_possible(const char* names, const char* folder, const char* out, char* error) {
    Tokenizer* tokenizer = !folder || *folder ? tokenizer_open(folder, error) : NULL;
    const bool ok = evaluation_check(names, tokenizer, error);
    tokenizer_close(tokenizer);
    return ok && (!*out || output_possible(out, SCORES, error) || data_error(error, "--eval-out: %s", error));
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

// Lists the rows of the examples that fit. Returns how many they are.
static int rows_that_fit(const Evaluation* e, int T, int* rows) {
    int count = 0, row = 0;
    for (int i = 0; i < e->examples; i++) {
        const bool fits = example_fits(&e->example[i], &e->row[row], T);
        for (uint32_t j = 0; j < e->example[i].rows; j++, row++)
            if (fits) rows[count++] = row;
    }
    return count;
}

EvaluationPlan evaluation_plan(const Evaluation* e, int T, int64_t tokens) {
    EvaluationPlan plan = {memory_take((size_t)e->rows * sizeof(int)), NULL, 0};
    SCOPED int* rows = memory_take((size_t)e->rows * sizeof(int));
    const int count = rows_that_fit(e, T, rows);
    int used = 0;
    for (int length = ROUND; used < count; length += ROUND) {  // rows of a length keep their order
        const int max = length < T ? length : T, first = used;
        for (int i = 0; i < count; i++) {
            const int own = row_length(&e->row[rows[i]], T);
            if (own <= max && own > length - ROUND) plan.order[used++] = rows[i];
        }
        const int64_t fit = tokens / max > 0 ? tokens / max : 1;
        const int B = used - first < fit ? used - first : (int)fit;
        for (int at = first; at < used; at += B) {
            plan.batch = memory_grow(plan.batch, (size_t)(plan.batches + 1) * sizeof(EvaluationBatch));
            plan.batch[plan.batches++] = (EvaluationBatch){B, max, at, used - at < B ? used - at : B};
        }
    }
    return plan;
}

int evaluation_fill(const Evaluation* e, const EvaluationPlan* plan, int batch, int* tokens, int* places,
                    int* targets) {
    const EvaluationBatch* b = &plan->batch[batch];
    int count = 0;
    memset(tokens, 0, (size_t)b->B * (size_t)b->T * sizeof(int));
    for (int i = 0; i < b->count; i++) {
        const int index = plan->order[b->first + i];
        const EvaluationRow* row = &e->row[index];
        const int length = row_length(row, b->T);
        const uint16_t* last = e->tokens + e->first[index] + row->context + row->continuation - 1;
        const uint16_t* first = last - length;
        for (int t = 0; t < length; t++) tokens[i * b->T + t] = first[t];
        for (int t = length - (int)row->continuation; t < length; t++) {
            places[count] = i * b->T + t;
            targets[count++] = first[t + 1];
        }
    }
    return count;
}

void evaluation_take(const Evaluation* e, const EvaluationPlan* plan, int batch, const float* losses,
                     const int* likeliest, EvaluationScore* scores) {
    const EvaluationBatch* b = &plan->batch[batch];
    int at = 0;
    for (int i = 0; i < b->count; i++) {
        const int index = plan->order[b->first + i];
        const EvaluationRow* row = &e->row[index];
        EvaluationScore score = {0, 1, 0};
        for (uint32_t t = 0; t < row->continuation; t++, at++) {
            score.sum -= losses[at];
            score.right = score.right && likeliest[at];
        }
        scores[index] = score;
    }
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

// The standard error of a share of n answers.
static double standard_error(double share, int n) {
    return n > 1 ? sqrt(share * (1 - share) / (n - 1)) : 0;
}

EvaluationResult evaluation_result(const Evaluation* e, const EvaluationScore* scores, int T) {
    EvaluationResult r = {NAN, NAN, NAN, NAN, NAN, 0, 0, 0, T};
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
        if (e->kind == EVALUATION_LAST_WORD) right[0] += scores->right - 1;  // its only choice counted as right
        for (uint32_t j = 0; j < example->rows; j++) {
            sum += scores[j].sum;
            cut = cut || (uint64_t)row[j].context + row[j].continuation > (uint64_t)T + 1;
        }
        r.examples++, r.cut += cut;
    }
    if (!isfinite(sum)) return r;
    const double n = r.examples;
    r.acc = (double)right[0] / n, r.acc_norm = (double)right[1] / n, r.perplexity = exp(-sum / n);
    r.acc_error = standard_error(r.acc, r.examples), r.acc_norm_error = standard_error(r.acc_norm, r.examples);
    return r;
}

const char* evaluation_describe(const Evaluation* e, const EvaluationResult* r, double seconds) {
    const char* out =
        r->left_out == 0 ? "" : text_kept("  %d left out: longer than the context of %d tokens", r->left_out, r->T);
    const char* cut = r->cut == 0 ? "" : text_kept("  %d contexts cut", r->cut);
    const bool words = e->kind == EVALUATION_LAST_WORD;
    const char* more = words ? text_kept("perplexity %.4f", r->perplexity)
                             : text_kept("acc_norm %.4f ± %.4f", r->acc_norm, r->acc_norm_error);
    return text_kept("%s  acc %.4f ± %.4f  %s  %d %s%s%s  %.1f s", e->name, r->acc, r->acc_error, more, r->examples,
                     words ? "last words" : "questions", out, cut, seconds);
}

void evaluation_print(void* context, const Evaluation* e, const EvaluationResult* result, double seconds) {
    (void)context;
    printf("eval     %s\n", evaluation_describe(e, result, seconds));
    fflush(stdout);
}

void evaluation_log(FILE* log, const Evaluation* e, const EvaluationResult* r) {
    json_write_text_member(log, "", "name", e->name);
    fprintf(log, ", \"examples\": %d", r->examples);
    json_write_number_member(log, ", ", "acc", r->acc);
    const bool words = e->kind == EVALUATION_LAST_WORD;
    json_write_number_member(log, ", ", words ? "perplexity" : "acc_norm", words ? r->perplexity : r->acc_norm);
    fprintf(log, ", \"left_out\": %d, \"cut\": %d", r->left_out, r->cut);
}

// Adds a line for each example to a .jsonl file: {"task", "example", "answer", "scores" (ln p of each choice),
// "characters", "choice", "choice_norm"}, or "right" instead of choices for last words, or
// "left_out", with null as scores, where a choice is longer than the context.
static bool evaluation_write(FILE* file, const Evaluation* e, const EvaluationScore* scores, int T, char* error) {
    const EvaluationRow* row = e->row;
    for (int i = 0; i < e->examples; i++) {
        const int count = (int)e->example[i].rows;
        const bool fits = example_fits(&e->example[i], row, T);
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
            fprintf(file, ", \"right\": %s}\n", scores->right ? "true" : "false");
        } else {
            fprintf(file, ", \"choice\": %d, \"choice_norm\": %d}\n", best_choice(row, scores, count, false),
                    best_choice(row, scores, count, true));
        }
        row += count, scores += count;
    }
    return fflush(file) == 0 || data_error(error, "the scores cannot be written: the disk may be full");
}

// Computes the scores of all rows on all processes; false if they must stop.
static bool evaluation_score(const Evaluator* by, const Evaluation* e, EvaluationScore* scores) {
    EvaluationPlan plan = evaluation_plan(e, by->T, by->tokens);
    const size_t room = (size_t)(by->tokens > by->T ? by->tokens : by->T);
    SCOPED int* tokens = memory_take(4 * room * sizeof(int));
    int *places = tokens + room, *targets = tokens + 2 * room, *likeliest = tokens + 3 * room;
    SCOPED float* losses = memory_take(room * sizeof(float));
    bool stopped = false;
    double told = seconds_now();
    for (int i = 0; i < plan.batches && !stopped; i += by->world) {
        const int own = i + by->rank, batch = own < plan.batches ? own : plan.batches - 1;
        const int count = evaluation_fill(e, &plan, batch, tokens, places, targets);
        by->score(by->model, tokens, plan.batch[batch].B, plan.batch[batch].T, places, targets, count, losses,
                  likeliest);
        evaluation_take(e, &plan, batch, losses, likeliest, scores);
        stopped = by->stops(by->model);
        if (by->rank > 0 || seconds_now() < told + TELL_SECONDS) continue;
        fprintf(stderr, "eval     %s  %d of %d batches\n", e->name, i + by->world, plan.batches);
        told = seconds_now();
    }
    SCOPED EvaluationScore* theirs = memory_take((size_t)e->rows * sizeof(*theirs));
    for (int rank = 0; rank < by->world && by->world > 1 && !stopped; rank++) {
        memcpy(theirs, scores, (size_t)e->rows * sizeof(*theirs));
        by->broadcast(by->model, rank, theirs, e->rows * (int64_t)sizeof(*theirs));
        for (int i = rank; i < plan.batches; i += by->world) {
            const int* row = plan.order + plan.batch[i].first;
            for (int j = 0; j < plan.batch[i].count; j++) scores[row[j]] = theirs[row[j]];
        }
    }
    free(plan.order), free(plan.batch);
    return !stopped;
}

// Scores one task.
static bool evaluation_one(const Evaluator* by, const char* name, const Tokenizer* tokenizer, FILE* out, bool* stopped,
                           char* error) {
    Evaluation e;
    const double begin = seconds_now();
    if (!evaluation_open(&e, name, tokenizer, error)) return false;
    bool ok = e.vocabulary <= by->vocabulary ||
              data_error(error, "--eval %s has a vocabulary of %d tokens and the model of %d", name, e.vocabulary,
                         by->vocabulary);
    SCOPED EvaluationScore* scores = memory_zero((size_t)e.rows, sizeof(*scores));
    *stopped = ok && !evaluation_score(by, &e, scores);
    if (ok && !*stopped && by->rank == 0) {
        const EvaluationResult result = evaluation_result(&e, scores, by->T);
        if (result.examples == 0)
            ok = data_error(error,
                            "--eval %s: each choice is longer than the model's context of %d tokens; leave it out",
                            name, by->T);
        if (ok) by->done(by->context, &e, &result, seconds_now() - begin);
        ok = ok && (!out || evaluation_write(out, &e, scores, by->T, error));
    }
    evaluation_close(&e);
    return ok;
}

bool evaluation_run(const Evaluator* by, const char* names, const Tokenizer* tokenizer, const char* out, char* error) {
    FILE* file = *out && by->rank == 0 ? output_open(out, SCORES, error) : NULL;
    if (*out && by->rank == 0 && !file) return data_error(error, "--eval-out: %s", error);
    bool ok = true, stopped = false;
    for (const char* name; ok && !stopped && (name = text_word(&names, ','));) {
        ok = evaluation_one(by, name, tokenizer, file, &stopped, error);
    }
    if (file) fclose(file);
    return ok;
}
