// See offload.h.
#include "offload.h"

#include <assert.h>
#include <string.h>

#include "plan.h"

constexpr int KEPT = OPTIM_KEPT, ARRAYS = 3;  // states of a launch; arrays of a state

// A part lies in one run of the arena for each launch of the optimizer; runs may be empty.
struct PartRuns {
    struct {
        int64_t begin, end;
    } launch[LAUNCHES];
};

struct Offload {
    const Device* dev;
    Optim* optim;
    const Plan* plan;
    ModelParts model;
    PartRuns* run;      // (parts)
    int *order, *next;  // (used) the parts with states here, in the order of a step; (parts) the part that follows
    int used;
    char* slot[2];  // device memory
    int there[2];   // the part whose states a slot has or is about to get; -1: none
    int turn;       // the slot that was used last
    // A GPU has streams for the copies, and for each slot the events that its part was fetched, stepped and returned.
    cudaStream_t in, out;
    cudaEvent_t fetched[2], stepped[2], returned[2];
};

// Returns the runs of each part (parts); the caller frees them. Tensors of a part and a launch follow each other in the
// arena.
static PartRuns* part_runs(const Plan* plan, const ModelParts* model) {
    PartRuns* run = (PartRuns*)memory_zero((size_t)model->layers + 2, sizeof(PartRuns));
    for (int t = 0; t < model->count; t++) {
        auto* its = &run[model->part[t]].launch[plan->launch_of[t]];
        const OptimTensor* tensor = &model->tensors[t];
        const int64_t begin = plan_clamp(plan, tensor->offset),
                      end = plan_clamp(plan, tensor->offset + tensor_padded(tensor));
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

// Returns the format of a launch's state; none_row() if there is no such state.
static const FormatRow* kept_format(const Plan* plan, int launch, int k) {
    return slot_format(&plan->launch[launch], (Slot)(SLOT_M + k));
}

// Calls function(launch, state, array, its StreamInfo, bytes) for each array of a part's states, in the order of a
// slot.
template <class Function>
static void each_array(const Plan* plan, const PartRuns* run, Function function) {
    for (int l = 0; l < plan->launches; l++) {
        for (int k = 0; k < KEPT; k++) {
            for (int i = 0; i < ARRAYS; i++) {
                const StreamInfo& info = kept_format(plan, l, k)->stream[i];
                const int64_t bytes = stream_bytes(info, run->launch[l].end - run->launch[l].begin);
                if (bytes > 0) function(l, k, i, info, bytes);
            }
        }
    }
}

// Returns the bytes of a slot: those of the largest part.
static int64_t slot_bytes(const Plan* plan, const PartRuns* run, int parts) {
    int64_t most = 0;
    for (int p = 0; p < parts; p++) {
        int64_t all = 0;
        each_array(plan, &run[p],
                   [&](int, int, int, const StreamInfo&, int64_t bytes) { all += aligned_bytes(bytes); });
        most = all > most ? all : most;
    }
    return most;
}

int64_t offload_bytes(const OptimConfig* config, const ModelParts* model) {
    Plan* plan = plan_ranges(config, model->tensors, model->count);
    PartRuns* run = part_runs(plan, model);
    const int64_t bytes = 2 * slot_bytes(plan, run, model->layers + 2);
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

Offload* offload_open(Optim* optim, const ModelParts* model, const int* order) {
    Offload* o = (Offload*)memory_zero(1, sizeof(Offload));
    const int parts = model->layers + 2;
    o->dev = optim_parts(optim).dev, o->optim = optim, o->plan = optim_parts(optim).plan, o->model = *model;
    o->run = part_runs(o->plan, model);
    o->order = (int*)memory_take((size_t)parts * sizeof(int));
    o->next = (int*)memory_take((size_t)parts * sizeof(int));
    for (int i = 0; i < parts; i++) {
        if (!is_empty(&o->run[order[i]])) o->order[o->used++] = order[i];
    }
    for (int i = 0; i < o->used; i++) o->next[o->order[i]] = o->order[(i + 1) % o->used];
    const int64_t bytes = slot_bytes(o->plan, o->run, parts);
    for (int s = 0; s < 2; s++) o->slot[s] = (char*)device_alloc(o->dev, bytes), o->there[s] = -1;
    streams_open(o);
    return o;
}

void offload_close(Offload* o) {
    if (!o) return;
    streams_close(o);
    for (char* slot : o->slot) device_free(o->dev, slot);
    free(o->run), free(o->order), free(o->next), free(o);
}

enum Way { FETCH, RETURN };

// Copies a part's states into a slot, or back.
static void part_copy(const Offload* o, int part, int slot, Way way) {
    const Plan* plan = o->plan;
    const PartRuns* run = &o->run[part];
    char* there = o->slot[slot];
    each_array(plan, run, [&](int l, int k, int i, const StreamInfo& info, int64_t bytes) {
        const int64_t before = run->launch[l].begin - plan->launch[l].run.begin;
        char* home = (char*)stream_data(&optim_kept(o->optim, l)[k], i) + stream_bytes(info, before);
        char *to = way == FETCH ? there : home, *from = way == FETCH ? home : there;
        there += aligned_bytes(bytes);
        if (!o->dev->gpu) {
            memcpy(to, from, (size_t)bytes);
            return;
        }
        check(cudaMemcpyAsync(to, from, (size_t)bytes, way == FETCH ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost,
                              way == FETCH ? o->in : o->out));
    });
}

// Fetches a part into a slot, once the slot's previous part has been returned.
static void fetch(Offload* o, int part, int slot) {
    // Other parts that are being returned began earlier than the slot's own, so this part's states are in host memory,
    // too.
    if (o->dev->gpu && o->there[slot] >= 0) check(cudaStreamWaitEvent(o->in, o->returned[slot], 0));
    part_copy(o, part, slot, FETCH);
    if (o->dev->gpu) check(cudaEventRecord(o->fetched[slot], o->in));
    o->there[slot] = part;
}

// Returns the number of a part's first tile in a launch.
static int64_t part_first(const Plan* plan, const PartRuns* run, int launch) {
    return (run->launch[launch].begin - plan->launch[launch].run.begin) / TILE_ELEMENTS;
}

// Tells the optimizer where the states of a part are.
static void part_point(const Offload* o, int part, char* slot) {
    const Plan* plan = o->plan;
    const PartRuns* run = &o->run[part];
    Streams at[LAUNCHES][KEPT];
    for (int l = 0; l < plan->launches; l++) {
        for (int k = 0; k < KEPT; k++) {
            const Streams* kept = &optim_kept(o->optim, l)[k];  // numbers of spans stay on the device
            at[l][k] = row_tile(kept_format(plan, l, k), *kept, part_first(plan, run, l));
        }
    }
    each_array(plan, run, [&](int l, int k, int i, const StreamInfo&, int64_t bytes) {
        void** const arrays[ARRAYS] = {&at[l][k].codes, &at[l][k].extra, &at[l][k].more};
        *arrays[i] = slot;
        slot += aligned_bytes(bytes);
    });
    for (int l = 0; l < plan->launches; l++) {
        if (run->launch[l].begin == run->launch[l].end) continue;
        optim_kept_at(o->optim, l, at[l], part_first(plan, run, l));
    }
}

void offload_take(Offload* o, int part) {
    if (!o || is_empty(&o->run[part])) return;
    if (o->there[0] != part && o->there[1] != part) fetch(o, part, 1 - o->turn);  // the first call
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
    const ModelParts* model = &o->model;
    int* tensor = (int*)memory_zero((size_t)model->count + 1, sizeof(int));
    const void** at = (const void**)memory_zero((size_t)model->count + 1, sizeof(void*));
    for (int i = 0; i < o->used; i++) {
        const int found = part_tensors(model, o->order[i], tensor);
        for (int k = 0; k < found; k++) {
            at[k] = (const char*)grads + (model->tensors[tensor[k]].offset - o->plan->begin) * element;
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
