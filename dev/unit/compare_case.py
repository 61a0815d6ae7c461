"""What the tests of dev/compare share: a temporary folder with ways to run sweeps in it, the smallest sweep, and what is
missing where nothing can be tested."""

import json
import re
import subprocess
import sys

from cases import ROOT, Folder, csv_rows, json_lines

COMPARE = ROOT / "dev" / "compare"
sys.path.insert(0, str(COMPARE))
from sweep import slug  # noqa: E402

BASE = """[base]
preset = "adamw32"
device = "cpu"
model = "nano"
batch = 1
steps = 4
val-every = 2
val-tokens = 640
"""
SWEEP = 'baseline = "a"\n' + BASE + '[[run]]\nname = "a"\n[[run]]\nname = "b"\npreset = "adamw8"\n'


class Case(Folder):
    """A temporary folder and ways to run sweeps in it."""

    def __init__(self, folder):
        super().__init__(folder)
        self.out, self.work = self.folder / "out", self.folder / "work"

    def write(self, text, name="sweep.toml"):
        path = self.folder / name
        path.write_text(text)
        return path

    def command(self, sweep, *more):
        folders = [] if "--out" in more else ["--out", self.out, "--work", self.work]
        return [sys.executable, str(COMPARE / "run.py"), str(sweep), *map(str, folders), *map(str, more)]

    def start(self, sweep, *more, **how):
        return self.begun(*self.command(sweep, *more), **how)

    def run(self, text, *more, status=0):
        sweep = self.write(text) if isinstance(text, str) else text
        done = self.typed(*self.command(sweep, *more), status=status)
        return done.stdout + done.stderr

    def refuse(self, text, line, *expected):
        """Expects status 2, one sentence that begins with file and line, and no run."""
        done = self.typed(*self.command(self.write(text)))
        self.refused(done, f"compare: error: {self.folder}/sweep.toml:{line}: ", *expected)
        assert not self.out.exists() and not self.work.exists(), "something was run"

    def records(self, out=None):
        """Returns {slug: record} of runs.jsonl."""
        records = json_lines((out or self.out) / "runs.jsonl")
        return {slug(record["name"], record["seed"]): record for record in records}

    def record(self, name):
        return self.records()[name]

    def put(self, *records):
        """Makes runs.jsonl of these records, or lines of text."""
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        (self.out / "runs.jsonl").write_text("".join(line + "\n" for line in lines))

    def rows(self, out=None):
        return {row["configuration"]: row for row in csv_rows((out or self.out) / "table.csv")}

    def cells(self, out=None):
        """Returns {configuration: cells} of table.md, its head included."""
        lines = ((out or self.out) / "table.md").read_text().split("\n")
        rows = [re.split(r" ?(?<!\\)\| ?", line)[1:-1] for line in lines if line.startswith("| ")]
        return {cells[0].replace("\\|", "|"): cells for cells in rows}


def missing_tools():
    """Returns why nothing can be tested here, or None."""
    if sys.version_info < (3, 11):
        return "Python 3.11 reads sweep files"
    if not (ROOT / "train").exists():
        return "type `make`"
    if subprocess.run([sys.executable, "-c", "import matplotlib, PIL"], capture_output=True).returncode:
        return "type `make venv`"
    return None
