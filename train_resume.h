// How a run begins that goes on from a checkpoint: which one, and what becomes of its options beside those that are
// typed. And how several ranks begin: alike.
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/checkpoint.h"
#include "data/launch.h"
#include "data/loader.h"
#include "data/safetensors.h"
#include "train_options.h"

// The checkpoint to go on from into `folder`, and its state.json's tree: rank 0 chooses. NULL: begin anew.
static Json* resume_locate(Options* o, const Launch* launch, char* folder, size_t bytes, bool* named_itself) {
    char error[DATA_ERROR_BYTES];
    Json* state = nullptr;
    if (launch->rank == 0 && !checkpoint_locate(o->resume, o->run, folder, bytes, named_itself, &state, error)) {
        user_error("%s", error);
    }
    if (!state) folder[0] = 0;
    launch_share(launch, 0, folder, (int64_t)bytes);
    if (launch->rank > 0 && folder[0]) state = checkpoint_state(folder, error);
    if (folder[0] && !state) user_error("%s", error);
    return state;
}

// Options that belong to one start of the program and are not taken over from a checkpoint.
static bool is_restored(const Option* option) {
    static const char* const own[] = {"run", "resume", "device", "sample", "gpus", "join-timeout"};
    for (const char* name : own) {
        if (strcmp(option->name, name) == 0) return false;
    }
    return option->type != OPTION_FLAG;
}

static bool is_given(const bool* given, const char* name) {
    return given[option_find(&TABLE, name) - OPTIONS];
}

// Whether an option that was not typed is left to another preset than the saved one, which was typed.
static bool left_to_preset(const Options* o, const bool* given, const Json* saved, const char* name) {
    static const char* const names[] = {"rule", "weights", "m", "v"};
    if (!is_given(given, "preset") || strcmp(json_string(saved, "preset", ""), o->preset) == 0) return false;
    for (const char* its : names) {
        if (strcmp(name, its) == 0) return true;
    }
    return false;
}

// --override, after the other options: what is typed; else what the user had asked for; else the run's own with the
// preset and formats that it had, and the preset's with another one.
static void resume_override(Options* o, const bool* given, const Json* saved, char* changed, size_t bytes) {
    const char *before = json_string(saved, "override", ""), *preset = json_string(saved, "preset", "");
    if (!*before) before = "none";  // as it was said before presets had some
    const bool formats = is_given(given, "weights") || is_given(given, "m") || is_given(given, "v");
    const bool other = is_given(given, "preset") && strcmp(preset, o->preset) != 0;
    const bool users = strcmp(before, "none") != 0 && strcmp(before, optim_preset_overrides(preset)) != 0;
    const char* its = formats || !*optim_preset_overrides(o->preset) ? "none" : optim_preset_overrides(o->preset);
    const bool typed = is_given(given, "override");
    if (!typed) o->overrides = users || (!other && !formats) ? strdup(before) : its;
    if (typed && !*o->overrides) o->overrides = its;
    const size_t used = strlen(changed);
    const bool same = strcmp(o->overrides, before) == 0;
    if (!same) snprintf(changed + used, bytes - used, " --override %s (was %s)", o->overrides, before);
    if (same && users && other && strcmp(its, "none") != 0) {
        snprintf(changed + used, bytes - used, " --override %s (the run's, not %s's)", before, o->preset);
    }
}

// Options that were not typed are taken from the checkpoint; typed ones that differ are listed in `changed`, or refused
// where the model's shape hangs on them. `asked`: the checkpoint has --grads as it was asked for, not what became of
// it.
static void resume_options(Options* o, const bool* given, const Json* saved, bool asked, char* changed,
                           size_t changed_bytes) {
    static const char* const fixed[] = {"model", "layers", "channels", "heads", "seq"};
    char error[DATA_ERROR_BYTES];
    for (int i = 0; i < OPTION_COUNT; i++) {
        const Option* option = &OPTIONS[i];
        const char* text = json_string(saved, option->name, nullptr);
        if (!is_restored(option) || !text || strcmp(option->name, "override") == 0) continue;
        if (!given[i] && left_to_preset(o, given, saved, option->name)) continue;
        const size_t used = strlen(changed);
        if (!given[i] && !asked && strcmp(option->name, "grads") == 0 && strcmp(text, "bf16") == 0) {
            snprintf(changed + used, changed_bytes - used, " --grads auto (was bf16, asked for or not)");
            continue;
        }
        char now[4096];
        option_text(option, o, now, sizeof(now));
        if (!given[i] && !option_set(option, o, text, error)) user_error("--resume: %s", error);
        if (!given[i] || strcmp(now, text) == 0) continue;
        for (const char* name : fixed) {
            if (strcmp(option->name, name) != 0) continue;
            user_error("--%s %s: the checkpoint goes on with %s; leave --%s out, or begin anew without --resume", name,
                       now, text, name);
        }
        snprintf(changed + used, changed_bytes - used, " --%s %s (was %s)", option->name, now, text);
    }
    resume_override(o, given, saved, changed, changed_bytes);
}

// A learning rate that was not typed is the new rule's usual one where that differs from the old rule's.
static void resume_usual_lr(Options* o, const bool* given, const char* rule, const Json* saved, char* changed,
                            size_t changed_bytes) {
    const char* before = json_string(saved, "rule", rule);
    double old = optim_usual_lr(before, o->channels), usual = optim_usual_lr(rule, o->channels);
    if (given[option_find(&TABLE, "lr") - OPTIONS] || old == usual || o->lr == usual) return;
    size_t used = strlen(changed);
    snprintf(changed + used, changed_bytes - used, " --lr %g, usual for %s (was %g, for %s)", usual, rule, o->lr,
             before);
    o->lr = usual;
}

// Another rule may have no use for the saved v, or need one where there was none, and has a learning rate of its own.
static void resume_rule(Options* o, const bool* given, const Json* saved, char* changed, size_t changed_bytes) {
    char error[DATA_ERROR_BYTES];
    OptimConfig config;
    Options trial = *o;
    trial.grads = "fp32";
    bool v_typed = given[option_find(&TABLE, "v") - OPTIONS];
    if (!v_typed && !optim_config_try(&trial, &config, error, sizeof(error))) trial.v = o->v = "";
    if (optim_config_try(&trial, &config, error, sizeof(error))) {
        resume_usual_lr(o, given, config.rule, saved, changed, changed_bytes);
    }
}

// Ranks that would not train the same are a mistake: other options, or data of another length.
static void require_same(const Options* o, const Launch* launch, const Dataset* train, const Dataset* val) {
    char* text = nullptr;
    size_t length = 0;
    Options same = *o;
    same.run = same.resume = same.data = same.val = same.formats = "";
    same.join_timeout = 0;
    FILE* file = open_memstream(&text, &length);
    options_json(&TABLE, &same, file);
    fprintf(file, ", %lld tokens of --data, %lld of --val", (long long)train->tokens, (long long)val->tokens);
    fclose(file);
    uint32_t own = crc32c(0, text, (int64_t)length), first = own;
    launch_share(launch, 0, &first, sizeof(first));
    if (first != own) user_error("it has other options or other data than rank 0: %s; start all alike", text);
    free(text);
}
