"""Writes the report folder of a sweep from its records alone: the same files whenever and wherever it is written.

table.csv  table.md  loss.png  difference.png  bytes.png  picture.png  rates.png

A picture that a study has no use for is left out. table.md shows the tables and the pictures.
"""

import sys

import draw
import record
import table as tables
from problem import Problem, write_whole

LEGEND = (
    "State and weights: bytes a parameter, in the optimizer's arrays. Val loss: final validation loss in nats a token, "
    "mean over the n seeds that are done. − baseline: difference of that loss to the baseline's, mean over the seeds that "
    "both have, so it need not be that of the two means; rows of one baseline share its runs and err together. ± s.e.: "
    f"the difference's standard error; with fewer than {tables.FEW} pairs by what the pairs of all configurations of its "
    f"baseline scatter, pooled (of all baselines, where that has fewer than {tables.ENOUGH} degrees of freedom), or by what "
    "its own do where that is more; where none has several, by √2 times the standard deviation of the baseline's seeds; 0 "
    "where the bits are the baseline's. Baseline: what the row is compared to. "
    "Memory: what ./train plans and allocates, and what the driver has besides. Tokens/s: without the first ten steps. "
    "Both are in parentheses where several runs shared a device. Bands of difference.png are these standard errors, step by step."
)


def listed(records, key):
    return ", ".join(sorted({str(record[key]) for record in records if record.get(key)})) or "unknown"


def shape_of(record):
    its = f"{record['steps']:,} steps of {record['tokens_per_step']:,} tokens"
    return f"{record['parameters'] or 0:,} parameters; {its}"


def lines_of(sweep, table, stale):
    """Returns what the report says above the table."""
    used = [record for row in table for record in row.records.values()]
    wanted = sum(row.seeds for row in table)
    shapes = [shape_of(record) for record in used if record["status"] == "done"] or [shape_of(used[0])]
    lines = [
        f"{len(used)} of {wanted} runs have ended. Baseline: {sweep.baseline}.",
        f"{', or '.join(dict.fromkeys(shapes))}; data: {listed(used, 'data')}.",
        f"Device: {listed(used, 'device')}. Commit: {listed(used, 'commit')}.",
    ]
    scatters = {name: its for name, its in tables.scatters(table).items() if its[1]}
    if scatters:
        said = [f"{scatter:.4f} ({name or 'all'}, {degrees})" for name, (scatter, degrees) in scatters.items()]
        lines.append(f"A pair of runs scatters by, in nats (baseline, degrees of freedom): {', '.join(said)}.")
    notices = []
    if len({record["data_key"] for record in used}) > 1:
        notices.append(
            "The runs are of different corpora or, with the built-in text, of different builds: their losses do not "
            "compare."
        )
    if stale:
        notices.append(f"{stale} records are of other options than the sweep has now and are left out.")
    for notice in notices:
        print(f"compare: notice: {notice}", file=sys.stderr)
    return lines + notices


def write(sweep, folder):
    records = record.read_all(folder / record.FILE)
    table, stale = tables.rows(sweep, records)
    if not any(row.records for row in table):
        other = f" but {stale} of other options" if stale else ""
        raise Problem(f"{folder / record.FILE} holds no run of {sweep.path}{other}; run it first, or name another --out")
    lines = lines_of(sweep, table, stale)
    write_whole(folder / "table.csv", tables.csv_text(table))
    pictures = draw.draw(table, sweep, folder)
    write_whole(folder / "table.md", tables.markdown(table, sweep.title, lines, pictures, LEGEND))
    print(folder / "table.md")
