// The checkpoints of a run folder: RUN/step_00001000 holds files and a state.json with the size and CRC-32C of each and
// a checksum of its own. It is written as step_00001000.tmp, synced and renamed, so a folder without .tmp is whole
// unless the disk damaged it, which the checksums tell.
#pragma once
#include "gpt2_config.h"
#include "model_folder.h"
#include "options.h"
#include "run_folder.h"
C_LINKAGE_BEGIN

// Returns the path from the root, "" where it is "". Glob patterns stay what they are. The caller owns it.
char* path_absolute(const char* path);
// Does the same for each path of a list with commas.
char* paths_absolute(const char* list);

// Lists the steps of a run folder's checkpoints, newest first, in *steps, which the caller frees. Returns how many.
int checkpoint_list(const char* run_folder, int64_t** steps);
// Returns the name of a step's folder, RUN/step_%08lld, which the caller frees.
char* checkpoint_name(const char* run_folder, int64_t step);

enum { CHECKPOINT_VERSION = 1 };  // of state.json

// Sets `state` from state.json's tree, except the data's counts and sums, which stay as they are now. Returns how many
// sentences about other data are in `changes`; with other validation data the best loss begins anew.
int run_state_resume(RunState* state, const Json* json, const char* changes[2]);

// A file of a checkpoint as it was written.
typedef struct {
    const char* name;
    uint32_t crc;
    int64_t bytes;   // -1: nobody summed it while writing (a small file): checkpoint_seal reads it, if it is there
    bool nonfinite;  // it was not written to the end, because a value is not finite
} CheckpointFile;
// Writes state.json: `text`, an open object that ends in ",\n", and then "files" with their sums and the seal.
bool checkpoint_seal(const char* folder, const char* text, const CheckpointFile* files, int count, char* error);

// This is a checkpoint to be written. The bytes of its arrays are asked for in the order of the files.
typedef struct {
    Gpt2Shape shape;
    const ModelTensor* tensors;  // (count) of the model, each of the type that it has in the file
    int count;
    const SafetensorsEntry* entry;  // (arrays) of the optimizer
    int arrays;
    bool writes;  // false: the process only gives its arrays to the one that writes
    bool sends;   // false: not even these, since the one that writes has them all
    // Puts tensor t as the program has it, of its dtype, into `to`; and `bytes` bytes of array i from byte `at` on.
    void (*weights)(void* context, int t, void* to);
    void (*array)(void* context, int i, int64_t at, int64_t bytes, void* to);
    void* context;
    const char* formats;  // JSON: how the optimizer stores weights and states
    const void* options;  // as they are stored
    double begin;         // seconds_now() when the save began
    bool prune;           // older checkpoints beyond --keep go
} Checkpoint;
// Writes a checkpoint of where the run stands, says so in a line, and removes older ones beyond --keep. Nothing stays
// of one that cannot be written. Processes that do not write give their arrays and note the name.
bool checkpoint_folder_write(RunFolder* run, const Checkpoint* checkpoint);

// This reads the arrays of a checkpoint. The first failure stays in `error`, which is "" while all is well.
typedef struct {
    ModelFolder model;
    Safetensors optimizer;
    const ModelTensor* tensors;  // of the model
    RunFolder* run;              // where checkpoint_notice prints; set by the caller
    char error[DATA_ERROR_BYTES];
} CheckpointReader;
// Opens a checkpoint, which must hold just these tensors (count) of a model of `layers` layers.
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
// Returns state.json's tree, which the caller frees, of a checkpoint that another rank has verified; NULL on failure.
Json* checkpoint_state(const char* folder, char* error);
// Returns whether those files of a run folder that a checkpoint has copies of (the tokenizer's) are as state.json says.
bool checkpoint_has_copies(const char* checkpoint, const Json* state, const char* run_folder, char* error);
// Compares every file of a checkpoint with its sum; with `model_alone`, optimizer.safetensors may be damaged or absent.
// Returns state.json's tree, which the caller frees, if it is whole; otherwise NULL and a sentence.
Json* checkpoint_verify(const char* folder, bool model_alone, char* error);
// Finds the newest whole checkpoint of a run folder, whose path goes into `folder`; names damaged ones on stderr.
Json* checkpoint_newest(const char* run_folder, bool model_alone, char* folder, size_t bytes);
// Returns the folder that --model names, from the root, which *model becomes too; "" where it names a built-in shape or
// is "auto"; NULL with a sentence. A built-in shape's bare name is always that shape, and a folder of the same name is
// written ./NAME. A run folder stands for its newest checkpoint. `needed`: for --sample, which goes with a folder only.
const char* checkpoint_model(const char** model, bool needed, char* error);
// Finds the checkpoint that --resume names: `resume` is off, auto (the newest of `run`) or a folder, a run's or, which
// sets *named_itself, a checkpoint's. Its name goes into `folder`, and its state.json's tree into *state, which is NULL
// where the run begins anew.
bool checkpoint_locate(const char* resume, const char* run, char* folder, size_t bytes, bool* named_itself,
                       Json** state, char* error);
// Returns whether a run may go on from `checkpoint` in the folder `*name` ("": the one that it lies in, whose name it
// becomes, and which is then held): its own, or one without a run. Newer checkpoints of its own folder are damaged and
// are renamed to NAME.damaged, but not in a dry run. If the user named this one (`named_itself`), they are refused.
bool checkpoint_continue(RunFolder* run, const char** name, const char* checkpoint, bool named_itself, bool dry_run,
                         char* error);
// Returns whether the disk of a run's folder ("": one in runs/) has room for the checkpoints, of `bytes` each, that
// will be there at a time: `keep` of them, and one more that is being written.
bool checkpoint_room(const char* run_folder, int64_t bytes, int64_t saves, int64_t keep, bool states, char* error);
// Does the same for a run with these options, which may go on from the checkpoint `state` (NULL: it begins anew).
bool checkpoint_possible(RunFolder* run, int64_t bytes, const Json* state);

C_LINKAGE_END
