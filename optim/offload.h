// The states of an optimizer in host memory, copied through device memory a part of the model at a time (--offload
// states). A part is a layer, the embeddings or the last layernorm (ModelParts).
//
// Two slots of device memory take turns. While a part is stepped in one slot, the next part's states are copied into
// the other. After the step, the part's states are copied back, and those of the part after next take their place. Each
// direction has its own stream, so that both copy engines work while the device's stream computes. Events order the
// streams; the host never waits. On the CPU, both memories are the machine's, and memcpy makes the same copies in the
// same order.
//
//     host memory    the states as stored, pinned
//     device memory  twice the states of the largest part
//     cost           each step moves the states once in either direction: 1.1 bytes a parameter with 4-bit states, at
//                    about 50 GB/s each way over PCIe 5; hidden behind whatever runs between two parts' steps
//
// The bits are those of states on the device, since the same kernel steps the same bytes. optim_releases must allow
// steps by parts, since other steps read all states at once.
#pragma once
#include "decoded.h"

typedef struct Offload Offload;

// Returns the bytes of device memory that the slots take for a model under a resolved configuration.
int64_t offload_bytes(const OptimConfig* config, const ModelParts* model);

// Allocates the slots. `order` (layers + 2) has all parts in the order in which a step takes them, and is copied.
// `optim`, whose config has `offload`, must outlive the Offload. Once a step has begun, only steps may change the
// states.
Offload* offload_open(Optim* optim, const ModelParts* model, const int* order);
void offload_close(Offload* offload);

// Between these two calls the states of a part are on the device, and optim_step_tensors may step its tensors. If
// `offload` is NULL they do nothing, since the states are always on the device.
void offload_take(Offload* offload, int part);
void offload_give(Offload* offload, int part);

// Takes a step over the whole arena, part by part. The arguments are those of optim_step.
void offload_step(Offload* offload, const void* grads, const float* grad_scale, float lr, int64_t step);

// Makes the device's stream wait until the states in host memory are up to date. If `offload` is NULL it does nothing.
void offload_settle(const Offload* offload);
