#!/usr/bin/env python3
"""Times steps of whole training runs on 1, 2, 4, ... GPUs with every --shard, and prints a Markdown table.

    dev/scaling.py [--sizes gpt2:64:1,gpt2:64:4,gpt2-xl:16:1,gpt2-xl:16:4] [--gpus 1,2,4,8] [--shard none,states,grads,weights]

A size is MODEL:BATCH:MICRO_BATCHES of one GPU, so that a GPU's work is the same in every column. The tokens are random
(Zipf-like); nothing is validated or sampled. A run ends when its steps are done, before it would save. ms is the median
step of those after the first few; `of N x` is the rate as a share of the sum of the GPUs' own: each is timed alone,
all at the same time, and ms of one GPU is their mean. In its row the share is what ranks reach that exchange nothing
and wait for the slowest GPU. Runs that need fewer GPUs than there are share the machine: each has GPUs of its own. GiB
is the plan; beside it are the most that nvidia-smi has shown on the first GPU of a run, less what was in use before the
run, and the ratio of the two. A run that dies is a row with its last words; the others go on, and the exit status is 1;
it is 2 where what was typed is wrong, or nvidia-smi and its GPUs are not as they should be.

NIBBLE_NCCL=libnccl.so.2 measures NCCL in place of the DMA copy engines. Options of ./train may follow.
"""
import argparse
import array
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from problem import Parser, Problem, answered
from runlog import RunLog

ROOT = Path(__file__).resolve().parents[1]


def write_tokens(path, tokens):
    """Writes a .bin shard as data/loader.h describes it."""
    draw = random.Random(1)
    few = [int(50257 * draw.random() ** 3) for _ in range(1 << 17)]
    header = array.array("i", [20240520, 1, tokens] + [0] * 253)
    path.write_bytes(header.tobytes() + array.array("H", (few * (tokens // len(few) + 1))[:tokens]).tobytes())


def ask_gpus(what, *more):
    """Returns a line for each GPU."""
    query = ["nvidia-smi", "--query-gpu=" + what, "--format=csv,noheader,nounits", *more]
    try:
        found = subprocess.run(query, capture_output=True, text=True)
    except OSError as error:
        raise Problem(f"nvidia-smi: {error.strerror}; this table wants NVIDIA GPUs and their driver") from None
    if found.returncode != 0:
        raise Problem(f"{' '.join(query)}: {' '.join((found.stdout + found.stderr).split())}")
    return found.stdout.split()


def memory_in_use(gpu):
    """Returns GiB."""
    return int(ask_gpus("memory.used", "--id=" + gpu)[0]) / 1024


class Run:
    """One ./train on these GPUs, which is stopped once its log has `steps` steps."""

    def __init__(self, options, folder, size, gpus, shard):
        model, batch, micro_batches = size
        self.run, self.options, self.gpu = folder / f"run_{gpus[0]}", options, gpus[0]
        self.before, self.seen, self.died = memory_in_use(self.gpu), 0.0, ""
        shutil.rmtree(self.run, ignore_errors=True)
        self.tokens = batch * options.seq * micro_batches * len(gpus)
        command = (f"{options.trainer} --data {folder}/tokens.bin --val {folder}/tokens.bin --model {model} --batch {batch} "
                   f"--seq {options.seq} --tokens-per-step {self.tokens} --steps 1000000 --warmup 2 --val-every 0 "
                   f"--sample-every 0 --save none --run {self.run} --gpus {len(gpus)} --shard {shard}").split()
        command += [] if "--preset" in options.more else ["--preset", "adamw32"]  # which the tables have
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES=",".join(gpus))
        self.output = open(f"{self.run}.txt", "w+")
        self.child = subprocess.Popen(command + options.more, stdout=self.output, stderr=subprocess.STDOUT, env=environment)

    def trained(self):
        return RunLog(self.run / "log.jsonl").read(missing_ok=True).records["train"]

    def end(self):
        self.child.kill()  # ranks end with the process that made them
        self.child.wait()

    def finish(self):
        """Measures the median seconds of a step, GiB as planned and as seen, and the last loss; or why the run died."""
        while self.child.poll() is None and len(self.trained()) < self.options.steps:
            self.seen = max(self.seen, memory_in_use(self.gpu) - self.before)
            time.sleep(0.2)
        train = self.trained()[: self.options.steps]
        self.end()
        self.output.seek(0)
        output, end = self.output.read(), time.monotonic() + 60
        while memory_in_use(self.gpu) > self.before + 0.1 and time.monotonic() < end:  # the driver frees it late
            time.sleep(0.1)
        if len(train) < self.options.steps:
            print(output, file=sys.stderr)
            self.died = output.strip().split("\n")[-1].removeprefix("train: error: ").replace("|", "/") or "ended without a word"
            return
        unit = re.search(r" = ([0-9.]+) (GiB|MiB) of", output)
        self.plan = float(unit[1]) / (1 if unit[2] == "GiB" else 1024)
        self.seconds = statistics.median(line["step_s"] for line in train[self.options.skip :])
        self.loss = train[-1]["loss"]


def counts(text):
    """Reads `1,2,4`."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text}: write numbers of 1 or more, such as 1,2,4")
    return [int(number) for number in text.split(",")]


def sizes(text):
    """Reads `gpt2:64:1,gpt2:64:4`."""
    parts = [size.split(":") for size in text.split(",")]
    if not all(re.fullmatch(r"[^:]+(:[1-9]\d*){2}", size) for size in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text}: write MODEL:BATCH:MICRO_BATCHES, such as gpt2:64:1")
    return [(model, int(batch), int(micro_batches)) for model, batch, micro_batches in parts]


def options_read():
    parser = Parser(prog="scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=sizes, default="gpt2:64:1,gpt2:64:4,gpt2-xl:16:1,gpt2-xl:16:4")
    parser.add_argument("--gpus", type=counts, help="default: those of 1, 2, 4 and 8 that there are")
    parser.add_argument("--shard", default="none,states,grads,weights")
    for name, usual in (("steps", 20), ("skip", 6), ("seq", 1024)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--trainer", default=ROOT / "train")
    options, options.more = parser.parse_known_args()
    if not 0 <= options.skip < options.steps:
        raise Problem(f"--skip {options.skip} leaves none, or too many, of --steps {options.steps}")
    if not os.access(options.trainer, os.X_OK):
        raise Problem(f"--trainer {options.trainer} is not there, or no program; type `make`")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    options.names = visible.split(",") if visible else ask_gpus("index")
    options.counts = options.gpus or [count for count in (1, 2, 4, 8) if count <= len(options.names)]
    if max(options.counts) > len(options.names):
        raise Problem(f"--gpus with {max(options.counts)}: this machine shows {len(options.names)}")
    return options


def measured(options, folder, size, wanted):
    """Makes runs of [(GPUs, shard), ...] at the same time. Returns them when all have ended."""
    begun = []
    try:
        for gpus, shard in wanted:
            begun.append(Run(options, folder, size, gpus, shard))
        for run in begun:
            run.finish()
        return begun
    finally:
        for run in begun:
            run.end()


def table_rows(options, folder, size):
    """Yields the rows of a size as texts."""
    names = options.names[: max(options.counts)]

    def row(gpus, shard, run, seconds, rates):
        """A row of a run whose steps take `seconds`, beside the sum of the GPUs' own steps a second."""
        beginning = f"| {size[0]}, {size[1]} x {size[2]} | {gpus} | {shard} |"
        if run.died:
            return f"{beginning} died: {run.died} |"
        return (f"{beginning} {1e3 * seconds:.1f} | {run.tokens / seconds:.0f} | {100 * gpus / seconds / rates:.1f} % | "
                f"{run.plan:.2f} | {run.seen:.2f} | {run.seen / run.plan:.3f} | {run.loss:.4f} |")

    alone = measured(options, folder, size, [([name], "none") for name in names])
    dead = next((run for run in alone if run.died), None)
    if dead:
        yield row(1, "-", dead, 0, 0)
        return
    mean, rates = statistics.mean(run.seconds for run in alone), [1 / run.seconds for run in alone]
    if 1 in options.counts:
        yield row(1, "-", alone[0], mean, statistics.mean(rates) / min(rates) / mean)
    for gpus in (count for count in options.counts if count > 1):
        parts = [(names[i : i + gpus], sum(rates[i : i + gpus])) for i in range(0, len(names) - gpus + 1, gpus)]
        shards = options.shard.split(",")
        for some in (shards[i : i + len(parts)] for i in range(0, len(shards), len(parts))):
            runs = measured(options, folder, size, [(part[0], shard) for part, shard in zip(parts, some)])
            for run, shard, part in zip(runs, some, parts):
                yield row(gpus, shard, run, 0 if run.died else run.seconds, part[1])


def main():
    options, dead = options_read(), False
    print("| size, batch x micro-batches a GPU | GPUs | shard | ms | tokens/s | of N x | GiB planned | seen | ratio | loss |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        write_tokens(Path(folder, "tokens.bin"), 1 << 22)
        for size in options.sizes:
            for text in table_rows(options, Path(folder), size):
                dead = dead or " died: " in text
                print(text, flush=True)
    return int(dead)


if __name__ == "__main__":
    sys.exit(answered("scaling", main))
