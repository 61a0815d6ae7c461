// The checkpoints of a run folder. RUN/step_00001000 holds files, and a state.json with the size and CRC-32C of each
// and of itself. It is written as step_00001000.tmp, synced and renamed, so a folder without .tmp is complete; the
// checksums tell if the disk has damaged it.
#pragma once
#include "gpt2_config.h"
#include "model_folder.h"
#include "schedule.h"
C_LINKAGE_BEGIN

enum { RUN_PATH_BYTES = 4096 };

// Lists the steps of a run folder's checkpoints, newest first, in *steps, which the caller frees. Returns how many.
int checkpoint_list(const char* run_folder, int64_t** steps);
// Returns the name of a step's folder, RUN/step_%08lld, kept as by text_kept.
const char* checkpoint_name(const char* run_folder, int64_t step);
// Returns the step of such a path; -1 for others, such as the user's step_5.
int64_t checkpoint_step(const char* path);

// The state of a run that a checkpoint keeps beside weights and optimizer states.
typedef struct {
    int64_t step, sequences;        // optimizer steps done; sequences consumed, which is the data position
    int64_t data_tokens;            // of the training data: their number decides the order
    int64_t data_crc, val_crc;      // checksums of training and validation data
    int64_t skipped, skipped_last;  // steps that changed nothing (--on-nonfinite): all, and the latest ones in a row
    double best_val;                // infinite before the first validation
    double last_norm;               // of the last step's gradients, for --clip-by last; 0: there was none
    int64_t best_step;              // of best_val, if this process found it; not stored
    RateRise rise;
    int64_t parts_left;  // layers that kept their weights in a step because their gradients were not finite
    int64_t saturated;   // elements that were too large for their fp8 codes
} RunState;
enum { CHECKPOINT_VERSION = 1 };  // of state.json
// Returns what state.json's tree holds; what it lacks is as in `otherwise`.
RunState run_state_read(const Json* json, const RunState* otherwise);

// A file of a checkpoint as it was written.
typedef struct {
    const char* name;
    uint32_t crc;
    int64_t bytes;  // -1: not known yet, nor is crc; checkpoint_seal finds both if the file exists
} CheckpointFile;

// A checkpoint that is being written. Each file is gathered, checked, summed and written in one pass: checkpoint_begin
// makes the folder and begins model.safetensors, of tensors in their dtypes; then come these tensors, and after
// checkpoint_begin_arrays those of optimizer.safetensors, in the order of their lists;
// checkpoint_end adds the other files, seals them, and gives the folder its name. The first failure leaves a sentence
// in `error`; checkpoint_abandon then removes what was written. A process that writes nothing begins none, with a
// zeroed writer, and these functions do nothing.
typedef struct {
    char* error;
    const char *run_folder, *path;
    const char* folder;         // `path` with .tmp, while it is written; NULL: this process writes nothing
    bool nonfinite;             // a value was not finite
    SafetensorsWriter tensors;  // of the file that is open
    CheckpointFile file[16];
    int files;
    bool bf16;  // all tensors of the model are bf16
} CheckpointWriter;
// What a checkpoint holds beside its arrays.
typedef struct {
    const RunState* state;
    const Options *options, *asked;  // the run's; as typed or resumed
    const char* formats;             // JSON: how the optimizer stores weights and states
    Gpt2Shape shape;
    const Json* config;  // config.json of the model that the run began with, or NULL
    int end_token;       // <|endoftext|>, or -1
} CheckpointFacts;
bool checkpoint_begin(CheckpointWriter* writer, const char* run_folder, int64_t step, const ModelTensor* tensors,
                      int count, char* error);
bool checkpoint_begin_arrays(CheckpointWriter* writer, const SafetensorsTensor* arrays, int count);
// Write the next tensor, as the program has it, and the next `bytes` bytes of an array, from byte `at` on.
bool checkpoint_tensor(CheckpointWriter* writer, const ModelTensor* tensor, const void* values);
bool checkpoint_bytes(CheckpointWriter* writer, const SafetensorsTensor* array, int64_t at, int64_t bytes,
                      const void* values);
bool checkpoint_end(CheckpointWriter* writer, const CheckpointFacts* facts);
void checkpoint_abandon(CheckpointWriter* writer);
// Writes state.json: `text`, an open object that ends in ",\n"; then "files" with sizes and checksums, and its own.
bool checkpoint_seal(const char* folder, const char* text, CheckpointFile* files, int count, char* error);
// Makes RUN/best a link to the checkpoint of a step.
bool checkpoint_mark_best(const char* run_folder, int64_t step, char* error);
// Removes all but the newest `keep`, never `step`'s nor the best, and leftovers of interrupted saves.
bool checkpoint_prune(const char* run_folder, int64_t keep, int64_t step, char* error);

// A reader of a checkpoint's arrays. `error` keeps the first failure; it is "" while there is none.
typedef struct {
    Safetensors model, optimizer;
    const ModelTensor* tensors;  // of the model
    char error[DATA_ERROR_BYTES];
} CheckpointReader;
// Opens a checkpoint, which must hold exactly these tensors (count) of a model.
bool checkpoint_open(CheckpointReader* reader, const char* folder, const ModelTensor* tensors, int count, char* error);
void checkpoint_close(CheckpointReader* reader);
// Callbacks for loading an optimizer; `context` is the reader. The first returns the array of this name, type and
// size, or NULL; the second reads `bytes` bytes of it from `at` on, whose values must be finite; the third reads a
// tensor of the model as fp32.
const void* checkpoint_array(void* context, const char* name, const char* dtype, int64_t bytes);
void checkpoint_array_read(void* context, const void* array, int64_t at, int64_t bytes, void* to);
void checkpoint_weights(void* context, int tensor, float* values);

// Returns state.json's tree, which the caller frees, without verifying the other files; NULL with a sentence.
Json* checkpoint_state(const char* folder, char* error);
// Compares every file of a checkpoint with its checksum; with `model_alone`, optimizer.safetensors may be damaged or
// absent. Returns state.json's tree, which the caller frees, if all are intact; otherwise NULL with a sentence.
Json* checkpoint_verify(const char* folder, bool model_alone, char* error);
// Finds the newest intact checkpoint of a run folder and writes its path to `folder`; names damaged ones on stderr.
Json* checkpoint_newest(const char* run_folder, bool model_alone, char* folder, size_t bytes);
// Returns the absolute path of the folder that --model names, and sets *model to it; "" if it names a built-in shape or
// is "auto"; NULL with a sentence. A built-in shape's bare name always means the shape, and ./NAME a folder of that
// name. A run folder stands for its newest checkpoint. `needed`: only a folder will do, as for --sample.
const char* checkpoint_model(const char** model, bool needed, char* error);

C_LINKAGE_END
