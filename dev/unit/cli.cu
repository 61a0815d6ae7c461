// Tests of the options alone, without a program that is started: names that other programs have for them, numbers,
// words of a shell, and what is said of a full disk. commands.txt has whole command lines.
#include "../../data/options.h"
#include "../../data/options_synonyms.h"
#include "../../data/run_folder.h"
#include "cli.h"

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

TEST(cli_shell_words) {
    for (const char* text : {"plain/a-b_c.d", "", "two words", "it's", "'", "\"$HOME\" `id` \\ *?[x]", "a\nb", "~/x",
                             "é", "#x", "a;b&c|d>e<f(g)", "{a,b}", "!x", "-x"}) {
        int code;
        const char* said = shell(formatted("printf '%%s' %s", shell_word(text)), &code);
        expect(code == 0 && strcmp(said, text) == 0, "'%s' as %s: '%s'", text, shell_word(text), said);
    }
}

// Whole numbers take k, M and B; sizes have K, M, G or T.
TEST(option_numbers) {
    const std::tuple<const char*, const char*, int64_t> numbers[] = {
        {"steps", "10k", 10000},
        {"steps", "0.5M", 500000},
        {"steps", "2B", 2000000000},
        {"steps", "1e4", 10000},
        {"steps", "1000000000000", 1000000000000},
        {"memory", "24G", 24ll << 30},
        {"memory", "24GB", 24ll << 30},
        {"memory", "24GiB", 24ll << 30},
        {"memory", "1.5g", 3ll << 29},
        {"memory", "1k", 1024},
        {"memory", "2T", 2ll << 40},
    };
    static const char none[] = "k 1.5 10q 10kk 0x10 nan -1k 0.0001k 2e12 24GB! 24G infT 24Gi 1e9T",
                      no_sizes[] = "24GB! 24 G -1G nanG 0G infT 24Gx 0x10G 1e9T 0.01";
    Options o;
    for (const auto& [name, text, want] : numbers) {
        o.steps = o.memory = 0;
        expect(option_set(option_find(name), &o, text, error) && o.steps + o.memory == want, "--%s %s", name, text);
    }
    const char *at = none, *sizes = no_sizes;
    while (const char* word = text_word(&at, ' '))
        expect(!option_set(option_find("steps"), &o, word, error), "%s is %lld", word, o.steps);
    while (const char* word = text_word(&sizes, ' '))
        expect(!option_set(option_find("memory"), &o, word, error), "%s is %lld", word, o.memory);
    for (const char* name : {"steps", "memory"}) expect(!option_set(option_find(name), &o, "", error), "--%s=", name);
}

// The refusal of a full disk uses MiB or GiB, and advises only what makes the checkpoints smaller.
TEST(cli_room) {
    const int64_t huge = (int64_t)1 << 55;
    Options options;
    options_defaults(&options);
    static RunFolder run;
    run.options = &options, run.weights = run.train_data.tokenizer = "";
    options.run = work_folder(), options.steps = 3000, run.train_data.bytes = true;
    expect(!run_folder_open(&run, 256, huge) && strstr(run.error, "for 3 checkpoints; free some") &&
               strstr(run.error, "or type --keep 1, or type --save weights or none") &&
               strstr(run.error, " GiB are free"),
           "%s", run.error);
    options.keep = 1, options.save = "weights";
    expect(!run_folder_open(&run, 256, huge) && !strstr(run.error, "--keep") && !strstr(run.error, "--save"), "%s",
           run.error);
    options.save = "none";
    expect(run_folder_open(&run, 256, huge), "--save none needs room: %s", run.error);
    options.save = "all", options.run = "/proc/x";
    expect(run_folder_open(&run, 256, huge), "where there is no disk: %s", run.error);
}
