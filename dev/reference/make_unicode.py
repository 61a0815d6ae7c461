#!/usr/bin/env python3
"""Writes what tiktoken knows of Unicode, because data/prepare.py encodes with it: data/unicode.h, which characters
GPT-2's tokenizer takes for letters, numbers and white space, and dev/reference/words.txt, how it cuts texts into words.

    .venv/bin/python dev/reference/make_unicode.py          writes the files
    .venv/bin/python dev/reference/make_unicode.py --check  says by its exit status whether they are up to date

The test corpus_every_character (dev/unit/corpus.cu) encodes the texts of words.txt with data/tokenizer.c. A line of the
file stands for BLOCK characters: the first one, and the hash of one text's tokens, value = (value + token) * FACTOR
modulo 2^64. The text has a line for each context of CONTEXTS and each character of the block, contexts outermost, with
the character in place of every `@`. The vocabulary is made of 256 bytes and of the pairs of a byte of PROBES with a byte
above 127, in both orders, so that the tokens tell which neighbours of a character are in its word.
"""

import sys
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

ROOT = Path(__file__).resolve().parents[2]
CLASSES = (r"\p{L}", r"\p{N}", r"\s")  # LETTER, DIGIT and SPACE of data/tokenizer.c; OTHER is what remains
BLOCK = 4096
FACTOR = 0x100000001B3
BYTES = {bytes([byte]): byte for byte in range(256)}
PROBES = b"a1. \n"
CONTEXTS = ("a@a", "1@1", ".@.", " @ a", "@@ .", "  @1", "x'@s", "\u00e9@", "@  ", ".\n@\n")


def characters(first, count):
    return [chr(point) for point in range(first, first + count) if not 0xD800 <= point < 0xE000]


def class_runs():
    """Returns [(characters, class)]: runs of characters of one class, from code point 0 on."""
    every, found = characters(0, 0x110000), []
    for pattern in CLASSES:
        engine = tiktoken.Encoding("class", pat_str=pattern, mergeable_ranks=BYTES, special_tokens={})
        found.append(set(engine.decode(engine.encode_ordinary("".join(every)))))
    changes = []
    for character in every:
        kind = next((i for i, members in enumerate(found) if character in members), len(CLASSES))
        if not changes or changes[-1][1] != kind:
            changes.append((ord(character), kind))
    ends = [point for point, _ in changes[1:]] + [0x110000]
    return [(end - point, kind) for (point, kind), end in zip(changes, ends)]


def header():
    lines = ["   "]
    for number in (f" {length << 2 | kind}," for length, kind in class_runs()):
        if len(lines[-1] + number) > 120:
            lines.append("   ")
        lines[-1] += number
    table = "\n".join(lines)
    return f"""// Written by dev/reference/make_unicode.py: Unicode as tiktoken {tiktoken.__version__} has it.
// Each entry is a run of characters of one class, from code point 0 on: their number << 2 | the class (0 letter, 1
// number, 2 white space, 3 other).
#pragma once
#include <stdint.h>

// clang-format off
static const uint32_t unicode_runs[] = {{
{table}
}};
// clang-format on
"""


def words():
    pairs = [(bytes([probe, byte]), bytes([byte, probe])) for probe in PROBES for byte in range(128, 256)]
    ranks = {**BYTES, **{token: 256 + i for i, token in enumerate(token for pair in pairs for token in pair)}}
    encoding = tiktoken.Encoding("words", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})
    lines = ""
    for first in range(0, 0x110000, BLOCK):
        text = "".join(context.replace("@", c) + "\n" for context in CONTEXTS for c in characters(first, BLOCK))
        tokens = encoding.encode_to_numpy(text).astype(np.uint64)
        powers = np.multiply.accumulate(np.full(len(tokens), FACTOR, np.uint64))
        lines += f"{first:06x} {int(np.dot(powers[::-1], tokens)):016x}\n"
    return lines


if __name__ == "__main__":
    for name, text in (("data/unicode.h", header()), ("dev/reference/words.txt", words())):
        if "--check" not in sys.argv[1:]:
            (ROOT / name).write_text(text, "utf-8")
        elif (ROOT / name).read_text("utf-8") != text:
            sys.exit(f"{name} is not what tiktoken says; run this script without --check")
