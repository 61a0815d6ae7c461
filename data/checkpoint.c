#include "checkpoint.h"
#include "clock.h"
#include "text.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PIECE_BYTES (64 << 20)  // of memory in which arrays pass between device and file

char* checkpoint_name(const char* run_folder, int64_t step) {
    return text_copy(path_in(run_folder, text_kept("step_%08lld", (long long)step)));
}

// The step in a name that checkpoint_name wrote, with `ending` behind it; -1 for others, such as the user's step_5.
static int64_t step_of(const char* name, const char* ending) {
    long long step = -1;
    if (sscanf(name, "step_%12lld", &step) != 1 || step < 0) return -1;
    return strcmp(name, text_kept("step_%08lld%s", step, ending)) == 0 ? step : -1;
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

// Fields of RunState that are whole numbers, as state.json names them.
static const struct {
    const char* name;
    size_t offset;
} STATE[] = {{"step", offsetof(RunState, step)},
             {"sequences", offsetof(RunState, sequences)},
             {"data_tokens", offsetof(RunState, data_tokens)},
             {"data_crc", offsetof(RunState, data_crc)},
             {"val_crc", offsetof(RunState, val_crc)},
             {"skipped", offsetof(RunState, skipped)},
             {"skipped_last", offsetof(RunState, skipped_last)},
             {"parts_left", offsetof(RunState, parts_left)},
             {"saturated", offsetof(RunState, saturated)},
             {"rise_step", offsetof(RunState, rise_step)}};
enum { STATE_FIELDS = sizeof(STATE) / sizeof(STATE[0]) };

int run_state_resume(RunState* state, const Json* json, const char* changes[2]) {
    const RunState now = *state;
    int count = 0;
    for (int i = 0; i < STATE_FIELDS; i++) {
        int64_t* field = (int64_t*)((char*)state + STATE[i].offset);
        *field = json_int(json, STATE[i].name, *field);
    }
    state->best_val = json_number(json, "best_val", now.best_val);
    state->last_norm = json_number(json, "last_norm", 0);
    state->rise_lr = json_number(json, "rise_lr", 0);
    if (state->data_tokens != now.data_tokens) {
        changes[count++] = text_format("the data: %lld tokens (were %lld), so they come in another order from here on",
                                       (long long)now.data_tokens, (long long)state->data_tokens);
    } else if (state->data_crc != now.data_crc) {
        changes[count++] = "the data: as many tokens as before, but other ones";
    }
    if (state->val_crc != now.val_crc) {
        changes[count++] = "the validation data, so the best loss begins anew";
        state->best_val = now.best_val;
    }
    state->data_tokens = now.data_tokens, state->data_crc = now.data_crc, state->val_crc = now.val_crc;
    return count;
}

// The tensors of a safetensors file: read(context, i, at, bytes, to) puts `bytes` bytes of tensor i, from byte `at` on,
// into `to`. It is called in the file's order, for at most `piece` bytes at a time, or for whole tensors if that is 0.
typedef struct {
    const SafetensorsEntry* entries;
    int count;
    int64_t piece;
    const char* format;  // of the metadata, or NULL
    void (*read)(void* context, int tensor, int64_t at, int64_t bytes, void* to);
    void* context;
} Source;

// Writes FOLDER/FILE->name, whose values must be finite, and sums it into `file`. With folder NULL it only reads.
static bool source_write(const char* folder, const Source* source, CheckpointFile* file, char* error) {
    SafetensorsWriter* writer =
        folder ? safetensors_begin(path_in(folder, file->name), source->entries, source->count, source->format, error)
               : NULL;
    bool ok = writer || !folder;
    SCOPED char* piece = NULL;
    for (int i = 0; i < source->count && ok; i++) {
        const SafetensorsEntry* entry = &source->entries[i];
        const int64_t size = safetensors_dtype_bytes(entry->dtype);
        int64_t bytes = size;
        for (int d = 0; d < entry->dims; d++) bytes *= entry->shape[d];
        const int64_t max = source->piece > 0 && source->piece < bytes ? source->piece : bytes;
        piece = memory_grow(piece, (size_t)(max > 0 ? max : 1));
        for (int64_t at = 0; at < bytes && ok; at += max) {
            const int64_t count = bytes - at < max ? bytes - at : max;
            source->read(source->context, i, at, count, piece);
            if (!writer) continue;
            file->nonfinite = !values_finite(entry->name, entry->dtype, piece, count, at / size, error);
            ok = !file->nonfinite && safetensors_write(writer, piece, count, error);
        }
    }
    if (!writer) return ok;
    if (ok) return safetensors_finish(writer, &file->crc, &file->bytes, error);
    safetensors_abandon(writer);
    return false;
}

typedef struct {
    const Checkpoint* checkpoint;
    void* values;  // a tensor as the program has it
} ModelSource;

static void model_source_read(void* context, int t, int64_t at, int64_t bytes, void* to) {
    const ModelSource* source = context;
    const ModelTensor* tensor = &source->checkpoint->tensors[t];
    (void)at;  // a tensor is read at once
    source->checkpoint->weights(source->checkpoint->context, t, source->values);
    if (tensor->transposed) {
        transpose(to, source->values, tensor->stored_rows, tensor->cols, safetensors_dtype_bytes(tensor->dtype));
    } else {
        memcpy(to, source->values, (size_t)bytes);
    }
}

// Writes model.safetensors: transformers' names and orientation, no padding of the vocabulary.
static bool model_write(const char* folder, const Checkpoint* checkpoint, CheckpointFile* file, char* error) {
    const int count = checkpoint->count;
    SCOPED SafetensorsEntry* entries = memory_zero((size_t)count, sizeof(*entries));
    int64_t largest = 0;
    for (int t = 0; t < count; t++) {
        const ModelTensor* tensor = &checkpoint->tensors[t];
        const int64_t size = tensor->rows * tensor->cols;
        entries[t] = (SafetensorsEntry){text_format("transformer.%s", tensor->name), tensor->dtype, {0}, 0};
        entries[t].dims = model_tensor_shape(tensor, entries[t].shape);
        if (size > largest) largest = size;
    }
    SCOPED float* values = memory_zero((size_t)largest, sizeof(float));
    ModelSource tensor = {checkpoint, values};
    const Source source = {entries, count, 0, "pt", model_source_read, &tensor};
    const bool ok = source_write(folder, &source, file, error);
    for (int t = 0; t < count; t++) free((void*)entries[t].name);
    return ok;
}

bool checkpoint_seal(const char* folder, const char* text, const CheckpointFile* files, int count, char* error) {
    SCOPED char* whole;
    size_t length;
    FILE* state = text_stream(&whole, &length);
    fprintf(state, "%s\"files\": {", text);
    const char* separator = "";
    bool ok = true;
    for (int i = 0; i < count && ok; i++) {
        CheckpointFile file = files[i];
        if (file.bytes < 0 && !file_exists(path_in(folder, file.name))) continue;
        if (file.bytes < 0) ok = file_sum(folder, file.name, &file.crc, &file.bytes, error);
        fprintf(state, "%s\n  \"%s\": {\"bytes\": %lld, \"crc32c\": %u}", separator, file.name, (long long)file.bytes,
                file.crc);
        separator = ",";
    }
    fprintf(state, "\n},\n");
    fflush(state);
    fprintf(state, "\"crc32c\": %u\n}\n", crc32c(0, whole, (int64_t)length));
    fclose(state);
    return ok && file_write(path_in(folder, "state.json"), whole, (int64_t)length, error) && folder_sync(folder, error);
}

// state.json: where the run stands, formats and options; its files and the seal follow.
static bool state_write(const RunFolder* run, const char* folder, const Checkpoint* checkpoint,
                        const CheckpointFile* files, int count, char* error) {
    SCOPED char* text;
    size_t length;
    FILE* state = text_stream(&text, &length);
    fprintf(state, "{\n\"version\": %d,\n", CHECKPOINT_VERSION);
    for (int i = 0; i < STATE_FIELDS; i++) {
        int64_t value = *(const int64_t*)((const char*)&run->state + STATE[i].offset);
        fprintf(state, "\"%s\": %lld,\n", STATE[i].name, (long long)value);
    }
    json_write_number_member(state, "", "best_val", run->state.best_val);
    json_write_number_member(state, ",\n", "last_norm", run->state.last_norm);
    json_write_number_member(state, ",\n", "rise_lr", run->state.rise_lr);
    fprintf(state, ",\n\"formats\": %s,\n\"options\": ", checkpoint->formats);
    options_json(run->table, checkpoint->options, false, state);
    fprintf(state, ",\n");
    fclose(state);
    return checkpoint_seal(folder, text, files, count, error);
}

// Completes a checkpoint folder whose model.safetensors and optimizer.safetensors (`arrays`) are written already.
static bool folder_finish(const RunFolder* run, const char* folder, const Checkpoint* checkpoint,
                          const CheckpointFile arrays[2], char* error) {
    CheckpointFile files[16] = {arrays[0], arrays[1], {"config.json", 0, -1, false}};
    int count = 3;
    const char* dtype = "bfloat16";
    for (int t = 0; t < checkpoint->count; t++) {
        if (strcmp(checkpoint->tensors[t].dtype, "BF16") != 0) dtype = "float32";
    }
    bool ok =
        gpt2_config_write(path_in(folder, "config.json"), &checkpoint->shape, dtype, run->config, &run->special, error);
    for (int i = 0; MODEL_FOLDER_FILES[i]; i++) {
        files[count++] = (CheckpointFile){MODEL_FOLDER_FILES[i], 0, -1, false};
    }
    return ok && tokenizer_files_copy(run->path, folder, error) &&
           state_write(run, folder, checkpoint, files, count, error);
}

bool checkpoint_open(CheckpointReader* reader, const char* folder, const ModelTensor* tensors, int count, int layers,
                     char* error) {
    memset(reader, 0, sizeof(*reader));
    reader->tensors = tensors;
    return model_folder_open(&reader->model, folder, error) &&
           model_folder_used(&reader->model, tensors, count, layers, error) &&
           safetensors_open(&reader->optimizer, path_in(folder, "optimizer.safetensors"), error);
}

void checkpoint_close(CheckpointReader* reader) {
    model_folder_close(&reader->model);
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
    data_error(error, "%s: %s, so the run cannot go on from it; name an earlier checkpoint", reader->optimizer.path,
               error);
}

void checkpoint_notice(void* context, const char* line) {
    run_say(((CheckpointReader*)context)->run, " notice   %s\n", line);
}

void checkpoint_weights(void* context, int tensor, float* values) {
    CheckpointReader* reader = context;
    if (!*reader->error) model_folder_read(&reader->model, &reader->tensors[tensor], values, reader->error);
}

// Renames FOLDER.tmp to FOLDER. An existing FOLDER is exchanged with it atomically, so that a whole one always exists.
static bool checkpoint_commit(const char* folder, char* error) {
    SCOPED char *temporary = text_format("%s.tmp", folder), *old = text_format("%s.old.tmp", folder);
    struct stat status;
    bool there = lstat(folder, &status) == 0;
    bool swapped = there && renameat2(AT_FDCWD, temporary, AT_FDCWD, folder, RENAME_EXCHANGE) == 0;
    // A file system that cannot exchange two names keeps the old folder beside until the new one is in place.
    if (there && !swapped && (!folder_remove(old, error) || rename(folder, old) != 0)) {
        return data_error(error, "%s cannot be renamed to %s: %s", folder, old, strerror(errno));
    }
    if (!swapped && rename(temporary, folder) != 0) {
        return data_error(error, "%s cannot be renamed to %s: %s", temporary, folder, strerror(errno));
    }
    return folder_sync(path_parent(folder), error) && (!swapped || folder_remove(temporary, error));
}

// Returns how many bytes state.json's own checksum covers: those before its last line "crc32c"; -1: it has none.
static int64_t sealed_bytes(const char* text) {
    const char* seal = NULL;
    for (const char* at = text; (at = strstr(at, "\n\"crc32c\": ")); at++) seal = at + 1;
    return seal ? seal - text : -1;
}

// True if one of the files that state.json lists is whole.
static bool file_whole(const char* folder, const Json* file, char* error) {
    uint32_t crc;
    int64_t bytes, want = json_int(file, "bytes", -1);
    if (!file_name_plain(file->key)) {
        return data_error(error, "%s/state.json lists \"%.80s\", which is no name of a file in its folder", folder,
                          file->key);
    }
    if (!file_sum(folder, file->key, &crc, &bytes, error)) return false;
    if (bytes != want) {
        return data_error(error, "%s/%s has %lld bytes instead of %lld", folder, file->key, (long long)bytes,
                          (long long)want);
    }
    return crc == (uint32_t)json_int(file, "crc32c", -1) ||
           data_error(error, "%s/%s does not match its checksum", folder, file->key);
}

Json* checkpoint_state(const char* folder, char* error) {
    const char* path = path_in(folder, "state.json");
    int64_t bytes;
    SCOPED char* text = file_read(path, &bytes, error);
    if (!text) return NULL;
    Json* state = json_parse(text, bytes, path, error);
    int64_t covered = sealed_bytes(text);
    bool whole = state && covered > 0 && crc32c(0, text, covered) == (uint32_t)json_int(state, "crc32c", -1);
    bool possible = true;
    for (int i = 0; i < STATE_FIELDS; i++) possible = possible && json_int(state, STATE[i].name, 0) >= 0;
    if (!state || (whole && possible)) return state;
    data_error(error, "%s %s", path, whole ? "counts below 0" : "does not match its checksum");
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

bool checkpoint_has_copies(const char* checkpoint, const Json* state, const char* run_folder, char* error) {
    const char* not_copied = "config.json model.safetensors optimizer.safetensors";
    const Json* files = json_get(state, "files");
    for (const Json* file = files ? files->child : NULL; file; file = file->next) {
        const char* path = path_in(run_folder, file->key);
        if (text_among(file->key, not_copied, ' ') || !file_name_plain(file->key) || access(path, F_OK) != 0) continue;
        if (file_whole(run_folder, file, error)) continue;
        return data_error(error, "%s, which %s/state.json has; type rm %s, and the checkpoint's copy is taken", error,
                          checkpoint, path);
    }
    return true;
}

Json* checkpoint_newest(const char* run_folder, bool model_alone, char* folder, size_t bytes) {
    SCOPED int64_t* steps;
    int count = checkpoint_list(run_folder, &steps);
    Json* state = NULL;
    for (int i = 0; i < count && !state; i++) {
        char error[DATA_ERROR_BYTES];
        SCOPED char* name = checkpoint_name(run_folder, steps[i]);
        snprintf(folder, bytes, "%s", name);
        state = checkpoint_verify(folder, model_alone, error);
        const char* next = i + 1 < count ? "; trying the one before" : "";
        if (!state) fprintf(stderr, "train: notice: damaged checkpoint: %s%s\n", error, next);
    }
    return state;
}

const char* checkpoint_model(const char** name, bool needed, char* error) {
    const char* model = *name;
    char path[RUN_PATH_BYTES + 32];
    const bool shape = strcmp(model, "auto") == 0 || gpt2_named(model);
    if (shape && !needed) return "";
    if (shape && folder_exists(model)) {
        data_error(error,
                   "--model %s is a built-in shape, without weights to sample from; type --model ./%s for the folder",
                   model, model);
        return NULL;
    }
    if (shape) {
        data_error(
            error,
            "--sample and --eval need --model DIR, a folder with config.json and model.safetensors (a checkpoint is "
            "one); for samples and scores on the way of a run, type --sample-every N and --eval-every N");
        return NULL;
    }
    const char* folder = folder_exists(model) ? realpath(model, NULL) : NULL;
    if (!folder) return gpt2_unknown(model, error), NULL;
    const bool weights = model_folder_has_weights(folder);
    const bool checkpoint = weights && access(path_in(folder, "state.json"), F_OK) == 0;
    Json* state = weights ? NULL : checkpoint_newest(folder, true, path, sizeof(path));
    if (state) folder = text_copy(path);
    if (!weights && !state && file_exists(path_in(folder, "log.jsonl"))) {
        data_error(error, "--model %s is a run without a whole checkpoint; let it save one, or name another folder",
                   folder);
        return NULL;
    }
    if (checkpoint && !(state = checkpoint_verify(folder, true, error))) {
        return data_error(error, "--model %s: damaged checkpoint: %s; name another one", folder, error), NULL;
    }
    json_free(state);
    return *name = folder;
}

// Refuses a checkpoint in `folder` that another version wrote, or that was saved without states.
static bool is_resumable(const Json* state, const char* resume, const char* folder, char* error) {
    const int64_t version = json_int(state, "version", 0);
    if (version != CHECKPOINT_VERSION) {
        return data_error(error, "%s was written by another version of nibble (%lld); resume with that one", folder,
                          (long long)version);
    }
    return json_get(json_get(state, "files"), "optimizer.safetensors") ||
           data_error(
               error,
               "--resume %s: %s was saved with --save weights, without the optimizer's states; type --model %s in "
               "place of --resume for a new run that begins with its weights",
               resume, folder, shell_word(folder));
}

bool checkpoint_locate(const char* resume, const char* run, char* folder, size_t bytes, bool* named_itself,
                       Json** state, char* error) {
    *named_itself = false;
    *state = NULL;
    if (strcmp(resume, "off") == 0) return true;
    bool automatic = strcmp(resume, "auto") == 0;
    const char* named = automatic ? run : resume;
    if (automatic && !run[0]) return data_error(error, "--resume auto needs the run folder: add --run DIR");
    if (!automatic && !folder_exists(named)) {
        return data_error(
            error, "--resume %s: no such folder; give a run folder, a checkpoint in it, or auto with --run DIR", named);
    }
    if (!automatic && access(named, R_OK | X_OK) != 0) {
        return data_error(error, "--resume %s: %s; give a folder that you may read", named, strerror(errno));
    }
    *named_itself = !automatic && file_exists(path_in(named, "state.json"));
    if (*named_itself) {
        snprintf(folder, bytes, "%s", named);
        while (strlen(folder) > 1 && folder[strlen(folder) - 1] == '/') folder[strlen(folder) - 1] = 0;
        SCOPED char* real = step_of(path_name(folder), "") < 0 ? realpath(named, NULL) : NULL;  // such as "."
        if (real) snprintf(folder, bytes, "%s", real);
        *state = checkpoint_verify(folder, false, error);
        if (!*state) {
            return data_error(error,
                              "--resume %s: damaged checkpoint: %s; resume from the one before, or give the run folder",
                              named, error);
        }
    } else {
        SCOPED int64_t* steps;
        const int count = checkpoint_list(named, &steps);
        *state = checkpoint_newest(named, false, folder, bytes);
        if (!*state && count > 0) {
            return data_error(error,
                              "--resume %s: %s holds no whole checkpoint (step_*): all %d are damaged; begin anew "
                              "without --resume, in another --run",
                              resume, named, count);
        }
        if (!*state && !automatic) {
            return data_error(error,
                              "--resume %s holds no checkpoint (step_*); give a run folder that does, or type --resume "
                              "auto --run %s, with the options of its first command, to begin it anew",
                              named, shell_word(named));
        }
    }
    if (!*state || is_resumable(*state, resume, folder, error)) return true;
    json_free(*state);
    return false;
}

// Renames the checkpoints of the run folder that are newer than `checkpoint`, which are damaged, to NAME.damaged; in a
// dry run it only looks. Refuses them if the user named this checkpoint, and a run folder that another run is in.
static bool put_newer_aside(const char* run_folder, const char* checkpoint, bool named_itself, bool dry_run,
                            char* error) {
    SCOPED char *parent = realpath(path_parent(checkpoint), NULL), *chosen = realpath(run_folder, NULL);
    bool same = parent && chosen && strcmp(parent, chosen) == 0;
    if (!same && file_exists(path_in(run_folder, "log.jsonl"))) {
        return data_error(error, "--run %s holds another run than the checkpoint %s; name a new folder", run_folder,
                          checkpoint);
    }
    SCOPED int64_t* steps = NULL;
    const int64_t step = step_of(path_name(checkpoint), "");
    int count = same ? checkpoint_list(run_folder, &steps) : 0;
    for (int i = 0; i < count && steps[i] > step; i++) {
        SCOPED char *path = checkpoint_name(run_folder, steps[i]), *aside = text_format("%s.damaged", path);
        if (named_itself) {
            return data_error(error,
                              "%s is newer than %s in the same run; name a new folder for the branch with --run DIR",
                              path, checkpoint);
        }
        if (!dry_run && !folder_remove(aside, error)) return false;
        if (!dry_run && rename(path, aside) != 0) {
            return data_error(error, "%s cannot be renamed: %s", path, strerror(errno));
        }
    }
    return true;
}

bool checkpoint_continue(RunFolder* run, const char** name, const char* checkpoint, bool named_itself, bool dry_run,
                         char* error) {
    if (!**name) {
        const bool log = file_exists(path_in(path_parent(checkpoint), "log.jsonl"));
        if (named_itself && (!log || step_of(path_name(checkpoint), "") < 0)) {  // it was copied, say
            return data_error(error, "--resume %s: this checkpoint lies in no run folder; name one with --run DIR",
                              checkpoint);
        }
        *name = text_copy(path_parent(checkpoint));
        if (!dry_run && !run_folder_hold(run, *name, error)) return false;
    }
    return put_newer_aside(*name, checkpoint, named_itself, dry_run, error);
}

// Removes all but the newest `keep`, never `step`'s, and leftovers of interrupted saves.
static bool checkpoint_prune(const char* run_folder, int64_t keep, int64_t step, char* error) {
    bool ok = true;
    SCOPED int64_t* steps;
    int count = checkpoint_list(run_folder, &steps);
    for (int64_t i = keep; i < count; i++) {
        SCOPED char *path = checkpoint_name(run_folder, steps[i]), *aside = text_format("%s.tmp", path);
        // A checkpoint loses its name first: one that is removed in part must not look whole.
        if (steps[i] != step) ok = folder_remove(rename(path, aside) == 0 ? aside : path, error) && ok;
    }
    DIR* dir = opendir(run_folder);
    for (struct dirent* entry; dir && (entry = readdir(dir));) {
        if (step_of(entry->d_name, ".tmp") < 0 && step_of(entry->d_name, ".old.tmp") < 0) continue;
        ok = folder_remove(path_in(run_folder, entry->d_name), error) && ok;
    }
    if (dir) closedir(dir);
    return ok;
}

bool checkpoint_room(const char* run_folder, int64_t bytes, int64_t saves, int64_t keep, bool states, char* error) {
    const long long count = keep > 0 && keep < saves ? keep + 1 : saves;
    if (disk_holds(*run_folder ? run_folder : "runs", count * bytes, error)) return true;
    return data_error(error, "%s, for %lld checkpoint%s; free some, or name another --run%s%s", error, count,
                      count > 1 ? "s" : "", keep > 1 && saves > 2 ? ", or type --keep 1" : "",
                      states ? ", or type --save weights or none" : "");
}

bool checkpoint_possible(RunFolder* run, int64_t bytes, const Json* state) {
    if (strcmp(run_text(run, "save"), "none") == 0) return true;
    const int64_t every = run_int(run, "save-every");
    const int64_t saves = state || every == 0 ? 1 : run_int(run, "steps") / every + 1;
    return checkpoint_room(run_text(run, "run"), bytes, saves, run_int(run, "keep"), run_saves_states(run), run->error);
}

// Completes the sentence in run->error about a checkpoint that could not be written.
static bool save_failed(RunFolder* run, bool nonfinite) {
    char* error = run->error;
    const long long number = run->state.step;
    const double lr = run_real(run, "lr");
    if (!nonfinite) {
        return data_error(error,
                          "checkpoint of step %lld: %s; free space or name another --run, and go on with --resume %s",
                          number, error, run_resume_words(run));
    }
    if (run->last_checkpoint[0]) {
        return data_error(error, "step %lld: %s, so it was not saved; type --resume %s with a smaller --lr (now %g)",
                          number, error, run_resume_words(run), lr);
    }
    return data_error(error,
                      "step %lld: %s, so it was not saved, and there is no earlier checkpoint; begin anew with a "
                      "smaller --lr (now %g)",
                      number, error, lr);
}

bool checkpoint_folder_write(RunFolder* run, const Checkpoint* checkpoint) {
    char* error = run->error;
    CheckpointFile files[2] = {{"model.safetensors", 0, -1, false}, {"optimizer.safetensors", 0, -1, false}};
    char ignored[DATA_ERROR_BYTES];
    const long long step = run->state.step, keep = checkpoint->prune ? run_int(run, "keep") : 0;
    SCOPED char *path = checkpoint_name(run->path, step), *temporary = text_format("%s.tmp", path);
    const char* folder = checkpoint->writes ? temporary : NULL;
    const Source optimizer = {checkpoint->entry, checkpoint->arrays, PIECE_BYTES, NULL,
                              checkpoint->array, checkpoint->context};
    bool ok = !folder || folder_new(folder, error);
    if (checkpoint->sends) {
        ok = ok && model_write(folder, checkpoint, &files[0], error);
        ok = ok && (!run_saves_states(run) || source_write(folder, &optimizer, &files[1], error));
    }
    if (folder) ok = ok && folder_finish(run, folder, checkpoint, files, error) && checkpoint_commit(path, error);
    if (!ok) {
        if (folder) folder_remove(folder, ignored);
        return save_failed(run, files[0].nonfinite || files[1].nonfinite);
    }
    // First of all, since every error message that may follow names it.
    snprintf(run->last_checkpoint, sizeof(run->last_checkpoint), "%.4095s", path);
    if (!folder) return true;
    run_say(run, "save %6lld  %s  %.1f s\n", step, path, seconds_now() - checkpoint->begin);
    if (keep > 0 && !checkpoint_prune(run->path, keep, step, ignored)) {
        fprintf(stderr, "train: notice: %s\n", ignored);
    }
    return true;
}
