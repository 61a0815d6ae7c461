#!/usr/bin/env python3
"""Writes data/unicode.h: which characters GPT-2's tokenizer takes for letters, numbers and white space.

    .venv/bin/python data/make_unicode.py          writes the file
    .venv/bin/python data/make_unicode.py --check  says by its exit status whether the file is up to date

The script asks tiktoken for the classes, because data/prepare.py encodes with it: so a prompt is cut into words as the
training text was. tiktoken's version of Unicode is not that of Python's unicodedata.
"""

import sys
from pathlib import Path

import tiktoken

CLASSES = (r"\p{L}", r"\p{N}", r"\s")  # LETTER, DIGIT and SPACE of data/tokenizer.c; OTHER is what remains


def matches(pattern, text):
    """Returns the characters of the text that the pattern matches, one at a time."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    engine = tiktoken.Encoding("class", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return set(engine.decode(engine.encode_ordinary(text)))


def class_runs():
    """Returns [(characters, class)]: runs of characters of one class, from code point 0 on."""
    every = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    found = [matches(pattern, "".join(every)) for pattern in CLASSES]
    changes = []
    for character in every:
        kind = next((i for i, members in enumerate(found) if character in members), len(CLASSES))
        if not changes or changes[-1][1] != kind:
            changes.append((ord(character), kind))
    ends = [point for point, _ in changes[1:]] + [0x110000]
    return [(end - point, kind) for (point, kind), end in zip(changes, ends)]


def header():
    numbers = [f"{length << 2 | kind}," for length, kind in class_runs()]
    lines, line = [], "   "
    for number in numbers:
        if len(line) + 1 + len(number) > 120:
            lines.append(line)
            line = "   "
        line += " " + number
    return f"""// Written by data/make_unicode.py: Unicode as tiktoken {tiktoken.__version__} has it.
// Each entry is a run of characters of one class, from code point 0 on: their number << 2 | the class (0 letter, 1
// number, 2 white space, 3 other).
#pragma once
#include <stdint.h>

// clang-format off
static const uint32_t unicode_runs[] = {{
{chr(10).join(lines + [line])}
}};
// clang-format on
"""


if __name__ == "__main__":
    path = Path(__file__).with_name("unicode.h")
    if "--check" in sys.argv[1:]:
        sys.exit(path.read_text("utf-8") != header())
    path.write_text(header(), "utf-8")
