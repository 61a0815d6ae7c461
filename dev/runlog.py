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

# The types of fields; what is not listed is a number or null. A configuration's other fields may be texts too.
TEXTS = {"type", "name", "prompt", "text"}
WHOLE = {"step", "index"}
OF_CONFIG = {"device": str, "commit": str, "unix_s": int, "parameters": int, "options": dict}
LINE_BYTES = 1 << 24  # of a line at most
READ_BYTES = 1 << 26  # at a time


def checked(field, value, is_config=False):
    """Returns the value of a field, or null if it is a number that is not finite. Raises ValueError if its type is not
    the one that ./train writes, so that readers of a record need not check it."""
    if type(value) is float and not math.isfinite(value):
        value = None
    number = value is None or (type(value) in (int, float) and abs(value) < 1e300)
    if field in TEXTS:
        right = isinstance(value, str)
    elif field in WHOLE:
        right = type(value) is int and 0 <= value < 1 << 53
    elif is_config and field in OF_CONFIG:
        right = value is None or (isinstance(value, OF_CONFIG[field]) and (number or not isinstance(value, int)))
    else:
        right = number or field == "nonfinite" or (is_config and isinstance(value, str))
    if not right:
        raise ValueError(f"{field[:40]} is of another type")
    if is_config and field == "options":
        return {name: its if isinstance(its, str) else checked("--", its) for name, its in (value or {}).items()}
    return value


def numbers(records, field):
    """Returns the field of every record, NaN if it is null or missing."""
    values = (record.get(field) for record in records)
    return [math.nan if value is None else float(value) for value in values]


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
        begin = self.offset
        with open(regular(self.path), "rb") as file:
            if os.fstat(file.fileno()).st_size < self.offset:  # another file has the name now
                self.forget()
                begin = 0
            file.seek(self.offset)
            while True:
                block = file.read(READ_BYTES)
                end = block.rfind(b"\n") + 1
                if not end and len(block) < READ_BYTES:  # nothing, or half a line
                    return self.offset > begin
                for line in block[:end].split(b"\n")[:-1] if end else [block]:
                    self.line += 1
                    if line.strip():
                        self.take(line)
                self.offset += end or len(block)
                file.seek(self.offset)

    def read(self):
        """Reads all that is there, and a last line without its end if it is whole JSON. Returns self."""
        self.poll()
        with open(regular(self.path), "rb") as file:
            file.seek(self.offset)
            tail = file.read(LINE_BYTES)
        try:
            json.loads(tail)
        except (ValueError, RecursionError):
            return self
        self.take(tail)
        return self

    def take(self, line):
        try:
            if len(line) >= LINE_BYTES:
                raise ValueError(f"it is longer than {LINE_BYTES >> 20} MiB")
            record = json.loads(line.decode("utf-8", "replace"))
            self.add(record["type"], record)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            self.bad = self.bad or (self.line, error)

    def add(self, kind, record):
        if kind not in ("config", "resume") and kind not in KINDS:
            return
        record = {field: checked(field, value, kind == "config") for field, value in record.items()}
        if kind == "config":
            self.config, self.starting = record, True
            return
        step, time = record["step"], record.get("time_s") or 0.0
        if kind == "resume":
            self.resumes.append(step)
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
        for i in range(len(its) - 1, max(len(its) - 65, -1), -1):
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
