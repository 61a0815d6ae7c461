#!/usr/bin/env python3
"""Tests of how dev/compare runs sweeps: one line a case, `N passed, N failed, N skipped` last; exit status 1 when a case
fails. test_report.py tests what it says of them.

    .venv/bin/python dev/unit/test_compare.py [-k SUBSTRING]

Each case runs dev/compare/run.py with ./train on the CPU, a tiny model and the built-in text, in a temporary folder.
Without ./train, Python 3.11 or what draws the report (dev/requirements.txt), all is skipped and the exit status is 0.
"""

import json
import math
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

from cases import run_cases
from compare_case import BASE, COMPARE, ROOT, SWEEP, Case, missing_tools, wait_for


def steps_logged(folder):
    log = folder / "log.jsonl"
    return log.read_text().count('"train"') if log.exists() else 0


def processes(folder):
    """Returns command lines of programs that were given this folder."""
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
    case.refuse(SWEEP + 'fit = "24G"\n', 15, "--fit is the sweep's own affair")
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
    case.refuse(SWEEP + 'm = "bf16"\neach = [\n    { v = "bf16" },\n    { m = [] },\n]\n', 15, "m is an empty list")
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
    many = "".join(f"{key} = {[*range(400)]}\n" for key in ("seed", "warmup", "rank", "rank-gap"))
    case.refuse(SWEEP + many, 12, "25600000000 runs, over 10000; shorten a list")
    assert "--run is the sweep's own affair" in case.run(SWEEP, "--set", "run=x", status=2)
    for more, typed in (("seed = [1, 2]\n", "seed=5"), ('[[run]]\nname = "c {lr}"\nlr = [1, 2]\n', "lr=1")):
        said = case.run(SWEEP + more, "--set", typed, status=2)
        assert said.startswith(f"compare: error: --set {typed}: runs of ") and "told apart by it" in said, said
    assert "compare: error: " in case.run(SWEEP, "--out", "/dev/null", status=2)
    assert "cannot be read" in case.run(case.folder / "none.toml", status=2)
    os.mkfifo(case.folder / "pipe.toml")
    assert "cannot be read (not a regular file); name a sweep file" in case.run(case.folder / "pipe.toml", status=2)
    assert "type `make` first" in case.run(SWEEP, "--trainer", case.folder / "none", status=2)
    text = case.write("no program", "text")
    assert f"{text}: may not be started; type `chmod +x {text}`" in case.run(SWEEP, "--trainer", text, status=2)
    for more in ("--dry-run", "--no-report"):
        assert f"--report-only with {more} does nothing" in case.run(SWEEP, "--report-only", more, status=2)


def test_values_that_are_none(case):
    """Python refuses to read or to write some of these: a sentence for each, not a traceback."""
    digits, hexadecimal = "9" * 5000, "0x" + "f" * 5000
    for key in ("lr", "seed", "batch", "group", "turn"):
        case.refuse(SWEEP + f"{key} = {digits}\n", 15, "cannot be read", "give a smaller value")
        case.refuse(SWEEP + f"{key} = {hexadecimal}\n", 15, f"{key} is ")
        case.refuse(SWEEP + f"{key} = [1, {hexadecimal}]\n", 15, f"{key} is ")
    case.refuse(SWEEP.replace("batch = 1", f"batch = {hexadecimal}"), 6, "batch is an integer of more than 128 bits")
    case.refuse(SWEEP + f"each = [{{ lr = {hexadecimal} }}]\n", 15, "lr is an integer of more than 128 bits")
    case.refuse(SWEEP + f'seed = "{digits}"\n', 15, "give whole numbers")
    case.refuse(SWEEP + 'seed = "\u0661"\n', 15, "give whole numbers")
    case.refuse(SWEEP + f"lr = {'[' * 5000}{']' * 5000}\n", 1, "cannot be read")
    for value in ("1979-05-27", "true", "{ a = 1 }", "[[1]]", f"{{ a = {hexadecimal} }}"):
        case.refuse(SWEEP + f"lr = {value}\n", 15, "lr is ", "give a text, a number")
    case.refuse(SWEEP + 'data = "a\\u0000b"\n', 15, "data holds a NUL character")
    for value in ("nan", "inf", "1e400", '"x"'):
        case.refuse(SWEEP + f"lr = {value}\n", 15, "--lr takes a number")


# What is run, and when.


def test_done_runs_are_skipped(case):
    said = case.run(SWEEP, "--no-report")
    assert "0 of 2 runs are done" in said and "2 done" in said, said
    built = subprocess.run([ROOT / "train", "--version"], capture_output=True, text=True).stdout
    assert f"(commit {case.record('a_s1')['commit']}," in built, "of the program, not of the working tree"
    before = (case.out / "runs.jsonl").read_bytes()
    assert "2 of 2 runs are done" in case.run(SWEEP, "--no-report")
    shutil.rmtree(case.work)  # the records alone say what is done, wherever they were made
    said = case.run(SWEEP, "--no-report")
    assert "2 of 2 runs are done" in said and "nothing was run" in said, said
    assert before == (case.out / "runs.jsonl").read_bytes()
    edited = SWEEP + "beta2 = 0.99\n"  # of b alone
    said = case.run(edited, status=2)
    assert "1 finished run(s) of these names but of other options" in said and "b seed 1" in said, said
    assert "1 to run" in case.run(edited, "--dry-run"), "which replaces nothing"
    said = case.run(edited, "--no-report", "--replace")
    assert "1 of 2 runs are done" in said and "b seed 1  val" in said, said
    assert "2 of 2" in case.run(
        SWEEP + "beta2 = 0.99\nprint-every = 3\n", "--no-report"
    ), "an option that changes nothing"
    case.put('{"name": "a", ', case.record("b_s1"))
    said = case.run(SWEEP + "beta2 = 0.99\n", "--no-report")
    assert "runs.jsonl:1 is no record of a run" in said and "1 of 2 runs are done" in said, said


def test_corpus_counts_not_its_place(case):
    place = case.folder / "a place"
    place.mkdir()
    for name in ("here", "there"):
        (place / name).write_bytes((bytes(range(32, 127)) * 539)[:51200])
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
    assert not case.records()
    case.run(sweep, "--only", "a", "--no-report")
    resumed, whole = case.record("a_s1"), case.records(case.folder / "whole")["a_s1"]
    assert resumed["resumed_at"] >= 20 and whole["resumed_at"] == 0, resumed["resumed_at"]
    for key in ("val", "train", "final_loss", "resolved"):
        assert resumed[key] == whole[key], key
    assert not list(folder.glob("step_*")), "no weights are kept"
    assert (folder / "log.jsonl").exists()


def test_stops_children_at_ctrl_c(case):
    """The runs save, and the second start goes on. Without a checkpoint a run begins anew."""
    process = case.start(case.write(UNSAVED), "--jobs", 2)
    wait_for(lambda: len(processes(case.work / "a_s1")) and len(processes(case.work / "b_s1")))
    wait_for(lambda: all((case.work / name / "log.jsonl").exists() for name in ("a_s1", "b_s1")))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopping 2 runs" in out, (out, err)
    assert not processes(case.work / "a_s1") and not processes(case.work / "b_s1")
    assert not case.records()
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
    assert process.returncode == 130 and not os.listdir(case.out)


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
    assert "2 runs wait for the next start" in said and not case.records(), said
    # After the first run it is known how long one takes: no second that would not end in time.
    slow = case.wrapper('case "$*" in *--run=*) sleep 3 ;; esac')
    said = case.run(SWEEP, "--budget", "5", "--no-report", "--trainer", slow)
    assert "1 runs wait" in said and list(case.records()) == ["a_s1"], said


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
    text += '[[run]]\nname = "{m} {beta2} {v}"\nturn = 2\nbeta2 = [0.9, 0.99]\neach = [{ m = "dyn8", v = "udyn8" },\n'
    text += '{ m = "bf16", v = "fp32", beta2 = [0.5, 0.6] }, { name = "late", m = "fp16", turn = 4, beta2 = 0.8 }]\n'
    said = case.run("\ufeff" + text, "--dry-run")  # as some editors begin a file
    names = [line[7:47].strip() for line in said.split("\n") if line.startswith("run ")]
    inner = [f"{name} seed 1" for name in ("dyn8 0.9 udyn8", "dyn8 0.99 udyn8", "bf16 0.5 fp32", "bf16 0.6 fp32")]
    assert names == ["a seed 1", *inner, "a seed 2", "late seed 1"], names
    assert "7 to run" in said and not case.out.exists() and not case.work.exists()


def test_seconds_of_training(case):
    text = SWEEP.replace("steps = 4\n", "").replace("[base]", "seconds = 1\n[base]").replace("= 640", "= 64")
    case.run(text.replace("val-every = 2", "val-every = 10\nlayers = 1\nseq = 16"), "--no-report")
    for name, record in case.records().items():
        kept = int((case.work / name / "steps.txt").read_text())
        assert record["steps"] == kept and "steps" not in record["options"], record["steps"]
        seconds = kept * record["tokens_per_step"] / record["tokens_per_second"]
        assert 0.1 < seconds < 10, seconds


# Runs differ by nothing but the option under test.


def stream(checkpoint, name):
    """Returns the bytes of an array of optimizer.safetensors."""
    data = (checkpoint / "optimizer.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    begin, end = json.loads(data[8 : 8 + size])[name]["data_offsets"]
    return data[8 + size + begin : 8 + size + end]


def train_losses(folder):
    lines = map(json.loads, (folder / "log.jsonl").read_text().split("\n")[:-1])
    return [line["loss"] for line in lines if line["type"] == "train"]


def test_runs_differ_by_the_option_alone(case):
    """At a rate of 1e-30 every loss is one of initial weights and data order: the same bits whatever the states.
    The noise of m does not depend on what v takes: the same codes."""
    text = 'keep-checkpoints = true\nbaseline = "a"\n' + BASE + "lr = 1e-30\n"
    text += '[[run]]\nname = "a"\nweights = "fp32"\nseed = [1, 2]\n'
    text += '[[run]]\nname = "m {m} v {v}"\nweights = "fp32"\neach = [{ m = "bf16:sr", v = "fp32" }, '
    text += '{ m = "bf16:sr", v = "bf16:sr" }, { m = "dyn8:sr", v = "sqrt4" }]\n'
    case.run(text)
    records = case.records()
    runs = {record["name"] + str(record["seed"]): slug for slug, record in records.items()}
    losses = {name: train_losses(case.work / slug) for name, slug in runs.items()}
    assert len(losses) == 5 and all(len(values) == 4 for values in losses.values()), losses
    other = losses.pop("a2")
    assert len(set(map(tuple, losses.values()))) == 1, losses
    assert not set(other) & set(losses["a1"]), "another seed, other weights and data"
    assert {row["status"] for row in case.rows().values()} == {"done"}, "nothing differs that was not asked for"
    saved = {name: case.work / slug / "step_00000004" for name, slug in runs.items()}
    assert stream(saved["m bf16:sr v fp321"], "m") == stream(saved["m bf16:sr v bf16:sr1"], "m")
    resolved = {name: records[slug]["resolved"] for name, slug in runs.items()}
    for name in losses:
        differs = {key for key, value in resolved[name].items() if value != resolved["a1"][key]}
        assert differs <= {"m", "v"}, (name, differs)


def test_what_nobody_asked_for_is_told(case):
    """In pairs, and among the seeds of one configuration; what a rule has none of is no such thing."""
    text = SWEEP + 'seed = [1, 2]\n[[run]]\nname = "c"\nrule = "sgd"\n'
    case.run(text)
    assert {row["status"] for row in case.rows().values()} == {"done"}, case.rows()
    records = case.records()
    for seed, key, value in ((1, "batch", "2"), (2, "m", "bf16")):
        record = records[f"b_s{seed}"]
        record["resolved"][key], record["sharing"] = value, seed
    case.put(*records.values())
    case.run(text, "--report-only")
    rows = case.rows()
    told = "its seeds differ in batch (2, 1), m (dyn8/256, bf16); also differs from the baseline in batch (2, not 1)"
    assert rows["b"]["status"] == told and rows["a"]["status"] == "done", rows["b"]
    assert rows["b"]["runs_sharing"] == "2" and case.cells()["b"][11].startswith("("), "one of its seeds did"


def test_a_preset_is_asked_for_with_its_overrides(case):
    """... and the bytes of its weights are those that are stored, of tensors that --override names too."""
    text = 'baseline = "plain"\n' + BASE + '[[run]]\nname = "fp8w8e"\npreset = "fp8w8e"\n'
    text += '[[run]]\nname = "plain"\npreset = "fp8w8e"\noverride = "none"\n'
    text += '[[run]]\nname = "wide"\npreset = "fp8w8e"\noverride = "*: weights=bf16:ef m=bf16:sr"\n'
    case.run(text)
    rows = case.rows()
    assert {row["status"] for row in rows.values()} == {"done"}, rows
    plain, vectors, wide = (float(rows[name]["weights_bytes"]) for name in ("plain", "fp8w8e", "wide"))
    assert plain == 1.008 and plain < vectors < 1.2 and abs(wide - 2) < 0.001, (plain, vectors, wide)
    assert float(rows["wide"]["state_bytes"]) > 3.0 > float(rows["fp8w8e"]["state_bytes"]), rows


def test_progress(case):
    """The line says how far the whole sweep is and what is left at this rate. It comes again after half a minute."""
    import contextlib
    import io
    from types import SimpleNamespace

    sys.path.insert(0, str(COMPARE))
    from run import ROOT, options_read
    from runner import Runner

    assert options_read(["dev/compare/sweeps/d6.toml"]).out == ROOT / "runs/compare/d6", "outside of what git tracks"
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


def test_studies_are_accepted(case):
    """Every configuration of a study that this program can repeat is accepted, with a smaller model. The other
    studies name presets and formats that were removed since, and are read from their records (test_report.py)."""
    small = {"data": "", "device": "cpu", "model": "nano", "seq": 64, "batch": 1, "tokens-per-step": 64}
    options = [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
    said = case.run(COMPARE / "sweeps" / "d6_once.toml", "--dry-run", *options)
    assert int(said.strip().split("\n")[-1].split()[0]) == 24, said


if __name__ == "__main__":
    sys.exit(run_cases(globals(), Case, missing_tools()))
