"""What ./train says of itself: its options, the bytes of its formats, and each run's plan before the first starts."""

import hashlib
import os
import re
import subprocess
import time
from pathlib import Path

from sweep import Problem

ROOT = Path(__file__).resolve().parents[2]  # runs start here, so paths of a sweep are relative to it
WHOLE = 64 << 20


class Trainer:
    def __init__(self, path):
        self.path = Path(path).resolve()
        if not os.access(self.path, os.X_OK) or self.path.is_dir():
            raise Problem(f"{path}: there is no such program; type `make` first, or --trainer PATH")
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
        """The same for the same corpus, wherever it lies. The built-in text belongs to the program."""
        paths = tuple(run.options.get(name, "") for name in ("data", "val"))
        if paths not in self.data_keys:
            used = [path for path in paths if path]
            self.data_keys[paths] = fingerprint(used if paths[0] else [*used, str(self.path)])
        return self.data_keys[paths]


def fingerprint(paths):
    """A hash of all files: of the whole up to 64 MiB, else of the size, the first and the last of these 64 MiB.

    Names do not matter. The program, whose built-in text may change in a few bytes, is always taken whole.
    """
    result = hashlib.sha256()
    for path in paths:
        at = ROOT / path
        files = sorted(at.iterdir()) if at.is_dir() else sorted(at.parent.glob(at.name))
        for file in files:
            if not file.is_file() or file.name == "meta.json":  # which has dates and paths
                continue
            with file.open("rb") as content:
                size = file.stat().st_size
                result.update(b"%d " % size + content.read(WHOLE))
                content.seek(max(min(size, WHOLE), size - WHOLE))
                result.update(content.read())
    return result.hexdigest()[:16]


def refused(sweep, run, text):
    """./train's sentence with the line of the option that it names."""
    sentence = text.strip().split("\n")[-1].removeprefix("train: error: ") if text.strip() else "ended without a word"
    named = [name for name in re.findall(r"--([\w-]+)", sentence) if name in run.options]
    line = run.lines.get(named[0] if named else "", run.lines[""])
    return Problem(f"{sweep.path}:{line}: {run.name}: {sentence}")


def read_plan(text, trainer):
    """Figures of the banner."""
    batch = re.search(r"= (\d+) tokens a step  (\d+) steps", text)
    optim = re.search(r"^ optim .* weights (\S+) .* ([\d.]+) B/param", text, re.M)
    memory = re.search(r"^ memory .*= ([\d.]+) (GiB|MiB)", text, re.M)
    data = re.search(r"^ data +(\S.*)", text, re.M)
    if not (batch and optim and memory and data):
        raise Problem(f"{trainer.path}: the plan of --dry-run does not read as ./train's; name another --trainer")
    weights = trainer.weights[optim[1]]
    return {
        "tokens_per_step": int(batch[1]),
        "steps": int(batch[2]),
        "data": data[1],
        "weights_bytes": weights,
        "state_bytes": round(float(optim[2]) - weights, 3),
        "memory_mib": float(memory[1]) * (1024 if memory[2] == "GiB" else 1),
    }


def check(sweep, runs, trainer, environment):
    """Plans every configuration with --dry-run, several at once; the first that ./train refuses is a Problem."""
    todo = list({run.name: run for run in runs}.values())
    plans, active, refusals = {}, [], []
    while todo or active:
        while todo and len(active) < max(2, os.cpu_count() or 2):
            run = todo.pop(0)
            command = trainer.command(run, "--dry-run")
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
            active.append((run, subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)))
        for run, process in [pair for pair in active if pair[1].poll() is not None]:
            out, err = process.communicate()
            active.remove((run, process))
            if process.returncode != 0:
                refusals.append((run.lines["order"], refused(sweep, run, err)))
                todo.clear()
            else:
                plans[run.name] = read_plan(out, trainer)
        time.sleep(0.005)
    if refusals:
        raise min(refusals, key=lambda pair: pair[0])[1]
    for run in runs:
        run.plan = plans[run.name]
