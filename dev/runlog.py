"""Reads a run's log.jsonl, at once or while it grows. data/README.md lists its lines and their fields.

A reader of this module sees no step twice. A run that goes on from step s writes {"type": "resume", "step": s}
after its configuration, and what was logged beyond s is dropped; one that begins anew (there was no checkpoint to go on
from) drops everything. `time_s`, which each process counts from its own start, goes on from where it was at step s.
A line that is not a record is left out and reported by `bad`. A last line without its end waits: the rest may come.
"""

import json
import math
import os
from pathlib import Path

from problem import regular

KINDS = {
    "train": "loss",
    "val": "loss",
    "memory": "used_bytes",
    "eval": "name",
    "sample": "text",
}  # and a field of each


def numbers(records, field):
    """Returns the field of every record, NaN if it is null or missing."""
    values = (record.get(field) for record in records)
    return [float(value) if isinstance(value, (int, float)) else math.nan for value in values]


class RunLog:
    """records: {kind: [record, ...]} by step; config: the last such line; resumes: the steps gone on from;
    bad: (line number, what is wrong) of the first line that is no record, or None; changes: how often earlier records
    were dropped, so that who has copied them begins anew when it changes."""

    def __init__(self, run):
        run = Path(run)
        self.path = run / "log.jsonl" if run.is_dir() else run
        self.changes = -1
        self.forget()

    def forget(self):
        self.records = {kind: [] for kind in KINDS}
        self.config, self.resumes, self.bad = {}, [], None
        self.offset = self.line = 0
        self.before = 0.0  # seconds of the processes before this one
        self.starting = False
        self.changes += 1

    def poll(self):
        """Reads what was written since the last call. Returns whether there was any; raises OSError without a log."""
        with open(regular(self.path), "rb") as file:
            if os.fstat(file.fileno()).st_size < self.offset:  # another file has the name now
                self.forget()
            file.seek(self.offset)
            block = file.read()
        whole = block.rfind(b"\n") + 1
        self.offset += whole
        for line in block[:whole].split(b"\n")[:-1]:
            self.line += 1
            if line.strip():
                self.take(line)
        return whole > 0

    def read(self):
        """Reads all that is there, and a last line without its end if it is whole JSON. Returns self."""
        self.poll()
        with open(regular(self.path), "rb") as file:
            file.seek(self.offset)
            tail = file.read()
        try:
            json.loads(tail)
        except (ValueError, RecursionError):
            return self
        self.take(tail)
        return self

    def take(self, line):
        try:
            record = json.loads(line.decode("utf-8", "replace"))
            self.add(record["type"], record)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            self.bad = self.bad or (self.line, error)

    def add(self, kind, record):
        if kind == "config":
            self.config, self.starting = record, True
            return
        if kind != "resume" and kind not in KINDS:
            return
        step, time = int(record["step"]), float(record.get("time_s") or 0.0)
        if kind == "resume":
            self.resumes.append(step)
            self.drop(lambda other: other["step"] > step)
            self.before = max((its[-1]["time_s"] for its in self.records.values() if its), default=0.0)
            self.starting = False
            return
        if record[KINDS[kind]] is not None and KINDS[kind] == "loss":
            record["loss"] = float(record["loss"])
        if self.starting:
            self.drop(lambda other: True)
            self.before, self.starting = 0.0, False
        record["time_s"] = self.before + time
        self.append(kind, record)

    def append(self, kind, record):
        """Adds a record in order of steps, in place of one of the same step, name and number."""

        def key(record):
            return [record.get(name) for name in ("step", "name", "index")]

        its = self.records[kind]
        behind = bool(its) and its[-1]["step"] >= record["step"]
        if behind and (its[-1]["step"] > record["step"] or any(key(other) == key(record) for other in its[-64:])):
            its = self.records[kind] = [other for other in its if key(other) != key(record)]
            self.changes += 1
        its.append(record)
        if behind:
            its.sort(key=lambda record: record["step"])

    def drop(self, unwanted):
        for kind, its in self.records.items():
            kept = [record for record in its if not unwanted(record)]
            if len(kept) < len(its):
                self.records[kind] = kept
                self.changes += 1

    def complaint(self):
        """Returns what is wrong with the log, or an empty text."""
        number, reason = self.bad or (0, "")
        return f"line {number} of its log is not a record ({reason})" if number else f"{reason}"

    def last(self, kind):
        """Returns the newest record of a kind, or an empty one."""
        return self.records[kind][-1] if self.records[kind] else {}
