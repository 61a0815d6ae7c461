// This file prints and logs a model's samples: --samples of the first prompt, then of the second, and so on. The
// trainer draws their tokens.
#pragma once
#include "run_folder.h"
C_LINKAGE_BEGIN

typedef struct {
    RunFolder* run;     // whose prompts go on
    FILE* to;           // where samples are printed, a single one token by token; NULL: by the run, and in log.jsonl
    const void* model;  // the caller's, who draws the tokens
    // Zeros at first.
    int64_t streamed;  // tokens of a single sample that are printed
    int64_t drawn;     // tokens after the first ones, and the seconds that they took
    double began, seconds;
    char half[4];  // a character that the streamed tokens have begun
    size_t half_bytes;
} Samples;
// Takes the next token of each of `count` samples; it ignores negative ones other than `end`. Replaces the end-of-text
// token by `end` if samples stop at it, and prints the token of a single sample. Exits if the reader of `to` has gone.
void samples_next(Samples* samples, int* tokens, int count, int end);
// Takes the complete sample `index` of `samples` (a Samples): `used` tokens, prompt included. After the last printed
// sample, a line on stderr says how fast the tokens were drawn. On failure the run's `error` has a sentence.
void samples_done(void* samples, int index, const int* tokens, int64_t used);

C_LINKAGE_END
