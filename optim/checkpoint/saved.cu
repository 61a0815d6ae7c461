// The optimizer in a checkpoint (checkpoint.h): its arrays, which files hold unsharded; its formats as JSON; and the
// options of a run that resumes with other ones.
#include <stdlib.h>
#include <string.h>

#include "../../data/json.h"
#include "../../data/memory.h"
#include "../../kernels/ranks/collect.cuh"
#include "../made.h"
#include "arrays.h"
#include "checkpoint.h"

constexpr int SLOT_EXTRA = -1;  // of the caller's array

using ConfigName = const char* OptimConfig::*;

// A checkpoint says these of its formats.
static const struct {
    const char* key;
    ConfigName name;
} NAMES[] = {{"rule", &OptimConfig::rule},
             {"weights", &OptimConfig::weights},
             {"m", &OptimConfig::m},
             {"v", &OptimConfig::v},
             {"override", &OptimConfig::overrides}};

OptimFiles optim_file_bytes(const OptimConfig* config, const OptimTensor* tensors, int count) {
    OptimConfig whole = *config;
    whole.runs = nullptr, whole.keeps_copy = false;
    const Device cpu = {};  // any device will do, since tables are not counted
    const OptimBytes bytes = optim_bytes(&cpu, &whole, tensors, count, OPTIM_FP32);
    OptimFiles files = {0, bytes.weights + bytes.states + bytes.host};
    Plan* plan = plan_ranges(&whole, tensors, count);
    for (int i = 0; i < plan->weights_count; i++) {
        const StreamInfo* first = &plan->weights[i].format->stream[0];
        const int64_t elements = plan->weights[i].run.end - plan->weights[i].run.begin;
        const bool direct = optim_model_dtype(first->dtype);
        files.model += elements * (direct ? first->bits / 8 : 4);
        if (direct) files.optimizer -= stream_bytes(*first, elements);
    }
    plan_free(plan);
    return files;
}

const char* optim_saved_dtype(const Optim* optim, int tensor) {
    const Plan* plan = optim->plan;
    const char* dtype = launch_of(plan, tensor)->rows.weights->stream[0].dtype;
    return optim_model_dtype(dtype) ? dtype : "F32";
}

// Copies bytes `begin` to `end` - 1 of a tensor, which has `tile_bytes` a tile and begins at `data` on this rank, to
// rank 0's memory. `data` NULL: they are in `to` already.
static void part_read(const OptimSaved* saved, int t, int64_t tile_bytes, const char* data, int64_t begin, int64_t end,
                      char* to) {
    const Optim* optim = saved->optim;
    Shard* s = saved->shard;
    if (shard_splits(s, SHARD_STATES)) {
        const bool whole = config_reads_whole(&launch_of(optim->plan, t)->config);
        shard_collect(s, to, data, optim->tensors[t].offset / TILE_ELEMENTS, tile_bytes, whole, begin, end);
    } else if (data && (!s || s->comm.rank == 0)) {
        copy_to_host(optim->dev, to, data + begin, end - begin);
    }
}

// Returns where array i of a tensor's slot begins, or would begin, on this rank.
static const char* part_data(const Optim* optim, int t, Slot slot, int i) {
    const ArrayRef own = plan_array_ref(optim->plan, t, slot);
    return (const char*)optim_array(optim, t, slot, i) + array_bytes(&own, i).begin;
}

void optim_saved_weights(const OptimSaved* saved, int t, void* to) {
    const Optim* optim = saved->optim;
    const int64_t elements = optim->tensors[t].rows * optim->tensors[t].cols;
    const bool stored = optim_model_dtype(launch_of(optim->plan, t)->rows.weights->stream[0].dtype);
    const int64_t bytes = strcmp(optim_saved_dtype(optim, t), "BF16") == 0 ? 2 : 4;
    if (!stored) optim_get_weights(optim, t, (float*)to);
    part_read(saved, t, TILE_ELEMENTS * bytes, stored ? part_data(optim, t, SLOT_WEIGHTS, 0) : nullptr, 0,
              elements * bytes, (char*)to);
}

OptimSaved* optim_saved_open(const Optim* optim, Shard* shard, const OptimStream* extra) {
    OptimSaved* saved = (OptimSaved*)memory_zero(1, sizeof(*saved));
    OptimConfig whole = optim->config;
    whole.runs = nullptr;
    saved->optim = optim, saved->shard = shard, saved->whole = plan_ranges(&whole, optim->tensors, optim->count);
    for (int i = 0; i < optim->stream_count; i++) {
        OptimStream stream = optim->stream[i];
        const Plan* plan = saved->whole;
        const LaunchPlan* launch = &plan->launch[stream.index];
        const bool weights = stream.slot == SLOT_WEIGHTS;
        const ArenaRun* run = weights ? &plan->weights[stream.index].run : &launch->kept[stream.slot];
        const FormatRow* format = weights ? plan->weights[stream.index].format : slot_format(launch, (Slot)stream.slot);
        stream.elements = run_bytes(run, format->stream[stream.array]) / stream.element_bytes;
        const bool in_model_file = stream.is_weights && optim_model_dtype(stream.dtype);
        if (stream.elements > 0 && !in_model_file) saved->array[saved->arrays++] = stream;
    }
    if (extra) saved->array[saved->arrays] = *extra, saved->array[saved->arrays++].slot = SLOT_EXTRA;
    return saved;
}

void optim_saved_read(const OptimSaved* saved, int i, int64_t at, int64_t bytes, void* to) {
    const OptimStream* stream = &saved->array[i];
    if (stream->slot == SLOT_EXTRA) return copy_to_host(saved->optim->dev, to, (const char*)stream->data + at, bytes);
    for (int t = 0; t < saved->optim->count; t++) {
        const Slot slot = (Slot)stream->slot;
        const int launch = saved->whole->tensor[t].launch;
        if ((slot == SLOT_WEIGHTS ? saved->whole->launch[launch].weights : launch) != stream->index) continue;
        const ArrayRef all = plan_array_ref(saved->whole, t, slot);
        const ArrayBytes own = array_bytes(&all, stream->array);
        const int64_t begin = at > own.begin ? at - own.begin : 0,
                      end = at + bytes - own.begin < own.bytes ? at + bytes - own.begin : own.bytes;
        if (begin >= end) continue;
        part_read(saved, t, stream_bytes(all.format->stream[stream->array], TILE_ELEMENTS),
                  part_data(saved->optim, t, slot, stream->array), begin, end, (char*)to + (own.begin + begin - at));
    }
}

void optim_saved_close(OptimSaved* saved) {
    plan_free(saved->whole);
    free(saved);
}

bool optim_saved_equal(const Optim* optim, Shard* shard, const void* weights, int64_t elements) {
    if (shard_splits(shard, SHARD_WEIGHTS)) return true;
    if (weights) return shard_equal(shard, weights, elements * shard->weight_bytes);
    for (int i = 0; i < optim->stream_count; i++) {
        const OptimStream stream = optim->stream[i];
        const int64_t bytes = stream.elements * stream.element_bytes;
        if (stream.is_weights && !shard_equal(shard, stream.data, bytes)) return false;
    }
    return true;
}

char* optim_saved_formats(const OptimConfig* config) {
    char* text = nullptr;
    size_t bytes = 0;
    FILE* file = text_stream(&text, &bytes);
    for (const auto& field : NAMES)
        json_write_text_member(file, &field == NAMES ? "{" : ", ", field.key, config->*field.name);
    json_write_text_member(file, ", ", "norms", config->limit_growth > 0.0f ? "fp32" : "none");
    fputc('}', file);
    fclose(file);
    return text;
}

static bool stored_config(OptimStored* stored, const Json* formats, char* error) {
    OptimConfig* config = &stored->config;
    for (const auto& field : NAMES) config->*field.name = json_string(formats, field.key, "");
    config->limit_growth = strcmp(json_string(formats, "norms", "none"), "none") == 0 ? 0.0f : 1.0f;
    config->decay_mode = "coupled";  // any mode will do, since no array depends on it
    config->stored = true;
    return optim_resolve(config, error);
}

// Reads the caller's array, and no longer counts it among the optimizer's.
static void stored_extra(OptimStored* stored, const Device* dev, const OptimStream* extra) {
    const int64_t bytes = extra->elements * extra->element_bytes;
    const void* array = stored->array(stored->context, extra->name, extra->dtype, bytes);
    if (array) stored->arrays--;
    if (!array || !extra->data) return;
    void* values = memory_take((size_t)bytes);
    stored->read(stored->context, array, 0, bytes, values);
    copy_to_device(dev, extra->data, values, bytes);
    free(values);
}

bool optim_saved_load(Optim* optim, OptimStored* stored, const Json* formats, const OptimStream* extra, char* error) {
    char reason[DATA_ERROR_BYTES];
    if (!stored_config(stored, formats, reason)) {
        return data_error(
            error, "state.json: %s; for a new run with its weights type --model and the checkpoint's folder", reason);
    }
    stored_extra(stored, optim->dev, extra);
    return optim_load(optim, stored, reason) || data_error(error, "optimizer.safetensors: %s", reason);
}

// Resuming.

// Resolves a copy of the options with other overrides into *config; returns false if they are invalid.
static bool tried(const OptimResume* resume, const char* overrides, OptimConfig* config) {
    char error[DATA_ERROR_BYTES];
    *config = resume->config;
    config->grads = "fp32", config->overrides = overrides;
    return optim_resolve(config, error);
}

// Adapts v and the learning rate to another rule, unless they were typed. A v that the new rule cannot use is dropped,
// and one that it needs is fp32. The learning rate changes by the ratio of the rules' usual ones.
static void resume_rule(OptimResume* resume) {
    OptimConfig config;
    // The saved v, else the new rule's usual one, else fp32; if none will do, the refusal is that of the usual one.
    for (const char* v : {"", "fp32", ""}) {
        if (resume->v_typed || tried(resume, "none", &config)) break;
        resume->config.v = v;
    }
    if (!tried(resume, "none", &config)) return;
    const char* before = json_string(resume->options, "rule", config.rule);
    resume->other_rule = strcmp(before, config.rule) != 0;
    const double old = optim_usual_rate(before), usual = optim_usual_rate(config.rule);
    if (resume->lr_typed || old == usual) return;
    text_add(&resume->changed, " --lr %g for %s (was %g, for %s)", resume->lr * usual / old, config.rule, resume->lr,
             before);
    resume->lr *= usual / old;
}

// Sets the overrides, once the other options are known: the typed ones; else those that the user had asked for ("none"
// only with the same preset); else, if preset, rule and formats are the same, those that the run had; else "", the
// preset's.
static void resume_overrides(OptimResume* resume, const char* added) {
    const char* had = json_string(resume->formats, "override", "none");
    const char *typed = resume->config.overrides, *preset = resume->config.preset;
    const bool other = strcmp(json_string(resume->options, "preset", ""), preset) != 0;
    OptimConfig config;
    const bool known = tried(resume, "", &config);
    bool same = known && !other;
    for (const auto& field : NAMES) {
        const bool compared = same && field.name != &OptimConfig::overrides;
        if (compared) same = strcmp(json_string(resume->formats, field.key, ""), config.*field.name) == 0;
    }
    const bool has_own = known && strcmp(config.overrides, "none") != 0;
    resume->asked = other && strcmp(had, "none") == 0 ? "" : text_copy(json_string(resume->options, "override", ""));
    if (resume->overrides_typed) resume->asked = typed;
    if (!resume->overrides_typed)
        resume->config.overrides = *resume->asked ? resume->asked : same ? text_copy(had) : "";
    if (!tried(resume, resume->config.overrides, &config)) return;
    const size_t length = strlen(config.overrides);
    if (strncmp(config.overrides, had, length) != 0 || (had[length] && strcmp(had + length, added) != 0)) {
        text_add(&resume->changed, " --override %s (was %s)", config.overrides, had);
    } else if (!resume->overrides_typed && *resume->asked && other && has_own) {
        text_add(&resume->changed, " --override %s (the run's, not %s's)", had, preset);
    }
}

void optim_resume(OptimResume* resume, const char* added) {
    resume_rule(resume);
    resume_overrides(resume, added);
}
