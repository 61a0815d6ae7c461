// Steps that are taken part by part: a layer, the embeddings, the last layernorm (ModelParts). Inside the backward
// pass, each part is stepped as soon as its gradients are complete. The next layer but one then writes its gradients to
// the same memory, so that gradients take the room of two layers and the embeddings instead of the model's. If all
// gradients are kept until after the backward pass, the same calls give the same bits.
//
// kernels/norm.cuh computes the factor that clips a part. A part whose gradients are not finite keeps its weights
// and states and is counted; if the loss is not finite, all parts do. Several ranks (kernels/ranks/shard.cuh) sum the
// gradients of a part, agree on its norm, and each steps what it keeps of the part.
//
// Only a step of one micro-batch is taken in this way, since memory has no room for sums of several, and only by rules
// that do not project gradients. Rules that read matrices take those of a part together.
//
// Cost: a part's gradients are read once for its norm; two small kernels, and a launch of the step for each launch of
// the optimizer.
#pragma once
#include "../kernels/norm.cuh"
#include "offload.h"

struct Shard;
typedef struct Release Release;

// Lays out released gradients: place[t] becomes the first element of tensor t's gradients. Two layers take turns, and
// the rest follows them. Returns the number of elements. All layers must have the same tensors, one layer after another
// in the list; their gradients take the arena's order of layer 0.
int64_t release_places(const ModelParts* parts, int64_t* place);

// A model and its owners. The pointers must outlive the Release that release_open returns.
struct ReleaseModel {
    ModelParts parts;
    Optim* optim;      // optim_releases must allow it
    Offload* offload;  // of states in host memory, else NULL
    Shard* shard;      // the ranks' exchange; NULL: there is one rank
};

// Returns the bytes of device memory that release_open takes.
int64_t release_bytes(const ReleaseModel* model);

Release* release_open(const Device* dev, const ReleaseModel* model, ClipBy by, bool grads_bf16);
void release_close(Release* release);

// The clipping and the size of a step.
struct ReleaseStep {
    float clip, lr;
    int64_t step;
    const float* loss;  // device scalar
};

// Steps a part. The gradients of tensor t, or their sum over the ranks, begin at element place[t] of `grads`. They must
// be complete for work that is queued on the device's stream. All ranks step all parts in the same order.
void release_part(Release* release, int part, const void* grads, const int64_t* place, const ReleaseStep* step);

// Ends a step after all parts. It writes the norm of the stepped gradients to scalars[1], 1 or NaN to scalars[2], and
// the number of parts that kept their weights to scalars[left_alone]. The scalars are in device memory; scalars[0] is
// the loss.
void release_end(Release* release, float* scalars, int left_alone);

// Get and set the norm that the next step clips by, for a checkpoint; 0: there was no step.
float release_last(const Release* release);
void release_set_last(Release* release, float last);
