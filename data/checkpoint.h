// The checkpoints of a run folder. RUN/step_00001000 holds files, and a state.json with the size and CRC-32C of each
// and of itself. It is written as step_00001000.tmp, synced and renamed, so a folder without .tmp is complete; the
// checksums tell if the disk has damaged it.
#pragma once
#include "gpt2_config.h"
#include "model_folder.h"
#include "options.h"
#include "run_folder.h"
C_LINKAGE_BEGIN

// Lists the steps of a run folder's checkpoints, newest first, in *steps, which the caller frees. Returns how many.
int checkpoint_list(const char* run_folder, int64_t** steps);
// Returns the name of a step's folder, RUN/step_%08lld, which the caller frees.
char* checkpoint_name(const char* run_folder, int64_t step);

enum { CHECKPOINT_VERSION = 1 };  // of state.json

// Sets `state` from state.json's tree, except the counts and checksums of data, which stay those of the data that is
// open. Returns how many sentences about changed data are in `changes`. Other validation data resets the best loss.
int run_state_resume(RunState* state, const Json* json, const char* changes[2]);

// A file of a checkpoint as it was written.
typedef struct {
    const char* name;
    uint32_t crc;
    int64_t bytes;   // -1: not known yet, nor is crc; checkpoint_seal finds both if the file exists
    bool nonfinite;  // writing stopped at a value that is not finite
} CheckpointFile;
// Writes state.json: `text`, an open object that ends in ",\n"; then "files" with sizes and checksums, and its own.
bool checkpoint_seal(const char* folder, const char* text, const CheckpointFile* files, int count, char* error);

// A checkpoint to be written. Its arrays are requested in the order in which the files hold them.
typedef struct {
    Gpt2Shape shape;
    const ModelTensor* tensors;  // (count) of the model, each of the type that it has in the file
    int count;
    const SafetensorsEntry* entry;  // (arrays) of the optimizer
    int arrays;
    bool writes;  // false: this process only sends its arrays to the one that writes
    bool sends;   // false: it does not send either, since the writing process has all arrays
    // Puts tensor t, in its dtype and the program's layout, into `to`; and `bytes` bytes of array i, from byte `at` on.
    void (*weights)(void* context, int t, void* to);
    void (*array)(void* context, int i, int64_t at, int64_t bytes, void* to);
    void* context;
    const char* formats;  // JSON: how the optimizer stores weights and states
    const void* options;  // as they are stored
    double begin;         // seconds_now() when the save began
    bool prune;           // older checkpoints beyond --keep go
} Checkpoint;
// Writes a checkpoint of the run's current step, prints a line, and removes older ones beyond --keep. If it cannot be
// written, no part of it is left. Processes that do not write send their arrays and note the name.
bool checkpoint_folder_write(RunFolder* run, const Checkpoint* checkpoint);

// A reader of a checkpoint's arrays. `error` keeps the first failure; it is "" while there is none.
typedef struct {
    ModelFolder model;
    Safetensors optimizer;
    const ModelTensor* tensors;  // of the model
    RunFolder* run;              // where checkpoint_notice prints; set by the caller
    char error[DATA_ERROR_BYTES];
} CheckpointReader;
// Opens a checkpoint, which must hold exactly these tensors (count) of a model of `layers` layers.
bool checkpoint_open(CheckpointReader* reader, const char* folder, const ModelTensor* tensors, int count, int layers,
                     char* error);
void checkpoint_close(CheckpointReader* reader);
// Callbacks for loading an optimizer; `context` is the reader. The first returns the array of this name, type and
// size, or NULL; the second reads `bytes` bytes of it from `at` on, whose values must be finite; the third reads a
// tensor of the model as fp32; the last prints a line.
const void* checkpoint_array(void* context, const char* name, const char* dtype, int64_t bytes);
void checkpoint_array_read(void* context, const void* array, int64_t at, int64_t bytes, void* to);
void checkpoint_weights(void* context, int tensor, float* values);
void checkpoint_notice(void* context, const char* line);
// Returns state.json's tree, which the caller frees, without verifying the other files; NULL with a sentence.
Json* checkpoint_state(const char* folder, char* error);
// Returns whether the tokenizer's files in a run folder are those that the checkpoint's state.json lists.
bool checkpoint_has_copies(const char* checkpoint, const Json* state, const char* run_folder, char* error);
// Compares every file of a checkpoint with its checksum; with `model_alone`, optimizer.safetensors may be damaged or
// absent. Returns state.json's tree, which the caller frees, if all are intact; otherwise NULL with a sentence.
Json* checkpoint_verify(const char* folder, bool model_alone, char* error);
// Finds the newest intact checkpoint of a run folder and writes its path to `folder`; names damaged ones on stderr.
Json* checkpoint_newest(const char* run_folder, bool model_alone, char* folder, size_t bytes);
// Returns the absolute path of the folder that --model names, and sets *model to it; "" if it names a built-in shape or
// is "auto"; NULL with a sentence. A built-in shape's bare name always means the shape, and ./NAME a folder of that
// name. A run folder stands for its newest checkpoint. `needed`: only a folder will do, as for --sample.
const char* checkpoint_model(const char** model, bool needed, char* error);
// Finds the checkpoint that --resume names: `resume` is off, auto (the newest of `run`), a run folder, or a checkpoint,
// which sets *named_itself. Writes its path to `folder`, and its state.json's tree to *state (NULL: begin a new run).
bool checkpoint_locate(const char* resume, const char* run, char* folder, size_t bytes, bool* named_itself,
                       Json** state, char* error);
// Returns whether a run may continue from `checkpoint` in the run folder *name, which must be the checkpoint's own or
// have no run in it. "" stands for its own: *name is set to it and it is held. Newer checkpoints there are damaged and
// are renamed to NAME.damaged, unless in a dry run; if the user named this one (`named_itself`), they are an error.
bool checkpoint_continue(RunFolder* run, const char** name, const char* checkpoint, bool named_itself, bool dry_run,
                         char* error);
// Returns whether the disk of a run's folder ("": one in runs/) has room for the checkpoints, of `bytes` each, that
// exist at one time: up to `keep`, and one that is being written. `states`: they hold states, which advice names.
bool checkpoint_room(const char* run_folder, int64_t bytes, int64_t saves, int64_t keep, bool states, char* error);
// Does the same for the run's options. `state`: the checkpoint that it continues from, or NULL.
bool checkpoint_possible(RunFolder* run, int64_t bytes, const Json* state);

C_LINKAGE_END
