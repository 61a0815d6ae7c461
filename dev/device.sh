#!/usr/bin/env bash
# What only a GPU can prove, in one call each; logs go to $OUT (default: build/device).
#   dev/device.sh test       build, make test
#   dev/device.sh bench      make bench, attention's table
#   dev/device.sh optim      the optimizer's table, and the default run with every preset
#   dev/device.sh default    ./train with no options
#   dev/device.sh train      GPT-2 124M, 300 steps of 0.5M tokens of .carry's Wikipedia text; export and resume checked
#   dev/device.sh multi      on 2 or 4 GPUs: the tests of several ranks, torchrun's and Slurm's variables, the scaling table (SCALING=arguments)
#   dev/device.sh sanitize   make sanitize
# `train` wants .carry/wiki_train_a.txt.xz, .carry/wiki_val.txt.xz and .carry/tokenizer/ (encoder.json, vocab.bpe).
set -u -o pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-build/device}
mkdir -p "$OUT"
nvidia-smi --query-gpu=name,driver_version,clocks.sm,memory.used --format=csv,noheader

build() { (time make -j16 "$@") > "$OUT/make.log" 2>&1 || { tail -n 40 "$OUT/make.log"; exit 1; }; tail -n 3 "$OUT/make.log"; }

for step in "$@"; do
    case $step in
    test)
        build train test_gpt2
        make test 2>&1 | tee "$OUT/test.log" | grep -vE '^(ok|skip) ' ;;
    bench)
        build train build/dev/bench build/dev/attention build/dev/optim
        ./build/dev/attention 2>&1 | tee "$OUT/attention.log"
        ./build/dev/bench 2>&1 | tee "$OUT/bench.log" ;;
    optim)
        build train build/dev/optim
        ./build/dev/optim --csv "$OUT/optim.csv" 2>&1 | tee "$OUT/optim.log"
        for preset in $(./train --list-presets | awk 'NR > 1 { print $1 }'); do
            rm -rf build/preset
            printf '%-12s ' "$preset"
            ./train --preset "$preset" --run build/preset --sample-every 0 2>&1 | grep -E '^val +400 '
        done | tee "$OUT/presets.log" ;;
    default)
        build train
        rm -rf build/default && ./train --run build/default 2>&1 | tee "$OUT/default.log" | tail -n 40 ;;
    train)
        build train
        [ -d build/wiki ] || python3 data/prepare.py .carry/wiki_train_a.txt.xz --val .carry/wiki_val.txt.xz \
            --vocab .carry/tokenizer --out build/wiki 2>&1 | tail -n 5
        rm -rf build/gpt2
        ./train --data build/wiki --model gpt2 --batch 64 --steps 300 --warmup 60 --val-every 50 --val-tokens 655360 --save-every 250 --keep 3 \
            --print-every 10 --prompt "The city of" --run build/gpt2 2>&1 | tee "$OUT/train.log"
        cp build/gpt2/log.jsonl "$OUT/log.jsonl"
        # Resumed from step 250, the same bytes at step 300.
        cp -r build/gpt2/step_00000250 build/resume_from
        ./train --resume build/resume_from --run build/resumed --sample-every 0 2>&1 | tail -n 6 | tee "$OUT/resume.log"
        for file in model.safetensors optimizer.safetensors; do
            cmp build/gpt2/step_00000300/$file build/resumed/step_00000300/$file && echo "$file: resumed == uninterrupted"
        done | tee -a "$OUT/resume.log"
        # transformers loads the checkpoint and finds our validation loss on the same 640 windows.
        ours=$(grep '"type": "val"' build/gpt2/log.jsonl | tail -n 1 | sed 's/.*"loss": \([0-9.]*\).*/\1/')
        echo "our validation loss: $ours" | tee "$OUT/export.log"
        python3 dev/reference/check_export.py build/gpt2/step_00000300 --tokens build/wiki/val_000000.bin --windows 640 \
            --batch 16 --expect "$ours" --tolerance 0.01 2>&1 | tail -n 3 | tee -a "$OUT/export.log"
        ./train --sample "The history of" --model build/gpt2/step_00000300 --sample-tokens 100 | tee "$OUT/sample.log" ;;
    multi)
        build train test_gpt2
        gpus=$(nvidia-smi -L | wc -l)
        ./test_gpt2 -k multi -k exchange -k launch 2>&1 | tee "$OUT/multi.log" | grep -vE '^(ok|skip) '
        # Two groups of processes, as two machines would have them.
        rm -rf build/two_groups build/slurm
        for group in 0 1; do
            CUDA_VISIBLE_DEVICES=$(seq -s, $((group * gpus / 2)) $(((group + 1) * gpus / 2 - 1))) torchrun --no-python \
                --nnodes 2 --node-rank $group --nproc-per-node $((gpus / 2)) --master-addr 127.0.0.1 --master-port 29400 \
                -- ./train --run build/two_groups --steps 100 --shard states > "$OUT/torchrun_$group.log" 2>&1 &
        done
        wait
        tail -n 25 "$OUT/torchrun_0.log"
        # The same as srun would start them, by its variables: there is no Slurm on such a machine.
        for task in $(seq 0 $((gpus - 1))); do
            group=$((task / (gpus / 2)))
            CUDA_VISIBLE_DEVICES=$(seq -s, $((group * gpus / 2)) $(((group + 1) * gpus / 2 - 1))) SLURM_JOB_ID=$$ SLURM_STEP_ID=0 \
                SLURM_PROCID=$task SLURM_LOCALID=$((task % (gpus / 2))) SLURM_STEP_NUM_TASKS=$gpus SLURM_STEP_NUM_NODES=2 \
                SLURM_STEP_NODELIST=localhost,localhost ./train --run build/slurm --steps 100 --shard states > "$OUT/slurm_$task.log" 2>&1 &
        done
        wait
        grep ' ranks ' "$OUT/slurm_0.log" && cmp build/two_groups/step_00000100/model.safetensors build/slurm/step_00000100/model.safetensors &&
            echo "Slurm's variables and torchrun: the same weights"
        python3 dev/scaling.py ${SCALING:-} 2>&1 | tee "$OUT/scaling.md" ;;
    sanitize)
        build test_gpt2
        make sanitize 2>&1 | tee "$OUT/sanitize.log" | tail -n 40 ;;
    *) echo "device.sh: unknown step $step; type test, bench, optim, default, train, multi or sanitize" >&2; exit 2 ;;
    esac
done
