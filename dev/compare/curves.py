"""Makes curves over tokens of the rows of table.py: means of seeds, paired differences, the baseline's noise. Finds the
Pareto front."""

import statistics


def tokens(row, step):
    """Returns the tokens of so many steps or, in a study of `seconds`, the seconds that they take."""
    return step * row.any("tokens_per_step") / (row.mean("tokens_per_second") if row.seconds else 1)


def by_step(records, kind):
    """Returns {step: [loss of each record]} of the steps that all records have."""
    each = [{step: loss for step, loss in record[kind] if loss is not None} for record in records]
    steps = sorted(set.intersection(*map(set, each))) if each else []
    return {step: [losses[step] for losses in each] for step in steps}


def loss_curve(row, kind="val"):
    """Returns (tokens, mean over the seeds that are done or, if none is, over those that diverged, up to there)."""
    points = by_step(row.drawn.values(), kind)
    return [tokens(row, step) for step in points], [statistics.fmean(losses) for losses in points.values()]


def difference_curve(row, base, kind="val"):
    """Returns (tokens, difference to the baseline), of the pairs of one seed, else of the means."""
    seeds = [seed for seed in row.done if seed in base.done]
    if seeds:
        mine, its = by_step([row.done[s] for s in seeds], kind), by_step([base.done[s] for s in seeds], kind)
    else:
        mine, its = by_step(row.done.values(), kind), by_step(base.done.values(), kind)
    steps = [step for step in mine if step in its and step > 0]
    return [tokens(row, s) for s in steps], [statistics.fmean(mine[s]) - statistics.fmean(its[s]) for s in steps]


def band(base):
    """Returns (tokens, -s, s), where s is the standard deviation of the baseline's seeds; empty if it has one seed."""
    points = {
        step: losses for step, losses in by_step(base.done.values(), "val").items() if step > 0 and len(losses) > 1
    }
    spread = [statistics.stdev(losses) for losses in points.values()]
    return [tokens(base, step) for step in points], [-s for s in spread], spread


def difference_label(row, baseline):
    """Returns its name with the value at which the curve ends, and its baseline if that is not the study's."""
    to = "" if row.baseline == baseline else f" to {row.baseline}"
    return row.name + ("" if row.difference is None else f" ({row.difference:+.4f}{to})")


def front(table):
    """Those of the table's first group that no other of it beats in bytes and loss at once, by bytes. Other groups may
    differ in more than formats, and one of many single runs is good by luck, as are the seeds that did not diverge."""
    best, ended = [], [row for row in table if row.done and row.whole and row.group == table[0].group]
    for row in sorted(ended, key=lambda row: (row.bytes, row.level, row.name)):
        if not best or row.level < best[-1].level:
            best.append(row)
    return best
