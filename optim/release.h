// Steps that are taken part by part: a layer, the embeddings, the last layernorm (ModelParts). Inside the backward
// pass, each part is stepped as soon as its gradients are complete. The next layer but one then writes its gradients to
// the same memory, so that gradients take the room of two layers and the embeddings instead of the model's. If all
// gradients are kept until after the backward pass, the same calls give the same bits.
//
// kernels/part_norm.cuh computes the factor that clips a part. A part whose gradients are not finite keeps its weights
// and states and is counted; if the loss is not finite, all parts do. Several ranks (kernels/ranks/shard.cuh) sum the
// gradients of a part, agree on its norm, and each steps what it keeps of the part.
//
// If a step has several micro-batches, the matrices of layers take turns, and the gradients of each micro-batch are
// added to m as soon as they are complete (optim_fold_tensors); the last micro-batch takes the step. This works for
// rules that read the gradients only through m (optim_folds). The step is that of the summed gradients, except that m
// is rounded once for each micro-batch. It is not clipped, since nothing has the norm of the sum. Vectors, and all
// tensors outside of the layers, have room of their own, where gradients add up for any rule. A layer whose gradients
// are not finite in some micro-batch keeps its weights; if the loss is not finite or data is bad, all layers do. But m
// keeps the gradients that were added before, also in a checkpoint that is saved then.
// Rules that read matrices are released in this way for any number of micro-batches: all gradients are added to m, and
// all matrices are stepped after the backward pass.
//
// Cost: a part's gradients are read once for its norm; two small kernels, and a launch of the step for each launch of
// the optimizer. A micro-batch that is added to m costs 8 bytes a parameter with bf16 gradients and m in bf16:sr.
#pragma once
#include "../kernels/part_norm.cuh"
#include "offload.h"

struct Shard;
typedef struct Release Release;

// Returns true if the gradients of a tensor of this part take turns with those of other layers. `folds`: gradients of
// matrices are added to m.
bool release_turns(const OptimTensor* tensor, int part, int layers, bool folds);

// Lays out released gradients: place[t] becomes the first element of tensor t's gradients. Two layers take turns, and
// the rest follows them. Returns the number of elements. All layers must have the same tensors, one layer after another
// in the list; their gradients take the arena's order of layer 0.
int64_t release_places(const ModelParts* parts, bool folds, int64_t* place);

// A model and its owners. The pointers must outlive the Release that release_open returns.
struct ReleaseModel {
    ModelParts parts;
    Optim* optim;      // optim_releases or optim_folds must allow it
    Offload* offload;  // of states in host memory, else NULL
    Shard* shard;      // the ranks' exchange; NULL: there is one rank
};

// Returns the bytes of device memory that release_open takes.
int64_t release_bytes(const Device* dev, const ReleaseModel* model);

Release* release_open(const Device* dev, const ReleaseModel* model, ClipBy by, bool grads_bf16);
void release_close(Release* release);

// The clipping and the size of a step, and where it stands.
struct ReleaseStep {
    float clip, lr;
    int64_t step;
    const float* loss;  // device scalar
    int micro_batch;    // number of the micro-batch from 1 if its gradients are added to m; otherwise 1
    bool last;          // it is the step's last one, or gradients are not added to m
};

// Steps a part or, before the last micro-batch, adds its gradients to m. The gradients of tensor t, or their sum over
// the ranks, begin at element place[t] of `grads`. They must be complete for work that is queued on the device's
// stream. All ranks step all parts in the same order.
void release_part(Release* release, int part, const void* grads, const int64_t* place, const ReleaseStep* step);

// Ends a step after all parts. It steps the matrices of rules that read whole matrices, unless some part kept its
// weights. It writes the norm of the stepped gradients to scalars[1], 1 or NaN to scalars[2], and the number of parts
// that kept their weights to scalars[left_alone]. The scalars are in device memory; scalars[0] is the loss.
void release_end(Release* release, float* scalars, int left_alone, const ReleaseStep* step);

// Get and set the norm that the next step clips by, for a checkpoint; 0: there was no step.
float release_last(const Release* release);
void release_set_last(Release* release, float last);
