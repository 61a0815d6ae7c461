// The tests of the command line share this. They start ./train, which lies beside this binary, as a user would: on the
// CPU, with a model of one layer in a folder of its own. They read its exit code, its two output streams and its files.
// Every child has a time limit, so that a hang is a failure. Children see no GPU unless a test asks for it.
#pragma once
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <time.h>

#include <string>

#include "../../data/checkpoint.h"
#include "../../data/clock.h"
#include "files.h"

constexpr double CHILD_SECONDS = 60;

struct Child {
    // Tests set these before start().
    bool gpu;     // whether it may see the GPU
    int threads;  // how many OpenMP has; 0: one
    // start(), pump() and finish() set these.
    pid_t pid;
    int pipe[2];          // its stdout and stderr
    std::string text[2];  // what came so far
    int code;             // exit code, or 128 + signal
    double started;
};

inline void pause_ms(double ms) {
    struct timespec time = {(time_t)(ms / 1000), (long)(fmod(ms, 1000) * 1e6)};
    nanosleep(&time, nullptr);
}

// Asks every `ms` whether the condition is true, for so many seconds at most. Returns whether it became true.
template <class Condition>
bool comes_true(double seconds, double ms, Condition condition) {
    const double begin = seconds_now();
    while (!condition()) {
        if (seconds_now() - begin >= seconds) return false;
        pause_ms(ms);
    }
    return true;
}

// The child calls this after fork, and becomes ./train. It never returns.
[[noreturn]] inline void become_train(const Child* child, const int out[2], const int err[2], char** words) {
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
    words[0] = path;
    execv(path, words);
    fprintf(stderr, "%s: %s\n", path, strerror(errno));
    _exit(127);
}

// Starts ./train with the words of the formatted text, which spaces separate ('_' in a word stays as it is).
__attribute__((format(printf, 2, 3))) inline void start(Child* child, const char* format, ...) {
    static char text[16384];
    char* words[128] = {nullptr};
    int count = 1, out[2], err[2];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    for (char* word = strtok(text, " "); word && count < 127; word = strtok(nullptr, " ")) words[count++] = word;
    for (std::string& each : child->text) each.clear();
    if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) abort();
    child->started = seconds_now();
    fflush(stdout);
    child->pid = fork();
    if (child->pid == 0) become_train(child, out, err, words);
    close(out[1]), close(err[1]);
    child->pipe[0] = out[0], child->pipe[1] = err[0];
}

// Reads what the child has written, waiting for at most `ms`. Returns false once both streams have ended.
inline bool pump(Child* child, int ms) {
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
        child->text[i].append(piece, (size_t)got);
    }
    return true;
}

// Waits for the end; a child that takes longer than CHILD_SECONDS is killed and has code -1.
inline void finish(Child* child) {
    bool late = false;
    int status = 0;
    while (pump(child, 100)) {
        if (late || seconds_now() - child->started < CHILD_SECONDS) continue;
        late = true;
        kill(child->pid, SIGKILL);
    }
    waitpid(child->pid, &status, 0);
    child->code = late ? -1 : WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

#define OUT(child) ((child).text[0].c_str())
#define ERR(child) ((child).text[1].c_str())

// Expects this exit code of a child that has ended, and prints its stderr otherwise.
#define expect_code(child, want) \
    expect((child).code == (want), "exit code %d, want %d; stderr: %s", (child).code, want, ERR(child))

inline void write_words(const char* folder, const char* name, int sentences) {
    static const char* const words[] = {"the", "fox", "sees", "a", "dog", "and", "the", "quick", "bird", "sleeps"};
    write_text(folder, name, printed([&](FILE* file) {
                   for (int i = 0; i < 8 * sentences; i++)
                       fprintf(file, "%s%s", words[(int)((1 + test_uniform(17, i)) * 5)], i % 8 == 7 ? ".\n" : " ");
               }));
}

inline const char* work_folder() {
    const char* path = new_folder();
    write_words(path, "text.txt", 500);
    return path;
}

#define FOLDER_TEST(NAME) TEST_IN(NAME, work, work_folder())

// Writes llm.c's shard of `tokens` tokens, which repeat with a period of 7 but for the last one, `last`.
inline void write_shard(const char* folder, const char* name, int tokens, int last) {
    const auto token = [=](int64_t i) { return i == tokens - 1 ? last : (int)(40 * (i % 7) + 3); };
    put_shard(joined(folder, name), 0, tokens, token);
}

// A small tokenizer has these tokens: all bytes, "th", "the" and <|endoftext|>.
constexpr int VOCABULARY = 259, END = 258;

// Appends the UTF-8 of a character. Returns where it ends.
inline char* put_character(char* to, uint32_t point) {
    static const int lead[] = {0, 0xC0, 0xE0, 0xF0};
    const int more = point < 0x80 ? 0 : point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
    *to++ = (char)(lead[more] | point >> 6 * more);
    for (int i = more - 1; i >= 0; i--) *to++ = (char)(0x80 | (point >> 6 * i & 63));
    return to;
}

// The files of a tokenizer spell each byte as the printable character that stands for it.
inline void name_bytes(char (*name)[8]) {
    for (uint32_t byte = 0, other = 256; byte < 256; byte++) {
        const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
        *put_character(name[byte], printable ? byte : other++) = 0;
    }
}

// Prints the beginning of vocab.json: all bytes, whose tokens are their numbers.
inline void print_bytes(FILE* file) {
    char name[256][8];
    name_bytes(name);
    for (int byte = 0; byte < 256; byte++) {
        fputs(byte ? ", " : "{", file);
        json_write_string(file, name[byte]);
        fprintf(file, ": %d", byte);
    }
}

// Writes it as vocab.json and merges.txt or, if `whole`, as tokenizer.json.
inline void write_tokenizer(const char* folder, bool whole = false, const char* pre_tokenizer = "") {
    FILE* file = fopen(joined(folder, whole ? "tokenizer.json" : "vocab.json"), "w");
    if (whole) {
        fprintf(file,
                "{\"added_tokens\": [{\"id\": %d, \"content\": \"<|endoftext|>\"}, {\"id\": 259, \"content\": "
                "\"<pad>\"}], \"normalizer\": null, \"pre_tokenizer\": %s, \"model\": {\"type\": \"BPE\", \"merges\": "
                "[\"t h\", [\"th\", \"e\"]], \"vocab\": ",
                END, pre_tokenizer);
    }
    print_bytes(file);
    fprintf(file, ", \"th\": 256, \"the\": 257, \"<|endoftext|>\": %d}%s", END, whole ? "}}" : "");
    fclose(file);
    if (!whole) write_text(folder, "merges.txt", "#version: 0.2\nt h\nth e\n");
}

// Expects that the files of this name in two folders are there and equal.
inline void expect_equal_files(Test* test, const char* a, const char* b, const char* name) {
    int64_t a_bytes = 0, b_bytes = 0;
    char *a_text = contents(a, name, &a_bytes), *b_text = contents(b, name, &b_bytes);
    const bool equal = a_text && b_text && a_bytes == b_bytes && memcmp(a_text, b_text, a_bytes) == 0;
    expect(equal, "%s/%s and %s/%s are not there or differ", a, name, b, name);
    free(a_text), free(b_text);
}

// This holds what a log says of each step: the training loss as it is spelled there, the gradient's norm and the
// learning rate. If a step was done twice, the last line counts.
constexpr int MOST_STEPS = 4000;
struct Losses {
    char text[MOST_STEPS][32];
    int last;   // the largest step
    int lines;  // how many lines of training there are
};

// Reads them from a run's log, in which every line must be JSON.
inline void read_losses(Test* test, const char* run, Losses* losses) {
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

// Expects that two runs did the steps from `first` to `steps` with the same losses to the last bit, and ended in the
// same weights and states.
inline void expect_equal_runs(Test* test, const char* a, const char* b, int steps, int first = 1) {
    static Losses of_a, of_b;
    read_losses(test, a, &of_a), read_losses(test, b, &of_b);
    expect(of_a.last == steps && of_b.last == steps, "%d and %d steps, want %d", of_a.last, of_b.last, steps);
    for (int step = first; step <= steps; step++) {
        if (strcmp(of_a.text[step], of_b.text[step]) == 0 && of_a.text[step][0]) continue;
        expect(false, "loss of step %d: '%s' and '%s'", step, of_a.text[step], of_b.text[step]);
        break;
    }
    for (const char* file : {"model.safetensors", "optimizer.safetensors"})
        expect_equal_files(test, checkpoint_name(a, steps), checkpoint_name(b, steps), file);
}

// Waits until the run's log has a training line of this step. Returns false when the child ended before.
inline bool wait_for_step(Child* child, const char* run, int step) {
    const char* want = formatted("\"step\": %d,", step);
    while (seconds_now() - child->started < CHILD_SECONDS) {
        char* log = contents(run, "log.jsonl");
        bool there = log && strstr(log, want);
        free(log);
        if (there) return true;
        if (!pump(child, 1)) return false;
    }
    return false;
}

// Returns how many checkpoints a run has, and sets *newest, if it is asked for, to the last one's step, -1
// if there is none.
inline int checkpoints(const char* run, int64_t* newest = nullptr) {
    int64_t* steps;
    int count = checkpoint_list(run, &steps);
    if (newest) *newest = count > 0 ? steps[0] : -1;
    free(steps);
    return count;
}

// Replaces words in a checkpoint's state.json, and writes the checksum that it then has.
inline void rewrite_state(const char* folder, const char* from, const char* to) {
    const char *text = contents(folder, "state.json"), *changed = replaced(text, from, to), *seal = nullptr;
    for (const char* at = changed; (at = strstr(at, "\n\"crc32c\": ")) != nullptr; at++) seal = at + 1;
    if (!strstr(text, from) || !seal) abort();
    const uint32_t crc = crc32c(0, changed, seal - changed);
    write_text(folder, "state.json", formatted("%.*s\"crc32c\": %u\n}\n", (int)(seal - changed), changed, crc));
}

// Expects that a child ended with exit code 2 and one sentence on stderr, which holds both needles.
inline void expect_error(Test* test, const Child* child, const char* what, const char* needle, const char* needle2) {
    const char* error = ERR(*child);
    const char* end = strchr(error, '\n');
    expect(child->code == 2, "%s: exit code %d, want 2; stderr: %s", what, child->code, error);
    expect(strncmp(error, "train: error: ", 14) == 0 && end && end[1] == 0, "%s: not one sentence: %s", what, error);
    expect(strstr(error, needle) && strstr(error, needle2), "%s: neither '%s' nor '%s' may be missing in: %s", what,
           needle, needle2, error);
}
