// Text <-> tokens for prompts and samples. Bytes need no table; GPT-2's byte-pair encoding reads vocab.json and
// merges.txt (the names of Hugging Face model directories) from a folder. Training data is tokenised by
// data/prepare.py; the encoder here is for prompts, exact for ASCII text and for well-formed UTF-8 letters.
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "safetensors.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef struct Tokenizer Tokenizer;
// folder NULL or "": tokens are bytes. Otherwise vocab.json and merges.txt are read, or the same under OpenAI's names,
// encoder.json and vocab.bpe. Without merges, tokens decode and tokenizer_encode returns -1.
Tokenizer* tokenizer_open(const char* folder, char* error);
// The files of FROM's tokenizer that TO has not yet, under the names vocab.json and merges.txt. Fine where FROM has
// none.
bool tokenizer_files_copy(const char* from, const char* to, char* error);
void tokenizer_close(Tokenizer* tokenizer);
int tokenizer_vocabulary(const Tokenizer* tokenizer);
// <|endoftext|>'s token, or -1 for bytes.
int tokenizer_end(const Tokenizer* tokenizer);
// Encodes text: returns the number of tokens in all, of which at most `most` are written, or -1 when there are no
// merges. Special tokens are not looked for: the text <|endoftext|> is encoded as the characters it consists of.
int tokenizer_encode(const Tokenizer* tokenizer, const char* text, int64_t bytes, int* tokens, int most);
// The bytes of one token: not NUL-terminated, not always whole UTF-8 characters; none for a number without a token.
const char* tokenizer_decode(const Tokenizer* tokenizer, int token, int* bytes);

// Draws a token: softmax of logits (V) / temperature over the k likeliest (k <= 0: all); temperature 0 takes the
// likeliest. `coin` is uniform in [0, 1).
int draw_token(const float* logits, int V, double temperature, int64_t k, double coin);

#ifdef __cplusplus
}
#endif
