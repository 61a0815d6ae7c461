// Prompts as tokens, and samples as text. Drawing the tokens is the trainer's part.
#pragma once
#include "tokenizer.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    char* text;
    int* tokens;  // begins with the end-of-text token, if the tokenizer has one
    int count;    // of tokens, at least 1
} Prompt;

typedef struct {
    Prompt* prompt;
    int count;
} Prompts;

// The prompts of a file, one a line, blank lines left out; or `text` alone if `file` is "". `V` is the model's
// vocabulary. Without a tokenizer (NULL) the prompts have a token each, which the caller replaces.
bool prompts_open(Prompts* prompts, const char* text, const char* file, const Tokenizer* tokenizer, int V, char* error);
void prompts_close(Prompts* prompts);

// The text of `count` tokens, followed by a NUL byte, and its length. The caller frees it.
char* tokens_text(const Tokenizer* tokenizer, const int* tokens, int64_t count, size_t* bytes);
// Writes sample `index` (from 0) of `count`: a line that says which one if there are several, the prompt, and the text.
void sample_write(FILE* to, int index, int count, const char* prompt, const char* text, size_t bytes);

#ifdef __cplusplus
}
#endif
