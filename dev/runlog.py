"""Reads what ./train writes: a run's log.jsonl, at once or while it grows, and safetensors files. data/README.md lists
the log's lines and their fields.

A reader of a log sees no step twice. A run that goes on from step s writes {"type": "resume", "step": s}
after its configuration, and what was logged beyond s is dropped; one that begins anew (there was no checkpoint to go on
from) drops everything. `time_s`, which each process counts from its own start, goes on from where it was at step s.
A line that is not a record is left out and reported by `bad`. A last line without its end waits: the rest may come.
"""

import contextlib
import json
import math
import mmap
import os
from pathlib import Path

KINDS = {
    "train": "loss",
    "val": "loss",
    "memory": "used_bytes",
    "eval": "name",
    "sample": "text",
}  # and a field of each


def read_arrays(path):
    """Returns {name: (type, shape, bytes)} of a safetensors file; bytes are read from the disk when they are used."""
    with open(path, "rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:begin]))
    header.pop("__metadata__", None)
    return {name: (its["dtype"], its["shape"], data[begin:][slice(*its["data_offsets"])]) for name, its in header.items()}


def numbers(records, field):
    """Returns the field of every record, NaN if it is null or missing."""
    values = (record.get(field) for record in records)
    return [math.nan if value is None else float(value) for value in values]


class RunLog:
    """The records of a run's log, as far as it was read:

    records  {kind: [record, ...]}, by step
    config   the last line of this type
    resumes  the steps from which processes went on
    began    the step from which the last process went on, or 0
    bad      (line number, what is wrong) of the first line that is no record, or None
    changes  how often earlier records were dropped; whoever holds a copy of them makes it anew when this number changes
    """

    def __init__(self, run):
        run = Path(run)
        self.path = run / "log.jsonl" if run.is_dir() else run
        self.changes = -1
        self.forget()

    def forget(self):
        self.records = {kind: [] for kind in KINDS}
        self.config, self.resumes, self.bad = {}, [], None
        self.offset = self.line = self.began = 0
        self.before = 0.0  # seconds of the processes before this one
        self.starting = False
        self.changes += 1

    def poll(self, whole=False):
        """Takes in what was written since the last call; `whole`: also a last line without its end, if it is JSON.
        Returns whether there was any. Raises OSError without a log."""
        with open(self.path, "rb") as file:
            if os.fstat(file.fileno()).st_size < self.offset:  # another file has the name now
                self.forget()
            file.seek(self.offset)
            *lines, rest = file.read().split(b"\n")
        for line in lines:
            self.take(line)
            self.offset += len(line) + 1
        with contextlib.suppress(ValueError, RecursionError):
            if whole and json.loads(rest):
                self.take(rest)
        return bool(lines)

    def read(self, missing_ok=False):
        """Takes in all that is there. Returns self."""
        if self.path.exists() or not missing_ok:
            self.poll(whole=True)
        return self

    def take(self, line):
        self.line += 1
        try:
            if line.strip():
                record = json.loads(line, parse_constant=lambda name: None)  # a number that is not finite is null
                self.add(record["type"], record)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self.bad = self.bad or (self.line, error)

    def add(self, kind, record):
        if kind == "config":
            self.config, self.starting, self.began = record, True, 0
            return
        if kind != "resume" and kind not in KINDS:
            return
        step, time = record["step"], record.get("time_s") or 0.0
        if type(step) is not int:
            raise ValueError(f"step {json.dumps(step)} is no whole number")
        if kind == "resume":
            self.resumes.append(step)
            self.began = step
            self.drop(step)
            self.before = max((its[-1]["time_s"] for its in self.records.values() if its), default=0.0)
            self.starting = False
            return
        record[KINDS[kind]]  # must be there
        if self.starting:
            self.drop(-1)
            self.before, self.starting = 0.0, False
        record["time_s"], record["tokens"] = self.before + time, record.get("tokens")
        self.append(kind, record)

    def append(self, kind, record):
        """Adds a record, in place of one of the same step, name and number."""

        def key(record):
            return [record.get(name) for name in ("step", "name", "index")]

        its = self.records[kind]
        if its and its[-1]["step"] > record["step"]:
            raise ValueError(f"step {record['step']} comes after step {its[-1]['step']}")
        for i in reversed(range(len(its))):
            if its[i]["step"] < record["step"]:
                break
            if key(its[i]) == key(record):
                del its[i]
                self.changes += 1
                break
        its.append(record)

    def drop(self, step):
        """Drops the records behind a step."""
        for its in self.records.values():
            self.changes += bool(its and its[-1]["step"] > step)
            while its and its[-1]["step"] > step:
                its.pop()

    def complaint(self):
        """Returns what is wrong with the log, or an empty text."""
        number, reason = self.bad or (0, "")
        return f"line {number} of its log is not a record ({reason})" if number else f"{reason}"

    def last(self, kind):
        """Returns the newest record of a kind, or an empty one."""
        return self.records[kind][-1] if self.records[kind] else {}
