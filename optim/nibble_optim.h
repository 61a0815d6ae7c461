// The optimizer as a C library, libnibble_optim.so (`make lib`): AdamW, Lion and other rules, with weights and states
// in any format from fp32 to 4 bits, one launch a step, on a GPU or on the CPU. optim/README.md lists rules and
// formats.
//
// Parameters and gradients stay in the caller's tensors; the caller passes their addresses to each step. The optimizer
// keeps the states, and the codes of weights that a parameter cannot hold. A step's result depends only on the tensors,
// their order, the settings and the step's number: the CPU, any GPU and ./train give the same bits.
//
// No function prints or ends the process. A function that can fail returns a status and writes one sentence into
// `error`, which is NIBBLE_ERROR_BYTES long or null. A step that returns NIBBLE_MISTAKE has changed nothing. Optimizers
// share only compiled kernels, under a lock, so threads may use several at once, each of them from one thread at a
// time. Plain C99.
//
// After NIBBLE_MEMORY or NIBBLE_SYSTEM, nibble_optim_free frees all that the call has taken. What the library cannot
// prevent: OpenMP ends the process if it gets no memory or no threads. A thread that calls the library needs 256 KiB of
// stack. A process forked after a step must not step: on the CPU the call would wait for ever for OpenMP's threads, and
// CUDA does not work there.
#ifndef NIBBLE_OPTIM_H
#define NIBBLE_OPTIM_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

#define NIBBLE_OPTIM_VERSION 6
#define NIBBLE_ERROR_BYTES 32768

typedef enum {
    NIBBLE_OK,
    NIBBLE_SYSTEM,   // CUDA, the driver or NVRTC failed
    NIBBLE_MISTAKE,  // the caller asked for something impossible; the sentence says what to ask for
    NIBBLE_MEMORY    // there is no more memory
} NibbleStatus;

typedef struct NibbleOptim NibbleOptim;

// A parameter. A whole parameter has first 0 and count -1. If other processes hold parts of it, elements `first` to
// `first` + `count` - 1, counted row by row, lie here. Blocks of a format begin at the whole tensor's first element,
// and noise is counted over the whole model, so a part gets the bits that the whole tensor would get there, except that
// each part of a cut block has its own scale. Rules that read rows or matrices refuse parts, except adam-mini if it is
// cut at rows; the setting `shares` is for them. Without it, whole matrices that follow parts of other tensors draw the
// noise of another place.
typedef struct {
    const char* name;    // for overrides and messages
    int64_t rows, cols;  // of the whole tensor; 1 row for a vector
    int64_t first, count;
} NibbleTensor;

// Makes an optimizer. `settings` is a list of texts "key=value" that ends with a null; values are those of ./train's
// options, and errors name these options. All options of rules are settings (data/rule_options.h, nibble_optim_list);
// those that NibbleGroup has are only checked. The others:
//     device      cpu, cuda or cuda:N        parameters  fp32, bf16 or fp16: the type of the caller's weights
//     preset, rule, weights, m, v, overrides, seed
//     lr_max      the largest learning rate, by which a decay_mode but coupled divides
//     grads       fp32 or bf16; by default the parameters' type, fp32 for fp16
//     capturable  1: steps may be captured in CUDA graphs (nibble_optim_clock); by default 0
//     part        1: the tensors are part of a model, so patterns of overrides need not match; by default 0
//     shares      N, for N processes that hold parts of some tensors, cut at rows. Tensors that a rule, a format or
//                 limit_growth reads whole get owners; so do cut tensors whose rows (elements of vectors) do not
//                 hold whole blocks of states. This optimizer has all tensors without owners or, with share=I, those
//                 that process I (from 0) owns, whole, and no others. Both get the same list of tensors;
//                 nibble_optim_place tells the owners, to whom the caller brings the other processes' rows
//     releases    1: the caller makes an optimizer for each tensor, to step it as soon as its gradient is complete;
//                 rules that take matrices together and need buffers for them are then refused
//     stacked     for rules that read matrices, the number of equal matrices that a tensor's rows are stacked from,
//                 by name: "c_attn.weight:3" for queries, keys and values (as ./train's GPT-2 has them); by default
//                 1. A pattern that matches no tensor is ignored, since it may be meant for another optimizer's
//     element     where these tensors begin in the model, in elements: 0, or where those of the optimizer with the
//                 tensors before them end (nibble_optim_place)
// Rules that read matrices (muon, galore, ...) open cuBLASLt on a GPU: the path in NIBBLE_CUBLASLT, or one that the
// loader finds. They update only matrices; overrides give vectors and embeddings another rule ("wte|wpe|ln*|*.bias"
// have adamw already). Without the setting `weights`, parameters of fp32 are stored as they are, those of bf16 as the
// preset says, and those of fp16 as fp16:sr, or as fp16+fp32 where the preset keeps more bits than bf16; weights that
// are named for bf16 are those of fp16 in the same way. `tensors` are copied. `allocate` may be null. Otherwise it
// returns device memory for the states, aligned to 16 bytes, or null if there is none; this memory stays the caller's
// and must outlive the optimizer. `stream` is a CUDA stream, or null. nibble_optim_free frees the optimizer.
NibbleStatus nibble_optim_create(NibbleOptim** optim, const char* const* settings, const NibbleTensor* tensors,
                                 int count, void* (*allocate)(void* context, int64_t bytes), void* context,
                                 void* stream, char* error);
void nibble_optim_free(NibbleOptim* optim);

// Constants that tensors share, in the ranges of the settings of these names.
typedef struct {
    double lr, weight_decay;
    float beta1, beta2, eps;  // rmnp, normuon-lite, muon and normuon have the setting momentum in beta1's place
    // Number of these tensors' step, from 1, for bias corrections and new directions; 0: the NibbleStep's. Do not count
    // steps that changed nothing.
    int64_t step;
    const float* lr_at;  // on the device: a captured step reads lr here in each replay; null: it keeps `lr`
} NibbleGroup;

typedef struct {
    void* const* weights;      // (count) addresses on the device, contiguous elements of the type `parameters`
    const void* const* grads;  // (count) of the type `grads`; null: the step does not change the tensor
    const int* group_of;       // (count) or null: all tensors are in the first group
    const NibbleGroup* group;
    const float* grad_scale;  // on the device: multiplies every gradient; null: 1. NaN or infinite: nothing changes
    const float* found_inf;   // on the device: unless it is 0, nothing changes; null: 0
    int64_t step;             // number of the step, from 1, for the noise
    void* stream;             // a CUDA stream or null; the call returns before the GPU is done
} NibbleStep;

// Takes one step. If it returns NIBBLE_MISTAKE, nothing has changed.
NibbleStatus nibble_optim_step(NibbleOptim* optim, const NibbleStep* step, char* error);

// nibble_optim_clock waits for the stream and returns the number of the last step, replays of CUDA graphs included,
// from which the caller continues to count. With the setting capturable=1, a step may be captured in a CUDA graph once
// a step with the same tensors and groups has been taken. Each replay takes the next step; the optimizer counts steps
// on the device, for the noise and the bias corrections. Gradients, parameters and the groups' constants are those of
// the capture, except the rate at lr_at. Rules that project gradients (galore, fira, apollo) and scales of whole
// tensors are refused. A graph cannot be replayed after nibble_optim_free.
NibbleStatus nibble_optim_clock(const NibbleOptim* optim, int64_t* step, void* stream, char* error);

// Tells the optimizer that the caller has written to a parameter, or gives the next step another tensor in its place.
// That step makes the master or codes that it keeps beside the parameter from the new values.
void nibble_optim_weights_changed(NibbleOptim* optim, int tensor);

// An array of the states, or a tensor's part of one, in whole tiles of 2048 elements. Names and types are those of
// ./train's optimizer.safetensors. Weights in e4m3/tensor+fp32 and e5m2/tensor+fp32 have three numbers of a tensor in
// "weights.scales": the largest magnitude, 1 / scale, and scale (a code is scale times a value). With @given before the
// +, the caller writes the third before a step, which keeps it; 0, as at first, and what is not above 0 becomes 1.
typedef struct {
    char name[160];     // "m", "m.scales", "v", "master", ...; an array's name includes its override's pattern
    const char* dtype;  // safetensors' name: "U8", "BF16", "F32", ...
    void* data;         // device memory
    int64_t bytes;
    int64_t run;  // elements that share a number; 0: the numbers belong to whole rows, columns, tensors or projections
    int bits;     // of a number; 4: two to a byte, the first in the upper half. Whole arrays have run 0 and bits 0
} NibbleState;

// Sets *state to state `index` of a tensor, or of tensor -1 to whole array `index`. Returns 0 if there is none.
int nibble_optim_state(const NibbleOptim* optim, int tensor, int index, NibbleState* state);

// Reads moment "m", "v" or "slow" of a tensor as fp32 values in host memory, in the order of its elements that lie
// here, or writes it, rounded to nearest. A v of rows and columns is read as their product and gets the means of what
// is written. A moment that is not kept here, or in another shape than the tensor's, is a mistake.
NibbleStatus nibble_optim_moment(NibbleOptim* optim, int tensor, const char* name, float* values, int writes,
                                 void* stream, char* error);

// Copy all states to host memory of nibble_optim_bytes bytes, and back into an optimizer with the same settings and
// tensors.
int64_t nibble_optim_bytes(const NibbleOptim* optim);
NibbleStatus nibble_optim_save(const NibbleOptim* optim, void* to, void* stream, char* error);
NibbleStatus nibble_optim_load(NibbleOptim* optim, const void* from, int64_t bytes, void* stream, char* error);
// Tells the optimizer that the caller has written all states through their addresses. The next step uses them as they
// are.
void nibble_optim_loaded(NibbleOptim* optim);

typedef struct {
    int64_t element;  // where the tensor's first element lies in the model
    int owner;        // number of its owner (the setting `shares`); -1: it has none
    int together;     // number of its set, if a step takes all tensors of a set or none, as with a rule that reads
                      // rows or matrices; -1: it may have a gradient or not
} NibblePlace;
// Returns a tensor's place; of the number behind the last tensor, where the next one would begin.
NibblePlace nibble_optim_place(const NibbleOptim* optim, int tensor);

// Returns a line such as "adamw  weights bf16:sr  grads bf16  m dyn8/256  v udyn8/256  4.03 B/param"
const char* nibble_optim_describe(const NibbleOptim* optim);
// Returns the value of a text setting, such as "weights", with defaults filled in; null if there is no such setting.
const char* nibble_optim_setting(const NibbleOptim* optim, const char* key);
// Returns what ./train --list-presets or --list-formats prints, for "presets" or "formats". For "options" it returns a
// line for each option of rules that no NibbleGroup brings: its name with '-' for '_', its choices separated by '|' ("F
// from 0 to 1" or "N from 0 to 9": a number), its default, "rule=" and the rules that read it, separated by '|' ("":
// any may), and what it is, with a tab between two. The text is valid until the next call.
const char* nibble_optim_list(const char* what);
// Returns 1 if a tensor's name matches one of the patterns, which have | between them, as overrides have them; else 0.
int nibble_optim_matches(const char* patterns, const char* name);
// Returns how many GPUs the library can use; 0 if it was built without CUDA.
int nibble_optim_gpus(void);
// Returns the version of this header that the library was built with.
int nibble_optim_version(void);

#ifdef __cplusplus
}
#endif
#endif
