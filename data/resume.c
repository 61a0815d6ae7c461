// See resume.h. The names are those of the trainer's options.
#include "resume.h"
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include "checkpoint.h"
#include "evaluation.h"
#include "gpt2_config.h"
#include "removed.h"
#include "text.h"

// The value of a text option.
static const char* text_of(const Resume* resume, const char* name) {
    return *(const char* const*)option_value(resume->table, resume->fields, name);
}

bool resume_given(const Resume* resume, const char* name) {
    return option_given(resume->table, resume->given, name);
}

// Appends to `changed`, which is cut when it is full.
__attribute__((format(printf, 2, 3))) static void resume_changed(Resume* resume, const char* format, ...) {
    const size_t used = strlen(resume->changed);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(resume->changed + used, sizeof(resume->changed) - used, format, arguments);
    va_end(arguments);
}

bool resume_words(const Resume* resume, char* error) {
    const char* from = text_of(resume, "resume");
    const bool goes_on = *from && strcmp(from, "off") != 0 && strcmp(from, "auto") != 0;
    const char* names = goes_on ? "model run resume" : "data val model run resume";
    for (const char* name; (name = text_word(&names, ' '));) {
        if (!resume_given(resume, name) || *text_of(resume, name)) continue;
        return data_error(error, "--%s '' is empty; give it a value or leave it out", name);
    }
    return true;
}

// True if the checkpoint's value of an option is ignored: the option belongs to one start of the program, names a file
// to write (the checkpoint may be a stranger's), is merged elsewhere, would hide a typed --prompt, or comes with the
// preset, and another preset was typed.
static bool is_left(const Resume* resume, const Option* option) {
    const char* of_start = "run resume device gpus join-timeout override eval-out";
    if (!option_is_saved(resume->table, option) || text_among(option->name, of_start, ' ')) return true;
    if (strcmp(option->name, "prompt-file") == 0 && resume_given(resume, "prompt")) return true;
    return !resume_given(resume, option->name) && text_among(option->name, "rule weights m v", ' ') &&
           resume_given(resume, "preset") &&
           strcmp(json_string(resume->saved, "preset", ""), text_of(resume, "preset")) != 0;
}

// Returns the value of an option as checkpoints have it: the paths of files are absolute. The caller frees it.
static char* saved_path(const char* option, const char* value) {
    return strcmp(option, "eval") == 0 ? text_copy(evaluation_paths(value)) : path_absolute(value);
}

void resume_paths(Resume* resume) {
    static const char* const names[] = {"data", "val", "prompt-file", "eval", "eval-out"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        const char** value = option_value(resume->table, resume->fields, names[i]);
        *value = saved_path(names[i], *value);
    }
}

// Returns a value as people write it: 0.0003, not 0.00030000000000000003.
static const char* shown(const Option* option, const char* text) {
    if (option->type == OPTION_REAL && strcmp(text, "auto") != 0) return text_kept("%.9g", strtod(text, NULL));
    return *text ? text : "''";
}

// Refuses a checkpoint whose options include one that was removed and that changed something.
static bool resume_removed(const Resume* resume, char* error) {
    for (const Json* one = resume->saved ? resume->saved->child : NULL; one; one = one->next) {
        const char *name = one->key, *value = json_string(resume->saved, name, "");
        const char* answer = option_find(resume->table, name) ? NULL : removed_option(name, value);
        if (!answer) continue;
        return data_error(error,
                          "--resume: the checkpoint has --%s %s, which was removed; for a new run with its weights "
                          "type --model %s, and %s",
                          name, value, shell_word(resume->from), answer);
    }
    return true;
}

// True if a file lies in the run of the checkpoint that is resumed, links followed.
static bool is_in_run(const Resume* resume, const char* path) {
    SCOPED char *real = realpath(path, NULL), *run = realpath(path_parent(resume->from), NULL);
    const size_t length = run ? strlen(run) : 0;
    return real && length > 1 && strncmp(real, run, length) == 0 && real[length] == '/' &&
           file_exists(path_in(run, "log.jsonl"));
}

// Judges paths that only the checkpoint names, which a stranger may have written. --prompt-file and --eval are refused
// unless their files are in the run: lines of any file could come out as prompts. --data and --val are named in the
// banner.
static bool resume_paths_taken(Resume* resume, char* error) {
    static const char* const others[][2] = {{"prompt-file", "--prompt TEXT"}, {"eval", "--eval-every 0"}};
    static const char* const data[] = {"data", "val"};
    for (int i = 0; i < 2; i++) {
        const char *name = others[i][0], *value = json_string(resume->saved, name, "");
        const int64_t every = *(const int64_t*)option_value(resume->table, resume->fields, "eval-every");
        if ((i == 1 && every == 0) || is_left(resume, option_find(resume->table, name))) continue;
        const char* list = resume_given(resume, name) || !*value ? NULL : value;
        for (const char* path; (path = text_word(&list, i == 1 ? ',' : 0));) {
            if (is_in_run(resume, path) || (i == 1 && evaluation_is_name(path))) continue;
            return data_error(error,
                              "--resume: the checkpoint's --%s %s is not in its run, so it may be a stranger's choice; "
                              "type --%s %s%s again, or %s",
                              name, path, name, shell_word(value),
                              i == 1 ? text_kept(" --eval-every %lld", (long long)every) : "", others[i][1]);
        }
    }
    for (int i = 0; i < 2; i++) {
        const char* value = json_string(resume->saved, data[i], "");
        if (*value && !resume_given(resume, data[i]))
            resume->taken = text_format("%s --%s %s", resume->taken ? resume->taken : "", data[i], shell_word(value));
    }
    const char* out = json_string(resume->saved, "eval-out", "");
    if (*out && !resume_given(resume, "eval-out"))
        resume_changed(resume, " --eval-out none (was %s; type it again to write there)", out);
    return true;
}

bool resume_options(Resume* resume, char* error) {
    if (!resume_removed(resume, error)) return false;
    for (int i = 0; i < resume->table->count; i++) {
        const Option* option = &resume->table->option[i];
        const char *name = option->name, *text = json_string(resume->saved, name, NULL);
        if (!text || is_left(resume, option)) continue;
        const bool fixed = text_among(name, "model layers channels heads seq", ' ');
        const char* now = option_text(option, resume->fields);
        const bool typed = resume->given[i] && !(fixed && strcmp(now, "auto") == 0);
        SCOPED char* path = saved_path(name, now);
        if (typed && (strcmp(now, text) == 0 || strcmp(path, text) == 0)) continue;
        // A job script types --model DIR each time; when the run is resumed DIR is not read, and may be gone by now.
        const bool folder = typed && strcmp(name, "model") == 0 && !gpt2_named(now) && !gpt2_named(text);
        if (folder) resume_changed(resume, " --model %s: the checkpoint's weights go on", now);
        if (!typed || folder) {
            if (!option_set(option, resume->fields, text, error)) return data_error(error, "--resume: %s", error);
            continue;
        }
        if (fixed) {
            // gpt2_take_size has made --size the value of --model.
            const char* asked = strcmp(name, "model") == 0 && gpt2_size_check(now, error) ? "size" : name;
            return data_error(
                error, "--%s %s: the checkpoint goes on with %s; leave --%s out, or name another --run to begin anew",
                asked, now, text, asked);
        }
        resume_changed(resume, " --%s %s (was %s)", name, shown(option, now), shown(option, text));
    }
    return resume_paths_taken(resume, error);
}

bool resume_find(Resume* resume, RunFolder* run, char* error) {
    const char *named = text_of(resume, "run"), *how = text_of(resume, "resume");
    const bool dry = *(const bool*)option_value(resume->table, resume->fields, "dry-run");
    if (!run_folder_begin(run, named, how, dry, error)) return false;
    char* from = resume->from;
    const bool found =
        checkpoint_locate(how, named, from, sizeof(resume->from), &resume->named_itself, &resume->state, error);
    if (!resume->state) from[0] = 0;
    return found;
}

bool resume_take(Resume* resume, char* error) {
    resume->from[sizeof(resume->from) - 1] = 0;
    if (!resume->from[0]) return true;
    if (!resume->state) resume->state = checkpoint_state(resume->from, error);
    if (!resume->state) return false;
    resume->saved = json_get(resume->state, "options");
    return resume_options(resume, error);
}

static double saved_number(const Resume* resume, const char* name) {
    return strtod(json_string(resume->saved, name, "0"), NULL);
}

// If the rate rises at the resume, as with more --steps, m and its :ef errors are in units of a smaller one.
static void resume_rate(Resume* resume, RunState* state, const Schedule* schedule) {
    Schedule now = *schedule, was = {.kind = json_string(resume->saved, "schedule", "cosine")};
    was.lr = saved_number(resume, "lr"), was.final_lr = saved_number(resume, "final-lr");
    was.steps = (int64_t)saved_number(resume, "steps"), was.warmup = (int64_t)saved_number(resume, "warmup");
    was.decay_fraction = saved_number(resume, "decay-fraction");
    was.rise_step = now.rise_step = state->rise_step, was.rise_lr = now.rise_lr = state->rise_lr;
    const double before = learning_rate(&was, state->step), after = learning_rate(&now, state->step);
    if (!(after > 1.000001 * before) || now.warmup == 0) return;
    state->rise_step = state->step, state->rise_lr = before;
    resume_changed(resume, "%s the rate rises from %.3g to the schedule's %.3g over --warmup %lld steps",
                   *resume->changed ? ";" : "", before, after, (long long)now.warmup);
}

void resume_state(Resume* resume, RunFolder* run, const Dataset* train, const Dataset* val, const Schedule* schedule) {
    const char* changes[2];
    run->state = (RunState){.data_tokens = train->tokens, .data_crc = train->crc, .val_crc = val->crc};
    run->state.best_val = INFINITY, run->taken = resume->taken;
    const int count = resume->state ? run_state_resume(&run->state, resume->state, changes) : 0;
    for (int i = 0; i < count; i++) resume_changed(resume, *resume->changed ? "; %s" : " %s", changes[i]);
    if (resume->state) resume_rate(resume, &run->state, schedule);
    run->state.tokens = run->state.sequences * run_int(run, "seq");
}

bool resume_intent(const Resume* resume, bool folder, char* error) {
    const char* every = option_text(option_find(resume->table, "eval-every"), resume->fields);
    const char* samples = option_text(option_find(resume->table, "sample-every"), resume->fields);
    if (resume_given(resume, "eval-out") && strcmp(every, "0") == 0) {
        return data_error(
            error, "--eval-out is for the scores of an --eval, and there is none; type --eval FILE --eval-every N too");
    }
    if (*text_of(resume, "data")) return true;
    if (resume_given(resume, "prompt-file") && strcmp(samples, "auto") == 0) {
        return data_error(error,
                          "--prompt-file alone would train on nibble's own source text; type --sample '' --model DIR "
                          "too, or --data PATH for samples of a run");
    }
    return !folder ||
           data_error(error,
                      "--model %s would train on nibble's own source text; type --data PATH, or --sample PROMPT or "
                      "--eval NAMES to try the model",
                      text_of(resume, "model"));
}
