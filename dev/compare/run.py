#!/usr/bin/env python3
"""Compares loss curves across storage formats: runs a sweep of trainings that differ in one option, and reports.

    make && python3 dev/compare/run.py dev/compare/sweeps/d6.toml

Runs that are done are skipped, so the same command goes on after a kill, a Ctrl-C or a --budget. Python 3.11; the
running half needs nothing else, the report matplotlib (make venv). README.md beside this file says more.
"""

import math
import os
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path

if sys.version_info < (3, 11):
    print("compare: error: Python 3.11 or later reads sweep files; begin the command with python3.11, say", file=sys.stderr)
    sys.exit(2)

import record
import runner
import sweep as sweeps
from problem import Parser, Problem, answered, installs, say
from trainer import ROOT, Trainer, check


def options_read(arguments):
    parser = Parser(prog="compare", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("sweep", type=Path, metavar="SWEEP.toml")
    add("--out", type=Path, metavar="DIR", help="records and report (default: runs/compare/NAME)")
    add("--work", type=Path, metavar="DIR", help="run folders of ./train (default: build/compare/NAME)")
    add("--trainer", type=Path, default=ROOT / "train", metavar="PATH", help="default: ./train")
    add("--gpus", metavar="0,1,...", help="default: all that are visible; without any, the CPU")
    add("--jobs", type=int, default=1, metavar="N", help="runs at once on a GPU or the CPU (default: 1)")
    add("--budget", type=float, default=math.inf, metavar="SECONDS", help="start no run that would not end in time")
    silence = "a run whose log stands still for so long is killed and counts as dead (default: 1800)"
    add("--silence", type=float, default=1800, metavar="SECONDS", help=silence)
    add("--set", action="append", default=[], metavar="OPTION=VALUE", help="an option for all runs")
    add("--only", action="append", default=[], metavar="PATTERN", help="names to run, such as 'adamw*'")
    add("--dry-run", action="store_true", help="check everything, list the runs and stop")
    add("--report-only", action="store_true", help="report what is done; needs neither ./train nor a GPU")
    add("--replace", action="store_true", help="run again what is done with other options or another corpus")
    add("--no-report", action="store_true", help="run, and leave the report for later")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        raise Problem(f"--jobs {options.jobs}: give 1 or more")
    for text in options.set:
        if "=" not in text:
            raise Problem(f"--set {text}: write --set OPTION=VALUE, such as --set data=build/wiki")
    for name in ("budget", "silence"):
        if not getattr(options, name) >= (name == "silence"):
            raise Problem(f"--{name} {getattr(options, name):g}: give seconds, {'1' if name == 'silence' else '0'} or more")
    if options.report_only and (options.dry_run or options.no_report):
        raise Problem("--report-only with --dry-run or --no-report does nothing; leave one out")
    options.until = time.monotonic() + options.budget
    options.overrides = dict(text.split("=", 1) for text in options.set)
    options.out = (options.out or ROOT / "runs/compare" / options.sweep.stem).absolute()
    options.work = (options.work or ROOT / "build/compare" / options.sweep.stem).absolute()
    return options


def is_done(run, trainer, records):
    """Returns whether a run has ended with a loss, or diverged. One that died is tried again."""
    found = records.get((run.name, run.seed))
    if not found or found["status"] == "died":
        return False
    return found["options_key"] == run.options_key() and found["data_key"] == trainer.data_key(run)


def refuse_to_replace(todo, records, folder):
    """A finished run of other options or of another corpus is somebody's result; the built-in text is another with each
    build of the program, and such a run is run again."""
    finished = []
    for run in todo:
        its = records.get((run.name, run.seed))
        if its and its["status"] != "died" and (its["options_key"] != run.options_key() or run.options.get("data")):
            finished.append(run)
    if finished:
        same = records[finished[0].name, finished[0].seed]["options_key"] == finished[0].options_key()
        raise Problem(
            f"{folder} holds {len(finished)} finished run(s) of these names but of other options or another corpus "
            f"({finished[0].label}: other {'corpus' if same else 'options'}); type another --out and --work, or "
            "--replace to lose them"
        )


def gpus_of(options, runs):
    """Returns the GPUs to spread runs over; none if all run on the CPU."""
    if all(run.options.get("device") == "cpu" for run in runs):
        return []
    if options.gpus is None:
        return runner.gpus_at_hand(os.environ)
    names = [name.strip() for name in options.gpus.split(",")]
    if not all(names) or not runner.gpus_at_hand({}):
        said = "nvidia-smi shows none" if all(names) else "give numbers of nvidia-smi, such as --gpus 0,1"
        raise Problem(f"--gpus {options.gpus!r}: {said}")
    return names


def tell_plan(todo, done):
    for run in todo:
        typed = " ".join(f"--{key} {run.options[key]}" for key in sorted(run.own) if key in run.options)
        say(f"run    {run.label:40} {typed}")
    for run in done:
        say(f"done   {run.label}")
    tokens = sum(run.plan["tokens_per_step"] * run.plan["steps"] for run in todo)
    print(f"{len(todo)} to run ({tokens / 1e6:.3g}M tokens), {len(done)} done")


def run_sweep(options):
    """Runs what is not done. Returns the exit status."""
    trainer = Trainer(options.trainer)
    sweep = sweeps.load(options.sweep, options.overrides, trainer.options)
    records = record.read_all(options.out / record.FILE)
    gpus = gpus_of(options, sweep.runs)
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": gpus[0]} if gpus else {})}
    wanted = [run for run in sweep.runs if not options.only or any(fnmatchcase(run.name, p) for p in options.only)]
    if not wanted:
        raise Problem(f"--only {' '.join(options.only)}: no run has such a name; --dry-run lists them")
    done = [run for run in wanted if is_done(run, trainer, records)]
    todo = [run for run in wanted if run not in done]
    check(todo, trainer, environment)
    if options.dry_run:
        tell_plan(todo, done)
        return 0
    at_work = runner.Runner(sweep, trainer, gpus, options)
    with at_work.locked():
        records = record.read_all(options.out / record.FILE)  # another start may have ended some since
        todo = [run for run in todo if not is_done(run, trainer, records)]
        if not options.replace:
            refuse_to_replace(todo, records, options.out / record.FILE)
        print(f"{sweep.name}: {len(wanted) - len(todo)} of {len(wanted)} runs are done")
        whole = at_work.go(todo)
    ended = ", ".join(f"{number} {status}" for status, number in at_work.count.items() if number)
    runner.tell(f"{sweep.name}: {ended or 'nothing was run'}; records in {options.out / record.FILE}")
    return 130 if not whole else 1 if at_work.count["died"] else 0


def main():
    options = options_read(None)
    status = 0 if options.report_only else run_sweep(options)
    if options.dry_run or options.no_report or status == 130:
        return status
    try:
        import report
    except ImportError as missing:
        hint = installs("-r dev/requirements.txt")
        if options.report_only:
            raise Problem(f"{missing}; {hint}") from None
        print(f"compare: notice: no report ({missing}); {hint}, then the command with --report-only")
        return status
    report.write(sweeps.load(options.sweep, options.overrides), options.out)
    return status


if __name__ == "__main__":
    sys.exit(answered("compare", main))
