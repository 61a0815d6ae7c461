"""What the records say: one row a configuration, its difference to the baseline, and both as CSV and Markdown.

The difference is paired by seed where seeds match, as runs of one seed share initial weights, data order and noise:
d_s = loss of the configuration - loss of its baseline, its mean, and as standard error

    sd(d_s) / sqrt(n)                 FEW pairs or more, and fewer where that is more than the next or the next is not known
    pooled sd(d_s) / sqrt(n)          fewer: over the configurations of its baseline that have several, by their n - 1; over
                                      those of all baselines where that has fewer than ENOUGH degrees of freedom
    sd(baseline) sqrt(2)              one pair, and none has several: as if both runs scattered as the baseline's seeds do
    sqrt(s^2 / n + sd(baseline)^2 / k)  no pair: n runs of spread s (the baseline's where n is 1), k of the baseline

with sd over n - 1. The sd of two or three is small by chance too often to be an error: one in six, of three one in 25,
is below a fifth of what it should be. What a pair scatters by depends on the rule and its constants, hence a pool for
each baseline. Pairs move together, so the third is on the safe side; a configuration that has the very bits of its
baseline says nothing about the others, is not pooled and has an error of 0. A baseline of one seed, such as lion's own,
is taken to scatter as the study's baseline does; where that too has one, only what is paired can have an error.
"""

import csv
import io
import math
import statistics
from dataclasses import dataclass, field

from sweep import NEUTRAL

FEW = 10  # from so many pairs on a configuration's own scatter is its error
ENOUGH = 10  # degrees of freedom: the pooled sd is then within a factor of 1.8, nineteen times in twenty


def validations(record):
    """Returns [(tokens, validation loss), ...] of a run."""
    return [(step * record["tokens_per_step"], loss) for step, loss in record["val"]]


@dataclass
class Row:
    """Holds one configuration. `records`: {seed: record} of the runs that have ended, in whatever way."""

    name: str
    group: str
    baseline: str
    seeds: int  # that the sweep wants
    own: set
    records: dict = field(repr=False)
    seconds: int = 0  # of training that each run has, if the study says so: then curves are over these
    difference: float | None = None
    error: float | None = None
    pairs: int = 0
    unasked: list = field(default_factory=list)
    path: dict = field(default_factory=dict)  # {tokens: (difference, error, pairs)} of the validations
    level: float | None = None  # final loss - the study's baseline's, paired by seed: what rows are ranked by
    level_error: float | None = None

    @property
    def done(self):
        return {seed: record for seed, record in self.records.items() if record["status"] == "done"}

    @property
    def whole(self):
        """Returns whether all that have ended are done: if a seed diverged, the others were perhaps lucky."""
        return len(self.done) == len(self.records)

    @property
    def drawn(self):
        """Returns the seeds with curves: those that are done, else those that diverged after a validation."""
        return self.done or {
            seed: record
            for seed, record in self.records.items()
            if record["status"] == "diverged" and sum(loss is not None for _, loss in record["val"]) > 1
        }

    def losses(self, tokens=None):
        """Returns {seed: validation loss} after so many tokens, or at the end."""
        if tokens is None:
            return {seed: record["final_loss"] for seed, record in self.done.items()}
        found = {seed: dict(validations(record)).get(tokens) for seed, record in self.done.items()}
        return {seed: loss for seed, loss in found.items() if loss is not None}

    def mean(self, key):
        values = [record[key] for record in self.done.values() if record[key] is not None]
        return statistics.fmean(values) if values else None

    def any(self, key):
        return next((record[key] for record in self.records.values() if record[key] is not None), None)

    def format(self, key):
        return next((record["resolved"][key] for record in self.records.values() if key in record["resolved"]), "")

    @property
    def sharing(self):
        """Returns the largest number of runs, its own included, that shared a GPU with one of them."""
        return max((record["sharing"] for record in self.records.values()), default=0)

    def differing(self):
        """Returns the options, as used, in which the seeds that are done differ, with their values."""
        values = {}
        for record in self.done.values():
            for key, value in record["resolved"].items():
                if key not in ("seed", *NEUTRAL):
                    values.setdefault(key, {})[value] = True
        return [f"{key} ({', '.join(its)})" for key, its in values.items() if len(its) > 1]

    @property
    def loss(self):
        return self.mean("final_loss")

    @property
    def bytes(self):
        """Returns bytes of weights and states per parameter."""
        states, weights = self.any("state_bytes"), self.any("weights_bytes")
        return None if states is None else states + weights

    @property
    def held(self):
        """Returns bytes of weights, states and gradients per parameter."""
        return None if self.bytes is None else self.bytes + {"bf16": 2, "fp32": 4}.get(self.format("grads"), 0)

    def status(self):
        """Says in words what is missing, what went wrong, and what is not as the sweep asked."""
        words = []
        if not self.records:
            words.append("not run yet")
        elif len(self.records) < self.seeds:
            words.append(f"{len(self.records)} of {self.seeds} seeds")
        for seed, record in self.records.items():
            if record["status"] != "done":
                words.append(f"{'seed %d ' % seed if self.seeds > 1 else ''}{record['status']}: {record['reason']}")
        skipped = sum(record["skipped"] for record in self.done.values())
        if skipped:
            words.append(f"{skipped} steps skipped")
        if self.differing():
            words.append("its seeds differ in " + ", ".join(self.differing()))
        if self.unasked:
            words.append("also differs from the baseline in " + ", ".join(self.unasked))
        return "; ".join(words) or "done"


def paired(losses, others):
    """Returns the differences of {seed: loss} to the baseline's, for the seeds that both have."""
    return [losses[seed] - others[seed] for seed in losses if seed in others]


def pair_scatter(rows_of_pairs):
    """(standard deviation of a pair's difference, pooled over the lists of them, its degrees of freedom); None, 0 where
    none has several."""
    several = [pairs for pairs in rows_of_pairs if len(pairs) > 1 and any(pairs)]
    degrees = sum(len(pairs) - 1 for pairs in several)
    squares = math.fsum((len(pairs) - 1) * statistics.variance(pairs) for pairs in several)
    return (math.sqrt(squares / degrees) if degrees else None), degrees


def scatters(table, tokens=None):
    """Returns {baseline: pair_scatter of the rows paired with it} if it has ENOUGH; under None that of all rows. `tokens`:
    by the losses after so many, not at the end."""
    by_name = {row.name: row for row in table}
    pairs = {None: []}
    for row in table:
        if row.baseline != row.name:
            its = paired(row.losses(tokens), by_name[row.baseline].losses(tokens))
            pairs[None].append(its)
            pairs.setdefault(row.baseline, []).append(its)
    found = {name: pair_scatter(its) for name, its in pairs.items()}
    return {name: its for name, its in found.items() if name is None or its[1] >= ENOUGH}


def difference(losses, others, study=(), scatter=None):
    """Returns (mean, standard error or None, pairs) of {seed: loss} against the baseline's; None without losses.

    `study`: losses of the study's baseline; `scatter`: a pair's, pooled (`scatters`).
    """
    if not losses or not others:
        return None, None, 0
    noise = next((statistics.stdev(each) for each in (others.values(), study) if len(each) > 1), None)
    pairs = paired(losses, others)
    if pairs:
        spread = statistics.stdev(pairs) if len(pairs) > 1 else 0.0 if not any(pairs) else None
        if scatter is not None and len(pairs) < FEW and any(pairs):
            spread = max(scatter, spread or 0.0)
        elif spread is None and noise is not None:
            spread = noise * math.sqrt(2)
        error = None if spread is None else spread / math.sqrt(len(pairs))
        return statistics.fmean(pairs), error, len(pairs)
    mean = statistics.fmean(losses.values()) - statistics.fmean(others.values())
    own = statistics.stdev(losses.values()) if len(losses) > 1 else noise
    if own is None or noise is None:
        return mean, None, 0
    return mean, math.sqrt(own**2 / len(losses) + noise**2 / len(others)), 0


def unasked(row, other):
    """Returns the options, as used, in which a row differs from its baseline although neither asked for it."""
    asked = {"seed", "preset", *NEUTRAL, *row.own, *other.own}
    if "ademamix" not in (row.format("rule"), other.format("rule")):
        asked |= {"beta3", "alpha", "ramp"}  # no other rule reads them
    if "preset" in row.own | other.own:
        asked |= {"rule", "weights", "m", "v", "override"}
    if "rule" in row.own | other.own and "none" in (row.format("v"), other.format("v")):
        asked.add("v")  # the rule has no v
    pairs = [(row.records[seed], other.records[seed]) for seed in row.records if seed in other.records]
    found = {}
    for mine, its in pairs:
        for key, value in mine["resolved"].items():
            if key not in asked and value != its["resolved"].get(key, value):
                found[key] = f"{key} ({value}, not {its['resolved'][key]})"
        if mine["device"] != its["device"]:
            found["device"] = f"the device ({mine['device']}, not {its['device']})"
    return list(found.values())


def compared(row, its, base, scatter, tokens=None):
    """Returns the difference of a row to its baseline after so many tokens, or at the end. `base`: the study's."""
    pooled = scatter.get(row.baseline, scatter[None])[0]
    return difference(row.losses(tokens), its.losses(tokens), base.losses(tokens).values(), pooled)


def rows(sweep, records):
    """Returns the rows of a sweep, in the order of its file, and how many records are of other options."""
    result, stale = [], 0
    for name, runs in sweep.configurations().items():
        mine = {run.seed: records[name, run.seed] for run in runs if (name, run.seed) in records}
        fitting = {
            run.seed: mine[run.seed]
            for run in runs
            if run.seed in mine and mine[run.seed]["options_key"] == run.options_key()
        }
        stale += len(mine) - len(fitting)
        first = runs[0]
        result.append(Row(name, first.group, first.baseline, len(runs), first.own, dict(sorted(fitting.items())), sweep.seconds))
    by_name = {row.name: row for row in result}
    base = by_name[sweep.baseline]
    scatter = scatters(result)
    for row in result:
        its = by_name[row.baseline]
        if its is not row:
            row.difference, row.error, row.pairs = compared(row, its, base, scatter)
            row.unasked = unasked(row, its)
        pooled = scatter.get(row.baseline, scatter[None])[0] if row.baseline == sweep.baseline else scatter[None][0]
        level = difference(row.losses(), base.losses(), (), pooled) if base.done else (row.loss, None, 0)
        row.level, row.level_error = level[0], None if row is base else level[1]
    for tokens in sorted({at for row in result for record in row.done.values() for at, _ in validations(record)}):
        scatter = scatters(result, tokens)
        for row in result:
            if row.baseline != row.name and row.losses(tokens) and by_name[row.baseline].losses(tokens):
                row.path[tokens] = compared(row, by_name[row.baseline], base, scatter, tokens)
    return result, stale


def shown(value, pattern, nothing=""):
    return nothing if value is None else pattern % value


# The columns of table.csv.
CSV = {
    "group": lambda row: row.group,
    "configuration": lambda row: row.name,
    **{name: lambda row, name=name: row.format(name) for name in ("rule", "weights", "m", "v")},
    **{name: lambda row, name=name: shown(row.any(name), "%.4g") for name in ("state_bytes", "weights_bytes")},
    "seeds_done": lambda row: len(row.done),
    "seeds": lambda row: row.seeds,
    "final_loss": lambda row: shown(row.loss, "%.6f"),
    "baseline": lambda row: row.baseline,
    "difference": lambda row: shown(row.difference, "%.6f"),
    "standard_error": lambda row: shown(row.error, "%.6f"),
    "pairs": lambda row: row.pairs,
    "tokens_per_second": lambda row: shown(row.mean("tokens_per_second"), "%.0f"),
    "runs_sharing": lambda row: row.sharing or "",
    "memory_mib": lambda row: shown(row.any("memory_mib"), "%.1f"),
    "skipped_steps": lambda row: sum(record["skipped"] for record in row.records.values()),
    "status": lambda row: row.status(),
}


def csv_text(table):
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV)
    writer.writerows([cell(row) for cell in CSV.values()] for row in table)
    return out.getvalue()


def speed_text(row):
    """Returns tokens a second as text."""
    speed = row.mean("tokens_per_second")
    return "" if speed is None else f"{speed / 1e6:.3f}M" if speed >= 1e6 else f"{speed / 1e3:.1f}k"


def memory_text(row):
    memory = row.any("memory_mib")
    return "" if memory is None else f"{memory / 1024:.2f} GiB" if memory >= 1024 else f"{memory:.0f} MiB"


def alone(row, text):
    """Puts a figure in parentheses if runs shared a GPU: time and the driver's memory are then theirs too."""
    return f"({text})" if text and row.sharing > 1 else text


def differs_text(row):
    if row.name == row.baseline:
        return "baseline"
    return shown(row.difference, "%+.4f") + " (unpaired)" * (row.difference is not None and row.pairs == 0)


# The columns of table.md.
HEADINGS = {
    "configuration": lambda row: row.name,
    **{name: lambda row, name=name: row.format(name) for name in ("weights", "m")},
    "v": lambda row: row.format("v") or ("none" if row.records else ""),
    "state B": CSV["state_bytes"],
    "weights B": CSV["weights_bytes"],
    "val loss": lambda row: shown(row.loss, "%.4f"),
    "− baseline": differs_text,
    "± s.e.": lambda row: shown(row.error, "%.4f"),
    "n": lambda row: str(len(row.done)) + (f" ({row.pairs} pairs)" if 0 < row.pairs < len(row.done) else ""),
    "baseline": lambda row: row.baseline if row.name != row.baseline else "",
    "tokens/s": lambda row: alone(row, speed_text(row)),
    "memory": lambda row: alone(row, memory_text(row)),
    "": lambda row: "" if row.status() == "done" else row.status(),
}


def cells(row):
    return [cell(row) for cell in HEADINGS.values()]


def groups(table):
    """Returns {group: its rows} in the order of the file."""
    result = {}
    for row in table:
        result.setdefault(row.group, []).append(row)
    return result


def markdown(table, title, lines, pictures, legend):
    """Returns the table in Markdown, one section per group, and the pictures."""
    text = [f"# {title}", "", *[f"{line}  " for line in lines], ""]
    for group, members in groups(table).items():
        text += [f"## {group}", "", "| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
        text += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in members]
        text.append("")
    text += [f"![{name}]({name})" for name in pictures]
    return "\n".join([*text, *[""] * bool(pictures), legend]) + "\n"
