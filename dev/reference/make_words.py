#!/usr/bin/env python3
"""Writes dev/reference/words.txt: how tiktoken cuts texts around every Unicode character into words.

    .venv/bin/python dev/reference/make_words.py          writes the file
    .venv/bin/python dev/reference/make_words.py --check  says by its exit status whether the file is up to date

The test corpus_every_character (dev/unit/corpus.cu) encodes the same texts with data/tokenizer.c. A line of the file
stands for BLOCK characters: the first one, and the hash of one text's tokens, value = (value + token) * FACTOR modulo
2^64. The text has a line for each context of CONTEXTS and each character of the block, contexts outermost, with the
character in place of every `@`. The vocabulary is made of 256 bytes and of the pairs of a byte of PROBES with a byte
above 127, in both orders, so that the tokens tell which neighbours of a character are in its word.
"""

import sys
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

BLOCK = 4096
FACTOR = 0x100000001B3
PROBES = b"a1. \n"
CONTEXTS = ("a@a", "1@1", ".@.", " @ a", "@@ .", "  @1", "x'@s", "\u00e9@", "@  ", ".\n@\n")


def vocabulary():
    tokens = [bytes([byte]) for byte in range(256)]
    for probe in PROBES:
        for byte in range(128, 256):
            tokens += [bytes([probe, byte]), bytes([byte, probe])]
    return {token: i for i, token in enumerate(tokens)}


def hash_tokens(tokens):
    powers = np.multiply.accumulate(np.full(len(tokens), FACTOR, np.uint64))
    return int(np.dot(powers[::-1], tokens.astype(np.uint64)))


def block_text(first):
    points = [point for point in range(first, first + BLOCK) if not 0xD800 <= point < 0xE000]
    return "".join(context.replace("@", chr(point)) + "\n" for context in CONTEXTS for point in points)


def lines():
    encoding = tiktoken.Encoding("words", pat_str=r50k_pat_str, mergeable_ranks=vocabulary(), special_tokens={})
    for first in range(0, 0x110000, BLOCK):
        yield f"{first:06x} {hash_tokens(encoding.encode_to_numpy(block_text(first))):016x}\n"


if __name__ == "__main__":
    path = Path(__file__).with_name("words.txt")
    text = "".join(lines())
    if "--check" in sys.argv[1:]:
        sys.exit(path.read_text("utf-8") != text)
    path.write_text(text, "utf-8")
