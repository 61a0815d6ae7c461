// States of an optimizer in host memory (model.h).
#include <assert.h>

#include "../made.h"
#include "model.h"

constexpr int ARRAYS = 3;  // of a state

// A part lies in one run of the arena for each launch of the optimizer; runs may be empty.
struct PartRuns {
    struct {
        int64_t begin, end;
    } launch[LAUNCHES];
};

struct Offload {
    Optim* optim;
    const Plan* plan;
    PartRuns* run;  // (parts)
    int* order;     // (used) the parts with states here, in the order of a step
    int used;
    LayerRing ring;  // item i is part order[i % used]
    char* slot[2];   // device memory
    int64_t turn;    // the item that is taken next
};

// Returns the runs of each part (parts); the caller frees them. Tensors of a part and a launch follow each other in the
// arena.
static PartRuns* part_runs(const Arena* a, const Plan* plan) {
    PartRuns* run = (PartRuns*)memory_zero((size_t)a->layers + 2, sizeof(PartRuns));
    for (int t = 0; t < a->count; t++) {
        auto* own = &run[a->part[t]].launch[plan->tensor[t].launch];
        if (is_elsewhere(plan, t)) continue;
        const int64_t offset = plan->tensor[t].kept[SLOT_WEIGHTS].offset, begin = offset + plan->tensor[t].here.begin,
                      end = offset + plan->tensor[t].here.end;
        assert(own->end == 0 || own->end == begin);
        if (own->end == 0) own->begin = begin;
        own->end = end;
    }
    return run;
}

static bool is_empty(const PartRuns* run) {
    for (const auto& part : run->launch) {
        if (part.begin < part.end) return false;
    }
    return true;
}

// Calls function(launch, state, array, its StreamInfo, bytes) for each array of a part's states, in the order of a
// slot.
template <class Function>
static void each_array(const Plan* plan, const PartRuns* run, Function function) {
    for (int l = 0; l < plan->launches; l++) {
        for (int k = 0; k < OPTIM_KEPT; k++) {
            for (int i = 0; i < ARRAYS; i++) {
                const StreamInfo& info = slot_format(&plan->launch[l], (Slot)(SLOT_M + k))->stream[i];
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

// Several ranks sum the last layernorm with the embeddings, and step it after them.
Offload* offload_open(Arena* a) {
    Offload* o = (Offload*)memory_zero(1, sizeof(Offload));
    const int layers = a->layers, embeddings = part_embeddings(layers), last = part_final(layers);
    o->optim = a->optim, o->plan = a->optim->plan;
    o->run = part_runs(a, o->plan);
    o->order = (int*)memory_take((size_t)(layers + 2) * sizeof(int));
    auto add = [&](int part) {
        if (!is_empty(&o->run[part])) o->order[o->used++] = part;
    };
    const bool backward = a->releases;
    if (backward && !a->shard) add(last);
    for (int l = 0; l < layers; l++) add(backward ? layers - 1 - l : l);
    add(embeddings);
    if (!backward || a->shard) add(last);
    const int64_t bytes = slot_bytes(o->plan, o->run, layers + 2);
    for (char*& slot : o->slot) slot = (char*)device_alloc(a->dev, bytes, &a->memory.states);
    ring_open(&o->ring, a->dev, o->used > 1 ? 2 : 1, true);
    return o;
}

void offload_close(Offload* o) {
    if (!o) return;
    ring_close(&o->ring);
    for (char* slot : o->slot) device_free(o->ring.dev, slot);
    free(o->run), free(o->order), free(o);
}

// Copies the states of an item into its slot, or back.
static void item_copy(const Offload* o, int64_t item, RingWay way) {
    const PartRuns* run = &o->run[o->order[item % o->used]];
    char* there = o->slot[ring_slot(&o->ring, item)];
    each_array(o->plan, run, [&](int l, int k, int i, const StreamInfo& info, int64_t bytes) {
        const int64_t before = run->launch[l].begin - o->plan->launch[l].run.begin;
        char* home = (char*)stream_data(&o->optim->launch[l].kept[SLOT_M + k], i) + stream_bytes(info, before);
        ring_copy(&o->ring, way, way == RING_IN ? there : home, way == RING_IN ? home : there, bytes);
        there += aligned_bytes(bytes);
    });
}

// Fetches an item unless it is there. Parts that are being returned began earlier than the slot's own, so this part's
// states are in host memory.
static void item_fetch(Offload* o, int64_t item) {
    if (!ring_fetch(&o->ring, item)) return;
    item_copy(o, item, RING_IN);
    ring_filled(&o->ring, item);
}

// Tells the optimizer where the states of a part are. Numbers of spans stay on the device.
static void part_point(const Offload* o, int part, char* slot) {
    const PartRuns* run = &o->run[part];
    for (int l = 0; l < o->plan->launches; l++) {
        StepLaunch* launch = &o->optim->launch[l];
        if (run->launch[l].begin == run->launch[l].end) continue;
        launch->states = (uint32_t)((run->launch[l].begin - launch->plan->run.begin) / TILE_ELEMENTS);
        for (int k = 0; k < OPTIM_KEPT; k++) {
            const Slot kept = (Slot)(SLOT_M + k);
            launch->at[k] = row_tile(slot_format(launch->plan, kept), launch->kept[kept], launch->states);
        }
    }
    each_array(o->plan, run, [&](int l, int k, int i, const StreamInfo&, int64_t bytes) {
        Streams* at = &o->optim->launch[l].at[k];
        void** const arrays[ARRAYS] = {&at->codes, &at->scales, &at->third};
        *arrays[i] = slot;
        slot += aligned_bytes(bytes);
    });
}

void offload_take(Offload* o, int part) {
    if (!o || is_empty(&o->run[part])) return;
    assert(o->order[o->turn % o->used] == part);
    for (int s = 0; s < o->ring.slots; s++) item_fetch(o, o->turn + s);
    ring_read(&o->ring, o->turn);
    part_point(o, part, o->slot[ring_slot(&o->ring, o->turn)]);
}

void offload_give(Offload* o, int part) {
    if (!o || is_empty(&o->run[part])) return;
    ring_after_stream(&o->ring, o->ring.out);
    item_copy(o, o->turn, RING_OUT);
    ring_drained(&o->ring, o->turn++);
    item_fetch(o, o->turn + o->ring.slots - 1);
}

int offload_part(const Offload* o, int i) {
    return i < o->used ? o->order[i] : -1;
}

float arena_settle(const Arena* a) {
    float last = 0.0f;
    if (a->offload) ring_settle(&a->offload->ring);
    if (a->by_parts) copy_to_host(a->dev, &last, a->last_norm, sizeof(last));
    return last;
}
