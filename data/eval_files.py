"""Evaluation files: the questions of HellaSwag, LAMBADA or one's own .jsonl as tokens, for `./train --eval NAME`.

A line of the .jsonl holds one of
    {"activity_label", "ctx_a", "ctx_b", "endings", "label"}   HellaSwag as its authors give it; it is cleaned here
    {"context", "choices", "answer"}                           any question; answer counts from 0
    {"text"}                                                   its last word, after the last space, is asked for
data/README.md defines the binary format and the conventions, which are those of lm-evaluation-harness (tasks hellaswag
and lambada_openai). A line that cannot be used stops the program, because leaving it out would change the score.
"""

import array
import json
import os
import re
import struct
from pathlib import Path

import numpy as np

from input_files import download, lines_of, reading, unpacked
from messages import PREPARE, Problem, say
from vocabulary import byte_vocabulary, crc32c, open_vocabulary

MAGIC, VERSION, HEADER = b"nib-eval", 1, "<8sIIIIIIQI16x"
CHOICES, LAST_WORD = 0, 1  # kinds of files
MAX_QUESTION = 1 << 20  # bytes of a line
PUBLIC = {  # name: where its authors' file is, and its SHA-256
    "hellaswag": (
        "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl",
        "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588",
    ),
    "lambada": (
        "https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl",
        "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226",
    ),
}


def cleaned(text):
    """Returns HellaSwag's text without the marks of WikiHow."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def question_of(record):
    """Returns (kind, context, choices, index of the right one) of a line. Raises ValueError with a reason."""
    fields = record.keys() if isinstance(record, dict) else set()
    kind = CHOICES
    if {"ctx_a", "ctx_b", "activity_label", "endings", "label"} <= fields:
        texts = [record["activity_label"], record["ctx_a"], record["ctx_b"]]
        choices, answer = record["endings"], record["label"]
    elif {"context", "choices", "answer"} <= fields:
        texts, choices, answer = [record["context"]], record["choices"], record["answer"]
    elif "text" in fields:
        kind, texts, choices, answer = LAST_WORD, [record["text"]], [], 0
    else:
        found = ", ".join(list(fields)[:8]) or "no fields"
        raise ValueError(f"there are neither context, choices and answer, nor text, nor HellaSwag's fields, but {found}")
    if not isinstance(choices, list) or not all(isinstance(text, str) for text in texts + choices):
        raise ValueError("the context and each choice must be a text, and the choices a list")
    if kind == LAST_WORD:
        context, _, word = texts[0].rpartition(" ")
        choices = [word]
    elif len(texts) == 3:
        context = cleaned(f"{texts[0]}: {texts[1]} {texts[2].capitalize()}")
        choices = [cleaned(choice) for choice in choices]
    else:
        context = texts[0]
    if not all(choices):
        raise ValueError("a choice is an empty text")
    if str(answer) not in map(str, range(len(choices))):  # HellaSwag has it as a text
        raise ValueError(f"the right answer is {json.dumps(answer)}, and not a number from 0 to {len(choices) - 1}")
    return kind, context, choices, int(answer)


def encode_row(vocabulary, context, continuation):
    """Returns (tokens of the context, tokens of the continuation), split as the harness splits them."""
    stripped = context.rstrip()
    continuation, context = context[len(stripped) :] + continuation, stripped
    if not context and vocabulary.end is None:
        raise ValueError("the context is empty, and bytes have no token to begin with")
    if not context:
        return [vocabulary.end], vocabulary.encode(continuation).tolist()
    whole, length = vocabulary.encode(context + continuation).tolist(), len(vocabulary.encode(context))
    if length >= len(whole):
        raise ValueError(f"no token is left for the continuation {json.dumps(continuation)}")
    return whole[:length], whole[length:]


class Questions:
    """The three tables of an evaluation file."""

    def __init__(self, vocabulary):
        self.vocabulary, self.kind, self.longest = vocabulary, None, 0
        self.examples, self.rows, self.tokens = array.array("I"), array.array("I"), array.array("H")

    def add(self, record):
        kind, context, choices, answer = question_of(record)
        if self.kind not in (None, kind):
            raise ValueError("it is of another kind than those before; give each kind its own file")
        self.kind = kind
        self.examples.extend((len(choices), answer))
        for choice in choices:
            row = encode_row(self.vocabulary, context, " " + choice)
            self.rows.extend((len(row[0]), len(row[1]), len(choice), len(choice.encode("utf-8"))))
            self.tokens.extend(row[0] + row[1])
            self.longest = max(self.longest, len(row[0]) + len(row[1]))

    def contents(self):
        """Returns the bytes of the file."""
        counts = len(self.examples) // 2, len(self.rows) // 4, len(self.tokens), self.longest
        print_of = self.vocabulary.fingerprint()
        head = struct.pack(HEADER, MAGIC, VERSION, self.kind, self.vocabulary.size, print_of, *counts)
        tables = ((self.examples, "<u4"), (self.rows, "<u4"), (self.tokens, "<u2"))
        body = b"".join(np.asarray(table).astype(kind).tobytes() for table, kind in tables)
        return head + struct.pack("<I", crc32c(body, crc32c(head))) + body


def read_questions(path, vocabulary):
    questions = Questions(vocabulary)
    with reading(path) as file:
        for where, line in lines_of(unpacked(file), path, MAX_QUESTION):
            if isinstance(line, ValueError):
                raise Problem(f"{where}: {line}")
            try:
                questions.add(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise Problem(f"{where}: not a question ({error}); give one JSON object a line") from None
    if questions.kind is None:
        raise Problem(f"{path}: there is no question in it; give one JSON object a line")
    return questions


def sources(inputs):
    """[(name, path)] of NAME=FILE, FILE (its name up to the first dot) or a public one's name."""
    names = set()
    for text in inputs:
        name, equals, path = text.partition("=")
        if not equals and text in PUBLIC and not os.path.exists(text):
            instead = f"without network type {PREPARE} --eval {text}=FILE.jsonl"
            path = download(*PUBLIC[text], instead)
        elif not equals:
            name, path = Path(text).name.split(".")[0], text
        if not re.fullmatch(r"[\w-]+", name):
            raise Problem(f"{text}: give NAME=FILE.jsonl, where NAME has letters, digits, - and _ alone")
        if not os.path.isfile(path):
            raise Problem(f"{path}: no such file; give NAME=FILE.jsonl or one of {', '.join(PUBLIC)}")
        if name in names:
            raise Problem(f"{text}: another file is {name} too; give each its own NAME=FILE.jsonl")
        names.add(name)
        yield name, path


def write_all(options):
    named = list(sources(options.inputs))
    vocabulary = byte_vocabulary() if options.tokenizer == "bytes" else open_vocabulary(options.tokenizer)
    # One folder for each vocabulary, in which ./train looks.
    folder = Path(options.out or f"data/eval/{vocabulary.size}-{vocabulary.fingerprint():08x}")
    for name, path in named:
        target = folder / f"{name}.eval"
        if target.exists() and not options.force:
            raise Problem(f"{target}: exists already; give another --out, or --force to replace it")
        questions = read_questions(path, vocabulary)
        folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".tmp")
        partial.write_bytes(questions.contents())
        os.replace(partial, target)
        say(
            f"{target}: {len(questions.examples) // 2:,} questions, {len(questions.rows) // 4:,} rows, "
            f"{len(questions.tokens):,} tokens of {vocabulary.size}, the longest row has {questions.longest}"
        )
