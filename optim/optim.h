// The optimizer as the trainer sees it: a description of the model's tensors goes in, and weights in the matmul's
// precision, a step, and the stored streams (for checkpoints) come out. Formats, rules and block sizes are names in
// strings here and nowhere else in the trainer.
//
// The parameters of the model live in one arena. optim_layout gives every tensor an offset (in elements, a multiple of
// TILE_ELEMENTS, so that vectors and blocks of any format start at a tensor's first element). Gradients are written by
// the trainer into an arena of the same layout; padding between tensors is zero in every arena and stays so.
//
// Bit contract: for every combination the step's result is the same on the CPU, on a GPU, for any launch shape, and
// before and after a resume. Noise is keyed by (seed, step, stream, global element index).
//
// Sharding: an optimizer whose config names a part of the arena keeps that part alone, of weights, states and compute
// copy, takes gradients of it, and computes what an unsharded one computes there, to the bit. Its arrays begin at the
// part's first element; those of an unsharded one are the shards' one after another. A part may begin and end within a
// tensor, unless a format has one scale for each tensor, or scales by row and column.
#pragma once
#include <string.h>

#include <stddef.h>
#include <stdint.h>

#include "../kernels/common.cuh"
#include "../kernels/tile.h"

struct OptimTensor {
    const char* name;  // transformers' name, such as "h.0.attn.c_attn.weight"
    int64_t rows;      // 1 for a vector
    int64_t cols;
    bool decay;      // weight decay applies (matrices and embeddings)
    int64_t offset;  // set by optim_layout: first element in every arena
    int parts = 1;   // equal matrices that its rows are stacked from, such as queries, keys and values: 3
};

struct OptimConfig {
    const char* preset;   // "adamw32", ...; gives the defaults of the names below, and of overrides
    const char* rule;     // "adamw"; NULL or "" = the preset's, as for the next ones
    const char* weights;  // "fp32", "bf16:sr", "bf16+fp32", ...
    const char* grads;    // "fp32", "bf16", ...: the format that the trainer writes
    const char* m;        // "fp32", "bf16:sr", ...
    const char* v;        // as m; "none" if the rule keeps no second moment
    float beta1, beta2, eps, weight_decay;
    uint64_t seed;
    const char* decay_mode = "coupled";   // to the learning rate: p *= 1 - lr * wd; "independent": 1 - wd * lr / lr_max
    float lr_max = 0.0f;                  // the largest learning rate of the schedule; needed by "independent"
    float beta3 = 0.9999f, alpha = 5.0f;  // ademamix: decay of the slow average, and its weight
    int64_t ramp = 0;                     // steps over which both rise to these values; 0: from the start
    const char* overrides = "";           // formats, learning rate or decay by tensor name: see override.h; "" =
                                          // the preset's where weights, m and v are, "none" = none
    const char* formats = "";             // files of formats of the user's own, for m and v on a GPU: see user.cuh
    const struct UserFormats* user_formats = nullptr;  // what optim_resolve has read of them
    int64_t begin = 0, end = 0;  // the part of the arena that is kept here, in whole TILE_ELEMENTS; end 0: all
    bool stored = false;         // a checkpoint's: overrides "" = none, and feedback is not checked
    bool keeps_copy = true;      // a copy, in the compute type, of all weights that the matmuls cannot read as they are
                                 // stored; false: the caller decodes them in pieces (decoded.h)
    float momentum = 0.95f;      // muon, normuon, rmnp, normuon-lite: decay of m, in place of beta1
    bool nesterov = true;        // and their direction looks ahead: g + momentum (m - g); false: it is m
    int64_t ns_steps = 5;        // and steps of Newton-Schulz, with coefficients "jordan" or "polar-express"
    const char* ns_coefficients = "jordan";
    const char* rank_basis = "fp32";  // of galore: how its directions are stored, fp32, bf16 or lin8 in blocks of 256
    int64_t rank = 0,
            rank_gap = 200;          // galore, fira, apollo: rank, 0 a quarter of the shorter side; steps between bases
    float rank_scale = 0.0f;         // and factor on the update, 0 the paper's (matrix/low_rank.h)
    int64_t matrix_chunk = 3 << 25;  // rules that read matrices take about so many elements at a time: no bit depends
                                     // on it (matrix/matrix.h)
    float limit_growth = 0.0f;       // a tensor's update grows by at most this factor a step; 0: no limit
    float clip_update = 1.0f;        // adafactor, came: the largest RMS of a tensor's update; 0: no limit
    bool relative_steps = false;     // adafactor: the learning rate is at most 1 / sqrt(step)
    bool scale_by_rms = false;       // adafactor: the update is multiplied by the RMS of the tensor's weights
    bool offload = false;            // the states lie in host memory, from where the caller brings them (offload.h)
    bool folds = false;              // optim_fold_tensors will be called
    bool replays = false;            // of placed steps: they may be captured in CUDA graphs
    bool placed = false;  // gradients, and weights in the compute type, lie in tensors of the caller's own (placed.h)
    // Returns device memory of this size for the stored streams, 16-byte aligned; does not return if there is none. The
    // memory stays the caller's. Null: the optimizer allocates and frees.
    void* (*allocate)(void* context, int64_t bytes) = nullptr;
    void* allocator = nullptr;  // its context
    // These receive what is made, at once, to be freed if making the rest fails and the process goes on.
    struct Optim** made = nullptr;
    struct Plan** planned = nullptr;
    char* joined = nullptr;  // the text of `overrides`, if optim_resolve has put it together
};

// Bytes that a combination takes. They are known before anything is allocated.
struct OptimBytes {
    int64_t weights;  // the weights as stored, master and compensation included
    int64_t compute;  // a decoded copy for the matmul of those tensors whose stored weights do not serve
    int64_t states;   // m, v, what else the rule keeps, and their scales, unless they are in host memory
    int64_t tables;  // the tile table (8 bytes for each 2048 elements) and the formats' constants; formats with a scale
                     // for each tensor, or by row and column, add 32 bytes for each 2048 elements and their scales;
                     // rules that read matrices the buffers of their products (matrix/matrix.h)
    int64_t host;    // the states, with OptimConfig.offload
};

enum OptimType { OPTIM_FP32, OPTIM_BF16 };  // element types that the trainer computes with

// One stored array. A checkpoint keeps its bytes as they are, never widened.
struct OptimStream {
    const char* name;   // "weights", "master", "m", "v", "m.scales", ...; for overrides "m.1[wpe|ln*]"
    const char* dtype;  // safetensors' name: "F32", "BF16", "U8", ...
    void* data;  // device memory, or with OptimConfig.offload host memory for states, `elements` of `element_bytes`
                 // each, in the arena's layout, from config.begin or the first tensor of its formats on; scales of
                 // tensors, rows and columns: one tensor's after another
    int64_t elements;
    int element_bytes;
    bool is_weights;  // the primary weights; model.safetensors holds them when dtype is F32 or BF16
};

typedef struct Optim Optim;

// A model's tensors and their parts: 0 to layers - 1 are the layers; the embeddings and the last layernorm follow. The
// arrays must outlive whatever is opened with them.
struct ModelParts {
    const OptimTensor* tensors;  // (count)
    const int* part;             // (count) the part of each
    const int* slot;             // (count) not 0: products read the codes of this matrix, if it has such; NULL: none do
    int count, layers;
    OptimType compute;
};
// The tensors of a part in the arena's order; returns how many they are. `tensor` has room for all of the model.
int part_tensors(const ModelParts* model, int part, int* tensor);
inline int decoded_embeddings(int layers) {
    return layers;
}
inline int decoded_final(int layers) {
    return layers + 1;
}

constexpr int OPTIM_STREAMS = 108;  // at most

// Gives each tensor its offset; returns the length of the arena in elements (a multiple of TILE_ELEMENTS). With a
// resolved configuration, tensors to which its overrides give other formats come last: first grouped by the format of
// their weights, then by those of their moments, since each group has arrays and a launch. Without a configuration, the
// one that the optimizer is created with must have no overrides that match. Exits with a sentence if the overrides
// match no tensor, are too many or do not go together.
int64_t optim_layout(OptimTensor* tensors, int count, const OptimConfig* config = nullptr);

// Moves cuts between shards out of tensors whose rule or formats read whole tensors, to the nearer end of the tensor,
// or to the end of the first one, so that the first shard holds something; other cuts stay. `cut` has `cuts` elements
// of the arena, in rising order.
void optim_cuts(const OptimConfig* config, const OptimTensor* tensors, int count, int64_t* cut, int cuts);

// Checks every name and value of the configuration and fills in what the preset gives. Returns false, with one sentence
// that names the option, what was found and what to type in `error` (the nearest known name is suggested).
bool optim_resolve(OptimConfig* config, char* error);

// The usual learning rate of a rule for a model of `channels`: near GPT-3's for adamw, and a fraction of that for rules
// that need smaller ones. A rule that is not known, such as "", gets adamw's.
double optim_usual_lr(const char* rule, int64_t channels);
// Returns beta3 for --beta3 auto: its average remembers a third of a run of so many steps or, where it is came's
// confidence, ten times as many steps as v does.
double optim_usual_beta3(const char* rule, double beta2, int64_t steps);

// Exits with a sentence where `formats`, the files of --format, cannot be used on this device.
void optim_formats_possible(const Device* dev, const char* formats);

// Bytes of the combination (a resolved configuration) on this device.
OptimBytes optim_bytes(const Device* dev, const OptimConfig* config, const OptimTensor* tensors, int count,
                       OptimType compute);

// Bytes of a checkpoint's two files, whatever the ranks keep. The model file holds weights that are stored as F32 or
// BF16 as they are, and the values of all others as F32. The optimizer's file holds the codes of those others, and the
// states.
struct OptimFiles {
    int64_t model, optimizer;
};
OptimFiles optim_file_bytes(const OptimConfig* config, const OptimTensor* tensors, int count);

// True if a model file holds weights of this safetensors type as they are stored.
inline bool optim_model_dtype(const char* dtype) {
    return strcmp(dtype, "F32") == 0 || strcmp(dtype, "BF16") == 0;
}

// One line for the banner: "adamw  weights bf16+fp32  grads bf16  m fp32  v fp32  14 B/param". The figure counts
// weights and states of tensors without overrides, without gradients and the compute copy.
void optim_describe(const OptimConfig* config, char* line, size_t line_bytes);

// Allocates weights (zero) and states (the encoding of zero). `tensors` are copied; `dev` must outlive the optimizer.
// Exits on a CUDA error, and with a sentence when a kernel that is not built in cannot be compiled.
Optim* optim_create(const Device* dev, const OptimConfig* config, const OptimTensor* tensors, int count,
                    OptimType compute);
void optim_free(Optim* optim);

// Sets the weights of one tensor from host values (rows x cols fp32), rounded to nearest; states are untouched. A shard
// takes the part that lies in it. Call optim_decode after the last tensor.
void optim_set_weights(Optim* optim, int tensor, const float* values);

// The same for elements `start`, a multiple of TILE_ELEMENTS, to start + n of a tensor, from values in device memory,
// on dev->stream. The call for its last elements sets the padding behind it, too. Returns false, and sets nothing, for
// formats whose scales reach over a tensor.
bool optim_set_part(Optim* optim, int tensor, int64_t start, int64_t n, const float* values);

// Reads the weights of one tensor into host values, as the model sees them (the bf16 copy of bf16+fp32; not rounded to
// the compute type). A shard writes the part that lies in it and leaves other values alone.
void optim_get_weights(const Optim* optim, int tensor, float* values);

// The weights in the compute type, arena layout from config.begin on, device memory; the pointer is constant for the
// optimizer's life. NULL for an optimizer that keeps no copy.
void* optim_weights(const Optim* optim);

// The weights of one tensor, in device memory, if they are stored in the compute type; otherwise NULL. Only for an
// optimizer of the whole arena.
const void* optim_stored_weights(const Optim* optim, int tensor);

// The weights of one tensor as they are stored, if that is as codes of e4m3 with one scale for all; otherwise NULL. The
// codes begin at a multiple of TILE_ELEMENTS from the array's first. A weight is its code times numbers[1]; numbers[0]
// is the largest magnitude, numbers[2] = 1 / numbers[1]. Device memory, constant for the optimizer's life. NULL also
// for a tensor that is not in this shard.
struct OptimCodes {
    const uint8_t* codes;
    const float* numbers;  // (3)
};
OptimCodes optim_codes(const Optim* optim, int tensor);

// Decodes the weights of one tensor, with the padding behind it, into device memory in the compute type, on
// dev->stream.
void optim_decode_tensor(const Optim* optim, int tensor, void* to);

// Refreshes the compute copy after weights or streams were written from outside (no-op when there is no copy).
void optim_decode(Optim* optim);

// One step over the whole model in one launch per group: new weights and states from the gradients, in place, on
// dev->stream, and the compute copy refreshed. `grads` is an arena in the config's grads format; for a shard, the part
// from config.begin on. `grad_scale` is a device scalar that multiplies every gradient (the clip factor); if it is NaN
// or infinite, the step changes nothing. `step` counts from 1 and leaves out steps that changed nothing.
void optim_step(Optim* optim, const void* grads, const float* grad_scale, float lr, int64_t step);

// The same step for some tensors alone, so that a backward pass can update what it has finished: `tensor` has `count`
// tensors, and the gradients of tensor[i] begin at grads[i], with zeros behind them up to a whole tile; a shard
// steps the part that lies in it. After one call for each tensor of a step, all bits are those of optim_step. Only
// where optim_releases says so.
void optim_step_tensors(Optim* optim, const int* tensor, const void* const* grads, int count, const float* grad_scale,
                        float lr, int64_t step);

// Ends a step whose tensors have been stepped one by one, where the matmuls read a copy of the weights.
void optim_step_end(Optim* optim);

// Adds the gradients of a micro-batch that is not the last of step number `step` to m of some tensors, times the factor
// of their rule (rules/fold.cuh). The last one's optim_step_tensors then steps as if its gradients were the sum of all.
// This needs OptimConfig.folds, and optim_folds must say that it can be. `number` counts such calls for a tensor from 1
// in each step, since each draws its own noise. Where grad_scale is NaN or infinite, m stays as it is.
void optim_fold_tensors(Optim* optim, const int* tensor, const void* const* grads, int count, const float* grad_scale,
                        int64_t step, int number);

// Tensors of rules that read whole matrices are stepped all together, after one optim_step_tensors for each, which only
// takes its gradients into m. Where grad_scale is NaN or infinite, they stay as they are, with what m has taken.
void optim_step_matrices(Optim* optim, const float* grad_scale, float lr, int64_t step);

// Can m of the tensors for which folds[t] holds, and of those of rules that read matrices, take gradients before the
// step? False with a reason, and what to type after a semicolon if another option lets them.
bool optim_folds(const OptimConfig* config, const OptimTensor* tensors, int count, const bool* folds, char* error);

// Can a resolved configuration's step be taken by tensors? False with a sentence for rules that read matrices, whose
// tensors need optim_folds.
bool optim_releases(const OptimConfig* config, const OptimTensor* tensors, int count, char* error);

// The stored streams, in a fixed order.
int optim_stream_count(const Optim* optim);
OptimStream optim_stream(const Optim* optim, int index);

// The stream of a name; its data and name are null if there is none.
OptimStream optim_stream_named(const Optim* optim, const char* name);

// The array of primary weights that contains a tensor, described as if it began at element config.begin: the tensor's
// weights lie at its offset in `data`, and `dtype` is that of its format.
OptimStream optim_weights_stream(const Optim* optim, int tensor);

// Writes which of the user's own formats the optimizer uses, and the checksums of their files, as text for a
// checkpoint.
constexpr int OPTIM_OWN_FORMATS_BYTES = 4096;
void optim_own_formats(const Optim* optim, char text[OPTIM_OWN_FORMATS_BYTES]);

// An optimizer as a checkpoint holds it, in whatever formats.
struct OptimStored {
    OptimConfig config;  // resolved; its formats, rule and overrides are those of the run that wrote it
    int arrays;          // number of arrays in its file
    // Returns the bytes of the array with this name, safetensors type and size, in the layout of `config`; NULL if
    // there is none. It is not asked for primary weights of type F32 or BF16: those come from `weights`.
    const void* (*array)(void* context, const char* name, const char* dtype, int64_t bytes);
    // Reads `bytes` bytes of what `array` returned, from byte `at` on.
    void (*read)(void* context, const void* array, int64_t at, int64_t bytes, void* to);
    // Reads the weights of a tensor, rows x cols, from the model file.
    void (*weights)(void* context, int tensor, float* values);
    // Receives a line of text for every conversion, and for every moment that begins or ends here.
    void (*notice)(void* context, const char* line);
    void* context;
    const char* own_formats = "";  // what optim_own_formats said when it was written
};

// Loads weights and states of a new optimizer, or shard, from a checkpoint, which is unsharded. Arrays in the same
// format come back to the bit, whatever the launches. Other formats are decoded (the master, if the weights have one)
// and encoded to nearest, a piece at a time, and `notice` says so. Moments that the checkpoint's rule did not keep are
// zero; but a rule that needs a v is refused if there is none. Returns false with a sentence if v or an array is
// missing, or if one of the user's own formats has changed; the optimizer must then not be used.
bool optim_load(Optim* optim, const OptimStored* stored, char* error);

// The optimizer in a checkpoint, whose files are unsharded. `shard` says what the ranks keep; NULL: this is the only
// one. All ranks call these functions in one order. What is read arrives on rank 0; elsewhere `to` is room for as much.

// The safetensors type of a tensor's weights in a model file: F32 or BF16 if they are stored so, otherwise F32.
const char* optim_saved_dtype(const Optim* optim, int tensor);
// All arrays but those weights; behind them `extra`, an array of the caller's that every rank has whole (NULL: none).
// `tensors` are the optimizer's. The data of optim_saved_array is not to be used.
typedef struct OptimSaved OptimSaved;
OptimSaved* optim_saved_open(const Optim* optim, struct Shard* shard, const Device* dev, const OptimTensor* tensors,
                             const OptimStream* extra);
int optim_saved_count(const OptimSaved* saved);
OptimStream optim_saved_array(const OptimSaved* saved, int i);
// The weights of tensors[t] in their type, rows x cols; `bytes` bytes of array i from byte `at` on. `saved` is an
// OptimSaved: these are callbacks.
void optim_saved_weights(void* saved, int t, void* to);
void optim_saved_read(void* saved, int i, int64_t at, int64_t bytes, void* to);
void optim_saved_close(OptimSaved* saved);
// Do all ranks that keep whole weights have the same bytes of them? `weights` is the arena of `elements` that the
// matmuls read, or NULL: what is stored is compared.
bool optim_saved_equal(const Optim* optim, struct Shard* shard, const void* weights, int64_t elements);
// Rule, formats and overrides as a JSON object, which the caller frees.
char* optim_saved_formats(const Optim* optim, const OptimConfig* config);
// optim_load from a checkpoint with these formats; `stored` has `read`, and in its config the run's numbers. Also reads
// `extra`, an array of the caller's, if it is there and its `data` is not NULL, which *found says. The sentence in
// `error` begins with the name of the file at fault.
bool optim_saved_load(Optim* optim, OptimStored* stored, const struct Json* formats, const Device* dev,
                      const OptimStream* extra, bool* found, char* error);

// A run that goes on with other options than its checkpoint's.
struct OptimResume {
    OptimConfig config;  // not resolved: the options now; v and overrides may become others
    double lr;           // becomes another rule's usual one unless it was typed
    int64_t channels;
    bool v_typed, lr_typed, overrides_typed;
    const struct Json *options, *formats;  // of the checkpoint
    char* changed;                         // what is not as it was is added here, for the banner
    size_t changed_bytes;
    const char*
        asked;  // set: overrides as the user asked for them, for the next checkpoint; "" where the run keeps its
};
void optim_resume(OptimResume* resume);

// Bytes really allocated: equal to optim_bytes.
OptimBytes optim_allocated(const Optim* optim);

// True if the combination's kernel is built in; any other is compiled by NVRTC in optim_create (on a GPU only).
// NIBBLE_JIT=1 in the environment has all of them compiled. optim_expression gives the kernel's name for NVRTC (jit.h).
bool optim_built_in(const OptimConfig* config, OptimType compute);
void optim_expression(const OptimConfig* config, OptimType compute, char* expression, size_t expression_bytes);

// The name of preset i; NULL behind the last one.
const char* optim_preset(int i);
// The overrides of a preset; "" if it has none.
const char* optim_preset_overrides(const char* preset);

// True if a built-in format has this name.
bool optim_name_is_taken(const char* name);

// Print a table to the file, for --list-formats, --list-presets and --help.
void optim_list_formats(FILE* file, const char* formats = "");
void optim_list_presets(FILE* file);
