// See offload.h.
#include "offload.h"

#include <assert.h>
#include <string.h>

#include "plan.h"

constexpr int KEPT = OPTIM_KEPT, ARRAYS = 3;  // states of a launch; arrays of a state

// The share that each launch of the optimizer has in a part: a run of the arena, possibly empty.
struct PartRuns {
    struct {
        int64_t begin, end;
    } launch[LAUNCHES];
};

struct Offload {
    const Device* dev;
    Optim* optim;
    Plan* plan;
    OptimTensor* tensors;  // (count)
    int* part;             // (count) of each tensor
    int count;
    PartRuns* run;      // (parts)
    int *order, *next;  // (used) the parts with states here as a step takes them; (parts) which one follows
    int used;
    char* slot[2];  // device memory
    int there[2];   // the part whose states a slot has or is about to have; -1: none
    int turn;       // the slot that was taken last
    // On a GPU: the copies' streams; a slot's part has come, has been stepped, has gone back.
    cudaStream_t in, out;
    cudaEvent_t fetched[2], stepped[2], returned[2];
};

// The runs of each part (parts). Tensors of a part and a launch follow each other in the arena.
static PartRuns* part_runs(const Plan* plan, const OptimTensor* tensors, const int* part, int count, int parts) {
    PartRuns* run = (PartRuns*)memory_zero((size_t)parts, sizeof(PartRuns));
    for (int t = 0; t < count; t++) {
        auto* its = &run[part[t]].launch[plan->launch_of[t]];
        const int64_t begin = plan_clamp(plan, tensors[t].offset),
                      end = plan_clamp(plan, tensors[t].offset + tensor_padded(&tensors[t]));
        if (begin == end) continue;
        assert(its->end == 0 || its->end == begin);
        if (its->end == 0) its->begin = begin;
        its->end = end;
    }
    return run;
}

static bool is_empty(const PartRuns* run) {
    for (const auto& its : run->launch) {
        if (its.begin < its.end) return false;
    }
    return true;
}

// The bytes of a slot: those of the largest part.
static int64_t slot_bytes(const Plan* plan, const PartRuns* run, int parts) {
    int64_t most = 0;
    for (int p = 0; p < parts; p++) {
        int64_t bytes = 0;
        for (int l = 0; l < plan->launches; l++) {
            const int64_t elements = run[p].launch[l].end - run[p].launch[l].begin;
            const FormatRow* format[KEPT];
            optim_kept_formats(&plan->launch[l].config, format);
            for (const FormatRow* each : format) {
                for (const StreamInfo& stream : each->stream) bytes += aligned_bytes(stream_bytes(stream, elements));
            }
        }
        most = bytes > most ? bytes : most;
    }
    return most;
}

int64_t offload_bytes(const OptimConfig* config, const OptimTensor* tensors, const int* part, int count, int layers) {
    Plan* plan = plan_ranges(config, tensors, count);
    PartRuns* run = part_runs(plan, tensors, part, count, layers + 2);
    const int64_t bytes = 2 * slot_bytes(plan, run, layers + 2);
    free(run);
    plan_free(plan);
    return bytes;
}

static void streams_open(Offload* o) {
    if (!o->dev->gpu) return;
    check(cudaStreamCreateWithFlags(&o->in, cudaStreamNonBlocking));
    check(cudaStreamCreateWithFlags(&o->out, cudaStreamNonBlocking));
    for (int s = 0; s < 2; s++) {
        for (cudaEvent_t* event : {&o->fetched[s], &o->stepped[s], &o->returned[s]}) {
            check(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
        }
    }
}

static void streams_close(Offload* o) {
    if (!o->dev->gpu) return;
    for (cudaStream_t stream : {o->in, o->out}) {
        check(cudaStreamSynchronize(stream));
        check(cudaStreamDestroy(stream));
    }
    for (int s = 0; s < 2; s++) {
        for (cudaEvent_t event : {o->fetched[s], o->stepped[s], o->returned[s]}) check(cudaEventDestroy(event));
    }
}

Offload* offload_open(const Device* dev, Optim* optim, const OptimTensor* tensors, const int* part, int count,
                      int layers, const int* order) {
    Offload* o = (Offload*)memory_zero(1, sizeof(Offload));
    const int parts = layers + 2;
    o->dev = dev, o->optim = optim, o->count = count;
    o->plan = plan_ranges(optim_parts(optim).config, tensors, count);
    o->tensors = (OptimTensor*)memory_take((size_t)count * sizeof(OptimTensor) + 1);
    memcpy(o->tensors, tensors, (size_t)count * sizeof(OptimTensor));
    o->part = (int*)memory_take((size_t)count * sizeof(int) + 1);
    memcpy(o->part, part, (size_t)count * sizeof(int));
    o->run = part_runs(o->plan, tensors, part, count, parts);
    o->order = (int*)memory_take((size_t)parts * sizeof(int));
    o->next = (int*)memory_take((size_t)parts * sizeof(int));
    for (int i = 0; i < parts; i++) {
        if (!is_empty(&o->run[order[i]])) o->order[o->used++] = order[i];
    }
    for (int i = 0; i < o->used; i++) o->next[o->order[i]] = o->order[(i + 1) % o->used];
    const int64_t bytes = slot_bytes(o->plan, o->run, parts);
    for (int s = 0; s < 2; s++) o->slot[s] = (char*)device_alloc(dev, bytes), o->there[s] = -1;
    streams_open(o);
    return o;
}

void offload_close(Offload* o) {
    if (!o) return;
    streams_close(o);
    for (char* slot : o->slot) device_free(o->dev, slot);
    plan_free(o->plan);
    free(o->tensors), free(o->part), free(o->run), free(o->order), free(o->next);
    free(o);
}

enum Way { FETCH, RETURN };

// Copies a part's states into a slot, or back.
static void part_copy(const Offload* o, int part, int slot, Way way) {
    char* there = o->slot[slot];
    for (int l = 0; l < o->plan->launches; l++) {
        const auto& run = o->run[part].launch[l];
        if (run.begin == run.end) continue;
        const OptimKept kept = optim_kept(o->optim, l);
        for (int k = 0; k < KEPT; k++) {
            void* const arrays[ARRAYS] = {kept.streams[k].codes, kept.streams[k].extra, kept.streams[k].more};
            for (int i = 0; i < ARRAYS; i++) {
                const StreamInfo& info = kept.format[k]->stream[i];
                const int64_t bytes = stream_bytes(info, run.end - run.begin);
                if (bytes == 0) continue;
                char* home = (char*)arrays[i] + stream_bytes(info, run.begin - o->plan->launch[l].run.begin);
                char *to = way == FETCH ? there : home, *from = way == FETCH ? home : there;
                if (o->dev->gpu) {
                    check(cudaMemcpyAsync(to, from, (size_t)bytes,
                                          way == FETCH ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost,
                                          way == FETCH ? o->in : o->out));
                } else {
                    memcpy(to, from, (size_t)bytes);
                }
                there += aligned_bytes(bytes);
            }
        }
    }
}

// Brings a part into a slot, as soon as what was there has gone back.
static void fetch(Offload* o, int part, int slot) {
    // Whatever else goes back at present began earlier than the slot's own, so this part's states are home, too.
    if (o->dev->gpu && o->there[slot] >= 0) check(cudaStreamWaitEvent(o->in, o->returned[slot], 0));
    part_copy(o, part, slot, FETCH);
    if (o->dev->gpu) check(cudaEventRecord(o->fetched[slot], o->in));
    o->there[slot] = part;
}

// Tells the optimizer where the states of a part are. A step counts tiles from the arena's first, so each array's
// address is that of an array which begins there.
static void part_point(const Offload* o, int part, const char* slot) {
    for (int l = 0; l < o->plan->launches; l++) {
        const auto& run = o->run[part].launch[l];
        if (run.begin == run.end) continue;
        const OptimKept kept = optim_kept(o->optim, l);
        Streams at[KEPT];
        for (int k = 0; k < KEPT; k++) {
            void* arrays[ARRAYS] = {};
            for (int i = 0; i < ARRAYS; i++) {
                const StreamInfo& info = kept.format[k]->stream[i];
                if (info.bits == 0 || info.span != SPAN_RUN) continue;
                arrays[i] = (char*)slot - run.begin / TILE_ELEMENTS * tile_bytes(info);
                slot += aligned_bytes(stream_bytes(info, run.end - run.begin));
            }
            const StreamInfo* info = kept.format[k]->stream;
            at[k] = tile_at(info[0], info[1], info[2], kept.streams[k], -o->plan->launch[l].run.begin / TILE_ELEMENTS);
            at[k].codes = arrays[0], at[k].more = arrays[2];
            if (arrays[1]) at[k].extra = arrays[1];  // numbers of spans stay where they are
        }
        optim_kept_at(o->optim, l, at);
    }
}

void offload_take(Offload* o, int part) {
    if (!o || is_empty(&o->run[part])) return;
    if (o->there[0] != part && o->there[1] != part) fetch(o, part, 1 - o->turn);  // the first of all
    o->turn = o->there[0] == part ? 0 : 1;
    if (o->there[1 - o->turn] < 0 && o->used > 1) fetch(o, o->next[part], 1 - o->turn);
    if (o->dev->gpu) check(cudaStreamWaitEvent(o->dev->stream, o->fetched[o->turn], 0));
    part_point(o, part, o->slot[o->turn]);
}

void offload_give(Offload* o, int part) {
    if (!o || is_empty(&o->run[part])) return;
    const int slot = o->turn;
    assert(o->there[slot] == part);
    if (o->dev->gpu) {
        check(cudaEventRecord(o->stepped[slot], o->dev->stream));
        check(cudaStreamWaitEvent(o->out, o->stepped[slot], 0));
    }
    part_copy(o, part, slot, RETURN);
    if (o->dev->gpu) check(cudaEventRecord(o->returned[slot], o->out));
    fetch(o, o->next[o->next[part]], slot);
}

void offload_step(Offload* o, const void* grads, const float* grad_scale, float lr, int64_t step) {
    const int64_t element = find_row(grads_table(), optim_parts(o->optim).config->grads)->stream[0].bits / 8;
    int* tensor = (int*)memory_take((size_t)o->count * sizeof(int) + 1);
    const void** at = (const void**)memory_take((size_t)o->count * sizeof(void*) + 1);
    for (int i = 0; i < o->used; i++) {
        int found = 0;
        for (int t = 0; t < o->count; t++) {
            if (o->part[t] != o->order[i]) continue;
            tensor[found] = t;
            at[found++] = (const char*)grads + (o->tensors[t].offset - o->plan->begin) * element;
        }
        offload_take(o, o->order[i]);
        optim_step_tensors(o->optim, tensor, at, found, grad_scale, lr, step);
        offload_give(o, o->order[i]);
    }
    optim_step_end(o->optim);
    free(tensor), free(at);
}

void offload_settle(const Offload* o) {
    for (int s = 0; o && o->dev->gpu && s < 2; s++) {
        if (o->there[s] >= 0) check(cudaStreamWaitEvent(o->dev->stream, o->returned[s], 0));
    }
}
