#include "model_folder.h"
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "options.h"
#include "text.h"

enum { MAX_FILES = 1000, MAX_TENSORS = 20000, PIECE = 1 << 20 };

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
    *t++ = (ModelTensor){text_copy("wte.weight"), padded, channels, vocabulary, false, -1, false, 1, ""};
    *t++ = (ModelTensor){text_copy("wpe.weight"), positions, channels, positions, false, -1, false, 1, ""};
    for (int i = 0; i < layers * MODEL_BLOCK_TENSORS; i++) {
        const int l = i / MODEL_BLOCK_TENSORS, b = i % MODEL_BLOCK_TENSORS;
        const int64_t rows = BLOCK[b].rows ? BLOCK[b].rows * channels : 1, cols = BLOCK[b].cols * channels;
        char* name = text_format("h.%d.%s", l, BLOCK[b].name);
        *t++ = (ModelTensor){name, rows, cols, rows, BLOCK[b].transposed, l, BLOCK[b].residual, BLOCK[b].parts, ""};
    }
    *t++ = (ModelTensor){text_copy("ln_f.weight"), 1, channels, 1, false, -1, false, 1, ""};
    *t++ = (ModelTensor){text_copy("ln_f.bias"), 1, channels, 1, false, -1, false, 1, ""};
    return count;
}

int model_tensor_shape(const ModelTensor* tensor, int64_t shape[2]) {
    const bool is_vector = tensor->rows == 1, swapped = is_vector || tensor->transposed;
    shape[0] = swapped ? tensor->cols : tensor->stored_rows;
    shape[1] = swapped ? tensor->stored_rows : tensor->cols;
    return is_vector ? 1 : 2;
}

static bool has(const char* folder, const char* name) {
    return access(path_in(folder, name), F_OK) == 0;
}

bool model_folder_has_weights(const char* path) {
    return has(path, "model.safetensors") || has(path, INDEX);
}

// Says what a folder without weights has instead, and what to type.
static bool no_weights(const char* path, char* error) {
    glob_t found;
    bool pickled = glob(path_in(path, "pytorch_model*.bin"), GLOB_NOSORT, NULL, &found) == 0;
    if (pickled) globfree(&found);
    if (!pickled) {
        return data_error(error, "there is neither %s/model.safetensors nor %s; name a folder that holds one of them",
                          path, INDEX);
    }
    return data_error(
        error,
        "%s holds its weights as pytorch_model.bin, which runs code when it is read; where torch and safetensors are "
        "installed, type python3 -c 'import sys, glob, torch, safetensors.torch as s; d = sys.argv[1]; "
        "s.save_file({k: v.clone().contiguous() for f in sorted(glob.glob(glob.escape(d) + \"/pytorch_model*.bin\")) "
        "for k, v in torch.load(f, map_location=\"cpu\", weights_only=True).items()}, d + \"/model.safetensors\", "
        "{\"format\": \"pt\"})' %s and start again",
        path, shell_word(path));
}

static bool open_file(ModelFolder* folder, const char* name, char* error) {
    const char* path = path_in(folder->path, name);
    folder->file = memory_grow(folder->file, (size_t)(folder->count + 1) * sizeof(Safetensors));
    if (!safetensors_open(&folder->file[folder->count], path, error)) {
        return data_error(error, "%s; fetch the model again, or name another folder", error);
    }
    int tensors = 0;
    folder->count++;
    for (int i = 0; i < folder->count; i++) tensors += folder->file[i].count;
    return tensors <= MAX_TENSORS ||
           data_error(error, "%s holds over %d tensors, more than any GPT-2; name another folder", folder->path,
                      MAX_TENSORS);
}

// The file of this name, opened now or before; NULL with a sentence.
static const Safetensors* file_named(ModelFolder* folder, const Json* entry, char* error) {
    const char* name = entry->kind == JSON_STRING ? entry->text : "";
    size_t length = strlen(folder->path) + 1;
    for (int i = 0; i < folder->count; i++) {
        if (strcmp(folder->file[i].path + length, name) == 0) return &folder->file[i];
    }
    if (!file_name_plain(name) || (int64_t)strlen(name) != entry->text_bytes || folder->count == MAX_FILES) {
        data_error(error,
                   "%s/%s says that tensor %s is in \"%.80s\", which is no name of a file beside it; fetch the model "
                   "again",
                   folder->path, INDEX, entry->key, name);
        return NULL;
    }
    return open_file(folder, name, error) ? &folder->file[folder->count - 1] : NULL;
}

// All files that the index names; each holds the tensors that are said to be in it, and no tensor is in two of them.
static bool open_index(ModelFolder* folder, const Json* index, char* error) {
    const Json* map = json_get(index, "weight_map");
    if (!map || map->kind != JSON_OBJECT || !map->child) {
        return data_error(error, "%s/%s holds no weight_map; fetch the model again", folder->path, INDEX);
    }
    int tensors = 0;
    for (const Json* entry = map->child; entry && tensors <= MAX_TENSORS; entry = entry->next, tensors++) {
        const Safetensors* file = file_named(folder, entry, error);
        if (!file) return false;
        if (!safetensors_find(file, entry->key)) {
            return data_error(error, "%s holds no tensor %s, which %s says is in it; fetch the model again", file->path,
                              entry->key, INDEX);
        }
    }
    for (int i = 0; i < folder->count; i++) {
        for (int t = 0; t < folder->file[i].count; t++) {
            const char* name = folder->file[i].tensors[t].name;
            for (int other = 0; other < i; other++) {
                if (!safetensors_find(&folder->file[other], name)) continue;
                return data_error(error, "%s and %s both hold the tensor %s; fetch the model again",
                                  folder->file[other].path, folder->file[i].path, name);
            }
        }
    }
    return true;
}

bool model_folder_open(ModelFolder* folder, const char* path, char* error) {
    *folder = (ModelFolder){text_copy(path), NULL, 0};
    bool ok;
    if (has(path, "model.safetensors")) {
        ok = open_file(folder, "model.safetensors", error);
    } else if (!has(path, INDEX)) {
        ok = no_weights(path, error);
    } else {
        JSON_SCOPED Json* index = json_read(path_in(path, INDEX), error);
        ok = index ? open_index(folder, index, error) : data_error(error, "%s; fetch the model again", error);
    }
    if (!ok) model_folder_close(folder);
    return ok;
}

// The tensor transformer.NAME or, where there is none, NAME, and the file that holds it; NULL when absent.
static const SafetensorsTensor* find_tensor(const ModelFolder* folder, const char* name, const Safetensors** file) {
    const char* prefixed = text_kept("transformer.%s", name);
    for (int with = 1; with >= 0; with--) {
        for (int i = 0; i < folder->count; i++) {
            const SafetensorsTensor* found = safetensors_find(&folder->file[i], with ? prefixed : name);
            if (!found) continue;
            *file = &folder->file[i];
            return found;
        }
    }
    return NULL;
}

// True if the output matrix is the embedding, as the model has it.
static bool head_is_tied(const ModelFolder* folder, const Safetensors* file, const SafetensorsTensor* head,
                         char* error) {
    const Safetensors* wte_file = NULL;
    const SafetensorsTensor* wte = find_tensor(folder, "wte.weight", &wte_file);
    bool same = wte && head->dims == 2 && wte->dims == 2 && memcmp(head->shape, wte->shape, 2 * sizeof(int64_t)) == 0;
    SCOPED float *a = memory_take(PIECE * sizeof(float)), *b = memory_take(PIECE * sizeof(float));
    bool ok = true;
    int64_t elements = same ? wte->shape[0] * wte->shape[1] : 0;
    for (int64_t at = 0; ok && same && at < elements; at += PIECE) {
        int64_t n = elements - at < PIECE ? elements - at : PIECE;
        ok = safetensors_floats(file, head, at, n, a, error) && safetensors_floats(wte_file, wte, at, n, b, error);
        same = ok && memcmp(a, b, (size_t)n * sizeof(float)) == 0;
    }
    if (!ok || same) return ok;
    return data_error(error,
                      "%s holds a %s that differs from wte.weight, and nibble's output matrix is the embedding; give a "
                      "model with tied embeddings",
                      file->path, head->name);
}

// True if it is h.LAYER.attn.bias or h.LAYER.attn.masked_bias: the causal mask, which is no weight.
static bool is_mask(const char* name, int layers) {
    int layer = -1, end = 0;
    if (sscanf(name, "h.%9d.attn.%n", &layer, &end) != 1 || end == 0 || layer < 0 || layer >= layers) return false;
    return strcmp(name + end, "bias") == 0 || strcmp(name + end, "masked_bias") == 0;
}

bool model_folder_used(const ModelFolder* folder, const ModelTensor* tensors, int count, int layers, char* error) {
    for (int i = 0; i < folder->count; i++) {
        const Safetensors* file = &folder->file[i];
        for (int t = 0; t < file->count; t++) {
            const SafetensorsTensor* tensor = &file->tensors[t];
            const char* name = strncmp(tensor->name, "transformer.", 12) == 0 ? tensor->name + 12 : tensor->name;
            if (strcmp(tensor->name, "lm_head.weight") == 0) {
                if (!head_is_tied(folder, file, tensor, error)) return false;
                continue;
            }
            const Safetensors* holder;
            bool known = is_mask(name, layers);
            for (int n = 0; n < count && !known; n++) {
                known = strcmp(tensors[n].name, name) == 0 && find_tensor(folder, name, &holder) == tensor;
            }
            if (known) continue;
            return data_error(error,
                              "%s holds the tensor %s, which the GPT-2 of its config.json does not have; give a model "
                              "without it",
                              file->path, tensor->name);
        }
    }
    return true;
}

static const char* shape_text(const int64_t* shape, int dims) {
    const char* text = "";
    for (int i = 0; i < dims; i++) text = text_kept("%s%s%lld", text, i ? ", " : "", (long long)shape[i]);
    return text;
}

static bool check_tensor(const Safetensors* file, const SafetensorsTensor* found, const ModelTensor* tensor,
                         char* error) {
    int64_t want[2];
    const int dims = model_tensor_shape(tensor, want);
    if (text_among(found->dtype, "F32 BF16 F16", ' ') && found->dims == dims &&
        memcmp(found->shape, want, (size_t)dims * sizeof(int64_t)) == 0) {
        return true;
    }
    return data_error(error, "%s: tensor %s is %s of shape [%s]; give a model with F32, BF16 or F16 of [%s]",
                      file->path, found->name, found->dtype, shape_text(found->shape, found->dims),
                      shape_text(want, dims));
}

bool model_folder_read(const ModelFolder* folder, const ModelTensor* tensor, float* values, char* error) {
    const Safetensors* file = NULL;
    const SafetensorsTensor* found = find_tensor(folder, tensor->name, &file);
    const int64_t n = tensor->stored_rows * tensor->cols;
    if (!found) {
        return data_error(error, "%s has no tensor %s, which the shape in config.json has; give a whole model",
                          folder->file->path, tensor->name);
    }
    if (!check_tensor(file, found, tensor, error)) return false;
    memset(values + n, 0, (size_t)(tensor->rows * tensor->cols - n) * sizeof(float));
    float* stored = tensor->transposed ? memory_take((size_t)n * sizeof(float)) : values;
    const bool ok = safetensors_floats(file, found, 0, n, stored, error);
    if (ok && tensor->transposed) transpose(values, stored, tensor->cols, tensor->stored_rows, sizeof(float));
    if (tensor->transposed) free(stored);
    if (!ok || values_finite(found->name, "F32", values, n * (int64_t)sizeof(float), 0, error)) return ok;
    return data_error(error, "%s: %s, so the model is of no use; name another one", file->path, error);
}

void model_folder_close(ModelFolder* folder) {
    for (int i = 0; i < folder->count; i++) safetensors_close(&folder->file[i]);
    free(folder->file), free((void*)folder->path);
    *folder = (ModelFolder){NULL, NULL, 0};
}

bool model_folder_read_all(const char* path, const ModelTensor* tensors, int count, int layers,
                           void (*take)(void* context, int t, const float* values), void* context, char* error) {
    ModelFolder folder;
    bool ok = model_folder_open(&folder, path, error) && model_folder_used(&folder, tensors, count, layers, error);
    for (int t = 0; t < count && ok; t++) {
        SCOPED float* values = memory_take((size_t)(tensors[t].rows * tensors[t].cols) * sizeof(float));
        ok = model_folder_read(&folder, &tensors[t], values, error);
        if (ok) take(context, t, values);
    }
    model_folder_close(&folder);
    return ok;
}
