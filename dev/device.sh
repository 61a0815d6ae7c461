#!/usr/bin/env bash
# What only a GPU can prove; logs go to $OUT (default: build/device). The exit status is 1 where something failed.
#   dev/device.sh test       build, make test
#   dev/device.sh bench      make bench, attention's table
#   dev/device.sh optim      the optimizer's table, and the default run with every preset
#   dev/device.sh default    ./train with no options
#   dev/device.sh train      GPT-2 124M, 300 steps of 0.5M tokens of .carry's Wikipedia text; export and resume checked
#   dev/device.sh prove      what a change of device code needs, on built programs: all tests (28 at once), racecheck;
#                            $OUT/logs.tgz
#   dev/device.sh speed      after prove, what a change of kernels needs besides: the optimizer's table (of OPTIM, or all;
#                            1558M on the second GPU, if there is one), 500 steps of GPT-2 124M with each of PRESETS, a
#                            GPU each; $OUT/logs.tgz
#   dev/device.sh study      runs of dev/compare/sweeps/$SWEEP.toml (d6) that are not in results/ yet, for BUDGET seconds
#                            (480, or what TOTAL leaves), JOBS (1) a GPU: $OUT/$SWEEP.tgz holds all records, for
#                            dev/compare/results/$SWEEP (COMMIT: what they record where git cannot be asked)
#   dev/device.sh multi      on 2 or more GPUs: the tests of several ranks, by DMA copy engines
#   dev/device.sh nccl       those of them over NCCL that start ./train
#   dev/device.sh launchers  two groups of processes as two machines have them, by torchrun and by Slurm's variables; without
#                            a GPU over the tests' stand-in for NCCL
#   dev/device.sh scaling    the scaling table (SCALING=arguments of dev/scaling.py): of all sizes on 4 GPUs in more than ten
#                            minutes, so where it is cut short the next call goes on
#   dev/device.sh sanitize   make sanitize
# Device time is short, so nothing need be built there:
#   dev/device.sh pack       here, without a GPU: builds, and puts what was built, build/wiki and the tokenizer into .carry/built
#   dev/device.sh unpack     there, first of all: prove, speed, test, optim and study then build nothing, and no test is
#                            skipped; so a whole call is
#                            COMMIT=... TOTAL=585 dev/device.sh unpack prove study
#                            The next call may get another machine: before it, untar $OUT/$SWEEP.tgz here into
#                            dev/compare/results/$SWEEP, or its runs are repeated
# `train` and `study` want .carry/wiki_train_a.txt.xz, .carry/wiki_val.txt.xz and .carry/tokenizer/ (encoder.json, vocab.bpe).
set -u -o pipefail
cd "$(dirname "$0")/.." || exit
OUT=${OUT:-build/device}
mkdir -p "$OUT"
status=0
gpus=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU ')
[ "$gpus" = 0 ] || nvidia-smi --query-gpu=name,driver_version,clocks.sm,memory.used --format=csv,noheader

programs=(train test_gpt2 build/dev/bench build/dev/optim)

# make, which takes what `unpack` brought as it is.
make_unpacked() {
    local as_it_is=()
    [ -f build/unpacked ] && as_it_is=("${programs[@]/#/--old-file=}")
    make -j"$(nproc)" "${as_it_is[@]}" "$@"
}

build() {
    (time make_unpacked "$@") > "$OUT/make.log" 2>&1 || { tail -n 40 "$OUT/make.log"; exit 1; }
    tail -n 3 "$OUT/make.log"
    [ ! -f build/unpacked ] || echo "${programs[*]}: as they were unpacked, whatever the sources are"
}

failed() {
    echo "FAILED: $*"
    status=1
}

corpus() {
    [ -d build/wiki ] || python3 data/prepare.py .carry/wiki_train_a.txt.xz --val .carry/wiki_val.txt.xz \
        --tokenizer .carry/tokenizer --out build/wiki 2>&1 | tail -n 5
}

# tests LOG PATTERN...
tests() {
    local log=$1 patterns=()
    shift
    for pattern in "$@"; do patterns+=(-k "$pattern"); done
    NIBBLE_TEST_SECONDS=500 ./test_gpt2 "${patterns[@]}" 2>&1 | tee "$OUT/$log" | grep -vE '^(ok|skip) ' || failed "$OUT/$log"
}

# What torchrun gives each of its processes, where there is no torchrun.
by_variables() { # GROUP OPTIONS...
    local group=$1
    shift
    for local in $(seq 0 $((half - 1))); do
        RANK=$((group * half + local)) WORLD_SIZE=$ranks LOCAL_RANK=$local LOCAL_WORLD_SIZE=$half MASTER_ADDR=127.0.0.1 \
            MASTER_PORT=29400 TORCHELASTIC_RUN_ID=none ./train "$@" &
    done
    wait
}

by_torchrun() { # GROUP OPTIONS...
    local group=$1
    shift
    "${torchrun[@]}" --no-python --nnodes 2 --node-rank "$group" --nproc-per-node "$half" --master-addr 127.0.0.1 \
        --master-port 29400 -- ./train "$@"
}

# As srun would start them: there is no Slurm on such a machine.
by_slurm() { # GROUP OPTIONS...
    local group=$1
    shift
    for local in $(seq 0 $((half - 1))); do
        SLURM_JOB_ID=$$ SLURM_STEP_ID=0 SLURM_PROCID=$((group * half + local)) SLURM_LOCALID=$local \
            SLURM_STEP_NUM_TASKS=$ranks SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=localhost,localhost ./train "$@" &
    done
    wait
}

# Two groups of processes, each of which sees half of the GPUs, end with the weights of --gpus N.
launchers() {
    local ranks=$gpus steps=100 more=() torchrun=() by=by_torchrun
    if [ "$gpus" = 0 ]; then
        export NIBBLE_STAND_IN=1
        ranks=4 steps=10 more=(--device cpu)
    fi
    local half=$((ranks / 2)) log=$OUT/launchers.log run=build/launchers
    if command -v torchrun > /dev/null; then
        torchrun=(torchrun)
    elif python3 -c 'import torch.distributed.run' 2> /dev/null; then
        torchrun=(python3 -m torch.distributed.run)
    else
        by=by_variables
        echo "no torchrun here: its variables instead"
    fi
    [ "$half" -gt 0 ] || { failed "launchers: two groups need 2 GPUs"; return; }
    more+=(--steps "$steps" --shard states --sample-every 0 --val-every 0 --join-timeout 60)
    rm -rf "$run" && mkdir -p "$run"
    ./train --gpus $((half * 2)) --run "$run/gpus" "${more[@]}" > "$log" 2>&1 || failed "--gpus: $log"
    for launcher in $by by_slurm; do
        for group in 0 1; do
            CUDA_VISIBLE_DEVICES=$(seq -s, $((group * half)) $(((group + 1) * half - 1))) "$launcher" "$group" \
                --run "$run/$launcher" "${more[@]}" > "$run/$launcher.$group" 2>&1 &
        done
        wait
        (cd "$run" && tail -n +1 "$launcher.0" "$launcher.1") >> "$log"
        grep '^ ranks ' "$run/$launcher.0" &&
            cmp "$run/gpus/step_$(printf %08d "$steps")/model.safetensors" \
                "$run/$launcher/step_$(printf %08d "$steps")/model.safetensors" &&
            echo "$launcher, two groups of $half: the weights of --gpus $((half * 2))" || failed "$launcher: $log"
    done
}

pack() {
    local to=.carry/built
    make -j"$(nproc)" "${programs[@]}" > "$OUT/make.log" 2>&1 || { tail "$OUT/make.log"; exit 1; }
    [ -d build/wiki ] || { failed "pack: build/wiki is missing: dev/compare/README.md says how it is made"; return; }
    rm -rf "$to" && mkdir -p "$to" && tar -cf - "${programs[@]}" | xz -9 -T1 > "$to/programs.tar.xz" &&
        tar -cf - build/wiki | xz -9e > "$to/wiki.tar.xz" &&
        tar -C ../shared/data -cf - tokenizer | xz -9 > "$to/tokenizer.tar.xz" && du -sh "$to" || { rm -rf "$to"; failed pack; }
}

unpack() {
    local from=.carry/built
    tar -xJf "$from/programs.tar.xz" && tar -xJf "$from/wiki.tar.xz" && mkdir -p ../shared/data &&
        tar -C ../shared/data -xJf "$from/tokenizer.tar.xz" && touch build/unpacked || { echo "FAILED: unpack"; exit 1; }
}

# The optimizer's table of some sizes on one GPU, to build/logs/optim_NAME.csv and .log.
table() { # GPU SIZES NAME
    CUDA_VISIBLE_DEVICES=$1 ./build/dev/optim --sizes "$2" --csv "build/logs/optim_$3.csv" ${OPTIM:-} > "build/logs/optim_$3.log" 2>&1
}

# Both tables, at once where there are two GPUs.
tables() {
    if [ "$gpus" -gt 1 ]; then
        table 0 1g,124m a &
        table 1 1558m b || failed build/logs/optim_b.log
        wait $! || failed build/logs/optim_a.log
    else
        table 0 1g,124m a || failed build/logs/optim_a.log
        table 0 1558m b || failed build/logs/optim_b.log
    fi
    tail -n 1 build/logs/optim_a.log build/logs/optim_b.log
}

# The default run with every preset: its last validation.
default_presets() {
    local rc=0 preset
    for preset in $(./train --list-presets | awk 'NR > 1 && $1 !~ /^--/ { print $1 }'); do
        rm -rf build/preset
        printf '%-12s ' "$preset"
        ./train --preset "$preset" --run build/preset --sample-every 0 2>&1 | grep -E '^val +400 ' || { echo died; rc=1; }
    done
    return $rc
}

# GPT-2 124M: the log, whether a resumed run ends with the same bytes, whether transformers finds our validation loss.
train_gpt2() {
    local file ours
    rm -rf build/gpt2 build/resume_from build/resumed
    ./train --data build/wiki --model gpt2 --batch 64 --steps 300 --warmup 60 --val-every 50 --val-tokens 655360 --save-every 250 --keep 3 \
        --print-every 10 --prompt "The city of" --run build/gpt2 2>&1 | tee "$OUT/train.log" || { failed "$OUT/train.log"; return; }
    cp build/gpt2/log.jsonl "$OUT/log.jsonl"
    cp -r build/gpt2/step_00000250 build/resume_from
    ./train --resume build/resume_from --run build/resumed --sample-every 0 2>&1 | tail -n 6 | tee "$OUT/resume.log" || failed "$OUT/resume.log"
    for file in model.safetensors optimizer.safetensors; do
        cmp build/gpt2/step_00000300/$file build/resumed/step_00000300/$file && echo "$file: resumed == uninterrupted" || failed "$file"
    done
    # On the same 640 windows.
    ours=$(grep '"type": "val"' build/gpt2/log.jsonl | tail -n 1 | sed 's/.*"loss": \([0-9.]*\).*/\1/')
    echo "our validation loss: $ours" | tee "$OUT/export.log"
    python3 dev/reference/check_export.py build/gpt2/step_00000300 --tokens build/wiki/val_000000.bin --windows 640 \
        --batch 16 --expect "$ours" --tolerance 0.01 2>&1 | tail -n 3 | tee -a "$OUT/export.log" || failed "$OUT/export.log"
    ./train --sample "The history of" --model build/gpt2/step_00000300 --sample-tokens 100 | tee "$OUT/sample.log" || failed "$OUT/sample.log"
}

# 500 steps of GPT-2 124M with each preset named, a GPU each.
presets() {
    local gpu=0 preset
    for preset; do
        rm -rf "build/p_$preset"
        CUDA_VISIBLE_DEVICES=$gpu ./train --data build/wiki --model gpt2 --batch 64 --tokens-per-step 65536 --steps 500 \
            --warmup 60 --lr 6e-4 --preset "$preset" --run "build/p_$preset" --sample-every 0 \
            > "build/logs/$preset.log" 2>&1 &
        gpu=$((gpu + 1))
        [ "$gpu" -lt "$gpus" ] || { wait; gpu=0; }
    done
    wait
    for preset; do
        echo "$preset"
        grep -E 'B/param|^ override|^val|error' "build/logs/$preset.log"
        grep -q '^val  *500 ' "build/logs/$preset.log" || failed "build/logs/$preset.log"
    done
}

# The study's records so far, those of the repository among them.
records() {
    local sweep=${SWEEP:-d6} records=build/study/${SWEEP:-d6}
    mkdir -p "$records"
    [ -f "$records/runs.jsonl" ] || cp "dev/compare/results/$sweep/runs.jsonl" "$records/" 2> /dev/null || echo "no runs of $sweep yet" >&2
    echo "$records"
}

for step in "$@"; do
    case $step in
    pack) pack ;;
    unpack) unpack ;;
    test)
        build train test_gpt2
        NIBBLE_TEST_SECONDS=500 make_unpacked test 2>&1 | tee "$OUT/test.log" | grep -vE '^(ok|skip) ' || failed "$OUT/test.log" ;;
    prove)
        rm -rf build/logs && mkdir -p build/logs
        NIBBLE_TEST_SECONDS=300 ./test_gpt2 -j 28 > build/logs/test.log 2>&1 || failed test
        grep -B 8 '^FAIL' build/logs/test.log
        tail -n 1 build/logs/test.log
        compute-sanitizer --tool racecheck --error-exitcode 1 ./test_gpt2 --here -k _race_gpu > build/logs/race.log 2>&1 || failed racecheck
        tail -n 2 build/logs/race.log
        echo "proven after $SECONDS s"
        tar -C build -czf "$OUT/logs.tgz" logs ;;
    speed)
        mkdir -p build/logs
        tables
        presets ${PRESETS:-}
        echo "measured after $SECONDS s"
        tar -C build -czf "$OUT/logs.tgz" logs ;;
    bench)
        build train build/dev/bench build/dev/attention build/dev/optim
        ./build/dev/attention 2>&1 | tee "$OUT/attention.log" || failed "$OUT/attention.log"
        ./build/dev/bench 2>&1 | tee "$OUT/bench.log" || failed "$OUT/bench.log" ;;
    optim)
        build train build/dev/optim
        ./build/dev/optim --csv "$OUT/optim.csv" 2>&1 | tee "$OUT/optim.log" || failed "$OUT/optim.log"
        default_presets | tee "$OUT/presets.log" || failed "$OUT/presets.log" ;;
    default)
        build train
        rm -rf build/default && ./train --run build/default 2>&1 | tee "$OUT/default.log" | tail -n 40 || failed "$OUT/default.log" ;;
    train)
        build train
        corpus || { failed corpus; continue; }
        train_gpt2 ;;
    study)
        build train
        corpus || { failed corpus; continue; }
        to=$(records)
        left=${TOTAL:+$((TOTAL > SECONDS ? TOTAL - SECONDS : 0))}
        python3 dev/compare/run.py "dev/compare/sweeps/${SWEEP:-d6}.toml" --out "$to" --budget "${BUDGET:-${left:-480}}" \
            --jobs "${JOBS:-1}" --no-check --no-report --silence 120 ${COMMIT:+--commit "$COMMIT"} > "$OUT/study.log" 2>&1 || failed "$OUT/study.log"
        tail -n 2 "$OUT/study.log"
        tar -C "$to" -czf "$OUT/${SWEEP:-d6}.tgz" runs.jsonl ;;
    multi)
        build train test_gpt2
        nvidia-smi topo -m
        tests multi.log multi exchange launch ;;
    nccl)
        build train test_gpt2
        NIBBLE_NCCL=${NIBBLE_NCCL:-libnccl.so.2} tests nccl.log multi_modes_gpu multi_losses_gpu multi_goes_on_gpu \
            multi_resume_gpu multi_dead_ranks_gpu multi_signals_gpu multi_bad_token_gpu multi_memory_gpu multi_presets_gpu \
            multi_comm_gpu ;;
    launchers)
        build train
        launchers ;;
    scaling)
        build train
        python3 dev/scaling.py --keep build/scaling.jsonl ${SCALING:-} 2>&1 | tee "$OUT/scaling.md" || failed "$OUT/scaling.md" ;;
    sanitize)
        build test_gpt2
        make_unpacked sanitize 2>&1 | tee "$OUT/sanitize.log" | tail -n 40 || failed "$OUT/sanitize.log" ;;
    *) echo "device.sh: unknown step $step; type test, prove, speed, bench, optim, default, train, study, pack, unpack, multi, nccl, launchers, scaling or sanitize" >&2; exit 2 ;;
    esac
done
exit $status
