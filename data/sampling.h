// This file reads prompts as tokens.
#pragma once
#include "tokenizer.h"
C_LINKAGE_BEGIN

typedef struct {
    const char** text;
    int* length;     // of each in tokens, at least 1
    int* tokens;     // of all, one after another; each begins with the end-of-text token, if the tokenizer has one
    int count, all;  // prompts, and their tokens
} Prompts;

// Encodes the prompts of a file, one per line, or `text` alone if `file` is "", for a model with a vocabulary of V.
// Without a tokenizer (NULL) each prompt is one token 0.
bool prompts_open(Prompts* prompts, const char* text, const char* file, const Tokenizer* tokenizer, int V, char* error);
void prompts_close(Prompts* prompts);

C_LINKAGE_END
