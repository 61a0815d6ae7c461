"""Curves of runs, and how every picture of dev/ draws them: at most eight lines a panel, sorted by their last values, each
with its name beside its end. A line of several seeds is their mean, with a band of the standard error; a line of one seed
is dashed. The height of a panel is that of the last two thirds of its curves."""

import io
import math
import statistics
from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image

from colours import COLOURS
from problem import write_whole

MOST = len(COLOURS)  # lines of a panel
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
}


@dataclass
class Curve:
    name: str
    x: list
    y: list
    seeds: int = 1
    errors: list = ()  # of each point; empty: there is no band
    raw: tuple = ()  # (x, y) before smoothing, or of the training loss: drawn faintly behind
    signed: bool = False  # the last value is told with its sign
    told: str = ""  # in place of the last value

    @property
    def rank(self):
        """Returns what curves are sorted by: the last value, or the lowest where another text is told."""
        return min(self.y) if self.told else self.last

    @property
    def last(self):
        return next((value for value in reversed(self.y) if math.isfinite(value)), math.nan)

    @property
    def label(self):
        error = f" ± {self.errors[-1]:.4f}" if self.errors else ""
        value = self.told or f"{self.last:{'+' * self.signed}.4f}{error}"
        return f"{plain(self.name)}  {value} ({self.seeds} seed{'s' * (self.seeds != 1)})"


def plain(text):
    """Returns a name that matplotlib shows as it is: it reads $...$ as formulas and gives a long name all the width."""
    text = text.encode("utf-8", "replace").decode()  # the name of a folder may be of any bytes
    text = text if len(text) <= 60 else text[:35] + "..." + text[-22:]
    return text.replace("$", r"\$")


def mean_curve(name, seeds, raw=()):
    """Returns the Curve of [{step: (x, y)}, ...], a dictionary a seed: means of x and y at the steps that all have."""
    shared = sorted(set.intersection(*map(set, seeds))) if seeds else []
    x, y = ([[seed[step][i] for seed in seeds] for step in shared] for i in (0, 1))
    errors = [statistics.stdev(column) / math.sqrt(len(column)) for column in y] if len(seeds) > 1 else []
    return Curve(name, list(map(statistics.fmean, x)), list(map(statistics.fmean, y)), len(seeds), errors, raw)


def parts_of(curves, first=None):
    """Returns the curves in lists of at most MOST, each sorted by the last values and led by `first`, if there is one."""
    rest = sorted((curve for curve in curves if curve is not first and curve.y), key=lambda curve: (math.isnan(curve.rank), curve.rank))
    size = MOST - bool(first)
    return [[first] * bool(first) + rest[i : i + size] for i in range(0, max(1, len(rest)), size)]


def heights(curves, seen):
    """Returns the range of y that shows the values `seen` and, bands included, the last two thirds of all curves, or all
    of one that tells another value than its last."""
    begin = min(curve.x[0] for curve in curves)
    begin += (max(curve.x[-1] for curve in curves) - begin) / 3
    seen = list(seen)
    for curve in curves:
        errors = curve.errors or [0.0] * len(curve.y)
        late = [(y, e) for x, y, e in zip(curve.x, curve.y, errors) if (x >= begin or curve.told) and math.isfinite(y)]
        seen += [y + sign * e for y, e in late or [(curve.last, 0.0)] if math.isfinite(y) for sign in (-1, 1)]
    low, high = min(seen, default=0.0), max(seen, default=1.0)
    margin = 0.04 * (high - low) + 1e-4
    return low - margin, high + margin


def spread(wanted, low, high, gap):
    """Returns places near those wanted (ascending), at least `gap` apart, between low and high if there is room."""
    groups = []  # [sum of the wanted places of the first of each name, names]
    for i, place in enumerate(wanted):
        groups.append([place, 1])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] + groups[-2][1] * gap > groups[-1][0] / groups[-1][1]:
            total, names = groups.pop()
            groups[-1][0] += total - names * gap * groups[-1][1]
            groups[-1][1] += names
    places = [total / names + i * gap for total, names in groups for i in range(names)]
    for i in range(len(places)):
        places[i] = max(places[i], low + i * gap)
    for i in reversed(range(len(places))):
        places[i] = min(places[i], high - (len(places) - 1 - i) * gap)
    return places


def draw_curves(axes, curves, baseline=None, seen=()):
    """Draws the curves, with the baseline in black, and writes their names to the right of the panel, beside their ends.
    The values `seen` are inside too."""
    curves = [curve for curve in curves if any(map(math.isfinite, curve.y))]
    if not curves:
        return
    axes.set_ylim(*heights(curves, seen))
    first, last = min(curve.x[0] for curve in curves), max(curve.x[-1] for curve in curves)
    axes.set_xlim(first, last if last > first else first + 1)
    looks, colours = {}, iter(COLOURS * (len(curves) // MOST + 1))
    for curve in curves:
        colour = "black" if curve is baseline else next(colours)
        looks[id(curve)] = colour
        if curve.raw:
            axes.plot(*curve.raw, color=colour, linewidth=0.5, alpha=0.25)
        if curve.errors:
            low, high = ([y + sign * e for y, e in zip(curve.y, curve.errors)] for sign in (-1, 1))
            axes.fill_between(curve.x, low, high, color=colour, alpha=0.13, linewidth=0)
        dots = {"marker": "."} if len(curve.x) == 1 else {}
        axes.plot(curve.x, curve.y, "-" if curve.seeds > 1 else "--", color=colour, linewidth=1.3, **dots)
    curves = sorted(curves, key=lambda curve: curve.last)
    box = axes.get_window_extent()
    gap = 10.5 * axes.figure.dpi / 72  # pixels
    ends = [min(max(axes.transData.transform((0, curve.last))[1], box.y0), box.y1) for curve in curves]
    for curve, end, place in zip(curves, ends, spread(ends, box.y0, box.y1, gap)):
        at, to = (end - box.y0) / box.height, (place - box.y0) / box.height
        axes.annotate(
            curve.label, (curve.x[-1], at), (1.03, to), axes.get_xaxis_transform(), "axes fraction", va="center",
            fontsize=7.5, color=looks[id(curve)], annotation_clip=False,
            arrowprops={"arrowstyle": "-", "linewidth": 0.5, "linestyle": ":", "color": "0.6", "shrinkA": 0, "shrinkB": 0,
                        "relpos": (0, 0.5)},  # grey dots, since a curve may end before the panel does
        )  # fmt: skip


def draw_panels(parts, what, seen=(), width=8.5, height=3.2):
    """Draws the curves of each (title, unit of y, curves, the baseline's or None) in panels one below the other, with
    room for names to their right. `what`: see label_x. Returns the figure, or None where there is no curve."""
    parts = [(title, unit, its, base) for title, unit, curves, base in parts for its in parts_of(curves, base) if its]
    if not parts:
        return None
    height *= len(parts)
    figure, all_axes = plt.subplots(len(parts), 1, figsize=(width, height), squeeze=False)
    figure.subplots_adjust(left=0.1, right=0.64, top=1 - 0.35 / height, bottom=0.45 / height, hspace=0.33)
    for axes, (title, unit, curves, base) in zip(all_axes[:, 0], parts):
        axes.set_title(plain(title), loc="left", fontweight="bold", fontsize=9)
        draw_curves(axes, curves, base, seen)
        axes.set_ylabel(unit)
        label_x(axes, what)
    return figure


def label_x(axes, what):
    """Says what the horizontal axis shows: `tokens`, `seconds`, `step`, ...; long times are shown in minutes or hours."""
    axes.set_xlabel(what)
    if what == "tokens":
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    if what == "seconds":
        longest = axes.get_xlim()[1]
        unit, seconds = ("hours", 3600) if longest > 7200 else ("minutes", 60) if longest > 600 else ("seconds", 1)
        axes.set_xlabel(f"{unit} of training")
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


def save(figure, path):
    """Saves a picture; a PNG has few colours, which takes a third of the size, and no date or version."""
    if path.suffix != ".png":
        figure.savefig(path, bbox_inches="tight")
    else:
        whole, few = io.BytesIO(), io.BytesIO()
        figure.savefig(whole, format="png", dpi=110, bbox_inches="tight", metadata={"Software": None})
        whole.seek(0)
        Image.open(whole).convert("RGB").quantize(96, dither=Image.Dither.NONE).save(few, "PNG", optimize=True)
        write_whole(path, few.getvalue())
    plt.close(figure)
