"""Exports of runs for dev/watch.py: tables (csv), TensorBoard's event files, Weights & Biases.

Each writer gets a run's steps once. When a resume has dropped records that were written, a table and event files are
written anew; wandb cannot take a step back, so there the steps that it has keep what they were first (they are the same to
the last bit, unless options changed). A library is imported only for its own export.
"""

import collections
import csv
import io
import os
import time

from problem import file_name, needed, say, write_whole
from runlog import KINDS

EVERY_S = 2.0
Row = collections.namedtuple("Row", "step unix_s values samples")  # samples: their texts
NOT_VALUES = ("type", "step", "name", "index", "nonfinite", "prompt", "text")


def rows_of(log):
    """Returns [Row, ...] by step, with the finite values by names like "train/loss" or "eval/hellaswag/acc"."""
    begin, steps = (log.config.get("unix_s") or time.time()) - log.before, {}
    for kind in KINDS:
        for record in log.records[kind]:
            row = steps.setdefault(record["step"], Row(record["step"], begin + record["time_s"], {}, []))
            if kind == "sample":
                row.samples.append(record.get("prompt", "") + record["text"])
                continue
            prefix = f"eval/{record['name']}/" if kind == "eval" else f"{kind}/"
            row.values.update({prefix + key: its for key, its in record.items() if key not in NOT_VALUES and its is not None})
    return [steps[step] for step in sorted(steps)]


# Each writer is made of (folder, name, log), and has write(rows, first), where rows before the first are written already, and close().


class Csv:
    """Writes FOLDER/RUN.csv, a row per step and a column per value, anew each time: columns may be added."""

    def __init__(self, folder, name, log):
        self.path = folder / f"{file_name(name)}.csv"

    def write(self, rows, first):
        names = list(dict.fromkeys(name for row in rows for name in row.values))
        text = io.StringIO()
        table = csv.writer(text)
        table.writerow(["step", *names])
        table.writerows([row.step, *(row.values.get(name, "") for name in names)] for row in rows)
        write_whole(self.path, text.getvalue())

    def close(self):
        pass


class Tensorboard:
    """Writes event files into FOLDER/RUN/."""

    def __init__(self, folder, name, log):
        with needed("watch", "tensorboardX tensorboard"):
            from tensorboardX import SummaryWriter
        self.make, self.folder, self.writer = SummaryWriter, folder / file_name(name), None

    def write(self, rows, first):
        if first == 0:
            self.close()
            for path in self.folder.glob("events.out.tfevents.*"):
                path.unlink()
            self.writer = self.make(str(self.folder))
        for row in rows[first:]:
            for name, value in row.values.items():
                self.writer.add_scalar(name, value, row.step, walltime=row.unix_s)
            for text in row.samples:
                self.writer.add_text("sample", text, row.step, walltime=row.unix_s)
        self.writer.flush()

    def close(self):
        if self.writer:
            self.writer.close()


class Wandb:
    """Writes a run of the project WANDB_PROJECT, or nibble. wandb's own variables (WANDB_MODE=offline, ...) apply."""

    def __init__(self, folder, name, log):
        with needed("watch", "wandb"):
            import wandb
        project, config = os.environ.get("WANDB_PROJECT", "nibble"), log.config.get("options", {})
        how = {"resume": "allow", "reinit": "create_new", "dir": str(folder)}
        self.run = wandb.init(project=project, name=name, id=file_name(name), config=config, **how)
        sent = self.run.summary.get("_step") if self.run.resumed else None
        self.done = -1 if sent is None else int(sent)

    def write(self, rows, first):
        for row in (row for row in rows if row.step > self.done):
            texts = {"sample": "\n\n".join(row.samples)} if row.samples else {}
            self.run.log({**row.values, **texts}, step=row.step)
            self.done = row.step

    def close(self):
        self.run.finish()


WRITERS = {"csv": Csv, "tensorboard": Tensorboard, "wandb": Wandb}


def export(runs, kind, folder, follow):
    """Exports once or, with `follow`, until Ctrl-C; then a step is written when the next one has begun, as it may gain
    values until then, and the last one at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    writers, written = {}, {}

    def write(closing):
        for name, log in runs.logs.items():
            rows = rows_of(log)
            rows = rows if closing else rows[:-1]
            if name not in writers:
                writers[name] = WRITERS[kind](folder, name, log)
                steps = f"{len(log.records['train'])} training steps"
                say(f"{name}: {steps}{', ' * bool(log.bad)}{log.complaint()}")
            changes, first = written.get(name, (None, 0))
            if changes != log.changes or len(rows) > first:
                writers[name].write(rows, first if changes == log.changes else 0)
                written[name] = log.changes, len(rows)

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
