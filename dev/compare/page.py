"""Writes the report as one HTML file that needs no network: the table, and figures of bokeh, whose program is inside.

In the figures a click on a name in the legend hides or shows its curve, dragging zooms into a box, the tools beside it
turn on the wheel and moving, and the page names what the pointer is on. bokeh counts ids and draws none, so the same
records give the same bytes.
"""

import html
import json
import math
import os

os.environ["BOKEH_SIMPLE_IDS"] = "yes"

from bokeh.embed import json_item
from bokeh.models import ColumnDataSource, HoverTool, Legend, Range1d, Span
from bokeh.plotting import figure
from bokeh.resources import Resources

from curves import band, difference_curve, difference_label, front, loss_curve
from draw import BYTES, COLOURS
from table import HEADINGS, cells, groups, shown

DASHES = ["solid", "dashed", "dotted", "dotdash"]
MARKERS = ["circle", "square", "triangle", "diamond"]
TOOLS = "pan,wheel_zoom,box_zoom,reset,save"


def new_figure(title, x, y, **more):
    plot = figure(title=title, height=420, sizing_mode="stretch_width", tools=TOOLS, active_drag="box_zoom", **more)
    plot.xaxis.axis_label, plot.yaxis.axis_label = x, y
    return plot


def add_legend(plot, items, rows=24):
    """Puts the legend to the right, in as many columns as it takes; a click hides or shows a curve."""
    for begin in range(0, len(items), rows):
        legend = Legend(
            items=items[begin : begin + rows],
            click_policy="hide",
            label_text_font_size="8pt",
            spacing=0,
            padding=2,
            glyph_height=12,
        )
        plot.add_layout(legend, "right")


def window(values):
    """Returns the range that shows four fifths of the values well, and all of five; zooming out shows the rest."""
    near = sorted(map(abs, values))
    limit = max(1e-4, 2 * near[math.ceil(0.8 * (len(near) - 1))])
    return Range1d(-limit, limit)


def curves_figure(title, y, curves, bands=(), seconds=0, **more):
    """Draws [(label, x, y, whether black), ...] and bands [(label, x, low, high), ...] over tokens, or over seconds."""

    def scaled(x):
        return [round(value / (1 if seconds else 1e6), 6) for value in x]

    plot = new_figure(title, "seconds of training" if seconds else "tokens (millions)", y, **more)
    items = []
    for i, (label, x, low, high) in enumerate(bands):
        if i == 0:
            items.append((label, [plot.varea(x=scaled(x), y1=low, y2=high, fill_color="black", fill_alpha=0.12)]))
        else:  # bands over each other cannot be told apart
            look = {"color": "#777777", "line_dash": DASHES[1:][(i - 1) % 3]}
            items.append((label, [plot.line(scaled(x), low, **look), plot.line(scaled(x), high, **look)]))
    for i, (label, x, values, black) in enumerate(curves):
        colour = "black" if black else COLOURS[i % len(COLOURS)]
        dash = "solid" if black else DASHES[i // len(COLOURS) % len(DASHES)]
        source = ColumnDataSource({"x": scaled(x), "y": [round(value, 5) for value in values]})
        look = {"color": colour, "line_dash": dash, "line_width": 2 if black else 1.3}
        items.append((label, [plot.line("x", "y", source=source, name=label, **look)]))
    plot.add_tools(
        HoverTool(
            tooltips=[("", "$name"), ("seconds" if seconds else "million tokens", "@x{0.00}"), ("nats", "@y{0.0000}")], line_policy="nearest"
        )
    )
    add_legend(plot, items)
    return plot


def group_figures(group, rows, by_name, facts):
    """Returns the figures of a group: differences, validation loss and training loss."""
    base = by_name[facts["baseline"]]
    done, drawn = [row for row in rows if row.done], [row for row in rows if row.drawn]
    differences = [
        (difference_label(row, facts["baseline"]), *difference_curve(row, by_name[row.baseline]), False)
        for row in done
        if row.name != row.baseline
    ]
    names = list(dict.fromkeys(row.baseline for row in done))
    names.sort(key=lambda name: name != base.name)  # its band is the filled one
    bands = [(f"{name}: ± s.d.", *band(by_name[name])) for name in names if band(by_name[name])[0]]
    plot = curves_figure(
        f"{group}: difference to the baseline", "validation loss − baseline's (nats)", differences, bands, facts["seconds"]
    )
    ends = [abs(row.difference) for row in done if row.difference is not None] + [high[-1] for _, _, _, high in bands]
    if ends:
        plot.y_range = window(ends)
    plot.add_layout(Span(location=0, dimension="width", line_color="black", line_width=1))
    figures = [plot] if differences else []
    for kind, title in (("val", "validation loss"), ("train", "training loss")):
        rest = [(row.name, *loss_curve(row, kind), False) for row in drawn if row is not base]
        first = [(base.name, *loss_curve(base, kind), True)] if base.done else []
        figures.append(curves_figure(f"{group}: {title}", f"{title} (nats)", rest + first, (), facts["seconds"], y_axis_type="log"))
    return figures


def pareto_figure(table, facts):
    ended = [row for row in table if row.done]
    base = next(row for row in table if row.name == facts["baseline"])
    y = f"final validation loss − {base.name}'s (nats)" if base.done else "final validation loss (nats)"
    plot = new_figure(
        "Bytes a parameter against final loss", "bytes of weights and states a parameter", y, x_axis_type="log"
    )
    items, best = [], front(table)
    plot.xaxis.ticker = BYTES
    plot.x_range = Range1d(0.85 * min(row.bytes for row in ended), 1.3 * max(row.bytes for row in ended))
    if base.done:
        plot.y_range = window([row.level for row in ended])
    plot.line([row.bytes for row in best], [row.level for row in best], color="black", line_width=1)
    renderers = []
    for i, (group, rows) in reversed(list(enumerate(groups(ended).items()))):  # the first is drawn over the others
        colour = COLOURS[i % len(COLOURS)]
        fields = {
            "x": [row.bytes for row in rows],
            "y": [row.level for row in rows],
            "loss": [row.loss for row in rows],
            "name": [row.name for row in rows],
            "low": [row.level - (row.level_error or 0) for row in rows],
            "high": [row.level + (row.level_error or 0) for row in rows],
            "error": [shown(row.level_error, " ± %.4f") for row in rows],
            "fill": [colour if row.whole else "white" for row in rows],
        }
        source = ColumnDataSource(fields)
        marker = MARKERS[i // len(COLOURS) % len(MARKERS)]
        dots = plot.scatter("x", "y", source=source, size=8, color=colour, fill_color="fill", marker=marker)
        bars = plot.segment("x", "low", "x", "high", source=source, color=colour, line_width=0.7)
        items.insert(0, (group, [dots, bars]))
        renderers.append(dots)
    fields = {"x": [row.bytes for row in best], "y": [row.level for row in best], "name": [row.name for row in best]}
    look = {"text_font_size": "8pt", "x_offset": 6, "y_offset": -2}
    items.append(("names of the best", [plot.text("x", "y", text="name", source=ColumnDataSource(fields), **look)]))
    tips = [("", "@name"), ("bytes", "@x{0.000}"), ("loss", "@loss{0.0000}")]
    tips += [(f"− {base.name}'s", "@y{0.0000}@error")] if base.done else []
    plot.add_tools(HoverTool(tooltips=tips, renderers=renderers))
    add_legend(plot, items)
    return plot


STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5em auto; max-width: 1300px; padding: 0 1em; color: #222; }
table { border-collapse: collapse; font-size: 13px; } th, td { padding: 2px 8px; text-align: left; }
th { border-bottom: 1px solid #888; } tr:hover td { background: #f2f2f2; }
td:nth-child(n+5):not(:nth-child(11)):nth-child(-n+13) { text-align: right; font-variant-numeric: tabular-nums; }
.plot { margin: 1em 0; }
"""


def table_html(rows):
    head = "".join(f"<th>{html.escape(text)}</th>" for text in HEADINGS)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in cells(row)) + "</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>\n"


def page(table, facts):
    """Returns the whole file as text."""
    by_name = {row.name: row for row in table}
    plots, body = [], []

    def put(plot):
        target = f"plot{len(plots)}"
        plots.append(json_item(plot, target))
        body.append(f'<div class="plot" id="{target}"></div>\n')

    body.append("".join(f"<p>{html.escape(line)}</p>\n" for line in facts["lines"]))
    if any(row.done for row in table):
        put(pareto_figure(table, facts))
    for group, rows in groups(table).items():
        body.append(f"<h2>{html.escape(group)}</h2>\n{table_html(rows)}")
        if any(row.drawn for row in rows):
            for plot in group_figures(group, rows, by_name, facts):
                put(plot)
    body.append("".join(f"<p>{html.escape(line)}</p>\n" for line in facts["legend"]))
    program = "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)
    items = json.dumps(plots).replace("</", "<\\/")
    title = html.escape(facts["title"])
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n<style>{STYLE}</style>\n'
        f"<script>{program}</script>\n</head><body>\n<h1>{title}</h1>\n{''.join(body)}"
        f"<script>\nfor (const item of {items}) Bokeh.embed.embed_item(item);\n</script>\n</body></html>\n"
    )
