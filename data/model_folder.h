// The weights of a GPT-2 in a folder as Hugging Face's transformers write it: model.safetensors, or several such files
// and model.safetensors.index.json, which says in which of them each tensor is.
#pragma once
#include "safetensors.h"
C_LINKAGE_BEGIN

// Names of files that a run folder and each checkpoint keep beside config.json and the weights; NULL ends the list.
extern const char* const MODEL_FOLDER_FILES[];

// A tensor as the program has it, (rows, cols) with rows 1 for a vector, and as files hold it.
typedef struct {
    const char* name;  // without "transformer."
    int64_t rows, cols;
    int64_t stored_rows;  // rows that are in files: the vocabulary's without padding
    bool transposed;      // files hold (cols, stored_rows), as transformers' Conv1D has it
    int layer;            // its layer, or -1
    int parts;            // matrices of equal size that its rows consist of: 3 for queries, keys and values
    const char* dtype;    // in a file that is written: F32 or BF16
    // Initial weights are normal: 0 and 0.02, or 0.02/sqrt(2L) for matrices that write into the residual stream. Biases
    // and the vocabulary's padding are 0, layernorms 1 and 0.
    float mean, deviation;
} ModelTensor;

// Lists the tensors of a GPT-2 in *tensors: wte, wpe, MODEL_BLOCK_TENSORS for each layer, ln_f.weight, ln_f.bias.
// Returns how many. The caller frees *tensors. wte has `padded` rows, files have the vocabulary's.
enum { MODEL_BLOCK_TENSORS = 12 };
int model_tensors(int layers, int64_t channels, int64_t positions, int64_t vocabulary, int64_t padded,
                  ModelTensor** tensors);

// Sets the shape that a tensor has in files. Returns its dimensions, 1 or 2.
int model_tensor_shape(const ModelTensor* tensor, int64_t shape[2]);

// Returns whether there are weights that model_folder_open can open.
bool model_folder_has_weights(const char* path);
// Opens all files of a folder with a model. Refuses a tensor that is not among these (count), except
// attention masks, which older versions of transformers store, and a head (lm_head.weight) that equals wte.weight. A
// folder with PyTorch's own format only is refused with the command that converts it. safetensors_close closes them.
bool model_folder_open(Safetensors* model, const char* path, const ModelTensor* tensors, int count, char* error);
// Reads a tensor into `values` (rows, cols), fp32, with zeros in the rows that files do not have. False when it is
// absent, of another type or shape than the model's, or holds a value that is not finite.
bool model_folder_read(const Safetensors* model, const ModelTensor* tensor, float* values, char* error);

C_LINKAGE_END
