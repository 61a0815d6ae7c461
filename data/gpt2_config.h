// The shapes of GPT-2 models, by name, by size, and in config.json of a Hugging Face folder.
#pragma once
#include "options.h"
#include "tokenizer.h"
C_LINKAGE_BEGIN

typedef struct {
    int L, C, NH;  // layers, channels, heads
    int max_T;     // rows of the position embedding
    int V, Vp;     // vocabulary; padded to a multiple of 128 if gpt2_shape_choose has set the shape, otherwise 0
} Gpt2Shape;
// The largest shape. layernorm_backward keeps so many channels in shared memory.
enum { GPT2_MAX_LAYERS = 256, GPT2_MAX_CHANNELS = 12288 };

// Returns the shape of a name, or of a size such as 30B: a shape of about so many parameters with GPT-2's vocabulary,
// in GPT-3's proportions (124M is gpt2). NULL when there is none. The shape of a size is valid until the next call.
const Gpt2Shape* gpt2_named(const char* name);
bool gpt2_size_check(const char* size, char* error);  // false with a sentence when a text is no size of a shape
// Sets --model to the value of --size if that was typed.
bool gpt2_take_size(Options* options, char* error);
// Writes the sentence about a --model that is neither a folder nor a built-in name, and returns false.
bool gpt2_unknown(const char* name, char* error);
// Returns the FLOPs of training on one token: 6 a parameter, and attention's 6 L C T (the causal half of 12).
double gpt2_flops(int64_t parameters, int64_t layers, int64_t channels, int64_t tokens);

// Reads the shape in FOLDER/config.json; false for anything but a plain GPT-2.
bool gpt2_config_read(const char* folder, Gpt2Shape* shape, char* error);
// Chooses the shape of --model, which is in `folder` or, if that is "", a name, for data of `vocabulary` tokens (0:
// unknown), or bytes. Options for parts of the shape replace the name's. A folder's positions stay, and --seq must not
// exceed them. `resumed`: the folder is a checkpoint. Sets --layers, --channels, --heads; --model, --seq if `auto`.
bool gpt2_shape_choose(Options* options, const char* folder, bool resumed, int vocabulary, bool bytes, bool gpu,
                       Gpt2Shape* shape, char* error);
// Writes config.json of a model whose weights have type `dtype` (transformers' name). It keeps members of `loaded`, the
// config.json that the model came with, or NULL, that do not describe the shape. If `loaded` does not say otherwise,
// the token `end_token` (-1: none) begins and ends a text.
bool gpt2_config_write(const char* path, const Gpt2Shape* shape, const char* dtype, const Json* loaded, int end_token,
                       char* error);

C_LINKAGE_END
