#!/usr/bin/env python3
"""Tests of the READMEs: their links lead somewhere, the options of their commands exist, and their figures are those
of the program and of the results.

    python3 dev/unit/test_readme.py [-k SUBSTRING]
"""

import re
import subprocess
import sys
from functools import partial

from cases import ROOT, run_cases

sys.path.append(str(ROOT / "dev"))
import tables

WORDS = {"": 1800, "optim": 3500, "kernels": 1800, "data": 2200, "dev": 900, "dev/compare": 2500, "optim/python": 900}
READMES = [ROOT / folder / "README.md" for folder in WORDS]


def train(option):
    return subprocess.run([ROOT / "train", option], capture_output=True, text=True, check=True).stdout


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
    """The options of each line that calls ./train are in --help, which says what `auto` means."""
    mute = [row for row in re.findall(r"^  --.*(?:\n   .*)?\[auto\]$", train("--help"), re.M) if "auto: " not in row]
    assert not mute, mute
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
    lines = READMES[0].read_text().splitlines()
    assert len(lines) <= 180
    wide = [line for line in lines if len(line) > 130 and line[0] not in "|!"]  # rows of tables and pictures cannot be broken
    assert not wide, wide
    for folder, limit in WORDS.items():
        words = len((ROOT / folder / "README.md").read_text().split())
        assert words <= limit, f"{folder}/README.md has {words} words"


def test_figures():
    """Tables and sentences have the figures of the results that they come from, and a digit that is changed is found."""
    check = [sys.executable, ROOT / "dev/tables.py", "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for path, figure in (("README.md", "0.003 ± 0.002"), ("README.md", "3.96 times"), ("dev/compare/README.md", "| 3.420 |")):
        text = (ROOT / path).read_text()
        changed = text.replace(figure, figure.replace("3", "4"), 1)
        assert changed != text, f"{path} has no {figure!r} any more; name another figure here"
        done = subprocess.run([*check, path], input=changed, capture_output=True, text=True)
        assert done.returncode == 1 and figure in done.stdout, (path, figure, done)


def test_damaged_results():
    """A cell that has no number any more, and a row that lost its columns, are reported as a Problem."""
    default = partial(tables.md, tables.FIRST, "# What", "default run")
    assert len(default(4)) >= 4 and tables.number("loss 1,234.5") == 1234.5
    for read in (partial(tables.number, "none"), partial(default, 99)):
        try:
            read()
        except tables.Problem:
            continue
        raise AssertionError(f"{read} has not failed")


def test_presets():
    """The bytes of README.md's presets, which come from a study, are those that the program has today."""
    listed = dict(re.findall(r"^  (\S+) +\S+ +\S+ +\S+ +\S+ +([\d.]+)  ", train("--list-presets"), re.M))
    shown = re.findall(r"^\| .* \| `(\w+)` \| ([\d.]+) \+ ([\d.]+) \|", READMES[0].read_text(), re.M)
    assert len(shown) == 8, shown
    for name, weights, states in shown:  # vectors in bf16 are not in the list
        assert abs(float(weights) + float(states) - float(listed[name])) < 0.015, (name, listed[name])


if __name__ == "__main__":
    sys.exit(run_cases(globals()))
