// config.json of a Hugging Face GPT-2 folder: the model's shape, and whether nibble can train what it describes.
#pragma once
#include <stdbool.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int64_t layers, channels, heads, positions, vocabulary;
} Gpt2Shape;

// The shape in FOLDER/config.json, each number from 1 to that of `most`. False and a sentence when it is no GPT-2, or a
// variant of it.
bool gpt2_config_read(const char* folder, const Gpt2Shape* most, Gpt2Shape* shape, char* error);
// `dtype`: transformers' name of the type that model.safetensors holds.
bool gpt2_config_write(const char* path, const Gpt2Shape* shape, const char* dtype, char* error);

#ifdef __cplusplus
}
#endif
