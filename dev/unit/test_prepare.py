#!/usr/bin/env python3
"""Tests of data/prepare.py: one line a case, `N passed, N failed, N skipped` last; exit status 1 when a case fails.

    python dev/unit/test_prepare.py [-k SUBSTRING]

Each case runs the script on small generated files in a temporary folder. The vocabulary is a made-up one of 256 bytes
and a few merges, so nothing is downloaded. Where a library that prepare.py needs is missing, all is skipped and the
exit status is 0.
"""

import array
import bz2
import ctypes
import gzip
import itertools
import json
import lzma
import os
import pickle
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

try:
    from compression import zstd
except ImportError:
    try:
        from backports import zstd
    except ImportError:
        zstd = None

from cases import ROOT, Folder, ended, run_cases

MERGES = "Ġ t|h e|i n|r e|Ġt he|o n|Ġ Ġ|Ċ Ċ|e r|Ġ a|n d|Ġa nd|' s".split("|")


def byte_names():
    """Returns GPT-2's printable name of each byte, in the order of its tokens."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    others = [b for b in range(256) if b not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def write_vocabulary(folder, names=("encoder.json", "vocab.bpe")):
    tokens = {name: i for i, name in enumerate(byte_names().values())}
    for merge in MERGES:
        tokens[merge.replace(" ", "")] = len(tokens)
    tokens["<|endoftext|>"] = len(tokens)
    folder.mkdir()
    (folder / names[0]).write_text(json.dumps(tokens), "utf-8")
    (folder / names[1]).write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n", "utf-8")
    return len(tokens)


PACKERS = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstd and zstd.compress}
NOWHERE = {"https_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": ""}


class Corpus:
    """Reads what prepare.py wrote, without its code."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.meta = json.loads((self.folder / "meta.json").read_text("utf-8"))
        names = {name: byte for byte, name in byte_names().items()}
        vocabulary = json.loads((self.folder / "vocab.json").read_text("utf-8"))
        self.end = vocabulary.pop("<|endoftext|>")
        self.text = {token: bytes(names[c] for c in name) for name, token in vocabulary.items()}

    def shards(self, part):
        """Returns the tokens of each shard. Checks the header against the file."""
        result = []
        paths = sorted(self.folder.glob(part + "_*.bin"))
        assert [p.name for p in paths] == [f"{part}_{i:06d}.bin" for i in range(len(paths))], paths
        for path in paths:
            data = path.read_bytes()
            header = memoryview(data[:1024]).cast("i")
            assert header[0] == 20240520 and header[1] == 1, "magic or version"
            assert len(data) == 1024 + 2 * header[2], (len(data), header[2])
            assert not any(header[3:]), "the rest of the header is 0"
            result.append(list(memoryview(data[1024:]).cast("H")))
        return result

    def tokens(self, part):
        return [token for shard in self.shards(part) for token in shard]

    def documents(self, part):
        """Returns the texts of a part. Checks that it begins with <|endoftext|>, and its counts in meta.json."""
        tokens = self.tokens(part)
        assert tokens and tokens[0] == self.end, "begins with <|endoftext|>"
        documents = []
        for token in tokens:
            if token == self.end:
                documents.append(bytearray())
            else:
                documents[-1] += self.text[token]
        counted = self.meta[part]["tokens"], self.meta[part]["bytes"]
        assert counted == (len(tokens), sum(map(len, documents))), (counted, len(tokens))
        return [document.decode() for document in documents]


class Case(Folder):
    """A temporary folder with a vocabulary, and ways to run prepare.py in it."""

    def __init__(self, folder):
        super().__init__(folder)
        self.environment = {"XDG_CACHE_HOME": str(self.folder / "cache")}
        self.vocabulary = write_vocabulary(self.folder / "vocabulary")

    def write(self, name, content):
        content = content.encode() if isinstance(content, str) else content
        (self.folder / name).write_bytes(PACKERS.get(Path(name).suffix, bytes)(content))
        return name

    def run(self, *arguments, vocabulary="vocabulary", **environment):
        tokenizer = ["--tokenizer", vocabulary] if vocabulary else []
        return self.typed(sys.executable, ROOT / "data/prepare.py", *arguments, *tokenizer, **environment)

    def prepare(self, *arguments, out="out", said=(), **more):
        """Expects success and each text of `said`. Returns what was written."""
        done = self.run(*arguments, "--out", out, **more)
        assert done.returncode == 0, done.stderr
        for text in said:
            assert text in done.stdout, f"{text!r} is not in {done.stdout!r}"
        typed = shlex.split(done.stdout.split("next: ")[1])
        assert typed[-3:] == [str(ROOT / "train"), "--data", str(out)], typed
        assert not (self.folder / (out + ".tmp")).exists()
        return Corpus(self.folder / out)

    def refuse(self, expected, *arguments, **more):
        """Expects status 2, one sentence that holds `expected`, and nothing written."""
        out = [] if "--out" in arguments else ["--out", "refused"]
        self.refused(self.run(*arguments, *out, **more), "prepare: error: ", expected)
        assert not list(self.folder.glob("refused*")), "wrote something"


def sample(seed, size):
    """Returns text that is hard for a tokenizer: runs of white space, apostrophes, digits, accents, wide characters."""
    generator = random.Random(seed)
    words = "the| the|  |\n\n|\n|\t|and's|don't|1234|é|日本|😀|\u3000|\u00a0|\r\n|;:|in".split("|")
    text = ""
    while len(text) < size:
        text += generator.choice(words) + generator.choice(["", " ", " ", "\n"])
    return "x" + text + "."


def joined(documents):
    return "".join(f"<|endoftext|>\n{document}\n" for document in documents)


SEPARATED = "one<|endoftext|>two <|endoftext|>\r\nthree\n<|endoftext|>\n\nfour<|endoftext|> \n <|endoftext|><|endoftext|>"
THREE, ROWS = ["one", "two ", "three\n", "\nfour"], [{"text": "the"}, {"n": 1, "text": ""}, {"text": "x<|endoftext|>y"}]
LINES, ARRAY = "\n\n".join(map(json.dumps, ROWS)), json.dumps(ROWS, indent=1)
FORMATS = (  # name, what is packed as the name says, documents
    ("a.txt", SEPARATED, THREE),
    ("bom.TXT", "\ufeff" + SEPARATED, THREE),
    ("noending", SEPARATED, THREE),
    ("noending.xz", SEPARATED, THREE),
    ("a.txt.gz", SEPARATED, THREE),
    ("a.jsonl", "\ufeff" + LINES, ["the", "x", "y"]),
    ("a.JsonL.bz2", LINES, ["the", "x", "y"]),
    ("lines.json", LINES + "\n", ["the", "x", "y"]),
    ("a.json.zst", "\ufeff\n" + ARRAY, ["the", "x", "y"]),
    ("odd.txt", gzip.compress(b"packed"), ["packed"]),
    ("a.lzma", lzma.compress(b"old", format=lzma.FORMAT_ALONE), ["old"]),
    ("two.txt.zst", "one\n" * 2, ["one\none\n"]),
)


def test_formats(case):
    import pyarrow.parquet

    val = case.write("v.txt", "validation")
    texts = pyarrow.array([b"the", None, b"", b"\xff", b"in"])
    texts = pyarrow.Array.from_buffers(pyarrow.string(), len(texts), texts.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"id": [1] * 5, "text": texts}), case.folder / "a.PARQUET")
    for name, content, documents in (*FORMATS, ("a.PARQUET", None, ["the", "in"])):
        if content:
            case.write(name, content)
        said = '2 that cannot be used: a.PARQUET: row 2: field "text" is not a text; a.PARQUET: row 4: \'utf-8\' codec'
        corpus = case.prepare(name, "--val", val, "--force", said=[said] if name == "a.PARQUET" else [])
        assert (corpus.documents("train"), corpus.documents("val")) == (documents, ["validation"]), name
    body = case.prepare(case.write("body.jsonl", '{"body": "the the\\n"}'), "--val", val, "--field", "body", out="body")
    assert [body.text.get(token) for token in body.tokens("train")] == [None, b"t", b"he", b" the", b"\n"]
    case.refuse('there is no field "body" but id, text', "a.PARQUET", "--field", "body")
    case.refuse('row 1: field "id" is not a text', "a.PARQUET", "--field", "id")
    case.refuse("cannot be read", case.write("b.parquet", "text"))
    for ending in PACKERS:
        name = case.write("cut.txt" + ending, sample(7, 100000))
        whole = (case.folder / name).read_bytes()
        for length in (len(whole) // 2, len(whole) - 5):
            (case.folder / name).write_bytes(whole[:length])
            case.refuse(f"{name}: cannot be read", name)


def test_bad_documents(case):
    """A document that cannot be used is left out and counted; all others are kept."""
    val, spaces = case.write("v.txt", "validation"), "a" + " " * 1_000_000 + "b" + "\n" * 1_000_000 + "é" * 60_000
    bad = ['{"text": ', '{"body": "b"}', '{"text": 5}', '{"text": null}', "[1]", '{"text": "\\ud83d"}', '{"text": "\udcff"}']
    bad = ['{"text": "first"}', *bad, json.dumps({"text": spaces}), '{"text": " \\n "}', '{"text": "last"}']
    long = "the red man\n" * 30000
    nulls = json.dumps([{"text": "first"}, {"text": None}, 5, {"text": "\udcff"}, {"text": "é"}], ensure_ascii=False)
    cases = (  # name, contents, documents, what is reported
        ("a.jsonl", "\n".join(bad), ["first", spaces, "last"], (" 7 that", "a.jsonl: line 2: not JSON (", "; a.jsonl: line 6: ")),
        ("a.json", nulls, ["first", "é"], (" 3 that", "element 2: field", "; a.json: element 4")),
        ("a.txt", joined(["a", "b\udcff", spaces]), ["a\n", spaces + "\n"], (" 1 that", "line 4: not UTF-8 (byte 0xff)")),
        ("long.txt.gz", long[:100000] + "\udcff" + long[100000:], None, (" 1 that", "long.txt.gz: line 8334: not UTF-8")),
        ("records.txt", LINES, None, ("name it .jsonl",)),
    )
    for name, contents, documents, said in cases:
        case.write(name, contents.encode("utf-8", "surrogateescape"))
        got = case.prepare(name, "--val", val, "--force", said=said).documents("train")
        assert documents is None or got == documents, (name, [text[:50] for text in got])
        if name == "long.txt.gz":  # a piece of a long document is left out, and what follows begins a document
            assert len(got) == 2 and long.startswith(got[0]) and long.endswith(got[1])
            assert len(long) - sum(map(len, got)) <= 50000
    case.refuse("b.txt: line 4: not UTF-8", case.write("b.txt", "\n\n\nb\udcff".encode("utf-8", "surrogateescape")))


def test_validation_is_of_all_inputs(case):
    """Each input gives its share, whatever its kind and the length of its documents; the first ones are mixed."""
    texts = {name: [f"{name} {i} " + sample(i, 300) for i in range(60)] for name in ("a", "b", "c")}
    case.write("a.txt", joined(texts["a"]))
    case.write("b.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts["b"]))
    case.write("c.json.xz", json.dumps([{"text": text} for text in texts["c"]], indent=1))
    inputs, everything = ("a.txt", "b.jsonl", "c.json.xz"), [text + "\n" for text in texts["a"]] + texts["b"] + texts["c"]
    corpus = case.prepare(*inputs, "--val-fraction", 0.2)
    val, train = corpus.documents("val"), corpus.documents("train")
    assert sorted(val + train) == sorted(everything) and train == [text for text in everything if text not in val]
    assert corpus.meta["vocabulary"] == case.vocabulary and corpus.meta["version"] == 1
    assert corpus.meta["tokenizer"] == "gpt2" and corpus.meta["sources"] == [*inputs]
    names = [text[0] for text in val]
    assert {name: names.count(name) for name in "abc"} == dict.fromkeys("abc", 12), names
    assert len(set(names[:12])) == 3 and names != sorted(names), names
    other = case.prepare(*inputs, "--val-fraction", 0.2, "--seed", 2, out="other").documents("val")
    assert sorted(other) != sorted(val) and len(other) == len(val)
    val = case.prepare("c.json.xz", "--val", "a.txt", "b.jsonl", out="named").documents("val")
    assert len({text[0] for text in val[:12]}) == 2 and len(val) == 120
    val = case.prepare("b.jsonl", "--val", "c.json.xz", out="single").documents("val")
    assert val == texts["c"], "a single file keeps its order"


def test_validation_of_long_documents(case):
    """Long documents give stretches of themselves, about a tenth of a small corpus."""
    lines, words = "".join(f"line {i} and the rest é\n" for i in range(2000)), "word " * 9000
    cases = ([lines], [words], ["日本" * 30000], [sample(i, 20000) for i in range(3)], ["the " * 500] * 50, ["a b c d\n" * 1000])
    sys.path.insert(0, str(ROOT / "data"))
    import prepare

    for count, share, seed in itertools.product((2, 3, 60), (0.005, 0.1, 0.9), range(100)):
        documents = [(True, f"{i}") for i in range(count)]
        assert [(begins, text) for _, begins, text in prepare.draw(documents, share, seed)] == documents
    for i, books in enumerate(cases):
        names = [case.write(f"{i}_{j}.txt", book) for j, book in enumerate(books)]
        corpus = case.prepare(*names, out=f"it's {i}")
        val, train, whole = corpus.documents("val"), corpus.documents("train"), "".join(books)
        assert 0.07 < sum(map(len, val)) / len(whole) < 0.12 and len(val) >= 2, (i, len(val))
        assert sum(map(len, val + train)) == len(whole) and all(text in whole for text in val + train)
        assert len(train) <= len(books) + len(val)


def test_threads_and_shards(case):
    documents = [sample(i, 30000) for i in range(20)] + [sample(99, 50000) * 22]
    name = case.write("a.txt", joined(documents))
    one = case.prepare(name, "--workers", 1, "--shard-tokens", 100000, out="one")
    many = case.prepare(name, "--workers", 3, "--shard-tokens", "1e5", out="many")
    files = sorted(p.name for p in one.folder.iterdir())
    assert files == sorted(p.name for p in many.folder.iterdir()) and len(files) > 8
    assert all((one.folder / file).read_bytes() == (many.folder / file).read_bytes() for file in files)
    assert {len(shard) for shard in one.shards("train")[:-1]} == {100000}
    texts = one.documents("val") + one.documents("train")
    assert sum(map(len, texts)) == sum(len(text) + 1 for text in documents)


def test_limit_and_force(case):
    name = case.write("a.txt", joined([sample(i, 5000) for i in range(300)]))
    corpus = case.prepare(name, "--limit-tokens", 70000, "--shard-tokens", "3e4", "--workers", 2)
    assert [len(shard) for shard in corpus.shards("train")] == [30000, 30000, 10000]
    case.refuse("exists already", name, "--out", "out")
    late = case.prepare(name, "--limit-tokens", 500, "--val-fraction", 0.005, "--seed", 2, out="late")
    assert late.meta["train"]["tokens"] == 500 and late.documents("val")
    corpus = case.prepare(name, "--limit-tokens", 500, "--force")
    assert corpus.meta["train"]["tokens"] == 500 and corpus.documents("val")
    (corpus.folder / "notes").write_text("mine")
    case.refuse("left alone", name, "--out", "out", "--force")
    assert (corpus.folder / "notes").exists()


def test_long_document_in_pieces(case):
    """A document cut into small pieces has the tokens of the whole."""
    sys.path.insert(0, str(ROOT / "data"))
    import input_files
    import vocabulary

    words, pieces = vocabulary.open_vocabulary(case.folder / "vocabulary"), 0
    for seed in range(30):
        text = sample(seed, 2000) + "and's" + "and" * 300 + " " * 200 + sample(seed + 99, 700)
        for size in (1, 7, 3000):  # of the blocks in which the text comes
            parts = list(input_files.cut((text[at : at + size] for at in range(0, len(text), size)), 50))
            assert "".join(part for _, part, _ in parts) == text and [begins for begins, _, _ in parts].count(True) == 1
            assert all(lines == "".join(part for _, part, _ in parts[:i]).count("\n") for i, (_, _, lines) in enumerate(parts))
            assert [token for _, part, _ in parts for token in words.encode(part)] == words.encode(text).tolist(), seed
            pieces += len(parts)
    assert pieces > 5000, pieces
    for length in (*range(30, 60), *range(980, 1020)):  # a separator near the end of a piece
        parts = [(begins, part) for begins, part, _ in input_files.cut(["x" * length + "<|endoftext|>y"], 50)]
        long = [(False, "x" * (length - 1000))] if length > 1000 else []
        assert parts == [(True, "x" * min(length, 1000)), *long, (True, "y")]


MEASURED = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import prepare
code = prepare.main(sys.argv[2:])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
sys.exit(code)
"""


def test_memory_is_bounded(case):
    """A small packed file does not fill the memory, whatever it unpacks to."""
    case.write("v.txt", "validation")
    long = "1 that cannot be used: a.jsonl.zst: line 1: longer than 64 MiB; write one record a line"
    for name, begins, mebibytes, ends, peak, said in (
        ("a.jsonl.zst", b'{"text": "', 512, b'"}\n{"text": "last"}', 400, long),
        ("a.json.zst", b'["', 512, b"", 900, "a.json.zst: an array of more than 256 MiB; write a record a line"),
        ("a.txt.zst", b"", 32, b"", 300, "33,554,432 bytes"),
    ):
        with zstd.open(case.folder / name, "wb") as file:
            file.write(begins)
            for _ in range(mebibytes):
                file.write(b"a" * (1 << 20))
            file.write(ends)
        words = [name, "--val", "v.txt", "--out", name + "d", "--workers", "1", "--tokenizer", "vocabulary"]
        done = case.typed(sys.executable, "-c", MEASURED, ROOT / "data", *words)
        assert said in done.stdout + done.stderr and "Traceback" not in done.stderr, done
        assert int(done.stdout.rpartition("peak")[2]) < peak, (name, done.stdout)


def test_unicode_tables(case):
    """data/unicode.h and dev/reference/words.txt are what tiktoken says today."""
    case.typed(sys.executable, ROOT / "dev/reference/make_unicode.py", "--check", status=0)


def library(case):
    """Compiles data/*.c and loads it. Returns None without a compiler."""
    sources = sorted(map(str, (ROOT / "data").glob("*.c")))
    made = case.folder / "data.so"
    try:
        done = subprocess.run(
            ["cc", "-shared", "-fPIC", "-D_GNU_SOURCE", "-O0", "-w", "-pthread", "-fopenmp", *sources, "-o", made, "-lm"],
            capture_output=True,
        )
    except OSError:
        return None
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(made))
    loaded.tokenizer_open.restype = ctypes.c_void_p
    return loaded


def encode_by_c(loaded, folder, text):
    error, data = ctypes.create_string_buffer(8192), text.encode()
    tokenizer = ctypes.c_void_p(loaded.tokenizer_open(str(folder).encode(), error))
    assert tokenizer.value, error.value
    tokens = (ctypes.c_int * len(data))()
    count = loaded.tokenizer_encode(tokenizer, data, ctypes.c_int64(len(data)), tokens, len(data))
    vocabulary, end = loaded.tokenizer_vocabulary(tokenizer), loaded.tokenizer_end(tokenizer)
    loaded.tokenizer_close(tokenizer)
    return list(tokens[:count]), vocabulary, end


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_from_nanogpt(case):
    """The tokens stay; a vocabulary of characters comes along, and without one GPT-2's; a pickle runs no code."""
    text, nano = "wörld of the red\n" * 500, case.folder / "nano"
    characters = sorted(set(text))
    tokens = [characters.index(c) for c in text]
    packed, meta = array.array("H", tokens), {"vocab_size": len(characters), "itos": dict(enumerate(characters))}
    nano.mkdir()

    def convert(out, *words, said="", **more):
        done = case.run("--from-nanogpt", nano, "--out", out, *words, **more)
        assert done.returncode == 0 and said in done.stdout, done
        shards = (case.folder / out / f"{part}_000000.bin" for part in ("train", "val"))
        return [list(memoryview(shard.read_bytes()[1024:]).cast("H")) for shard in shards]

    (nano / "meta.pkl").write_bytes(pickle.dumps(meta))
    (nano / "train.bin").write_bytes(packed)
    (nano / "val.bin").write_bytes(packed[:700])
    assert convert("o16", vocabulary=None) == [tokens, tokens[:700]]
    names = {name: byte for byte, name in byte_names().items()}
    stored = json.loads((case.folder / "o16" / "vocab.json").read_text("utf-8"))
    assert [bytes(names[c] for c in name).decode() for name in stored] == characters
    counts = json.loads((case.folder / "o16" / "meta.json").read_text())
    assert counts["vocabulary"] == len(characters) and counts["train"]["bytes"] == len(text.encode())
    loaded = library(case)
    assert not loaded or encode_by_c(loaded, case.folder / "o16", text[:99])[0] == tokens[:99]
    (nano / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(characters)}))
    said = "no texts of tokens, so no samples"
    assert convert("short", "--limit-tokens", 900, said=said, vocabulary=None) == [tokens[:900], tokens[:700]]
    (nano / "meta.pkl").unlink(), (nano / "val.bin").unlink()
    assert convert("split", "--val-fraction", 0.2)[1] == tokens[-len(tokens) // 5 :]
    shard, other = (case.folder / "split/train_000000.bin").read_bytes(), {"vocab_size": 70000}
    for name, contents, expected in (
        ("train.bin", array.array("H", [300]), f"holds token 300, and the vocabulary has {case.vocabulary}"),
        ("train.bin", array.array("I", tokens), "holds uint32 tokens"),
        ("train.bin", shard, "a shard of tokens already"),
        ("train.bin", b"odd", "train.bin: 3 bytes are no uint16"),
        ("meta.pkl", pickle.dumps({**meta, "itos": Evil()}), "it names the code posix.mkdir"),
        *(("meta.pkl", bad, "meta.pkl: cannot be read") for bad in (b"", b"junk", *map(pickle.dumps, ([1], other, {"itos": [1]})))),
    ):
        (nano / name).write_bytes(contents)
        case.refuse(expected, "--from-nanogpt", nano, vocabulary=None if name == "meta.pkl" else "vocabulary")
    assert not (case.folder / "evil").exists()
    case.refuse("split: holds no train.bin", "--from-nanogpt", "split")
    (nano / "val.bin").write_bytes(packed)
    case.refuse("leave --val-fraction out", "--from-nanogpt", nano, "--val-fraction", 0.1)


def test_interrupted_and_killed(case):
    """It leaves nothing under the name OUT, and a second one does not write into its OUT.tmp."""
    name, small = case.write("a.txt", sample(1, 100_000) * 150), case.write("b.txt", "the\n" * 99)
    command = [sys.executable, str(ROOT / "data" / "prepare.py"), name, "--tokenizer", "vocabulary", "--out", "o p"]
    for number, status in ((signal.SIGTERM, 130), (signal.SIGKILL, -9)):
        process = case.begun(*command)
        while not list(case.folder.glob("o p.tmp/train_*.bin")):
            assert process.poll() is None and time.sleep(0.05) is None
        case.refuse("o p.tmp: another prepare.py writes it or was killed; wait, or type rm -r 'o p.tmp'", small, "--out", "o p")
        assert ended(process, number)[0] == status and not (case.folder / "o p").exists(), process.returncode
        assert (case.folder / "o p.tmp").exists() == (number == signal.SIGKILL)
    command[2], command[-1] = small, "whole"
    done = case.typed("bash", "-c", shlex.join(command) + ' | true; exit ${PIPESTATUS[0]}', status=0)
    assert done.stderr == "" and Corpus(case.folder / "whole").documents("val"), "nobody reads what is printed"


def test_errors(case):
    good = case.write("good.txt", "the the\n" * 100)
    case.prepare(good, "--val", "./good.txt", out="same", said=["./good.txt is trained on too"])
    escapes = case.write("e.jsonl", '{"\\ud800\\u001b]0;x\\u0007": 1}\n{"text": "the"}\n')
    case.prepare(escapes, "--val", good, out="escapes", said=['no field "text" but ??]0;x?'])
    case.write("utf16.txt", "the the".encode("utf-16-le"))
    case.write("a.tar.gz", "tar"), case.write("tar.gz", b"a/file\0\0\0\0text")
    case.write("empty.txt", ""), case.write("blank.txt", "\n<|endoftext|>\n \n"), case.write("a.csv", "a,b")
    case.write("one.jsonl", '{"text": "a"}\n'), case.write("f.jsonl", '\n{"body": "a"}\n')
    for words, expected in (
        (["none.txt"], "none.txt: no such file"),
        ([good, "--val", "none.txt"], "no such file"),
        (["vocabulary"], "vocabulary: a folder; give its files"),
        (["a.csv"], "a.csv: give a .txt, .jsonl"),
        (["a.tar.gz"], "a.tar.gz: give a .txt, .jsonl"),
        (["tar.gz"], "tar.gz: binary, not text"),
        (["utf16.txt"], "utf16.txt: binary, not text"),
        (["empty.txt"], "no text is found for the part train; give more text"),
        (["blank.txt"], "no text is found for the part train; give more text"),
        (["f.jsonl"], 'line 2: there is no field "text" but body'),
        (["one.jsonl", "--seed", 4], "or some of its own by --val FILE"),
        ([good, "--shard-tokens", 10], "--shard-tokens: '10' was found; type a whole number from 1000 to"),
        ([good, "--workers", "x"], "--workers: 'x' was found; type a whole number"),
        ([good, "--val-fraction", 1], "--val-fraction: '1' was found; type a number from"),
        ([good, "--val", good, "--val-fraction", 0.1], "--val-fraction does not go with --val; leave --val-fraction out"),
        ([good, "--train-bpe", 300], "--tokenizer does not go with --train-bpe; leave --tokenizer out"),
        (["--from-nanogpt", ".", "--workers", 2], "--workers does not go with --from-nanogpt; leave --workers out"),
        ([], "give INPUT or --from-nanogpt FOLDER"),
        *(([good, "--out", out, "--force"], f"--out {out}: the folder needs a name of its own") for out in (".", "/", "..")),
        ([good, "--out", "good.txt/b"], "good.txt: File exists; free space, allow it, or give another"),
    ):
        case.refuse(expected, *words)


def test_no_network(case):
    cached = case.folder / "cache/nibble/raw.githubusercontent.com_karpathy_char-rnn_master_data_tinyshakespeare_input.txt"
    cached.parent.mkdir(parents=True)
    cached.write_text("not Shakespeare")
    for name, part in (("tinyshakespeare", "input.txt"), ("tinystories", "train.txt"), ("fineweb-edu-10B", "000_00000")):
        case.refuse(part, name, **NOWHERE)


def missing():
    """Returns what to type where a library is not there."""
    tools = [sys.executable, "-c", "import crc32c, numpy, pooch, pyarrow, tiktoken, tokenizers, tqdm"]
    there = zstd and subprocess.run(tools, capture_output=True).returncode == 0
    return "" if there else "type `pip install -r data/requirements.txt`"


if __name__ == "__main__":
    sys.exit(run_cases(globals(), Case, missing()))
