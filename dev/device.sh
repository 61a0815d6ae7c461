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

# Starts ./train once for each process of a group, with the variables of torchrun or of srun.
group() { # torchrun|slurm GROUP OPTIONS...
    local launcher=$1 group=$2 local
    shift 2
    for local in $(seq 0 $((half - 1))); do
        local rank=$((group * half + local)) variables
        case $launcher in
        torchrun) variables=(RANK=$rank WORLD_SIZE=$ranks LOCAL_RANK="$local" LOCAL_WORLD_SIZE=$half MASTER_ADDR=127.0.0.1
            MASTER_PORT=29400 TORCHELASTIC_RUN_ID=none) ;;
        slurm) variables=(SLURM_JOB_ID=$$ SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_LOCALID="$local" SLURM_STEP_NUM_TASKS=$ranks
            SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=localhost,localhost) ;;
        esac
        env "${variables[@]}" ./train "$@" &
    done
    wait
}

# Two groups of processes, each of which sees half of the GPUs, end with the weights of --gpus N.
launchers() {
    local ranks=$gpus steps=100 more=()
    if [ "$gpus" = 0 ]; then
        export NIBBLE_STAND_IN=1
        ranks=4 steps=10 more=(--device cpu)
    fi
    local half=$((ranks / 2)) log=$OUT/launchers.log run=build/launchers launcher group weights
    [ "$half" -gt 0 ] || { failed "launchers: two groups need 2 GPUs"; return; }
    weights=step_$(printf %08d "$steps")/model.safetensors
    more+=(--steps "$steps" --shard states --sample-every 0 --val-every 0 --join-timeout 60)
    rm -rf "$run" && mkdir -p "$run"
    ./train --gpus $((half * 2)) --run "$run/gpus" "${more[@]}" > "$log" 2>&1 || failed "--gpus: $log"
    for launcher in torchrun slurm; do
        for group in 0 1; do
            CUDA_VISIBLE_DEVICES=$(seq -s, $((group * half)) $(((group + 1) * half - 1))) group $launcher $group \
                --run "$run/$launcher" "${more[@]}" > "$run/$launcher.$group" 2>&1 &
        done
        wait
        (cd "$run" && tail -n +1 "$launcher.0" "$launcher.1") >> "$log"
        grep '^ ranks ' "$run/$launcher.0" && cmp "$run/gpus/$weights" "$run/$launcher/$weights" &&
            echo "$launcher, two groups of $half: the weights of --gpus $((half * 2))" || failed "$launcher: $log"
    done
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
