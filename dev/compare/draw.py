"""Draws the pictures as PNG, by matplotlib: loss curves, differences to the baseline, and bytes against final loss."""

import io
import itertools
import sys
import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

sys.path.append(str(Path(__file__).resolve().parents[1]))
from colours import COLOURS, plain
from curves import band, difference_curve, difference_label, front, loss_curve
from problem import write_whole
from table import groups

# Black is the baseline's colour. Dashes of lines and markers of dots tell more apart than there are colours.
DASHES = ["-", "--", ":", "-."]
MARKERS = ["o", "s", "^", "D"]
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
}


BYTES = [1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16]  # ticks of the axis of bytes a parameter
# Of the axes that are linear to 0.01 nats on both sides and logarithmic beyond.
TICKS = [0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]


def nats_axis(axes):
    axes.set_yscale("symlog", linthresh=0.01, linscale=1.5)
    axes.yaxis.set_major_locator(matplotlib.ticker.FixedLocator([-t for t in TICKS[:0:-1]] + TICKS))
    axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))


def wrapped(label):
    """Breaks a legend's label into lines that leave the curves more than half of the width."""
    return textwrap.fill(label, 46, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def style(i):
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i // len(COLOURS) % len(DASHES)]}


def palette():
    """Returns the colours of the curves on their way to white, and greys, far enough apart for Pillow to keep white."""
    shades = [[255 - (255 - int(c[i : i + 2], 16)) * k // 12 for i in (1, 3, 5)] for c in COLOURS for k in range(2, 13)]
    shades += [[255 * k // 16] * 3 for k in range(17)]
    image = Image.new("P", (1, 1))
    image.putpalette(sum(shades, []))
    return image


def save(figure, path):
    """Saves a PNG of few colours, which has a third of the size, without date or version."""
    whole, few = io.BytesIO(), io.BytesIO()
    figure.savefig(whole, format="png", dpi=110, metadata={"Software": None})
    plt.close(figure)
    whole.seek(0)
    Image.open(whole).convert("RGB").quantize(palette=palette(), dither=Image.Dither.NONE).save(few, "PNG", optimize=True)
    write_whole(path, few.getvalue())


def panels(table):
    """Makes a panel for each group that has curves, as tall as its legend. Returns [(axes, rows), ...]."""
    parts = [(group, [row for row in rows if row.drawn]) for group, rows in groups(table).items()]
    parts = [(group, rows) for group, rows in parts if rows]
    labels = [[wrapped(plain(f"{row.name} (+0.0000 to {row.baseline})")) for row in rows] for _, rows in parts]
    heights = [max(3.2, 0.5 + 0.175 * sum(label.count("\n") + 1 for label in rows)) for rows in labels]
    figure, all_axes = plt.subplots(
        len(parts), 1, figsize=(8.5, sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
    for axes, (group, _) in zip(all_axes[:, 0], parts):
        axes.set_title(plain(group), loc="left", fontweight="bold")
        axes.set_xlabel("seconds of training" if table[0].seconds else "tokens")
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    return figure, list(zip(all_axes[:, 0], [rows for _, rows in parts]))


def legend(axes):
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        labels = [wrapped(label) for label in labels]
        beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        axes.legend(handles, labels, frameon=False, fontsize=7.5, labelspacing=0.25, **beside)


def draw_losses(table, facts, path):
    figure, parts = panels(table)
    base = {row.name: row for row in table}[facts["baseline"]]
    for axes, rows in parts:
        curves = [(base, {"color": "black", "linewidth": 2, "zorder": 3})] if base.done else []
        curves += [(row, {"linewidth": 1, **style(i)}) for i, row in enumerate(row for row in rows if row is not base)]
        late = []
        for row, look in curves:
            x, y = loss_curve(row)
            ends = f"{row.loss:.4f}" if row.done else "diverged"
            axes.plot(x, y, label=plain(f"{row.name} ({ends})"), **look)
            late += [loss for at, loss in zip(x, y) if at >= 0.1 * x[-1] and loss <= y[0]]
        if late:  # the first tenth, from some 11 nats on, would take the height that the rest differs in
            margin = 0.03 * (max(late) - min(late)) + 1e-3
            axes.set_ylim(min(late) - margin, max(late) + margin)
        axes.set_ylabel("validation loss (nats)")
        legend(axes)
    save(figure, path)


def draw_differences(table, facts, path):
    figure, parts = panels(table)
    by_name = {row.name: row for row in table}
    for axes, rows in parts:
        shown, lines = {}, itertools.cycle(DASHES[1:])
        for i, row in enumerate(row for row in rows if row.done and row.name != row.baseline):
            x, y = difference_curve(row, by_name[row.baseline])
            if x:
                shown[row.baseline] = True
                label = plain(difference_label(row, facts["baseline"]))
                axes.plot(x, y, linewidth=1, marker=".", markersize=3, label=label, **style(i))
        for name in shown or {facts["baseline"]: True}:
            x, low, high = band(by_name[name])
            if x:
                label = plain(f"{name}: ± 1 s.d. of {len(by_name[name].done)} seeds")
                if name == facts["baseline"]:
                    axes.fill_between(x, low, high, color="black", alpha=0.12, linewidth=0, label=label)
                else:  # other baselines' are lines: bands over each other cannot be told apart
                    look = {"color": "#777777", "linewidth": 0.8, "linestyle": next(lines)}
                    axes.plot(x, low, **look)
                    axes.plot(x, high, label=label, **look)
        axes.axhline(0, color="black", linewidth=1)
        nats_axis(axes)
        axes.set_ylabel("− baseline (nats; linear to ±0.01)")
        legend(axes)
    save(figure, path)


def square(at, size):
    return Bbox.from_bounds(at[0] - size / 2, at[1] - size / 2, size, size)


MARGIN = 3  # pixels from a name to the axis and to the edge


class Labels:
    """Names beside dots, in boxes of pixels: no name lies over what is `covered`, and no line to one over what is `told`,
    which dots without a name are not."""

    def __init__(self, figure, axes, named, dots):
        figure.canvas.draw()
        self.figure, self.axes, self.inside = figure, axes, axes.get_window_extent()
        self.named = axes.transData.transform(named)
        self.covered = [square(at, 6) for at in axes.transData.transform(dots)]
        self.told = [square(at, 6) for at in self.named]

    def is_free(self, box):
        within = self.inside.x0 + MARGIN <= box.x0 and box.x1 <= self.figure.bbox.x1 - MARGIN
        within = within and self.inside.y0 <= box.y0 and box.y1 <= self.inside.y1
        return within and not any(box.overlaps(other) for other in self.covered)

    def line(self, i, way):
        """Returns boxes along the line from the i-th dot by `way`, or None if another dot, name or line is in them."""
        length = np.hypot(*way)
        boxes = [square(self.named[i] + way * at / length, 2) for at in np.arange(4, length, 2)]
        others = self.told[:i] + self.told[i + 1 :]
        return None if any(box.overlaps(other) for box in boxes for other in others) else boxes

    def put(self, i, at, text, places, far):
        """The label of the i-th of those that have names, at the first of the places where nothing is in the way and no
        other of them is nearer, or, far off, with a line to its dot; whether there is one."""
        for dx, dy, ha, va in places:
            look = {"fontsize": 7, "ha": ha, "va": va, "path_effects": [withStroke(linewidth=2, foreground="white")]}
            label = self.axes.annotate(text, at, (dx, dy), textcoords="offset points", **look)
            box = label.get_window_extent(self.figure.canvas.get_renderer())
            ways = np.clip(self.named, box.min, box.max) - self.named  # from each dot to the nearest point of the label
            lengths = np.hypot(*ways.T)
            line = self.line(i, ways[i]) if far else [] if lengths[i] <= lengths.min() + 1 else None
            if line is not None and self.is_free(box):
                self.covered += [box, *line]
                self.told += [box, *line]
                if far:
                    look = {"arrowstyle": "-", "linewidth": 0.6, "color": "#777777", "shrinkA": 0, "shrinkB": 0}
                    end = ways[i] * 72 / self.figure.dpi
                    self.axes.annotate("", at, end, textcoords="offset points", arrowprops=look, zorder=1.5)
                return True
            label.remove()
        return False


def place_labels(figure, axes, points, dots):
    """Places labels for [(x, y, text), ...] by rank: beside the dot, else farther off with a line, else nowhere."""
    labels = Labels(figure, axes, [point[:2] for point in points], dots)
    left = [i for i, (*at, text) in enumerate(points) if not labels.put(i, at, text, PLACES, False)]
    for i in left:
        *at, text = points[i]
        labels.put(i, at, text, FAR, True)


def sideways(up, right):
    """Returns places to the right and the left of a dot, higher and lower, in points."""
    return [
        (sign * dx, dy, "left" if sign > 0 else "right", "center")
        for height in up
        for dy in (height, -height)
        for dx in right
        for sign in (1, -1)
    ]


PLACES = [(5, 0, "left", "center"), (-5, 0, "right", "center"), (0, 5, "center", "bottom"), (0, -5, "center", "top")]
PLACES += sideways((8,), (4,))
FAR = sideways((0, 8, 14, 20, 30, 40), (10, 20, 30))


def draw_pareto(table, facts, path):
    """Bytes of weights and states a parameter against final loss, from the baseline's on; a line joins the front. Groups
    are drawn over those after them; a hollow dot has a seed that diverged or died."""
    figure, axes = plt.subplots(figsize=(8.5, 5.2), layout="constrained")
    base = {row.name: row for row in table}[facts["baseline"]]
    ended = [row for row in table if row.done]
    for i, (group, rows) in enumerate(groups(ended).items()):
        x, y = [row.bytes for row in rows], [row.level for row in rows]
        errors = [row.level_error or 0.0 for row in rows]
        colour, marker, over = COLOURS[i % len(COLOURS)], MARKERS[i // len(COLOURS) % len(MARKERS)], 2 + 0.8 / (i + 1)
        axes.errorbar(
            x, y, errors, fmt=marker, color=colour, markersize=4, elinewidth=0.7, label=plain(group), zorder=over
        )
        hollow = [(row.bytes, row.level) for row in rows if not row.whole]
        if hollow:
            look = {"color": colour, "marker": marker, "markersize": 4, "markerfacecolor": "white"}
            axes.plot(*zip(*hollow), linestyle="", zorder=over + 0.105, **look)
    best = front(table)
    axes.plot([row.bytes for row in best], [row.level for row in best], color="black", linewidth=0.8, zorder=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(matplotlib.ticker.FixedLocator(BYTES))
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    nats_axis(axes)
    axes.margins(0.08)
    axes.set_xlabel("bytes of weights and states a parameter")
    its = f" − {base.name}'s {base.loss:.4f}" if base.done else ""
    axes.set_ylabel(plain(f"final validation loss{its} (nats)"))
    axes.legend(frameon=False, fontsize=7.5)
    first = next(iter(groups(table)), None)
    ranked = best + [row for row in ended if row not in best and row.group == first]
    ranked += [row for row in ended if row not in ranked]
    # If there are many rows, only those of the first group are named here; the HTML page names the others.
    named = ranked if len(ranked) <= 25 else [row for row in ranked if row.group == first]
    dots = [(row.bytes, row.level) for row in ranked]
    place_labels(figure, axes, [(row.bytes, row.level, plain(row.name)) for row in named], dots)
    save(figure, path)


def draw_presets(table, facts, path):
    """The configurations that the sweep names in `picture`: bytes against the difference to the baseline, large enough to
    read at page width. No picture where the sweep names none or none of them has ended."""
    rows = [row for row in table if row.done and row.name in facts["picture"]]
    if not rows:
        path.unlink(missing_ok=True)
        return
    figure, axes = plt.subplots(figsize=(8.5, 4.2), layout="constrained")
    x, y, errors = [row.bytes for row in rows], [row.level for row in rows], [row.level_error or 0.0 for row in rows]
    axes.axhline(0, color="#777777", linewidth=0.8, zorder=1)
    axes.errorbar(x, y, errors, fmt="o", color=COLOURS[0], markersize=6, elinewidth=1.2, capsize=3)
    for row in rows:
        left = any(0 < other.bytes - row.bytes < 1 and abs(other.level - row.level) < 0.003 for other in rows)
        where = {"xytext": (-7 if left else 7, 0), "ha": "right" if left else "left"}
        where["path_effects"] = [withStroke(linewidth=3, foreground="white")]
        axes.annotate(
            plain(row.name), (row.bytes, row.level), textcoords="offset points", va="center", fontsize=10, **where
        )
    axes.set_xlim(0, max(x) * 1.12)
    axes.tick_params(labelsize=10)
    axes.set_xlabel("bytes per parameter, weights and states", fontsize=11)
    axes.set_ylabel(plain(f"validation loss − {facts['baseline']}'s (nats)"), fontsize=11)
    save(figure, path)


PICTURES = {
    "loss.png": draw_losses,
    "difference.png": draw_differences,
    "pareto.png": draw_pareto,
    "presets.png": draw_presets,
}


def draw(table, facts, folder):
    with plt.rc_context(STYLE):
        for name, picture in PICTURES.items():
            picture(table, facts, folder / name)
