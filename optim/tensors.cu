// Steps of some tensors only, whose gradients may lie anywhere (optim_step_tensors in optim.h), and additions of
// gradients to m before a step (optim_fold_tensors). Tensors that follow each other both in the arena and in their
// gradients' memory share a launch. It moves the same bytes that these tiles take in a step of all tensors.
#include "plan.h"

// The number, for its noise, of a last micro-batch that is added to m. Other micro-batches have smaller ones.
constexpr int LAST_FOLD = 2047;

// Returns the tiles of the first tensors that can share a launch; *taken is the number of these tensors.
static TileRun tensor_run(const OptimParts* parts, const int* tensor, const void* const* grads, int count, int* taken) {
    const Plan* plan = parts->plan;
    const int l = plan->launch_of[tensor[0]];
    const LaunchPlan* launch = &plan->launch[l];
    const int64_t element = config_rows(&launch->config).grads->stream[0].bits / 8;
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

static bool reads_matrices(const Plan* plan, int launch) {
    return rule_of(&plan->launch[launch].config)->matrix != MATRIX_NONE;
}

void optim_step_tensors(Optim* optim, const int* tensor, const void* const* grads, int count, const float* grad_scale,
                        float lr, int64_t step) {
    const OptimParts parts = optim_parts(optim);
    for (int i = 0, taken; i < count; i += taken) {
        const TileRun run = tensor_run(&parts, tensor + i, grads + i, count - i, &taken);
        const bool later = reads_matrices(parts.plan, run.launch);
        if (later) optim_fold_tiles(optim, &run, grad_scale, step, LAST_FOLD);
        if (!later) optim_step_tiles(optim, &run, grad_scale, lr, step);
        for (int t = 0; t < taken && !later; t++) optim_settle_tensor(optim, tensor[i + t], grad_scale);
    }
}

void optim_fold_tensors(Optim* optim, const int* tensor, const void* const* grads, int count, const float* grad_scale,
                        int64_t step, int number) {
    const OptimParts parts = optim_parts(optim);
    const int noise = 1 + (number - 1) % (LAST_FOLD - 1);  // below LAST_FOLD, in the seed's upper 11 bits
    for (int i = 0, taken; i < count; i += taken) {
        const TileRun run = tensor_run(&parts, tensor + i, grads + i, count - i, &taken);
        optim_fold_tiles(optim, &run, grad_scale, step, noise);
    }
}

void optim_step_matrices(Optim* optim, const float* grad_scale, float lr, int64_t step) {
    const OptimParts parts = optim_parts(optim);
    for (int l = 0; l < parts.plan->launches; l++) {
        if (!reads_matrices(parts.plan, l)) continue;
        const TileRun all = {l, {nullptr, nullptr}, 0, parts.plan->launch[l].tiles};
        optim_step_tiles(optim, &all, grad_scale, lr, step);
        for (int t = 0; t < parts.count; t++) {
            if (parts.plan->launch_of[t] == l) optim_settle_tensor(optim, t, grad_scale);
        }
    }
}

// Writes why gradients cannot be added to a launch's m, and what to type if another option would allow it; "" if they
// can.
static void fold_refusal(const OptimConfig* run, const OptimConfig* launch, char* error) {
    const Rows rows = config_rows(launch);
    const char *rule = rows.rule->name, *m = rows.m->name;
    const int bits = rows.m->stream[0].bits;
    OptimConfig plain = *launch, moves = *launch;
    plain.nesterov = false;
    moves.beta1 = moves.momentum = 0.5f, moves.beta2 = launch->beta1 == launch->beta2 ? 0.5f : launch->beta2;
    error[0] = 0;
    if (launch_fold(launch) > 0.0f && bits >= 16 && (bits > 16 || strstr(m, ":sr"))) return;
    if (launch_fold(launch) > 0.0f) {
        const char* option = strcmp(launch->m, run->m) == 0 ? "--m " : "m=";
        data_error(error, "m takes the gradients, but %s would lose small ones; type %sbf16:sr", m, option);
    } else if (launch_fold(&plain) > 0.0f) {
        data_error(error, "%s with --nesterov on needs more of the gradients than m keeps; type --nesterov off", rule);
    } else if (launch_fold(&moves) > 0.0f) {
        data_error(error, "m takes the gradients, but %s's m forgets all of them, since its decay is 0", rule);
    } else {
        data_error(error,
                   "%s needs more of the gradients than m keeps, unlike sgd, lion with --beta1 as --beta2, and rmnp, "
                   "normuon-lite, muon and normuon with --nesterov off",
                   rule);
    }
}

bool optim_folds(const OptimConfig* config, const OptimTensor* tensors, int count, const bool* folds, char* error) {
    Plan* plan = plan_ranges(config, tensors, count);
    error[0] = 0;
    for (int t = 0; t < count && !error[0]; t++) {
        const OptimConfig* its = &plan->launch[plan->launch_of[t]].config;
        // Matrices always need it, since they step after the backward pass.
        if (!folds[t] && config_rows(its).rule->matrix == MATRIX_NONE) continue;
        fold_refusal(config, its, error);
    }
    plan_free(plan);
    return !error[0];
}
