#!/usr/bin/env python3
"""Tests of what dev/compare says of runs: errors, tables, pictures, and the studies that are in the repository.
One line a case, `N passed, N failed, N skipped` last; exit status 1 when a case fails.

    .venv/bin/python dev/unit/test_report.py [-k SUBSTRING]

The cases run as those of test_compare.py.
"""

import json
import math
import os
import re
import shutil
import statistics
import sys

from cases import json_lines, run_cases
from compare_case import COMPARE, SWEEP, Case, missing_tools

REPORT = ("table.csv", "table.md", "loss.png", "difference.png", "bytes.png")


def test_diverged_and_dead_runs(case):
    """Both are in the table with their reason, and the others go on. Only the dead one is tried again."""
    # By 64 tokens a step, at the default rate one seed of sixteen did end above its beginning after 20.
    text = SWEEP.replace("steps = 4", "steps = 20\nlr = 3e-4") + '[[run]]\nname = "hot"\nlr = 1000\nclip = 0\n'
    text += 'on-nonfinite = "stop"\n[[run]]\nname = "dead"\nseed = 13\n[[run]]\nname = "refused"\nseed = 14\n'
    text += '[[run]]\nname = "last"\nm = "bf16"\n'
    mended = case.folder / "mended"
    trainer = case.trainer(
        f'case "$*" in *--dry-run*) ;; *--seed=13*) [ -e {mended} ] || kill -9 $$ ;; '
        '*--seed=14*) echo "train: error: the disk is full" >&2; exit 2 ;; esac'
    )
    said = case.run(text, "--trainer", trainer, status=1)
    assert "3 done, 1 diverged, 2 died" in said, said
    status = {name: row["status"] for name, row in case.rows().items()}
    assert status["hot"].startswith("diverged: step ") and "the norm of the gradient" in status["hot"], status
    assert (
        status["dead"] == "died: killed by signal 9 at step 0 of 20" and status["refused"] == "died: the disk is full"
    )
    assert [status[name] for name in ("a", "b", "last")] == ["done"] * 3 and case.rows()["hot"]["final_loss"] == ""
    table = (case.out / "table.md").read_text()
    assert all(words in table for words in (status["hot"], status["dead"], status["refused"])), table
    mended.touch()
    said = case.run(text, "--trainer", trainer, status=1)
    assert "4 of 6 runs are done" in said and "1 done, 1 died" in said, said
    assert case.rows()["dead"]["status"] == "done"


def test_ends(case):
    """How runs are judged: a kill beside a skipped step is no divergence, and a loss that rose is no result."""
    from record import outcome

    def log(first, last, train=4.0):
        return {"train": [{"step": 9, "loss": train}], "val": [{"step": 0, "loss": first}, {"step": 9, "loss": last}]}

    sentence = "step 9: the loss is nan and the norm of the gradient inf"
    assert outcome(0, 9, log(5.4, 4.0), "") == ("done", "")
    assert outcome(0, 9, log(5.4, 4.0, None), "") == ("done", ""), "a last step that was skipped"
    assert outcome(0, 9, log(5.4, 5.45), "") == ("done", ""), "a short run"
    assert outcome(0, 9, log(5.4, 104.0), "") == ("diverged", "the validation loss rose from 5.4000 to 104.0000")
    assert outcome(0, 9, log(5.4, None), "")[0] == "diverged"
    told = "CUDA error cudaErrorX: it broke\n  call()\n  at common.cuh:309, rank 0, device 0\n"
    assert outcome(1, 9, log(5.4, 5.0), told) == ("died", "CUDA error cudaErrorX: it broke; call(); at common.cuh:309, rank 0, device 0")
    assert outcome(2, 99, log(5.4, 4.0, None), f"train: error: {sentence}; type a smaller --lr") == ("diverged", sentence)
    assert outcome(1, 99, log(5.4, 4.0, None), "train: error: out of memory\n") == ("died", "out of memory")
    assert outcome(-9, 99, log(5.4, 4.0, None), "")[0] == "died" and outcome(0, 99, log(5.4, 4.0, None), "")[0] == "died"


def test_lines_that_are_no_records(case):
    case.run(SWEEP)
    kept = case.record("a_s1")
    for line in ("garbage", '{"seed": 1}', "[1]"):
        case.put(kept, line)
        assert "runs.jsonl:2 is no record of a run; remove the line" in case.run(SWEEP, "--report-only", status=2)


def test_names_are_shown_as_they_are(case):
    """What matplotlib would read as formulas or leave out, and a name that is too long for a file."""
    names = ["cost $\\foo$ x", "$5 and $6", "_hidden", "n" * 300]
    text = SWEEP.replace("steps = 4", "steps = 2")
    text += "".join(f"[[run]]\nname = {json.dumps(name)}\nbeta1 = 0.{i + 1}\n" for i, name in enumerate(names))
    said = case.run(text)
    assert "6 done" in said and "Warning" not in said, said
    assert all((case.out / name).exists() for name in REPORT)


def test_hung_run(case):
    """A hung run is killed and is in the table; the runs after it are run."""
    text = SWEEP + '[[run]]\nname = "hung"\nseed = 13\n'
    trainer = case.trainer('case "$*" in *--dry-run*) ;; *--seed=13*) exec sleep 600 ;; esac')
    said = case.run(text, "--trainer", trainer, "--silence", "10", status=1)
    assert "2 done, 1 died" in said, said
    assert case.rows()["hung"]["status"] == "died: hung: nothing in its log for 10 s at step 0 of 4", case.rows()["hung"]


def test_report_of_nothing_and_of_a_part(case):
    assert "holds no run" in case.run(SWEEP, "--report-only", status=2)
    case.run(SWEEP, "--only", "b")
    assert case.rows()["a"]["status"] == "not run yet" and case.rows()["b"]["difference"] == ""
    case.run(SWEEP + "beta2 = 0.9\n", "--only", "a")
    assert "1 records are of other options" in (case.out / "table.md").read_text()
    assert case.rows()["b"]["status"] == "not run yet"
    died = case.record("a_s1") | {"status": "died", "final_loss": None}
    case.put(died)
    case.run(SWEEP + "beta2 = 0.9\n", "--report-only")
    assert sorted(path.name for path in case.out.iterdir()) == ["runs.jsonl", "table.csv", "table.md"]


def test_means(case):
    """A mean is over the steps that all seeds have, and one seed has no standard error."""
    from curves import mean_curve

    two = mean_curve("two", [{1: (10, 4.0), 2: (20, 3.0), 3: (30, 2.0)}, {1: (12, 4.2), 2: (24, 3.0), 9: (90, 1.0)}])
    assert (two.x, two.seeds) == ([11, 22], 2) and math.isclose(two.y[0], 4.1) and two.y[1] == 3.0, two
    assert math.isclose(two.errors[0], 0.1) and two.errors[1] == 0.0, two.errors
    assert not mean_curve("one", [{1: (10, 5.0)}]).errors


def test_names_are_beside_their_dots(case):
    """No name lies over another one or over a dot."""
    import random

    from draw import beside, matplotlib, plt

    draw = random.Random(1)
    points = [(draw.gauss(0, 1), draw.gauss(0, 1), f"adamw{i}") for i in range(8)] + [(9, 9, "a"), (-9, -9, "b")]
    figure, axes = plt.subplots()
    axes.plot(*zip(*(point[:2] for point in points)), "o")
    beside(axes, points)
    boxes = [matplotlib.text.Text.get_window_extent(name) for name in axes.texts]
    dots = [axes.transData.transform(point[:2]) for point in points]
    assert len(boxes) == 10 and not any(box.contains(*dot) for box in boxes for dot in dots)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    plt.close(figure)


def test_rates(case):
    """A sweep of rates has a picture of them, which its table shows."""
    text = SWEEP.replace("steps = 4", "steps = 2") + '[[run]]\nname = "{rule} {lr}"\nrule = "lion"\nlr = [0.001, 0.002, 0.003]\n'
    case.run('picture = ["a", "b"]\n' + text)
    assert (case.out / "rates.png").exists() and (case.out / "picture.png").exists()
    assert (case.out / "table.md").read_text().count("![") == 5
    case.run(SWEEP.replace("steps = 4", "steps = 2"), "--report-only")
    assert not (case.out / "rates.png").exists() and not (case.out / "picture.png").exists()


def test_differences(case):
    """Differences are those of pairs, of one pair, and of runs without a common seed."""
    from table import difference, pair_scatter

    base, root, nine = {1: 3.0, 2: 3.2, 3: 3.1}, math.sqrt, {seed: 3.1 + 0.1 * (seed % 2) for seed in range(9)}
    ten, threes = {**nine, 9: 3.2}, dict.fromkeys(range(10), 3.0)
    own_of_ten = statistics.stdev([0.1, 0.2] * 5) / root(10)
    for losses, others, study, scatter, mean, error, pairs in (
        ({1: 3.1, 2: 3.2, 3: 3.3}, base, (), None, 0.1, 0.1 / root(3), 3),  # 0.1, 0, 0.2
        ({2: 3.25}, base, (), None, 0.05, 0.1 * root(2), 1),
        ({7: 3.0, 8: 3.4}, base, (), None, 0.1, root(0.08 / 2 + 0.01 / 3), 0),
        ({1: 3.5}, {1: 3.0}, (), None, 0.5, None, 1),
        ({}, base, (), None, None, None, 0),
        ({1: 3.1, 2: 3.2, 7: 9.0}, base, (), None, 0.05, 0.05, 2),  # what both have is paired: 0.1, 0
        ({1: 3.5}, {1: 3.0}, base.values(), None, 0.5, 0.1 * root(2), 1),  # a baseline of one seed scatters as the study's
        ({4: 3.5, 5: 3.7}, {1: 3.0}, base.values(), None, 0.6, root(0.02 / 2 + 0.01), 0),
        ({1: 3.5}, {1: 3.0}, [3.0], None, 0.5, None, 1),
        ({1: 3.5}, base, (), 0.02, 0.5, 0.02, 1),
        (ten, threes, (), 9.0, 0.15, own_of_ten, 10),  # ten pairs: their own; nine: the pooled one
        (nine, threes, (), 9.0, 0.1 + 0.4 / 9, 3.0, 9),
        ({1: 3.1, 2: 3.2, 3: 3.3}, base, (), 9.0, 0.1, 9.0 / root(3), 3),
        ({1: 3.1, 2: 3.2, 3: 3.3}, base, (), 0.02, 0.1, 0.1 / root(3), 3),
        # Few pairs may agree by chance, but not scatter by it; what is equal to the bit is so by none.
        ({1: 3.1, 2: 3.3001}, base, (), 0.02, 0.10005, 0.02 / root(2), 2),
        ({1: 3.0, 2: 3.2}, base, (), 0.02, 0.0, 0.0, 2),
        ({1: 3.0}, base, (), 0.02, 0.0, 0.0, 1),
    ):
        got = difference(losses, others, study, scatter)
        same = [a is b or (None not in (a, b) and math.isclose(a, b, abs_tol=1e-12)) for a, b in zip(got, (mean, error, pairs))]
        assert all(same), (losses, others, got, mean, error, pairs)
    # One pair among configurations that have several: variances 0.01 (3 pairs) and 0.04 (2 pairs), pooled by 2 and 1.
    scatter, degrees = pair_scatter([[0.1, 0.0, 0.2], [0.2, 0.2 + 0.2 * root(2)], [0.3], [], [0.0, 0.0]])
    assert math.isclose(scatter, root((2 * 0.01 + 0.04) / 3)) and degrees == 3, (scatter, degrees)
    assert pair_scatter([[0.3], [0.0, 0.0]]) == (None, 0)


def test_errors_of_two_baselines(case):
    """Each has a pool of its own; the picture's bar of what is compared to the study's baseline is the table's error."""
    from types import SimpleNamespace

    from table import rows

    def run(name, seed, baseline):
        its = {"name": name, "seed": seed, "group": "g", "baseline": baseline, "own": set()}
        return SimpleNamespace(**its, options_key=lambda: "")

    pairs = [(f"{base}{i}", base) for base in "ab" for i in range(10)]
    names = {name: [run(name, seed, base) for seed in (1, 2)] for name, base in [("a", "a"), ("b", "a"), *pairs]}
    ended = {"status": "done", "options_key": "", "resolved": {}, "device": "", "val": []}
    spread = {"a": 0.01, "b": 0.04}  # of a pair: the losses of seed 2 are off by it times √2
    loss = {(name, 1): 4.0 for name in names} | {(name, 2): 4.0 + spread[base] * math.sqrt(2) for name, base in pairs}
    records = {key: {**ended, "final_loss": 4.0} for key in ((name, 2) for name in "ab")}
    records |= {key: {**ended, "final_loss": its} for key, its in loss.items()}
    table, _ = rows(SimpleNamespace(baseline="a", seconds=0, configurations=lambda: names), records)
    for row in table[2:]:
        assert math.isclose(row.error, spread[row.baseline] / math.sqrt(2)), row
        assert row.baseline == "b" or row.level_error == row.error, row


def test_committed_reports(case):
    """The tables and pictures that are in the repository are what the records beside them give, and so are its cells."""
    folders = sorted(path.parent for path in (COMPARE / "results").glob("*/runs.jsonl"))
    for folder in folders:
        out = case.folder / folder.name
        out.mkdir()
        shutil.copy(folder / "runs.jsonl", out)
        said = case.run(COMPARE / "sweeps" / f"{folder.name}.toml", "--report-only", "--out", out, "--trainer", "none")
        assert "of other options" not in said, f"{folder.name}: {said}"
        for path in out.iterdir():
            assert (folder / path.name).read_bytes() == path.read_bytes(), f"{folder / path.name}: type --report-only"
        has_the_tables_figures(case.cells(out), case.rows(out))
    assert folders, "no study is there"


def has_the_tables_figures(cells, rows):
    """The cells of table.md are those of table.csv."""
    for name, row in rows.items():
        if not row["final_loss"]:
            continue
        its = cells[name]
        assert abs(float(its[6]) - float(row["final_loss"])) < 5.1e-5, (its, row)
        if row["difference"]:
            assert abs(float(its[7].split()[0]) - float(row["difference"])) < 5.1e-5, (its, row)
        assert its[10] == ("" if row["baseline"] == name else row["baseline"].replace("|", "\\|")), (its, row)


def has_the_logs_figures(record, folder):
    """Compares a record of 100 steps with what ./train wrote: every loss, the speed, and the banner's memory."""
    log = json_lines(folder / "log.jsonl")
    train = [line for line in log if line["type"] == "train"]
    assert record["train"] == [[line["step"], round(line["loss"], 5)] for line in train] and len(train) == 100
    assert record["val"] == [[line["step"], line["loss"]] for line in log if line["type"] == "val"]
    seconds = [line["step_s"] for line in train[10:]]
    assert math.isclose(record["tokens_per_second"], 90 * 256 / sum(seconds), rel_tol=1e-3), record["tokens_per_second"]
    memory = re.search(r"^ ?memory .* = ([\d.]+) MiB", (folder / "log.txt").read_text(), re.M)
    assert record["memory_mib"] == float(memory[1]), (record["memory_mib"], memory)


def test_ci_sweep(case):
    """Runs the sweep that CI runs, from its file to the report."""
    begin = sum(os.times()[2:4])  # of children; other programs may hold the processors
    case.run(COMPARE / "sweeps" / "ci.toml")
    seconds = sum(os.times()[2:4]) - begin
    rows = case.rows()
    assert list(rows) == ["adamw32", "adamw8c", "adamw4"] and {row["status"] for row in rows.values()} == {"done"}, rows
    base = [case.record(f"adamw32_s{seed}")["final_loss"] for seed in (1, 2, 3)]
    for name, state, weights in (("adamw8c", "2.25", "2"), ("adamw4", "1.062", "2")):
        row, record = rows[name], case.record(f"{name}_s1")
        assert (row["state_bytes"], row["weights_bytes"], row["pairs"]) == (state, weights, "1"), row
        assert abs(float(row["difference"]) - (record["final_loss"] - base[0])) < 1e-6, row
        assert abs(float(row["standard_error"]) - statistics.stdev(base) * math.sqrt(2)) < 1e-6, row
        assert record["val"][0][1] - record["final_loss"] > 1.0, "it has learned"
        has_the_logs_figures(record, case.work / f"{name}_s1")
    has_the_tables_figures(case.cells(), rows)
    assert abs(float(rows["adamw32"]["final_loss"]) - statistics.fmean(base)) < 1e-6
    for name in REPORT[2:5]:
        assert (case.out / name).read_bytes()[:4] == b"\x89PNG", name
    assert seconds < 120, f"{seconds:.0f} s of processors"


if __name__ == "__main__":
    sys.exit(run_cases(globals(), Case, missing_tools()))
