#!/usr/bin/env bash
# What only a GPU can prove, on a machine that is lent for minutes; logs go to $OUT (default: build/device). The exit status
# is 1 where something failed.
#   dev/device.sh pack       here, without a GPU: builds, and puts what was built and build/wiki into .carry/built
#   dev/device.sh unpack     there, first of all; the other steps then find everything built, and no test is skipped
#   dev/device.sh prove      all tests (28 at once), racecheck; $OUT/logs.tgz
#   dev/device.sh launchers  two groups of processes as two machines have them, by torchrun's and by Slurm's variables;
#                            without a GPU over the tests' stand-in for NCCL
# Speed and loss have commands of their own (README.md), such as ./build/dev/optim --csv FILE, or for a part of a study
#   python3 dev/compare/run.py dev/compare/sweeps/d6.toml --out build/d6 --budget 480 --no-report
# where build/d6 holds the runs.jsonl of dev/compare/results/d6, or they are repeated.
set -u -o pipefail
cd "$(dirname "$0")/.." || exit
OUT=${OUT:-build/device}
export NIBBLE_GPT2=build/wiki # which has GPT-2's vocabulary
mkdir -p "$OUT" build/logs
status=0
gpus=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU ')
programs=(train test_gpt2 build/dev/bench build/dev/optim)

failed() {
    echo "FAILED: $*"
    status=1
}

# Two groups of processes, each of which sees half of the GPUs, end with the weights of --gpus N.
launchers() {
    local n=$((gpus / 2 * 2)) steps=100 run=build/launchers by device=gpu stand_in= words step
    [ "$gpus" != 1 ] || { failed "launchers: two groups need 2 GPUs"; return; }
    [ "$gpus" != 0 ] || n=4 steps=10 device=cpu stand_in=1
    step=$(printf %08d "$steps")
    words="--device $device --steps $steps --shard states --sample-every 0 --val-every 0 --join-timeout 60"
    local half=$((n / 2)) train="NIBBLE_STAND_IN=$stand_in $PWD/train $words" log
    log=$(realpath "$OUT")/launchers.log
    # shellcheck disable=SC1090
    . <(sed '/^case /,$d' dev/unit/commands.txt) # launched, $torchrun and same
    local slurm='SLURM_JOB_ID=$port SLURM_STEP_ID=0 SLURM_PROCID=$r SLURM_LOCALID=$((r % (n / 2))) SLURM_STEP_NUM_TASKS=$n
        SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=localhost,localhost'
    local own='CUDA_VISIBLE_DEVICES=$(seq -s, $((r / half * half)) $((r / half * half + half - 1)))'
    rm -rf "$run" && mkdir -p "$run" && cd "$run" || exit
    eval "$train --gpus $n --run gpus" > "$log" 2>&1 || failed "--gpus: $log"
    for by in torchrun slurm; do
        local its=$slurm
        [ "$by" = slurm ] || its="$torchrun TORCHELASTIC_RUN_ID=none"
        rm -rf launched && launched "${its//$'\n'/}" "$n" "$own $train --run launched"
        tail -n +1 ./*.out ./*.err >> "$log"
        grep '^ ranks ' 0.out && same gpus launched "$step" && echo "$by: two groups of $half, the weights of --gpus $n" || failed "$by: $log"
    done
    cd - > /dev/null || exit
}

pack() {
    local to=.carry/built
    [ -d build/wiki ] || { failed "pack: build/wiki is missing: dev/compare/README.md says how it is made"; return; }
    make -j"$(nproc)" "${programs[@]}" > "$OUT/make.log" 2>&1 || { tail "$OUT/make.log"; exit 1; }
    rm -rf "$to" && mkdir -p "$to" && tar -cf - "${programs[@]}" build/wiki | xz -9 -T1 > "$to/all.tar.xz" &&
        du -sh "$to" || { rm -rf "$to"; failed pack; }
}

unpack() {
    tar -xJf .carry/built/all.tar.xz || { echo "FAILED: unpack"; exit 1; }
}

prove() {
    NIBBLE_TEST_SECONDS=300 ./test_gpt2 -j 28 > build/logs/test.log 2>&1 || failed test
    grep -B 8 '^FAIL' build/logs/test.log
    tail -n 1 build/logs/test.log
    compute-sanitizer --tool racecheck --error-exitcode 1 ./test_gpt2 --here -k _race_gpu > build/logs/race.log 2>&1 || failed racecheck
    tail -n 2 build/logs/race.log
}

for step in "$@"; do
    case $step in
    pack | unpack | prove | launchers) "$step" ;;
    *) echo "device.sh: unknown step $step; type pack, unpack, prove or launchers" >&2; exit 2 ;;
    esac
    echo "$step: ended after $SECONDS s"
done
tar -C build -czf "$OUT/logs.tgz" logs
exit $status
