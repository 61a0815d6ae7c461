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
    Child child = {};
    child.threads = 8;  // to draw the weights
    const char* run = joined(work, "run");
    start_ranks(&child, true, ranks,
                "--layers 4 --channels 1024 --heads 16 --seq 1024 --batch 16 --tokens-per-step %d --steps 1000000 "
                "--warmup 2 --val-every 0 --sample-every 0 --run %s --shard %s",
                32768 * ranks, run, mode);
    expect(wait_for_step(&child, run, 3), "no third step: %s", ERR(child));
    int count = ranks_of(&child, process, 8);
    kill(process[count - 1], SIGKILL);  // before it would save
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
    check_losses(test, false, OF_FP32, DESCENT " --weights fp32 --shard weights", 0.01);
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

TEST(multi_refused_gpu) {
    if (getenv("NIBBLE_SANITIZE")) skip("processes of their own");
    const char* work = work_folder();
    refused_ranks("more GPUs than there are", "was typed and this machine shows",
                  formatted("type --gpus %d", test_gpus()), true, test_gpus() + 1, "--steps 1 --run %s/run", work);
}
