// The optimizer as a library, libnibble_optim.so (`make lib`): AdamW, Lion and others with weights and states in any
// format from fp32 to 4 bits, one launch a step, on a GPU or on the CPU. optim/README.md lists rules and formats.
//
// Parameters and gradients stay in the caller's own tensors, which each step names by address. The optimizer keeps the
// states, and the codes of weights that a parameter cannot hold. A step's result depends on the tensors, their order,
// the settings and the step's number alone: it has the same bits on the CPU and on any GPU, and as ./train's.
//
// No function prints or ends the process. Each that can fail returns a status and writes one sentence into `error`,
// NIBBLE_ERROR_BYTES long, unless that is null. Optimizers share nothing, so that threads may use several at once; one
// optimizer is used by one thread at a time. Plain C99.
#ifndef NIBBLE_OPTIM_H
#define NIBBLE_OPTIM_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

#define NIBBLE_OPTIM_VERSION 1
#define NIBBLE_ERROR_BYTES 32768

typedef enum {
    NIBBLE_OK,
    NIBBLE_SYSTEM,   // CUDA, the driver or NVRTC failed
    NIBBLE_MISTAKE,  // what was asked for cannot be; the sentence says what to ask for
    NIBBLE_MEMORY    // there is no more memory
} NibbleStatus;

typedef struct NibbleOptim NibbleOptim;

// A parameter. Where other processes hold parts of it, `first` and `count` say which elements lie here, in the order of
// rows; a whole one has first 0 and count -1. Blocks of a format begin at the whole tensor's first element, and noise
// is counted over the whole model, so that parts get what the whole would, except blocks that a cut goes through: each
// part then has a scale of its own.
typedef struct {
    const char* name;    // for overrides and messages
    int64_t rows, cols;  // of the whole tensor; 1 row for a vector
    int64_t first, count;
} NibbleTensor;

// Makes an optimizer. `settings` ends with a null and has texts "key=value", whose values are those of ./train's
// options:
//     device      cpu, cuda or cuda:N        parameters  fp32 or bf16, what the caller's weights are
//     preset, rule, weights, m, v, overrides, formats, decay_mode, lr_max, beta3, alpha, momentum,
//                 clip_update, ramp, seed
//     grads       fp32 or bf16; the parameters' type unless it is named
//     element     the place of these tensors in the model, in elements: 0, or what nibble_optim_end gave for others
// Without `weights` parameters of fp32 are stored as they are, and those of bf16 as the preset says. `tensors` are
// copied. `allocate`, unless null, returns memory of the device for the states, aligned to 16 bytes, or null; it stays
// the caller's and must outlive the optimizer. `stream` is a CUDA stream, or null.
NibbleStatus nibble_optim_create(NibbleOptim** optim, const char* const* settings, const NibbleTensor* tensors,
                                 int count, void* (*allocate)(void* context, int64_t bytes), void* context,
                                 void* stream, char* error);
void nibble_optim_free(NibbleOptim* optim);

// Constants that tensors share.
typedef struct {
    double lr, weight_decay;
    float beta1, beta2, eps;  // rmnp and normuon-lite have the setting momentum in beta1's place
    int64_t step;             // of these tensors, from 1, for bias corrections
} NibbleGroup;

typedef struct {
    void* const* weights;      // (count) addresses on the device, contiguous elements of the type `parameters`
    const void* const* grads;  // (count) of the type `grads`; null: the step leaves the tensor alone
    const int* group_of;       // (count) or null: all tensors are in the first group
    const NibbleGroup* group;
    const float* grad_scale;  // on the device: multiplies every gradient; null: 1. NaN or infinite: nothing changes
    const float* found_inf;   // on the device: unless it is 0, nothing changes; null: 0
    int64_t step;             // from 1, for the noise
    void* stream;             // a CUDA stream; the call returns before the GPU is done
} NibbleStep;

NibbleStatus nibble_optim_step(NibbleOptim* optim, const NibbleStep* step, char* error);

// Says that a parameter was written by others: what the optimizer keeps of it beside the parameter is made anew in the
// next step.
void nibble_optim_weights_changed(NibbleOptim* optim, int tensor);

// An array of the states, or a tensor's part of it, in whole tiles of 2048 elements. Names and types are those of
// ./train's optimizer.safetensors.
typedef struct {
    char name[160];     // "m", "m.scales", "v", "master", ...; of an array with the override that asked for it
    const char* dtype;  // safetensors' name: "U8", "BF16", "F32", ...
    void* data;         // device memory
    int64_t bytes;
    int64_t run;  // elements that share a number; 0: the numbers belong to whole rows, columns or tensors
    int bits;     // of a number; 4: two to a byte, the first in the upper half. 0 with arrays, which have no run
} NibbleState;

int nibble_optim_arrays(const NibbleOptim* optim);
NibbleStatus nibble_optim_array(const NibbleOptim* optim, int index, NibbleState* state, char* error);
int nibble_optim_states(const NibbleOptim* optim, int tensor);
NibbleStatus nibble_optim_state(const NibbleOptim* optim, int tensor, int index, NibbleState* state, char* error);

// Copies all states to host memory of nibble_optim_bytes, and back into an optimizer with the same settings and
// tensors.
int64_t nibble_optim_bytes(const NibbleOptim* optim);
NibbleStatus nibble_optim_save(const NibbleOptim* optim, void* to, void* stream, char* error);
NibbleStatus nibble_optim_load(NibbleOptim* optim, const void* from, int64_t bytes, void* stream, char* error);
// Says that states were written by the caller through their addresses: the next step takes them as they are.
void nibble_optim_loaded(NibbleOptim* optim);

// The place of a tensor's first element in the model, and the end of all.
int64_t nibble_optim_element(const NibbleOptim* optim, int tensor);
int64_t nibble_optim_end(const NibbleOptim* optim);

// "adamw  weights bf16:sr  grads bf16  m dyn8/256  v udyn8/256  4.03 B/param"
const char* nibble_optim_describe(const NibbleOptim* optim);
// The value of a setting after defaults, such as "weights"; null if there is none of this name.
const char* nibble_optim_setting(const NibbleOptim* optim, const char* key);
// Whether this library was built with CUDA, and how many GPUs it can use.
int nibble_optim_gpus(void);
// The version of this header that the library was built with.
int nibble_optim_version(void);

#ifdef __cplusplus
}
#endif
#endif
