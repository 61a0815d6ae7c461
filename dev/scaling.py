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
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from problem import Parser, Problem, answered

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Died(Exception):
    """Says that a run ended before its steps were done, with the last lines that it printed."""


def write_tokens(path, tokens):
    """Writes a .bin shard as data/loader.h describes it."""
    draw = random.Random(1)
    few = [int(50257 * draw.random() ** 3) for _ in range(1 << 17)]
    header = array.array("i", [20240520, 1, tokens] + [0] * 253)
    with open(path, "wb") as file:
        file.write(header.tobytes())
        file.write(array.array("H", (few * (tokens // len(few) + 1))[:tokens]).tobytes())


def ask_gpus(what, *more):
    """Returns a line for each GPU."""
    query = ["nvidia-smi", "--query-gpu=" + what, "--format=csv,noheader,nounits", *more]
    try:
        found = subprocess.run(query, capture_output=True, text=True)
    except OSError as error:
        raise Problem("nvidia-smi: %s; this table wants NVIDIA GPUs and their driver" % error.strerror) from None
    if found.returncode != 0:
        raise Problem("%s: %s" % (" ".join(query), " ".join((found.stdout + found.stderr).split())))
    return found.stdout.split()


def memory_in_use(gpu):
    """Returns GiB."""
    return int(ask_gpus("memory.used", "--id=" + gpu)[0]) / 1024


class Run:
    """One ./train on these GPUs, which is stopped once its log has `steps` steps."""

    def __init__(self, options, folder, size, gpus, shard):
        model, batch, micro_batches = size
        self.run, self.steps, self.skip = "%s/run_%s" % (folder, gpus[0]), options.steps, options.skip
        self.gpu, self.before, self.seen = gpus[0], memory_in_use(gpus[0]), 0.0
        shutil.rmtree(self.run, ignore_errors=True)
        tokens = batch * options.seq * micro_batches * len(gpus)
        command = [options.trainer, "--data", folder + "/tokens.bin", "--val", folder + "/tokens.bin",
                   "--model", model, "--batch", str(batch), "--seq", str(options.seq), "--tokens-per-step", str(tokens),
                   "--steps", "1000000", "--warmup", "2", "--val-every", "0", "--sample-every", "0", "--save",
                   "none", "--run", self.run, "--gpus", str(len(gpus)), "--shard", shard] + options.more
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES=",".join(gpus))
        self.output = open(self.run + ".txt", "w+")
        self.child = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT, env=environment)

    def trained(self):
        try:
            with open(self.run + "/log.jsonl") as file:
                return [json.loads(line) for line in file if '"train"' in line and line.endswith("}\n")]
        except OSError:
            return []

    def end(self):
        self.child.kill()  # ranks end with the process that made them
        self.child.wait()

    def finish(self):
        """Returns the median seconds of a step, GiB as planned and as seen, and the last loss."""
        while self.child.poll() is None:
            done = len(self.trained()) >= self.steps
            self.seen = max(self.seen, memory_in_use(self.gpu) - self.before)
            if done:
                break
            time.sleep(0.2)
        train = self.trained()[:self.steps]
        self.end()
        self.output.seek(0)
        output = self.output.read()
        end = time.monotonic() + 60
        while memory_in_use(self.gpu) > self.before + 0.1:
            if time.monotonic() > end:
                raise Problem("memory of GPU %s is taken since the run began, by another program; stop that one" % self.gpu)
            time.sleep(0.1)
        if len(train) < self.steps:
            print(output, file=sys.stderr)
            words = output.strip().split("\n")[-1].removeprefix("train: error: ").replace("|", "/")
            raise Died(words or "ended without a word")
        unit = re.search(r" = ([0-9.]+) (GiB|MiB) of", output)
        plan = float(unit.group(1)) / (1 if unit.group(2) == "GiB" else 1024)
        return statistics.median(line["step_s"] for line in train[self.skip:]), plan, self.seen, train[-1]["loss"]


def numbers(name, texts):
    """Returns the numbers, each of which is 1 or more."""
    if not all(re.fullmatch(r"0*[1-9]\d*", text) for text in texts):
        raise Problem("%s wants numbers of 1 or more" % name)
    return [int(text) for text in texts]


def options_read():
    parser = Parser(prog="scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="gpt2:64:1,gpt2:64:4,gpt2-xl:16:1,gpt2-xl:16:4")
    parser.add_argument("--gpus", help="default: those of 1, 2, 4 and 8 that there are")
    parser.add_argument("--shard", default="none,states,grads,weights")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip", type=int, default=6)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--trainer", default=os.path.join(HERE, "train"))
    options, options.more = parser.parse_known_args()
    counts = numbers("--gpus %s" % options.gpus, (options.gpus or "1,2,4,8").split(","))
    if not 0 <= options.skip < options.steps:
        raise Problem("--skip %d leaves none, or too many, of --steps %d" % (options.skip, options.steps))
    sizes = [text.split(":") for text in options.sizes.split(",")]
    if any(len(size) != 3 for size in sizes):
        raise Problem("--sizes %s: write MODEL:BATCH:MICRO_BATCHES, such as gpt2:64:1" % options.sizes)
    options.sizes = [(model, *numbers("--sizes %s" % options.sizes, size)) for model, *size in sizes]
    if not os.access(options.trainer, os.X_OK):
        raise Problem("--trainer %s is not there, or no program; type `make`" % options.trainer)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    options.names = visible.split(",") if visible else ask_gpus("index")
    options.counts = [count for count in counts if options.gpus or count <= len(options.names)]
    if max(options.counts) > len(options.names):
        raise Problem("--gpus %s: this machine shows %d" % (options.gpus, len(options.names)))
    return options


def at_once(runs):
    """Measures all at the same time. Returns for each what finish() returned, or what it raised where its run died."""
    found, begun = [], []
    try:
        begun.extend(runs)
        for run in begun:
            try:
                found.append(run.finish())
            except Died as died:
                found.append(died)
        return found
    finally:
        for run in begun:
            run.end()


def table_rows(options, folder, size):
    """Returns the rows of a size as texts."""
    names, beginning = options.names[:max(options.counts)], "| %s, %d x %d | %%d | %%s |" % size

    def row(gpus, shard, found, share):
        if isinstance(found, Died):
            return beginning % (gpus, shard) + " died: %s |" % found
        seconds, plan, seen, loss = found
        return beginning % (gpus, shard) + " %.1f | %.0f | %.1f %% | %.2f | %.2f | %.3f | %.4f |" % (
            1e3 * seconds, size[1] * options.seq * size[2] * gpus / seconds, 100 * gpus / seconds / share,
            plan, seen, seen / plan, loss)

    alone = at_once(Run(options, folder, size, [name], "none") for name in names)
    dead = [one for one in alone if isinstance(one, Died)]
    if dead:
        yield row(1, "-", dead[0], 0)
        return
    if 1 in options.counts:
        mean = statistics.mean(one[0] for one in alone)
        slowest, sum_of_rates = max(one[0] for one in alone), sum(1 / one[0] for one in alone)
        yield row(1, "-", [mean, *alone[0][1:]], sum_of_rates / len(alone) * slowest / mean)
    for gpus in options.counts:
        shards, room = options.shard.split(",") if gpus > 1 else [], len(names) // gpus
        for first in range(0, len(shards), room):
            some = shards[first:first + room]
            all_of = at_once(Run(options, folder, size, names[i * gpus:(i + 1) * gpus], s) for i, s in enumerate(some))
            for i, found in enumerate(all_of):
                yield row(gpus, some[i], found, sum(1 / one[0] for one in alone[i * gpus:(i + 1) * gpus]))


def main():
    options = options_read()
    dead = False
    print("| size, batch x micro-batches a GPU | GPUs | shard | ms | tokens/s | of N x | GiB planned | seen | ratio | loss |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        write_tokens(folder + "/tokens.bin", 1 << 22)
        for size in options.sizes:
            for row in table_rows(options, folder, size):
                dead = dead or " died: " in row
                print(row, flush=True)
    return int(dead)


if __name__ == "__main__":
    sys.exit(answered("scaling", main))
