// Tests of names on the command line: what --model means, where a run finds its folder, commands as they are printed.
#include "../../data/options.h"
#include "cli.h"

// Returns what a shell prints for a line, typed in `folder`. `code` is its exit code.
static const char* shell_in(const char* folder, int* code, const char* line) {
    const char* settings = "CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive";
    return shell(formatted("cd %s && export %s && { %s\n} </dev/null 2>&1", shell_word(folder), settings, line), code);
}

// Runs ./train in a folder to the end and expects success; returns what it said.
static const char* train_in(Test* test, const char* folder, const char* words) {
    run_in(child, folder, "%s", words);
    expect(child.code == 0, "%s: exit code %d: %s", words, child.code, ERR(child));
    return strdup(OUT(child));
}

#define TINY SHAPE " " QUICK " --device cpu"

static void make_folder(const char* work, const char* name) {
    if (mkdir(joined(work, name), 0755) != 0) abort();
}

static void move_folder(const char* work, const char* from, const char* to) {
    if (rename(joined(work, from), joined(work, to)) != 0) abort();
}

// A bare name of a built-in shape is that shape, whatever folder has the same name; ./NAME and other names are folders.
FOLDER_TEST(cli_model_names) {
    train_in(test, work, TINY " --data text.txt --run plain --steps 4");
    train_in(test, work, TINY " --data text.txt --run trained --steps 9 --lr 0.1");
    const char *plain = joined(work, "plain"), *other = joined(work, "other");
    for (const char* holds : {"", "trained", "trained/step_00000009"}) {
        if (*holds) move_folder(work, holds, "nano");
        if (!*holds) make_folder(work, "nano");
        for (const char* model : {"", "--model nano"}) {
            const char* out = train_in(test, work, formatted(TINY " --data text.txt --run other --steps 4 %s", model));
            expect(!strstr(out, "type --model ./nano") == !strstr(holds, "step_"), "'%s' in ./nano: %s", holds, out);
            expect_equal_runs(test, plain, other, 4);
            remove_tree(other);
        }
        if (*holds) move_folder(work, "nano", holds);
        if (!*holds) remove_tree(joined(work, "nano"));
    }
    move_folder(work, "trained/step_00000009", "nano");
    const char* preset = train_in(test, work, "--data text.txt --batch 2 --model nano --dry-run");
    expect(strstr(preset, "4 layers, 128 channels"), "%s", preset);
    const char* folder = train_in(test, work, "--data text.txt --batch 2 --model ./nano --dry-run");
    expect(strstr(folder, "1 layers, 64 channels"), "%s", folder);
    move_folder(work, "nano", "mine");
    const char* mine = train_in(test, work, "--data text.txt --batch 2 --model mine --dry-run");
    expect(strstr(mine, "1 layers, 64 channels"), "%s", mine);
    move_folder(work, "mine", "d6");
    run_in(bare, work, "--sample a --model d6 --device cpu");
    expect_error(test, &bare, "--sample with a built-in shape", "d6 is a built-in shape", "type --model ./d6");
    train_in(test, work, "--sample a --model ./d6 --device cpu --sample-tokens 4");
}

// A run whose own folder is called like a built-in shape, killed before its first checkpoint, begins anew by its own
// command; and later goes on by it.
FOLDER_TEST(cli_run_is_called_nano) {
    const char *run = joined(work, "nano"), *whole = joined(work, "whole");
    for (const char* model : {"", "--model nano"}) {
        Child child = new_child(false, work);
        // The run has slow steps, so that few of them are logged before it is killed.
        start(&child, TINY " --data text.txt --run nano --resume auto --steps 9 --tokens-per-step 4096 %s", model);
        expect(wait_for_step(&child, run, 3), "no third step: %s", ERR(child));
        kill(child.pid, SIGKILL);
        finish(&child);
        for (int steps : {4, 8}) {
            train_in(
                test, work,
                formatted(TINY " --data text.txt --run nano --resume auto --steps %d --schedule constant --warmup 2 %s",
                          steps, model));
        }
        train_in(test, work, TINY " --data text.txt --run whole --steps 8 --schedule constant --warmup 2");
        expect_equal_runs(test, whole, run, 8, 4);
        remove_tree(run), remove_tree(whole);
    }
}

// A resume needs nothing of the folder that the first weights came from: it may be gone, moved or out of sight, and be
// named on the command line or not.
FOLDER_TEST(cli_resume_without_first_folder) {
    const char *whole = joined(work, "whole"), *run = joined(work, "run"), *elsewhere = joined(work, "elsewhere");
    make_folder(work, "elsewhere"), make_folder(work, "elsewhere/nano"), make_folder(work, "elsewhere/base");
    train_in(test, work, TINY " --data text.txt --run first --steps 5");
    const char* common = QUICK " --device cpu --data text.txt --schedule constant --warmup 2";
    for (const char* name : {"base", "d6"}) {
        move_folder(work, "first/step_00000005", name);
        train_in(test, work, formatted("%s --model ./%s --run whole --steps 6", common, name));
        for (const char* typed : {"", "--model ./base", "--model base/", "--model ./d6"}) {
            train_in(test, work, formatted("%s --model ./%s --run run --steps 3", common, name));
            move_folder(work, name, "gone");
            train_in(test, elsewhere, formatted("--resume %s --steps 6 --device cpu %s", run, typed));
            move_folder(work, "gone", name);
            expect_equal_runs(test, whole, run, 6, 4);
            remove_tree(run);
        }
        move_folder(work, name, "first/step_00000005");
        remove_tree(whole);
    }
}

// The automatic name of a run is taken: another gets a number, and of several at once each its own.
FOLDER_TEST(cli_run_names) {
    make_folder(work, "runs");
    for (int second = 0; second < 120; second++) {
        char date[64];
        time_t when = time(nullptr) + second;
        strftime(date, sizeof(date), "runs/%Y-%m-%d_%H%M%S_nano", localtime(&when));
        make_folder(work, date);
    }
    Child child[5];
    for (Child& c : child) {
        c = new_child(false, work);
        start(&c, TINY " --data text.txt --steps 1");
    }
    char names[5][256];
    for (int i = 0; i < 5; i++) {
        finish(&child[i]);
        expect_code(child[i], 0);
        const char* run = strstr(OUT(child[i]), " run      runs/");
        expect(run && sscanf(run, " run %255s", names[i]) == 1, "%s", OUT(child[i]));
        const char* number = strstr(names[i], "_nano_");
        expect(number && atoi(number + 6) >= 2 && atoi(number + 6) <= 6, "%s", names[i]);
        for (int j = 0; j < i; j++) expect(strcmp(names[i], names[j]) != 0, "%s twice", names[i]);
        const char* name = joined(names[i], "step_00000001");
        expect(exists(work, name), "no %s", name);
    }
}

static double seconds_of(const char* text) {
    int a = 0, b = 0;
    if (sscanf(text, "%dh%dm", &a, &b) == 2) return 3600 * a + 60 * b;
    return sscanf(text, "%dm%ds", &a, &b) == 2 ? 60 * a + b : a;
}

// The first step's forecast is of steps, not of the validation before them.
FOLDER_TEST(cli_first_eta) {
    const char* out =
        train_in(test, work,
                 "--layers 1 --channels 64 --heads 1 --seq 16 --batch 1 --sample-every 0 --device cpu --data "
                 "text.txt --val-fraction 0.5 --val-tokens 8000 --val-every 300 --steps 300 --run run");
    const char *first = strstr(out, "\nstep      1/"), *ms = first ? strstr(first, " ms ") : nullptr;
    const char *eta = first ? strstr(first, "eta ") : nullptr, *val = strstr(out, "bits per byte  ");
    expect(ms && eta && val, "%s", out);
    while (ms && ms > first && ms[-1] != ' ') ms--;
    double step = ms ? atof(ms) / 1000 : 0, said = eta ? seconds_of(eta + 4) : 0;
    expect(said <= 2 * 300 * step + 1, "%g s for 299 steps of %g s after a validation of %.4s s", said, step, val + 15);
    note(test, "%g s for 299 steps of %.4f s", said, step);
}

TEST(cli_shell_words) {
    for (const char* text : {"plain/a-b_c.d", "", "two words", "it's", "'", "\"$HOME\" `id` \\ *?[x]", "a\nb", "~/x",
                             "é", "#x", "a;b&c|d>e<f(g)", "{a,b}", "!x", "-x"}) {
        int code;
        const char* said = shell_in("/", &code, formatted("printf '%%s' %s", shell_word(text)));
        expect(code == 0 && strcmp(said, text) == 0, "'%s' as %s: '%s'", text, shell_word(text), said);
    }
}

// Words to put before a command in a shell. They run it until log.jsonl in the run folder `run` has a step more, for
// half a minute at most, and then stop it; this succeeds if its exit code says so.
static const char* until_a_step(const char* run) {
    return formatted(
        "until_a_step() { log=%s/log.jsonl; steps() { grep -s '\"train\"' \"$log\" | wc -l; }; n=`steps`; "
        "\"$@\" & for i in `seq 300`; do [ \"`steps`\" = \"$n\" ] || break; sleep 0.1; done; "
        "kill -TERM $!; wait $!; [ $? = 143 ]; }; until_a_step ",
        shell_word(run));
}

// Pastes what a run in `run` printed after "next", and below it, into a shell; returns how many commands there were.
static int paste_next(Test* test, const char* folder, const char* run, const char* out) {
    int count = 0, code;
    const char* next = strstr(out, "\nnext     ");
    expect(next, "nothing comes next: %s", out);
    for (const char* line = next ? next + 10 : nullptr; line; count++) {
        const char* until = strstr(line, " --resume ") ? until_a_step(run) : "";  // it would run for ever
        const char* command = formatted("%s%.*s", until, (int)strcspn(line, "\n"), line);
        const char* said = shell_in(folder, &code, command);
        expect(code == 0, "%s: exit code %d: %s", command, code, said);
        line = strchr(line, '\n');
        line = line && strncmp(line, "\n         ", 10) == 0 ? line + 10 : nullptr;
    }
    return count;
}

// The program, the run and the place are all called so that a shell would take them apart.
FOLDER_TEST(cli_printed_commands) {
    int code;
    const char* line = formatted(
        "mkdir -p 'it'\\''s home/.venv/bin' 'it'\\''s home/dev' 'a place' && cd 'it'\\''s home' && "
        "{ ln %s/train train 2>/dev/null || cp %s/train train; } && echo >dev/plot.py && "
        "printf '#!/bin/sh\\ntest -f \"$1\" -a -d \"$2\"' >.venv/bin/python && chmod +x .venv/bin/python",
        test_folder(), test_folder());
    shell_in(work, &code, line);
    expect(code == 0, "%s", line);
    for (const char* place : {"it's home", "a place"}) {
        const bool inside = strcmp(place, "it's home") == 0;
        const char* program = inside ? "./train" : "\"../it's home/train\"";
        const char* folder = joined(work, place);
        line = formatted("%s " TINY " --data ../text.txt --run 'my $run' --steps 2", program);
        const char* out = shell_in(folder, &code, line);
        expect(code == 0 && paste_next(test, folder, "my $run", out) == 2, "%s: %s", line, out);
        if (inside) continue;
        line =
            formatted("rm -r \"../it's home/.venv\"; %s%s " TINY " --data ../text.txt --run \"it's\" --steps 100000000",
                      until_a_step("it's"), program);
        out = shell_in(folder, &code, line);
        expect(code == 0 && strstr(out, " --resume ") && paste_next(test, folder, "it's", out) == 1, "%s: %s", line,
               out);
    }
}

// A whole state.json, by its seal, that lists its files in no usable way: one sentence, which holds no leftover.
FOLDER_TEST(cli_state_lists_no_files) {
    train_in(test, work, TINY " --data text.txt --run run --steps 1");
    const char* checkpoint = joined(work, "run/step_00000001");
    for (const char* files :
         {"", "\"files\": 3,\n", "\"files\": [1, 2],\n", "\"files\": null,\n", "\"files\": \"a\",\n",
          "\"files\": {\"model.safetensors\": 3},\n", "\"files\": {\"nothing\": {}},\n"}) {
        const char* text = formatted("{\n\"version\": 1,\n\"step\": 1,\n%s", files);
        const uint32_t crc = crc32c(0, text, (int64_t)strlen(text));
        write_text(checkpoint, "state.json", formatted("%s\"crc32c\": %u\n}\n", text, crc));
        run_train(child, "--device cpu --resume %s", checkpoint);
        expect_error(test, &child, files, "damaged checkpoint: ", checkpoint);
        for (const char* at = ERR(child); *at; at++)
            expect((unsigned char)*at >= ' ' || *at == '\n', "%s: byte %d in: %s", files, *at, ERR(child));
        const char* reason = strstr(ERR(child), "damaged checkpoint: ");
        expect(reason && strstr(reason, checkpoint), "%s: %s", files, ERR(child));
    }
}

// A run that no tokenizer fits names no command to sample with; a refused link, once removed, leaves a folder to use.
FOLDER_TEST(cli_folder_after_refusal) {
    make_folder(work, "run"), make_folder(work, "tokens");
    for (const char* log : {"log.txt", "log.jsonl"}) {
        const char *path = formatted("%s/run/%s", work, log), *victim = joined(work, "victim");
        if (symlink(victim, path) != 0) abort();
        run_in(child, work, TINY " --data text.txt --run run --steps 1");
        expect_error(test, &child, "a planted link", log, "is a link, which is not followed; remove it");
        expect(unlink(path) == 0 && access(victim, F_OK) != 0, "%s was followed", path);
    }
    train_in(test, work, TINY " --data text.txt --run run --steps 1");
    const char* folder = joined(work, "tokens");
    write_shard(folder, "train_0.bin", 2000, 3), write_shard(folder, "val_0.bin", 2000, 3);
    const char* out = train_in(test, work, TINY " --data tokens --run other --steps 1");
    expect(strstr(out, "no samples") && !strstr(out, "--sample"), "%s", out);
}

// Returns what bash offers for the last of some words, with the script of --completion; an empty text where it offers
// nothing.
TEST(cli_completion) {
    static const char* const cases[][2] = {{"--dev", "--device"},      {"--device ''", "auto|gpu|cpu"},
                                           {"--device c", "cpu"},      {"--resume au", "auto"},
                                           {"--data ./a.", "./a.txt"}, {"--data ./b", "./b c.txt"},
                                           {"--seed 1", ""},           {"--dry-run --list-f", "--list-formats"},
                                           {"--lr a", "auto"}};
    const char* work = work_folder();
    run_well(script, "--completion bash");
    write_text(work, "script", OUT(script)), write_text(work, "a.txt", ""), write_text(work, "b c.txt", "");
    for (const auto& [words, offered] : cases) {
        int code;
        const char* line = formatted(
            ". ./script; COMP_WORDS=(nibble %s); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _nibble\n"
            "IFS='|'; echo -n \"${COMPREPLY[*]}\"\n",
            words);
        write_text(work, "ask", line);
        const char* said = shell_in(work, &code, "bash ask");
        expect(code == 0 && strcmp(said, offered) == 0, "%s: '%s', want '%s'", words, said, offered);
    }
    run_well(zsh, "--completion zsh");
    write_text(work, "_nibble", OUT(zsh));
    int code;
    const char* said = shell_in(work, &code, "command -v zsh > /dev/null || exit 3; zsh -n _nibble");
    expect(code == 3 || code == 0, "zsh: %s", said);
}

// The first line of log.jsonl says which program this is and how it was started; its numbers are numbers.
FOLDER_TEST(cli_first_line) {
    run_well(version, "--version");
    train_in(test, work, TINY " --data text.txt --run run --steps 1 --prompt a\"b --lr 0.00025");
    const char* path = joined(work, "run");
    const char* log = contents(path, "log.jsonl");
    const Json* first = log ? json_parse(log, (int64_t)strcspn(log, "\n"), "log.jsonl", error) : nullptr;
    const Json* options = json_get(first, "options");
    expect(first && strcmp(json_string(first, "type", ""), "config") == 0, "the first line is no config");
    for (const char* name : {"version", "commit", "build", "started", "host", "device", "command"})
        expect(*json_string(first, name, ""), "%s is not told", name);
    path = formatted("nibble %s (commit %s, %s)\n", json_string(first, "version", ""), json_string(first, "commit", ""),
                     json_string(first, "build", ""));
    expect(strcmp(OUT(version), path) == 0, "--version says %s", OUT(version));
    expect(strstr(json_string(first, "command", ""), " --prompt 'a\"b' --lr 0.00025"), "command: %s",
           json_string(first, "command", ""));
    expect(json_number(options, "lr", 0) == 0.00025 && json_int(options, "steps", 0) == 1, "options are not typed");
    expect(json_int(first, "unix_s", 0) > 1700000000 && json_int(first, "ranks", 0) == 1, "time or ranks");
    int missing = 0;
    bool instead = false;
    for (const Option& row : OPTIONS) {
        const Option* option = &row;
        instead = instead || strcmp(option->group, "instead of training") == 0;
        const bool trains = option->type != OPTION_FLAG && !instead;
        const Json* value = json_get(options, option->name);
        missing += trains != (value != nullptr);
        const bool number = option->type == OPTION_INT || option->type == OPTION_REAL;
        expect(!value || (value->kind == JSON_NUMBER) == number, "--%s is no %s", option->name,
               number ? "number" : "text");
    }
    expect(missing == 0, "%d options are missing, or too many", missing);
}

// --profile ends the run by itself, and leaves no checkpoint.
FOLDER_TEST(cli_profile) {
    const char* out = train_in(test, work, TINY " --data text.txt --run run --steps 40 --print-every 1 --profile");
    expect(strstr(out, "step      5/40") && !strstr(out, "step      6/40"), "%s", out);
    expect(!strstr(out, "\nval ") && !strstr(out, "\nsample ") && !strstr(out, "\nsave "), "%s", out);
    expect(exists(work, "run/log.jsonl") && !exists(work, "run/step_00000005"), "a checkpoint of --profile");
}

// A toolkit that is named by a relative path is linked by its absolute one.
FOLDER_TEST(cli_relative_toolkit) {
    int code;
    make_folder(work, "bin"), make_folder(work, "lib");
    write_text(work, "bin/nvcc", "#!/bin/sh\necho release 13.0,\n");
    const char* said = shell_in(test_folder(), &code,
                                formatted("chmod +x %s/bin/nvcc; env -u MAKEFLAGS make -pn CUDA_HOME=$(realpath "
                                          "--relative-to=. %s) help | grep ^LDFLAGS",
                                          work, work));
    expect(strstr(said, formatted("-rpath,%s/lib ", work)), "%s", said);
}

// Whole numbers take k, M and B, and all wrong options are told at once.
TEST(option_numbers) {
    const std::tuple<const char*, int64_t> numbers[] = {{"10k", 10000},     {"0.5M", 500000},
                                                        {"2B", 2000000000}, {"1e4", 10000},
                                                        {"7", 7},           {"1000000000000", 1000000000000}};
    const char* const none[] = {"", "k", "1.5", "10q", "10kk", "0x10", "nan", "-1k", "0.0001k", "2e12"};
    const Option* steps = option_find("steps");
    Options o;
    for (const auto& [text, want] : numbers)
        expect(option_set(steps, &o, text, error) && o.steps == want, "%s is %lld", text, o.steps);
    for (const char* text : none) expect(!option_set(steps, &o, text, error), "%s is %lld", text, o.steps);
    run_train(child, "--stepps 3 --batch x --bathc=3 --lr --seq 64 --zzz --seed 1.5 more");
    int lines = 0;
    for (const char* at = ERR(child); *at; at++) lines += *at == '\n';
    for (const char* said : {"did you mean --steps?", "--batch takes", "mean --batch?", "--lr needs a value", "--zzz;",
                             "--seed takes a whole number", "'more' is not an option"})
        expect(child.code == 2 && lines == 7 && strstr(ERR(child), said), "'%s' in %d lines: %s", said, lines,
               ERR(child));
}

TEST(option_sizes) {
    const std::tuple<const char*, int64_t> sizes[] = {{"24G", 24ll << 30}, {"24GB", 24ll << 30}, {"24GiB", 24ll << 30},
                                                      {"1.5g", 3ll << 29}, {"800M", 800 << 20},  {"1k", 1024},
                                                      {"2T", 2ll << 40}};
    const char* const none[] = {"24GB!", "24",   "",      "G",    "-1G",  "nanG", "0G",
                                "infT",  "24Gi", "0x10G", "1e9T", "24 G", "0.01 "};
    const Option* memory = option_find("memory");
    Options o;
    for (const auto& [text, want] : sizes)
        expect(option_set(memory, &o, text, error) && o.memory == want, "%s is %lld", text, o.memory);
    for (const char* text : none) {
        o.memory = 0;
        expect(!option_set(memory, &o, text, error) && o.memory == 0, "%s is %lld", text, o.memory);
    }
}
