// The states of an optimizer in host memory, streamed through device memory a part of the model at a time (--offload
// states). A part is a layer, the embeddings or the last layernorm (decoded.h).
//
// Two slots of device memory take turns. While a part is stepped in one of them, the next part's states come into the
// other; when the step is over, its states go back, and those of the part after next take their place. Each direction
// has a stream of its own, so that both copy engines work while the device's stream computes, and events put the
// streams in order: the host never waits. On the CPU both memories are the machine's and the copies are memcpy's, in
// the same order.
//
//     host memory    the states as stored, pinned
//     device memory  twice the states of the largest part
//     cost           each step moves the states once in either direction: 1.1 bytes a parameter with 4-bit states, at
//                    about 50 GB/s each way over PCIe 5; hidden behind whatever runs between two parts' steps
//
// The bits are those of states on the device, since the same kernel steps the same bytes. Only where optim_releases
// holds: other steps read all states at once.
#pragma once
#include "decoded.h"

typedef struct Offload Offload;

// Device memory of the slots for a model under a resolved configuration.
int64_t offload_bytes(const OptimConfig* config, const ModelParts* model);

// `order` names all parts (layers + 2) in the order in which a step takes them, and is copied. `optim`, whose config
// says `offload`, must outlive it. Once a step has begun only steps may change the states.
Offload* offload_open(Optim* optim, const ModelParts* model, const int* order);
void offload_close(Offload* offload);

// Between these two the states of a part are on the device, and optim_step_tensors steps its tensors. With NULL they do
// nothing: states are on the device always.
void offload_take(Offload* offload, int part);
void offload_give(Offload* offload, int part);

// A step over the whole arena, part by part: optim_step's arguments.
void offload_step(Offload* offload, const void* grads, const float* grad_scale, float lr, int64_t step);

// Makes the device's stream wait until the states in host memory are up to date. NULL: does nothing.
void offload_settle(const Offload* offload);
