"""Exports of runs for dev/watch.py: tables (csv), TensorBoard's event files, Weights & Biases.

Each writer gets a run's records once. When a resume has dropped records that were written, a table and event files are
written anew; wandb cannot take a step back, so there the steps that it has keep what they were first (they are the same to
the last bit, unless options changed). A library is imported only for its own export.
"""

import csv
import hashlib
import io
import os
import re
import time

from problem import Problem, installs, python_here, say, write_whole
from runlog import KINDS

EVERY_S = 2.0
NOT_VALUES = ("type", "step", "name", "index", "nonfinite", "prompt", "text")


def values_of(kind, record):
    """Returns the finite values of a record as {name: number}, with names like "train/loss" or "eval/hellaswag/acc"."""
    prefix = f"eval/{record['name']}/" if kind == "eval" else f"{kind}/"
    return {
        prefix + field: value for field, value in record.items() if field not in NOT_VALUES and value is not None
    }


def rows_of(log):
    """Returns [(step, {name: number}, [sample's record, ...])] by step."""
    steps = {}
    for kind in KINDS:
        for record in log.records[kind]:
            row = steps.setdefault(record["step"], ({}, []))
            if kind == "sample":
                row[1].append(record)
            else:
                row[0].update(values_of(kind, record))
    return [(step, *steps[step]) for step in sorted(steps)]


def file_name(name):
    """Returns a name for a file, another one for each run."""
    text = re.sub(r"[^\w.-]", "_", name)
    return text if text == name else f"{text}_{hashlib.sha256(os.fsencode(name)).hexdigest()[:6]}"


class Csv:  # write(log, closing): what is new, `closing` when nothing will follow
    """Writes FOLDER/RUN.csv, a row per step and a column per value, anew each time: columns may be added."""

    def __init__(self, folder, name, log):
        self.path = folder / f"{file_name(name)}.csv"

    def write(self, log, closing):
        rows = rows_of(log)
        names = list(dict.fromkeys(name for _, values, _ in rows for name in values))
        text = io.StringIO()
        table = csv.writer(text)
        table.writerow(["step", *names])
        table.writerows([step, *(values.get(name, "") for name in names)] for step, values, _ in rows)
        write_whole(self.path, text.getvalue())

    def close(self):
        pass


class Tensorboard:
    """Writes event files into FOLDER/RUN/."""

    def __init__(self, folder, name, log):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            hint = installs("tensorboardX tensorboard")
            raise Problem(f"--export tensorboard needs tensorboardX; {hint}") from None
        self.make, self.folder, self.writer = SummaryWriter, folder / file_name(name), None
        self.changes, self.written = None, {}

    def write(self, log, closing):
        if self.changes != log.changes:
            if self.writer:
                self.writer.close()
            if self.folder.is_dir():
                for path in self.folder.glob("events.out.tfevents.*"):
                    path.unlink()
            self.writer, self.changes, self.written = self.make(str(self.folder)), log.changes, {}
        begin = (log.config.get("unix_s") or time.time()) - log.before
        for kind in KINDS:
            for record in log.records[kind][self.written.get(kind, 0) :]:
                when = begin + record["time_s"]
                for name, value in values_of(kind, record).items():
                    self.writer.add_scalar(name, value, record["step"], walltime=when)
                if kind == "sample":
                    self.writer.add_text(
                        "sample", record.get("prompt", "") + record["text"], record["step"], walltime=when
                    )
            self.written[kind] = len(log.records[kind])
        self.writer.flush()

    def close(self):
        self.writer.close()


class Wandb:
    """Writes a run of the project WANDB_PROJECT, or nibble. wandb's own variables (WANDB_MODE=offline, ...) apply."""

    def __init__(self, folder, name, log):
        try:
            import wandb
        except ImportError:
            hint = f"{installs('wandb')}, then {python_here('-m wandb login')}"
            raise Problem(f"--export wandb needs wandb; {hint}") from None
        folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "nibble"),
            name=name,
            id=file_name(name),
            resume="allow",
            dir=str(folder),
            config=log.config.get("options", {}),
            reinit="create_new",
        )
        sent = self.run.summary.get("_step") if self.run.resumed else None
        self.done = -1 if sent is None else int(sent)

    def write(self, log, closing):
        """Sends a step when the next one has begun, since nothing can be added to it later; the last one at the end."""
        rows = [row for row in rows_of(log) if row[0] > self.done]
        for step, values, samples in rows if closing else rows[:-1]:
            texts = {"sample": "\n\n".join(its.get("prompt", "") + its["text"] for its in samples)} if samples else {}
            self.run.log({**values, **texts}, step=step)
            self.done = step

    def close(self):
        self.run.finish()


WRITERS = {"csv": Csv, "tensorboard": Tensorboard, "wandb": Wandb}


def export(runs, kind, folder, follow):
    folder.mkdir(parents=True, exist_ok=True)
    writers, seen = {}, {}

    def write(closing):
        for name, log in runs.logs.items():
            if name not in writers:
                writers[name] = WRITERS[kind](folder, name, log)
                steps = f"{len(log.records['train'])} training steps"
                say(f"{name}: {steps}{', ' * bool(log.bad)}{log.complaint()}")
            state = log.changes, log.line
            if seen.get(name) == state and not closing:
                continue
            seen[name] = state
            writers[name].write(log, closing)

    try:
        write(not follow)
        while follow:
            time.sleep(EVERY_S)
            runs.poll()
            write(False)
    except KeyboardInterrupt:
        write(True)
    for writer in writers.values():
        writer.close()
    say(f"{kind}: {len(writers)} run{'s' * (len(writers) != 1)} in {folder}")
