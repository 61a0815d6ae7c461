"""Runs the cases of the tests in Python beside it: one line each, `N passed, N failed, N skipped` last."""

import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Folder:
    """A temporary folder, and ways to run programs in it."""

    def __init__(self, folder):
        self.folder, self.environment = Path(folder), {}

    def program(self, name, lines):
        """Writes a program for a shell."""
        path = self.folder / name
        path.write_text(f"#!/bin/bash\n{lines}\n")
        path.chmod(0o755)
        return path

    def trainer(self, lines):
        """Writes a program that does something before it becomes ./train, or in its place."""
        return self.program("trainer", f'{lines}\nexec {ROOT}/train "$@"')

    def typed(self, *words, status=None, **environment):
        """Runs a program to its end, which must be `status` if it is given."""
        environment = {**os.environ, **self.environment, **environment}
        done = subprocess.run([*map(str, words)], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300)
        assert status in (None, done.returncode), done
        return done

    def begun(self, *words, hangup=signal.SIG_DFL, environment=(), **how):
        """Starts a program that hears Ctrl-C even under nohup or &; `hangup`: what it does at SIGHUP."""

        def hear():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, hangup)

        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": self.folder, "preexec_fn": hear} | how
        return subprocess.Popen([*map(str, words)], env={**os.environ, **dict(environment)}, **how)

    def refused(self, done, begins, *expected):
        """Expects status 2 and one sentence that begins so and holds these texts."""
        said = done.stderr
        assert done.returncode == 2 and said.startswith(begins) and said.count("\n") == 1, done
        assert all(text in said for text in expected), (expected, said)


def ended(process, number, seconds=60):
    """Sends a signal. Returns the exit status, and what the process said that was not read yet, on each stream."""
    process.send_signal(number)
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def json_lines(path):
    """Returns the values of a file's lines that are complete; an empty list if there is no file."""
    return [json.loads(line) for line in (path.read_text().split("\n")[:-1] if path.exists() else ())]


def csv_rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def wait_for(what, seconds=60):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def run_cases(functions, case=None, missing=None, among="test_"):
    """Calls those of `functions`, a module's globals, that are named test_..., with case(a temporary folder) where there
    is a `case`, and returns the exit status. A case returns None, a note that is printed, or "skipped: ..."; when
    `missing` says what is not there, all whose names begin with `among` are skipped. In the command line, -k SUBSTRING
    picks; where it picks none, the status is 1."""
    if sys.argv[1:] and (len(sys.argv) != 3 or sys.argv[1] != "-k"):
        print(f"{sys.argv[0]}: {' '.join(sys.argv[1:])} is not known here; type -k SUBSTRING or nothing", file=sys.stderr)
        return 2
    picked = sys.argv[2] if sys.argv[1:] else ""
    passed = failed = skipped = 0
    for name, run in list(functions.items()):
        if not name.startswith("test_") or picked not in name or not callable(run):
            continue
        started, note = time.time(), f"skipped: {missing}"
        if not missing or not name.startswith(among):
            try:
                with tempfile.TemporaryDirectory() as folder:
                    note = (run(case(folder)) if case else run()) or "ok"
            except (Exception, SystemExit):  # an assertion, or whatever else went wrong in the case
                traceback.print_exc(file=sys.stdout)
                note = "FAILED"
        failed += note == "FAILED"
        skipped += note.startswith("skipped: ")
        passed += note != "FAILED" and not note.startswith("skipped: ")
        print(f"{name[5:]:48} {note} ({time.time() - started:.1f} s)", flush=True)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return failed > 0 or passed + skipped == 0
