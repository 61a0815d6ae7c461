// Tests of the command line: a run that stops, is stopped, resumed, converted or damaged (cli.h says how they run it).
#include "../../data/run_folder.h"
#include "cli.h"

// Returns how many steps the newest checkpoint says were skipped, -1 if it does not say.
static long long skipped_steps(const char* run) {
    char folder[PATH_MAX];
    Json* state = checkpoint_newest(run, false, folder, sizeof(folder));
    return state ? json_int(state, "skipped", -1) : -1;
}

static void expect_skipped_steps(Test* test, const char* run, int steps) {
    static Losses losses;
    read_losses(test, run, &losses);
    expect(losses.lines == steps && losses.last == steps, "%d lines up to step %d", losses.lines, losses.last);
    for (int step = 1; step <= steps; step++) {
        const char *want = formatted("\"skipped\": %d, \"nonfinite\": true", step), *log = contents(run, "log.jsonl");
        expect(strcmp(losses.text[step], "null") == 0, "step %d: loss %s", step, losses.text[step]);
        expect(log && strstr(log, want), "step %d: no %s", step, want);
    }
}

// If a model's last weight is the largest bf16, every step has an infinite gradient. A few steps are skipped and change
// nothing, the end of the run says so and fails, the count lives on in the checkpoint, and ten in a row end the run.
FOLDER_TEST(cli_nonfinite) {
    train_well(BRIEF "/used --steps 1", work, work);
    const char *from = joined(work, "used/step_00000001"), *bad = joined(work, "bad");
    const char* run = joined(work, "run");
    make_overflowing_model(work, from);
    const char* common = QUICK " --device cpu --seq 32";
    run_train(skips, "%s --data %s/text.txt --model %s --run %s --steps 3", common, work, bad, run);
    expect_error(test, &skips, "no finite loss", "ended without a finite loss and gradient", "step_00000003");
    expect(strstr(OUT(skips), "norm inf: weights and states stay as they were (2 skipped"),
           "a skipped step is not told: %s", OUT(skips));
    expect(strstr(OUT(skips), "\nskipped  3 of 3 steps"), "the count is not told at the end");
    expect(skipped_steps(run) == 3, "state.json says %lld", skipped_steps(run));
    expect_skipped_steps(test, run, 3);
    expect_equal_files(test, bad, checkpoint_name(run, 3), "model.safetensors");
    refused("no finite loss", "ended without a finite loss and gradient", "step_00000008",
            "--resume %s --steps 8 --device cpu", run);
    expect(skipped_steps(run) == 8, "state.json says %lld", skipped_steps(run));
    expect_skipped_steps(test, run, 8);
    run_train(end, "--resume %s --steps 30 --save-every 1 --device cpu", run);
    expect_error(test, &end, "ten in a row", "the norm of the gradient inf", "10 steps in a row were skipped");
    expect(strncmp(ERR(end), "train: error: step ", 19) == 0, "no step: %s", ERR(end));
    expect(strstr(ERR(end), "step_00000008") && strstr(ERR(end), "--lr"), "%s", ERR(end));
    expect_skipped_steps(test, run, 10);
    refused("--on-nonfinite stop", "step 1: the loss is ", "--lr",
            "%s --data %s/text.txt --model %s --run %s/stop --on-nonfinite stop --steps 9", common, work, bad, work);
}

// Compares a run to the end with the same run in two halves, the first of which had another number of steps, and again
// after its later checkpoint is gone, as after a crash.
static void check_resume(Test* test, const char* options, bool gpu) {
    const char *work = work_folder(), *whole = joined(work, "whole"), *halves = joined(work, "halves");
    const char* device = gpu ? "gpu" : "cpu";
    const char* common = SHAPE " --batch 2 --tokens-per-step 128 --val-every 3 --val-tokens 128 --warmup 2 --keep 9";
    Child child[4];
    for (Child& c : child) c = new_child(gpu);
    train_as(&child[0], "%s --data %s/text.txt --run %s --steps 12 --schedule constant --device %s %s", common, work,
             whole, device, options);
    train_as(&child[1], "%s --data %s/text.txt --run %s --steps 6 --schedule constant --device %s %s", common, work,
             halves, device, options);
    train_as(&child[2], "--run %s --resume auto --steps 12 --device %s", halves, device);
    expect(strstr(OUT(child[2]), "--steps 12 (was 6)"), "the changed option is not listed");
    expect(strstr(OUT(child[2]), "step_00000006, step 6"), "the checkpoint is not named");
    expect(ERR(child[2])[0] == 0, "stderr: %s", ERR(child[2]));
    expect_equal_runs(test, whole, halves, 12);
    // After a crash it goes back to step 6, by the run folder's name alone.
    remove_tree(checkpoint_name(halves, 12));
    train_as(&child[3], "--resume %s --steps 12 --device %s", halves, device);
    // A run that is over has nothing left to do.
    train_as(&child[2], "--resume %s --device %s", halves, device);
    expect_equal_runs(test, whole, halves, 12);
}

TEST_BOTH(cli_resume) {
    if (gpu && getenv("NIBBLE_SANITIZE")) skip("processes of their own");
    check_resume(test, "", gpu);
    check_resume(test, "--weights bf16:sr --m bf16:sr --v bf16:sr", gpu);
    check_resume(test, "--matmul fp8 --head fp8", gpu);
    if (gpu) check_resume(test, "--matmul fp32 --weights fp32", true);
}

// bf16 gradients were chosen for one micro-batch a step and not asked for: two go on in fp32, unless they are asked
// for, which stays.
TEST(cli_resume_micro_batches_gpu) {
    if (getenv("NIBBLE_SANITIZE")) skip("processes of their own");
    const char* work = work_folder();
    Child child[4];
    for (Child& c : child) c = new_child(true);
    train_as(&child[0], SHAPE " --batch 2 --tokens-per-step 64 --warmup 2 --data %s/text.txt --run %s/run --steps 3",
             work, work);
    expect(strstr(OUT(child[0]), "grads bf16"), "%s", OUT(child[0]));
    train_as(&child[1], "--resume %s/run --steps 5 --tokens-per-step 128", work);
    expect(strstr(OUT(child[1]), "grads fp32"), "%s", OUT(child[1]));
    train_as(&child[2], "--resume %s/run --steps 7 --tokens-per-step 128 --grads bf16", work);
    expect(strstr(OUT(child[2]), "grads bf16"), "%s", OUT(child[2]));
    train_as(&child[3], "--resume %s/run --steps 9", work);
    expect(strstr(OUT(child[3]), "grads bf16"), "%s", OUT(child[3]));
}

// A checkpoint half-way, named itself, is taken up in another folder: the run ends in the same bytes, and says nothing
// about it. With cosine every learning rate depends on the number of steps.
static void check_half_way(Test* test, const char* work, const char* name, const char* options, bool gpu) {
    const char *whole = joined(work, name), *again = formatted("%s_again", whole), *device = gpu ? "gpu" : "cpu";
    Child first = new_child(gpu), second = new_child(gpu);
    train_as(&first, BRIEF " --device %s --steps 8 --save-every 4 --keep 9 %s", work, whole, device, options);
    train_as(&second, "--resume %s/step_00000004/ --run %s --device %s", whole, again, device);
    expect(!strstr(OUT(second), " notice "), "%s: %s", options, OUT(second));
    expect_equal_checkpoints(test, whole, again, 8);
}

TEST_BOTH(cli_resume_presets) {
    if (gpu && getenv("NIBBLE_SANITIZE")) skip("processes of their own");
    const char* work = work_folder();
    for_presets(test, [&](const char* name) { check_half_way(test, work, name, formatted("--preset %s", name), gpu); });
}

// A finished run that is resumed with more steps warms up again, since its rate rises, and so does its own resume.
FOLDER_TEST(cli_resume_warms_up) {
    train_well(BRIEF "/run --steps 8 --preset adamw8e", work, work);
    run_well(more, "--resume %s/run --steps 40 --save-every 11 --keep 9", work);
    expect(strstr(OUT(more), "the rate rises from 0.0003 to the schedule's 0.00298"), "%s", OUT(more));
    run_well(again, "--resume %s/run/step_00000011 --run %s/again", work, work);
    expect(!strstr(OUT(again), "the rate rises"), "%s", OUT(again));
    expect_equal_checkpoints(test, joined(work, "run"), joined(work, "again"), 40);
}

// States may move to host memory and back, and steps into the backward pass and out, between a checkpoint and the rest
// of a run, which changes no bit.
static void check_resume_offload(Test* test, const char* formats) {
    const char *work = work_folder(), *whole = joined(work, "whole");
    const char* const goes_on[][2] = {{"host", "--offload states"},
                                      {"released", "--release on"},
                                      {"both", "--offload states --release on"},
                                      {"all", "--offload states,residuals --recompute block"}};
    train_well(BRIEF " --steps 9 --save-every 3 --keep 9 --clip-by last %s", work, whole, formats);
    for (const auto& options : goes_on) {
        const char *again = joined(work, options[0]), *back = formatted("%s_back", again);
        train_well("--resume %s/step_00000003 --run %s --device cpu %s", whole, again, options[1]);
        expect_equal_checkpoints(test, whole, again, 6);
        expect_equal_checkpoints(test, whole, again, 9);
        train_well("--resume %s/step_00000006 --run %s --device cpu --offload none --release off", again, back);
        expect_equal_checkpoints(test, whole, back, 9);
    }
    refused("muon", "--clip-by last: the rule galore", "type --clip-by step",
            "--resume %s --rule galore --m dyn8 --v udyn8 --weights bf16:sr --limit-growth 0", whole);
}

TEST(cli_resume_offload) {
    check_resume_offload(test, "--preset adamw4l");
    check_resume_offload(test, "--preset muon8");
    check_resume_offload(test, "--preset fp8 --matmul fp8");
    check_resume_offload(test, "--rule came --weights lin8:sr --m dyn8 --limit-growth 1.01");
    check_resume_offload(test, "--weights e4m3/tensor+fp32 --m e4m3/tensor --v lin4/rank1");
    check_resume_offload(test, "--weights bf16:sr --m de4/rank1:sr --v udyn8/rank1");
}

// A checkpoint may be a stranger's: it chooses no file that is written, and of those outside its run only data, which
// the banner names. A terminal's escapes in it are shown as '?'.
FOLDER_TEST(cli_resume_paths) {
    const char *run = joined(work, "run"), *inside = joined(run, "prompts"), *link = joined(run, "link");
    train_well(BRIEF " --steps 2 --seed 3", work, run);
    const char *folder = checkpoint_name(run, 2), *outside = joined(work, "text.txt");
    write_text(run, "prompts", "fox\n");
    if (symlink(outside, link) != 0) abort();
    rewrite_state(folder, "\"eval-out\": \"\"", formatted("\"eval-out\": \"%s\"", joined(work, "victim")));
    rewrite_state(folder, "\"prompt\": \"\"", "\"prompt\": \"a\\u001b]0;x\\u0007\\u202e\", \"memory\": \"1\"");
    const char* last = "\"prompt-file\": \"\"";
    for (const char* path : {outside, link, "/etc/passwd", "/nowhere", inside}) {
        const char* next = formatted("\"prompt-file\": \"%s\"", path);
        rewrite_state(folder, last, next);
        last = next;
        if (path == inside) continue;
        refused(path, "is not in its run", formatted("type --prompt-file %s again", path),
                "--resume %s --steps 4 --device cpu", run);
    }
    run_well(child, "--resume %s --steps 3 --device cpu --sample-every 1", run);
    expect(strstr(OUT(child), "\nfox") && strstr(OUT(child), formatted("checkpoint's --data %s\n", outside)), "%s",
           OUT(child));
    expect(strstr(OUT(child), "--eval-out none (was ") && !exists(work, "victim"), "%s", OUT(child));
    rewrite_state(checkpoint_name(run, 3), last, "\"prompt-file\": \"\"");
    run_well(shown, "--resume %s --steps 4 --device cpu --sample-every 1", run);
    expect(strstr(OUT(shown), "a?]0;x??") && !strchr(OUT(shown), 27), "%s", OUT(shown));
    expect(!strchr(contents(run, "log.txt"), 27), "an escape in log.txt");
}

FOLDER_TEST(cli_resume_versions) {
    const char* run = joined(work, "run");
    train_well(BRIEF " --steps 3", work, run);
    const char* folder = checkpoint_name(run, 3);
    rewrite_state(folder, "\"grads\": \"auto\"", "\"grads\": \"bf16\"");
    refused("as saved", "--grads bf16 goes with --matmul bf16", "type --grads fp32",
            "--resume %s --run %s/asked --steps 4 --device cpu", run, work);
    // An option that was removed since: its unused value is passed over, and any other is answered.
    rewrite_state(folder, "\"grads\": \"bf16\"", "\"grads\": \"auto\", \"format\": \"\"");
    train_well("--resume %s --run %s/unused --steps 4 --device cpu", run, work);
    rewrite_state(folder, "\"format\": \"\"", "\"format\": \"my.cuh\"");
    refused("--format", "--resume: the checkpoint has --format my.cuh, which was removed", "optim/formats",
            "--resume %s --run %s/own --steps 4 --device cpu", run, work);
    rewrite_state(folder, "\"version\": 1", "\"version\": 2");
    refused("version 2", "another version of nibble (2)", "resume with that one",
            "--resume %s --run %s/newer --steps 4 --device cpu", run, work);
}

// A run goes on with the overrides that it began with, or without any, as long as it keeps its preset and formats.
// Another preset brings its own overrides unless they were the user's, other formats bring none. Resumed again, it
// stays so.
FOLDER_TEST(cli_resume_overrides) {
    const char *run = joined(work, "run"), *other = joined(work, "other");
    const char* const rows[][4] = {
        {"--preset fp8w8e", "", " override ln*|*.bias|wpe: weights=bf16:ef\n", "notice"},
        {"--preset fp8w8e --override none", "", "weights e4m3:ef", " override"},
        {"--preset fp8w8e --override none", "--override ln*:weights=bf16:ef",
         "weights: e4m3:ef in the checkpoint in 6 tensors, converted to bf16:ef", "notice   m"},
        {"--preset fp8w8e", "--override none", "weights: bf16:ef in the checkpoint in 11 tensors", " override ln*"},
        {"--preset fp8w8e", "--preset int8w4", " override ln*|*.bias: weights=bf16:sr\n", "--override none"},
        {"--preset fp8w8e --override none", "--preset int8w4", "weights=bf16:sr (was none)", "weights=bf16:ef"},
        {"--preset fp8w8e --override wpe:lr=2", "--preset int8w4", "wpe:lr=2 (the run's, not int8w4's)",
         "weights=bf16"},
        {"--preset fp8w8e", "--weights lin8:ef", "--override none (was ln*", " override ln*"},
        {"--preset fp8w8e", "--weights e4m3:ef --m e4m3:sr", " override ln*|*.bias|wpe: weights=bf16:ef\n", "notice"},
        {"--preset fp8w8e", "--override=", " override ln*|*.bias|wpe: weights=bf16:ef\n", "--override"},
        {"--preset fp8w8e", "--override none;", "--override none (was ln*", " override ln*"},
        {"--preset fp8w8e --weights lin8:ef", "--override=", "weights lin8:ef", " override"},
        {"--preset fp8w8e --weights lin8:ef --override ln*|*.bias|wpe:weights=bf16:ef", "--v sqrt8/64",
         " override ln*|*.bias|wpe:weights=bf16:ef\n", "--override none"},
        {"--preset fp8w8e --override none;", "--preset int8w4", "weights=bf16:sr (was none)", "the run's"},
        {"--preset fp8w8e --override wpe:lr=2", "--preset int8w4 --weights bf16:sr", " override wpe:lr=2\n",
         "the run's"},
        {"--preset int8w4 --override wpe:lr=2", "--override wpe:lr=2", " override wpe:lr=2\n", "the run's"},
        {"--rule muon", "", " override wte|wpe|ln*|*.bias: rule=adamw m=fp32 v=fp32\n", "notice"},
        {"--preset muon4 --override wpe:lr=2", "", "v=lin4/64; wpe:lr=2\n", "notice"},
        {"--preset adamw8", "--rule muon", " override wte|wpe|ln*|*.bias: rule=adamw m=dyn8/256 v=udyn8/256\n",
         "the run's"},
        {"--preset adamw8", "--preset fp8w8e", "--override ln*|*.bias|wpe: weights=bf16:ef (was none)",
         "--override none"}};
    for (const auto& [begun, resumed, shows, lacks] : rows) {
        train_well(BRIEF " --steps 3 %s", work, run, begun);
        run_well(child, "--resume %s --run %s --steps 5 --device cpu %s", run, other, resumed);
        expect(strstr(OUT(child), shows), "%s, %s: no '%s' in %s", begun, resumed, shows, OUT(child));
        expect(!strstr(OUT(child), lacks), "%s, %s: '%s' in %s", begun, resumed, lacks, OUT(child));
        const char* at = strstr(OUT(child), "\n override ");
        const int length = at ? (int)strcspn(at + 1, "\n") + 2 : 0;
        const char* shown = formatted("%.*s", length, at ? at : "");
        run_well(again, "--resume %s --steps 6 --device cpu", other);
        expect(strstr(OUT(again), shown) && !strstr(OUT(again), "--override"), "%s, %s: again %s", begun, resumed,
               OUT(again));
        expect(length > 0 || !strstr(OUT(again), " override"), "%s, %s: again %s", begun, resumed, OUT(again));
        expect(!strstr(OUT(again), "converted"), "%s, %s: again %s", begun, resumed, OUT(again));
        train_well("--sample T --model %s/step_00000006 --sample-tokens 4 --device cpu", other);
        remove_tree(run), remove_tree(other);
    }
}

// A run may have as many arrays as there can be: a launch for each of six combinations, and three moments and weights
// of three arrays each.
FOLDER_TEST(cli_resume_most_arrays) {
    const char* options =
        "--rule ademamix --m de4/32@dq8 --v sqrt4/32@dq8 --weights e5m2/tensor+fp32 --override "
        "wte:weights=e4m3+fp32;wpe:weights=e5m2+fp32;ln*:weights=bf16+fp32;*.bias:weights=bf16:kahan;"
        "c_attn.weight:weights=e4m3/tensor+fp32";
    check_half_way(test, work, "run", options, false);
    refused("a seventh", "\"mlp.c_fc.weight\" asks for one more", "take fewer",
            BRIEF "/none --steps 4 %s;mlp.c_fc.weight:weights=fp32", work, work, options);
}

// Another rule's learning rate, taken at a resume, is the run's own at the next one.
static void check_rate_stays(Test* test, const char* run, const char* work) {
    const char* other = joined(work, "other");
    train_well("--resume %s --run %s --steps 6 --device cpu --rule lion", run, other);
    run_well(child, "--resume %s --steps 8 --device cpu", other);
    const char* options = contents(other, "config.json");
    expect(options && strstr(options, "\"lr\": \"0.000600"), "config.json: %s", options);
    expect(!strstr(OUT(child), " --lr "), "%s", OUT(child));
    remove_tree(other);
}

// A run goes on by other rules, one without v and one with a slow average, and not by one that needs what is not there.
// A learning rate that was not typed is the new rule's.
FOLDER_TEST(cli_resume_rules) {
    const char* run = joined(work, "run");
    train_well(BRIEF " --steps 4 --override ln*:m=bf16", work, run);
    const char *const usual = " --lr 0.0006, usual for lion (was 0.003, for adamw)", *const typed =
                                                                                         " --lr 0.001 (was 0.003)";
    const char* const cases[][3] = {
        {"--rule lion", " notice   v: left behind; lion keeps none\n", usual},
        {"--rule lion --lr 0.001", " notice   v: left behind; lion keeps none\n", typed},
        {"--rule ademamix", " notice   slow: not in the checkpoint, whose rule is adamw; it starts at zero\n", nullptr},
        {"--override *.bias:m=dyn8", " notice   m: bf16 in the checkpoint in 3 tensors, converted to fp32", nullptr},
        {"--weights fp32 --m dyn8", " notice   weights: bf16+fp32 in the checkpoint, converted to fp32", nullptr},
        {"--m dyn8",
         " notice   m: fp32 in the checkpoint in 10 tensors, converted to dyn8/256 (to nearest); not bit-exact\n",
         nullptr}};
    for (const auto& row : cases) {
        const char* other = joined(work, "other");
        run_well(child, "--resume %s --run %s --steps 8 --device cpu %s", run, other, row[0]);
        expect(strstr(OUT(child), row[1]), "%s: no '%s' in: %s", row[0], row[1], OUT(child));
        const char* rate = strstr(OUT(child), " --lr ");
        expect(row[2] ? rate && strncmp(rate, row[2], strlen(row[2])) == 0 : !rate, "%s: %s", row[0], OUT(child));
        remove_tree(other);
    }
    train_well("--resume %s --run %s/longer --steps 60 --rule ademamix --device cpu", run, work);
    const char* longer = contents(joined(work, "longer"), "config.json");
    expect(longer && strstr(longer, "\"beta3\": \"0.95\"") && strstr(longer, "\"ramp\": \"60\""), "%s", longer);
    check_rate_stays(test, run, work);
    train_well(BRIEF "/lion --steps 4 --rule lion", work, work);
    train_well(BRIEF "/muon --steps 4 --preset muon8", work, work);
    const char* const none[][3] = {{"lion", "--preset adamw8", "lion keeps no second moment"},
                                   {"lion", "--rule muon", "lion keeps no second moment"},
                                   {"muon", "--rule adamw", "muon keeps no second moment"}};
    for (const auto& row : none) {
        refused(row[1], row[2], "--model", "--resume %s/%s --run %s/other --steps 8 %s --device cpu", work, row[0],
                work, row[1]);
        expect(!exists(work, "other"), "a run folder is left");
    }
}

#define LONG SHAPE " " QUICK " --steps 1500 --keep 1000 --data %s/text.txt"

// Starts a run of LONG, and waits until it has come to step 40.
static Child start_long(Test* test, const char* work, const char* run) {
    Child child = new_child();
    start(&child, LONG " --run %s --save-every 0", work, run);
    expect(wait_for_step(&child, run, 40), "%s ended before step 40: %s", run, ERR(child));
    return child;
}

// After SIGUSR2, and with a file called save in the run folder, a run saves and goes on. dev/faults.py sends signals
// that end a run, and resumes it.
FOLDER_TEST(cli_saves_when_asked) {
    const char *whole = joined(work, "whole"), *run = joined(work, "saves");
    train_well(LONG " --run %s --save-every 0", work, whole);
    Child child = start_long(test, work, run);
    kill(child.pid, SIGUSR2);
    expect(wait_for_step(&child, run, 300), "the run ended at the signal");
    write_text(run, "save", "");
    finish(&child);
    expect_code(child, 0);
    expect_checkpoints(test, run, 3, 1500);
    expect(!exists(run, "save"), "the request is still there");
    expect_equal_runs(test, whole, run, 1500);
}

enum Damage { TRUNCATE, FLIP, REMOVE, COUNT };  // COUNT: step 12 becomes step 13, which only a checksum shows

static void damage(const char* folder, const char* name, Damage how) {
    int64_t bytes = 0;
    char* text = contents(folder, name, &bytes);
    if (!text) abort();
    if (how == FLIP) text[bytes / 2] ^= 4;
    char* step = how == COUNT ? strstr(text, "\"step\": 12") : nullptr;
    if (how == COUNT && !step) abort();
    if (step) step[9] = '3';
    write_bytes(folder, name, text, (size_t)(how == TRUNCATE ? bytes / 2 : bytes));
    if (how == REMOVE) unlink(joined(folder, name));
}

TEST(cli_damaged_checkpoint) {
    static const std::tuple<const char*, Damage> damages[] = {
        {"model.safetensors", TRUNCATE},   {"model.safetensors", FLIP}, {"optimizer.safetensors", FLIP},
        {"optimizer.safetensors", REMOVE}, {"config.json", FLIP},       {"state.json", FLIP},
        {"state.json", TRUNCATE},          {"state.json", REMOVE},      {"state.json", COUNT}};
    const char *work = work_folder(), *whole = joined(work, "whole"), *run = joined(work, "run");
    for (const char* each : {whole, run}) train_well(BRIEF " --steps 12 --save-every 4 --keep 9", work, each);
    const char* newest = checkpoint_name(run, 12);
    for (const auto& [name, how] : damages) {
        damage(newest, name, how);
        run_train(refused, "--resume %s --device cpu", newest);
        if (strcmp(name, "state.json") != 0 || how != REMOVE) expect_error(test, &refused, name, newest, "");
        run_train(sampled, "--sample a --sample-tokens 2 --model %s --device cpu", run);
        expect(sampled.code == 0 && !strstr(ERR(sampled), "notice: ") == (strncmp(name, "optimizer", 9) == 0),
               "%s: exit code %d: %s", name, sampled.code, ERR(sampled));
        run_well(child, "--run %s --resume auto --device cpu", run);
        expect(strncmp(ERR(child), "train: notice: ", 15) == 0 && strstr(ERR(child), newest), "%s is not named: %s",
               name, ERR(child));
        expect(strstr(OUT(child), "step_00000008, step 8"), "the checkpoint before is not used");
        expect_equal_runs(test, whole, run, 12);
    }
    // A checkpoint is half written: the folder still has its temporary name.
    const char* temporary = formatted("%s.tmp", newest);
    damage(newest, "model.safetensors", TRUNCATE);
    if (rename(newest, temporary) != 0) abort();
    train_well("--run %s --resume auto --device cpu", run);
    expect(access(temporary, F_OK) != 0, "half a checkpoint is still there");
    expect_equal_runs(test, whole, run, 12);
    for (int step : {4, 8, 12}) {
        newest = checkpoint_name(run, step);
        damage(newest, "model.safetensors", FLIP);
    }
    for (const char* typed : {"--device cpu --resume", "--device cpu --resume auto --run"}) {
        run_train(child, "%s %s", typed, run);
        expect(child.code == 2 && strstr(ERR(child), "all 3 are damaged"), "exit code %d: %s", child.code, ERR(child));
    }
    run_train(sampled, "--sample a --model %s --device cpu", run);
    expect(sampled.code == 2 && strstr(ERR(sampled), "is a run without a whole checkpoint"), "%s", ERR(sampled));
    expect(exists(newest, "model.safetensors"), "what is damaged was removed");
    run_train(child, BRIEF "/from --steps 1 --model %s", work, work, newest);
    expect(child.code == 2 && strstr(ERR(child), "damaged checkpoint"), "exit code %d: %s", child.code, ERR(child));
}

// A run refuses a folder whose files it would overwrite, or in which another process is at work.
FOLDER_TEST(cli_run_folders) {
    const char* run = joined(work, "run");
    const char* copied = joined(work, "copied");
    train_well(BRIEF " --steps 4 --save-every 2", work, run);
    const char* checkpoint = checkpoint_name(run, 2);
    refused("holds a model", "name another folder", "", BRIEF " --steps 4", work, checkpoint);
    if (rename(checkpoint, copied) != 0) abort();
    refused("lies in no run folder", "--run DIR", "", "--resume %s --device cpu", copied);
    train_well("--resume %s --device cpu --run %s/new", copied, work);
    Child there = new_child(false, checkpoint_name(run, 4));
    train_as(&there, "--resume . --device cpu --steps 6");
    expect_checkpoints(test, run, 2, 6);
    run = joined(work, "held");
    Child child = start_long(test, work, run);
    kill(child.pid, SIGSTOP);  // still there, however long the other one waits
    refused(run, "another process", "", "--run %s --resume auto --device cpu", run);
    kill(child.pid, SIGCONT);
    finish(&child);
    expect_code(child, 0);
}

// A data file that is cut short while it is read ends a run with one sentence and a checkpoint.
FOLDER_TEST(cli_data_is_cut) {
    const char *run = joined(work, "run"), *text = joined(work, "text.txt");
    Child child = start_long(test, work, run);
    if (truncate(text, 0) != 0) abort();
    finish(&child);
    expect_error(test, &child, "a file of data was cut short", "it was cut short while it was read",
                 "; the last checkpoint is ");
    int64_t newest;
    expect(checkpoints(run, &newest) == 1 && newest >= 40, "what was there is not saved: %lld", (long long)newest);
}

// A job script's command may be typed again: --model names the folder that the run began with. The rate that --lr auto
// chooses stays a tenth, also after another rule was taken.
FOLDER_TEST(cli_resume_model_folder) {
    train_well(BRIEF "/first --steps 2", work, work);
    for (const char* model : {"first/step_00000002", "first/", "first"}) {
        for (int i = 0; i < 2; i++) {
            Child child = new_child(false, work);
            train_as(&child, QUICK " --data text.txt --model %s --run again --resume auto --lr auto --steps %d", model,
                     2 + 2 * i);
            expect(strstr(OUT(child), "schedule lr 0.0003 (a tenth"), "%s", OUT(child));
        }
        run_well(lion, "--resume %s/again --device cpu --steps 6 --rule lion", work);
        expect(strstr(OUT(lion), "--lr 6e-05, usual for lion (was 0.0003, for adamw)"), "%s", OUT(lion));
        run_well(typed, "--resume %s/again --device cpu --steps 8 --lr 0.001", work);
        expect(strstr(OUT(typed), "--lr 0.001 (was 6e-05)"), "%s", OUT(typed));
        remove_tree(joined(work, "again"));
    }
}

// An option that was left to the program is so again when a run is made longer.
FOLDER_TEST(cli_resume_auto) {
    train_well(SHAPE " --device cpu --batch 1 --data %s/text.txt --run %s/run --steps 10", work, work);
    train_well("--resume %s/run --device cpu --steps 60", work);
    train_well(SHAPE " --device cpu --batch 1 --data %s/text.txt --run %s/whole --steps 60", work, work);
    int samples[2];
    for (int i = 0; i < 2; i++) {
        const char* text = contents(joined(work, i ? "whole" : "run"), "log.txt");
        samples[i] = 0;
        for (const char* at = text; at && (at = strstr(at, "\nsample ")); at++) samples[i]++;
    }
    expect(samples[0] == 2 && samples[1] == 1, "%d samples, one at each end, and %d", samples[0], samples[1]);
}

// The refusal of a full disk uses MiB or GiB, and advises only what makes the checkpoints smaller.
TEST(cli_room) {
    const int64_t huge = (int64_t)1 << 55;
    Options options;
    options_defaults(&options);
    static RunFolder run;
    run.options = &options, run.sources[0] = run.sources[1] = run.sources[2] = "";
    options.run = work_folder(), options.steps = 3000;
    expect(!run_folder_open(&run, true, 256, huge) && strstr(run.error, "for 3 checkpoints; free some") &&
               strstr(run.error, "or type --keep 1, or type --save weights or none") &&
               strstr(run.error, " GiB are free"),
           "%s", run.error);
    options.keep = 1, options.save = "weights";
    expect(!run_folder_open(&run, true, 256, huge) && !strstr(run.error, "--keep") && !strstr(run.error, "--save"),
           "%s", run.error);
    options.save = "none";
    expect(run_folder_open(&run, true, 256, huge), "--save none needs room: %s", run.error);
    options.save = "all", options.run = "/proc/x";
    expect(run_folder_open(&run, true, 256, huge), "where there is no disk: %s", run.error);
}

FOLDER_TEST(cli_save_none) {
    run_train(child, BRIEF "/run --steps 4 --save none", work, work);
    expect_code(child, 0);
    expect(!exists(work, "run/step_00000004") && exists(work, "run/log.jsonl"), "a checkpoint, or no log");
    expect(!strstr(OUT(child), "save ") && !strstr(OUT(child), "--model"), "%s", OUT(child));
    refused("--keep", "--keep 1 goes with --save all or weights", "", BRIEF "/run2 --save none --keep 1", work, work);
}

FOLDER_TEST(cli_save_weights) {
    train_well(BRIEF "/run --steps 4 --save weights", work, work);
    expect(exists(work, "run/step_00000004/model.safetensors"), "no weights were saved");
    expect(!exists(work, "run/step_00000004/optimizer.safetensors"), "states were saved");
    const Json* state = checkpoint_verify(joined(work, "run/step_00000004"), false, error);
    expect(state && json_int(state, "step", 0) == 4 && json_int(state, "sequences", 0) == 8, "state.json");
    expect(json_number(state, "best_val", -1) == -1, "an infinite best_val is null");
    refused("--resume", "--save weights", "type --model", "--resume %s/run --steps 8", work);
    train_well("--model %s/run %s --data %s/text.txt --run %s/next --steps 2", work, QUICK, work, work);
}

FOLDER_TEST(cli_keep) {
    for (int keep : {1, 3}) {
        const char* run = formatted("%s/keep_%d", work, keep);
        // Names that are nearly those of checkpoints are the user's own: they are neither counted nor removed.
        const char* const own[] = {"step_50", "step_11", "step_notes.tmp", "step_00000002.bak.tmp"};
        mkdir(run, 0755);
        for (const char* name : own) write_text(run, name, "mine");
        train_well(BRIEF " --steps 11 --save-every 2 --keep %d", work, run, keep);
        expect_checkpoints(test, run, keep, 11);
        for (const char* name : own) expect(exists(run, name), "%s was removed", name);
    }
}
