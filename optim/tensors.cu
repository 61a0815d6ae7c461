// Steps of some tensors only, whose gradients may lie anywhere (optim_step_tensors in optim.h). Tensors that follow
// each other in the arena share a launch. It moves the same bytes that these tiles take in a step of all tensors.
#include "each.cuh"
#include "plan.h"

struct SetGrads {
    Tile* tiles;
    const char* grads;
    int64_t bytes;

    OPTIM_INLINE void at(int64_t i) const { tiles[i].grads = grads + i * bytes; }
};

void tiles_set_grads(const Device* dev, Tile* tiles, int64_t count, const void* grads, int64_t bytes) {
    for_each(dev, SetGrads{tiles, (const char*)grads, bytes}, count);
}

// Returns the tiles of the first tensors that can share a launch; *taken is the number of these tensors.
static TileRun tensor_run(const OptimParts* parts, const int* tensor, int count, int* taken) {
    const Plan* plan = parts->plan;
    const int l = plan->launch_of[tensor[0]];
    const int64_t begin = plan->kept[tensor[0]][SLOT_WEIGHTS].offset + plan->here[tensor[0]].begin;
    int64_t end = begin;
    int n = 0;
    for (; n < count && plan->launch_of[tensor[n]] == l; n++) {
        const KeptPart part = plan->here[tensor[n]];
        if (plan->kept[tensor[n]][SLOT_WEIGHTS].offset + part.begin != end) break;
        end += part.end - part.begin;
    }
    *taken = n;
    return {l, (begin - plan->launch[l].run.begin) / TILE_ELEMENTS, (end - begin) / TILE_ELEMENTS};
}

void optim_step_tensors(Optim* optim, const int* tensor, const void* const* grads, int count, const float* grad_scale,
                        float lr, int64_t step) {
    const OptimParts parts = optim_parts(optim);
    const int element = parts.plan->launch[0].rows.grads->stream[0].bits / 8;
    for (int i = 0; i < count && grads; i++) {
        const int64_t begin = parts.plan->here[tensor[i]].begin;
        optim_tensor_grads(optim, tensor[i], (const char*)grads[i] + begin * element);
    }
    for (int i = 0, taken; i < count; i += taken) {
        const TileRun run = tensor_run(&parts, tensor + i, count - i, &taken);
        optim_step_tiles(optim, &run, grad_scale, lr, step);
        for (int t = 0; t < taken; t++) optim_settle_tensor(optim, tensor[i + t], grad_scale);
    }
}
