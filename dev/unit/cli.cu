// Tests of the command line: what runs, what is refused and how, same bits (cli.h says how they run it).
#include "cli.h"

TEST(cli_run) {
    static Losses losses;
    const char* work = work_folder();
    const char* run = joined(work, "deep/run");
    run_well(child, SHAPE " --data %s/text.txt --run %s --batch 4 --steps 60 --sample-tokens 20 --prompt=fox", work,
             run);
    expect(child.text[1].empty(), "stderr: %s", ERR(child));
    for (const char* words : {"\n val ", "\nval ", "bits per byte", "\nsample ---", "\nfox", "\nsave ", "\nstep ",
                              "eta", "memory ", "--sample \"...\" --model"}) {
        expect(words[1] == ' ' || strstr(OUT(child), words), "the output has no '%s'", words + (words[0] == '\n'));
    }
    const Json* config = json_read(joined(run, "config.json"), error);
    expect(config && strcmp(json_string(config, "layers", ""), "1") == 0, "config.json");
    const char* text = contents(run, "log.txt");
    expect(text && strcmp(text, OUT(child)) == 0, "log.txt is not what the terminal showed");
    const char* checkpoint = checkpoint_name(run, 60);
    for (const char* name : {"model.safetensors", "optimizer.safetensors", "config.json", "state.json"})
        expect(exists(checkpoint, name), "%s/%s is not there", checkpoint, name);
    expect(checkpoint_verify(checkpoint, false, error), "%s", error);
    read_losses(test, run, &losses);
    expect(losses.lines == 60, "%d training lines", losses.lines);
    double first = atof(losses.text[1]), last = atof(losses.text[60]);
    expect(first > 5.4 && first < 5.7 && last < first - 1.5, "the loss goes from %g to %g", first, last);
    note(test, "loss %.3f to %.3f", first, last);
}

// Any number of steps comes to its end: after the tenth the clock begins anew.
FOLDER_TEST(cli_end_is_told) {
    for (int steps : {0, 1, 9, 10, 11}) {
        run_well(
            child,
            "--layers 1 --channels 64 --seq 16 --batch 1 --sample-every 0 --data %s/text.txt --run %s/%d --steps %d",
            work, work, steps, steps);
        expect(strstr(OUT(child), "\ndone  "), "%d steps: %s", steps, OUT(child));
    }
}

// With no --data it is the built-in text; with no --run, the folder is runs/DATE_TIME_MODEL where the command was
// typed.
FOLDER_TEST(cli_default_folder) {
    Child child = new_child(false, work);
    train_as(&child, SHAPE " " QUICK " --steps 1");
    expect(strstr(OUT(child), "built-in text"), "the data is not named");
    const char* name = strstr(OUT(child), "runs/2");
    char run[PATH_MAX] = "";
    expect(name && sscanf(name, "%255s", run) == 1 && exists(work, run), "'%s' is not there", run);
    // Files that were named from there are found from elsewhere too, and are no change when they are named again.
    write_text(work, "prompts", "The");
    train_as(&child, SHAPE " " QUICK " --steps 1 --data text.txt --prompt-file prompts --run here");
    train_well("--resume %s/here --steps 2 --prompt-file %s/prompts", work, work);
    train_as(&child, "--resume here --steps 3 --data text.txt --prompt-file prompts");
    expect(strstr(OUT(child), "changed  --steps 3 (was 2)\n"), "%s", OUT(child));
    train_as(&child, "--resume here --steps 4 --prompt fox --sample-every 1");  // instead of the file of before
    expect(strstr(OUT(child), "\nfox"), "%s", OUT(child));
}

// Lion's steps are as long as its learning rate: without --lr it is not AdamW's.
FOLDER_TEST(cli_usual_learning_rates) {
    const char* const rates[][2] = {{"--preset adamw16", "schedule lr 0.003, cosine"},
                                    {"--rule lion --m soft8", "schedule lr 0.0006, usual for lion, cosine"},
                                    {"--rule lion --m soft8 --lr 0.003", "schedule lr 0.003, cosine"}};
    for (const auto& rate : rates) {
        run_train(lr, SHAPE " --data %s/text.txt --run %s/run --steps 3 --dry-run %s", work, work, rate[0]);
        expect(strstr(OUT(lr), rate[1]), "%s: %s", rate[0], OUT(lr));
    }
}

// A model's config.json says the type of its weights, float32 where they are of several.
FOLDER_TEST(cli_dtype) {
    for (const char* options : {"", " --override ln*:weights=fp32", " --override wte:weights=fp32"}) {
        train_well(BRIEF "/run --steps 1 --weights bf16:sr%s", work, work, options);
        const char* text = contents(work, "run/step_00000001/config.json");
        const char* want = *options ? "\"dtype\": \"float32\"" : "\"dtype\": \"bfloat16\"";
        expect(text && strstr(text, want), "%s: no %s in %s", options, want, text);
        remove_tree(joined(work, "run"));
    }
}

FOLDER_TEST(cli_nothing_but_talk) {
    run_well(plan, SHAPE " --data %s/text.txt --run %s/run --steps 3 --dry-run", work, work);
    expect(strstr(OUT(plan), "memory "), "--dry-run prints no plan");
    expect(!exists(work, "run"), "--dry-run leaves a folder");
    train_well(BRIEF "/run --steps 1", work, work);
    const Json* config = json_read(joined(work, "run/config.json"), error);
    run_well(help, "--help");
    int named = 0;
    for (const Json* option = config ? config->child : nullptr; option; option = option->next, named++) {
        expect(strstr(OUT(help), formatted("  --%s ", option->key)), "--help does not list %s", option->key);
    }
    expect(named > 40, "config.json holds %d options", named);
    for (const char* flag : {"--dry-run", "--list-formats", "--list-presets", "--help"})
        expect(strstr(OUT(help), flag), "--help does not list %s", flag);
    run_well(formats, "--list-formats");
    run_well(presets, "--list-presets");
    expect(strstr(OUT(formats), "bf16:sr"), "--list-formats");
    expect(strstr(OUT(presets), "adamw32"), "--list-presets");
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
    {ALL, "batch 4", "unknown option batch", "type --batch B"},
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
    {ALL, "--lr 0x10", "--lr", "0x10"},
    {ALL, "--prompt --dry-run", "--prompt needs a value", "--prompt=--dry-run"},
    {ALL, "--prompt --steps=3", "--prompt needs a value", "--prompt=--steps=3"},
    {ALL, "--prompt \xff", "--prompt", "UTF-8"},
    {ALL, "--data=", "--data ''", "leave it out"},
    {ALL, "--schedule wsd --decay-fraction 0.5 --warmup 3 --steps 4", "--warmup 3", "type --warmup 2"},
    {ALL, "--steps", "--steps", "needs a value"},
    {ALL, "--dry-run=yes", "--dry-run", "no value"},
    {ALL, "--schedule cosin", "--schedule", "cosine"},
    {ALL, "--on-nonfinite ignore", "--on-nonfinite", "skip|stop"},
    {ALL, "--fp8-grads e5m2", "--fp8-grads e5m2 goes with --matmul fp8", "leave --fp8-grads out, or type both"},
    {ALL, "--matmul fp8 --seq 20 --batch 1 --tokens-per-step 20", "are 20 rows", "--seq 16"},
    {ALL, "--head fp8", "--head fp8 goes with --matmul fp8", "or type both"},
    {ALL, "--kept-blocks 2", "--kept-blocks 2 goes with --recompute block", "or type both"},
    {ALL, "--matmul fp8 --head fp8 --logit-rows 20", "--logit-rows is 20", "type --logit-rows 32"},
    {ALL, "--nesterov off", "goes with --rule muon, normuon, rmnp or normuon-lite", "leave --nesterov out"},
    {ALL, "--release on --clip 0 --seq 32 --batch 2 --tokens-per-step 128", "several micro-batches",
     "type --release off, or --tokens-per-step 64"},
    {ALL, "--comm bf16", "unknown option --comm", "leave --comm out: --grads bf16"},
    {ALL, "--data-format nanogpt", "--data-format nanogpt was removed", "--from-nanogpt FOLDER"},
    {ALL, "--rank-basis bf16", "unknown option --rank-basis", "galore keeps its directions in fp32"},
    {ALL, "--decay-fraction 0.5", "--decay-fraction 0.5 goes with --schedule wsd", "leave --decay-fraction out"},
    {ALL, "--schedule constant --final-lr 0.5", "goes with --schedule cosine, linear or wsd", "leave --final-lr out"},
    {ALL, "--override *.bias:rule=lion --momentum 0.5", "--momentum 0.5 goes with --rule muon", "leave --momentum out"},
    {ALL, "--device tpu", "--device", "auto|gpu|cpu"},
    {ALL, "--device gpu", "--device gpu", "--device cpu, or --dry-run --memory 24G"},
    {ALL, "--matmul bf16", "--matmul bf16", "fp32"},
    {ALL, "--preset adamw33", "adamw33", "adamw32"},
    {ALL, "--weights bf16:ef --m e4m3:sr --override wte:m=de4", "m \"de4/128\" has 4 bits", "type m=e4m3:sr, or w"},
    {ALL, "--m de4 --override wte:weights=e4m3:ef", "--override: weights \"e4m3:ef\"", "or weights=e4m3:sr"},
    {ALL, "--preset adamw4 --override *.bias:weights=bf16:ef", "--override: weights \"bf16:ef\"", "weights=bf16:sr"},
    {ALL, "--override none;wte:lr=2", "none", "stands alone"},
    {ALL, "--override wte:lr=2;wqe:lr=3", "\"wqe\"", "wte, wpe, ln*"},
    {ALL, "--override wte|*.bais|ln*:lr=2", "\"*.bais\"", "wte, wpe, ln*"},
    {ALL, "--override ****************************************z:m=bf16", "*z\"", "wte, wpe, ln*"},
    {ALL, "--grads bf16", "--grads bf16", "--grads fp32"},
    {ALL, "--warmup 9 --steps 4", "--warmup 9", "--warmup 4"},
    {ALL, "--lr 0", "--lr 0 leaves every weight as it is", "leave --lr out"},
    {ALL, "--lr 1e-50", "--lr 1e-50 leaves every weight as it is", "leave --lr out"},
    {NOTHING, "--prompt-file @/p", "--prompt-file alone would train", "type --sample '' --model DIR"},
    {ALL, "--model GPT2", "'GPT2' is not known", "did you mean gpt2?"},
    {ALL, "--model openai-community/gpt2", "--model openai-community/gpt2", "hf download openai-community/gpt2"},
    {ALL, "--preset adamw8bit", "adamw8bit", "did you mean adamw8?"},
    {ALL, "--tokens-per-step 100", "--tokens-per-step 100", "--tokens-per-step 64"},
    {ALL, "--tokens-per-step 192 --batch 4", "--tokens-per-step 192", "--batch 3"},
    {ALL, "--channels 256 --heads 1", "256", "--heads 4"},
    {ALL, "--channels 100 --heads 1", "100", "--channels 128"},
    {ALL, "--channels 192 --heads 5", "192", "--heads 3"},
    {ALL, "--layers 256 --channels 12288 --heads 192 --seq 4096 --batch 4", "--batch", "smaller --model"},
    {DATA_AND_RUN, "--model gpt3", "gpt3", "gpt2"},
    {NOTHING, "--sample hello", "--sample", "--model"},
    {NOTHING, "--eval hellaswag", "--eval", "type --sample-every N and --eval-every N"},
    {ALL, "--eval a.eval --model @", "--eval trains nothing without --eval-every",
     "leave --eval or --data out, or type --eval-every N"},
    {ALL, "--eval-out a.jsonl", "--eval-out is for the scores of an --eval", "type --eval FILE --eval-every N"},
    {NOTHING, "--sample a --model @ --eval hellaswag", "--sample does one thing", "leave one of them out"},
    {NOTHING, "--sample a --model @ --dry-run", "--dry-run", "leave one of them out"},
    {NOTHING, "--fit 24G --gpus 8", "--fit does one thing, to which --gpus", "leave one of them out"},
    {NOTHING, "--fit 24G --memory 24G", "--memory", "leave one of them out"},
    {ALL, "--dry-run --prompt-file @/nowhere", "--prompt-file: cannot open", "name a file of prompts"},
    {ALL, "--dry-run --eval none --eval-every 1", "there is no data/eval/256-", "make it with"},
    {NOTHING, "--sample a --model @ --steps 9", "--sample does one thing, to which --steps", "leave one of them out"},
    {NOTHING, "--sample a --model @ --prompt b", "--sample does one thing, to which --prompt", "leave one of them"},
    {ALL, "--prompt b --prompt-file @/p", "--prompt-file does one thing, to which --prompt", "leave one of them out"},
    {ALL, "--eval a.b --eval-every 1", "/a.b.eval; make it", "prepare.py --eval NAME=FILE.jsonl, or type"},
    {NOTHING, "--sample a --model @ --prompt-file p", "--sample and --prompt-file both", "type --sample ''"},
    {NOTHING, "--fit 24GB!", "'24GB!'", "type --fit 24G"},
    {NOTHING, "--memory 24", "'24'", "type --memory 24G"},
    {NOTHING, "--memory 24G", "--memory plans for one GPU", "type --dry-run"},
    {NOTHING, "--memory 24G --dry-run --device cpu", "--memory plans", "--device cpu"},
    {NOTHING, "--fit 24G --batch 8", "--fit does one thing, to which --batch", "leave one of them out"},
    {NOTHING, "--fit 24G --preset adamw33", "adamw33", "adamw32"},
    {NOTHING, "--fit 24G --preset galore8 --offload states", "--fit lists nothing: the rule galore",
     "type --offload none"},
    {NOTHING, "--fit 24G --release on", "--fit lists nothing: --clip 1", "type --clip-by last"},
    {NOTHING, "--fit 24G --head fp8", "--fit lists nothing: --head fp8 goes with", "leave --head out"},
    {ALL, "--eval-every 1", "--eval names nothing", "type names or paths"},
    {ALL, "--eval , --eval-every 1", "--eval names nothing", "--eval-every 0"},
    {ALL, "--eval @/ --eval-every 1", "--eval: cannot read @/", "type the path of an evaluation file"},
    {NOTHING, "--sample hello --model @/nowhere", "nowhere", "a folder's path"},
};

// loader.cu and corpus.cu have more files that are refused.
static const Bad BAD_DATA[] = {
    {ALL, "--prompt-file @/missing.txt", "--prompt-file: cannot open @/missing.txt", "name a file of prompts"},
    {ALL, "--prompt-file @/folder", "not a regular file", "name a file of prompts"},
    {ALL, "--prompt-file @/empty.txt", "--prompt-file @/empty.txt has no prompt", "write one a line"},
    {ALL, "--prompt-file @/mark.txt", "--prompt-file @/mark.txt has no prompt", "write one a line"},
    {ALL, "--prompt-file @/good.bin", "--prompt-file @/good.bin is no UTF-8 text", "write prompts as UTF-8"},
    {ALL, "--prompt-file @/nul.txt", "--prompt-file @/nul.txt is no UTF-8 text", "write prompts as UTF-8"},
    {ALL, "--prompt-file @/latin.txt", "--prompt-file @/latin.txt is no UTF-8 text", "write prompts as UTF-8"},
    {ALL, "--prompt-file @/many.txt --samples 1000000", "--samples 1000000 for each line of @/many.txt are over 2^31",
     "type --samples 976128"},
    {ALL, "--data @/missing.txt", "--data", "missing.txt"},
    {ALL, "--data @/folder", "--data", "prepare.py"},
    {ALL, "--data @/s3", "@/s3/meta.json: it is not a regular file", "prepare the folder again"},
    {ALL, "--data @/s4", "cannot open @/s4/train_0.bin: No such file", "name files with text or tokens in them"},
    {ALL, "--data @/token.bin --val @/good.bin", "token.bin", "token 300"},
    {ALL, "--data @/good.bin --val @/missing.bin", "--val", "missing.bin"},
    {ALL, "--data @/good.bin --val @/short.txt", "--val", "short.txt"},
    {ALL, "--data @/good.bin --val @/text.txt", "text.txt is read as bytes", "prepare both alike"},
};

static const Bad BAD_FOLDERS[] = {
    {ALL, "--run @/text.txt/run", "--run", "text.txt"},
    {ALL, "--run @/text.txt", "--run", "text.txt"},
    {ALL, "--run @/used", "--run", "--resume auto"},
    {ALL, "--run @/nowhere_link", "a link of that name leads to no folder", "name another one"},
    {ALL, "--resume @/nowhere", "--resume", "nowhere"},
    {ALL, "--resume @/folder", "--resume", "folder"},
    {NOTHING, "--resume auto", "--resume auto", "--run"},
    {DATA_AND_RUN, "--model @/llama", "--model", "llama"},
    {DATA_AND_RUN, "--model @/relu", "--model", "relu"},
    {DATA_AND_RUN, "--model @/folder", "config.json: No such file", "name another folder"},
    {DATA_AND_RUN, "--model @/broken", "--model", "JSON"},
    {DATA_AND_RUN, "--model @/begun", "--model @/begun is a run without a whole checkpoint", "let it save one"},
    {NOTHING, "--sample a --model @/begun", "--model @/begun is a run without a whole checkpoint", "let it save one"},
    {DATA_AND_RUN, "--model @/text", "has n_layer \"1\"", "whole numbers from 1 to 256"},
    {DATA_AND_RUN, "--model @/twice", "h.1.", "give a whole model"},
    {NOTHING, "--sample a --model @/twice", "h.1.", "give a whole model"},
    {NOTHING, "--sample a --model @/pointer", "is the pointer of Git LFS", "fetch the model again"},
    {DATA_AND_RUN, "--model @/no_weights", "no_weights/model.safetensors", ""},
    {DATA_AND_RUN, "--model @/missing", "missing/model.safetensors has no tensor h.1.", "give a whole model"},
    {DATA_AND_RUN, "--model @/truncated", "truncated/model.safetensors", "fetch the model again"},
    {DATA_AND_RUN, "--model @/other_shape", "is BF16 of shape [32, 64]",
     "give a model with F32, BF16 or F16 of [33, 64]"},
    {DATA_AND_RUN, "--model @/used/step_00000001 --seq 64", "--seq 64", "--seq 32"},
    {DATA_AND_RUN, "--model @/used/step_00000001 --layers 2", "--model", "--layers"},
    {DATA_AND_RUN, "--model @/used/step_00000001 --data @/good.bin --seq 32", "is a model of bytes", "by --data"},
    {NOTHING, "--sample a --model @/truncated", "truncated/model.safetensors", ""},
};

static void make_bad_data(const char* work) {
    write_text(work, "empty.txt", "");
    write_text(work, "short.txt", "too short");
    write_text(work, "mark.txt", "\xEF\xBB\xBF\r\n\n");
    char many[2200];
    memset(many, '\n', sizeof(many)), many[0] = 'a';
    write_bytes(work, "many.txt", many, sizeof(many));
    write_text(work, "latin.txt", "caf\xE9\n");
    write_bytes(work, "nul.txt", "a\0b\n", 4);
    write_text(work, "meta.json", "{\"vocabulary\": 300}");
    write_shard(work, "good.bin", 500, 299);
    write_shard(work, "token.bin", 65, 300);
    mkdir(joined(work, "folder"), 0755);
    for (const char* name : {"s3", "s4"}) {
        const char* folder = joined(work, name);
        mkdir(folder, 0755);
        write_shard(folder, "val_0.bin", 500, 1);
        if (name[1] != '4') write_shard(folder, "train_0.bin", 500, 1);
    }
    if (mkdir(joined(work, "s3/meta.json"), 0755) != 0) abort();
    if (symlink("nowhere", joined(work, "s4/train_0.bin")) != 0) abort();
}

static void make_bad_models(Test* test, const char* work) {
    train_well(BRIEF "/used --steps 1", work, work);
    const char* from = joined(work, "used/step_00000001");
    make_model(work, "llama", from, "\"model_type\": \"gpt2\"", "\"model_type\": \"llama\"", 1);
    make_model(work, "relu", from, "gelu_new", "relu", 1);
    make_model(work, "broken", from, "\"n_layer\":", "n_layer:", 1);
    make_model(work, "no_weights", from, "gelu_new", "gelu_new", 0);
    make_model(work, "missing", from, "\"n_layer\": 1", "\"n_layer\": 2", 1);
    make_model(work, "truncated", from, "gelu_new", "gelu_new", 0.7);
    make_model(work, "text", from, "\"n_layer\": 1", "\"n_layer\": \"1\"", 1);
    make_model(work, "twice", from, "\"n_layer\": 1", "\"n_layer\": 1, \"n_layer\": 2", 1);
    make_model(work, "pointer", from, "gelu_new", "gelu_new", 0);
    write_text(joined(work, "pointer"), "model.safetensors", "version https://git-lfs.github.com/spec/v1\noid x\n");
    mkdir(joined(work, "begun"), 0755);
    write_text(work, "begun/config.json", "{}"), write_text(work, "begun/log.jsonl", "");
    if (symlink("nowhere", joined(work, "nowhere_link")) != 0) abort();
    make_model(work, "other_shape", from, "\"n_positions\": 32", "\"n_positions\": 33", 1);
}

static void check_bad(Test* test, const char* work, const Bad* cases, int count) {
    for (int i = 0; i < count; i++) {
        const Bad* bad = &cases[i];
        const char* before = formatted("--batch 2 --steps 3 --val-every 0 --data %s/text.txt --run %s/run %s", work,
                                       work, bad->before == ALL ? SHAPE : "");
        refused(bad->arguments, replaced(bad->needle, "@", work), replaced(bad->needle2, "@", work), "%s %s",
                bad->before == NOTHING ? "" : before, replaced(bad->arguments, "@", work));
        // A wrong token is found when training comes to it; everything else before there is anything to leave behind.
        const char* run = joined(work, "run");
        bool late = strstr(bad->needle2, "token 300") != nullptr;
        expect(late || !exists(work, "run"), "%s: leaves a run folder", bad->arguments);
        remove_tree(run);
    }
    note(test, "%d cases", count);
}

// cli_advice.cu uses the arguments of rows that name no file, which stand after all others. NULL is behind the last.
const char* bad_options(int index) {
    for (const Bad& bad : BAD_OPTIONS) {
        if (bad.before == ALL && !strchr(bad.arguments, '@') && index-- == 0) return bad.arguments;
    }
    return nullptr;
}

FOLDER_TEST(cli_bad_options) {
    check_bad(test, work, BAD_OPTIONS, sizeof(BAD_OPTIONS) / sizeof(Bad));
}

FOLDER_TEST(cli_bad_data) {
    make_bad_data(work);
    check_bad(test, work, BAD_DATA, sizeof(BAD_DATA) / sizeof(Bad));
}

FOLDER_TEST(cli_bad_folders) {
    train_well(BRIEF "/own --steps 1", work, work);
    refused("--model", "would train on nibble's own source text", "type --data PATH", "--model %s/own", work);
    make_bad_data(work);
    make_bad_models(test, work);
    check_bad(test, work, BAD_FOLDERS, sizeof(BAD_FOLDERS) / sizeof(Bad));
}

// A disk may take no more than so many bytes a file: 0 (nothing at all), some of the log, or some of a checkpoint.
FOLDER_TEST(cli_full_disk) {
    for (int64_t limit : {0, 1500, 3000, 100000}) {
        const char* run = formatted("%s/full_%d", work, (int)limit);
        const char* what = formatted("files of at most %d bytes", (int)limit);
        Child child = new_child();
        child.file_limit = limit;
        start(&child, BRIEF " --steps 40 --save-every 0", work, run);
        finish(&child);
        expect_error(test, &child, what, run, "");
        expect(checkpoints(run) == 0, "%s: a checkpoint was made", what);
        expect(!exists(run, "step_00000040.tmp"), "%s: half a checkpoint is left", what);
        // With room again the run begins anew, and half a line of its log does not stay.
        static Losses losses;
        train_well(BRIEF " --steps 40 --resume auto", work, run);
        read_losses(test, run, &losses);
        expect(losses.last == 40, "%s: resumed to step %d", what, losses.last);
    }
}

// The banner names what the documents advise against, with what to type.
TEST(cli_advises_against) {
    const std::tuple<const char*, bool> cases[] = {{"--preset adamw4d --beta2 0.999", true},
                                                   {"--v soft8/32@dq8 --beta2 0.96", true},
                                                   {"--override wte:v=sqrt4/32@dq8 --beta2 0.999", true},
                                                   {"--preset adamw4d", false},
                                                   {"--preset adamw4l --beta2 0.999", false}};
    for (const auto& [words, advises] : cases) {
        run_well(plan, "--dry-run --device cpu %s", words);
        const char* notice = strstr(OUT(plan), " notice   a v with @dq8 and --beta2 0.9");
        expect((notice && strstr(notice, "type --beta2 0.95, or a v such as udyn8")) == advises, "%s: %s", words,
               OUT(plan));
    }
}

// For a GPU that is not here, the batch that --fit lists fits the plan of --memory, and one more does not.
FOLDER_TEST(cli_fit) {
    const char* const shape = "--layers 8 --channels 512 --heads 8 --seq 512 --preset adamw8";
    for (const char* recompute : {"none", "gelu", "block"}) {
        long long batch = 0;
        run_well(fit, "--fit 1G --model gpt2 --data %s/text.txt %s --recompute %s", work, shape, recompute);
        const char *row = strstr(OUT(fit), "adamw8 "), *rows = row ? strstr(row, "\n") : nullptr;
        expect(row && rows && !rows[1], "not one row: %s", OUT(fit));
        expect(row && sscanf(row, "%*s %*s %lld", &batch) == 1 && batch > 1, "no batch: %s", OUT(fit));
        for (int more = 0; more < 2; more++) {
            run_well(plan,
                     "--dry-run --memory 1G --model gpt2 --data %s/text.txt %s --recompute %s --grads fp32 --steps 1 "
                     "--release off --batch %lld --tokens-per-step %lld",
                     work, shape, recompute, batch + more, 512 * (batch + more));
            const char* notice = strstr(OUT(plan), " notice   --batch ");
            expect((notice != nullptr) == (more == 1), "%s, batch %lld: %s", recompute, batch + more, OUT(plan));
        }
    }
    // The batch that a plan says to type fits, although it makes several micro-batches a step.
    for (int size = 900; size < 1600; size += 50) {
        long long batch = 64;
        for (int typed = 0; typed < 2; typed++) {
            run_well(plan,
                     "--dry-run --memory %dM --model gpt2 --data %s/text.txt %s --batch %lld --tokens-per-step %d",
                     size, work, shape, batch, 64 * 512);
            const char* type = strstr(OUT(plan), "; type --batch ");
            expect((type != nullptr) == (typed == 0), "%d MiB, batch %lld: %s", size, batch, OUT(plan));
            if (type) sscanf(type, "; type --batch %lld", &batch);
        }
    }
    // Presets that do not go with another option are left out; released gradients take turns.
    run_well(rule, "--fit 24G --model gpt2 --recompute none --rule muon");
    expect(strstr(OUT(rule), "adamw8 ") && !strstr(OUT(rule), "adamw8e ") && strstr(OUT(rule), "muon4 "), "%s",
           OUT(rule));
    double gib[2] = {0.0, 0.0};
    for (int released = 0; released < 2; released++) {
        run_train(fit, "--fit 24G --model gpt2 --recompute none --preset adamw8 --clip-by last --release %s",
                  released ? "on" : "off");
        const char* row = strstr(OUT(fit), "adamw8 ");
        expect(row && sscanf(row, "%*s %*s %*s %*s %*s %lf", &gib[released]) == 1, "no row: %s", OUT(fit));
    }
    expect(gib[1] > 0.0 && gib[1] < 0.7 * gib[0], "gradients take %g GiB, released %g", gib[0], gib[1]);
    run_well(fp8, "--fit 24G --model gpt2 --preset adamw8 --recompute none --matmul fp8 --head fp8");
    expect(strstr(OUT(fp8), "adamw8 "), "no row: %s", OUT(fp8));
    run_well(all, "--fit 0.001G --model gpt2");
    int none = 0, lines = 0;
    for (const char* at = OUT(all); (at = strstr(at, "    - ")) != nullptr; at++) none++;
    for (const char* at = OUT(all); (at = strchr(at, '\n')) != nullptr; at++) lines++;
    expect(none > 30 && lines == none + 2, "%d of %d rows are without a batch: %s", none, lines - 2, OUT(all));
}

// The plan of --memory is the one of the card itself, kind by kind. Only the driver's share is assumed there, and on a
// card it counts what tests beside this one hold. The sizes of some scratch buffers go by the GPU, so a Hopper card of
// 132 multiprocessors is wanted.
TEST(cli_plan_of_a_card_gpu) {
    if (getenv("NIBBLE_SANITIZE")) skip("processes of its own");
    const char* const options[] = {"--matmul fp8 --head fp8", "--preset muon8 --recompute block",
                                   "--preset adamw4l --matmul bf16 --recompute gelu"};
    for (const char* more : options) {
        double gib[2][6];
        for (int real = 0; real < 2; real++) {
            Child child = new_child(real == 1);
            train_as(
                &child,
                "--dry-run --model gpt2 --data %s/text.txt --steps 1 --batch 8 --tokens-per-step 8192 --release off %s "
                "%s",
                work_folder(), more, real ? "--device gpu" : "--memory 70G");
            const char *line = strstr(OUT(child), " memory "), *device = strstr(OUT(child), " device ");
            if (real && (!device || (!strstr(device, "H100 80GB HBM3") && !strstr(device, "NVIDIA H200"))))
                skip("needs an H100 or H200 with 132 multiprocessors");
            double* at = gib[real];
            expect(line &&
                       sscanf(line, " memory weights %lf states %lf gradients %lf activations %lf other %lf driver %lf",
                              at, at + 1, at + 2, at + 3, at + 4, at + 5) == 6,
                   "no plan: %s", OUT(child));
        }
        for (int i = 0; i < 5; i++)
            expect(gib[0][i] == gib[1][i], "%s: kind %d: %g, %g", more, i, gib[0][i], gib[1][i]);
    }
}

// More than any GPU has: the largest batch that fits is named.
TEST(cli_too_little_memory_gpu) {
    if (getenv("NIBBLE_SANITIZE")) skip("a process of its own");
    const char* work = work_folder();
    Child child = new_child(true);
    start(&child, "--data %s/text.txt --run %s/run --model gpt2-xl --seq 1024 --batch 8192 --device gpu", work, work);
    finish(&child);
    expect_error(test, &child, "--batch 8192", "--batch 8192 needs", "type --batch ");
    expect(!exists(work, "run"), "a run folder is left");
}

// The same command has the same bits again, with another number of threads too.
FOLDER_TEST(cli_same_bits) {
    const char* run[2];
    for (int i = 0; i < 2; i++) {
        run[i] = formatted("%s/run_%d", work, i);
        Child child = new_child();
        child.threads = i == 1 ? 3 : 1;
        train_as(&child, BRIEF " --steps 20 --layers 2 --channels 128 --heads 2", work, run[i]);
    }
    expect_equal_runs(test, run[0], run[1], 20);
    run_train(other, BRIEF "/other --steps 2 --seed 2", work, work);
    static Losses first, second;
    read_losses(test, run[0], &first), read_losses(test, joined(work, "other"), &second);
    expect(strcmp(first.text[1], second.text[1]) != 0, "--seed changes nothing");
}

// A pattern of shards, then their folder, as data/prepare.py writes one.
TEST(cli_shards) {
    const char* work = work_folder();
    write_text(work, "meta.json", "{\"vocabulary\": 300}");
    write_shard(work, "train_000000.bin", 3000, 299), write_shard(work, "train_000001.bin", 1000, 3);
    write_shard(work, "val_000000.bin", 400, 3);
    for (const char* data : {"/train_*.bin", ""}) {
        const char* run = formatted("%s/run%zu", work, strlen(data));
        run_well(child, SHAPE " " QUICK " --data %s%s --run %s --steps 2 --batch 4", work, data, run);
        expect(strstr(OUT(child), "2 files") && strstr(OUT(child), "vocabulary 300"), "the banner: %s", OUT(child));
        static Losses losses;
        read_losses(test, run, &losses);
        const double loss = atof(losses.text[1]);
        expect(loss > 5.5 && loss < 5.9, "%s: log(300) is 5.70, the first loss is %g", data, loss);
    }
}

FOLDER_TEST(cli_sample) {
    char* text[6];
    train_well(BRIEF "/run --steps 30", work, work);
    const char* options[6] = {
        "--seed 5",          "--seed 5", "--seed 6", "--temperature 0 --seed 5", "--temperature 0 --seed 6",
        "--top-k 1 --seed 7"};
    for (int i = 0; i < 6; i++) {
        run_well(child, "--sample ab --model %s/run/step_00000030 --device cpu --sample-tokens 40 %s", work,
                 options[i]);
        const char* rest = strchr(ERR(child), '\n');
        expect(strncmp(ERR(child), "train: drew 39 tokens in ", 25) == 0 && rest && !rest[1], "stderr: %s", ERR(child));
        expect(strncmp(OUT(child), "ab", 2) == 0 && child.text[0].size() > 40, "%s gives '%s'", options[i], OUT(child));
        text[i] = strdup(OUT(child));
    }
    expect(strcmp(text[0], text[1]) == 0, "the same seed, another text");
    expect(strcmp(text[0], text[2]) != 0, "another seed, the same text");
    expect(strcmp(text[3], text[4]) == 0 && strcmp(text[3], text[5]) == 0, "--temperature 0 depends on the seed");
    write_text(work, "many", "a\na\na\na\na\na\na\na\na\na\na\na\na\na\na\na\n");
    refused("16 million samples", "16000000 samples", "type fewer --samples",
            "--sample= --prompt-file %s/many --samples 1000000 --model %s/run --device cpu", work, work);
}
