#!/usr/bin/env python3
"""Tests of the vocabularies and the evaluation files of data/prepare.py, as test_prepare.py has those of shards.

    python dev/unit/test_vocabulary.py [-k SUBSTRING]

One case uses GPT-2's own vocabulary, from the folder that NIBBLE_GPT2 names.
"""

import json
import os
import random
import struct
import sys
from pathlib import Path

from cases import run_cases
from test_prepare import NOWHERE, Case, byte_names, encode_by_c, joined, library, missing, sample, write_vocabulary

if not missing():
    from crc32c import crc32c

class EvaluationFile:
    """Reads NAME.eval as data/README.md describes it, and checks every length and the checksum."""

    def __init__(self, path):
        data = Path(path).read_bytes()
        head = struct.unpack("<8s6IQI16xI", data[:64])
        magic, version, self.kind, self.vocabulary, self.fingerprint, examples, rows, tokens, longest, crc = head
        assert (magic, version) == (b"nib-eval", 1)
        assert len(data) == 64 + 8 * examples + 16 * rows + 2 * tokens
        assert crc == crc32c(data[:60] + data[64:])
        self.examples = list(struct.iter_unpack("<II", data[64 : 64 + 8 * examples]))
        table = list(struct.iter_unpack("<4I", data[64 + 8 * examples : 64 + 8 * examples + 16 * rows]))
        stream = memoryview(data[64 + 8 * examples + 16 * rows :]).cast("H").tolist()
        self.rows, at = [], 0  # (tokens of the context, of the continuation, characters, bytes)
        for context, continuation, characters, size in table:
            both = stream[at : at + context + continuation]
            self.rows.append((both[:context], both[context:], characters, size))
            at += context + continuation
        assert at == tokens and sum(count for count, _ in self.examples) == rows
        assert longest == max(len(row[0]) + len(row[1]) for row in self.rows)


HELLASWAG = {
    "activity_label": "Baking",
    "ctx_a": "[header] How [title] Mix.  Then",
    "ctx_b": "the MAN",
    "ctx": "not used",
    "endings": ["runs. [substeps] Stop", " é"],
    "label": "1",
}
MIX, THE = "Baking: How. Mix. Then The man", "[a]  the"
QUESTIONS = (  # line, [(context, continuation, characters, bytes)] with None for <|endoftext|>, which is right
    (HELLASWAG, [(MIX, " runs. Stop", 10, 10), (MIX, " é", 1, 2)], 1),
    ({"context": THE, "choices": ["in", "re"], "answer": 0}, [(THE, " in", 2, 2), (THE, " re", 2, 2)], 0),
    ({"context": "the \n", "choices": ["and"], "answer": 0}, [("the", " \n and", 3, 3)], 0),
    ({"context": "", "choices": ["the", "日本"], "answer": 1}, [(None, " the", 3, 3), (None, " 日本", 2, 6)], 1),
    ({"context": " \n", "choices": ["a"], "answer": 0}, [(None, " \n a", 1, 1)], 0),
    ({"text": "in the end"}, [("in the", " end", 3, 3)], 0),
    ({"text": "end"}, [(None, " end", 3, 3)], 0),
    ({"text": "in the"}, [("in", " the", 3, 3)], 0),
)


def test_evaluation_files(case):
    assert crc32c(b"123456789") == 0xE3069283
    lines = {kind: "" for kind in (0, 1)}
    want = {kind: [] for kind in (0, 1)}
    for record, rows, answer in QUESTIONS:
        kind = int("text" in record)
        lines[kind] += json.dumps(record) + "\n\n"
        want[kind].append((rows, answer))
    choices, words = case.write("c.jsonl", lines[0]), case.write("words.odd.jsonl.xz", lines[1])
    done = case.run("--eval", f"choices={choices}", words, "--out", "o")
    assert done.returncode == 0 and "o/choices.eval: 5 questions, 8 rows, " in done.stdout, done
    names = {name: byte for byte, name in byte_names().items()}
    tokens = json.loads((case.folder / "vocabulary" / "encoder.json").read_text("utf-8"))
    end = tokens["<|endoftext|>"]
    text = {number: bytes(names[c] for c in name) for name, number in tokens.items()}
    listed = b"".join(struct.pack("<I", len(text[i])) + text[i] for i in range(case.vocabulary))
    for kind, name in enumerate(("choices", "words")):
        file = EvaluationFile(case.folder / "o" / f"{name}.eval")
        assert (file.kind, file.vocabulary, file.fingerprint) == (kind, case.vocabulary, crc32c(listed))
        assert file.examples == [(len(rows), answer) for rows, answer in want[kind]]
        rows = iter(file.rows)
        for expected, _ in want[kind]:
            for context, continuation, characters, size in expected:
                got = next(rows)
                assert got[2:] == (characters, size), (got, continuation)
                assert got[0] == [end] if context is None else b"".join(text[t] for t in got[0]) == context.encode()
                assert b"".join(text[t] for t in got[1]) == continuation.encode(), (got, continuation)
    case.refuse("choices.eval: exists already", "--eval", f"choices={choices}", "--out", "o")
    done = case.run("--eval", f"choices={choices}", "--out", "o", "--force")
    assert done.returncode == 0, done.stderr
    # The merges of the whole count, not those of the continuation alone: " the" is one token.
    file = EvaluationFile(case.folder / "o" / "words.eval")
    assert file.rows[2][1] == [tokens["Ġthe"]] and file.rows[0][0] == [tokens["in"], tokens["Ġthe"]]
    bytes_ = case.write("b.jsonl", json.dumps({"text": "is é"}))
    # Without --out each vocabulary has a folder of its own.
    for _ in range(2):
        done = case.run("--eval", bytes_, "--force", "--tokenizer", "bytes", vocabulary=None)
        assert "data/eval/256-794ecc1a/b.eval: " in done.stdout and case.run("--eval", words, "--force").returncode == 0
    assert len(list(case.folder.glob("data/eval/*/*.eval"))) == 2
    done = case.run("--eval", bytes_, "--out", "o", "--tokenizer", "bytes", vocabulary=None)
    file = EvaluationFile(case.folder / "o" / "b.eval")
    assert file.rows == [([105, 115], [32, 0xC3, 0xA9], 1, 2)] and file.vocabulary == 256, file.rows
    assert file.fingerprint == crc32c(b"".join(struct.pack("<IB", 1, b) for b in range(256)))


def test_evaluation_errors(case):
    for i, (line, expected) in enumerate(
        (
            ("{", "line 1: not a question ("),
            ("[1]", "line 1: not a question (there are neither context, choices and answer"),
            ('{"context": "a", "choices": ["b", "c"], "answer": 2}', "answer is 2, and not a number from 0 to 1"),
            ('{"context": "a", "choices": ["b", "c"], "answer": true}', "answer is true"),
            ('{"context": "a", "choices": ["b", ""], "answer": 0}', "a choice is an empty text"),
            ('{"context": 5, "choices": ["b"], "answer": 0}', "the context and each choice must be a text, and"),
            ('{"context": "a", "choices": "bc", "answer": 0}', "must be a text, and the choices a list"),
            ('{"text": null}', "must be a text, and the choices a list"),
            ('{"text": "a b"}\n{"context": "a", "choices": ["b"], "answer": 0}', "line 2: not a question (it is of another"),
            ("", "there is no question in it"),
            (json.dumps({"text": "a " * 600000}), "line 1: longer than 1 MiB"),
        )
    ):
        case.refuse(expected, "--eval", case.write(f"q{i}.jsonl", line))
    alone, good = case.write("e.jsonl", '{"text": "a"}'), case.write("good.jsonl", '{"text": "in the"}')
    case.refuse("the context is empty", "--eval", alone, "--tokenizer", "bytes", vocabulary=None)
    for words, expected in (
        (["none"], "no such file"),
        ([f"a={good}", f"a={good}"], "another file is a too; give each its own NAME"),
        (["a b=e.jsonl"], "NAME=FILE.jsonl"),
        ([good, "--val", "e.jsonl"], "--val does not go with --eval; leave --val out"),
        ([good, "--limit-tokens", 9], "leave --limit-tokens out"),
        (["hellaswag"], "data/prepare.py --eval hellaswag=FILE.jsonl"),
    ):
        case.refuse(expected, "--eval", *words, **NOWHERE)


def test_train_bpe(case):
    """A vocabulary of one's own encodes alike in prepare.py, the tokenizers library and the trainer."""
    import tokenizers

    documents = [sample(i, 3000) + " thereabouts inside and the andes" * 30 for i in range(20)]
    text, val = case.write("a.txt", joined(documents)), case.write("v.txt", sample(77, 4000) + "aaaa" * 7 + "    " * 9)
    corpus = case.prepare(text, "--val", val, "--train-bpe", 400, vocabulary=None)
    assert corpus.meta["vocabulary"] == 400 and corpus.meta["val"]["bytes"] > 4000
    assert corpus.documents("train") == [document + "\n" for document in documents]
    again = case.prepare(text, "--val", val, "--train-bpe", 400, out="again", vocabulary=None)
    assert all((again.folder / path.name).read_bytes() == path.read_bytes() for path in corpus.folder.iterdir())
    # The same vocabulary under numbers of another order, as other trainers give them.
    other = case.folder / "other"
    other.mkdir()
    whole = json.loads((corpus.folder / "tokenizer.json").read_text("utf-8"))
    whole["model"]["vocab"] = {name: 399 - number for name, number in whole["model"]["vocab"].items()}
    whole["added_tokens"][0]["id"] = 399 - corpus.end
    (other / "tokenizer.json").write_text(json.dumps(whole), "utf-8")
    numbered = case.prepare(text, "--val", val, "--tokenizer", "other", out="numbered", vocabulary=None)
    assert numbered.tokens("train") == [399 - token for token in corpus.tokens("train")]
    same = case.prepare(text, "--val", val, out="same", vocabulary="out")
    assert same.tokens("val") == corpus.tokens("val") and (same.folder / "tokenizer.json").exists()
    loaded = library(case)
    for folder in (corpus, numbered):
        whole = tokenizers.Tokenizer.from_file(str(folder.folder / "tokenizer.json"))
        assert folder.tokens("val")[1:] == whole.encode(folder.documents("val")[0]).ids
        for document in folder.documents("train") if loaded else ():
            assert encode_by_c(loaded, folder.folder, document) == (whole.encode(document).ids, 400, folder.end)
        assert whole.encode("<|endoftext|>").ids == [folder.end]
    few, said = case.write("few.txt", "aa bb " * 50), ["so the vocabulary has 26"]
    case.prepare(few, "--val", val, "--train-bpe", 1000, out="few", said=said, vocabulary=None)
    for size in ("257", "70000", "-5", "8k"):
        hint = f"--train-bpe: '{size}' was found; type a whole number from 258 to 65536"
        case.refuse(hint, text, f"--train-bpe={size}", vocabulary=None)
    return None if loaded else "skipped: no C compiler"


def test_added_tokens(case):
    """Tokens that were added to a tokenizer.json are encoded as the tokenizers library does, here and in the trainer."""
    import tokenizers

    val, other = case.write("v.txt", "in"), case.folder / "other"
    first = case.prepare(case.write("t.txt", sample(1, 20000)), "--val", val, "--train-bpe", 300, vocabulary=None)
    whole = tokenizers.Tokenizer.from_file(str(first.folder / "tokenizer.json"))
    whole.add_tokens(["<tool>", "<tool>x", "né", "   ", "l>x", "x<to"])
    whole.add_special_tokens(["<|im|>"])
    other.mkdir()
    whole.save(str(other / "tokenizer.json"))
    pieces = ["<tool>", "<tool>x", "né", "   ", "l>x", "<|im|>", "x<to", " the", "<", "ol>", "\n", "a  ", "é"]
    generator = random.Random(3)
    texts = ["".join(generator.choices(pieces, k=40)) + "." for _ in range(50)]
    want = [whole.encode(text).ids for text in texts]
    corpus = case.prepare(case.write("a.txt", joined(texts)), "--val", val, "--tokenizer", "other", out="o", vocabulary=None)
    tokens, line = corpus.tokens("train"), whole.encode("\n").ids
    assert tokens == [token for ids in want for token in [corpus.end, *ids, *line]]
    assert corpus.meta["vocabulary"] == 307 and corpus.meta["train"]["bytes"] == sum(len(text.encode()) + 1 for text in texts)
    loaded = library(case)
    for folder in (other, corpus.folder) if loaded else ():
        assert all(encode_by_c(loaded, folder, text)[0] == ids for text, ids in zip(texts, want))
    whole.add_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    whole.save(str(other / "tokenizer.json"))
    case.refuse('its added token "<mask>" has lstrip', "a.txt", "--tokenizer", "other", vocabulary=None)
    return None if loaded else "skipped: no C compiler"


def test_vocabulary_under_hugging_face_names(case):
    write_vocabulary(case.folder / "hf", ("vocab.json", "merges.txt"))
    val, text, merges = case.write("v.txt", "in"), case.write("a.txt", sample(1, 3000) + " ere"), case.folder / "hf" / "merges.txt"
    want, whole = case.prepare(text, "--val", val, out="o0").tokens("train"), merges.read_text("utf-8")
    merges.write_text(whole.split("\n", 1)[1] + "r e", "utf-8")  # no line of its version; of equal merges the first counts
    assert case.prepare(text, "--val", val, out="o1", vocabulary="hf").tokens("train") == want
    assert case.prepare(text, "--val", val, out="o2", vocabulary="o1").tokens("train") == want
    assert (case.folder / "o2" / "merges.txt").read_text("utf-8") == whole + "r e\n"


def test_vocabulary_errors(case):
    text, half = case.write("a.txt", sample(1, 3000)), case.folder / "half"
    write_vocabulary(half, ("vocab.json", "merges.txt"))
    names = json.loads((half / "vocab.json").read_text("utf-8"))
    for name, number in (("Ġt", -1), ("Ġt", 0.5), ("Ġt", 7), ("\ud800", case.vocabulary)):
        (half / "vocab.json").write_text(json.dumps({**names, name: number}))
        case.refuse("half/vocab.json and merges.txt are no byte-pair vocabulary", text, vocabulary="half")
    for broken in ("", "{", "a b\n"):
        (half / "vocab.json").write_text(broken)
        case.refuse("half/vocab.json and merges.txt are no byte-pair vocabulary", text, vocabulary="half")
    (half / "vocab.json").unlink()
    case.refuse("half: holds no vocab.json and merges.txt, ", text, vocabulary="half")
    case.refuse("none: is no folder with vocab.json", text, vocabulary="none")
    case.refuse("or tokenizer.json; give a folder", text, vocabulary=".")
    case.refuse("bytes need no preparation", text, vocabulary="bytes")
    usual = {"pre_tokenizer": {"type": "ByteLevel"}, "model": {"type": "BPE", "vocab": {}, "merges": []}}
    for contents, expected in (
        ("junk", "tokenizer.json is no byte-pair vocabulary like GPT-2's; give a folder"),
        ("[]", "tokenizer.json is no byte-pair vocabulary like GPT-2's; give a folder"),
        (json.dumps({**usual, "pre_tokenizer": {"type": "Whitespace"}}), "tokenizer.json: holds no tokenizer of GPT-2's kind"),
        (json.dumps({**usual, "normalizer": {"type": "NFC"}}), "tokenizer.json: holds no tokenizer of GPT-2's kind"),
        (json.dumps({**usual, "model": {"type": "WordPiece"}}), "tokenizer.json: holds no tokenizer of GPT-2's kind"),
        (json.dumps({**usual, "model": {**usual["model"], "dropout": 0.1}}), "holds no tokenizer of GPT-2's kind"),
        (json.dumps({**usual, "added_tokens": [{"content": "a b", "id": 1}]}), '"a b" has white space within it'),
    ):
        case.write("tokenizer.json", contents)
        case.refuse(expected, text, vocabulary=".")


def test_gpt2_vocabulary(case):
    if "NIBBLE_GPT2" not in os.environ:
        return "skipped: type `data/prepare.py tinyshakespeare --out data/ts`, which fetches GPT-2's vocabulary, and set NIBBLE_GPT2=data/ts"
    val = case.write("v.txt", "Hello world")
    corpus = case.prepare(case.write("a.txt", sample(1, 20000)), "--val", val, vocabulary=None)
    assert corpus.tokens("val") == [50256, 15496, 995] and corpus.meta["vocabulary"] == 50257
    assert corpus.documents("train") == [sample(1, 20000)]
    loaded = library(case)
    assert not loaded or encode_by_c(loaded, corpus.folder, sample(1, 20000)) == (corpus.tokens("train")[1:], 50257, 50256)


if __name__ == "__main__":
    sys.exit(run_cases(globals(), Case, missing()))
