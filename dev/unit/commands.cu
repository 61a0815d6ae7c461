// Runs dev/unit/commands.txt, each of whose cases is a case here. Its lines:
//
//     $ COMMAND           a shell's command, which must succeed; lines that begin with ". " continue it
//     ! ARGUMENTS         ./train refuses these, behind those of the last `with`: exit code 2, one sentence on stderr,
//     and
//                         no folder called new
//     ? ARGUMENTS         does the same. What the sentence says to type then leads past it, in a dry run
//     + PIECE, - PIECE    what the command above said has, or lacks, this text. " :: PIECE" behind a line is one more
//     with ARGUMENTS
//     shard PATH TOKENS LAST, state FOLDER OLD => NEW    write_shard and rewrite_state of cli.h
//     seal FOLDER         writes sums and seal of a checkpoint anew, as somebody does who changed a file on purpose
//     tokens, evals       a prepared folder `data` with the small tokenizer of cli.h, and a run of a step; files of
//     --eval
//
// "case NAME both" makes two cases, NAME on the CPU and NAME_gpu, which sees the GPU; nothing runs beside "case NAME
// alone". A command that exits with 77 skips the rest of its case, and says why.
#include <ctype.h>
#include <limits.h>

#include "cli.h"
#include "gpus.h"

// A command line that was typed in the folder `work`, and its output.
struct Typed {
    const char *work, *with, *line, *said;
    int gpus;  // that it sees: 0 where a case is for the CPU
    bool peers;
};

// Returns the file from its beginning, or from the line after "case NAME", to the next case. NAME_gpu may be "NAME
// both".
static const char* lines_of_case(const char* name) {
    static const char* const file = contents(test_folder(), "dev/unit/commands.txt");
    const char* begin = *name ? strstr(file, formatted("\ncase %s\n", name)) : file;
    if (!begin) begin = strstr(file, formatted("\ncase %s alone\n", name));
    if (!begin)
        begin = strstr(file, formatted("\ncase %.*s both\n", (int)strcspn(replaced(name, "_gpu", " "), " "), name));
    if (*name) begin = strchr(begin + 1, '\n') + 1;
    const char* end = strstr(begin, "\ncase ");
    return end ? strndup(begin, (size_t)(end + 1 - begin)) : begin;
}

// Types a command in a shell. Returns what it says: on both streams, or on stderr alone.
static const char* typed(const Typed* now, const char* command, bool errors_alone, int* code) {
    static const char* const functions = lines_of_case("");
    const char* settings =
        formatted("%s OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive LC_ALL=C", now->gpus ? "" : "CUDA_VISIBLE_DEVICES=");
    return shell(formatted("cd '%s'; program='%s' gpus=%d peers=%d; unset RANK; export %s\n%s{ %s\n} </dev/null %s",
                           now->work, test_folder(), now->gpus, now->peers, settings, functions, command,
                           errors_alone ? "2>&1 >/dev/null" : "2>&1"),
                 code);
}

// Returns the length of the advice at `text`, up to where the sentence goes on about something else.
static size_t advice_length(const char* text) {
    static const char* const ends[] = {";",     ",",    ": ",   " or ",   " (",     " where ",
                                       " for ", " to ", " in ", " with ", " alone", "\n"};
    size_t length = strlen(text);
    for (const char* end : ends) {
        const char* at = strstr(text, end);
        if (at && (size_t)(at - text) < length) length = (size_t)(at - text);
    }
    return length;
}

// Takes an option and its value, if it has one, out of a command, where it was typed last; `kept` is put in its place.
static void replace_option(char* command, const char* option, bool with_value, const char* kept) {
    char word[128], before[PATH_MAX], *found = nullptr;
    snprintf(word, sizeof(word), " %s", option);
    snprintf(before, sizeof(before), " %s", command);
    for (char* at = before; (at = strstr(at, word)) != nullptr; at++) {
        if (strchr(" =", at[strlen(word)])) found = at;
    }
    if (!found) return;
    char* end = found + strlen(word);
    if (with_value && *end == ' ' && strncmp(end, " --", 3) != 0) end++;
    if (with_value) end += strcspn(end, " ");
    *found = 0;
    snprintf(command, PATH_MAX, "%s %s%s", before + (before[1] != 0), kept, end);
}

// Does to `command` what a refusal says; false where it says nothing that can be typed as it stands.
static bool follow(const char* message, char* command) {
    char option[64] = "", unknown[64] = "", advice[512] = "", last[16] = "";
    const char *type = strstr(message, "type "), *mean = strstr(message, "did you mean "), *leave = nullptr;
    const char* dashes = strstr(message, "--");
    if (dashes) sscanf(dashes, "%63[-a-z0-9]", option);
    if (sscanf(message, "train: error: unknown option %63[^;]", unknown) == 1 && strstr(message, "leave it out")) {
        replace_option(command, unknown, true, "");
        return true;
    }
    if ((leave = strstr(message, "leave --")) != nullptr && strstr(leave, " out")) {
        for (const char* at = leave; (at = strstr(at, "--")) != nullptr && at < strstr(leave, " out"); at += 2) {
            sscanf(at, "%63[-a-z0-9]", option);
            replace_option(command, option, true, "");
        }
        return true;
    }
    if (!type && !mean) return false;
    const char* text = type ? type + 5 : mean + 13;
    snprintf(advice, sizeof(advice), "%.*s", (int)(type ? advice_length(text) : strcspn(text, "?")), text);
    if (strncmp(advice, "--", 2) == 0 && strchr(advice, '|') && islower(strchr(advice, '|')[-1]))
        *strchr(advice, '|') = 0;
    sscanf(advice, "one of %511[^|]", advice), sscanf(advice, "a number from %511[^ ]", advice);
    const char* space = strrchr(advice, ' ');
    snprintf(last, sizeof(last), "%.15s", space ? space + 1 : "");
    const bool placeholder = *last && !last[strspn(last, "ABCDEFGHIJKLMNOPQRSTUVWXYZ|")];
    if (placeholder) *strrchr(advice, ' ') = 0;
    const bool is_option = strncmp(advice, "--", 2) == 0;
    if (*unknown && is_option) return replace_option(command, unknown, space && !placeholder, advice), true;
    if (!is_option && (strchr(advice, ' ') || strstr(advice, "="))) return false;
    if (is_option) sscanf(advice, "%63[-a-z0-9]", option);
    replace_option(command, option, true, "");
    const size_t used = strlen(command);
    const char* value = placeholder ? " 4" : "";
    snprintf(command + used, PATH_MAX - used, " %s%s%s", is_option ? "" : formatted("%s ", option), advice, value);
    return true;
}

// Types arguments and then what it is told to, until it is taken or nothing can be typed. No refusal may come twice.
static void follow_all(Test* test, const Typed* now, const char* arguments) {
    enum { ROUNDS = 8 };
    const char* message[ROUNDS];
    char command[PATH_MAX];
    snprintf(command, sizeof(command), "--dry-run %s", arguments);
    for (int i = 0; i < ROUNDS; i++) {
        int code;
        message[i] = typed(now, formatted("train %s", command), true, &code);
        expect(code == 0 || code == 2, "%s, which became %s: exit code %d: %s", now->line, command, code, message[i]);
        if (code == 0) return;
        message[i] = strndup(message[i], strcspn(message[i], "\n") + 1);  // the first mistake
        for (int j = 0; j < i; j++) {
            expect(strcmp(message[i], message[j]) != 0, "%s, which became %s, is refused as before: %s", now->line,
                   command, message[i]);
            if (strcmp(message[i], message[j]) == 0) return;
        }
        if (!follow(message[i], command)) return;
    }
    expect(false, "%s, which became %s: no end of it: %s", now->line, command, message[ROUNDS - 1]);
}

// Expects that what was said has, or lacks, each of some texts, which have " :: " between two.
static void expect_said(Test* test, const Typed* now, const char* pieces, bool has) {
    for (const char* end; pieces; pieces = end ? end + 4 : nullptr) {
        end = strstr(pieces, " :: ");
        const char* piece = end ? strndup(pieces, (size_t)(end - pieces)) : pieces;
        expect(!strstr(now->said, piece) == !has, "%s: %s'%s' in: %s", now->line, has ? "no " : "", piece, now->said);
    }
}

// Types the arguments of a line and expects the refusal.
static void expect_refusal(Test* test, Typed* now, const char* arguments, bool is_followed) {
    int code;
    const char* all = formatted("%s %s", now->with, arguments);
    now->said = typed(now, formatted("train %s", all), true, &code);
    const char* end = strchr(now->said, '\n');
    expect(code == 2, "%s: exit code %d, want 2: %s", now->line, code, now->said);
    expect(strncmp(now->said, "train: error: ", 14) == 0 && end && (is_followed || !end[1]), "%s: not one sentence: %s",
           now->line, now->said);
    expect(!exists(now->work, "new"), "%s leaves a run folder", now->line);
    remove_tree(joined(now->work, "new"));
    if (is_followed) follow_all(test, now, all);
}

void write_evaluations(const char* folder);  // of evaluation.cu

static void write_shard_of(const char* work, const char* path, int tokens, int last) {
    if (strchr(path, '/') && !folder_make(joined(work, path_parent(path)), error)) user_error("%s", error);
    write_shard(work, path, tokens, last);
}

static void run_line(Test* test, Typed* now, char* line) {
    char path[256], *rest = strchr(line, ' ') ? strchr(line, ' ') + 1 : line + strlen(line);
    int numbers[2];
    now->line = *line == '+' || *line == '-' ? now->line : strdup(line);
    if (*line == '+' || *line == '-') return expect_said(test, now, rest, *line == '+');
    if (strncmp(line, "with", 4) == 0) {
        now->with = strdup(rest);
    } else if (sscanf(line, "shard %255s %d %d", path, &numbers[0], &numbers[1]) == 3) {
        write_shard_of(now->work, path, numbers[0], numbers[1]);
    } else if (sscanf(line, "seal %255s", path) == 1) {
        const char *folder = joined(now->work, path), *state = contents(folder, "state.json");
        CheckpointFile all[] = {{"model.safetensors", 0, -1}, {"optimizer.safetensors", 0, -1}, {"config.json", 0, -1}};
        state = strndup(state, (size_t)(strstr(state, "\"files\"") - state));
        expect(checkpoint_seal(folder, state, all, 3, error), "%s", error);
    } else if (strcmp(line, "evals") == 0) {
        write_evaluations(now->work);
    } else if (strcmp(line, "tokens") == 0) {
        write_shard_of(now->work, "data/train_000.bin", 4000, 7), write_shard_of(now->work, "data/val_000.bin", 400, 7);
        put_text(joined(now->work, "data/meta.json"), "{\"vocabulary\": 259}");
        write_tokenizer(joined(now->work, "data"));
        run_line(test, now, strdup("$ train $SHAPE $QUICK --data data --run used --steps 1"));
    } else if (sscanf(line, "state %255s", path) == 1) {
        char *from = rest + strlen(path) + 1, *to = strstr(from, " => ");
        *to = 0;
        rewrite_state(joined(now->work, path), from, to + 4);
    } else {
        char* pieces = strstr(line, " :: ");
        int code = 0;
        if (pieces) *pieces = 0;
        if (pieces < rest && pieces) rest = pieces;
        if (*line == '$') now->said = typed(now, rest, false, &code);
        if (*line != '$') expect_refusal(test, now, rest, *line == '?');
        if (code == 77) skip("%.*s", (int)strcspn(now->said, "\n"), now->said);
        expect(code == 0, "%s: exit code %d: %s", now->line, code, now->said);
        if (pieces) expect_said(test, now, pieces + 4, true);
    }
}

static void run_case_of_file(Test* test) {
    const bool gpu = strstr(test->name, "_gpu") != nullptr, several = strncmp(test->name, "multi_", 6) == 0;
    if (gpu && getenv("NIBBLE_SANITIZE")) skip("processes of their own");
    Typed now = {work_folder(), "", "", "", gpu ? test_gpus() : 0, gpu && several && gpus_reach_each_other(8)};
    for (const char* at = lines_of_case(test->name); *at;) {
        const char* line = printed([&](FILE* file) {
            do {
                const size_t length = strcspn(at, "\n");
                fprintf(file, "%.*s\n", (int)length, at);
                at += length + (at[length] == '\n');
            } while (strncmp(at, ". ", 2) == 0 && (at += 2));
        });
        if (*line != '#' && *line != '\n') run_line(test, &now, strndup(line, strlen(line) - 1));
        if (test->failures > 20 || test->skipped) return;  // what follows needs what failed
    }
}

// Adds the file's cases to those of ./test_gpt2.
static const int added = [] {
    const char* file = contents(test_folder(), "dev/unit/commands.txt");
    if (!file) user_error("%s", error);
    int cases = 0;
    char name[64], how[8];
    for (const char* at = file; (at = strstr(at, "\ncase ")) != nullptr; at++) {
        const bool has = sscanf(at, "\ncase %63s%7[ a-z]", name, how) == 2, alone = has && strcmp(how, " alone") == 0;
        for (int gpu = 0; gpu < (has && !alone ? 2 : 1); gpu++, cases++) {
            const char* own = formatted("%s%s", name, gpu ? "_gpu" : "");
            new TestRegistration(new Test{own, run_case_of_file, 0, false, alone, {0}, nullptr});
        }
    }
    return cases;
}();
