// Prompts as tokens, and samples as text. Drawing the tokens is the trainer's part.
#pragma once
#include "tokenizer.h"
C_LINKAGE_BEGIN

typedef struct {
    const char** text;  // NULL on processes that only compute
    int* length;        // of each in tokens, at least 1
    int* tokens;        // of all, one after another; each begins with the end-of-text token, if the tokenizer has one
    int count, all;     // prompts, and their tokens
} Prompts;

// Encodes the prompts of a file, one per line, or `text` alone if `file` is "", for `each` samples of each prompt. V:
// the model's vocabulary. Without a tokenizer (NULL) each prompt is one token 0.
bool prompts_open(Prompts* prompts, const char* text, const char* file, const Tokenizer* tokenizer, int V, char* error);
void prompts_close(Prompts* prompts);

// Receives a sample: the text that follows its prompt.
typedef void (*SampleDone)(void* context, int index, const char* prompt, const char* text);
// A receiver of samples: `each` samples of the first prompt, then of the second, and so on.
typedef struct {
    const Prompts* prompts;
    int each;
    const Tokenizer* tokenizer;  // NULL on processes that only compute
    bool stop;                   // a sample ends at the end-of-text token
    FILE* to;                    // where samples are printed, a single one token by token; NULL: nowhere
    SampleDone done;             // receives complete samples; or NULL
    void* context;
    const void* model;  // the caller's, who draws the tokens
    struct {
        int64_t streamed;  // tokens of a single sample that are printed
        int64_t drawn;     // tokens after the first ones, and the seconds that they took
        double began, seconds;
        char half[4];  // a character that the streamed tokens have begun
        size_t half_bytes;
    } so_far;  // zeros at first
} Samples;
// Takes the next token of each of `count` samples; it ignores negative ones other than `end`. Replaces the end-of-text
// token by `end` if samples stop at it, and prints the token of a single sample. Exits if the reader of `to` has gone.
void samples_next(Samples* samples, int* tokens, int count, int end);
// Takes the complete sample `index` of `samples` (a Samples): `used` tokens, prompt included. After the last printed
// sample, a line on stderr says how fast the tokens were drawn.
void samples_done(void* samples, int index, const int* tokens, int64_t used);

C_LINKAGE_END
