"""How the Python programs of data/ and dev/ speak to their users. It needs no package."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def here(path):
    """Returns a path of the repository as it is typed in the current folder."""
    return path if Path.cwd() == ROOT else shlex.quote(str(ROOT / path))


MAKE = "make" if Path.cwd() == ROOT else f"make -C {here('')}"
PREPARE = f"{here('.venv/bin/python')} {here('data/prepare.py')}"
VENV = f"type `{MAKE} venv`, and {PREPARE} instead"  # where a package is missing


class Problem(Exception):
    """A mistake that the user can correct. It is reported in one sentence, and the exit status is 2."""


# What could control a terminal, as text_disarm of data/text.c has it, and halves of surrogate pairs.
CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def say(line, file=None):
    """Prints a line that may quote what a stranger wrote: names of files, fields and runs."""
    print(CONTROL.sub("?", str(line)), file=file, flush=True)
