// Several ranks, from the command line (cli.h says how it is run). Without GPUs they are processes of this machine over
// the stand-in of kernels/ranks/comm.cuh; the cases that end in _gpu are the same by DMA copy engines, or over NCCL
// where NIBBLE_NCCL says so, for as many GPUs as are there.
#include <vector>

#include "multi.h"

// Runs that differ in these options alone are the same to the bit. Returns the path of the first.
static const char* expect_same(Test* test, bool gpu, int ranks, int steps, const char* common,
                               const std::vector<const char*>& options) {
    const char *work = work_folder(), *first = joined(work, "0");
    for (size_t i = 0; i < options.size(); i++) {
        const char* run = formatted("%s/%d", work, (int)i);
        train_ranks(gpu, ranks, SEVERAL " --batch 2 --steps %d %s %s", work, run, steps, common, options[i]);
        expect_equal_runs(test, first, run, steps);
    }
    return first;
}

// Runs of all modes are the same to the bit where a step has one micro-batch a rank; with several, none is states and
// grads is weights, since the others sum over the ranks before they sum over the micro-batches.
static void check_modes(Test* test, bool gpu, int ranks, int micro_batches, const char* options) {
    const char* common = formatted("--tokens-per-step %d %s", 32 * ranks * micro_batches, options);
    std::vector<const char*> all;
    for (int i : {0, 1, 2, 3}) {
        if (i % 3 == 0 || micro_batches > 1 || !runs_few(gpu, ranks)) all.push_back(formatted("--shard %s", modes[i]));
    }
    if (micro_batches == 1) expect_same(test, gpu, ranks, 6, common, all);
    if (micro_batches > 1) expect_same(test, gpu, ranks, 6, common, {all[0], all[1]});
    if (micro_batches > 1) expect_same(test, gpu, ranks, 6, common, {all[2], all[3]});
}

TEST(multi_modes) {
    check_modes(test, false, 2, 1, "");
    check_modes(test, false, 3, 2, "--preset adamw16");
    // Tensors at the arena's end, in a launch of their own.
    check_modes(test, false, 3, 1, "--preset adamw4 --override ln*|*.bias:m=fp32\tv=fp32");
    check_modes(test, false, 2, 1, "--preset fp8w8e --override none");  // weights that no model file holds as they are
    check_modes(test, false, 3, 1, "--preset fp8w8e --override ln*|*.bias:weights=bf16+8:sr");  // but for some
    check_modes(test, false, 2, 1, "--recompute block");
    check_modes(test, false, 4, 1, "--preset muon4");  // whose matrices are not cut
    check_modes(test, false, 3, 1, "--preset muon8w8");
    check_modes(test, false, 2, 1, "--preset flash24");
    check_modes(test, false, 3, 1, "--preset adamw4d");
    check_modes(test, false, 3, 1, "--rule normuon");
    check_modes(test, false, 3, 1, "--preset galore8 --rank-gap 2");
    check_modes(test, false, 3, 1, "--preset came8 --limit-growth 1.01");  // nor any tensor
    check_modes(test, false, 4, 2, "--rule adafactor --m none --adafactor-lr paper");
    check_modes(test, false, 3, 1, "--matmul fp8 --head fp8");    // whose scales all ranks share
    check_modes(test, false, 4, 1, "--preset fp8 --matmul fp8");  // codes of which are read as stored with none alone
    check_modes(test, false, 3, 1, "--preset fp8 --weights e4m3/tensor+fp32 --matmul fp8");  // which are no operands
    check_modes(test, false, 3, 1, "--m dyn8/rank1 --v udyn8/rank1");
}

GPUS_TEST(multi_modes_gpu) {
    check_modes(test, true, ranks, 2, "--preset adamw32");
    check_modes(test, true, ranks, 1, "--preset muon4");
    check_modes(test, true, ranks, 1, "--preset galore8 --rank-gap 2");  // the fused way, whoever has a matrix
    check_modes(test, true, ranks, 1, "--preset came8 --limit-growth 1.01");
    check_modes(test, true, ranks, 1, "--preset fp8 --matmul fp8 --head fp8");
    if (runs_few(true, ranks)) return;
    check_modes(test, true, ranks, 1, "--preset adamw8");
    check_modes(test, true, ranks, 1, "--rule normuon");
    check_modes(test, true, ranks, 1, "--preset galore8 --rank-gap 2 --grads fp32");
    check_modes(test, true, ranks, 1, "--preset rmnp4");
    check_modes(test, true, ranks, 1, "--matmul fp8 --head fp8");
}

// Steps taken inside the backward pass have the bits of the same steps after it, whatever is sharded and wherever the
// states are; without clipping, those of a step over all layers at once.
static void check_released(Test* test, bool gpu, int ranks, const char* options) {
    static const char* const released[] = {"--release off", "--release on", "--release on --offload states,residuals"};
    std::vector<const char*> all;
    for (int i = 0; i < 12; i++) {
        const int mode = i / 3, way = i % 3;
        if (runs_few(gpu, ranks) && i % 5 != 0) continue;  // none; released states on the host; weights released
        all.push_back(formatted("--shard %s %s", modes[mode], released[way]));
    }
    expect_same(test, gpu, ranks, 4, formatted("--tokens-per-step %d %s", 32 * ranks, options), all);
}

TEST(multi_released) {
    check_released(test, false, 3, "--clip 0 --preset muon8 --layers 3");
    check_released(test, false, 2, "--clip-by last --clip 0.5 --rule normuon");
    check_released(test, false, 2, "--clip 0 --preset adamw4l");
    check_released(test, false, 2, "--clip 0 --preset fp8 --matmul fp8");
    check_released(test, false, 3, "--clip-by last --clip 0.5 --rule came --weights lin8:sr --m dyn8");
    check_released(test, false, 3,
                   "--clip-by tensor --clip 0.05 --preset int8w4 --layers 4 --override "
                   "ln*|*.bias:weights=fp32\tm=fp32");
}

GPUS_TEST(multi_released_gpu) {
    check_released(test, true, ranks, "--clip 0 --preset muon8");
    check_released(test, true, ranks, "--clip 0 --preset adamw4l");
    check_released(test, true, ranks, "--clip-by last --clip 0.5 --rule came --weights lin8:sr --m dyn8");
    check_released(test, true, ranks, "--clip-by tensor --clip 0.05 --preset int8w4 --layers 4 --grads bf16");
}

// The transport of the bytes changes none of them.
GPUS_TEST(multi_transports_gpu) {
    if (!gpus_reach_each_other(ranks)) skip("these GPUs do not reach each other's memory");
    for (const char* variable : {"NIBBLE_NCCL", "NCCL_P2P_DISABLE"}) unsetenv(variable);
    const char* work = work_folder();
    const char* run[2];
    for (const char* mode : modes) {
        if (runs_few(true, ranks) && strcmp(mode, "states") != 0 && strcmp(mode, "weights") != 0) continue;
        for (int nccl = 0; nccl < 2; nccl++) {
            const char* variable = strcmp(mode, "states") == 0 ? "NCCL_P2P_DISABLE" : "NIBBLE_NCCL";
            run[nccl] = formatted("%s/%s_%d", work, mode, nccl);
            if (nccl) setenv(variable, variable[1] == 'C' ? "1" : "libnccl.so.2", 1);
            train_ranks(true, ranks, SEVERAL " --batch 2 --tokens-per-step %d --steps 6 --shard %s", work, run[nccl],
                        64 * ranks, mode);
            unsetenv(variable);
            char* text = contents(run[nccl], "log.txt");
            expect(text && strstr(text, nccl ? "NCCL " : "by DMA copy engines"), "%s: another transport: %s", mode,
                   text);
        }
        expect_equal_runs(test, run[0], run[1], 6);
    }
}

// Returns a number of bytes from the log's record of memory, 0 if there is none.
static double memory_of(const char* run, const char* name) {
    const char *want = formatted("\"%s\": ", name), *log = contents(run, "log.jsonl");
    const char* line = log ? strstr(log, "\"type\": \"memory\"") : nullptr;
    const char* value = line ? strstr(line, want) : nullptr;
    return value ? atof(value + strlen(want)) : 0;
}

// Compares the plan with the GPU's memory in use after the second step: within 3 %.
static void check_memory(Test* test, int ranks, const char* mode) {
    const char* work = work_folder();
    pid_t process[8] = {};
    Child child = new_child();
    child.threads = 8;  // to draw the weights
    const char* run = joined(work, "run");
    start_ranks(&child, true, ranks,
                "--layers 4 --channels 1024 --heads 16 --seq 1024 --batch 16 --tokens-per-step %d --steps 1000000 "
                "--warmup 2 --val-every 0 --sample-every 0 --run %s --shard %s",
                32768 * ranks, run, mode);
    expect(wait_for_step(&child, run, 3), "no third step: %s", ERR(child));
    int count = ranks_of(&child, process, 8);
    kill(count > 1 ? process[1] : child.pid, SIGKILL);  // before it would save
    finish(&child);
    expect(gone(process, count), "a rank lives on");
    double planned = memory_of(run, "planned_bytes"), used = memory_of(run, "used_bytes");
    expect(planned > 0 && fabs(used / planned - 1) <= 0.03, "%d ranks, %s: planned %.0f MiB, in use %.0f", ranks, mode,
           planned / (1 << 20), used / (1 << 20));
    note(test, "%d %s: %.4f of the plan", ranks, mode, used / planned);
}

TEST_ALONE(multi_memory_gpu) {
    if (getenv("NIBBLE_SANITIZE")) skip("the sanitizer takes memory");
    check_memory(test, 1, "none");
    for (const char* mode : modes) {
        if (test_gpus() >= 2) check_memory(test, ranks_on_gpus(), mode);
    }
}

// Losses on 1, 2 and 4 ranks at the same total batch differ by the rounding of the gradients' sum alone: by at most
// `share` of what those of a sum with one wrong term do, which a learning rate that is a quarter larger stands for.
constexpr double OF_FP32 = 1e-4, OF_BF16 = 1.0 / 16;  // where gradients or the weights that follow are rounded to bf16
static void check_losses(Test* test, bool gpu, double share, const char* rule, double lr) {
    constexpr int STEPS = 30;
    static Losses losses[4];
    double apart[4] = {};
    const char* work = work_folder();
    const std::pair<int, double> runs[] = {{1, lr}, {1, 1.25 * lr}, {2, lr}, {4, lr}};
    for (int i = 0; i < 4; i++) {
        const auto& [ranks, rate] = runs[i];
        if (gpu && ranks > test_gpus()) break;
        const char* run = formatted("%s/%d", work, i);
        train_ranks(gpu, ranks,
                    SEVERAL " --batch 2 --tokens-per-step 128 --steps %d --clip 0 --schedule constant --lr %g %s", work,
                    run, STEPS, rate, rule);
        read_losses(test, run, &losses[i]);
        expect(losses[i].last == STEPS, "%d steps on %d ranks", losses[i].last, ranks);
        for (int step = 1; step <= STEPS; step++) {
            const double off = fabs(atof(losses[0].text[step]) - atof(losses[i].text[step]));
            if (!(off <= apart[i])) apart[i] = off;
        }
        expect(i < 2 || apart[i] <= share * apart[1], "%s: losses on %d ranks are %g apart, of a wrong sum %g", rule,
               ranks, apart[i], apart[1]);
        if (i > 1) note(test, "%.2g", apart[i] / apart[1]);
    }
    expect(apart[1] > 1e-3, "%s: a wrong sum does not show: %g", rule, apart[1]);
}

#define DESCENT "--rule sgd --beta1 0 --m fp32 --v none"

TEST(multi_losses) {
    check_losses(test, false, OF_FP32, DESCENT " --weights fp32", 0.01);
    check_losses(test, false, OF_FP32, "--weights fp32", 0.0003);
    check_losses(test, false, OF_BF16, DESCENT " --weights bf16+fp32", 0.001);
}

GPUS_TEST(multi_losses_gpu) {
    check_losses(test, true, OF_FP32, DESCENT " --weights fp32 --matmul fp32", 0.01);
    check_losses(test, true, OF_FP32, "--weights fp32 --matmul fp32", 0.0003);
    check_losses(test, true, OF_BF16, DESCENT " --weights bf16+fp32", 0.001);  // of 4 ranks gradients are bf16
    check_losses(test, true, OF_BF16, DESCENT " --weights bf16+fp32 --grads bf16 --shard weights", 0.001);
}

// Saved on `from` ranks, resumed on `to`, in each of the ways `after`: all go on alike; on as many ranks as before, as
// if the run had not been interrupted. What is saved does not depend on how it was sharded (multi_modes). Where the
// numbers of ranks differ each rank has one micro-batch a step: of several, `grads` and `weights` send each gradient
// rounded, the others the sum.
static void check_resume(Test* test, bool gpu, int from, int to, const char* before,
                         std::initializer_list<const char*> after) {
    const char *work = work_folder(), *saved = joined(work, "saved"), *first = saved;
    int number = 0;
    train_ranks(gpu, from,
                SEVERAL
                " --batch 2 --tokens-per-step %d --steps %d --save-every 4 --schedule constant --preset "
                "adamw8c --shard %s",
                work, saved, 32 * (from > to ? from : to), from == to ? 8 : 4, before);
    for (const char* way : after) {
        const char* run = formatted("%s/%d", work, number++);
        ranks_well(child, gpu, to, "--resume %s/step_00000004 --run %s --steps 8 --shard %s", saved, run, way);
        expect(strstr(OUT(child), "step_00000004, step 4"), "%d to %d: %s", from, to, OUT(child));
        expect(from == to || !strstr(OUT(child), " notice "), "%d to %d: %s", from, to, OUT(child));
        if (number > 1 || from == to) expect_equal_runs(test, first, run, 8, 5);
        if (from != to && number == 1) first = run;
    }
}

// Sharded, released and kept on the host otherwise than before.
TEST(multi_resume) {
    check_resume(test, false, 3, 3, "states", {"none --offload states"});
    check_resume(test, false, 2, 2, "grads --offload states", {"weights"});
    check_resume(test, false, 4, 4, "grads", {"states"});
    check_resume(test, false, 3, 3, "grads --clip-by last --release on",
                 {"none --release off", "weights --release on", "none --release on --offload states"});
    check_resume(test, false, 4, 1, "states", {"none", "states"});
    check_resume(test, false, 1, 4, "weights", {"none", "weights"});
    check_resume(test, false, 2, 4, "grads", {"none", "grads"});
    check_resume(test, false, 4, 2, "states", {"none", "states"});
}

GPUS_TEST(multi_resume_gpu) {
    check_resume(test, true, ranks, ranks, "states", {"none --offload states"});
    check_resume(test, true, ranks, ranks, "grads --offload states", {"weights"});
    check_resume(test, true, ranks, 1, "states", {"none", "states"});
    check_resume(test, true, 1, ranks, "weights", {"none", "weights"});
    if (ranks > 2) check_resume(test, true, 2, ranks, "states", {"none", "states"});
}

static const Variable open_mpi[] = {
    {"OMPI_COMM_WORLD_RANK", "rank"},       {"OMPI_COMM_WORLD_SIZE", "ranks"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "local"},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "half"}, {"PMIX_NAMESPACE", "port"},        {"MASTER_ADDR", "127.0.0.1"}};
static const Variable slurm[] = {{"SLURM_PROCID", "rank"},   {"SLURM_STEP_NUM_TASKS", "ranks"},
                                 {"SLURM_LOCALID", "local"}, {"SLURM_JOB_ID", "port"},
                                 {"SLURM_STEP_ID", "0"},     {"SLURM_STEP_NODELIST", "localhost,elsewhere[1-3]"}};

static void check_launcher(Test* test, const char* work, const Variable* variables, int count, const char* says,
                           int which) {
    constexpr int RANKS = 4;
    Child child[RANKS];
    const char* run = formatted("%s/run_%d", work, which);
    const char* words = formatted(SEVERAL " --batch 1 --tokens-per-step 64 --steps 4 --shard states", work, run);
    for (int rank = RANKS - 1; rank >= 0; rank--)
        start_launched(&child[rank], variables, count, rank, RANKS, own_port(which), words);
    for (int rank = 0; rank < RANKS; rank++) {
        finish(&child[rank]);
        expect(child[rank].code == 0, "%s: rank %d ended with %d: %s", says, rank, child[rank].code, ERR(child[rank]));
        expect(rank == 0 || OUT(child[rank])[0] == 0, "%s: rank %d speaks: %s", says, rank, OUT(child[rank]));
    }
    expect(strstr(OUT(child[0]), " ranks    4, from ") && strstr(OUT(child[0]), says), "%s: %s", says, OUT(child[0]));
    expect_equal_runs(test, run, joined(work, "forked"), 4);
}

FOLDER_TEST(multi_launchers) {
    train_ranks(false, 4, SEVERAL "/forked --batch 1 --tokens-per-step 64 --steps 4", work, work);
    check_launcher(test, work, VARIABLES(torchrun), "torchrun's variables", 1);
    check_launcher(test, work, VARIABLES(open_mpi), "Open MPI's variables", 2);
    check_launcher(test, work, VARIABLES(slurm), "Slurm's variables", 3);
}

// Machines need not share a disk: the run folder, and the tokenizer in it, are rank 0's alone, and samples are made.
FOLDER_TEST(multi_no_shared_folder) {
    Child child[2];
    write_tokenizer(work);
    write_shard(work, "train_0.bin", 2000, 7);
    write_shard(work, "val_0.bin", 2000, 7);
    const char* words = formatted(
        "--layers 1 --channels 64 --heads 1 --seq 16 --val-every 0 --sample-every 2 --sample-tokens 4 --warmup 1 "
        "--data %s --run run --batch 1 --tokens-per-step 32 --steps 2 --shard weights",
        work);
    for (int rank : {0, 1}) {
        const char* folder = formatted("%s/machine_%d", work, rank);
        mkdir(folder, 0777);
        start_launched(&child[rank], VARIABLES(torchrun), rank, 2, own_port(10), words, folder);
    }
    for (Child& c : child) finish_well(test, &c);
    expect(strstr(OUT(child[0]), "sample ---") && !strstr(OUT(child[0]), " notice "), "%s", OUT(child[0]));
}

// Then no rank may have another checkpoint under the same name than rank 0 has.
FOLDER_TEST(multi_other_checkpoint) {
    Child child[2];
    const char* brief = "--layers 1 --channels 64 --heads 1 --seq 16 --val-every 0 --sample-every 0 --warmup 1";
    for (int rank : {0, 1}) {
        train_well("%s --data %s/text.txt --run %s/%d/run --tokens-per-step 32 --batch 2 --steps 2 --lr 0.00%d", brief,
                   work, work, rank, rank + 1);
        start_launched(&child[rank], VARIABLES(torchrun), rank, 2, own_port(12),
                       "--run run --resume auto --batch 1 --lr 0.003 --steps 4", formatted("%s/%d", work, rank));
    }
    for (Child& c : child) finish(&c);
    expect_error(test, &child[1], "other checkpoint", "rank 1: ", "--resume of a checkpoint with checksum ");
}

// It is named where rank 0 was looked for. (Ranks that do not come to it: doors_deadline_holds.)
FOLDER_TEST(multi_missing) {
    Child child[2];
    const char* words = formatted(SEVERAL "/run --join-timeout 2", work, work);
    start_launched(&child[1], VARIABLES(torchrun), 1, 4, own_port(5), words);
    finish(&child[1]);
    expect_error(test, &child[1], "rank 1", "could not join rank 0 at localhost:", "Connection refused; look");
    Variable nowhere[sizeof(torchrun) / sizeof(torchrun[0])];
    memcpy(nowhere, torchrun, sizeof(torchrun));
    for (Variable& one : nowhere) {
        if (strcmp(one.name, "MASTER_ADDR") == 0) one.value = "nowhere.invalid";
    }
    start_launched(&child[1], VARIABLES(nowhere), 1, 4, own_port(5), words);
    finish(&child[1]);
    expect_error(test, &child[1], "no such host", "could not join rank 0 at nowhere.invalid:", "MASTER_ADDR");
    // Ranks that were not started alike are refused.
    const char* other = formatted("%s --lr 0.5", words);
    for (int rank : {0, 1})
        start_launched(&child[rank], VARIABLES(torchrun), rank, 2, own_port(6), rank ? other : words);
    for (int rank : {0, 1}) finish(&child[rank]);
    expect_error(test, &child[1], "other options", "rank 1: ", ": --lr 0.5, and rank 0 --lr 0.003; start all alike");
    expect(child[0].code == 2 && ERR(child[0])[0] == 0, "rank 0: %d, %s", child[0].code, ERR(child[0]));
    expect(!exists(work, "run"), "what rank 1 refused left a folder of rank 0's");
    // So are ranks whose files differ: one machine's copy was cut short.
    int64_t bytes;
    const char *text = contents(work, "text.txt", &bytes), *cut = joined(work, "cut");
    mkdir(cut, 0777);
    write_bytes(cut, "text.txt", text, (size_t)bytes - 100);
    for (int rank : {0, 1}) {
        words = formatted(SEVERAL "/run --batch 1 --tokens-per-step 32 --steps 2", rank ? cut : work, work);
        start_launched(&child[rank], VARIABLES(torchrun), rank, 2, own_port(8), words);
    }
    for (int rank : {0, 1}) finish(&child[rank]);
    expect_error(test, &child[1], "other data", "rank 1: ", "other options or other data than rank 0: --data of ");
}

FOLDER_TEST(multi_refused) {
    refused("CPU", "--gpus 2", "--device cpu", "--gpus 2 --device cpu --steps 1 --run %s/run", work);
    refused("no GPU", "each needs a GPU of its own", "no GPU answers", "--gpus 2 --steps 1 --run %s/run", work);
    setenv("WORLD_SIZE", "4", 1);
    run_train(half, "--steps 1 --run %s/run", work);
    unsetenv("WORLD_SIZE");
    expect_error(test, &half, "half a set", "WORLD_SIZE ('4')", "type --gpus N");
    refused_ranks("batch", "--seq 64 x 2 GPUs", "--tokens-per-step 128", false, 2,
                  "--steps 1 --seq 64 --tokens-per-step 192 --run %s/run", work);
    refused_ranks("a mistake of all ranks, told once", "nothing", "cannot open", false, 3,
                  "--data %s/nothing --run %s/run", work, work);
    refused_ranks("more ranks than tiles", "for 50 ranks", "; start 43", false, 50,
                  "--layers 1 --channels 64 --heads 1 --seq 16 --run %s/run", work);
    expect(!exists(work, "run"), "a refused run left a folder");
}

TEST(multi_refused_gpu) {
    if (getenv("NIBBLE_SANITIZE")) skip("processes of their own");
    const char* work = work_folder();
    refused_ranks("more GPUs than there are", "was typed and this machine shows",
                  formatted("type --gpus %d", test_gpus()), true, test_gpus() + 1, "--steps 1 --run %s/run", work);
}

// Validation and samples of several ranks are those of one.
FOLDER_TEST(multi_validation) {
    double loss[3] = {};
    char* sample[3] = {};
    for (int i = 0; i < 3; i++) {
        int ranks = i + 1;
        const char* run = formatted("%s/%d", work, ranks);
        train_ranks(
            false, ranks,
            "--layers 2 --channels 64 --heads 1 --seq 16 --batch 2 --tokens-per-step 192 --data %s/text.txt --run %s "
            "--steps 2 --val-every 2 --val-tokens 432 --sample-every 2 --sample-tokens 20 --temperature 0 --prompt "
            "the --shard %s",
            work, run, modes[i + 1]);
        char* log = contents(run, "log.jsonl");
        char* line = log ? strstr(log, "\"type\": \"val\", \"step\": 2") : nullptr;
        expect(line, "%d ranks: no validation of step 2", ranks);
        if (line) loss[i] = atof(strstr(line, "\"loss\": ") + 8);
        char* text = contents(run, "log.txt");
        char* begin = text ? strstr(text, "sample ---") : nullptr;
        expect(begin, "%d ranks: no sample", ranks);
        sample[i] = strndup(begin ? begin : "", 120);
    }
    for (int i = 1; i < 3; i++) {
        double bound = 3 * 14 * ldexp(1.0, -23) * loss[0];  // two steps, and the mean of 27 windows in 14 batches
        expect(fabs(loss[i] - loss[0]) <= bound, "%d ranks: %.9g, one: %.9g", i + 1, loss[i], loss[0]);
        expect(strcmp(sample[i], sample[0]) == 0, "%d ranks: %s\none: %s", i + 1, sample[i], sample[0]);
    }
}
