#include "resume.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "text.h"

// True if the checkpoint's value of an option is ignored: the option belongs to one start of the program, is merged
// elsewhere, or comes with the preset, and another preset was typed.
static bool is_left(const RunFolder* run, const Option* option) {
    const char* of_start = "run resume device gpus join-timeout prompt-file eval eval-every eval-out override";
    if (!option_is_saved(option) || text_among(option->name, of_start, ' ')) return true;
    return !option_given(run->options, option->name) && text_among(option->name, "rule weights m v", ' ') &&
           option_given(run->options, "preset") &&
           strcmp(json_string(json_get(run->resumed, "options"), "preset", ""), run->options->preset) != 0;
}

// Returns a value as people write it: 0.0003, not 0.00030000000000000003.
static const char* shown(const Option* option, const char* text) {
    if (option->type == OPTION_REAL && strcmp(text, "auto") != 0) return text_kept("%.9g", strtod(text, NULL));
    return *text ? text : "''";
}

bool resume_options(RunFolder* run, char* error) {
    const Json* saved = json_get(run->resumed, "options");
    for (int i = 0; i < OPTION_COUNT; i++) {
        const Option* option = &OPTIONS[i];
        const char* name = option->name;
        // Checkpoints without --momentum-warmup are of runs whose momentum did not rise.
        const char* text = json_string(saved, name, strcmp(name, "momentum-warmup") == 0 ? "0" : NULL);
        const bool file = text_among(name, "prompt-file eval eval-out", ' ');
        if (text && *text && file && !run->options->given[i]) {
            text_add(&run->changed, " --%s none (was %s)", name, text);
        }
        if (!text || is_left(run, option)) continue;
        const bool fixed = text_among(name, "model layers channels heads seq", ' ');
        const char* now = option_text(option, run->options);
        const bool typed = run->options->given[i] && !(fixed && strcmp(now, "auto") == 0);
        SCOPED char* path = path_absolute(now);  // as checkpoints have the paths of files
        if (typed && (strcmp(now, text) == 0 || strcmp(path, text) == 0)) continue;
        // A job script types --model DIR each time; when the run is resumed DIR is not read, and may be gone by now.
        const bool folder = typed && strcmp(name, "model") == 0 && !gpt2_named(now) && !gpt2_named(text);
        if (folder) text_add(&run->changed, " --model %s: the checkpoint's weights go on", now);
        if (!typed || folder) {
            if (!option_set(option, run->options, text, error)) return data_error(error, "--resume: %s", error);
            continue;
        }
        if (fixed) {
            // gpt2_take_size has made --size the value of --model.
            const char* asked = strcmp(name, "model") == 0 && gpt2_size_check(now, error) ? "size" : name;
            return data_error(
                error, "--%s %s: the checkpoint goes on with %s; leave --%s out, or name another --run to begin anew",
                asked, now, text, asked);
        }
        text_add(&run->changed, " --%s %s (was %s)", name, shown(option, now), shown(option, text));
    }
    return true;
}

// Refuses a checkpoint that another version wrote, or that was saved without states.
static bool is_resumable(const RunFolder* run, char* error) {
    const int64_t version = json_int(run->resumed, "version", 0);
    if (version != CHECKPOINT_VERSION) {
        return data_error(error, "%s was written by another version of nibble (%lld); resume with that one",
                          run->checkpoint, (long long)version);
    }
    return json_get(json_get(run->resumed, "files"), "optimizer.safetensors") ||
           data_error(
               error,
               "--resume %s: %s was saved with --save weights, without the optimizer's states; type --model %s in "
               "place of --resume for a new run that begins with its weights",
               run->options->resume, run->checkpoint, shell_word(run->checkpoint));
}

// Takes the checkpoint that the user named.
static bool take_named(RunFolder* run, char* error) {
    run->resumed = checkpoint_verify(run->checkpoint, false, error);
    return run->resumed ||
           data_error(error, "--resume %s: damaged checkpoint: %s; resume from the one before, or give the run folder",
                      run->options->resume, error);
}

// Takes the newest checkpoint of the run folder `named`. With --resume auto there need not be one.
static bool take_newest(RunFolder* run, const char* named, bool automatic, char* error) {
    SCOPED int64_t* steps;
    const int count = checkpoint_list(named, &steps);
    run->resumed = checkpoint_newest(named, false, run->checkpoint, RUN_PATH_BYTES);
    if (!run->resumed) run->checkpoint[0] = 0;
    return run->resumed || (automatic && count == 0) ||
           data_error(error,
                      "--resume %s: %s holds no whole checkpoint (step_*), and %d are damaged; %sgive a run folder "
                      "that does, or begin anew without --resume, in another --run",
                      run->options->resume, named, count,
                      count ? "" : text_kept("type --resume auto --run %s to begin it anew, ", shell_word(named)));
}

// Refuses the folder of another run and, if the user named the checkpoint itself, of one that has newer ones. Others
// that are newer are damaged, and are renamed to NAME.damaged, unless in a dry run.
static bool goes_on_in_folder(const RunFolder* run, bool named_itself, char* error) {
    const char* folder = run->options->run;
    SCOPED char *parent = realpath(path_parent(run->checkpoint), NULL), *chosen = realpath(folder, NULL);
    const bool same = parent && chosen && strcmp(parent, chosen) == 0;
    if (!same && !run_folder_free(folder, false, error)) return false;
    SCOPED int64_t* steps = NULL;
    const int count = same ? checkpoint_list(folder, &steps) : 0;
    for (int i = 0; i < count && steps[i] > checkpoint_step(run->checkpoint); i++) {
        const char *path = checkpoint_name(folder, steps[i]), *aside = text_kept("%s.damaged", path);
        if (named_itself) {
            return data_error(error,
                              "%s is newer than %s in the same run; name a new folder for the branch with --run DIR",
                              path, run->checkpoint);
        }
        if (run->options->dry_run) continue;
        if (!folder_remove(aside, error)) return false;
        if (rename(path, aside) != 0) return data_error(error, "%s cannot be renamed: %s", path, strerror(errno));
    }
    return true;
}

// Sets `checkpoint` to the one that the user named. Returns its run folder; NULL with a sentence.
static const char* folder_of_named(RunFolder* run, const char* named, char* error) {
    const int length = (int)strlen(named) - (text_ends(named, "/") && named[1]);
    snprintf(run->checkpoint, RUN_PATH_BYTES, "%.*s", length, named);
    SCOPED char* real = checkpoint_step(run->checkpoint) < 0 ? realpath(named, NULL) : NULL;  // such as "."
    if (real) snprintf(run->checkpoint, RUN_PATH_BYTES, "%s", real);
    const char* folder = path_parent(run->checkpoint);
    if (*run->options->run) return run->options->run;
    if (file_exists(path_in(folder, "log.jsonl")) && checkpoint_step(run->checkpoint) >= 0) return folder;
    data_error(error, "--resume %s: this checkpoint lies in no run folder; name one with --run DIR", run->checkpoint);
    return NULL;  // it was copied, say
}

bool resume_find(RunFolder* run, char* error) {
    Options* o = run->options;
    const bool automatic = strcmp(o->resume, "auto") == 0;
    const char *named = automatic ? o->run : o->resume, *folder = *o->run ? o->run : named;
    if (strcmp(o->resume, "off") == 0) return !*o->run || run_folder_free(o->run, false, error);
    if (automatic && !*named) return data_error(error, "--resume auto needs the run folder: add --run DIR");
    if (!automatic && (!folder_exists(named) || access(named, R_OK | X_OK) != 0)) {
        return data_error(error,
                          "--resume %s: there is no such folder that can be read; give a run folder, a checkpoint in "
                          "it, or auto with --run DIR",
                          named);
    }
    const bool named_itself = !automatic && file_exists(path_in(named, "state.json"));
    if (named_itself) folder = folder_of_named(run, named, error);
    if (!folder || (*o->run && !run_folder_free(folder, true, error))) return false;
    if (!o->dry_run && !run_folder_hold(run, folder, error)) return false;
    if (named_itself ? !take_named(run, error) : !take_newest(run, named, automatic, error)) return false;
    if (!run->resumed) return true;
    if (!*o->run) o->run = path_parent(run->checkpoint);
    return is_resumable(run, error) && goes_on_in_folder(run, named_itself, error);
}

// Refuses options that mean something else than training, but would train. folder: --model names a folder.
static bool is_meant(const Options* o, bool folder, char* error) {
    if (option_given(o, "eval-out") && o->eval_every == 0) {
        return data_error(
            error, "--eval-out is for the scores of an --eval, and there is none; type --eval FILE --eval-every N too");
    }
    const bool prompts = option_given(o, "prompt-file") && o->sample_every == OPTION_AUTO;
    return *o->data || (!prompts && !folder) ||
           data_error(error,
                      "--%s would train on nibble's own source text; type --data PATH, or --model DIR and --sample "
                      "PROMPT ('' with --prompt-file) or --eval NAMES to try the model",
                      prompts ? "prompt-file" : text_kept("model %s", o->model));
}

bool resume_take(RunFolder* run, char* error) {
    run->weights = run->checkpoint;
    if (!*run->checkpoint) {
        run->weights = checkpoint_model(&run->options->model, false, error);
        return run->weights && is_meant(run->options, *run->weights, error);
    }
    if (!run->resumed) run->resumed = checkpoint_state(run->checkpoint, error);
    if (!run->resumed) return false;
    return resume_options(run, error) && is_meant(run->options, false, error);
}

// If the rate rises at the resume, as with more --steps, m and its :ef errors are in units of a smaller one.
static void resume_rate(RunFolder* run) {
    RunState* state = &run->state;
    char ignored[DATA_ERROR_BYTES];
    const Options* now = run->options;
    Options was = *now;
    const char* names = "schedule lr final-lr steps warmup decay-fraction";
    for (const char* name; (name = text_word(&names, ' '));) {
        option_set(option_find(name), &was, json_string(json_get(run->resumed, "options"), name, ""), ignored);
    }
    const double before = learning_rate(&was, &state->rise, state->step),
                 after = learning_rate(now, &state->rise, state->step);
    if (!(after > 1.000001 * before) || now->warmup == 0) return;
    state->rise = (RateRise){state->step, before};
    text_add(&run->changed, "; the rate rises from %.3g to the schedule's %.3g over --warmup %lld steps", before, after,
             now->warmup);
}

bool resume_state(RunFolder* run) {
    Dataset *data = &run->train_data, *val = &run->val_data;
    if (!dataset_fingerprint(data, run->error) || !dataset_fingerprint(val, run->error))
        return data_error(run->error, "--data: %s", run->error);
    RunState now = {.data_tokens = data->tokens, .data_crc = data->crc, .val_crc = val->crc};
    now.best_val = INFINITY, run->state = now;
    if (!run->resumed) return true;
    RunState* state = &run->state;
    *state = run_state_read(run->resumed, &now);
    snprintf(run->last_checkpoint, sizeof(run->last_checkpoint), "%s", run->checkpoint);
    if (state->data_tokens != now.data_tokens) {
        text_add(&run->changed, "; the data: %lld tokens (were %lld), so they come in another order from here on",
                 (long long)now.data_tokens, (long long)state->data_tokens);
    } else if (state->data_crc != now.data_crc) {
        text_add(&run->changed, "; the data: as many tokens as before, but other ones");
    }
    if (state->val_crc != now.val_crc) {
        text_add(&run->changed, "; the validation data, so the best loss begins anew");
        state->best_val = now.best_val;
    }
    state->data_tokens = now.data_tokens, state->data_crc = now.data_crc, state->val_crc = now.val_crc;
    resume_rate(run);
    return true;
}
