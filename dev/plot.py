#!/usr/bin/env python3
"""Draws the loss curves of one or more runs from their log.jsonl, or the table of dev/optim.

    pip install -r dev/requirements.txt
    python dev/plot.py runs/adamw32 runs/adamw8 -o loss.png --x tokens --smooth 20
    ./build/dev/optim --csv optim.csv && python dev/plot.py optim.csv -o optim.png    # a bar a size, % of the copy rate

RUN is a run folder or its log.jsonl. For each run the training loss is a thin line (with --smooth N the mean over the
N records around each, with the unsmoothed loss pale behind it) and the validation loss a thick one with dots, in the
same colour. Where a run was evaluated (--eval-every), its right answers are drawn beside the loss. What a resumed run
redoes replaces what was logged before (runlog.py). A loss of null was not finite and leaves a gap.
"""

import csv
import math
import os
import sys

from colours import COLOURS, plain
from problem import Parser, Problem, answered, installs, regular, say
from runlog import RunLog, numbers

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ImportError as missing:
    print(f"plot: error: {missing}; {installs('-r dev/requirements.txt')}", file=sys.stderr)
    sys.exit(2)

# Dashes tell runs apart in grey print and where there are more runs than colours.
DASHES = ["-", "--", ":", "-."]
MARKS = ["o", "s", "^", "D"]  # of evaluations
AXES = {"step": "step", "tokens": "tokens", "time": "time_s"}  # --x: the field of a record


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
        raise Problem(f"{log.path}: line {log.bad[0]}: not a record of a log ({log.bad[1]})")
    if not log.records["train"] + log.records["val"]:
        raise Problem(f"{log.path}: there is no loss in it yet")
    return log


def curve(records, axis, field, path):
    """Returns x and y of a list of records: the axis' field and another one."""
    key = AXES[axis]
    try:
        return [float(record[key]) for record in records], numbers(records, field)
    except (KeyError, TypeError, ValueError):
        raise Problem(f'{path}: some records have no "{key}"; choose another --x') from None


def label_x(axes, axis):
    axes.set_xlabel(axis)
    if axis == "tokens":
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    if axis == "time":  # seconds; shown in the unit that suits the longest run
        longest = axes.get_xlim()[1]
        unit, seconds = ("hours", 3600) if longest > 7200 else ("minutes", 60) if longest > 120 else ("seconds", 1)
        axes.set_xlabel("time in " + unit)
        axes.xaxis.set_major_locator(matplotlib.ticker.MultipleLocator(seconds * nice_step(longest / seconds)))
        axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x / seconds:g}"))


def nice_step(length):
    """Returns 1, 2 or 5 times a power of ten, so that at most ten steps fit into the length."""
    step = 10.0 ** math.floor(math.log10(length / 10))
    return next(step * factor for factor in (1, 2, 5, 10) if step * factor >= length / 10)


def smoothed(values, window):
    """Returns for each value the mean of the finite ones of `window` values around it; a gap stays a gap.

    The window is centred so that a falling curve is not shifted to the right, away from the validation loss.
    """
    result = []
    for i, value in enumerate(values):
        half = min(window // 2, i, len(values) - 1 - i)
        near = [v for v in values[i - half : i + half + 1] if math.isfinite(v)]
        result.append(sum(near) / len(near) if math.isfinite(value) else math.nan)
    return result


def run_names(runs):
    """Returns the folders' names, with as much of the path as tells equal ones apart."""
    parts = [os.path.abspath(os.path.dirname(run) if os.path.isfile(run) else run).split(os.sep) for run in runs]
    depth = 1
    while len({tuple(p[-depth:]) for p in parts}) < len({tuple(p) for p in parts}):
        depth += 1
    return [plain("/".join(p[-depth:])) for p in parts]


def draw_losses(axes, options, names, logs):
    drawn = False
    for i, (name, log) in enumerate(zip(names, logs)):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
        x, y = curve(log.records["train"], options.x, "loss", log.path)
        drawn = drawn or any(map(math.isfinite, y))
        if options.smooth > 1:
            axes.plot(x, y, color=colour, linewidth=0.6, alpha=0.25)
            y = smoothed(y, options.smooth)
        label = name + " train" if y else None
        axes.plot(x, y, dash, color=colour, linewidth=1.0, alpha=0.8, label=label)
        x, y = curve(log.records["val"], options.x, "loss", log.path)
        finite = [value for value in y if math.isfinite(value)]
        label = f"{name} validation ({finite[-1]:.4f})" if finite else None
        dots = {"marker": "o", "markersize": 4} if len(x) <= 60 else {}
        axes.plot(x, y, dash, color=colour, linewidth=1.8, label=label, zorder=3, **dots)
        drawn = drawn or bool(finite)
    if not drawn:
        raise Problem("no run has a finite loss to draw")
    axes.set_ylabel("loss (nats a token)")


def draw_accuracies(axes, options, names, logs):
    """Draws a line for each run and evaluation: acc_norm if there are several choices, else acc."""
    marks = {}
    for i, (name, log) in enumerate(zip(names, logs)):
        for task in dict.fromkeys(record["name"] for record in log.records["eval"]):
            records = [record for record in log.records["eval"] if record["name"] == task]
            x, y = curve(records, options.x, "acc_norm" if "acc_norm" in records[-1] else "acc", log.path)
            mark = marks.setdefault(task, MARKS[len(marks) % len(MARKS)])
            label = f"{name} {task} ({100 * y[-1]:.1f} %)"
            axes.plot(
                x, [100 * value for value in y], "-" + mark, color=COLOURS[i % len(COLOURS)], label=label, markersize=4
            )
    axes.set_ylabel("right answers (%)")


def read_logs(runs):
    """Returns {run: its RunLog}. Of several, what is no run with a loss is left out, and a notice says so."""
    logs, problems = {}, []
    for run in runs:
        try:
            logs[run] = read_log(run)
        except Problem as problem:
            if not os.path.exists(run):
                raise
            problems.append(problem)
    if not logs:
        raise problems[0]
    for problem in problems:
        say(f"plot: notice: left out: {problem}", sys.stderr)
    return logs


def draw_shares(path):
    """Returns a figure of the CSV of dev/optim."""
    try:
        with open(regular(path), encoding="utf-8") as file:
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
    axes.legend(fontsize=7, loc="lower left")
    figure.tight_layout()
    return figure


def draw_runs(options):
    """Returns a figure of the losses of runs and, where they were evaluated, of their right answers."""
    found = read_logs(options.runs)
    logs, names = list(found.values()), run_names(found)
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    pictures = [draw_losses] + [draw_accuracies] * any(log.records["eval"] for log in logs)
    size = (8 if len(pictures) == 1 else 13, 4.8)
    figure, panels = plt.subplots(1, len(pictures), figsize=size, layout="constrained", squeeze=False)
    for picture, axes in zip(pictures, panels[0]):
        picture(axes, options, names, logs)
        label_x(axes, options.x)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(frameon=False)
    axes = panels[0][0]
    if options.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axes.yaxis.set_minor_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    return figure


def draw(options):
    shares = len(options.runs) == 1 and options.runs[0].endswith(".csv")
    figure = draw_shares(options.runs[0]) if shares else draw_runs(options)
    try:
        figure.savefig(options.output, dpi=150)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Problem(f"{options.output}: cannot be written ({reason}); give another by -o") from None
    say(options.output)


def main():
    parser = Parser(prog="plot", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, or its log.jsonl; or a CSV of dev/optim")
    parser.add_argument(
        "-o", "--output", default="loss.png", metavar="FILE", help=".png, .svg or .pdf (default: %(default)s)"
    )
    parser.add_argument("--x", choices=list(AXES), default="step", help="horizontal axis (default: %(default)s)")
    parser.add_argument(
        "--smooth", type=int, default=1, metavar="N", help="mean over N training records (default: none)"
    )
    parser.add_argument("--log", action="store_true", help="logarithmic loss axis")
    options = parser.parse_args()
    if options.smooth < 1:
        raise Problem(f"--smooth {options.smooth}: give 1 or more")
    draw(options)


if __name__ == "__main__":
    sys.exit(answered("plot", main))
