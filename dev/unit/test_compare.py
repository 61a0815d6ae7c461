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
import subprocess
import sys
import time
from pathlib import Path

from cases import ROOT, ended, json_lines, run_cases, wait_for
from compare_case import BASE, COMPARE, SWEEP, Case, missing_tools


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

SECOND = '[[run]]\nname = "b"\npreset = "adamw8"\nseed = 2\n'
MISTAKES = [  # (replaced in SWEEP, by what, line, words); without the first, the second is added at the end
    ("", "betta2 = 0.9\n", 15, "unknown option betta2", "did you mean beta2?"),
    ("batch = 1", "batches = 1", 6, "unknown option batches", "did you mean batch?"),
    ("", 'resume = "auto"\n', 15, "--resume is the sweep's own affair"),
    ("", 'each = [\n    { m = "fp32" },\n    { m = "bf16", mm = "fp32" },\n]\n', 17, "unknown option mm"),
    ('baseline = "a"', 'keeps = 1\nbaseline = "a"', 1, "unknown key keeps"),
    ("", '[[runs]]\nname = "c"\n', 15, "unknown key runs", "did you mean run?"),
    ("adamw8", "adamw99", 14, 'b: --preset: "adamw99" is not known'),
    ("", 'm = "udyn8"\n', 15, "holds no negative numbers"),
    ("steps = 4", "steps = 4.5", 7, "--steps takes a whole number"),
    ("batch = 1", 'data = "build/none"', 6, "--data build/none", "No such file"),
    ("steps = 4", "steps = ", 7, "cannot be read"),
    ('baseline = "a"', 'baseline = "A"', 1, "baseline A is not the name of a run"),
    ('baseline = "a"', 'title = "x"', 1, "there is no baseline"),
    ("batch = 1", "batch = [1, 2]", 6, "batch is a list"),
    ("", "m = []\n", 15, "empty list"),
    ("", 'seed = ["x"]\n', 15, "seed is x; give whole numbers"),
    ("", '[[run]]\nname = "a"\nm = "bf16"\n', 16, "already the name of runs with another m (", "sweep.toml:10"),
    ("", '[[run]]\nname = "c"\npreset = "adamw8"\n', 16, "c seed 1 has the same options as b seed 1"),
    ("val-every = 2", "val-every = 0", 8, "a run is judged by its last validation"),
    ("", 'baseline = "a"\ngroup = "x"\n' + SECOND, 18, "already the name of runs with another group ("),
    ('name = "a"', 'name = "a"\nbaseline = "b"', 12, "a is the baseline of the whole sweep"),
    ('baseline = "a"', 'keep-checkpoints = "false"\nbaseline = "a"', 1, "keep-checkpoints is true or false"),
    ('name = "b"', 'name = "two\\nlines"', 13, "name is a text"),
    ("", "lr = true\n", 15, "lr is no value of an option"),
    ("", "lr = nan\n", 15, "--lr takes a number"),
    ('baseline = "a"', 'baseline = "a"\nlike = ["d6.toml"]', 2, "like is a sweep file"),
]


def test_mistakes(case):
    for old, new, line, *words in MISTAKES:
        case.refuse(SWEEP.replace(old, new) if old else SWEEP + new, line, *words)


def test_mistakes_of_the_command_line(case):
    text = case.write("no program", "text")
    for sweep, more, words in (
        (SWEEP, ("--set", "seed=x"), "--set seed=x: seed is x; give whole numbers"),
        (SWEEP, ("--set", "bathc=1"), "--set bathc=1: unknown option bathc; did you mean batch?"),
        (SWEEP, ("--set", "data=build/none"), "error: --set data=build/none: a: --data build/none"),
        (SWEEP, ("--set", "run=x"), "--run is the sweep's own affair"),
        (SWEEP + "seed = [1, 2]\n", ("--set", "seed=5"), "has the same options as"),
        (SWEEP, ("--out", "/dev/null"), "compare: error: "),
        (SWEEP, ("--trainer", case.folder / "none"), "type `make` first"),
        (SWEEP, ("--trainer", text), f"{text}: may not be started; type `chmod +x {text}`"),
        (SWEEP, ("--report-only", "--dry-run"), "--report-only with --dry-run or --no-report does nothing"),
        (SWEEP, ("--budget", "-5"), "--budget -5: give seconds"),
        (SWEEP, ("--silence", "nan"), "--silence nan: give seconds"),
        ('like = "none.toml"\n' + SWEEP, (), "none.toml: cannot be read (No such file or directory)"),
        ('like = "sweep.toml"\n' + SWEEP, (), "leads back to itself; name another sweep file"),
        (case.folder / "none.toml", (), "cannot be read (No such file or directory); name a sweep file"),
    ):
        assert words in case.run(sweep, *more, status=2), (more, words)


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


LONG = SWEEP.replace("steps = 4", "steps = 150\nsave-every = 20\ntokens-per-step = 128").replace("= 2\n", "= 100\n")
UNSAVED = LONG.replace("save-every = 20", "save-every = 0")  # but for what it saves when it is stopped


def test_resumes_after_kill(case):
    """kill -9: the child ends too, and the second start goes on from a checkpoint to the same bits."""
    sweep = case.write(LONG)
    case.run(sweep, "--only", "a", "--no-report", "--out", case.folder / "whole", "--work", case.folder / "w")
    process = case.start(sweep, "--only", "a")
    folder = case.work / "a_s1"
    wait_for(lambda: list(folder.glob("step_????????/state.json")))
    ended(process, signal.SIGKILL)
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
    status, out, err = ended(process, signal.SIGINT)
    assert status == 130 and "stopping 2 runs" in out, (out, err)
    assert not processes(case.work / "a_s1") and not processes(case.work / "b_s1")
    assert not case.records()
    begun = json.loads(next((case.work / "a_s1").glob("step_*/state.json")).read_text())["step"]
    shutil.rmtree(next((case.work / "b_s1").glob("step_*")))
    case.run(UNSAVED, "--no-report", "--jobs", 2)
    assert case.record("a_s1")["resumed_at"] == begun and case.record("b_s1")["resumed_at"] == 0
    assert [case.record(name)["status"] for name in ("a_s1", "b_s1")] == ["done", "done"]


def test_two_at_once_are_refused(case):
    sweep = case.write(LONG.replace("steps = 150", "steps = 100000"))
    process = case.start(sweep)
    wait_for(lambda: processes(case.work / "a_s1"))
    assert f"{case.work}: another run.py is at work" in case.run(sweep, status=2)
    said = case.run(sweep, "--out", case.out, "--work", case.folder / "w", status=2)
    assert f"{case.out}: another run.py is at work" in said, said
    assert ended(process, signal.SIGTERM)[0] == 130 and not os.listdir(case.out), (process.returncode, os.listdir(case.out))


def test_what_another_ended_meanwhile(case):
    """A start whose check runs while another ends its runs does not repeat them."""
    sweep, here, go = case.write(SWEEP), case.folder / "here", case.folder / "go"
    slow = case.trainer(f'case "$SLOW$*" in 1*--dry-run*) touch {here}; until [ -e {go} ]; do sleep 0.02; done ;; esac')
    more = ("--trainer", slow, "--no-report")
    process = case.start(sweep, *more, environment={"SLOW": "1"})
    wait_for(here.exists)
    case.run(sweep, "--only", "b", *more)
    go.touch()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "1 of 2 runs are done" in out and "1 done" in out, (out, err)


def test_terminal_that_closes(case):
    """When nothing reads what a sweep says, at SIGHUP or at a Ctrl-C that ends `| tee log` too, its runs save and it ends;
    under nohup nothing happens."""
    folder = case.work / "a_s1"
    for number, (ours, its), new_session in ((signal.SIGHUP, pty.openpty(), True), (signal.SIGINT, os.pipe(), False)):
        process = case.start(case.write(UNSAVED), stdin=subprocess.DEVNULL, stdout=its, stderr=its, start_new_session=new_session)
        os.close(its)
        wait_for(lambda: steps_logged(folder))
        os.close(ours)
        assert ended(process, number)[0] == 130 and list(folder.glob("step_*/state.json")), "it has saved"
        shutil.rmtree(case.work)
    process = case.start(case.write(UNSAVED), hangup=signal.SIG_IGN)
    wait_for(lambda: processes(folder))
    process.send_signal(signal.SIGHUP)
    said = steps_logged(folder)
    wait_for(lambda: steps_logged(folder) > said + 30)  # a run that was stopped would end at its next step
    assert ended(process, signal.SIGINT)[0] == 130


def test_budget(case):
    said = case.run(SWEEP, "--budget", "0", "--no-report")
    assert "2 runs wait for the next start" in said and not case.records(), said
    # After the first run it is known how long one takes: no second that would not end in time.
    slow = case.trainer('case "$*" in *--run=*) sleep 3 ;; esac')
    said = case.run(SWEEP, "--budget", "5", "--no-report", "--trainer", slow)
    assert "1 runs wait" in said and list(case.records()) == ["a_s1"], said


def test_spread_over_gpus(case):
    """Each job sees one GPU, and no two at once the same while another is free."""
    trainer = case.trainer(
        f'case "$*" in *--run=*) echo "$CUDA_VISIBLE_DEVICES" >> {case.folder}/seen; sleep 1 ;; esac'
    )
    text = SWEEP.replace('device = "cpu"\n', "").replace('name = "a"\n', 'name = "a"\nseed = [1, 2, 3]\n')
    more = ("--jobs", 2, "--no-report", "--trainer", trainer, "--set", "matmul=fp32")
    for gpus in (",", "6,"):
        assert "give numbers of nvidia-smi" in case.run(text, "--gpus", gpus, *more, status=2)
    case.program("nvidia-smi", 'echo "GPU 6: NVIDIA H200 (UUID: a)"')
    case.environment = {"PATH": f"{case.folder}:{os.environ['PATH']}"}
    case.run(text, "--gpus", "6,7", *more)
    seen = (case.folder / "seen").read_text().split()
    assert sorted(seen[:2]) == ["6", "7"] and sorted(seen) == ["6", "6", "7", "7"], seen
    assert case.record("a_s1")["sharing"] == 2


def test_order_and_products(case):
    """All first seeds run before the second ones."""
    text = 'baseline = "a"\n' + BASE + '[[run]]\nname = "a"\nseed = [1, 2]\n'
    text += '[[run]]\nname = "{m} {beta2} {v}"\nbeta2 = [0.9, 0.99]\neach = [{ m = "dyn8", v = "udyn8" },\n'
    text += '{ m = "bf16", v = "fp32", beta2 = [0.5, 0.6] }, { name = "late", m = "fp16", beta2 = 0.8 }]\n'
    case.write(text, "other.toml")
    said = case.run("\ufeff" + text.replace(BASE, 'like = "other.toml"\n'), "--dry-run")  # as some editors begin a file
    names = [line[7:47].strip() for line in said.split("\n") if line.startswith("run ")]
    inner = [f"{name} seed 1" for name in ("dyn8 0.9 udyn8", "dyn8 0.99 udyn8", "bf16 0.5 fp32", "bf16 0.6 fp32")]
    assert names == ["a seed 1", *inner, "late seed 1", "a seed 2"], names
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


def train_losses(folder):
    return [line["loss"] for line in json_lines(folder / "log.jsonl") if line["type"] == "train"]


def test_runs_differ_by_the_option_alone(case):
    """At a rate of 1e-30 every loss is one of initial weights and data order: the same bits whatever the states."""
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
    assert all((case.work / slug / "step_00000004").exists() for slug in runs.values()), "kept"
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

    from run import ROOT, options_read
    from runner import Job, Runner, RunLog

    assert options_read(["dev/compare/sweeps/d6.toml"]).out == ROOT / "runs/compare/d6", "outside of what git tracks"
    plan = {"tokens_per_step": 10, "steps": 100}
    (case.folder / "log.jsonl").write_text('{"type": "train", "step": 60, "loss": 4.0}\n')
    at_work = Runner(None, None, [], options_read(["x.toml"]))
    at_work.begin, at_work.shown, at_work.done_tokens = time.monotonic() - 100, -math.inf, 600
    run = SimpleNamespace(plan=plan, label="a seed 1")
    at_work.active = [Job(run, None, None, None, 20, RunLog(case.folder), 0.0)]  # 40 steps of this start
    with contextlib.redirect_stdout(io.StringIO()) as out:
        at_work.progress([run, run])  # 1000 tokens in 100 s; 400 of the run at work and 2000 of those that wait are left
        at_work.progress([run, run])
    assert out.getvalue() == "2 waiting, 1 running (a seed 1 60%)  10 tokens/s  eta 4m00s\n", out.getvalue()


def test_studies_are_accepted(case):
    """Every configuration of a study that this program can repeat is accepted, with a smaller model. The other
    studies name presets and formats that were removed since, and are read from their records (test_report.py)."""
    small = {"data": "", "device": "cpu", "model": "nano", "seq": 64, "batch": 1, "tokens-per-step": 64}
    options = [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
    for study, runs in (("d6_once", 24), ("gpt2_track", 28)):
        said = case.run(COMPARE / "sweeps" / f"{study}.toml", "--dry-run", *options)
        assert int(said.strip().split("\n")[-1].split()[0]) == runs, said


if __name__ == "__main__":
    sys.exit(run_cases(globals(), Case, missing_tools()))
