// Text <-> tokens for prompts and samples. Bytes need no table; GPT-2's byte-pair encoding reads vocab.json and
// merges.txt (the names of Hugging Face model directories) from a folder. Training data is tokenised by
// data/prepare.py; the encoder here is for prompts, exact for ASCII text and for well-formed UTF-8 letters.
#pragma once
#include "files.h"
#include "json.h"
C_LINKAGE_BEGIN

typedef struct Tokenizer Tokenizer;
// folder NULL or "": tokens are bytes. Otherwise it reads vocab.json and merges.txt, or else tokenizer.json, if it
// describes GPT-2's kind of tokenizer. Without merges tokenizer_encode returns -1, unless each token is a character.
// Tokens that were added (in tokenizer.json or added_tokens.json) are encoded as a whole; one whose flags ask for more
// is refused.
Tokenizer* tokenizer_open(const char* folder, char* error);
// Does the same for a model of `vocabulary` tokens, which must not be fewer than the tokenizer's. 256 tokens without a
// tokenizer are bytes.
Tokenizer* tokenizer_open_for(const char* folder, int vocabulary, char* error);
// Returns whether the folder holds a vocabulary.
bool tokenizer_exists(const char* folder);
// Copies MODEL_FOLDER_FILES of FROM to TO: those that TO does not have yet or, with `replace`, all.
bool tokenizer_files_copy(const char* from, const char* to, bool replace, char* error);
// Writes tokenizer.json and tokenizer_config.json, by which transformers reads the vocabulary of bytes.
bool tokenizer_write_bytes(const char* folder, char* error);
// Returns false if both folders hold a vocabulary and a number stands for different tokens in them.
bool tokenizers_agree(const char* folder, const char* other);
void tokenizer_close(Tokenizer* tokenizer);
int tokenizer_vocabulary(const Tokenizer* tokenizer);  // without tokens that were added later
int tokenizer_tokens(const Tokenizer* tokenizer);      // with them
// Returns <|endoftext|>'s token, or -1 for bytes.
int tokenizer_end(const Tokenizer* tokenizer);
// Encodes text, <|endoftext|> as its characters. Returns the number of tokens, of which at most `max` are written; -1:
// there are no merges, or a character has no token.
int tokenizer_encode(const Tokenizer* tokenizer, const char* text, int64_t bytes, int* tokens, int max);
// Returns the bytes of one token, without a NUL and not always whole characters; none for a number without a token.
const char* tokenizer_decode(const Tokenizer* tokenizer, int token, int* bytes);

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
