#include "run_folder.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "clock.h"
#include "evaluation.h"
#include "signals.h"
#include "text.h"

bool run_folder_free(const char* folder, bool again, char* error) {
    int64_t* steps;
    const bool log = file_exists(path_in(folder, "log.jsonl")), run = checkpoint_list(folder, &steps) > 0 || log;
    free(steps);
    if (model_folder_has_weights(folder) || file_exists(path_in(folder, "state.json")) ||
        (!run && file_exists(path_in(folder, "config.json")))) {
        return data_error(error, "--run %s holds a model, whose config.json a run would overwrite; name another folder",
                          folder);
    }
    if (again || !run) return true;
    return data_error(
        error, "--run %s already holds a run; type --resume auto to go on with it, or name another folder", folder);
}

bool run_folder_hold(RunFolder* run, const char* folder, char* error) {
    const struct timespec pause = {0, 100000000};
    const int descriptor = run->held ? -1 : open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) return true;
    // Tries for five seconds: the ranks of a run that was killed take some time to end.
    for (int i = 0; i < 50; i++) {
        run->held = flock(descriptor, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
        if (run->held) return true;
        nanosleep(&pause, NULL);
    }
    close(descriptor);
    return data_error(error, "--run %s: another process is training there; wait for it, or name another folder",
                      folder);
}

// Makes runs/DATE_TIME_MODEL, or the first of _2, _3, ... that nobody has: mkdir gives each name to one run alone.
static bool folder_name(RunFolder* run, const char* model, char* error) {
    char date[32];
    time_t now = time(NULL);
    strftime(date, sizeof(date), "%Y-%m-%d_%H%M%S", localtime(&now));
    if (!folder_make("runs", error)) return data_error(error, "%s; name another folder with --run DIR", error);
    int length = snprintf(run->path, sizeof(run->path), "runs/%s_%.128s", date, basename(model));
    for (int next = 2; mkdir(run->path, 0777) != 0; next++) {
        if (errno != EEXIST) {
            return data_error(error, "cannot create the folder %s: %s; name another with --run DIR", run->path,
                              strerror(errno));
        }
        snprintf(run->path + length, sizeof(run->path) - (size_t)length, "_%d", next);
    }
    return true;
}

// Copies the tokenizer's files into the run folder, and reads the config.json that the run began with. If the run is
// resumed, the checkpoint's files replace those of the folder.
static bool tokenizer_take(RunFolder* run) {
    char* error = run->error;
    const char* const sources[2] = {run->weights, run->train_data.tokenizer};
    for (int i = 0; i < 2; i++) {
        if (!*sources[i] || !folder_exists(sources[i])) continue;
        if (!tokenizer_files_copy(sources[i], run->path, i == 0 && run->resumed, error)) {
            return data_error(error, "--run %s: %s", run->path, error);
        }
    }
    if (run->train_data.bytes && !tokenizer_exists(run->path) && !tokenizer_write_bytes(run->path, error)) return false;
    if (!*sources[0]) return true;
    run->config = json_read(path_in(sources[0], "config.json"), error);
    return run->config != NULL;
}

// Writes the first line: the program; where, when and how it was started; all options; sizes of the model and tokens.
static void log_config(RunFolder* run, const char* device) {
    char host[256] = "", date[32];
    const time_t now = time(NULL);
    struct tm utc;
    gethostname(host, sizeof(host) - 1);
    strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    FILE* log = run->log;
    const char* const facts[][2] = {{"type", "config"},        {"version", NIBBLE_VERSION},
                                    {"commit", NIBBLE_COMMIT}, {"build", NIBBLE_BUILD},
                                    {"started", date},         {"host", host},
                                    {"device", device},        {"command", run->options->command}};
    for (int i = 0; i < 8; i++) json_write_text_member(log, i ? ", " : "{", facts[i][0], facts[i][1]);
    fputs(", \"options\": ", log);
    options_json(run->options, run->options, true, log);
    fprintf(log, ", \"unix_s\": %lld, \"ranks\": %d, \"parameters\": %lld", (long long)now, run->ranks,
            (long long)run->parameters);
    const double bytes_per_token = run->val_data.bytes_per_token;
    json_write_number_member(log, ", ", "bytes_per_token", bytes_per_token > 0 ? bytes_per_token : NAN);
    fputs("}\n", log);
    fflush(log);
}

bool run_folder_make(RunFolder* run, const char* device) {
    char* error = run->error;
    const bool again = run->resumed || strcmp(run->options->resume, "auto") == 0;
    const char** name = &run->options->run;
    if (!**name) {
        if (!folder_name(run, run->options->model, error)) return false;
        *name = text_copy(run->path);
    }
    snprintf(run->path, sizeof(run->path), "%s", *name);
    // A run can be resumed from any folder.
    run->options->data = path_absolute(run->options->data), run->options->val = path_absolute(run->options->val);
    if (!folder_make(run->path, error)) return data_error(error, "--run %s: %s; name another one", run->path, error);
    if (!run_folder_hold(run, run->path, error) || !run_folder_free(run->path, again, error)) return false;
    // log.txt comes first: if it cannot be opened, there is no log.jsonl yet, which would make this a run's folder.
    FILE* text = log_open(path_in(run->path, "log.txt"), error);
    if (text) run->log = log_open(path_in(run->path, "log.jsonl"), error);
    SCOPED char* config;
    size_t length;
    FILE* options = text_stream(&config, &length);
    options_json(run->options, run->options, false, options);
    fputs("\n", options);
    fclose(options);
    if (!run->log || !file_write(path_in(run->path, "config.json"), config, (int64_t)length, error)) {
        return data_error(error, "--run %s: %s", run->path, error);
    }
    fclose(run->text);  // completes run->banner
    fwrite(run->banner, 1, run->banner_bytes, text);
    free(run->banner);
    run->text = text;
    if (run->resumed) run_say(run, " resume   %s, step %lld\n", run->last_checkpoint, (long long)run->state.step);
    run_say(run, " run      %s\n", run->path);
    if (!tokenizer_take(run)) return false;
    run->started = seconds_now();
    log_config(run, device);
    return !run->resumed || run_log(run, "resume", 0, NULL, NULL);
}

void run_folder_close(RunFolder* run) {
    if (run->log) fclose(run->log);
    if (run->text) fclose(run->text);
    dataset_close(&run->train_data), dataset_close(&run->val_data);
    json_free(run->config), json_free(run->resumed);
    tokenizer_close(run->tokenizer), prompts_close(&run->prompts);
}

void run_say(RunFolder* run, const char* format, ...) {
    if (run->quiet) return;
    FILE* to[2] = {stdout, run->text};
    va_list arguments;
    va_start(arguments, format);
    SCOPED char* text = text_of(format, arguments);
    va_end(arguments);
    text_disarm(text, true);  // names and prompts of a checkpoint, and what a model writes
    for (int i = 0; i < 2; i++) {
        if (to[i]) fputs(text, to[i]), fflush(to[i]);
    }
}

// Returns the options that a resume does not take from a checkpoint, as they are typed.
static const char* typed_again(const Options* o) {
    const char *names = "prompt-file eval eval-every eval-out", *all = "";
    for (const char* name; (name = text_word(&names, ' '));) {
        const char* value = option_text(option_find(name), o);
        if (*value && strcmp(value, "0") != 0) text_add(&all, " --%s %s", name, shell_word(value));
    }
    return all;
}

void run_say_next(RunFolder* run, bool stopped) {
    const char* self = shell_word(program_invocation_name);
    const bool saved = run->last_checkpoint[0] && strcmp(run->options->save, "none") != 0;
    const bool samples = run->samples && !stopped && saved, resumes = stopped && saved;
    if (resumes) run_say(run, "next     %s --resume %s%s\n", self, shell_word(run->path), typed_again(run->options));
    if (samples) run_say(run, "next     %s --sample \"...\" --model %s\n", self, shell_word(run->last_checkpoint));
    const char* folder = path_parent(program_invocation_name);
    const char *python = path_in(folder, ".venv/bin/python"), *plot = path_in(folder, "dev/plot.py");
    if (!file_exists(python) || !file_exists(plot)) return;
    run_say(run, "%-9s%s %s %s\n", samples || resumes ? "" : "next", shell_word(python), shell_word(plot),
            shell_word(run->path));
}

const char* run_last_checkpoint(const RunFolder* run) {
    return run->last_checkpoint[0] ? run->last_checkpoint : "none";
}

const char* run_resume_words(const RunFolder* run) {
    if (run->last_checkpoint[0]) return shell_word(run->last_checkpoint);
    return text_format("auto --run %s", shell_word(run->path));
}

bool run_folder_asks_save(RunFolder* run) {
    const char* path = path_in(run->path, "save");
    const bool file = !run->quiet && file_exists(path), asked = file || signal_save;
    if (asked && !run->quiet) unlink(path);
    signal_save = 0;
    const bool saves = strcmp(run->options->save, "none") != 0;
    if (asked && !saves) run_say(run, "save     not done: --save none was typed\n");
    return asked && saves;
}

FILE* run_log_begin(RunFolder* run, const char* type) {
    if (!run->log) return NULL;
    const int64_t tokens = run->state.sequences * run->options->seq;
    fprintf(run->log, "{\"type\": \"%s\", \"step\": %lld, \"tokens\": %lld, \"time_s\": %.3f", type,
            (long long)run->state.step, (long long)tokens, seconds_now() - run->started);
    return run->log;
}

bool run_log_end(RunFolder* run) {
    fputs("}\n", run->log);
    return fflush(run->log) == 0 ||
           data_error(run->error, "%s/log.jsonl cannot be written: %s; the last checkpoint is %s", run->path,
                      strerror(errno), run_last_checkpoint(run));
}

bool run_log(RunFolder* run, const char* type, int count, const char* const* names, const double* values) {
    FILE* log = run_log_begin(run, type);
    bool finite = true;
    for (int i = 0; i < count && log; i++) {
        json_write_number_member(log, ", ", names[i], values[i]);
        finite = finite && isfinite(values[i]);
    }
    if (!finite) fputs(", \"nonfinite\": true", log);
    return !log || run_log_end(run);
}

// Opens the tokenizer in `folder`, and prints why there are no samples if it does not fit.
static void tokenizer_begin(RunFolder* run, const char* folder, int vocabulary) {
    char reason[DATA_ERROR_BYTES];
    const bool bytes = run->train_data.bytes, there = bytes || (*folder && tokenizer_exists(folder));
    Tokenizer* opened = run->tokenizer = there ? tokenizer_open(bytes ? NULL : folder, reason) : NULL;
    if (there && !opened) run_say(run, " notice   %s: no samples\n", reason);
    run->samples =
        opened && tokenizer_encode(opened, "", 0, NULL, 0) >= 0 && tokenizer_vocabulary(opened) <= vocabulary;
    if (!run->samples) run->options->sample_every = 0;
    if (!run->samples && (opened || !there)) {
        run_say(run, " notice   no vocab.json and merges.txt of %d tokens beside the data: no samples\n", vocabulary);
    }
}

bool run_folder_open(RunFolder* run, int vocabulary, int64_t size) {
    const Options* o = run->options;
    const char* weights = run->weights;
    char* error = run->error;
    const bool resumes = run->resumed, saves = size > 0 && !run->quiet && strcmp(o->save, "none") != 0;
    const long long all = resumes || o->save_every == 0 ? 1 : o->steps / o->save_every + 1;
    const long long most = o->keep == OPTION_AUTO ? 3 : o->keep, count = most < all ? most + 1 : all;
    if (saves && !disk_holds(*o->run ? o->run : "runs", count * size, error)) {
        return data_error(error, "%s, for %lld checkpoint%s; free some, or name another --run%s%s", error, count,
                          count > 1 ? "s" : "", most > 1 && all > 2 ? ", or type --keep 1" : "",
                          strcmp(o->save, "all") == 0 ? ", or type --save weights or none" : "");
    }
    if (!*weights && file_exists(path_in(o->model, "model.safetensors"))) {
        run_say(run, " notice   %s is built in and its weights are new; type --model ./%s for those of the folder\n",
                o->model, o->model);
    }
    if (!tokenizers_agree(weights, run->train_data.tokenizer)) {
        return data_error(error,
                          "--data %s was prepared with another tokenizer than %s has; type .venv/bin/python "
                          "data/prepare.py FILE --tokenizer %s --out DIR, and --data DIR here",
                          o->data, weights, shell_word(weights));
    }
    tokenizer_begin(run, *weights && tokenizer_exists(weights) ? weights : run->train_data.tokenizer, vocabulary);
    return (o->eval_every == 0 ||
            evaluation_check(o->eval, run->tokenizer, vocabulary, run->quiet ? "" : o->eval_out, &run->tasks, error)) &&
           prompts_open(&run->prompts, o->prompt, o->prompt_file, run->samples ? run->tokenizer : NULL, vocabulary,
                        error);
}
