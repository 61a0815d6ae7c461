#!/usr/bin/env python3
"""Tests of the READMEs: their links lead somewhere, the options of their commands exist, and their tables have the figures
of the program and of the studies.

    python3 dev/unit/test_readme.py [-k SUBSTRING]
"""

import re
import subprocess
import sys

from cases import ROOT, csv_rows, run_cases

WORDS = {"": 1800, "optim": 3500, "kernels": 1800, "data": 2200, "dev": 900, "dev/compare": 2500, "optim/python": 900}
READMES = [ROOT / folder / "README.md" for folder in WORDS]


def train(option):
    return subprocess.run([ROOT / "train", option], capture_output=True, text=True, check=True).stdout


def tables(path, columns):
    """Returns the cells of each row of a file's tables that has so many."""
    lines = (line for line in (ROOT / path).read_text().splitlines() if line[:2] == "| ")
    return [cells for cells in ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines) if len(cells) == columns]


def test_links():
    """Each link's file exists, and has the heading that is named."""
    count = 0
    for path in READMES:
        for link in re.findall(r"\]\((?!http)([^)]+)\)", path.read_text()):
            file, _, heading = link.partition("#")
            there, count = path.parent / file if file else path, count + 1
            assert there.exists(), f"{path}: {link}"
            if there.is_dir() or not heading:
                continue
            names = [re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in there.read_text().splitlines() if line[:1] == "#"]
            assert heading in names, f"{path}: {link}"
    assert count > 40, f"{count} links"


def test_options():
    """The options of each line that calls ./train are in --help."""
    known, count = set(re.findall(r"^  (--[a-z0-9-]+)", train("--help"), re.M)), 0
    for path in READMES:
        for line in re.findall(r"^(?:    |.*`)(?:\$ )?\./train ([^`#]*)", path.read_text(), re.M):
            typed = set(re.findall(r"(?<![\w'])--[a-z][a-z0-9-]*", line))
            count += len(typed)
            assert not typed - known, f"{path}: {line}: {typed - known}"
    assert count > 40, f"{count} options"
    needs = re.findall(r'^    ROW\((?:REAL|INT), .*"[FN]", "([^"]*)"', (ROOT / "optim/README.md").read_text(), re.M)
    assert needs and all("=" in one for one in needs), needs


def test_sizes():
    """READMEs are as short as a stranger reads."""
    assert len(READMES[0].read_text().splitlines()) <= 180
    for folder, limit in WORDS.items():
        words = len((ROOT / folder / "README.md").read_text().split())
        assert words <= limit, f"{folder}/README.md has {words} words"


def test_presets():
    """The bytes of presets are those of --list-presets, but for vectors in bf16, and their costs those of the studies."""
    listed = dict(re.findall(r"^  (\S+) +\S+ +\S+ +\S+ +\S+ +([\d.]+)  ", train("--list-presets"), re.M))
    studies = {}
    for study in ("d6", "d6_muon"):
        studies[study] = {row["configuration"]: row for row in csv_rows(ROOT / f"dev/compare/results/{study}/table.csv")}
    shown = {row[1].strip("`"): row for row in tables("README.md", 5) if row[1].strip("`") in listed}
    assert len(shown) == 7, shown
    for name, row in shown.items():
        assert abs(sum(map(float, row[2].split(" + "))) - float(listed[name])) < 0.015, (row, listed[name])
        if name.startswith("muon"):  # the study's baseline is muon
            its, base = (float(studies["d6_muon"][key]["final_loss"]) for key in (name, "adamw32"))
            assert abs(float(row[3].split(" ± ")[0]) - (its - base)) < 0.004, row
        elif name != "adamw32":
            its = [float(studies["d6"][name][key]) for key in ("difference", "standard_error")]
            assert row[3] == "{:.3f} ± {:.3f}".format(*its) and row[4] == studies["d6"][name]["pairs"], (row, its)


def test_formats():
    """The blocks and bytes of optim/README.md's states are those of --list-formats."""
    text = train("--list-formats").split("--m, --v")[1]
    found = re.findall(r"^  (\w+)(?:/\d+)? +\d+ +(\S+) +([\d.]+) ", text, re.M)
    listed = {name: (block, float(size)) for name, block, size in found}
    rows = [row for row in tables("optim/README.md", 5) if row[1] in ("m", "v", "m, v", "m; v") and "..." not in row[0]]
    assert len(rows) > 8, rows
    for names, _, block, size, _ in rows:
        for name, its in zip(re.findall(r"`(\w+)`", names), size.split(", ") * 9):
            assert listed[name][0] == block and abs(listed[name][1] - float(its)) < 0.0006, (name, block, size, listed[name])


if __name__ == "__main__":
    sys.exit(run_cases(globals()))
