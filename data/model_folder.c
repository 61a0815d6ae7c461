#include "model_folder.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "options.h"
#include "text.h"

enum { PIECE = 1 << 20 };

static const char INDEX[] = "model.safetensors.index.json";

const char* const MODEL_FOLDER_FILES[] = {"vocab.json",
                                          "merges.txt",
                                          "tokenizer.json",
                                          "tokenizer_config.json",
                                          "added_tokens.json",
                                          "special_tokens_map.json",
                                          "generation_config.json",
                                          NULL};

// The tensors of a block. In files a matrix is (in, out), transformers' Conv1D; in the program it is (out, in).
static const struct {
    const char* name;
    int rows, cols;  // in multiples of the channels; rows 0: a vector
    bool transposed, residual;
    int parts;
} BLOCK[MODEL_BLOCK_TENSORS] = {
    {"ln_1.weight", 0, 1, false, false, 1},       {"ln_1.bias", 0, 1, false, false, 1},
    {"attn.c_attn.weight", 3, 1, true, false, 3}, {"attn.c_attn.bias", 0, 3, false, false, 1},
    {"attn.c_proj.weight", 1, 1, true, true, 1},  {"attn.c_proj.bias", 0, 1, false, false, 1},
    {"ln_2.weight", 0, 1, false, false, 1},       {"ln_2.bias", 0, 1, false, false, 1},
    {"mlp.c_fc.weight", 4, 1, true, false, 1},    {"mlp.c_fc.bias", 0, 4, false, false, 1},
    {"mlp.c_proj.weight", 1, 4, true, true, 1},   {"mlp.c_proj.bias", 0, 1, false, false, 1},
};

int model_tensors(int layers, int64_t channels, int64_t positions, int64_t vocabulary, int64_t padded,
                  ModelTensor** tensors) {
    const int count = 2 + layers * MODEL_BLOCK_TENSORS + 2;
    ModelTensor* t = *tensors = memory_zero((size_t)count, sizeof(ModelTensor));
    *t++ = (ModelTensor){"wte.weight", padded, channels, vocabulary, false, -1, 1, "", 0, 0.02f};
    *t++ = (ModelTensor){"wpe.weight", positions, channels, positions, false, -1, 1, "", 0, 0.02f};
    for (int i = 0; i < layers * MODEL_BLOCK_TENSORS; i++) {
        const int l = i / MODEL_BLOCK_TENSORS, b = i % MODEL_BLOCK_TENSORS;
        const bool vector = BLOCK[b].rows == 0;
        const int64_t rows = vector ? 1 : BLOCK[b].rows * channels, cols = BLOCK[b].cols * channels;
        const char* name = text_kept("h.%d.%s", l, BLOCK[b].name);
        const float mean = vector && text_ends(name, ".weight") ? 1 : 0,
                    deviation = vector ? 0 : 0.02f / (BLOCK[b].residual ? sqrtf(2.0f * (float)layers) : 1.0f);
        *t++ = (ModelTensor){name, rows, cols, rows, BLOCK[b].transposed, l, BLOCK[b].parts, "", mean, deviation};
    }
    *t++ = (ModelTensor){"ln_f.weight", 1, channels, 1, false, -1, 1, "", 1, 0};
    *t++ = (ModelTensor){"ln_f.bias", 1, channels, 1, false, -1, 1, "", 0, 0};
    return count;
}

int model_tensor_shape(const ModelTensor* tensor, int64_t shape[2]) {
    const bool is_vector = tensor->rows == 1, swapped = is_vector || tensor->transposed;
    shape[0] = swapped ? tensor->cols : tensor->stored_rows;
    shape[1] = swapped ? tensor->stored_rows : tensor->cols;
    return is_vector ? 1 : 2;
}

bool model_folder_has_weights(const char* path) {
    return path_there(path, "model.safetensors") || path_there(path, INDEX);
}

// Says what a folder without weights has instead, and what to type.
static bool no_weights(const char* path, char* error) {
    const bool pickled = path_there(path, "pytorch_model.bin") || path_there(path, "pytorch_model.bin.index.json");
    if (!pickled) {
        return data_error(error, "there is neither %s/model.safetensors nor %s; name a folder that holds one of them",
                          path, INDEX);
    }
    return data_error(error,
                      "%s holds its weights as pytorch_model.bin, which runs code when it is read; where transformers "
                      "is installed, type python3 -c 'import sys, transformers as t; d = sys.argv[1]; "
                      "t.GPT2LMHeadModel.from_pretrained(d).save_pretrained(d)' %s and start again",
                      path, shell_word(path));
}

// Opens all files that the index names.
static bool open_index(Safetensors* model, const char* folder, const Json* index, char* error) {
    const Json* map = json_get(index, "weight_map");
    for (const Json* entry = map ? map->child : NULL; entry; entry = entry->next) {
        const char *name = entry->kind == JSON_STRING ? entry->text : "", *path = path_in(folder, name);
        int i = 0;
        while (i < model->files && strcmp(model->file[i].path, path) != 0) i++;
        if (i < model->files) continue;
        if (!file_name_plain(name)) {
            return data_error(error, "%s/%s says that tensor %s is in \"%.80s\", which is no name of a file beside it",
                              folder, INDEX, entry->key ? entry->key : "", name);
        }
        if (!safetensors_add(model, path, error)) return false;
    }
    if (model->files == 0) return data_error(error, "%s/%s holds no weight_map", folder, INDEX);
    return safetensors_sort(model, error);
}

// Returns the tensor transformer.NAME or, where there is none, NAME; NULL when absent.
static const SafetensorsTensor* find_tensor(const Safetensors* model, const char* name) {
    const SafetensorsTensor* found = safetensors_find(model, text_kept("transformer.%s", name));
    return found ? found : safetensors_find(model, name);
}

// True if the output matrix is the embedding, as the model has it.
static bool head_is_tied(const Safetensors* model, const SafetensorsTensor* head, char* error) {
    const SafetensorsTensor* wte = find_tensor(model, "wte.weight");
    bool same = wte && head->dims == 2 && wte->dims == 2 && memcmp(head->shape, wte->shape, 2 * sizeof(int64_t)) == 0;
    SCOPED float *a = memory_take(PIECE * sizeof(float)), *b = memory_take(PIECE * sizeof(float));
    bool ok = true;
    int64_t elements = same ? wte->shape[0] * wte->shape[1] : 0;
    for (int64_t at = 0; ok && same && at < elements; at += PIECE) {
        int64_t n = elements - at < PIECE ? elements - at : PIECE;
        ok = safetensors_floats(model, head, at, n, a, error) && safetensors_floats(model, wte, at, n, b, error);
        same = ok && memcmp(a, b, (size_t)n * sizeof(float)) == 0;
    }
    if (!ok || same) return ok;
    return data_error(error,
                      "%s holds a %s that differs from wte.weight, and nibble's output matrix is the embedding; give a "
                      "model with tied embeddings",
                      safetensors_path(model, head), head->name);
}

static bool all_used(const Safetensors* model, const ModelTensor* tensors, int count, char* error) {
    for (int t = 0; t < model->count; t++) {
        const SafetensorsTensor* tensor = &model->tensors[t];
        const char* name = strncmp(tensor->name, "transformer.", 12) == 0 ? tensor->name + 12 : tensor->name;
        const bool head = strcmp(name, "lm_head.weight") == 0;
        if (head && !head_is_tied(model, tensor, error)) return false;
        bool used = head || text_ends(name, ".attn.bias") || text_ends(name, ".attn.masked_bias");  // the causal mask
        for (int n = 0; n < count && !used; n++) {
            used = strcmp(name, tensors[n].name) == 0 && find_tensor(model, name) == tensor;  // of two names for one
        }
        if (used) continue;
        return data_error(error,
                          "%s holds the tensor %s, which the GPT-2 of its config.json does not have; give a model "
                          "without it",
                          safetensors_path(model, tensor), tensor->name);
    }
    return true;
}

bool model_folder_open(Safetensors* model, const char* path, const ModelTensor* tensors, int count, char* error) {
    *model = (Safetensors){0};
    if (!model_folder_has_weights(path)) return no_weights(path, error);
    const char* one = path_there(path, "model.safetensors");
    JSON_SCOPED Json* index = one ? NULL : json_read(path_in(path, INDEX), error);
    const bool ok = one ? safetensors_open(model, one, error) : index && open_index(model, path, index, error);
    if (!ok) data_error(error, "%s; fetch the model again", error);
    if (ok && all_used(model, tensors, count, error)) return true;
    safetensors_close(model);
    return false;
}

static const char* shape_text(const int64_t* shape, int dims) {
    const char* text = "";
    for (int i = 0; i < dims; i++) text = text_kept("%s%s%lld", text, i ? ", " : "", (long long)shape[i]);
    return text;
}

static bool check_tensor(const char* path, const SafetensorsTensor* found, const ModelTensor* tensor, char* error) {
    int64_t want[2];
    const int dims = model_tensor_shape(tensor, want);
    if (text_among(found->dtype, "F32 BF16 F16", ' ') && found->dims == dims &&
        memcmp(found->shape, want, (size_t)dims * sizeof(int64_t)) == 0) {
        return true;
    }
    return data_error(error, "%s: tensor %s is %s of shape [%s]; give a model with F32, BF16 or F16 of [%s]", path,
                      found->name, found->dtype, shape_text(found->shape, found->dims), shape_text(want, dims));
}

bool model_folder_read(const Safetensors* model, const ModelTensor* tensor, float* values, char* error) {
    const SafetensorsTensor* found = find_tensor(model, tensor->name);
    const int64_t n = tensor->stored_rows * tensor->cols;
    if (!found) {
        return data_error(error, "%s has no tensor %s, which the shape in config.json has; give a whole model",
                          model->file->path, tensor->name);
    }
    const char* path = safetensors_path(model, found);
    if (!check_tensor(path, found, tensor, error)) return false;
    memset(values + n, 0, (size_t)(tensor->rows * tensor->cols - n) * sizeof(float));
    float* stored = tensor->transposed ? memory_take((size_t)n * sizeof(float)) : values;
    const bool ok = safetensors_floats(model, found, 0, n, stored, error);
    if (ok && tensor->transposed) transpose(values, stored, tensor->cols, tensor->stored_rows, sizeof(float));
    if (tensor->transposed) free(stored);
    if (!ok || values_finite(found->name, "F32", values, n * (int64_t)sizeof(float), 0, error)) return ok;
    return data_error(error, "%s: %s, so the model is of no use; name another one", path, error);
}
