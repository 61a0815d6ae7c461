// Tests of what a refusal says to type: it is typed, and must lead past that refusal. The names that other programs
// have for options are tested too.
#include "../../data/options.h"
#include "../../data/options_synonyms.h"
#include <ctype.h>

#include "cli.h"

const char* bad_options(int index);  // of cli.cu

// Types a command after ./train in the folder `work`. Returns what it says on stderr.
static const char* type_command(const char* work, const char* command, int* code) {
    return shell(formatted("cd '%s' && CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 timeout 60 '%s/train' %s 2>&1 "
                           ">/dev/null </dev/null",
                           work, test_folder(), command),
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
    if (!type) snprintf(advice, sizeof(advice), "%.*s", (int)strcspn(text, "?"), text);
    if (type) snprintf(advice, sizeof(advice), "%.*s", (int)advice_length(text), text);
    if (strncmp(advice, "--", 2) == 0 && strchr(advice, '|') && islower(strchr(advice, '|')[-1]))
        *strchr(advice, '|') = 0;
    sscanf(advice, "one of %511[^|]", advice), sscanf(advice, "a number from %511[^ ]", advice);
    const char* space = strrchr(advice, ' ');
    snprintf(last, sizeof(last), "%.15s", space ? space + 1 : "");
    const bool placeholder = *last && !last[strspn(last, "ABCDEFGHIJKLMNOPQRSTUVWXYZ|")];
    if (placeholder) *strrchr(advice, ' ') = 0;
    if (*unknown && strncmp(advice, "--", 2) == 0) {
        replace_option(command, unknown, space && !placeholder, advice);
    } else if (strncmp(advice, "--", 2) == 0) {
        sscanf(advice, "%63[-a-z0-9]", option);
        replace_option(command, option, true, "");
        size_t used = strlen(command);
        snprintf(command + used, PATH_MAX - used, " %s%s", advice, placeholder ? " 4" : "");
    } else if (strchr(advice, ' ') || strstr(advice, "=")) {
        return false;
    } else {
        replace_option(command, option, true, "");
        size_t used = strlen(command);
        snprintf(command + used, PATH_MAX - used, " %s %s", option, advice);
    }
    return true;
}

// Types a command and then what it is told to, until it is taken or nothing can be typed. No refusal may come twice.
// Returns how many were left behind.
static int follow_all(Test* test, const char* work, const char* typed) {
    enum { ROUNDS = 8 };
    const char* message[ROUNDS];
    char command[PATH_MAX];
    snprintf(command, sizeof(command), "%s", typed);
    for (int i = 0; i < ROUNDS; i++) {
        int code;
        message[i] = type_command(work, command, &code);
        expect(code == 0 || code == 2, "%s, which became %s: exit code %d: %s", typed, command, code, message[i]);
        for (const char *at = message[i], *end; code != 0 && *at; at = end + 1) {
            end = strchr(at, '\n');
            expect(strncmp(at, "train: error: ", 14) == 0 && end, "%s, which became %s: %s", typed, command, at);
            if (!end) break;
        }
        if (code != 0) message[i] = strndup(message[i], strcspn(message[i], "\n") + 1);  // the first mistake
        for (int j = 0; j < i; j++) {
            expect(code == 0 || strcmp(message[i], message[j]) != 0, "%s, which became %s, is refused as before: %s",
                   typed, command, message[i]);
            if (code != 0 && strcmp(message[i], message[j]) == 0) return i;
        }
        if (getenv("NIBBLE_ADVICE")) printf("%d %s\n    %s", code, command, code ? message[i] : "\n");
        if (code == 0 || !follow(message[i], command)) return i;
    }
    expect(false, "%s, which became %s: no end of it: %s", typed, command, message[ROUNDS - 1]);
    return ROUNDS;
}

// Makes folders that refusals are about: a run, a run that was killed before its first checkpoint, and models of odd
// shapes.
static const char* advice_folder(Test* test) {
    const char* work = work_folder();
    train_well(BRIEF "/used --steps 2", work, work);
    const char* from = joined(work, "used/step_00000002");
    make_model(work, "heads", from, "\"n_head\": 1", "\"n_head\": 2", 1);
    make_model(work, "channels", from, "\"n_embd\": 64", "\"n_embd\": 100", 1);
    make_model(work, "positions", from, "\"n_positions\": 32", "\"n_positions\": 16", 1);
    make_model(work, "killed", from, "gelu_new", "gelu_new", 0);
    write_text(work, "killed/log.jsonl", "");
    return work;
}

// "--data text.txt --dry-run" stands before each of these. Their sentences are not those of bad_options.
static const char* const REFUSED[] = {
    "--model channels",
    "--model heads --heads 2",
    "--model ./used --layers 2 --heads 4",
    "--model used --seq 64",
    "--model nan",
    "--model ./nano",
    "--tokens-per-step 1000000000000 --seq 63",
    "--schedule wsd --warmup 1 --steps 2 --decay-fraction 1",
    "--gpus 2",
    "--gpus 2 --device cpu",
    "--layers 256 --channels 12288 --heads 96 --seq 4096 --recompute block",
    "--release on",
    "--release on --clip 0 --seq 32 --batch 2 --tokens-per-step 128",
    "--release on --rule galore",
    "--size 30",
    "--size 1M",
    "--size 900B",
    "--size 4M --model nano",
    "--size 4M --layers 3",
    "--offload states --rule galore",
    "--clip-by last --rule galore",
    "--v sqrt9",
    "--m udyn8",
    "--rule lion --v fp32",
    "--v none",
    "--rule lion --weights bf16:ef",
    "--weights bf16:ef --m de4",
    "--weights bf16:ef --beta1 0",
    "--weights bf16:ef --m dyn8/rank1",
    "--rule adam --decay-mode independent",
    "--resume used --layers 2 --heads 9",
    "--resume used --model d6",
    "--resume used --seq 64",
    "--resume killed",
    "--resume auto",
    "--run used",
    "--run killed",
    "--resume used --run killed",
    "--run used/step_00000002",
    "--sample x",
    "--fp8",
    "--epochs 1",
    "--dropout 0.1 --n_head 2",
    "--compile",
    "--bf16",
    "--model openai-community/gpt2",
    "--model GPT2",
    "--preset adamw8bit",
};

TEST(cli_advice) {
    const char* work = advice_folder(test);
    int past = 0, count = 0, bad = 0;
    for (const char* command : REFUSED)
        past += follow_all(test, work, formatted("--data text.txt --dry-run %s", command)), count++;
    for (const char* arguments; (arguments = bad_options(bad)) != nullptr; bad++) {
        const char* command = printed([&](FILE* file) {
            char* rest = strdup(arguments);
            for (char* word; (word = strsep(&rest, " ")) != nullptr;) fprintf(file, " %s", shell_word(word));
        });
        past += follow_all(test, work, formatted("--data text.txt --dry-run%s", command)), count++;
    }
    expect(bad >= 16, "only %d rows of bad options are tried", bad);
    note(test, "%d commands, %d refusals left behind", count, past);
}

// Types one to four options of any value, some of them impossible.
static void random_command(uint64_t seed, char* command, size_t bytes) {
    static const char* const begins[] = {"", "--model used", "--resume used", "--model nano",
                                         "--run new --resume auto"};
    static const char* const texts[][2] = {{"preset", "adamw8|muon8|fp8w8e|adamw4|ademamix16|adamw99"},
                                           {"rule", "lion|adam|sgd|adamw|ademamix|x"},
                                           {"weights", "fp32|bf16:ef|e4m3:ef|lin8:sr|bf16:st"},
                                           {"m", "fp32|dyn8|udyn8|de4|lin8/rank1|x"},
                                           {"v", "fp32|none|udyn8|lin4|lin4/rank1|dyn8|x"},
                                           {"grads", "fp32|bf16|auto|x"},
                                           {"model", "heads|nano|d6|x"},
                                           {"override", "wte:m=fp32|wte:m=x|*.bias:weights=fp32|none"},
                                           {"resume", "off|auto|killed|used|x"}};
    auto draw = [&](int i, int n) { return (int)((1 + test_uniform(seed, i)) / 2 * (float)n) % n; };
    int used = snprintf(command, bytes, "--data text.txt --dry-run %s", begins[draw(0, 5)]);
    for (int i = 0, count = 1 + draw(1, 4); i < count; i++) {
        const Option* option = &OPTIONS[draw(10 * i + 2, OPTION_COUNT)];
        char value[64] = "", list[128] = "";
        snprintf(list, sizeof(list), " --%s ", option->name);
        if (option->type == OPTION_FLAG || strcmp(option->name, "sample") == 0 || strstr(command, list)) continue;
        list[0] = 0;
        double span = option->high - option->low, share = (1 + test_uniform(seed, 10 * i + 3)) / 2;
        double number =
            draw(10 * i + 4, 3) ? option->low + span * pow(share, 12) : option->low - 1 + (span + 2) * share;
        if (option->type == OPTION_INT) snprintf(value, sizeof(value), "%.0f", number);
        if (option->type == OPTION_REAL) snprintf(value, sizeof(value), "%g", number);
        if (option->type == OPTION_CHOICE) snprintf(list, sizeof(list), "%s|x", option->values);
        for (const auto& text : texts) {
            if (strcmp(text[0], option->name) == 0) snprintf(list, sizeof(list), "%s", text[1]);
        }
        int choices = 1;
        for (const char* at = list; *at; at++) choices += *at == '|';
        char* choice = strtok(list, "|");
        for (int skip = draw(10 * i + 5, choices); choice && skip > 0; skip--) choice = strtok(nullptr, "|");
        if (choice) snprintf(value, sizeof(value), "%s", choice);
        if (*value) used += snprintf(command + used, bytes - used, " --%s %s", option->name, value);
    }
}

// NIBBLE_ADVICE=N types N of them and prints all.
TEST(cli_advice_random) {
    const char *work = advice_folder(test), *asked = getenv("NIBBLE_ADVICE");
    int past = 0, count = asked ? atoi(asked) : 25;
    for (int i = 0; i < count; i++) {
        char typed[PATH_MAX];
        random_command((uint64_t)i + 1, typed, sizeof(typed));
        past += follow_all(test, work, typed);
    }
    note(test, "%d commands, %d refusals left behind", count, past);
}

// Returns what is said of --NAME, with an underscore for each dash where `underscores`.
static const char* said_of(const char* name, size_t length, bool underscores, char* error) {
    char word[80], train[] = "train";
    Options options;
    options_defaults(&options);
    snprintf(word, sizeof(word), "%s%.*s", *name == '-' ? "" : "--", (int)length, name);
    for (char* c = word + 2; underscores && *c; c++) *c = *c == '-' ? '_' : *c;
    char* words[] = {train, word, nullptr};
    return options_parse(&options, 2, words, error) ? "" : error;
}

// Every option in an answer is one, and every name in the table has its answer and is no option of nibble's.
TEST(cli_synonyms) {
    int names = 0;
    for (const auto& row : SYNONYMS) {
        for (const char *at = row.names, *end; *at; at = end + strspn(end, " "), names++) {
            end = at + strcspn(at, " ");
            for (bool underscores : {false, true}) {
                const char* said = said_of(at, (size_t)(end - at), underscores, error);
                expect(strstr(said, "unknown option") && strstr(said, row.answer), "%.*s: %s", (int)(end - at), at,
                       said);
            }
        }
        for (const char* at = row.answer; (at = strstr(at, "--")) != nullptr; at += 2) {
            char name[64] = "";
            sscanf(at + 2, "%63[-a-z0-9]", name);
            expect(option_find(name), "'%s' names --%s, which is no option", row.answer, name);
        }
        expect(strstr(row.answer, "type --") == row.answer || strstr(row.answer, "leave it out") == row.answer, "%s",
               row.answer);
    }
    note(test, "%d names", names);
}

// An unknown name is guessed only where a finger slipped.
TEST(cli_guesses) {
    static const char* const guesses[][2] = {
        {"bathc", "mean --batch?"},
        {"heds", "mean --heads?"},
        {"topk", "mean --top-k?"},
        {"sample_every_n", "mean --sample-every?"},
        {"lerning-rate", "--lr F"},
        {"Warmup", "--warmup N"},
        {"training.seq_len", "type --seq T"},
        {"optimizer.eps", "type --eps F"},
        {"adam_beat2", "--beta2 F"},
    };
    static const char* const none[] = {"beta4", "adam_beta3", "max_tokens", "notes", "foo",
                                       "xx",    "rl",         "x.steps",    "tree",  "lora-rank"};
    for (const auto& guess : guesses) {
        const char* said = said_of(guess[0], strlen(guess[0]), false, error);
        expect(strstr(said, guess[1]), "--%s: %s", guess[0], said);
    }
    for (const char* name : none) {
        const char* said = said_of(name, strlen(name), false, error);
        expect(!strstr(said, "type ") && !strstr(said, "mean "), "--%s: %s", name, said);
    }
}
