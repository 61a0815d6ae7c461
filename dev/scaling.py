#!/usr/bin/env python3
"""Steps of whole training runs on 1, 2, 4, ... GPUs, with every --shard: a Markdown table.

    dev/scaling.py [--sizes gpt2:64:1,gpt2:64:4,gpt2-xl:16:1,gpt2-xl:16:4] [--gpus 1,2,4] [--shard none,states,grads,weights]

A size is MODEL:BATCH:MICRO_BATCHES of one GPU, so that a GPU's work is the same in every column. The tokens are random
(Zipf-like); nothing is validated or sampled. ms is the median step of those after the first few; `of N x` is the rate
as a share of N times that of one GPU; GiB is the plan, and beside it what nvidia-smi shows in use on GPU 0.
"""
import argparse
import array
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import time

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def write_tokens(path, tokens):
    """A .bin shard as data/loader.h describes it."""
    draw = random.Random(1)
    few = [int(50257 * draw.random() ** 3) for _ in range(1 << 17)]
    header = array.array("i", [20240520, 1, tokens] + [0] * 253)
    with open(path, "wb") as file:
        file.write(header.tobytes())
        file.write(array.array("H", (few * (tokens // len(few) + 1))[:tokens]).tobytes())


def memory_in_use():
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    found = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return int(found[0]) / 1024 if found else 0.0


def measure(folder, model, batch, micro_batches, gpus, shard, steps, skip, extra):
    """Median seconds of a step, GiB as planned and as seen, and the last loss."""
    run = os.path.join(folder, "run")
    shutil.rmtree(run, ignore_errors=True)
    command = [os.path.join(HERE, "train"), "--data", folder + "/tokens.bin", "--val", folder + "/tokens.bin", "--model",
               model, "--batch", str(batch), "--tokens-per-step", str(batch * 1024 * micro_batches * gpus), "--steps",
               str(steps), "--warmup", "2", "--val-every", "0", "--sample-every", "0", "--save-every", "0", "--run", run,
               "--gpus", str(gpus), "--shard", shard] + extra
    seen = 0.0
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while child.poll() is None:
        time.sleep(0.5)
        seen = max(seen, memory_in_use())
    output = child.stdout.read()
    if child.returncode != 0:
        raise SystemExit(" ".join(command) + "\n" + output)
    unit = re.search(r" = ([0-9.]+) (GiB|MiB) of", output)
    plan = float(unit.group(1)) / (1 if unit.group(2) == "GiB" else 1024)
    lines = [json.loads(line) for line in open(run + "/log.jsonl")]
    train = [line for line in lines if line["type"] == "train"]
    return statistics.median(line["step_s"] for line in train[skip:]), plan, seen, train[-1]["loss"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="gpt2:64:1,gpt2:64:4,gpt2-xl:16:1,gpt2-xl:16:4")
    parser.add_argument("--gpus", default="1,2,4")
    parser.add_argument("--shard", default="none,states,grads,weights")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip", type=int, default=6)
    options, extra = parser.parse_known_args()
    print("| size, batch x micro-batches a GPU | GPUs | shard | ms | tokens/s | of N x | GiB planned | seen | loss |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        write_tokens(folder + "/tokens.bin", 1 << 22)
        for size in options.sizes.split(","):
            model, batch, micro_batches = size.split(":")[0], *map(int, size.split(":")[1:])
            one = None
            for gpus in map(int, options.gpus.split(",")):
                for shard in options.shard.split(",") if gpus > 1 else ["none"]:
                    seconds, plan, seen, loss = measure(folder, model, batch, micro_batches, gpus, shard, options.steps,
                                                        options.skip, extra)
                    rate = batch * 1024 * micro_batches * gpus / seconds
                    one = rate if gpus == 1 else one
                    share = "%.1f %%" % (100 * rate / one / gpus) if one else "-"
                    print("| %s, %d x %d | %d | %s | %.1f | %.0f | %s | %.2f | %.2f | %.4f |" %
                          (model, batch, micro_batches, gpus, shard if gpus > 1 else "-", 1e3 * seconds, rate, share, plan,
                           seen, loss), flush=True)


if __name__ == "__main__":
    main()
