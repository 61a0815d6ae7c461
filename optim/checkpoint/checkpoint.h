// The optimizer in a checkpoint: what its files hold, how they are written and read, in the same or in other formats,
// and the options of a run that resumes with other ones.
#pragma once
#include "../optim.h"

// Bytes of a checkpoint's two files, for the whole model. The model file holds weights that are stored as F32 or BF16
// unchanged, and the values of all other weights as F32. The optimizer's file holds the codes of those other weights,
// and the states.
struct OptimFiles {
    int64_t model, optimizer;
};
OptimFiles optim_file_bytes(const OptimConfig* config, const OptimTensor* tensors, int count);

// Returns true if a model file holds weights of this safetensors type as they are stored.
inline bool optim_model_dtype(const char* dtype) {
    return strcmp(dtype, "F32") == 0 || strcmp(dtype, "BF16") == 0;
}

// An optimizer in a checkpoint, in any formats, and the functions that read it.
struct OptimStored {
    OptimConfig config;  // resolved; with the rule, formats and overrides of the run that wrote it
    int arrays;          // number of arrays in its file
    // Returns the bytes of the array with this name, safetensors type and size, in the layout of `config`; NULL if
    // there is none. It is not asked for primary weights of type F32 or BF16: those come from `weights`.
    const void* (*array)(void* context, const char* name, const char* dtype, int64_t bytes);
    // Reads `bytes` bytes of what `array` returned, from byte `at` on.
    void (*read)(void* context, const void* array, int64_t at, int64_t bytes, void* to);
    // Reads the weights of a tensor, rows x cols, from the model file.
    void (*weights)(void* context, int tensor, float* values);
    void* context;
    const char* notices = nullptr;  // receives a line for every conversion, and every moment that begins or ends here
};

// Loads the weights and states of a new optimizer, or shard, from an unsharded checkpoint. Arrays in the same format
// are restored to the bit, for any launches. Other formats are decoded (from the master, if the weights have one) and
// encoded to nearest, a tensor at a time, and `notices` says so. Moments that the checkpoint's rule did not keep
// become zero; but a rule that needs a v is refused if the checkpoint has none. Call optim_decode, or arena_loaded,
// afterwards. Returns false with a sentence if v or an array is missing; the optimizer must then not be used.
bool optim_load(Optim* optim, OptimStored* stored, char* error);

// The functions below write and read the optimizer in a checkpoint, whose files are unsharded. `shard` says what each
// rank keeps; NULL: there is one rank. All ranks call these functions in the same order. The bytes that are read arrive
// on rank 0; on other ranks, `to` is scratch memory of the same size.

// Returns the safetensors type of a tensor's weights in the model file: BF16 if they are stored in it, otherwise F32.
const char* optim_saved_dtype(const Optim* optim, int tensor);
// Lists the arrays of the optimizer's file, followed by `extra`, an array of the caller's that every rank has whole
// (NULL: none). `tensors` are the optimizer's. Do not use the data of the arrays.
struct OptimSaved {
    const Optim* optim;
    struct Plan* whole;  // of the whole arena
    struct Shard* shard;
    OptimStream array[OPTIM_STREAMS + 1];
    int arrays;
};
OptimSaved* optim_saved_open(const Optim* optim, struct Shard* shard, const OptimStream* extra);
// Read the weights of tensors[t] in their type (rows x cols), and `bytes` bytes of array i from byte `at` on.
void optim_saved_weights(const OptimSaved* saved, int t, void* to);
void optim_saved_read(const OptimSaved* saved, int i, int64_t at, int64_t bytes, void* to);
void optim_saved_close(OptimSaved* saved);
// Returns true if all ranks that keep whole weights have the same bytes. `weights` is the arena of `elements` that the
// matmuls read; NULL: the stored weights are compared.
bool optim_saved_equal(const Optim* optim, struct Shard* shard, const void* weights, int64_t elements);
// Returns rule, formats and overrides as the text of a JSON object, which the caller frees.
char* optim_saved_formats(const OptimConfig* config);
// Calls optim_load for a checkpoint with these formats; `stored` has the callbacks and, in its config, the run's
// numbers. Also reads `extra`, an array of the caller's, if the checkpoint has it and its `data` is not NULL. Returns
// false with a sentence that begins with the name of the file at fault.
bool optim_saved_load(Optim* optim, OptimStored* stored, const struct Json* formats, const OptimStream* extra,
                      char* error);

// The options of a run that resumes with other options than its checkpoint's.
struct OptimResume {
    OptimConfig config;  // not resolved: the options of this run; optim_resume may change v and overrides
    double lr;           // becomes larger or smaller as a new rule wants it unless it was typed
    bool v_typed, lr_typed, overrides_typed;
    const struct Json *options, *formats;  // of the checkpoint
    const char* changed;                   // to which the changed options are added, for the banner
    const char* asked;  // receives the overrides that the user asked for, for the next checkpoint; "": none were typed
    bool other_rule;    // receives true if the rule is not the checkpoint's
};
// Sets v, overrides and lr for a resumed run, and reports the changes. The caller may have added `added` to overrides.
void optim_resume(OptimResume* resume, const char* added);
