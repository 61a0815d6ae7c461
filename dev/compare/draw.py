"""Draws the pictures of a study: loss curves, differences to the baseline, bytes against final loss, loss over rates."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from curves import COLOURS, STYLE, Curve, draw_panels, matplotlib, mean_curve, parts_of, plain, plt, save
from matplotlib.patheffects import withStroke
from sweep import NO_GROUP
from table import groups

BYTES = [1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20]  # ticks of the axis of bytes a parameter


def place(row, step):
    """Returns the tokens of so many steps or, in a study of `seconds`, the seconds that they take."""
    return step * row.any("tokens_per_step") / (row.mean("tokens_per_second") if row.seconds else 1)


def loss_curve(row):
    """Returns the validation loss of the seeds that are done or, if none is, of those that diverged, up to there."""
    seeds = [{step: (place(row, step), loss) for step, loss in its["val"] if loss is not None} for its in row.drawn.values()]
    return mean_curve(row.name, seeds)


def difference_curve(row):
    """Returns the differences to the baseline that table.rows found at each validation."""
    points = {tokens: its for tokens, its in row.path.items() if tokens > 0}
    x, y = list(points), [mean for mean, _, _ in points.values()]
    errors = [error or 0.0 for _, error, _ in points.values()] if len(row.done) > 1 else []
    return Curve(row.name, x, y, row.pairs or len(row.done), errors, signed=True)


def draw_over_training(table, parts, zero):
    """Draws panels of (title, baseline's curve or None, curves) over tokens or seconds."""
    unit = "− baseline (nats)" if zero else "validation loss (nats)"
    parts = [(title, unit, curves, base) for title, base, curves in parts]
    figure = draw_panels(parts, "seconds" if table[0].seconds else "tokens", [0.0] * zero)
    for axes in figure.axes if figure and zero else ():
        axes.axhline(0, color="black", linewidth=1)
    return figure


def draw_losses(table, sweep):
    base = next(row for row in table if row.name == sweep.baseline)
    black = loss_curve(base) if base.done else None
    parts = []
    for group, rows in groups(table).items():
        title = sweep.title if group == NO_GROUP else group
        parts.append((title, black, [loss_curve(row) for row in rows if row.drawn and row is not base]))
    return draw_over_training(table, [part for part in parts if part[2]] or parts[:1], False)


def draw_picture(table, sweep):
    """Draws the losses of the configurations that the sweep names in `picture`, for a README."""
    curves = {row.name: loss_curve(row) for row in table if row.done and row.name in sweep.picture}
    black = curves.pop(sweep.baseline, None)
    return draw_over_training(table, [(sweep.title, black, list(curves.values()))], False)


def draw_differences(table, sweep):
    """Draws differences after equal tokens, so not for runs of equal times, whose rates fall over other numbers of these."""
    if table[0].seconds:
        return None
    parts = []
    for group, rows in groups(table).items():
        for baseline in dict.fromkeys(row.baseline for row in rows):
            curves = [difference_curve(row) for row in rows if row.baseline == baseline and row.path]
            named = "" if group == NO_GROUP else f"{group}, "
            parts.append((f"{named}minus {baseline}", None, curves))
    return draw_over_training(table, parts, True)


def beside(axes, points, bars=()):
    """Writes [(x, y, text), ...] beside their dots, each at the first place that covers neither a name nor a dot and, if
    there is such a place, no bar [(x, low, high), ...] and not the line at 0."""
    axes.figure.canvas.draw()
    renderer = axes.figure.canvas.get_renderer()
    look = {"textcoords": "offset points", "fontsize": 8, "path_effects": [withStroke(linewidth=2, foreground="white")]}
    line = {"arrowstyle": "-", "linewidth": 0.5, "color": "#777777", "shrinkA": 0, "shrinkB": 2}
    dots = [axes.transData.transform(point[:2]) for point in points]
    Box, inside = matplotlib.transforms.Bbox, axes.figure.bbox
    taken = [Box.from_bounds(x - 4, y - 4, 8, 8) for x, y in dots]
    ends = [axes.transData.transform([(x, low), (x, high)]) for x, low, high in bars]
    zero = axes.transData.transform((1, 0))[1]
    lines = [Box([low - (4, 1), high + (4, 1)]) for low, high in ends] + [Box([(inside.x0, zero), (inside.x1, zero + 1)])]
    ways = [(6, 0), (-6, 0)] + [(dx, dy) for dy in (9, -9, 18, -18, 27, -27, 40, -40, 55, -55) for dx in (6, -6, 22, -22)]
    ways = [(way, lines) for way in ways] + [(way, []) for way in ways]
    for x, y, text in points:
        for way in ways:
            (dx, dy), others = way
            arrow = {"arrowprops": line} if abs(dy) > 9 else {}
            label = axes.annotate(text, (x, y), (dx, dy), ha="left" if dx > 0 else "right", va="center", **arrow, **look)
            label.update_positions(renderer)
            box = matplotlib.text.Text.get_window_extent(label, renderer)
            if not any(map(box.overlaps, taken + others)) and inside.x0 <= box.x0 and box.x1 <= inside.x1:
                break
            if way is not ways[-1]:
                label.remove()
        taken.append(box)


def rounded(count):
    """Returns a number as 124M, or as 834k below a million."""
    return f"{count / 1e6:.0f}M" if count >= 1e6 else f"{count / 1e3:.0f}k"


def draw_bytes(table, sweep):
    """Bytes that a parameter holds against the final loss, of the rows in `picture`, else of the first group."""
    rows = [row for row in table if row.done and (row.name in sweep.picture or not sweep.picture and row.group == table[0].group)]
    if len({row.held for row in rows}) < 2:
        return None
    length = f"{rounded(rows[0].any('steps') * rows[0].any('tokens_per_step'))} tokens"
    figure, axes = plt.subplots(figsize=(8.5, 4.4), layout="constrained")
    axes.set_title(
        f"{plain(sweep.title)}: {rounded(rows[0].any('parameters'))} parameters, "
        f"{f'{sweep.seconds} seconds' if sweep.seconds else length}.\n"
        "Bars: ± the standard error of the difference to the baseline, if known. n: seeds; hollow: one diverged or died.",
        loc="left", fontsize=9,
    )  # fmt: skip
    axes.axhline(0, color="#777777", linewidth=0.8, zorder=1)
    for row in rows:
        look = {"markerfacecolor": COLOURS[0] if row.whole else "white", "color": COLOURS[0], "capsize": 3, "elinewidth": 0.9}
        axes.errorbar(row.held, row.level, row.level_error, fmt="o", markersize=5, **look)
    axes.set_xscale("log")
    axes.set_xlim(0.8 * min(row.held for row in rows), 1.35 * max(row.held for row in rows))
    axes.xaxis.set_major_locator(matplotlib.ticker.FixedLocator(BYTES))
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.set_xlabel("bytes a parameter: weights, states and gradients (logarithmic)")
    base = next(row for row in table if row.name == sweep.baseline)
    axes.set_ylabel(plain(f"final loss − {base.name}'s (nats)" if base.done else "final loss (nats)"))
    bars = [(row.held, row.level - error, row.level + error) for row in rows for error in [row.level_error or 0.0]]
    beside(axes, [(row.held, row.level, f"{plain(row.name)}, n {len(row.done)}") for row in rows], bars)
    return figure


def draw_rates(table, sweep):
    """Final loss over the learning rate, a line for each name that has three rates or more."""
    lines = {}
    for row in table:
        rate = row.format("lr")
        if row.done and rate and row.name.endswith(f" {rate}"):
            name = row.name.removesuffix(f" {rate}").removesuffix(" lr")
            lines.setdefault(name, {})[float(rate)] = [{0: (float(rate), loss)} for loss in row.losses().values()]
    curves = []
    for name, rates in lines.items():
        points = [mean_curve(name, seeds) for _, seeds in sorted(rates.items())]
        errors = [point.errors[0] for point in points if point.errors]
        x, y = [point.x[0] for point in points], [point.y[0] for point in points]
        seeds, best = min(point.seeds for point in points), min(zip(y, x))
        errors = errors if len(errors) == len(points) else []
        curves.append(Curve(name, x, y, seeds, errors, told=f"{best[0]:.4f} at {best[1]:g}"))
    parts = parts_of([curve for curve in curves if len(curve.x) > 2])
    titles = [sweep.title + f" ({i + 1})" * (len(parts) > 1) for i in range(len(parts))]
    unit = "final validation loss (nats)"
    figure = draw_panels([(title, unit, its, None) for title, its in zip(titles, parts)], "learning rate")
    for axes in figure.axes if figure else ():
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axes.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        low, high = axes.get_xlim()
        if sum(low <= tick <= high for tick in axes.get_xticks()) < 2:  # the range lies within a power of ten
            axes.set_xticks(sorted({x for line in axes.lines for x in line.get_xdata()}))
    return figure


PICTURES = {
    "picture.png": draw_picture,
    "loss.png": draw_losses,
    "difference.png": draw_differences,
    "bytes.png": draw_bytes,
    "rates.png": draw_rates,
}


def draw(table, sweep, folder):
    """Draws the pictures that there is something to show in. Returns their names; others are removed."""
    drawn = []
    with plt.rc_context(STYLE):
        for name, picture in PICTURES.items():
            figure = picture(table, sweep) if any(row.done for row in table) else None
            if figure:
                save(figure, folder / name)
                drawn.append(name)
            else:
                (folder / name).unlink(missing_ok=True)
    return drawn
