// The shapes of GPT-2 models, by name, by size, and in config.json of a Hugging Face folder.
#pragma once
#include "options.h"
#include "tokenizer.h"
C_LINKAGE_BEGIN

typedef struct {
    int64_t layers, channels, heads, positions, vocabulary;
} Gpt2Shape;

// These sizes go by a name, OpenAI's and others.
typedef struct {
    const char* name;
    int layers, channels, heads, positions;
} Gpt2Name;
// Returns the shape of a name, or of a size such as 30B: about so many parameters, with GPT-2's vocabulary and in
// GPT-3's proportions; 124M is gpt2's. NULL when there is none; a size's is valid until the next call.
const Gpt2Name* gpt2_named(const char* name);
bool gpt2_size_check(const char* size, char* error);  // false with a sentence when a text is no size of a shape
// Makes the size of --size, if it was typed, the name of --model. Refuses it beside what it chooses.
bool gpt2_take_size(const OptionTable* table, void* fields, bool* given, char* error);
const char* gpt2_names(void);  // all of them, with | between, kept as by text_kept
// Returns the FLOPs of training on one token: 6 a parameter, and attention's 6 L C T (the causal half of 12).
double gpt2_flops(int64_t parameters, int64_t layers, int64_t channels, int64_t tokens);

// Reads the shape in FOLDER/config.json, each number from 1 to that of `max`; false for anything but a plain GPT-2.
bool gpt2_config_read(const char* folder, const Gpt2Shape* max, Gpt2Shape* shape, char* error);
// Chooses the shape of `model`, a name or the folder `folder` ("": it is a name), for data of `vocabulary` tokens (0:
// unknown), or bytes. `typed` has the numbers that were typed, -1 where none was; its vocabulary does not count. The
// positions of a folder stay, and typed ones must not be more. `resumed`: the folder is a checkpoint.
bool gpt2_shape_choose(const char* model, const char* folder, bool resumed, const Gpt2Shape* max,
                       const Gpt2Shape* typed, int vocabulary, bool bytes, Gpt2Shape* shape, char* error);
// Writes config.json of a model whose weights are of type `dtype` (transformers' name). Members of `loaded`, the
// config.json that the model came with, or NULL, are kept where they do not describe the shape; special tokens that it
// lacks are those of `tokens`.
bool gpt2_config_write(const char* path, const Gpt2Shape* shape, const char* dtype, const Json* loaded,
                       const SpecialTokens* tokens, char* error);

C_LINKAGE_END
