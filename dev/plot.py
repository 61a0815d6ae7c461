#!/usr/bin/env python3
"""Draws the loss curves of one or more runs, or the table of dev/optim.

    pip install -r dev/requirements.txt
    python dev/plot.py runs/adamw32 runs/adamw8 -o loss.png --x tokens --smooth 20
    python dev/plot.py dev/compare/results/gpt2/runs.jsonl:adamw32 fp8=dev/compare/results/gpt2_fp8/runs.jsonl:bf16 -o a.png
    ./build/dev/optim --csv optim.csv && python dev/plot.py optim.csv -o optim.png    # a bar a size, % of the copy rate

RUN is a run folder, its log.jsonl, or a configuration of a study (FILE:NAME). NAME= before it names its line. Runs that
differ in their seed alone, and those of one NAME=, are one line: the mean of their validation losses, with a band of the
standard error. The training loss is pale behind it (--smooth N: the mean of N records). More than eight lines make
further panels. Where a run was evaluated (--eval-every), its right answers are drawn below. What a resumed run redoes
replaces what was logged before (runlog.py).
"""

import csv
import json
import math
import os
import re
import sys
from argparse import RawDescriptionHelpFormatter
from pathlib import Path

from problem import Parser, Problem, answered, needed, say
from runlog import RunLog, numbers

with needed("plot", "-r dev/requirements.txt"):
    from curves import COLOURS, STYLE, Curve, draw_panels, mean_curve, plt, save, smoothed

AXES = {"step": "step", "tokens": "tokens", "time": "time_s"}  # --x: the field of a record
OWN = ("seed", "run", "resume")  # options in which the runs of one line may differ


def read_log(run):
    """Returns the RunLog of a run. Raises a Problem if it has no loss, or a line that is no record."""
    log = RunLog(run)
    try:
        log.read()
    except OSError as error:
        raise Problem(
            f"{log.path}: cannot be read ({error.strerror}); give a run folder that holds a log.jsonl"
        ) from None
    if log.bad:
        raise Problem(f"{log.path}: line {log.bad[0]}: not a record of a log ({log.bad[1]}); of a study give RUNS.jsonl:NAME")
    if not log.records["train"] + log.records["val"]:
        raise Problem(f"{log.path}: there is no loss in it yet")
    return log


def points(records, axis, field, path):
    """Returns the axis' field and another one of each record."""
    try:
        return [float(record[AXES[axis]]) for record in records], numbers(records, field)
    except (KeyError, TypeError, ValueError):
        raise Problem(f'{path}: some records have no "{AXES[axis]}"; choose another --x') from None


def study_lines(path, name, axis):
    """Returns [({step: (x, validation loss)}, [], {}), ...] of a configuration, one a seed."""
    try:
        records = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
        mine = [record for record in records if record["name"] == name and record["status"] == "done"]
        if not mine:
            raise Problem(f"{path}: no run of {name!r} is done in it; it has {', '.join(dict.fromkeys(r['name'] for r in records))}")
        unit = {"step": lambda r: 1, "tokens": lambda r: r["tokens_per_step"]}
        unit["time"] = lambda r: r["tokens_per_step"] / r["tokens_per_second"]
        return [({step: (step * unit[axis](r), loss) for step, loss in r["val"] if loss is not None}, [], {}) for r in mine]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Problem(f"{path}: not the records of a study ({error}); give RUNS.jsonl:CONFIGURATION") from None


def run_lines(log, axis):
    """Returns ({step: (x, validation loss)}, [(x, training loss), ...], {task: (x, right answers)}) of a run."""
    tasks = {}
    for record in log.records["eval"]:
        tasks.setdefault(record["name"], []).append(record)
    answers = {
        task: points(its, axis, "acc_norm" if "acc_norm" in its[-1] else "acc", log.path) for task, its in tasks.items()
    }
    val, train = points(log.records["val"], axis, "loss", log.path), points(log.records["train"], axis, "loss", log.path)
    steps = [record["step"] for record in log.records["val"]]
    return {step: (x, y) for step, x, y in zip(steps, *val) if math.isfinite(y)}, list(zip(*train)), answers


def run_names(runs):
    """Returns the folders' names, with as much of the path as tells equal ones apart."""
    parts = [os.path.abspath(os.path.dirname(run) if os.path.isfile(run) else run).split(os.sep) for run in runs]
    depth = 1
    while len({tuple(p[-depth:]) for p in parts}) < len({tuple(p) for p in parts}):
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


def read_all(options):
    """Returns {name of a line: [(validation, training, evaluations) of a seed, ...]}. Of several runs, what is no run with
    a loss is left out, and a notice says so."""
    given = [re.fullmatch(r"(?:([^=/]+)=)?(.*)", run, re.S).groups() for run in options.runs]
    names, lines, alike, problems = run_names([run for _, run in given]), {}, {}, []
    for (typed, run), name in zip(given, names):
        path, _, configuration = run.rpartition(".jsonl:")
        if path:
            lines.setdefault(typed or configuration, []).extend(study_lines(f"{path}.jsonl", configuration, options.x))
            continue
        try:
            log = read_log(run)
        except Problem as problem:
            if not os.path.exists(run):
                raise
            problems.append(problem)
            continue
        same = {key: value for key, value in log.config.get("options", {}).items() if key not in OWN}
        seed = log.config.get("options", {}).get("seed")
        key = typed or (json.dumps(same, sort_keys=True) if seed is not None else name)
        lines.setdefault(alike.setdefault(key, typed or name), []).append(run_lines(log, options.x))
    if not lines:
        raise problems[0]
    for problem in problems:
        say(f"plot: notice: left out: {problem}", sys.stderr)
    return lines


def loss_curve(name, seeds, window):
    """Returns the Curve of a line: the validation loss or, where there is none, the training loss."""
    train = seeds[0][1]
    x, y = [point[0] for point in train], [point[1] for point in train]
    raw = (x, smoothed(y, window)) if train else ()
    if all(val for val, _, _ in seeds):
        return mean_curve(name, [val for val, _, _ in seeds], raw)
    shown = smoothed(y, window)
    return Curve(name + ", training", x, shown, raw=(x, y)) if any(map(math.isfinite, shown)) else None


def draw_runs(options):
    """Returns a figure of the losses of runs and, where they were evaluated, of their right answers."""
    lines = read_all(options)
    losses = list(filter(None, (loss_curve(name, seeds, options.smooth) for name, seeds in lines.items())))
    if not losses:
        raise Problem("no run has a finite loss to draw")
    answers = [
        Curve(f"{name} {task}" + f" ({i + 1})" * (len(seeds) > 1), x, [100 * value for value in y])
        for name, seeds in lines.items()
        for i, (_, _, tasks) in enumerate(seeds)
        for task, (x, y) in tasks.items()
    ]
    parts = [(options.title or "loss", "nats a token", losses, None), ("right answers", "%", answers, None)]
    return draw_panels(parts, {"time": "seconds"}.get(options.x, options.x))


def draw_shares(path):
    """Returns a figure of the CSV of dev/optim."""
    try:
        with open(path, encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        if not rows:
            raise ValueError("it holds no rows")
        share = {(row["combination"], row["size"]): float(row["percent_of_copy"]) for row in rows}
        names, sizes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("combination", "size"))
        height = 0.8 / len(sizes)
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as error:
        raise Problem(f"{path}: {error}; give the file that dev/optim --csv wrote") from None
    figure, axes = plt.subplots(figsize=(8, 1 + 0.28 * len(names)))
    for i, size in enumerate(sizes):
        places = [n + height * (i - (len(sizes) - 1) / 2) for n in range(len(names))]
        axes.barh(places, [share.get((name, size), 0.0) for name in names], height, color=COLOURS[i % 8], label=size)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set(xlim=(0, 100), ylim=(len(names) - 0.4, -0.6))
    axes.set_xlabel("bytes that must move over time, % of the copy rate of the same run")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1), title="elements")
    figure.tight_layout()
    return figure


def draw(options):
    shares = len(options.runs) == 1 and options.runs[0].endswith(".csv")
    with plt.rc_context(STYLE):
        figure = draw_shares(options.runs[0]) if shares else draw_runs(options)
    try:
        save(figure, Path(options.output))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Problem(f"{options.output}: cannot be written ({reason}); give another by -o") from None
    say(options.output)


def main():
    parser = Parser(prog="plot", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="[NAME=]RUN, see above; or a CSV of dev/optim")
    parser.add_argument(
        "-o", "--output", default="loss.png", metavar="FILE", help=".png, .svg or .pdf (default: %(default)s)"
    )
    parser.add_argument("--x", choices=list(AXES), default="step", help="horizontal axis (default: %(default)s)")
    parser.add_argument(
        "--smooth", type=int, default=1, metavar="N", help="mean over N training records (default: none)"
    )
    parser.add_argument("--title", default="", help="of the picture")
    options = parser.parse_args()
    if options.smooth < 1:
        raise Problem(f"--smooth {options.smooth}: give 1 or more")
    draw(options)


if __name__ == "__main__":
    sys.exit(answered("plot", main))
