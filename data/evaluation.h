// Evaluations: files of questions in tokens (data/README.md, "An evaluation file"), the batches in which a model scores
// them, and the figures that follow from the scores.
//
// A question has one row for each choice, or a single row where its last word is asked for. A row is scored by the sum
// of ln p over its continuation. Rows are sorted by length and cut into batches of one shape each, whatever the number
// of processes that share them; so the scores are the same to the bit.
#pragma once
#include "tokenizer.h"
C_LINKAGE_BEGIN

typedef enum { EVALUATION_CHOICES, EVALUATION_LAST_WORD } EvaluationKind;

typedef struct {
    uint32_t rows, answer;  // choices, and which of them is right
} EvaluationExample;

typedef struct {
    uint32_t context, continuation, characters, bytes;  // tokens, tokens, characters and bytes of the choice
} EvaluationRow;

typedef struct {
    char name[64];  // of the task: the file's, without .eval
    EvaluationKind kind;
    int vocabulary, examples, rows;
    const EvaluationExample* example;  // (examples)
    const EvaluationRow* row;          // (rows)
    const uint16_t* tokens;            // of all rows
    int64_t* first;                    // (rows) where a row's tokens begin
    char* file;                        // its bytes, into which these point
} Evaluation;

// Opens NAME.eval in the tokenizer's folder of data/eval, or the file itself if the name has a slash or ends in .eval.
// Refuses a damaged file, and one that was made for another vocabulary than the tokenizer's (NULL: unknown).
bool evaluation_open(Evaluation* evaluation, const char* name, const Tokenizer* tokenizer, char* error);
void evaluation_close(Evaluation* evaluation);
// Returns whether all these tasks can be opened, with this tokenizer (NULL: unknown) and for a model of V tokens, and
// --eval-out ("": none) written. Adds their checksums to *crc.
bool evaluation_check(const char* names, const Tokenizer* tokenizer, int V, const char* out, uint32_t* crc,
                      char* error);

// A batch of B sequences of T tokens holds the rows [first, first + count) of `order`; count is at most B.
typedef struct {
    int B, T, first, count;
} EvaluationBatch;

// The score of a row, as doubles, so that processes can add theirs.
typedef struct {
    double sum;    // of ln p
    double right;  // 1 if each token of the continuation was the likeliest
} EvaluationScore;

// A task that a model scores batch by batch: evaluation_fill, the model, evaluation_take.
typedef struct {
    const Evaluation* task;
    int T;       // the model's context
    int* order;  // (rows) by length
    EvaluationBatch* batch;
    int batches;
    EvaluationScore* scores;  // (rows) 0 until computed
    // The batch that was filled in last: tokens (B, T), and `count` places that are scored, as indices into these, with
    // the token that follows each. The model writes the loss (-ln p) at each place and whether that token is likeliest.
    int filled, count;
    int *tokens, *places, *targets, *likeliest;
    float* losses;
} EvaluationPass;
// Plans the batches, of at most `tokens` tokens each, for a context of T tokens. Examples with a longer choice are left
// out; false with a sentence if all are.
bool evaluation_begin(EvaluationPass* pass, const Evaluation* task, int T, int64_t tokens, char* error);
const EvaluationBatch* evaluation_fill(EvaluationPass* pass, int batch);
void evaluation_take(EvaluationPass* pass);
void evaluation_end(EvaluationPass* pass);

// A figure with its name in log.jsonl, and its standard error where it is a share of right answers.
typedef struct {
    const char* name;
    double value, error;
} EvaluationFigure;
// data/README.md defines a result's figures: acc, acc_norm, perplexity. They are NaN if a score is not finite.
typedef struct {
    const Evaluation* task;
    int T, examples, left_out, cut;  // the context; scored, with a choice longer than T, with a context that was cut
    EvaluationFigure figure[2];
} EvaluationResult;
EvaluationResult evaluation_result(const EvaluationPass* pass);

// Returns a line for the terminal, kept as by text_kept.
const char* evaluation_describe(const EvaluationResult* result, double seconds);
// Writes the members of a line of log.jsonl that follow "type": "eval".
void evaluation_log(FILE* log, const EvaluationResult* result);
// Empties or makes the file of --eval-out and opens it as *file, which is NULL if the path is "".
bool evaluation_out(FILE** file, const char* path, char* error);
// Adds a line for each example to it: {"task", "example", "answer", "scores" (ln p of each choice), "characters",
// "choice", "choice_norm"}, or "right" instead of choices for last words, or "left_out", with null as scores, where a
// choice is longer than the context.
bool evaluation_write(FILE* file, const EvaluationPass* pass, char* error);

C_LINKAGE_END
