// Steps of some tensors alone, whose gradients may lie anywhere (optim_step_tensors in optim.h), and what takes their
// gradients into m before (optim_fold_tensors). Tensors that follow each other both in the arena and in their
// gradients' memory take one launch. Bytes: those of the same tiles in a step of all.
#include "plan.h"

// The number of a last micro-batch that goes into m, for its noise. Others have smaller ones.
constexpr int LAST_FOLD = 2047;

// The tiles of the first tensors that take one launch; *taken is how many they are.
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
    return find_row(rule_table(), plan->launch[launch].config.rule)->matrix != MATRIX_NONE;
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
    for (int i = 0, taken; i < count; i += taken) {
        const TileRun run = tensor_run(&parts, tensor + i, grads + i, count - i, &taken);
        optim_fold_tiles(optim, &run, grad_scale, step, number);
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

bool optim_folds(const OptimConfig* config, const OptimTensor* tensors, int count, const bool* folds, char* error,
                 size_t error_bytes) {
    Plan* plan = plan_ranges(config, tensors, count);
    const RuleRow* rule = nullptr;
    const FormatRow* m = nullptr;
    for (int t = 0; t < count && !rule && !m; t++) {
        const OptimConfig* its = &plan->launch[plan->launch_of[t]].config;
        const Rows rows = config_rows(its);
        const int bits = rows.m->stream[0].bits;
        if (!folds[t] && rows.rule->matrix == MATRIX_NONE) continue;  // matrices step after the backward pass
        if (launch_fold(its) == 0.0f) rule = rows.rule;
        if (bits < 16 || (bits == 16 && !strstr(rows.m->name, ":sr"))) m = rows.m;
    }
    plan_free(plan);
    if (rule) {
        snprintf(error, error_bytes,
                 "%s needs more of the gradients than m can take, unlike sgd, lion with --beta1 as "
                 "--beta2, and rmnp, normuon-lite, muon and normuon with --nesterov off",
                 rule->name);
    } else if (m) {
        snprintf(error, error_bytes, "m takes the gradients, and %s would lose small ones, unlike fp32 and bf16:sr",
                 m->name);
    }
    return !rule && !m;
}
