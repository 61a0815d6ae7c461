// Tests of the command line: each starts ./train (beside this binary) as a user would, on the CPU, with a model of one
// layer in a folder of its own, and looks at the exit code, the two output streams and the files. Every child has a
// time limit, so that a hang is a failure. Children see no GPU unless a test asks for it.
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <libgen.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../data/checkpoint.h"
#include "test.h"

constexpr double CHILD_SECONDS = 60;

struct Child {
    // Set before start().
    bool gpu;            // may see the GPU
    int threads;         // of OpenMP; 0: one
    int64_t file_limit;  // bytes that a file may have, as on a full disk; -1: any
    const char* folder;  // where it runs; NULL: here
    // Set by start() and wait_for().
    pid_t pid;
    int pipe[2];    // its stdout and stderr
    char* text[2];  // what came so far, NUL-terminated
    size_t bytes[2];
    int code;  // exit code, or 128 + signal
    double started;
};

static double now() {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void pause_ms(double ms) {
    struct timespec time = {(time_t)(ms / 1000), (long)(fmod(ms, 1000) * 1e6)};
    nanosleep(&time, nullptr);
}

// In the child, after fork: never returns.
[[noreturn]] static void become_train(const Child* child, const int out[2], const int err[2], char** words) {
    char threads[16], path[PATH_MAX];
    snprintf(threads, sizeof(threads), "%d", child->threads ? child->threads : 1);
    setenv("OMP_NUM_THREADS", threads, 1);
    setenv("OMP_WAIT_POLICY", "passive", 1);
    unsetenv("RANK");
    if (!child->gpu) setenv("CUDA_VISIBLE_DEVICES", "", 1);
    dup2(out[1], 1), dup2(err[1], 2);
    close(out[0]), close(err[0]);
    ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 8);
    path[length > 0 ? length : 0] = 0;
    strcat(dirname(path), "/train");
    if (child->folder && chdir(child->folder) != 0) _exit(127);
    if (child->file_limit >= 0) {
        struct rlimit limit = {(rlim_t)child->file_limit, (rlim_t)child->file_limit};
        setrlimit(RLIMIT_FSIZE, &limit);
    }
    words[0] = path;
    execv(path, words);
    fprintf(stderr, "%s: %s\n", path, strerror(errno));
    _exit(127);
}

// Starts ./train with the words of the formatted text, which spaces separate ('_' in a word stays as it is).
__attribute__((format(printf, 2, 3))) static void start(Child* child, const char* format, ...) {
    static char text[16384];
    char* words[128] = {nullptr};
    int count = 1, out[2], err[2];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    for (char* word = strtok(text, " "); word && count < 127; word = strtok(nullptr, " ")) words[count++] = word;
    for (int i = 0; i < 2; i++) child->text[i] = (char*)calloc(1, 1), child->bytes[i] = 0;
    if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) abort();
    child->started = now();
    fflush(stdout);
    child->pid = fork();
    if (child->pid == 0) become_train(child, out, err, words);
    close(out[1]), close(err[1]);
    child->pipe[0] = out[0], child->pipe[1] = err[0];
}

// Reads what the child has written, waiting for at most `ms`; false once both streams have ended.
static bool pump(Child* child, int ms) {
    char piece[4096];
    struct pollfd watched[2] = {{child->pipe[0], POLLIN, 0}, {child->pipe[1], POLLIN, 0}};
    if (child->pipe[0] < 0 && child->pipe[1] < 0) return false;
    poll(watched, 2, ms);
    for (int i = 0; i < 2; i++) {
        if (child->pipe[i] < 0 || !watched[i].revents) continue;
        ssize_t got = read(child->pipe[i], piece, sizeof(piece));
        if (got <= 0) {
            close(child->pipe[i]);
            child->pipe[i] = -1;
            continue;
        }
        child->text[i] = (char*)realloc(child->text[i], child->bytes[i] + got + 1);
        memcpy(child->text[i] + child->bytes[i], piece, got);
        child->bytes[i] += got;
        child->text[i][child->bytes[i]] = 0;
    }
    return true;
}

// Waits for the end; a child that takes longer than CHILD_SECONDS is killed and has code -1.
static void finish(Child* child) {
    bool late = false;
    int status = 0;
    while (pump(child, 100)) {
        if (late || now() - child->started < CHILD_SECONDS) continue;
        late = true;
        kill(child->pid, SIGKILL);
    }
    waitpid(child->pid, &status, 0);
    child->code = late ? -1 : WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void forget(Child* child) {
    free(child->text[0]), free(child->text[1]);
}

static Child new_child() {
    Child child = {};
    child.file_limit = -1;
    return child;
}

#define OUT(child) ((child).text[0])
#define ERR(child) ((child).text[1])

// Runs to the end and expects this exit code; prints stderr otherwise.
#define expect_code(child, want) \
    expect((child).code == (want), "exit code %d, want %d; stderr: %s", (child).code, want, ERR(child))

// Runs ./train to the end; the caller forgets the child.
#define run_train(child, ...)   \
    Child child = new_child();  \
    start(&child, __VA_ARGS__); \
    finish(&child)

// Runs ./train to the end, expecting success.
#define train_well(...)                \
    do {                               \
        run_train(child, __VA_ARGS__); \
        expect_code(child, 0);         \
        forget(&child);                \
    } while (0)

// A folder for one test, holding text.txt: sentences of a few words.

static int remove_one(const char* path, const struct stat*, int, struct FTW*) {
    return remove(path);
}

static void remove_tree(const char* folder) {
    nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static void write_bytes(const char* folder, const char* name, const void* bytes, size_t count) {
    char path[2 * PATH_MAX];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE* file = fopen(path, "wb");
    if (!file || fwrite(bytes, 1, count, file) != count) abort();
    fclose(file);
}

static void write_words(const char* folder, const char* name, int sentences) {
    static const char* const words[] = {"the", "fox", "sees", "a", "dog", "and", "the", "quick", "bird", "sleeps"};
    char* text = nullptr;
    size_t length = 0;
    FILE* memory = open_memstream(&text, &length);
    for (int i = 0; i < 8 * sentences; i++) {
        fprintf(memory, "%s%s", words[(int)((1 + test_uniform(17, i)) * 5)], i % 8 == 7 ? ".\n" : " ");
    }
    fclose(memory);
    write_bytes(folder, name, text, length);
    free(text);
}

static const char* work_folder() {
    static char path[PATH_MAX];
    const char* base = getenv("TMPDIR");
    snprintf(path, sizeof(path), "%s/nibble_cli_XXXXXX", base && *base ? base : "/tmp");
    if (!mkdtemp(path)) abort();
    write_words(path, "text.txt", 500);
    return path;
}

// llm.c's shard of `tokens` tokens that repeat with a period of 7, the last one being `last`.
static void write_shard(const char* folder, const char* name, int magic, int version, int claimed, int tokens,
                        int last) {
    int32_t header[256] = {magic, version, claimed};
    char* bytes = (char*)malloc(1024 + 2 * (size_t)tokens);
    memcpy(bytes, header, 1024);
    for (int i = 0; i < tokens; i++) {
        uint16_t token = (uint16_t)(i == tokens - 1 ? last : 40 * (i % 7) + 3);
        memcpy(bytes + 1024 + 2 * i, &token, 2);
    }
    write_bytes(folder, name, bytes, 1024 + 2 * (size_t)tokens);
    free(bytes);
}

static bool exists(const char* folder, const char* name) {
    char path[2 * PATH_MAX];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    return access(path, F_OK) == 0;
}

static char* contents(const char* folder, const char* name, int64_t* bytes) {
    char path[2 * PATH_MAX], error[DATA_ERROR_BYTES];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    return file_read(path, bytes, error);
}

#define SHAPE "--layers 1 --channels 64 --heads 1 --seq 32"
#define QUICK "--batch 2 --val-every 0 --sample-every 0 --print-every 1000000"

static void expect_equal_files(Test* test, const char* a, const char* b, const char* name) {
    int64_t a_bytes = 0, b_bytes = 0;
    char *a_text = contents(a, name, &a_bytes), *b_text = contents(b, name, &b_bytes);
    expect(a_text && b_text, "%s/%s or %s/%s is not there", a, name, b, name);
    if (a_text && b_text) {
        expect(a_bytes == b_bytes && memcmp(a_text, b_text, a_bytes) == 0, "%s/%s and %s/%s differ", a, name, b, name);
    }
    free(a_text), free(b_text);
}

// The training loss of every step as the log spells it; of a step done twice the last. Every line must be JSON.
constexpr int MOST_STEPS = 4000;
struct Losses {
    char text[MOST_STEPS][32];
    int last;   // largest step
    int lines;  // of training
};

static void read_losses(Test* test, const char* run, Losses* losses) {
    char error[DATA_ERROR_BYTES];
    int64_t bytes = 0;
    memset(losses, 0, sizeof(*losses));
    char* log = contents(run, "log.jsonl", &bytes);
    expect(log && bytes > 0 && log[bytes - 1] == '\n', "%s/log.jsonl ends in half a line", run);
    for (char* line = log; line && *line;) {
        char* end = strchr(line, '\n');
        if (!end) break;
        Json* json = json_parse(line, end - line, "log.jsonl", error);
        expect(json, "%s", error);
        const Json* loss = json_get(json, "loss");
        int64_t step = json_int(json, "step", -1);
        if (loss && strcmp(json_string(json, "type", ""), "train") == 0 && step >= 0 && step < MOST_STEPS) {
            snprintf(losses->text[step], sizeof(losses->text[step]), "%s", loss->text ? loss->text : "null");
            if (step > losses->last) losses->last = (int)step;
            losses->lines++;
        }
        json_free(json);
        line = end + 1;
    }
    free(log);
}

// Both runs did the same steps with the same losses to the last bit, and ended in the same weights and states.
static void expect_equal_runs(Test* test, const char* a, const char* b, int steps) {
    static Losses of_a, of_b;
    char folder_a[PATH_MAX], folder_b[PATH_MAX];
    read_losses(test, a, &of_a), read_losses(test, b, &of_b);
    expect(of_a.last == steps && of_b.last == steps, "%d and %d steps, want %d", of_a.last, of_b.last, steps);
    for (int step = 1; step <= steps; step++) {
        if (strcmp(of_a.text[step], of_b.text[step]) == 0) continue;
        expect(false, "loss of step %d: %s and %s", step, of_a.text[step], of_b.text[step]);
        break;
    }
    checkpoint_name(a, steps, folder_a, sizeof(folder_a)), checkpoint_name(b, steps, folder_b, sizeof(folder_b));
    expect_equal_files(test, folder_a, folder_b, "model.safetensors");
    expect_equal_files(test, folder_a, folder_b, "optimizer.safetensors");
}

// Waits until the run's log has a training line of this step or later. False when the child ended before.
static bool wait_for_step(Child* child, const char* run, int step) {
    char want[32];
    snprintf(want, sizeof(want), "\"step\": %d,", step);
    while (now() - child->started < CHILD_SECONDS) {
        int64_t bytes;
        char* log = contents(run, "log.jsonl", &bytes);
        bool there = log && strstr(log, want);
        free(log);
        if (there) return true;
        if (!pump(child, 1)) return false;
    }
    return false;
}

static int checkpoints(const char* run, int64_t* newest) {
    int64_t* steps;
    int count = checkpoint_list(run, &steps);
    *newest = count > 0 ? steps[0] : -1;
    free(steps);
    return count;
}

// The default flow.

static void check_run_folder(Test* test, const char* run, const char* out) {
    char error[DATA_ERROR_BYTES], checkpoint[PATH_MAX];
    int64_t bytes;
    char* text = contents(run, "config.json", &bytes);
    Json* config = text ? json_parse(text, bytes, "config.json", error) : nullptr;
    expect(config && strcmp(json_string(config, "layers", ""), "1") == 0, "config.json");
    json_free(config);
    free(text);
    text = contents(run, "log.txt", &bytes);
    expect(text && strcmp(text, out) == 0, "log.txt is not what the terminal showed");
    free(text);
    checkpoint_name(run, 60, checkpoint, sizeof(checkpoint));
    for (const char* name : {"model.safetensors", "optimizer.safetensors", "config.json", "state.json"}) {
        expect(exists(checkpoint, name), "%s/%s is not there", checkpoint, name);
    }
    Json* state = checkpoint_verify(checkpoint, error);
    expect(state, "%s", error);
    json_free(state);
}

TEST(cli_run) {
    static Losses losses;
    const char* work = work_folder();
    char run[PATH_MAX];
    snprintf(run, sizeof(run), "%s/deep/run", work);
    run_train(child, SHAPE " --data %s/text.txt --run %s --batch 4 --steps 60 --sample-tokens 20 --prompt=fox", work,
              run);
    expect_code(child, 0);
    expect(child.bytes[1] == 0, "stderr: %s", ERR(child));
    for (const char* words : {"\n val ", "\nval ", "bits per byte", "\nsample ---", "\nfox", "\nsave ", "\nstep ",
                              "eta", "memory ", "--sample \"...\" --model"}) {
        expect(words[1] == ' ' || strstr(OUT(child), words), "the output has no '%s'", words + (words[0] == '\n'));
    }
    check_run_folder(test, run, OUT(child));
    read_losses(test, run, &losses);
    expect(losses.lines == 60, "%d training lines", losses.lines);
    double first = atof(losses.text[1]), last = atof(losses.text[60]);
    expect(first > 5.4 && first < 5.7 && last < first - 1.5, "the loss goes from %g to %g", first, last);
    snprintf(test->note, sizeof(test->note), "loss %.3f to %.3f", first, last);
    forget(&child);
    remove_tree(work);
}

TEST(cli_builtin_text) {
    const char* work = work_folder();
    run_train(child, "%s %s --run %s/run --steps 2", SHAPE, QUICK, work);
    expect_code(child, 0);
    expect(strstr(OUT(child), "built-in text"), "the data is not named");
    forget(&child);
    remove_tree(work);
}

// With no --run, the folder is runs/DATE_TIME_MODEL where the command was typed.
TEST(cli_default_folder) {
    const char* work = work_folder();
    Child child = new_child();
    child.folder = work;
    start(&child, "%s %s --data text.txt --steps 1", SHAPE, QUICK);
    finish(&child);
    expect_code(child, 0);
    const char* name = strstr(OUT(child), "runs/2");
    char run[PATH_MAX] = "";
    expect(name && sscanf(name, "%255s", run) == 1 && exists(work, run), "'%s' is not there", run);
    forget(&child);
    remove_tree(work);
}

TEST(cli_nothing_but_talk) {
    const char* work = work_folder();
    run_train(plan, "%s --data %s/text.txt --run %s/run --steps 3 --dry-run", SHAPE, work, work);
    expect_code(plan, 0);
    expect(strstr(OUT(plan), "memory "), "--dry-run prints no plan");
    expect(!exists(work, "run"), "--dry-run leaves a folder");
    train_well("%s %s --data %s/text.txt --run %s/run --steps 1", SHAPE, QUICK, work, work);
    char error[DATA_ERROR_BYTES], folder[PATH_MAX];
    snprintf(folder, sizeof(folder), "%s/run", work);
    int64_t bytes;
    char* text = contents(folder, "config.json", &bytes);
    Json* config = json_parse(text, bytes, "config.json", error);
    run_train(help, "--help");
    expect_code(help, 0);
    int named = 0;
    for (const Json* option = config ? config->child : nullptr; option; option = option->next, named++) {
        char name[80];
        snprintf(name, sizeof(name), "  --%s ", option->key);
        expect(strstr(OUT(help), name), "--help does not list %s", name);
    }
    expect(named > 40, "config.json holds %d options", named);
    for (const char* flag : {"--dry-run", "--list-formats", "--list-presets", "--help"}) {
        expect(strstr(OUT(help), flag), "--help does not list %s", flag);
    }
    run_train(formats, "--list-formats");
    run_train(presets, "--list-presets");
    expect(formats.code == 0 && strstr(OUT(formats), "bf16:sr"), "--list-formats");
    expect(presets.code == 0 && strstr(OUT(presets), "adamw32"), "--list-presets");
    json_free(config);
    free(text);
    forget(&plan), forget(&help), forget(&formats), forget(&presets);
    remove_tree(work);
}

// Bad input. '@' in the arguments stands for the test's folder, which make_bad_files fills.

enum Before { NOTHING, DATA_AND_RUN, ALL };  // what precedes the arguments
struct Bad {
    Before before;
    const char* arguments;
    const char* needle;   // must be in the message: the option or file, and what was found
    const char* needle2;  // what to type
};

static const Bad BAD_OPTIONS[] = {
    {ALL, "--bach 4", "--bach", "--batch"},
    {ALL, "--lerning-rate=1", "--lerning-rate", "--"},
    {ALL, "--Steps 4", "--Steps", "--steps"},
    {ALL, "batch 4", "'batch'", "--help"},
    {ALL, "-b 4", "-b", "--"},
    {ALL, "--batch abc", "--batch", "abc"},
    {ALL, "--batch=", "--batch", "whole number"},
    {ALL, "--steps 1.5", "--steps", "1.5"},
    {ALL, "--steps 12x", "--steps", "12x"},
    {ALL, "--lr abc", "--lr", "abc"},
    {ALL, "--lr nan", "--lr", "nan"},
    {ALL, "--lr inf", "--lr", "inf"},
    {ALL, "--seed 99999999999999999999", "--seed", "range"},
    {ALL, "--batch 0", "--batch 0", "range"},
    {ALL, "--batch -3", "--batch -3", "range"},
    {ALL, "--lr -1", "--lr -1", "range"},
    {ALL, "--beta1 1", "--beta1 1", "range"},
    {ALL, "--val-fraction 0.9", "--val-fraction 0.9", "range"},
    {ALL, "--steps", "--steps", "needs a value"},
    {ALL, "--dry-run=yes", "--dry-run", "no value"},
    {ALL, "--schedule cosin", "--schedule", "cosine"},
    {ALL, "--on-nonfinite ignore", "--on-nonfinite", "skip|stop"},
    {ALL, "--device tpu", "--device", "auto|gpu|cpu"},
    {ALL, "--device gpu", "--device gpu", "--device cpu"},
    {ALL, "--matmul bf16", "--matmul bf16", "fp32"},
    {ALL, "--preset adamw33", "adamw33", "adamw32"},
    {ALL, "--rule adamv", "--rule", "adamw"},
    {ALL, "--weights bf16:st", "--weights", "bf16:sr"},
    {ALL, "--m fp33", "--m", "fp32"},
    {ALL, "--v fp33", "--v", "fp32"},
    {ALL, "--grads fp33", "--grads", "fp32"},
    {ALL, "--grads bf16", "--grads bf16", "--grads fp32"},
    {ALL, "--warmup 9 --steps 4", "--warmup 9", "--warmup 4"},
    {ALL, "--tokens-per-step 100", "--tokens-per-step 100", "--tokens-per-step 96"},
    {ALL, "--tokens-per-step 192 --batch 4", "--tokens-per-step 192", "--batch 3"},
    {ALL, "--channels 256 --heads 1", "256", "--heads 4"},
    {ALL, "--channels 100 --heads 1", "100", "--channels 128"},
    {ALL, "--channels 192 --heads 5", "192", "--heads 3"},
    {ALL, "--layers 256 --channels 12288 --heads 192 --seq 4096 --batch 4", "--batch", "smaller --model"},
    {DATA_AND_RUN, "--model gpt3", "gpt3", "gpt2"},
    {NOTHING, "--sample hello", "--sample", "--model"},
    {NOTHING, "--sample hello --model @/nowhere", "--model", "--sample"},
};

static const Bad BAD_DATA[] = {
    {ALL, "--data @/missing.txt", "--data", "missing.txt"},
    {ALL, "--data @/empty.txt", "--data", "empty"},
    {ALL, "--data @/short.txt", "--data", "short.txt"},
    {ALL, "--data /dev/null", "--data", "/dev/null"},
    {ALL, "--data @/nothing_*.bin", "--data", "nothing_*.bin"},
    {ALL, "--data @/folder", "--data", "prepare.py"},
    {ALL, "--data @/magic.bin", "magic.bin", "20240520"},
    {ALL, "--data @/version.bin", "version.bin", "version"},
    {ALL, "--data @/truncated.bin", "truncated.bin", "truncated"},
    {ALL, "--data @/header.bin", "header.bin", "truncated"},
    {ALL, "--data @/empty.bin", "empty.bin", "empty"},
    {ALL, "--data @/few.bin", "few.bin", "tokens"},
    {ALL, "--data @/s/few_*.bin", "few_1.bin", "tokens"},
    {ALL, "--data @/token.bin --val @/good.bin", "token.bin", "token 300"},
    {ALL, "--data @/good.bin --val @/missing.bin", "--val", "missing.bin"},
    {ALL, "--data @/good.bin --val @/short.txt", "--val", "short.txt"},
};

static const Bad BAD_FOLDERS[] = {
    {ALL, "--run @/text.txt/run", "--run", "text.txt"},
    {ALL, "--run @/text.txt", "--run", "text.txt"},
    {ALL, "--run @/used", "--run", "--resume @/used"},
    {ALL, "--resume @/nowhere", "--resume", "nowhere"},
    {ALL, "--resume @/folder", "--resume", "folder"},
    {NOTHING, "--resume auto", "--resume auto", "--run"},
    {DATA_AND_RUN, "--model @/llama", "--model", "llama"},
    {DATA_AND_RUN, "--model @/relu", "--model", "relu"},
    {DATA_AND_RUN, "--model @/folder", "--model", "config.json"},
    {DATA_AND_RUN, "--model @/broken", "--model", "JSON"},
    {DATA_AND_RUN, "--model @/no_weights", "no_weights/model.safetensors", ""},
    {DATA_AND_RUN, "--model @/missing", "missing/model.safetensors", "h.1."},
    {DATA_AND_RUN, "--model @/truncated", "truncated/model.safetensors", ""},
    {DATA_AND_RUN, "--model @/other_shape", "other_shape/model.safetensors", "shape"},
    {DATA_AND_RUN, "--model @/used/step_00000001 --seq 64", "--seq 64", "--seq 32"},
    {DATA_AND_RUN, "--model @/used/step_00000001 --layers 2", "--model", "--layers"},
    {DATA_AND_RUN, "--model @/used/step_00000001 --data @/good.bin --seq 32", "vocabulary", "--model"},
    {NOTHING, "--sample a --model @/truncated", "truncated/model.safetensors", ""},
    {NOTHING, "--sample a --model @/llama", "--model", "llama"},
};

static void write_text(const char* folder, const char* name, const char* text) {
    write_bytes(folder, name, text, strlen(text));
}

static void make_bad_data(const char* work) {
    char folder[PATH_MAX];
    write_text(work, "empty.txt", "");
    write_text(work, "short.txt", "too short");
    write_text(work, "empty.bin", "");
    write_text(work, "meta.json", "{\"vocabulary\": 300}");
    write_shard(work, "good.bin", 20240520, 1, 500, 500, 299);
    write_shard(work, "magic.bin", 20240521, 1, 500, 500, 1);
    write_shard(work, "version.bin", 20240520, 2, 500, 500, 1);
    write_shard(work, "truncated.bin", 20240520, 1, 500, 499, 1);
    write_shard(work, "few.bin", 20240520, 1, 20, 20, 1);
    write_shard(work, "token.bin", 20240520, 1, 65, 65, 300);
    int32_t header[2] = {20240520, 1};
    write_bytes(work, "header.bin", header, sizeof(header));
    snprintf(folder, sizeof(folder), "%s/folder", work);
    mkdir(folder, 0755);
    snprintf(folder, sizeof(folder), "%s/s", work);
    mkdir(folder, 0755);
    write_shard(folder, "few_0.bin", 20240520, 1, 500, 500, 1);
    write_shard(folder, "few_1.bin", 20240520, 1, 20, 20, 1);
    write_shard(folder, "few_2.bin", 20240520, 1, 500, 500, 1);
}

// A copy of `from`, a checkpoint, with `find` in its config.json replaced, and the first `share` of its weights.
static void make_model(const char* work, const char* name, const char* from, const char* find, const char* replace,
                       double share) {
    char folder[PATH_MAX];
    int64_t bytes;
    snprintf(folder, sizeof(folder), "%s/%s", work, name);
    mkdir(folder, 0755);
    char *config = contents(from, "config.json", &bytes), *at = strstr(config, find), *changed = nullptr;
    if (!at || asprintf(&changed, "%.*s%s%s", (int)(at - config), config, replace, at + strlen(find)) < 0) abort();
    write_text(folder, "config.json", changed);
    char* weights = contents(from, "model.safetensors", &bytes);
    if (share > 0) write_bytes(folder, "model.safetensors", weights, (size_t)((double)bytes * share));
    free(config), free(changed), free(weights);
}

static void make_bad_models(Test* test, const char* work) {
    char from[PATH_MAX];
    train_well("%s %s --data %s/text.txt --run %s/used --steps 1", SHAPE, QUICK, work, work);
    snprintf(from, sizeof(from), "%s/used/step_00000001", work);
    make_model(work, "llama", from, "\"model_type\": \"gpt2\"", "\"model_type\": \"llama\"", 1);
    make_model(work, "relu", from, "gelu_new", "relu", 1);
    make_model(work, "broken", from, "\"n_layer\":", "n_layer:", 1);
    make_model(work, "no_weights", from, "gelu_new", "gelu_new", 0);
    make_model(work, "missing", from, "\"n_layer\": 1", "\"n_layer\": 2", 1);
    make_model(work, "truncated", from, "gelu_new", "gelu_new", 0.7);
    make_model(work, "other_shape", from, "\"n_positions\": 32", "\"n_positions\": 33", 1);
}

// text with '@' replaced by the folder.
static void fill(const char* text, const char* work, char* filled, size_t bytes) {
    size_t used = 0;
    for (; *text && used + 1 < bytes; text++) {
        if (*text == '@') used += (size_t)snprintf(filled + used, bytes - used, "%s", work);
        if (*text != '@') filled[used++] = *text;
    }
    filled[used] = 0;
}

// One sentence on stderr and exit code 2.
static void expect_error(Test* test, const Child* child, const char* what, const char* needle, const char* needle2) {
    const char* error = child->text[1];
    const char* end = strchr(error, '\n');
    expect(child->code == 2, "%s: exit code %d, want 2; stderr: %s", what, child->code, error);
    expect(strncmp(error, "train: error: ", 14) == 0 && end && end[1] == 0, "%s: not one sentence: %s", what, error);
    expect(strstr(error, needle) && strstr(error, needle2), "%s: neither '%s' nor '%s' may be missing in: %s", what,
           needle, needle2, error);
}

static void check_bad(Test* test, const char* work, const Bad* cases, int count) {
    char arguments[PATH_MAX], before[2 * PATH_MAX] = "", needle[PATH_MAX], needle2[PATH_MAX];
    for (int i = 0; i < count; i++) {
        const Bad* bad = &cases[i];
        fill(bad->arguments, work, arguments, sizeof(arguments));
        fill(bad->needle, work, needle, sizeof(needle));
        fill(bad->needle2, work, needle2, sizeof(needle2));
        snprintf(before, sizeof(before), "--batch 2 --steps 3 --val-every 0 --data %s/text.txt --run %s/run %s", work,
                 work, bad->before == ALL ? SHAPE : "");
        run_train(child, "%s %s", bad->before == NOTHING ? "" : before, arguments);
        expect_error(test, &child, bad->arguments, needle, needle2);
        // A wrong token is found when training comes to it; everything else before there is anything to leave behind.
        char run[PATH_MAX];
        snprintf(run, sizeof(run), "%s/run", work);
        bool late = strstr(bad->needle2, "token 300") != nullptr;
        expect(late || !exists(work, "run"), "%s: leaves a run folder", bad->arguments);
        remove_tree(run);
        forget(&child);
    }
    snprintf(test->note, sizeof(test->note), "%d cases", count);
}

TEST(cli_bad_options) {
    const char* work = work_folder();
    check_bad(test, work, BAD_OPTIONS, sizeof(BAD_OPTIONS) / sizeof(Bad));
    remove_tree(work);
}

TEST(cli_bad_data) {
    const char* work = work_folder();
    make_bad_data(work);
    check_bad(test, work, BAD_DATA, sizeof(BAD_DATA) / sizeof(Bad));
    remove_tree(work);
}

TEST(cli_bad_folders) {
    const char* work = work_folder();
    make_bad_data(work);
    make_bad_models(test, work);
    check_bad(test, work, BAD_FOLDERS, sizeof(BAD_FOLDERS) / sizeof(Bad));
    remove_tree(work);
}

// A disk that takes no more than so many bytes a file: 0 (nothing at all), in the log, in the checkpoint.
TEST(cli_full_disk) {
    const char* work = work_folder();
    for (int64_t limit : {0, 1500, 3000, 100000}) {
        char run[PATH_MAX], what[64];
        snprintf(run, sizeof(run), "%s/full_%d", work, (int)limit);
        snprintf(what, sizeof(what), "files of at most %d bytes", (int)limit);
        Child child = new_child();
        child.file_limit = limit;
        start(&child, "%s %s --data %s/text.txt --run %s --steps 40 --save-every 0", SHAPE, QUICK, work, run);
        finish(&child);
        expect_error(test, &child, what, run, "");
        int64_t newest;
        expect(checkpoints(run, &newest) == 0, "%s: a checkpoint was made", what);
        expect(!exists(run, "step_00000040.tmp"), "%s: half a checkpoint is left", what);
        forget(&child);
        // With room again the run begins anew, and half a line of its log does not stay.
        static Losses losses;
        train_well("%s %s --data %s/text.txt --run %s --steps 40 --resume auto", SHAPE, QUICK, work, run);
        read_losses(test, run, &losses);
        expect(losses.last == 40, "%s: resumed to step %d", what, losses.last);
    }
    remove_tree(work);
}

// More than any GPU has: the largest batch that fits is named.
TEST(cli_too_little_memory_gpu) {
    if (getenv("NIBBLE_SANITIZE")) skip("a process of its own");
    const char* work = work_folder();
    Child child = new_child();
    child.gpu = true;
    start(&child, "--data %s/text.txt --run %s/run --model gpt2-xl --seq 1024 --batch 8192 --device gpu", work, work);
    finish(&child);
    expect_error(test, &child, "--batch 8192", "--batch 8192 needs", "type --batch ");
    expect(!exists(work, "run"), "a run folder is left");
    forget(&child);
    remove_tree(work);
}

// A run that diverges: weight decay times the learning rate is far beyond 1, so the weights grow a thousandfold a step.
TEST(cli_diverges) {
    const char* work = work_folder();
    run_train(child,
              "%s %s --data %s/text.txt --run %s/run --steps 60 --lr 1000 --weight-decay 10 --warmup 0 "
              "--save-every 2",
              SHAPE, QUICK, work, work);
    expect_error(test, &child, "--lr 1000", "step_0000", "--lr");
    expect(strncmp(ERR(child), "train: error: step ", 19) == 0, "no step: %s", ERR(child));
    char run[PATH_MAX], error[DATA_ERROR_BYTES];
    snprintf(run, sizeof(run), "%s/run", work);
    int64_t bytes, newest;
    char* log = contents(run, "log.jsonl", &bytes);
    expect(log && strstr(log, "\"nonfinite\": true"), "log.jsonl does not say nonfinite");
    expect(checkpoints(run, &newest) > 0, "no checkpoint");
    for (char *line = log, *end; line && (end = strchr(line, '\n')); line = end + 1) {
        Json* json = json_parse(line, end - line, "log.jsonl", error);
        expect(json, "%s", error);
        json_free(json);
    }
    free(log);
    forget(&child);
    remove_tree(work);
}

// The number after a key in the newest checkpoint's state.json, -1 without it.
static int64_t state_number(const char* run, const char* key) {
    char folder[PATH_MAX];
    Json* state = checkpoint_newest(run, folder, sizeof(folder));
    int64_t number = state ? json_int(state, key, -1) : -1;
    json_free(state);
    return number;
}

// The losses and counts of all training lines from one on: every step was skipped.
static void expect_skipped_steps(Test* test, const char* run, int steps) {
    static Losses losses;
    read_losses(test, run, &losses);
    expect(losses.lines == steps && losses.last == steps, "%d lines up to step %d", losses.lines, losses.last);
    for (int step = 1; step <= steps; step++) {
        char want[64];
        snprintf(want, sizeof(want), "\"skipped\": %d, \"nonfinite\": true", step);
        int64_t bytes;
        char* log = contents(run, "log.jsonl", &bytes);
        expect(strcmp(losses.text[step], "null") == 0, "step %d: loss %s", step, losses.text[step]);
        expect(log && strstr(log, want), "step %d: no %s", step, want);
        free(log);
    }
}

// A model with one infinite weight: every step has a loss of NaN. A few are skipped and change nothing, the count lives
// on in the checkpoint, and ten in a row are the end.
TEST(cli_nonfinite) {
    const char* work = work_folder();
    char from[PATH_MAX], bad[PATH_MAX], run[PATH_MAX], last[PATH_MAX];
    train_well("%s %s --data %s/text.txt --run %s/used --steps 1", SHAPE, QUICK, work, work);
    snprintf(from, sizeof(from), "%s/used/step_00000001", work);
    snprintf(bad, sizeof(bad), "%s/bad", work);
    snprintf(run, sizeof(run), "%s/run", work);
    make_model(work, "bad", from, "gelu_new", "gelu_new", 1);
    int64_t bytes;
    char* weights = contents(bad, "model.safetensors", &bytes);
    memcpy(weights + bytes - 2, "\x80\x7f", 2);  // bf16's infinity
    write_bytes(bad, "model.safetensors", weights, (size_t)bytes);
    free(weights);
    const char* common = QUICK " --device cpu --seq 32";
    run_train(skips, "%s --data %s/text.txt --model %s --run %s --steps 3", common, work, bad, run);
    expect_code(skips, 0);
    expect(strstr(OUT(skips), "skip      2  loss nan  norm nan"), "a skipped step is not told: %s", OUT(skips));
    expect(strstr(OUT(skips), "\nskipped  3 of 3 steps"), "the count is not told at the end");
    expect(state_number(run, "skipped") == 3, "state.json says %lld", (long long)state_number(run, "skipped"));
    expect_skipped_steps(test, run, 3);
    checkpoint_name(run, 3, last, sizeof(last));
    expect_equal_files(test, bad, last, "model.safetensors");
    run_train(more, "--resume %s --steps 8 --device cpu", run);
    expect_code(more, 0);
    expect(state_number(run, "skipped") == 8, "state.json says %lld", (long long)state_number(run, "skipped"));
    expect_skipped_steps(test, run, 8);
    run_train(end, "--resume %s --steps 30 --save-every 1 --device cpu", run);
    expect_error(test, &end, "ten in a row", "step 10: the loss is nan", "10 steps in a row were skipped");
    expect(strstr(ERR(end), "step_00000008") && strstr(ERR(end), "--lr"), "%s", ERR(end));
    expect_skipped_steps(test, run, 10);
    run_train(stop, "%s --data %s/text.txt --model %s --run %s/stop --on-nonfinite stop --steps 9", common, work, bad,
              work);
    expect_error(test, &stop, "--on-nonfinite stop", "step 1: the loss is nan", "--lr");
    forget(&skips), forget(&more), forget(&end), forget(&stop);
    remove_tree(work);
}

// Resume.

// One run to the end; the same in two halves with another number of steps; the same after its later checkpoints are
// gone, as after a crash.
static void check_resume(Test* test, const char* options, bool gpu) {
    const char* work = work_folder();
    char whole[PATH_MAX], halves[PATH_MAX];
    snprintf(whole, sizeof(whole), "%s/whole", work);
    snprintf(halves, sizeof(halves), "%s/halves", work);
    const char* device = gpu ? "gpu" : "cpu";
    const char* common = SHAPE " --batch 2 --tokens-per-step 128 --val-every 3 --val-tokens 128 --warmup 2 --keep 9";
    Child child[4];
    for (Child& c : child) c = new_child(), c.gpu = gpu;
    start(&child[0], "%s --data %s/text.txt --run %s --steps 12 --schedule constant --device %s %s", common, work,
          whole, device, options);
    finish(&child[0]);
    expect_code(child[0], 0);
    start(&child[1], "%s --data %s/text.txt --run %s --steps 6 --schedule constant --device %s %s", common, work,
          halves, device, options);
    finish(&child[1]);
    expect_code(child[1], 0);
    start(&child[2], "--run %s --resume auto --steps 12 --device %s", halves, device);
    finish(&child[2]);
    expect_code(child[2], 0);
    expect(strstr(OUT(child[2]), "--steps 12 (was 6)"), "the changed option is not listed");
    expect(strstr(OUT(child[2]), "step_00000006, step 6"), "the checkpoint is not named");
    expect(ERR(child[2])[0] == 0, "stderr: %s", ERR(child[2]));
    expect_equal_runs(test, whole, halves, 12);
    // A crash: back to step 6, by the run folder's name alone.
    char last[PATH_MAX];
    checkpoint_name(halves, 12, last, sizeof(last));
    remove_tree(last);
    start(&child[3], "--resume %s --steps 12 --device %s", halves, device);
    finish(&child[3]);
    expect_code(child[3], 0);
    expect_equal_runs(test, whole, halves, 12);
    for (Child& c : child) forget(&c);
    remove_tree(work);
}

TEST(cli_resume) {
    check_resume(test, "", false);
    check_resume(test, "--weights bf16:sr --m bf16:sr --v bf16:sr", false);
}

TEST(cli_resume_gpu) {
    if (getenv("NIBBLE_SANITIZE")) skip("processes of their own");
    check_resume(test, "", true);
    check_resume(test, "--weights bf16:sr --m bf16:sr --v bf16:sr", true);
    check_resume(test, "--matmul fp32 --weights fp32", true);
}

// With cosine, where every learning rate depends on the number of steps: a checkpoint in the middle, named itself.
TEST(cli_resume_checkpoint) {
    const char* work = work_folder();
    char whole[PATH_MAX], again[PATH_MAX];
    snprintf(whole, sizeof(whole), "%s/whole", work);
    snprintf(again, sizeof(again), "%s/again", work);
    train_well("%s %s --data %s/text.txt --run %s --steps 12 --save-every 5 --keep 9", SHAPE, QUICK, work, whole);
    char last[PATH_MAX];
    train_well("%s %s --data %s/text.txt --run %s --steps 12 --save-every 5 --keep 9", SHAPE, QUICK, work, again);
    for (int step : {10, 12}) {
        checkpoint_name(again, step, last, sizeof(last));
        remove_tree(last);
    }
    train_well("--resume %s/step_00000005/ --device cpu", again);
    expect_equal_runs(test, whole, again, 12);
    // A run that is over has nothing left to do.
    train_well("--resume %s --device cpu", again);
    remove_tree(work);
}

// Every preset: a checkpoint half-way, taken up in another folder, ends in the same bytes, and says nothing about it.
TEST(cli_resume_presets) {
    const char* work = work_folder();
    char whole[PATH_MAX], again[PATH_MAX], ends[2][PATH_MAX], name[32];
    int presets = 0, used = 0;
    run_train(list, "--list-presets");
    expect_code(list, 0);
    for (char* line = OUT(list); line && *line; line = strchr(line, '\n'), line = line ? line + 1 : nullptr) {
        if (sscanf(line, " %31s%n", name, &used) != 1 || name[0] == '-') continue;
        snprintf(whole, sizeof(whole), "%s/whole_%s", work, name);
        snprintf(again, sizeof(again), "%s/again_%s", work, name);
        train_well("%s %s --data %s/text.txt --run %s --steps 8 --save-every 4 --keep 9 --preset %s", SHAPE, QUICK,
                   work, whole, name);
        run_train(child, "--resume %s/step_00000004 --run %s --device cpu", whole, again);
        expect_code(child, 0);
        expect(!strstr(OUT(child), " notice "), "%s: %s", name, OUT(child));
        checkpoint_name(whole, 8, ends[0], sizeof(ends[0])), checkpoint_name(again, 8, ends[1], sizeof(ends[1]));
        expect_equal_files(test, ends[0], ends[1], "model.safetensors");
        expect_equal_files(test, ends[0], ends[1], "optimizer.safetensors");
        forget(&child), presets++;
    }
    expect(presets >= 10, "--list-presets lists %d", presets);
    snprintf(test->note, sizeof(test->note), "%d presets", presets);
    forget(&list);
    remove_tree(work);
}

// adamw32's checkpoint goes on as adamw8: said once for every storage, no harm to the loss, and from there on a run of
// the new formats.
TEST(cli_resume_converts) {
    static Losses before, after;
    const char* work = work_folder();
    char wide[PATH_MAX], narrow[PATH_MAX], again[PATH_MAX], ends[2][PATH_MAX];
    snprintf(wide, sizeof(wide), "%s/wide", work);
    snprintf(narrow, sizeof(narrow), "%s/narrow", work);
    snprintf(again, sizeof(again), "%s/again", work);
    train_well("%s %s --batch 8 --data %s/text.txt --run %s --steps 40 --lr 0.003 --schedule constant", SHAPE, QUICK,
               work, wide);
    run_train(child, "--resume %s --run %s --preset adamw8 --steps 80 --save-every 60 --keep 9 --device cpu", wide,
              narrow);
    expect_code(child, 0);
    for (const char* line : {" notice   weights: bf16+fp32 in the checkpoint, converted to bf16:sr (to nearest)",
                             " notice   m: fp32 in the checkpoint, converted to dyn8/256 (to nearest); not bit-exact\n",
                             " notice   v: fp32 in the checkpoint, converted to udyn8/256 (to nearest)"}) {
        expect(strstr(OUT(child), line), "no '%s' in: %s", line, OUT(child));
    }
    read_losses(test, wide, &before), read_losses(test, narrow, &after);
    double old = atof(before.text[40]), first = atof(after.text[41]), last = atof(after.text[80]);
    expect(after.lines == 40 && first < old + 0.3 && last < first, "the loss goes %g, %g, %g", old, first, last);
    run_train(exact, "--resume %s/step_00000060 --run %s --device cpu", narrow, again);
    expect_code(exact, 0);
    expect(!strstr(OUT(exact), " notice "), "%s", OUT(exact));
    checkpoint_name(narrow, 80, ends[0], sizeof(ends[0])), checkpoint_name(again, 80, ends[1], sizeof(ends[1]));
    expect_equal_files(test, ends[0], ends[1], "model.safetensors");
    expect_equal_files(test, ends[0], ends[1], "optimizer.safetensors");
    snprintf(test->note, sizeof(test->note), "loss %.3f, then %.3f to %.3f", old, first, last);
    forget(&child), forget(&exact);
    remove_tree(work);
}

// Other rules: without v, with a slow average, and one that cannot go on.
TEST(cli_resume_rules) {
    const char* work = work_folder();
    char run[PATH_MAX];
    snprintf(run, sizeof(run), "%s/run", work);
    train_well("%s %s --data %s/text.txt --run %s --steps 4 --override ln*:m=bf16", SHAPE, QUICK, work, run);
    const char* const cases[][2] = {
        {"--rule lion", " notice   v: left behind; lion keeps none\n"},
        {"--rule ademamix", " notice   slow: not in the checkpoint, whose rule is adamw; it starts at zero\n"},
        {"--override *.bias:m=dyn8", " notice   m: bf16 in the checkpoint in 3 tensors, converted to fp32"},
        {"--weights fp32 --m dyn8", " notice   weights: bf16+fp32 in the checkpoint, converted to fp32"}};
    for (const auto& row : cases) {
        char other[PATH_MAX];
        snprintf(other, sizeof(other), "%s/other", work);
        run_train(child, "--resume %s --run %s --steps 8 --device cpu %s", run, other, row[0]);
        expect_code(child, 0);
        expect(strstr(OUT(child), row[1]), "%s: no '%s' in: %s", row[0], row[1], OUT(child));
        forget(&child);
        remove_tree(other);
    }
    train_well("%s %s --data %s/text.txt --run %s/lion --steps 4 --preset lion8", SHAPE, QUICK, work, work);
    run_train(child, "--resume %s/lion --run %s/other --steps 8 --preset adamw8 --device cpu", work, work);
    expect_error(test, &child, "lion to adamw", "lion keeps no second moment", "--model");
    expect(!exists(work, "other"), "a run folder is left");
    forget(&child);
    remove_tree(work);
}

#define LONG SHAPE " " QUICK " --steps 1500 --keep 1000 --data %s/text.txt"

// The folder of an uninterrupted run of LONG.
static void long_run(Test* test, const char* work, char (&run)[PATH_MAX], const char* options) {
    snprintf(run, sizeof(run), "%s/whole", work);
    train_well(LONG " --run %s %s", work, run, options);
}

TEST(cli_signals) {
    const char* work = work_folder();
    char whole[PATH_MAX], run[PATH_MAX];
    long_run(test, work, whole, "--save-every 0");
    for (int number : {SIGTERM, SIGINT}) {
        int64_t stopped_at;
        snprintf(run, sizeof(run), "%s/signal_%d", work, number);
        Child child = new_child();
        start(&child, LONG " --run %s --save-every 0", work, run);
        expect(wait_for_step(&child, run, 40), "the run ended before the signal");
        kill(child.pid, number);
        finish(&child);
        expect_code(child, 0);
        expect(checkpoints(run, &stopped_at) == 1 && stopped_at >= 40 && stopped_at < 1500,
               "signal %d: checkpoint of step %lld", number, (long long)stopped_at);
        expect(strstr(OUT(child), "stopped"), "signal %d: the end is not told", number);
        train_well("--run %s --resume auto --device cpu", run);
        expect_equal_runs(test, whole, run, 1500);
        forget(&child);
    }
    // SIGUSR1, and a file called save in the run folder: both save and go on.
    snprintf(run, sizeof(run), "%s/saves", work);
    Child child = new_child();
    start(&child, LONG " --run %s --save-every 0", work, run);
    expect(wait_for_step(&child, run, 40), "the run ended before the signal");
    kill(child.pid, SIGUSR1);
    expect(wait_for_step(&child, run, 300), "the run ended at the signal");
    write_text(run, "save", "");
    finish(&child);
    expect_code(child, 0);
    int64_t newest;
    expect(checkpoints(run, &newest) == 3 && newest == 1500, "%d checkpoints, newest %lld", checkpoints(run, &newest),
           (long long)newest);
    expect(!exists(run, "save"), "the request is still there");
    expect_equal_runs(test, whole, run, 1500);
    forget(&child);
    remove_tree(work);
}

// kill -9 at moments that differ from one test run to the next; NIBBLE_TEST_SEED repeats one.
TEST(cli_kill) {
    const char* work = work_folder();
    const char* given = getenv("NIBBLE_TEST_SEED");
    uint64_t seed = given ? strtoull(given, nullptr, 10) : (uint64_t)time(nullptr);
    char whole[PATH_MAX], run[PATH_MAX];
    long_run(test, work, whole, "--save-every 50");
    snprintf(run, sizeof(run), "%s/killed", work);
    int killed = 0;
    bool done = false;
    for (int i = 0; i < 30 && !done; i++) {
        Child child = new_child();
        start(&child, LONG " --run %s --save-every 50 --resume auto", work, run);
        pause_ms(50 + 150 * (1 + test_uniform(seed, i)));
        kill(child.pid, SIGKILL);
        finish(&child);
        expect(child.code == 128 + SIGKILL || child.code == 0, "exit code %d: %s", child.code, ERR(child));
        expect(!strstr(ERR(child), "damaged"), "%s", ERR(child));
        killed += child.code == 128 + SIGKILL;
        done = child.code == 0;
        forget(&child);
    }
    train_well(LONG " --run %s --save-every 50 --resume auto", work, run);
    expect_equal_runs(test, whole, run, 1500);
    snprintf(test->note, sizeof(test->note), "NIBBLE_TEST_SEED=%llu, killed %d times", (unsigned long long)seed,
             killed);
    remove_tree(work);
}

// Damage.

enum Damage { TRUNCATE, FLIP, REMOVE };

static void damage(const char* folder, const char* name, Damage how) {
    char path[2 * PATH_MAX];
    int64_t bytes = 0;
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    char* text = contents(folder, name, &bytes);
    if (!text) abort();
    if (how == FLIP) text[bytes / 2] ^= 4;
    write_bytes(folder, name, text, (size_t)(how == TRUNCATE ? bytes / 2 : bytes));
    if (how == REMOVE) unlink(path);
    free(text);
}

TEST(cli_damaged_checkpoint) {
    static const struct {
        const char* name;
        Damage how;
    } damages[] = {{"model.safetensors", TRUNCATE},   {"model.safetensors", FLIP}, {"optimizer.safetensors", FLIP},
                   {"optimizer.safetensors", REMOVE}, {"config.json", FLIP},       {"state.json", FLIP},
                   {"state.json", TRUNCATE},          {"state.json", REMOVE}};
    const char* work = work_folder();
    char whole[PATH_MAX], run[PATH_MAX], newest[PATH_MAX], temporary[PATH_MAX + 8];
    snprintf(whole, sizeof(whole), "%s/whole", work);
    snprintf(run, sizeof(run), "%s/run", work);
    const char* common = SHAPE " " QUICK " --steps 12 --save-every 4 --keep 9";
    train_well("%s --data %s/text.txt --run %s", common, work, whole);
    train_well("%s --data %s/text.txt --run %s", common, work, run);
    checkpoint_name(run, 12, newest, sizeof(newest));
    for (const auto& d : damages) {
        damage(newest, d.name, d.how);
        run_train(refused, "--resume %s --device cpu", newest);
        if (strcmp(d.name, "state.json") != 0 || d.how != REMOVE) expect_error(test, &refused, d.name, newest, "");
        run_train(child, "--run %s --resume auto --device cpu", run);
        expect_code(child, 0);
        expect(strncmp(ERR(child), "train: notice: ", 15) == 0 && strstr(ERR(child), newest), "%s is not named: %s",
               d.name, ERR(child));
        expect(strstr(OUT(child), "step_00000008, step 8"), "the checkpoint before is not used");
        expect_equal_runs(test, whole, run, 12);
        forget(&child), forget(&refused);
    }
    // Half written: the folder still has its temporary name.
    snprintf(temporary, sizeof(temporary), "%s.tmp", newest);
    damage(newest, "model.safetensors", TRUNCATE);
    if (rename(newest, temporary) != 0) abort();
    train_well("--run %s --resume auto --device cpu", run);
    expect(access(temporary, F_OK) != 0, "half a checkpoint is still there");
    expect_equal_runs(test, whole, run, 12);
    for (int step : {4, 8, 12}) {
        checkpoint_name(run, step, newest, sizeof(newest));
        damage(newest, "model.safetensors", FLIP);
    }
    run_train(child, "--resume %s --device cpu", run);
    expect(child.code == 2 && strstr(ERR(child), "no whole checkpoint"), "exit code %d: %s", child.code, ERR(child));
    forget(&child);
    remove_tree(work);
}

TEST(cli_keep) {
    const char* work = work_folder();
    char run[PATH_MAX];
    int64_t newest;
    for (int keep : {1, 3}) {
        snprintf(run, sizeof(run), "%s/keep_%d", work, keep);
        train_well("%s %s --data %s/text.txt --run %s --steps 11 --save-every 2 --keep %d", SHAPE, QUICK, work, run,
                   keep);
        expect(checkpoints(run, &newest) == keep && newest == 11, "--keep %d keeps %d, newest %lld", keep,
               checkpoints(run, &newest), (long long)newest);
    }
    remove_tree(work);
}

// The same command twice, and with other numbers of threads: the same bits.
TEST(cli_same_bits) {
    const char* work = work_folder();
    char run[3][PATH_MAX];
    for (int i = 0; i < 3; i++) {
        snprintf(run[i], sizeof(run[i]), "%s/run_%d", work, i);
        Child child = new_child();
        child.threads = i == 2 ? 3 : 1;
        start(&child, "%s %s --data %s/text.txt --run %s --steps 20 --layers 2 --channels 128 --heads 2", SHAPE, QUICK,
              work, run[i]);
        finish(&child);
        expect_code(child, 0);
        forget(&child);
    }
    expect_equal_runs(test, run[0], run[1], 20);
    expect_equal_runs(test, run[0], run[2], 20);
    run_train(other, "%s %s --data %s/text.txt --run %s/other --steps 2 --seed 2", SHAPE, QUICK, work, work);
    static Losses first, second;
    char folder[PATH_MAX];
    snprintf(folder, sizeof(folder), "%s/other", work);
    read_losses(test, run[0], &first), read_losses(test, folder, &second);
    expect(strcmp(first.text[1], second.text[1]) != 0, "--seed changes nothing");
    forget(&other);
    remove_tree(work);
}

TEST(cli_shards) {
    static Losses losses;
    const char* work = work_folder();
    char run[PATH_MAX];
    write_text(work, "meta.json", "{\"vocabulary\": 300}");
    write_shard(work, "train_000000.bin", 20240520, 1, 3000, 3000, 299);
    write_shard(work, "train_000001.bin", 20240520, 1, 1000, 1000, 3);
    write_shard(work, "val_000000.bin", 20240520, 1, 400, 400, 3);
    snprintf(run, sizeof(run), "%s/run", work);
    run_train(child, "%s --data %s/train_*.bin --run %s --steps 60 --batch 4 --lr 0.003 --val-tokens 256", SHAPE, work,
              run);
    expect_code(child, 0);
    expect(strstr(OUT(child), "2 files") && strstr(OUT(child), "vocabulary 300"), "the banner: %.600s", OUT(child));
    read_losses(test, run, &losses);
    double first = atof(losses.text[1]), last = atof(losses.text[60]);
    expect(first > 5.5 && first < 5.9 && last < 1.0, "tokens that repeat: the loss goes from %g to %g", first, last);
    // The folder itself, as data/prepare.py writes one.
    run_train(folder, "%s %s --data %s --run %s/second --steps 2", SHAPE, QUICK, work, work);
    expect_code(folder, 0);
    forget(&child), forget(&folder);
    remove_tree(work);
}

TEST(cli_sample) {
    const char* work = work_folder();
    char* text[6];
    train_well("%s %s --data %s/text.txt --run %s/run --steps 30", SHAPE, QUICK, work, work);
    const char* options[6] = {
        "--seed 5",          "--seed 5", "--seed 6", "--temperature 0 --seed 5", "--temperature 0 --seed 6",
        "--top-k 1 --seed 7"};
    for (int i = 0; i < 6; i++) {
        run_train(child, "--sample ab --model %s/run/step_00000030 --device cpu --sample-tokens 40 %s", work,
                  options[i]);
        expect_code(child, 0);
        expect(child.bytes[1] == 0, "stderr: %s", ERR(child));
        expect(strncmp(OUT(child), "ab", 2) == 0 && child.bytes[0] > 40, "%s gives '%s'", options[i], OUT(child));
        text[i] = strdup(OUT(child));
        forget(&child);
    }
    expect(strcmp(text[0], text[1]) == 0, "the same seed, another text");
    expect(strcmp(text[0], text[2]) != 0, "another seed, the same text");
    expect(strcmp(text[3], text[4]) == 0 && strcmp(text[3], text[5]) == 0, "--temperature 0 depends on the seed");
    for (char* t : text) free(t);
    remove_tree(work);
}
