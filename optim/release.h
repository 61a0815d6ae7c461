// Steps that are taken part by part: a layer, the embeddings, the last layernorm (ModelParts). Inside the backward pass
// each part is stepped as soon as its gradients are complete, and the next layer but one writes its gradients where
// they lay, so that gradients take the room of two layers and the embeddings instead of the model's. After a backward
// pass with all gradients kept, the same calls give the same bits.
//
// The factor that clips a part comes from kernels/part_norm.cuh. A part whose gradients are not finite, or any part if
// the loss is not, keeps its weights and states and is counted. Several ranks (kernels/ranks/shard.cuh) step what each
// keeps of a part, from the sum of their gradients, and agree on its norm.
//
// If a step has several micro-batches, the matrices of layers take turns, and each micro-batch goes into their momentum
// as soon as it is there (optim_fold_tensors); the last one takes the step. This is for rules whose step reads the
// gradients through m alone (optim_folds): the step is that of their sum, but for a rounding of m each. It is not
// clipped, since nobody has the sum's norm. Vectors, and all that is in no layer, have room of their own, where
// gradients add up for any rule. A layer whose gradients are not finite in some micro-batch keeps its weights, and if
// the loss is not finite or data is bad, all layers do. But m keeps what it took before, also in a checkpoint that is
// saved then.
// Rules that read matrices are released so for any number of micro-batches: m takes all gradients, and all matrices
// step after the backward pass.
//
// Cost: a part's gradients are read once for its norm; two small kernels, and a launch of the step for each launch of
// the optimizer. A micro-batch that goes into m costs 8 bytes a parameter with bf16 gradients and m bf16:sr.
#pragma once
#include "../kernels/part_norm.cuh"
#include "offload.h"

struct Shard;
typedef struct Release Release;

// Does a tensor of this part take turns with those of other layers? `folds`: gradients of matrices go into m.
bool release_turns(const OptimTensor* tensor, int part, int layers, bool folds);

// Places gradients that are released: place[t] becomes the first element of tensor t's. Two layers take turns, with
// the rest behind them. Returns their elements. Tensors of a part lie in the arena's order where all layers have the
// same.
int64_t release_places(const ModelParts* parts, bool folds, int64_t* place);

// A model and who has it. The pointers must outlive what release_open returns.
struct ReleaseModel {
    ModelParts parts;
    Optim* optim;      // optim_releases holds, or optim_folds
    Offload* offload;  // has the states where they are in host memory, else NULL
    Shard* shard;      // what the ranks share; NULL: this is the only one
};

// Device memory that release_open takes.
int64_t release_bytes(const Device* dev, const ReleaseModel* model);

Release* release_open(const Device* dev, const ReleaseModel* model, ClipBy by, bool grads_bf16);
void release_close(Release* release);

// The clipping and the size of a step, and where it stands.
struct ReleaseStep {
    float clip, lr;
    int64_t step;
    const float* loss;  // device scalar
    int micro_batch;    // counts from 1 if micro-batches go into m; otherwise it is 1
    bool last;          // this is the step's last micro-batch, or they do not go into m
};

// Steps a part, or before the last micro-batch takes its gradients into m; grads + place[t] elements is where the
// gradients of tensor t lie, or their sum over the ranks, which is there for what is queued on the device's stream. All
// ranks step all parts in one order.
void release_part(Release* release, int part, const void* grads, const int64_t* place, const ReleaseStep* step);

// After all parts: steps the matrices of rules that read whole ones, unless some part was left alone. Writes scalars[1]
// and [2], the norm of what was stepped and 1 or NaN, and scalars[left_alone], the number of parts that kept their
// weights. The scalars are in device memory; scalars[0] is the loss.
void release_end(Release* release, float* scalars, int left_alone, const ReleaseStep* step);

// The norm that the next step clips by, for a checkpoint; 0: there was no step.
float release_last(const Release* release);
void release_set_last(Release* release, float last);
