// Steps of some tensors only, whose gradients may lie anywhere (optim_step_tensors in optim.h). Tensors that follow
// each other both in the arena and in their gradients' memory share a launch. It moves the same bytes that these tiles
// take in a step of all tensors.
#include "plan.h"

// Returns the tiles of the first tensors that can share a launch; *taken is the number of these tensors.
static TileRun tensor_run(const OptimParts* parts, const int* tensor, const void* const* grads, int count, int* taken) {
    const Plan* plan = parts->plan;
    const int l = plan->launch_of[tensor[0]];
    const LaunchPlan* launch = &plan->launch[l];
    const int64_t element = launch->rows.grads->stream[0].bits / 8;
    const int64_t begin = parts->tensors[tensor[0]].offset;
    const char* base = (const char*)grads[0] - begin * element;
    int64_t end = begin;
    int n = 0;
    for (; n < count && plan->launch_of[tensor[n]] == l && parts->tensors[tensor[n]].offset == end; n++) {
        if ((const char*)grads[n] - end * element != base) break;
        end += tensor_padded(&parts->tensors[tensor[n]]);
    }
    const int64_t kept = plan_clamp(plan, begin), kept_end = plan_clamp(plan, end);
    *taken = n;
    return {l, {(void*)base, nullptr}, (kept - launch->run.begin) / TILE_ELEMENTS, (kept_end - kept) / TILE_ELEMENTS};
}

void optim_step_tensors(Optim* optim, const int* tensor, const void* const* grads, int count, const float* grad_scale,
                        float lr, int64_t step) {
    const OptimParts parts = optim_parts(optim);
    for (int i = 0, taken; i < count; i += taken) {
        const TileRun run = tensor_run(&parts, tensor + i, grads + i, count - i, &taken);
        optim_step_tiles(optim, &run, grad_scale, lr, step);
        for (int t = 0; t < taken; t++) optim_settle_tensor(optim, tensor[i + t], grad_scale);
    }
}
