#include "plan.h"
#include <stddef.h>
#include "memory.h"

int64_t plan_largest_batch(const Planner* planner, int64_t max, bool block, int64_t available) {
    int64_t fits = 0;
    while (fits < max) {
        const int64_t batch = (fits + max + 1) / 2;
        const MemoryPlan plan = planner->plan(planner, batch, block);
        if (plan.total - plan.taken <= available) fits = batch;
        if (fits < batch) max = batch - 1;
    }
    return fits;
}

const char* plan_lacks(const Planner* planner, int64_t batch, int64_t sequences, bool block, int64_t available,
                       const char* device) {
    const MemoryPlan plan = planner->plan(planner, 0, false);
    if (plan.total <= available) return NULL;
    const double need = (double)plan.total / (1 << 30), have = (double)available / (1 << 30);
    int64_t fits = plan_largest_batch(planner, batch, false, available - plan.taken);
    while (fits > 0 && sequences % fits != 0) fits--;
    if (fits > 0) {
        // --recompute block is advice only where it is enough.
        const bool whole = planner->plan(planner, 0, true).total <= available;
        return text_format("--batch %lld needs %.2f GiB and %.2f GiB are free on %s; type --batch %lld or less%s",
                           (long long)batch, need, have, device, (long long)fits,
                           !whole  ? ""
                           : block ? ", or leave --kept-blocks out"
                                   : ", or --recompute block");
    }
    const bool one = plan_largest_batch(planner, 1, true, available - plan.taken) > 0;
    const char* advice = !one    ? "take"
                         : block ? "leave --kept-blocks out and type --batch 1, or take"
                                 : "type --recompute block --batch 1, or take";
    return text_format(
        "even --batch 1 needs more than the %.2f GiB that are free on %s; %s a shorter --seq, a smaller --model or "
        "a smaller --preset",
        have, device, advice);
}

const char* plan_host_lacks(int64_t need, int64_t available, const char* offload) {
    if (need <= available) return NULL;
    return text_format(
        "--offload %s needs %.2f GiB of this machine's memory, and %.2f are free for it; leave --offload out, or take "
        "a smaller --preset or --batch",
        offload, (double)need / (1 << 30), (double)available / (1 << 30));
}
