// How a run begins that goes on from a checkpoint: which one, and what becomes of its options beside those that are
// typed. And how several ranks begin: alike.
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "data/checkpoint.h"
#include "data/gpt2_config.h"
#include "data/loader.h"
#include "data/model_folder.h"
#include "data/json.h"
#include "data/text.h"
#include "kernels/ranks/launch.h"
#include "train_options.h"

// What was typed as empty, as from a shell's variable that is not set, is not what was meant; but that a run goes on
// without the data that it had may be.
static void require_words(const Options* o, const bool* given) {
    const struct {
        const char *name, *text;
    } words[] = {{"data", o->data}, {"val", o->val}, {"model", o->model}, {"run", o->run}, {"resume", o->resume}};
    const bool goes_on = strcmp(o->resume, "off") != 0 && strcmp(o->resume, "auto") != 0;
    for (const auto& word : words) {
        if (goes_on && *o->resume && (word.text == o->data || word.text == o->val)) continue;
        if (!given[option_find(&TABLE, word.name) - OPTIONS] || *word.text) continue;
        user_error("--%s '' is empty; give it a value or leave it out", word.name);
    }
}

// The folder that --model names, or "" where it names a built-in shape. Nothing else decides which of the two is meant:
// a built-in shape's bare name is always that shape, and a folder of the same name is written ./NAME. A run folder
// stands for its newest checkpoint; a checkpoint must be whole. o->model becomes the path from the root, for the
// checkpoints to come.
static const char* model_folder(Options* o) {
    char path[4500], names[256], error[DATA_ERROR_BYTES];
    if (strcmp(o->model, "auto") == 0 || gpt2_named(o->model)) return "";
    char* folder = folder_exists(o->model) ? realpath(o->model, nullptr) : nullptr;
    if (!folder) {
        user_error("--model '%s' is neither a folder nor a name that nibble knows; type one of %s, or a folder's path",
                   o->model, gpt2_names(names, sizeof(names)));
    }
    const bool model = model_folder_has_weights(folder);
    Json* state = model ? nullptr : checkpoint_newest(folder, path, sizeof(path));
    o->model = state ? text_copy(path) : folder;
    json_free(state);
    snprintf(path, sizeof(path), "%s/state.json", o->model);
    if (model && access(path, F_OK) == 0 && !checkpoint_model_whole(o->model, error)) {
        user_error("--model %s: damaged checkpoint: %s; name another one", o->model, error);
    }
    return o->model;
}

// The checkpoint to go on from into `folder`, and its state.json's tree: rank 0 chooses. NULL: begin anew.
static Json* resume_locate(Options* o, const Launch* launch, char* folder, size_t bytes, bool* named_itself) {
    char error[DATA_ERROR_BYTES];
    Json* state = nullptr;
    if (launch->rank == 0 && !checkpoint_locate(o->resume, o->run, folder, bytes, named_itself, &state, error)) {
        user_error("%s", error);
    }
    if (!state) folder[0] = 0;
    launch_share(launch, 0, folder, (int64_t)bytes);
    folder[bytes - 1] = 0;
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

// The model's shape hangs on these, so a run cannot change them.
static bool is_fixed(const char* name) {
    for (const char* fixed : {"model", "layers", "channels", "heads", "seq"}) {
        if (strcmp(name, fixed) == 0) return true;
    }
    return false;
}

// Options that were not typed are taken from the checkpoint; typed ones that differ are listed in `changed`, or refused
// where the model's shape hangs on them. `asked`: the checkpoint has --grads as it was asked for, not what became of
// it.
static void resume_options(Options* o, const bool* given, const Json* saved, bool asked, char* changed,
                           size_t changed_bytes) {
    char error[DATA_ERROR_BYTES];
    for (int i = 0; i < OPTION_COUNT; i++) {
        const Option* option = &OPTIONS[i];
        const char* text = json_string(saved, option->name, nullptr);
        if (!is_restored(option) || !text || strcmp(option->name, "override") == 0) continue;
        if (!given[i] && left_to_preset(o, given, saved, option->name)) continue;
        const size_t used = strlen(changed);
        const bool fixed = is_fixed(option->name);
        if (!given[i] && !asked && strcmp(option->name, "grads") == 0 && strcmp(text, "bf16") == 0) {
            snprintf(changed + used, changed_bytes - used, " --grads auto (was bf16, asked for or not)");
            continue;
        }
        char number[OPTION_TEXT_BYTES];
        const char* now = option_text(option, o, number, sizeof(number));
        const bool typed = given[i] && !(fixed && strcmp(now, "auto") == 0);
        if (typed && strcmp(now, text) == 0) continue;
        // A folder that was typed as --model, as a job script does each time, is not read: it may be gone by now, or
        // the script may run in another place.
        const bool folder = typed && strcmp(option->name, "model") == 0 && !gpt2_named(now) && !gpt2_named(text);
        if (folder) snprintf(changed + used, changed_bytes - used, " --model %s: the checkpoint's weights go on", now);
        if ((!typed || folder) && !option_set(option, o, text, error)) user_error("--resume: %s", error);
        if (!typed || folder) continue;
        if (fixed) {
            user_error("--%s %s: the checkpoint goes on with %s; leave --%s out, or name another --run to begin anew",
                       option->name, now, text, option->name);
        }
        snprintf(changed + used, changed_bytes - used, " --%s %s (was %s)", option->name, *now ? now : "''",
                 *text ? text : "''");
    }
}

// Why the code in a --format file that only the checkpoint in `folder` names may be a stranger's; NULL: it is not. This
// program writes paths that name a file in one way, so that a path which can mean another file in another place, such
// as a downloaded one, is not its own.
static const char* format_distrust(const char* path, const char* folder) {
    struct stat info;
    char parent[4500];
    if (stat(path, &info) != 0) return nullptr;  // there is no code, which another sentence says
    char *real = realpath(path, nullptr), *run = realpath(folder_parent(folder, parent, sizeof(parent)), nullptr);
    const size_t length = run ? strlen(run) : 0;
    const bool same = real && strcmp(real, path) == 0;
    const bool beside = real && length > 1 && strncmp(real, run, length) == 0 && real[length] == '/';
    free(real), free(run);
    if (!same) return "its path is not one that this program writes";
    if (beside) return "the file lies in the run's folder";
    if (info.st_uid != geteuid() && info.st_uid != 0) return "the file belongs to another user";
    return info.st_mode & S_IWOTH ? "everybody can write the file" : nullptr;
}

// Code that was not typed runs only if this user's own run has used it before.
static void require_own_formats(const Options* o, const bool* given, const char* folder, bool first) {
    char path[4500];
    struct stat info;
    if (is_given(given, "format") || !o->formats[0]) return;
    snprintf(path, sizeof(path), "%s/state.json", folder);
    const bool own = stat(path, &info) == 0 && info.st_uid == geteuid();
    const char* reason = own ? nullptr : "the checkpoint belongs to another user";
    char *list = text_copy(o->formats), *shown = text_copy(o->formats), *rest = nullptr;
    for (char* one = strtok_r(list, ",", &rest); one && !reason; one = strtok_r(nullptr, ",", &rest)) {
        reason = format_distrust(one, folder);
    }
    text_disarm(shown, false);
    if (reason) {
        user_error(
            "--resume: %s names --format %s, whose code would run, and %s; type --format '%s' if you trust it, or "
            "begin "
            "anew without --resume",
            folder, shown, reason, shown);
    }
    if (first) fprintf(stderr, "train: note: the code in %s runs, since %s names it as --format\n", shown, folder);
    free(list), free(shown);
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
    trial.grads = "fp32", trial.overrides = "none";  // which has no part in v and the learning rate
    bool v_typed = given[option_find(&TABLE, "v") - OPTIONS];
    if (!v_typed && !optim_config_try(&trial, &config, error, sizeof(error))) trial.v = o->v = "";
    if (optim_config_try(&trial, &config, error, sizeof(error))) {
        resume_usual_lr(o, given, config.rule, saved, changed, changed_bytes);
    }
}

// Whether the checkpoint's format of `kind`, which is saved by its full name, is this one.
static bool has_format(const Json* formats, const char* kind, const char* name) {
    return strcmp(json_string(formats, kind, ""), name) == 0;
}

// --override, once the other options are known: what is typed; else what the user had asked for ("none" of its preset
// only); else what the run had, with its own preset and formats; else "", the preset's. Returns what was asked for, for
// the next checkpoint: "" where the run keeps what it had, as it will then again. Versions before 3 did not say what
// was asked for: what is not the preset's of today is taken for the user's.
static const char* resume_override(Options* o, const bool* given, const Json* state, char* changed, size_t bytes) {
    char error[DATA_ERROR_BYTES];
    const Json *saved = json_get(state, "options"), *formats = json_get(state, "formats");
    if (!formats) formats = saved;
    const char *preset = json_string(saved, "preset", ""), *had = json_string(formats, "override", "");
    const char* asked = json_string(saved, "override", "");
    const bool typed = is_given(given, "override"), other = strcmp(preset, o->preset) != 0;
    const bool older = json_int(state, "version", 1) < 3;
    if (!*had) had = "none";  // as it was said before presets had some
    if (older && strcmp(had, optim_preset_overrides(preset)) == 0) asked = "";
    if ((older || other) && strcmp(had, "none") == 0) asked = "";
    OptimConfig config;
    Options trial = *o;
    trial.grads = "fp32", trial.overrides = "";
    const bool known = optim_config_try(&trial, &config, error, sizeof(error));
    const bool same = known && !other && has_format(formats, "weights", config.weights) &&
                      has_format(formats, "m", config.m) && has_format(formats, "v", config.v);
    const bool has_own = known && strcmp(config.overrides, "none") != 0;
    if (!typed) o->overrides = text_copy(*asked ? asked : same ? had : "");
    trial.overrides = o->overrides;
    const char* next = typed ? o->overrides : text_copy(asked);
    if (!optim_config_try(&trial, &config, error, sizeof(error))) return next;  // it will be refused
    const size_t used = strlen(changed);
    if (strcmp(config.overrides, had) != 0) {
        snprintf(changed + used, bytes - used, " --override %s (was %s)", config.overrides, had);
    } else if (!typed && *asked && other && has_own) {
        snprintf(changed + used, bytes - used, " --override %s (the run's, not %s's)", had, o->preset);
    }
    return next;
}

// Ranks that would not train the same are a mistake: other options, or other data.
static void require_same(const Options* o, const Launch* launch, const Dataset* train, const Dataset* val) {
    char* text = nullptr;
    size_t length = 0;
    Options same = *o;
    same.run = same.resume = same.data = same.val = same.formats = "";
    same.join_timeout = 0;
    FILE* file = text_stream(&text, &length);
    options_json(&TABLE, &same, file);
    fprintf(file, ", %lld tokens of --data, %lld of --val (checksums %08x and %08x)", (long long)train->tokens,
            (long long)val->tokens, train->crc, val->crc);
    fclose(file);
    uint32_t own = crc32c(0, text, (int64_t)length), first = own;
    launch_share(launch, 0, &first, sizeof(first));
    if (first != own) user_error("it has other options or other data than rank 0: %s; start all alike", text);
    free(text);
}
