// The optimizer's interface for the trainer. The trainer describes the tensors of its model and gets weights in the
// type that its matmuls read, a step, and the stored arrays for checkpoints. Formats, rules and block sizes appear to
// the trainer only as names in strings.
//
// All parameters lie in one arena. optim_layout gives each tensor an offset in elements, a multiple of TILE_ELEMENTS,
// so that vectors and blocks of any format start at a tensor's first element. The trainer writes gradients into an
// arena of the same layout. The padding between tensors is zero in every arena and stays zero.
//
// Bit contract: for every combination, a step gives the same bits on the CPU and on a GPU, for any launch shape, and
// before and after a resume. Noise is keyed by (seed, step, stream, global element index).
//
// Sharding: an optimizer whose config names runs of the arena keeps only these of the weights, the states and the
// compute copy, one after another, and takes gradients of them. It computes the bits that an unsharded optimizer
// computes there. A run may begin and end within a tensor, unless the tensor's rule or formats read whole tensors
// (optim_slice).
#pragma once
#include <string.h>

#include <stddef.h>
#include <stdint.h>

#include "../data/rule_options.h"
#include "../kernels/common.cuh"
#include "../kernels/tile.h"

struct OptimTensor {
    const char* name;  // transformers' name, such as "h.0.attn.c_attn.weight"
    int64_t rows;      // 1 for a vector
    int64_t cols;
    bool decay;      // weight decay applies (matrices and embeddings)
    int64_t offset;  // set by optim_layout: first element in every arena
    int parts = 1;   // number of equal matrices stacked in its rows: 3 for queries, keys and values
};

// The options of rules (data/rule_options.h), and what else an optimizer is made of.
struct OptimConfig : RuleOptions {
    const char* preset;   // "adamw32", ...; gives the defaults of the names below, and of overrides
    const char* rule;     // "adamw"; NULL or "" = the preset's; the same holds for the next four names
    const char* weights;  // "fp32", "bf16:sr", "bf16+fp32", ...
    const char* grads;    // "fp32", "bf16", ...: the format that the trainer writes
    const char* m;        // "fp32", "bf16:sr", ...
    const char* v;        // as m; "none" if the rule keeps no second moment
    uint64_t seed;
    float lr_max = 0.0f;         // the largest learning rate of the schedule; every decay_mode but "coupled" needs it
    const char* overrides = "";  // rule, formats, learning rate or decay by tensor name (override.h); "" =
                                 // the preset's if weights, m and v are too; "none" = no overrides
    const struct SliceRun* runs = nullptr;  // (run_count) what is kept of the arena, in its order (slices.cuh), at most
    int run_count = 0;                      // one run of a tensor; null: all. It must outlive the optimizer
    bool stored = false;                    // describes a checkpoint: overrides "" = none, and :ef is not checked
    bool keeps_copy = true;     // keeps a copy, in the compute type, of all weights that the matmuls cannot read as
                                // stored; false: the caller decodes them a part at a time (model/)
    float rank_growth = 1.01f;  // limit_growth of launches of low-rank rules
    int64_t matrix_chunk = 15 << 23;  // rules that read matrices take about this many elements at a time; no bit
                                      // depends on it (matrix/matrix.h)
    bool offload = false;             // the states lie in host memory; the caller copies them to the device (model/)
    bool replays = false;             // placed steps may be captured in CUDA graphs
    bool part = false;                // the tensors are part of a model, so a pattern may match none of them
    bool placed = false;   // gradients, and weights in the compute type, lie in the caller's tensors (placed.h)
    bool of_fp16 = false;  // the tensors are fp16, and overrides name weights for bf16 (weights_of_fp16)
    // Returns `bytes` of device memory for the stored streams, aligned to 16 bytes; does not return if there is none.
    // The memory stays the caller's. Null: the optimizer allocates and frees.
    void* (*allocate)(void* context, int64_t bytes) = nullptr;
    void* allocator = nullptr;  // the context that `allocate` is called with
    // Receives the optimizer before it is complete, so that the caller can free its device memory if the rest fails and
    // the process goes on.
    struct Optim** made = nullptr;
};

// Bytes that a combination takes, known before anything is allocated.
struct OptimBytes {
    int64_t weights;  // the weights as stored, master and compensation included
    int64_t compute;  // the copy that the matmuls read of tensors whose stored weights they cannot read
    int64_t states;   // m, v, the rule's other states, and their scales, unless these are in host memory
    int64_t tables;   // the tile table (32 bytes for each 2048 elements) and the formats' constants; formats with a
                      // scale for each tensor, or by row and column, add 32 bytes for each 2048 elements and their
                      // scales; rules that read matrices add the buffers of their products (matrix/matrix.h)
    int64_t host;     // the states, with OptimConfig.offload
};

enum OptimType { OPTIM_FP32, OPTIM_BF16, OPTIM_FP16 };  // element types of the matmuls; fp16 is the library's alone

// One stored array. A checkpoint keeps its bytes unchanged.
struct OptimStream {
    const char* name;   // "weights", "master", "m", "v", "m.scales", ...; for overrides "m.1[wpe|ln*]"
    const char* dtype;  // safetensors' name: "F32", "BF16", "U8", ...
    void* data;  // (elements) device memory; host memory for states with OptimConfig.offload. What a shard keeps of the
                 // tensors of a format follows each other in the arena's order, as scales of tensors, rows and columns
                 // do.
    int64_t elements;  // 0 if a shard keeps none
    int element_bytes;
    bool is_weights;                     // primary weights; model.safetensors holds them if dtype is F32 or BF16
    int slot = 0, index = 0, array = 0;  // which the plan calls them (plan.h)
};

typedef struct Optim Optim;

constexpr int OPTIM_STREAMS = 108;  // at most

// Gives each tensor its offset and returns the length of the arena in elements, a multiple of TILE_ELEMENTS. With a
// resolved configuration, tensors to which its overrides give other formats come last, grouped by the format of their
// weights and then by those of their moments, since each group has arrays and a launch of its own. If `config` is null,
// the configuration of optim_create must have no overrides that match a tensor. Exits with a sentence if the overrides
// match no tensor, are too many or contradict each other.
int64_t optim_layout(OptimTensor* tensors, int count, const OptimConfig* config = nullptr);

// Says how tensors may be cut between shards: at multiples of grain[t] tiles, which is the whole tensor if its rule or
// formats read it whole. cost[t]: bytes that the owner of a tile keeps.
void optim_slice(const OptimConfig* config, const OptimTensor* tensors, int count, int64_t* grain, int64_t* cost);

// Checks every name and value of the configuration and fills in the preset's defaults. Returns false with a sentence in
// `error` that names the option, what was found and what to type; it suggests the nearest known name.
bool optim_resolve(OptimConfig* config, char* error);
// Sets the options of rules. Their numbers are rounded to fp32, which steps compute with. Those that are `auto` must be
// set once more before a step.
void optim_set_options(OptimConfig* config, const RuleOptions* options);

// Returns the usual learning rate of a rule over adamw's.
double optim_usual_rate(const char* rule);

// Returns the bytes that a resolved configuration takes on this device.
OptimBytes optim_bytes(const Device* dev, const OptimConfig* config, const OptimTensor* tensors, int count,
                       OptimType compute);

// Returns a line for the banner (text_kept): "adamw  weights bf16+fp32  grads bf16  m fp32  v fp32  14 B/param". The
// figure counts the weights and states of tensors without overrides; it leaves out gradients and the compute copy.
const char* optim_describe(const OptimConfig* config);

// Makes an optimizer whose weights are zero and whose states encode zero; optim_free frees it. `tensors` are copied;
// `dev` must outlive the optimizer. Exits on a CUDA error, and with a sentence if a kernel cannot
// be compiled.
Optim* optim_create(const Device* dev, const OptimConfig* config, const OptimTensor* tensors, int count,
                    OptimType compute);
void optim_free(Optim* optim);

// Sets the weights of one tensor from host values (rows x cols fp32), rounded to nearest; states are untouched. A shard
// takes the part that lies in it. Call optim_decode after the last tensor.
void optim_set_weights(Optim* optim, int tensor, const float* values);

// Reads the weights of one tensor into host values (rows x cols), as the model sees them: of bf16+fp32 the bf16. They
// are not rounded to the compute type. A shard writes the part that lies in it and leaves other values alone.
void optim_get_weights(const Optim* optim, int tensor, float* values);

// Returns the weights of one tensor, in device memory, if they are stored in the compute type; otherwise NULL. The
// optimizer must have the whole arena.
const void* optim_stored_weights(const Optim* optim, int tensor);

// The stored codes of one tensor's weights, if their format is e4m3 with one scale for the tensor. A weight is its code
// times numbers[1]; numbers[0] is the largest magnitude, and numbers[2] = 1 / numbers[1]. Both pointers are in device
// memory and constant for the optimizer's life. They are NULL for other formats and for tensors outside of this shard.
// The codes begin at a multiple of TILE_ELEMENTS from the array's first.
struct OptimCodes {
    const uint8_t* codes;
    const float* numbers;  // (3)
};
OptimCodes optim_codes(const Optim* optim, int tensor);

// Decodes the weights of one tensor, with the padding behind it, into device memory in the compute type, on
// dev->stream.
void optim_decode_tensor(const Optim* optim, int tensor, void* to);

// Refreshes the compute copy after weights or streams were written from outside. It does nothing if there is no copy.
void optim_decode(Optim* optim);

// Takes one step over the whole model, in place, on dev->stream: weights, states and the compute copy get new values
// from the gradients. It takes one launch for each combination of rule and formats. `grads` is an arena in the config's
// grads format, for a shard its runs one after another; null: optim_tensor_grads has set all tensors' gradients.
// `grad_scale` is a device scalar that multiplies every gradient (the clip factor); if it is NaN or infinite, the step
// changes nothing. `step` counts from 1 and leaves out steps that changed nothing.
void optim_step(Optim* optim, const void* grads, const float* grad_scale, float lr, int64_t step);

// Sets where the gradients of a tensor's first element here lie; the next ones follow.
void optim_tensor_grads(Optim* optim, int tensor, const void* grads);

// Takes the step for some tensors only, so that a backward pass can update the tensors whose gradients are complete.
// `tensor` has `count` tensors, whose gradients optim_tensor_grads has set, with zeros behind them up to a whole tile.
// A shard steps the part that lies in it. Once each tensor has been stepped, all bits are those of optim_step.
// optim_releases must allow it.
void optim_step_tensors(Optim* optim, const int* tensor, int count, const float* grad_scale, float lr, int64_t step);

// Returns true if a resolved configuration allows optim_step_tensors; otherwise false with a sentence: for rules that
// project gradients, and in the library for all rules that read matrices.
bool optim_releases(const OptimConfig* config, const OptimTensor* tensors, int count, char* error);

// Writes the name of the step's kernel for NVRTC (jit.h), which compiles it in optim_create.
void optim_expression(const OptimConfig* config, OptimType compute, char* expression, size_t expression_bytes);

// Returns the name of preset i; NULL after the last one.
const char* optim_preset(int i);
// Returns the overrides of a preset; "" if it has none.
const char* optim_preset_overrides(const char* preset);

// Print a table to the file, for --list-formats, --list-presets and --help.
void optim_list_formats(FILE* file);
void optim_list_presets(FILE* file);
