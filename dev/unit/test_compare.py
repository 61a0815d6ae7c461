#!/usr/bin/env python3
"""Tests of dev/compare: one line a case, `N passed, N failed, N skipped` last; exit status 1 when a case fails.

    .venv/bin/python dev/unit/test_compare.py [-k SUBSTRING]

Each case runs dev/compare/run.py with ./train on the CPU, a tiny model and the built-in text, in a temporary folder.
Without ./train, Python 3.11 or what draws the report (dev/requirements.txt), all is skipped and the exit status is 0.
"""

import csv
import html
import json
import math
import os
import pty
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path

from cases import run_cases

ROOT = Path(__file__).resolve().parents[2]
COMPARE = ROOT / "dev" / "compare"
BASE = """
[base]
device = "cpu"
model = "nano"
batch = 1
steps = 4
val-every = 2
val-tokens = 640
"""
SWEEP = 'baseline = "a"\n' + BASE + '[[run]]\nname = "a"\n[[run]]\nname = "b"\npreset = "adamw8"\n'
REPORT = ("table.csv", "table.md", "loss.png", "difference.png", "pareto.png", "report.html")


class Case:
    """A temporary folder and ways to run sweeps in it."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.out, self.work = self.folder / "out", self.folder / "work"
        self.environment = None  # this one's

    def write(self, text, name="sweep.toml"):
        path = self.folder / name
        path.write_text(text)
        return path

    def command(self, sweep, *more):
        folders = [] if "--out" in more else ["--out", self.out, "--work", self.work]
        return [sys.executable, str(COMPARE / "run.py"), str(sweep), *map(str, folders), *map(str, more)]

    def start(self, sweep, *more, hangup=signal.SIG_DFL, **how):
        """Hears Ctrl-C, and SIGHUP unless `hangup` says otherwise, also where the tests are under nohup or a script's &."""

        def hear():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, hangup)

        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | how
        return subprocess.Popen(self.command(sweep, *more), preexec_fn=hear, **how)

    def run(self, text, *more, status=0):
        sweep = self.write(text) if isinstance(text, str) else text
        command = self.command(sweep, *more)
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=self.environment)
        assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def refuse(self, text, line, *expected):
        """Expects status 2, one sentence that begins with file and line, and no run."""
        said = self.run(text, status=2)
        begin = f"compare: error: {self.folder}/sweep.toml:{line}: "
        assert said.startswith(begin) and said.count("\n") == 1, (begin, said)
        assert all(word in said for word in expected), (expected, said)
        assert not self.out.exists() and not self.work.exists(), "something was run"

    def record(self, slug):
        return json.loads((self.out / "runs" / f"{slug}.json").read_text())

    def rows(self):
        with (self.out / "table.csv").open(newline="") as file:
            return {row["configuration"]: row for row in csv.DictReader(file)}

    def wrapper(self, lines):
        """A program that does something before it becomes ./train, or in its place."""
        path = self.folder / "wrapper"
        path.write_text(f'#!/bin/bash\n{lines}\nexec {ROOT}/train "$@"\n')
        path.chmod(0o755)
        return path


def wait_for(what, seconds=60):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def steps_logged(folder):
    log = folder / "log.jsonl"
    return log.read_text().count('"train"') if log.exists() else 0


def processes(folder):
    """Command lines of programs that were given this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().decode("utf-8", "replace").replace("\0", " ")
        except OSError:
            continue
        if f"--run={folder}" in text:
            found.append(text)
    return found


# What is wrong is told before anything runs, with its line.


def test_unknown_option(case):
    case.refuse(SWEEP + "betta2 = 0.9\n", 15, "unknown option betta2", "did you mean beta2?")
    case.refuse(SWEEP.replace("batch = 1", "batches = 1"), 6, "unknown option batches", "did you mean batch?")
    case.refuse(SWEEP + 'each = [{ m = "fp32", w = 1 }]\n', 15, "unknown option w")
    case.refuse(SWEEP + 'resume = "auto"\n', 15, "--resume is the sweep's own affair")
    case.refuse(SWEEP + 'each = [\n    { m = "fp32" },\n    { m = "bf16", mm = "fp32" },\n]\n', 17, "unknown option mm")
    case.refuse('title = "t"\nkeeps = 1\n' + SWEEP, 2, "unknown key keeps")
    case.refuse(SWEEP + '[[runs]]\nname = "c"\n', 15, "unknown key runs", "did you mean run?")
    assert "--set seed=x: give a whole number" in case.run(SWEEP, "--set", "seed=x", status=2)
    said = case.run(SWEEP, "--set", "bathc=1", status=2)
    assert "--set bathc=1: unknown option bathc; did you mean batch?" in said, said


def test_unknown_preset_and_format(case):
    said = case.run(SWEEP.replace("adamw8", "adamw99"), "--no-check", "--no-report", status=1)
    assert "1 done, 1 died" in said, "unchecked, it is told by the run"
    shutil.rmtree(case.out)
    shutil.rmtree(case.work)
    case.refuse(SWEEP.replace("adamw8", "adamw99"), 14, 'b: --preset: "adamw99" is not known')
    formats = '[[run]]\nname = "{m}"\nm = [\n    "fp32",\n    "bf16", "dyn9",\n    "de4",\n]\n'
    case.refuse(SWEEP.replace("[[run]]", formats + "[[run]]", 1), 14, 'dyn9: --m: "dyn9" is not known')
    case.refuse(SWEEP + 'm = "udyn8"\n', 15, "holds no negative numbers")
    case.refuse(SWEEP.replace("steps = 4", "steps = 4.5"), 7, "--steps takes a whole number")
    case.refuse(SWEEP + 'matmul = "bf16"\n', 15, '; write matmul = "fp32"')


def test_missing_corpus(case):
    case.refuse(SWEEP.replace("batch = 1", 'data = "build/none"'), 6, "--data build/none", "No such file")
    case.refuse(SWEEP + f'data = "{case.folder}/x.bin"\n', 15, "x.bin", "No such file")
    said = case.run(SWEEP, "--set", "data=build/none", status=2)
    assert "error: --set data=build/none: a: --data build/none" in said and "No such file" in said, said


def test_wrong_files(case):
    case.refuse(SWEEP.replace("steps = 4", "steps = "), 7, "not TOML")
    case.refuse(SWEEP.replace('baseline = "a"', 'baseline = "A"'), 1, "baseline A is not the name of a run")
    case.refuse(BASE, 1, "there is no baseline")
    case.refuse('baseline = "a"\n' + BASE, 10, "there is no [[run]]")
    case.refuse(SWEEP.replace("batch = 1", "batch = [1, 2]"), 6, "batch is a list")
    case.refuse(SWEEP + "seed = [1, 2]\nturn = [1]\n", 16, "one for each of the 2 seeds")
    case.refuse(SWEEP + "m = []\n", 15, "empty list")
    case.refuse(SWEEP + 'seed = ["x"]\n', 15, "seed is x; give whole numbers")
    case.refuse(SWEEP + '[[run]]\nname = "a"\nm = "bf16"\n', 16, "already the name of runs with another m (", "sweep.toml:10)")
    case.refuse(SWEEP + '[[run]]\nname = "c"\npreset = "adamw8"\n', 16, "c seed 1 has the same options as b seed 1")
    case.refuse(SWEEP + 'm = "bf16"\neach = [\n    { v = "bf16" },\n    { m = "fp32" },\n]\n', 15, "each too (", "sweep.toml:18)")
    for value in ("0", '"00"'):
        case.refuse(SWEEP.replace("val-every = 2", f"val-every = {value}"), 8, "a run is told by its last validation")
    assert "error: --set val-every=0: val-every is 0" in case.run(SWEEP, "--set", "val-every=0", status=2)
    own = SWEEP + 'baseline = "{}"\n[[run]]\nname = "b"\npreset = "adamw8"\nseed = 2\n'
    case.refuse(own.format("b"), 16, "b has another baseline already, b (", "sweep.toml:12)")
    case.refuse(own.format("a") + 'group = "x"\n', 20, "b has another group already, runs (")
    case.refuse(SWEEP.replace('name = "a"', 'name = "a"\nbaseline = "b"'), 12, "a is the baseline of the whole sweep")
    case.refuse('keep-checkpoints = "false"\n' + SWEEP, 1, "keep-checkpoints is true or false")
    case.refuse(SWEEP.replace('baseline = "a"', 'baseline = "a"\ntitle = ["x"]'), 2, "title is a text")
    case.refuse(SWEEP + 'group = ["x", "y"]\n', 15, "group is a text of one line")
    case.refuse(SWEEP.replace('name = "b"', 'name = "two\\nlines"'), 13, "name is a text of one line")
    case.refuse('baseline = "a"\nrun = [1, 2]\n' + BASE, 2, "write [[run]] for each run")
    case.refuse(SWEEP + "seed = 99999999999999999999999\n", 15, "--seed")
    assert "--run is the sweep's own affair" in case.run(SWEEP, "--set", "run=x", status=2)
    for more, typed in (("seed = [1, 2]\n", "seed=5"), ('[[run]]\nname = "c {lr}"\nlr = [1, 2]\n', "lr=1")):
        said = case.run(SWEEP + more, "--set", typed, status=2)
        assert said.startswith(f"compare: error: --set {typed}: runs of ") and "told apart by it" in said, said
    assert "compare: error: " in case.run(SWEEP, "--out", "/dev/null", status=2)
    assert "cannot be read" in case.run(case.folder / "none.toml", status=2)
    assert "type `make` first" in case.run(SWEEP, "--trainer", case.folder / "none", status=2)
    text = case.write("no program", "text")
    assert f"{text}: may not be started; type `chmod +x {text}`" in case.run(SWEEP, "--trainer", text, status=2)
    for more in ("--dry-run", "--no-report"):
        assert f"--report-only with {more} does nothing" in case.run(SWEEP, "--report-only", more, status=2)


# What is run, and when.


def test_done_runs_are_skipped(case):
    said = case.run(SWEEP, "--no-report")
    assert "0 of 2 runs are done" in said and "2 done" in said, said
    before = {path: path.read_bytes() for path in (case.out / "runs").iterdir()}
    assert "2 of 2 runs are done" in case.run(SWEEP, "--no-report")
    shutil.rmtree(case.work)  # the records alone say what is done, wherever they were made
    said = case.run(SWEEP, "--no-report")
    assert "2 of 2 runs are done" in said and "nothing was run" in said, said
    assert before == {path: path.read_bytes() for path in (case.out / "runs").iterdir()}
    edited = SWEEP + "beta2 = 0.99\n"  # of b alone
    said = case.run(edited, status=2)
    assert "1 finished run(s) of these names but of other options" in said and "b seed 1" in said, said
    assert "1 to run" in case.run(edited, "--dry-run"), "which replaces nothing"
    said = case.run(edited, "--no-report", "--replace")
    assert "1 of 2 runs are done" in said and "b seed 1  val" in said, said
    assert "2 of 2" in case.run(
        SWEEP + "beta2 = 0.99\nprint-every = 3\n", "--no-report"
    ), "an option that changes nothing"
    case.out.joinpath("runs/a_s1.json").write_text('{"name": "a", ')
    said = case.run(SWEEP + "beta2 = 0.99\n", "--no-report")
    assert "a_s1.json is no record of a run" in said and "1 of 2 runs are done" in said, said


def test_corpus_counts_not_its_place(case):
    place = case.folder / "a place"
    place.mkdir()
    for name in ("here", "there"):
        (place / name).write_bytes(bytes(range(256)) * 200)
    assert "2 done" in case.run(SWEEP, "--no-report", "--set", f"data={place}/here")
    assert case.record("a_s1")["data"].startswith("here  48.6k tokens in 1 file"), case.record("a_s1")["data"]
    assert "2 of 2 runs are done" in case.run(SWEEP, "--no-report", "--set", f"data={place}/there")
    with (place / "there").open("ab") as file:
        file.write(b"more")
    assert "other corpus" in case.run(SWEEP, "--set", f"data={place}/there", status=2)
    assert "0 of 2 runs are done" in case.run(SWEEP, "--no-report", "--replace", "--set", f"data={place}/there")


LONG = SWEEP.replace("steps = 4", "steps = 300\nsave-every = 20\ntokens-per-step = 128").replace("= 2\n", "= 100\n")
UNSAVED = LONG.replace("save-every = 20", "save-every = 0")  # but for what it saves when it is stopped


def test_resumes_after_kill(case):
    """kill -9: the child ends too, and the second start goes on from a checkpoint to the same bits."""
    sweep = case.write(LONG)
    case.run(sweep, "--only", "a", "--no-report", "--out", case.folder / "whole", "--work", case.folder / "w")
    process = case.start(sweep, "--only", "a")
    folder = case.work / "a_s1"
    wait_for(lambda: list(folder.glob("step_????????/state.json")))
    process.kill()
    process.communicate()
    wait_for(lambda: not processes(folder), 10)
    assert not (case.out / "runs" / "a_s1.json").exists()
    case.run(sweep, "--only", "a", "--no-report")
    resumed, whole = case.record("a_s1"), json.loads((case.folder / "whole/runs/a_s1.json").read_text())
    assert resumed["resumed_at"] >= 20 and whole["resumed_at"] == 0, resumed["resumed_at"]
    for key in ("val", "train", "final_loss", "resolved"):
        assert resumed[key] == whole[key], key
    assert not list(folder.glob("step_*")), "no weights are kept"
    assert (folder / "log.jsonl").exists()


def test_stops_children_at_ctrl_c(case):
    """They save; the second start goes on. Without a checkpoint a run begins anew."""
    process = case.start(case.write(UNSAVED), "--jobs", 2)
    wait_for(lambda: len(processes(case.work / "a_s1")) and len(processes(case.work / "b_s1")))
    wait_for(lambda: all((case.work / name / "log.jsonl").exists() for name in ("a_s1", "b_s1")))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopping 2 runs" in out, (out, err)
    assert not processes(case.work / "a_s1") and not processes(case.work / "b_s1")
    assert not list((case.out / "runs").glob("*.json"))
    begun = json.loads(next((case.work / "a_s1").glob("step_*/state.json")).read_text())["step"]
    shutil.rmtree(next((case.work / "b_s1").glob("step_*")))
    case.run(UNSAVED, "--no-report", "--jobs", 2)
    assert case.record("a_s1")["resumed_at"] == begun and case.record("b_s1")["resumed_at"] == 0
    assert [case.record(name)["status"] for name in ("a_s1", "b_s1")] == ["done", "done"]


def test_two_at_once_are_refused(case):
    sweep = case.write(LONG)
    process = case.start(sweep)
    wait_for(lambda: processes(case.work / "a_s1"))
    assert f"{case.work}: another run.py is at work" in case.run(sweep, status=2)
    said = case.run(sweep, "--out", case.out, "--work", case.folder / "w", status=2)
    assert f"{case.out}: another run.py is at work" in said, said
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130 and os.listdir(case.out) == ["runs"] and not os.listdir(case.out / "runs")


def test_what_another_ended_meanwhile(case):
    """A start whose check runs while another ends its runs does not repeat them."""
    sweep, here, go = case.write(SWEEP), case.folder / "here", case.folder / "go"
    slow = case.wrapper(f'case "$SLOW$*" in 1*--dry-run*) touch {here}; until [ -e {go} ]; do sleep 0.02; done ;; esac')
    more = ("--trainer", slow, "--no-report")
    process = case.start(sweep, *more, env={**os.environ, "SLOW": "1"})
    wait_for(here.exists)
    case.run(sweep, "--only", "b", *more)
    go.touch()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "1 of 2 runs are done" in out and "1 done" in out, (out, err)


def saves_unheard(case, ours, its, number, **how):
    """A sweep that writes to `its`, and gets the signal when nothing reads `ours` any more, has its runs save and ends."""
    folder = case.work / "a_s1"
    process = case.start(case.write(UNSAVED), stdout=its, stderr=its, **how)
    os.close(its)
    wait_for(lambda: steps_logged(folder))
    os.close(ours)
    process.send_signal(number)
    status = process.wait(timeout=60)
    assert status == 130 and list(folder.glob("step_*/state.json")), f"{status}: it has saved"


def test_terminal_that_closes(case):
    """Its runs save, and are stopped; under nohup nothing happens."""
    ours, its = pty.openpty()
    saves_unheard(case, ours, its, signal.SIGHUP, stdin=its, start_new_session=True)
    folder = case.work / "a_s1"
    process = case.start(case.write(UNSAVED), hangup=signal.SIG_IGN)
    wait_for(lambda: processes(folder))
    process.send_signal(signal.SIGHUP)
    said = steps_logged(folder)
    wait_for(lambda: steps_logged(folder) > said + 30)  # a run that was stopped would end at its next step
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_nobody_listens(case):
    """`| tee log` ends at a Ctrl-C too, and the terminal may be gone before SIGHUP is here: the runs save all the same."""
    for ours, its in (os.pipe(), pty.openpty()):
        saves_unheard(case, ours, its, signal.SIGINT, stdin=subprocess.DEVNULL)
        shutil.rmtree(case.work)


def test_budget(case):
    for wrong in ("-5", "nan"):
        assert f"--budget {wrong}: give seconds" in case.run(SWEEP, "--budget", wrong, status=2)
    for wrong in ("0", "-1", "nan"):
        assert f"--silence {wrong}: give seconds" in case.run(SWEEP, "--silence", wrong, status=2)
    said = case.run(SWEEP, "--budget", "0", "--no-report")
    assert "2 runs wait for the next start" in said and not list((case.out / "runs").glob("*")), said
    # After the first run it is known how long one takes: no second that would not end in time.
    slow = case.wrapper('case "$*" in *--run=*) sleep 3 ;; esac')
    said = case.run(SWEEP, "--budget", "5", "--no-report", "--trainer", slow)
    assert "1 runs wait" in said and (case.out / "runs/a_s1.json").exists(), said


def test_spread_over_gpus(case):
    """Each job sees one GPU, and no two at once the same while another is free."""
    trainer = case.wrapper(
        f'case "$*" in *--run=*) echo "$CUDA_VISIBLE_DEVICES" >> {case.folder}/seen; sleep 1 ;; esac'
    )
    text = SWEEP.replace('device = "cpu"\n', "").replace('name = "a"\n', 'name = "a"\nseed = [1, 2, 3]\n')
    more = ("--jobs", 2, "--no-report", "--trainer", trainer, "--set", "matmul=fp32")
    for gpus in (",", "6,"):
        assert "give numbers of nvidia-smi" in case.run(text, "--gpus", gpus, *more, status=2)
    listing = case.folder / "nvidia-smi"
    listing.write_text('#!/bin/sh\necho "GPU 6: NVIDIA H200 (UUID: a)"\n')
    listing.chmod(0o755)
    case.environment = {**os.environ, "PATH": f"{case.folder}:{os.environ['PATH']}"}
    case.run(text, "--gpus", "6,7", *more)
    seen = (case.folder / "seen").read_text().split()
    assert sorted(seen[:2]) == ["6", "7"] and sorted(seen) == ["6", "6", "7", "7"], seen
    assert case.record("a_s1")["sharing"] == 2


def test_turns_and_products(case):
    text = 'baseline = "a"\n' + BASE + '[[run]]\nname = "a"\nseed = [1, 2]\nturn = [1, 3]\n'
    text += '[[run]]\nname = "{m} {beta2} {v}"\nturn = 2\nbeta2 = [0.9, 0.99]\n'
    text += 'each = [{ m = "dyn8", v = "udyn8" }, { m = "bf16", v = "fp32" }]\n'
    said = case.run("\ufeff" + text, "--dry-run")  # as some editors begin a file
    names = [line[7:47].strip() for line in said.split("\n") if line.startswith("run ")]
    inner = [f"{m} {b} {v} seed 1" for b in ("0.9", "0.99") for m, v in (("dyn8", "udyn8"), ("bf16", "fp32"))]
    assert names == ["a seed 1", *inner, "a seed 2"], names
    assert "6 to run" in said and not case.out.exists() and not case.work.exists()


# Runs differ by nothing but the option under test.


def stream(checkpoint, name):
    """The bytes of an array of optimizer.safetensors."""
    data = (checkpoint / "optimizer.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    begin, end = json.loads(data[8 : 8 + size])[name]["data_offsets"]
    return data[8 + size + begin : 8 + size + end]


def train_losses(folder):
    lines = map(json.loads, (folder / "log.jsonl").read_text().split("\n")[:-1])
    return [line["loss"] for line in lines if line["type"] == "train"]


def test_runs_differ_by_the_option_alone(case):
    """At a learning rate of 0 every loss is one of initial weights and data order: the same bits whatever the states.
    The noise of m does not depend on what v takes: the same codes."""
    text = 'keep-checkpoints = true\nbaseline = "a"\n' + BASE + "lr = 0\n"
    text += '[[run]]\nname = "a"\nweights = "fp32"\nseed = [1, 2]\n'
    text += '[[run]]\nname = "m {m} v {v}"\nweights = "fp32"\neach = [{ m = "bf16:sr", v = "fp32" }, '
    text += '{ m = "bf16:sr", v = "bf16:sr" }, { m = "dyn8:sr", v = "sqrt4" }]\n'
    case.run(text)
    runs = {
        json.loads(p.read_text())["name"] + str(json.loads(p.read_text())["seed"]): p.stem
        for p in (case.out / "runs").glob("*.json")
    }
    losses = {name: train_losses(case.work / slug) for name, slug in runs.items()}
    assert len(losses) == 5 and all(len(values) == 4 for values in losses.values()), losses
    other = losses.pop("a2")
    assert len(set(map(tuple, losses.values()))) == 1, losses
    assert not set(other) & set(losses["a1"]), "another seed, other weights and data"
    assert {row["status"] for row in case.rows().values()} == {"done"}, "nothing differs that was not asked for"
    saved = {name: case.work / slug / "step_00000004" for name, slug in runs.items()}
    assert stream(saved["m bf16:sr v fp321"], "m") == stream(saved["m bf16:sr v bf16:sr1"], "m")
    resolved = {
        name: json.loads((case.out / "runs" / f"{slug}.json").read_text())["resolved"] for name, slug in runs.items()
    }
    for name in losses:
        differs = {key for key, value in resolved[name].items() if value != resolved["a1"][key]}
        assert differs <= {"m", "v"}, (name, differs)


def test_what_nobody_asked_for_is_told(case):
    """In pairs, and among the seeds of one configuration; what a rule has none of is no such thing."""
    text = SWEEP + 'seed = [1, 2]\n[[run]]\nname = "c"\nrule = "sgd"\n'
    case.run(text)
    assert {row["status"] for row in case.rows().values()} == {"done"}, case.rows()
    for seed, key, value in ((1, "batch", "2"), (2, "m", "bf16")):
        path = case.out / "runs" / f"b_s{seed}.json"
        record = json.loads(path.read_text())
        record["resolved"][key], record["sharing"] = value, seed
        path.write_text(json.dumps(record))
    case.run(text, "--report-only")
    rows = case.rows()
    told = "its seeds differ in batch (2, 1), m (dyn8/256, bf16); also differs from the baseline in batch (2, not 1)"
    assert rows["b"]["status"] == told and rows["a"]["status"] == "done", rows["b"]
    assert rows["b"]["runs_sharing"] == "2" and markdown_cells(case.out)["b"][11].startswith("("), "one of its seeds did"


def test_a_preset_is_asked_for_with_its_overrides(case):
    """... and the bytes of its weights are those that are stored, of tensors that --override names too."""
    text = 'baseline = "fp8w8"\n' + BASE + '[[run]]\nname = "{preset}"\npreset = ["fp8w8", "fp8w8e"]\n'
    text += '[[run]]\nname = "wide"\npreset = "fp8w8e"\noverride = "*: weights=bf16:ef m=bf16:sr"\n'
    case.run(text)
    rows = case.rows()
    assert {row["status"] for row in rows.values()} == {"done"}, rows
    plain, vectors, wide = (float(rows[name]["weights_bytes"]) for name in ("fp8w8", "fp8w8e", "wide"))
    assert plain == 1.008 and plain < vectors < 1.2 and abs(wide - 2) < 0.001, (plain, vectors, wide)
    assert float(rows["wide"]["state_bytes"]) > 3.0 > float(rows["fp8w8e"]["state_bytes"]), rows


# The report.


def test_diverged_and_dead_runs(case):
    """Both stand in the table with their reason and the others go on; the dead one alone is tried again."""
    # By 64 tokens a step, at the default rate one seed of sixteen did end above its beginning after 20.
    text = SWEEP.replace("steps = 4", "steps = 20\nlr = 3e-4") + '[[run]]\nname = "hot"\nlr = 1000\nclip = 0\n'
    text += 'on-nonfinite = "stop"\n[[run]]\nname = "dead"\nseed = 13\n[[run]]\nname = "refused"\nseed = 14\n'
    text += '[[run]]\nname = "last"\nm = "bf16"\n'
    mended = case.folder / "mended"
    trainer = case.wrapper(
        f'case "$*" in *--dry-run*) ;; *--seed=13*) [ -e {mended} ] || kill -9 $$ ;; '
        '*--seed=14*) echo "train: error: the disk is full" >&2; exit 2 ;; esac'
    )
    said = case.run(text, "--trainer", trainer, status=1)
    assert "3 done, 1 diverged, 2 died" in said, said
    status = {name: row["status"] for name, row in case.rows().items()}
    assert status["hot"].startswith("diverged: step ") and "the norm of the gradient" in status["hot"], status
    assert (
        status["dead"] == "died: killed by signal 9 at step 0 of 20" and status["refused"] == "died: the disk is full"
    )
    assert [status[name] for name in ("a", "b", "last")] == ["done"] * 3 and case.rows()["hot"]["final_loss"] == ""
    table = (case.out / "table.md").read_text()
    assert all(words in table for words in (status["hot"], status["dead"], status["refused"])), table
    mended.touch()
    said = case.run(text, "--trainer", trainer, status=1)
    assert "4 of 6 runs are done" in said and "1 done, 1 died" in said, said
    assert case.rows()["dead"]["status"] == "done"


def test_ends(case):
    """What a run that ended was: a kill beside a skipped step is no divergence, a loss that rose is no result."""
    sys.path.insert(0, str(COMPARE))
    from record import outcome

    def log(first, last, train=4.0):
        return {"train": [{"step": 9, "loss": train}], "val": [{"step": 0, "loss": first}, {"step": 9, "loss": last}]}

    sentence = "step 9: the loss is nan and the norm of the gradient inf"
    assert outcome(0, 9, log(5.4, 4.0), "") == ("done", "")
    assert outcome(0, 9, log(5.4, 4.0, None), "") == ("done", ""), "a last step that was skipped"
    assert outcome(0, 9, log(5.4, 5.45), "") == ("done", ""), "a short run"
    assert outcome(0, 9, log(5.4, 104.0), "") == ("diverged", "the validation loss rose from 5.4000 to 104.0000")
    assert outcome(0, 9, log(5.4, None), "")[0] == "diverged"
    assert outcome(2, 99, log(5.4, 4.0, None), f"train: error: {sentence}; type a smaller --lr") == ("diverged", sentence)
    assert outcome(1, 99, log(5.4, 4.0, None), "train: error: out of memory\n") == ("died", "out of memory")
    assert outcome(-9, 99, log(5.4, 4.0, None), "")[0] == "died" and outcome(0, 99, log(5.4, 4.0, None), "")[0] == "died"


def test_files_that_are_no_records(case):
    """They are told and left out, and what they should have been is run again."""
    case.run(SWEEP)
    for name, text in (("notes", "garbage"), ("b_s1", '{"name": "b", "seed": 1}'), ("zz", None)):
        path = case.out / "runs" / f"{name}.json"
        path.write_text(text if text is not None else (case.out / "runs/a_s1.json").read_text())
    said = case.run(SWEEP, "--report-only")
    assert said.count("is no record of a run, or not under its own name: left out") == 3, said
    assert [row["status"] for row in case.rows().values()] == ["done", "not run yet"], case.rows()
    assert "1 of 2 runs are done" in case.run(SWEEP) and case.rows()["b"]["status"] == "done"
    broken = case.record("a_s1")
    for key, value in (
        ("val", None), ("val", [["a", 1.0]]), ("train", [[1, "x"]]), ("final_loss", "4"), ("status", None), ("parameters", "x"),
        ("final_loss", math.nan), ("resolved", {**broken["resolved"], "m": 1}),
    ):  # fmt: skip
        (case.out / "runs/a_s1.json").write_text(json.dumps({**broken, key: value}))
        said = case.run(SWEEP, "--report-only")
        assert "a_s1.json is no record" in said and case.rows()["a"]["status"] == "not run yet", (key, said)


def test_names_are_shown_as_they_are(case):
    """What matplotlib would read as formulas or leave out, and a name that is too long for a file."""
    names = ["cost $\\foo$ x", "$5 and $6", "_hidden", "n" * 300]
    text = SWEEP.replace("steps = 4", "steps = 2")
    text += "".join(f"[[run]]\nname = {json.dumps(name)}\nbeta1 = 0.{i + 1}\n" for i, name in enumerate(names))
    said = case.run(text)
    assert "6 done" in said and "Warning" not in said, said
    assert all((case.out / name).exists() for name in REPORT)


def test_hung_run(case):
    """It is killed and stands in the table; what comes after it is run."""
    text = SWEEP + '[[run]]\nname = "hung"\nseed = 13\nturn = 0\n'
    trainer = case.wrapper('case "$*" in *--dry-run*) ;; *--seed=13*) exec sleep 600 ;; esac')
    said = case.run(text, "--trainer", trainer, "--silence", "10", status=1)
    assert "2 done, 1 died" in said, said
    assert case.rows()["hung"]["status"] == "died: hung: nothing in its log for 10 s at step 0 of 4", case.rows()["hung"]


def test_report_twice_is_the_same(case):
    """The same bytes from copied records, without ./train and without a GPU; the page asks no network."""
    text = SWEEP.replace('name = "a"\n', 'name = "a"\nseed = [1, 2]\n')
    case.run(text)
    there = case.folder / "there"
    shutil.copytree(case.out / "runs", there / "runs")
    sweep, none = case.write(text), case.folder / "none"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"}
    command = case.command(sweep, "--out", there, "--report-only", "--trainer", none, "--work", none)
    done = subprocess.run(command, env=environment, cwd=case.folder, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr and not none.exists(), done.stderr
    for name in REPORT:
        assert (case.out / name).read_bytes() == (there / name).read_bytes(), name
    page = (case.out / "report.html").read_text()
    assert page.count("embed_item(item)") == 1 and len(page) > 1000000, "the program is inside"
    head, body = page.split("<script>")[0], page.split("</script>")[1]
    assert "<link" not in page and "<script src" not in page and "http" not in head + body
    assert max((case.out / "runs" / name).stat().st_size for name in os.listdir(case.out / "runs")) < 10000


def test_report_of_nothing_and_of_a_part(case):
    assert "holds no run" in case.run(SWEEP, "--report-only", status=2)
    case.run(SWEEP, "--only", "b")
    assert case.rows()["a"]["status"] == "not run yet" and case.rows()["b"]["difference"] == ""
    case.run(SWEEP + "beta2 = 0.9\n", "--only", "a")
    assert "1 records are of other options" in (case.out / "table.md").read_text()
    assert case.rows()["b"]["status"] == "not run yet"
    died = case.record("a_s1") | {"status": "died", "final_loss": None}
    (case.out / "runs/a_s1.json").write_text(json.dumps(died))
    case.run(SWEEP + "beta2 = 0.9\n", "--report-only")
    assert sorted(path.name for path in case.out.iterdir()) == ["report.html", "runs", "table.csv", "table.md"]


def row_of(name, group, size, level, *ends):
    """A row whose runs have ended so."""
    sys.path.insert(0, str(COMPARE))
    from table import Row

    bytes_ = {"state_bytes": size - 2, "weights_bytes": 2}
    records = {seed: {"status": end, "final_loss": 4.0, **bytes_} for seed, end in enumerate(ends)}
    return Row(name, group, "a", len(ends), set(), records, level=level)


def test_picture_of_bytes_and_losses(case):
    """A row of which a seed is not done is hollow and not among the best; the first group is over the others."""
    sys.path.insert(0, str(COMPARE))
    from PIL import Image

    from curves import front
    from draw import COLOURS, draw_pareto

    table = [row_of("a", "one", 14, 0.0, "done"), row_of("b", "one", 3, -0.1, "done", "diverged")]
    table += [row_of("c", "one", 4, 0.1, "done", "done"), row_of("d", "two", 4, 0.1, "done")]
    assert [row.name for row in front(table)] == ["c", "a"]
    draw_pareto(table, {"baseline": "a"}, case.folder / "pareto.png")
    counts = {colour: number for number, colour in Image.open(case.folder / "pareto.png").convert("RGB").getcolors()}
    first, second = (counts[tuple(bytes.fromhex(colour[1:]))] for colour in COLOURS[:2])
    assert 2.2 * second < first < 3.8 * second, (first, second)  # two dots, a ring and the legend's; the legend's alone
    assert len(set(COLOURS)) == 8, "as many as d6 has groups"


def test_labels_are_beside_their_dots(case):
    """No other dot that has a name is nearer to one, unless a line leads to its own."""
    sys.path.insert(0, str(COMPARE))
    import random

    from draw import place_labels, plt

    for seed in range(3):
        draw = random.Random(seed)
        points = [(draw.gauss(0, 1), draw.gauss(0, 1), f"adamw{i}") for i in range(8)] + [(9, 9, "a"), (-9, -9, "b")]
        figure, axes = plt.subplots()
        axes.plot(*zip(*(point[:2] for point in points)), "o")
        place_labels(figure, axes, points, [point[:2] for point in points])
        at = {text: axes.transData.transform((x, y)) for x, y, text in points}
        lines = [its.xy for its in axes.texts if not its.get_text()]
        names = [its for its in axes.texts if its.get_text()]
        for its in names:
            box = its.get_window_extent()
            away = {text: math.hypot(*(max(box.min[i] - x[i], x[i] - box.max[i], 0) for i in (0, 1))) for text, x in at.items()}
            assert away[its.get_text()] <= min(away.values()) + 1 or its.xy in lines, (its.get_text(), away)
        assert len(names) == 10 and lines, f"{len(names)} have one, {len(lines)} with a line"
        plt.close(figure)


def test_differences(case):
    """Of pairs, of one pair, and of runs without a common seed."""
    sys.path.insert(0, str(COMPARE))
    from table import difference, pair_scatter

    base = {1: 3.0, 2: 3.2, 3: 3.1}
    mean, error, pairs = difference({1: 3.1, 2: 3.2, 3: 3.3}, base)  # 0.1, 0, 0.2
    assert pairs == 3 and math.isclose(mean, 0.1) and math.isclose(error, 0.1 / math.sqrt(3)), (mean, error)
    mean, error, pairs = difference({2: 3.25}, base)
    assert pairs == 1 and math.isclose(mean, 0.05) and math.isclose(error, 0.1 * math.sqrt(2)), (mean, error)
    mean, error, pairs = difference({7: 3.0, 8: 3.4}, base)
    assert pairs == 0 and math.isclose(mean, 0.1) and math.isclose(error, math.sqrt(0.08 / 2 + 0.01 / 3)), (mean, error)
    assert difference({1: 3.5}, {1: 3.0}) == (0.5, None, 1) and difference({}, base) == (None, None, 0)
    # More seeds on one side than on the other: what both have is paired.
    mean, error, pairs = difference({1: 3.1, 2: 3.2, 7: 9.0}, base)  # 0.1, 0
    assert pairs == 2 and math.isclose(mean, 0.05) and math.isclose(error, 0.05), (mean, error)
    # A baseline of one seed scatters as the study's does.
    mean, error, pairs = difference({1: 3.5}, {1: 3.0}, base.values())
    assert (mean, pairs) == (0.5, 1) and math.isclose(error, 0.1 * math.sqrt(2)), error
    mean, error, pairs = difference({4: 3.5, 5: 3.7}, {1: 3.0}, base.values())
    assert pairs == 0 and math.isclose(error, math.sqrt(0.02 / 2 + 0.01)), error
    assert difference({1: 3.5}, {1: 3.0}, {1: 3.0}.values()) == (0.5, None, 1)
    # One pair among configurations that have several: variances 0.01 (3 pairs) and 0.04 (2 pairs), pooled by 2 and 1.
    scatter, degrees = pair_scatter([[0.1, 0.0, 0.2], [0.2, 0.2 + 0.2 * math.sqrt(2)], [0.3], [], [0.0, 0.0]])
    assert math.isclose(scatter, math.sqrt((2 * 0.01 + 0.04) / 3)) and degrees == 3, (scatter, degrees)
    assert pair_scatter([[0.3], [0.0, 0.0]]) == (None, 0)
    for others in (base, {1: 3.0}):
        assert difference({1: 3.5}, others, (), 0.02) == (0.5, 0.02, 1)
    ten = {seed: 3.0 for seed in range(10)}
    losses = {seed: 3.1 + 0.1 * (seed % 2) for seed in ten}
    _, error, _ = difference(losses, ten, (), 9.0)
    assert math.isclose(error, statistics.stdev([0.1, 0.2] * 5) / math.sqrt(10)), "ten pairs: their own"
    _, error, _ = difference({seed: losses[seed] for seed in range(9)}, ten, (), 9.0)
    assert math.isclose(error, 3.0), "nine pairs: the pooled one"
    _, error, _ = difference({1: 3.1, 2: 3.2, 3: 3.3}, base, (), 9.0)
    assert math.isclose(error, 9.0 / math.sqrt(3)), error
    _, error, _ = difference({1: 3.1, 2: 3.2, 3: 3.3}, base, (), 0.02)
    assert math.isclose(error, 0.1 / math.sqrt(3)), error
    # Few pairs may agree by chance, but not scatter by it; what is equal to the bit is so by none.
    _, error, pairs = difference({1: 3.1, 2: 3.3001}, base, (), 0.02)
    assert pairs == 2 and math.isclose(error, 0.02 / math.sqrt(2)), error
    _, error, pairs = difference({1: 3.1, 2: 3.2}, base, (), 0.02)  # 0.1, 0
    assert pairs == 2 and math.isclose(error, 0.05), error
    for n, same in ((1, {1: 3.0}), (2, {1: 3.0, 2: 3.2})):
        assert difference(same, base, (), 0.02) == (0.0, 0.0, n)


def test_errors_of_two_baselines(case):
    """Each has a pool of its own; the picture's bar of what is compared to the study's baseline is the table's error."""
    from types import SimpleNamespace

    sys.path.insert(0, str(COMPARE))
    from table import rows

    def run(name, seed, baseline):
        its = {"name": name, "seed": seed, "group": "g", "baseline": baseline, "own": set()}
        return SimpleNamespace(**its, options_key=lambda: "")

    pairs = [(f"{base}{i}", base) for base in "ab" for i in range(10)]
    names = {name: [run(name, seed, base) for seed in (1, 2)] for name, base in [("a", "a"), ("b", "a"), *pairs]}
    ended = {"status": "done", "options_key": "", "resolved": {}, "device": ""}
    spread = {"a": 0.01, "b": 0.04}  # of a pair: the losses of seed 2 are off by it times √2
    loss = {(name, 1): 4.0 for name in names} | {(name, 2): 4.0 + spread[base] * math.sqrt(2) for name, base in pairs}
    records = {key: {**ended, "final_loss": 4.0} for key in ((name, 2) for name in "ab")}
    records |= {key: {**ended, "final_loss": its} for key, its in loss.items()}
    table, _ = rows(SimpleNamespace(baseline="a", configurations=lambda: names), records)
    for row in table[2:]:
        assert math.isclose(row.error, spread[row.baseline] / math.sqrt(2)), row
        assert row.baseline == "b" or row.level_error == row.error, row


def test_errors_in_the_table(case):
    """Of a sweep in which one configuration has three pairs, one has one, and one a baseline of its own."""
    text = SWEEP.replace("steps = 4", "steps = 2")
    for line in ('name = "a"\n', 'preset = "adamw8"\n'):
        text = text.replace(line, line + "seed = [1, 2, 3]\n")
    # Learning rates differ in every bit of the loss; a format may give lion's signs of two steps, and with them an error of 0.
    text += '[[run]]\nname = "c"\nlr = 0.002\n[[run]]\nname = "d"\nrule = "lion"\n'
    text += '[[run]]\nname = "e"\nbaseline = "d"\nrule = "lion"\nlr = 0.002\n'
    case.run(text)
    slugs = "a_s1 a_s2 a_s3 b_s1 b_s2 b_s3 c_s1 d_s1 e_s1".split()
    loss = {slug: case.record(slug)["final_loss"] for slug in slugs}
    pairs = [loss[f"b_s{seed}"] - loss[f"a_s{seed}"] for seed in (1, 2, 3)]
    rows = case.rows()
    for name, difference, error in (
        ("b", statistics.fmean(pairs), statistics.stdev(pairs) / math.sqrt(3)),
        ("c", loss["c_s1"] - loss["a_s1"], statistics.stdev(pairs)),
        ("d", loss["d_s1"] - loss["a_s1"], statistics.stdev(pairs)),
        ("e", loss["e_s1"] - loss["d_s1"], statistics.stdev(pairs)),
    ):
        row = rows[name]
        assert abs(float(row["difference"]) - difference) < 1e-6, (name, row)
        assert abs(float(row["standard_error"]) - error) < 1e-6 and error > 1e-5, (name, row, error)
    assert rows["a"]["difference"] == rows["a"]["standard_error"] == ""
    cells = markdown_cells(case.out)
    assert cells["configuration"][6:11] == ["val loss", "− baseline", "± s.e.", "n", "baseline"], cells["configuration"]
    assert [cells[name][10] for name in "abcde"] == ["", "a", "a", "a", "d"], cells
    page_has_the_tables_figures(case.out, rows)


def test_committed_reports(case):
    """The tables and pictures that are in the repository are what the records beside them give, and so is the page."""
    folders = sorted(path.parent for path in (COMPARE / "results").glob("*/runs"))
    for folder in folders:
        out = case.folder / folder.name
        shutil.copytree(folder / "runs", out / "runs")
        case.run(COMPARE / "sweeps" / f"{folder.name}.toml", "--report-only", "--out", out, "--trainer", "none")
        for name in REPORT[:5]:
            assert (folder / name).read_bytes() == (out / name).read_bytes(), f"{folder / name}: type --report-only"
        page_has_the_tables_figures(out, study(folder.name))
    assert folders, "no study is there"


def objects(node, kind):
    """The attributes of all objects of a kind in Bokeh's JSON."""
    if isinstance(node, dict):
        if node.get("name") == kind:
            yield node["attributes"]
        node = list(node.values())
    for its in node if isinstance(node, list) else ():
        if isinstance(its, (dict, list)):
            yield from objects(its, kind)


def page_has_the_tables_figures(out, rows):
    """report.html against table.csv, of a baseline with several seeds: the picture of bytes and losses, the ends of the
    curves, the band, and the cells."""
    text = (out / "report.html").read_text()
    figures = json.loads(re.search(r"for \(const item of (\[.*\])\) Bokeh", text)[1].replace("<\\/", "</"))
    base = next(row for row in rows.values() if not row["difference"])
    seen, ends, bands = {}, {}, []
    for drawn in objects(figures, "GlyphRenderer"):
        if "attributes" not in drawn["data_source"]:  # bars, whose dots came before with the same data
            continue
        data = dict(drawn["data_source"]["attributes"]["data"]["entries"])
        if "low" in data:
            seen |= {name: its for name, *its in zip(*(data[key] for key in ("name", "x", "y", "low", "high")))}
        elif "y1" in data:
            bands.append(data)
        elif "name" in drawn:
            ends.setdefault(drawn["name"], []).append(data["y"][-1])
    assert set(seen) == set(rows), set(seen) ^ set(rows)
    assert rows[list(seen)[-1]]["group"] == next(iter(rows.values()))["group"], "the first group is drawn last"
    for name, row in rows.items():
        x, y, low, high = seen[name]
        size = float(row["state_bytes"]) + float(row["weights_bytes"])  # of four digits each
        assert abs(x - size) < 0.0011, (name, x, row)
        line = re.search(f"<tr><td>{re.escape(html.escape(name))}</td>.*", text)[0]
        cells = re.findall("<td>(.*?)</td>", line)
        assert abs(float(cells[6]) - float(row["final_loss"])) < 5.1e-5, (line, row)
        if row["baseline"] == base["configuration"] != name:
            error = float(row["standard_error"] or 0)
            found = (y, high - y, y - low, ends[name][0])  # differences are the first curves
            for its, right in zip(found, (float(row["difference"]), error, error, float(row["difference"]))):
                assert abs(its - right) < 6e-6, (name, found, row)  # curves have five digits, the table six
            assert abs(float(cells[7]) - float(row["difference"])) < 5.1e-5, (line, row)
        elif row["difference"]:
            label = f"{name} ({float(row['difference']):+.4f} to {row['baseline']})"
            assert abs(ends[label][0] - float(row["difference"])) < 6e-6, (label, row)
        assert cells[10] == (html.escape(row["baseline"]) if row["difference"] else ""), (line, row)
        assert abs(ends[name][-2] - float(row["final_loss"])) < 6e-6, (name, ends[name], row)
    range_ = next(its for its in objects(figures[0], "Range1d") if its["start"] < 0)
    inside = sum(range_["start"] < y < range_["end"] for _, y, _, _ in seen.values())
    assert inside >= (0.8 if len(seen) > 5 else 1) * len(seen), (inside, range_)
    records = map(json.loads, (path.read_text() for path in (out / "runs").glob("*.json")))
    ended = [its["final_loss"] for its in records if its["name"] == base["configuration"]]
    for band in bands:
        assert math.isclose(band["y2"][-1], statistics.stdev(ended)) and band["y1"][-1] == -band["y2"][-1], band
    assert bands
    assert {its["click_policy"] for its in objects(figures, "Legend")} == {"hide"}


def markdown_cells(out):
    """{configuration: cells} of table.md, its head included."""
    lines = (out / "table.md").read_text().split("\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {cells[0]: cells for cells in rows}


def study(name):
    """{configuration: row} of table.csv of those that have ended."""
    with (COMPARE / "results" / name / "table.csv").open(newline="") as file:
        return {row["configuration"]: row for row in csv.DictReader(file) if row["final_loss"]}


def table_of(text, head):
    """[(line, cells), ...] of the Markdown table whose first line begins with `head`."""
    lines = text.split(head, 1)[1].split("\n\n", 1)[0].split("\n")[2:]
    return [(line, [cell.strip() for cell in line.strip("|").split("|")]) for line in lines]


def error_of_several(row, digits):
    """' ± ' and its standard error where it has more than one pair; the 124M column leaves out the pooled one."""
    return f" ± {float(row['standard_error']):.{digits}f}" if int(row["pairs"]) > 1 else ""


def test_readme_has_the_reports_figures(case):
    """README's table, row by row."""
    rows, large = study("d6"), study("gpt2")
    lines = table_of((ROOT / "README.md").read_text(), "| configuration | weights, m, v |")
    for line, (name, formats, size, loss, difference, error, runs, at_124m) in lines:
        told = difference if name == "adamw32" else difference.split()[0]
        same = [
            row
            for row in rows.values()
            if name in ("", row["configuration"])
            and formats.split(",")[0] == " ".join(row[key] for key in ("weights", "m", "v"))
            and abs(float(size) - float(row["state_bytes"]) - float(row["weights_bytes"])) < 0.0006
            and loss == f"{float(row['final_loss']):.4f}"
            and told == (f"{float(row['difference']):+.4f}" if row["difference"] else "baseline")
            and error == (f"{float(row['standard_error']):.4f}" if row["standard_error"] else "")
            and runs == row["seeds_done"]
        ]
        assert len(same) == 1, f"README.md: {line}"
        expected = ""
        if name in large:
            row = large[name]
            expected = f"{float(row['difference']):+.4f}" if row["difference"] else "baseline"
            expected += error_of_several(row, 4)
            expected += "" if row["baseline"] == "adamw32" else f" of {row['baseline']}"
        assert at_124m == expected, f"README.md: {line}: {expected}"
    assert len(lines) > 20


def test_page_has_the_reports_figures(case):
    """The table of dev/compare/README.md, where all is compared to adamw32."""
    rows, large = study("d6"), study("gpt2")
    checked = []
    for line, (_, take, _, differences, at_0999, at_124m) in table_of((COMPARE / "README.md").read_text(), "| you want | take |"):
        presets = re.findall(r"`(\w+)`", take)
        if presets == ["adamw32"]:
            continue
        slow = [rows[f"{preset} beta2 0.999"] for preset in presets if f"{preset} beta2 0.999" in rows]
        expected = ", ".join(f"{float(row['difference']):+.3f} ± {float(row['standard_error']):.3f}" for row in slow)
        assert at_0999 == expected, f"README.md: {line}: {expected}"
        for preset, told, told_124m in zip(presets, differences.split(", "), at_124m.split(", "), strict=True):
            checked.append(preset)
            row = rows[preset]
            if row["baseline"] == "adamw32":
                assert told == f"{float(row['difference']):+.3f} ± {float(row['standard_error']):.3f}", f"README.md: {line}"
            row = large[preset]
            its = 0 if row["baseline"] == "adamw32" else float(large[row["baseline"]]["difference"])
            expected = f"{float(row['difference']) + its:+.3f}{error_of_several(row, 3)}"
            assert told_124m == expected, f"README.md: {line}: {expected}"
    assert len(set(checked)) >= 16, checked
    studies = [(study("d6"), "", 1), (study("d6_once"), "", 1), (large, "", 2)]
    studies += [(study(name), " beta2 0.999", 1) for name in ("d6", "d6_once")]
    targets = table_of((COMPARE / "README.md").read_text(), "| target | preset |")
    for line, (_, preset, *told) in targets:
        for its, (rows, more, least) in zip(told, studies, strict=True):
            row = rows.get(preset.strip("`") + more)
            error = f" ± {float(row['standard_error']):.3f}" if row and int(row["pairs"]) >= least else ""
            assert its == (f"{float(row['difference']):+.3f}{error}" if row else ""), f"README.md: {line}"
    assert len(targets) == 4, targets


def test_pages_say_how_many_runs_have_ended(case):
    readme, page = ((folder / "README.md").read_text() for folder in (ROOT, COMPARE))
    for name, text, phrase in (
        ("d6", readme, "{} of its {} runs"),
        ("d6", page, "{} of the {} runs of d6"),
        ("gpt2", readme, "`gpt2.toml`, {} of its {} runs"),
        ("gpt2", page, "{} of the {} runs are done"),
        ("d6_once", page, "`sweeps/d6_once.toml`, {} runs, three seeds each"),
    ):
        head = (COMPARE / "results" / name / "table.md").read_text()
        phrase = phrase.format(*re.search(r"(\d+) of (\d+) runs", head).groups())
        assert phrase in " ".join(text.split()), phrase


def test_progress(case):
    """How far the whole sweep is, and what is left at the rate so far; half a minute later again, not before."""
    import contextlib
    import io
    from types import SimpleNamespace

    sys.path.insert(0, str(COMPARE))
    from runner import Runner

    plan = {"tokens_per_step": 10, "steps": 100}
    (case.folder / "log.jsonl").write_text('{"type": "train", "step": 59}\n{"type": "train", "step": 60}\n')
    at_work = Runner(None, None, case.folder, case.folder, 1, [], math.inf, math.inf, "")
    at_work.begin, at_work.shown, at_work.done_tokens = time.monotonic() - 100, -math.inf, 600
    run = SimpleNamespace(plan=plan, label="a seed 1")
    at_work.active = [SimpleNamespace(run=run, folder=case.folder, first=20)]  # 40 steps of this start
    with contextlib.redirect_stdout(io.StringIO()) as out:
        at_work.progress([run, run])  # 1000 tokens in 100 s; 400 of the run at work and 2000 of those that wait are left
        at_work.progress([run, run])
    assert out.getvalue() == "2 waiting, 1 running (a seed 1 60%)  10 tokens/s  eta 4m00s\n", out.getvalue()


def has_the_logs_figures(record, folder):
    """A record of 100 steps against what ./train wrote: every loss, the speed, and the banner's memory."""
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().split("\n")[:-1]]
    train = [line for line in log if line["type"] == "train"]
    assert record["train"] == [[line["step"], round(line["loss"], 5)] for line in train] and len(train) == 100
    assert record["val"] == [[line["step"], line["loss"]] for line in log if line["type"] == "val"]
    seconds = [line["step_s"] for line in train[10:]]
    assert math.isclose(record["tokens_per_second"], 90 * 256 / sum(seconds), rel_tol=1e-3), record["tokens_per_second"]
    memory = re.search(r"^ ?memory .* = ([\d.]+) MiB", (folder / "log.txt").read_text(), re.M)
    assert record["memory_mib"] == float(memory[1]), (record["memory_mib"], memory)


def test_ci_sweep(case):
    """The sweep that CI runs, from the file that is there to the report."""
    begin = time.monotonic()
    case.run(COMPARE / "sweeps" / "ci.toml")
    seconds = time.monotonic() - begin
    rows = case.rows()
    assert list(rows) == ["adamw32", "adamw8c", "fp8w4"] and {row["status"] for row in rows.values()} == {"done"}, rows
    base = [case.record(f"adamw32_s{seed}")["final_loss"] for seed in (1, 2, 3)]
    for name, state, weights in (("adamw8c", "2.25", "2"), ("fp8w4", "1.062", "1.008")):
        row, record = rows[name], case.record(f"{name}_s1")
        assert (row["state_bytes"], row["weights_bytes"], row["pairs"]) == (state, weights, "1"), row
        assert abs(float(row["difference"]) - (record["final_loss"] - base[0])) < 1e-6, row
        assert abs(float(row["standard_error"]) - statistics.stdev(base) * math.sqrt(2)) < 1e-6, row
        assert record["val"][0][1] - record["final_loss"] > 1.0, "it has learned"
        has_the_logs_figures(record, case.work / f"{name}_s1")
    page_has_the_tables_figures(case.out, rows)
    assert abs(float(rows["adamw32"]["final_loss"]) - statistics.fmean(base)) < 1e-6
    for name in REPORT[2:5]:
        assert (case.out / name).read_bytes()[:4] == b"\x89PNG", name
    assert seconds < 120, f"{seconds:.0f} s"


def test_studies_are_accepted(case):
    """Every configuration of the studies, by name and format; a smaller model stands in for theirs."""
    small = {"data": "", "device": "cpu", "model": "nano", "seq": 64, "batch": 1, "tokens-per-step": 64}
    options = [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
    for name, least in (("d6", 150), ("d6_65536", 28), ("d6_once", 24), ("gpt2", 15)):
        said = case.run(COMPARE / "sweeps" / f"{name}.toml", "--dry-run", *options)
        count = int(said.strip().split("\n")[-1].split()[0])
        assert count >= least, said
        listed = subprocess.run([ROOT / "train", "--list-presets"], capture_output=True, text=True).stdout
        presets = [line.split()[0] for line in listed.strip().split("\n")[1:] if not line.split()[0].startswith("--")]
        left_out = [preset for preset in presets if f"run    {preset} seed 1 " not in said]
        assert not left_out or name in ("d6_65536", "d6_once"), f"{name}.toml has not {left_out}"
        if name == "d6":
            states_are_covered(said)


def states_are_covered(said):
    """Each listed format of a moment is in d6's dry run, in one alone and in both, beside fp32 master weights."""
    listed = subprocess.run([ROOT / "train", "--list-formats"], capture_output=True, text=True).stdout
    listed = listed.split("--m, --v", 1)[1].split("  NAME alone", 1)[0].split("\n")[2:]
    formats = {re.sub(r"/\d+", "", line.split()[0]) for line in listed if line.strip()} - {"fp32"}
    runs = [line.split() for line in said.split("\n") if re.match("run    [mv] .* seed 1 +--[mv] ", line)]
    asked = [dict(zip(words[0::2], words[1::2])) for words in (run[run.index("1") + 1 :] for run in runs)]
    asked = [{o: re.sub(r"/\d+", "", f) for o, f in options.items()} for options in asked]
    alone = {f for options in asked if len(options) == 1 for f in options.values()}
    both = {f for options in asked if set(options) == {"--m", "--v"} for f in options.values()}
    assert len(formats) > 30 and formats <= alone and formats <= both, (formats - alone, formats - both)


def missing_tools():
    """Why nothing can be tested here, or None."""
    if sys.version_info < (3, 11):
        return "Python 3.11 reads sweep files"
    if not (ROOT / "train").exists():
        return "type `make`"
    if subprocess.run([sys.executable, "-c", "import matplotlib, bokeh"], capture_output=True).returncode:
        return "type `make venv`"
    return None


if __name__ == "__main__":
    sys.exit(run_cases(globals(), Case, missing_tools()))
