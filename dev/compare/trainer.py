"""Asks ./train for its options, the bytes of its formats, and each run's plan before the first run starts."""

import hashlib
import os
import re
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from sweep import Problem, digest

ROOT = Path(__file__).resolve().parents[2]  # runs start here, so paths of a sweep are relative to it
WHOLE = 64 << 20

# What decides neither data nor shape, batch or memory beyond the states.
OPTIMIZER = set(
    "preset rule weights m v override lr beta1 beta2 eps weight-decay decay-mode beta3 alpha ramp clip on-nonfinite "
    "schedule warmup final-lr decay-fraction".split()
)
NOT_SMALL = ("batch", "tokens-per-step", "grads", "logit-rows", "recompute", "head")  # what a small run leaves out
SMALL = {"device": "cpu", "matmul": "fp32", "batch": "1"}


class Trainer:
    def __init__(self, path):
        self.path = Path(path).resolve()
        if not self.path.is_file():
            raise Problem(f"{path}: there is no such program; type `make` first, or --trainer PATH")
        if not os.access(self.path, os.X_OK):
            raise Problem(f"{path}: may not be started; type `chmod +x {shlex.quote(str(path))}`, or --trainer PATH")
        self.options = set(re.findall(r"^  --([\w-]+)", self.ask("--help"), re.M))
        table = self.ask("--list-formats").split("\n--grads")[0]
        self.weights = {m[1]: float(m[2]) for m in re.finditer(r"^  (\S+) +\d+ +\S+ +([\d.]+) ", table, re.M)}
        if "preset" not in self.options or not self.weights:
            raise Problem(f"{path}: --help and --list-formats do not read as ./train's; name another --trainer")
        self.data_keys = {}

    def ask(self, option):
        return subprocess.run([self.path, option], cwd=ROOT, capture_output=True, text=True).stdout

    def command(self, run, *more):
        words = [f"--{key}={value}" for key, value in sorted(run.options.items())]
        return [str(self.path), *words, f"--seed={run.seed}", *more]

    def data_key(self, run):
        """Returns a key that is the same for the same corpus, wherever it lies. The program holds the built-in text."""
        paths = tuple(run.options.get(name, "") for name in ("data", "val"))
        if paths not in self.data_keys:
            used = [path for path in paths if path]
            self.data_keys[paths] = fingerprint(used if paths[0] else [*used, str(self.path)])
        return self.data_keys[paths]


def fingerprint(paths):
    """Returns a hash of all files: of the whole up to 64 MiB, else of the size, the first and the last 64 MiB.

    Names do not matter. The built-in text is that of the program, which is far smaller.
    """
    result = hashlib.sha256()
    for path in paths:
        at = ROOT / path
        files = [at] if at.is_file() else sorted(at.iterdir()) if at.is_dir() else sorted(at.parent.glob(at.name))
        for file in files:
            if not file.is_file() or file.name == "meta.json":  # which has dates and paths
                continue
            with file.open("rb") as content:
                size = file.stat().st_size
                result.update(b"%d " % size + content.read(WHOLE))
                content.seek(max(min(size, WHOLE), size - WHOLE))
                result.update(content.read())
    return result.hexdigest()[:16]


def refused(run, text):
    """Returns ./train's sentence with the place of the option that it names."""
    sentence = text.strip().split("\n")[-1].removeprefix("train: error: ") or "it ended without a word"
    named = next((name for name in re.findall(r"--([\w-]+)", sentence) if name in {"seed", *run.options}), "")
    return Problem(f"{run.place(named)}: {run.name}: {sentence}")


def read_plan(text, weights):
    """Returns figures of the last banner of a log, or None. `weights`: bytes of their formats."""
    batch = re.findall(r"= (\d+) tokens a step  (\d+) steps", text)
    optim = re.findall(r"^ optim .* weights (\S+) .* ([\d.]+) B/param", text, re.M)
    memory = re.findall(r"^ memory .*= ([\d.]+) (GiB|MiB)", text, re.M)
    data = re.findall(r"^ data +(\S.*)", text, re.M)
    if not (batch and optim and memory and data):
        return None
    return {
        "tokens_per_step": int(batch[-1][0]),
        "steps": int(batch[-1][1]),
        "data": data[-1],
        "weights_bytes": weights[optim[-1][0]],
        "state_bytes": round(float(optim[-1][1]) - weights[optim[-1][0]], 3),
        "memory_mib": float(memory[-1][0]) * (1024 if memory[-1][1] == "GiB" else 1),
    }


def small(trainer, run):
    """Returns a dry run that checks only names and values, without a GPU, whose start costs seconds."""
    kept = {key: value for key, value in run.options.items() if key not in NOT_SMALL}
    return trainer.command(replace(run, options={**kept, **SMALL}), "--dry-run")


def dry_runs(commands, environment):
    """Returns the ends of commands, of which one per core runs at a time."""
    how = {"cwd": ROOT, "env": environment, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    with ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        return list(pool.map(lambda command: subprocess.run(command, **how), commands))


def group(run):
    """Returns a key that is the same for runs that differ only in the optimizer."""
    return digest({key: value for key, value in run.options.items() if key not in OPTIMIZER})


def check(runs, trainer, environment):
    """Lets ./train look at every configuration; the first of the file that it refuses is a Problem.

    One of each group is planned as it will run, GPU and memory included; all others without, for names and values.
    """
    configurations = list({run.name: run for run in runs}.values())
    whole = {}
    for run in configurations:
        whole.setdefault(group(run), run)
    others = [run for run in configurations if run is not whole[group(run)]]
    answers = dry_runs([trainer.command(run, "--dry-run") for run in whole.values()], environment)
    answers += dry_runs([small(trainer, run) for run in others], {**environment, "CUDA_VISIBLE_DEVICES": ""})
    plans, refusals = {}, []
    for run, ended in zip([*whole.values(), *others], answers):
        plans[run.name] = read_plan(ended.stdout, trainer.weights)
        if ended.returncode != 0:
            refusals.append((run.order, refused(run, ended.stderr)))
        elif not plans[run.name]:
            raise Problem(f"{trainer.path}: the plan of --dry-run does not read as ./train's; name another --trainer")
    if refusals:
        raise min(refusals, key=lambda pair: pair[0])[1]
    for run in runs:
        its = plans[whole[group(run)].name]
        mine = plans.get(run.name, its)
        formats = {key: mine[key] for key in ("weights_bytes", "state_bytes")}
        run.plan = {**its, **formats, "memory_mib": its["memory_mib"] if run.name == whole[group(run)].name else None}
