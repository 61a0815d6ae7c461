#include "checkpoint.h"
#include "text.h"
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char* checkpoint_name(const char* run_folder, int64_t step) {
    return path_in(run_folder, text_kept("step_%08lld", (long long)step));
}

// The step in a name that checkpoint_name wrote, with `ending` behind it; -1 for others.
static int64_t step_of(const char* name, const char* ending) {
    long long step = -1;
    if (sscanf(name, "step_%12lld", &step) != 1 || step < 0) return -1;
    return strcmp(name, text_kept("step_%08lld%s", step, ending)) == 0 ? step : -1;
}

int64_t checkpoint_step(const char* path) {
    return step_of(basename(path), "");
}

int checkpoint_list(const char* run_folder, int64_t** steps) {
    int count = 0;
    *steps = NULL;
    DIR* dir = opendir(run_folder);
    for (struct dirent* entry; dir && (entry = readdir(dir));) {
        int64_t step = step_of(entry->d_name, "");
        if (step < 0) continue;
        *steps = memory_grow(*steps, (count + 1) * sizeof(int64_t));
        int at = count++;
        for (; at > 0 && (*steps)[at - 1] < step; at--) (*steps)[at] = (*steps)[at - 1];
        (*steps)[at] = step;
    }
    if (dir) closedir(dir);
    return count;
}

// Fields of RunState as state.json names them: whole numbers, or doubles.
static const struct {
    const char* name;
    size_t offset;
    bool real;
} STATE[] = {{"step", offsetof(RunState, step), false},
             {"sequences", offsetof(RunState, sequences), false},
             {"data_tokens", offsetof(RunState, data_tokens), false},
             {"data_crc", offsetof(RunState, data_crc), false},
             {"val_crc", offsetof(RunState, val_crc), false},
             {"skipped", offsetof(RunState, skipped), false},
             {"skipped_last", offsetof(RunState, skipped_last), false},
             {"parts_left", offsetof(RunState, parts_left), false},
             {"saturated", offsetof(RunState, saturated), false},
             {"rise_step", offsetof(RunState, rise.step), false},
             {"best_val", offsetof(RunState, best_val), true},
             {"last_norm", offsetof(RunState, last_norm), true},
             {"rise_lr", offsetof(RunState, rise.lr), true}};
enum { STATE_FIELDS = sizeof(STATE) / sizeof(STATE[0]) };

RunState run_state_read(const Json* json, const RunState* otherwise) {
    RunState state = *otherwise;
    for (int i = 0; i < STATE_FIELDS; i++) {
        void* field = (char*)&state + STATE[i].offset;
        if (STATE[i].real) *(double*)field = json_number(json, STATE[i].name, *(double*)field);
        if (!STATE[i].real) *(int64_t*)field = json_int(json, STATE[i].name, *(int64_t*)field);
    }
    return state;
}

// Completes the file of tensors that is open, if one is.
static bool tensors_end(CheckpointWriter* writer) {
    SafetensorsWriter* tensors = &writer->tensors;
    if (!tensors->path) return true;
    CheckpointFile* file = &writer->file[writer->files - 1];
    file->crc = tensors->crc, file->bytes = tensors->bytes;
    return safetensors_finish(tensors);
}

static bool tensors_begin(CheckpointWriter* writer, const char* name, const SafetensorsTensor* tensors, int count,
                          const char* format) {
    if (!tensors_end(writer)) return false;
    writer->file[writer->files++] = (CheckpointFile){name, 0, -1};
    return safetensors_begin(&writer->tensors, path_in(writer->folder, name), tensors, count, format, writer->error);
}

// The tensor as files have it: transformers' name and orientation, no padding of the vocabulary.
static SafetensorsTensor file_tensor(const ModelTensor* tensor) {
    SafetensorsTensor entry = {.name = text_kept("transformer.%s", tensor->name), .dtype = tensor->dtype};
    entry.dims = model_tensor_shape(tensor, entry.shape);
    return entry;
}

bool checkpoint_begin(CheckpointWriter* writer, const char* run_folder, int64_t step, const ModelTensor* tensors,
                      int count, char* error) {
    *writer = (CheckpointWriter){.run_folder = run_folder, .error = error, .bf16 = true};
    writer->path = checkpoint_name(run_folder, step);
    writer->folder = text_kept("%s.tmp", writer->path);
    SCOPED SafetensorsTensor* entries = memory_take((size_t)count * sizeof(*entries));
    for (int t = 0; t < count; t++) {
        entries[t] = file_tensor(&tensors[t]);
        writer->bf16 = writer->bf16 && strcmp(tensors[t].dtype, "BF16") == 0;
    }
    return folder_new(writer->folder, error) && tensors_begin(writer, "model.safetensors", entries, count, "pt");
}

bool checkpoint_begin_arrays(CheckpointWriter* writer, const SafetensorsTensor* arrays, int count) {
    return !writer->folder || tensors_begin(writer, "optimizer.safetensors", arrays, count, NULL);
}

bool checkpoint_bytes(CheckpointWriter* writer, const SafetensorsTensor* array, int64_t at, int64_t bytes,
                      const void* values) {
    if (!writer->folder) return true;
    const int64_t first = at / safetensors_dtype_bytes(array->dtype);
    writer->nonfinite = !values_finite(array->name, array->dtype, values, bytes, first, writer->error);
    return !writer->nonfinite && safetensors_write(&writer->tensors, values, bytes);
}

bool checkpoint_tensor(CheckpointWriter* writer, const ModelTensor* tensor, const void* values) {
    if (!writer->folder) return true;
    const SafetensorsTensor entry = file_tensor(tensor);
    const int size = safetensors_dtype_bytes(entry.dtype);
    const int64_t bytes = tensor->stored_rows * tensor->cols * size;
    SCOPED char* turned = tensor->transposed ? memory_take((size_t)bytes) : NULL;
    if (turned) transpose(turned, values, tensor->stored_rows, tensor->cols, size);
    return checkpoint_bytes(writer, &entry, 0, bytes, turned ? turned : values);
}

bool checkpoint_seal(const char* folder, const char* text, CheckpointFile* files, int count, char* error) {
    SCOPED char* whole;
    size_t length;
    FILE* state = text_stream(&whole, &length);
    fprintf(state, "%s\"files\": {", text);
    const char* separator = "";
    bool ok = true;
    for (int i = 0; i < count && ok; i++) {
        CheckpointFile* file = &files[i];
        if (file->bytes < 0 && !file_exists(path_in(folder, file->name))) continue;
        if (file->bytes < 0) ok = file_sum(folder, file->name, &file->crc, &file->bytes, error);
        fprintf(state, "%s\n  \"%s\": {\"bytes\": %lld, \"crc32c\": %u}", separator, file->name, (long long)file->bytes,
                file->crc);
        separator = ",";
    }
    fprintf(state, "\n},\n");
    fflush(state);
    fprintf(state, "\"crc32c\": %u\n}\n", crc32c(0, whole, (int64_t)length));
    fclose(state);
    return ok && file_write(path_in(folder, "state.json"), whole, (int64_t)length, error) && folder_sync(folder, error);
}

// Gives the folder its final name, which no folder has yet: a run does not save a step twice, and begins in a folder
// without checkpoints or after the newest one there.
static bool give_name(const CheckpointWriter* writer) {
    if (rename(writer->folder, writer->path) == 0) return folder_sync(path_parent(writer->path), writer->error);
    return data_error(writer->error, "%s cannot be renamed to %s: %s", writer->folder, writer->path, strerror(errno));
}

bool checkpoint_end(CheckpointWriter* writer, const CheckpointFacts* facts) {
    const char* folder = writer->folder;
    if (!folder) return true;
    SCOPED char* text;
    size_t length;
    FILE* state = text_stream(&text, &length);
    fprintf(state, "{\n\"version\": %d", CHECKPOINT_VERSION);
    for (int i = 0; i < STATE_FIELDS; i++) {
        const void* field = (const char*)facts->state + STATE[i].offset;
        const double value = STATE[i].real ? *(const double*)field : (double)*(const int64_t*)field;
        json_write_number_member(state, ",\n", STATE[i].name, value);
    }
    fprintf(state, ",\n\"formats\": %s,\n\"options\": ", facts->formats);
    options_json(facts->options, facts->asked, false, state);
    fprintf(state, ",\n");
    fclose(state);
    bool ok = tensors_end(writer) &&
              gpt2_config_write(path_in(folder, "config.json"), &facts->shape, writer->bf16 ? "bfloat16" : "float32",
                                facts->config, facts->end_token, writer->error) &&
              tokenizer_files_copy(writer->run_folder, folder, false, writer->error);
    writer->file[writer->files++] = (CheckpointFile){"config.json", 0, -1};
    for (int i = 0; MODEL_FOLDER_FILES[i]; i++) {
        writer->file[writer->files++] = (CheckpointFile){MODEL_FOLDER_FILES[i], 0, -1};
    }
    return ok && checkpoint_seal(folder, text, writer->file, writer->files, writer->error) && give_name(writer);
}

void checkpoint_abandon(CheckpointWriter* writer) {
    char ignored[DATA_ERROR_BYTES];
    if (!writer->folder) return;
    writer->tensors.failed = true, tensors_end(writer);
    folder_remove(writer->folder, ignored);
}

bool checkpoint_mark_best(const char* run_folder, int64_t step, char* error) {
    const char *link = path_in(run_folder, "best"), *new_link = path_in(run_folder, "best.tmp");
    unlink(new_link);  // of a start that was interrupted here
    return (symlink(basename(checkpoint_name(run_folder, step)), new_link) == 0 && rename(new_link, link) == 0) ||
           data_error(error, "cannot make the link %s: %s", link, strerror(errno));
}

bool checkpoint_prune(const char* run_folder, int64_t keep, int64_t step, char* error) {
    bool ok = true;
    SCOPED char* best = realpath(path_in(run_folder, "best"), NULL);
    const int64_t best_step = best ? checkpoint_step(best) : -1;
    SCOPED int64_t* steps;
    int count = checkpoint_list(run_folder, &steps);
    for (int64_t i = keep; i < count; i++) {
        // A checkpoint loses its name first: one that is removed in part must not look whole.
        const char* path = checkpoint_name(run_folder, steps[i]);
        const bool stays = steps[i] == step || steps[i] == best_step;
        if (!stays && rename(path, text_kept("%s.tmp", path)) != 0) ok = folder_remove(path, error) && ok;
    }
    DIR* dir = opendir(run_folder);
    for (struct dirent* entry; dir && (entry = readdir(dir));) {
        if (step_of(entry->d_name, ".tmp") < 0) continue;
        ok = folder_remove(path_in(run_folder, entry->d_name), error) && ok;
    }
    if (dir) closedir(dir);
    return ok;
}

bool checkpoint_open(CheckpointReader* reader, const char* folder, const ModelTensor* tensors, int count, char* error) {
    memset(reader, 0, sizeof(*reader));
    reader->tensors = tensors;
    return model_folder_open(&reader->model, folder, tensors, count, error) &&
           safetensors_open(&reader->optimizer, path_in(folder, "optimizer.safetensors"), error);
}

void checkpoint_close(CheckpointReader* reader) {
    safetensors_close(&reader->model);
    safetensors_close(&reader->optimizer);
}

const void* checkpoint_array(void* context, const char* name, const char* dtype, int64_t bytes) {
    const CheckpointReader* reader = context;
    const SafetensorsTensor* found = safetensors_find(&reader->optimizer, name);
    return found && strcmp(found->dtype, dtype) == 0 && found->bytes == bytes ? found : NULL;
}

void checkpoint_array_read(void* context, const void* array, int64_t at, int64_t bytes, void* to) {
    CheckpointReader* reader = context;
    const SafetensorsTensor* found = array;
    const int64_t first = at / safetensors_dtype_bytes(found->dtype);
    char* error = reader->error;
    if (*error || !safetensors_read(&reader->optimizer, found, at, bytes, to, error)) return;
    if (values_finite(found->name, found->dtype, to, bytes, first, error)) return;
    data_error(error, "%s: %s, so the run cannot go on from it; name an earlier checkpoint",
               reader->optimizer.file->path, error);
}

void checkpoint_weights(void* context, int tensor, float* values) {
    CheckpointReader* reader = context;
    if (!*reader->error) model_folder_read(&reader->model, &reader->tensors[tensor], values, reader->error);
}

// True if one of the files that state.json lists is whole.
static bool file_whole(const char* folder, const Json* file, char* error) {
    uint32_t crc = 0;
    int64_t bytes = -1;
    const bool plain = file_name_plain(file->key);  // a name in another folder is none of a checkpoint's
    if (plain && !file_sum(folder, file->key, &crc, &bytes, error)) return false;
    return (plain && bytes == json_int(file, "bytes", -1) && crc == (uint32_t)json_int(file, "crc32c", -1)) ||
           data_error(error, "%s/%.80s does not match its size and checksum", folder, file->key);
}

Json* checkpoint_state(const char* folder, char* error) {
    const char* path = path_in(folder, "state.json");
    int64_t bytes;
    SCOPED char* text = file_read(path, &bytes, error);
    Json* state = text ? json_parse(text, bytes, path, error) : NULL;
    if (!state) return NULL;
    const char* seal = NULL;  // its own checksum covers what comes before its last line "crc32c"
    for (const char* at = text; (at = strstr(at, "\n\"crc32c\": ")); at++) seal = at + 1;
    bool whole = seal && crc32c(0, text, seal - text) == (uint32_t)json_int(state, "crc32c", -1);
    for (int i = 0; i < STATE_FIELDS; i++) whole = whole && (STATE[i].real || json_int(state, STATE[i].name, 0) >= 0);
    if (whole) return state;
    data_error(error, "%s does not match its checksum, or counts below 0", path);
    json_free(state);
    return NULL;
}

Json* checkpoint_verify(const char* folder, bool model_alone, char* error) {
    Json* state = checkpoint_state(folder, error);
    const Json* files = json_get(state, "files");
    bool whole = files && files->kind == JSON_OBJECT;
    if (state && !whole) data_error(error, "%s/state.json lists no files", folder);
    for (const Json* file = whole ? files->child : NULL; file && whole; file = file->next) {
        whole = (model_alone && strcmp(file->key, "optimizer.safetensors") == 0) || file_whole(folder, file, error);
    }
    if (whole) return state;
    json_free(state);
    return NULL;
}

Json* checkpoint_newest(const char* run_folder, bool model_alone, char* folder, size_t bytes) {
    SCOPED int64_t* steps;
    int count = checkpoint_list(run_folder, &steps);
    Json* state = NULL;
    for (int i = 0; i < count && !state; i++) {
        char error[DATA_ERROR_BYTES];
        snprintf(folder, bytes, "%s", checkpoint_name(run_folder, steps[i]));
        state = checkpoint_verify(folder, model_alone, error);
        const char* next = i + 1 < count ? "; trying the one before" : "";
        if (!state) fprintf(stderr, "train: notice: damaged checkpoint: %s%s\n", error, next);
    }
    return state;
}

const char* checkpoint_model(const char** name, bool needed, char* error) {
    const char* model = *name;
    char path[RUN_PATH_BYTES + 32];
    if (strcmp(model, "auto") == 0 || gpt2_named(model)) {
        if (!needed) return "";
        const char* there = folder_exists(model) ? text_kept("; ./%s names the folder, not the shape", model) : "";
        data_error(error,
                   "--sample and --eval need --model DIR, a folder with config.json and model.safetensors (a "
                   "checkpoint is one%s); for samples and scores on the way of a run, type --sample-every N and "
                   "--eval-every N",
                   there);
        return NULL;
    }
    const char* folder = folder_exists(model) ? realpath(model, NULL) : NULL;
    if (!folder) return gpt2_unknown(model, error), NULL;
    JSON_SCOPED Json* state = NULL;
    if (!model_folder_has_weights(folder)) {
        state = checkpoint_newest(folder, true, path, sizeof(path));
        if (state) folder = text_copy(path);
        if (!state && file_exists(path_in(folder, "log.jsonl"))) {
            return data_error(error,
                              "--model %s is a run without a whole checkpoint; let it save one, or name another folder",
                              folder),
                   NULL;
        }
    } else if (access(path_in(folder, "state.json"), F_OK) == 0) {
        state = checkpoint_verify(folder, true, error);
        if (!state)
            return data_error(error, "--model %s: damaged checkpoint: %s; name another one", folder, error), NULL;
    }
    return *name = folder;
}
