#!/usr/bin/env python3
"""Writes the figures of the READMEs from the results that they come from.

    make tables                      after a file of results, a preset or a format changed
    python3 dev/tables.py --check    writes nothing; status 1 if a figure is another (dev/unit/test_readme.py)

tables() has the figures of each table below <!--tables:NAME-->: for each row, which is found by how one of its cells
begins, the last cells, or None for one that is written by hand. SENTENCES has sentences and, from of_runs() and of_texts(),
their figures. Who adds a row to such a table, or changes such a sentence, does the same here; what is only in one of the two
is an error.

Results are runs.jsonl and table.csv of dev/compare/results, tables of .md files, and what ./train says of its formats.
"""

import csv
import json
import math
import re
import subprocess
import sys
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from string import Formatter

from problem import Problem, answered

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "dev/compare/results"
README, COMPARE, KERNELS, OPTIM = "README.md", "dev/compare/README.md", "kernels/README.md", "optim/README.md"
SPEED, COPY, FIRST = "dev/results/speed.md", "dev/results/optim_speed.md", "dev/results/first_run.md"
SCALING, LARGEST = "dev/results/scaling.md", "dev/results/largest.md"
OF_COPY = "![Share of the copy"  # the table behind it
ADAMW = "adamw16 adamw8 adamw8e adamw8c adamwfp8 flash24 adamw4 adamw4d adamw4l fp8w8e int8w4".split()

# Configurations of rows whose cell is not already their name.
PRODUCTS = {
    "layers (": "layers",
    "layers and head |": "layers and head",
    "`--preset fp8`": "preset fp8, fp8",
    "the same formats": "preset fp8, bf16",
}
HEADS = {"[Wikipedia]": "gpt2_head", "[Gutenberg]": "gpt2_head_gutenberg", "Wikipedia, [": "gpt2_fp8_524k"}
FIVE = {
    "`recipe`": ["recipe"],
    "the same with `--matmul": ["recipe fp8, head too"],
    "the first with `--preset": ["muon8"],
    "the second with `--rule": ["normuon, fp8, head too"],
    "normuon with cautious": ["normuon, cautious decay", "normuon, cautious decay, fp8, head too"],
    "`adamw32`": ["adamw32"],
    "the same with `--preset": ["adamw4l"],
    "llm.c with": ["llm.c, 65,536 tokens a step, rate 0.0012"],
    "llm.c, rates": [f"llm.c, 65,536 tokens a step, rate {rate}" for rate in ("0.0018", "0.0024", "0.0006")],
    "the first with 32": ["32k tokens a step"],
}
MUON = {f"`{name}`": name for name in "adamw32 muon muon8 muon4 adafactor8 rmnp4 came8 galore8 apollo-mini".split()}
MUON |= {"`muon8 --weights": "muon8 lin8:sr", "the same": "galore8 rank 192"}
MUON_124M = {"`adamw32`": "adamw32", "`muon` | 0.0012": "muon", "`muon` | 0.0024": "muon lr 0.0024", "`muon4`": "muon4"}
MUON_124M |= {"`muon8 --weights": "muon8 lin8:sr lr 0.0024", "`muon8`": "muon8 lr 0.0024", "`muon8w8`": "muon8w8 lr 0.0024"}


@cache
def study(name):
    """Returns {configuration: row of its table.csv}."""
    with (RESULTS / name / "table.csv").open(newline="") as file:
        return {row["configuration"]: row for row in csv.DictReader(file)}


@cache
def runs(name, file="runs.jsonl"):
    """Returns {configuration: {seed: record}} of the runs that are done."""
    found = {}
    for record in map(json.loads, (RESULTS / name / file).read_text().splitlines()):
        if record["status"] == "done":
            found.setdefault(record["name"], {})[record["seed"]] = record
    return found


def md(path, after, begin, columns):
    """Returns the cells, `columns` or more, of the row that begins so, in the first table behind the text `after`."""
    text = (ROOT / path).read_text()
    table = re.search(r"^(\|.*\n)+", text[text.index(after) :], re.M) if after in text else None
    for line in table.group().splitlines() if table else ():
        if line.startswith("| " + begin):
            cells = [cell.strip() for cell in line[1:-1].split("|")]
            if len(cells) < columns:
                raise Problem(f"{path}: the row {begin!r} has {len(cells)} cells, and dev/tables.py reads {columns}")
            return cells
    raise Problem(f"{path} has no row {begin!r} behind {after!r}")


def number(text):
    found = re.search(r"-?[\d,]*\.?\d+", text)
    if not found:
        raise Problem(f"the results have {text!r} where dev/tables.py reads a number; write the number there again")
    return float(found.group().replace(",", ""))


@cache
def listed(option, heading="--"):
    """Returns {name: columns} of what ./train lists below a heading."""
    text = subprocess.run([ROOT / "train", option], capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in text.partition(heading)[2].split("\n--")[0].splitlines() if line[:2] == "  "]
    return {re.sub(r"/\d+$", "", words[0]): words[1:] for words in lines if len(words) > 3}


def rounded(value, digits, sign=""):
    """Returns a number with so many digits behind the point; what lies in the middle is rounded away from 0."""
    return f"{value + math.copysign(1e-9, value):{sign}.{digits}f}"


def size(value):
    return f"{value:g}" if value == round(value) else rounded(value, 2)


def held(name, configuration):
    """Returns the bytes of weights and of states of a configuration."""
    return [float(study(name)[configuration][key]) for key in ("weights_bytes", "state_bytes")]


def cost(name, configuration, sign="+"):
    """Returns a configuration's difference to its baseline, with its error, and the number of pairs; "", "" without runs."""
    row = study(name).get(configuration, {"difference": ""})
    if not row["difference"]:
        return ["", ""]
    error = f" ± {rounded(float(row['standard_error']), 3)}" if row["standard_error"] else ""
    return [rounded(float(row["difference"]), 3, sign) + error, row["pairs"]]


def pairs(name, configuration, other):
    """Returns the differences of the final losses of two configurations, one a seed that both have."""
    mine, base = runs(name)[configuration], runs(name)[other]
    return [mine[seed]["final_loss"] - base[seed]["final_loss"] for seed in sorted(mine) if seed in base]


def loss(name, configuration):
    return float(study(name)[configuration]["final_loss"])


def track(name):
    """Returns the runs of five minutes of a configuration, ours or llm.c's, in the order of their seeds."""
    found = runs("gpt2_track", "llmc.jsonl" if name.startswith("llm.c") else "runs.jsonl")[name]
    return [found[seed] for seed in sorted(found)]


def tokens(run):
    """Returns the tokens of a run until its last validation."""
    return run["val"][-1][0] * run["tokens_per_step"]


def crossing(run, value):
    """Returns the step in which a run reaches a validation loss, on straight lines between its validations; None: never."""
    for (begin, above), (end, below) in zip(run["val"], run["val"][1:]):
        if below <= value:
            return begin + (above - value) / (above - below) * (end - begin)
    return None


def against_adamw32(name, configuration):
    """Returns a loss, the difference to adamw32's, and the share of the steps in which that one's loss is reached."""
    mine, base = runs(name)[configuration], runs(name)["adamw32"]
    if configuration == "adamw32":
        return [rounded(loss(name, configuration), 3), "", "100 %"]
    steps = [crossing(run, base[seed]["final_loss"]) for seed, run in mine.items() if seed in base]
    share = "" if None in steps else f"{100 * fmean(steps) / base[1]['steps']:.0f} %"
    return [rounded(loss(name, configuration), 3), rounded(fmean(pairs(name, configuration, "adamw32")), 3, "+"), share]


def muon_preset(name):
    """Returns the cells of README.md for a matrix of muon's: bytes, difference to adamw32 (muon8w8: to muon8), seeds."""
    row = listed("--list-presets")[name]
    weights = float(listed("--list-formats", "--weights")[row[1]][2])
    stored = f"{size(weights)} + {size(float(row[4]) - weights)}"
    if name == "muon8w8":
        difference, count = cost("d6_muon8w8", name, "")
        return [stored, f"{difference} above `muon8`", count]
    base, found = study("d6_muon")["adamw32"], pairs("d6_muon", name, "adamw32")
    error = float(base["standard_error"]) * math.sqrt(int(base["pairs"]) / len(found))  # pairs scatter by the pooled sd
    return [stored, f"{rounded(fmean(found), 3)} ± {rounded(error, 3)}", str(len(found))]


def best_of_rules():
    """Returns {rule: [lowest loss, its rate]} of the rules that have three rates or more."""
    found = {}
    for name, row in study("d6_rules").items():
        rule, _, rate = name.rpartition(" ")
        if row["final_loss"] and re.fullmatch(r"[\d.]+", rate):
            found.setdefault(rule, []).append((float(row["final_loss"]), rate))
    best = {}
    for rule, (low, rate) in ((rule, min(rates)) for rule, rates in found.items() if len(rates) > 2):
        name, _, more = rule.partition(" ")
        best[f"`{name}`" + f", {more}" * bool(more) + " |"] = [rounded(low, 3), rate]
    return best


def speeds():
    """Returns the two tables of kernels/README.md: {row: figures of four sizes}."""
    one = {row: md(SPEED, "llm.c runs with", row, 5)[1:] for row in ("nibble, fp32", "nibble, bf16", "llm.c |", "model FLOP")}
    over = [[number(a) / number(b) for a, b in zip(one[row], one["llm.c |"])] for row in ("nibble, fp32", "nibble, bf16")]
    one["fp32, bf16 gradients"] = [f"{a:.3f}, {b:.3f}" for a, b in zip(*over)]
    one["model FLOP"] = [f"{number(cell)} %" for cell in one["model FLOP"]]
    two = {row: md(SPEED, "and without --matmul fp8 too", row, 5)[1:] for row in ("fp8 |", "fp8, the head", "bf16 |")}
    two["fp8 over"] = [f"{number(a) / number(b):.2f}" for a, b in zip(two["fp8 |"], two["bf16 |"])]
    return one, two


def names_in(table):
    """Returns the first cells of a table of optim/README.md."""
    return re.findall(r"^\| (`.*?) \|", table_of((ROOT / OPTIM).read_text(), table)[1], re.M)


def unlisted(table, heading, cells):
    """Returns a row for each name that ./train lists and a table of optim/README.md lacks; `cells` makes it of columns."""
    shown = re.findall(r"`([\w-]+)", " ".join(names_in(table))) + ["name", "NAME"]  # the list's own words
    new = {name: columns for name, columns in listed("--list-formats", heading).items() if re.fullmatch(r"[\w-]+", name)}
    return {f"`{name}` |": cells(*columns) for name, columns in new.items() if name not in shown}


def state_cells(_, block, size, *words):
    """Returns a row of the states, whose note begins with what it is for."""
    uses, note = re.fullmatch(r"(?:for (m or v|[mv])\W*)?(.*)", " ".join(words)).groups()
    return [(uses or "m or v").replace(" or", ","), block, rounded(float(size), 3), note]


def formats(name, heading, digits, cells_after):
    """Returns the rows of a table of optim/README.md: {formats: their block, bytes}."""
    rows = {}
    for row in names_in(name):
        columns = [listed("--list-formats", heading).get(each) for each in re.findall(r"`([^`]+)`", row)]
        sizes = [rounded(float(each[2]), digits).rstrip("0").rstrip(".") for each in columns if each]
        figures = [", ".join(sizes if len(set(sizes)) > 1 else sizes[:1])]
        block = [columns[0][1]] if name == "states" and columns[0] else []
        rows[row + " |"] = (block + figures if sizes else [None, None]) + [None] * cells_after
    return rows


def ended(some):
    """Returns the mean final loss of some runs, with the standard error and the number of seeds if there are several."""
    losses = [run["final_loss"] for run in some]
    if len(losses) == 1:
        return f"{losses[0]:.3f}"
    return f"{fmean(losses):.3f} ± {stdev(losses) / math.sqrt(len(losses)):.3f} ({len(losses)} seeds)"


def by_bytes():
    """Returns the tables that say what fewer bytes cost: README.md's, and those of dev/compare/README.md for AdamW and fp8."""
    stored = {name: [" + ".join(map(size, held("d6", name)))] for name in ["adamw32", *ADAMW]}
    costs = {name: cost("d6", name) + cost("d6", name + " beta2 0.999") + cost("gpt2", name) for name in ADAMW}
    presets = {name: stored[name] + cost("d6", name, "") for name in ("adamw8e", "adamw4l", "fp8w8e", "int8w4")}
    presets |= {"adamw32": stored["adamw32"] + ["0", study("d6")["adamw32"]["seeds_done"]]}
    presets |= {name: muon_preset(name) for name in ("muon", "muon8", "muon8w8")}
    heads = {"Wikipedia (": [None, None]}  # its records were not kept; dev/LOG.md has it
    for row, name in HEADS.items():
        differences = [rounded(pair, 3, "+") for pair in pairs(name, "layers and head", "bf16")]
        few = [", ".join(differences), str(len(differences))]
        heads[row] = cost(name, "layers and head") if len(differences) > 2 else few
    return {
        "presets": {f"`{name}`": cells for name, cells in presets.items()},
        "costs": {f"`{name}`": stored[name] + cells for name, cells in costs.items()},
        "products": {row: cost("d6_fp8", name) + cost("gpt2_fp8", name) for row, name in PRODUCTS.items()},
        "head": heads,
    }


def tables():
    """Returns {name of a table: {how a cell of a row begins: the last cells of the row}}."""
    five, muon, copy = {}, {}, {}
    for row, names in FIVE.items():
        tracks = [track(name) for name in names]
        five[row] = ["; ".join(f"{tokens(some[0]) / 1e6:.0f}M" for some in tracks), "; ".join(map(ended, tracks))]
    for row, name in MUON.items():
        stored = listed("--list-presets")["muon8w8" if name == "muon8 lin8:sr" else name.split()[0]][4]
        shown = size(float(stored)) if name[:3] not in ("gal", "apo") else ""  # their bytes go by the rank
        muon[row] = [shown, study("d6_muon")[name]["seeds_done"], *against_adamw32("d6_muon", name)]
    for name in ("adamw32", "adamw8e", "adamw4l", "fp8w8e", "int8w4", "adafactor8"):
        row = md(COPY, "Rules by rows sum up" if name == "adafactor8" else OF_COPY, name + " |", 5)
        copy[f"`{name}`"] = [row[1], row[2] + " %", "" if name == "adafactor8" else row[4] + " %"]
    speed, speed_fp8 = speeds()
    return by_bytes() | {
        "five": five,
        "rules": best_of_rules(),
        "muon": muon,
        "muon_124m": {row: against_adamw32("gpt2_muon", name) for row, name in MUON_124M.items()},
        "speed": speed,
        "speed_fp8": speed_fp8,
        "copy": copy,
        "weights": formats("weights", "--weights", 2, 2),
        "states": formats("states", "--m, --v", 3, 1) | unlisted("states", "--m, --v", state_cells),
        "rule_names": {f"{row} |": [None] for row in names_in("rule_names")} |
                      unlisted("rule_names", "--rule\n", lambda *words: ["", " ".join(words)]),
    }


SENTENCES = {
    README: """
        --data data/corpus --steps {recipe[steps]}
        124M on {trained:.0f}M of them
        Wikipedia ({corpus:.0f}M tokens, {epochs:.1f} times) it reached a validation loss of {recipe[final_loss]:.2f}
        and {recipe_fp8[final_loss]:.2f} with `--matmul fp8`
        10 billion tokens take about {hours:.1f} hours
        also reached {muon8[final_loss]:.2f}, with {muon8_bytes:.1f} bytes a parameter
        bytes a parameter (weights and states) in place of {bytes:.1f}
        loss {default:.4f} (best {default:.4f}) {bits:.4f} bits
        3 to 4 minutes, loss {default:.2f} |
        with `adamw32` ended {muon_gain:.2f} higher (one seed)
        `muon8w8` holds {muon8w8_held:.2f} bytes a parameter at 1558M
        10.8M parameters, {on_gpu[4]} s, loss {on_gpu[2]} |
        fp8 beside llm.c | {faster[0]} / {faster[3]}, {beside[0]} / {beside[3]} times llm.c
        is {fp8_speed:.2f} times as fast as bf16 at 124M
        #products-in-fp8) {fp8[0]} ± {fp8[1]}, six seeds
        {largest[0]:.0f} billion parameters train on one H200, {largest[1]:.0f} billion on
        {four:.2f} times one GPU's speed
        has about {core:,} lines
        tokens/s, bf16 | {bf16[0]} / {bf16[3]} |
        ratio to llm.c's | {over[0]} / {over[2]}; with bf16 gradients {over[1]} / {over[3]} |
        | {copy_low:.0f} to {copy_high:.0f} % of the speed of a memory copy
    """,
    OPTIM: """
        half of the rank for `galore8`: {galore[1]:+.3f} in place of {galore[0]:+.3f} above adamw
    """,
    KERNELS: """
        reaches {long_heads[1]} and {long_heads[3]} TFLOP/s at B 8, T 4096
        (forward, backward), {long_heads[5]} times cuDNN; at T 1024 with heads of 64 it is {short_heads[5]} times
    """,
    COMPARE: """
        beta2 0.999 ended {beta2[0]} ± {beta2[1]} below 0.95 in d6
        ({corpus:.0f}M tokens of Wikipedia, read {read_least:.1f} to {read_most:.1f} times
        in 300 seconds {long[0]:.3f} (rate 0.0024) and {long[1]:.3f} (0.0048
        llm.c's {llmc[final_loss]:.3f} is reached after {until[0]:.0f} seconds in bf16, and {until[1]:.0f} in fp8
        end at {apollo[0]:.3f}, {apollo[1]:.3f} and {apollo[2]:.3f}, where `adamw32` has {apollo[8]:.3f}
        With a gap of 200 it ends at {apollo[6]:.3f}, without limiter at {apollo[7]:.3f}
        `apollo-mini` takes half ({apollo[4]:.3f}
        it ends {muon8w8[0]} ± {muon8w8[1]} above `muon8`
        and {embeddings:.3f} higher still if
        4 bits cost {muon4[0]} ± {muon4[1]} in d6
        `last` {last[0]} ± {last[1]}, `tensor` {tensor[0]} ± {tensor[1]}, `--clip 0` {none[0]} ± {none[1]}.
        clipping `adamw32` ends {limits[0]:.2f} lower, `adafactor8` {limits[1]:.2f} and `came8` {limits[2]:.2f}
        without it {limits[3]:.2f} lower, {limits[4]:.2f} higher and {limits[5]:.2f} lower
    """,
}


def of_runs():
    """Returns figures of sentences from the runs of dev/compare."""
    names = {"recipe": "recipe", "recipe_fp8": "recipe fp8, head too", "muon8": "muon8", "llmc": FIVE["llm.c with"][0]}
    means = {key: track(name)[0] | {"final_loss": fmean(run["final_loss"] for run in track(name))} for key, name in names.items()}
    recipe, corpus = means["recipe"], number(means["recipe"]["data"].partition("  ")[2])  # in millions of tokens
    read = [tokens(track(name)[0]) / 1e6 / corpus for some in FIVE.values() for name in some]
    speed = {key: means[key]["tokens_per_second"] / means[key]["tokens_per_step"] for key in ("recipe", "recipe_fp8")}
    apollo = [f"apollo {rate}, others 0.003" for rate in ("0.0015", "0.00075", "0.000375")]
    apollo += [f"apollo-mini {rate}, others 0.003" for rate in ("0.006", "0.0015", "0.000375")]
    apollo += [f"{apollo[1]}, {one}" for one in ("gap 200", "no limiter")] + ["adamw32"]
    limits = [f"{name}, clip {clip}, limit " for clip in (1, 0) for name in ("adamw32 0.003", "adafactor8 0.003", "came8 0.002")]
    costs = {"fp8": ("gpt2_head", "layers and head"), "beta2": ("d6", "adamw32 beta2 0.999"), "muon4": ("d6_muon", "muon4")}
    costs |= {"muon8w8": ("d6_muon8w8", "muon8w8"), "none": ("d6_clip", "no clipping")}
    costs |= {name: ("d6_clip", name) for name in ("last", "tensor")}
    return means | {
        "corpus": corpus,
        "trained": tokens(recipe) / 1e6,
        "epochs": tokens(recipe) / 1e6 / corpus,
        "read_least": min(read),
        "read_most": max(read),
        "hours": 1e10 / recipe["tokens_per_second"] / 3600,
        "bytes": sum(held("gpt2_track", "recipe")),
        "muon8_bytes": sum(held("gpt2_track", "muon8")),
        "until": [crossing(means[key], means["llmc"]["final_loss"]) / speed[key] for key in speed],
        "long": [run[1]["final_loss"] for name, run in runs("gpt2_track", "llmc.jsonl").items() if "524,288" in name],
        "apollo": [loss("d6_apollo", name) for name in apollo],
        "limits": [abs(loss("d6_limiter", name + "1.01") - loss("d6_limiter", name + "0")) for name in limits],
        "embeddings": fmean(pairs("d6_muon8w8", "muon8w8, embeddings lin8", "muon8w8")),
        "galore": [fmean(pairs("d6_muon", name, "adamw32")) for name in ("galore8", "galore8 rank 192")],
    } | {key: cost(*of, "")[0].removeprefix("-").split(" ± ") for key, of in costs.items()}


def of_texts():
    """Returns figures of sentences from tables of .md files."""
    speed, codes = speeds()
    copy = [number(cell) for name in ["adamw32", *ADAMW] for cell in md(COPY, OF_COPY, name + " |", 5)[2:5]]
    default, bits = map(number, md(FIRST, "# What", "default run |", 4)[2:4])
    return {
        "default": default,
        "bits": bits,
        "muon_gain": number(md(FIRST, "# What", "`--preset adamw32`, H200", 3)[2]) - number(md(FIRST, "# What", "default run, H200", 3)[2]),
        "on_gpu": md(FIRST, "# What", "default run, H200", 5),
        "fp8_speed": number(codes["fp8 |"][0]) / number(codes["bf16 |"][0]),
        "muon8w8_held": number((ROOT / LARGEST).read_text().partition("`muon8w8` is planned with")[2]),
        "largest": [number(md(LARGEST, "One card", row, 3)[2]) for row in ("H200", "H100 80GB | `--size")],
        "four": 0.04 * number(md(SCALING, "`--gpus 1,2,4`", "gpt2, 64 x 4 | 4 | states", 6)[5]),
        "core": round(int(re.search(r"^core +(\d+)", (ROOT / "dev/limits.txt").read_text(), re.M).group(1)), -2),
        "faster": md(SPEED, "in turns on one card", "nibble, fp8 |", 5)[1:],
        "beside": md(SPEED, "in turns on one card", "fp8 over llm.c |", 5)[1:],
        "bf16": speed["nibble, fp32"],
        "over": [f"{float(part):.2f}" for part in ", ".join(speed["fp32, bf16 gradients"][::3]).split(", ")],
        "copy_low": min(copy),
        "copy_high": max(copy),
        "long_heads": md(SPEED, "## Attention", "8, 16, 4096, 128", 6),
        "short_heads": md(SPEED, "## Attention", "64, 12, 1024, 64", 6),
    }


def table_of(text, name):
    """Returns what comes before the rows of a table, the rows, and what comes after."""
    head = re.search(rf"<!--tables:{name}-->\n\|.*\n\|[-|]+\n", text)
    if not head:
        raise Problem(f"no table stands below <!--tables:{name}-->")
    end = head.end() + re.match(r"(\|.*\n)*", text[head.end() :]).end()
    return text[: head.end()], text[head.end() : end], text[end:]


def with_table(text, name, rows):
    """Returns a text whose table of this name has these figures."""
    before, lines, after = table_of(text, name)
    lines, columns = lines.splitlines(), before.splitlines()[-1].count("|") - 1
    left = set(range(len(lines)))
    for begin, figures in rows.items():
        which = [i for i, line in enumerate(lines) if f"| {begin}" in line]
        if not which and len(figures) == columns - 1:  # a new row
            which, lines = [len(lines)], [*lines, f"| {begin}"]
        if len(which) != 1:
            raise Problem(f"{len(which)} rows of the table {name} have a cell that begins with {begin!r}, not one")
        cells = [cell.strip() for cell in lines[which[0]][1:-1].split("|")]
        cells += [""] * (columns - len(cells))
        cells[-len(figures) :] = [old if new is None else new for old, new in zip(cells[-len(figures) :], figures)]
        lines[which[0]] = "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)
        left -= {which[0]}
    if left:
        raise Problem(f"dev/tables.py has no figures for the row {lines[min(left)]!r} of the table {name}")
    return before + "".join(line + "\n" for line in lines) + after


def with_sentence(text, sentence, figures):
    """Returns a text in which these figures stand in a sentence, which may be broken into lines anywhere."""
    parts = list(Formatter().parse(sentence))
    words = [r"\s+".join(map(re.escape, literal.split(" "))) for literal, *_ in parts]
    pattern = r"([+-]?\d[\d,.]*(?<=\d))".join(f"({each})" for each in words + [""] * (parts[-1][1] is not None))
    found = list(re.finditer(pattern, text))
    if len(found) != 1:
        raise Problem(f"{len(found)} sentences are {sentence!r}, not one")
    shown = [f"{{{field}:{spec}}}".format_map(figures) for _, field, spec, _ in parts if field is not None]
    new = "".join(a + b for a, b in zip(found[0].groups()[::2], shown + [""]))
    return text[: found[0].start()] + new + text[found[0].end() :]


def with_figures(path, text, made, figures):
    """Returns the text of a README with its figures, and takes its tables out of `made`."""
    try:
        for name in re.findall(r"<!--tables:(\w+)-->", text):
            text = with_table(text, name, made.pop(name, {}))
        for sentence in filter(None, map(str.strip, SENTENCES[path].splitlines())):
            text = with_sentence(text, sentence, figures)
    except Problem as problem:
        raise Problem(f"{path}: {problem}") from None
    return text


def main():
    check, typed = "--check" in sys.argv[1:], sys.argv[2:]  # --check README: its text comes by the standard input
    try:
        made, figures, differ = tables(), of_runs() | of_texts(), 0
    except KeyError as name:
        raise Problem(f"the results have no {name}, which dev/tables.py asks for; add it there or take it out here") from None
    for path in SENTENCES:
        old = sys.stdin.read() if path in typed else (ROOT / path).read_text()
        new = with_figures(path, old, made, figures)
        was, now = old.splitlines(), new.splitlines()
        for kind, i, end, first, last in SequenceMatcher(None, was, now, autojunk=False).get_opcodes():
            if kind != "equal":
                differ += 1
                lines = [f"    has     {line}" for line in was[i:end]] + [f"    results {line}" for line in now[first:last]]
                print(f"{path}:{i + 1}", *lines, sep="\n")
        if new != old and not check:
            (ROOT / path).write_text(new)
    if made:
        raise Problem(f"no README has <!--tables:{next(iter(made))}-->; put it above the table")
    if differ and check:
        print("tables: error: these figures are not those of the results; type make tables", file=sys.stderr)
    return differ > 0 and check


if __name__ == "__main__":
    sys.exit(answered("tables", main))
