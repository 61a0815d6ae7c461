#!/usr/bin/env python3
"""Steps of whole training runs on 1, 2, 4, ... GPUs, with every --shard: a Markdown table.

    dev/scaling.py [--sizes gpt2:64:1,gpt2:64:4,gpt2-xl:16:1,gpt2-xl:16:4] [--gpus 1,2,4] [--shard none,states,grads,weights]

A size is MODEL:BATCH:MICRO_BATCHES of one GPU, so that a GPU's work is the same in every column. The tokens are random
(Zipf-like); nothing is validated or sampled. A run ends when its steps are done, before it would save. ms is the median
step of those after the first few; `of N x` is the rate as a share of the sum of the GPUs' own: each is timed alone,
all at the same time, and ms of one GPU is their mean. GiB is the plan, and beside it the most that nvidia-smi has shown on
the first GPU, less what was in use before the run, and the ratio of the two.
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
    """GiB on the first visible GPU."""
    first = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=" + first]
    found = subprocess.run(query, capture_output=True, text=True)
    if found.returncode != 0:
        raise SystemExit("scaling: %s: %s" % (" ".join(query), found.stdout + found.stderr))
    return int(found.stdout) / 1024


class Run:
    """One ./train on these GPUs, which is stopped once its log has `steps` steps."""

    def __init__(self, folder, size, gpus, shard, steps, extra):
        model, batch, micro_batches = size
        self.run, self.steps, self.before, self.seen = "%s/run_%s" % (folder, gpus[0]), steps, memory_in_use(), 0.0
        shutil.rmtree(self.run, ignore_errors=True)
        tokens = batch * 1024 * micro_batches * len(gpus)
        command = [os.path.join(HERE, "train"), "--data", folder + "/tokens.bin", "--val", folder + "/tokens.bin",
                   "--model", model, "--batch", str(batch), "--tokens-per-step", str(tokens), "--steps", "1000000",
                   "--warmup", "2", "--val-every", "0", "--sample-every", "0", "--save-every", "0", "--run", self.run,
                   "--gpus", str(len(gpus)), "--shard", shard] + extra
        self.words = " ".join(command)
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES=",".join(gpus))
        self.output = open(self.run + ".txt", "w+")
        self.child = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT, env=environment)

    def trained(self):
        try:
            with open(self.run + "/log.jsonl") as file:
                return [json.loads(line) for line in file if '"train"' in line and line.endswith("}\n")]
        except OSError:
            return []

    def finish(self, skip):
        """Median seconds of a step, GiB as planned and as seen, and the last loss."""
        while self.child.poll() is None and len(self.trained()) < self.steps:
            time.sleep(0.2)
            self.seen = max(self.seen, memory_in_use() - self.before)
        train = self.trained()[:self.steps]
        self.child.kill()  # ranks end with the process that made them
        self.child.wait()
        self.output.seek(0)
        output = self.output.read()
        if len(train) < self.steps:
            raise SystemExit(self.words + "\n" + output)
        unit = re.search(r" = ([0-9.]+) (GiB|MiB) of", output)
        plan = float(unit.group(1)) / (1 if unit.group(2) == "GiB" else 1024)
        end = time.monotonic() + 60
        while memory_in_use() > self.before + 0.1:
            if time.monotonic() > end:
                raise SystemExit("scaling: memory of the first GPU is taken since the run began, by another program?")
            time.sleep(0.1)
        return statistics.median(line["step_s"] for line in train[skip:]), plan, self.seen, train[-1]["loss"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="gpt2:64:1,gpt2:64:4,gpt2-xl:16:1,gpt2-xl:16:4")
    parser.add_argument("--gpus", default="1,2,4")
    parser.add_argument("--shard", default="none,states,grads,weights")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip", type=int, default=6)
    options, extra = parser.parse_known_args()
    print("| size, batch x micro-batches a GPU | GPUs | shard | ms | tokens/s | of N x | GiB planned | seen | ratio | loss |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    counts = list(map(int, options.gpus.split(",")))
    names = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(max(counts))))).split(",")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        write_tokens(folder + "/tokens.bin", 1 << 22)
        for text in options.sizes.split(","):
            size = (text.split(":")[0], *map(int, text.split(":")[1:]))
            arguments = (options.steps, extra)
            runs = [Run(folder, size, [name], "none", *arguments) for name in names[:max(counts)]]
            alone = [run.finish(options.skip) for run in runs]
            for gpus in counts:
                for shard in options.shard.split(",") if gpus > 1 else ["-"]:
                    found = Run(folder, size, names[:gpus], shard, *arguments).finish(options.skip) if gpus > 1 else (
                        statistics.mean(one[0] for one in alone), *alone[0][1:])
                    seconds, plan, seen, loss = found
                    share = sum(1 / one[0] for one in alone[:gpus]) if gpus > 1 else 1 / seconds
                    print("| %s, %d x %d | %d | %s | %.1f | %.0f | %.1f %% | %.2f | %.2f | %.3f | %.4f |" %
                          (*size, gpus, shard, 1e3 * seconds, size[1] * 1024 * size[2] * gpus / seconds,
                           100 * gpus / seconds / share, plan, seen, seen / plan, loss), flush=True)


if __name__ == "__main__":
    main()
