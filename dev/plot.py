#!/usr/bin/env python3
"""Draws the loss curves of one or more runs from their log.jsonl.

    pip install -r dev/requirements.txt
    python dev/plot.py runs/adamw32 runs/adamw8 -o loss.png --x tokens --smooth 20

RUN is a run folder or its log.jsonl. For each run the training loss is a thin line (with --smooth N the mean over the
N records around each, with the unsmoothed loss pale behind it) and the validation loss a thick one with dots, in the
same colour. What a resumed run redoes replaces what was logged before: after {"type": "resume", "step": s} the earlier
records beyond step s no longer count, and one of the same step and type gives way to the later. A loss of null was not
finite and leaves a gap. The last line of a log may be cut short.
"""

import json
import math
import os
import sys

from problem import Parser, Problem, answered

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ImportError as missing:
    print(f"plot: error: {missing}; type `pip install -r dev/requirements.txt`", file=sys.stderr)
    sys.exit(2)

# Okabe and Ito's colours, which colour-blind readers can tell apart; yellow is too pale for lines. Dashes tell runs
# apart in grey print and where there are more runs than colours.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"]
DASHES = ["-", "--", ":", "-."]
AXES = {"step": "step", "tokens": "tokens", "time": "time_s"}  # --x: the field of a record


def read_log(run):
    """{"train": [record, ...], "val": [...]} of a run, by step, without what a resume replaced."""
    path = os.path.join(run, "log.jsonl") if os.path.isdir(run) else run
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().split("\n")
    except OSError as error:
        raise Problem(f"{path}: cannot be read ({error.strerror}); give a run folder that holds a log.jsonl") from None
    records = {"train": {}, "val": {}}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            kind = record["type"]
            if kind == "resume":
                for part in records.values():
                    for step in [step for step in part if step > record["step"]]:
                        del part[step]
            elif kind in records:
                loss = record["loss"]
                record["loss"] = math.nan if loss is None else float(loss)
                records[kind][record["step"]] = record
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):  # no line end follows: the run is still writing, or was killed
                break
            raise Problem(f"{path}: line {number}: not a record of a log ({error})") from None
    if not any(records.values()):
        raise Problem(f"{path}: there is no loss in it yet")
    return {kind: [part[step] for step in sorted(part)] for kind, part in records.items()}


def curve(records, axis, path):
    """x and y of a list of records."""
    key = AXES[axis]
    try:
        return [float(record[key]) for record in records], [record["loss"] for record in records]
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
    """1, 2 or 5 times a power of ten: at most ten of them in the length."""
    step = 10.0 ** math.floor(math.log10(length / 10))
    return next(step * factor for factor in (1, 2, 5, 10) if step * factor >= length / 10)


def smoothed(values, window):
    """Mean of the finite ones of `window` values around each, fewer at both ends; a gap stays a gap.

    The window is centred so that a falling curve is not shifted to the right, away from the validation loss.
    """
    result = []
    for i, value in enumerate(values):
        half = min(window // 2, i, len(values) - 1 - i)
        near = [v for v in values[i - half : i + half + 1] if math.isfinite(v)]
        result.append(sum(near) / len(near) if math.isfinite(value) else math.nan)
    return result


def run_names(runs):
    """The folders' names; with as much of the path as tells equal ones apart."""
    parts = [os.path.abspath(os.path.dirname(run) if os.path.isfile(run) else run).split(os.sep) for run in runs]
    depth = 1
    while len({tuple(p[-depth:]) for p in parts}) < len({tuple(p) for p in parts}):
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


def draw(options):
    logs = [read_log(run) for run in options.runs]
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    drawn = False
    for i, (name, log) in enumerate(zip(run_names(options.runs), logs)):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
        x, y = curve(log["train"], options.x, options.runs[i])
        if options.smooth > 1:
            axes.plot(x, y, color=colour, linewidth=0.6, alpha=0.25)
            y = smoothed(y, options.smooth)
        label = name + " train" if y else None
        axes.plot(x, y, dash, color=colour, linewidth=1.0, alpha=0.8, label=label)
        x, y = curve(log["val"], options.x, options.runs[i])
        finite = [value for value in y if math.isfinite(value)]
        label = f"{name} validation ({finite[-1]:.4f})" if finite else None
        dots = {"marker": "o", "markersize": 4} if len(x) <= 60 else {}
        axes.plot(x, y, dash, color=colour, linewidth=1.8, label=label, zorder=3, **dots)
        drawn = drawn or any(math.isfinite(record["loss"]) for record in log["train"] + log["val"])
    if not drawn:
        raise Problem("no run has a finite loss to draw")
    if options.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axes.yaxis.set_minor_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    label_x(axes, options.x)
    axes.set_ylabel("loss (nats a token)")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
    try:
        figure.savefig(options.output, dpi=150)
    except (OSError, ValueError) as error:
        raise Problem(f"{options.output}: cannot be written ({getattr(error, 'strerror', None) or error})") from None
    print(options.output)


def main():
    parser = Parser(prog="plot", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, or its log.jsonl")
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
